#include "blend.h"

#include <math.h>
#include <stdlib.h>

// Rounds each source's share of a period to a whole number of samples. Returns the largest error,
// divided by the period, or infinity if the numbers do not add up to the period or a source's exact
// share is below one sample.
static double distance(const double *weights, double sum, int count, int period) {
    double worst = 0;
    int64_t parts = 0;
    for (int i = 0; i < count; i++) {
        double exact = weights[i] / sum * period, nearest = round(exact);
        if (exact < 1) { return INFINITY; }
        parts += (int64_t)nearest;
        worst = fmax(worst, fabs(exact - nearest) / period);
    }
    return parts == period ? worst : INFINITY;
}

// Lists the turns of a period by the rule in blend.h. behind[i] says how far source i is behind its
// share, in units of 1/period of a sample, so that it is whole.
static void take_turns(Blend *b) {
    int64_t scale = b->count > 1 ? 2 * b->count - 2 : 1, period = b->period;
    FREED int64_t *behind = calloc_or_die((size_t)b->count, sizeof(int64_t));
    FREED int *taken = calloc_or_die((size_t)b->count, sizeof(int));
    for (int64_t n = 0; n < period; n++) {
        int next = -1;
        // how far `next` is from being 1 - 1/scale of a sample behind, times `scale`
        int64_t slack = 0;
        for (int i = 0; i < b->count; i++) {
            behind[i] += b->parts[i];
            int64_t own = (scale - 1) * period - scale * behind[i];
            if (scale * behind[i] < period) { continue; }
            if (next >= 0 && own * b->parts[next] >= slack * b->parts[i]) { continue; }
            next = i;
            slack = own;
        }
        b->turns[n] = (BlendTurn){next, taken[next]++};
        behind[next] -= period;
    }
}

bool blend_make(Blend *b, const double *weights, int count) {
    const double EQUAL = 1e-14; // equal quotients may differ this much by rounding
    double sum = 0, nearest = INFINITY;
    *b = (Blend){.count = count};
    for (int i = 0; i < count; i++) { sum += weights[i]; }
    for (int period = count; period <= BLEND_PERIOD && nearest > EQUAL; period++) {
        double now = distance(weights, sum, count, period);
        if (now < nearest - EQUAL) {
            nearest = now;
            b->period = period;
        }
    }
    if (b->period == 0) { return false; }
    b->parts = calloc_or_die((size_t)count, sizeof(int));
    b->turns = calloc_or_die((size_t)b->period, sizeof(BlendTurn));
    for (int i = 0; i < count; i++) { b->parts[i] = (int)round(weights[i] / sum * b->period); }
    take_turns(b);
    return true;
}

void blend_free(Blend *b) {
    free(b->parts);
    free(b->turns);
    *b = (Blend){0};
}

int blend_draw(const Blend *b, int64_t sample, int64_t *index) {
    BlendTurn turn = b->turns[sample % b->period];
    *index = sample / b->period * b->parts[turn.source] + turn.index;
    return turn.source;
}

int64_t blend_count(const Blend *b, int source, int64_t n) {
    int64_t turn = n % b->period - 1;
    while (turn >= 0 && b->turns[turn].source != source) { turn--; }
    return n / b->period * b->parts[source] + (turn < 0 ? 0 : b->turns[turn].index + 1);
}
