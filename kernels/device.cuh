// What the kernels share: fast approximations of functions, 16-byte loads and stores of BF16,
// reductions in a fixed order, partial sums over rows, and the launchers' checks.
#pragma once

#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <initializer_list>
#include <limits.h>
#include <math_constants.h>

// A vector is VEC BF16 values, which are 16 bytes. nvcc unrolls loops over VEC without a pragma.
enum { WARP = 32, VEC = 8 };

// How many threads an SM can hold.
#if defined(__CUDA_ARCH__) && \
    ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1200)
enum { SM_THREADS = 1536 };
#else
enum { SM_THREADS = 2048 };
#endif

#ifdef __CUDACC__ // without nvcc, test/emulated/ defines these functions

// Returns 2^x within 2 units in the last place. Subnormal arguments and results count as 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns 1 / x within 2 units in the last place. Subnormal arguments and results count as 0.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns the larger of `amax` and |x|, or NaN if either is NaN.
__device__ __forceinline__ float amax_of(float amax, float x) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(amax), "f"(fabsf(x)));
    return larger;
}

// Makes the threads of a group wait for each other. The group has `lanes` threads, which are whole
// warps. A block has up to 15 groups, because named barrier 0 is that of __syncthreads().
__device__ __forceinline__ void group_barrier(int group, int lanes) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
}

// Launches a kernel with `shared` bytes of dynamic shared memory. If the launch fails, the program
// ends.
template <typename KERNEL, typename... ARGUMENTS>
static void launch_with_shared(KERNEL kernel, dim3 blocks, dim3 threads, size_t shared,
                               cudaStream_t stream, const ARGUMENTS &...arguments) {
    if (shared > 0) { // static and dynamic memory of more than 48 KB in all must be requested
        CUDA_CHECK(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    }
    kernel<<<blocks, threads, shared, stream>>>(arguments...);
    CUDA_CHECK(cudaGetLastError());
}

#endif

struct Floats8 {
    float v[VEC];
};

// low_bf16 and high_bf16 return, as a float, the lower or the upper of two BF16 values that are
// packed in a 32-bit word. Each function takes one instruction. CUDA's own conversion of both
// values takes three.
__device__ __forceinline__ float low_bf16(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_bf16(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ Floats8 unpack8(uint4 packed) {
    return {{low_bf16(packed.x), high_bf16(packed.x), low_bf16(packed.y), high_bf16(packed.y),
             low_bf16(packed.z), high_bf16(packed.z), low_bf16(packed.w), high_bf16(packed.w)}};
}

__device__ __forceinline__ uint4 pack8(const Floats8 &x) {
    uint4 packed;
    __nv_bfloat162 *pairs = reinterpret_cast<__nv_bfloat162 *>(&packed);
#pragma unroll
    for (int i = 0; i < VEC / 2; i++) {
        pairs[i] = __floats2bfloat162_rn(x.v[2 * i], x.v[2 * i + 1]);
    }
    return packed;
}

// Loads vector i of a BF16 array; a vector has 8 values.
__device__ __forceinline__ Floats8 load8(const Bf16 *x, int64_t i) {
    return unpack8(reinterpret_cast<const uint4 *>(x)[i]);
}

__device__ __forceinline__ void store8(Bf16 *out, int64_t i, const Floats8 &x) {
    reinterpret_cast<uint4 *>(out)[i] = pack8(x);
}

__device__ __forceinline__ Floats8 load_floats8(const void *x, GpuType type, int64_t i) {
    if (type == TYPE_BF16) { return load8(static_cast<const Bf16 *>(x), i); }
    const float4 *p = static_cast<const float4 *>(x) + 2 * i;
    float4 a = p[0], b = p[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ void store_floats8(float *out, int64_t i, const Floats8 &x) {
    float4 *p = reinterpret_cast<float4 *>(out) + 2 * i;
    p[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    p[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

__device__ __forceinline__ float to_float(Bf16 x) {
    return __uint_as_float((uint32_t)x << 16);
}

__device__ __forceinline__ Bf16 to_bf16(float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Returns 1 / (1 + 2^-x), which is sigmoid(x log 2).
__device__ __forceinline__ float sigmoid2(float x) {
    return reciprocal_fast(1.0f + exp2_fast(-x));
}

__device__ __forceinline__ float sigmoid(float x) {
    return sigmoid2(1.4426950408889634f * x);
}

// gelu(x) = x sigmoid(2u), where u = sqrt(2/pi) (x + 0.044715 x^3)
//         = x sigmoid2(GELU_1 x + GELU_3 x^3)
#define GELU_1 2.302208198f
#define GELU_3 0.1029432397f

__device__ __forceinline__ float gelu(float x) {
    return x * sigmoid2(x * (GELU_1 + GELU_3 * (x * x)));
}

// Returns the derivative of gelu(x).
__device__ __forceinline__ float gelu_slope(float x) {
    const float log2 = 0.6931471806f;
    float square = x * x, s = sigmoid2(x * (GELU_1 + GELU_3 * square));
    float slope_of_2u = log2 * GELU_1 + (3.0f * log2 * GELU_3) * square;
    return s + (s - s * s) * (x * slope_of_2u);
}

// Returns up * silu(gate).
__device__ __forceinline__ float swiglu(float gate, float up) {
    return up * (gate * sigmoid(gate));
}

// The maximum of the values seen so far, and the sum of exp(value - max).
struct MaxSum {
    float max, sum;
};

__device__ __forceinline__ MaxSum combine(MaxSum a, MaxSum b) {
    float max = fmaxf(a.max, b.max);
    if (max == -CUDART_INF_F) { return {max, a.sum + b.sum}; } // neither a nor b has seen a value
    return {max, a.sum * __expf(a.max - max) + b.sum * __expf(b.max - max)};
}

// Each of a and b holds two BF16 values. Returns the larger of the two lower halves and the larger
// of the two upper halves; a result is NaN if one of its two inputs is NaN.
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
    const __nv_bfloat162 m = __hmax2_nan(*reinterpret_cast<const __nv_bfloat162 *>(&a),
                                         *reinterpret_cast<const __nv_bfloat162 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&m);
}

// Returns the largest of 8 packed BF16 values, or NaN if one of them is NaN.
__device__ __forceinline__ float max8(uint4 packed) {
    const uint32_t m = max_pair(max_pair(packed.x, packed.y), max_pair(packed.z, packed.w));
    return low_bf16(max_pair(m, __byte_perm(m, m, 0x1032)));
}

// Replaces all but the first `count` of 8 packed BF16 values by minus infinity.
__device__ __forceinline__ uint4 cut_off(uint4 packed, int count) {
    Bf16 *values = reinterpret_cast<Bf16 *>(&packed);
    for (int j = 0; j < VEC; j++) { values[j] = j < count ? values[j] : 0xff80; }
    return packed;
}

// Returns one element of a rotated pair: x cos + partner sin. For the first element of the pair,
// the caller passes -sin as `sine`.
__device__ __forceinline__ float rotated(float x, float partner, float cosine, float sine) {
    return fmaf(x, cosine, partner * sine);
}

// Pairs that RoPE rotates: `a` has elements of a head's first half, `b` their partners in the
// second half. Either all 8 pairs are used, or only the first one.
struct Pairs {
    Floats8 a, b;
};

// Rotates the first WIDTH pairs. direction: 1, or -1 to rotate back. If a and b are exchanged, the
// caller passes the opposite direction.
template <int WIDTH>
__device__ __forceinline__ void turn(Pairs &p, const Floats8 &cosine, const Floats8 &sine,
                                     float direction) {
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        float first = rotated(p.a.v[j], p.b.v[j], cosine.v[j], -direction * sine.v[j]);
        p.b.v[j] = rotated(p.b.v[j], p.a.v[j], cosine.v[j], direction * sine.v[j]);
        p.a.v[j] = first;
    }
}

// Returns, in every lane, the sum of x over the warp. The order of the additions is fixed.
template <typename T> __device__ __forceinline__ T warp_sum(T x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) { x += __shfl_xor_sync(~0u, x, offset); }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    }
    return x;
}

// Returns, in every thread, the sum of x over the block. All threads must call it. `shared` has
// room for one T per warp.
template <typename T> __device__ __forceinline__ T block_sum(T x, T *shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads(); // a previous call may still read `shared`
    if (lane == 0) { shared[warp] = x; }
    __syncthreads();
    x = lane < warps ? shared[lane] : T(0);
    return warp_sum(x);
}

__device__ __forceinline__ float amax8(float amax, const Floats8 &x) {
    for (int j = 0; j < VEC; j++) { amax = amax_of(amax, x.v[j]); }
    return amax;
}

// Raises *amax to at least the largest `magnitude` among the block's threads. The bits of the
// floats are compared as integers. For non-negative floats this gives the same order, with NaN as
// the largest. All threads must call this function.
__device__ __forceinline__ void block_amax(float *amax, float magnitude) {
    __shared__ uint32_t shared[WARP];
    int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(magnitude));
    if (thread % WARP == 0) { shared[thread / WARP] = bits; }
    __syncthreads();
    if (thread < WARP) {
        bits = thread < threads / WARP ? shared[thread] : 0;
        bits = __reduce_max_sync(~0u, bits);
        uint32_t *to = reinterpret_cast<uint32_t *>(amax);
        if (thread == 0 && bits > __ldcg(to)) { atomicMax(to, bits); }
    }
}

__device__ __forceinline__ void gradient_store(Gradient out, int64_t i, float value) {
    if (out.type == TYPE_F32) {
        float *p = static_cast<float *>(out.data) + i;
        *p = out.accumulate ? *p + value : value;
    } else {
        Bf16 *p = static_cast<Bf16 *>(out.data) + i;
        *p = to_bf16(out.accumulate ? to_float(*p) + value : value);
    }
}

__device__ __forceinline__ void add8(Floats8 &sum, const Floats8 &x) {
    for (int j = 0; j < VEC; j++) { sum.v[j] += x.v[j]; }
}

__device__ __forceinline__ void gradient_store8(Gradient out, int64_t vector, Floats8 x) {
    if (out.accumulate) { add8(x, load_floats8(out.data, out.type, vector)); }
    if (out.type == TYPE_F32) {
        store_floats8(static_cast<float *>(out.data), vector, x);
    } else {
        store8(static_cast<Bf16 *>(out.data), vector, x);
    }
}

static inline int divide_up(int64_t a, int64_t b) {
    return (int)((a + b - 1) / b);
}

// ---- sums over rows: partial sums, then a second launch ----

enum {
    PARTIALS = 264,  // a number of thread blocks: two for each of an H200's 132 SMs
    ROW_LANES = 8,   // rows that a block of column_sums_kernel reads at a time
    TILE_ROWS = 128, // rows of a tile in quantize.cuh
    MATMUL_ROWS = 64 // rows that one partial sum of fused_matmul.cu covers
};

// Up to three kinds of partial sums, [kind][count][columns]. For each kind, sum_partials adds up
// the `count` partial sums of each column in a fixed order and writes the result to outs[kind]. It
// skips a kind whose outs[kind].data is NULL.
struct PartialSums {
    Gradient outs[3];
    const float *partials;
    int count;
    int64_t columns;
};

void sum_partials(const PartialSums &sums, cudaStream_t stream);

template <typename KERNEL, typename... ARGUMENTS>
static void launch(KERNEL kernel, dim3 blocks, dim3 threads, cudaStream_t stream,
                   const ARGUMENTS &...arguments) {
    launch_with_shared(kernel, blocks, threads, 0, stream, arguments...);
}

// ---- checks by launchers; `name` is the launcher's name ----

static inline void check_aligned(const char *name, std::initializer_list<const void *> pointers) {
    for (const void *p : pointers) {
        if ((uintptr_t)p % 16 != 0) { die("%s: pointer %p is not 16-byte aligned", name, p); }
    }
}

// Checks that the kernels can process tensors [M,N] at these addresses.
static inline void check_tensors(const char *name, int64_t M, int64_t N,
                                 std::initializer_list<const void *> pointers) {
    check_aligned(name, pointers);
    if (!gpu_tensor_fits(M, N)) {
        die("%s: %lld x %lld; the GPU kernels take columns in multiples of %d, up to 2^%d values",
            name, (long long)M, (long long)N, VEC, MAX_VALUES_LOG2);
    }
}

static inline void check_scratch(const char *name, Scratch scratch, int64_t floats) {
    size_t needed = (size_t)floats * sizeof(float);
    if (needed > scratch.bytes) {
        die("%s: %zu bytes of scratch; %zu are needed", name, scratch.bytes, needed);
    }
    check_aligned(name, {scratch.data});
}

// Checks a tensor [M,N] that a launcher is about to write. Returns whether any FP8 form of the
// tensor is requested.
static inline bool check_operand(const char *name, const Operand *t, int64_t M, int64_t N) {
    bool codes = t->rows.codes != NULL || t->columns.codes != NULL;
    check_tensors(name, M, N, {t->bf16, t->rows.codes, t->columns.codes});
    if (codes && (M % 16 != 0 || N % 16 != 0)) {
        die("%s: %lld x %lld in FP8; both sides must be multiples of 16", name, (long long)M,
            (long long)N);
    }
    if (fp8_by_blocks(t->scaling)) {
        bool lacks = (t->rows.codes != NULL && t->rows.inverse == NULL) ||
                     (t->columns.codes != NULL && t->columns.inverse == NULL);
        if (lacks) { die("%s: blocks without scales", name); }
    } else if ((codes || t->fused || t->scaling == SCALE_CURRENT) && t->scale == NULL) {
        die("%s: an FP8 tensor without a scale", name);
    }
    if (codes && t->scaling != SCALE_DELAYED && !(t->target > 0.0f)) {
        die("%s: scales without a target", name);
    }
    if (t->fused && t->scaling == SCALE_CURRENT) { die("%s: fused, without a given scale", name); }
    if (!t->fused && t->bf16 == NULL) { die("%s: no BF16 form", name); }
    return codes;
}

// Returns where a kernel that writes t.bf16 must also write the amax, or NULL if the kernel need
// not measure the amax.
static inline float *measured_amax(const Operand &t) {
    return t.scaling == SCALE_CURRENT && t.writes_amax ? &t.scale->amax : NULL;
}
