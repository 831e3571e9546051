// The rotary frequencies against transformers' (test/golden/rope.safetensors, made by golden.py),
// and the table against the frequencies.
#include "../kernels/rope.h"
#include "fixture.h"
#include "golden.h"

enum { D = 64, HALF = D / 2, T = 300 };

static const struct {
    const char *name;
    Rope rope;
} rows[] = {
    {"default", {.theta = 10000}},
    {"large_theta", {.theta = 500000}},
    {"linear", {.theta = 10000, .scaling = ROPE_LINEAR, .factor = 4}},
    {"llama3_1", {500000, ROPE_LLAMA3, 8, 1, 4, 8192}},
    {"llama3_2", {500000, ROPE_LLAMA3, 32, 1, 4, 8192}},
    {"llama3_odd", {10000, ROPE_LLAMA3, 3, 0.5, 7, 1000}},
};

static void frequencies_of(double frequencies[HALF], const Rope *rope) {
    for (int i = 0; i < HALF; i++) { frequencies[i] = rope_frequency(i, D, rope); }
}

static void frequencies_are_transformers(void) {
    SafeTensors st = golden_open("rope.safetensors");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        double frequencies[HALF];
        frequencies_of(frequencies, &rows[i].rope);
        const float *expected = golden_data(&st, rows[i].name, DTYPE_F32, HALF);
        for (int j = 0; j < HALF; j++) { // theirs are computed in FP32
            CHECK_CLOSE(frequencies[j], expected[j], 2e-6 * expected[j]);
        }
        CHECK(CAUGHT(CHECK_CLOSE(frequencies[HALF - 1], 1.00001 * expected[HALF - 1],
                                 2e-6 * expected[HALF - 1])));
    }
    safetensors_close(&st);
}

static void scaling_changes_what_it_should(void) {
    double plain[HALF], scaled[HALF];
    frequencies_of(plain, &rows[1].rope);
    frequencies_of(scaled, &rows[3].rope);
    CHECK(scaled[0] == plain[0]);                              // turns often: left as it is
    CHECK_CLOSE(scaled[HALF - 1], plain[HALF - 1] / 8, 1e-20); // turns seldom: stretched
    int between = 0;
    for (int i = 0; i < HALF; i++) { between += scaled[i] < plain[i] && scaled[i] > plain[i] / 8; }
    CHECK(between > 0 && between < HALF);
}

static void the_table_follows_the_frequencies(void) {
    static float table[T * D];
    double frequencies[HALF];
    frequencies_of(frequencies, &rows[5].rope);
    rope_table(table, T, D, &rows[5].rope);
    for (int t = 0; t < T; t += 13) {
        for (int i = 0; i < HALF; i++) {
            CHECK_CLOSE(table[t * D + i], cos(t * frequencies[i]), 1e-7);
            CHECK_CLOSE(table[t * D + HALF + i], sin(t * frequencies[i]), 1e-7);
        }
    }
}

int main(void) {
    RUN(frequencies_are_transformers);
    RUN(scaling_changes_what_it_should);
    RUN(the_table_follows_the_frequencies);
    return test_summary();
}
