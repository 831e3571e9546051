// The folder of --save during a run: it is locked for the run at the start, receives the run's
// checkpoints, and is made again if it is gone.
#pragma once

#include "state.h"

#include <math.h>

BEGIN_C

// Locks the folder for this run (checkpoint_claim), and opens the folder's metrics.jsonl or the
// file of --metrics. All ranks call it.
void save_folder_open(Run *run);
// If the run resumes, makes the checkpoint that it resumes the newest one of the folder
// (checkpoint_go_back). Writes config.txt. Rank 0 calls it, when the run is certain to start.
void save_folder_begin(const Run *run);

// Whether a loss is usual: at most half a nat above `best`, which is the lowest value so far of the
// loss's moving average (over about 10 steps) or of the validation loss. Most steps of a healthy
// run have a usual loss, and a diverged run has none, so one usual loss shows that the run is
// healthy.
static inline bool is_usual(double loss, double best) {
    return isfinite(loss) && !(loss > best + 0.5);
}

// Waits for the save that is under way, if there is one, and records it in metrics.jsonl. Returns
// false if the last save failed.
bool run_wait_for_save(Run *run);
// Starts a save; a thread writes it. Before the trainer fills the snapshot's arrays, it must call
// run_wait_for_save, because the previous save reads the same memory. run_save sets the snapshot's
// other fields.
void run_save(Run *run, Snapshot snapshot);
// Prints the command that resumes a saved run.
void save_folder_print_resume(const Run *run);

END_C
