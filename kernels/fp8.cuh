// Device code shared by the kernels that write FP8.
#ifndef LLM8_FP8_CUH
#define LLM8_FP8_CUH

#include "device.cuh"

#include <cuda_fp8.h>

// Two values to two codes, the first in the lower byte; rounds to nearest even and saturates.
template <Fp8Type TYPE> __device__ __forceinline__ uint32_t encode2(float a, float b) {
    const __nv_fp8_interpretation_t format = TYPE == FP8_E4M3 ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, format);
}

template <Fp8Type TYPE>
__device__ __forceinline__ uint32_t encode4(const float (&x)[4], float scale) {
    return encode2<TYPE>(x[0] * scale, x[1] * scale) | encode2<TYPE>(x[2] * scale, x[3] * scale)
                                                           << 16;
}

template <Fp8Type TYPE> __device__ __forceinline__ uint2 encode8(const Floats8 &x, float scale) {
    uint32_t pairs[VEC / 2];
#pragma unroll
    for (int j = 0; j < VEC / 2; j++) {
        pairs[j] = encode2<TYPE>(x.v[2 * j] * scale, x.v[2 * j + 1] * scale);
    }
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Adds what 4 values lost. Straight to memory: steps that count are rare.
__device__ __forceinline__ void count4(Fp8Counts *all, const float *x, float scale, uint32_t codes,
                                       Fp8Type type) {
    Fp8Counts mine = {};
#pragma unroll
    for (int j = 0; j < 4; j++) { fp8_count(&mine, x[j], scale, (uint8_t)(codes >> 8 * j), type); }
    if (mine.saturated > 0) { atomicAdd(&all->saturated, mine.saturated); }
    if (mine.vanished > 0) { atomicAdd(&all->vanished, mine.vanished); }
}

__device__ __forceinline__ void count8(Fp8Counts *all, const Floats8 &x, float scale, uint2 codes,
                                       Fp8Type type) {
    count4(all, x.v, scale, codes.x, type);
    count4(all, x.v + 4, scale, codes.y, type);
}

// From four rows of four codes to four columns of four.
__device__ __forceinline__ void transpose4(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d) {
    uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_low, cd_low, 0x5410);
    b = __byte_perm(ab_low, cd_low, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410);
    d = __byte_perm(ab_high, cd_high, 0x7632);
}

// The scale that follows from the measured amax, unless the slot has a history, whose scale then
// stays. One thread of the launch announces it to the products.
__device__ __forceinline__ float measured_scale(const Fp8Tensor &q, bool announces) {
    bool known = q.slot != nullptr && q.slot->count > 0;
    float amax = q.live->amax;
    float scale = known ? q.slot->scale : fp8_scale(amax, q.target, 1.0f);
    if (announces) {
        q.live->scale = scale;
        q.live->scale_inv = 1.0f / scale;
        if (q.record && q.slot != nullptr) {
            atomicMax(reinterpret_cast<uint32_t *>(&q.slot->amax), __float_as_uint(amax));
        }
    }
    return scale;
}

#endif
