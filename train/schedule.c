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

void warn_of_schedule(const Options *o) {
    if (o->lr > 0 && o->train_iters > 0 && learning_rate(o, o->train_iters - 1) == 0) {
        warn("--lr-decay-iters %lld: the learning rate is 0 from step %lld to %lld; --min-lr sets "
             "it",
             (long long)o->lr_decay_iters,
             (long long)max64(o->lr_decay_iters, o->lr_warmup_iters) + 1,
             (long long)o->train_iters);
    }
    if (o->lr_warmup_iters > o->train_iters &&
        option_source(o, "lr-warmup-iters") >= SOURCE_CHECKPOINT) {
        warn("--lr-warmup-iters %lld: training ends at step %lld, before the rate reaches --lr",
             (long long)o->lr_warmup_iters, (long long)o->train_iters);
    }
}

// Whether a learning rate is more than a tenth above another one.
static bool is_above(double rate, double other) {
    return rate > 1.1 * other;
}

// Says so if another warm-up than the checkpoint's is given, and is over: no rate changes by it.
static void note_old_warmup(const Options *o, const Options *was, int64_t step) {
    Options unchanged = *o;
    int64_t last = o->train_iters - 1;
    unchanged.lr_warmup_iters = was->lr_warmup_iters;
    if (option_source(o, "lr-warmup-iters") >= SOURCE_FILE &&
        o->lr_warmup_iters != was->lr_warmup_iters && o->lr_warmup_iters <= step &&
        learning_rate(o, step) == learning_rate(&unchanged, step) &&
        learning_rate(o, last) == learning_rate(&unchanged, last)) {
        printf("  --lr-warmup-iters %lld: over before step %lld, so it changes no learning rate\n",
               (long long)o->lr_warmup_iters, (long long)step + 1);
    }
}

void warn_of_jump(const Options *o, const Options *was, int64_t step) {
    if (!options_train(o) || step == 0 || step >= o->train_iters) { return; }
    note_old_warmup(o, was, step);
    double last = learning_rate(was, step - 1), planned = learning_rate(was, step);
    double next = learning_rate(o, step);
    bool rises = is_above(next, fmax(last, planned)), falls = is_above(fmin(last, planned), next);
    if (!rises && !falls) { return; }
    warn("the learning rate %s from %.3g to %.3g at step %lld, by options that differ from the "
         "checkpoint's",
         rises ? "rises" : "falls", last, next, (long long)step + 1);
}
