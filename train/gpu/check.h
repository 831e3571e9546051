// Checked steps (--check-interval): whether the GPU computes the same twice, whether all ranks have
// the same weights, and whether the state keeps its bits from one update to the next.
//
// The first micro-step of a checked step runs twice. After each pass its results are hashed, and
// each hash is called a row. There is one row for the loss; one for the gradient and one for the
// weights of every parameter; one for the FP8 codes of every linear layer, with the scales that all
// ranks share; and one for the rotary table with the scales of weights' blocks. The part of a
// gradient that this rank keeps has a row of its own, because that part has been summed over the
// ranks if the micro-step is also the step's last one. The two passes must leave the same rows; if
// they do not, a third pass shows which of the two was wrong. The rows of weights, FP8 codes and
// tables must be the same on all ranks. The optimizer's state and the delayed scales with their
// history are hashed after the step's update and before the next update; the hashes of both times
// must be the same.
#pragma once

#include "network.h"

BEGIN_C

enum { CHECK_PASSES = 3 };

// Hashes of the state: rows[0] after an update, rows[1] before the next update. Each has a hash of
// every array of the optimizer's state, and one of the FP8 scales.
enum { CHECK_SCALES = STATE_ARRAYS, CHECK_STATES };
typedef struct {
    uint64_t rows[2][CHECK_STATES];
} StateHashes;

// The kinds of rows, in their order.
enum {
    ROWS_LOSS,      // one row
    ROWS_GRADIENTS, // each parameter's gradient, without the part that this rank keeps
    ROWS_WEIGHTS,   // each parameter's weights
    ROWS_CODES,     // each linear layer's FP8 codes
    ROWS_TABLES,    // one row: the rotary table and the scales of weights' blocks
    ROWS_KEPT,      // the part of each parameter's gradient that this rank keeps
    ROW_KINDS
};

typedef struct {
    const Network *net;
    int rows, first[ROW_KINDS]; // the number of rows, and the first row of each kind
    bool summed;                // the gradients in ROWS_KEPT have been summed over the ranks
    uint64_t *hashes, *host;    // [CHECK_PASSES, rows], on the device and on the host
    StateHashes *states;        // on the device
} Check;

// Plans the hashes. In a run without checked steps, c->rows becomes 0 and nothing is planned.
void check_plan(Check *c, const Network *net, Plan *plan);
void check_close(Check *c);

// Hashes what pass number `pass` (0, 1 or 2) of the micro-step has computed. Call it after a pass.
void check_hash(Check *c, int pass);
// Whether the first two passes left the same hashes, on all ranks. Waits for the device.
bool check_repeats(Check *c);
// Whether every rank's passes agree and all ranks have the same weights. All ranks call it and
// get the same answer. If check_repeats has returned false, the caller must first make and hash a
// third pass; check_agrees waits for that pass's hashes.
bool check_agrees(Check *c, int64_t step);

// Hashes master weights, moments and FP8 scales: with `next` false after a checked step's update,
// with `next` true before the following update.
void check_hash_state(Check *c, bool next);
// Whether, before the update of `step`, every rank's state still has the bits that the previous
// update left. All ranks call it.
bool check_state_kept(const Check *c, const StateHashes *hashes, int64_t step);

END_C
