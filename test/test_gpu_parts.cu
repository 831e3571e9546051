// ZeRO-1's kernels: what ranks make of their parts of the parameters is, put together, what one
// rank makes of all, bit for bit: master weights, moments, BF16 copies, FP8 codes and their ranges.
#include "fp8_test.h"

enum { WEIGHTS = 2, RANKS_MOST = 5, FIRST = 64, COPIES = 64 * 30 };

static const int shapes[WEIGHTS][2] = {{144, 208}, {48, 272}};

// Two FP8 weights, then parameters with BF16 copies.
struct Space {
    int64_t first[WEIGHTS + 1], size;
    Space() {
        int64_t at = FIRST;
        for (int k = 0; k < WEIGHTS; k++) {
            first[k] = at;
            at += shapes[k][0] * shapes[k][1];
        }
        first[WEIGHTS] = at;
        size = at + COPIES;
    }
};

// The optimizer's arrays, of which ranks have their parts one after another, and gaps between.
struct State {
    int64_t shift, gap; // of gradients; between ranks' parts
    FloatBuffer master;
    Bf16Buffer exp_avg, exp_avg_sq, gradients, copies;
    Quantised q[WEIGHTS];
    Buffer<Fp8Weight> table;
    Fp8Weights weights;

    State(const Space &space, int64_t s, int64_t g, bool measured)
        : shift(s), gap(g), master(space.size + RANKS_MOST * gap),
          exp_avg(space.size + RANKS_MOST * gap), exp_avg_sq(space.size + RANKS_MOST * gap),
          gradients(space.size + shift),
          copies(COPIES), q{Quantised(shapes[0][0], shapes[0][1], FP8_E4M3, 90.0f),
                            Quantised(shapes[1][0], shapes[1][1], FP8_E4M3, 60.0f)},
          table(WEIGHTS), weights({table.data, WEIGHTS, 0, true}) {
        Fp8Weight rows[WEIGHTS];
        for (int k = 0; k < WEIGHTS; k++) {
            q[k].reset(0.0f, measured ? 0 : 1);
            rows[k] = {q[k].out(), NULL, space.first[k], shapes[k][0], shapes[k][1], weights.tiles};
            weights.tiles += gpu_fp8_weight_tiles(shapes[k][0], shapes[k][1]);
        }
        table.put(rows);
    }
};

// Where an element of the parameter space lies among a state's master weights and moments.
static int64_t state_place(const State &s, const std::vector<int64_t> &cuts, int64_t element) {
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
        master[state_place(s, cuts, i)] = w[i] * 1.001f; // no BF16 number
        gradients[i + s.shift] = g[i];
    }
    s.master.put(master.data());
    put_floats(s.exp_avg, zeros);
    put_floats(s.exp_avg_sq, zeros);
    put_floats(s.gradients, gradients);
}

// The segments of what lies in begin..end.
static std::vector<AdamWSegment> segments_of(const State &s, const Space &space,
                                             const std::vector<int64_t> &cuts, int64_t begin,
                                             int64_t end) {
    std::vector<AdamWSegment> list;
    int blocks = 0;
    for (int k = 0; k <= WEIGHTS; k++) {
        int64_t from = std::max(begin, space.first[k]);
        int64_t to = std::min(end, k < WEIGHTS ? space.first[k + 1] : space.size);
        if (from >= to) { continue; }
        AdamWSegment segment = {};
        segment.first = from;
        segment.n = to - from;
        segment.gradient = from + s.shift;
        segment.state = state_place(s, cuts, from);
        segment.weights = k < WEIGHTS ? NULL : s.copies.data + from - space.first[k];
        segment.weight = k;
        segment.first_block = blocks;
        blocks += gpu_adamw_blocks(segment.n);
        list.push_back(segment);
    }
    return list;
}

struct Settings {
    Buffer<uint8_t> decay;
    Buffer<StepState> state;
    InputBuffer input;
    explicit Settings(const Space &space) : decay(space.size / 64), state(1), input(0.01, 3) {
        std::vector<uint8_t> flags(space.size / 64);
        StepState s = {.gradient_scale = 0.5f, .updates = 2};
        for (size_t i = 0; i < flags.size(); i++) { flags[i] = i % 3 == 0; }
        decay.put(flags.data());
        state.put(&s);
    }
};

static AdamWUpdate update_of(const State &s, const Settings &settings) {
    AdamWUpdate u = plain_update(s.master.data, NULL, NULL, s.gradients.data, settings.decay.data);
    u.exp_avg = s.exp_avg.data;
    u.exp_avg_sq = s.exp_avg_sq.data;
    u.moment_type = TYPE_BF16; // rounded by chance, which is the element's
    u.input = settings.input.data;
    u.seed = 7;
    return u;
}

static void update_whole(State &s, const Space &space, const Settings &settings, bool measured) {
    AdamWUpdate u = update_of(s, settings);
    SegmentBuffer segments(u, {space.first[WEIGHTS]}, s.copies.data - space.first[WEIGHTS],
                           space.size);
    gpu_adamw_update(&u, settings.state.data, gpu.stream);
    gpu_adamw_update_fp8(s.weights, measured, &u, settings.state.data, gpu.stream);
    if (measured) {
        gpu_quantize_weights(s.weights, 0, true, s.master.data, settings.state.data, gpu.stream);
    }
}

static void for_ranks(State &s, const Space &space, const Settings &settings,
                      const std::vector<int64_t> &cuts,
                      void (*launch)(const AdamWUpdate *, const Fp8Weights *, PartsMode,
                                     const StepState *, cudaStream_t),
                      PartsMode mode) {
    for (size_t r = 0; r + 1 < cuts.size(); r++) {
        std::vector<AdamWSegment> list = segments_of(s, space, cuts, cuts[r], cuts[r + 1]);
        Buffer<AdamWSegment> table(list.size() + 1);
        AdamWUpdate u = update_of(s, settings);
        if (list.empty()) { continue; }
        list.push_back({});
        table.put(list.data());
        u.segments = table.data;
        u.segment_count = (int)list.size() - 1;
        const AdamWSegment &last = list[u.segment_count - 1];
        u.segment_blocks = last.first_block + gpu_adamw_blocks(last.n);
        launch(&u, &s.weights, mode, settings.state.data, gpu.stream);
    }
}

// What ranks make of a step, one after another on one device: their ranges come together in the
// one live table.
static void update_parts(State &s, const Space &space, const Settings &settings,
                         const std::vector<int64_t> &cuts, bool measured) {
    for_ranks(s, space, settings, cuts, gpu_adamw_update_parts,
              measured ? PARTS_MEASURE : PARTS_GIVEN);
    if (measured) {
        gpu_announce_scales(&s.weights, settings.state.data, gpu.stream);
        for_ranks(s, space, settings, cuts, gpu_publish_parts, PARTS_MEASURED);
    }
    gpu_transpose_weights(s.weights, 0, gpu.stream);
}

template <typename T> static bool same(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

static void compare(const State &parts, const State &whole, const Space &space,
                    const std::vector<int64_t> &cuts) {
    Floats a = parts.master.get(), b = whole.master.get();
    std::vector<Bf16> m = parts.exp_avg.get(), n = whole.exp_avg.get(), v = parts.exp_avg_sq.get(),
                      w = whole.exp_avg_sq.get();
    int64_t wrong = 0;
    for (int64_t i = FIRST; i < space.size; i++) {
        int64_t at = state_place(parts, cuts, i);
        wrong += memcmp(&a[at], &b[i], 4) != 0 || m[at] != n[i] || v[at] != w[i];
    }
    CHECK_EQUAL(wrong, 0);
    CHECK(same(parts.copies.get(), whole.copies.get()));
    for (int k = 0; k < WEIGHTS; k++) {
        CHECK(same(parts.q[k].rows.get(), whole.q[k].rows.get()));
        CHECK(same(parts.q[k].columns.get(), whole.q[k].columns.get()));
        CHECK(same(parts.q[k].live.get(), whole.q[k].live.get()));
        CHECK(same(parts.q[k].slot.get(), whole.q[k].slot.get()));
        CHECK(same(parts.q[k].counts.get(), whole.q[k].counts.get()));
    }
}

static std::vector<int64_t> cut(const Space &space, int ranks) {
    std::vector<int64_t> cuts = {0};
    for (int r = 1; r < ranks; r++) { cuts.push_back(space.size * r / ranks / 64 * 64); }
    cuts.push_back(space.size);
    return cuts;
}

static void parts_are_the_whole(void) {
    Space space;
    Settings settings(space);
    for (int measured = 0; measured < 2; measured++) {
        State whole(space, 0, 0, measured);
        std::vector<int64_t> all = cut(space, 1);
        fill(whole, space, all);
        update_whole(whole, space, settings, measured);
        for (int ranks = 1; ranks <= RANKS_MOST; ranks += 2) {
            State parts(space, 128, 192, measured);
            std::vector<int64_t> cuts = cut(space, ranks);
            fill(parts, space, cuts);
            update_parts(parts, space, settings, cuts, measured);
            compare(parts, whole, space, cuts);
        }
    }
}

// At the start of a run, copies and codes come from the master weights alone.
static void published_is_quantized(void) {
    Space space;
    Settings settings(space);
    std::vector<int64_t> cuts = cut(space, 3), all = cut(space, 1);
    State parts(space, 64, 64, true), whole(space, 0, 0, true);
    fill(parts, space, cuts);
    fill(whole, space, all);
    gpu_measure_weights(whole.weights, 0, whole.master.data, NULL, gpu.stream);
    gpu_quantize_weights(whole.weights, 0, true, whole.master.data, NULL, gpu.stream);
    gpu_to_bf16(whole.copies.data, whole.master.data + space.first[WEIGHTS], COPIES, gpu.stream);
    auto launch = [](const AdamWUpdate *u, const Fp8Weights *w, PartsMode mode, const StepState *,
                     cudaStream_t stream) { gpu_publish_parts(u, w, mode, NULL, stream); };
    for_ranks(parts, space, settings, cuts, launch, PARTS_MEASURE);
    gpu_announce_scales(&parts.weights, NULL, gpu.stream);
    for_ranks(parts, space, settings, cuts, launch, PARTS_MEASURED);
    gpu_transpose_weights(parts.weights, 0, gpu.stream);
    compare(parts, whole, space, cuts);
}

// A skipped step changes nothing: neither codes nor the scales they were made by.
static void skipped_step_changes_nothing(void) {
    Space space;
    Settings settings(space);
    StepState skipped = {.gradient_scale = 1.0f, .skipped = 1};
    settings.state.put(&skipped);
    std::vector<int64_t> cuts = cut(space, 3);
    State after(space, 64, 64, true), before(space, 64, 64, true);
    fill(after, space, cuts);
    fill(before, space, cuts);
    update_parts(after, space, settings, cuts, true);
    CHECK(same(after.master.get(), before.master.get()));
    CHECK(same(after.copies.get(), before.copies.get()));
    for (int k = 0; k < WEIGHTS; k++) {
        CHECK(same(after.q[k].rows.get(), before.q[k].rows.get()));
        CHECK(same(after.q[k].live.get(), before.q[k].live.get()));
    }
}

// A copy that has come from elsewhere is quantised as the master weights it was rounded from.
static void copies_are_quantized_alike(void) {
    const int N = 144, C = 208;
    Floats w = random_bf16((size_t)N * C, 1);
    FloatBuffer master((size_t)N * C);
    Bf16Buffer copy((size_t)N * C);
    Quantised q[2] = {Quantised(N, C, FP8_E4M3, 90.0f), Quantised(N, C, FP8_E4M3, 90.0f)};
    for (float &x : w) { x *= 1.001f; }
    master.put(w.data());
    gpu_to_bf16(copy.data, master.data, (int64_t)N * C, gpu.stream);
    for (int k = 0; k < 2; k++) {
        Buffer<Fp8Weight> table(1);
        Fp8Weight row = {q[k].out(), k == 0 ? NULL : copy.data, 0, N, C, 0};
        Fp8Weights weights = {table.data, 1, gpu_fp8_weight_tiles(N, C)};
        table.put(&row);
        q[k].reset(0.0f, 0);
        const float *from = k == 0 ? master.data : NULL;
        gpu_measure_weights(weights, 0, from, NULL, gpu.stream);
        gpu_quantize_weights(weights, 0, true, from, NULL, gpu.stream);
        CUDA_CHECK(cudaStreamSynchronize(gpu.stream));
    }
    CHECK(same(q[0].rows.get(), q[1].rows.get()));
    CHECK(same(q[0].columns.get(), q[1].columns.get()));
    CHECK(same(q[0].live.get(), q[1].live.get()));
}

int main(void) {
    if (!open_test_gpu(1 << 20)) { return 0; }
    if (gpu.capability < 90) {
        printf("  skipped: FP8 needs compute capability 9.0\n0 passed, 0 failed, 1 skipped\n");
        return 0;
    }
    RUN(parts_are_the_whole);
    RUN(published_is_quantized);
    RUN(skipped_step_changes_nothing);
    RUN(copies_are_quantized_alike);
    return test_summary();
}
