// What all kernels that write FP8 share: codes and scales; tiles that are transposed in shared
// memory; and kernels that pass once over a tensor [M,N], whose values a source object computes or
// reads:
//   encode2, encode4, encode8   encode values as codes
//   quantize                    writes a source's values in FP8, as they are and transposed
//   write_bf16_kernel           writes a source's values in BF16
//   sum_columns                 sums a source's columns, and may write its values in BF16
//   produce                     writes the requested forms of an operand, by the kernels above
//
// Each thread has a copy of the source. A source has
//   vectors                   how many vectors of 8 columns a row has
//   OUTPUTS                   how many tensors it computes, side by side, each N wide
//   GRADIENT                  1: the values may be written as E5M2; 0: only as E4M3
//   WAITS                     1: the amax is measured before the kernel runs (for SCALE_CURRENT)
//   begin(row, vector)        sets the position: row `row`, and the 8 columns of `vector`
//   fetch(i)                  loads and returns the inputs of row + i
//   compute(i, raw, values)   computes 8 values of each output from what fetch(i) returned
#pragma once

#include "device.cuh"

#include <cuda_fp8.h>
#include <type_traits>

// ---- codes and scales ---------------------------------------------------------------------------

// Returns x * scale, or NaN if the product is infinite. The conversion to FP8 would turn an
// infinity into the largest code.
__device__ __forceinline__ float scaled(float x, float scale) {
    float y = x * scale;
    return fmaf(y, 0.0f, y);
}

// Multiplies two values by the scale and encodes them (fp8_encode). The first code is in the lower
// byte.
template <Fp8Type TYPE> __device__ __forceinline__ uint32_t encode2(float a, float b, float scale) {
    const __nv_fp8_interpretation_t format = TYPE == FP8_E4M3 ? __NV_E4M3 : __NV_E5M2;
    float2 both = make_float2(scaled(a, scale), scaled(b, scale));
    return __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, format);
}

template <Fp8Type TYPE>
__device__ __forceinline__ uint32_t encode4(const float (&x)[4], float scale) {
    return encode2<TYPE>(x[0], x[1], scale) | encode2<TYPE>(x[2], x[3], scale) << 16;
}

template <Fp8Type TYPE> __device__ __forceinline__ uint2 encode8(const Floats8 &x, float scale) {
    uint32_t pairs[VEC / 2];
    for (int j = 0; j < VEC / 2; j++) {
        pairs[j] = encode2<TYPE>(x.v[2 * j], x.v[2 * j + 1], scale);
    }
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Returns the scale, computed from the measured amax. One thread of the launch passes `writes`,
// so that the scale is also written to *s, where matmuls read it.
__device__ __forceinline__ float measured_scale(Fp8Scale *s, float target, bool writes) {
    float scale = fp8_scale(s->amax, target, 1.0f);
    if (writes) {
        s->scale = scale;
        s->scale_inv = 1.0f / scale;
    }
    return scale;
}

// ---- tiles of codes -----------------------------------------------------------------------------
//
// A tile collects the codes of ROWS rows in shared memory. A 32-bit word has the codes of four rows
// of a column. From the tile the columns are written, 16 bytes at a time.

// Returns the index of word `slot` (rows 4 slot to 4 slot + 3) of a column. Padding after every 8
// columns avoids bank conflicts, both of writes and of reads. tile_word(columns, 0) is the number
// of words of a tile with that many columns.
template <int ROWS> __host__ __device__ constexpr int tile_word(int column, int slot) {
    return column * (ROWS / 4) + column / VEC * 4 + slot;
}

// Transposes four rows of four codes.
__device__ __forceinline__ void transpose4(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d) {
    uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_low, cd_low, 0x5410);
    b = __byte_perm(ab_low, cd_low, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410);
    d = __byte_perm(ab_high, cd_high, 0x7632);
}

// Writes a thread's codes, four rows of 8 columns from `column` on, to the tile.
template <int ROWS>
__device__ __forceinline__ void put_codes(uint32_t *tile, uint2 (&codes)[4], int column, int slot) {
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y);
    for (int i = 0; i < 4; i++) {
        tile[tile_word<ROWS>(column + i, slot)] = codes[i].x;
        tile[tile_word<ROWS>(column + 4 + i, slot)] = codes[i].y;
    }
}

// Writes the tile's columns to out: column c at out + c * M. Only `limit` columns and `rows` rows
// of the tile lie inside the tensor. `lanes` threads share the work: each calls this function with
// its number `lane`.
template <int ROWS>
__device__ __forceinline__ void write_columns(uint8_t *out, const uint32_t *tile, int columns,
                                              int limit, int rows, int M, int lane, int lanes) {
    enum { PIECES = ROWS / 16 }; // pieces of 16 bytes in a column
    __builtin_assume(lane >= 0 && lane < lanes);
#pragma unroll 4
    for (unsigned i = lane; i < (unsigned)columns * PIECES; i += lanes) {
        int column = i / PIECES, piece = i % PIECES;
        if (column >= limit || piece * 16 >= rows) { continue; }
        uint4 codes = *reinterpret_cast<const uint4 *>(tile + tile_word<ROWS>(column, piece * 4));
        *reinterpret_cast<uint4 *>(out + column * (int64_t)M + piece * 16) = codes;
    }
}

// ---- sources ------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 raw8(const Bf16 *x, int64_t i) {
    return reinterpret_cast<const uint4 *>(x)[i];
}

// A source's position in a tensor [M,N] of contiguous rows.
struct Position {
    enum { OUTPUTS = 1, GRADIENT = 0, WAITS = 0 };
    int vectors;
    int64_t at;
    __device__ void begin(int row, int vector) {
        at = row * (int64_t)vectors + vector;
    }
    __device__ int64_t index(int i) const {
        return at + i * vectors;
    }
};

// An elementwise function of INPUTS inputs. The outputs and the first inputs are tensors [M,N].
// Inputs from index WIDE on are N columns of a tensor [M,2N]. Inputs from index ROW on are one row
// [N], which is used for every row. apply(in, out) computes 8 values of each output.
struct Function {
    enum { WIDE = 99, ROW = 99, OUTPUTS = 1, GRADIENT = 0, WAITS = 0 };
};

template <typename FUNCTION> struct Elementwise : Position, FUNCTION {
    enum { INPUTS = FUNCTION::INPUTS, WIDE = FUNCTION::WIDE, ROW = FUNCTION::ROW };
    // If all inputs are tensors [M,N], write_bf16_kernel treats each tensor as one row.
    enum { NEEDS_ROW = (int)WIDE < (int)INPUTS || (int)ROW < (int)INPUTS };
    enum { OUTPUTS = FUNCTION::OUTPUTS, GRADIENT = FUNCTION::GRADIENT, WAITS = FUNCTION::WAITS };
    struct Raw {
        uint4 x[INPUTS];
    };
    const Bf16 *x[INPUTS];
    int64_t wide_at;
    int vector;
    template <typename... POINTERS>
    Elementwise(int N, POINTERS... inputs) : Position{N / VEC}, x{inputs...} {
    }
    __device__ void begin(int row, int vector) {
        Position::begin(row, vector);
        wide_at = row * (int64_t)(2 * vectors) + vector;
        this->vector = vector;
    }
    __device__ Raw fetch(int i) const {
        Raw raw;
        for (int k = 0; k < INPUTS; k++) {
            raw.x[k] = raw8(x[k], k >= ROW    ? vector
                                  : k >= WIDE ? wide_at + i * 2 * vectors
                                              : index(i));
        }
        return raw;
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 in[INPUTS];
        for (int k = 0; k < INPUTS; k++) { in[k] = unpack8(raw.x[k]); }
        FUNCTION::apply(in, values);
    }
};

struct Cast : Function {
    enum { INPUTS = 1, GRADIENT = 1, WAITS = 1 };
    static __device__ void apply(const Floats8 *in, Floats8 *out) {
        out[0] = in[0];
    }
};
typedef Elementwise<Cast> CastSource;

// ---- to FP8: a block takes a tile, a thread 4 rows x 8 columns of it ----------------------------

enum {
    TILE_THREADS = 256,
    THREAD_ROWS = 4,
    COLUMN_GROUPS = TILE_THREADS / (TILE_ROWS / THREAD_ROWS),
    TILE_COLUMNS = COLUMN_GROUPS * VEC,
    TILE_WORDS = tile_word<TILE_ROWS>(TILE_COLUMNS, 0)
};

// put_sums and take_sum, with a barrier between them, compute the column sums of a tile in a fixed
// order. In put_sums, each warp adds up its rows and writes its column sums to
// shared[warp][COLUMNS]. `mine` has the lane's sums of 8 columns. COLUMNS / VEC neighbouring lanes
// have sums over the same rows. All threads must call put_sums.
template <int COLUMNS> __device__ __forceinline__ void put_sums(float *shared, Floats8 mine) {
    enum { LANES = COLUMNS / VEC };
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
#pragma unroll
        for (int lanes = LANES; lanes < WARP; lanes *= 2) {
            mine.v[j] += __shfl_xor_sync(~0u, mine.v[j], lanes);
        }
    }
    if (lane < LANES) { store_floats8(shared + warp * COLUMNS, lane, mine); }
}

// Returns the sum of column c over all warps.
template <int THREADS, int COLUMNS>
__device__ __forceinline__ float take_sum(const float *shared, int c) {
    float total = shared[c];
    for (int i = 1; i < THREADS / WARP; i++) { total += shared[i * COLUMNS + c]; }
    return total;
}

// Writes a thread block's tiles, one for each output, to the transposed form. Output k begins at
// column k * N of the tensor.
template <int ROWS, int COLUMNS, int THREADS, int OUTPUTS, int WORDS>
__device__ __forceinline__ void write_tiles(uint8_t *out, const uint32_t (&tiles)[OUTPUTS][WORDS],
                                            int first_row, int first_column, int M, int N) {
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
        uint8_t *to = out + (int64_t)(first_column + k * N) * M + first_row;
        write_columns<ROWS>(to, tiles[k], COLUMNS, N - first_column, M - first_row, M, threadIdx.x,
                            THREADS);
    }
}

template <typename SOURCE, Fp8Type TYPE, bool SUMS>
__global__ void __launch_bounds__(TILE_THREADS)
    quantize_kernel(SOURCE source, Operand out, float *partials, int M, int N) {
    enum { OUTPUTS = SOURCE::OUTPUTS };
    __shared__ __align__(16) uint32_t tiles[OUTPUTS][TILE_WORDS];
    int first_row = blockIdx.y * TILE_ROWS, first_column = blockIdx.x * TILE_COLUMNS;
    int row = first_row + threadIdx.x / COLUMN_GROUPS * THREAD_ROWS;
    int column = first_column + threadIdx.x % COLUMN_GROUPS * VEC;
    bool first = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
    bool measured = SOURCE::WAITS && out.scaling == SCALE_CURRENT;
    float scale = measured ? measured_scale(out.scale, out.target, first) : out.scale->scale;
    float largest = 0.0f;
    uint2 codes[OUTPUTS][THREAD_ROWS] = {};
    Floats8 sum = {};
    source.begin(row, column / VEC);
    if (column < N && row < M) {
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
                largest = amax8(largest, values[k]);
                codes[k][i] = encode8<TYPE>(values[k], scale);
                if (out.rows.codes != nullptr) {
                    *reinterpret_cast<uint2 *>(out.rows.codes + at + k * N) = codes[k][i];
                }
            }
            for (int j = 0; j < VEC && SUMS; j++) { sum.v[j] += values[0].v[j]; }
        }
    }
    if (SUMS) {
        __shared__ __align__(16) float sums[TILE_THREADS / WARP * TILE_COLUMNS];
        put_sums<TILE_COLUMNS>(sums, sum);
        __syncthreads();
        int c = threadIdx.x, at = first_column + c;
        if (c < TILE_COLUMNS && at < N) {
            partials[(int64_t)blockIdx.y * N + at] = take_sum<TILE_THREADS, TILE_COLUMNS>(sums, c);
        }
    }
    if (out.columns.codes != nullptr) {
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) {
            put_codes<TILE_ROWS>(tiles[k], codes[k], threadIdx.x % COLUMN_GROUPS * VEC,
                                 threadIdx.x / COLUMN_GROUPS);
        }
        __syncthreads();
        write_tiles<TILE_ROWS, TILE_COLUMNS, TILE_THREADS>(out.columns.codes, tiles, first_row,
                                                           first_column, M, N);
    }
    if (!measured && out.writes_amax) { block_amax(&out.scale->amax, largest); }
}

// ---- to FP8 by blocks: a tile is 128 x 128, of which a thread takes 4 rows x 8 columns ----------
//
// The values are rounded to BF16. From the rounded values both FP8 forms are encoded, each with its
// own scales. Amaxes are computed on packed pairs of BF16 values. The values are compared as
// unsigned integers: without the sign bit, their order is that of the magnitudes, and NaN is the
// largest.

enum { SQUARE_THREADS = FP8_BLOCK / THREAD_ROWS * FP8_BLOCK / VEC };

// Returns a pair: the largest magnitude of the lower halves of four pairs of BF16, and the largest
// of the upper halves.
__device__ __forceinline__ uint32_t amax_of_pairs(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __vmaxu2(__vimax3_u16x2(a & 0x7fff7fffu, b & 0x7fff7fffu, c & 0x7fff7fffu),
                    d & 0x7fff7fffu);
}

// Returns the amaxes of a thread's 4 rows, over the FP8_BLOCK / VEC lanes that share these rows.
// The lower half of these lanes gets the amaxes of rows 0 and 1, the upper half those of rows 2 and
// 3.
__device__ __forceinline__ uint32_t amax_of_rows(const uint4 (&rows)[THREAD_ROWS]) {
    enum { HALF = FP8_BLOCK / VEC / 2 };
    uint32_t amax[THREAD_ROWS];
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        amax[i] = amax_of_pairs(rows[i].x, rows[i].y, rows[i].z, rows[i].w);
    }
    uint32_t low = __vmaxu2(__byte_perm(amax[0], amax[1], 0x5410),
                            __byte_perm(amax[0], amax[1], 0x7632));
    uint32_t high = __vmaxu2(__byte_perm(amax[2], amax[3], 0x5410),
                             __byte_perm(amax[2], amax[3], 0x7632));
    bool upper = threadIdx.x & HALF;
    low = __vmaxu2(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, HALF));
#pragma unroll
    for (int lanes = HALF / 2; lanes > 0; lanes /= 2) {
        low = __vmaxu2(low, __shfl_xor_sync(~0u, low, lanes));
    }
    return low;
}

// Returns the amaxes of a thread's 8 columns over the rows of its warp.
__device__ __forceinline__ uint4 amax_of_columns(const uint4 (&rows)[THREAD_ROWS]) {
    uint4 amax = {amax_of_pairs(rows[0].x, rows[1].x, rows[2].x, rows[3].x),
                  amax_of_pairs(rows[0].y, rows[1].y, rows[2].y, rows[3].y),
                  amax_of_pairs(rows[0].z, rows[1].z, rows[2].z, rows[3].z),
                  amax_of_pairs(rows[0].w, rows[1].w, rows[2].w, rows[3].w)};
    amax.x = __vmaxu2(amax.x, __shfl_xor_sync(~0u, amax.x, WARP / 2));
    amax.y = __vmaxu2(amax.y, __shfl_xor_sync(~0u, amax.y, WARP / 2));
    amax.z = __vmaxu2(amax.z, __shfl_xor_sync(~0u, amax.z, WARP / 2));
    amax.w = __vmaxu2(amax.w, __shfl_xor_sync(~0u, amax.w, WARP / 2));
    return amax;
}

// Amaxes and scales of an output's tile, which the threads exchange in shared memory.
struct TileAmaxes {
    uint16_t columns[SQUARE_THREADS / WARP][FP8_BLOCK]; // each column's amax over a warp's rows
    uint16_t rows[FP8_BLOCK];
    float row_scales[FP8_BLOCK], column_scales[FP8_BLOCK];
};

// Returns the largest of the rows' amaxes.
__device__ __forceinline__ uint32_t largest_row(const TileAmaxes &tile) {
    const uint32_t *pairs = reinterpret_cast<const uint32_t *>(tile.rows);
    uint32_t amax = __vmaxu2(pairs[threadIdx.x % WARP], pairs[threadIdx.x % WARP + WARP]);
    return __reduce_max_sync(~0u, max(amax & 0xffff, amax >> 16));
}

template <typename SOURCE, Fp8Type TYPE, bool SUMS>
__global__ void __launch_bounds__(SQUARE_THREADS, SOURCE::OUTPUTS == 1 ? 3 : 2)
    quantize_blocks_kernel(SOURCE source, Operand out, float *partials, int M, int N) {
    enum { OUTPUTS = SOURCE::OUTPUTS, LANES = FP8_BLOCK / VEC };
    // how many rows are fetched together: as many as fit in the registers
    enum { AT_ONCE = sizeof(typename SOURCE::Raw) > sizeof(uint4) ? 2 : THREAD_ROWS };
    __shared__ __align__(16) uint32_t tiles[OUTPUTS][tile_word<FP8_BLOCK>(FP8_BLOCK, 0)];
    __shared__ __align__(16) TileAmaxes amaxes[OUTPUTS];
    __shared__ __align__(16) float sums[SUMS ? SQUARE_THREADS / WARP * FP8_BLOCK : 4];
    // the last rows come first: the previous kernel wrote them last, so L2 may still have them
    const int tile_row = gridDim.y - 1 - blockIdx.y, first_row = tile_row * FP8_BLOCK;
    const int first_column = blockIdx.x * FP8_BLOCK, group = threadIdx.x / LANES;
    const int within = threadIdx.x % LANES * VEC, column = first_column + within;
    const int row = first_row + group * THREAD_ROWS;
    const int width = OUTPUTS * N; // columns of the whole tensor
    const bool inside = row < M && column < N;
    uint4 values[OUTPUTS][THREAD_ROWS] = {};
    Floats8 sum = {};
    source.begin(row, column / VEC);
    if (inside) {
#pragma unroll
        for (int first = 0; first < THREAD_ROWS; first += AT_ONCE) {
            typename SOURCE::Raw raw[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) { raw[i] = source.fetch(first + i); }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                Floats8 x[OUTPUTS];
                source.compute(first + i, raw[i], x);
#pragma unroll
                for (int k = 0; k < OUTPUTS; k++) { values[k][first + i] = pack8(x[k]); }
                // the inputs of a cast are BF16 values, which need no rounding
                if constexpr (std::is_same_v<SOURCE, CastSource>) {
                    values[0][first + i] = raw[i].x[0];
                }
                Floats8 rounded = unpack8(values[0][first + i]);
#pragma unroll
                for (int j = 0; j < VEC && SUMS; j++) { sum.v[j] += rounded.v[j]; }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
        uint32_t rows = amax_of_rows(values[k]);
        uint4 columns = amax_of_columns(values[k]);
        if (within % (FP8_BLOCK / 2) == 0) {
            uint32_t *to = reinterpret_cast<uint32_t *>(amaxes[k].rows + group * THREAD_ROWS);
            to[within / (FP8_BLOCK / 2)] = rows;
        }
        if (threadIdx.x % WARP < LANES) {
            uint16_t *to = amaxes[k].columns[threadIdx.x / WARP] + within;
            *reinterpret_cast<uint4 *>(to) = columns;
        }
    }
    if (SUMS) { put_sums<FP8_BLOCK>(sums, sum); }
    __syncthreads();
    // each row and each column of each output has a thread that computes its scale; the 128 threads
    // after these add up the column sums
    const int c = threadIdx.x % FP8_BLOCK, part = threadIdx.x / FP8_BLOCK, output = part / 2;
    if (output < OUTPUTS) {
        TileAmaxes &mine = amaxes[output];
        const bool square = out.scaling == SCALE_BLOCK_128X128, transposed = part % 2;
        // how many rows and columns this form has
        const int rows = transposed ? width : M, columns = transposed ? M : width;
        const int in_row = transposed ? first_row : output * N + first_column;
        const int in_column = (transposed ? output * N + first_column : first_row) + c;
        const int end = transposed ? (output + 1) * N : M;
        uint32_t amax = mine.rows[c];
        if (square) {
            amax = largest_row(mine);
        } else if (transposed) {
            amax = mine.columns[0][c];
#pragma unroll
            for (int i = 1; i < SQUARE_THREADS / WARP; i++) {
                amax = max(amax, (uint32_t)mine.columns[i][c]);
            }
        }
        float scale = fp8_block_scale(low_bf16(amax), out.target, out.power_of_two);
        float *to = transposed ? out.columns.inverse : out.rows.inverse;
        (transposed ? mine.column_scales : mine.row_scales)[c] = scale;
        if (to != nullptr && in_column < end && (c == 0 || !square)) {
            to[fp8_scale_index(out.scaling, rows, columns, in_column, in_row)] = 1.0f / scale;
        }
    } else if (SUMS && part == 2 * OUTPUTS && first_column + c < N) {
        partials[(int64_t)tile_row * N + first_column + c] = take_sum<SQUARE_THREADS, FP8_BLOCK>(
            sums, c);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < OUTPUTS; k++) {
        float4 rows = reinterpret_cast<const float4 *>(amaxes[k].row_scales)[group];
        float row_scales[THREAD_ROWS] = {rows.x, rows.y, rows.z, rows.w};
        uint32_t codes[2][THREAD_ROWS];
#pragma unroll
        for (int half = 0; half < 2; half++) { // each half has 4 columns
            float4 columns = reinterpret_cast<const float4 *>(amaxes[k].column_scales +
                                                              within)[half];
            float column_scales[4] = {columns.x, columns.y, columns.z, columns.w};
            float x[THREAD_ROWS][4];
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; i++) {
                uint32_t a = half == 0 ? values[k][i].x : values[k][i].z;
                uint32_t b = half == 0 ? values[k][i].y : values[k][i].w;
                x[i][0] = low_bf16(a);
                x[i][1] = high_bf16(a);
                x[i][2] = low_bf16(b);
                x[i][3] = high_bf16(b);
                codes[half][i] = encode4<TYPE>(x[i], row_scales[i]);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float transposed[THREAD_ROWS] = {x[0][j], x[1][j], x[2][j], x[3][j]};
                tiles[k][tile_word<FP8_BLOCK>(within + 4 * half + j, group)] = encode4<TYPE>(
                    transposed, column_scales[j]);
            }
        }
        if (out.rows.codes == nullptr || !inside) { continue; }
        int64_t offset = row * (int64_t)width + k * N + column;
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++, offset += width) {
            uint2 both = make_uint2(codes[0][i], codes[1][i]);
            *reinterpret_cast<uint2 *>(out.rows.codes + offset) = both;
        }
    }
    if (out.columns.codes == nullptr) { return; }
    __syncthreads();
    write_tiles<FP8_BLOCK, FP8_BLOCK, SQUARE_THREADS>(out.columns.codes, tiles, first_row,
                                                      first_column, M, N);
}

static inline dim3 tile_grid(int M, int N) {
    return dim3(divide_up(N, TILE_COLUMNS), divide_up(M, TILE_ROWS));
}

template <Fp8Type TYPE, bool SUMS, typename SOURCE>
static void quantize_to(const SOURCE &source, const Operand &out, float *partials, int M, int N,
                        cudaStream_t stream) {
    auto kernel = quantize_kernel<SOURCE, TYPE, SUMS>;
    dim3 grid = tile_grid(M, N);
    int threads = TILE_THREADS;
    if (fp8_by_blocks(out.scaling)) {
        kernel = quantize_blocks_kernel<SOURCE, TYPE, SUMS>;
        grid = dim3(divide_up(N, FP8_BLOCK), divide_up(M, FP8_BLOCK));
        threads = SQUARE_THREADS;
    }
    launch(kernel, grid, threads, stream, source, out, partials, M, N);
}

// Writes the source's values, M x N for each output, to the FP8 forms. With SUMS it also computes
// the column sums of the only output, from one partial sum for each row of tiles.
template <bool SUMS, typename SOURCE>
static void quantize(const char *name, const SOURCE &source, const Operand &out, Gradient sums,
                     Scratch scratch, int M, int N, cudaStream_t stream) {
    if (SUMS) { check_scratch(name, scratch, (int64_t)divide_up(M, TILE_ROWS) * N); }
    if (out.type == FP8_E4M3) {
        quantize_to<FP8_E4M3, SUMS>(source, out, scratch.data, M, N, stream);
    } else if constexpr (SOURCE::GRADIENT) {
        quantize_to<FP8_E5M2, SUMS>(source, out, scratch.data, M, N, stream);
    } else {
        die("%s: forward operands are E4M3", name);
    }
    if (SUMS) { sum_partials({{sums}, scratch.data, divide_up(M, TILE_ROWS), N}, stream); }
}

// ---- to BF16: one vector per thread -------------------------------------------------------------

// Writes a source's values in BF16. If amax is not NULL, *amax is raised to at least their amax.
template <typename SOURCE>
__global__ void __launch_bounds__(256, SM_THREADS / 256)
    write_bf16_kernel(SOURCE source, Bf16 *out, float *amax, int count) {
    enum { OUTPUTS = SOURCE::OUTPUTS };
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float largest = 0.0f;
    if (i < count) {
        Floats8 values[OUTPUTS];
        int row = SOURCE::NEEDS_ROW ? i / source.vectors : 0, vector = i - row * source.vectors;
        source.begin(row, vector);
        source.compute(0, source.fetch(0), values);
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) {
            uint4 packed = pack8(values[k]);
            int to = (row * OUTPUTS + k) * source.vectors + vector;
            reinterpret_cast<uint4 *>(out)[to] = packed;
            if (amax != nullptr) { largest = amax8(largest, unpack8(packed)); }
        }
    }
    if (amax != nullptr) { block_amax(amax, largest); }
}

// ---- column sums --------------------------------------------------------------------------------

// How many columns a thread block sums. A block has 8 rows of 32 threads; a thread sums a vector of
// 8 columns.
enum { SUM_COLUMNS = WARP * VEC };

// A thread block adds up its columns over a part of the rows, and writes the sums to
// partials[blockIdx.y][N]. With WRITES, the values are first rounded to BF16 and written to `out`;
// and if amax is not NULL, *amax is raised to at least their amax.
template <typename SOURCE, bool WRITES>
__global__ void __launch_bounds__(WARP *ROW_LANES)
    column_sums_kernel(SOURCE source, Bf16 *out, float *amax, float *partials, int M, int N) {
    __shared__ float shared[ROW_LANES][SUM_COLUMNS];
    int i = blockIdx.x * WARP + threadIdx.x;
    float largest = 0.0f;
    Floats8 sum = {};
    if (i < source.vectors) {
#pragma unroll 4
        for (int64_t row = blockIdx.y * ROW_LANES + threadIdx.y; row < M;
             row += gridDim.y * ROW_LANES) {
            Floats8 v;
            source.begin((int)row, i);
            source.compute(0, source.fetch(0), &v);
            if (WRITES) {
                v = unpack8(pack8(v));
                store8(out, row * source.vectors + i, v);
                if (amax != nullptr) { largest = amax8(largest, v); }
            }
            add8(sum, v);
        }
    }
    for (int j = 0; j < VEC; j++) { shared[threadIdx.y][threadIdx.x * VEC + j] = sum.v[j]; }
    __syncthreads();
    // each of the 256 threads adds up one of the 256 columns
    int column = threadIdx.y * WARP + threadIdx.x;
    float total = shared[0][column];
    for (int lane = 1; lane < ROW_LANES; lane++) { total += shared[lane][column]; }
    int64_t at = (int64_t)blockIdx.x * SUM_COLUMNS + column;
    if (at < N) { partials[(int64_t)blockIdx.y * N + at] = total; }
    if (WRITES && amax != nullptr) { block_amax(amax, largest); }
}

template <bool WRITES, typename SOURCE>
static void sum_columns(const char *name, const SOURCE &source, Bf16 *out, float *amax,
                        Gradient sums, Scratch scratch, int M, int N, cudaStream_t stream) {
    int across = divide_up(N, SUM_COLUMNS), down = min(PARTIALS, 8 * PARTIALS / across);
    dim3 grid(across, min(max(1, down), divide_up(M, ROW_LANES))), block(WARP, ROW_LANES);
    check_scratch(name, scratch, (int64_t)grid.y * N);
    launch(column_sums_kernel<SOURCE, WRITES>, grid, block, stream, source, out, amax, scratch.data,
           M, N);
    sum_partials({{sums}, scratch.data, (int)grid.y, N}, stream);
}

// The two passes of gpu_quantize, for other launchers. measure_bf16 measures the amax of out.bf16
// [M,N] if out has SCALE_CURRENT and writes_amax. quantize_bf16 writes the FP8 forms and column
// sums that are requested.
void measure_bf16(Operand out, int M, int N, cudaStream_t stream);
void quantize_bf16(Operand out, Gradient sums, Scratch scratch, int M, int N, cudaStream_t stream);

// ---- to an operand ------------------------------------------------------------------------------

// Writes the source's values, M x N for each output, to the operand. A fused operand gets only its
// FP8 forms. Any other operand gets BF16, from which its FP8 forms are made. With SUMS, column sums
// are computed, too.
template <bool SUMS, typename SOURCE>
static void produce(const char *name, const SOURCE &source, Operand out, Gradient sums,
                    Scratch scratch, int M, int N, cudaStream_t stream) {
    int count = (int)((int64_t)M * N / VEC);
    check_operand(name, &out, M, (int64_t)SOURCE::OUTPUTS * N);
    for (const Bf16 *x : source.x) { check_aligned(name, {x}); }
    // whether the block of 128 columns in which the first output ends also has columns of the
    // second: its one scale then depends on both, and the fused kernel cannot compute it
    bool shared_blocks = fp8_by_blocks(out.scaling) && SOURCE::OUTPUTS > 1 && N % FP8_BLOCK != 0;
    if (out.fused && !shared_blocks) {
        quantize<SUMS>(name, source, out, sums, scratch, M, N, stream);
        return;
    }
    if constexpr (SUMS) {
        sum_columns<true>(name, source, out.bf16, measured_amax(out), sums, scratch, M, N, stream);
    } else {
        launch(write_bf16_kernel<SOURCE>, divide_up(count, 256), 256, stream, source, out.bf16,
               measured_amax(out), count);
    }
    quantize_bf16(out, {}, {}, M, SOURCE::OUTPUTS * N, stream);
}
