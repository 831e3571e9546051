// Times the FP8 producers, optimizer and products at the shapes of the benchmark models, as
// bench_kernels does the rest.
//   build/plain/bench_kernels_fp8 [part of a name]
#include "../kernels/gemm.h"
#include "bench_gpu.h"

static void bench_fp8_products(int M, int N, int K, const char *layer) {
    size_t most = (size_t)max(max((size_t)M * K, (size_t)N * K), (size_t)M * N);
    Filled a(most / 2, 1), b(most / 2, 1); // any bytes are codes
    Bf16Buffer d(most);
    Buffer<Fp8Live> live(1);
    Fp8Live l = {1, 1, 0, 0};
    live.put(&l);
    int shapes[3][3] = {{M, N, K}, {M, K, N}, {N, K, M}};
    static const char *const names[3] = {"forward", "dX", "dW"};
    FloatBuffer scales(2 * most / 128 + 4096);
    Floats ones(scales.count, 1.0f);
    scales.put(ones.data());
    for (int i = 0; i < 3; i++) {
        for (int kind = 0; kind < 3; kind++) {
            static const char *const kinds[] = {"fast", "split", "blocks"};
            bool fast = kind == 0, blocks = kind == 2;
            Gemm g = {.m = shapes[i][0],
                      .n = shapes[i][1],
                      .k = shapes[i][2],
                      .a = a.device.data,
                      .b = b.device.data,
                      .d = d.data,
                      .type_a = i > 0 && !blocks ? TYPE_E5M2 : TYPE_E4M3,
                      .type_b = TYPE_E4M3,
                      .type_d = TYPE_BF16,
                      .trans_b = true,
                      .alpha = 1.0f,
                      .scale_a = &live.data->scale_inv,
                      .scale_b = &live.data->scale_inv,
                      .fast_accumulation = fast};
            if (blocks) {
                g.scale_a = g.scale_b = scales.data;
                g.scales_a = SCALES_VECTOR;
                g.scales_b = i < 2 ? SCALES_SQUARE : SCALES_VECTOR;
            }
            char name[64], shape[64];
            snprintf(name, sizeof(name), "fp8 product %s %s", names[i], kinds[kind]);
            snprintf(shape, sizeof(shape), "%s %dx%dx%d", layer, M, N, K);
            bench(name, shape, 2.0 * M * N * K / (2 * FLOPS_PER_S), [&] { gemm(&gpu, g); });
        }
    }
}

static void bench_transpose(int N, int C) {
    Buffer<uint8_t> codes((size_t)N * C), turned((size_t)N * C);
    bench("transpose of codes", shape_text("%d x %d", N, C), bytes(1.0 * N * C),
          [&] { gpu_transpose_codes(turned.data, codes.data, N, C, gpu.stream); });
}

int main(int argc, char **argv) {
    if (!open_test_gpu(1 << 20)) { return 0; }
    if (argc > 1) { wanted = argv[1]; }
    bench_producers(65536, 768, 3072, true, true, false);
    bench_producers(65536, 768, 3072, true, true, true);
    bench_producers(32768, 1600, 6400, true, true, false);
    bench_producers(32768, 1600, 6400, true, true, true);
    bench_producers(32768, 2048, 5504, false, true, false);
    bench_producers(32768, 2048, 5504, false, true, true);
    bench_producers(16384, 4096, 14336, false, true, false);
    bench_producers(16384, 4096, 14336, false, true, true);
    bench_adamw("fp8 adamw", "110080 x 2048", (int64_t)110080 * 2048, TYPE_F32, true);
    bench_adamw("fp8 adamw, BF16 moments", "110080 x 2048", (int64_t)110080 * 2048, TYPE_BF16,
                true);
    bench_transpose(2304, 768);
    bench_transpose(11008, 2048);
    bench_transpose(28672, 4096);
    bench_fp8_products(65536, 3072, 768, "fc1");
    bench_fp8_products(32768, 6400, 1600, "fc1");
    bench_fp8_products(32768, 11008, 2048, "fc1");
    bench_fp8_products(16384, 50304, 768, "head");
    return 0;
}
