// CUDA's runtime for tests without a GPU: as much of it as kernels/comm.c and verify_nccl.c call.
// Everything is done when the call returns, in host memory.
#ifndef LLM8_STANDIN_CUDA_H
#define LLM8_STANDIN_CUDA_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { cudaSuccess = 0 } cudaError_t;
typedef struct StandinStream *cudaStream_t;
typedef struct StandinEvent *cudaEvent_t;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaEventWaitExternal = 1 };

#define STANDIN_CALL(name, ...)                   \
    static inline cudaError_t name(__VA_ARGS__) { \
        return cudaSuccess;                       \
    }

STANDIN_CALL(cudaEventRecord, cudaEvent_t e __attribute__((unused)),
             cudaStream_t s __attribute__((unused)))
STANDIN_CALL(cudaEventDestroy, cudaEvent_t e __attribute__((unused)))
STANDIN_CALL(cudaSetDevice, int device __attribute__((unused)))
STANDIN_CALL(cudaStreamDestroy, cudaStream_t s __attribute__((unused)))
STANDIN_CALL(cudaStreamSynchronize, cudaStream_t s __attribute__((unused)))
STANDIN_CALL(cudaStreamWaitEvent, cudaStream_t s __attribute__((unused)),
             cudaEvent_t e __attribute__((unused)), unsigned flags __attribute__((unused)))
#undef STANDIN_CALL

static inline cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    *pointer = malloc(bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void *pointer) {
    free(pointer);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes,
                                     enum cudaMemcpyKind kind) {
    (void)kind;
    memcpy(to, from, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    (void)flags;
    *e = NULL;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    (void)flags;
    *s = NULL;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int p) {
    (void)flags, (void)p;
    *s = NULL;
    return cudaSuccess;
}

static inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamIsCapturing(cudaStream_t s,
                                                enum cudaStreamCaptureStatus *status) {
    (void)s;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

// The device of a rank, by STANDIN_DEVICE or its LOCAL_RANK; STANDIN_BUS gives all the same one.
static inline cudaError_t cudaGetDevice(int *device) {
    const char *text = getenv("STANDIN_DEVICE");
    if (text == NULL) { text = getenv("LOCAL_RANK"); }
    *device = text != NULL ? atoi(text) : 0;
    return cudaSuccess;
}

static inline cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int device) {
    const char *bus = getenv("STANDIN_BUS");
    snprintf(out, (size_t)room, "%s%d", bus != NULL ? bus : "standin:", bus != NULL ? 0 : device);
    return cudaSuccess;
}

static inline const char *cudaGetErrorString(cudaError_t status) {
    (void)status;
    return "no error";
}

#endif
