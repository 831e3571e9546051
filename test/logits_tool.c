// What the CPU trainer computes of the first batch, for comparisons with other programs:
//   logits_tool OUT OPTION...
// writes "tokens" [B,T] and "logits" [B,T,V].
#include "trainer.h"

int main(int argc, char **argv) {
    static Options options;
    static Trainer t;
    FileWriter w;
    Error err;
    if (argc < 2) { die("usage: %s OUT OPTION...", argv[0]); }
    options_parse(&options, argc - 1, argv + 1);
    trainer_open(&t, &options);
    trainer_restore(&t);
    const ModelConfig *c = &t.run.config;
    int B = options.micro_batch_size, T = c->seq_length, M = B * T;
    read_batch(&t);
    model_forward(&t, B, T, PASS_EVAL);
    float *logits = malloc_or_die((size_t)M * (size_t)c->vocab * sizeof(float));
    for (int row = 0; row < M; row++) {
        head_forward(&t, row, 1, PASS_EVAL);
        memcpy(logits + (size_t)row * c->vocab, t.logits, (size_t)c->vocab * sizeof(float));
    }
    TensorEntry tensors[] = {
        {.name = "tokens", .dtype = DTYPE_I32, .dims = 2, .shape = {B, T}, .data = t.inputs},
        {.name = "logits",
         .dtype = DTYPE_F32,
         .dims = 3,
         .shape = {B, T, c->vocab},
         .data = logits},
    };
    if (!safetensors_write(&w, argv[1], tensors, 2, NULL, &err)) { die("%s", err.text); }
    free(logits);
    return trainer_close(&t);
}
