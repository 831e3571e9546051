// cuDNN for tests without a GPU: its handle. Attention is made by test/standin/products.c.
#ifndef LLM8_STANDIN_CUDNN_H
#define LLM8_STANDIN_CUDNN_H

#include <cuda_runtime_api.h>
#include <string.h>

#define CUDNN_VERSION 91000

typedef enum { CUDNN_STATUS_SUCCESS } cudnnStatus_t;
typedef struct StandinDnn *cudnnHandle_t;

static inline cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = NULL;
    return CUDNN_STATUS_SUCCESS;
}

static inline cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    (void)handle;
    return CUDNN_STATUS_SUCCESS;
}

static inline cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    (void)handle, (void)stream;
    return CUDNN_STATUS_SUCCESS;
}

static inline const char *cudnnGetErrorString(cudnnStatus_t status) {
    (void)status;
    return "no error";
}

static inline void cudnnGetLastErrorString(char *out, size_t room) {
    memset(out, 0, room);
}

static inline size_t cudnnGetVersion(void) {
    return CUDNN_VERSION;
}

#endif
