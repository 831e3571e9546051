// RoPE and QK norm, forward and backward. The forward kernel normalises each head of the queries
// and keys by RMSNorm, if the model has QK norm, and rotates the head by its position, in one pass.
// The cosines and sines of the angles are in a table [T,D] (rope.h).
#include "quantize.cuh"

enum { ROPE_THREADS = 256 };

// Loads WIDTH elements of an array; WIDTH is 8 or 1.
template <int WIDTH> __device__ __forceinline__ Floats8 load_some(const Bf16 *x) {
    return WIDTH == VEC ? load8(x, 0) : Floats8{{to_float(*x)}};
}

template <int WIDTH> __device__ __forceinline__ Floats8 load_some(const float *x) {
    return WIDTH == VEC ? load_floats8(x, TYPE_F32, 0) : Floats8{{*x}};
}

template <int WIDTH> __device__ __forceinline__ void store_some(Bf16 *to, const Floats8 &from) {
    if (WIDTH == VEC) { store8(to, 0, from); }
    if (WIDTH == 1) { *to = to_bf16(from.v[0]); }
}

template <int WIDTH> __device__ __forceinline__ Pairs load_pairs(const Bf16 *x, int half) {
    return {load_some<WIDTH>(x), load_some<WIDTH>(x + half)};
}

template <int WIDTH>
__device__ __forceinline__ void store_pairs(Bf16 *x, int half, const Pairs &p) {
    store_some<WIDTH>(x, p.a);
    store_some<WIDTH>(x + half, p.b);
}

// `cosine` has the cosines of the pairs' angles; the sines lie half a head further.
template <int WIDTH>
__device__ __forceinline__ void turn(Pairs &p, const float *cosine, int half, float direction) {
    turn<WIDTH>(p, load_some<WIDTH>(cosine), load_some<WIDTH>(cosine + half), direction);
}

// `lanes` threads share a head. Each takes WIDTH pairs of the head at a time; WIDTH is 8, or 1 if
// half a head is not a multiple of 8. For one normalised head, a thread takes pairs at most
// norm_turns() times.
template <int WIDTH> __host__ __device__ constexpr int norm_turns() {
    return WIDTH == VEC ? 1 : MAX_HEAD_SIZE / 2 / WARP;
}

// Returns the sum of x over the `lanes` threads that share a head, in each of these threads. lanes
// is a power of two; mask has the bits of these threads.
__device__ __forceinline__ float head_sum(float x, int lanes, unsigned mask) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) { x += __shfl_xor_sync(mask, x, offset); }
    return x;
}

__device__ __forceinline__ unsigned head_mask(int lanes) {
    unsigned all = lanes == WARP ? ~0u : (1u << lanes) - 1;
    return all << (threadIdx.x % WARP / lanes * lanes);
}

// Rotates the queries and keys, which are the first H + G heads of a row. With NORM, it first
// normalises them. The kernel visits the first `heads` heads of a row, and copies those that are
// neither queries nor keys.
template <int WIDTH, bool NORM>
__global__ void __launch_bounds__(ROPE_THREADS, NORM ? 4 : SM_THREADS / ROPE_THREADS)
    rope_kernel(Bf16 *out, const Bf16 *qkv, Rotary r, unsigned heads, unsigned lanes,
                float direction) {
    enum { TURNS = NORM ? norm_turns<WIDTH>() : 1 };
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, row = i / lanes;
    const unsigned token = row / heads, head = row % heads, lane = i % lanes, half = r.D / 2;
    const unsigned at = (token * (r.H + 2 * r.G) + head) * r.D;
    if (token >= (unsigned)r.B * r.T) { return; } // all threads of a head return together
    Pairs p[TURNS];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        unsigned element = (lane + k * lanes) * WIDTH;
        if (NORM && element >= half) { continue; }
        p[k] = load_pairs<WIDTH>(qkv + at + element, half);
        for (int j = 0; j < WIDTH && NORM; j++) {
            squares = fmaf(p[k].a.v[j], p[k].a.v[j], fmaf(p[k].b.v[j], p[k].b.v[j], squares));
        }
    }
    float rstd = 1.0f;
    if (NORM) {
        squares = head_sum(squares, lanes, head_mask(lanes));
        rstd = rsqrtf(fmaf(squares, 1.0f / (float)r.D, r.eps));
    }
    const Bf16 *weight = head < (unsigned)r.H ? r.query_weight : r.key_weight;
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        unsigned element = (lane + k * lanes) * WIDTH;
        if (NORM && element >= half) { continue; }
        if (!NORM || head < (unsigned)(r.H + r.G)) {
            if (NORM) {
                Pairs w = load_pairs<WIDTH>(weight + element, half);
                for (int j = 0; j < WIDTH; j++) {
                    p[k].a.v[j] *= rstd * w.a.v[j];
                    p[k].b.v[j] *= rstd * w.b.v[j];
                }
            }
            turn<WIDTH>(p[k], r.table + token % (unsigned)r.T * r.D + element, half, direction);
        }
        store_pairs<WIDTH>(out + at + element, half, p[k]);
    }
}

static bool halves_are_vectors(int D) {
    return D % (2 * VEC) == 0;
}

// Returns the number of threads that share a normalised head.
static int norm_lanes(int D) {
    int pairs = D / 2 / (halves_are_vectors(D) ? VEC : 1), lanes = 1;
    while (lanes < pairs && lanes < WARP) { lanes *= 2; }
    return lanes;
}

static void rotate(Bf16 *out, const Bf16 *qkv, const Rotary &r, float direction,
                   cudaStream_t stream) {
    bool vectors = halves_are_vectors(r.D), norm = r.query_weight != NULL;
    int heads = r.H + (out != qkv ? 2 : 1) * r.G;
    int lanes = norm ? norm_lanes(r.D) : r.D / 2 / (vectors ? VEC : 1);
    int64_t count = (int64_t)r.B * r.T * heads * lanes;
    if (count > INT_MAX) { die("rope: %lld threads, more than 2^31", (long long)count); }
    auto kernel = vectors ? (norm ? rope_kernel<VEC, true> : rope_kernel<VEC, false>)
                          : (norm ? rope_kernel<1, true> : rope_kernel<1, false>);
    launch(kernel, divide_up(count, ROPE_THREADS), ROPE_THREADS, stream, out, qkv, r, heads, lanes,
           direction);
}

static void check_rope(const char *name, const Rotary &r, std::initializer_list<const void *> all) {
    int64_t B = r.B, T = r.T, H = r.H, G = r.G, D = r.D;
    bool norm = r.query_weight != NULL;
    if (B < 1 || T < 1 || H < 1 || G < 1 || D < 2 || D % 2 != 0 ||
        !gpu_rotary_fits(B * T, (H + 2 * G) * D)) {
        die("%s: %lld x %lld tokens, %lld + %lld heads of %lld; the head size must be even", name,
            (long long)B, (long long)T, (long long)H, (long long)G, (long long)D);
    }
    if (norm && D > MAX_HEAD_SIZE) {
        die("%s: heads of %lld; heads of up to %d can be normalised", name, (long long)D,
            MAX_HEAD_SIZE);
    }
    for (const void *pointer : all) {
        if (pointer == NULL) { die("%s: no BF16 form", name); }
    }
    check_aligned(name, all);
    check_aligned(name, {r.table, r.query_weight, r.key_weight});
}

void gpu_rope_forward(Gpu *gpu, Bf16 *out, const Bf16 *qkv, Rotary r) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    check_rope("rope forward", r, {out, qkv});
    rotate(out, qkv, r, 1.0f, gpu->stream);
}

// ---- backward -----------------------------------------------------------------------------------

// Replaces the gradient of normalised and rotated queries (blockIdx.y 0) or keys (1) by the
// gradient of the queries or keys before the norm. Each thread block writes its partial sums of the
// weights' gradients: partials[gridDim.y][gridDim.x][D].
template <int WIDTH>
__global__ void __launch_bounds__(ROPE_THREADS, 2)
    rope_norm_backward_kernel(Bf16 *d_qkv, const Bf16 *qkv, Rotary r, unsigned lanes,
                              float *partials) {
    enum { TURNS = norm_turns<WIDTH>() };
    extern __shared__ float shared[]; // [groups][D]
    bool keys = blockIdx.y == 1;
    const unsigned heads = keys ? r.G : r.H, first = keys ? r.H : 0, half = r.D / 2;
    const unsigned lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
    const unsigned groups = blockDim.x / lanes, rows = (unsigned)(r.B * r.T) * heads;
    const Bf16 *weight = keys ? r.key_weight : r.query_weight;
    unsigned mask = head_mask(lanes);
    float inverse = 1.0f / (float)r.D;
    Pairs w[TURNS], sums[TURNS] = {};
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        unsigned element = (lane + k * lanes) * WIDTH;
        w[k] = {};
        if (element < half) { w[k] = load_pairs<WIDTH>(weight + element, half); }
    }
    for (unsigned row = blockIdx.x * groups + group; row < rows; row += gridDim.x * groups) {
        unsigned token = row / heads, head = first + row % heads;
        unsigned at = (token * (r.H + 2 * r.G) + head) * r.D;
        Pairs x[TURNS], d[TURNS];
        float squares = 0.0f, projected = 0.0f; // sums of x^2 and of x * gradient * weight
#pragma unroll
        for (int k = 0; k < TURNS; k++) {
            unsigned element = (lane + k * lanes) * WIDTH;
            if (element >= half) { continue; }
            x[k] = load_pairs<WIDTH>(qkv + at + element, half);
            d[k] = load_pairs<WIDTH>(d_qkv + at + element, half);
            turn<WIDTH>(d[k], r.table + token % (unsigned)r.T * r.D + element, half, -1.0f);
            for (int j = 0; j < WIDTH; j++) {
                float a = x[k].a.v[j], b = x[k].b.v[j];
                squares = fmaf(a, a, fmaf(b, b, squares));
                projected = fmaf(a * w[k].a.v[j], d[k].a.v[j], projected);
                projected = fmaf(b * w[k].b.v[j], d[k].b.v[j], projected);
            }
        }
        float rstd = rsqrtf(fmaf(head_sum(squares, lanes, mask), inverse, r.eps));
        float along = -head_sum(projected, lanes, mask) * inverse * rstd * rstd;
#pragma unroll
        for (int k = 0; k < TURNS; k++) {
            unsigned element = (lane + k * lanes) * WIDTH;
            if (element >= half) { continue; }
            for (int j = 0; j < WIDTH; j++) {
                sums[k].a.v[j] = fmaf(d[k].a.v[j], x[k].a.v[j] * rstd, sums[k].a.v[j]);
                sums[k].b.v[j] = fmaf(d[k].b.v[j], x[k].b.v[j] * rstd, sums[k].b.v[j]);
                d[k].a.v[j] = rstd * fmaf(x[k].a.v[j], along, d[k].a.v[j] * w[k].a.v[j]);
                d[k].b.v[j] = rstd * fmaf(x[k].b.v[j], along, d[k].b.v[j] * w[k].b.v[j]);
            }
            store_pairs<WIDTH>(d_qkv + at + element, half, d[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        unsigned element = (lane + k * lanes) * WIDTH;
        for (int j = 0; j < WIDTH && element < half; j++) {
            shared[group * r.D + element + j] = sums[k].a.v[j];
            shared[group * r.D + element + j + half] = sums[k].b.v[j];
        }
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < (unsigned)r.D; i += blockDim.x) {
        float total = shared[i];
        for (unsigned g = 1; g < groups; g++) { total += shared[g * r.D + i]; }
        partials[(blockIdx.y * gridDim.x + blockIdx.x) * r.D + i] = total;
    }
}

static void rotate_and_norm_backward(Bf16 *d_qkv, const RotaryBackward &b, cudaStream_t stream) {
    const Rotary &r = b.rotary;
    int lanes = norm_lanes(r.D),
        blocks = min((int)PARTIALS, divide_up((int64_t)r.B * r.T, ROW_LANES));
    size_t shared = (size_t)(ROPE_THREADS / lanes) * r.D * sizeof(float);
    auto kernel = halves_are_vectors(r.D) ? rope_norm_backward_kernel<VEC>
                                          : rope_norm_backward_kernel<1>;
    check_scratch("rope backward", b.scratch, (int64_t)2 * blocks * r.D);
    launch_with_shared(kernel, dim3(blocks, 2), ROPE_THREADS, shared, stream, d_qkv, b.qkv, r,
                       lanes, b.scratch.data);
    sum_partials({{b.dquery_weight, b.dkey_weight}, b.scratch.data, blocks, r.D}, stream);
}

// A source (quantize.cuh) that rotates the gradients of queries and keys back, and copies those of
// values. Half a head is a multiple of 8.
struct RopeBackwardSource : Position {
    enum { GRADIENT = 1 };
    struct Raw {
        uint4 x, partner;
    };
    const Bf16 *x;
    const float *table;
    int T, rotated_vectors, head_vectors;
    // distance, in vectors, to the vector of partners; 0 in V, which is not rotated
    int partner;
    int first_position;
    __device__ void begin(int row, int vector) {
        int half = head_vectors / 2, at = vector % head_vectors;
        bool first = at < half;
        partner = vector >= rotated_vectors ? 0 : (first ? half : -half);
        first_position = row % T;
        table += (first ? at : at - half) * VEC;
        Position::begin(row, vector);
    }
    __device__ Raw fetch(int i) const {
        return {raw8(x, index(i)), raw8(x, index(i) + partner)};
    }
    __device__ void compute(int i, const Raw &raw, Floats8 *values) const {
        values[0] = unpack8(raw.x);
        if (partner == 0) { return; }
        int t = first_position + i < T ? first_position + i : (first_position + i) % T;
        const float *cosine = table + (int64_t)t * head_vectors * VEC;
        Floats8 c = load_floats8(cosine, TYPE_F32, 0), other = unpack8(raw.partner);
        Floats8 s = load_floats8(cosine + head_vectors / 2 * VEC, TYPE_F32, 0);
        float sign = partner > 0 ? 1.0f : -1.0f;
        for (int j = 0; j < VEC; j++) {
            values[0].v[j] = rotated(values[0].v[j], other.v[j], c.v[j], sign * s.v[j]);
        }
    }
};

void gpu_rope_backward(Gpu *gpu, Operand d_qkv, RotaryBackward b) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    const char *name = "rope backward";
    const Rotary &r = b.rotary;
    int M = r.B * r.T, N = (r.H + 2 * r.G) * r.D;
    bool norm = r.query_weight != NULL;
    check_rope(name, r, {d_qkv.bf16, norm ? b.qkv : d_qkv.bf16});
    bool codes = d_qkv.rows.codes != NULL || d_qkv.columns.codes != NULL,
         sums = b.column_sums.data != NULL;
    if (codes) { check_operand(name, &d_qkv, M, N); }
    if (d_qkv.fused && halves_are_vectors(r.D) && !norm) {
        RopeBackwardSource source = {{N / VEC}, d_qkv.bf16, r.table, r.T, (r.H + r.G) * r.D / VEC,
                                     r.D / VEC};
        auto run = sums ? quantize<true, RopeBackwardSource> : quantize<false, RopeBackwardSource>;
        run(name, source, d_qkv, b.column_sums, b.scratch, M, N, gpu->stream);
        return;
    }
    if (norm) {
        rotate_and_norm_backward(d_qkv.bf16, b, gpu->stream);
    } else {
        rotate(d_qkv.bf16, d_qkv.bf16, r, -1.0f, gpu->stream);
    }
    if (codes) { measure_bf16(d_qkv, M, N, gpu->stream); }
    if (codes || sums) { quantize_bf16(d_qkv, b.column_sums, b.scratch, M, N, gpu->stream); }
}
