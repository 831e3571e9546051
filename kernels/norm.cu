// LayerNorm and RMSNorm. The forward kernel that writes BF16 keeps a row in the registers of one
// warp, or of several warps if the row is long. The forward kernel that writes FP8 and the backward
// kernel work on several rows at a time, each thread on 8 columns of these rows. So the threads
// wait for each other's sums once for all these rows, not once for each row. Meanwhile the next
// rows are fetched into shared memory. If a block's shared memory is too small for that, a second
// pass writes the FP8 forms.
#include "quantize.cuh"

#include <cuda_pipeline.h>

enum {
    MAX_THREADS = 512,
    WIDE = MAX_THREADS * VEC // with more channels, registers do not hold several rows at a time
};
static_assert(MAX_CHANNELS == 2 * WIDE, "the kernels hold two vectors a thread");

// Returns one normalised value. x: the value minus the row's mean or, in RMSNorm, the value.
__device__ __forceinline__ float normalised(float x, float rstd, float weight, float bias) {
    return fmaf(x * rstd, weight, bias);
}

static void check_norm(const char *name, Operand *out, int M, int C, bool statistics,
                       std::initializer_list<const void *> pointers) {
    check_operand(name, out, M, C);
    check_aligned(name, pointers);
    if (C > MAX_CHANNELS) {
        die("%s: %d channels; the GPU kernels take up to %d", name, C, MAX_CHANNELS);
    }
    if (!statistics) { die("%s: no statistics", name); }
}

// ---- forward to BF16 ----

enum { WARPS = 8 };

// Returns, in every lane, the sum of x over the W warps that share a row. buffer is [W].
template <int W>
__device__ __forceinline__ float row_sum(float x, float *buffer, int group, int lane) {
    x = warp_sum(x);
    if (W == 1) { return x; }
    if (lane % WARP == 0) { buffer[lane / WARP] = x; }
    group_barrier(group, W * WARP);
    float sum = buffer[0];
#pragma unroll
    for (int i = 1; i < W; i++) { sum += buffer[i]; }
    return sum;
}

// W warps share a row; a lane has V vectors of 8 columns. inverse: 1 / C. If out is NULL, only the
// statistics are written. If amax is not NULL, *amax receives the amax of the output.
template <int W, int V, bool LAYERNORM>
__global__ void __launch_bounds__(WARPS *WARP, 3)
    norm_forward_kernel(NormForward n, Bf16 *out, float *amax, float inverse) {
    enum { LANES = W * WARP };
    __shared__ float shared[2][WARPS];
    int group = threadIdx.x / LANES, lane = threadIdx.x % LANES, vectors = n.C / VEC;
    int row = min((int)blockIdx.x * (WARPS / W) + group, n.M - 1);
    int64_t first = (int64_t)row * vectors;
    Floats8 v[V];
#pragma unroll
    for (int k = 0; k < V; k++) {
        int i = lane + k * LANES;
        v[k] = i < vectors ? load8(n.x, first + i) : Floats8{};
    }
    float mu = 0.0f, squares = 0.0f;
    if (LAYERNORM) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < V; k++) {
            for (int j = 0; j < VEC; j++) { sum += v[k].v[j]; }
        }
        mu = row_sum<W>(sum, shared[0] + group * W, group, lane) * inverse;
    }
#pragma unroll
    for (int k = 0; k < V; k++) {
        if (LAYERNORM && lane + k * LANES >= vectors) { continue; }
        for (int j = 0; j < VEC; j++) {
            v[k].v[j] -= mu;
            squares = fmaf(v[k].v[j], v[k].v[j], squares);
        }
    }
    squares = row_sum<W>(squares, shared[1] + group * W, group, lane);
    float r = rsqrtf(fmaf(squares, inverse, n.eps)), largest = 0.0f;
    if (lane == 0) {
        if (LAYERNORM) { n.mean[row] = mu; }
        n.rstd[row] = r;
    }
    if (out == nullptr) { return; }
#pragma unroll
    for (int k = 0; k < V; k++) {
        int i = lane + k * LANES;
        if (i >= vectors) { continue; }
        Floats8 w = load8(n.weight, i), b = LAYERNORM ? load8(n.bias, i) : Floats8{};
        for (int j = 0; j < VEC; j++) { v[k].v[j] = normalised(v[k].v[j], r, w.v[j], b.v[j]); }
        uint4 packed = pack8(v[k]);
        reinterpret_cast<uint4 *>(out)[first + i] = packed;
        if (amax != nullptr) { largest = amax8(largest, unpack8(packed)); }
    }
    if (amax != nullptr) { block_amax(amax, largest); }
}

template <int W, int V>
static void norm_forward(const NormForward &n, Bf16 *out, float *amax, cudaStream_t stream) {
    auto kernel = n.bias != NULL ? norm_forward_kernel<W, V, true>
                                 : norm_forward_kernel<W, V, false>;
    launch(kernel, divide_up(n.M, WARPS / W), WARPS * WARP, stream, n, out, amax,
           1.0f / (float)n.C);
}

static void norm_forward_bf16(const NormForward &n, Bf16 *out, float *amax, cudaStream_t stream) {
    static void (*const launches[])(const NormForward &, Bf16 *, float *, cudaStream_t) = {
        norm_forward<1, 1>, norm_forward<1, 2>, norm_forward<1, 3>, norm_forward<1, 4>,
        norm_forward<1, 5>, norm_forward<1, 6>, norm_forward<1, 7>, norm_forward<2, 4>,
        norm_forward<2, 6>, norm_forward<2, 8>, norm_forward<4, 6>, norm_forward<4, 8>};
    int vectors = divide_up(n.C / VEC, WARP); // vectors of a lane, when one warp takes a row
    int i = vectors <= 8    ? vectors - 1
            : vectors <= 12 ? 8
            : vectors <= 16 ? 9
            : vectors <= 24 ? 10
                            : 11;
    launches[i](n, out, amax, stream);
}

// ---- several rows at a time: a group of threads per row, 8 columns per thread ----

enum { CHUNK_ROWS = 32, BLOCKS = PARTIALS / 2 };

// How a block is divided: into `groups` groups of `lanes` threads, which are whole warps.
struct Division {
    int lanes, groups; // groups 0: a block cannot hold even one group
    size_t shared;     // bytes of shared memory
};

// Replaces N numbers by their sums over the group, in every lane and in a fixed order. buffer:
// [warps of a group][N]; the next call needs another buffer, because some warps may still read this
// one.
template <int N>
__device__ __forceinline__ void group_sums(float (&v)[N], float *buffer, int group, int lanes) {
    static_assert(N <= 8 && (N & (N - 1)) == 0, "halves go each way");
    int lane = threadIdx.x % WARP, warp = threadIdx.x % lanes / WARP, index = 0;
#pragma unroll
    for (int n = N, offset = WARP / 2; offset > 0; offset /= 2) {
        if (n == 1) {
            v[0] += __shfl_xor_sync(~0u, v[0], offset);
            continue;
        }
        n /= 2; // each lane sends half of its values and keeps the other half
        bool upper = lane & offset;
#pragma unroll
        for (int i = 0; i < n; i++) {
            float sent = upper ? v[i] : v[i + n], kept = upper ? v[i + n] : v[i];
            v[i] = kept + __shfl_xor_sync(~0u, sent, offset);
        }
        index += upper ? n : 0;
    }
    if (lane % (WARP / N) == 0) { buffer[warp * N + index] = v[0]; }
    group_barrier(group, lanes);
    float sum = 0.0f;
#pragma unroll 1
    for (int i = lane; i < lanes / WARP * N; i += WARP) { sum += buffer[i]; }
#pragma unroll
    for (int offset = N; offset < WARP; offset *= 2) { sum += __shfl_xor_sync(~0u, sum, offset); }
#pragma unroll
    for (int i = 0; i < N; i++) { v[i] = __shfl_sync(~0u, sum, i); }
}

// Chooses the number of groups: as many as fit in the registers of an SM and in the dynamic shared
// memory of a block, which is 220 KB on Hopper. But there are at most four: with four groups, the
// usual numbers of rows are divided most evenly among the blocks. codes: whether each group has a
// tile of codes in shared memory. slot_bytes: how many bytes a thread fetches ahead. Tests set the
// device's limit by LLM8_TEST_SHARED_KIB.
static Division divide(int C, bool codes, size_t slot_bytes) {
    const char *test = getenv("LLM8_TEST_SHARED_KIB");
    int device, most_bytes;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(
        cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (test != NULL) { most_bytes = min(most_bytes, atoi(test) << 10); }
    most_bytes -= 7 << 10;
    int lanes = divide_up(C / VEC, WARP) * WARP, groups = min(4, max(1, MAX_THREADS / lanes));
    int64_t group_bytes = (codes ? tile_word<CHUNK_ROWS>(C, 0) * 4 : 0) +
                          lanes * (int64_t)slot_bytes;
    while (groups > 0 && groups * group_bytes > most_bytes) { groups--; }
    return {lanes, groups, (size_t)(groups * group_bytes)};
}

// Begins to copy vector `vector` of x, or zeros if `inside` is false, to *slot in shared memory.
__device__ __forceinline__ void fetch_ahead(uint4 *slot, const Bf16 *x, int vector, bool inside) {
    const uint4 *from = reinterpret_cast<const uint4 *>(x) + (inside ? vector : 0);
    __pipeline_memcpy_async(slot, from, sizeof(uint4), inside ? 0 : sizeof(uint4));
}

// Goes through the rows of a group of threads in chunks of CHUNK_ROWS rows, R rows at a time.
// fetch(row, turn) begins to fetch R rows into the threads' slots of shared memory; turn alternates
// between 0 and 1. rows(row, next, turn, codes) computes the R fetched rows from `row` on. Once it
// has read their slots, it calls fetch(next, !turn), if next is below M.
// With CODES, the codes of each chunk are written to `columns`, unless that is NULL.
template <int R, bool CODES, typename FETCH, typename ROWS>
__device__ __forceinline__ void sweep(int M, int C, const Division &d, uint32_t *tile,
                                      uint8_t *columns, FETCH fetch, ROWS rows) {
    int group = threadIdx.x / d.lanes, vector = threadIdx.x % d.lanes, turn = 0;
    int stride = gridDim.x * d.groups * CHUNK_ROWS;
    int chunk = (blockIdx.x * d.groups + group) * CHUNK_ROWS;
    if (chunk < M) { fetch(chunk, turn); }
    for (; chunk < M; chunk += stride) {
#pragma unroll 1
        for (int slot = 0; slot < CHUNK_ROWS / 4 && chunk + slot * 4 < M; slot++) {
            uint2 codes[4] = {};
#pragma unroll(CODES ? 4 : 1)
            for (int i = 0; i < 4; i += R, turn ^= 1) {
                int done = slot * 4 + i + R;
                int next = done < CHUNK_ROWS ? chunk + done : chunk + stride;
                if (!CODES && chunk + done - R >= M) { break; } // these rows were not fetched
                rows(chunk + done - R, next, turn, codes + i);
            }
            if (CODES && columns != nullptr && vector < C / VEC) {
                put_codes<CHUNK_ROWS>(tile, codes, vector * VEC, slot);
            }
        }
        if (!CODES || columns == nullptr) { continue; }
        group_barrier(group, d.lanes);
        write_columns<CHUNK_ROWS>(columns + chunk, tile, C, C, M - chunk, M, vector, d.lanes);
        group_barrier(group, d.lanes);
    }
}

// Returns how many thread blocks sweep() over M rows needs.
static int sweep_blocks(int M, const Division &d) {
    return min((int)BLOCKS, divide_up(M, d.groups * CHUNK_ROWS));
}

// ---- forward to FP8 ----

enum { ROWS = 4 }; // rows that a thread works on at a time

template <bool LAYERNORM>
__global__ void __launch_bounds__(MAX_THREADS)
    norm_forward_fp8_kernel(NormForward n, Operand out, Division division, float inverse) {
    extern __shared__ uint4 dynamic[]; // slots, then the groups' tiles
    __shared__ float buffers[2][2 * MAX_THREADS / WARP * ROWS];
    int lanes = division.lanes, group = threadIdx.x / lanes, vector = threadIdx.x % lanes;
    int vectors = n.C / VEC, sums = lanes / WARP * ROWS;
    bool inside = vector < vectors;
    uint4 *slots = dynamic + threadIdx.x;
    uint32_t *tile = reinterpret_cast<uint32_t *>(dynamic + ROWS * blockDim.x);
    tile += group * tile_word<CHUNK_ROWS>(n.C, 0);
    Floats8 w = {}, b = {};
    if (inside) { w = load8(n.weight, vector); }
    if (inside && LAYERNORM) { b = load8(n.bias, vector); }
    float largest = 0.0f, scale = out.scale->scale;
    auto fetch = [&](int row, int) {
        int at = row * vectors + vector;
#pragma unroll
        for (int i = 0; i < ROWS; i++, at += vectors) {
            fetch_ahead(slots + i * blockDim.x, n.x, at, inside);
        }
        __pipeline_commit();
    };
    auto rows = [&](int row, int next, int turn, uint2 *codes) {
        float *buffer = buffers[turn] + group * 2 * sums;
        Floats8 x[ROWS];
        float mean[ROWS], rstd[ROWS];
        __pipeline_wait_prior(0);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            x[i] = unpack8(slots[i * blockDim.x]);
            mean[i] = 0.0f;
            for (int j = 0; j < VEC && LAYERNORM; j++) { mean[i] += x[i].v[j]; }
        }
        if (LAYERNORM) {
            group_sums(mean, buffer, group, lanes);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                mean[i] *= inverse;
                for (int j = 0; j < VEC; j++) { x[i].v[j] -= mean[i]; }
            }
        }
        if (next < n.M) { fetch(next, 0); } // all slots have been read
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float sum = 0.0f;
            for (int j = 0; j < VEC; j++) { sum = fmaf(x[i].v[j], x[i].v[j], sum); }
            rstd[i] = inside ? sum : 0.0f;
        }
        group_sums(rstd, buffer + sums, group, lanes);
#pragma unroll
        for (int i = 0; i < ROWS; i++) { rstd[i] = rsqrtf(fmaf(rstd[i], inverse, n.eps)); }
        if (vector == 0) {
            float4 *out_mean = reinterpret_cast<float4 *>(n.mean + row);
            float4 *out_rstd = reinterpret_cast<float4 *>(n.rstd + row);
            if (LAYERNORM) { *out_mean = make_float4(mean[0], mean[1], mean[2], mean[3]); }
            *out_rstd = make_float4(rstd[0], rstd[1], rstd[2], rstd[3]);
        }
        if (!inside) { return; }
        int at = row * vectors + vector;
#pragma unroll
        for (int i = 0; i < ROWS; i++, at += vectors) {
            Floats8 v = x[i];
            for (int j = 0; j < VEC; j++) { v.v[j] = normalised(v.v[j], rstd[i], w.v[j], b.v[j]); }
            largest = amax8(largest, v);
            codes[i] = encode8<FP8_E4M3>(v, scale);
            if (out.rows.codes != nullptr) {
                reinterpret_cast<uint2 *>(out.rows.codes)[at] = codes[i];
            }
        }
    };
    sweep<ROWS, true>(n.M, n.C, division, tile, out.columns.codes, fetch, rows);
    if (out.writes_amax) { block_amax(&out.scale->amax, largest); }
}

// A source (quantize.cuh) of the norm's output, from known statistics.
struct NormSource : Position {
    struct Raw {
        uint4 x;
        float mean, rstd;
    };
    const Bf16 *x, *weight, *bias; // bias NULL: RMSNorm
    const float *mean, *rstd;
    Floats8 w, b;
    NormSource(const NormForward &n)
        : Position{n.C / VEC}, x(n.x), weight(n.weight), bias(n.bias), mean(n.mean), rstd(n.rstd) {
    }
    __device__ void begin(int row, int vector) {
        if (vector < vectors) {
            w = load8(weight, vector);
            b = bias != nullptr ? load8(bias, vector) : Floats8{};
        }
        mean += row;
        rstd += row;
        Position::begin(row, vector);
    }
    __device__ Raw fetch(int i) const {
        return {raw8(x, index(i)), bias != nullptr ? mean[i] : 0.0f, rstd[i]};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        Floats8 v = unpack8(raw.x);
        for (int j = 0; j < VEC; j++) {
            values[0].v[j] = normalised(v.v[j] - raw.mean, raw.rstd, w.v[j], b.v[j]);
        }
    }
};

void gpu_norm_forward(Gpu *gpu, Operand out, NormForward n) {
    gpu_family(gpu, FAMILY_NORMS);
    const char *name = "norm forward";
    bool statistics = n.rstd != NULL && (n.bias == NULL || n.mean != NULL);
    check_norm(name, &out, n.M, n.C, statistics, {n.x, n.weight, n.bias, n.mean, n.rstd});
    if (!out.fused) {
        norm_forward_bf16(n, out.bf16, measured_amax(out), gpu->stream);
        quantize_bf16(out, {}, {}, n.M, n.C, gpu->stream);
        return;
    }
    if (out.type != FP8_E4M3) { die("%s: forward operands are E4M3", name); }
    Division d = divide(n.C, true, ROWS * sizeof(uint4));
    bool one_pass = out.scaling == SCALE_DELAYED && n.C <= WIDE && d.groups > 0;
    if (one_pass) {
        auto kernel = n.bias != NULL ? norm_forward_fp8_kernel<true>
                                     : norm_forward_fp8_kernel<false>;
        launch_with_shared(kernel, sweep_blocks(n.M, d), d.groups * d.lanes, d.shared, gpu->stream,
                           n, out, d, 1.0f / (float)n.C);
    } else {
        norm_forward_bf16(n, NULL, NULL, gpu->stream);
    }
    if (!one_pass) { quantize<false>(name, NormSource(n), out, {}, {}, n.M, n.C, gpu->stream); }
}

// ---- backward: each thread keeps the sums of its columns in registers ----

// The slots of 16 bytes into which a thread fetches R rows ahead: x, dout, and two for the residual
// gradient, of which one is still unread when the next rows are fetched into the other.
template <int R> struct Slot {
    enum { X = 0, DOUT = R, RESIDUAL = 2 * R, COUNT = 4 * R };
};

// Adds up the groups' sums of one gradient, in the groups' order, into the block's partial sums.
// sums: scratch [groups][C].
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

// Computes R rows at a time. With LAYERNORM the kernel also sums the bias gradient and the columns
// of the new residual gradient. With CODES it also writes the new residual gradient to the FP8
// forms, in TYPE; M is then a multiple of 4. Without CODES, and if amax is not NULL, *amax receives
// the amax of the new residual gradient.
template <int R, bool LAYERNORM, bool CODES, Fp8Type TYPE>
__global__ void __launch_bounds__(R == 1 ? 2 * MAX_THREADS : MAX_THREADS)
    norm_backward_kernel(NormBackward n, Operand out, float *amax, Division division,
                         float inverse) {
    extern __shared__ uint4 dynamic[]; // slots and tiles; after the last row, sums
    __shared__ float buffers[2][2 * MAX_THREADS / WARP * 2 * R];
    typedef Slot<R> At;
    int lanes = division.lanes, group = threadIdx.x / lanes, vector = threadIdx.x % lanes;
    int vectors = n.C / VEC;
    bool inside = vector < vectors;
    uint32_t *tile = reinterpret_cast<uint32_t *>(dynamic + At::COUNT * blockDim.x);
    if (CODES) { tile += group * tile_word<CHUNK_ROWS>(n.C, 0); }
    Floats8 weight_sum = {}, bias_sum = {}, column_sum = {};
    uint4 weight = {};
    if (inside) { weight = reinterpret_cast<const uint4 *>(n.weight)[vector]; }
    float largest = 0.0f, scale = CODES ? out.scale->scale : 1.0f;
    float next_mean[R], next_rstd[R]; // mean and rstd of the rows that are being fetched
    auto slot_of = [&](int i) -> uint4 & { return dynamic[threadIdx.x + i * blockDim.x]; };
    auto fetch = [&](int row, int turn) { // rows past the end become zeros
        int at = row * vectors + vector;
#pragma unroll
        for (int i = 0; i < R; i++, at += vectors) {
            bool exists = CODES || row + i < n.M, fetches = exists && inside;
            fetch_ahead(&slot_of(At::X + i), n.x, at, fetches);
            fetch_ahead(&slot_of(At::DOUT + i), n.dout, at, fetches);
            fetch_ahead(&slot_of(At::RESIDUAL + turn * R + i), out.bf16, at, fetches);
            next_mean[i] = LAYERNORM && exists ? n.mean[row + i] : 0.0f;
            next_rstd[i] = exists ? n.rstd[row + i] : 0.0f;
        }
        __pipeline_commit();
    };
    auto rows = [&](int row, int next, int turn, uint2 *codes) {
        float *buffer = buffers[turn] + group * (lanes / WARP) * 2 * R;
        // two sums for each row: of g, and of g times the normalised x
        float mean[R], rstd[R], row_sums[2 * R];
        Floats8 g[R], hat[R]; // hat: the normalised x; g: the gradient with respect to hat
        __pipeline_wait_prior(0);
        Floats8 w = unpack8(weight);
#pragma unroll
        for (int i = 0; i < R; i++) {
            mean[i] = next_mean[i];
            rstd[i] = next_rstd[i];
            Floats8 x = unpack8(slot_of(At::X + i)), d = unpack8(slot_of(At::DOUT + i));
            float shift = -mean[i] * rstd[i], sum = 0.0f, projected = 0.0f;
            for (int j = 0; j < VEC; j++) {
                hat[i].v[j] = LAYERNORM ? fmaf(x.v[j], rstd[i], shift) : x.v[j] * rstd[i];
                g[i].v[j] = d.v[j] * w.v[j];
                weight_sum.v[j] = fmaf(d.v[j], hat[i].v[j], weight_sum.v[j]);
                if (LAYERNORM) {
                    bias_sum.v[j] += d.v[j];
                    sum += g[i].v[j];
                }
                projected = fmaf(g[i].v[j], hat[i].v[j], projected);
            }
            row_sums[i] = sum;
            row_sums[R + i] = projected;
        }
        if (next < n.M) { fetch(next, turn ^ 1); } // the slots of x and dout have been read
        group_sums(row_sums, buffer, group, lanes);
        int at = row * vectors + vector;
#pragma unroll
        for (int i = 0; i < R; i++, at += vectors) {
            Floats8 value = unpack8(slot_of(At::RESIDUAL + turn * R + i));
            float down = -rstd[i] * (row_sums[i] * inverse);
            float along = -rstd[i] * (row_sums[R + i] * inverse);
            for (int j = 0; j < VEC; j++) {
                float rest = LAYERNORM ? value.v[j] + down : value.v[j];
                value.v[j] = fmaf(hat[i].v[j], along, fmaf(g[i].v[j], rstd[i], rest));
            }
            uint4 packed = pack8(value);
            value = unpack8(packed);
            for (int j = 0; j < VEC && LAYERNORM; j++) { column_sum.v[j] += value.v[j]; }
            bool stores = (CODES || row + i < n.M) && inside;
            if (stores) { reinterpret_cast<uint4 *>(out.bf16)[at] = packed; }
            if (stores && (CODES || amax != nullptr)) { largest = amax8(largest, value); }
            if (CODES) { codes[i] = encode8<TYPE>(value, scale); }
            if (CODES && stores) { reinterpret_cast<uint2 *>(out.rows.codes)[at] = codes[i]; }
        }
    };
    sweep<R, CODES>(n.M, n.C, division, tile, CODES ? out.columns.codes : nullptr, fetch, rows);
    if (CODES && out.writes_amax) { block_amax(&out.scale->amax, largest); }
    if (!CODES && amax != nullptr) { block_amax(amax, largest); }
    float *sums = reinterpret_cast<float *>(dynamic), *partials = n.scratch.data;
    int64_t kind = (int64_t)gridDim.x * n.C;
    write_partial(partials, sums, weight_sum, n.C, group, division);
    if (LAYERNORM) { write_partial(partials + kind, sums, bias_sum, n.C, group, division); }
    if (LAYERNORM && n.column_sums.data != nullptr) {
        write_partial(partials + 2 * kind, sums, column_sum, n.C, group, division);
    }
}

template <int R, bool CODES, Fp8Type TYPE>
static void launch_backward(const NormBackward &n, const Operand &out, float *amax,
                            const Division &d, cudaStream_t stream) {
    auto kernel = n.mean != NULL ? norm_backward_kernel<R, true, CODES, TYPE>
                                 : norm_backward_kernel<R, false, CODES, TYPE>;
    int blocks = sweep_blocks(n.M, d);
    int kinds = n.mean == NULL ? 1 : n.column_sums.data == NULL ? 2 : 3;
    check_scratch("norm backward", n.scratch, (int64_t)blocks * kinds * n.C);
    launch_with_shared(kernel, blocks, d.groups * d.lanes, d.shared, stream, n, out, amax, d,
                       1.0f / (float)n.C);
    sum_partials({{n.dweight, n.dbias, n.column_sums}, n.scratch.data, blocks, n.C}, stream);
}

void gpu_norm_backward(Gpu *gpu, Operand out, NormBackward n) {
    gpu_family(gpu, FAMILY_NORMS);
    const char *name = "norm backward";
    bool several = n.C <= WIDE;
    check_norm(name, &out, n.M, n.C, n.rstd != NULL, {n.dout, n.x, n.weight});
    if (out.bf16 == NULL) { die("%s: no residual gradient", name); }
    // The column sums are the gradient of the bias of the layer that writes x. In models with
    // RMSNorm that layer has no bias, so the kernels of RMSNorm compute no column sums. If a caller
    // requests them, a separate pass computes them.
    Gradient sums = {};
    if (n.mean == NULL) {
        sums = n.column_sums;
        n.dbias = n.column_sums = {};
    }
    Division with_codes = divide(n.C, true, Slot<2>::COUNT * sizeof(uint4));
    if (several && with_codes.groups > 0 && out.scaling == SCALE_DELAYED &&
        out.rows.codes != NULL && out.columns.codes != NULL && sums.data == NULL) {
        auto run = out.type == FP8_E4M3 ? launch_backward<2, true, FP8_E4M3>
                                        : launch_backward<2, true, FP8_E5M2>;
        run(n, out, NULL, with_codes, gpu->stream);
        return;
    }
    int slots = several ? (int)Slot<2>::COUNT : (int)Slot<1>::COUNT;
    Division d = divide(n.C, false, slots * sizeof(uint4));
    if (d.groups == 0) { die("%s: %d channels; too little shared memory", name, n.C); }
    auto run = several ? launch_backward<2, false, FP8_E4M3> : launch_backward<1, false, FP8_E4M3>;
    run(n, out, measured_amax(out), d, gpu->stream);
    quantize_bf16(out, sums, n.scratch, n.M, n.C, gpu->stream);
}
