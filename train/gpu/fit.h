// Which micro-batch fits a device's memory, for --plan.
#pragma once

#include "../state.h"

BEGIN_C

typedef struct {
    int64_t device; // bytes
    double host;    // bytes, for all ranks of this machine
} PlannedMemory;

// Plans a run with these options, on a device with this support and so many bytes of memory.
typedef PlannedMemory (*RunPlanner)(const Options *options, const Group *group,
                                    NumberSupport support, int64_t memory);

// Device memory that is not in the plan: the CUDA context, the libraries, graphs.
#define FIT_OVERHEAD_BYTES ((int64_t)1200 << 20)

// Prints the largest micro-batch for every way to save memory. Each way is a variant of the run's
// options.
void fit_print(const Run *run, NumberSupport support, RunPlanner plan, int64_t memory);

END_C
