// Hopper's instructions for fused_product.cu: TMA, WGMMA and their barriers; and the tensor maps
// that TMA reads. PTX ISA: wgmma.mma_async (fragments, descriptors), cp.async.bulk.tensor,
// mbarrier, setmaxnreg.
#pragma once

#include "device.cuh"

#include <cuda.h>

enum {
    WARPS = 4, // of a warpgroup
    GROUP = WARPS * WARP,
    TURN_BARRIERS = 3, // named barriers 3 and 4; group_barrier takes 1 and 2
    FULL_ROW = 128,
    HALF_ROW = 64 // bytes of swizzled rows
};

typedef uint64_t Barrier; // an mbarrier

// ---- instructions -------------------------------------------------------------------------------

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(Barrier *b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}

// After this TMA may use the barriers made so far; other threads may after __syncthreads().
__device__ __forceinline__ void barriers_ready(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Without a branch, in which the warp would diverge before the next WGMMA.
__device__ __forceinline__ void barrier_arrive(Barrier *b, bool arrives) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(shared_address(b)),
                 "r"((int)arrives)
                 : "memory");
}

// Arrives, and makes the barrier also wait for this many bytes.
__device__ __forceinline__ void barrier_expect(Barrier *b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes)
                 : "memory");
}

// Waits until the barrier's phase number `phase` is complete. The barrier is at most one phase
// further.
__device__ __forceinline__ void barrier_wait(Barrier *b, uint32_t phase) {
    uint32_t done = 0;
    while (!done) {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(b)), "r"(phase & 1)
                     : "memory");
    }
}

// Loads the box of a tensor with these first and last coordinates; those between them are 0.
template <int RANK>
__device__ __forceinline__ void tma_load(void *to, const CUtensorMap &map, Barrier *full, int first,
                                         int last) {
    uint32_t address = shared_address(to), barrier = shared_address(full);
#define TMA_LOAD(rank, coordinates)                                                             \
    asm volatile("cp.async.bulk.tensor." rank                                                   \
                 ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, " coordinates \
                 "], [%2];" ::"r"(address),                                                     \
                 "l"(&map), "r"(barrier), "r"(first), "r"(last), "r"(0)                         \
                 : "memory")
    if constexpr (RANK == 2) { TMA_LOAD("2d", "{%3, %4}"); }
    if constexpr (RANK == 4) { TMA_LOAD("4d", "{%3, %5, %5, %4}"); }
    if constexpr (RANK == 5) { TMA_LOAD("5d", "{%3, %5, %5, %5, %4}"); }
#undef TMA_LOAD
}

template <int RANK>
__device__ __forceinline__ void tma_store(const CUtensorMap &map, const void *from, int first,
                                          int last) {
    uint32_t address = shared_address(from);
#define TMA_STORE(rank, coordinates)                                                             \
    asm volatile("cp.async.bulk.tensor." rank ".global.shared::cta.bulk_group [%1, " coordinates \
                 "], [%0];" ::"r"(address),                                                      \
                 "l"(&map), "r"(first), "r"(last), "r"(0)                                        \
                 : "memory")
    if constexpr (RANK == 2) { TMA_STORE("2d", "{%2, %3}"); }
    if constexpr (RANK == 4) { TMA_STORE("4d", "{%2, %4, %4, %3}"); }
    if constexpr (RANK == 5) { TMA_STORE("5d", "{%2, %4, %4, %4, %3}"); }
#undef TMA_STORE
}

// Describes an operand in shared memory: rows of 128 bytes whose 16-byte pieces are swizzled over
// groups of 8 rows: the layout of a TMA box with CU_TENSOR_MAP_SWIZZLE_128B that begins at a
// multiple of 1024. 62: that swizzle; 32: bytes from one group of rows to the next, in sixteens;
// 16: not used with it.
__device__ __forceinline__ uint64_t wgmma_operand(const void *tile) {
    return (uint64_t)(shared_address(tile) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// sums (+)= A B' of 64 x 128 x 32.
template <Fp8Type TYPE_A>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define WGMMA(type_a)                                                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                         \
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32." type_a ".e4m3 "       \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, " \
                 "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "  \
                 "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, "  \
                 "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "  \
                 "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                \
                 "%64, %65, p, 1, 1;\n}"                                              \
                 : SUMS16(0), SUMS16(16), SUMS16(32), SUMS16(48)                      \
                 : "l"(a), "l"(b), "r"((int)adds))
    if constexpr (TYPE_A == FP8_E4M3) {
        WGMMA("e4m3");
    } else {
        WGMMA("e5m2");
    }
#undef WGMMA
#undef SUMS16
#undef SUMS4
}

// Waits until at most LEFT of the warp's committed groups of WGMMAs are unfinished.
template <int LEFT> __device__ __forceinline__ void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Makes the compiler finish d before this point and read it after it: the compiler does not know
// that d is valid only after a wait.
__device__ __forceinline__ void pin(float (&d)[64]) {
#pragma unroll
    for (int i = 0; i < 64; i++) { asm volatile("" : "+f"(d[i])::"memory"); }
}

__device__ __forceinline__ void wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The first waits until the stores so far have read shared memory, the second until they are done.
__device__ __forceinline__ void stores_wait_read(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void stores_wait(void) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// After this and a barrier TMA may read what this thread has written to shared memory.
__device__ __forceinline__ void show_to_tma(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Warpgroup w waits until the other has passed the tensor cores to it.
__device__ __forceinline__ void turn_wait(int w) {
    asm volatile("bar.sync %0, %1;" ::"r"((int)TURN_BARRIERS + w), "r"(2 * (int)GROUP) : "memory");
}

__device__ __forceinline__ void turn_pass(int w) {
    asm volatile("bar.arrive %0, %1;" ::"r"((int)TURN_BARRIERS + 1 - w), "r"(2 * (int)GROUP)
                 : "memory");
}

template <int REGISTERS, bool MORE> __device__ __forceinline__ void set_registers(void) {
    if constexpr (MORE) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    }
}

// Stores four 8 x 8 matrices of 16-bit units, transposed: lane i gives the address of row i of the
// 32 rows.
__device__ __forceinline__ void store_transposed(void *row, const uint32_t (&units)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(units[0]), "r"(units[1]), "r"(units[2]), "r"(units[3])
                 : "memory");
}

#endif

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

// A place in a ring of stages, after `used` stages.
template <int STAGES> struct Stage {
    int at;
    uint32_t round;
    __device__ Stage(uint32_t used) : at((int)(used % STAGES)), round(used / STAGES) {
    }
    __device__ void advance(int steps) {
        at += steps;
        if (at >= STAGES) {
            at -= STAGES;
            round++;
        }
    }
};

// ---- on the host --------------------------------------------------------------------------------

typedef decltype(&cuTensorMapEncodeTiled) EncodeTensorMap;

static inline EncodeTensorMap find_encode_tensor_map(void) {
    void *entry = NULL;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                          cudaEnableDefault, &result);
#else
    cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry,
                                                 cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess) { cudaGetLastError(); }
    bool found = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<EncodeTensorMap>(entry) : NULL;
}

// The driver's function, which the trainer is not linked with; NULL: this driver has none. It is
// looked up once, not at every launch.
static inline EncodeTensorMap encode_tensor_map(void) {
    static const EncodeTensorMap function = find_encode_tensor_map();
    return function;
}

// Whether kernels such as this one can run here. Built for sm_90, without the a, they are empty and
// take few registers. The code is looked at once.
template <typename KERNEL> static bool runs_on_hopper(const Gpu *gpu, KERNEL *kernel) {
    static cudaFuncAttributes code = {};
    if (gpu->capability != 90 || encode_tensor_map() == NULL) { return false; }
    if (code.numRegs == 0) { CUDA_CHECK(cudaFuncGetAttributes(&code, kernel)); }
    return code.numRegs > 64;
}

// A dimension of a tensor: its size, bytes from one index to the next, and the size of a box.
struct Dimension {
    int64_t size, stride;
    int box;
};

// The map of a tensor whose first dimension is contiguous. swizzle: bytes of a box's rows; 0: not
// swizzled.
static inline CUtensorMap tensor_map(const void *data, CUtensorMapDataType type, int swizzle,
                                     std::initializer_list<Dimension> dimensions) {
    CUtensorMap map = {};
    cuuint64_t sizes[5], strides[5];
    cuuint32_t box[5], ones[5] = {1, 1, 1, 1, 1}, rank = 0;
    if (data == NULL) { return map; }
    for (const Dimension &d : dimensions) {
        sizes[rank] = (cuuint64_t)d.size;
        strides[rank] = (cuuint64_t)d.stride;
        box[rank++] = (cuuint32_t)d.box;
    }
    CUresult status = encode_tensor_map()(&map, type, rank, const_cast<void *>(data), sizes,
                                          strides + 1, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                          swizzle == FULL_ROW   ? CU_TENSOR_MAP_SWIZZLE_128B
                                          : swizzle == HALF_ROW ? CU_TENSOR_MAP_SWIZZLE_64B
                                                                : CU_TENSOR_MAP_SWIZZLE_NONE,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) { die("no tensor map of an FP8 product, error %d", (int)status); }
    return map;
}

// The map of codes [rows,columns], 128 rows a box, in an order that gives a thread 4 adjacent
// columns of the product: row 16 j + 4 t + 2 h + e is WGMMA's column 16 j + 8 h + 2 t + e, which
// lane 4 g + t has. Dimensions: column, e, t, h, block of 16 rows.
static inline CUtensorMap map_like_columns(const uint8_t *x, int64_t rows, int64_t columns,
                                           int row) {
    return tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_UINT8, row,
                      {{columns, 1, row},
                       {2, columns, 2},
                       {4, 4 * columns, 4},
                       {2, 2 * columns, 2},
                       {rows / 16, 16 * columns, 128 / 16}});
}
