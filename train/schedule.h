// The schedule of a run: what depends only on the run's options and the number of a step.
#pragma once

#include "../model/options.h"

BEGIN_C

// The learning rate of optimizer step `step`, counted from 0. In the first lr-warmup-iters steps it
// rises linearly, from lr / lr-warmup-iters to lr. After that it depends on lr-decay-style:
//   constant          it stays lr
//   cosine, linear    it falls from lr to min-lr, which it reaches at step lr-decay-iters and keeps
//   wsd               it stays lr, and falls linearly to min-lr in the lr-wsd-decay-iters steps
//                     before lr-decay-iters, or in fewer steps if the warm-up leaves fewer
double learning_rate(const Options *options, int64_t step);

// Whether an evaluation (a sample, a save) is due when `step` steps are done.
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

// Warns if the learning rate jumps where a run resumes after `step` steps: if the next step's rate
// is clearly higher or lower than the checkpoint's run had or would have. was: the options of that
// run. For example, a larger --train-iters moves the decay to later steps. Also notes a given
// warm-up that is over.
void warn_of_jump(const Options *options, const Options *was, int64_t step);

END_C
