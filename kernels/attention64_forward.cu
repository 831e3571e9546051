// The forward pass of causal attention for heads of 64 on Hopper.
//
//   S = QK' / 8    lse = log(rowsum(exp(S)))    O = exp(S - lse) V
//
// exp(S - m) is rounded to BF16 for its product with V; all else is FP32. m is the row's maximum
// over the first tile of keys, and follows the maximum only where exponentials become large, so
// that most tiles need no maximum. A row's sums have the order of its keys.
//
// A block computes a run of pieces, one after another. A piece is up to four tiles of 64 of a
// head's queries, one for each of four warpgroups, which take turns in having the last one: it
// meets most keys. The keys up to the diagonal pass in tiles of 64, loaded by TMA for all. A
// warpgroup computes a tile's scores, and adds the values of the tile before, by WGMMA. While it
// computes exponentials, the others have the tensor cores. Of documents that are packed into a
// sequence, tiles of keys before the piece's first document do not pass, and a warpgroup passes by
// those before its own first one; all blocks then have parts of about equal cost, which the host
// cuts. (Two or three warpgroups with the
// queries in registers, and the next scores computed beside the exponentials, were slower on an
// H200: 0.26 to 0.31 ms against 0.24 at 64 x 1024 and 12 heads.)
#include "attention.h"
#include "hopper.cuh"

#include <math_constants.h>

namespace {

enum {
    SIZE = 64, // channels of a head: FULL_ROW bytes
    ROWS = 64, // queries of a warpgroup
    KEYS = 64,
    GROUPS = 4, // warpgroups that compute
    QUERIES = GROUPS * ROWS,
    STAGES = 8,
    THREADS = (GROUPS + 1) * GROUP,
    LOADING_REGISTERS = 24, // registers of a thread
    COMPUTING_REGISTERS = 112
};

struct Shared {
    struct {
        uint8_t k[KEYS * FULL_ROW], v[KEYS * FULL_ROW];
    } stages[STAGES];
    uint8_t q[2][GROUPS][ROWS * FULL_ROW]; // queries of this piece and of the next
    uint8_t out[GROUPS][ROWS * FULL_ROW];
    Barrier full[STAGES], empty[STAGES], q_full[2][GROUPS], q_empty[2][GROUPS];
};
static_assert(sizeof(Shared) <= 232448, "a block's shared memory");
static_assert(registers_suffice(LOADING_REGISTERS, COMPUTING_REGISTERS, GROUPS),
              "a block's registers");

struct Parameters {
    CUtensorMap qkv, out; // boxes of 64 and of 16 rows
    float *lse;
    const int *starts, *cuts; // attention.h; NULL without documents
    int T, H, heads;          // heads: of all sequences
    int tiles, pieces;        // in a head: tiles of 64 queries or keys, pieces of up to four tiles
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A block's pieces, one after another.
template <bool DOCUMENTS> struct Work {
    int tiles, pieces; // how many of each a head has
    int head, piece, left;
    int number; // how many pieces this block has had before

    // The number of the first piece of a block. All blocks have about as many tiles of keys.
    static __device__ int first_of(const Parameters &p, int block) {
        if (DOCUMENTS) { return __ldg(p.cuts + block); }
        const auto cost = [&](int i) { return (i + 1) * p.tiles / p.pieces + 2; }; // 2: to begin
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
        left = first_of(p, blockIdx.x + 1) - first;
    }
    // The tiles of keys that the piece meets, which end where its tiles of queries do.
    __device__ int keys(void) const {
        return (piece + 1) * tiles / pieces;
    }
    // The first tile of keys that a tile of queries meets.
    __device__ int first(const Parameters &p, int tile) const {
        return DOCUMENTS ? __ldg(p.starts + (int64_t)(head / p.H) * p.T + tile * ROWS) / KEYS : 0;
    }
    // The first tile of keys that the piece meets.
    __device__ int first(const Parameters &p) const {
        return first(p, piece * tiles / pieces);
    }
    // The tile of queries of warpgroup w, which has none once this reaches keys().
    __device__ int tile(int w) const {
        return piece * tiles / pieces + (w + number) % GROUPS;
    }
    __device__ void next(void) {
        left--;
        number++;
        piece++;
        if (piece == pieces) {
            piece = 0;
            head++;
        }
    }
};

// One lane loads what the warpgroups need, in the order of its use.
template <bool DOCUMENTS> __device__ __forceinline__ void load(Shared &s, const Parameters &p) {
    Stage<STAGES> stage = 0;
    uint32_t queries[GROUPS] = {};
    for (Work<DOCUMENTS> work(p); work.left > 0; work.next()) {
        const int b = work.head / p.H, h = work.head % p.H;
#pragma unroll
        for (int w = 0; w < GROUPS; w++) {
            if (work.tile(w) >= work.keys()) { continue; }
            const int at = queries[w] % 2;
            barrier_wait(&s.q_empty[at][w], queries[w]++ / 2 + 1);
            barrier_expect(&s.q_full[at][w], sizeof(s.q[at][w]));
            tma_load_at(s.q[at][w], p.qkv, &s.q_full[at][w], h * SIZE, work.tile(w) * ROWS, b);
        }
        for (int j = work.first(p); j < work.keys(); j++, stage.advance(1)) {
            auto &to = s.stages[stage.at];
            Barrier *full = &s.full[stage.at];
            barrier_wait(&s.empty[stage.at], stage.round + 1);
            barrier_expect(full, sizeof(to));
            tma_load_at(to.k, p.qkv, full, (p.H + h) * SIZE, j * KEYS, b);
            tma_load_at(to.v, p.qkv, full, (2 * p.H + h) * SIZE, j * KEYS, b);
        }
    }
}

// The work of warpgroup w. A thread has two of its warp's 16 rows, lane / 4 and lane / 4 + 8, and
// two of every 8 columns.
template <bool DOCUMENTS>
__device__ __forceinline__ void compute(Shared &s, const Parameters &p, int w) {
    const int warp = threadIdx.x % GROUP / WARP, lane = threadIdx.x % WARP;
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
    const float scale = 0.125f * 1.4426950408889634f;
    enum { LARGE = 1 << 12 }; // limit for the sum of a thread's exponentials in a row of a tile

    // The lane's 16 bytes of 16 x 16 BF16 of the warp's rows.
    auto place = [&](uint8_t *rows, int i) {
        return rows + (warp * 16 + lane % 16) * FULL_ROW + ((i * 2 + lane / 16) ^ lane % 8) * 16;
    };
    float scores[32], out[32], m[2] = {}, sums[2];
    uint32_t probabilities[16]; // A of WGMMAs
    Stage<STAGES> stage = 0;
    uint32_t queries = 0; // how many tiles this warpgroup has begun

    auto release = [&](int at) { barrier_arrive(&s.empty[at], lane == 0); };
    auto multiply_scores = [&] {
        const uint64_t q = wgmma_operand(s.q[queries % 2][w]);
        const uint64_t k = wgmma_operand(s.stages[stage.at].k);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) { wgmma<false, false>(scores, q + 2 * i, k + 2 * i, i > 0); }
        wgmma_commit();
    };
    auto multiply_values = [&](int at) {
        const uint64_t v = wgmma_transposed(s.stages[at].v);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) { wgmma<true>(out, probabilities + 4 * i, v + 128 * i, true); }
        wgmma_commit();
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
    auto follow = [&] { // m becomes the maximum
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
            for (int i = 0; i < 16; i++) { out[i / 2 * 4 + r * 2 + i % 2] *= factor; }
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

    for (Work<DOCUMENTS> work(p); work.left > 0; work.next()) {
        const int tile = work.tile(w), keys = work.keys();
        const int own = tile < keys ? tile + 1 : 0; // the end of its tiles of keys
        int j = work.first(p);
        auto pass_by = [&](int end) { // passes by tiles that are not for these queries
            for (; j < end; j++, stage.advance(1)) {
                barrier_wait(&s.full[stage.at], stage.round);
                __syncwarp(); // no lane comes to the barrier when it is two phases on
                release(stage.at);
            }
        };
        if (own > 0) {
            const int begin = work.first(p, tile);
            int last_start = 0;
            pass_by(begin);
            if (DOCUMENTS) {
                const int *from = p.starts + (int64_t)(work.head / p.H) * p.T;
                last_start = __ldg(from + min(tile * ROWS + ROWS, p.T) - 1);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    starts[r] = __ldg(from + min(tile * ROWS + row + r * 8, p.T - 1));
                }
            }
            barrier_wait(&s.q_full[queries % 2][w], queries / 2);
            // Finite, so that exponentials are 0 as long as a row has met no key that it sees.
            m[0] = m[1] = DOCUMENTS ? -1e30f : -CUDART_INF_F;
            sums[0] = sums[1] = 0.0f;
#pragma unroll
            for (int i = 0; i < 32; i++) { out[i] = 0.0f; }
            int before = stage.at;
#pragma unroll 1
            for (; j < own; j++) {
                barrier_wait(&s.full[stage.at], stage.round);
                multiply_scores();
                if (j > begin) { multiply_values(before); }
                wgmma_wait<0>();
                pin(scores);
                pin(out);
                pin(probabilities);
                if (j > begin) { release(before); }
                if (j == tile) { mask(); }
                if (DOCUMENTS && j * KEYS < last_start) { mask_documents(j); }
                float more[2];
                bool follows = j == begin;
                if (!follows) {
                    exponentiate(more);
                    follows = __any_sync(~0u, !(fmaxf(more[0], more[1]) < LARGE)); // or NaN
                }
                if (follows) {
                    follow();
                    exponentiate(more);
                }
                sums[0] += more[0];
                sums[1] += more[1];
                before = stage.at;
                stage.advance(1);
            }
            multiply_values(before);
            wgmma_wait<0>();
            pin(out);
            pin(probabilities);
            barrier_arrive(&s.q_empty[queries % 2][w], lane == 0);
            queries++;
            release(before);
        }
        pass_by(keys);
        if (own == 0) { continue; }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sums[r] += __shfl_xor_sync(~0u, sums[r], 1);
            sums[r] += __shfl_xor_sync(~0u, sums[r], 2);
            const int query = tile * ROWS + row + r * 8;
            if (lane % 4 == 0 && query < p.T) {
                p.lse[(int64_t)work.head * p.T + query] = m[r] * 0.125f + __logf(sums[r]);
            }
            sums[r] = reciprocal_fast(sums[r]);
        }
        if (lane == 0) { stores_wait_read<0>(); } // the piece before has been stored
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t units[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *x = out + i * 8 + n * 2;
                units[n] = bf16_pair(x[0] * sums[n % 2], x[1] * sums[n % 2]);
            }
            store_matrices<false>(place(s.out[w], i), units);
        }
        show_to_tma();
        __syncwarp();
        if (lane == 0) {
            tma_store_at(p.out, s.out[w] + warp * 16 * FULL_ROW, work.head % p.H * SIZE,
                         tile * ROWS + warp * 16, work.head / p.H);
            stores_commit();
        }
        __syncwarp();
    }
    if (lane == 0) { stores_wait(); }
}

#endif

template <bool DOCUMENTS>
__global__ void __launch_bounds__(THREADS, 1)
    attention64_forward_kernel(const __grid_constant__ Parameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], GROUPS * WARPS);
        }
        for (int w = 0; w < GROUPS; w++) {
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
        if (threadIdx.x == 0) { load<DOCUMENTS>(s, p); }
    } else {
        set_registers<COMPUTING_REGISTERS, true>();
        compute<DOCUMENTS>(s, p, group - 1);
    }
#endif
}

} // namespace

// ---- launcher -----------------------------------------------------------------------------------

void attention64_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    attention64_check(gpu, s);
    Parameters p = {};
    p.qkv = map_sequences(qkv, s.B, s.T, 3 * s.H * SIZE, ROWS);
    p.out = map_sequences(out, s.B, s.T, s.H * SIZE, 16);
    p.lse = lse;
    p.T = s.T;
    p.H = s.H;
    p.heads = s.B * s.H;
    p.tiles = divide_up(s.T, KEYS);
    p.pieces = divide_up(s.T, QUERIES);
    if (s.documents != nullptr) {
        p.starts = s.documents;
        p.cuts = s.documents + (int64_t)s.B * s.T;
        launch_with_shared(attention64_forward_kernel<true>, min(gpu->sms, (int)ATTENTION64_BLOCKS),
                           THREADS, sizeof(Shared), gpu->stream, p);
    } else {
        launch_with_shared(attention64_forward_kernel<false>, min(gpu->sms, p.heads * p.pieces),
                           THREADS, sizeof(Shared), gpu->stream, p);
    }
}

int attention64_forward_costs(int T, const int *starts, int *costs) {
    const int tiles = divide_up(T, KEYS), pieces = divide_up(T, QUERIES);
    for (int i = 0; i < pieces; i++) { // + 2: what a piece costs to begin
        costs[i] = (i + 1) * tiles / pieces - starts[i * tiles / pieces * ROWS] / KEYS + 2;
    }
    return pieces;
}
