// The part of NCCL that we use. It is loaded when it is needed, so a machine of one GPU needs no
// NCCL, to build or to run. The names, types and values are those of NCCL's API reference ("NCCL
// API" in NVIDIA's NCCL user guide: communicator creation, collective communication functions,
// group calls, types). They have not changed since NCCL 2.10. test/test_gpu_comm.cu compares them
// with nccl.h if nccl.h is installed.
#pragma once

#include "../base/common.h"

#include <cuda_runtime_api.h>

BEGIN_C

typedef struct ncclComm *NcclComm;
typedef struct {
    char internal[128];
} NcclId;

enum {
    NCCL_SUCCESS = 0,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7
};
enum { NCCL_UINT8 = 1, NCCL_UINT32 = 3, NCCL_FLOAT32 = 7, NCCL_FLOAT64 = 8, NCCL_BFLOAT16 = 9 };
enum { NCCL_SUM = 0, NCCL_MAX = 2 };
enum { NCCL_OLDEST = 21000 }; // 2.10.0, the first with BF16

// NCCL's result, data type and operation are enums; here their type is int.
typedef struct {
    int (*GetVersion)(int *version);
    int (*GetUniqueId)(NcclId *id);
    int (*CommInitRank)(NcclComm *comm, int ranks, NcclId id, int rank);
    int (*CommDestroy)(NcclComm comm);
    int (*CommGetAsyncError)(NcclComm comm, int *error);
    const char *(*GetErrorString)(int result);
    int (*AllReduce)(const void *from, void *to, size_t count, int type, int op, NcclComm comm,
                     cudaStream_t stream);
    int (*ReduceScatter)(const void *from, void *to, size_t received, int type, int op,
                         NcclComm comm, cudaStream_t stream);
    int (*AllGather)(const void *from, void *to, size_t sent, int type, NcclComm comm,
                     cudaStream_t stream);
    int (*Send)(const void *from, size_t count, int type, int peer, NcclComm comm,
                cudaStream_t stream);
    int (*Recv)(void *to, size_t count, int type, int peer, NcclComm comm, cudaStream_t stream);
    int (*GroupStart)(void);
    int (*GroupEnd)(void);
} Nccl;

// Opens libnccl.so.2. Returns false, with error_text(), if it is missing or too old.
bool nccl_load(Nccl *nccl);

END_C
