// Matmuls and attention of a device: the part of cuBLASLt that kernels/gemm.c calls, on the CPU,
// and a stand-in for kernels/attention.c.
#include "../../kernels/attention.h"
#include "values.h"

// ---- matmuls ------------------------------------------------------------------------------------

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    *desc = calloc_or_die(1, sizeof(**desc));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
    if (ld != (int64_t)rows) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    *layout = malloc_or_die(sizeof(**layout));
    **layout = (struct StandinLayout){type, (int)rows, (int)cols, 0, 0};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = malloc_or_die(sizeof(**preference));
    **preference = (struct StandinPreference){0, 256, 256, 256, 256};
    return CUBLAS_STATUS_SUCCESS;
}

static bool is_fp8(cublasLtMatrixLayout_t x) {
    return x->type == CUDA_R_8F_E4M3 || x->type == CUDA_R_8F_E5M2;
}

// STANDIN_FP8 is for the library's FP8 matmuls, STANDIN_OWN_MATMULS for our own. =none: the
// device has none; =wrong: one value of each matmul is wrong.
static bool played(const char *variable, const char *what) {
    const char *given = getenv(variable);
    return given != NULL && strcmp(given, what) == 0;
}

bool own_matmuls(const char *what) {
    return played("STANDIN_OWN_MATMULS", what);
}

// Whether the library can compute it.
static bool is_matmul(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                      cublasLtMatrixLayout_t d) {
    bool ta = desc->transa == CUBLAS_OP_T, tb = desc->transb == CUBLAS_OP_T;
    bool fits = (ta ? a->cols : a->rows) == d->rows && (tb ? b->rows : b->cols) == d->cols &&
                (ta ? a->rows : a->cols) == (tb ? b->cols : b->rows) && a->batch == d->batch &&
                b->batch == d->batch;
    if (!is_fp8(a) && !is_fp8(b)) { return fits; }
    bool sixteens = a->rows % 16 == 0 && a->cols % 16 == 0 && b->cols % 16 == 0;
    bool types = is_fp8(a) && is_fp8(b) && (a->type == CUDA_R_8F_E4M3 || b->type == CUDA_R_8F_E4M3);
    bool scales = desc->a_scale != NULL && (uintptr_t)desc->a_scale % 16 == 0 &&
                  desc->b_scale != NULL && (uintptr_t)desc->b_scale % 16 == 0;
    bool modes = (desc->a_mode == 0) == (desc->b_mode == 0) && (desc->a_mode + desc->b_mode < 6) &&
                 (desc->a_mode == 0 || (!desc->fast && standin_capability() == 90));
    return fits && sixteens && types && scales && modes && ta && !tb &&
           standin_capability() >= FP8_CAPABILITY && !played("STANDIN_FP8", "none");
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t has, int room,
                                              cublasLtMatmulHeuristicResult_t *results,
                                              int *count) {
    *count = 0;
    if (!is_matmul(desc, a, b, d)) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    for (uint32_t need = 256; need >= 16 && *count < room; need /= 4) {
        if (has->a >= need && has->b >= need && has->c >= need && has->d >= need) {
            results[*count] = (cublasLtMatmulHeuristicResult_t){.algo = {need}};
            (*count)++;
        }
    }
    return *count > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

static GpuType type_of(cublasLtMatrixLayout_t x) {
    static const GpuType types[] = {TYPE_F32, TYPE_BF16, TYPE_E4M3, TYPE_E5M2};
    return types[x->type];
}

// scales: NULL, or the scales of an FP8 operand, whose summed dimension is the columns' length.
static float *read_matrix(const void *x, cublasLtMatrixLayout_t layout, const float *scales,
                          int32_t mode) {
    float *values = values_read(x, type_of(layout), layout->rows * layout->cols);
    for (int row = 0; row < layout->cols && scales != NULL; row++) {
        for (int i = 0; i < layout->rows; i++) {
            values[row * layout->rows + i] *=
                scales[fp8_scale_index((Scaling)mode, layout->cols, layout->rows, row, i)];
        }
    }
    return values;
}

static const void *matrix_of_batch(const void *x, cublasLtMatrixLayout_t layout, int i) {
    return x != NULL ? (const char *)x + i * layout->stride * gpu_type_bytes(type_of(layout)) : x;
}

// The column-major result of A and B is the row-major one of B and A.
static cublasStatus_t multiply(cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
                               cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b,
                               const void *beta, const void *C, cublasLtMatrixLayout_t c, void *D,
                               cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo) {
    int n = d->rows * d->cols;
    float factor = *(const float *)alpha, add = *(const float *)beta;
    uintptr_t addresses = (uintptr_t)A | (uintptr_t)B | (uintptr_t)C | (uintptr_t)D;
    if (!is_matmul(desc, a, b, d) || addresses % algo->alignment != 0) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    bool blocks = is_fp8(a) && desc->a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    FREED float *left = read_matrix(B, b, blocks ? desc->b_scale : NULL, desc->b_mode);
    FREED float *right = read_matrix(A, a, blocks ? desc->a_scale : NULL, desc->a_mode);
    FREED float *addend = add != 0.0f ? read_matrix(C, c, NULL, 0) : NULL, *bias = NULL;
    FREED float *result = values_new(n);
    for (int i = 0; i < n && addend != NULL; i++) { addend[i] *= add; }
    if (desc->epilogue == CUBLASLT_EPILOGUE_BIAS) { bias = bf16_read(desc->bias, d->rows); }
    if (is_fp8(a) && !blocks) { factor = factor * *desc->b_scale * *desc->a_scale; }
    cpu_gemm((CpuGemm){.m = d->cols,
                       .n = d->rows,
                       .k = desc->transa == CUBLAS_OP_T ? a->rows : a->cols,
                       .a = left,
                       .b = right,
                       .c = result,
                       .bias = bias,
                       .addend = addend,
                       .trans_a = desc->transb == CUBLAS_OP_T,
                       .trans_b = desc->transa == CUBLAS_OP_T,
                       .alpha = factor});
    if (desc->epilogue == CUBLASLT_EPILOGUE_DGELU) {
        FREED float *input = bf16_read(desc->aux, n);
        gelu_backward(result, result, input, n);
    }
    if (is_fp8(a) && played("STANDIN_FP8", "wrong")) { result[n - 1] += 1; }
    values_write(D, type_of(d), result, n);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < (d->batch > 0 ? d->batch : 1) && status == CUBLAS_STATUS_SUCCESS; i++) {
        status = multiply(desc, alpha, matrix_of_batch(A, a, i), a, matrix_of_batch(B, b, i), b,
                          beta, matrix_of_batch(C, c, i), c,
                          (void *)(uintptr_t)matrix_of_batch(D, d, i), d, algo);
    }
    return status;
}

// ---- attention ----------------------------------------------------------------------------------

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    gpu_family(gpu, FAMILY_ATTENTION);
    int size = s.B * s.T * s.H * s.D, qkv_size = s.B * s.T * (s.H + 2 * s.G) * s.D;
    FREED float *x = bf16_read(qkv, qkv_size), *y = values_new(size);
    attention_forward(y, lse, x, s.documents, s.B, s.T, s.H, s.G, s.D);
    values_write(out, TYPE_BF16, y, size);
}

void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv) {
    gpu_family(gpu, FAMILY_ATTENTION);
    int size = s.B * s.T * s.H * s.D, qkv_size = s.B * s.T * (s.H + 2 * s.G) * s.D;
    FREED float *x = bf16_read(qkv, qkv_size), *dx = values_new(qkv_size);
    FREED float *y = bf16_read(out, size), *dy = bf16_read(d_out, size);
    attention_backward(dx, dy, y, lse, x, s.documents, s.B, s.T, s.H, s.G, s.D);
    values_write(d_qkv, TYPE_BF16, dx, qkv_size);
}

// The plain kernels and those for Hopper.
#define SAME_AS(name, other) __typeof__(other) name __attribute__((weak, alias(#other)))
SAME_AS(attention_plain_forward, attention_forward_gpu);
SAME_AS(attention_plain_backward, attention_backward_gpu);
SAME_AS(attention_own_forward, attention_forward_gpu);
SAME_AS(attention_own_backward, attention_backward_gpu);

#pragma weak attention_own_serves // where test/emulated/ runs the kernels themselves
#pragma weak attention_share_work
bool attention_own_serves(const Gpu *gpu, AttentionShape s, bool backward) {
    bool forward = (s.D == 64 || s.D == 128) && s.H % s.G == 0 && s.T <= ATTENTION_MAX_T;
    bool large = s.D == 128 && s.documents != NULL;
    bool small = s.D == 64 && s.H == s.G && s.T <= ATTENTION64_MAX_T;
    return gpu->capability == 90 && forward && (small || large || !backward);
}

void attention_share_work(const Gpu *gpu, AttentionShape s, int *documents) {
}

// In a deterministic run, as much as the scores of a group's heads; otherwise little.
size_t attention_workspace(AttentionShape s, size_t most) {
    return s.deterministic ? (size_t)2 * (size_t)s.T * (size_t)s.T * (size_t)(s.H / s.G) : 1;
}

bool attention_is_fast(Gpu *gpu, AttentionShape s) {
    return fail("stand-in: no cuDNN");
}

bool attention_start(Gpu *gpu, AttentionShape s) {
    return true;
}

void attention_close(Gpu *gpu) {
}
