// Scores multiple-choice sets by functions that a trainer provides.
#pragma once

#include "state.h"

BEGIN_C

typedef struct {
    void *trainer;
    // Computes the loss of each target [B,T]; a target of -1 has a loss of 0. B * T is at most the
    // number of tokens in a micro-batch.
    void (*losses)(void *trainer, const int *inputs, const int *targets, int B, int T,
                   float *losses);
    // Replaces values[n] by their sums over all ranks. NULL: there is one rank.
    void (*sum)(void *trainer, int64_t *values, int n);
} ChoiceModel;

// Adds to counts[0] the number of questions, to counts[1] the number that the model answers right
// if it chooses the answer with the lowest sum of its tokens' losses, and to counts[2] the same
// number for the lowest mean. All ranks' questions count. A signal ends the scoring early.
void run_score_set(Run *run, const ChoiceSet *set, ChoiceModel model, int64_t counts[3]);

// Scores all sets of --eval-choices, prints the results, and records them in metrics.jsonl. Stops
// if a signal has interrupted the evaluation.
void run_score_choices(Run *run, ChoiceModel model);

END_C
