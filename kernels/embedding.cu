// Token and position embeddings, forward and backward. The backward pass sums in a fixed order.
#include "device.cuh"

__global__ void embedding_forward_kernel(Bf16 *out, const int *tokens, const int *starts,
                                         const Bf16 *wte, const Bf16 *wpe, int64_t vectors, int T,
                                         int per_row) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) { return; }
    int64_t row = i / per_row;
    int column = (int)(i % per_row);
    Floats8 x = load8(wte, (int64_t)tokens[row] * per_row + column);
    if (wpe != nullptr) {
        int position = (int)(row % T) - (starts != nullptr ? starts[row] : 0);
        add8(x, load8(wpe, (int64_t)position * per_row + column));
    }
    store8(out, i, x);
}

void gpu_embedding_forward(Gpu *gpu, Bf16 *out, const int *tokens, const int *starts,
                           const Bf16 *wte, const Bf16 *wpe, int B, int T, int C) {
    gpu_family(gpu, FAMILY_EMBEDDINGS);
    int64_t vectors = (int64_t)B * T * C / VEC;
    check_tensors("embedding forward", (int64_t)B * T, C, {out, wte, wpe});
    launch(embedding_forward_kernel, divide_up(vectors, 256), 256, gpu->stream, out, tokens, starts,
           wte, wpe, vectors, T, C / VEC);
}

enum { EMBEDDING_THREADS = 256 };

// Returns the sum of vector `column` of rows[begin], rows[begin + step] and so on, before
// rows[end].
__device__ __forceinline__ Floats8 sum_rows(const Bf16 *dout, const int *rows, int begin, int end,
                                            int step, int per_row, int column) {
    Floats8 sum = {};
#pragma unroll 4
    for (int r = begin; r < end; r += step) {
        add8(sum, load8(dout, (int64_t)rows[r] * per_row + column));
    }
    return sum;
}

// A warp sums the rows of a short run (TokenRuns). A thread block sums 32 vectors of columns of a
// long run: each warp sums every WARPS-th row, and warp 0 adds up the warps' sums in order.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_backward_kernel(Gradient dwte, const Bf16 *dout, const int *tokens, TokenRuns sorted,
                              int per_row) {
    enum { WARPS = EMBEDDING_THREADS / WARP };
    __shared__ float4 sums[WARPS][2 * WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int pieces = (per_row + WARP - 1) / WARP;
    const int *rows = sorted.rows, *starts = sorted.starts, *runs = sorted.runs;
    const int *long_runs = runs + 2;
    for (int item = blockIdx.x; item < runs[1] * pieces; item += gridDim.x) {
        int run = long_runs[item / pieces], column = item % pieces * WARP + lane;
        int begin = starts[run], end = starts[run + 1];
        bool inside = column < per_row;
        Floats8 sum = sum_rows(dout, rows, begin + warp, inside ? end : 0, WARPS, per_row, column);
        store_floats8(reinterpret_cast<float *>(sums[warp]), lane, sum);
        __syncthreads();
        if (warp == 0 && inside) {
            for (int w = 1; w < WARPS; w++) { add8(sum, load_floats8(sums[w], TYPE_F32, lane)); }
            gradient_store8(dwte, (int64_t)tokens[rows[begin]] * per_row + column, sum);
        }
        __syncthreads();
    }
    for (int run = blockIdx.x * WARPS + warp; run < runs[0]; run += gridDim.x * WARPS) {
        int begin = starts[run], end = starts[run + 1];
        if (end - begin >= EMBEDDING_LONG_RUN) { continue; }
        int64_t first = (int64_t)tokens[rows[begin]] * per_row;
        for (int column = lane; column < per_row; column += WARP) {
            Floats8 sum = sum_rows(dout, rows, begin, end, 1, per_row, column);
            gradient_store8(dwte, first + column, sum);
        }
    }
}

void gpu_embedding_backward(Gpu *gpu, Gradient dwte, const Bf16 *dout, const int *tokens,
                            TokenRuns runs, int M, int C) {
    gpu_family(gpu, FAMILY_EMBEDDINGS);
    int blocks = min(4 * PARTIALS, divide_up(M, EMBEDDING_THREADS / WARP));
    check_tensors("embedding backward", M, C, {dwte.data, dout});
    dwte.accumulate = true;
    launch(embedding_backward_kernel, blocks, EMBEDDING_THREADS, gpu->stream, dwte, dout, tokens,
           runs, C / VEC);
}

__global__ void position_backward_kernel(Gradient dwpe, const Bf16 *dout, int B, int64_t vectors) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; // i: index of a vector in [T,C]
    if (i >= vectors) { return; }
    Floats8 sum = {};
    for (int b = 0; b < B; b++) { add8(sum, load8(dout, b * vectors + i)); }
    gradient_store8(dwpe, i, sum);
}

void gpu_position_backward(Gpu *gpu, Gradient dwpe, const Bf16 *dout, int B, int T, int C) {
    gpu_family(gpu, FAMILY_EMBEDDINGS);
    int64_t vectors = (int64_t)T * C / VEC;
    check_tensors("position backward", (int64_t)B * T, C, {dwpe.data, dout});
    launch(position_backward_kernel, divide_up(vectors, 128), 128, gpu->stream, dwpe, dout, B,
           vectors);
}
