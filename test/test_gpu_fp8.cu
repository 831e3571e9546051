// Operands of products from BF16: casts, transposes, amaxes and column sums, bit for bit; and what
// launchers refuse.
#include "../kernels/attention.h"
#include "fp8_test.h"

static void cast(int M, int N, Fp8Type type) {
    if (left_out((int64_t)M * N)) { return; }
    Input x((size_t)M * N, 1);
    FloatBuffer sums(N);
    SumScratch scratch(M, N);
    Floats expected(N, 0.0f);
    Quantised q(M, N, type, 37.3f);
    auto of_x = [&](Tensor t) {
        t.bf16 = x.device.data;
        return t;
    };
    bias_backward(expected.data(), x.host.data(), M, N);
    gpu_quantize(&gpu, tensor_bf16(x.device.data), {sums.data, TYPE_F32, false}, scratch.scratch(),
                 M, N);
    CHECK_ERROR(sums.get().data(), expected.data(), N, 1e-5);
    if (!has_fp8() || M % 16 != 0 || N % 16 != 0) { return; }
    sums.poison();
    gpu_quantize(&gpu, of_x(q.tensor(SCALE_GIVEN, false)), {sums.data, TYPE_F32, false},
                 scratch.scratch(), M, N);
    check_given(q, x.host, true);
    CHECK_ERROR(sums.get().data(), expected.data(), N, 1e-5);
    Codes columns = q.fp8_t.get();
    q.fp8_t.poison();
    gpu_transpose_codes(&gpu, q.fp8_t.data, q.fp8.data, M, N);
    CHECK(q.fp8_t.get() == columns);

    q.reset(0.0f, 0);
    Tensor measured = of_x(q.tensor(SCALE_MEASURED, false));
    gpu_measure(&gpu, measured, (int64_t)M * N);
    gpu_quantize(&gpu, measured, {sums.data, TYPE_F32, true}, scratch.scratch(), M, N);
    check_measured(q, x.host);
    for (float &sum : expected) { sum *= 2; }
    CHECK_ERROR(sums.get().data(), expected.data(), N, 1e-5);
    q.reset(tensor_amax(x.host.data(), (int64_t)x.host.size()), 3); // with a history
    measured.slot = NULL;                                           // without a history
    gpu_quantize(&gpu, measured, {}, {}, M, N);
    CHECK_CLOSE(q.slot.get()[0].amax, 0.0, 0.0);
    gpu_quantize(&gpu, of_x(q.tensor(SCALE_MEASURED, false)), {}, {}, M, N);
    CHECK_EQUAL(check_codes(q.fp8.get(), x.host, q.scale, type, 0), 0);

    for (int kind = SCALES_VECTOR; kind <= SCALES_SQUARE; kind++) {
        for (int form = 1; form < 4; form++) {
            q.reset(0.0f, 0);
            sums.poison();
            Tensor some = of_x(q.blocks((Fp8Scales)kind, false));
            if (!(form & 1)) { some.fp8 = NULL; }
            if (!(form & 2)) { some.fp8_t = NULL; }
            gpu_quantize(&gpu, some, {sums.data, TYPE_F32, false}, scratch.scratch(), M, N);
            if (form == 3) { check_blocks(q, x.host, (Fp8Scales)kind, true); }
            if (!(form & 1)) { CHECK(q.fp8.get() == Codes(q.fp8.count, 0xff)); }
            if (!(form & 2)) { CHECK(q.fp8_t.get() == Codes(q.fp8.count, 0xff)); }
            for (float &sum : expected) { sum /= form == 1 && kind == SCALES_VECTOR ? 2 : 1; }
            CHECK_ERROR(sums.get().data(), expected.data(), N, 1e-5);
        }
    }
}

TEST(casts) {
    for (int type = 0; type < 2; type++) {
        cast(16, 16, (Fp8Type)type);
        cast(128, 64, (Fp8Type)type);
        cast(48, 208, (Fp8Type)type);
        cast(17, 200, (Fp8Type)type);
        cast(1008, 1600, (Fp8Type)type);
        cast(1000, 6144, (Fp8Type)type);
    }
}

// From 33,793 rows on there are more tiles of 128 rows than blocks of the kernels whose number is
// limited; the scratch is exactly what partial_sums_bytes says.
TEST(sums_over_many_rows) {
    static const int rows[] = {33792, 33808, 50000, 65552};
    for (int M : rows) {
        cast(M, 16, FP8_E4M3);
        cast(M, 80, FP8_E5M2);
    }
}

TEST(special_values) {
    float specials[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e30f, -1e30f, 1e-30f};
    Floats x(16 * 16);
    if (!has_fp8()) {
        test_skip("FP8 needs compute capability 8.9");
        return;
    }
    for (size_t i = 0; i < x.size(); i++) { x[i] = specials[i % 8]; }
    round_to_bf16(x.data(), x.data(), (int64_t)x.size());
    for (int type = 0; type < 2; type++) {
        Quantised q(16, 16, (Fp8Type)type, 2.0f);
        put_floats(q.bf16, x);
        gpu_quantize(&gpu, q.tensor(SCALE_GIVEN, false), {}, {}, 16, 16);
        CHECK_EQUAL(check_codes(q.fp8.get(), x, q.scale, q.type, 0), 0);
        CHECK(isnan(q.slot.get()[0].amax)); // the update will ignore it
        gpu_quantize(&gpu, q.blocks(SCALES_VECTOR, false), {}, {}, 16, 16);
        check_blocks(q, x, SCALES_VECTOR, true);
    }
}

TEST(amaxes) {
    Input x(1000 * 8, 1);
    Quantised q(16, 16, FP8_E4M3, 1.0f);
    Tensor measured = q.tensor(SCALE_MEASURED, false), given = q.tensor(SCALE_GIVEN, false);
    measured.bf16 = x.device.data;
    given.bf16 = NULL;
    float largest = tensor_amax(x.host.data(), 8000), before[] = {0.5f, 1e20f};
    for (float amax : before) {
        q.reset(amax, 0);
        gpu_measure(&gpu, measured, 8000);
        CHECK_CLOSE(q.live.get()[0].amax, fmaxf(amax, largest), 0.0);
        gpu_measure(&gpu, given, 8000); // does nothing
    }
}

TEST(codes_are_counted) {
    for (int type = 0; type < 2; type++) {
        for (int n : {16, 4096, 123456 * 16}) {
            Codes codes(n);
            for (int i = 0; i < n; i++) { codes[i] = (uint8_t)(rng_bits(type, i) >> 20); }
            Buffer<uint8_t> device(n);
            Buffer<Fp8Counts> counts(1);
            Fp8Counts right = {5, 6, 7, 8};
            device.put(codes.data());
            counts.put(&right);
            gpu_count_codes(&gpu, counts.data, device.data, n, (Fp8Type)type);
            for (uint8_t code : codes) { fp8_count(&right, code, (Fp8Type)type); }
            Fp8Counts found = counts.get()[0];
            CHECK(memcmp(&found, &right, sizeof(right)) == 0);
            found.zero++;
            CHECK(memcmp(&found, &right, sizeof(right)) != 0);
        }
    }
    CHECK_DIES("a multiple of 16", gpu_count_codes(&gpu, NULL, NULL, 24, FP8_E4M3));
}

// Violates each precondition of kernels.h. The pointers are never read.
TEST(refusals) {
    Bf16 *x = (Bf16 *)4096, *odd = (Bf16 *)4098;
    uint8_t *fp8 = (uint8_t *)8192, *odd_fp8 = (uint8_t *)8193;
    float *f = (float *)4096;
    const int *tokens = (const int *)4096;
    Fp8Live *live = (Fp8Live *)4096;
    Tensor plain = tensor_bf16(x),
           given = with_forms(given_tensor(FP8_E4M3, live, NULL), x, fp8, fp8);
    given.fused = given.record = false;
    Tensor fused = given, e5m2 = given, waits = given;
    fused.fused = e5m2.fused = waits.fused = true;
    e5m2.type = FP8_E5M2;
    waits.mode = SCALE_MEASURED;
    Gradient sums = {f, TYPE_F32, false};
    Scratch little = {f, 100092}, enough = {f, 1 << 30};
    NormForward norm = {f, f, x, x, NULL, 1e-5f, 64, 64};
    NormBackward back = {sums, {}, {}, x, x, x, NULL, f, enough, 64, 64};
    const LossTerms terms = {1.0f, 0.0f, 0.0f};
    CHECK_DIES("quantize: 100092 bytes of scratch; 100096 are needed",
               gpu_quantize(&gpu, given, sums, little, 50000, 64));
    CHECK_DIES("gelu backward",
               gpu_gelu_backward(&gpu, tensor_bf16(x), sums, x, x, NULL, {f, 255}, 8, 64));
    CHECK_DIES("gelu backward", gpu_gelu_backward(&gpu, fused, sums, x, x, NULL, {f, 255}, 16, 64));
    CHECK_DIES("not 16-byte aligned",
               gpu_quantize(&gpu, with_forms(given, odd, fp8, fp8), {}, {}, 64, 64));
    CHECK_DIES("not 16-byte aligned",
               gpu_quantize(&gpu, with_forms(given, x, odd_fp8, fp8), {}, {}, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_gelu_forward(&gpu, tensor_bf16(x), odd, NULL, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_gelu_forward(&gpu, tensor_bf16(x), x, odd, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_measure(&gpu, with_forms(waits, odd, fp8, fp8), 64));
    CHECK_DIES("a multiple of 8", gpu_to_bf16(&gpu, x, f, 60));
    CHECK_DIES("not 16-byte aligned", gpu_swiglu_forward(&gpu, tensor_bf16(x), odd, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_swiglu_backward(&gpu, tensor_bf16(x), odd, x, 64, 64));
    CHECK_DIES("not 16-byte aligned", gpu_embedding_forward(&gpu, x, tokens, odd, NULL, 1, 8, 64));
    CHECK_DIES("multiples of 8", gpu_gelu_forward(&gpu, tensor_bf16(x), x, NULL, 64, 60));
    CHECK_DIES("multiples of 8", gpu_embedding_forward(&gpu, x, tokens, x, NULL, 1, 8, 60));
    CHECK_DIES("multiples of 8", gpu_position_backward(&gpu, sums, x, 1, 8, 60));
    CHECK_DIES("up to 2^33 values",
               gpu_gelu_forward(&gpu, tensor_bf16(x), x, NULL, 1 << 20, 1 << 14));
    CHECK_DIES("multiples of 16", gpu_quantize(&gpu, given, {}, {}, 64, 56));
    CHECK_DIES("multiples of 16", gpu_gelu_forward(&gpu, fused, x, NULL, 56, 64));
    CHECK_DIES("multiples of 16", gpu_transpose_codes(&gpu, fp8, fp8, 16, 24));
    CHECK_DIES("without a scale",
               gpu_quantize(&gpu, with_forms(plain, x, fp8, fp8), {}, {}, 64, 64));
    CHECK_DIES("without a given scale", gpu_gelu_forward(&gpu, waits, x, NULL, 64, 64));
    CHECK_DIES("no BF16 form",
               gpu_gelu_forward(&gpu, with_forms(given, NULL, fp8, fp8), x, NULL, 64, 64));
    CHECK_DIES("E4M3", gpu_gelu_forward(&gpu, with_forms(e5m2, NULL, fp8, fp8), x, NULL, 64, 64));
    CHECK_DIES("E4M3", gpu_norm_forward(&gpu, with_forms(e5m2, NULL, fp8, fp8), norm));
    CHECK_DIES("no residual gradient",
               gpu_norm_backward(&gpu, with_forms(fused, NULL, fp8, fp8), back));
    back.rstd = NULL;
    CHECK_DIES("no statistics", gpu_norm_backward(&gpu, tensor_bf16(x), back));
    norm.C = back.C = 8200;
    CHECK_DIES("8200 channels", gpu_norm_forward(&gpu, tensor_bf16(x), norm));
    CHECK_DIES("8200 channels", gpu_norm_backward(&gpu, tensor_bf16(x), back));
    CHECK_DIES("cross-entropy",
               gpu_cross_entropy(&gpu, f, tensor_bf16(x), {}, tokens, 64, 72, 64, terms));
    CHECK_DIES("cross-entropy: 508 bytes of scratch; 512 are needed",
               gpu_cross_entropy(&gpu, f, fused, {f, 508}, tokens, 64, 60, 64, terms));
    CHECK_DIES("heads of 264", attention_plain_forward(&gpu, {1, 8, 1, 1, 264}, x, f, x));
    CHECK_DIES("groups", attention_plain_forward(&gpu, {1, 8, 3, 2, 64}, x, f, x));
}

SETUP() {
    open_test_gpu(1 << 20);
}
