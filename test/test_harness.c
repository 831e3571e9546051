// Tests the checks of test.h: each has a fault that it must catch, and a case that it must pass.
#include "test.h"

static void expect(bool right, const char *what) {
    if (!right) {
        fprintf(stderr, "  %s\n", what);
        test_state.failing = true;
    }
}

TEST(comparators_catch_planted_faults) {
    float ones[3] = {1, 1, 1}, off[3] = {1, 1, 1.01f}, nan[3] = {1, NAN, 1};
    expect(CAUGHT(CHECK(1 == 2)), "CHECK passed a falsehood");
    expect(CAUGHT(CHECK(NAN <= 1.0)), "CHECK passed a comparison with NaN");
    expect(CAUGHT(CHECK_EQUAL(1, 2)), "CHECK_EQUAL passed 1 for 2");
    expect(CAUGHT(CHECK_TEXT("a", "b")), "CHECK_TEXT passed a for b");
    expect(CAUGHT(CHECK_CONTAINS("abc", "d")), "CHECK_CONTAINS found d in abc");
    expect(CAUGHT(CHECK_CLOSE(1.0, 1.1, 0.05)), "CHECK_CLOSE passed 1.0 for 1.1");
    expect(CAUGHT(CHECK_CLOSE(NAN, 1.0, 1e30)), "CHECK_CLOSE passed NaN");
    expect(CAUGHT(CHECK_CLOSE(INFINITY, 1.0, 1e30)), "CHECK_CLOSE passed infinity");
    expect(CAUGHT(CHECK_ERROR(off, ones, 3, 1e-3)), "CHECK_ERROR passed a wrong element");
    expect(CAUGHT(CHECK_ERROR(nan, ones, 3, 1e30)), "CHECK_ERROR passed NaN");
    expect(CAUGHT(CHECK_BITS(off, ones, sizeof(ones))), "CHECK_BITS passed other bits");
}

TEST(comparators_pass_what_is_right) {
    float ones[3] = {1, 1, 1}, near[3] = {1, 1, 1.00001f};
    expect(!CAUGHT(CHECK(1 == 1)), "CHECK");
    expect(!CAUGHT(CHECK_EQUAL(2, 2)), "CHECK_EQUAL");
    expect(!CAUGHT(CHECK_TEXT("a", "a")), "CHECK_TEXT");
    expect(!CAUGHT(CHECK_CONTAINS("abc", "bc")), "CHECK_CONTAINS");
    expect(!CAUGHT(CHECK_CLOSE(1.0, 1.04, 0.05)), "CHECK_CLOSE");
    expect(!CAUGHT(CHECK_ERROR(near, ones, 3, 1e-4)), "CHECK_ERROR");
    expect(!CAUGHT(CHECK_BITS(ones, ones, sizeof(ones))), "CHECK_BITS");
}
