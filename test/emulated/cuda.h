// Tensor maps, as kernels/hopper.cuh makes them, and the driver's limits (CUDA Driver API,
// cuTensorMapEncodeTiled).
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef uint64_t cuuint64_t;
typedef uint32_t cuuint32_t;
typedef enum { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE } CUresult;
typedef enum { // bytes of an element
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 1,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
} CUtensorMapDataType;
typedef enum { // bytes of a row
    CU_TENSOR_MAP_SWIZZLE_32B = 32,
    CU_TENSOR_MAP_SWIZZLE_64B = 64,
    CU_TENSOR_MAP_SWIZZLE_128B = 128
} CUtensorMapSwizzle;
typedef enum { CU_TENSOR_MAP_INTERLEAVE_NONE } CUtensorMapInterleave;
typedef enum { CU_TENSOR_MAP_L2_PROMOTION_L2_256B } CUtensorMapL2promotion;
typedef enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE } CUtensorMapFloatOOBfill;

struct CUtensorMap {
    uint8_t *data;
    int64_t bytes, sizes[5], strides[5], box[5]; // bytes: of an element
    int rank, swizzle;
};

inline CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                       void *data, const cuuint64_t *sizes,
                                       const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
    bool right = (uintptr_t)data % 16 == 0 && box[0] * type % 16 == 0 &&
                 box[0] * type <= (cuuint32_t)swizzle;
    *map = {};
    map->data = static_cast<uint8_t *>(data);
    map->bytes = type;
    map->rank = (int)rank;
    map->swizzle = swizzle;
    for (cuuint32_t i = 0; i < rank; i++) {
        map->sizes[i] = (int64_t)sizes[i];
        map->strides[i] = i == 0 ? type : (int64_t)strides[i - 1];
        map->box[i] = box[i];
        right = right && sizes[i] > 0 && box[i] > 0 && box[i] <= 256;
        right = right && (i == 0 || map->strides[i] % 16 == 0);
    }
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
