// cpu_gemm against a sum in double precision, element by element.
//
// The bound of an element's error holds for any order of summation: (k + 4) roundings of 2^-24
// each, times the sum of the magnitudes of its terms.
#include "../kernels/cpu.h"
#include "golden.h"
#include "test.h"

#include <omp.h>

typedef struct {
    CpuGemm g;
    float *a, *b, *bias, *addend, *c;
    bool in_place; // the addend is c
} Case;

static Case new_case(int m, int n, int k, bool trans_a, bool trans_b) {
    Case t = {.g = {.m = m, .n = n, .k = k, .trans_a = trans_a, .trans_b = trans_b, .alpha = 1.0f}};
    t.a = malloc_or_die((size_t)m * k * sizeof(float));
    t.b = malloc_or_die((size_t)k * n * sizeof(float));
    t.bias = malloc_or_die((size_t)n * sizeof(float));
    t.addend = malloc_or_die((size_t)m * n * sizeof(float));
    t.c = malloc_or_die((size_t)m * n * sizeof(float));
    fill_random(t.a, (int64_t)m * k, 1.0f, 1);
    fill_random(t.b, (int64_t)k * n, 1.0f, 2);
    fill_random(t.bias, n, 1.0f, 3);
    fill_random(t.addend, (int64_t)m * n, 1.0f, 4);
    t.g.a = t.a;
    t.g.b = t.b;
    t.g.c = t.c;
    return t;
}

static void free_case(Case *t) {
    free(t->a);
    free(t->b);
    free(t->bias);
    free(t->addend);
    free(t->c);
}

static void multiply(Case *t, int threads) {
    int64_t size = (int64_t)t->g.m * t->g.n;
    for (int64_t i = 0; i < size; i++) { t->c[i] = t->in_place ? t->addend[i] : NAN; }
    omp_set_num_threads(threads);
    cpu_gemm(t->g);
}

static bool element_is_right(const Case *t, int i, int j) {
    const CpuGemm *g = &t->g;
    double sum = 0, magnitude = 0;
    for (int p = 0; p < g->k; p++) {
        double product = (double)g->a[g->trans_a ? (size_t)p * g->m + i : (size_t)i * g->k + p] *
                         g->b[g->trans_b ? (size_t)j * g->k + p : (size_t)p * g->n + j];
        sum += product * g->alpha;
        magnitude += fabs(product * g->alpha);
    }
    size_t at = (size_t)i * g->n + j;
    double bias = g->bias != NULL ? g->bias[j] : 0;
    double addend = g->addend != NULL ? t->addend[at] : 0;
    magnitude += fabs(bias) + fabs(addend);
    return fabs(t->c[at] - (sum + bias + addend)) <= (g->k + 4) * 0x1p-24 * magnitude;
}

static int wrong_elements(const Case *t) {
    int wrong = 0;
    for (int i = 0; i < t->g.m; i++) {
        for (int j = 0; j < t->g.n; j++) { wrong += !element_is_right(t, i, j); }
    }
    return wrong;
}

static void check_case(Case *t) {
    size_t bytes = (size_t)t->g.m * t->g.n * sizeof(float);
    FREED float *one = malloc_or_die(bytes);
    multiply(t, 1);
    memcpy(one, t->c, bytes);
    for (int threads = 2; threads <= 3; threads++) {
        multiply(t, threads);
        CHECK_BITS(t->c, one, bytes);
    }
    int wrong = wrong_elements(t);
    if (!(wrong == 0)) {
        test_fail(__FILE__, __LINE__, "%d x %d x %d, %d %d: %d wrong elements", t->g.m, t->g.n,
                  t->g.k, t->g.trans_a, t->g.trans_b, wrong);
    }
}

TEST(multiplies_every_size_and_transposition) {
    static const int sizes[] = {1, 2, 7, 13, 65};
    for (int i = 0; i < 4 * 125; i++) {
        int m = sizes[i / 4 % 5], n = sizes[i / 20 % 5], k = sizes[i / 100];
        CLOSED(free_case) Case t = new_case(m, n, k, i % 2, i / 2 % 2);
        check_case(&t);
    }
}

// Sizes larger than the blocks that a matmul is cut into: in each direction, and at last in all.
TEST(multiplies_beyond_its_blocks) {
    static const int shapes[][3] = {
        {257, 129, 31}, {13, 7, 257}, {5, 3, 1025}, {1001, 3, 5}, {3, 1601, 5}, {261, 773, 257},
    };
    for (int s = 0; s < 6; s++) {
        for (int trans = 0; trans < 4; trans += s < 5 ? 1 : 3) {
            CLOSED(free_case)
            Case t = new_case(shapes[s][0], shapes[s][1], shapes[s][2], trans % 2, trans / 2);
            check_case(&t);
        }
    }
}

TEST(adds_bias_and_addend_and_scales) {
    static const float alphas[] = {1.0f, -0.37f, 0.0f, 1e-5f};
    for (int i = 0; i < 4 * 2 * 3 * 4; i++) {
        CLOSED(free_case) Case t = new_case(29, 37, i % 2 ? 300 : 11, i & 1, i & 2);
        t.g.alpha = alphas[i % 4];
        t.g.bias = i / 4 % 2 ? t.bias : NULL;
        t.in_place = i / 8 % 3 == 2;
        if (i / 8 % 3 > 0) { t.g.addend = t.in_place ? t.c : t.addend; }
        check_case(&t);
    }
}

// Every kind of wrong result is counted, each once.
TEST(wrong_elements_are_seen) {
    CLOSED(free_case) Case t = new_case(13, 7, 5, false, true);
    t.g.bias = t.bias;
    multiply(&t, 1);
    CHECK_EQUAL(wrong_elements(&t), 0);
    t.c[3] = NAN;
    t.c[20] = -t.c[20];
    t.c[90] += 1e-4f;
    CHECK_EQUAL(wrong_elements(&t), 3);
    multiply(&t, 1);
    t.g.bias = NULL;
    CHECK_EQUAL(wrong_elements(&t), 13 * 7);
    t.g.bias = t.bias;
    t.g.trans_b = false;
    CHECK(wrong_elements(&t) > 13 * 7 / 2);
}

// NaN and infinity appear in their whole row or column, and nowhere else.
TEST(bad_values_stay_in_their_row) {
    for (int trans = 0; trans < 4; trans++) {
        CLOSED(free_case) Case t = new_case(29, 37, 19, trans % 2, trans / 2);
        t.a[t.g.trans_a ? 4 * 29 + 11 : 11 * 19 + 4] = NAN;      // row 11
        t.b[t.g.trans_b ? 23 * 19 + 6 : 6 * 37 + 23] = INFINITY; // column 23
        multiply(&t, 2);
        int wrong = 0;
        for (int i = 0; i < 29; i++) {
            for (int j = 0; j < 37; j++) {
                float c = t.c[i * 37 + j];
                wrong += i == 11 ? !isnan(c) : (j == 23 ? !isinf(c) : !element_is_right(&t, i, j));
            }
        }
        CHECK_EQUAL(wrong, 0);
    }
}
