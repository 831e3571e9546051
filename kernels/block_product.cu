// The FP8 product of operands with vector scales on Hopper, by which blockwise scaling computes
// some weight gradients: D [M,N] (+)= A B', A [M,K] and B [N,K] codes with a scale for each 1 x 128
// (fp8_format.h), K the tokens. D is BF16 or FP32; the sums are FP32.
//
// cuBLASLt computes D in tiles of 128 x 128, a multiprocessor each, and where they are a few more
// than the multiprocessors most of these have nothing to do in the end. Here all take equally long.
// D has fewer tiles than there are multiprocessors; one block begins the sum of each tile, and the
// blocks without a tile, the helpers, complete them: what is left of these sums, one tile after
// another, is one long sum that is cut evenly among the helpers. So nearly all read the same of K
// at the same time, once from memory and then from L2. The parts of sums go to memory in FP32, and
// a second kernel adds them up, in the order of K.
//
// Of a block's three warpgroups the first only loads: a lane of it has TMA bring 128 of K at a
// time, codes and scales, into a ring of stages. Each of the other two computes 128 rows of a tile
// of 256 x 128 by WGMMA, 64 at a time in fresh registers, which it then multiplies by the products
// of the scales and adds up, while the other has the tensor cores: they take turns. In so large a
// tile a thread reads the scales of its 32 columns once for 4 rows. TMA reads B in an order that
// leaves a thread 4 adjacent columns (hopper.cuh).
#include "gemm.h"
#include "hopper.cuh"

enum {
    ROWS = 256,
    COLUMNS = 128, // of a tile
    DEPTH = FP8_BLOCK,
    HALF = 64, // rows of a WGMMA
    STAGES = 4,
    LOADING_REGISTERS = 24, // a thread's, of the multiprocessor's 65536
    COMPUTING_REGISTERS = 240,
    COMPUTING = 2 * GROUP,
    THREADS = COMPUTING + GROUP,
    BLOCKS = COLUMNS / 16,        // of 16 columns
    VECTORS = ROWS * COLUMNS / 4, // of 4 columns in a row, in a tile
    ADDED_AT_ONCE = 4             // vectors a thread of the second kernel
};

struct Shared {
    uint8_t a[STAGES][ROWS * DEPTH];
    uint8_t b[STAGES][COLUMNS * DEPTH];
    float scales_a[STAGES][ROWS], scales_b[STAGES][COLUMNS];
    Barrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");

// Steps are DEPTH of K. Of each tile its own block sums the first `own`, the helpers what is left.
struct Division {
    int down, tiles, steps, own, helpers;
};

struct Parameters {
    CUtensorMap a, b, scales_a, scales_b;
    Division division;
    float4 *parts; // [part][VECTORS]
};

// Where a tile begins.
__device__ __forceinline__ int2 tile_at(const Division &d, int tile) {
    return make_int2(tile % d.down * ROWS, tile / d.down * COLUMNS);
}

// Vector i of a computing thread is 4 columns in a row of the tile.
__device__ __forceinline__ int2 vector_at(int thread, int i) {
    int warp = thread / WARP, lane = thread % WARP, half = i / (2 * BLOCKS);
    int row = warp / WARPS * 2 * HALF + half * HALF + warp % WARPS * 16 + i % 2 * 8 + lane / 4;
    return make_int2(row, i / 2 % BLOCKS * 16 + lane % 4 * 4);
}

// Where a helper begins in the long sum; of the one after the last: its length.
__device__ __forceinline__ int helper_begin(const Division &d, int helper) {
    return (int)((int64_t)d.tiles * (d.steps - d.own) * helper / d.helpers);
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The second kernel: a tile's own part, and those of its helpers in the order of K. c: NULL, or
// added. Vectors of four columns: M and N are multiples of 16.
__global__ void __launch_bounds__(COMPUTING)
    add_parts_kernel(Division d, const float4 *parts, void *out, const void *c, GpuType type, int M,
                     int N) {
    const int tile = blockIdx.x, first_vector = blockIdx.y * ADDED_AT_ONCE;
    const int64_t left = d.steps - d.own, all = d.tiles * left;
    const int first = all == 0 ? 0 : (int)(((tile * left + 1) * d.helpers - 1) / all);
    const int last = all == 0 ? -1 : (int)(((tile + 1) * left * d.helpers - 1) / all);
    const int2 origin = tile_at(d, tile);
    auto part_at = [&](int64_t number, int i) {
        return parts[number * VECTORS + (first_vector + i) * COMPUTING + threadIdx.x];
    };
    float4 sums[ADDED_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ADDED_AT_ONCE; i++) { sums[i] = part_at(tile, i); }
    for (int helper = first; helper <= last; helper++) {
#pragma unroll
        for (int i = 0; i < ADDED_AT_ONCE; i++) {
            sums[i] = add4(sums[i], part_at(d.tiles + helper + tile, i));
        }
    }
#pragma unroll
    for (int i = 0; i < ADDED_AT_ONCE; i++) {
        const int2 at = vector_at(threadIdx.x, first_vector + i);
        const int row = origin.x + at.x, column = origin.y + at.y;
        const int64_t place = ((int64_t)row * N + column) / 4;
        float4 x = sums[i];
        if (row >= M || column >= N) { continue; }
        if (type == TYPE_F32) {
            if (c != NULL) { x = add4(x, static_cast<const float4 *>(c)[place]); }
            static_cast<float4 *>(out)[place] = x;
        } else {
            if (c != NULL) {
                uint2 y = static_cast<const uint2 *>(c)[place];
                x = add4(x,
                         make_float4(low_bf16(y.x), high_bf16(y.x), low_bf16(y.y), high_bf16(y.y)));
            }
            static_cast<uint2 *>(out)[place] = make_uint2(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w));
        }
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A part of the sum of a tile, by one block. Numbers: those of the tiles' own blocks, then those of
// the helpers, of which no two have the same sum of tile and helper.
struct Part {
    int tile, begin, end; // steps
    int number;
};

// The i-th part that this block computes; false: it has no more.
__device__ __forceinline__ bool find_part(const Division &d, int i, Part &part) {
    const int helper = (int)blockIdx.x - d.tiles;
    if (helper < 0) {
        part = {(int)blockIdx.x, 0, d.own, (int)blockIdx.x};
        return i == 0;
    }
    const int left = d.steps - d.own, first = helper_begin(d, helper), tile = first / left + i;
    const int begin = max(first - tile * left, 0);
    const int end = min(helper_begin(d, helper + 1) - tile * left, left);
    part = {tile, d.own + begin, d.own + end, d.tiles + helper + tile};
    return begin < end;
}

// By one lane.
__device__ __forceinline__ void load(Shared &s, const Parameters &p) {
    Stage<STAGES> at = 0;
    Part part;
    for (int i = 0; find_part(p.division, i, part); i++) {
        const int2 origin = tile_at(p.division, part.tile);
        for (int step = part.begin; step < part.end; step++, at.advance(1)) {
            Barrier *full = &s.full[at.at];
            barrier_wait(&s.empty[at.at], at.round + 1);
            barrier_expect(full, sizeof(s.a[0]) + sizeof(s.b[0]) + sizeof(s.scales_a[0]) +
                                     sizeof(s.scales_b[0]));
            tma_load<2>(s.a[at.at], p.a, full, step * DEPTH, origin.x);
            tma_load<5>(s.b[at.at], p.b, full, step * DEPTH, origin.y / 16);
            tma_load<2>(s.scales_a[at.at], p.scales_a, full, origin.x, step);
            tma_load<2>(s.scales_b[at.at], p.scales_b, full, origin.y, step);
        }
    }
}

// TYPE: of A.
template <Fp8Type TYPE>
__device__ __forceinline__ void compute(Shared &s, const Parameters &p, int w) {
    int thread = threadIdx.x - GROUP;
    Stage<STAGES> at = 0;
    if (w == 1) { turn_pass(w); } // the first is the other's
    Part part;
    for (int i = 0; find_part(p.division, i, part); i++) {
        float upper[64], lower[64]; // sums of the rows' halves
#pragma unroll
        for (int k = 0; k < 64; k++) { upper[k] = lower[k] = 0.0f; }
        for (int left = part.end - part.begin; left > 0; left--, at.advance(1)) {
            float4 scales_b[BLOCKS];
            barrier_wait(&s.full[at.at], at.round);
            asm volatile("" : "+r"(thread)); // what follows from it does not stay in registers
            const int2 place = vector_at(thread, 0);
            auto add_product = [&](float(&sums)[64], int half) {
                float d[64];
                uint64_t a = wgmma_operand(s.a[at.at] + (thread / GROUP * 2 + half) * HALF * DEPTH);
                uint64_t b = wgmma_operand(s.b[at.at]);
                turn_wait(thread / GROUP);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < DEPTH / 32; i++) { // 32 bytes further in every row
                    wgmma<TYPE>(d, a + 2 * i, b + 2 * i, i > 0);
                }
                wgmma_commit();
                turn_pass(thread / GROUP);
                const float *scales_a = s.scales_a[at.at] + place.x + half * HALF;
                const float scale_a[2] = {scales_a[0], scales_a[8]};
#pragma unroll
                for (int j = 0; j < BLOCKS; j++) {
                    const float *scales = s.scales_b[at.at] + place.y + j * 16;
                    if (half == 0) { scales_b[j] = *reinterpret_cast<const float4 *>(scales); }
                }
                wgmma_wait<0>();
                pin(d);
                if (half == 1) { barrier_arrive(&s.empty[at.at], thread % WARP == 0); }
#pragma unroll
                for (int j = 0; j < BLOCKS; j++) {
                    const float scale_b[4] = {scales_b[j].x, scales_b[j].y, scales_b[j].z,
                                              scales_b[j].w};
#pragma unroll
                    for (int i = 0; i < 8; i++) { // WGMMA's order: columns 0 and 1, 2 and 3
                        float scale = scale_a[i / 2 % 2] * scale_b[i / 4 * 2 + i % 2];
                        sums[j * 8 + i] += d[j * 8 + i] * scale;
                    }
                }
                pin(sums);
            };
            add_product(upper, 0);
            add_product(lower, 1);
        }
        asm volatile("" : "+r"(i));
        find_part(p.division, i, part);
        float4 *to = p.parts + (int64_t)part.number * VECTORS + thread;
        auto write = [&](const float(&sums)[64], int half) {
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; i++) {
                const int k = i / 2 * 8 + i % 2 * 2;
                to[(half * 2 * BLOCKS + i) * COMPUTING] = make_float4(sums[k], sums[k + 1],
                                                                      sums[k + 4], sums[k + 5]);
            }
        };
        write(upper, 0);
        write(lower, 1);
    }
    if (w == 0) { turn_wait(w); }
}

#endif

template <Fp8Type TYPE>
__global__ void __launch_bounds__(THREADS, 1)
    block_product_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 2 * WARPS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (group == 0) {
        set_registers<LOADING_REGISTERS, false>();
        if (threadIdx.x == 0) { load(s, p); }
    } else {
        set_registers<COMPUTING_REGISTERS, true>();
        compute<TYPE>(s, p, group - 1);
    }
#endif
}

// ---- launchers ----------------------------------------------------------------------------------

static Division divide(const Gpu *gpu, int m, int n, int k) {
    Division d = {divide_up(m, ROWS)};
    d.tiles = d.down * divide_up(n, COLUMNS);
    d.steps = divide_up(k, DEPTH);
    d.own = divide_up((int64_t)d.tiles * d.steps, gpu->sms);
    int64_t left = (int64_t)d.tiles * (d.steps - d.own);
    d.helpers = min(gpu->sms - d.tiles, divide_up(left, d.own)); // each has at least a step
    return d;
}

bool gpu_block_product_pays(const Gpu *gpu, int m, int n, int k) {
    const int least_tokens = 8192; // below, the second kernel takes longer than is gained
    int64_t theirs = (int64_t)divide_up(m, 128) * divide_up(n, 128);
    int64_t ours = (int64_t)divide_up(m, ROWS) * divide_up(n, COLUMNS);
    return runs_on_hopper(gpu, block_product_kernel<FP8_E4M3>) && k >= least_tokens &&
           theirs > gpu->sms && 5 * ours < 3 * gpu->sms;
}

static CUtensorMap map_scales(const float *scales, int rows, int steps, int box) {
    int64_t count = fp8_scale_count(SCALES_VECTOR, rows, DEPTH);
    return tensor_map(scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 0,
                      {{count, 4, box}, {steps, 4 * count, 1}});
}

void gpu_block_product(Gpu *gpu, Gemm g) {
    const char *name = "product by blocks";
    check_product(name, g, SCALES_VECTOR, gpu_type_bytes(g.type_d) > 1, g.beta == (g.c != NULL),
                  {g.a, g.b, g.d, g.scale_a, g.scale_b});
    check_aligned(name, {g.c, gpu->workspace});
    const Division d = divide(gpu, g.m, g.n, g.k);
    const int64_t parts_bytes = (int64_t)(2 * d.tiles + d.helpers) * VECTORS * sizeof(float4);
    if (d.tiles >= gpu->sms || parts_bytes > (int64_t)gpu->workspace_bytes) {
        die("%s: %d tiles for %d multiprocessors, %zu bytes of workspace", name, d.tiles, gpu->sms,
            gpu->workspace_bytes);
    }
    gemm_check_apart(&g, "d", g.d, (int64_t)g.m * g.n * gpu_type_bytes(g.type_d));
    gemm_check_apart(&g, "parts", gpu->workspace, parts_bytes);
    if (!runs_on_hopper(gpu, block_product_kernel<FP8_E4M3>)) {
        die("%s: this device has none", name);
    }
    Parameters p = {};
    p.a = tensor_map(g.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, FULL_ROW,
                     {{g.k, 1, FULL_ROW}, {g.m, g.k, ROWS}});
    p.b = map_like_columns(static_cast<const uint8_t *>(g.b), g.n, g.k, FULL_ROW);
    p.scales_a = map_scales(g.scale_a, g.m, d.steps, ROWS);
    p.scales_b = map_scales(g.scale_b, g.n, d.steps, COLUMNS);
    p.division = d;
    p.parts = static_cast<float4 *>(gpu->workspace);
    auto kernel = g.type_a == TYPE_E4M3 ? block_product_kernel<FP8_E4M3>
                                        : block_product_kernel<FP8_E5M2>;
    launch_with_shared(kernel, d.tiles + d.helpers, THREADS, sizeof(Shared), gpu->stream, p);
    dim3 grid(d.tiles, VECTORS / COMPUTING / ADDED_AT_ONCE);
    launch(add_parts_kernel, grid, COMPUTING, gpu->stream, d, p.parts, g.d, g.c, g.type_d, g.m,
           g.n);
}
