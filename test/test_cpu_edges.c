// The operations of kernels/cpu.h where test_cpu.c does not go: the optimizer and the reductions,
// extreme and bad values, what must stay untouched.
#include "../kernels/cpu.h"
#include "golden.h"
#include "reference.h"
#include "test.h"

#include <omp.h>

// ---- AdamW ------------------------------------------------------------------------------------

enum { PARAMETERS = 1003 };

typedef struct {
    double w[PARAMETERS], m[PARAMETERS], v[PARAMETERS];
} Moments;

static void reference_adamw(Moments *r, const float *gradients, const AdamW *a) {
    for (int i = 0; i < PARAMETERS; i++) {
        double g = (double)gradients[i] * a->gradient_scale;
        r->m[i] = a->beta1 * r->m[i] + (1 - (double)a->beta1) * g;
        r->v[i] = a->beta2 * r->v[i] + (1 - (double)a->beta2) * g * g;
        double m = r->m[i] / (1 - pow(a->beta1, (double)a->step));
        double v = r->v[i] / (1 - pow(a->beta2, (double)a->step));
        r->w[i] -= a->lr * (m / (sqrt(v) + a->eps) + a->weight_decay * r->w[i]);
    }
}

static double distance(const float *x, const double *y) {
    double difference = 0, size = 0;
    for (int i = 0; i < PARAMETERS; i++) {
        difference += (x[i] - y[i]) * (x[i] - y[i]);
        size += y[i] * y[i];
    }
    return sqrt(difference / size);
}

typedef struct {
    float w[PARAMETERS], m[PARAMETERS], v[PARAMETERS];
} State;

// Steps of our AdamW from random weights, with a schedule of learning rates and clipping.
static void run_adamw(State *s, Moments *r, int steps, AdamW a, int threads) {
    float gradients[PARAMETERS];
    *s = (State){0};
    *r = (Moments){0};
    fill_random(s->w, PARAMETERS, 0.02f, 1);
    for (int i = 0; i < PARAMETERS; i++) { r->w[i] = s->w[i]; }
    omp_set_num_threads(threads);
    for (a.step = 1; a.step <= steps; a.step++) {
        fill_random(gradients, PARAMETERS, 0.1f, (uint64_t)a.step + 2);
        gradients[5] = 0.0f; // its moments stay 0
        a.gradient_scale = a.step % 3 == 0 ? 0.25f : 1.0f;
        adamw_update(s->w, s->m, s->v, gradients, PARAMETERS, a);
        reference_adamw(r, gradients, &a);
    }
}

// FP32 rounds each moment once a step and the weight three times: 20 steps stay below 20 * 6e-8.
static void adamw_follows_its_definition(void) {
    static State s, other;
    static Moments r;
    AdamW a = {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
    run_adamw(&s, &r, 20, a, 1);
    CHECK_CLOSE(distance(s.w, r.w), 0, 1.2e-6);
    CHECK_CLOSE(distance(s.m, r.m), 0, 1.2e-6);
    CHECK_CLOSE(distance(s.v, r.v), 0, 1.2e-6);
    CHECK(s.m[5] == 0.0f && s.v[5] == 0.0f);
    for (int threads = 2; threads <= 3; threads++) {
        run_adamw(&other, &r, 20, a, threads);
        CHECK_BITS(&other, &s, sizeof(s));
    }
    // every hyperparameter counts
    AdamW wrong[] = {a, a, a, a, a};
    wrong[0].lr *= 1.001f;
    wrong[1].beta1 = 0.899f;
    wrong[2].beta2 = 0.949f;
    wrong[3].weight_decay = 0.0f;
    wrong[4].eps = 1e-3f;
    for (int i = 0; i < 5; i++) {
        Moments unused;
        run_adamw(&other, &unused, 20, wrong[i], 1);
        CHECK(!(distance(other.w, r.w) <= 1.2e-6));
    }
}

// With betas of 0 a first step is lr * sign(g): the bias correction by hand.
static void adamw_corrects_the_bias(void) {
    float w[3] = {1, 1, 1}, m[3] = {0}, v[3] = {0}, g[3] = {2, -0.5f, 1e-3f};
    AdamW a = {
        .lr = 0.125f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-30f, .gradient_scale = 1, .step = 1};
    adamw_update(w, m, v, g, 3, a);
    CHECK_CLOSE(w[0], 0.875, 2e-7);
    CHECK_CLOSE(w[1], 1.125, 2e-7);
    CHECK_CLOSE(w[2], 0.875, 2e-7);
}

// ---- reductions -------------------------------------------------------------------------------

static void reductions_do_not_depend_on_threads(void) {
    enum { N = 200003 }; // several blocks of sum_of_squares
    float *x = malloc_or_die(N * sizeof(float));
    double expected = 0, sums[4];
    float amax = 0.0f;
    fill_random(x, N, 3.0f, 1);
    for (int i = 0; i < N; i++) {
        expected += (double)x[i] * x[i];
        amax = fmaxf(amax, fabsf(x[i]));
    }
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        sums[threads] = sum_of_squares(x, N);
        CHECK_CLOSE(sums[threads], expected, 1e-12 * expected);
        CHECK(sums[threads] == sums[1]);
        CHECK(tensor_amax(x, N) == amax);
    }
    x[N - 1] = NAN;
    CHECK(isnan(sum_of_squares(x, N)) && isnan(tensor_amax(x, N)));
    x[N - 1] = 1e30f; // its square is beyond FP32, and fine in the double
    CHECK_CLOSE(sum_of_squares(x, N), 1e60, 1e53);
    CHECK(tensor_amax(x, N) == 1e30f);
    free(x);
}

// ---- rotary embedding -------------------------------------------------------------------------

static void rope_inverse_undoes_rope(void) {
    enum { B = 2, T = 33, H = 3, G = 1, D = 6, SIZE = B * T * (H + 2 * G) * D };
    float table[T * D], x[SIZE], y[SIZE];
    rope_table(table, T, D, &(Rope){.theta = 10000});
    fill_random(x, SIZE, 1.0f, 1);
    memcpy(y, x, sizeof(x));
    rope_apply(y, table, B, T, H, G, D, false);
    CHECK(!(test_relative_error(y, x, SIZE) <= 0.1));
    CHECK_BITS(y, x, (H + 2 * G) * D * sizeof(float)); // place 0 does not turn
    rope_apply(y, table, B, T, H, G, D, true);
    CHECK_ERROR(y, x, SIZE, 2e-7);
}

// ---- activations over the whole range ---------------------------------------------------------

enum { POINTS = 20001 }; // of [-100, 100]

// Of elements that are off by more than `relative` of the value and `absolute`.
static int off(const float *actual, const float *x, double (*function)(double), double relative,
               double absolute) {
    int count = 0;
    for (int i = 0; i < POINTS; i++) {
        double expected = function(x[i]);
        count += !(fabs(actual[i] - expected) <= relative * fabs(expected) + absolute);
    }
    return count;
}

// Fourth-order, good to 1e-10 here.
static double slope_of(double (*function)(double), double x) {
    const double h = 1e-4;
    return (8 * (function(x + h) - function(x - h)) - (function(x + 2 * h) - function(x - 2 * h))) /
           (12 * h);
}

static double gelu_slope(double x) {
    return slope_of(reference_gelu_of, x);
}

static double silu_slope(double x) {
    return slope_of(reference_silu_of, x);
}

// SiLU is x / (1 + exp(-x)), so it shows exp's own error: 6 roundings of 2^-24 allowed in all,
// until exp is clamped at 88.3 and the value is below 1e-36. GELU's argument is a cubic, whose
// rounding grows in the tail; its slope has a term x sigmoid (1 - sigmoid) 2u', where the factor
// beside 1 - sigmoid reaches 35 (at x = 5) before that vanishes.
static void activations_are_accurate_everywhere(void) {
    static float x[2 * POINTS], ones[POINTS], out[POINTS], slope[2 * POINTS];
    for (int i = 0; i < POINTS; i++) {
        x[i] = 0.01f * (float)(i - POINTS / 2);
        x[POINTS + i] = ones[i] = 1.0f;
    }
    gelu_forward(out, x, POINTS);
    gelu_backward(slope, ones, x, POINTS);
    CHECK_EQUAL(off(out, x, reference_gelu_of, 6 * 0x1p-24, 1e-7), 0);
    CHECK_EQUAL(off(slope, x, gelu_slope, 0, 40 * 0x1p-24), 0);
    swiglu_forward(out, x, 1, POINTS);
    swiglu_backward(slope, ones, x, 1, POINTS);
    CHECK_EQUAL(off(out, x, reference_silu_of, 6 * 0x1p-24, 1e-36), 0);
    CHECK_EQUAL(off(slope, x, silu_slope, 0, 20 * 0x1p-24), 0);
    CHECK_EQUAL(off(slope + POINTS, x, reference_silu_of, 6 * 0x1p-24, 1e-36), 0);
    out[7000] *= 1.000001f;
    out[12000] = NAN;
    CHECK_EQUAL(off(out, x, reference_silu_of, 6 * 0x1p-24, 1e-36), 2);
}

static void activations_keep_bad_values(void) {
    float x[4] = {NAN, 1.0f, INFINITY, 1.0f}, out[4], dout[4] = {1, 1, 1, 1}, dx[4];
    gelu_forward(out, x, 4);
    CHECK(isnan(out[0]) && isinf(out[2]));
    gelu_backward(dx, dout, x, 4);
    CHECK(isnan(dx[0]));
    swiglu_forward(out, x, 2, 1);
    CHECK(isnan(out[0]) && isinf(out[1]));
    swiglu_backward(dx, dout, x, 2, 1);
    CHECK(isnan(dx[0]) && isnan(dx[1]));
}

// ---- attention --------------------------------------------------------------------------------

// Scores far beyond exp's range: all alike, and so the values' mean; then one that stands out.
static void attention_survives_large_scores(void) {
    enum { T = 9, D = 4, N = 3 * D };
    float qkv[T * N], out[T * D], lse[T], dqkv[T * N], dout[T * D];
    fill_random(dout, T * D, 1.0f, 1);
    for (int t = 0; t < T; t++) {
        for (int d = 0; d < D; d++) {
            qkv[t * N + d] = qkv[t * N + D + d] = 100.0f;
            qkv[t * N + 2 * D + d] = (float)(t + d);
        }
    }
    attention_forward(out, lse, qkv, 1, T, 1, 1, D);
    for (int i = 0; i < T * D; i++) { CHECK_CLOSE(out[i], 0.5 * (i / D) + i % D, 1e-5); }
    for (int d = 0; d < D; d++) { qkv[3 * N + D + d] = 200.0f; }
    attention_forward(out, lse, qkv, 1, T, 1, 1, D);
    attention_backward(dqkv, dout, out, lse, qkv, 1, T, 1, 1, D);
    for (int i = 3 * D; i < T * D; i++) { CHECK_CLOSE(out[i], 3 + i % D, 1e-5); }
    for (int i = 0; i < T * N; i++) { CHECK(isfinite(dqkv[i])); }
}

// ---- cross-entropy ----------------------------------------------------------------------------

enum { ROWS = 3, V = 13, P = 16 };

static void loss_only_leaves_the_logits_alone(void) {
    float logits[ROWS * P], before[ROWS * P], losses[ROWS] = {NAN, NAN, NAN}, with[ROWS];
    int targets[ROWS] = {4, -1, 12};
    fill_random(logits, ROWS * P, 2.0f, 1);
    memcpy(before, logits, sizeof(logits));
    cross_entropy(losses, logits, targets, ROWS, V, P, 0.0f);
    CHECK_BITS(logits, before, sizeof(logits));
    CHECK(losses[0] > 0 && losses[1] == 0.0f && losses[2] > 0);
    cross_entropy(with, logits, targets, ROWS, V, P, 1.0f);
    CHECK_BITS(with, losses, sizeof(losses));
}

// Whatever stands there, NaN and the largest of all logits too.
static void padding_and_left_out_rows_do_not_matter(void) {
    float logits[ROWS * P], clean[ROWS * P], losses[ROWS], clean_losses[ROWS];
    int targets[ROWS] = {4, -1, 12};
    fill_random(logits, ROWS * P, 2.0f, 1);
    memcpy(clean, logits, sizeof(logits));
    for (int i = 0; i < ROWS * P; i++) {
        if (i / P == 1 || i % P >= V) { logits[i] = i % 2 ? NAN : 1e30f; }
    }
    cross_entropy(losses, logits, targets, ROWS, V, P, 0.5f);
    cross_entropy(clean_losses, clean, targets, ROWS, V, P, 0.5f);
    CHECK_BITS(losses, clean_losses, sizeof(losses));
    CHECK_BITS(logits, clean, sizeof(logits));
    for (int row = 0; row < ROWS; row++) {
        double sum = 0;
        for (int i = 0; i < P; i++) {
            float d = logits[row * P + i];
            sum += d;
            if (row == 1 || i >= V) { CHECK(d == 0.0f); }
        }
        CHECK_CLOSE(sum, 0, 1e-6);
        CHECK(row == 1 || logits[row * P + targets[row]] < 0);
    }
}

static void bad_logits_spoil_the_loss(void) {
    static const float bad[] = {NAN, -NAN, INFINITY};
    int targets[ROWS] = {4, 0, 12};
    for (int place = 0; place < V; place++) {
        for (int i = 0; i < 4; i++) {
            float logits[ROWS * P], losses[ROWS];
            fill_random(logits, ROWS * P, 2.0f, 1);
            int at = i < 3 ? place : targets[1]; // minus infinity only means a probability of 0
            logits[P + at] = i < 3 ? bad[i] : -INFINITY;
            cross_entropy(losses, logits, targets, ROWS, V, P, place % 2 ? 1.0f : 0.0f);
            CHECK(!isfinite(losses[1]));
            CHECK(isfinite(losses[0]) && isfinite(losses[2]));
        }
    }
}

static void large_logits_do_not_overflow(void) {
    float logits[P] = {0}, loss;
    int target = 4;
    logits[3] = 1e5f, logits[4] = 1e5f, logits[5] = -1e5f;
    cross_entropy(&loss, logits, &target, 1, V, P, 1.0f);
    CHECK_CLOSE(loss, log(2), 0.01); // an ulp of 1e5 is 0.008
    CHECK_CLOSE(logits[3], 0.5, 1e-6);
    CHECK_CLOSE(logits[4], -0.5, 1e-6);
    CHECK_CLOSE(logits[5], 0, 1e-30);
}

int main(void) {
    RUN(adamw_follows_its_definition);
    RUN(adamw_corrects_the_bias);
    RUN(reductions_do_not_depend_on_threads);
    RUN(rope_inverse_undoes_rope);
    RUN(activations_are_accurate_everywhere);
    RUN(activations_keep_bad_values);
    RUN(attention_survives_large_scores);
    RUN(loss_only_leaves_the_logits_alone);
    RUN(padding_and_left_out_rows_do_not_matter);
    RUN(bad_logits_spoil_the_loss);
    RUN(large_logits_do_not_overflow);
    return test_summary();
}
