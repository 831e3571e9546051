// Several ranks: whose part of the parameters lies where, and how gradients, ranges and new weights
// come to all. Each rank makes the same calls in the same order.
#include "params.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static int64_t segment_size(const Params *p, int segment) {
    return p->zero.segments[segment].part * p->zero.ranks;
}

static CommType comm_type(GpuType type) {
    return type == TYPE_F32 ? COMM_F32 : COMM_BF16;
}

// What is waited for: each bucket's new weights, and the two that come one at a time.
static int sums_slot(const Params *p) {
    return p->run->layout.num_buckets;
}

static int agreement_slot(const Params *p) {
    return p->run->layout.num_buckets + 1;
}

int params_slots(const ParamLayout *layout) {
    return layout->num_buckets + 2;
}

// ---- places -------------------------------------------------------------------------------------

// Whether FP8 weights travel as codes, which their owners make. Not where an evaluation needs them
// in BF16.
static bool owners_quantize(const Params *p) {
    const Options *o = &p->run->options;
    return o->eval_precision != EVAL_BF16;
}

int64_t params_place_segments(Params *p) {
    const ParamLayout *layout = &p->run->layout;
    int64_t size = 0;
    p->places = calloc_or_die((size_t)p->zero.count, sizeof(SegmentPlace));
    for (int s = 0; s < p->zero.count; s++) {
        bool codes = p->zero.segments[s].codes && owners_quantize(p);
        p->places[s].copies = codes ? -1 : size;
        if (!codes) { size += segment_size(p, s); }
    }
    for (int i = 0; i < layout->count; i++) {
        int s = p->zero.segment[i];
        int64_t within = p->zero.place[i] - p->zero.segments[s].begin;
        p->copy_offset[i] = p->places[s].copies < 0 ? -1 : p->places[s].copies + within;
    }
    return size;
}

void params_plan_segments(Params *p, Plan *plan) {
    for (int s = 0; s < p->zero.count; s++) {
        if (p->places[s].copies >= 0) { continue; }
        plan_buffer(plan, "weights", "FP8 weights", segment_size(p, s),
                    (void **)&p->places[s].codes);
    }
}

static AdamWSegment segment_of(const Params *p, const ZeroRange *range, const int *rows,
                               int first_block) {
    const SegmentPlace *to = &p->places[range->segment];
    int64_t within = range->place - p->zero.segments[range->segment].begin;
    return (AdamWSegment){.first = range->begin,
                          .n = range->end - range->begin,
                          .gradient = range->place,
                          .state = range->kept,
                          .weights = to->copies < 0 ? NULL : p->copies + to->copies + within,
                          .weight = rows[range->param],
                          .first_block = first_block};
}

// A bucket's segments lie together and count their blocks from 0, so that each has its own launch.
static void send_bucket_parts(Params *p, const int *rows) {
    const ZeroLayout *z = &p->zero;
    AdamWSegment *segments = calloc_or_die((size_t)p->num_ranges, sizeof(AdamWSegment));
    int count = 0;
    p->bucket_parts = calloc_or_die((size_t)z->layout->num_buckets, sizeof(BucketParts));
    for (int b = 0; b < z->layout->num_buckets; b++) {
        BucketParts *parts = &p->bucket_parts[b];
        parts->begin = count;
        for (int i = 0; i < p->num_ranges; i++) {
            const ZeroRange *range = &p->ranges[i];
            if (range->segment < z->first[b] || range->segment >= z->first[b + 1]) { continue; }
            segments[count] = segment_of(p, range, rows, parts->blocks);
            parts->blocks += gpu_adamw_blocks(segments[count++].n);
            parts->count++;
        }
    }
    gpu_send(p->gpu, p->segments, segments, (size_t)count * sizeof(AdamWSegment));
    free(segments);
}

void params_send_segments(Params *p) {
    const ZeroLayout *z = &p->zero;
    int *rows = calloc_or_die((size_t)p->run->layout.count, sizeof(int));
    params_weight_rows(p, rows);
    send_bucket_parts(p, rows);
    for (int i = 0; i < p->run->precision.count; i++) {
        int param = params_of_linear(p, i), s = z->segment[param];
        if (rows[param] < 0 || p->places[s].copies >= 0) { continue; }
        p->codes[2 * i] = p->places[s].codes + z->place[param] - z->segments[s].begin;
    }
    free(rows);
}

// ---- gradients ----------------------------------------------------------------------------------

static void *gradients_from(const Params *p, int64_t place) {
    return (char *)p->gradients + place * gpu_type_bytes(p->gradient_type);
}

static void gather_gradients(Params *p, int bucket) {
    const ZeroLayout *z = &p->zero;
    comm_begin(p->comm);
    for (int s = z->first[bucket]; s < z->first[bucket + 1]; s++) {
        comm_all_gather(p->comm, gradients_from(p, z->segments[s].begin),
                        comm_type(p->gradient_type), z->segments[s].part);
    }
    comm_end(p->comm, sums_slot(p));
}

void params_reduce(Params *p, int bucket) {
    const ZeroLayout *z = &p->zero;
    if (z->ranks == 1) { return; }
    comm_begin(p->comm);
    for (int s = z->first[bucket]; s < z->first[bucket + 1]; s++) {
        comm_reduce_scatter(p->comm, gradients_from(p, z->segments[s].begin),
                            comm_type(p->gradient_type), z->segments[s].part);
    }
    comm_end(p->comm, sums_slot(p));
}

void params_join(Params *p) {
    if (p->zero.ranks == 1) { return; }
    gpu_family(p->gpu, FAMILY_COMMUNICATION);
    comm_join(p->comm);
}

void params_fetch_gradients(Params *p, float *host) {
    const ParamLayout *layout = &p->run->layout;
    bool wide = p->gradient_type == TYPE_F32;
    size_t bytes = (size_t)(p->zero.size * gpu_type_bytes(p->gradient_type));
    char *all = malloc_or_die(bytes);
    for (int b = 0; p->zero.ranks > 1 && b < layout->num_buckets; b++) { gather_gradients(p, b); }
    params_join(p);
    gpu_fetch(p->gpu, all, p->gradients, bytes);
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    for (int i = 0; i < layout->count; i++) {
        float *to = host + layout->params[i].offset;
        int64_t from = p->zero.place[i], n = param_size(&layout->params[i]);
        for (int64_t k = 0; k < n; k++) {
            to[k] = wide ? ((const float *)all)[from + k]
                         : bf16_decode(((const Bf16 *)all)[from + k]);
        }
    }
    free(all);
}

// ---- what all ranks must have the same ----------------------------------------------------------

static void all_reduce(Params *p, void *values, CommType type, CommOp op, int64_t count) {
    comm_begin(p->comm);
    comm_all_reduce(p->comm, values, type, op, count);
    comm_end(p->comm, agreement_slot(p));
    gpu_family(p->gpu, FAMILY_COMMUNICATION);
    comm_wait(p->comm, agreement_slot(p));
    gpu_family(p->gpu, FAMILY_OPTIMIZER);
}

void params_sum(Params *p, double *values, int n) {
    if (p->zero.ranks > 1) { all_reduce(p, values, COMM_F64, COMM_SUM, n); }
}

void params_sum_counts(Params *p, int64_t *counts, int n) {
    double *values = malloc_or_die((size_t)n * sizeof(double)), *device = p->norm_scratch;
    size_t bytes = (size_t)n * sizeof(double);
    for (int i = 0; i < n; i++) { values[i] = (double)counts[i]; }
    gpu_send(p->gpu, device, values, bytes);
    params_sum(p, device, n);
    gpu_fetch(p->gpu, values, device, bytes);
    CUDA_CHECK(cudaStreamSynchronize(p->gpu->stream));
    for (int i = 0; i < n; i++) { counts[i] = (int64_t)values[i]; }
    free(values);
}

void params_agree(Params *p, const StepInput *input) {
    StepState *state = p->state;
    cudaStream_t stream = p->gpu->stream;
    enum { SUMS = 3 }; // loss, norm_squared, stop
    _Static_assert(offsetof(StepState, stop) == (SUMS - 1) * sizeof(double), "they lie together");
    if (p->zero.ranks == 1) { return; }
    CUDA_CHECK(cudaMemcpyAsync(&state->own_loss, &state->loss, sizeof(double),
                               cudaMemcpyDeviceToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(&state->stop, &input->stop, sizeof(double), cudaMemcpyDeviceToDevice,
                               stream));
    all_reduce(p, &state->loss, COMM_F64, COMM_SUM, SUMS);
    // of all fields, amax alone differs, and a range's bits are ordered as the range is
    if (p->delayed) {
        int64_t words = p->scaling.count * (int64_t)(sizeof(Fp8Slot) / sizeof(uint32_t));
        all_reduce(p, p->scaling.slots, COMM_U32, COMM_MAX, words);
    }
}

void params_check_scales(Params *p, const Fp8Slot *slots) {
    size_t bytes = (size_t)p->scaling.count * sizeof(Fp8Slot);
    int wrong = 0;
    Error err;
    if (p->zero.ranks == 1) { return; }
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

// The ranges of this rank's parts of FP8 weights become those of the weights. The other operands'
// are measured again before they are used.
static void agree_on_ranges(Params *p, const StepState *state) {
    int64_t words = p->scaling.count * (int64_t)(sizeof(Fp8Live) / sizeof(uint32_t));
    all_reduce(p, p->scaling.live, COMM_U32, COMM_MAX, words);
    gpu_announce_scales(&p->weights, state, p->gpu->stream);
}

// ---- new weights --------------------------------------------------------------------------------

static void gather_weights(Params *p, int bucket) {
    const ZeroLayout *z = &p->zero;
    comm_begin(p->comm);
    for (int s = z->first[bucket]; s < z->first[bucket + 1]; s++) {
        const SegmentPlace *place = &p->places[s];
        if (place->copies < 0) {
            comm_all_gather(p->comm, place->codes, COMM_U8, z->segments[s].part);
        } else {
            comm_all_gather(p->comm, p->copies + place->copies, COMM_BF16, z->segments[s].part);
        }
    }
    comm_end(p->comm, bucket);
}

typedef void PartsKernel(const AdamWUpdate *update, const Fp8Weights *weights, PartsMode mode,
                         const StepState *state, cudaStream_t stream);

// A kernel over this rank's parts, bucket by bucket, and, where they are the new weights, each on
// its way while the next is computed.
static void over_buckets(Params *p, const AdamWUpdate *update, PartsKernel *kernel, PartsMode mode,
                         const StepState *state, bool gathers) {
    for (int b = 0; b < p->run->layout.num_buckets; b++) {
        const BucketParts *parts = &p->bucket_parts[b];
        AdamWUpdate u = *update;
        u.segments = p->segments + parts->begin;
        u.segment_count = parts->count;
        u.segment_blocks = parts->blocks;
        if (parts->count > 0) { kernel(&u, &p->weights, mode, state, p->gpu->stream); }
        if (gathers) { gather_weights(p, b); }
    }
}

void params_update_parts(Params *p, const AdamWUpdate *update) {
    PartsMode mode = p->measuring ? PARTS_MEASURE : PARTS_GIVEN;
    bool measured = p->fp8 && p->measuring && owners_quantize(p);
    over_buckets(p, update, gpu_adamw_update_parts, mode, p->state, !measured);
    if (!measured) { return; }
    agree_on_ranges(p, p->state);
    over_buckets(p, update, gpu_publish_parts, PARTS_MEASURED, p->state, true);
}

void params_publish(Params *p, const AdamWUpdate *update) {
    if (p->fp8 && owners_quantize(p)) {
        over_buckets(p, update, gpu_publish_parts, PARTS_MEASURE, NULL, false);
        agree_on_ranges(p, NULL);
    }
    over_buckets(p, update, gpu_publish_parts, PARTS_MEASURED, NULL, true);
    p->measuring = true; // what the receiver quantises has not been measured yet
    params_receive_all(p);
}

// FP8 weights that are whole now, in the forms that they lack.
static void finish_rows(Params *p, WeightRows rows, bool codes) {
    cudaStream_t stream = p->gpu->stream;
    Fp8Weights w = p->weights;
    w.tiles = rows.tiles;
    if (rows.tiles == 0) { return; }
    gpu_family(p->gpu, FAMILY_QUANTIZE);
    if (codes) {
        gpu_transpose_weights(w, rows.begin, stream);
        return;
    }
    if (p->measuring) { gpu_measure_weights(w, rows.begin, NULL, p->state, stream); }
    gpu_quantize_weights(w, rows.begin, p->measuring, NULL, p->state, stream);
}

void params_receive(Params *p, int bucket) {
    if (p->zero.ranks == 1) { return; }
    gpu_family(p->gpu, FAMILY_COMMUNICATION);
    comm_wait(p->comm, bucket);
    finish_rows(p, p->bucket_rows[bucket], owners_quantize(p));
    if (bucket == 0) { finish_rows(p, (WeightRows){p->tied_weight, p->tied_tiles}, false); }
}

void params_receive_all(Params *p) {
    for (int b = 0; b < p->run->layout.num_buckets; b++) { params_receive(p, b); }
}

void params_gather_plain(Params *p, int segment) {
    const ZeroSegment *s = &p->zero.segments[segment];
    int64_t own = p->run->rank * s->part;
    cudaStream_t stream = p->gpu->stream;
    gpu_to_bf16(p->plain + own, p->master + s->kept, s->part, stream);
    comm_begin(p->comm);
    comm_all_gather(p->comm, p->plain, COMM_BF16, s->part);
    comm_end(p->comm, agreement_slot(p));
    comm_wait(p->comm, agreement_slot(p));
}
