// What a run resolves once, at start-up.
#pragma once

#include "state.h"

BEGIN_C

// Called once, after options_parse: sets the options that are not given. It opens the checkpoint
// that the run starts from, and with --epochs the data.
void run_resolve_options(Run *run);

// Sets run->config, layout and precision from run->options and what the device supports. Before the
// call, the fields of *run must be zero, except those that run_resolve_options has set.
void run_configure(Run *run, NumberSupport support);
void run_free_configuration(Run *run);

// Opens the tokenizer of --tokenizer. In a run that saves, rank 0 also reads the files that are
// copied into every checkpoint (run->saves.companions).
void run_open_tokenizer(Run *run);

END_C
