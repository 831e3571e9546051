// What a run prints: its answers (evaluations, samples), and the line of a step.
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

typedef struct {
    int64_t step, steps;
    double loss, norm, lr, seconds, tokens_per_s;
    double use;           // FLOP/s as a share of the devices' peak, from 0 to 1; 0: not known
    double start_seconds; // first step: seconds since the program's start; later steps: 0
    const char *skipped;  // why the step was skipped; "": it was not
    bool whole;           // true: the line stays; false: a live line (console_step)
} StepLine;

// A run that trains prints everything to standard output or, if `quiet`, nothing. Any other run
// prints its answers to standard output, and the rest to standard error; if `quiet`, the rest is
// discarded.
void console_open(Console *c, bool trains, bool quiet);

// Flushes the answers. If they cannot be written, a run that trains warns and continues; any other
// run dies, because its answers are its result.
void console_flush(Console *c);

// Prints a line that stays or, on a terminal, a live line, which the next line overwrites. Fields
// are left out if the line is longer than 100 columns, or if a live line is wider than the
// terminal.
void console_step(Console *c, const StepLine *line);

END_C
