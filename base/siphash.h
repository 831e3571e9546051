// SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012): 64 bits that
// nobody can compute without the 128-bit key. The code assumes a little-endian machine.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t siphash_rotate(uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

static inline void siphash_rounds(uint64_t v[4], int rounds) {
    for (int i = 0; i < rounds; i++) {
        v[0] += v[1], v[2] += v[3];
        v[1] = siphash_rotate(v[1], 13) ^ v[0], v[3] = siphash_rotate(v[3], 16) ^ v[2];
        v[0] = siphash_rotate(v[0], 32);
        v[2] += v[1], v[0] += v[3];
        v[1] = siphash_rotate(v[1], 17) ^ v[2], v[3] = siphash_rotate(v[3], 21) ^ v[0];
        v[2] = siphash_rotate(v[2], 32);
    }
}

static inline uint64_t siphash(const uint64_t key[2], const void *data, size_t bytes) {
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d,
                     key[0] ^ 0x6c7967656e657261, key[1] ^ 0x7465646279746573};
    for (size_t at = 0; at <= bytes;
         at += 8) { // the last word: fewer than 8 bytes of data, and the length
        size_t left = bytes - at;
        uint64_t word = left < 8 ? (uint64_t)bytes << 56 : 0;
        memcpy(&word, (const char *)data + at, left < 8 ? left : 8);
        v[3] ^= word;
        siphash_rounds(v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    siphash_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}
