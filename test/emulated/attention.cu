// Attention's kernels for Hopper on an emulated multiprocessor: against the definition, with any
// order of threads and asynchronous work; and with planted faults, each of which must be found.
#include "../../kernels/attention.h"

#include "../../base/rng.h"
#include "../../kernels/cpu.h"
#include "faults.h"

typedef std::vector<float> Floats;
typedef std::vector<Bf16> Codes;

typedef std::pair<Codes, Floats> Result;

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
    bool serves(bool backward) const {
        const Gpu device = gpu();
        return attention_own_serves(&device, shape, backward);
    }
    // What a kernel makes, in an order of its own: the gradient, or the output and the log-sum-exp
    // of its rows; machine.fault says what was wrong.
    Result run(bool backward) const {
        Gpu device = gpu();
        std::vector<uint8_t> sums(attention_own_workspace(shape), 0xff);
        Result r = {Codes((backward ? qkv : out).size() + GUARD, 0xffff),
                    Floats(backward ? 0 : lse.size() + GUARD, NAN)};
        device.attention_workspace = sums.data();
        device.attention_bytes = sums.size();
        if (backward) {
            attention_own_backward(&device, shape, r.first.data(), d_out.data(), out.data(),
                                   lse.data(), qkv.data());
        } else {
            attention_own_forward(&device, shape, r.first.data(), r.second.data(), qkv.data());
        }
        return r;
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

// Elements of a result that are compared together: of the output all, of the gradient dQ, dK or dV.
static void check_part(const Problem &p, const Codes &codes, const Floats &expected, int part) {
    const int H = p.shape.H, G = p.shape.G, D = p.shape.D;
    const bool backward = codes.size() > p.out.size() + GUARD;
    const size_t heads = (size_t)(H + 2 * G);
    Floats found, right;
    for (size_t i = 0; i < expected.size(); i++) {
        const int head = (int)(i / (size_t)D % heads);
        if (backward && (head >= H) + (head >= H + G) != part) { continue; }
        found.push_back(bf16_decode(codes[i]));
        right.push_back(expected[i]);
    }
    CHECK_ERROR(found.data(), right.data(), (int64_t)found.size(), 0.003);
    found[found.size() / 2] += 16.0f; // planted: one wrong value
    CHECK(CAUGHT(CHECK_ERROR(found.data(), right.data(), (int64_t)found.size(), 0.003)));
}

static void check_pass(const Problem &p, bool backward) {
    const Result first = p.run(backward);
    for (int part = 0; part < (backward ? 3 : 1); part++) {
        check_part(p, first.first, backward ? p.expected : p.expected_out, part);
    }
    if (!backward) { CHECK_ERROR(first.second.data(), p.lse.data(), (int64_t)p.lse.size(), 1e-6); }
    for (int run = 0; run < runs(); run++) {
        const Result again = p.run(backward);
        CHECK_TEXT(machine.fault.c_str(), "");
        CHECK_BITS(again.first.data(), first.first.data(), first.first.size() * sizeof(Bf16));
        CHECK_EQUAL(std::count(again.first.end() - GUARD, again.first.end(), 0xffff), GUARD);
        if (backward) { continue; }
        CHECK_BITS(again.second.data(), first.second.data(), p.lse.size() * sizeof(float));
        CHECK(std::isnan(again.second[p.lse.size()]));
    }
}

// The kernels serve each of them forward, and those with as many groups as heads of 64, or with
// documents and heads of 128, backward.
TEST(passes) {
    static const Shape shapes[] = {{1, 100, 9, 9, 64, 4, NONE, 1},  {3, 17, 2, 2, 64, 1, NONE, 1},
                                   {1, 300, 3, 3, 64, 2, NONE, 1},  {2, 129, 1, 1, 64, 3, NONE, 1},
                                   {1, 640, 1, 1, 64, 4, NONE, 1},  {1, 320, 2, 2, 64, 2, NONE, 6},
                                   {2, 300, 3, 3, 64, 4, MANY, 1},  {1, 100, 3, 3, 64, 8, MANY, 6},
                                   {3, 640, 1, 1, 64, 2, MANY, 1},  {1, 640, 1, 1, 64, 5, MANY, 6},
                                   {1, 1, 1, 1, 128, 1, MANY, 1},   {3, 17, 2, 1, 128, 1, ONE, 1},
                                   {1, 100, 2, 1, 128, 3, ONE, 1},  {2, 300, 2, 1, 128, 3, MANY, 6},
                                   {1, 200, 8, 1, 128, 2, MANY, 1}, {1, 129, 2, 2, 128, 8, MANY, 1},
                                   {1, 321, 2, 1, 128, 1, ONE, 1},  {1, 450, 2, 1, 128, 2, ONE, 6},
                                   {2, 128, 1, 1, 128, 1, MANY, 1}, {1, 640, 1, 1, 128, 2, MANY, 1},
                                   {2, 200, 6, 2, 64, 3, NONE, 1},  {2, 300, 4, 1, 64, 2, MANY, 6},
                                   {1, 450, 4, 2, 128, 3, NONE, 6}, {2, 129, 2, 2, 128, 2, NONE, 1},
                                   {1, 17, 1, 1, 128, 2, NONE, 1}};
    int backward = 0;
    for (const Shape &s : shapes) {
        const Problem p = problem(s);
        CHECK(p.serves(false));
        check_pass(p, false);
        if (!p.serves(true)) { continue; }
        check_pass(p, true);
        backward++;
    }
    CHECK_EQUAL(backward, 20);
}

// Each warp stores results where its own rows of a WGMMA's operand have been. Here no other warp
// reads these; a GPU may.
static const std::vector<std::pair<std::string, std::string>> own_rows = {
    {"left out", "named barrier 1"},
    {"left out", "named barrier 2"},
    {"left out", "named barrier 3"}};

TEST(planted_faults) {
    // the turns order this, too
    static const std::vector<std::pair<std::string, std::string>> turns = {
        {"no wait", "&s.ds_full[i]"}};
    const Problem small(1, 300, 3, 3, 64, 1, MANY), large(1, 300, 4, 2, 128, 1, MANY),
        whole(1, 300, 4, 2, 128, 1, NONE);
    const auto forward = [](const Problem &p) {
        Result r = p.run(false);
        r.second.resize(p.lse.size()); // NaN would differ from itself
        return r;
    };
    check_faults({}, [&] { return forward(small); });
    check_faults(turns, [&] { return small.run(true); });
    check_faults(own_rows, [&] { return forward(large); });
    check_faults({}, [&] { return large.run(true); });
    check_faults(own_rows, [&] { return forward(whole); });
}
