// --verify: checks the sums of an all-reduce over all GPUs of the machine, and measures its
// bandwidth.
#include "../../kernels/nccl.h"
#include "support.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { RUNS = 10, PERIOD = 1021 };

// One GPU, which is a rank. This process has all ranks, and groups their NCCL calls.
typedef struct {
    float *buffer;
    cudaStream_t stream;
    NcclComm comm;
} Member;

// Ends the program when the time is over, because NCCL waits forever for a GPU that does not
// answer.
static void give_up(int signal_number) {
    static const char text[] =
        "  " NCCL_ROW "        BAD  no answer: NCCL hangs here; NCCL_DEBUG=INFO says where, "
        "and NCCL_NVLS_ENABLE=0 or NCCL_P2P_DISABLE=1 may go round it\n";
    (void)signal_number;
    if (write(STDOUT_FILENO, text, sizeof(text) - 1) < 0) { _exit(EXIT_FAILURE); }
    _exit(EXIT_FAILURE);
}

// These macros end the check at the first call that fails.
#define CUDA(call)                                                         \
    if ((cuda = (call)) != cudaSuccess) {                                  \
        return fail("GPU %d: %s: %s", d, #call, cudaGetErrorString(cuda)); \
    }
#define NCCL(name, ...)                                                                           \
    if ((status = n->name(__VA_ARGS__)) != NCCL_SUCCESS) {                                        \
        return fail("nccl" #name ": %s (NCCL_DEBUG=INFO tells more)", n->GetErrorString(status)); \
    }

// Checks the sums of one all-reduce, and sets *seconds to the time that one takes. values: scratch
// [elements] on the host.
static bool check_all(const Nccl *n, Member *members, int gpus, int64_t elements, float *values,
                      double *seconds) {
    size_t bytes = (size_t)elements * sizeof(float);
    cudaError_t cuda;
    int status;
    NcclId id;
    NCCL(GetUniqueId, &id);
    NCCL(GroupStart);
    for (int d = 0; d < gpus; d++) {
        Member *m = &members[d];
        CUDA(cudaSetDevice(d));
        CUDA(cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking));
        CUDA(cudaMalloc((void **)&m->buffer, bytes));
        // whole numbers, so that sums are exact in any order
        for (int64_t i = 0; i < elements; i++) { values[i] = (float)(i % PERIOD + d); }
        CUDA(cudaMemcpyAsync(m->buffer, values, bytes, cudaMemcpyHostToDevice, m->stream));
        CUDA(cudaStreamSynchronize(m->stream));
        NCCL(CommInitRank, &m->comm, gpus, id, d);
    }
    NCCL(GroupEnd);
    double begin = 0;
    // the first run is checked, one more warms up, the rest are timed
    for (int run = 0; run <= RUNS + 1; run++) {
        NCCL(GroupStart);
        for (const Member *m = members; m < members + gpus; m++) {
            NCCL(AllReduce, m->buffer, m->buffer, (size_t)elements, NCCL_FLOAT32, NCCL_SUM, m->comm,
                 m->stream);
        }
        NCCL(GroupEnd);
        for (int d = 0; d < gpus && (run <= 1 || run == RUNS + 1); d++) {
            const Member *m = &members[d];
            CUDA(cudaSetDevice(d));
            if (run == 0) {
                CUDA(cudaMemcpyAsync(values, m->buffer, bytes, cudaMemcpyDeviceToHost, m->stream));
            }
            CUDA(cudaStreamSynchronize(m->stream));
            for (int64_t i = 0; i < elements && run == 0; i++) {
                float sum = (float)(gpus * (i % PERIOD) + gpus * (gpus - 1) / 2);
                if (!(values[i] == sum)) {
                    return fail("GPU %d has %g where the sum over %d GPUs is %g", d, values[i],
                                gpus, sum);
                }
            }
        }
        if (run == 1) { begin = wall_seconds(); }
    }
    *seconds = (wall_seconds() - begin) / RUNS;
    return true;
}

NcclVerdict nccl_self_check(int gpus, int64_t elements, unsigned seconds, char *text, size_t room) {
    Nccl nccl;
    bool several = gpus > 1 || fail("there is one GPU to see");
    if (!several || !nccl_load(&nccl)) {
        snprintf(text, room, "not tested: %s", error_text());
        return NCCL_NOT_TESTED;
    }
    int device = 0, version = 0;
    double taken = 0, bytes = (double)elements * sizeof(float);
    FREED Member *members = calloc_or_die((size_t)gpus, sizeof(Member));
    FREED float *values = malloc_or_die((size_t)elements * sizeof(float));
    fflush(stdout);
    signal(SIGALRM, give_up);
    alarm(seconds);
    cudaGetDevice(&device);
    bool well = check_all(&nccl, members, gpus, elements, values, &taken);
    for (int d = 0; d < gpus; d++) {
        const Member *m = &members[d];
        cudaSetDevice(d);
        // after a failure, closing NCCL may hang
        if (m->comm != NULL && well) { nccl.CommDestroy(m->comm); }
        if (m->stream != NULL) { cudaStreamDestroy(m->stream); }
        cudaFree(m->buffer);
    }
    cudaSetDevice(device);
    alarm(0);
    nccl.GetVersion(&version);
    if (!well) {
        snprintf(text, room, "%s", error_text());
        return NCCL_BAD;
    }
    snprintf(text, room,
             "version %d.%d.%d, %d GPUs: sums exact, %.0f MiB in %.2f ms, bus bandwidth %.0f GB/s",
             version / 10000, version / 100 % 100, version % 100, gpus, bytes / (1 << 20),
             1e3 * taken, 2e-9 * bytes * (gpus - 1) / gpus / taken);
    return NCCL_WELL;
}
