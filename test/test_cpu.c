// Every operation of kernels/cpu.h: values against test/reference.h, gradients against its
// numerical derivatives, and the same bits from 1, 2 and 3 threads.
//
// A gradient is compared with the derivative of (projection . reference(inputs)), for a random
// projection, by a fourth-order central difference in double precision. Differences of the FP32
// operation itself would be good to 1e-4 at best; these, with a step of 1e-3, are good to 1e-10, so
// that what is left is FP32's rounding: 2.3e-7 of the norm at most in the shapes here. The bound
// leaves a factor of four for compilers that order sums otherwise.
#include "../kernels/cpu.h"
#include "golden.h"
#include "reference.h"
#include "test.h"

#include <omp.h>

enum { INPUTS = 3, THREADS = 3 };
#define BOUND 1e-6

typedef struct {
    const char *name;
    void (*reference)(double *out, double *const *in, const Shape *s);
    // forward, then backward with dout; out and what is not added to come in as NaN
    void (*run)(float *out, float **gradients, float **in, const float *dout, const Shape *s);
    // sizes of the inputs; returns that of the output
    int (*sizes)(int n[INPUTS], const Shape *s);
    bool overwrites;          // the gradient, where it is not "+="
    float uniform_projection; // where dout cannot be random
} Operation;

// ---- the operations ---------------------------------------------------------------------------

static float *new_floats(int64_t n, float value) {
    float *x = malloc_or_die((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) { x[i] = value; }
    return x;
}

static int embedding_sizes(int n[INPUTS], const Shape *s) {
    n[0] = s->V * s->C;
    n[1] = s->positions ? s->T * s->C : 0;
    return shape_rows(s) * s->C;
}

static void run_embedding(float *out, float **g, float **in, const float *dout, const Shape *s) {
    embedding_forward(out, s->tokens, in[0], s->positions ? in[1] : NULL, s->B, s->T, s->C);
    embedding_backward(g[0], s->positions ? g[1] : NULL, dout, s->tokens, s->B, s->T, s->C);
}

static int layernorm_sizes(int n[INPUTS], const Shape *s) {
    n[1] = n[2] = s->C;
    return n[0] = shape_rows(s) * s->C;
}

static void run_layernorm(float *out, float **g, float **in, const float *dout, const Shape *s) {
    int M = shape_rows(s);
    float *mean = new_floats(2 * M, NAN), *rstd = mean + M;
    cpu_norm_forward(out, mean, rstd, in[0], in[1], in[2], M, s->C, (float)s->eps);
    cpu_norm_backward(g[0], g[1], g[2], dout, in[0], in[1], mean, rstd, M, s->C);
    free(mean);
}

static int rmsnorm_sizes(int n[INPUTS], const Shape *s) {
    n[1] = s->C;
    return n[0] = shape_rows(s) * s->C;
}

static void run_rmsnorm(float *out, float **g, float **in, const float *dout, const Shape *s) {
    int M = shape_rows(s);
    float *rstd = new_floats(M, NAN);
    cpu_norm_forward(out, NULL, rstd, in[0], in[1], NULL, M, s->C, (float)s->eps);
    cpu_norm_backward(g[0], g[1], NULL, dout, in[0], in[1], NULL, rstd, M, s->C);
    free(rstd);
}

static int rope_sizes(int n[INPUTS], const Shape *s) {
    return n[0] = shape_rows(s) * shape_qkv(s);
}

static void run_rope(float *out, float **g, float **in, const float *dout, const Shape *s) {
    size_t bytes = (size_t)(shape_rows(s) * shape_qkv(s)) * sizeof(float);
    float *table = new_floats(s->T * s->D, NAN);
    rope_table(table, s->T, s->D, &(Rope){.theta = s->theta});
    memcpy(out, in[0], bytes);
    memcpy(g[0], dout, bytes);
    rope_apply(out, table, s->B, s->T, s->H, s->G, s->D, false);
    rope_apply(g[0], table, s->B, s->T, s->H, s->G, s->D, true);
    free(table);
}

static int attention_sizes(int n[INPUTS], const Shape *s) {
    n[0] = shape_rows(s) * shape_qkv(s);
    return shape_rows(s) * s->H * s->D;
}

static void run_attention(float *out, float **g, float **in, const float *dout, const Shape *s) {
    float *lse = new_floats(shape_rows(s) * s->H, NAN);
    attention_forward(out, lse, in[0], s->B, s->T, s->H, s->G, s->D);
    attention_backward(g[0], dout, out, lse, in[0], s->B, s->T, s->H, s->G, s->D);
    free(lse);
}

static int gelu_sizes(int n[INPUTS], const Shape *s) {
    return n[0] = shape_rows(s) * s->F;
}

static void run_gelu(float *out, float **g, float **in, const float *dout, const Shape *s) {
    gelu_forward(out, in[0], shape_rows(s) * s->F);
    gelu_backward(g[0], dout, in[0], shape_rows(s) * s->F);
}

static int swiglu_sizes(int n[INPUTS], const Shape *s) {
    n[0] = shape_rows(s) * 2 * s->F;
    return shape_rows(s) * s->F;
}

static void run_swiglu(float *out, float **g, float **in, const float *dout, const Shape *s) {
    swiglu_forward(out, in[0], shape_rows(s), s->F);
    swiglu_backward(g[0], dout, in[0], shape_rows(s), s->F);
}

static int cross_entropy_sizes(int n[INPUTS], const Shape *s) {
    n[0] = shape_rows(s) * s->P;
    return shape_rows(s);
}

static void run_cross_entropy(float *out, float **g, float **in, const float *dout,
                              const Shape *s) {
    int M = shape_rows(s);
    memcpy(g[0], in[0], (size_t)(M * s->P) * sizeof(float));
    cross_entropy(out, g[0], s->tokens, M, s->V, s->P, dout[0]);
}

static int linear_sizes(int n[INPUTS], const Shape *s) {
    n[0] = shape_rows(s) * s->C;
    n[1] = s->F * s->C;
    n[2] = s->F;
    return shape_rows(s) * s->F;
}

// As the trainer does it; dx, which is not added to, goes through a buffer.
static void run_linear(float *out, float **g, float **in, const float *dout, const Shape *s) {
    int M = shape_rows(s), C = s->C, F = s->F;
    float *dx = new_floats(M * C, NAN);
    cpu_gemm((CpuGemm){.m = M,
                       .n = F,
                       .k = C,
                       .a = in[0],
                       .b = in[1],
                       .c = out,
                       .bias = in[2],
                       .trans_b = true,
                       .alpha = 1.0f});
    cpu_gemm((CpuGemm){.m = M, .n = C, .k = F, .a = dout, .b = in[1], .c = dx, .alpha = 1.0f});
    cpu_gemm((CpuGemm){.m = F,
                       .n = C,
                       .k = M,
                       .a = dout,
                       .b = in[0],
                       .c = g[1],
                       .addend = g[1],
                       .trans_a = true,
                       .alpha = 1.0f});
    for (int i = 0; i < M * C; i++) { g[0][i] += dx[i]; }
    bias_backward(g[2], dout, M, F);
    free(dx);
}

static const Operation embedding = {
    "embedding", reference_embedding, run_embedding, embedding_sizes, false, 0};
static const Operation layernorm = {
    "layernorm", reference_layernorm, run_layernorm, layernorm_sizes, false, 0};
static const Operation rmsnorm = {"rmsnorm", reference_rmsnorm, run_rmsnorm, rmsnorm_sizes, false,
                                  0};
static const Operation rope = {"rope", reference_rope, run_rope, rope_sizes, true, 0};
static const Operation attention = {
    "attention", reference_attention, run_attention, attention_sizes, true, 0};
static const Operation gelu = {"gelu", reference_gelu, run_gelu, gelu_sizes, true, 0};
static const Operation swiglu = {"swiglu", reference_swiglu, run_swiglu, swiglu_sizes, true, 0};
static const Operation cross_entropy_loss = {
    "cross_entropy", reference_cross_entropy, run_cross_entropy, cross_entropy_sizes, true, 0.37f};
static const Operation linear = {"linear", reference_linear, run_linear, linear_sizes, false, 0};

// ---- the comparison ---------------------------------------------------------------------------

typedef struct {
    float *out, *gradients[INPUTS];
} Result;

static Result operate(const Operation *op, float **in, float *const *start, const float *dout,
                      const Shape *s, int threads) {
    int n[INPUTS] = {0}, outputs = op->sizes(n, s);
    Result r = {.out = new_floats(outputs, NAN)};
    for (int k = 0; k < INPUTS; k++) {
        r.gradients[k] = new_floats(n[k], NAN);
        if (!op->overwrites) { memcpy(r.gradients[k], start[k], (size_t)n[k] * sizeof(float)); }
    }
    omp_set_num_threads(threads);
    op->run(r.out, r.gradients, in, dout, s);
    return r;
}

static void free_result(Result *r) {
    free(r->out);
    for (int k = 0; k < INPUTS; k++) { free(r->gradients[k]); }
}

// ||actual - start - expected|| / ||expected||; start may be NULL.
static double error_of(const float *actual, const float *start, const double *expected, int n) {
    double difference = 0, size = 0;
    for (int i = 0; i < n; i++) {
        double d = (double)actual[i] - (start != NULL ? start[i] : 0.0f) - expected[i];
        difference += d * d;
        size += expected[i] * expected[i];
    }
    return sqrt(difference / size);
}

// The comparison, which then must see three faults, each in one element: a thousandth too large,
// NaN, and (in gradients that are added to) the old value missing.
static void compare(const char *name, const char *what, int k, float *actual, const float *start,
                    const double *expected, int n) {
    double error = error_of(actual, start, expected, n);
    if (!(error <= BOUND)) {
        test_fail(__FILE__, __LINE__, "%s, %s %d: off by %.3g", name, what, k, error);
    }
    int largest = 0;
    for (int i = 0; i < n; i++) {
        if (fabs(expected[i]) > fabs(expected[largest])) { largest = i; }
    }
    float right = actual[largest];
    actual[largest] += (float)(1e-3 * expected[largest]);
    CHECK(!(error_of(actual, start, expected, n) <= BOUND));
    actual[largest] = NAN;
    CHECK(!(error_of(actual, start, expected, n) <= BOUND));
    actual[largest] = right - (start != NULL ? start[largest] : 2 * right);
    CHECK(!(error_of(actual, start, expected, n) <= BOUND));
    actual[largest] = right;
}

typedef struct {
    const Operation *op;
    const Shape *shape;
    double *in[INPUTS], *out;
    const float *projection;
    int outputs;
} Probe;

static double projected(const Probe *p) {
    double sum = 0;
    p->op->reference(p->out, p->in, p->shape);
    for (int i = 0; i < p->outputs; i++) { sum += p->out[i] * p->projection[i]; }
    return sum;
}

static void differentiate(double *derivative, const Probe *p, int input, int n) {
    const double h = 1e-3;
    for (int i = 0; i < n; i++) {
        double *x = &p->in[input][i], middle = *x, value[5];
        for (int j = -2; j <= 2; j++) {
            *x = middle + j * h;
            value[j + 2] = j != 0 ? projected(p) : 0;
        }
        *x = middle;
        derivative[i] = (8 * (value[3] - value[1]) - (value[4] - value[0])) / (12 * h);
    }
}

static double *widened(const float *x, int n) {
    double *wide = malloc_or_die((size_t)n * sizeof(double));
    for (int i = 0; i < n; i++) { wide[i] = x[i]; }
    return wide;
}

static void compare_with_reference(const Operation *op, const Shape *s, float **in,
                                   float *const *start, const float *dout, Result *r) {
    int n[INPUTS] = {0}, outputs = op->sizes(n, s);
    Probe p = {.op = op, .shape = s, .projection = dout, .outputs = outputs};
    p.out = malloc_or_die((size_t)outputs * sizeof(double));
    for (int k = 0; k < INPUTS; k++) { p.in[k] = widened(in[k], n[k]); }
    op->reference(p.out, p.in, s);
    compare(op->name, "output", 0, r->out, NULL, p.out, outputs);
    for (int k = 0; k < INPUTS && n[k] > 0; k++) {
        double *derivative = malloc_or_die((size_t)n[k] * sizeof(double));
        differentiate(derivative, &p, k, n[k]);
        compare(op->name, "gradient of input", k, r->gradients[k], op->overwrites ? NULL : start[k],
                derivative, n[k]);
        free(derivative);
    }
    free(p.out);
    for (int k = 0; k < INPUTS; k++) { free(p.in[k]); }
}

static void check_operation(const Operation *op, Shape s) {
    int n[INPUTS] = {0}, outputs = op->sizes(n, &s);
    float *in[INPUTS], *start[INPUTS], *dout = new_floats(outputs, op->uniform_projection);
    if (op->uniform_projection == 0) { fill_random(dout, outputs, 1.0f, 100); }
    for (int k = 0; k < INPUTS; k++) {
        in[k] = new_floats(n[k], NAN);
        start[k] = new_floats(n[k], NAN);
        fill_random(in[k], n[k], 1.0f, (uint64_t)k);
        fill_random(start[k], n[k], 1.0f, (uint64_t)k + 10);
    }
    Result one = operate(op, in, start, dout, &s, 1);
    for (int threads = 2; threads <= THREADS; threads++) {
        Result more = operate(op, in, start, dout, &s, threads);
        CHECK_BITS(more.out, one.out, (size_t)outputs * sizeof(float));
        for (int k = 0; k < INPUTS; k++) {
            CHECK_BITS(more.gradients[k], one.gradients[k], (size_t)n[k] * sizeof(float));
        }
        free_result(&more);
    }
    compare_with_reference(op, &s, in, start, dout, &one);
    free_result(&one);
    free(dout);
    for (int k = 0; k < INPUTS; k++) { free(in[k]), free(start[k]); }
}

// ---- on odd shapes ----------------------------------------------------------------------------

// Repeats, so that gradients of one row meet.
static const int token_list[] = {3, 0, 3, 3, 7, 10, 0, 1, 3, 10, 5, 2, 0, 9};
// Negative targets are left out of the loss.
static const int target_list[] = {3, 0, -1, 42, 7, 10, -100, 129, 3, 130};

static void embedding_is_right(void) {
    check_operation(
        &embedding,
        (Shape){.B = 2, .T = 7, .C = 67, .V = 11, .positions = true, .tokens = token_list});
    check_operation(&embedding, (Shape){.B = 1, .T = 13, .C = 5, .V = 11, .tokens = token_list});
}

static void layernorm_is_right(void) {
    check_operation(&layernorm, (Shape){.B = 1, .T = 7, .C = 67, .eps = 1e-5});
    check_operation(&layernorm, (Shape){.B = 3, .T = 5, .C = 3, .eps = 0.1});
    check_operation(&layernorm, (Shape){.B = 1, .T = 1, .C = 130, .eps = 1e-5});
}

static void rmsnorm_is_right(void) {
    check_operation(&rmsnorm, (Shape){.B = 1, .T = 7, .C = 67, .eps = 1e-5});
    check_operation(&rmsnorm, (Shape){.B = 3, .T = 5, .C = 3, .eps = 0.1});
    check_operation(&rmsnorm, (Shape){.B = 1, .T = 1, .C = 130, .eps = 1e-5});
}

static void rope_is_right(void) {
    check_operation(&rope, (Shape){.B = 2, .T = 5, .H = 6, .G = 2, .D = 10, .theta = 10000});
    check_operation(&rope, (Shape){.B = 1, .T = 13, .H = 1, .G = 1, .D = 2, .theta = 500});
}

static void attention_is_right(void) {
    check_operation(&attention, (Shape){.B = 2, .T = 9, .H = 6, .G = 2, .D = 8});
    check_operation(&attention, (Shape){.B = 1, .T = 17, .H = 3, .G = 3, .D = 5});
    check_operation(&attention, (Shape){.B = 3, .T = 4, .H = 4, .G = 1, .D = 19});
    check_operation(&attention, (Shape){.B = 2, .T = 1, .H = 2, .G = 1, .D = 3});
}

static void activations_are_right(void) {
    check_operation(&gelu, (Shape){.B = 1, .T = 7, .F = 67});
    check_operation(&gelu, (Shape){.B = 1, .T = 1, .F = 1});
    check_operation(&swiglu, (Shape){.B = 1, .T = 7, .F = 37});
    check_operation(&swiglu, (Shape){.B = 2, .T = 3, .F = 1});
}

static void cross_entropy_is_right(void) {
    check_operation(&cross_entropy_loss,
                    (Shape){.B = 2, .T = 5, .V = 131, .P = 137, .tokens = target_list});
    check_operation(&cross_entropy_loss,
                    (Shape){.B = 1, .T = 2, .V = 4, .P = 4, .tokens = target_list});
}

static void linear_is_right(void) {
    check_operation(&linear, (Shape){.B = 1, .T = 7, .C = 37, .F = 21});
    check_operation(&linear, (Shape){.B = 1, .T = 1, .C = 65, .F = 3});
    check_operation(&linear, (Shape){.B = 5, .T = 13, .C = 1, .F = 2});
}

int main(void) {
    RUN(embedding_is_right);
    RUN(layernorm_is_right);
    RUN(rmsnorm_is_right);
    RUN(rope_is_right);
    RUN(attention_is_right);
    RUN(activations_are_right);
    RUN(cross_entropy_is_right);
    RUN(linear_is_right);
    return test_summary();
}
