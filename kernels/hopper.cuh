// Wrappers of Hopper's instructions (TMA, WGMMA and their barriers), the tensor maps that TMA
// reads, and checks for the launchers of fused matmuls. See the PTX ISA on wgmma.mma_async
// (fragments, descriptors), cp.async.bulk.tensor, mbarrier and setmaxnreg.
#pragma once

#include "device.cuh"

#include <cuda.h>

enum {
    WARPS = 4, // warps of a warpgroup
    GROUP = WARPS * WARP,
    // the first of the two named barriers of turn_wait and turn_pass; in kernels that call these,
    // groups 2 and 3 must not call group_barrier, which would use the same barriers
    TURN_BARRIERS = 3,
    // bytes of a row in a swizzled tile
    FULL_ROW = 128,
    HALF_ROW = 64,
    QUARTER_ROW = 32
};

typedef uint64_t Barrier; // an mbarrier

// Returns whether the 65536 registers of an SM suffice for a block. At first each thread has an
// equal share of the registers, rounded down to a multiple of 8. Then setmaxnreg lowers each thread
// of the first warpgroup to `first` registers, and raises each thread of the others to `others`.
// With too few registers, setmaxnreg would wait forever.
constexpr bool registers_suffice(int first, int others, int other_groups = 2) {
    return first + other_groups * others <=
           (other_groups + 1) * (65536 / ((other_groups + 1) * GROUP) / 8 * 8);
}

// ---- instructions -------------------------------------------------------------------------------

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(Barrier *b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}

// After this call, TMA may use the barriers that this thread has initialised. Other threads may use
// these barriers after __syncthreads().
__device__ __forceinline__ void barriers_ready(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at the barrier if `arrives` is true. The instruction has a predicate, because a branch
// would let the warp diverge before the next WGMMA.
__device__ __forceinline__ void barrier_arrive(Barrier *b, bool arrives) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(shared_address(b)),
                 "r"((int)arrives)
                 : "memory");
}

// Arrives at barrier b of block `block` of the cluster. Every block has b at the same shared
// address.
__device__ __forceinline__ void barrier_arrive_in(Barrier *b, uint32_t block) {
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(shared_address(b)),
                 "r"(block)
                 : "memory");
}

// Waits for all threads of the cluster.
__device__ __forceinline__ void cluster_barrier(void) {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at the barrier. The barrier's phase is then not complete before TMA has loaded this many
// bytes.
__device__ __forceinline__ void barrier_expect(Barrier *b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes)
                 : "memory");
}

// Waits until phase number `phase` of the barrier is complete. Only the parity of phases is
// compared, so the wait must begin before the next phase is complete. To wait for phase n - 1,
// callers pass n + 1; phase -1 of a new barrier counts as complete.
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

// Loads the box of a tensor that begins at coordinate `first` of the first dimension, at `last` of
// the last dimension, and at 0 of the dimensions between.
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

// As tma_load<5>, but loads the box into both blocks of a cluster of two. Each block has `to` and
// its own barrier `full` at the same shared addresses.
__device__ __forceinline__ void tma_load_both(void *to, const CUtensorMap &map, Barrier *full,
                                              int first, int last) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %5, %5, %5, %4}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(full)), "r"(first), "r"(last), "r"(0), "h"((uint16_t)3)
        : "memory");
}

// Loads the box of a tensor of 3 dimensions that begins at these coordinates.
__device__ __forceinline__ void tma_load_at(void *to, const CUtensorMap &map, Barrier *full, int x,
                                            int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0],"
                 " [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(&map), "r"(shared_address(full)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tma_store_at(const CUtensorMap &map, const void *from, int x, int y,
                                             int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%1, {%2, %3, %4}], [%0];" ::"r"(
            shared_address(from)),
        "l"(&map), "r"(x), "r"(y), "r"(z)
        : "memory");
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

// Returns WGMMA's descriptor of an operand in shared memory: rows of 128 bytes, in the layout of a
// TMA box with CU_TENSOR_MAP_SWIZZLE_128B that begins at a multiple of 1024. The descriptor has the
// swizzle at bit 62, and at bit 32 the distance between groups of 8 rows, divided by 16. With this
// swizzle the hardware ignores the field at bit 16.
__device__ __forceinline__ uint64_t wgmma_operand(const void *tile) {
    return (uint64_t)(shared_address(tile) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define SUMS64(i) SUMS16(i), SUMS16(i + 16), SUMS16(i + 32), SUMS16(i + 48)
#define NAMES64                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, " \
    "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
    "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
    "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES128                                                           \
    NAMES64                                                                \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "  \
    "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "    \
    "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, " \
    "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, "   \
    "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "   \
    "%125, %126, %127"
#define WGMMA(columns, types, names, a_b, adds_at, ...)                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " adds_at ", 0;\n"                             \
                 "wgmma.mma_async.sync.aligned.m64" columns "k32.f32." types " {" names "}, " a_b \
                 ", p, 1, 1;\n}"                                                                  \
                 : __VA_ARGS__                                                                    \
                 : "l"(a), "l"(b), "r"((int)adds))

// d = A B', or d += A B' if `adds`, with M x N x K = 64 x 128 x 32.
template <Fp8Type TYPE_A>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
    if constexpr (TYPE_A == FP8_E4M3) {
        WGMMA("n128", "e4m3.e4m3", NAMES64, "%64, %65", "%66", SUMS64(0));
    } else {
        WGMMA("n128", "e5m2.e4m3", NAMES64, "%64, %65", "%66", SUMS64(0));
    }
}

// The same matmul with M x N x K = 64 x 256 x 32 and both operands in E4M3.
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, bool adds) {
    WGMMA("n256", "e4m3.e4m3", NAMES128, "%128, %129", "%130", SUMS64(0), SUMS64(64));
}
#undef WGMMA
#undef NAMES128
#undef NAMES64
#undef SUMS64

// Returns the descriptor of an operand that lies transposed in shared memory: each index of the
// summed dimension has a row of 128 bytes. Both offset fields hold 1024 bytes, which are 8 rows, so
// it does not matter which one the hardware uses. The operand of the next WGMMA begins 16 rows
// (2048 bytes) further.
__device__ __forceinline__ uint64_t wgmma_transposed(const void *tile) {
    return wgmma_operand(tile) | 64ull << 16;
}

// d = A B', or d += A B' if `adds`, in BF16, with M x N x K = 64 x 64 x 16. The descriptor of a
// transposed operand comes from wgmma_transposed.
#define NAMES32                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15," \
    " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
template <bool TRANSPOSED_A, bool TRANSPOSED_B>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
                 "%32, %33, p, 1, 1, %35, %36;\n}"
                 : SUMS16(0), SUMS16(16)
                 : "l"(a), "l"(b), "r"((int)adds), "n"((int)TRANSPOSED_A), "n"((int)TRANSPOSED_B));
}

// The same matmul with A in registers: a thread has two pairs of adjacent columns in each of two
// rows. The registers must not change before wgmma_wait, so the caller calls pin() for them after
// the wait.
template <bool TRANSPOSED_B>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t *a, uint64_t b, bool adds) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
                 "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
                 : SUMS16(0), SUMS16(16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds),
                   "n"((int)TRANSPOSED_B));
}
#undef NAMES32
#undef SUMS16
#undef SUMS4

// Waits until at most LEFT of the warp's committed groups of WGMMAs are unfinished.
template <int LEFT> __device__ __forceinline__ void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Makes the compiler compute these pairs of rounded BF16 before the code that follows, such as a
// wait for WGMMAs. Otherwise ptxas moves the wait up, before arithmetic that could run during the
// WGMMAs. (The condition is never true: rounding to BF16 never gives all ones.)
template <int N> __device__ __forceinline__ void hold(const uint32_t (&pairs)[N]) {
    uint32_t all = ~0u;
#pragma unroll
    for (uint32_t pair : pairs) { all &= pair; }
    if (__any_sync(~0u, all == ~0u)) { __nanosleep(1); }
}

// Makes the compiler finish writing d before this point and read d only after it. The compiler does
// not know that results of WGMMA are valid only after a wait.
template <int N> __device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) { asm volatile("" : "+f"(d[i])::"memory"); }
}

// The same for a WGMMA's operand in registers, which must not change before the WGMMA has finished.
template <int N> __device__ __forceinline__ void pin(uint32_t (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) { asm volatile("" : "+r"(a[i])::"memory"); }
}

__device__ __forceinline__ void wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Makes a group of the TMA stores that the thread has begun since its last commit.
__device__ __forceinline__ void stores_commit(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// stores_wait_read waits until all of the thread's groups but the LEFT newest have read shared
// memory. stores_wait waits until all of its groups are done.
template <int LEFT> __device__ __forceinline__ void stores_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void stores_wait(void) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// After this call and a barrier, TMA may read what this thread has written to shared memory.
__device__ __forceinline__ void show_to_tma(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Two warpgroups use the tensor cores in turns. turn_wait makes warpgroup w wait for its turn;
// turn_pass gives the turn to the other warpgroup.
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

// Stores four 8 x 8 matrices of 16-bit units to shared memory, as they are or transposed. In lane
// i, `row` is the address of row i % 8 of matrix i / 8.
template <bool TRANSPOSED>
__device__ __forceinline__ void store_matrices(void *row, const uint32_t (&units)[4]) {
#define STORE_MATRICES(how)                                                        \
    asm volatile("stmatrix.sync.aligned.m8n8.x4" how                               \
                 ".shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), \
                 "r"(units[0]), "r"(units[1]), "r"(units[2]), "r"(units[3])        \
                 : "memory")
    if constexpr (TRANSPOSED) {
        STORE_MATRICES(".trans");
    } else {
        STORE_MATRICES("");
    }
#undef STORE_MATRICES
}

// Loads four 8 x 8 matrices of 16-bit units. `row` is as in store_matrices.
__device__ __forceinline__ void load_matrices(uint32_t *units, const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(units[0]), "=r"(units[1]), "=r"(units[2]), "=r"(units[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Loads the cache line at this address into L2.
__device__ __forceinline__ void prefetch(const void *x) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(x));
}

#endif

// Returns the offset in bytes of a row's columns 16 j + 4 t to 16 j + 4 t + 3, in a tile whose
// swizzled rows have 64 BF16. Lane 4 g + t of a warp has these columns.
__device__ __forceinline__ int offset_of_four(int row, int j, int t) {
    return row * FULL_ROW + ((j * 2 + t / 2) ^ row % 8) * 16 + t % 2 * 8;
}

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

// If out.writes_amax, raises the amax to at least the largest `magnitude` of the warp. All lanes
// must call this function.
__device__ __forceinline__ void raise_amax(const Operand &out, float magnitude) {
    uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(magnitude));
    if (threadIdx.x % WARP == 0 && out.writes_amax) {
        atomicMax(reinterpret_cast<uint32_t *>(&out.scale->amax), bits);
    }
}

// A thread's position in a ring of STAGES buffers, after it has used `used` buffers: the index of
// the next buffer, and how many whole rounds of the ring the thread has made.
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

// Returns the driver's function cuTensorMapEncodeTiled, or NULL if this driver does not have it.
// (The trainer is not linked with the driver's library.) The function is looked up only once.
static inline EncodeTensorMap encode_tensor_map(void) {
    static const EncodeTensorMap function = find_encode_tensor_map();
    return function;
}

// Returns whether the device can run this kernel, and so all kernels of the same build. A kernel
// built for sm_90 instead of sm_90a is empty and takes few registers. The kernel's attributes are
// read only once.
template <typename KERNEL> static bool runs_on_hopper(const Gpu *gpu, KERNEL *kernel) {
    static cudaFuncAttributes code = {};
    if (gpu->capability != 90 || encode_tensor_map() == NULL) { return false; }
    if (code.numRegs == 0) { CUDA_CHECK(cudaFuncGetAttributes(&code, kernel)); }
    return code.numRegs > 64;
}

// A dimension of a tensor: its size, the bytes from one index to the next, and how many indices a
// TMA box covers.
struct Dimension {
    int64_t size, stride;
    int box;
};

// Returns the map of a tensor whose first dimension is contiguous, or an empty map if data is NULL.
// A box's row has `swizzle` bytes.
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
                                                                : CU_TENSOR_MAP_SWIZZLE_32B,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) { die("no tensor map, error %d", (int)status); }
    return map;
}

// map_like_rows and map_like_columns make maps of codes [rows,columns], with boxes of `box` rows,
// of which each has `row` bytes. They permute a box's rows so that a thread has 2 adjacent rows and
// 4 adjacent columns of the result (fused_matmul.cu).
// In map_like_rows, row 16 i + 2 g + p of the tensor becomes WGMMA's row 16 i + 8 p + g. The map's
// dimensions are column, g, p, block of 16 rows.
static inline CUtensorMap map_like_rows(const uint8_t *x, int64_t rows, int64_t columns, int row,
                                        int box) {
    return tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_UINT8, row,
                      {{columns, 1, row},
                       {8, 2 * columns, 8},
                       {2, columns, 2},
                       {rows / 16, 16 * columns, box / 16}});
}

// In map_like_columns, row 16 j + 4 t + 2 h + e of the tensor becomes WGMMA's column 16 j + 8 h + 2
// t + e, which lane 4 g + t has. The map's dimensions are column, e, t, h, block of 16 rows.
static inline CUtensorMap map_like_columns(const uint8_t *x, int64_t rows, int64_t columns, int row,
                                           int box) {
    return tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_UINT8, row,
                      {{columns, 1, row},
                       {2, columns, 2},
                       {4, 4 * columns, 4},
                       {2, 2 * columns, 2},
                       {rows / 16, 16 * columns, box / 16}});
}

// Returns the map of BF16 [B,T,columns], with boxes of `rows` tokens of a sequence and 64 columns.
// Beyond the end of the sequence, a load gives 0 and a store writes nothing.
static inline CUtensorMap map_sequences(const Bf16 *x, int B, int T, int64_t columns, int rows) {
    return tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, FULL_ROW,
                      {{columns, 2, 64}, {T, 2 * columns, rows}, {B, 2 * columns * T, 1}});
}

// Divides units of work among thread blocks, in the order of the units: block i gets units cuts[i]
// to cuts[i + 1] - 1. Makes the most costly share as cheap as the order allows, and returns the
// cost of that share.
template <typename CUT, typename COST>
static int64_t share_units(CUT *cuts, int units, int blocks, COST cost) {
    auto fits = [&](int64_t most) {
        int block = 0;
        int64_t sum = 0;
        cuts[0] = 0;
        for (int unit = 0; unit < units; unit++) {
            if (sum + cost(unit) > most) {
                if (++block == blocks) { return false; }
                cuts[block] = (CUT)unit;
                sum = 0;
            }
            sum += cost(unit);
        }
        while (block < blocks) { cuts[++block] = (CUT)units; }
        return true;
    };
    int64_t all = 0, most_costly = 0;
    for (int unit = 0; unit < units; unit++) {
        most_costly = max(most_costly, (int64_t)cost(unit));
        all += cost(unit);
    }
    // A limit of `low` is too small for the most costly unit or for the mean share. A limit of
    // `high` suffices: a block without room for its next unit then has more than the mean share.
    const int64_t mean = (all + blocks - 1) / blocks;
    int64_t low = max(most_costly, mean) - 1, high = mean + most_costly;
    while (low + 1 < high) {
        const int64_t middle = (low + high) / 2;
        (fits(middle) ? high : low) = middle;
    }
    fits(high);
    return high;
}

// Checks what every fused matmul requires: a device that can run it; sizes in multiples of 16;
// operands that are codes with one scale each; no alpha, c, batch or epilogue; and pointers
// `needed` that are aligned and not NULL.
static inline void check_fused_operands(const char *name, const Gpu *gpu, const Gemm &g,
                                        GpuType type_a,
                                        std::initializer_list<const void *> needed) {
    check_tensors(name, g.m, g.k, {});
    check_tensors(name, g.m, g.n, {});
    bool codes = g.type_a == type_a && g.type_b == TYPE_E4M3;
    bool tensors = !fp8_by_blocks(g.scaling_a) && !fp8_by_blocks(g.scaling_b);
    bool plain = g.c == NULL && g.alpha == 1.0f && g.epilogue == EPILOGUE_NONE && g.batch == 0;
    check_aligned(name, needed);
    for (const void *p : needed) { plain = plain && p != NULL; }
    if (g.m % 16 != 0 || g.n % 16 != 0 || g.k % 16 != 0) {
        die("%s: a matmul of %d x %d x %d; multiples of 16", name, g.m, g.n, g.k);
    }
    if (!codes || !tensors || g.trans_a || !g.trans_b) {
        die("%s: operands of types %d and %d, scales of kinds %d and %d", name, g.type_a, g.type_b,
            g.scaling_a, g.scaling_b);
    }
    if (!plain) { die("%s: a pointer is missing, or more than a matmul is requested", name); }
    gemm_check_apart(&g, "d", g.d, (int64_t)g.m * g.n * (int64_t)sizeof(Bf16));
    if (!gpu_has_fused_matmuls(gpu)) { die("%s: this device has none", name); }
}

// Checks a matmul whose result is written to `out` [M,N] as codes of A's type.
static inline void check_fused_matmul(const char *name, const Gpu *gpu, const Gemm &g, Operand *out,
                                      int N, std::initializer_list<const void *> needed) {
    const int64_t count = (int64_t)g.m * N;
    check_operand(name, out, g.m, N);
    check_fused_operands(name, gpu, g, gpu_fp8_type(out->type), needed);
    if (!out->fused || out->scaling != SCALE_DELAYED) {
        die("%s: its output's scale is given", name);
    }
    gemm_check_apart(&g, "codes", out->rows.codes, count);
    gemm_check_apart(&g, "transposed codes", out->columns.codes, count);
}
