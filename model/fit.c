#include "fit.h"

#include <stdio.h>

static const char *const recompute_names[] = {"none", "activations", "block"};

// 0 when not even one sequence fits.
static int largest_micro_batch(Options options, NumberSupport support, PlannedBytes planned,
                               int64_t memory) {
    int fits = 0;
    for (int step = 1 << 12; step > 0; step /= 2) {
        options.micro_batch_size = fits + step;
        options.global_batch_size = 0;
        if (planned(&options, support) + FIT_OVERHEAD_BYTES <= memory) { fits += step; }
    }
    return fits;
}

void fit_print(const Options *options, NumberSupport support, PlannedBytes planned,
               int64_t memory) {
    char size[32];
    printf("What fits %s\n", format_bytes(size, (double)memory));
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        for (int adam = STATE_FP32; adam <= STATE_BF16; adam++) {
            Options o = *options;
            o.recompute = recompute;
            o.adam_dtype = adam;
            int micro = largest_micro_batch(o, support, planned, memory);
            printf("  --recompute %-11s --adam-dtype %s  ", recompute_names[recompute],
                   adam ? "bf16" : "fp32");
            printf(micro > 0 ? "--micro-batch-size %d\n" : "no micro-batch\n", micro);
        }
    }
}

void fit_advice(const Options *options, NumberSupport support, PlannedBytes planned, int64_t memory,
                char text[128]) {
    for (int adam = options->adam_dtype; adam <= STATE_BF16; adam++) {
        for (int recompute = options->recompute; recompute <= RECOMPUTE_BLOCK; recompute++) {
            Options o = *options;
            o.recompute = recompute;
            o.adam_dtype = adam;
            int micro = largest_micro_batch(o, support, planned, memory);
            if (micro == 0) { continue; }
            snprintf(text, 128, "--micro-batch-size %d%s%s%s",
                     micro < o.micro_batch_size ? micro : o.micro_batch_size,
                     recompute != options->recompute ? " --recompute " : "",
                     recompute != options->recompute ? recompute_names[recompute] : "",
                     adam != options->adam_dtype ? " --adam-dtype bf16" : "");
            return;
        }
    }
    snprintf(text, 128, "a smaller model or a GPU with more memory");
}
