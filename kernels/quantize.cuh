// One pass that computes a tensor, or reads one, and writes it in FP8: as it is and transposed.
//
// A block takes a tile of 128 rows x 64 columns, a thread 4 rows x 8 columns of it. A thread
// computes its values, writes its rows' codes, turns 4 x 4 codes in registers, and leaves the
// columns in shared memory, from where they go out 16 bytes at a time.
//
// Where the values come from is a source, copied by each thread:
//   OUTPUTS tensors side by side, each N wide
//   begin(row, vector)        takes its place, 8 columns from row `row` on; false: nothing to do,
//                             which must be the same for the whole launch
//   fetch(i)                  loads what row + i needs
//   compute(i, raw, values)   8 values of each output
#ifndef LLM8_QUANTIZE_CUH
#define LLM8_QUANTIZE_CUH

#include "fp8.cuh"

enum {
    TILE_ROWS = 128,
    TILE_COLUMNS = 64,
    THREAD_ROWS = 4,
    TILE_THREADS = 256,
    ROW_GROUPS = TILE_ROWS / THREAD_ROWS, // 32
    COLUMN_GROUPS = TILE_COLUMNS / VEC,   // 8
    COLUMN_WORDS = TILE_ROWS / 4 + 1,     // a column's codes in shared memory, padded
    CHUNKS = TILE_ROWS / 16,              // 16-byte pieces of a column
};

struct Tile {
    uint32_t words[TILE_COLUMNS * COLUMN_WORDS];
};

// A thread's codes, turned, to the tile.
__device__ __forceinline__ void turn_codes(Tile &tile, uint2 (&codes)[THREAD_ROWS]) {
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y);
    int group = threadIdx.x / COLUMN_GROUPS, first = threadIdx.x % COLUMN_GROUPS * VEC;
    uint32_t *words = tile.words + first * COLUMN_WORDS + group;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        words[i * COLUMN_WORDS] = codes[i].x;
        words[(4 + i) * COLUMN_WORDS] = codes[i].y;
    }
}

// The tile's columns to out, [columns,M] from the tile's first column and row on; columns, rows:
// how many of the tile there are. All threads call it.
__device__ __forceinline__ void write_columns(uint8_t *out, const Tile &tile, int columns, int rows,
                                              int M) {
#pragma unroll
    for (int i = threadIdx.x; i < TILE_COLUMNS * CHUNKS; i += TILE_THREADS) {
        int c = i / CHUNKS, chunk = i % CHUNKS;
        const uint32_t *words = tile.words + c * COLUMN_WORDS + chunk * 4;
        if (c < columns && chunk * 16 < rows) {
            uint4 codes = make_uint4(words[0], words[1], words[2], words[3]);
            *reinterpret_cast<uint4 *>(out + c * (int64_t)M + chunk * 16) = codes;
        }
    }
}

// Column sums of a tile, in a fixed order, to partials[blockIdx.y][N]. All threads call it.
__device__ __forceinline__ void write_sums(float *partials, Floats8 sum, int column, int N) {
    __shared__ float shared[TILE_THREADS / WARP][TILE_COLUMNS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < VEC; j++) { // the warp's row groups are COLUMN_GROUPS lanes apart
        sum.v[j] += __shfl_xor_sync(~0u, sum.v[j], COLUMN_GROUPS);
        sum.v[j] += __shfl_xor_sync(~0u, sum.v[j], 2 * COLUMN_GROUPS);
    }
    for (int j = 0; j < VEC && lane < COLUMN_GROUPS; j++) {
        shared[warp][lane * VEC + j] = sum.v[j];
    }
    __syncthreads();
    int c = threadIdx.x;
    if (c >= TILE_COLUMNS || column + c >= N) { return; }
    float total = shared[0][c];
    for (int i = 1; i < TILE_THREADS / WARP; i++) { total += shared[i][c]; }
    partials[(int64_t)blockIdx.y * N + column + c] = total;
}

// M x N values an output, M a multiple of 4. MEASURED: the scale comes from live->amax. partials:
// where column sums go.
template <typename SOURCE, Fp8Type TYPE, bool MEASURED, bool SUMS>
__global__ void __launch_bounds__(TILE_THREADS)
    quantize_kernel(SOURCE source, Fp8Out out, float *partials, int M, int N) {
    enum { OUTPUTS = SOURCE::OUTPUTS };
    __shared__ Tile tiles[OUTPUTS];
    int first_row = blockIdx.y * TILE_ROWS, first_column = blockIdx.x * TILE_COLUMNS;
    int row = first_row + threadIdx.x / COLUMN_GROUPS * THREAD_ROWS;
    int column = first_column + threadIdx.x % COLUMN_GROUPS * VEC;
    bool inside = column < N && row < M;
    if (!source.begin(row, column / VEC)) { return; }
    bool announces = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
    float scale = MEASURED ? measured_scale(out, announces) : out.live->scale, range = 0.0f;
    uint2 codes[OUTPUTS][THREAD_ROWS] = {};
    Floats8 sum = {};
    if (inside) {
        typename SOURCE::Raw raw[THREAD_ROWS];
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++) { raw[i] = source.fetch(i); }
        int64_t at = row * (int64_t)(OUTPUTS * N) + column;
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++, at += OUTPUTS * N) {
            Floats8 values[OUTPUTS];
            source.compute(i, raw[i], values);
#pragma unroll
            for (int k = 0; k < OUTPUTS; k++) {
                if (!MEASURED) { range = range8(range, values[k]); }
                codes[k][i] = encode8<TYPE>(values[k], scale);
                if (out.rows != nullptr) {
                    *reinterpret_cast<uint2 *>(out.rows + at + k * N) = codes[k][i];
                }
            }
#pragma unroll
            for (int j = 0; j < VEC && SUMS; j++) { sum.v[j] += values[0].v[j]; }
        }
    }
    if (SUMS) { write_sums(partials, sum, first_column, N); }
    if (out.columns != nullptr) {
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) { turn_codes(tiles[k], codes[k]); }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) {
            uint8_t *to = out.columns + (int64_t)(first_column + k * N) * M + first_row;
            write_columns(to, tiles[k], N - first_column, M - first_row, M);
        }
    }
    if (!MEASURED && out.record) { block_amax(&out.slot->amax, range); }
}

template <bool MEASURED, bool SUMS, typename SOURCE>
static void quantize(const SOURCE &source, const Fp8Out &out, float *partials, int M, int N,
                     cudaStream_t stream) {
    dim3 grid(divide_up(N, TILE_COLUMNS), divide_up(M, TILE_ROWS));
    if (out.type == FP8_E4M3) {
        quantize_kernel<SOURCE, FP8_E4M3, MEASURED, SUMS>
            <<<grid, TILE_THREADS, 0, stream>>>(source, out, partials, M, N);
    } else {
        quantize_kernel<SOURCE, FP8_E5M2, MEASURED, SUMS>
            <<<grid, TILE_THREADS, 0, stream>>>(source, out, partials, M, N);
    }
    LAUNCH_CHECK();
}

#endif
