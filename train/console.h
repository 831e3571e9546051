// Where a run prints: its answers (evaluations, samples), and all else.
#pragma once

#include "../base/common.h"

#include <stdio.h>

BEGIN_C

typedef struct {
    FILE *answers;       // evaluations and samples are printed here, all else to stdout
    bool trains;         // the run trains (console_open)
    bool mute;           // the run has warned that answers could not be written
    double last_line;    // when the live line was last drawn
    double step_seconds; // moving average of a step's time, for the ETA; 0 at first
} Console;

// A run that trains prints everything to standard output or, if `quiet`, nothing. Any other run
// prints its answers to standard output, and the rest to standard error; if `quiet`, the rest is
// discarded.
void console_open(Console *c, bool trains, bool quiet);

// Flushes the answers. If they cannot be written, a run that trains warns and continues; any other
// run dies, because its answers are its result.
void console_flush(Console *c);

END_C
