// AdamW's step on the weight of an FP8 layer, which writes the new weights' codes on its way.
#include "adamw.cuh"
#include "quantize.cuh"

struct AdamWSource {
    enum { OUTPUTS = 1 };
    struct Raw {};
    AdamWUpdate update;
    const StepState *state;
    float bias1, bias2; // the betas' binary logarithms
    int vectors;        // of a row
    AdamWFactors factors;
    int64_t at;
    __device__ bool begin(int row, int vector) {
        if (state->skipped) { return false; }
        factors = adamw_factors(update, state, bias1, bias2);
        at = row * (int64_t)vectors + vector;
        return true;
    }
    __device__ Raw fetch(int) const {
        return {};
    }
    __device__ void compute(int i, const Raw &, Floats8 *values) const {
        values[0] = adamw_vector(update, factors, at + i * vectors);
    }
};

// AdamW alone, for the range of the new weights.
__global__ void __launch_bounds__(256) adamw_measure_kernel(AdamWUpdate u, const StepState *state,
                                                            float bias1, float bias2, float *amax) {
    if (state->skipped) { return; }
    AdamWFactors f = adamw_factors(u, state, bias1, bias2);
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float range = 0.0f;
    if (i < u.n / VEC) { range = range8(range, adamw_vector(u, f, i)); }
    block_amax(amax, range);
}

void gpu_adamw_update_fp8(Fp8Out out, bool measured, const AdamWUpdate *update,
                          const StepState *state, int N, int C, cudaStream_t stream) {
    float bias1 = log2f(update->beta1), bias2 = log2f(update->beta2);
    if (measured) {
        adamw_measure_kernel<<<divide_up(update->n / VEC, 256), 256, 0, stream>>>(
            *update, state, bias1, bias2, &out.live->amax);
        LAUNCH_CHECK();
        return;
    }
    AdamWSource source;
    source.update = *update;
    source.state = state;
    source.bias1 = bias1;
    source.bias2 = bias2;
    source.vectors = C / VEC;
    quantize<false, false>(source, out, NULL, N, C, stream);
}
