// Causal attention, softmax(QK'/sqrt(D))V, straight on the packed query-key-value.
//
// qkv, d_qkv: BF16 [B,T,(H+2G)D], each row the H query heads, the G key heads, the G value heads.
// out, d_out: BF16 [B,T,H*D]. lse: FP32 [B,H,T], the log-sum-exp of each row, kept for backward.
//
// Every address is a multiple of 16 bytes, and G divides H.
//
// cuDNN's flash attention does the work, through its C backend API; where it has no engine for a
// shape (a head size that is not a multiple of 8, say), a plain kernel of our own serves.
//
// Deterministic backward: cuDNN sums dQ in whatever order blocks finish, unless it may write dQ
// directly; that path needs about 2 H T^2 bytes of workspace a sequence, which is bounded by
// running some sequences, or some key/value heads of one, at a time.
#pragma once

#include "gpu.h"

BEGIN_C

typedef struct {
    int B, T, H, G, D;
    bool deterministic;
} AttentionShape;

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
// d_qkv is overwritten.
void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv);

// The plain kernel: heads of up to MOST_HEAD_SIZE (kernels.h).
void attention_plain_forward(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv);
void attention_plain_backward(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                              const Bf16 *out, const float *lse, const Bf16 *qkv);

// Bytes of gpu->attention_workspace that both passes can work with, at most `most` where that is
// possible: the more, the fewer pieces the deterministic backward is cut into. Needs no device.
size_t attention_workspace(AttentionShape s, size_t most);

// Whether cuDNN serves the shape.
bool attention_by_cudnn(Gpu *gpu, AttentionShape s);

// At the start of a run: makes the plans of its shape, and says, once, where a plain kernel serves.
// True: cuDNN serves.
bool attention_start(Gpu *gpu, AttentionShape s);

// Forgets the plans.
void attention_close(Gpu *gpu);

END_C
