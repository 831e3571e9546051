// A fault for each tool of compute-sanitizer to find, for test/sanitize_gpu.sh:
//   sanitizer_faults TOOL        memcheck, racecheck, initcheck or synccheck
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 64 };

__global__ void writes_behind(int *out) {
    out[THREADS + threadIdx.x] = 1;
}

__global__ void reads_without_barrier(int *out) {
    __shared__ int shared[THREADS];
    shared[threadIdx.x] = (int)threadIdx.x;
    out[threadIdx.x] = shared[THREADS - 1 - threadIdx.x];
}

__global__ void reads_unwritten(int *out, const int *in) {
    out[threadIdx.x] = in[threadIdx.x];
}

// Thread 16 of each warp calls the barrier of threads 0 to 15 (others: 0xffff). A barrier that only
// some threads call is no fault here once the others have ended.
__global__ void barrier_of_others(int *out, unsigned others) {
    __shared__ int shared[THREADS];
    if (threadIdx.x % 32 < 17) {
        shared[threadIdx.x] = out[threadIdx.x];
        __syncwarp(others);
        out[threadIdx.x] = shared[threadIdx.x ^ 1];
    }
}

// Arrives at a barrier that nobody has initialised.
__global__ void barrier_never_made(unsigned long long *out) {
    __shared__ unsigned long long barrier;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
                 : "=l"(*out)
                 : "r"((unsigned)__cvta_generic_to_shared(&barrier))
                 : "memory");
}

int main(int argc, char **argv) {
    int *out, *in;
    const char *tool = argc == 2 ? argv[1] : "";
    if (cudaMalloc((void **)&out, THREADS * sizeof(int)) != cudaSuccess ||
        cudaMalloc((void **)&in, THREADS * sizeof(int)) != cudaSuccess) {
        fprintf(stderr, "error: no GPU memory\n");
        return 1;
    }
    if (strcmp(tool, "memcheck") == 0) { writes_behind<<<1, THREADS>>>(out); }
    if (strcmp(tool, "racecheck") == 0) { reads_without_barrier<<<1, THREADS>>>(out); }
    if (strcmp(tool, "initcheck") == 0) { reads_unwritten<<<1, THREADS>>>(out, in); }
    if (strcmp(tool, "synccheck") == 0) {
        barrier_of_others<<<1, THREADS>>>(out, 0xffff);
        barrier_never_made<<<1, 1>>>((unsigned long long *)out);
    }
    cudaDeviceSynchronize(); // the tool says what was wrong
    return 0;
}
