// The norms, forward, straight to FP8 (norm.cuh).
#include "norm.cuh"

enum { ROWS = 4 }; // at a time

__device__ __forceinline__ void fetch_rows(uint4 *slots, const NormForward &n, int row, int vector,
                                           bool inside) {
    int at = row * (n.C / VEC) + vector;
#pragma unroll
    for (int i = 0; i < ROWS; i++, at += n.C / VEC) {
        fetch_ahead(slots + i * blockDim.x, n.x, at, inside);
    }
    __pipeline_commit();
}

// Rows that a thread holds 8 columns of.
struct Rows {
    Floats8 x[ROWS];
    float mean[ROWS], rstd[ROWS];
};

// Takes the rows that have been fetched, and centres them.
template <bool LAYERNORM>
__device__ __forceinline__ void take_rows(Rows &r, const uint4 *slots, float inverse, float *buffer,
                                          int group, int lanes) {
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        r.x[i] = unpack8(slots[i * blockDim.x]);
        r.mean[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < VEC && LAYERNORM; j++) { r.mean[i] += r.x[i].v[j]; }
    }
    if (!LAYERNORM) { return; }
    group_sums(r.mean, buffer, group, lanes);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        r.mean[i] *= inverse;
#pragma unroll
        for (int j = 0; j < VEC; j++) { r.x[i].v[j] -= r.mean[i]; }
    }
}

// inside: whether the thread's columns are.
__device__ __forceinline__ void find_deviations(Rows &r, bool inside, float inverse, float eps,
                                                float *buffer, int group, int lanes) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < VEC; j++) { sum = fmaf(r.x[i].v[j], r.x[i].v[j], sum); }
        r.rstd[i] = inside ? sum : 0.0f;
    }
    group_sums(r.rstd, buffer, group, lanes);
#pragma unroll
    for (int i = 0; i < ROWS; i++) { r.rstd[i] = rsqrtf(fmaf(r.rstd[i], inverse, eps)); }
}

__device__ __forceinline__ float4 four(const float (&x)[ROWS]) {
    return make_float4(x[0], x[1], x[2], x[3]);
}

template <bool LAYERNORM, Fp8Type TYPE, bool COUNTS>
__global__ void __launch_bounds__(MOST_THREADS)
    norm_forward_fp8_kernel(NormForward n, Fp8Out out, Division division, float inverse) {
    extern __shared__ uint4 dynamic[]; // slots, then the groups' tiles
    __shared__ float buffers[2][2 * MOST_THREADS / WARP * ROWS];
    int lanes = division.lanes, group = threadIdx.x / lanes, vector = threadIdx.x % lanes;
    int vectors = n.C / VEC, sums = lanes / WARP * ROWS, turn = 0;
    bool inside = vector < vectors;
    uint4 *slots = dynamic + threadIdx.x;
    uint32_t *tile = reinterpret_cast<uint32_t *>(dynamic + ROWS * blockDim.x);
    tile += group * tile_word(n.C, 0);
    Floats8 w = {}, b = {};
    if (inside) { w = load8(n.weight, vector); }
    if (inside && LAYERNORM) { b = load8(n.bias, vector); }
    float range = 0.0f, scale = out.live->scale;
    int stride = gridDim.x * division.groups * CHUNK_ROWS;
    int chunk = (blockIdx.x * division.groups + group) * CHUNK_ROWS;
    if (chunk < n.M) { fetch_rows(slots, n, chunk, vector, inside); }
    for (; chunk < n.M; chunk += stride) {
#pragma unroll 1
        for (int slot = 0; slot < CHUNK_ROWS / ROWS && chunk + slot * ROWS < n.M; slot++) {
            int row = chunk + slot * ROWS;
            int next = slot + 1 < CHUNK_ROWS / ROWS ? row + ROWS : chunk + stride;
            float *buffer = buffers[turn ^= 1] + group * 2 * sums;
            Rows r;
            take_rows<LAYERNORM>(r, slots, inverse, buffer, group, lanes);
            if (next < n.M) { fetch_rows(slots, n, next, vector, inside); } // all has been read
            find_deviations(r, inside, inverse, n.eps, buffer + sums, group, lanes);
            if (vector == 0) {
                if (LAYERNORM) { *reinterpret_cast<float4 *>(n.mean + row) = four(r.mean); }
                *reinterpret_cast<float4 *>(n.rstd + row) = four(r.rstd);
            }
            if (!inside) { continue; }
            uint2 codes[ROWS];
            int at = row * vectors + vector;
#pragma unroll
            for (int i = 0; i < ROWS; i++, at += vectors) {
                Floats8 v = r.x[i];
#pragma unroll
                for (int j = 0; j < VEC; j++) { v.v[j] = fmaf(v.v[j] * r.rstd[i], w.v[j], b.v[j]); }
                range = range8(range, v);
                codes[i] = encode8<TYPE>(v, scale);
                if (COUNTS) { count8(out.counts, v, scale, codes[i], TYPE); }
                if (out.rows != nullptr) { reinterpret_cast<uint2 *>(out.rows)[at] = codes[i]; }
            }
            if (out.columns != nullptr) { turn_codes(tile, codes, vector * VEC, slot); }
        }
        if (out.columns == nullptr) { continue; }
        group_barrier(group, lanes);
        flush_columns(out.columns, tile, chunk, n.M, n.C, vector, lanes);
        group_barrier(group, lanes);
    }
    bool first = blockIdx.x == 0 && threadIdx.x == 0;
    if (COUNTS && first) { out.counts->elements += (int64_t)n.M * n.C; }
    if (out.record) { block_amax(&out.slot->amax, range); }
}

template <bool LAYERNORM, Fp8Type TYPE>
static void launch(const NormForward &n, const Fp8Out &out, cudaStream_t stream) {
    check_size(n.M, n.C);
    Division d = divide(n.C, true, ROWS * sizeof(uint4));
    int blocks = min((int)BLOCKS, divide_up(n.M, d.groups * CHUNK_ROWS));
    auto kernel = out.counts != NULL ? norm_forward_fp8_kernel<LAYERNORM, TYPE, true>
                                     : norm_forward_fp8_kernel<LAYERNORM, TYPE, false>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)d.shared));
    kernel<<<blocks, d.groups * d.lanes, d.shared, stream>>>(n, out, d, 1.0f / (float)n.C);
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
