// The operations of kernels/cpu.h once more, forward only, in double precision and as plainly as
// they can be written: what test_cpu.c compares values with and differentiates numerically.
#ifndef LLM8_TEST_REFERENCE_H
#define LLM8_TEST_REFERENCE_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

// An operation uses those it has; M = B T rows.
typedef struct {
    int B, T, C, H, G, D, F, V, P;
    double eps, theta;
    bool positions;    // the embedding has some
    const int *tokens; // [B,T], the loss's targets too
} Shape;

static inline int shape_rows(const Shape *s) {
    return s->B * s->T;
}

static inline int shape_qkv(const Shape *s) {
    return (s->H + 2 * s->G) * s->D;
}

// in: token embedding [V,C], position embedding [T,C]
static inline void reference_embedding(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        for (int c = 0; c < s->C; c++) {
            double position = s->positions ? in[1][row % s->T * s->C + c] : 0;
            out[row * s->C + c] = in[0][s->tokens[row] * s->C + c] + position;
        }
    }
}

// in: x [M,C], weight [C], bias [C]
static inline void reference_layernorm(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *x = in[0] + row * s->C;
        double mean = 0, variance = 0;
        for (int c = 0; c < s->C; c++) { mean += x[c] / s->C; }
        for (int c = 0; c < s->C; c++) { variance += (x[c] - mean) * (x[c] - mean) / s->C; }
        for (int c = 0; c < s->C; c++) {
            out[row * s->C + c] = (x[c] - mean) / sqrt(variance + s->eps) * in[1][c] + in[2][c];
        }
    }
}

// in: x [M,C], weight [C]
static inline void reference_rmsnorm(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *x = in[0] + row * s->C;
        double square = 0;
        for (int c = 0; c < s->C; c++) { square += x[c] * x[c] / s->C; }
        for (int c = 0; c < s->C; c++) {
            out[row * s->C + c] = x[c] / sqrt(square + s->eps) * in[1][c];
        }
    }
}

// in: qkv [M,N]. Pair (i, i + D/2) of a query or key turns by t theta^(-2i/D).
static inline void reference_rope(double *out, double *const *in, const Shape *s) {
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

// One query's output [D]. q: its row of qkv; before: its place in the sequence.
static inline void reference_attend(double *out, const double *q, const double *sequence, int place,
                                    int head, const Shape *s) {
    int N = shape_qkv(s), group = head / (s->H / s->G);
    const double *k = sequence + (s->H + group) * s->D, *v = k + s->G * s->D;
    double sum = 0;
    for (int d = 0; d < s->D; d++) { out[d] = 0; }
    for (int i = 0; i <= place; i++) {
        double score = 0;
        for (int d = 0; d < s->D; d++) { score += q[head * s->D + d] * k[i * N + d]; }
        double p = exp(score / sqrt(s->D));
        sum += p;
        for (int d = 0; d < s->D; d++) { out[d] += p * v[i * N + d]; }
    }
    for (int d = 0; d < s->D; d++) { out[d] /= sum; }
}

// in: qkv [M,N]
static inline void reference_attention(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *sequence = in[0] + (row - row % s->T) * shape_qkv(s);
        for (int h = 0; h < s->H; h++) {
            reference_attend(out + (row * s->H + h) * s->D, in[0] + row * shape_qkv(s), sequence,
                             row % s->T, h, s);
        }
    }
}

static inline double reference_gelu_of(double x) {
    return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static inline double reference_silu_of(double x) {
    return x / (1 + exp(-x));
}

// in: x [M,F]
static inline void reference_gelu(double *out, double *const *in, const Shape *s) {
    for (int i = 0; i < shape_rows(s) * s->F; i++) { out[i] = reference_gelu_of(in[0][i]); }
}

// in: gate and up [M,2F]
static inline void reference_swiglu(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *gate = in[0] + row * 2 * s->F, *up = gate + s->F;
        for (int f = 0; f < s->F; f++) { out[row * s->F + f] = reference_silu_of(gate[f]) * up[f]; }
    }
}

// in: logits [M,P]; out: losses [M]
static inline void reference_cross_entropy(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        const double *x = in[0] + row * s->P;
        double max = -INFINITY, sum = 0;
        for (int i = 0; i < s->V; i++) { max = fmax(max, x[i]); }
        for (int i = 0; i < s->V; i++) { sum += exp(x[i] - max); }
        int target = s->tokens[row];
        out[row] = target < 0 ? 0 : log(sum) + max - x[target];
    }
}

// in: x [M,C], weight [F,C], bias [F]; out: [M,F]
static inline void reference_linear(double *out, double *const *in, const Shape *s) {
    for (int row = 0; row < shape_rows(s); row++) {
        for (int f = 0; f < s->F; f++) {
            double sum = in[2][f];
            for (int c = 0; c < s->C; c++) { sum += in[0][row * s->C + c] * in[1][f * s->C + c]; }
            out[row * s->F + f] = sum;
        }
    }
}

#endif
