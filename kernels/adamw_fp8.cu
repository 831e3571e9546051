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
    // The matrix that begins at element `first`.
    __device__ void enter(int64_t first, int C) {
        at = first / VEC;
        vectors = C / VEC;
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
        values[0] = adamw_vector(update, factors, at + i * vectors);
    }
};

struct MasterSource : PlainPlace {
    enum { ROWS = 32, OUTPUTS = 1 };
    typedef Floats8 Raw;
    const float *x;
    __device__ void enter(int64_t first, int C) {
        x += first;
        vectors = C / VEC;
    }
    __device__ Raw fetch(int i) const {
        return load_floats8(x, TYPE_F32, place(i));
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        values[0] = raw;
    }
};

// Tiles of the matrices from table.rows[begin] on; a block finds its own.
template <typename SOURCE, TileMode MODE>
__global__ void __launch_bounds__(TILE_THREADS)
    weights_kernel(SOURCE source, Fp8Weights table, int begin) {
    int block = blockIdx.x + table.rows[begin].first_tile, low = begin, high = table.count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (table.rows[middle].first_tile <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const Fp8Weight w = table.rows[low];
    int across = (w.C + Tile<SOURCE::ROWS>::COLUMNS - 1) / Tile<SOURCE::ROWS>::COLUMNS;
    int tile = block - w.first_tile;
    source.enter(w.first, w.C);
    quantize_tile<SOURCE, FP8_E4M3, MODE, false>(source, w.out, nullptr, w.N, w.C, tile % across,
                                                 tile / across);
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
        weights_kernel<AdamWSource, TILE_MEASURE>
            <<<weights.tiles, TILE_THREADS, 0, stream>>>(source, weights, 0);
    } else {
        weights_kernel<AdamWSource, TILE_GIVEN>
            <<<weights.tiles, TILE_THREADS, 0, stream>>>(source, weights, 0);
    }
    LAUNCH_CHECK();
}

void gpu_quantize_weights(Fp8Weights weights, int begin, bool measured, const float *master,
                          cudaStream_t stream) {
    MasterSource source;
    source.x = master;
    if (measured) {
        weights_kernel<MasterSource, TILE_MEASURED>
            <<<weights.tiles, TILE_THREADS, 0, stream>>>(source, weights, begin);
    } else {
        weights_kernel<MasterSource, TILE_GIVEN>
            <<<weights.tiles, TILE_THREADS, 0, stream>>>(source, weights, begin);
    }
    LAUNCH_CHECK();
}

void gpu_measure_weights(Fp8Weights weights, int begin, const float *master, cudaStream_t stream) {
    MasterSource source;
    source.x = master;
    weights_kernel<MasterSource, TILE_MEASURE>
        <<<weights.tiles, TILE_THREADS, 0, stream>>>(source, weights, begin);
    LAUNCH_CHECK();
}
