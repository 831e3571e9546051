// Times the FP8 producers, optimizer and products at the shapes of the benchmark models, as
// bench_kernels does the rest.
//   build/plain/bench_kernels_fp8 [part of a name]
#define TEST_OWN_MAIN
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

// Codes of normal values: a million of them, over and over. (NaN among them would cost less power.)
struct FilledCodes : Buffer<uint8_t> {
    FilledCodes(size_t n, float scale, Fp8Type type) : Buffer<uint8_t>(n) {
        const size_t period = 1 << 20;
        Codes values(period);
        random_key++;
        for (size_t i = 0; i < period; i++) {
            values[i] = fp8_encode(scale * rng_normal(random_key, i), type);
        }
        for (size_t at = 0; at < n; at += period) {
            gpu_send(&gpu, data + at, values.data(), n - at < period ? n - at : period);
        }
    }
};

// A weight gradient [N,K] of M tokens by blocks: by cuBLASLt and by our own product.
static void bench_weight_gradient(int M, int N, int K, const char *layer) {
    FilledCodes dy((size_t)N * M, 50, FP8_E4M3), x((size_t)K * M, 50, FP8_E4M3);
    FloatBuffer scales(fp8_scale_count(SCALES_VECTOR, N > K ? N : K, M));
    Floats same(scales.count, 0.02f);
    scales.put(same.data());
    Bf16Buffer d((size_t)N * K);
    Gemm g = gemm_plain(N, K, M, NULL, NULL, d.data);
    g.a = dy.data;
    g.b = x.data;
    g.type_a = g.type_b = TYPE_E4M3;
    g.trans_b = true;
    g.scale_a = g.scale_b = scales.data;
    g.scales_a = g.scales_b = SCALES_VECTOR;
    char shape[64];
    snprintf(shape, sizeof(shape), "%s %dx%dx%d", layer, M, N, K);
    double floor = 2.0 * M * N * K / (2 * FLOPS_PER_S);
    for (int turn = 0; turn < 2; turn++) { // in turns: the clock drifts
        bench("dW by blocks: cuBLASLt", shape, floor, [&] { gemm(&gpu, g); });
        if (!gpu_block_product_pays(&gpu, N, K, M)) { continue; }
        bench("dW by blocks: our own", shape, floor, [&] { gpu_block_product(&gpu, g); });
    }
}

// The products that meet GELU, each in one kernel and in two: by default (fast forward, split
// backward), and fast. Bytes: codes in and out twice, BF16 pre-activations out or in.
static void bench_gelu_products(int M, int F, int C) {
    size_t wide = (size_t)M * F;
    FilledCodes a((size_t)M * C, 50, FP8_E4M3), dy((size_t)M * C, 50, FP8_E5M2),
        b((size_t)F * C, 30, FP8_E4M3);
    Filled x(wide, 1), bias(F, 1);
    Buffer<uint8_t> codes(2 * wide);
    Bf16Buffer product(wide);
    FloatBuffer sums(F);
    SumScratch scratch(M, F);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    // of a and b together 1 / (1500 sqrt(C)): products of variance 1
    Fp8Live l = {1.0f / sqrtf(1500 * sqrtf((float)C)), 50, 0, 0};
    Fp8Slot s = {1, 1, 0, 1};
    live.put(&l);
    slot.put(&s);
    Operand out = {NULL, codes.data, codes.data + wide, NULL, NULL};
    Gradient column_sums = {sums.data, TYPE_F32, false};
    bool has = gpu_has_gelu_products(&gpu);
    double floor = 2.0 * M * F * C / (2 * FLOPS_PER_S) + bytes(2.0 * wide);
    for (int fast = 0; fast < 2; fast++) {
        for (int backward = 0; backward < 2; backward++) {
            Fp8Type type = backward ? FP8_E5M2 : FP8_E4M3;
            Fp8Tensor q = {type, SCALE_GIVEN, true, true, 448.0f, live.data, slot.data, NULL};
            Gemm g = gemm_plain(M, F, C, NULL, NULL, product.data);
            g.a = backward ? dy.data : a.data;
            g.b = b.data;
            g.type_a = backward ? TYPE_E5M2 : TYPE_E4M3;
            g.type_b = TYPE_E4M3;
            g.trans_b = true;
            g.scale_a = g.scale_b = &live.data->scale_inv;
            g.fast_accumulation = fast;
            Gemm fused = g;
            fused.bias = bias.device.data;
            fused.aux = x.device.data;
            char name[64], shape[64];
            auto named = [&](const char *kind) {
                snprintf(name, sizeof(name), "%s%s %s", kind, backward ? " backward" : "",
                         fast ? "fast" : "split");
                return name;
            };
            snprintf(shape, sizeof(shape), "fc1 %dx%dx%d", M, F, C);
            for (int turn = 0; turn < 2; turn++) { // in turns: the clock drifts
                bench(named("gelu: product"), shape, floor, [&] { gemm(&gpu, g); });
                bench(named("gelu: product, pass"), shape, floor, [&] {
                    gemm(&gpu, g);
                    if (backward) {
                        gpu_gelu_backward(out, q, column_sums, product.data, x.device.data,
                                          bias.device.data, scratch.scratch(), M, F, gpu.stream);
                    } else {
                        gpu_gelu_forward(out, q, product.data, bias.device.data, M, F, gpu.stream);
                    }
                });
                if (!has) { continue; }
                bench(named("gelu: in one"), shape, floor, [&] {
                    if (backward) {
                        gpu_product_gelu_backward(&gpu, fused, out, q, column_sums,
                                                  scratch.scratch());
                    } else {
                        gpu_product_gelu(&gpu, fused, out, q);
                    }
                });
            }
        }
    }
}

static void bench_transpose(int N, int C) {
    Buffer<uint8_t> codes((size_t)N * C), turned((size_t)N * C);
    bench("transpose of codes", shape_text("%d x %d", N, C), bytes(1.0 * N * C),
          [&] { gpu_transpose_codes(turned.data, codes.data, N, C, gpu.stream); });
}

int main(int argc, char **argv) {
    open_test_gpu(1 << 20);
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
    bench_weight_gradient(65536, 3072, 768, "fc1");
    bench_weight_gradient(65536, 768, 3072, "fc2");
    bench_gelu_products(65536, 3072, 768);
    bench_gelu_products(65536, 4096, 1024); // where B does not stay in shared memory
    bench_gelu_products(32768, 6400, 1600);
    bench_fp8_products(65536, 3072, 768, "fc1");
    bench_fp8_products(32768, 6400, 1600, "fc1");
    bench_fp8_products(32768, 11008, 2048, "fc1");
    bench_fp8_products(16384, 50304, 768, "head");
    return 0;
}
