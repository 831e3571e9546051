// The GPU trainer inside a test program: activations that grow a thousandfold for some steps.
#define main train_gptcu_main
#include "../train_gpt.cu"
#undef main

#include "../base/rng.h"
#include "test.h"

enum { V = 61, TOKENS = 4096, LAYER = 1, WORDS = 40 };

static void write_tokens(const char *path) {
    int32_t header[SHARD_HEADER_BYTES / 4];
    uint16_t tokens[TOKENS];
    shard_header(header, 2, TOKENS);
    for (int i = 0; i < TOKENS; i++) { tokens[i] = (uint16_t)(rng_bits(1, (uint64_t)i) % V); }
    FILE *file = fopen(path, "wb");
    bool written = file != NULL && fwrite(header, sizeof(header), 1, file) == 1 &&
                   fwrite(tokens, sizeof(tokens), 1, file) == 1;
    if (file == NULL || fclose(file) != 0 || !written) { die("%s cannot be written", path); }
}

static void open_trainer(Trainer *t, const char *recipe) {
    static const char *const model =
        "train_gptcu --data spikes.bin --arch llama --num-layers 4 --hidden-size 48 "
        "--num-attention-heads 6 --num-query-groups 2 --ffn-hidden-size 80 --vocab-size 61 "
        "--make-vocab-size-divisible-by 16 --seq-length 16 --micro-batch-size 4 --lr 3e-3 "
        "--init-method-std 0.1 --fp8-format hybrid --log-interval 1000 --no-cuda-graphs "
        "--fp8-recipe ";
    static char text[1024];
    char *words[WORDS], *rest = text;
    setenv("LLM8_TEST_SMALL_FP8", "1", 1); // train/gpu/support.c: however small the model
    int count = 0;
    snprintf(text, sizeof(text), "%s%s", model, recipe);
    for (char *word; count < WORDS && (word = strtok_r(rest, " ", &rest)) != NULL;) {
        words[count++] = word;
    }
    Options options;
    Ranks ranks = {};
    ranks.ranks = 1;
    options_parse(&options, count, words);
    options.ranks = 1;
    trainer_open(t, &options, &ranks);
    trainer_restore(t);
}

static void train(Trainer *t, int steps) {
    for (int i = 0; i < steps; i++) { train_step(t); }
    finish_step(t);
}

// The weights of a norm times a factor, in FP32 and in the copy that the kernels read.
static void scale_norm(Trainer *t, float factor) {
    const Param *p = param_find(&t->run.layout, TENSOR_NORM2_WEIGHT, LAYER);
    int64_t place = t->params.zero.place[p - t->run.layout.params]; // one rank keeps all of it
    size_t n = (size_t)p->rows * p->cols;
    float *weights = (float *)malloc_or_die(n * sizeof(float)), *master = t->params.master;
    Bf16 *copies = (Bf16 *)malloc_or_die(n * sizeof(Bf16));
    gpu_fetch(&t->gpu, weights, master + place, n * sizeof(float));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    for (size_t i = 0; i < n; i++) {
        weights[i] *= factor;
        copies[i] = bf16_encode(weights[i]);
    }
    gpu_send(&t->gpu, master + place, weights, n * sizeof(float));
    gpu_send(&t->gpu, t->net.blocks[LAYER].norm2.weight, copies, n * sizeof(Bf16));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    free(weights);
    free(copies);
}

static double input_scale(Trainer *t) {
    Fp8Live live;
    int index = fp8_slot_index(&t->run.config, LINEAR_FC1, LAYER, OPERAND_X);
    gpu_fetch(&t->gpu, &live, t->params.scaling.live + index, sizeof(live));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    return live.scale;
}

// They saturate, or move the scale; when they are gone the scale comes back, and the run goes on as
// if nothing had been.
static void spikes_pass(void) {
    static const char *const recipes[] = {"delayed --fp8-amax-history-len 4", "tensorwise"};
    for (int r = 0; r < 2; r++) {
        static Trainer t;
        t = {};
        open_trainer(&t, recipes[r]);
        train(&t, 10);
        double before = t.run.progress.loss, scale = input_scale(&t);
        scale_norm(&t, 1000.0f);
        train(&t, 3);
        CHECK(input_scale(&t) < scale / 100);
        scale_norm(&t, 1 / 1000.0f);
        train(&t, 6);
        double after = input_scale(&t) / scale;
        CHECK(after > 0.5 && after < 1.5);
        CHECK_EQUAL(t.run.progress.skipped, 0);
        CHECK(t.run.progress.loss < before + 0.2);
        trainer_close(&t);
    }
}

int main(void) {
    static Gpu gpu;
    Error err;
    bool opened = gpu_open(&gpu, 0, &err), able = opened && gpu.capability >= 90;
    if (opened) { gpu_close(&gpu); }
    if (!able || getenv("LLM8_SANITIZING") != NULL) { // its kernels are tested each on their own
        printf("  skipped: %s\n0 passed, 0 failed, 1 skipped\n",
               !opened ? err.text
               : !able ? "FP8 needs compute capability 9.0"
                       : "too slow");
        return 0;
    }
    write_tokens("spikes.bin");
    RUN(spikes_pass);
    return test_summary();
}
