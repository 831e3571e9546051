// Memory is planned, then allocated once. Each buffer is requested here, under a name, in a
// section; plan_print shows the list, and plan_assign gives every buffer its place in one
// allocation. Nothing is allocated after that, so evaluation, sampling and saving cannot run out.
//
// LLM8_GUARD=1, for tests: an overrun of a buffer hits its neighbour in the same allocation, where
// compute-sanitizer and AddressSanitizer see nothing. With it, phases share no memory, a guard zone
// lies behind every buffer, buffers of a step are filled with NaN before the step, and a written
// zone ends the run with the buffer's name.
#pragma once

#include "../base/common.h"

#include <stdio.h>

BEGIN_C

enum { PLAN_ALIGN = 256, PLAN_GUARD_BYTES = 4096 };

// How long a buffer keeps its content. Only PHASE_ALWAYS outlives a step; the phases after
// PHASE_STEP exclude each other, so their buffers share memory.
typedef enum {
    PHASE_ALWAYS,
    PHASE_STEP,      // written anew in every forward pass, and read until the end of the step
    PHASE_LINEAR,    // a linear layer of a block, and the producers of its operands
    PHASE_ATTENTION, // the attention of a block
    PHASE_HEAD,      // the LM head and the loss
    PHASE_SAVE,      // a checkpoint's way to the host
    PHASE_UPDATE,    // the optimizer's step
    PHASE_COUNT
} PlanPhase;

typedef struct {
    const char *name, *category; // string literals
    int64_t bytes;               // as requested
    PlanPhase phase;
    void **pointer; // where plan_assign puts the buffer's address
    char *address;
} PlanRow;

// How the guard reaches the planned memory, in the order of the trainer's stream.
typedef struct {
    void *context;
    void (*fill)(void *context, void *to, int byte, int64_t bytes);
    void (*fetch)(void *context, void *to, const void *from, int64_t bytes); // waits for the copy
} PlanMemory;

typedef struct {
    int count, room;
    PlanRow *rows;
    const char *category; // of the buffers that come next, as is phase
    PlanPhase phase;
    int64_t phase_bytes[PHASE_COUNT]; // what each phase's buffers need
    int64_t bytes;                    // of the whole allocation
    PlanMemory memory;                // without functions: the host's
} Plan;

// What the buffers that come next are for, and how long they keep their content.
static inline void plan_section(Plan *plan, const char *category, PlanPhase phase) {
    plan->category = category;
    plan->phase = phase;
}

// *pointer stays NULL until plan_assign, and for good when bytes is 0.
void plan_buffer(Plan *plan, const char *name, int64_t bytes, void **pointer);
// A buffer of n elements of what `pointer` points to.
#define PLAN(plan, name, n, pointer) \
    plan_buffer(plan, name, (int64_t)(n) * (int64_t)sizeof(*(pointer)), (void **)&(pointer))

// Buffers by category, largest first within it, and the sums.
void plan_print(const Plan *plan, const char *title, FILE *out);

// Gives the buffers their addresses from base on (PLAN_ALIGN aligned, plan->bytes long), and sets
// their guard zones.
void plan_assign(Plan *plan, void *base);
void plan_free(Plan *plan);

// These do nothing unless LLM8_GUARD=1.
void plan_guard_poison(const Plan *plan); // before a step
// After the step. False: a zone was written, and err names its buffer.
bool plan_guard_check(const Plan *plan);

END_C
