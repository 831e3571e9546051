// kernels/gemm.c as it is, over a cuBLASLt of the CPU: products and epilogues against cpu_gemm,
// what is refused by name, which addresses an algorithm gets, and the choices of --gemm-autotune.
#include "../base/rng.h"
#include "../kernels/cpu.h"
#include "../kernels/fp8_format.h"
#include "../kernels/gemm.h"
#include "processes.h"
#include "test.h"

#include <math.h>
#include <string.h>

enum { M = 48, N = 32, K = 64, MOST = 64 * 64 };

// An operand of a product: some values, rounded, and where they lie, `shift` bytes past a multiple
// of 256.
typedef struct {
    float values[MOST];
    char *memory, *device;
} Sample;

static Sample sample(uint64_t key, GpuType type, int shift) {
    Sample x;
    Fp8Type fp8 = type == TYPE_E5M2 ? FP8_E5M2 : FP8_E4M3;
    CUDA_CHECK(cudaMalloc((void **)&x.memory, MOST * sizeof(float) + 256));
    x.device = x.memory + shift;
    for (int i = 0; i < MOST; i++) {
        float value = rng_normal(key, (uint64_t)i);
        if (gpu_type_bytes(type) == 1) {
            uint8_t code = fp8_encode(value, fp8);
            x.values[i] = fp8_decode(code, fp8);
            ((uint8_t *)x.device)[i] = code;
        } else {
            Bf16 code = bf16_encode(value);
            x.values[i] = bf16_decode(code);
            ((Bf16 *)(void *)x.device)[i] = code;
        }
    }
    return x;
}

static float result(const Gemm *g, int i) {
    return g->type_d == TYPE_F32 ? ((const float *)g->d)[i] : bf16_decode(((const Bf16 *)g->d)[i]);
}

// A product of BF16 whose addresses are multiples of `alignment` and of no larger power of two.
static void check_product(Gpu *gpu, bool trans_a, bool trans_b, GpuType type_d, int alignment) {
    int shift = alignment % 256;
    Sample a = sample(1, TYPE_BF16, 0), b = sample(2, TYPE_BF16, shift);
    Sample c = sample(3, TYPE_BF16, 0), bias = sample(4, TYPE_BF16, 0);
    Sample d = sample(5, TYPE_BF16, 0);
    float expected[M * N] = {0};
    bool narrow = type_d == TYPE_BF16;
    Gemm g = gemm_plain(M, N, K, (Bf16 *)(void *)a.device, (Bf16 *)(void *)b.device, d.device);
    g.trans_a = trans_a;
    g.trans_b = trans_b;
    g.type_d = type_d;
    g.alpha = 0.5f;
    if (narrow) {
        g.beta = 2.0f;
        g.c = c.device;
        g.epilogue = EPILOGUE_BIAS;
        g.bias = bias.device;
    }
    CpuGemm same = {.m = M,
                    .n = N,
                    .k = K,
                    .a = a.values,
                    .b = b.values,
                    .c = expected,
                    .trans_a = trans_a,
                    .trans_b = trans_b,
                    .alpha = 0.5f};
    cpu_gemm(same);
    gemm(gpu, g);
    for (int i = 0; i < M * N; i++) {
        float sum = expected[i] + (narrow ? 2.0f * c.values[i] + bias.values[i % N] : 0.0f);
        CHECK_CLOSE(result(&g, i), sum, (narrow ? 1e-2 : 1e-6) * (fabsf(sum) + 1));
    }
    Sample *all[] = {&a, &b, &c, &d, &bias};
    for (int i = 0; i < 5; i++) { cudaFree(all[i]->memory); }
}

static void products(void) {
    Gpu gpu = {.name = "stand-in"};
    for (int transposed = 0; transposed < 4; transposed++) {
        check_product(&gpu, transposed & 1, transposed & 2, TYPE_F32, 256);
        check_product(&gpu, transposed & 1, transposed & 2, TYPE_BF16, 256);
    }
    gemm_close(&gpu);
}

// An algorithm that needs more alignment than a product's addresses have is not taken, neither for
// a new plan nor for that of another product of the same shape.
static void addresses_of_every_alignment(void) {
    Gpu gpu = {.name = "stand-in"};
    for (int alignment = 256; alignment >= 16; alignment /= 2) {
        check_product(&gpu, false, true, TYPE_F32, alignment);
    }
    for (int alignment = 16; alignment <= 256; alignment *= 2) {
        check_product(&gpu, true, false, TYPE_BF16, alignment);
    }
    gemm_close(&gpu);
}

static void gelu_epilogues(void) {
    Gpu gpu = {.name = "stand-in"};
    Sample a = sample(1, TYPE_BF16, 0), b = sample(2, TYPE_BF16, 0);
    Sample d = sample(3, TYPE_BF16, 0), aux = sample(4, TYPE_BF16, 0);
    Sample bias = sample(5, TYPE_BF16, 0);
    float product[M * N] = {0}, pre[M * N], expected[M * N];
    Gemm g = gemm_plain(M, N, K, (Bf16 *)(void *)a.device, (Bf16 *)(void *)b.device, d.device);
    g.epilogue = EPILOGUE_GELU_AUX_BIAS;
    g.bias = bias.device;
    g.aux = aux.device;
    CpuGemm same = {
        .m = M, .n = N, .k = K, .a = a.values, .b = b.values, .c = product, .alpha = 1.0f};
    cpu_gemm(same);
    gemm(&gpu, g);
    for (int i = 0; i < M * N; i++) {
        pre[i] = bf16_decode(((Bf16 *)(void *)aux.device)[i]);
        CHECK_CLOSE(pre[i], product[i] + bias.values[i % N], 4e-3 * (fabsf(pre[i]) + 1));
    }
    gelu_forward(expected, pre, M * N);
    for (int i = 0; i < M * N; i++) {
        CHECK_CLOSE(result(&g, i), expected[i], 4e-3 * fabsf(expected[i]) + 1e-6);
    }
    g.epilogue = EPILOGUE_DGELU;
    gelu_backward(expected, product, pre, M * N);
    gemm(&gpu, g);
    for (int i = 0; i < M * N; i++) {
        CHECK_CLOSE(result(&g, i), expected[i], 4e-3 * fabsf(expected[i]) + 1e-5);
    }
    Sample *all[] = {&a, &b, &d, &aux, &bias};
    for (int i = 0; i < 5; i++) { cudaFree(all[i]->memory); }
    gemm_close(&gpu);
}

static Gemm fp8_product(const Sample *a, const Sample *b, const Sample *d, const float *scales) {
    Gemm g = gemm_plain(M, N, K, (Bf16 *)(void *)a->device, (Bf16 *)(void *)b->device, d->device);
    g.type_a = TYPE_E5M2;
    g.type_b = TYPE_E4M3;
    g.type_d = TYPE_F32;
    g.trans_b = true;
    g.scale_a = scales;
    g.scale_b = scales + 4;
    return g;
}

static void fp8_products(void) {
    Gpu gpu = {.name = "stand-in"};
    Error err;
    _Alignas(16) const float scales[8] = {[0] = 0.5f, [4] = 3.0f};
    Sample a = sample(1, TYPE_E5M2, 64), b = sample(2, TYPE_E4M3, 0);
    Sample d = sample(3, TYPE_BF16, 0);
    float expected[M * N] = {0};
    Gemm g = fp8_product(&a, &b, &d, scales);
    CpuGemm same = {.m = M,
                    .n = N,
                    .k = K,
                    .a = a.values,
                    .b = b.values,
                    .c = expected,
                    .trans_b = true,
                    .alpha = 1.5f};
    cpu_gemm(same);
    gemm(&gpu, g);
    for (int i = 0; i < M * N; i++) {
        CHECK_CLOSE(result(&g, i), expected[i], 1e-6 * (fabsf(expected[i]) + 1));
    }
    g.m = 40;
    CHECK(!gemm_supported(&gpu, g, &err));
    CHECK_CONTAINS(err.text, "cuBLASLt has no algorithm for a product of 40 x 32 x 64 (types 3, 2");
    cudaFree(a.memory);
    cudaFree(b.memory);
    cudaFree(d.memory);
    gemm_close(&gpu);
}

// ---- what is refused ----------------------------------------------------------------------------

static int a_wrong_call(int number, void *argument) {
    Gpu gpu = {.name = "stand-in"};
    _Alignas(16) const float scales[8] = {1, 1, 1, 1, 1};
    int fault = *(const int *)argument;
    (void)number;
    Sample a = sample(1, TYPE_BF16, 0), b = sample(2, TYPE_BF16, fault == 0 ? 8 : 0);
    Sample d = sample(3, TYPE_BF16, 0);
    Gemm g = gemm_plain(M, N, K, (Bf16 *)(void *)a.device, (Bf16 *)(void *)b.device, d.device);
    if (fault == 1) { g.d = d.device + 4; }
    if (fault == 2) { g.beta = 1.0f; }
    if (fault == 3) { g.epilogue = EPILOGUE_BIAS; }
    if (fault == 4) { g.epilogue = EPILOGUE_DGELU; }
    if (fault >= 5) { g = fp8_product(&a, &b, &d, scales); }
    if (fault == 5) { g.scale_b = scales + 1; }
    if (fault == 6) { g.scale_a = NULL; }
    if (fault == 7) { g.trans_b = false; }
    if (fault == 8) { g.type_b = TYPE_BF16; }
    gemm(&gpu, g);
    return 0;
}

static void wrong_calls_are_named(void) {
    static const char *const expected[] = {"gemm: a product of 48 x 32 x 64 has b at 0x",
                                           "has d at 0x",
                                           "has c at (nil)",
                                           "has bias at (nil)",
                                           "has aux at ",
                                           "has scale_b at 0x",
                                           "has scale_a at (nil)",
                                           "mixes FP8 with",
                                           "mixes FP8 with"};
    for (int fault = 0; fault < 9; fault++) {
        Processes run;
        processes_run(&run, 1, a_wrong_call, &fault);
        char *log = processes_log(&run);
        CHECK_EQUAL(run.status[0], EXIT_FAILURE);
        CHECK_CONTAINS(log, expected[fault]);
        free(log);
    }
}

// ---- choices ------------------------------------------------------------------------------------

// The algorithm of a Gpu's only plan: the last number of its choices.
static int algorithm(Gpu *gpu) {
    size_t bytes;
    int32_t last;
    char *data = gemm_choices(gpu, &bytes);
    memcpy(&last, data + bytes - sizeof(last), sizeof(last));
    free(data);
    return last;
}

static int algorithm_by(const char *name, const char *data, size_t bytes) {
    Gpu gpu = {.name = ""};
    snprintf(gpu.name, sizeof(gpu.name), "%s", name);
    gemm_take_choices(&gpu, data, bytes);
    check_product(&gpu, false, true, TYPE_F32, 256);
    int found = algorithm(&gpu);
    gemm_close(&gpu);
    return found;
}

static void choices_are_kept(void) {
    Gpu gpu = {.name = "stand-in"};
    size_t bytes;
    int32_t second = 1, absent = 7;
    setenv("STANDIN_ALGORITHMS", "3", 1);
    check_product(&gpu, false, true, TYPE_F32, 256);
    CHECK_EQUAL(algorithm(&gpu), 0);
    char *data = gemm_choices(&gpu, &bytes);
    gemm_close(&gpu);
    memcpy(data + bytes - sizeof(second), &second, sizeof(second));
    CHECK_EQUAL(algorithm_by("stand-in", data, bytes), 1);
    CHECK_EQUAL(algorithm_by("another", data, bytes), 0);
    for (size_t cut = 0; cut < bytes; cut++) {
        CHECK_EQUAL(algorithm_by("stand-in", data, cut), 0);
    }
    memcpy(data + bytes - sizeof(absent), &absent, sizeof(absent));
    CHECK_EQUAL(algorithm_by("stand-in", data, bytes), 0);
    free(data);

    gemm_autotune(&gpu, true); // which of them is chance: all are the same
    check_product(&gpu, false, true, TYPE_F32, 256);
    int found = algorithm(&gpu);
    CHECK(found >= 0 && found < 3);
    gemm_close(&gpu);
    unsetenv("STANDIN_ALGORITHMS");
}

int main(void) {
    RUN(products);
    RUN(addresses_of_every_alignment);
    RUN(gelu_epilogues);
    RUN(fp8_products);
    RUN(wrong_calls_are_named);
    RUN(choices_are_kept);
    return test_summary();
}
