// The decision of precision (model/precision.c): which layers are in FP8, in which formats; and the
// slots.
#include "fixture.h"

#define LLAMA                                                                                    \
    "--arch llama --num-layers 4 --hidden-size 48 --num-attention-heads 6 --num-query-groups 2 " \
    "--ffn-hidden-size 80 --untie-embeddings-and-output-weights --vocab-size 61 "                \
    "--make-vocab-size-divisible-by 16 --seq-length 16 "

enum { LAYERS = 4 };

// ---- the policy -------------------------------------------------------------------------------

// The last decision.
static struct {
    Options options;
    ModelConfig config;
    Precision precision;
} p;

static void decide_with(NumberSupport support, const char *options) {
    precision_free(&p.precision);
    p.options = options_of(options);
    p.config = model_config(&p.options);
    p.precision = precision_decide(&p.options, &p.config, support);
}

static void decide(const char *options) {
    decide_with((NumberSupport){NUMBER_BF16, NULL, 0}, options);
}

static const char *const formats[] = {"hybrid", "e4m3", "e5m2"};

TEST(formats_name_their_operands) {
    static const Fp8Type expected[3][OPERAND_COUNT] = {
        {FP8_E4M3, FP8_E4M3, FP8_E5M2},
        {FP8_E4M3, FP8_E4M3, FP8_E4M3},
        {FP8_E5M2, FP8_E4M3, FP8_E5M2},
    };
    for (int f = 0; f < 3; f++) {
        decide(text_of(LLAMA "--fp8-format %s", formats[f]));
        CHECK_TEXT(precision_name(&p.precision), "FP8");
        for (int l = 0; l < LAYERS * LINEAR_HEAD; l++) {
            const LinearPrecision *lp = &p.precision.linear[l];
            CHECK_EQUAL(lp->number, NUMBER_FP8);
            CHECK_EQUAL(lp->wgrad, f == 2 ? NUMBER_BF16 : NUMBER_FP8); // no matmul of two E5M2
            CHECK_BITS(lp->type, expected[f], sizeof(lp->type));
        }
        CHECK_EQUAL(precision_of(&p.precision, LINEAR_HEAD, 0)->number, NUMBER_BF16);
    }
}

static int fp8_layers(void) {
    int count = 0;
    for (int i = 0; i < p.precision.count; i++) {
        count += p.precision.linear[i].number == NUMBER_FP8;
    }
    return count;
}

TEST(options_keep_layers_in_bf16) {
    static const struct {
        const char *options;
        int fp8;
        const char *precision;
    } cases[] = {
        {"", 0, "BF16"},
        {"--fp8-format hybrid", 16, "FP8"},
        {"--fp8-format hybrid --fp8-lm-head", 17, "FP8"},
        {"--fp8-format hybrid --first-last-layers-bf16", 8, "FP8"},
        {"--fp8-format hybrid --num-layers-at-start-in-bf16 3", 16, "FP8"},
        {"--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 "
         "--num-layers-at-end-in-bf16 0 --fp8-lm-head",
         9, "FP8"},
        {"--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 3", 0, "BF16"},
        {"--fp8-format hybrid --ffn-hidden-size 72", 12, "FP8"}, // not fc2: 72 inputs
        {"--fp8-format hybrid --fp8-lm-head --make-vocab-size-divisible-by 8 --vocab-size 66", 16,
         "FP8"},
        {"--fp8-format e4m3 --fp8-recipe blockwise --fp8-lm-head --vocab-size 65552 "
         "--hidden-size 65536 --num-attention-heads 8 --kv-channels 16",
         16, "FP8"},
    };
    EACH (c, cases) {
        decide(text_of(LLAMA "%s", c->options));
        CHECK_EQUAL(fp8_layers(), c->fp8);
        CHECK_TEXT(precision_name(&p.precision), c->precision);
    }
}

// FP8 is used from a number of multiply-adds on: a block's weights times a micro-batch's tokens.
TEST(small_matmuls_stay_in_bf16) {
    const char *options = LLAMA "--micro-batch-size 3 --fp8-lm-head --fp8-format hybrid ";
    const double tokens = 3 * 16, block = tokens * 48 * (80 + 48 + 160 + 80);
    const struct {
        double gains_from;
        const char *more;
        int fp8;
    } cases[] = {{0, "", 17},
                 {tokens * 48 * 64, "", 17},
                 {block, "", 16},
                 {block + 1, "", 0},
                 {block, "--micro-batch-size 2", 0}};
    EACH (c, cases) {
        decide_with((NumberSupport){NUMBER_BF16, NULL, c->gains_from},
                    text_of("%s%s", options, c->more));
        CHECK_EQUAL(fp8_layers(), c->fp8);
        const LinearPrecision *head = precision_of(&p.precision, LINEAR_HEAD, 0);
        CHECK_EQUAL(strstr(head->reason, "too small to gain") != NULL, c->fp8 < 17);
    }
}

// The share counts three matmuls of a layer; with --no-fp8-wgrad one of them is not in FP8.
TEST(share_of_flops_is_counted) {
    decide(LLAMA "--fp8-format hybrid --fp8-lm-head");
    CHECK_CLOSE(precision_fp8_share(&p.precision), 1.0, 1e-12);
    decide(LLAMA "--fp8-format hybrid --fp8-lm-head --no-fp8-wgrad");
    CHECK_CLOSE(precision_fp8_share(&p.precision), 2.0 / 3, 1e-12);
    decide(LLAMA "--fp8-format hybrid");
    double blocks = 4 * 48 * (80 + 48 + 160 + 80), head = 48 * 64;
    CHECK_CLOSE(precision_fp8_share(&p.precision), blocks / (blocks + head), 1e-12);
}

// The table has a row for consecutive blocks with the same precision.
TEST(table_tells_layers_apart) {
    static const char *const expected[] = {
        "qkv, 1 blocks from 0: BF16, BF16, wgrad BF16 --first-last-layers-bf16",
        "qkv, 3 blocks from 1: E4M3, E5M2, wgrad BF16 --no-fp8-wgrad",
        "head, 0 blocks from 0: BF16, BF16, wgrad BF16 --fp8-lm-head not given"};
    PrecisionRow rows[LAYERS * LINEAR_HEAD + 1];
    decide(LLAMA "--fp8-format hybrid --first-last-layers-bf16 --no-fp8-wgrad "
                 "--num-layers-at-end-in-bf16 0");
    CHECK_EQUAL(precision_rows(&p.precision, rows), 2 * LINEAR_HEAD + 1);
    for (int i = 0; i < COUNT(expected); i++) {
        const PrecisionRow *r = &rows[i < 2 ? i : 2 * LINEAR_HEAD];
        CHECK_TEXT(text_of("%s, %d blocks from %d: %s, %s, wgrad %s %s", r->linear, r->blocks,
                           r->first, r->type[OPERAND_X], r->type[OPERAND_DY], r->wgrad, r->reason),
                   expected[i]);
    }
    double fp8 = 0, all = 0;
    for (int i = 0; i <= 2 * LINEAR_HEAD; i++) {
        all += rows[i].flops_share;
        if (rows[i].type[OPERAND_X][0] == 'E') { fp8 += rows[i].flops_share * 2 / 3; }
    }
    CHECK_CLOSE(all, 1.0, 1e-12);
    CHECK_CLOSE(fp8, precision_fp8_share(&p.precision), 1e-12);
}

// Every operand of every layer has its own slot and its own name.
TEST(slots_have_distinct_indices) {
    enum { SLOTS = (LAYERS * LINEAR_HEAD + 1) * OPERAND_COUNT };
    int uses[SLOTS] = {0};
    char name[64], other[64];
    decide(LLAMA "--fp8-format hybrid --fp8-lm-head --fp8-margin 2 --fp8-e5m2-margin 3");
    CHECK_EQUAL(fp8_slot_count(&p.config), SLOTS);
    for (int linear = 0; linear < LINEAR_COUNT; linear++) {
        for (int layer = 0; layer < (linear == LINEAR_HEAD ? 1 : LAYERS); layer++) {
            for (int o = 0; o < OPERAND_COUNT; o++) {
                uses[fp8_slot_index(&p.config, (Linear)linear, layer, (OperandId)o)]++;
            }
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        CHECK_EQUAL(uses[i], 1);
        fp8_slot_name(&p.config, i, name);
        for (int j = 0; j < i; j++) {
            CHECK(strcmp(name, fp8_slot_name(&p.config, j, other)) != 0);
        }
    }
    int slot = fp8_slot_index(&p.config, LINEAR_FC2, 3, OPERAND_DY);
    CHECK_TEXT(fp8_slot_name(&p.config, slot, name), "blocks.3.fc2.dy");
    CHECK(fp8_slot_target(&p.precision, slot) == 57344.0f / 32);
    CHECK(fp8_slot_target(&p.precision, slot - 1) == 448.0f / 4);
    slot = fp8_slot_index(&p.config, LINEAR_HEAD, 0, OPERAND_X);
    CHECK_TEXT(fp8_slot_name(&p.config, slot, name), "head.x");
    slot = fp8_slot_index(&p.config, LINEAR_HEAD, 0, OPERAND_DY); // never more than is known
    CHECK(fp8_slot_target(&p.precision, slot) == 57344.0f / 4);
}

// Tensorwise scales leave no headroom with any margin.
TEST(margin_is_for_delayed_scales) {
    decide(LLAMA "--fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 2");
    CHECK(fp8_slot_target(&p.precision, OPERAND_X) == 448.0f);
    CHECK(fp8_slot_target(&p.precision, OPERAND_DY) == 57344.0f);
}

// Scales by blocks: no slot is fixed, there is no headroom, and accumulation is never fast.
TEST(blockwise_has_no_state) {
    for (int fp32 = 0; fp32 < 2; fp32++) {
        decide(fp32 ? LLAMA "--fp8-format hybrid --fp8-recipe blockwise --fp8-lm-head "
                            "--fp8-blockwise-fp32-scales --fp8-margin 2"
                    : LLAMA "--fp8-format hybrid --fp8-recipe blockwise --fp8-lm-head");
        CHECK_EQUAL(p.precision.power_of_two, !fp32);
        CHECK(!p.precision.fast_forward && !p.precision.fast_backward);
        CHECK_EQUAL(fp8_slot_scaling(&p.precision, OPERAND_X), SCALE_BLOCK_1X128);
        CHECK_EQUAL(fp8_slot_scaling(&p.precision, OPERAND_W), SCALE_BLOCK_128X128);
        CHECK_EQUAL(fp8_slot_scaling(&p.precision, OPERAND_DY), SCALE_BLOCK_1X128);
        for (int i = 0; i < fp8_slot_count(&p.config); i++) {
            CHECK(fp8_slot_uses_amax(&p.precision, i));
            CHECK(fp8_slot_target(&p.precision, i) ==
                  (i % OPERAND_COUNT == OPERAND_DY ? 57344.0f : 448.0f));
        }
    }
    decide(LLAMA "--fp8-format hybrid --fp8-lm-head");
    CHECK_EQUAL(fp8_slot_scaling(&p.precision, OPERAND_W), SCALE_DELAYED);
    CHECK(p.precision.fast_forward);
    CHECK(!fp8_slot_uses_amax(&p.precision, fp8_slot_index(&p.config, LINEAR_HEAD, 0, OPERAND_DY)));
}

// The head's output gradient is at most its factor. With the z-loss the limit is larger: it allows
// a row whose log-sum-exp is 100.
TEST(the_fixed_slot_has_room_for_the_z_loss) {
    static const double coefficients[] = {0, 1e-4, 0.1};
    for (int i = 0; i < 3; i++) {
        decide(text_of(LLAMA
                       "--fp8-format hybrid --fp8-lm-head --global-batch-size 8 --z-loss-coeff %g",
                       coefficients[i]));
        FREED Fp8Scale *slots = calloc_or_die((size_t)fp8_slot_count(&p.config), sizeof(Fp8Scale));
        const Fp8Scale *slot = &slots[fp8_slot_index(&p.config, LINEAR_HEAD, 0, OPERAND_DY)];
        fp8_fix_slot(&p.precision, &p.options, slots);
        double largest = (1 + 200 * coefficients[i]) / (8 * 16);
        CHECK_CLOSE(slot->scale * largest, 57344, 0.1);
        CHECK_CLOSE(slot->scale * slot->scale_inv, 1, 1e-6);
    }
}

// Of slots without a history alone: by the amax, where it is one, else by what was there or a
// guess.
TEST(calibration_sets_scales_that_are_not_known) {
    enum { STEP_TOKENS = 1024, OTHER = 7 }; // OTHER: a count, a scale
    static const struct {
        int count;
        float scale, amax, expected[OPERAND_COUNT]; // for X, W, dY; 0: target / amax
    } rows[] = {
        {0, 1, 0, {0.5f, 1024, 1792.0f * STEP_TOKENS}},
        {0, 1, NAN, {0.5f, 1024, 1792.0f * STEP_TOKENS}},
        {0, 1, INFINITY, {0.5f, 1024, 1792.0f * STEP_TOKENS}},
        {0, OTHER, NAN, {OTHER, OTHER, OTHER}},
        {0, OTHER, 3, {448.0f / 6, 448.0f / 3, 1792.0f / 6}},
        {0, 1, 3, {448.0f / 6, 448.0f / 3, 1792.0f / 6}},
        {OTHER, 1, 3, {1, 1, 1}},
        {OTHER, OTHER, 3, {OTHER, OTHER, OTHER}},
    };
    decide(LLAMA "--fp8-format hybrid --fp8-lm-head --global-batch-size 64");
    int n = fp8_slot_count(&p.config), head = fp8_slot_index(&p.config, LINEAR_HEAD, 0, OPERAND_X);
    FREED Fp8Scale *slots = calloc_or_die((size_t)n, sizeof(Fp8Scale));
    EACH (row, rows) {
        for (int i = 0; i < n; i++) {
            slots[i] = (Fp8Scale){1 / row->scale, row->scale, row->amax, row->count};
        }
        fp8_calibrate(&p.precision, slots);
        for (int i = 0; i < n; i++) {
            int operand = i % OPERAND_COUNT;
            bool fixed = i == head + OPERAND_DY;
            CHECK_CLOSE(slots[i].scale, fixed ? row->scale : row->expected[operand], 0);
            CHECK_CLOSE(slots[i].scale * slots[i].scale_inv, 1, 1e-6);
            CHECK(operand == OPERAND_W ? float_bits(slots[i].amax) == float_bits(row->amax)
                                       : slots[i].amax == 0);
        }
        CHECK(!fp8_is_uncalibrated(&p.precision, slots));
        if (row->scale != 1 || row->count > 0) { continue; }
        slots[4] = (Fp8Scale){1, 1, row->amax, 0};
        CHECK(fp8_is_uncalibrated(&p.precision, slots));
    }
    // a scale of 1 would say that nothing is known
    slots[0] = (Fp8Scale){.scale = OTHER, .amax = 224};
    fp8_calibrate(&p.precision, slots);
    CHECK(slots[0].scale < 1 && slots[0].scale > 0.999999f);
    decide(LLAMA "--fp8-format hybrid --fp8-recipe tensorwise");
    for (int i = 0; i < n; i++) { slots[i] = (Fp8Scale){1, 1, 0, 0}; }
    CHECK(!fp8_is_uncalibrated(&p.precision, slots));
}

// One fixed scale must fit the target's entry, -1, and all probabilities of a large vocabulary.
// E5M2 has the range for that; in E4M3 the gradients of 128,256 even logits are off by a tenth.
// Blocks have scales of their own.
TEST(the_heads_gradient_has_the_range_of_its_vocabulary) {
    decide(LLAMA "--fp8-format e4m3 --fp8-recipe blockwise --fp8-lm-head");
    CHECK_EQUAL(precision_of(&p.precision, LINEAR_HEAD, 0)->type[OPERAND_DY], FP8_E4M3);
    for (int f = 0; f < COUNT(formats); f++) {
        decide(text_of(LLAMA "--fp8-format %s --fp8-lm-head --global-batch-size 8", formats[f]));
        CHECK_EQUAL(precision_of(&p.precision, LINEAR_HEAD, 0)->type[OPERAND_DY], FP8_E5M2);
    }
}
