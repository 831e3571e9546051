// The speed of the CPU trainer: `make bench-cpu`. Times whole optimizer steps of GPT-2 124M on
// random tokens, then the matrix products of a step alone, with the same weights and shapes.
// Trainer options change what is timed: build/plain/bench_cpu --micro-batch-size 8 --fp8-format
// hybrid
//
// A step has all that a step of training has, except reading real data.
#define TEST_OWN_MAIN
#include "trainer.h"

enum { WARM_UP = 2, ROUNDS = 11, OPTIONS_LENGTH = 1800 };

typedef struct {
    double median, least, most;
} Times;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static Times time_rounds(Trainer *t, void (*work)(Trainer *)) {
    double seconds[ROUNDS] = {0};
    for (int i = -WARM_UP; i < ROUNDS; i++) {
        double begin = wall_seconds();
        work(t);
        if (i >= 0) { seconds[i] = wall_seconds() - begin; }
    }
    qsort(seconds, ROUNDS, sizeof(double), compare_doubles);
    return (Times){seconds[ROUNDS / 2], seconds[0], seconds[ROUNDS - 1]};
}

// Computes every product of one micro-batch, forward and backward, on the data of the last step.
static void run_products(Trainer *t) {
    const Run *run = &t->run;
    int M = run->options.micro_batch_size * run->options.seq_length;
    for (int l = 0; l < run->config.num_layers; l++) {
        const CpuBlock *b = &t->blocks[l];
        linear_forward(t, &b->qkv, b->qkv_out, b->norm1.out, NULL, M, PASS_TRAIN);
        linear_forward(t, &b->attention_out, b->residual_mid, b->attention, NULL, M, PASS_TRAIN);
        linear_forward(t, &b->fc1, b->fc1_out, b->norm2.out, NULL, M, PASS_TRAIN);
        linear_forward(t, &b->fc2, t->residual_out, b->activated, NULL, M, PASS_TRAIN);
        linear_backward(t, &b->fc2, t->d_activated, t->d_residual, b->activated, M);
        linear_backward(t, &b->fc1, t->d_norm, t->d_fc1, b->norm2.out, M);
        linear_backward(t, &b->attention_out, t->d_attention, t->d_residual, b->attention, M);
        linear_backward(t, &b->qkv, t->d_norm, t->d_qkv, b->norm1.out, M);
    }
    for (int row = 0; row < M; row += t->chunk_rows) {
        int rows = (int)min64(t->chunk_rows, M - row);
        const float *x = head_forward(t, row, rows, PASS_TRAIN);
        linear_backward(t, &t->head, t->d_norm, t->logits, x, rows);
    }
}

static void print_processor(void) {
    char line[256], *name = NULL;
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file != NULL && name == NULL && fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "model name", 10) == 0) { name = strchr(line, ':'); }
    }
    if (file != NULL) { fclose(file); }
    printf("processor   %s", name != NULL ? name + 2 : "not known\n");
}

static void print_times(const char *what, Times t, double flops) {
    printf("%-10s  %.1f ms, the median of %d (%.1f to %.1f); %.0f GFLOP/s\n", what, 1e3 * t.median,
           ROUNDS, 1e3 * t.least, 1e3 * t.most, 1e-9 * flops / t.median);
}

static void report(const Trainer *t, Times step, Times products) {
    const Run *run = &t->run;
    const Options *o = &run->options;
    double micro_tokens = (double)o->micro_batch_size * o->seq_length;
    double tokens = (double)o->global_batch_size * o->seq_length;
    print_processor();
    printf("device      %s\n", run->device);
    printf("model       %s, %lld parameters, %s\n", o->model, (long long)run->layout.num_parameters,
           precision_name(&run->precision));
    printf("batch       %d x %d tokens\n", o->global_batch_size, o->seq_length);
    print_times("step", step, tokens * flops_per_token(&run->config));
    printf("            %.0f tokens/s\n", tokens / step.median);
    double product_flops = 6.0 * micro_tokens * (double)matmul_weights(&run->config);
    print_times("products", products, product_flops);
    printf("            %.0f%% of the step\n",
           100 * products.median * run_micro_batches(run) / step.median);
}

int main(int argc, char **argv) {
    char folder[] = "/tmp/bench_cpu-XXXXXX";
    char options[OPTIONS_LENGTH] =
        "--model gpt2-124m --seq-length 64 --micro-batch-size 4 --lr 1e-5";
    Options checked;
    for (int i = 1; i < argc; i++) {
        size_t used = strlen(options);
        if (used + strlen(argv[i]) + 2 > sizeof(options)) { die("too many options"); }
        snprintf(options + used, sizeof(options) - used, " %s", argv[i]);
    }
    or_die(read_options(&checked, options));
    if (mkdtemp(folder) == NULL || chdir(folder) != 0) { die("%s: cannot be used", folder); }
    write_tokens("train.bin", 1 << 18, 257, 1);
    Trainer t;
    silence_stdout();
    open_trainer(&t, "%s", options);
    Times step = time_rounds(&t, train_step), products = time_rounds(&t, run_products);
    dup2(fileno(test_out()), STDOUT_FILENO);
    report(&t, step, products);
    unlink("train.bin");
    rmdir(folder);
    return trainer_close(&t);
}
