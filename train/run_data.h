// The data that a run reads, their tokenizer, and which samples a rank reads in a step and in an
// evaluation.
#pragma once

#include "state.h"

BEGIN_C

// Opens the training shards, unless they are open already. (With --epochs they are opened before
// run_open_data.)
void run_open_train_data(Run *run);
// Opens shards and multiple-choice sets; run_start calls it.
void run_open_data(Run *run);
// Opens the data and the tokenizer for --plan, and refuses what a run would refuse: files that are
// missing or damaged, tokens outside the vocabulary among the first ones, and data of several
// tokenizers.
void run_plan_data(Run *run);
// Refuses data that different tokenizers made, and data that differ between ranks. Call it after
// the data and the tokenizer are open.
void run_check_data(Run *run);
// Whether all training shards have masks, as conversations do.
bool run_is_masked(const Run *run);
// Whether attention or positions restart at each document, so that batches need `starts`.
static inline bool run_resets(const Run *run) {
    return run->options.reset_attention_mask || run->options.reset_position_ids;
}
// Copies out the inputs, targets and starts [B,T] (loader_batch) of micro-batch number `micro`,
// counted from 0, of step number progress.step + 1 + ahead. starts may be NULL, and must be NULL
// without run_resets().
// The function also reads the data of the two steps after that step. So if data cannot be read, or
// contain a bad token, this is known before a step needs them: the run finishes the steps that are
// under way, saves, and ends.
void run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets, int *starts);
// Refuses --data that differ from those of the checkpoint run->start, unless --accept-data-change
// is given. If the validation data differ, progress.best_valid_loss becomes NaN.
void run_match_data(Run *run);
int run_micro_batches(const Run *run); // micro-batches in a step on each rank
// The number of targets that count (those that no mask excludes), over all ranks, in step number
// progress.step + 1 + ahead. The step's loss and gradient are divided by this number, whatever the
// numbers of ranks and micro-batches are. But the backward pass divides by all tokens
// (precision.step_tokens), so that the size of activations' gradients does not depend on the masks;
// afterwards the trainers multiply the gradients by tokens / targets.
int64_t run_step_targets(const Run *run, int64_t ahead);

// An evaluation reads windows 0 to run_eval_samples() - 1 of each source, whatever the batch size
// is. Several ranks share these windows: each rank begins at window run_eval_first() and advances
// by run_eval_stride() windows, and the ranks add up their sums of losses. run_eval_batch reads a
// micro-batch from window `sample` on; its rows past the last window have targets of -1, which the
// loss ignores.
int64_t run_eval_samples(const Run *run, int source);
int64_t run_eval_targets(const Run *run, int source); // how many targets count, on all ranks
int64_t run_eval_all_samples(const Run *run);         // the sum over all sources
static inline int64_t run_eval_first(const Run *run) {
    return (int64_t)run->group.rank * run->options.micro_batch_size;
}
static inline int64_t run_eval_stride(const Run *run) {
    return (int64_t)run->group.ranks * run->options.micro_batch_size;
}
void run_eval_batch(Run *run, int source, int64_t sample, int *inputs, int *targets, int *starts);

// ---- the tokenizer (run_tokenizer.c) ------------------------------------------------------------

// Sets the options that follow from the data and from their tokenizer (OptionFacts.data), and
// run->document_end. Finds the tokenizer that --tokenizer names, else the checkpoint's, else the
// one beside the shards.
bool run_set_by_data(void *run, Options *options);

// Returns the token that ends a document in the shards that the pattern `shards` matches, according
// to the tokenizer that made them. Returns run->document_end if that tokenizer is not known, or if
// --tokenizer names one.
int run_document_end(Run *run, const char *shards);

// Reads a file that is saved with the model, if it is there, without its byte-order mark, because
// Hugging Face's transformers refuses one. Warns of a .json that is no object, and leaves it out.
Companion run_read_companion(const char *path);

// Opens the tokenizer of --tokenizer, whose document_end becomes run->document_end. In a run that
// saves, rank 0 also reads the files that are copied into every checkpoint (run->saves.companions).
void run_open_tokenizer(Run *run);

END_C
