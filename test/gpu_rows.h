// The rows of the table of launchers whose output is an activation or a gradient of one:
// embeddings, norms, RoPE, activations, loss, casts to FP8. test_gpu_kernels.cu checks and times
// them; test_gpu_sizes.cu compares parts with the whole beyond 2^31 elements.
#pragma once

#include "fp8_test.h"

#include <array>

// ---- what a row does with a launcher -----------------------------------------------------------

// What a fused producer quantises, and what it writes in BF16.
typedef enum {
    FUSED_UNROUNDED, // FP32 values; the BF16 form stays as it was
    FUSED_ROUNDED    // its BF16 result, which it also writes
} Fused;

// A launch on some rows of a tensor.
struct Launch {
    Operand out;
    size_t first;
    int rows;
    Gradient sums[3];
};

typedef std::array<int, 3> Columns;

// A launcher that writes [M,N], at one shape. BF16 elements that must move are its floor; two codes
// are one. 0: that form is not timed.
struct Producer {
    std::string name;
    Fused fused;
    int M, N;
    Fp8Type type;
    float scale;         // scale of FP8, if it is given
    const Input *before; // what out.bf16 holds before; NULL: nothing
    double bf16, fp8;    // what moves
    std::string shape;   // as printed; empty: M x N
    double bf16_only;    // it writes no FP8: the bound of check_against; 0: it does
    Columns sums;        // of its sums over rows; 0: none
    int needed;          // how many of these every call requests

    bool has_codes() const {
        return has_fp8() && bf16_only == 0 && M % 16 == 0 && N % 16 == 0;
    }
    void begin(Bf16 *out, size_t first, size_t rows) const {
        if (before == NULL) { return; }
        CUDA_CHECK(cudaMemcpyAsync(out, before->device.data + first * N, rows * N * sizeof(Bf16),
                                   cudaMemcpyDeviceToDevice, gpu.stream));
    }
};

// Buffers of a producer's sums over rows, in FP32.
struct Sums {
    Columns columns;
    FloatBuffer data[3];

    explicit Sums(const Producer &p)
        : columns(p.sums), data{FloatBuffer((size_t)p.sums[0]), FloatBuffer((size_t)p.sums[1]),
                                FloatBuffer((size_t)p.sums[2])} {
    }
    // A launch that requests the first `count` of these, overwritten or added to.
    Launch launch(Operand out, size_t first, size_t rows, int count, bool added) const {
        Launch l = {out, first, (int)rows, {}};
        for (int i = 0; i < count; i++) {
            if (columns[i] > 0) { l.sums[i] = {data[i].data, TYPE_F32, added}; }
        }
        return l;
    }
};

// Runs a gradient kernel into FP32 and BF16, overwriting and adding, and checks each. allowed: the
// error in FP32.
template <typename Run>
static void check_gradient(const std::string &what, const Floats &expected, double allowed,
                           Run run) {
    Floats before = random_bf16(expected.size(), 1.0f), sum = expected, first;
    for (size_t i = 0; i < sum.size(); i++) { sum[i] += before[i]; }
    for (int variant = 0; variant < 5; variant++) { // the last one repeats the first
        GpuType type = variant / 2 == 1 ? TYPE_BF16 : TYPE_F32;
        bool added = variant % 2 == 1;
        const Floats &right = added ? sum : expected;
        Typed out(right.size(), type);
        if (added) { out.write(before); }
        run({out.data, type, added});
        Floats result = out.read();
        double error = test_relative_error(result.data(), right.data(), (int64_t)right.size());
        double most = type == TYPE_F32 ? allowed : 1.5 * bf16_rounding_error(right);
        if (!(error <= most)) {
            test_fail(__FILE__, __LINE__, "%s: error %.3g, allowed %.3g", what.c_str(), error,
                      most);
        }
        if (variant == 0) { first = result; }
        if (variant == 4) { CHECK(same_bits(result, first)); }
    }
}

// sums: what is expected; where one is empty, the sums of the output's columns, which are of the
// values rounded to BF16 unless the launcher is fused and writes none.
template <typename Run>
static void check_sums(const Producer &p, const Floats &expected, std::vector<Floats> sums,
                       Run run) {
    for (int fused = 0; fused < (p.has_codes() ? 2 : 1); fused++) {
        Quantised q(p.M, p.N, p.type, p.scale);
        Sums spare(p);
        Operand out = fused ? q.tensor(SCALE_DELAYED, true) : operand_bf16(q.bf16.data);
        Launch l = spare.launch(out, 0, p.M, 3, false);
        p.begin(out.bf16, 0, p.M);
        run(l);
        bool rounded = !fused || p.fused == FUSED_ROUNDED;
        Floats values = rounded ? get_floats(q.bf16) : expected, columns((size_t)p.N, 0.0f);
        if (fused) { check_given(q, values, rounded); }
        bias_backward(columns.data(), values.data(), p.M, p.N);
        for (int i = 0; i < 3; i++) {
            if (p.sums[i] == 0) { continue; }
            check_gradient(p.name + (fused ? ", fused: sums " : ": sums ") + std::to_string(i),
                           sums[i].empty() ? columns : sums[i], rounded ? 1e-5 : 1e-4,
                           [&](Gradient g) {
                               Launch one = l;
                               one.sums[i] = g;
                               p.begin(out.bf16, 0, p.M);
                               run(one);
                           });
        }
    }
}

// The hash of [rows,width] bytes, each row `pitch` bytes after the one before.
static inline uint64_t hash_of(const void *x, size_t pitch, size_t width, size_t rows) {
    Buffer<uint64_t> sum(1);
    CUDA_CHECK(cudaMemsetAsync(sum.data, 0, sizeof(uint64_t), gpu.stream));
    if (pitch == width) {
        width *= rows;
        rows = 1;
    }
    for (size_t row = 0; row < rows; row++) {
        gpu_hash(&gpu, sum.data, (const char *)x + row * pitch, (int64_t)width,
                 (int64_t)(row * width / 8));
    }
    return sum.get()[0];
}

// All rows, and a quarter of them at a time: the same bits in BF16 and fused to FP8, and sums that
// are 1e-4 apart at most.
enum { PARTS = 4 };
template <typename Run> static void same_in_parts(const Producer &p, Run run) {
    const size_t M = (size_t)p.M, N = (size_t)p.N, some = M / PARTS;
    Quantised whole(p.M, p.N, FP8_E4M3, 64), part((int)some, p.N, FP8_E4M3, 64);
    Sums sums(p);
    for (int fused = 0; fused < (p.has_codes() ? 2 : 1); fused++) {
        auto launch = [&](const Quantised &q, size_t first, size_t rows, bool added) {
            Operand out = fused ? q.tensor(SCALE_DELAYED, true) : operand_bf16(q.bf16.data);
            p.begin(out.bf16, first, rows);
            run(sums.launch(out, first, rows, 3, added));
        };
        Floats expected[3];
        int64_t wrong = 0;
        launch(whole, 0, M, false);
        for (int i = 0; i < 3; i++) { expected[i] = sums.data[i].get(); }
        for (size_t first = 0; first < M; first += some) {
            launch(part, first, some, first > 0);
            if (fused) {
                wrong += hash_of(part.fp8.data, N, N, some) !=
                         hash_of(whole.fp8.data + first * N, N, N, some);
                wrong += hash_of(part.fp8_t.data, some, some, N) !=
                         hash_of(whole.fp8_t.data + first, M, some, N);
            } else {
                wrong += hash_of(part.bf16.data, 2 * N, 2 * N, some) !=
                         hash_of(whole.bf16.data + first * N, 2 * N, 2 * N, some);
            }
        }
        for (int i = 0; i < 3; i++) {
            Floats added = sums.data[i].get();
            wrong += !(test_relative_error(added.data(), expected[i].data(), p.sums[i]) <= 1e-4);
        }
        if (wrong > 0) {
            test_fail(__FILE__, __LINE__, "%s%s: %lld parts or sums differ", p.name.c_str(),
                      fused ? ", fused" : "", (long long)wrong);
        }
    }
}

// Times it in BF16, and fused to FP8 by a given scale and by blocks.
template <typename Run> static void time_producer(const Producer &p, Run run) {
    static const char *const forms[] = {"", "fp8 ", "fp8 blocks "};
    if (!is_wanted(forms[1] + p.name) && !is_wanted(forms[2] + p.name)) { return; }
    Quantised q(p.M, p.N, p.type, p.scale);
    const Operand outs[] = {operand_bf16(q.bf16.data), q.tensor(SCALE_DELAYED, true),
                            q.blocks(SCALE_BLOCK_1X128, true)};
    Sums sums(p);
    for (int form = 0; form < (p.has_codes() ? 3 : 1); form++) {
        double elements = form == 0 ? p.bf16 : p.fp8;
        if (elements == 0) { continue; }
        Launch l = sums.launch(outs[form], 0, p.M, p.needed, false);
        p.begin(q.bf16.data, 0, p.M);
        timed(forms[form] + p.name, p.shape.empty() ? text("%d x %d", p.M, p.N) : p.shape,
              moved(elements), [&] { run(l); });
    }
}

// Against its FP32 definition: in BF16; and, where shape and device allow FP8, fused, by a given
// scale in two passes, measured, and by blocks; with all forms of output that can be requested.
template <typename Run>
static void check_forms(const Producer &p, const Floats &expected, Run run) {
    Quantised q(p.M, p.N, p.type, p.scale);
    Sums sums(p);
    auto launch = [&](Operand out) {
        q.bf16.poison();
        p.begin(q.bf16.data, 0, p.M);
        run(sums.launch(out, 0, p.M, p.needed, false));
    };
    launch(operand_bf16(q.bf16.data));
    Floats result = get_floats(q.bf16);
    check_against(p.name.c_str(), result, expected, p.bf16_only > 0 ? p.bf16_only : 1.05, __FILE__,
                  __LINE__);
    CHECK(Codes(q.fp8.count, 0xff) == q.fp8.get());
    if (!p.has_codes()) { return; }

    q.reset(0.0f, 1);
    launch(q.tensor(SCALE_DELAYED, true));
    const bool rounded = p.fused == FUSED_ROUNDED;
    const Floats left = rounded            ? result
                        : p.before != NULL ? p.before->host
                                           : Floats(result.size(), bf16_decode(0xffff));
    CHECK(same_bits(get_floats(q.bf16), left));
    check_given(q, rounded ? result : expected, rounded);
    float amax = q.slot.get()[0].amax;
    Codes rows = q.fp8.get(), columns = q.fp8_t.get(), untouched(rows.size(), 0xff);
    for (int forms = 1; forms < 4; forms++) { // one form alone, and both
        q.reset(0.0f, 1);
        Operand some = q.tensor(SCALE_DELAYED, true);
        if (!(forms & 1)) { some.rows.codes = NULL; }
        if (!(forms & 2)) { some.columns.codes = NULL; }
        launch(some);
        CHECK(q.fp8.get() == (forms & 1 ? rows : untouched));
        CHECK(q.fp8_t.get() == (forms & 2 ? columns : untouched));
        CHECK(same_bits(get_floats(q.bf16), left));
        CHECK_CLOSE(q.slot.get()[0].amax, amax, 0.0);
    }

    q.reset(0.0f, 1);
    launch(q.tensor(SCALE_DELAYED, false));
    CHECK(same_bits(get_floats(q.bf16), result));
    check_given(q, result, true);

    q.reset(0.0f, 0);
    launch(q.tensor(SCALE_CURRENT, false));
    CHECK(same_bits(get_floats(q.bf16), result));
    check_measured(q, result);

    for (int form = 0; form < 2; form++) {
        bool alone = form == 1;
        q.reset(0.0f, 0);
        launch(q.blocks(SCALE_BLOCK_1X128, alone));
        bool writes_bf16 = !alone || rounded;
        if (writes_bf16) { CHECK(same_bits(get_floats(q.bf16), result)); }
        check_blocks(q, result, SCALE_BLOCK_1X128, writes_bf16);
    }
}

// What the mode asks for. expected: the definition's output in FP32; sums: see check_sums.
template <typename Run>
static void producer(const Producer &p, const Floats &expected, Run run,
                     std::vector<Floats> sums = std::vector<Floats>(3)) {
    if (mode == IN_PARTS) { same_in_parts(p, run); }
    if (mode == TIMING) { time_producer(p, run); }
    if (mode != CHECKING) { return; }
    check_forms(p, expected, run);
    if (p.sums[0] + p.sums[1] + p.sums[2] > 0) { check_sums(p, expected, sums, run); }
}

// Rows that the definitions compute.
static inline int defined(int M) {
    return mode == CHECKING ? M : 0;
}

// Rows and columns of tensors of more than 2^31 elements. All sides, also those of parts, are
// multiples of 16.
enum { ROWS = PARTS * 262192, COLUMNS = 2080 };
static_assert((int64_t)ROWS * COLUMNS > (int64_t)1 << 31, "not beyond 2^31 elements");

static inline Ints random_tokens(int n, int V) {
    Ints tokens(n);
    random_key++;
    for (int i = 0; i < n; i++) { tokens[i] = (int)(rng_bits(random_key, i) % (uint64_t)V); }
    return tokens;
}

// Where the documents of sequences begin (kernels/cpu.h): some of one token, some of many.
static Ints random_starts(int B, int T) {
    Ints starts;
    random_key++;
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T;) {
            const uint64_t bits = rng_bits(random_key, starts.size());
            const int longest = bits % 3 == 0 ? 3 : T;
            const int n = std::min(T - t, 1 + (int)(bits / 3 % (uint64_t)longest));
            starts.insert(starts.end(), (size_t)n, t);
            t += n;
        }
    }
    return starts;
}

// ---- embeddings --------------------------------------------------------------------------------

// The runs of tokens on the device.
struct SortedTokens {
    Buffer<int> rows, starts, lists;
    SortedTokens(const Ints &tokens, int V)
        : rows(tokens.size()), starts(tokens.size() + 1),
          lists((size_t)embedding_runs_size((int)tokens.size())) {
        Ints counts(V + 1), host_rows(rows.count), host_starts(starts.count), host(lists.count);
        embedding_sort_tokens({host_rows.data(), host_starts.data(), host.data()}, tokens.data(),
                              (int)tokens.size(), V, counts.data());
        rows.put(host_rows.data());
        starts.put(host_starts.data());
        lists.put(host.data());
    }
    TokenRuns runs(void) const {
        return {rows.data, starts.data, lists.data};
    }
};

// documents: positions count from their beginnings.
static void embedding(int B, int T, int C, int V, bool positions, bool documents) {
    const int M = B * T;
    const size_t n = (size_t)M * C;
    if (left_out((int64_t)V * C)) { return; }
    Ints tokens = random_tokens(M, V), starts = random_starts(B, T), token_positions(M);
    for (int i = 0; i < M; i++) { token_positions[i] = i % T - starts[i]; }
    Buffer<int> device_tokens(M), device_starts(M);
    device_tokens.put(tokens.data());
    device_starts.put(starts.data());
    const int *host_starts = documents ? starts.data() : NULL;
    Input wte((size_t)V * C, 1), wpe((size_t)T * C, 1), dout(n, 1);
    Floats out((size_t)defined(M) * C);
    embedding_forward(out.data(), tokens.data(), host_starts, wte.host.data(),
                      positions ? wpe.host.data() : NULL, defined(B), T, C);
    // without positions rows are copied: nothing is rounded, and no error is allowed
    producer({"embedding", FUSED_ROUNDED, M, C, FP8_E4M3, 0, NULL, 2.0 * n, 0, "", 1.01}, out,
             [&](const Launch &l) {
                 gpu_embedding_forward(&gpu, l.out.bf16, device_tokens.data + l.first,
                                       documents ? device_starts.data + l.first : NULL,
                                       wte.device.data, positions ? wpe.device.data : NULL,
                                       l.rows / T, T, C);
             });
    if (mode == IN_PARTS) { return; }

    Buffer<int> device_positions(M);
    device_positions.put(token_positions.data());
    SortedTokens by_token(tokens, V), by_position(token_positions, T);
    FloatBuffer sums((size_t)V * C), position_sums((size_t)T * C);
    CUDA_CHECK(cudaMemsetAsync(sums.data, 0, sums.count * sizeof(float), gpu.stream));
    auto backward = [&] {
        gpu_embedding_backward(&gpu, {sums.data, TYPE_F32, true}, dout.device.data,
                               device_tokens.data, by_token.runs(), M, C);
    };
    auto positions_backward = [&](Gradient g) {
        if (documents) {
            if (!g.accumulate) {
                size_t bytes = (size_t)T * C * gpu_type_bytes(g.type);
                CUDA_CHECK(cudaMemsetAsync(g.data, 0, bytes, gpu.stream));
            }
            gpu_embedding_backward(&gpu, g, dout.device.data, device_positions.data,
                                   by_position.runs(), M, C);
        } else {
            gpu_position_backward(&gpu, g, dout.device.data, B, T, C);
        }
    };
    if (mode == TIMING) {
        std::string shape = text("%d x %d", M, C);
        timed("embedding backward", shape, moved(n + 4.0 * std::min(M, V) * C), backward);
        timed("positions backward", shape, moved(n + 2.0 * T * C), [&] {
            positions_backward({position_sums.data, TYPE_F32, false});
        });
        return;
    }
    Floats dwte((size_t)V * C, 0.0f), dwpe((size_t)T * C, 0.0f);
    embedding_backward(dwte.data(), dwpe.data(), dout.host.data(), tokens.data(), host_starts, B, T,
                       C);
    check_gradient("positions", dwpe, 1e-5, positions_backward);
    backward();
    CHECK_ERROR(sums.get().data(), dwte.data(), (int64_t)dwte.size(), 1e-6);
}

ROW(embeddings) { // B, T, C, V, whether there are positions, and documents
    static const int checked[][6] = {
        {1, 1, 8, 2, 1, 0},       {3, 17, 48, 257, 1, 0}, {2, 100, 1600, 13, 1, 0},
        {4, 33, 264, 5000, 0, 0}, {8, 33, 840, 6, 1, 0}, // long runs
        {64, 3, 40, 7, 0, 0},     {3, 17, 48, 257, 1, 1}, {20, 100, 264, 13, 1, 1}};
    row(embedding, CHECKING, checked);
    row(embedding, TIMING,
        {{64, 1024, 768, 50257, 1, 0},
         {64, 1024, 768, 50257, 1, 1},
         {8, 2048, 4096, 128256, 0, 0}});
    row(embedding, IN_PARTS,
        {{ROWS / 16, 16, COLUMNS, 2000, 1, 0}, {ROWS / 16, 16, COLUMNS, 2000, 1, 1}});
}

// ---- norms -------------------------------------------------------------------------------------

// Weights are positive and dout follows x: where the rows are far from zero (centre), values that a
// thread computes beyond a row would be far larger than those in it.
static void norm(int M, int C, bool layernorm, float centre) {
    const float eps = 1e-5f;
    const size_t n = (size_t)M * C;
    const std::string name = layernorm ? "layernorm" : "rmsnorm";
    if (left_out((int64_t)n) || misleads_racecheck(M, C)) { return; }
    Input x(n, 2), w(C, 1), b(C, 1), dout(n, 1), residual(n, 1);
    if (mode == CHECKING) {
        for (float &value : w.host) { value = fabsf(value); }
        for (size_t i = 0; i < n; i++) {
            dout.host[i] += x.host[i];
            x.host[i] += centre;
        }
        round_to_bf16(x.host.data(), x.host.data(), (int64_t)n);
        round_to_bf16(dout.host.data(), dout.host.data(), (int64_t)n);
        put_floats(w.device, w.host);
        put_floats(x.device, x.host);
        put_floats(dout.device, dout.host);
    }
    FloatBuffer mean(M), rstd(M);
    Floats means(M, 0.0f), deviations(M, 1.0f), y((size_t)defined(M) * C),
        dx = residual.host, dw(C, 0.0f), db(layernorm ? C : 0, 0.0f);
    cpu_norm_forward(y.data(), means.data(), deviations.data(), x.host.data(), w.host.data(),
                     layernorm ? b.host.data() : NULL, defined(M), C, eps);
    producer({name + " forward", FUSED_UNROUNDED, M, C, FP8_E4M3, 60.0f, NULL, 2.0 * n, 2.0 * n}, y,
             [&](const Launch &l) {
                 if (mode == CHECKING) {
                     mean.poison();
                     rstd.poison();
                 }
                 gpu_norm_forward(&gpu, l.out,
                                  {mean.data + l.first, rstd.data + l.first,
                                   x.device.data + l.first * C, w.device.data,
                                   layernorm ? b.device.data : NULL, eps, l.rows, C});
                 if (mode != CHECKING) { return; }
                 if (layernorm) { CHECK_ERROR(mean.get().data(), means.data(), M, 1e-5); }
                 CHECK_ERROR(rstd.get().data(), deviations.data(), M, 1e-5);
             });

    SumScratch scratch(M, 3 * C);
    if (mode == CHECKING) {
        mean.put(means.data());
        rstd.put(deviations.data());
    }
    cpu_norm_backward(dx.data(), dw.data(), layernorm ? db.data() : NULL, dout.host.data(),
                      x.host.data(), w.host.data(), means.data(), deviations.data(), defined(M), C);
    int needed = mode == TIMING && layernorm ? 3 : 2; // where norms have biases, so have layers
    const Columns sums = {C, layernorm ? C : 0, C};
    producer({name + " backward", FUSED_ROUNDED, M, C, FP8_E5M2, 60.0f, &residual, 4.0 * n, 5.0 * n,
              "", 0, sums, needed},
             dx,
             [&](const Launch &l) {
                 gpu_norm_backward(&gpu, l.out,
                                   {l.sums[0], l.sums[1], l.sums[2], dout.device.data + l.first * C,
                                    x.device.data + l.first * C, w.device.data,
                                    layernorm ? mean.data + l.first : NULL, rstd.data + l.first,
                                    scratch.scratch(), l.rows, C});
             },
             {dw, db, {}});
}

// kinds: 1 LayerNorm, 2 RMSNorm, 3 both. centre 0: a half
static void norms(int M, int C, int kinds, float centre) {
    if (centre == 0.0f) { centre = 0.5f; }
    if (kinds & 1) { norm(M, C, true, centre); }
    if (kinds & 2) { norm(M, C, false, centre); }
}

ROW(all_norms) { // M, C, kinds, centre
    static const int checked[][4] = {
        {1, 8, 3},         {17, 48, 3},    {16, 16, 3},   {80, 208, 3},
        {1000, 768, 3},    {1008, 768, 3}, {65, 1600, 3}, {96, 1600, 3},
        {1008, 1600, 3},   {33, 2048, 3},  {64, 2048, 3}, {48, 4096, 3},
        {19, 5128, 3},     {32, 5120, 3},  {32, 8192, 3}, {9, 8192, 3},
        {96, 1600, 3, 64}, {256, 768, 3},  {256, 776, 3}, {192, 1360, 3} // the last 3: even groups
    };
    static const int timed[][4] = {
        {65536, 768, 1}, {32768, 1600, 1}, {32768, 2048, 2}, {16384, 4096, 2}};
    row(norms, CHECKING, checked);
    // as on devices whose blocks have less shared memory than Hopper's: with fewer groups, or none
    for (const char *kib : {"164", "99", "72"}) {
        setenv("LLM8_TEST_SHARED_KIB", kib, 1);
        row(norms, CHECKING, {{256, 768, 3}, {96, 1600, 3}, {48, 2048, 3}, {32, 4096, 3}});
        unsetenv("LLM8_TEST_SHARED_KIB");
    }
    row(norms, TIMING, timed);
    row(norms, IN_PARTS, {{ROWS, COLUMNS, 3, 0}});
}

// ---- RoPE --------------------------------------------------------------------------------------

// norm: heads are also normalised. The bias gradient is the column sums of the resulting gradient.
static void rope(int B, int T, int H, int G, int D, bool norm) {
    const int M = B * T, N = (H + 2 * G) * D, some = defined(M);
    const size_t n = (size_t)M * N, rotated = (size_t)M * (H + G) * D;
    const float eps = 1e-2f;
    const std::string shape = text("%d x %d, H%d/%d D%d", M, N, H, G, D),
                      name = norm ? "rope and QK norm" : "rope";
    Input qkv(n, 1), d(n, 1), query(D, 1), key(D, 1);
    Floats table((size_t)T * D), y = qkv.host, dx = d.host, rstd((size_t)some * (H + G)),
                                 dquery(norm ? D : 0, 0.0f), dkey(dquery);
    FloatBuffer angles(table.size());
    SumScratch scratch(M, N);
    Rope rope = {10000.0};
    rope_table(table.data(), T, D, &rope);
    angles.put(table.data());
    if (norm) {
        qk_norm_forward(y.data(), rstd.data(), qkv.host.data(), query.host.data(), key.host.data(),
                        some, H, G, D, eps);
    }
    rope_apply(y.data(), table.data(), defined(B), T, H, G, D, false);
    rope_apply(dx.data(), table.data(), defined(B), T, H, G, D, true);
    if (norm) {
        qk_norm_backward(dx.data(), dquery.data(), dkey.data(), qkv.host.data(), query.host.data(),
                         key.host.data(), rstd.data(), some, H, G, D);
    }
    const Bf16 *query_weight = norm ? query.device.data : NULL,
               *key_weight = norm ? key.device.data : NULL;
    auto rotary = [&](const Launch &l) {
        return Rotary{angles.data, query_weight, key_weight, eps, l.rows / T, T, H, G, D};
    };
    Floats results[2];
    for (int apart = 0; apart < (norm ? 2 : 1); apart++) { // 0: in place
        double moves = apart ? 2.0 * n : norm ? 0.0 : 2.0 * rotated;
        producer(
            {name, FUSED_ROUNDED, M, N, FP8_E4M3, 0, apart ? NULL : &qkv, moves, 0, shape, 1.02}, y,
            [&](const Launch &l) {
                const Bf16 *from = apart ? qkv.device.data + l.first * N : l.out.bf16;
                gpu_rope_forward(&gpu, l.out.bf16, from, rotary(l));
                if (mode == CHECKING) { results[apart] = fetch_floats(l.out.bf16, n); }
            });
    }
    CHECK(!norm || same_bits(results[0], results[1]));
    CHECK(mode != CHECKING || same_bits(get_floats(qkv.device), qkv.host));

    Fused fused = D % 16 == 0 && !norm ? FUSED_UNROUNDED : FUSED_ROUNDED;
    double moves = (norm ? 3.0 : 2.0) * rotated, moves_fp8 = 2.0 * n + (norm ? moves : 0.0);
    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        if (type == FP8_E4M3 && mode != CHECKING) { continue; }
        const Columns sums = {(int)dquery.size(), (int)dkey.size(),
                              type == FP8_E5M2 && N % 8 == 0 ? N : 0};
        producer({name + " backward", fused, M, N, type, 100.0f, &d, moves, moves_fp8, shape, 0,
                  sums, 2},
                 dx,
                 [&](const Launch &l) {
                     const Bf16 *x = norm ? qkv.device.data + l.first * N : NULL;
                     gpu_rope_backward(
                         &gpu, l.out,
                         {rotary(l), x, l.sums[0], l.sums[1], l.sums[2], scratch.scratch()});
                 },
                 {dquery, dkey, {}});
    }
}

static void ropes(int B, int T, int H, int G, int D) {
    rope(B, T, H, G, D, false);
    rope(B, T, H, G, D, true);
}

ROW(all_ropes) { // B, T, H, G, D
    for (int D : {16, 18, 24, 40, 64, 72, 80, 96, 100, 128, 256}) {
        row(ropes, CHECKING, {{2, 24, 4, 2, D}, {1, 17, 3, 1, D}});
    }
    row(ropes, CHECKING,
        {{1, 1, 1, 1, 16}, {1, 5, 1, 1, 2}, {2, 17, 25, 5, 64}, {1, 640, 16, 8, 48}});
    row(ropes, CHECKING, {{4, 300, 6, 6, 128}}); // a thread takes several rows
    row(ropes, TIMING, {{16, 2048, 16, 4, 128}, {16, 2048, 16, 8, 128}, {32, 1024, 14, 2, 64}});
    row(ropes, IN_PARTS, {{ROWS / 16, 16, 127, 1, 16}});
}

// ---- activations -------------------------------------------------------------------------------

// In FP8 GELU adds the bias, in BF16 the matmul before it does (train/gpu/linear.h): so they are
// timed.
static void gelu(int M, int F, Fp8Type type, bool biased) {
    const size_t n = (size_t)M * F;
    Input x(n, 2), b(F, 1), dout(n, 1);
    const Bf16 *bias = biased ? b.device.data : NULL;
    const double bf16 = biased ? 0.0 : (double)n, fp8 = n - bf16;
    SumScratch scratch(M, F);
    Floats sum = x.host, y(x.host.size()), dx(x.host.size());
    for (size_t i = 0; biased && i < sum.size(); i++) { sum[i] += b.host[i % F]; }
    gelu_forward(y.data(), sum.data(), (int64_t)defined(M) * F);
    gelu_backward(dx.data(), dout.host.data(), sum.data(), (int64_t)defined(M) * F);
    producer({"gelu forward", FUSED_UNROUNDED, M, F, FP8_E4M3, 50.0f, NULL, 2 * bf16, 2 * fp8}, y,
             [&](const Launch &l) {
                 gpu_gelu_forward(&gpu, l.out, x.device.data + l.first * F, bias, l.rows, F);
             });
    const Columns sums = {F};
    producer({"gelu backward", FUSED_UNROUNDED, M, F, type, 50.0f, &dout, 3 * bf16, 3 * fp8, "", 0,
              sums, 1},
             dx,
             [&](const Launch &l) { // in place of dout
                 gpu_gelu_backward(&gpu, l.out, l.sums[0], l.out.bf16, x.device.data + l.first * F,
                                   bias, scratch.scratch(), l.rows, F);
             });
}

static void swiglu(int M, int F, Fp8Type type) {
    const size_t n = (size_t)M * F;
    const std::string shape = text("%d x %d", M, F);
    Input x(2 * n, 2), dout(n, 1);
    Floats y((size_t)defined(M) * F), dx(2 * y.size());
    swiglu_forward(y.data(), x.host.data(), defined(M), F);
    swiglu_backward(dx.data(), dout.host.data(), x.host.data(), defined(M), F);
    producer({"swiglu forward", FUSED_UNROUNDED, M, F, FP8_E4M3, 50.0f, NULL, 3.0 * n, 3.0 * n}, y,
             [&](const Launch &l) {
                 gpu_swiglu_forward(&gpu, l.out, x.device.data + l.first * 2 * F, l.rows, F);
             });
    producer(
        {"swiglu backward", FUSED_UNROUNDED, M, 2 * F, type, 20.0f, &x, 5.0 * n, 5.0 * n, shape},
        dx, [&](const Launch &l) { // in place of x
            gpu_swiglu_backward(&gpu, l.out, dout.device.data + l.first * F, l.out.bf16, l.rows, F);
        });
}

// kinds: 1 GELU, 2 GELU with a bias, 4 SwiGLU, or their sum
static void activations(int M, int F, Fp8Type type, int kinds) {
    if (left_out((int64_t)M * F)) { return; }
    if (kinds & 1) { gelu(M, F, type, false); }
    if (kinds & 2) { gelu(M, F, type, true); }
    if (kinds & 4) { swiglu(M, F, type); }
}

ROW(all_activations) { // M, F, type, kinds
    static const int checked[][4] = {{1, 8, FP8_E5M2, 7},       {17, 200, FP8_E5M2, 7},
                                     {16, 16, FP8_E4M3, 7},     {144, 208, FP8_E5M2, 7},
                                     {1000, 3072, FP8_E5M2, 7}, {512, 3072, FP8_E4M3, 7},
                                     {5000, 264, FP8_E5M2, 7}};
    static const int timed[][4] = {{65536, 3072, FP8_E4M3, 3},
                                   {32768, 6400, FP8_E4M3, 3},
                                   {32768, 5504, FP8_E4M3, 4},
                                   {16384, 14336, FP8_E4M3, 4}};
    row(activations, CHECKING, checked);
    row(activations, TIMING, timed);
    row(activations, IN_PARTS, {{ROWS, COLUMNS, FP8_E4M3, 1}, {ROWS, COLUMNS / 2, FP8_E4M3, 4}});
}

// ---- loss --------------------------------------------------------------------------------------

// A loss is the log-sum-exp less the target's logit, and its error is relative to these two: near 0
// a loss keeps few of their bits. With a cap, both are as exact as the device's exp and division,
// to 1.5 2^-22 of the cap (device.cuh).
static inline void check_losses(const Floats &actual, const Floats &expected, const Floats &logits,
                                const Ints &targets, int P, float softcap, double allowed) {
    for (size_t i = 0; i < targets.size(); i++) {
        double logit = targets[i] < 0 ? 0.0 : logits[i * P + targets[i]];
        if (softcap > 0.0f) { logit = softcap * tanh(logit / softcap); }
        double size = fmax(1.0, fmax(fabs(logit), fabs(expected[i] + logit)));
        double most = targets[i] < 0 ? 0.0 : allowed * size + 3 * softcap * 0x1p-22;
        CHECK_CLOSE(actual[i], expected[i], most);
    }
}

static const struct {
    const char *name;
    float z_loss, softcap;
} loss_kinds[] = {{"cross-entropy", 0, 0},
                  {"cross-entropy, z-loss", 1e-4f, 0},
                  {"cross-entropy, capped", 1e-4f, 30},
                  {"cross-entropy", 1e-2f, 0},
                  {"cross-entropy", 0, 4},
                  {"cross-entropy", 3e-2f, 2.5f}};

static void loss(int M, int V, int P, Fp8Type type, int kind) {
    const float z_loss = loss_kinds[kind].z_loss, softcap = loss_kinds[kind].softcap;
    // the gradient's largest magnitude
    const float factor = 0.25f, most = factor * (1 + 2 * z_loss * 30);
    const LossTerms reported = {0.0f, z_loss, softcap}, terms = {factor, z_loss, softcap};
    if (left_out((int64_t)M * P)) { return; }
    Input logits((size_t)M * P, 3);
    Ints host_targets = random_tokens(M, V);
    for (int i = 0; i < M; i += 5) { host_targets[i] = i % 2 ? -1 : V - 1; }
    if (M > 2) { host_targets[2] = -1; }
    if (mode == CHECKING) {
        float largest = *std::max_element(logits.host.begin(), logits.host.begin() + V);
        // M 1: the model is nearly certain, a loss near 0
        if (M == 1) { logits.host[host_targets[0]] = bf16_decode(bf16_encode(largest + 4)); }
        // values in the vocabulary's padding do not matter, nor do those of rows that are left out
        for (int i = 0; i < M * P; i++) {
            if (i % P >= V || host_targets[i / P] < 0) { logits.host[i] = i % 2 ? NAN : 0x1p100f; }
        }
        put_floats(logits.device, logits.host);
    }
    Buffer<int> targets(M);
    targets.put(host_targets.data());
    FloatBuffer losses(M), scratch(loss_scratch_floats(M));
    const Scratch rows = {scratch.data, scratch.count * sizeof(float)};
    Floats expected(M), gradient = logits.host, whole;
    cross_entropy(expected.data(), gradient.data(), host_targets.data(), defined(M), V, P, terms);
    auto right = [&] {
        check_losses(losses.get(), expected, logits.host, host_targets, P, softcap, 2e-6);
    };
    if (mode == CHECKING) {
        gpu_cross_entropy(&gpu, losses.data, operand_bf16(logits.device.data), {}, {}, targets.data,
                          M, V, P, reported);
        CHECK(same_bits(get_floats(logits.device), logits.host));
        right();
    }
    producer({loss_kinds[kind].name, FUSED_UNROUNDED, M, P, type, fp8_max(type) / most, &logits,
              2.0 * M * P, 2.0 * M * P},
             gradient, [&](const Launch &l) {
                 if (l.out.scaling == SCALE_CURRENT) { // the head's gradient has a fixed scale
                     gpu_cross_entropy(&gpu, losses.data, operand_bf16(l.out.bf16), {}, {},
                                       targets.data, M, V, P, terms);
                     gpu_quantize(&gpu, l.out, {}, {}, M, P);
                     return;
                 }
                 if (mode == IN_PARTS && l.first == 0 && l.rows < M) { whole = losses.get(); }
                 if (mode != TIMING && l.first == 0) {
                     losses.poison();
                     scratch.poison();
                 }
                 gpu_cross_entropy(&gpu, losses.data + l.first, l.out, rows, {},
                                   targets.data + l.first, l.rows, V, P, terms);
                 if (mode == CHECKING) { right(); }
                 if (mode == IN_PARTS && l.rows < M && (int)l.first + l.rows == M) {
                     CHECK(same_bits(losses.get(), whole));
                 }
             });
    if (mode != CHECKING) { return; }
    Buffer<double> sum(1);
    double total = 0;
    gpu_sum_losses(&gpu, sum.data, losses.data, M, false);
    gpu_sum_losses(&gpu, sum.data, losses.data, M, true);
    for (float l : losses.get()) { total += 2.0 * l; }
    CHECK_CLOSE(sum.get()[0], total, 1e-9 * fabs(total));
}

ROW(losses) { // M, V, P, type, kind
    for (int kind : {0, 2, 3, 4, 5}) {
        const int checked[][5] = {{1, 5, 8, FP8_E5M2, kind},
                                  {33, 257, 264, FP8_E5M2, kind},
                                  {16, 16, 16, FP8_E4M3, kind},
                                  {48, 301, 304, FP8_E5M2, kind},
                                  {128, 5003, 5008, kind == 0 ? FP8_E5M2 : FP8_E4M3, kind},
                                  {20, 50257, 50304, FP8_E5M2, kind},
                                  {3, 499999, 500000, FP8_E5M2, kind}}; // too long for a cluster
        row(loss, CHECKING, checked);
    }
    row(loss, CHECKING,
        {{100, 8001, 8064, FP8_E5M2, 0},
         {5, 50257, 50304, FP8_E5M2, 0},
         {7, 128256, 128256, FP8_E5M2, 0},
         {16, 151931, 151936, FP8_E5M2, 3}, // two kernels: with a cap and without
         {16, 151931, 151936, FP8_E5M2, 5}});
    for (int kind = 0; kind < 3; kind++) {
        row(loss, TIMING,
            {{16384, 50257, 50304, FP8_E5M2, kind}, {8192, 128256, 128256, FP8_E5M2, kind}});
    }
    row(loss, IN_PARTS, {{ROWS, 2000, COLUMNS, FP8_E4M3, 0}});
}

// ---- casts -------------------------------------------------------------------------------------

static void cast(int M, int N, Fp8Type type) {
    const size_t n = (size_t)M * N;
    if (left_out((int64_t)n)) { return; }
    Input x(n, 1);
    SumScratch scratch(M, N);
    auto quantize = [&](Launch l) {
        bool sums = l.sums[0].data != NULL;
        l.out.fused = false;
        gpu_quantize(&gpu, l.out, l.sums[0], sums ? scratch.scratch() : Scratch{}, l.rows, N);
    };
    Producer p = {"cast", FUSED_ROUNDED, M, N, type, 37.3f, &x, 0, 2.0 * n};
    if (mode == TIMING) { producer(p, x.host, quantize); }
    p.name = "cast and sums"; // in BF16 sums alone
    p.bf16 = (double)n;
    p.sums[0] = N;
    p.needed = mode == TIMING; // other forms are checked below
    producer(p, x.host, quantize);
    if (mode == IN_PARTS || !p.has_codes()) { return; }

    Quantised q(M, N, type, p.scale);
    auto transpose = [&] { gpu_transpose_codes(&gpu, q.fp8_t.data, q.fp8.data, M, N); };
    timed("transpose of codes", text("%d x %d", M, N), moved(n), transpose);
    if (mode == TIMING) { return; }
    Floats expected(N, 0.0f);
    bias_backward(expected.data(), x.host.data(), M, N);
    auto check = [&](Operand t, bool added) {
        Sums sums(p);
        if (added) { sums.data[0].put(expected.data()); }
        put_floats(q.bf16, x.host);
        quantize(sums.launch(t, 0, M, 1, added));
        Floats right = expected, result = sums.data[0].get();
        for (float &sum : right) { sum *= added ? 2 : 1; }
        CHECK_ERROR(result.data(), right.data(), N, 1e-5);
    };
    Operand measured = q.tensor(SCALE_CURRENT, false);
    q.reset(0.0f, 0);
    check(measured, true);
    check_measured(q, x.host);
    Codes columns = q.fp8_t.get();
    q.fp8_t.poison();
    transpose();
    CHECK(q.fp8_t.get() == columns);
    q.reset(0.0f, 3);
    check(measured, false);
    check_measured(q, x.host);
    for (int kind = SCALE_BLOCK_1X128; kind <= SCALE_BLOCK_128X128; kind++) {
        for (int form = 1; form < 4; form++) {
            q.reset(0.0f, 0);
            Operand some = q.blocks((Scaling)kind, false);
            if (!(form & 1)) { some.rows.codes = NULL; }
            if (!(form & 2)) { some.columns.codes = NULL; }
            check(some, false);
            if (form == 3) { check_blocks(q, x.host, (Scaling)kind, true); }
            if (!(form & 1)) { CHECK(q.fp8.get() == Codes(q.fp8.count, 0xff)); }
            if (!(form & 2)) { CHECK(q.fp8_t.get() == Codes(q.fp8.count, 0xff)); }
        }
    }
}

ROW(casts) { // M, N, type
    for (int type : {FP8_E4M3, FP8_E5M2}) {
        const int checked[][3] = {{16, 16, type},  {128, 64, type},    {48, 208, type},
                                  {17, 200, type}, {1008, 1600, type}, {1000, 6144, type}};
        row(cast, CHECKING, checked);
    }
    // From 33,793 rows on there are more tiles of 128 rows than blocks of the kernels whose number
    // is limited; the scratch is exactly what partial_sums_bytes says.
    for (int M : {33792, 33808, 50000, 65552}) {
        row(cast, CHECKING, {{M, 16, FP8_E4M3}, {M, 80, FP8_E5M2}});
    }
    static const int timed[][3] = {{65536, 768},  {65536, 3072}, {32768, 1600}, {32768, 2048},
                                   {16384, 4096}, {2304, 768},   {11008, 2048}, {28672, 4096}};
    row(cast, TIMING, timed);
    row(cast, IN_PARTS, {{ROWS, COLUMNS, FP8_E4M3}});
}
