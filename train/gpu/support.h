// Which number formats the device supports, by its capability and by a test; and --verify, which
// checks whether this machine is fit to train on.
#pragma once

#include "../../kernels/gemm.h"
#include "../../model/options.h"
#include "../../model/precision.h"
#include "../../ranks/group.h"

BEGIN_C

// Returns the number formats that a device has by its compute capability alone (90 for 9.0; 0: not
// known).
NumberSupport support_of(int capability);

// Returns the number formats after a test of FP8 matmuls. If FP8 is requested but not available on
// some rank, no rank uses FP8: all ranks warn or, with --fp8-required, die. All ranks call it.
NumberSupport support_find(Gpu *gpu, const Options *o, const Group *group);

// Whether the device can compute a matmul g, D [n,n] = A B' of operands [n,k], whose pointers the
// function sets. It fills A and B with small whole numbers in g's types and scalings, and computes
// D in FP32 without an epilogue: the first `rows` rows must equal the CPU's. Besides, cuBLASLt must
// support g with g's own type of D, epilogue and accumulation. ms: NULL, or receives the
// milliseconds of one matmul g.
bool support_matmul(Gpu *gpu, Gemm g, int rows, float *ms);

// Tests each kind of FP8 matmul that a run with these options computes, by a small matmul whose
// result must be exact. Returns how many kinds there are, or -1 if one is missing or wrong.
int fp8_self_check(Gpu *gpu, const Options *o, NumberSupport support);

// Whether the kernels support the model's sizes, with this number of tokens in a micro-batch.
bool support_shapes(const ModelConfig *config, int64_t tokens);

// Checks versions, memory, a matmul and two attentions, small FP8 matmuls, and NCCL. The matmul
// and the attentions are compared with the CPU's results, and timed. Prints a table, and returns an
// exit status.
int verify(const Options *options);

#define NCCL_ROW "NCCL between GPUs"

typedef enum { NCCL_WELL, NCCL_BAD, NCCL_NOT_TESTED } NcclVerdict;

// Checks and times an all-reduce of `elements` FP32 numbers between the GPUs that this process
// sees. NCCL's environment variables have effect, as in training. A check that takes longer than
// `seconds` ends the program with a line that says so. text: receives the row's text.
// NCCL_NOT_TESTED: there is one GPU, or no usable NCCL.
NcclVerdict nccl_self_check(int gpus, int64_t elements, unsigned seconds, char *text, size_t room);

END_C
