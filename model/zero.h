// ZeRO-1: which elements of the parameter space a rank keeps, as pure functions of the layout.
//
// A bucket (the embeddings, a block, the final norm with the head) is cut into segments by how its
// parameters are gathered, as FP8 codes or not, and by their optimizer, AdamW or Muon. A
// segment's parameters lie one after another, padded at the end to ranks * PARAM_ALIGN elements,
// and rank r keeps the r-th of its equal parts. So for every segment one reduce-scatter and one
// all-gather of equal counts do, in place: in the gradients, in the BF16 copies, in the codes. The
// price is that a rank's part begins and ends anywhere in a matrix, at a multiple of PARAM_ALIGN:
// what works on parts goes by elements, not by tiles, and a transposed copy is made after
// gathering. Muon's Newton-Schulz steps need whole matrices: each has an owner among the ranks for
// as long as they take (ZeroMatrix).
//
// That order is the arranged space: the parameter space with each bucket's segments together, and
// padding between. The padding stays zero, belongs to no parameter, and is in no checkpoint: what a
// rank saves is ranges of the parameter space. One rank is arranged like any number of them.
#pragma once

#include "model.h"

BEGIN_C

// What sets a parameter apart from others of its bucket.
enum { ZERO_CODES = 1, ZERO_MUON = 2, ZERO_KINDS = 4 };

typedef struct {
    int bucket;
    bool codes;    // gathered as FP8 codes
    bool muon;     // updated by Muon
    int64_t begin; // in the arranged space
    int64_t part;  // elements a rank: a multiple of PARAM_ALIGN
} ZeroSegment;

typedef struct {
    const ParamLayout *layout;
    int ranks;
    int count; // segments, in order of bucket and of begin
    ZeroSegment *segments;
    int *first;     // [num_buckets + 1] each bucket's first segment; the end
    int64_t *place; // [layout->count] where a parameter begins in the arranged space
    int *segment;   // [layout->count] which segment it is in
    int64_t size;   // of the arranged space: gradients
} ZeroLayout;

// kinds: [layout->count] ZERO_CODES and ZERO_MUON of each parameter; NULL: none.
ZeroLayout zero_layout(const ParamLayout *layout, int ranks, const uint8_t *kinds);
void zero_free(ZeroLayout *z);

// A parameter's elements that a rank keeps, which lie together in the parameter space, in the
// arranged one, and in what the rank keeps.
typedef struct {
    int64_t begin, end; // of the parameter space
    int64_t place;      // of `begin` in the arranged space
    int64_t kept;       // of `begin` among the elements that the rank keeps, range after range
    int segment;
    int param;
} ZeroRange;

// A rank's ranges, in order of `kept`: AdamW's, then Muon's; returns how many, to be freed.
int zero_ranges(const ZeroLayout *z, int rank, ZeroRange **ranges);

// A matrix of Muon's, and the rank that takes its Newton-Schulz steps.
typedef struct {
    int rows, columns;
    int64_t place; // in the arranged space
    int segment;
    int owner;
} ZeroMatrix;

// All of them, those of one shape together; returns how many, to be freed. The largest first goes
// to the rank that has the least to do so far: no rank has more than a matrix above the mean.
int zero_matrices(const ZeroLayout *z, ZeroMatrix **matrices);

// Floating-point operations of a matrix's Newton-Schulz steps.
double zero_matrix_flops(const ZeroMatrix *m);

END_C
