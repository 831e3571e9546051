// Muon on the GPU: replaces the gradients of the transformer blocks' matrices by their updates,
// after gpu_muon_momentum has applied the momentum and before gpu_adamw makes the new weights.
//
// Newton-Schulz steps need whole matrices, while a rank keeps only a part of each matrix (ZeRO-1,
// model/zero.h). So each matrix has an owner, which receives the other ranks' parts, takes the
// steps, and sends the parts back. Every element is sent twice, in the gradients' type. A part has
// the same offset in every rank's buffer of gradients. On the owner, a received part overwrites
// gradients that the owner no longer needs, because another rank keeps these elements. With one
// rank nothing is sent.
//
// The owner takes the steps for several matrices of one shape at a time: a single matrix is too
// small to fill a GPU. Muon's scratch shares memory with the buffers of forward and backward
// passes.
#pragma once

#include "../../kernels/kernels.h"
#include "../../model/plan.h"
#include "../../model/zero.h"
#include "../state.h"
#include "comm.h"

BEGIN_C

typedef struct {
    const ZeroLayout *zero;
    float factor;         // the value of --muon-extra-scale-factor
    int num_matrices;     // how many matrices Muon updates on all ranks; 0: only AdamW is used
    int num_own;          // how many matrices this rank updates
    ZeroMatrix *matrices; // [num_matrices]
    ZeroMatrix *own;      // [num_own]
    // [num_own] on the device: the index of each matrix's first element among the gradients
    int64_t *offsets;
    Bf16 *x, *next;          // a batch of matrices, before and after a Newton-Schulz step
    Bf16 *gram, *polynomial; // [side,side] for each matrix of the batch; side = min(rows, columns)
    double *partials;        // partial sums of the matrices' norms
} Muon;

// Finds the matrices that Muon updates, and plans the scratch.
void muon_plan(Muon *m, const Run *run, const ZeroLayout *zero, Plan *plan);
void muon_start(Muon *m, Gpu *gpu);
void muon_free_plan(Muon *m);
// Prints Muon's work and traffic, for --plan.
void muon_print(const Muon *m, GpuType gradient_type, FILE *out);

// Makes the matrices among the gradients orthogonal, and scales them. slot: the slot (comm.h) of
// the collectives that send the parts.
void muon_orthogonalize_all(const Muon *m, Gpu *gpu, Comm *comm, int slot, void *gradients,
                            GpuType type);

END_C
