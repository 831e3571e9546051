// Times every kernel and library call at the shapes of the benchmark models: milliseconds, and the
// share of the floor (bytes that must move over 4.3 TB/s, or operations over 800 TFLOP/s in BF16).
//   build/plain/bench_kernels [part of a name]
#include "../kernels/attention.h"
#include "../kernels/fp8.h"
#include "../kernels/gemm.h"
#include "gpu_test.h"

static const double BYTES_PER_S = 4.3e12, FLOPS_PER_S = 800e12;
static const char *wanted = "";

// Random values on the device alone: a million of them, over and over.
struct Filled {
    Bf16Buffer device;

    Filled(size_t n, float scale) : device(n) {
        const size_t period = 1 << 20;
        static Floats values = random_bf16(period, 1.0f);
        std::vector<Bf16> codes(period);
        for (size_t i = 0; i < period; i++) { codes[i] = bf16_encode(scale * values[i]); }
        for (size_t at = 0; at < n; at += period) {
            size_t count = n - at < period ? n - at : period;
            CUDA_CHECK(cudaMemcpy(device.data + at, codes.data(), count * sizeof(Bf16),
                                  cudaMemcpyHostToDevice));
        }
    }
};

static void report(const char *name, const char *shape, float ms, double floor_s) {
    printf("%-26s %-26s %8.3f ms %6.1f%% of the floor\n", name, shape, ms,
           100 * floor_s / (1e-3 * ms));
    fflush(stdout);
}

template <typename Call>
static void bench(const char *name, const char *shape, double floor_s, Call call) {
    if (strstr(name, wanted) != NULL) { report(name, shape, time_ms(call), floor_s); }
}

static double bytes(double elements) {
    return 2 * elements / BYTES_PER_S; // BF16
}

static const char *shape_text(const char *format, int a, int b) {
    static char text[64];
    snprintf(text, sizeof(text), format, a, b);
    return text;
}

static void bench_norms(int M, int C, bool layernorm) {
    size_t n = (size_t)M * C;
    Filled x(n, 1), dout(n, 1), w(C, 1), b(C, 1);
    Bf16Buffer out(n);
    FloatBuffer mean(M), rstd(M), dw(C), db(C), sums(C), scratch(partial_sums_bytes(3 * C) / 4);
    const char *shape = shape_text("%d x %d", M, C);
    bench(layernorm ? "layernorm forward" : "rmsnorm forward", shape, bytes(2.0 * n), [&] {
        gpu_norm_forward(out.data, mean.data, rstd.data, x.device.data, w.device.data,
                         layernorm ? b.device.data : NULL, M, C, 1e-5f, gpu.stream);
    });
    NormBackward nb = {out.data,
                       {dw.data, TYPE_F32, false},
                       {db.data, TYPE_F32, false},
                       {},
                       dout.device.data,
                       x.device.data,
                       w.device.data,
                       layernorm ? mean.data : NULL,
                       rstd.data,
                       scratch.data,
                       M,
                       C};
    if (layernorm) { nb.column_sums = {sums.data, TYPE_F32, false}; }
    bench(layernorm ? "layernorm backward" : "rmsnorm backward", shape, bytes(4.0 * n),
          [&] { gpu_norm_backward(nb, gpu.stream); });
}

static void bench_activations(int M, int F, bool gelu) {
    size_t n = (size_t)M * F;
    Filled x(gelu ? n : 2 * n, 1), dout(n, 1);
    Bf16Buffer out(n), dx(2 * n);
    FloatBuffer sums(F), scratch(partial_sums_bytes(F) / 4);
    const char *shape = shape_text("%d x %d", M, F);
    if (gelu) {
        bench("gelu forward", shape, bytes(2.0 * n),
              [&] { gpu_gelu_forward(out.data, x.device.data, n, gpu.stream); });
        bench("gelu backward", shape, bytes(3.0 * n), [&] {
            gpu_gelu_backward(dx.data, {sums.data, TYPE_F32, false}, dout.device.data,
                              x.device.data, scratch.data, M, F, gpu.stream);
        });
        bench("column sums", shape, bytes(1.0 * n), [&] {
            gpu_column_sums({sums.data, TYPE_F32, false}, x.device.data, scratch.data, M, F,
                            gpu.stream);
        });
        return;
    }
    bench("swiglu forward", shape, bytes(3.0 * n),
          [&] { gpu_swiglu_forward(out.data, x.device.data, M, F, gpu.stream); });
    bench("swiglu backward", shape, bytes(5.0 * n),
          [&] { gpu_swiglu_backward(dx.data, dout.device.data, x.device.data, M, F, gpu.stream); });
}

static void bench_loss(int M, int V, int P) {
    Filled logits((size_t)M * P, 2);
    std::vector<int> host(M);
    for (int i = 0; i < M; i++) { host[i] = i * 37 % V; }
    Buffer<int> targets(M);
    targets.put(host.data());
    FloatBuffer losses(M);
    bench("cross-entropy", shape_text("%d x %d", M, P), bytes(2.0 * M * P), [&] {
        gpu_cross_entropy(losses.data, logits.device.data, targets.data, M, V, P, 1e-6f,
                          gpu.stream);
    });
}

static void bench_optimizer(int64_t n) {
    FloatBuffer w(n), m(n), v(n);
    Bf16Buffer weights(n), g(n);
    Buffer<uint8_t> decay(n / 64);
    Buffer<StepState> state(1);
    InputBuffer input(1e-3, 0);
    Buffer<double> scratch(SUM_BLOCKS);
    StepState s = {.gradient_scale = 1.0f, .updates = 1};
    state.put(&s);
    AdamWUpdate u = {.master = w.data,
                     .exp_avg = m.data,
                     .exp_avg_sq = v.data,
                     .moment_type = TYPE_F32,
                     .weights = weights.data,
                     .gradients = g.data,
                     .gradient_type = TYPE_BF16,
                     .decay = decay.data,
                     .n = n,
                     .input = input.data,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .eps = 1e-8f};
    const char *shape = shape_text("%dM", (int)(n >> 20), 0);
    bench("adamw, FP32 moments", shape, 28.0 * n / BYTES_PER_S,
          [&] { gpu_adamw_update(&u, state.data, gpu.stream); });
    u.moment_type = TYPE_BF16;
    bench("adamw, BF16 moments", shape, 20.0 * n / BYTES_PER_S,
          [&] { gpu_adamw_update(&u, state.data, gpu.stream); });
    bench("gradient norm", shape, bytes(1.0 * n), [&] {
        gpu_sum_of_squares(state.data, scratch.data, g.data, TYPE_BF16, n, false, gpu.stream);
    });
}

static void bench_attention(AttentionShape s) {
    size_t n = (size_t)s.B * s.T * s.H * s.D, packed = (size_t)s.B * s.T * (s.H + 2 * s.G) * s.D;
    Filled qkv(packed, 1), dout(n, 1);
    Bf16Buffer out(n), dqkv(packed);
    FloatBuffer lse((size_t)s.B * s.H * s.T);
    char shape[64];
    snprintf(shape, sizeof(shape), "B%d T%d H%d/%d D%d", s.B, s.T, s.H, s.G, s.D);
    double flops = 2.0 * s.B * s.H * (double)s.T * s.T * s.D;
    bench("attention forward", shape, flops / FLOPS_PER_S,
          [&] { attention_forward_gpu(&gpu, s, out.data, lse.data, qkv.device.data); });
    for (int variant = 0; variant < 4; variant++) {
        static const char *const names[] = {"attention backward", "attention backward det 512M",
                                            "attention backward det 1G",
                                            "attention backward det 4G"};
        size_t all = gpu.attention_bytes;
        s.deterministic = variant > 0;
        if (variant > 0) {
            gpu.attention_bytes = ((size_t)288 << 20) << (variant == 3 ? 4 : variant);
        }
        bench(names[variant], shape, 2.5 * flops / FLOPS_PER_S, [&] {
            attention_backward_gpu(&gpu, s, dqkv.data, dout.device.data, out.data, lse.data,
                                   qkv.device.data);
        });
        gpu.attention_bytes = all;
    }
}

static void bench_products(int M, int N, int K, const char *layer) {
    Filled x((size_t)M * K, 1), w((size_t)N * K, 0.05f), dy((size_t)M * N, 1), bias(N, 1);
    Bf16Buffer y((size_t)M * N), aux((size_t)M * N), dx((size_t)M * K), dw((size_t)N * K);
    FloatBuffer wide((size_t)N * K);
    double floor = 2.0 * M * N * K / FLOPS_PER_S;
    char shape[64];
    snprintf(shape, sizeof(shape), "%s %dx%dx%d", layer, M, N, K);
    Gemm forward = {.m = M,
                    .n = N,
                    .k = K,
                    .a = x.device.data,
                    .b = w.device.data,
                    .d = y.data,
                    .type_a = TYPE_BF16,
                    .type_b = TYPE_BF16,
                    .type_d = TYPE_BF16,
                    .trans_b = true,
                    .alpha = 1.0f};
    Gemm input_gradient = {.m = M,
                           .n = K,
                           .k = N,
                           .a = dy.device.data,
                           .b = w.device.data,
                           .d = dx.data,
                           .type_a = TYPE_BF16,
                           .type_b = TYPE_BF16,
                           .type_d = TYPE_BF16,
                           .alpha = 1.0f};
    Gemm weight_gradient = {.m = N,
                            .n = K,
                            .k = M,
                            .a = dy.device.data,
                            .b = x.device.data,
                            .d = dw.data,
                            .type_a = TYPE_BF16,
                            .type_b = TYPE_BF16,
                            .type_d = TYPE_BF16,
                            .trans_a = true,
                            .alpha = 1.0f};
    for (int tuned = 0; tuned < 2; tuned++) {
        Gemm g = forward;
        gemm_cache_free(gpu.gemms);
        gpu.gemms = gemm_cache_new();
        gemm_autotune(&gpu, tuned);
        const char *tag = tuned ? " tuned" : "";
        char name[64];
#define PRODUCT(what, gemm_description)                      \
    snprintf(name, sizeof(name), "product " what "%s", tag); \
    bench(name, shape, floor, [&] { gemm(&gpu, gemm_description); })
        PRODUCT("forward", g);
        g.epilogue = EPILOGUE_BIAS;
        g.bias = bias.device.data;
        PRODUCT("forward+bias", g);
        g.c = dy.device.data;
        g.beta = 1.0f;
        PRODUCT("forward+bias+add", g);
        g.beta = 0.0f;
        g.c = NULL;
        g.epilogue = EPILOGUE_GELU_AUX_BIAS;
        g.aux = aux.data;
        PRODUCT("forward+gelu", g);
        PRODUCT("dX", input_gradient);
        PRODUCT("dW", weight_gradient);
        g = weight_gradient;
        g.d = wide.data;
        g.type_d = TYPE_F32;
        PRODUCT("dW FP32", g);
        g.c = wide.data;
        g.beta = 1.0f;
        PRODUCT("dW FP32 accumulated", g);
        if (strcmp(layer, "fc2") == 0) { // its input gradient meets gelu backward
            g = input_gradient;
            Filled pre((size_t)M * K, 1);
            g.epilogue = EPILOGUE_DGELU;
            g.aux = pre.device.data;
            PRODUCT("dX+dgelu", g);
        }
    }
}

// The FP8 producers at M tokens, C channels, F feed-forward. Bytes: BF16 in, two codes out.
static void bench_fp8(int M, int C, int F, bool gpt2) {
    size_t n = (size_t)M * C, wide = (size_t)M * F;
    Filled x(n, 1), w(C, 1), b(C, 1), pre(2 * wide, 1), dact(wide, 1);
    FloatBuffer mean(M), rstd(M), sums(F > C ? F : C);
    FloatBuffer scratch(partial_sums_bytes(max(3 * C, F)) / 4 + wide / 64);
    Buffer<uint8_t> rows(2 * wide), columns(2 * wide);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    Fp8Live l = {1, 1, 3, 0};
    Fp8Slot s = {1, 1, 0, 1};
    live.put(&l);
    slot.put(&s);
    Fp8Out out = {rows.data, columns.data, FP8_E4M3, 448.0f, live.data, slot.data, true};
    char shape[64];
    snprintf(shape, sizeof(shape), "%d x %d", M, C);
    bench("fp8 norm forward", shape, bytes(2.0 * n), [&] {
        gpu_norm_forward(NULL, mean.data, rstd.data, x.device.data, w.device.data,
                         gpt2 ? b.device.data : NULL, M, C, 1e-5f, gpu.stream);
        gpu_norm_forward_fp8(out, gpt2 ? mean.data : NULL, rstd.data, x.device.data, w.device.data,
                             gpt2 ? b.device.data : NULL, M, C, gpu.stream);
    });
    bench("fp8 cast", shape, bytes(2.0 * n),
          [&] { gpu_quantize(out, false, {}, x.device.data, scratch.data, M, C, gpu.stream); });
    bench("fp8 cast and sums", shape, bytes(2.0 * n), [&] {
        gpu_quantize(out, false, {sums.data, TYPE_F32, false}, x.device.data, scratch.data, M, C,
                     gpu.stream);
    });
    snprintf(shape, sizeof(shape), "%d x %d", M, F);
    if (gpt2) {
        bench("fp8 gelu forward", shape, bytes(2.0 * wide),
              [&] { gpu_gelu_forward_fp8(out, pre.device.data, M, F, gpu.stream); });
        bench("fp8 gelu backward", shape, bytes(3.0 * wide), [&] {
            gpu_gelu_backward_fp8(out, {sums.data, TYPE_F32, false}, dact.device.data,
                                  pre.device.data, scratch.data, M, F, gpu.stream);
        });
        return;
    }
    bench("fp8 swiglu forward", shape, bytes(3.0 * wide),
          [&] { gpu_swiglu_forward_fp8(out, pre.device.data, M, F, gpu.stream); });
    bench("fp8 swiglu backward", shape, bytes(5.0 * wide), [&] {
        gpu_swiglu_backward_fp8(out, dact.device.data, pre.device.data, M, F, gpu.stream);
    });
}

static void bench_fp8_optimizer(int N, int C) {
    int64_t n = (int64_t)N * C;
    FloatBuffer w(n), m(n), v(n);
    Bf16Buffer g(n);
    Buffer<uint8_t> decay(n / 64), rows(n), columns(n);
    Buffer<StepState> state(1);
    InputBuffer input(1e-3, 0);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    StepState s = {.gradient_scale = 1.0f, .updates = 1};
    state.put(&s);
    Fp8Out out = {rows.data, columns.data, FP8_E4M3, 448.0f, live.data, slot.data, true};
    AdamWUpdate u = {.master = w.data,
                     .exp_avg = m.data,
                     .exp_avg_sq = v.data,
                     .moment_type = TYPE_F32,
                     .gradients = g.data,
                     .gradient_type = TYPE_BF16,
                     .decay = decay.data,
                     .n = n,
                     .input = input.data,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .eps = 1e-8f};
    bench("fp8 adamw", shape_text("%d x %d", N, C), 28.0 * n / BYTES_PER_S,
          [&] { gpu_adamw_update_fp8(out, false, &u, state.data, N, C, gpu.stream); });
}

static void bench_fp8_products(int M, int N, int K, const char *layer) {
    size_t most = (size_t)max(max((size_t)M * K, (size_t)N * K), (size_t)M * N);
    Filled a(most / 2, 1), b(most / 2, 1); // any bytes are codes
    Bf16Buffer d(most);
    Buffer<Fp8Live> live(1);
    Fp8Live l = {1, 1, 0, 0};
    live.put(&l);
    int shapes[3][3] = {{M, N, K}, {M, K, N}, {N, K, M}};
    static const char *const names[3] = {"forward", "dX", "dW"};
    for (int i = 0; i < 3; i++) {
        for (int fast = 1; fast >= 0; fast--) {
            Gemm g = {.m = shapes[i][0],
                      .n = shapes[i][1],
                      .k = shapes[i][2],
                      .a = a.device.data,
                      .b = b.device.data,
                      .d = d.data,
                      .type_a = i > 0 ? TYPE_E5M2 : TYPE_E4M3,
                      .type_b = TYPE_E4M3,
                      .type_d = TYPE_BF16,
                      .trans_b = true,
                      .alpha = 1.0f,
                      .scale_a = &live.data->scale_inv,
                      .scale_b = &live.data->scale_inv,
                      .fast_accumulation = fast == 1};
            char name[64], shape[64];
            snprintf(name, sizeof(name), "fp8 product %s %s", names[i], fast ? "fast" : "split");
            snprintf(shape, sizeof(shape), "%s %dx%dx%d", layer, M, N, K);
            bench(name, shape, 2.0 * M * N * K / (2 * FLOPS_PER_S), [&] { gemm(&gpu, g); });
        }
    }
}

int main(int argc, char **argv) {
    if (!open_test_gpu((size_t)4400 << 20)) { return 0; }
    if (argc > 1) { wanted = argv[1]; }
    bench_norms(65536, 768, true);
    bench_norms(32768, 1600, true);
    bench_norms(32768, 2048, false);
    bench_norms(16384, 4096, false);
    bench_activations(65536, 3072, true);
    bench_activations(32768, 6400, true);
    bench_activations(32768, 5504, false);
    bench_loss(16384, 50257, 50304);
    bench_loss(8192, 128256, 128256);
    bench_optimizer(256 << 20);
    bench_attention({64, 1024, 12, 12, 64, false});
    bench_attention({16, 2048, 16, 4, 128, false});
    bench_attention({2, 8192, 32, 8, 128, false});
    bench_fp8(65536, 768, 3072, true);
    bench_fp8(32768, 1600, 6400, true);
    bench_fp8(32768, 2048, 5504, false);
    bench_fp8(16384, 4096, 14336, false);
    bench_fp8_optimizer(11008, 2048);
    bench_fp8_products(65536, 3072, 768, "fc1");
    bench_fp8_products(32768, 11008, 2048, "fc1");
    bench_fp8_products(16384, 50304, 768, "head");
    bench_products(65536, 2304, 768, "qkv");
    bench_products(65536, 768, 768, "out");
    bench_products(65536, 3072, 768, "fc1");
    bench_products(65536, 768, 3072, "fc2");
    bench_products(16384, 50304, 768, "head");
    bench_products(32768, 6400, 1600, "fc1");
    bench_products(32768, 1600, 6400, "fc2");
    bench_products(32768, 11008, 2048, "fc1");
    bench_products(32768, 2048, 5504, "fc2");
    return 0;
}
