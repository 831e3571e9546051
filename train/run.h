// What both trainers do besides the model's mathematics, after the start of a run (start.h): they
// decide when to evaluate, sample and save, report steps and evaluations, and end the run.
#pragma once

#include "save_folder.h"
#include "schedule.h"

BEGIN_C

// ---- schedule -----------------------------------------------------------------------------------

bool run_has_steps(const Run *run); // whether a step is left to train
bool run_goes_on(const Run *run);   // whether the run continues after this step
// Whether the trainer must report step number `step` (the first step has number 1) before it
// enqueues the next step: an evaluation, a sample, a save or the end of the run may follow the
// step, or the last reported step was skipped.
bool run_needs_result(const Run *run, int64_t step);
// A trainer calls these two functions after it has reported the latest step and, if
// progress.eval_left is set, has evaluated. If progress.eval_left is set before the first step,
// the trainer evaluates then: the run resumes, and repeats an interrupted evaluation.
bool run_should_sample(const Run *run);
bool run_should_save(const Run *run);

// ---- reports ------------------------------------------------------------------------------------

// The results of a step, for its report. loss, norm, lr, skipped and stop are equal on all ranks.
typedef struct {
    double loss, norm, lr, seconds;
    SkipReason skipped;
    // used only if there are several ranks:
    bool stop;          // one of the ranks has received a signal to stop
    double own_loss;    // the mean loss over this rank's sequences
    double own_seconds; // the time of this rank's forward and backward passes;
                        // NaN: not known on any rank
} StepResult;

// Adds the step to the run's progress, prints the step's line, and writes its record.
void run_report(Run *run, StepResult result);
// Reports an evaluation. losses: the mean loss of each source of --valid-data. The validation loss
// is the mean over the sources, weighted by their shares.
void run_report_eval(Run *run, const double *losses, double seconds);

// Whether all ranks have completed a part of an evaluation (the validation loss, or the score of a
// set). All ranks call it at the part's end. The result is false if some rank has received a signal
// or lacks data. The run then ends after this step, and repeats the evaluation when it is resumed.
bool run_part_is_whole(Run *run);
// Whether step number `step` counts saturated and underflowed FP8 values (--fp8-stats-interval).
bool run_counts_fp8(const Run *run, int64_t step);

// For --dump-gradients: writes the step's loss, which is the mean over its targets, and the
// gradients of this loss, and exits. gradients [layout.size]: the gradients of the sum of the
// losses, divided by precision.step_tokens; run_dump multiplies them by step_tokens / targets.
void run_dump(Run *run, float *gradients, double loss) __attribute__((noreturn));

// ---- multiple-choice sets (choices.c) -----------------------------------------------------------

typedef struct {
    void *trainer;
    // Computes the loss of each target [B,T]; a target of -1 has a loss of 0. B * T is at most the
    // number of tokens in a micro-batch.
    void (*losses)(void *trainer, const int *inputs, const int *targets, int B, int T,
                   float *losses);
    // Replaces values[n] by their sums over all ranks. NULL: there is one rank.
    void (*sum)(void *trainer, int64_t *values, int n);
} ChoiceModel;

// Scores a set. counts must be zeros, and receives sums over all ranks: how many questions there
// are, how many the model answers right if it chooses the answer with the lowest sum of its tokens'
// losses, and how many if it chooses the one with the lowest mean. A signal ends the scoring early.
void run_score_set(Run *run, const ChoiceSet *set, ChoiceModel model, int64_t counts[3]);

// Scores all sets of --eval-choices, prints the results, and records them in metrics.jsonl. Stops
// if a signal has interrupted the evaluation.
void run_score_choices(Run *run, ChoiceModel model);

// ---- samples (sample.c) -------------------------------------------------------------------------

// Returns the logits [V] of the token after tokens[0..n), n <= seq_length. The logits are valid
// until the next call, and the caller may change them.
typedef float *(*NextLogits)(void *trainer, const int *tokens, int n);

// Prints the text of --sample-prompt and the model's continuation: as text or, without a tokenizer
// or with --sample-tokens, as token ids. A signal ends the sample early. The model sees only the
// last seq_length tokens. If --sample-only and --sample-length are given, a warning says from which
// token on the model does not see the beginning of the prompt.
void run_sample(Run *run, NextLogits next_logits, void *trainer);

// ---- end ----------------------------------------------------------------------------------------

// Waits for the last save, prints why a run stopped early, frees all, and returns the exit status.
int run_close(Run *run);
// Ends the run with error_text(), because a GPU computes wrongly. All ranks call it. It waits for a
// save that is under way, and saves nothing more.
void run_end_wrong(Run *run) __attribute__((noreturn));

END_C
