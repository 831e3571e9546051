#include "gemm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// cuBLASLt is column-major: our row-major D[m,n] is cuBLASLt's D'[n,m] = op(B)' op(A)'. So the
// operands change places: cuBLASLt's A is our b.

enum { LEAST_ALIGNMENT = 16, MAX_ALIGNMENT = 256 };

// What a plan depends on. Keys are compared as bytes. alignment: a power of two that divides the
// addresses of a, b, c and d; algorithms may need up to MAX_ALIGNMENT bytes.
typedef struct {
    int32_t alignment, shape[3], types[3], trans[2];
    int32_t epilogue, has_c, in_place, fast_accumulation, scales[2], batch;
} PlanKey;

struct GemmPlan {
    PlanKey key;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
};

static void plan_destroy(GemmPlan *p) {
    cublasLtMatrixLayoutDestroy(p->a);
    cublasLtMatrixLayoutDestroy(p->b);
    cublasLtMatrixLayoutDestroy(p->d);
    cublasLtMatmulDescDestroy(p->op);
}

void gemm_close(Gpu *gpu) {
    while (gpu->num_gemms > 0) { plan_destroy(&gpu->gemms[--gpu->num_gemms]); }
    free(gpu->gemms);
    gpu->gemms = NULL;
}

// ---- plans --------------------------------------------------------------------------------------

static void check_address(const Gemm *g, const char *name, const void *address, bool needed) {
    if ((address != NULL || !needed) && (uintptr_t)address % LEAST_ALIGNMENT == 0) { return; }
    die("gemm: a matmul of %d x %d x %d has %s at %p; the address must be a multiple of %d", g->m,
        g->n, g->k, name, address, LEAST_ALIGNMENT);
}

void gemm_check_apart(const Gemm *g, const char *name, const void *to, int64_t bytes) {
    const int64_t batch = g->batch > 1 ? g->batch : 1, n = to != NULL ? bytes : 0;
    const struct {
        const char *name;
        const void *from;
        int64_t bytes;
    } operands[] = {{"a", g->a, (int64_t)g->m * g->k * batch * gpu_type_bytes(g->type_a)},
                    {"b", g->b, (int64_t)g->n * g->k * batch * gpu_type_bytes(g->type_b)},
                    {"aux", g->aux, g->aux != NULL ? 2 * (int64_t)g->m * g->n : 0}};
    for (size_t i = 0; i < sizeof(operands) / sizeof(operands[0]); i++) {
        uintptr_t read = (uintptr_t)operands[i].from, written = (uintptr_t)to;
        if (written < read + (uintptr_t)operands[i].bytes && read < written + (uintptr_t)n) {
            die("gemm: a matmul of %d x %d x %d writes %s over its operand %s", g->m, g->n, g->k,
                name, operands[i].name);
        }
    }
}

// Returns the strides in bytes of a batch's operands, as if all were BF16, combined by bitwise or.
// A power of two divides the result if and only if it divides each stride. (FP32 strides are twice
// as large.)
static uintptr_t batch_strides(const Gemm *g) {
    int64_t m = g->m, n = g->n, k = g->k;
    return (uintptr_t)(m * k | k * n | m * n) * sizeof(Bf16);
}

static void check(const Gemm *g) {
    bool a_fp8 = gpu_type_bytes(g->type_a) == 1, b_fp8 = gpu_type_bytes(g->type_b) == 1;
    check_address(g, "a", g->a, true);
    check_address(g, "b", g->b, true);
    check_address(g, "c", g->c, g->beta != 0.0f);
    check_address(g, "d", g->d, true);
    bool bias = g->epilogue == EPILOGUE_BIAS, aux = g->epilogue == EPILOGUE_DGELU;
    check_address(g, "bias", g->bias, bias);
    check_address(g, "aux", g->aux, aux);
    // cuBLASLt refuses some FP8 matmuls whose description has a bias that no epilogue adds
    if ((g->bias != NULL && !bias) || (g->aux != NULL && !aux)) {
        die("gemm: a matmul of %d x %d x %d has a bias or aux that its epilogue does not read",
            g->m, g->n, g->k);
    }
    check_address(g, "scale_a", g->scale_a, a_fp8);
    check_address(g, "scale_b", g->scale_b, b_fp8);
    gemm_check_apart(g, "d", g->d,
                     (int64_t)g->m * g->n * (g->batch > 1 ? g->batch : 1) *
                         gpu_type_bytes(g->type_d));
    bool a_blocks = fp8_by_blocks(g->scaling_a), b_blocks = fp8_by_blocks(g->scaling_b);
    bool both_128x128 = g->scaling_a == SCALE_BLOCK_128X128 && g->scaling_b == SCALE_BLOCK_128X128;
    if (a_blocks != b_blocks || both_128x128 || (a_blocks && (!a_fp8 || g->fast_accumulation))) {
        die("gemm: a matmul of %d x %d x %d has scales of kinds %d and %d%s", g->m, g->n, g->k,
            g->scaling_a, g->scaling_b, g->fast_accumulation ? ", and fast accumulation" : "");
    }
    bool apart = batch_strides(g) % LEAST_ALIGNMENT == 0;
    if (g->batch > 0 && (a_fp8 || g->epilogue != EPILOGUE_NONE || !apart)) {
        die("gemm: a batch of matmuls of %d x %d x %d is in FP8, has an epilogue, or has operands "
            "that are no multiple of 16 bytes",
            g->m, g->n, g->k);
    }
    if (a_fp8 != b_fp8 || (a_fp8 && (g->trans_a || !g->trans_b))) {
        die("gemm: a matmul of %d x %d x %d mixes FP8 with another type, or has an FP8 operand "
            "without k contiguous",
            g->m, g->n, g->k);
    }
}

static PlanKey key_of(const Gemm *g) {
    uintptr_t addresses = (uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->c | (uintptr_t)g->d;
    int alignment = MAX_ALIGNMENT;
    if (g->batch > 1) { addresses |= batch_strides(g); }
    while (addresses % (uintptr_t)alignment != 0) { alignment /= 2; }
    return (PlanKey){alignment,
                     {g->m, g->n, g->k},
                     {(int32_t)g->type_a, (int32_t)g->type_b, (int32_t)g->type_d},
                     {g->trans_a, g->trans_b},
                     (int32_t)g->epilogue,
                     g->beta != 0.0f,
                     g->c == g->d,
                     g->fast_accumulation,
                     {(int32_t)g->scaling_a, (int32_t)g->scaling_b},
                     g->batch};
}

static cublasLtMatrixLayout_t layout_new(GpuType type, int rows, int cols, int batch) {
    static const cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    const int64_t stride = (int64_t)rows * cols;
    cublasLtMatrixLayout_t layout;
    BLAS_CHECK(
        cublasLtMatrixLayoutCreate(&layout, types[type], (uint64_t)cols, (uint64_t)rows, cols));
    if (batch > 0) {
        BLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                    &batch, sizeof(batch)));
        BLAS_CHECK(cublasLtMatrixLayoutSetAttribute(
            layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)));
    }
    return layout;
}

#define SET(op, attribute, value)                                                             \
    BLAS_CHECK(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_##attribute, &(value), \
                                              sizeof(value)))

// Sets the pointers that cuBLASLt takes from the plan's descriptor, not from the call.
static void plan_point(GemmPlan *p, const Gemm *g) {
    if (g->bias != NULL) { SET(p->op, BIAS_POINTER, g->bias); }
    if (g->aux != NULL) { SET(p->op, EPILOGUE_AUX_POINTER, g->aux); }
    if (g->scale_a != NULL) { SET(p->op, B_SCALE_POINTER, g->scale_a); }
    if (g->scale_b != NULL) { SET(p->op, A_SCALE_POINTER, g->scale_b); }
}

static void plan_describe(GemmPlan *p, const Gemm *g) {
    static const cublasLtEpilogue_t epilogues[] = {
        [EPILOGUE_BIAS] = CUBLASLT_EPILOGUE_BIAS, [EPILOGUE_DGELU] = CUBLASLT_EPILOGUE_DGELU};
    const cublasOperation_t transa = g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t transb = g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cudaDataType_t bias_type = CUDA_R_16BF;
    const int64_t aux_row = g->n;
    const int8_t fast = 1;
    BLAS_CHECK(cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    SET(p->op, TRANSA, transa);
    SET(p->op, TRANSB, transb);
    if (g->epilogue != EPILOGUE_NONE) {
        SET(p->op, EPILOGUE, epilogues[g->epilogue]);
        SET(p->op, BIAS_DATA_TYPE, bias_type);
        if (g->aux != NULL) { SET(p->op, EPILOGUE_AUX_LD, aux_row); }
    }
    if (g->fast_accumulation) { SET(p->op, FAST_ACCUM, fast); }
#if CUBLAS_VERSION >= 120900
    static const int32_t modes[] = {
        [SCALE_DELAYED] = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
        [SCALE_CURRENT] = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
        [SCALE_BLOCK_1X128] = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        [SCALE_BLOCK_128X128] = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
    };
    SET(p->op, B_SCALE_MODE, modes[g->scaling_a]);
    SET(p->op, A_SCALE_MODE, modes[g->scaling_b]);
#endif
    p->a = layout_new(g->type_b, g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n, g->batch);
    p->b = layout_new(g->type_a, g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k, g->batch);
    p->d = layout_new(g->type_d, g->m, g->n, g->batch);
    plan_point(p, g);
}

#define PREFER(preference, attribute, value)                                                      \
    BLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_##attribute, \
                                                    &(value), sizeof(value)))

// Takes the first algorithm that the heuristic proposes. Returns false if there is none. CANDIDATES
// stays 16, because another algorithm may come first if fewer are requested: the benchmarks were
// measured with 16.
static bool plan_algorithm(Gpu *gpu, GemmPlan *p) {
    enum { CANDIDATES = 16 };
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    size_t workspace = gpu->workspace_bytes;
    uint32_t alignment = (uint32_t)p->key.alignment;
    int count = 0;
    BLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    PREFER(preference, MAX_WORKSPACE_BYTES, workspace);
    PREFER(preference, MIN_ALIGNMENT_A_BYTES, alignment);
    PREFER(preference, MIN_ALIGNMENT_B_BYTES, alignment);
    PREFER(preference, MIN_ALIGNMENT_C_BYTES, alignment);
    PREFER(preference, MIN_ALIGNMENT_D_BYTES, alignment);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gpu->blas, p->op, p->a, p->b, p->d, p->d,
                                                           preference, CANDIDATES, results, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) { return false; }
    p->algo = results[0].algo;
    return true;
}

static GemmPlan *plan_for(Gpu *gpu, const Gemm *g) {
    GemmPlan p = {.key = key_of(g)};
    check(g);
    for (GemmPlan *known = gpu->gemms; known < gpu->gemms + gpu->num_gemms; known++) {
        if (memcmp(&known->key, &p.key, sizeof(PlanKey)) == 0) { return known; }
    }
#if CUBLAS_VERSION < 120900
    if (fp8_by_blocks(g->scaling_a)) {
        fail("block scales need cuBLASLt of CUDA 12.9 or newer");
        return NULL;
    }
#endif
    plan_describe(&p, g);
    if (!plan_algorithm(gpu, &p)) {
        plan_destroy(&p);
        fail("cuBLASLt has no algorithm for a matmul of %d x %d x %d (types %d, %d -> %d)", g->m,
             g->n, g->k, g->type_a, g->type_b, g->type_d);
        return NULL;
    }
    gpu->gemms = realloc_or_die(gpu->gemms, (size_t)(gpu->num_gemms + 1) * sizeof(GemmPlan));
    gpu->gemms[gpu->num_gemms] = p;
    return &gpu->gemms[gpu->num_gemms++];
}

bool gemm_supported(Gpu *gpu, Gemm g) {
    return plan_for(gpu, &g) != NULL;
}

Gemm gemm_plain(int m, int n, int k, const Bf16 *a, const Bf16 *b, void *d) {
    Gemm g = {.m = m, .n = n, .k = k, .a = a, .b = b, .d = d, .alpha = 1.0f};
    g.type_a = g.type_b = g.type_d = TYPE_BF16;
    return g;
}

void gemm(Gpu *gpu, Gemm g) {
    gpu_family(gpu, g.family);
    GemmPlan *p = plan_for(gpu, &g);
    or_die(p != NULL);
    plan_point(p, &g);
    const void *c = g.c != NULL ? g.c : g.d;
    BLAS_CHECK(cublasLtMatmul(gpu->blas, p->op, &g.alpha, g.b, p->a, g.a, p->b, &g.beta, c, p->d,
                              g.d, p->d, &p->algo, gpu->workspace, gpu->workspace_bytes,
                              gpu->stream));
}
