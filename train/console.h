// What a run prints: its answers (evaluations, samples), and the line of a step.
#pragma once

#include "../base/common.h"

#include <stdio.h>

BEGIN_C

typedef struct {
    FILE *answers;       // receives evaluations and samples; all else is printed to stdout
    bool trains;         // the run trains (console_open)
    bool mute;           // the run has warned that answers could not be written
    double last_line;    // when the live line was last drawn
    double step_seconds; // moving average of a step's time, for the ETA; 0 at first
} Console;

typedef struct {
    int64_t step, steps;
    double loss, norm, lr, seconds, tokens_per_s;
    double use;           // share of the devices' peak FLOP/s, from 0 to 1; 0: not known
    double start_seconds; // in the first step: seconds since the program's start; else 0
    const char *skipped;  // why the step was skipped; "": it was not
    bool whole;           // the line stays; else it is a live line (console_step)
} StepLine;

// A run that trains prints everything to standard output; if `quiet`, it prints nothing. Other runs
// print their answers to standard output, and all else to standard error; if `quiet`, all else is
// discarded.
void console_open(Console *c, bool trains, bool quiet);

// Flushes what goes to standard output. If that fails, a run that trains warns and continues; other
// runs die, since their output is their result.
void console_flush(Console *c);

// Prints a line that stays or, on a terminal, a live line, which the next line overwrites. Leaves
// out fields of a line that is longer than 100 columns, or of a live line that is wider than the
// terminal.
void console_step(Console *c, const StepLine *line);

END_C
