// Causal attention, softmax(QK'/sqrt(D))V, which reads the packed query-key-value directly.
//
// qkv, d_qkv: BF16 [B,T,(H+2G)D], each row the H query heads, the G key heads, the G value heads.
// out, d_out: BF16 [B,T,H*D]. lse: FP32 [B,H,T], the log-sum-exp of each row, kept for backward.
//
// Every address is a multiple of 16 bytes, and G divides H.
//
// Documents that are packed into a sequence do not see each other where the shape has `documents`:
// query t then sees the keys from starts[t], where its document begins, to t. They are int32: the
// starts [B,T], which never decrease within a sequence, and then what attention_share_work writes
// for the kernels for Hopper: the ends [B,T] (one past the last token of each token's document),
// and how they share their work. Where documents are short, those kernels skip tiles; cuDNN does
// not.
//
// cuDNN's flash attention does the work, through its C backend API; where it has no engine for a
// shape (a head size that is not a multiple of 8, say), a plain kernel of our own takes its place.
// On Hopper kernels of our own compute heads of 64, and with documents heads of 128. (Where a
// sequence is one document, cuDNN is faster at heads of 128. With documents they are computed here
// all the same: a batch's lengths are not known when the kernels are chosen.)
//
// Deterministic backward of cuDNN: it sums dQ in the order in which blocks finish, unless it may
// write dQ directly. That path needs about 2 H T^2 bytes of workspace per sequence, so it runs on
// some sequences at a time, or on some key/value heads of one.
#pragma once

#include "gpu.h"

BEGIN_C

typedef struct {
    int B, T, H, G, D;
    bool deterministic;
    const int *documents; // address on the device; NULL: a sequence is one document
} AttentionShape;

// Where each block's part of a pass's work begins, after the starts and the ends. A pass has at
// most ATTENTION_BLOCKS blocks.
enum { ATTENTION_BLOCKS = 160 };
typedef enum { CUTS_FORWARD, CUTS_KEYS, CUTS_QUERIES, CUT_KINDS } AttentionCuts; // and gradients
static inline size_t attention_cuts_at(AttentionShape s, int kind) {
    return 2 * (size_t)s.B * (size_t)s.T + (size_t)kind * (ATTENTION_BLOCKS + 1);
}
static inline size_t attention_documents_size(AttentionShape s) { // in numbers
    return attention_cuts_at(s, CUT_KINDS);
}
// On the host: writes what follows the starts. The shape needs no `documents`.
void attention_share_work(const Gpu *gpu, AttentionShape s, int *documents);

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
// d_qkv is overwritten.
void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv);

// The plain kernel: heads of up to MOST_HEAD_SIZE (kernels.h).
void attention_plain_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
void attention_plain_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                              const Bf16 *out, const float *lse, const Bf16 *qkv);

// attention_queries.cu, attention64_backward.cu and attention128_keys.cu, on Hopper: compute
// capability 9.0 alone. Heads of 64: as many key/value heads as query heads. Heads of 128: with
// documents. All sums have a fixed order. The backward pass needs workspace.
enum { ATTENTION64_MOST_T = 2048, ATTENTION128_MOST_T = 131072 };
bool attention_own_serves(const Gpu *gpu, AttentionShape s);
void attention_own_check(const Gpu *gpu, AttentionShape s, size_t bytes); // dies if they do not
size_t attention_own_workspace(AttentionShape s);                         // bytes; of any documents
void attention_own_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
void attention_own_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv);
// Its parts, which attention_own_backward has checked. delta [B,H,T]: -rowsum(dO O), which the
// queries' gradient writes for the keys'.
void attention64_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                          const Bf16 *out, const float *lse, const Bf16 *qkv);
void attention128_queries(const Gpu *gpu, AttentionShape s, Bf16 *d_qkv, float *delta,
                          const Bf16 *d_out, const Bf16 *out, const float *lse, const Bf16 *qkv);
void attention128_keys(const Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                       const float *lse, const float *delta, const Bf16 *qkv);

// Bytes of gpu->attention_workspace with which both passes work, at most `most` where that is
// possible. With more, the deterministic backward is cut into fewer pieces. Needs no device: they
// are enough whichever kernel computes the backward pass.
size_t attention_workspace(AttentionShape s, size_t most);

// Whether cuDNN or the kernels for Hopper compute the shape; if not, the plain kernel does.
bool attention_is_fast(Gpu *gpu, AttentionShape s);

// At the start of a run: makes the plans of its shape. False, with one warning a run: the plain
// kernel computes it.
bool attention_start(Gpu *gpu, AttentionShape s);

// Forgets the plans.
void attention_close(Gpu *gpu);

END_C
