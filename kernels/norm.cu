// LayerNorm and RMSNorm, forward. A row is held in registers by one warp, or by a few when it is
// long, so it is read once.
#include "device.cuh"

enum { WARPS = 8, MOST_VECTORS = 8, MOST_WARPS_A_ROW = 4 };

// The same sum in every lane of the W warps that share a row. buffer: [W]
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

// W warps a row, V vectors of 8 a lane. inverse: 1 / C
template <int W, int V, bool LAYERNORM>
__global__ void __launch_bounds__(WARPS *WARP, 3)
    norm_forward_kernel(NormForward n, float inverse) {
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
#pragma unroll
            for (int j = 0; j < VEC; j++) { sum += v[k].v[j]; }
        }
        mu = row_sum<W>(sum, shared[0] + group * W, group, lane) * inverse;
    }
#pragma unroll
    for (int k = 0; k < V; k++) {
        if (LAYERNORM && lane + k * LANES >= vectors) { continue; }
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            v[k].v[j] -= mu;
            squares = fmaf(v[k].v[j], v[k].v[j], squares);
        }
    }
    squares = row_sum<W>(squares, shared[1] + group * W, group, lane);
    float r = rsqrtf(fmaf(squares, inverse, n.eps)), range = 0.0f;
    if (lane == 0) {
        if (LAYERNORM) { n.mean[row] = mu; }
        n.rstd[row] = r;
    }
    if (n.out == nullptr) { return; }
#pragma unroll
    for (int k = 0; k < V; k++) {
        int i = lane + k * LANES;
        if (i >= vectors) { continue; }
        Floats8 w = load8(n.weight, i), b = LAYERNORM ? load8(n.bias, i) : Floats8{};
#pragma unroll
        for (int j = 0; j < VEC; j++) { v[k].v[j] = fmaf(v[k].v[j] * r, w.v[j], b.v[j]); }
        uint4 packed = pack8(v[k]);
        reinterpret_cast<uint4 *>(n.out)[first + i] = packed;
        if (n.amax != nullptr) { range = range8(range, unpack8(packed)); }
    }
    if (n.amax != nullptr) { block_amax(n.amax, range); }
}

template <int W, int V> static void norm_forward(const NormForward &n, cudaStream_t stream) {
    int blocks = divide_up(n.M, WARPS / W);
    auto kernel = n.bias != NULL ? norm_forward_kernel<W, V, true>
                                 : norm_forward_kernel<W, V, false>;
    kernel<<<blocks, WARPS * WARP, 0, stream>>>(n, 1.0f / (float)n.C);
    LAUNCH_CHECK();
}

void gpu_norm_forward(NormForward n, cudaStream_t stream) {
    const int most = MOST_WARPS_A_ROW * WARP * MOST_VECTORS * VEC;
    if (n.C % VEC != 0 || n.C > most) {
        die("norm: %d channels; the GPU kernels take a multiple of 8 up to %d", n.C, most);
    }
    int vectors = divide_up(n.C / VEC, WARP); // a lane's, when one warp takes a row
    switch (vectors) {
    case 1: norm_forward<1, 1>(n, stream); return;
    case 2: norm_forward<1, 2>(n, stream); return;
    case 3: norm_forward<1, 3>(n, stream); return;
    case 4: norm_forward<1, 4>(n, stream); return;
    case 5: norm_forward<1, 5>(n, stream); return;
    case 6: norm_forward<1, 6>(n, stream); return;
    case 7: norm_forward<1, 7>(n, stream); return;
    case 8: norm_forward<2, 4>(n, stream); return;
    }
    if (vectors <= 12) {
        norm_forward<2, 6>(n, stream);
    } else if (vectors <= 16) {
        norm_forward<2, 8>(n, stream);
    } else if (vectors <= 24) {
        norm_forward<4, 6>(n, stream);
    } else {
        norm_forward<4, 8>(n, stream);
    }
}
