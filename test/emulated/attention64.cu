// kernels/attention64.cu on an emulated multiprocessor: against the definition, with any order of
// threads and asynchronous work; the codes that it writes against those of its BF16 results; and
// with planted faults, each of which must be found.
#include "../../kernels/attention64.cu"

#include "../../base/rng.h"
#include "../../kernels/cpu.h"
#include "faults.h"
#include "partial_sums.h"

typedef std::vector<float> Floats;
typedef std::vector<Bf16> Codes;

enum { GUARD = 64 };
static const float SCALE = 37.3f; // some values are beyond E4M3

// What the kernel writes, with a guard zone each.
struct Results {
    Codes bf16;
    std::vector<uint8_t> fp8, fp8_t;
    Floats sums, amax;
    bool operator==(const Results &r) const { // all bits
        auto same = [](const auto &a, const auto &b) {
            return memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
        };
        return same(bf16, r.bf16) && same(fp8, r.fp8) && same(fp8_t, r.fp8_t) &&
               same(sums, r.sums) && same(amax, r.amax);
    }
    bool operator!=(const Results &r) const {
        return !(*this == r);
    }
};

// An attention with all that its backward pass reads, and the gradient by the definition.
struct Problem {
    AttentionShape shape;
    int blocks;
    Codes qkv, out, d_out;
    Floats lse, expected;

    Problem(int B, int T, int H, int blocks_) : shape{B, T, H, H, SIZE, true}, blocks(blocks_) {
        const size_t tokens = (size_t)B * T, width = (size_t)H * SIZE;
        Floats x(tokens * width * 3), y(tokens * width), d(tokens * width);
        for (size_t i = 0; i < x.size(); i++) { qkv.push_back(bf16_encode(rng_normal(1, i))); }
        for (size_t i = 0; i < d.size(); i++) { d_out.push_back(bf16_encode(rng_normal(2, i))); }
        auto decode_all = [](Floats &to, const Codes &from) {
            std::transform(from.begin(), from.end(), to.begin(), bf16_decode);
        };
        decode_all(x, qkv);
        decode_all(d, d_out);
        lse.resize((size_t)B * H * T);
        expected.resize(x.size());
        attention_forward(y.data(), lse.data(), x.data(), B, T, H, H, SIZE);
        for (float value : y) { out.push_back(bf16_encode(value)); }
        decode_all(y, out);
        attention_backward(expected.data(), d.data(), y.data(), lse.data(), x.data(), B, T, H, H,
                           SIZE);
    }
    size_t columns(void) const {
        return 3 * (size_t)shape.H * SIZE;
    }
    // The gradient by the kernel, in an order of its own; machine.fault says what was wrong. forms:
    // 0 BF16; 1 codes, 2 transposed codes, 3 both, of the type, and column sums.
    Results run(int forms = 0, Fp8Type type = FP8_E4M3) const {
        Gpu gpu = {};
        gpu.sms = blocks;
        gpu.capability = 90;
        std::vector<uint8_t> sums(attention64_workspace(shape), 0xff);
        const size_t n = qkv.size() + GUARD, most = columns() + GUARD;
        Results r = {Codes(n, 0xffff), std::vector<uint8_t>(n, 0xff), std::vector<uint8_t>(n, 0xff),
                     Floats(most, 7.0f), Floats(1, 0.0f)};
        Fp8Live live = {1.0f / SCALE, SCALE, 0.0f, 0.0f};
        Fp8Slot slot = {};
        Tensor d_qkv = tensor_bf16(r.bf16.data());
        gpu.attention_workspace = sums.data();
        gpu.attention_bytes = sums.size();
        d_qkv.fp8 = forms & 1 ? r.fp8.data() : NULL;
        d_qkv.fp8_t = forms & 2 ? r.fp8_t.data() : NULL;
        d_qkv.type = type;
        d_qkv.fused = d_qkv.record = forms > 0;
        d_qkv.live = &live;
        d_qkv.slot = &slot;
        const bool codes = attention64_backward(&gpu, shape, d_qkv,
                                                {r.sums.data(), TYPE_F32, false}, d_out.data(),
                                                out.data(), lse.data(), qkv.data());
        CHECK_EQUAL(codes, forms > 0 && shape.T % 16 == 0);
        r.amax[0] = slot.amax;
        return r;
    }
};

static Floats decoded(const Codes &codes) {
    Floats values(codes.size() - GUARD);
    std::transform(codes.begin(), codes.end() - GUARD, values.begin(), bf16_decode);
    return values;
}

TEST(definition) {
    static const int shapes[][4] = {
        {1, 100, 9, 4}, {1, 300, 3, 2}, {2, 129, 1, 3}, {1, 640, 1, 4}, {1, 500, 5, 4}};
    const char *runs = getenv("RUNS"); // each in another order
    for (const int *s : shapes) {
        const Problem p(s[0], s[1], s[2], s[3]);
        const Results first = p.run();
        const Floats values = decoded(first.bf16);
        for (int part = 0; part < 3; part++) { // dQ, dK, dV
            const size_t width = (size_t)p.shape.H * SIZE;
            Floats found, right;
            for (size_t i = 0; i < values.size(); i++) {
                if (i / width % 3 != (size_t)part) { continue; }
                found.push_back(values[i]);
                right.push_back(p.expected[i]);
            }
            CHECK_ERROR(found.data(), right.data(), (int64_t)found.size(), 0.003);
            found[found.size() / 2] += 1.0f; // planted: one wrong value
            CHECK(CAUGHT(CHECK_ERROR(found.data(), right.data(), (int64_t)found.size(), 0.003)));
        }
        for (int run = 0; run < (runs != NULL ? atoi(runs) : 10); run++) {
            const Results again = p.run();
            CHECK_TEXT(machine.fault.c_str(), "");
            CHECK(again == first);
            CHECK_EQUAL(std::count(again.bf16.end() - GUARD, again.bf16.end(), 0xffff), GUARD);
        }
    }
}

// What a pass over the BF16 results would write, to the last bit, but for the order of sums.
TEST(codes) {
    static const int shapes[][4] = {
        {1, 112, 9, 4}, {1, 304, 3, 2}, {3, 16, 2, 2}, {2, 144, 1, 3}, {1, 640, 1, 4}};
    const char *runs = getenv("RUNS");
    for (const int *s : shapes) {
        const Problem p(s[0], s[1], s[2], s[3]);
        const size_t N = p.columns(), M = (size_t)(s[0] * s[1]);
        const Results bf16 = p.run();
        const Floats values = decoded(bf16.bf16);
        for (Fp8Type type : {FP8_E4M3, FP8_E5M2}) {
            Results right = bf16;
            Floats sums(N, 0.0f);
            std::fill(right.bf16.begin(), right.bf16.end(), 0xffff); // it stays as it was
            right.amax[0] = tensor_amax(values.data(), (int64_t)values.size());
            for (size_t i = 0; i < values.size(); i++) {
                right.fp8[i] = right.fp8_t[i % N * M + i / N] = fp8_encode(values[i] * SCALE, type);
                sums[i % N] += values[i];
            }
            for (int run = 0; run < (runs != NULL ? atoi(runs) : 4); run++) {
                const Results found = p.run(3, type);
                CHECK_TEXT(machine.fault.c_str(), "");
                CHECK_ERROR(found.sums.data(), sums.data(), (int64_t)N, 1e-5);
                if (run == 0) { right.sums = found.sums; }
                CHECK(found == right);
                CHECK_EQUAL(std::count(found.sums.end() - GUARD, found.sums.end(), 7.0f), GUARD);
            }
            for (int forms = 1; forms < 3; forms++) { // one alone
                Results one = right;
                auto &none = forms == 1 ? one.fp8_t : one.fp8;
                std::fill(none.begin(), none.end(), 0xff);
                CHECK(p.run(forms, type) == one);
            }
        }
    }
}

TEST(planted_faults) {
    const Problem p(1, 304, 3, 1);
    // the turns order this, too
    for (int forms : {0, 3}) {
        check_faults({{"no wait", "&s.ds_full[i]"}}, [&] { return p.run(forms); });
    }
}
