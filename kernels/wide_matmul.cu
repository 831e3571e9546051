// Forward FP8 matmuls on Hopper, with fast accumulation, and a second step that works on the result
// while it still lies in shared memory. One kernel does the work of a matmul (gemm.h) and of a pass
// over its result.
//
// The matmul is A B', of FP8 codes A [M,K] and B [N,K], rounded to BF16. The second step is one
// of:
//
// - SWIGLU, for Llama's fc1: the result is gate and up, and N is 2F. The result is written, and
//   y = up silu(gate) [M,F] (activation.cu) is written as codes and transposed codes, by a scale
//   that is known beforehand; the amax of y is recorded.
// - MAX_SUMS, for the head: N is the padded vocabulary, of which the first V columns count. The
//   result is written; so are each row's maximum and sum of exponentials in each tile (loss.cu).
// - ROTARY, for Llama's QKV: N is (H + 2G) D. Queries and keys are rotated (rope.cu), and then the
//   result is written.
//
// A thread block computes tiles of 128 rows and 256 columns. With SWIGLU these are 128 columns of
// gate and the matching 128 of up; otherwise the columns are adjacent, and with ROTARY they are
// whole heads. Two blocks form a cluster; their tiles have the same columns, so that each block
// loads half of the tile's part of B for both. Two of a block's three warpgroups compute 64 rows
// each by WGMMA, with 64 x 256 sums, and write these sums, rounded, to shared memory. In the other
// warpgroup, one warp loads A and B by TMA, stage by stage. The other three warps run the second
// step on the result and store it, an eighth of a tile at a time, while the WGMMAs of the next tile
// run. (With the encoding in the computing warps, the kernel was 6% slower on an H200, because
// WGMMAs waited for the encoding. A fourth warpgroup would leave a thread 128 registers, too few
// for its sums.)
//
// Rows are permuted as in fused_matmul.cu, so that a thread has 2 adjacent rows x 4 adjacent
// columns of each block of 16 x 16.
#include "hopper.cuh"
#include "quantize.cuh"

namespace {

enum Epilogue { SWIGLU, MAX_SUMS, ROTARY };

enum {
    ROWS = MATMUL_ROWS, // rows of a tile that a warpgroup computes
    TILE = 128,
    DEPTH = 128, // FP8 values of K in a step; a row of them takes DEPTH bytes in shared memory
    THREADS = 3 * GROUP,
    STAGES = 3,
    WORKERS = 3, // warps that run the second step
    // A tile has 8 parts, and a warp works on one part at a time. With SwiGLU a part has PART_ROWS
    // rows and PART_COLUMNS columns, with the other epilogues STRIP_ROWS whole rows of the tile.
    PARTS = 8,
    PART_ROWS = 32,
    PART_COLUMNS = 64, // as BF16 they fill a row of shared memory
    STRIP_ROWS = 16,
    // Clusters compute this many tiles of a column of tiles, then as many of the next column, so
    // that operands are still in L2.
    TOGETHER = 8,
    // registers of a thread
    BUSY_REGISTERS = 200,
    OTHER_REGISTERS = 104
};

struct Shared {
    struct {
        uint8_t a[TILE * DEPTH], b[2][TILE * DEPTH];
    } stages[STAGES];
    uint8_t x[2][2][2][ROWS * FULL_ROW]; // BF16 of [warpgroup][half of the tile][64 columns]
    struct {
        uint8_t codes[PART_ROWS * HALF_ROW], codes_t[PART_COLUMNS * QUARTER_ROW];
    } staging[WORKERS];
    Barrier full[STAGES], empty[STAGES];
    Barrier staged[2]; // a warpgroup has written its half of x
    Barrier freed[2];  // workers have read a warpgroup's half of x
};
static_assert(2 * TILE == WIDE_MATMUL_COLUMNS, "what a tile is to the loss, and to heads");
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");
static_assert(registers_suffice(OTHER_REGISTERS, BUSY_REGISTERS), "a block's registers");

struct Parameters {
    // b, x: SWIGLU has [0] for gate and [1] for up; other epilogues use only [0]
    CUtensorMap a, b[2], x[2], codes, codes_t;
    const float *scale_a, *scale_b;
    Operand out;
    MaxSum *max_sums; // [tiles across][M]
    int M, K, V;
    // how many of the clusters' tiles (256 rows) lie down the result, across it, and in all
    int down, across, tiles;
    Rotary rotary;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ---- the kernel ---------------------------------------------------------------------------------

// Where the block's half of the cluster's tile begins.
struct Corner {
    int row, column;
};
template <Epilogue EPILOGUE>
__device__ __forceinline__ Corner corner(const Parameters &p, int tile) {
    const int columns = EPILOGUE == SWIGLU ? TILE : 2 * TILE;
    int first = tile / (TOGETHER * p.across) * TOGETHER, rows = min((int)TOGETHER, p.down - first);
    int within = tile % (TOGETHER * p.across), block = blockIdx.x % 2;
    return {((first + within % rows) * 2 + block) * TILE, within / rows * columns};
}

// Loads this block's rows of A, and half of the tile's rows of B for both blocks of the cluster.
// One lane runs this function.
template <Epilogue EPILOGUE> __device__ __forceinline__ void load(Shared &s, const Parameters &p) {
    const int half = blockIdx.x % 2;
    Stage<STAGES> stage = 0;
    for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2) {
        const Corner at = corner<EPILOGUE>(p, tile);
        const int column = at.column + (EPILOGUE == SWIGLU ? 0 : half * TILE);
        for (int k = 0; k < p.K; k += DEPTH, stage.advance(1)) {
            auto &to = s.stages[stage.at];
            Barrier *full = &s.full[stage.at];
            barrier_wait(&s.empty[stage.at], stage.round + 1);
            barrier_expect(full, sizeof(to));
            tma_load<4>(to.a, p.a, full, k, at.row / 16);
            tma_load_both(to.b[half], p.b[EPILOGUE == SWIGLU ? half : 0], full, k, column / 16);
        }
    }
}

// Goes through the parts that this worker takes: every third part of the block's tiles. Once a part
// is in shared memory, the function calls work() with the tile's corner, the warpgroup that
// computed the part, and the part's number among the parts of that warpgroup.
template <Epilogue EPILOGUE, typename WORK>
__device__ __forceinline__ void each_part(Shared &s, const Parameters &p, int worker, WORK work) {
    int number = 0; // how many tiles this block has finished
    for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2, number++) {
        const Corner begin = corner<EPILOGUE>(p, tile);
#pragma unroll 1
        for (int part = 0; part < PARTS; part++) {
            if ((number * PARTS + part) % WORKERS != worker) { continue; }
            const int w = part / (PARTS / 2);
            barrier_wait(&s.staged[w], number);
            work(begin, w, part % (PARTS / 2));
        }
    }
    if (threadIdx.x % WARP == 0) { stores_wait(); }
}

// Stores gate and up, and encodes and stores y.
__device__ __forceinline__ void encode(Shared &s, const Parameters &p, int worker) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const float scale = p.out.scale->scale;
    auto &staging = s.staging[worker];
    float largest = 0.0f;
    each_part<SWIGLU>(s, p, worker, [&](Corner begin, int w, int part) {
        const int down = part / 2 * PART_ROWS, half = part % 2;
        const uint8_t *gate = s.x[w][0][half] + down * FULL_ROW;
        const uint8_t *up = s.x[w][1][half] + down * FULL_ROW;
        const int m = begin.row + w * ROWS + down, n = begin.column + half * PART_COLUMNS;
        if (lane == 0) {
            tma_store<2>(p.x[0], gate, n, m);
            tma_store<2>(p.x[1], up, n, m);
            stores_commit();
        }
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < PART_ROWS / 16; i++) {
#pragma unroll
            for (int pair = 0; pair < PART_COLUMNS / 16; pair += 2) {
                uint32_t units[4], units_t[4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    uint32_t *codes = units + j * 2; // codes of two rows
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int at = offset_of_four(i * 16 + g * 2 + r, pair + j, t);
                        const uint2 gates = *reinterpret_cast<const uint2 *>(gate + at);
                        const uint2 ups = *reinterpret_cast<const uint2 *>(up + at);
                        const float values[4] = {swiglu(low_bf16(gates.x), low_bf16(ups.x)),
                                                 swiglu(high_bf16(gates.x), high_bf16(ups.x)),
                                                 swiglu(low_bf16(gates.y), low_bf16(ups.y)),
                                                 swiglu(high_bf16(gates.y), high_bf16(ups.y))};
#pragma unroll
                        for (float value : values) { largest = amax_of(largest, value); }
                        codes[r] = encode4<FP8_E4M3>(values, scale);
                    }
                    units_t[j * 2] = __byte_perm(codes[0], codes[1], 0x5140);
                    units_t[j * 2 + 1] = __byte_perm(codes[0], codes[1], 0x7362);
                }
                // row and column of WGMMA's fragment
                const int row = i * 16 + lane % 16, column = pair * 16 + lane;
                store_matrices<false>(staging.codes + row * HALF_ROW +
                                          ((pair + lane / 16) ^ row / 2 % 4) * 16,
                                      units);
                store_matrices<true>(
                    staging.codes_t + column * QUARTER_ROW + (i ^ column / 4 % 2) * 16, units_t);
            }
        }
        show_to_tma();
        __syncwarp();
        if (lane == 0) {
            if (p.out.rows.codes != NULL) { tma_store<4>(p.codes, staging.codes, n, m / 16); }
            if (p.out.columns.codes != NULL) {
                tma_store<5>(p.codes_t, staging.codes_t, m, n / 16);
            }
            stores_commit();
            stores_wait_read<1>(); // gate and up have been read
            barrier_arrive(&s.freed[w], true);
            stores_wait_read<0>();
        }
        __syncwarp();
    });
    raise_amax(p.out, largest);
}

// Stores 16 rows of a tile from shared memory. The first one is row `down` of warpgroup w's rows in
// shared memory, and row m of the result, from column `column` on.
__device__ __forceinline__ void store_strip(const Shared &s, const Parameters &p, int w, int down,
                                            int column, int m) {
#pragma unroll
    for (int i = 0; i < 2 * TILE / PART_COLUMNS; i++) {
        tma_store<2>(p.x[0], s.x[w][i / 2][i % 2] + down * FULL_ROW, column + i * PART_COLUMNS, m);
    }
    stores_commit();
}

// Stores the logits, and finds their rows' maxima and sums of exponentials. A lane has half of a
// row of the tile in registers.
__device__ __forceinline__ void sum_up(Shared &s, const Parameters &p, int worker) {
    enum { PIECES = TILE / VEC };
    const int lane = threadIdx.x % WARP, row = lane % STRIP_ROWS, half = lane / STRIP_ROWS;
    const float log2e = 1.4426950408889634f;
    each_part<MAX_SUMS>(s, p, worker, [&](Corner begin, int w, int part) {
        const int down = part * STRIP_ROWS, m = begin.row + w * ROWS + down;
        // the lane's first `count` columns are in the vocabulary
        const int count = p.V - begin.column - half * TILE;
        if (lane == 0) { store_strip(s, p, w, down, begin.column, m); }
        __syncwarp();
        uint4 pieces[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const uint8_t *from = s.x[w][half][i / 8] + (down + row) * FULL_ROW;
            pieces[i] = *reinterpret_cast<const uint4 *>(from + (i % 8 ^ row % 8) * 16);
        }
        __syncwarp();
        if (count < TILE) {
#pragma unroll
            for (int i = 0; i < PIECES; i++) { pieces[i] = cut_off(pieces[i], count - i * VEC); }
        }
        uint4 largest = pieces[0];
#pragma unroll
        for (int i = 1; i < PIECES; i++) {
            largest = {max_pair(largest.x, pieces[i].x), max_pair(largest.y, pieces[i].y),
                       max_pair(largest.z, pieces[i].z), max_pair(largest.w, pieces[i].w)};
        }
        const float max = max8(largest), shift = max * -log2e;
        float sums[VEC] = {};
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            // TMA has read the strip by now, so the wait is short
            if (i == PIECES / 2 && lane == 0) {
                stores_wait_read<0>();
                barrier_arrive(&s.freed[w], true);
            }
            const Floats8 x = unpack8(pieces[i]);
#pragma unroll
            for (int j = 0; j < VEC; j++) { sums[j] += exp2_fast(fmaf(x.v[j], log2e, shift)); }
        }
        MaxSum mine = {max, ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
                                ((sums[4] + sums[5]) + (sums[6] + sums[7]))};
        if (count <= 0) { mine = {-CUDART_INF_F, 0.0f}; }
        const MaxSum other = {__shfl_xor_sync(~0u, mine.max, STRIP_ROWS),
                              __shfl_xor_sync(~0u, mine.sum, STRIP_ROWS)};
        if (half == 0 && m + row < p.M) {
            p.max_sums[(int64_t)(begin.column / (2 * TILE)) * p.M + m + row] = combine(mine, other);
        }
    });
}

// Rotates queries and keys in shared memory, and stores the result. A row of the tile has 16 pairs
// of 16-byte vectors; the vectors of a pair are rotated together, and lie in the two halves of a
// head. A lane takes one pair, so a warp takes two rows at a time. Shared memory is read for eight
// lanes at a time. The last four of these lanes take their pair in the opposite order, so that the
// eight vectors lie in different banks.
__device__ __forceinline__ void rotate(Shared &s, const Parameters &p, int worker) {
    enum { PAIRS = TILE / VEC, AT_ONCE = WARP / PAIRS, TIMES = 4 };
    const Rotary &r = p.rotary;
    const int lane = threadIdx.x % WARP, row = lane / PAIRS, pair = lane % PAIRS;
    const int half = r.D / (2 * VEC), piece = pair + pair / half * half,
              rotated = (r.H + r.G) * r.D;
    const bool exchanged = lane % 8 >= 4;
    const int a = piece + (exchanged ? half : 0), b = piece + (exchanged ? 0 : half);
    const float *table = r.table + pair % half * VEC;
    each_part<ROTARY>(s, p, worker, [&](Corner begin, int w, int part) {
        const int down = part * STRIP_ROWS, m = begin.row + w * ROWS + down;
        const int last = begin.column + piece * VEC < rotated ? down + STRIP_ROWS : down;
        int t = (m + row) % r.T;
        auto at = [&](int i, int piece) {
            return reinterpret_cast<uint4 *>(s.x[w][piece / 16][piece / 8 % 2] + i * FULL_ROW +
                                             (piece % 8 ^ i % 8) * 16);
        };
#pragma unroll 1
        for (int i = down + row; i < last; i += TIMES * AT_ONCE) {
            Floats8 cosines[TIMES], sines[TIMES];
#pragma unroll
            // all loads are in flight before the first one is needed
            for (int k = 0; k < TIMES; k++) {
                cosines[k] = load_floats8(table + t * r.D, TYPE_F32, 0);
                sines[k] = load_floats8(table + t * r.D + r.D / 2, TYPE_F32, 0);
                t += AT_ONCE;
                while (t >= r.T) { t -= r.T; }
            }
#pragma unroll
            for (int k = 0; k < TIMES; k++) {
                uint4 *to_a = at(i + k * AT_ONCE, a), *to_b = at(i + k * AT_ONCE, b);
                Pairs x = {unpack8(*to_a), unpack8(*to_b)};
                turn<VEC>(x, cosines[k], sines[k], exchanged ? -1.0f : 1.0f);
                *to_a = pack8(x.a);
                *to_b = pack8(x.b);
            }
        }
        show_to_tma();
        __syncwarp();
        if (lane == 0) {
            store_strip(s, p, w, down, begin.column, m);
            stores_wait_read<0>();
            barrier_arrive(&s.freed[w], true);
        }
        __syncwarp();
    });
}

__device__ __forceinline__ void multiply(Shared &s, const Parameters &p, int w) {
    const int warp = threadIdx.x % GROUP / WARP, lane = threadIdx.x % WARP;
    const int g = lane / 4, t = lane % 4;
    const float scale = *p.scale_a * *p.scale_b;
    float sums[128];
    Stage<STAGES> stage = 0;
    auto step = [&](bool first) {
        auto &from = s.stages[stage.at];
        barrier_wait(&s.full[stage.at], stage.round);
        uint64_t a = wgmma_operand(from.a + w * ROWS * DEPTH), b = wgmma_operand(from.b);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 32; i++) { // the next 32 bytes of every row
            wgmma(sums, a + 2 * i, b + 2 * i, i > 0 || !first);
        }
        wgmma_commit();
        stage.advance(1);
    };
    // releases the stage in both blocks, which write into each other's stages
    auto release = [&](int at) {
        if (lane < 2) { barrier_arrive_in(&s.empty[at], lane); }
        __syncwarp();
    };
    int number = 0;
    for (int tile = blockIdx.x / 2; tile < p.tiles; tile += gridDim.x / 2, number++) {
        int last = stage.at;
        step(true);
        for (int k = DEPTH; k < p.K; k += DEPTH) {
            const int before = last;
            last = stage.at;
            step(false);
            wgmma_wait<1>();
            release(before);
        }
        wgmma_wait<0>();
        release(last);
        pin(sums);
        barrier_wait(&s.freed[w], number + 1);
#pragma unroll
        for (int j = 0; j < 2 * TILE / 16; j++) { // 16 columns; with SWIGLU of gate, then of up
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float *d = sums + j * 8 + r * 2;
                const int at = offset_of_four(warp * 16 + g * 2 + r, j % 4, t);
                *reinterpret_cast<uint2 *>(s.x[w][j / 8][j / 4 % 2] + at) = {
                    bf16_pair(d[0] * scale, d[1] * scale), bf16_pair(d[4] * scale, d[5] * scale)};
            }
        }
        show_to_tma();
        barrier_arrive(&s.staged[w], true);
    }
}

#endif

template <Epilogue EPILOGUE>
__global__ void __launch_bounds__(THREADS, 1)
    wide_matmul_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 2 * 2 * WARPS);
        }
        for (int w = 0; w < 2; w++) {
            barrier_init(&s.staged[w], GROUP);
            barrier_init(&s.freed[w], PARTS / 2);
        }
        barriers_ready();
    }
    __syncthreads();
    cluster_barrier();
    if (group == 0) {
        set_registers<OTHER_REGISTERS, false>();
        const int warp = threadIdx.x / WARP;
        if (warp > 0) {
            (EPILOGUE == SWIGLU ? encode : EPILOGUE == MAX_SUMS ? sum_up : rotate)(s, p, warp - 1);
        } else if (threadIdx.x == 0) {
            load<EPILOGUE>(s, p);
        }
        __syncwarp();
        cluster_barrier(); // until here the other block may write to this block's shared memory
    } else {
        set_registers<BUSY_REGISTERS, true>();
        multiply(s, p, group - 1);
        cluster_barrier();
    }
#endif
}

} // namespace

// ---- launchers ----------------------------------------------------------------------------------

namespace {

// columns: how many columns the result has or, with SWIGLU, y has.
template <Epilogue EPILOGUE>
void launch_wide(const Gpu *gpu, const Gemm &g, Parameters p, int columns) {
    p.a = map_like_rows(static_cast<const uint8_t *>(g.a), g.m, g.k, FULL_ROW, TILE);
    for (int i = 0; i < (EPILOGUE == SWIGLU ? 2 : 1); i++) {
        p.b[i] = map_like_columns(static_cast<const uint8_t *>(g.b) + (int64_t)i * columns * g.k,
                                  columns, g.k, FULL_ROW, TILE);
        p.x[i] = tensor_map(static_cast<Bf16 *>(g.d) + i * columns,
                            CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, FULL_ROW,
                            {{columns, 2, PART_COLUMNS},
                             {g.m, 2 * (int64_t)g.n, EPILOGUE == SWIGLU ? PART_ROWS : STRIP_ROWS}});
    }
    p.scale_a = g.scale_a;
    p.scale_b = g.scale_b;
    p.M = g.m;
    p.K = g.k;
    p.down = divide_up(g.m, 2 * TILE);
    p.across = divide_up(columns, EPILOGUE == SWIGLU ? TILE : 2 * TILE);
    p.tiles = p.down * p.across;

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
    auto kernel = wide_matmul_kernel<EPILOGUE>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)sizeof(Shared)));
    CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, p));
}

} // namespace

static void begin_wide(const char *name, Gpu *gpu, const Gemm &g) {
    gpu_family(gpu, g.family);
    if (!g.fast_accumulation) { die("%s: it accumulates fast alone", name); }
}

void gpu_matmul_swiglu(Gpu *gpu, Gemm g, Operand out) {
    const char *name = "matmul with SwiGLU";
    const int F = g.n / 2;
    Parameters p = {};
    begin_wide(name, gpu, g);
    if (g.n % 32 != 0) { die("%s: gate and up of %d columns; a multiple of 16 each", name, g.n); }
    if (out.type != FP8_E4M3) { die("%s: forward operands are E4M3", name); }
    check_fused_matmul(name, gpu, g, &out, F, {g.a, g.b, g.d, g.scale_a, g.scale_b});
    p.codes = map_like_rows(out.rows.codes, g.m, F, HALF_ROW, PART_ROWS);
    p.codes_t = map_like_columns(out.columns.codes, F, g.m, QUARTER_ROW, PART_COLUMNS);
    p.out = out;
    launch_wide<SWIGLU>(gpu, g, p, F);
}

void gpu_matmul_max_sums(Gpu *gpu, Gemm g, Scratch max_sums, int V) {
    const char *name = "matmul with rows' maxima";
    const int64_t floats = max_sums_floats(g.m, g.n);
    Parameters p = {};
    begin_wide(name, gpu, g);
    if (V < 1 || V > g.n) { die("%s: %d columns of %d", name, V, g.n); }
    check_fused_operands(name, gpu, g, TYPE_E4M3,
                         {g.a, g.b, g.d, g.scale_a, g.scale_b, max_sums.data});
    check_scratch(name, max_sums, floats);
    gemm_check_apart(&g, "maxima and sums", max_sums.data, floats * (int64_t)sizeof(float));
    p.max_sums = reinterpret_cast<MaxSum *>(max_sums.data);
    p.V = V;
    launch_wide<MAX_SUMS>(gpu, g, p, g.n);
}

void gpu_matmul_rope(Gpu *gpu, Gemm g, Rotary r) {
    const char *name = "matmul with RoPE";
    const int64_t M = (int64_t)r.B * r.T, N = ((int64_t)r.H + 2 * (int64_t)r.G) * r.D;
    Parameters p = {};
    begin_wide(name, gpu, g);
    if (!gpu_matmul_rotates(r.D)) { die("%s: heads of %d", name, r.D); }
    if (r.query_weight != NULL || r.key_weight != NULL) { die("%s: heads with a norm", name); }
    check_fused_operands(name, gpu, g, TYPE_E4M3, {g.a, g.b, g.d, g.scale_a, g.scale_b, r.table});
    if (r.T < 1 || r.H < 1 || r.G < 1 || M != g.m || N != g.n) {
        die("%s: %d x %d tokens, %d + %d heads of %d; not %d x %d", name, r.B, r.T, r.H, r.G, r.D,
            g.m, g.n);
    }
    p.rotary = r;
    launch_wide<ROTARY>(gpu, g, p, g.n);
}
