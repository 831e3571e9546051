// Parts of parameters, for a rank that keeps and updates no more (ZeRO-1): AdamW's step, and the
// codes of FP8 weights, by elements, since a part begins anywhere in a matrix. Transposed codes are
// made once a weight is whole.
#include "adamw.cuh"
#include "quantize.cuh"

// Quad i of a segment.
__device__ __forceinline__ AdamWPlace adamw_place(const AdamWSegment &s, int64_t i) {
    return {s.first / QUAD + i, s.gradient / QUAD + i, s.state / QUAD + i};
}

// The new weights of quad i, or those that are there.
template <bool UPDATES>
__device__ __forceinline__ Floats4 weights_of(const AdamWUpdate &u, const AdamWFactors &f,
                                              const AdamWSegment &s, int64_t i) {
    return UPDATES ? adamw_quad(u, f, adamw_place(s, i))
                   : load4(u.master, TYPE_F32, s.state / QUAD + i);
}

template <bool UPDATES, PartsMode MODE, bool COUNTS>
__global__ void __launch_bounds__(ADAMW_THREADS)
    parts_kernel(const AdamWUpdate u, const Fp8Weight *rows, const StepState *state, float bias1,
                 float bias2) {
    if (state != nullptr && state->skipped) { return; }
    const AdamWSegment s = u.segments[row_of_block(u.segments, 0, u.segment_count, blockIdx.x)];
    AdamWFactors f = {};
    if (UPDATES) { f = adamw_factors(u, state, bias1, bias2); }
    int64_t begin = (int64_t)(blockIdx.x - s.first_block) * ADAMW_QUADS + threadIdx.x;
    int64_t end = min(begin - threadIdx.x + ADAMW_QUADS, s.n / QUAD);
    if (s.weights != nullptr) {
        bool wanted = UPDATES || (MODE == PARTS_MEASURED && state == nullptr);
        for (int64_t i = begin; wanted && i < end; i += ADAMW_THREADS) {
            store4(s.weights, i, weights_of<UPDATES>(u, f, s, i));
        }
        return;
    }
    const Fp8Out out = rows[s.weight].out;
    uint32_t *codes = reinterpret_cast<uint32_t *>(out.rows + (s.first - rows[s.weight].first));
    float scale = MODE == PARTS_MEASURED ? measured_scale(out, false) : out.live->scale;
    float range = 0.0f;
    for (int64_t i = begin; i < end; i += ADAMW_THREADS) {
        Floats4 w = unpack4(pack4(weights_of<UPDATES>(u, f, s, i)));
        if (MODE != PARTS_MEASURED) { range = range4(range, w); }
        if (MODE == PARTS_MEASURE) { continue; }
        codes[i] = encode4<FP8_E4M3>(w.v, scale);
        if (COUNTS) { count4(out.counts, w.v, scale, codes[i], FP8_E4M3); }
    }
    if (MODE == PARTS_MEASURE) { block_amax(&out.live->amax, range); }
    if (MODE == PARTS_GIVEN && out.record) { block_amax(&out.slot->amax, range); }
    if (COUNTS && MODE != PARTS_MEASURE && threadIdx.x == 0) {
        atomicAdd(&out.counts->elements, (unsigned long long)(end - begin) * QUAD);
    }
}

template <bool UPDATES, PartsMode MODE>
static void launch(const AdamWUpdate *u, const Fp8Weights *weights, const StepState *state,
                   cudaStream_t stream) {
    auto kernel = weights->counts ? parts_kernel<UPDATES, MODE, true>
                                  : parts_kernel<UPDATES, MODE, false>;
    kernel<<<u->segment_blocks, ADAMW_THREADS, 0, stream>>>(*u, weights->rows, state,
                                                            log2f(u->beta1), log2f(u->beta2));
    LAUNCH_CHECK();
}

void gpu_adamw_update_parts(const AdamWUpdate *update, const Fp8Weights *weights, PartsMode mode,
                            const StepState *state, cudaStream_t stream) {
    if (mode == PARTS_GIVEN) {
        launch<true, PARTS_GIVEN>(update, weights, state, stream);
    } else {
        launch<true, PARTS_MEASURE>(update, weights, state, stream);
    }
}

void gpu_publish_parts(const AdamWUpdate *update, const Fp8Weights *weights, PartsMode mode,
                       const StepState *state, cudaStream_t stream) {
    if (mode == PARTS_MEASURED) {
        launch<false, PARTS_MEASURED>(update, weights, state, stream);
    } else {
        launch<false, PARTS_MEASURE>(update, weights, state, stream);
    }
}

__global__ void announce_scales_kernel(Fp8Weights weights, const StepState *state) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    bool skipped = state != nullptr && state->skipped;
    if (skipped || i >= weights.count || weights.rows[i].copy != nullptr) { return; }
    measured_scale(weights.rows[i].out, true);
}

void gpu_announce_scales(const Fp8Weights *weights, const StepState *state, cudaStream_t stream) {
    announce_scales_kernel<<<divide_up(weights->count, 128), 128, 0, stream>>>(*weights, state);
    LAUNCH_CHECK();
}

// A tile a block, as in weights_kernel.
__global__ void __launch_bounds__(TILE_THREADS) transpose_kernel(Fp8Weights table, int begin) {
    typedef WeightTile Block;
    __shared__ Block turned;
    int block = table.rows[begin].first_block + blockIdx.x;
    const Fp8Weight w = table.rows[row_of_block(table.rows, begin, table.count, block)];
    int2 tile = tile_place(w, block);
    int first_row = tile.y * WEIGHT_ROWS, first_column = tile.x * Block::COLUMNS;
    int row = first_row + threadIdx.x / Block::COLUMN_GROUPS * THREAD_ROWS;
    int column = first_column + threadIdx.x % Block::COLUMN_GROUPS * VEC;
    uint2 codes[THREAD_ROWS] = {};
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
        if (row >= w.N || column >= w.C) { break; }
        const uint8_t *from = w.out.rows + (row + i) * (int64_t)w.C + column;
        codes[i] = *reinterpret_cast<const uint2 *>(from);
    }
    turned.put(codes);
    __syncthreads();
    turned.write(w.out.columns + (int64_t)first_column * w.N + first_row, w.C - first_column,
                 w.N - first_row, w.N);
}

void gpu_transpose_weights(Fp8Weights weights, int begin, cudaStream_t stream) {
    transpose_kernel<<<weights.tiles, TILE_THREADS, 0, stream>>>(weights, begin);
    LAUNCH_CHECK();
}
