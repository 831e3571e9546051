// What the norms that write FP8 share. A group of threads takes a row, 8 columns a thread, and some
// rows at a time, which share the wait for their sums; what the next rows need is fetched into
// shared memory meanwhile. Codes of 32 rows gather in shared memory, where they are turned.
#ifndef LLM8_NORM_CUH
#define LLM8_NORM_CUH

#include "fp8.cuh"

#include <cuda_pipeline.h>
#include <limits.h>

enum { CHUNK_ROWS = 32, BLOCKS = PARTIALS / 2, MOST_THREADS = 512 };

// A block: `groups` groups of `lanes` threads, whole warps.
struct Division {
    int lanes, groups;
    size_t shared; // bytes
};

// Where word `slot` (rows 4 slot to 4 slot + 3) of a column's codes lies: padded so that neither
// writing along columns nor reading along rows waits for banks more than it must.
__device__ __forceinline__ int tile_word(int column, int slot) {
    return column * (CHUNK_ROWS / 4) + column / VEC * 4 + slot;
}

static inline size_t tile_bytes(int C) {
    return ((size_t)C * (CHUNK_ROWS / 4) + (size_t)C / VEC * 4) * sizeof(uint32_t);
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
#pragma unroll 1
    for (int i = lane; i < lanes / WARP * N; i += WARP) { sum += buffer[i]; }
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

// The chunk's turned codes, from the group's tile to columns.
__device__ __forceinline__ void flush_columns(uint8_t *columns, const uint32_t *tile, int row,
                                              int M, int C, int lane, int lanes) {
    enum { PIECES = CHUNK_ROWS / 16 };
    for (int i = lane; i < C * PIECES; i += lanes) {
        int column = i / PIECES, piece = i % PIECES;
        if (row + piece * 16 >= M) { continue; }
        uint4 codes = *reinterpret_cast<const uint4 *>(tile + tile_word(column, piece * 4));
        *reinterpret_cast<uint4 *>(columns + column * (int64_t)M + row + piece * 16) = codes;
    }
}

// Groups enough to fill a multiprocessor's registers, at most four (which share out the usual
// numbers of rows most evenly), within its shared memory. slot_bytes: what a thread fetches ahead.
static inline Division divide(int C, bool codes, size_t slot_bytes) {
    const size_t most_bytes = (size_t)220 << 10;
    int lanes = divide_up(C / VEC, WARP) * WARP, groups = min(4, max(1, MOST_THREADS / lanes));
    size_t group_bytes = (codes ? tile_bytes(C) : 0) + lanes * slot_bytes;
    while (groups > 1 && groups * group_bytes > most_bytes) { groups--; }
    return {lanes, groups, groups * group_bytes};
}

// Whether a row fits a block that has registers enough for several rows at a time.
static inline bool several_rows(int C) {
    return C <= MOST_THREADS * VEC;
}

// Vector `vector` of x; zeros, where it is not inside.
__device__ __forceinline__ void fetch_ahead(uint4 *slot, const Bf16 *x, int vector, bool inside) {
    const uint4 *from = reinterpret_cast<const uint4 *>(x) + (inside ? vector : 0);
    __pipeline_memcpy_async(slot, from, sizeof(uint4), inside ? 0 : sizeof(uint4));
}

// The kernels count vectors in 32 bits.
static inline void check_size(int M, int C) {
    if ((int64_t)M * (C / VEC) > INT_MAX / 2) { die("norm: %d x %d is too large", M, C); }
}

#endif
