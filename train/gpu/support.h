// What numbers the device can compute with, as far as the options let it; and --verify: is this
// machine fit to train on?
#pragma once

#include "../../kernels/gpu.h"
#include "../../model/options.h"
#include "../../model/precision.h"
#include "../../ranks/group.h"

BEGIN_C

enum { SUPPORT_REASON = 64 };

// By compute capability alone (90 for 9.0; 0: not known). reason: what support.lacks_fp8 points to.
NumberSupport support_of(int capability, char reason[SUPPORT_REASON]);

// With FP8 tried out. FP8 that is requested and not available on some rank: a warning, or with
// --fp8-required the end. All ranks call it.
NumberSupport support_find(Gpu *gpu, const Options *o, const Group *group,
                           char reason[SUPPORT_REASON]);

// How many kinds of FP8 products a run with these options takes, all of which this device has, and
// small ones of which, with scales, are exact; -1: one is missing or wrong.
int fp8_self_check(Gpu *gpu, const Options *o, NumberSupport support);

// Whether the kernels can work with the model's sizes, and with so many tokens in a micro-batch.
bool support_shapes(const ModelConfig *config, int64_t tokens);

// Versions, memory, a product and an attention that are checked against the CPU's and timed, small
// FP8 products and NCCL; a table and an exit status.
int verify(const Options *options);

// NCCL between the GPUs that this process sees: an all-reduce, its sums checked and timed. Which of
// its ways NCCL takes, the environment says (NCCL_*), as in a training.
#define NCCL_ROW "NCCL between GPUs"

typedef enum { NCCL_WELL, NCCL_BAD, NCCL_NOT_TESTED } NcclVerdict;

// Of so many FP32 elements. A check that takes longer than `seconds` ends the program with a line
// that says so. text: the row's. Not tested: there is one GPU, or no NCCL that serves.
NcclVerdict nccl_self_check(int gpus, int64_t elements, unsigned seconds, char *text, size_t room);

END_C
