// What a run resolves once, at start-up.
#pragma once

#include "state.h"

BEGIN_C

// Called once, after options_parse: sets the options that are not given. It opens the checkpoint
// that the run starts from, and with --epochs the data.
void run_resolve_options(Run *run);

// Decides model and precision from run->options and what the device supports. Other fields of *run
// that run_resolve_options does not set must be zero before.
void run_configure(Run *run, NumberSupport support);
void run_free_configuration(Run *run);

// Opens --tokenizer. Rank 0 of a run that saves also reads the files that go into every checkpoint
// with it (run->saves).
void run_open_tokenizer(Run *run);

END_C
