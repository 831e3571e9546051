#include "device.cuh"

__global__ void embedding_forward_kernel(Bf16 *out, const int *tokens, const Bf16 *wte,
                                         const Bf16 *wpe, int64_t vectors, int T, int per_row) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) { return; }
    int64_t row = i / per_row;
    int column = (int)(i % per_row);
    Floats8 x = load8(wte, (int64_t)tokens[row] * per_row + column);
    if (wpe != nullptr) {
        Floats8 p = load8(wpe, row % T * per_row + column);
#pragma unroll
        for (int j = 0; j < VEC; j++) { x.v[j] += p.v[j]; }
    }
    store8(out, i, x);
}

void gpu_embedding_forward(Bf16 *out, const int *tokens, const Bf16 *wte, const Bf16 *wpe, int B,
                           int T, int C, cudaStream_t stream) {
    int64_t vectors = (int64_t)B * T * C / VEC;
    embedding_forward_kernel<<<divide_up(vectors, 256), 256, 0, stream>>>(out, tokens, wte, wpe,
                                                                          vectors, T, C / VEC);
    LAUNCH_CHECK();
}

// A block adds up one token's rows. Its threads are laid out as row_lanes x columns of 8; the row
// lanes' sums meet in shared memory, in order.
__global__ void embedding_backward_kernel(GradientOut dwte, const Bf16 *dout, const int *tokens,
                                          const int *rows, const int *starts, const int *runs,
                                          int per_row) {
    extern __shared__ float shared[]; // [blockDim.y][blockDim.x * VEC]
    int run = blockIdx.x;
    if (run >= runs[0]) { return; }
    int begin = starts[run], end = starts[run + 1], token = tokens[rows[begin]];
    for (int column = threadIdx.x; column - (int)threadIdx.x < per_row; column += blockDim.x) {
        Floats8 sum = {};
        for (int r = begin + threadIdx.y; r < end && column < per_row; r += blockDim.y) {
            Floats8 d = load8(dout, (int64_t)rows[r] * per_row + column);
#pragma unroll
            for (int j = 0; j < VEC; j++) { sum.v[j] += d.v[j]; }
        }
        float *mine = shared + (threadIdx.y * blockDim.x + threadIdx.x) * VEC;
#pragma unroll
        for (int j = 0; j < VEC; j++) { mine[j] = sum.v[j]; }
        __syncthreads();
        if (threadIdx.y == 0 && column < per_row) {
            int lanes = min((int)blockDim.y, end - begin);
            for (int y = 1; y < lanes; y++) {
#pragma unroll
                for (int j = 0; j < VEC; j++) { mine[j] += mine[y * blockDim.x * VEC + j]; }
            }
            for (int j = 0; j < VEC; j++) {
                gradient_store(dwte, ((int64_t)token * per_row + column) * VEC + j, mine[j]);
            }
        }
        __syncthreads();
    }
}

void gpu_embedding_backward(GradientOut dwte, const Bf16 *dout, const int *tokens, const int *rows,
                            const int *starts, const int *runs, int M, int C, cudaStream_t stream) {
    dim3 block(32, 8);
    size_t shared = (size_t)block.x * block.y * VEC * sizeof(float);
    dwte.accumulate = true;
    embedding_backward_kernel<<<M, block, shared, stream>>>(dwte, dout, tokens, rows, starts, runs,
                                                            C / VEC);
    LAUNCH_CHECK();
}

__global__ void position_backward_kernel(GradientOut dwpe, const Bf16 *dout, int B,
                                         int64_t vectors) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; // a vector of [T,C]
    if (i >= vectors) { return; }
    Floats8 sum = {};
    for (int b = 0; b < B; b++) {
        Floats8 d = load8(dout, b * vectors + i);
#pragma unroll
        for (int j = 0; j < VEC; j++) { sum.v[j] += d.v[j]; }
    }
    for (int j = 0; j < VEC; j++) { gradient_store(dwpe, i * VEC + j, sum.v[j]); }
}

void gpu_position_backward(GradientOut dwpe, const Bf16 *dout, int B, int T, int C,
                           cudaStream_t stream) {
    int64_t vectors = (int64_t)T * C / VEC;
    position_backward_kernel<<<divide_up(vectors, 128), 128, 0, stream>>>(dwpe, dout, B, vectors);
    LAUNCH_CHECK();
}
