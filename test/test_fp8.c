// Compares E4M3, E5M2 and BF16 with ml_dtypes (test/golden/fp8.safetensors) and with a search for
// the nearest value; then tests the rule for scales, blocks against numpy and ml_dtypes
// (test/golden/blocks.safetensors), and the slots.
//
// Our rounding differs from ml_dtypes on purpose: a finite value above the largest one becomes that
// one (in ml_dtypes NaN in E4M3, infinity in E5M2), and every infinity and NaN becomes 0x7f
// (ml_dtypes keeps infinities in E5M2 and the sign of a NaN, which it makes 0x7e in E5M2).
#include "../kernels/cpu.h"
#include "golden.h"
#include "test.h"

enum { CODES = 256, BF16_CODES = 65536, BF16_NAN = 0x7f80 };

static const Fp8Type types[] = {FP8_E4M3, FP8_E5M2};

static struct {
    const float *values;        // [CODES]
    const unsigned char *codes; // [BF16_CODES]
    int largest;                // code of the largest finite value
} golden[2];

static bool same_float(float a, float b) {
    return float_bits(a) == float_bits(b) || (isnan(a) && isnan(b));
}

// ---- the codes --------------------------------------------------------------------------------

static int decode_errors(const float *values, Fp8Type type) {
    int errors = 0;
    for (int c = 0; c < CODES; c++) {
        float x = fp8_decode((uint8_t)c, type);
        errors += !same_float(x, values[c]) || !!signbit(x) != c >> 7;
    }
    return errors;
}

TEST(decodes_every_code) {
    for (int f = 0; f < 2; f++) {
        float wrong[CODES];
        CHECK_EQUAL(decode_errors(golden[f].values, types[f]), 0);
        CHECK(golden[f].values[golden[f].largest] == fp8_max(types[f]));
        memcpy(wrong, golden[f].values, sizeof(wrong));
        wrong[0x80] = 0.0f; // loses the sign of -0
        wrong[0x31] = nextafterf(wrong[0x31], 1e30f);
        wrong[0x7f] = 480.0f;
        CHECK_EQUAL(decode_errors(wrong, types[f]), 3);
    }
}

// The code of ml_dtypes for x, changed where ours differs.
static int expected_code(int code, float x, int f) {
    if (!isfinite(x)) { return 0x7f; }
    return (code & 0x7f) > golden[f].largest ? (code & 0x80) | golden[f].largest : code;
}

static int encode_errors(const unsigned char *codes, int f) {
    int errors = 0;
    for (int b = 0; b < BF16_CODES; b++) {
        float x = bf16_decode((uint16_t)b);
        errors += fp8_encode(x, types[f]) != expected_code(codes[b], x, f);
    }
    return errors;
}

TEST(encodes_every_bf16_value) {
    for (int f = 0; f < 2; f++) {
        unsigned char wrong[BF16_CODES];
        CHECK_EQUAL(encode_errors(golden[f].codes, f), 0);
        memcpy(wrong, golden[f].codes, sizeof(wrong));
        wrong[bf16_encode(1.0f)] ^= 1;
        wrong[bf16_encode(-0.0f)] = 0;
        CHECK_EQUAL(encode_errors(wrong, f), 2);
    }
}

// ---- arbitrary FP32 inputs --------------------------------------------------------------------

// Searches the codes with x's sign for the one nearest to x; of two that are equally near, the even
// one.
static int nearest_code(float x, int f) {
    if (!isfinite(x)) { return 0x7f; }
    int best = 0;
    double wanted = fmin(fabs((double)x), fp8_max(types[f])), distance = INFINITY;
    for (int c = 0; c <= golden[f].largest; c++) {
        double d = fabs(golden[f].values[c] - wanted);
        if (d < distance || (d == distance && c % 2 == 0)) { best = c, distance = d; }
    }
    return signbit(x) ? best | 0x80 : best;
}

static bool rounds_right(float x, int code, int f) {
    float decoded = fp8_decode((uint8_t)code, types[f]), rounded = fp8_round(x, types[f]);
    return fp8_encode(x, types[f]) == code && same_float(rounded, decoded);
}

TEST(rounds_any_float_to_the_nearest) {
    int errors = 0;
    for (int i = 0; i < 400000; i++) {
        // half of them have any bits, half are within the formats' range
        float x = float_from_bits((uint32_t)rng_bits(1, (uint64_t)i));
        if (i % 2) {
            x = ldexpf(rng_normal(2, (uint64_t)i), (int)(rng_bits(3, (uint64_t)i) % 36) - 18);
        }
        for (int f = 0; f < 2; f++) { errors += !rounds_right(x, nearest_code(x, f), f); }
    }
    CHECK_EQUAL(errors, 0);
    CHECK(!rounds_right(1.0f, nearest_code(1.0f, 0) + 1, 0));
    CHECK(!rounds_right(-0.0f, 0, 0));
}

// All floats at which the code changes.
TEST(ties_go_to_even) {
    for (int f = 0; f < 2; f++) {
        for (int c = 0; c < golden[f].largest; c++) {
            float low = golden[f].values[c], high = golden[f].values[c + 1];
            float tie = 0.5f * (low + high);
            for (int sign = 0; sign < 2; sign++) {
                float s = sign ? -1.0f : 1.0f;
                CHECK(rounds_right(s * tie, (c + c % 2) | sign << 7, f));
                CHECK(rounds_right(s * nextafterf(tie, low), c | sign << 7, f));
                CHECK(rounds_right(s * nextafterf(tie, high), (c + 1) | sign << 7, f));
            }
        }
    }
}

// ---- BF16 -------------------------------------------------------------------------------------

static uint16_t nearest_bf16(float x) {
    uint16_t down = (uint16_t)(float_bits(x) >> 16);
    if (isnan(x)) { return down | 0x40; }
    if (isinf(x)) { return down; }
    uint16_t up = (uint16_t)(down + 1); // away from zero
    bool overflows = (up & 0x7fff) == BF16_NAN;
    double a = fabs(bf16_decode(down)), b = overflows ? 0x1p128 : fabs(bf16_decode(up));
    double below = fabs((double)x) - a, above = b - fabs((double)x);
    if (below == above) { return down % 2 == 0 ? down : up; }
    return below < above ? down : up;
}

TEST(bf16_rounds_to_the_nearest) {
    int errors = 0;
    for (uint32_t b = 0; b < BF16_CODES; b++) {
        static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff}; // 0x8000: the tie
        for (int i = 0; i < 7; i++) {
            uint32_t bits = b << 16 | (i < 6 ? low[i] : (uint32_t)rng_bits(4, b) & 0xffff);
            float x = float_from_bits(bits), once = bf16_decode(bf16_encode(x));
            errors += bf16_encode(x) != nearest_bf16(x);
            errors += isnan(once) != isnan(x) || signbit(once) != signbit(x);
        }
        bool nan = (b & 0x7fff) > BF16_NAN;
        errors += bf16_encode(bf16_decode((uint16_t)b)) != (nan ? b | 0x40 : b);
    }
    CHECK_EQUAL(errors, 0);
    CHECK_EQUAL(bf16_encode(FLT_MAX), BF16_NAN);
    CHECK_EQUAL(nearest_bf16(1.0f + 0x1p-8f), 0x3f80); // a tie, to even
    CHECK_EQUAL(nearest_bf16(1.0f + 0x3p-8f), 0x3f82);
}

// ---- arrays -----------------------------------------------------------------------------------

TEST(rounds_arrays_as_elements) {
    enum { N = 1003 };
    float x[N], out[N];
    fill_random(x, N, 40.0f, 5);
    x[7] = NAN, x[8] = INFINITY, x[9] = -INFINITY, x[10] = -0.0f, x[11] = 1e-42f;
    for (int f = 0; f < 2; f++) {
        const float scale = 3.3f;
        int errors = 0;
        round_to_fp8(out, x, N, scale, types[f]);
        for (int i = 0; i < N; i++) {
            volatile float scaled = x[i] * scale; // rounded once, even if the compiler fuses
            errors += !same_float(out[i], fp8_round(scaled, types[f]));
        }
        CHECK_EQUAL(errors, 0);
    }
    int errors = 0;
    round_to_bf16(out, x, N);
    for (int i = 0; i < N; i++) { errors += !same_float(out[i], bf16_decode(bf16_encode(x[i]))); }
    CHECK_EQUAL(errors, 0);
    out[3] = nextafterf(out[3], 0.0f);
    CHECK(!same_float(out[3], bf16_decode(bf16_encode(x[3]))));
}

// ---- the scale --------------------------------------------------------------------------------

TEST(scale_follows_amax) {
    CHECK(fp8_target(FP8_E4M3, 0) == 448.0f);
    CHECK(fp8_target(FP8_E5M2, 0) == 57344.0f);
    CHECK(fp8_target(FP8_E4M3, 1) == 224.0f);
    CHECK(fp8_target(FP8_E5M2, 3) == 7168.0f);
    CHECK(fp8_target(FP8_E4M3, -2) == 1792.0f);
    CHECK(fp8_target(FP8_E4M3, 32) == 448.0f * 0x1p-32f);
    CHECK(fp8_target(FP8_E5M2, -32) == 57344.0f * 0x1p32f);
    CHECK(fp8_scale(2.0f, 448.0f, 9.0f) == 224.0f);
    CHECK(fp8_scale(448.0f, 448.0f, 9.0f) == 1.0f);
    CHECK(fp8_scale(3.0f, 224.0f, 9.0f) == 224.0f / 3.0f);
    static const float bad[] = {0.0f, -0.0f, -1.0f, INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 6; i++) { CHECK(fp8_scale(bad[i], 448.0f, 9.0f) == 9.0f); }
    // if the quotient is no normal number, the scale is the nearest normal number
    CHECK(fp8_scale(1e-45f, 448.0f, 9.0f) == FLT_MAX);
    CHECK(fp8_scale(FLT_MIN, 57344.0f, 9.0f) == FLT_MAX);
    CHECK(fp8_scale(FLT_MAX, 448.0f, 9.0f) == 448.0f / FLT_MAX);
    CHECK(fp8_scale(FLT_MAX, fp8_target(FP8_E4M3, 32), 9.0f) == FLT_MIN);
}

// ---- blocks -----------------------------------------------------------------------------------

enum { MOST = 144 * 144 };

static const struct { int rows, columns; } shapes[] = {{144, 144}, {3, 129}, {130, 5}, {1, 1}};

static const struct {
    const char *name;
    Fp8Type type;
    bool power_of_two;
} kinds[] = {{"e4m3", FP8_E4M3, true}, {"e5m2", FP8_E5M2, true}, {"e4m3_fp32_scales", FP8_E4M3, 0}};

// How a tensor is cut into blocks. columns: the operand is the transpose.
static const struct {
    const char *name;
    Scaling scaling;
    int height, width;
} forms[] = {{"rows", SCALE_BLOCK_1X128, 1, FP8_BLOCK},
             {"columns", SCALE_BLOCK_1X128, FP8_BLOCK, 1},
             {"squares", SCALE_BLOCK_128X128, FP8_BLOCK, FP8_BLOCK}};

// One tensor in one form, with the reference's results.
typedef struct {
    Fp8Blocks blocks;
    Scaling scaling;
    const float *x, *inverse;   // the values; the operand's inverse scales, by fp8_scale_index
    const unsigned char *codes; // codes of the operand
} Reference;

// Checks the rounded values, by the reference's codes and the index of each scale, and the counts.
static int block_errors(const Reference *r, const float *rounded, const Fp8Counts *counts) {
    Fp8Blocks b = r->blocks;
    Fp8Counts right_counts = {0};
    bool transposed = b.width == 1;
    int errors = 0, rows = transposed ? b.columns : b.rows, k = transposed ? b.rows : b.columns;
    for (int at = 0; at < rows * k; at++) {
        int row = at / k, column = at % k;
        float inverse = r->inverse[fp8_scale_index(r->scaling, rows, k, row, column)],
              value = fp8_decode(r->codes[at], b.type), size = fabsf(value);
        errors += !same_float(rounded[transposed ? column * rows + row : at], value * inverse);
        right_counts.elements++;
        right_counts.largest += size == fp8_max(b.type);
        right_counts.zero += size == 0.0f;
        right_counts.subnormal += size > 0.0f && size < (b.type == FP8_E4M3 ? 0x1p-6f : 0x1p-14f);
    }
    return errors + !!memcmp(counts, &right_counts, sizeof(right_counts));
}

// Checks the codes of squares, their factors, which are the inverse scales but for their rounding,
// and that what both stand for has the same codes and factors.
static int square_errors(const Reference *r) {
    static uint8_t codes[2][MOST];
    static float factors[2][4], rounded[MOST], back[MOST];
    Fp8Blocks b = r->blocks;
    int errors = 0, across = (b.columns + FP8_BLOCK - 1) / FP8_BLOCK, n = b.rows * b.columns;
    int squares = across * ((b.rows + FP8_BLOCK - 1) / FP8_BLOCK);
    b.codes = codes[0];
    b.factors = factors[0];
    round_blocks_to_fp8(rounded, r->x, b, NULL);
    for (int i = 0; i < n; i++) {
        int row = i / b.columns, column = i % b.columns;
        float factor = b.factors[row / FP8_BLOCK * across + column / FP8_BLOCK];
        float inverse = r->inverse[fp8_scale_index(r->scaling, b.rows, b.columns, row, column)];
        errors += b.codes[i] != r->codes[i] || !(fabsf(factor / inverse - 1.0f) < 0x1p-22f);
        back[i] = fp8_decode(b.codes[i], FP8_E4M3) * factor;
    }
    b.codes = codes[1];
    b.factors = factors[1];
    round_blocks_to_fp8(back, back, b, NULL);
    return errors + !!memcmp(codes[0], codes[1], (size_t)n) +
           !!memcmp(factors[0], factors[1], (size_t)squares * sizeof(float));
}

TEST(blocks_are_the_references) {
    CLOSED(safetensors_close) SafeTensors file = golden_open("blocks.safetensors");
    static float rounded[MOST], other[MOST];
    int squares = 0;
    for (int i = 0; i < 4 * 3 * 3; i++) {
        int s = i / 9, k = i / 3 % 3, f = i % 3, n = shapes[s].rows * shapes[s].columns;
        bool transposed = forms[f].width == 1;
        Reference r = {.blocks = {shapes[s].rows, shapes[s].columns, forms[f].height,
                                  forms[f].width, kinds[k].type, kinds[k].power_of_two},
                       .scaling = forms[f].scaling};
        Fp8Counts counts = {0};
        char name[64];
        snprintf(name, sizeof(name), "%dx%d.x", shapes[s].rows, shapes[s].columns);
        r.x = golden_data(&file, name, DTYPE_F32, n);
        snprintf(name, sizeof(name), "%dx%d.%s.%s.codes", shapes[s].rows, shapes[s].columns,
                 kinds[k].name, forms[f].name);
        r.codes = golden_data(&file, name, DTYPE_U8, n);
        strcpy(strrchr(name, '.'), ".scales");
        r.inverse = golden_data(&file, name, DTYPE_F32,
                                transposed
                                    ? fp8_scale_count(r.scaling, r.blocks.columns, r.blocks.rows)
                                    : fp8_scale_count(r.scaling, r.blocks.rows, r.blocks.columns));
        round_blocks_to_fp8(rounded, r.x, r.blocks, &counts);
        CHECK_EQUAL(block_errors(&r, rounded, &counts), 0);
        memcpy(other, r.x, (size_t)n * sizeof(float)); // again, in place and without counts
        round_blocks_to_fp8(other, other, r.blocks, NULL);
        CHECK_BITS(other, rounded, (size_t)n * sizeof(float));
        if (forms[f].scaling == SCALE_BLOCK_128X128 && r.blocks.type == FP8_E4M3 &&
            !r.blocks.power_of_two) {
            CHECK_EQUAL(square_errors(&r), 0);
            squares++;
        }
        other[n / 2] += 1.0f;
        CHECK_EQUAL(block_errors(&r, other, &counts), 1);
        counts.zero++;
        CHECK_EQUAL(block_errors(&r, rounded, &counts), 1);
        r.blocks.type = r.blocks.type == FP8_E4M3 ? FP8_E5M2 : FP8_E4M3;
        CHECK(block_errors(&r, rounded, &counts) > n / 2);
    }
    CHECK_EQUAL(squares, 4);
}

TEST(block_scales_are_powers_of_two) {
    for (int exponent = -140; exponent < 128; exponent++) {
        for (int f = 0; f < 2; f++) {
            float amax = ldexpf(1.0f + rng_uniform(9, (uint64_t)(exponent + 200)), exponent);
            float exact = fp8_block_scale(amax, fp8_max(types[f]), false);
            float scale = fp8_block_scale(amax, fp8_max(types[f]), true);
            int power;
            CHECK(exact == fp8_scale(amax, fp8_max(types[f]), 1.0f));
            CHECK(frexpf(scale, &power) == 0.5f && scale <= exact && 2 * scale > exact);
            CHECK(amax * scale <= fp8_max(types[f]) && 1.0f / (1.0f / scale) == scale);
        }
    }
    static const float bad[] = {0.0f, INFINITY, NAN};
    for (int i = 0; i < 3; i++) { CHECK(fp8_block_scale(bad[i], 448.0f, i % 2) == 1.0f); }
}

// ---- the slots --------------------------------------------------------------------------------

// Compares one slot over many steps with a list of all finite amaxes so far.
static int slot_errors(int length, float fault) {
    enum { STEPS = 60 };
    static const float bad[] = {0.0f, -0.0f, NAN, INFINITY};
    Fp8Scale slot = {.scale = 1.0f, .scale_inv = 1.0f};
    float history[STEPS] = {0}, good[STEPS], scale = 1.0f;
    int count = 0, errors = 0;
    for (int step = 1; step <= STEPS; step++) {
        uint64_t dice = rng_bits(7, (uint64_t)(step * 100 + length));
        bool is_bad = dice % 4 == 0;
        slot.amax = is_bad ? bad[dice / 4 % 4] : 0.1f + rng_uniform(8, dice);
        if (!is_bad) {
            good[count++] = slot.amax;
            float largest = slot.amax;
            for (int i = count - length < 0 ? 0 : count - length; i < count; i++) {
                largest = fmaxf(largest, good[i]);
            }
            scale = 448.0f / (largest + fault);
        }
        fp8_scale_update(&slot, history, length, 448.0f);
        errors += slot.scale != scale || slot.scale_inv != 1.0f / scale;
        errors += slot.count != count || slot.amax != 0.0f;
    }
    for (int i = length; i < STEPS; i++) { errors += history[i] != 0.0f; }
    return errors;
}

TEST(scales_are_updated_from_their_history) {
    static const int lengths[] = {1, 2, 3, 16, 59};
    // cuBLASLt reads scale_inv directly, and needs it aligned to 16 bytes
    CHECK_EQUAL(sizeof(Fp8Scale), 16);
    CHECK_EQUAL(offsetof(Fp8Scale, scale_inv), 0);
    for (int l = 0; l < 5; l++) { CHECK_EQUAL(slot_errors(lengths[l], 0.0f), 0); }
    CHECK(slot_errors(3, 1e-3f) > 0);
}

SETUP() {
    static SafeTensors file;
    file = golden_open("fp8.safetensors");
    golden[0].values = golden_data(&file, "e4m3.values", DTYPE_F32, CODES);
    golden[0].codes = golden_data(&file, "e4m3.codes", DTYPE_U8, BF16_CODES);
    golden[0].largest = 0x7e;
    golden[1].values = golden_data(&file, "e5m2.values", DTYPE_F32, CODES);
    golden[1].codes = golden_data(&file, "e5m2.codes", DTYPE_U8, BF16_CODES);
    golden[1].largest = 0x7b;
}
