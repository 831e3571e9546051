// What the benchmarks of kernels share: inputs made on the device alone, and the line that says how
// long a call took beside its floor, the bytes that must move over 4.3 TB/s or the operations over
// 800 TFLOP/s in BF16.
#pragma once

#include "fp8_test.h"

#include <string>

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
            gpu_send(&gpu, device.data + at, codes.data(), count * sizeof(Bf16));
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
    Fp8Tensor q = {FP8_E4M3, SCALE_GIVEN, true, true, 448.0f, live.data, slot.data, NULL};
    FloatBuffer scales(2 * wide / 32);
    Operand forms = {out.data, codes.data, codes.data + 2 * wide, scales.data,
                     scales.data + wide / 32};
    if (blocks) {
        q = {FP8_E4M3, SCALE_BLOCKS, true, false, 448.0f, NULL, NULL, NULL};
        q.scales = SCALES_VECTOR;
        q.power_of_two = true;
    }
    if (!fp8) {
        q = {};
        forms.fp8 = forms.fp8_t = NULL;
    }
    Gradient column_sums = {sums.data, TYPE_F32, false};
    const Bf16 *bias = fp8 ? b.device.data : NULL; // where GELU adds it (train/gpu/network.h)
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
    char shape[64], name[64];
    auto named = [&](const char *kind) {
        snprintf(name, sizeof(name), "%s%s", blocks ? "fp8 blocks " : fp8 ? "fp8 " : "", kind);
        return name;
    };
    const char *norm = fp8 ? "norm" : gpt2 ? "layernorm" : "rmsnorm";
    snprintf(shape, sizeof(shape), "%d x %d", M, C);
    bench(named((std::string(norm) + " forward").c_str()), shape, bytes(2.0 * n),
          [&] { gpu_norm_forward(forms, q, forward, gpu.stream); });
    bench(named((std::string(norm) + " backward").c_str()), shape, bytes((fp8 ? 5.0 : 4.0) * n),
          [&] { gpu_norm_backward(forms, q, backward, gpu.stream); });
    if (fp8) {
        Operand cast = forms;
        cast.bf16 = x.device.data;
        bench(named("cast"), shape, bytes(2.0 * n),
              [&] { gpu_quantize(cast, q, {}, {}, M, C, gpu.stream); });
        bench(named("cast and sums"), shape, bytes(2.0 * n),
              [&] { gpu_quantize(cast, q, column_sums, scratch.scratch(), M, C, gpu.stream); });
    }
    snprintf(shape, sizeof(shape), "%d x %d", M, F);
    if (!gpt2) {
        bench(named("swiglu forward"), shape, bytes(3.0 * wide),
              [&] { gpu_swiglu_forward(forms, q, pre.device.data, M, F, gpu.stream); });
        bench(named("swiglu backward"), shape, bytes(5.0 * wide), [&] {
            gpu_swiglu_backward(forms, q, dact.device.data, pre.device.data, M, F, gpu.stream);
        });
        return;
    }
    bench(named("gelu forward"), shape, bytes(2.0 * wide),
          [&] { gpu_gelu_forward(forms, q, pre.device.data, bias, M, F, gpu.stream); });
    bench(named("gelu backward"), shape, bytes(3.0 * wide), [&] {
        gpu_gelu_backward(forms, q, column_sums, dact.device.data, pre.device.data, bias,
                          scratch.scratch(), M, F, gpu.stream);
    });
    if (!fp8) {
        bench("column sums", shape, bytes(1.0 * wide), [&] {
            gpu_quantize({dact.device.data, NULL, NULL}, {}, column_sums, scratch.scratch(), M, F,
                         gpu.stream);
        });
    }
}

// AdamW's step on n weights, BF16 or FP8.
static void bench_adamw(const char *name, const char *shape, int64_t n, GpuType moments, bool fp8) {
    FloatBuffer w(n), m(n), v(n);
    Bf16Buffer g(n), weights(fp8 ? 8 : n);
    Buffer<uint8_t> codes(fp8 ? n : 16);
    Buffer<StepState> state(1);
    InputBuffer input(1e-3, 0);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    Buffer<Fp8Tensor> tensors(1);
    Buffer<AdamWSegment> segments(1);
    Fp8Live l = {1, 1, 0, 0};
    Fp8Slot s = {1, 1, 0, 1};
    StepState step = {.gradient_scale = 1.0f, .updates = 1};
    Fp8Tensor tensor = {FP8_E4M3, SCALE_GIVEN, false, true, 448.0f, live.data, slot.data, NULL};
    AdamWSegment segment = {.n = n, .bf16 = weights.data, .weight_decay = 0.1f};
    if (fp8) {
        segment.bf16 = NULL;
        segment.fp8 = codes.data;
    }
    live.put(&l);
    slot.put(&s);
    state.put(&step);
    tensors.put(&tensor);
    segments.put(&segment);
    AdamWUpdate u = plain_update(w.data, m.data, v.data, g.data);
    u.moment_type = moments;
    u.segments = segments.data;
    u.segment_count = 1;
    u.segment_blocks = gpu_adamw_blocks(n);
    u.tensors = tensors.data;
    u.input = input.data;
    double moved = (moments == TYPE_BF16 ? 18.0 : 26.0) + (fp8 ? 1.0 : 2.0);
    bench(name, shape, moved * n / BYTES_PER_S,
          [&] { gpu_adamw(&u, SCALE_GIVEN, state.data, gpu.stream); });
}
