// The comparators of test.h, each with faults that it must catch and a case that it must pass.
#include "test.h"

static int missed;

// Counted here, since the comparators themselves are in doubt.
#define EXPECT(caught, check)                                                      \
    do {                                                                           \
        if (CAUGHT(check) != (caught)) {                                           \
            fprintf(stderr, "  %s %s\n", (caught) ? "passes:" : "fails:", #check); \
            missed++;                                                              \
        }                                                                          \
    } while (0)

static void comparators_catch_planted_faults_alone(void) {
    float ones[3] = {1, 1, 1}, off[3] = {1, 1, 1.01f}, near[3] = {1, 1, 1.00001f};
    float nan[3] = {1, NAN, 1};
    EXPECT(true, CHECK(1 == 2));
    EXPECT(true, CHECK(NAN <= 1.0));
    EXPECT(true, CHECK_EQUAL(1, 2));
    EXPECT(true, CHECK_TEXT("a", "b"));
    EXPECT(true, CHECK_CONTAINS("abc", "d"));
    EXPECT(true, CHECK_CLOSE(1.0, 1.1, 0.05));
    EXPECT(true, CHECK_CLOSE(NAN, 1.0, 1e30));
    EXPECT(true, CHECK_CLOSE(INFINITY, 1.0, 1e30));
    EXPECT(true, CHECK_ERROR(off, ones, 3, 1e-3));
    EXPECT(true, CHECK_ERROR(nan, ones, 3, 1e30));
    EXPECT(true, CHECK_BITS(off, ones, sizeof(ones)));
    EXPECT(false, CHECK(1 == 1));
    EXPECT(false, CHECK_EQUAL(2, 2));
    EXPECT(false, CHECK_TEXT("a", "a"));
    EXPECT(false, CHECK_CONTAINS("abc", "bc"));
    EXPECT(false, CHECK_CLOSE(1.0, 1.04, 0.05));
    EXPECT(false, CHECK_ERROR(near, ones, 3, 1e-4));
    EXPECT(false, CHECK_BITS(ones, ones, sizeof(ones)));
}

int main(void) {
    RUN(comparators_catch_planted_faults_alone);
    test_state.failed += missed;
    return test_summary();
}
