#include "verify_nccl.h"
#include "../../kernels/nccl.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { RUNS = 10, PERIOD = 1021 };

// One process with all GPUs: a rank each, whose calls NCCL takes as a group.
typedef struct {
    float *buffer;
    cudaStream_t stream;
    NcclComm comm;
} Member;

typedef struct {
    Nccl nccl;
    NcclCheck what;
    Member *members; // [gpus]
    bool broken;     // a call of NCCL has failed
} Ring;

static bool cuda_well(cudaError_t status, int device, const char *call, Error *err) {
    if (status == cudaSuccess) { return true; }
    return fail(err, "GPU %d: %s: %s", device, call, cudaGetErrorString(status));
}

#define CUDA(call) cuda_well((call), d, #call, err)

static bool nccl_well(Ring *r, int status, const char *call, Error *err) {
    if (status == NCCL_SUCCESS) { return true; }
    r->broken = true;
    return fail(err, "nccl%s: %s (NCCL_DEBUG=INFO tells more)", call,
                r->nccl.GetErrorString(status));
}

// What rank d puts in; whole numbers, so that sums are exact in any order.
static float value_of(int d, int64_t i) {
    return (float)(i % PERIOD + d);
}

static bool fill(const Ring *r, Error *err) {
    size_t bytes = (size_t)r->what.elements * sizeof(float);
    float *values = malloc_or_die(bytes);
    bool well = true;
    for (int d = 0; well && d < r->what.gpus; d++) {
        for (int64_t i = 0; i < r->what.elements; i++) { values[i] = value_of(d, i); }
        well = CUDA(cudaSetDevice(d)) &&
               CUDA(cudaMemcpy(r->members[d].buffer, values, bytes, cudaMemcpyHostToDevice));
    }
    free(values);
    return well;
}

static bool join(Ring *r, Error *err) {
    NcclId id;
    size_t bytes = (size_t)r->what.elements * sizeof(float);
    for (int d = 0; d < r->what.gpus; d++) {
        Member *m = &r->members[d];
        if (!CUDA(cudaSetDevice(d)) || !CUDA(cudaMalloc((void **)&m->buffer, bytes)) ||
            !CUDA(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking))) {
            return false;
        }
    }
    if (!nccl_well(r, r->nccl.GetUniqueId(&id), "GetUniqueId", err)) { return false; }
    bool well = nccl_well(r, r->nccl.GroupStart(), "GroupStart", err);
    for (int d = 0; well && d < r->what.gpus; d++) {
        well = CUDA(cudaSetDevice(d)) &&
               nccl_well(r, r->nccl.CommInitRank(&r->members[d].comm, r->what.gpus, id, d),
                         "CommInitRank", err);
    }
    return well && nccl_well(r, r->nccl.GroupEnd(), "CommInitRank", err);
}

static bool all_reduce(Ring *r, Error *err) {
    bool well = nccl_well(r, r->nccl.GroupStart(), "GroupStart", err);
    for (int d = 0; well && d < r->what.gpus; d++) {
        const Member *m = &r->members[d];
        well = nccl_well(r,
                         r->nccl.AllReduce(m->buffer, m->buffer, (size_t)r->what.elements,
                                           NCCL_FLOAT32, NCCL_SUM, m->comm, m->stream),
                         "AllReduce", err);
    }
    return well && nccl_well(r, r->nccl.GroupEnd(), "AllReduce", err);
}

static bool wait_for_all(const Ring *r, Error *err) {
    for (int d = 0; d < r->what.gpus; d++) {
        if (!CUDA(cudaSetDevice(d)) || !CUDA(cudaStreamSynchronize(r->members[d].stream))) {
            return false;
        }
    }
    return true;
}

static bool check_sums(const Ring *r, Error *err) {
    size_t bytes = (size_t)r->what.elements * sizeof(float);
    float *values = malloc_or_die(bytes);
    int n = r->what.gpus;
    bool well = true;
    for (int d = 0; well && d < n; d++) {
        well = CUDA(cudaSetDevice(d)) &&
               CUDA(cudaMemcpy(values, r->members[d].buffer, bytes, cudaMemcpyDeviceToHost));
        for (int64_t i = 0; well && i < r->what.elements; i++) {
            float expected = (float)n * value_of(0, i) + (float)(n * (n - 1) / 2);
            if (values[i] == expected) { continue; }
            well = fail(err, "GPU %d has %g where the sum over %d GPUs is %g", d, values[i], n,
                        expected);
        }
    }
    free(values);
    return well;
}

// Seconds of an all-reduce. What is in the buffers then counts for nothing.
static bool time_it(Ring *r, double *seconds, Error *err) {
    if (!all_reduce(r, err) || !wait_for_all(r, err)) { return false; }
    double begin = wall_seconds();
    for (int i = 0; i < RUNS; i++) {
        if (!all_reduce(r, err)) { return false; }
    }
    if (!wait_for_all(r, err)) { return false; }
    *seconds = (wall_seconds() - begin) / RUNS;
    return true;
}

// What NCCL has failed to do may hang in being taken down.
static void leave(Ring *r) {
    for (int d = 0; d < r->what.gpus; d++) {
        Member *m = &r->members[d];
        cudaSetDevice(d);
        if (m->comm != NULL && !r->broken) { r->nccl.CommDestroy(m->comm); }
        if (m->stream != NULL) { cudaStreamDestroy(m->stream); }
        cudaFree(m->buffer);
    }
    free(r->members);
}

// NCCL waits without end for a GPU that does not answer.
static void give_up(int signal_number) {
    static const char text[] =
        "  " NCCL_ROW "        BAD  no answer: NCCL hangs here; NCCL_DEBUG=INFO says where, "
        "and NCCL_NVLS_ENABLE=0 or NCCL_P2P_DISABLE=1 may go round it\n";
    (void)signal_number;
    if (write(STDOUT_FILENO, text, sizeof(text) - 1) < 0) { _exit(EXIT_FAILURE); }
    _exit(EXIT_FAILURE);
}

static bool run(Ring *r, char *text, size_t room) {
    Error err;
    double seconds;
    int version = 0, n = r->what.gpus;
    if (!join(r, &err) || !fill(r, &err) || !all_reduce(r, &err) || !wait_for_all(r, &err) ||
        !check_sums(r, &err) || !time_it(r, &seconds, &err)) {
        snprintf(text, room, "%s", err.text);
        return false;
    }
    double bytes = (double)r->what.elements * sizeof(float);
    r->nccl.GetVersion(&version);
    snprintf(text, room,
             "version %d.%d.%d, %d GPUs: sums exact, %.0f MiB in %.2f ms, bus bandwidth %.0f GB/s",
             version / 10000, version / 100 % 100, version % 100, n, bytes / (1 << 20),
             1e3 * seconds, 2e-9 * bytes * (n - 1) / n / seconds);
    return true;
}

NcclVerdict nccl_self_check(NcclCheck what, char *text, size_t room) {
    Ring r = {.what = what};
    Error err;
    int device = 0;
    if (what.gpus < 2) {
        snprintf(text, room, "not tested: there is one GPU to see");
        return NCCL_NOT_TESTED;
    }
    if (!nccl_load(&r.nccl, &err)) {
        snprintf(text, room, "not tested: %s", err.text);
        return NCCL_NOT_TESTED;
    }
    fflush(stdout);
    signal(SIGALRM, give_up);
    alarm(what.seconds);
    cudaGetDevice(&device);
    r.members = calloc_or_die((size_t)what.gpus, sizeof(*r.members));
    bool well = run(&r, text, room);
    leave(&r);
    cudaSetDevice(device);
    alarm(0);
    return well ? NCCL_WELL : NCCL_BAD;
}
