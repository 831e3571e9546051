#include "zero.h"

#include <stdlib.h>

// What a parameter takes of the space, its gap included.
static int64_t extent(const Param *p) {
    return round_up64(param_size(p), PARAM_ALIGN);
}

// The parameters of a bucket that are, or are not, codes, as one segment, if there are any.
static void append_segment(ZeroLayout *z, int bucket, const bool *codes, bool wanted) {
    const ParamLayout *layout = z->layout;
    Bucket b = layout->buckets[bucket];
    int64_t begin = z->size;
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        if (p->offset < b.begin || p->offset >= b.end) { continue; }
        if ((codes != NULL && codes[i]) != wanted) { continue; }
        z->place[i] = z->size;
        z->segment[i] = z->count;
        z->size += extent(p);
    }
    if (z->size == begin) { return; }
    int64_t part = round_up64((z->size - begin + z->ranks - 1) / z->ranks, PARAM_ALIGN);
    z->segments[z->count++] = (ZeroSegment){bucket, wanted, begin, part, z->kept};
    z->size = begin + part * z->ranks;
    z->kept += part;
}

ZeroLayout zero_layout(const ParamLayout *layout, int ranks, const bool *codes) {
    ZeroLayout z = {.layout = layout, .ranks = ranks};
    z.segments = calloc_or_die(2 * (size_t)layout->num_buckets, sizeof(ZeroSegment));
    z.first = calloc_or_die((size_t)layout->num_buckets + 1, sizeof(int));
    z.place = calloc_or_die((size_t)layout->count, sizeof(int64_t));
    z.segment = calloc_or_die((size_t)layout->count, sizeof(int));
    for (int b = 0; b < layout->num_buckets; b++) {
        append_segment(&z, b, codes, true);
        append_segment(&z, b, codes, false);
        z.first[b + 1] = z.count;
    }
    return z;
}

void zero_free(ZeroLayout *z) {
    free(z->segments);
    free(z->first);
    free(z->place);
    free(z->segment);
    *z = (ZeroLayout){0};
}

int zero_ranges(const ZeroLayout *z, int rank, ZeroRange **ranges) {
    const ParamLayout *layout = z->layout;
    int count = 0;
    *ranges = calloc_or_die((size_t)layout->count, sizeof(ZeroRange));
    for (int s = 0; s < z->count; s++) {
        const ZeroSegment *segment = &z->segments[s];
        int64_t begin = segment->begin + rank * segment->part, end = begin + segment->part;
        for (int i = 0; i < layout->count; i++) {
            const Param *p = &layout->params[i];
            int64_t from = max64(begin, z->place[i]), to = min64(end, z->place[i] + extent(p));
            if (z->segment[i] != s || from >= to) { continue; }
            (*ranges)[count++] = (ZeroRange){.begin = p->offset + from - z->place[i],
                                             .end = p->offset + to - z->place[i],
                                             .place = from,
                                             .kept = segment->kept + from - begin,
                                             .segment = s,
                                             .param = i};
        }
    }
    return count;
}
