// The state of a run, which all files of train/ share, what it prints to, and the signals that end
// it.
#pragma once

#include "../checkpoints/checkpoint.h"
#include "../dataloader/choices.h"
#include "../dataloader/mixture.h"
#include "../dataloader/tokenizer.h"
#include "../ranks/group.h"

#include <stdio.h>

BEGIN_C

typedef struct {
    FILE *answers;       // evaluations and samples are printed here, all else to stdout
    bool mute;           // the run has warned that answers could not be written
    double last_line;    // when the live line was last drawn
    double step_seconds; // moving average of a step's time, for the ETA; 0 at first
} Console;

// The file metrics.jsonl (metrics.h).
typedef struct {
    FILE *file;             // NULL: it could not be opened, or nothing is written
    bool failing;           // the last record could not be written
    char path[PATH_LENGTH]; // "": nothing is written
    PathId id;              // identifies the open file: later `path` may lead to another one
} Metrics;

// The folder of --save.
typedef struct {
    int64_t step; // the step of the newest checkpoint; -1: none
    PathId id;    // identifies the folder that this run has locked
    Saver saver;
    Companion companions[COMPANIONS]; // files that are saved with the model
    Companion start_config;           // config.json of --load or --resume
} SaveFolder;

// A tokenizer, from the file at `path`. vocab 0: the file cannot be read, or there is none.
typedef struct {
    char path[PATH_LENGTH];
    int vocab, document_end;
    uint32_t fingerprint;
} FoundTokenizer;

typedef struct {
    Options options; // the options of this process
    Group group;     // this rank, and its connection to the others
    ModelConfig config;
    ParamLayout layout;
    Precision precision;
    Progress progress;
    // the checkpoint of --load or --resume; the trainer closes it after reading weights and state
    Checkpoint start;

    Mixture train_data, valid_data; // count 0: there are none
    Loader train;
    FoundTokenizer *beside; // [num_beside] what read_beside has read beside the shards
    int num_beside;
    Tokenizer tokenizer;        // vocab 0: there is none
    int document_end;           // the token that ends a document; -1: not known
    int *prompt, prompt_length; // the tokens that every sample starts with
    ChoiceSets choices;         // --eval-choices
    int *prefetched;            // batches that this rank has read in advance (run_batch)
    int64_t prefetched_end;     // the first sample of the next batch to read
    Error data_fault;           // why data could not be read; "": they could

    Console console;
    Metrics metrics;
    SaveFolder saves;
    double peak_flops;   // peak FLOP/s of one device; 0: not known
    double memory_bytes; // bytes of the plan
    double used_bytes;   // bytes of device memory in use at the end; 0: not known
    // since the last record "ranks": the seconds of this rank's forward and backward passes, and
    // the number of steps in which they were measured
    double own_seconds, own_steps;
    char device[128];
    bool stopping; // several ranks have agreed to stop
} Run;

// Whether Muon updates a parameter of a run that trains; otherwise AdamW does.
static inline bool run_by_muon(const Run *run, const Param *p) {
    int rows[HF_PARTS];
    return run->options.optimizer == OPTIMIZER_MUON && param_matrices(&run->config, p, rows) > 0;
}

// Whether --max-skipped steps in a row were skipped.
static inline bool run_has_diverged(const Run *run) {
    const Options *o = &run->options;
    return options_train(o) && run->progress.skipped_in_row >= o->max_skipped;
}

// Whether there is something to evaluate.
static inline bool run_can_eval(const Run *run) {
    return run->valid_data.count > 0 || run->choices.count > 0;
}

// Tells the watchdog (ranks/group.h) what the main thread begins to do. The functions of train/
// call run_beat themselves; other code that may take long must call it. what: a string literal.
void run_beat(const Run *run, Activity activity, const char *what);

// Sets where the run prints. A run that trains prints everything to standard output; with --quiet
// or on ranks other than 0 it prints nothing. Any other run prints its answers to standard output,
// and all else to standard error; with --quiet or on ranks other than 0 it prints only the answers.
void console_open(Run *run);
// Flushes the answers. If they cannot be written, a run that trains warns and continues; any other
// run dies, because its answers are its result.
void console_flush(Run *run);

// Catches signals. From now on, a signal requests the end of the run.
void run_catch_signals(void);
// Returns the signal that has requested the end of this process; 0: none; -1: run_end_by_data was
// called. With several ranks, the next step carries the request to the others (StepResult.stop), so
// that all end after the same step.
int run_stop_signal(void);
// Requests, as a signal does, the end of the run after the present step, and ends an evaluation
// early. Call it if the data of --`option` cannot be read and error_text() says why.
void run_end_by_data(Run *run, const char *option);

END_C
