// GELU and SwiGLU, forward and backward. Each pass is a source (quantize.cuh), whose values
// produce() writes as BF16 or FP8.
#include "quantize.cuh"

// Inputs: x and, with BIAS, the bias, which is added to x.
template <bool BIAS> struct Gelu : Function {
    enum { INPUTS = 1 + BIAS, ROW = 1 };
    static __device__ void apply(const Floats8 *in, Floats8 *out) {
        for (int j = 0; j < VEC; j++) {
            float x = in[0].v[j];
            if (BIAS) { x += in[INPUTS - 1].v[j]; }
            out[0].v[j] = gelu(x);
        }
    }
};

// Inputs: dout, x and, with BIAS, the bias.
template <bool BIAS> struct GeluBackward : Function {
    enum { INPUTS = 2 + BIAS, ROW = 2, GRADIENT = 1 };
    static __device__ void apply(const Floats8 *in, Floats8 *out) {
        for (int j = 0; j < VEC; j++) {
            float x = in[1].v[j];
            if (BIAS) { x += in[INPUTS - 1].v[j]; }
            out[0].v[j] = in[0].v[j] * gelu_slope(x);
        }
    }
};

// Inputs: gate and up.
struct Swiglu : Function {
    enum { INPUTS = 2, WIDE = 0 };
    static __device__ void apply(const Floats8 *in, Floats8 *out) {
        for (int j = 0; j < VEC; j++) { out[0].v[j] = swiglu(in[0].v[j], in[1].v[j]); }
    }
};

// Inputs: dout, gate and up.
struct SwigluBackward : Function {
    enum { INPUTS = 3, WIDE = 1, OUTPUTS = 2, GRADIENT = 1 };
    static __device__ void apply(const Floats8 *in, Floats8 *out) {
        for (int j = 0; j < VEC; j++) {
            float d = in[0].v[j], g = in[1].v[j], up = in[2].v[j];
            float s = sigmoid(g), silu = g * s;
            out[0].v[j] = d * up * (s + silu * (1.0f - s));
            out[1].v[j] = d * silu;
        }
    }
};

void gpu_gelu_forward(Gpu *gpu, Operand out, const Bf16 *x, const Bf16 *bias, int M, int F) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    auto run = [&](const auto &source) {
        produce<false>("gelu forward", source, out, {}, {}, M, F, gpu->stream);
    };
    bias == NULL ? run(Elementwise<Gelu<false>>(F, x)) : run(Elementwise<Gelu<true>>(F, x, bias));
}

void gpu_gelu_backward(Gpu *gpu, Operand dx, Gradient column_sums, const Bf16 *dout, const Bf16 *x,
                       const Bf16 *bias, Scratch scratch, int M, int F) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    auto run = [&](const auto &source) {
        produce<true>("gelu backward", source, dx, column_sums, scratch, M, F, gpu->stream);
    };
    bias == NULL ? run(Elementwise<GeluBackward<false>>(F, dout, x))
                 : run(Elementwise<GeluBackward<true>>(F, dout, x, bias));
}

void gpu_swiglu_forward(Gpu *gpu, Operand out, const Bf16 *x, int M, int F) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    Elementwise<Swiglu> source(F, x, x + F);
    produce<false>("swiglu forward", source, out, {}, {}, M, F, gpu->stream);
}

void gpu_swiglu_backward(Gpu *gpu, Operand dx, const Bf16 *dout, const Bf16 *x, int M, int F) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    Elementwise<SwigluBackward> source(F, dout, x, x + F);
    produce<false>("swiglu backward", source, dx, {}, {}, M, F, gpu->stream);
}
