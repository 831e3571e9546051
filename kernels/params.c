#include "params.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

// Every parameter gets a place among the BF16 copies, unless it is the weight of an FP8 layer alone
// (a tied embedding is looked up in BF16 too). Returns the copies' size.
static int64_t place_copies(Params *p) {
    const ParamLayout *layout = &p->run->layout;
    int64_t size = 0;
    p->copy_offset = calloc_or_die((size_t)layout->count, sizeof(int64_t));
    for (int i = 0; i < p->run->precision.count; i++) {
        const Param *w = weight_param(p->run, i);
        if (is_fp8(p->run, i) && w->id != TENSOR_TOKEN_EMBEDDING) {
            p->copy_offset[w - layout->params] = -1;
        }
    }
    for (int i = 0; i < layout->count; i++) {
        if (p->copy_offset[i] < 0) { continue; }
        p->copy_offset[i] = size;
        size += round_up64(param_size(&layout->params[i]), PARAM_ALIGN);
    }
    return size;
}

static void plan_fp8(Params *p, Plan *plan) {
    const Run *run = p->run;
    int count = fp8_slot_count(&run->config);
    p->codes = calloc_or_die(2 * (size_t)run->precision.count, sizeof(uint8_t *));
    p->scaling.count = count;
    p->scaling.history_length = run->precision.history_length;
    p->scaling.delayed = p->delayed;
    p->scaling.most_recent = run->precision.most_recent;
    if (!p->fp8) { return; }
    for (int i = 0; i < run->precision.count; i++) {
        if (!is_fp8(run, i)) { continue; }
        int64_t size = param_size(weight_param(run, i));
        plan_buffer(plan, "weights", "FP8 weights", size, (void **)&p->codes[2 * i]);
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

void params_plan(Params *p, const Run *run, Plan *plan) {
    const Options *o = &run->options;
    *p = (Params){.run = run, .size = run->layout.size};
    bool sums = run_micro_batches(run) > 1; // one micro-batch's gradients need no wider sum
    bool wide = o->grad_accum_dtype == GRADIENT_FP32 ||
                (o->grad_accum_dtype == GRADIENT_AUTO && sums);
    p->gradient_type = wide ? TYPE_F32 : TYPE_BF16;
    p->moment_type = o->adam_dtype == STATE_FP32 ? TYPE_F32 : TYPE_BF16;
    p->fp8 = precision_fp8_share(&run->precision) > 0;
    p->delayed = p->fp8 && run->precision.recipe == FP8_RECIPE_DELAYED;
    int64_t moment_bytes = p->size * gpu_type_bytes(p->moment_type);
    PLAN(plan, "weights", "weights, BF16", place_copies(p), p->copies);
    PLAN(plan, "weights", "master weights", p->size, p->master);
    plan_buffer(plan, "gradients", "gradients", p->size * gpu_type_bytes(p->gradient_type),
                &p->gradients);
    plan_buffer(plan, "optimizer", "first moment", moment_bytes, &p->exp_avg);
    plan_buffer(plan, "optimizer", "second moment", moment_bytes, &p->exp_avg_sq);
    PLAN(plan, "optimizer", "decay flags", p->size / PARAM_ALIGN, p->decay);
    PLAN(plan, "optimizer", "segments", run->layout.count, p->segments);
    PLAN(plan, "optimizer", "step state", 1, p->state);
    PLAN(plan, "optimizer", "norm scratch", SUM_BLOCKS, p->norm_scratch);
    plan_fp8(p, plan);
}

int64_t params_largest_coded(const Params *p) {
    int64_t largest = 0;
    for (int i = 0; i < p->run->layout.count; i++) {
        int64_t size = round_up64(param_size(&p->run->layout.params[i]), PARAM_ALIGN);
        if (p->copy_offset[i] < 0) { largest = max64(largest, size); }
    }
    return largest;
}

void params_free_plan(Params *p) {
    free(p->copy_offset);
    free(p->codes);
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
                                                      .weights = p->copies + p->copy_offset[i],
                                                      .first_block = p->segment_blocks};
        p->segment_blocks += gpu_adamw_blocks(end - first);
    }
    gpu_send(p->gpu, p->segments, segments, (size_t)p->segment_count * sizeof(AdamWSegment));
    free(segments);
}

static void send_weights_table(Params *p) {
    const Run *run = p->run;
    Fp8Weight *rows = malloc_or_die((size_t)run->precision.count * sizeof(Fp8Weight));
    int count = 0, tiles = 0;
    p->tied_weight = -1;
    for (int i = 0; i < run->precision.count; i++) {
        if (!is_fp8(run, i)) { continue; }
        const Param *w = weight_param(run, i);
        bool tied = p->copy_offset[w - run->layout.params] >= 0;
        if (tied) { p->tied_weight = count, p->tied_tile = tiles; }
        Fp8Out out = params_fp8_out(p, linear_of(&run->config, i), i / LINEAR_HEAD, OPERAND_W,
                                    p->codes[2 * i], p->codes[2 * i + 1], true);
        rows[count++] = (Fp8Weight){out, w->offset, w->rows, w->cols, tiles};
        tiles += gpu_fp8_weight_tiles(w->rows, w->cols);
    }
    if (p->tied_weight < 0) { p->tied_weight = count, p->tied_tile = tiles; }
    p->weights.count = count;
    p->weights.tiles = tiles;
    p->weights.counts = p->counting;
    gpu_send(p->gpu, p->weights.rows, rows, (size_t)count * sizeof(Fp8Weight));
    free(rows);
}

void params_start(Params *p, Gpu *gpu) {
    const Run *run = p->run;
    int n = p->scaling.count;
    p->gpu = gpu;
    send_decay_flags(p);
    send_segments(p);
    if (!p->fp8) { return; }
    send_weights_table(p);
    float *targets = malloc_or_die((size_t)n * sizeof(float));
    uint8_t *used = malloc_or_die((size_t)n);
    Fp8Slot *slots = malloc_or_die((size_t)n * sizeof(Fp8Slot));
    for (int i = 0; i < n; i++) {
        targets[i] = fp8_slot_target(&run->precision, i);
        used[i] = fp8_slot_follows(&run->precision, i);
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
    char *data = (char *)p->gradients + q->offset * gpu_type_bytes(p->gradient_type);
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

void params_plain_weight(const Params *p, Linear linear, int layer, Bf16 *out) {
    const Param *w = weight_param(p->run, linear_index(&p->run->config, linear, layer));
    gpu_to_bf16(out, p->master + w->offset, round_up64(param_size(w), PARAM_ALIGN), p->gpu->stream);
}

// ---- the optimizer's step -----------------------------------------------------------------------

static AdamWUpdate update_of(const Params *p, const StepInput *input) {
    const Options *o = &p->run->options;
    return (AdamWUpdate){
        .master = p->master,
        .exp_avg = p->exp_avg,
        .exp_avg_sq = p->exp_avg_sq,
        .moment_type = p->moment_type,
        .gradients = p->gradients,
        .gradient_type = p->gradient_type,
        .decay = p->decay,
        .n = p->size,
        .input = input,
        .beta1 = (float)o->adam_beta1,
        .beta2 = (float)o->adam_beta2,
        .eps = (float)o->adam_eps,
        .weight_decay = (float)o->weight_decay,
        .seed = (uint64_t)o->seed,
    };
}

// The parameters with BF16 copies.
static void update_copies(Params *p, const StepInput *input) {
    AdamWUpdate u = update_of(p, input);
    u.segments = p->segments;
    u.segment_count = p->segment_count;
    u.segment_blocks = p->segment_blocks;
    gpu_adamw_update(&u, p->state, p->gpu->stream);
}

// The weights of FP8 layers: in one pass by the scales that were just renewed, or measured in two.
// A tied embedding, the last, has been updated with the copies.
static void update_codes(Params *p, const StepInput *input) {
    cudaStream_t stream = p->gpu->stream;
    AdamWUpdate u = update_of(p, input);
    Fp8Weights updated = p->weights, tied = p->weights;
    updated.count = p->tied_weight;
    updated.tiles = p->tied_tile;
    tied.tiles -= p->tied_tile;
    if (updated.count > 0) { gpu_adamw_update_fp8(updated, p->measuring, &u, p->state, stream); }
    if (p->measuring) {
        if (tied.tiles > 0) {
            gpu_measure_weights(tied, p->tied_weight, p->master, p->state, stream);
        }
        gpu_quantize_weights(p->weights, 0, true, p->master, p->state, stream);
    } else if (tied.tiles > 0) {
        gpu_quantize_weights(tied, p->tied_weight, false, p->master, p->state, stream);
    }
}

void params_clear_measured(const Params *p) {
    gpu_fp8_clear_measured(&p->scaling, p->gpu->stream);
}

void params_forget_ranges(const Params *p) {
    if (p->delayed) { gpu_fp8_forget_ranges(&p->scaling, p->gpu->stream); }
}

void params_begin_counting(Params *p) {
    size_t bytes = (size_t)p->scaling.count * sizeof(Fp8Counts);
    CUDA_CHECK(cudaMemsetAsync(p->counts, 0, bytes, p->gpu->stream));
    p->counting = true;
    send_weights_table(p);
}

void params_end_counting(Params *p, Fp8Counts *host) {
    p->counting = false;
    send_weights_table(p);
    gpu_fetch(p->gpu, host, p->counts, (size_t)p->scaling.count * sizeof(Fp8Counts));
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
}

void params_note_step(Params *p, const StepState *state) {
    if (p->delayed) { p->measuring = state->unmeasured > 0; }
}

void params_update(Params *p, const StepInput *input) {
    const Options *o = &p->run->options;
    cudaStream_t stream = p->gpu->stream;
    gpu_family(p->gpu, FAMILY_OPTIMIZER);
    gpu_sum_of_squares(p->state, p->norm_scratch, p->gradients, p->gradient_type, p->size, false,
                       stream);
    gpu_decide_step(p->state, (double)o->global_batch_size * o->seq_length, (float)o->clip_grad,
                    stream);
    if (p->fp8) {
        gpu_fp8_update(&p->scaling, p->state, input, stream);
        if (p->measuring) { gpu_fp8_clear_measured(&p->scaling, stream); }
    }
    update_copies(p, input);
    if (p->fp8) { update_codes(p, input); }
}
