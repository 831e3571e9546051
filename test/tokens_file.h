// A shard of random tokens, for tests of either trainer.
#pragma once

#include "../base/io.h"
#include "../base/rng.h"
#include "../dataloader/loader.h"

#include <stdlib.h>

// Tokens below vocab, which depend only on the seed.
static inline void write_tokens(const char *path, int count, int vocab, uint64_t seed) {
    size_t bytes = SHARD_HEADER_BYTES + (size_t)count * sizeof(uint16_t);
    int32_t *header = (int32_t *)malloc_or_die(bytes);
    uint16_t *tokens = (uint16_t *)((char *)header + SHARD_HEADER_BYTES);
    shard_header(header, 2, count);
    for (int i = 0; i < count; i++) {
        tokens[i] = (uint16_t)(rng_bits(seed, (uint64_t)i) % (uint64_t)vocab);
    }
    or_die(file_replace(path, header, bytes));
    free(header);
}
