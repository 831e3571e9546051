// What the GPU trainer holds of a micro-batch: what each block keeps for its backward pass, and the
// scratch of the pass itself. All of it planned here, from the same table that --recompute reads.
//
// Shapes are train_gpt.cu's: M = B * T tokens, C channels, N = (H + 2G) * D, F feed-forward, V
// vocabulary, P padded vocabulary.
#ifndef LLM8_ACTIVATIONS_H
#define LLM8_ACTIVATIONS_H

#include "../../kernels/attention.h"
#include "linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Matrix out;         // [M,C]
    float *mean, *rstd; // [M]
} Norm;

// With --recompute, blocks share the buffers that are computed again. Inputs of linear layers are
// kept in the form that the weight gradient reads: plain, or FP8 columns.
typedef struct {
    Bf16 *residual; // [M,C] the block's input
    Norm norm1;
    Bf16 *qkv;          // [M,N] rotated
    Matrix attention;   // [M,H*D]; plain too, which attention's own backward reads
    float *lse;         // [B,H,T]
    Bf16 *residual_mid; // [M,C] after attention
    Norm norm2;
    Bf16 *fc1;        // [M,F], Llama [M,2F]
    Matrix activated; // [M,F]
} Block;

typedef struct {
    Block *blocks, shared; // [L]
    Bf16 *residual_out;    // [M,C] after the last block
    Norm norm_out;
    float *losses; // [M]
    float *rope;   // [T,D]

    Bf16 *d_residual; // [M,C]
    Bf16 *d_norm;     // [M,C], and d_attention [M,H*D]: never alive together
    // [M, the widest]: an FP8 layer's input before it is quantised; in the backward pass
    // d_activated and, in place, GPT-2's d_fc1; then d_qkv
    Bf16 *wide;
    // [M, the widest], [M,C]: FP8 forms of what the linear layer at hand reads
    Matrix wide_fp8, residual_fp8;
    float *partial_sums;

    int chunk_rows;         // of the LM head
    Bf16 *logits;           // [chunk_rows,P]
    Matrix head_x, head_dy; // [chunk_rows,C], [chunk_rows,P]
    float *head_lse;        // [chunk_rows]
} Activations;

AttentionShape attention_shape_of(const Run *run, int B, int T);

// Also sizes and plans the Gpu's workspaces.
void activations_plan(Activations *a, const Params *params, Gpu *gpu, Plan *plan);
// Once the plan has its memory: the blocks learn where the shared buffers are; the rotary table.
void activations_start(Activations *a, const Run *run, const Gpu *gpu);
void activations_free(Activations *a);

// The forms of linear layer's input that this pass makes, from what is kept of it.
Matrix activations_input(const Activations *a, const Params *params, LinearId id,
                         const Matrix *kept);
// The FP8 forms, in scratch, of a linear layer's output gradient that lies in plain.
Matrix activations_gradient(const Params *params, LinearId id, Bf16 *plain, const Matrix *scratch);

#ifdef __cplusplus
}
#endif

#endif
