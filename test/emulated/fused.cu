// The matmuls with an activation on an emulated multiprocessor: test_gpu_fused.cu at its small
// shapes, over the stand-ins but for these kernels; and planted faults, each of which must be
// found.
#include "../test_gpu_fused.cu"

#include "faults.h"

#include <tuple>

// quantize.cu's, for GELU's column sums alone
size_t partial_sums_bytes(int64_t M, int64_t columns) {
    return (size_t)(divide_up(M, MATMUL_ROWS) * columns) * sizeof(float);
}

void sum_partials(const PartialSums &sums, cudaStream_t) {
    for (int64_t column = 0; column < sums.columns && sums.outs[0].data != NULL; column++) {
        float sum = 0.0f;
        for (int i = 0; i < sums.count; i++) { sum += sums.partials[i * sums.columns + column]; }
        gradient_store(sums.outs[0], column, sum);
    }
}

static void check_faults_of(Problem &p) {
    const bool strips = p.kind == HEAD || p.kind == ROTARY, wide = p.kind == SWIGLU || strips;
    gpu.sms = wide ? 2 : 1; // all tiles are one block's, or one cluster's
    // shared memory has been read before that; and the cluster's barrier follows __syncthreads
    std::vector<std::pair<std::string, std::string>> harmless = {{"left out", "stores_wait"}};
    // machine.h does not model the fence after ordinary stores, and these have no others
    if (strips) { harmless.push_back({"left out", "show_to_tma"}); }
    if (wide) { harmless.push_back({"left out", "named barrier 0"}); }
    check_faults(harmless, [&] {
        p.reset();
        p.run();
        Results r(p);
        return std::make_tuple(r.fp8, r.fp8_t, bf16_codes(r.x), bf16_codes(r.sums), r.amax);
    });
}

TEST(planted_faults) {
    for (Kind kind : {GELU, GELU_BACKWARD, SWIGLU, HEAD}) {
        Problem p(272, kind == HEAD ? 304 : 144, 272, FP8_E4M3, kind, kind != GELU_BACKWARD, true);
        check_faults_of(p);
    }
    Queries queries(16, 17, 3, 1, 64, 272, true);
    check_faults_of(queries);
}
