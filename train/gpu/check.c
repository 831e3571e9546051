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
    const int params = run->layout.count;
    const int counts[ROW_KINDS] = {1, params, params, run->precision.count, 1, params};
    for (int kind = 0; kind < ROW_KINDS; kind++) {
        c->first[kind] = c->rows;
        c->rows += counts[kind];
    }
    plan_section(plan, "checked steps", PHASE_ALWAYS);
    PLAN(plan, "hashes", CHECK_PASSES * c->rows, c->hashes);
    PLAN(plan, "hashes of the state", 1, c->states);
    c->host = calloc_or_die((size_t)(CHECK_PASSES * c->rows), sizeof(uint64_t));
}

void check_close(Check *c) {
    free(c->host);
}

void check_hash(Check *c, int pass) {
    const Network *net = c->net;
    const Run *run = net->run;
    Params *p = net->params;
    Gpu *gpu = net->gpu;
    uint64_t *rows = c->hashes + pass * c->rows, *row;
    gpu_clear(gpu, FAMILY_OPTIMIZER, rows, (size_t)c->rows * sizeof(*rows));
    gpu_hash(gpu, rows + c->first[ROWS_LOSS], net->loss_sum, sizeof(double), 0);
    for (int i = 0; i < run->layout.count; i++) {
        const Param *q = &run->layout.params[i];
        bool codes;
        Gradient g = params_gradient(p, q->id, q->layer);
        const void *weights = params_weights(p, q->id, q->layer, &codes);
        // rounded up, because the hash reads whole words; the padding after a tensor is 0
        int64_t n = round_up64(param_size(q), 8);
        gpu_hash(gpu, rows + c->first[ROWS_GRADIENTS] + i, g.data, n * gpu_type_bytes(g.type), 0);
        gpu_hash(gpu, rows + c->first[ROWS_WEIGHTS] + i, weights,
                 n * (codes ? 1 : (int64_t)sizeof(Bf16)), 0);
    }
    row = rows + c->first[ROWS_CODES];
    for (int i = 0; i < run->precision.count; i++, row++) {
        const LinearPrecision *lp = &run->precision.linear[i];
        bool head = lp->linear == LINEAR_HEAD;
        const LinearLayer *l = head ? &net->head : &net->blocks[lp->layer].linear[lp->linear];
        const Fp8Scale *slots =
            &p->fp8.scales[fp8_slot_index(&run->config, lp->linear, lp->layer, 0)];
        int64_t n = (int64_t)l->N * l->C;
        if (l->w.rows.codes == NULL) { continue; }
        gpu_hash(gpu, row, l->w.rows.codes, n, 0);
        gpu_hash(gpu, row, l->w.columns.codes, n, 0);
        for (int o = 0; o < OPERAND_COUNT; o++) {
            // without delayed scaling, the scales of x and dy differ between ranks
            if (o != OPERAND_W && p->fp8.length == 0) { continue; }
            gpu_hash(gpu, row, &slots[o], offsetof(Fp8Scale, amax), 0);
        }
    }
    row = rows + c->first[ROWS_TABLES];
    int64_t table = (int64_t)run->config.seq_length * run->config.head_size;
    gpu_hash(gpu, row, net->rope, table * (int64_t)sizeof(float), 0);
    gpu_hash(gpu, row, p->weights.block_inverse,
             2 * p->weights.num_block_scales * (int64_t)sizeof(float), 0);
    row = rows + c->first[ROWS_KEPT];
    for (const ZeroRange *r = p->optimizer.ranges;
         r < p->optimizer.ranges + p->optimizer.num_ranges; r++) {
        const Param *q = &run->layout.params[r->param];
        Gradient g = params_gradient(p, q->id, q->layer);
        int64_t width = gpu_type_bytes(g.type), begin = (r->begin - q->offset) * width;
        gpu_hash(gpu, row + r->param, (const char *)g.data + begin, (r->end - r->begin) * width,
                 begin / 8);
    }
}

static void fetch(Check *c) {
    size_t bytes = (size_t)(CHECK_PASSES * c->rows) * sizeof(uint64_t);
    gpu_read(c->net->gpu, c->host, c->hashes, bytes);
    // a gradient's hash is the sum of its parts' hashes, so subtracting the hash of the part that
    // the rank keeps leaves the hash of the other parts
    for (int pass = 0; pass < CHECK_PASSES; pass++) {
        uint64_t *whole = c->host + pass * c->rows + c->first[ROWS_GRADIENTS];
        const uint64_t *kept = c->host + pass * c->rows + c->first[ROWS_KEPT];
        for (int i = 0; i < c->net->run->layout.count; i++) { whole[i] -= kept[i]; }
    }
}

// Returns the first of the rows from..end-1 in which a and b differ, or `end` if they are equal.
static int first_difference(const uint64_t *a, const uint64_t *b, int from, int end) {
    int row = from;
    while (row < end && a[row] == b[row]) { row++; }
    return row;
}

bool check_repeats(Check *c) {
    fetch(c);
    bool same = first_difference(c->host, c->host + c->rows, 0, c->rows) == c->rows;
    return group_agree(&c->net->run->group, CHANNEL_MAIN, same || fail("two passes differ"));
}

static const char *row_name(const Check *c, int row, char out[96]) {
    static const char *const kinds[ROW_KINDS] = {
        [ROWS_LOSS] = "the loss",
        [ROWS_GRADIENTS] = "the gradient of",
        [ROWS_WEIGHTS] = "the weights of",
        [ROWS_CODES] = "the FP8 codes of",
        [ROWS_TABLES] = "the rotary table or the scales of blocks",
        [ROWS_KEPT] = "the gradient of"};
    const Run *run = c->net->run;
    int kind = ROWS_KEPT;
    while (row < c->first[kind]) { kind--; }
    row -= c->first[kind];
    if (kind == ROWS_LOSS || kind == ROWS_TABLES) { return strcpy(out, kinds[kind]); }
    const Param *p;
    if (kind == ROWS_CODES) {
        const LinearPrecision *lp = &run->precision.linear[row];
        p = param_find(&run->layout, lp->weight, lp->layer);
    } else {
        p = &run->layout.params[row];
    }
    bool sum = kind == ROWS_KEPT && c->summed;
    int used = snprintf(out, 96, "%s%s %s", sum ? "the sum over the ranks of " : "", kinds[kind],
                        tensor_row(p->id)->name);
    if (p->layer >= 0) { snprintf(out + used, 96 - (size_t)used, " of block %d", p->layer); }
    return out;
}

static void describe_device(const Check *c, char *out, size_t room) {
    char host[64] = "?";
    gethostname(host, sizeof(host) - 1);
    snprintf(out, room, "%s, %s", host, c->net->gpu->uuid);
}

// What a rank sends to rank 0: where the rank runs, and its hashes.
typedef struct {
    char device[128]; // host and GPU
    uint64_t rows[];
} RankHashes;

static bool passes_agree(const Check *c, const char *device, int64_t step, int from, int end) {
    const uint64_t *first = c->host, *second = first + c->rows, *third = second + c->rows;
    char name[96];
    int row = first_difference(first, second, from, end);
    if (row == end) { return true; }
    bool right = first_difference(second, third, from, end) == end;
    bool wrong = first_difference(first, third, from, end) == end;
    return fail("step %lld: %s computes wrongly: %s differs between two passes over the same data; "
                "%s",
                (long long)step, device, row_name(c, row, name),
                right   ? "the first was wrong, a third gave what the second did"
                : wrong ? "the second was wrong, a third gave what the first did"
                        : "a third differs again");
}

// Whether all ranks have the same weights, FP8 codes and tables. If not, fails with the rank whose
// hash the fewest ranks have. Rank 0 calls it. all: every rank's RankHashes, each of `bytes` bytes.
static bool weights_agree(const Check *c, const char *all, size_t bytes, int64_t step) {
    int ranks = c->net->run->group.ranks, differs = 0, odd = 0, fewest = ranks;
    char name[96];
#define ROWS(rank) ((const RankHashes *)(all + (size_t)(rank)*bytes))->rows
    int row = 0, end = c->first[ROWS_KEPT];
    for (int r = 1; r < ranks && differs == 0; r++) {
        row = first_difference(ROWS(0), ROWS(r), c->first[ROWS_WEIGHTS], end);
        differs = row < end ? r : 0;
    }
    if (differs == 0) { return true; }
    for (int r = ranks - 1; r >= 0; r--) {
        int same = 0;
        for (int q = 0; q < ranks; q++) { same += ROWS(q)[row] == ROWS(r)[row]; }
        if (same < fewest) { fewest = same, odd = r; }
    }
#undef ROWS
    return fail("step %lld: rank %d on %s has other values than %s in %s", (long long)step, odd,
                ((const RankHashes *)(all + (size_t)odd * bytes))->device,
                2 * fewest < ranks ? "most ranks" : "the other half of the ranks",
                row_name(c, row, name));
}

bool check_agrees(Check *c, int64_t step) {
    const Run *run = c->net->run;
    size_t rows = (size_t)c->rows * sizeof(uint64_t), bytes = sizeof(RankHashes) + rows;
    FREED RankHashes *mine = calloc_or_die(1, bytes);
    FREED char *all = run->group.rank == 0 ? malloc_or_die(bytes * (size_t)run->group.ranks) : NULL;
    describe_device(c, mine->device, sizeof(mine->device));
    // if there was a third pass, its hashes are not on the host yet
    if (first_difference(c->host, c->host + c->rows, 0, c->rows) < c->rows) { fetch(c); }
    // a wrong gradient also makes the sum wrong on the rank that keeps the sum. So gradients are
    // compared first, and the rank that computed the wrong one is reported
    bool ok = group_agree(&run->group, CHANNEL_MAIN,
                          passes_agree(c, mine->device, step, 0, c->first[ROWS_KEPT])) &&
              group_agree(&run->group, CHANNEL_MAIN,
                          passes_agree(c, mine->device, step, c->first[ROWS_KEPT], c->rows));
    if (ok && run->group.ranks > 1) {
        memcpy(mine->rows, c->host, rows);
        group_gather(&run->group, CHANNEL_MAIN, mine, bytes, all);
        ok = group_agree(&run->group, CHANNEL_MAIN,
                         run->group.rank > 0 || weights_agree(c, all, bytes, step));
    }
    return ok;
}

void check_hash_state(Check *c, bool next) {
    const Params *p = c->net->params;
    const Fp8Table *s = &p->fp8;
    uint64_t *row = c->states->rows[next];
    params_hash_state(p, row);
    gpu_clear(p->gpu, FAMILY_OPTIMIZER, row + CHECK_SCALES, sizeof(*row));
    if (s->length == 0) { return; } // only delayed scaling keeps scales between steps
    int64_t history = (int64_t)s->count * s->length * (int64_t)sizeof(float) / 8 * 8;
    gpu_hash(p->gpu, row + CHECK_SCALES, s->history, history, 0);
    for (int i = 0; i < s->count; i++) { // without the amaxes, which the next step's passes change
        gpu_hash(p->gpu, row + CHECK_SCALES, &s->scales[i], offsetof(Fp8Scale, amax),
                 history / 8 + i);
    }
}

bool check_state_kept(const Check *c, const StateHashes *hashes, int64_t step) {
    static const char *const names[CHECK_STATES] = {
        [STATE_MASTER] = "master weights",
        [STATE_EXP_AVG] = "first moments",
        [STATE_EXP_AVG_SQ] = "second moments",
        [STATE_MOMENTUM] = "momenta",
        [STATE_EXP_AVG_SCALE] = "scales of the first moments",
        [STATE_EXP_AVG_SQ_SCALE] = "scales of the second moments",
        [CHECK_SCALES] = "FP8 scales"};
    char device[128];
    int row = first_difference(hashes->rows[0], hashes->rows[1], 0, CHECK_STATES);
    describe_device(c, device, sizeof(device));
    return group_agree(&c->net->run->group, CHANNEL_MAIN,
                       row == CHECK_STATES ||
                           fail("step %lld: %s changes bits in memory: the %s are no longer those "
                                "of the update before",
                                (long long)step, device, names[row]));
}
