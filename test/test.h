// A test program consists of TEST(name) { ... }, which run in the order of the file. A test fails
// if one of its checks fails, and prints which. SETUP() { ... } runs before all tests. Comparisons
// are written so that NaN fails; test_harness.c checks each of them with a planted fault. A program
// with its own main() defines TEST_OWN_MAIN first.
#pragma once

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    int passed, failed, skipped;
    bool failing, skipping; // whether the running test fails, skips
    bool quiet;             // a failure is expected (CAUGHT), and not shown
    FILE *out;              // where tests print; NULL: stdout
    void (*setup)(void);
    int count;
    struct {
        const char *name;
        void (*run)(void);
    } tests[64];
} test_state;

__attribute__((format(printf, 3, 4))) static inline void test_fail(const char *file, int line,
                                                                   const char *format, ...) {
    test_state.failing = true;
    if (test_state.quiet) { return; }
    va_list args;
    va_start(args, format);
    fprintf(stderr, "  %s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

static inline bool test_close(double actual, double expected, double tolerance) {
    return fabs(actual - expected) <= tolerance;
}

// ||actual - expected|| / ||expected||, in double; NaN if any value is NaN.
static inline double test_relative_error(const float *actual, const float *expected, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)actual[i] - expected[i];
        difference += d * d;
        size += (double)expected[i] * expected[i];
    }
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) { test_fail(__FILE__, __LINE__, "not: %s", #condition); } \
    } while (0)

#define CHECK_EQUAL(actual, expected)                                               \
    do {                                                                            \
        long long a_ = (long long)(actual), e_ = (long long)(expected);             \
        if (!(a_ == e_)) {                                                          \
            test_fail(__FILE__, __LINE__, "%s is %lld, not %lld", #actual, a_, e_); \
        }                                                                           \
    } while (0)

#define CHECK_TEXT(actual, expected)                                                    \
    do {                                                                                \
        const char *a_ = (actual), *e_ = (expected);                                    \
        if (!(strcmp(a_, e_) == 0)) {                                                   \
            test_fail(__FILE__, __LINE__, "%s is \"%s\", not \"%s\"", #actual, a_, e_); \
        }                                                                               \
    } while (0)

#define CHECK_CONTAINS(text, part)                                                        \
    do {                                                                                  \
        const char *a_ = (text), *e_ = (part);                                            \
        if (!(strstr(a_, e_) != NULL)) {                                                  \
            test_fail(__FILE__, __LINE__, "%s is \"%s\", without \"%s\"", #text, a_, e_); \
        }                                                                                 \
    } while (0)

#define CHECK_CLOSE(actual, expected, tolerance)                                               \
    do {                                                                                       \
        double a_ = (actual), e_ = (expected), t_ = (tolerance);                               \
        if (!test_close(a_, e_, t_)) {                                                         \
            test_fail(__FILE__, __LINE__, "%s is %.9g, not %.9g within %.3g", #actual, a_, e_, \
                      t_);                                                                     \
        }                                                                                      \
    } while (0)

// Compares arrays of floats by test_relative_error.
#define CHECK_ERROR(actual, expected, n, tolerance)                                              \
    do {                                                                                         \
        double error_ = test_relative_error(actual, expected, n), t_ = (tolerance);              \
        if (!(error_ <= t_)) {                                                                   \
            test_fail(__FILE__, __LINE__, "%s differs from %s by %.3g, more than %.3g", #actual, \
                      #expected, error_, t_);                                                    \
        }                                                                                        \
    } while (0)

// Compares memory bit by bit.
#define CHECK_BITS(actual, expected, bytes)                                               \
    do {                                                                                  \
        const unsigned char *a_ = (const unsigned char *)(const void *)(actual);          \
        const unsigned char *e_ = (const unsigned char *)(const void *)(expected);        \
        size_t n_ = (size_t)(bytes), at_ = 0;                                             \
        while (at_ < n_ && a_[at_] == e_[at_]) { at_++; }                                 \
        if (!(at_ == n_)) {                                                               \
            test_fail(__FILE__, __LINE__, "%s and %s differ at byte %zu of %zu", #actual, \
                      #expected, at_, n_);                                                \
        }                                                                                 \
    } while (0)

// Whether a check fails. For planted faults: the check prints nothing and the test does not fail.
#define CAUGHT(check)                                           \
    ({                                                          \
        bool before_ = test_state.failing;                      \
        test_state.failing = false, test_state.quiet = true;    \
        check;                                                  \
        bool caught_ = test_state.failing;                      \
        test_state.failing = before_, test_state.quiet = false; \
        caught_;                                                \
    })

// COUNT is the number of elements of an array; EACH is a loop over pointers to them.
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
#define EACH(row, array) \
    for (__typeof__(&(array)[0]) row = (array); row < (array) + COUNT(array); row++)

// A row of many tables: an input, and what must result from it.
typedef struct {
    const char *given, *expected;
} Says;

static inline FILE *test_out(void) {
    return test_state.out != NULL ? test_state.out : stdout;
}

static inline void test_skip(const char *why) {
    test_state.skipping = true;
    fprintf(test_out(), "  skipped: %s\n", why);
}

// Ends a program whose tests cannot run here; it counts as one skipped test.
static inline void test_skip_all(const char *why) {
    fprintf(test_out(), "  skipped: %s\n0 passed, 0 failed, 1 skipped\n", why);
    exit(EXIT_SUCCESS);
}

static inline void test_add(const char *name, void (*run)(void)) {
    test_state.tests[test_state.count].name = name;
    test_state.tests[test_state.count++].run = run;
}

// Stands for the head of a function; `before` runs before main().
#define TEST_HEAD(name, before)                                         \
    static void name(void);                                             \
    __attribute__((constructor)) static void name##_stands_here(void) { \
        before;                                                         \
    }                                                                   \
    static void name(void)
#define TEST(name) TEST_HEAD(name, test_add(#name, name))
#define SETUP() TEST_HEAD(test_setup, test_state.setup = test_setup)

// Runs all tests, or those whose names contain LLM8_TEST, and prints the counts, which test/run.sh
// adds up.
static inline int run_tests(void) {
    const char *only = getenv("LLM8_TEST");
    if (test_state.setup != NULL) { test_state.setup(); }
    for (int i = 0; i < test_state.count; i++) {
        if (only != NULL && strstr(test_state.tests[i].name, only) == NULL) { continue; }
        test_state.failing = test_state.skipping = false;
        test_state.tests[i].run();
        if (test_state.failing) { fprintf(stderr, "  FAILED %s\n", test_state.tests[i].name); }
        ++*(test_state.failing    ? &test_state.failed
            : test_state.skipping ? &test_state.skipped
                                  : &test_state.passed);
    }
    fflush(stderr);
    fprintf(test_out(), "%d passed, %d failed, %d skipped\n", test_state.passed, test_state.failed,
            test_state.skipped);
    return test_state.failed > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

#ifndef TEST_OWN_MAIN
int main(void) {
    return run_tests();
}
#endif
