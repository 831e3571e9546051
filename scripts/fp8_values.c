// What kernels/fp8_format.h makes of numbers, as text, for scripts/fp8_pictures:
//
//   fp8_values codes FORMAT              the value of each code from 0 on that is a number
//   fp8_values round FORMAT SCALE        for each number on standard input: what is left of it when
//                                        it is scaled, rounded and scaled back; 1 where it
//                                        saturated; 1 where it vanished
//   fp8_values blocks FORMAT LENGTH      the same, but every LENGTH numbers have the scale of a
//                                        block, a power of two
//   fp8_values delayed FORMAT LENGTH     for each amax on standard input: the scale that its step
//                                        uses, before the amax enters the history
#include "../kernels/fp8_format.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static void print_codes(Fp8Type type) {
    for (int code = 0; code < 128; code++) {
        float value = fp8_decode((uint8_t)code, type);
        if (isfinite(value)) { printf("%.9g\n", value); }
    }
}

// fixed: the scale of all, or 0: of each block its own.
static void print_rounded(Fp8Type type, int length, float fixed) {
    float *block = calloc_or_die((size_t)length, sizeof(float));
    for (int count = length; count == length;) {
        float amax = 0.0f;
        for (count = 0; count < length && scanf("%f", &block[count]) == 1; count++) {
            amax = fmaxf(amax, fabsf(block[count]));
        }
        float scale = fixed > 0 ? fixed : fp8_block_scale(amax, fp8_max(type), true);
        for (const float *x = block; x < block + count; x++) {
            Fp8Counts counts = {0};
            uint8_t code = fp8_encode(*x * scale, type);
            fp8_count(&counts, *x, scale, code, type);
            printf("%.9g %d %d\n", fp8_decode(code, type) / scale, (int)counts.saturated,
                   (int)counts.vanished);
        }
    }
    free(block);
}

static void print_scales(Fp8Type type, int length) {
    float *history = calloc_or_die((size_t)length, sizeof(float)), target = fp8_target(type, 0);
    Fp8Slot slot = {.scale = 1.0f};
    float amax;
    while (scanf("%f", &amax) == 1) {
        if (slot.count == 0) { fp8_slot_rescale(&slot, amax, target); } // measured at first
        printf("%.9g\n", slot.scale);
        slot.amax = amax;
        fp8_slot_update(&slot, history, length, target);
    }
    free(history);
}

int main(int argc, char **argv) {
    const char *what = argc > 2 ? argv[1] : "";
    Fp8Type type = argc > 2 && strcmp(argv[2], "E5M2") == 0 ? FP8_E5M2 : FP8_E4M3;
    if (strcmp(what, "codes") == 0) {
        print_codes(type);
    } else if (strcmp(what, "round") == 0 && argc == 4) {
        print_rounded(type, 1, strtof(argv[3], NULL));
    } else if (strcmp(what, "blocks") == 0 && argc == 4 && atoi(argv[3]) > 0) {
        print_rounded(type, atoi(argv[3]), 0.0f);
    } else if (strcmp(what, "delayed") == 0 && argc == 4 && atoi(argv[3]) > 0) {
        print_scales(type, atoi(argv[3]));
    } else {
        die("usage: fp8_values codes FORMAT | round FORMAT SCALE | blocks FORMAT LENGTH | "
            "delayed FORMAT LENGTH");
    }
    return 0;
}
