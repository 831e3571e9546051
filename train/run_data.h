// What a run reads, and which of it a rank reads in a step and in an evaluation.
#pragma once

#include "state.h"

BEGIN_C

// What run_start opens: shards, choices, tokenizer, prompt.
void run_open_data(Run *run);
// inputs, targets [B,T] of micro-batch `micro` of the step `ahead` steps after the present one.
// What the two steps after it need is read with it, so that data that cannot be read, or hold a bad
// token, are found while there are steps to train, after which the run ends and saves.
void run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets);
// Refuses --data other than a checkpoint's, unless --accept-data-change is given. What was best on
// other validation data is no longer.
void run_match_data(Run *run, const Checkpoint *checkpoint);
int run_micro_batches(const Run *run); // a step
// How many targets count in the step `ahead` steps after the present one, on all ranks: what its
// loss and its gradient are divided by, so that neither depends on how a step is split. The
// trainers go backward from the loss over all its tokens (precision.step_tokens), so that the
// gradients of activations are as large whatever counts, and multiply the sum by tokens / targets.
int64_t run_step_targets(const Run *run, int64_t ahead);

// An evaluation reads the same windows whatever the batch: run_eval_samples of them, from 0.
// Several ranks share them: each begins at run_eval_first(), advances by run_eval_stride(), and
// they add up their sums. run_eval_batch: the batch from `sample` on; windows past the end are left
// out.
int64_t run_eval_samples(const Run *run);
int64_t run_eval_targets(const Run *run); // of them that count, on all ranks
static inline int64_t run_eval_first(const Run *run) {
    return (int64_t)run->group.rank * run->options.micro_batch_size;
}
static inline int64_t run_eval_stride(const Run *run) {
    return (int64_t)run->group.ranks * run->options.micro_batch_size;
}
void run_eval_batch(Run *run, int64_t sample, int *inputs, int *targets);

END_C
