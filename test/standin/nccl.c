// libnccl.so.2 for tests without a GPU: the calls that kernels/nccl.h names, over host memory that
// the ranks of one machine share through a file in the current folder. As NCCL does, it waits
// without end for a rank that does not come. Sums are made in the order of the ranks. Calls that do
// not match between ranks, which would hang or corrupt NCCL, abort here.
//
// STANDIN_VERSION: what to report. A file standin-error makes CommGetAsyncError report a failure.
#include "../../kernels/nccl.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = 64, CHUNK = 1 << 16 };

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
    unsigned char area[RANKS][CHUNK];
} Shared;

struct ncclComm {
    int rank, ranks;
    Shared *shared;
};

int ncclGetVersion(int *version);
int ncclGetUniqueId(NcclId *id);
int ncclCommInitRank(NcclComm *comm, int ranks, NcclId id, int rank);
int ncclCommDestroy(NcclComm comm);
int ncclCommGetAsyncError(NcclComm comm, int *error);
const char *ncclGetErrorString(int result);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, NcclComm comm,
                  cudaStream_t stream);
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, NcclComm comm,
                      cudaStream_t stream);
int ncclAllGather(const void *from, void *to, size_t count, int type, NcclComm comm,
                  cudaStream_t stream);

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

int ncclCommInitRank(NcclComm *comm, int ranks, NcclId id, int rank) {
    Shared *shared = ranks <= RANKS ? map(id.internal, O_RDWR) : NULL;
    if (shared == NULL) { return NCCL_SYSTEM_ERROR; }
    NcclComm c = malloc(sizeof(*c));
    *c = (struct ncclComm){rank, ranks, shared};
    barrier(c);
    if (rank == 0) { unlink(id.internal); }
    *comm = c;
    return NCCL_SUCCESS;
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
    return NCCL_SUCCESS;
}

int ncclGroupEnd(void) {
    return NCCL_SUCCESS;
}

static void check_calls(NcclComm c, const char *name, size_t count, int type, int op) {
    Call *calls = c->shared->calls, *mine = &calls[c->rank];
    memset(mine, 0, sizeof(*mine));
    snprintf(mine->name, sizeof(mine->name), "%s", name);
    mine->count = count, mine->type = type, mine->op = op;
    barrier(c);
    for (int r = 0; r < c->ranks; r++) {
        if (memcmp(&calls[r], mine, sizeof(*mine)) == 0) { continue; }
        fprintf(stderr, "stand-in: %s of %zu here, %s of %zu on rank %d\n", name, count,
                calls[r].name, calls[r].count, r);
        abort();
    }
    barrier(c);
}

static size_t type_bytes(int type) {
    switch (type) {
    case NCCL_UINT8: return 1;
    case NCCL_BFLOAT16: return 2;
    case NCCL_FLOAT64: return 8;
    default: return 4;
    }
}

static float from_bf16(uint16_t code) {
    uint32_t bits = (uint32_t)code << 16;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    if (x != x) { return 0x7fff; }
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// out[i] = the sum, or the largest, over the ranks' areas.
#define REDUCE(TYPE)                                                      \
    for (size_t i = 0; i < n; i++) {                                      \
        TYPE all = ((const TYPE *)(const void *)s->area[0])[i];           \
        for (int r = 1; r < c->ranks; r++) {                              \
            TYPE x = ((const TYPE *)(const void *)s->area[r])[i];         \
            all = op == NCCL_SUM ? (TYPE)(all + x) : (x > all ? x : all); \
        }                                                                 \
        ((TYPE *)out)[i] = all;                                           \
    }

static void reduce(NcclComm c, void *out, size_t n, int type, int op) {
    const Shared *s = c->shared;
    switch (type) {
    case NCCL_FLOAT32: REDUCE(float) break;
    case NCCL_FLOAT64: REDUCE(double) break;
    case NCCL_UINT32: REDUCE(uint32_t) break;
    case NCCL_UINT8: REDUCE(uint8_t) break;
    default: // BF16, rounded after every addition, as a ring does
        for (size_t i = 0; i < n; i++) {
            uint16_t all = ((const uint16_t *)(const void *)s->area[0])[i];
            for (int r = 1; r < c->ranks; r++) {
                uint16_t x = ((const uint16_t *)(const void *)s->area[r])[i];
                all = to_bf16(from_bf16(all) + from_bf16(x));
            }
            ((uint16_t *)out)[i] = all;
        }
    }
}

// Every rank's `from`, reduced, to `to` on the ranks that want it.
static void reduce_chunks(NcclComm c, const void *from, void *to, size_t count, int type, int op,
                          int wanted_by) {
    size_t bytes = count * type_bytes(type);
    for (size_t at = 0; at < bytes; at += CHUNK) {
        size_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        memcpy(c->shared->area[c->rank], (const char *)from + at, n);
        barrier(c);
        if (wanted_by < 0 || wanted_by == c->rank) {
            reduce(c, (char *)to + at, n / type_bytes(type), type, op);
        }
        barrier(c);
    }
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, NcclComm c,
                  cudaStream_t stream) {
    (void)stream;
    check_calls(c, "AllReduce", count, type, op);
    reduce_chunks(c, from, to, count, type, op, -1);
    return NCCL_SUCCESS;
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, NcclComm c,
                      cudaStream_t stream) {
    (void)stream;
    size_t part = count * type_bytes(type);
    check_calls(c, "ReduceScatter", count, type, op);
    for (int r = 0; r < c->ranks; r++) {
        reduce_chunks(c, (const char *)from + (size_t)r * part, to, count, type, op, r);
    }
    return NCCL_SUCCESS;
}

int ncclAllGather(const void *from, void *to, size_t count, int type, NcclComm c,
                  cudaStream_t stream) {
    (void)stream;
    size_t part = count * type_bytes(type);
    check_calls(c, "AllGather", count, type, 0);
    for (size_t at = 0; at < part; at += CHUNK) {
        size_t n = part - at < CHUNK ? part - at : CHUNK;
        memcpy(c->shared->area[c->rank], (const char *)from + at, n);
        barrier(c);
        for (int r = 0; r < c->ranks; r++) {
            memcpy((char *)to + (size_t)r * part + at, c->shared->area[r], n);
        }
        barrier(c);
    }
    return NCCL_SUCCESS;
}
