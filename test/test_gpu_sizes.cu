// The sizes that people train at: attention over 2,048 and 8,192 tokens against its definition, on
// sampled rows; tensors of more than 2^31 elements, computed whole and in parts, bit for bit.
#include "../kernels/attention.h"
#include "../kernels/gemm.h"
#include "gpu_rows.h"

// ---- attention ---------------------------------------------------------------------------------

// What the definition rounds to BF16: nothing, or results and values between two matmuls, as on
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
    size_t qkv_row(int head, int t) const {
        int column = head < heads ? g * heads + head : head == heads ? s.H + g : s.H + s.G + g;
        return (((size_t)b * s.T + t) * (s.H + 2 * s.G) + column) * s.D;
    }
    const float *row(int head, int t) const {
        return &qkv[qkv_row(head, t)];
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
    // The gradient of the key (which 0) or value (1) at j. cuDNN rounds each query head's part
    // before it adds them.
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
    std::vector<size_t> offsets; // in the device's buffer

    double worst(const Bf16Buffer &buffer, bool planted) const {
        double length = 0, most = 0;
        for (const Floats &x : exact) {
            length += distance(x, Floats(x.size(), 0.0f)) / (double)exact.size();
        }
        for (size_t i = 0; i < exact.size(); i++) {
            size_t n = exact[i].size(), other = planted && i > 0 ? i - 1 : i;
            Floats actual = fetch_floats(buffer.data + offsets[other], n);
            double error = distance(actual, exact[i]) / (roundings[i] + length * 0x1p-14);
            if (!(error <= most)) { most = error; }
        }
        return most;
    }
};

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
    Input qkv(tokens * N, 1), dout(tokens * s.H * s.D, 1);
    Bf16Buffer out(dout.host.size()), dqkv(qkv.host.size());
    FloatBuffer lse((size_t)s.B * s.H * s.T);

    fail("%s", "");
    bool served = attention_is_fast(&gpu, s);
    if (!served) {
        test_fail(__FILE__, __LINE__, "the plain kernel would serve: %s", error_text());
    }
    if (!served) { return; }
    attention_forward_gpu(&gpu, s, out.data, lse.data, qkv.device.data);
    attention_backward_gpu(&gpu, s, dqkv.data, dout.device.data, out.data, lse.data,
                           qkv.device.data);

    Rows rows[] = {{"out", {}, {}, {}}, {"dQ", {}, {}, {}}, {"dK", {}, {}, {}}, {"dV", {}, {}, {}}};
    Floats results = get_floats(out), logs = lse.get(), actual, expected;
    for (int corner = 0; corner < 2; corner++) {
        int b = corner * (s.B - 1), g = corner * (s.G - 1);
        Slice slice(s, b, g, qkv.host, dout.host, results);
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
                rows[i].offsets.push_back(i == 0   ? slice.result_row(head, t)
                                          : i == 1 ? slice.qkv_row(head, t)
                                                   : slice.qkv_row(slice.heads + i - 2, t));
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

TEST(rows_beyond_2_31) {
    if (!has_room(28)) { return; }
    run_rows(IN_PARTS);
    // planted: one bit, near the end
    Input x((size_t)ROWS * COLUMNS, 1);
    uint64_t hash = hash_of(x.device.data, 2 * COLUMNS, 2 * COLUMNS, ROWS);
    Bf16 *last = x.device.data + x.device.count - 1;
    Bf16 code = bf16_encode(fetch_floats(last, 1)[0]) ^ 1;
    CHECK(hash_of(x.device.data, 2 * COLUMNS, 2 * COLUMNS, ROWS) == hash);
    gpu_send(&gpu, last, &code, sizeof(code));
    CHECK(hash_of(x.device.data, 2 * COLUMNS, 2 * COLUMNS, ROWS) != hash);
}

// Whole numbers, whose sums of products are exact whatever the order: the same bits.
TEST(matmuls_beyond_2_31) {
    if (!has_room(24)) { return; }
    const int C = COLUMNS, K = 64, SOME = ROWS / PARTS;
    Bf16Buffer x((size_t)ROWS * C), y(x.count), small((size_t)ROWS * K), weight((size_t)C * K),
        part((size_t)SOME * C), back((size_t)ROWS * K);
    FloatBuffer whole((size_t)C * K), parts((size_t)C * K);
    for (Bf16Buffer *buffer : {&x, &small, &weight}) {
        Floats numbers(std::min(buffer->count, (size_t)PERIOD));
        random_key++;
        for (size_t i = 0; i < numbers.size(); i++) {
            numbers[i] = (float)(int)(rng_bits(random_key, i) % 5) - 2.0f;
        }
        put_repeated(*buffer, bf16_codes(numbers));
    }
    auto same_rows = [&](const Bf16Buffer &all, size_t first, size_t N) {
        CHECK(hash_of(all.data + first * N, 2 * N, 2 * N, SOME) ==
              hash_of(part.data, 2 * N, 2 * N, SOME));
    };
    for (int p = -1; p < PARTS; p++) { // -1: all
        size_t first = p < 0 ? 0 : (size_t)p * SOME;
        int rows = p < 0 ? (int)ROWS : SOME;
        // y[rows,C] = small weight'; back[rows,K] = x weight; whole[C,K] = x' small
        Gemm g = gemm_plain(rows, C, K, small.data + first * K, weight.data,
                            p < 0 ? y.data : part.data);
        g.trans_b = true;
        gemm(&gpu, g);
        if (p >= 0) { same_rows(y, first, C); }
        gemm(&gpu, gemm_plain(rows, K, C, x.data + first * C, weight.data,
                              p < 0 ? back.data : part.data));
        if (p >= 0) { same_rows(back, first, K); }
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
    mode = IN_PARTS;
    Input qkv(tokens * N, 1), dout(tokens * H * D, 1);
    mode = CHECKING;
    Bf16Buffer out(tokens * H * D), dqkv(tokens * N), out_part(some * H * D), dqkv_part(some * N);
    FloatBuffer lse((size_t)B * H * T), lse_part((size_t)BLOCK * H * T);
    fail("%s", "");
    if (!attention_is_fast(&gpu, s)) { test_fail(__FILE__, __LINE__, "%s", error_text()); }
    attention_forward_gpu(&gpu, s, out.data, lse.data, qkv.device.data);
    attention_backward_gpu(&gpu, s, dqkv.data, dout.device.data, out.data, lse.data,
                           qkv.device.data);
    size_t wide = N * sizeof(Bf16), narrow = H * D * sizeof(Bf16);
    for (size_t at = 0; at < tokens; at += some) {
        attention_forward_gpu(&gpu, piece, out_part.data, lse_part.data, qkv.device.data + at * N);
        attention_backward_gpu(&gpu, piece, dqkv_part.data, dout.device.data + at * H * D,
                               out_part.data, lse_part.data, qkv.device.data + at * N);
        CHECK(hash_of(out.data + at * H * D, narrow, narrow, some) ==
              hash_of(out_part.data, narrow, narrow, some));
        CHECK(hash_of(dqkv.data + at * N, wide, wide, some) ==
              hash_of(dqkv_part.data, wide, wide, some));
    }
}

SETUP() {
    open_test_gpu((size_t)4608 << 20);
    if (sanitizing()) { test_skip_all("large shapes are too slow under compute-sanitizer"); }
    if (!has_fp8()) { test_skip_all("FP8 needs compute capability 8.9"); }
}
