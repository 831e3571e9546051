// One pass that computes a tensor, or reads one, and writes it in FP8: as it is and transposed.
//
// A block takes a tile, a thread 4 rows x 8 columns of it. A thread computes its values, writes its
// rows' codes, turns 4 x 4 codes in registers, and leaves the columns in shared memory, from where
// they go out 16 bytes at a time.
//
// Where the values come from is a source, copied by each thread:
//   ROWS                      of a tile: 128 makes long columns, 32 long rows
//   OUTPUTS                   tensors side by side, each N wide
//   begin(row, vector)        takes its place, 8 columns from row `row` on; false: nothing to do,
//                             which must be the same for the whole launch
//   fetch(i)                  loads what row + i needs
//   compute(i, raw, values)   8 values of each output
#ifndef LLM8_QUANTIZE_CUH
#define LLM8_QUANTIZE_CUH

#include "fp8.cuh"

enum { TILE_THREADS = 256, THREAD_ROWS = 4 };

template <int ROWS> struct Tile {
    enum {
        COLUMN_GROUPS = TILE_THREADS / (ROWS / THREAD_ROWS),
        COLUMNS = COLUMN_GROUPS * VEC,
        COLUMN_WORDS = ROWS / 4 + 1, // a column's codes, padded
        CHUNKS = ROWS / 16           // 16-byte pieces of a column
    };
    uint32_t words[COLUMNS * COLUMN_WORDS];

    // Codes of 4 columns from `column` on and 4 rows, the group-th of the tile, turned.
    __device__ __forceinline__ void put4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int column,
                                         int group) {
        transpose4(a, b, c, d);
        uint32_t *to = words + column * COLUMN_WORDS + group;
        to[0] = a;
        to[COLUMN_WORDS] = b;
        to[2 * COLUMN_WORDS] = c;
        to[3 * COLUMN_WORDS] = d;
    }

    // A thread's codes.
    __device__ __forceinline__ void put(const uint2 (&codes)[THREAD_ROWS]) {
        int group = threadIdx.x / COLUMN_GROUPS, first = threadIdx.x % COLUMN_GROUPS * VEC;
        put4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, first, group);
        put4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, first + 4, group);
    }

    // The columns to out, [columns,M] from the tile's first column and row on; columns, rows: how
    // many of the tile there are. All threads call it.
    __device__ __forceinline__ void write(uint8_t *out, int columns, int rows, int M) const {
#pragma unroll
        for (int i = threadIdx.x; i < COLUMNS * CHUNKS; i += TILE_THREADS) {
            int c = i / CHUNKS, chunk = i % CHUNKS;
            const uint32_t *from = words + c * COLUMN_WORDS + chunk * 4;
            if (c < columns && chunk * 16 < rows) {
                uint4 codes = make_uint4(from[0], from[1], from[2], from[3]);
                *reinterpret_cast<uint4 *>(out + c * (int64_t)M + chunk * 16) = codes;
            }
        }
    }
};

// The tiles of FP8 weights (gpu_fp8_weight_tiles).
enum { WEIGHT_ROWS = 32 };
typedef Tile<WEIGHT_ROWS> WeightTile;

// Where tile `block`, of all weights' counted together, lies in w.
__device__ __forceinline__ int2 tile_place(const Fp8Weight &w, int block) {
    int across = (w.C + WeightTile::COLUMNS - 1) / WeightTile::COLUMNS;
    int tile = block - w.first_block;
    return make_int2(tile % across, tile / across);
}

// Column sums of a tile of SUM_ROWS rows, in a fixed order, to partials [N]. All threads
// call it.
enum { SUM_ROWS = 128 };
__device__ __forceinline__ void write_sums(float *partials, Floats8 sum, int column, int N) {
    enum { COLUMN_GROUPS = Tile<SUM_ROWS>::COLUMN_GROUPS, COLUMNS = Tile<SUM_ROWS>::COLUMNS };
    __shared__ float shared[TILE_THREADS / WARP][COLUMNS];
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
    if (c >= COLUMNS || column + c >= N) { return; }
    float total = shared[0][c];
    for (int i = 1; i < TILE_THREADS / WARP; i++) { total += shared[i][c]; }
    partials[column + c] = total;
}

__device__ __forceinline__ uint4 raw8(const Bf16 *x, int64_t i) {
    return reinterpret_cast<const uint4 *>(x)[i];
}

// A tensor of `vectors` vectors a row, read as it lies.
struct PlainPlace {
    int vectors;
    int64_t at;
    __device__ bool begin(int row, int vector) {
        at = row * (int64_t)vectors + vector;
        return true;
    }
    __device__ int64_t place(int i) const {
        return at + i * vectors;
    }
};

// What a source's numbers become.
enum TileMode {
    TILE_GIVEN,    // codes by live->scale; the range goes to the slot
    TILE_MEASURED, // codes by the scale that live->amax gives
    TILE_MEASURE   // no codes; the range goes to live->amax
};

// Tile (x, y) of M x N values an output, M a multiple of 4. partials: where column sums go. One
// block.
template <typename SOURCE, Fp8Type TYPE, TileMode MODE, bool SUMS, bool COUNTS>
__device__ __forceinline__ void quantize_tile(SOURCE source, const Fp8Out &out, float *partials,
                                              int M, int N, int x, int y) {
    typedef Tile<SOURCE::ROWS> Block;
    enum { OUTPUTS = SOURCE::OUTPUTS };
    static_assert(!SUMS || SOURCE::ROWS == SUM_ROWS, "write_sums knows one shape");
    __shared__ Block tiles[OUTPUTS];
    int first_row = y * SOURCE::ROWS, first_column = x * Block::COLUMNS;
    int row = first_row + threadIdx.x / Block::COLUMN_GROUPS * THREAD_ROWS;
    int column = first_column + threadIdx.x % Block::COLUMN_GROUPS * VEC;
    bool inside = column < N && row < M, announces = x == 0 && y == 0 && threadIdx.x == 0;
    if (!source.begin(row, column / VEC)) { return; }
    float scale = MODE == TILE_MEASURED ? measured_scale(out, announces) : out.live->scale;
    float range = 0.0f;
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
                if (MODE != TILE_MEASURED) { range = range8(range, values[k]); }
                if (MODE == TILE_MEASURE) { continue; }
                codes[k][i] = encode8<TYPE>(values[k], scale);
                if (COUNTS) { count8(out.counts, values[k], scale, codes[k][i], TYPE); }
                if (out.rows != nullptr) {
                    *reinterpret_cast<uint2 *>(out.rows + at + k * N) = codes[k][i];
                }
            }
#pragma unroll
            for (int j = 0; j < VEC && SUMS; j++) { sum.v[j] += values[0].v[j]; }
        }
    }
    if (MODE == TILE_MEASURE) {
        block_amax(&out.live->amax, range);
        return;
    }
    if (COUNTS && announces) { out.counts->elements += (int64_t)M * N * OUTPUTS; }
    if (SUMS) { write_sums(partials + (int64_t)y * N, sum, first_column, N); }
    if (out.columns != nullptr) {
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) { tiles[k].put(codes[k]); }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) {
            uint8_t *to = out.columns + (int64_t)(first_column + k * N) * M + first_row;
            tiles[k].write(to, N - first_column, M - first_row, M);
        }
    }
    if (MODE == TILE_GIVEN && out.record) { block_amax(&out.slot->amax, range); }
}

template <typename SOURCE, Fp8Type TYPE, TileMode MODE, bool SUMS, bool COUNTS>
__global__ void __launch_bounds__(TILE_THREADS)
    quantize_kernel(SOURCE source, Fp8Out out, float *partials, int M, int N) {
    quantize_tile<SOURCE, TYPE, MODE, SUMS, COUNTS>(source, out, partials, M, N, blockIdx.x,
                                                    blockIdx.y);
}

template <TileMode MODE, bool SUMS, Fp8Type TYPE, typename SOURCE>
static void quantize(const SOURCE &source, const Fp8Out &out, float *partials, int M, int N,
                     cudaStream_t stream) {
    dim3 grid(divide_up(N, Tile<SOURCE::ROWS>::COLUMNS), divide_up(M, SOURCE::ROWS));
    auto kernel = out.counts != NULL ? quantize_kernel<SOURCE, TYPE, MODE, SUMS, true>
                                     : quantize_kernel<SOURCE, TYPE, MODE, SUMS, false>;
    kernel<<<grid, TILE_THREADS, 0, stream>>>(source, out, partials, M, N);
    LAUNCH_CHECK();
}

template <TileMode MODE, bool SUMS, typename SOURCE>
static void quantize(const SOURCE &source, const Fp8Out &out, float *partials, int M, int N,
                     cudaStream_t stream) {
    if (out.type == FP8_E4M3) {
        quantize<MODE, SUMS, FP8_E4M3>(source, out, partials, M, N, stream);
    } else {
        quantize<MODE, SUMS, FP8_E5M2>(source, out, partials, M, N, stream);
    }
}

#endif
