// The backward pass of causal attention for heads of 64 on Hopper: one kernel, whose sums have a
// fixed order.
//
//   S = QK' / 8    P = exp(S - lse)    dP = dO V'    dS = P (dP - rowsum(dO O))
//   dV = P' dO     dK = dS' Q / 8      dQ = dS K / 8
//
// P and dS are rounded to BF16 for their products; all else is FP32.
//
// A cluster of two blocks computes whole heads, one after another: while both work on one head,
// half as many heads' sums, queries and dO are in use, and the L2 cache has room for them. A head's
// keys are cut into tiles of 128, which the blocks take in turn, and which stay while the queries
// from the diagonal on pass in pairs of tiles of 64. Each of two warpgroups has 64 of the keys: it
// computes S' and dP' by WGMMA, whose results are P' and dS' in the layout of operands in
// registers, and sums dV and dK in registers. For dQ both write dS' to shared memory; when a pair
// is complete, each warpgroup multiplies one of its two tiles by the 128 keys. dQ is summed over
// the tiles of keys in memory, in the order of the keys, upwards in one head and downwards in the
// next: 16 rows by one warp of each block, which writes them at the first tile, has the memory add
// to them, and at the last tile reads them and writes the result. These additions to a tile of dQ
// alternate between the blocks, for upwards tile j is block (j % 2)'s, and downwards the other
// one's. Block 0 begins each head, and needs no result of block 1 for it; upwards it has more of
// the work, downwards less, so that block 1 follows it without waiting.
//
// The first warpgroup's first warp loads tiles by TMA; its others compute the rows' statistics of
// the next head. What is left when every cluster has had as many whole heads as all can have is
// shared among all blocks at tiles of keys: sums of such a head lie with several blocks, and a
// second kernel adds them up.
//
// Results are written in BF16, or, by a given scale, as the FP8 codes that a pass over these BF16
// values would make, with its amax and column sums.
#include "attention.h"
#include "hopper.cuh"
#include "quantize.cuh"

#include <math_constants.h>
#include <type_traits>

namespace {

enum {
    SIZE = 64, // of a head: FULL_ROW bytes
    KEYS = 128,
    QUERIES = 64,
    STAGES = 4,
    HELPERS = WARPS - 1,
    THREADS = 3 * GROUP,
    MOST_T = 2048,
    MOST_TILES = MOST_T / KEYS, // of keys, or pairs of tiles of queries
    MOST_BLOCKS = 160,
    ROWS = 16,          // of a warp in a tile
    SUMS = ROWS * SIZE, // of these, in dQ
    TILE_SUMS = QUERIES * SIZE,
    COMPUTING_REGISTERS = 240,
    LOADING_REGISTERS = 24 // a thread's
};

// A tile of codes between a warpgroup's registers and global memory: see write_codes.
struct Staging {
    uint8_t codes[2][QUERIES * HALF_ROW]; // as they are, and transposed
    float sums[WARPS][SIZE];              // of the warps' rows
};

struct Shared {
    struct {
        uint8_t k[KEYS * FULL_ROW], v[KEYS * FULL_ROW];
    } keys[2];
    struct {
        uint8_t q[QUERIES * FULL_ROW], d_out[QUERIES * FULL_ROW];
    } stages[STAGES];
    uint8_t ds[2][KEYS * FULL_ROW]; // of a pair's tiles: [keys][queries]
    // [warpgroup][warp][dV, dK], or a part of dQ; or a warpgroup's Staging
    uint8_t out[2][WARPS][2][ROWS * FULL_ROW];
    float2 lse[2][MOST_T / 2], delta[2][MOST_T / 2]; // of a piece: -lse / log 2, -rowsum(dO O)
    Barrier full[STAGES], empty[STAGES], keys_full[2], keys_empty[2];
    Barrier ds_full[2], ds_empty[2];
    Barrier rows_full[2][2 * MOST_TILES], rows_empty[2];
    Barrier added[MOST_TILES][2][WARPS]; // the other block, to the rows of [pair][warpgroup][warp]
    float scale;                         // of codes
    uint32_t range[2][WARPS];            // the bits of each warp's values' amax
};
static_assert(sizeof(Staging) <= sizeof(Shared::out) / 2, "a warpgroup's codes");
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");
static_assert(registers_suffice(LOADING_REGISTERS, COMPUTING_REGISTERS), "a block's registers");

struct Parameters {
    CUtensorMap q, kv, d_out, d_kv; // boxes of 64, 128, 64 and 16 rows
    Tensor d_qkv;
    const Bf16 *dout, *out;
    const float *lse;
    float *sums;     // [number][T, whole tiles of 128][64], in an order of its own; see Work
    float *partials; // [sequence][tile of 64 rows][N]: column sums, where codes are written
    int T, H, M, N;  // M, N: of the packed buffer
    int tiles;       // of a head's keys
    int blocks;
    int whole; // heads of every cluster
    // The other heads' tiles of keys, counted through: where each block's part begins.
    uint16_t cuts[MOST_BLOCKS + 1];
};

// Sums of dQ: of the heads of cluster `number`, or a part of another.
__device__ __forceinline__ float4 *sums_of(const Parameters &p, int number) {
    return reinterpret_cast<float4 *>(p.sums) + number * 2ll * p.tiles * (TILE_SUMS / 4);
}

// The number of a block's first or second part of such a head.
__device__ __forceinline__ int number_of(const Parameters &p, int block, bool second) {
    return p.blocks / 2 + block * 2 + second;
}

__device__ __forceinline__ int other_head(const Parameters &p, int other) {
    return p.whole * (p.blocks / 2) + other;
}

// Where a warpgroup's thread has its first four sums of a tile of dQ, after where the head has its
// sums; the next are WARP further.
__device__ __forceinline__ int sums_at(int tile, int thread) {
    return tile * (TILE_SUMS / 4) + thread / WARP * (SUMS / 4) + thread % WARP;
}

// Adds sums there to a thread's of a tile.
__device__ __forceinline__ void add_sums(float (&dq)[SUMS / WARP], const float4 *from) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float4 sum = __ldcg(from + i * WARP);
        dq[i * 4] += sum.x;
        dq[i * 4 + 1] += sum.y;
        dq[i * 4 + 2] += sum.z;
        dq[i * 4 + 3] += sum.w;
    }
}

// x, which the compiler does not know to be the same each time: it would keep what follows from it
// in registers.
__device__ __forceinline__ int hide(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// What the kernels write: BF16, or codes.
enum Form { BF16, CODES_E4M3, CODES_E5M2 };

// A tile of 64 rows of the result: of a head's dQ, dK or dV, which `part` numbers.
struct Tile {
    int head, part, number;
};

// Writes a tile of dQ in BF16; a thread has two rows and twice two columns of every 16.
__device__ __forceinline__ void write_bf16(const Parameters &p, Tile tile,
                                           const float (&dq)[SUMS / WARP]) {
    const int thread = threadIdx.x % GROUP, lane = thread % WARP;
    const int row = tile.number * QUERIES + thread / WARP * ROWS + lane / 4;
    const int64_t token = (int64_t)(tile.head / p.H) * p.T + row;
    Bf16 *to = p.d_qkv.bf16 + token * p.N + tile.head % p.H * SIZE + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++, to += 8 * p.N) {
        if (row + r * 8 >= p.T) { continue; }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            __stcs(reinterpret_cast<uint32_t *>(to + i * 8), // the first to leave the cache
                   bf16_pair(dq[i * 4 + r * 2] * 0.125f, dq[i * 4 + r * 2 + 1] * 0.125f));
        }
    }
}

// The sums of a warp's 16 rows: of columns 2 lane and 2 lane + 1. pairs[2 i + r] of lane 4 g + t:
// columns 8 i + 2 t and the next of row g + 8 r. At each step a lane keeps half of its columns.
__device__ __forceinline__ float2 sum_rows(const uint32_t (&pairs)[16]) {
    float sums[16];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sums[2 * i] = low_bf16(pairs[2 * i]) + low_bf16(pairs[2 * i + 1]);
        sums[2 * i + 1] = high_bf16(pairs[2 * i]) + high_bf16(pairs[2 * i + 1]);
    }
    auto halve = [&](auto left) {
        constexpr int LEFT = decltype(left)::value;
        const bool upper = threadIdx.x & (2 * LEFT);
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            const float a = sums[i], b = sums[i + LEFT];
            sums[i] = (upper ? b : a) + __shfl_xor_sync(~0u, upper ? a : b, 2 * LEFT);
        }
    };
    halve(std::integral_constant<int, 8>());
    halve(std::integral_constant<int, 4>());
    halve(std::integral_constant<int, 2>());
    return make_float2(sums[0], sums[1]);
}

// Writes a tile, rounded to BF16, as codes, and its column sums; the warpgroup has it, still to be
// multiplied by `factor`, as after a WGMMA. Nobody uses the staging, also after this. Returns the
// bits of the warp's amax.
//
// A word of four codes is of columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of 16, or of such rows of a
// column; the 16 bytes of four words are put into their order when they are read.
template <Form FORM>
__device__ __forceinline__ uint32_t write_codes(const Parameters &p, Staging &staging, int group,
                                                float scale, Tile tile, float factor,
                                                const float (&x)[SUMS / WARP]) {
    constexpr Fp8Type TYPE = FORM == CODES_E4M3 ? FP8_E4M3 : FP8_E5M2;
    const int thread = hide(threadIdx.x % GROUP), warp = thread / WARP, lane = thread % WARP;
    const int g = lane / 4, t = lane % 4;
    const bool odd = g % 2;
    auto word = [&](int form, int line, int piece, int i) { // of a line's 16 bytes
        const int at = line * HALF_ROW + (piece ^ line / 2 % 4) * 16 + i * 4;
        return reinterpret_cast<uint32_t *>(staging.codes[form] + at);
    };
    uint32_t pairs[16], range = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) { pairs[i] = bf16_pair(x[2 * i] * factor, x[2 * i + 1] * factor); }
#pragma unroll
    for (int k = 0; k < 4; k++) { // 16 columns
        uint32_t codes[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t a = pairs[4 * k + r], b = pairs[4 * k + 2 + r];
            const float values[4] = {low_bf16(a), high_bf16(a), low_bf16(b), high_bf16(b)};
            codes[r] = encode4<TYPE>(values, scale);
            *word(0, warp * ROWS + r * 8 + g, k, t) = codes[r];
        }
        range = __vmaxu2(range, range_of_pairs(pairs[4 * k], pairs[4 * k + 1], pairs[4 * k + 2],
                                               pairs[4 * k + 3]));
        // of the lanes of rows g and g + 1, one keeps the even columns, one the odd ones
        const uint32_t kept = __byte_perm(codes[0], codes[1], odd ? 0x7351 : 0x6240);
        const uint32_t given = __byte_perm(codes[0], codes[1], odd ? 0x6240 : 0x7351);
        const uint32_t other = __shfl_xor_sync(~0u, given, 4);
        const int column = k * 16 + t * 2 + odd;
        *word(1, column, warp, g / 2) = __byte_perm(kept, other, odd ? 0x1504 : 0x5140);
        *word(1, column + 8, warp, g / 2) = __byte_perm(kept, other, odd ? 0x3726 : 0x7362);
    }
    reinterpret_cast<float2 *>(staging.sums[warp])[lane] = sum_rows(pairs);
    group_barrier(group, GROUP);
    const int b = tile.head / p.H, first_row = tile.number * QUERIES;
    const int first_column = (tile.part * p.H + tile.head % p.H) * SIZE;
#pragma unroll
    for (int form = 0; form < 2; form++) {
        uint8_t *to = form == 0 ? p.d_qkv.fp8 : p.d_qkv.fp8_t;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int line = i * (QUERIES / 2) + thread / 4, piece = thread % 4;
            const int row = first_row + (form == 0 ? line : piece * 16);
            const int64_t token = (int64_t)b * p.T + row;
            const int64_t column = first_column + (form == 0 ? piece * 16 : line);
            const uint4 x = *reinterpret_cast<const uint4 *>(word(form, line, piece, 0));
            if (to == nullptr || row >= p.T) { continue; } // T is a multiple of 16
            const int64_t at = form == 0 ? token * p.N + column : column * p.M + token;
            __stcs(reinterpret_cast<uint4 *>(to + at),
                   uint4{__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410),
                         __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632)});
        }
    }
    if (thread < SIZE) {
        const auto &sums = staging.sums;
        p.partials[(b * 2ll * p.tiles + tile.number) * p.N + first_column + thread] =
            (sums[0][thread] + sums[1][thread]) + (sums[2][thread] + sums[3][thread]);
    }
    group_barrier(group, GROUP);
    return __reduce_max_sync(~0u, max(range << 16, range & 0xffff0000u));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ---- the kernel ---------------------------------------------------------------------------------

// Piece `number` of a block's work: a head's tiles of keys from first, step() apart, while has().
struct Work {
    int head, first, begin, end; // the sums are of the tiles from begin to before end
    bool together, down;         // with the other block; downwards
    __device__ Work(const Parameters &p, int number) {
        together = number < p.whole;
        down = together && number % 2 == 1;
        if (together) {
            head = number * (p.blocks / 2) + blockIdx.x / 2;
            begin = 0;
            end = p.tiles;
            first = (number + blockIdx.x) % 2;
            if (down) { first = end - 1 - (end - 1 - first) % 2; }
        } else { // up to two pieces
            const int other = p.cuts[blockIdx.x] / p.tiles + number - p.whole;
            head = other_head(p, other);
            begin = max(0, p.cuts[blockIdx.x] - other * p.tiles);
            end = min(p.tiles, p.cuts[blockIdx.x + 1] - other * p.tiles);
            first = begin;
        }
    }
    __device__ bool none(void) const { // the work is done
        return end <= begin;
    }
    __device__ bool has(int j) const {
        return (unsigned)j < (unsigned)end;
    }
    __device__ int step(void) const {
        return !together ? 1 : down ? -2 : 2;
    }
};

// One lane loads the tiles in the order of their use.
__device__ __forceinline__ void load(Shared &s, const Parameters &p) {
    Stage<STAGES> stage = 0;
    int blocks = 0; // of keys
    for (int number = 0;; number++) {
        const Work work(p, number);
        if (work.none()) { return; }
        const int b = work.head / p.H, h = work.head % p.H;
        for (int j = work.first; work.has(j); j += work.step(), blocks++) {
            auto &keys = s.keys[blocks % 2];
            Barrier *keys_full = &s.keys_full[blocks % 2];
            barrier_wait(&s.keys_empty[blocks % 2], blocks / 2 + 1);
            barrier_expect(keys_full, sizeof(keys));
            tma_load_at(keys.k, p.kv, keys_full, (p.H + h) * SIZE, j * KEYS, b, LAST);
            tma_load_at(keys.v, p.kv, keys_full, (2 * p.H + h) * SIZE, j * KEYS, b, LAST);
            for (int i = 2 * j; i < 2 * p.tiles; i++, stage.advance(1)) {
                auto &to = s.stages[stage.at];
                Barrier *full = &s.full[stage.at];
                barrier_wait(&s.empty[stage.at], stage.round + 1);
                barrier_expect(full, sizeof(to));
                const Use use = (work.down ? 0 : i / 2) == j ? LAST : AGAIN;
                tma_load_at(to.q, p.q, full, h * SIZE, i * QUERIES, b, use);
                tma_load_at(to.d_out, p.d_out, full, h * SIZE, i * QUERIES, b, use);
            }
        }
    }
}

// One of several warps computes the statistics of its share of the piece's tiles of queries, for
// both blocks if they work on it together: a row by 8 lanes. Rows beyond T get such that P and dS
// are 0. UNROLL: as many rows' loads at a time as the warp has registers for.
template <int UNROLL>
__device__ __forceinline__ void summarise(Shared &s, const Parameters &p, const Work &work,
                                          int number, int warp, int warps) {
    const int lane = threadIdx.x % WARP, at = number % 2;
    float *lse = reinterpret_cast<float *>(s.lse[at]),
          *delta = reinterpret_cast<float *>(s.delta[at]);
    const int step = p.H * SIZE; // from row to row
    const uint32_t block = blockIdx.x % 2;
    auto put = [&](float *to, float x) {
        *to = x;
        if (work.together) { store_in(to, 1 - block, x); }
    };
    const int share = work.together ? 1 : 2; // of a pair of tiles
    for (int i = 0;; i++) {
        const int pair = work.begin + warp + i / share * warps;
        if (pair >= p.tiles) { break; }
        const int tile = pair * 2 + (work.together ? block : i % 2), begin = tile * QUERIES;
        // A warp that has no pair must not wait, as nobody waits for it: it could come two phases
        // late. It has none in other pieces either, but for the last two.
        barrier_wait(&s.rows_empty[at], number / 2 + 1);
        const int64_t token = work.head / p.H * (int64_t)p.T + min(begin, p.T - 1);
        const int64_t from = (token * p.H + work.head % p.H) * SIZE;
#pragma unroll 1
        for (int row = lane; row < QUERIES; row += WARP) {
            float log_sum = CUDART_INF_F;
            if (begin + row < p.T) {
                log_sum = p.lse[(int64_t)work.head * p.T + begin + row];
                prefetch(p.dout + from + row * step);
                prefetch(p.out + from + row * step);
            }
            put(&lse[begin + row], -1.4426950408889634f * log_sum);
        }
#pragma unroll UNROLL
        for (int row = lane / 8; row < QUERIES; row += WARP / 8) {
            const bool inside = begin + row < p.T; // else the first row, for loads without a branch
            const int vector = (inside ? row * step / VEC : 0) + lane % 8;
            // dO is read again by the products, O by nobody
            const uint4 *o = reinterpret_cast<const uint4 *>(p.out + from) + vector;
            const Floats8 x = load8(p.dout + from, vector), y = unpack8(__ldcs(o));
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < VEC; j++) { sum += x.v[j] * y.v[j]; }
#pragma unroll
            for (int offset = 4; offset > 0; offset /= 2) {
                sum += __shfl_xor_sync(~0u, sum, offset);
            }
            if (lane % 8 == 0) { put(&delta[begin + row], inside ? -sum : 0.0f); }
        }
        __syncwarp();
        barrier_arrive(&s.rows_full[at][tile], lane == 0);
        barrier_pass_in(&s.rows_full[at][tile], 1 - block, lane == 0 && work.together);
    }
}

// The work of computing warpgroup w. The two take turns: one has the tensor cores while the other
// computes P' and dS'.
template <Form FORM, int w>
__device__ __forceinline__ void compute(Shared &s, const Parameters &p) {
    const int thread = threadIdx.x % GROUP, warp = thread / WARP, lane = thread % WARP;
    const int t = lane % 4;
    const float scale = 0.125f * 1.4426950408889634f;
    // The lane's 16 bytes of the 16 x 16 BF16 that a warp loads or stores at a time, in 64 swizzled
    // rows. Kept as one number: the compiler would keep the sum with every address.
    const int first_place = (warp * ROWS + lane % 16) * FULL_ROW + (lane / 16 ^ lane % 8) * 16;
    auto place = [&](uint8_t *tile, int i) { return tile + (hide(first_place) ^ i * 32); };

    float scores[32], dp[32], dv[32], dk[32];
    uint32_t keys[16], probabilities[16], ds[16]; // A of WGMMAs
    uint32_t blocks = 0, steps = 0;               // of keys, of queries
    const uint32_t block = blockIdx.x % 2;        // of the cluster
    bool added = false;                           // to a head of both, which the other may not know

    auto release = [&] { // the tile before
        barrier_arrive(&s.empty[(steps - 1) % STAGES], lane == 0);
    };
    auto multiply_scores = [&] { // S' and dP', a group each
        auto &from = s.stages[steps % STAGES];
        barrier_wait(&s.full[steps % STAGES], steps / STAGES);
        const uint64_t q = wgmma_operand(from.q), d_out = wgmma_operand(from.d_out);
        const uint64_t v = wgmma_operand(s.keys[blocks % 2].v + w * (KEYS / 2) * FULL_ROW);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) { wgmma<false>(scores, keys + 4 * i, q + 2 * i, i > 0); }
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 4; i++) { wgmma<false, false>(dp, v + 2 * i, d_out + 2 * i, i > 0); }
        wgmma_commit();
    };
    auto multiply_gradients = [&](bool adds) { // dV and dK
        auto &from = s.stages[(steps - 1) % STAGES];
        const uint64_t q = wgmma_transposed(from.q), d_out = wgmma_transposed(from.d_out);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma<true>(dv, probabilities + 4 * i, d_out + 128 * i, adds || i > 0);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { wgmma<true>(dk, ds + 4 * i, q + 128 * i, adds || i > 0); }
        wgmma_commit();
    };
    auto gradients_done = [&] {
        pin(probabilities);
        pin(ds);
        release();
    };
    auto multiply_queries = [&](float(&dq)[32]) { // dQ of the pair before
        barrier_wait(&s.ds_full[w], steps / 2 - 1);
        const uint64_t a = wgmma_transposed(s.ds[w]), b = wgmma_transposed(s.keys[blocks % 2].k);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; i++) { wgmma<true, true>(dq, a + 128 * i, b + 128 * i, i > 0); }
        wgmma_commit();
    };

    auto write = [&](Tile tile, float factor, const float(&x)[32]) { // codes
        Staging &staging = *reinterpret_cast<Staging *>(s.out[w]);
        uint32_t &range = s.range[w][warp]; // all lanes write the same
        range = max(range, write_codes<FORM>(p, staging, w, s.scale, tile, factor, x));
    };
    // All that was added is complete. It was added long enough ago that this seldom waits.
    auto pass_sums = [&](int pair) {
        stores_wait();
        barrier_pass_in(&s.added[pair][w][warp], 1 - block, lane == 0 && added);
    };

    if (w == 1) { turn_pass(1); }
    for (int number = 0;; number++) {
        const Work work(p, number);
        if (work.none()) { break; }
        const int at = number % 2;

        auto exponentiate = [&](int tile, bool diagonal) {
            barrier_wait_in(&s.rows_full[at][tile], number / 2);
            const float2 *lse = s.lse[at] + tile * (QUERIES / 2) + t;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float2 l = lse[i * 4];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float *x = scores + i * 4 + r * 2;
                    x[0] = exp2_fast(fmaf(x[0], scale, l.x));
                    x[1] = exp2_fast(fmaf(x[1], scale, l.y));
                }
            }
            if (diagonal) {
                const int key = warp * 16 + lane / 4 - t * 2;
#pragma unroll
                for (int i = 0; i < 32; i++) { // of column i / 4 * 8 + i % 2 of the thread's
                    if (key + i / 2 % 2 * 8 > i / 4 * 8 + i % 2) { scores[i] = 0.0f; }
                }
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                probabilities[i] = bf16_pair(scores[2 * i], scores[2 * i + 1]);
            }
        };
        auto differentiate = [&](int tile) {
            const float2 *delta = s.delta[at] + tile * (QUERIES / 2) + t;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float2 d = delta[i * 4];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int n = i * 4 + r * 2;
                    ds[n / 2] = bf16_pair(scores[n] * (dp[n] + d.x),
                                          scores[n + 1] * (dp[n + 1] + d.y));
                }
            }
        };
        auto share = [&](int half) { // dS' of a pair's tile
            barrier_wait(&s.ds_empty[half], steps / 2 + 1);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t units[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
                store_matrices<false>(place(s.ds[half] + w * (KEYS / 2) * FULL_ROW, i), units);
            }
            show_to_tma();
            __syncwarp();
            barrier_arrive(&s.ds_full[half], lane == 0);
        };
        // The warp's part of the warpgroup's tile of dQ. All that lane 0 has stored has been read.
        auto add_queries = [&](float(&dq)[32], int j, int pair) {
            const int tile = pair * 2 + w;
            const int before = work.down ? pair - j : j - work.begin; // additions
            const int whose = work.together ? (int)blockIdx.x / 2
                                            : number_of(p, blockIdx.x, number > p.whole);
            float4 *sums = sums_of(p, whose) + sums_at(tile, hide(thread));
            float4 *part = reinterpret_cast<float4 *>(s.out[w]) + sums_at(0, hide(thread));
            pin(dq);
            barrier_arrive(&s.ds_empty[w], lane == 0);
            if (work.together) { // every second one of all that come is this block's
                const int all = number * (pair + 1) + before;
                barrier_wait_in(&s.added[pair][w][warp], all / 2 + 1 - block);
                order_tma();
            }
            added = work.together;
            __syncwarp();
            // by a vote: else nvcc takes the warps to diverge, and WGMMAs' descriptors not to be
            // uniform, each of which then costs several instructions
            if (__all_sync(~0u, work.begin == 0 && before == pair)) {
                if (before > 0) { add_sums(dq, sums); }
                const Tile result = {work.head, 0, tile};
                if constexpr (FORM == BF16) {
                    write_bf16(p, result, dq);
                } else {
                    write(result, 0.125f, dq);
                }
                return;
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float *x = dq + i * 4;
                store_four(part + i * WARP, make_float4(x[0], x[1], x[2], x[3]));
            }
            show_to_tma();
            __syncwarp();
            if (lane == 0) {
                if (before > 0) {
                    add_floats(sums, part, SUMS * sizeof(float));
                } else {
                    store_bytes(sums, part, SUMS * sizeof(float));
                }
                stores_commit();
            }
            __syncwarp();
        };

        // A pair of tiles of queries. FIRST: those on the diagonal, whose first half the second
        // half of the keys follows.
        auto multiply_pair = [&](int j, int pair, auto first) {
            constexpr bool FIRST = decltype(first)::value;
            turn_wait(w);
            if constexpr (FIRST && w == 1) {
                turn_pass(w);
                barrier_wait(&s.full[steps % STAGES], steps / STAGES);
                barrier_arrive(&s.empty[steps % STAGES], lane == 0);
#pragma unroll
                for (uint32_t &zero : ds) { zero = 0; }
            } else {
                float dq[32]; // here: the compiler takes it to be in use as long as it lives
                if constexpr (!FIRST) { multiply_gradients(w == 0 || pair > j + 1); }
                multiply_scores();
                if constexpr (!FIRST) {
                    wgmma_wait<2>();
                    gradients_done();
                    multiply_queries(dq);
                }
                turn_pass(w);
                wgmma_wait<0>();
                pin(scores);
                pin(dp);
                pin(keys);
                if constexpr (!FIRST) { add_queries(dq, j, pair - 1); }
                exponentiate(pair * 2, FIRST);
                differentiate(pair * 2);
            }
            share(0);
            steps++;

            constexpr bool DONE = !FIRST || w == 0; // the first half
            turn_wait(w);
            if constexpr (DONE) { multiply_gradients(!FIRST); }
            multiply_scores();
            turn_pass(w);
            pass_sums(FIRST ? p.tiles - 1 : pair - 1);
            wgmma_wait<1>();
            if constexpr (DONE) { gradients_done(); }
            pin(scores);
            exponentiate(pair * 2 + 1, w == 1 && FIRST);
            wgmma_wait<0>();
            pin(dp);
            pin(keys);
            differentiate(pair * 2 + 1);
            share(1);
            steps++;
        };
        for (int j = work.first; work.has(j); j += work.step(), blocks++) {
            barrier_wait(&s.keys_full[blocks % 2], blocks / 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                load_matrices(keys + 4 * i,
                              place(s.keys[blocks % 2].k + w * (KEYS / 2) * FULL_ROW, i));
            }
            multiply_pair(j, j, std::true_type());
#pragma unroll 1
            for (int pair = j + 1; pair < p.tiles; pair++) {
                multiply_pair(j, pair, std::false_type());
            }
            float dq[32];
            turn_wait(w);
            multiply_gradients(w == 0 || p.tiles > j + 1);
            multiply_queries(dq);
            turn_pass(w);
            wgmma_wait<1>();
            gradients_done();
            pin(dv);
            pin(dk);
            if constexpr (FORM == BF16) {
                uint8_t *out_v = s.out[w][0][0] +
                                 warp * ROWS * FULL_ROW; // place() adds as much again
                uint8_t *out_k = out_v + ROWS * FULL_ROW;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint32_t units[2][4];
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        const float *x = dv + i * 8 + n * 2, *y = dk + i * 8 + n * 2;
                        units[0][n] = bf16_pair(x[0], x[1]);
                        units[1][n] = bf16_pair(y[0] * 0.125f, y[1] * 0.125f);
                    }
                    store_matrices<false>(place(out_v, i), units[0]);
                    store_matrices<false>(place(out_k, i), units[1]);
                }
                show_to_tma();
                __syncwarp();
                const int key = j * KEYS + w * (KEYS / 2) + warp * ROWS;
                const int b = work.head / p.H, h = work.head % p.H;
                if (lane == 0 && key < p.T) {
                    tma_store_at(p.d_kv, s.out[w][warp][0], (2 * p.H + h) * SIZE, key, b, LAST);
                    tma_store_at(p.d_kv, s.out[w][warp][1], (p.H + h) * SIZE, key, b, LAST);
                    stores_commit();
                }
            } else {
                write({work.head, 2, j * 2 + w}, 1.0f, dv);
                write({work.head, 1, j * 2 + w}, 0.125f, dk);
            }
            __syncwarp();
            wgmma_wait<0>();
            barrier_arrive(&s.keys_empty[blocks % 2], lane == 0);
            if (FORM == BF16) { stores_wait_read<0>(); }
            add_queries(dq, j, p.tiles - 1);
        }
        __syncwarp();
        // for both blocks; without the other, twice for this one
        barrier_arrive(&s.rows_empty[at], lane == 0);
        barrier_pass_in(&s.rows_empty[at], block ^ work.together, lane == 0);
    }
    if (w == 0) { turn_wait(0); }
    pass_sums(p.tiles - 1);
}

#endif

template <Form FORM>
__global__ void __launch_bounds__(THREADS, 1)
    attention64_backward_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 2 * WARPS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(&s.keys_full[i], 1);
            barrier_init(&s.keys_empty[i], 2 * WARPS);
            barrier_init(&s.ds_full[i], 2 * WARPS);
            barrier_init(&s.ds_empty[i], WARPS);
            barrier_init(&s.rows_empty[i], 2 * 2 * WARPS);
            for (int j = 0; j < 2 * MOST_TILES; j++) { barrier_init(&s.rows_full[i][j], 1); }
        }
        for (int i = 0; i < MOST_TILES * 2 * WARPS; i++) { barrier_init(&s.added[0][0][i], 1); }
        for (int i = 0; i < 2 * WARPS; i++) { s.range[0][i] = 0; }
        barriers_ready();
        s.scale = FORM == BF16 ? 1.0f : p.d_qkv.live->scale;
    }
    cluster_barrier();
    if (threadIdx.x >= WARP && !Work(p, 0).none()) { // one warp loads already
        summarise<4>(s, p, Work(p, 0), 0, threadIdx.x / WARP - 1, THREADS / WARP - 1);
    }
    if (group == 0) {
        set_registers<LOADING_REGISTERS, false>();
        const int warp = threadIdx.x / WARP;
        if (warp > 0) {
            for (int number = 1;; number++) {
                const Work work(p, number);
                if (work.none()) { break; }
                summarise<1>(s, p, work, number, warp - 1, HELPERS);
            }
        } else if (threadIdx.x == 0) {
            load(s, p);
        }
        __syncwarp();
    } else {
        set_registers<COMPUTING_REGISTERS, true>();
        group == 1 ? compute<FORM, 0>(s, p) : compute<FORM, 1>(s, p);
    }
    cluster_barrier(); // a block that had ended could not be written to
    if (FORM != BF16 && threadIdx.x < WARP) {
        record_range(p.d_qkv, __uint_as_float(s.range[0][threadIdx.x % (2 * WARPS)]));
    }
#endif
}

// Adds up dQ of the heads that several blocks have: a tile a block, the sums in the keys' order.
template <Form FORM>
__global__ void __launch_bounds__(GROUP) add_parts_kernel(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const int other = blockIdx.x / (2 * p.tiles), tile = blockIdx.x % (2 * p.tiles);
    const int begin = other * p.tiles, end = begin + tile / 2 + 1; // the tile's keys
    float dq[SUMS / WARP] = {};
    int block = 0;
    while (p.cuts[block + 1] <= begin) { block++; }
    if (p.cuts[block + 1] >= end) { return; } // one block has them all
    for (; block < p.blocks && p.cuts[block] < end; block++) {
        if (p.cuts[block + 1] == p.cuts[block]) { continue; }
        const bool second = p.cuts[block] < begin; // its first part is of the head before
        add_sums(dq, sums_of(p, number_of(p, block, second)) + sums_at(tile, threadIdx.x));
    }
    const Tile result = {other_head(p, other), 0, tile};
    if constexpr (FORM == BF16) {
        write_bf16(p, result, dq);
    } else {
        Staging &staging = *reinterpret_cast<Staging *>(memory);
        const float scale = p.d_qkv.live->scale;
        record_range(p.d_qkv,
                     __uint_as_float(write_codes<FORM>(p, staging, 0, scale, result, 0.125f, dq)));
    }
}

// ---- who computes what --------------------------------------------------------------------------

bool in_domain(AttentionShape s) {
    return s.D == SIZE && s.H == s.G && s.T <= MOST_T;
}

// Shares `heads` heads among blocks at tiles of keys, in their order, as evenly as that allows:
// into cuts as of Parameters. A tile costs as much as the queries' tiles that it meets, and one
// more. Returns the largest share's cost.
int share_heads(uint16_t *cuts, int heads, int tiles, int blocks) {
    auto fits = [&](int most) {
        int block = 0, sum = 0;
        cuts[0] = 0;
        for (int unit = 0; unit < heads * tiles; unit++) {
            const int cost = 2 * (tiles - unit % tiles) + 1;
            if (sum + cost > most) {
                if (++block == blocks) { return false; }
                cuts[block] = (uint16_t)unit;
                sum = 0;
            }
            sum += cost;
        }
        while (block < blocks) { cuts[++block] = (uint16_t)(heads * tiles); }
        return true;
    };
    int low = 2 * tiles, high = tiles * (tiles + 2); // too little but for the last, a whole head
    while (low + 1 < high) {
        const int middle = (low + high) / 2;
        (fits(middle) ? high : low) = middle;
    }
    fits(high);
    return high;
}

// Whether the heads that are left are shared.
bool plan_work(Parameters *p, int heads, int blocks) {
    enum { ADDING = 12 }; // what adding up parts costs, like a tile of keys
    const int others = heads % (blocks / 2), whole = p->tiles * (p->tiles + 2);
    p->blocks = blocks;
    p->whole = heads / (blocks / 2);
    if (others > 0 && share_heads(p->cuts, others, p->tiles, blocks) + ADDING < whole) {
        return true;
    }
    for (int i = 0; i <= blocks; i++) { p->cuts[i] = (uint16_t)(min(i, others) * p->tiles); }
    return false;
}

size_t sums_bytes(AttentionShape s) {
    return (MOST_BLOCKS / 2 + MOST_BLOCKS * 2) * round_up64(s.T, KEYS) * SIZE * sizeof(float);
}

// Rows of column sums.
int partials(AttentionShape s) {
    return s.B * 2 * divide_up(s.T, KEYS);
}

Parameters parameters(const Gpu *gpu, AttentionShape s, const Tensor &d_qkv, const Bf16 *d_out,
                      const Bf16 *out, const float *lse, const Bf16 *qkv) {
    const int64_t N = 3 * s.H * SIZE, M = s.H * SIZE;
    Parameters p = {};
    auto map = [&](const Bf16 *x, int64_t columns, int rows) {
        return tensor_map(
            x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, FULL_ROW,
            {{columns, 2, SIZE}, {s.T, 2 * columns, rows}, {s.B, 2 * columns * s.T, 1}});
    };
    p.q = map(qkv, N, QUERIES);
    p.kv = map(qkv, N, KEYS);
    p.d_out = map(d_out, M, QUERIES);
    p.d_kv = map(d_qkv.bf16, N, ROWS);
    p.d_qkv = d_qkv;
    p.dout = d_out;
    p.out = out;
    p.lse = lse;
    p.sums = static_cast<float *>(gpu->attention_workspace);
    p.partials = p.sums + sums_bytes(s) / sizeof(float);
    p.T = s.T;
    p.H = s.H;
    p.M = s.B * s.T;
    p.N = (int)N;
    p.tiles = divide_up(s.T, KEYS);
    return p;
}

template <Form FORM> void run(const Gpu *gpu, Parameters p, int heads) {
    const int clusters = max(min(gpu->sms, (int)MOST_BLOCKS) / 2, 1);
    const bool shares = plan_work(&p, heads, 2 * clusters);
    launch_in_pairs(attention64_backward_kernel<FORM>, 2 * clusters, THREADS, sizeof(Shared),
                    gpu->stream, p);
    if (shares) {
        launch_with_shared(add_parts_kernel<FORM>, heads % clusters * 2 * p.tiles, GROUP,
                           sizeof(Staging), gpu->stream, p);
    }
}

} // namespace

// ---- launcher -----------------------------------------------------------------------------------

bool attention64_serves(const Gpu *gpu, AttentionShape s) {
    return in_domain(s) && runs_on_hopper(gpu, attention64_backward_kernel<BF16>);
}

size_t attention64_workspace(AttentionShape s) {
    const size_t N = (size_t)(3 * s.H * SIZE);
    return in_domain(s) ? sums_bytes(s) + (size_t)partials(s) * N * sizeof(float) : 0;
}

bool attention64_backward(Gpu *gpu, AttentionShape s, Tensor d_qkv, Gradient column_sums,
                          const Bf16 *d_out, const Bf16 *out, const float *lse, const Bf16 *qkv) {
    const char *name = "attention64";
    if (!attention64_serves(gpu, s)) {
        die("%s: T %d, %d/%d heads of %d on this device", name, s.T, s.H, s.G, s.D);
    }
    const size_t needed = attention64_workspace(s);
    if (gpu->attention_bytes < needed) {
        die("%s: %zu bytes of workspace, it needs %zu", name, gpu->attention_bytes, needed);
    }
    const int64_t M = (int64_t)s.B * s.T, N = 3 * s.H * SIZE;
    const bool codes = check_tensor(name, &d_qkv, M, N) && d_qkv.fused &&
                       d_qkv.mode == SCALE_GIVEN && s.T % 16 == 0;
    Parameters p = parameters(gpu, s, d_qkv, d_out, out, lse, qkv);
    if (!codes) {
        if (d_qkv.bf16 == NULL) { die("%s: no BF16 form", name); }
        run<BF16>(gpu, p, s.B * s.H);
        return false;
    }
    for (const uint8_t *form : {d_qkv.fp8, d_qkv.fp8_t}) {
        const uint8_t *workspace = reinterpret_cast<const uint8_t *>(p.sums);
        if (form != NULL && form < workspace + needed && workspace < form + M * N) {
            die("%s: codes in its workspace", name);
        }
    }
    (d_qkv.type == FP8_E4M3 ? run<CODES_E4M3> : run<CODES_E5M2>)(gpu, p, s.B * s.H);
    sum_partials({{column_sums}, p.partials, partials(s), N}, gpu->stream);
    return true;
}
