// The parameters' way from a checkpoint, or from nothing, to the device, and back.
#include "params.h"

#include <stdlib.h>

static size_t snapshot_bytes(const Params *p) {
    return (size_t)p->size * (4 + 2 + 2 * (size_t)gpu_type_bytes(p->moment_type));
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

static void restore_moment(Params *p, const Checkpoint *c, const char *kind, void *device,
                           float *host) {
    Error err;
    if (!checkpoint_read(c, kind, 0, p->size, host, &err)) { die("%s", err.text); }
    if (p->moment_type == TYPE_BF16) {
        Bf16 *codes = (Bf16 *)host; // in place: a code is written at or before what it came from
        for (int64_t i = 0; i < p->size; i++) { codes[i] = bf16_encode(host[i]); }
    }
    gpu_send(p->gpu, device, host, (size_t)(p->size * gpu_type_bytes(p->moment_type)));
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
    Error err;
    float *host = malloc_or_die((size_t)p->size * sizeof(float));
    if (!resumed) {
        run_first_weights(run, host);
    } else if (!checkpoint_read(checkpoint, "master", 0, p->size, host, &err)) {
        die("%s", err.text);
    }
    gpu_send(p->gpu, p->master, host, (size_t)p->size * sizeof(float));
    if (resumed) {
        restore_moment(p, checkpoint, "exp_avg", p->exp_avg, host);
        restore_moment(p, checkpoint, "exp_avg_sq", p->exp_avg_sq, host);
    }
    free(host);
    copy_weights(p);
    if (p->fp8) {
        if (resumed && p->delayed) { restore_scaling(p, checkpoint); }
        gpu_fp8_load_scales(&p->scaling, p->gpu->stream);
        quantize_weights(p);
        p->measuring = !p->delayed || any_unmeasured(p);
    }
    StepState state = {.updates = run->progress.step - run->progress.skipped,
                       .skips = run->progress.skipped};
    gpu_send(p->gpu, p->state, &state, sizeof(state));
}

void params_snapshot(Params *p, Bf16 *scratch, int64_t scratch_elements, Snapshot *s) {
    int64_t moment_bytes = p->size * gpu_type_bytes(p->moment_type);
    char *master = p->snapshot, *exp_avg = master + 4 * p->size,
         *exp_avg_sq = exp_avg + moment_bytes;
    Bf16 *weights = (Bf16 *)(exp_avg_sq + moment_bytes);
    int64_t chunk = scratch_elements / PARAM_ALIGN * PARAM_ALIGN;
    gpu_fetch(p->gpu, master, p->master, (size_t)(4 * p->size));
    gpu_fetch(p->gpu, exp_avg, p->exp_avg, (size_t)moment_bytes);
    gpu_fetch(p->gpu, exp_avg_sq, p->exp_avg_sq, (size_t)moment_bytes);
    for (int64_t at = 0; at < p->size; at += chunk) {
        int64_t n = min64(chunk, p->size - at);
        gpu_to_bf16(scratch, p->master + at, n, p->gpu->stream);
        gpu_fetch(p->gpu, weights + at, scratch, (size_t)n * sizeof(Bf16));
    }
    if (p->delayed) {
        size_t count = (size_t)p->scaling.count;
        gpu_fetch(p->gpu, p->snapshot_slots, p->scaling.slots, count * sizeof(Fp8Slot));
        gpu_fetch(p->gpu, p->snapshot_history, p->scaling.history,
                  count * (size_t)p->scaling.history_length * sizeof(float));
    }
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    s->model_dtype = DTYPE_BF16;
    s->model = weights;
    s->moment_dtype = p->moment_type == TYPE_F32 ? DTYPE_F32 : DTYPE_BF16;
    s->master = master;
    s->exp_avg = exp_avg;
    s->exp_avg_sq = exp_avg_sq;
    s->slots = p->delayed ? p->snapshot_slots : NULL;
    s->amax_history = p->delayed ? p->snapshot_history : NULL;
}
