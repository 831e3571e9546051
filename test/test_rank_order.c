// The order of the data: whichever number of ranks reads it, in whatever micro-batches, a step
// consists of the same sequences, in the same places, and a run that changes its number of ranks
// sees every sequence once an epoch.
#include "../train/run.h"
#include "fixture.h"

enum { WINDOWS = 50, T = 4, BATCH = 12, STEPS = 20 };

// Every token of window w is w.
static void write_windows(void) {
    int32_t header[SHARD_HEADER_BYTES / 4];
    uint16_t tokens[SHARD_HEADER_BYTES / 2 + WINDOWS * T + 1];
    shard_header(header, 2, WINDOWS * T + 1);
    memcpy(tokens, header, sizeof(header));
    for (int i = 0; i <= WINDOWS * T; i++) {
        tokens[SHARD_HEADER_BYTES / 2 + i] = (uint16_t)(i / T);
    }
    blob_write("windows.bin", tokens, sizeof(tokens));
}

static void open_run(Run *run, Dataset *data, const char *shuffle) {
    char text[256];
    snprintf(text, sizeof(text), "--global-batch-size %d --seq-length %d --vocab-size 64 %s", BATCH,
             T, shuffle);
    *run = (Run){.options = options_of(text), .ranks = 1};
    if (!dataset_open(data, "windows.bin", T, 64, NULL)) { die("windows.bin"); }
    run->train = (Loader){data, (uint64_t)run->options.seed, run->options.shuffle};
}

// The windows of one step as the ranks read them, in the order of their sequences.
static void read_step(Run *run, int ranks, int micro_batch, int windows[BATCH]) {
    int *inputs = malloc_or_die((size_t)(micro_batch * T) * sizeof(int));
    int *targets = malloc_or_die((size_t)(micro_batch * T) * sizeof(int));
    run->options.micro_batch_size = micro_batch;
    run->ranks = ranks;
    for (int rank = 0; rank < ranks; rank++) {
        Run own = *run;
        own.rank = rank;
        for (int micro = 0; micro < run_micro_batches(run); micro++) {
            run_batch(&own, 0, micro, inputs, targets);
            for (int i = 0; i < micro_batch; i++) {
                windows[(micro * ranks + rank) * micro_batch + i] = inputs[i * T];
            }
        }
        free(own.held);
    }
    free(inputs);
    free(targets);
    run->progress.samples += BATCH;
}

static const struct {
    int ranks, micro_batch;
} splits[] = {{1, 12}, {1, 1}, {2, 6}, {2, 3}, {3, 4}, {3, 1}, {4, 3}, {6, 2}, {12, 1}};
enum { SPLITS = sizeof(splits) / sizeof(splits[0]) };

static void every_split_reads_the_same(void) {
    static const char *const shuffles[] = {"", "--no-shuffle"};
    for (int s = 0; s < 2; s++) {
        Run runs[SPLITS];
        Dataset data[SPLITS];
        int first[BATCH], windows[BATCH];
        for (int i = 0; i < SPLITS; i++) { open_run(&runs[i], &data[i], shuffles[s]); }
        for (int step = 0; step < STEPS; step++) { // beyond the end of four epochs
            read_step(&runs[0], splits[0].ranks, splits[0].micro_batch, first);
            for (int i = 1; i < SPLITS; i++) {
                read_step(&runs[i], splits[i].ranks, splits[i].micro_batch, windows);
                CHECK_BITS(windows, first, sizeof(first));
            }
        }
        for (int i = 0; i < SPLITS; i++) { dataset_close(&data[i]); }
    }
}

static void a_run_may_change_its_ranks(void) {
    Run run, straight;
    Dataset data, other;
    int windows[BATCH], expected[BATCH], seen[WINDOWS] = {0};
    open_run(&run, &data, "");
    open_run(&straight, &other, "");
    for (int step = 0; step < STEPS; step++) {
        int i = (step * 5) % SPLITS;
        read_step(&run, splits[i].ranks, splits[i].micro_batch, windows);
        read_step(&straight, 1, BATCH, expected);
        CHECK_BITS(windows, expected, sizeof(windows));
        for (int j = 0; j < BATCH && step * BATCH + j < 4 * WINDOWS; j++) { seen[windows[j]]++; }
    }
    for (int w = 0; w < WINDOWS; w++) { CHECK_EQUAL(seen[w], 4); }
    run.progress.samples++; // a sequence lost would be seen
    read_step(&run, 2, 3, windows);
    read_step(&straight, 1, BATCH, expected);
    CHECK(CAUGHT(CHECK_BITS(windows, expected, sizeof(windows))));
    dataset_close(&data);
    dataset_close(&other);
}

int main(void) {
    write_windows();
    RUN(every_split_reads_the_same);
    RUN(a_run_may_change_its_ranks);
    return test_summary();
}
