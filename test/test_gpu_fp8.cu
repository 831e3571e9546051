// Every kernel that writes FP8 against cpu.c and fp8_format.h: codes equal bit for bit where the
// arithmetic before is exact, within one code otherwise; transposes and ranges exact.
#include "fp8_test.h"

static void cast(int M, int N, Fp8Type type) {
    if (left_out((int64_t)M * N)) { return; }
    Input x((size_t)M * N, 1);
    FloatBuffer sums(N), scratch(partial_sums_bytes(N) / sizeof(float) + (size_t)M / 16 * N);
    float amax = tensor_amax(x.host.data(), (int64_t)x.host.size());
    Quantised q(M, N, type, 37.3f);
    gpu_quantize(q.out(), false, {sums.data, TYPE_F32, false}, x.device.data, scratch.data, M, N,
                 gpu.stream);
    check_given(q, x.host, true);
    Floats expected_sums(N, 0.0f);
    bias_backward(expected_sums.data(), x.host.data(), M, N);
    CHECK_ERROR(sums.get().data(), expected_sums.data(), N, 1e-5);

    // measured, with no history: the scale is amax's
    q.reset(amax, 0);
    gpu_quantize(q.out(), true, {}, x.device.data, scratch.data, M, N, gpu.stream);
    Fp8Live live = q.live.get()[0];
    float scale = fp8_scale(amax, fp8_max(type), 1.0f);
    CHECK_CLOSE(live.scale, scale, 0.0);
    CHECK_CLOSE(live.scale_inv, 1.0f / scale, 0.0);
    CHECK_CLOSE(q.slot.get()[0].amax, amax, 0.0);
    CHECK_EQUAL(check_codes(q.rows.get(), x.host, scale, type, 0), 0);
    check_transpose(q);

    // measured, with a history: the slot's scale stands
    q.reset(amax, 3);
    gpu_quantize(q.out(), true, {}, x.device.data, scratch.data, M, N, gpu.stream);
    CHECK_EQUAL(check_codes(q.rows.get(), x.host, q.scale, type, 0), 0);
}

static void casts(void) {
    for (int type = 0; type < 2; type++) {
        cast(16, 16, (Fp8Type)type);
        cast(128, 64, (Fp8Type)type);
        cast(48, 208, (Fp8Type)type);
        cast(1008, 1600, (Fp8Type)type);
    }
}

static void special_values(void) {
    float specials[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e30f, -1e30f, 1e-30f};
    Floats x(16 * 16);
    for (size_t i = 0; i < x.size(); i++) { x[i] = specials[i % 8]; }
    round_to_bf16(x.data(), x.data(), (int64_t)x.size());
    for (int type = 0; type < 2; type++) {
        Bf16Buffer device(x.size());
        put_floats(device, x);
        Quantised q(16, 16, (Fp8Type)type, 2.0f);
        gpu_quantize(q.out(), false, {}, device.data, NULL, 16, 16, gpu.stream);
        CHECK_EQUAL(check_codes(q.rows.get(), x, q.scale, q.type, 0), 0);
        CHECK(isnan(q.slot.get()[0].amax)); // and the update will not take it
    }
}

static void ranges(void) {
    Input x(1000 * 8, 1);
    FloatBuffer amax(1);
    float before = 0.5f;
    amax.put(&before);
    gpu_amax(amax.data, x.device.data, TYPE_BF16, 8000, gpu.stream);
    CHECK_CLOSE(amax.get()[0], tensor_amax(x.host.data(), 8000), 0.0);
    before = 1e20f;
    amax.put(&before);
    gpu_amax(amax.data, x.device.data, TYPE_BF16, 8000, gpu.stream);
    CHECK_CLOSE(amax.get()[0], before, 0.0);
}

static void activations_fp8(int M, int F, Fp8Type type) {
    if (left_out((int64_t)M * F)) { return; }
    size_t n = (size_t)M * F;
    Input x(n, 2), x2(2 * n, 2), dout(n, 1);
    FloatBuffer sums(F), scratch(partial_sums_bytes(2 * F) / sizeof(float) + n / 16);
    Floats y(n), dx(n), dx2(2 * n), expected_sums(F, 0.0f);
    Quantised q(M, F, type, 50.0f), wide(M, 2 * F, type, 20.0f);
    gpu_gelu_forward_fp8(q.out(), x.device.data, M, F, gpu.stream);
    gelu_forward(y.data(), x.host.data(), (int64_t)n);
    check_given(q, y, false);
    q.reset(0, 1);
    gpu_gelu_backward_fp8(q.out(), {sums.data, TYPE_F32, false}, dout.device.data, x.device.data,
                          scratch.data, M, F, gpu.stream);
    gelu_backward(dx.data(), dout.host.data(), x.host.data(), (int64_t)n);
    check_given(q, dx, false);
    bias_backward(expected_sums.data(), dx.data(), M, F);
    CHECK_ERROR(sums.get().data(), expected_sums.data(), F, 1e-4);
    q.reset(0, 1);
    gpu_swiglu_forward_fp8(q.out(), x2.device.data, M, F, gpu.stream);
    swiglu_forward(y.data(), x2.host.data(), M, F);
    check_given(q, y, false);
    gpu_swiglu_backward_fp8(wide.out(), dout.device.data, x2.device.data, M, F, gpu.stream);
    swiglu_backward(dx2.data(), dout.host.data(), x2.host.data(), M, F);
    check_given(wide, dx2, false);
}

static void activations(void) {
    activations_fp8(16, 16, FP8_E4M3);
    activations_fp8(144, 208, FP8_E5M2);
    activations_fp8(512, 3072, FP8_E4M3);
}

static void rope_fp8(int B, int T, int H, int G, int D) {
    int N = (H + 2 * G) * D;
    Input dqkv((size_t)B * T * N, 1);
    Floats table((size_t)T * D), expected = dqkv.host;
    FloatBuffer device_table(table.size());
    Rope angles = {10000.0};
    rope_table(table.data(), T, D, &angles);
    device_table.put(table.data());
    Quantised q(B * T, N, FP8_E5M2, 100.0f);
    gpu_rope_backward_fp8(q.out(), dqkv.device.data, device_table.data, B, T, H, G, D, gpu.stream);
    rope_apply(expected.data(), table.data(), B, T, H, G, D, true);
    check_given(q, expected, false);
    CHECK(same_bits(get_floats(dqkv.device), dqkv.host));
}

static void ropes(void) {
    rope_fp8(1, 16, 2, 1, 16);
    rope_fp8(2, 24, 4, 2, 64);
    rope_fp8(1, 80, 8, 2, 128);
}

// The loss's gradient, some rows left out.
static void loss_fp8(int M, int V, int P, Fp8Type type) {
    if (left_out((int64_t)M * P)) { return; }
    const float factor = 0.25f;
    Input logits((size_t)M * P, 2);
    std::vector<int> targets(M);
    for (int i = 0; i < M; i++) { targets[i] = i % 7 == 3 ? -1 : (i * 31 + V - 1) % V; }
    Buffer<int> device_targets(M);
    device_targets.put(targets.data());
    FloatBuffer losses(M), lse(M);
    Floats expected = logits.host, expected_losses(M);
    Quantised q(M, P, type, fp8_max(type) / factor);
    cross_entropy(expected_losses.data(), expected.data(), targets.data(), M, V, P, factor);
    gpu_cross_entropy_forward(losses.data, lse.data, logits.device.data, device_targets.data, M, V,
                              P, gpu.stream);
    CHECK_ERROR(losses.get().data(), expected_losses.data(), M, 1e-5);
    LossRows rows = {logits.device.data, lse.data, device_targets.data};
    gpu_cross_entropy_backward_fp8(q.out(), &rows, factor, M, V, P, gpu.stream);
    check_given(q, expected, false);
    CHECK(same_bits(get_floats(logits.device), logits.host));
}

static void losses(void) {
    loss_fp8(16, 16, 16, FP8_E4M3);
    loss_fp8(48, 301, 304, FP8_E5M2);
    loss_fp8(128, 5003, 5008, FP8_E5M2);
}

// The optimizer on two weights in one launch.
static void optimizer(int N, int C) {
    if (left_out((int64_t)N * C)) { return; }
    const int rows[] = {N, 48}, columns[] = {C, 272};
    int64_t first[] = {64, 64 + round_up64((int64_t)N * C, 64)}, n = first[1] + 48 * 272;
    Floats w = random_bf16(n, 1), m(n, 0.0f), v(n, 0.0f), zeros(n, 0.0f);
    Input g(n, 0.1f);
    FloatBuffer master(n), dm(n), dv(n);
    Buffer<uint8_t> decay(n / 64);
    Buffer<StepState> state(1);
    InputBuffer input(0.01, 0);
    std::vector<uint8_t> ones(n / 64, 1);
    StepState s = {.gradient_scale = 1.0f, .updates = 1};
    AdamWUpdate u = plain_update(master.data, dm.data, dv.data, g.device.data, decay.data);
    u.input = input.data;
    AdamW a = {.lr = 0.01f,
               .beta1 = 0.9f,
               .beta2 = 0.95f,
               .eps = 1e-8f,
               .weight_decay = 0.1f,
               .gradient_scale = 1.0f,
               .step = 1};
    decay.put(ones.data());
    state.put(&s);
    Floats updated = w; // the first 64 belong to nobody
    adamw_update(updated.data() + 64, m.data(), v.data(), g.host.data() + 64, n - 64, a);
    for (int measured = 0; measured < 2; measured++) {
        Quantised q[2] = {Quantised(N, C, FP8_E4M3, 90.0f), Quantised(48, 272, FP8_E4M3, 60.0f)};
        Buffer<Fp8Weight> table(2);
        Fp8Weights weights = {table.data, 2, 0};
        Fp8Weight entries[2];
        for (int k = 0; k < 2; k++) {
            q[k].reset(0.0f, measured ? 0 : 1);
            entries[k] = {q[k].out(), NULL, first[k], rows[k], columns[k], weights.tiles};
            weights.tiles += gpu_fp8_weight_tiles(rows[k], columns[k]);
        }
        table.put(entries);
        master.put(w.data());
        dm.put(zeros.data());
        dv.put(zeros.data());
        gpu_adamw_update_fp8(weights, measured, &u, state.data, gpu.stream);
        Floats result = master.get();
        CHECK_ERROR(result.data(), updated.data(), n, 1e-6);
        for (int k = 0; k < 2; k++) {
            Floats part(result.begin() + first[k],
                        result.begin() + first[k] + (size_t)rows[k] * columns[k]);
            round_to_bf16(part.data(), part.data(), (int64_t)part.size()); // codes start there
            float amax = tensor_amax(part.data(), (int64_t)part.size()), scale = q[k].scale;
            if (measured) {
                CHECK_CLOSE(q[k].live.get()[0].amax, amax, 0.0);
                scale = fp8_scale(amax, fp8_max(FP8_E4M3), 1.0f);
                if (k == 0) {
                    gpu_quantize_weights(weights, 0, true, master.data, state.data, gpu.stream);
                }
            }
            CHECK_CLOSE(q[k].slot.get()[0].amax, amax, 0.0);
            CHECK_EQUAL(check_codes(q[k].rows.get(), part, scale, q[k].type, 0), 0);
            check_transpose(q[k]);
        }
    }
}

// After a skipped step the weights are as they were, and so must their codes and scale be: nothing
// has been measured that a scale could follow from.
static void skipped_step_keeps_codes(void) {
    const int N = 16, C = 16;
    Input w(N * C, 0.02f);
    FloatBuffer master(N * C);
    Buffer<StepState> state(1);
    Buffer<Fp8Weight> table(1);
    Quantised q(N, C, FP8_E4M3, 90.0f);
    Fp8Weight row = {q.out(), NULL, 0, N, C, 0};
    Fp8Weights weights = {table.data, 1, gpu_fp8_weight_tiles(N, C)};
    StepState s = {.gradient_scale = 1.0f, .skipped = 1};
    q.reset(0.0f, 0);
    Codes before = q.rows.get();
    table.put(&row);
    state.put(&s);
    master.put(w.host.data());
    gpu_quantize_weights(weights, 0, true, master.data, state.data, gpu.stream);
    CHECK(q.rows.get() == before);
    CHECK_EQUAL(q.live.get()[0].scale, 90.0f);
}

static void optimizers(void) {
    optimizer(16, 16);
    optimizer(144, 208);
    optimizer(768, 2304);
}

int main(void) {
    if (!open_test_gpu(1 << 20)) { return 0; }
    if (gpu.capability < 90) {
        printf("  skipped: FP8 needs compute capability 9.0\n0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    RUN(casts);
    RUN(special_values);
    RUN(ranges);
    RUN(activations);
    RUN(losses);
    RUN(ropes);
    RUN(optimizers);
    RUN(skipped_step_keeps_codes);
    return test_summary();
}
