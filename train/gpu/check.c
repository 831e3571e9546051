#include "check.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void check_plan(Check *c, const Network *net, Plan *plan) {
    const Run *run = net->run;
    *c = (Check){.net = net};
    if (!options_train(&run->options) || run->options.check_interval == 0) { return; }
    c->params = run->layout.count;
    c->linears = run->precision.count;
    c->rows = 1 + 2 * c->params + c->linears + 1;
    plan_section(plan, "checked steps", PHASE_ALWAYS);
    PLAN(plan, "hashes", CHECK_PASSES * c->rows, c->hashes);
    c->host = calloc_or_die((size_t)(CHECK_PASSES * c->rows), sizeof(uint64_t));
}

void check_close(Check *c) {
    free(c->host);
}

static const LinearLayer *linear_of(const Network *net, const LinearPrecision *lp) {
    return lp->linear == LINEAR_HEAD ? &net->head : &net->blocks[lp->layer].linear[lp->linear];
}

void check_hash(Check *c, int pass) {
    const Network *net = c->net;
    const Run *run = net->run;
    Params *p = net->params;
    Gpu *gpu = net->gpu;
    uint64_t *row = c->hashes + pass * c->rows;
    gpu_clear(gpu, FAMILY_OPTIMIZER, row, (size_t)c->rows * sizeof(*row));
    gpu_hash(gpu, row++, net->loss_sum, sizeof(double), 0);
    for (int i = 0; i < c->params; i++, row++) {
        const Param *q = &run->layout.params[i];
        bool codes;
        Gradient g = params_gradient(p, q->id, q->layer);
        const void *weights = params_weights(p, q->id, q->layer, &codes);
        // with the zeros after it, up to whole words of the hash
        int64_t n = round_up64(param_size(q), 8);
        gpu_hash(gpu, row, g.data, n * gpu_type_bytes(g.type), 0);
        gpu_hash(gpu, row + c->params, weights, n * (codes ? 1 : (int64_t)sizeof(Bf16)), 0);
    }
    row += c->params;
    for (int i = 0; i < c->linears; i++, row++) {
        const LinearPrecision *lp = &run->precision.linear[i];
        const LinearLayer *l = linear_of(net, lp);
        const Fp8Live *live =
            &p->fp8.scaling.live[fp8_slot_index(&run->config, lp->linear, lp->layer, 0)];
        int64_t n = (int64_t)l->N * l->C;
        if (l->w.fp8 == NULL) { continue; }
        gpu_hash(gpu, row, l->w.fp8, n, 0);
        gpu_hash(gpu, row, l->w.fp8_t, n, 0);
        bool given = p->fp8.delayed && !p->fp8.scaling.measuring; // else each pass measures them
        for (int o = 0; o < OPERAND_COUNT; o++) {
            if (o != OPERAND_W && !given) { continue; }
            gpu_hash(gpu, row, &live[o], offsetof(Fp8Live, amax), 0);
        }
    }
    int64_t table = (int64_t)run->config.seq_length * run->config.head_size;
    gpu_hash(gpu, row, net->rope, table * (int64_t)sizeof(float), 0);
    gpu_hash(gpu, row, p->fp8.square_scales, 2 * p->fp8.num_squares * (int64_t)sizeof(float), 0);
}

static void fetch(Check *c) {
    size_t bytes = (size_t)(CHECK_PASSES * c->rows) * sizeof(uint64_t);
    gpu_fetch(c->net->gpu, c->host, c->hashes, bytes);
    CUDA_CHECK(cudaStreamSynchronize(c->net->gpu->stream));
}

// The first row in which they differ; c->rows: none.
static int first_difference(const Check *c, const uint64_t *a, const uint64_t *b) {
    int row = 0;
    while (row < c->rows && a[row] == b[row]) { row++; }
    return row;
}

bool check_repeats(Check *c) {
    fetch(c);
    return first_difference(c, c->host, c->host + c->rows) == c->rows;
}

static const char *row_name(const Check *c, int row, char out[96]) {
    static const char *const kinds[] = {"the gradient of", "the weights of"};
    const Run *run = c->net->run;
    const Param *p = &run->layout.params[(row - 1) % c->params];
    const char *kind = kinds[(row - 1) / c->params % 2];
    if (row == 0) { return strcpy(out, "the loss"); }
    if (row + 1 == c->rows) { return strcpy(out, "the rotary table or the scales of blocks"); }
    if (row > 2 * c->params) {
        const LinearPrecision *lp = &run->precision.linear[row - 1 - 2 * c->params];
        p = param_find(&run->layout, lp->weight, lp->layer);
        kind = "the FP8 codes of";
    }
    int used = snprintf(out, 96, "%s %s", kind, tensor_row(p->id)->name);
    if (p->layer >= 0) { snprintf(out + used, 96 - (size_t)used, " of block %d", p->layer); }
    return out;
}

// What a rank sends to rank 0: its place, and the hashes of its weights.
typedef struct {
    char place[128]; // host and GPU
    uint64_t rows[];
} Mine;

static bool passes_agree(Check *c, const char *place, int64_t step) {
    const uint64_t *first = c->host, *second = first + c->rows, *third = second + c->rows;
    char name[96];
    int row = first_difference(c, first, second);
    if (row == c->rows) { return true; }
    fetch(c);
    bool right = first_difference(c, second, third) == c->rows;
    bool wrong = first_difference(c, first, third) == c->rows;
    return fail("step %lld: %s computes wrongly: %s differs between two passes over the same data; "
                "%s",
                (long long)step, place, row_name(c, row, name),
                right   ? "the first was wrong, a third gave what the second did"
                : wrong ? "the second was wrong, a third gave what the first did"
                        : "a third differs again");
}

// On rank 0: whether all ranks have its weights. If not, the rank whose value is shared by the
// fewest is taken to be wrong.
static bool weights_agree(const Check *c, const char *all, size_t bytes, int64_t step) {
    int ranks = c->net->run->group.ranks, differs = 0, odd = 0, fewest = ranks;
    char name[96];
#define ROWS(rank) ((const Mine *)(all + (size_t)(rank)*bytes))->rows
    int row = c->rows;
    for (int r = 1; r < ranks && differs == 0; r++) {
        row = first_difference(c, ROWS(0), ROWS(r));
        differs = row < c->rows ? r : 0;
    }
    if (differs == 0) { return true; }
    for (int r = ranks - 1; r >= 0; r--) {
        int same = 0;
        for (int q = 0; q < ranks; q++) { same += ROWS(q)[row] == ROWS(r)[row]; }
        if (same < fewest) { fewest = same, odd = r; }
    }
#undef ROWS
    return fail("step %lld: rank %d on %s has other values than %s in %s", (long long)step, odd,
                ((const Mine *)(all + (size_t)odd * bytes))->place,
                2 * fewest < ranks ? "most ranks" : "the other half of the ranks",
                row_name(c, row, name));
}

bool check_agrees(Check *c, int64_t step) {
    const Run *run = c->net->run;
    size_t rows = (size_t)c->rows * sizeof(uint64_t), bytes = sizeof(Mine) + rows;
    Mine *mine = calloc_or_die(1, bytes);
    char host[64] = "?",
         *all = run->group.rank == 0 ? malloc_or_die(bytes * (size_t)run->group.ranks) : NULL;
    gethostname(host, sizeof(host) - 1);
    snprintf(mine->place, sizeof(mine->place), "%s, %s", host, c->net->gpu->uuid);
    bool ok = group_agree(&run->group, CHANNEL_MAIN, passes_agree(c, mine->place, step));
    if (ok && run->group.ranks > 1) {
        int weights = 1 + c->params;
        memcpy(mine->rows + weights, c->host + weights, rows - (size_t)weights * sizeof(uint64_t));
        group_gather(&run->group, CHANNEL_MAIN, mine, bytes, all);
        ok = group_agree(&run->group, CHANNEL_MAIN,
                         run->group.rank > 0 || weights_agree(c, all, bytes, step));
    }
    free(mine);
    free(all);
    return ok;
}
