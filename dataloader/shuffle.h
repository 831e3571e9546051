// A seeded permutation of 0..n-1 that keeps no state: the element at a place is computed from the
// place alone. A Feistel network permutes the next power of four; what falls outside 0..n-1 is
// permuted again until it falls inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary
// Finite Domains", 2002).
#ifndef LLM8_SHUFFLE_H
#define LLM8_SHUFFLE_H

#include "../base/rng.h"

static inline uint64_t shuffle_element(uint64_t key, uint64_t n, uint64_t place) {
    enum { ROUNDS = 6 };
    int half = 1;
    while (half < 32 && (1ull << (2 * half)) < n) { half++; }
    uint64_t mask = (1ull << half) - 1;
    do {
        uint64_t left = place >> half, right = place & mask;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t mixed = left ^ (rng_bits(key + (uint64_t)round, right) & mask);
            left = right;
            right = mixed;
        }
        place = left << half | right;
    } while (place >= n);
    return place;
}

#endif
