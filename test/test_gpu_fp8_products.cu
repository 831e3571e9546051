// The update of the scaling state, against the one rule in fp8_format.h; and cuBLASLt's FP8
// products, also by blocks, against FP64 products of the dequantised operands.
#include "../kernels/gemm.h"
#include "gpu_test.h"

typedef std::vector<uint8_t> Codes;

// The update kernel against fp8_slot_update, slot by slot, over many steps, some with bad amaxes.
TEST(scaling_state) {
    enum { SLOTS = 6, LENGTH = 5, STEPS = 17 };
    Buffer<Fp8Slot> slots(SLOTS);
    Buffer<Fp8Live> live(SLOTS);
    FloatBuffer history(SLOTS * LENGTH), targets(SLOTS);
    Buffer<uint8_t> used(SLOTS);
    Buffer<StepState> state(1);
    std::vector<Fp8Slot> host(SLOTS, {1.0f, 1.0f, 0.0f, 0});
    Floats host_history(SLOTS * LENGTH, 0.0f), host_targets(SLOTS, 448.0f);
    const uint8_t weight = SLOT_FOLLOWS | SLOT_WEIGHT;
    uint8_t flags[SLOTS] = {SLOT_FOLLOWS, weight, SLOT_FOLLOWS, SLOT_FOLLOWS, weight, 0};
    targets.put(host_targets.data());
    history.put(host_history.data());
    used.put(flags);
    live.poison(); // of each, only the two scales are written
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < SLOTS; i++) {
            float bad[] = {0.0f, INFINITY, NAN};
            host[i].amax = (step + i) % 4 == 1 ? bad[step % 3] : 1.0f + (step * 7 + i * 3) % 11;
        }
        slots.put(host.data());
        StepState s = {};
        s.skipped = step == 6;
        state.put(&s);
        Fp8Scaling scaling = {slots.data, live.data, history.data, targets.data,
                              used.data,  SLOTS,     LENGTH};
        gpu_fp8_update(&gpu, &scaling, state.data);
        int unmeasured = 0;
        for (int i = 0; i < SLOTS; i++) {
            if (!flags[i]) { continue; }
            if (step == 6) {
                if (i % 3 != 1) { host[i].amax = 0.0f; }
            } else {
                fp8_slot_update(&host[i], &host_history[i * LENGTH], LENGTH, 448.0f);
            }
            unmeasured += host[i].count == 0;
        }
        std::vector<Fp8Slot> result = slots.get();
        std::vector<Fp8Live> now = live.get();
        CHECK(memcmp(result.data(), host.data(), SLOTS * sizeof(Fp8Slot)) == 0);
        CHECK(same_bits(history.get(), host_history));
        CHECK_EQUAL(state.get()[0].unmeasured, unmeasured);
        for (int i = 0; i < SLOTS; i++) {
            bool measured = flags[i] && host[i].count > 0;
            CHECK(measured ? now[i].scale == host[i].scale : isnan(now[i].scale));
            CHECK(measured ? now[i].scale_inv == host[i].scale_inv : isnan(now[i].scale_inv));
            CHECK(isnan(now[i].amax));
        }
    }
}

static Codes random_codes(size_t count, uint64_t key, float scale, Fp8Type type) {
    Codes x(count);
    for (size_t i = 0; i < count; i++) { x[i] = fp8_encode(scale * rng_normal(key, i), type); }
    return x;
}

// Checks the product g of the codes of A and B, in BF16 and FP32, overwriting and adding.
// roundings, error: how far each may be from the expected result.
static void check_results(Gemm g, const Codes &a, const Codes &b, const Floats &expected,
                          double roundings, double error) {
    Buffer<uint8_t> da(a.size()), db(b.size());
    Bf16Buffer d(expected.size());
    FloatBuffer wide(expected.size());
    int64_t size = (int64_t)expected.size();
    da.put(a.data());
    db.put(b.data());
    g.a = da.data;
    g.b = db.data;
    g.d = d.data;
    g.type_d = TYPE_BF16;
    g.trans_b = true;
    g.alpha = 1.0f;
    gemm(&gpu, g);
    CHECK_BF16(get_floats(d), expected, roundings);
    g.d = wide.data;
    g.type_d = TYPE_F32;
    gemm(&gpu, g);
    CHECK_ERROR(wide.get().data(), expected.data(), size, error);
    Floats twice = wide.get();
    gemm(&gpu, g);
    CHECK(same_bits(wide.get(), twice));
    for (float &x : twice) { x *= 2; }
    g.c = wide.data;
    g.beta = 1.0f;
    gemm(&gpu, g);
    CHECK_ERROR(wide.get().data(), twice.data(), size, 1e-6);
}

// One product of FP8 operands, D = A B' scaled by both inverses.
static void check_product(int m, int n, int k, Fp8Type ta, Fp8Type tb, bool fast) {
    random_key++;
    Codes a = random_codes((size_t)m * k, random_key, 50, ta);
    Codes b = random_codes((size_t)n * k, ~random_key, 30, tb);
    Fp8Live scales[2] = {{1.0f / 50, 50, 0, 0}, {1.0f / 30, 30, 0, 0}};
    Floats expected = exact_product(
        m, n, k, (double)scales[0].scale_inv * scales[1].scale_inv,
        [&](int i, int p) { return fp8_decode(a[(size_t)i * k + p], ta); },
        [&](int j, int p) { return fp8_decode(b[(size_t)j * k + p], tb); });
    Buffer<Fp8Live> live(2);
    live.put(scales);
    Gemm g = {.m = m,
              .n = n,
              .k = k,
              .type_a = gpu_fp8_type(ta),
              .type_b = gpu_fp8_type(tb),
              .scale_a = &live.data[0].scale_inv,
              .scale_b = &live.data[1].scale_inv,
              .fast_accumulation = fast};
    // Hopper's FP8 tensor cores keep some 14 bits of the sum between promotions
    check_results(g, a, b, expected, fast ? 2.0 : 1.2, fast ? 3e-3 : 5e-4);
}

// The same with block scales: A's are of vectors, B's of vectors or squares.
static void check_block_product(int m, int n, int k, Fp8Type ta, Fp8Scales scales_b) {
    random_key++;
    Codes a = random_codes((size_t)m * k, random_key, 50, ta);
    Codes b = random_codes((size_t)n * k, ~random_key, 30, FP8_E4M3);
    Floats sa(fp8_scale_count(SCALES_VECTOR, m, k), NAN), sb(fp8_scale_count(scales_b, n, k), NAN);
    for (int p = 0; p < k; p++) { // so scales differ by up to 1000
        for (int i = 0; i < m; i++) {
            sa[fp8_scale_index(SCALES_VECTOR, m, k, i, p)] = (float)exp(
                -0.1 * ((i * 7 + p / 128 * 5) % 70));
        }
        for (int j = 0; j < n; j++) {
            int row = scales_b == SCALES_SQUARE ? j / 128 : j;
            sb[fp8_scale_index(scales_b, n, k, j, p)] = (float)exp(-0.1 *
                                                                   ((row * 11 + p / 128 * 3) % 70));
        }
    }
    std::vector<double> x(a.size()), y(b.size());
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = (double)fp8_decode(a[i], ta) *
               sa[fp8_scale_index(SCALES_VECTOR, m, k, i / k, i % k)];
    }
    for (size_t i = 0; i < y.size(); i++) {
        y[i] = (double)fp8_decode(b[i], FP8_E4M3) *
               sb[fp8_scale_index(scales_b, n, k, i / k, i % k)];
    }
    Floats expected = exact_product(
        m, n, k, 1, [&](int i, int p) { return x[(size_t)i * k + p]; },
        [&](int j, int p) { return y[(size_t)j * k + p]; });
    FloatBuffer dsa(sa.size()), dsb(sb.size());
    dsa.put(sa.data());
    dsb.put(sb.data());
    Gemm g = {.m = m,
              .n = n,
              .k = k,
              .type_a = gpu_fp8_type(ta),
              .type_b = TYPE_E4M3,
              .scale_a = dsa.data,
              .scale_b = dsb.data,
              .scales_a = SCALES_VECTOR,
              .scales_b = scales_b};
    check_results(g, a, b, expected, 1.2, 5e-4);
}

LIBRARY_TEST(block_products) {
    if (gpu.capability != 90) {
        test_skip("products with block scales need compute capability 9.0");
        return;
    }
    for (int i = 0; i < 2; i++) {
        Fp8Scales scales_b = i == 0 ? SCALES_SQUARE : SCALES_VECTOR;
        check_block_product(128, 256, 384, FP8_E4M3, scales_b);
        check_block_product(208, 144, 1600, FP8_E5M2, scales_b); // incomplete blocks everywhere
        check_block_product(16, 512, 4096, FP8_E4M3, scales_b);
    }
}

LIBRARY_TEST(products) {
    if (gpu.capability < FP8_CAPABILITY) {
        test_skip("FP8 products need compute capability 8.9");
        return;
    }
    for (int fast = 0; fast < 2; fast++) {
        check_product(128, 256, 64, FP8_E4M3, FP8_E4M3, fast);
        check_product(208, 144, 1008, FP8_E5M2, FP8_E4M3, fast);
        check_product(16, 512, 4096, FP8_E4M3, FP8_E5M2, fast);
    }
}

SETUP() {
    open_test_gpu(1 << 20);
}
