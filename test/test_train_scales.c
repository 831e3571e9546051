// FP8 scales in the CPU trainer over several steps: what moves them, and what they withstand.
#include "trainer.h"

enum { B = 4, T = 16, M = B * T, C = 48, LAYER = 1 };

#define LLAMA SMALL_LLAMA "--num-layers 4 "

// Activations a thousand times as large for three steps saturate, or move the scale; when they are
// gone the scale comes back, and the run goes on as if nothing had been. Blocks have no such scale.
TEST(spikes_pass) {
    static const char *const recipes[] = {"delayed --fp8-amax-history-len 4", "tensorwise",
                                          "blockwise"};
    for (int r = 0; r < 3; r++) {
        CLOSED(trainer_close) Trainer t;
        open_trainer(&t, LLAMA "--fp8-format hybrid --fp8-recipe %s", recipes[r]);
        const Fp8Slot *x = &t.slots[fp8_slot_index(&t.run.config, LINEAR_FC1, LAYER, OPERAND_X)];
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

// Gradients that grow tenfold from one step to the next saturate without E5M2's own margin.
TEST(gradients_may_grow) {
    for (int margin = 0; margin <= 5; margin += 5) {
        CLOSED(trainer_close) Trainer t;
        unsigned long long saturated = 0;
        open_trainer(&t, LLAMA "--fp8-format hybrid --fp8-stats-interval 1000 --fp8-e5m2-margin %d",
                     margin);
        float *weight = tensor_of(&t, t.weights, TENSOR_FINAL_NORM_WEIGHT, 0);
        train(&t, 4);
        for (int i = 0; i < C; i++) { weight[i] *= 10; }
        read_batch(&t);
        t.counting = true;
        forward_backward(&t, M);
        for (int i = OPERAND_DY; i < fp8_slot_count(&t.run.config); i += OPERAND_COUNT) {
            saturated += t.counts[i].saturated;
        }
        CHECK_EQUAL(saturated > 0, margin == 0);
    }
}

// With a history of one step a scale follows the newest amax alone.
TEST(scales_follow_the_newest_amax) {
    CLOSED(trainer_close) Trainer t;
    open_trainer(&t, "%s", LLAMA "--fp8-format hybrid --fp8-amax-history-len 1");
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
    write_tokens("train.bin", 2000, 61, 1);
}
