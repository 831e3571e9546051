// The parameters' way from a checkpoint, or from nothing, to the device, and back.
#include "params.h"

#include <stdlib.h>
#include <string.h>

// The ranges that have second moments are the first ones (model/zero.h).
static int squared_ranges(const Params *p) {
    int n = 0;
    while (n < p->num_ranges && p->ranges[n].kept < p->zero.kept_adamw) { n++; }
    return n;
}

// Elements of the first n ranges.
static int64_t elements_of(const Params *p, int n) {
    int64_t elements = 0;
    for (int i = 0; i < n; i++) { elements += p->saved[i].end - p->saved[i].begin; }
    return elements;
}

// What so many ranks write, this one among them: their ranges, rank 0 the model besides, the
// scales.
int64_t params_host_bytes(const Params *p, int ranks) {
    int64_t elements = elements_of(p, p->num_ranges);
    int64_t moments = elements + elements_of(p, squared_ranges(p));
    int64_t model = p->run->rank == 0 ? p->run->layout.size : 0;
    int64_t slots = p->delayed ? p->scaling.count : 0, history = slots * p->scaling.history_length;
    int64_t each = moments * gpu_type_bytes(p->adamw.moment_type) +
                   slots * (int64_t)sizeof(Fp8Slot) + (elements + history) * (int64_t)sizeof(float);
    return options_save(&p->run->options) ? model * (int64_t)sizeof(Bf16) + each * ranks : 0;
}

// Pinned where the system allows it.
void params_allocate_snapshot(Params *p) {
    size_t bytes = (size_t)params_host_bytes(p, 1);
    if (bytes == 0) { return; }
    p->snapshot = malloc_or_die(bytes);
    if (cudaHostRegister(p->snapshot, bytes, cudaHostRegisterDefault) != cudaSuccess) {
        cudaGetLastError(); // copies are slower then, nothing else
    }
}

// ---- from a checkpoint --------------------------------------------------------------------------

// One of the optimizer's arrays, from a checkpoint, or the weights (c NULL): what this rank keeps
// of its first n ranges. host: room for the longest range.
static void restore_array(Params *p, const Checkpoint *c, const char *kind, void *device,
                          GpuType type, int n, float *host) {
    for (int i = 0; i < n; i++) {
        const ZeroRange *r = &p->ranges[i];
        int64_t elements = r->end - r->begin;
        if (c != NULL) {
            run_read_state(p->run, c, kind, r->begin, r->end, host);
        } else {
            run_first_weights(p->run, r->begin, r->end, host);
        }
        if (type == TYPE_BF16) {
            Bf16 *codes = (Bf16 *)host; // in place: a code is written at or before its number
            for (int64_t k = 0; k < elements; k++) { codes[k] = bf16_encode(host[k]); }
        }
        gpu_send(p->gpu, (char *)device + r->kept * gpu_type_bytes(type), host,
                 (size_t)(elements * gpu_type_bytes(type)));
    }
}

static void restore_arrays(Params *p, const Checkpoint *c) {
    int64_t longest = 0;
    for (int i = 0; i < p->num_ranges; i++) {
        longest = max64(longest, p->ranges[i].end - p->ranges[i].begin);
    }
    float *host = malloc_or_die((size_t)longest * sizeof(float));
    restore_array(p, c, "master", p->adamw.master, TYPE_F32, p->num_ranges, host);
    if (c != NULL && options_train(&p->run->options)) {
        restore_array(p, c, "exp_avg", p->adamw.exp_avg, p->adamw.moment_type, p->num_ranges, host);
        restore_array(p, c, "exp_avg_sq", p->adamw.exp_avg_sq, p->adamw.moment_type,
                      squared_ranges(p), host);
    }
    free(host);
}

// The slots: the checkpoint's (NULL: none), which may have none; a scale of 1 otherwise, and the
// fixed one. Scales are measured as long as one in use has no history.
static void restore_scaling(Params *p, const Checkpoint *c) {
    const Precision *precision = &p->run->precision;
    int n = p->scaling.count;
    size_t history = (size_t)n * (size_t)p->scaling.history_length;
    Fp8Slot *slots = malloc_or_die((size_t)n * sizeof(Fp8Slot));
    Fp8Live *live = calloc_or_die((size_t)n, sizeof(Fp8Live));
    float *amax = calloc_or_die(history, sizeof(float));
    Error err;
    for (int i = 0; i < n; i++) { slots[i] = (Fp8Slot){1.0f, 1.0f, 0.0f, 0}; }
    if (p->delayed && c != NULL) {
        if (!checkpoint_read_scaling(c, precision, slots, amax, &err)) { die("%s", err.text); }
        gpu_send(p->gpu, p->scaling.history, amax, history * sizeof(float));
    }
    fp8_fix_slot(precision, &p->run->options, slots);
    gpu_send(p->gpu, p->scaling.slots, slots, (size_t)n * sizeof(Fp8Slot));
    p->scaling.measuring = !p->delayed;
    for (int i = 0; i < n; i++) {
        live[i] = (Fp8Live){.scale_inv = slots[i].scale_inv, .scale = slots[i].scale};
        p->scaling.measuring |= fp8_slot_follows(precision, i) && slots[i].count == 0;
    }
    gpu_send(p->gpu, p->scaling.live, live, (size_t)n * sizeof(Fp8Live));
    free(slots);
    free(live);
    free(amax);
}

void params_restore(Params *p, const Checkpoint *checkpoint) {
    const Run *run = p->run;
    StepState state = {.updates = run->progress.step - run->progress.skipped};
    gpu_send(p->gpu, p->state, &state, sizeof(state));
    restore_arrays(p, checkpoint);
    if (p->fp8) { restore_scaling(p, checkpoint); }
    run_beat(run, DOING_WAIT, "publishing the weights");
    params_publish(p);
}

// ---- to a checkpoint ----------------------------------------------------------------------------

// This rank's first n ranges of an array, one after another.
static char *fetch_ranges(Params *p, char *to, const void *device, GpuType type, int n) {
    for (int i = 0; i < n; i++) {
        const ZeroRange *r = &p->ranges[i];
        size_t bytes = (size_t)((r->end - r->begin) * gpu_type_bytes(type));
        gpu_fetch(p->gpu, to, (const char *)device + r->kept * gpu_type_bytes(type), bytes);
        to += bytes;
    }
    return to;
}

// All weights in BF16 to rank 0: as they are, or, where products read codes, gathered from the
// master weights a segment at a time.
static void fetch_model(Params *p, Bf16 *to) {
    const ParamLayout *layout = &p->run->layout;
    params_join(p); // new weights may still be on their way
    for (int s = 0; s < p->zero.count; s++) {
        const ZeroSegment *segment = &p->zero.segments[s];
        bool codes = segment->codes;
        Bf16 *weights = codes ? p->gathered : p->weights[s];
        if (codes) {
            gpu_to_bf16(weights + p->run->rank * segment->part, p->adamw.master + segment->kept,
                        segment->part, p->gpu->stream);
            comm_begin(p->comm);
            comm_all_gather(p->comm, weights, COMM_BF16, segment->part);
            comm_end(p->comm, SLOT_AGREEMENT);
            comm_wait(p->comm, SLOT_AGREEMENT);
        }
        for (int i = 0; i < layout->count && p->run->rank == 0; i++) {
            if (p->zero.segment[i] != s) { continue; }
            gpu_fetch(p->gpu, to + layout->params[i].offset,
                      weights + p->zero.place[i] - segment->begin,
                      (size_t)param_size(&layout->params[i]) * sizeof(Bf16));
        }
    }
}

// Dies where a rank has another FP8 scale than rank 0.
static void check_scales(const Params *p, const Fp8Slot *slots) {
    size_t bytes = (size_t)p->scaling.count * sizeof(Fp8Slot);
    int wrong = 0;
    Error err;
    Fp8Slot *first = malloc_or_die(bytes);
    memcpy(first, slots, bytes);
    group_broadcast(p->run->group, CHANNEL_MAIN, first, bytes);
    for (int i = 0; i < p->scaling.count; i++) {
        wrong += !(first[i].scale == slots[i].scale && first[i].count == slots[i].count);
    }
    free(first);
    bool same = wrong == 0 || fail(&err, "%d FP8 scales differ from rank 0's", wrong);
    if (!group_agree(p->run->group, CHANNEL_MAIN, same, &err)) { die("%s", err.text); }
}

void params_snapshot(Params *p, Snapshot *s) {
    char *master = p->snapshot;
    int n = p->num_ranges, squared = squared_ranges(p);
    char *exp_avg = fetch_ranges(p, master, p->adamw.master, TYPE_F32, n);
    char *exp_avg_sq = fetch_ranges(p, exp_avg, p->adamw.exp_avg, p->adamw.moment_type, n);
    Bf16 *model = (Bf16 *)fetch_ranges(p, exp_avg_sq, p->adamw.exp_avg_sq, p->adamw.moment_type,
                                       squared);
    fetch_model(p, model);
    size_t count = (size_t)p->scaling.count;
    Fp8Slot *slots = (Fp8Slot *)(model + (p->run->rank == 0 ? p->run->layout.size : 0));
    float *history = (float *)(slots + count);
    if (p->delayed) {
        gpu_fetch(p->gpu, slots, p->scaling.slots, count * sizeof(Fp8Slot));
        gpu_fetch(p->gpu, history, p->scaling.history,
                  count * (size_t)p->scaling.history_length * sizeof(float));
    }
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    if (p->delayed) { check_scales(p, slots); }
    s->num_ranges = p->num_ranges;
    s->ranges = p->saved;
    s->model_dtype = DTYPE_BF16;
    s->model = model;
    s->moment_dtype = p->adamw.moment_type == TYPE_F32 ? DTYPE_F32 : DTYPE_BF16;
    s->master = master;
    s->exp_avg = exp_avg;
    s->exp_avg_sq = exp_avg_sq;
    s->second_moments = elements_of(p, squared);
    s->slots = p->delayed ? slots : NULL;
    s->amax_history = p->delayed ? history : NULL;
}
