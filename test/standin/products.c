// The products and attention of a device: cuBLASLt on the CPU, as far as kernels/gemm.c calls it,
// and a stand-in for kernels/attention.c.
#include "../../kernels/attention.h"
#include "../../kernels/cpu.h"
#include "values.h"

#include <stdlib.h>
#include <string.h>

// ---- products -----------------------------------------------------------------------------------

struct StandinMatmul {
    cublasOperation_t transa, transb;
    cublasLtEpilogue_t epilogue;
    cudaDataType_t bias_type;
    int64_t aux_row;
    int8_t fast;
    const void *bias;
    void *aux;
    const float *a_scale, *b_scale;
};

struct StandinLayout {
    cudaDataType_t type;
    int rows, cols;
};

struct StandinPreference {
    uint32_t alignment[4]; // of A, B, C, D
};

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    (void)compute, (void)scale;
    *desc = calloc_or_die(1, sizeof(**desc));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
#define FIELD(name) \
    { offsetof(struct StandinMatmul, name), sizeof(desc->name) }
    static const struct {
        size_t offset, bytes;
    } fields[STANDIN_MATMUL_ATTRIBUTES] = {
        [CUBLASLT_MATMUL_DESC_TRANSA] = FIELD(transa),
        [CUBLASLT_MATMUL_DESC_TRANSB] = FIELD(transb),
        [CUBLASLT_MATMUL_DESC_EPILOGUE] = FIELD(epilogue),
        [CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE] = FIELD(bias_type),
        [CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD] = FIELD(aux_row),
        [CUBLASLT_MATMUL_DESC_FAST_ACCUM] = FIELD(fast),
        [CUBLASLT_MATMUL_DESC_BIAS_POINTER] = FIELD(bias),
        [CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER] = FIELD(aux),
        [CUBLASLT_MATMUL_DESC_A_SCALE_POINTER] = FIELD(a_scale),
        [CUBLASLT_MATMUL_DESC_B_SCALE_POINTER] = FIELD(b_scale),
    };
    if (bytes != fields[attribute].bytes) { return CUBLAS_STATUS_INVALID_VALUE; }
    memcpy((char *)desc + fields[attribute].offset, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
    if (ld != (int64_t)rows) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    *layout = malloc_or_die(sizeof(**layout));
    **layout = (struct StandinLayout){type, (int)rows, (int)cols};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = malloc_or_die(sizeof(**preference));
    **preference = (struct StandinPreference){{256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) { return CUBLAS_STATUS_SUCCESS; }
    if (bytes != sizeof(uint32_t)) { return CUBLAS_STATUS_INVALID_VALUE; }
    memcpy(&preference->alignment[attribute - 1], value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

static bool is_fp8(cublasLtMatrixLayout_t x) {
    return x->type == CUDA_R_8F_E4M3 || x->type == CUDA_R_8F_E5M2;
}

// What the library asks for.
static bool is_product(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t d) {
    bool ta = desc->transa == CUBLAS_OP_T, tb = desc->transb == CUBLAS_OP_T;
    bool fits = (ta ? a->cols : a->rows) == d->rows && (tb ? b->rows : b->cols) == d->cols &&
                (ta ? a->rows : a->cols) == (tb ? b->cols : b->rows);
    if (!is_fp8(a) && !is_fp8(b)) { return fits; }
    bool sixteens = a->rows % 16 == 0 && a->cols % 16 == 0 && b->cols % 16 == 0;
    bool types = is_fp8(a) && is_fp8(b) && (a->type == CUDA_R_8F_E4M3 || b->type == CUDA_R_8F_E4M3);
    return fits && sixteens && types && ta && !tb && desc->a_scale != NULL &&
           desc->b_scale != NULL && (uintptr_t)desc->a_scale % 16 == 0 &&
           (uintptr_t)desc->b_scale % 16 == 0;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int room,
                                              cublasLtMatmulHeuristicResult_t *results,
                                              int *count) {
    const char *wanted = getenv("STANDIN_ALGORITHMS");
    int most = wanted != NULL ? atoi(wanted) : 1;
    (void)handle, (void)c;
    *count = 0;
    if (!is_product(desc, a, b, d)) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    for (uint32_t need = 256; need >= 16 && *count < room && *count < most; need /= 4) {
        bool works = true;
        for (int i = 0; i < 4; i++) { works = works && preference->alignment[i] >= need; }
        if (works) {
            results[(*count)++] = (cublasLtMatmulHeuristicResult_t){
                {need}, 0, CUBLAS_STATUS_SUCCESS};
        }
    }
    return *count > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

static GpuType type_of(cublasLtMatrixLayout_t x) {
    static const GpuType types[] = {TYPE_F32, TYPE_BF16, TYPE_E4M3, TYPE_E5M2};
    return types[x->type];
}

static float *read_matrix(const void *x, cublasLtMatrixLayout_t layout) {
    return values_read(x, type_of(layout), (int64_t)layout->rows * layout->cols);
}

// A column-major product of A and B is the row-major one of B and A.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    int64_t n = (int64_t)d->rows * d->cols;
    float factor = *(const float *)alpha, add = *(const float *)beta;
    uintptr_t addresses = (uintptr_t)A | (uintptr_t)B | (uintptr_t)C | (uintptr_t)D;
    (void)handle, (void)workspace, (void)workspace_bytes, (void)stream;
    if (!is_product(desc, a, b, d) || addresses % algo->alignment != 0) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    float *left = read_matrix(B, b), *right = read_matrix(A, a), *bias = NULL;
    float *addend = add != 0.0f ? read_matrix(C, c) : NULL;
    float *product = malloc_or_die((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n && addend != NULL; i++) { addend[i] *= add; }
    if (desc->epilogue == CUBLASLT_EPILOGUE_BIAS ||
        desc->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
        bias = values_read(desc->bias, TYPE_BF16, d->rows);
    }
    if (is_fp8(a)) { factor = factor * *desc->b_scale * *desc->a_scale; }
    cpu_gemm((CpuGemm){.m = d->cols,
                       .n = d->rows,
                       .k = desc->transa == CUBLAS_OP_T ? a->rows : a->cols,
                       .a = left,
                       .b = right,
                       .c = product,
                       .bias = bias,
                       .addend = addend,
                       .trans_a = desc->transb == CUBLAS_OP_T,
                       .trans_b = desc->transa == CUBLAS_OP_T,
                       .alpha = factor});
    if (desc->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
        values_round(desc->aux, TYPE_BF16, product, n);
        gelu_forward(product, product, n);
    } else if (desc->epilogue == CUBLASLT_EPILOGUE_DGELU) {
        float *input = values_read(desc->aux, TYPE_BF16, n);
        gelu_backward(product, product, input, n);
        free(input);
    }
    values_write(D, type_of(d), product, n);
    free(left);
    free(right);
    free(addend);
    free(bias);
    free(product);
    return CUBLAS_STATUS_SUCCESS;
}

// ---- attention ----------------------------------------------------------------------------------

static int64_t qkv_size(const AttentionShape *s) {
    return (int64_t)s->B * s->T * (s->H + 2 * s->G) * s->D;
}

static int64_t out_size(const AttentionShape *s) {
    return (int64_t)s->B * s->T * s->H * s->D;
}

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    (void)gpu;
    float *x = values_read(qkv, TYPE_BF16, qkv_size(&s));
    float *y = malloc_or_die((size_t)out_size(&s) * sizeof(float));
    attention_forward(y, lse, x, s.B, s.T, s.H, s.G, s.D);
    values_write(out, TYPE_BF16, y, out_size(&s));
    free(x);
    free(y);
}

void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv) {
    (void)gpu;
    float *x = values_read(qkv, TYPE_BF16, qkv_size(&s));
    float *y = values_read(out, TYPE_BF16, out_size(&s));
    float *dy = values_read(d_out, TYPE_BF16, out_size(&s));
    float *dx = malloc_or_die((size_t)qkv_size(&s) * sizeof(float));
    attention_backward(dx, dy, y, lse, x, s.B, s.T, s.H, s.G, s.D);
    values_write(d_qkv, TYPE_BF16, dx, qkv_size(&s));
    free(x);
    free(y);
    free(dy);
    free(dx);
}

size_t attention_workspace(AttentionShape s, size_t most) {
    (void)s, (void)most;
    return 1;
}

bool attention_by_cudnn(Gpu *gpu, AttentionShape s, Error *why) {
    (void)gpu, (void)s;
    return fail(why, "stand-in: no cuDNN");
}

void attention_close(Gpu *gpu) {
    (void)gpu;
}
