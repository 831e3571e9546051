// cuDNN for tests without a GPU: only its handle. test/standin/matmuls.c computes attention.
#ifndef LLM8_STANDIN_CUDNN_H
#define LLM8_STANDIN_CUDNN_H

#include <stddef.h>

#define CUDNN_VERSION 91000

typedef enum { CUDNN_STATUS_SUCCESS } cudnnStatus_t;
typedef struct StandinDnn *cudnnHandle_t;

#define cudnnCreate(handle) (*(handle) = NULL, CUDNN_STATUS_SUCCESS)
#define cudnnDestroy(handle) CUDNN_STATUS_SUCCESS
#define cudnnSetStream(handle, stream) CUDNN_STATUS_SUCCESS
#define cudnnGetErrorString(status) "no error"
#define cudnnGetLastErrorString(out, room) (void)(*(out) = '\0')
#define cudnnGetVersion() CUDNN_VERSION

#endif
