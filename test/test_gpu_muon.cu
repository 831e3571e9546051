// Muon on the GPU against kernels/cpu.h: the momentum, element by element; and all matrices of a
// model, by train/gpu/muon.c as in a run of one rank. Its steps are in BF16: the results must be as
// close to the definition as the same steps rounded to BF16 on the CPU, and close to those.
#include "../kernels/cpu.h"
#include "../train/gpu/muon.h"
#include "../train/start.h"
#include "gpu_test.h"

static const GpuType types[] = {TYPE_F32, TYPE_BF16};

static Floats rounded(const Floats &x, GpuType type) {
    return type == TYPE_BF16 ? rounded(x) : x;
}

// ---- momentum -----------------------------------------------------------------------------------

// Three segments, the middle one Muon's; gradients and momenta lie elsewhere.
static void momentum(GpuType gradient_type, GpuType moment_type, bool skipped) {
    enum { FIRST = 128, N = 64 * 1001, OTHER = 192, SHIFT = 64 };
    const size_t all = FIRST + N + OTHER;
    Floats g = random_bf16(all + SHIFT, 1), m = random_bf16(all, 0.5f), expected_g = g,
           expected_m = m;
    Typed gradients(all + SHIFT, gradient_type), momenta(all, moment_type);
    gradients.write(g);
    momenta.write(m);
    std::vector<AdamWSegment> list(3);
    const int64_t first[] = {0, FIRST, FIRST + N, (int64_t)all};
    AdamWUpdate u = plain_update(NULL);
    u.moment_type = moment_type;
    for (int i = 0; i < 3; i++) {
        list[i].first = first[i];
        set_state(list[i], u, first[i], NULL, momenta.data, NULL);
        list[i].gradient = first[i] + SHIFT;
        list[i].n = first[i + 1] - first[i];
        list[i].muon = i == 1;
    }
    Segments segments(u, list);
    Buffer<StepState> state(1);
    StepState s = {.gradient_scale = 0.5f, .skipped = skipped};
    state.put(&s);
    InputBuffer input(0.01, 3);
    u.gradients = gradients.data;
    u.gradient_type = gradient_type;
    u.muon = true;
    u.momentum = 0.95f;
    u.input = input.data;
    if (!skipped) {
        muon_momentum(&expected_g[FIRST + SHIFT], &expected_m[FIRST], N, u.momentum, 0.5f);
    }
    gpu_muon_momentum(&gpu, &u, state.data);
    Floats got_g = gradients.read(), got_m = momenta.read();
    int64_t n = (int64_t)g.size();
    if (gradient_type == TYPE_BF16) { // both round to nearest, from nearly the same values
        CHECK_ERROR(got_g.data(), rounded(expected_g, TYPE_BF16).data(), n, 1e-4);
    } else {
        CHECK_ERROR(got_g.data(), expected_g.data(), n, 1e-6);
    }
    // stochastic rounding is off by up to a whole unit, rounding to nearest by half of one
    CHECK_ERROR(got_m.data(), expected_m.data(), (int64_t)all,
                moment_type == TYPE_F32 ? 1e-6 : 2.5 * bf16_rounding_error(expected_m) + 1e-9);
    int64_t others = 0;
    for (int64_t i = 0; i < (int64_t)all; i++) {
        bool muon = i >= FIRST && i < FIRST + N && !skipped;
        others += !muon && (got_m[i] != m[i] || got_g[i + SHIFT] != g[i + SHIFT]);
    }
    CHECK_EQUAL(others, 0);
    if (skipped) { return; }
    expected_m[FIRST] += 100.0f; // the comparison sees one element
    CHECK(CAUGHT(CHECK_ERROR(got_m.data(), expected_m.data(), (int64_t)all, 1e-2)));
}

TEST(momenta) {
    for (GpuType gradient_type : types) {
        for (GpuType moment_type : types) {
            momentum(gradient_type, moment_type, false);
            momentum(gradient_type, moment_type, true);
        }
    }
}

// ---- matrices -----------------------------------------------------------------------------------

static Floats matmul(int m, int n, int k, const Floats &a, bool trans_a, const Floats &b,
                     bool trans_b, float alpha, const Floats *addend, float beta) {
    Floats out((size_t)m * n), scaled = addend != NULL ? *addend : Floats();
    for (float &x : scaled) { x *= beta; }
    cpu_gemm({.m = m,
              .n = n,
              .k = k,
              .a = a.data(),
              .b = b.data(),
              .c = out.data(),
              .addend = addend != NULL ? scaled.data() : NULL,
              .trans_a = trans_a,
              .trans_b = trans_b,
              .alpha = alpha});
    return rounded(out, TYPE_BF16);
}

// muon_orthogonalize with every matmul rounded to BF16.
static Floats steps_in_bf16(Floats x, int rows, int columns, float scale) {
    bool tall = rows > columns;
    int side = tall ? columns : rows;
    float norm = (float)sqrt(sum_of_squares(x.data(), (int64_t)x.size())) + MUON_EPSILON;
    for (float &value : x) { value /= norm; }
    x = rounded(x, TYPE_BF16);
    for (int step = 0; step < MUON_STEPS; step++) {
        float last = step + 1 < MUON_STEPS ? 1.0f : scale;
        Floats gram = matmul(side, side, tall ? rows : columns, x, tall, x, !tall, 1.0f, NULL, 0);
        Floats p = matmul(side, side, side, gram, false, gram, false, MUON_C, &gram, MUON_B);
        x = matmul(rows, columns, side, tall ? x : p, false, tall ? p : x, false, last, &x,
                   last * MUON_A);
    }
    return x;
}

// A run's matrices with their scratch, on one rank.
struct Model {
    Run run = {};
    Muon muon;
    ZeroLayout zero;
    Plan plan = {};
    Buffer<char> *memory;
    Model(std::vector<const char *> words) {
        words.insert(words.begin(), {"test", "--optimizer", "muon"});
        run.group.ranks = 1;
        bool ok = options_read(&run.options, (int)words.size(), (char **)words.data()) &&
                  options_resolve(&run.options, NULL);
        or_die(ok);
        run_configure(&run, {NUMBER_BF16, NULL, 0});
        std::vector<uint8_t> kinds((size_t)run.layout.count);
        for (int i = 0; i < run.layout.count; i++) {
            kinds[i] = run_by_muon(&run, &run.layout.params[i]) ? ZERO_MUON : 0;
        }
        zero = zero_layout(&run.layout, 1, kinds.data());
        muon_plan(&muon, &run, &zero, &plan);
        memory = new Buffer<char>((size_t)plan.bytes);
        memory->poison(); // initcheck does not see what cuBLASLt stores
        plan_assign(&plan, memory->data);
        muon_start(&muon, &gpu);
    }
    ~Model() {
        muon_free_plan(&muon);
        zero_free(&zero);
        run_free_configuration(&run);
        plan_free(&plan);
        delete memory;
    }
};

static Comm alone = {.ranks = 1};

static void matrices(Model &model, int expected, GpuType type) {
    const Muon &muon = model.muon;
    CHECK_EQUAL(muon.num_own, expected);
    Floats g = random_bf16((size_t)model.zero.size, 1e-3f), got;
    Typed gradients(g.size(), type);
    for (int repeat = 0; repeat < 2; repeat++) { // the same bits
        gradients.write(g);
        muon_orthogonalize_all(&muon, &gpu, &alone, 0, gradients.data, type);
        Floats now = gradients.read();
        CHECK(repeat == 0 || same_bits(now, got));
        got = now;
    }
    Floats left = got;
    for (int i = 0; i < muon.num_own; i++) {
        const ZeroMatrix *m = &muon.own[i];
        int64_t n = (int64_t)m->rows * m->columns;
        Floats x(g.begin() + m->sharded_offset, g.begin() + m->sharded_offset + n);
        Floats y(got.begin() + m->sharded_offset, got.begin() + m->sharded_offset + n), exact = x;
        Floats scratch((size_t)muon_scratch(m->rows, m->columns));
        float scale = muon_scale(0.2f, m->rows, m->columns);
        Floats in_bf16 = steps_in_bf16(x, m->rows, m->columns, scale);
        muon_orthogonalize(exact.data(), m->rows, m->columns, scale, scratch.data());
        double allowed = test_relative_error(in_bf16.data(), exact.data(), n);
        CHECK(allowed > 1e-3 && allowed < 0.1);
        CHECK_ERROR(y.data(), exact.data(), n, 1.1 * allowed);
        CHECK_ERROR(y.data(), in_bf16.data(), n, 1.1 * allowed);
        CHECK_CLOSE(sqrt(sum_of_squares(y.data(), n) / (double)n), // full rank: S is about 0.9
                    0.9 * 0.2 *
                        sqrt((double)(m->rows < m->columns ? m->rows : m->columns) *
                             (m->rows > m->columns ? m->rows : m->columns) / (double)n),
                    0.2 * 0.2);
        Floats other = y; // the check sees another scale, and a wrong row
        for (float &value : other) { value *= 1.1f; }
        CHECK(CAUGHT(CHECK_ERROR(other.data(), exact.data(), n, 1.1 * allowed)));
        std::copy(x.begin(), x.begin() + m->columns, y.begin());
        CHECK(CAUGHT(CHECK_ERROR(y.data(), exact.data(), n, 1.1 * allowed)));
        std::copy(x.begin(), x.end(), left.begin() + m->sharded_offset);
    }
    CHECK(same_bits(left, g)); // everything else is unchanged
}

static std::vector<const char *> small(const char *arch, const char *groups, const char *ffn) {
    return {"--arch",       arch, "--num-query-groups", groups, "--ffn-hidden-size",     ffn,
            "--num-layers", "2",  "--hidden-size",      "160",  "--num-attention-heads", "4"};
}

TEST(matrices_are_orthogonalized) {
    Model llama(small("llama", "2", "216")), gpt2(small("gpt2", "4", "640"));
    for (GpuType type : types) {
        matrices(llama, 14, type);
        matrices(gpt2, 12, type);
    }
}

// A matrix whose gradient is zero; and one with NaN, which must not spoil others.
TEST(bad_matrices_stay_alone) {
    Model model(small("gpt2", "4", "640"));
    const Muon &muon = model.muon;
    Floats g = random_bf16((size_t)model.zero.size, 1);
    const ZeroMatrix *zeros = &muon.own[0], *bad = &muon.own[muon.num_own - 1];
    std::fill_n(g.begin() + zeros->sharded_offset, zeros->rows * zeros->columns, 0.0f);
    g[(size_t)bad->sharded_offset] = NAN;
    Typed gradients(g.size(), TYPE_BF16);
    gradients.write(g);
    muon_orthogonalize_all(&muon, &gpu, &alone, 0, gradients.data, TYPE_BF16);
    Floats got = gradients.read();
    for (int i = 0; i < muon.num_own; i++) {
        const ZeroMatrix *m = &muon.own[i];
        int64_t n = (int64_t)m->rows * m->columns, wrong = 0;
        for (int64_t k = m->sharded_offset; k < m->sharded_offset + n; k++) {
            wrong += m == bad ? !isnan(got[k]) : !isfinite(got[k]) || (m == zeros && got[k] != 0);
        }
        CHECK_EQUAL(wrong, 0);
    }
}

SETUP() {
    open_test_gpu(1 << 20);
}
