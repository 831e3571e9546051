// What the GPUs of a run exchange: collectives over NCCL, on a stream of their own.
//
// A collective is enqueued between comm_begin and comm_end. It starts when the compute stream has
// finished the work that was enqueued before comm_begin, and runs beside the work that is enqueued
// after it; comm_wait makes the compute stream wait for it. Several collectives between one
// comm_begin and comm_end are one launch. The host never waits here. All of it can be captured into
// a graph, on all ranks or on none. What begins in a capture must be joined in it (comm_join). A
// wait in a capture for a collective from before it becomes, in every replay, a wait for that
// slot's latest collective.
//
// Every rank makes the same calls in the same order. With one rank nothing happens.
#pragma once

#include "../../kernels/gpu.h"
#include "../../kernels/nccl.h"
#include "../../ranks/group.h"

BEGIN_C

// The first two have GpuType's values, so that a GpuType of gradients converts to them. U32: the
// bits of non-negative floats, of which NaN is the largest. U8: FP8 codes.
typedef enum { COMM_F32, COMM_BF16, COMM_F64, COMM_U32, COMM_U8 } CommType;
typedef enum { COMM_SUM, COMM_MAX } CommOp;

typedef struct {
    int rank, ranks;
    Group *group;
    Nccl nccl;
    NcclComm comm;
    Gpu *gpu;            // its stream is the compute stream
    cudaStream_t stream; // the stream on which the collectives run
    cudaEvent_t ready, joined;
    int slots;
    cudaEvent_t *done; // [slots]
    bool *captured;    // [slots] whether the last record of `done` was in a capture
    bool begun;        // between comm_begin and comm_end
} Comm;

// Opens the ranks' communicator on the current device, which no other rank may use. slots: how many
// collectives can be waited for one by one. group NULL: one rank.
bool comm_open(Comm *c, Group *group, Gpu *gpu, int slots);
void comm_close(Comm *c);

void comm_begin(Comm *c);
// Both work in place on ranks * count elements. Reduce-scatter: part r of the sum goes to its place
// on rank r; the other parts stay as they were. All-gather: every rank's part goes to its place on
// all ranks.
void comm_reduce_scatter(Comm *c, void *buffer, CommType type, int64_t count);
void comm_all_gather(Comm *c, void *buffer, CommType type, int64_t count);
// Works in place on count elements.
void comm_all_reduce(Comm *c, void *buffer, CommType type, CommOp op, int64_t count);
// Works in place on count elements: rank `from` sends its elements to rank `to`; the other ranks do
// nothing.
void comm_move(Comm *c, void *buffer, CommType type, int64_t count, int from, int to);
void comm_end(Comm *c, int slot);

// The compute stream waits for the slot's last collective (comm_wait), or for all that have begun
// (comm_join). The time counts to FAMILY_COMMUNICATION.
void comm_wait(Comm *c, int slot);
void comm_join(Comm *c);

END_C
