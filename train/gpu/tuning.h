// Which algorithm each product takes (--gemm-autotune): the fastest alone is not the fastest in its
// step, at the power limit least of all. So whole steps are timed, trials, in each of which every
// product takes some algorithm of its short list, by a random design in which each occurs equally
// often. Least squares then tell the algorithms apart, all from the same trials:
//
//   milliseconds of trial t = base + drift t + sum over products of effect[product][algorithm]
#pragma once

#include "../../base/common.h"

BEGIN_C

// counts[products]: how many algorithms each has. 0: there is nothing to choose.
int tuning_trials(const int *counts, int products);
int tuning_algorithm(const int *counts, int product, int trials, int trial);
// best[products]: the fastest; another than the first, 0, only where it saves more than twice the
// standard error, and 0.05% of a step. ms: of each trial.
void tuning_judge(const int *counts, int products, const float *ms, int trials, int *best);

END_C
