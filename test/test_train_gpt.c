// The CPU trainer's forward and backward: loss, logits and every gradient against PyTorch's
// (test/golden/), and against differences of its own loss.
#include "trainer.h"

enum { B = 3, T = 13, M = B * T, V = 61 }; // as test/golden/*.config has them

static const char *const small_models[] = {
    "--arch gpt2 --num-layers 2 --hidden-size 24 --num-attention-heads 3",
    "--arch llama --num-layers 2 --hidden-size 24 --num-attention-heads 6 --num-query-groups 2 "
    "--ffn-hidden-size 40 --rope-theta 100",
    "--arch llama --num-layers 2 --hidden-size 24 --num-attention-heads 4 --num-query-groups 1 "
    "--ffn-hidden-size 40 --untie-embeddings-and-output-weights",
    "--arch llama --num-layers 2 --hidden-size 24 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 40 --kv-channels 10 --qk-layernorm",
    "--arch llama --num-layers 2 --hidden-size 24 --num-attention-heads 2 --num-query-groups 2 "
    "--ffn-hidden-size 40 --add-qkv-bias --logit-softcap 2",
};
static const char small_shape[] =
    "--vocab-size 61 --make-vocab-size-divisible-by 8 --seq-length 13 "
    "--micro-batch-size 3";

// ---- golden values ----------------------------------------------------------------------------

static int load_golden_inputs(Trainer *t, const char *name) {
    Error err;
    SafeTensors st = golden_open(text_of("%s_inputs.safetensors", name));
    if (!hf_read(&st, &t->run.layout, 0, t->run.layout.size, t->weights, &err)) {
        die("%s", err.text);
    }
    memcpy(t->inputs, golden_data(&st, "tokens", DTYPE_I32, M), M * sizeof(int));
    memcpy(t->targets, golden_data(&st, "targets", DTYPE_I32, M), M * sizeof(int));
    safetensors_close(&st);
    int rows = 0;
    for (int i = 0; i < M; i++) { rows += t->targets[i] >= 0; }
    return rows;
}

static void compare_logits(Trainer *t, const float *expected) {
    static float logits[M * V];
    head_forward(t, 0, M, PASS_EVAL);
    for (int i = 0; i < M; i++) {
        memcpy(logits + i * V, t->logits + i * t->run.config.padded_vocab, V * sizeof(float));
    }
    CHECK_ERROR(logits, expected, M * V, 2e-6);
    logits[100] *= 1.01f;
    CHECK(CAUGHT(CHECK_ERROR(logits, expected, M * V, 2e-6)));
}

// Both sides are FP32 and sum in their own order: some 2e-7 of a tensor's norm apart here.
static void compare_gradients(Trainer *t, const float *expected) {
    for (int i = 0; i < t->run.layout.count; i++) {
        const Param *p = &t->run.layout.params[i];
        float *ours = t->gradients + p->offset, *largest = ours;
        const float *theirs = expected + p->offset;
        double error = test_relative_error(ours, theirs, param_size(p));
        if (!(error <= 2e-6)) {
            test_fail(__FILE__, __LINE__, "gradient of %s, layer %d: off by %.3g",
                      tensor_row(p->id)->name, p->layer, error);
        }
        for (int64_t j = 0; j < param_size(p); j++) {
            if (fabsf(ours[j]) > fabsf(*largest)) { largest = &ours[j]; }
        }
        *largest *= 1.001f;
        CHECK(!(test_relative_error(ours, theirs, param_size(p)) <= 2e-6));
    }
}

static void check_golden(const char *name) {
    char path[PATH_LENGTH], file[64];
    CLOSED(trainer_close) Trainer t;
    Error err;
    snprintf(file, sizeof(file), "%s.config", name);
    golden_path(path, file);
    open_trainer(&t, "--config %s", path);
    snprintf(file, sizeof(file), "%s_outputs.safetensors", name);
    CLOSED(safetensors_close) SafeTensors st = golden_open(file);
    FREED float *expected = malloc_or_die((size_t)t.run.layout.size * sizeof(float));
    if (!hf_read(&st, &t.run.layout, 0, t.run.layout.size, expected, &err)) { die("%s", err.text); }
    int rows = load_golden_inputs(&t, name);
    CHECK(rows > 0 && rows < M);
    double loss = forward_backward(&t, rows);
    CHECK_CLOSE(loss, *(const float *)golden_data(&st, "loss", DTYPE_F32, 1), 1e-6 * loss);
    CHECK_EQUAL(stray_elements(&t, t.gradients), 0);
    compare_gradients(&t, expected);
    compare_logits(&t, golden_data(&st, "logits", DTYPE_F32, M * V));
}

TEST(gpt2_is_pytorchs) {
    check_golden("gpt2");
}

TEST(llama_is_pytorchs) {
    check_golden("llama");
}

// With a soft cap and the z-loss besides.
TEST(qwen2_is_pytorchs) {
    check_golden("qwen2");
}

TEST(qwen3_is_pytorchs) {
    check_golden("qwen3");
}

// ---- differences of the loss ------------------------------------------------------------------

static double loss_only(Trainer *t) {
    model_forward(t, B, T, PASS_EVAL);
    return head_loss(t, M, 0.0f, PASS_EVAL) / M;
}

// The derivative of the loss along a direction in one tensor: w + step * direction.
//
// The loss, about 4, is a mean over 39 FP32 values, so evaluations differ by some 1e-7 of rounding.
// A step of norm 0.01 makes that 1e-4 of the smallest gradients' norms, and keeps the truncation of
// the fourth-order stencil below it: 1.4e-4 is the worst seen, half and twice the step are worse.
static double derivative_along(Trainer *t, const Param *p, const float *direction) {
    static const double weight[] = {1, -8, 0, 8, -1};
    int64_t n = used_size(t, p);
    float *w = t->weights + p->offset, *before = malloc_or_die((size_t)n * sizeof(float));
    double sum = 0, norm = sqrt(sum_of_squares(direction, n)), step = 0.01 / norm;
    memcpy(before, w, (size_t)n * sizeof(float));
    for (int k = 0; k < 5; k++) {
        if (k == 2) { continue; }
        for (int64_t j = 0; j < n; j++) {
            w[j] = before[j] + (float)((k - 2) * step) * direction[j];
        }
        sum += weight[k] * loss_only(t);
    }
    memcpy(w, before, (size_t)n * sizeof(float));
    free(before);
    return sum / (12 * step);
}

enum { DIRECTIONS = 7 };

// Single elements: the one of the largest gradient, then any. The gradient itself, all and half of
// it, which see every element that has one; signs, which see those whose gradient is wrongly 0.
static void choose_direction(float *direction, const float *gradient, int64_t n, int which) {
    int64_t chosen = 0;
    for (int64_t j = 0; j < n; j++) {
        bool coin = rng_bits((uint64_t)which, (uint64_t)j) % 2;
        if (fabsf(gradient[j]) > fabsf(gradient[chosen])) { chosen = j; }
        direction[j] = which < 3 ? 0 : (which == 3 || (which == 4 && coin) ? gradient[j] : 0);
        if (which > 4) { direction[j] = coin ? 1 : -1; }
    }
    if (which > 0) { chosen = (int64_t)(rng_bits(99, (uint64_t)(n + which)) % (uint64_t)n); }
    if (which < 3) { direction[chosen] = 1; }
}

// Distance of the predictions, gradient . direction, from the derivatives, relative to the
// gradient's norm (of unit directions).
static double prediction_error(const double *derivatives, float *const *directions,
                               const float *gradient, int64_t n) {
    double error = 0, norm = sqrt(sum_of_squares(gradient, n));
    for (int d = 0; d < DIRECTIONS; d++) {
        double predicted = 0, length = sqrt(sum_of_squares(directions[d], n));
        for (int64_t j = 0; j < n; j++) { predicted += (double)gradient[j] * directions[d][j]; }
        double off = (predicted - derivatives[d]) / length / norm;
        error = off > error || isnan(off) ? off : (-off > error ? -off : error);
    }
    return error;
}

#define DIFFERENCE_BOUND 5e-4

static void check_tensor(Trainer *t, const Param *p) {
    int64_t n = used_size(t, p);
    float *gradient = t->gradients + p->offset, *directions[DIRECTIONS];
    double derivatives[DIRECTIONS];
    for (int d = 0; d < DIRECTIONS; d++) {
        directions[d] = malloc_or_die((size_t)n * sizeof(float));
        choose_direction(directions[d], gradient, n, d);
        derivatives[d] = derivative_along(t, p, directions[d]);
    }
    double error = prediction_error(derivatives, directions, gradient, n);
    if (!(error <= DIFFERENCE_BOUND)) {
        test_fail(__FILE__, __LINE__, "%s, layer %d: gradient off by %.3g", tensor_row(p->id)->name,
                  p->layer, error);
    }
    for (int64_t j = 0; j < n; j++) {
        if (directions[0][j] == 0) { continue; }
        float right = gradient[j];
        gradient[j] = right * 1.05f;
        CHECK(!(prediction_error(derivatives, directions, gradient, n) <= DIFFERENCE_BOUND));
        gradient[j] = NAN;
        CHECK(!(prediction_error(derivatives, directions, gradient, n) <= DIFFERENCE_BOUND));
        gradient[j] = right;
    }
    for (int d = 0; d < DIRECTIONS; d++) { free(directions[d]); }
}

TEST(gradients_are_differences_of_the_loss) {
    for (int i = 0; i < COUNT(small_models); i++) {
        CLOSED(trainer_close) Trainer t;
        open_trainer(&t, "%s %s", small_models[i], small_shape);
        disturb_weights(&t, 0.15f);
        read_batch(&t);
        forward_backward(&t, M);
        for (int p = 0; p < t.run.layout.count; p++) { check_tensor(&t, &t.run.layout.params[p]); }
    }
}

SETUP() {
    prepare_trainer();
    write_tokens("train.bin", 2000, V, 1);
}
