// What a run prints: its answers (evaluations, samples), and the line of a step.
#pragma once

#include "../base/common.h"

#include <stdio.h>

BEGIN_C

typedef struct {
    FILE *answers;       // evaluations and samples; all else goes to the standard output
    bool mute;           // the answers cannot be written
    double last_line;    // when the live line was last drawn
    double step_seconds; // moving average, for the ETA; 0 before the first step
} Console;

typedef struct {
    int64_t step, steps;
    double loss, norm, lr, seconds, tokens_per_s;
    double use;           // share of the devices' peak FLOP/s, from 0 to 1; 0: not known
    double start_seconds; // in the first step: seconds since the program's start; else 0
    const char *skipped;  // why the step was skipped; "": it was not
    bool whole;           // prints a whole line, and not only a live one
} StepLine;

// Splits the output. If the run does not train, only its answers go to standard output; all else
// goes to standard error. quiet: all else goes nowhere.
void console_open(Console *c, bool trains, bool quiet);

// Flushes the answers. If that fails, a run that trains warns and continues; others die.
void console_flush(Console *c, bool trains);

// Prints a whole line or, on a terminal, a live line, which the next line overwrites. If it would
// be longer than the terminal or 100 columns, it leaves out fields.
void console_step(Console *c, const StepLine *line);

END_C
