// What nvcc and CUDA's headers have for the kernels that run on machine.h, and what device.cuh has
// for nvcc alone.
#pragma once

#include "machine.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <math.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ // `extern` alone: the memory below
#define __builtin_assume(condition)
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace {
__align__(1024) uint8_t memory[SHARED_BYTES];
}

struct dim3 {
    unsigned x, y, z;
    dim3(int x_, int y_ = 1, int z_ = 1) : x((unsigned)x_), y((unsigned)y_), z((unsigned)z_) {
    }
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};

inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}

template <typename A, typename B> auto min(A a, B b) {
    return b < a ? b : a;
}
template <typename A, typename B> auto max(A a, B b) {
    return a < b ? b : a;
}

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// Byte i of the result is the byte of b and a that digit i of the selector numbers.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        result |= (uint32_t)(both >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
    }
    return result;
}

// quantize.cuh names them; no kernel that runs here calls them.
uint32_t __vmaxu2(uint32_t a, uint32_t b);
uint32_t __vimax3_u16x2(uint32_t a, uint32_t b, uint32_t c);

template <typename T> T __ldg(const T *p) {
    return *p;
}
template <typename T> T __ldcg(const T *p) {
    return *p;
}
template <typename T> void __stcg(T *p, T x) {
    *p = x;
}

// ---- a warp, a block ----------------------------------------------------------------------------

inline void __syncwarp(void) {
    if (!machine.plants("left out", "__syncwarp")) { machine.together("__syncwarp"); }
}

inline void bar(int number, int threads, bool waits) {
    if (machine.plants("left out", ("named barrier " + std::to_string(number)).c_str())) { return; }
    machine.arrive(machine.block->named[number], threads, waits, "a named barrier", [] {});
}

inline void __syncthreads(void) {
    bar(0, (int)blockDim.x, true);
}

// Every lane gets the value of lane from(its number).
template <typename T, typename FROM> T shuffle(T x, FROM from) {
    T other = x;
    struct Both {
        T *in, *out;
        int from;
    } both = {&x, &other, from((int)threadIdx.x % LANES)};
    machine.together("a shuffle", both, [](auto lane) {
        for (int i = 0; i < LANES; i++) { *lane(i).out = *lane(lane(i).from).in; }
    });
    return other;
}

template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) {
    return shuffle(x, [&](int lane) { return lane ^ mask; });
}
template <typename T> T __shfl_sync(unsigned, T x, int from) {
    return shuffle(x, [&](int) { return from; });
}

inline int __any_sync(unsigned, int x) {
    for (int mask = 1; mask < LANES; mask *= 2) { x |= __shfl_xor_sync(~0u, x, mask); }
    return x;
}

inline uint32_t __reduce_max_sync(unsigned, uint32_t x) {
    for (int mask = 1; mask < LANES; mask *= 2) { x = max(x, __shfl_xor_sync(~0u, x, mask)); }
    return x;
}

inline void atomicMax(uint32_t *p, uint32_t x) {
    *p = max(*p, x);
}

// ---- what device.cuh has for nvcc ---------------------------------------------------------------

inline float exp2_fast(float x) {
    return exp2f(x);
}

inline float __expf(float x) {
    return expf(x);
}

inline float reciprocal_fast(float x) {
    return 1.0f / x;
}
inline float __logf(float x) {
    return logf(x);
}

inline float amax_of(float amax, float x) {
    x = fabsf(x);
    return x != x || x > amax ? x : amax; // NaN when either is
}

inline void group_barrier(int group, int lanes) {
    bar(group + 1, lanes, true);
}

// Runs the blocks in a random order.
template <typename KERNEL, typename... ARGUMENTS>
static void launch_clusters(KERNEL kernel, int cluster, dim3 blocks, dim3 threads,
                            const ARGUMENTS &...arguments) {
    std::vector<int> order;
    if (blocks.x == 0) { machine.report("a launch of no blocks"); }
    for (int i = 0; i < (int)blocks.x; i += cluster) { order.push_back(i); }
    std::shuffle(order.begin(), order.end(), machine.random);
    blockDim = {threads.x, 1, 1};
    gridDim = {blocks.x, 1, 1};
    for (int first : order) {
        machine.run(memory, first, cluster, (int)threads.x, [&] { kernel(arguments...); });
    }
}

template <typename KERNEL, typename... ARGUMENTS>
static void launch_with_shared(KERNEL kernel, dim3 blocks, dim3 threads, size_t shared,
                               cudaStream_t, const ARGUMENTS &...arguments) {
    if (shared > SHARED_BYTES) { machine.report("%zu bytes of shared memory", shared); }
    launch_clusters(kernel, 1, blocks, threads, arguments...);
}

// ---- the runtime's calls about kernels ----------------------------------------------------------

enum { cudaEnableDefault, cudaLaunchAttributeClusterDimension };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
struct cudaFuncAttributes {
    int numRegs;
};
struct cudaLaunchAttribute {
    int id;
    struct {
        Index clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim = 1, blockDim = 1;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    int numAttrs;
};

// of cuda.h's only function
inline cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult *result) {
    *function = reinterpret_cast<void *>(cuTensorMapEncodeTiled);
    *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
template <typename KERNEL> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *code, KERNEL *) {
    code->numRegs = 168;
    return cudaSuccess;
}
template <typename KERNEL> cudaError_t cudaFuncSetAttribute(KERNEL *, int, int bytes) {
    return bytes <= SHARED_BYTES ? cudaSuccess : cudaErrorNotSupported;
}
template <typename KERNEL, typename... ARGUMENTS>
static cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *launch, KERNEL kernel,
                                      const ARGUMENTS &...arguments) {
    launch_clusters(kernel, (int)launch->attrs->val.clusterDim.x, launch->gridDim, launch->blockDim,
                    arguments...);
    return cudaSuccess;
}
