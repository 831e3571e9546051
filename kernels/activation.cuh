// Fast exponential and sigmoid, for the activations and the loss.
#ifndef LLM8_ACTIVATION_CUH
#define LLM8_ACTIVATION_CUH

// 2^x and 1/x within 2 units in the last place; results and arguments below 2^-126 count as 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sigmoid(x log 2)
__device__ __forceinline__ float sigmoid2(float x) {
    return reciprocal_fast(1.0f + exp2_fast(-x));
}

__device__ __forceinline__ float sigmoid(float x) {
    return sigmoid2(1.4426950408889634f * x);
}

#endif
