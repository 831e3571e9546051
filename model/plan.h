// Memory is planned, then allocated once. Whoever needs a buffer says so here, under a name and a
// category; plan_print shows the list, and plan_assign gives every buffer its place in one
// allocation. Nothing is allocated after that, so evaluation, sampling and saving cannot run out.
#ifndef LLM8_PLAN_H
#define LLM8_PLAN_H

#include "../base/common.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { PLAN_ALIGN = 256 };

// When a buffer is in use. Those of one phase only share their memory with those of another.
typedef enum {
    PHASE_ALWAYS,
    PHASE_LINEAR,    // a linear layer of a block, with what makes its operands
    PHASE_ATTENTION, // the attention of a block
    PHASE_HEAD,      // the LM head and the loss
    PHASE_SAVE,      // a checkpoint's way to the host
    PHASE_COUNT
} PlanPhase;

typedef struct {
    const char *name, *category; // string literals
    int64_t bytes;
    PlanPhase phase;
    void **pointer; // where plan_assign puts the buffer's address
} PlanRow;

typedef struct {
    int count, room;
    PlanRow *rows;
    PlanPhase phase;                  // of the buffers that come next
    int64_t phase_bytes[PHASE_COUNT]; // what each phase's buffers need
    int64_t bytes;                    // all of it: what is always in use and the largest phase
} Plan;

// *pointer stays NULL until plan_assign, and for good when bytes is 0.
void plan_buffer(Plan *plan, const char *category, const char *name, int64_t bytes, void **pointer);

// Buffers by category, largest first within it, and the sums.
void plan_print(const Plan *plan, FILE *out);

// Gives the buffers their addresses from base on (PLAN_ALIGN aligned, plan->bytes long).
void plan_assign(Plan *plan, void *base);
void plan_free(Plan *plan);

#ifdef __cplusplus
}
#endif

#endif
