// The second launch of kernels' sums over rows, of one kind.
#pragma once

#include "../../kernels/device.cuh"

void sum_partials(const PartialSums &sums, cudaStream_t) {
    for (int64_t column = 0; column < sums.columns && sums.outs[0].data != NULL; column++) {
        float sum = 0.0f;
        for (int i = 0; i < sums.count; i++) { sum += sums.partials[i * sums.columns + column]; }
        gradient_store(sums.outs[0], column, sum);
    }
}
