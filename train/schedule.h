// The schedule of a run: what follows from its options and the number of a step alone.
#pragma once

#include "../model/options.h"

BEGIN_C

// The learning rate of optimizer step `step`, counted from 0: a linear warm-up from lr/warmup, then
// cosine and linear: from lr down to min-lr at lr-decay-iters, and min-lr after that;
// constant: lr; wsd: lr, then linearly down over the last lr-wsd-decay-iters steps before
// lr-decay-iters, or as many of them as the warm-up leaves.
double learning_rate(const Options *options, int64_t step);

// Whether an evaluation (or a sample, a save) follows step number `step`, counted from 1; 0 is the
// start.
static inline bool eval_is_due(const Options *o, int64_t step) {
    return step % o->eval_interval == 0 || step == o->train_iters;
}
static inline bool sample_is_due(const Options *o, int64_t step) {
    return o->sample_interval > 0 && step % o->sample_interval == 0;
}
static inline bool save_is_due(const Options *o, int64_t step) {
    return o->save[0] != '\0' && step % o->save_interval == 0;
}

// Warns of a schedule that ends with a learning rate of 0, or never reaches --lr.
void warn_of_schedule(const Options *options);

// Warns if a run that resumes after `step` steps goes on with another learning rate than the
// checkpoint's run would have: a larger --train-iters moves the decay, a smaller one may have begun
// it already.
void warn_of_jump(const Options *options, const Options *was, int64_t step);

END_C
