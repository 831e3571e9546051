// libnccl.so.2 for tests without a GPU: the calls that kernels/nccl.h names, over host memory that
// the ranks of one machine share through a file in the current folder. As NCCL does, it waits
// forever for a rank that does not come. Sums are made in the order of the ranks. Calls that do not
// match between ranks, which would hang or corrupt NCCL, abort here. Calls between GroupStart and
// GroupEnd are made in GroupEnd, by one thread per rank, so that one process may have several
// ranks. GroupEnd makes each rank's sends and receives one after another, so all ranks must list
// them in the same order.
//
// STANDIN_VERSION: the version to report. A file standin-error makes CommGetAsyncError report a
// failure, standin-wrong makes rank 1's sums wrong, standin-hang makes joining wait forever.
#include "../../kernels/nccl.h"
#include "../../kernels/fp8_format.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = 64, CHUNK = 1 << 16, GATHER = -1 };

typedef struct {
    char name[16];
    size_t count;
    int type, op;
} Call;

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int arrived;
    unsigned turn;
    Call calls[RANKS];
    struct {
        int to;       // the rank that is to receive the sender's area
        size_t bytes; // bytes in the area; 0: they have been received
    } mail[RANKS];
    unsigned char area[RANKS][CHUNK];
} Shared;

struct ncclComm {
    int rank, ranks;
    Shared *shared;
};

// A call that waits for GroupEnd, and then for its turn on its stream. made: where CommInitRank's
// result is written.
typedef struct Waiting {
    int (*function)(const struct Waiting *w);
    const void *from;
    void *to;
    Call call;
    cudaStream_t stream;
    NcclComm comm, *made;
    NcclId id;
    int rank, ranks;
} Waiting;

enum { WAITING = 1024 };

static _Thread_local struct {
    bool open;
    int count;
    Waiting calls[WAITING];
} group;

int ncclGetVersion(int *version) {
    const char *text = getenv("STANDIN_VERSION");
    *version = text != NULL ? atoi(text) : 22809;
    return NCCL_SUCCESS;
}

static Shared *map(const char *path, int flags) {
    int file = open(path, flags | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) { return NULL; }
    void *shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return shared == MAP_FAILED ? NULL : shared;
}

int ncclGetUniqueId(NcclId *id) {
    static atomic_int made;
    snprintf(id->internal, sizeof(id->internal), "standin-%d-%d", (int)getpid(),
             atomic_fetch_add(&made, 1));
    Shared *s = map(id->internal, O_RDWR | O_CREAT | O_EXCL);
    if (s == NULL) { return NCCL_SYSTEM_ERROR; }
    pthread_mutexattr_t mutex;
    pthread_condattr_t condition;
    pthread_mutexattr_init(&mutex);
    pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&s->mutex, &mutex);
    pthread_condattr_init(&condition);
    pthread_condattr_setpshared(&condition, PTHREAD_PROCESS_SHARED);
    pthread_cond_init(&s->changed, &condition);
    munmap(s, sizeof(*s));
    return NCCL_SUCCESS;
}

static void barrier(NcclComm c) {
    Shared *s = c->shared;
    pthread_mutex_lock(&s->mutex);
    unsigned turn = s->turn;
    if (++s->arrived == c->ranks) {
        s->arrived = 0;
        s->turn++;
        pthread_cond_broadcast(&s->changed);
    }
    while (s->turn == turn) { pthread_cond_wait(&s->changed, &s->mutex); }
    pthread_mutex_unlock(&s->mutex);
}

static void make_later(void *argument) {
    Waiting *w = argument;
    if (w->function(w) != NCCL_SUCCESS) { abort(); }
    free(w);
}

// Makes the call on its stream, in its turn.
static int enqueue(const Waiting *w) {
    if (w->stream == NULL) { return w->function(w); }
    Waiting *kept = malloc(sizeof(*kept));
    *kept = *w;
    standin_enqueue(w->stream, make_later, kept);
    return NCCL_SUCCESS;
}

// Makes the call, now or in GroupEnd.
static int make(const Waiting *w) {
    if (!group.open) { return enqueue(w); }
    if (group.count == WAITING) { abort(); }
    group.calls[group.count++] = *w;
    return NCCL_SUCCESS;
}

static int init_rank(const Waiting *w) {
    Shared *shared = map(w->id.internal, O_RDWR);
    if (access("standin-hang", F_OK) == 0) { pause(); }
    if (shared == NULL) { return NCCL_SYSTEM_ERROR; }
    NcclComm c = malloc(sizeof(*c));
    *c = (struct ncclComm){w->rank, w->ranks, shared};
    barrier(c);
    if (w->rank == 0) { unlink(w->id.internal); }
    *w->made = c;
    return NCCL_SUCCESS;
}

int ncclCommInitRank(NcclComm *comm, int ranks, NcclId id, int rank) {
    if (ranks > RANKS) { return NCCL_SYSTEM_ERROR; }
    return make(&(Waiting){init_rank, .made = comm, .id = id, .rank = rank, .ranks = ranks});
}

int ncclCommDestroy(NcclComm c) {
    munmap(c->shared, sizeof(Shared));
    free(c);
    return NCCL_SUCCESS;
}

int ncclCommGetAsyncError(NcclComm comm, int *error) {
    (void)comm;
    *error = access("standin-error", F_OK) == 0 ? NCCL_REMOTE_ERROR : NCCL_SUCCESS;
    return NCCL_SUCCESS;
}

const char *ncclGetErrorString(int result) {
    return result == NCCL_REMOTE_ERROR ? "remote process exited or there was a network error"
                                       : "the stand-in failed";
}

int ncclGroupStart(void) {
    group.open = true;
    return NCCL_SUCCESS;
}

static bool same_rank(const Waiting *a, const Waiting *b) {
    return a->comm == b->comm && a->made == b->made;
}

typedef struct {
    const Waiting *calls, *first;
    int count, status;
} Turn;

// Makes all calls of the rank that made the first one.
static void *take_turn(void *argument) {
    Turn *t = argument;
    for (int i = 0; i < t->count && t->status == NCCL_SUCCESS; i++) {
        if (same_rank(&t->calls[i], t->first)) { t->status = enqueue(&t->calls[i]); }
    }
    return NULL;
}

int ncclGroupEnd(void) {
    Turn turns[RANKS] = {{.calls = NULL}};
    pthread_t threads[RANKS];
    int ranks = 0, status = NCCL_SUCCESS, count = group.count;
    group.open = false;
    group.count = 0;
    for (int i = 0; i < count; i++) {
        bool known = false;
        for (int r = 0; r < ranks; r++) { known |= same_rank(turns[r].first, &group.calls[i]); }
        if (!known) { turns[ranks++] = (Turn){group.calls, &group.calls[i], count, NCCL_SUCCESS}; }
    }
    for (int r = 1; r < ranks; r++) { pthread_create(&threads[r], NULL, take_turn, &turns[r]); }
    if (ranks > 0) { take_turn(&turns[0]); }
    for (int r = 0; r < ranks; r++) {
        if (r > 0) { pthread_join(threads[r], NULL); }
        if (turns[r].status != NCCL_SUCCESS) { status = turns[r].status; }
    }
    return status;
}

static void check_calls(NcclComm c, const Call *call) {
    Call *calls = c->shared->calls, *mine = &calls[c->rank];
    *mine = *call;
    barrier(c);
    for (int r = 0; r < c->ranks; r++) {
        if (strcmp(calls[r].name, mine->name) == 0 && calls[r].count == mine->count &&
            calls[r].type == mine->type && calls[r].op == mine->op) {
            continue;
        }
        fprintf(stderr, "stand-in: %s of %zu here, %s of %zu on rank %d\n", mine->name, mine->count,
                calls[r].name, calls[r].count, r);
        abort();
    }
    barrier(c);
}

static size_t type_bytes(int type) {
    return type == NCCL_UINT8 ? 1 : (type == NCCL_BFLOAT16 ? 2 : (type == NCCL_FLOAT64 ? 8 : 4));
}

static double get(const void *array, int type, size_t i) {
    switch (type) {
    case NCCL_UINT8: return ((const uint8_t *)array)[i];
    case NCCL_UINT32: return ((const uint32_t *)array)[i];
    case NCCL_FLOAT64: return ((const double *)array)[i];
    case NCCL_BFLOAT16: return bf16_decode(((const uint16_t *)array)[i]);
    default: return ((const float *)array)[i];
    }
}

// Rounds x to the type.
static void put(void *array, int type, size_t i, double x) {
    switch (type) {
    case NCCL_UINT8: ((uint8_t *)array)[i] = (uint8_t)x; break;
    case NCCL_UINT32: ((uint32_t *)array)[i] = (uint32_t)x; break;
    case NCCL_FLOAT64: ((double *)array)[i] = x; break;
    case NCCL_BFLOAT16: ((uint16_t *)array)[i] = bf16_encode((float)x); break;
    default: ((float *)array)[i] = (float)x;
    }
}

// out[i] = the sum, or the largest, over the ranks' areas, rounded after every addition, as a ring
// does.
static void reduce(NcclComm c, void *out, size_t n, const Call *call) {
    for (size_t i = 0; i < n; i++) {
        put(out, call->type, i, get(c->shared->area[0], call->type, i));
        for (int r = 1; r < c->ranks; r++) {
            double all = get(out, call->type, i), x = get(c->shared->area[r], call->type, i);
            put(out, call->type, i, call->op == NCCL_SUM ? all + x : (x > all ? x : all));
        }
    }
}

// Chunk by chunk, every rank shares its `count` elements from `from` on. A rank that wants them
// gets them reduced, or the ranks' elements one after another.
static void exchange(const Waiting *w, const char *from, bool wanted) {
    NcclComm c = w->comm;
    size_t each = type_bytes(w->call.type), bytes = w->call.count * each;
    for (size_t at = 0; at < bytes; at += CHUNK) {
        size_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        char *to = (char *)w->to + at;
        memcpy(c->shared->area[c->rank], from + at, n);
        barrier(c);
        if (wanted && w->call.op != GATHER) { reduce(c, to, n / each, &w->call); }
        for (int r = 0; r < c->ranks && w->call.op == GATHER; r++) {
            memcpy(to + (size_t)r * bytes, c->shared->area[r], n);
        }
        barrier(c);
    }
}

static int all_reduce_or_gather(const Waiting *w) {
    check_calls(w->comm, &w->call);
    exchange(w, w->from, true);
    bool spoils = w->call.op != GATHER && access("standin-wrong", F_OK) == 0;
    if (w->comm->rank == 1 && spoils) { *(char *)w->to ^= 1; }
    return NCCL_SUCCESS;
}

static int reduce_scatter(const Waiting *w) {
    size_t part = w->call.count * type_bytes(w->call.type);
    check_calls(w->comm, &w->call);
    for (int r = 0; r < w->comm->ranks; r++) {
        exchange(w, (const char *)w->from + (size_t)r * part, r == w->comm->rank);
    }
    return NCCL_SUCCESS;
}

// Sends or receives chunk by chunk, through the sender's area.
static int send_or_receive(const Waiting *w) {
    Shared *s = w->comm->shared;
    int rank = w->comm->rank, sender = w->to == NULL ? rank : w->rank;
    size_t bytes = w->call.count * type_bytes(w->call.type);
    pthread_mutex_lock(&s->mutex);
    for (size_t at = 0; at < bytes; at += CHUNK) {
        size_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        if (sender == rank) {
            memcpy(s->area[rank], (const char *)w->from + at, n);
            s->mail[rank].to = w->rank;
            s->mail[rank].bytes = n;
            pthread_cond_broadcast(&s->changed);
            while (s->mail[rank].bytes > 0) { pthread_cond_wait(&s->changed, &s->mutex); }
            continue;
        }
        while (s->mail[sender].bytes == 0 || s->mail[sender].to != rank) {
            pthread_cond_wait(&s->changed, &s->mutex);
        }
        if (s->mail[sender].bytes != n) {
            fprintf(stderr, "stand-in: %zu bytes from rank %d, not %zu\n", s->mail[sender].bytes,
                    sender, n);
            abort();
        }
        memcpy((char *)w->to + at, s->area[sender], n);
        s->mail[sender].bytes = 0;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->mutex);
    return NCCL_SUCCESS;
}

int ncclSend(const void *from, size_t count, int type, int peer, NcclComm c, cudaStream_t stream) {
    Call call = {"Send", count, type, GATHER};
    return make(&(Waiting){send_or_receive, from, NULL, call, stream, .comm = c, .rank = peer});
}

int ncclRecv(void *to, size_t count, int type, int peer, NcclComm c, cudaStream_t stream) {
    Call call = {"Recv", count, type, GATHER};
    return make(&(Waiting){send_or_receive, NULL, to, call, stream, .comm = c, .rank = peer});
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, NcclComm c,
                  cudaStream_t stream) {
    Call call = {"AllReduce", count, type, op};
    return make(&(Waiting){all_reduce_or_gather, from, to, call, stream, .comm = c});
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, NcclComm c,
                      cudaStream_t stream) {
    Call call = {"ReduceScatter", count, type, op};
    return make(&(Waiting){reduce_scatter, from, to, call, stream, .comm = c});
}

int ncclAllGather(const void *from, void *to, size_t count, int type, NcclComm c,
                  cudaStream_t stream) {
    Call call = {"AllGather", count, type, GATHER};
    return make(&(Waiting){all_reduce_or_gather, from, to, call, stream, .comm = c});
}
