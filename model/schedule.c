#include "schedule.h"

#include <math.h>

double learning_rate(const Options *o, int64_t step) {
    if (step < o->lr_warmup_iters) {
        return o->lr * (double)(step + 1) / (double)o->lr_warmup_iters;
    }
    if (o->lr_decay_style == DECAY_CONSTANT) { return o->lr; }
    int64_t begin = o->lr_warmup_iters;
    if (o->lr_decay_style == DECAY_WSD) {
        begin = max64(begin, o->lr_decay_iters - o->lr_wsd_decay_iters);
    }
    if (step < begin) { return o->lr; }
    if (step >= o->lr_decay_iters) { return o->min_lr; }
    double done = (double)(step - begin) / (double)(o->lr_decay_iters - begin);
    double left = o->lr_decay_style == DECAY_COSINE ? 0.5 * (1.0 + cos(3.141592653589793 * done))
                                                    : 1.0 - done;
    return o->min_lr + left * (o->lr - o->min_lr);
}
