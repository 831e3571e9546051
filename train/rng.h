// Counter-based random numbers: a value is a function of (key, counter), so there is no state to
// save, no order to keep and no dependence on threads.
//
// The mixer is splitmix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014), applied twice over the key and the counter.
#ifndef LLM8_RNG_H
#define LLM8_RNG_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

static inline uint64_t rng_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static inline uint64_t rng_bits(uint64_t key, uint64_t counter) {
    return rng_mix(rng_mix(key + 0x9e3779b97f4a7c15ull) ^ (counter * 0x9e3779b97f4a7c15ull + 1));
}

// Uniform in [0, 1), a multiple of 2^-24.
static inline float rng_uniform(uint64_t key, uint64_t counter) {
    return (float)(rng_bits(key, counter) >> 40) * 0x1p-24f;
}

// Standard normal (Box-Muller).
float rng_normal(uint64_t key, uint64_t counter);

#ifdef __cplusplus
}
#endif

#endif
