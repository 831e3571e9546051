// The CPU trainer in a test program, with what its tests need: shards, options, no output.
#pragma once

#define main train_gpt_main
#include "../train_gpt.c"
#undef main

#include "../checkpoints/hugging_face.h"
#include "fixture.h"
#include "golden.h"
#include "tokens_file.h"

#include <fcntl.h>
#include <unistd.h>

// Two small models that can use FP8, because every side of a linear layer is a multiple of 16.
// Their vocabulary is padded, and the norms' weights leave gaps in the parameter space.
#define SMALL_SHAPE                                                                           \
    "--vocab-size 61 --make-vocab-size-divisible-by 16 --seq-length 16 --micro-batch-size 4 " \
    "--init-method-std 0.1 --lr 3e-3 "
#define SMALL_GPT2 "--arch gpt2 --hidden-size 48 --num-attention-heads 3 " SMALL_SHAPE
#define SMALL_LLAMA                                                               \
    "--arch llama --hidden-size 48 --num-attention-heads 6 --num-query-groups 2 " \
    "--ffn-hidden-size 80 --untie-embeddings-and-output-weights " SMALL_SHAPE

// Discards what the trainer prints. What tests print still goes to stdout.
static inline void silence_stdout(void) {
    test_state.out = fdopen(dup(STDOUT_FILENO), "w");
    if (test_state.out == NULL || freopen("/dev/null", "w", stdout) == NULL) { die("stdout"); }
}

// For the SETUP() of a test program: one thread, unless a test sets another number.
static inline void prepare_trainer(void) {
    omp_set_num_threads(1);
    silence_stdout();
}

// Opens the trainer as main() does. The training data are in train.bin, which the test has written.
PRINTF_LIKE(2, 3) static inline void open_trainer(Trainer *t, const char *options, ...) {
    char text[2048] = "--data train.bin ";
    size_t begin = strlen(text);
    va_list args;
    va_start(args, options);
    vsnprintf(text + begin, sizeof(text) - begin, options, args);
    va_end(args);
    *t = (Trainer){.run = {.options = options_of(text), .group = {.ranks = 1}}};
    trainer_open(t);
    trainer_restore(t);
}

// Declares a trainer that `open` opens; it is closed at the end of the block.
#define TRAINER(name, open, ...)        \
    CLOSED(trainer_close) Trainer name; \
    open(&name, __VA_ARGS__)

// Reads the first micro-batch of the next step into t->inputs and t->targets.
static inline void read_batch(Trainer *t) {
    run_batch(&t->run, 0, 0, t->inputs, t->targets, t->starts);
}

// Runs forward and backward over t->inputs and t->targets, as train_step does. Returns the mean
// loss of the `rows` that count.
static inline double forward_backward(Trainer *t, int rows) {
    int batch = t->run.options.micro_batch_size, length = t->run.options.seq_length;
    memset(t->gradients, 0, (size_t)t->run.layout.size * sizeof(float));
    model_forward(t, batch, length, PASS_TRAIN);
    double loss = head_loss(t, batch * length, 1.0f / (float)rows, PASS_TRAIN);
    model_backward(t, batch, length);
    return loss / rows;
}

static inline void train(Trainer *t, int steps) {
    for (int i = 0; i < steps; i++) { train_step(t); }
}

// The elements of a tensor without the vocabulary's padding.
static inline int64_t used_size(const Trainer *t, const Param *p) {
    const ModelConfig *c = &t->run.config;
    int rows = tensor_row(p->id)->rows == DIM_VOCAB ? c->vocab : p->rows;
    return (int64_t)rows * p->cols;
}

// Changes the weights, because at the start biases are 0, norms 1 and logits near 0, and some terms
// of the model would not matter.
static inline void disturb_weights(Trainer *t, float size) {
    for (int i = 0; i < t->run.layout.count; i++) {
        const Param *p = &t->run.layout.params[i];
        for (int64_t j = 0; j < used_size(t, p); j++) {
            t->weights[p->offset + j] += size * rng_normal((uint64_t)i, (uint64_t)j);
        }
    }
    for (int i = 0; i < fp8_slot_count(&t->run.config); i++) {
        t->slots[i] = (Fp8Scale){.scale = 1.0f, .scale_inv = 1.0f};
    }
    fp8_fix_slot(&t->run.precision, &t->run.options, t->slots);
    begin_rounding(t);
}

// Counts the elements of a parameter space that belong to no weight and are not 0.
static inline int64_t stray_elements(const Trainer *t, const float *space) {
    int64_t stray = 0;
    for (int i = 0; i < t->run.layout.count; i++) {
        const Param *p = &t->run.layout.params[i];
        int64_t end = i + 1 < t->run.layout.count ? p[1].offset : t->run.layout.size;
        for (int64_t j = p->offset + used_size(t, p); j < end; j++) { stray += space[j] != 0.0f; }
    }
    return stray;
}
