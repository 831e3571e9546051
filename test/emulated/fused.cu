// The products with an activation on an emulated multiprocessor: test_gpu_fused.cu at its small
// shapes, over the stand-ins but for these two kernels; and planted faults, each of which must be
// found.
#include "../test_gpu_fused.cu"

#include "faults.h"
#include "partial_sums.h"

#include <tuple>

// quantize.cu's, for GELU's column sums alone
size_t partial_sums_bytes(int64_t M, int64_t columns) {
    return (size_t)(divide_up(M, PRODUCT_ROWS) * columns) * sizeof(float);
}

TEST(planted_faults) {
    for (Kind kind : {GELU, GELU_BACKWARD, SWIGLU}) {
        gpu.sms = kind == SWIGLU ? 2 : 1; // all tiles are one block's, or one cluster's
        Problem p(272, 144, 272, FP8_E4M3, kind, kind != GELU_BACKWARD, true);
        // shared memory has been read before that; and the cluster's barrier follows __syncthreads
        std::vector<std::pair<std::string, std::string>> harmless = {
            {"left out", "stores_wait"}, {"reads alone", "stores_wait"}};
        if (kind == SWIGLU) { harmless.push_back({"left out", "named barrier 0"}); }
        check_faults(harmless, [&] {
            p.reset();
            p.run();
            Results r(p);
            return std::make_tuple(r.fp8, r.fp8_t, bf16_codes(r.x), bf16_codes(r.sums), r.amax);
        });
    }
}
