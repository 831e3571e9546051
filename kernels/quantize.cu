// Kernels that compute an operand of a linear layer, or read one, and write it in FP8.
#include "activation.cuh"
#include "quantize.cuh"

struct CastSource : PlainPlace {
    enum { ROWS = 128, OUTPUTS = 1 };
    typedef uint4 Raw;
    const Bf16 *x;
    __device__ Raw fetch(int i) const {
        return raw8(x, place(i));
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        values[0] = unpack8(raw);
    }
};

struct NormSource : PlainPlace {
    enum { ROWS = 128, OUTPUTS = 1 };
    struct Raw {
        uint4 x;
        float mean, rstd;
    };
    const Bf16 *x, *weight, *bias;
    const float *mean, *rstd; // mean NULL: RMSNorm
    Floats8 w, b;
    __device__ bool begin(int row, int vector) {
        if (vector < vectors) {
            w = load8(weight, vector);
            b = bias != nullptr ? load8(bias, vector) : Floats8{};
        }
        mean = mean != nullptr ? mean + row : nullptr;
        rstd += row;
        return PlainPlace::begin(row, vector);
    }
    __device__ Raw fetch(int i) const {
        return {raw8(x, place(i)), mean != nullptr ? mean[i] : 0.0f, rstd[i]};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 v = unpack8(raw.x);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            values[0].v[j] = (v.v[j] - raw.mean) * raw.rstd * w.v[j] + b.v[j];
        }
    }
};

struct GeluSource : PlainPlace {
    enum { ROWS = 128, OUTPUTS = 1 };
    typedef uint4 Raw;
    const Bf16 *x;
    __device__ Raw fetch(int i) const {
        return raw8(x, place(i));
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 v = unpack8(raw);
#pragma unroll
        for (int j = 0; j < VEC; j++) { values[0].v[j] = gelu(v.v[j]); }
    }
};

struct GeluBackwardSource : PlainPlace {
    enum { ROWS = 128, OUTPUTS = 1 };
    struct Raw {
        uint4 dout, x;
    };
    const Bf16 *dout, *x;
    __device__ Raw fetch(int i) const {
        return {raw8(dout, place(i)), raw8(x, place(i))};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 v = unpack8(raw.x), d = unpack8(raw.dout);
#pragma unroll
        for (int j = 0; j < VEC; j++) { values[0].v[j] = d.v[j] * gelu_slope(v.v[j]); }
    }
};

// Rows of gate and up, each `vectors` vectors.
struct GatedPlace : PlainPlace {
    int64_t gate;
    __device__ bool begin(int row, int vector) {
        gate = row * (int64_t)(2 * vectors) + vector;
        return PlainPlace::begin(row, vector);
    }
    __device__ int64_t gate_place(int i) const {
        return gate + i * 2 * vectors;
    }
};

struct SwigluSource : GatedPlace {
    enum { ROWS = 128, OUTPUTS = 1 };
    struct Raw {
        uint4 gate, up;
    };
    const Bf16 *x;
    __device__ Raw fetch(int i) const {
        return {raw8(x, gate_place(i)), raw8(x, gate_place(i) + vectors)};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 g = unpack8(raw.gate), up = unpack8(raw.up);
#pragma unroll
        for (int j = 0; j < VEC; j++) { values[0].v[j] = up.v[j] * g.v[j] * sigmoid(g.v[j]); }
    }
};

struct SwigluBackwardSource : GatedPlace {
    enum { ROWS = 128, OUTPUTS = 2 };
    struct Raw {
        uint4 dout, gate, up;
    };
    const Bf16 *dout, *x;
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

// Turns queries and keys back by their angle; values pass through. Half a head is whole vectors.
struct RopeBackwardSource : PlainPlace {
    enum { ROWS = 128, OUTPUTS = 1 };
    struct Raw {
        uint4 x, partner;
    };
    const Bf16 *x;
    const float *table;
    int T, turned_vectors, head_vectors;
    int partner;  // where a vector's other half is, in vectors; 0: not turned
    int position; // of the first row
    __device__ bool begin(int row, int vector) {
        int half = head_vectors / 2, at = vector % head_vectors;
        bool first = at < half;
        partner = vector >= turned_vectors ? 0 : (first ? half : -half);
        position = row % T;
        table += (first ? at : at - half) * VEC;
        return PlainPlace::begin(row, vector);
    }
    __device__ Raw fetch(int i) const {
        return {raw8(x, place(i)), raw8(x, place(i) + partner)};
    }
    __device__ void compute(int i, const Raw &raw, Floats8 *values) const {
        values[0] = unpack8(raw.x);
        if (partner == 0) { return; }
        int t = position + i < T ? position + i : (position + i) % T;
        const float *cosine = table + (int64_t)t * head_vectors * VEC;
        Floats8 c = load_floats8(cosine, TYPE_F32, 0), other = unpack8(raw.partner);
        Floats8 s = load_floats8(cosine + head_vectors / 2 * VEC, TYPE_F32, 0);
        float sign = partner > 0 ? 1.0f : -1.0f;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            values[0].v[j] = values[0].v[j] * c.v[j] + other.v[j] * (sign * s.v[j]);
        }
    }
};

// The cross-entropy's gradient, (softmax - onehot) * factor; 0 past the vocabulary.
struct LossSource : PlainPlace {
    enum { ROWS = 128, OUTPUTS = 1 };
    struct Raw {
        uint4 logits;
        float lse;
        int target;
    };
    LossRows rows;
    float factor;
    int V, column;
    __device__ bool begin(int row, int vector) {
        rows.lse += row;
        rows.targets += row;
        column = vector * VEC;
        return PlainPlace::begin(row, vector);
    }
    __device__ Raw fetch(int i) const {
        return {raw8(rows.logits, place(i)), rows.lse[i], rows.targets[i]};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        const float log2e = 1.4426950408889634f;
        Floats8 v = unpack8(raw.logits);
#pragma unroll
        for (int j = 0; j < VEC; j++) { v.v[j] = factor * exp2_fast((v.v[j] - raw.lse) * log2e); }
        if (column + VEC > V || (unsigned)(raw.target - column) < VEC) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                v.v[j] = column + j < V ? v.v[j] : 0.0f;
                v.v[j] -= column + j == raw.target ? factor : 0.0f;
            }
        }
        values[0] = v;
    }
};

// With column sums where they are wanted. The partial sums are one a tile of rows.
template <TileMode MODE, typename SOURCE>
static void quantize_and_sum(const SOURCE &source, const Fp8Out &out, GradientOut sums,
                             float *scratch, int M, int N, cudaStream_t stream) {
    if (sums.data == NULL) {
        quantize<MODE, false>(source, out, NULL, M, N, stream);
        return;
    }
    quantize<MODE, true>(source, out, scratch, M, N, stream);
    sum_partials({{sums}, scratch, divide_up(M, SUM_ROWS), N}, stream);
}

void gpu_quantize(Fp8Out out, bool measured, GradientOut sums, const Bf16 *x, float *scratch, int M,
                  int N, cudaStream_t stream) {
    CastSource source;
    source.x = x;
    source.vectors = N / VEC;
    if (measured) {
        quantize_and_sum<TILE_MEASURED>(source, out, sums, scratch, M, N, stream);
    } else {
        quantize_and_sum<TILE_GIVEN>(source, out, sums, scratch, M, N, stream);
    }
}

void gpu_normalize_fp8(Fp8Out out, NormForward n, cudaStream_t stream) {
    NormSource source;
    source.x = n.x;
    source.weight = n.weight;
    source.bias = n.bias;
    source.mean = n.bias != NULL ? n.mean : NULL;
    source.rstd = n.rstd;
    source.vectors = n.C / VEC;
    quantize<TILE_GIVEN, false>(source, out, NULL, n.M, n.C, stream);
}

void gpu_gelu_forward_fp8(Fp8Out out, const Bf16 *x, int M, int F, cudaStream_t stream) {
    GeluSource source;
    source.x = x;
    source.vectors = F / VEC;
    quantize<TILE_GIVEN, false>(source, out, NULL, M, F, stream);
}

void gpu_gelu_backward_fp8(Fp8Out out, GradientOut sums, const Bf16 *dout, const Bf16 *x,
                           float *scratch, int M, int F, cudaStream_t stream) {
    GeluBackwardSource source;
    source.dout = dout;
    source.x = x;
    source.vectors = F / VEC;
    quantize_and_sum<TILE_GIVEN>(source, out, sums, scratch, M, F, stream);
}

void gpu_swiglu_forward_fp8(Fp8Out out, const Bf16 *x, int M, int F, cudaStream_t stream) {
    SwigluSource source;
    source.x = x;
    source.vectors = F / VEC;
    quantize<TILE_GIVEN, false>(source, out, NULL, M, F, stream);
}

void gpu_swiglu_backward_fp8(Fp8Out out, const Bf16 *dout, const Bf16 *x, int M, int F,
                             cudaStream_t stream) {
    SwigluBackwardSource source;
    source.dout = dout;
    source.x = x;
    source.vectors = F / VEC;
    quantize<TILE_GIVEN, false>(source, out, NULL, M, F, stream);
}

void gpu_rope_backward_fp8(Fp8Out out, const Bf16 *d_qkv, const float *table, int B, int T, int H,
                           int G, int D, cudaStream_t stream) {
    RopeBackwardSource source;
    source.x = d_qkv;
    source.table = table;
    source.vectors = (H + 2 * G) * D / VEC;
    source.T = T;
    source.turned_vectors = (H + G) * D / VEC;
    source.head_vectors = D / VEC;
    quantize<TILE_GIVEN, false>(source, out, NULL, B * T, (H + 2 * G) * D, stream);
}

void gpu_cross_entropy_backward_fp8(Fp8Out out, const LossRows *rows, float gradient_scale, int M,
                                    int V, int P, cudaStream_t stream) {
    LossSource source;
    source.rows = *rows;
    source.factor = gradient_scale;
    source.V = V;
    source.vectors = P / VEC;
    quantize<TILE_GIVEN, false>(source, out, NULL, M, P, stream);
}
