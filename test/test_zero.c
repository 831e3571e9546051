// ZeRO-1's layout against its definition, element by element: any model, any number of ranks, any
// choice of what is gathered as FP8 codes.
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
enum { MODELS = sizeof(models) / sizeof(models[0]) };
static const int rank_counts[] = {1, 2, 3, 4, 5, 7, 8, 61, 512, RANKS_MAX};
enum { COUNTS = sizeof(rank_counts) / sizeof(rank_counts[0]) };

static ParamLayout layout_of(int model) {
    Options o = options_of(models[model]);
    ModelConfig c = model_config(&o);
    return param_layout(&c);
}

// Matrices as codes, by the bits of a random number; seed 0: none.
static bool *some_codes(const ParamLayout *layout, uint64_t seed) {
    bool *codes = calloc_or_die((size_t)layout->count, sizeof(bool));
    for (int i = 0; i < layout->count; i++) {
        codes[i] = seed > 0 && layout->params[i].cols > 1 && rng_bits(seed, (uint64_t)i) % 3 > 0;
    }
    return codes;
}

typedef struct {
    int64_t covered, overlaps, misplaced, unaligned, other_bucket, mixed;
} Findings;

// Walks over all elements of all ranks' ranges.
static Findings walk(const ZeroLayout *z, const bool *codes) {
    Findings f = {0};
    const ParamLayout *layout = z->layout;
    unsigned char *owned = calloc_or_die((size_t)layout->size, 1);
    for (int rank = 0; rank < z->ranks; rank++) {
        ZeroRange *ranges;
        int count = zero_ranges(z, rank, &ranges);
        unsigned char *taken = calloc_or_die((size_t)z->kept, 1);
        for (int i = 0; i < count; i++) {
            const ZeroRange *r = &ranges[i];
            const ZeroSegment *s = &z->segments[r->segment];
            const Param *p = &layout->params[r->param];
            Bucket b = layout->buckets[s->bucket];
            int64_t offset = r->place - s->begin - rank * s->part;
            f.unaligned += r->begin % PARAM_ALIGN || r->end % PARAM_ALIGN || r->kept % PARAM_ALIGN;
            f.misplaced += offset < 0 || offset + r->end - r->begin > s->part ||
                           r->kept != s->kept + offset ||
                           r->place - z->place[r->param] != r->begin - p->offset;
            f.other_bucket += r->begin < b.begin || r->end > b.end;
            f.mixed += z->ranks > 1 && codes[r->param] != s->codes;
            f.mixed += s->codes && r->end > p->offset + round_up64(param_size(p), PARAM_ALIGN);
            for (int64_t at = 0; at < r->end - r->begin; at++) {
                f.overlaps += owned[r->begin + at]++ > 0;
                f.overlaps += taken[r->kept + at]++ > 0;
            }
            f.covered += r->end - r->begin;
        }
        free(ranges);
        free(taken);
    }
    free(owned);
    return f;
}

static void every_element_has_one_place(void) {
    for (int model = 0; model < MODELS; model++) {
        ParamLayout layout = layout_of(model);
        for (int i = 0; i < COUNTS; i++) {
            for (uint64_t seed = 0; seed < 4; seed++) {
                bool *codes = some_codes(&layout, seed);
                ZeroLayout z = zero_layout(&layout, rank_counts[i], codes);
                Findings f = walk(&z, codes);
                CHECK_EQUAL(f.covered, layout.size);
                CHECK_EQUAL(f.overlaps, 0);
                CHECK_EQUAL(f.misplaced, 0);
                CHECK_EQUAL(f.unaligned, 0);
                CHECK_EQUAL(f.other_bucket, 0);
                CHECK_EQUAL(f.mixed, 0);
                zero_free(&z);
                free(codes);
            }
        }
        param_layout_free(&layout);
    }
}

static void segments_tile_the_arranged_space(void) {
    for (int model = 0; model < MODELS; model++) {
        ParamLayout layout = layout_of(model);
        for (int i = 0; i < COUNTS; i++) {
            bool *codes = some_codes(&layout, 7);
            ZeroLayout z = zero_layout(&layout, rank_counts[i], codes);
            int64_t size = 0, kept = 0;
            for (int b = 0; b < layout.num_buckets; b++) {
                CHECK(z.first[b + 1] - z.first[b] >= 1 && z.first[b + 1] - z.first[b] <= 2);
                for (int s = z.first[b]; s < z.first[b + 1]; s++) {
                    CHECK_EQUAL(z.segments[s].bucket, b);
                    CHECK_EQUAL(z.segments[s].begin, size);
                    CHECK_EQUAL(z.segments[s].kept, kept);
                    CHECK(z.segments[s].part > 0 && z.segments[s].part % PARAM_ALIGN == 0);
                    size += z.segments[s].part * z.ranks;
                    kept += z.segments[s].part;
                }
            }
            CHECK_EQUAL(z.size, size);
            CHECK_EQUAL(z.kept, kept);
            // padding: less than one PARAM_ALIGN a rank and segment
            CHECK(z.size - layout.size < (int64_t)PARAM_ALIGN * z.ranks * z.count);
            zero_free(&z);
            free(codes);
        }
        param_layout_free(&layout);
    }
}

// A one-GPU run works on the parameter space itself, and its checkpoint has one range.
static void one_rank_changes_nothing(void) {
    ParamLayout layout = layout_of(0);
    ZeroLayout z = zero_layout(&layout, 1, NULL);
    for (int i = 0; i < layout.count; i++) { CHECK_EQUAL(z.place[i], layout.params[i].offset); }
    CHECK_EQUAL(z.size, layout.size);
    CHECK_EQUAL(z.kept, layout.size);
    zero_free(&z);
    param_layout_free(&layout);
}

// What a walk finds when a layout is wrong.
static void faults_are_found(void) {
    ParamLayout layout = layout_of(1);
    bool *codes = some_codes(&layout, 2);
    ZeroLayout z = zero_layout(&layout, 3, codes);
    int64_t place = z.place[3]; // 2 and 3: the weight and bias of a norm
    z.place[3] = z.place[2];
    CHECK(walk(&z, codes).overlaps > 0);
    z.place[3] = place;
    z.segments[0].part -= PARAM_ALIGN;
    CHECK(walk(&z, codes).covered < layout.size);
    z.segments[0].part += PARAM_ALIGN;
    z.place[0] += 8;
    CHECK(walk(&z, codes).unaligned > 0);
    z.place[0] -= 8;
    for (int i = 0; i < layout.count; i++) { codes[i] = !codes[i]; }
    CHECK(walk(&z, codes).mixed > 0);
    zero_free(&z);
    free(codes);
    param_layout_free(&layout);
}

// The sizes that the plan of a large run has: an 8B model's state on 1000 ranks.
static void large_models_are_cut_evenly(void) {
    Options o = options_of("--model llama-3-8b");
    ModelConfig c = model_config(&o);
    ParamLayout layout = param_layout(&c);
    bool *codes = some_codes(&layout, 5);
    ZeroLayout z = zero_layout(&layout, 1000, codes);
    CHECK(z.kept * 1000 < layout.size + layout.size / 1000);
    for (int r = 0; r < 1000; r += 333) {
        ZeroRange *ranges;
        int64_t elements = 0;
        for (int i = zero_ranges(&z, r, &ranges); i-- > 0;) {
            elements += ranges[i].end - ranges[i].begin;
        }
        CHECK(elements <= z.kept && (r == 999 || elements > z.kept - PARAM_ALIGN * z.count));
        free(ranges);
    }
    zero_free(&z);
    free(codes);
    param_layout_free(&layout);
}

int main(void) {
    RUN(every_element_has_one_place);
    RUN(segments_tile_the_arranged_space);
    RUN(one_rank_changes_nothing);
    RUN(faults_are_found);
    RUN(large_models_are_cut_evenly);
    return test_summary();
}
