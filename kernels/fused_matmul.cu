// The two FP8 matmuls next to GPT-2's GELU, on Hopper, with GELU or its derivative in their
// epilogue. One kernel does the work of a matmul (gemm.h) and of a pass over its result
// (activation.cu). The scales of y and dx are known before their values are (SCALE_DELAYED).
//
//   forward    x = A B' rounded to BF16, which is written; GELU's output y = gelu(x + bias)
//   backward   dx = (A B' rounded to BF16) gelu'(x + bias), for the x that the forward pass
//              wrote; and the column sums of dx
//
// A [M,K] and B [N,K] are FP8 codes; y and dx are written as codes and transposed codes, and their
// amax is recorded. Values are rounded as the two separate kernels round them. So results differ
// only where the matmul's sums differ.
//
// A thread block computes consecutive tiles of 128 x 128, down a panel of 128 columns and then down
// the next. Of its three warpgroups the first only moves data, by TMA: one warp loads A, one loads
// B, and two store results. Each of the other two warpgroups computes 64 rows of every tile by
// WGMMA (sums in FP32 registers), applies the epilogue and encodes the results. While one warpgroup
// runs its epilogue, the other uses the tensor cores: they take turns, and A is loaded for both
// into one ring, in the order of their turns. The panel's part of B stays in shared memory from
// tile to tile, so that only A is loaded for each tile. (Shared memory delivers 128 bytes a cycle.
// A warpgroup with 64 x 128 sums takes 96 of them for its WGMMAs, which leaves too little for
// loading B again and again.)
//
// TMA permutes the rows of A and of B inside each block of 16, so that a thread gets 2 adjacent
// rows x 4 adjacent columns of the result. The four codes that a thread has of a row then make a
// 32-bit word, and its two codes of a column make the 16-bit unit that stmatrix stores. For g < 8,
// t < 4, lane 4 g + t, and p, h, e in {0, 1}:
//
//   WGMMA's row    16 i + 8 p + g          is row 16 i + 2 g + p of A
//   WGMMA's column 16 j + 8 h + 2 t + e    is row 16 j + 4 t + 2 h + e of B
#include "hopper.cuh"
#include "quantize.cuh"

#include <type_traits>

namespace {

enum {
    ROWS = MATMUL_ROWS, // rows of a tile that a warpgroup computes
    TILE = 128,
    DEPTH = 128, // FP8 values of K in a step; a row of them takes DEPTH bytes in shared memory
    THREADS = 3 * GROUP,
    A_STAGES = 8, // shared by both computing warpgroups; enough for 2048 cycles of WGMMAs
    B_STAGES = 6,
    BLOCKS = TILE / 16, // blocks of 16 columns in a tile
    LOADING_REGISTERS = 40,
    COMPUTING_REGISTERS = 232
};

// Shared memory for a warpgroup's part of a tile, between registers and global memory.
struct Staging {
    uint8_t x[2][ROWS * FULL_ROW]; // BF16, in two halves of 64 columns
    uint8_t codes[ROWS * FULL_ROW];
    uint8_t codes_t[TILE * HALF_ROW];
};

struct Shared {
    uint8_t b[B_STAGES][TILE * DEPTH];
    uint8_t a[A_STAGES][ROWS * DEPTH];
    Staging staging[2];
    Barrier a_full[A_STAGES], a_empty[A_STAGES], b_full[B_STAGES], b_empty[B_STAGES];
    Barrier x_full[2], staged[2], stored[2];
};
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");
static_assert(registers_suffice(LOADING_REGISTERS, COMPUTING_REGISTERS), "a block's registers");
static_assert(B_STAGES * DEPTH >= GELU_MATMUL_MAX_K, "the panel of B that stays");

struct Parameters {
    CUtensorMap a, b, x, codes, codes_t;
    const float *scale_a, *scale_b;
    const Bf16 *bias;
    float *partials; // [M / 64, rounded up][N]: column sums of a warpgroup's rows
    Operand out;
    int M, N, K;
    bool writes_codes, writes_codes_t;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ---- the kernel ---------------------------------------------------------------------------------

// The tile that a thread block is computing. A block computes consecutive tiles.
struct Work {
    int M, steps;    // a tile's matmul is computed in steps, each over DEPTH values of K
    int row, column; // where this tile begins
    int tiles_left;
    int number, panel; // how many tiles, and panels, this block has finished
    __device__ Work(const Parameters &p) {
        int down = (p.M + TILE - 1) / TILE;
        int64_t tiles = (int64_t)down * ((p.N + TILE - 1) / TILE);
        int first = (int)(tiles * blockIdx.x / gridDim.x);
        M = p.M;
        steps = (p.K + 2 * DEPTH - 1) / (2 * DEPTH) * 2; // an even number; A and B are 0 beyond K
        row = first % down * TILE;
        column = first / down * TILE;
        tiles_left = (int)(tiles * (blockIdx.x + 1) / gridDim.x) - first;
        number = panel = 0;
    }
    __device__ void next(void) {
        tiles_left--;
        number++;
        row += TILE;
        if (row >= M) {
            row = 0;
            column += TILE;
            panel++;
        }
    }
    // Returns whether this tile is the block's last one in its panel.
    __device__ bool ends_panel(void) const {
        return tiles_left == 1 || row + TILE >= M;
    }
    // Returns how many stages of B the block has used before this tile.
    __device__ int b_before(void) const {
        return panel * B_STAGES;
    }
};

// Loads A in warp 0 or B in warp 1, in the order of their use. One lane of each warp runs this
// function.
__device__ __forceinline__ void load(Shared &s, const Parameters &p, int warp) {
    Stage<A_STAGES> a = 0;
    for (Work work(p); warp == 0 && work.tiles_left > 0; work.next()) {
        for (int i = 0; i < 2 * work.steps; i++, a.advance(1)) {
            int w = i >= work.steps, k = i - w * work.steps;
            barrier_wait(&s.a_empty[a.at], a.round + 1);
            barrier_expect(&s.a_full[a.at], ROWS * DEPTH);
            tma_load<4>(s.a[a.at], p.a, &s.a_full[a.at], k * DEPTH, (work.row + w * ROWS) / 16);
        }
    }
    for (Work work(p); warp == 1 && work.tiles_left > 0; work.next()) {
        Stage<B_STAGES> b = work.b_before();
        if (work.number > 0 && work.row > 0) { continue; } // the panel is already in shared memory
        for (int k = 0; k < work.steps; k++, b.advance(1)) {
            barrier_wait(&s.b_empty[b.at], b.round + 1);
            barrier_expect(&s.b_full[b.at], TILE * DEPTH);
            tma_load<5>(s.b[b.at], p.b, &s.b_full[b.at], k * DEPTH, work.column / 16);
        }
    }
}

// Stores the tiles that warpgroup w has staged, and loads x for the next tile. One lane runs this
// function.
template <bool BACKWARD>
__device__ __forceinline__ void store(Shared &s, const Parameters &p, int w) {
    Staging &staging = s.staging[w];
    auto fetch_x = [&](const Work &tile) {
        if (!BACKWARD || tile.tiles_left == 0) { return; }
        barrier_expect(&s.x_full[w], sizeof(staging.x));
        for (int half = 0; half < 2; half++) {
            tma_load<2>(staging.x[half], p.x, &s.x_full[w], tile.column + half * 64,
                        tile.row + w * ROWS);
        }
    };
    Work tile(p);
    fetch_x(tile);
    while (tile.tiles_left > 0) {
        const int m = tile.row + w * ROWS, n = tile.column;
        barrier_wait(&s.staged[w], tile.number);
        tile.next();
        fetch_x(tile);
        if (m < p.M) {
            for (int half = 0; half < 2 && !BACKWARD; half++) {
                tma_store<2>(p.x, staging.x[half], n + half * 64, m);
            }
            if (p.writes_codes) { tma_store<4>(p.codes, staging.codes, n, m / 16); }
            if (p.writes_codes_t) { tma_store<5>(p.codes_t, staging.codes_t, m, n / 16); }
            stores_commit();
            stores_wait_read<0>();
        }
        barrier_arrive(&s.stored[w], true);
    }
    stores_wait();
}

// Computes warpgroup w's half of every tile. TYPE is the format of A, and of the codes that are
// written. With SPLIT, tensor cores sum over only DEPTH values of K at a time, because they keep
// only about 14 bits of a sum. These sums are added up in FP32.
template <Fp8Type TYPE, bool BACKWARD, bool SPLIT>
__device__ __forceinline__ void compute(Shared &s, const Parameters &p, int w) {
    const int warp = threadIdx.x % GROUP / WARP, lane = threadIdx.x % WARP;
    const int g = lane / 4, t = lane % 4;
    const float matmul_scale = *p.scale_a * *p.scale_b, scale = p.out.scale->scale;
    Staging &staging = s.staging[w];
    float largest = 0.0f;

    Work tile(p);
    while (tile.tiles_left > 0) {
        const int m = tile.row + w * ROWS, n = tile.column, number = tile.number;
        const int last = tile.steps - 1;
        const bool releases_b = tile.ends_panel();
        const bool waits = w == 1 || number > 0;
        const bool passes = w == 0 || tile.tiles_left > 1;
        Stage<A_STAGES> a_at = (number * 2 + w) * tile.steps;
        Stage<A_STAGES> a_done = a_at;
        Stage<B_STAGES> b_at = tile.b_before(), b_done = b_at;
        tile.next();

        auto arrived = [&] { // waits for the operands of the next step
            barrier_wait(&s.b_full[b_at.at], b_at.round);
            barrier_wait(&s.a_full[a_at.at], a_at.round);
        };
        auto multiply = [&](float(&d)[64], int k) {
            uint64_t a = wgmma_operand(s.a[a_at.at]), b = wgmma_operand(s.b[b_at.at]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < DEPTH / 32; i++) { // the next 32 bytes of every row
                wgmma<TYPE>(d, a + 2 * i, b + 2 * i, i > 0 || (!SPLIT && k > 0));
            }
            wgmma_commit();
            a_at.advance(1);
            b_at.advance(1);
        };
        auto release = [&] { // frees the oldest used stage of A, and of B at a panel's end
            barrier_arrive(&s.a_empty[a_done.at], lane == 0);
            barrier_arrive(&s.b_empty[b_done.at], lane == 0 && releases_b);
            a_done.advance(1);
            b_done.advance(1);
        };
        float sums[64];
        auto add = [&](float(&d)[64]) {
            pin(d);
#pragma unroll
            for (int i = 0; i < 64; i++) { sums[i] += d[i]; }
            pin(sums);
        };
        // Computes an even number of steps; `ends` says that they are the tile's last ones. A
        // step's sums are added up while the WGMMAs of the next step run. ptxas allows that only in
        // unrolled code, so `count` is a constant: 6 steps for GPT-2's 768 channels.
        auto split = [&](auto count, bool ends) {
            constexpr int STEPS = decltype(count)::value;
            float first[64], second[64];
            arrived();
            multiply(first, 0);
#pragma unroll
            for (int k = 1; k < STEPS; k += 2) {
                arrived();
                multiply(second, k);
                if (k + 1 == STEPS && ends && passes) { turn_pass(w); }
                wgmma_wait<1>();
                release();
                add(first);
                if (k + 1 < STEPS) {
                    arrived();
                    multiply(first, k + 1);
                    wgmma_wait<1>();
                } else {
                    wgmma_wait<0>();
                }
                release();
                add(second);
            }
        };
        uint2 bias[BLOCKS] = {};
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            const Bf16 *from = p.bias + n + j * 16 + t * 4;
            if (n + j * 16 < p.N) { bias[j] = __ldg(reinterpret_cast<const uint2 *>(from)); }
        }
#pragma unroll
        for (int i = 0; SPLIT && i < 64; i++) { sums[i] = 0.0f; }
        if (waits) { turn_wait(w); }
        if (SPLIT && tile.steps == B_STAGES) {
            split(std::integral_constant<int, B_STAGES>(), true);
        } else if (SPLIT) {
            for (int k = 0; k <= last; k += 2) {
                split(std::integral_constant<int, 2>(), k + 1 == last);
            }
        } else {
            arrived();
            for (int k = 0; k <= last; k++) {
                multiply(sums, k);
                if (k < last) { arrived(); } // waits while the WGMMAs of step k run
                if (k == last && passes) { turn_pass(w); }
                if (k > 0) {
                    wgmma_wait<1>();
                    release();
                }
            }
        }

        // A thread has 2 rows x 4 columns of each block of 16 columns. x_at(j, i) is the address in
        // shared memory of row i of the thread's part of block j.
        auto x_at = [&](int j, int i) {
            int at = offset_of_four(warp * 16 + g * 2 + i, j % 4, t);
            return reinterpret_cast<uint2 *>(staging.x[j / 4] + at);
        };
        uint2 before[BLOCKS][2]; // GELU's input without the bias
        auto read_x = [&](int pair) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                before[pair + i / 2][i % 2] = *x_at(pair + i / 2, i % 2);
            }
        };
        float columns[BLOCKS * 4];
        if (BACKWARD) {
            barrier_wait(&s.x_full[w], number);
            read_x(0);
            read_x(2);
        }
        // waits until the previous tile has been stored
        barrier_wait(&s.stored[w], number + 1);
        if (!SPLIT) {
            wgmma_wait<0>();
            release();
            pin(sums);
        }
        if (m + warp * 16 < p.M) {
#pragma unroll
            for (int pair = 0; pair < BLOCKS; pair += 2) {
                uint32_t units[4];
#pragma unroll
                for (int j = pair; j < pair + 2; j++) {
                    const float biases[4] = {low_bf16(bias[j].x), high_bf16(bias[j].x),
                                             low_bf16(bias[j].y), high_bf16(bias[j].y)};
                    uint32_t codes[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float *d = sums + j * 8 + i * 2;
                        const int wgmma_row = warp * 16 + i * 8 + g;
                        uint2 rounded = {bf16_pair(d[0] * matmul_scale, d[1] * matmul_scale),
                                         bf16_pair(d[4] * matmul_scale, d[5] * matmul_scale)};
                        if (!BACKWARD) { before[j][i] = *x_at(j, i) = rounded; }
                        const float in[4] = {low_bf16(before[j][i].x), high_bf16(before[j][i].x),
                                             low_bf16(before[j][i].y), high_bf16(before[j][i].y)};
                        const float result[4] = {low_bf16(rounded.x), high_bf16(rounded.x),
                                                 low_bf16(rounded.y), high_bf16(rounded.y)};
                        float values[4];
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            float x = in[k] + biases[k];
                            values[k] = BACKWARD ? result[k] * gelu_slope(x) : gelu(x);
                            largest = amax_of(largest, values[k]);
                            float &sum = columns[j * 4 + k];
                            sum = i > 0 ? sum + values[k] : values[k];
                        }
                        codes[i] = encode4<TYPE>(values, scale);
                        *reinterpret_cast<uint32_t *>(staging.codes + wgmma_row * FULL_ROW +
                                                      (j ^ g) * 16 + t * 4) = codes[i];
                    }
                    units[(j - pair) * 2] = __byte_perm(codes[0], codes[1], 0x5140);
                    units[(j - pair) * 2 + 1] = __byte_perm(codes[0], codes[1], 0x7362);
                }
                const int wgmma_column = pair * 16 + lane;
                store_matrices<true>(staging.codes_t + wgmma_column * HALF_ROW +
                                         (warp ^ wgmma_column / 2 % 4) * 16,
                                     units);
                // x is not read earlier, because ptxas would then begin all blocks of 16 columns
                // before it ends one. The MUFU (the unit for exp2 and reciprocals), which takes
                // longest, would be idle at first.
                if (BACKWARD && pair + 4 < BLOCKS) { read_x(pair + 4); }
            }
        } else { // rows beyond M
#pragma unroll
            for (float &sum : columns) { sum = 0.0f; }
        }
        float totals[4] = {}; // four sums, so that an addition does not wait for the one before it
        const int column = threadIdx.x % GROUP;
        if (BACKWARD) { // each thread has sums over 2 rows; they are added up in the memory of x
            float(*rows)[TILE] = reinterpret_cast<float(*)[TILE]>(staging.x);
            const int row = g / 4 * 16 + warp * 4 + g % 4;
            __syncwarp();
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                *reinterpret_cast<float4 *>(&rows[row][(j ^ g % 2) * 16 + t * 4]) = make_float4(
                    columns[j * 4], columns[j * 4 + 1], columns[j * 4 + 2], columns[j * 4 + 3]);
            }
            group_barrier(w, GROUP);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) { totals[i % 4] += rows[i][column ^ i % 2 * 16]; }
        }
        show_to_tma();
        __syncwarp();
        barrier_arrive(&s.staged[w], lane == 0);
        if (BACKWARD && m < p.M && n + column < p.N) {
            p.partials[(int64_t)(m / ROWS) * p.N + n + column] = (totals[0] + totals[1]) +
                                                                 (totals[2] + totals[3]);
        }
    }
    raise_amax(p.out, largest);
}

#endif

template <Fp8Type TYPE, bool BACKWARD, bool SPLIT>
__global__ void __launch_bounds__(THREADS, 1)
    gelu_matmul_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < B_STAGES; i++) {
            barrier_init(&s.b_full[i], 1);
            barrier_init(&s.b_empty[i], 2 * WARPS);
        }
        for (int i = 0; i < A_STAGES; i++) {
            barrier_init(&s.a_full[i], 1);
            barrier_init(&s.a_empty[i], WARPS);
        }
        for (int w = 0; w < 2; w++) {
            barrier_init(&s.x_full[w], 1);
            barrier_init(&s.staged[w], WARPS);
            barrier_init(&s.stored[w], 1);
        }
        barriers_ready();
    }
    __syncthreads();
    if (group == 0) {
        set_registers<LOADING_REGISTERS, false>();
        const int warp = threadIdx.x / WARP;
        if (threadIdx.x % WARP == 0 && warp < 2) { load(s, p, warp); }
        if (threadIdx.x % WARP == 0 && warp >= 2) { store<BACKWARD>(s, p, warp - 2); }
    } else {
        set_registers<COMPUTING_REGISTERS, true>();
        compute<TYPE, BACKWARD, SPLIT>(s, p, group - 1);
    }
#endif
}

// ---- launchers ----------------------------------------------------------------------------------

template <Fp8Type TYPE, bool BACKWARD>
void launch_matmul(const Gpu *gpu, const Gemm &g, const Parameters &p) {
    auto kernel = g.fast_accumulation ? gelu_matmul_kernel<TYPE, BACKWARD, false>
                                      : gelu_matmul_kernel<TYPE, BACKWARD, true>;
    int64_t tiles = (int64_t)divide_up(p.M, TILE) * divide_up(p.N, TILE);
    int blocks = (int)min(tiles, (int64_t)gpu->sms);
    launch_with_shared(kernel, blocks, THREADS, sizeof(Shared), gpu->stream, p);
}

// Returns the parameters that the forward and the backward kernel share. x is GELU's input without
// the bias.
Parameters parameters(const char *name, const Gpu *gpu, const Gemm &g, Bf16 *x, Operand out) {
    if (g.k > GELU_MATMUL_MAX_K) { die("%s: K is %d, more than %d", name, g.k, GELU_MATMUL_MAX_K); }
    check_fused_matmul(name, gpu, g, &out, g.n, {g.a, g.b, x, g.bias, g.scale_a, g.scale_b});
    Parameters p = {};
    p.a = map_like_rows(static_cast<const uint8_t *>(g.a), g.m, g.k, FULL_ROW, ROWS);
    p.b = map_like_columns(static_cast<const uint8_t *>(g.b), g.n, g.k, FULL_ROW, TILE);
    p.x = tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, FULL_ROW,
                     {{g.n, 2, FULL_ROW / 2}, {g.m, 2 * (int64_t)g.n, ROWS}});
    p.codes = map_like_rows(out.rows.codes, g.m, g.n, FULL_ROW, ROWS);
    p.codes_t = map_like_columns(out.columns.codes, g.n, g.m, HALF_ROW, TILE);
    p.writes_codes = out.rows.codes != NULL;
    p.writes_codes_t = out.columns.codes != NULL;
    p.scale_a = g.scale_a;
    p.scale_b = g.scale_b;
    p.bias = static_cast<const Bf16 *>(g.bias);
    p.out = out;
    p.M = g.m;
    p.N = g.n;
    p.K = g.k;
    return p;
}

} // namespace

bool gpu_has_fused_matmuls(const Gpu *gpu) {
    return runs_on_hopper(gpu, gelu_matmul_kernel<FP8_E4M3, false, false>);
}

void gpu_matmul_gelu(Gpu *gpu, Gemm g, Operand out) {
    gpu_family(gpu, g.family);
    const char *name = "matmul with GELU";
    if (out.type != FP8_E4M3) { die("%s: forward operands are E4M3", name); }
    launch_matmul<FP8_E4M3, false>(gpu, g, parameters(name, gpu, g, static_cast<Bf16 *>(g.d), out));
}

void gpu_matmul_gelu_backward(Gpu *gpu, Gemm g, Operand dx, Gradient column_sums, Scratch scratch) {
    gpu_family(gpu, g.family);
    const char *name = "matmul with GELU backward";
    int parts = divide_up(g.m, ROWS);
    check_scratch(name, scratch, (int64_t)parts * g.n);
    Parameters p = parameters(name, gpu, g, static_cast<Bf16 *>(g.aux), dx);
    p.partials = scratch.data;
    (dx.type == FP8_E4M3 ? launch_matmul<FP8_E4M3, true> : launch_matmul<FP8_E5M2, true>)(gpu, g,
                                                                                          p);
    sum_partials({{column_sums}, scratch.data, parts, g.n}, gpu->stream);
}
