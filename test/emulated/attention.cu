// Attention's kernels for Hopper on an emulated multiprocessor: against the definition, with any
// order of threads and asynchronous work; and with planted faults, each of which must be found.
#include "../../kernels/attention.h"

#include "../../base/rng.h"
#include "../../kernels/cpu.h"
#include "faults.h"

typedef std::vector<float> Floats;
typedef std::vector<Bf16> Codes;

enum { GUARD = 64 };

enum Documents { NONE, MANY, ONE };

// Where the documents of a micro-batch begin. MANY: random lengths, many of them within one tile,
// some of exactly a tile or two.
static std::vector<int> starts_of(Documents documents, int B, int T) {
    static const int lengths[] = {64, 1, 63, 130, 3, 65, 128, 11, 200};
    std::vector<int> starts;
    for (int b = 0, n = 0; b < B && documents != NONE; b++) {
        for (int t = 0; t < T; n++) {
            const int length = documents == ONE ? T : std::min(T - t, lengths[n % 9]);
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

    // size: of queries, keys and values; with 6, a row's weight is mostly on one key.
    Problem(int B, int T, int H, int G, int D, int blocks_, Documents kind, int size = 1)
        : shape{B, T, H, G, D, true, nullptr}, blocks(blocks_), documents(starts_of(kind, B, T)) {
        const size_t tokens = (size_t)B * T, width = (size_t)H * D;
        Floats x(tokens * (size_t)(H + 2 * G) * D), y(tokens * width), d(tokens * width);
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
        attention_forward(y.data(), lse.data(), x.data(), shape.documents, B, T, H, G, D);
        expected_out = y;
        for (float value : y) { out.push_back(bf16_encode(value)); }
        decode_all(y, out);
        attention_backward(expected.data(), d.data(), y.data(), lse.data(), x.data(),
                           shape.documents, B, T, H, G, D);
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
        attention_own_forward(&device, shape, found.data(), found_lse->data(), qkv.data());
        return found;
    }
    // The gradient by the kernel, in an order of its own; machine.fault says what was wrong.
    Codes run(void) const {
        Gpu device = gpu();
        std::vector<uint8_t> sums(attention_own_workspace(shape), 0xff);
        Codes d_qkv(qkv.size() + GUARD, 0xffff);
        device.attention_workspace = sums.data();
        device.attention_bytes = sums.size();
        attention_own_backward(&device, shape, d_qkv.data(), d_out.data(), out.data(), lse.data(),
                               qkv.data());
        return d_qkv;
    }
};

// B, T, H, G, D, blocks, documents, size
typedef int Shape[8];

static Problem problem(const Shape &s) {
    return Problem(s[0], s[1], s[2], s[3], s[4], s[5], (Documents)s[6], s[7]);
}

static int runs(void) { // each in another order
    return getenv("RUNS") != NULL ? atoi(getenv("RUNS")) : 4;
}

TEST(backward) {
    static const Shape shapes[] = {{1, 100, 9, 9, 64, 4, NONE, 1},  {1, 300, 3, 3, 64, 2, NONE, 1},
                                   {2, 129, 1, 1, 64, 3, NONE, 1},  {1, 640, 1, 1, 64, 4, NONE, 1},
                                   {2, 300, 3, 3, 64, 4, MANY, 1},  {1, 100, 3, 3, 64, 8, MANY, 1},
                                   {3, 640, 1, 1, 64, 2, MANY, 1},  {1, 640, 1, 1, 64, 5, MANY, 1},
                                   {1, 1, 1, 1, 128, 1, MANY, 1},   {1, 100, 2, 1, 128, 3, ONE, 1},
                                   {2, 300, 2, 1, 128, 3, MANY, 1}, {1, 200, 8, 1, 128, 2, MANY, 1},
                                   {1, 129, 2, 2, 128, 8, MANY, 1}, {1, 321, 2, 1, 128, 1, ONE, 1},
                                   {2, 128, 1, 1, 128, 1, MANY, 1}};
    for (const Shape &s : shapes) {
        const Problem p = problem(s);
        const Codes first = p.run();
        Floats values(p.expected.size());
        std::transform(first.begin(), first.end() - GUARD, values.begin(), bf16_decode);
        for (int part = 0; part < 3; part++) { // dQ, dK, dV
            const int H = p.shape.H, G = p.shape.G;
            const size_t width = (size_t)(H + 2 * G);
            Floats found, right;
            for (size_t i = 0; i < values.size(); i++) {
                const int head = (int)(i / (size_t)p.shape.D % width);
                if ((head >= H) + (head >= H + G) != part) { continue; }
                found.push_back(values[i]);
                right.push_back(p.expected[i]);
            }
            CHECK_ERROR(found.data(), right.data(), (int64_t)found.size(), 0.003);
            found[found.size() / 2] += 1.0f; // planted: one wrong value
            CHECK(CAUGHT(CHECK_ERROR(found.data(), right.data(), (int64_t)found.size(), 0.003)));
        }
        for (int run = 0; run < runs(); run++) {
            const Codes again = p.run();
            CHECK_TEXT(machine.fault.c_str(), "");
            CHECK_BITS(again.data(), first.data(), first.size() * sizeof(Bf16));
            CHECK_EQUAL(std::count(again.end() - GUARD, again.end(), 0xffff), GUARD);
        }
    }
}

TEST(forward) {
    static const Shape shapes[] = {{1, 100, 9, 9, 64, 4, NONE, 1},  {3, 17, 2, 2, 64, 1, NONE, 1},
                                   {1, 300, 3, 3, 64, 2, NONE, 1},  {2, 129, 1, 1, 64, 3, NONE, 1},
                                   {1, 640, 2, 2, 64, 3, NONE, 1},  {1, 320, 2, 2, 64, 2, NONE, 6},
                                   {2, 300, 3, 3, 64, 4, MANY, 1},  {1, 100, 3, 3, 64, 8, MANY, 6},
                                   {3, 640, 1, 1, 64, 2, MANY, 1},  {1, 640, 1, 1, 64, 5, MANY, 6},
                                   {1, 1, 1, 1, 128, 1, MANY, 1},   {3, 17, 2, 1, 128, 1, ONE, 1},
                                   {2, 300, 2, 1, 128, 3, MANY, 6}, {1, 200, 8, 1, 128, 2, MANY, 1},
                                   {1, 129, 2, 2, 128, 8, MANY, 1}, {1, 450, 2, 1, 128, 2, ONE, 6},
                                   {1, 640, 1, 1, 128, 2, MANY, 1}, {2, 200, 6, 2, 64, 3, NONE, 1},
                                   {2, 300, 4, 1, 64, 2, MANY, 6},  {1, 450, 4, 2, 128, 3, NONE, 6},
                                   {2, 129, 2, 2, 128, 2, NONE, 1}, {1, 17, 1, 1, 128, 2, NONE, 1}};
    for (const Shape &s : shapes) {
        const Problem p = problem(s);
        Floats lse, found(p.expected_out.size());
        const Codes first = p.run_forward(&lse);
        std::transform(first.begin(), first.end() - GUARD, found.begin(), bf16_decode);
        CHECK_ERROR(found.data(), p.expected_out.data(), (int64_t)found.size(), 0.003);
        CHECK_ERROR(lse.data(), p.lse.data(), (int64_t)p.lse.size(), 1e-6);
        found[found.size() / 2] += 16.0f; // planted: one wrong value
        CHECK(
            CAUGHT(CHECK_ERROR(found.data(), p.expected_out.data(), (int64_t)found.size(), 0.003)));
        for (int run = 0; run < runs(); run++) {
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

// Each warp stores results where its own rows of a WGMMA's operand have been. Here no other warp
// reads these; a GPU may.
static const std::vector<std::pair<std::string, std::string>> own_rows = {
    {"left out", "named barrier 1"},
    {"left out", "named barrier 2"},
    {"left out", "named barrier 3"}};

static void check_forward_faults(const Problem &p,
                                 std::vector<std::pair<std::string, std::string>> harmless) {
    check_faults(harmless, [&] {
        Floats lse;
        const Codes out = p.run_forward(&lse);
        return std::make_pair(out, Floats(lse.begin(), lse.end() - GUARD));
    });
}

TEST(planted_faults_forward) {
    check_forward_faults(Problem(1, 300, 3, 3, 64, 1, MANY), {});
}

TEST(planted_faults_forward_128) {
    check_forward_faults(Problem(1, 300, 4, 2, 128, 1, MANY), own_rows);
    check_forward_faults(Problem(1, 300, 4, 2, 128, 1, NONE), own_rows);
}

TEST(planted_faults) {
    const Problem p(1, 300, 3, 3, 64, 1, MANY);
    // the turns order this, too
    check_faults({{"no wait", "&s.ds_full[i]"}}, [&] { return p.run(); });
}

TEST(planted_faults_128) {
    const Problem p(1, 300, 4, 2, 128, 1, MANY);
    check_faults({}, [&] { return p.run(); });
}
