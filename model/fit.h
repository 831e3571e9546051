// What fits a given memory: the largest micro-batches, and what to change when a run does not fit.
#ifndef LLM8_FIT_H
#define LLM8_FIT_H

#include "precision.h"

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of device memory a run with these options plans on a device that offers this.
typedef int64_t (*PlannedBytes)(const Options *options, NumberSupport support);

// Besides the plan: the CUDA context, the libraries, graphs.
#define FIT_OVERHEAD_BYTES ((int64_t)1200 << 20)

// The largest micro-batch for every way of saving memory.
void fit_print(const Options *options, NumberSupport support, PlannedBytes planned, int64_t memory);

// The nearest change to the options that fits, as options.
void fit_advice(const Options *options, NumberSupport support, PlannedBytes planned, int64_t memory,
                char text[128]);

#ifdef __cplusplus
}
#endif

#endif
