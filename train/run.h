// What both trainers do around the model: start-up, data, the step's line, when to evaluate, sample
// and save, signals, the way a run ends. The trainers keep the model and its mathematics.
#ifndef LLM8_RUN_H
#define LLM8_RUN_H

#include "../checkpoints/checkpoint.h"
#include "../dataloader/choices.h"
#include "../dataloader/loader.h"
#include "../dataloader/tokenizer.h"
#include "../ranks/group.h"
#include "metrics.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Options options;
    ModelConfig config;
    ParamLayout layout;
    Precision precision;
    Progress progress;
    int rank, ranks;
    Group *group; // the other ranks; NULL: there are none

    Dataset train_data, valid_data;
    Loader train, valid;
    bool has_valid, has_tokenizer;
    Tokenizer tokenizer;
    char tokenizer_folder[PATH_LENGTH]; // where tokenizer.bin was found
    int *prompt, prompt_length;         // the tokens that samples start with
    ChoiceSets choices;                 // --eval-choices

    Metrics metrics;
    Saver saver;
    double peak_flops;   // of one device, 0 when not known
    double memory_bytes; // of the device in use, 0 when not known
    double step_seconds; // moving average, for the ETA
    char device[128];
    int64_t saved_step; // the last step a save was begun for, -1: none
    double last_line;   // when the live line was last drawn
    bool stopping;      // several ranks: they have agreed to end
} Run;

// What a step hands to its report. Several ranks: the same on all, but for own_loss.
typedef struct {
    double loss, norm, lr, seconds;
    bool skipped;
    bool stop;       // several ranks: run_stop_signal() was not 0 on one of them
    double own_loss; // several ranks: the mean of this rank's sequences
} StepResult;

// Model, batch and precision, from the options and what the device offers.
bool run_configure(Run *run, const Options *options, NumberSupport support, Error *err);
void run_free_configuration(Run *run);
// Prints them. --list-checkpoints is answered here.
void run_announce(const Run *run);
// Parameters, and FLOPs to train on a token; scripts/estimate reads them from --plan.
void run_print_size(const Run *run);
// Data, signals, the save folder; prints. device goes on the start-up lines and into metrics.jsonl.
// Several ranks: data and folder must be the same on all.
void run_start(Run *run, const char *device);
// The data of run_start.
void run_open_data(Run *run);
// Waits for the last save; returns the exit status.
int run_close(Run *run);

// Opens the checkpoint that --resume names, if there is one, and takes its progress over. Where the
// run starts goes into metrics.jsonl.
bool run_restore(Run *run, Checkpoint *checkpoint);
// Where there is none: the weights of --load, or else random ones.
void run_first_weights(const Run *run, float *weights);

// inputs, targets [B,T] of micro-batch `micro` of the present step, or of the one `ahead` steps on.
void run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets);
int run_micro_batches(const Run *run); // a step

// Evaluation goes over the same windows whatever the batch: eval_samples of them, from 0. The batch
// from `sample` on; what is past the end is left out. Several ranks share them: each begins at
// run_eval_first() and goes on by run_eval_stride(), and they add up their sums.
int64_t run_eval_samples(const Run *run);
static inline int64_t run_eval_first(const Run *run) {
    return (int64_t)run->rank * run->options.micro_batch_size;
}
static inline int64_t run_eval_stride(const Run *run) {
    return (int64_t)run->ranks * run->options.micro_batch_size;
}
void run_eval_batch(Run *run, int64_t sample, int *inputs, int *targets);

bool run_goes_on(const Run *run); // neither done nor stopped
// The signal that has asked this process to end, 0: none. Several ranks: a step hands it to the
// others, so that all end after the same one (StepResult.stop).
int run_stop_signal(void);
// Several ranks stop when all know it; one, when it does.
bool run_is_stopping(const Run *run);
void run_catch_signals(void);
bool run_finite(double loss, double norm);

// --dump-gradients: writes them (FP32, laid out as the parameters) and the loss, and leaves. Does
// nothing without the option.
void run_maybe_dump(const Run *run, const float *gradients, double loss);

// The line of a step that has been counted.
void step_print(Run *run, StepResult s, double tokens_per_s);

// Counts the step and its tokens, prints, writes the record.
void run_report(Run *run, StepResult result);
void run_report_eval(Run *run, double loss, double seconds);

// --fp8-stats-interval: whether step number `step` counts what FP8 loses; the record of it, by
// slot.
bool run_counts_fp8(const Run *run, int64_t step);
void run_report_fp8(Run *run, const Fp8Counts *counts);

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

// Whether something besides the next step waits for the report of step number `step` (counted as
// progress counts): an evaluation, a sample, a save, the end.
bool run_needs_result(const Run *run, int64_t step);
bool run_should_eval(const Run *run);
bool run_should_sample(const Run *run);
bool run_should_save(const Run *run);
// Starts the save and says so.
void run_save(Run *run, const Snapshot *snapshot);

// The logits [V] of the token after tokens[0..n), n <= seq_length; they are used before the next
// call.
typedef const float *(*NextLogits)(void *trainer, const int *tokens, int n);

// Prints a sample: --sample-prompt, then what the model makes of it, as text, or as ids where there
// is no tokenizer. It starts with the end of text, as documents do.
void run_sample(Run *run, NextLogits next_logits, void *trainer);

// What a sample starts with, into run->prompt.
bool run_encode_prompt(Run *run, Error *err);

// The next token by temperature and top-k; scratch[V]. place counts the tokens of the sample.
int sample_token(const Options *options, const float *logits, float *scratch, int V, int64_t place);

// ---- run_ranks.c: what a run does because it is several ranks; nothing, where it is one ----

// What the main thread begins to do, for the watchdog (ranks/watch.h). The calls above say it
// themselves; whatever else may take long must. what: a string literal.
void run_beat(const Run *run, Doing doing, const char *what);

// Refuses data, or a --save folder, that is not the same for every rank.
void ranks_check_data(const Run *run);
void ranks_check_folder(const Run *run);
// --resume: rank 0 finds and checks the checkpoint, the others open the same one.
bool ranks_find_checkpoint(const Run *run, Checkpoint *c, bool *found, Error *err);
// Takes over what the ranks have agreed on; a rank whose own loss is not finite says so.
void ranks_report(Run *run, StepResult result);
// Exits with success, once all ranks do.
void ranks_leave(const Run *run) __attribute__((noreturn));

#ifdef __cplusplus
}
#endif

#endif
