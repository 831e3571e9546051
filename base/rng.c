#include "rng.h"

#include <math.h>

float rng_normal(uint64_t key, uint64_t counter) {
    uint64_t bits = rng_bits(key, counter);
    double u = ((double)(bits >> 32) + 0.5) * 0x1p-32;
    double v = (double)(bits & 0xffffffffu) * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}
