// Times the FP8 producers, optimizer and products at the shapes of the benchmark models, as
// bench_kernels does the rest.
//   build/plain/bench_kernels_fp8 [part of a name]
#include "../kernels/fp8.h"
#include "../kernels/gemm.h"
#include "bench_gpu.h"

static void bench_norm_backward(Fp8Out out, int M, int C, bool gpt2) {
    size_t n = (size_t)M * C;
    Filled x(n, 1), w(C, 1);
    Floats ones(M, 1.0f);
    Bf16Buffer d_residual(n);
    FloatBuffer dw(C), db(C), column_sums(C), mean(M), rstd(M);
    FloatBuffer scratch(partial_sums_bytes(3 * C) / 4);
    mean.put(ones.data());
    rstd.put(ones.data());
    NormBackward nb = {d_residual.data,
                       {dw.data, TYPE_F32, false},
                       {db.data, TYPE_F32, false},
                       {},
                       x.device.data,
                       x.device.data,
                       w.device.data,
                       gpt2 ? mean.data : NULL,
                       rstd.data,
                       scratch.data,
                       NULL,
                       M,
                       C};
    if (gpt2) { nb.column_sums = {column_sums.data, TYPE_F32, false}; }
    bench("fp8 norm backward", shape_text("%d x %d", M, C), bytes(5.0 * n),
          [&] { gpu_norm_backward_fp8(out, nb, gpu.stream); });
}

// The FP8 producers at M tokens, C channels, F feed-forward. Bytes: BF16 in, two codes out.
static void bench_fp8(int M, int C, int F, bool gpt2) {
    size_t n = (size_t)M * C, wide = (size_t)M * F;
    Filled x(n, 1), w(C, 1), b(C, 1), pre(2 * wide, 1), dact(wide, 1);
    FloatBuffer mean(M), rstd(M), sums(F > C ? F : C);
    FloatBuffer scratch(partial_sums_bytes(max(3 * C, F)) / 4 + wide / 64);
    Buffer<uint8_t> rows(2 * wide), columns(2 * wide);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    Fp8Live l = {1, 1, 3, 0};
    Fp8Slot s = {1, 1, 0, 1};
    live.put(&l);
    slot.put(&s);
    Fp8Out out = {rows.data, columns.data, FP8_E4M3, 448.0f, live.data, slot.data, true};
    char shape[64];
    snprintf(shape, sizeof(shape), "%d x %d", M, C);
    bench("fp8 norm forward", shape, bytes(2.0 * n), [&] {
        gpu_norm_forward_fp8(out,
                             {NULL, mean.data, rstd.data, NULL, x.device.data, w.device.data,
                              gpt2 ? b.device.data : NULL, 1e-5f, M, C},
                             gpu.stream);
    });
    bench_norm_backward(out, M, C, gpt2);
    bench("fp8 cast", shape, bytes(2.0 * n),
          [&] { gpu_quantize(out, false, {}, x.device.data, scratch.data, M, C, gpu.stream); });
    bench("fp8 cast and sums", shape, bytes(2.0 * n), [&] {
        gpu_quantize(out, false, {sums.data, TYPE_F32, false}, x.device.data, scratch.data, M, C,
                     gpu.stream);
    });
    snprintf(shape, sizeof(shape), "%d x %d", M, F);
    if (gpt2) {
        bench("fp8 gelu forward", shape, bytes(2.0 * wide),
              [&] { gpu_gelu_forward_fp8(out, pre.device.data, M, F, gpu.stream); });
        bench("fp8 gelu backward", shape, bytes(3.0 * wide), [&] {
            gpu_gelu_backward_fp8(out, {sums.data, TYPE_F32, false}, dact.device.data,
                                  pre.device.data, scratch.data, M, F, gpu.stream);
        });
        return;
    }
    bench("fp8 swiglu forward", shape, bytes(3.0 * wide),
          [&] { gpu_swiglu_forward_fp8(out, pre.device.data, M, F, gpu.stream); });
    bench("fp8 swiglu backward", shape, bytes(5.0 * wide), [&] {
        gpu_swiglu_backward_fp8(out, dact.device.data, pre.device.data, M, F, gpu.stream);
    });
}

static void bench_fp8_optimizer(int N, int C) {
    int64_t n = (int64_t)N * C;
    FloatBuffer w(n), m(n), v(n);
    Bf16Buffer g(n);
    Buffer<uint8_t> decay(n / 64), rows(n), columns(n);
    Buffer<StepState> state(1);
    InputBuffer input(1e-3, 0);
    Buffer<Fp8Live> live(1);
    Buffer<Fp8Slot> slot(1);
    StepState s = {.gradient_scale = 1.0f, .updates = 1};
    state.put(&s);
    Fp8Out out = {rows.data, columns.data, FP8_E4M3, 448.0f, live.data, slot.data, true};
    AdamWUpdate u = {.master = w.data,
                     .exp_avg = m.data,
                     .exp_avg_sq = v.data,
                     .moment_type = TYPE_F32,
                     .gradients = g.data,
                     .gradient_type = TYPE_BF16,
                     .decay = decay.data,
                     .input = input.data,
                     .beta1 = 0.9f,
                     .beta2 = 0.95f,
                     .eps = 1e-8f};
    Buffer<Fp8Weight> table(1);
    Fp8Weight row = {out, NULL, 0, N, C, 0};
    table.put(&row);
    Fp8Weights weights = {table.data, 1, gpu_fp8_weight_tiles(N, C)};
    bench("fp8 adamw", shape_text("%d x %d", N, C), 28.0 * n / BYTES_PER_S,
          [&] { gpu_adamw_update_fp8(weights, false, &u, state.data, gpu.stream); });
}

static void bench_fp8_products(int M, int N, int K, const char *layer) {
    size_t most = (size_t)max(max((size_t)M * K, (size_t)N * K), (size_t)M * N);
    Filled a(most / 2, 1), b(most / 2, 1); // any bytes are codes
    Bf16Buffer d(most);
    Buffer<Fp8Live> live(1);
    Fp8Live l = {1, 1, 0, 0};
    live.put(&l);
    int shapes[3][3] = {{M, N, K}, {M, K, N}, {N, K, M}};
    static const char *const names[3] = {"forward", "dX", "dW"};
    for (int i = 0; i < 3; i++) {
        for (int fast = 1; fast >= 0; fast--) {
            Gemm g = {.m = shapes[i][0],
                      .n = shapes[i][1],
                      .k = shapes[i][2],
                      .a = a.device.data,
                      .b = b.device.data,
                      .d = d.data,
                      .type_a = i > 0 ? TYPE_E5M2 : TYPE_E4M3,
                      .type_b = TYPE_E4M3,
                      .type_d = TYPE_BF16,
                      .trans_b = true,
                      .alpha = 1.0f,
                      .scale_a = &live.data->scale_inv,
                      .scale_b = &live.data->scale_inv,
                      .fast_accumulation = fast == 1};
            char name[64], shape[64];
            snprintf(name, sizeof(name), "fp8 product %s %s", names[i], fast ? "fast" : "split");
            snprintf(shape, sizeof(shape), "%s %dx%dx%d", layer, M, N, K);
            bench(name, shape, 2.0 * M * N * K / (2 * FLOPS_PER_S), [&] { gemm(&gpu, g); });
        }
    }
}

int main(int argc, char **argv) {
    if (!open_test_gpu(1 << 20)) { return 0; }
    if (argc > 1) { wanted = argv[1]; }
    bench_fp8(65536, 768, 3072, true);
    bench_fp8(32768, 1600, 6400, true);
    bench_fp8(32768, 2048, 5504, false);
    bench_fp8(16384, 4096, 14336, false);
    bench_fp8_optimizer(110080, 2048);
    bench_fp8_products(65536, 3072, 768, "fc1");
    bench_fp8_products(32768, 11008, 2048, "fc1");
    bench_fp8_products(16384, 50304, 768, "head");
    return 0;
}
