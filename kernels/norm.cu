// LayerNorm and RMSNorm. A row is held in registers by a group of warps, V vectors of 8 a lane, so
// it is read once. Which V and how many warps follow from the channels: at most 4 vectors a lane,
// so that the backward pass can keep its column sums in registers too.
#include "device.cuh"

enum { WARPS = 8, MOST_VECTORS = 4, BACKWARD_VECTORS = 2 };

struct Group {
    int warps;  // that share a row
    int id;     // of this group in the block
    int lane;   // of this thread in the group
    int stride; // lanes of a group
};

__device__ __forceinline__ Group this_group(int warps) {
    int threads = warps * WARP;
    return {warps, (int)threadIdx.x / threads, (int)threadIdx.x % threads, threads};
}

// The same sums in every lane of the group. shared: [WARPS] pairs.
__device__ __forceinline__ float2 group_sum(const Group &g, float2 x, float2 *shared) {
    x.x = warp_sum(x.x);
    x.y = warp_sum(x.y);
    if (g.warps == 1) { return x; }
    float2 *mine = shared + g.id * g.warps;
    asm volatile("bar.sync %0, %1;" ::"r"(g.id + 1), "r"(g.stride) : "memory");
    if (g.lane % WARP == 0) { mine[g.lane / WARP] = x; }
    asm volatile("bar.sync %0, %1;" ::"r"(g.id + 1), "r"(g.stride) : "memory");
    float2 sum = mine[0];
    for (int i = 1; i < g.warps; i++) {
        sum.x += mine[i].x;
        sum.y += mine[i].y;
    }
    return sum;
}

template <int V, bool LAYERNORM>
__global__ void __launch_bounds__(WARPS *WARP) norm_forward_kernel(NormForward n, int warps) {
    __shared__ float2 shared[WARPS];
    Group g = this_group(warps);
    int64_t row = min((int64_t)blockIdx.x * (WARPS / warps) + g.id, (int64_t)n.M - 1);
    int vectors = n.C / VEC;
    const Bf16 *in = n.x + row * n.C;
    Floats8 v[V];
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < V; k++) {
        int i = g.lane + k * g.stride;
        v[k] = i < vectors ? load8(in, i) : Floats8{};
#pragma unroll
        for (int j = 0; j < VEC; j++) { sum.x += LAYERNORM ? v[k].v[j] : v[k].v[j] * v[k].v[j]; }
    }
    sum = group_sum(g, sum, shared);
    float mu = LAYERNORM ? sum.x / n.C : 0.0f, square = sum.x, range = 0.0f;
    if (LAYERNORM) {
        float2 squares = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < V; k++) {
            bool inside = g.lane + k * g.stride < vectors;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                float d = v[k].v[j] - mu;
                squares.x += inside ? d * d : 0.0f;
            }
        }
        square = group_sum(g, squares, shared).x;
    }
    float r = rsqrtf(square / n.C + n.eps);
#pragma unroll
    for (int k = 0; k < V; k++) {
        int i = g.lane + k * g.stride;
        if (i >= vectors || n.out == nullptr) { continue; }
        Floats8 w = load8(n.weight, i), b = LAYERNORM ? load8(n.bias, i) : Floats8{};
#pragma unroll
        for (int j = 0; j < VEC; j++) { v[k].v[j] = (v[k].v[j] - mu) * r * w.v[j] + b.v[j]; }
        uint4 packed = pack8(v[k]);
        reinterpret_cast<uint4 *>(n.out + row * n.C)[i] = packed;
        if (n.amax != nullptr) { range = range8(range, unpack8(packed)); }
    }
    if (g.lane == 0) {
        if (LAYERNORM) { n.mean[row] = mu; }
        n.rstd[row] = r;
    }
    if (n.amax != nullptr) { block_amax(n.amax, range); }
}

// Adds the groups' column sums of one kind, group by group, and writes the block's. total: [C].
template <int V>
__device__ void write_partial(float *partials, float *total, const Floats8 *sums, const Group &g,
                              int C) {
    for (int turn = 0; turn < WARPS / g.warps; turn++) {
        __syncthreads();
        if (g.id != turn) { continue; }
#pragma unroll
        for (int k = 0; k < V; k++) {
            int i = g.lane + k * g.stride;
            if (i >= C / VEC) { continue; }
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                float *t = total + i * VEC + j;
                *t = turn == 0 ? sums[k].v[j] : *t + sums[k].v[j];
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < C; i += blockDim.x) {
        partials[(int64_t)blockIdx.x * C + i] = total[i];
    }
    __syncthreads();
}

template <int V, bool LAYERNORM, bool COLUMN_SUMS>
__global__ void __launch_bounds__(WARPS *WARP, V <= BACKWARD_VECTORS ? 2 : 1)
    norm_backward_kernel(NormBackward n, int warps) {
    extern __shared__ float total[]; // [C]
    __shared__ float2 shared[WARPS];
    Group g = this_group(warps);
    int vectors = n.C / VEC, groups = WARPS / warps;
    Floats8 dw[V] = {}, db[V] = {}, cs[V] = {}, w[V];
#pragma unroll
    for (int k = 0; k < V; k++) {
        int i = g.lane + k * g.stride;
        w[k] = i < vectors ? load8(n.weight, i) : Floats8{};
    }
    float range = 0.0f;
    for (int64_t row = (int64_t)blockIdx.x * groups + g.id; row < n.M; row += gridDim.x * groups) {
        float mu = LAYERNORM ? n.mean[row] : 0.0f, r = n.rstd[row];
        uint4 raw_x[V], raw_d[V], raw_r[V]; // packed, to spare registers
#pragma unroll
        for (int k = 0; k < V; k++) {
            int64_t i = g.lane + k * g.stride, at = row * vectors + i;
            bool inside = i < vectors;
            raw_x[k] = inside ? reinterpret_cast<const uint4 *>(n.x)[at] : uint4{};
            raw_d[k] = inside ? reinterpret_cast<const uint4 *>(n.dout)[at] : uint4{};
            raw_r[k] = inside ? reinterpret_cast<const uint4 *>(n.d_residual)[at] : uint4{};
        }
        float2 sum = {0.0f, 0.0f}; // of g, and of g times the normalised x
#pragma unroll
        for (int k = 0; k < V; k++) {
            Floats8 x = unpack8(raw_x[k]), d = unpack8(raw_d[k]);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                float hat = (x.v[j] - mu) * r, gradient = d.v[j] * w[k].v[j];
                bool inside = g.lane + k * g.stride < vectors;
                hat = inside ? hat : 0.0f;
                sum.x += gradient;
                sum.y += gradient * hat;
                dw[k].v[j] += d.v[j] * hat;
                if (LAYERNORM) { db[k].v[j] += d.v[j]; }
            }
        }
        sum = group_sum(g, sum, shared);
        float average = LAYERNORM ? sum.x / n.C : 0.0f, projected = sum.y / n.C;
#pragma unroll
        for (int k = 0; k < V; k++) {
            int64_t i = g.lane + k * g.stride;
            if (i >= vectors) { continue; }
            Floats8 x = unpack8(raw_x[k]), d = unpack8(raw_d[k]), out = unpack8(raw_r[k]);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                float hat = (x.v[j] - mu) * r;
                out.v[j] += r * (d.v[j] * w[k].v[j] - average - hat * projected);
            }
            uint4 packed = pack8(out);
            reinterpret_cast<uint4 *>(n.d_residual)[row * vectors + i] = packed;
            if (n.amax != nullptr) { range = range8(range, unpack8(packed)); }
            if (COLUMN_SUMS) {
                out = unpack8(packed);
#pragma unroll
                for (int j = 0; j < VEC; j++) { cs[k].v[j] += out.v[j]; }
            }
        }
    }
    if (n.amax != nullptr) { block_amax(n.amax, range); }
    int64_t kind = (int64_t)gridDim.x * n.C;
    write_partial<V>(n.scratch, total, dw, g, n.C);
    if (LAYERNORM) { write_partial<V>(n.scratch + kind, total, db, g, n.C); }
    if (COLUMN_SUMS) { write_partial<V>(n.scratch + 2 * kind, total, cs, g, n.C); }
}

// Warps that share a row, and vectors a lane then has.
static void divide_row(int C, int good_vectors, int *warps, int *lane_vectors) {
    int vectors = C / VEC;
    *warps = 1;
    while (*warps < WARPS && vectors > *warps * WARP * good_vectors) { *warps *= 2; }
    *lane_vectors = divide_up(vectors, *warps * WARP);
    if (C % VEC != 0 || *lane_vectors > MOST_VECTORS) {
        die("norm: %d channels; the GPU kernels take a multiple of 8 up to %d", C,
            WARPS * WARP * MOST_VECTORS * VEC);
    }
}

template <int V> static void norm_forward(const NormForward &n, int warps, cudaStream_t stream) {
    int blocks = divide_up(n.M, WARPS / warps);
    if (n.bias != NULL) {
        norm_forward_kernel<V, true><<<blocks, WARPS * WARP, 0, stream>>>(n, warps);
    } else {
        norm_forward_kernel<V, false><<<blocks, WARPS * WARP, 0, stream>>>(n, warps);
    }
}

void gpu_norm_forward(NormForward n, cudaStream_t stream) {
    int warps, vectors;
    divide_row(n.C, MOST_VECTORS, &warps, &vectors);
    switch (vectors) {
    case 1: norm_forward<1>(n, warps, stream); break;
    case 2: norm_forward<2>(n, warps, stream); break;
    case 3: norm_forward<3>(n, warps, stream); break;
    case 4: norm_forward<4>(n, warps, stream); break;
    }
    LAUNCH_CHECK();
}

template <int V, bool LAYERNORM, bool COLUMN_SUMS>
static void norm_backward(const NormBackward &n, int warps, int blocks, cudaStream_t stream) {
    norm_backward_kernel<V, LAYERNORM, COLUMN_SUMS>
        <<<blocks, WARPS * WARP, n.C * sizeof(float), stream>>>(n, warps);
}

template <int V>
static void norm_backward(const NormBackward &n, int warps, int blocks, cudaStream_t stream) {
    bool layernorm = n.mean != NULL, sums = n.column_sums.data != NULL;
    if (layernorm && sums) { norm_backward<V, true, true>(n, warps, blocks, stream); }
    if (layernorm && !sums) { norm_backward<V, true, false>(n, warps, blocks, stream); }
    if (!layernorm && sums) { norm_backward<V, false, true>(n, warps, blocks, stream); }
    if (!layernorm && !sums) { norm_backward<V, false, false>(n, warps, blocks, stream); }
}

void gpu_norm_backward(NormBackward n, cudaStream_t stream) {
    int warps, vectors;
    divide_row(n.C, BACKWARD_VECTORS, &warps, &vectors);
    int blocks = min(PARTIALS, divide_up(n.M, WARPS / warps));
    switch (vectors) {
    case 1: norm_backward<1>(n, warps, blocks, stream); break;
    case 2: norm_backward<2>(n, warps, blocks, stream); break;
    case 3: norm_backward<3>(n, warps, blocks, stream); break;
    case 4: norm_backward<4>(n, warps, blocks, stream); break;
    }
    LAUNCH_CHECK();
    PartialSums sums = {{n.dweight, n.dbias, n.column_sums}, n.scratch, blocks, n.C};
    sum_partials(sums, stream);
}
