#include "params.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NORM_PARTS = 1024 }; // about: so many blocks fill any device

#define PLAN(plan, category, name, count, pointer)                                    \
    plan_buffer(plan, category, name, (int64_t)(count) * (int64_t)sizeof(*(pointer)), \
                (void **)&(pointer))

static Linear linear_of(const ModelConfig *c, int index) {
    return index == c->num_layers * LINEAR_HEAD ? LINEAR_HEAD : (Linear)(index % LINEAR_HEAD);
}

static bool is_fp8(const Run *run, int index) {
    return run->precision.linear[index].number == NUMBER_FP8;
}

static const Param *weight_param(const Run *run, int index) {
    const ModelConfig *c = &run->config;
    return param_find(&run->layout, linear_weight(c, linear_of(c, index)), index / LINEAR_HEAD);
}

// Which parameters are an FP8 layer's weight alone (a tied embedding is looked up in BF16 too).
static bool *find_coded(const Run *run) {
    bool *coded = calloc_or_die((size_t)run->layout.count, sizeof(bool));
    for (int i = 0; i < run->precision.count; i++) {
        const Param *w = weight_param(run, i);
        coded[w - run->layout.params] = is_fp8(run, i) && w->id != TENSOR_TOKEN_EMBEDDING;
    }
    return coded;
}

// Every other parameter gets a place among the BF16 copies. Returns their size.
static int64_t place_copies(Params *p, const bool *coded) {
    const ParamLayout *layout = &p->run->layout;
    int64_t size = 0;
    for (int i = 0; i < layout->count; i++) {
        p->copy_offset[i] = coded[i] ? -1 : size;
        if (!coded[i]) { size += round_up64(param_size(&layout->params[i]), PARAM_ALIGN); }
    }
    return size;
}

// Which elements this rank has master weights and moments of, and saves.
static void find_ranges(Params *p) {
    p->num_ranges = p->num_saved = zero_ranges(&p->zero, p->run->rank, &p->ranges);
    p->state_size = p->zero.kept;
    p->saved = calloc_or_die((size_t)p->num_saved, sizeof(Bucket));
    for (int i = 0; i < p->num_saved; i++) {
        const ZeroRange *range = &p->ranges[i];
        p->saved[i] = (Bucket){range->begin, range->end};
    }
}

static void plan_fp8(Params *p, Plan *plan) {
    const Run *run = p->run;
    int count = fp8_slot_count(&run->config);
    p->codes = calloc_or_die(2 * (size_t)run->precision.count, sizeof(uint8_t *));
    p->bucket_rows = calloc_or_die((size_t)run->layout.num_buckets, sizeof(WeightRows));
    p->scaling.count = count;
    p->scaling.history_length = run->precision.history_length;
    p->scaling.delayed = p->delayed;
    p->scaling.most_recent = run->precision.most_recent;
    if (!p->fp8) { return; }
    for (int i = 0; i < run->precision.count; i++) {
        if (!is_fp8(run, i)) { continue; }
        const Param *w = weight_param(run, i);
        int64_t size = param_size(w);
        if (run->ranks == 1 || p->copy_offset[w - run->layout.params] >= 0) { // else in a segment
            plan_buffer(plan, "weights", "FP8 weights", size, (void **)&p->codes[2 * i]);
        }
        plan_buffer(plan, "weights", "FP8 weights, transposed", size,
                    (void **)&p->codes[2 * i + 1]);
    }
    PLAN(plan, "FP8 scaling", "table of weights", run->precision.count, p->weights.rows);
    PLAN(plan, "FP8 scaling", "slots", count, p->scaling.slots);
    PLAN(plan, "FP8 scaling", "scales in use", count, p->scaling.live);
    PLAN(plan, "FP8 scaling", "counts", run->options.fp8_stats_interval > 0 ? count : 0, p->counts);
    PLAN(plan, "FP8 scaling", "targets", count, p->scaling.targets);
    PLAN(plan, "FP8 scaling", "flags", count, p->scaling.used);
    PLAN(plan, "FP8 scaling", "amax history",
         p->delayed ? (int64_t)count * run->precision.history_length : 0, p->scaling.history);
}

// In FP32: asked for, or where sums need it; one micro-batch's gradients need no wider sum.
static GpuType gradient_type(const Run *run) {
    const Options *o = &run->options;
    bool sums = run_micro_batches(run) > 1;
    bool wide = o->grad_accum_dtype == GRADIENT_FP32 ||
                (o->grad_accum_dtype == GRADIENT_AUTO && sums);
    return wide ? TYPE_F32 : TYPE_BF16;
}

// The BF16 weights that FP8 layers lack: one rank: of the largest, for evaluation; several: of the
// largest segment, for model.safetensors.
static int64_t plain_elements(const Params *p) {
    const Run *run = p->run;
    bool alone = run->ranks == 1;
    int64_t largest = 0;
    for (int i = 0; i < run->layout.count; i++) {
        int64_t segment = p->zero.segments[p->zero.segment[i]].part * run->ranks;
        int64_t own = round_up64(param_size(&run->layout.params[i]), PARAM_ALIGN);
        if (p->copy_offset[i] < 0) { largest = max64(largest, alone ? own : segment); }
    }
    bool wanted = alone ? run->options.eval_precision == EVAL_BF16 : options_save(&run->options);
    return wanted ? largest : 0;
}

void params_plan(Params *p, const Run *run, Plan *plan) {
    const Options *o = &run->options;
    *p = (Params){.run = run, .size = run->layout.size};
    bool *coded = find_coded(run);
    p->zero = zero_layout(&run->layout, run->ranks, coded);
    p->copy_offset = calloc_or_die((size_t)run->layout.count, sizeof(int64_t));
    int64_t copies = run->ranks == 1 ? place_copies(p, coded) : params_place_segments(p);
    free(coded);
    find_ranges(p);
    p->gradient_type = gradient_type(run);
    p->moment_type = o->adam_dtype == STATE_FP32 ? TYPE_F32 : TYPE_BF16;
    p->fp8 = precision_fp8_share(&run->precision) > 0;
    p->delayed = p->fp8 && run->precision.recipe == FP8_RECIPE_DELAYED;
    bool trains = options_train(o);
    int64_t gradient_bytes = trains ? p->zero.size * gpu_type_bytes(p->gradient_type) : 0;
    int64_t moment_bytes = trains ? p->state_size * gpu_type_bytes(p->moment_type) : 0;
    PLAN(plan, "weights", "weights, BF16", copies, p->copies);
    PLAN(plan, "weights", "master weights", p->state_size, p->master);
    PLAN(plan, "weights", "FP8 weights in BF16, at need", plain_elements(p), p->plain);
    plan_buffer(plan, "gradients", "gradients", gradient_bytes, &p->gradients);
    plan_buffer(plan, "optimizer", "first moment", moment_bytes, &p->exp_avg);
    plan_buffer(plan, "optimizer", "second moment", moment_bytes, &p->exp_avg_sq);
    PLAN(plan, "optimizer", "decay flags", p->size / PARAM_ALIGN, p->decay);
    PLAN(plan, "optimizer", "segments", max64(run->layout.count, p->num_ranges), p->segments);
    PLAN(plan, "optimizer", "step state", 1, p->state);
    PLAN(plan, "optimizer", "parts of the norm", NORM_PARTS + p->zero.count, p->parts);
    PLAN(plan, "optimizer", "norm scratch",
         max64(NORM_PARTS + p->zero.count, 3 * fp8_slot_count(&run->config)), p->norm_scratch);
    plan_fp8(p, plan);
    if (run->ranks > 1) { params_plan_segments(p, plan); }
}

void params_free_plan(Params *p) {
    zero_free(&p->zero);
    free(p->copy_offset);
    free(p->codes);
    free(p->places);
    free(p->bucket_rows);
    free(p->bucket_parts);
    free(p->ranges);
    free(p->saved);
}

static void send_decay_flags(Params *p) {
    const ParamLayout *layout = &p->run->layout;
    size_t bytes = (size_t)(p->size / PARAM_ALIGN);
    uint8_t *flags = calloc_or_die(bytes, 1);
    for (int i = 0; i < layout->count; i++) {
        const Param *q = &layout->params[i];
        int64_t begin = q->offset / PARAM_ALIGN,
                end = (q->offset + param_size(q) - 1) / PARAM_ALIGN;
        memset(flags + begin, tensor_row(q->id)->decay, (size_t)(end - begin + 1));
    }
    gpu_send(p->gpu, p->decay, flags, bytes);
    free(flags);
}

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

// The parameters with BF16 copies, in runs that lie together in both spaces.
static void send_segments(Params *p) {
    const ParamLayout *layout = &p->run->layout;
    AdamWSegment *segments = malloc_or_die((size_t)layout->count * sizeof(AdamWSegment));
    p->segment_count = p->segment_blocks = 0;
    for (int i = 0, next; i < layout->count; i = next) {
        next = i + 1;
        if (p->copy_offset[i] < 0) { continue; }
        while (next < layout->count && p->copy_offset[next] >= 0) { next++; }
        int64_t first = layout->params[i].offset;
        int64_t end = next < layout->count ? layout->params[next].offset : p->size;
        segments[p->segment_count++] = (AdamWSegment){.first = first,
                                                      .n = end - first,
                                                      .gradient = first,
                                                      .state = first,
                                                      .weights = p->copies + p->copy_offset[i],
                                                      .first_block = p->segment_blocks};
        p->segment_blocks += gpu_adamw_blocks(end - first);
    }
    gpu_send(p->gpu, p->segments, segments, (size_t)p->segment_count * sizeof(AdamWSegment));
    free(segments);
}

// The row's bucket learns of it; a tied weight stands alone.
static void note_row(Params *p, int row, int tiles, int index, bool tied) {
    int layers = p->run->config.num_layers, layer = index / LINEAR_HEAD;
    if (tied) {
        p->tied_weight = row, p->tied_tiles = tiles;
        return;
    }
    WeightRows *rows = &p->bucket_rows[layer < layers ? layer + 1 : layers + 1];
    if (rows->tiles == 0) { rows->begin = row; }
    rows->tiles += tiles;
}

void params_send_weights(Params *p) {
    const Run *run = p->run;
    Fp8Weight *rows = malloc_or_die((size_t)run->precision.count * sizeof(Fp8Weight));
    int count = 0, all = 0;
    p->tied_tiles = 0;
    memset(p->bucket_rows, 0, (size_t)run->layout.num_buckets * sizeof(WeightRows));
    for (int i = 0; i < run->precision.count; i++) {
        if (!is_fp8(run, i)) { continue; }
        const Param *w = weight_param(run, i);
        Fp8Out out = params_fp8_out(p, linear_of(&run->config, i), i / LINEAR_HEAD, OPERAND_W,
                                    p->codes[2 * i], p->codes[2 * i + 1], true);
        int tiles = gpu_fp8_weight_tiles(w->rows, w->cols);
        note_row(p, count, tiles, i, w->id == TENSOR_TOKEN_EMBEDDING);
        rows[count++] = (Fp8Weight){.out = out,
                                    .copy = run->ranks > 1 ? params_copy(p, w->id, w->layer) : NULL,
                                    .first = w->offset,
                                    .N = w->rows,
                                    .C = w->cols,
                                    .first_block = all};
        all += tiles;
    }
    if (p->tied_tiles == 0) { p->tied_weight = count; }
    p->weights.count = count;
    p->weights.tiles = all;
    p->weights.counts = p->counting;
    gpu_send(p->gpu, p->weights.rows, rows, (size_t)count * sizeof(Fp8Weight));
    free(rows);
}

int params_of_linear(const Params *p, int index) {
    return (int)(weight_param(p->run, index) - p->run->layout.params);
}

void params_weight_rows(const Params *p, int *row) {
    int count = 0;
    for (int i = 0; i < p->run->layout.count; i++) { row[i] = -1; }
    for (int i = 0; i < p->run->precision.count; i++) {
        if (is_fp8(p->run, i)) { row[weight_param(p->run, i) - p->run->layout.params] = count++; }
    }
}

void params_start(Params *p, Gpu *gpu, Comm *comm) {
    const Run *run = p->run;
    int n = p->scaling.count;
    p->gpu = gpu;
    p->comm = comm;
    send_decay_flags(p);
    send_norm_parts(p);
    if (run->ranks == 1) {
        send_segments(p);
    } else {
        params_send_segments(p);
    }
    if (!p->fp8) { return; }
    params_send_weights(p);
    float *targets = malloc_or_die((size_t)n * sizeof(float));
    uint8_t *used = malloc_or_die((size_t)n);
    Fp8Slot *slots = malloc_or_die((size_t)n * sizeof(Fp8Slot));
    for (int i = 0; i < n; i++) {
        targets[i] = fp8_slot_target(&run->precision, i);
        used[i] = (uint8_t)((fp8_slot_follows(&run->precision, i) ? SLOT_FOLLOWS : 0) |
                            (i % OPERAND_COUNT == OPERAND_W ? SLOT_WEIGHT : 0));
        slots[i] = (Fp8Slot){1.0f, 1.0f, 0.0f, 0};
    }
    fp8_fix_slot(&run->precision, &run->options, slots);
    gpu_send(p->gpu, p->scaling.targets, targets, (size_t)n * sizeof(float));
    gpu_send(p->gpu, p->scaling.used, used, (size_t)n);
    gpu_send(p->gpu, p->scaling.slots, slots, (size_t)n * sizeof(Fp8Slot));
    free(targets);
    free(used);
    free(slots);
}

void params_close(Params *p) {
    if (p->snapshot != NULL && cudaHostUnregister(p->snapshot) != cudaSuccess) {
        cudaGetLastError();
    }
    free(p->snapshot);
    free(p->snapshot_slots);
    free(p->snapshot_history);
}

// ---- looking up ---------------------------------------------------------------------------------

Bf16 *params_copy(const Params *p, TensorId id, int layer) {
    const Param *q = param_find(&p->run->layout, id, layer);
    int64_t offset = q != NULL ? p->copy_offset[q - p->run->layout.params] : -1;
    return offset >= 0 ? p->copies + offset : NULL;
}

GradientOut params_gradient(const Params *p, TensorId id, int layer, bool accumulate) {
    const Param *q = param_find(&p->run->layout, id, layer);
    if (q == NULL) { return (GradientOut){NULL, p->gradient_type, false}; }
    int64_t place = p->zero.place[q - p->run->layout.params];
    char *data = (char *)p->gradients + place * gpu_type_bytes(p->gradient_type);
    return (GradientOut){data, p->gradient_type, accumulate};
}

const uint8_t *params_codes(const Params *p, Linear linear, int layer, bool transposed) {
    return p->codes[2 * linear_index(&p->run->config, linear, layer) + transposed];
}

const float *params_scale_inv(const Params *p, Linear linear, int layer, Operand operand) {
    return &p->scaling.live[fp8_slot_index(&p->run->config, linear, layer, operand)].scale_inv;
}

Fp8Out params_fp8_out(const Params *p, Linear linear, int layer, Operand operand, uint8_t *rows,
                      uint8_t *columns, bool record) {
    const Run *run = p->run;
    int slot = fp8_slot_index(&run->config, linear, layer, operand);
    bool delayed = p->delayed && fp8_slot_follows(&run->precision, slot);
    return (Fp8Out){.rows = rows,
                    .columns = columns,
                    .type = precision_of(&run->precision, linear, layer)->type[operand],
                    .target = fp8_slot_target(&run->precision, slot),
                    .live = &p->scaling.live[slot],
                    .slot = delayed ? &p->scaling.slots[slot] : NULL,
                    .record = delayed && record,
                    .counts = record && p->counting ? &p->counts[slot] : NULL};
}

const Bf16 *params_plain_weight(const Params *p, Linear linear, int layer) {
    const Param *w = weight_param(p->run, linear_index(&p->run->config, linear, layer));
    gpu_to_bf16(p->plain, p->master + w->offset, round_up64(param_size(w), PARAM_ALIGN),
                p->gpu->stream);
    return p->plain;
}
