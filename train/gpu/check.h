// Checked steps (--check-interval): whether the GPU computes the same twice, and whether all ranks
// have the same weights.
//
// The first micro-batch goes forward and backward twice. After each pass its loss, the gradient of
// every parameter, the weights that products read, their FP8 codes with the scales that all ranks
// share, and the rotary table are hashed, one row each. Both passes must leave the same rows; if
// they do not, a third pass shows which was wrong. The rows of weights must be the same on all
// ranks. (Master weights and moments are kept by one rank each: checkpoints have their hashes.)
#pragma once

#include "network.h"

BEGIN_C

enum { CHECK_PASSES = 3 };

typedef struct {
    const Network *net;
    int params, linears, rows; // rows: the loss; gradients; weights; codes; rotary table
    uint64_t *hashes, *host;   // [CHECK_PASSES, rows], on the device and on the host
} Check;

// In a run that checks nothing, plans nothing and leaves c->rows at 0.
void check_plan(Check *c, const Network *net, Plan *plan);
void check_close(Check *c);

// Hashes the rows after pass number `pass`.
void check_hash(Check *c, int pass);
// Whether the first two passes left the same hashes. Waits for the device.
bool check_repeats(Check *c);
// Whether the passes of every rank agree and all ranks have the same weights. All ranks call it and
// get the same answer. After check_repeats has returned false, the caller makes a third pass first;
// this waits for its hashes.
bool check_agrees(Check *c, int64_t step);

END_C
