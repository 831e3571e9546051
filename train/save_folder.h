// The folder of --save during a run: claimed at the start, made again if it is moved, and saved to.
#pragma once

#include "state.h"

#include <math.h>

BEGIN_C

// Claims the folder, and opens metrics.jsonl in it or the file of --metrics. All ranks call it.
void save_folder_open(Run *run);
// Called on rank 0 when the run is certain to start: makes the checkpoint that it resumes the
// newest one, and writes config.txt.
void save_folder_begin(Run *run, const Checkpoint *resumed);

// A loss is usual if it is at most half a nat above the lowest average over about 10 steps. Most
// batches of a good run have a usual loss, and one is enough; a run that has diverged has none.
static inline bool is_usual(double loss, double best) {
    return isfinite(loss) && !(loss > best + 0.5);
}

// Waits until the last save has ended, and records that.
void save_folder_report(Run *run);
// The same; returns whether the save has succeeded.
bool run_wait_for_save(Run *run);
// Starts a save, after the last has ended. The trainer sets the snapshot's arrays; this sets the
// other fields.
void run_save(Run *run, const Snapshot *snapshot);
// Called after a part of an evaluation, if its step was saved before: adds the part's result to the
// checkpoint.
void save_folder_evaluated(Run *run);

// Prints the command that resumes a saved run.
void save_folder_print_resume(const Run *run);

END_C
