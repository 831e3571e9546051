// --verify: is this machine fit to train on? Checks versions, memory, a matmul and two attentions,
// small FP8 matmuls, and NCCL.
#include "../../base/rng.h"
#include "../../kernels/attention.h"
#include "../../kernels/cpu.h"
#include "../../kernels/fp8_format.h"
#include "../../kernels/gemm.h"
#include "support.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { RUNS = 10 };

static bool all_well = true;

static void row(const char *what, bool well, const char *format, ...) PRINTF_LIKE(3, 4);
static void row(const char *what, bool well, const char *format, ...) {
    va_list arguments;
    printf("  %-24s %-4s ", what, well ? "ok" : "BAD");
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    all_well = all_well && well;
}

static void version_row(const char *what, long compiled, long running) {
    row(what, running >= compiled / 1000 * 1000, "compiled against %ld, running %ld", compiled,
        running);
}

// Returns n random BF16 values as floats. *device receives the same values on the device.
static float *random_pair(const Gpu *gpu, int64_t n, uint64_t key, Bf16 **device) {
    float *host = malloc_or_die((size_t)n * sizeof(float));
    FREED Bf16 *codes = malloc_or_die((size_t)n * sizeof(Bf16));
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        codes[i] = bf16_encode(rng_normal(key, (uint64_t)i));
        host[i] = bf16_decode(codes[i]);
    }
    CUDA_CHECK(cudaMalloc((void **)device, (size_t)n * sizeof(Bf16)));
    gpu_send(gpu, *device, codes, (size_t)n * sizeof(Bf16));
    return host;
}

// Prints a row that compares the first n results on the device with the CPU's (`expected`). flops:
// the operations of one call, which took `ms` milliseconds.
static void result_row(const char *what, const Gpu *gpu, const Bf16 *device, const float *expected,
                       int64_t n, double allowed, double flops, float ms) {
    FREED Bf16 *codes = malloc_or_die((size_t)n * sizeof(Bf16));
    double difference = 0, size = 0;
    gpu_read(gpu, codes, device, (size_t)n * sizeof(Bf16));
    for (int64_t i = 0; i < n; i++) {
        difference += pow(bf16_decode(codes[i]) - expected[i], 2);
        size += pow(expected[i], 2);
    }
    double error = sqrt(difference / size);
    row(what, error <= allowed, "%.0f TFLOP/s, error against the CPU %.1e (allowed %.1e)",
        flops / (1e9 * ms), error, allowed);
}

// Checks a few rows of a large matmul.
static void check_matmul(Gpu *gpu) {
    enum { N = 4096, CHECKED = 8 };
    float ms = NAN;
    bool exact = support_matmul(gpu, gemm_plain(N, N, N, NULL, NULL, NULL), CHECKED, &ms);
    row("matmul 4096^3", exact, "%.0f TFLOP/s, %s", 2.0 * N * N * N / (1e9 * ms),
        exact ? "exact" : error_text());
}

// Checks attention for several sequences, forward and backward. Only the first sequence is
// compared. The workspace is planned as for a run.
static void check_attention(Gpu *gpu, AttentionShape s) {
    int64_t tokens = (int64_t)s.B * s.T, width = s.H * s.D, packed = (s.H + 2 * s.G) * s.D;
    double flops = 2.0 * s.B * s.H * (double)s.T * s.T * s.D;
    char name[64];
    Bf16 *qkv, *out, *d_out, *d_qkv;
    float *lse;
    FREED float *host_qkv = random_pair(gpu, tokens * packed, 3, &qkv);
    FREED float *host_d_out = random_pair(gpu, tokens * width, 4, &d_out);
    FREED float *expected = malloc_or_die((size_t)(s.T * width) * sizeof(float));
    FREED float *expected_lse = malloc_or_die((size_t)(s.H * s.T) * sizeof(float));
    FREED float *expected_d = malloc_or_die((size_t)(s.T * packed) * sizeof(float));
    gpu->attention_bytes = attention_workspace(s, (size_t)64 << 20);
    CUDA_CHECK(cudaMalloc(&gpu->attention_workspace, gpu->attention_bytes));
    CUDA_CHECK(cudaMalloc((void **)&out, (size_t)(tokens * width) * sizeof(Bf16)));
    CUDA_CHECK(cudaMalloc((void **)&lse, (size_t)(tokens * s.H) * sizeof(float)));
    CUDA_CHECK(cudaMalloc((void **)&d_qkv, (size_t)(tokens * packed) * sizeof(Bf16)));
    bool fast = attention_is_fast(gpu, s);
    Error why = error_kept();
    attention_forward_gpu(gpu, s, out, lse, qkv);
    GpuTimer timer = gpu_timer_begin(gpu);
    for (int i = 0; i < RUNS; i++) { attention_forward_gpu(gpu, s, out, lse, qkv); }
    float ms = gpu_timer_end(gpu, timer) / RUNS;
    attention_backward_gpu(gpu, s, d_qkv, d_out, out, lse, qkv);
    timer = gpu_timer_begin(gpu);
    for (int i = 0; i < RUNS; i++) { attention_backward_gpu(gpu, s, d_qkv, d_out, out, lse, qkv); }
    float backward_ms = gpu_timer_end(gpu, timer) / RUNS;
    attention_forward(expected, expected_lse, host_qkv, NULL, 1, s.T, s.H, s.G, s.D);
    attention_backward(expected_d, host_d_out, expected, expected_lse, host_qkv, NULL, 1, s.T, s.H,
                       s.G, s.D);
    snprintf(name, sizeof(name), "attention, heads of %d", s.D);
    result_row(name, gpu, out, expected, s.T * width, 1e-2, flops, ms);
    snprintf(name, sizeof(name), "backward, heads of %d", s.D);
    result_row(name, gpu, d_qkv, expected_d, s.T * packed, 1e-2, 2.5 * flops, backward_ms);
    row("fast attention", fast, "%s", fast ? "yes" : why.text);
    CUDA_CHECK(cudaFree(gpu->attention_workspace));
    CUDA_CHECK(cudaFree(qkv));
    CUDA_CHECK(cudaFree(out));
    CUDA_CHECK(cudaFree(lse));
    CUDA_CHECK(cudaFree(d_out));
    CUDA_CHECK(cudaFree(d_qkv));
}

// Checks the FP8 matmuls of the options' model. A device without matmuls of blockwise scaled
// operands passes, because few devices have such matmuls.
static void check_fp8(Gpu *gpu, const Options *options) {
    NumberSupport support = support_of(gpu->capability);
    Options o = *options;
    if (support.lacks_fp8 != NULL) { return; }
    support.fp8_gains_from = 0;
    o.fp8_format = FP8_FORMAT_HYBRID;
    o.fp8_recipe = FP8_RECIPE_DELAYED;
    int tried = fp8_self_check(gpu, &o, support);
    if (tried == 0) {
        printf("  %-24s -    no layer of this model can be in FP8\n", "FP8 matmuls");
        return;
    }
    row("FP8 matmuls", tried > 0, "%s", tried > 0 ? "exact" : error_text());
    o.fp8_format = FP8_FORMAT_E4M3;
    o.fp8_recipe = FP8_RECIPE_BLOCKWISE;
    if (tried > 0 && fp8_self_check(gpu, &o, support) < 0) {
        printf("  %-24s -    %s\n", "FP8 matmuls by blocks", error_text());
    } else if (tried > 0) {
        row("FP8 matmuls by blocks", true, "exact");
    }
}

int verify(const Options *options) {
    Gpu gpu = {0};
    char text[sizeof(Error)], free_text[32], all_text[32];
    size_t free_bytes, all_bytes;
    int driver = 0, runtime = 0, gpus = 0;
    printf("Verifying this machine\n");
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    snprintf(text, sizeof(text), "supports CUDA %d.%d", driver / 1000, driver % 1000 / 10);
    row("driver", driver >= CUDART_VERSION / 1000 * 1000,
        "%s; the program was built with CUDA %d.%d", driver > 0 ? text : "there is none",
        CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    version_row("CUDA runtime", CUDART_VERSION, runtime);
    version_row("cuBLASLt", CUBLAS_VERSION, (long)cublasLtGetVersion());
    version_row("cuDNN", CUDNN_VERSION, (long)cudnnGetVersion());
    if (!gpu_open(&gpu, 0)) {
        row("device", false, "%s", error_text());
        return EXIT_FAILURE;
    }
    row("device", true, "%s, compute capability %d.%d, %d multiprocessors", gpu.name,
        gpu.capability / 10, gpu.capability % 10, gpu.sms);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    row("memory", free_bytes > ((size_t)2 << 30), "%s free of %s",
        format_bytes(free_text, (double)free_bytes), format_bytes(all_text, (double)all_bytes));
    gpu.workspace_bytes = GEMM_WORKSPACE_BYTES;
    CUDA_CHECK(cudaMalloc(&gpu.workspace, gpu.workspace_bytes));
    check_matmul(&gpu);
    check_attention(&gpu, (AttentionShape){16, 1024, 16, 4, 128, true, NULL}); // as in Llama
    check_attention(&gpu, (AttentionShape){16, 1024, 12, 12, 64, true, NULL}); // as in GPT-2
    check_fp8(&gpu, options);
    CUDA_CHECK(cudaFree(gpu.workspace));
    CUDA_CHECK(cudaGetDeviceCount(&gpus));
    NcclVerdict verdict = nccl_self_check(gpus, 16 << 20, 120, text, sizeof(text));
    if (verdict == NCCL_NOT_TESTED) {
        printf("  %-24s -    %s\n", NCCL_ROW, text);
    } else {
        row(NCCL_ROW, verdict == NCCL_WELL, "%s", text);
    }
    gemm_close(&gpu);
    attention_close(&gpu);
    gpu_close(&gpu);
    if (options->save[0] != '\0') {
        char word[SHELL_WORD];
        printf("  the run under %s: scripts/doctor %s\n", options->save,
               shell_word(word, options->save));
    }
    printf(all_well ? "all well\n" : "NOT fit: see the lines marked BAD\n");
    return all_well ? EXIT_SUCCESS : EXIT_FAILURE;
}
