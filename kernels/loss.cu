// The loss: cross-entropy of the logits' softmax. Its gradient replaces the logits, or is written
// in FP8.
#include "quantize.cuh"

#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

// Combines the x of all threads of the block, and returns the result in every thread. All threads
// must call it, and a kernel may call it only once: no barrier separates its reads of `shared` from
// a next call.
__device__ MaxSum block_max_sum(MaxSum x, MaxSum *shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        MaxSum other = {__shfl_xor_sync(~0u, x.max, offset), __shfl_xor_sync(~0u, x.sum, offset)};
        x = combine(x, other);
    }
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    x = shared[0];
    for (int i = 1; i < warps; i++) { x = combine(x, shared[i]); }
    return x;
}

// If 0 <= at < 8, subtracts `scale` from element `at`, which belongs to the target.
__device__ __forceinline__ void subtract_onehot(Floats8 &v, int at, float scale) {
    for (int j = 0; j < VEC; j++) { v.v[j] -= j == at ? scale : 0.0f; }
}

// Returns the logit x or, with CAPS, cap tanh(x / cap) with an error of at most 2^-22 cap.
template <bool CAPS> __device__ __forceinline__ float capped(float x, float cap) {
    const float log2e = 1.4426950408889634f;
    return CAPS ? cap * fmaf(2.0f, sigmoid2(x * (2.0f * log2e / cap)), -1.0f) : x;
}

// Unpacks the 8 logits from `column` on and, with CAPS, caps them. With CAPS, logits past the
// vocabulary's end become minus infinity; without CAPS, they do not change.
template <bool CAPS>
__device__ __forceinline__ Floats8 capped8(uint4 logits, int column, int V, float cap) {
    Floats8 v = unpack8(logits);
    if constexpr (CAPS) {
        for (int j = 0; j < VEC; j++) {
            v.v[j] = column + j < V ? capped<CAPS>(v.v[j], cap) : -CUDART_INF_F;
        }
    }
    return v;
}

// The numbers of a row that the gradient of its logits needs.
struct RowLoss {
    float lse, scale; // lse: the row's log-sum-exp; scale: the factor of its softmax
};

__device__ __forceinline__ RowLoss row_loss(float lse, const LossTerms &terms) {
    float scale = terms.gradient_scale;
    return {lse, terms.z_loss > 0.0f ? scale * fmaf(2.0f * terms.z_loss, lse, 1.0f) : scale};
}

// Returns the gradient of 8 logits (cpu.h), which is 0 past the vocabulary's end.
template <bool CAPS>
__device__ __forceinline__ Floats8 loss_gradient(uint4 logits, RowLoss row, int column, int V,
                                                 int target, const LossTerms &terms) {
    const float log2e = 1.4426950408889634f;
    Floats8 y = capped8<CAPS>(logits, column, V, terms.softcap), v;
    for (int j = 0; j < VEC; j++) { v.v[j] = row.scale * exp2_fast((y.v[j] - row.lse) * log2e); }
    if (column + VEC > V || (unsigned)(target - column) < VEC) {
        for (int j = 0; j < VEC; j++) { v.v[j] = column + j < V ? v.v[j] : 0.0f; }
        subtract_onehot(v, target - column, terms.gradient_scale);
    }
    if constexpr (CAPS) {
        float inverse = 1.0f / terms.softcap;
        for (int j = 0; j < VEC; j++) {
            float t = y.v[j] * inverse;
            v.v[j] = column + j < V ? v.v[j] * fmaf(-t, t, 1.0f) : 0.0f;
        }
    }
    return v;
}

// Sets to 0 the gradient of a row that is left out, in vectors `begin` to `end` - 1. The block with
// the row's first vector also sets the loss to 0.
__device__ __forceinline__ void leave_out(float *loss, Bf16 *x, int begin, int end) {
    if (begin == 0 && threadIdx.x == 0) { *loss = 0.0f; }
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) { store8(x, i, Floats8{}); }
}

// One cluster of blocks per row. Each block has its part of the row in shared memory, so that the
// row is read once. A thread works only on values that it copied itself, so that no barrier is
// needed. The thread replaces its logits by exp(logit - the maximum of the thread's logits), so
// that each exponential is computed once. These values are FP16: its 11 significant bits are more
// than the 8 of the BF16 result. With CAPS, the logits stay in shared memory, because the cap's
// gradient needs them.
template <bool CAPS>
__global__ void __launch_bounds__(512)
    cross_entropy_cluster_kernel(float *losses, Bf16 *logits, const int *targets, int V, int P,
                                 int per_block, LossTerms terms) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint4 part[]; // [per_block]
    __shared__ MaxSum shared[WARP], block_result;
    namespace cg = cooperative_groups;
    const float log2e = 1.4426950408889634f;
    cg::cluster_group cluster = cg::this_cluster();
    int blocks = (int)cluster.num_blocks(), rank = (int)cluster.block_rank();
    int row = blockIdx.x / blocks, target = targets[row], vectors = P / VEC;
    int begin = rank * per_block, end = min(vectors, begin + per_block);
    Bf16 *x = logits + (int64_t)row * P;
    if (target < 0) {
        leave_out(losses + row, x, begin, end);
        return;
    }
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        __pipeline_memcpy_async(part + i - begin, reinterpret_cast<const uint4 *>(x) + i,
                                sizeof(uint4));
    }
    __pipeline_commit();
    float target_logit = capped<CAPS>(to_float(x[target]), terms.softcap);
    __pipeline_wait_prior(0);
    float max = -CUDART_INF_F, sum = 0.0f;
    for (int i = begin + threadIdx.x; i < end && i * VEC < V; i += blockDim.x) {
        if ((i + 1) * VEC > V) { part[i - begin] = cut_off(part[i - begin], V - i * VEC); }
        float m = max8(part[i - begin]);
        max = m > max || m != m ? m : max;
    }
    max = capped<CAPS>(max, terms.softcap);
    for (int i = begin + threadIdx.x; i < end && i * VEC < V; i += blockDim.x) {
        Floats8 v = capped8<CAPS>(part[i - begin], i * VEC, V, terms.softcap);
        uint4 packed;
        __half2 *halves = reinterpret_cast<__half2 *>(&packed);
        for (int j = 0; j < VEC; j++) {
            v.v[j] = exp2_fast((v.v[j] - max) * log2e);
            sum += v.v[j];
        }
        if constexpr (!CAPS) {
            for (int j = 0; j < VEC; j += 2) {
                halves[j / 2] = __floats2half2_rn(v.v[j], v.v[j + 1]);
            }
            part[i - begin] = packed;
        }
    }
    MaxSum all = block_max_sum({max, sum}, shared);
    if (blocks > 1) {
        if (threadIdx.x == 0) { block_result = all; }
        // this barrier also ensures that the target's logit is read before it is overwritten
        cluster.sync();
        all = *cluster.map_shared_rank(&block_result, 0);
        for (int i = 1; i < blocks; i++) {
            all = combine(all, *cluster.map_shared_rank(&block_result, i));
        }
    }
    RowLoss result = row_loss(logf(all.sum) + all.max, terms);
    if (rank == 0 && threadIdx.x == 0) { losses[row] = result.lse - target_logit; }
    float factor = exp2_fast((max - all.max) * log2e) * (result.scale / all.sum);
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        if constexpr (CAPS) {
            store8(x, i, loss_gradient<CAPS>(part[i - begin], result, i * VEC, V, target, terms));
        } else {
            uint4 packed = i * VEC < V ? part[i - begin] : uint4{};
            const __half2 *halves = reinterpret_cast<const __half2 *>(&packed);
            Floats8 v;
            for (int j = 0; j < VEC; j += 2) {
                float2 pair = __half22float2(halves[j / 2]);
                v.v[j] = pair.x * factor;
                v.v[j + 1] = pair.y * factor;
            }
            if (i == target / VEC) { subtract_onehot(v, target % VEC, terms.gradient_scale); }
            store8(x, i, v);
        }
    }
    if (blocks > 1) { cluster.sync(); } // no block ends while others may read its result
#endif
}

// One block per row. The block reads the row once; each thread loads several vectors at a time. If
// `rows` is not NULL, the row's RowLoss is stored there. A row that is left out gets a RowLoss that
// makes its softmax 0. With GRADIENT, the block reads the row a second time, from L2 at best, and
// writes the gradient in place. The kernel works on every device, for rows of any length.
template <bool GRADIENT, bool CAPS>
__global__ void __launch_bounds__(512)
    cross_entropy_kernel(float *losses, RowLoss *rows, Bf16 *logits, const int *targets, int V,
                         int P, LossTerms terms) {
    enum { AT_ONCE = 4 };
    __shared__ MaxSum shared[WARP];
    const float log2e = 1.4426950408889634f;
    const uint4 nothing = {0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u}; // minus infinity
    int row = blockIdx.x, target = targets[row], vectors = (V + VEC - 1) / VEC;
    uint4 *x = reinterpret_cast<uint4 *>(logits + (int64_t)row * P);
    if (target < 0) {
        leave_out(losses + row, logits + (int64_t)row * P, 0, GRADIENT ? P / VEC : 0);
        if (rows != nullptr && threadIdx.x == 0) { rows[row] = {CUDART_INF_F, 0.0f}; }
        return;
    }
    MaxSum mine = {-CUDART_INF_F, 0.0f};
    for (int first = threadIdx.x; first < vectors; first += AT_ONCE * blockDim.x) {
        uint4 part[AT_ONCE];
        float max = mine.max, sum = 0.0f;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            int i = first + k * blockDim.x;
            part[k] = i < vectors ? x[i] : nothing;
            if ((i + 1) * VEC > V && i < vectors) { part[k] = cut_off(part[k], V - i * VEC); }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            float m = capped<CAPS>(max8(part[k]), terms.softcap);
            max = m > max || m != m ? m : max;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            Floats8 v = capped8<CAPS>(part[k], (first + k * blockDim.x) * VEC, V, terms.softcap);
            for (int j = 0; j < VEC; j++) { sum += exp2_fast((v.v[j] - max) * log2e); }
        }
        mine = {max, mine.sum * exp2_fast((mine.max - max) * log2e) + sum};
    }
    MaxSum all = block_max_sum(mine, shared);
    RowLoss result = row_loss(logf(all.sum) + all.max, terms);
    if (threadIdx.x == 0) {
        float logit = to_float(logits[(int64_t)row * P + target]);
        losses[row] = result.lse - capped<CAPS>(logit, terms.softcap);
        if (rows != nullptr) { rows[row] = result; }
    }
    if (!GRADIENT) { return; }
    __syncthreads(); // the target's logit is read before it is overwritten
    for (int i = threadIdx.x; i < P / VEC; i += blockDim.x) {
        x[i] = pack8(loss_gradient<CAPS>(x[i], result, i * VEC, V, target, terms));
    }
}

// Computes the losses and each row's RowLoss, for logits without a cap, from the maxima and sums
// [tiles][M] that gpu_matmul_max_sums has written. A block takes 32 rows; each of its 8 warps
// combines every 8th tile of these rows.
enum { COMBINING_WARPS = 8 };
__global__ void __launch_bounds__(COMBINING_WARPS *WARP)
    row_losses_kernel(float *losses, RowLoss *rows, const MaxSum *max_sums, const Bf16 *logits,
                      const int *targets, int M, int tiles, int P, LossTerms terms) {
    __shared__ MaxSum shared[COMBINING_WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * WARP + lane;
    MaxSum all = {-CUDART_INF_F, 0.0f};
#pragma unroll 4
    for (int i = warp; i < tiles && row < M; i += COMBINING_WARPS) {
        all = combine(all, max_sums[(int64_t)i * M + row]);
    }
    shared[warp][lane] = all;
    __syncthreads();
    if (warp > 0 || row >= M) { return; }
    for (int i = 1; i < COMBINING_WARPS; i++) { all = combine(all, shared[i][lane]); }
    int target = targets[row];
    if (target < 0) {
        losses[row] = 0.0f;
        rows[row] = {CUDART_INF_F, 0.0f};
    } else {
        rows[row] = row_loss(logf(all.sum) + all.max, terms);
        losses[row] = rows[row].lse - to_float(logits[(int64_t)row * P + target]);
    }
}

template <bool CAPS> struct LossSource : Position {
    enum { GRADIENT = 1 };
    struct Raw {
        uint4 logits;
        RowLoss row;
        int target;
    };
    const Bf16 *logits;
    const RowLoss *rows;
    const int *targets;
    LossTerms terms;
    int V, column;
    __device__ void begin(int row, int vector) {
        rows += row;
        targets += row;
        column = vector * VEC;
        Position::begin(row, vector);
    }
    // a row that is left out is read as zeros: its softmax is 0, but 0 times NaN would be NaN
    __device__ Raw fetch(int i) const {
        int target = targets[i];
        return {target < 0 ? uint4{} : raw8(logits, index(i)), rows[i], target};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        values[0] = loss_gradient<CAPS>(raw.logits, raw.row, column, V, raw.target, terms);
    }
};

// Returns how many blocks of a cluster share a row, so that at least two blocks fit on an SM at a
// time. Returns 0 if the row is too long, or if the code was compiled for an older device: such
// code has no clusters on any device.
static int cluster_blocks(int P) {
    int device, bytes;
    cudaFuncAttributes code;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    CUDA_CHECK(cudaFuncGetAttributes(&code, cross_entropy_cluster_kernel<false>));
    if (code.ptxVersion < 90 || code.binaryVersion < 90) { return 0; }
    int64_t most_bytes = bytes / 2 - (10 << 10); // 104 KB on Hopper
    int blocks = 1;
    while (blocks <= 8 && (int64_t)P * 2 > blocks * most_bytes) { blocks *= 2; }
    return blocks <= 8 ? blocks : 0;
}

// Returns the number of threads of a block that works on n vectors.
static int block_threads(int n) {
    return min(512, divide_up(n, WARP) * WARP);
}

template <bool CAPS>
static void cross_entropy_of(float *losses, Operand logits, Scratch scratch, Scratch max_sums,
                             const int *targets, int M, int V, int P, LossTerms terms,
                             cudaStream_t stream) {
    const char *name = "cross-entropy";
    bool gradient = terms.gradient_scale > 0.0f;
    if (max_sums.data != NULL && (!gradient || !logits.fused || CAPS)) {
        die("%s: rows' maxima and sums, but no gradient in FP8, or a cap", name);
    }
    if (!gradient) { logits = operand_bf16(logits.bf16); }
    check_operand(name, &logits, M, P);
    if (logits.bf16 == NULL || V < 1 || V > P) {
        die("%s: no logits, or %d of a vocabulary of %d", name, P, V);
    }
    if (!gradient || logits.fused) {
        RowLoss *rows = gradient ? reinterpret_cast<RowLoss *>(scratch.data) : NULL;
        if (gradient) { check_scratch(name, scratch, loss_scratch_floats(M)); }
        if (max_sums.data != NULL) {
            check_scratch(name, max_sums, max_sums_floats(M, P));
            launch(row_losses_kernel, divide_up(M, WARP), COMBINING_WARPS * WARP, stream, losses,
                   rows, reinterpret_cast<const MaxSum *>(max_sums.data), logits.bf16, targets, M,
                   max_sums_tiles(P), P, terms);
        } else {
            launch(cross_entropy_kernel<false, CAPS>, M, block_threads(divide_up(V, VEC)), stream,
                   losses, rows, logits.bf16, targets, V, P, terms);
        }
        if (!gradient) { return; }
        LossSource<CAPS> source = {{P / VEC}, logits.bf16, rows, targets, terms, V};
        quantize<false>(name, source, logits, {}, {}, M, P, stream);
        return;
    }
    int blocks = cluster_blocks(P), vectors = P / VEC;
    if (blocks == 0) {
        launch(cross_entropy_kernel<true, CAPS>, M, block_threads(vectors), stream, losses,
               (RowLoss *)NULL, logits.bf16, targets, V, P, terms);
    } else {
        int per_block = divide_up(vectors, blocks);
        size_t shared = (size_t)per_block * sizeof(uint4);
        cudaLaunchAttribute cluster = {.id = cudaLaunchAttributeClusterDimension};
        cluster.val.clusterDim = {(unsigned)blocks, 1, 1};
        cudaLaunchConfig_t config = {
            dim3(M * blocks), dim3(block_threads(per_block)), shared, stream, &cluster, 1};
        auto kernel = cross_entropy_cluster_kernel<CAPS>;
        CUDA_CHECK(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
        CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, losses, logits.bf16, targets, V, P,
                                      per_block, terms));
    }
    quantize_bf16(logits, {}, {}, M, P, stream);
}

void gpu_cross_entropy(Gpu *gpu, float *losses, Operand logits, Scratch scratch, Scratch max_sums,
                       const int *targets, int M, int V, int P, LossTerms terms) {
    gpu_family(gpu, FAMILY_LOSS);
    auto run = terms.softcap > 0.0f ? cross_entropy_of<true> : cross_entropy_of<false>;
    run(losses, logits, scratch, max_sums, targets, M, V, P, terms, gpu->stream);
}

__global__ void sum_losses_kernel(double *sum, const float *losses, int M, bool accumulate) {
    __shared__ double shared[WARP];
    double mine = 0.0;
    for (int i = threadIdx.x; i < M; i += blockDim.x) { mine += losses[i]; }
    double all = block_sum(mine, shared);
    if (threadIdx.x == 0) { *sum = accumulate ? *sum + all : all; }
}

void gpu_sum_losses(Gpu *gpu, double *sum, const float *losses, int M, bool accumulate) {
    gpu_family(gpu, FAMILY_LOSS);
    launch(sum_losses_kernel, 1, 1024, gpu->stream, sum, losses, M, accumulate);
}
