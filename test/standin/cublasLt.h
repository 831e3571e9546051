// cuBLASLt for tests without a GPU: the part that kernels/gemm.c calls. test/standin/matmuls.c
// computes the matmuls, column-major as in the library.
//
// Its algorithms need A, B, C and D aligned to 256, 64 or 16 bytes; the most promising one needs
// the most. An algorithm returns an error where an address is not aligned so.
#ifndef LLM8_STANDIN_CUBLASLT_H
#define LLM8_STANDIN_CUBLASLT_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CUBLAS_VERSION 130000

typedef enum {
    CUBLAS_STATUS_SUCCESS,
    CUBLAS_STATUS_INVALID_VALUE,
    CUBLAS_STATUS_NOT_SUPPORTED
} cublasStatus_t;
typedef enum { CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2 } cudaDataType_t;
enum { // the values of Scaling
    CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
    CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F = 2,
    CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
};
typedef enum { CUBLAS_COMPUTE_32F } cublasComputeType_t;
typedef enum { CUBLAS_OP_N, CUBLAS_OP_T } cublasOperation_t;
typedef enum {
    CUBLASLT_EPILOGUE_DEFAULT,
    CUBLASLT_EPILOGUE_BIAS,
    CUBLASLT_EPILOGUE_DGELU
} cublasLtEpilogue_t;

typedef struct StandinBlas *cublasLtHandle_t;
typedef struct StandinMatmul {
    cublasOperation_t transa, transb;
    cublasLtEpilogue_t epilogue;
    cudaDataType_t bias_type;
    int64_t aux_row;
    int8_t fast;
    const void *bias;
    void *aux;
    const float *a_scale, *b_scale;
    int32_t a_mode, b_mode;
} * cublasLtMatmulDesc_t;
typedef struct StandinLayout {
    cudaDataType_t type;
    int rows, cols;
    int32_t batch; // 0: one
    int64_t stride;
} * cublasLtMatrixLayout_t;
typedef struct StandinPreference {
    size_t workspace;
    uint32_t a, b, c, d; // their alignment
} * cublasLtMatmulPreference_t;
typedef struct {
    uint32_t alignment;
} cublasLtMatmulAlgo_t;
typedef struct {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
} cublasLtMatmulHeuristicResult_t;

// An attribute's number holds its field's offset in the lower 8 bits, and the field's size above
// them.
#define STANDIN_FIELD(type, name) (offsetof(type, name) | sizeof(((type *)NULL)->name) << 8)
typedef enum {
    CUBLASLT_MATMUL_DESC_TRANSA = STANDIN_FIELD(struct StandinMatmul, transa),
    CUBLASLT_MATMUL_DESC_TRANSB = STANDIN_FIELD(struct StandinMatmul, transb),
    CUBLASLT_MATMUL_DESC_EPILOGUE = STANDIN_FIELD(struct StandinMatmul, epilogue),
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = STANDIN_FIELD(struct StandinMatmul, bias_type),
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = STANDIN_FIELD(struct StandinMatmul, aux_row),
    CUBLASLT_MATMUL_DESC_FAST_ACCUM = STANDIN_FIELD(struct StandinMatmul, fast),
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = STANDIN_FIELD(struct StandinMatmul, bias),
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = STANDIN_FIELD(struct StandinMatmul, aux),
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = STANDIN_FIELD(struct StandinMatmul, a_scale),
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = STANDIN_FIELD(struct StandinMatmul, b_scale),
    CUBLASLT_MATMUL_DESC_A_SCALE_MODE = STANDIN_FIELD(struct StandinMatmul, a_mode),
    CUBLASLT_MATMUL_DESC_B_SCALE_MODE = STANDIN_FIELD(struct StandinMatmul, b_mode),
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = STANDIN_FIELD(struct StandinLayout, batch),
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = STANDIN_FIELD(struct StandinLayout, stride),
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = STANDIN_FIELD(struct StandinPreference, workspace),
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = STANDIN_FIELD(struct StandinPreference, a),
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = STANDIN_FIELD(struct StandinPreference, b),
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = STANDIN_FIELD(struct StandinPreference, c),
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = STANDIN_FIELD(struct StandinPreference, d)
} StandinAttribute;

static inline cublasStatus_t standin_set(void *object, StandinAttribute attribute,
                                         const void *value, size_t bytes) {
    if (bytes != (size_t)attribute >> 8) { return CUBLAS_STATUS_INVALID_VALUE; }
    memcpy((char *)object + (attribute & 255), value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
#define cublasLtMatmulDescSetAttribute standin_set
#define cublasLtMatrixLayoutSetAttribute standin_set
#define cublasLtMatmulPreferenceSetAttribute standin_set

static inline cublasStatus_t standin_free(void *object) {
    free(object);
    return CUBLAS_STATUS_SUCCESS;
}
#define cublasLtMatmulDescDestroy standin_free
#define cublasLtMatrixLayoutDestroy standin_free
#define cublasLtMatmulPreferenceDestroy standin_free
#define cublasLtDestroy standin_free

static inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = NULL;
    return CUBLAS_STATUS_SUCCESS;
}

static inline const char *cublasLtGetStatusString(cublasStatus_t status) {
    static const char *const names[] = {"success", "an invalid value", "not supported"};
    return names[status];
}

static inline size_t cublasLtGetVersion(void) {
    return CUBLAS_VERSION;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale);
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld);
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference);
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int room,
                                              cublasLtMatmulHeuristicResult_t *results, int *count);
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
