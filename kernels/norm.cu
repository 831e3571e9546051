// LayerNorm and RMSNorm, forward. A row is held in registers by a group of warps, at most 4 vectors
// of 8 a lane, so it is read once.
#include "device.cuh"

enum { WARPS = 8, MOST_VECTORS = 4 };

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

// Warps that share a row, and vectors a lane then has.
static void divide_row(int C, int *warps, int *lane_vectors) {
    int vectors = C / VEC;
    *warps = 1;
    while (*warps < WARPS && vectors > *warps * WARP * MOST_VECTORS) { *warps *= 2; }
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
    divide_row(n.C, &warps, &vectors);
    switch (vectors) {
    case 1: norm_forward<1>(n, warps, stream); break;
    case 2: norm_forward<2>(n, warps, stream); break;
    case 3: norm_forward<3>(n, warps, stream); break;
    case 4: norm_forward<4>(n, warps, stream); break;
    }
    LAUNCH_CHECK();
}
