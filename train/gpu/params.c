#include "params.h"
#include "../run_data.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

// The sum for the gradients' norm has about this many parts, one for each thread block: enough
// blocks for any device.
enum { NORM_PARTS = 1024 };

// ---- planning -----------------------------------------------------------------------------------

// Returns the kinds of all parameters: ZERO_CODES if the parameter's segment holds FP8 weights,
// ZERO_MUON if Muon updates the parameter. A tied embedding is not in FP8, because the embedding
// reads its rows in BF16.
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

// Returns how many floats are planned for the scales of a weight, and as many for the scales of its
// transpose: one for each block of 128 x 128, and padding.
static int64_t block_scales_room(const Fp8Weight *w) {
    return max64(fp8_scale_count(SCALE_BLOCK_128X128, w->rows, w->columns),
                 fp8_scale_count(SCALE_BLOCK_128X128, w->columns, w->rows));
}

// Returns the number of elements in the first n ranges that this rank keeps.
static int64_t kept_elements(const OptimizerState *s, int n) {
    if (n == 0) { return 0; }
    const ZeroRange *last = &s->ranges[n - 1];
    return last->kept + last->end - last->begin;
}

// Cuts range i in two, after its first `elements` elements.
static void cut_range(OptimizerState *s, int i, int64_t elements) {
    s->ranges = realloc_or_die(s->ranges, (size_t)(s->num_ranges + 1) * sizeof(ZeroRange));
    ZeroRange *r = &s->ranges[i];
    memmove(r + 1, r, (size_t)(s->num_ranges - i) * sizeof(ZeroRange));
    s->num_ranges++;
    r->end = r->begin + elements;
    r[1].begin += elements;
    r[1].sharded_offset += elements;
    r[1].kept += elements;
}

// A range never cuts a MOMENT_BLOCK, so the codes of moments do not depend on the number of ranks.
_Static_assert(PARAM_ALIGN % MOMENT_BLOCK == 0, "ranges begin and end with blocks");

// Sets which elements each array of the state has, and their type.
static void set_arrays(Params *p) {
    OptimizerState *s = &p->optimizer;
    const GpuType moments = s->adamw.moment_type;
    const bool codes = moments == TYPE_MOMENT8;
    int ranges = 0; // how many ranges AdamW updates; they come first
    while (ranges < s->num_ranges && !p->zero.segments[s->ranges[ranges].segment].muon) {
        ranges++;
    }
    const int64_t all = kept_elements(s, s->num_ranges), adamw = kept_elements(s, ranges);
    const int64_t scales = codes ? state_scales(adamw) : 0;
    s->arrays[STATE_MASTER] = (StateArray){.type = TYPE_F32, .count = all, .span = 1};
    if (!options_train(&p->run->options)) { return; }
    s->arrays[STATE_EXP_AVG] = (StateArray){
        .type = moments, .count = codes ? adamw : all, .span = 1};
    s->arrays[STATE_EXP_AVG_SQ] = (StateArray){.type = moments, .count = adamw, .span = 1};
    s->arrays[STATE_MOMENTUM] = (StateArray){.type = momentum_type(moments),
                                             .first = adamw,
                                             .count = codes ? all - adamw : 0,
                                             .span = 1};
    s->arrays[STATE_EXP_AVG_SCALE] = s->arrays[STATE_EXP_AVG_SQ_SCALE] = (StateArray){
        .type = TYPE_BF16, .count = scales, .span = MOMENT_BLOCK};
}

// Bytes of the optimizer's state for one element, without the scales of moments. kept: the
// element's index among those that this rank keeps.
static int64_t state_bytes(const OptimizerState *s, int64_t kept) {
    int64_t bytes = 0;
    for (const StateArray *a = s->arrays; a < s->arrays + STATE_ARRAYS; a++) {
        bool has = a->span == 1 && kept >= a->first && kept < a->first + a->count;
        bytes += has ? gpu_type_bytes(a->type) : 0;
    }
    return bytes;
}

// Plans the state's arrays. At least `offload` bytes of state, those of the first kept elements,
// are in host memory. Scales of moments are always on the device.
static void plan_state(Params *p, Plan *plan, Plan *host, int64_t offload) {
    static const char *const titles[] = {"master weights",
                                         "first moment",
                                         "second moment",
                                         "momentum",
                                         "scales of the first moment",
                                         "scales of the second moment"};
    OptimizerState *s = &p->optimizer;
    int64_t offloaded = 0, bytes = 0;
    set_arrays(p);
    for (int i = 0; i < s->num_ranges && bytes < offload; i++) {
        int64_t begin = s->ranges[i].kept, n = s->ranges[i].end - s->ranges[i].begin;
        int64_t each = state_bytes(s, begin);
        int64_t needed = round_up64((offload - bytes + each - 1) / each, PARAM_ALIGN);
        if (needed < n) { cut_range(s, i, needed); }
        bytes += each * min64(needed, n);
        offloaded = begin + min64(needed, n);
    }
    plan_section(plan, "optimizer", PHASE_ALWAYS);
    plan_section(host, offloaded > 0 ? "optimizer" : "optimizer, for checkpoints", PHASE_ALWAYS);
    for (int i = 0; i < STATE_ARRAYS; i++) {
        StateArray *a = &s->arrays[i];
        int bytes_each = gpu_type_bytes(a->type);
        if (a->span == 1) { a->offloaded = max64(0, min64(a->count, offloaded - a->first)); }
        plan_buffer(plan, titles[i], (a->count - a->offloaded) * bytes_each, &a->device);
        plan_buffer(host, titles[i],
                    (options_save(&p->run->options) ? a->count : a->offloaded) * bytes_each,
                    &a->host);
    }
}

void *state_address(const StateArray *a, int64_t kept) {
    int64_t element = a->count > 0 ? (kept - a->first) / a->span : 0;
    bool has = kept >= a->first && element < a->count, resident = element >= a->offloaded;
    char *base = resident ? a->device : a->host;
    int64_t first = resident ? a->offloaded : 0;
    return !has || base == NULL ? NULL : base + (element - first) * gpu_type_bytes(a->type);
}

bool params_offloaded(const Params *p) {
    return p->optimizer.arrays[STATE_MASTER].offloaded > 0;
}

static void plan_fp8(Params *p, Plan *plan) {
    const Run *run = p->run;
    const Precision *precision = &run->precision;
    const int count = precision->used ? fp8_slot_count(&run->config) : 0;
    const int length = precision_scales(precision, FP8_RECIPE_DELAYED) ? precision->history_length
                                                                       : 0;
    const bool blockwise = precision_scales(precision, FP8_RECIPE_BLOCKWISE);
    Weights *w = &p->weights;
    p->fp8.count = count;
    p->fp8.length = length;
    p->scaling = calloc_or_die((size_t)count, sizeof(Scaling));
    for (int i = 0; i < count; i++) { p->scaling[i] = fp8_slot_scaling(precision, i); }
    p->measures = precision_scales(precision, FP8_RECIPE_TENSORWISE);
    w->fp8 = calloc_or_die((size_t)precision->count, sizeof(Fp8Weight));
    for (int i = 0; i < precision->count; i++) {
        const LinearPrecision *lp = &precision->linear[i];
        if (lp->number != NUMBER_FP8) { continue; }
        w->fp8[i] = (Fp8Weight){.rows = lp->outputs,
                                .columns = lp->inputs,
                                .target = lp->target[OPERAND_W],
                                .power_of_two = precision->power_of_two};
        w->num_block_scales += blockwise ? block_scales_room(&w->fp8[i]) : 0;
    }
    plan_section(plan, "FP8 scaling", PHASE_ALWAYS);
    PLAN(plan, "table of weights", count > 0 ? precision->count : 0, p->optimizer.adamw.weights);
    PLAN(plan, "scales", count, p->fp8.scales);
    PLAN(plan, "counts", run->options.fp8_stats_interval > 0 ? count : 0, p->counts);
    PLAN(plan, "targets", count, p->fp8.targets);
    PLAN(plan, "flags", count, p->fp8.kinds);
    PLAN(plan, "amax history", (int64_t)count * length, p->fp8.history);
    PLAN(plan, "weights' amaxes", w->num_block_scales, w->block_amax);
    PLAN(plan, "weights' scales", 2 * w->num_block_scales, w->block_inverse);
}

// Returns the settings that all updates of the run share.
static AdamWUpdate update_settings(const Run *run) {
    static const GpuType moment_types[] = {
        [STATE_FP32] = TYPE_F32, [STATE_BF16] = TYPE_BF16, [STATE_8BIT] = TYPE_MOMENT8};
    const Options *o = &run->options;
    bool codes = o->adam_dtype == STATE_8BIT;
    // gradients are in FP32 if that is requested or, by default, if several micro-batches add to
    // them
    bool wide = o->grad_accum_dtype == GRADIENT_FP32 ||
                (o->grad_accum_dtype == GRADIENT_AUTO && run_micro_batches(run) > 1);
    return (AdamWUpdate){
        .gradient_type = wide ? TYPE_F32 : TYPE_BF16,
        .moment_type = moment_types[o->adam_dtype],
        .momentum = (float)o->muon_momentum,
        .beta1 = (float)o->adam_beta1,
        .beta2 = (float)o->adam_beta2,
        .eps = (float)o->adam_eps,
        .floor = codes ? (float)moment_floor(o->adam_beta1, o->adam_beta2) : 0.0f,
        .seed = (uint64_t)o->seed,
    };
}

void params_plan(Params *p, Run *run, Plan *plan, Plan *host, int64_t offload) {
    const Options *o = &run->options;
    const ParamLayout *layout = &run->layout;
    OptimizerState *s = &p->optimizer;
    *p = (Params){.run = run};
    bool trains = options_train(o);
    FREED uint8_t *kinds = find_kinds(run);
    p->zero = zero_layout(layout, run->group.ranks, kinds);
    // evaluations in BF16 read BF16 weights; so all weights are sent in BF16, and every rank makes
    // the FP8 codes
    for (int i = 0; i < p->zero.count && o->eval_precision == EVAL_BF16; i++) {
        p->zero.segments[i].codes = false;
    }
    s->num_ranges = zero_ranges(&p->zero, run->group.rank, &s->ranges);
    p->saved.num_ranges = s->num_ranges;
    p->saved.ranges = calloc_or_die((size_t)p->saved.num_ranges, sizeof(Bucket));
    for (int i = 0; i < p->saved.num_ranges; i++) {
        p->saved.ranges[i] = (Bucket){s->ranges[i].begin, s->ranges[i].end};
    }
    s->updates = calloc_or_die((size_t)layout->num_buckets, sizeof(AdamWUpdate));
    p->weights.arriving = calloc_or_die((size_t)layout->num_buckets, sizeof(bool));
    s->adamw = update_settings(run);
    plan_section(plan, "weights", PHASE_ALWAYS);
    int64_t gradient_bytes = trains ? p->zero.size * gpu_type_bytes(s->adamw.gradient_type) : 0;
    int64_t largest_codes = 0;
    p->weights.segments = calloc_or_die((size_t)p->zero.count, sizeof(void *));
    for (int i = 0; i < p->zero.count; i++) {
        bool is_codes = p->zero.segments[i].codes;
        plan_buffer(plan, is_codes ? "weights, FP8" : "weights, BF16",
                    segment_size(p, i) * (is_codes ? 1 : (int64_t)sizeof(Bf16)),
                    &p->weights.segments[i]);
        if (is_codes) { largest_codes = max64(largest_codes, segment_size(p, i)); }
    }
    plan_section(plan, "gradients", PHASE_ALWAYS);
    plan_buffer(plan, "gradients", gradient_bytes, &s->adamw.gradients);
    muon_plan(&s->muon, run, &p->zero, plan);
    plan_state(p, plan, host, offload);
    PLAN(plan, "segments", s->num_ranges, s->segments);
    PLAN(plan, "step state", 1, s->state);
    PLAN(plan, "step input", 1, s->adamw.input);
    PLAN(plan, "parts of the norm", NORM_PARTS + p->zero.count, s->parts);
    PLAN(plan, "norm scratch", NORM_PARTS + p->zero.count, s->norm_scratch);
    plan_fp8(p, plan);
    plan_section(plan, "scratch of saving", PHASE_SAVE);
    PLAN(plan, "a segment in BF16", options_save(o) ? largest_codes : 0, p->saved.gathered);
    PLAN(plan, "hashes", options_save(o) ? STATE_ARRAYS : 0, p->saved.hashes);
    plan_section(host, "checkpoints", PHASE_ALWAYS);
    int64_t scales = options_save(o) && p->fp8.length > 0 ? p->fp8.count : 0;
    PLAN(host, "weights in BF16", options_save(o) && run->group.rank == 0 ? layout->size : 0,
         p->saved.model);
    PLAN(host, "FP8 scales", scales, p->saved.scales);
    PLAN(host, "amax history", scales * p->fp8.length, p->saved.history);
}

double params_host_bytes(const Params *p, const Plan *host) {
    const Run *run = p->run;
    int64_t ranks = max64(1, run->group.local_ranks);
    // only rank 0 needs memory for the model.safetensors that it saves
    bool model = options_save(&run->options) && run->group.rank == 0;
    int64_t model_bytes = model ? run->layout.size * (int64_t)sizeof(Bf16) : 0;
    return (double)(host->bytes * ranks - model_bytes * (ranks - 1));
}

void params_free_plan(Params *p) {
    zero_free(&p->zero);
    muon_free_plan(&p->optimizer.muon);
    free(p->scaling);
    free(p->weights.fp8);
    free(p->weights.segments);
    free(p->optimizer.ranges);
    free(p->saved.ranges);
    free(p->optimizer.updates);
    free(p->weights.arriving);
}

// ---- starting -----------------------------------------------------------------------------------

// Cuts this rank's part of every segment into GradientParts, over which the gradients' norm is
// summed.
static void send_norm_parts(Params *p) {
    const ZeroLayout *z = &p->zero;
    FREED GradientPart *parts = calloc_or_die((size_t)(NORM_PARTS + z->count),
                                              sizeof(GradientPart));
    int64_t kept = z->size / z->ranks;
    int64_t most = round_up64((kept + NORM_PARTS - 1) / NORM_PARTS, PARAM_ALIGN);
    p->optimizer.num_parts = 0;
    for (const ZeroSegment *segment = z->segments; segment < z->segments + z->count; segment++) {
        int64_t begin = segment->begin + p->run->group.rank * segment->part,
                end = begin + segment->part;
        for (int64_t at = begin; at < end; at += most) {
            parts[p->optimizer.num_parts++] = (GradientPart){at, min64(most, end - at)};
        }
    }
    gpu_send(p->gpu, p->optimizer.parts, parts,
             (size_t)p->optimizer.num_parts * sizeof(GradientPart));
}

// Finds where each FP8 weight's scales lie, and sends the table of the weights that are gathered as
// codes. Sets number [layout.count] to the index of each parameter in that table.
static void send_weights(Params *p, int *number) {
    const Run *run = p->run;
    AdamWUpdate *u = &p->optimizer.adamw;
    FREED Fp8Weight *weights = calloc_or_die((size_t)run->precision.count, sizeof(Fp8Weight));
    int64_t at = 0; // next index in the amaxes, and in both halves of the inverse scales
    for (int i = 0; i < run->precision.count; i++) {
        const LinearPrecision *lp = &run->precision.linear[i];
        Fp8Weight *w = &p->weights.fp8[i];
        if (lp->number != NUMBER_FP8) { continue; }
        if (p->weights.num_block_scales > 0) {
            w->amax = p->weights.block_amax + at;
            w->inverse = p->weights.block_inverse + at;
            w->inverse_t = w->inverse + p->weights.num_block_scales;
            at += block_scales_room(w);
        } else {
            w->scale =
                &p->fp8.scales[fp8_slot_index(&run->config, lp->linear, lp->layer, OPERAND_W)];
        }
        int param = (int)(param_find(&run->layout, lp->weight, lp->layer) - run->layout.params);
        if (!p->zero.segments[p->zero.segment[param]].codes) { continue; }
        number[param] = u->weight_count;
        weights[u->weight_count++] = *w;
    }
    if (u->weight_count > 0) {
        u->scaling = fp8_slot_scaling(&run->precision, OPERAND_W);
        gpu_send(p->gpu, u->weights, weights, (size_t)u->weight_count * sizeof(Fp8Weight));
    }
}

static AdamWSegment segment_of(const Params *p, const ZeroRange *range, const int *number) {
    const ZeroSegment *segment = &p->zero.segments[range->segment];
    const StateArray *arrays = p->optimizer.arrays;
    const Param *param = &p->run->layout.params[range->param];
    void *exp_avg = state_address(&arrays[STATE_EXP_AVG], range->kept);
    int64_t offset = range->sharded_offset - segment->begin;
    void *weights = p->weights.segments[range->segment];
    bool codes = segment->codes;
    return (AdamWSegment){
        .first = range->begin,
        .n = range->end - range->begin,
        .gradient = range->sharded_offset,
        .master = state_address(&arrays[STATE_MASTER], range->kept),
        .exp_avg = exp_avg != NULL ? exp_avg : state_address(&arrays[STATE_MOMENTUM], range->kept),
        .exp_avg_sq = state_address(&arrays[STATE_EXP_AVG_SQ], range->kept),
        .exp_avg_scales = state_address(&arrays[STATE_EXP_AVG_SCALE], range->kept),
        .exp_avg_sq_scales = state_address(&arrays[STATE_EXP_AVG_SQ_SCALE], range->kept),
        .bf16 = codes ? NULL : (Bf16 *)weights + offset,
        .fp8 = codes ? (uint8_t *)weights + offset : NULL,
        .weight = number[range->param],
        .weight_offset = range->begin - param->offset,
        .lr_mult = param_lr_mult(param, &p->run->options),
        .weight_decay = param_decay(param, &p->run->options),
        .muon = segment->muon,
    };
}

// Sends AdamW's table of segments to the device. Each bucket has a kernel launch of its own, so a
// bucket's segments lie together, and their thread blocks are numbered from 0.
static void send_segments(Params *p, const int *number) {
    const OptimizerState *o = &p->optimizer;
    FREED AdamWSegment *segments = calloc_or_die((size_t)o->num_ranges, sizeof(AdamWSegment));
    int count = 0;
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        AdamWUpdate *bucket = &o->updates[b];
        *bucket = o->adamw;
        bucket->segments = o->segments + count;
        for (const ZeroRange *r = o->ranges; r < o->ranges + o->num_ranges; r++) {
            if (p->zero.segments[r->segment].bucket != b) { continue; }
            AdamWSegment *s = &segments[count++];
            *s = segment_of(p, r, number);
            s->first_block = bucket->segment_blocks;
            bucket->segment_count++;
            bucket->segment_blocks += gpu_adamw_blocks(s->n);
            bucket->muon |= s->muon;
        }
    }
    gpu_send(p->gpu, o->segments, segments, (size_t)o->num_ranges * sizeof(AdamWSegment));
}

static void send_scaling(Params *p) {
    const Precision *precision = &p->run->precision;
    int n = p->fp8.count;
    FREED float *targets = malloc_or_die((size_t)n * sizeof(float));
    FREED uint8_t *kinds = malloc_or_die((size_t)n);
    for (int i = 0; i < n; i++) {
        targets[i] = fp8_slot_target(precision, i);
        kinds[i] = (uint8_t)((fp8_slot_uses_amax(precision, i) ? SLOT_UPDATED : 0) |
                             (i % OPERAND_COUNT == OPERAND_W ? SLOT_WEIGHT : 0));
    }
    gpu_send(p->gpu, p->fp8.targets, targets, (size_t)n * sizeof(float));
    gpu_send(p->gpu, p->fp8.kinds, kinds, (size_t)n);
}

void params_start(Params *p, Gpu *gpu, Comm *comm) {
    p->gpu = gpu;
    p->comm = comm;
    FREED int *number = calloc_or_die((size_t)p->run->layout.count, sizeof(int));
    send_norm_parts(p);
    send_weights(p, number);
    send_segments(p, number);
    if (p->fp8.count > 0) { send_scaling(p); }
    muon_start(&p->optimizer.muon, gpu);
}

// ---- addresses of weights and gradients ---------------------------------------------------------

void *params_weights(const Params *p, TensorId id, int layer, bool *codes) {
    const Param *q = param_find(&p->run->layout, id, layer);
    if (q == NULL) { return NULL; }
    int i = (int)(q - p->run->layout.params), s = p->zero.segment[i];
    bool is_codes = p->zero.segments[s].codes;
    int64_t offset = p->zero.sharded_offset[i] - p->zero.segments[s].begin;
    if (codes != NULL) { *codes = is_codes; }
    return (char *)p->weights.segments[s] + offset * (is_codes ? 1 : (int64_t)sizeof(Bf16));
}

// Returns the gradients from an offset of the sharded layout on.
static Gradient gradients_from(const Params *p, int64_t sharded_offset) {
    const AdamWUpdate *u = &p->optimizer.adamw;
    return (Gradient){(char *)u->gradients + sharded_offset * gpu_type_bytes(u->gradient_type),
                      u->gradient_type, false};
}

Gradient params_gradient(const Params *p, TensorId id, int layer) {
    const Param *q = param_find(&p->run->layout, id, layer);
    if (q == NULL || p->optimizer.adamw.gradients == NULL) {
        return (Gradient){NULL, p->optimizer.adamw.gradient_type, false};
    }
    return gradients_from(p, p->zero.sharded_offset[q - p->run->layout.params]);
}

// ---- amaxes and counts of a step ----------------------------------------------------------------

void params_clear_measured(const Params *p) {
    if (p->measures) { gpu_fp8_clear_amaxes(p->gpu, &p->fp8); }
}

void params_start_counts(Params *p) {
    size_t bytes = (size_t)p->fp8.count * sizeof(Fp8Counts);
    p->counting = true;
    gpu_clear(p->gpu, FAMILY_QUANTIZE, p->counts, bytes);
}

void params_fetch_counts(Params *p, Fp8Counts *host) {
    enum { COUNTS = sizeof(Fp8Counts) / sizeof(int64_t) };
    p->counting = false;
    gpu_read(p->gpu, host, p->counts, (size_t)p->fp8.count * sizeof(Fp8Counts));
    for (int i = OPERAND_W; i < p->fp8.count && p->run->group.rank > 0; i += OPERAND_COUNT) {
        host[i] = (Fp8Counts){0}; // every rank has all weights: only rank 0's are counted
    }
    params_sum_counts(p, (int64_t *)host, p->fp8.count * COUNTS);
}

// ---- what ranks exchange ------------------------------------------------------------------------

void params_reduce(Params *p, int bucket) {
    const ZeroLayout *z = &p->zero;
    comm_begin(p->comm);
    for (int s = z->first[bucket]; s < z->first[bucket + 1]; s++) {
        Gradient g = gradients_from(p, z->segments[s].begin);
        comm_reduce_scatter(p->comm, g.data, (CommType)g.type, z->segments[s].part);
    }
    comm_end(p->comm, SLOT_SUMS);
}

void params_fetch_gradients(Params *p, float *host) {
    const ParamLayout *layout = &p->run->layout;
    const ZeroLayout *z = &p->zero;
    Gradient g = gradients_from(p, 0);
    size_t bytes = (size_t)(z->size * gpu_type_bytes(g.type));
    FREED char *all = malloc_or_die(bytes);
    comm_begin(p->comm);
    for (int s = 0; s < z->count; s++) {
        comm_all_gather(p->comm, gradients_from(p, z->segments[s].begin).data, (CommType)g.type,
                        z->segments[s].part);
    }
    comm_end(p->comm, SLOT_SUMS);
    comm_join(p->comm);
    gpu_read(p->gpu, all, g.data, bytes);
    for (int i = 0; i < layout->count; i++) {
        float *to = host + layout->params[i].offset;
        int64_t from = z->sharded_offset[i], n = param_size(&layout->params[i]);
        for (int64_t k = 0; k < n; k++) {
            to[k] = g.type == TYPE_F32 ? ((const float *)all)[from + k]
                                       : bf16_decode(((const Bf16 *)all)[from + k]);
        }
    }
}

static void all_reduce(Params *p, void *values, CommType type, CommOp op, int64_t count) {
    comm_begin(p->comm);
    comm_all_reduce(p->comm, values, type, op, count);
    comm_end(p->comm, SLOT_AGREEMENT);
    comm_wait(p->comm, SLOT_AGREEMENT);
}

void params_sum(Params *p, double *values, int n) {
    all_reduce(p, values, COMM_F64, COMM_SUM, n);
}

void params_sum_counts(Params *p, int64_t *counts, int n) {
    double values[NORM_PARTS]; // norm_scratch has room for at least as many numbers
    for (; n > 0; counts += NORM_PARTS, n -= NORM_PARTS) {
        int part = min_int(n, NORM_PARTS);
        size_t bytes = (size_t)part * sizeof(double);
        for (int i = 0; i < part; i++) { values[i] = (double)counts[i]; }
        gpu_send(p->gpu, p->optimizer.norm_scratch, values, bytes);
        params_sum(p, p->optimizer.norm_scratch, part);
        gpu_read(p->gpu, values, p->optimizer.norm_scratch, bytes);
        for (int i = 0; i < part; i++) { counts[i] = (int64_t)values[i]; }
    }
}

// ---- the optimizer's step -----------------------------------------------------------------------

// Sends the bucket's new weights to all ranks, while the next bucket's are computed.
static void gather_weights(Params *p, int bucket) {
    const ZeroLayout *z = &p->zero;
    comm_begin(p->comm);
    for (int s = z->first[bucket]; s < z->first[bucket + 1]; s++) {
        comm_all_gather(p->comm, p->weights.segments[s], z->segments[s].codes ? COMM_U8 : COMM_BF16,
                        z->segments[s].part);
    }
    comm_end(p->comm, SLOT_WEIGHTS + bucket);
    p->weights.arriving[bucket] = true;
}

// Replaces each tensor's amax by the largest over all ranks. The maximum is taken over every 32-bit
// word of the Fp8Scale structs, as integers: non-negative floats have the order of their bits.
// Words other than amax are equal on all ranks, except the scales of measured activations, which
// are measured again before they are read.
static void agree_amaxes(Params *p) {
    int64_t words = p->fp8.count * (int64_t)(sizeof(Fp8Scale) / sizeof(uint32_t));
    all_reduce(p, p->fp8.scales, COMM_U32, COMM_MAX, words);
}

// Computes the scales of the FP8 weights from the largest amaxes over all ranks, quantises the
// weights, and sends all weights. state: NULL at the start of a run.
static void publish_measured(Params *p, const StepState *state) {
    const AdamWUpdate *u = &p->optimizer.adamw;
    if (u->weight_count > 0) {
        if (u->scaling == SCALE_BLOCK_128X128) {
            all_reduce(p, p->weights.block_amax, COMM_U32, COMM_MAX, p->weights.num_block_scales);
        } else {
            agree_amaxes(p);
        }
        gpu_set_weight_scales(p->gpu, u, state);
    }
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        gpu_quantize_weights(p->gpu, &p->optimizer.updates[b], state);
        gather_weights(p, b);
    }
}

void params_publish(Params *p) {
    const OptimizerState *s = &p->optimizer;
    for (int b = 0; b < p->run->layout.num_buckets && s->adamw.weight_count > 0; b++) {
        gpu_measure_weights(p->gpu, &s->updates[b], NULL);
    }
    publish_measured(p, NULL);
}

void params_calibrate(Params *p) {
    size_t bytes = (size_t)p->fp8.count * sizeof(Fp8Scale);
    FREED Fp8Scale *scales = malloc_or_die(bytes);
    agree_amaxes(p);
    gpu_read(p->gpu, scales, p->fp8.scales, bytes);
    fp8_calibrate(&p->run->precision, scales);
    gpu_send(p->gpu, p->fp8.scales, scales, bytes);
}

void params_update(Params *p, const double *loss_sum) {
    const Options *o = &p->run->options;
    const OptimizerState *s = &p->optimizer;
    Gpu *gpu = p->gpu;
    gpu_sum_of_squares(gpu, s->state, s->adamw.input, loss_sum, s->norm_scratch, s->adamw.gradients,
                       s->adamw.gradient_type, s->parts, s->num_parts);
    enum { SUMS = 3 }; // loss_sum, norm_squared, stop
    _Static_assert(offsetof(StepState, stop) == (SUMS - 1) * sizeof(double), "they lie together");
    all_reduce(p, &s->state->loss_sum, COMM_F64, COMM_SUM, SUMS);
    if (p->fp8.length > 0) { agree_amaxes(p); }
    gpu_decide_step(gpu, s->state, s->adamw.input, p->run->precision.step_tokens,
                    (float)o->clip_grad);
    if (p->fp8.length > 0) { gpu_fp8_update(gpu, &p->fp8, s->state); }
    params_clear_measured(p);
    if (p->weights.num_block_scales > 0) {
        size_t bytes = (size_t)p->weights.num_block_scales * sizeof(float);
        gpu_clear(gpu, FAMILY_OPTIMIZER, p->weights.block_amax, bytes);
    }
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        if (s->updates[b].muon) { gpu_muon_momentum(gpu, &s->updates[b], s->state); }
    }
    muon_orthogonalize_all(&s->muon, gpu, p->comm, SLOT_AGREEMENT, s->adamw.gradients,
                           s->adamw.gradient_type);
    // with SCALE_DELAYED, gpu_adamw also writes the FP8 weights, so they can be sent at once
    const bool given = s->adamw.scaling == SCALE_DELAYED;
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        gpu_adamw(gpu, &s->updates[b], s->state);
        if (given) { gather_weights(p, b); }
    }
    if (!given) { publish_measured(p, s->state); }
}

bool params_receive(Params *p, int bucket) {
    if (!p->weights.arriving[bucket]) { return false; }
    comm_wait(p->comm, SLOT_WEIGHTS + bucket);
    p->weights.arriving[bucket] = false;
    return true;
}

void params_expect(Params *p, bool arriving) {
    for (int b = 0; b < p->run->layout.num_buckets; b++) { p->weights.arriving[b] = arriving; }
}
