// The loss: cross-entropy of the logits' softmax, and its gradient, in place of the logits or in
// FP8.
#include "quantize.cuh"

#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <math_constants.h>

// Running maximum and sum of exponentials, relative to the maximum.
struct MaxSum {
    float max, sum;
};

__device__ __forceinline__ MaxSum combine(MaxSum a, MaxSum b) {
    float max = fmaxf(a.max, b.max);
    if (max == -CUDART_INF_F) { return {max, a.sum + b.sum}; } // nothing seen yet on either side
    return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

// The same in every thread; all threads call it, once.
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

// Less scale where the target is: element `at`, if that is one of the 8.
__device__ __forceinline__ void subtract_onehot(Floats8 &v, int at, float scale) {
    for (int j = 0; j < VEC; j++) { v.v[j] -= j == at ? scale : 0.0f; }
}

// (softmax - onehot) * scale of 8 logits; 0 past the vocabulary. lse: the row's log-sum-exp.
__device__ __forceinline__ Floats8 softmax_gradient(uint4 logits, float lse, int column, int V,
                                                    int target, float scale) {
    const float log2e = 1.4426950408889634f;
    Floats8 v = unpack8(logits);
    for (int j = 0; j < VEC; j++) { v.v[j] = scale * exp2_fast((v.v[j] - lse) * log2e); }
    if (column + VEC > V || (unsigned)(target - column) < VEC) {
        for (int j = 0; j < VEC; j++) { v.v[j] = column + j < V ? v.v[j] : 0.0f; }
        subtract_onehot(v, target - column, scale);
    }
    return v;
}

// A row, or a block's part of it, that is left out.
__device__ __forceinline__ void leave_out(float *loss, Bf16 *x, int begin, int end) {
    if (begin == 0 && threadIdx.x == 0) { *loss = 0.0f; }
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) { store8(x, i, Floats8{}); }
}

// The largest of 8 packed BF16 values.
__device__ __forceinline__ float max8(uint4 packed) {
    const __nv_bfloat162 *p = reinterpret_cast<const __nv_bfloat162 *>(&packed);
    __nv_bfloat162 m = __hmax2_nan(__hmax2_nan(p[0], p[1]), __hmax2_nan(p[2], p[3]));
    return __bfloat162float(__hmax_nan(__low2bfloat16(m), __high2bfloat16(m)));
}

// The first `count` of 8 packed BF16 values; minus infinity for the others.
__device__ __forceinline__ uint4 cut_off(uint4 packed, int count) {
    Bf16 *values = reinterpret_cast<Bf16 *>(&packed);
    for (int j = 0; j < VEC; j++) { values[j] = j < count ? values[j] : 0xff80; }
    return packed;
}

// A cluster of blocks a row, each with its part of the row in shared memory, so that the row is
// read once. A thread works on what it copied itself, which needs no barrier. It turns its logits
// into exp(logit - its own maximum), kept in FP16 (whose 11 bits are finer than the BF16 result's
// 8), so that the exponential is taken once.
__global__ void __launch_bounds__(512)
    cross_entropy_cluster_kernel(float *losses, Bf16 *logits, const int *targets, int V, int P,
                                 int per_block, float gradient_scale) {
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
    float target_logit = to_float(x[target]);
    __pipeline_wait_prior(0);
    float max = -CUDART_INF_F, sum = 0.0f;
    for (int i = begin + threadIdx.x; i < end && i * VEC < V; i += blockDim.x) {
        if ((i + 1) * VEC > V) { part[i - begin] = cut_off(part[i - begin], V - i * VEC); }
        float m = max8(part[i - begin]);
        max = m > max || m != m ? m : max;
    }
    for (int i = begin + threadIdx.x; i < end && i * VEC < V; i += blockDim.x) {
        Floats8 v = unpack8(part[i - begin]);
        uint4 packed;
        __half2 *halves = reinterpret_cast<__half2 *>(&packed);
        for (int j = 0; j < VEC; j++) {
            v.v[j] = exp2_fast((v.v[j] - max) * log2e);
            sum += v.v[j];
        }
        for (int j = 0; j < VEC; j += 2) { halves[j / 2] = __floats2half2_rn(v.v[j], v.v[j + 1]); }
        part[i - begin] = packed;
    }
    MaxSum all = block_max_sum({max, sum}, shared);
    if (blocks > 1) {
        if (threadIdx.x == 0) { block_result = all; }
        cluster.sync(); // all have read the target by now, too
        all = *cluster.map_shared_rank(&block_result, 0);
        for (int i = 1; i < blocks; i++) {
            all = combine(all, *cluster.map_shared_rank(&block_result, i));
        }
    }
    if (rank == 0 && threadIdx.x == 0) { losses[row] = logf(all.sum) + all.max - target_logit; }
    float factor = exp2_fast((max - all.max) * log2e) * (gradient_scale / all.sum);
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        uint4 packed = i * VEC < V ? part[i - begin] : uint4{};
        const __half2 *halves = reinterpret_cast<const __half2 *>(&packed);
        Floats8 v;
        for (int j = 0; j < VEC; j += 2) {
            float2 pair = __half22float2(halves[j / 2]);
            v.v[j] = pair.x * factor;
            v.v[j + 1] = pair.y * factor;
        }
        if (i == target / VEC) { subtract_onehot(v, target % VEC, gradient_scale); }
        store8(x, i, v);
    }
    if (blocks > 1) { cluster.sync(); } // nobody leaves while its result may be read
#endif
}

// A block a row, which is read once, some vectors a thread at a time. Leaves each row's
// log-sum-exp, infinite for a row that is left out, in lse, unless that is NULL. GRADIENT: reads
// the row a second time, from L2 at best, and writes the gradient in place: the general kernel.
template <bool GRADIENT>
__global__ void __launch_bounds__(512)
    cross_entropy_kernel(float *losses, float *lse, Bf16 *logits, const int *targets, int V, int P,
                         float gradient_scale) {
    enum { AT_ONCE = 4 };
    __shared__ MaxSum shared[WARP];
    const float log2e = 1.4426950408889634f;
    const uint4 nothing = {0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u}; // minus infinity
    int row = blockIdx.x, target = targets[row], vectors = (V + VEC - 1) / VEC;
    uint4 *x = reinterpret_cast<uint4 *>(logits + (int64_t)row * P);
    if (target < 0) {
        leave_out(losses + row, logits + (int64_t)row * P, 0, GRADIENT ? P / VEC : 0);
        if (lse != nullptr && threadIdx.x == 0) { lse[row] = CUDART_INF_F; }
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
            float m = max8(part[k]);
            max = m > max || m != m ? m : max;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            Floats8 v = unpack8(part[k]);
            for (int j = 0; j < VEC; j++) { sum += exp2_fast((v.v[j] - max) * log2e); }
        }
        mine = {max, mine.sum * exp2_fast((mine.max - max) * log2e) + sum};
    }
    MaxSum all = block_max_sum(mine, shared);
    float log_sum = logf(all.sum) + all.max;
    if (threadIdx.x == 0) {
        losses[row] = log_sum - to_float(logits[(int64_t)row * P + target]);
        if (lse != nullptr) { lse[row] = log_sum; }
    }
    if (!GRADIENT) { return; }
    __syncthreads(); // the target's logit has been read
    for (int i = threadIdx.x; i < P / VEC; i += blockDim.x) {
        Floats8 v = softmax_gradient(x[i], log_sum, i * VEC, V, target, gradient_scale);
        x[i] = pack8(v);
    }
}

struct LossSource : Place {
    enum { GRADIENT = 1 };
    struct Raw {
        uint4 logits;
        float lse;
        int target;
    };
    const Bf16 *logits;
    const float *lse;
    const int *targets;
    float scale;
    int V, column;
    __device__ void begin(int row, int vector) {
        lse += row;
        targets += row;
        column = vector * VEC;
        Place::begin(row, vector);
    }
    __device__ Raw fetch(int i) const {
        return {raw8(logits, place(i)), lse[i], targets[i]};
    }
    __device__ void compute(int, const Raw &raw, Floats8 *values) const {
        values[0] = softmax_gradient(raw.logits, raw.lse, column, V, raw.target, scale);
    }
};

// Blocks of a cluster, which share a row, so that two or more fit a multiprocessor at a time. 0:
// the row is too long, or there are no clusters: code that was compiled for an older device has
// none, wherever it runs.
static int cluster_blocks(int P) {
    int device, bytes;
    cudaFuncAttributes code;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    CUDA_CHECK(cudaFuncGetAttributes(&code, cross_entropy_cluster_kernel));
    if (code.ptxVersion < 90 || code.binaryVersion < 90) { return 0; }
    int64_t most_bytes = bytes / 2 - (10 << 10); // 104 KB on Hopper
    int blocks = 1;
    while (blocks <= 8 && (int64_t)P * 2 > blocks * most_bytes) { blocks *= 2; }
    return blocks <= 8 ? blocks : 0;
}

void gpu_cross_entropy(float *losses, Operand logits, Fp8Tensor q, float *lse, const int *targets,
                       int M, int V, int P, float gradient_scale, cudaStream_t stream) {
    const char *name = "cross-entropy";
    bool gradient = gradient_scale > 0.0f;
    if (!gradient) { logits.fp8 = logits.fp8_t = NULL; }
    check_operand(name, logits, gradient ? q : Fp8Tensor{}, M, P);
    if (logits.bf16 == NULL || V < 1 || V > P) {
        die("%s: no logits, or %d of a vocabulary of %d", name, P, V);
    }
    if (!gradient || q.fused) {
        int threads = min(512, divide_up(divide_up(V, VEC), WARP) * WARP);
        float *kept = gradient ? lse : NULL;
        if (gradient && lse == NULL) { die("%s: no scratch for log-sum-exp", name); }
        cross_entropy_kernel<false>
            <<<M, threads, 0, stream>>>(losses, kept, logits.bf16, targets, V, P, 0.0f);
        LAUNCH_CHECK();
        if (!gradient) { return; }
        LossSource source = {{P / VEC}, logits.bf16, lse, targets, gradient_scale, V};
        quantize<false>(name, source, logits, q, {}, {}, M, P, stream);
        return;
    }
    int blocks = cluster_blocks(P), vectors = P / VEC;
    if (blocks == 0) {
        int threads = min(512, divide_up(vectors, WARP) * WARP);
        cross_entropy_kernel<true>
            <<<M, threads, 0, stream>>>(losses, NULL, logits.bf16, targets, V, P, gradient_scale);
        LAUNCH_CHECK();
    } else {
        int per_block = divide_up(vectors, blocks);
        int threads = min(512, divide_up(per_block, WARP) * WARP);
        size_t shared = (size_t)per_block * sizeof(uint4);
        cudaLaunchAttribute cluster = {.id = cudaLaunchAttributeClusterDimension};
        cluster.val.clusterDim = {(unsigned)blocks, 1, 1};
        cudaLaunchConfig_t config = {dim3(M * blocks), dim3(threads), shared, stream, &cluster, 1};
        CUDA_CHECK(cudaFuncSetAttribute(cross_entropy_cluster_kernel,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
        CUDA_CHECK(cudaLaunchKernelEx(&config, cross_entropy_cluster_kernel, losses, logits.bf16,
                                      targets, V, P, per_block, gradient_scale));
    }
    gpu_quantize(logits, q, {}, {}, M, P, stream);
}

__global__ void sum_losses_kernel(double *sum, const float *losses, int M, bool accumulate) {
    __shared__ double shared[WARP];
    double mine = 0.0;
    for (int i = threadIdx.x; i < M; i += blockDim.x) { mine += losses[i]; }
    double all = block_sum(mine, shared);
    if (threadIdx.x == 0) { *sum = accumulate ? *sum + all : all; }
}

void gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate, cudaStream_t stream) {
    sum_losses_kernel<<<1, 1024, 0, stream>>>(sum, losses, M, accumulate);
    LAUNCH_CHECK();
}
