// Fills the state on the device from a checkpoint or with initial weights, and copies the state to
// host memory, from where a checkpoint is written.
#include "../../kernels/cpu.h"
#include "../run.h"
#include "../start.h"
#include "params.h"

#include <stdlib.h>
#include <string.h>

// ---- from a checkpoint --------------------------------------------------------------------------

// Elements that are restored at a time. The Makefile sets fewer for tests without a GPU, so that
// small models have several pieces.
#ifndef RESTORE_PIECE
#define RESTORE_PIECE (1 << 24)
#endif
enum { PIECE = RESTORE_PIECE };

typedef struct {
    float values[PIECE];
    uint8_t codes[PIECE];
    uint16_t scales[PIECE / MOMENT_BLOCK];
} Piece; // buffers in host memory

static void put(Params *p, const StateArray *a, int64_t kept, const void *from, int64_t elements) {
    size_t bytes = (size_t)(elements * gpu_type_bytes(a->type));
    void *to = state_address(a, kept);
    if (a->span == 1 && kept - a->first < a->offloaded) {
        memcpy(to, from, bytes);
    } else {
        gpu_send(p->gpu, to, from, bytes);
    }
}

// Fills elements begin..end of the parameter space in an array of the optimizer's state. kept: the
// index of `begin` among the elements that this rank keeps.
static void restore_piece(Params *p, int array, int64_t begin, int64_t end, int64_t kept,
                          Piece *host) {
    const Checkpoint *c = &p->run->start;
    const StateArray *a = &p->optimizer.arrays[array];
    int64_t n = end - begin;
    bool codes = a->type == TYPE_MOMENT8;
    Moment which = array == STATE_EXP_AVG ? MOMENT_FIRST : MOMENT_SECOND;
    if (!p->run->options.resumes) {
        run_first_weights(p->run, begin, end, host->values);
    } else if (codes && c->moments8) {
        or_die(checkpoint_read(c, array, begin, end, NULL, host->codes, host->scales));
    } else {
        int saved = array == STATE_MOMENTUM ? STATE_EXP_AVG : array;
        run_read_state(p->run, saved, begin, end, host->values);
        if (codes) { moment_encode(host->codes, host->scales, which, host->values, n, NULL); }
    }
    if (codes) {
        const StateArray *scales = a + STATE_EXP_AVG_SCALE - STATE_EXP_AVG;
        put(p, a, kept, host->codes, n);
        put(p, scales, kept, host->scales, n / MOMENT_BLOCK);
        return;
    }
    // converts in place, in ascending order, so that no BF16 number overwrites an FP32 number that
    // is still to be read
    if (a->type == TYPE_BF16) {
        Bf16 *to = (Bf16 *)host->values;
        for (int64_t k = 0; k < n; k++) { to[k] = bf16_encode(host->values[k]); }
    }
    put(p, a, kept, host->values, n);
}

// Fills an array of the optimizer's state from the checkpoint or with initial weights.
static void restore_array(Params *p, int array, Piece *host) {
    const OptimizerState *s = &p->optimizer;
    for (const ZeroRange *r = s->ranges; r < s->ranges + s->num_ranges; r++) {
        if (state_address(&s->arrays[array], r->kept) == NULL) { continue; }
        for (int64_t begin = r->begin; begin < r->end; begin += PIECE) {
            restore_piece(p, array, begin, min64(begin + PIECE, r->end), r->kept + begin - r->begin,
                          host);
        }
    }
}

// Fills all arrays of the state or, if the run does not resume, only the master weights.
static void restore_arrays(Params *p) {
    int last = p->run->options.resumes ? STATE_MOMENTUM : STATE_MASTER;
    FREED Piece *host = malloc_or_die(sizeof(Piece));
    for (int i = STATE_MASTER; i <= last; i++) { restore_array(p, i, host); }
}

// Restores the FP8 scales and their history. Returns whether the run must be calibrated: it trains,
// and some tensor's scale is not known. A run that does not train has no batch for a calibration,
// so tensors whose scales are not known become SCALE_CURRENT.
static bool restore_scaling(Params *p) {
    const Precision *precision = &p->run->precision;
    int n = p->fp8.count;
    size_t history = (size_t)n * (size_t)p->fp8.length;
    FREED Fp8Scale *scales = malloc_or_die((size_t)n * sizeof(Fp8Scale));
    FREED float *amax = calloc_or_die(history, sizeof(float));
    run_read_scaling(p->run, scales, amax);
    if (history > 0) { gpu_send(p->gpu, p->fp8.history, amax, history * sizeof(float)); }
    gpu_send(p->gpu, p->fp8.scales, scales, (size_t)n * sizeof(Fp8Scale));
    bool unknown = fp8_is_uncalibrated(precision, scales), calibrates = run_has_steps(p->run);
    for (int i = 0; i < n && unknown && !calibrates; i++) {
        bool measured = fp8_slot_uses_amax(precision, i) && !fp8_scale_known(&scales[i]);
        if (measured) { p->scaling[i] = SCALE_CURRENT; }
        p->measures |= measured;
    }
    return unknown && calibrates;
}

bool params_restore(Params *p) {
    const Run *run = p->run;
    StepState state = {.updates = run->progress.step - run->progress.skipped,
                       .window = run->progress.window};
    gpu_send(p->gpu, p->optimizer.state, &state, sizeof(state));
    restore_arrays(p);
    bool uncalibrated = p->fp8.count > 0 && restore_scaling(p);
    run_beat(run, ACTIVITY_WAIT, "publishing the weights");
    params_publish(p);
    return uncalibrated;
}

// ---- to a checkpoint ----------------------------------------------------------------------------

// Copies all weights, as BF16, to rank 0's host memory. Segments of BF16 are copied as they are.
// For a segment of FP8 codes, each rank rounds its master weights to BF16; the rounded weights are
// gathered.
static void fetch_model(Params *p, Bf16 *to) {
    const ParamLayout *layout = &p->run->layout;
    comm_join(p->comm); // new weights may still be on their way
    for (int s = 0; s < p->zero.count; s++) {
        const ZeroSegment *segment = &p->zero.segments[s];
        bool codes = segment->codes;
        Bf16 *weights = codes ? p->saved.gathered : p->weights.segments[s];
        if (codes) {
            for (const ZeroRange *r = p->optimizer.ranges;
                 r < p->optimizer.ranges + p->optimizer.num_ranges; r++) {
                if (r->segment != s) { continue; }
                gpu_to_bf16(p->gpu, weights + r->sharded_offset - segment->begin,
                            state_address(&p->optimizer.arrays[STATE_MASTER], r->kept),
                            r->end - r->begin);
            }
            comm_begin(p->comm);
            comm_all_gather(p->comm, weights, COMM_BF16, segment->part);
            comm_end(p->comm, SLOT_AGREEMENT);
            comm_wait(p->comm, SLOT_AGREEMENT);
        }
        for (int i = 0; i < layout->count && p->run->group.rank == 0; i++) {
            if (p->zero.segment[i] != s) { continue; }
            gpu_fetch(p->gpu, to + layout->params[i].offset,
                      weights + p->zero.sharded_offset[i] - segment->begin,
                      (size_t)param_size(&layout->params[i]) * sizeof(Bf16));
        }
    }
}

// Ends the run if a rank has another FP8 scale than rank 0.
static void check_scales(const Params *p, const Fp8Scale *scales) {
    size_t bytes = (size_t)p->fp8.count * sizeof(Fp8Scale);
    int wrong = 0;
    FREED Fp8Scale *first = malloc_or_die(bytes);
    memcpy(first, scales, bytes);
    group_broadcast(&p->run->group, CHANNEL_MAIN, first, bytes);
    for (int i = 0; i < p->fp8.count; i++) {
        wrong += !(first[i].scale == scales[i].scale && first[i].count == scales[i].count);
    }
    bool same = wrong == 0 || fail("%d FP8 scales differ from rank 0's", wrong);
    or_die(group_agree(&p->run->group, CHANNEL_MAIN, same));
}

void params_hash_state(const Params *p, uint64_t *hashes) {
    gpu_clear(p->gpu, FAMILY_OPTIMIZER, hashes, STATE_ARRAYS * sizeof(uint64_t));
    for (int i = 0; i < STATE_ARRAYS; i++) {
        const StateArray *a = &p->optimizer.arrays[i];
        int64_t offloaded = a->offloaded * gpu_type_bytes(a->type);
        int64_t rest = (a->count - a->offloaded) * gpu_type_bytes(a->type);
        gpu_hash(p->gpu, &hashes[i], a->host, offloaded, 0);
        gpu_hash(p->gpu, &hashes[i], a->device, rest, offloaded / 8);
    }
}

void params_snapshot(Params *p, Snapshot *s) {
    uint64_t hashes[STATE_ARRAYS];
    params_hash_state(p, p->saved.hashes);
    gpu_fetch(p->gpu, hashes, p->saved.hashes, sizeof(hashes));
    for (const StateArray *a = p->optimizer.arrays; a < p->optimizer.arrays + STATE_ARRAYS; a++) {
        int64_t offloaded = a->offloaded * gpu_type_bytes(a->type);
        size_t bytes = (size_t)((a->count - a->offloaded) * gpu_type_bytes(a->type));
        if (bytes > 0) { gpu_fetch(p->gpu, (char *)a->host + offloaded, a->device, bytes); }
    }
    fetch_model(p, p->saved.model);
    if (p->fp8.length > 0) {
        size_t count = (size_t)p->fp8.count;
        gpu_fetch(p->gpu, p->saved.scales, p->fp8.scales, count * sizeof(Fp8Scale));
        gpu_fetch(p->gpu, p->saved.history, p->fp8.history,
                  count * (size_t)p->fp8.length * sizeof(float));
    }
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    if (p->fp8.length > 0) { check_scales(p, p->saved.scales); }
    s->num_ranges = p->saved.num_ranges;
    s->ranges = p->saved.ranges;
    s->model_dtype = DTYPE_BF16;
    s->model = p->saved.model;
    for (int i = 0; i < STATE_ARRAYS; i++) {
        const StateArray *a = &p->optimizer.arrays[i];
        Dtype of_codes = i == STATE_EXP_AVG ? DTYPE_I8 : DTYPE_U8;
        s->state[i] = (SavedArray){.dtype = a->type == TYPE_F32    ? DTYPE_F32
                                            : a->type == TYPE_BF16 ? DTYPE_BF16
                                                                   : of_codes,
                                   .count = a->count,
                                   .data = a->host,
                                   .hash = hashes[i]};
    }
    s->slots = p->saved.scales;
    s->amax_history = p->saved.history;
}
