// CUDA's runtime for tests without a GPU: as much of it as the tree calls. The device's memory is
// the host's; kernels, and all but what is said below, are done when the call returns.
//
// What only a real device would punish is looked for here. A copy to the host arrives no sooner
// than the host waits for it; whoever changes memory that a copy to the device may still read is
// stopped. What another stream does comes as late as it may, and so does what cudaMemcpy, which
// belongs to no stream of ours, brings to the device. New memory is all NaN.
//
// STANDIN_CAPABILITY: the device's (90). STANDIN_DEVICE: which device a rank has, in place of the
// one it takes, so that ranks of one machine can pass for those of several; STANDIN_BUS: all have
// the same one.
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
enum { cudaHostRegisterDefault };
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem;
};

// What is enqueued on NULL is done at once. What is enqueued on a stream that has a priority is
// done as late as may be: when something waits for an event that was recorded after it. So who does
// not wait, or changes what is still to be read, gets other numbers.
typedef void StandinWork(void *argument); // frees it
struct StandinStream {
    long done, count, room;
    struct {
        StandinWork *work;
        void *argument;
    } * queue; // [room]
};

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

const char *cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError(void);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *info, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all);
cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMallocHost(void **pointer, size_t bytes);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *pointer);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);

cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);

// Nothing can be captured where calls are done at once: a trainer needs --no-cuda-graphs.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

#ifdef __cplusplus
}
#endif

#endif
