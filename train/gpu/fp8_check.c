// Small FP8 products whose exact results are known, before a run relies on them.
#include "../../kernels/gemm.h"
#include "../../kernels/kernels.h"
#include "verify.h"

#include <stdlib.h>

enum { SIDE = 64 };

// Small whole numbers: their sums of products are exact in FP32 whatever the order.
static float value(int row, int column, int key) {
    return (float)((row * 7 + column * 5 + row * column * key) % 7 - 3);
}

typedef struct {
    uint8_t *a, *b;
    float *d;
    Fp8Live *live;
} Buffers;

static void fill(uint8_t *device, Fp8Type type, int key) {
    uint8_t codes[SIDE * SIDE];
    for (int i = 0; i < SIDE * SIDE; i++) {
        codes[i] = fp8_encode(value(i / SIDE, i % SIDE, key), type);
    }
    CUDA_CHECK(cudaMemcpy(device, codes, sizeof(codes), cudaMemcpyHostToDevice));
}

// Entries of d that are not the product of a and b, divided by both scales.
static int wrong_entries(const float *d) {
    int wrong = 0;
    for (int m = 0; m < SIDE; m++) {
        for (int n = 0; n < SIDE; n++) {
            float sum = 0;
            for (int k = 0; k < SIDE; k++) { sum += value(m, k, 1) * value(n, k, 2); }
            wrong += !(d[m * SIDE + n] == sum * 0.125f);
        }
    }
    return wrong;
}

static bool check_type(Gpu *gpu, const Buffers *x, Fp8Type type, Error *err) {
    static const char *const names[] = {"E4M3", "E5M2"};
    float d[SIDE * SIDE];
    Gemm g = {.m = SIDE,
              .n = SIDE,
              .k = SIDE,
              .a = x->a,
              .b = x->b,
              .d = x->d,
              .type_a = type == FP8_E4M3 ? TYPE_E4M3 : TYPE_E5M2,
              .type_b = TYPE_E4M3,
              .type_d = TYPE_F32,
              .trans_b = true,
              .alpha = 1.0f,
              .scale_a = &x->live[0].scale_inv,
              .scale_b = &x->live[1].scale_inv};
    Error why;
    if (!gemm_supported(gpu, g, &why)) {
        return fail(err, "FP8 self-check: no product of %s and E4M3: %s", names[type], why.text);
    }
    fill(x->a, type, 1);
    gemm(gpu, g);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaMemcpy(d, x->d, sizeof(d), cudaMemcpyDeviceToHost));
    int wrong = wrong_entries(d);
    return wrong == 0 ? true
                      : fail(err,
                             "FP8 self-check: %d of %d entries of a product of %s and E4M3 are "
                             "wrong",
                             wrong, SIDE * SIDE, names[type]);
}

bool fp8_self_check(Gpu *gpu, Error *err) {
    const size_t workspace_bytes = (size_t)32 << 20;
    Fp8Live live[2] = {{.scale_inv = 0.5f}, {.scale_inv = 0.25f}};
    Buffers x;
    CUDA_CHECK(cudaMalloc((void **)&x.a, SIDE * SIDE));
    CUDA_CHECK(cudaMalloc((void **)&x.b, SIDE * SIDE));
    CUDA_CHECK(cudaMalloc((void **)&x.d, SIDE * SIDE * sizeof(float)));
    CUDA_CHECK(cudaMalloc((void **)&x.live, sizeof(live)));
    CUDA_CHECK(cudaMemcpy(x.live, live, sizeof(live), cudaMemcpyHostToDevice));
    void *workspace = gpu->workspace;
    size_t bytes = gpu->workspace_bytes;
    CUDA_CHECK(cudaMalloc(&gpu->workspace, workspace_bytes));
    gpu->workspace_bytes = workspace_bytes;
    fill(x.b, FP8_E4M3, 2);
    bool well = check_type(gpu, &x, FP8_E4M3, err) && check_type(gpu, &x, FP8_E5M2, err);
    CUDA_CHECK(cudaFree(gpu->workspace));
    gpu->workspace = workspace;
    gpu->workspace_bytes = bytes;
    CUDA_CHECK(cudaFree(x.a));
    CUDA_CHECK(cudaFree(x.b));
    CUDA_CHECK(cudaFree(x.d));
    CUDA_CHECK(cudaFree(x.live));
    return well;
}
