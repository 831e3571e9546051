// --verify: is this machine fit to train on? Versions, memory, a product and an attention that
// are checked against FP64 and timed, small FP8 products and NCCL; a table and an exit status.
#ifndef LLM8_VERIFY_H
#define LLM8_VERIFY_H

#include "../../kernels/gpu.h"
#include "../../model/options.h"

#ifdef __cplusplus
extern "C" {
#endif

int verify(const Options *options);

// Whether small FP8 products of this device, with scales, are exactly what they should be.
bool fp8_self_check(Gpu *gpu, Error *err);

#ifdef __cplusplus
}
#endif

#endif
