// Counter-based random numbers: a value is a function of (key, counter), so there is no state to
// save, no order to keep and no dependence on threads.
//
// The mixer is splitmix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014), applied twice over the key and the counter.
#ifndef LLM8_RNG_H
#define LLM8_RNG_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

HOST_DEVICE static inline uint64_t rng_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

HOST_DEVICE static inline uint64_t rng_bits(uint64_t key, uint64_t counter) {
    return rng_mix(rng_mix(key + 0x9e3779b97f4a7c15ull) ^ (counter * 0x9e3779b97f4a7c15ull + 1));
}

// Uniform in [0, 1), a multiple of 2^-24.
HOST_DEVICE static inline float rng_uniform(uint64_t key, uint64_t counter) {
    return (float)(rng_bits(key, counter) >> 40) * 0x1p-24f;
}

// 32 bits for the price of a few instructions: the finalizer of MurmurHash3 (Appleby, 2011) over a
// counter whose upper half and key have been mixed in. For stochastic rounding.
HOST_DEVICE static inline uint32_t rng_bits32(uint32_t key, uint64_t counter) {
    uint32_t x = (uint32_t)counter ^ key ^ (uint32_t)(counter >> 32) * 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// Standard normal (Box-Muller).
float rng_normal(uint64_t key, uint64_t counter);

#ifdef __cplusplus
}
#endif

#endif
