#include "fit.h"

#include <math.h>
#include <stdio.h>

// Sets a micro-batch size, and the least global batch size that has whole ones of it and is not
// below the requested one: whether a step has several decides the gradients' type.
static void set_micro_batch(Options *o, const Run *run, int size) {
    o->micro_batch_size = size;
    o->global_batch_size = (int)round_up64(run->options.global_batch_size,
                                           (int64_t)size * run->group.ranks);
}

// Returns 0 if not even one sequence fits.
static int largest_micro_batch(Options o, const Run *run, NumberSupport support, RunPlanner plan,
                               int64_t memory) {
    const Group *group = &run->group;
    int fits = 0;
    for (int step = 1 << 12; step > 0; step /= 2) {
        set_micro_batch(&o, run, fits + step);
        bool countable = (int64_t)o.micro_batch_size * o.seq_length <= INT32_MAX;
        if (countable && plan(&o, group, support, memory).device <= memory - FIT_OVERHEAD_BYTES) {
            fits += step;
        }
    }
    return fits;
}

void fit_print(const Run *run, NumberSupport support, RunPlanner plan, int64_t memory) {
    enum { WAYS = 2 * (STATE_BF16 + 1) * (RECOMPUTE_BLOCK + 1) };
    const OptionRow *recompute = option_row("recompute"), *moments = option_row("adam-dtype");
    char size[32], words[2][OPTION_TEXT];
    printf("What fits %s\n", format_bytes(size, (double)memory));
    for (int way = 0; way < WAYS; way++) {
        Options o = run->options;
        o.recompute = way % (RECOMPUTE_BLOCK + 1);
        o.adam_dtype = way / (RECOMPUTE_BLOCK + 1) % (STATE_BF16 + 1);
        o.optimizer_cpu_offload = way >= WAYS / 2;
        int micro = largest_micro_batch(o, run, support, plan, memory);
        o.deterministic = false;
        int any_order = largest_micro_batch(o, run, support, plan, memory);
        o.deterministic = micro > 0 && run->options.deterministic;
        set_micro_batch(&o, run, (int)max64(1, micro > 0 ? micro : any_order));
        double host = plan(&o, &run->group, support, memory).host;
        printf("  --recompute %-11s --adam-dtype %s %s  ", option_text(&o, recompute, words[0]),
               option_text(&o, moments, words[1]),
               o.optimizer_cpu_offload ? "--optimizer-cpu-offload" : "");
        printf(micro > 0 ? "--micro-batch-size %d" : "no micro-batch", micro);
        if (any_order > micro) { printf("; %d with --no-deterministic", any_order); }
        if (any_order > 0 && o.optimizer_cpu_offload) {
            printf("; %s of host memory", format_bytes(size, host));
        }
        printf("\n");
    }
}
