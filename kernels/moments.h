// AdamW's moments in eight bits (--adam-dtype 8bit): what a code stands for, for both trainers.
//
// A block of MOMENT_BLOCK consecutive elements of the parameter space has a BF16 scale of each
// moment: its largest |m|, and its largest sqrt(v), rounded up (blocks: Dettmers et al., "8-bit
// Optimizers via Block-wise Quantization", 2022). The levels are cubes, which lie densest at 0:
//   m = sign(c) level(|c|), c = -127 to 127      sqrt(v) = level(c), c = 1 to 255; 0 if v is 0
//   level(c) = c^3 * unit, unit = scale / most^3, most = 127 or 255
// Codes are rounded stochastically, since a moment changes by less than a level in most steps: an
// update computes with the exact moments, and only what is stored is rounded.
//
// Rounding sqrt(v) can leave v too small for its m, and an update m / sqrt(v) then explodes. Exact
// moments satisfy v >= floor m^2 (moment_floor), so v is raised to that when it is read.
#pragma once

#include "fp8_format.h"

#include <math.h>

enum { MOMENT_BLOCK = 64 };

typedef enum { MOMENT_FIRST, MOMENT_SECOND } Moment;

// The largest code.
HOST_DEVICE static inline int moment_most(Moment which) {
    return which == MOMENT_FIRST ? 127 : 255;
}

// The scale of a block, in BF16. largest: its largest |m| or v.
HOST_DEVICE static inline uint16_t moment_scale(float largest, Moment which) {
    uint32_t bits = float_bits(which == MOMENT_FIRST ? largest : sqrtf(largest));
    uint32_t up = (bits + 0xffffu) >> 16, finite = 0x7f7fu;
    return (uint16_t)(up < finite ? up : finite);
}

HOST_DEVICE static inline float moment_unit(uint16_t scale, Moment which) {
    float most = (float)moment_most(which);
    return bf16_decode(scale) * (1.0f / (most * most * most));
}

// |m| or v at a place among the codes, between two of them too.
HOST_DEVICE static inline float moment_level(float place, float unit, Moment which) {
    float level = place * place * place * unit;
    return which == MOMENT_FIRST ? level : level * level;
}

// The random number in (0, 1] that decides how an element's moment is rounded. bits: rng_bits32 of
// the step and the element, each moment takes half of them.
HOST_DEVICE static inline float moment_random(uint32_t bits, Moment which) {
    uint32_t half = which == MOMENT_FIRST ? bits & 0xffffu : bits >> 16;
    return (float)(half + 1) * 0x1p-16f;
}

// The least v / m^2 of exact moments, by the Cauchy-Schwarz inequality: m is a sum of gradients
// with weights (1 - beta1) beta1^k, v a sum of their squares with weights (1 - beta2) beta2^k. 0:
// there is no such bound.
static inline double moment_floor(double beta1, double beta2) {
    double ratio = beta2 > 0.0 ? beta1 * beta1 / beta2 : 1.0;
    return ratio < 1.0 ? (1.0 - beta2) * (1.0 - ratio) / ((1.0 - beta1) * (1.0 - beta1)) : 0.0;
}
