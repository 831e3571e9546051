// Attention without a library, for the shapes that cuDNN refuses. One warp computes the output or
// the dQ of a query, or the dK and dV of a key. All arithmetic is in FP32, and every sum has a
// fixed order. These kernels are slow.
#include "attention.h"
#include "device.cuh"

#include <math_constants.h>

enum { HEAD_LANES = MAX_HEAD_SIZE / WARP }; // elements of a head that a lane holds

struct Shape {
    int T, H, G, D, N; // N: how many values a row of the packed buffer has
    float scale;
    const int *starts; // NULL: a query sees all keys up to its own position

    // Returns the first key that the query in this row of the micro-batch sees, counted from the
    // beginning of its sequence.
    __device__ int first_key(int64_t row) const {
        return starts != nullptr ? starts[row] : 0;
    }
};

// Returns the address of a token's head in the packed buffer. `head` is an index among all heads of
// a row: the H query heads come first, then the G key heads, then the G value heads.
__device__ __forceinline__ const Bf16 *packed_row(const Bf16 *qkv, const Shape &s, int64_t token,
                                                  int head) {
    return qkv + token * s.N + (int64_t)head * s.D;
}

struct Head {
    float v[HEAD_LANES];
};

__device__ __forceinline__ Head load_head(const Bf16 *x, int D) {
    Head h;
    for (int i = 0; i < HEAD_LANES; i++) {
        int at = threadIdx.x % WARP + i * WARP;
        h.v[i] = at < D ? to_float(x[at]) : 0.0f;
    }
    return h;
}

__device__ __forceinline__ void store_head(Bf16 *x, const Head &h, int D) {
    for (int i = 0; i < HEAD_LANES; i++) {
        int at = threadIdx.x % WARP + i * WARP;
        if (at < D) { x[at] = to_bf16(h.v[i]); }
    }
}

__device__ __forceinline__ float dot(const Head &a, const Head &b) {
    float sum = 0.0f;
    for (int i = 0; i < HEAD_LANES; i++) { sum += a.v[i] * b.v[i]; }
    return warp_sum(sum);
}

__device__ __forceinline__ void add_scaled(Head &y, float a, const Head &x) {
    for (int i = 0; i < HEAD_LANES; i++) { y.v[i] += a * x.v[i]; }
}

// Returns the warp's number w in the grid. Warp w computes head w % heads of token w / heads.
__device__ __forceinline__ int64_t warp_of_grid() {
    return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
}

__global__ void attention_forward_kernel(Bf16 *out, float *lse, const Bf16 *qkv, int64_t tokens,
                                         Shape s) {
    int64_t warp = warp_of_grid(), token = warp / s.H;
    int h = (int)(warp % s.H), group = s.H + h / (s.H / s.G);
    if (token >= tokens) { return; }
    int t = (int)(token % s.T);
    Head q = load_head(packed_row(qkv, s, token, h), s.D), o = {};
    float max = -CUDART_INF_F, sum = 0.0f;
    for (int k = s.first_key(token); k <= t; k++) {
        int64_t other = token - t + k;
        float score = s.scale * dot(q, load_head(packed_row(qkv, s, other, group), s.D));
        float larger = fmaxf(max, score), shrink = expf(max - larger), p = expf(score - larger);
        sum = sum * shrink + p;
        for (int i = 0; i < HEAD_LANES; i++) { o.v[i] *= shrink; }
        add_scaled(o, p, load_head(packed_row(qkv, s, other, group + s.G), s.D));
        max = larger;
    }
    for (int i = 0; i < HEAD_LANES; i++) { o.v[i] /= sum; }
    store_head(out + warp * s.D, o, s.D);
    if (threadIdx.x % WARP == 0) { lse[(token / s.T * s.H + h) * s.T + t] = max + logf(sum); }
}

// Without KEYS, a warp computes dQ of a query, from the keys that the query sees. With KEYS, a warp
// computes dK and dV of a key, from the queries that see the key, in all query heads of the key's
// group. The warp loads its own query or key only once.
template <bool KEYS>
__global__ void attention_backward_kernel(Bf16 *d_qkv, const Bf16 *d_out, const Bf16 *out,
                                          const float *lse, const Bf16 *qkv, int64_t tokens,
                                          Shape s) {
    int own = KEYS ? s.G : s.H, heads = s.H / s.G;
    int64_t warp = warp_of_grid(), token = warp / own, start = token - token % s.T;
    int head = (int)(warp % own), g = KEYS ? head : head / heads;
    int h = KEYS ? g * heads : head, last_h = KEYS ? h + heads - 1 : head;
    int64_t first = token, last = token;
    if (token >= tokens) { return; }
    if (KEYS) {
        while (last + 1 < start + s.T && s.first_key(last + 1) <= token - start) { last++; }
    } else {
        first = start + s.first_key(token);
    }
    Head q, dout, key, value, d = {}, dv = {}; // d: the gradient of q, or of key
    float delta, log_sum;
    auto load_query = [&](int64_t row) {
        q = load_head(packed_row(qkv, s, row, h), s.D);
        dout = load_head(d_out + (row * s.H + h) * s.D, s.D);
        delta = dot(dout, load_head(out + (row * s.H + h) * s.D, s.D));
        log_sum = lse[(start / s.T * s.H + h) * s.T + row - start];
    };
    auto load_key = [&](int64_t row) {
        key = load_head(packed_row(qkv, s, row, s.H + g), s.D);
        value = load_head(packed_row(qkv, s, row, s.H + s.G + g), s.D);
    };
    KEYS ? load_key(token) : load_query(token);
    for (; h <= last_h; h++) {
        for (int64_t other = first; other <= last; other++) {
            KEYS ? load_query(other) : load_key(other);
            float p = expf(s.scale * dot(q, key) - log_sum);
            if (KEYS) { add_scaled(dv, p, dout); }
            add_scaled(d, p * (dot(dout, value) - delta) * s.scale, KEYS ? q : key);
        }
    }
    Bf16 *to = d_qkv + token * s.N + (int64_t)(KEYS ? s.H + g : head) * s.D;
    store_head(to, d, s.D);
    if (KEYS) { store_head(to + (int64_t)s.G * s.D, dv, s.D); }
}

static Shape shape_of(const AttentionShape &s) {
    if (s.D < 1 || s.D > MAX_HEAD_SIZE) {
        die("plain attention: heads of %d; 1 to %d", s.D, MAX_HEAD_SIZE);
    }
    if (s.G < 1 || s.H % s.G != 0) { die("plain attention: %d heads in %d groups", s.H, s.G); }
    if (s.B < 1 || s.T < 1 || (int64_t)s.B * s.T * s.H > INT_MAX / 2) {
        die("plain attention: %d x %d tokens of %d heads", s.B, s.T, s.H);
    }
    return {s.T, s.H, s.G, s.D, (s.H + 2 * s.G) * s.D, 1.0f / sqrtf((float)s.D), s.documents};
}

// Returns the number of thread blocks of 128 threads that have a warp for each head of each token.
static int blocks_of(const AttentionShape &s, int heads) {
    return divide_up((int64_t)s.B * s.T * heads * WARP, 128);
}

void attention_plain_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    gpu_family(gpu, FAMILY_ATTENTION);
    launch(attention_forward_kernel, blocks_of(s, s.H), 128, gpu->stream, out, lse, qkv,
           s.B * (int64_t)s.T, shape_of(s));
}

void attention_plain_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                              const Bf16 *out, const float *lse, const Bf16 *qkv) {
    gpu_family(gpu, FAMILY_ATTENTION);
    int64_t tokens = (int64_t)s.B * s.T;
    launch(attention_backward_kernel<false>, blocks_of(s, s.H), 128, gpu->stream, d_qkv, d_out, out,
           lse, qkv, tokens, shape_of(s));
    launch(attention_backward_kernel<true>, blocks_of(s, s.G), 128, gpu->stream, d_qkv, d_out, out,
           lse, qkv, tokens, shape_of(s));
}
