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
// Writes the folder of --export and prints what it has (export.c).
void run_export(Run *run);
// Opens the data and the save folder, catches signals, and prints the run's lines. device: text for
// these lines and metrics.jsonl. On several ranks, the data and the folder must be the same.
void run_start(Run *run, const char *device);
// Opens the checkpoint that --resume names and takes over its progress; returns false if there is
// none. Records the start in metrics.jsonl.
bool run_restore(Run *run, Checkpoint *checkpoint);
// Closes the checkpoint and run->start, after the weights have been read.
void run_restored(Run *run, Checkpoint *checkpoint);
// Reads elements begin..end of an array of a checkpoint's optimizer (state_names).
void run_read_state(const Run *run, const Checkpoint *checkpoint, const char *kind, int64_t begin,
                    int64_t end, float *out);
// If nothing is resumed: reads elements begin..end of the weights of --load, or draws random ones.
void run_first_weights(Run *run, int64_t begin, int64_t end, float *out);
// Waits for the last save, frees all, and returns the exit status.
int run_close(Run *run);
// Ends the run with error_text(), because a GPU computes wrongly. All ranks call it. It waits for a
// save that is under way, and saves nothing more.
void run_end_wrong(Run *run) __attribute__((noreturn));

// ---- schedule -----------------------------------------------------------------------------------

bool run_has_steps(const Run *run); // there is a step left to train
bool run_goes_on(const Run *run);   // whether the run continues after this step
// Whether an evaluation, a sample, a save or the end follows step number `step` (counted as in
// progress), so that its report is needed before the next step.
bool run_needs_result(const Run *run, int64_t step);
bool run_should_eval(const Run *run);     // also at the start, if a stop ended an evaluation early
bool run_should_validate(const Run *run); // the first part of an evaluation
bool run_should_sample(const Run *run);
bool run_should_save(const Run *run);

// ---- reports ------------------------------------------------------------------------------------

// The results of a step, for its report. All ranks have the same, except own_loss and own_seconds.
typedef struct {
    double loss, norm, lr, seconds;
    SkipReason skipped;
    bool stop;          // several ranks: one of them has received a signal to stop
    double own_loss;    // several ranks: mean loss over this rank's sequences
    double own_seconds; // several ranks: time of this rank's passes; NaN, on all ranks: not known
} StepResult;

// Counts the step and its tokens, prints its line, and writes its record.
void run_report(Run *run, StepResult result);
// losses: one for each source of --valid-data. Their mean by the sources' shares is the validation
// loss.
void run_report_eval(Run *run, const double *losses, double seconds);

// Ends a part of an evaluation: the validation loss, or the score of a set. All ranks call it.
// False: some rank has received a signal or lacks data, so that the part is not complete. Then the
// run ends after this step, and the evaluation goes on from this part when the run is resumed.
bool run_part_is_whole(Run *run);
// Called after run_part_is_whole and after the part's record is written: counts the part as made.
void run_end_part(Run *run);

// Whether step number `step` counts saturated and underflowed FP8 values (--fp8-stats-interval).
bool run_counts_fp8(const Run *run, int64_t step);

// For --dump-gradients: writes the loss and the gradients of the mean over the step's targets
// (FP32, laid out as the parameters), and exits. Without that option it does nothing.
void run_maybe_dump(Run *run, float *gradients, double loss);

END_C
