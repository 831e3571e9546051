// CUDA's runtime on the CPU: streams as queues, events, graphs, and the memory of one device.
#include "../../base/common.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A copy that the host has not waited for. To the host: data is what will arrive. From the host:
// data is what was there.
typedef struct {
    void *to;
    const void *from;
    char *data;
    size_t bytes;
    enum cudaMemcpyKind kind;
} Copy;

struct StandinEvent {
    double time;
    long copies; // enqueued before it
    cudaStream_t stream;
    long position; // in its queue
};

static struct {
    pthread_mutex_t mutex;
    Copy *copies;
    long room, first, count; // the copies first..count-1 are on their way, [0] being `first`
} device = {.mutex = PTHREAD_MUTEX_INITIALIZER};

// The host has waited for the first `count` copies.
static void wait_for(long count) {
    pthread_mutex_lock(&device.mutex);
    long done = 0;
    for (; device.first + done < count; done++) {
        Copy *c = &device.copies[done];
        if (c->kind == cudaMemcpyDeviceToHost) {
            memcpy(c->to, c->data, c->bytes);
        } else if (memcmp(c->from, c->data, c->bytes) != 0) {
            die("stand-in: the host changed memory that a copy to the device was still to read");
        }
        free(c->data);
    }
    if (done > 0) {
        device.first += done;
        memmove(device.copies, device.copies + done,
                (size_t)(device.count - device.first) * sizeof(Copy));
    }
    if (device.first == device.count) {
        free(device.copies);
        device.copies = NULL, device.room = 0;
    }
    pthread_mutex_unlock(&device.mutex);
}

static void enqueue(Copy copy) {
    copy.data = malloc_or_die(copy.bytes);
    memcpy(copy.data, copy.from, copy.bytes);
    pthread_mutex_lock(&device.mutex);
    long waiting = device.count - device.first;
    if (waiting == device.room) {
        device.room = 2 * device.room + 8;
        device.copies = realloc_or_die(device.copies, (size_t)device.room * sizeof(Copy));
    }
    device.copies[waiting] = copy;
    device.count++;
    pthread_mutex_unlock(&device.mutex);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    (void)stream;
    if (kind != cudaMemcpyDeviceToHost) { memcpy(to, from, bytes); }
    if (kind == cudaMemcpyDeviceToDevice) { return cudaSuccess; }
    enqueue((Copy){.to = to, .from = from, .bytes = bytes, .kind = kind});
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream != NULL) { standin_do(stream, stream->count); }
    wait_for(device.count);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    standin_do(event->stream, event->position);
    wait_for(event->copies);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->time = wall_seconds();
    event->copies = device.count;
    event->stream = stream;
    event->position = stream != NULL ? stream->count : 0;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    if (event->stream != stream) { standin_do(event->stream, event->position); }
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(1e3 * (to->time - from->time));
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = calloc_or_die(1, sizeof(**event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

// ---- memory -------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    const size_t alignment = 256; // of cudaMalloc's pointers
    *pointer = aligned_alloc(alignment, (size_t)round_up64((int64_t)bytes, (int64_t)alignment));
    if (*pointer == NULL) { die("stand-in: out of memory: %zu bytes", bytes); }
    memset(*pointer, 0xff, bytes);
    return cudaSuccess;
}

// A copy of the default stream from pageable memory may return before the device has the data, and
// the streams here do not wait for the default one. So the data arrive as late as they may: with
// the next call that waits for the whole device or for the default stream.
static struct {
    void *to;
    char *data;
    size_t bytes;
} late;

static void arrive(void) {
    if (late.data != NULL) { memcpy(late.to, late.data, late.bytes); }
    free(late.data);
    late.data = NULL;
}

cudaError_t cudaFree(void *pointer) {
    arrive();
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    *pointer = malloc_or_die(bytes);
    memset(*pointer, 0xff, bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    arrive();
    if (kind != cudaMemcpyHostToDevice) {
        memcpy(to, from, bytes);
        return cudaSuccess;
    }
    late.to = to;
    late.data = malloc_or_die(bytes);
    late.bytes = bytes;
    memcpy(late.data, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    memset(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all) {
    *free_bytes = *all = (size_t)4 << 30;
    return cudaSuccess;
}

// ---- the device ---------------------------------------------------------------------------------

static int number_from(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text != NULL ? atoi(text) : otherwise;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 64;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *info, int number) {
    int capability = number_from("STANDIN_CAPABILITY", 90);
    (void)number;
    memset(info, 0, sizeof(*info));
    snprintf(info->name, sizeof(info->name), "stand-in");
    info->major = capability / 10;
    info->minor = capability % 10;
    info->multiProcessorCount = 1;
    info->totalGlobalMem = (size_t)4 << 30;
    return cudaSuccess;
}

static int device_set;

cudaError_t cudaSetDevice(int number) {
    device_set = number;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *number) {
    *number = number_from("STANDIN_DEVICE", device_set);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int number) {
    const char *bus = getenv("STANDIN_BUS");
    snprintf(out, (size_t)room, "%s%d", bus != NULL ? bus : "standin:", bus != NULL ? 0 : number);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    return cudaDriverGetVersion(version);
}

const char *cudaGetErrorString(cudaError_t status) {
    return status == cudaSuccess ? "no error" : "the stand-in cannot do this";
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    (void)flags;
    *stream = NULL;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    *stream = calloc_or_die(1, sizeof(**stream));
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (stream != NULL) { free(stream->queue); }
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

// ---- what only says whether it can be done ------------------------------------------------------

#define ANSWER(name, answer, ...)   \
    cudaError_t name(__VA_ARGS__) { \
        return answer;              \
    }
#define UNUSED __attribute__((unused))

ANSWER(cudaGetLastError, cudaSuccess, void)
ANSWER(cudaHostRegister, cudaSuccess, UNUSED void *p, UNUSED size_t bytes, UNUSED unsigned flags)
ANSWER(cudaHostUnregister, cudaSuccess, UNUSED void *p)
ANSWER(cudaStreamBeginCapture, cudaErrorNotSupported, UNUSED cudaStream_t stream,
       UNUSED enum cudaStreamCaptureMode mode)
ANSWER(cudaStreamEndCapture, cudaErrorNotSupported, UNUSED cudaStream_t stream,
       UNUSED cudaGraph_t *graph)
ANSWER(cudaGraphInstantiate, cudaErrorNotSupported, UNUSED cudaGraphExec_t *exec,
       UNUSED cudaGraph_t graph, UNUSED unsigned long long flags)
ANSWER(cudaGraphLaunch, cudaErrorNotSupported, UNUSED cudaGraphExec_t exec,
       UNUSED cudaStream_t stream)
ANSWER(cudaGraphDestroy, cudaErrorNotSupported, UNUSED cudaGraph_t graph)
ANSWER(cudaGraphExecDestroy, cudaErrorNotSupported, UNUSED cudaGraphExec_t exec)
