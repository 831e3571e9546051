// The angles of the rotary embedding (Su et al., "RoFormer", 2021), for both trainers. The host
// computes their cosines and sines once, in double precision, into a table.
//
// Pair i of a head of size D is rotated by theta^(-2i/D) radians for each position. Scaling
// stretches a model to longer sequences than it was first trained on. Kind `linear` divides every
// angle by factor (Chen et al., "Extending Context Window of Large Language Models via Positional
// Interpolation", 2023). Kind `llama3` (Llama 3.1) counts how many turns a pair makes over
// original_length positions. With fewer than low_factor turns, the angle is divided by factor; with
// more than high_factor turns, it stays; in between, llama3 interpolates.
#pragma once

#include "../base/common.h"

BEGIN_C

// The kinds of scaling, and their names in --rope-scaling.
#define ROPE_SCALINGS N(ROPE_UNSCALED, "none") N(ROPE_LINEAR, "linear") N(ROPE_LLAMA3, "llama3")
#define N(constant, name) constant,
typedef enum { ROPE_SCALINGS } RopeScaling;
#undef N

typedef struct {
    double theta;
    RopeScaling scaling;
    double factor, low_factor, high_factor;
    int original_length;
} Rope;

// Returns by how many radians pair i < D/2 is rotated for each position.
double rope_frequency(int i, int D, const Rope *rope);

// Fills the table [T,D]: for each position the cosines of its D/2 angles, then the sines.
void rope_table(float *table, int T, int D, const Rope *rope);

END_C
