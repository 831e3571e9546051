// The norms, forward, straight to FP8: a row is read once (norm.cuh).
#include "norm.cuh"

enum { ROWS = 4 }; // at a time

template <bool LAYERNORM>
__device__ __forceinline__ void fetch_rows(uint4 *slots, const NormForward &n, int64_t row,
                                           int vector) {
    int vectors = n.C / VEC;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        bool inside = row + i < n.M && vector < vectors;
        fetch_ahead(slots + i * blockDim.x, n.x, (row + i) * vectors + vector, inside);
    }
    __pipeline_commit();
}

// Means and inverse deviations of the rows that a thread holds 8 columns of.
template <bool LAYERNORM>
__device__ __forceinline__ void row_statistics(const NormForward &n, const uint4 (&raw)[ROWS],
                                               bool inside, float *buffer, int group, int lanes,
                                               float (&mean)[ROWS], float (&rstd)[ROWS]) {
    float sums[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) { mean[i] = 0.0f; }
    for (int moment = LAYERNORM ? 1 : 2; moment <= 2; moment++) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            Floats8 x = unpack8(raw[i]);
            sums[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                float centred = x.v[j] - mean[i];
                sums[i] += moment == 1 ? x.v[j] : centred * centred;
            }
            if (!inside) { sums[i] = 0.0f; }
        }
        group_sums(sums, buffer + (moment - 1) * lanes / WARP * ROWS, group, lanes);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (moment == 1) {
                mean[i] = sums[i] / n.C;
            } else {
                rstd[i] = rsqrtf(sums[i] / n.C + n.eps);
            }
        }
    }
}

template <bool LAYERNORM, Fp8Type TYPE>
__global__ void __launch_bounds__(MOST_THREADS)
    norm_forward_fp8_kernel(NormForward n, Fp8Out out, Division division) {
    extern __shared__ uint4 dynamic[]; // slots, then the groups' tiles
    __shared__ float buffers[2][2 * MOST_THREADS / WARP * ROWS];
    int lanes = division.lanes, group = threadIdx.x / lanes, vector = threadIdx.x % lanes;
    int vectors = n.C / VEC, turn = 0;
    bool inside = vector < vectors;
    uint4 *slots = dynamic + threadIdx.x;
    uint32_t *tile = reinterpret_cast<uint32_t *>(dynamic + ROWS * blockDim.x);
    tile += group * tile_word(n.C, 0);
    Floats8 w = {}, b = {};
    if (inside) { w = load8(n.weight, vector); }
    if (inside && LAYERNORM) { b = load8(n.bias, vector); }
    float range = 0.0f, scale = out.live->scale;
    int64_t stride = (int64_t)gridDim.x * division.groups * CHUNK_ROWS;
    int64_t chunk = ((int64_t)blockIdx.x * division.groups + group) * CHUNK_ROWS;
    if (chunk < n.M) { fetch_rows<LAYERNORM>(slots, n, chunk, vector); }
    for (; chunk < n.M; chunk += stride) {
        for (int slot = 0; slot < CHUNK_ROWS / ROWS; slot++) {
            int64_t row = chunk + slot * ROWS;
            int64_t next = slot + 1 < CHUNK_ROWS / ROWS ? row + ROWS : chunk + stride;
            uint4 raw[ROWS];
            float mean[ROWS], rstd[ROWS];
            __pipeline_wait_prior(0);
#pragma unroll
            for (int i = 0; i < ROWS; i++) { raw[i] = slots[i * blockDim.x]; }
            float *buffer = buffers[turn ^= 1] + group * (lanes / WARP) * 2 * ROWS;
            row_statistics<LAYERNORM>(n, raw, inside, buffer, group, lanes, mean, rstd);
            if (next < n.M) { fetch_rows<LAYERNORM>(slots, n, next, vector); } // all has been read
            uint2 codes[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                Floats8 v = unpack8(raw[i]);
                bool stores = inside && row + i < n.M;
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    v.v[j] = (v.v[j] - mean[i]) * rstd[i] * w.v[j] + b.v[j];
                }
                if (stores) { range = range8(range, v); }
                codes[i] = encode8<TYPE>(v, scale);
                if (stores && out.rows != nullptr) {
                    reinterpret_cast<uint2 *>(out.rows)[(row + i) * vectors + vector] = codes[i];
                }
                if (stores && vector == 0) {
                    if (LAYERNORM) { n.mean[row + i] = mean[i]; }
                    n.rstd[row + i] = rstd[i];
                }
            }
            if (inside && out.columns != nullptr) { turn_codes(tile, codes, vector * VEC, slot); }
        }
        if (out.columns == nullptr) { continue; }
        group_barrier(group, lanes);
        flush_columns(out.columns, tile, chunk, n.M, n.C, vector, lanes);
        group_barrier(group, lanes);
    }
    if (out.record) { block_amax(&out.slot->amax, range); }
}

template <bool LAYERNORM, Fp8Type TYPE>
static void launch(const NormForward &n, const Fp8Out &out, cudaStream_t stream) {
    Division d = divide(n.C, true, ROWS * sizeof(uint4));
    int blocks = min((int)BLOCKS, divide_up(n.M, d.groups * CHUNK_ROWS));
    auto kernel = norm_forward_fp8_kernel<LAYERNORM, TYPE>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)d.shared));
    kernel<<<blocks, d.groups * d.lanes, d.shared, stream>>>(n, out, d);
    LAUNCH_CHECK();
}

void gpu_norm_forward_fp8(Fp8Out out, NormForward n, cudaStream_t stream) {
    bool layernorm = n.bias != NULL;
    if (!several_rows(n.C)) {
        n.out = NULL;
        gpu_norm_forward(n, stream);
        gpu_normalize_fp8(out, n, stream);
    } else if (out.type == FP8_E4M3) {
        layernorm ? launch<true, FP8_E4M3>(n, out, stream)
                  : launch<false, FP8_E4M3>(n, out, stream);
    } else {
        layernorm ? launch<true, FP8_E5M2>(n, out, stream)
                  : launch<false, FP8_E5M2>(n, out, stream);
    }
}
