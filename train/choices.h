// Multiple-choice sets: how a trainer takes part in scoring them.
#pragma once

#include "state.h"

BEGIN_C

typedef struct {
    void *trainer;
    // losses [B,T] of the targets; 0 where a target is -1. B x T is at most a micro-batch's tokens.
    void (*losses)(void *trainer, const int *inputs, const int *targets, int B, int T,
                   float *losses);
    void (*sum)(void *trainer, int64_t *values, int n); // over the ranks; NULL: there is one
} ChoiceModel;

// Adds to counts: the questions, those answered rightly by the sum of an answer's losses, and by
// their mean.
void run_score_set(Run *run, const ChoiceSet *set, ChoiceModel model, int64_t counts[3]);

// Scores every set of --eval-choices, prints and writes the records.
void run_score_choices(Run *run, ChoiceModel model);

END_C
