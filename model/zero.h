// ZeRO-1: decides which elements of the parameter space each rank keeps, from the layout alone.
//
// A bucket (the embeddings, a block, the final norm with the head) is cut into segments. The
// parameters of a segment are gathered in one way (as FP8 codes or not), have one optimizer (AdamW
// or Muon), and lie one after another. The segment is padded at the end to a multiple of
// ranks * PARAM_ALIGN elements, and divided into equal parts; rank r keeps the r-th part. So each
// segment needs one reduce-scatter and one all-gather with equal counts, which work in place: in
// the gradients, in the BF16 copies, in the codes. The price is that a rank's part can begin and
// end inside a matrix, at a multiple of PARAM_ALIGN. Therefore kernels that work on parts go by
// elements, not by tiles, and transposed copies are made after the gathering. Muon's Newton-Schulz
// steps need whole matrices, so each matrix has an owner among the ranks during these steps
// (ZeroMatrix).
//
// The sharded layout is the parameter space in the order of the segments: those of each bucket lie
// together, with padding between them. The padding stays zero, belongs to no parameter, and is in
// no checkpoint, because a rank saves ranges of the parameter space. A rank's own arrays (master
// weights and moments) hold its parts of all segments of AdamW, and after them its parts of Muon's.
#pragma once

#include "model.h"

BEGIN_C

// Flags of a parameter: it is gathered as FP8 codes; it is updated by Muon. A bucket has a segment
// for each of the ZERO_KINDS combinations of flags that occurs in it.
enum { ZERO_CODES = 1, ZERO_MUON = 2, ZERO_KINDS = 4 };

typedef struct {
    int bucket;
    bool codes;    // gathered as FP8 codes
    bool muon;     // updated by Muon
    int64_t begin; // index of the segment's first element in the sharded layout
    int64_t part;  // elements that each rank keeps: a multiple of PARAM_ALIGN
} ZeroSegment;

typedef struct {
    const ParamLayout *layout;
    int ranks;
    int count;
    ZeroSegment *segments; // [count], in order of bucket, then of begin
    int *first; // [num_buckets + 1] each bucket's first segment; the last entry is `count`
    int64_t *sharded_offset; // [layout->count] where a parameter begins in the sharded layout
    int *segment;            // [layout->count] which segment a parameter is in
    int64_t size;            // elements of the sharded layout, in which the gradients lie
} ZeroLayout;

// kinds [layout->count]: the flags of each parameter; NULL: no parameter has flags.
ZeroLayout zero_layout(const ParamLayout *layout, int ranks, const uint8_t *kinds);
void zero_free(ZeroLayout *z);

// The elements of one parameter that a rank keeps. They lie together in the parameter space, in the
// sharded layout, and in the rank's own arrays.
typedef struct {
    int64_t begin, end;     // elements of the parameter space
    int64_t sharded_offset; // index of `begin` in the sharded layout
    int64_t kept;           // index of `begin` in the rank's own arrays
    int segment;
    int param;
} ZeroRange;

// Lists a rank's ranges in the order of its own arrays: those of AdamW's segments, then of Muon's.
// Returns the number of ranges; the caller frees *ranges.
int zero_ranges(const ZeroLayout *z, int rank, ZeroRange **ranges);

// A matrix that Muon updates, and the rank that computes its Newton-Schulz steps.
typedef struct {
    int rows, columns;
    int64_t sharded_offset; // index of the first element in the sharded layout
    int segment;
    int owner;
} ZeroMatrix;

// Lists all matrices that Muon updates, those of the same shape together. Returns how many there
// are; the caller frees *matrices. Owners are assigned from the largest matrix to the smallest: a
// matrix goes to the rank with the least work so far. So no rank has more work than the mean plus
// one matrix.
int zero_matrices(const ZeroLayout *z, ZeroMatrix **matrices);

// Returns the floating-point operations of a matrix's Newton-Schulz steps.
double zero_matrix_flops(const ZeroMatrix *m);

END_C
