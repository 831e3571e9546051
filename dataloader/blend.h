// Chooses the source of each sample of a mixture, from the weights and the sample's number alone.
//
// The weights become whole numbers of samples in a period: 0.7 and 0.3 are 7 and 3 of 10 samples. A
// period has at most BLEND_PERIOD samples; its length is the one at which the numbers are nearest
// to the weights, or the shortest of several such lengths. So weights with up to six digits are
// exact. Within a period the sources take turns by Tijdeman's rule ("The chairman assignment
// problem", Discrete Mathematics 32, 1980): with k sources, a turn goes to a source that is at
// least 1/(2k-2) of a sample behind its share. If several sources are this far behind, the turn
// goes to the one that would be the first to be 1 - 1/(2k-2) of a sample behind. So for every n,
// the count of each source among the first n samples differs by at most 1 - 1/(2k-2) from n * parts
// / period. After a period all counts are exact, and the turns repeat. (Megatron-LM's
// build_blending_indices takes the source that is furthest behind; for many sources this rule has
// no such bound.)
#pragma once

#include "../base/common.h"

BEGIN_C

enum { BLEND_PERIOD = 1 << 20 };

typedef struct {
    int source;
    int index; // how many samples of this source come before the turn in the period
} BlendTurn;

typedef struct {
    int count, period;
    int *parts;       // [count] samples of each source in a period
    BlendTurn *turns; // [period]
} Blend;

// Fails if a weight is below a millionth of the sum of weights, because its source might get no
// sample.
bool blend_make(Blend *blend, const double *weights, int count);
void blend_free(Blend *blend);

// Returns the source of a sample. Sets *index to how many samples of that source come before it.
int blend_draw(const Blend *blend, int64_t sample, int64_t *index);
// Returns how many of the first n samples come from a source. This is also the number of the
// source's next sample.
int64_t blend_count(const Blend *blend, int source, int64_t n);
static inline double blend_share(const Blend *blend, int source) {
    return (double)blend->parts[source] / blend->period;
}

END_C
