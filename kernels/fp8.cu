// The scales of all FP8 tensors, which one kernel a step renews without the host; counts of codes.
#include "quantize.cuh"

__global__ void count_codes_kernel(Fp8Counts *all, const uint4 *codes, int64_t vectors,
                                   Fp8Type type) {
    Fp8Counts mine = {};
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint4 v = codes[i];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        for (int byte = 0; byte < 16; byte++) {
            fp8_count(&mine, (uint8_t)(words[byte / 4] >> 8 * (byte % 4)), type);
        }
    }
    unsigned elements = __reduce_add_sync(~0u, (unsigned)mine.elements);
    unsigned largest = __reduce_add_sync(~0u, (unsigned)mine.largest);
    unsigned zero = __reduce_add_sync(~0u, (unsigned)mine.zero);
    unsigned subnormal = __reduce_add_sync(~0u, (unsigned)mine.subnormal);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&all->elements, elements);
        atomicAdd(&all->largest, largest);
        atomicAdd(&all->zero, zero);
        atomicAdd(&all->subnormal, subnormal);
    }
}

void gpu_count_codes(Gpu *gpu, Fp8Counts *counts, const uint8_t *codes, int64_t n, Fp8Type type) {
    gpu_family(gpu, FAMILY_QUANTIZE);
    check_aligned("gpu_count_codes", {codes});
    if (n % 16 != 0) { die("gpu_count_codes: %lld codes; a multiple of 16", (long long)n); }
    int blocks = min(divide_up(n / 16, 256), 4 * PARTIALS);
    launch(count_codes_kernel, blocks, 256, gpu->stream, counts,
           reinterpret_cast<const uint4 *>(codes), n / 16, type);
}

// One warp per scale.
__global__ void fp8_update_kernel(Fp8Table t, const StepState *state) {
    int i = blockIdx.x;
    Fp8Scale *scale = &t.scales[i];
    float *history = t.history + (int64_t)i * t.length;
    if (!(t.kinds[i] & SLOT_FOLLOWS)) { return; }
    float largest = warp_max(fp8_scale_largest(scale, history, t.length, threadIdx.x, WARP));
    if (threadIdx.x != 0) { return; }
    if (!state->skipped) {
        fp8_scale_enter(scale, history, t.length, t.targets[i], largest);
    } else if (!(t.kinds[i] & SLOT_WEIGHT)) {
        scale->amax = 0.0f;
    }
}

void gpu_fp8_update(Gpu *gpu, const Fp8Table *table, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch(fp8_update_kernel, table->count, WARP, gpu->stream, *table, state);
}

__global__ void clear_amaxes_kernel(Fp8Table t) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < t.count) { t.scales[i].amax = 0.0f; }
}

void gpu_fp8_clear_amaxes(Gpu *gpu, const Fp8Table *table) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch(clear_amaxes_kernel, divide_up(table->count, 128), 128, gpu->stream, *table);
}
