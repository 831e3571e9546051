// What numbers the device can compute with, as far as the options let it.
#pragma once

#include "../../kernels/gpu.h"
#include "../../model/options.h"
#include "../../model/precision.h"

BEGIN_C

enum { SUPPORT_REASON = 64 };

// By compute capability alone (90 for 9.0; 0: not known). reason: what support.lacks_fp8 points to.
NumberSupport support_of(int capability, char reason[SUPPORT_REASON]);

// With FP8 tried out. FP8 that is requested and not available on some rank: a warning, or with
// --fp8-required the end. All ranks call it.
NumberSupport support_find(Gpu *gpu, const Options *o, char reason[SUPPORT_REASON]);

// Whether small FP8 products of this device, with scales, are exact.
bool fp8_self_check(Gpu *gpu, Error *err);

// Dies where the kernels cannot work with the model's sizes.
void support_check_shapes(const ModelConfig *config);

END_C
