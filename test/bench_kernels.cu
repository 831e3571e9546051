// Times every BF16 kernel and library call at the shapes of the benchmark models (bench_gpu.h says
// what is printed); bench_kernels_fp8 does the FP8 ones.
//   build/plain/bench_kernels [part of a name]
#define TEST_OWN_MAIN
#include "../kernels/attention.h"
#include "../kernels/gemm.h"
#include "bench_gpu.h"

static void bench_loss(int M, int V, int P) {
    Filled logits((size_t)M * P, 2);
    std::vector<int> host(M);
    for (int i = 0; i < M; i++) { host[i] = i * 37 % V; }
    Buffer<int> targets(M);
    targets.put(host.data());
    FloatBuffer losses(M);
    static const struct {
        const char *name;
        LossTerms terms;
    } kinds[] = {{"cross-entropy", {1e-6f, 0, 0}},
                 {"cross-entropy, z-loss", {1e-6f, 1e-4f, 0}},
                 {"cross-entropy, capped", {1e-6f, 1e-4f, 30}}};
    for (const auto &kind : kinds) {
        bench(kind.name, shape_text("%d x %d", M, P), bytes(2.0 * M * P), [&] {
            gpu_cross_entropy(losses.data, {logits.device.data, NULL, NULL}, {}, {}, targets.data,
                              M, V, P, kind.terms, gpu.stream);
        });
    }
}

// Of a model with and without QK norm.
static void bench_rope(int B, int T, int H, int G, int D) {
    int M = B * T, N = (H + 2 * G) * D;
    size_t n = (size_t)M * N, turned = (size_t)M * (H + G) * D;
    Filled x(n, 1), weight(D, 1);
    Bf16Buffer out(n);
    FloatBuffer table((size_t)T * D), dquery(D), dkey(D), sums(N);
    SumScratch scratch(M, N);
    Floats angles((size_t)T * D);
    Rope rope = {10000.0};
    rope_table(angles.data(), T, D, &rope);
    table.put(angles.data());
    char shape[64];
    snprintf(shape, sizeof(shape), "%d x %d, H%d/%d D%d", M, N, H, G, D);
    Rotary plain = {table.data, NULL, NULL, 1e-6f, B, T, H, G, D}, norm = plain;
    norm.query_weight = norm.key_weight = weight.device.data;
    RotaryBackward back = {norm, x.device.data, {}, {}, {}, scratch.scratch()};
    back.dquery_weight = {dquery.data, TYPE_F32, false};
    back.dkey_weight = {dkey.data, TYPE_F32, false};
    bench("rope", shape, bytes(2.0 * turned),
          [&] { gpu_rope_forward(out.data, out.data, plain, gpu.stream); });
    bench("rope and QK norm", shape, bytes(2.0 * n),
          [&] { gpu_rope_forward(out.data, x.device.data, norm, gpu.stream); });
    bench("rope backward", shape, bytes(2.0 * turned), [&] {
        gpu_rope_backward({out.data, NULL, NULL}, {}, {plain, NULL, {}, {}, {}, {}}, gpu.stream);
    });
    bench("rope and QK norm backward", shape, bytes(3.0 * turned), [&] {
        gpu_rope_backward({out.data, NULL, NULL}, {}, back, gpu.stream);
    });
}

static void bench_optimizer(int64_t n) {
    enum { PARTS = 1024 };
    Filled g(n, 1);
    Buffer<StepState> state(1);
    Buffer<double> scratch(PARTS);
    Buffer<GradientPart> parts(PARTS);
    GradientPart pieces[PARTS];
    char shape[32];
    for (int i = 0; i < PARTS; i++) { pieces[i] = {i * (n / PARTS), n / PARTS}; }
    parts.put(pieces);
    snprintf(shape, sizeof(shape), "%dM", (int)(n >> 20));
    bench_adamw("adamw, FP32 moments", shape, n, TYPE_F32, false);
    bench_adamw("adamw, BF16 moments", shape, n, TYPE_BF16, false);
    bench("gradient norm", shape, bytes(1.0 * n), [&] {
        gpu_sum_of_squares(state.data, scratch.data, g.device.data, TYPE_BF16, parts.data, PARTS,
                           gpu.stream);
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
    Bf16Buffer y((size_t)M * N), dx((size_t)M * K), dw((size_t)N * K);
    FloatBuffer wide((size_t)N * K);
    double floor = 2.0 * M * N * K / FLOPS_PER_S;
    char shape[64];
    snprintf(shape, sizeof(shape), "%s %dx%dx%d", layer, M, N, K);
    Gemm forward = gemm_plain(M, N, K, x.device.data, w.device.data, y.data);
    Gemm input_gradient = gemm_plain(M, K, N, dy.device.data, w.device.data, dx.data);
    Gemm weight_gradient = gemm_plain(N, K, M, dy.device.data, x.device.data, dw.data);
    forward.trans_b = true;
    weight_gradient.trans_a = true;
    Gemm g = forward;
#define PRODUCT(what, gemm_description) \
    bench("product " what, shape, floor, [&] { gemm(&gpu, gemm_description); })
    PRODUCT("forward", g);
    g.epilogue = EPILOGUE_BIAS;
    g.bias = bias.device.data;
    PRODUCT("forward+bias", g);
    g.c = dy.device.data;
    g.beta = 1.0f;
    PRODUCT("forward+bias+add", g);
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

int main(int argc, char **argv) {
    open_test_gpu((size_t)4608 << 20);
    if (argc > 1) { wanted = argv[1]; }
    bench_producers(65536, 768, 3072, true, false, false);
    bench_producers(32768, 1600, 6400, true, false, false);
    bench_producers(32768, 2048, 5504, false, false, false);
    bench_producers(16384, 4096, 14336, false, false, false);
    bench_loss(16384, 50257, 50304);
    bench_loss(8192, 128256, 128256);
    bench_rope(16, 2048, 16, 4, 128);
    bench_rope(16, 2048, 16, 8, 128);
    bench_rope(32, 1024, 14, 2, 64);
    bench_optimizer(256 << 20);
    bench_attention({64, 1024, 12, 12, 64, false});
    bench_attention({16, 2048, 16, 4, 128, false});
    bench_attention({2, 8192, 32, 8, 128, false});
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
