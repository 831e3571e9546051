// The weights of FP8 layers: AdamW's step, which writes the new weights' codes on its way; their
// range; their codes alone. One launch does all matrices.
#include "adamw.cuh"
#include "quantize.cuh"

struct AdamWSource {
    enum { ROWS = 32, OUTPUTS = 1 };
    struct Raw {};
    AdamWUpdate update;
    const StepState *state;
    float bias1, bias2; // the betas' binary logarithms
    int vectors;        // of a row
    AdamWFactors factors;
    int64_t at;
    __device__ void enter(const Fp8Weight &w) {
        at = w.first / VEC;
        vectors = w.C / VEC;
    }
    __device__ bool begin(int row, int vector) {
        if (state->skipped) { return false; }
        factors = adamw_factors(update, state, bias1, bias2);
        at += row * (int64_t)vectors + vector;
        return true;
    }
    __device__ Raw fetch(int) const {
        return {};
    }
    __device__ void compute(int i, const Raw &, Floats8 *values) const {
        int64_t vector = at + i * vectors;
        values[0] = rounded8(adamw_vector(update, factors, {vector, vector, vector}));
    }
};

// The weights that are there, in BF16: rounded from the master weights, or their copy.
template <bool COPY> struct WeightSource : PlainPlace {
    enum { ROWS = 32, OUTPUTS = 1 };
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
    int across = (w.C + Tile<SOURCE::ROWS>::COLUMNS - 1) / Tile<SOURCE::ROWS>::COLUMNS;
    int tile = block - w.first_block;
    source.enter(w);
    quantize_tile<SOURCE, FP8_E4M3, MODE, false, COUNTS>(source, w.out, nullptr, w.N, w.C,
                                                         tile % across, tile / across);
}

template <TileMode MODE, typename SOURCE>
static void launch(const SOURCE &source, const Fp8Weights &table, int begin, cudaStream_t stream) {
    auto kernel = table.counts && MODE != TILE_MEASURE ? weights_kernel<SOURCE, MODE, true>
                                                       : weights_kernel<SOURCE, MODE, false>;
    kernel<<<table.tiles, TILE_THREADS, 0, stream>>>(source, table, begin);
    LAUNCH_CHECK();
}

int gpu_fp8_weight_tiles(int N, int C) {
    return divide_up(N, AdamWSource::ROWS) * divide_up(C, Tile<AdamWSource::ROWS>::COLUMNS);
}

void gpu_adamw_update_fp8(Fp8Weights weights, bool measured, const AdamWUpdate *update,
                          const StepState *state, cudaStream_t stream) {
    AdamWSource source;
    source.update = *update;
    source.state = state;
    source.bias1 = log2f(update->beta1);
    source.bias2 = log2f(update->beta2);
    if (measured) {
        launch<TILE_MEASURE>(source, weights, 0, stream);
    } else {
        launch<TILE_GIVEN>(source, weights, 0, stream);
    }
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
