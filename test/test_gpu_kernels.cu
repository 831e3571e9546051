// Every kernel against its definition in cpu.c: odd shapes, random data, poisoned outputs, repeats
// that must give the same bits.
#include "gpu_test.h"

static GradientOut overwrite(void *data, GpuType type) {
    return {data, type, false};
}

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
    gpu_embedding_forward(out.data, device_tokens.data, wte.device.data,
                          positions ? wpe.device.data : NULL, B, T, C, gpu.stream);
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
    CHECK_GRADIENT(dwpe, [&](GradientOut g) {
        gpu_position_backward(g, dout.device.data, B, T, C, gpu.stream);
    });
    FloatBuffer sums((size_t)V * C);
    CUDA_CHECK(cudaMemsetAsync(sums.data, 0, sums.count * sizeof(float), gpu.stream));
    gpu_embedding_backward({sums.data, TYPE_F32, true}, dout.device.data, device_tokens.data,
                           rows.data, starts.data, runs.data, M, C, gpu.stream);
    CHECK_ERROR(sums.get().data(), dwte.data(), (int64_t)dwte.size(), 1e-6);
}

static void embeddings(void) {
    embedding(1, 1, 8, 2, true);
    embedding(3, 17, 48, 257, true);
    embedding(2, 100, 1600, 13, true);
    embedding(4, 33, 264, 5000, false);
    embedding(8, 33, 840, 6, true); // long runs
    embedding(64, 3, 40, 7, false);
}

// Gradients of a norm: the residual's, the weights', and the sums of the residual's.
static void norm_gradients(int M, int C, bool layernorm, const Input &x, const Input &w,
                           const Floats &mean, const Floats &rstd) {
    if (misleads_racecheck(M, C)) { return; }
    Input dout((size_t)M * C, 1), residual((size_t)M * C, 1);
    FloatBuffer device_mean(M), device_rstd(M), scratch(partial_sums_bytes(3 * C) / sizeof(float));
    device_mean.put(mean.data());
    device_rstd.put(rstd.data());
    Floats dx = residual.host, dw(C, 0.0f), db(C, 0.0f), sums(C, 0.0f);
    if (layernorm) {
        layernorm_backward(dx.data(), dw.data(), db.data(), dout.host.data(), x.host.data(),
                           w.host.data(), mean.data(), rstd.data(), M, C);
    } else {
        rmsnorm_backward(dx.data(), dw.data(), dout.host.data(), x.host.data(), w.host.data(),
                         rstd.data(), M, C);
    }
    Bf16Buffer d_residual((size_t)M * C);
    FloatBuffer other(C), third(C);
    AmaxBuffer amax;
    NormBackward n = {d_residual.data,
                      {},
                      {},
                      {},
                      dout.device.data,
                      x.device.data,
                      w.device.data,
                      layernorm ? device_mean.data : NULL,
                      device_rstd.data,
                      scratch.data,
                      amax.data,
                      M,
                      C};
    auto run = [&](GradientOut weight, GradientOut bias, GradientOut column_sums) {
        put_floats(d_residual, residual.host);
        n.dweight = weight;
        n.dbias = bias;
        n.column_sums = column_sums;
        gpu_norm_backward(n, gpu.stream);
    };
    GradientOut none = {}, spare = overwrite(other.data, TYPE_F32),
                spare2 = overwrite(third.data, TYPE_F32);
    CHECK_GRADIENT(dw, [&](GradientOut g) { run(g, spare, none); });
    if (layernorm) {
        CHECK_GRADIENT(db, [&](GradientOut g) { run(spare, g, none); });
    }
    run(spare, spare2, none);
    Floats result = get_floats(d_residual);
    CHECK_BF16(result, dx, 1.05);
    CHECK_AMAX(amax, result);
    bias_backward(sums.data(), result.data(), M, C); // of what was written, rounding included
    CHECK_GRADIENT(sums, [&](GradientOut g) { run(spare, spare2, g); });
}

static void norm(int M, int C, bool layernorm) {
    if (left_out((int64_t)M * C)) { return; }
    const float eps = 1e-5f;
    Input x((size_t)M * C, 2), w(C, 1), b(C, 1);
    for (float &v : x.host) { v += 0.5f; }
    round_to_bf16(x.host.data(), x.host.data(), (int64_t)x.host.size());
    put_floats(x.device, x.host);
    Bf16Buffer out((size_t)M * C);
    FloatBuffer device_mean(M), device_rstd(M);
    Floats expected((size_t)M * C), mean(M), rstd(M);
    AmaxBuffer amax;
    const Bf16 *bias = layernorm ? b.device.data : NULL;
    gpu_norm_forward({out.data, device_mean.data, device_rstd.data, amax.data, x.device.data,
                      w.device.data, bias, eps, M, C},
                     gpu.stream);
    CHECK_AMAX(amax, get_floats(out));
    if (layernorm) {
        layernorm_forward(expected.data(), mean.data(), rstd.data(), x.host.data(), w.host.data(),
                          b.host.data(), M, C, eps);
        CHECK_ERROR(device_mean.get().data(), mean.data(), M, 1e-5);
    } else {
        rmsnorm_forward(expected.data(), rstd.data(), x.host.data(), w.host.data(), M, C, eps);
    }
    CHECK_ERROR(device_rstd.get().data(), rstd.data(), M, 1e-5);
    CHECK_BF16(get_floats(out), expected, 1.05);
    norm_gradients(M, C, layernorm, x, w, mean, rstd);
}

static void norms(void) {
    for (int layernorm = 0; layernorm < 2; layernorm++) {
        norm(1, 8, layernorm);
        norm(17, 48, layernorm);
        norm(1000, 768, layernorm);
        norm(65, 1600, layernorm);
        norm(33, 2048, layernorm);
        norm(19, 5128, layernorm);
        norm(9, 8192, layernorm);
        norm(256, 776, layernorm); // of even shares
        norm(192, 1352, layernorm);
    }
}

static void rope(int B, int T, int H, int G, int D) {
    int N = (H + 2 * G) * D;
    Input qkv((size_t)B * T * N, 1);
    Floats table((size_t)T * D), expected = qkv.host;
    FloatBuffer device_table(table.size());
    Rope angles = {10000.0};
    rope_table(table.data(), T, D, &angles);
    device_table.put(table.data());
    rope_apply(expected.data(), table.data(), B, T, H, G, D, false);
    gpu_rope_apply(qkv.device.data, device_table.data, B, T, H, G, D, false, gpu.stream);
    Floats turned = get_floats(qkv.device);
    CHECK_BF16(turned, expected, 1.02);
    rope_apply(turned.data(), table.data(), B, T, H, G, D, true);
    gpu_rope_apply(qkv.device.data, device_table.data, B, T, H, G, D, true, gpu.stream);
    CHECK_BF16(get_floats(qkv.device), turned, 1.02);
}

static void ropes(void) {
    rope(1, 1, 1, 1, 16);
    rope(2, 17, 25, 5, 64);
    rope(1, 100, 4, 2, 24); // half a head is not a multiple of 8
    rope(2, 33, 8, 2, 128);
}

static void activation(int M, int F) {
    if (left_out((int64_t)M * F)) { return; }
    Input x((size_t)M * F, 2), x2((size_t)M * 2 * F, 2), dout((size_t)M * F, 1);
    int64_t n = (int64_t)M * F;
    Bf16Buffer out(n), dx(n), dx2(2 * n);
    FloatBuffer scratch(partial_sums_bytes(2 * F) / sizeof(float));
    Floats expected(n), expected2(2 * n), sums(F, 0.0f);
    AmaxBuffer amax;
    gpu_gelu_forward(out.data, amax.data, x.device.data, n, gpu.stream);
    CHECK_AMAX(amax, get_floats(out));
    gelu_forward(expected.data(), x.host.data(), n);
    CHECK_BF16(get_floats(out), expected, 1.05);
    gelu_backward(expected.data(), dout.host.data(), x.host.data(), n);
    auto backward = [&](GradientOut g) {
        gpu_gelu_backward(
            {dx.data, amax.clear(), g, dout.device.data, x.device.data, scratch.data, M, F},
            gpu.stream);
    };
    FloatBuffer ignored(F);
    backward(overwrite(ignored.data, TYPE_F32));
    Floats result = get_floats(dx);
    CHECK_BF16(result, expected, 1.05);
    CHECK_AMAX(amax, result);
    bias_backward(sums.data(), result.data(), M, F);
    CHECK_GRADIENT(sums, backward);

    out.poison();
    gpu_swiglu_forward(out.data, amax.clear(), x2.device.data, M, F, gpu.stream);
    swiglu_forward(expected.data(), x2.host.data(), M, F);
    CHECK_BF16(get_floats(out), expected, 1.05);
    CHECK_AMAX(amax, get_floats(out));
    gpu_swiglu_backward(dx2.data, amax.clear(), dout.device.data, x2.device.data, M, F, gpu.stream);
    swiglu_backward(expected2.data(), dout.host.data(), x2.host.data(), M, F);
    CHECK_BF16(get_floats(dx2), expected2, 1.05);
    CHECK_AMAX(amax, get_floats(dx2));

    sums.assign(2 * F, 0.0f);
    bias_backward(sums.data(), x2.host.data(), M, 2 * F);
    CHECK_GRADIENT(sums, [&](GradientOut g) {
        gpu_column_sums(g, x2.device.data, scratch.data, M, 2 * F, gpu.stream);
    });
}

static void activations(void) {
    activation(1, 8);
    activation(17, 200);
    activation(1000, 3072);
    activation(5000, 264);
}

static void loss(int M, int V, int P) {
    if (left_out((int64_t)M * P)) { return; }
    Input logits((size_t)M * P, 3);
    Ints targets = random_tokens(M, V);
    for (int i = 0; i < M; i += 5) { targets[i] = i % 2 ? -1 : V - 1; }
    if (M > 2) { targets[2] = -1; }
    Buffer<int> device_targets(M);
    device_targets.put(targets.data());
    FloatBuffer losses(M);
    Buffer<double> sum(1);
    Floats expected_losses(M), gradient = logits.host;
    double expected_sum = 0;
    gpu_cross_entropy(losses.data, logits.device.data, device_targets.data, M, V, P, 0.0f,
                      gpu.stream);
    CHECK(same_bits(get_floats(logits.device), logits.host));
    cross_entropy(expected_losses.data(), gradient.data(), targets.data(), M, V, P, 0.25f);
    CHECK_ERROR(losses.get().data(), expected_losses.data(), M, 2e-6);
    losses.poison();
    gpu_cross_entropy(losses.data, logits.device.data, device_targets.data, M, V, P, 0.25f,
                      gpu.stream);
    CHECK_ERROR(losses.get().data(), expected_losses.data(), M, 2e-6);
    CHECK_BF16(get_floats(logits.device), gradient, 1.05);
    gpu_sum_losses(sum.data, losses.data, M, false, gpu.stream);
    gpu_sum_losses(sum.data, losses.data, M, true, gpu.stream);
    for (float l : losses.get()) { expected_sum += 2.0 * l; }
    CHECK_CLOSE(sum.get()[0], expected_sum, 1e-9 * fabs(expected_sum));
}

static void losses(void) {
    loss(1, 5, 8);
    loss(33, 257, 264);
    loss(100, 8001, 8064);
    loss(5, 50257, 50304);
    loss(20, 50257, 50304);
    loss(7, 128256, 128256);
}

static void losses_of_bad_logits_are_not_finite(void) {
    float bad[] = {NAN, INFINITY};
    for (float value : bad) {
        Input logits(3 * 264, 1);
        logits.host[264 + 17] = value;
        put_floats(logits.device, logits.host);
        Buffer<int> targets(3);
        int host_targets[] = {1, 2, 3};
        targets.put(host_targets);
        FloatBuffer out(3);
        gpu_cross_entropy(out.data, logits.device.data, targets.data, 3, 257, 264, 1.0f,
                          gpu.stream);
        Floats l = out.get();
        CHECK(isfinite(l[0]) && !isfinite(l[1]) && isfinite(l[2]));
    }
}

int main(void) {
    if (!open_test_gpu(1 << 20)) { return 0; }
    RUN(embeddings);
    RUN(norms);
    RUN(ropes);
    RUN(activations);
    RUN(losses);
    RUN(losses_of_bad_logits_are_not_finite);
    return test_summary();
}
