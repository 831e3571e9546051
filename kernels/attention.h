// Causal attention, softmax(QK'/sqrt(D))V, which reads the packed query-key-value directly.
//
// qkv, d_qkv: BF16 [B,T,(H+2G)D]; a row has the H query heads, the G key heads, the G value heads.
// out, d_out: BF16 [B,T,H*D]. lse: FP32 [B,H,T], the log-sum-exp of each row, kept for backward.
//
// Every address must be a multiple of 16 bytes, and G must divide H.
//
// A sequence may hold several documents. If the shape has `documents`, attention stays inside each
// document: query t sees the keys from starts[t], where its document begins, to t. `documents` is
// an array of int32. It begins with the starts [B,T], which never decrease within a sequence.
// attention_share_work then writes what our kernels for Hopper need: the ends [B,T] (one past the
// last token of each token's document), and which part of the work each thread block does. These
// kernels skip tiles whose queries and keys share no document; cuDNN does not.
//
// There are three kinds of kernels. On Hopper, our own kernels compute
//   the forward pass of heads of 64 or 128
//   the backward pass of heads of 64 with as many key/value heads as query heads
//   the backward pass of heads of 128, if the shape has `documents`
// All else is computed by cuDNN's flash attention, through its C backend API. If cuDNN has no
// engine for a shape (say, if the head size is not a multiple of 8), our plain kernel computes it.
// Without documents cuDNN's backward pass is faster than ours at heads of 128. With documents, the
// kernels are chosen before the documents' lengths are known, so our kernels always compute that
// pass.
//
// cuDNN's backward pass sums dQ in the order in which thread blocks finish. Its deterministic path
// has a fixed order, but needs about 2 H T^2 bytes of workspace per sequence. So the deterministic
// path runs on some of the sequences at a time, or on some key/value heads of one sequence.
#pragma once

#include "gpu.h"

BEGIN_C

typedef struct {
    int B, T, H, G, D;
    bool deterministic;
    const int *documents; // address on the device; NULL: a sequence is one document
} AttentionShape;

// After the starts and the ends, `documents` has a table for each kernel, which says where each
// thread block's part of the work begins. A kernel has at most ATTENTION_BLOCKS thread blocks.
// CUTS_FORWARD is the table of the forward pass, CUTS_KEYS that of the gradients of keys and values
// (with heads of 64, of the whole backward pass), and CUTS_QUERIES that of the queries' gradient.
enum { ATTENTION_BLOCKS = 160 };
typedef enum { CUTS_FORWARD, CUTS_KEYS, CUTS_QUERIES, CUT_KINDS } AttentionCuts;
static inline size_t attention_cuts_at(AttentionShape s, int kind) {
    return 2 * (size_t)s.B * (size_t)s.T + (size_t)kind * (ATTENTION_BLOCKS + 1);
}
static inline size_t attention_documents_size(AttentionShape s) { // counted in int32
    return attention_cuts_at(s, CUT_KINDS);
}
// Writes the ends and the tables behind the starts that the host array `documents` already has, if
// our kernels for Hopper compute the forward pass of the shape. s.documents is not read.
void attention_share_work(const Gpu *gpu, AttentionShape s, int *documents);

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
// d_qkv is overwritten.
void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv);

// The plain kernels take heads of up to MAX_HEAD_SIZE (kernels.h).
void attention_plain_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
void attention_plain_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                              const Bf16 *out, const float *lse, const Bf16 *qkv);

// Our kernels for Hopper (only compute capability 9.0): attention_queries.cu,
// attention64_backward.cu and attention128_keys.cu. All sums have a fixed order.
enum { ATTENTION_MAX_T = 131072, ATTENTION64_MAX_T = 2048 }; // 2048: for attention64_backward
// Returns whether these kernels can compute the forward or the backward pass of the shape.
bool attention_own_serves(const Gpu *gpu, AttentionShape s, bool backward);
// Ends the program if these kernels cannot compute the pass, or if the workspace is too small.
void attention_own_check(const Gpu *gpu, AttentionShape s, bool backward);
// Returns the bytes of workspace that the backward pass needs, for any documents.
size_t attention_own_workspace(AttentionShape s);
void attention_own_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
void attention_own_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv);
// attention_own_backward calls these functions, after it has checked their arguments. delta [B,H,T]
// = -rowsum(dO O): attention128_queries writes it, and attention128_keys reads it.
void attention64_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                          const Bf16 *out, const float *lse, const Bf16 *qkv);
void attention128_queries(const Gpu *gpu, AttentionShape s, Bf16 *d_qkv, float *delta,
                          const Bf16 *d_out, const Bf16 *out, const float *lse, const Bf16 *qkv);
void attention128_keys(const Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                       const float *lse, const float *delta, const Bf16 *qkv);

// Returns the bytes of gpu->attention_workspace that the forward and the backward pass need: at
// most `most`, if possible. With more bytes, cuDNN's backward pass is cut into fewer pieces. The
// function needs no device: the bytes are enough whichever kernel computes the backward pass.
size_t attention_workspace(AttentionShape s, size_t most);

// Returns whether cuDNN or the kernels for Hopper compute both passes of the shape; if not, the
// plain kernel computes them.
bool attention_is_fast(Gpu *gpu, AttentionShape s);

// Makes cuDNN's plans for the shape, if they are needed and not made yet. Returns false if neither
// cuDNN nor the kernels for Hopper support the shape, so that the plain kernel computes the
// attention. The first call that returns false prints a warning.
bool attention_start(Gpu *gpu, AttentionShape s);

// Frees the plans.
void attention_close(Gpu *gpu);

END_C
