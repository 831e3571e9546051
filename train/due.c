// When a run evaluates, samples, saves and ends.
#include "run.h"

bool run_is_stopping(const Run *run) {
    return run->ranks > 1 ? run->stopping : run_stop_signal() != 0;
}

bool run_goes_on(const Run *run) {
    return run->progress.step < run->options.train_iters && !run_is_stopping(run) &&
           run->progress.skipped_in_row < run->options.max_skipped;
}

static bool eval_is_due(const Run *run, int64_t step) {
    bool last = step == run->options.train_iters;
    return (run->has_valid || run->choices.count > 0) &&
           (step % run->options.eval_interval == 0 || last);
}

static bool sample_is_due(const Run *run, int64_t step) {
    int64_t interval = run->options.sample_interval;
    return interval > 0 && step % interval == 0;
}

static bool save_is_due(const Run *run, int64_t step) {
    return run->options.save[0] != '\0' && step % run->options.save_interval == 0;
}

bool run_needs_result(const Run *run, int64_t step) {
    return eval_is_due(run, step) || sample_is_due(run, step) || save_is_due(run, step) ||
           step >= run->options.train_iters || run_is_stopping(run) ||
           run->progress.skipped_in_row > 0;
}

bool run_should_eval(const Run *run) {
    return eval_is_due(run, run->progress.step);
}

bool run_should_sample(const Run *run) {
    return run->rank == 0 && sample_is_due(run, run->progress.step);
}

bool run_should_save(const Run *run) {
    int64_t step = run->progress.step;
    if (run->options.save[0] == '\0' || step == run->saved_step) { return false; }
    return save_is_due(run, step) || !run_goes_on(run);
}
