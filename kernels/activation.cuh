// The activations' formulas.
#ifndef LLM8_ACTIVATION_CUH
#define LLM8_ACTIVATION_CUH

__device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

// gelu(x) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
__device__ __forceinline__ float gelu(float x) {
    return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

__device__ __forceinline__ float gelu_slope(float x) {
    float s = sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    return s + x * s * (1.0f - s) * 1.5957691216057308f * (1.0f + 3.0f * 0.044715f * x * x);
}

#endif
