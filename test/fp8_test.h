// Shared by the tests of operands: a tensor in its three forms, and how its codes are checked.
#pragma once

#include "gpu_test.h"

static inline bool has_fp8(void) {
    return gpu.capability >= FP8_CAPABILITY;
}

// A tensor under test: poisoned outputs, one slot.
struct Quantised {
    int M, N;
    Fp8Type type;
    Bf16Buffer bf16;
    Buffer<uint8_t> fp8, fp8_t;
    Buffer<Fp8Scale> slot;
    FloatBuffer scales, scales_t;                // scales of blocks
    float scale, target = 0.75f * fp8_max(type); // not the largest: a margin is seen

    Quantised(int m, int n, Fp8Type t, float given_scale)
        : M(m), N(n), type(t), bf16((size_t)m * n), fp8((size_t)m * n), fp8_t((size_t)m * n),
          slot(1), scales(fp8_scale_count(SCALE_BLOCK_1X128, m, n)),
          scales_t(fp8_scale_count(SCALE_BLOCK_1X128, n, m)), scale(given_scale) {
        reset(0.0f, 1);
    }
    // count: of the slot's history; amax: as it was before
    void reset(float amax, int count) {
        Fp8Scale s = {1.0f / scale, scale, amax, count};
        slot.put(&s);
        bf16.poison();
        fp8.poison();
        fp8_t.poison();
        scales.poison();
        scales_t.poison();
    }
    // All its forms.
    Operand tensor(Scaling scaling, bool fused) const {
        Operand t = with_forms(given_tensor(type, slot.data), bf16.data, fp8.data, fp8_t.data);
        t.scaling = scaling;
        t.fused = fused;
        t.target = target;
        return t;
    }
    Operand blocks(Scaling kind, bool fused) const {
        Operand t = tensor(kind, fused);
        t.rows.inverse = scales.data;
        t.columns.inverse = scales_t.data;
        t.writes_amax = false;
        t.scale = NULL;
        t.power_of_two = true;
        return t;
    }
};

static inline uint32_t code_order(uint8_t code) { // codes as numbers that increase with the value
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

template <typename T> static std::vector<T> transposed(const std::vector<T> &rows, int M, int N) {
    std::vector<T> columns(rows.size());
    for (size_t i = 0; i < rows.size(); i++) { columns[i % N * M + i / N] = rows[i]; }
    return columns;
}

static inline void check_transpose(const Quantised &q) {
    CHECK(q.fp8_t.get() == transposed(q.fp8.get(), q.M, q.N));
}

// A tensor quantised by a given scale, and its amax in the slot. exact: the values
// are known to the last bit, so the codes must be exact too, and the amax.
static inline void check_given(const Quantised &q, const Floats &expected, bool exact) {
    int differ = check_codes(q.fp8.get(), expected, q.scale, q.type, exact ? 0 : 1);
    CHECK(differ <= (int)(expected.size() / 50)); // rounding differs rarely
    check_transpose(q);
    float amax = tensor_amax(expected.data(), (int64_t)expected.size());
    CHECK_CLOSE(q.slot.get()[0].amax, amax, exact ? 0.0 : 1e-4 * amax);
}

// A tensor quantised by its measured amax.
static inline void check_measured(const Quantised &q, const Floats &values) {
    float amax = tensor_amax(values.data(), (int64_t)values.size());
    float scale = fp8_scale(amax, q.target, 1.0f);
    Fp8Scale slot = q.slot.get()[0];
    CHECK_CLOSE(slot.amax, amax, 0.0);
    CHECK_CLOSE(slot.scale, scale, 0.0);
    CHECK_CLOSE(slot.scale_inv, 1.0f / scale, 0.0);
    CHECK_EQUAL(check_codes(q.fp8.get(), values, scale, q.type, 0), 0);
    check_transpose(q);
}

// One form, [rows,k], of a tensor quantised by blocks. exact: the values are known to the last bit.
// Otherwise each decoded value may differ by the format's rounding, and by what a fused kernel's
// FP32 may differ: for a softmax minus one, the rounding error is the one's.
static inline void check_blocks_of(const Codes &codes, const Floats &inverse, const Floats &values,
                                   int rows, int k, const Quantised &q, Scaling kind, bool exact) {
    const Fp8Type type = q.type;
    int height = kind == SCALE_BLOCK_128X128 ? FP8_BLOCK : 1;
    double relative = type == FP8_E4M3 ? 0.0625 : 0.125, smallest = type == FP8_E4M3 ? 5e-6 : 1e-9;
    float whole = tensor_amax(values.data(), (int64_t)values.size());
    for (int top = 0; top < rows; top += height) {
        for (int left = 0; left < k; left += FP8_BLOCK) {
            int bottom = std::min(rows, top + height), right = std::min(k, left + FP8_BLOCK);
            float amax = 0.0f, found = inverse[fp8_scale_index(kind, rows, k, top, left)];
            for (int i = top; i < bottom; i++) {
                float range = tensor_amax(&values[(size_t)i * k + left], right - left);
                amax = range > amax || range != range ? range : amax;
            }
            float scale = fp8_block_scale(amax, q.target, true);
            if (exact && !(found == 1.0f / scale)) {
                test_fail(__FILE__, __LINE__, "block at %d, %d: inverse scale %g, not %g", top,
                          left, found, 1.0f / scale);
                return;
            }
            for (int i = top; i < bottom; i++) {
                for (int j = left; j < right; j++) {
                    uint8_t code = codes[(size_t)i * k + j];
                    float x = values[(size_t)i * k + j], back = fp8_decode(code, type) * found;
                    double most = relative * 1.05 * fabs(x) + smallest * amax + 1e-5 * whole;
                    bool right_code = exact ? code == fp8_encode(x * scale, type)
                                            : fabs(back - x) <= most;
                    if (!right_code) {
                        test_fail(__FILE__, __LINE__, "at %d, %d: code %02x for %g, scale %g", i, j,
                                  code, x, scale);
                        return;
                    }
                }
            }
        }
    }
}

static inline void check_blocks(const Quantised &q, const Floats &values, Scaling kind,
                                bool exact) {
    check_blocks_of(q.fp8.get(), q.scales.get(), values, q.M, q.N, q, kind, exact);
    check_blocks_of(q.fp8_t.get(), q.scales_t.get(), transposed(values, q.M, q.N), q.N, q.M, q,
                    kind, exact);
}
