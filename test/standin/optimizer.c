// The kernels of the optimizer's step, and of the FP8 scaling state.
#include "values.h"

#include "../../kernels/cpu.h"
#include "../../train/model.h"
#include "../../train/precision.h"
#include "../../train/rng.h"

#include <math.h>
#include <stdlib.h>

// ---- the norm, the decision ---------------------------------------------------------------------

void gpu_sum_of_squares(StepState *state, double *scratch, const void *gradients, GpuType type,
                        int64_t n, bool accumulate, cudaStream_t stream) {
    (void)scratch, (void)stream;
    float *values = values_read(gradients, type, n);
    state->norm_squared = sum_of_squares(values, n) + (accumulate ? state->norm_squared : 0.0);
    free(values);
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

// Moment values `first` on; two values share a number.
static void write_moment(void *out, GpuType type, float *values, int64_t first, int64_t n,
                         uint64_t key) {
    if (type == TYPE_F32) {
        values_write((float *)out + first, type, values, n);
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = rng_bits32((uint32_t)rng_mix(key), (uint64_t)((first + i) & ~1));
            ((Bf16 *)out)[first + i] = stochastic_bf16(values[i], i % 2 == 0 ? bits : bits >> 16);
        }
    }
    free(values);
}

static void *element(const void *x, GpuType type, int64_t i) {
    return (char *)(uintptr_t)x + i * gpu_type_bytes(type);
}

// n parameters from `first` on, both multiples of PARAM_ALIGN.
static void update(const AdamWUpdate *u, const StepState *state, int64_t first, int64_t n) {
    uint64_t key = u->seed + 2 * (uint64_t)u->input->step;
    float *g = values_read(element(u->gradients, u->gradient_type, first), u->gradient_type, n);
    float *m = values_read(element(u->exp_avg, u->moment_type, first), u->moment_type, n);
    float *v = values_read(element(u->exp_avg_sq, u->moment_type, first), u->moment_type, n);
    if (first % PARAM_ALIGN != 0 || n % PARAM_ALIGN != 0 || first + n > u->n) {
        die("stand-in: AdamW of %lld parameters from %lld on", (long long)n, (long long)first);
    }
    for (int64_t i = 0; i < n; i += PARAM_ALIGN) {
        AdamW a = {.lr = (float)u->input->lr,
                   .beta1 = u->beta1,
                   .beta2 = u->beta2,
                   .eps = u->eps,
                   .weight_decay = u->decay[(first + i) / PARAM_ALIGN] ? u->weight_decay : 0.0f,
                   .gradient_scale = state->gradient_scale,
                   .step = state->updates};
        adamw_update(u->master + first + i, m + i, v + i, g + i, PARAM_ALIGN, a);
    }
    write_moment(u->exp_avg, u->moment_type, m, first, n, key);
    write_moment(u->exp_avg_sq, u->moment_type, v, first, n, key + 1);
    free(g);
}

// A block is PARAM_ALIGN parameters.
int gpu_adamw_blocks(int64_t n) {
    return (int)(n / PARAM_ALIGN);
}

void gpu_adamw_update(const AdamWUpdate *u, const StepState *state, cudaStream_t stream) {
    int blocks = 0;
    if (state->skipped) { return; }
    for (int i = 0; i < u->segment_count; i++) {
        const AdamWSegment *s = &u->segments[i];
        if (s->first_block != blocks) { die("stand-in: segment %d: wrong first block", i); }
        update(u, state, s->first, s->n);
        gpu_to_bf16(s->weights, u->master + s->first, s->n, stream);
        blocks += gpu_adamw_blocks(s->n);
    }
    if (blocks != u->segment_blocks) { die("stand-in: AdamW: wrong number of blocks"); }
}

void gpu_to_bf16(Bf16 *out, const float *x, int64_t n, cudaStream_t stream) {
    (void)stream;
    values_write(out, TYPE_BF16, x, n);
}

void gpu_to_float(float *out, const void *x, GpuType type, int64_t n, cudaStream_t stream) {
    (void)stream;
    float *values = values_read(x, type, n);
    values_write(out, TYPE_F32, values, n);
    free(values);
}

// ---- FP8 weights --------------------------------------------------------------------------------

typedef enum { CODES_GIVEN, CODES_MEASURED, MEASURE } CodesMode;

int gpu_fp8_weight_tiles(int N, int C) {
    return N / 16 * (C / 16);
}

static void write_weight(const Fp8Weight *w, CodesMode mode, const float *master) {
    const float *values = master + w->first;
    if (mode == MEASURE) {
        values_amax(&w->out.live->amax, values, (int64_t)w->N * w->C);
    } else {
        values_to_fp8(w->out, mode == CODES_MEASURED, values, w->N, w->C);
    }
}

// Rows `begin` on; u: updated first, unless NULL.
static void write_weights(Fp8Weights table, int begin, CodesMode mode, const float *master,
                          const AdamWUpdate *u, const StepState *state) {
    int tiles = 0;
    if (state != NULL && state->skipped) { return; }
    for (int i = begin; i < table.count; i++) {
        const Fp8Weight *w = &table.rows[i];
        if (w->first_block != table.rows[begin].first_block + tiles) {
            die("stand-in: weight %d: wrong first tile", i);
        }
        if ((w->out.counts != NULL) != table.counts) { die("stand-in: weight %d: counts", i); }
        if (u != NULL) { update(u, state, w->first, (int64_t)w->N * w->C); }
        write_weight(w, mode, master);
        tiles += gpu_fp8_weight_tiles(w->N, w->C);
    }
    if (tiles != table.tiles) { die("stand-in: FP8 weights: wrong number of tiles"); }
}

void gpu_adamw_update_fp8(Fp8Weights weights, bool measured, const AdamWUpdate *u,
                          const StepState *state, cudaStream_t stream) {
    (void)stream;
    write_weights(weights, 0, measured ? MEASURE : CODES_GIVEN, u->master, u, state);
}

void gpu_quantize_weights(Fp8Weights weights, int begin, bool measured, const float *master,
                          const StepState *state, cudaStream_t stream) {
    (void)stream;
    write_weights(weights, begin, measured ? CODES_MEASURED : CODES_GIVEN, master, NULL, state);
}

void gpu_measure_weights(Fp8Weights weights, int begin, const float *master, const StepState *state,
                         cudaStream_t stream) {
    (void)stream;
    write_weights(weights, begin, MEASURE, master, NULL, state);
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

static bool is_weight(int slot) {
    return slot % OPERAND_COUNT == OPERAND_W;
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
        if (!s->used[i]) { continue; }
        if (!state->skipped) {
            fp8_slot_update(&s->slots[i], s->history + (int64_t)i * s->history_length,
                            s->history_length, s->targets[i], s->most_recent, input->renew_scale);
        } else if (!is_weight(i)) {
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
        if (!is_weight(i)) { s->slots[i].amax = 0.0f; }
    }
}

void gpu_fp8_clear_measured(const Fp8Scaling *s, cudaStream_t stream) {
    (void)stream;
    for (int i = 0; i < s->count; i++) { s->live[i].amax = 0.0f; }
}
