// Causal attention on Hopper, in kernels whose warpgroups each take some queries: the forward pass
// for heads of 64 and of 128, and the queries' gradient for heads of 128 with documents.
//
//   S = QK' / sqrt(size)    lse = log(rowsum(exp(S)))    O = exp(S - lse) V
//   dP = dO V'              delta = -rowsum(dO O)        dS = exp(S - lse) (dP + delta)
//   dQ = dS K / sqrt(size)
//
// The forward pass uses exp(S - m) with a number m for each row, because lse is known only at the
// end. exp(S - m) is rounded to BF16 for its matmul with V, and dS for its matmul with K; all else
// is FP32. At first, m is a row's maximum over the first tile of keys that the row sees. Later m is
// raised to the maximum only if exponentials become large. So for most tiles no maximum is
// computed. A row's sums are added in the order of the keys.
//
// A thread block computes several consecutive pieces of the work. A piece is up to two, three or
// four tiles of 64 queries of a head: one for each computing warpgroup. The warpgroups take turns
// in computing the piece's last tile, because that tile sees the most keys. TMA loads the keys up
// to the diagonal, in tiles of 64 that all warpgroups read. By WGMMA, a warpgroup computes the
// scores of a tile of keys, and adds exp(S - m) V or dS K of the previous tile to its sums. While
// one warpgroup computes exponentials, the others use the tensor cores. With documents, tiles of
// keys before the piece's first document are not loaded, and a warpgroup skips the tiles before its
// own first document. The host then divides the work in parts of about equal cost. (For heads of
// 64, two or three warpgroups that kept the queries in registers and computed the next scores
// during the exponentials were slower on an H200: they took 0.26 to 0.31 ms instead of 0.24 for 64
// sequences of 1024 tokens and 12 heads.)
#include "attention.h"
#include "hopper.cuh"

#include <math_constants.h>

namespace {

enum {
    ROWS = 64, // queries that a warpgroup computes at a time
    KEYS = 64,
    TILE = ROWS * FULL_ROW, // bytes of 64 rows and 64 channels
    LOADING_REGISTERS = 24
};

// The constants of a kernel for heads of SIZE channels. With GRADIENT, the kernel computes the
// queries' gradient, otherwise the forward pass.
template <int SIZE_, bool DOCUMENTS_, bool GRADIENT_> struct Kind {
    enum {
        SIZE = SIZE_,
        DOCUMENTS = DOCUMENTS_,
        GRADIENT = GRADIENT_,
        PARTS = SIZE / 64, // tiles of 64 channels in a head
        GROUPS = SIZE == 64 ? 4
                 : GRADIENT ? 2
                            : 3, // warpgroups that compute
        STAGES = SIZE == 64 ? 8
                 : GRADIENT ? 3
                            : 4,
        QUERIES = GROUPS * ROWS,
        THREADS = (GROUPS + 1) * GROUP,
        COMPUTING_REGISTERS = SIZE == 64 ? 112
                              : GRADIENT ? 240
                                         : 160,
        OUT_IS_Q = SIZE > 64 // results take the memory of the piece's queries
    };
    struct Shared {
        struct {
            uint8_t k[PARTS][TILE], v[PARTS][TILE];
        } stages[STAGES];
        // The queries, with GRADIENT also dO, of this piece and of the next. The results are in
        // q[2] or, with OUT_IS_Q, in place of the queries.
        uint8_t q[OUT_IS_Q ? 2 : 3][GROUPS][GRADIENT ? 2 * PARTS : PARTS][TILE];
        Barrier full[STAGES], empty[STAGES], q_full[2][GROUPS], q_empty[2][GROUPS];
    };
    static_assert(sizeof(Shared) <= 232448, "a block's shared memory");
    static_assert(registers_suffice(LOADING_REGISTERS, COMPUTING_REGISTERS, GROUPS),
                  "a block's registers");
};

struct Parameters {
    CUtensorMap qkv, result; // their boxes have 64 and 16 rows
    float *lse;
    const int *starts, *cuts; // see attention.h; NULL without documents
    int T, H;
    int heads;  // query heads of all sequences
    int tiles;  // tiles of 64 queries or keys in a head
    int pieces; // pieces in a head; a piece has several tiles
    int G;
    // only with GRADIENT:
    CUtensorMap d_out;
    const Bf16 *dout, *out;
    float *delta; // [heads,T]: -rowsum(dO O), which attention128_keys.cu reads, too
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The piece that a thread block is computing. A block computes consecutive pieces.
template <typename K> struct Work {
    int tiles, pieces; // tiles and pieces in a head
    int head, piece, pieces_left;
    int number; // how many pieces this block has finished

    // Returns the number of a block's first piece. The work of all blocks costs about the same.
    static __device__ int first_of(const Parameters &p, int block) {
        if (K::DOCUMENTS) { return __ldg(p.cuts + block); }
        // a tile of keys costs 1, and beginning a piece costs 2
        const auto cost = [&](int i) { return (i + 1) * p.tiles / p.pieces + 2; };
        int all = 0, at = 0;
        for (int i = 0; i < p.pieces; i++) { all += cost(i); }
        const int64_t before = (int64_t)all * p.heads * block / gridDim.x;
        int rest = (int)(before % all);
        while (rest > cost(at) / 2) { rest -= cost(at++); }
        return (int)(before / all) * p.pieces + at;
    }
    __device__ Work(const Parameters &p) : tiles(p.tiles), pieces(p.pieces), number(0) {
        const int first = first_of(p, blockIdx.x);
        head = first / pieces;
        piece = first % pieces;
        pieces_left = first_of(p, blockIdx.x + 1) - first;
    }
    // Returns one past the piece's last tile of queries. Attention is causal, so this is also one
    // past the last tile of keys that the piece sees.
    __device__ int keys(void) const {
        return (piece + 1) * tiles / pieces;
    }
    // Returns the first tile of keys that a tile of queries sees.
    __device__ int first(const Parameters &p, int tile) const {
        return K::DOCUMENTS ? __ldg(p.starts + (int64_t)(head / p.H) * p.T + tile * ROWS) / KEYS
                            : 0;
    }
    // Returns the first tile of keys that the piece sees.
    __device__ int first(const Parameters &p) const {
        return first(p, piece * tiles / pieces);
    }
    // Returns the tile of queries of warpgroup w. If the result is keys() or above, the warpgroup
    // has no tile.
    __device__ int tile(int w) const {
        return piece * tiles / pieces + (w + number) % K::GROUPS;
    }
    __device__ void next(void) {
        pieces_left--;
        number++;
        piece++;
        if (piece == pieces) {
            piece = 0;
            head++;
        }
    }
};

// Loads queries, keys and values in the order of their use. One lane runs this function.
template <typename K>
__device__ __forceinline__ void load(typename K::Shared &s, const Parameters &p) {
    constexpr int SIZE = K::SIZE;
    Stage<K::STAGES> stage = 0;
    uint32_t queries[K::GROUPS] = {};
    for (Work<K> work(p); work.pieces_left > 0; work.next()) {
        const int b = work.head / p.H, h = work.head % p.H;
        const int g = h / (p.H / p.G);
#pragma unroll
        for (int w = 0; w < K::GROUPS; w++) {
            if (work.tile(w) >= work.keys()) { continue; }
            const int at = queries[w] % 2;
            barrier_wait(&s.q_empty[at][w], queries[w]++ / 2 + 1);
            barrier_expect(&s.q_full[at][w], sizeof(s.q[at][w]));
#pragma unroll
            for (int i = 0; i < K::PARTS; i++) {
                tma_load_at(s.q[at][w][i], p.qkv, &s.q_full[at][w], h * SIZE + i * 64,
                            work.tile(w) * ROWS, b);
                if constexpr (K::GRADIENT) {
                    tma_load_at(s.q[at][w][K::PARTS + i], p.d_out, &s.q_full[at][w],
                                h * SIZE + i * 64, work.tile(w) * ROWS, b);
                }
            }
        }
        for (int j = work.first(p); j < work.keys(); j++, stage.advance(1)) {
            auto &to = s.stages[stage.at];
            Barrier *full = &s.full[stage.at];
            barrier_wait(&s.empty[stage.at], stage.round + 1);
            barrier_expect(full, sizeof(to));
#pragma unroll
            for (int i = 0; i < K::PARTS; i++) {
                tma_load_at(to.k[i], p.qkv, full, (p.H + g) * SIZE + i * 64, j * KEYS, b);
                tma_load_at(to.v[i], p.qkv, full, (p.H + p.G + g) * SIZE + i * 64, j * KEYS, b);
            }
        }
    }
}

// Does the work of warpgroup w. A thread has two of its warp's 16 rows, lane / 4 and lane / 4 + 8,
// and two of every 8 columns.
template <typename K>
__device__ __forceinline__ void compute(typename K::Shared &s, const Parameters &p, int w) {
    constexpr int PARTS = K::PARTS;
    constexpr bool DOCUMENTS = K::DOCUMENTS;
    const int warp = threadIdx.x % GROUP / WARP, lane = threadIdx.x % WARP;
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
    const float root = K::SIZE == 64 ? 0.125f : 0.08838834764831845f; // 1 / sqrt(SIZE)
    const float scale = root * 1.4426950408889634f;
    // m is raised if a thread's exponentials in a row of a tile add up to this or more
    enum { LARGE = 1 << 12 };
    // Returns the address of the lane's 16 bytes when its warp stores columns 16 i to 16 i + 15 of
    // 16 rows.
    auto address = [&](uint8_t *rows, int i) {
        return rows + (warp * 16 + lane % 16) * FULL_ROW + ((i * 2 + lane / 16) ^ lane % 8) * 16;
    };
    float scores[32], dp[32], out[PARTS][32], m[2] = {}, sums[2], delta[2];
    uint32_t probabilities[16]; // operand A of WGMMAs; with GRADIENT it is dS
    Stage<K::STAGES> stage = 0;
    uint32_t queries = 0; // how many tiles of queries this warpgroup has finished

    auto release = [&](int at) { barrier_arrive(&s.empty[at], lane == 0); };
    auto multiply_scores = [&] {
        const uint64_t q = wgmma_operand(s.q[queries % 2][w]);
        const uint64_t k = wgmma_operand(s.stages[stage.at].k);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i++) {
            const int at = i / 4 * (TILE / 16) + i % 4 * 2;
            wgmma<false, false>(scores, q + at, k + at, i > 0);
        }
        if constexpr (K::GRADIENT) {
            const uint64_t d_out = wgmma_operand(s.q[queries % 2][w][PARTS]);
            const uint64_t v = wgmma_operand(s.stages[stage.at].v);
#pragma unroll
            for (int i = 0; i < 4 * PARTS; i++) {
                const int at = i / 4 * (TILE / 16) + i % 4 * 2;
                wgmma<false, false>(dp, d_out + at, v + at, i > 0);
            }
        }
        wgmma_commit();
    };
    auto multiply_values = [&](int at) { // with GRADIENT, multiplies by K instead of V
        const uint64_t v = wgmma_transposed(K::GRADIENT ? s.stages[at].k : s.stages[at].v);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i++) {
            wgmma<true>(out[i / 4], probabilities + i % 4 * 4,
                        v + i / 4 * (TILE / 16) + i % 4 * 128, true);
        }
        wgmma_commit();
    };
    auto pin_out = [&] {
#pragma unroll
        for (auto &part : out) { pin(part); }
    };
    auto mask = [&] { // hides later keys in the tile on the diagonal
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const bool later = i / 4 * 8 + i % 2 + column > row + i / 2 % 2 * 8;
            scores[i] = later ? -CUDART_INF_F : scores[i];
        }
    };
    int starts[2]; // where the documents of the thread's rows begin
    auto mask_documents = [&](int j) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const bool before = j * KEYS + i / 4 * 8 + i % 2 + column < starts[i / 2 % 2];
            scores[i] = before ? -CUDART_INF_F : scores[i];
        }
    };
    auto raise_m = [&] { // raises m to the rows' maxima, and rescales the sums
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = m[r];
#pragma unroll
            for (int i = 0; i < 16; i++) { most = fmaxf(most, scores[i / 2 * 4 + r * 2 + i % 2]); }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float factor = exp2_fast((m[r] - most) * scale);
            m[r] = most;
            sums[r] *= factor;
#pragma unroll
            for (int i = 0; i < 16 * PARTS; i++) {
                out[i / 16][i % 16 / 2 * 4 + r * 2 + i % 2] *= factor;
            }
        }
    };
    auto exponentiate = [&](float(&more)[2]) {
        more[0] = more[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = i % 2;
            const float x = exp2_fast(fmaf(scores[2 * i], scale, -m[r] * scale));
            const float y = exp2_fast(fmaf(scores[2 * i + 1], scale, -m[r] * scale));
            more[r] += x + y;
            probabilities[i] = bf16_pair(x, y);
        }
    };
    auto differentiate = [&] { // here m is the rows' lse / log 2
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = i % 2;
            const float x = exp2_fast(fmaf(scores[2 * i], scale, -m[r]));
            const float y = exp2_fast(fmaf(scores[2 * i + 1], scale, -m[r]));
            probabilities[i] = bf16_pair(x * (dp[2 * i] + delta[r]),
                                         y * (dp[2 * i + 1] + delta[r]));
        }
    };
    // With GRADIENT: sets m to lse / log 2 of the tile's rows, and computes their delta. Both are 0
    // beyond T, where Q and dO are 0, too.
    auto compute_delta = [&](int head, int tile) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int query = tile * ROWS + row + r * 8;
            const bool inside = query < p.T;
            const int64_t token = head / p.H * (int64_t)p.T + (inside ? query : 0);
            const int64_t from = (token * p.H + head % p.H) * K::SIZE;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * PARTS; i++) {
                const Floats8 x = load8(p.dout + from, i * 4 + lane % 4),
                              y = load8(p.out + from, i * 4 + lane % 4);
#pragma unroll
                for (int n = 0; n < VEC; n++) { sum += x.v[n] * y.v[n]; }
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int64_t at = (int64_t)head * p.T + query;
            m[r] = inside ? 1.4426950408889634f * p.lse[at] : 0.0f;
            delta[r] = inside ? -sum : 0.0f;
            if (inside && lane % 4 == 0) { p.delta[at] = -sum; }
        }
    };
    // With OUT_IS_Q: frees the memory of the previous tile. Call it after lane 0 has waited until
    // TMA has read that tile's results.
    auto free_results = [&] {
        __syncwarp();
        if (queries > 0) { barrier_arrive(&s.q_empty[(queries - 1) % 2][w], lane == 0); }
    };

    for (Work<K> work(p); work.pieces_left > 0; work.next()) {
        const int tile = work.tile(w), keys = work.keys();
        // one past the last tile of keys that this tile of queries sees; 0: the warpgroup is idle
        const int own = tile < keys ? tile + 1 : 0;
        int j = work.first(p);
        auto pass_by = [&](int end) { // skips tiles of keys that the queries do not see
            for (; j < end; j++, stage.advance(1)) {
                barrier_wait(&s.full[stage.at], stage.round);
                __syncwarp(); // otherwise a lane could reach the barrier two phases late
                release(stage.at);
            }
        };
        if (own > 0) {
            const int begin = work.first(p, tile);
            if (DOCUMENTS) {
                const int *from = p.starts + (int64_t)(work.head / p.H) * p.T;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    starts[r] = __ldg(from + min(tile * ROWS + row + r * 8, p.T - 1));
                }
            }
            pass_by(begin);
            barrier_wait(&s.q_full[queries % 2][w], queries / 2);
            if constexpr (!K::GRADIENT) {
                // With documents a row may see no key in a tile. Its m is then finite, so that the
                // exponentials are 0 and not NaN.
                m[0] = m[1] = DOCUMENTS ? -1e30f : -CUDART_INF_F;
                sums[0] = sums[1] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 32 * PARTS; i++) { out[i / 32][i % 32] = 0.0f; }
            int before = stage.at;
#pragma unroll 1
            for (; j < own; j++) {
                barrier_wait(&s.full[stage.at], stage.round);
                multiply_scores();
                if (j > begin) { multiply_values(before); }
                if constexpr (K::GRADIENT) {
                    if (j == begin) { compute_delta(work.head, tile); }
                }
                wgmma_wait<0>();
                pin(scores);
                if constexpr (K::GRADIENT) { pin(dp); }
                pin_out();
                pin(probabilities);
                if (j > begin) { release(before); }
                if (j == tile) { mask(); }
                bool raises_m = j == begin;
                if (DOCUMENTS) {
                    const int last = __shfl_sync(~0u, starts[1], WARP - 1);
                    raises_m = last >= j * KEYS; // some row sees no key before this tile
                    if (last > j * KEYS) { mask_documents(j); }
                }
                if constexpr (K::GRADIENT) {
                    differentiate();
                } else {
                    float more[2];
                    if (!raises_m) {
                        exponentiate(more);
                        // the sum is too large, or NaN
                        raises_m = __any_sync(~0u, !(fmaxf(more[0], more[1]) < LARGE));
                    }
                    if (raises_m) {
                        raise_m();
                        exponentiate(more);
                    }
                    sums[0] += more[0];
                    sums[1] += more[1];
                }
                if (K::OUT_IS_Q && j == begin) {
                    if (lane == 0) { stores_wait_read<0>(); }
                    free_results();
                }
                before = stage.at;
                stage.advance(1);
            }
            multiply_values(before);
            wgmma_wait<0>();
            pin_out();
            pin(probabilities);
            if (!K::OUT_IS_Q) { barrier_arrive(&s.q_empty[queries % 2][w], lane == 0); }
            queries++;
            release(before);
        }
        pass_by(keys);
        if (own == 0) { continue; }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if constexpr (K::GRADIENT) {
                sums[r] = root;
            } else {
                sums[r] += __shfl_xor_sync(~0u, sums[r], 1);
                sums[r] += __shfl_xor_sync(~0u, sums[r], 2);
                const int query = tile * ROWS + row + r * 8;
                if (lane % 4 == 0 && query < p.T) {
                    p.lse[(int64_t)work.head * p.T + query] = m[r] * root + __logf(sums[r]);
                }
                sums[r] = reciprocal_fast(sums[r]);
            }
        }
        auto &results = s.q[K::OUT_IS_Q ? (queries - 1) % 2 : 2][w];
        if constexpr (K::OUT_IS_Q) {
            group_barrier(w, GROUP); // no warp reads the queries any more, which results replace
        } else {
            if (lane == 0) { stores_wait_read<0>(); } // TMA has read the previous piece's results
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < 4 * PARTS; i++) {
            uint32_t units[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *x = out[i / 4] + i % 4 * 8 + n * 2;
                units[n] = bf16_pair(x[0] * sums[n % 2], x[1] * sums[n % 2]);
            }
            store_matrices<false>(address(results[i / 4], i % 4), units);
        }
        show_to_tma();
        __syncwarp();
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                tma_store_at(p.result, results[i] + warp * 16 * FULL_ROW,
                             work.head % p.H * K::SIZE + i * 64, tile * ROWS + warp * 16,
                             work.head / p.H);
            }
            stores_commit();
        }
        __syncwarp();
    }
    if (lane == 0) { stores_wait(); }
    if (K::OUT_IS_Q) { free_results(); }
}

#endif

template <typename K>
__global__ void __launch_bounds__(K::THREADS, 1)
    attention_queries_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &s = *reinterpret_cast<typename K::Shared *>(memory);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < K::STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], K::GROUPS * WARPS);
        }
        for (int w = 0; w < K::GROUPS; w++) {
            for (int i = 0; i < 2; i++) {
                barrier_init(&s.q_full[i][w], 1);
                barrier_init(&s.q_empty[i][w], WARPS);
            }
        }
        barriers_ready();
    }
    __syncthreads();
    if (group == 0) {
        set_registers<LOADING_REGISTERS, false>();
        if (threadIdx.x == 0) { load<K>(s, p); }
    } else {
        set_registers<K::COMPUTING_REGISTERS, true>();
        compute<K>(s, p, group - 1);
    }
#endif
}

template <int SIZE, bool DOCUMENTS, bool GRADIENT>
void launch_queries(const Gpu *gpu, AttentionShape s, const Bf16 *qkv, Parameters p) {
    typedef Kind<SIZE, DOCUMENTS, GRADIENT> K;
    p.qkv = map_sequences(qkv, s.B, s.T, (s.H + 2 * s.G) * SIZE, ROWS);
    p.T = s.T;
    p.H = s.H;
    p.G = s.G;
    p.heads = s.B * s.H;
    p.tiles = divide_up(s.T, KEYS);
    p.pieces = divide_up(s.T, K::QUERIES);
    int blocks = min(gpu->sms, p.heads * p.pieces);
    if (DOCUMENTS) {
        p.starts = s.documents;
        p.cuts = s.documents + attention_cuts_at(s, GRADIENT ? CUTS_QUERIES : CUTS_FORWARD);
        blocks = min(gpu->sms, (int)ATTENTION_BLOCKS);
    }
    launch_with_shared(attention_queries_kernel<K>, blocks, K::THREADS, sizeof(typename K::Shared),
                       gpu->stream, p);
}

} // namespace

// ---- the division of the work -------------------------------------------------------------------

namespace {

// Computes the cost of each piece of a head's queries: 1 for each tile of keys that it sees, and 2
// more. starts[t] is where the document of the sequence's token t begins.
void cost_pieces(int T, int pieces, const int *starts, int *costs) {
    const int tiles = divide_up(T, KEYS);
    for (int i = 0; i < pieces; i++) {
        costs[i] = (i + 1) * tiles / pieces - starts[i * tiles / pieces * ROWS] / KEYS + 2;
    }
}

// Computes the cost of each tile of 128 keys of a head in the backward pass: 1 for each 64 queries
// from the diagonal to the end of the tile's last document, and 1 more. starts[t] is where the
// document of the sequence's token t begins.
void cost_keys(int tiles, const int *starts, int *costs) {
    for (int j = 0, end = 0; j < tiles; j++) {
        end = max(end, j + 1);
        while (end < tiles && starts[end * 128] / 128 <= j) { end++; }
        costs[j] = 2 * (end - j) + 1;
    }
}

} // namespace

size_t attention_own_workspace(AttentionShape s) {
    if (s.D == 64 && s.H == s.G &&
        s.T <= ATTENTION64_MAX_T) { // each block has two sets of sums of dQ
        return 2 * ATTENTION_BLOCKS * (size_t)round_up64(s.T, 128) * 64 * sizeof(float);
    }
    return s.D == 128 ? (size_t)s.B * s.H * s.T * sizeof(float) : 0; // delta
}

bool attention_own_serves(const Gpu *gpu, AttentionShape s, bool backward) {
    const bool in_domain = (s.D == 64 || s.D == 128) && s.H % s.G == 0 && s.T <= ATTENTION_MAX_T;
    const bool gradient = attention_own_workspace(s) > 0 && (s.D == 64 || s.documents != nullptr);
    return in_domain && (gradient || !backward) &&
           runs_on_hopper(gpu, attention_queries_kernel<Kind<64, false, false>>);
}

void attention_own_check(const Gpu *gpu, AttentionShape s, bool backward) {
    if (!attention_own_serves(gpu, s, backward)) {
        die("attention: no %s kernel of our own for T %d, %d/%d heads of %d%s on this device",
            backward ? "backward" : "forward", s.T, s.H, s.G, s.D,
            s.documents != nullptr ? ", documents," : "");
    }
    const size_t bytes = backward ? attention_own_workspace(s) : 0;
    if (gpu->attention_bytes < bytes) {
        die("attention: %zu bytes of workspace, it needs %zu", gpu->attention_bytes, bytes);
    }
}

void attention_share_work(const Gpu *gpu, AttentionShape s, int *documents) {
    const int blocks = min(gpu->sms, (int)ATTENTION_BLOCKS), key_heads = s.D == 64 ? s.H : s.G;
    s.documents = documents;
    if (!attention_own_serves(gpu, s, false)) { return; }
    int *ends = documents + (int64_t)s.B * s.T;
    for (int64_t i = (int64_t)s.B * s.T - 1; i >= 0; i--) {
        const int t = (int)(i % s.T);
        ends[i] = t == s.T - 1 || documents[i + 1] != documents[i] ? t + 1 : ends[i + 1];
    }
    // Writes a kernel's cuts. Each sequence has `heads` heads, and each head has `pieces` pieces.
    auto share = [&](AttentionCuts kind, int heads, int pieces, auto costs_of) {
        int *costs = static_cast<int *>(calloc_or_die((size_t)s.B * pieces, sizeof(int)));
        int *cuts = documents + attention_cuts_at(s, kind), units = s.B * heads * pieces;
        auto cost = [&](int unit) {
            return costs[unit / (heads * pieces) * pieces + unit % pieces];
        };
        for (int b = 0; b < s.B; b++) {
            costs_of(documents + (int64_t)b * s.T, costs + (int64_t)b * pieces);
        }
        share_units(cuts, units, blocks, cost);
        free(costs);
    };
    auto share_queries = [&](AttentionCuts kind, int queries) {
        const int pieces = divide_up(s.T, queries);
        share(kind, s.H, pieces,
              [&](const int *starts, int *costs) { cost_pieces(s.T, pieces, starts, costs); });
    };
    if (s.D == 64) {
        share_queries(CUTS_FORWARD, Kind<64, true, false>::QUERIES);
    } else {
        share_queries(CUTS_FORWARD, Kind<128, true, false>::QUERIES);
    }
    if (!attention_own_serves(gpu, s, true)) { return; }
    const int tiles = divide_up(s.T, 128);
    share(CUTS_KEYS, key_heads, tiles,
          [&](const int *starts, int *costs) { cost_keys(tiles, starts, costs); });
    if (s.D == 128) { share_queries(CUTS_QUERIES, Kind<128, true, true>::QUERIES); }
}

// ---- launchers ----------------------------------------------------------------------------------

void attention_own_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    attention_own_check(gpu, s, false);
    Parameters p = {};
    p.result = map_sequences(out, s.B, s.T, (int64_t)s.H * s.D, 16);
    p.lse = lse;
    const bool documents = s.documents != nullptr;
    auto of_64 = documents ? launch_queries<64, true, false> : launch_queries<64, false, false>;
    auto of_128 = documents ? launch_queries<128, true, false> : launch_queries<128, false, false>;
    (s.D == 64 ? of_64 : of_128)(gpu, s, qkv, p);
}

void attention_own_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv) {
    attention_own_check(gpu, s, true);
    if (s.D == 64) {
        attention64_backward(gpu, s, d_qkv, d_out, out, lse, qkv);
        return;
    }
    float *delta = static_cast<float *>(gpu->attention_workspace);
    attention128_queries(gpu, s, d_qkv, delta, d_out, out, lse, qkv);
    attention128_keys(gpu, s, d_qkv, d_out, lse, delta, qkv);
}

void attention128_queries(const Gpu *gpu, AttentionShape s, Bf16 *d_qkv, float *delta,
                          const Bf16 *d_out, const Bf16 *out, const float *lse, const Bf16 *qkv) {
    Parameters p = {};
    p.result = map_sequences(d_qkv, s.B, s.T, (int64_t)(s.H + 2 * s.G) * s.D, 16);
    p.d_out = map_sequences(d_out, s.B, s.T, (int64_t)s.H * s.D, ROWS);
    p.lse = const_cast<float *>(lse);
    p.dout = d_out;
    p.out = out;
    p.delta = delta;
    launch_queries<128, true, true>(gpu, s, qkv, p);
}
