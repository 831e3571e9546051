// The model on the GPU: its layers, which are set up at the start of a run, and the plan of every
// buffer of a micro-batch. The table of a block's buffers (network.c) also says which of them
// --recompute recomputes.
//
// Shapes are train_gpt.cu's: M = B * T tokens, C channels, N = (H + 2G) * D, F feed-forward, V
// vocabulary, P padded vocabulary.
#pragma once

#include "../../kernels/attention.h"
#include "linear.h"

BEGIN_C

// LayerNorm or RMSNorm. Each call sets M, and whether gradients are added or overwritten.
typedef struct {
    NormForward forward;
    NormBackward backward;
    Operand d_residual; // the input's gradient, in the forms that the layer before the norm reads
} NormLayer;

// A transformer block. Its linear layers hold their inputs, which are the outputs of the norms, of
// the activation and of attention. Attention's output is always kept in BF16, too, because
// attention's backward pass reads it. With --recompute, all blocks share one copy of the buffers
// whose content is recomputed.
typedef struct {
    NormLayer norm1, norm2;
    union {
        struct {
            LinearLayer qkv, attention_out, fc1, fc2;
        };
        LinearLayer linear[LINEAR_HEAD];
    };
    RotaryBackward rope; // each call sets B and T; table NULL: no rotary embedding
    // These three apply only to training passes.
    bool matmul_rotates;   // QKV's forward matmul also rotates queries and keys
    bool matmul_activates; // fc1's forward matmul also applies the activation
    bool matmul_derives;   // the matmul of fc2's input gradient also applies GELU's derivative
    // [F] fc1's bias, if the GELU kernel adds it; NULL if fc1's matmul does. The GELU kernel adds
    // it if fc1 or fc2 is in FP8, because cuBLASLt's epilogue with a bias makes a wide FP8 matmul a
    // quarter slower.
    Bf16 *gelu_bias;
    Bf16 *residual;     // [M,C] the block's input
    Bf16 *qkv_out;      // [M,N]
    Bf16 *rotated;      // [M,N] what attention reads: qkv_out itself, except with QK norm
    float *lse;         // [B,H,T] attention's log-sum-exp
    Bf16 *residual_mid; // [M,C] the residual after attention
    Bf16 *fc1_out;      // [M,F], Llama [M,2F]
} Block;

typedef struct {
    const Run *run;
    Gpu *gpu;
    Params *params;
    Bf16 *wte, *wpe; // [P,C], [positions,C]; wpe NULL: the model has none
    Gradient dwte, dwpe;
    Block *blocks, shared; // [L]; `shared` has the buffers that all blocks share
    NormLayer final_norm;
    LinearLayer head;   // head.x.bf16 [M,C] is the final norm's output
    Bf16 *residual_out; // [M,C] the residual after the last block
    float *losses;      // [M]
    double *loss_sum;   // sum of the losses of the step's micro-batches so far
    float *rope;        // [T,D]

    Operand d_residual; // [M,C], also in its FP8 forms
    // Scratch. Buffers declared in one line share the same bytes, because they are never needed at
    // the same time.
    Bf16 *d_norm, *d_attention; // [M,C], [M,H*D]
    // Inputs of linear layers that do not keep their inputs: `activated` is fc2's input, `input`
    // that of the other layers. Both BF16 forms share the bytes of d_qkv. The FP8 forms share no
    // bytes, because fc1's matmul may write `activated` while it reads `input`.
    Operand input, activated; // [M,C] or [M,H*D]; [M,F]
    // [M,F], Llama [M,2F]; [M,N]. Also in their FP8 forms. Llama's BF16 d_fc1 overwrites fc1_out.
    Operand d_fc1, d_qkv;
    Bf16 *d_activated; // [M,F], shares the bytes of d_qkv; in GPT-2, d_fc1 overwrites d_activated
    Scratch partial_sums;
    int chunk_rows; // rows that the LM head computes at a time: head.dy is [chunk_rows,P] in all
                    // forms
    Scratch loss_scratch; // scratch of the loss, for chunk_rows rows
    // In training, the head's matmul writes the rows' maxima and sums here, so that the loss reads
    // the logits only once. Their memory is that of the codes of the logits' gradient, which the
    // loss writes later. If max_sums.data is NULL, the matmul writes no maxima and sums.
    Scratch max_sums;
} Network;

AttentionShape attention_shape_of(const Run *run, int B, int T);

// Plans the network. Also decides the sizes of the Gpu's workspaces, and plans them.
void network_plan(Network *n, Params *params, Gpu *gpu, Plan *plan);
// Call it after params_restore, which decides how FP8 operands get their scales.
void network_start(Network *n);

// Waits for a bucket's new weights, and makes the forms that matmuls read. Call it before these
// weights are read. If they have been received before, the call does nothing.
void network_receive(Network *n, int bucket);

END_C
