// Checked steps (--check-interval): whether the GPU computes the same twice, whether all ranks have
// the same weights, and whether the state keeps its bits from one update to the next.
//
// The first micro-step of the step is made twice. After each time its loss, the gradient of every
// parameter, the weights that products read, their FP8 codes with the scales that all ranks share,
// and the rotary table are hashed, one row each. Of a gradient, the part that this rank keeps has a
// row of its own: if the micro-step is also the last one, that part has been summed over the ranks.
// Both times must leave the same rows; if they do not, a third shows which was wrong. The rows of
// weights must be the same on all ranks. After the step's update the optimizer's state and the
// delayed scales with their history are hashed, and again before the next update.
#pragma once

#include "network.h"

BEGIN_C

enum { CHECK_PASSES = 3 };

// Rows of hashes of the state, after an update and before the next.
enum { CHECK_SCALES = STATE_ARRAYS, CHECK_STATES };
typedef struct {
    uint64_t rows[2][CHECK_STATES];
} StateHashes;

typedef struct {
    const Network *net;
    int params, linears;
    // the loss; of each parameter's gradient the part that other ranks keep; weights; codes; the
    // rotary table; of each gradient the part that this rank keeps
    int rows;
    bool summed;             // the last rows are of sums over the ranks
    uint64_t *hashes, *host; // [CHECK_PASSES, rows], on the device and on the host
    StateHashes *states;     // on the device
} Check;

// In a run that checks nothing, plans nothing and leaves c->rows at 0.
void check_plan(Check *c, const Network *net, Plan *plan);
void check_close(Check *c);

// Hashes the rows after pass number `pass`.
void check_hash(Check *c, int pass);
// Whether the first two passes left the same hashes, on all ranks. Waits for the device.
bool check_repeats(Check *c);
// Whether the passes of every rank agree and all ranks have the same weights. All ranks call it and
// get the same answer. After check_repeats has returned false, the caller makes a third pass first;
// this waits for its hashes.
bool check_agrees(Check *c, int64_t step);

// Hashes the state after a checked step's update; next: before the update that follows.
void check_hash_state(Check *c, bool next);
// Whether the state of every rank kept its bits until the update of `step`. All ranks call it.
bool check_state_kept(const Check *c, const StateHashes *hashes, int64_t step);

END_C
