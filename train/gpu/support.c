#include "support.h"
#include "../../kernels/gemm.h"
#include "../../kernels/kernels.h"
#include "../../ranks/group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// From here on FP8 took less time than BF16 with GPT-2's blocks of 128 to 768 channels and 1,024 to
// 16,384 tokens (one H200, 2026-11-21): at 3.2e9 it took 0.3% less to 3% more, at 7.2e9 3% less.
static const double fp8_gains_from = 5e9;

NumberSupport support_of(int capability, char reason[SUPPORT_REASON]) {
    // For tests: LLM8_TEST_CAPABILITY=80 takes the GPU for an older one; LLM8_TEST_SMALL_FP8=1 has
    // FP8 in models too small to gain from it.
    const char *assumed = getenv("LLM8_TEST_CAPABILITY"), *small = getenv("LLM8_TEST_SMALL_FP8");
    if (assumed != NULL && (capability == 0 || atoi(assumed) < capability)) {
        capability = atoi(assumed);
    }
    bool always = small != NULL && strcmp(small, "1") == 0;
    NumberSupport support = {NUMBER_BF16, NULL, always ? 0 : fp8_gains_from};
    if (capability > 0 && capability < 90) {
        snprintf(reason, SUPPORT_REASON, "compute capability %d.%d is below 9.0", capability / 10,
                 capability % 10);
        support.lacks_fp8 = reason;
    }
    return support;
}

NumberSupport support_find(Gpu *gpu, const Options *o, char reason[SUPPORT_REASON]) {
    NumberSupport support = support_of(gpu->capability, reason);
    Error err = {""};
    if (o->fp8_format == FP8_FORMAT_NONE) { return support; }
    if (support.lacks_fp8 == NULL && !fp8_self_check(gpu, &err)) {
        snprintf(reason, SUPPORT_REASON, "the FP8 self-check failed");
        warn("%s", err.text);
        support.lacks_fp8 = reason;
    }
    // several ranks of which one has no FP8: none uses it
    bool has = support.lacks_fp8 == NULL || fail(&err, "%s", support.lacks_fp8);
    if (o->group != NULL && !group_agree(o->group, CHANNEL_MAIN, has, &err)) {
        snprintf(reason, SUPPORT_REASON, "%.*s", SUPPORT_REASON - 1, err.text);
        support.lacks_fp8 = reason;
    }
    if (support.lacks_fp8 == NULL) { return support; }
    if (o->fp8_required) { die("--fp8-required: no FP8 here: %s", support.lacks_fp8); }
    warn("no FP8 here: %s; the run continues in BF16", support.lacks_fp8);
    return support;
}

enum { SIDE = 64 };

// Small whole numbers: their sums of products are exact in FP32 whatever the order.
static float value(int row, int column, int key) {
    return (float)((row * 7 + column * 5 + row * column * key) % 7 - 3);
}

// Whether a product of a type and E4M3 is exact.
static bool check_product(Gpu *gpu, Fp8Type type, Error *err) {
    const char *name = type == FP8_E4M3 ? "E4M3" : "E5M2";
    typedef struct {
        uint8_t a[SIDE * SIDE], b[SIDE * SIDE];
        float d[SIDE * SIDE];
        Fp8Live live[2];
    } Product;
    Product *host = calloc_or_die(1, sizeof(*host)), *device;
    Error why;
    int wrong = 0;
    for (int i = 0; i < SIDE * SIDE; i++) {
        host->a[i] = fp8_encode(value(i / SIDE, i % SIDE, 1), type);
        host->b[i] = fp8_encode(value(i / SIDE, i % SIDE, 2), FP8_E4M3);
    }
    host->live[0].scale_inv = 0.5f;
    host->live[1].scale_inv = 0.25f;
    CUDA_CHECK(cudaMalloc((void **)&device, sizeof(*device)));
    gpu_send(gpu, device, host, sizeof(*device));
    Gemm g = gemm_plain(SIDE, SIDE, SIDE, NULL, NULL, device->d);
    g.a = device->a;
    g.b = device->b;
    g.type_a = gpu_fp8_type(type);
    g.type_b = TYPE_E4M3;
    g.type_d = TYPE_F32;
    g.trans_b = true;
    g.scale_a = &device->live[0].scale_inv;
    g.scale_b = &device->live[1].scale_inv;
    bool well = gemm_supported(gpu, g, &why) ||
                fail(err, "FP8 self-check: no product of %s and E4M3: %s", name, why.text);
    if (well) { gemm(gpu, g); }
    gpu_fetch(gpu, host, device, sizeof(*host));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < SIDE * SIDE && well; i++) {
        float sum = 0;
        for (int k = 0; k < SIDE; k++) { sum += value(i / SIDE, k, 1) * value(i % SIDE, k, 2); }
        wrong += !(host->d[i] == sum * 0.5f * 0.25f);
    }
    CUDA_CHECK(cudaFree(device));
    free(host);
    return well &&
           (wrong == 0 ||
            fail(err, "FP8 self-check: %d of %d entries of a product of %s and E4M3 are wrong",
                 wrong, SIDE * SIDE, name));
}

bool fp8_self_check(Gpu *gpu, Error *err) {
    void *workspace = gpu->workspace;
    size_t bytes = gpu->workspace_bytes;
    gpu->workspace_bytes = (size_t)32 << 20;
    CUDA_CHECK(cudaMalloc(&gpu->workspace, gpu->workspace_bytes)); // the run's is not planned yet
    bool well = check_product(gpu, FP8_E4M3, err) && check_product(gpu, FP8_E5M2, err);
    CUDA_CHECK(cudaFree(gpu->workspace));
    gpu->workspace = workspace;
    gpu->workspace_bytes = bytes;
    return well;
}

void support_check_shapes(const ModelConfig *c) {
    if (c->channels % 8 != 0 || c->ffn % 8 != 0 || qkv_rows(c) % 8 != 0 ||
        dim_size(c, DIM_HEADS) % 8 != 0 || c->padded_vocab % 8 != 0) {
        die("the GPU trainer needs --hidden-size, --ffn-hidden-size, head sizes and "
            "--make-vocab-size-divisible-by to be multiples of 8");
    }
}
