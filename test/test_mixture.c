// Mixtures: which source a sample is from, the text of weights and patterns, several sources in one
// run, and the steps of --epochs.
#include "../train/run_data.h"
#include "shard_file.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- the turns of the sources -------------------------------------------------------------------

// How far the count of a source is from its share among the first n samples, at most over n.
// Counts, as 1000 more each, samples whose index is not the next one of their source, or at which
// blend_count differs. planted: every sample reads the turn after its own.
static double worst_distance(const Blend *b, int64_t first, int64_t samples, int planted) {
    FREED int64_t *counts = calloc_or_die((size_t)b->count, sizeof(int64_t));
    double worst = 0;
    for (int i = 0; i < b->count; i++) { counts[i] = blend_count(b, i, first); }
    for (int64_t n = first; n < first + samples; n++) {
        int64_t index, sum = 0;
        int source = blend_draw(b, n + planted, &index);
        if (index != counts[source]++) { worst += 1000; }
        for (int i = 0; i < b->count; i++) {
            if (blend_count(b, i, n + 1) != counts[i]) { worst += 1000; }
            double off = (double)counts[i] - (double)(n + 1) * b->parts[i] / b->period;
            worst = fmax(worst, fabs(off));
            sum += counts[i];
        }
        if (sum != n + 1) { worst += 1000; }
    }
    return worst;
}

TEST(every_prefix_has_its_shares) {
    static const double few[] = {0.7, 0.3}, many[] = {149, 1, 1, 18, 1, 1, 1, 1};
    static const double odd[] = {0.333, 0.667}, same[] = {1, 1, 1}, six[] = {0.123456, 0.876544};
    static const struct {
        const double *weights;
        int count, period;
    } rows[] = {{few, 2, 10}, {many, 8, 173},  {odd, 2, 1000},
                {same, 3, 3}, {six, 2, 15625}, {few, 1, 1}};
    EACH (row, rows) {
        CLOSED(blend_free) Blend b;
        CHECK(blend_make(&b, row->weights, row->count));
        CHECK_EQUAL(b.period, row->period);
        double bound = row->count > 1 ? 1 - 1.0 / (2 * row->count - 2) : 0;
        CHECK(worst_distance(&b, 0, min64(3 * b.period, 2000), 0) <= bound + 1e-9);
        // rounding of a double
        CHECK(worst_distance(&b, 1000000000000 - 7, 500, 0) <= bound + 1e-2);
        CHECK(row->count == 1 || worst_distance(&b, 0, 2 * b.period, 1) > 100);
    }
    for (int round = 0; round < 60; round++) {
        double weights[12];
        int count = 2 + round % 11;
        for (int i = 0; i < count; i++) {
            weights[i] = 1 + floor(pow(rng_uniform(7, (uint64_t)(100 * round + i)), 4) * 90);
        }
        CLOSED(blend_free) Blend b;
        CHECK(blend_make(&b, weights, count));
        CHECK(worst_distance(&b, 0, b.period, 0) <= 1 - 1.0 / (2 * count - 2) + 1e-9);
        for (int i = 0; i < count; i++) { // a period is exact
            CHECK_EQUAL(blend_count(&b, i, b.period), b.parts[i]);
        }
    }
}

// Weights with more digits than a period can hold have the nearest shares.
TEST(any_weights_have_a_period) {
    double rough[] = {M_PI, M_E, sqrt(2), 1e-3}, tiny[] = {1, 1e-7};
    CLOSED(blend_free) Blend b;
    CHECK(blend_make(&b, rough, 4));
    double sum = rough[0] + rough[1] + rough[2] + rough[3];
    for (int i = 0; i < 4; i++) { CHECK(fabs(blend_share(&b, i) - rough[i] / sum) < 1e-7); }
    CHECK_EQUAL(b.parts[0] + b.parts[1] + b.parts[2] + b.parts[3], b.period);
    CLOSED(blend_free) Blend none;
    CHECK(!blend_make(&none, tiny, 2));
}

// ---- the text -----------------------------------------------------------------------------------

static void check_sources(const char *text, int count, const char *expected) {
    Source *sources;
    char found[4 * PATH_LENGTH] = "";
    CHECK_EQUAL(sources_read(text, &sources), count);
    for (int i = 0; i < count; i++) {
        snprintf(found + strlen(found), 2 * PATH_LENGTH, "%g|%s|", sources[i].weight,
                 sources[i].pattern);
    }
    if (count > 0) { CHECK_TEXT(found, expected); }
    if (count == 0) { CHECK_CONTAINS(error_text(), expected); }
    free(sources);
}

TEST(texts_are_weights_and_patterns) {
    check_sources("web/*.bin", 1, "1|web/*.bin|");
    check_sources("my web/*.bin 0.3 x", 1, "1|my web/*.bin 0.3 x|");
    check_sources("0.7", 1, "1|0.7|");
    check_sources("0.7x y", 1, "1|0.7x y|");
    check_sources("0.7 web/*.bin 0.3 code/*.bin", 2, "0.7|web/*.bin|0.3|code/*.bin|");
    check_sources(" 7\tmy web/*.bin  3e0  {a,b}.bin ", 2, "7|my web/*.bin|3|{a,b}.bin|");
    check_sources("1 a\\ 2/x.bin 1 ./3", 2, "1|a\\ 2/x.bin|1|./3|");
    check_sources("0.7 web 0.3", 0, "0.3: a weight without a path after it");
    check_sources("0.7 0.3 code", 0, "0.7: a weight without a path after it");
    check_sources("0 web 0 code", 0, "0 web: a weight must be above 0");
    check_sources("1 web -0.5 code", 0, "-0.5 code: a weight must be above 0");
    check_sources("1e999 web 1 code", 0, "1e999 web: a weight must be above 0");
    mkdir("2024 data", 0700);
    text_write("2024 data/x.bin", "x");
    check_sources("2024 data/*.bin", 1, "1|2024 data/*.bin|"); // files have this name
    check_sources("2024 data/y*.bin", 1, "2024|data/y*.bin|");
}

// ---- several sources in a run -------------------------------------------------------------------

enum { T = 4, FIRST_A = 0, FIRST_B = 1000, FIRST_C = 2000 };
static const char three[] = "0.5 a_*.bin 0.3 b.bin 0.2 c.bin";

// Sources of 12, 25 and 5 windows.
static void write_sources(void) {
    write_shard("a_0.bin", 2, FIRST_A, 30);
    write_shard("a_1.bin", 2, FIRST_A + 30, 20);
    write_shard("b.bin", 2, FIRST_B, 103);
    write_shard("c.bin", 2, FIRST_C, 21);
}

static Mixture open_sources(const char *text) {
    Mixture m;
    write_sources();
    or_die(mixture_open(&m, text, T, 3000, -1, false));
    return m;
}

// Reads 3 epochs as run_batch does, on `ranks` ranks; each second step in the step before. The
// samples of a step do not depend on ranks and micro-batches: counts samples that differ from one
// rank's, and windows that an epoch of their source has not exactly once. planted: one rank reads
// another's.
static int64_t misread(const Mixture *m, int ranks, int B, int micro_batches, bool shuffle,
                       bool planted) {
    Run run = {.train = {m->data, 42, shuffle, &m->blend}, .group = {.ranks = ranks}};
    Loader plain = run.train;
    int step = run.options.global_batch_size = ranks * micro_batches * B;
    int inputs[64], targets[64], expected[64], ignored[64];
    int64_t wrong = 0, samples = 3 * m->windows, seen[3][200] = {{0}};
    run.options.micro_batch_size = B;
    run.options.train_iters = 1000;
    for (; run.progress.samples < samples; run.progress.samples += step) {
        int64_t ahead = run.progress.samples / step % 2;
        for (int rank = 0; rank < ranks; rank++) {
            Run own = run;
            own.group.rank = planted && rank == ranks - 1 ? 0 : rank;
            own.progress.samples -= ahead * step;
            for (int micro = 0; micro < micro_batches; micro++) {
                int64_t sample = run.progress.samples + (micro * ranks + rank) * B;
                run_batch(&own, ahead, micro, inputs, targets, NULL);
                or_die(loader_batch(&plain, sample, B, INT64_MAX, expected, ignored, NULL));
                wrong += memcmp(inputs, expected, (size_t)(B * T) * sizeof(int)) != 0;
                for (int i = 0; i < B; i++, sample++) {
                    int64_t index;
                    int source = blend_draw(&m->blend, sample, &index);
                    int64_t windows = m->data[source].windows;
                    int64_t window = (inputs[i * T] - 1000 * source) / T;
                    wrong += inputs[i * T] != 1000 * source + window * T ||
                             targets[i * T + T - 1] != inputs[i * T] + T;
                    if (wrong == 0) { seen[source][index / windows * windows + window]++; }
                }
            }
            free(own.prefetched);
        }
    }
    for (int source = 0; source < m->count; source++) {
        int64_t windows = m->data[source].windows;
        int64_t whole = blend_count(&m->blend, source, samples) / windows * windows;
        for (int64_t i = 0; i < whole; i++) { wrong += seen[source][i] != 1; }
    }
    return wrong;
}

TEST(each_source_has_its_own_epochs_on_any_ranks) {
    static const int ranks[] = {1, 2, 3, 4, 8};
    CLOSED(mixture_close) Mixture m = open_sources(three);
    CHECK(m.count == 3 && m.windows == 42 && m.num_shards == 4 && m.tokens == 174 && !m.masked);
    for (int i = 0; i < 2 * COUNT(ranks); i++) {
        for (int B = 1; B <= 5; B++) {
            for (int n = 1; n <= 3; n++) {
                CHECK_EQUAL(misread(&m, ranks[i / 2], B, n, i % 2, false), 0);
            }
        }
    }
    CHECK(misread(&m, 2, 1, 1, true, true) > 0 && misread(&m, 8, 2, 3, false, true) > 0);
    // equal sources are not in one order
    CLOSED(mixture_close) Mixture twins = open_sources("1 b.bin 1 b.bin");
    Loader loader = {twins.data, 42, true, &twins.blend};
    int same = 0;
    for (int i = 0; i < 25; i++) {
        same += loader_window(&loader, 2 * i) == loader_window(&loader, 2 * i + 1);
    }
    CHECK(same < 8);
}

// A mixture of one source is that source, in bits and identity.
TEST(one_source_stays_what_it_is) {
    CLOSED(mixture_close) Mixture m = open_sources("a_*.bin");
    CLOSED(mixture_close) Mixture weighted = open_sources("3 a_*.bin");
    CLOSED(dataset_close) Dataset data;
    int own[T], as_ever[T], targets[T];
    CHECK(dataset_open(&data, "a_*.bin", T, 3000, -1, false));
    CHECK_TEXT(m.identity, data.identity);
    CHECK_TEXT(weighted.identity, data.identity);
    CHECK_EQUAL(m.windows, data.windows);
    Loader loader = {m.data, 9, true, &m.blend}, plain = {&data, 9, true, NULL};
    for (int64_t sample = 0; sample < 60; sample++) {
        CHECK(loader_batch(&loader, sample, 1, INT64_MAX, own, targets, NULL) &&
              loader_batch(&plain, sample, 1, INT64_MAX, as_ever, targets, NULL));
        CHECK_BITS(own, as_ever, sizeof(own));
    }
}

TEST(other_shares_or_shards_are_other_data) {
    static const Says rows[] = {
        {"50 ./a_*.bin 30 b.bin 20 c.bin", ""},
        {"0.6 a_*.bin 0.3 b.bin 0.1 c.bin", "a_*.bin: 6/10 of the samples, and not what this run"},
        {"0.5 a_*.bin 0.3 c.bin 0.2 b.bin", "c.bin: not the shard that this run read in its place"},
        {"0.5 a_0.bin 0.3 b.bin 0.2 c.bin", "b.bin: 3/10 of the samples, and not what this run"},
        {"0.5 a_*.bin 0.3 b.bin", "a_*.bin: 5/8 of the samples"},
        {"0.5 a_*.bin 0.3 b.bin 0.1 c.bin 0.1 c.bin", "c.bin: 1/10 of the samples"},
        {"{a_?,b,c}.bin", "a_0.bin: not the shard that this run read in its place ("},
    };
    CLOSED(mixture_close) Mixture m = open_sources(three);
    EACH (row, rows) {
        CLOSED(mixture_close) Mixture other = open_sources(row->given);
        bool same = mixture_match(&other, m.identity, "this run");
        if (*row->expected == '\0') { CHECK(same); }
        if (*row->expected != '\0') { CHECK(!same); }
        if (!same) { CHECK_CONTAINS(error_text(), row->expected); }
        char sum[9], other_sum[9];
        CHECK_EQUAL(
            strcmp(identity_sum(m.identity, sum), identity_sum(other.identity, other_sum)) == 0,
            same);
    }
    CLOSED(mixture_close) Mixture two = open_sources("1 c.bin");
    CHECK_TEXT(mixture_shares(&m, &two), "c.bin");
}

TEST(bad_mixtures_are_refused) {
    static const Says rows[] = {
        {"0.5 a_*.bin 0.5 none/*.bin",
         "none/*.bin: no such file; make shards of texts with ./tokenize"},
        {"1 a_*.bin 1e-9 b.bin", "1e-09 b.bin: a weight below a millionth of the sum"},
    };
    write_sources();
    EACH (row, rows) {
        Mixture m;
        CHECK_REFUSED(mixture_open(&m, row->given, T, 3000, -1, false), row->expected);
        CHECK(m.count == 0 && m.identity == NULL);
    }
    CLOSED(mixture_close) Mixture m; // c.bin's tokens are beyond this vocabulary
    int inputs[10 * T], targets[10 * T];
    CHECK(mixture_open(&m, three, T, 2000, -1, false));
    Loader loader = {m.data, 1, true, &m.blend};
    CHECK_REFUSED(loader_batch(&loader, 0, 10, INT64_MAX, inputs, targets, NULL),
                  "outside the vocabulary of 2000");
}

// An evaluation has of each source its share, but a window at least, and none twice.
TEST(evaluations_have_a_share_of_each_source) {
    static const struct {
        int iters, samples[3];
    } rows[] = {{0, {12, 25, 5}}, {1, {4, 2, 2}}, {1000, {12, 25, 5}}, {3, {12, 7, 5}}};
    Run run = {.group = {.ranks = 1}, .valid_data = open_sources(three)};
    run.options.global_batch_size = 8;
    run.options.micro_batch_size = 4;
    EACH (row, rows) {
        run.options.eval_iters = row->iters;
        int64_t all = 0;
        for (int i = 0; i < 3; i++) {
            CHECK_EQUAL(run_eval_samples(&run, i), row->samples[i]);
            CHECK_EQUAL(run_eval_targets(&run, i), row->samples[i] * T);
            all += row->samples[i];
        }
        CHECK_EQUAL(run_eval_all_samples(&run), all);
    }
    int inputs[4 * T], targets[4 * T];
    run_eval_batch(&run, 1, 4, inputs, targets, NULL); // three samples of the second, and padding
    for (int i = 0; i < 4 * T; i++) {
        CHECK_EQUAL(inputs[i], i < 3 * T ? FIRST_B + 4 * T + i : 0);
        CHECK_EQUAL(targets[i], i < 3 * T ? FIRST_B + 4 * T + i + 1 : -1);
    }
    mixture_close(&run.valid_data);
}
