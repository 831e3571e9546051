// Muon on the GPU: the gradients of the blocks' matrices become their update, in place, between the
// momentum (gpu_muon_momentum) and the new weights (gpu_adamw).
//
// Newton-Schulz steps need whole matrices, while a rank keeps parts of all (ZeRO-1, model/zero.h).
// So each matrix has an owner: it gets the other ranks' parts, takes the steps, and sends back what
// is theirs. That moves every element twice, in the gradients' type, in the places that it has
// among the gradients, where the other ranks' parts are of no more use. With one rank nothing is
// moved.
//
// The owner takes the steps for several matrices of one shape at a time: one alone is too small to
// fill a GPU. Their scratch shares memory with the micro-batch's.
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
    int num_matrices, num_own;  // 0: all is AdamW's
    ZeroMatrix *matrices, *own; // [num_matrices] of all ranks; [num_own] this one's
    int64_t *places;            // [num_own] on the device: where they lie among the gradients
    Bf16 *x, *next;             // a batch of matrices
    Bf16 *gram, *polynomial;    // and of squares of their smaller side
    double *partials;           // of their norms
} Muon;

// Finds the matrices, none unless the run trains with Muon, and plans the scratch.
void muon_plan(Muon *m, const Run *run, const ZeroLayout *zero, Plan *plan);
void muon_start(Muon *m, Gpu *gpu);
void muon_free_plan(Muon *m);
// For --plan: work and traffic.
void muon_print(const Muon *m, GpuType gradient_type, FILE *out);

// The matrices among the gradients become orthogonal, and are scaled. slot: of the collectives.
void muon_orthogonalize_all(const Muon *m, Gpu *gpu, Comm *comm, int slot, void *gradients,
                            GpuType type);

END_C
