// Which sequences a rank reads, in a step and in an evaluation.
#include "run.h"

int run_micro_batches(const Run *run) {
    return run->options.global_batch_size / (run->options.micro_batch_size * run->ranks);
}

void run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets) {
    Error err;
    int B = run->options.micro_batch_size;
    int64_t first = run->progress.samples + ahead * run->options.global_batch_size;
    int64_t sample = first + ((int64_t)micro * run->ranks + run->rank) * B;
    run_beat(run, DOING_WORK, "reading data");
    if (!loader_batch(&run->train, sample, B, INT64_MAX, inputs, targets, &err)) {
        die("--data %s", err.text);
    }
    run_beat(run, DOING_WAIT, "in a step");
}

int64_t run_eval_samples(const Run *run) {
    int64_t all = run->valid_data.windows;
    int64_t wanted = min64(run->options.eval_iters, all) * run->options.global_batch_size;
    return wanted > 0 ? min64(wanted, all) : all;
}

void run_eval_batch(Run *run, int64_t sample, int *inputs, int *targets) {
    Error err;
    run_beat(run, DOING_WORK, "reading data");
    if (!loader_batch(&run->valid, sample, run->options.micro_batch_size, run_eval_samples(run),
                      inputs, targets, &err)) {
        die("--valid-data %s", err.text);
    }
    run_beat(run, DOING_WAIT, "in an evaluation");
}
