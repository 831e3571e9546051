// The device on which a trainer runs: its handles, stream and workspaces, and the checks of every
// library call.
//
// Every function that takes a Gpu enqueues on gpu->stream and returns; nothing waits for the device
// unless its comment says so. BF16 values have the type Bf16 in host code and in device code.
#pragma once

#include "../base/common.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

BEGIN_C

typedef uint16_t Bf16;

typedef enum {
    TYPE_F32,
    TYPE_BF16,
    TYPE_E4M3,
    TYPE_E5M2,
    TYPE_MOMENT8, // codes of a moment (moments.h)
} GpuType;

static inline int gpu_type_bytes(GpuType type) {
    return type == TYPE_F32 ? 4 : (type == TYPE_BF16 ? 2 : 1);
}

// The kernel families among which profiling divides a step's time. While profiling, an event is
// recorded at each change of family.
typedef enum {
    FAMILY_MATMULS,
    FAMILY_HEAD_MATMULS,
    FAMILY_ATTENTION,
    FAMILY_NORMS,
    FAMILY_ACTIVATIONS, // also RoPE and bias gradients
    FAMILY_LOSS,
    FAMILY_EMBEDDINGS,
    FAMILY_QUANTIZE,
    FAMILY_OPTIMIZER,
    FAMILY_COMMUNICATION, // waiting for other GPUs
    FAMILY_COUNT
} GpuFamily;

typedef struct GpuProfile GpuProfile;
typedef struct GemmPlan GemmPlan;
typedef struct AttentionPlan AttentionPlan;

enum { FP8_CAPABILITY = 89 }; // the least capability with FP8 tensor cores

typedef struct {
    int device, sms, capability; // capability: 90 for sm_90
    char name[256], uuid[48];    // uuid: as nvidia-smi prints it
    size_t memory;               // bytes of the device's memory, in use or free
    cudaStream_t stream;
    cublasLtHandle_t blas;
    cudnnHandle_t dnn;
    // workspaces for matmuls and for attention, which the caller of gpu_open provides
    void *workspace, *attention_workspace;
    size_t workspace_bytes, attention_bytes;
    int num_gemms, num_attentions;
    GemmPlan *gemms;           // [num_gemms] plans of gemm.c, which gemm_close frees
    AttentionPlan *attentions; // [num_attentions] plans of attention.c; attention_close frees them
    bool warned_of_attention;  // a warning has said that the plain kernel is used
    GpuProfile *profile;       // NULL: not profiling
} Gpu;

// Opens device number `device`; afterwards the caller sets the workspaces. Returns false, with the
// reason in error_text(), if there is no such device or if the device is older than sm_80.
bool gpu_open(Gpu *gpu, int device);
// Call gemm_close and attention_close before gpu_close.
void gpu_close(Gpu *gpu);

// Copies to the device, and waits. (cudaMemcpy is not enough: gpu->stream does not wait for it, and
// from pageable memory it may return before the device has the data.)
void gpu_send(const Gpu *gpu, void *device, const void *host, size_t bytes);
// Copies to the host, and waits.
void gpu_read(const Gpu *gpu, void *host, const void *device, size_t bytes);
// Enqueues a copy to the host.
void gpu_fetch(const Gpu *gpu, void *host, const void *device, size_t bytes);
// Enqueues writing zeros to device memory. Profiling counts the time to `family`.
void gpu_clear(Gpu *gpu, GpuFamily family, void *device, size_t bytes);

// Returns zeroed host memory, page-locked if the system allows it, or NULL for 0 bytes. If
// `mapped`, kernels can use the memory at the same address; if that is impossible, the program
// ends.
void *gpu_host_memory(int64_t bytes, bool mapped);
void gpu_host_free(void *memory);

// gpu_timer_begin and gpu_timer_end measure the time of what is enqueued between the two calls.
// gpu_timer_end waits for the device and returns milliseconds.
typedef struct {
    cudaEvent_t begin, end;
} GpuTimer;
GpuTimer gpu_timer_begin(const Gpu *gpu);
float gpu_timer_end(const Gpu *gpu, GpuTimer timer);

// Makes profiling count the time of what is enqueued from here on to `family`. Without profiling it
// does nothing.
void gpu_family(Gpu *gpu, GpuFamily family);
const char *gpu_family_name(GpuFamily family);
void gpu_profile_begin(Gpu *gpu);
// Waits for the device, and sets ms to the milliseconds of each family since gpu_profile_begin.
void gpu_profile_end(Gpu *gpu, double ms[FAMILY_COUNT]);

// Returns the peak FLOP/s of dense BF16 matmuls by the maker's data sheet, or 0 if the device's
// name is not known.
double gpu_peak_flops(const Gpu *gpu);

void cuda_check(cudaError_t status, const char *call, const char *file, int line);
void blas_check(cublasStatus_t status, const char *call, const char *file, int line);
void dnn_check(cudnnStatus_t status, const char *call, const char *file, int line);

// If the call fails, these end the program and print the call, its file and line, and the library's
// reason.
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
#define BLAS_CHECK(call) blas_check((call), #call, __FILE__, __LINE__)
#define DNN_CHECK(call) dnn_check((call), #call, __FILE__, __LINE__)

END_C
