// The CPU trainer's forward and backward passes: compares loss, logits and every gradient with
// PyTorch's (test/golden/). test_cpu.c tests each operation alone.
#include "trainer.h"

enum { M = 3 * 13, V = 61 }; // as in test/golden/*.config

static int load_golden_inputs(Trainer *t, const char *name) {
    CLOSED(safetensors_close)
    SafeTensors st = golden_open(text_of("%s_inputs.safetensors", name));
    or_die(hf_read(&st, &t->run.layout, 0, t->run.layout.size, t->weights));
    memcpy(t->inputs, golden_data(&st, "tokens", DTYPE_I32, M), M * sizeof(int));
    memcpy(t->targets, golden_data(&st, "targets", DTYPE_I32, M), M * sizeof(int));
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

// Both sides are FP32 and sum in different orders: they differ by some 2e-7 of a tensor's norm.
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

// documents: the sequences are packed documents, and the outputs are those of each document by
// itself.
static void check_golden(const char *name, bool documents) {
    char path[PATH_LENGTH];
    golden_path(path, text_of("%s.config", name));
    TRAINER(t, open_trainer, "--config %s %s", path,
            documents ? "--reset-attention-mask --reset-position-ids" : "");
    CLOSED(safetensors_close)
    SafeTensors st = golden_open(
        text_of("%s_%s.safetensors", name, documents ? "documents" : "outputs"));
    if (documents) { memcpy(t.starts, golden_data(&st, "starts", DTYPE_I32, M), M * sizeof(int)); }
    FREED float *expected = malloc_or_die((size_t)t.run.layout.size * sizeof(float));
    or_die(hf_read(&st, &t.run.layout, 0, t.run.layout.size, expected));
    int rows = load_golden_inputs(&t, name);
    CHECK(rows > 0 && rows < M);
    double loss = forward_backward(&t, rows);
    CHECK_CLOSE(loss, *(const float *)golden_data(&st, "loss", DTYPE_F32, 1), 1e-6 * loss);
    CHECK_EQUAL(stray_elements(&t, t.gradients), 0);
    compare_gradients(&t, expected);
    compare_logits(&t, golden_data(&st, "logits", DTYPE_F32, M * V));
}

TEST(models_are_pytorchs) {
    for (int documents = 0; documents < 2; documents++) {
        check_golden("gpt2", documents);
        check_golden("llama", documents);
        check_golden("qwen2", documents); // also has a soft cap and the z-loss
        check_golden("qwen3", documents);
    }
}

SETUP() {
    prepare_trainer();
    write_tokens("train.bin", 2000, V, 1);
}
