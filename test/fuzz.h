// Our own fuzzer (test/fuzz.c), because libFuzzer needs clang; and its targets
// (test/fuzz_targets.c).
#pragma once

#include "../base/common.h"

typedef struct {
    const char *name;
    // Reads one input as a file of its kind. True: the input was accepted. For no input may it
    // crash, call die(), or take long.
    bool (*accepts)(const uint8_t *data, size_t size);
    // Passes valid inputs to fuzz_seed.
    void (*seeds)(void);
    const char *file; // the file of a checkpoint that an input replaces
} FuzzTarget;

extern const FuzzTarget *fuzz_target; // the present one

// After the last target there is one with a planted fault, a reader that trusts a length. If the
// fuzzer does not find that fault, it would find no other.
extern const FuzzTarget fuzz_targets[];
extern const int fuzz_target_count;

void fuzz_seed(const void *data, size_t size);
