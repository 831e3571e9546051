// The activations' formulas.
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

// gelu(x) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). GELU_1 x + GELU_3 x^3 is 2u / log 2.
#define GELU_1 2.302208198f
#define GELU_3 0.1029432397f

__device__ __forceinline__ float gelu(float x) {
    return x * sigmoid2(x * (GELU_1 + GELU_3 * (x * x)));
}

__device__ __forceinline__ float gelu_slope(float x) {
    const float log2 = 0.6931471806f;
    float square = x * x, s = sigmoid2(x * (GELU_1 + GELU_3 * square));
    float slope_of_2u = log2 * GELU_1 + (3.0f * log2 * GELU_3) * square;
    return s + (s - s * s) * (x * slope_of_2u);
}

#endif
