// --verify: NCCL between the GPUs that this process sees, with the sums of an all-reduce checked
// and its time taken. Which of its ways NCCL takes, the environment says (NCCL_*), as in a
// training.
#ifndef LLM8_VERIFY_NCCL_H
#define LLM8_VERIFY_NCCL_H

#include "../../base/common.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NCCL_ROW "NCCL between GPUs"

typedef enum { NCCL_WELL, NCCL_BAD, NCCL_NOT_TESTED } NcclVerdict;

typedef struct {
    int gpus;
    int64_t elements; // FP32, summed over the GPUs
    unsigned seconds; // a check that takes longer ends the program with a line that says so
} NcclCheck;

// The row's text. Not tested: there is one GPU, or no NCCL that serves.
NcclVerdict nccl_self_check(NcclCheck what, char *text, size_t room);

#ifdef __cplusplus
}
#endif

#endif
