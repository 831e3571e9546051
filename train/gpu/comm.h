// What the GPUs of a run exchange: collectives over NCCL, on a stream of their own.
//
// A collective is enqueued between comm_begin and comm_end. It starts when the compute stream has
// finished the work that was enqueued before comm_begin. It runs beside the work that is enqueued
// later, until comm_wait makes the compute stream wait for the collective. All collectives between
// a comm_begin and its comm_end are enqueued as one NCCL group. comm_end gives the group a slot, a
// number by which comm_wait names the group. Collectives and waits never make the host wait. They
// can be captured into a CUDA graph, on all ranks or on none. A collective that begins in a capture
// must be joined in the same capture (comm_join). If a captured comm_wait names a collective
// that was enqueued before the capture, every replay waits for the latest collective of that slot.
//
// Every rank makes the same calls in the same order. With one rank nothing happens.
#pragma once

#include "../../kernels/gpu.h"
#include "../../kernels/nccl.h"
#include "../../ranks/group.h"

BEGIN_C

// The first two have GpuType's values, so that the gradients' GpuType can be cast to CommType.
// COMM_U32: the bits of non-negative floats, compared as integers, so that NaN is the largest.
// COMM_U8: FP8 codes.
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
    bool *captured;    // [slots] whether done[slot] was last recorded in a capture
    bool begun;        // between comm_begin and comm_end
} Comm;

// Opens the NCCL communicator of all ranks on the current device. Fails if two ranks have the same
// device or different versions of NCCL. slots: the number of slots. group NULL: one rank.
bool comm_open(Comm *c, Group *group, Gpu *gpu, int slots);
void comm_close(Comm *c);

void comm_begin(Comm *c);
// comm_reduce_scatter and comm_all_gather work in place on a buffer of ranks * count elements,
// whose part r is the count elements from r * count on. comm_reduce_scatter: on each rank r, the
// sum over the ranks replaces part r; the other parts do not change. comm_all_gather: part r of
// rank r is copied to part r of all other ranks.
void comm_reduce_scatter(Comm *c, void *buffer, CommType type, int64_t count);
void comm_all_gather(Comm *c, void *buffer, CommType type, int64_t count);
// Works in place on count elements.
void comm_all_reduce(Comm *c, void *buffer, CommType type, CommOp op, int64_t count);
// Works in place on count elements: rank `from` sends its elements to rank `to`; the other ranks do
// nothing.
void comm_send(Comm *c, void *buffer, CommType type, int64_t count, int from, int to);
void comm_end(Comm *c, int slot);

// Makes the compute stream wait for the slot's last group of collectives (comm_wait), or for all
// collectives that have begun (comm_join). The wait counts to FAMILY_COMMUNICATION.
void comm_wait(Comm *c, int slot);
void comm_join(Comm *c);

END_C
