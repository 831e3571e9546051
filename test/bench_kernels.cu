// Times every kernel and library call at the shapes of the benchmark models. Beside each time
// stands its floor: the bytes that must move at 4.3 TB/s, or the operations at 800 TFLOP/s in BF16
// and twice that in FP8.
//   build/plain/bench_kernels [part of a name]
#define TEST_OWN_MAIN
#include "../kernels/attention.h"
#include "../kernels/gemm.h"
#include "fp8_test.h"

#include <cstdarg>
#include <string>

static const double BYTES_PER_S = 4.3e12, FLOPS_PER_S = 800e12;
static const char *wanted = "";

// Random values on the device alone: a million of them, repeated.
struct Filled {
    Bf16Buffer device;

    Filled(size_t n, float scale) : device(n) {
        const size_t period = 1 << 20;
        static Floats values = random_bf16(period, 1.0f);
        std::vector<Bf16> codes(period);
        for (size_t i = 0; i < period; i++) { codes[i] = bf16_encode(scale * values[i]); }
        for (size_t at = 0; at < n; at += period) {
            size_t count = n - at < period ? n - at : period;
            gpu_send(&gpu, device.data + at, codes.data(), count * sizeof(Bf16));
        }
    }
};

template <typename Call>
static void bench(const std::string &name, const std::string &shape, double floor_s, Call call) {
    if (name.find(wanted) == std::string::npos) { return; }
    float ms = time_ms(call);
    printf("%-26s %-26s %8.3f ms %6.1f%% of the floor\n", name.c_str(), shape.c_str(), ms,
           100 * floor_s / (1e-3 * ms));
    fflush(stdout);
}

static double bytes(double elements) {
    return 2 * elements / BYTES_PER_S; // BF16
}

PRINTF_LIKE(1, 2) static std::string text(const char *format, ...) {
    char out[64];
    va_list args;
    va_start(args, format);
    vsnprintf(out, sizeof(out), format, args);
    va_end(args);
    return out;
}

// The producers of a block at M tokens, C channels, F feed-forward: in BF16, or fused to FP8 by a
// given scale or by blocks. Bytes: BF16 in; BF16 or two codes out.
static void bench_producers(int M, int C, int F, bool gpt2, bool fp8, bool blocks) {
    size_t n = (size_t)M * C, wide = (size_t)M * F;
    Filled x(n, 1), w(C, 1), b(F, 1), pre(2 * wide, 1), dact(wide, 1);
    Floats ones(M, 1.0f);
    FloatBuffer mean(M), rstd(M), dw(C), db(C), sums(F > C ? F : C);
    SumScratch scratch(M, 3 * C > F ? 3 * C : F);
    Buffer<uint8_t> codes(fp8 ? 4 * wide : 0);
    Bf16Buffer out(2 * wide);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    Fp8Live l = {1, 1, 3, 0};
    Fp8Slot s = {1, 1, 0, 1};
    live.put(&l);
    slot.put(&s);
    mean.put(ones.data());
    rstd.put(ones.data());
    FloatBuffer scales(2 * wide / 32);
    Tensor out_tensor = tensor_bf16(out.data);
    if (fp8) {
        out_tensor = with_forms(given_tensor(FP8_E4M3, live.data, slot.data), out.data, codes.data,
                                codes.data + 2 * wide);
    }
    if (blocks) {
        out_tensor.mode = SCALE_BLOCKS;
        out_tensor.record = false;
        out_tensor.live = NULL;
        out_tensor.slot = NULL;
        out_tensor.scales = scales.data;
        out_tensor.scales_t = scales.data + wide / 32;
        out_tensor.blocks = SCALES_VECTOR;
        out_tensor.power_of_two = true;
    }
    Gradient column_sums = {sums.data, TYPE_F32, false};
    const Bf16 *bias = fp8 ? b.device.data : NULL; // in FP8 GELU adds the bias (train/gpu/linear.h)
    NormForward forward = {
        mean.data, rstd.data, x.device.data, w.device.data, gpt2 ? b.device.data : NULL, 1e-5f,
        M,         C};
    NormBackward backward = {{dw.data, TYPE_F32, false},
                             {db.data, TYPE_F32, false},
                             {},
                             x.device.data,
                             x.device.data,
                             w.device.data,
                             gpt2 ? mean.data : NULL,
                             rstd.data,
                             scratch.scratch(),
                             M,
                             C};
    if (gpt2) { backward.column_sums = column_sums; }
    std::string shape = text("%d x %d", M, C);
    auto named = [&](const std::string &kind) {
        return (blocks ? "fp8 blocks " : fp8 ? "fp8 " : "") + kind;
    };
    const std::string norm = fp8 ? "norm" : gpt2 ? "layernorm" : "rmsnorm";
    bench(named(norm + " forward"), shape, bytes(2.0 * n),
          [&] { gpu_norm_forward(&gpu, out_tensor, forward); });
    bench(named(norm + " backward"), shape, bytes((fp8 ? 5.0 : 4.0) * n),
          [&] { gpu_norm_backward(&gpu, out_tensor, backward); });
    if (fp8) {
        Tensor cast = out_tensor;
        cast.bf16 = x.device.data;
        bench(named("cast"), shape, bytes(2.0 * n),
              [&] { gpu_quantize(&gpu, cast, {}, {}, M, C); });
        bench(named("cast and sums"), shape, bytes(2.0 * n),
              [&] { gpu_quantize(&gpu, cast, column_sums, scratch.scratch(), M, C); });
    }
    shape = text("%d x %d", M, F);
    if (!gpt2) {
        bench(named("swiglu forward"), shape, bytes(3.0 * wide),
              [&] { gpu_swiglu_forward(&gpu, out_tensor, pre.device.data, M, F); });
        bench(named("swiglu backward"), shape, bytes(5.0 * wide), [&] {
            gpu_swiglu_backward(&gpu, out_tensor, dact.device.data, pre.device.data, M, F);
        });
        return;
    }
    bench(named("gelu forward"), shape, bytes(2.0 * wide),
          [&] { gpu_gelu_forward(&gpu, out_tensor, pre.device.data, bias, M, F); });
    bench(named("gelu backward"), shape, bytes(3.0 * wide), [&] {
        gpu_gelu_backward(&gpu, out_tensor, column_sums, dact.device.data, pre.device.data, bias,
                          scratch.scratch(), M, F);
    });
    if (!fp8) {
        bench("column sums", shape, bytes(1.0 * wide), [&] {
            gpu_quantize(&gpu, tensor_bf16(dact.device.data), column_sums, scratch.scratch(), M, F);
        });
    }
}

// Bytes a second in each direction, with copies in both directions at once.
static double copy_rate(int64_t bytes) {
    void *from = gpu_host_memory(bytes, false), *to = gpu_host_memory(bytes, false);
    Buffer<uint8_t> in(bytes), out(bytes);
    cudaStream_t back;
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaStreamCreateWithFlags(&back, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    float ms = time_ms([&] {
        CUDA_CHECK(cudaEventRecord(begin, gpu.stream));
        CUDA_CHECK(cudaStreamWaitEvent(back, begin, 0));
        gpu_send(&gpu, in.data, from, bytes);
        CUDA_CHECK(cudaMemcpyAsync(to, out.data, bytes, cudaMemcpyDeviceToHost, back));
        CUDA_CHECK(cudaEventRecord(end, back));
        CUDA_CHECK(cudaStreamWaitEvent(gpu.stream, end, 0));
    });
    gpu_host_free(from);
    gpu_host_free(to);
    CUDA_CHECK(cudaStreamDestroy(back));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return bytes / (1e-3 * ms);
}

// AdamW's step on n weights, BF16 or FP8. offloaded: the optimizer's state is in host memory; the
// floor is a copy of it in both directions at once.
static void bench_adamw(const char *name, int64_t n, GpuType moments, bool fp8,
                        bool offloaded = false) {
    if (std::string(name).find(wanted) == std::string::npos) { return; }
    int64_t state_bytes = n * (4 + 2 * gpu_type_bytes(moments));
    Buffer<uint8_t> resident(offloaded ? 16 : state_bytes);
    char *w = (char *)(offloaded ? gpu_host_memory(state_bytes, true) : resident.data);
    char *m = w + 4 * n, *v = m + n * gpu_type_bytes(moments);
    Bf16Buffer g(n), weights(fp8 ? 8 : n);
    Buffer<uint8_t> codes(fp8 ? n : 16);
    Buffer<StepState> state(1);
    InputBuffer input(1e-3, 0);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    Buffer<Tensor> tensors(1);
    Buffer<AdamWSegment> segments(1);
    Fp8Live l = {1, 1, 0, 0};
    Fp8Slot s = {1, 1, 0, 1};
    StepState step = {.gradient_scale = 1.0f, .updates = 1};
    Tensor tensor = given_tensor(FP8_E4M3, live.data, slot.data);
    AdamWSegment segment = {.n = n, .bf16 = weights.data, .lr_mult = 1, .weight_decay = 0.1f};
    if (fp8) {
        segment.bf16 = NULL;
        segment.fp8 = codes.data;
    }
    live.put(&l);
    slot.put(&s);
    state.put(&step);
    tensors.put(&tensor);
    AdamWUpdate u = plain_update(g.data);
    u.moment_type = moments;
    set_state(segment, u, 0, (float *)w, m, v);
    segments.put(&segment);
    u.segments = segments.data;
    u.segment_count = 1;
    u.segment_blocks = gpu_adamw_blocks(n);
    u.tensors = tensors.data;
    u.input = input.data;
    double moved = 2.0 * state_bytes + (fp8 ? 3.0 : 4.0) * n; // gradients, and the new weights
    double floor_s = offloaded ? state_bytes / copy_rate(state_bytes) : moved / BYTES_PER_S;
    if (offloaded) { printf("copies both ways: %.1f GB/s each\n", 1e-9 * state_bytes / floor_s); }
    bench(name, text("%dM", (int)(n >> 20)), floor_s,
          [&] { gpu_adamw(&gpu, &u, SCALE_GIVEN, state.data); });
    if (offloaded) { gpu_host_free(w); }
}

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
        bench(kind.name, text("%d x %d", M, P), bytes(2.0 * M * P), [&] {
            gpu_cross_entropy(&gpu, losses.data, tensor_bf16(logits.device.data), {}, targets.data,
                              M, V, P, kind.terms);
        });
    }
}

// Times the rotary kernels of a model, with and without QK norm.
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
    std::string shape = text("%d x %d, H%d/%d D%d", M, N, H, G, D);
    Rotary plain = {table.data, NULL, NULL, 1e-6f, B, T, H, G, D}, norm = plain;
    norm.query_weight = norm.key_weight = weight.device.data;
    RotaryBackward back = {norm, x.device.data, {}, {}, {}, scratch.scratch()};
    back.dquery_weight = {dquery.data, TYPE_F32, false};
    back.dkey_weight = {dkey.data, TYPE_F32, false};
    bench("rope", shape, bytes(2.0 * turned),
          [&] { gpu_rope_forward(&gpu, out.data, out.data, plain); });
    bench("rope and QK norm", shape, bytes(2.0 * n),
          [&] { gpu_rope_forward(&gpu, out.data, x.device.data, norm); });
    bench("rope backward", shape, bytes(2.0 * turned), [&] {
        gpu_rope_backward(&gpu, tensor_bf16(out.data), {plain, NULL, {}, {}, {}, {}});
    });
    bench("rope and QK norm backward", shape, bytes(3.0 * turned),
          [&] { gpu_rope_backward(&gpu, tensor_bf16(out.data), back); });
}

static void bench_optimizer(int64_t n) {
    enum { PARTS = 1024 };
    Filled g(n, 1);
    Buffer<StepState> state(1);
    Buffer<StepInput> input(1);
    Buffer<double> loss_sum(1), scratch(PARTS);
    Buffer<GradientPart> parts(PARTS);
    GradientPart pieces[PARTS];
    for (int i = 0; i < PARTS; i++) { pieces[i] = {i * (n / PARTS), n / PARTS}; }
    parts.put(pieces);
    bench_adamw("adamw, FP32 moments", n, TYPE_F32, false);
    bench_adamw("adamw, BF16 moments", n, TYPE_BF16, false);
    bench("gradient norm", text("%dM", (int)(n >> 20)), bytes(1.0 * n), [&] {
        gpu_sum_of_squares(&gpu, state.data, input.data, loss_sum.data, scratch.data, g.device.data,
                           TYPE_BF16, parts.data, PARTS);
    });
}

static void bench_attention(AttentionShape s) {
    size_t n = (size_t)s.B * s.T * s.H * s.D, packed = (size_t)s.B * s.T * (s.H + 2 * s.G) * s.D;
    Filled qkv(packed, 1), dout(n, 1);
    Bf16Buffer out(n), dqkv(packed);
    FloatBuffer lse((size_t)s.B * s.H * s.T);
    std::string shape = text("B%d T%d H%d/%d D%d", s.B, s.T, s.H, s.G, s.D);
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
    std::string shape = text("%s %dx%dx%d", layer, M, N, K);
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
    if (strcmp(layer, "fc2") == 0) { // GELU's derivative follows its input gradient
        g = input_gradient;
        Filled pre((size_t)M * K, 1);
        g.epilogue = EPILOGUE_DGELU;
        g.aux = pre.device.data;
        PRODUCT("dX+dgelu", g);
    }
}

static void bench_fp8_products(int M, int N, int K, const char *layer) {
    size_t most = (size_t)max(max((size_t)M * K, (size_t)N * K), (size_t)M * N);
    Filled a(most / 2, 1), b(most / 2, 1); // any bytes can serve as codes
    Bf16Buffer d(most);
    Buffer<Fp8Live> live(1);
    Fp8Live l = {1, 1, 0, 0};
    live.put(&l);
    int shapes[3][3] = {{M, N, K}, {M, K, N}, {N, K, M}};
    static const char *const names[3] = {"forward", "dX", "dW"};
    FloatBuffer scales(2 * most / 128 + 4096);
    Floats ones(scales.count, 1.0f);
    scales.put(ones.data());
    for (int i = 0; i < 3; i++) {
        for (int kind = 0; kind < 3; kind++) {
            static const char *const kinds[] = {"fast", "split", "blocks"};
            bool fast = kind == 0, blocks = kind == 2;
            Gemm g = {.m = shapes[i][0],
                      .n = shapes[i][1],
                      .k = shapes[i][2],
                      .a = a.device.data,
                      .b = b.device.data,
                      .d = d.data,
                      .type_a = i > 0 && !blocks ? TYPE_E5M2 : TYPE_E4M3,
                      .type_b = TYPE_E4M3,
                      .type_d = TYPE_BF16,
                      .trans_b = true,
                      .alpha = 1.0f,
                      .scale_a = &live.data->scale_inv,
                      .scale_b = &live.data->scale_inv,
                      .fast_accumulation = fast};
            if (blocks) {
                g.scale_a = g.scale_b = scales.data;
                g.scales_a = SCALES_VECTOR;
                g.scales_b = i < 2 ? SCALES_SQUARE : SCALES_VECTOR;
            }
            bench(text("fp8 product %s %s", names[i], kinds[kind]),
                  text("%s %dx%dx%d", layer, M, N, K), 2.0 * M * N * K / (2 * FLOPS_PER_S),
                  [&] { gemm(&gpu, g); });
        }
    }
}

// Codes of normal values: a million of them, repeated. (With NaN among them, the device would draw
// less power.)
struct FilledCodes : Buffer<uint8_t> {
    FilledCodes(size_t n, float scale, Fp8Type type) : Buffer<uint8_t>(n) {
        const size_t period = 1 << 20;
        Codes values(period);
        random_key++;
        for (size_t i = 0; i < period; i++) {
            values[i] = fp8_encode(scale * rng_normal(random_key, i), type);
        }
        for (size_t at = 0; at < n; at += period) {
            gpu_send(&gpu, data + at, values.data(), n - at < period ? n - at : period);
        }
    }
};

// A weight gradient [N,K] of M tokens by blocks.
static void bench_weight_gradient(int M, int N, int K, const char *layer) {
    FilledCodes dy((size_t)N * M, 50, FP8_E4M3), x((size_t)K * M, 50, FP8_E4M3);
    FloatBuffer scales(fp8_scale_count(SCALES_VECTOR, N > K ? N : K, M));
    Floats same(scales.count, 0.02f);
    scales.put(same.data());
    Bf16Buffer d((size_t)N * K);
    Gemm g = gemm_plain(N, K, M, NULL, NULL, d.data);
    g.a = dy.data;
    g.b = x.data;
    g.type_a = g.type_b = TYPE_E4M3;
    g.trans_b = true;
    g.scale_a = g.scale_b = scales.data;
    g.scales_a = g.scales_b = SCALES_VECTOR;
    std::string shape = text("%s %dx%dx%d", layer, M, N, K);
    double floor = 2.0 * M * N * K / (2 * FLOPS_PER_S);
    bench("dW by blocks", shape, floor, [&] { gemm(&gpu, g); });
}

// The products with GELU, each in one kernel and in two: with the default accumulation (fast
// forward, split backward), and with fast. Bytes: codes in, two forms of codes out, BF16
// pre-activations out or in.
static void bench_gelu_products(int M, int F, int C) {
    size_t wide = (size_t)M * F;
    FilledCodes a((size_t)M * C, 50, FP8_E4M3), dy((size_t)M * C, 50, FP8_E5M2),
        b((size_t)F * C, 30, FP8_E4M3);
    Filled x(wide, 1), bias(F, 1);
    Buffer<uint8_t> codes(2 * wide);
    Bf16Buffer product(wide);
    FloatBuffer sums(F);
    SumScratch scratch(M, F);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    // those of a and b together 1 / (1500 sqrt(C)), for products of variance 1
    Fp8Live l = {1.0f / sqrtf(1500 * sqrtf((float)C)), 50, 0, 0};
    Fp8Slot s = {1, 1, 0, 1};
    live.put(&l);
    slot.put(&s);
    Gradient column_sums = {sums.data, TYPE_F32, false};
    bool has = gpu_has_fused_products(&gpu);
    double floor = 2.0 * M * F * C / (2 * FLOPS_PER_S) + bytes(2.0 * wide);
    for (int fast = 0; fast < 2; fast++) {
        for (int backward = 0; backward < 2; backward++) {
            Fp8Type type = backward ? FP8_E5M2 : FP8_E4M3;
            Tensor t = with_forms(given_tensor(type, live.data, slot.data), NULL, codes.data,
                                  codes.data + wide);
            Gemm g = gemm_plain(M, F, C, NULL, NULL, product.data);
            g.a = backward ? dy.data : a.data;
            g.b = b.data;
            g.type_a = backward ? TYPE_E5M2 : TYPE_E4M3;
            g.type_b = TYPE_E4M3;
            g.trans_b = true;
            g.scale_a = g.scale_b = &live.data->scale_inv;
            g.fast_accumulation = fast;
            Gemm fused = g;
            fused.bias = bias.device.data;
            fused.aux = x.device.data;
            std::string shape = text("fc1 %dx%dx%d", M, F, C);
            auto named = [&](const char *kind) {
                return text("%s%s %s", kind, backward ? " backward" : "", fast ? "fast" : "split");
            };
            for (int turn = 0; turn < 2; turn++) { // alternating, since the clock drifts
                bench(named("gelu: product"), shape, floor, [&] { gemm(&gpu, g); });
                bench(named("gelu: product, pass"), shape, floor, [&] {
                    gemm(&gpu, g);
                    if (backward) {
                        gpu_gelu_backward(&gpu, t, column_sums, product.data, x.device.data,
                                          bias.device.data, scratch.scratch(), M, F);
                    } else {
                        gpu_gelu_forward(&gpu, t, product.data, bias.device.data, M, F);
                    }
                });
                if (!has) { continue; }
                bench(named("gelu: in one"), shape, floor, [&] {
                    if (backward) {
                        gpu_product_gelu_backward(&gpu, fused, t, column_sums, scratch.scratch());
                    } else {
                        gpu_product_gelu(&gpu, fused, t);
                    }
                });
            }
        }
    }
}

static void bench_transpose(int N, int C) {
    Buffer<uint8_t> codes((size_t)N * C), turned((size_t)N * C);
    bench("transpose of codes", text("%d x %d", N, C), bytes(1.0 * N * C),
          [&] { gpu_transpose_codes(&gpu, turned.data, codes.data, N, C); });
}

int main(int argc, char **argv) {
    static const int blocks[][4] = {// tokens, channels, feed-forward; GPT-2
                                    {65536, 768, 3072, 1},
                                    {32768, 1600, 6400, 1},
                                    {32768, 2048, 5504, 0},
                                    {16384, 4096, 14336, 0}};
    open_test_gpu((size_t)4608 << 20);
    if (argc > 1) { wanted = argv[1]; }
    for (const auto &b : blocks) { bench_producers(b[0], b[1], b[2], b[3], false, false); }
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
    if (!has_fp8()) { return 0; }
    for (const auto &b : blocks) {
        bench_producers(b[0], b[1], b[2], b[3], true, false);
        bench_producers(b[0], b[1], b[2], b[3], true, true);
    }
    bench_adamw("fp8 adamw", (int64_t)110080 * 2048, TYPE_F32, true);
    bench_adamw("fp8 adamw, BF16 moments", (int64_t)110080 * 2048, TYPE_BF16, true);
    bench_adamw("fp8 adamw, offloaded", (int64_t)28672 * 4096, TYPE_F32, true, true);
    bench_adamw("fp8 adamw, BF16 moments, offloaded", (int64_t)28672 * 4096, TYPE_BF16, true, true);
    bench_transpose(2304, 768);
    bench_transpose(11008, 2048);
    bench_transpose(28672, 4096);
    bench_weight_gradient(65536, 3072, 768, "fc1");
    bench_weight_gradient(65536, 768, 3072, "fc2");
    bench_gelu_products(65536, 3072, 768);
    bench_fp8_products(65536, 3072, 768, "fc1");
    bench_fp8_products(32768, 6400, 1600, "fc1");
    bench_fp8_products(32768, 11008, 2048, "fc1");
    bench_fp8_products(16384, 50304, 768, "head");
    return 0;
}
