// What both trainers do besides the model's mathematics: start-up, schedule, the line of a step,
// when to evaluate, sample and save, and the end of a run.
#pragma once

#include "save_folder.h"
#include "schedule.h"

#include <math.h>

BEGIN_C

// ---- start and end ------------------------------------------------------------------------------

// Prints what run_configure has decided; or answers --list-checkpoints, --list-tensors
// or --export and exits.
void run_announce(Run *run);
// Writes the folder of --export, and prints a summary of it (export.c).
void run_export(Run *run);
// Opens the data and the save folder, catches signals, and prints the lines that describe the run.
// device: the device's name in these lines and in metrics.jsonl. All ranks must read the same data
// and see the same save folder.
void run_start(Run *run, const char *device);
// Verifies the checkpoint that the run starts from, run->start. If the run resumes it, takes over
// its progress. Records the start in metrics.jsonl.
void run_restore(Run *run);
// For a run that resumes: reads elements begin..end of an array of the checkpoint's optimizer state
// (checkpoint_read).
void run_read_state(const Run *run, int array, int64_t begin, int64_t end, float *out);
// For a run that does not resume: reads elements begin..end of the weights of --load, or without
// --load draws random ones.
void run_first_weights(Run *run, int64_t begin, int64_t end, float *out);
// Sets every slot of `scales` (fp8_slot_index): a fixed scale to its value, the others to those of
// the resumed checkpoint or, if there are none, to 1. history: [slots, precision.history_length],
// zeros; receives the checkpoint's amaxes. NULL: the run has no delayed scaling.
void run_read_scaling(const Run *run, Fp8Scale *scales, float *history);
// Waits for the last save, frees all, and returns the exit status.
int run_close(Run *run);
// Ends the run with error_text(), because a GPU computes wrongly. All ranks call it. It waits for a
// save that is under way, and saves nothing more.
void run_end_wrong(Run *run) __attribute__((noreturn));

// ---- schedule -----------------------------------------------------------------------------------

bool run_has_steps(const Run *run); // whether a step is left to train
bool run_goes_on(const Run *run);   // whether the run continues after this step
// Whether step number `step` (counted from 1, as progress.step) must be reported before the next
// step is enqueued, because an evaluation, a sample, a save or the end of the run may follow it.
bool run_needs_result(const Run *run, int64_t step);
// These three are asked once the latest step is reported.
bool run_should_eval(const Run *run); // also before the first step, if a stop cut an evaluation
bool run_should_sample(const Run *run);
bool run_should_save(const Run *run);

// ---- reports ------------------------------------------------------------------------------------

// The results of a step, for its report. loss, norm, lr, skipped and stop are equal on all ranks.
typedef struct {
    double loss, norm, lr, seconds;
    SkipReason skipped;
    bool stop;          // several ranks: one of them has received a signal to stop
    double own_loss;    // several ranks: mean loss over this rank's sequences
    double own_seconds; // several ranks: of this rank's passes; NaN: not known on any rank
} StepResult;

// Counts the step and its tokens, prints its line, and writes its record.
void run_report(Run *run, StepResult result);
// losses: one for each source of --valid-data. Their mean, weighted by the sources' shares, is the
// validation loss.
void run_report_eval(Run *run, const double *losses, double seconds);

// Whether all ranks have completed a part of an evaluation: the validation loss, or the score of a
// set. All ranks call it at the part's end. False: some rank has received a signal or lacks data.
// Then the run ends after this step, and makes the evaluation again when it is resumed.
bool run_part_is_whole(Run *run);
// Whether step number `step` counts saturated and underflowed FP8 values (--fp8-stats-interval).
bool run_counts_fp8(const Run *run, int64_t step);

// For --dump-gradients: writes the step's mean loss over its targets and the gradients of that mean
// (FP32, laid out as the parameters), and exits. Without that option it does nothing.
void run_maybe_dump(Run *run, float *gradients, double loss);

END_C
