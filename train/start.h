// What a run resolves once, at start-up.
#pragma once

#include "state.h"

BEGIN_C

// Called after options_parse: sets the options that are not given, from the checkpoint that the run
// starts from, which it opens, and the tokenizer of its data.
void run_resolve_options(Run *run);

// Decides batch, model and precision from run->options, run->group and what the device supports.
// All other fields of *run but `start` must be zero before.
bool run_configure(Run *run, NumberSupport support);
void run_free_configuration(Run *run);

// Opens --tokenizer. Rank 0 of a run that saves also reads the files that go with it into every
// checkpoint (run->saves).
void run_open_tokenizer(Run *run);

END_C
