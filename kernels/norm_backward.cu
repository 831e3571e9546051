// The norms' backward pass: a column's sums stay in the registers of one thread (norm.cuh). The new
// residual gradient can go out in FP8 as well.
#include "norm.cuh"

// What a thread adds up for its 8 columns.
struct ColumnSums {
    Floats8 weight, bias, residual;
};

// What a thread carries along the rows.
struct Progress {
    ColumnSums sums;
    float range;
    int turn; // of what there are two of
};

// Where a thread finds the rows fetched ahead: slot k of its own is at [k * threads].
struct Slots {
    uint4 *mine;
    int threads;
    __device__ __forceinline__ uint4 &x(int i) const {
        return mine[i * threads];
    }
};

template <int R> struct Statistics { float mean[R], rstd[R]; };

// Slots of R rows: x, dout, and the residual's twice, since those are read last.
template <int R> struct SlotPlace {
    enum { X = 0, DOUT = R, RESIDUAL = 2 * R, COUNT = 4 * R };
};

// Begins to fetch R rows from `row` on; past the end there are zeros.
template <int R, bool LAYERNORM>
__device__ __forceinline__ void fetch_rows(const Slots &slots, Statistics<R> &next,
                                           const NormBackward &n, int64_t row, int vector,
                                           int turn) {
    typedef SlotPlace<R> Place;
    int vectors = n.C / VEC;
#pragma unroll
    for (int i = 0; i < R; i++) {
        int64_t at = (row + i) * vectors + vector;
        bool inside = row + i < n.M;
        bool fetches = inside && vector < vectors;
        fetch_ahead(&slots.x(Place::X + i), n.x, at, fetches);
        fetch_ahead(&slots.x(Place::DOUT + i), n.dout, at, fetches);
        fetch_ahead(&slots.x(Place::RESIDUAL + turn * R + i), n.d_residual, at, fetches);
        next.mean[i] = LAYERNORM && inside ? n.mean[row + i] : 0.0f;
        next.rstd[i] = inside ? n.rstd[row + i] : 0.0f;
    }
    __pipeline_commit();
}

// One row's new residual gradient, packed; adds to the column sums.
template <bool LAYERNORM, bool COLUMN_SUMS>
__device__ __forceinline__ Floats8 finish_row(uint4 &packed, ColumnSums &sums, const Floats8 &x,
                                              const Floats8 &d, const Floats8 &w, float mean,
                                              float rstd, float average, float projected) {
    Floats8 out = unpack8(packed);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        float hat = (x.v[j] - mean) * rstd;
        out.v[j] += rstd * (d.v[j] * w.v[j] - average - hat * projected);
        sums.weight.v[j] += d.v[j] * hat;
        if (LAYERNORM) { sums.bias.v[j] += d.v[j]; }
    }
    packed = pack8(out);
    out = unpack8(packed);
#pragma unroll
    for (int j = 0; j < VEC && COLUMN_SUMS; j++) { sums.residual.v[j] += out.v[j]; }
    return out;
}

// The groups' sums of one kind, added in the groups' order, to the block's partial sums. sums: room
// for [groups][C].
__device__ void write_partial(float *partials, float *sums, const Floats8 &sum, int C, int group,
                              const Division &d) {
    int vector = threadIdx.x % d.lanes;
    __syncthreads();
    if (vector < C / VEC) { store_floats8(sums + group * C, vector, sum); }
    __syncthreads();
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        float total = sums[i];
        for (int g = 1; g < d.groups; g++) { total += sums[g * C + i]; }
        partials[(int64_t)blockIdx.x * C + i] = total;
    }
}

// The R rows that have been fetched, from `row` on, while those from `next` on are; codes: theirs,
// where CODES.
template <int R, bool LAYERNORM, bool COLUMN_SUMS, bool CODES, Fp8Type TYPE>
__device__ __forceinline__ void norm_rows(const NormBackward &n, const Fp8Out &out, int64_t row,
                                          int64_t next, const Slots &slots, Statistics<R> &fetched,
                                          float *buffer, int lanes, Progress &p, uint2 *codes) {
    typedef SlotPlace<R> Place;
    int group = threadIdx.x / lanes, vector = threadIdx.x % lanes, vectors = n.C / VEC;
    Statistics<R> s = fetched;
    uint4 raw_x[R], raw_d[R];
    float both[2 * R]; // sums of g, then of g times the normalised x over rstd
    Floats8 w = vector < vectors ? load8(n.weight, vector) : Floats8{};
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < R; i++) {
        raw_x[i] = slots.x(Place::X + i);
        raw_d[i] = slots.x(Place::DOUT + i);
        Floats8 x = unpack8(raw_x[i]), d = unpack8(raw_d[i]);
        both[i] = both[R + i] = 0.0f;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float g = d.v[j] * w.v[j];
            both[i] += g;
            both[R + i] += g * (x.v[j] - s.mean[i]);
        }
    }
    // x and dout have been read: their slots are free
    if (next < n.M) { fetch_rows<R, LAYERNORM>(slots, fetched, n, next, vector, p.turn ^ 1); }
    group_sums(both, buffer, group, lanes);
#pragma unroll
    for (int i = 0; i < R; i++) {
        float average = LAYERNORM ? both[i] / n.C : 0.0f;
        float projected = both[R + i] * s.rstd[i] / n.C;
        uint4 packed = slots.x(Place::RESIDUAL + p.turn * R + i);
        Floats8 value = finish_row<LAYERNORM, COLUMN_SUMS>(packed, p.sums, unpack8(raw_x[i]),
                                                           unpack8(raw_d[i]), w, s.mean[i],
                                                           s.rstd[i], average, projected);
        bool stores = row + i < n.M && vector < vectors;
        int64_t at = (row + i) * vectors + vector;
        if (stores) { reinterpret_cast<uint4 *>(n.d_residual)[at] = packed; }
        if (CODES || n.amax != nullptr) { p.range = range8(p.range, value); }
        if (CODES) { codes[i] = encode8<TYPE>(value, out.live->scale); }
        if (CODES && stores) { reinterpret_cast<uint2 *>(out.rows)[at] = codes[i]; }
    }
    p.turn ^= 1;
}

// CODES: the new d_residual also goes to out, in its format.
template <int R, bool LAYERNORM, bool COLUMN_SUMS, bool CODES, Fp8Type TYPE>
__global__ void __launch_bounds__(R == 1 ? 2 * MOST_THREADS : MOST_THREADS)
    norm_backward_kernel(NormBackward n, Fp8Out out, Division division) {
    extern __shared__ uint4 dynamic[]; // slots, then the groups' tiles; at the end the groups' sums
    __shared__ float buffers[2][2 * MOST_THREADS / WARP * 2 * R];
    int lanes = division.lanes, group = threadIdx.x / lanes, vector = threadIdx.x % lanes;
    Slots slots = {dynamic + threadIdx.x, (int)blockDim.x};
    uint32_t *tile = reinterpret_cast<uint32_t *>(dynamic + SlotPlace<R>::COUNT * blockDim.x);
    if (CODES) { tile += group * tile_word(n.C, 0); }
    Progress p = {};
    Statistics<R> fetched;
    int64_t stride = (int64_t)gridDim.x * division.groups * CHUNK_ROWS;
    int64_t chunk = ((int64_t)blockIdx.x * division.groups + group) * CHUNK_ROWS;
    if (chunk < n.M) { fetch_rows<R, LAYERNORM>(slots, fetched, n, chunk, vector, 0); }
    for (; chunk < n.M; chunk += stride) {
        for (int slot = 0; slot < CHUNK_ROWS / 4 && chunk + slot * 4 < n.M; slot++) {
            uint2 codes[4] = {};
#pragma unroll(CODES ? 4 : 1)
            for (int i = 0; i < 4; i += R) {
                float *buffer = buffers[p.turn] + group * (lanes / WARP) * 2 * R;
                int done = slot * 4 + i + R;
                int64_t next = done < CHUNK_ROWS ? chunk + done : chunk + stride;
                if (chunk + done - R >= n.M) { break; } // nothing has been fetched
                norm_rows<R, LAYERNORM, COLUMN_SUMS, CODES, TYPE>(
                    n, out, chunk + done - R, next, slots, fetched, buffer, lanes, p, codes + i);
            }
            if (CODES && vector < n.C / VEC) { turn_codes(tile, codes, vector * VEC, slot); }
        }
        if (CODES) {
            group_barrier(group, lanes);
            flush_columns(out.columns, tile, chunk, n.M, n.C, vector, lanes);
            group_barrier(group, lanes);
        }
    }
    if (CODES && out.record) { block_amax(&out.slot->amax, p.range); }
    if (!CODES && n.amax != nullptr) { block_amax(n.amax, p.range); }
    float *sums = reinterpret_cast<float *>(dynamic);
    int64_t kind = (int64_t)gridDim.x * n.C;
    write_partial(n.scratch, sums, p.sums.weight, n.C, group, division);
    if (LAYERNORM) { write_partial(n.scratch + kind, sums, p.sums.bias, n.C, group, division); }
    if (COLUMN_SUMS) {
        write_partial(n.scratch + 2 * kind, sums, p.sums.residual, n.C, group, division);
    }
}

template <int R, bool LAYERNORM, bool COLUMN_SUMS, bool CODES, Fp8Type TYPE>
static void launch(const NormBackward &n, const Fp8Out &out, cudaStream_t stream) {
    Division d = divide(n.C, CODES, SlotPlace<R>::COUNT * sizeof(uint4));
    int blocks = min((int)BLOCKS, divide_up(n.M, d.groups * CHUNK_ROWS));
    auto kernel = norm_backward_kernel<R, LAYERNORM, COLUMN_SUMS, CODES, TYPE>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)d.shared));
    kernel<<<blocks, d.groups * d.lanes, d.shared, stream>>>(n, out, d);
    LAUNCH_CHECK();
    PartialSums sums = {{n.dweight, n.dbias, n.column_sums}, n.scratch, blocks, n.C};
    sum_partials(sums, stream);
}

template <int R, bool CODES, Fp8Type TYPE>
static void choose(const NormBackward &n, const Fp8Out &out, cudaStream_t stream) {
    bool layernorm = n.mean != NULL, sums = n.column_sums.data != NULL;
    if (layernorm && sums) { launch<R, true, true, CODES, TYPE>(n, out, stream); }
    if (layernorm && !sums) { launch<R, true, false, CODES, TYPE>(n, out, stream); }
    if (!layernorm && sums) { launch<R, false, true, CODES, TYPE>(n, out, stream); }
    if (!layernorm && !sums) { launch<R, false, false, CODES, TYPE>(n, out, stream); }
}

void gpu_norm_backward(NormBackward n, cudaStream_t stream) {
    if (n.C % VEC != 0 || n.C > 2 * MOST_THREADS * VEC) {
        die("norm: %d channels; the GPU kernels take a multiple of 8 up to %d", n.C,
            2 * MOST_THREADS * VEC);
    }
    if (several_rows(n.C)) {
        choose<2, false, FP8_E4M3>(n, {}, stream);
    } else {
        choose<1, false, FP8_E4M3>(n, {}, stream);
    }
}

void gpu_norm_backward_fp8(Fp8Out out, NormBackward n, cudaStream_t stream) {
    if (!several_rows(n.C) || out.counts != NULL) { // the same bits
        gpu_norm_backward(n, stream);
        gpu_quantize(out, false, {}, n.d_residual, n.scratch, n.M, n.C, stream);
    } else if (out.type == FP8_E4M3) {
        choose<2, true, FP8_E4M3>(n, out, stream);
    } else {
        choose<2, true, FP8_E5M2>(n, out, stream);
    }
}
