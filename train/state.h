// The state of a run, which all parts of train/ share, and the signals that end it.
#pragma once

#include "../checkpoints/checkpoint.h"
#include "../dataloader/choices.h"
#include "../dataloader/loader.h"
#include "../dataloader/tokenizer.h"
#include "../ranks/group.h"

#include <stdio.h>

BEGIN_C

// metrics.jsonl (metrics.h)
typedef struct {
    FILE *file;             // NULL: it could not be opened, or there is none
    bool failing;           // the last record could not be written
    char path[PATH_LENGTH]; // "": nothing is written
} Metrics;

typedef struct {
    Options options; // the only ones of this process
    Group group;     // this rank among the others
    ModelConfig config;
    ParamLayout layout;
    Precision precision;
    Progress progress;

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
    double peak_flops;             // of one device, 0 when not known
    double memory_bytes;           // planned
    double used_bytes;             // of the device's memory, at the end; 0 when not known
    double step_seconds;           // moving average, for the ETA
    double own_seconds, own_steps; // of this rank's passes, and of how many steps, since a line
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

// What the main thread begins to do, for the watchdog of several ranks (ranks/group.h). The calls
// of train/ report it themselves; whatever else may take long must. what: a string literal.
void run_beat(const Run *run, Doing doing, const char *what);

// From now on, signals request an end.
void run_catch_signals(void);
// The signal that has requested the end of this process, 0: none. Several ranks: a step hands it to
// the others, so that all end after the same one (StepResult.stop).
int run_stop_signal(void);
// Ends the run after the present step, as a signal does: data of --`option` could not be read.
void run_end_by_data(Run *run, const char *option); // error_text() says why

// run->answers; a run that trains goes on without it, with a warning.
void run_flush(Run *run);

END_C
