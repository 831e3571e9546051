// What the CPU trainer computes of the first batch, for comparisons with other programs:
//   logits_tool OUT OPTION...
// writes "tokens" [B,T] and "logits" [B,T,V].
#include "trainer.h"

int main(int argc, char **argv) {
    static Options options;
    static Trainer t;
    SafeTensorsWriter w = {0};
    Error err;
    if (argc < 2) { die("usage: %s OUT OPTION...", argv[0]); }
    options_parse(&options, argc - 1, argv + 1);
    trainer_open(&t, &options);
    trainer_restore(&t);
    const ModelConfig *c = &t.run.config;
    int B = options.micro_batch_size, T = c->seq_length, M = B * T;
    int64_t tokens_shape[2] = {B, T}, logits_shape[3] = {B, T, c->vocab};
    read_batch(&t);
    model_forward(&t, B, T, PASS_EVAL);
    safetensors_declare(&w, "tokens", DTYPE_I32, 2, tokens_shape);
    safetensors_declare(&w, "logits", DTYPE_F32, 3, logits_shape);
    if (!safetensors_begin(&w, argv[1], NULL, &err)) { die("%s", err.text); }
    writer_write(&w.file, t.inputs, (size_t)M * sizeof(int));
    for (int row = 0; row < M; row++) {
        linear_forward(&t, LINEAR_HEAD, 0, t.logits, t.norm_out + (size_t)row * c->channels, NULL,
                       NULL, 1, PASS_EVAL);
        writer_write(&w.file, t.logits, (size_t)c->vocab * sizeof(float));
    }
    if (!writer_close(&w.file, &err)) { die("%s", err.text); }
    safetensors_free(&w);
    return trainer_close(&t);
}
