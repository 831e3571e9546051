// Attention's kernels for heads of 64 on an emulated multiprocessor: against the definition, with
// any order of threads and asynchronous work; and with planted faults, each of which must be found.
#include "../../kernels/attention64_backward.cu"

#include "../../base/rng.h"
#include "../../kernels/cpu.h"
#include "faults.h"

typedef std::vector<float> Floats;
typedef std::vector<Bf16> Codes;

enum { GUARD = 64 };

// Where the documents of a micro-batch begin: random lengths, many of them within one tile, some of
// exactly a tile or two.
static std::vector<int> random_starts(int B, int T) {
    static const int lengths[] = {64, 1, 37, 130, 3, 90, 128, 11, 200};
    std::vector<int> starts;
    for (int b = 0, n = 0; b < B; b++) {
        for (int t = 0; t < T; n++) {
            const int length = std::min(T - t, lengths[n % 9]);
            starts.insert(starts.end(), (size_t)length, t);
            t += length;
        }
    }
    return starts;
}

// An attention with all that its backward pass reads, and the gradient by the definition.
struct Problem {
    AttentionShape shape;
    int blocks;
    std::vector<int> documents;
    Codes qkv, out, d_out;
    Floats lse, expected_out, expected;

    // size: of queries, keys and values; with 6, a row's weight is mostly on one key. starts: of
    // documents; if there are none, a sequence is one.
    Problem(int B, int T, int H, int blocks_, int size = 1, std::vector<int> starts = {})
        : shape{B, T, H, H, SIZE, true, nullptr}, blocks(blocks_), documents(std::move(starts)) {
        const size_t tokens = (size_t)B * T, width = (size_t)H * SIZE;
        Floats x(tokens * width * 3), y(tokens * width), d(tokens * width);
        for (size_t i = 0; i < x.size(); i++) {
            qkv.push_back(bf16_encode((float)size * rng_normal(1, i)));
        }
        for (size_t i = 0; i < d.size(); i++) { d_out.push_back(bf16_encode(rng_normal(2, i))); }
        auto decode_all = [](Floats &to, const Codes &from) {
            std::transform(from.begin(), from.end(), to.begin(), bf16_decode);
        };
        decode_all(x, qkv);
        decode_all(d, d_out);
        if (!documents.empty()) {
            const Gpu device = gpu();
            documents.resize(attention_documents_size(shape), -1);
            attention_share_work(&device, shape, documents.data());
            shape.documents = documents.data();
        }
        lse.resize((size_t)B * H * T);
        expected.resize(x.size());
        attention_forward(y.data(), lse.data(), x.data(), shape.documents, B, T, H, H, SIZE);
        expected_out = y;
        for (float value : y) { out.push_back(bf16_encode(value)); }
        decode_all(y, out);
        attention_backward(expected.data(), d.data(), y.data(), lse.data(), x.data(),
                           shape.documents, B, T, H, H, SIZE);
    }
    Problem(const Problem &) = delete; // documents has an address
    Gpu gpu(void) const {
        Gpu device = {};
        device.sms = blocks;
        device.capability = 90;
        return device;
    }
    // The output by the kernel, and the log-sum-exp of its rows.
    Codes run_forward(Floats *found_lse) const {
        Gpu device = gpu();
        Codes found(out.size() + GUARD, 0xffff);
        found_lse->assign(lse.size() + GUARD, NAN);
        attention64_forward(&device, shape, found.data(), found_lse->data(), qkv.data());
        return found;
    }
    // The gradient by the kernel, in an order of its own; machine.fault says what was wrong.
    Codes run(void) const {
        Gpu device = gpu();
        std::vector<uint8_t> sums(attention64_workspace(shape), 0xff);
        Codes d_qkv(qkv.size() + GUARD, 0xffff);
        device.attention_workspace = sums.data();
        device.attention_bytes = sums.size();
        attention64_backward(&device, shape, d_qkv.data(), d_out.data(), out.data(), lse.data(),
                             qkv.data());
        return d_qkv;
    }
};

TEST(definition) {
    static const int shapes[][5] = {{1, 100, 9, 4, 0}, {1, 300, 3, 2, 0}, {2, 129, 1, 3, 0},
                                    {1, 640, 1, 4, 0}, {2, 300, 3, 4, 1}, {1, 100, 3, 8, 1},
                                    {3, 640, 1, 2, 1}, {1, 640, 1, 5, 1}};
    const char *runs = getenv("RUNS"); // each in another order
    for (const int *s : shapes) {
        const Problem p(s[0], s[1], s[2], s[3], 1,
                        s[4] ? random_starts(s[0], s[1]) : std::vector<int>());
        const Codes first = p.run();
        Floats values(p.expected.size());
        std::transform(first.begin(), first.end() - GUARD, values.begin(), bf16_decode);
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
            const Codes again = p.run();
            CHECK_TEXT(machine.fault.c_str(), "");
            CHECK_BITS(again.data(), first.data(), first.size() * sizeof(Bf16));
            CHECK_EQUAL(std::count(again.end() - GUARD, again.end(), 0xffff), GUARD);
        }
    }
}

TEST(forward) {
    static const int shapes[][6] = {
        {1, 100, 9, 4, 1, 0}, {3, 17, 2, 1, 1, 0},  {1, 300, 3, 2, 1, 0}, {2, 129, 1, 3, 1, 0},
        {1, 640, 2, 3, 1, 0}, {1, 320, 2, 2, 6, 0}, {2, 300, 3, 4, 1, 1}, {1, 100, 3, 8, 6, 1},
        {3, 640, 1, 2, 1, 1}, {1, 640, 1, 5, 6, 1}};
    const char *runs = getenv("RUNS");
    for (const int *s : shapes) {
        const Problem p(s[0], s[1], s[2], s[3], s[4],
                        s[5] ? random_starts(s[0], s[1]) : std::vector<int>());
        Floats lse, found(p.expected_out.size());
        const Codes first = p.run_forward(&lse);
        std::transform(first.begin(), first.end() - GUARD, found.begin(), bf16_decode);
        CHECK_ERROR(found.data(), p.expected_out.data(), (int64_t)found.size(), 0.003);
        CHECK_ERROR(lse.data(), p.lse.data(), (int64_t)p.lse.size(), 1e-6);
        found[found.size() / 2] += 16.0f; // planted: one wrong value
        CHECK(
            CAUGHT(CHECK_ERROR(found.data(), p.expected_out.data(), (int64_t)found.size(), 0.003)));
        for (int run = 0; run < (runs != NULL ? atoi(runs) : 10); run++) {
            Floats lse_again;
            const Codes again = p.run_forward(&lse_again);
            CHECK_TEXT(machine.fault.c_str(), "");
            CHECK_BITS(again.data(), first.data(), first.size() * sizeof(Bf16));
            CHECK_BITS(lse_again.data(), lse.data(), p.lse.size() * sizeof(float));
            CHECK_EQUAL(std::count(again.end() - GUARD, again.end(), 0xffff), GUARD);
            CHECK(std::isnan(lse_again[p.lse.size()]));
        }
    }
}

TEST(planted_faults_forward) {
    const Problem p(1, 300, 3, 1, 1, random_starts(1, 300));
    check_faults({}, [&] {
        Floats lse;
        const Codes out = p.run_forward(&lse);
        return std::make_pair(out, Floats(lse.begin(), lse.end() - GUARD));
    });
}

TEST(planted_faults) {
    const Problem p(1, 300, 3, 1, 1, random_starts(1, 300));
    // the turns order this, too
    check_faults({{"no wait", "&s.ds_full[i]"}}, [&] { return p.run(); });
}
