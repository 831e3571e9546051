// The rotary embedding: queries and keys are rotated in place, their gradient is rotated back, in
// place or on its way to FP8. The angles are a table [T,D] (rope.h).
#include "quantize.cuh"

// One of a rotated pair: x cos + partner sin, where the first of a pair takes -sin.
__device__ __forceinline__ float rotated(float x, float partner, float cosine, float sine) {
    return fmaf(x, cosine, partner * sine);
}

// A thread rotates WIDTH elements of a head's first half together with their partners in the
// second: 8, or one where half a head is not whole vectors.
template <int WIDTH>
__global__ void rope_kernel(Bf16 *qkv, const float *table, int64_t count, int T, int heads, int row,
                            int D, float direction) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) { return; }
    int half = D / 2, per_head = half / WIDTH;
    int at = (int)(i % per_head) * WIDTH, head = (int)(i / per_head % heads);
    int64_t token = i / per_head / heads;
    Bf16 *x = qkv + token * row + head * D + at, *y = x + half;
    const float *cosine = table + token % T * D + at, *sine = cosine + half;
    if (WIDTH == 1) {
        float a = to_float(*x), b = to_float(*y), c = *cosine, s = direction * *sine;
        *x = to_bf16(rotated(a, b, c, -s));
        *y = to_bf16(rotated(b, a, c, s));
        return;
    }
    Floats8 a = load8(x, 0), b = load8(y, 0);
    Floats8 c = load_floats8(cosine, TYPE_F32, 0), s = load_floats8(sine, TYPE_F32, 0);
    for (int j = 0; j < VEC; j++) {
        float first = rotated(a.v[j], b.v[j], c.v[j], -direction * s.v[j]);
        b.v[j] = rotated(b.v[j], a.v[j], c.v[j], direction * s.v[j]);
        a.v[j] = first;
    }
    store8(x, 0, a);
    store8(y, 0, b);
}

static bool halves_are_vectors(int D) {
    return D % (2 * VEC) == 0;
}

static void rotate(Bf16 *qkv, const float *table, int B, int T, int H, int G, int D,
                   float direction, cudaStream_t stream) {
    int width = halves_are_vectors(D) ? VEC : 1, heads = H + G;
    int64_t count = (int64_t)B * T * heads * (D / 2 / width);
    auto kernel = width == VEC ? rope_kernel<VEC> : rope_kernel<1>;
    kernel<<<divide_up(count, 256), 256, 0, stream>>>(qkv, table, count, T, heads, (H + 2 * G) * D,
                                                      D, direction);
    LAUNCH_CHECK();
}

static void check_rope(const char *name, const Bf16 *qkv, const float *table, int64_t B, int64_t T,
                       int64_t H, int64_t G, int64_t D) {
    if (B < 1 || T < 1 || H < 1 || G < 1 || D < 2 || D % 2 != 0 ||
        B * T * (H + 2 * G) * (D / 2) > INT_MAX) {
        die("%s: %lld x %lld tokens, %lld + %lld heads of %lld; the head size must be even", name,
            (long long)B, (long long)T, (long long)H, (long long)G, (long long)D);
    }
    if (qkv == NULL) { die("%s: no BF16 form", name); }
    check_aligned(name, {qkv, table});
}

void gpu_rope_forward(Bf16 *qkv, const float *table, int B, int T, int H, int G, int D,
                      cudaStream_t stream) {
    check_rope("rope forward", qkv, table, B, T, H, G, D);
    rotate(qkv, table, B, T, H, G, D, 1.0f, stream);
}

// Rotates queries and keys back; values pass through. Half a head is whole vectors.
struct RopeBackwardSource : Place {
    enum { GRADIENT = 1 };
    struct Raw {
        uint4 x, partner;
    };
    const Bf16 *x;
    const float *table;
    int T, rotated_vectors, head_vectors;
    int partner;  // where a vector's other half is, in vectors; 0: not rotated
    int position; // of the first row
    __device__ void begin(int row, int vector) {
        int half = head_vectors / 2, at = vector % head_vectors;
        bool first = at < half;
        partner = vector >= rotated_vectors ? 0 : (first ? half : -half);
        position = row % T;
        table += (first ? at : at - half) * VEC;
        Place::begin(row, vector);
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
        for (int j = 0; j < VEC; j++) {
            values[0].v[j] = rotated(values[0].v[j], other.v[j], c.v[j], sign * s.v[j]);
        }
    }
};

void gpu_rope_backward(Operand d_qkv, Fp8Tensor q, const float *table, int B, int T, int H, int G,
                       int D, cudaStream_t stream) {
    const char *name = "rope backward";
    int M = B * T, N = (H + 2 * G) * D;
    check_rope(name, d_qkv.bf16, table, B, T, H, G, D);
    bool codes = d_qkv.fp8 != NULL || d_qkv.fp8_t != NULL;
    if (codes) { check_operand(name, d_qkv, q, M, N); }
    if (q.fused && halves_are_vectors(D)) {
        RopeBackwardSource source = {{N / VEC}, d_qkv.bf16, table, T, (H + G) * D / VEC, D / VEC};
        quantize<false>(name, source, d_qkv, q, {}, {}, M, N, stream);
        return;
    }
    rotate(d_qkv.bf16, table, B, T, H, G, D, -1.0f, stream);
    if (codes) {
        gpu_measure(q, d_qkv.bf16, (int64_t)M * N, stream);
        gpu_quantize(d_qkv, q, {}, {}, M, N, stream);
    }
}
