#include "comm.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Ends the program if a call of NCCL has failed. If the end of another rank may be the cause, the
// watchdog reports that rank.
static void check_nccl(const Comm *c, int status, const char *call) {
    char text[160];
    if (status == NCCL_SUCCESS) { return; }
    snprintf(text, sizeof(text), "nccl%s: %s", call, c->nccl.GetErrorString(status));
    bool remote = status == NCCL_SYSTEM_ERROR || status == NCCL_INTERNAL_ERROR ||
                  status == NCCL_REMOTE_ERROR;
    if (remote && c->group->watch != NULL) { watch_lost(c->group->watch, text); }
    die("%s (NCCL_DEBUG=INFO tells more)", text);
}

#define NCCL(c, call) check_nccl(c, (c)->nccl.call, #call)

// ---- opening ------------------------------------------------------------------------------------

// What the ranks compare before NCCL connects them. If two ranks have different versions of NCCL,
// or the same GPU, NCCL hangs or does not report the cause.
typedef struct {
    int version;            // of NCCL
    char host[64], bus[32]; // the machine, and the GPU's PCI address
} Card;

static bool check_cards(const Card *cards, int ranks) {
    for (int r = 0; r < ranks; r++) {
        const Card *card = &cards[r];
        if (card->version != cards[0].version) {
            return fail("rank %d on %s has NCCL %d, rank 0 has %d: all ranks need the same", r,
                        card->host, card->version, cards[0].version);
        }
        for (int q = 0; q < r; q++) {
            if (strcmp(card->host, cards[q].host) != 0 || strcmp(card->bus, cards[q].bus) != 0) {
                continue;
            }
            return fail("ranks %d and %d both have GPU %s of %s: start no more ranks than GPUs, "
                        "each with its own LOCAL_RANK",
                        q, r, card->bus, card->host);
        }
    }
    return true;
}

// Returns false if NCCL has an error that no call returns, such as a broken network.
static bool probe(void *argument) {
    const Comm *c = argument;
    int error = NCCL_SUCCESS;
    int status = c->nccl.CommGetAsyncError(c->comm, &error);
    if (status != NCCL_SUCCESS) { error = status; }
    if (error == NCCL_SUCCESS || error == NCCL_IN_PROGRESS) { return true; }
    return fail("NCCL: %s (NCCL_DEBUG=INFO tells more)", c->nccl.GetErrorString(error));
}

bool comm_open(Comm *c, Group *group, Gpu *gpu, int slots) {
    NcclId id;
    Card mine;
    int least, greatest, device;
    *c = (Comm){.ranks = 1, .gpu = gpu};
    if (group == NULL || group->ranks == 1) { return true; }
    *c = (Comm){.rank = group->rank, .ranks = group->ranks, .group = group, .gpu = gpu};
    if (!group_agree(group, CHANNEL_MAIN, nccl_load(&c->nccl))) { return false; }
    memset(&mine, 0, sizeof(mine));
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetPCIBusId(mine.bus, sizeof(mine.bus), device));
    NCCL(c, GetVersion(&mine.version));
    if (gethostname(mine.host, sizeof(mine.host) - 1) != 0) { strcpy(mine.host, "?"); }
    FREED Card *cards = calloc_or_die((size_t)c->ranks, sizeof(Card));
    group_gather(group, CHANNEL_MAIN, &mine, sizeof(mine), cards);
    bool fit = c->rank > 0 || check_cards(cards, c->ranks);
    if (!group_agree(group, CHANNEL_MAIN, fit)) { return false; }
    memset(&id, 0, sizeof(id));
    if (c->rank == 0) { NCCL(c, GetUniqueId(&id)); }
    group_broadcast(group, CHANNEL_MAIN, &id, sizeof(id));
    NCCL(c, CommInitRank(&c->comm, c->ranks, id, c->rank));
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&c->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&c->joined, cudaEventDisableTiming));
    c->slots = slots;
    c->done = calloc_or_die((size_t)slots, sizeof(*c->done));
    c->captured = calloc_or_die((size_t)slots, sizeof(*c->captured));
    for (int i = 0; i < slots; i++) {
        CUDA_CHECK(cudaEventCreateWithFlags(&c->done[i], cudaEventDisableTiming));
    }
    watch_probe(group->watch, probe, c);
    return true;
}

void comm_close(Comm *c) {
    if (c->ranks <= 1) { return; }
    watch_probe(c->group->watch, NULL, NULL);
    CUDA_CHECK(cudaStreamSynchronize(c->stream));
    NCCL(c, CommDestroy(c->comm));
    for (int i = 0; i < c->slots; i++) { CUDA_CHECK(cudaEventDestroy(c->done[i])); }
    CUDA_CHECK(cudaEventDestroy(c->joined));
    CUDA_CHECK(cudaEventDestroy(c->ready));
    CUDA_CHECK(cudaStreamDestroy(c->stream));
    free(c->done);
    free(c->captured);
    *c = (Comm){.ranks = 1};
}

// ---- collectives --------------------------------------------------------------------------------

static const struct {
    int nccl, bytes;
} types[] = {
    [COMM_F32] = {NCCL_FLOAT32, 4}, [COMM_BF16] = {NCCL_BFLOAT16, 2},
    [COMM_F64] = {NCCL_FLOAT64, 8}, [COMM_U32] = {NCCL_UINT32, 4},
    [COMM_U8] = {NCCL_UINT8, 1},
};

_Static_assert((int)COMM_F32 == (int)TYPE_F32 && (int)COMM_BF16 == (int)TYPE_BF16, "GpuType's");

static bool is_capturing(cudaStream_t stream) {
    enum cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status == cudaStreamCaptureStatusActive;
}

void comm_begin(Comm *c) {
    if (c->ranks == 1) { return; }
    assert(!c->begun);
    c->begun = true;
    CUDA_CHECK(cudaEventRecord(c->ready, c->gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(c->stream, c->ready, 0));
    NCCL(c, GroupStart());
}

void comm_end(Comm *c, int slot) {
    if (c->ranks == 1) { return; }
    assert(c->begun && slot >= 0 && slot < c->slots);
    c->begun = false;
    NCCL(c, GroupEnd());
    CUDA_CHECK(cudaEventRecord(c->done[slot], c->stream));
    c->captured[slot] = is_capturing(c->stream);
}

void comm_reduce_scatter(Comm *c, void *buffer, CommType type, int64_t count) {
    if (c->ranks == 1) { return; }
    assert(c->begun);
    char *own = (char *)buffer + c->rank * count * types[type].bytes;
    NCCL(c,
         ReduceScatter(buffer, own, (size_t)count, types[type].nccl, NCCL_SUM, c->comm, c->stream));
}

void comm_all_gather(Comm *c, void *buffer, CommType type, int64_t count) {
    if (c->ranks == 1) { return; }
    assert(c->begun);
    const char *own = (const char *)buffer + c->rank * count * types[type].bytes;
    NCCL(c, AllGather(own, buffer, (size_t)count, types[type].nccl, c->comm, c->stream));
}

void comm_all_reduce(Comm *c, void *buffer, CommType type, CommOp op, int64_t count) {
    if (c->ranks == 1) { return; }
    assert(c->begun);
    NCCL(c, AllReduce(buffer, buffer, (size_t)count, types[type].nccl,
                      op == COMM_SUM ? NCCL_SUM : NCCL_MAX, c->comm, c->stream));
}

void comm_send(Comm *c, void *buffer, CommType type, int64_t count, int from, int to) {
    size_t n = (size_t)count;
    if (from == to || (c->rank != from && c->rank != to)) { return; }
    assert(c->begun);
    if (c->rank == from) {
        NCCL(c, Send(buffer, n, types[type].nccl, to, c->comm, c->stream));
    } else {
        NCCL(c, Recv(buffer, n, types[type].nccl, from, c->comm, c->stream));
    }
}

void comm_wait(Comm *c, int slot) {
    if (c->ranks == 1) { return; }
    assert(slot >= 0 && slot < c->slots);
    gpu_family(c->gpu, FAMILY_COMMUNICATION);
    bool capturing = is_capturing(c->gpu->stream);
    assert(capturing || !c->captured[slot]); // the event exists only in the graph of its capture
    unsigned flags = capturing && !c->captured[slot] ? cudaEventWaitExternal : 0;
    CUDA_CHECK(cudaStreamWaitEvent(c->gpu->stream, c->done[slot], flags));
}

void comm_join(Comm *c) {
    if (c->ranks == 1) { return; }
    gpu_family(c->gpu, FAMILY_COMMUNICATION);
    // no collective has begun in this capture, so there is none to join
    if (is_capturing(c->gpu->stream) && !is_capturing(c->stream)) { return; }
    CUDA_CHECK(cudaEventRecord(c->joined, c->stream));
    CUDA_CHECK(cudaStreamWaitEvent(c->gpu->stream, c->joined, 0));
}
