// Scoring multiple-choice sets, and what a trainer provides for that.
#pragma once

#include "state.h"

BEGIN_C

typedef struct {
    void *trainer;
    // Computes the losses [B,T]; 0 for a target of -1. B x T: at most the tokens of a micro-batch.
    void (*losses)(void *trainer, const int *inputs, const int *targets, int B, int T,
                   float *losses);
    // sums values over all ranks; NULL: there is one rank
    void (*sum)(void *trainer, int64_t *values, int n);
} ChoiceModel;

// Adds to counts: questions; right answers by the sum of an answer's losses; and by their mean. A
// signal ends it early.
void run_score_set(Run *run, const ChoiceSet *set, ChoiceModel model, int64_t counts[3]);

// Scores the sets of --eval-choices that are left of an evaluation, prints the results and writes
// their records.
void run_score_choices(Run *run, ChoiceModel model);

END_C
