// One cuDNN plan: the operation graph of causal attention for a shape, forward or backward, and the
// engine that runs it. Between attention_graph.c, which builds plans, and attention.c, which keeps
// and runs them.
#ifndef LLM8_ATTENTION_GRAPH_H
#define LLM8_ATTENTION_GRAPH_H

#include "attention.h"

// Tensors that a call binds to memory.
enum {
    UID_Q = 1,
    UID_K,
    UID_V,
    UID_OUT,
    UID_LSE,
    UID_DOUT,
    UID_DQ,
    UID_DK,
    UID_DV,
    UID_SUM,     // dot(dout, out) of each row, in our workspace
    UID_DQ_SUM,  // FP32 accumulator of dQ, in our workspace, unless deterministic
    UID_SCALE,   // by value
    UID_MASKED,  // by value
    UID_ONE,     // by value
    UID_VIRTUAL, // the first of those that are not bound
};

// A piece of a call: some sequences, some key/value heads with their query heads.
typedef struct {
    int sequences, groups;
} AttentionPiece;

typedef struct {
    AttentionShape shape;
    AttentionPiece piece;
    bool backward;
    bool usable;
    Error why_not;
    cudnnBackendDescriptor_t plan;
    size_t workspace; // cuDNN's own
} AttentionPlan;

// Fills in what follows shape, piece and backward.
void attention_make_plan(Gpu *gpu, AttentionPlan *plan);

#endif
