// Hashes buffers, for checked steps (train/gpu/check.h): any single wrong bit changes the hash.
// Also reads the device's clock, for timing.
#include "../base/rng.h"
#include "device.cuh"

// The terms may be added up in any order: a sum of integers does not depend on the order.
__global__ void hash_kernel(uint64_t *sum, const uint64_t *words, int64_t n, int64_t first) {
    uint64_t mine = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        mine += hash_word(words[i], first + i);
    }
    mine = warp_sum(mine);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(reinterpret_cast<unsigned long long *>(sum), (unsigned long long)mine);
    }
}

void gpu_hash(Gpu *gpu, uint64_t *sum, const void *data, int64_t bytes, int64_t first) {
    gpu_family(gpu, FAMILY_OPTIMIZER);
    if (bytes % 8 != 0) { die("gpu_hash: %lld bytes; a multiple of 8", (long long)bytes); }
    if (bytes == 0) { return; }
    int blocks = (int)min64((bytes / 8 + 255) / 256, 4096);
    launch(hash_kernel, blocks, 256, gpu->stream, sum, static_cast<const uint64_t *>(data),
           bytes / 8, first);
}

__global__ void stamp_kernel(uint64_t *nanoseconds) {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    *nanoseconds = now;
}

void gpu_stamp(Gpu *gpu, uint64_t *nanoseconds) {
    launch(stamp_kernel, 1, 1, gpu->stream, nanoseconds);
}
