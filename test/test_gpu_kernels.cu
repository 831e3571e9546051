// Every kernel of a step against its definition in cpu.c, in BF16 and FP8: odd shapes, random data,
// poisoned outputs, guard zones, repeats that must give the same bits.
#include "fp8_test.h"

// Runs a gradient kernel into FP32 and BF16, overwriting and adding, and checks each.
template <typename Launch>
static void check_gradient(const char *what, const Floats &expected, Launch launch, int line) {
    size_t n = expected.size();
    Floats before = random_bf16(n, 1.0f), sum(n);
    for (size_t i = 0; i < n; i++) { sum[i] = before[i] + expected[i]; }
    FloatBuffer wide(n);
    launch({wide.data, TYPE_F32, false});
    std::vector<float> first = wide.get();
    CHECK_ERROR(first.data(), expected.data(), (int64_t)n, 1e-5);
    wide.put(before.data());
    launch({wide.data, TYPE_F32, true});
    Floats added = wide.get();
    CHECK_ERROR(added.data(), sum.data(), (int64_t)n, 1e-5);
    Bf16Buffer narrow(n);
    launch({narrow.data, TYPE_BF16, false});
    check_against(what, get_floats(narrow), expected, 1.5, __FILE__, line);
    put_floats(narrow, before);
    launch({narrow.data, TYPE_BF16, true});
    check_against(what, get_floats(narrow), sum, 1.5, __FILE__, line);
    wide.poison();
    launch({wide.data, TYPE_F32, false});
    CHECK(same_bits(wide.get(), first));
}

#define CHECK_GRADIENT(expected, launch) check_gradient(#expected, expected, launch, __LINE__)

static Ints random_tokens(int n, int V) {
    Ints tokens(n);
    random_key++;
    for (int i = 0; i < n; i++) { tokens[i] = (int)(rng_bits(random_key, i) % (uint64_t)V); }
    return tokens;
}

static void embedding(int B, int T, int C, int V, bool positions) {
    int M = B * T;
    if (left_out((int64_t)V * C)) { return; }
    Ints tokens = random_tokens(M, V);
    Buffer<int> device_tokens(M), rows(M), starts(M + 1), runs(embedding_runs_size(M));
    device_tokens.put(tokens.data());
    Input wte((size_t)V * C, 1), wpe((size_t)T * C, 1), dout((size_t)M * C, 1);
    Bf16Buffer out((size_t)M * C);
    Floats expected((size_t)M * C), dwte((size_t)V * C, 0.0f), dwpe((size_t)T * C, 0.0f);
    gpu_embedding_forward(&gpu, out.data, device_tokens.data, wte.device.data,
                          positions ? wpe.device.data : NULL, B, T, C);
    embedding_forward(expected.data(), tokens.data(), wte.host.data(),
                      positions ? wpe.host.data() : NULL, B, T, C);
    if (positions) {
        CHECK_BF16(get_floats(out), expected, 1.01);
    } else {
        CHECK(same_bits(get_floats(out), expected));
    }

    Ints counts(V + 1), host_rows(M), host_starts(M + 1), host_runs(embedding_runs_size(M));
    embedding_sort_tokens(tokens.data(), M, V, counts.data(), host_rows.data(), host_starts.data(),
                          host_runs.data());
    rows.put(host_rows.data());
    starts.put(host_starts.data());
    runs.put(host_runs.data());
    embedding_backward(dwte.data(), dwpe.data(), dout.host.data(), tokens.data(), B, T, C);
    CHECK_GRADIENT(dwpe,
                   [&](Gradient g) { gpu_position_backward(&gpu, g, dout.device.data, B, T, C); });
    FloatBuffer sums((size_t)V * C);
    CUDA_CHECK(cudaMemsetAsync(sums.data, 0, sums.count * sizeof(float), gpu.stream));
    gpu_embedding_backward(&gpu, {sums.data, TYPE_F32, true}, dout.device.data, device_tokens.data,
                           rows.data, starts.data, runs.data, M, C);
    CHECK_ERROR(sums.get().data(), dwte.data(), (int64_t)dwte.size(), 1e-6);
}

TEST(embeddings) {
    embedding(1, 1, 8, 2, true);
    embedding(3, 17, 48, 257, true);
    embedding(2, 100, 1600, 13, true);
    embedding(4, 33, 264, 5000, false);
    embedding(8, 33, 840, 6, true); // long runs
    embedding(64, 3, 40, 7, false);
}

// The norm's three sums over rows, by FP32 unless g says otherwise.
static void norm_gradients(const NormBackward &plain, const Input &residual, const Floats &dw,
                           const Floats &db, const Floats &sums) {
    int M = plain.M, C = plain.C;
    bool layernorm = plain.mean != NULL;
    FloatBuffer spare(C), spare2(C), spare3(C);
    Quantised q(M, C, FP8_E5M2, 60.0f);
    for (int fused = 0; fused < 2; fused++) {
        if (fused && (!has_fp8() || M % 16 != 0 || C % 16 != 0)) { continue; }
        Tensor out = fused ? q.tensor(SCALE_GIVEN, true) : tensor_bf16(q.bf16.data);
        auto run = [&](int which, Gradient g) {
            NormBackward n = plain;
            n.dweight = {spare.data, TYPE_F32, false};
            if (layernorm) { n.dbias = {spare2.data, TYPE_F32, false}; }
            n.column_sums = {spare3.data, TYPE_F32, false};
            (which == 0 ? n.dweight : which == 1 ? n.dbias : n.column_sums) = g;
            put_floats(q.bf16, residual.host);
            gpu_norm_backward(&gpu, out, n);
        };
        CHECK_GRADIENT(dw, [&](Gradient g) { run(0, g); });
        if (layernorm) {
            CHECK_GRADIENT(db, [&](Gradient g) { run(1, g); });
        }
        CHECK_GRADIENT(sums, [&](Gradient g) { run(2, g); });
    }
}

// Weights are positive and dout follows x: where the rows are far from zero (centre), values that a
// thread computes beyond a row would be far larger than those in it.
static void norm(int M, int C, bool layernorm, float centre) {
    const float eps = 1e-5f;
    size_t n = (size_t)M * C;
    if (left_out((int64_t)n) || misleads_racecheck(M, C)) { return; }
    Input x(n, 2), w(C, 1), b(C, 1), dout(n, 1), residual(n, 1);
    for (float &value : w.host) { value = fabsf(value); }
    for (size_t i = 0; i < n; i++) {
        dout.host[i] += x.host[i];
        x.host[i] += centre;
    }
    round_to_bf16(x.host.data(), x.host.data(), (int64_t)n);
    round_to_bf16(dout.host.data(), dout.host.data(), (int64_t)n);
    put_floats(w.device, w.host);
    put_floats(x.device, x.host);
    put_floats(dout.device, dout.host);
    FloatBuffer mean(M), rstd(M);
    Floats y(n), means(M), deviations(M), dx = residual.host, dw(C, 0.0f), db(C, 0.0f),
                                          sums(C, 0.0f);
    const Bf16 *bias = layernorm ? b.device.data : NULL;
    cpu_norm_forward(y.data(), means.data(), deviations.data(), x.host.data(), w.host.data(),
                     layernorm ? b.host.data() : NULL, M, C, eps);
    check_producer(FUSED_UNROUNDED, M, C, FP8_E4M3, 60.0f, NULL, y, [&](Tensor out) {
        mean.poison();
        rstd.poison();
        gpu_norm_forward(&gpu, out,
                         {mean.data, rstd.data, x.device.data, w.device.data, bias, eps, M, C});
        if (layernorm) { CHECK_ERROR(mean.get().data(), means.data(), M, 1e-5); }
        CHECK_ERROR(rstd.get().data(), deviations.data(), M, 1e-5);
    });

    SumScratch scratch(M, 3 * C);
    FloatBuffer ignored(C), ignored2(C);
    mean.put(means.data());
    rstd.put(deviations.data());
    cpu_norm_backward(dx.data(), dw.data(), layernorm ? db.data() : NULL, dout.host.data(),
                      x.host.data(), w.host.data(), means.data(), deviations.data(), M, C);
    NormBackward backward = {.dweight = {ignored.data, TYPE_F32, false},
                             .dbias = {layernorm ? ignored2.data : NULL, TYPE_F32, false},
                             .dout = dout.device.data,
                             .x = x.device.data,
                             .weight = w.device.data,
                             .mean = layernorm ? mean.data : NULL,
                             .rstd = rstd.data,
                             .scratch = scratch.scratch(),
                             .M = M,
                             .C = C};
    Floats result;
    check_producer(FUSED_ROUNDED, M, C, FP8_E5M2, 60.0f, &residual.host, dx, [&](Tensor out) {
        gpu_norm_backward(&gpu, out, backward);
        if (!result.empty()) { return; }
        std::vector<Bf16> codes(n);
        CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
        CUDA_CHECK(cudaMemcpy(codes.data(), out.bf16, n * sizeof(Bf16), cudaMemcpyDeviceToHost));
        for (Bf16 code : codes) { result.push_back(bf16_decode(code)); }
    });
    bias_backward(sums.data(), result.data(), M, C); // of the values that were written, rounded
    norm_gradients(backward, residual, dw, db, sums);
}

static const int norm_shapes[][2] = {
    {1, 8},     {17, 48},     {16, 16},   {80, 208},  {1000, 768}, {1008, 768}, {65, 1600},
    {96, 1600}, {1008, 1600}, {33, 2048}, {64, 2048}, {48, 4096},  {19, 5128},  {32, 5120},
    {32, 8192}, {9, 8192},    {256, 768}, {256, 776}, {192, 1360} // the last 3: even groups
};

TEST(norms) {
    for (int layernorm = 0; layernorm < 2; layernorm++) {
        for (const int *shape : norm_shapes) { norm(shape[0], shape[1], layernorm, 0.5f); }
        norm(96, 1600, layernorm, 64.0f);
    }
}

// The norms as on devices whose blocks have less shared memory than Hopper's: with fewer groups, or
// none.
TEST(norms_in_little_shared_memory) {
    static const char *const kilobytes[] = {"164", "99", "72"};
    for (const char *kib : kilobytes) {
        setenv("LLM8_TEST_SHARED_KIB", kib, 1);
        for (int layernorm = 0; layernorm < 2; layernorm++) {
            norm(256, 768, layernorm, 0.5f);
            norm(96, 1600, layernorm, 0.5f);
            norm(48, 2048, layernorm, 0.5f);
            norm(32, 4096, layernorm, 0.5f);
        }
    }
    unsetenv("LLM8_TEST_SHARED_KIB");
}

// norm: heads are also normalised. The bias gradient is the column sums of the resulting gradient.
static void rope(int B, int T, int H, int G, int D, bool norm) {
    int M = B * T, N = (H + 2 * G) * D;
    size_t n = (size_t)M * N;
    const float eps = 1e-2f;
    Input qkv(n, 1), d(n, 1), query(D, 1), key(D, 1);
    Floats table((size_t)T * D), forward = qkv.host, backward = d.host, rstd((size_t)M * (H + G)),
                                 dquery(D, 0.0f), dkey(D, 0.0f), sums(N, 0.0f);
    FloatBuffer angles(table.size()), ignored(D), ignored2(D), ignored3(N);
    SumScratch scratch(M, N);
    Bf16Buffer out(n), again(n);
    Rope rope = {10000.0};
    rope_table(table.data(), T, D, &rope);
    angles.put(table.data());
    Rotary r = {angles.data, NULL, NULL, eps, B, T, H, G, D};
    if (norm) {
        r.query_weight = query.device.data;
        r.key_weight = key.device.data;
        qk_norm_forward(forward.data(), rstd.data(), qkv.host.data(), query.host.data(),
                        key.host.data(), M, H, G, D, eps);
    }
    rope_apply(forward.data(), table.data(), B, T, H, G, D, false);
    rope_apply(backward.data(), table.data(), B, T, H, G, D, true);
    if (norm) {
        qk_norm_backward(backward.data(), dquery.data(), dkey.data(), qkv.host.data(),
                         query.host.data(), key.host.data(), rstd.data(), M, H, G, D);
        gpu_rope_forward(&gpu, out.data, qkv.device.data, r);
        CHECK_BF16(get_floats(out), forward, 1.02);
        CHECK(same_bits(get_floats(qkv.device), qkv.host));
    }
    put_floats(again, qkv.host); // in place
    gpu_rope_forward(&gpu, again.data, again.data, r);
    CHECK_BF16(get_floats(again), forward, 1.02);
    CHECK(!norm || same_bits(get_floats(again), get_floats(out)));

    RotaryBackward plain = {r, norm ? qkv.device.data : NULL, {}, {}, {}, scratch.scratch()};
    if (norm) {
        plain.dquery_weight = {ignored.data, TYPE_F32, false};
        plain.dkey_weight = {ignored2.data, TYPE_F32, false};
    }
    Fused fused = D % 16 == 0 && !norm ? FUSED_UNROUNDED : FUSED_ROUNDED;
    for (int type = 0; type < 2; type++) {
        check_producer(fused, M, N, (Fp8Type)type, 100.0f, &d.host, backward,
                       [&](Tensor to) { gpu_rope_backward(&gpu, to, plain); });
    }
    if (N % 8 != 0) { return; }
    Quantised result(M, N, FP8_E5M2, 100.0f);
    RotaryBackward b = plain;
    auto run = [&](Gradient &which, Gradient g) {
        which = g;
        put_floats(result.bf16, d.host);
        gpu_rope_backward(&gpu, tensor_bf16(result.bf16.data), b);
    };
    if (norm) {
        CHECK_GRADIENT(dquery, [&](Gradient g) { run(b.dquery_weight, g); });
        b = plain;
        CHECK_GRADIENT(dkey, [&](Gradient g) { run(b.dkey_weight, g); });
        b = plain;
    }
    run(b.column_sums, {ignored3.data, TYPE_F32, false});
    bias_backward(sums.data(), get_floats(result.bf16).data(), M, N); // of the rounded values
    CHECK_GRADIENT(sums, [&](Gradient g) { run(b.column_sums, g); });
    if (!has_fp8() || M % 16 != 0 || N % 16 != 0) { return; }
    b.column_sums = {ignored3.data, TYPE_F32, false};
    put_floats(result.bf16, d.host);
    gpu_rope_backward(&gpu, result.tensor(SCALE_GIVEN, true), b);
    CHECK_ERROR(ignored3.get().data(), sums.data(), N, 4e-3); // fused: of the unrounded values
    check_given(result, fused == FUSED_ROUNDED ? get_floats(result.bf16) : backward,
                fused == FUSED_ROUNDED);
}

static void ropes_of(bool norm) {
    static const int head_sizes[] = {16, 18, 24, 40, 64, 72, 80, 96, 100, 128, 256};
    for (int D : head_sizes) {
        rope(2, 24, 4, 2, D, norm);
        rope(1, 17, 3, 1, D, norm);
    }
    rope(1, 1, 1, 1, 16, norm);
    rope(1, 5, 1, 1, 2, norm);
    rope(2, 17, 25, 5, 64, norm);
    rope(4, 300, 6, 6, 128, norm); // a thread takes several rows
    rope(1, 640, 16, 8, 48, norm);
}

TEST(ropes) {
    ropes_of(false);
    CHECK_DIES("head size must be even",
               gpu_rope_forward(&gpu, (Bf16 *)16, (Bf16 *)16,
                                {(float *)16, NULL, NULL, 0, 1, 1, 1, 1, 7}));
}

TEST(normalised_ropes) {
    ropes_of(true);
    Bf16 *x = (Bf16 *)4096, *odd = (Bf16 *)4098;
    float *f = (float *)4096;
    CHECK_DIES("heads of 264", gpu_rope_forward(&gpu, x, x, {f, x, x, 0, 1, 8, 1, 1, 264}));
    CHECK_DIES("not 16-byte aligned", gpu_rope_forward(&gpu, x, x, {f, x, odd, 0, 1, 8, 1, 1, 64}));
    RotaryBackward b = {{f, x, x, 0, 1, 64, 1, 1, 64}, NULL, {}, {}, {}, {f, 1 << 20}};
    CHECK_DIES("no BF16 form", gpu_rope_backward(&gpu, tensor_bf16(x), b));
    b.qkv = x;
    b.scratch.bytes = 2 * 8 * 64 * 4 - 4;
    CHECK_DIES("4092 bytes of scratch", gpu_rope_backward(&gpu, tensor_bf16(x), b));
}

static void gelu(int M, int F, Fp8Type type, bool biased) {
    size_t n = (size_t)M * F;
    Input x(n, 2), b(F, 1), dout(n, 1);
    const Bf16 *bias = biased ? b.device.data : NULL;
    SumScratch scratch(M, F);
    FloatBuffer ignored(F);
    Floats sum = x.host, y(n), dx(n), sums(F, 0.0f);
    for (size_t i = 0; biased && i < n; i++) { sum[i] += b.host[i % F]; }
    gelu_forward(y.data(), sum.data(), (int64_t)n);
    check_producer(FUSED_UNROUNDED, M, F, FP8_E4M3, 50.0f, NULL, y,
                   [&](Tensor out) { gpu_gelu_forward(&gpu, out, x.device.data, bias, M, F); });
    gelu_backward(dx.data(), dout.host.data(), sum.data(), (int64_t)n); // in place of dout
    auto backward = [&](Tensor out, Gradient g) {
        gpu_gelu_backward(&gpu, out, g, out.bf16, x.device.data, bias, scratch.scratch(), M, F);
    };
    check_producer(FUSED_UNROUNDED, M, F, type, 50.0f, &dout.host, dx, [&](Tensor out) {
        backward(out, {ignored.data, TYPE_F32, false});
    });
    Quantised result(M, F, type, 50.0f);
    if (has_fp8() && M % 16 == 0 && F % 16 == 0) { // of the unrounded values
        bias_backward(sums.data(), dx.data(), M, F);
        put_floats(result.bf16, dout.host);
        backward(result.tensor(SCALE_GIVEN, true), {ignored.data, TYPE_F32, false});
        CHECK_ERROR(ignored.get().data(), sums.data(), F, 1e-4);
        sums.assign(F, 0.0f);
    }
    auto plain = [&](Gradient g) {
        put_floats(result.bf16, dout.host);
        backward(tensor_bf16(result.bf16.data), g);
    };
    plain({ignored.data, TYPE_F32, false});
    bias_backward(sums.data(), get_floats(result.bf16).data(), M, F); // of the rounded values
    CHECK_GRADIENT(sums, plain);
}

static void swiglu(int M, int F, Fp8Type type) {
    size_t n = (size_t)M * F;
    Input x(2 * n, 2), dout(n, 1);
    Floats y(n), dx(2 * n);
    swiglu_forward(y.data(), x.host.data(), M, F);
    check_producer(FUSED_UNROUNDED, M, F, FP8_E4M3, 50.0f, NULL, y,
                   [&](Tensor out) { gpu_swiglu_forward(&gpu, out, x.device.data, M, F); });
    swiglu_backward(dx.data(), dout.host.data(), x.host.data(), M, F); // in place of x
    check_producer(FUSED_UNROUNDED, M, 2 * F, type, 20.0f, &x.host, dx, [&](Tensor out) {
        gpu_swiglu_backward(&gpu, out, dout.device.data, out.bf16, M, F);
    });
}

static void activation(int M, int F, Fp8Type type) {
    if (left_out((int64_t)M * F)) { return; }
    gelu(M, F, type, false);
    gelu(M, F, type, true);
    swiglu(M, F, type);
}

TEST(activations) {
    activation(1, 8, FP8_E5M2);
    activation(17, 200, FP8_E5M2);
    activation(16, 16, FP8_E4M3);
    activation(144, 208, FP8_E5M2);
    activation(1000, 3072, FP8_E5M2);
    activation(512, 3072, FP8_E4M3);
    activation(5000, 264, FP8_E5M2);
}

// A loss is the log-sum-exp less the target's logit, and its error is relative to these two: near 0
// a loss keeps few of their bits. With a cap, both are as exact as the device's exp and division,
// to 1.5 2^-22 of the cap (device.cuh).
static void check_losses(const Floats &actual, const Floats &expected, const Floats &logits,
                         const Ints &targets, int P, float softcap, double allowed) {
    for (size_t i = 0; i < targets.size(); i++) {
        double logit = targets[i] < 0 ? 0.0 : logits[i * P + targets[i]];
        if (softcap > 0.0f) { logit = softcap * tanh(logit / softcap); }
        double size = fmax(1.0, fmax(fabs(logit), fabs(expected[i] + logit)));
        double most = targets[i] < 0 ? 0.0 : allowed * size + 3 * softcap * 0x1p-22;
        CHECK_CLOSE(actual[i], expected[i], most);
    }
}

static void loss(int M, int V, int P, Fp8Type type, float z_loss = 0.0f, float softcap = 0.0f) {
    const float factor = 0.25f, most = factor * (1 + 2 * z_loss * 30); // of the gradient
    const LossTerms reported = {0.0f, z_loss, softcap}, terms = {factor, z_loss, softcap};
    if (left_out((int64_t)M * P)) { return; }
    Input logits((size_t)M * P, 3);
    Ints host_targets = random_tokens(M, V);
    for (int i = 0; i < M; i += 5) { host_targets[i] = i % 2 ? -1 : V - 1; }
    if (M > 2) { host_targets[2] = -1; }
    if (M == 1) { // the model is nearly certain: a loss near 0
        float largest = *std::max_element(logits.host.begin(), logits.host.begin() + V);
        logits.host[host_targets[0]] = bf16_decode(bf16_encode(largest + 4));
        put_floats(logits.device, logits.host);
    }
    Buffer<int> targets(M);
    targets.put(host_targets.data());
    FloatBuffer losses(M), scratch(loss_scratch_floats(M));
    const Scratch rows = {scratch.data, scratch.count * sizeof(float)};
    Buffer<double> sum(1);
    Floats expected(M), gradient = logits.host;
    double total = 0, allowed = 2e-6;
    cross_entropy(expected.data(), gradient.data(), host_targets.data(), M, V, P, terms);
    gpu_cross_entropy(&gpu, losses.data, tensor_bf16(logits.device.data), {}, targets.data, M, V, P,
                      reported);
    CHECK(same_bits(get_floats(logits.device), logits.host));
    auto right = [&] {
        check_losses(losses.get(), expected, logits.host, host_targets, P, softcap, allowed);
    };
    right();
    check_producer(
        FUSED_UNROUNDED, M, P, type, fp8_max(type) / most, &logits.host, gradient, [&](Tensor out) {
            if (out.mode == SCALE_MEASURED) { // the head's gradient has a fixed scale
                gpu_cross_entropy(&gpu, losses.data, tensor_bf16(out.bf16), {}, targets.data, M, V,
                                  P, terms);
                gpu_measure(&gpu, out, (int64_t)M * P);
                gpu_quantize(&gpu, out, {}, {}, M, P);
                return;
            }
            losses.poison();
            scratch.poison();
            gpu_cross_entropy(&gpu, losses.data, out, rows, targets.data, M, V, P, terms);
            right();
        });
    gpu_sum_losses(&gpu, sum.data, losses.data, M, false);
    gpu_sum_losses(&gpu, sum.data, losses.data, M, true);
    for (float l : losses.get()) { total += 2.0 * l; }
    CHECK_CLOSE(sum.get()[0], total, 1e-9 * fabs(total));
}

TEST(losses) {
    loss(1, 5, 8, FP8_E5M2);
    loss(33, 257, 264, FP8_E5M2);
    loss(16, 16, 16, FP8_E4M3);
    loss(48, 301, 304, FP8_E5M2);
    loss(128, 5003, 5008, FP8_E5M2);
    loss(100, 8001, 8064, FP8_E5M2);
    loss(5, 50257, 50304, FP8_E5M2);
    loss(20, 50257, 50304, FP8_E5M2);
    loss(7, 128256, 128256, FP8_E5M2);
    loss(3, 499999, 500000, FP8_E5M2); // a row too long for a cluster
}

TEST(losses_with_more_terms) {
    static const float terms[][2] = {{1e-2f, 0}, {0, 4}, {3e-2f, 2.5f}, {1e-4f, 30}};
    for (const float *t : terms) {
        loss(1, 5, 8, FP8_E5M2, t[0], t[1]);
        loss(33, 257, 264, FP8_E5M2, t[0], t[1]);
        loss(16, 16, 16, FP8_E4M3, t[0], t[1]);
        loss(48, 301, 304, FP8_E5M2, t[0], t[1]);
        loss(128, 5003, 5008, FP8_E4M3, t[0], t[1]);
        loss(20, 50257, 50304, FP8_E5M2, t[0], t[1]);
        loss(3, 499999, 500000, FP8_E5M2, t[0], t[1]);
    }
    loss(16, 151931, 151936, FP8_E5M2, 1e-2f, 0); // two kernels: with a cap and without
    loss(16, 151931, 151936, FP8_E5M2, 3e-2f, 2.5f);
}

// The values in the vocabulary's padding do not matter: here NaN, and the largest of all logits.
TEST(paddings_do_not_matter) {
    static const LossTerms terms[] = {{0.25f, 0, 0}, {0.25f, 1e-2f, 5}};
    for (const LossTerms &t : terms) {
        enum { M = 16, V = 261, P = 272 };
        Input logits(M * P, 3);
        Floats results[2], losses[2];
        Ints host_targets = random_tokens(M, V);
        Buffer<int> targets(M);
        targets.put(host_targets.data());
        for (int bad = 0; bad < 2; bad++) {
            Bf16Buffer x(M * P);
            FloatBuffer out(M);
            for (int i = 0; i < M * P; i++) {
                if (i % P >= V) { logits.host[i] = !bad ? 0.0f : i % 2 ? NAN : 1e30f; }
            }
            put_floats(x, logits.host);
            gpu_cross_entropy(&gpu, out.data, tensor_bf16(x.data), {}, targets.data, M, V, P, t);
            results[bad] = get_floats(x);
            losses[bad] = out.get();
        }
        CHECK(same_bits(results[0], results[1]) && same_bits(losses[0], losses[1]));
        CHECK(isfinite(losses[0][0]) && results[0][V] == 0.0f);
    }
}

TEST(losses_of_bad_logits_are_not_finite) {
    float bad[] = {NAN, INFINITY};
    for (float value : bad) {
        Input logits(3 * 264, 1);
        logits.host[264 + 17] = value;
        put_floats(logits.device, logits.host);
        Buffer<int> targets(3);
        int host_targets[] = {1, 2, 3};
        targets.put(host_targets);
        FloatBuffer out(3);
        gpu_cross_entropy(&gpu, out.data, tensor_bf16(logits.device.data), {}, targets.data, 3, 257,
                          264, {1.0f, 0.0f, 0.0f});
        Floats l = out.get();
        CHECK(isfinite(l[0]) && !isfinite(l[1]) && isfinite(l[2]));
    }
}

SETUP() {
    open_test_gpu(1 << 20);
}
