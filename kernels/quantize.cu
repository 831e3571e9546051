// Quantises BF16 tensors to FP8 operands of matmuls, with their amax and column sums; counts and
// transposes FP8 codes. Also has sum_partials, the second launch of every sum over rows.
#include "quantize.cuh"

__global__ void amax_kernel(float *amax, const Bf16 *x, int64_t vectors) {
    float largest = 0.0f;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors;
         i += (int64_t)gridDim.x * blockDim.x) {
        largest = amax8(largest, load8(x, i));
    }
    block_amax(amax, largest);
}

void measure_bf16(Operand out, int M, int N, cudaStream_t stream) {
    float *amax = measured_amax(out);
    if (amax == NULL) { return; }
    out.fused = false; // the values are already in BF16
    check_operand("quantize", &out, M, N);
    int64_t vectors = (int64_t)M * N / VEC;
    int blocks = min(divide_up(vectors, 256), 4 * PARTIALS);
    launch(amax_kernel, blocks, 256, stream, amax, out.bf16, vectors);
}

void quantize_bf16(Operand out, Gradient sums, Scratch scratch, int M, int N, cudaStream_t stream) {
    const char *name = "quantize";
    CastSource source(N, out.bf16);
    out.fused = false; // the values are already in BF16
    if (check_operand(name, &out, M, N)) {
        auto run = sums.data != NULL ? quantize<true, CastSource> : quantize<false, CastSource>;
        run(name, source, out, sums, scratch, M, N, stream);
    } else if (sums.data != NULL) {
        sum_columns<false>(name, source, NULL, NULL, sums, scratch, M, N, stream);
    }
}

void gpu_quantize(Gpu *gpu, Operand out, Gradient sums, Scratch scratch, int M, int N) {
    bool codes = out.rows.codes != NULL || out.columns.codes != NULL || measured_amax(out) != NULL;
    if (codes || sums.data != NULL) {
        gpu_family(gpu, codes ? FAMILY_QUANTIZE : FAMILY_ACTIVATIONS);
    }
    measure_bf16(out, M, N, gpu->stream);
    quantize_bf16(out, sums, scratch, M, N, gpu->stream);
}

__global__ void count_codes_kernel(Fp8Counts *all, const uint4 *codes, int64_t vectors,
                                   Fp8Type type) {
    Fp8Counts mine = {};
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint4 v = codes[i];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        for (int byte = 0; byte < 16; byte++) {
            fp8_count(&mine, (uint8_t)(words[byte / 4] >> 8 * (byte % 4)), type);
        }
    }
    unsigned elements = __reduce_add_sync(~0u, (unsigned)mine.elements);
    unsigned largest = __reduce_add_sync(~0u, (unsigned)mine.largest);
    unsigned zero = __reduce_add_sync(~0u, (unsigned)mine.zero);
    unsigned subnormal = __reduce_add_sync(~0u, (unsigned)mine.subnormal);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&all->elements, elements);
        atomicAdd(&all->largest, largest);
        atomicAdd(&all->zero, zero);
        atomicAdd(&all->subnormal, subnormal);
    }
}

void gpu_count_codes(Gpu *gpu, Fp8Counts *counts, const uint8_t *codes, int64_t n, Fp8Type type) {
    gpu_family(gpu, FAMILY_QUANTIZE);
    check_aligned("gpu_count_codes", {codes});
    if (n % 16 != 0) { die("gpu_count_codes: %lld codes; a multiple of 16", (long long)n); }
    int blocks = min(divide_up(n / 16, 256), 4 * PARTIALS);
    launch(count_codes_kernel, blocks, 256, gpu->stream, counts,
           reinterpret_cast<const uint4 *>(codes), n / 16, type);
}

__global__ void __launch_bounds__(TILE_THREADS)
    transpose_codes_kernel(uint8_t *out, const uint8_t *x, int N, int C) {
    __shared__ __align__(16) uint32_t tile[TILE_WORDS];
    int first_row = blockIdx.y * TILE_ROWS, first_column = blockIdx.x * TILE_COLUMNS;
    int row = first_row + threadIdx.x / COLUMN_GROUPS * THREAD_ROWS;
    int column = first_column + threadIdx.x % COLUMN_GROUPS * VEC;
    uint2 codes[THREAD_ROWS] = {};
#pragma unroll
    for (int i = 0; i < THREAD_ROWS && row < N && column < C; i++) {
        codes[i] = *reinterpret_cast<const uint2 *>(x + (row + i) * (int64_t)C + column);
    }
    put_codes<TILE_ROWS>(tile, codes, threadIdx.x % COLUMN_GROUPS * VEC,
                         threadIdx.x / COLUMN_GROUPS);
    __syncthreads();
    write_columns<TILE_ROWS>(out + (int64_t)first_column * N + first_row, tile, TILE_COLUMNS,
                             C - first_column, N - first_row, N, threadIdx.x, TILE_THREADS);
}

void gpu_transpose_codes(Gpu *gpu, uint8_t *out, const uint8_t *x, int N, int C) {
    gpu_family(gpu, FAMILY_QUANTIZE);
    const char *name = "transpose of codes";
    check_tensors(name, N, C, {out, x});
    if (N % 16 != 0 || C % 16 != 0) { die("%s: %d x %d; multiples of 16", name, N, C); }
    launch(transpose_codes_kernel, tile_grid(N, C), TILE_THREADS, gpu->stream, out, x, N, C);
}

// A thread block adds up 32 columns of one kind of PartialSums, with 32 threads per column.
__global__ void sum_partials_kernel(PartialSums s) {
    __shared__ float shared[WARP][WARP + 1];
    Gradient out = s.outs[blockIdx.y];
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
    sum = warp_sum(shared[threadIdx.x][threadIdx.y]); // from here on, one warp per column
    column = (int64_t)blockIdx.x * WARP + threadIdx.y;
    if (threadIdx.x == 0 && column < s.columns) { gradient_store(out, column, sum); }
}

void sum_partials(const PartialSums &sums, cudaStream_t stream) {
    dim3 grid(divide_up(sums.columns, WARP), 3), block(WARP, WARP);
    if (sums.outs[2].data == NULL) { grid.y = sums.outs[1].data == NULL ? 1 : 2; }
    launch(sum_partials_kernel, grid, block, stream, sums);
}

// Returns enough bytes for the partial sums of any kernel. For each column, column_sums_kernel and
// the norms' backward pass write at most PARTIALS partial sums. quantize_kernel writes one for
// every TILE_ROWS rows, and fused_matmul.cu writes one for every MATMUL_ROWS rows.
size_t partial_sums_bytes(int64_t M, int64_t columns) {
    int64_t limited = min((M + ROW_LANES - 1) / ROW_LANES, (int64_t)PARTIALS);
    int64_t tiles = (M + MATMUL_ROWS - 1) / MATMUL_ROWS;
    return (size_t)(max(limited, tiles) * columns) * sizeof(float);
}
