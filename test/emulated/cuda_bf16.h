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
