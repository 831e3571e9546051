#include "device.cuh"

#include "../train/model.h"
#include "../train/rng.h"

__device__ __forceinline__ Floats8 load_floats8(const void *x, GpuType type, int64_t i) {
    if (type == TYPE_BF16) { return load8(static_cast<const Bf16 *>(x), i); }
    const float4 *p = static_cast<const float4 *>(x) + 2 * i;
    float4 a = p[0], b = p[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ void store_floats8(float *out, int64_t i, const Floats8 &x) {
    float4 *p = reinterpret_cast<float4 *>(out) + 2 * i;
    p[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    p[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

__global__ void sum_of_squares_kernel(double *partials, const void *gradients, GpuType type,
                                      int64_t vectors) {
    __shared__ double shared[WARP];
    double mine = 0.0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors;
         i += (int64_t)gridDim.x * blockDim.x) {
        Floats8 g = load_floats8(gradients, type, i);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < VEC; j++) { sum += g.v[j] * g.v[j]; }
        mine += sum;
    }
    double all = block_sum(mine, shared);
    if (threadIdx.x == 0) { partials[blockIdx.x] = all; }
}

__global__ void finish_norm_kernel(StepState *state, const double *partials, bool accumulate) {
    __shared__ double shared[WARP];
    double all = block_sum(partials[threadIdx.x], shared);
    if (threadIdx.x == 0) { state->norm_squared = accumulate ? state->norm_squared + all : all; }
}

void gpu_sum_of_squares(StepState *state, double *scratch, const void *gradients, GpuType type,
                        int64_t n, bool accumulate, cudaStream_t stream) {
    sum_of_squares_kernel<<<SUM_BLOCKS, 256, 0, stream>>>(scratch, gradients, type, n / VEC);
    LAUNCH_CHECK();
    finish_norm_kernel<<<1, SUM_BLOCKS, 0, stream>>>(state, scratch, accumulate);
    LAUNCH_CHECK();
}

__global__ void decide_step_kernel(StepState *state, double tokens, float clip) {
    state->loss /= tokens;
    double norm = sqrt(state->norm_squared);
    bool finite = isfinite(state->loss) && isfinite(norm);
    state->gradient_scale = clip > 0.0f && norm > clip ? (float)(clip / norm) : 1.0f;
    state->skipped = !finite;
    state->updates += finite;
    state->skips += !finite;
}

void gpu_decide_step(StepState *state, double tokens, float clip, cudaStream_t stream) {
    decide_step_kernel<<<1, 1, 0, stream>>>(state, tokens, clip);
    LAUNCH_CHECK();
}

// BF16 with a random rounding direction, in proportion to how near each neighbour is: what is too
// small to change a BF16 moment still moves it on average. Not finite: to nearest.
__device__ __forceinline__ Bf16 stochastic_bf16(float x, uint32_t random16) {
    uint32_t bits = __float_as_uint(x);
    bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    uint32_t rounded = bits + (random16 & 0xffffu);
    bool overflows = (rounded & 0x7f800000u) == 0x7f800000u;
    return finite && !overflows ? (Bf16)(rounded >> 16) : to_bf16(x);
}

__device__ __forceinline__ void store_moments(void *out, GpuType type, int64_t i, const Floats8 &x,
                                              uint32_t key) {
    if (type == TYPE_F32) {
        store_floats8(static_cast<float *>(out), i, x);
        return;
    }
    uint4 packed;
    Bf16 *values = reinterpret_cast<Bf16 *>(&packed);
#pragma unroll
    for (int j = 0; j < VEC; j += 2) { // 32 random bits serve two values
        uint32_t bits = rng_bits32(key, (uint64_t)(i * VEC + j));
        values[j] = stochastic_bf16(x.v[j], bits);
        values[j + 1] = stochastic_bf16(x.v[j + 1], bits >> 16);
    }
    static_cast<uint4 *>(out)[i] = packed;
}

__device__ __forceinline__ float root(float x) { // within 1 unit in the last place
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__global__ void __launch_bounds__(256)
    adamw_kernel(const AdamWUpdate u, const StepState *state, float bias1, float bias2) {
    if (state->skipped) { return; }
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= u.n / VEC) { return; }
    float scale = state->gradient_scale;
    float correction1 = 1.0f / (1.0f - exp2f(bias1 * (float)state->updates));
    float correction2 = 1.0f / (1.0f - exp2f(bias2 * (float)state->updates));
    float decay = u.decay[i / (PARAM_ALIGN / VEC)] ? u.weight_decay : 0.0f;
    Floats8 g = load_floats8(u.gradients, u.gradient_type, i);
    Floats8 w = load_floats8(u.master, TYPE_F32, i);
    Floats8 m = load_floats8(u.exp_avg, u.moment_type, i);
    Floats8 v = load_floats8(u.exp_avg_sq, u.moment_type, i);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        float gradient = g.v[j] * scale;
        m.v[j] = u.beta1 * m.v[j] + (1.0f - u.beta1) * gradient;
        v.v[j] = u.beta2 * v.v[j] + (1.0f - u.beta2) * gradient * gradient;
        float step = __fdividef(m.v[j] * correction1, root(v.v[j] * correction2) + u.eps);
        w.v[j] -= u.lr * (step + decay * w.v[j]);
    }
    store_floats8(u.master, i, w);
    store_moments(u.exp_avg, u.moment_type, i, m, (uint32_t)rng_mix(u.seed));
    store_moments(u.exp_avg_sq, u.moment_type, i, v, (uint32_t)rng_mix(u.seed + 1));
    store8(u.weights, i, w);
}

void gpu_adamw_update(const AdamWUpdate *update, const StepState *state, cudaStream_t stream) {
    if (update->n == 0) { return; }
    adamw_kernel<<<divide_up(update->n / VEC, 256), 256, 0, stream>>>(
        *update, state, log2f(update->beta1), log2f(update->beta2));
    LAUNCH_CHECK();
}

__global__ void to_bf16_kernel(Bf16 *out, const float *x, int64_t vectors) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < vectors) { store8(out, i, load_floats8(x, TYPE_F32, i)); }
}

void gpu_to_bf16(Bf16 *out, const float *x, int64_t n, cudaStream_t stream) {
    to_bf16_kernel<<<divide_up(n / VEC, 256), 256, 0, stream>>>(out, x, n / VEC);
    LAUNCH_CHECK();
}

__global__ void to_float_kernel(float *out, const void *x, GpuType type, int64_t vectors) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < vectors) { store_floats8(out, i, load_floats8(x, type, i)); }
}

void gpu_to_float(float *out, const void *x, GpuType type, int64_t n, cudaStream_t stream) {
    to_float_kernel<<<divide_up(n / VEC, 256), 256, 0, stream>>>(out, x, type, n / VEC);
    LAUNCH_CHECK();
}
