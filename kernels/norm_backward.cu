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
    uint4 weight; // packed
    float range, scale;
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

// Begins to fetch R rows from `row` on; past the end there are zeros. ALL: there is no end before
// them.
template <int R, bool LAYERNORM, bool ALL>
__device__ __forceinline__ void fetch_rows(const Slots &slots, Statistics<R> &next,
                                           const NormBackward &n, int row, int vector, int turn) {
    typedef SlotPlace<R> Place;
    int vectors = n.C / VEC, at = row * vectors + vector;
#pragma unroll
    for (int i = 0; i < R; i++, at += vectors) {
        bool inside = ALL || row + i < n.M;
        bool fetches = inside && vector < vectors;
        fetch_ahead(&slots.x(Place::X + i), n.x, at, fetches);
        fetch_ahead(&slots.x(Place::DOUT + i), n.dout, at, fetches);
        fetch_ahead(&slots.x(Place::RESIDUAL + turn * R + i), n.d_residual, at, fetches);
        next.mean[i] = LAYERNORM && inside ? n.mean[row + i] : 0.0f;
        next.rstd[i] = inside ? n.rstd[row + i] : 0.0f;
    }
    __pipeline_commit();
}

// What a row's sums are needed for: the gradient by the normalised x, and that.
struct Halves {
    Floats8 g, hat;
};

// Adds what a row has for the column sums of weight and bias; returns its shares of the row's sums:
// of g, and of g times the normalised x.
template <bool LAYERNORM>
__device__ __forceinline__ float2 begin_row(Halves &h, ColumnSums &sums, const Floats8 &x,
                                            const Floats8 &d, const Floats8 &w, float mean,
                                            float rstd) {
    float shift = -mean * rstd;
    float2 both = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        h.hat.v[j] = LAYERNORM ? fmaf(x.v[j], rstd, shift) : x.v[j] * rstd;
        h.g.v[j] = d.v[j] * w.v[j];
        sums.weight.v[j] = fmaf(d.v[j], h.hat.v[j], sums.weight.v[j]);
        if (LAYERNORM) {
            sums.bias.v[j] += d.v[j];
            both.x += h.g.v[j];
        }
        both.y = fmaf(h.g.v[j], h.hat.v[j], both.y);
    }
    return both;
}

// The row's new residual gradient, packed, and as it will be read back. average, projected: means
// of what begin_row returned.
template <bool LAYERNORM, bool COLUMN_SUMS>
__device__ __forceinline__ Floats8 finish_row(uint4 &packed, ColumnSums &sums, const Halves &h,
                                              float rstd, float average, float projected) {
    Floats8 out = unpack8(packed);
    float down = -rstd * average, along = -rstd * projected;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        float rest = LAYERNORM ? out.v[j] + down : out.v[j];
        out.v[j] = fmaf(h.hat.v[j], along, fmaf(h.g.v[j], rstd, rest));
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
// where CODES, and then all R are there.
template <int R, bool LAYERNORM, bool COLUMN_SUMS, bool CODES, Fp8Type TYPE>
__device__ __forceinline__ void norm_rows(const NormBackward &n, const Fp8Out &out, int row,
                                          int next, const Slots &slots, Statistics<R> &fetched,
                                          float *buffer, int lanes, float inverse, Progress &p,
                                          uint2 *codes) {
    typedef SlotPlace<R> Place;
    int group = threadIdx.x / lanes, vector = threadIdx.x % lanes, vectors = n.C / VEC;
    Statistics<R> s = fetched;
    Halves halves[R];
    float both[2 * R];
    __pipeline_wait_prior(0);
    Floats8 w = unpack8(p.weight);
#pragma unroll
    for (int i = 0; i < R; i++) {
        float2 shares = begin_row<LAYERNORM>(halves[i], p.sums, unpack8(slots.x(Place::X + i)),
                                             unpack8(slots.x(Place::DOUT + i)), w, s.mean[i],
                                             s.rstd[i]);
        both[i] = shares.x;
        both[R + i] = shares.y;
    }
    // x and dout have been read: their slots are free
    if (next < n.M) {
        fetch_rows<R, LAYERNORM, CODES>(slots, fetched, n, next, vector, p.turn ^ 1);
    }
    group_sums(both, buffer, group, lanes);
    int at = row * vectors + vector;
#pragma unroll
    for (int i = 0; i < R; i++, at += vectors) {
        uint4 packed = slots.x(Place::RESIDUAL + p.turn * R + i);
        Floats8 value = finish_row<LAYERNORM, COLUMN_SUMS>(
            packed, p.sums, halves[i], s.rstd[i], both[i] * inverse, both[R + i] * inverse);
        bool stores = (CODES || row + i < n.M) && vector < vectors;
        if (stores) { reinterpret_cast<uint4 *>(n.d_residual)[at] = packed; }
        if (stores && (CODES || n.amax != nullptr)) { p.range = range8(p.range, value); }
        if (CODES) { codes[i] = encode8<TYPE>(value, p.scale); }
        if (CODES && stores) { reinterpret_cast<uint2 *>(out.rows)[at] = codes[i]; }
    }
    p.turn ^= 1;
}

// CODES: the new d_residual also goes to out, in its format; M is a multiple of 4.
template <int R, bool LAYERNORM, bool COLUMN_SUMS, bool CODES, Fp8Type TYPE>
__global__ void __launch_bounds__(R == 1 ? 2 * MOST_THREADS : MOST_THREADS)
    norm_backward_kernel(NormBackward n, Fp8Out out, Division division, float inverse) {
    extern __shared__ uint4 dynamic[]; // slots, then the groups' tiles; at the end the groups' sums
    __shared__ float buffers[2][2 * MOST_THREADS / WARP * 2 * R];
    int lanes = division.lanes, group = threadIdx.x / lanes, vector = threadIdx.x % lanes;
    Slots slots = {dynamic + threadIdx.x, (int)blockDim.x};
    uint32_t *tile = reinterpret_cast<uint32_t *>(dynamic + SlotPlace<R>::COUNT * blockDim.x);
    if (CODES) { tile += group * tile_word(n.C, 0); }
    Progress p = {};
    if (vector < n.C / VEC) { p.weight = reinterpret_cast<const uint4 *>(n.weight)[vector]; }
    if (CODES) { p.scale = out.live->scale; }
    Statistics<R> fetched;
    int stride = gridDim.x * division.groups * CHUNK_ROWS;
    int chunk = (blockIdx.x * division.groups + group) * CHUNK_ROWS;
    if (chunk < n.M) { fetch_rows<R, LAYERNORM, CODES>(slots, fetched, n, chunk, vector, 0); }
    for (; chunk < n.M; chunk += stride) {
#pragma unroll 1
        for (int slot = 0; slot < CHUNK_ROWS / 4 && chunk + slot * 4 < n.M; slot++) {
            uint2 codes[4] = {};
#pragma unroll(CODES ? 4 : 1)
            for (int i = 0; i < 4; i += R) {
                float *buffer = buffers[p.turn] + group * (lanes / WARP) * 2 * R;
                int done = slot * 4 + i + R;
                int next = done < CHUNK_ROWS ? chunk + done : chunk + stride;
                if (!CODES && chunk + done - R >= n.M) { break; } // nothing has been fetched
                norm_rows<R, LAYERNORM, COLUMN_SUMS, CODES, TYPE>(n, out, chunk + done - R, next,
                                                                  slots, fetched, buffer, lanes,
                                                                  inverse, p, codes + i);
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
    check_size(n.M, n.C);
    Division d = divide(n.C, CODES, SlotPlace<R>::COUNT * sizeof(uint4));
    int blocks = min((int)BLOCKS, divide_up(n.M, d.groups * CHUNK_ROWS));
    auto kernel = norm_backward_kernel<R, LAYERNORM, COLUMN_SUMS, CODES, TYPE>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)d.shared));
    kernel<<<blocks, d.groups * d.lanes, d.shared, stream>>>(n, out, d, 1.0f / (float)n.C);
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
