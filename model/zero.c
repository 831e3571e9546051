#include "zero.h"
#include "../kernels/cpu.h"

#include <stdlib.h>

// Returns how many elements of the parameter space a parameter takes, with the padding after it.
static int64_t extent(const Param *p) {
    return round_up64(param_size(p), PARAM_ALIGN);
}

// Appends a bucket's parameters that have the flags `kind` as one segment, if there are any.
static void append_segment(ZeroLayout *z, int bucket, const uint8_t *kinds, int kind) {
    const ParamLayout *layout = z->layout;
    Bucket b = layout->buckets[bucket];
    int64_t begin = z->size;
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        if (p->offset < b.begin || p->offset >= b.end) { continue; }
        if ((kinds != NULL ? kinds[i] : 0) != kind) { continue; }
        z->sharded_offset[i] = z->size;
        z->segment[i] = z->count;
        z->size += extent(p);
    }
    if (z->size == begin) { return; }
    int64_t part = round_up64((z->size - begin + z->ranks - 1) / z->ranks, PARAM_ALIGN);
    z->segments[z->count++] = (ZeroSegment){.bucket = bucket,
                                            .codes = kind & ZERO_CODES,
                                            .muon = kind & ZERO_MUON,
                                            .begin = begin,
                                            .part = part};
    z->size = begin + part * z->ranks;
}

ZeroLayout zero_layout(const ParamLayout *layout, int ranks, const uint8_t *kinds) {
    ZeroLayout z = {.layout = layout, .ranks = ranks};
    z.segments = calloc_or_die(ZERO_KINDS * (size_t)layout->num_buckets, sizeof(ZeroSegment));
    z.first = calloc_or_die((size_t)layout->num_buckets + 1, sizeof(int));
    z.sharded_offset = calloc_or_die((size_t)layout->count, sizeof(int64_t));
    z.segment = calloc_or_die((size_t)layout->count, sizeof(int));
    for (int b = 0; b < layout->num_buckets; b++) {
        for (int kind = ZERO_KINDS - 1; kind >= 0; kind--) { append_segment(&z, b, kinds, kind); }
        z.first[b + 1] = z.count;
    }
    return z;
}

void zero_free(ZeroLayout *z) {
    free(z->segments);
    free(z->first);
    free(z->sharded_offset);
    free(z->segment);
    *z = (ZeroLayout){0};
}

int zero_ranges(const ZeroLayout *z, int rank, ZeroRange **ranges) {
    const ParamLayout *layout = z->layout;
    int count = 0;
    int64_t kept = 0;
    *ranges = calloc_or_die((size_t)layout->count, sizeof(ZeroRange));
    for (int turn = 0; turn < 2 * z->count; turn++) { // AdamW's segments, then Muon's
        int s = turn % z->count;
        const ZeroSegment *segment = &z->segments[s];
        int64_t begin = segment->begin + rank * segment->part, end = begin + segment->part;
        if (segment->muon != (turn >= z->count)) { continue; }
        for (int i = 0; i < layout->count; i++) {
            const Param *p = &layout->params[i];
            int64_t from = max64(begin, z->sharded_offset[i]),
                    to = min64(end, z->sharded_offset[i] + extent(p));
            if (z->segment[i] != s || from >= to) { continue; }
            (*ranges)[count++] = (ZeroRange){.begin = p->offset + from - z->sharded_offset[i],
                                             .end = p->offset + to - z->sharded_offset[i],
                                             .sharded_offset = from,
                                             .kept = kept,
                                             .segment = s,
                                             .param = i};
            kept += to - from;
        }
    }
    return count;
}

double zero_matrix_flops(const ZeroMatrix *m) {
    double r = min64(m->rows, m->columns), c = max64(m->rows, m->columns);
    return MUON_STEPS * (4 * r * r * c + 2 * r * r * r);
}

static int compare_matrices(const void *a, const void *b) {
    const ZeroMatrix *x = a, *y = b;
    double difference = zero_matrix_flops(y) - zero_matrix_flops(x);
    if (difference != 0) { return difference > 0 ? 1 : -1; }
    if (x->rows != y->rows) { return x->rows - y->rows; } // with equal rows, columns are equal too
    return x->sharded_offset < y->sharded_offset ? -1 : 1;
}

int zero_matrices(const ZeroLayout *z, ZeroMatrix **matrices) {
    const ParamLayout *layout = z->layout;
    int count = 0;
    FREED double *load = calloc_or_die((size_t)z->ranks, sizeof(double));
    *matrices = calloc_or_die(HF_PARTS * (size_t)layout->count, sizeof(ZeroMatrix));
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        int rows[HF_PARTS], segment = z->segment[i];
        int parts = z->segments[segment].muon ? param_matrices(&layout->config, p, rows) : 0;
        int64_t offset = z->sharded_offset[i];
        for (int k = 0; k < parts; offset += (int64_t)rows[k++] * p->cols) {
            (*matrices)[count++] = (ZeroMatrix){rows[k], p->cols, offset, segment, 0};
        }
    }
    qsort(*matrices, (size_t)count, sizeof(ZeroMatrix), compare_matrices);
    for (int i = 0; i < count; i++) {
        ZeroMatrix *m = &(*matrices)[i];
        for (int r = 1; r < z->ranks; r++) { m->owner = load[r] < load[m->owner] ? r : m->owner; }
        load[m->owner] += zero_matrix_flops(m);
    }
    return count;
}
