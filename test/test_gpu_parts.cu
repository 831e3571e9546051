// The optimizer and FP8 weights: AdamW's step and Muon's against cpu.c; the resulting weights,
// their codes, amaxes and scales, bit for bit; and the results of several ranks for their parts
// (ZeRO-1), put together, against one rank's for everything.
#include "fp8_test.h"

enum { WEIGHTS = 2, MAX_RANKS = 5, FIRST = 64, PLAIN = 64 * 30, MAX_BLOCKS = 16 };

static const Scaling modes[] = {SCALE_DELAYED, SCALE_CURRENT, SCALE_BLOCK_128X128};
static const float lr_mults[WEIGHTS + 1] = {3.0f, 0.5f, 1.0f};
static const int shapes[WEIGHTS][2] = {{144, 208}, {48, 272}};

// Two FP8 weights, then parameters whose weights are BF16.
struct Space {
    int64_t first[WEIGHTS + 1], size;
    Space() {
        int64_t at = FIRST;
        for (int k = 0; k < WEIGHTS; k++) {
            first[k] = at;
            at += shapes[k][0] * shapes[k][1];
        }
        first[WEIGHTS] = at;
        size = at + PLAIN;
    }
};

// The optimizer's arrays. The ranks' parts lie one after another, with gaps between them. A moment
// has 4 bytes or 2.
struct State {
    int64_t shift, gap; // shift of gradients; gap between ranks' parts
    FloatBuffer master;
    Typed exp_avg, exp_avg_sq;
    Bf16Buffer gradients, plain;
    Quantised q[WEIGHTS];
    Scaling mode;
    Buffer<Fp8Weight> weights;
    FloatBuffer amaxes; // amaxes of blocks of 128 x 128

    State(const Space &space, int64_t s, int64_t g, GpuType m, Scaling how)
        : shift(s), gap(g), master(space.size + MAX_RANKS * gap), exp_avg(master.count, m),
          exp_avg_sq(master.count, m), gradients(space.size + shift),
          plain(PLAIN), q{Quantised(shapes[0][0], shapes[0][1], FP8_E4M3, 90.0f),
                          Quantised(shapes[1][0], shapes[1][1], FP8_E4M3, 60.0f)},
          mode(how), weights(WEIGHTS), amaxes(WEIGHTS * MAX_BLOCKS) {
        std::vector<Fp8Weight> rows;
        for (Quantised &w : q) {
            float *own = amaxes.data + rows.size() * MAX_BLOCKS;
            w.reset(0.0f, mode == SCALE_DELAYED ? 1 : 0);
            rows.push_back(
                {w.M, w.N, w.target, w.slot.data, true, own, w.scales.data, w.scales_t.data});
        }
        weights.put(rows.data());
        CUDA_CHECK(cudaMemsetAsync(amaxes.data, 0, amaxes.count * sizeof(float), gpu.stream));
    }
};

// Where an element of the parameter space lies among a state's master weights and moments.
static int64_t state_index(const State &s, const std::vector<int64_t> &cuts, int64_t element) {
    int rank = 0;
    while (element >= cuts[rank + 1]) { rank++; }
    return element + rank * s.gap;
}

// The same values at each call.
static void fill(State &s, const Space &space, const std::vector<int64_t> &cuts) {
    random_key = 1;
    Floats w = random_bf16(space.size, 1), g = random_bf16(space.size, 2);
    Floats master(s.master.count, 0.0f), gradients(s.gradients.count, 0.0f),
        zeros(s.master.count, 0.0f);
    for (int64_t i = 0; i < space.size; i++) {
        master[state_index(s, cuts, i)] = w[i] * 1.001f; // not a BF16 number
        gradients[i + s.shift] = g[i];
    }
    s.master.put(master.data());
    s.exp_avg.write(zeros);
    s.exp_avg_sq.write(zeros);
    put_floats(s.gradients, gradients);
    s.plain.poison(); // skipped steps do not write it
}

// The segments of the elements begin..end.
static std::vector<AdamWSegment> segments_of(const State &s, const AdamWUpdate &u,
                                             const Space &space, const std::vector<int64_t> &cuts,
                                             int64_t begin, int64_t end) {
    std::vector<AdamWSegment> list;
    for (int k = 0; k <= WEIGHTS; k++) {
        int64_t from = std::max(begin, space.first[k]);
        int64_t to = std::min(end, k < WEIGHTS ? space.first[k + 1] : space.size);
        if (from >= to) { continue; }
        AdamWSegment segment = {};
        segment.first = from;
        segment.n = to - from;
        segment.gradient = from + s.shift;
        set_state(segment, u, state_index(s, cuts, from), s.master.data, s.exp_avg.data,
                  s.exp_avg_sq.data);
        if (k < WEIGHTS) {
            segment.fp8 = s.q[k].fp8.data + (from - space.first[k]);
        } else {
            segment.bf16 = s.plain.data + (from - space.first[k]);
        }
        segment.lr_mult = lr_mults[k];
        segment.weight_decay = k != 1 ? 0.1f : 0.0f;
        segment.muon = k == 0;
        segment.weight = k;
        segment.weight_offset = from - space.first[k];
        list.push_back(segment);
    }
    return list;
}

struct Settings {
    Buffer<StepState> state;
    InputBuffer input;
    Settings() : state(1), input(0.01, 3) {
        StepState s = {.gradient_scale = 0.5f, .updates = 2};
        state.put(&s);
    }
};

static AdamWUpdate update_of(const State &s, const Settings &settings) {
    AdamWUpdate u = plain_update(s.gradients.data);
    u.moment_type =
        s.exp_avg.type; // BF16 is rounded at random, by a number that belongs to the element
    u.weights = s.weights.data;
    u.weight_count = WEIGHTS;
    u.scaling = s.mode;
    u.muon = true;
    u.input = settings.input.data;
    u.seed = 7;
    return u;
}

// Makes each rank's launch, one after another on one device: their amaxes are collected in the same
// slots.
template <typename Launch>
static void for_ranks(State &s, const Space &space, const Settings &settings,
                      const std::vector<int64_t> &cuts, Launch launch) {
    for (size_t r = 0; r + 1 < cuts.size(); r++) {
        AdamWUpdate u = update_of(s, settings);
        std::vector<AdamWSegment> list = segments_of(s, u, space, cuts, cuts[r], cuts[r + 1]);
        if (list.empty()) { continue; }
        Segments segments(u, list);
        launch(&u);
        CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    }
}

static void transpose(State &s) {
    for (const Quantised &q : s.q) {
        gpu_transpose_codes(&gpu, q.fp8_t.data, q.fp8.data, q.M, q.N);
    }
}

static void update(State &s, const Space &space, const Settings &settings,
                   const std::vector<int64_t> &cuts) {
    const StepState *state = settings.state.data;
    for_ranks(s, space, settings, cuts, [&](const AdamWUpdate *u) { gpu_adamw(&gpu, u, state); });
    if (s.mode != SCALE_DELAYED) {
        AdamWUpdate whole = update_of(s, settings);
        gpu_set_weight_scales(&gpu, &whole, state);
        for_ranks(s, space, settings, cuts,
                  [&](const AdamWUpdate *u) { gpu_quantize_weights(&gpu, u, state); });
    }
    transpose(s);
}

// The weights of one rank's state, against its master weights.
static void check_weights(const State &s, const Space &space) {
    Floats master = rounded(s.master.get()); // codes are made from BF16
    auto part = [&](int64_t first, int64_t n) {
        return Floats(master.begin() + first, master.begin() + first + n);
    };
    CHECK(same_bits(get_floats(s.plain), part(space.first[WEIGHTS], PLAIN)));
    for (int k = 0; k < WEIGHTS; k++) {
        Floats values = part(space.first[k], (int64_t)s.q[k].M * s.q[k].N);
        if (s.mode == SCALE_BLOCK_128X128) {
            check_blocks(s.q[k], values, SCALE_BLOCK_128X128, true);
        } else if (s.mode == SCALE_CURRENT) {
            check_measured(s.q[k], values);
        } else {
            check_given(s.q[k], values, true);
        }
    }
}

static void compare(const State &parts, const State &whole, const Space &space,
                    const std::vector<int64_t> &cuts) {
    auto bytes = [](const State &s) {
        return std::vector<std::vector<char>>{encoded(s.master.get(), TYPE_F32), s.exp_avg.get(),
                                              s.exp_avg_sq.get()};
    };
    const std::vector<std::vector<char>> a = bytes(parts), b = bytes(whole);
    int64_t wrong = 0;
    for (int64_t i = FIRST; i < space.size; i++) {
        for (size_t k = 0; k < a.size(); k++) {
            size_t size = k == 0 ? sizeof(float) : (size_t)gpu_type_bytes(parts.exp_avg.type);
            wrong += memcmp(&a[k][(size_t)state_index(parts, cuts, i) * size],
                            &b[k][(size_t)i * size], size) != 0;
        }
    }
    CHECK_EQUAL(wrong, 0);
    CHECK(same_bits(parts.plain.get(), whole.plain.get()));
    for (int k = 0; k < WEIGHTS; k++) {
        CHECK(same_bits(parts.q[k].fp8.get(), whole.q[k].fp8.get()));
        CHECK(same_bits(parts.q[k].fp8_t.get(), whole.q[k].fp8_t.get()));
        CHECK(same_bits(parts.q[k].slot.get(), whole.q[k].slot.get()));
        CHECK(same_bits(parts.q[k].scales.get(), whole.q[k].scales.get()));
        CHECK(same_bits(parts.q[k].scales_t.get(), whole.q[k].scales_t.get()));
    }
}

static std::vector<int64_t> cut(const Space &space, int ranks) {
    std::vector<int64_t> cuts = {0};
    for (int r = 1; r < ranks; r++) { cuts.push_back(space.size * r / ranks / 64 * 64); }
    cuts.push_back(space.size);
    return cuts;
}

// One step of one rank against cpu.c.
TEST(step_is_cpus) {
    Space space;
    Settings settings;
    std::vector<int64_t> all = cut(space, 1);
    for (Scaling mode : modes) {
        State s(space, 0, 0, TYPE_F32, mode);
        AdamW a = {.beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .gradient_scale = 0.5f, .step = 2};
        fill(s, space, all);
        Floats w = s.master.get(), g = get_floats(s.gradients), m(w.size(), 0.0f), v = m;
        for (int64_t i = FIRST; i < space.size; i += 64) { // the first ones belong to no segment
            int k = i < space.first[1] ? 0 : i < space.first[2] ? 1 : 2;
            a.lr = 0.01f * lr_mults[k];
            a.weight_decay = k != 1 ? 0.1f : 0.0f;
            if (i < space.first[1]) { // Muon's: no moment changes, and the gradient is the update
                muon_update(&w[i], &g[i], 64, a.lr, a.weight_decay);
            } else {
                adamw_update(&w[i], &m[i], &v[i], &g[i], 64, a);
            }
        }
        update(s, space, settings, all);
        CHECK_ERROR(s.master.get().data(), w.data(), space.size, 1e-6);
        CHECK_ERROR(s.exp_avg.read().data(), m.data(), space.size, 1e-6);
        CHECK_ERROR(s.exp_avg_sq.read().data(), v.data(), space.size, 1e-6);
        check_weights(s, space);
    }
}

TEST(parts_are_the_whole) {
    Space space;
    Settings settings;
    for (int variant = 0; variant < 6; variant++) {
        Scaling mode = modes[variant / 2];
        GpuType moments = variant % 2 ? TYPE_F32 : TYPE_BF16;
        State whole(space, 0, 0, moments, mode);
        std::vector<int64_t> all = cut(space, 1);
        fill(whole, space, all);
        update(whole, space, settings, all);
        check_weights(whole, space);
        for (int ranks = 1; ranks <= MAX_RANKS; ranks += 2) {
            State parts(space, 128, 192, moments, mode);
            std::vector<int64_t> cuts = cut(space, ranks);
            fill(parts, space, cuts);
            update(parts, space, settings, cuts);
            compare(parts, whole, space, cuts);
        }
    }
}

// At the start of a run, BF16 weights and codes come from the master weights alone.
TEST(published_is_quantized) {
    Space space;
    Settings settings;
    std::vector<int64_t> cuts = cut(space, 3), all = cut(space, 1);
    auto publish = [&](State &s, const std::vector<int64_t> &ranks) {
        fill(s, space, ranks);
        for_ranks(s, space, settings, ranks,
                  [&](const AdamWUpdate *u) { gpu_measure_weights(&gpu, u, NULL); });
        AdamWUpdate whole = update_of(s, settings);
        gpu_set_weight_scales(&gpu, &whole, NULL);
        for_ranks(s, space, settings, ranks,
                  [&](const AdamWUpdate *u) { gpu_quantize_weights(&gpu, u, NULL); });
        transpose(s);
    };
    for (Scaling mode : {SCALE_CURRENT, SCALE_BLOCK_128X128}) {
        State parts(space, 64, 64, TYPE_F32, mode), whole(space, 0, 0, TYPE_F32, mode);
        publish(whole, all);
        check_weights(whole, space);
        publish(parts, cuts);
        compare(parts, whole, space, cuts);
        Bf16Buffer plain(PLAIN);
        gpu_to_bf16(&gpu, plain.data, whole.master.data + space.first[WEIGHTS], PLAIN);
        CHECK(same_bits(plain.get(), whole.plain.get()));
    }
}

// After a skipped step the weights are unchanged, and so must be their codes and scales: no amax
// has been measured that a scale could follow from.
TEST(skipped_step_changes_nothing) {
    Space space;
    Settings settings;
    StepState skipped = {.gradient_scale = 1.0f, .skipped = 1};
    settings.state.put(&skipped);
    std::vector<int64_t> cuts = cut(space, 3);
    for (Scaling mode : modes) {
        State after(space, 64, 64, TYPE_BF16, mode), before(space, 64, 64, TYPE_BF16, mode);
        fill(after, space, cuts);
        fill(before, space, cuts);
        update(after, space, settings, cuts);
        transpose(before);
        CHECK(same_bits(after.master.get(), before.master.get()));
        CHECK(same_bits(after.exp_avg.get(), before.exp_avg.get()));
        CHECK(same_bits(after.plain.get(), before.plain.get()));
        for (int k = 0; k < WEIGHTS; k++) {
            CHECK(same_bits(after.q[k].fp8.get(), before.q[k].fp8.get()));
            CHECK(same_bits(after.q[k].slot.get(), before.q[k].slot.get()));
        }
    }
}

SETUP() {
    open_test_gpu(1 << 20);
    if (!has_fp8()) { test_skip_all("FP8 needs compute capability 8.9"); }
}
