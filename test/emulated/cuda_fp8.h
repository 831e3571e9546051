// The conversion to codes that kernels/quantize.cuh uses.
#pragma once

#include "cuda_bf16.h"

typedef uint16_t __nv_fp8x2_storage_t;
enum __nv_fp8_interpretation_t { __NV_E4M3 = FP8_E4M3, __NV_E5M2 = FP8_E5M2 };
enum __nv_saturation_t { __NV_SATFINITE };
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t,
                                                     __nv_fp8_interpretation_t format) {
    return (uint16_t)(fp8_encode(x.x, (Fp8Type)format) | fp8_encode(x.y, (Fp8Type)format) << 8);
}
