// The kernels of the optimizer's step, and of the FP8 scaling state.
#include "values.h"

#include "../../base/rng.h"
#include "../../kernels/cpu.h"
#include "../../model/model.h"
#include "../../model/precision.h"

#include <math.h>
#include <stdlib.h>

// ---- the norm, the decision ---------------------------------------------------------------------

// Elements of the parameter space go by PARAM_ALIGN.
static void check_part(int64_t first, int64_t n) {
    if (first % PARAM_ALIGN != 0 || n % PARAM_ALIGN != 0 || n <= 0) {
        die("stand-in: a part of %lld elements from %lld on", (long long)n, (long long)first);
    }
}

static void *element(const void *x, GpuType type, int64_t i) {
    return (char *)(uintptr_t)x + i * gpu_type_bytes(type);
}

void gpu_sum_of_squares(StepState *state, double *scratch, const void *gradients, GpuType type,
                        const GradientPart *parts, int count, cudaStream_t stream) {
    (void)stream;
    state->norm_squared = 0.0;
    for (int i = 0; i < count; i++) {
        check_part(parts[i].first, parts[i].n);
        float *values = values_read(element(gradients, type, parts[i].first), type, parts[i].n);
        scratch[i] = sum_of_squares(values, parts[i].n);
        state->norm_squared += scratch[i];
        free(values);
    }
}

void gpu_decide_step(StepState *state, double tokens, float clip, cudaStream_t stream) {
    (void)stream;
    state->loss /= tokens;
    double norm = sqrt(state->norm_squared);
    bool finite = isfinite(state->loss) && isfinite(norm);
    state->gradient_scale = clip > 0.0f && norm > clip ? (float)(clip / norm) : 1.0f;
    state->skipped = !finite;
    state->updates += finite;
    state->skips += !finite;
}

// ---- AdamW --------------------------------------------------------------------------------------

static Bf16 stochastic_bf16(float x, uint32_t random) {
    uint32_t rounded = float_bits(x) + (random & 0xffffu);
    return isfinite(float_from_bits(rounded)) ? (Bf16)(rounded >> 16) : bf16_encode(x);
}

// n values, of the parameters from `first` on; two of them share a random number.
static void write_moment(void *out, GpuType type, float *values, int64_t first, int64_t n,
                         uint64_t key) {
    if (type == TYPE_F32) {
        values_write(out, type, values, n);
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = rng_bits32((uint32_t)rng_mix(key), (uint64_t)((first + i) & ~1));
            ((Bf16 *)out)[i] = stochastic_bf16(values[i], i % 2 == 0 ? bits : bits >> 16);
        }
    }
    free(values);
}

static void update_segment(const AdamWUpdate *u, const StepState *state, const AdamWSegment *s) {
    uint64_t key = u->seed + 2 * (uint64_t)u->input->step;
    void *exp_avg = element(u->exp_avg, u->moment_type, s->state);
    void *exp_avg_sq = element(u->exp_avg_sq, u->moment_type, s->state);
    float *g = values_read(element(u->gradients, u->gradient_type, s->gradient), u->gradient_type,
                           s->n);
    float *m = values_read(exp_avg, u->moment_type, s->n);
    float *v = values_read(exp_avg_sq, u->moment_type, s->n);
    check_part(s->first, s->n);
    for (int64_t i = 0; i < s->n; i += PARAM_ALIGN) {
        bool decays = u->decay[(s->first + i) / PARAM_ALIGN];
        AdamW a = {.lr = (float)u->input->lr,
                   .beta1 = u->beta1,
                   .beta2 = u->beta2,
                   .eps = u->eps,
                   .weight_decay = decays ? u->weight_decay : 0.0f,
                   .gradient_scale = state->gradient_scale,
                   .step = state->updates};
        adamw_update(u->master + s->state + i, m + i, v + i, g + i, PARAM_ALIGN, a);
    }
    write_moment(exp_avg, u->moment_type, m, s->first, s->n, key);
    write_moment(exp_avg_sq, u->moment_type, v, s->first, s->n, key + 1);
    free(g);
}

// A block is PARAM_ALIGN parameters.
int gpu_adamw_blocks(int64_t n) {
    return (int)(n / PARAM_ALIGN);
}

// The segments' tables must say how their blocks lie.
static void check_segments(const AdamWUpdate *u) {
    int blocks = 0;
    for (int i = 0; i < u->segment_count; i++) {
        if (u->segments[i].first_block != blocks) { die("stand-in: segment %d: first block", i); }
        blocks += gpu_adamw_blocks(u->segments[i].n);
    }
    if (blocks != u->segment_blocks) { die("stand-in: AdamW: number of blocks"); }
}

void gpu_adamw_update(const AdamWUpdate *u, const StepState *state, cudaStream_t stream) {
    check_segments(u);
    for (int i = 0; i < u->segment_count && !state->skipped; i++) {
        const AdamWSegment *s = &u->segments[i];
        update_segment(u, state, s);
        gpu_to_bf16(s->weights, u->master + s->state, s->n, stream);
    }
}

// The two kernels that are also launched on the stream of the collectives.
typedef struct {
    void *out;
    const void *x;
    GpuType from, to;
    int64_t n;
} Conversion;

static void convert(void *argument) {
    Conversion *c = argument;
    float *values = values_read(c->x, c->from, c->n);
    values_write(c->out, c->to, values, c->n);
    free(values);
    free(c);
}

static void enqueue_conversion(Conversion c, cudaStream_t stream) {
    Conversion *kept = malloc_or_die(sizeof(*kept));
    *kept = c;
    standin_enqueue(stream, convert, kept);
}

void gpu_to_bf16(Bf16 *out, const float *x, int64_t n, cudaStream_t stream) {
    enqueue_conversion((Conversion){out, x, TYPE_F32, TYPE_BF16, n}, stream);
}

void gpu_to_float(float *out, const void *x, GpuType type, int64_t n, cudaStream_t stream) {
    enqueue_conversion((Conversion){out, x, type, TYPE_F32, n}, stream);
}

// ---- FP8 weights --------------------------------------------------------------------------------

int gpu_fp8_weight_tiles(int N, int C) {
    return N / 16 * (C / 16);
}

// n weights, rounded to BF16, as floats to be freed.
static float *rounded_weights(const void *weights, GpuType type, int64_t n) {
    float *values = values_read(weights, type, n);
    round_to_bf16(values, values, n);
    return values;
}

// Row i of those that a call from `begin` on is about, or NULL after the last.
static const Fp8Weight *next_weight(const Fp8Weights *table, int begin, int i) {
    int tiles = 0;
    for (int k = begin; k < i; k++) {
        tiles += gpu_fp8_weight_tiles(table->rows[k].N, table->rows[k].C);
    }
    if (tiles == table->tiles) { return NULL; }
    if (tiles > table->tiles || i >= table->count) { die("stand-in: FP8 weights: tiles"); }
    const Fp8Weight *w = &table->rows[i];
    if (w->first_block != table->rows[begin].first_block + tiles) {
        die("stand-in: FP8 weight %d: first tile", i);
    }
    if ((w->out.counts != NULL) != table->counts) { die("stand-in: FP8 weight %d: counts", i); }
    return w;
}

// u: updated first, unless NULL.
static void write_weights(Fp8Weights table, int begin, PartsMode mode, const float *master,
                          const AdamWUpdate *u, const StepState *state) {
    const Fp8Weight *w;
    if (state != NULL && state->skipped) { return; }
    for (int i = begin; (w = next_weight(&table, begin, i)) != NULL; i++) {
        int64_t n = (int64_t)w->N * w->C;
        AdamWSegment whole = {.first = w->first, .n = n, .gradient = w->first, .state = w->first};
        if (u != NULL) { update_segment(u, state, &whole); }
        float *values = master != NULL ? rounded_weights(master + w->first, TYPE_F32, n)
                                       : rounded_weights(w->copy, TYPE_BF16, n);
        if (mode == PARTS_MEASURE) {
            values_amax(&w->out.live->amax, values, n);
        } else {
            values_to_fp8(w->out, mode == PARTS_MEASURED, values, w->N, w->C);
        }
        free(values);
    }
}

void gpu_adamw_update_fp8(Fp8Weights weights, bool measured, const AdamWUpdate *u,
                          const StepState *state, cudaStream_t stream) {
    (void)stream;
    write_weights(weights, 0, measured ? PARTS_MEASURE : PARTS_GIVEN, u->master, u, state);
}

void gpu_quantize_weights(Fp8Weights weights, int begin, bool measured, const float *master,
                          const StepState *state, cudaStream_t stream) {
    (void)stream;
    write_weights(weights, begin, measured ? PARTS_MEASURED : PARTS_GIVEN, master, NULL, state);
}

void gpu_measure_weights(Fp8Weights weights, int begin, const float *master, const StepState *state,
                         cudaStream_t stream) {
    (void)stream;
    write_weights(weights, begin, PARTS_MEASURE, master, NULL, state);
}

// ---- parts of weights ---------------------------------------------------------------------------

// A segment that is part of an FP8 weight.
static void write_part(const AdamWUpdate *u, const Fp8Weight *w, const AdamWSegment *s,
                       PartsMode mode) {
    Fp8Out out = w->out;
    int64_t within = s->first - w->first;
    if (within < 0 || within + s->n > (int64_t)w->N * w->C) {
        die("stand-in: a segment from %lld on is no part of weight %d", (long long)s->first,
            s->weight);
    }
    float *values = rounded_weights(u->master + s->state, TYPE_F32, s->n);
    out.rows += within;
    if (mode == PARTS_MEASURE) {
        values_amax(&out.live->amax, values, s->n);
    } else {
        float scale = mode == PARTS_MEASURED ? values_measured_scale(out) : out.live->scale;
        values_encode(out, scale, values, s->n);
    }
    if (mode == PARTS_GIVEN && out.record) { values_amax(&out.slot->amax, values, s->n); }
    free(values);
}

static void write_parts(const AdamWUpdate *u, const Fp8Weights *weights, PartsMode mode,
                        bool updates, const StepState *state) {
    bool copies = updates || (mode == PARTS_MEASURED && state == NULL);
    check_segments(u);
    if (state != NULL && state->skipped) { return; }
    for (int i = 0; i < u->segment_count; i++) {
        const AdamWSegment *s = &u->segments[i];
        if (updates) { update_segment(u, state, s); }
        if (s->weights == NULL) {
            if (s->weight < 0 || s->weight >= weights->count) { die("stand-in: segment %d", i); }
            write_part(u, &weights->rows[s->weight], s, mode);
        } else if (copies) {
            values_write(s->weights, TYPE_BF16, u->master + s->state, s->n);
        }
    }
}

void gpu_adamw_update_parts(const AdamWUpdate *u, const Fp8Weights *weights, PartsMode mode,
                            const StepState *state, cudaStream_t stream) {
    (void)stream;
    write_parts(u, weights, mode, true, state);
}

void gpu_publish_parts(const AdamWUpdate *u, const Fp8Weights *weights, PartsMode mode,
                       const StepState *state, cudaStream_t stream) {
    (void)stream;
    write_parts(u, weights, mode, false, state);
}

void gpu_announce_scales(const Fp8Weights *weights, const StepState *state, cudaStream_t stream) {
    (void)stream;
    if (state != NULL && state->skipped) { return; }
    for (int i = 0; i < weights->count; i++) {
        const Fp8Weight *w = &weights->rows[i];
        if (w->copy == NULL) { values_announce_scale(w->out); }
    }
}

void gpu_transpose_weights(Fp8Weights weights, int begin, cudaStream_t stream) {
    const Fp8Weight *w;
    (void)stream;
    for (int i = begin; (w = next_weight(&weights, begin, i)) != NULL; i++) {
        values_transpose(w->out, w->N, w->C);
    }
}

// ---- operands, scaling --------------------------------------------------------------------------

void gpu_quantize(Fp8Out out, bool measured, GradientOut sums, const Bf16 *x, float *scratch, int M,
                  int N, cudaStream_t stream) {
    float *values = values_read(x, TYPE_BF16, (int64_t)M * N);
    values_to_fp8(out, measured, values, M, N);
    free(values);
    if (sums.data != NULL) { gpu_column_sums(sums, x, scratch, M, N, stream); }
}

void gpu_amax(float *amax, const void *x, GpuType type, int64_t n, cudaStream_t stream) {
    (void)stream;
    float *values = values_read(x, type, n);
    values_amax(amax, values, n);
    free(values);
}

static void make_live(const Fp8Scaling *s, int i) {
    s->live[i].scale = s->slots[i].scale;
    s->live[i].scale_inv = s->slots[i].scale_inv;
}

void gpu_fp8_update(const Fp8Scaling *s, StepState *state, const StepInput *input,
                    cudaStream_t stream) {
    (void)stream;
    state->unmeasured = 0;
    for (int i = 0; i < s->count && s->delayed; i++) {
        if (!(s->used[i] & SLOT_FOLLOWS)) { continue; }
        if (!state->skipped) {
            fp8_slot_update(&s->slots[i], s->history + (int64_t)i * s->history_length,
                            s->history_length, s->targets[i], s->most_recent, input->renew_scale);
        } else if (!(s->used[i] & SLOT_WEIGHT)) {
            s->slots[i].amax = 0.0f;
        }
        if (s->slots[i].count > 0) {
            make_live(s, i);
        } else {
            state->unmeasured++;
        }
    }
}

void gpu_fp8_load_scales(const Fp8Scaling *s, cudaStream_t stream) {
    (void)stream;
    for (int i = 0; i < s->count; i++) { make_live(s, i); }
}

void gpu_fp8_forget_ranges(const Fp8Scaling *s, cudaStream_t stream) {
    (void)stream;
    for (int i = 0; i < s->count; i++) {
        if (!(s->used[i] & SLOT_WEIGHT)) { s->slots[i].amax = 0.0f; }
    }
}

void gpu_fp8_clear_measured(const Fp8Scaling *s, cudaStream_t stream) {
    (void)stream;
    for (int i = 0; i < s->count; i++) { s->live[i].amax = 0.0f; }
}
