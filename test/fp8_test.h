// What the tests of kernels that write FP8 share.
#ifndef LLM8_FP8_TEST_H
#define LLM8_FP8_TEST_H

#include "../kernels/fp8.h"
#include "gpu_test.h"

typedef std::vector<uint8_t> Codes;

// A quantised tensor under test: poisoned outputs, one slot, one live entry.
struct Quantised {
    int M, N;
    Fp8Type type;
    Buffer<uint8_t> rows, columns;
    Buffer<Fp8Live> live;
    Buffer<Fp8Slot> slot;
    float scale;

    Quantised(int m, int n, Fp8Type t, float given_scale)
        : M(m), N(n), type(t), rows((size_t)m * n), columns((size_t)m * n), live(1), slot(1),
          scale(given_scale) {
        reset(0.0f, 1);
    }
    // count: of the slot's history; the live range as a producer would have left it
    void reset(float measured, int count) {
        Fp8Live l = {1.0f / scale, scale, measured, 0.0f};
        Fp8Slot s = {1.0f / scale, scale, 0.0f, count};
        live.put(&l);
        slot.put(&s);
        rows.poison();
        columns.poison();
    }
    Fp8Out out() {
        return {rows.data, columns.data, type, fp8_max(type), live.data, slot.data, true};
    }
};

static inline uint32_t code_order(uint8_t code) { // codes as numbers that grow with the value
    return code & 0x80 ? 0x80u - (code & 0x7f) : 0x80u + code;
}

// Codes against the values that were to be quantised; returns how many differ at all.
static inline int check_codes(const Codes &codes, const Floats &values, float scale, Fp8Type type,
                              int apart) {
    int differ = 0;
    for (size_t i = 0; i < values.size(); i++) {
        uint8_t expected = fp8_encode(values[i] * scale, type);
        uint32_t a = code_order(codes[i]), b = code_order(expected);
        differ += codes[i] != expected;
        if (!((a > b ? a - b : b - a) <= (uint32_t)apart)) {
            test_fail(__FILE__, __LINE__, "element %zu: code %02x for %g, not %02x", i, codes[i],
                      values[i], expected);
            break;
        }
    }
    return differ;
}

static inline void check_transpose(Quantised &q) {
    Codes rows = q.rows.get(), columns = q.columns.get(), turned(rows.size());
    for (int i = 0; i < q.M; i++) {
        for (int j = 0; j < q.N; j++) { turned[(size_t)j * q.M + i] = rows[(size_t)i * q.N + j]; }
    }
    CHECK(columns == turned);
}

// A tensor quantised by a given scale, and its range in the slot. exact: the values are those of
// cpu.c to the last bit, so the codes must be too, and the range.
static inline void check_given(Quantised &q, const Floats &expected, bool exact) {
    int differ = check_codes(q.rows.get(), expected, q.scale, q.type, exact ? 0 : 1);
    CHECK(differ <= (int)(expected.size() / 50)); // rounding differs rarely
    check_transpose(q);
    float amax = tensor_amax(expected.data(), (int64_t)expected.size());
    CHECK_CLOSE(q.slot.get()[0].amax, amax, exact ? 0.0 : 1e-4 * amax);
}

#endif
