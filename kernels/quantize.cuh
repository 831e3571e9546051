// One pass over a tensor [M,N] whose values a source computes, or reads, and what becomes of them:
// FP8, as it is and transposed (quantize); BF16 (produce); column sums (sum_columns).
//
// A source is copied by each thread. It has
//   vectors                   of 8 columns in a row
//   OUTPUTS                   tensors side by side, each N wide
//   GRADIENT                  0: an operand of forward products, which is E4M3 in every recipe
//   WAITS                     its scale may be measured
//   begin(row, vector)        takes its place: 8 columns, from row `row` on
//   fetch(i)                  loads what row + i needs
//   compute(i, raw, values)   8 values of each output
// and, where it is produced in BF16,
//   begin_at(i)               takes its place, vector i of the tensor, for fetch(0)
#ifndef LLM8_QUANTIZE_CUH
#define LLM8_QUANTIZE_CUH

#include "fp8.cuh"

__device__ __forceinline__ uint4 raw8(const Bf16 *x, int64_t i) {
    return reinterpret_cast<const uint4 *>(x)[i];
}

// A tensor read as it lies.
struct PlainPlace {
    enum { OUTPUTS = 1, GRADIENT = 0, WAITS = 0 };
    int vectors;
    int64_t at;
    __device__ void begin(int row, int vector) {
        at = row * (int64_t)vectors + vector;
    }
    __device__ void begin_at(int64_t i) {
        at = i;
    }
    __device__ int64_t place(int i) const {
        return at + i * vectors;
    }
};

// Values as they are.
struct CastSource : PlainPlace {
    enum { GRADIENT = 1, WAITS = 1 };
    typedef uint4 Raw;
    const Bf16 *x;
    CastSource(const Bf16 *values, int N) : PlainPlace{N / VEC}, x(values) {
    }
    __device__ Raw fetch(int i) const {
        return raw8(x, place(i));
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        values[0] = unpack8(raw);
    }
};

// ---- to FP8: a block takes a tile, a thread 4 rows x 8 columns of it ----
//
// A thread computes its values, writes its rows' codes, turns 4 x 4 codes in registers, and leaves
// the columns in shared memory, from where they are written 16 bytes at a time.

enum {
    TILE_THREADS = 256,
    THREAD_ROWS = 4,
    COLUMN_GROUPS = TILE_THREADS / (TILE_ROWS / THREAD_ROWS),
    TILE_COLUMNS = COLUMN_GROUPS * VEC,
    COLUMN_WORDS = TILE_ROWS / 4 + 1, // a column's codes, padded
    COLUMN_CHUNKS = TILE_ROWS / 16    // 16-byte pieces of a column
};

struct Tile {
    uint32_t words[TILE_COLUMNS * COLUMN_WORDS];

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
    // many there are from there on. All threads call it.
    __device__ __forceinline__ void write(uint8_t *out, int columns, int rows, int M) const {
#pragma unroll
        for (int i = threadIdx.x; i < TILE_COLUMNS * COLUMN_CHUNKS; i += TILE_THREADS) {
            int c = i / COLUMN_CHUNKS, chunk = i % COLUMN_CHUNKS;
            const uint32_t *from = words + c * COLUMN_WORDS + chunk * 4;
            if (c < columns && chunk * 16 < rows) {
                uint4 codes = make_uint4(from[0], from[1], from[2], from[3]);
                *reinterpret_cast<uint4 *>(out + c * (int64_t)M + chunk * 16) = codes;
            }
        }
    }
};

// Column sums of a tile, in a fixed order, to partials [N]. All threads call it.
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
    partials[column + c] = total;
}

template <typename SOURCE, Fp8Type TYPE, bool SUMS, bool COUNTS>
__global__ void __launch_bounds__(TILE_THREADS)
    quantize_kernel(SOURCE source, Operand out, Fp8Tensor q, float *partials, int M, int N) {
    enum { OUTPUTS = SOURCE::OUTPUTS };
    __shared__ Tile tiles[OUTPUTS];
    int first_row = blockIdx.y * TILE_ROWS, first_column = blockIdx.x * TILE_COLUMNS;
    int row = first_row + threadIdx.x / COLUMN_GROUPS * THREAD_ROWS;
    int column = first_column + threadIdx.x % COLUMN_GROUPS * VEC;
    bool first = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
    bool measured = SOURCE::WAITS && q.mode == SCALE_MEASURED;
    float scale = measured ? measured_scale(q, first) : q.live->scale, range = 0.0f;
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
                range = range8(range, values[k]);
                codes[k][i] = encode8<TYPE>(values[k], scale);
                if (COUNTS) { count8(q.counts, values[k], scale, codes[k][i], TYPE); }
                if (out.fp8 != nullptr) {
                    *reinterpret_cast<uint2 *>(out.fp8 + at + k * N) = codes[k][i];
                }
            }
#pragma unroll
            for (int j = 0; j < VEC && SUMS; j++) { sum.v[j] += values[0].v[j]; }
        }
    }
    if (COUNTS && first) { q.counts->elements += (int64_t)M * N * OUTPUTS; }
    if (SUMS) { write_sums(partials + (int64_t)blockIdx.y * N, sum, first_column, N); }
    if (out.fp8_t != nullptr) {
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) { tiles[k].put(codes[k]); }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++) {
            uint8_t *to = out.fp8_t + (int64_t)(first_column + k * N) * M + first_row;
            tiles[k].write(to, N - first_column, M - first_row, M);
        }
    }
    if (!measured && q.record) { block_amax(&q.slot->amax, range); }
}

static inline dim3 tile_grid(int M, int N) {
    return dim3(divide_up(N, TILE_COLUMNS), divide_up(M, TILE_ROWS));
}

template <Fp8Type TYPE, bool SUMS, typename SOURCE>
static void launch_quantize(const SOURCE &source, const Operand &out, const Fp8Tensor &q,
                            float *partials, int M, int N, cudaStream_t stream) {
    auto kernel = q.counts != NULL ? quantize_kernel<SOURCE, TYPE, SUMS, true>
                                   : quantize_kernel<SOURCE, TYPE, SUMS, false>;
    kernel<<<tile_grid(M, N), TILE_THREADS, 0, stream>>>(source, out, q, partials, M, N);
    LAUNCH_CHECK();
}

// The source's values, M x N an output, to the FP8 forms; SUMS: with column sums, of which each
// tile of rows leaves partial sums.
template <bool SUMS, typename SOURCE>
static void quantize(const char *name, const SOURCE &source, const Operand &out, const Fp8Tensor &q,
                     Gradient sums, Scratch scratch, int M, int N, cudaStream_t stream) {
    if (SUMS) { check_scratch(name, scratch, (int64_t)divide_up(M, TILE_ROWS) * N); }
    if (q.type == FP8_E4M3) {
        launch_quantize<FP8_E4M3, SUMS>(source, out, q, scratch.data, M, N, stream);
    } else if constexpr (SOURCE::GRADIENT) {
        launch_quantize<FP8_E5M2, SUMS>(source, out, q, scratch.data, M, N, stream);
    } else {
        die("%s: forward operands are E4M3", name);
    }
    if (SUMS) { sum_partials({{sums}, scratch.data, divide_up(M, TILE_ROWS), N}, stream); }
}

// ---- to BF16: a thread a vector ----

// amax: of what is written, unless NULL.
template <typename SOURCE>
__global__ void produce_kernel(SOURCE source, Bf16 *out, float *amax, int64_t count) {
    enum { OUTPUTS = SOURCE::OUTPUTS };
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float range = 0.0f;
    if (i < count) {
        Floats8 values[OUTPUTS];
        source.begin_at(i);
        source.compute(0, source.fetch(0), values);
        int64_t to = OUTPUTS == 1 ? i : i + i / source.vectors * ((OUTPUTS - 1) * source.vectors);
#pragma unroll
        for (int k = 0; k < OUTPUTS; k++, to += source.vectors) {
            uint4 packed = pack8(values[k]);
            reinterpret_cast<uint4 *>(out)[to] = packed;
            if (amax != nullptr) { range = range8(range, unpack8(packed)); }
        }
    }
    if (amax != nullptr) { block_amax(amax, range); }
}

// The source's values, M x N an output, to the operand, which is not fused.
template <typename SOURCE>
static void produce(const SOURCE &source, const Operand &out, const Fp8Tensor &q, int M, int N,
                    cudaStream_t stream) {
    int64_t count = (int64_t)M * N / VEC;
    produce_kernel<<<divide_up(count, 256), 256, 0, stream>>>(source, out.bf16, measured_amax(q),
                                                              count);
    LAUNCH_CHECK();
    gpu_quantize(out, q, {}, {}, M, SOURCE::OUTPUTS * N, stream);
}

// ---- to column sums ----

enum { SUM_COLUMNS = WARP * VEC }; // of a block, whose threads are 32 vectors wide, 8 rows high

// The column sums of a part of the rows a block: partials[blockIdx.y][N]. WRITES: of the values
// rounded to BF16, which go to out, with their amax.
template <typename SOURCE, bool WRITES>
__global__ void __launch_bounds__(WARP *ROW_LANES)
    column_sums_kernel(SOURCE source, Bf16 *out, float *amax, float *partials, int M, int N) {
    __shared__ float shared[ROW_LANES][SUM_COLUMNS];
    int i = blockIdx.x * WARP + threadIdx.x;
    float range = 0.0f;
    Floats8 sum = {};
    if (i < source.vectors) {
#pragma unroll 4
        for (int64_t row = blockIdx.y * ROW_LANES + threadIdx.y; row < M;
             row += gridDim.y * ROW_LANES) {
            Floats8 v;
            source.begin((int)row, i);
            source.compute(0, source.fetch(0), &v);
            if (WRITES) {
                v = rounded8(v);
                store8(out, row * source.vectors + i, v);
                if (amax != nullptr) { range = range8(range, v); }
            }
#pragma unroll
            for (int j = 0; j < VEC; j++) { sum.v[j] += v.v[j]; }
        }
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) { shared[threadIdx.y][threadIdx.x * VEC + j] = sum.v[j]; }
    __syncthreads();
    int column = threadIdx.y * WARP + threadIdx.x; // 256 threads, 256 columns
    float total = shared[0][column];
    for (int lane = 1; lane < ROW_LANES; lane++) { total += shared[lane][column]; }
    int64_t at = (int64_t)blockIdx.x * SUM_COLUMNS + column;
    if (at < N) { partials[(int64_t)blockIdx.y * N + at] = total; }
    if (WRITES && amax != nullptr) { block_amax(amax, range); }
}

template <bool WRITES, typename SOURCE>
static void sum_columns(const char *name, const SOURCE &source, Bf16 *out, float *amax,
                        Gradient sums, Scratch scratch, int M, int N, cudaStream_t stream) {
    int across = divide_up(N, SUM_COLUMNS), down = min(PARTIALS, 8 * PARTIALS / across);
    dim3 grid(across, min(max(1, down), divide_up(M, ROW_LANES))), block(WARP, ROW_LANES);
    check_scratch(name, scratch, (int64_t)grid.y * N);
    column_sums_kernel<SOURCE, WRITES>
        <<<grid, block, 0, stream>>>(source, out, amax, scratch.data, M, N);
    LAUNCH_CHECK();
    sum_partials({{sums}, scratch.data, (int)grid.y, N}, stream);
}

#endif
