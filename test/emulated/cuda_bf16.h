// BF16 as kernels/device.cuh converts it.
#pragma once

#include "../../kernels/fp8_format.h"

typedef uint16_t __nv_bfloat16;
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {bf16_encode(x), bf16_encode(y)};
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    return bf16_encode(x);
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) {
    return x;
}
inline __nv_bfloat16 max_bf16(__nv_bfloat16 a, __nv_bfloat16 b) { // NaN where either is
    const float x = bf16_decode(a), y = bf16_decode(b);
    return x > y || x != x ? a : b;
}
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {max_bf16(a.x, b.x), max_bf16(a.y, b.y)};
}
