// The files in test/golden/, and random data for tests.
#pragma once

#include "../base/rng.h"
#include "../checkpoints/safetensors.h"

#include <stdlib.h>

static inline void golden_path(char path[PATH_LENGTH], const char *name) {
    const char *root = getenv("LLM8_ROOT"); // set by test/run.sh
    path_format(path, "%s/test/golden/%s", root != NULL ? root : ".", name);
}

static inline SafeTensors golden_open(const char *name) {
    char path[PATH_LENGTH];
    SafeTensors st;
    golden_path(path, name);
    or_die(safetensors_open(&st, path));
    return st;
}

// Returns the n elements of a tensor. They are never freed.
static inline const void *golden_data(const SafeTensors *st, const char *name, Dtype dtype,
                                      int64_t n) {
    const TensorEntry *e = safetensors_find(st, name);
    if (e == NULL || e->dtype != dtype || e->end - e->begin != n * dtype_bytes(dtype)) {
        die("%s: no tensor '%s' of %lld elements", st->path, name, (long long)n);
    }
    static void **last; // a list: each block begins with a pointer to the previous one
    void **data = malloc_or_die(2 * sizeof(void *) + (size_t)(e->end - e->begin));
    or_die(safetensors_read(st, e, 0, n, data + 2));
    *data = last;
    last = data;
    return data + 2;
}

// Normal numbers with standard deviation `size`, which depend only on the seed.
static inline void fill_random(float *x, int64_t n, float size, uint64_t seed) {
    for (int64_t i = 0; i < n; i++) { x[i] = size * rng_normal(seed, (uint64_t)i); }
}
