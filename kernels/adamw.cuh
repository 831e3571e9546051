// AdamW's step on 4 parameters, for the kernels that make it.
#ifndef LLM8_ADAMW_CUH
#define LLM8_ADAMW_CUH

#include "../base/rng.h"
#include "device.cuh"

// BF16 with a random rounding direction, in proportion to how near each neighbour is: what is too
// small to change a BF16 moment still moves it on average. Not finite: to nearest.
__device__ __forceinline__ Bf16 stochastic_bf16(float x, uint32_t random16) {
    uint32_t bits = __float_as_uint(x);
    bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    uint32_t rounded = bits + (random16 & 0xffffu);
    bool overflows = (rounded & 0x7f800000u) == 0x7f800000u;
    return finite && !overflows ? (Bf16)(rounded >> 16) : to_bf16(x);
}

// Four numbers are 16 bytes of FP32, so that each access of a warp takes whole lines of memory:
// with eight a lane, which take two accesses, AdamW was 16% slower.
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

// Quad i of an array.
__device__ __forceinline__ Floats4 load4(const void *x, GpuType type, int64_t i) {
    if (type == TYPE_BF16) { return unpack4(static_cast<const uint2 *>(x)[i]); }
    float4 a = static_cast<const float4 *>(x)[i];
    return {{a.x, a.y, a.z, a.w}};
}

__device__ __forceinline__ void store4(float *out, int64_t i, const Floats4 &x) {
    reinterpret_cast<float4 *>(out)[i] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

__device__ __forceinline__ void store4(Bf16 *out, int64_t i, const Floats4 &x) {
    reinterpret_cast<uint2 *>(out)[i] = pack4(x);
}

__device__ __forceinline__ float range4(float range, const Floats4 &x) {
#pragma unroll
    for (int j = 0; j < QUAD; j++) { range = range_of(range, x.v[j]); }
    return range;
}

// A quad's number in the parameter space, among the gradients, among master weights and moments.
struct AdamWPlace {
    int64_t param, gradient, state;
};

__device__ __forceinline__ void store_moments(void *out, GpuType type, AdamWPlace place,
                                              const Floats4 &x, uint32_t key) {
    if (type == TYPE_F32) {
        store4(static_cast<float *>(out), place.state, x);
        return;
    }
    uint2 packed;
    Bf16 *values = reinterpret_cast<Bf16 *>(&packed);
#pragma unroll
    for (int j = 0; j < QUAD; j += 2) { // 32 random bits serve two values
        uint32_t bits = rng_bits32(key, (uint64_t)(place.param * QUAD + j));
        values[j] = stochastic_bf16(x.v[j], bits);
        values[j + 1] = stochastic_bf16(x.v[j + 1], bits >> 16);
    }
    static_cast<uint2 *>(out)[place.state] = packed;
}

__device__ __forceinline__ float root(float x) { // within 1 unit in the last place
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What is the same for all parameters.
struct AdamWFactors {
    float lr, gradient_scale, correction1, correction2;
    uint32_t key1, key2; // of the moments' stochastic rounding
};

// bias1, bias2: the binary logarithms of the betas.
__device__ __forceinline__ AdamWFactors adamw_factors(const AdamWUpdate &u, const StepState *state,
                                                      float bias1, float bias2) {
    float updates = (float)state->updates;
    uint64_t key = u.seed + 2 * (uint64_t)u.input->step;
    return {(float)u.input->lr,
            state->gradient_scale,
            1.0f / (1.0f - exp2f(bias1 * updates)),
            1.0f / (1.0f - exp2f(bias2 * updates)),
            (uint32_t)rng_mix(key),
            (uint32_t)rng_mix(key + 1)};
}

// Updates master and moments of a quad; returns the new weights.
__device__ __forceinline__ Floats4 adamw_quad(const AdamWUpdate &u, const AdamWFactors &f,
                                              AdamWPlace place) {
    int64_t i = place.state;
    float decay = u.decay[place.param / (PARAM_ALIGN / QUAD)] ? u.weight_decay : 0.0f;
    Floats4 g = load4(u.gradients, u.gradient_type, place.gradient);
    Floats4 w = load4(u.master, TYPE_F32, i);
    Floats4 m = load4(u.exp_avg, u.moment_type, i);
    Floats4 v = load4(u.exp_avg_sq, u.moment_type, i);
#pragma unroll
    for (int j = 0; j < QUAD; j++) {
        float gradient = g.v[j] * f.gradient_scale;
        m.v[j] = u.beta1 * m.v[j] + (1.0f - u.beta1) * gradient;
        v.v[j] = u.beta2 * v.v[j] + (1.0f - u.beta2) * gradient * gradient;
        float step = __fdividef(m.v[j] * f.correction1, root(v.v[j] * f.correction2) + u.eps);
        w.v[j] -= f.lr * (step + decay * w.v[j]);
    }
    store4(u.master, i, w);
    store_moments(u.exp_avg, u.moment_type, place, m, f.key1);
    store_moments(u.exp_avg_sq, u.moment_type, place, v, f.key2);
    return w;
}

enum { ADAMW_THREADS = 256, ADAMW_QUADS = 8 * ADAMW_THREADS }; // of a block

#endif
