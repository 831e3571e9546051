#include "support.h"
#include "../../kernels/cpu.h"
#include "../../kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// FP8 is used if a block's forward matmuls have at least this many multiply-adds
// (model/precision.h). Measured with GPT-2's blocks of 128 to 768 channels and 1,024 to 16,384
// tokens (one H200, 2026-11-21): compared with BF16, FP8 took between 0.3% less and 3% more time at
// 3.2e9 multiply-adds, and 3% less at 7.2e9.
static const double fp8_gains_from = 5e9;

// Why the device has no FP8. Static, because the precision table points to it.
static char reason[64];

NumberSupport support_of(int capability) {
    // For tests: LLM8_TEST_CAPABILITY=80 treats the GPU as an older one; LLM8_TEST_SMALL_FP8=1
    // allows FP8 in models too small to gain from it.
    const char *assumed = getenv("LLM8_TEST_CAPABILITY"), *small = getenv("LLM8_TEST_SMALL_FP8");
    if (assumed != NULL && (capability == 0 || atoi(assumed) < capability)) {
        capability = atoi(assumed);
    }
    bool always = small != NULL && strcmp(small, "1") == 0;
    NumberSupport support = {NUMBER_BF16, NULL, always ? 0 : fp8_gains_from};
    if (capability > 0 && capability < FP8_CAPABILITY) {
        snprintf(reason, sizeof(reason), "compute capability %d.%d is below %d.%d", capability / 10,
                 capability % 10, FP8_CAPABILITY / 10, FP8_CAPABILITY % 10);
        support.lacks_fp8 = reason;
    }
    return support;
}

NumberSupport support_find(Gpu *gpu, const Options *o, const Group *group) {
    NumberSupport support = support_of(gpu->capability);
    if (o->fp8_format == FP8_FORMAT_NONE) { return support; }
    if (support.lacks_fp8 == NULL && fp8_self_check(gpu, o, support) < 0) {
        bool blocks = o->fp8_recipe == FP8_RECIPE_BLOCKWISE;
        snprintf(reason, sizeof(reason), "%s",
                 blocks ? "no matmuls by blocks; try --fp8-recipe delayed"
                        : "the FP8 self-check failed");
        warn("%s", error_text());
        support.lacks_fp8 = reason;
    }
    // if one of several ranks has no FP8, no rank uses it
    bool has = support.lacks_fp8 == NULL || fail("%s", support.lacks_fp8);
    if (!group_agree(group, CHANNEL_MAIN, has)) {
        snprintf(reason, sizeof(reason), "%.*s", (int)sizeof(reason) - 1, error_text());
        support.lacks_fp8 = reason;
    }
    if (support.lacks_fp8 == NULL) { return support; }
    if (o->fp8_required) { die("--fp8-required: FP8 is not available: %s", support.lacks_fp8); }
    warn("FP8 is not available: %s; the run continues in BF16", support.lacks_fp8);
    return support;
}

// Fills an operand [rows,k] with small whole numbers, and its inverse scales with powers of two, so
// that sums of their products are exact in FP32, in any order. `values` receives the numbers that
// codes and scales represent.
static void fill_operand(int side, GpuType type, Scaling scaling, int rows, int k, void *codes,
                         float *inverse, float *values) {
    const int64_t n = (int64_t)rows * k;
    for (int64_t i = 0; i < n / FP8_BLOCK; i++) {
        inverse[i] = 1.0f / (float)(2 << (i + side) % 3);
    }
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = i / k, column = i % k;
        const float value = (float)((row * 7 + column * 5 + row * column * (side + 1)) % 7 - 3);
        values[i] = value;
        if (type == TYPE_BF16) {
            ((Bf16 *)codes)[i] = bf16_encode(value);
        } else {
            ((uint8_t *)codes)[i] = fp8_encode(value, type == TYPE_E5M2 ? FP8_E5M2 : FP8_E4M3);
            values[i] *= inverse[fp8_scale_index(scaling, rows, k, (int)row, (int)column)];
        }
    }
}

bool support_matmul(Gpu *gpu, Gemm g, int rows, float *ms) {
    enum { RUNS = 10 };
    const size_t values = (size_t)g.n * (size_t)g.k, results = (size_t)(rows * g.n);
    const size_t codes = values * sizeof(Bf16), side = codes + values / FP8_BLOCK * sizeof(float);
    const size_t d_bytes = (size_t)g.m * (size_t)g.n * sizeof(float);
    // codes and scales of A and of B, then D
    FREED char *host = calloc_or_die(1, 2 * side + d_bytes);
    FREED float *a = malloc_or_die((2 * values + results) * sizeof(float));
    float *b = a + values, *expected = b + values, *found = (float *)(host + 2 * side);
    char *device;
    int wrong = 0;
    fill_operand(0, g.type_a, g.scaling_a, g.n, g.k, host, (float *)(host + codes), a);
    fill_operand(1, g.type_b, g.scaling_b, g.n, g.k, host + side, (float *)(host + side + codes),
                 b);
    CUDA_CHECK(cudaMalloc((void **)&device, 2 * side + d_bytes));
    gpu_send(gpu, device, host, 2 * side);
    g.a = device;
    g.b = device + side;
    g.d = device + 2 * side;
    g.trans_b = true;
    if (g.type_a != TYPE_BF16) {
        g.scale_a = (float *)(device + codes);
        g.scale_b = (float *)(device + side + codes);
    }
    if (g.epilogue == EPILOGUE_BIAS) { g.bias = device; }
    Gemm exact = g;
    exact.type_d = TYPE_F32;
    exact.epilogue = EPILOGUE_NONE;
    exact.bias = NULL;
    exact.fast_accumulation = false;
    bool well = gemm_supported(gpu, exact);
    if (well) {
        gemm(gpu, exact);
        gpu_read(gpu, found, g.d, results * sizeof(float));
        cpu_gemm((CpuGemm){rows, g.n, g.k, a, b, expected, .trans_b = true, .alpha = 1.0f});
        for (size_t i = 0; i < results; i++) { wrong += !(found[i] == expected[i]); }
    }
    if (wrong > 0) { well = fail("%d of its %zu entries are wrong", wrong, results); }
    well = well && gemm_supported(gpu, g);
    if (well && ms != NULL) {
        gemm(gpu, g);
        GpuTimer timer = gpu_timer_begin(gpu);
        for (int i = 0; i < RUNS; i++) { gemm(gpu, g); }
        *ms = gpu_timer_end(gpu, timer) / RUNS;
    }
    CUDA_CHECK(cudaFree(device));
    return well;
}

typedef struct {
    const char *name;
    OperandId a, b;
} Matmul;

static const Matmul matmuls[] = {{"forward", OPERAND_X, OPERAND_W},
                                 {"input-gradient", OPERAND_DY, OPERAND_W},
                                 {"weight-gradient", OPERAND_DY, OPERAND_X}};
enum { MATMULS = sizeof(matmuls) / sizeof(matmuls[0]) };

// Checks one of a layer's matmuls, with the types and the epilogue that a step uses. K is
// 2 * FP8_BLOCK, so that with blockwise scaling each row has two scales.
static bool check_matmul(Gpu *gpu, const Precision *p, const LinearPrecision *lp, int matmul) {
    const Matmul *kind = &matmuls[matmul];
    const Fp8Type type_a = lp->type[kind->a], type_b = lp->type[kind->b];
    const int first = fp8_slot_index(p->config, lp->linear, lp->layer, OPERAND_X);
    const bool forward = kind->a == OPERAND_X;
    Gemm g = gemm_plain(FP8_BLOCK, FP8_BLOCK, 2 * FP8_BLOCK, NULL, NULL, NULL);
    g.type_a = gpu_fp8_type(type_a);
    g.type_b = gpu_fp8_type(type_b);
    g.scaling_a = fp8_slot_scaling(p, first + (int)kind->a);
    g.scaling_b = fp8_slot_scaling(p, first + (int)kind->b);
    g.type_d = kind->b == OPERAND_W ? TYPE_BF16 : TYPE_F32;
    if (kind->b == OPERAND_W) {
        g.fast_accumulation = forward ? p->fast_forward : p->fast_backward;
    }
    if (forward && p->config->arch == ARCH_GPT2 && lp->linear != LINEAR_HEAD) {
        g.epilogue = EPILOGUE_BIAS;
    }
    return support_matmul(gpu, g, g.m, NULL) ||
           fail("FP8 self-check: the %s matmul of %s and %s%s: %s", kind->name,
                type_a == FP8_E4M3 ? "E4M3" : "E5M2", type_b == FP8_E4M3 ? "E4M3" : "E5M2",
                fp8_by_blocks(g.scaling_a) ? " by blocks" : "", error_text());
}

// Returns how many kinds of matmuls it has checked, or -1 if one is wrong.
static int check_matmuls(Gpu *gpu, const Precision *p) {
    bool checked[MATMULS][2][2] = {0}; // indexed by the operands' types
    int tried = 0;
    for (const LinearPrecision *lp = p->linear; lp < p->linear + p->count; lp++) {
        for (int k = 0; k < MATMULS && lp->number == NUMBER_FP8; k++) {
            bool *done = &checked[k][lp->type[matmuls[k].a]][lp->type[matmuls[k].b]];
            bool fp8 = matmuls[k].b == OPERAND_W || lp->wgrad == NUMBER_FP8;
            if (fp8 && !*done) {
                if (!check_matmul(gpu, p, lp, k)) { return -1; }
                tried++;
            }
            *done = true;
        }
    }
    return tried;
}

int fp8_self_check(Gpu *gpu, const Options *o, NumberSupport support) {
    const ModelConfig config = model_config(o);
    Precision precision = precision_decide(o, &config, support);
    void *workspace = gpu->workspace;
    size_t bytes = gpu->workspace_bytes;
    gpu->workspace_bytes = GEMM_WORKSPACE_BYTES / 2;
    CUDA_CHECK(cudaMalloc(&gpu->workspace, gpu->workspace_bytes)); // the run has no workspace yet
    int tried = check_matmuls(gpu, &precision);
    CUDA_CHECK(cudaFree(gpu->workspace));
    gpu->workspace = workspace;
    gpu->workspace_bytes = bytes;
    precision_free(&precision);
    return tried;
}

bool support_shapes(const ModelConfig *c, int64_t tokens) {
    int64_t widest = max64(max64(fc1_rows(c), qkv_rows(c)), max64(c->channels, c->ffn));
    if (c->channels % 8 != 0 || c->ffn % 8 != 0 || qkv_rows(c) % 8 != 0 ||
        dim_size(c, DIM_HEADS) % 8 != 0 || c->padded_vocab % 8 != 0) {
        return fail("the GPU trainer needs --hidden-size, --ffn-hidden-size, head sizes and "
                    "--make-vocab-size-divisible-by to be multiples of 8");
    }
    if (c->channels > MAX_CHANNELS || c->head_size > MAX_HEAD_SIZE) {
        return fail("--hidden-size %d with heads of %d channels (--kv-channels): the GPU trainer "
                    "takes up to %d, and heads of up to %d",
                    c->channels, c->head_size, MAX_CHANNELS, MAX_HEAD_SIZE);
    }
    if (!gpu_tensor_fits(tokens, widest) ||
        (c->arch == ARCH_LLAMA && !gpu_rotary_fits(tokens, qkv_rows(c)))) {
        return fail("%lld tokens in a micro-batch, in up to %lld channels: the GPU kernels take "
                    "2^%d values, half as many to be rotated; a smaller --micro-batch-size",
                    (long long)tokens, (long long)widest, MAX_VALUES_LOG2);
    }
    return true;
}
