// Products through cuBLASLt, attention through cuDNN and by the plain kernels, and the optimizer,
// against cpu.c and FP64.
#include "../base/rng.h"
#include "../kernels/attention.h"
#include "../kernels/cpu.h"
#include "../kernels/gemm.h"
#include "gpu_test.h"

// ---- products ----------------------------------------------------------------------------------

// op(A) op(B)
static Floats product(const Gemm &g, const Floats &a, const Floats &b) {
    return exact_product(
        g.m, g.n, g.k, g.alpha,
        [&](int i, int p) { return a[g.trans_a ? (size_t)p * g.m + i : (size_t)i * g.k + p]; },
        [&](int j, int p) { return b[g.trans_b ? (size_t)j * g.k + p : (size_t)p * g.n + j]; });
}

static void check_product(int m, int n, int k, bool trans_a, bool trans_b) {
    Input a((size_t)m * k, 1), b((size_t)n * k, 1), c((size_t)m * n, 1), bias(n, 1);
    Bf16Buffer d((size_t)m * n);
    FloatBuffer wide((size_t)m * n);
    Gemm g = gemm_plain(m, n, k, a.device.data, b.device.data, d.data);
    g.trans_a = trans_a;
    g.trans_b = trans_b;
    g.alpha = 0.5f;
    Floats expected = product(g, a.host, b.host), sum = expected;
    gemm(&gpu, g);
    CHECK_BF16(get_floats(d), expected, 1.05);
    Gemm to_float = g;
    to_float.d = wide.data;
    to_float.type_d = TYPE_F32;
    gemm(&gpu, to_float);
    CHECK_ERROR(wide.get().data(), expected.data(), (int64_t)expected.size(), 1e-5);

    for (size_t i = 0; i < sum.size(); i++) { sum[i] += c.host[i] + bias.host[i % n]; }
    Gemm added = g; // with residual and bias
    added.c = c.device.data;
    added.beta = 1.0f;
    added.epilogue = EPILOGUE_BIAS;
    added.bias = bias.device.data;
    d.poison();
    gemm(&gpu, added);
    CHECK_BF16(get_floats(d), sum, 1.5); // the library rounds before it adds
    Gemm accumulated = g;
    accumulated.c = d.data;
    accumulated.beta = 1.0f;
    put_floats(d, c.host);
    gemm(&gpu, accumulated);
    for (size_t i = 0; i < sum.size(); i++) { sum[i] = expected[i] + c.host[i]; }
    CHECK_BF16(get_floats(d), sum, 1.5);
}

LIBRARY_TEST(products) {
    for (int transposed = 0; transposed < 4; transposed++) {
        check_product(128, 256, 64, transposed & 1, transposed & 2);
        check_product(200, 136, 72, transposed & 1, transposed & 2);
        check_product(8, 512, 1600, transposed & 1, transposed & 2);
    }
    check_product(1, 264, 48, false, true);
}

// The product times gelu' of aux.
LIBRARY_TEST(gelu_epilogue) {
    const int m = 200, n = 136, k = 72;
    Input a((size_t)m * k, 1), b((size_t)n * k, 0.3f), aux((size_t)m * n, 1.5f);
    Bf16Buffer d((size_t)m * n);
    Gemm g = gemm_plain(m, n, k, a.device.data, b.device.data, d.data);
    g.trans_b = true;
    g.epilogue = EPILOGUE_DGELU;
    g.aux = aux.device.data;
    Floats plain = product(g, a.host, b.host), expected(plain.size());
    gelu_backward(expected.data(), plain.data(), aux.host.data(), (int64_t)plain.size());
    gemm(&gpu, g);
    CHECK_BF16(get_floats(d), expected, 1.5);
}

// ---- attention ---------------------------------------------------------------------------------

// The definition with the roundings that BF16 needs: probabilities and score gradients are rounded
// to BF16 between the products. Its distance from the plain definition is the yardstick.
struct AttentionCase {
    AttentionShape s;
    Input qkv, dout;
    Floats out, lse, dqkv;

    AttentionCase(AttentionShape shape)
        : s(shape), qkv((size_t)s.B * s.T * (s.H + 2 * s.G) * s.D, 1),
          dout((size_t)s.B * s.T * s.H * s.D, 1), out(dout.host.size()),
          lse((size_t)s.B * s.H * s.T), dqkv(qkv.host.size()) {
        attention_forward(out.data(), lse.data(), qkv.host.data(), s.B, s.T, s.H, s.G, s.D);
        attention_backward(dqkv.data(), dout.host.data(), out.data(), lse.data(), qkv.host.data(),
                           s.B, s.T, s.H, s.G, s.D);
    }
};

static void check_attention(AttentionShape s, bool plain) {
    AttentionCase c(s);
    Bf16Buffer out(c.out.size()), dqkv(c.dqkv.size());
    FloatBuffer lse(c.lse.size());
    if (plain) {
        attention_plain_forward(&gpu, s, out.data, lse.data, c.qkv.device.data);
    } else {
        attention_forward_gpu(&gpu, s, out.data, lse.data, c.qkv.device.data);
    }
    // k: one rounding of the output in the plain kernel; cuDNN also rounds the probabilities
    CHECK_BF16(get_floats(out), c.out, plain ? 1.05 : 2.5);
    CHECK_ERROR(lse.get().data(), c.lse.data(), (int64_t)c.lse.size(), 1e-4);
    for (int repeat = 0; repeat < 2; repeat++) {
        Floats first = repeat ? get_floats(dqkv) : Floats();
        dqkv.poison();
        CUDA_CHECK(cudaMemsetAsync(gpu.attention_workspace, 0xff, gpu.attention_bytes, gpu.stream));
        if (plain) {
            attention_plain_backward(&gpu, s, dqkv.data, c.dout.device.data, out.data, lse.data,
                                     c.qkv.device.data);
        } else {
            attention_backward_gpu(&gpu, s, dqkv.data, c.dout.device.data, out.data, lse.data,
                                   c.qkv.device.data);
        }
        CHECK_BF16(get_floats(dqkv), c.dqkv, plain ? 1.5 : 3.0);
        if (repeat && s.deterministic) { CHECK(same_bits(get_floats(dqkv), first)); }
    }
}

LIBRARY_TEST(attention_by_library) {
    AttentionShape shapes[] = {
        {2, 128, 4, 4, 64, true},  {1, 1, 2, 1, 64, true},     {3, 17, 25, 25, 64, true},
        {2, 200, 8, 2, 128, true}, {1, 1000, 4, 1, 64, true},  {2, 64, 6, 2, 32, true},
        {2, 128, 4, 4, 64, false}, {2, 200, 8, 2, 128, false},
    };
    for (AttentionShape s : shapes) {
        fail("%s", "");
        bool served = attention_by_cudnn(&gpu, s);
        if (!served) { printf("  measured: by the plain kernel: %s\n", error_text()); }
        CHECK(served || s.T < 64); // the lengths that people train on
        check_attention(s, false);
    }
    fail("%s", ""); // planted: heads are not that large
    CHECK(!attention_by_cudnn(&gpu, {1, 128, 2, 2, 1000, true}) && error_text()[0] != '\0');
}

TEST(attention_plain) {
    check_attention({1, 1, 2, 1, 64, true}, true);
    check_attention({2, 17, 25, 25, 64, true}, true);
    check_attention({2, 50, 6, 2, 20, true}, true);
    check_attention({1, 33, 4, 1, 256, true}, true);
}

// Deterministic backward in many pieces gives what it gives in one. With 251 tokens a piece's rows
// of log-sum-exp begin at no multiple of 16 bytes.
LIBRARY_TEST(attention_in_pieces) {
    for (int T : {256, 251}) {
        AttentionShape s = {3, T, 8, 4, 64, true};
        AttentionCase c(s);
        Bf16Buffer out(c.out.size()), whole(c.dqkv.size()), pieces(c.dqkv.size());
        FloatBuffer lse(c.lse.size());
        size_t all = gpu.attention_bytes;
        attention_forward_gpu(&gpu, s, out.data, lse.data, c.qkv.device.data);
        attention_backward_gpu(&gpu, s, whole.data, c.dout.device.data, out.data, lse.data,
                               c.qkv.device.data);
        gpu.attention_bytes = (size_t)(9.2 * (1 << 20)); // memory for one group or two
        attention_backward_gpu(&gpu, s, pieces.data, c.dout.device.data, out.data, lse.data,
                               c.qkv.device.data);
        gpu.attention_bytes = all;
        CHECK(same_bits(get_floats(pieces), get_floats(whole)));
    }
}

// ---- optimizer ---------------------------------------------------------------------------------

TEST(norm_and_decision) {
    const int64_t n = 1000 * 64;
    Input g(n, 1e-2f);
    FloatBuffer wide(n);
    Buffer<StepState> state(1);
    const GradientPart pieces[] = {{0, n / 2}, {n / 2, n / 2}, {64, 64 * 3}}; // some twice
    Buffer<GradientPart> parts(3);
    Buffer<double> scratch(3);
    parts.put(pieces);
    Buffer<StepInput> input(1);
    Buffer<double> loss_sum(1);
    const double sum = 50.0;
    loss_sum.put(&sum);
    StepState start = {.updates = 4, .unmeasured = 3};
    wide.put(g.host.data());
    for (int pass = 0; pass < 4; pass++) { // 2: 50 / 0 is infinite; 3: a quarter counts
        const double tokens = 10.0, targets[] = {tokens, tokens, 0.0, tokens / 4};
        double factor = pass == 3 ? 4.0 : 1.0;
        StepInput stops = {.stop = 1.0, .targets = targets[pass]};
        input.put(&stops);
        state.put(&start);
        bool bf16 = pass == 1;
        gpu_sum_of_squares(&gpu, state.data, input.data, loss_sum.data, scratch.data,
                           bf16 ? (void *)g.device.data : wide.data, bf16 ? TYPE_BF16 : TYPE_F32,
                           parts.data, 3);
        gpu_decide_step(&gpu, state.data, input.data, tokens, 1.0f);
        StepState s = state.get()[0];
        double expected = sum_of_squares(g.host.data(), n) +
                          sum_of_squares(g.host.data() + 64, 64 * 3);
        CHECK_EQUAL(s.skipped, pass == 2);
        CHECK_EQUAL(s.updates, pass == 2 ? 4 : 5);
        CHECK_EQUAL(s.unmeasured, 0);
        CHECK_CLOSE(s.stop, 1.0, 0.0);
        CHECK_CLOSE(s.loss_sum, 50.0, 0.0);
        CHECK_CLOSE(s.own_loss_sum, 50.0, 0.0);
        if (pass == 2) { continue; }
        expected *= factor * factor;
        CHECK_CLOSE(s.norm_squared, expected, 1e-6 * expected);
        CHECK_CLOSE(s.gradient_scale, factor / sqrt(expected), 1e-6);
    }
}

// The device's decisions and window are the host's, to a spike and past it.
TEST(spikes_as_on_the_host) {
    Buffer<StepState> state(1);
    Buffer<StepInput> input(1);
    StepState s = {};
    SpikeWindow window = {};
    int skips[SKIP_ASKED + 1] = {};
    for (int step = 0; step < 400; step++) {
        double jump = step % 50 == 49 ? 10.0 : 1.0;
        double loss = 5.0 + 0.1 * rng_normal(7, (uint64_t)step) * jump;
        double norm = 1.0 + 0.1 * fabs(rng_normal(8, (uint64_t)step)) * jump;
        StepInput in = {.targets = 2.0, .sigma = 4.0, .skip = step % 90 == 89};
        s.loss_sum = step == 60 ? NAN : 2.0 * loss;
        s.norm_squared = norm * norm;
        state.put(&s);
        input.put(&in);
        gpu_decide_step(&gpu, state.data, input.data, 2.0, 1.0f);
        int expected = step_skip(&window, in.sigma, in.skip, s.loss_sum / 2.0,
                                 sqrt(s.norm_squared));
        s = state.get()[0];
        CHECK_EQUAL(s.skipped, expected);
        CHECK_EQUAL(s.window.count, window.count);
        CHECK(memcmp(&s.window, &window, sizeof(window)) == 0);
        skips[s.skipped]++;
    }
    CHECK_EQUAL(s.updates, skips[SKIP_NONE]);
    CHECK_EQUAL(skips[SKIP_NONFINITE], 1);
    CHECK(skips[SKIP_SPIKE] > 0 && skips[SKIP_ASKED] > 2);
}

TEST(hashes_are_those_of_the_host) {
    for (int64_t bytes : {8, 16, 8 * 255, 8 * 256, 8 * 1000003}) {
        Buffer<uint64_t> data((size_t)(bytes / 8)), sum(1);
        std::vector<uint64_t> host((size_t)(bytes / 8));
        for (size_t i = 0; i < host.size(); i++) { host[i] = rng_bits(3, i); }
        data.put(host.data());
        uint64_t start = 5, hash = hash_words(host.data(), bytes, 9);
        for (int twice = 0; twice < 2; twice++) {
            sum.put(&start);
            gpu_hash(&gpu, sum.data, data.data, bytes, 9);
            CHECK(sum.get()[0] == start + hash);
        }
        host[host.size() / 2] ^= 1ull << 63;
        CHECK(hash_words(host.data(), bytes, 9) != hash);
        host[host.size() / 2] ^= 1ull << 63;
        int64_t half = bytes / 16; // the hashes of two parts add up to that of the whole
        sum.put(&start);
        gpu_hash(&gpu, sum.data, data.data, 8 * half, 9);
        gpu_hash(&gpu, sum.data, data.data + half, bytes - 8 * half, 9 + half);
        CHECK(sum.get()[0] == start + hash);
    }
}

TEST(the_device_tells_the_time) {
    Buffer<uint64_t> stamps(2);
    gpu_stamp(&gpu, stamps.data);
    CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    double begin = wall_seconds();
    while (wall_seconds() < begin + 0.05) {}
    gpu_stamp(&gpu, stamps.data + 1);
    double seconds = 1e-9 * (double)(stamps.get()[1] - stamps.get()[0]);
    CHECK(seconds > 0.049 && seconds < 1);
}

static void adamw(GpuType gradient_type, GpuType moment_type) {
    const int64_t n = 64 * 1001;
    Floats w = random_bf16(n, 1), m(n, 0.0f), v(n, 0.0f);
    FloatBuffer master(n), wide_m(n), wide_v(n), wide_g(n);
    Bf16Buffer weights(n), narrow_m(n), narrow_v(n);
    const std::vector<int64_t> first = {0, 64 * 5, 64 * 700};
    Buffer<StepState> state(1);
    master.put(w.data());
    bool wide = moment_type == TYPE_F32;
    wide_m.put(m.data());
    wide_v.put(v.data());
    put_floats(narrow_m, m);
    put_floats(narrow_v, v);
    for (int step = 1; step <= 6; step++) {
        Input g(n, 0.1f);
        wide_g.put(g.host.data());
        bool skipped = step == 6;
        StepState s = {.gradient_scale = 0.5f, .skipped = skipped, .updates = step};
        InputBuffer input(0.01, step);
        state.put(&s);
        bool float_gradient = gradient_type == TYPE_F32;
        AdamWUpdate u = plain_update(g.device.data);
        if (float_gradient) { u.gradients = wide_g.data; }
        u.moment_type = moment_type;
        u.gradient_type = gradient_type;
        u.input = input.data;
        u.seed = 1;
        void *exp_avg = wide ? (void *)wide_m.data : narrow_m.data;
        void *exp_avg_sq = wide ? (void *)wide_v.data : narrow_v.data;
        SegmentBuffer segments(u, first, master.data, exp_avg, exp_avg_sq, weights.data, n);
        gpu_adamw(&gpu, &u, SCALE_GIVEN, state.data);
        AdamW a = {
            .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .gradient_scale = 0.5f, .step = step};
        for (int64_t i = 0; i < n && !skipped; i += 64) {
            bool decays = i < first[1] || i >= first[2];
            a.lr = decays ? 0.01f : 0.005f;
            a.weight_decay = decays ? 0.1f : 0.0f;
            adamw_update(&w[i], &m[i], &v[i], &g.host[i], 64, a);
        }
    }
    // BF16 moments: their rounding is of relative size 2^-8, and unbiased
    CHECK_ERROR(master.get().data(), w.data(), n, wide ? 1e-6 : 1e-3);
    Floats rounded = master.get();
    round_to_bf16(rounded.data(), rounded.data(), n);
    CHECK(same_bits(get_floats(weights), rounded));
    if (!wide) {
        double bias = 0, size = 0;
        Floats stored = get_floats(narrow_v);
        for (int64_t i = 0; i < n; i++) {
            bias += (double)stored[i] - v[i];
            size += v[i];
        }
        CHECK(fabs(bias / size) <= 1e-4); // rounding down would be off by some 2^-9
    }
}

TEST(optimizers) {
    adamw(TYPE_F32, TYPE_F32);
    adamw(TYPE_BF16, TYPE_F32);
    adamw(TYPE_BF16, TYPE_BF16);
}

SETUP() {
    open_test_gpu(64 << 20);
}
