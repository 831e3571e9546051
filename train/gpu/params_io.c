// The parameters' way from a checkpoint, or from nothing, to the device, and back.
#include "params.h"

#include <stdlib.h>

static int64_t saved_elements(const Params *p) {
    int64_t n = 0;
    for (int i = 0; i < p->num_saved; i++) { n += p->saved[i].end - p->saved[i].begin; }
    return n;
}

// Rank 0's has the model besides.
static size_t snapshot_bytes(const Params *p) {
    size_t model = p->run->rank == 0 ? (size_t)p->size * sizeof(Bf16) : 0;
    return (size_t)saved_elements(p) * (4 + 2 * (size_t)gpu_type_bytes(p->moment_type)) + model;
}

void params_allocate_snapshot(Params *p) {
    if (!options_save(&p->run->options)) { return; }
    p->snapshot = malloc_or_die(snapshot_bytes(p));
    if (cudaHostRegister(p->snapshot, snapshot_bytes(p), cudaHostRegisterDefault) != cudaSuccess) {
        cudaGetLastError(); // copies are slower then, nothing else
    }
    if (!p->delayed) { return; }
    size_t n = (size_t)p->scaling.count;
    p->snapshot_slots = malloc_or_die(n * sizeof(Fp8Slot));
    p->snapshot_history = malloc_or_die(n * (size_t)p->scaling.history_length * sizeof(float));
}

static void copy_weights(Params *p) {
    const ParamLayout *layout = &p->run->layout;
    for (int i = 0; i < layout->count; i++) {
        const Param *q = &layout->params[i];
        int64_t n = round_up64(param_size(q), PARAM_ALIGN);
        if (p->copy_offset[i] < 0) { continue; }
        gpu_to_bf16(p->copies + p->copy_offset[i], p->master + q->offset, n, p->gpu->stream);
    }
}

// The codes of all FP8 weights, from master: by the slots' scales where they have a history.
static void quantize_weights(Params *p) {
    gpu_measure_weights(p->weights, 0, p->master, NULL, p->gpu->stream);
    gpu_quantize_weights(p->weights, 0, true, p->master, NULL, p->gpu->stream);
}

// One of the optimizer's arrays: what this rank keeps of it. host: room for the longest range.
static void restore_array(Params *p, const Checkpoint *c, const char *kind, void *device,
                          GpuType type, float *host) {
    Error err;
    for (int i = 0; i < p->num_ranges; i++) {
        const ZeroRange *r = &p->ranges[i];
        int64_t n = r->end - r->begin;
        if (!checkpoint_read(c, kind, r->begin, r->end, host, &err)) { die("%s", err.text); }
        if (type == TYPE_BF16) {
            Bf16 *codes = (Bf16 *)host; // in place: a code is written at or before its number
            for (int64_t k = 0; k < n; k++) { codes[k] = bf16_encode(host[k]); }
        }
        gpu_send(p->gpu, (char *)device + r->kept * gpu_type_bytes(type), host,
                 (size_t)(n * gpu_type_bytes(type)));
    }
}

static void restore_arrays(Params *p, const Checkpoint *c) {
    int64_t longest = 0;
    for (int i = 0; i < p->num_ranges; i++) {
        longest = max64(longest, p->ranges[i].end - p->ranges[i].begin);
    }
    float *host = malloc_or_die((size_t)longest * sizeof(float));
    restore_array(p, c, "master", p->master, TYPE_F32, host);
    if (options_train(&p->run->options)) {
        restore_array(p, c, "exp_avg", p->exp_avg, p->moment_type, host);
        restore_array(p, c, "exp_avg_sq", p->exp_avg_sq, p->moment_type, host);
    }
    free(host);
}

static void first_weights(Params *p) {
    float *host = malloc_or_die((size_t)p->size * sizeof(float));
    run_first_weights(p->run, host);
    for (int i = 0; i < p->num_ranges; i++) {
        const ZeroRange *r = &p->ranges[i];
        gpu_send(p->gpu, p->master + r->kept, host + r->begin,
                 (size_t)(r->end - r->begin) * sizeof(float));
    }
    free(host);
}

// The saved slots, but for the fixed one; a checkpoint without any leaves all as they are.
static void restore_scaling(Params *p, const Checkpoint *c) {
    Error err;
    size_t n = (size_t)p->scaling.count, history = n * (size_t)p->scaling.history_length;
    Fp8Slot *slots = malloc_or_die(n * sizeof(Fp8Slot));
    float *amax = calloc_or_die(history, sizeof(float));
    gpu_fetch(p->gpu, slots, p->scaling.slots, n * sizeof(Fp8Slot));
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    if (!checkpoint_read_scaling(c, &p->run->precision, slots, amax, &err)) { die("%s", err.text); }
    fp8_fix_slot(&p->run->precision, &p->run->options, slots);
    gpu_send(p->gpu, p->scaling.slots, slots, n * sizeof(Fp8Slot));
    gpu_send(p->gpu, p->scaling.history, amax, history * sizeof(float));
    free(slots);
    free(amax);
}

// Whether a slot in use has no history.
static bool any_unmeasured(Params *p) {
    int n = p->scaling.count;
    bool found = false;
    Fp8Slot *slots = malloc_or_die((size_t)n * sizeof(Fp8Slot));
    gpu_fetch(p->gpu, slots, p->scaling.slots, (size_t)n * sizeof(Fp8Slot));
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    for (int i = 0; i < n; i++) {
        found = found || (fp8_slot_follows(&p->run->precision, i) && slots[i].count == 0);
    }
    free(slots);
    return found;
}

void params_restore(Params *p, bool resumed, const Checkpoint *checkpoint) {
    const Run *run = p->run;
    StepState state = {.updates = run->progress.step - run->progress.skipped,
                       .skips = run->progress.skipped};
    gpu_send(p->gpu, p->state, &state, sizeof(state));
    if (resumed) {
        restore_arrays(p, checkpoint);
    } else {
        first_weights(p);
    }
    if (p->fp8) {
        if (resumed && p->delayed) { restore_scaling(p, checkpoint); }
        gpu_fp8_load_scales(&p->scaling, p->gpu->stream);
    }
    if (run->ranks > 1) {
        AdamWUpdate none = params_adamw(p, NULL);
        params_publish(p, &none);
    } else {
        copy_weights(p);
        if (p->fp8) { quantize_weights(p); }
    }
    p->measuring = p->fp8 && (!p->delayed || any_unmeasured(p));
}

// ---- to a checkpoint ----------------------------------------------------------------------------

// This rank's ranges of an array, one after another.
static char *fetch_ranges(Params *p, char *to, const void *device, GpuType type) {
    for (int i = 0; i < p->num_saved; i++) {
        const ZeroRange *r = &p->ranges[i];
        size_t bytes = (size_t)((r->end - r->begin) * gpu_type_bytes(type));
        gpu_fetch(p->gpu, to, (const char *)device + r->kept * gpu_type_bytes(type), bytes);
        to += bytes;
    }
    return to;
}

// All weights in BF16 from all master weights, a piece at a time.
static void fetch_model(Params *p, Bf16 *to, Bf16 *scratch, int64_t scratch_elements) {
    int64_t piece = scratch_elements / PARAM_ALIGN * PARAM_ALIGN;
    for (int64_t at = 0; at < p->size; at += piece) {
        int64_t n = min64(piece, p->size - at);
        gpu_to_bf16(scratch, p->master + at, n, p->gpu->stream);
        gpu_fetch(p->gpu, to + at, scratch, (size_t)n * sizeof(Bf16));
    }
}

// The same where no rank has all master weights: rank 0's copies, and what it gathers.
static void gather_model(Params *p, Bf16 *to) {
    const ParamLayout *layout = &p->run->layout;
    int gathered = -1;
    for (int i = 0; i < layout->count; i++) {
        const Param *q = &layout->params[i];
        int segment = p->zero.segment[i];
        int64_t within = p->zero.place[i] - p->zero.segments[segment].begin;
        bool copied = p->copy_offset[i] >= 0;
        if (!copied && segment != gathered) {
            params_gather_plain(p, segment);
            gathered = segment;
        }
        const Bf16 *from = copied ? p->copies + p->copy_offset[i] : p->plain + within;
        if (p->run->rank == 0) {
            gpu_fetch(p->gpu, to + q->offset, from, (size_t)param_size(q) * sizeof(Bf16));
        }
    }
}

void params_snapshot(Params *p, Bf16 *scratch, int64_t scratch_elements, Snapshot *s) {
    char *master = p->snapshot;
    char *exp_avg = fetch_ranges(p, master, p->master, TYPE_F32);
    char *exp_avg_sq = fetch_ranges(p, exp_avg, p->exp_avg, p->moment_type);
    Bf16 *model = (Bf16 *)fetch_ranges(p, exp_avg_sq, p->exp_avg_sq, p->moment_type);
    if (p->run->ranks > 1) {
        params_join(p); // new weights may still be on their way
        gather_model(p, model);
    } else {
        fetch_model(p, model, scratch, scratch_elements);
    }
    if (p->delayed) {
        size_t count = (size_t)p->scaling.count;
        gpu_fetch(p->gpu, p->snapshot_slots, p->scaling.slots, count * sizeof(Fp8Slot));
        gpu_fetch(p->gpu, p->snapshot_history, p->scaling.history,
                  count * (size_t)p->scaling.history_length * sizeof(float));
    }
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    if (p->delayed) { params_check_scales(p, p->snapshot_slots); }
    s->num_ranges = p->num_saved;
    s->ranges = p->saved;
    s->model_dtype = DTYPE_BF16;
    s->model = model;
    s->moment_dtype = p->moment_type == TYPE_F32 ? DTYPE_F32 : DTYPE_BF16;
    s->master = master;
    s->exp_avg = exp_avg;
    s->exp_avg_sq = exp_avg_sq;
    s->slots = p->delayed ? p->snapshot_slots : NULL;
    s->amax_history = p->delayed ? p->snapshot_history : NULL;
}
