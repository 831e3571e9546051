// Tests kernels/gemm.c over a stand-in for cuBLASLt on the CPU: matmuls, biases and batches
// against cpu_gemm, what is refused by name, and which alignment of addresses an algorithm may
// assume. Also the profile of a step in kernels/gpu.c.
#include "../base/rng.h"
#include "../kernels/cpu.h"
#include "../kernels/fp8_format.h"
#include "../kernels/gemm.h"
#include "processes.h"
#include "test.h"

#include <math.h>
#include <string.h>

enum { M = 48, N = 32, K = 64, MOST = 64 * 64 };

// An operand of a matmul: rounded values, which lie `shift` bytes after a multiple of 256.
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

static void release(Sample *samples, int count) {
    for (int i = 0; i < count; i++) { cudaFree(samples[i].memory); }
}

static float result(const Gemm *g, int i) {
    return g->type_d == TYPE_F32 ? ((const float *)g->d)[i] : bf16_decode(((const Bf16 *)g->d)[i]);
}

enum { A, B, D, BIAS, OTHER, SAMPLES }; // OTHER: c, or aux

// Makes operands of a matmul, with b `shift` bytes from an aligned address, and the plain matmul.
static Gemm matmul_of(Sample x[SAMPLES], GpuType a, GpuType b, int shift) {
    for (int i = 0; i < SAMPLES; i++) {
        GpuType type = i == A ? a : (i == B ? b : TYPE_BF16);
        x[i] = sample((uint64_t)i + 1, type, i == B ? shift : 0);
    }
    Gemm g = gemm_plain(M, N, K, (Bf16 *)(void *)x[A].device, (Bf16 *)(void *)x[B].device,
                        x[D].device);
    g.type_a = a;
    g.type_b = b;
    return g;
}

// Compares a matmul, or a batch of them, with cpu_gemm's. The error of an element may be
// `relative` of its value plus `absolute`.
static void check_matmul(Gpu *gpu, Gemm g, const Sample *x, float relative, float absolute) {
    float expected[MOST] = {0};
    int size = g.m * g.n, batch = g.batch > 0 ? g.batch : 1;
    float scales = g.scale_a != NULL ? *g.scale_a * *g.scale_b : 1.0f;
    for (int b = 0; b < batch; b++) {
        cpu_gemm((CpuGemm){.m = g.m,
                           .n = g.n,
                           .k = g.k,
                           .a = x[A].values + b * g.m * g.k,
                           .b = x[B].values + b * g.k * g.n,
                           .c = expected + b * size,
                           .trans_a = g.trans_a,
                           .trans_b = g.trans_b,
                           .alpha = g.alpha * scales});
    }
    gemm(gpu, g);
    for (int i = 0; i < batch * size; i++) {
        float added = g.c != NULL ? g.beta * x[OTHER].values[i] : 0.0f;
        if (g.epilogue == EPILOGUE_BIAS) { added += x[BIAS].values[i % g.n]; }
        float sum = expected[i] + added;
        CHECK_CLOSE(result(&g, i), sum, relative * fabsf(sum) + absolute);
    }
}

// A matmul of BF16 whose addresses are multiples of `alignment` and of no larger power of two.
// With a BF16 result, it adds a matrix and a bias.
static void check_bf16(Gpu *gpu, bool trans_a, bool trans_b, GpuType type_d, int alignment) {
    Sample x[SAMPLES];
    Gemm g = matmul_of(x, TYPE_BF16, TYPE_BF16, alignment % 256);
    g.trans_a = trans_a;
    g.trans_b = trans_b;
    g.type_d = type_d;
    g.alpha = 0.5f;
    if (type_d == TYPE_BF16) {
        g.beta = 2.0f;
        g.c = x[OTHER].device;
        g.epilogue = EPILOGUE_BIAS;
        g.bias = x[BIAS].device;
    }
    float most = type_d == TYPE_BF16 ? 1e-2f : 1e-6f;
    check_matmul(gpu, g, x, most, most);
    x[A].values[0] += 1.0f; // a changed operand must be seen
    CHECK(CAUGHT(check_matmul(gpu, g, x, most, most)));
    release(x, SAMPLES);
}

// An algorithm that needs a larger alignment than the addresses of a matmul have is not used: not
// for a new plan, and not from the plan of another matmul of the same shape.
TEST(matmuls) {
    Gpu gpu = {.name = "stand-in"};
    for (int transposed = 0; transposed < 4; transposed++) {
        check_bf16(&gpu, transposed & 1, transposed & 2, TYPE_F32, 256);
        check_bf16(&gpu, transposed & 1, transposed & 2, TYPE_BF16, 256);
    }
    gemm_close(&gpu);
    for (int alignment = 256; alignment >= 16; alignment /= 2) {
        check_bf16(&gpu, false, true, TYPE_F32, alignment);
    }
    for (int alignment = 16; alignment <= 256; alignment *= 2) {
        check_bf16(&gpu, true, false, TYPE_BF16, alignment);
    }
    gemm_close(&gpu);
}

// Batches, in every transposition. The distance between operands must be aligned as an address.
TEST(batches) {
    Gpu gpu = {.name = "stand-in"};
    for (int transposed = 0; transposed < 4; transposed++) {
        Sample x[SAMPLES];
        Gemm g = matmul_of(x, TYPE_BF16, TYPE_BF16, 0);
        g.m = 8;
        g.n = 24;
        g.k = 40;
        g.batch = 3;
        g.trans_a = transposed & 1;
        g.trans_b = transposed & 2;
        g.alpha = 0.5f;
        g.beta = 2.0f;
        g.c = x[OTHER].device;
        check_matmul(&gpu, g, x, 1e-2f, 1e-2f);
        release(x, SAMPLES);
    }
    gemm_close(&gpu);
}

_Alignas(16) static const float scales[8] = {[0] = 0.5f, [4] = 3.0f};

static Gemm fp8_matmul(Sample x[SAMPLES]) {
    Gemm g = matmul_of(x, TYPE_E5M2, TYPE_E4M3, 64);
    g.type_d = TYPE_F32;
    g.trans_b = true;
    g.scale_a = scales;
    g.scale_b = scales + 4;
    return g;
}

TEST(fp8_matmuls) {
    Gpu gpu = {.name = "stand-in"};
    Sample x[SAMPLES];
    Gemm g = fp8_matmul(x);
    check_matmul(&gpu, g, x, 1e-6f, 1e-6f);
    g.m = 40;
    CHECK(!gemm_supported(&gpu, g));
    CHECK_CONTAINS(error_text(),
                   "cuBLASLt has no algorithm for a matmul of 40 x 32 x 64 (types 3, 2");
    g.m = M;
    g.d = x[A].device + M * K; // directly after an operand is allowed
    gemm(&gpu, g);
    release(x, SAMPLES);
    gemm_close(&gpu);
}

// ---- what is refused ----------------------------------------------------------------------------

static int a_wrong_call(int number, void *argument) {
    Gpu gpu = {.name = "stand-in"};
    int fault = *(const int *)argument;
    Sample x[SAMPLES];
    (void)number;
    Gemm g = fault < 5 ? matmul_of(x, TYPE_BF16, TYPE_BF16, fault == 0 ? 8 : 0) : fp8_matmul(x);
    switch (fault) {
    case 1: g.d = x[D].device + 4; break;
    case 2: g.beta = 1.0f; break;
    case 3: g.epilogue = EPILOGUE_BIAS; break;
    case 4: g.epilogue = EPILOGUE_DGELU; break;
    case 5: g.scale_b = scales + 1; break;
    case 6: g.scale_a = NULL; break;
    case 7: g.trans_b = false; break;
    case 8: g.type_b = TYPE_BF16; break;
    case 9: g.batch = 2; break;
    case 10: g.d = x[A].device + M * K - 16; break;
    case 11: g.d = x[B].device - M * N * 4 + 16; break;
    case 12:
        g.epilogue = EPILOGUE_DGELU;
        g.aux = x[OTHER].device, g.d = x[OTHER].device + M * N * 2 - 16;
        break;
    case 13: g.bias = x[OTHER].device; break;
    case 14: g.aux = x[OTHER].device; break;
    }
    gemm(&gpu, g);
    return 0;
}

TEST(wrong_calls_are_named) {
    static const char *const expected[] = {"gemm: a matmul of 48 x 32 x 64 has b at 0x",
                                           "has d at 0x",
                                           "has c at (nil)",
                                           "has bias at (nil)",
                                           "has aux at ",
                                           "has scale_b at 0x",
                                           "has scale_a at (nil)",
                                           "mixes FP8 with",
                                           "mixes FP8 with",
                                           "a batch of matmuls of 48 x 32 x 64 is in FP8",
                                           "48 x 32 x 64 writes d over its operand a",
                                           "48 x 32 x 64 writes d over its operand b",
                                           "48 x 32 x 64 writes d over its operand aux",
                                           "has a bias or aux that its epilogue does not read",
                                           "has a bias or aux that its epilogue does not read"};
    for (int fault = 0; fault < 15; fault++) {
        Processes run;
        processes_run(&run, 1, a_wrong_call, &fault);
        FREED char *log = processes_log(&run);
        CHECK_EQUAL(run.status[0], EXIT_FAILURE);
        CHECK_CONTAINS(log, expected[fault]);
    }
}

// The names of devices from the driver.
TEST(peaks_are_by_whole_names) {
    static const struct {
        const char *name;
        double tflops;
    } rows[] = {{"NVIDIA GB300", 2500},
                {"NVIDIA B300 SXM6 AC", 2250},
                {"NVIDIA GB200", 2500},
                {"NVIDIA B200", 2250},
                {"NVIDIA GH200 480GB", 989},
                {"NVIDIA H200 NVL", 835},
                {"NVIDIA H200", 989},
                {"NVIDIA H100 80GB HBM3", 989},
                {"NVIDIA H100 PCIe", 756},
                {"NVIDIA H20", 148},
                {"NVIDIA A100-SXM4-80GB", 312},
                {"NVIDIA A10G", 70},
                {"NVIDIA A10", 125},
                {"NVIDIA L40S", 362},
                {"NVIDIA L4", 121},
                {"NVIDIA RTX A4000", 0},
                {"stand-in", 0}};
    EACH (row, rows) {
        Gpu gpu = {0};
        snprintf(gpu.name, sizeof(gpu.name), "%s", row->name);
        CHECK_CLOSE(gpu_peak_flops(&gpu), 1e12 * row->tflops, 1);
    }
}

// There are more changes of family than the profile has events, each of a millisecond: all count.
TEST(a_profile_of_any_length) {
    enum { CHANGES = 200001 };
    Gpu gpu = {0};
    double ms[FAMILY_COUNT];
    gpu_profile_begin(&gpu);
    for (int i = 0; i < CHANGES; i++) {
        gpu_family(&gpu, i % 3 == 0 ? FAMILY_NORMS : i % 3 == 1 ? FAMILY_LOSS : FAMILY_MATMULS);
        standin_seconds += 1e-3;
    }
    gpu_profile_end(&gpu, ms);
    for (int i = 0; i < FAMILY_COUNT; i++) {
        bool used = i == FAMILY_NORMS || i == FAMILY_LOSS || i == FAMILY_MATMULS;
        CHECK(used ? ms[i] >= CHANGES / 3 * 0.999 && ms[i] <= CHANGES / 3 * 1.1 : ms[i] == 0);
    }
    CHECK(gpu.profile == NULL);
}
