// --verify: is this machine fit to train on? Versions, memory, a product and an attention that are
// checked against the CPU's and timed, small FP8 products and NCCL; a table and an exit status.
#pragma once

#include "../../model/options.h"

BEGIN_C

int verify(const Options *options);

// NCCL between the GPUs that this process sees: an all-reduce, its sums checked and timed. Which of
// its ways NCCL takes, the environment says (NCCL_*), as in a training.
#define NCCL_ROW "NCCL between GPUs"

typedef enum { NCCL_WELL, NCCL_BAD, NCCL_NOT_TESTED } NcclVerdict;

// Of so many FP32 elements. A check that takes longer than `seconds` ends the program with a line
// that says so. text: the row's. Not tested: there is one GPU, or no NCCL that serves.
NcclVerdict nccl_self_check(int gpus, int64_t elements, unsigned seconds, char *text, size_t room);

END_C
