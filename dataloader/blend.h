// Which source each sample of a mixture comes from: a pure function of the weights and the sample's
// number.
//
// The weights become whole parts of a period: 0.7 and 0.3 are 7 and 3 parts of 10. Of all periods
// up to BLEND_PERIOD the one whose parts are nearest to the weights is taken, the shortest of equal
// ones; so weights with up to six digits are exact. Within a period the sources take turns by
// Tijdeman's rule ("The chairman assignment problem", Discrete Mathematics 32, 1980): of the
// sources that are 1/(2k-2) of a sample or more behind their share, k being their number, the one
// that must come first if none is ever to be a whole sample off. So among the first n samples, for
// every n, the count of each source differs from n parts/period by at most 1 - 1/(2k-2). After a
// period all counts are exact, and the turns repeat. (Megatron-LM's build_blending_indices takes
// the source that is furthest behind, which has no such bound for many sources.)
#pragma once

#include "../base/common.h"

BEGIN_C

enum { BLEND_PERIOD = 1 << 20 };

typedef struct {
    int source;
    int place; // the source's samples before this one, in the period
} BlendTurn;

typedef struct {
    int count, period;
    int *parts;       // [count] of the period
    BlendTurn *turns; // [period]
} Blend;

// False: a weight is below a millionth of the sum of all, so that it may get no part.
bool blend_make(Blend *blend, const double *weights, int count);
void blend_free(Blend *blend);

// The source of a sample, and how many samples of that source come before it.
int blend_draw(const Blend *blend, int64_t sample, int64_t *place);
// How many of the first n samples are of a source. The source's next sample is its number
// blend_count().
int64_t blend_count(const Blend *blend, int source, int64_t n);
static inline double blend_share(const Blend *blend, int source) {
    return (double)blend->parts[source] / blend->period;
}

END_C
