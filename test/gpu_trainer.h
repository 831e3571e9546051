// The GPU trainer inside a test program, opened as its main() opens it.
#pragma once

#define main train_gptcu_main
#include "../train_gpt.cu"
#undef main

#include "test.h"
#include "tokens_file.h"

// Options from texts, as a shell would split them. Small models keep FP8 (train/gpu/support.c).
static inline Options options_of(const char *model, const char *more) {
    enum { WORDS = 128 };
    static char text[2048]; // options may point into it
    char *words[WORDS], *rest = text;
    int count = 0;
    setenv("LLM8_TEST_SMALL_FP8", "1", 1);
    snprintf(text, sizeof(text), "train_gptcu %s %s", model, more);
    for (char *word; count < WORDS && (word = strtok_r(rest, " ", &rest)) != NULL;) {
        words[count++] = word;
    }
    static Run run;
    options_parse(&run.options, count, words);
    run_resolve_options(&run);
    return run.options;
}

static inline void open_trainer(Trainer *t, const Options *options) {
    *t = {};
    t->run.options = *options;
    t->run.group.ranks = t->run.group.local_ranks = 1;
    trainer_open(t);
    trainer_restore(t);
}

static inline void train(Trainer *t, int steps) {
    for (int i = 0; i < steps; i++) { train_step(t); }
    collect(t, t->enqueued - 1);
}

// Ends the program as one skipped test where the device has no FP8.
static inline void need_fp8(void) {
    Gpu gpu;
    if (gpu_open(&gpu, 0)) {
        int has = gpu.capability;
        gpu_close(&gpu);
        if (has >= FP8_CAPABILITY) { return; }
        fail("FP8 needs compute capability 8.9");
    }
    test_skip_all(error_text());
}
