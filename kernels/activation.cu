// GELU and SwiGLU, forward and backward: a source of values each (quantize.cuh), whether they
// become BF16 or FP8.
#include "quantize.cuh"

// gelu(x) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). GELU_1 x + GELU_3 x^3 is 2u / log 2.
#define GELU_1 2.302208198f
#define GELU_3 0.1029432397f

struct GeluSource : PlainPlace {
    typedef uint4 Raw;
    const Bf16 *x;
    GeluSource(const Bf16 *input, int F) : PlainPlace{F / VEC}, x(input) {
    }
    __device__ Raw fetch(int i) const {
        return raw8(x, place(i));
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 v = unpack8(raw);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float x = v.v[j];
            values[0].v[j] = x * sigmoid2(x * (GELU_1 + GELU_3 * (x * x)));
        }
    }
};

struct GeluBackwardSource : PlainPlace {
    enum { GRADIENT = 1 };
    struct Raw {
        uint4 dout, x;
    };
    const Bf16 *dout, *x;
    GeluBackwardSource(const Bf16 *gradient, const Bf16 *input, int F)
        : PlainPlace{F / VEC}, dout(gradient), x(input) {
    }
    __device__ Raw fetch(int i) const {
        return {raw8(dout, place(i)), raw8(x, place(i))};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        const float log2 = 0.6931471806f;
        Floats8 v = unpack8(raw.x), d = unpack8(raw.dout);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float x = v.v[j], square = x * x;
            float s = sigmoid2(x * (GELU_1 + GELU_3 * square));
            float slope_of_2u = log2 * GELU_1 + (3.0f * log2 * GELU_3) * square;
            values[0].v[j] = d.v[j] * (s + (s - s * s) * (x * slope_of_2u));
        }
    }
};

// Rows of gate and up, each `vectors` vectors.
struct GatedPlace : PlainPlace {
    int64_t gate;
    __device__ void begin(int row, int vector) {
        gate = row * (int64_t)(2 * vectors) + vector;
        PlainPlace::begin(row, vector);
    }
    __device__ void begin_at(int64_t i) {
        gate = i / vectors * 2 * vectors + i % vectors;
        PlainPlace::begin_at(i);
    }
    __device__ int64_t gate_place(int i) const {
        return gate + i * 2 * vectors;
    }
};

// FP8: the product's order in that form. The two orders differ in the last bit.
template <bool FP8> struct SwigluSource : GatedPlace {
    struct Raw {
        uint4 gate, up;
    };
    const Bf16 *x;
    SwigluSource(const Bf16 *input, int F) : GatedPlace{F / VEC}, x(input) {
    }
    __device__ Raw fetch(int i) const {
        return {raw8(x, gate_place(i)), raw8(x, gate_place(i) + vectors)};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 g = unpack8(raw.gate), up = unpack8(raw.up);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            values[0].v[j] = FP8 ? up.v[j] * g.v[j] * sigmoid(g.v[j])
                                 : up.v[j] * (g.v[j] * sigmoid(g.v[j]));
        }
    }
};

struct SwigluBackwardSource : GatedPlace {
    enum { OUTPUTS = 2, GRADIENT = 1 };
    struct Raw {
        uint4 dout, gate, up;
    };
    const Bf16 *dout, *x;
    SwigluBackwardSource(const Bf16 *gradient, const Bf16 *input, int F)
        : GatedPlace{F / VEC}, dout(gradient), x(input) {
    }
    __device__ Raw fetch(int i) const {
        return {raw8(dout, place(i)), raw8(x, gate_place(i)), raw8(x, gate_place(i) + vectors)};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 g = unpack8(raw.gate), up = unpack8(raw.up), d = unpack8(raw.dout);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float s = sigmoid(g.v[j]), silu = g.v[j] * s;
            values[0].v[j] = d.v[j] * up.v[j] * (s + silu * (1.0f - s));
            values[1].v[j] = d.v[j] * silu;
        }
    }
};

void gpu_gelu_forward(Operand out, Fp8Tensor q, const Bf16 *x, int M, int F, cudaStream_t stream) {
    const char *name = "gelu forward";
    GeluSource source(x, F);
    check_operand(name, out, q, M, F);
    check_aligned(name, {x});
    if (q.fused) {
        quantize<false>(name, source, out, q, {}, {}, M, F, stream);
    } else {
        produce(source, out, q, M, F, stream);
    }
}

void gpu_gelu_backward(Operand dx, Fp8Tensor q, Gradient column_sums, const Bf16 *dout,
                       const Bf16 *x, Scratch scratch, int M, int F, cudaStream_t stream) {
    const char *name = "gelu backward";
    GeluBackwardSource source(dout, x, F);
    check_operand(name, dx, q, M, F);
    check_aligned(name, {dout, x});
    if (q.fused) {
        quantize<true>(name, source, dx, q, column_sums, scratch, M, F, stream);
    } else {
        sum_columns<true>(name, source, dx.bf16, measured_amax(q), column_sums, scratch, M, F,
                          stream);
        gpu_quantize(dx, q, {}, scratch, M, F, stream);
    }
}

void gpu_swiglu_forward(Operand out, Fp8Tensor q, const Bf16 *x, int M, int F,
                        cudaStream_t stream) {
    const char *name = "swiglu forward";
    check_operand(name, out, q, M, F);
    check_aligned(name, {x});
    if (q.fused) {
        quantize<false>(name, SwigluSource<true>(x, F), out, q, {}, {}, M, F, stream);
    } else {
        produce(SwigluSource<false>(x, F), out, q, M, F, stream);
    }
}

void gpu_swiglu_backward(Operand dx, Fp8Tensor q, const Bf16 *dout, const Bf16 *x, int M, int F,
                         cudaStream_t stream) {
    const char *name = "swiglu backward";
    SwigluBackwardSource source(dout, x, F);
    check_operand(name, dx, q, M, 2 * F);
    check_aligned(name, {dout, x});
    if (q.fused) {
        quantize<false>(name, source, dx, q, {}, {}, M, F, stream);
    } else {
        produce(source, dx, q, M, F, stream);
    }
}
