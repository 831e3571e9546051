// The weights of FP8 layers: AdamW's step, which writes the new weights' codes on its way; their
// range; their codes alone. One launch does all matrices.
#include "adamw.cuh"
#include "quantize.cuh"

// A tile a block; a thread takes 4 rows of 4 columns at a time, since the 8 columns of
// quantize_tile would take two accesses for each array of FP32.
template <bool MEASURES, bool COUNTS>
__global__ void __launch_bounds__(TILE_THREADS, 5)
    adamw_fp8_kernel(const AdamWUpdate u, Fp8Weights table, const StepState *state, float bias1,
                     float bias2) {
    enum { ACROSS = WeightTile::COLUMNS / QUAD, PIECES = ACROSS * WEIGHT_ROWS / THREAD_ROWS };
    __shared__ WeightTile turned;
    if (state->skipped) { return; }
    const Fp8Weight w = table.rows[row_of_block(table.rows, 0, table.count, blockIdx.x)];
    int2 tile = tile_place(w, blockIdx.x);
    AdamWFactors f = adamw_factors(u, state, bias1, bias2);
    int first_row = tile.y * WEIGHT_ROWS, first_column = tile.x * WeightTile::COLUMNS;
    float scale = w.out.live->scale, range = 0.0f;
#pragma unroll 1
    for (int piece = threadIdx.x; piece < PIECES; piece += TILE_THREADS) {
        int group = piece / ACROSS, c = piece % ACROSS * QUAD;
        int row = first_row + group * THREAD_ROWS, column = first_column + c;
        if (row >= w.N || column >= w.C) { continue; }
        uint32_t codes[THREAD_ROWS];
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++) {
            int64_t at = (row + i) * (int64_t)w.C + column, quad = (w.first + at) / QUAD;
            Floats4 value = unpack4(pack4(adamw_quad(u, f, {quad, quad, quad})));
            range = range4(range, value);
            if (MEASURES) { continue; }
            codes[i] = encode4<FP8_E4M3>(value.v, scale);
            *reinterpret_cast<uint32_t *>(w.out.rows + at) = codes[i];
            if (COUNTS) { count4(w.out.counts, value.v, scale, codes[i], FP8_E4M3); }
        }
        if (!MEASURES) { turned.put4(codes[0], codes[1], codes[2], codes[3], c, group); }
    }
    if (MEASURES) {
        block_amax(&w.out.live->amax, range);
        return;
    }
    bool first = tile.x == 0 && tile.y == 0 && threadIdx.x == 0;
    if (COUNTS && first) { w.out.counts->elements += (int64_t)w.N * w.C; }
    __syncthreads();
    turned.write(w.out.columns + (int64_t)first_column * w.N + first_row, w.C - first_column,
                 w.N - first_row, w.N);
    if (w.out.record) { block_amax(&w.out.slot->amax, range); }
}

// The weights that are there, in BF16: rounded from the master weights, or their copy.
template <bool COPY> struct WeightSource : PlainPlace {
    enum { ROWS = WEIGHT_ROWS, OUTPUTS = 1 };
    typedef Floats8 Raw;
    const float *master;
    const Bf16 *copy;
    const StepState *state; // NULL: not after a step
    __device__ bool begin(int row, int vector) {
        return (state == nullptr || !state->skipped) && PlainPlace::begin(row, vector);
    }
    __device__ void enter(const Fp8Weight &w) {
        if (COPY) {
            copy = w.copy;
        } else {
            master += w.first;
        }
        vectors = w.C / VEC;
    }
    __device__ Raw fetch(int i) const {
        return COPY ? load8(copy, place(i)) : rounded8(load_floats8(master, TYPE_F32, place(i)));
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        values[0] = raw;
    }
};

// A tile a block, of the matrices from table.rows[begin] on.
template <typename SOURCE, TileMode MODE, bool COUNTS>
__global__ void __launch_bounds__(TILE_THREADS)
    weights_kernel(SOURCE source, Fp8Weights table, int begin) {
    int block = table.rows[begin].first_block + blockIdx.x;
    const Fp8Weight w = table.rows[row_of_block(table.rows, begin, table.count, block)];
    int2 tile = tile_place(w, block);
    source.enter(w);
    quantize_tile<SOURCE, FP8_E4M3, MODE, false, COUNTS>(source, w.out, nullptr, w.N, w.C, tile.x,
                                                         tile.y);
}

template <TileMode MODE, typename SOURCE>
static void launch(const SOURCE &source, const Fp8Weights &table, int begin, cudaStream_t stream) {
    auto kernel = table.counts && MODE != TILE_MEASURE ? weights_kernel<SOURCE, MODE, true>
                                                       : weights_kernel<SOURCE, MODE, false>;
    kernel<<<table.tiles, TILE_THREADS, 0, stream>>>(source, table, begin);
    LAUNCH_CHECK();
}

int gpu_fp8_weight_tiles(int N, int C) {
    return divide_up(N, WEIGHT_ROWS) * divide_up(C, WeightTile::COLUMNS);
}

void gpu_adamw_update_fp8(Fp8Weights weights, bool measured, const AdamWUpdate *update,
                          const StepState *state, cudaStream_t stream) {
    auto kernel = measured         ? adamw_fp8_kernel<true, false>
                  : weights.counts ? adamw_fp8_kernel<false, true>
                                   : adamw_fp8_kernel<false, false>;
    kernel<<<weights.tiles, TILE_THREADS, 0, stream>>>(*update, weights, state,
                                                       log2f(update->beta1), log2f(update->beta2));
    LAUNCH_CHECK();
}

template <TileMode MODE>
static void launch_weights(Fp8Weights weights, int begin, const float *master,
                           const StepState *state, cudaStream_t stream) {
    WeightSource<false> masters;
    WeightSource<true> copies;
    masters.master = master;
    masters.state = copies.state = state;
    if (master != NULL) {
        launch<MODE>(masters, weights, begin, stream);
    } else {
        launch<MODE>(copies, weights, begin, stream);
    }
}

void gpu_quantize_weights(Fp8Weights weights, int begin, bool measured, const float *master,
                          const StepState *state, cudaStream_t stream) {
    if (measured) {
        launch_weights<TILE_MEASURED>(weights, begin, master, state, stream);
    } else {
        launch_weights<TILE_GIVEN>(weights, begin, master, state, stream);
    }
}

void gpu_measure_weights(Fp8Weights weights, int begin, const float *master, const StepState *state,
                         cudaStream_t stream) {
    launch_weights<TILE_MEASURE>(weights, begin, master, state, stream);
}
