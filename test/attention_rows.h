// Attention's cases, and how the kernels of our own for Hopper are checked: on a GPU
// (test_gpu_kernels.cu) and on an emulated multiprocessor (emulated/attention.cu).
#pragma once

#include "../kernels/attention.h"
#include "gpu_rows.h"

// Where documents begin. documents: their mean length, log-normal, packed one after another
// whatever the sequences' ends; -n: all are of n tokens; 1: of random lengths; TILES: many of them
// within one tile, some of exactly a tile or two.
enum { TILES = 2 };
static Ints starts_of(int documents, int B, int T) {
    if (documents == 1) { return random_starts(B, T); }
    static const int tiles[] = {64, 1, 63, 130, 3, 65, 128, 11, 200};
    const double sigma = documents >= 800 ? 1.2 : 1.0;
    Ints starts;
    uint64_t number = 0;
    for (int b = 0, left = 0; b < B; b++) {
        for (int t = 0; t < T;) {
            if (left == 0 || documents < 0) {
                const double x = exp(sigma * rng_normal(5, number++) - sigma * sigma / 2);
                left = documents < 0        ? -documents
                       : documents == TILES ? tiles[number % COUNT(tiles)]
                                            : std::max(1, (int)(documents * x));
            }
            const int n = std::min(T - t, left);
            starts.insert(starts.end(), (size_t)n, t);
            t += n;
            left -= n;
        }
    }
    return starts;
}

// Its inputs, and the results of the definition in FP32. The backward pass reads the output rounded
// to BF16, as on the device.
struct AttentionCase {
    AttentionShape s;
    size_t n, packed;
    Input qkv, dout;
    Floats out, out_bf16, lse, dqkv;
    Buffer<int> device_starts;
    double pairs; // of a query and a key that it sees

    // size: of queries, keys and values
    AttentionCase(AttentionShape shape, int documents, float size = 1)
        : s(shape), n((size_t)s.B * s.T * s.H * s.D),
          packed((size_t)s.B * s.T * (s.H + 2 * s.G) * s.D), qkv(packed, size), dout(n, 1),
          lse((size_t)s.B * s.H * s.T), device_starts(attention_documents_size(s)) {
        Ints starts;
        pairs = 0.5 * s.B * s.T * (double)s.T;
        if (documents != 0) {
            starts = starts_of(documents, s.B, s.T);
            for (size_t i = 0; i < starts.size(); i++) { pairs -= starts[i]; }
            starts.resize(device_starts.count);
            attention_share_work(&gpu, s, starts.data());
            device_starts.put(starts.data());
            s.documents = device_starts.data;
        }
        if (mode == TIMING) { return; }
        const int *given = documents != 0 ? starts.data() : NULL;
        out.resize(n);
        dqkv.resize(packed);
        attention_forward(out.data(), lse.data(), qkv.host.data(), given, s.B, s.T, s.H, s.G, s.D);
        out_bf16 = rounded(out);
        attention_backward(dqkv.data(), dout.host.data(), out_bf16.data(), lse.data(),
                           qkv.host.data(), given, s.B, s.T, s.H, s.G, s.D);
    }
};

// What a pass makes: the output and the log-sum-exp of its rows, or the gradient. own: by our
// kernel; else by the one that the trainer takes.
typedef std::pair<Floats, Floats> Passed;

static Passed run_pass(const AttentionCase &c, bool backward, bool own) {
    Bf16Buffer out(c.n), dqkv(c.packed);
    FloatBuffer lse(c.lse.size());
    const Bf16 *qkv = c.qkv.device.data;
    if (!backward) {
        (own ? attention_own_forward : attention_forward_gpu)(&gpu, c.s, out.data, lse.data, qkv);
        return {get_floats(out), lse.get()};
    }
    put_floats(out, c.out_bf16);
    lse.put(c.lse.data());
    CUDA_CHECK(cudaMemsetAsync(gpu.attention_workspace, 0xff, gpu.attention_bytes, gpu.stream));
    (own ? attention_own_backward : attention_backward_gpu)(
        &gpu, c.s, dqkv.data, c.dout.device.data, out.data, lse.data, qkv);
    return {get_floats(dqkv), Floats()};
}

// Every run has the same bits; in the last one, the trainer takes our kernel. The emulated machine
// computes exponentials and logarithms in full precision.
static void check_pass(const AttentionCase &c, bool backward, int runs) {
    const int H = c.s.H, G = c.s.G;
    const double bound = on_stand_ins() ? 1.9 : 2.0, lse_bound = on_stand_ins() ? 1e-6 : 1e-5;
    const Passed first = run_pass(c, backward, true);
    for (int run = 1; run < runs; run++) {
        const Passed again = run_pass(c, backward, run + 1 < runs || on_stand_ins());
        CHECK(same_bits(again.first, first.first) && same_bits(again.second, first.second));
    }
    auto part = [&](const Floats &all, int which) { // of the queries, the keys or the values
        Floats some;
        for (size_t i = 0; i < all.size(); i++) {
            const int head = (int)(i / (size_t)c.s.D % (size_t)(H + 2 * G));
            if ((head >= H) + (head >= H + G) == which) { some.push_back(all[i]); }
        }
        return some;
    };
    for (int i = 0; i < (backward ? 3 : 1); i++) {
        Floats some = backward ? part(first.first, i) : first.first;
        const Floats expected = backward ? part(c.dqkv, i) : c.out;
        CHECK_BF16(some, expected, bound);
        if (backward && H == G) {
            CHECK(CAUGHT(CHECK_BF16(some, part(c.dqkv, (i + 1) % 3), bound)));
        }
        some[some.size() / 2] += 64.0f; // planted: one wrong value
        CHECK(CAUGHT(CHECK_BF16(some, expected, bound)));
    }
    if (!backward) {
        CHECK_ERROR(first.second.data(), c.lse.data(), (int64_t)c.lse.size(), lse_bound);
    }
}

// Returns whether our kernels serve the shape backward, too.
static bool check_passes(const AttentionCase &c, int runs) {
    const bool backward = attention_own_serves(&gpu, c.s, true);
    check_pass(c, false, runs);
    if (backward) { check_pass(c, true, runs); }
    return backward;
}
