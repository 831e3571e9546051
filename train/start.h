// The start of a run, in the order of the calls: options and model, data and save folder, the
// checkpoint, weights and state.
#pragma once

#include "state.h"

BEGIN_C

// Sets the options that are not given. Also opens the checkpoint that the run starts from and, with
// --epochs, the data. Call it once, after options_parse.
void run_resolve_options(Run *run);

// Sets run->config, layout and precision from run->options and what the device supports. Before the
// call, the fields of *run must be zero, except those that run_resolve_options has set.
void run_configure(Run *run, NumberSupport support);
void run_free_configuration(Run *run);

// Returns the bytes of the plan with these options.
typedef int64_t (*PlannedBytes)(void *context, const Options *options);
// Sets *fit to the run's options. If their plan does not fit in `memory` bytes, *fit gets smaller
// sizes that do: a smaller micro-batch and, if one sequence does not fit, shorter sequences.
// Returns false, and leaves the sizes as they are, if nothing makes the plan fit.
bool run_find_fit(const Run *run, double memory, PlannedBytes planned, void *context, Options *fit);
// Returns as text the options that set those sizes of *fit that differ from the run's; "" if none
// does.
const char *run_say_fit(const Run *run, const Options *fit, char out[80]);

// Prints what run_configure has decided; or answers --list-checkpoints, --list-tensors or --export,
// and exits.
void run_announce(Run *run);
// Writes the folder of --export, and prints a summary of it (export.c).
void run_export(Run *run);
// Sets run->prompt to the tokens of --sample-tokens or, without this option, to the token with
// which every document begins and the tokens of --sample-prompt. Warns if the prompt is longer than
// a sequence (sample.c).
bool run_encode_prompt(Run *run);
// Opens the data and the save folder, catches signals, and prints the lines that describe the run.
// device: the device's name in these lines and in metrics.jsonl. All ranks must read the same data
// and see the same save folder.
void run_start(Run *run, const char *device);
// Verifies the checkpoint that the run starts from, run->start. A run that resumes takes over the
// checkpoint's progress. Records the start in metrics.jsonl.
void run_restore(Run *run);
// Reads elements begin..end of an array of the optimizer state in the checkpoint that the run
// resumes (checkpoint_read).
void run_read_state(const Run *run, int array, int64_t begin, int64_t end, float *out);
// Computes elements begin..end of a new run's weights: those of --load, or random ones
// (model_init). A run that resumes does not call it.
void run_first_weights(Run *run, int64_t begin, int64_t end, float *out);
// Sets every slot of `scales` (fp8_slot_index). A slot with a fixed scale gets that scale. Any
// other slot gets its state in the resumed checkpoint or, if there is none, a scale of 1. history
// [slots, precision.history_length] must be zeros, and receives the checkpoint's amaxes; history is
// NULL if the run has no delayed scaling.
void run_read_scaling(const Run *run, Fp8Scale *scales, float *history);

END_C
