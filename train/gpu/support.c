#include "support.h"
#include "../../ranks/group.h"
#include "verify.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// From here on FP8 took less time than BF16 with GPT-2's blocks of 128 to 768 channels and 1,024 to
// 16,384 tokens (one H200, 2026-11-21): at 3.2e9 it took 0.3% less to 3% more, at 7.2e9 3% less.
static const double fp8_gains_from = 5e9;

NumberSupport support_of(int capability, char reason[SUPPORT_REASON]) {
    // For tests: LLM8_TEST_CAPABILITY=80 takes the GPU for an older one; LLM8_TEST_SMALL_FP8=1 has
    // FP8 in models too small to gain from it.
    const char *assumed = getenv("LLM8_TEST_CAPABILITY"), *small = getenv("LLM8_TEST_SMALL_FP8");
    if (assumed != NULL && (capability == 0 || atoi(assumed) < capability)) {
        capability = atoi(assumed);
    }
    bool always = small != NULL && strcmp(small, "1") == 0;
    NumberSupport support = {NUMBER_BF16, NULL, always ? 0 : fp8_gains_from};
    if (capability > 0 && capability < 90) {
        snprintf(reason, SUPPORT_REASON, "compute capability %d.%d is below 9.0", capability / 10,
                 capability % 10);
        support.lacks_fp8 = reason;
    }
    return support;
}

// Several ranks, of which one has no FP8: none has.
static void agree(const Options *o, NumberSupport *support, char reason[SUPPORT_REASON]) {
    Error err = {""};
    bool lacks = support->lacks_fp8 != NULL;
    if (lacks) { fail(&err, "%s", support->lacks_fp8); }
    if (o->group == NULL || group_agree(o->group, CHANNEL_MAIN, !lacks, &err)) { return; }
    snprintf(reason, SUPPORT_REASON, "%.*s", SUPPORT_REASON - 1, err.text);
    support->lacks_fp8 = reason;
}

NumberSupport support_find(Gpu *gpu, const Options *o, char reason[SUPPORT_REASON]) {
    NumberSupport support = support_of(gpu->capability, reason);
    Error err;
    if (o->fp8_format == FP8_FORMAT_NONE) { return support; }
    if (support.lacks_fp8 == NULL && !fp8_self_check(gpu, &err)) {
        snprintf(reason, SUPPORT_REASON, "the FP8 self-check failed");
        warn("%s", err.text);
        support.lacks_fp8 = reason;
    }
    agree(o, &support, reason);
    if (support.lacks_fp8 == NULL) { return support; }
    if (o->fp8_required) { die("--fp8-required: no FP8 here: %s", support.lacks_fp8); }
    warn("no FP8 here: %s; the run goes on in BF16", support.lacks_fp8);
    return support;
}

void support_check_shapes(const ModelConfig *c) {
    if (c->channels % 8 != 0 || c->ffn % 8 != 0 || qkv_rows(c) % 8 != 0 ||
        c->padded_vocab % 8 != 0) {
        die("the GPU trainer needs --hidden-size, --ffn-hidden-size, head sizes and "
            "--make-vocab-size-divisible-by to be multiples of 8");
    }
}
