// Counter-based random numbers: a value is a function of (key, counter). There is no state to save,
// and the values do not depend on the order of the calls or on threads.
//
// rng_mix is splitmix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014). rng_bits applies it first to the key, then to key and counter together.
#pragma once

#include "common.h"

#include <math.h>
#include <string.h>

HOST_DEVICE static inline uint64_t rng_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

HOST_DEVICE static inline uint64_t rng_bits(uint64_t key, uint64_t counter) {
    return rng_mix(rng_mix(key + 0x9e3779b97f4a7c15ull) ^ (counter * 0x9e3779b97f4a7c15ull + 1));
}

// Returns one word's term in a hash of 8-byte words. The hash is the sum of all terms, in any
// order. Buffers that differ in exactly one word never have the same hash.
HOST_DEVICE static inline uint64_t hash_word(uint64_t word, int64_t index) {
    return rng_mix(word + (uint64_t)(index + 1) * 0x9e3779b97f4a7c15ull);
}

// Returns the hash of the complete 8-byte words in `data`. The first of them is word number `first`
// of the whole buffer.
static inline uint64_t hash_words(const void *data, int64_t bytes, int64_t first) {
    uint64_t sum = 0, word;
    for (int64_t i = 0; i < bytes / 8; i++) {
        memcpy(&word, (const char *)data + 8 * i, 8);
        sum += hash_word(word, first + i);
    }
    return sum;
}

// Returns a uniform number in [0, 1), a multiple of 2^-24.
HOST_DEVICE static inline float rng_uniform(uint64_t key, uint64_t counter) {
    return (float)(rng_bits(key, counter) >> 40) * 0x1p-24f;
}

// Returns 32 bits for stochastic rounding, in fewer instructions than rng_bits: MurmurHash3's
// finalizer (Appleby, 2011) over the lower half of the counter, mixed with its upper half and the
// key.
HOST_DEVICE static inline uint32_t rng_bits32(uint32_t key, uint64_t counter) {
    uint32_t x = (uint32_t)counter ^ key ^ (uint32_t)(counter >> 32) * 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// Returns a standard normal number (Box-Muller).
static inline float rng_normal(uint64_t key, uint64_t counter) {
    uint64_t bits = rng_bits(key, counter);
    double u = ((double)(bits >> 32) + 0.5) * 0x1p-32;
    double v = (double)(bits & 0xffffffffu) * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

// Returns element `index` of the permutation of 0..n-1 that the key selects. A Feistel network
// permutes 0..4^k-1, where 4^k is the next power of four. A result of n or more is permuted again
// until it is below n (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
// 2002).
static inline uint64_t rng_permute(uint64_t key, uint64_t n, uint64_t index) {
    enum { ROUNDS = 6 };
    int half = 1;
    while (half < 32 && (1ull << (2 * half)) < n) { half++; }
    uint64_t mask = (1ull << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t mixed = left ^ (rng_bits(key + (uint64_t)round, right) & mask);
            left = right;
            right = mixed;
        }
        index = left << half | right;
    } while (index >= n);
    return index;
}
