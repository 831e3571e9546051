// What both trainers do around the model: start-up, data, schedule, the step's line, when to
// evaluate, sample and save, signals, the end of a run. The trainers keep the model's mathematics.
#pragma once

#include "../checkpoints/checkpoint.h"
#include "../dataloader/choices.h"
#include "../dataloader/loader.h"
#include "../dataloader/tokenizer.h"
#include "../ranks/group.h"

#include <math.h>
#include <stdio.h>

BEGIN_C

// metrics.jsonl (metrics.c)
typedef struct {
    FILE *file;             // NULL: it could not be opened, or there is none
    bool failing;           // the last record could not be written
    char path[PATH_LENGTH]; // "": nothing is written
} Metrics;

typedef struct {
    Options options;
    ModelConfig config;
    ParamLayout layout;
    Precision precision;
    Progress progress;
    int rank, ranks;
    Group *group; // the other ranks; NULL: one process

    Dataset train_data, valid_data;
    Loader train, valid;
    bool has_valid, has_tokenizer;
    Tokenizer tokenizer;
    Companion companions[COMPANIONS_MAX]; // what is saved with the model
    int num_companions;
    int *prompt, prompt_length; // the tokens that samples start with
    ChoiceSets choices;         // --eval-choices
    int *held;                  // this rank's next batches (run_batch)
    int64_t held_end;           // the first sample of the next one to read
    Error data_fault;           // which data could not be read; "": none

    FILE *answers; // evaluations and samples; the rest goes to stdout
    Metrics metrics;
    Saver saver;
    double peak_flops;   // of one device, 0 when not known
    double memory_bytes; // planned
    double used_bytes;   // of the device's memory, at the end; 0 when not known
    double step_seconds; // moving average, for the ETA
    char device[128];
    bool in_flight;     // a step that is enqueued and not reported yet: nothing else is due
    int64_t saved_step; // the step of the newest checkpoint, -1: none
    FolderId folder;    // --save
    double last_line;   // when the live line was last drawn
    bool diverged;      // --max-skipped steps in a row were skipped
    bool stopping;      // several ranks: they have agreed to end
    bool mute;          // the standard output cannot be written
} Run;

// Whether Muon updates a parameter, where the run trains; else AdamW does.
static inline bool run_by_muon(const Run *run, const Param *p) {
    int rows[HF_PARTS];
    return run->options.optimizer == OPTIMIZER_MUON && param_matrices(&run->config, p, rows) > 0;
}

// ---- start and end ------------------------------------------------------------------------------

// After options_parse: the options that nobody gave, from the checkpoint that the run starts from
// and the tokenizer of its data.
void run_resolve_options(Options *options);

// Model, batch and precision, from the options and what the device offers.
bool run_configure(Run *run, const Options *options, NumberSupport support);
void run_free_configuration(Run *run);
// Prints them; or answers --list-checkpoints or --list-tensors, and exits.
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

// What the main thread begins to do, for the watchdog of several ranks (ranks/group.h). The calls
// of this file report it themselves; whatever else may take long must. what: a string literal.
void run_beat(const Run *run, Doing doing, const char *what);

// ---- data (run_data.c) --------------------------------------------------------------------------

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

// An evaluation reads the same windows whatever the batch: run_eval_samples of them, from 0.
// Several ranks share them: each begins at run_eval_first(), advances by run_eval_stride(), and
// they add up their sums. run_eval_batch: the batch from `sample` on; windows past the end are left
// out.
int64_t run_eval_samples(const Run *run);
static inline int64_t run_eval_first(const Run *run) {
    return (int64_t)run->rank * run->options.micro_batch_size;
}
static inline int64_t run_eval_stride(const Run *run) {
    return (int64_t)run->ranks * run->options.micro_batch_size;
}
void run_eval_batch(Run *run, int64_t sample, int *inputs, int *targets);

// ---- schedule -----------------------------------------------------------------------------------

// The learning rate of optimizer step `step`, counted from 0. Linear warm-up from lr/warmup, then:
// cosine, linear: from lr down to min-lr at lr-decay-iters, and min-lr after;
// constant: lr; wsd: lr, then linearly down over the last lr-wsd-decay-iters.
double learning_rate(const Options *options, int64_t step);

bool run_goes_on(const Run *run); // neither done nor stopped
// The signal that has requested the end of this process, 0: none. Several ranks: a step hands it to
// the others, so that all end after the same one (StepResult.stop).
int run_stop_signal(void);
// Ends the run after the present step, as a signal does: data of --`option` could not be read.
void run_end_by_data(Run *run, const char *option); // error_text() says why
// Whether something besides the next step waits for the report of step number `step` (counted as
// progress counts): an evaluation, a sample, a save, the end.
bool run_needs_result(const Run *run, int64_t step);
bool run_should_eval(const Run *run);
bool run_should_sample(const Run *run);
bool run_should_save(const Run *run);

// ---- reports ------------------------------------------------------------------------------------

// What a step hands to its report. Several ranks: the same on all, but for own_loss.
typedef struct {
    double loss, norm, lr, seconds;
    bool skipped;
    bool stop;       // several ranks: run_stop_signal() was not 0 on one of them
    double own_loss; // several ranks: the mean of this rank's sequences
} StepResult;

static inline bool run_finite(double loss, double norm) {
    return isfinite(loss) && isfinite(norm);
}

// Counts the step and its tokens, prints, writes the record.
void run_report(Run *run, StepResult result);
void run_report_eval(Run *run, double loss, double seconds);

// --fp8-stats-interval: whether step number `step` counts what FP8 loses; its record, by slot.
bool run_counts_fp8(const Run *run, int64_t step);
void run_report_fp8(Run *run, const Fp8Counts *counts);

// --dump-gradients: writes them (FP32, laid out as the parameters) and the loss, and exits. Does
// nothing without the option.
void run_maybe_dump(const Run *run, const float *gradients, double loss);

// Starts the save and records it. The trainer sets what it saves; the rest is filled in here.
void run_save(Run *run, const Snapshot *snapshot);

// ---- metrics (metrics.c) ------------------------------------------------------------------------

bool metrics_open(Metrics *m, const char *path);
void metrics_close(Metrics *m);
void metrics_sync(const Metrics *m); // to the disk

// A record: begin, add fields, end, which writes the line.
typedef struct cJSON MetricsRecord;
MetricsRecord *metrics_begin(const char *kind);
void metrics_number(MetricsRecord *r, const char *name, double value);
void metrics_text(MetricsRecord *r, const char *name, const char *value);
void metrics_end(Metrics *m, MetricsRecord *r);
void run_record_start(Run *run);

// ---- multiple choice (choices.c) ----------------------------------------------------------------

// How a trainer takes part in scoring multiple-choice sets.
typedef struct {
    void *trainer;
    // losses [B,T] of the targets; 0 where a target is -1. B x T is at most a micro-batch's tokens.
    void (*losses)(void *trainer, const int *inputs, const int *targets, int B, int T,
                   float *losses);
    void (*sum)(void *trainer, int64_t *values, int n); // over the ranks; NULL: there is one
} ChoiceModel;

// Adds to counts: the questions, those answered rightly by the sum of an answer's losses, and by
// their mean.
void run_score_set(Run *run, const ChoiceSet *set, ChoiceModel model, int64_t counts[3]);

// Scores every set of --eval-choices, prints and writes the records.
void run_score_choices(Run *run, ChoiceModel model);

// ---- samples (sample.c) -------------------------------------------------------------------------

// --sample-prompt as tokens, after the end of text that every document starts with: run->prompt.
bool run_encode_prompt(Run *run);

// The logits [V] of the token after tokens[0..n), n <= seq_length, which the caller may change;
// valid until the next call.
typedef float *(*NextLogits)(void *trainer, const int *tokens, int n);

// Prints the prompt and the model's continuation, as text, or as ids without a tokenizer.
void run_sample(Run *run, NextLogits next_logits, void *trainer);

// ---- what fits a memory -------------------------------------------------------------------------

// Bytes of device memory a run with these options plans on a device that offers this.
typedef int64_t (*PlannedBytes)(const Options *options, NumberSupport support);

// Besides the plan: the CUDA context, the libraries, graphs.
#define FIT_OVERHEAD_BYTES ((int64_t)1200 << 20)

// Prints the largest micro-batch for every way of saving memory.
void fit_print(const Options *options, NumberSupport support, PlannedBytes planned, int64_t memory);

// The nearest change to the options that fits, as options.
void fit_advice(const Options *options, NumberSupport support, PlannedBytes planned, int64_t memory,
                char text[128]);

END_C
