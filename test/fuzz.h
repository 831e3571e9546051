// A fuzzer of our own (test/fuzz.c), since libFuzzer comes with clang only, and what it is run on
// (test/fuzz_targets.c).
#pragma once

#include "../base/common.h"

typedef struct {
    const char *name;
    // Reads one input as a file of its kind; true when it was accepted. Must not crash, leave by
    // die(), or take long, whatever the input.
    bool (*accepts)(const uint8_t *data, size_t size);
    // Hands valid inputs to fuzz_seed.
    void (*seeds)(void);
    const char *file; // of a checkpoint, which an input takes the place of
} FuzzTarget;

extern const FuzzTarget *fuzz_target; // the present one

// Behind the last, one whose fault the fuzzer must find, or it would find none: a reader that
// trusts a length.
extern const FuzzTarget fuzz_targets[];
extern const int fuzz_target_count;

void fuzz_seed(const void *data, size_t size);
