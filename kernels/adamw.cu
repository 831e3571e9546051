// The gradients' norm, the decision whether a step counts, and AdamW's step for weights in BF16.
#include "adamw.cuh"

// A part a block.
__global__ void sum_of_squares_kernel(double *partials, const void *gradients, GpuType type,
                                      const GradientPart *parts) {
    __shared__ double shared[WARP];
    const GradientPart part = parts[blockIdx.x];
    int64_t end = (part.first + part.n) / VEC;
    double mine = 0.0;
    for (int64_t i = part.first / VEC + threadIdx.x; i < end; i += blockDim.x) {
        Floats8 g = load_floats8(gradients, type, i);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < VEC; j++) { sum += g.v[j] * g.v[j]; }
        mine += sum;
    }
    double all = block_sum(mine, shared);
    if (threadIdx.x == 0) { partials[blockIdx.x] = all; }
}

__global__ void finish_norm_kernel(StepState *state, const double *partials, int count) {
    __shared__ double shared[WARP];
    double mine = 0.0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) { mine += partials[i]; }
    double all = block_sum(mine, shared);
    if (threadIdx.x == 0) { state->norm_squared = all; }
}

void gpu_sum_of_squares(StepState *state, double *scratch, const void *gradients, GpuType type,
                        const GradientPart *parts, int count, cudaStream_t stream) {
    sum_of_squares_kernel<<<count, 256, 0, stream>>>(scratch, gradients, type, parts);
    LAUNCH_CHECK();
    finish_norm_kernel<<<1, 1024, 0, stream>>>(state, scratch, count);
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

__global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_kernel(const AdamWUpdate u, const StepState *state, float bias1, float bias2) {
    if (state->skipped) { return; }
    const AdamWSegment s = u.segments[row_of_block(u.segments, 0, u.segment_count, blockIdx.x)];
    AdamWFactors f = adamw_factors(u, state, bias1, bias2);
    int64_t begin = (int64_t)(blockIdx.x - s.first_block) * ADAMW_QUADS;
    int64_t end = min(begin + ADAMW_QUADS, s.n / QUAD);
    for (int64_t i = begin + threadIdx.x; i < end; i += ADAMW_THREADS) {
        int64_t at = s.first / QUAD + i; // in all arrays: fewer registers than three places
        store4(s.weights, i, adamw_quad(u, f, {at, at, at}));
    }
}

int gpu_adamw_blocks(int64_t n) {
    return divide_up(n / QUAD, ADAMW_QUADS);
}

void gpu_adamw_update(const AdamWUpdate *update, const StepState *state, cudaStream_t stream) {
    adamw_kernel<<<update->segment_blocks, ADAMW_THREADS, 0, stream>>>(
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
