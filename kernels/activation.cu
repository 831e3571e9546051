// GELU and SwiGLU, and sums over rows: the activations' bias gradients come out of the same pass.
#include "activation.cuh"
#include "device.cuh"

// Vector i of out, and its range.
__device__ __forceinline__ void write_vector(Bf16 *out, int64_t i, const Floats8 &x,
                                             const float *amax, float &range) {
    uint4 packed = pack8(x);
    reinterpret_cast<uint4 *>(out)[i] = packed;
    if (amax != nullptr) { range = range8(range, unpack8(packed)); }
}

__global__ void gelu_forward_kernel(Bf16 *out, float *amax, const Bf16 *x, int64_t vectors) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float range = 0.0f;
    if (i < vectors) {
        Floats8 v = load8(x, i);
#pragma unroll
        for (int j = 0; j < VEC; j++) { v.v[j] = gelu(v.v[j]); }
        write_vector(out, i, v, amax, range);
    }
    if (amax != nullptr) { block_amax(amax, range); }
}

void gpu_gelu_forward(Bf16 *out, float *amax, const Bf16 *x, int64_t n, cudaStream_t stream) {
    gelu_forward_kernel<<<divide_up(n / VEC, 256), 256, 0, stream>>>(out, amax, x, n / VEC);
    LAUNCH_CHECK();
}

__global__ void swiglu_forward_kernel(Bf16 *out, float *amax, const Bf16 *x, int64_t count,
                                      int per_row) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float range = 0.0f;
    if (i < count) {
        int64_t at = i / per_row * 2 * per_row + i % per_row;
        Floats8 gate = load8(x, at), up = load8(x, at + per_row);
#pragma unroll
        for (int j = 0; j < VEC; j++) { up.v[j] *= gate.v[j] * sigmoid(gate.v[j]); }
        write_vector(out, i, up, amax, range);
    }
    if (amax != nullptr) { block_amax(amax, range); }
}

void gpu_swiglu_forward(Bf16 *out, float *amax, const Bf16 *x, int M, int F, cudaStream_t stream) {
    int64_t count = (int64_t)M * F / VEC;
    swiglu_forward_kernel<<<divide_up(count, 256), 256, 0, stream>>>(out, amax, x, count, F / VEC);
    LAUNCH_CHECK();
}

__global__ void swiglu_backward_kernel(Bf16 *dx, float *amax, const Bf16 *dout, const Bf16 *x,
                                       int64_t count, int per_row) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float range = 0.0f;
    if (i < count) {
        int64_t at = i / per_row * 2 * per_row + i % per_row;
        Floats8 gate = load8(x, at), up = load8(x, at + per_row), d = load8(dout, i);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float s = sigmoid(gate.v[j]), silu = gate.v[j] * s;
            float dgate = d.v[j] * up.v[j] * (s + silu * (1.0f - s));
            up.v[j] = d.v[j] * silu;
            gate.v[j] = dgate;
        }
        write_vector(dx, at, gate, amax, range);
        write_vector(dx, at + per_row, up, amax, range);
    }
    if (amax != nullptr) { block_amax(amax, range); }
}

void gpu_swiglu_backward(Bf16 *dx, float *amax, const Bf16 *dout, const Bf16 *x, int M, int F,
                         cudaStream_t stream) {
    int64_t count = (int64_t)M * F / VEC;
    swiglu_backward_kernel<<<divide_up(count, 256), 256, 0, stream>>>(dx, amax, dout, x, count,
                                                                      F / VEC);
    LAUNCH_CHECK();
}

// ---- sums over rows -----------------------------------------------------------------------------

enum { ROW_LANES = 8, SUM_COLUMNS = WARP * VEC }; // a block's threads: 32 vectors wide, 8 rows high

// The column sums of x [M,N], a part of the rows a block: partials[blockIdx.y][N]. With GELU, of
// dx = x gelu'(g.x), which is written on the way.
template <bool GELU>
__global__ void __launch_bounds__(WARP *ROW_LANES)
    column_sums_kernel(float *partials, const Bf16 *x, GeluBackward g, int M, int N) {
    __shared__ float shared[ROW_LANES][SUM_COLUMNS];
    int vectors = N / VEC, i = blockIdx.x * WARP + threadIdx.x;
    float range = 0.0f;
    Floats8 sum = {};
    if (i < vectors) {
#pragma unroll 4
        for (int64_t row = blockIdx.y * ROW_LANES + threadIdx.y; row < M;
             row += gridDim.y * ROW_LANES) {
            Floats8 v = load8(x, row * vectors + i);
            if (GELU) {
                Floats8 p = load8(g.x, row * vectors + i);
#pragma unroll
                for (int j = 0; j < VEC; j++) { v.v[j] *= gelu_slope(p.v[j]); }
                v = rounded8(v);
                store8(g.dx, row * vectors + i, v);
                if (g.amax != nullptr) { range = range8(range, v); }
            }
#pragma unroll
            for (int j = 0; j < VEC; j++) { sum.v[j] += v.v[j]; }
        }
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) { shared[threadIdx.y][threadIdx.x * VEC + j] = sum.v[j]; }
    __syncthreads();
    int column = threadIdx.y * WARP + threadIdx.x; // 256 threads, 256 columns
    float total = shared[0][column];
    for (int lane = 1; lane < ROW_LANES; lane++) { total += shared[lane][column]; }
    int64_t at = (int64_t)blockIdx.x * SUM_COLUMNS + column;
    if (at < N) { partials[(int64_t)blockIdx.y * N + at] = total; }
    if (GELU && g.amax != nullptr) { block_amax(g.amax, range); }
}

// A block: 32 columns of a kind, 32 lanes of partial sums.
__global__ void sum_partials_kernel(PartialSums s) {
    __shared__ float shared[WARP][WARP + 1];
    GradientOut out = s.outs[blockIdx.y];
    const float *partials = s.partials + blockIdx.y * s.count * s.columns;
    int64_t column = (int64_t)blockIdx.x * WARP + threadIdx.x;
    float sum = 0.0f;
    if (out.data == nullptr) { return; }
#pragma unroll 8
    for (int i = threadIdx.y; i < s.count && column < s.columns; i += WARP) {
        sum += partials[i * s.columns + column];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(shared[threadIdx.x][threadIdx.y]); // a warp a column now
    column = (int64_t)blockIdx.x * WARP + threadIdx.y;
    if (threadIdx.x == 0 && column < s.columns) { gradient_store(out, column, sum); }
}

void sum_partials(const PartialSums &sums, cudaStream_t stream) {
    dim3 grid(divide_up(sums.columns, WARP), 3), block(WARP, WARP);
    if (sums.outs[2].data == NULL) { grid.y = sums.outs[1].data == NULL ? 1 : 2; }
    sum_partials_kernel<<<grid, block, 0, stream>>>(sums);
    LAUNCH_CHECK();
}

size_t partial_sums_bytes(int64_t columns) {
    return (size_t)PARTIALS * (size_t)columns * sizeof(float);
}

static dim3 column_sums_grid(int M, int N) {
    int across = divide_up(N, SUM_COLUMNS);
    int down = max(1, min(PARTIALS, 8 * PARTIALS / across));
    return dim3(across, min(down, divide_up(M, ROW_LANES)));
}

void gpu_column_sums(GradientOut sums, const Bf16 *x, float *scratch, int M, int N,
                     cudaStream_t stream) {
    dim3 grid = column_sums_grid(M, N), block(WARP, ROW_LANES);
    column_sums_kernel<false><<<grid, block, 0, stream>>>(scratch, x, {}, M, N);
    LAUNCH_CHECK();
    sum_partials({{sums}, scratch, (int)grid.y, N}, stream);
}

void gpu_gelu_backward(GeluBackward g, cudaStream_t stream) {
    dim3 grid = column_sums_grid(g.M, g.F), block(WARP, ROW_LANES);
    column_sums_kernel<true><<<grid, block, 0, stream>>>(g.scratch, g.dout, g, g.M, g.F);
    LAUNCH_CHECK();
    sum_partials({{g.column_sums}, g.scratch, (int)grid.y, g.F}, stream);
}
