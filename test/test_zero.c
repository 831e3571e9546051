// Compares ZeRO-1's layout with its definition, element by element: for several models and numbers
// of ranks, and any choice of what is gathered as FP8 codes and what Muon updates. Also tests which
// rank owns Muon's matrices.
#include "../base/rng.h"
#include "../model/zero.h"
#include "fixture.h"

static const char *const models[] = {
    TINY,
    "--model gpt2-tiny --num-layers 3 --hidden-size 40 --num-attention-heads 5",
    "--model llama-tiny --num-layers 1 --hidden-size 24 --num-attention-heads 3 --num-query-groups "
    "3 "
    "--ffn-hidden-size 7 --vocab-size 11 --make-vocab-size-divisible-by 1 "
    "--untie-embeddings-and-output-weights",
};
enum { MODELS = COUNT(models) };
static const int rank_counts[] = {1, 2, 3, 4, 5, 7, 8, 61, 512, RANKS_MAX};
enum { COUNTS = COUNT(rank_counts) };

// Chooses which matrices are codes, and which of a block's are Muon's, by random bits; seed 0:
// none.
static uint8_t *some_kinds(const ParamLayout *layout, uint64_t seed) {
    uint8_t *kinds = calloc_or_die((size_t)layout->count, 1);
    for (int i = 0; i < layout->count && seed > 0; i++) {
        const Param *p = &layout->params[i];
        if (p->cols > 1 && rng_bits(seed, (uint64_t)i) % 3 > 0) { kinds[i] |= ZERO_CODES; }
        bool matrix = p->cols > 1 && p->layer >= 0;
        if (matrix && rng_bits(seed + 1, (uint64_t)i) % 4 > 0) { kinds[i] |= ZERO_MUON; }
    }
    return kinds;
}

typedef struct {
    int64_t covered, overlaps, misplaced, unaligned, other_bucket, mixed;
} Findings;

// Walks over all elements of all ranks' ranges.
static Findings walk(const ZeroLayout *z, const uint8_t *kinds) {
    Findings f = {0};
    const ParamLayout *layout = z->layout;
    FREED unsigned char *owned = calloc_or_die((size_t)layout->size, 1);
    FREED unsigned char *placed = calloc_or_die((size_t)z->size, 1);
    for (int rank = 0; rank < z->ranks; rank++) {
        FREED ZeroRange *ranges = NULL;
        int count = zero_ranges(z, rank, &ranges);
        int64_t kept = 0;
        bool muon = false;
        for (int i = 0; i < count; i++) {
            const ZeroRange *r = &ranges[i];
            const ZeroSegment *s = &z->segments[r->segment];
            const Param *p = &layout->params[r->param];
            Bucket b = layout->buckets[s->bucket];
            int64_t offset = r->sharded_offset - s->begin - rank * s->part;
            f.unaligned += r->begin % PARAM_ALIGN || r->end % PARAM_ALIGN;
            f.misplaced += offset < 0 || offset + r->end - r->begin > s->part || r->kept != kept ||
                           r->sharded_offset - z->sharded_offset[r->param] != r->begin - p->offset;
            f.other_bucket += r->begin < b.begin || r->end > b.end ||
                              r->segment < z->first[s->bucket] ||
                              r->segment >= z->first[s->bucket + 1];
            f.mixed += kinds[r->param] != (s->codes ? ZERO_CODES : 0) + (s->muon ? ZERO_MUON : 0);
            f.misplaced += muon && !s->muon;
            muon = s->muon;
            kept += r->end - r->begin;
            f.mixed += s->codes && r->end > p->offset + round_up64(param_size(p), PARAM_ALIGN);
            for (int64_t at = 0; at < r->end - r->begin; at++) {
                f.overlaps += owned[r->begin + at]++ > 0;
                f.overlaps += placed[r->sharded_offset + at]++ > 0;
            }
            f.covered += r->end - r->begin;
        }
    }
    return f;
}

TEST(every_element_has_one_owner) {
    for (int model = 0; model < MODELS; model++) {
        CLOSED(param_layout_free) ParamLayout layout = layout_of(models[model]);
        for (int i = 0; i < COUNTS; i++) {
            for (uint64_t seed = 0; seed < 4; seed++) {
                FREED uint8_t *kinds = some_kinds(&layout, seed);
                CLOSED(zero_free) ZeroLayout z = zero_layout(&layout, rank_counts[i], kinds);
                Findings found = walk(&z, kinds), right = {.covered = layout.size};
                CHECK_BITS(&found, &right, sizeof(found));
                // padding: less than one PARAM_ALIGN a rank and segment
                CHECK(z.size - layout.size < (int64_t)PARAM_ALIGN * z.ranks * z.count);
            }
        }
    }
}

// A one-GPU run works on the parameter space itself, and its checkpoint has one range.
TEST(one_rank_changes_nothing) {
    CLOSED(param_layout_free) ParamLayout layout = layout_of(models[0]);
    CLOSED(zero_free) ZeroLayout z = zero_layout(&layout, 1, NULL);
    for (int i = 0; i < layout.count; i++) {
        CHECK_EQUAL(z.sharded_offset[i], layout.params[i].offset);
    }
    CHECK_EQUAL(z.size, layout.size);
}

// A walk must find faults in a wrong layout.
TEST(faults_are_found) {
    CLOSED(param_layout_free) ParamLayout layout = layout_of(models[1]);
    FREED uint8_t *kinds = some_kinds(&layout, 2);
    CLOSED(zero_free) ZeroLayout z = zero_layout(&layout, 3, kinds);
    int64_t offset = z.sharded_offset[3]; // 2 and 3: the weight and bias of a norm
    z.sharded_offset[3] = z.sharded_offset[2];
    CHECK(walk(&z, kinds).overlaps > 0);
    z.sharded_offset[3] = offset;
    z.segments[0].part -= PARAM_ALIGN;
    CHECK(walk(&z, kinds).covered < layout.size);
    z.segments[0].part += PARAM_ALIGN;
    z.sharded_offset[0] += 8;
    CHECK(walk(&z, kinds).unaligned > 0);
    z.sharded_offset[0] -= 8;
    for (int i = 0; i < layout.count; i++) { kinds[i] ^= 1; }
    CHECK(walk(&z, kinds).mixed > 0);
}

// The sizes that the plan of a large run has: an 8B model's state on 1000 ranks.
TEST(large_models_are_cut_evenly) {
    CLOSED(param_layout_free) ParamLayout layout = layout_of("--model llama-3-8b");
    FREED uint8_t *kinds = some_kinds(&layout, 5);
    CLOSED(zero_free) ZeroLayout z = zero_layout(&layout, 1000, kinds);
    CHECK(z.size < layout.size + layout.size / 1000);
    for (int r = 0; r < 1000; r += 333) {
        FREED ZeroRange *ranges = NULL;
        int64_t elements = 0;
        for (int i = zero_ranges(&z, r, &ranges); i-- > 0;) {
            elements += ranges[i].end - ranges[i].begin;
        }
        CHECK(elements <= z.size / 1000 &&
              (r == 999 || elements > z.size / 1000 - PARAM_ALIGN * z.count));
    }
}

// Query, key, value, gate and up are separate matrices. None is listed twice, and none crosses the
// end of a segment.
TEST(matrices_are_the_parameters) {
    for (int i = 0; i < COUNTS; i++) {
        for (uint64_t seed = 1; seed < 4; seed++) {
            // 2 heads of 16 and 1 for keys and for values
            CLOSED(param_layout_free) ParamLayout layout = layout_of(models[0]);
            FREED uint8_t *kinds = some_kinds(&layout, seed);
            CLOSED(zero_free) ZeroLayout z = zero_layout(&layout, rank_counts[i], kinds);
            FREED ZeroMatrix *m = NULL;
            int count = zero_matrices(&z, &m), expected = 0, shapes = 0;
            for (int p = 0; p < layout.count; p++) {
                if (!(kinds[p] & ZERO_MUON)) { continue; }
                const Param *param = &layout.params[p];
                static const int qkv[] = {32, 16, 16}, halves[] = {32, 32}, one[] = {32};
                bool is_qkv = param->id == TENSOR_QKV_WEIGHT,
                     is_fc1 = param->id == TENSOR_FC1_WEIGHT;
                const int *rows = is_qkv ? qkv : (is_fc1 ? halves : one);
                int parts = is_qkv ? 3 : (is_fc1 ? 2 : 1);
                int64_t offset = z.sharded_offset[p];
                for (int k = 0; k < parts; offset += rows[k++] * 32, expected++) {
                    int found = 0;
                    for (int j = 0; j < count; j++) {
                        found += m[j].sharded_offset == offset && m[j].rows == rows[k] &&
                                 m[j].columns == 32 && m[j].segment == z.segment[p];
                    }
                    CHECK_EQUAL(found, 1);
                }
            }
            CHECK_EQUAL(count, expected);
            for (int j = 1; j < count; j++) { shapes += m[j].rows != m[j - 1].rows; }
            CHECK(shapes <= 1);
        }
    }
}

// The work of the ranks differs by at most 5 % for Llama 1B on 8 GPUs, and is never more than the
// mean plus one matrix.
TEST(matrices_are_shared_out_evenly) {
    static const char *const names[] = {"--model llama-1b", "--model gpt2-124m"};
    for (int i = 0; i < 2 * COUNTS; i++) {
        CLOSED(param_layout_free) ParamLayout layout = layout_of(names[i % 2]);
        FREED uint8_t *kinds = calloc_or_die((size_t)layout.count, 1);
        int rows[HF_PARTS], ranks = rank_counts[i / 2];
        for (int p = 0; p < layout.count; p++) {
            kinds[p] = param_matrices(&layout.config, &layout.params[p], rows) > 0 ? ZERO_MUON : 0;
        }
        CLOSED(zero_free) ZeroLayout z = zero_layout(&layout, ranks, kinds);
        FREED ZeroMatrix *m = NULL;
        int count = zero_matrices(&z, &m);
        double most = 0, all = 0;
        FREED double *load = calloc_or_die((size_t)ranks, sizeof(double));
        for (int j = 0; j < count; j++) {
            CHECK(m[j].owner >= 0 && m[j].owner < ranks);
            load[m[j].owner] += zero_matrix_flops(&m[j]);
        }
        for (int r = 0; r < ranks; r++) { most = fmax(most, load[r]), all += load[r]; }
        CHECK(most <= all / ranks + zero_matrix_flops(&m[0]));
        if (i % 2 == 0 && ranks <= 8) { CHECK(most <= 1.05 * all / ranks); }
        if (i == 0) { // 5 (4 r r c + 2 r r r) of q, o; k, v; gate, up and down
            CHECK_EQUAL(count, 7 * 12);
            CHECK_CLOSE(all,
                        12 * 5 *
                            (2 * 6 * pow(2048, 3) + 2 * (4 * 512. * 512 * 2048 + 2 * pow(512, 3)) +
                             3 * (4 * 2048. * 2048 * 5504 + 2 * pow(2048, 3))),
                        1e3);
        }
    }
}
