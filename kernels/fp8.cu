// The FP8 scaling state, which one kernel a step renews without the host; the amax of tensors whose
// producers measure none; counts of codes.
#include "quantize.cuh"

__global__ void amax_kernel(float *amax, const Bf16 *x, int64_t vectors) {
    float range = 0.0f;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors;
         i += (int64_t)gridDim.x * blockDim.x) {
        range = range8(range, load8(x, i));
    }
    block_amax(amax, range);
}

void measure_bf16(Operand x, int64_t n, cudaStream_t stream) {
    if (x.scaling != SCALE_MEASURED) { return; }
    check_aligned("gpu_measure", {x.bf16});
    if (n % VEC != 0) { die("gpu_measure: %lld values; a multiple of 8", (long long)n); }
    int blocks = min(divide_up(n / VEC, 256), 4 * PARTIALS);
    launch(amax_kernel, blocks, 256, stream, &x.scale->amax, x.bf16, n / VEC);
}

void gpu_measure(Gpu *gpu, Operand x, int64_t n) {
    if (x.scaling == SCALE_MEASURED) { gpu_family(gpu, FAMILY_QUANTIZE); }
    measure_bf16(x, n, gpu->stream);
}

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

// One warp per slot.
__global__ void fp8_update_kernel(Fp8Scaling s, const StepState *state) {
    int i = blockIdx.x;
    Fp8Scale *slot = &s.slots[i];
    float *history = s.history + (int64_t)i * s.history_length;
    if (!(s.used[i] & SLOT_FOLLOWS)) { return; }
    float largest = warp_max(fp8_scale_largest(slot, history, s.history_length, threadIdx.x, WARP));
    if (threadIdx.x != 0) { return; }
    if (!state->skipped) {
        fp8_scale_enter(slot, history, s.history_length, s.targets[i], largest);
    } else if (!(s.used[i] & SLOT_WEIGHT)) {
        slot->amax = 0.0f;
    }
}

void gpu_fp8_update(Gpu *gpu, const Fp8Scaling *scaling, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch(fp8_update_kernel, scaling->count, WARP, gpu->stream, *scaling, state);
}

__global__ void clear_measured_kernel(Fp8Scaling s) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < s.count) { s.slots[i].amax = 0.0f; }
}

void gpu_fp8_clear_measured(Gpu *gpu, const Fp8Scaling *scaling) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    launch(clear_measured_kernel, divide_up(scaling->count, 128), 128, gpu->stream, *scaling);
}
