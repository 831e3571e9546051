#include "params.h"

#include <stddef.h>
#include <stdlib.h>

enum { NORM_PARTS = 1024 }; // about: so many blocks fill any device

// ---- planning -----------------------------------------------------------------------------------

// Which parameters have segments of FP8 weights, and which are Muon's. A tied embedding, which is
// looked up, is not in FP8.
static uint8_t *find_kinds(const Run *run) {
    uint8_t *kinds = calloc_or_die((size_t)run->layout.count, sizeof(uint8_t));
    for (int i = 0; i < run->layout.count; i++) {
        kinds[i] = run_by_muon(run, &run->layout.params[i]) ? ZERO_MUON : 0;
    }
    for (int i = 0; i < run->precision.count; i++) {
        const LinearPrecision *lp = &run->precision.linear[i];
        const Param *w = param_find(&run->layout, lp->weight, lp->layer);
        bool codes = lp->number == NUMBER_FP8 && w->id != TENSOR_TOKEN_EMBEDDING;
        kinds[w - run->layout.params] |= codes ? ZERO_CODES : 0;
    }
    return kinds;
}

static int64_t segment_size(const Params *p, int segment) {
    return p->zero.segments[segment].part * p->zero.ranks;
}

// Floats for the scales of a weight, or of its transpose.
static int64_t squares_room(const Fp8Squares *s) {
    return max64(fp8_scale_count(SCALES_SQUARE, s->rows, s->columns),
                 fp8_scale_count(SCALES_SQUARE, s->columns, s->rows));
}

static void plan_fp8(Params *p, Plan *plan) {
    const Run *run = p->run;
    int count = fp8_slot_count(&run->config), length = run->precision.history_length;
    p->scaling.count = count;
    p->scaling.history_length = length;
    if (!p->fp8) { return; }
    plan_section(plan, "FP8 scaling", PHASE_ALWAYS);
    PLAN(plan, "table of weights", run->precision.count, p->adamw.tensors);
    PLAN(plan, "slots", count, p->scaling.slots);
    PLAN(plan, "scales in use", count, p->scaling.live);
    PLAN(plan, "counts", run->options.fp8_stats_interval > 0 ? count : 0, p->counts);
    PLAN(plan, "targets", count, p->scaling.targets);
    PLAN(plan, "flags", count, p->scaling.used);
    PLAN(plan, "amax history", p->delayed ? (int64_t)count * length : 0, p->scaling.history);
    for (int i = 0; i < run->precision.count && p->blockwise; i++) {
        const LinearPrecision *lp = &run->precision.linear[i];
        if (lp->number != NUMBER_FP8) { continue; }
        p->squares[i] = (Fp8Squares){.rows = lp->outputs, .columns = lp->inputs};
        p->num_squares += squares_room(&p->squares[i]);
    }
    PLAN(plan, "table of weights' blocks", p->blockwise ? run->precision.count : 0,
         p->adamw.squares);
    PLAN(plan, "weights' amaxes", p->num_squares, p->square_amax);
    PLAN(plan, "weights' scales", 2 * p->num_squares, p->square_scales);
}

void params_plan(Params *p, const Run *run, Plan *plan) {
    const Options *o = &run->options;
    const ParamLayout *layout = &run->layout;
    *p = (Params){.run = run};
    bool trains = options_train(o);
    uint8_t *kinds = find_kinds(run);
    p->zero = zero_layout(layout, run->ranks, kinds);
    free(kinds);
    // evaluations in BF16 multiply by the weights in BF16: they are sent so, and every rank
    // quantises them
    for (int s = 0; s < p->zero.count && o->eval_precision == EVAL_BF16; s++) {
        p->zero.segments[s].codes = false;
    }
    p->num_ranges = zero_ranges(&p->zero, run->rank, &p->ranges);
    p->saved = calloc_or_die((size_t)p->num_ranges, sizeof(Bucket));
    for (int i = 0; i < p->num_ranges; i++) {
        p->saved[i] = (Bucket){p->ranges[i].begin, p->ranges[i].end};
    }
    p->updates = calloc_or_die((size_t)layout->num_buckets, sizeof(AdamWUpdate));
    p->arriving = calloc_or_die((size_t)layout->num_buckets, sizeof(bool));
    // gradients in FP32 when requested, or when several micro-batches add to them
    bool wide = o->grad_accum_dtype == GRADIENT_FP32 ||
                (o->grad_accum_dtype == GRADIENT_AUTO && run_micro_batches(run) > 1);
    p->adamw.gradient_type = wide ? TYPE_F32 : TYPE_BF16;
    p->adamw.moment_type = o->adam_dtype == STATE_FP32 ? TYPE_F32 : TYPE_BF16;
    p->adamw.momentum = (float)o->muon_momentum;
    p->adamw.beta1 = (float)o->adam_beta1;
    p->adamw.beta2 = (float)o->adam_beta2;
    p->adamw.eps = (float)o->adam_eps;
    p->adamw.seed = (uint64_t)o->seed;
    p->fp8 = precision_fp8_share(&run->precision) > 0;
    p->delayed = p->fp8 && run->precision.recipe == FP8_RECIPE_DELAYED;
    p->blockwise = p->fp8 && run->precision.recipe == FP8_RECIPE_BLOCKWISE;
    p->squares = calloc_or_die((size_t)run->precision.count, sizeof(Fp8Squares));

    plan_section(plan, "weights", PHASE_ALWAYS);
    int64_t gradient_bytes = trains ? p->zero.size * gpu_type_bytes(p->adamw.gradient_type) : 0;
    int64_t moment_bytes = trains ? p->zero.kept * gpu_type_bytes(p->adamw.moment_type) : 0;
    int64_t squares_bytes = trains ? p->zero.kept_adamw * gpu_type_bytes(p->adamw.moment_type) : 0;
    int64_t largest_codes = 0;
    p->weights = calloc_or_die((size_t)p->zero.count, sizeof(void *));
    for (int s = 0; s < p->zero.count; s++) {
        bool is_codes = p->zero.segments[s].codes;
        plan_buffer(plan, is_codes ? "weights, FP8" : "weights, BF16",
                    segment_size(p, s) * (is_codes ? 1 : (int64_t)sizeof(Bf16)), &p->weights[s]);
        if (is_codes) { largest_codes = max64(largest_codes, segment_size(p, s)); }
    }
    PLAN(plan, "master weights", p->zero.kept, p->adamw.master);
    plan_section(plan, "gradients", PHASE_ALWAYS);
    plan_buffer(plan, "gradients", gradient_bytes, &p->adamw.gradients);
    muon_plan(&p->muon, run, &p->zero, plan);
    plan_section(plan, "optimizer", PHASE_ALWAYS);
    plan_buffer(plan, "first moment", moment_bytes, &p->adamw.exp_avg);
    plan_buffer(plan, "second moment", squares_bytes, &p->adamw.exp_avg_sq);
    PLAN(plan, "segments", p->num_ranges, p->segments);
    PLAN(plan, "step state", 1, p->state);
    PLAN(plan, "step input", 1, p->adamw.input);
    PLAN(plan, "parts of the norm", NORM_PARTS + p->zero.count, p->parts);
    PLAN(plan, "norm scratch", NORM_PARTS + p->zero.count, p->norm_scratch);
    plan_fp8(p, plan);
    plan_section(plan, "scratch of saving", PHASE_SAVE);
    PLAN(plan, "a segment in BF16", options_save(o) ? largest_codes : 0, p->gathered);
}

void params_free_plan(Params *p) {
    zero_free(&p->zero);
    muon_free_plan(&p->muon);
    free(p->squares);
    free(p->weights);
    free(p->ranges);
    free(p->saved);
    free(p->updates);
    free(p->arriving);
}

// ---- starting -----------------------------------------------------------------------------------

// This rank's part of every segment, in pieces.
static void send_norm_parts(Params *p) {
    const ZeroLayout *z = &p->zero;
    GradientPart *parts = calloc_or_die((size_t)(NORM_PARTS + z->count), sizeof(GradientPart));
    int64_t most = round_up64((z->kept + NORM_PARTS - 1) / NORM_PARTS, PARAM_ALIGN);
    p->num_parts = 0;
    for (int s = 0; s < z->count; s++) {
        const ZeroSegment *segment = &z->segments[s];
        int64_t begin = segment->begin + p->run->rank * segment->part, end = begin + segment->part;
        for (int64_t at = begin; at < end; at += most) {
            parts[p->num_parts++] = (GradientPart){at, min64(most, end - at)};
        }
    }
    gpu_send(p->gpu, p->parts, parts, (size_t)p->num_parts * sizeof(GradientPart));
    free(parts);
}

// Where each FP8 weight's blocks lie; the weights that are sent as codes; tensor[layout.count]:
// each parameter's number among these.
static void send_tensors(Params *p, int *tensor) {
    const Run *run = p->run;
    Tensor *tensors = calloc_or_die((size_t)run->precision.count, sizeof(Tensor));
    Fp8Squares *squares = calloc_or_die((size_t)run->precision.count, sizeof(Fp8Squares));
    int64_t at = 0; // in p->square_amax and in both halves of p->square_scales
    p->num_tensors = 0;
    for (int i = 0; i < run->precision.count; i++) {
        const LinearPrecision *lp = &run->precision.linear[i];
        Fp8Squares *s = &p->squares[i];
        s->amax = p->square_amax + at;
        s->scales = p->square_scales + at;
        s->scales_t = s->scales + p->num_squares;
        at += squares_room(s);
        int param = (int)(param_find(&run->layout, lp->weight, lp->layer) - run->layout.params);
        if (!p->zero.segments[p->zero.segment[param]].codes) { continue; }
        params_scale(p, lp, OPERAND_W, &tensors[p->num_tensors]);
        squares[p->num_tensors] = *s;
        tensor[param] = p->num_tensors++;
    }
    size_t n = (size_t)p->num_tensors;
    if (p->fp8) { gpu_send(p->gpu, p->adamw.tensors, tensors, n * sizeof(Tensor)); }
    if (p->blockwise) { gpu_send(p->gpu, p->adamw.squares, squares, n * sizeof(Fp8Squares)); }
    free(tensors);
    free(squares);
}

static AdamWSegment segment_of(const Params *p, const ZeroRange *range, const int *tensor) {
    const ZeroSegment *segment = &p->zero.segments[range->segment];
    const Param *param = &p->run->layout.params[range->param];
    int64_t within = range->place - segment->begin;
    void *weights = p->weights[range->segment];
    bool codes = segment->codes;
    return (AdamWSegment){
        .first = range->begin,
        .n = range->end - range->begin,
        .gradient = range->place,
        .state = range->kept,
        .bf16 = codes ? NULL : (Bf16 *)weights + within,
        .fp8 = codes ? (uint8_t *)weights + within : NULL,
        .tensor = tensor[range->param],
        .within = range->begin - param->offset,
        .weight_decay = param_decay(param, &p->run->options),
        .muon = segment->muon,
    };
}

// The optimizer's step, bucket by bucket: a bucket's segments lie together and count their blocks
// from 0, so that each has its own launch.
static void send_segments(Params *p, const int *tensor) {
    AdamWSegment *segments = calloc_or_die((size_t)p->num_ranges, sizeof(AdamWSegment));
    int count = 0;
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        AdamWUpdate *bucket = &p->updates[b];
        *bucket = p->adamw;
        bucket->segments = p->segments + count;
        for (const ZeroRange *r = p->ranges; r < p->ranges + p->num_ranges; r++) {
            if (p->zero.segments[r->segment].bucket != b) { continue; }
            AdamWSegment *s = &segments[count++];
            *s = segment_of(p, r, tensor);
            s->first_block = bucket->segment_blocks;
            bucket->segment_count++;
            bucket->segment_blocks += gpu_adamw_blocks(s->n);
            bucket->muon |= s->muon;
        }
    }
    gpu_send(p->gpu, p->segments, segments, (size_t)p->num_ranges * sizeof(AdamWSegment));
    free(segments);
}

static void send_scaling(Params *p) {
    const Run *run = p->run;
    int n = p->scaling.count;
    float *targets = malloc_or_die((size_t)n * sizeof(float));
    uint8_t *used = malloc_or_die((size_t)n);
    for (int i = 0; i < n; i++) {
        targets[i] = fp8_slot_target(&run->precision, i);
        used[i] = (uint8_t)((fp8_slot_follows(&run->precision, i) ? SLOT_FOLLOWS : 0) |
                            (i % OPERAND_COUNT == OPERAND_W ? SLOT_WEIGHT : 0));
    }
    gpu_send(p->gpu, p->scaling.targets, targets, (size_t)n * sizeof(float));
    gpu_send(p->gpu, p->scaling.used, used, (size_t)n);
    free(targets);
    free(used);
}

void params_start(Params *p, Gpu *gpu, Comm *comm) {
    p->gpu = gpu;
    p->comm = comm;
    int *tensor = calloc_or_die((size_t)p->run->layout.count, sizeof(int));
    send_norm_parts(p);
    send_tensors(p, tensor);
    send_segments(p, tensor);
    if (p->fp8) { send_scaling(p); }
    muon_start(&p->muon, gpu);
    free(tensor);
    params_allocate_snapshot(p);
}

void params_close(Params *p) {
    if (p->snapshot != NULL && cudaHostUnregister(p->snapshot) != cudaSuccess) {
        cudaGetLastError();
    }
    free(p->snapshot);
}

// ---- resolving, at the start --------------------------------------------------------------------

void *params_weights(const Params *p, TensorId id, int layer, bool *codes) {
    const Param *q = param_find(&p->run->layout, id, layer);
    if (q == NULL) { return NULL; }
    int i = (int)(q - p->run->layout.params), s = p->zero.segment[i];
    bool is_codes = p->zero.segments[s].codes;
    int64_t within = p->zero.place[i] - p->zero.segments[s].begin;
    if (codes != NULL) { *codes = is_codes; }
    return (char *)p->weights[s] + within * (is_codes ? 1 : (int64_t)sizeof(Bf16));
}

Gradient params_gradient(const Params *p, TensorId id, int layer) {
    const Param *q = param_find(&p->run->layout, id, layer);
    if (q == NULL || p->adamw.gradients == NULL) {
        return (Gradient){NULL, p->adamw.gradient_type, false};
    }
    int64_t place = p->zero.place[q - p->run->layout.params];
    char *data = (char *)p->adamw.gradients + place * gpu_type_bytes(p->adamw.gradient_type);
    return (Gradient){data, p->adamw.gradient_type, false};
}

void params_scale(const Params *p, const LinearPrecision *lp, OperandId operand, Tensor *t) {
    const Precision *precision = &p->run->precision;
    int slot = fp8_slot_index(&p->run->config, lp->linear, lp->layer, operand);
    bool follows = fp8_slot_follows(precision, slot);
    if (lp->number != NUMBER_FP8) { return; }
    t->type = lp->type[operand];
    t->mode = p->blockwise ? SCALE_BLOCKS : SCALE_GIVEN;
    t->fused = (!p->blockwise || operand != OPERAND_W) && lp->wgrad == NUMBER_FP8;
    t->record = p->delayed && follows;
    t->power_of_two = precision->power_of_two;
    t->blocks = fp8_scales(precision, operand);
    t->target = lp->target[operand];
    t->live = p->blockwise ? NULL : &p->scaling.live[slot];
    t->slot = p->delayed && follows ? &p->scaling.slots[slot] : NULL;
    t->scaling = follows ? &p->scaling : NULL;
}

// ---- amaxes and counts of a step ----------------------------------------------------------------

void params_clear_measured(const Params *p) {
    if (p->scaling.measuring && !p->blockwise) {
        gpu_fp8_clear_measured(&p->scaling, p->gpu->stream);
    }
}

void params_clear_counts(Params *p) {
    size_t bytes = (size_t)p->scaling.count * sizeof(Fp8Counts);
    CUDA_CHECK(cudaMemsetAsync(p->counts, 0, bytes, p->gpu->stream));
}

void params_fetch_counts(Params *p, Fp8Counts *host) {
    enum { COUNTS = sizeof(Fp8Counts) / sizeof(int64_t) };
    gpu_fetch(p->gpu, host, p->counts, (size_t)p->scaling.count * sizeof(Fp8Counts));
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    for (int i = OPERAND_W; i < p->scaling.count && p->run->rank > 0; i += OPERAND_COUNT) {
        host[i] = (Fp8Counts){0}; // every rank has all weights: rank 0's count
    }
    params_sum_counts(p, (int64_t *)host, p->scaling.count * COUNTS);
}

// ---- what ranks exchange ------------------------------------------------------------------------

static void *gradients_from(const Params *p, int64_t place) {
    return (char *)p->adamw.gradients + place * gpu_type_bytes(p->adamw.gradient_type);
}

void params_reduce(Params *p, int bucket) {
    const ZeroLayout *z = &p->zero;
    comm_begin(p->comm);
    for (int s = z->first[bucket]; s < z->first[bucket + 1]; s++) {
        comm_reduce_scatter(p->comm, gradients_from(p, z->segments[s].begin),
                            (CommType)p->adamw.gradient_type, z->segments[s].part);
    }
    comm_end(p->comm, SLOT_SUMS);
}

void params_join(Params *p) {
    gpu_family(p->gpu, FAMILY_COMMUNICATION);
    comm_join(p->comm);
}

void params_fetch_gradients(Params *p, float *host) {
    const ParamLayout *layout = &p->run->layout;
    const ZeroLayout *z = &p->zero;
    size_t bytes = (size_t)(z->size * gpu_type_bytes(p->adamw.gradient_type));
    char *all = malloc_or_die(bytes);
    comm_begin(p->comm);
    for (int s = 0; s < z->count; s++) {
        comm_all_gather(p->comm, gradients_from(p, z->segments[s].begin),
                        (CommType)p->adamw.gradient_type, z->segments[s].part);
    }
    comm_end(p->comm, SLOT_SUMS);
    params_join(p);
    gpu_fetch(p->gpu, all, p->adamw.gradients, bytes);
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    for (int i = 0; i < layout->count; i++) {
        float *to = host + layout->params[i].offset;
        int64_t from = z->place[i], n = param_size(&layout->params[i]);
        for (int64_t k = 0; k < n; k++) {
            to[k] = p->adamw.gradient_type == TYPE_F32 ? ((const float *)all)[from + k]
                                                       : bf16_decode(((const Bf16 *)all)[from + k]);
        }
    }
    free(all);
}

static void all_reduce(Params *p, void *values, CommType type, CommOp op, int64_t count) {
    gpu_family(p->gpu, FAMILY_COMMUNICATION);
    comm_begin(p->comm);
    comm_all_reduce(p->comm, values, type, op, count);
    comm_end(p->comm, SLOT_AGREEMENT);
    comm_wait(p->comm, SLOT_AGREEMENT);
    gpu_family(p->gpu, FAMILY_OPTIMIZER);
}

void params_sum(Params *p, double *values, int n) {
    all_reduce(p, values, COMM_F64, COMM_SUM, n);
}

void params_sum_counts(Params *p, int64_t *counts, int n) {
    double values[NORM_PARTS]; // as many as the scratch has room for, at least
    for (; n > 0; counts += NORM_PARTS, n -= NORM_PARTS) {
        int part = min_int(n, NORM_PARTS);
        size_t bytes = (size_t)part * sizeof(double);
        for (int i = 0; i < part; i++) { values[i] = (double)counts[i]; }
        gpu_send(p->gpu, p->norm_scratch, values, bytes);
        params_sum(p, p->norm_scratch, part);
        gpu_fetch(p->gpu, values, p->norm_scratch, bytes);
        CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
        for (int i = 0; i < part; i++) { counts[i] = (int64_t)values[i]; }
    }
}

// ---- the optimizer's step -----------------------------------------------------------------------

// The bucket's new weights to all ranks, while the next bucket's are computed.
static void gather_weights(Params *p, int bucket) {
    const ZeroLayout *z = &p->zero;
    comm_begin(p->comm);
    for (int s = z->first[bucket]; s < z->first[bucket + 1]; s++) {
        comm_all_gather(p->comm, p->weights[s], z->segments[s].codes ? COMM_U8 : COMM_BF16,
                        z->segments[s].part);
    }
    comm_end(p->comm, SLOT_WEIGHTS + bucket);
    p->arriving[bucket] = true;
}

// FP8 weights by measured scales: the largest amax of all ranks' parts gives them. state: NULL at
// the start of a run.
static void publish_measured(Params *p, const StepState *state) {
    int64_t words = p->scaling.count * (int64_t)(sizeof(Fp8Live) / sizeof(uint32_t));
    if (p->num_tensors > 0) {
        // the bits of non-negative floats order as the floats do; of Fp8Live's fields amax alone
        // differs between ranks
        all_reduce(p, p->blockwise ? (void *)p->square_amax : p->scaling.live, COMM_U32, COMM_MAX,
                   p->blockwise ? p->num_squares : words);
        gpu_announce_scales(p->adamw.tensors, p->adamw.squares, p->num_tensors, state,
                            p->gpu->stream);
    }
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        gpu_quantize_weights(&p->updates[b], state, p->gpu->stream);
        gather_weights(p, b);
    }
}

// At the start of a run: from the master weights to what products read.
void params_publish(Params *p) {
    for (int b = 0; b < p->run->layout.num_buckets && p->num_tensors > 0; b++) {
        gpu_measure_weights(&p->updates[b], NULL, p->gpu->stream);
    }
    publish_measured(p, NULL);
}

// Norm, loss and whether to stop, from each rank's own to all ranks'; the amaxes likewise.
static void agree(Params *p) {
    enum { SUMS = 3 }; // loss, norm_squared, stop
    _Static_assert(offsetof(StepState, stop) == (SUMS - 1) * sizeof(double), "they lie together");
    all_reduce(p, &p->state->loss, COMM_F64, COMM_SUM, SUMS);
    if (p->delayed) {
        int64_t words = p->scaling.count * (int64_t)(sizeof(Fp8Slot) / sizeof(uint32_t));
        all_reduce(p, p->scaling.slots, COMM_U32, COMM_MAX, words);
    }
}

void params_update(Params *p) {
    const Options *o = &p->run->options;
    cudaStream_t stream = p->gpu->stream;
    gpu_family(p->gpu, FAMILY_OPTIMIZER);
    gpu_sum_of_squares(p->state, p->adamw.input, p->norm_scratch, p->adamw.gradients,
                       p->adamw.gradient_type, p->parts, p->num_parts, stream);
    agree(p);
    gpu_decide_step(p->state, (double)o->global_batch_size * o->seq_length, (float)o->clip_grad,
                    stream);
    if (p->delayed) { gpu_fp8_update(&p->scaling, p->state, stream); }
    params_clear_measured(p);
    if (p->blockwise) {
        size_t bytes = (size_t)p->num_squares * sizeof(float);
        CUDA_CHECK(cudaMemsetAsync(p->square_amax, 0, bytes, stream));
    }
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        if (p->updates[b].muon) { gpu_muon_momentum(&p->updates[b], p->state, stream); }
    }
    muon_orthogonalize_all(&p->muon, p->gpu, p->comm, SLOT_AGREEMENT, p->adamw.gradients,
                           p->adamw.gradient_type);
    bool measured = p->scaling.measuring && p->num_tensors > 0;
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        gpu_adamw(&p->updates[b], measured ? SCALE_MEASURED : SCALE_GIVEN, p->state, stream);
        if (!measured) { gather_weights(p, b); }
    }
    if (measured) { publish_measured(p, p->state); }
}

bool params_receive(Params *p, int bucket) {
    if (!p->arriving[bucket]) { return false; }
    gpu_family(p->gpu, FAMILY_COMMUNICATION);
    comm_wait(p->comm, SLOT_WEIGHTS + bucket);
    p->arriving[bucket] = false;
    return true;
}

void params_expect(Params *p, bool arriving) {
    for (int b = 0; b < p->run->layout.num_buckets; b++) { p->arriving[b] = arriving; }
}
