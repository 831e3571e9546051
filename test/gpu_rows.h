// The rows of the table of launchers whose output is an activation or its gradient: embeddings,
// norms, RoPE, activations, loss, casts to FP8. test_gpu_kernels.cu checks and times them;
// test_gpu_sizes.cu compares parts with the whole beyond 2^31 elements.
#pragma once

#include "fp8_test.h"

// ---- what a row does with a launcher -----------------------------------------------------------

// A launch on some of the tensor's rows.
struct Launch {
    Tensor out;
    Gradient sums[3];
    size_t first;
    int rows;
};

// A launcher that writes [M,N], at one shape.
struct Producer {
    std::string name;
    Fused fused;
    int M, N;
    Fp8Type type;
    float scale;         // of FP8, where it is given
    const Input *before; // what out.bf16 holds before; NULL: nothing
    double bf16, fp8;  // BF16 elements that must move (two codes are one): the floor. 0: not timed
    double bf16_only;  // it writes no FP8: the bound of CHECK_BF16; 0: it does
    int sums[3];       // columns of its sums over rows; 0: none
    int needed;        // how many of these every call requests
    std::string shape; // as printed; empty: M x N
};

// Buffers of a producer's sums over rows, in FP32.
struct Sums {
    const int *columns;
    FloatBuffer data[3];

    explicit Sums(const Producer &p)
        : columns(p.sums), data{FloatBuffer((size_t)p.sums[0]), FloatBuffer((size_t)p.sums[1]),
                                FloatBuffer((size_t)p.sums[2])} {
    }
    // The first `count` of them, overwritten or added to.
    void request(Launch &l, int count, bool added) const {
        for (int i = 0; i < count; i++) {
            if (columns[i] > 0) { l.sums[i] = {data[i].data, TYPE_F32, added}; }
        }
    }
};

// Runs a gradient kernel into FP32 and BF16, overwriting and adding, and checks each. error: the
// bound in FP32.
template <typename Run>
static void check_gradient(const std::string &what, const Floats &expected, double error, Run run) {
    size_t n = expected.size();
    Floats before = random_bf16(n, 1.0f), sum(n), first;
    for (size_t i = 0; i < n; i++) { sum[i] = before[i] + expected[i]; }
    for (GpuType type : {TYPE_F32, TYPE_BF16}) {
        Typed out(n, type);
        for (int added = 0; added < 2; added++) {
            if (added) { out.write(before); }
            run({out.data, type, added == 1});
            Floats result = out.read();
            const Floats &right = added ? sum : expected;
            double apart = test_relative_error(result.data(), right.data(), (int64_t)n);
            double allowed = type == TYPE_F32 ? error : 1.5 * bf16_rounding_error(right);
            if (!(apart <= allowed)) {
                test_fail(__FILE__, __LINE__, "%s: error %.3g, allowed %.3g", what.c_str(), apart,
                          allowed);
            }
            if (type == TYPE_F32 && !added) { first = result; }
        }
    }
    FloatBuffer again(n);
    run({again.data, TYPE_F32, false});
    CHECK(same_bits(again.get(), first));
}

// sums: the expected sums over rows; where one is empty, those of the columns of the output, which
// are of the values rounded to BF16 unless the launcher is fused and writes none.
template <typename Run>
static void check_sums(const Producer &p, const Floats &expected, std::vector<Floats> sums,
                       Run run) {
    for (int fused = 0; fused < 2; fused++) {
        if (fused && (!has_fp8() || p.M % 16 != 0 || p.N % 16 != 0)) { continue; }
        Quantised q(p.M, p.N, p.type, p.scale);
        Sums spare(p);
        Launch l = {fused ? q.tensor(SCALE_GIVEN, true) : tensor_bf16(q.bf16.data), {}, 0, p.M};
        auto launch = [&](int which, Gradient g) {
            spare.request(l, 3, false);
            if (which >= 0) { l.sums[which] = g; }
            put_floats(q.bf16, p.before->host);
            run(l);
        };
        launch(-1, {});
        bool rounded = !fused || p.fused == FUSED_ROUNDED;
        Floats values = rounded ? get_floats(q.bf16) : expected, columns((size_t)p.N, 0.0f);
        if (fused) { check_given(q, values, rounded); }
        bias_backward(columns.data(), values.data(), p.M, p.N);
        for (int i = 0; i < 3; i++) {
            if (p.sums[i] == 0) { continue; }
            check_gradient(p.name + (fused ? ": fused, sums " : ": sums ") + std::to_string(i),
                           sums[i].empty() ? columns : sums[i], rounded ? 1e-5 : 1e-4,
                           [&](Gradient g) { launch(i, g); });
        }
    }
}

// launch(tensor, sums over rows, first row, rows) on all rows, and on parts of them: the same bits
// in BF16 and fused to FP8, and sums that are 1e-4 apart at most.
struct Whole {
    enum { PARTS = 4 };
    Bf16Buffer out, part;
    Buffer<uint8_t> fp8, fp8_t, part_fp8, part_fp8_t;
    Buffer<Fp8Live> live;

    Whole(size_t n, bool codes)
        : out(n), part(n / PARTS), fp8(codes ? n : 0), fp8_t(fp8.count),
          part_fp8(fp8.count / PARTS), part_fp8_t(part_fp8.count), live(1) {
        Fp8Live scale = {1.0f / 64, 64.0f, 0.0f, 0.0f};
        live.put(&scale);
    }
};

// The hash of [rows,width] bytes, each row `pitch` bytes after the one before.
static inline uint64_t hash_of(const void *x, size_t pitch, size_t width, size_t rows) {
    Buffer<uint64_t> sum(1);
    CUDA_CHECK(cudaMemsetAsync(sum.data, 0, sizeof(uint64_t), gpu.stream));
    bool whole = pitch == width;
    for (size_t row = 0; row < (whole ? 1 : rows); row++) {
        gpu_hash(&gpu, sum.data, (const char *)x + row * pitch,
                 (int64_t)(whole ? rows * width : width), (int64_t)(row * width / 8));
    }
    return sum.get()[0];
}

static inline void check_equal_hashes(const std::string &name, uint64_t a, uint64_t b) {
    if (a != b) { test_fail(__FILE__, __LINE__, "%s: a part differs", name.c_str()); }
}

template <typename Run> static void same_in_parts(const Producer &p, Run run) {
    const size_t N = (size_t)p.N, some = (size_t)p.M / Whole::PARTS;
    Whole w((size_t)p.M * N, p.bf16_only == 0);
    for (int fused = 0; fused < (p.bf16_only > 0 ? 1 : 2); fused++) {
        std::string name = p.name + (fused ? ", fused" : "");
        Sums sums(p);
        Floats whole_sums[3];
        for (int part = -1; part < Whole::PARTS; part++) { // -1: all
            size_t first = part < 0 ? 0 : part * some, rows = part < 0 ? (size_t)p.M : some;
            Launch l = {tensor_bf16(part < 0 ? w.out.data : w.part.data), {}, first, (int)rows};
            if (fused) {
                l.out = with_forms(given_tensor(FP8_E4M3, w.live.data, NULL), l.out.bf16,
                                   part < 0 ? w.fp8.data : w.part_fp8.data,
                                   part < 0 ? w.fp8_t.data : w.part_fp8_t.data);
                l.out.record = false;
            }
            sums.request(l, 3, part > 0);
            if (p.before != NULL) {
                CUDA_CHECK(cudaMemcpyAsync(l.out.bf16, p.before->device.data + first * N,
                                           rows * N * sizeof(Bf16), cudaMemcpyDeviceToDevice,
                                           gpu.stream));
            }
            run(l);
            if (part < 0) {
                for (int i = 0; i < 3; i++) { whole_sums[i] = sums.data[i].get(); }
            } else if (fused) {
                check_equal_hashes(name, hash_of(w.fp8.data + first * N, N, N, rows),
                                   hash_of(l.out.fp8, N, N, rows));
                check_equal_hashes(name + ", transposed",
                                   hash_of(w.fp8_t.data + first, (size_t)p.M, rows, N),
                                   hash_of(l.out.fp8_t, rows, rows, N));
            } else {
                check_equal_hashes(name, hash_of(w.out.data + first * N, 2 * N, 2 * N, rows),
                                   hash_of(l.out.bf16, 2 * N, 2 * N, rows));
            }
        }
        for (int i = 0; i < 3; i++) {
            if (p.sums[i] == 0) { continue; }
            double error = test_relative_error(sums.data[i].get().data(), whole_sums[i].data(),
                                               p.sums[i]);
            printf("  measured: %s: sums %.3g of 1e-4 apart\n", name.c_str(), error);
            CHECK(error <= 1e-4);
        }
    }
}

// Times it in BF16, and fused to FP8 by a given scale and by blocks.
template <typename Run> static void time_producer(const Producer &p, Run run) {
    static const char *const forms[] = {"", "fp8 ", "fp8 blocks "};
    if (!is_wanted(forms[1] + p.name) && !is_wanted(forms[2] + p.name)) { return; }
    Quantised q(p.M, p.N, p.type, p.scale);
    Sums sums(p);
    for (int form = 0; form < 3; form++) {
        double elements = form == 0 ? p.bf16 : p.fp8;
        if (elements == 0 || (form > 0 && !has_fp8())) { continue; }
        Launch l = {form == 0   ? tensor_bf16(q.bf16.data)
                    : form == 1 ? q.tensor(SCALE_GIVEN, true)
                                : q.blocks(SCALES_VECTOR, true),
                    {},
                    0,
                    p.M};
        sums.request(l, p.needed, false);
        if (p.before != NULL) {
            CUDA_CHECK(cudaMemcpyAsync(q.bf16.data, p.before->device.data,
                                       q.bf16.count * sizeof(Bf16), cudaMemcpyDeviceToDevice,
                                       gpu.stream));
        }
        timed(forms[form] + p.name, p.shape.empty() ? text("%d x %d", p.M, p.N) : p.shape,
              moved(elements), [&] { run(l); });
    }
}

// define(sums): the definition's output in FP32; it may set the expected sums over rows
// (check_sums).
template <typename Define, typename Run>
static void producer(const Producer &p, Define define, Run run) {
    std::vector<Floats> sums(3);
    if (mode == IN_PARTS) { same_in_parts(p, run); }
    if (mode == TIMING) { time_producer(p, run); }
    if (mode != CHECKING) { return; }
    Floats expected = define(sums);
    Sums spare(p);
    auto launch = [&](Tensor out) {
        Launch l = {out, {}, 0, p.M};
        spare.request(l, p.needed, false);
        run(l);
    };
    if (p.bf16_only > 0) {
        Bf16Buffer out(expected.size());
        if (p.before != NULL) { put_floats(out, p.before->host); }
        launch(tensor_bf16(out.data));
        check_against(p.name.c_str(), get_floats(out), expected, p.bf16_only, __FILE__, __LINE__);
        return;
    }
    check_producer(p.fused, p.M, p.N, p.type, p.scale, p.before != NULL ? &p.before->host : NULL,
                   expected, launch);
    if (p.sums[0] + p.sums[1] + p.sums[2] > 0) { check_sums(p, expected, sums, run); }
}

// Rows and columns of tensors of more than 2^31 elements. All sides, also those of parts, are
// multiples of 16.
enum { ROWS = Whole::PARTS * 262192, COLUMNS = 2080 };
static_assert((int64_t)ROWS * COLUMNS > (int64_t)1 << 31, "not beyond 2^31 elements");

static inline Ints random_tokens(int n, int V) {
    Ints tokens(n);
    random_key++;
    for (int i = 0; i < n; i++) { tokens[i] = (int)(rng_bits(random_key, i) % (uint64_t)V); }
    return tokens;
}

// ---- embeddings --------------------------------------------------------------------------------

static void embedding(int B, int T, int C, int V, bool positions) {
    const int M = B * T;
    const size_t n = (size_t)M * C;
    if (left_out((int64_t)V * C)) { return; }
    Ints tokens = random_tokens(M, V);
    Buffer<int> device_tokens(M);
    device_tokens.put(tokens.data());
    Input wte((size_t)V * C, 1), wpe((size_t)T * C, 1);
    Producer p = {"embedding", FUSED_UNROUNDED, M, C};
    p.bf16 = 2.0 * n;
    p.bf16_only = 1.01; // without positions rows are copied: no rounding, and none is allowed
    producer(
        p,
        [&](std::vector<Floats> &) {
            Floats expected(n);
            embedding_forward(expected.data(), tokens.data(), wte.host.data(),
                              positions ? wpe.host.data() : NULL, B, T, C);
            return expected;
        },
        [&](const Launch &l) {
            gpu_embedding_forward(&gpu, l.out.bf16, device_tokens.data + l.first, wte.device.data,
                                  positions ? wpe.device.data : NULL, l.rows / T, T, C);
        });
    if (mode == IN_PARTS) { return; }

    Input dout(n, 1);
    Buffer<int> rows(M), starts(M + 1), runs(embedding_runs_size(M));
    Ints counts(V + 1), host_rows(M), host_starts(M + 1), host_runs(embedding_runs_size(M));
    embedding_sort_tokens(tokens.data(), M, V, counts.data(), host_rows.data(), host_starts.data(),
                          host_runs.data());
    rows.put(host_rows.data());
    starts.put(host_starts.data());
    runs.put(host_runs.data());
    FloatBuffer sums((size_t)V * C), position_sums((size_t)T * C);
    CUDA_CHECK(cudaMemsetAsync(sums.data, 0, sums.count * sizeof(float), gpu.stream));
    auto backward = [&] {
        gpu_embedding_backward(&gpu, {sums.data, TYPE_F32, true}, dout.device.data,
                               device_tokens.data, rows.data, starts.data, runs.data, M, C);
    };
    auto position_backward = [&](Gradient g) {
        gpu_position_backward(&gpu, g, dout.device.data, B, T, C);
    };
    if (mode == TIMING) {
        std::string shape = text("%d x %d", M, C);
        timed("embedding backward", shape, moved(n + 4.0 * std::min(M, V) * C), backward);
        timed("positions backward", shape, moved(n + 2.0 * T * C), [&] {
            position_backward({position_sums.data, TYPE_F32, false});
        });
        return;
    }
    Floats dwte((size_t)V * C, 0.0f), dwpe((size_t)T * C, 0.0f);
    embedding_backward(dwte.data(), dwpe.data(), dout.host.data(), tokens.data(), B, T, C);
    check_gradient("positions", dwpe, 1e-5, position_backward);
    backward();
    CHECK_ERROR(sums.get().data(), dwte.data(), (int64_t)dwte.size(), 1e-6);
}

ROW(embeddings) {
    row(embedding,
        {{1, 1, 8, 2, true},
         {3, 17, 48, 257, true},
         {2, 100, 1600, 13, true},
         {4, 33, 264, 5000, false},
         {8, 33, 840, 6, true}, // long runs
         {64, 3, 40, 7, false}},
        {{64, 1024, 768, 50257, true}, {8, 2048, 4096, 128256, false}},
        {{ROWS / 16, 16, COLUMNS, 2000, true}});
}

// ---- norms -------------------------------------------------------------------------------------

// Weights are positive and dout follows x: where the rows are far from zero (centre), values that a
// thread computes beyond a row would be far larger than those in it.
static void norm(int M, int C, bool layernorm, float centre) {
    const float eps = 1e-5f;
    const size_t n = (size_t)M * C;
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
    Floats means(M), deviations(M);
    Producer p = {layernorm ? "layernorm forward" : "rmsnorm forward", FUSED_UNROUNDED, M, C};
    p.type = FP8_E4M3;
    p.scale = 60.0f;
    p.bf16 = p.fp8 = 2.0 * n;
    producer(
        p,
        [&](std::vector<Floats> &) {
            Floats y(n);
            cpu_norm_forward(y.data(), means.data(), deviations.data(), x.host.data(),
                             w.host.data(), layernorm ? b.host.data() : NULL, M, C, eps);
            return y;
        },
        [&](const Launch &l) {
            if (mode == CHECKING) {
                mean.poison();
                rstd.poison();
            }
            gpu_norm_forward(&gpu, l.out,
                             {mean.data + l.first, rstd.data + l.first, x.device.data + l.first * C,
                              w.device.data, layernorm ? b.device.data : NULL, eps, l.rows, C});
            if (mode != CHECKING) { return; }
            if (layernorm) { CHECK_ERROR(mean.get().data(), means.data(), M, 1e-5); }
            CHECK_ERROR(rstd.get().data(), deviations.data(), M, 1e-5);
        });

    if (mode == CHECKING) {
        mean.put(means.data());
        rstd.put(deviations.data());
    }
    SumScratch scratch(M, 3 * C);
    p.name = layernorm ? "layernorm backward" : "rmsnorm backward";
    p.fused = FUSED_ROUNDED;
    p.type = FP8_E5M2;
    p.before = &residual;
    p.bf16 = 4.0 * n;
    p.fp8 = 5.0 * n;
    p.sums[0] = p.sums[2] = C;
    p.sums[1] = layernorm ? C : 0;
    p.needed = mode == TIMING && layernorm ? 3 : 2; // with LayerNorm, layers have biases
    producer(
        p,
        [&](std::vector<Floats> &sums) {
            Floats dx = residual.host;
            sums[0].assign(C, 0.0f);
            if (layernorm) { sums[1].assign(C, 0.0f); }
            cpu_norm_backward(dx.data(), sums[0].data(), layernorm ? sums[1].data() : NULL,
                              dout.host.data(), x.host.data(), w.host.data(), means.data(),
                              deviations.data(), M, C);
            return dx;
        },
        [&](const Launch &l) {
            gpu_norm_backward(&gpu, l.out,
                              {l.sums[0], l.sums[1], l.sums[2], dout.device.data + l.first * C,
                               x.device.data + l.first * C, w.device.data,
                               layernorm ? mean.data + l.first : NULL, rstd.data + l.first,
                               scratch.scratch(), l.rows, C});
        });
}

enum { LAYERNORM = 1, RMSNORM = 2, BOTH_NORMS = 3 };
static void norms(int M, int C, int kinds, float centre) {
    if (kinds & LAYERNORM) { norm(M, C, true, centre); }
    if (kinds & RMSNORM) { norm(M, C, false, centre); }
}

ROW(all_norms) {
    row(norms, {{1, 8, BOTH_NORMS, 0.5f},
                {17, 48, BOTH_NORMS, 0.5f},
                {16, 16, BOTH_NORMS, 0.5f},
                {80, 208, BOTH_NORMS, 0.5f},
                {1000, 768, BOTH_NORMS, 0.5f},
                {1008, 768, BOTH_NORMS, 0.5f},
                {65, 1600, BOTH_NORMS, 0.5f},
                {96, 1600, BOTH_NORMS, 0.5f},
                {96, 1600, BOTH_NORMS, 64.0f},
                {1008, 1600, BOTH_NORMS, 0.5f},
                {33, 2048, BOTH_NORMS, 0.5f},
                {64, 2048, BOTH_NORMS, 0.5f},
                {48, 4096, BOTH_NORMS, 0.5f},
                {19, 5128, BOTH_NORMS, 0.5f},
                {32, 5120, BOTH_NORMS, 0.5f},
                {32, 8192, BOTH_NORMS, 0.5f},
                {9, 8192, BOTH_NORMS, 0.5f},
                {256, 768, BOTH_NORMS, 0.5f}, // even groups, as in the next two
                {256, 776, BOTH_NORMS, 0.5f},
                {192, 1360, BOTH_NORMS, 0.5f}},
        {{65536, 768, LAYERNORM, 0.0f},
         {32768, 1600, LAYERNORM, 0.0f},
         {32768, 2048, RMSNORM, 0.0f},
         {16384, 4096, RMSNORM, 0.0f}},
        {{ROWS, COLUMNS, BOTH_NORMS, 0.0f}});
}

// ---- RoPE --------------------------------------------------------------------------------------

// norm: heads are also normalised. The bias gradient is the column sums of the resulting gradient.
static void rope(int B, int T, int H, int G, int D, bool norm) {
    const int M = B * T, N = (H + 2 * G) * D;
    const size_t n = (size_t)M * N, turned = (size_t)M * (H + G) * D;
    const float eps = 1e-2f;
    Input qkv(n, 1), d(n, 1), query(D, 1), key(D, 1);
    Floats table((size_t)T * D), rstd(mode == CHECKING ? (size_t)M * (H + G) : 0);
    FloatBuffer angles(table.size());
    SumScratch scratch(M, N);
    Rope rope = {10000.0};
    rope_table(table.data(), T, D, &rope);
    angles.put(table.data());
    const Bf16 *query_weight = norm ? query.device.data : NULL,
               *key_weight = norm ? key.device.data : NULL;
    auto rotary = [&](const Launch &l) {
        return Rotary{angles.data, query_weight, key_weight, eps, l.rows / T, T, H, G, D};
    };
    Producer p = {norm ? "rope and QK norm" : "rope", FUSED_UNROUNDED, M, N};
    p.shape = text("%d x %d, H%d/%d D%d", M, N, H, G, D);
    Floats results[2];
    for (int apart = 0; apart < (norm ? 2 : 1); apart++) { // 0: in place
        p.before = apart ? NULL : &qkv;
        p.bf16 = apart == 1 ? 2.0 * n : norm ? 0.0 : 2.0 * turned;
        p.bf16_only = 1.02;
        producer(
            p,
            [&](std::vector<Floats> &) {
                Floats forward = qkv.host;
                if (norm) {
                    qk_norm_forward(forward.data(), rstd.data(), qkv.host.data(), query.host.data(),
                                    key.host.data(), M, H, G, D, eps);
                }
                rope_apply(forward.data(), table.data(), B, T, H, G, D, false);
                return forward;
            },
            [&](const Launch &l) {
                const Bf16 *from = apart ? qkv.device.data + l.first * N : l.out.bf16;
                gpu_rope_forward(&gpu, l.out.bf16, from, rotary(l));
                if (mode == CHECKING) { results[apart] = fetch_floats(l.out.bf16, n); }
            });
    }
    if (norm && mode == CHECKING) {
        CHECK(same_bits(results[0], results[1]));
        CHECK(same_bits(get_floats(qkv.device), qkv.host));
    }

    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        if (type == FP8_E4M3 && mode != CHECKING) { continue; }
        p = {norm ? "rope and QK norm backward" : "rope backward",
             D % 16 == 0 && !norm ? FUSED_UNROUNDED : FUSED_ROUNDED,
             M,
             N,
             type,
             100.0f,
             &d};
        p.shape = text("%d x %d, H%d/%d D%d", M, N, H, G, D);
        p.bf16 = (norm ? 3.0 : 2.0) * turned;
        p.fp8 = 2.0 * n + (p.fused == FUSED_ROUNDED ? p.bf16 : 0.0);
        p.sums[0] = p.sums[1] = norm ? D : 0;
        p.sums[2] = type == FP8_E5M2 && N % 8 == 0 ? N : 0;
        p.needed = 2;
        producer(
            p,
            [&](std::vector<Floats> &sums) {
                Floats backward = d.host;
                rope_apply(backward.data(), table.data(), B, T, H, G, D, true);
                if (norm) {
                    sums[0].assign(D, 0.0f);
                    sums[1].assign(D, 0.0f);
                    qk_norm_backward(backward.data(), sums[0].data(), sums[1].data(),
                                     qkv.host.data(), query.host.data(), key.host.data(),
                                     rstd.data(), M, H, G, D);
                }
                return backward;
            },
            [&](const Launch &l) {
                const Bf16 *x = norm ? qkv.device.data + l.first * N : NULL;
                gpu_rope_backward(
                    &gpu, l.out,
                    {rotary(l), x, l.sums[0], l.sums[1], l.sums[2], scratch.scratch()});
            });
    }
}

static void ropes(int B, int T, int H, int G, int D) {
    rope(B, T, H, G, D, false);
    rope(B, T, H, G, D, true);
}

ROW(all_ropes) {
    for (int D : {16, 18, 24, 40, 64, 72, 80, 96, 100, 128, 256}) {
        row(ropes, {{2, 24, 4, 2, D}, {1, 17, 3, 1, D}});
    }
    row(ropes,
        {{1, 1, 1, 1, 16},
         {1, 5, 1, 1, 2},
         {2, 17, 25, 5, 64},
         {4, 300, 6, 6, 128}, // a thread takes several rows
         {1, 640, 16, 8, 48}},
        {{16, 2048, 16, 4, 128}, {16, 2048, 16, 8, 128}, {32, 1024, 14, 2, 64}},
        {{ROWS / 16, 16, 127, 1, 16}});
}

// ---- activations -------------------------------------------------------------------------------

// In FP8 GELU adds the bias, in BF16 the product before it does: so they are timed.
static void gelu(int M, int F, Fp8Type type, bool biased) {
    const size_t n = (size_t)M * F;
    if (left_out((int64_t)n)) { return; }
    Input x(n, 2), b(F, 1), dout(n, 1);
    const Bf16 *bias = biased ? b.device.data : NULL;
    SumScratch scratch(M, F);
    Floats sum = x.host;
    for (size_t i = 0; biased && i < sum.size(); i++) { sum[i] += b.host[i % F]; }
    Producer p = {"gelu forward", FUSED_UNROUNDED, M, F, FP8_E4M3, 50.0f};
    (biased ? p.fp8 : p.bf16) = 2.0 * n;
    producer(
        p,
        [&](std::vector<Floats> &) {
            Floats y(n);
            gelu_forward(y.data(), sum.data(), (int64_t)n);
            return y;
        },
        [&](const Launch &l) {
            gpu_gelu_forward(&gpu, l.out, x.device.data + l.first * F, bias, l.rows, F);
        });
    p.name = "gelu backward";
    p.type = type;
    p.before = &dout; // in place
    (biased ? p.fp8 : p.bf16) = 3.0 * n;
    p.sums[0] = F;
    p.needed = 1;
    producer(
        p,
        [&](std::vector<Floats> &) {
            Floats dx(n);
            gelu_backward(dx.data(), dout.host.data(), sum.data(), (int64_t)n);
            return dx;
        },
        [&](const Launch &l) {
            gpu_gelu_backward(&gpu, l.out, l.sums[0], l.out.bf16, x.device.data + l.first * F, bias,
                              scratch.scratch(), l.rows, F);
        });
}

static void swiglu(int M, int F, Fp8Type type) {
    const size_t n = (size_t)M * F;
    if (left_out((int64_t)n)) { return; }
    Input x(2 * n, 2), dout(n, 1);
    Producer p = {"swiglu forward", FUSED_UNROUNDED, M, F, FP8_E4M3, 50.0f};
    p.bf16 = p.fp8 = 3.0 * n;
    p.shape = text("%d x %d", M, F);
    producer(
        p,
        [&](std::vector<Floats> &) {
            Floats y(n);
            swiglu_forward(y.data(), x.host.data(), M, F);
            return y;
        },
        [&](const Launch &l) {
            gpu_swiglu_forward(&gpu, l.out, x.device.data + l.first * 2 * F, l.rows, F);
        });
    p.name = "swiglu backward";
    p.N = 2 * F;
    p.type = type;
    p.scale = 20.0f;
    p.before = &x; // in place
    p.bf16 = p.fp8 = 5.0 * n;
    producer(
        p,
        [&](std::vector<Floats> &) {
            Floats dx(2 * n);
            swiglu_backward(dx.data(), dout.host.data(), x.host.data(), M, F);
            return dx;
        },
        [&](const Launch &l) {
            gpu_swiglu_backward(&gpu, l.out, dout.device.data + l.first * F, l.out.bf16, l.rows, F);
        });
}

enum { GELU = 1, BIASED_GELU = 2, SWIGLU = 4, ALL_ACTIVATIONS = 7 };
static void activations(int M, int F, Fp8Type type, int kinds) {
    if (kinds & GELU) { gelu(M, F, type, false); }
    if (kinds & BIASED_GELU) { gelu(M, F, type, true); }
    if (kinds & SWIGLU) { swiglu(M, F, type); }
}

ROW(all_activations) {
    row(activations,
        {{1, 8, FP8_E5M2, ALL_ACTIVATIONS},
         {17, 200, FP8_E5M2, ALL_ACTIVATIONS},
         {16, 16, FP8_E4M3, ALL_ACTIVATIONS},
         {144, 208, FP8_E5M2, ALL_ACTIVATIONS},
         {1000, 3072, FP8_E5M2, ALL_ACTIVATIONS},
         {512, 3072, FP8_E4M3, ALL_ACTIVATIONS},
         {5000, 264, FP8_E5M2, ALL_ACTIVATIONS}},
        {{65536, 3072, FP8_E4M3, GELU | BIASED_GELU},
         {32768, 6400, FP8_E4M3, GELU | BIASED_GELU},
         {32768, 5504, FP8_E4M3, SWIGLU},
         {16384, 14336, FP8_E4M3, SWIGLU}},
        {{ROWS, COLUMNS, FP8_E4M3, GELU}, {ROWS, COLUMNS / 2, FP8_E4M3, SWIGLU}});
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

static void loss(int M, int V, int P, Fp8Type type, float z_loss, float softcap) {
    const float factor = 0.25f, most = factor * (1 + 2 * z_loss * 30); // of the gradient
    const LossTerms reported = {0.0f, z_loss, softcap}, terms = {factor, z_loss, softcap};
    if (left_out((int64_t)M * P)) { return; }
    Input logits((size_t)M * P, 3);
    Ints host_targets = random_tokens(M, V);
    for (int i = 0; i < M; i += 5) { host_targets[i] = i % 2 ? -1 : V - 1; }
    if (M > 2) { host_targets[2] = -1; }
    if (M == 1) { // the model is nearly certain: a loss near 0
        float largest = *std::max_element(logits.host.begin(), logits.host.begin() + V);
        logits.host[host_targets[0]] = bf16_decode(bf16_encode(largest + 4));
        put_floats(logits.device, logits.host);
    }
    Buffer<int> targets(M);
    targets.put(host_targets.data());
    FloatBuffer losses(M), scratch(loss_scratch_floats(M));
    const Scratch rows = {scratch.data, scratch.count * sizeof(float)};
    Floats expected(M), whole;
    auto right = [&] {
        check_losses(losses.get(), expected, logits.host, host_targets, P, softcap, 2e-6);
    };
    Producer p = {softcap > 0  ? "cross-entropy, capped"
                  : z_loss > 0 ? "cross-entropy, z-loss"
                               : "cross-entropy",
                  FUSED_UNROUNDED,
                  M,
                  P,
                  type,
                  fp8_max(type) / most,
                  &logits};
    p.bf16 = p.fp8 = 2.0 * M * P;
    producer(
        p,
        [&](std::vector<Floats> &) {
            Floats gradient = logits.host;
            cross_entropy(expected.data(), gradient.data(), host_targets.data(), M, V, P, terms);
            gpu_cross_entropy(&gpu, losses.data, tensor_bf16(logits.device.data), {}, targets.data,
                              M, V, P, reported);
            CHECK(same_bits(get_floats(logits.device), logits.host));
            right();
            return gradient;
        },
        [&](const Launch &l) {
            if (l.out.mode == SCALE_MEASURED) { // the head's gradient has a fixed scale
                gpu_cross_entropy(&gpu, losses.data, tensor_bf16(l.out.bf16), {}, targets.data, M,
                                  V, P, terms);
                gpu_measure(&gpu, l.out, (int64_t)M * P);
                gpu_quantize(&gpu, l.out, {}, {}, M, P);
                return;
            }
            if (mode == IN_PARTS && l.rows < M && l.first == 0) { whole = losses.get(); }
            if (mode == CHECKING || (mode == IN_PARTS && l.first == 0)) {
                losses.poison();
                scratch.poison();
            }
            gpu_cross_entropy(&gpu, losses.data + l.first, l.out, rows, targets.data + l.first,
                              l.rows, V, P, terms);
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

ROW(losses) {
    row(loss,
        {{1, 5, 8, FP8_E5M2, 0, 0},
         {33, 257, 264, FP8_E5M2, 0, 0},
         {16, 16, 16, FP8_E4M3, 0, 0},
         {48, 301, 304, FP8_E5M2, 0, 0},
         {128, 5003, 5008, FP8_E5M2, 0, 0},
         {100, 8001, 8064, FP8_E5M2, 0, 0},
         {5, 50257, 50304, FP8_E5M2, 0, 0},
         {20, 50257, 50304, FP8_E5M2, 0, 0},
         {7, 128256, 128256, FP8_E5M2, 0, 0},
         {3, 499999, 500000, FP8_E5M2, 0, 0},      // a row too long for a cluster
         {16, 151931, 151936, FP8_E5M2, 1e-2f, 0}, // two kernels: with a cap and without
         {16, 151931, 151936, FP8_E5M2, 3e-2f, 2.5f}},
        {{16384, 50257, 50304, FP8_E5M2, 0, 0},
         {16384, 50257, 50304, FP8_E5M2, 1e-4f, 0},
         {16384, 50257, 50304, FP8_E5M2, 1e-4f, 30},
         {8192, 128256, 128256, FP8_E5M2, 0, 0},
         {8192, 128256, 128256, FP8_E5M2, 1e-4f, 0},
         {8192, 128256, 128256, FP8_E5M2, 1e-4f, 30}},
        {{ROWS, 2000, COLUMNS, FP8_E4M3, 0, 0}});
    static const float terms[][2] = {{1e-2f, 0}, {0, 4}, {3e-2f, 2.5f}, {1e-4f, 30}};
    for (const float *t : terms) {
        row(loss, {{1, 5, 8, FP8_E5M2, t[0], t[1]},
                   {33, 257, 264, FP8_E5M2, t[0], t[1]},
                   {16, 16, 16, FP8_E4M3, t[0], t[1]},
                   {48, 301, 304, FP8_E5M2, t[0], t[1]},
                   {128, 5003, 5008, FP8_E4M3, t[0], t[1]},
                   {20, 50257, 50304, FP8_E5M2, t[0], t[1]},
                   {3, 499999, 500000, FP8_E5M2, t[0], t[1]}});
    }
}

// ---- casts -------------------------------------------------------------------------------------

static void cast(int M, int N, Fp8Type type) {
    const size_t n = (size_t)M * N;
    if (left_out((int64_t)n)) { return; }
    Input x(n, 1);
    SumScratch scratch(M, N);
    if (mode == IN_PARTS) {
        Producer p = {"quantize", FUSED_UNROUNDED, M, N};
        p.before = &x;
        p.sums[0] = N;
        same_in_parts(p, [&](const Launch &l) {
            Tensor t = l.out;
            t.fused = false;
            gpu_quantize(&gpu, t, l.sums[0], scratch.scratch(), l.rows, N);
        });
        return;
    }
    FloatBuffer sums(N);
    Quantised q(M, N, type, 37.3f);
    const Gradient all = {sums.data, TYPE_F32, false};
    auto of_x = [&](Tensor t) {
        t.bf16 = x.device.data;
        return t;
    };
    auto quantize = [&](Tensor t, Gradient g) {
        gpu_quantize(&gpu, of_x(t), g, g.data != NULL ? scratch.scratch() : Scratch{}, M, N);
    };
    auto transpose = [&] { gpu_transpose_codes(&gpu, q.fp8_t.data, q.fp8.data, M, N); };
    bool fp8 = has_fp8() && M % 16 == 0 && N % 16 == 0;
    if (mode == TIMING) {
        std::string shape = text("%d x %d", M, N);
        timed("column sums", shape, moved(n), [&] { quantize(tensor_bf16(NULL), all); });
        for (int blocks = 0; blocks < 2 && fp8; blocks++) {
            Tensor t = blocks ? q.blocks(SCALES_VECTOR, false) : q.tensor(SCALE_GIVEN, false);
            std::string name = blocks ? "fp8 blocks cast" : "fp8 cast";
            timed(name, shape, moved(2.0 * n), [&] { quantize(t, {}); });
            timed(name + " and sums", shape, moved(2.0 * n), [&] { quantize(t, all); });
        }
        if (fp8) { timed("transpose of codes", shape, moved(n), transpose); }
        return;
    }
    Floats expected(N, 0.0f);
    bias_backward(expected.data(), x.host.data(), M, N);
    quantize(tensor_bf16(NULL), all);
    CHECK_ERROR(sums.get().data(), expected.data(), N, 1e-5);
    if (!fp8) { return; }
    sums.poison();
    quantize(q.tensor(SCALE_GIVEN, false), all);
    check_given(q, x.host, true);
    CHECK_ERROR(sums.get().data(), expected.data(), N, 1e-5);
    Codes columns = q.fp8_t.get();
    q.fp8_t.poison();
    transpose();
    CHECK(q.fp8_t.get() == columns);

    q.reset(0.0f, 0);
    Tensor measured = of_x(q.tensor(SCALE_MEASURED, false));
    gpu_measure(&gpu, measured, (int64_t)n);
    quantize(measured, {sums.data, TYPE_F32, true});
    check_measured(q, x.host);
    for (float &sum : expected) { sum *= 2; }
    CHECK_ERROR(sums.get().data(), expected.data(), N, 1e-5);
    q.reset(tensor_amax(x.host.data(), (int64_t)n), 3); // with a history
    measured.slot = NULL;                               // without a history
    quantize(measured, {});
    CHECK_CLOSE(q.slot.get()[0].amax, 0.0, 0.0);
    quantize(q.tensor(SCALE_MEASURED, false), {});
    CHECK_EQUAL(check_codes(q.fp8.get(), x.host, q.scale, type, 0), 0);

    for (int kind = SCALES_VECTOR; kind <= SCALES_SQUARE; kind++) {
        for (int form = 1; form < 4; form++) {
            q.reset(0.0f, 0);
            sums.poison();
            Tensor some = q.blocks((Fp8Scales)kind, false);
            if (!(form & 1)) { some.fp8 = NULL; }
            if (!(form & 2)) { some.fp8_t = NULL; }
            quantize(some, all);
            if (form == 3) { check_blocks(q, x.host, (Fp8Scales)kind, true); }
            if (!(form & 1)) { CHECK(q.fp8.get() == Codes(q.fp8.count, 0xff)); }
            if (!(form & 2)) { CHECK(q.fp8_t.get() == Codes(q.fp8.count, 0xff)); }
            for (float &sum : expected) { sum /= form == 1 && kind == SCALES_VECTOR ? 2 : 1; }
            CHECK_ERROR(sums.get().data(), expected.data(), N, 1e-5);
        }
    }
}

ROW(casts) {
    for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
        row(cast, {{16, 16, type},
                   {128, 64, type},
                   {48, 208, type},
                   {17, 200, type},
                   {1008, 1600, type},
                   {1000, 6144, type}});
    }
    // From 33,793 rows on there are more tiles of 128 rows than blocks of the kernels whose number
    // is limited; the scratch is exactly what partial_sums_bytes says.
    for (int M : {33792, 33808, 50000, 65552}) {
        row(cast, {{M, 16, FP8_E4M3}, {M, 80, FP8_E5M2}});
    }
    row(cast, {},
        {{65536, 768, FP8_E4M3},
         {65536, 3072, FP8_E4M3},
         {32768, 1600, FP8_E4M3},
         {32768, 2048, FP8_E4M3},
         {16384, 4096, FP8_E4M3},
         {2304, 768, FP8_E4M3},
         {11008, 2048, FP8_E4M3},
         {28672, 4096, FP8_E4M3}},
        {{ROWS, COLUMNS, FP8_E4M3}});
}
