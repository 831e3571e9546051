// Softmax and cross-entropy, with the gradient of the logits.
#include "activation.cuh"
#include "device.cuh"

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
#pragma unroll
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

__device__ __forceinline__ void add_vector(MaxSum &mine, Floats8 v, int column, int V) {
    float max = mine.max, sum = 0.0f;
    if (column + VEC > V) { // the vocabulary ends within it
#pragma unroll
        for (int j = 0; j < VEC; j++) { v.v[j] = column + j < V ? v.v[j] : -CUDART_INF_F; }
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) { max = fmaxf(max, v.v[j]); }
#pragma unroll
    for (int j = 0; j < VEC; j++) { sum += __expf(v.v[j] - max); }
    mine = {max, mine.sum * __expf(mine.max - max) + sum};
}

// (softmax - onehot) * gradient_scale of one vector.
__device__ __forceinline__ Floats8 gradient_vector(Floats8 v, int column, int V, int target,
                                                   MaxSum all, float gradient_scale) {
    float factor = gradient_scale / all.sum;
#pragma unroll
    for (int j = 0; j < VEC; j++) { v.v[j] = __expf(v.v[j] - all.max) * factor; }
    if (column + VEC > V || (unsigned)(target - column) < VEC) {
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            v.v[j] = column + j < V ? v.v[j] : 0.0f;
            v.v[j] -= column + j == target ? gradient_scale : 0.0f;
        }
    }
    return v;
}

__device__ __forceinline__ void leave_row_out(float *loss, Bf16 *x, int begin, int end) {
    if (begin == 0 && threadIdx.x == 0) { *loss = 0.0f; }
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) { store8(x, i, Floats8{}); }
}

// A block a row. The row is read twice, the second time from L2 at best. For devices without
// clusters.
__global__ void __launch_bounds__(1024)
    cross_entropy_kernel(float *losses, Bf16 *logits, const int *targets, int V, int P,
                         float gradient_scale) {
    __shared__ MaxSum shared[WARP];
    int row = blockIdx.x, target = targets[row], vectors = P / VEC;
    Bf16 *x = logits + (int64_t)row * P;
    if (target < 0) {
        leave_row_out(losses + row, x, 0, vectors);
        return;
    }
    MaxSum mine = {-CUDART_INF_F, 0.0f};
    for (int i = threadIdx.x; i * VEC < V; i += blockDim.x) {
        add_vector(mine, load8(x, i), i * VEC, V);
    }
    MaxSum all = block_max_sum(mine, shared);
    float target_logit = to_float(x[target]);
    __syncthreads(); // everybody has read the target before anybody overwrites it
    if (threadIdx.x == 0) { losses[row] = logf(all.sum) + all.max - target_logit; }
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        store8(x, i, gradient_vector(load8(x, i), i * VEC, V, target, all, gradient_scale));
    }
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
#pragma unroll
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
        leave_row_out(losses + row, x, begin, end);
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
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            v.v[j] = exp2_fast((v.v[j] - max) * log2e);
            sum += v.v[j];
        }
#pragma unroll
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
#pragma unroll
        for (int j = 0; j < VEC; j += 2) {
            float2 pair = __half22float2(halves[j / 2]);
            v.v[j] = pair.x * factor;
            v.v[j + 1] = pair.y * factor;
        }
        if (i == target / VEC) {
#pragma unroll
            for (int j = 0; j < VEC; j++) { v.v[j] -= j == target % VEC ? gradient_scale : 0.0f; }
        }
        store8(x, i, v);
    }
    if (blocks > 1) { cluster.sync(); } // nobody leaves while its result may be read
#endif
}

// Blocks a row, so that two or more fit a multiprocessor's shared memory at a time; 0: too many.
static int cluster_blocks(int P) {
    const int most_bytes = 104 << 10;
    int blocks = 1;
    while (blocks <= 8 && (int64_t)P * 2 > (int64_t)blocks * most_bytes) { blocks *= 2; }
    return blocks <= 8 ? blocks : 0;
}

static bool device_has_clusters(void) {
    int device, major;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
}

// A block a row, which is read once, some vectors a thread at a time. lse may be NULL; it is
// infinite for a row that is left out.
__global__ void __launch_bounds__(512)
    cross_entropy_forward_kernel(float *losses, float *lse, const Bf16 *logits, const int *targets,
                                 int V, int P) {
    enum { AT_ONCE = 4 };
    __shared__ MaxSum shared[WARP];
    const float log2e = 1.4426950408889634f;
    const uint4 nothing = {0xff80ff80u, 0xff80ff80u, 0xff80ff80u, 0xff80ff80u}; // minus infinity
    int row = blockIdx.x, target = targets[row], vectors = (V + VEC - 1) / VEC;
    const uint4 *x = reinterpret_cast<const uint4 *>(logits + (int64_t)row * P);
    if (target < 0) {
        if (threadIdx.x == 0) {
            losses[row] = 0.0f;
            if (lse != nullptr) { lse[row] = CUDART_INF_F; }
        }
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
#pragma unroll
            for (int j = 0; j < VEC; j++) { sum += exp2_fast((v.v[j] - max) * log2e); }
        }
        mine = {max, mine.sum * exp2_fast((mine.max - max) * log2e) + sum};
    }
    MaxSum all = block_max_sum(mine, shared);
    if (threadIdx.x == 0) {
        float log_sum = logf(all.sum) + all.max;
        losses[row] = log_sum - to_float(logits[(int64_t)row * P + target]);
        if (lse != nullptr) { lse[row] = log_sum; }
    }
}

void gpu_cross_entropy_forward(float *losses, float *lse, const Bf16 *logits, const int *targets,
                               int M, int V, int P, cudaStream_t stream) {
    int threads = min(512, divide_up(divide_up(V, VEC), WARP) * WARP);
    cross_entropy_forward_kernel<<<M, threads, 0, stream>>>(losses, lse, logits, targets, V, P);
    LAUNCH_CHECK();
}

void gpu_cross_entropy(float *losses, Bf16 *logits, const int *targets, int M, int V, int P,
                       float gradient_scale, cudaStream_t stream) {
    static const bool clusters = device_has_clusters();
    if (!(gradient_scale > 0.0f)) {
        gpu_cross_entropy_forward(losses, NULL, logits, targets, M, V, P, stream);
        return;
    }
    int blocks = clusters ? cluster_blocks(P) : 0, vectors = P / VEC;
    if (blocks == 0) {
        int threads = vectors >= 1024 ? 1024 : divide_up(vectors, WARP) * WARP;
        cross_entropy_kernel<<<M, threads, 0, stream>>>(losses, logits, targets, V, P,
                                                        gradient_scale);
        LAUNCH_CHECK();
        return;
    }
    int per_block = divide_up(vectors, blocks),
        threads = min(512, divide_up(per_block, WARP) * WARP);
    size_t shared = (size_t)per_block * sizeof(uint4);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(M * blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaFuncSetAttribute(cross_entropy_cluster_kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    CUDA_CHECK(cudaLaunchKernelEx(&config, cross_entropy_cluster_kernel, losses, logits, targets, V,
                                  P, per_block, gradient_scale));
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
