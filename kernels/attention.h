// Causal attention, softmax(QK'/sqrt(D))V, which reads the packed query-key-value directly.
//
// qkv, d_qkv: BF16 [B,T,(H+2G)D], each row the H query heads, the G key heads, the G value heads.
// out, d_out: BF16 [B,T,H*D]. lse: FP32 [B,H,T], the log-sum-exp of each row, kept for backward.
//
// Every address is a multiple of 16 bytes, and G divides H.
//
// Documents that are packed into a sequence do not see each other where the shape has `documents`:
// query t then sees the keys from starts[t], where its document begins, to t. They are int32: the
// starts [B,T], which never decrease within a sequence, and then how the kernels for heads of 64
// share their work, which attention_share_work writes. Where documents are short, those kernels
// skip tiles; cuDNN does not.
//
// cuDNN's flash attention does the work, through its C backend API; where it has no engine for a
// shape (a head size that is not a multiple of 8, say), a plain kernel of our own takes its place.
// On Hopper kernels of our own compute heads of 64.
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

// On the host: writes what follows the starts (attention64_backward.cu). size: of `documents` as a
// whole, in int32.
enum { ATTENTION64_BLOCKS = 160 }; // the most blocks of a launch
static inline size_t attention_documents_size(AttentionShape s) {
    return (size_t)s.B * (size_t)s.T + 2 * (ATTENTION64_BLOCKS + 1);
}
void attention_share_work(const Gpu *gpu, AttentionShape s, int *documents);

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
// d_qkv is overwritten.
void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv);

// The plain kernel: heads of up to MOST_HEAD_SIZE (kernels.h).
void attention_plain_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
void attention_plain_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                              const Bf16 *out, const float *lse, const Bf16 *qkv);

// attention64_forward.cu and attention64_backward.cu, on Hopper: compute capability 9.0 alone,
// heads of 64, as many key/value heads as query heads, T up to 2048. All sums have a fixed order.
// The backward pass needs workspace.
bool attention64_serves(const Gpu *gpu, AttentionShape s);
void attention64_check(const Gpu *gpu, AttentionShape s); // dies if they do not serve it
size_t attention64_workspace(AttentionShape s);           // bytes; 0: they serve the shape nowhere
// On the host: what the pieces of a head's work cost in a sequence with these starts. Returns their
// number.
int attention64_forward_costs(int T, const int *starts, int *costs);
void attention64_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
void attention64_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                          const Bf16 *out, const float *lse, const Bf16 *qkv);

// Bytes of gpu->attention_workspace with which both passes work, at most `most` where that is
// possible. With more, the deterministic backward is cut into fewer pieces. Needs no device: they
// are enough whichever kernel computes the backward pass.
size_t attention_workspace(AttentionShape s, size_t most);

// Whether cuDNN or the kernels for heads of 64 compute the shape; if not, the plain kernel does.
bool attention_is_fast(Gpu *gpu, AttentionShape s);

// At the start of a run: makes the plans of its shape. False, with one warning a run: the plain
// kernel computes it.
bool attention_start(Gpu *gpu, AttentionShape s);

// Forgets the plans.
void attention_close(Gpu *gpu);

END_C
