// The CPU trainer's steps: compares the update with its definition; threads, accumulation and
// chunks of the head must not change a result; evaluations and skipped steps must not change the
// state.
#include "trainer.h"

enum { V = 61, T = 16, B = 4 };

static const char *const models[] = {
    SMALL_GPT2 "--num-layers 2",
    SMALL_LLAMA "--num-layers 2",
    SMALL_LLAMA "--num-layers 2 --kv-channels 16 --qk-layernorm --logit-softcap 4 "
                "--z-loss-coeff 0.01",
};
static const char *const precisions[] = {
    "",
    "--bf16",
    "--fp8-format hybrid --fp8-recipe delayed --fp8-lm-head --fp8-amax-history-len 3",
    "--fp8-format e4m3 --fp8-recipe tensorwise",
    "--fp8-format e4m3 --fp8-recipe blockwise --fp8-lm-head",
    "--bf16 --optimizer muon",
};
// Other learning rates for all but the blocks' matrices. (SMALL_GPT2's head is its embedding.)
#define RATES " --embedding-lr-mult 3 --head-lr-mult 0.5 --vector-lr-mult 0.25 "
enum { MODELS = 3, PRECISIONS = 6, BOTH = MODELS * PRECISIONS };
// AddressSanitizer is slow: it sees every model, and four of the precisions.
#ifdef __SANITIZE_ADDRESS__
enum { STRIDE = 5 };
#else
enum { STRIDE = 1 };
#endif

static void open_combination(Trainer *t, int i, const char *more) {
    open_trainer(t, "%s %s %s", models[i % MODELS], precisions[i / MODELS], more);
}

static size_t space_bytes(const Trainer *t) {
    return (size_t)t->run.layout.size * sizeof(float);
}

static void *copy_of(const void *x, size_t bytes) {
    void *copy = malloc_or_die(bytes);
    memcpy(copy, x, bytes);
    return copy;
}

static void check_same_training(const Trainer *a, const Trainer *b) {
    CHECK_BITS(a->weights, b->weights, space_bytes(a));
    CHECK_BITS(a->exp_avg, b->exp_avg, space_bytes(a));
    CHECK_BITS(a->exp_avg_sq, b->exp_avg_sq, space_bytes(a));
    CHECK(a->run.progress.loss == b->run.progress.loss);
}

// ---- what must not change a result ------------------------------------------------------------

TEST(threads_do_not_change_a_bit) {
    for (int i = 0; i < BOTH; i += STRIDE) {
        TRAINER(one, open_combination, i, "");
        train(&one, 3);
        for (int threads = 2; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            TRAINER(more, open_combination, i, "");
            train(&more, 3);
            omp_set_num_threads(1);
            check_same_training(&more, &one);
        }
        TRAINER(other, open_combination, i, "--seed 1235");
        train(&other, 3);
        CHECK(CAUGHT(check_same_training(&other, &one)));
    }
}

// 8 sequences together, or 2 at a time: only the order of sums differs, so only FP32's rounding.
TEST(accumulation_adds_up) {
    for (int i = 0; i < MODELS; i++) {
        TRAINER(whole, open_combination, i, "--micro-batch-size 8 --global-batch-size 8");
        TRAINER(parts, open_combination, i, "--micro-batch-size 2 --global-batch-size 8");
        TRAINER(fewer, open_combination, i, "--micro-batch-size 2 --global-batch-size 6");
        train(&whole, 1), train(&parts, 1), train(&fewer, 1);
        int64_t n = whole.run.layout.size;
        CHECK_ERROR(parts.gradients, whole.gradients, n, 1e-6);
        CHECK_CLOSE(parts.run.progress.loss, whole.run.progress.loss, 1e-6);
        CHECK(CAUGHT(CHECK_ERROR(fewer.gradients, whole.gradients, n, 1e-6)));
        CHECK_EQUAL(parts.run.progress.samples, 8);
        train(&whole, 1), train(&parts, 1);
        CHECK_CLOSE(parts.run.progress.loss, whole.run.progress.loss, 1e-4);
    }
}

TEST(the_head_may_come_in_chunks) {
    for (int i = 0; i < MODELS; i++) {
        TRAINER(t, open_combination, i, "");
        read_batch(&t);
        CHECK_EQUAL(t.chunk_rows, B * T);
        double loss = forward_backward(&t, B * T);
        FREED float *whole = copy_of(t.gradients, space_bytes(&t));
        t.chunk_rows = 7; // the last chunk is smaller
        CHECK_CLOSE(forward_backward(&t, B * T), loss, 1e-6);
        CHECK_ERROR(t.gradients, whole, t.run.layout.size, 1e-6);
    }
}

TEST(gaps_and_padding_stay_zero) {
    for (int i = 0; i < BOTH; i += STRIDE) {
        TRAINER(t, open_combination, i, "");
        CHECK_EQUAL(stray_elements(&t, t.weights), 0);
        train(&t, 3);
        CHECK_EQUAL(stray_elements(&t, t.weights), 0);
        CHECK_EQUAL(stray_elements(&t, t.gradients), 0);
        CHECK_EQUAL(stray_elements(&t, t.exp_avg), 0);
        CHECK_EQUAL(stray_elements(&t, t.exp_avg_sq), 0);
        const Param *embedding = param_find(&t.run.layout, TENSOR_TOKEN_EMBEDDING, 0);
        const Param *norm = param_find(&t.run.layout, TENSOR_FINAL_NORM_WEIGHT, 0);
        t.weights[embedding->offset + V * 48] = 1e-30f;
        t.weights[norm->offset + 48] = NAN;
        CHECK_EQUAL(stray_elements(&t, t.weights), 2);
    }
}

// ---- the update -------------------------------------------------------------------------------

typedef struct {
    double *w, *m, *v; // [layout.size]
} Adam;

// By the tensor's name, which the trainer does not ask.
static double rate_of(const Options *o, const Param *p) {
    const char *name = tensor_row(p->id)->name;
    if (strstr(name, "norm") != NULL || strstr(name, "bias") != NULL) { return o->vector_lr_mult; }
    if (strstr(name, "embedding") != NULL) { return o->embedding_lr_mult; }
    return strstr(name, "head") != NULL ? o->head_lr_mult : 1;
}

// Does one step by the definition, with the gradients of the trainer's step.
static void follow_step(Adam *a, const Trainer *t, int step) {
    const Options *o = &t->run.options;
    double norm = sqrt(sum_of_squares(t->gradients, t->run.layout.size));
    double clip = fmin(1, o->clip_grad / norm);
    CHECK(clip < 0.9);
    for (int i = 0; i < t->run.layout.count; i++) {
        const Param *p = &t->run.layout.params[i];
        double decay = p->cols > 1 ? o->weight_decay : 0; // matrices only
        double lr = learning_rate(o, step) * rate_of(o, p);
        for (int64_t j = p->offset; j < p->offset + param_size(p); j++) {
            double g = clip * t->gradients[j];
            a->m[j] += (1 - o->adam_beta1) * (g - a->m[j]);
            a->v[j] += (1 - o->adam_beta2) * (g * g - a->v[j]);
            double m = a->m[j] / (1 - pow(o->adam_beta1, step + 1));
            double v = a->v[j] / (1 - pow(o->adam_beta2, step + 1));
            a->w[j] -= lr * (m / (sqrt(v) + o->adam_eps) + decay * a->w[j]);
        }
    }
}

static double error_of(const float *actual, const double *exact, size_t n) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        difference += pow(actual[i] - exact[i], 2);
        size += exact[i] * exact[i];
    }
    return sqrt(difference / size);
}

// Warm-up, clipping, decay of matrices only, bias correction, the rates of the groups: only FP32's
// rounding errors after five steps.
TEST(steps_update_by_definition) {
    for (int i = 0; i < MODELS; i++) {
        TRAINER(t, open_combination, i,
                "--clip-grad 0.5 --lr-warmup-iters 3 --train-iters 6 --lr 0.01" RATES);
        size_t size = (size_t)t.run.layout.size;
        Adam a = {calloc_or_die(size, sizeof(double)), calloc_or_die(size, sizeof(double)),
                  calloc_or_die(size, sizeof(double))};
        for (size_t j = 0; j < size; j++) { a.w[j] = t.weights[j]; }
        for (int step = 0; step < 5; step++) {
            train(&t, 1);
            follow_step(&a, &t, step);
        }
        CHECK_CLOSE(error_of(t.weights, a.w, size), 0, 3e-7);
        CHECK_CLOSE(error_of(t.exp_avg, a.m, size), 0, 3e-7);
        CHECK_CLOSE(error_of(t.exp_avg_sq, a.v, size), 0, 3e-7);
        follow_step(&a, &t, 5);
        CHECK(!(error_of(t.weights, a.w, size) <= 1e-4));
        free(a.w), free(a.m), free(a.v);
    }
}

// ---- what must leave no trace -----------------------------------------------------------------

typedef struct {
    void *at;
    size_t bytes;
} Part;

enum { SLOTS, PARTS = 6 };

// Every byte that later steps depend on, except the progress.
static void find_parts(Part parts[PARTS], const Trainer *t) {
    size_t space = space_bytes(t), slots = (size_t)fp8_slot_count(&t->run.config);
    size_t history = slots * (size_t)t->run.precision.history_length * sizeof(float);
    const Part all[PARTS] = {
        {t->slots, slots * sizeof(Fp8Scale)},
        {t->weights, space},
        {t->exp_avg, space},
        {t->exp_avg_sq, space},
        {t->rounded, t->rounded != NULL ? space : 0},
        {t->amax_history, t->amax_history != NULL ? history : 0},
    };
    memcpy(parts, all, sizeof(all));
}

typedef struct {
    Part copies[PARTS];
    Progress progress;
} State;

static State take_state(const Trainer *t) {
    State s = {.progress = t->run.progress};
    find_parts(s.copies, t);
    for (int i = 0; i < PARTS; i++) {
        if (s.copies[i].bytes > 0) { s.copies[i].at = copy_of(s.copies[i].at, s.copies[i].bytes); }
    }
    return s;
}

static void free_state(State *s) {
    for (int i = 0; i < PARTS; i++) { free(s->copies[i].at); }
}

static void check_state(const Trainer *t, const State *s) {
    Part parts[PARTS];
    find_parts(parts, t);
    for (int i = 0; i < PARTS; i++) { CHECK_BITS(parts[i].at, s->copies[i].at, parts[i].bytes); }
    CHECK_BITS(&t->run.progress, &s->progress, offsetof(Progress, loss));
}

// A change in any part of the state must be noticed.
static void check_state_is_seen(Trainer *t, const State *s) {
    Part parts[PARTS + 1];
    find_parts(parts, t);
    parts[PARTS] = (Part){&t->run.progress.samples, 1};
    for (int i = 0; i <= PARTS; i++) {
        if (parts[i].bytes == 0) { continue; }
        *(char *)parts[i].at ^= 1;
        CHECK(CAUGHT(check_state(t, s)));
        *(char *)parts[i].at ^= 1;
    }
    check_state(t, s);
}

TEST(evaluation_leaves_no_trace) {
    for (int i = 0; i < BOTH; i += STRIDE) {
        TRAINER(t, open_combination, i, "--valid-data valid.bin --eval-interval 1 --eval-iters 2");
        TRAINER(other, open_combination, i, "");
        for (int steps = 0; steps < 4; steps += 2) {
            State s = take_state(&t);
            validate(&t);
            double loss = t.run.progress.valid_loss;
            CHECK(loss > 1 && loss < 10);
            check_state(&t, &s);
            validate(&t);
            CHECK(t.run.progress.valid_loss == loss);
            check_state_is_seen(&t, &s);
            free_state(&s);
            train(&t, 2), train(&other, 2);
        }
        check_same_training(&t, &other);
    }
}

// For no batch size do the windows of valid.bin fill the last batch.
TEST(evaluation_does_not_depend_on_the_batch) {
    double losses[3];
    for (int i = 0; i < 3; i++) {
        TRAINER(t, open_trainer,
                SMALL_GPT2
                "--num-layers 2 --micro-batch-size %d --valid-data valid.bin --eval-iters 0",
                i + 3);
        validate(&t);
        losses[i] = t.run.progress.valid_loss;
    }
    CHECK_CLOSE(losses[1], losses[0], 1e-6);
    CHECK_CLOSE(losses[2], losses[0], 1e-6);
}

// A skipped step may change only the progress, and the scales of slots without history, which are
// measured again at the next use.
static void allow_for_a_skipped_step(State *s, const Trainer *t) {
    s->progress.step++;
    s->progress.samples += B;
    s->progress.tokens += B * T;
    s->progress.skipped++;
    s->progress.skipped_in_row++;
    Fp8Scale *slots = s->copies[SLOTS].at;
    for (int i = 0; i < fp8_slot_count(&t->run.config); i++) {
        if (slots[i].count > 0) { continue; }
        slots[i].scale = t->slots[i].scale;
        slots[i].scale_inv = t->slots[i].scale_inv;
    }
}

// Does a step whose activations are NaN, because a weight that its first token reads is NaN.
static void skipped_step(Trainer *t) {
    read_batch(t);
    float *row = tensor_of(t, t->weights, TENSOR_TOKEN_EMBEDDING, 0) +
                 (int64_t)t->inputs[0] * t->run.config.channels;
    float right = *row;
    *row = NAN;
    State s = take_state(t);
    train(t, 1);
    allow_for_a_skipped_step(&s, t);
    check_state(t, &s);
    check_state_is_seen(t, &s);
    CHECK(isnan(t->run.progress.loss));
    free_state(&s);
    *row = right;
}

// one.bin has one batch, so that every step sees the same tokens. Steps with a skipped one between
// them must give the same bits as without the skipped one.
TEST(skipped_steps_leave_no_trace) {
    for (int i = 0; i < BOTH; i += STRIDE) {
        for (int good = 0; good < 4; good += 3) {
            static const char one_batch[] = "--data one.bin --no-shuffle --lr-decay-style constant "
                                            "--lr-warmup-iters 0";
            TRAINER(t, open_combination, i, one_batch);
            TRAINER(other, open_combination, i, one_batch);
            train(&other, 5);
            train(&t, good);
            skipped_step(&t);
            train(&t, 5 - good);
            check_same_training(&t, &other);
            CHECK_EQUAL(t.run.progress.skipped_in_row, 0);
            CHECK(t.run.progress.loss < 4);
        }
    }
}

// A window of losses and norms with these means, and a standard deviation of 0.1.
static SpikeWindow window_of(double loss, double norm) {
    SpikeWindow w = {.count = SPIKE_WINDOW};
    double deviation = 0.1 * sqrt((SPIKE_WINDOW - 1.0) / SPIKE_WINDOW);
    for (int i = 0; i < SPIKE_WINDOW; i++) {
        w.loss[i] = loss + (i % 2 == 0 ? deviation : -deviation);
        w.norm[i] = norm + (i % 3 == 0 ? 0.2 : -0.1) * deviation / sqrt(0.02);
    }
    return w;
}

TEST(spikes_are_told_from_usual_steps) {
    static const struct {
        double sigma, loss, norm;
        bool asked;
        SkipReason expected;
    } rows[] = {
        {0, NAN, 1, false, SKIP_NONFINITE},       {0, 1, NAN, false, SKIP_NONFINITE},
        {0, 1, INFINITY, true, SKIP_REQUESTED},   {0, NAN, 1, true, SKIP_REQUESTED},
        {6, -INFINITY, 1, false, SKIP_NONFINITE}, {0, 1e9, 1e9, false, SKIP_NONE},
        {0, 3, 1, true, SKIP_REQUESTED},          {6, 3.59, 1, false, SKIP_NONE},
        {6, 3.61, 1, false, SKIP_SPIKE},          {6, 0, 0, false, SKIP_NONE},
        {6, 3, 1.58, false, SKIP_NONE},           {6, 3, 1.64, false, SKIP_SPIKE},
        {2, 3.21, 1, false, SKIP_SPIKE},          {6, 3.61, 1, true, SKIP_REQUESTED},
    };
    EACH (row, rows) {
        SpikeWindow w = window_of(3, 1), before = w;
        CHECK_EQUAL(step_skip(&w, row->sigma, row->asked, row->loss, row->norm), row->expected);
        bool same = memcmp(&w, &before, sizeof(w)) == 0;
        CHECK_EQUAL(same, row->expected != SKIP_NONE);
    }
    SpikeWindow w = window_of(3, 1);
    w.count--; // not full yet
    CHECK_EQUAL(step_skip(&w, 6, false, 9, 9), SKIP_NONE);
    CHECK(w.count == SPIKE_WINDOW && w.loss[SPIKE_WINDOW - 1] == 9);
    CHECK_EQUAL(step_skip(&w, 6, false, 4, 1), SKIP_NONE); // replaces the oldest entry
    CHECK(w.loss[0] == 4 && w.norm[0] == 1 && w.loss[1] < 3);
}

// A step that is skipped for a spike, or on request, changes as little as one that is skipped for
// NaN.
TEST(spikes_leave_no_trace) {
    for (int i = 0; i < BOTH; i += STRIDE) {
        for (int asked = 0; asked < 2; asked++) {
            TRAINER(t, open_combination, i,
                    asked ? "--iterations-to-skip 2-2,9" : "--skip-spikes 6");
            train(&t, 1);
            CHECK_EQUAL(t.run.progress.window.count, 1);
            t.run.progress.window = window_of(t.run.progress.loss - (asked ? 0 : 2), 1e6);
            State s = take_state(&t);
            train(&t, 1);
            allow_for_a_skipped_step(&s, &t);
            if (asked) { s.progress.skipped_in_row = 0; }
            check_state(&t, &s);
            free_state(&s);
            t.run.progress.window = window_of(t.run.progress.loss, 1e6);
            train(&t, 1);
            CHECK_EQUAL(t.run.progress.skipped, 1);
        }
    }
}

TEST(too_many_skipped_steps_end_the_run) {
    Trainer t;
    open_combination(&t, 0, "--max-skipped 2");
    skipped_step(&t);
    CHECK(run_goes_on(&t.run));
    skipped_step(&t);
    CHECK(!run_goes_on(&t.run));
    train(&t, 1); // a good step that was in flight: the checkpoint still says why the run ended
    CHECK(!run_goes_on(&t.run));
    CHECK_EQUAL(t.run.progress.skipped_in_row, 2);
    CHECK_EQUAL(trainer_close(&t), EXIT_TOO_MANY_SKIPPED);
}

SETUP() {
    prepare_trainer();
    write_tokens("train.bin", 2000, V, 1);
    write_tokens("valid.bin", 11 * T + 1, V, 2);
    write_tokens("one.bin", B * T + 1, V, 3);
}
