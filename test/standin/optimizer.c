// Stand-ins for the kernels of the optimizer's step and of the FP8 scaling state.
#include "values.h"

#include "../../base/rng.h"
#include "../../model/model.h"

#include <math.h>

// ---- the norm, the decision ---------------------------------------------------------------------

// Parts of the parameter space are multiples of PARAM_ALIGN.
static void check_part(int64_t first, int64_t n) {
    if (first % PARAM_ALIGN != 0 || n % PARAM_ALIGN != 0 || n <= 0) {
        die("stand-in: a part of %lld elements from %lld on", (long long)n, (long long)first);
    }
}

static void *element(const void *x, GpuType type, int64_t i) {
    return (char *)(uintptr_t)x + i * gpu_type_bytes(type);
}

void gpu_sum_of_squares(Gpu *gpu, StepState *state, const StepInput *input, const double *loss_sum,
                        double *scratch, const void *gradients, GpuType type,
                        const GradientPart *parts, int count) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    state->stop = input->stop;
    state->loss_sum = state->own_loss_sum = *loss_sum;
    state->norm_squared = 0.0;
    for (int i = 0; i < count; i++) {
        check_part(parts[i].first, parts[i].n);
        FREED float *g = values_read(element(gradients, type, parts[i].first), type, parts[i].n);
        scratch[i] = sum_of_squares(g, parts[i].n);
        state->norm_squared += scratch[i];
    }
}

void gpu_decide_step(Gpu *gpu, StepState *state, const StepInput *input, double tokens,
                     float clip) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    double factor = tokens / input->targets;
    double loss = state->loss_sum / input->targets;
    state->norm_squared *= factor * factor;
    double norm = sqrt(state->norm_squared);
    state->gradient_scale = (float)(clip > 0.0f && norm > clip ? clip / norm * factor : factor);
    state->skipped = step_skip(&state->window, input->sigma, input->skip, loss, norm);
    state->updates += state->skipped == SKIP_NONE;
}

// ---- AdamW --------------------------------------------------------------------------------------

// Writes a moment of a segment's parameters, rounded as its type says.
static void write_moment(void *out, uint16_t *scales, GpuType type, Moment which, float *values,
                         int64_t n, MomentRounding rounding) {
    if (type == TYPE_MOMENT8) {
        moment_encode(out, scales, which, values, n, &rounding);
        return;
    }
    if (type == TYPE_BF16) { moment_round_bf16(values, n, rounding); }
    values_write(out, type, values, n);
}

static float *read_moment(const void *x, const uint16_t *scales, GpuType type, Moment which,
                          int64_t n) {
    if (type != TYPE_MOMENT8) { return values_read(x, type, n); }
    float *values = values_new(n);
    moment_decode(values, which, x, scales, 0, n);
    return values;
}

static void update_segment(const AdamWUpdate *u, const StepState *state, const AdamWSegment *s) {
    const GpuType type = u->moment_type;
    const uint32_t key = moment_key(u->seed, u->input->step, MOMENT_FIRST);
    const uint32_t key_sq = moment_key(u->seed, u->input->step, MOMENT_SECOND);
    float lr = (float)u->input->lr * s->lr_mult;
    check_part(s->first, s->n);
    FREED float *g = values_read(element(u->gradients, u->gradient_type, s->gradient),
                                 u->gradient_type, s->n);
    if (s->muon) {
        muon_update(s->master, g, s->n, lr, s->weight_decay);
        return;
    }
    FREED float *m = read_moment(s->exp_avg, s->exp_avg_scales, type, MOMENT_FIRST, s->n);
    FREED float *v = read_moment(s->exp_avg_sq, s->exp_avg_sq_scales, type, MOMENT_SECOND, s->n);
    AdamW a = {.lr = lr,
               .beta1 = u->beta1,
               .beta2 = u->beta2,
               .eps = u->eps,
               .weight_decay = s->weight_decay,
               .gradient_scale = state->gradient_scale,
               .floor = u->floor,
               .step = state->updates};
    adamw_update(s->master, m, v, g, s->n, a);
    write_moment(s->exp_avg, s->exp_avg_scales, type, MOMENT_FIRST, m, s->n,
                 (MomentRounding){s->first, key});
    write_moment(s->exp_avg_sq, s->exp_avg_sq_scales, type, MOMENT_SECOND, v, s->n,
                 (MomentRounding){s->first, type == TYPE_MOMENT8 ? key : key_sq});
}

// A block is PARAM_ALIGN parameters.
int gpu_adamw_blocks(int64_t n) {
    return (int)(n / PARAM_ALIGN);
}

// Dies where the table of segments numbers its blocks wrongly.
static void check_segments(const AdamWUpdate *u) {
    int blocks = 0;
    for (int i = 0; i < u->segment_count; i++) {
        if (u->segments[i].first_block != blocks) { die("stand-in: segment %d: first block", i); }
        blocks += gpu_adamw_blocks(u->segments[i].n);
    }
    if (blocks != u->segment_blocks) { die("stand-in: AdamW: number of blocks"); }
}

// ---- Muon ---------------------------------------------------------------------------------------

void gpu_muon_momentum(Gpu *gpu, const AdamWUpdate *u, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    check_segments(u);
    for (int i = 0; i < u->segment_count && !state->skipped; i++) {
        const AdamWSegment *s = &u->segments[i];
        const GpuType type = momentum_type(u->moment_type);
        if (!s->muon) { continue; }
        void *gradients = element(u->gradients, u->gradient_type, s->gradient);
        FREED float *g = values_read(gradients, u->gradient_type, s->n);
        FREED float *m = values_read(s->exp_avg, type, s->n);
        muon_momentum(g, m, s->n, u->momentum, state->gradient_scale);
        values_write(gradients, u->gradient_type, g, s->n);
        uint32_t key = moment_key(u->seed, u->input->step, MOMENT_FIRST);
        write_moment(s->exp_avg, NULL, type, MOMENT_FIRST, m, s->n,
                     (MomentRounding){s->first, key});
    }
}

void gpu_muon_normalize(Gpu *gpu, Bf16 *x, double *partials, MuonMatrices m) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    for (int i = 0; i < m.count; i++) {
        FREED float *g = values_read(element(m.gradients, m.type, m.offsets[i]), m.type, m.n);
        partials[i * MUON_PARTS] = sum_of_squares(g, m.n);
        float inverse = 1.0f / ((float)sqrt(partials[i * MUON_PARTS]) + MUON_EPSILON);
        for (int64_t k = 0; k < m.n; k++) { g[k] *= inverse; }
        values_write(x + i * m.n, TYPE_BF16, g, m.n);
    }
}

void gpu_muon_store(Gpu *gpu, MuonMatrices m, const Bf16 *x) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    for (int i = 0; i < m.count; i++) {
        FREED float *g = bf16_read(x + i * m.n, m.n);
        values_write(element(m.gradients, m.type, m.offsets[i]), m.type, g, m.n);
    }
}

void gpu_to_bf16(Gpu *gpu, Bf16 *out, const float *x, int64_t n) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    values_write(out, TYPE_BF16, x, n);
}

// ---- FP8 weights --------------------------------------------------------------------------------

// Writes a segment's FP8 weights (codes), or measures their amax alone.
static void write_fp8(const AdamWUpdate *u, const AdamWSegment *s, bool measures, bool codes) {
    const Fp8Weight *w = &u->weights[s->weight];
    FREED float *values = values_read(s->master, TYPE_F32, s->n);
    round_to_bf16(values, values, s->n);
    for (int64_t i = 0; i < s->n && u->scaling == SCALE_BLOCK_128X128; i++) {
        // one element at a time: a segment may begin anywhere
        int row = (int)((s->weight_offset + i) / w->columns),
            column = (int)((s->weight_offset + i) % w->columns);
        float *amax = w->amax +
                      fp8_scale_index(SCALE_BLOCK_128X128, w->rows, w->columns, row, column);
        float scale = fp8_block_scale(*amax, w->target, w->power_of_two);
        if (measures) { values_amax(amax, values + i, 1); }
        if (codes) { values_encode(s->fp8 + i, FP8_E4M3, scale, values + i, 1); }
    }
    if (u->scaling == SCALE_BLOCK_128X128) { return; }
    if (codes) { values_encode(s->fp8, FP8_E4M3, w->scale->scale, values, s->n); }
    if (measures) { values_amax(&w->scale->amax, values, s->n); }
}

static void write_segments(const AdamWUpdate *u, bool updates, bool measures, bool codes,
                           const StepState *state) {
    check_segments(u);
    if (state != NULL && state->skipped) { return; }
    for (int i = 0; i < u->segment_count; i++) {
        const AdamWSegment *s = &u->segments[i];
        if ((s->bf16 == NULL) == (s->fp8 == NULL)) { die("stand-in: segment %d: forms", i); }
        if (updates) { update_segment(u, state, s); }
        if (s->fp8 != NULL) {
            write_fp8(u, s, measures, codes);
        } else if (updates || (codes && state == NULL)) {
            values_write(s->bf16, TYPE_BF16, s->master, s->n);
        }
    }
}

void gpu_adamw(Gpu *gpu, const AdamWUpdate *u, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    write_segments(u, true, true, u->scaling == SCALE_DELAYED, state);
}

void gpu_measure_weights(Gpu *gpu, const AdamWUpdate *u, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    write_segments(u, false, true, false, state);
}

void gpu_quantize_weights(Gpu *gpu, const AdamWUpdate *u, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    write_segments(u, false, false, true, state);
}

static void set_block_scales(const Fp8Weight *w) {
    for (int row = 0; row < w->rows; row += FP8_BLOCK) {
        for (int column = 0; column < w->columns; column += FP8_BLOCK) {
            int64_t at = fp8_scale_index(SCALE_BLOCK_128X128, w->rows, w->columns, row, column);
            float inverse = 1.0f / fp8_block_scale(w->amax[at], w->target, w->power_of_two);
            w->inverse[at] = inverse;
            w->inverse_t[fp8_scale_index(SCALE_BLOCK_128X128, w->columns, w->rows, column, row)] =
                inverse;
        }
    }
}

void gpu_set_weight_scales(Gpu *gpu, const AdamWUpdate *u, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    for (int i = 0; i < u->weight_count && (state == NULL || !state->skipped); i++) {
        const Fp8Weight *w = &u->weights[i];
        if (u->scaling == SCALE_BLOCK_128X128) {
            set_block_scales(w);
        } else if (u->scaling == SCALE_CURRENT || !fp8_scale_known(w->scale)) {
            values_set_scale(w->scale, w->target);
        }
    }
}

// ---- the scales of all tensors ------------------------------------------------------------------

void gpu_fp8_update(Gpu *gpu, const Fp8Table *t, const StepState *state) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    for (int i = 0; i < t->count; i++) {
        if (!(t->kinds[i] & SLOT_UPDATED)) { continue; }
        if (!state->skipped) {
            fp8_scale_update(&t->scales[i], t->history + (int64_t)i * t->length, t->length,
                             t->targets[i]);
        } else if (!(t->kinds[i] & SLOT_WEIGHT)) {
            t->scales[i].amax = 0.0f;
        }
    }
}

void gpu_fp8_clear_amaxes(Gpu *gpu, const Fp8Table *t) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    for (int i = 0; i < t->count; i++) { t->scales[i].amax = 0.0f; }
}

// ---- hashes, the time ---------------------------------------------------------------------------

void gpu_hash(Gpu *gpu, uint64_t *sum, const void *data, int64_t bytes, int64_t first) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    if (bytes % 8 != 0) { die("stand-in: a hash of %lld bytes", (long long)bytes); }
    *sum += hash_words(data, bytes, first);
}

// Where a test sets the clock, its time alone.
void gpu_stamp(Gpu *gpu, uint64_t *nanoseconds) {
    *nanoseconds = (uint64_t)(1e9 * (standin_seconds > 0 ? standin_seconds : wall_seconds()));
}
