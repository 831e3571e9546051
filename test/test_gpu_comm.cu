// Collectives over NCCL, on every GPU of this machine: those that test_comm.c tests on the CPU, and
// what only a GPU can show: two streams, and graphs. The ranks are started as a trainer starts
// them. Skipped where there is one GPU.
#define TEST_OWN_MAIN
#include "../ranks/launch.h"
#include "../train/gpu/comm.h"
#include "comm_checks.h"
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

#if __has_include(<nccl.h>)
#include <nccl.h>
#define SAME(ours, theirs) static_assert((int)(ours) == (int)(theirs), #ours)
SAME(sizeof(NcclId), sizeof(ncclUniqueId));
SAME(sizeof(int), sizeof(ncclResult_t));
SAME(sizeof(int), sizeof(ncclDataType_t));
SAME(sizeof(int), sizeof(ncclRedOp_t));
SAME(NCCL_SUCCESS, ncclSuccess);
SAME(NCCL_SYSTEM_ERROR, ncclSystemError);
SAME(NCCL_INTERNAL_ERROR, ncclInternalError);
SAME(NCCL_REMOTE_ERROR, ncclRemoteError);
SAME(NCCL_IN_PROGRESS, ncclInProgress);
SAME(NCCL_UINT8, ncclUint8);
SAME(NCCL_UINT32, ncclUint32);
SAME(NCCL_FLOAT32, ncclFloat32);
SAME(NCCL_FLOAT64, ncclFloat64);
SAME(NCCL_BFLOAT16, ncclBfloat16);
SAME(NCCL_SUM, ncclSum);
SAME(NCCL_MAX, ncclMax);

// Compares each call with its declaration in nccl.h; results and enums are int here.
template <typename... A> static int arguments(ncclResult_t (*)(A...)) {
    return sizeof...(A);
}
template <typename... A> static int arguments(int (*)(A...)) {
    return sizeof...(A);
}
#endif

static Group group;
static Comm comm;
static Gpu gpu; // only its stream is set

// The number of faults on all ranks together; rank 0 judges.
static int wrong_anywhere(int wrong) {
    enum { MOST = 64 };
    int all[MOST] = {}, sum = 0;
    group_gather(&group, CHANNEL_MAIN, &wrong, sizeof(wrong), all);
    for (int r = 0; r < group.ranks; r++) { sum += all[r]; }
    return group.rank == 0 ? sum : 0;
}

TEST(declarations_are_nccls) {
#if __has_include(<nccl.h>)
    Nccl n = {};
    CHECK_EQUAL(arguments(n.GetVersion), arguments(ncclGetVersion));
    CHECK_EQUAL(arguments(n.GetUniqueId), arguments(ncclGetUniqueId));
    CHECK_EQUAL(arguments(n.CommInitRank), arguments(ncclCommInitRank));
    CHECK_EQUAL(arguments(n.CommDestroy), arguments(ncclCommDestroy));
    CHECK_EQUAL(arguments(n.CommGetAsyncError), arguments(ncclCommGetAsyncError));
    CHECK_EQUAL(arguments(n.AllReduce), arguments(ncclAllReduce));
    CHECK_EQUAL(arguments(n.ReduceScatter), arguments(ncclReduceScatter));
    CHECK_EQUAL(arguments(n.AllGather), arguments(ncclAllGather));
    CHECK_EQUAL(arguments(n.Send), arguments(ncclSend));
    CHECK_EQUAL(arguments(n.Recv), arguments(ncclRecv));
    CHECK_EQUAL(arguments(n.GroupStart), arguments(ncclGroupStart));
    CHECK_EQUAL(arguments(n.GroupEnd), arguments(ncclGroupEnd));
#else
    test_skip("no nccl.h here");
#endif
}

TEST(collectives_are_right) {
    CHECK(comm.ranks > 1);
    CHECK_EQUAL(wrong_anywhere(check_collectives(&comm)), 0);
}

TEST(a_wrong_value_is_seen) {
    comm.rank = 0; // as if every rank held rank 0's values
    int wrong = check_all_reduce(&comm, COMM_F32, COMM_SUM, 1000);
    comm.rank = group.rank;
    int all = wrong_anywhere(wrong);
    CHECK_EQUAL(all, group.rank == 0 ? group.ranks : 0);
}

// A large sum on the communication stream, then a graph on the compute stream that waits for it,
// copies it and sums the copies: each launch must see the sum that was begun before it.
TEST(graphs_wait_and_reduce) {
    const int64_t count = 16 << 20;
    const size_t bytes = count * sizeof(float);
    float *x, *y, *host = (float *)malloc_or_die(bytes);
    cudaGraph_t graph;
    cudaGraphExec_t launched = NULL;
    int wrong = 0;
    CUDA_CHECK(cudaMalloc(&x, bytes));
    CUDA_CHECK(cudaMalloc(&y, bytes));
    for (int turn = 0; turn < 4; turn++) {
        for (int64_t i = 0; i < count; i++) { host[i] = (float)(turn + group.rank + i % 3); }
        CUDA_CHECK(cudaMemcpyAsync(x, host, bytes, cudaMemcpyHostToDevice, gpu.stream));
        CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
        comm_begin(&comm);
        comm_all_reduce(&comm, x, COMM_F32, COMM_SUM, count);
        comm_end(&comm, 0);
        if (launched == NULL) {
            CUDA_CHECK(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
            comm_wait(&comm, 0);
            CUDA_CHECK(cudaMemcpyAsync(y, x, bytes, cudaMemcpyDeviceToDevice, gpu.stream));
            comm_begin(&comm);
            comm_all_reduce(&comm, y, COMM_F32, COMM_SUM, count);
            comm_end(&comm, 1);
            comm_wait(&comm, 1);
            comm_join(&comm);
            CUDA_CHECK(cudaStreamEndCapture(gpu.stream, &graph));
            CUDA_CHECK(cudaGraphInstantiate(&launched, graph, 0));
            CUDA_CHECK(cudaGraphDestroy(graph));
        }
        CUDA_CHECK(cudaGraphLaunch(launched, gpu.stream));
        CUDA_CHECK(cudaMemcpyAsync(host, y, bytes, cudaMemcpyDeviceToHost, gpu.stream));
        CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
        int n = group.ranks, ranks_sum = n * (n - 1) / 2;
        for (int64_t i = 0; i < count; i++) {
            float expected = (float)(n * (n * (turn + i % 3) + ranks_sum));
            wrong += !(host[i] == expected);
        }
    }
    CHECK_EQUAL(wrong_anywhere(wrong), 0);
    CUDA_CHECK(cudaGraphExecDestroy(launched));
    CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(y));
    free(host);
}

// Counts in a process of its own: launch() forks, and an open CUDA device does not survive that.
static int count_devices(void) {
    int status = 0, count = 0;
    pid_t id = fork();
    if (id == 0) { _exit(cudaGetDeviceCount(&count) == cudaSuccess ? count : 0); }
    return id > 0 && waitpid(id, &status, 0) == id && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

int main(int, char **argv) {
    static Options options;
    int devices = count_devices(), device;
    if (devices < 2) { test_skip_all("fewer than two GPUs"); }
    bool ok = options_read(&options, 1, argv) && options_resolve(&options, NULL);
    or_die(ok);
    options.gpus = devices;
    options.distributed_timeout = 60;
    launch(&group, &options);
    or_die(ranks_device(&group, devices, &device));
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
    or_die(comm_open(&comm, &group, &gpu, COMM_CHECK_SLOTS));
    int status = run_tests();
    comm_close(&comm);
    group_close(&group);
    return status;
}
