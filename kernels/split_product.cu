// An FP8 product on Hopper with split accumulation: the tensor cores, which keep some 14 bits, sum
// over DEPTH of K at a time, and these sums are added up in FP32. A probe.
//
// A block computes tiles of 128 rows and 256 columns. Two blocks form a cluster; their tiles have
// the same columns, so that each loads a half of B's part for both. Of a block's three warpgroups
// the first moves data, by TMA: a warp loads A, one loads B, two store. The other two compute 64
// rows each, with 64 x 256 sums in registers. Shared memory's 128 bytes a cycle are the limit, with
// 64 cycles for a WGMMA of 64 x 128 x 32: a warpgroup therefore has its part of A in registers,
// where it is loaded once for all columns: 16 bytes a cycle, and 64 for B, and 48 that TMA writes.
// (With A in shared memory and tiles of 128 x 128, WGMMAs of 128 columns need 96, and TMA 64.)
//
// The columns are done in quarters of 64, whose sums over DEPTH go to one of two sets of registers
// while the other set is added. So a warpgroup's WGMMAs wait for nothing but, after each DEPTH, for
// the next part of A. The warpgroups are half of such a step apart, so that one's WGMMAs fill the
// other's pause.
//
// Or in halves of 128, with one set of registers for the sums over DEPTH: a warpgroup then waits
// for each, and adds while the other's WGMMAs run.
//
// The order of rows is fused_product.cu's: a thread has 2 adjacent rows x 4 adjacent columns of
// each block of 16 x 16.
#include "hopper.cuh"
#include "kernels.h"

namespace {

enum {
    ROWS = PRODUCT_ROWS, // of a warpgroup's part of a tile
    TILE = 128,          // its rows, and half of its columns
    DEPTH = 128,         // of K at a time, which are the bytes of a row in shared memory
    THREADS = 3 * GROUP,
    A_STAGES = 2,
    B_STAGES = 4,
    STORED = 64,           // columns, whose BF16 are a row in shared memory
    TOGETHER = 8,          // clusters' tiles down the matrix before the next column, for the L2
    MOVING_REGISTERS = 40, // a thread's
    COMPUTING_REGISTERS = 232
};

struct Shared {
    uint8_t b[B_STAGES][2 * TILE * DEPTH];
    uint8_t a[2][A_STAGES][ROWS * DEPTH];             // of [warpgroup]
    uint8_t x[2][2 * TILE / STORED][ROWS * FULL_ROW]; // BF16 of [warpgroup][64 columns]
    Barrier b_full[B_STAGES], b_empty[B_STAGES];
    Barrier a_full[2][A_STAGES], a_empty[2][A_STAGES];
    Barrier staged[2], freed[2]; // of a warpgroup's part of x
};
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");
static_assert(registers_suffice(MOVING_REGISTERS, COMPUTING_REGISTERS), "a block's registers");

struct Parameters {
    CUtensorMap a, b, x;
    const float *scale_a, *scale_b;
    int K;
    int down, across, tiles; // the clusters' tiles, 256 rows each
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Where the block's half of the cluster's tile begins.
struct Corner {
    int row, column;
};
__device__ __forceinline__ Corner corner(const Parameters &p, int tile) {
    int first = tile / (TOGETHER * p.across) * TOGETHER, rows = min((int)TOGETHER, p.down - first);
    int within = tile % (TOGETHER * p.across), block = blockIdx.x % 2;
    return {((first + within % rows) * 2 + block) * TILE, within / rows * 2 * TILE};
}

// One lane loads the block's rows of A.
__device__ __forceinline__ void load_a(Shared &s, const Parameters &p) {
    Stage<A_STAGES> stage = 0;
    for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2) {
        const int row = corner(p, tile).row;
        for (int k = 0; k < p.K; k += DEPTH, stage.advance(1)) {
#pragma unroll
            for (int w = 0; w < 2; w++) {
                Barrier *full = &s.a_full[w][stage.at];
                barrier_wait(&s.a_empty[w][stage.at], stage.round + 1);
                barrier_expect(full, sizeof(s.a[w][0]));
                tma_load<4>(s.a[w][stage.at], p.a, full, k, (row + w * ROWS) / 16);
            }
        }
    }
}

// One loads the block's half of B for both blocks.
__device__ __forceinline__ void load_b(Shared &s, const Parameters &p) {
    const int half = blockIdx.x % 2;
    Stage<B_STAGES> stage = 0;
    for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2) {
        const int column = corner(p, tile).column + half * TILE;
        for (int k = 0; k < p.K; k += DEPTH, stage.advance(1)) {
            Barrier *full = &s.b_full[stage.at];
            barrier_wait(&s.b_empty[stage.at], stage.round + 1);
            barrier_expect(full, sizeof(s.b[0]));
            tma_load_both(s.b[stage.at] + half * TILE * DEPTH, p.b, full, k, column / 16);
        }
    }
}

// One stores what warpgroup w has staged.
__device__ __forceinline__ void store(Shared &s, const Parameters &p, int w) {
    int number = 0; // of the tile, counted in this block
    for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2, number++) {
        const Corner at = corner(p, tile);
        barrier_wait(&s.staged[w], number);
#pragma unroll
        for (int i = 0; i < 2 * TILE / STORED; i++) {
            tma_store<2>(p.x, s.x[w][i], at.column + i * STORED, at.row + w * ROWS);
        }
        stores_commit();
        stores_wait_read<0>();
        barrier_arrive(&s.freed[w], true);
    }
    stores_wait();
}

// FORM: in quarters or halves. Apart: the second warpgroup begins each tile half a step later.
template <Fp8Type TYPE, SplitForm FORM>
__device__ __forceinline__ void multiply(Shared &s, const Parameters &p, int w) {
    const int warp = threadIdx.x % GROUP / WARP, lane = threadIdx.x % WARP;
    const int g = lane / 4, t = lane % 4;
    const float scale = *p.scale_a * *p.scale_b;
    const int row = warp * 16 + lane % 16; // whose 16 bytes the lane gives to ldmatrix
    constexpr bool APART = FORM != SPLIT_QUARTERS_IN_STEP, HALVES = FORM == SPLIT_HALVES;
    constexpr int PARTS = HALVES ? 2 : 4, COLUMNS = 2 * TILE / PARTS, SUMS = COLUMNS / 2;
    float sums[PARTS][SUMS], first[SUMS], second[SUMS];
    uint32_t a[16];
    Stage<A_STAGES> a_at = 0;
    Stage<B_STAGES> b_at = 0;

    auto arrived = [&] { // waits for the operands of the next step
        barrier_wait(&s.a_full[w][a_at.at], a_at.round);
        barrier_wait(&s.b_full[b_at.at], b_at.round);
    };
    auto fetch = [&] { // A, as a WGMMA has it in registers
#pragma unroll
        for (int i = 0; i < DEPTH / 32; i++) {
            load_matrices(a + 4 * i,
                          s.a[w][a_at.at] + row * FULL_ROW + ((2 * i + lane / 16) ^ row % 8) * 16);
        }
    };
    auto fetched = [&](bool used) {
        __syncwarp();
        barrier_arrive(&s.a_empty[w][a_at.at], used && lane == 0);
        a_at.advance(used ? 1 : 0);
    };
    auto begin = [&](float(&d)[SUMS], int part) {
        const uint64_t b = wgmma_operand(s.b[b_at.at] + part * COLUMNS * DEPTH);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 32; i++) { // 32 bytes further in every row
            wgmma_fp8<TYPE>(d, a + 4 * i, b + 2 * i, i > 0);
        }
        wgmma_commit();
    };
    auto add = [&](float(&to)[SUMS], float(&d)[SUMS]) {
        pin(d);
#pragma unroll
        for (int i = 0; i < SUMS; i++) { to[i] += d[i]; }
        pin(to);
    };
    int number = 0;
    for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2, number++) {
#pragma unroll
        for (int i = 0; i < PARTS * SUMS; i++) { sums[i / SUMS][i % SUMS] = 0.0f; }
        if (APART && w == 1) {
            turn_wait(1);
            if (tile + (int)gridDim.x / 2 < p.tiles) { turn_pass(1); }
        }
        if (APART && w == 0 && number > 0) { turn_wait(0); }
        arrived();
        fetch();
        fetched(true);
        for (int k = 0; k < p.K; k += DEPTH) {
            const bool more = k + DEPTH < p.K;
            begin(first, 0);
            if constexpr (HALVES) {
                wgmma_wait<0>();
                if (w == 0 && k == 0) { turn_pass(0); }
                add(sums[0], first);
                begin(first, 1);
            } else {
                begin(second, 1);
                wgmma_wait<1>();
                add(sums[0], first);
                begin(first, 2);
                if (APART && w == 0 && k == 0) { turn_pass(0); }
                wgmma_wait<1>();
                add(sums[1], second);
                begin(second, 3);
                wgmma_wait<1>();
                add(sums[2], first);
            }
            const int last = b_at.at;
            b_at.advance(1);
            if (more) { arrived(); }
            wgmma_wait<0>();
            pin(a);
            fetch(); // without a branch; after the last step it is not used
            add(sums[PARTS - 1], HALVES ? first : second);
            fetched(more);
            if (lane < 2) { barrier_arrive_in(&s.b_empty[last], lane); } // both write into it
            __syncwarp();
        }
        barrier_wait(&s.freed[w], number + 1);
#pragma unroll
        for (int j = 0; j < 2 * TILE / 16; j++) { // blocks of 16 columns
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float *d = &sums[j * 8 / SUMS][j * 8 % SUMS + r * 2]; // and 4 further
                const int at = place_of_four(warp * 16 + g * 2 + r, j % 4, t);
                *reinterpret_cast<uint2 *>(s.x[w][j / 4] + at) = {
                    bf16_pair(d[0] * scale, d[1] * scale), bf16_pair(d[4] * scale, d[5] * scale)};
            }
        }
        show_to_tma();
        barrier_arrive(&s.staged[w], true);
    }
}

#endif

template <Fp8Type TYPE, SplitForm FORM>
__global__ void __launch_bounds__(THREADS, 1)
    split_product_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < B_STAGES; i++) {
            barrier_init(&s.b_full[i], 1);
            barrier_init(&s.b_empty[i], 2 * 2 * WARPS);
        }
        for (int w = 0; w < 2; w++) {
            for (int i = 0; i < A_STAGES; i++) {
                barrier_init(&s.a_full[w][i], 1);
                barrier_init(&s.a_empty[w][i], WARPS);
            }
            barrier_init(&s.staged[w], GROUP);
            barrier_init(&s.freed[w], 1);
        }
        barriers_ready();
    }
    __syncthreads();
    cluster_barrier();
    if (group == 0) {
        set_registers<MOVING_REGISTERS, false>();
        const int warp = threadIdx.x / WARP;
        if (threadIdx.x % WARP == 0) {
            if (warp == 0) { load_a(s, p); }
            if (warp == 1) { load_b(s, p); }
            if (warp >= 2) { store(s, p, warp - 2); }
        }
        __syncwarp();
        cluster_barrier(); // a block that had ended could not be written to
    } else {
        set_registers<COMPUTING_REGISTERS, true>();
        multiply<TYPE, FORM>(s, p, group - 1);
        cluster_barrier();
    }
#endif
}

template <Fp8Type TYPE, SplitForm FORM> void launch_split(const Gpu *gpu, const Parameters &p) {
    cudaLaunchAttribute clusters = {};
    clusters.id = cudaLaunchAttributeClusterDimension;
    clusters.val.clusterDim = {2, 1, 1};
    cudaLaunchConfig_t launch = {};
    launch.gridDim = 2 * min(p.tiles, gpu->sms / 2);
    launch.blockDim = THREADS;
    launch.dynamicSmemBytes = sizeof(Shared);
    launch.stream = gpu->stream;
    launch.attrs = &clusters;
    launch.numAttrs = 1;
    auto kernel = split_product_kernel<TYPE, FORM>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)sizeof(Shared)));
    CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, p));
}

template <Fp8Type TYPE> void launch_form(const Gpu *gpu, const Parameters &p, SplitForm form) {
    (form == SPLIT_QUARTERS ? launch_split<TYPE, SPLIT_QUARTERS>
     : form == SPLIT_HALVES ? launch_split<TYPE, SPLIT_HALVES>
                            : launch_split<TYPE, SPLIT_QUARTERS_IN_STEP>)(gpu, p);
}

} // namespace

void gpu_product_split(Gpu *gpu, Gemm g, SplitForm form) {
    const char *name = "split product";
    gpu_family(gpu, g.family);
    if (g.fast_accumulation) { die("%s: it does not accumulate fast", name); }
    check_fused_operands(name, gpu, g, g.type_a == TYPE_E5M2 ? TYPE_E5M2 : TYPE_E4M3,
                         {g.a, g.b, g.d, g.scale_a, g.scale_b});
    Parameters p = {};
    p.a = map_like_rows(static_cast<const uint8_t *>(g.a), g.m, g.k, FULL_ROW, ROWS);
    p.b = map_like_columns(static_cast<const uint8_t *>(g.b), g.n, g.k, FULL_ROW, TILE);
    p.x = tensor_map(static_cast<Bf16 *>(g.d), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, FULL_ROW,
                     {{g.n, 2, STORED}, {g.m, 2 * (int64_t)g.n, ROWS}});
    p.scale_a = g.scale_a;
    p.scale_b = g.scale_b;
    p.K = g.k;
    p.down = divide_up(g.m, 2 * TILE);
    p.across = divide_up(g.n, 2 * TILE);
    p.tiles = p.down * p.across;
    if (g.type_a == TYPE_E5M2) {
        launch_form<FP8_E5M2>(gpu, p, form);
    } else {
        launch_form<FP8_E4M3>(gpu, p, form);
    }
}
