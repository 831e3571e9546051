// The norms' backward pass. A group of threads takes a row, 8 columns a thread, and two rows at a
// time, so that a column's sums stay in the registers of one thread and two rows share the wait
// for their sums. The new residual gradient can go out in FP8 as well: codes of 32 rows gather in
// shared memory, where they are turned.
#include "fp8.cuh"

enum { CHUNK_ROWS = 32, BLOCKS = PARTIALS / 2, MOST_THREADS = 512 };

// A block: `groups` groups of `lanes` threads, whole warps.
struct Division {
    int lanes, groups;
};

// Where word `slot` (rows 4 slot to 4 slot + 3) of a column's codes lies: padded so that neither
// writing along columns nor reading along rows waits for banks more than it must.
__device__ __forceinline__ int tile_word(int column, int slot) {
    return column * (CHUNK_ROWS / 4) + column / VEC * 4 + slot;
}

static size_t tile_bytes(int C) {
    return ((size_t)C * (CHUNK_ROWS / 4) + (size_t)C / VEC * 4) * sizeof(uint32_t);
}

__device__ __forceinline__ void group_barrier(int group, int lanes) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
}

// The sums of N numbers over the group, in every lane, in a fixed order. N is a power of two up to
// 8. buffer: this call's [warps of a group][N]; another one at the next call.
template <int N>
__device__ __forceinline__ void group_sums(float (&v)[N], float *buffer, int group, int lanes) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x % lanes / WARP, index = 0;
#pragma unroll
    for (int n = N, offset = WARP / 2; offset > 0; offset /= 2) {
        if (n == 1) {
            v[0] += __shfl_xor_sync(~0u, v[0], offset);
            continue;
        }
        n /= 2; // a half of the values goes each way
        bool upper = lane & offset;
#pragma unroll
        for (int i = 0; i < n; i++) {
            float sent = upper ? v[i] : v[i + n], kept = upper ? v[i + n] : v[i];
            v[i] = kept + __shfl_xor_sync(~0u, sent, offset);
        }
        index += upper ? n : 0;
    }
    if (lane % (WARP / N) == 0) { buffer[warp * N + index] = v[0]; }
    group_barrier(group, lanes);
    float sum = 0.0f;
    for (int w = lane / N; w < lanes / WARP; w += WARP / N) { sum += buffer[w * N + lane % N]; }
#pragma unroll
    for (int offset = N; offset < WARP; offset *= 2) { sum += __shfl_xor_sync(~0u, sum, offset); }
#pragma unroll
    for (int i = 0; i < N; i++) { v[i] = __shfl_sync(~0u, sum, i); }
}

// A thread's codes of four rows, turned, to the group's tile.
__device__ __forceinline__ void turn_codes(uint32_t *tile, uint2 (&codes)[4], int column,
                                           int slot) {
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        tile[tile_word(column + i, slot)] = codes[i].x;
        tile[tile_word(column + 4 + i, slot)] = codes[i].y;
    }
}

// What a thread adds up for its 8 columns.
struct ColumnSums {
    Floats8 weight, bias, residual;
};

// Some rows of a thread's columns, packed.
template <int R> struct Rows {
    uint4 x[R], dout[R], residual[R];
    float mean[R], rstd[R];
};

template <int R, bool LAYERNORM>
__device__ __forceinline__ void load_rows(Rows<R> &rows, const NormBackward &n, int64_t row,
                                          int vector) {
    int vectors = n.C / VEC;
#pragma unroll
    for (int i = 0; i < R; i++) {
        int64_t at = (row + i) * vectors + vector;
        bool inside = row + i < n.M, loads = inside && vector < vectors;
        rows.x[i] = loads ? reinterpret_cast<const uint4 *>(n.x)[at] : uint4{};
        rows.dout[i] = loads ? reinterpret_cast<const uint4 *>(n.dout)[at] : uint4{};
        rows.residual[i] = loads ? reinterpret_cast<const uint4 *>(n.d_residual)[at] : uint4{};
        rows.mean[i] = LAYERNORM && inside ? n.mean[row + i] : 0.0f;
        rows.rstd[i] = inside ? n.rstd[row + i] : 0.0f;
    }
}

// The compiler is not to keep what it has unpacked of x: the registers are needed.
__device__ __forceinline__ void forget(uint4 &x) {
    asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
}

// One row's new residual gradient, packed; adds to the column sums.
template <bool LAYERNORM, bool COLUMN_SUMS>
__device__ __forceinline__ Floats8 finish_row(uint4 &packed, ColumnSums &sums, const Floats8 &x,
                                              const Floats8 &d, const Floats8 &w, float mean,
                                              float rstd, float average, float projected) {
    Floats8 out = unpack8(packed);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        float hat = (x.v[j] - mean) * rstd;
        out.v[j] += rstd * (d.v[j] * w.v[j] - average - hat * projected);
        sums.weight.v[j] += d.v[j] * hat;
        if (LAYERNORM) { sums.bias.v[j] += d.v[j]; }
    }
    packed = pack8(out);
    out = unpack8(packed);
#pragma unroll
    for (int j = 0; j < VEC && COLUMN_SUMS; j++) { sums.residual.v[j] += out.v[j]; }
    return out;
}

// The chunk's turned codes, from the group's tile to out.columns.
__device__ __forceinline__ void flush_columns(const Fp8Out &out, const uint32_t *tile, int64_t row,
                                              const NormBackward &n, int lane, int lanes) {
    enum { PIECES = CHUNK_ROWS / 16 };
    for (int i = lane; i < n.C * PIECES; i += lanes) {
        int column = i / PIECES, piece = i % PIECES;
        if (row + piece * 16 >= n.M) { continue; }
        uint4 codes = *reinterpret_cast<const uint4 *>(tile + tile_word(column, piece * 4));
        *reinterpret_cast<uint4 *>(out.columns + column * (int64_t)n.M + row + piece * 16) = codes;
    }
}

// The groups' sums of one kind, added group by group, to the block's partial sums. total: [C].
__device__ void write_partial(float *partials, float *total, const Floats8 &sum, int C, int group,
                              const Division &d) {
    int vector = threadIdx.x % d.lanes;
    for (int turn = 0; turn < d.groups; turn++) {
        __syncthreads();
        if (group != turn || vector >= C / VEC) { continue; }
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float *t = total + vector * VEC + j;
            *t = turn == 0 ? sum.v[j] : *t + sum.v[j];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        partials[(int64_t)blockIdx.x * C + i] = total[i];
    }
}

// What a thread carries along the rows.
struct Progress {
    ColumnSums sums;
    float range;
    int turn; // of the two buffers
};

// R rows from `row` on; codes: theirs, where CODES.
template <int R, bool LAYERNORM, bool COLUMN_SUMS, bool CODES, Fp8Type TYPE>
__device__ __forceinline__ void norm_rows(const NormBackward &n, const Fp8Out &out, int64_t row,
                                          uint4 raw_w, float *buffer, int lanes, float scale,
                                          Progress &p, uint2 *codes) {
    int group = threadIdx.x / lanes, vector = threadIdx.x % lanes, vectors = n.C / VEC;
    Rows<R> rows;
    float both[2 * R]; // sums of g, then of g times the normalised x over rstd
    load_rows<R, LAYERNORM>(rows, n, row, vector);
    Floats8 w = unpack8(raw_w);
#pragma unroll
    for (int i = 0; i < R; i++) {
        Floats8 x = unpack8(rows.x[i]), d = unpack8(rows.dout[i]);
        both[i] = both[R + i] = 0.0f;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float g = d.v[j] * w.v[j];
            both[i] += g;
            both[R + i] += g * (x.v[j] - rows.mean[i]);
        }
    }
    group_sums(both, buffer, group, lanes);
#pragma unroll
    for (int i = 0; i < R; i++) {
        forget(rows.x[i]);
        forget(rows.dout[i]);
        float average = LAYERNORM ? both[i] / n.C : 0.0f;
        float projected = both[R + i] * rows.rstd[i] / n.C;
        Floats8 value = finish_row<LAYERNORM, COLUMN_SUMS>(
            rows.residual[i], p.sums, unpack8(rows.x[i]), unpack8(rows.dout[i]), w, rows.mean[i],
            rows.rstd[i], average, projected);
        bool stores = row + i < n.M && vector < vectors;
        int64_t at = (row + i) * vectors + vector;
        if (stores) { reinterpret_cast<uint4 *>(n.d_residual)[at] = rows.residual[i]; }
        if (CODES || n.amax != nullptr) { p.range = range8(p.range, value); }
        if (CODES) { codes[i] = encode8<TYPE>(value, scale); }
        if (CODES && stores) { reinterpret_cast<uint2 *>(out.rows)[at] = codes[i]; }
    }
}

// CODES: the new d_residual also goes to out, in its format.
template <int R, bool LAYERNORM, bool COLUMN_SUMS, bool CODES, Fp8Type TYPE>
__global__ void __launch_bounds__(R == 1 ? 2 * MOST_THREADS : MOST_THREADS)
    norm_backward_kernel(NormBackward n, Fp8Out out, Division division) {
    extern __shared__ uint4 dynamic[]; // the groups' tiles; at the end [C] sums
    __shared__ float buffers[2][2 * MOST_THREADS / WARP * 2 * R];
    int lanes = division.lanes, group = threadIdx.x / lanes, vector = threadIdx.x % lanes;
    bool inside = vector < n.C / VEC;
    uint32_t *tile = reinterpret_cast<uint32_t *>(dynamic);
    if (CODES) { tile += group * tile_word(n.C, 0); }
    float scale = CODES ? out.live->scale : 1.0f;
    Progress p = {};
    uint4 raw_w = inside ? reinterpret_cast<const uint4 *>(n.weight)[vector] : uint4{};
    int64_t stride = (int64_t)gridDim.x * division.groups * CHUNK_ROWS;
    int64_t chunk = ((int64_t)blockIdx.x * division.groups + group) * CHUNK_ROWS;
    for (; chunk < n.M; chunk += stride) {
        for (int slot = 0; slot < CHUNK_ROWS / 4 && chunk + slot * 4 < n.M; slot++) {
            uint2 codes[4];
#pragma unroll(CODES ? 4 : 1)
            for (int i = 0; i < 4; i += R) {
                float *buffer = buffers[p.turn ^= 1] + group * (lanes / WARP) * 2 * R;
                norm_rows<R, LAYERNORM, COLUMN_SUMS, CODES, TYPE>(
                    n, out, chunk + slot * 4 + i, raw_w, buffer, lanes, scale, p, codes + i);
            }
            if (CODES && inside) { turn_codes(tile, codes, vector * VEC, slot); }
        }
        if (CODES) {
            group_barrier(group, lanes);
            flush_columns(out, tile, chunk, n, vector, lanes);
            group_barrier(group, lanes);
        }
    }
    if (CODES && out.record) { block_amax(&out.slot->amax, p.range); }
    if (!CODES && n.amax != nullptr) { block_amax(n.amax, p.range); }
    float *total = reinterpret_cast<float *>(dynamic);
    int64_t kind = (int64_t)gridDim.x * n.C;
    write_partial(n.scratch, total, p.sums.weight, n.C, group, division);
    if (LAYERNORM) { write_partial(n.scratch + kind, total, p.sums.bias, n.C, group, division); }
    if (COLUMN_SUMS) {
        write_partial(n.scratch + 2 * kind, total, p.sums.residual, n.C, group, division);
    }
}

// Groups enough to fill a multiprocessor's registers, at most four.
static Division divide(int C, bool codes) {
    const size_t most_bytes = (size_t)200 << 10;
    int lanes = divide_up(C / VEC, WARP) * WARP, groups = min(4, max(1, MOST_THREADS / lanes));
    while (codes && groups > 1 && groups * tile_bytes(C) > most_bytes) { groups--; }
    return {lanes, groups};
}

template <int R, bool LAYERNORM, bool COLUMN_SUMS, bool CODES, Fp8Type TYPE>
static void launch(const NormBackward &n, const Fp8Out &out, cudaStream_t stream) {
    Division d = divide(n.C, CODES);
    size_t shared = max((size_t)n.C * sizeof(float), CODES ? d.groups * tile_bytes(n.C) : 0);
    int blocks = min((int)BLOCKS, divide_up(n.M, d.groups * CHUNK_ROWS));
    auto kernel = norm_backward_kernel<R, LAYERNORM, COLUMN_SUMS, CODES, TYPE>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    kernel<<<blocks, d.groups * d.lanes, shared, stream>>>(n, out, d);
    LAUNCH_CHECK();
    PartialSums sums = {{n.dweight, n.dbias, n.column_sums}, n.scratch, blocks, n.C};
    sum_partials(sums, stream);
}

template <int R, bool CODES, Fp8Type TYPE>
static void choose(const NormBackward &n, const Fp8Out &out, cudaStream_t stream) {
    bool layernorm = n.mean != NULL, sums = n.column_sums.data != NULL;
    if (layernorm && sums) { launch<R, true, true, CODES, TYPE>(n, out, stream); }
    if (layernorm && !sums) { launch<R, true, false, CODES, TYPE>(n, out, stream); }
    if (!layernorm && sums) { launch<R, false, true, CODES, TYPE>(n, out, stream); }
    if (!layernorm && !sums) { launch<R, false, false, CODES, TYPE>(n, out, stream); }
}

// Two rows at a time need registers that only a block of half the size has.
static bool two_rows(int C) {
    return C <= MOST_THREADS * VEC;
}

void gpu_norm_backward(NormBackward n, cudaStream_t stream) {
    if (n.C % VEC != 0 || n.C > 2 * MOST_THREADS * VEC) {
        die("norm: %d channels; the GPU kernels take a multiple of 8 up to %d", n.C,
            2 * MOST_THREADS * VEC);
    }
    if (two_rows(n.C)) {
        choose<2, false, FP8_E4M3>(n, {}, stream);
    } else {
        choose<1, false, FP8_E4M3>(n, {}, stream);
    }
}

void gpu_norm_backward_fp8(Fp8Out out, NormBackward n, cudaStream_t stream) {
    if (!two_rows(n.C)) {
        gpu_norm_backward(n, stream);
        gpu_quantize(out, false, {}, n.d_residual, n.scratch, n.M, n.C, stream);
    } else if (out.type == FP8_E4M3) {
        choose<2, true, FP8_E4M3>(n, out, stream);
    } else {
        choose<2, true, FP8_E5M2>(n, out, stream);
    }
}
