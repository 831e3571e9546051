// Kernels that compute a tensor, or read one, and write it in FP8: as it is and transposed, in one
// pass. They share one tile: 128 rows x 64 columns a block, 4 rows x 8 columns a thread. A thread
// computes its values, writes its rows' codes, turns 4 x 4 codes in registers, and leaves the
// columns in shared memory, from where they go out 16 bytes at a time.
#include "activation.cuh"
#include "adamw.cuh"
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

// Where the values of a kernel come from. A source has OUTPUTS tensors side by side, each N wide,
// and computes 8 values of each of them: load(row, vector, values).
template <int N> struct Source {
    enum { OUTPUTS = N };
};

struct CastSource : Source<1> {
    const Bf16 *x;
    int vectors;
    __device__ void load(int64_t row, int vector, Floats8 *values) const {
        values[0] = load8(x, row * vectors + vector);
    }
};

struct FloatSource : Source<1> {
    const float *x;
    int vectors;
    __device__ void load(int64_t row, int vector, Floats8 *values) const {
        values[0] = load_floats8(x, TYPE_F32, row * vectors + vector);
    }
};

struct NormSource : Source<1> {
    const Bf16 *x, *weight, *bias;
    const float *mean, *rstd;
    int vectors;
    __device__ void load(int64_t row, int vector, Floats8 *values) const {
        float mu = mean != nullptr ? mean[row] : 0.0f, r = rstd[row];
        Floats8 v = load8(x, row * vectors + vector), w = load8(weight, vector);
        Floats8 b = bias != nullptr ? load8(bias, vector) : Floats8{};
#pragma unroll
        for (int j = 0; j < VEC; j++) { values[0].v[j] = (v.v[j] - mu) * r * w.v[j] + b.v[j]; }
    }
};

struct GeluSource : Source<1> {
    const Bf16 *x;
    int vectors;
    __device__ void load(int64_t row, int vector, Floats8 *values) const {
        Floats8 v = load8(x, row * vectors + vector);
#pragma unroll
        for (int j = 0; j < VEC; j++) { values[0].v[j] = gelu(v.v[j]); }
    }
};

struct GeluBackwardSource : Source<1> {
    const Bf16 *dout, *x;
    int vectors;
    __device__ void load(int64_t row, int vector, Floats8 *values) const {
        Floats8 v = load8(x, row * vectors + vector), d = load8(dout, row * vectors + vector);
#pragma unroll
        for (int j = 0; j < VEC; j++) { values[0].v[j] = d.v[j] * gelu_slope(v.v[j]); }
    }
};

struct SwigluSource : Source<1> {
    const Bf16 *x;
    int vectors;
    __device__ void load(int64_t row, int vector, Floats8 *values) const {
        Floats8 gate = load8(x, row * 2 * vectors + vector);
        Floats8 up = load8(x, (row * 2 + 1) * vectors + vector);
#pragma unroll
        for (int j = 0; j < VEC; j++) { values[0].v[j] = up.v[j] * gate.v[j] * sigmoid(gate.v[j]); }
    }
};

struct SwigluBackwardSource : Source<2> {
    const Bf16 *dout, *x;
    int vectors;
    __device__ void load(int64_t row, int vector, Floats8 *values) const {
        Floats8 gate = load8(x, row * 2 * vectors + vector);
        Floats8 up = load8(x, (row * 2 + 1) * vectors + vector);
        Floats8 d = load8(dout, row * vectors + vector);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float s = sigmoid(gate.v[j]), silu = gate.v[j] * s;
            values[0].v[j] = d.v[j] * up.v[j] * (s + silu * (1.0f - s));
            values[1].v[j] = d.v[j] * silu;
        }
    }
};

// Turns queries and keys back by their angle; values pass through. Half a head is whole vectors.
struct RopeBackwardSource : Source<1> {
    const Bf16 *x;
    const float *table;
    int vectors, T, turned_vectors, head_vectors;
    __device__ void load(int64_t row, int vector, Floats8 *values) const {
        values[0] = load8(x, row * vectors + vector);
        if (vector >= turned_vectors) { return; }
        int half = head_vectors / 2, at = vector % head_vectors;
        bool first = at < half;
        Floats8 partner = load8(x, row * vectors + vector + (first ? half : -half));
        const float *cosine = table + (row % T * head_vectors + (first ? at : at - half)) * VEC;
        const float *sine = cosine + half * VEC;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float s = first ? sine[j] : -sine[j];
            values[0].v[j] = values[0].v[j] * cosine[j] + partner.v[j] * s;
        }
    }
};

// The four rows of a thread: range, codes to rows, columns to the tile.
__device__ __forceinline__ void write_codes(const Fp8Out &out, const Floats8 (&values)[THREAD_ROWS],
                                            float scale, int64_t row, int column, int M, int width,
                                            Tile &tile, uint32_t &range) {
    uint2 codes[THREAD_ROWS];
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        range = range8(range, values[i]);
        codes[i] = encode8(values[i], scale, out.type);
        if (out.rows != nullptr && row + i < M) {
            *reinterpret_cast<uint2 *>(out.rows + (row + i) * width + column) = codes[i];
        }
    }
    if (out.columns == nullptr) { return; }
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y);
    int group = threadIdx.x / COLUMN_GROUPS, first = threadIdx.x % COLUMN_GROUPS * VEC;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        tile.words[(first + i) * COLUMN_WORDS + group] = codes[i].x;
        tile.words[(first + 4 + i) * COLUMN_WORDS + group] = codes[i].y;
    }
}

// The tile's columns to out.columns. All threads call it.
__device__ __forceinline__ void write_columns(const Fp8Out &out, const Tile &tile, int64_t row,
                                              int column, int last_column, int M) {
    for (int i = threadIdx.x; i < TILE_COLUMNS * CHUNKS; i += TILE_THREADS) {
        int c = i / CHUNKS, chunk = i % CHUNKS;
        const uint32_t *words = tile.words + c * COLUMN_WORDS + chunk * 4;
        if (column + c < last_column && row + chunk * 16 < M) {
            uint4 codes = make_uint4(words[0], words[1], words[2], words[3]);
            *reinterpret_cast<uint4 *>(out.columns + (column + c) * (int64_t)M + row +
                                       chunk * 16) = codes;
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

// M x N values a source; MEASURED: the scale comes from live->amax. partials: where column sums go,
// or NULL.
template <typename SOURCE, bool MEASURED, bool SUMS>
__global__ void __launch_bounds__(TILE_THREADS)
    quantize_kernel(SOURCE source, Fp8Out out, float *partials, int M, int N) {
    __shared__ Tile tiles[SOURCE::OUTPUTS];
    int group = threadIdx.x / COLUMN_GROUPS, width = N * SOURCE::OUTPUTS;
    int64_t first_row = (int64_t)blockIdx.y * TILE_ROWS, row = first_row + group * THREAD_ROWS;
    int first_column = blockIdx.x * TILE_COLUMNS;
    int column = first_column + threadIdx.x % COLUMN_GROUPS * VEC;
    bool announces = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
    float scale = MEASURED ? measured_scale(out, announces) : out.live->scale;
    Floats8 values[SOURCE::OUTPUTS][THREAD_ROWS] = {}, sum = {};
    uint32_t range = 0;
    if (column < N) {
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++) {
            Floats8 loaded[SOURCE::OUTPUTS];
            if (row + i >= M) { continue; }
            source.load(row + i, column / VEC, loaded);
#pragma unroll
            for (int k = 0; k < SOURCE::OUTPUTS; k++) { values[k][i] = loaded[k]; }
#pragma unroll
            for (int j = 0; j < VEC && SUMS; j++) { sum.v[j] += loaded[0].v[j]; }
        }
#pragma unroll
        for (int k = 0; k < SOURCE::OUTPUTS; k++) {
            write_codes(out, values[k], scale, row, column + k * N, M, width, tiles[k], range);
        }
    }
    if (SUMS) { write_sums(partials, sum, first_column, N); }
    if (out.columns != nullptr) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SOURCE::OUTPUTS; k++) {
            write_columns(out, tiles[k], first_row, first_column + k * N, (k + 1) * N, M);
        }
    }
    if (!MEASURED && out.record) { block_amax(&out.slot->amax, range); }
}

template <bool MEASURED, bool SUMS, typename SOURCE>
static void quantize(const SOURCE &source, const Fp8Out &out, float *partials, int M, int N,
                     cudaStream_t stream) {
    dim3 grid(divide_up(N, TILE_COLUMNS), divide_up(M, TILE_ROWS));
    quantize_kernel<SOURCE, MEASURED, SUMS>
        <<<grid, TILE_THREADS, 0, stream>>>(source, out, partials, M, N);
    LAUNCH_CHECK();
}

// With column sums where they are wanted. The partial sums are one a tile of rows.
template <bool MEASURED, typename SOURCE>
static void quantize_and_sum(const SOURCE &source, const Fp8Out &out, GradientOut sums,
                             float *scratch, int M, int N, cudaStream_t stream) {
    if (sums.data == NULL) {
        quantize<MEASURED, false>(source, out, NULL, M, N, stream);
        return;
    }
    quantize<MEASURED, true>(source, out, scratch, M, N, stream);
    sum_partials({{sums}, scratch, divide_up(M, TILE_ROWS), N}, stream);
}

void gpu_quantize(Fp8Out out, bool measured, GradientOut sums, const Bf16 *x, float *scratch, int M,
                  int N, cudaStream_t stream) {
    CastSource source;
    source.x = x;
    source.vectors = N / VEC;
    if (measured) {
        quantize_and_sum<true>(source, out, sums, scratch, M, N, stream);
    } else {
        quantize_and_sum<false>(source, out, sums, scratch, M, N, stream);
    }
}

void gpu_quantize_weights(Fp8Out out, bool measured, const float *x, int M, int N,
                          cudaStream_t stream) {
    FloatSource source;
    source.x = x;
    source.vectors = N / VEC;
    if (measured) {
        quantize<true, false>(source, out, NULL, M, N, stream);
    } else {
        quantize<false, false>(source, out, NULL, M, N, stream);
    }
}

void gpu_norm_forward_fp8(Fp8Out out, const float *mean, const float *rstd, const Bf16 *x,
                          const Bf16 *weight, const Bf16 *bias, int M, int C, cudaStream_t stream) {
    NormSource source;
    source.x = x;
    source.weight = weight;
    source.bias = bias;
    source.mean = mean;
    source.rstd = rstd;
    source.vectors = C / VEC;
    quantize<false, false>(source, out, NULL, M, C, stream);
}

void gpu_gelu_forward_fp8(Fp8Out out, const Bf16 *x, int M, int F, cudaStream_t stream) {
    GeluSource source;
    source.x = x;
    source.vectors = F / VEC;
    quantize<false, false>(source, out, NULL, M, F, stream);
}

void gpu_gelu_backward_fp8(Fp8Out out, GradientOut sums, const Bf16 *dout, const Bf16 *x,
                           float *scratch, int M, int F, cudaStream_t stream) {
    GeluBackwardSource source;
    source.dout = dout;
    source.x = x;
    source.vectors = F / VEC;
    quantize_and_sum<false>(source, out, sums, scratch, M, F, stream);
}

void gpu_swiglu_forward_fp8(Fp8Out out, const Bf16 *x, int M, int F, cudaStream_t stream) {
    SwigluSource source;
    source.x = x;
    source.vectors = F / VEC;
    quantize<false, false>(source, out, NULL, M, F, stream);
}

void gpu_swiglu_backward_fp8(Fp8Out out, const Bf16 *dout, const Bf16 *x, int M, int F,
                             cudaStream_t stream) {
    SwigluBackwardSource source;
    source.dout = dout;
    source.x = x;
    source.vectors = F / VEC;
    quantize<false, false>(source, out, NULL, M, F, stream);
}

void gpu_rope_backward_fp8(Fp8Out out, const Bf16 *d_qkv, const float *table, int B, int T, int H,
                           int G, int D, cudaStream_t stream) {
    RopeBackwardSource source;
    source.x = d_qkv;
    source.table = table;
    source.vectors = (H + 2 * G) * D / VEC;
    source.T = T;
    source.turned_vectors = (H + G) * D / VEC;
    source.head_vectors = D / VEC;
    quantize<false, false>(source, out, NULL, B * T, (H + 2 * G) * D, stream);
}

// AdamW alone, for the range of the new weights.
__global__ void __launch_bounds__(256) adamw_measure_kernel(AdamWUpdate u, const StepState *state,
                                                            float bias1, float bias2, float *amax) {
    if (state->skipped) { return; }
    AdamWFactors f = adamw_factors(u, state, bias1, bias2);
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t range = 0;
    if (i < u.n / VEC) { range = range8(range, adamw_vector(u, f, i)); }
    block_amax(amax, range);
}

__global__ void __launch_bounds__(TILE_THREADS)
    adamw_quantize_kernel(AdamWUpdate u, const StepState *state, float bias1, float bias2,
                          Fp8Out out, int N, int C) {
    __shared__ Tile tile;
    if (state->skipped) { return; }
    AdamWFactors f = adamw_factors(u, state, bias1, bias2);
    int group = threadIdx.x / COLUMN_GROUPS;
    int64_t first_row = (int64_t)blockIdx.y * TILE_ROWS, row = first_row + group * THREAD_ROWS;
    int first_column = blockIdx.x * TILE_COLUMNS;
    int column = first_column + threadIdx.x % COLUMN_GROUPS * VEC;
    float scale = out.live->scale;
    Floats8 values[THREAD_ROWS] = {};
    uint32_t range = 0;
    if (column < C) {
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++) {
            if (row + i < N) { values[i] = adamw_vector(u, f, ((row + i) * C + column) / VEC); }
        }
        write_codes(out, values, scale, row, column, N, C, tile, range);
    }
    __syncthreads();
    write_columns(out, tile, first_row, first_column, C, N);
    if (out.record) { block_amax(&out.slot->amax, range); }
}

void gpu_adamw_update_fp8(Fp8Out out, bool measured, const AdamWUpdate *update,
                          const StepState *state, int N, int C, cudaStream_t stream) {
    float bias1 = log2f(update->beta1), bias2 = log2f(update->beta2);
    dim3 grid(divide_up(C, TILE_COLUMNS), divide_up(N, TILE_ROWS));
    if (measured) {
        adamw_measure_kernel<<<divide_up(update->n / VEC, 256), 256, 0, stream>>>(
            *update, state, bias1, bias2, &out.live->amax);
    } else {
        adamw_quantize_kernel<<<grid, TILE_THREADS, 0, stream>>>(*update, state, bias1, bias2, out,
                                                                 N, C);
    }
    LAUNCH_CHECK();
}
