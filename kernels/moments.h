// AdamW's moments in eight bits (--adam-dtype 8bit), for both trainers: the meaning of a code.
//
// A block of MOMENT_BLOCK consecutive elements of the parameter space has two BF16 scales, one for
// each moment: the block's largest |m| and largest sqrt(v), both rounded up (blocks: Dettmers et
// al., "8-bit Optimizers via Block-wise Quantization", 2022). The levels are cubes, which lie
// densest at 0:
//   m = sign(c) level(|c|), c = -127 to 127      sqrt(v) = level(c), c = 1 to 255; 0 if v is 0
//   level(c) = c^3 * unit, unit = scale / most^3, most = 127 or 255
// In most steps a moment changes by less than a level, so codes are rounded stochastically. An
// update computes with the exact moments, and only what is stored is rounded:
//   c = floor(x + random), where x is the unrounded code:
//   x = sign(m) (|m| / unit)^(1/3) or (sqrt(v) / unit)^(1/3)
// The GPU computes unrounded codes by approximate logarithms, with a relative error of about 1e-6,
// so that at most one code of a thousand differs from the definition's, by 1.
//
// Rounding sqrt(v) can leave v too small for its m; the update m / sqrt(v) then explodes. Exact
// moments satisfy v >= floor m^2 (moment_floor), so a v that is read is raised to floor m^2 if it
// is below.
#pragma once

#include "../base/rng.h"
#include "fp8_format.h"

#include <math.h>

enum { MOMENT_BLOCK = 64 };

typedef enum { MOMENT_FIRST, MOMENT_SECOND } Moment;

// Returns the largest code.
HOST_DEVICE static inline int moment_max_code(Moment which) {
    return which == MOMENT_FIRST ? 127 : 255;
}

// Returns the scale of a block. For m, it is the least BF16 number that is not below `largest`, the
// largest |m|. For v, it is the least BF16 number whose square is not below `largest`, the largest
// v. root: the largest |m|, or the root of the largest v to within 1 unit in the last place.
HOST_DEVICE static inline uint16_t moment_scale(float largest, float root, Moment which) {
    uint32_t scale = float_bits(root) >> 16, finite = 0x7f7fu;
    float below = bf16_decode((uint16_t)scale);
    scale += (which == MOMENT_FIRST ? below : below * below) < largest;
    return (uint16_t)(scale < finite ? scale : finite);
}

HOST_DEVICE static inline float moment_unit(uint16_t scale, Moment which) {
    float most = (float)moment_max_code(which);
    return bf16_decode(scale) * (1.0f / (most * most * most));
}

// Returns the m or v that a code stands for. The code may be unrounded.
HOST_DEVICE static inline float moment_level(float code, float unit, Moment which) {
    float level = code * code * code * unit;
    return which == MOMENT_FIRST ? level : level * level;
}

// Returns an element's random bits: the lower 16 are for the first moment, the upper 16 for the
// second. Four elements share a hash, which is multiplied by a different odd number for each
// element.
HOST_DEVICE static inline uint32_t moment_bits(uint32_t hash, int element) {
    for (int i = 0; i < element % 4; i++) { hash *= 0x9e3779b1u; }
    return hash;
}

HOST_DEVICE static inline uint32_t moment_hash(uint32_t key, int64_t element) {
    return rng_bits32(key, (uint64_t)element / 4);
}

// Returns the least v / m^2 of exact moments, or 0 if there is no such bound. The bound follows
// from the Cauchy-Schwarz inequality: m is a sum of gradients with weights (1 - beta1) beta1^k, v a
// sum of their squares with weights (1 - beta2) beta2^k.
static inline double moment_floor(double beta1, double beta2) {
    double ratio = beta2 > 0.0 ? beta1 * beta1 / beta2 : 1.0;
    return ratio < 1.0 ? (1.0 - beta2) * (1.0 - ratio) / ((1.0 - beta1) * (1.0 - beta1)) : 0.0;
}
