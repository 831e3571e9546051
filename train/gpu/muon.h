// Muon on the GPU: the gradients of the blocks' matrices become their update, in place, between the
// momentum (gpu_muon_momentum) and the new weights (gpu_adamw).
//
// Newton-Schulz steps need whole matrices, while a rank keeps a part of each (ZeRO-1,
// model/zero.h). So each matrix has an owner, which receives the other ranks' parts, takes the
// steps, and sends their parts back. That moves every element twice, in the gradients' type. A part
// keeps its place among the gradients. On the owner, that place had other ranks' gradients, which
// are not needed any more. With one rank nothing is moved.
//
// The owner takes the steps for several matrices of one shape at a time: a single one is too small
// to fill a GPU. The scratch shares memory with buffers of the micro-batch.
#pragma once

#include "../../kernels/kernels.h"
#include "../../model/plan.h"
#include "../../model/zero.h"
#include "../state.h"
#include "comm.h"

BEGIN_C

typedef struct {
    const ZeroLayout *zero;
    float factor;               // --muon-extra-scale-factor
    int num_matrices, num_own;  // 0: AdamW updates everything
    ZeroMatrix *matrices, *own; // [num_matrices] all; [num_own] this rank's
    // [num_own] on the device: where this rank's matrices lie among the gradients
    int64_t *places;
    Bf16 *x, *next;          // a batch of matrices
    Bf16 *gram, *polynomial; // a batch of squares, of the matrices' smaller side
    double *partials;        // partial sums of the matrices' norms
} Muon;

// Finds the matrices that Muon updates, and plans the scratch.
void muon_plan(Muon *m, const Run *run, const ZeroLayout *zero, Plan *plan);
void muon_start(Muon *m, Gpu *gpu);
void muon_free_plan(Muon *m);
// For --plan: prints work and traffic.
void muon_print(const Muon *m, GpuType gradient_type, FILE *out);

// The matrices among the gradients become orthogonal, and are scaled. slot: for the collectives.
void muon_orthogonalize_all(const Muon *m, Gpu *gpu, Comm *comm, int slot, void *gradients,
                            GpuType type);

END_C
