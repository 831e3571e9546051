// The optimizer's step: the gradients' norm, the decision whether the step is skipped, AdamW
// (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), the parts of Muon (cpu.h)
// that are not matmuls, and the new FP8 scales. The new weights are written in the type that
// matmuls read, BF16 or FP8.
// With ZeRO-1 a rank's part of a matrix may begin anywhere, so the kernels process a matrix as an
// array of elements. FP8 weights are transposed later, once a rank has the whole weight.
#include "../base/rng.h"
#include "cpu.h" // Muon's constants
#include "quantize.cuh"

__device__ __forceinline__ float squares8(const Floats8 &x) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VEC; j++) { sum += x.v[j] * x.v[j]; }
    return sum;
}

// Sums the squares of the gradients' parts. Each thread block takes one part.
__global__ void sum_of_squares_kernel(double *partials, const void *gradients, GpuType type,
                                      const GradientPart *parts) {
    __shared__ double shared[WARP];
    const GradientPart part = parts[blockIdx.x];
    int64_t end = (part.first + part.n) / VEC;
    double mine = 0.0;
    for (int64_t i = part.first / VEC + threadIdx.x; i < end; i += blockDim.x) {
        mine += squares8(load_floats8(gradients, type, i));
    }
    double all = block_sum(mine, shared);
    if (threadIdx.x == 0) { partials[blockIdx.x] = all; }
}

__global__ void finish_norm_kernel(StepState *state, const StepInput *input, const double *loss_sum,
                                   const double *partials, int count) {
    __shared__ double shared[WARP];
    double mine = 0.0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) { mine += partials[i]; }
    double all = block_sum(mine, shared);
    if (threadIdx.x == 0) {
        state->norm_squared = all;
        state->stop = input->stop;
        state->loss_sum = state->own_loss_sum = *loss_sum;
    }
}

void gpu_sum_of_squares(Gpu *gpu, StepState *state, const StepInput *input, const double *loss_sum,
                        double *scratch, const void *gradients, GpuType type,
                        const GradientPart *parts, int count) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch(sum_of_squares_kernel, count, 256, gpu->stream, scratch, gradients, type, parts);
    launch(finish_norm_kernel, 1, 1024, gpu->stream, state, input, loss_sum, scratch, count);
}

__global__ void decide_step_kernel(StepState *state, const StepInput *input, double tokens,
                                   float clip) {
    double factor = tokens / input->targets;
    double loss = state->loss_sum / input->targets;
    state->norm_squared *= factor * factor;
    double norm = sqrt(state->norm_squared);
    state->gradient_scale = (float)(clip > 0.0f && norm > clip ? clip / norm * factor : factor);
    state->skipped = step_skip(&state->window, input->sigma, input->skip, loss, norm);
    state->updates += state->skipped == SKIP_NONE;
}

void gpu_decide_step(Gpu *gpu, StepState *state, const StepInput *input, double tokens,
                     float clip) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch(decide_step_kernel, 1, 1, gpu->stream, state, input, tokens, clip);
}

// ---- AdamW --------------------------------------------------------------------------------------

// Rounds x to BF16, up or down at random, so that the mean of the results is x. So even a change
// below BF16's spacing moves a moment on average. If x or the result is not finite, x is rounded to
// nearest instead.
__device__ __forceinline__ Bf16 stochastic_bf16(float x, uint32_t random16) {
    uint32_t bits = __float_as_uint(x);
    bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    uint32_t rounded = bits + (random16 & 0xffffu);
    bool overflows = (rounded & 0x7f800000u) == 0x7f800000u;
    return finite && !overflows ? (Bf16)(rounded >> 16) : to_bf16(x);
}

// A lane processes a quad: four consecutive elements. In FP32 a quad is 16 bytes, so that each
// access by a warp covers whole cache lines. When a lane had eight elements and so made two
// accesses, AdamW was 16% slower (GPT-2 124M, one H200).
enum { QUAD = 4 };

struct Floats4 {
    float v[QUAD];
};

__device__ __forceinline__ Floats4 unpack4(uint2 packed) {
    return {{low_bf16(packed.x), high_bf16(packed.x), low_bf16(packed.y), high_bf16(packed.y)}};
}

__device__ __forceinline__ uint2 pack4(const Floats4 &x) {
    uint2 packed;
    *reinterpret_cast<__nv_bfloat162 *>(&packed.x) = __floats2bfloat162_rn(x.v[0], x.v[1]);
    *reinterpret_cast<__nv_bfloat162 *>(&packed.y) = __floats2bfloat162_rn(x.v[2], x.v[3]);
    return packed;
}

// Loads quad i of an array.
__device__ __forceinline__ Floats4 load4(const void *x, GpuType type, int i) {
    if (type == TYPE_BF16) { return unpack4(static_cast<const uint2 *>(x)[i]); }
    float4 a = static_cast<const float4 *>(x)[i];
    return {{a.x, a.y, a.z, a.w}};
}

__device__ __forceinline__ void store4(void *out, int i, const Floats4 &x) {
    static_cast<float4 *>(out)[i] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

__device__ __forceinline__ float amax4(float amax, const Floats4 &x) {
#pragma unroll
    for (int j = 0; j < QUAD; j++) { amax = amax_of(amax, x.v[j]); }
    return amax;
}

// The addresses of a thread block's first parameters. The block finds its quads by 32-bit indices
// from these addresses. When the kernel computed 64-bit addresses of each quad, registers were
// spilled to memory, and AdamW was 9% slower (256M parameters, one H200).
struct AdamWPointers {
    int64_t first; // index of the first element in the parameter space
    const void *gradients;
    void *master, *exp_avg, *exp_avg_sq;
    Bf16 *exp_avg_scales, *exp_avg_sq_scales;
    void *out; // new weights, in BF16 or FP8
    float weight_decay;
};

__device__ __forceinline__ char *element(const void *x, GpuType type, int64_t i) {
    return static_cast<char *>(const_cast<void *>(x)) + i * (type == TYPE_BF16 ? 2 : 4);
}

// Stores a quad of moments. BF16 moments are rounded stochastically, with random bits from `key`
// and from `first`, the index of the quad's first element in the parameter space.
__device__ __forceinline__ void store_moments(void *out, GpuType type, int i, const Floats4 &x,
                                              uint32_t key, int64_t first) {
    if (type == TYPE_F32) {
        store4(out, i, x);
        return;
    }
    uint2 packed;
    Bf16 *values = reinterpret_cast<Bf16 *>(&packed);
#pragma unroll
    for (int j = 0; j < QUAD; j += 2) { // 32 random bits serve two values
        uint32_t bits = rng_bits32(key, (uint64_t)(first + j));
        values[j] = stochastic_bf16(x.v[j], bits);
        values[j + 1] = stochastic_bf16(x.v[j + 1], bits >> 16);
    }
    static_cast<uint2 *>(out)[i] = packed;
}

// The results of root and quotient are within 2 units in the last place. Arguments and results
// below FLT_MIN in magnitude count as 0.
__device__ __forceinline__ float root(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quotient(float x, float y) {
    float z;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// Factors that are the same for all parameters of a segment.
struct AdamWFactors {
    float lr, gradient_scale, correction1, correction2;
    uint32_t key1, key2; // for the stochastic rounding of m and of v; 8-bit moments share key1
};

// Returns a segment's factors. bias1 is log2(beta1), and bias2 is log2(beta2).
__device__ __forceinline__ AdamWFactors adamw_factors(const AdamWUpdate &u, const StepState *state,
                                                      float lr_mult, float bias1, float bias2) {
    float updates = (float)state->updates;
    uint64_t key = u.seed + 2 * (uint64_t)u.input->step;
    return {(float)u.input->lr * lr_mult,
            state->gradient_scale,
            1.0f / (1.0f - exp2f(bias1 * updates)),
            1.0f / (1.0f - exp2f(bias2 * updates)),
            (uint32_t)rng_mix(key),
            (uint32_t)rng_mix(key + 1)};
}

// Updates one parameter's moments by its gradient, and returns its new weight.
__device__ __forceinline__ float adamw_element(const AdamWUpdate &u, const AdamWFactors &f,
                                               float weight_decay, float g, float w, float &m,
                                               float &v) {
    float gradient = g * f.gradient_scale;
    m = u.beta1 * m + (1.0f - u.beta1) * gradient;
    v = u.beta2 * v + (1.0f - u.beta2) * gradient * gradient;
    float step = quotient(m * f.correction1, root(v * f.correction2) + u.eps);
    return w - f.lr * (step + weight_decay * w);
}

// Updates the master weights and moments of quad i, and returns the new weights.
__device__ __forceinline__ Floats4 adamw_quad(const AdamWUpdate &u, const AdamWFactors &f,
                                              const AdamWPointers &at, int i) {
    Floats4 g = load4(at.gradients, u.gradient_type, i);
    Floats4 w = load4(at.master, TYPE_F32, i);
    Floats4 m = load4(at.exp_avg, u.moment_type, i);
    Floats4 v = load4(at.exp_avg_sq, u.moment_type, i);
#pragma unroll
    for (int j = 0; j < QUAD; j++) {
        w.v[j] = adamw_element(u, f, at.weight_decay, g.v[j], w.v[j], m.v[j], v.v[j]);
    }
    int64_t first = at.first + i * QUAD;
    store4(at.master, i, w);
    store_moments(at.exp_avg, u.moment_type, i, m, f.key1, first);
    store_moments(at.exp_avg_sq, u.moment_type, i, v, f.key2, first);
    return w;
}

// ---- moments in 8 bits (moments.h) --------------------------------------------------------------

enum { MOMENT_LANES = MOMENT_BLOCK / QUAD }; // lanes that share a block of moments

// Returns byte J of four codes as a float. prmt sign-extends the byte for the first moment and
// zero-extends it for the second. (A cast of the byte takes four times as long, although it is one
// instruction; __byte_perm cannot sign-extend.)
template <Moment WHICH, int J> __device__ __forceinline__ float moment_code(uint32_t codes) {
    int code;
    asm("prmt.b32 %0, %1, 0, %2;"
        : "=r"(code)
        : "r"(codes), "n"((WHICH == MOMENT_FIRST ? 0x8880 + 0x1110 * J : 0x4440) + J));
    return (float)code;
}

__device__ __forceinline__ float log2_about(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns by how much log2 of an unrounded code (moments.h) exceeds log2(|m|) / 3 or log2(v) / 6.
__device__ __forceinline__ float moment_shift(float unit) {
    return log2_about(fmaxf(unit, FLT_MIN)) * (-1.0f / 3.0f);
}

// Returns the code of x (moments.h) in byte 2; 128 is added to a code of m. `least` is the least
// code that v may get. Floats from 256 up to 512 have a spacing of 2^-15. So the bits of `code` +
// 256, shifted left by 1, hold the unrounded code in fixed point, with 16 bits for the fraction.
// Adding 16 random bits rounds the code stochastically.
template <Moment WHICH>
__device__ __forceinline__ uint32_t moment_write(float x, float shift, float least, uint32_t bits) {
    constexpr float power = WHICH == MOMENT_FIRST ? 1.0f / 3.0f : 1.0f / 6.0f;
    float code = exp2_fast(log2_about(fabsf(x)) * power + shift);
    code = fminf(code, moment_max_code(WHICH));
    code = WHICH == MOMENT_FIRST ? copysignf(code, x) : fmaxf(code, least);
    code = __fadd_rz(code, WHICH == MOMENT_FIRST ? 256.0f + 128.0f : 256.0f);
    return (__float_as_uint(code) << 1) + (WHICH == MOMENT_FIRST ? bits & 0xffffu : bits >> 16);
}

// Returns the largest value of the lanes that share a block of moments.
__device__ __forceinline__ float block_largest(float x) {
#pragma unroll
    for (int step = MOMENT_LANES / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}

struct Packed8 {
    uint32_t codes; // codes of four elements
    Bf16 scale;
};

template <Moment WHICH>
__device__ __forceinline__ Packed8 moments_write(const Floats4 &x, uint32_t hash) {
    float largest = fmaxf(fmaxf(fabsf(x.v[0]), fabsf(x.v[1])), fmaxf(fabsf(x.v[2]), fabsf(x.v[3])));
    largest = block_largest(largest);
    Bf16 scale = moment_scale(largest, WHICH == MOMENT_FIRST ? largest : root(largest), WHICH);
    float shift = moment_shift(moment_unit(scale, WHICH)), least = scale > 0 ? 1.0f : 0.0f;
    uint32_t c[QUAD];
#pragma unroll
    for (int j = 0; j < QUAD; j++) {
        c[j] = moment_write<WHICH>(x.v[j], shift, least, moment_bits(hash, j));
    }
    return {__byte_perm(__byte_perm(c[0], c[1], 0x0062), __byte_perm(c[2], c[3], 0x0062), 0x5410),
            scale};
}

// What a quad's update reads. Nothing is converted yet: a conversion would wait for the load.
struct Quad8 {
    uint4 g; // gradients: two words of BF16, or four of FP32
    Floats4 w;
    uint32_t m, v; // codes
};

__device__ __forceinline__ Quad8 load_quad8(const AdamWUpdate &u, const AdamWPointers &at, int i) {
    uint4 g = {};
    if (u.gradient_type == TYPE_BF16) {
        uint2 half = static_cast<const uint2 *>(at.gradients)[i];
        g.x = half.x, g.y = half.y;
    } else {
        g = static_cast<const uint4 *>(at.gradients)[i];
    }
    return {g, load4(at.master, TYPE_F32, i), static_cast<const uint32_t *>(at.exp_avg)[i],
            static_cast<const uint32_t *>(at.exp_avg_sq)[i]};
}

// The factors of adamw_quad8. For the unscaled gradient g, adamw_quad8 computes what adamw_element
// computes, with fewer operations, and with v raised to at least floor m^2:
//   m = beta1 m + first g                   sqrt(v) = max(sqrt(beta2 v), least |beta1 m|)
//   v = beta2 v + (second g)^2              w = decay w - lr m / (root sqrt(v) + eps)
struct Factors8 {
    float beta1, root_beta2, first, second, least, lr, decay, root, eps;
    uint32_t key;
};

__device__ __forceinline__ Factors8 factors8(const AdamWUpdate &u, const AdamWFactors &f,
                                             float weight_decay) {
    const float root_beta2 = sqrtf(u.beta2);
    return {u.beta1,
            root_beta2,
            (1.0f - u.beta1) * f.gradient_scale,
            sqrtf(1.0f - u.beta2) * f.gradient_scale,
            u.beta1 > 0.0f ? sqrtf(u.floor) * root_beta2 / u.beta1 : 0.0f,
            f.lr,
            1.0f - f.lr * weight_decay,
            sqrtf(f.correction2) / f.correction1,
            u.eps / f.correction1,
            f.key1};
}

// Does what adamw_quad does, for moments in 8 bits. q is what load_quad8 has read. scales has the
// scales of this thread block's moments, with the scale of m in the lower 16 bits. All lanes of a
// warp call this function. `mine` is false in a lane without a quad, which writes nothing.
__device__ __forceinline__ Floats4 adamw_quad8(const AdamWUpdate &u, const Factors8 &f,
                                               const AdamWPointers &at, int i, bool mine,
                                               const Quad8 &q, uint32_t *scales) {
    Floats4 w = q.w, g = {{__uint_as_float(q.g.x), __uint_as_float(q.g.y), __uint_as_float(q.g.z),
                           __uint_as_float(q.g.w)}};
    if (u.gradient_type == TYPE_BF16) { g = unpack4({q.g.x, q.g.y}); }
    const uint32_t old = scales[i / MOMENT_LANES];
    const float m_unit = moment_unit((Bf16)old, MOMENT_FIRST) * f.beta1;
    const float v_unit = moment_unit((Bf16)(old >> 16), MOMENT_SECOND) * f.root_beta2;
    Floats4 m = {{moment_code<MOMENT_FIRST, 0>(q.m), moment_code<MOMENT_FIRST, 1>(q.m),
                  moment_code<MOMENT_FIRST, 2>(q.m), moment_code<MOMENT_FIRST, 3>(q.m)}};
    Floats4 v = {{moment_code<MOMENT_SECOND, 0>(q.v), moment_code<MOMENT_SECOND, 1>(q.v),
                  moment_code<MOMENT_SECOND, 2>(q.v), moment_code<MOMENT_SECOND, 3>(q.v)}};
#pragma unroll
    for (int j = 0; j < QUAD; j++) {
        const float old_m = moment_level(m.v[j], m_unit, MOMENT_FIRST);
        const float size = fmaxf(moment_level(v.v[j], v_unit, MOMENT_FIRST),
                                 f.least * fabsf(old_m));
        const float change = f.second * g.v[j];
        m.v[j] = f.first * g.v[j] + old_m;
        v.v[j] = change * change + size * size;
        w.v[j] = f.decay * w.v[j] - f.lr * quotient(m.v[j], f.root * root(v.v[j]) + f.eps);
    }
    const uint32_t hash = moment_hash(f.key, at.first + i * QUAD);
    const Packed8 first = moments_write<MOMENT_FIRST>(m, hash);
    const Packed8 second = moments_write<MOMENT_SECOND>(v, hash);
    if (!mine) { return w; }
    store4(at.master, i, w);
    static_cast<uint32_t *>(at.exp_avg)[i] = first.codes ^ 0x80808080u;
    static_cast<uint32_t *>(at.exp_avg_sq)[i] = second.codes;
    if (i % MOMENT_LANES == 0) {
        scales[i / MOMENT_LANES] = first.scale | (uint32_t)second.scale << 16;
    }
    return w;
}

// Does what adamw_quad does, for Muon, whose update is in the gradient buffer.
__device__ __forceinline__ Floats4 muon_quad(const AdamWUpdate &u, const AdamWFactors &f,
                                             const AdamWPointers &at, int i) {
    Floats4 update = load4(at.gradients, u.gradient_type, i);
    Floats4 w = load4(at.master, TYPE_F32, i);
#pragma unroll
    for (int j = 0; j < QUAD; j++) { w.v[j] -= f.lr * (update.v[j] + at.weight_decay * w.v[j]); }
    store4(at.master, i, w);
    return w;
}

// how many threads a thread block has, and how many quads it processes
enum { ADAMW_THREADS = 256, ADAMW_QUADS = 8 * ADAMW_THREADS };

int gpu_adamw_blocks(int64_t n) {
    return divide_up(n / QUAD, ADAMW_QUADS);
}

// Returns the segment of thread block `block`: the last one whose first_block is at most `block`.
__device__ __forceinline__ int segment_of_block(const AdamWSegment *segments, int count,
                                                int block) {
    int begin = 0, end = count;
    while (end - begin > 1) {
        int middle = (begin + end) / 2;
        if (segments[middle].first_block <= block) {
            begin = middle;
        } else {
            end = middle;
        }
    }
    return begin;
}

// What a launch of adamw_kernel does. AdamW and Muon have separate kernels: with Muon's code in it,
// AdamW's kernel took 64 registers instead of 57.
enum WeightsJob {
    // The next three jobs update the master weights and write BF16 weights. They measure the amax
    // of FP8 weights, and with SCALE_DELAYED write the codes, too.
    JOB_ADAMW,
    JOB_ADAMW8, // with moments in 8 bits
    JOB_MUON,
    JOB_MEASURE, // measures the amax of FP8 weights
    // Writes FP8 weights, by the scales that gpu_set_weight_scales has set or, with
    // SCALE_BLOCK_128X128, by scales from the blocks' amaxes. At the start of a run (state is
    // NULL), it also writes BF16 weights.
    JOB_QUANTIZE
};

// Returns the index, among a weight's scales, of the scale of the element's block of 128 x 128.
__device__ __forceinline__ int64_t block_scale_index(const Fp8Weight &w, uint32_t element) {
    uint32_t row = element / (uint32_t)w.columns, column = element - row * (uint32_t)w.columns;
    return fp8_scale_index(SCALE_BLOCK_128X128, w.rows, w.columns, (int)row, (int)column);
}

// Raises each lane's *amax to at least the lane's `magnitude`. Lanes with the same address share
// one atomic operation.
__device__ __forceinline__ void lanes_amax(float *amax, float magnitude) {
    uint32_t peers = __match_any_sync(__activemask(), (unsigned long long)amax);
    uint32_t bits = __reduce_max_sync(peers, __float_as_uint(magnitude));
    uint32_t *to = reinterpret_cast<uint32_t *>(amax);
    bool first = threadIdx.x % WARP == __ffs((int)peers) - 1;
    if (first && bits > __ldcg(to)) { atomicMax(to, bits); }
}

// Does a job for the update's segments that need it. A thread block processes ADAMW_QUADS quads of
// one segment. state is NULL at the start of a run. (With 8-bit moments three blocks run on each
// SM: with four, registers spill, and AdamW takes 3% longer.)
template <WeightsJob JOB, Scaling SCALING>
__global__ void __launch_bounds__(ADAMW_THREADS, JOB == JOB_ADAMW8 ? 3 : 0)
    adamw_kernel(const AdamWUpdate u, const StepState *state, float bias1, float bias2) {
    if (state != nullptr && state->skipped) { return; }
    const AdamWSegment s = u.segments[segment_of_block(u.segments, u.segment_count, blockIdx.x)];
    AdamWFactors f = {};
    constexpr bool small = JOB == JOB_ADAMW8;
    __shared__ Factors8 f8;
    constexpr bool updates = JOB <= JOB_MUON, measures = JOB != JOB_QUANTIZE;
    constexpr bool writes = JOB == JOB_QUANTIZE || (updates && SCALING == SCALE_DELAYED);
    constexpr bool blockwise = SCALING == SCALE_BLOCK_128X128;
    if (updates && s.muon != (JOB == JOB_MUON)) { return; }
    // with 8-bit moments the factors take about 200 instructions, so one thread computes them
    if (small && threadIdx.x == 0) {
        f8 = factors8(u, adamw_factors(u, state, s.lr_mult, bias1, bias2), s.weight_decay);
    } else if (updates && !small) {
        f = adamw_factors(u, state, s.lr_mult, bias1, bias2);
    }
    bool bf16 = s.bf16 != nullptr;
    if (bf16 && !updates && (JOB == JOB_MEASURE || state != nullptr)) { return; }
    int64_t begin = (int64_t)(blockIdx.x - s.first_block) * (ADAMW_QUADS * QUAD);
    int quads = (int)min((int64_t)ADAMW_QUADS, (s.n - begin) / QUAD);
    const int64_t block = begin / MOMENT_BLOCK;
    const AdamWPointers at = {s.first + begin,
                              element(u.gradients, u.gradient_type, s.gradient + begin),
                              s.master + begin,
                              small ? static_cast<char *>(s.exp_avg) + begin
                                    : element(s.exp_avg, u.moment_type, begin),
                              small ? static_cast<char *>(s.exp_avg_sq) + begin
                                    : element(s.exp_avg_sq, u.moment_type, begin),
                              small ? s.exp_avg_scales + block : nullptr,
                              small ? s.exp_avg_sq_scales + block : nullptr,
                              bf16 ? static_cast<void *>(s.bf16 + begin) : s.fp8 + begin,
                              s.weight_decay};
    const Fp8Weight *weight = u.weights + s.weight;
    float scale = 0.0f, amax = 0.0f;
    Fp8Weight blocks = {};
    if (blockwise && !bf16) { blocks = *weight; }
    if (!blockwise && !bf16 && writes) { scale = weight->scale->scale; }
    // A block of 64 moments takes half a warp, so the last quads of a segment may fill only half a
    // warp. The other lanes still loop, because adamw_quad8 needs all lanes.
    int count = small ? (quads + WARP - 1) / WARP * WARP : quads;
    // With 8-bit moments, the next quad is read before this quad is updated; otherwise too few
    // loads are in flight.
    Quad8 next = {};
    // With 8-bit moments, a thread block reads all its scales before the loop and writes them after
    // it: when each half-warp wrote two bytes at a time, AdamW took 27% longer (256M parameters,
    // one H200).
    enum { SCALES = small ? ADAMW_QUADS / MOMENT_LANES : 1 };
    __shared__ uint32_t scales[SCALES]; // lower 16 bits: the scale of m; upper: of v
    for (int k = threadIdx.x; small && k < quads / MOMENT_LANES; k += ADAMW_THREADS) {
        scales[k] = at.exp_avg_scales[k] | (uint32_t)at.exp_avg_sq_scales[k] << 16;
    }
    if (small && threadIdx.x < quads) { next = load_quad8(u, at, threadIdx.x); }
    if (small) { __syncthreads(); }
    const Factors8 factors = small ? f8 : Factors8{};
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += ADAMW_THREADS) {
        bool mine = !small || i < quads;
        const Quad8 read = next;
        if (small && i + ADAMW_THREADS < quads) { next = load_quad8(u, at, i + ADAMW_THREADS); }
        uint2 packed = pack4(JOB == JOB_ADAMW ? adamw_quad(u, f, at, i)
                             : JOB == JOB_ADAMW8
                                 ? adamw_quad8(u, factors, at, i, mine, read, scales)
                             : JOB == JOB_MUON ? muon_quad(u, f, at, i)
                                               : load4(at.master, TYPE_F32, i));
        if (!mine) { continue; }
        if (bf16) {
            static_cast<uint2 *>(at.out)[i] = packed;
            continue;
        }
        Floats4 w = unpack4(packed);
        if (blockwise) {
            float *entry = blocks.amax +
                           block_scale_index(blocks,
                                             (uint32_t)(s.weight_offset + begin) + i * QUAD);
            if (measures) { lanes_amax(entry, amax4(0.0f, w)); }
            if (writes) { scale = fp8_block_scale(*entry, blocks.target, blocks.power_of_two); }
        } else if (measures) {
            amax = amax4(amax, w);
        }
        if (writes) { static_cast<uint32_t *>(at.out)[i] = encode4<FP8_E4M3>(w.v, scale); }
    }
    if (small) { __syncthreads(); }
    for (int k = threadIdx.x; small && k < quads / MOMENT_LANES; k += ADAMW_THREADS) {
        at.exp_avg_scales[k] = (Bf16)scales[k];
        at.exp_avg_sq_scales[k] = (Bf16)(scales[k] >> 16);
    }
    if (!bf16 && measures && !blockwise) { block_amax(&weight->scale->amax, amax); }
}

template <WeightsJob JOB>
static void launch_adamw(const AdamWUpdate *u, const StepState *state, cudaStream_t stream) {
    // jobs that update no weights have one kernel for SCALE_CURRENT and SCALE_DELAYED
    auto kernel = adamw_kernel<JOB, SCALE_CURRENT>;
    if (u->scaling == SCALE_BLOCK_128X128) { kernel = adamw_kernel<JOB, SCALE_BLOCK_128X128>; }
    if constexpr (JOB <= JOB_MUON) {
        if (u->scaling == SCALE_DELAYED) { kernel = adamw_kernel<JOB, SCALE_DELAYED>; }
    }
    if (u->segment_blocks == 0) { return; } // this rank has no segment of the bucket
    launch(kernel, u->segment_blocks, ADAMW_THREADS, stream, *u, state, log2f(u->beta1),
           log2f(u->beta2));
}

void gpu_adamw(Gpu *gpu, const AdamWUpdate *update, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    bool small = update->moment_type == TYPE_MOMENT8;
    (small ? launch_adamw<JOB_ADAMW8> : launch_adamw<JOB_ADAMW>)(update, state, gpu->stream);
    if (update->muon) { launch_adamw<JOB_MUON>(update, state, gpu->stream); }
}

void gpu_measure_weights(Gpu *gpu, const AdamWUpdate *update, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch_adamw<JOB_MEASURE>(update, state, gpu->stream);
}

void gpu_quantize_weights(Gpu *gpu, const AdamWUpdate *update, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch_adamw<JOB_QUANTIZE>(update, state, gpu->stream);
}

// ---- Muon ---------------------------------------------------------------------------------------

__global__ void __launch_bounds__(ADAMW_THREADS)
    muon_momentum_kernel(const AdamWUpdate u, const StepState *state) {
    if (state->skipped) { return; }
    const AdamWSegment s = u.segments[segment_of_block(u.segments, u.segment_count, blockIdx.x)];
    if (!s.muon) { return; }
    uint32_t key = (uint32_t)rng_mix(u.seed + 2 * (uint64_t)u.input->step);
    int64_t begin = (int64_t)(blockIdx.x - s.first_block) * (ADAMW_QUADS * QUAD);
    int quads = (int)min((int64_t)ADAMW_QUADS, (s.n - begin) / QUAD);
    void *gradients = element(u.gradients, u.gradient_type, s.gradient + begin);
    GpuType type = momentum_type(u.moment_type);
    void *momenta = element(s.exp_avg, type, begin);
    float scale = state->gradient_scale;
    for (int i = threadIdx.x; i < quads; i += ADAMW_THREADS) {
        Floats4 g = load4(gradients, u.gradient_type, i), m = load4(momenta, type, i);
#pragma unroll
        for (int j = 0; j < QUAD; j++) {
            g.v[j] *= scale;
            m.v[j] = u.momentum * m.v[j] + g.v[j];
            g.v[j] += u.momentum * m.v[j];
        }
        store_moments(momenta, type, i, m, key, s.first + begin + i * QUAD);
        if (u.gradient_type == TYPE_F32) {
            store4(gradients, i, g);
        } else {
            static_cast<uint2 *>(gradients)[i] = pack4(g);
        }
    }
}

void gpu_muon_momentum(Gpu *gpu, const AdamWUpdate *u, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    if (u->segment_blocks == 0) { return; }
    launch(muon_momentum_kernel, u->segment_blocks, ADAMW_THREADS, gpu->stream, *u, state);
}

// Computes part blockIdx.x of the sum of squares of matrix blockIdx.y.
__global__ void muon_norm_kernel(double *partials, const MuonMatrices m) {
    __shared__ double shared[WARP];
    int64_t first = m.offsets[blockIdx.y] / VEC;
    double mine = 0.0;
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < m.n / VEC;
         i += MUON_PARTS * blockDim.x) {
        mine += squares8(load_floats8(m.gradients, m.type, first + i));
    }
    double all = block_sum(mine, shared);
    if (threadIdx.x == 0) { partials[blockIdx.y * MUON_PARTS + blockIdx.x] = all; }
}

__global__ void muon_normalize_kernel(Bf16 *x, const double *partials, const MuonMatrices m) {
    __shared__ double shared[WARP];
    const double *parts = partials + blockIdx.y * MUON_PARTS;
    double square = block_sum(threadIdx.x < MUON_PARTS ? parts[threadIdx.x] : 0.0, shared);
    __shared__ float inverse;
    if (threadIdx.x == 0) { inverse = 1.0f / ((float)sqrt(square) + MUON_EPSILON); }
    __syncthreads();
    int64_t first = m.offsets[blockIdx.y] / VEC;
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= m.n / VEC) { return; }
    Floats8 g = load_floats8(m.gradients, m.type, first + i);
#pragma unroll
    for (int j = 0; j < VEC; j++) { g.v[j] *= inverse; }
    store8(x, (int64_t)blockIdx.y * (m.n / VEC) + i, g);
}

__global__ void muon_store_kernel(const MuonMatrices m, const Bf16 *x) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= m.n / VEC) { return; }
    Floats8 g = load_floats8(x, TYPE_BF16, (int64_t)blockIdx.y * (m.n / VEC) + i);
    gradient_store8({m.gradients, m.type, false}, m.offsets[blockIdx.y] / VEC + i, g);
}

static void check_matrices(const MuonMatrices &m) {
    if (m.n % VEC != 0 || m.count < 1 || m.count > 65535) {
        die("Muon: %d matrices of %lld elements; they must be 1 to 65535, of a multiple of %d",
            m.count, (long long)m.n, VEC);
    }
}

void gpu_muon_normalize(Gpu *gpu, Bf16 *x, double *partials, MuonMatrices m) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    enum { THREADS = 256 };
    check_matrices(m);
    launch(muon_norm_kernel, dim3(MUON_PARTS, m.count), THREADS, gpu->stream, partials, m);
    dim3 blocks(divide_up(m.n / VEC, THREADS), m.count);
    launch(muon_normalize_kernel, blocks, THREADS, gpu->stream, x, partials, m);
}

void gpu_muon_store(Gpu *gpu, MuonMatrices m, const Bf16 *x) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    enum { THREADS = 256 };
    check_matrices(m);
    launch(muon_store_kernel, dim3(divide_up(m.n / VEC, THREADS), m.count), THREADS, gpu->stream, m,
           x);
}

// ---- FP8 scales ---------------------------------------------------------------------------------

__global__ void set_weight_scales_kernel(const AdamWUpdate u, const StepState *state) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if ((state != nullptr && state->skipped) || i >= u.weight_count) { return; }
    const Fp8Weight w = u.weights[i];
    if (u.scaling == SCALE_DELAYED && fp8_scale_known(w.scale)) { return; }
    measured_scale(w.scale, w.target, true);
}

// Sets the scales of blocks of 128 x 128 from the blocks' amaxes. Each thread block takes one
// weight.
__global__ void set_block_scales_kernel(const AdamWUpdate u, const StepState *state) {
    if (state != nullptr && state->skipped) { return; }
    const Fp8Weight w = u.weights[blockIdx.x];
    int across = (w.columns + FP8_BLOCK - 1) / FP8_BLOCK;
    int down = (w.rows + FP8_BLOCK - 1) / FP8_BLOCK;
    for (int i = threadIdx.x; i < down * across; i += blockDim.x) {
        int row = i / across * FP8_BLOCK, column = i % across * FP8_BLOCK;
        int64_t index = fp8_scale_index(SCALE_BLOCK_128X128, w.rows, w.columns, row, column);
        float inverse = 1.0f / fp8_block_scale(w.amax[index], w.target, w.power_of_two);
        w.inverse[index] = inverse;
        w.inverse_t[fp8_scale_index(SCALE_BLOCK_128X128, w.columns, w.rows, column, row)] = inverse;
    }
}

void gpu_set_weight_scales(Gpu *gpu, const AdamWUpdate *u, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    if (u->scaling == SCALE_BLOCK_128X128) {
        launch(set_block_scales_kernel, u->weight_count, 256, gpu->stream, *u, state);
    } else {
        launch(set_weight_scales_kernel, divide_up(u->weight_count, 128), 128, gpu->stream, *u,
               state);
    }
}

// Updates the scales of delayed scaling. Each thread block is one warp, which takes one scale.
__global__ void fp8_update_kernel(Fp8Table t, const StepState *state) {
    int i = blockIdx.x;
    Fp8Scale *scale = &t.scales[i];
    float *history = t.history + (int64_t)i * t.length;
    if (!(t.kinds[i] & SLOT_UPDATED)) { return; }
    float largest = warp_max(fp8_scale_largest(scale, history, t.length, threadIdx.x, WARP));
    if (threadIdx.x != 0) { return; }
    if (!state->skipped) {
        fp8_scale_enter(scale, history, t.length, t.targets[i], largest);
    } else if (!(t.kinds[i] & SLOT_WEIGHT)) {
        scale->amax = 0.0f;
    }
}

void gpu_fp8_update(Gpu *gpu, const Fp8Table *table, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch(fp8_update_kernel, table->count, WARP, gpu->stream, *table, state);
}

__global__ void clear_amaxes_kernel(Fp8Table t) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < t.count) { t.scales[i].amax = 0.0f; }
}

void gpu_fp8_clear_amaxes(Gpu *gpu, const Fp8Table *table) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch(clear_amaxes_kernel, divide_up(table->count, 128), 128, gpu->stream, *table);
}

__global__ void to_bf16_kernel(Bf16 *out, const float *x, int64_t vectors) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < vectors) { store8(out, i, load_floats8(x, TYPE_F32, i)); }
}

void gpu_to_bf16(Gpu *gpu, Bf16 *out, const float *x, int64_t n) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    check_aligned("gpu_to_bf16", {out, x});
    if (n % VEC != 0) { die("gpu_to_bf16: %lld values; a multiple of 8", (long long)n); }
    launch(to_bf16_kernel, divide_up(n / VEC, 256), 256, gpu->stream, out, x, n / VEC);
}
