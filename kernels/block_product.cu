// The FP8 product of operands with vector scales on Hopper, by which blockwise scaling computes
// weight gradients: D [M,N] (+)= A B', A [M,K] and B [N,K] codes with a scale for each 1 x 128
// (fp8_format.h), K the tokens. D is BF16 or FP32; the sums are FP32.
//
// A block computes tiles of 256 x 128. Of its three warpgroups the first only loads: a lane of it
// has TMA bring 128 of K at a time, codes and scales, into a ring of stages. Each of the other two
// computes 128 rows by WGMMA, 64 at a time in fresh registers, which it then multiplies by the
// products of the scales and adds up, while the other has the tensor cores.
//
// What limits this is shared memory, which delivers 128 bytes a cycle: to WGMMA, for TMA's writes,
// and for scales. A tile this large needs the fewest: a thread reads the scales of its 32 columns
// once for 4 rows. TMA reads B in an order that leaves a thread 4 adjacent columns (hopper.cuh).
//
// Weights have few tiles beside the multiprocessors, or a few more than a multiple of them. So each
// multiprocessor first computes as many whole tiles as all can. Of each tile that is left one block
// begins the sum, and the blocks without such a tile complete it: the ends of these sums, one tile
// after another, are one long sum that is cut evenly among them. All then take equally long, and
// nearly all read the same of K at the same time, once from memory and then from L2. The parts of
// such a tile go to memory in FP32, and a second kernel adds them up, in the order of K.
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
    BAND = 8,                     // tiles down, whose blocks run across side by side
    LEAST_STEPS = 16,             // of a part
    ADDING_STEPS = 8,             // that the second kernel takes as long as
    ADDED_AT_ONCE = 4             // vectors a thread of the second kernel
};

struct Shared {
    uint8_t a[STAGES][ROWS * DEPTH];
    uint8_t b[STAGES][COLUMNS * DEPTH];
    float scales_a[STAGES][ROWS], scales_b[STAGES][COLUMNS];
    Barrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");

// How the tiles are divided. The first `whole` are a multiple of the blocks. Of each other one, its
// own block sums the first `own` steps, of DEPTH of K, and `helpers` blocks what is left.
struct Division {
    int down, across, steps;
    int whole, shared, own, helpers;
};

// Where products go.
struct Output {
    void *d;
    const void *c; // added with factor beta, or NULL
    GpuType type;
    float alpha, beta;
    int M, N;
};

struct Parameters {
    CUtensorMap a, b, scales_a, scales_b;
    Division division;
    Output out;
    float4 *parts; // [part][VECTORS]
};

// Where a tile begins: down a band of tiles, then across it.
__device__ __forceinline__ int2 tile_at(const Division &d, int tile) {
    int band = tile / (BAND * d.across), in = tile % (BAND * d.across);
    int height = min((int)BAND, d.down - band * BAND);
    return make_int2((band * BAND + in % height) * ROWS, in / height * COLUMNS);
}

// Vector `i` of a computing thread is 4 columns in a row of the tile.
__device__ __forceinline__ int2 vector_at(int thread, int i) {
    int warp = thread / WARP, lane = thread % WARP, half = i / (2 * BLOCKS);
    int row = warp / WARPS * 2 * HALF + half * HALF + warp % WARPS * 16 + i % 2 * 8 + lane / 4;
    return make_int2(row, i / 2 % BLOCKS * 16 + lane % 4 * 4);
}

__device__ __forceinline__ void put(const Output &out, int row, int column, float4 x) {
    int64_t at = ((int64_t)row * out.N + column) / 4;
    if (row >= out.M || column >= out.N) { return; }
    x = make_float4(x.x * out.alpha, x.y * out.alpha, x.z * out.alpha, x.w * out.alpha);
    if (out.type == TYPE_F32) {
        if (out.c != NULL) {
            float4 c = static_cast<const float4 *>(out.c)[at];
            x = make_float4(x.x + out.beta * c.x, x.y + out.beta * c.y, x.z + out.beta * c.z,
                            x.w + out.beta * c.w);
        }
        static_cast<float4 *>(out.d)[at] = x;
        return;
    }
    if (out.c != NULL) {
        uint2 c = static_cast<const uint2 *>(out.c)[at];
        x = make_float4(x.x + out.beta * low_bf16(c.x), x.y + out.beta * high_bf16(c.x),
                        x.z + out.beta * low_bf16(c.y), x.w + out.beta * high_bf16(c.y));
    }
    static_cast<uint2 *>(out.d)[at] = make_uint2(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w));
}

// The first unit of a helper, in the long sum of (tile, step); beyond the last helper: its length.
__device__ __forceinline__ int helper_begin(const Division &d, int helper) {
    return (int)((int64_t)d.shared * (d.steps - d.own) * helper / d.helpers);
}

// The second kernel: a shared tile's own part, and those of its helpers in the order of K. A part
// has the number of its tile, or of its helper and its tile together after those.
__global__ void __launch_bounds__(COMPUTING)
    add_parts_kernel(Division d, Output out, const float4 *parts) {
    const int tile = blockIdx.x, first_vector = blockIdx.y * ADDED_AT_ONCE;
    const int64_t left = d.steps - d.own, all = d.shared * left;
    const int first = (int)(((tile * left + 1) * d.helpers - 1) / all);
    const int last = (int)(((tile + 1) * left * d.helpers - 1) / all);
    const int2 origin = tile_at(d, d.whole + tile);
    float4 sums[ADDED_AT_ONCE];
    for (int part = first - 1; part <= last; part++) {
        int64_t number = part < first ? tile : d.shared + part + tile;
#pragma unroll
        for (int i = 0; i < ADDED_AT_ONCE; i++) {
            float4 x = parts[number * VECTORS + (first_vector + i) * COMPUTING + threadIdx.x];
            float4 &sum = sums[i];
            sum = part < first ? x
                               : make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        }
    }
#pragma unroll
    for (int i = 0; i < ADDED_AT_ONCE; i++) {
        int2 at = vector_at(threadIdx.x, first_vector + i);
        put(out, origin.x + at.x, origin.y + at.y, sums[i]);
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A part of the sum of a tile, by one block; its number, -1: the whole sum.
struct Part {
    int tile, begin, end; // steps
    int number;
};

// The i-th part that this block computes; false: it has no more.
__device__ __forceinline__ bool find_part(const Division &d, int i, Part &part) {
    const int tile = blockIdx.x + i * gridDim.x, helper = (int)blockIdx.x - d.shared;
    if (tile < d.whole) {
        part = {tile, 0, d.steps, -1};
        return true;
    }
    if (tile < d.whole + d.shared) {
        part = {tile, 0, d.own, tile - d.whole};
        return true;
    }
    if (helper < 0 || helper >= d.helpers) { return false; }
    const int left = d.steps - d.own, first = helper_begin(d, helper);
    const int shared = first / left + i - d.whole / (int)gridDim.x;
    const int begin = max(first - shared * left, 0);
    const int end = min(helper_begin(d, helper + 1) - shared * left, left);
    part = {d.whole + shared, d.own + begin, d.own + end, d.shared + helper + shared};
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

// TYPE: of A. TURNS: the warpgroups begin their WGMMAs in turns.
template <Fp8Type TYPE, bool TURNS>
__device__ __forceinline__ void compute(Shared &s, const Parameters &p, int w) {
    int thread = threadIdx.x - GROUP;
    Stage<STAGES> at = 0;
    if (TURNS && w == 1) { turn_pass(w); } // the first is the other's
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
                if (TURNS) { turn_wait(thread / GROUP); }
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < DEPTH / 32; i++) { // 32 bytes further in every row
                    wgmma<TYPE>(d, a + 2 * i, b + 2 * i, i > 0);
                }
                wgmma_commit();
                if (TURNS) { turn_pass(thread / GROUP); }
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
        const int2 origin = tile_at(p.division, part.tile);
        auto write = [&](const float(&sums)[64], int half) {
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; i++) {
                const int number = half * 2 * BLOCKS + i, k = i / 2 * 8 + i % 2 * 2;
                float4 x = make_float4(sums[k], sums[k + 1], sums[k + 4], sums[k + 5]);
                if (part.number < 0) {
                    int2 place = vector_at(thread, number);
                    put(p.out, origin.x + place.x, origin.y + place.y, x);
                } else {
                    p.parts[(int64_t)part.number * VECTORS + number * COMPUTING + thread] = x;
                }
            }
        };
        write(upper, 0);
        write(lower, 1);
    }
    if (TURNS && w == 0) { turn_wait(w); }
}

#endif

template <Fp8Type TYPE, bool TURNS>
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
        compute<TYPE, TURNS>(s, p, group - 1);
    }
#endif
}

// ---- launchers ----------------------------------------------------------------------------------

bool gpu_has_block_products(const Gpu *gpu) {
    return runs_on_hopper(gpu, block_product_kernel<FP8_E4M3, false>);
}

static Division divide(const Gpu *gpu, const Gemm &g) {
    Division d = {divide_up(g.m, ROWS), divide_up(g.n, COLUMNS), divide_up(g.k, DEPTH)};
    const int64_t tiles = (int64_t)d.down * d.across, sms = gpu->sms;
    d.shared = (int)(tiles % sms);
    d.whole = (int)(tiles - d.shared);
    d.own = max((int)LEAST_STEPS, divide_up(d.shared * d.steps, (int)sms));
    if (d.own + ADDING_STEPS >= d.steps || d.shared == 0) { // not worth it
        d.whole = (int)tiles;
        d.shared = d.own = d.helpers = 0;
        return d;
    }
    d.helpers = min((int)sms - d.shared, divide_up(d.shared * (d.steps - d.own), d.own));
    return d;
}

template <Fp8Type TYPE, bool TURNS> static void launch(const Gpu *gpu, const Parameters &p) {
    auto kernel = block_product_kernel<TYPE, TURNS>;
    const Division &d = p.division;
    int blocks = d.whole > 0 ? min(d.whole, gpu->sms) : d.shared + d.helpers;
    int bytes = (int)sizeof(Shared);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<blocks, THREADS, sizeof(Shared), gpu->stream>>>(p);
    LAUNCH_CHECK();
    if (d.shared > 0) {
        dim3 grid(d.shared, VECTORS / COMPUTING / ADDED_AT_ONCE);
        add_parts_kernel<<<grid, COMPUTING, 0, gpu->stream>>>(d, p.out, p.parts);
        LAUNCH_CHECK();
    }
}

static int64_t parts_bytes(const Division &d) {
    return (int64_t)(2 * d.shared + d.helpers) * VECTORS * sizeof(float4);
}

static CUtensorMap map_scales(const float *scales, int rows, int steps, int box) {
    int64_t count = fp8_scale_count(SCALES_VECTOR, rows, DEPTH);
    return tensor_map(scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 0,
                      {{count, 4, box}, {steps, 4 * count, 1}});
}

void gpu_block_product(Gpu *gpu, Gemm g) {
    const char *name = "product by blocks";
    check_aligned(name, {g.a, g.b, g.c, g.d, g.scale_a, g.scale_b, gpu->workspace});
    if (g.m % 16 != 0 || g.n % 16 != 0 || g.k % 16 != 0) {
        die("%s: a product of %d x %d x %d; multiples of 16", name, g.m, g.n, g.k);
    }
    bool bf16 = g.type_d == TYPE_BF16,
         vectors = g.scales_a == SCALES_VECTOR && g.scales_b == SCALES_VECTOR;
    if ((g.type_a != TYPE_E4M3 && g.type_a != TYPE_E5M2) || g.type_b != TYPE_E4M3 || g.trans_a ||
        !g.trans_b || !vectors || (!bf16 && g.type_d != TYPE_F32)) {
        die("%s: operands of types %d and %d, scales of kinds %d and %d", name, g.type_a, g.type_b,
            g.scales_a, g.scales_b);
    }
    if (g.a == NULL || g.b == NULL || g.d == NULL || g.scale_a == NULL || g.scale_b == NULL ||
        (g.c == NULL && g.beta != 0.0f) || g.epilogue != EPILOGUE_NONE || g.batch > 0) {
        die("%s: a pointer is missing, or more than a product is requested", name);
    }
    if (!gpu_has_block_products(gpu)) { die("%s: this device has none", name); }
    Parameters p = {};
    p.a = tensor_map(g.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, FULL_ROW,
                     {{g.k, 1, FULL_ROW}, {g.m, g.k, ROWS}});
    p.b = map_like_columns(static_cast<const uint8_t *>(g.b), g.n, g.k, FULL_ROW);
    p.division = divide(gpu, g);
    p.scales_a = map_scales(g.scale_a, g.m, p.division.steps, ROWS);
    p.scales_b = map_scales(g.scale_b, g.n, p.division.steps, COLUMNS);
    p.out = {g.d, g.beta != 0.0f ? g.c : NULL, g.type_d, g.alpha, g.beta, g.m, g.n};
    p.parts = static_cast<float4 *>(gpu->workspace);
    if (parts_bytes(p.division) > (int64_t)gpu->workspace_bytes) {
        die("%s: %zu bytes of workspace instead of %lld", name, gpu->workspace_bytes,
            (long long)parts_bytes(p.division));
    }
    bool turns = getenv("TURNS") != NULL;
    if (g.type_a == TYPE_E4M3) {
        (turns ? launch<FP8_E4M3, true> : launch<FP8_E4M3, false>)(gpu, p);
    } else {
        (turns ? launch<FP8_E5M2, true> : launch<FP8_E5M2, false>)(gpu, p);
    }
}
