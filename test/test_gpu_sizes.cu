// The sizes that people train at: attention over 2,048 and 8,192 tokens against its definition, on
// sampled rows; operands of more than 2^31 elements, computed whole and in pieces, bit for bit.
#include "../kernels/attention.h"
#include "../kernels/gemm.h"
#include "fp8_test.h"

// ---- attention ---------------------------------------------------------------------------------

// What the definition rounds to BF16: nothing, or results and values between two products, as on
// the device. dS = P (dP - delta) / sqrt(D) is then rounded before or after its factor: cuDNN may
// do either.
typedef enum { EXACT, ROUNDED, ROUNDED_UNSCALED } Rounding;

// One sequence and one key/value head with its query heads, in FP32. The backward pass is given the
// forward pass's output, which the device has rounded: delta = dO . O is in every score of a row,
// so that where one key has nearly all of the weight, and dP - delta nearly vanishes, that rounding
// is hundreds of times the others (of 20,000 normal rows of two keys: 1.75 times in the median, 100
// times in one of 100).
struct Slice {
    AttentionShape s;
    int b, g, heads;
    const Floats &qkv, &dout;
    Floats lse, delta; // [heads,T]: of every row

    Slice(AttentionShape shape, int sequence, int group, const Floats &qkv_, const Floats &dout_,
          const Floats &out)
        : s(shape), b(sequence), g(group), heads(s.H / s.G), qkv(qkv_), dout(dout_),
          lse((size_t)heads * s.T), delta(lse.size()) {
#pragma omp parallel for schedule(dynamic, 16)
        for (int i = 0; i < heads * s.T; i++) {
            Floats p((size_t)s.T), exact;
            size_t row = result_row(i / s.T, i % s.T);
            forward(i / s.T, i % s.T, EXACT, p, exact, lse[(size_t)i]);
            delta[(size_t)i] = dot(&dout[row], &out[row]);
        }
    }
    // In the packed rows of the output and of its gradient.
    size_t result_row(int head, int t) const {
        return (((size_t)b * s.T + t) * s.H + g * heads + head) * s.D;
    }
    // In the packed rows: head 0..heads-1 of the queries, `heads` the key, heads + 1 the value.
    size_t place(int head, int t) const {
        int column = head < heads ? g * heads + head : head == heads ? s.H + g : s.H + s.G + g;
        return (((size_t)b * s.T + t) * (s.H + 2 * s.G) + column) * s.D;
    }
    const float *row(int head, int t) const {
        return &qkv[place(head, t)];
    }
    const float *gradient(int head, int t) const {
        return &dout[result_row(head, t)];
    }
    float dot(const float *x, const float *y) const {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int d = 0; d < s.D; d++) { sum += x[d] * y[d]; }
        return sum;
    }
    void add(Floats &to, float factor, const float *x) const {
        for (int d = 0; d < s.D; d++) { to[(size_t)d] += factor * x[d]; }
    }
    static float between(float x, Rounding r) {
        return r != EXACT ? bf16_decode(bf16_encode(x)) : x;
    }
    // p[0..t] and out[D] of a query; p stays unrounded.
    void forward(int head, int t, Rounding r, Floats &p, Floats &out, float &log_sum) const {
        float scale = 1.0f / sqrtf((float)s.D), most = -INFINITY;
        double sum = 0;
        for (int j = 0; j <= t; j++) {
            p[(size_t)j] = scale * dot(row(head, t), row(heads, j));
            most = fmaxf(most, p[(size_t)j]);
        }
        for (int j = 0; j <= t; j++) {
            p[(size_t)j] = expf(p[(size_t)j] - most);
            sum += p[(size_t)j];
        }
        log_sum = most + (float)log(sum);
        out.assign((size_t)s.D, 0.0f);
        for (int j = 0; j <= t; j++) {
            p[(size_t)j] = (float)(p[(size_t)j] / sum);
            add(out, between(p[(size_t)j], r), row(heads + 1, j));
        }
        for (float &x : out) { x = between(x, r); }
    }
    // How query t's score of key j enters the gradients.
    void score(int head, int t, int j, Rounding r, float &p, float &ds) const {
        size_t i = (size_t)head * s.T + t;
        float scale = 1.0f / sqrtf((float)s.D);
        p = expf(scale * dot(row(head, t), row(heads, j)) - lse[i]);
        ds = p * (dot(gradient(head, t), row(heads + 1, j)) - delta[i]);
        ds = r == ROUNDED_UNSCALED ? between(ds, r) * scale : between(ds * scale, r);
        p = between(p, r);
    }
    Floats out(int head, int t, Rounding r) const {
        Floats p((size_t)s.T), result;
        float log_sum;
        forward(head, t, r, p, result, log_sum);
        return result;
    }
    Floats dq(int head, int t, Rounding r) const {
        Floats result((size_t)s.D, 0.0f);
        for (int j = 0; j <= t; j++) {
            float p, ds;
            score(head, t, j, r, p, ds);
            add(result, ds, row(heads, j));
        }
        for (float &x : result) { x = between(x, r); }
        return result;
    }
    // Of the key (which 0) or value (1) at j; cuDNN rounds each query head's before it adds them.
    Floats dkv(int which, int j, Rounding r) const {
        Floats result((size_t)s.D, 0.0f);
        for (int head = 0; head < heads; head++) {
            Floats own((size_t)s.D, 0.0f);
            for (int t = j; t < s.T; t++) {
                float p, ds;
                score(head, t, j, r, p, ds);
                add(own, which == 0 ? ds : p, which == 0 ? row(head, t) : gradient(head, t));
            }
            for (float &x : own) { x = between(x, r); }
            add(result, 1.0f, own.data());
        }
        for (float &x : result) { x = between(x, r); }
        return result;
    }
};

static double distance(const Floats &a, const Floats &b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) { sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]); }
    return sqrt(sum);
}

// Sampled rows of one kind: each row's distance from the definition, in units of what rounding
// does to that row, in the worse of the two ways. (A row may lose nothing: a floor of 2^-14 of the
// rows' usual length.)
struct Rows {
    const char *name;
    std::vector<Floats> exact;
    std::vector<double> roundings;
    std::vector<size_t> places; // in the device's buffer

    double worst(const Bf16Buffer &buffer, bool planted) const {
        double length = 0, most = 0;
        for (const Floats &x : exact) {
            length += distance(x, Floats(x.size(), 0.0f)) / (double)exact.size();
        }
        for (size_t i = 0; i < exact.size(); i++) {
            size_t n = exact[i].size(), other = planted && i > 0 ? i - 1 : i;
            std::vector<Bf16> codes(n);
            Floats actual(n);
            CUDA_CHECK(cudaMemcpyAsync(codes.data(), buffer.data + places[other], n * sizeof(Bf16),
                                       cudaMemcpyDeviceToHost, gpu.stream));
            CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
            for (size_t j = 0; j < n; j++) { actual[j] = bf16_decode(codes[j]); }
            double error = distance(actual, exact[i]) / (roundings[i] + length * 0x1p-14);
            if (!(error <= most)) { most = error; }
        }
        return most;
    }
};

// A buffer of normal values that BF16 holds, quickly.
static Floats many_normal(size_t n) {
    Floats x(n);
    random_key++;
#pragma omp parallel for
    for (int64_t i = 0; i < (int64_t)n; i++) {
        x[(size_t)i] = bf16_decode(bf16_encode(rng_normal(random_key, (uint64_t)i)));
    }
    return x;
}

static void send(Bf16Buffer &buffer, const Floats &x) {
    std::vector<Bf16> codes(x.size());
#pragma omp parallel for
    for (int64_t i = 0; i < (int64_t)x.size(); i++) {
        codes[(size_t)i] = bf16_encode(x[(size_t)i]);
    }
    buffer.put(codes.data());
}

static void check_rows(const AttentionShape &s, const Rows &rows, const Bf16Buffer &buffer) {
    const double allowed = 2;
    double worst = rows.worst(buffer, false), planted = rows.worst(buffer, true);
    printf("  measured: T %d, %d/%d heads of %d, %s: %.2f of %g roundings (planted %.0f)\n", s.T,
           s.H, s.G, s.D, rows.name, worst, allowed, planted);
    CHECK(worst <= allowed);
    CHECK(planted > 5 * allowed); // each row's neighbour in its place
}

static void long_attention(AttentionShape s) {
    size_t N = (size_t)(s.H + 2 * s.G) * s.D, tokens = (size_t)s.B * s.T;
    Floats qkv = many_normal(tokens * N), dout = many_normal(tokens * s.H * s.D);
    Bf16Buffer device_qkv(qkv.size()), device_dout(dout.size()), out(dout.size()), dqkv(qkv.size());
    FloatBuffer lse((size_t)s.B * s.H * s.T);
    send(device_qkv, qkv);
    send(device_dout, dout);

    fail("%s", "");
    bool served = attention_by_cudnn(&gpu, s);
    if (!served) { test_fail(__FILE__, __LINE__, "cuDNN does not serve: %s", error_text()); }
    if (!served) { return; }
    attention_forward_gpu(&gpu, s, out.data, lse.data, device_qkv.data);
    attention_backward_gpu(&gpu, s, dqkv.data, device_dout.data, out.data, lse.data,
                           device_qkv.data);

    Rows rows[] = {{"out", {}, {}, {}}, {"dQ", {}, {}, {}}, {"dK", {}, {}, {}}, {"dV", {}, {}, {}}};
    Floats results = get_floats(out), logs = lse.get(), actual, expected;
    for (int corner = 0; corner < 2; corner++) {
        int b = corner * (s.B - 1), g = corner * (s.G - 1);
        Slice slice(s, b, g, qkv, dout, results);
        for (int t : {0, 1, 63, 64, 127, 128, s.T / 2 - 1, s.T / 2, s.T - 129, s.T - 2, s.T - 1}) {
            int head = t % slice.heads;
            for (int i = 0; i < 4; i++) {
                auto of = [&](Rounding r) {
                    return i == 0   ? slice.out(head, t, r)
                           : i == 1 ? slice.dq(head, t, r)
                                    : slice.dkv(i - 2, t, r);
                };
                Floats exact = of(EXACT);
                rows[i].exact.push_back(exact);
                rows[i].roundings.push_back(
                    fmax(distance(of(ROUNDED), exact), distance(of(ROUNDED_UNSCALED), exact)));
                rows[i].places.push_back(i == 0   ? slice.result_row(head, t)
                                         : i == 1 ? slice.place(head, t)
                                                  : slice.place(slice.heads + i - 2, t));
            }
        }
        for (size_t i = 0; i < slice.lse.size(); i++) {
            actual.push_back(logs[((size_t)b * s.H + g * slice.heads) * s.T + i]);
            expected.push_back(slice.lse[i]);
        }
    }
    CHECK_ERROR(actual.data(), expected.data(), (int64_t)actual.size(), 1e-4);
    check_rows(s, rows[0], out);
    for (int i = 1; i < 4; i++) { check_rows(s, rows[i], dqkv); }
}

TEST(attention_of_2048) {
    long_attention({4, 2048, 12, 12, 64, true});
    long_attention({4, 2048, 32, 8, 64, true});
    long_attention({4, 2048, 16, 16, 128, true});
    long_attention({4, 2048, 32, 8, 128, true});
    long_attention({4, 2048, 32, 8, 128, false});
}

TEST(attention_of_8192) {
    long_attention({2, 8192, 12, 12, 64, true});
    long_attention({2, 8192, 32, 8, 64, true});
    long_attention({2, 8192, 16, 16, 128, true});
    long_attention({2, 8192, 32, 8, 128, true}); // in two pieces backward
    long_attention({2, 8192, 32, 8, 128, false});
}

// ---- more than 2^31 elements -------------------------------------------------------------------

// Rows and columns: all sides, also those of parts, are multiples of 16.
enum { PARTS = 4, PART = 262192, ROWS = PARTS * PART, COLUMNS = 2080 };
static_assert((int64_t)ROWS * COLUMNS > (int64_t)1 << 31, "not beyond 2^31 elements");

__global__ void fill_kernel(Bf16 *x, int64_t n, uint64_t key, int integers) {
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += stride) {
        uint64_t bits = rng_bits(key, (uint64_t)i);
        float value = (float)((int)(bits % 256) - 128) / 64.0f;
        if (integers > 0) { value = (float)((int)(bits % (2 * integers + 1)) - integers); }
        x[i] = (Bf16)(__float_as_uint(value) >> 16); // exact: the values have eight bits or fewer
    }
}

// Bytes that differ between [rows,width] and as many with other pitches.
__global__ void differences_kernel(unsigned long long *count, const uint8_t *a, size_t pitch_a,
                                   const uint8_t *b, size_t pitch_b, size_t width, size_t rows) {
    size_t stride = (size_t)gridDim.x * blockDim.x, words = width / 16;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < rows * words; i += stride) {
        size_t row = i / words, at = i % words * 16;
        uint4 x = *(const uint4 *)(a + row * pitch_a + at),
              y = *(const uint4 *)(b + row * pitch_b + at);
        if (x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w) { atomicAdd(count, 1ull); }
    }
}

static void fill(Bf16Buffer &x, int integers) {
    fill_kernel<<<4096, 256, 0, gpu.stream>>>(x.data, (int64_t)x.count, ++random_key, integers);
    CUDA_CHECK(cudaGetLastError());
}

// 16-byte words that differ.
static int64_t differences(const void *a, size_t pitch_a, const void *b, size_t pitch_b,
                           size_t width, size_t rows) {
    Buffer<unsigned long long> count(1);
    CUDA_CHECK(cudaMemsetAsync(count.data, 0, sizeof(unsigned long long), gpu.stream));
    differences_kernel<<<4096, 256, 0, gpu.stream>>>(count.data, (const uint8_t *)a, pitch_a,
                                                     (const uint8_t *)b, pitch_b, width, rows);
    CUDA_CHECK(cudaGetLastError());
    return (int64_t)count.get()[0];
}

// Buffers that the tests below share: two inputs, the whole result in its three forms, and a
// part's.
struct Large {
    Bf16Buffer x, d, out, part;
    Buffer<uint8_t> fp8, fp8_t, part_fp8, part_fp8_t;
    Buffer<Fp8Live> live;

    Large()
        : x((size_t)ROWS * COLUMNS), d(x.count), out(x.count), part((size_t)PART * COLUMNS),
          fp8(x.count), fp8_t(x.count), part_fp8(part.count), part_fp8_t(part.count), live(1) {
        Fp8Live scale = {1.0f / 64, 64.0f, 0.0f, 0.0f};
        live.put(&scale);
        fill(x, 0);
        fill(d, 0);
    }
};

enum { IN_BF16 = 1, IN_BOTH };

// launch(tensor, first row, rows) on all rows, and on parts of them: the same bits, in BF16 and
// fused to FP8. before: what tensor.bf16 holds before; NULL: nothing.
template <typename Launch>
static void same_in_parts(const char *name, Large &l, int N, int forms, const Bf16 *before,
                          Launch launch) {
    for (int fused = 0; fused < forms; fused++) {
        int64_t wrong = 0;
        for (int part = -1; part < PARTS; part++) { // -1: all
            size_t first = part < 0 ? 0 : (size_t)part * PART, rows = part < 0 ? ROWS : PART;
            Tensor to = tensor_bf16(part < 0 ? l.out.data : l.part.data);
            if (fused) {
                to = with_forms(given_tensor(FP8_E4M3, l.live.data, NULL), to.bf16,
                                part < 0 ? l.fp8.data : l.part_fp8.data,
                                part < 0 ? l.fp8_t.data : l.part_fp8_t.data);
                to.record = false;
            }
            if (before != NULL) {
                CUDA_CHECK(cudaMemcpyAsync(to.bf16, before + first * N, rows * N * sizeof(Bf16),
                                           cudaMemcpyDeviceToDevice, gpu.stream));
            }
            launch(to, first, rows);
            if (part < 0) { continue; }
            size_t bytes = (size_t)N * sizeof(Bf16);
            if (fused) {
                wrong += differences(l.fp8.data + first * N, N, to.fp8, N, N, rows);
                wrong += differences(l.fp8_t.data + first, ROWS, to.fp8_t, PART, PART, (size_t)N);
            } else {
                wrong += differences(l.out.data + first * N, bytes, to.bf16, bytes, bytes, rows);
            }
        }
        if (wrong != 0) {
            test_fail(__FILE__, __LINE__, "%s%s: %lld words differ", name, fused ? ", fused" : "",
                      (long long)wrong);
        }
    }
}

// Compares sums over all rows with the added sums over parts.
static void check_sums(const char *name, const FloatBuffer &whole, const FloatBuffer &parts) {
    Floats a = whole.get(), b = parts.get();
    double error = test_relative_error(a.data(), b.data(), (int64_t)b.size());
    printf("  measured: %s: sums %.3g of 1e-4 apart\n", name, error);
    CHECK(error <= 1e-4);
}

static bool has_room(double gib) {
    size_t free_bytes, all_bytes;
    char why[128];
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    if ((double)free_bytes >= gib * 0x1p30) { return true; }
    snprintf(why, sizeof(why), "it needs %.0f GiB of device memory, and %.0f are free", gib,
             (double)free_bytes / 0x1p30);
    test_skip(why);
    return false;
}

TEST(producers_beyond_2_31) {
    if (!has_room(24)) { return; }
    const int C = COLUMNS, F = COLUMNS / 2, D = 16, H = 127, G = 1, T = 16;
    static_assert((H + 2 * G) * D + D == COLUMNS, "the last head is left out");
    Large l;
    Input weight(C, 1), bias(C, 1);
    FloatBuffer mean(ROWS), rstd(ROWS), sums(3 * C), part_sums(3 * C);
    const int N = (H + 2 * G) * D;

    for (int layernorm = 0; layernorm < 2; layernorm++) {
        auto statistics = [&](size_t first) { return layernorm ? mean.data + first : NULL; };
        same_in_parts(layernorm ? "LayerNorm" : "RMSNorm", l, C, IN_BOTH, NULL,
                      [&](Tensor to, size_t first, size_t rows) {
                          NormForward n = {statistics(first),
                                           rstd.data + first,
                                           l.x.data + first * C,
                                           weight.device.data,
                                           layernorm ? bias.device.data : NULL,
                                           1e-5f,
                                           (int)rows,
                                           C};
                          gpu_norm_forward(&gpu, to, n);
                      });
        SumScratch scratch(ROWS, 3 * C);
        same_in_parts(layernorm ? "LayerNorm backward" : "RMSNorm backward", l, C, IN_BOTH,
                      l.d.data, [&](Tensor to, size_t first, size_t rows) {
                          float *into = rows == ROWS ? sums.data : part_sums.data;
                          bool add = first > 0;
                          const Bf16 *x = l.x.data + first * C;
                          NormBackward n = {{into, TYPE_F32, add},
                                            {layernorm ? into + C : NULL, TYPE_F32, add},
                                            {into + 2 * C, TYPE_F32, add},
                                            x,
                                            x,
                                            weight.device.data,
                                            statistics(first),
                                            rstd.data + first,
                                            scratch.scratch(),
                                            (int)rows,
                                            C};
                          gpu_norm_backward(&gpu, to, n);
                      });
        if (layernorm) { check_sums("LayerNorm backward", sums, part_sums); }
    }
    same_in_parts("GELU", l, C, IN_BOTH, NULL, [&](Tensor to, size_t first, size_t rows) {
        gpu_gelu_forward(&gpu, to, l.x.data + first * C, NULL, (int)rows, C);
    });
    {
        SumScratch scratch(ROWS, C);
        FloatBuffer whole(C), parts(C);
        same_in_parts(
            "GELU backward", l, C, IN_BOTH, l.d.data, [&](Tensor to, size_t first, size_t rows) {
                Gradient g = {rows == ROWS ? whole.data : parts.data, TYPE_F32, first > 0};
                gpu_gelu_backward(&gpu, to, g, to.bf16, l.x.data + first * C, NULL,
                                  scratch.scratch(), (int)rows, C);
            });
        check_sums("GELU backward", whole, parts);
        same_in_parts(
            "quantize", l, C, IN_BOTH, l.d.data, [&](Tensor to, size_t first, size_t rows) {
                Gradient g = {rows == ROWS ? whole.data : parts.data, TYPE_F32, first > 0};
                to.fused = false;
                gpu_quantize(&gpu, to, g, scratch.scratch(), (int)rows, C);
            });
        check_sums("quantize", whole, parts);
    }
    same_in_parts("SwiGLU", l, F, IN_BOTH, NULL, [&](Tensor to, size_t first, size_t rows) {
        gpu_swiglu_forward(&gpu, to, l.x.data + first * C, (int)rows, F);
    });
    same_in_parts("SwiGLU backward", l, C, IN_BOTH, l.x.data,
                  [&](Tensor to, size_t first, size_t rows) {
                      gpu_swiglu_backward(&gpu, to, l.d.data + first * F, to.bf16, (int)rows, F);
                  });
    Floats angles((size_t)T * D);
    Rope rope = {10000.0};
    rope_table(angles.data(), T, D, &rope);
    FloatBuffer table(angles.size());
    table.put(angles.data());
    same_in_parts("RoPE backward", l, N, IN_BOTH, l.x.data, [&](Tensor to, size_t, size_t rows) {
        RotaryBackward b = {};
        b.rotary = {table.data, NULL, NULL, 0, (int)(rows / T), T, H, G, D};
        gpu_rope_backward(&gpu, to, b);
    });
    same_in_parts("RoPE", l, N, IN_BF16, l.x.data, [&](Tensor to, size_t, size_t rows) {
        gpu_rope_forward(&gpu, to.bf16, to.bf16,
                         {table.data, NULL, NULL, 0, (int)(rows / T), T, H, G, D});
    });
    SumScratch heads_scratch(ROWS, N);
    same_in_parts("RoPE, normalised", l, N, IN_BF16, l.x.data, [&](Tensor to, size_t, size_t rows) {
        gpu_rope_forward(&gpu, to.bf16, to.bf16,
                         {table.data, l.d.data, l.d.data + D, 1e-6f, (int)(rows / T), T, H, G, D});
    });
    same_in_parts("RoPE backward, normalised", l, N, IN_BOTH, l.x.data,
                  [&](Tensor to, size_t first, size_t rows) {
                      RotaryBackward b = {};
                      b.rotary = {table.data, l.d.data, l.d.data + D, 1e-6f, (int)(rows / T), T, H,
                                  G,          D};
                      b.qkv = l.d.data + first * N;
                      b.scratch = heads_scratch.scratch();
                      gpu_rope_backward(&gpu, to, b);
                  });
    Buffer<int> tokens(ROWS), targets(ROWS);
    Ints numbers(ROWS);
    for (int i = 0; i < ROWS; i++) { numbers[i] = (int)(rng_bits(9, (uint64_t)i) % 2000); }
    tokens.put(numbers.data());
    targets.put(numbers.data());
    FloatBuffer losses(ROWS), rows_of(loss_scratch_floats(ROWS)), part_losses(PART);
    same_in_parts(
        "cross entropy", l, C, IN_BOTH, l.x.data, [&](Tensor to, size_t first, size_t rows) {
            float *into = rows == ROWS ? losses.data : part_losses.data;
            gpu_cross_entropy(&gpu, into, to, {rows_of.data, rows_of.count * 4},
                              targets.data + first, (int)rows, 2000, C, {0.25f, 0, 0});
            if (rows < ROWS) {
                CHECK_EQUAL(differences(losses.data + first, 16, into, 16, 16, PART / 4), 0);
            }
        });
    same_in_parts("embedding", l, C, IN_BF16, NULL, [&](Tensor to, size_t first, size_t rows) {
        gpu_embedding_forward(&gpu, to.bf16, tokens.data + first, l.d.data, l.x.data,
                              (int)(rows / T), T, C);
    });
    // planted: one bit, near the end
    size_t last = (size_t)PART * COLUMNS;
    CUDA_CHECK(cudaMemcpyAsync(l.part.data, l.out.data + (PARTS - 1) * last, last * sizeof(Bf16),
                               cudaMemcpyDeviceToDevice, gpu.stream));
    CHECK_EQUAL(differences(l.part.data, COLUMNS, l.out.data + (PARTS - 1) * last, COLUMNS, COLUMNS,
                            2 * PART),
                0);
    CUDA_CHECK(cudaMemsetAsync((uint8_t *)(l.part.data + last) - 1, 0x11, 1, gpu.stream));
    CHECK_EQUAL(differences(l.part.data, COLUMNS, l.out.data + (PARTS - 1) * last, COLUMNS, COLUMNS,
                            2 * PART),
                1);
}

// Whole numbers, whose sums of products are exact whatever the order: the same bits.
TEST(products_beyond_2_31) {
    if (!has_room(24)) { return; }
    const int C = COLUMNS, K = 64;
    Bf16Buffer x((size_t)ROWS * C), y(x.count), small((size_t)ROWS * K), weight((size_t)C * K),
        part((size_t)PART * C), back((size_t)ROWS * K);
    FloatBuffer whole((size_t)C * K), parts((size_t)C * K);
    fill(x, 2);
    fill(small, 2);
    fill(weight, 2);
    for (int p = -1; p < PARTS; p++) {
        size_t first = p < 0 ? 0 : (size_t)p * PART;
        int rows = p < 0 ? ROWS : PART;
        // y[rows,C] = small weight'; back[rows,K] = x weight; whole[C,K] = x' small
        Gemm g = gemm_plain(rows, C, K, small.data + first * K, weight.data,
                            p < 0 ? y.data : part.data);
        g.trans_b = true;
        gemm(&gpu, g);
        if (p >= 0) {
            size_t bytes = C * sizeof(Bf16);
            CHECK_EQUAL(differences(y.data + first * C, bytes, part.data, bytes, bytes, PART), 0);
        }
        gemm(&gpu, gemm_plain(rows, K, C, x.data + first * C, weight.data,
                              p < 0 ? back.data : part.data));
        if (p >= 0) {
            size_t bytes = K * sizeof(Bf16);
            CHECK_EQUAL(differences(back.data + first * K, bytes, part.data, bytes, bytes, PART),
                        0);
        }
        Gemm sum = gemm_plain(C, K, rows, x.data + first * C, small.data + first * K,
                              p < 0 ? whole.data : parts.data);
        sum.trans_a = true;
        sum.type_d = TYPE_F32;
        sum.c = p > 0 ? sum.d : NULL;
        sum.beta = p > 0 ? 1.0f : 0.0f;
        gemm(&gpu, sum);
    }
    CHECK(same_bits(whole.get(), parts.get()));
    CHECK(fabsf(whole.get()[1]) < 1 << 24); // exact
}

TEST(attention_beyond_2_31) {
    if (!has_room(20)) { return; }
    const int H = 12, G = 2, D = 128, T = 2048, B = 520, BLOCK = B / PARTS, N = (H + 2 * G) * D;
    size_t tokens = (size_t)B * T, some = (size_t)BLOCK * T;
    static_assert((int64_t)B * T * N > (int64_t)1 << 31, "not beyond 2^31 elements");
    AttentionShape s = {B, T, H, G, D, true}, piece = {BLOCK, T, H, G, D, true};
    Bf16Buffer qkv(tokens * N), out(tokens * H * D), dout(out.count), dqkv(qkv.count),
        out_part(some * H * D), dqkv_part(some * N);
    FloatBuffer lse((size_t)B * H * T), lse_part((size_t)BLOCK * H * T);
    fill(qkv, 0);
    fill(dout, 0);
    fail("%s", "");
    if (!attention_by_cudnn(&gpu, s)) { test_fail(__FILE__, __LINE__, "%s", error_text()); }
    attention_forward_gpu(&gpu, s, out.data, lse.data, qkv.data);
    attention_backward_gpu(&gpu, s, dqkv.data, dout.data, out.data, lse.data, qkv.data);
    size_t wide = N * sizeof(Bf16), narrow = H * D * sizeof(Bf16);
    for (int p = 0; p < PARTS; p++) {
        size_t at = p * some;
        attention_forward_gpu(&gpu, piece, out_part.data, lse_part.data, qkv.data + at * N);
        attention_backward_gpu(&gpu, piece, dqkv_part.data, dout.data + at * H * D, out_part.data,
                               lse_part.data, qkv.data + at * N);
        CHECK_EQUAL(differences(out.data + at * H * D, narrow, out_part.data, narrow, narrow, some),
                    0);
        CHECK_EQUAL(differences(dqkv.data + at * N, wide, dqkv_part.data, wide, wide, some), 0);
    }
}

SETUP() {
    open_test_gpu((size_t)4608 << 20);
    if (sanitizing()) { test_skip_all("large shapes are too slow under compute-sanitizer"); }
    if (!has_fp8()) { test_skip_all("FP8 needs compute capability 8.9"); }
}
