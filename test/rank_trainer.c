// The CPU trainer as several ranks, for tests: train_gpt.c's mathematics, and around it everything
// that the GPU trainer has several ranks with: launch, group, watchdog, ZeRO-1 over
// train/gpu/comm.h, checkpoints in parts. NCCL and CUDA are the stand-ins of test/standin.
//
// FAULT=kind:rank:step plants a fault at the start of a step: nan (in the rank's loss), kill, stop,
// hang (while reading data), die, disk (no file can grow), term (a signal to this rank alone).
#define main train_gpt_main
#include "../train_gpt.c"
#undef main

#include "../model/zero.h"
#include "../ranks/launch.h"
#include "../train/gpu/comm.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

typedef struct {
    Trainer t;
    Comm comm;
    ZeroLayout zero;
    int num_ranges;
    ZeroRange *ranges;
    Bucket *saved;                        // [num_ranges] the same, for checkpoints
    float *arranged;                      // [zero.size] gradients, then new weights
    float *master, *exp_avg, *exp_avg_sq; // [zero.kept]
    float *snapshot;                      // [3, elements of the ranges]
    uint32_t *amax;                       // [slots]
} RankTrainer;

// ---- memory -------------------------------------------------------------------------------------

// The weights of FP8 layers, but for a tied embedding: as the GPU trainer, whatever it gathers them
// as, so that the norm's sum has the same order.
static bool *codes_of(const Run *run) {
    bool *codes = calloc_or_die((size_t)run->layout.count, sizeof(bool));
    for (int i = 0; i < run->precision.count; i++) {
        bool head = i == run->precision.count - 1;
        TensorId id = linear_weight(&run->config, head ? LINEAR_HEAD : (Linear)(i % LINEAR_HEAD));
        const Param *p = param_find(&run->layout, id, head ? 0 : i / LINEAR_HEAD);
        bool fp8 = run->precision.linear[i].number == NUMBER_FP8;
        codes[p - run->layout.params] = fp8 && id != TENSOR_TOKEN_EMBEDDING;
    }
    return codes;
}

static void open_ranks(RankTrainer *r, const Options *options) {
    trainer_open(&r->t, options);
    Run *run = &r->t.run;
    bool *codes = codes_of(run);
    Error err;
    r->zero = zero_layout(&run->layout, run->ranks, codes);
    free(codes);
    r->num_ranges = zero_ranges(&r->zero, run->rank, &r->ranges);
    r->saved = calloc_or_die((size_t)r->num_ranges, sizeof(Bucket));
    for (int i = 0; i < r->num_ranges; i++) {
        r->saved[i] = (Bucket){r->ranges[i].begin, r->ranges[i].end};
    }
    size_t kept = (size_t)r->zero.kept;
    size_t elements = (size_t)zero_elements(&r->zero, run->rank);
    r->arranged = calloc_or_die((size_t)r->zero.size, sizeof(float));
    r->master = calloc_or_die(3 * kept, sizeof(float));
    r->exp_avg = r->master + kept;
    r->exp_avg_sq = r->exp_avg + kept;
    r->snapshot = calloc_or_die(3 * elements, sizeof(float));
    r->amax = calloc_or_die((size_t)fp8_slot_count(&run->config), sizeof(uint32_t));
    if (run->group == NULL) {
        r->comm = (Comm){.ranks = 1};
    } else if (!comm_open(&r->comm, run->group, NULL, run->layout.num_buckets, &err)) {
        die("%s", err.text);
    }
}

static int close_ranks(RankTrainer *r) {
    run_beat(&r->t.run, DOING_WAIT, "closing NCCL");
    comm_close(&r->comm);
    int status = trainer_close(&r->t); // waits for the last save, which reads the snapshot
    zero_free(&r->zero);
    free(r->ranges);
    free(r->saved);
    free(r->arranged);
    free(r->master);
    free(r->snapshot);
    free(r->amax);
    return status;
}

// ---- the step -----------------------------------------------------------------------------------

// Between the parameter space and the arranged one.
static void arrange(RankTrainer *r, float *space, bool back) {
    const ParamLayout *layout = &r->t.run.layout;
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        float *place = r->arranged + r->zero.place[i];
        size_t bytes = (size_t)param_size(p) * sizeof(float);
        if (back) {
            memcpy(space + p->offset, place, bytes);
        } else {
            memcpy(place, space + p->offset, bytes);
        }
    }
}

static void over_buckets(RankTrainer *r, bool gather) {
    const ZeroLayout *z = &r->zero;
    for (int b = 0; b < z->layout->num_buckets; b++) {
        comm_begin(&r->comm);
        for (int s = z->first[b]; s < z->first[b + 1]; s++) {
            float *buffer = r->arranged + z->segments[s].begin;
            if (gather) {
                comm_all_gather(&r->comm, buffer, COMM_F32, z->segments[s].part);
            } else {
                comm_reduce_scatter(&r->comm, buffer, COMM_F32, z->segments[s].part);
            }
        }
        comm_end(&r->comm, b);
    }
    comm_join(&r->comm);
}

// Of the gradients in this rank's parts.
static double own_squares(const RankTrainer *r) {
    double sum = 0;
    for (int s = 0; s < r->zero.count; s++) {
        const ZeroSegment *segment = &r->zero.segments[s];
        sum += sum_of_squares(r->arranged + segment->begin + r->comm.rank * segment->part,
                              segment->part);
    }
    return sum;
}

static void reduce_all(RankTrainer *r, void *values, CommType type, CommOp op, int64_t count) {
    comm_begin(&r->comm);
    comm_all_reduce(&r->comm, values, type, op, count);
    comm_end(&r->comm, 0);
    comm_wait(&r->comm, 0);
}

// Every rank's range of every quantised tensor becomes that of all ranks.
static void reduce_amax(RankTrainer *r) {
    int n = fp8_slot_count(&r->t.run.config);
    for (int i = 0; i < n; i++) { memcpy(&r->amax[i], &r->t.slots[i].amax, sizeof(uint32_t)); }
    reduce_all(r, r->amax, COMM_U32, COMM_MAX, n);
    for (int i = 0; i < n; i++) { memcpy(&r->t.slots[i].amax, &r->amax[i], sizeof(uint32_t)); }
}

// AdamW on what this rank keeps; the new weights go to their place in the arranged space.
static void update_part(RankTrainer *r, double norm, double lr) {
    const Run *run = &r->t.run;
    const Options *o = &run->options;
    AdamW adamw = adamw_settings(run, norm, lr);
    for (int i = 0; i < r->num_ranges; i++) {
        const ZeroRange *range = &r->ranges[i];
        for (int j = range->param; j < run->layout.count; j++) {
            const Param *p = &run->layout.params[j];
            int64_t from = max64(range->begin, p->offset);
            int64_t to = min64(range->end, p->offset + param_size(p));
            if (p->offset >= range->end) { break; }
            if (from >= to) { continue; }
            int64_t kept = range->kept + from - range->begin;
            int64_t place = range->place + from - range->begin;
            adamw.weight_decay = tensor_row(p->id)->decay ? (float)o->weight_decay : 0.0f;
            adamw_update(r->master + kept, r->exp_avg + kept, r->exp_avg_sq + kept,
                         r->arranged + place, to - from, adamw);
            memcpy(r->arranged + place, r->master + kept, (size_t)(to - from) * sizeof(float));
        }
    }
}

static void rank_update(RankTrainer *r, double norm, double lr) {
    Trainer *t = &r->t;
    update_part(r, norm, lr);
    over_buckets(r, true);
    arrange(r, t->weights, true);
    round_weights(t);
}

static void plant_fault(Run *run, double *loss) {
    char kind[8], *fault = getenv("FAULT");
    int rank, step;
    if (fault == NULL || sscanf(fault, "%7[a-z]:%d:%d", kind, &rank, &step) != 3) { return; }
    if (rank != run->rank || step != run->progress.step) { return; }
    saver_wait(&run->saver); // so that what is saved by then is certain
    if (strcmp(kind, "nan") == 0) { *loss = NAN; }
    if (strcmp(kind, "kill") == 0) { raise(SIGKILL); }
    if (strcmp(kind, "stop") == 0) { raise(SIGSTOP); }
    if (strcmp(kind, "term") == 0) { raise(SIGTERM); }
    if (strcmp(kind, "die") == 0) { die("a planted fault"); }
    if (strcmp(kind, "disk") == 0) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){4096, RLIM_INFINITY});
    }
    if (strcmp(kind, "hang") == 0) {
        run_beat(run, DOING_WORK, "reading data");
        for (;;) { pause(); }
    }
}

static void rank_step(RankTrainer *r) {
    Trainer *t = &r->t;
    Run *run = &t->run;
    const Options *o = &run->options;
    int B = o->micro_batch_size, T = o->seq_length;
    double begin = wall_seconds(), loss = 0, step_tokens = (double)o->global_batch_size * T;
    memset(t->gradients, 0, (size_t)run->layout.size * sizeof(float));
    plant_fault(run, &loss);
    for (int micro = 0; micro < run_micro_batches(run); micro++) {
        run_batch(run, 0, micro, t->inputs, t->targets);
        model_forward(t, B, T, PASS_TRAIN);
        loss += head_loss(t, B * T, (float)(1.0 / step_tokens), PASS_TRAIN);
        model_backward(t, B, T);
    }
    if (isnan(loss)) { t->gradients[0] = NAN; }
    arrange(r, t->gradients, false);
    over_buckets(r, false);
    double sums[3] = {loss, own_squares(r), run_stop_signal() != 0};
    reduce_all(r, sums, COMM_F64, COMM_SUM, 3);
    if (o->dump_gradients[0] != '\0') {
        over_buckets(r, true);
        arrange(r, t->gradients, true);
        run_maybe_dump(run, t->gradients, sums[0] / step_tokens);
    }
    StepResult result = {.loss = sums[0] / step_tokens,
                         .norm = sqrt(sums[1]),
                         .lr = learning_rate(o, run->progress.step),
                         .stop = sums[2] > 0,
                         .own_loss = loss / step_tokens * run->ranks};
    result.skipped = !run_finite(result.loss, result.norm);
    reduce_amax(r);
    scaling_update(t, result.skipped);
    if (!result.skipped) { rank_update(r, result.norm, result.lr); }
    result.seconds = wall_seconds() - begin;
    run_report(run, result);
}

// ---- evaluation, checkpoints --------------------------------------------------------------------

static void rank_evaluate(RankTrainer *r) {
    Trainer *t = &r->t;
    Run *run = &t->run;
    if (!run_should_eval(run)) { return; }
    int B = run->options.micro_batch_size, T = run->options.seq_length;
    int64_t samples = run_eval_samples(run);
    Pass pass = eval_pass(&run->options);
    double begin = wall_seconds(), sum = 0;
    for (int64_t sample = run_eval_first(run); sample < samples; sample += run_eval_stride(run)) {
        run_eval_batch(run, sample, t->inputs, t->targets);
        model_forward(t, B, T, pass);
        sum += head_loss(t, B * T, 0.0f, pass);
    }
    reduce_all(r, &sum, COMM_F64, COMM_SUM, 1);
    run_report_eval(run, sum / (double)(samples * T), wall_seconds() - begin);
}

// This rank's ranges of the three arrays, one after another.
static void copy_ranges(RankTrainer *r, int64_t elements) {
    const float *kept[3] = {r->master, r->exp_avg, r->exp_avg_sq};
    for (int kind = 0; kind < 3; kind++) {
        float *to = r->snapshot + kind * elements;
        for (int i = 0; i < r->num_ranges; i++) {
            const ZeroRange *range = &r->ranges[i];
            memcpy(to, kept[kind] + range->kept,
                   (size_t)(range->end - range->begin) * sizeof(float));
            to += range->end - range->begin;
        }
    }
}

static void rank_save(RankTrainer *r) {
    Trainer *t = &r->t;
    Run *run = &t->run;
    if (!run_should_save(run)) { return; }
    saver_wait(&run->saver);
    int64_t elements = zero_elements(&r->zero, run->rank);
    copy_ranges(r, elements);
    memcpy(t->snapshot, t->weights, (size_t)run->layout.size * sizeof(float));
    if (t->snapshot_slots != NULL) {
        size_t slots = (size_t)fp8_slot_count(&run->config);
        memcpy(t->snapshot_slots, t->slots, slots * sizeof(Fp8Slot));
        memcpy(t->snapshot_history, t->amax_history,
               slots * (size_t)run->precision.history_length * sizeof(float));
    }
    Snapshot s = {.model_dtype = DTYPE_F32,
                  .model = t->snapshot,
                  .num_ranges = r->num_ranges,
                  .ranges = r->saved,
                  .moment_dtype = DTYPE_F32,
                  .master = r->snapshot,
                  .exp_avg = r->snapshot + elements,
                  .exp_avg_sq = r->snapshot + 2 * elements,
                  .slots = t->snapshot_slots,
                  .amax_history = t->snapshot_history};
    run_save(run, &s);
}

static void read_kind(RankTrainer *r, const Checkpoint *c, const char *kind, float *kept) {
    Error err;
    bool ok = true;
    for (int i = 0; ok && i < r->num_ranges; i++) {
        const ZeroRange *range = &r->ranges[i];
        ok = checkpoint_read(c, kind, range->begin, range->end, kept + range->kept, &err);
    }
    if (!ok) { die("%s", err.text); }
}

static void rank_restore(RankTrainer *r) {
    Trainer *t = &r->t;
    Run *run = &t->run;
    Checkpoint c;
    Error err;
    if (!run_restore(run, &c)) {
        model_init(&run->layout, t->weights, (uint64_t)run->options.seed);
        for (int i = 0; i < r->num_ranges; i++) {
            const ZeroRange *range = &r->ranges[i];
            memcpy(r->master + range->kept, t->weights + range->begin,
                   (size_t)(range->end - range->begin) * sizeof(float));
        }
    } else {
        read_kind(r, &c, "master", r->master);
        read_kind(r, &c, "exp_avg", r->exp_avg);
        read_kind(r, &c, "exp_avg_sq", r->exp_avg_sq);
        if (!checkpoint_read(&c, "master", 0, run->layout.size, t->weights, &err) ||
            (t->amax_history != NULL &&
             !checkpoint_read_scaling(&c, &run->precision, t->slots, t->amax_history, &err))) {
            die("%s", err.text);
        }
        fp8_fix_slot(&t->run.precision, &t->run.options, t->slots);
        checkpoint_close(&c);
    }
    round_weights(t);
}

int main(int argc, char **argv) {
    static Options options;
    static Group group;
    static RankTrainer r;
    Ranks ranks;
    options_parse(&options, argc, argv);
    launch(&ranks, &group, &options, argv);
    open_ranks(&r, &options);
    rank_restore(&r);
    while (run_goes_on(&r.t.run)) {
        rank_step(&r);
        rank_evaluate(&r);
        maybe_sample(&r.t);
        rank_save(&r);
    }
    rank_save(&r);
    return close_ranks(&r);
}
