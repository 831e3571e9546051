// Emulated BF16 and FP8 in the CPU trainer: compares each matmul of a linear layer with one of the
// operands that it should have (test_fp8.c, test_cpu_gemm.c: their definitions), and whole steps
// with FP32's; tests how FP8's scales change over several steps.
#include "trainer.h"

enum { V = 61, T = 16, B = 4, M = B * T, LAYERS = 4 };

#define GPT2 SMALL_GPT2 "--num-layers 4 "
#define LLAMA SMALL_LLAMA "--num-layers 4 "

// ---- the matmuls of one layer -----------------------------------------------------------------

enum { LAYER = 1, N = 160, C = 48 }; // fc1 of LLAMA

typedef struct {
    float x[M * C], dy[M * N], y[M * N], dx[M * C];
} Activations;

// Rounds an operand [rows,columns] of a matmul. down: the matmul sums over rows. With delayed
// scaling the scale is the slot's, otherwise it follows from the tensor or block itself.
static void round_all(float *out, const Trainer *t, OperandId operand, NumberFormat number,
                      const float *x, int rows, int columns, bool down) {
    const Precision *p = &t->run.precision;
    Fp8Type type = precision_of(p, LINEAR_FC1, LAYER)->type[operand];
    int n = rows * columns;
    if (number == NUMBER_FP32) { memcpy(out, x, (size_t)n * sizeof(float)); }
    if (number == NUMBER_BF16) { round_to_bf16(out, x, n); }
    if (number != NUMBER_FP8) { return; }
    if (p->recipe == FP8_RECIPE_BLOCKWISE) {
        bool square = operand == OPERAND_W;
        round_blocks_to_fp8(out, x,
                            (Fp8Blocks){.rows = rows,
                                        .columns = columns,
                                        .height = square || down ? FP8_BLOCK : 1,
                                        .width = square || !down ? FP8_BLOCK : 1,
                                        .type = type,
                                        .power_of_two = p->power_of_two},
                            NULL);
        return;
    }
    int slot = fp8_slot_index(&t->run.config, LINEAR_FC1, LAYER, operand);
    float scale = p->recipe == FP8_RECIPE_DELAYED ? t->slots[slot].scale
                                                  : fp8_max(type) / tensor_amax(x, n);
    round_to_fp8(out, x, n, scale, type);
    for (int i = 0; i < n; i++) { out[i] /= scale; }
}

// Errors of y, dx and dw, each relative to its norm, if the operands had these precisions.
static void matmul_errors(double errors[3], Trainer *t, const Activations *a, NumberFormat number,
                          NumberFormat wgrad) {
    static float x[M * C], dy[M * N], w[N * C], x_wgrad[M * C], dy_wgrad[M * N];
    static float start[N * C], y[M * N], dx[M * C], dw[N * C];
    const CpuLinear *fc1 = &t->blocks[LAYER].fc1;
    memcpy(start, fc1->weight, sizeof(start)); // FP8 weights are quantised from BF16
    if (number == NUMBER_FP8) { round_to_bf16(start, start, N * C); }
    round_all(x, t, OPERAND_X, number, a->x, M, C, false);
    round_all(w, t, OPERAND_W, number, start, N, C, false);
    round_all(dy, t, OPERAND_DY, number, a->dy, M, N, false);
    round_all(x_wgrad, t, OPERAND_X, wgrad, a->x, M, C, true);
    round_all(dy_wgrad, t, OPERAND_DY, wgrad, a->dy, M, N, true);
    cpu_gemm(
        (CpuGemm){.m = M, .n = N, .k = C, .a = x, .b = w, .c = y, .trans_b = true, .alpha = 1});
    cpu_gemm((CpuGemm){.m = M, .n = C, .k = N, .a = dy, .b = w, .c = dx, .alpha = 1});
    cpu_gemm((CpuGemm){
        .m = N, .n = C, .k = M, .a = dy_wgrad, .b = x_wgrad, .c = dw, .trans_a = true, .alpha = 1});
    errors[0] = test_relative_error(a->y, y, M * N);
    errors[1] = test_relative_error(a->dx, dx, M * C);
    errors[2] = test_relative_error(fc1->dweight, dw, N * C);
}

static void run_matmuls(Trainer *t, Activations *a) {
    const CpuLinear *fc1 = &t->blocks[LAYER].fc1;
    fill_random(a->x, M * C, 3.0f, 1);
    fill_random(a->dy, M * N, 1e-4f, 2);
    memset(t->gradients, 0, (size_t)t->run.layout.size * sizeof(float));
    linear_forward(t, fc1, a->y, a->x, NULL, M, PASS_TRAIN);
    linear_backward(t, fc1, a->dx, a->dy, a->x, M);
}

// The error of FP32 sums is 1e-6 of the norm. Matmuls with operands of another precision differ by
// at least a thousand times that.
static void check_matmuls(Trainer *t, NumberFormat number, NumberFormat wgrad) {
    static Activations a;
    double errors[3], other[3];
    run_matmuls(t, &a);
    matmul_errors(errors, t, &a, number, wgrad);
    matmul_errors(other, t, &a, number == NUMBER_BF16 ? NUMBER_FP32 : NUMBER_BF16,
                  wgrad == NUMBER_BF16 ? NUMBER_FP32 : NUMBER_BF16);
    for (int i = 0; i < 3; i++) {
        CHECK_CLOSE(errors[i], 0, 1e-6);
        CHECK(other[i] > 1e-3);
    }
}

TEST(matmuls_have_the_operands_they_should) {
    static const struct {
        const char *options;
        NumberFormat number, wgrad;
    } cases[] = {
        {"", NUMBER_FP32, NUMBER_FP32},
        {"--bf16", NUMBER_BF16, NUMBER_BF16},
        {"--fp8-format hybrid", NUMBER_FP8, NUMBER_FP8},
        {"--fp8-format hybrid --fp8-recipe tensorwise", NUMBER_FP8, NUMBER_FP8},
        {"--fp8-format e4m3 --fp8-recipe tensorwise", NUMBER_FP8, NUMBER_FP8},
        {"--fp8-format e5m2 --fp8-recipe tensorwise", NUMBER_FP8, NUMBER_BF16},
        {"--fp8-format hybrid --fp8-recipe blockwise", NUMBER_FP8, NUMBER_FP8},
        {"--fp8-format e4m3 --fp8-recipe blockwise", NUMBER_FP8, NUMBER_FP8},
        {"--fp8-format e4m3 --fp8-recipe blockwise --fp8-blockwise-fp32-scales", NUMBER_FP8,
         NUMBER_FP8},
        {"--fp8-format e5m2 --fp8-recipe blockwise", NUMBER_FP8, NUMBER_BF16},
        {"--fp8-format hybrid --no-fp8-wgrad", NUMBER_FP8, NUMBER_BF16},
        {"--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 2",
         NUMBER_BF16, NUMBER_BF16},
    };
    EACH (c, cases) {
        TRAINER(t, open_trainer, LLAMA "%s", c->options);
        check_matmuls(&t, c->number, c->wgrad);
    }
}

// A slot with a history keeps its scale, even if the tensor saturates, and records the amax.
TEST(delayed_scales_come_from_the_slot) {
    static Activations a;
    TRAINER(t, open_trainer, LLAMA "--fp8-format hybrid");
    Fp8Scale *x = &t.slots[fp8_slot_index(&t.run.config, LINEAR_FC1, LAYER, OPERAND_X)];
    Fp8Scale *dy = &t.slots[fp8_slot_index(&t.run.config, LINEAR_FC1, LAYER, OPERAND_DY)];
    *x = (Fp8Scale){.scale = 70.0f, .scale_inv = 1 / 70.0f, .count = 3}; // saturates from 6.4 on
    *dy = (Fp8Scale){.scale = 1e7f, .scale_inv = 1e-7f, .amax = 1.0f, .count = 1};
    check_matmuls(&t, NUMBER_FP8, NUMBER_FP8);
    run_matmuls(&t, &a);
    CHECK(x->scale == 70.0f && dy->scale == 1e7f);
    CHECK(x->amax == tensor_amax(a.x, M * C) && x->amax > 448 / 70.0f);
    CHECK(dy->amax == 1.0f); // the largest so far
    x->amax = 0;
    linear_forward(&t, &t.blocks[LAYER].fc1, a.y, a.x, NULL, M, PASS_EVAL);
    CHECK(x->amax == 0);
}

// ---- whole steps ------------------------------------------------------------------------------

// Opens a trainer, and runs the forward and backward passes of the first step.
static void first_step(Trainer *t, const char *model, const char *options) {
    open_trainer(t, "%s%s", model, options);
    disturb_weights(t, 0.05f);
    read_batch(t);
    t->run.progress.loss = forward_backward(t, M);
}

// The relative difference of the first step's gradients from FP32's. It also checks the losses.
static double distance_from(const Trainer *exact, const char *model, const char *options) {
    TRAINER(t, first_step, model, options);
    double loss = fabs(t.run.progress.loss - exact->run.progress.loss);
    CHECK(loss > 0 && loss < 0.03);
    double distance = test_relative_error(t.gradients, exact->gradients, t.run.layout.size);
    return distance;
}

// Operands rounded to 8, 4 or 3 significant bits give gradients an error of about 1%, 13% and 20%
// in four layers, and less if fewer blocks are in FP8. A head in FP8 adds little. Scales of blocks
// of 128 give smaller errors than one scale for a tensor, but powers of two take away a part of
// that.
TEST(precisions_are_near_fp32) {
    static const char *const models[] = {GPT2, LLAMA};
    for (int m = 0; m < 2; m++) {
        TRAINER(exact, first_step, models[m], "");
        double bf16 = distance_from(&exact, models[m], "--bf16");
        double hybrid = distance_from(&exact, models[m], "--fp8-format hybrid");
        double e4m3 = distance_from(&exact, models[m], "--fp8-format e4m3");
        double e5m2 = distance_from(&exact, models[m], "--fp8-format e5m2");
        double head = distance_from(&exact, models[m], "--fp8-format hybrid --fp8-lm-head");
        double wgrad = distance_from(&exact, models[m], "--fp8-format hybrid --no-fp8-wgrad");
        double edges = distance_from(&exact, models[m],
                                     "--fp8-format hybrid --first-last-layers-bf16");
        CHECK(1e-3 < bf16 && bf16 < 0.02);
        CHECK(0.05 < e4m3 && e4m3 < hybrid && hybrid < e5m2 && e5m2 < 0.4);
        CHECK(bf16 < edges && edges < hybrid && wgrad < hybrid);
        double blocks = distance_from(&exact, models[m],
                                      "--fp8-format e4m3 --fp8-recipe blockwise");
        double fine = distance_from(&exact, models[m],
                                    "--fp8-format e4m3 --fp8-recipe blockwise "
                                    "--fp8-blockwise-fp32-scales");
        CHECK(0.05 < fine && fine < e4m3 && fine < blocks && fabs(blocks / e4m3 - 1) < 0.2);
        CHECK(head != hybrid && fabs(head / hybrid - 1) < 0.1);
    }
}

// Before its first step a run has scales that leave about half of the range, and has not moved on.
TEST(first_steps_are_calibrated) {
    static const char *const options[] = {"--fp8-lm-head --fp8-format hybrid",
                                          "--fp8-lm-head --fp8-format e4m3",
                                          "--fp8-lm-head --fp8-format e5m2"};
    for (int f = 0; f < 3; f++) {
        TRAINER(a, first_step, LLAMA, options[f]);
        TRAINER(b, first_step, LLAMA, text_of("%s --fp8-recipe tensorwise", options[f]));
        CHECK(fabs(a.run.progress.loss / b.run.progress.loss - 1) < 5e-3);
        CHECK_EQUAL(a.run.progress.samples, 0);
        for (int i = 0; i < fp8_slot_count(&a.run.config); i++) {
            bool weight = i % OPERAND_COUNT == OPERAND_W;
            double share = a.slots[i].amax * a.slots[i].scale /
                           fp8_slot_target(&a.run.precision, i);
            if (fp8_slot_is_fixed(&a.run.precision, i)) { continue; }
            CHECK(weight ? a.slots[i].scale == b.slots[i].scale : 0.4 < share && share < 0.6);
            CHECK_EQUAL(a.slots[i].count, 0);
        }
    }
}

static bool layer_is_untouched(const Trainer *t, Linear linear, int layer) {
    int first = fp8_slot_index(&t->run.config, linear, layer, OPERAND_X);
    bool untouched = true;
    for (int o = 0; o < OPERAND_COUNT; o++) {
        const Fp8Scale *slot = &t->slots[first + o];
        untouched = untouched && slot->scale == 1 && slot->scale_inv == 1 && slot->amax == 0;
    }
    return untouched;
}

// The blocks of an operand are counted once, although the weight gradient rounds it in other
// blocks. Slots have no state of them.
TEST(codes_of_blocks_are_counted) {
    static Activations a;
    TRAINER(t, open_trainer,
            LLAMA "--fp8-format e4m3 --fp8-recipe blockwise --fp8-lm-head "
                  "--fp8-stats-interval 2");
    int slot = fp8_slot_index(&t.run.config, LINEAR_FC1, LAYER, OPERAND_X);
    t.counting = true;
    run_matmuls(&t, &a);
    for (int i = 0; i < M; i++) { // each row is a block, and its largest value is the largest code
        a.x[i * C] = 1e6f, a.x[i * C + 1] = 1.0f, a.x[i * C + 2] = 0.0f, a.x[i * C + 3] = 10.0f;
    }
    linear_forward(&t, &t.blocks[LAYER].fc1, a.y, a.x, NULL, M, PASS_TRAIN);
    linear_forward(&t, &t.blocks[LAYER].fc1, a.y, a.x, NULL, M, PASS_EVAL);
    const Fp8Counts *c = &t.counts[slot];
    CHECK_EQUAL(c->elements, 2 * M * C);
    CHECK(c->zero > 2 * M && c->zero < M * (C - 1));
    CHECK_EQUAL(t.counts[slot + OPERAND_DY].elements, M * N);
    t.counting = true;
    round_weights(&t);
    CHECK_EQUAL(t.counts[slot + OPERAND_W].elements, N * C);
    CHECK(layer_is_untouched(&t, LINEAR_FC1, LAYER) && layer_is_untouched(&t, LINEAR_HEAD, 0));
}

// Codes are counted with the slot's scale, and every operand once.
TEST(codes_are_counted) {
    static Activations a;
    TRAINER(t, open_trainer, LLAMA "--fp8-format hybrid --fp8-stats-interval 2");
    int slot = fp8_slot_index(&t.run.config, LINEAR_FC1, LAYER, OPERAND_X);
    t.slots[slot] = (Fp8Scale){.scale = 70.0f, .scale_inv = 1 / 70.0f, .count = 3};
    t.counting = true;
    run_matmuls(&t, &a);
    const Fp8Counts *c = &t.counts[slot];
    Fp8Counts right = {0};
    for (int i = 0; i < M * C; i++) {
        volatile float scaled = a.x[i] * 70.0f;
        fp8_count(&right, fp8_encode(scaled, FP8_E4M3), FP8_E4M3);
    }
    CHECK_BITS(c, &right, sizeof(right));
    CHECK(c->largest > 0);
    CHECK_EQUAL(t.counts[slot + OPERAND_DY].elements, M * N);
    t.counting = false;
    run_matmuls(&t, &a);
    CHECK_EQUAL(c->elements, M * C);
    CHECK(!run_counts_fp8(&t.run, 1) && run_counts_fp8(&t.run, 2));
}

// Whether a layer's weight, as its matmuls read it, has this precision.
static bool weight_has(Trainer *t, Linear linear, int layer, NumberFormat number) {
    CpuBlock *b = &t->blocks[layer];
    const CpuLinear *layers[] = {&b->qkv, &b->attention_out, &b->fc1, &b->fc2, &t->head};
    const CpuLinear *l = layers[linear];
    int64_t n = (int64_t)l->N * l->C;
    int errors = 0;
    FREED float *w = malloc_or_die((size_t)n * sizeof(float));
    round_to_bf16(w, l->weight, n);
    const Fp8Scale *slot = &t->slots[l->slot + OPERAND_W];
    float scale = number == NUMBER_FP8 ? fp8_scale(tensor_amax(w, n), 448.0f, 1.0f) : 1.0f;
    if (number == NUMBER_FP8) { round_to_fp8(w, w, n, scale, FP8_E4M3); }
    for (int64_t i = 0; i < n; i++) { errors += !(l->rounded[i] == w[i]); }
    return errors == 0 && slot->scale == scale;
}

TEST(layers_kept_in_bf16_are_not_quantised) {
    CLOSED(trainer_close) Trainer t;
    first_step(&t, GPT2, "--fp8-format hybrid --first-last-layers-bf16");
    for (int l = 0; l < LAYERS; l++) {
        bool edge = l == 0 || l == LAYERS - 1;
        for (int linear = 0; linear < LINEAR_HEAD; linear++) {
            CHECK(weight_has(&t, (Linear)linear, l, edge ? NUMBER_BF16 : NUMBER_FP8));
            CHECK(!weight_has(&t, (Linear)linear, l, edge ? NUMBER_FP8 : NUMBER_BF16));
            CHECK(layer_is_untouched(&t, (Linear)linear, l) == edge);
        }
    }
    CHECK(weight_has(&t, LINEAR_HEAD, 0, NUMBER_BF16) && layer_is_untouched(&t, LINEAR_HEAD, 0));
    train(&t, 2); // the next step's matmuls read the updated weights
    CHECK(weight_has(&t, LINEAR_FC1, 0, NUMBER_BF16));
    trainer_close(&t);
    first_step(&t, GPT2, "--fp8-format hybrid --fp8-lm-head");
    CHECK(weight_has(&t, LINEAR_HEAD, 0, NUMBER_FP8) && !layer_is_untouched(&t, LINEAR_HEAD, 0));
    int fixed = fp8_slot_index(&t.run.config, LINEAR_HEAD, 0, OPERAND_DY);
    CHECK_CLOSE(t.slots[fixed].scale, 57344.0f * M, 1); // the mean over M tokens: 1 / M at most
}

// The loss of the present batch in a pass without backward.
static double loss_in(Trainer *t, Pass pass) {
    model_forward(t, B, T, pass);
    return head_loss(t, M, 0.0f, pass);
}

// Evaluations in BF16 equal those of a BF16 run. Others equal the training loss bit for bit, as
// long as no scale depends on earlier steps.
TEST(evaluations_have_their_precision) {
    static const char *const recipes[] = {"delayed", "tensorwise", "blockwise"};
    TRAINER(bf16, first_step, LLAMA, "--bf16");
    double expected = loss_in(&bf16, PASS_EVAL);
    for (int r = 0; r < 3; r++) {
        TRAINER(t, first_step, LLAMA,
                text_of("--fp8-format e4m3 --fp8-lm-head --eval-precision bf16 --fp8-recipe %s",
                        recipes[r]));
        double fp8 = loss_in(&t, PASS_EVAL);
        CHECK(fp8 == loss_in(&t, PASS_TRAIN) && fp8 != expected);
        CHECK(loss_in(&t, PASS_EVAL_BF16) == expected);
    }
}

// ---- scales over several steps -----------------------------------------------------------------

// Activations are a thousand times larger for three steps: they saturate, or change the scale.
// After that the scale returns, and the run goes on as before. Blocks have no such scale.
TEST(spikes_pass) {
    static const char *const recipes[] = {"delayed --fp8-amax-history-len 4", "tensorwise",
                                          "blockwise"};
    for (int r = 0; r < 3; r++) {
        TRAINER(t, open_trainer, LLAMA "--fp8-format hybrid --fp8-recipe %s", recipes[r]);
        const Fp8Scale *x = &t.slots[fp8_slot_index(&t.run.config, LINEAR_FC1, LAYER, OPERAND_X)];
        float *weight = tensor_of(&t, t.weights, TENSOR_NORM2_WEIGHT, LAYER);
        train(&t, 10);
        double before = t.run.progress.loss, scale = x->scale;
        for (int i = 0; i < C; i++) { weight[i] *= 1000.0f; }
        train(&t, 3);
        CHECK(r == 2 ? x->scale == 1 : x->scale < scale / 100);
        for (int i = 0; i < C; i++) { weight[i] /= 1000.0f; }
        train(&t, 6);
        CHECK(fabs(x->scale / scale - 1) < 0.5);
        CHECK(t.run.progress.skipped == 0 && t.run.progress.loss < before + 0.2);
        for (int64_t i = 0; i < t.run.layout.size; i++) {
            if (!isfinite(t.weights[i])) { test_fail(__FILE__, __LINE__, "weight not finite"); }
        }
    }
}

// Where BF16 shows an infinity, so does FP8: SwiGLU of the two results of 1e20 is infinite, and a
// code that saturates would hide it.
TEST(infinities_are_not_hidden) {
    static const char *const precisions[] = {"--bf16", "--fp8-format hybrid --fp8-recipe delayed",
                                             "--fp8-format e4m3 --fp8-recipe tensorwise",
                                             "--fp8-format hybrid --fp8-recipe blockwise"};
    for (int i = 0; i < 4; i++) {
        for (int planted = 0; planted < 2; planted++) {
            TRAINER(t, open_trainer, LLAMA "--eval-iters 1 --valid-data train.bin %s",
                    precisions[i]);
            train(&t, 2); // the delayed scales have a history
            const Param *p = param_find(&t.run.layout, TENSOR_FC1_WEIGHT, LAYER);
            for (int64_t k = 0; k < param_size(p) && planted; k++) {
                t.weights[p->offset + k] *= 1e20f;
            }
            round_weights(&t);
            train(&t, 2); // the second has the delayed scale of the new weights
            validate(&t);
            CHECK_EQUAL(t.run.progress.skipped > 0, planted);
            CHECK(isnan(t.run.progress.valid_loss) == planted);
        }
    }
}

// Gradients that grow tenfold from one step to the next saturate without E5M2's own margin.
TEST(gradients_may_grow) {
    for (int margin = 0; margin <= 5; margin += 5) {
        unsigned long long saturated = 0;
        TRAINER(t, open_trainer,
                LLAMA "--fp8-format hybrid --fp8-stats-interval 1000 --fp8-e5m2-margin %d", margin);
        float *weight = tensor_of(&t, t.weights, TENSOR_FINAL_NORM_WEIGHT, 0);
        train(&t, 4);
        for (int i = 0; i < C; i++) { weight[i] *= 10; }
        read_batch(&t);
        t.counting = true;
        forward_backward(&t, M);
        for (int i = OPERAND_DY; i < fp8_slot_count(&t.run.config); i += OPERAND_COUNT) {
            saturated += t.counts[i].largest;
        }
        CHECK_EQUAL(saturated > 0, margin == 0);
    }
}

// With a history of one step, a scale depends only on the newest amax.
TEST(scales_follow_the_newest_amax) {
    TRAINER(t, open_trainer, "%s", LLAMA "--fp8-format hybrid --fp8-amax-history-len 1");
    int slot = fp8_slot_index(&t.run.config, LINEAR_FC1, LAYER, OPERAND_DY);
    for (int step = 1; step <= 7; step++) {
        float before = t.slots[slot].scale;
        train(&t, 1);
        CHECK(t.slots[slot].scale != before);
        CHECK_EQUAL(t.slots[slot].count, step);
        CHECK(t.slots[slot].scale == 57344.0f / 32 / t.amax_history[slot]);
    }
}

SETUP() {
    prepare_trainer();
    write_tokens("train.bin", 2000, V, 1);
    write_tokens("one.bin", M + 1, V, 2);
}
