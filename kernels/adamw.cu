#include "adamw.cuh"

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

enum { ADAMW_THREADS = 256 };

__global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_kernel(const AdamWUpdate u, const StepState *state, float bias1, float bias2) {
    if (state->skipped) { return; }
    int low = 0, high = u.segment_count;
    while (high - low > 1) { // the block's segment
        int middle = (low + high) / 2;
        if (u.segments[middle].first_block <= (int)blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const AdamWSegment s = u.segments[low];
    AdamWFactors f = adamw_factors(u, state, bias1, bias2);
    int64_t i = (int64_t)(blockIdx.x - s.first_block) * ADAMW_THREADS + threadIdx.x;
    if (i < s.n / VEC) { store8(s.weights, i, adamw_vector(u, f, s.first / VEC + i)); }
}

int gpu_adamw_blocks(int64_t n) {
    return divide_up(n / VEC, ADAMW_THREADS);
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
