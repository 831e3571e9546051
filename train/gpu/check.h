// What is compared in a checked step (--check-interval): whether the GPU computes the same twice,
// and whether all ranks have the same weights.
//
// The first micro-batch goes forward and backward twice. After each pass its loss, the gradient of
// every parameter, the weights that products read, their codes with the scales that all ranks have,
// and the rotary table are hashed, a row each. Both passes must leave the same rows; where they do
// not, a third says which was wrong. The rows of weights must be the same on all ranks. (The master
// weights and moments have one owner: checkpoints have their hash.)
#pragma once

#include "network.h"

BEGIN_C

enum { CHECK_PASSES = 3 };

typedef struct {
    const Network *net;
    int params, linears, rows; // rows: the loss; gradients; weights; codes; rotary table
    uint64_t *hashes, *host;   // [CHECK_PASSES, rows], on the device and on the host
} Check;

// Plans nothing, and leaves c->rows 0, in a run that checks nothing.
void check_plan(Check *c, const Network *net, Plan *plan);
void check_close(Check *c);

// After pass number `pass`.
void check_hash(Check *c, int pass);
// Whether the first two passes left the same hashes. Waits for the device.
bool check_repeats(Check *c);
// Whether the passes of every rank repeat and all ranks have the same weights; all ranks call it
// and get the same answer. Where check_repeats said no, the caller has made a third pass; this
// waits for its hashes.
bool check_agrees(Check *c, int64_t step);

END_C
