// Writes the CPU trainer's logits of the first batch, to compare them with other programs:
//   logits_tool OUT OPTION...
#define TEST_OWN_MAIN
#include "logits_file.h"
#include "trainer.h"

int main(int argc, char **argv) {
    static Trainer t;
    if (argc < 2) { die("usage: %s OUT OPTION...", argv[0]); }
    options_parse(&t.run.options, argc - 1, argv + 1);
    run_resolve_options(&t.run);
    t.run.group.ranks = 1;
    trainer_open(&t);
    trainer_restore(&t);
    const ModelConfig *c = &t.run.config;
    int B = t.run.options.micro_batch_size, T = c->seq_length, M = B * T;
    read_batch(&t);
    model_forward(&t, B, T, PASS_EVAL);
    float *logits = malloc_or_die((size_t)M * (size_t)c->vocab * sizeof(float));
    for (int row = 0; row < M; row++) {
        head_forward(&t, row, 1, PASS_EVAL);
        memcpy(logits + (size_t)row * c->vocab, t.logits, (size_t)c->vocab * sizeof(float));
    }
    write_logits(argv[1], t.inputs, logits, B, T, c->vocab);
    free(logits);
    return trainer_close(&t);
}
