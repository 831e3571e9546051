// Tests every operation of kernels/cpu.h except the optimizer (test_train_steps.c), and
// kernels/rope.h. First it compares values with the plain definitions below, gradients with
// numerical derivatives of these, and the bits of 1, 2 and 3 threads. Then it tests reductions,
// extreme and bad values, what must not change, and rotary frequencies against those of
// transformers.
//
// A gradient is compared with the derivative of (projection . definition(inputs)), for a random
// projection, by a fourth-order central difference in double precision. Differences of the FP32
// operation itself would have errors of at least 1e-4. These differences, with a step of 1e-3, have
// errors of 1e-10, so that only FP32's rounding is left: at most 2.3e-7 of the norm in the shapes
// here. The bound is four times that, because compilers may order sums in another way.
#include "../base/rng.h"
#include "../kernels/cpu.h"
#include "golden.h"
#include "test.h"

#include <omp.h>

enum { INPUTS = 3, THREADS = 3 };
#define BOUND 1e-6

// The sizes of an operation, which uses some of them; M = B T rows.
typedef struct {
    int B, T, C, H, G, D, F, V, P;
    double eps, theta;
    float z_loss, softcap;
    bool positions;    // the embedding has positions
    bool layernorm;    // else RMSNorm
    const int *tokens; // [B,T], also the targets of the loss
    const int *starts; // [B,T] of documents; NULL: each sequence is one
} Shape;

static int shape_start(const Shape *s, int row) {
    return s->starts != NULL ? s->starts[row] : 0;
}

static int shape_rows(const Shape *s) {
    return s->B * s->T;
}

static int shape_qkv(const Shape *s) {
    return (s->H + 2 * s->G) * s->D;
}

static float *new_floats(int64_t n, float value) {
    float *x = malloc_or_die((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) { x[i] = value; }
    return x;
}

// ---- the operations -----------------------------------------------------------------------------
//
// Each operation has its definition, forward only, in double precision and as plain as possible;
// and a run, forward and then backward with dout. Before the run, outputs and gradients that are
// not added to are NaN.

// in: token embedding [V,C], position embedding [T,C]
static void reference_embedding(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        for (int c = 0; c < s->C; c++) {
            int index = row % s->T - shape_start(s, row);
            double position = s->positions ? in[1][index * s->C + c] : 0;
            out[row * s->C + c] = in[0][s->tokens[row] * s->C + c] + position;
        }
    }
}

static void run_embedding(float *out, float **g, float **in, const float *dout, const Shape *s) {
    float *positions = s->positions ? in[1] : NULL, *d = s->positions ? g[1] : NULL;
    embedding_forward(out, s->tokens, s->starts, in[0], positions, s->B, s->T, s->C);
    embedding_backward(g[0], d, dout, s->tokens, s->starts, s->B, s->T, s->C);
}

// in: x [M,C], weight [C], and for LayerNorm bias [C]; else RMSNorm
static void reference_norm(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *x = in[0] + row * s->C;
        double mean = 0, variance = 0;
        for (int c = 0; c < s->C && s->layernorm; c++) { mean += x[c] / s->C; }
        for (int c = 0; c < s->C; c++) { variance += (x[c] - mean) * (x[c] - mean) / s->C; }
        for (int c = 0; c < s->C; c++) {
            double bias = s->layernorm ? in[2][c] : 0;
            out[row * s->C + c] = (x[c] - mean) / sqrt(variance + s->eps) * in[1][c] + bias;
        }
    }
}

static void run_norm(float *out, float **g, float **in, const float *dout, const Shape *s) {
    int M = shape_rows(s);
    FREED float *rstd = new_floats(2 * M, NAN);
    float *mean = s->layernorm ? rstd + M : NULL, *bias = s->layernorm ? in[2] : NULL;
    cpu_norm_forward(out, mean, rstd, in[0], in[1], bias, M, s->C, (float)s->eps);
    cpu_norm_backward(g[0], g[1], bias != NULL ? g[2] : NULL, dout, in[0], in[1], mean, rstd, M,
                      s->C);
}

// in: qkv [M,N]. Pair (i, i + D/2) of a query or key turns by t theta^(-2i/D).
static void reference_rope(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        for (int n = 0; n < shape_qkv(s); n++) {
            const double *x = in[0] + row * shape_qkv(s) + n;
            int half = s->D / 2, i = n % s->D;
            bool first = i < half, value = n >= (s->H + s->G) * s->D;
            double angle = row % s->T * pow(s->theta, -2.0 * (i % half) / s->D);
            double other = first ? -x[half] : x[-half];
            out[row * shape_qkv(s) + n] = value ? x[0] : x[0] * cos(angle) + other * sin(angle);
        }
    }
}

static void run_rope(float *out, float **g, float **in, const float *dout, const Shape *s) {
    size_t bytes = (size_t)(shape_rows(s) * shape_qkv(s)) * sizeof(float);
    FREED float *table = new_floats(s->T * s->D, NAN);
    rope_table(table, s->T, s->D, &(Rope){.theta = s->theta});
    memcpy(out, in[0], bytes);
    memcpy(g[0], dout, bytes);
    rope_apply(out, table, s->B, s->T, s->H, s->G, s->D, false);
    rope_apply(g[0], table, s->B, s->T, s->H, s->G, s->D, true);
}

// in: qkv [M,N], query weight [D], key weight [D]
static void reference_qk_norm(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        for (int head = 0; head < s->H + 2 * s->G; head++) {
            const double *x = in[0] + row * shape_qkv(s) + head * s->D;
            const double *weight = in[head < s->H ? 1 : 2];
            double square = 0, *o = out + (x - in[0]);
            for (int d = 0; d < s->D; d++) { square += x[d] * x[d] / s->D; }
            for (int d = 0; d < s->D; d++) {
                o[d] = head < s->H + s->G ? x[d] / sqrt(square + s->eps) * weight[d] : x[d];
            }
        }
    }
}

// The gradient of qkv overwrites the gradient of the output; the gradients of the weights are added
// to.
static void run_qk_norm(float *out, float **g, float **in, const float *dout, const Shape *s) {
    int M = shape_rows(s), n = M * shape_qkv(s);
    FREED float *rstd = new_floats(M * (s->H + s->G), NAN), *d = new_floats(n, NAN);
    memcpy(d, dout, (size_t)n * sizeof(float));
    qk_norm_forward(out, rstd, in[0], in[1], in[2], M, s->H, s->G, s->D, (float)s->eps);
    qk_norm_backward(d, g[1], g[2], in[0], in[1], in[2], rstd, M, s->H, s->G, s->D);
    for (int i = 0; i < n; i++) { g[0][i] += d[i]; }
}

// The output [D] of one query. q: its row of qkv; first: the first key of its document, in the
// sequence.
static void reference_attend(double *out, const double *q, const double *sequence, int first,
                             int last, int head, const Shape *s) {
    int N = shape_qkv(s), group = head / (s->H / s->G);
    const double *k = sequence + (s->H + group) * s->D, *v = k + s->G * s->D;
    double sum = 0;
    for (int d = 0; d < s->D; d++) { out[d] = 0; }
    for (int i = first; i <= last; i++) {
        double score = 0;
        for (int d = 0; d < s->D; d++) { score += q[head * s->D + d] * k[i * N + d]; }
        double p = exp(score / sqrt(s->D));
        sum += p;
        for (int d = 0; d < s->D; d++) { out[d] += p * v[i * N + d]; }
    }
    for (int d = 0; d < s->D; d++) { out[d] /= sum; }
}

// in: qkv [M,N]
static void reference_attention(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *sequence = in[0] + (row - row % s->T) * shape_qkv(s);
        for (int h = 0; h < s->H; h++) {
            reference_attend(out + (row * s->H + h) * s->D, in[0] + row * shape_qkv(s), sequence,
                             shape_start(s, row), row % s->T, h, s);
        }
    }
}

static void run_attention(float *out, float **g, float **in, const float *dout, const Shape *s) {
    FREED float *lse = new_floats(shape_rows(s) * s->H, NAN);
    attention_forward(out, lse, in[0], s->starts, s->B, s->T, s->H, s->G, s->D);
    attention_backward(g[0], dout, out, lse, in[0], s->starts, s->B, s->T, s->H, s->G, s->D);
}

static double reference_gelu_of(double x) {
    return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// in: x [M,F]
static void reference_gelu(double *out, double *const *in, const Shape *s) {
    for (int i = 0; i < shape_rows(s) * s->F; i++) { out[i] = reference_gelu_of(in[0][i]); }
}

static void run_gelu(float *out, float **g, float **in, const float *dout, const Shape *s) {
    gelu_forward(out, in[0], shape_rows(s) * s->F);
    gelu_backward(g[0], dout, in[0], shape_rows(s) * s->F);
}

static double reference_silu_of(double x) {
    return x / (1 + exp(-x));
}

// in: gate and up [M,2F]
static void reference_swiglu(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *gate = in[0] + row * 2 * s->F, *up = gate + s->F;
        for (int f = 0; f < s->F; f++) { out[row * s->F + f] = reference_silu_of(gate[f]) * up[f]; }
    }
}

static void run_swiglu(float *out, float **g, float **in, const float *dout, const Shape *s) {
    swiglu_forward(out, in[0], shape_rows(s), s->F);
    swiglu_backward(g[0], dout, in[0], shape_rows(s), s->F);
}

static double reference_capped(double x, const Shape *s) {
    return s->softcap > 0 ? s->softcap * tanh(x / s->softcap) : x;
}

// in: logits [M,P]; out: losses [M], with the z-loss
static void reference_cross_entropy(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *x = in[0] + row * s->P;
        double max = -INFINITY, sum = 0;
        for (int i = 0; i < s->V; i++) { max = fmax(max, reference_capped(x[i], s)); }
        for (int i = 0; i < s->V; i++) { sum += exp(reference_capped(x[i], s) - max); }
        int target = s->tokens[row];
        double lse = target < 0 ? 0 : log(sum) + max;
        out[row] = target < 0 ? 0 : lse - reference_capped(x[target], s) + s->z_loss * lse * lse;
    }
}

static void run_cross_entropy(float *out, float **g, float **in, const float *dout,
                              const Shape *s) {
    int M = shape_rows(s);
    memcpy(g[0], in[0], (size_t)(M * s->P) * sizeof(float));
    LossTerms terms = {dout[0], s->z_loss, s->softcap};
    cross_entropy(out, g[0], s->tokens, M, s->V, s->P, terms);
    for (int row = 0; row < M && s->z_loss > 0; row++) { // the reported loss is without it
        double sum = 0;
        if (s->tokens[row] < 0) { continue; }
        for (int i = 0; i < s->V; i++) { sum += exp(reference_capped(in[0][row * s->P + i], s)); }
        out[row] += (float)(s->z_loss * log(sum) * log(sum));
    }
}

// in: bias [F]; out: [M,F], each row of which is the bias
static void reference_bias(double *out, double *const *in, const Shape *s) {
    for (int i = 0; i < shape_rows(s) * s->F; i++) { out[i] = in[0][i % s->F]; }
}

static void run_bias(float *out, float **g, float **in, const float *dout, const Shape *s) {
    for (int i = 0; i < shape_rows(s) * s->F; i++) { out[i] = in[0][i % s->F]; }
    bias_backward(g[0], dout, shape_rows(s), s->F);
}

// ---- the comparison -----------------------------------------------------------------------------

typedef struct {
    const char *name;
    void (*reference)(double *out, double *const *in, const Shape *s);
    void (*run)(float *out, float **gradients, float **in, const float *dout, const Shape *s);
    bool overwrites;              // the gradient is overwritten, not added to
    float uniform_projection;     // used if dout cannot be random
    const char *out, *in[INPUTS]; // their sizes, a letter for each side
} Operation;

#define OPERATION(name, overwrites, projection, out, ...)                   \
    {                                                                       \
#name, reference_##name, run_##name, overwrites, projection, out, { \
            __VA_ARGS__                                                     \
        }                                                                   \
    }
static const Operation embedding = OPERATION(embedding, false, 0, "MC", "VC", "PC");
static const Operation norm = OPERATION(norm, false, 0, "MC", "MC", "C", "B");
static const Operation rope = OPERATION(rope, true, 0, "MN", "MN");
static const Operation qk_norm = OPERATION(qk_norm, false, 0, "MN", "MN", "D", "D");
static const Operation attention = OPERATION(attention, true, 0, "MA", "MN");
static const Operation gelu = OPERATION(gelu, true, 0, "MF", "MF");
static const Operation swiglu = OPERATION(swiglu, true, 0, "MF", "M2F");
static const Operation bias = OPERATION(bias, false, 0, "MF", "F");
static const Operation cross_entropy_loss = OPERATION(cross_entropy, true, 0.37f, "M", "ML");

static int size_of(const char *sides, const Shape *s) {
    const int size['Z'] = {['2'] = 2,
                           ['A'] = s->H * s->D,
                           ['B'] = s->layernorm ? s->C : 0,
                           ['C'] = s->C,
                           ['D'] = s->D,
                           ['F'] = s->F,
                           ['L'] = s->P,
                           ['M'] = shape_rows(s),
                           ['N'] = shape_qkv(s),
                           ['P'] = s->positions ? s->T : 0,
                           ['V'] = s->V};
    int n = sides != NULL;
    for (; n > 0 && *sides != '\0'; sides++) { n *= size[(int)*sides]; }
    return n;
}

typedef struct {
    float *out, *gradients[INPUTS];
} Result;

static Result operate(const Operation *op, float **in, float *const *start, const float *dout,
                      const Shape *s, int threads) {
    Result r = {.out = new_floats(size_of(op->out, s), NAN)};
    for (int k = 0; k < INPUTS; k++) {
        int n = size_of(op->in[k], s);
        r.gradients[k] = new_floats(n, NAN);
        if (!op->overwrites) { memcpy(r.gradients[k], start[k], (size_t)n * sizeof(float)); }
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

// Compares, and then must see three planted faults, each in one element: a value too large by a
// thousandth, NaN, and (in gradients that are added to) a missing old value.
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

static void check_operation(const Operation *op, const Shape *s) {
    int n[INPUTS], outputs = size_of(op->out, s);
    float *in[INPUTS], *start[INPUTS], *dout = new_floats(outputs, op->uniform_projection);
    if (op->uniform_projection == 0) { fill_random(dout, outputs, 1.0f, 100); }
    Probe p = {.op = op, .shape = s, .projection = dout, .outputs = outputs};
    p.out = malloc_or_die((size_t)outputs * sizeof(double));
    for (int k = 0; k < INPUTS; k++) {
        n[k] = size_of(op->in[k], s);
        in[k] = new_floats(n[k], NAN);
        start[k] = new_floats(n[k], NAN);
        fill_random(in[k], n[k], 1.0f, (uint64_t)k);
        fill_random(start[k], n[k], 1.0f, (uint64_t)k + 10);
        p.in[k] = malloc_or_die((size_t)n[k] * sizeof(double));
        for (int i = 0; i < n[k]; i++) { p.in[k][i] = in[k][i]; }
    }
    Result one = operate(op, in, start, dout, s, 1);
    for (int threads = 2; threads <= THREADS; threads++) {
        Result more = operate(op, in, start, dout, s, threads);
        CHECK_BITS(more.out, one.out, (size_t)outputs * sizeof(float));
        for (int k = 0; k < INPUTS; k++) {
            CHECK_BITS(more.gradients[k], one.gradients[k], (size_t)n[k] * sizeof(float));
        }
        free_result(&more);
    }
    op->reference(p.out, p.in, s);
    compare(op->name, "output", 0, one.out, NULL, p.out, outputs);
    for (int k = 0; k < INPUTS; k++) {
        FREED double *derivative = malloc_or_die((size_t)n[k] * sizeof(double));
        differentiate(derivative, &p, k, n[k]);
        if (n[k] > 0) {
            compare(op->name, "gradient of input", k, one.gradients[k],
                    op->overwrites ? NULL : start[k], derivative, n[k]);
        }
    }
    for (int k = 0; k < INPUTS; k++) { free(in[k]), free(start[k]), free(p.in[k]); }
    free_result(&one);
    free(dout);
    free(p.out);
}

// Tokens occur several times, so that their gradients are added in one row.
static const int token_list[] = {3, 0, 3, 3, 7, 10, 0, 1, 3, 10, 5, 2, 0, 9};
// The loss ignores negative targets.
static const int target_list[] = {3, 0, -1, 129, -100, 130};
// Documents of 1 token to a whole sequence of 7.
static const int start_list[] = {0, 0, 0, 3, 3, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 4, 5, 5};

// Odd shapes.
static const struct {
    const Operation *operation;
    Shape shape;
} cases[] = {
    {&embedding, {.B = 2, .T = 7, .C = 67, .V = 11, .positions = true, .tokens = token_list}},
    {&embedding, {.B = 1, .T = 13, .C = 5, .V = 11, .tokens = token_list}},
    {&embedding,
     {.B = 2,
      .T = 7,
      .C = 5,
      .V = 11,
      .positions = true,
      .tokens = token_list,
      .starts = start_list}},
    {&norm, {.B = 1, .T = 7, .C = 67, .eps = 1e-5, .layernorm = true}},
    {&norm, {.B = 3, .T = 5, .C = 3, .eps = 0.1, .layernorm = true}},
    {&norm, {.B = 1, .T = 1, .C = 130, .eps = 1e-5, .layernorm = true}},
    {&norm, {.B = 1, .T = 7, .C = 67, .eps = 1e-5}},
    {&norm, {.B = 3, .T = 5, .C = 3, .eps = 0.1}},
    {&norm, {.B = 1, .T = 1, .C = 130, .eps = 1e-5}},
    {&rope, {.B = 2, .T = 5, .H = 6, .G = 2, .D = 10, .theta = 10000}},
    {&rope, {.B = 1, .T = 13, .H = 1, .G = 1, .D = 2, .theta = 500}},
    {&qk_norm, {.B = 2, .T = 5, .H = 6, .G = 2, .D = 10, .eps = 1e-6}},
    {&qk_norm, {.B = 1, .T = 3, .H = 1, .G = 1, .D = 67, .eps = 0.1}},
    {&attention, {.B = 2, .T = 5, .H = 6, .G = 2, .D = 8}},
    {&attention, {.B = 1, .T = 17, .H = 3, .G = 3, .D = 5}},
    {&attention, {.B = 3, .T = 4, .H = 4, .G = 1, .D = 19}},
    {&attention, {.B = 2, .T = 1, .H = 2, .G = 1, .D = 3}},
    {&attention, {.B = 3, .T = 7, .H = 4, .G = 2, .D = 5, .starts = start_list}},
    {&gelu, {.B = 1, .T = 7, .F = 67}},
    {&gelu, {.B = 1, .T = 1, .F = 1}},
    {&swiglu, {.B = 1, .T = 7, .F = 37}},
    {&swiglu, {.B = 2, .T = 3, .F = 1}},
    {&bias, {.B = 5, .T = 13, .F = 131}},
    {&bias, {.B = 1, .T = 1, .F = 3}},
    {&cross_entropy_loss, {.B = 2, .T = 3, .V = 131, .P = 137, .tokens = target_list}},
    {&cross_entropy_loss, {.B = 1, .T = 2, .V = 4, .P = 4, .tokens = target_list}},
    {&cross_entropy_loss,
     {.B = 2, .T = 3, .V = 131, .P = 137, .z_loss = 0.1f, .tokens = target_list}},
    {&cross_entropy_loss,
     {.B = 2, .T = 3, .V = 131, .P = 137, .softcap = 2, .tokens = target_list}},
    {&cross_entropy_loss,
     {.B = 1, .T = 2, .V = 4, .P = 4, .z_loss = 0.3f, .softcap = 0.5f, .tokens = target_list}},
};

TEST(operations_are_right) {
    EACH (c, cases) { check_operation(c->operation, &c->shape); }
}

// ---- reductions -------------------------------------------------------------------------------

TEST(reductions_do_not_depend_on_threads) {
    enum { N = 200003 }; // several blocks of sum_of_squares
    FREED float *x = malloc_or_die(N * sizeof(float));
    double expected = 0, sums[THREADS + 1];
    float amax = 0.0f;
    fill_random(x, N, 3.0f, 1);
    for (int i = 0; i < N; i++) {
        expected += (double)x[i] * x[i];
        amax = fmaxf(amax, fabsf(x[i]));
    }
    for (int threads = 1; threads <= THREADS; threads++) {
        omp_set_num_threads(threads);
        sums[threads] = sum_of_squares(x, N);
        CHECK_CLOSE(sums[threads], expected, 1e-12 * expected);
        CHECK(sums[threads] == sums[1]);
        CHECK(tensor_amax(x, N) == amax);
    }
    x[N - 1] = -NAN;
    CHECK(isnan(sum_of_squares(x, N)) && isnan(tensor_amax(x, N)));
    x[N - 1] = -INFINITY;
    CHECK(isinf(sum_of_squares(x, N)) && isinf(tensor_amax(x, N)));
    x[N - 1] = 1e30f; // its square is too large for FP32, but not for double
    CHECK_CLOSE(sum_of_squares(x, N), 1e60, 1e53);
    x[0] = -2e30f;
    CHECK(tensor_amax(x, N) == 2e30f && tensor_amax(x + 1, N - 1) == 1e30f);
}

// ---- activations over the whole range ---------------------------------------------------------

enum { POINTS = 20001 }; // points in [-100, 100]

// Counts elements whose error is larger than `relative` of the value plus `absolute`.
static int off(const float *actual, const float *x, double (*function)(double), double relative,
               double absolute) {
    int count = 0;
    for (int i = 0; i < POINTS; i++) {
        double expected = function(x[i]);
        count += !(fabs(actual[i] - expected) <= relative * fabs(expected) + absolute);
    }
    return count;
}

// A fourth-order difference; its error is 1e-10 here.
#define SLOPE_OF(f, x, h) ((8 * (f(x + h) - f(x - h)) - (f(x + 2 * h) - f(x - 2 * h))) / (12 * h))

static double gelu_slope(double x) {
    return SLOPE_OF(reference_gelu_of, x, 1e-4);
}

static double silu_slope(double x) {
    return SLOPE_OF(reference_silu_of, x, 1e-4);
}

// SiLU is x / (1 + exp(-x)), so it shows the error of exp: 6 roundings of 2^-24 are allowed in all,
// until exp is clamped at 88.3, where the value is below 1e-36. GELU's argument is a cubic, whose
// rounding error grows in the tail. Its slope has a term x sigmoid (1 - sigmoid) 2u', in which the
// factors of (1 - sigmoid) reach 35 (at x = 5) before it becomes 0.
TEST(activations_are_accurate_everywhere) {
    static float x[2 * POINTS], ones[POINTS], out[POINTS], slope[2 * POINTS];
    for (int i = 0; i < POINTS; i++) {
        x[i] = 0.01f * (float)(i - POINTS / 2);
        x[POINTS + i] = ones[i] = 1.0f;
    }
    gelu_forward(out, x, POINTS);
    gelu_backward(slope, ones, x, POINTS);
    CHECK_EQUAL(off(out, x, reference_gelu_of, 6 * 0x1p-24, 1e-7), 0);
    CHECK_EQUAL(off(slope, x, gelu_slope, 0, 40 * 0x1p-24), 0);
    swiglu_forward(out, x, 1, POINTS);
    swiglu_backward(slope, ones, x, 1, POINTS);
    CHECK_EQUAL(off(out, x, reference_silu_of, 6 * 0x1p-24, 1e-36), 0);
    CHECK_EQUAL(off(slope, x, silu_slope, 0, 20 * 0x1p-24), 0);
    CHECK_EQUAL(off(slope + POINTS, x, reference_silu_of, 6 * 0x1p-24, 1e-36), 0);
    out[7000] *= 1.000001f;
    out[12000] = NAN;
    CHECK_EQUAL(off(out, x, reference_silu_of, 6 * 0x1p-24, 1e-36), 2);
}

TEST(activations_keep_bad_values) {
    float x[4] = {NAN, 1.0f, INFINITY, 1.0f}, out[4], dout[4] = {1, 1, 1, 1}, dx[4];
    gelu_forward(out, x, 4);
    CHECK(isnan(out[0]) && isinf(out[2]));
    gelu_backward(dx, dout, x, 4);
    CHECK(isnan(dx[0]));
    swiglu_forward(out, x, 2, 1);
    CHECK(isnan(out[0]) && isinf(out[1]));
    swiglu_backward(dx, dout, x, 2, 1);
    CHECK(isnan(dx[0]) && isnan(dx[1]));
}

// ---- attention --------------------------------------------------------------------------------

// Scores far outside the range of exp. First all are equal, so that the output is the mean of the
// values; then one is larger than the others.
TEST(attention_survives_large_scores) {
    enum { T = 9, D = 4, N = 3 * D };
    float qkv[T * N], out[T * D], lse[T], dqkv[T * N], dout[T * D];
    fill_random(dout, T * D, 1.0f, 1);
    for (int t = 0; t < T; t++) {
        for (int d = 0; d < D; d++) {
            qkv[t * N + d] = qkv[t * N + D + d] = 100.0f;
            qkv[t * N + 2 * D + d] = (float)(t + d);
        }
    }
    attention_forward(out, lse, qkv, NULL, 1, T, 1, 1, D);
    for (int i = 0; i < T * D; i++) { CHECK_CLOSE(out[i], 0.5 * (i / D) + i % D, 1e-5); }
    for (int d = 0; d < D; d++) { qkv[3 * N + D + d] = 200.0f; }
    attention_forward(out, lse, qkv, NULL, 1, T, 1, 1, D);
    attention_backward(dqkv, dout, out, lse, qkv, NULL, 1, T, 1, 1, D);
    for (int i = 3 * D; i < T * D; i++) { CHECK_CLOSE(out[i], 3 + i % D, 1e-5); }
    for (int i = 0; i < T * N; i++) { CHECK(isfinite(dqkv[i])); }
}

// ---- cross-entropy ----------------------------------------------------------------------------

enum { ROWS = 3, V = 13, P = 16 };

// The padding's logits do not matter, even if they are NaN or the largest of all. For a loss alone
// no logit changes.
TEST(padding_and_left_out_rows_do_not_matter) {
    float logits[ROWS * P], clean[ROWS * P], before[ROWS * P];
    float losses[ROWS], clean_losses[ROWS], alone[ROWS] = {NAN, NAN, NAN};
    int targets[ROWS] = {4, -1, 12};
    fill_random(logits, ROWS * P, 2.0f, 1);
    memcpy(clean, logits, sizeof(logits));
    for (int i = 0; i < ROWS * P; i++) {
        if (i / P == 1 || i % P >= V) { logits[i] = i % 2 ? NAN : 1e30f; }
    }
    memcpy(before, logits, sizeof(logits));
    cross_entropy(alone, logits, targets, ROWS, V, P, (LossTerms){.gradient_scale = 0.0f});
    CHECK_BITS(logits, before, sizeof(logits));
    CHECK(alone[0] > 0 && alone[1] == 0.0f && alone[2] > 0);
    cross_entropy(losses, logits, targets, ROWS, V, P, (LossTerms){.gradient_scale = 0.5f});
    CHECK_BITS(losses, alone, sizeof(losses));
    cross_entropy(clean_losses, clean, targets, ROWS, V, P, (LossTerms){.gradient_scale = 0.5f});
    CHECK_BITS(losses, clean_losses, sizeof(losses));
    CHECK_BITS(logits, clean, sizeof(logits));
    for (int row = 0; row < ROWS; row++) {
        double sum = 0;
        for (int i = 0; i < P; i++) {
            float d = logits[row * P + i];
            sum += d;
            if (row == 1 || i >= V) { CHECK(d == 0.0f); }
        }
        CHECK_CLOSE(sum, 0, 1e-6);
        CHECK(row == 1 || logits[row * P + targets[row]] < 0);
    }
}

TEST(bad_logits_spoil_the_loss) {
    static const float bad[] = {NAN, -NAN, INFINITY};
    int targets[ROWS] = {4, 0, 12};
    for (int column = 0; column < V; column++) {
        for (int i = 0; i < 4; i++) {
            float logits[ROWS * P], losses[ROWS];
            fill_random(logits, ROWS * P, 2.0f, 1);
            int at = i < 3 ? column : targets[1]; // minus infinity means a probability of 0
            logits[P + at] = i < 3 ? bad[i] : -INFINITY;
            cross_entropy(losses, logits, targets, ROWS, V, P,
                          (LossTerms){.gradient_scale = column % 2 ? 1.0f : 0.0f});
            CHECK(!isfinite(losses[1]));
            CHECK(isfinite(losses[0]) && isfinite(losses[2]));
        }
    }
}

TEST(large_logits_do_not_overflow) {
    float logits[P] = {0}, loss;
    int target = 4;
    logits[3] = 1e5f, logits[4] = 1e5f, logits[5] = -1e5f;
    cross_entropy(&loss, logits, &target, 1, V, P, (LossTerms){.gradient_scale = 1.0f});
    CHECK_CLOSE(loss, log(2), 0.01); // an ulp of 1e5 is 0.008
    CHECK_CLOSE(logits[3], 0.5, 1e-6);
    CHECK_CLOSE(logits[4], -0.5, 1e-6);
    CHECK_CLOSE(logits[5], 0, 1e-30);
}

// ---- rotary frequencies -------------------------------------------------------------------------

// Compares the frequencies with those of transformers (test/golden/rope.safetensors, made by
// golden.py), and the table with the frequencies.
TEST(frequencies_are_transformers) {
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
    static float table[T * D];
    double frequencies[HALF];
    CLOSED(safetensors_close) SafeTensors st = golden_open("rope.safetensors");
    EACH (row, rows) {
        for (int j = 0; j < HALF; j++) { frequencies[j] = rope_frequency(j, D, &row->rope); }
        const float *expected = golden_data(&st, row->name, DTYPE_F32, HALF);
        for (int j = 0; j < HALF; j++) { // theirs are computed in FP32
            CHECK_CLOSE(frequencies[j], expected[j], 2e-6 * expected[j]);
        }
        CHECK(CAUGHT(CHECK_CLOSE(frequencies[HALF - 1], 1.00001 * expected[HALF - 1],
                                 2e-6 * expected[HALF - 1])));
        rope_table(table, T, D, &row->rope);
        for (int k = 0; k < T * HALF; k += 13) {
            double angle = k / HALF * frequencies[k % HALF];
            CHECK_CLOSE(table[k / HALF * D + k % HALF], cos(angle), 1e-7);
            CHECK_CLOSE(table[k / HALF * D + HALF + k % HALF], sin(angle), 1e-7);
        }
    }
}

// ---- moments in 8 bits --------------------------------------------------------------------------

enum { MOMENTS = 64 * 40 };

// Values of many sizes, by blocks; some are 0, and one block is. Second moments are not negative.
static float *moments_new(Moment which) {
    float *x = malloc_or_die(MOMENTS * sizeof(float));
    for (int i = 0; i < MOMENTS; i++) {
        float value = rng_normal(5, (uint64_t)i) * ldexpf(1.0f, i / MOMENT_BLOCK - 30);
        bool zero = i % 17 == 3 || i / MOMENT_BLOCK == 7;
        x[i] = zero ? 0.0f : which == MOMENT_FIRST ? value : value * value;
    }
    return x;
}

// A block's largest value has the largest code or the one before, in v only 0 has code 0; a decoded
// value lies within a level of its number, with the nearest code within half a level.
TEST(moments_are_near) {
    static uint8_t codes[MOMENTS];
    static uint16_t scales[MOMENTS / MOMENT_BLOCK];
    static float back[MOMENTS];
    for (Moment which = MOMENT_FIRST; which <= MOMENT_SECOND; which++) {
        FREED float *x = moments_new(which);
        const double most = moment_max_code(which),
                     power = which == MOMENT_FIRST ? 1.0 / 3 : 1.0 / 6;
        for (int nearest = 0; nearest < 2; nearest++) {
            MomentRounding rounding = {0, 99};
            moment_encode(codes, scales, which, x, MOMENTS, nearest ? NULL : &rounding);
            moment_decode(back, which, codes, scales, 0, MOMENTS);
            int far = 0, vanished = 0;
            for (int i = 0; i < MOMENTS; i++) {
                double scale = bf16_decode(scales[i / MOMENT_BLOCK]);
                if (which == MOMENT_SECOND) { scale *= scale; }
                if (scale == 0.0) {
                    far += back[i] != 0.0f || codes[i] != 0;
                    continue;
                }
                double is = most * pow(fabs(x[i]) / scale, power);
                double becomes = most * pow(fabs(back[i]) / scale, power);
                double allowed = nearest ? 0.501 : 1.001;
                bool raised = which == MOMENT_SECOND && codes[i] == 1; // v is never 0 there
                far += !raised && fabs(is - becomes) > allowed;
                far += x[i] * back[i] < 0.0f || is > most + 1e-3;
                vanished += which == MOMENT_SECOND && codes[i] == 0;
            }
            CHECK_EQUAL(far, 0);
            CHECK_EQUAL(vanished, 0);
        }
        // a part that begins inside a block
        moment_decode(back, which, codes + 100, scales + 1, 100 - 64, 200);
        FREED float *all = malloc_or_die(MOMENTS * sizeof(float));
        moment_decode(all, which, codes, scales, 0, MOMENTS);
        CHECK_BITS(back, all + 100, 200 * sizeof(float));
    }
}

// The mean over many steps is the value, which lies between two codes; to nearest, it would not be.
TEST(moments_are_rounded_without_bias) {
    enum { STEPS = 4000 };
    static uint8_t codes[MOMENT_BLOCK];
    uint16_t scale;
    float x[MOMENT_BLOCK];
    for (Moment which = MOMENT_FIRST; which <= MOMENT_SECOND; which++) {
        double sums[MOMENT_BLOCK] = {0};
        for (int i = 0; i < MOMENT_BLOCK; i++) {
            float code = (float)(i + 1) * (which == MOMENT_FIRST ? 1.93f : 3.91f);
            x[i] = moment_level(code, 1e-9f, which) * (which == MOMENT_FIRST && i % 2 ? -1 : 1);
        }
        for (int step = 0; step < STEPS; step++) {
            MomentRounding rounding = {640, moment_key(3, step, MOMENT_FIRST)};
            moment_encode(codes, &scale, which, x, MOMENT_BLOCK, &rounding);
            for (int i = 0; i < MOMENT_BLOCK; i++) {
                sums[i] += which == MOMENT_FIRST ? abs((int8_t)codes[i]) : codes[i];
            }
        }
        const double power = which == MOMENT_FIRST ? 1.0 / 3 : 1.0 / 6;
        double worst = 0, unit = moment_unit(scale, which);
        if (which == MOMENT_SECOND) { unit *= unit; }
        for (int i = 0; i < MOMENT_BLOCK; i++) {
            worst = fmax(worst, fabs(sums[i] / STEPS - pow(fabs((double)x[i]) / unit, power)));
        }
        CHECK(worst < 0.05); // six standard errors at most
    }
}

// Exact moments satisfy the bound, and it is met: by gradients in proportion to (beta1 / beta2)^k.
TEST(second_moments_have_a_floor) {
    static const double betas[][2] = {{0.9, 0.95}, {0.9, 0.999}, {0.0, 0.5}};
    for (int k = 0; k < COUNT(betas); k++) {
        const double beta1 = betas[k][0], beta2 = betas[k][1], least = moment_floor(beta1, beta2);
        double nearest = INFINITY;
        for (int kind = 0; kind < 2; kind++) {
            double m = 0, v = 0;
            for (int step = 0; step < 400; step++) {
                double g = kind == 0 ? rng_normal(8, (uint64_t)step)
                                     : pow(beta1 > 0 ? beta1 / beta2 : 1e-9, 400 - step);
                m = beta1 * m + (1 - beta1) * g;
                v = beta2 * v + (1 - beta2) * g * g;
                if (m * m > 0) { nearest = fmin(nearest, v / (m * m)); }
            }
        }
        CHECK(nearest >= least * (1 - 1e-9));
        CHECK(nearest <= least * 1.01);
    }
    CHECK(moment_floor(0.9, 0.8) == 0.0);
    float w = 1.0f, m = 1.0f, v = 0.0f, g = 0.0f;
    AdamW a = {.lr = 0.1f,
               .beta1 = 0.9f,
               .beta2 = 0.95f,
               .eps = 1e-8f,
               .gradient_scale = 1.0f,
               .floor = (float)moment_floor(0.9, 0.95),
               .step = 1000};
    adamw_update(&w, &m, &v, &g, 1, a);
    CHECK(fabsf(w - 1.0f) < 0.2f); // 1e7 without it
}
