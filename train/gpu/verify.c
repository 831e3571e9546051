#include "verify.h"
#include "../../base/rng.h"
#include "../../kernels/attention.h"
#include "../../kernels/fp8_format.h"
#include "../../kernels/gemm.h"
#include "verify_nccl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { RUNS = 10 };

static bool all_well = true;

static void marked_row(const char *what, const char *mark, const char *text) {
    printf("  %-24s %-4s %s\n", what, mark, text);
}

static void row(const char *what, bool well, const char *text) {
    marked_row(what, well ? "ok" : "BAD", text);
    all_well = all_well && well;
}

static void version_row(const char *what, long compiled, long running) {
    char text[128];
    snprintf(text, sizeof(text), "compiled against %ld, running %ld", compiled, running);
    row(what, running >= compiled / 1000 * 1000, text);
}

static void check_versions(void) {
    int driver = 0, runtime = 0;
    char text[128];
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    snprintf(text, sizeof(text), "supports CUDA %d.%d; the program was built with %d.%d",
             driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    row("driver", driver >= CUDART_VERSION / 1000 * 1000, text);
    version_row("CUDA runtime", CUDART_VERSION, runtime);
    version_row("cuBLASLt", CUBLAS_VERSION, (long)cublasLtGetVersion());
    version_row("cuDNN", CUDNN_VERSION, (long)cudnnGetVersion());
}

// n random BF16 values, on the host as floats and on the device.
static float *random_pair(int64_t n, uint64_t key, Bf16 **device) {
    float *host = malloc_or_die((size_t)n * sizeof(float));
    Bf16 *codes = malloc_or_die((size_t)n * sizeof(Bf16));
    for (int64_t i = 0; i < n; i++) {
        codes[i] = bf16_encode(rng_normal(key, (uint64_t)i));
        host[i] = bf16_decode(codes[i]);
    }
    CUDA_CHECK(cudaMalloc((void **)device, (size_t)n * sizeof(Bf16)));
    CUDA_CHECK(cudaMemcpy(*device, codes, (size_t)n * sizeof(Bf16), cudaMemcpyHostToDevice));
    free(codes);
    return host;
}

static float *fetch(const Bf16 *device, int64_t n) {
    float *host = malloc_or_die((size_t)n * sizeof(float));
    Bf16 *codes = malloc_or_die((size_t)n * sizeof(Bf16));
    CUDA_CHECK(cudaMemcpy(codes, device, (size_t)n * sizeof(Bf16), cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < n; i++) { host[i] = bf16_decode(codes[i]); }
    free(codes);
    return host;
}

// The mean milliseconds of a call, by events.
static float timed(Gpu *gpu, void (*call)(Gpu *, void *), void *argument) {
    cudaEvent_t begin, end;
    float ms;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    call(gpu, argument);
    CUDA_CHECK(cudaEventRecord(begin, gpu->stream));
    for (int i = 0; i < RUNS; i++) { call(gpu, argument); }
    CUDA_CHECK(cudaEventRecord(end, gpu->stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return ms / RUNS;
}

static void result_row(const char *what, double error, double allowed, double tflops) {
    char text[128];
    snprintf(text, sizeof(text), "%.0f TFLOP/s, error against FP64 %.1e (allowed %.1e)", tflops,
             error, allowed);
    row(what, error <= allowed, text);
}

static void run_gemm(Gpu *gpu, void *argument) {
    gemm(gpu, *(Gemm *)argument);
}

// A large product, a few rows of it against FP64.
static void check_product(Gpu *gpu) {
    enum { N = 4096, ROWS = 8 };
    Bf16 *a, *b, *d;
    float *host_a = random_pair((int64_t)N * N, 1, &a),
          *host_b = random_pair((int64_t)N * N, 2, &b);
    CUDA_CHECK(cudaMalloc((void **)&d, (size_t)N * N * sizeof(Bf16)));
    Gemm g = gemm_plain(N, N, N, a, b, d);
    g.trans_b = true;
    float ms = timed(gpu, run_gemm, &g);
    float *result = fetch(d, (int64_t)ROWS * N);
    double difference = 0, size = 0;
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < N; k++) { sum += (double)host_a[i * N + k] * host_b[j * N + k]; }
            difference += pow(result[i * N + j] - sum, 2);
            size += sum * sum;
        }
    }
    result_row("product 4096^3", sqrt(difference / size), 4e-3, 2.0 * N * N * N / (1e9 * ms));
    free(host_a);
    free(host_b);
    free(result);
    CUDA_CHECK(cudaFree(a));
    CUDA_CHECK(cudaFree(b));
    CUDA_CHECK(cudaFree(d));
}

typedef struct {
    AttentionShape shape;
    Bf16 *out, *qkv;
    float *lse;
} AttentionCall;

static void run_attention(Gpu *gpu, void *argument) {
    AttentionCall *c = argument;
    attention_forward_gpu(gpu, c->shape, c->out, c->lse, c->qkv);
}

// The attention output of one query, in FP64.
static void attend(const AttentionShape *s, const float *qkv, int t, int h, double *out) {
    int N = (s->H + 2 * s->G) * s->D, g = h / (s->H / s->G);
    double sum = 0;
    for (int d = 0; d < s->D; d++) { out[d] = 0; }
    for (int k = 0; k <= t; k++) {
        double score = 0;
        const float *q = qkv + (int64_t)t * N + h * s->D;
        const float *key = qkv + (int64_t)k * N + (s->H + g) * s->D, *value = key + s->G * s->D;
        for (int d = 0; d < s->D; d++) { score += (double)q[d] * key[d]; }
        double p = exp(score / sqrt(s->D));
        sum += p;
        for (int d = 0; d < s->D; d++) { out[d] += p * value[d]; }
    }
    for (int d = 0; d < s->D; d++) { out[d] /= sum; }
}

static void check_attention(Gpu *gpu) {
    AttentionCall c = {.shape = {8, 2048, 16, 4, 128, true}};
    AttentionShape *s = &c.shape;
    int64_t tokens = (int64_t)s->B * s->T, per_token = (s->H + 2 * s->G) * s->D;
    int64_t out_row = (int64_t)s->H * s->D;
    float *qkv = random_pair(tokens * per_token, 3, &c.qkv);
    CUDA_CHECK(cudaMalloc((void **)&c.out, (size_t)(tokens * out_row) * sizeof(Bf16)));
    CUDA_CHECK(cudaMalloc((void **)&c.lse, (size_t)(tokens * s->H) * sizeof(float)));
    Error why;
    bool library = attention_by_cudnn(gpu, *s, &why);
    float ms = timed(gpu, run_attention, &c);
    float *out = fetch(c.out, s->T * out_row);
    double difference = 0, size = 0, expected[128];
    for (int t = 0; t < s->T; t += 97) {
        for (int h = 0; h < s->H; h += 5) {
            attend(s, qkv, t, h, expected);
            for (int d = 0; d < s->D; d++) {
                difference += pow(out[t * out_row + h * s->D + d] - expected[d], 2);
                size += expected[d] * expected[d];
            }
        }
    }
    double flops = 2.0 * s->B * s->H * (double)s->T * s->T * s->D;
    result_row("attention 8 x 2048", sqrt(difference / size), 1e-2, flops / (1e9 * ms));
    row("attention by cuDNN", library, library ? "yes" : why.text);
    free(qkv);
    free(out);
    CUDA_CHECK(cudaFree(c.qkv));
    CUDA_CHECK(cudaFree(c.out));
    CUDA_CHECK(cudaFree(c.lse));
}

static void check_nccl(void) {
    NcclCheck what = {.elements = 16 << 20, .seconds = 120};
    char text[sizeof(((Error *)NULL)->text)];
    CUDA_CHECK(cudaGetDeviceCount(&what.gpus));
    NcclVerdict verdict = nccl_self_check(what, text, sizeof(text));
    if (verdict == NCCL_NOT_TESTED) {
        marked_row(NCCL_ROW, "-", text);
    } else {
        row(NCCL_ROW, verdict == NCCL_WELL, text);
    }
}

int verify(const Options *options) {
    Gpu gpu = {0};
    Error err;
    char text[320], free_text[32], all_text[32];
    size_t free_bytes, all_bytes;
    printf("Verifying this machine\n");
    check_versions();
    if (!gpu_open(&gpu, options->device, &err)) {
        row("device", false, err.text);
        return EXIT_FAILURE;
    }
    snprintf(text, sizeof(text), "%s, compute capability %d.%d, %d multiprocessors", gpu.name,
             gpu.capability / 10, gpu.capability % 10, gpu.sms);
    row("device", true, text);
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    snprintf(text, sizeof(text), "%s free of %s", format_bytes(free_text, (double)free_bytes),
             format_bytes(all_text, (double)all_bytes));
    row("memory", free_bytes > ((size_t)2 << 30), text);
    gpu.workspace_bytes = (size_t)64 << 20;
    gpu.attention_bytes = gpu.workspace_bytes;
    CUDA_CHECK(cudaMalloc(&gpu.workspace, gpu.workspace_bytes));
    CUDA_CHECK(cudaMalloc(&gpu.attention_workspace, gpu.attention_bytes));
    check_product(&gpu);
    check_attention(&gpu);
    if (gpu.capability >= 90) {
        bool well = fp8_self_check(&gpu, &err);
        row("FP8 products", well, well ? "exact" : err.text);
    }
    CUDA_CHECK(cudaFree(gpu.workspace));
    CUDA_CHECK(cudaFree(gpu.attention_workspace));
    check_nccl();
    gpu_close(&gpu);
    if (options->save[0] != '\0') {
        printf("  the run under %s: scripts/doctor %s\n", options->save, options->save);
    }
    printf(all_well ? "all well\n" : "NOT fit: see the lines marked BAD\n");
    return all_well ? EXIT_SUCCESS : EXIT_FAILURE;
}
