// Memory is planned, then allocated once. Each buffer is requested with a name, and belongs to a
// category and a phase. plan_print prints the list of buffers, and plan_assign gives every buffer
// its address in one allocation. Nothing is allocated afterwards, so evaluation, sampling and
// saving cannot run out of memory.
//
// LLM8_GUARD=1 is for tests. A write past the end of a buffer hits its neighbour in the same
// allocation, which compute-sanitizer and AddressSanitizer do not notice. With LLM8_GUARD=1, phases
// share no memory, each buffer has a guard zone behind it, and a step's buffers are filled with NaN
// before the step. If a guard zone is written, the run ends with the buffer's name.
#pragma once

#include "../base/common.h"

#include <stdio.h>

BEGIN_C

enum { PLAN_ALIGN = 256, PLAN_GUARD_BYTES = 4096 };

// How long a buffer keeps its content. Only PHASE_ALWAYS lasts longer than a step. The phases after
// PHASE_STEP never overlap in time, so their buffers share memory.
typedef enum {
    PHASE_ALWAYS,
    PHASE_STEP,      // written anew in every micro-batch, and read until the micro-batch ends
    PHASE_FORWARD,   // a block's forward matmuls, and the kernels that produce their inputs
    PHASE_BACKWARD,  // a block's backward matmuls, and the kernels that produce their inputs
    PHASE_ATTENTION, // the attention of a block
    PHASE_HEAD,      // the LM head and the loss
    PHASE_SAVE,      // copying a checkpoint to the host
    PHASE_UPDATE,    // the optimizer's step
    PHASE_COUNT
} PlanPhase;

typedef struct {
    const char *name, *category; // string literals
    int64_t bytes;               // bytes that were requested
    PlanPhase phase;
    void **pointer; // where plan_assign writes the buffer's address
    char *address;
} PlanRow;

// Functions with which the guard writes and reads memory of a GPU, in the order of the trainer's
// CUDA stream.
typedef struct {
    void *context;
    void (*fill)(void *context, void *to, int byte, int64_t bytes);
    void (*fetch)(void *context, void *to, const void *from, int64_t bytes); // waits for the copy
} PlanMemory;

typedef struct {
    int count, room;
    PlanRow *rows;
    const char *category; // category and phase of the next buffers
    PlanPhase phase;
    int64_t phase_bytes[PHASE_COUNT]; // sum of each phase's buffers
    int64_t bytes;                    // the size of the allocation
    PlanMemory memory;                // the functions are NULL for host memory
} Plan;

// Sets the category and the phase of the buffers that are requested next.
static inline void plan_section(Plan *plan, const char *category, PlanPhase phase) {
    plan->category = category;
    plan->phase = phase;
}

// Requests a buffer. *pointer is NULL until plan_assign; if bytes is 0, it stays NULL.
void plan_buffer(Plan *plan, const char *name, int64_t bytes, void **pointer);
// Requests a buffer of n elements of the type that `pointer` points to.
#define PLAN(plan, name, n, pointer) \
    plan_buffer(plan, name, (int64_t)(n) * (int64_t)sizeof(*(pointer)), (void **)&(pointer))

// Prints the categories and the buffers in each, largest first, with their sizes.
void plan_print(const Plan *plan, const char *title, FILE *out);

// Gives the buffers their addresses in the memory at base (plan->bytes long, aligned to
// PLAN_ALIGN), and fills their guard zones.
void plan_assign(Plan *plan, void *base);
void plan_free(Plan *plan);

// The functions below do nothing unless LLM8_GUARD=1.
void plan_guard_poison(const Plan *plan); // fills a step's buffers with NaN; call it before a step
// Call it after a step. Returns false if a guard zone was written; error_text() names the buffer.
bool plan_guard_check(const Plan *plan);

END_C
