// Attention's kernels for Hopper on an emulated multiprocessor: against the definition, with any
// order of threads and asynchronous work; and with planted faults, each of which must be found.
#include "../attention_rows.h"

#include "faults.h"

// B, T, H, G, D, blocks, documents, size
typedef int Shape[8];

// documents: see starts_of. With 6 for `size` a row's weight is mostly on one key.
static AttentionCase case_of(const Shape &s) {
    gpu.sms = s[5];
    const AttentionShape shape = {s[0], s[1], s[2], s[3], s[4], true, NULL};
    return AttentionCase(shape, s[6], (float)s[7]);
}

static int runs(void) { // each in another order
    return getenv("RUNS") != NULL ? atoi(getenv("RUNS")) : 5;
}

// The kernels serve each of them forward, and those with as many groups as heads of 64, or with
// documents and heads of 128, backward, with the workspace that they ask for.
TEST(passes) {
    static const Shape shapes[] = {
        {1, 100, 9, 9, 64, 4, 0, 1},      {3, 17, 2, 2, 64, 1, 0, 1},
        {1, 300, 3, 3, 64, 2, 0, 1},      {2, 129, 1, 1, 64, 3, 0, 1},
        {1, 640, 1, 1, 64, 4, 0, 1},      {1, 320, 2, 2, 64, 2, 0, 6},
        {2, 300, 3, 3, 64, 4, TILES, 1},  {1, 100, 3, 3, 64, 8, 1, 6},
        {3, 640, 1, 1, 64, 2, 1, 1},      {1, 640, 1, 1, 64, 5, TILES, 6},
        {1, 1, 1, 1, 128, 1, 0, 1},       {1, 2, 1, 1, 128, 1, -2, 1},
        {3, 17, 2, 1, 128, 1, -17, 1},    {1, 100, 2, 1, 128, 3, -100, 1},
        {2, 300, 2, 1, 128, 3, TILES, 6}, {1, 200, 8, 1, 128, 2, 1, 1},
        {1, 129, 2, 2, 128, 8, TILES, 1}, {1, 321, 2, 1, 128, 1, -321, 1},
        {1, 450, 2, 1, 128, 2, -450, 6},  {2, 128, 1, 1, 128, 1, TILES, 1},
        {1, 640, 1, 1, 128, 2, TILES, 1}, {2, 200, 6, 2, 64, 3, 0, 1},
        {2, 300, 4, 1, 64, 2, 1, 6},      {1, 450, 4, 2, 128, 3, 0, 6},
        {2, 129, 2, 2, 128, 2, 0, 1},     {1, 17, 1, 1, 128, 2, 0, 1}};
    int backward = 0;
    for (const Shape &s : shapes) {
        const AttentionCase c = case_of(s);
        gpu.attention_bytes = attention_own_workspace(c.s);
        CHECK(attention_own_serves(&gpu, c.s, false));
        backward += check_passes(c, runs());
        CHECK_TEXT(machine.fault.c_str(), "");
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
    const AttentionCase small = case_of({1, 300, 3, 3, 64, 1, TILES, 1}),
                        whole = case_of({1, 300, 4, 2, 128, 1, 0, 1}),
                        large = case_of({1, 300, 4, 2, 128, 1, TILES, 1});
    gpu.attention_bytes = attention_own_workspace(small.s);
    check_faults({}, [&] { return run_pass(small, false, true); });
    check_faults(turns, [&] { return run_pass(small, true, true); });
    gpu.attention_bytes = attention_own_workspace(large.s);
    check_faults(own_rows, [&] { return run_pass(large, false, true); });
    check_faults({}, [&] { return run_pass(large, true, true); });
    check_faults(own_rows, [&] { return run_pass(whole, false, true); });
}

SETUP() {
    open_test_gpu(64 << 20);
}
