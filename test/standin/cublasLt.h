// cuBLASLt for tests without a GPU: its handle. Products are made by test/standin/products.c.
#ifndef LLM8_STANDIN_CUBLASLT_H
#define LLM8_STANDIN_CUBLASLT_H

#include <stddef.h>

#define CUBLAS_VERSION 130000

typedef enum { CUBLAS_STATUS_SUCCESS } cublasStatus_t;
typedef struct StandinBlas *cublasLtHandle_t;

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = NULL;
    return CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    (void)handle;
    return CUBLAS_STATUS_SUCCESS;
}

static inline const char *cublasLtGetStatusString(cublasStatus_t status) {
    (void)status;
    return "no error";
}

static inline size_t cublasLtGetVersion(void) {
    return CUBLAS_VERSION;
}

#endif
