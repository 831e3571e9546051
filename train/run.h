// What both trainers do around the model: start-up, schedule, the step's line, when to evaluate,
// sample and save, the end of a run. The trainers keep the model's mathematics.
#pragma once

#include "state.h"

#include <math.h>

BEGIN_C

// ---- start and end ------------------------------------------------------------------------------

// Prints what run_configure has decided; or answers --list-checkpoints or --list-tensors, and
// exits.
void run_announce(Run *run);
// Data, signals, the save folder; prints. device goes on the start-up lines and into metrics.jsonl.
// Several ranks: data and folder must be the same on all.
void run_start(Run *run, const char *device);
// Opens the checkpoint that --resume names, if there is one, and takes over its progress. The start
// is recorded in metrics.jsonl.
bool run_restore(Run *run, Checkpoint *checkpoint);
// Once the weights are read: closes the checkpoint, and options.start, whatever run_restore said.
void run_restored(Run *run, Checkpoint *checkpoint);
// Elements begin..end of a checkpoint's "master", "exp_avg" or "exp_avg_sq".
void run_read_state(const Run *run, const Checkpoint *checkpoint, const char *kind, int64_t begin,
                    int64_t end, float *out);
// Without a checkpoint: elements begin..end of the weights of --load, or else of random ones.
void run_first_weights(const Run *run, int64_t begin, int64_t end, float *out);
// Waits for the last save; returns the exit status.
int run_close(Run *run);
// All ranks call it: ends the run with error_text(), because a GPU computes wrongly, once the last
// save is done. Nothing more is saved.
void run_end_wrong(Run *run) __attribute__((noreturn));

// ---- schedule -----------------------------------------------------------------------------------

// The learning rate of optimizer step `step`, counted from 0. Linear warm-up from lr/warmup, then:
// cosine, linear: from lr down to min-lr at lr-decay-iters, and min-lr after;
// constant: lr; wsd: lr, then linearly down over the last lr-wsd-decay-iters.
double learning_rate(const Options *options, int64_t step);

bool run_goes_on(const Run *run); // neither done nor stopped
// Whether something besides the next step waits for the report of step number `step` (counted as
// progress counts): an evaluation, a sample, a save, the end.
bool run_needs_result(const Run *run, int64_t step);
bool run_should_eval(const Run *run);
bool run_should_sample(const Run *run);
bool run_should_save(const Run *run);

// ---- reports ------------------------------------------------------------------------------------

// A step's results for its report. With several ranks they are the same on all, but for own_loss
// and own_seconds.
typedef struct {
    double loss, norm, lr, seconds;
    SkipReason skipped;
    bool stop;          // several ranks: run_stop_signal() was not 0 on one of them
    double own_loss;    // several ranks: the mean of this rank's sequences
    double own_seconds; // several ranks: of this rank's forward and backward passes; 0: not known
} StepResult;

// Counts the step and its tokens, prints, writes the record.
void run_report(Run *run, StepResult result);
void run_report_eval(Run *run, double loss, double seconds);

// --fp8-stats-interval: whether step number `step` counts what FP8 loses.
bool run_counts_fp8(const Run *run, int64_t step);

// --dump-gradients: writes them (FP32, laid out as the parameters), of the mean over the step's
// targets, and the loss, and exits. Does nothing without the option.
void run_maybe_dump(Run *run, float *gradients, double loss);

// Starts the save and records it. The trainer sets what it saves; the rest is filled in here.
void run_save(Run *run, const Snapshot *snapshot);

// ---- what fits a memory -------------------------------------------------------------------------

// Bytes of device memory a run with these options plans on a device that offers this.
typedef int64_t (*PlannedBytes)(const Options *options, const Group *group, NumberSupport support);

// Besides the plan: the CUDA context, the libraries, graphs.
#define FIT_OVERHEAD_BYTES ((int64_t)1200 << 20)

// Prints the largest micro-batch for every way of saving memory, each a variant of the run's
// options.
void fit_print(const Run *run, NumberSupport support, PlannedBytes planned, int64_t memory);

END_C
