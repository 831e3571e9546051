#include "gpu.h"
#include "../base/host.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void cuda_check(cudaError_t status, const char *call, const char *file, int line) {
    if (status != cudaSuccess) {
        die("CUDA: %s (%s:%d: %s)", cudaGetErrorString(status), file, line, call);
    }
}

void blas_check(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        die("cuBLASLt: %s (%s:%d: %s)", cublasLtGetStatusString(status), file, line, call);
    }
}

void dnn_check(cudnnStatus_t status, const char *call, const char *file, int line) {
    if (status != CUDNN_STATUS_SUCCESS) {
        char why[512] = "";
        cudnnGetLastErrorString(why, sizeof(why));
        die("cuDNN: %s (%s:%d: %s) %s", cudnnGetErrorString(status), file, line, call, why);
    }
}

bool gpu_open(Gpu *gpu, int device) {
    struct cudaDeviceProp info;
    int count = 0;
    *gpu = (Gpu){.device = device};
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        return fail("no GPU can be used here: %s; ./train_gpt trains on the CPU",
                    status != cudaSuccess ? cudaGetErrorString(status) : "there is none");
    }
    if (device >= count) {
        return fail("GPU %d is requested, but this machine has %d", device, count);
    }
    CUDA_CHECK(cudaGetDeviceProperties(&info, device));
    gpu->capability = 10 * info.major + info.minor;
    gpu->sms = info.multiProcessorCount;
    gpu->memory = info.totalGlobalMem;
    snprintf(gpu->name, sizeof(gpu->name), "%s", info.name);
    int used = snprintf(gpu->uuid, sizeof(gpu->uuid), "GPU");
    for (size_t i = 0; i < sizeof(info.uuid.bytes); i++) {
        bool part = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        used += snprintf(gpu->uuid + used, sizeof(gpu->uuid) - (size_t)used, "%s%02x",
                         part ? "-" : "", (unsigned char)info.uuid.bytes[i]);
    }
    if (gpu->capability < 80) {
        return fail("%s has compute capability %d.%d; BF16 training needs 8.0 (A100) or newer",
                    gpu->name, info.major, info.minor);
    }
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    BLAS_CHECK(cublasLtCreate(&gpu->blas));
    DNN_CHECK(cudnnCreate(&gpu->dnn));
    DNN_CHECK(cudnnSetStream(gpu->dnn, gpu->stream));
    return true;
}

void gpu_close(Gpu *gpu) {
    assert(gpu->gemms == NULL && gpu->attentions == NULL);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    DNN_CHECK(cudnnDestroy(gpu->dnn));
    BLAS_CHECK(cublasLtDestroy(gpu->blas));
    CUDA_CHECK(cudaStreamDestroy(gpu->stream));
}

GpuTimer gpu_timer_begin(const Gpu *gpu) {
    GpuTimer timer;
    CUDA_CHECK(cudaEventCreate(&timer.begin));
    CUDA_CHECK(cudaEventCreate(&timer.end));
    CUDA_CHECK(cudaEventRecord(timer.begin, gpu->stream));
    return timer;
}

float gpu_timer_end(const Gpu *gpu, GpuTimer timer) {
    float ms;
    CUDA_CHECK(cudaEventRecord(timer.end, gpu->stream));
    CUDA_CHECK(cudaEventSynchronize(timer.end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, timer.begin, timer.end));
    CUDA_CHECK(cudaEventDestroy(timer.begin));
    CUDA_CHECK(cudaEventDestroy(timer.end));
    return ms;
}

enum { PROFILE_EVENTS = 1 << 13 };

struct GpuProfile {
    int count;
    cudaEvent_t events[PROFILE_EVENTS];
    GpuFamily families[PROFILE_EVENTS]; // families[i]: the family that is timed from event i on
    double ms[FAMILY_COUNT];            // each family's time before the first event
};

const char *gpu_family_name(GpuFamily family) {
    static const char *const names[FAMILY_COUNT] = {
        "matmuls", "head matmuls", "attention", "norms",     "activations",
        "loss",    "embeddings",   "quantize",  "optimizer", "communication"};
    return names[family];
}

// Adds up the times between the first n + 1 events, once the device has reached these events, and
// removes the first n.
static void add_up(GpuProfile *p, int n) {
    CUDA_CHECK(cudaEventSynchronize(p->events[n]));
    for (int i = 0; i < n; i++) {
        float part;
        CUDA_CHECK(cudaEventElapsedTime(&part, p->events[i], p->events[i + 1]));
        CUDA_CHECK(cudaEventDestroy(p->events[i]));
        p->ms[p->families[i]] += part;
    }
    p->count -= n;
    memmove(p->events, p->events + n, (size_t)p->count * sizeof(p->events[0]));
    memmove(p->families, p->families + n, (size_t)p->count * sizeof(p->families[0]));
}

static void record_family(Gpu *gpu, GpuFamily family) {
    GpuProfile *p = gpu->profile;
    // adds up the first half of the events; meanwhile the device works on the second half
    if (p->count == PROFILE_EVENTS) { add_up(p, PROFILE_EVENTS / 2); }
    CUDA_CHECK(cudaEventCreate(&p->events[p->count]));
    CUDA_CHECK(cudaEventRecord(p->events[p->count], gpu->stream));
    p->families[p->count++] = family;
}

void gpu_family(Gpu *gpu, GpuFamily family) {
    const GpuProfile *p = gpu->profile;
    if (p == NULL || (p->count > 0 && p->families[p->count - 1] == family)) { return; }
    record_family(gpu, family);
}

void gpu_profile_begin(Gpu *gpu) {
    gpu->profile = calloc_or_die(1, sizeof(GpuProfile));
}

void gpu_profile_end(Gpu *gpu, double ms[FAMILY_COUNT]) {
    GpuProfile *p = gpu->profile;
    record_family(gpu, FAMILY_MATMULS); // ends the last family's time; no kernel follows
    add_up(p, p->count - 1);
    CUDA_CHECK(cudaEventDestroy(p->events[0]));
    memcpy(ms, p->ms, sizeof(p->ms));
    free(p);
    gpu->profile = NULL;
}

// Returns whether the name contains the whole words of `part`: "NVIDIA GB200" lacks "B200".
static bool has_words(const char *name, const char *part) {
    for (const char *at = name; (at = strstr(at, part)) != NULL; at++) {
        bool begins = at == name || !isalnum((unsigned char)at[-1]);
        if (begins && !isalnum((unsigned char)at[strlen(part)])) { return true; }
    }
    return false;
}

double gpu_peak_flops(const Gpu *gpu) {
    // TFLOP/s from data sheets, without sparsity. The device's name may contain several of these
    // names; the first one is used.
    static const struct {
        const char *name;
        double tflops;
    } peaks[] = {
        {"GB300", 2500},     {"B300", 2250},      {"GB200", 2500},  {"B200", 2250},
        {"GH200", 989},      {"H200 NVL", 835},   {"H200", 989},    {"H100 PCIe", 756},
        {"H100 NVL", 835},   {"H100", 989},       {"H800", 989},    {"H20", 148},
        {"A100", 312},       {"A800", 312},       {"A40", 149.7},   {"A10G", 70},
        {"A10", 125},        {"L40S", 362},       {"L40", 181},     {"L4", 121},
        {"RTX 5090", 209.5}, {"RTX 4090", 165.2}, {"RTX 3090", 71},
    };
    for (size_t i = 0; i < sizeof(peaks) / sizeof(peaks[0]); i++) {
        if (has_words(gpu->name, peaks[i].name)) { return 1e12 * peaks[i].tflops; }
    }
    return 0;
}

void gpu_send(const Gpu *gpu, void *device, const void *host, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
}

void gpu_fetch(const Gpu *gpu, void *host, const void *device, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, gpu->stream));
}

void gpu_read(const Gpu *gpu, void *host, const void *device, size_t bytes) {
    gpu_fetch(gpu, host, device, bytes);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
}

void gpu_clear(Gpu *gpu, GpuFamily family, void *device, size_t bytes) {
    gpu_family(gpu, family);
    CUDA_CHECK(cudaMemsetAsync(device, 0, bytes, gpu->stream));
}

// ---- host memory --------------------------------------------------------------------------------

enum { HUGE_PAGE = 2 << 20, TOUCHED = 32 * HUGE_PAGE }; // TOUCHED: bytes that a task touches

typedef struct {
    char *memory;
    size_t bytes;
} HostMemory;

static bool touch(void *context, int64_t i) {
    const HostMemory *h = context;
    size_t begin = (size_t)i * TOUCHED, left = h->bytes - begin;
    memset(h->memory + begin, 0, left < TOUCHED ? left : TOUCHED);
    return true;
}

// All cores touch the pages first, and the system is asked for huge pages: pinning 96 GB of small
// pages in one thread takes a minute.
void *gpu_host_memory(int64_t bytes, bool mapped) {
    char size[32];
    int same = 0, device = 0;
    if (bytes == 0) { return NULL; }
    size_t room = (size_t)round_up64(bytes, HUGE_PAGE);
    HostMemory h = {aligned_alloc(HUGE_PAGE, room), room};
    if (h.memory == NULL) { die("out of memory: %s of host memory", format_bytes(size, room)); }
    madvise(h.memory, room, MADV_HUGEPAGE);
    threads_for((int64_t)((room + TOUCHED - 1) / TOUCHED), touch, &h);
    cudaError_t error = cudaHostRegister(h.memory, room, cudaHostRegisterMapped);
    if (error != cudaSuccess) { cudaGetLastError(); } // if pinning fails, copies are only slower
    if (!mapped) { return h.memory; }
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, device));
    if (error != cudaSuccess || !same) {
        die("--optimizer-cpu-offload: %s of host memory cannot be used by the GPU: %s",
            format_bytes(size, (double)bytes),
            error != cudaSuccess ? cudaGetErrorString(error) : "it has other addresses there");
    }
    return h.memory;
}

void gpu_host_free(void *memory) {
    if (memory != NULL && cudaHostUnregister(memory) != cudaSuccess) { cudaGetLastError(); }
    free(memory);
}
