// The gradients of keys and values of causal attention inside documents, for heads of 128 on
// Hopper. A kernel of attention_queries.cu computes dQ and delta = -rowsum(dO O) beforehand.
//
//   S = QK' / sqrt(128)    P = exp(S - lse)    dP = dO V'    dS = P (dP + delta)
//   dV = P' dO             dK = dS' Q / sqrt(128)
//
// P and dS are rounded to BF16 for their matmuls; all else is FP32.
//
// A thread block computes several consecutive pieces of the work. A piece is 128 keys of a
// key/value head, 64 for each of two warpgroups. For every query head that uses these keys, TMA
// loads the queries from the diagonal to the end of the piece's last document, in tiles of 64 that
// both warpgroups read. A warpgroup computes S' and dP' by WGMMA. WGMMA's results have the register
// layout of its operands, so P' and dS' stay in registers. dV and dK are summed in registers: over
// the queries of a head, then over the heads. So each sum is computed by one block alone.
#include "attention.h"
#include "hopper.cuh"

#include <math_constants.h>

namespace {

enum {
    SIZE = 128, // channels of a head
    PARTS = 2,  // tiles of 64 channels in a head
    KEYS = 128,
    QUERIES = 64,
    TILE = 64 * FULL_ROW, // bytes of 64 rows and 64 channels
    STAGES = 3,
    THREADS = 3 * GROUP,
    // registers of a thread
    COMPUTING_REGISTERS = 240,
    LOADING_REGISTERS = 24
};

struct Shared {
    struct {
        uint8_t k[PARTS][2 * TILE], v[PARTS][2 * TILE];
    } keys[2]; // of this piece and of the next; at a piece's end, dK and dV replace them
    struct {
        uint8_t q[PARTS][TILE], d_out[PARTS][TILE];
    } stages[STAGES];
    struct {
        float lse[QUERIES], delta[QUERIES]; // lse is multiplied by -1 / log 2
    } rows[STAGES];
    Barrier full[STAGES], empty[STAGES], keys_full[2], keys_empty[2];
};
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");
static_assert(registers_suffice(LOADING_REGISTERS, COMPUTING_REGISTERS), "a block's registers");

struct Parameters {
    CUtensorMap q, kv, d_out, d_kv; // their boxes have 64, 128, 64 and 64 rows
    const float *lse, *delta;
    const int *ends, *cuts; // see attention.h
    int T, H, G;
    int tiles; // tiles of keys in a head
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Returns where the document of a key ends: one past its last token.
__device__ __forceinline__ int end_of(const Parameters &p, int b, int key) {
    return __ldg(p.ends + (int64_t)b * p.T + min(key, p.T - 1));
}

// Goes through a thread block's work. For each of the block's pieces, it calls begin(piece), then
// step(piece, head, tile) for each tile of queries that sees keys of the piece, then end(piece).
struct Piece {
    int b, g, tile;
};
template <typename BEGIN, typename STEP, typename END>
__device__ __forceinline__ void work(const Parameters &p, BEGIN begin, STEP step, END end) {
    const int last = __ldg(p.cuts + blockIdx.x + 1), heads = p.H / p.G;
#pragma unroll 1
    for (int unit = __ldg(p.cuts + blockIdx.x); unit < last; unit++) {
        const int group = unit / p.tiles;
        const Piece piece = {group / p.G, group % p.G, unit % p.tiles};
        const int tiles_end = (end_of(p, piece.b, piece.tile * KEYS + KEYS - 1) - 1) / QUERIES + 1;
        begin(piece);
#pragma unroll 1
        for (int h = piece.g * heads; h < (piece.g + 1) * heads; h++) {
#pragma unroll 1
            for (int i = 2 * piece.tile; i < tiles_end; i++) { step(piece, h, i); }
        }
        end(piece);
    }
}

// Loads the tiles in the order of their use. One lane runs this function.
__device__ __forceinline__ void load(Shared &s, const Parameters &p) {
    Stage<STAGES> stage = 0;
    uint32_t pieces_done = 0;
    work(
        p,
        [&](Piece piece) {
            auto &to = s.keys[pieces_done % 2];
            Barrier *full = &s.keys_full[pieces_done % 2];
            barrier_wait(&s.keys_empty[pieces_done % 2], pieces_done / 2 + 1);
            barrier_expect(full, sizeof(to));
            for (int i = 0; i < PARTS; i++) {
                tma_load_at(to.k[i], p.kv, full, (p.H + piece.g) * SIZE + i * 64, piece.tile * KEYS,
                            piece.b);
                tma_load_at(to.v[i], p.kv, full, (p.H + p.G + piece.g) * SIZE + i * 64,
                            piece.tile * KEYS, piece.b);
            }
        },
        [&](Piece piece, int h, int tile) {
            auto &to = s.stages[stage.at];
            Barrier *full = &s.full[stage.at];
            barrier_wait(&s.empty[stage.at], stage.round + 1);
            barrier_expect(full, sizeof(to));
            for (int i = 0; i < PARTS; i++) {
                tma_load_at(to.q[i], p.q, full, h * SIZE + i * 64, tile * QUERIES, piece.b);
                tma_load_at(to.d_out[i], p.d_out, full, h * SIZE + i * 64, tile * QUERIES, piece.b);
            }
            stage.advance(1);
        },
        [&](Piece) { pieces_done++; });
}

// Loads lse and delta of the tiles' rows. One warp runs this function. For rows beyond T, lse has a
// value that makes P 0.
__device__ __forceinline__ void load_rows(Shared &s, const Parameters &p) {
    const int lane = threadIdx.x % WARP;
    Stage<STAGES> stage = 0;
    work(
        p, [](Piece) {},
        [&](Piece piece, int h, int tile) {
            float lse[2], delta[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int query = tile * QUERIES + r * WARP + lane, row = min(query, p.T - 1);
                const int64_t at = ((int64_t)piece.b * p.H + h) * p.T + row;
                lse[r] = query < p.T ? -1.4426950408889634f * p.lse[at] : -CUDART_INF_F;
                delta[r] = p.delta[at];
            }
            auto &to = s.rows[stage.at];
            barrier_wait(&s.empty[stage.at], stage.round + 1);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                to.lse[r * WARP + lane] = lse[r];
                to.delta[r * WARP + lane] = delta[r];
            }
            __syncwarp();
            barrier_arrive(&s.full[stage.at], lane == 0);
            stage.advance(1);
        },
        [](Piece) {});
}

// Computes dK and dV of the 64 keys that warpgroup w has in each piece. A thread has two of its
// warp's 16 keys, lane / 4 and lane / 4 + 8, and two of every 8 queries or channels.
__device__ __forceinline__ void compute(Shared &s, const Parameters &p, int w) {
    const int thread = threadIdx.x % GROUP, warp = thread / WARP, lane = thread % WARP;
    const int t = lane % 4, row = warp * 16 + lane / 4;
    const float root = 0.08838834764831845f, scale = root * 1.4426950408889634f;

    float scores[32], dp[32], dv[PARTS][32], dk[PARTS][32];
    uint32_t probabilities[16], ds[16]; // operands A of WGMMAs
    Stage<STAGES> stage = 0;
    uint32_t pieces_done = 0;
    // ends of the documents of the thread's two keys, and of the warpgroup's last key
    int ends[2] = {}, last = 0;

    auto multiply = [&](float(&sums)[32], const uint8_t *keys, const void *queries) {
        const uint64_t a = wgmma_operand(keys + w * TILE), b = wgmma_operand(queries);
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i++) {
            wgmma<false, false>(sums, a + i / 4 * (2 * TILE / 16) + i % 4 * 2,
                                b + i / 4 * (TILE / 16) + i % 4 * 2, i > 0);
        }
        wgmma_commit();
    };
    auto add = [&](float(&sums)[PARTS][32], const uint32_t(&a)[16], const void *queries) {
        const uint64_t b = wgmma_transposed(queries);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i++) {
            wgmma<true>(sums[i / 4], a + i % 4 * 4, b + i / 4 * (TILE / 16) + i % 4 * 128, true);
        }
        wgmma_commit();
    };
    auto exponentiate = [&](int own, int tile) { // own: the warpgroup's tile of 64 keys
        auto &rows = s.rows[stage.at];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 lse = reinterpret_cast<const float2 *>(rows.lse)[i / 2 * 4 + t];
            scores[2 * i] = exp2_fast(fmaf(scores[2 * i], scale, lse.x));
            scores[2 * i + 1] = exp2_fast(fmaf(scores[2 * i + 1], scale, lse.y));
        }
        if (tile == own) { // on the diagonal, P is 0 for queries before the key
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const bool earlier = row + i / 2 % 2 * 8 > i / 4 * 8 + t * 2 + i % 2;
                scores[i] = earlier ? 0.0f : scores[i];
            }
        }
        // some queries are in a later document than a key
        if (__any_sync(~0u, ends[0] < (tile + 1) * QUERIES)) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const bool later = tile * QUERIES + i / 4 * 8 + t * 2 + i % 2 >= ends[i / 2 % 2];
                scores[i] = later ? 0.0f : scores[i];
            }
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            probabilities[i] = bf16_pair(scores[2 * i], scores[2 * i + 1]);
        }
    };
    auto differentiate = [&] {
        auto &rows = s.rows[stage.at];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 delta = reinterpret_cast<const float2 *>(rows.delta)[i / 2 * 4 + t];
            ds[i] = bf16_pair(scores[2 * i] * (dp[2 * i] + delta.x),
                              scores[2 * i + 1] * (dp[2 * i + 1] + delta.y));
        }
    };
    // Stores sums * factor in shared memory, in place of the keys or values `to`.
    auto store = [&](uint8_t(&to)[PARTS][2 * TILE], const float(&sums)[PARTS][32], float factor) {
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i++) {
            uint8_t *at = to[i / 4] + w * TILE + (warp * 16 + lane % 16) * FULL_ROW;
            uint32_t units[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *x = sums[i / 4] + i % 4 * 8 + n * 2;
                units[n] = bf16_pair(x[0] * factor, x[1] * factor);
            }
            store_matrices<false>(at + ((i % 4 * 2 + lane / 16) ^ lane % 8) * 16, units);
        }
    };
    work(
        p,
        [&](Piece piece) {
            const int key = piece.tile * KEYS + w * 64;
            ends[0] = end_of(p, piece.b, key + row);
            ends[1] = end_of(p, piece.b, key + row + 8);
            last = end_of(p, piece.b, key + 63);
#pragma unroll
            for (int i = 0; i < 32 * PARTS; i++) { dv[i / 32][i % 32] = dk[i / 32][i % 32] = 0.0f; }
            barrier_wait(&s.keys_full[pieces_done % 2], pieces_done / 2);
        },
        [&](Piece piece, int, int tile) {
            const int own = piece.tile * 2 + w;
            auto &keys = s.keys[pieces_done % 2];
            auto &from = s.stages[stage.at];
            barrier_wait(&s.full[stage.at], stage.round);
            if (tile >= own && tile * QUERIES < last) { // some queries see these keys
                wgmma_fence();
                multiply(scores, keys.k[0], from.q);
                multiply(dp, keys.v[0], from.d_out);
                wgmma_wait<1>();
                pin(scores);
                exponentiate(own, tile);
                wgmma_wait<0>();
                pin(dp);
                add(dv, probabilities, from.d_out);
                differentiate();
                add(dk, ds, from.q);
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < PARTS; i++) {
                    pin(dv[i]);
                    pin(dk[i]);
                }
                pin(probabilities);
                pin(ds);
            }
            __syncwarp(); // all lanes have read the rows
            barrier_arrive(&s.empty[stage.at], lane == 0);
            stage.advance(1);
        },
        [&](Piece piece) {
            auto &keys = s.keys[pieces_done % 2];
            const int key = piece.tile * KEYS + w * 64;
            group_barrier(w, GROUP); // no warp reads k and v any more, which dK and dV replace
            store(keys.k, dk, root);
            store(keys.v, dv, 1.0f);
            show_to_tma();
            group_barrier(w, GROUP);
            if (thread == 0) {
                for (int i = 0; i < PARTS && key < p.T; i++) {
                    tma_store_at(p.d_kv, keys.k[i] + w * TILE, (p.H + piece.g) * SIZE + i * 64, key,
                                 piece.b);
                    tma_store_at(p.d_kv, keys.v[i] + w * TILE,
                                 (p.H + p.G + piece.g) * SIZE + i * 64, key, piece.b);
                }
                stores_commit();
                stores_wait_read<0>();
            }
            __syncwarp();
            barrier_arrive(&s.keys_empty[pieces_done % 2], thread == 0);
            pieces_done++;
        });
    if (thread == 0) { stores_wait(); }
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
    attention128_keys_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 2);
            barrier_init(&s.empty[i], 2 * WARPS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(&s.keys_full[i], 1);
            barrier_init(&s.keys_empty[i], 2);
        }
        barriers_ready();
    }
    __syncthreads();
    if (group == 0) {
        set_registers<LOADING_REGISTERS, false>();
        if (threadIdx.x == 0) { load(s, p); }
        if (threadIdx.x / WARP == 1) { load_rows(s, p); }
    } else {
        set_registers<COMPUTING_REGISTERS, true>();
        compute(s, p, group - 1);
    }
#endif
}

} // namespace

void attention128_keys(const Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                       const float *lse, const float *delta, const Bf16 *qkv) {
    const int64_t N = (int64_t)(s.H + 2 * s.G) * SIZE;
    Parameters p = {};
    p.q = map_sequences(qkv, s.B, s.T, N, QUERIES);
    p.kv = map_sequences(qkv, s.B, s.T, N, KEYS);
    p.d_out = map_sequences(d_out, s.B, s.T, (int64_t)s.H * SIZE, QUERIES);
    p.d_kv = map_sequences(d_qkv, s.B, s.T, N, KEYS / 2);
    p.lse = lse;
    p.delta = delta;
    p.ends = s.documents + (int64_t)s.B * s.T;
    p.cuts = s.documents + attention_cuts_at(s, CUTS_KEYS);
    p.T = s.T;
    p.H = s.H;
    p.G = s.G;
    p.tiles = divide_up(s.T, KEYS);
    launch_with_shared(attention128_keys_kernel, min(gpu->sms, (int)ATTENTION_BLOCKS), THREADS,
                       sizeof(Shared), gpu->stream, p);
}
