// CUDA's runtime for tests without a GPU: the part that our code calls. The device's memory is host
// memory. Kernels, and all other work but the cases below, are done when the call returns.
//
// It also finds faults that would show only on a real device. A copy to the host arrives only when
// the host waits for it. Changing host memory that a copy to the device may still read ends the
// program. Work on another stream is done as late as allowed. New memory is all NaN. There is no
// cudaMemcpy, for which none of our streams waits (kernels/gpu.h).
//
// STANDIN_CAPABILITY: the device's compute capability (90; FP8 from 89 on, by blocks 90 alone).
// STANDIN_DEVICE: the device that a rank has instead of the one it chooses, so that ranks of one
// machine can look like ranks of several. STANDIN_BUS: all ranks have the same device.
#ifndef LLM8_STANDIN_CUDA_H
#define LLM8_STANDIN_CUDA_H

#include <stddef.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUDART_VERSION 13000

typedef enum { cudaSuccess, cudaErrorNotSupported } cudaError_t;
typedef struct StandinStream *cudaStream_t;
typedef struct StandinEvent *cudaEvent_t;
typedef struct StandinGraph *cudaGraph_t, *cudaGraphExec_t;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaEventWaitExternal = 1 };
enum { cudaHostRegisterMapped, cudaDevAttrCanUseHostPointerForRegisteredMem };
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem;
    struct {
        char bytes[16];
    } uuid;
};

// Work on the stream NULL is done at once. Work on a stream with a priority is done as late as
// allowed: when something waits for an event that was recorded after it. So code that does not
// wait, or that changes what is still to be read, gets other numbers.
typedef void StandinWork(void *argument); // frees its argument
struct StandinStream {
    long done, count, room;
    struct {
        StandinWork *work;
        void *argument;
    } * queue; // [room]
};

int standin_capability(void);
int standin_driver(void);
extern double standin_seconds; // seconds that events add to the clock

static inline void standin_enqueue(cudaStream_t s, StandinWork *work, void *argument) {
    if (s == NULL) {
        work(argument);
        return;
    }
    if (s->count == s->room) {
        s->room = 2 * s->room + 8;
        *(void **)&s->queue = realloc(s->queue, (size_t)s->room * sizeof(*s->queue));
    }
    s->queue[s->count].work = work;
    s->queue[s->count++].argument = argument;
}

static inline void standin_do(cudaStream_t s, long until) {
    while (s != NULL && s->done < until) {
        long i = s->done++;
        s->queue[i].work(s->queue[i].argument);
    }
}

cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *info, int device);
cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int device);

cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaMallocHost(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMemGetInfo(size_t *left, size_t *all);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);

// Calls that always have the same answer.
#define STANDIN_ANSWER(name, parameters, action) \
    static inline cudaError_t name parameters {  \
        action;                                  \
        return cudaSuccess;                      \
    }
#define STANDIN_REFUSAL(name, parameters)       \
    static inline cudaError_t name parameters { \
        return cudaErrorNotSupported;           \
    }
#define STANDIN_MEMORY ((size_t)4 << 30)

static inline const char *cudaGetErrorString(cudaError_t status) {
    return status == cudaSuccess ? "no error" : "the stand-in cannot do this";
}
STANDIN_ANSWER(cudaGetLastError, (void), )
STANDIN_ANSWER(cudaDriverGetVersion, (int *version), *version = standin_driver())
STANDIN_ANSWER(cudaRuntimeGetVersion, (int *version), *version = CUDART_VERSION)
STANDIN_ANSWER(cudaGetDeviceCount, (int *count), *count = standin_driver() > 0 ? 64 : 0)
STANDIN_ANSWER(cudaDeviceGetStreamPriorityRange, (int *least, int *most), *least = 0; *most = -5)
STANDIN_ANSWER(cudaFreeHost, (void *pointer), free(pointer))
STANDIN_ANSWER(cudaHostRegister, (void *pointer, size_t bytes, unsigned flags), )
STANDIN_ANSWER(cudaHostUnregister, (void *pointer), )
STANDIN_ANSWER(cudaDeviceGetAttribute, (int *value, int attribute, int device), *value = 1;)
STANDIN_ANSWER(cudaEventCreate, (cudaEvent_t * event), cudaEventCreateWithFlags(event, 0))
STANDIN_ANSWER(cudaEventDestroy, (cudaEvent_t event), free(event))
STANDIN_ANSWER(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags), *stream = NULL)

// Nothing can be captured where calls are done at once: a trainer needs --no-cuda-graphs.
STANDIN_ANSWER(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status),
               *status = cudaStreamCaptureStatusNone)
STANDIN_REFUSAL(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode))
STANDIN_REFUSAL(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph))
STANDIN_REFUSAL(cudaGraphInstantiate,
                (cudaGraphExec_t * exec, cudaGraph_t graph, unsigned long long flags))
STANDIN_REFUSAL(cudaGraphLaunch, (cudaGraphExec_t exec, cudaStream_t stream))
STANDIN_REFUSAL(cudaGraphDestroy, (cudaGraph_t graph))
STANDIN_REFUSAL(cudaGraphExecDestroy, (cudaGraphExec_t exec))

#ifdef __cplusplus
}
#endif

#endif
