#include "rope.h"

#include <math.h>
#include <stddef.h>

double rope_frequency(int i, int D, const Rope *rope) {
    double plain = pow(rope->theta, -2.0 * i / D);
    if (rope->scaling == ROPE_UNSCALED) { return plain; }
    if (rope->scaling == ROPE_LINEAR) { return plain / rope->factor; }
    double turns = rope->original_length * plain / (2 * M_PI);
    double kept = (turns - rope->low_factor) / (rope->high_factor - rope->low_factor);
    kept = fmin(fmax(kept, 0.0), 1.0);
    return kept * plain + (1 - kept) * plain / rope->factor;
}

void rope_table(float *table, int T, int D, const Rope *rope) {
    int half = D / 2;
    for (int i = 0; i < half; i++) {
        double angle = rope_frequency(i, D, rope);
        for (int t = 0; t < T; t++) {
            table[(size_t)t * D + i] = (float)cos(t * angle);
            table[(size_t)t * D + half + i] = (float)sin(t * angle);
        }
    }
}
