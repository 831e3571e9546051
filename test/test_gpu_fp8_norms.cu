// The norms that write FP8, forward against cpu.c, backward against the kernels that take two
// passes.
#include "fp8_test.h"

// The norm's backward pass with FP8 output: the same d_residual and sums as without, and the codes
// that gpu_quantize makes of it. Weights are positive and dout follows x, so that with rows far
// from zero (mean_value) what a thread beyond a row computes would be far larger than what is in
// it.
static void norm_backward_fp8(int M, int C, bool layernorm, float mean_value) {
    if (left_out((int64_t)M * C) || misleads_racecheck(M, C)) { return; }
    size_t n = (size_t)M * C;
    Input x(n, 2), w(C, 1), dout(n, 1), residual(n, 1);
    for (float &value : w.host) { value = fabsf(value); }
    for (size_t i = 0; i < n; i++) {
        dout.host[i] += x.host[i];
        x.host[i] += mean_value;
    }
    put_floats(w.device, w.host);
    put_floats(dout.device, dout.host);
    put_floats(x.device, x.host);
    Floats means(M, mean_value), deviations(M, 0.7f);
    FloatBuffer mean(M), rstd(M), scratch(partial_sums_bytes(3 * C) / sizeof(float));
    mean.put(means.data());
    rstd.put(deviations.data());
    Bf16Buffer d[2] = {Bf16Buffer(n), Bf16Buffer(n)};
    FloatBuffer sums[2] = {FloatBuffer(3 * C), FloatBuffer(3 * C)};
    Quantised fused(M, C, FP8_E5M2, 60.0f), separate(M, C, FP8_E5M2, 60.0f);
    for (int k = 0; k < 2; k++) {
        put_floats(d[k], residual.host);
        NormBackward b = {d[k].data,
                          {sums[k].data, TYPE_F32, false},
                          {sums[k].data + C, TYPE_F32, false},
                          {sums[k].data + 2 * C, TYPE_F32, false},
                          dout.device.data,
                          x.device.data,
                          w.device.data,
                          layernorm ? mean.data : NULL,
                          rstd.data,
                          scratch.data,
                          NULL,
                          M,
                          C};
        if (k == 0) {
            gpu_norm_backward(b, gpu.stream);
            gpu_quantize(separate.out(), false, {}, d[k].data, NULL, M, C, gpu.stream);
        } else {
            gpu_norm_backward_fp8(fused.out(), b, gpu.stream);
        }
    }
    CHECK(same_bits(get_floats(d[0]), get_floats(d[1])));
    CHECK_ERROR(sums[1].get().data(), sums[0].get().data(), layernorm ? 3 * C : C, 1e-6);
    CHECK_ERROR(sums[1].get().data() + 2 * C, sums[0].get().data() + 2 * C, C, 1e-6);
    CHECK(fused.rows.get() == separate.rows.get());
    CHECK(fused.columns.get() == separate.columns.get());
    CHECK_EQUAL(fused.slot.get()[0].amax, separate.slot.get()[0].amax);
}

static void norms_backward(void) {
    for (int layernorm = 0; layernorm < 2; layernorm++) {
        norm_backward_fp8(16, 16, layernorm, 0.7f);
        norm_backward_fp8(48, 768, layernorm, 0.7f);
        norm_backward_fp8(1008, 1600, layernorm, 0.7f);
        norm_backward_fp8(80, 2048, layernorm, 0.7f);
        norm_backward_fp8(144, 4096, layernorm, 0.7f);
        norm_backward_fp8(32, 5120, layernorm, 0.7f);
        norm_backward_fp8(256, 768, layernorm, 0.7f);
        norm_backward_fp8(192, 1360, layernorm, 0.7f);
        norm_backward_fp8(96, 1600, layernorm, 64.0f);
    }
}

static void norm_fp8(int M, int C, bool layernorm) {
    if (left_out((int64_t)M * C) || misleads_racecheck(M, C)) { return; }
    size_t n = (size_t)M * C;
    Input x(n, 2), w(C, 1), b(C, 1);
    FloatBuffer mean(M), rstd(M);
    Floats y(n), m(M), r(M);
    Quantised q(M, C, FP8_E4M3, 60.0f), again(M, C, FP8_E4M3, 60.0f);
    const Bf16 *bias = layernorm ? b.device.data : NULL;
    NormForward f = {NULL,          mean.data, rstd.data, NULL, x.device.data,
                     w.device.data, bias,      1e-5f,     M,    C};
    gpu_norm_forward_fp8(q.out(), f, gpu.stream);
    if (layernorm) {
        layernorm_forward(y.data(), m.data(), r.data(), x.host.data(), w.host.data(), b.host.data(),
                          M, C, 1e-5f);
        CHECK_ERROR(mean.get().data(), m.data(), M, 1e-5);
    } else {
        rmsnorm_forward(y.data(), r.data(), x.host.data(), w.host.data(), M, C, 1e-5f);
    }
    CHECK_ERROR(rstd.get().data(), r.data(), M, 1e-5);
    check_given(q, y, false);
    gpu_normalize_fp8(again.out(), f, gpu.stream);
    check_given(again, y, false);
}

static void norms(void) {
    for (int layernorm = 0; layernorm < 2; layernorm++) {
        norm_fp8(16, 16, layernorm);
        norm_fp8(80, 208, layernorm);
        norm_fp8(1008, 768, layernorm);
        norm_fp8(96, 1600, layernorm);
        norm_fp8(64, 2048, layernorm);
        norm_fp8(48, 4096, layernorm);
        norm_fp8(32, 8192, layernorm);
        norm_fp8(256, 768, layernorm);
        norm_fp8(192, 1360, layernorm);
    }
}

int main(void) {
    if (!open_test_gpu(1 << 20)) { return 0; }
    if (gpu.capability < 90) {
        printf("  skipped: FP8 needs compute capability 9.0\n0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    RUN(norms);
    RUN(norms_backward);
    return test_summary();
}
