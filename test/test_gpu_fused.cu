// The FP8 matmuls with an activation in their epilogue (kernels/fused_matmul.cu,
// wide_matmul.cu): against the definition, summed in FP64, and against the two kernels that they
// replace. Bit for bit, where the operands' sums are the same in every order. And the head's
// matmul with what it leaves for the loss, and QKV's with RoPE. `--time` times them beside these
// two.
#define TEST_OWN_MAIN
#include "fp8_test.h"

enum Kind { GELU, GELU_BACKWARD, SWIGLU, HEAD, ROTARY };

// A matmul with all that it reads and writes; N: columns of the codes. Operands are normally
// distributed, or small whole numbers.
struct Problem {
    int M, N, K;
    Fp8Type type; // type of A, and of the output
    Kind kind;
    bool backward, fast;
    int columns; // columns of the result
    int V;       // columns of the head that count
    Rotary rotary = {};
    Codes a_host, b_host;
    Buffer<uint8_t> a, b;
    Buffer<Fp8Scale> scales; // scales of a and b
    Input bias, x_host;
    Bf16Buffer x, apart; // the pre-activations, all of the result but in the backward pass; there
                         // the result of two kernels is apart
    FloatBuffer sums;
    SumScratch scratch;
    Quantised out;

    Problem(int m, int n, int k, Fp8Type t, Kind what, bool f, bool whole)
        : M(m), N(n), K(k), type(t), kind(what), backward(what == GELU_BACKWARD), fast(f),
          columns(what == SWIGLU ? 2 * n : n), V(n), a_host(period_of((size_t)m * k)),
          b_host(period_of((size_t)columns * k)), a((size_t)m * k), b((size_t)columns * k),
          scales(2), bias(n, 1), x_host((size_t)m * n, 1.5f), x((size_t)m * columns),
          apart(x.count), sums(n), scratch(m, n), out(m, n, t, backward ? 90.0f : 50.0f) {
        // a normal result has the spread of a pre-activation
        float spread_a = whole ? 1.0f : 50.0f, spread_b = whole ? 1.0f : 30.0f;
        Fp8Scale both[2] = {{1 / spread_a, spread_a, 0, 0}, {1 / spread_b, spread_b, 0, 0}};
        for (Fp8Scale &slot : both) { slot.scale_inv /= whole ? 4.0f : sqrtf(sqrtf((float)k)); }
        auto value = [&](uint64_t key, size_t i, float spread) {
            return whole ? (float)(int)(rng_bits(key, i) % 5) - 2.0f : spread * rng_normal(key, i);
        };
        random_key++;
#pragma omp parallel for
        for (size_t i = 0; i < a_host.size(); i++) {
            a_host[i] = fp8_encode(value(random_key, i, spread_a), t);
        }
#pragma omp parallel for
        for (size_t i = 0; i < b_host.size(); i++) {
            b_host[i] = fp8_encode(value(~random_key, i, spread_b), FP8_E4M3);
        }
        scales.put(both);
        put_repeated(a, a_host);
        put_repeated(b, b_host);
        reset();
    }
    void reset(void) {
        out.reset(0.0f, 1);
        sums.poison();
        scratch.poison();
        x.poison();
        if (!backward) { return; }
        CUDA_CHECK(cudaMemcpyAsync(x.data, x_host.device.data, x.count * sizeof(Bf16),
                                   cudaMemcpyDeviceToDevice, gpu.stream));
    }
    Gemm gemm_of(Bf16 *d) const {
        Gemm g = gemm_plain(M, columns, K, NULL, NULL, d);
        g.a = a.data;
        g.b = b.data;
        g.type_a = gpu_fp8_type(type);
        g.type_b = TYPE_E4M3;
        g.trans_b = true;
        g.scale_a = &scales.data[0].scale_inv;
        g.scale_b = &scales.data[1].scale_inv;
        g.fast_accumulation = fast;
        return g;
    }
    Gradient column_sums(void) const {
        return {sums.data, TYPE_F32, false};
    }
    Operand tensor(void) const {
        Operand t = out.tensor(SCALE_DELAYED, true);
        t.bf16 = NULL;
        return t;
    }
    // The maxima and sums of the head's logits, in the memory of their gradient's codes, as in
    // training.
    Scratch max_sums(void) const {
        return {reinterpret_cast<float *>(out.fp8.data), out.fp8.count};
    }
    void run(Operand t) {
        Gemm g = gemm_of(x.data);
        g.bias = bias.device.data;
        if (kind == HEAD) {
            gpu_matmul_max_sums(&gpu, g, max_sums(), V);
        } else if (kind == ROTARY) {
            gpu_matmul_rope(&gpu, g, rotary);
        } else if (backward) {
            g.d = NULL;
            g.aux = x.data;
            gpu_matmul_gelu_backward(&gpu, g, t, column_sums(), scratch.scratch());
        } else {
            (kind == SWIGLU ? gpu_matmul_swiglu : gpu_matmul_gelu)(&gpu, g, t);
        }
    }
    void run(void) {
        run(tensor());
    }
    // The activation of x, or RoPE in place.
    void run_pass(Operand t) {
        if (kind == SWIGLU) {
            gpu_swiglu_forward(&gpu, t, x.data, M, N);
        } else if (kind == ROTARY) {
            gpu_rope_forward(&gpu, x.data, x.data, rotary);
        } else {
            gpu_gelu_forward(&gpu, t, x.data, bias.device.data, M, N);
        }
    }
    // The same by cuBLASLt and a pass.
    void run_apart(void) {
        gemm(&gpu, gemm_of(backward ? apart.data : x.data));
        if (backward) {
            gpu_gelu_backward(&gpu, tensor(), column_sums(), apart.data, x.data, bias.device.data,
                              scratch.scratch(), M, N);
        } else {
            run_pass(tensor());
        }
    }
    // The result in the rows from `first` on, scaled.
    Floats matmul(int first, int rows) const {
        float values_a[256], values_b[256];
        std::vector<Fp8Scale> slots = scales.get();
        for (int code = 0; code < 256; code++) {
            values_a[code] = fp8_decode((uint8_t)code, type);
            values_b[code] = fp8_decode((uint8_t)code, FP8_E4M3);
        }
        return exact_matmul(
            rows, columns, K, slots[0].scale_inv * slots[1].scale_inv,
            [&](int i, int k) { return values_a[a_host[(size_t)(first + i) * K + k]]; },
            [&](int j, int k) { return values_b[b_host[(size_t)j * K + k]]; });
    }
};

// racecheck does not see the accesses of TMA and WGMMA.
static bool can_run(void) {
    bool can = gpu_has_fused_matmuls(&gpu) && !sanitizing_by("racecheck");
    if (!can) { test_skip("fused matmuls need compute capability 9.0, and not racecheck"); }
    return can;
}

// The results of a run, to be compared with another run's.
struct Results {
    Floats x, sums;
    Codes fp8, fp8_t;
    float amax;

    explicit Results(const Problem &p)
        : x(get_floats(p.x)), sums(p.sums.get()), fp8(p.out.fp8.get()), fp8_t(p.out.fp8_t.get()),
          amax(p.out.slot.get()[0].amax) {
    }
};

// From poisoned buffers; apart: of the two kernels.
static Results results_of(Problem &p, bool apart) {
    p.reset();
    apart ? p.run_apart() : p.run();
    return Results(p);
}

// Everything but the column sums, whose order differs. (The stand-ins' exponentials are more
// exact.)
static void check_same(const Results &a, const Results &b) {
    CHECK(same_bits(a.x, b.x));
    CHECK(a.fp8 == b.fp8);
    CHECK(a.fp8_t == b.fp8_t);
    CHECK_CLOSE(a.amax, b.amax, on_stand_ins() ? 1e-6 * b.amax : 0.0);
}

// With whole numbers, sums, and so all results, equal the definition's and the two kernels' bit
// for bit; so do a repeated run's. Changing a code of A changes its row.
static void check_whole(int M, int N, int K, Fp8Type type, Kind kind, bool fast) {
    if (left_out((int64_t)M * N)) { return; }
    Problem p(M, N, K, type, kind, fast, true);
    const bool backward = p.backward;
    Results fused = results_of(p, false);
    check_transpose(p.out);
    if (!backward) { CHECK(same_bits(fused.x, rounded(p.matmul(0, M)))); }
    const Results again = results_of(p, false);
    check_same(fused, again);
    if (backward) { CHECK(same_bits(fused.sums, again.sums)); }
    if (!sanitizing()) {
        const Results apart = results_of(p, true);
        check_same(fused, apart);
        if (backward) { CHECK_ERROR(fused.sums.data(), apart.sums.data(), N, 1e-5); }
    }
    int row = M / 2, column = N - 1;
    uint8_t other = fp8_encode(448.0f, type);
    CUDA_CHECK(cudaMemsetAsync(p.a.data + (size_t)row * K, other, 16, gpu.stream));
    const Results changed = results_of(p, false);
    CHECK(CAUGHT(check_same(fused, changed)));
    for (int i = 0; i < M; i++) {
        size_t at = (size_t)i * N;
        bool same_row = memcmp(&fused.fp8[at], &changed.fp8[at], N) == 0;
        CHECK(same_row == (i != row));
    }
    Results broken = fused;
    broken.fp8_t[(size_t)column * M + row] ^= 1;
    CHECK(CAUGHT(check_same(fused, broken)));
}

// In one kernel and in two, whose pass has a floor of its own.
static void time_both(Problem &p, const std::string &name, const std::string &shape, double matmul,
                      double pass) {
    for (int turn = 0; turn < 2; turn++) { // alternating, since the clock drifts
        timed(name + "matmul", shape, matmul,
              [&] { gemm(&gpu, p.gemm_of((p.backward ? p.apart : p.x).data)); });
        timed(name + "matmul, pass", shape, matmul + pass, [&] { p.run_apart(); });
        if (!gpu_has_fused_matmuls(&gpu)) { continue; }
        timed(name + "in one", shape, matmul, [&] { p.run(); });
    }
}

// Codes are read, two forms of codes are written, and the BF16 pre-activations are written, or
// read.
static void time_matmul(int M, int F, int C, Kind kind, bool fast) {
    static const char *const names[] = {"gelu", "gelu backward", "swiglu"};
    Problem p(M, F, C, kind == GELU_BACKWARD ? FP8_E5M2 : FP8_E4M3, kind, fast, false);
    time_both(p, text("%s %s: ", names[kind], fast ? "fast" : "split"),
              text("fc1 %dx%dx%d", M, p.columns, C),
              2.0 * M * p.columns * C / (2 * FLOPS_PER_S) + moved((double)M * (p.columns + F)), 0);
}

ROW(whole_numbers) {
    if (mode == TIMING && has_fp8()) {
        for (int fast = 0; fast < 2; fast++) {
            time_matmul(65536, 3072, 768, GELU, fast);
            time_matmul(65536, 3072, 768, GELU_BACKWARD, fast);
        }
        time_matmul(32768, 5504, 2048, SWIGLU, true);
    }
    if (mode != CHECKING || !can_run()) { return; }
    static const int shapes[][3] = {{16, 16, 16},    {64, 128, 128},  {128, 128, 768},
                                    {48, 144, 80},   {208, 400, 656}, {304, 272, 528},
                                    {1040, 16, 400}, {16, 1040, 272}, {4144, 768, 768}};
    for (const int *s : shapes) {
        for (int fast = 0; fast < 2; fast++) {
            check_whole(s[0], s[1], s[2], FP8_E4M3, GELU, fast);
            check_whole(s[0], s[1], s[2], FP8_E4M3, GELU_BACKWARD, fast);
            check_whole(s[0], s[1], s[2], FP8_E5M2, GELU_BACKWARD, fast);
        }
        check_whole(s[0], s[1], s[2], FP8_E4M3, SWIGLU, true);
    }
    check_whole(784, 176, 2064, FP8_E4M3, SWIGLU, true); // its K has no limit
}

// The error of codes against the values that they represent, divided by the error of encoding these
// values.
static double coding_error(const uint8_t *codes, const Floats &values, float scale, Fp8Type type) {
    Floats decoded(values.size()), best(values.size());
    for (size_t i = 0; i < values.size(); i++) {
        decoded[i] = fp8_decode(codes[i], type) / scale;
        best[i] = fp8_decode(fp8_encode(values[i] * scale, type), type) / scale;
    }
    int64_t n = (int64_t)values.size();
    return test_relative_error(decoded.data(), values.data(), n) /
           test_relative_error(best.data(), values.data(), n);
}

// Normal operands, whose sums differ in the last bits.
static void check_normal(int M, int N, int K, Fp8Type type, Kind kind, bool fast) {
    const int rows = M < 96 ? M : 96, first = M - rows; // the last rows, in an incomplete tile
    if (left_out((int64_t)M * N)) { return; }
    Problem p(M, N, K, type, kind, fast, false);
    const bool backward = p.backward;
    size_t n = (size_t)rows * N, from = (size_t)first * N;
    Results fused = results_of(p, false);
    check_transpose(p.out);
    // the definition, without any rounding to BF16
    Floats matmul = p.matmul(first, rows), sum(n), values(n);
    if (!backward) {
        Floats x(fused.x.end() - (ptrdiff_t)matmul.size(), fused.x.end());
        CHECK_BF16(x, matmul, fast ? 2.0 : 1.2);
    }
    for (size_t i = 0; i < n && kind != SWIGLU; i++) {
        sum[i] = (backward ? p.x_host.host[from + i] : matmul[i]) + p.bias.host[i % N];
    }
    if (backward) {
        values = matmul;
        gelu_backward(values.data(), values.data(), sum.data(), (int64_t)n);
    } else if (kind == SWIGLU) {
        swiglu_forward(values.data(), matmul.data(), rows, N);
    } else {
        gelu_forward(values.data(), sum.data(), (int64_t)n);
    }
    double error = coding_error(&fused.fp8[from], values, p.out.scale, type);
    CHECK(error < 1.05);
    fused.fp8[from + n / 2] ^= 0x40; // another exponent bit
    CHECK(!(coding_error(&fused.fp8[from], values, p.out.scale, type) == error));
    fused.fp8[from + n / 2] ^= 0x40;
    if (!backward) { // the epilogue alone: from its x, the activation's kernel must make the same
        Quantised q(M, N, type, p.out.scale);
        p.run_pass(with_forms(q.tensor(SCALE_DELAYED, true), NULL, q.fp8.data, q.fp8_t.data));
        CHECK(q.fp8.get() == fused.fp8);
        CHECK(q.fp8_t.get() == fused.fp8_t);
        CHECK(q.slot.get()[0].amax == fused.amax);
    }
    if (sanitizing()) { return; }
    const Results apart = results_of(p, true);
    size_t differ = 0, far = 0;
    for (size_t i = 0; i < fused.fp8.size(); i++) {
        int steps = (int)code_order(fused.fp8[i]) - (int)code_order(apart.fp8[i]);
        differ += steps != 0;
        far += steps * steps > 1 && fabsf(fp8_decode(apart.fp8[i], type)) > 8.0f; // and not near 0
    }
    CHECK(differ < fused.fp8.size() / (fast ? 10 : 20));
    CHECK(far < 1 + fused.fp8.size() / 10000);
    CHECK_CLOSE(fused.amax, apart.amax, 0.01 * apart.amax);
    if (backward) { CHECK_ERROR(fused.sums.data(), apart.sums.data(), N, 5e-3); }
}

TEST(normal_numbers) {
    if (!can_run()) { return; }
    for (int fast = 0; fast < 2; fast++) {
        check_normal(272, 208, 768, FP8_E4M3, GELU, fast);
        check_normal(272, 208, 768, FP8_E5M2, GELU_BACKWARD, fast);
        check_normal(4144, 4800, 400, FP8_E4M3, GELU, fast); // 4096 + 48 rows
        check_normal(4144, 4800, 400, FP8_E5M2, GELU_BACKWARD, fast);
        check_normal(20000, 3072, 768, FP8_E4M3, GELU, fast);
        check_normal(20000, 3072, 768, FP8_E4M3, GELU_BACKWARD, fast);
    }
    check_normal(272, 208, 2064, FP8_E4M3, SWIGLU, true);
    check_normal(4144, 2480, 400, FP8_E4M3, SWIGLU, true);
}

// Llama's fc1 of 1B and 8B: cuBLASLt adds up in the same order there, so that training by the fused
// matmul leaves the same bits. The scales are no powers of two.
TEST(same_bits_as_two_kernels) {
    if (!can_run() || sanitizing() || on_stand_ins()) { return; }
    static const int shapes[][3] = {{8192, 5504, 2048}, {2048, 14336, 4096}};
    for (const int *s : shapes) {
        Problem p(s[0], s[1], s[2], FP8_E4M3, SWIGLU, true, false);
        const Results fused = results_of(p, false);
        Results apart = results_of(p, true);
        check_same(fused, apart);
        apart.x.back() = -apart.x.back();
        CHECK(CAUGHT(check_same(fused, apart)));
    }
}

// ---- the head -----------------------------------------------------------------------------------

// {maximum, sum} of each row and tile, from the device.
static Floats get_max_sums(const Problem &p) {
    Codes bytes = p.out.fp8.get();
    Floats all(max_sums_floats(p.M, p.N));
    memcpy(all.data(), bytes.data(), all.size() * sizeof(float));
    return all;
}

// Compares max_sums with the maxima and sums of the first V of these logits.
static void check_max_sums(const Floats &found, const Floats &logits, int M, int N, int V) {
    for (int i = 0; i < max_sums_tiles(N) * M; i++) {
        const float *row = &logits[(size_t)(i % M) * N];
        const int begin = i / M * WIDE_MATMUL_COLUMNS,
                  end = std::min(V, begin + WIDE_MATMUL_COLUMNS);
        float max = -INFINITY;
        double sum = 0;
        for (int j = begin; j < end; j++) { max = std::max(max, row[j]); }
        for (int j = begin; j < end; j++) { sum += exp((double)row[j] - max); }
        if (found[2 * i] != max || !(fabs(found[2 * i + 1] - sum) <= 5e-6 * sum)) {
            test_fail(__FILE__, __LINE__, "row %d, tile %d: %g, %g, not %g, %g", i % M, i / M,
                      found[2 * i], found[2 * i + 1], max, sum);
            return;
        }
    }
}

static const LossTerms head_terms = {0.25f, 1e-4f, 0.0f};

// The matmul, and the losses, whose gradient goes to p.out: from what the matmul has left, or
// from the logits.
static Floats head_losses(Problem &p, const Ints &host_targets, bool given) {
    Buffer<int> targets(p.M);
    FloatBuffer losses(p.M), rows(loss_scratch_floats(p.M));
    targets.put(host_targets.data());
    p.run();
    gpu_cross_entropy(&gpu, losses.data,
                      with_forms(p.tensor(), p.x.data, p.out.fp8.data, p.out.fp8_t.data),
                      {rows.data, rows.count * sizeof(float)}, given ? p.max_sums() : Scratch{},
                      targets.data, p.M, p.V, p.N, head_terms);
    return losses.get();
}

static Ints head_targets(int M, int V) {
    Ints targets(M);
    for (int i = 0; i < M; i++) { targets[i] = i % 7 == 1 ? -1 : (i * 101 + V - 1) % V; }
    return targets;
}

static void check_head(int M, int N, int V, int K, bool whole) {
    if (left_out((int64_t)M * N)) { return; }
    Problem p(M, N, K, FP8_E4M3, HEAD, true, whole);
    p.V = V;
    p.run();
    const Floats logits = get_floats(p.x), left = get_max_sums(p);
    const Floats expected = p.matmul(0, M);
    if (whole) {
        CHECK(same_bits(logits, rounded(expected)));
    } else {
        CHECK_BF16(logits, expected, 2.0);
    }
    check_max_sums(left, logits, M, N, V);
    CHECK(CAUGHT(check_max_sums(left, logits, M, N, V - 1)));
    p.reset();
    p.run();
    CHECK(same_bits(get_max_sums(p), left));

    const Ints targets = head_targets(M, V);
    Floats gradient = logits, losses(M);
    cross_entropy(losses.data(), gradient.data(), targets.data(), M, V, N, head_terms);
    for (bool given : {true, false}) {
        p.reset();
        Floats found = head_losses(p, targets, given);
        for (int i = 0; i < M; i++) {
            float logit = targets[i] < 0 ? 0.0f : logits[(size_t)i * N + targets[i]];
            CHECK_CLOSE(found[i], losses[i], 2e-6 * std::max(1.0f, fabsf(losses[i] + logit)));
        }
        check_given(p.out, gradient, false);
    }
}

// The head's matmul and the loss: by cuBLASLt and a loss that reads the logits twice, and with
// what our matmul leaves. The floor: codes are read, BF16 logits written and read once, and two
// forms of codes written.
static void time_head(int M, int N, int V, int K) {
    Problem p(M, N, K, FP8_E4M3, HEAD, true, false);
    Buffer<int> targets(M);
    FloatBuffer losses(M), rows(loss_scratch_floats(M));
    const Operand logits = with_forms(p.tensor(), p.x.data, p.out.fp8.data, p.out.fp8_t.data);
    const std::string shape = text("head %dx%dx%d", M, N, K);
    const double matmul = 2.0 * M * N * K / (2 * FLOPS_PER_S), pass = moved((double)M * N);
    auto loss = [&](Scratch max_sums) {
        gpu_cross_entropy(&gpu, losses.data, logits, {rows.data, rows.count * sizeof(float)},
                          max_sums, targets.data, M, V, N, head_terms);
    };
    p.V = V;
    targets.put(head_targets(M, V).data());
    for (int turn = 0; turn < 2; turn++) {
        timed("head: matmul", shape, matmul, [&] { gemm(&gpu, p.gemm_of(p.x.data)); });
        timed("head: matmul, loss", shape, matmul + 2 * pass, [&] {
            gemm(&gpu, p.gemm_of(p.x.data));
            loss({});
        });
        if (!gpu_has_fused_matmuls(&gpu)) { continue; }
        timed("head: matmul that leaves sums", shape, matmul, [&] { p.run(); });
        timed("head: matmul that leaves sums, loss", shape, matmul + 2 * pass, [&] {
            p.run();
            loss(p.max_sums());
        });
    }
}

ROW(heads) {
    if (mode == TIMING && has_fp8()) {
        time_head(16384, 50304, 50257, 768); // GPT-2 124M's chunk of rows
        time_head(65536, 50304, 50257, 768);
        time_head(32768, 128256, 128256, 2048);
    }
    if (mode != CHECKING || !can_run()) { return; }
    static const int shapes[][4] = {
        {16, 16, 1, 16},      {144, 304, 301, 80}, {144, 304, 301, 272},   {64, 512, 257, 128},
        {272, 768, 640, 768}, {80, 528, 200, 144}, {1040, 2064, 2050, 400}};
    for (const int *s : shapes) {
        for (int whole = 0; whole < 2; whole++) { check_head(s[0], s[1], s[2], s[3], whole); }
    }
}

// ---- queries, keys and values -------------------------------------------------------------------

struct Queries : Problem {
    Floats table;
    FloatBuffer angles;

    Queries(int B, int T, int H, int G, int D, int k, bool whole)
        : Problem(B * T, (H + 2 * G) * D, k, FP8_E4M3, ROTARY, true, whole), table((size_t)T * D),
          angles(table.size()) {
        Rope rope = {10000.0};
        rope_table(table.data(), T, D, &rope);
        angles.put(table.data());
        rotary = {angles.data, NULL, NULL, 0.0f, B, T, H, G, D};
    }
    // The definition, of the matmul's rounded values.
    Floats rotated(Floats values, bool inverse) const {
        const Rotary &r = rotary;
        rope_apply(values.data(), table.data(), r.B, r.T, r.H, r.G, r.D, inverse);
        return values;
    }
};

// The matmul without RoPE is the head's, which adds up in the same order.
static void check_queries(int B, int T, int H, int G, int D, int K, bool whole) {
    if (left_out((int64_t)B * T * (H + 2 * G) * D)) { return; }
    Queries p(B, T, H, G, D, K, whole);
    gpu_matmul_max_sums(&gpu, p.gemm_of(p.x.data), p.max_sums(), p.N);
    const Floats matmul = get_floats(p.x), expected = p.rotated(matmul, false);
    if (whole) { CHECK(same_bits(matmul, rounded(p.matmul(0, p.M)))); }
    p.run_pass({});
    const Floats apart = get_floats(p.x);
    p.reset();
    p.run();
    const Floats found = get_floats(p.x);
    CHECK_BF16(found, expected, 1.02);
    if (T > 1) { // at position 0 nothing turns
        Floats moved = found;
        std::swap_ranges(&moved[0], &moved[p.N], &moved[(size_t)(T - 1) * p.N]);
        CHECK(CAUGHT(CHECK_BF16(moved, expected, 1.02)));
        CHECK(CAUGHT(CHECK_BF16(found, p.rotated(matmul, true), 1.02)));
    }
    for (size_t i = 0; i < found.size(); i++) {
        const bool value = (int)(i % p.N) >= (H + G) * D;
        if (value && found[i] != matmul[i]) {
            test_fail(__FILE__, __LINE__, "value %zu: %g, not %g", i, found[i], matmul[i]);
            break;
        }
    }
    p.reset();
    p.run();
    CHECK(same_bits(get_floats(p.x), found));
    if (on_stand_ins()) { return; } // whose FP32 differs in the last bits
    CHECK(same_bits(found, apart));
    Floats broken = found;
    broken.back() = -broken.back();
    CHECK(CAUGHT(CHECK(same_bits(broken, apart))));
    if (!whole || sanitizing()) { return; }
    p.reset();
    p.run_apart();
    CHECK(same_bits(found, get_floats(p.x)));
}

// The floor: codes are read, BF16 written, and in a pass queries and keys read and written again.
static void time_queries(int B, int T, int H, int G, int D, int K) {
    Queries p(B, T, H, G, D, K, false);
    time_both(p, "rope: ", text("qkv %dx%dx%d", p.M, p.N, K),
              2.0 * p.M * p.N * K / (2 * FLOPS_PER_S), moved(2.0 * p.M * (H + G) * D));
}

ROW(queries) {
    if (mode == TIMING && has_fp8()) {
        time_queries(16, 2048, 16, 4, 128, 2048);
        time_queries(2, 8192, 32, 8, 128, 4096);
    }
    if (mode != CHECKING || !can_run()) { return; }
    static const int shapes[][6] = {
        {1, 16, 1, 1, 16, 16},   {16, 1, 5, 2, 16, 144},    {3, 48, 2, 1, 32, 80},
        {16, 9, 3, 1, 64, 272},  {16, 3, 5, 3, 64, 128},    {16, 5, 2, 2, 128, 144},
        {1, 48, 1, 1, 256, 528}, {16, 17, 2, 1, 128, 400},  {2, 520, 3, 1, 256, 400},
        {48, 33, 7, 7, 32, 272}, {2, 1024, 32, 8, 64, 2048}};
    for (const int *s : shapes) {
        for (int whole = 0; whole < 2; whole++) {
            check_queries(s[0], s[1], s[2], s[3], s[4], s[5], whole);
        }
    }
}

// ---- forms, special values, refusals ------------------------------------------------------------

// One form alone; no history; sums that are added, or not requested.
TEST(forms) {
    if (!can_run()) { return; }
    for (Kind kind : {GELU, GELU_BACKWARD, SWIGLU}) {
        Problem p(208, 272, 768, FP8_E4M3, kind, true, true);
        Codes untouched(p.out.fp8.count, 0xff);
        Results all = results_of(p, false);
        for (int forms = 0; forms < 4; forms++) {
            Operand t = p.tensor();
            t.writes_amax = false;
            if (!(forms & 1)) { t.rows.codes = NULL; }
            if (!(forms & 2)) { t.columns.codes = NULL; }
            p.reset();
            p.run(t);
            Results some(p);
            CHECK(some.fp8 == (forms & 1 ? all.fp8 : untouched));
            CHECK(some.fp8_t == (forms & 2 ? all.fp8_t : untouched));
            CHECK(same_bits(some.x, all.x));
            CHECK_CLOSE(some.amax, 0.0, 0.0);
        }
        if (!p.backward) { continue; }
        Gemm g = p.gemm_of(NULL);
        g.bias = p.bias.device.data;
        g.aux = p.x.data;
        p.reset();
        p.run();
        gpu_matmul_gelu_backward(&gpu, g, p.tensor(), {}, p.scratch.scratch());
        CHECK(same_bits(p.sums.get(), all.sums));
        gpu_matmul_gelu_backward(&gpu, g, p.tensor(), {p.sums.data, TYPE_F32, true},
                                 p.scratch.scratch());
        for (float &sum : all.sums) { sum *= 2; }
        CHECK(same_bits(p.sums.get(), all.sums));
    }
}

// Values that are not finite, values beyond the format, and rows of a tile beyond the tensor, which
// hold only the bias, here larger than any value.
TEST(special_values) {
    if (!can_run()) { return; }
    Problem cut(48, 144, 256, FP8_E4M3, GELU, true, true);
    Codes ones(cut.a.count, fp8_encode(1.0f, FP8_E4M3));
    Codes minus(cut.b.count, fp8_encode(-1.0f, FP8_E4M3));
    cut.a.put(ones.data());
    cut.b.put(minus.data());
    put_floats(cut.bias.device, Floats(cut.N, 5.0f)); // results are -16
    cut.run();
    CHECK(Results(cut).amax < 1e-3f);

    Problem p(64, 128, 128, FP8_E4M3, GELU, true, true);
    Floats bias = p.bias.host;
    bias[3] = 1e30f;
    bias[70] = NAN;
    put_floats(p.bias.device, bias);
    Results r = results_of(p, false);
    CHECK(isnan(r.amax));
    for (int i = 0; i < p.M; i++) {
        CHECK_EQUAL(r.fp8[(size_t)i * p.N + 3], fp8_encode(448.0f, FP8_E4M3));
        CHECK_EQUAL(r.fp8[(size_t)i * p.N + 70], 0x7f);
        CHECK(r.fp8[(size_t)i * p.N + 71] != 0x7f);
    }

    // SwiGLU: gate and up are 128 everywhere, NaN in row 3 and 0 in row 4
    Problem gated(48, 144, 256, FP8_E4M3, SWIGLU, true, true);
    Codes rows = ones, halves(gated.b.count, fp8_encode(8.0f, FP8_E4M3));
    for (size_t k = 0; k < 256; k++) {
        rows[3 * 256 + k] = 0x7f;
        rows[4 * 256 + k] = 0;
    }
    gated.a.put(rows.data());
    gated.b.put(halves.data());
    Results s = results_of(gated, false);
    CHECK(isnan(s.amax));
    for (size_t i = 0; i < s.fp8.size(); i++) {
        int row = (int)(i / gated.N);
        CHECK_EQUAL(s.fp8[i], row == 3 ? 0x7f : row == 4 ? 0 : fp8_encode(448.0f, FP8_E4M3));
    }
}

// A NaN in a row of the head's operand is one in this row's loss alone.
TEST(nan_logits) {
    if (!can_run()) { return; }
    Problem p(48, 304, 256, FP8_E4M3, HEAD, true, true);
    CUDA_CHECK(cudaMemsetAsync(p.a.data + 3 * 256 + 5, 0x7f, 1, gpu.stream));
    p.V = 301;
    Floats losses = head_losses(p, head_targets(p.M, p.V), true);
    for (int i = 0; i < p.M; i++) { CHECK(isnan(losses[i]) == (i == 3)); }
}

// Violates each precondition. The pointers are never read.
TEST(refusals) {
    Bf16 *x = (Bf16 *)(1 << 20);
    uint8_t *fp8 = (uint8_t *)8192;
    float *f = (float *)4096;
    Fp8Scale *slot = (Fp8Scale *)4096;
    Operand given = with_forms(given_tensor(FP8_E4M3, slot), NULL, fp8, fp8);
    Operand apart = given, e5m2 = given, blocks = given;
    Scratch enough = {f, 1 << 30}, little = {f, 255};
    apart.fused = false;
    e5m2.type = FP8_E5M2;
    blocks.scaling = SCALE_BLOCK_1X128;
    Gemm good = gemm_plain(64, 64, 64, NULL, NULL, x);
    good.fast_accumulation = true;
    good.a = good.b = (uint8_t *)(1 << 22); // these addresses are far from what is written
    good.type_a = good.type_b = TYPE_E4M3;
    good.trans_b = true;
    good.bias = x;
    good.aux = x + (1 << 16);
    good.scale_a = good.scale_b = f;
    struct {
        const char *says;
        void (*change)(Gemm *);
    } const cases[] = {
        {"a matmul of 64 x 64 x 72; multiples of 16", [](Gemm *g) { g->k = 72; }},
        {"multiples of 16", [](Gemm *g) { g->m = 56; }},
        {"K is 784, more than 768", [](Gemm *g) { g->k = 784; }},
        {"multiples of 16", [](Gemm *g) { g->n = 72; }},
        {"not 16-byte aligned", [](Gemm *g) { g->a = (uint8_t *)8200; }},
        {"not 16-byte aligned", [](Gemm *g) { g->bias = (Bf16 *)4098; }},
        {"operands of types", [](Gemm *g) { g->type_a = TYPE_BF16; }},
        {"operands of types", [](Gemm *g) { g->type_a = TYPE_E5M2; }},
        {"operands of types", [](Gemm *g) { g->type_b = TYPE_E5M2; }},
        {"operands of types", [](Gemm *g) { g->trans_b = false; }},
        {"scales of kinds 2 and 3",
         [](Gemm *g) { g->scaling_a = SCALE_BLOCK_1X128, g->scaling_b = SCALE_BLOCK_128X128; }},
        {"a pointer is missing", [](Gemm *g) { g->bias = NULL; }},
        {"a pointer is missing", [](Gemm *g) { g->scale_b = NULL; }},
        {"a pointer is missing", [](Gemm *g) { g->c = g->d; }},
    };
    const Rotary turns = {f, NULL, NULL, 0.0f, 4, 16, 2, 1, 16};
    for (auto &c : cases) {
        Gemm g = good;
        c.change(&g);
        CHECK_DIES(c.says, gpu_matmul_gelu(&gpu, g, given));
        CHECK_DIES(c.says, gpu_matmul_gelu_backward(&gpu, g, given, {}, enough));
        if (g.bias == NULL || g.bias != good.bias || g.k > GELU_MATMUL_MAX_K) { continue; }
        CHECK_DIES(g.n == 72 ? "gate and up of 72 columns" : c.says,
                   gpu_matmul_swiglu(&gpu, g, given));
        CHECK_DIES(c.says, gpu_matmul_max_sums(&gpu, g, enough, 60));
        CHECK_DIES(c.says, gpu_matmul_rope(&gpu, g, turns));
    }
    struct {
        const char *says;
        void (*change)(Rotary *);
    } const rotated[] = {
        {"a pointer is missing", [](Rotary *r) { r->table = NULL; }},
        {"not 16-byte aligned", [](Rotary *r) { r->table++; }},
        {"heads with a norm", [](Rotary *r) { r->query_weight = (Bf16 *)4096; }},
        {"heads with a norm", [](Rotary *r) { r->key_weight = (Bf16 *)4096; }},
        {"heads of 8", [](Rotary *r) { r->D = 8; }},
        {"heads of 0", [](Rotary *r) { r->D = 0; }},
        {"heads of 48", [](Rotary *r) { r->D = 48; }},
        {"heads of 512", [](Rotary *r) { r->D = 512; }},
        {"5 x 16 tokens", [](Rotary *r) { r->B = 5; }},
        {"-4 x -16 tokens", [](Rotary *r) { r->B = -4, r->T = -16; }},
        {"3 + 1 heads of 16; not 64 x 64", [](Rotary *r) { r->H = 3; }},
        {"4 + 0 heads", [](Rotary *r) { r->H = 4, r->G = 0; }},
        {"0 + 2 heads", [](Rotary *r) { r->H = 0, r->G = 2; }},
    };
    for (auto &c : rotated) {
        Rotary r = turns;
        c.change(&r);
        CHECK_DIES(c.says, gpu_matmul_rope(&gpu, good, r));
    }
    Gemm split = good;
    split.fast_accumulation = false;
    CHECK_DIES("it accumulates fast alone", gpu_matmul_swiglu(&gpu, split, given));
    CHECK_DIES("it accumulates fast alone", gpu_matmul_max_sums(&gpu, split, enough, 60));
    CHECK_DIES("it accumulates fast alone", gpu_matmul_rope(&gpu, split, turns));
    CHECK_DIES("0 columns of 64", gpu_matmul_max_sums(&gpu, good, enough, 0));
    CHECK_DIES("65 columns of 64", gpu_matmul_max_sums(&gpu, good, enough, 65));
    CHECK_DIES("255 bytes of scratch; 512", gpu_matmul_max_sums(&gpu, good, little, 64));
    CHECK_DIES("over its operand a",
               gpu_matmul_max_sums(&gpu, good, {(float *)good.b, 1 << 30}, 64));
    CHECK_DIES("its output's scale is given",
               gpu_matmul_swiglu(&gpu, good, with_forms(apart, x, fp8, fp8)));
    CHECK_DIES("forward operands are E4M3", gpu_matmul_swiglu(&gpu, good, e5m2));
    CHECK_DIES("no BF16 form", gpu_matmul_gelu(&gpu, good, apart));
    CHECK_DIES("its output's scale is given",
               gpu_matmul_gelu(&gpu, good, with_forms(apart, x, fp8, fp8)));
    CHECK_DIES("blocks without scales", gpu_matmul_gelu(&gpu, good, blocks));
    CHECK_DIES("forward operands are E4M3", gpu_matmul_gelu(&gpu, good, e5m2));
    CHECK_DIES("operands of types", gpu_matmul_gelu_backward(&gpu, good, e5m2, {}, enough));
    CHECK_DIES("bytes of scratch", gpu_matmul_gelu_backward(&gpu, good, given, {}, little));
    Gpu old = gpu;
    old.capability = 80;
    CHECK(!gpu_has_fused_matmuls(&old));
    CHECK_DIES("this device has none", gpu_matmul_gelu(&old, good, given));
    CHECK_DIES("this device has none", gpu_matmul_swiglu(&old, good, given));
    CHECK_DIES("this device has none", gpu_matmul_max_sums(&old, good, enough, 64));
    CHECK_DIES("this device has none", gpu_matmul_rope(&old, good, turns));
}

SETUP() {
    open_test_gpu(1 << 20);
}

int main(int argc, char **argv) {
    return check_or_time(argc, argv);
}
