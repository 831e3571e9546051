// The backward pass of causal attention for heads of 64 on Hopper: one kernel, whose sums have a
// fixed order.
//
//   S = QK' / 8    P = exp(S - lse)    dP = dO V'    dS = P (dP - rowsum(dO O))
//   dV = P' dO     dK = dS' Q / 8      dQ = dS K / 8
//
// P and dS are rounded to BF16 for their matmuls; all else is FP32.
//
// A thread block computes whole heads, one after another. A head's keys are cut into tiles of 128.
// While a tile of keys stays in shared memory, the queries from the diagonal on are loaded in pairs
// of tiles of 64. Two of the block's three warpgroups compute; each takes 64 of the keys. They
// compute S' and dP' by WGMMA, whose results have the register layout of its operands, so P' and
// dS' stay in registers. dV and dK are also summed in registers. For dQ, both warpgroups write dS'
// to shared memory. When dS' of a pair is complete, each warpgroup multiplies dS of one of the
// pair's tiles by the 128 keys. One thread sums each element of dQ over the tiles of keys, in the
// order of the tiles. After a tile of keys the thread stores the sum to global memory. It loads the
// sum again long before the next WGMMA adds to the sum. After the last tile of keys, on the
// diagonal, it writes dQ in BF16.
//
// The first warpgroup does not compute: its first warp loads tiles by TMA, and its other warps
// prepare lse and -rowsum(dO O) of the next head's rows. All blocks compute the same number of
// whole heads.
// The remaining heads are divided among all blocks by tiles of keys, unless it is faster that some
// blocks compute one more whole head. Several blocks then have sums of one head's dQ, and a second
// kernel adds up these sums. With documents, a tile of keys needs only the queries up to the end of
// its last document. All heads are then divided by tiles of keys, in parts of about equal cost,
// which the host determines.
#include "attention.h"
#include "hopper.cuh"

#include <math_constants.h>
#include <type_traits>

namespace {

enum {
    SIZE = 64, // channels of a head: FULL_ROW bytes
    KEYS = 128,
    QUERIES = 64,
    STAGES = 4,
    HELPERS = WARPS - 1,
    THREADS = 3 * GROUP,
    MAX_T = ATTENTION64_MAX_T,
    MAX_TILES = MAX_T / KEYS, // tiles of keys, or pairs of tiles of queries
    MAX_BLOCKS = ATTENTION_BLOCKS,
    SUMS = QUERIES * SIZE, // floats of a tile of dQ
    // registers of a thread
    COMPUTING_REGISTERS = 240,
    LOADING_REGISTERS = 24
};

struct Shared {
    struct {
        uint8_t k[KEYS * FULL_ROW], v[KEYS * FULL_ROW];
    } keys[2];
    struct {
        uint8_t q[QUERIES * FULL_ROW], d_out[QUERIES * FULL_ROW];
    } stages[STAGES];
    uint8_t ds[2][KEYS * FULL_ROW];         // dS' of a pair of tiles: [keys][queries]
    uint8_t out[2][2][KEYS / 2 * FULL_ROW]; // [warpgroup][dV, dK]
    // -lse / log 2 and -rowsum(dO O) of the queries of this piece and of the next
    float2 lse[2][MAX_T / 2], delta[2][MAX_T / 2];
    Barrier full[STAGES], empty[STAGES], keys_full[2], keys_empty[2];
    Barrier ds_full[2], ds_empty[2];
    Barrier rows_full[2][2 * MAX_TILES], rows_empty[2];
};
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");
static_assert(registers_suffice(LOADING_REGISTERS, COMPUTING_REGISTERS), "a block's registers");

struct Parameters {
    CUtensorMap q, kv, d_out, d_kv; // their boxes have 64, 128, 64 and 64 rows
    Bf16 *d_qkv;
    const Bf16 *dout, *out;
    const float *lse;
    const int *starts, *ends, *document_cuts; // see attention.h; NULL without documents
    // [block][2][T, rounded up to 128][64], see sums_of; a tile's sums lie in the order of the
    // threads that add them up
    float *sums;
    int T, H, N; // N: how many values a row of QKV has
    int tiles;   // tiles of keys in a head
    int blocks;
    int whole; // how many whole heads each block computes
    // The remaining heads may be shared by several blocks. Their tiles of keys have consecutive
    // numbers, from the first remaining head to the last. Block i computes tiles cuts[i] to
    // cuts[i + 1] - 1.
    uint16_t cuts[MAX_BLOCKS + 1];

    template <bool DOCUMENTS> __device__ int cut(int block) const {
        return DOCUMENTS ? __ldg(document_cuts + block) : cuts[block];
    }
    // Returns the first tile of keys that a pair of tiles of queries sees.
    template <bool DOCUMENTS> __device__ int first_keys(int head, int pair) const {
        return DOCUMENTS ? __ldg(starts + (int64_t)(head / H) * T + pair * KEYS) / KEYS : 0;
    }
};

// Returns the address of one of the two sets of sums of dQ that each thread block has. Set 0 is for
// the heads that the block computes alone, and for the first head that the block shares with other
// blocks; set 1 is for a second shared head. With documents, set 0 is for the block's first head,
// and set 1 is for its other heads, of which only the last can be shared.
__device__ __forceinline__ float4 *sums_of(const Parameters &p, int block, int set) {
    return reinterpret_cast<float4 *>(p.sums) + (block * 2 + set) * 2ll * p.tiles * (SUMS / 4);
}

// Writes a tile of dQ to d_qkv. A thread has two rows, and two pairs of adjacent columns of every
// 16.
__device__ __forceinline__ void write_tile(const Parameters &p, int head, int tile,
                                           const float (&dq)[SUMS / GROUP]) {
    const int thread = threadIdx.x % GROUP, lane = thread % WARP;
    const int row = tile * QUERIES + thread / WARP * 16 + lane / 4;
    const int64_t token = (int64_t)(head / p.H) * p.T + row;
    Bf16 *to = p.d_qkv + token * p.N + head % p.H * SIZE + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++, to += 8 * p.N) {
        if (row + r * 8 >= p.T) { continue; }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            *reinterpret_cast<uint32_t *>(to + i * 8) = bf16_pair(dq[i * 4 + r * 2] * 0.125f,
                                                                  dq[i * 4 + r * 2 + 1] * 0.125f);
        }
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Returns where the document of a key ends: one past its last token.
__device__ __forceinline__ int end_of(const Parameters &p, int head, int key) {
    return __ldg(p.ends + (int64_t)(head / p.H) * p.T + min(key, p.T - 1));
}

// Returns one past the last pair of tiles of queries that sees a key of tile j.
template <bool DOCUMENTS>
__device__ __forceinline__ int pairs_end(const Parameters &p, int head, int j) {
    return DOCUMENTS ? (end_of(p, head, j * KEYS + KEYS - 1) - 1) / KEYS + 1 : p.tiles;
}

// ---- the kernel ---------------------------------------------------------------------------------

// Piece `number` of a thread block's work: tiles first to last - 1 of a head's keys. none() is true
// if the block has no more work.
template <bool DOCUMENTS> struct Work {
    int head, first, last;
    __device__ Work(const Parameters &p, int number) {
        head = number * p.blocks + blockIdx.x;
        first = 0;
        last = p.tiles;
        // cut() gives the block tiles of at most two of the heads that remain after the whole
        // heads; with documents, cut() divides all heads
        if (DOCUMENTS || number >= p.whole) {
            const int begin = p.cut<DOCUMENTS>(blockIdx.x);
            const int end = p.cut<DOCUMENTS>(blockIdx.x + 1);
            const int other = begin / p.tiles + number - p.whole;
            head = p.whole * p.blocks + other;
            first = max(0, begin - other * p.tiles);
            last = min(p.tiles, end - other * p.tiles);
        }
    }
    __device__ bool none(void) const {
        return last <= first;
    }
};

// Loads the tiles in the order of their use. One lane runs this function.
template <bool DOCUMENTS> __device__ __forceinline__ void load(Shared &s, const Parameters &p) {
    Stage<STAGES> stage = 0;
    int key_tiles = 0;
    for (int number = 0;; number++) {
        const Work<DOCUMENTS> work(p, number);
        if (work.none()) { return; }
        const int b = work.head / p.H, h = work.head % p.H;
        for (int j = work.first; j < work.last; j++, key_tiles++) {
            auto &keys = s.keys[key_tiles % 2];
            Barrier *keys_full = &s.keys_full[key_tiles % 2];
            const int end = 2 * pairs_end<DOCUMENTS>(p, work.head, j);
            barrier_wait(&s.keys_empty[key_tiles % 2], key_tiles / 2 + 1);
            barrier_expect(keys_full, sizeof(keys));
            tma_load_at(keys.k, p.kv, keys_full, (p.H + h) * SIZE, j * KEYS, b);
            tma_load_at(keys.v, p.kv, keys_full, (2 * p.H + h) * SIZE, j * KEYS, b);
            for (int i = 2 * j; i < end; i++, stage.advance(1)) {
                auto &to = s.stages[stage.at];
                Barrier *full = &s.full[stage.at];
                barrier_wait(&s.empty[stage.at], stage.round + 1);
                barrier_expect(full, sizeof(to));
                tma_load_at(to.q, p.q, full, h * SIZE, i * QUERIES, b);
                tma_load_at(to.d_out, p.d_out, full, h * SIZE, i * QUERIES, b);
            }
        }
    }
}

// Writes lse and delta = -rowsum(dO O) of the piece's queries to shared memory. Each of `warps`
// warps takes its share of the tiles; 8 lanes compute the delta of a row. For rows beyond T, lse
// and delta have values that make P and dS 0. UNROLL: how many rows a lane loads at a time; more
// rows take more registers.
template <int UNROLL, bool DOCUMENTS>
__device__ __forceinline__ void compute_delta(Shared &s, const Parameters &p,
                                              const Work<DOCUMENTS> &work, int number, int warp,
                                              int warps) {
    const int lane = threadIdx.x % WARP, at = number % 2;
    float *lse = reinterpret_cast<float *>(s.lse[at]),
          *delta = reinterpret_cast<float *>(s.delta[at]);
    const int step = p.H * SIZE; // distance from one row to the next
    for (int tile = warp; tile < 2 * p.tiles; tile += warps) {
        const bool needed = tile >= 2 * work.first &&
                            p.first_keys<DOCUMENTS>(work.head, tile / 2) < work.last;
        // Without documents, no later piece waits at this tile's barrier.
        if (!DOCUMENTS && !needed) { continue; }
        // A warp without a tile must not come here: no other warp waits for it, so it may fall two
        // phases behind, and would then wait for the wrong one.
        barrier_wait(&s.rows_empty[at], number / 2 + 1);
        // The barrier completes a phase for each piece, whether or not the piece needs the tile.
        if (!needed) {
            __syncwarp();
            barrier_arrive(&s.rows_full[at][tile], lane == 0);
            continue;
        }
        const int begin = tile * QUERIES;
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
            lse[begin + row] = -1.4426950408889634f * log_sum;
        }
#pragma unroll UNROLL
        for (int row = lane / 8; row < QUERIES; row += WARP / 8) {
            const bool inside = begin + row < p.T; // otherwise the first row is loaded
            const int vector = (inside ? row * step / VEC : 0) + lane % 8;
            const Floats8 x = load8(p.dout + from, vector), y = load8(p.out + from, vector);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < VEC; j++) { sum += x.v[j] * y.v[j]; }
#pragma unroll
            for (int offset = 4; offset > 0; offset /= 2) {
                sum += __shfl_xor_sync(~0u, sum, offset);
            }
            if (lane % 8 == 0) { delta[begin + row] = inside ? -sum : 0.0f; }
        }
        __syncwarp();
        barrier_arrive(&s.rows_full[at][tile], lane == 0);
    }
}

// Does the work of warpgroup w, one of the two that compute. They take turns: one uses the tensor
// cores while the other computes P' and dS'.
template <bool DOCUMENTS, int w>
__device__ __forceinline__ void compute(Shared &s, const Parameters &p) {
    const int thread = threadIdx.x % GROUP, warp = thread / WARP, lane = thread % WARP;
    const int t = lane % 4;
    const float scale = 0.125f * 1.4426950408889634f;
    // A warp loads or stores 16 x 16 BF16 values at a time, of which a lane has 16 bytes.
    // address(tile, i) is the address of the lane's bytes of columns 16 i to 16 i + 15, in a tile
    // of 64 swizzled rows. The asm hides the offset from the compiler, which would otherwise keep a
    // register for every address.
    const uint32_t first_offset = (warp * 16 + lane % 16) * FULL_ROW + (lane / 16 ^ lane % 8) * 16;
    auto address = [&](uint8_t *tile, int i) {
        uint32_t at = first_offset;
        asm volatile("" : "+r"(at));
        return tile + (at ^ i * 32);
    };

    float scores[32], dp[32], dv[32], dk[32], dq[32];
    uint32_t keys[16], probabilities[16], ds[16]; // operands A of WGMMAs
    uint32_t key_tiles = 0, query_tiles = 0;      // counted over all pieces

    auto release = [&] { // frees the stage of the previous tile of queries
        barrier_arrive(&s.empty[(query_tiles - 1) % STAGES], lane == 0);
    };
    auto multiply_scores = [&] { // computes S' and dP', with one commit group each
        auto &from = s.stages[query_tiles % STAGES];
        barrier_wait(&s.full[query_tiles % STAGES], query_tiles / STAGES);
        const uint64_t q = wgmma_operand(from.q), d_out = wgmma_operand(from.d_out);
        const uint64_t v = wgmma_operand(s.keys[key_tiles % 2].v + w * (KEYS / 2) * FULL_ROW);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) { wgmma<false>(scores, keys + 4 * i, q + 2 * i, i > 0); }
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 4; i++) { wgmma<false, false>(dp, v + 2 * i, d_out + 2 * i, i > 0); }
        wgmma_commit();
    };
    // Computes dV and dK from the previous tile of queries. They are added to the sums if `adds`,
    // and replace the sums otherwise.
    auto multiply_gradients = [&](bool adds) {
        auto &from = s.stages[(query_tiles - 1) % STAGES];
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
    // Computes dQ of the previous pair from these keys. It is added to the sum if `adds`, and
    // replaces the sum otherwise.
    auto multiply_queries = [&](bool adds) {
        barrier_wait(&s.ds_full[w], query_tiles / 2 - 1);
        const uint64_t a = wgmma_transposed(s.ds[w]), b = wgmma_transposed(s.keys[key_tiles % 2].k);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            wgmma<true, true>(dq, a + 128 * i, b + 128 * i, adds || i > 0);
        }
        wgmma_commit();
    };

    if (w == 1) { turn_pass(1); }
    for (int number = 0;; number++) {
        const Work<DOCUMENTS> work(p, number);
        if (work.none()) { break; }
        const int at = number % 2;
        // lane i has the first tile of keys that pair i of tiles of queries sees
        const int firsts = p.first_keys<DOCUMENTS>(work.head, min(lane, p.tiles - 1));
        auto first_keys = [&](int pair) { return DOCUMENTS ? __shfl_sync(~0u, firsts, pair) : 0; };

        auto exponentiate = [&](int j, int tile, bool diagonal) {
            // ends of the documents of the thread's two keys, relative to the tile's first query
            int ends[2];
#pragma unroll
            for (int r = 0; DOCUMENTS && r < 2; r++) {
                const int key = j * KEYS + w * (KEYS / 2) + warp * 16 + lane / 4 + r * 8;
                ends[r] = end_of(p, work.head, key) - tile * QUERIES;
            }
            barrier_wait(&s.rows_full[at][tile], number / 2);
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
            // scores[i] belongs to query t * 2 + i / 4 * 8 + i % 2 of the tile
            if (diagonal) {
                const int key = warp * 16 + lane / 4 - t * 2;
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    if (key + i / 2 % 2 * 8 > i / 4 * 8 + i % 2) { scores[i] = 0.0f; }
                }
            }
            // some queries are in a later document than a key
            if (DOCUMENTS && __any_sync(~0u, ends[0] < QUERIES)) {
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    if (t * 2 + i / 4 * 8 + i % 2 >= ends[i / 2 % 2]) { scores[i] = 0.0f; }
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
        auto write_ds = [&](int half) { // writes dS' of one tile of a pair to shared memory
            barrier_wait(&s.ds_empty[half], query_tiles / 2 + 1);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t units[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
                store_matrices<false>(address(s.ds[half] + w * (KEYS / 2) * FULL_ROW, i), units);
            }
            show_to_tma();
            __syncwarp();
            barrier_arrive(&s.ds_full[half], lane == 0);
        };
        auto sums_at = [&](int pair) { // the thread's sums of the warpgroup's tile of dQ
            const int tile = pair * 2 + w;
            return sums_of(p, blockIdx.x, number > p.whole) + tile * (SUMS / 4) + thread;
        };
        // Returns whether earlier tiles of keys of this piece have stored sums of a pair's dQ.
        auto adds = [&](int j, int pair) { return j > max(work.first, first_keys(pair)); };
        // Loads the sums of a pair's dQ, if there are any, long before the matmul that adds to
        // them.
        auto load_queries = [&](int j, int pair) {
            const float4 *from = sums_at(pair);
            const bool loads = adds(j, pair);
#pragma unroll
            for (int i = 0; loads && i < 8; i++) {
                const float4 sum = __ldcg(from + i * GROUP);
                dq[i * 4] = sum.x;
                dq[i * 4 + 1] = sum.y;
                dq[i * 4 + 2] = sum.z;
                dq[i * 4 + 3] = sum.w;
            }
        };
        auto store_queries = [&](int j, int pair) {
            pin(dq);
            barrier_arrive(&s.ds_empty[w], lane == 0);
            if (j == pair && work.first <= first_keys(pair)) {
                write_tile(p, work.head, pair * 2 + w, dq);
                return;
            }
            float4 *to = sums_at(pair);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float *x = dq + i * 4;
                __stcg(to + i * GROUP, make_float4(x[0], x[1], x[2], x[3]));
            }
        };

        // Computes a pair of tiles of queries. FIRST: the pair on the diagonal, whose first tile
        // does not see the second 64 keys.
        auto multiply_pair = [&](int j, int pair, auto first) {
            constexpr bool FIRST = decltype(first)::value;
            turn_wait(w);
            if constexpr (FIRST && w == 1) {
                turn_pass(w);
                barrier_wait(&s.full[query_tiles % STAGES], query_tiles / STAGES);
                barrier_arrive(&s.empty[query_tiles % STAGES], lane == 0);
#pragma unroll
                for (uint32_t &zero : ds) { zero = 0; }
                load_queries(j, pair);
            } else {
                if constexpr (!FIRST) { multiply_gradients(w == 0 || pair > j + 1); }
                multiply_scores();
                if constexpr (!FIRST) {
                    wgmma_wait<2>();
                    gradients_done();
                    multiply_queries(adds(j, pair - 1));
                }
                turn_pass(w);
                wgmma_wait<FIRST ? 1 : 2>();
                pin(scores);
                exponentiate(j, pair * 2, FIRST);
                hold(probabilities);
                wgmma_wait<0>();
                pin(dp);
                pin(keys);
                if constexpr (!FIRST) { store_queries(j, pair - 1); }
                load_queries(j, pair);
                differentiate(pair * 2);
            }
            write_ds(0);
            query_tiles++;

            // whether this warpgroup has computed the pair's first tile
            constexpr bool DONE = !FIRST || w == 0;
            turn_wait(w);
            if constexpr (DONE) { multiply_gradients(!FIRST); }
            multiply_scores();
            turn_pass(w);
            wgmma_wait<1>();
            if constexpr (DONE) { gradients_done(); }
            pin(scores);
            exponentiate(j, pair * 2 + 1, w == 1 && FIRST);
            hold(probabilities);
            wgmma_wait<0>();
            pin(dp);
            pin(keys);
            differentiate(pair * 2 + 1);
            write_ds(1);
            query_tiles++;
        };
        for (int j = work.first; j < work.last; j++, key_tiles++) {
            barrier_wait(&s.keys_full[key_tiles % 2], key_tiles / 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                load_matrices(keys + 4 * i,
                              address(s.keys[key_tiles % 2].k + w * (KEYS / 2) * FULL_ROW, i));
            }
            multiply_pair(j, j, std::true_type());
            const int end = pairs_end<DOCUMENTS>(p, work.head, j);
#pragma unroll 1
            for (int pair = j + 1; pair < end; pair++) {
                multiply_pair(j, pair, std::false_type());
            }
            turn_wait(w);
            multiply_gradients(w == 0 || end > j + 1);
            multiply_queries(adds(j, end - 1));
            turn_pass(w);
            if (thread == 0) { stores_wait_read<0>(); }
            group_barrier(w, GROUP);
            wgmma_wait<0>();
            gradients_done();
            barrier_arrive(&s.keys_empty[key_tiles % 2], lane == 0);
            store_queries(j, end - 1);
            pin(dv);
            pin(dk);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t units[2][4];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float *x = dv + i * 8 + n * 2, *y = dk + i * 8 + n * 2;
                    units[0][n] = bf16_pair(x[0], x[1]);
                    units[1][n] = bf16_pair(y[0] * 0.125f, y[1] * 0.125f);
                }
                store_matrices<false>(address(s.out[w][0], i), units[0]);
                store_matrices<false>(address(s.out[w][1], i), units[1]);
            }
            show_to_tma();
            group_barrier(w, GROUP);
            const int key = j * KEYS + w * (KEYS / 2);
            const int b = work.head / p.H, h = work.head % p.H;
            if (thread == 0 && key < p.T) {
                tma_store_at(p.d_kv, s.out[w][0], (2 * p.H + h) * SIZE, key, b);
                tma_store_at(p.d_kv, s.out[w][1], (p.H + h) * SIZE, key, b);
                stores_commit();
            }
        }
        // The warpgroup also waits for the rows of tiles that see none of the piece's keys, so that
        // no warp in compute_delta falls two pieces behind.
        for (int tile = 0; DOCUMENTS && tile < 2 * p.tiles; tile++) {
            barrier_wait(&s.rows_full[at][tile], number / 2);
        }
        __syncwarp();
        barrier_arrive(&s.rows_empty[at], lane == 0);
    }
    if (w == 0) { turn_wait(0); }
    if (thread == 0) { stores_wait(); }
}

#endif

template <bool DOCUMENTS>
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
            barrier_init(&s.rows_empty[i], 2 * WARPS);
            for (int j = 0; j < 2 * MAX_TILES; j++) { barrier_init(&s.rows_full[i][j], 1); }
        }
        barriers_ready();
    }
    __syncthreads();
    typedef Work<DOCUMENTS> Piece;
    if (Piece(p, 0).none()) { return; }
    if (threadIdx.x >= WARP) { // the first warp loads tiles instead
        compute_delta<4>(s, p, Piece(p, 0), 0, threadIdx.x / WARP - 1, THREADS / WARP - 1);
    }
    if (group == 0) {
        set_registers<LOADING_REGISTERS, false>();
        const int warp = threadIdx.x / WARP;
        if (warp > 0) {
            for (int number = 1;; number++) {
                const Work<DOCUMENTS> work(p, number);
                if (work.none()) { return; }
                compute_delta<1>(s, p, work, number, warp - 1, HELPERS);
            }
        } else if (threadIdx.x == 0) {
            load<DOCUMENTS>(s, p);
        }
    } else {
        set_registers<COMPUTING_REGISTERS, true>();
        group == 1 ? compute<DOCUMENTS, 0>(s, p) : compute<DOCUMENTS, 1>(s, p);
    }
#endif
}

// Adds up dQ of the heads that several blocks have computed, in the order of the keys. Each thread
// block takes one cut between two blocks' tiles of keys, and one tile of dQ. If the cut is the
// first one inside a shared head, the block adds up this head's tile; otherwise it does nothing.
template <bool DOCUMENTS>
__global__ void __launch_bounds__(GROUP) add_parts_kernel(const __grid_constant__ Parameters p) {
    int block = blockIdx.x / (2 * p.tiles);
    const int tile = blockIdx.x % (2 * p.tiles), within = p.cut<DOCUMENTS>(block + 1);
    const int other = within / p.tiles, first = other * p.tiles;
    // the cut lies between two heads, or is not the first one inside its head
    if (within == first || p.cut<DOCUMENTS>(block) > first) { return; }
    const int head = p.whole * p.blocks + other;
    // tiles begin to end - 1 of keys are those that the tile of queries sees
    const int begin = first + p.first_keys<DOCUMENTS>(head, tile / 2);
    const int end = first + tile / 2 + 1;
    while (p.cut<DOCUMENTS>(block + 1) <= begin) { block++; }
    if (p.cut<DOCUMENTS>(block + 1) >= end) { return; } // one block has computed all of dQ
    float dq[SUMS / GROUP] = {};
    for (; block < p.blocks && p.cut<DOCUMENTS>(block) < end; block++) {
        if (p.cut<DOCUMENTS>(block + 1) == p.cut<DOCUMENTS>(block)) { continue; }
        // whether this block has computed a part of an earlier head, too
        const bool second = p.cut<DOCUMENTS>(block) < first;
        const float4 *from = sums_of(p, block, second) + tile * (SUMS / 4) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 sum = from[i * GROUP];
            dq[i * 4] += sum.x;
            dq[i * 4 + 1] += sum.y;
            dq[i * 4 + 2] += sum.z;
            dq[i * 4 + 3] += sum.w;
        }
    }
    write_tile(p, head, tile, dq);
}

// ---- the division of the work -------------------------------------------------------------------

// Plans the work of all thread blocks. Each block computes heads / blocks whole heads. Returns
// whether the remaining heads are shared; otherwise some blocks compute one more whole head.
bool plan_work(Parameters *p, int heads, int blocks) {
    enum { ADDING = 12 }; // cost of add_parts_kernel, in the unit of cost()
    const int others = heads % blocks, whole = p->tiles * (p->tiles + 2);
    p->blocks = blocks;
    p->whole = heads / blocks;
    // a tile of keys costs 1 for each tile of queries that sees its keys, and 1 more
    auto cost = [&](int unit) { return 2 * (p->tiles - unit % p->tiles) + 1; };
    if (others > 0 && share_units(p->cuts, others * p->tiles, blocks, cost) + ADDING < whole) {
        return true;
    }
    for (int i = 0; i <= blocks; i++) { p->cuts[i] = (uint16_t)(min(i, others) * p->tiles); }
    return false;
}

Parameters parameters(const Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                      const Bf16 *out, const float *lse, const Bf16 *qkv) {
    const int64_t N = 3 * s.H * SIZE, M = s.H * SIZE;
    Parameters p = {};
    p.q = map_sequences(qkv, s.B, s.T, N, QUERIES);
    p.kv = map_sequences(qkv, s.B, s.T, N, KEYS);
    p.d_out = map_sequences(d_out, s.B, s.T, M, QUERIES);
    p.d_kv = map_sequences(d_qkv, s.B, s.T, N, KEYS / 2);
    p.d_qkv = d_qkv;
    p.dout = d_out;
    p.out = out;
    p.lse = lse;
    if (s.documents != nullptr) {
        p.starts = s.documents;
        p.ends = s.documents + (int64_t)s.B * s.T;
        p.document_cuts = s.documents + attention_cuts_at(s, CUTS_KEYS);
    }
    p.sums = static_cast<float *>(gpu->attention_workspace);
    p.T = s.T;
    p.H = s.H;
    p.N = (int)N;
    p.tiles = divide_up(s.T, KEYS);
    return p;
}

} // namespace

// ---- launcher -----------------------------------------------------------------------------------

void attention64_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                          const Bf16 *out, const float *lse, const Bf16 *qkv) {
    Parameters p = parameters(gpu, s, d_qkv, d_out, out, lse, qkv);
    const int blocks = min(gpu->sms, (int)MAX_BLOCKS), adding = (blocks - 1) * 2 * p.tiles;
    if (s.documents != nullptr) {
        p.blocks = blocks;
        launch_with_shared(attention64_backward_kernel<true>, blocks, THREADS, sizeof(Shared),
                           gpu->stream, p);
        if (adding > 0) { launch(add_parts_kernel<true>, adding, GROUP, gpu->stream, p); }
        return;
    }
    const bool shares = plan_work(&p, s.B * s.H, blocks);
    launch_with_shared(attention64_backward_kernel<false>, blocks, THREADS, sizeof(Shared),
                       gpu->stream, p);
    if (shares && adding > 0) { launch(add_parts_kernel<false>, adding, GROUP, gpu->stream, p); }
}
