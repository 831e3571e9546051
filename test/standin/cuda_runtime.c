// CUDA's runtime on the CPU: streams as queues, events, and the memory of one device.
#include "../../base/common.h"

#include <cuda_runtime_api.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

// A copy that the host has not waited for. data: for a copy to the host, what will arrive; for one
// from the host, what was read.
typedef struct {
    void *to; // NULL: the copy is from the host
    const void *from;
    size_t bytes;
    char data[];
} Copy;

struct StandinEvent {
    double time;
    long copies; // number of copies that were enqueued before it
    cudaStream_t stream;
    long position; // in its queue
};

double standin_seconds;
static struct StandinStream copies; // the copies on their way, of all streams
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void arrive(void *argument) {
    Copy *c = argument;
    if (c->to != NULL) {
        memcpy(c->to, c->data, c->bytes);
    } else if (memcmp(c->from, c->data, c->bytes) != 0) {
        die("stand-in: the host changed memory that a copy to the device was still to read");
    }
    free(c);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    (void)stream;
    if (kind != cudaMemcpyDeviceToHost) { memcpy(to, from, bytes); }
    if (kind == cudaMemcpyDeviceToDevice) { return cudaSuccess; }
    Copy *c = malloc_or_die(sizeof(*c) + bytes);
    *c = (Copy){kind == cudaMemcpyDeviceToHost ? to : NULL, from, bytes};
    memcpy(c->data, from, bytes);
    pthread_mutex_lock(&mutex);
    standin_enqueue(&copies, arrive, c);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

// The host waits for the first `until` copies, and for the work before `position` on a stream.
static cudaError_t wait_for(long until, cudaStream_t stream, long position) {
    standin_do(stream, position);
    pthread_mutex_lock(&mutex);
    standin_do(&copies, until);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return wait_for(copies.count, stream, stream != NULL ? stream->count : 0);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return wait_for(event->copies, event->stream, event->position);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    long position = stream != NULL ? stream->count : 0;
    *event = (struct StandinEvent){wall_seconds() + standin_seconds, copies.count, stream,
                                   position};
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

// ---- memory -------------------------------------------------------------------------------------

static size_t used; // bytes of the device's memory

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    const size_t alignment = 256; // alignment of cudaMalloc's pointers
    *pointer = aligned_alloc(alignment, (size_t)round_up64((int64_t)bytes, (int64_t)alignment));
    if (*pointer == NULL) { die("stand-in: out of memory: %zu bytes", bytes); }
    return cudaMemsetAsync(*pointer, 0xff, bytes, NULL);
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    cudaMallocHost(pointer, bytes);
    used += malloc_usable_size(*pointer);
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    used -= malloc_usable_size(pointer);
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    *all = STANDIN_MEMORY;
    *left = used < *all ? *all - used : 0;
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    memset(to, value, bytes);
    return cudaSuccess;
}

// ---- the device ---------------------------------------------------------------------------------

static int number_from(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text != NULL ? atoi(text) : otherwise;
}

int standin_driver(void) {
    return number_from("STANDIN_DRIVER", CUDART_VERSION);
}

int standin_capability(void) {
    return number_from("STANDIN_CAPABILITY", 90);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *info, int number) {
    int capability = standin_capability();
    *info = (struct cudaDeviceProp){"stand-in", capability / 10, capability % 10,
                                    4,          STANDIN_MEMORY,  {{0x12, 0x34}}};
    info->uuid.bytes[15] = (char)number;
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
