// What the GPU trainer computes of the first batch, as logits_tool.c does on the CPU:
//   gpu_logits OUT OPTION...
#define TEST_OWN_MAIN
#include "gpu_trainer.h"
#include "logits_file.h"

int main(int argc, char **argv) {
    static Trainer t;
    const Options &options = t.run.options;
    if (argc < 2) { die("usage: %s OUT OPTION...", argv[0]); }
    options_parse(&t.run.options, argc - 1, argv + 1);
    run_resolve_options(&t.run);
    t.run.group.ranks = t.run.group.local_ranks = 1;
    trainer_open(&t);
    trainer_restore(&t);
    const ModelConfig *c = &t.run.config;
    int B = options.micro_batch_size, T = c->seq_length, M = B * T;
    Pass pass = eval_pass(&options);
    Batch *batch = batches_next(&t.batches);
    run_batch(&t.run, 0, 0, batch->inputs, batch->targets, batch->documents);
    batches_send(&t.batches, B, T);
    model_forward(&t, B, T, pass);
    if (t.net.chunk_rows < M) { die("the logits are not whole"); }
    head_forward(&t, 0, M, (Scratch){NULL, 0}, pass);
    size_t columns = (size_t)c->padded_vocab, vocab = (size_t)c->vocab;
    Bf16 *codes = (Bf16 *)malloc_or_die((size_t)M * columns * sizeof(Bf16));
    float *logits = (float *)malloc_or_die((size_t)M * vocab * sizeof(float));
    gpu_read(&t.gpu, codes, t.net.head.dy.bf16, (size_t)M * columns * sizeof(Bf16));
    for (size_t i = 0; i < (size_t)M * vocab; i++) {
        logits[i] = bf16_decode(codes[i / vocab * columns + i % vocab]);
    }
    write_logits(argv[1], batch->inputs, logits, B, T, c->vocab);
    return trainer_close(&t);
}
