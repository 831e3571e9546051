// Learning-rate schedules.
#ifndef LLM8_SCHEDULE_H
#define LLM8_SCHEDULE_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

// The learning rate of optimizer step `step`, counted from 0. Linear warm-up from lr/warmup, then:
// cosine, linear: from lr down to min-lr at lr-decay-iters, and min-lr after;
// constant: lr; wsd: lr, then linearly down over the last lr-wsd-decay-iters.
double learning_rate(const Options *options, int64_t step);

#ifdef __cplusplus
}
#endif

#endif
