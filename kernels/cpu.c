#include "cpu.h"
#include "../base/rng.h"

#include <assert.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { COLUMN_CHUNK = 64 }; // columns that one thread sums over all rows

// Computes exp by range reduction and a polynomial (Cephes' coefficients), within 2 units in the
// last place. Loops over this function vectorise. x is clamped to [-87.3, 88.3]; NaN stays NaN.
static inline float exp_simd(float x) {
    x = x < -87.3f ? -87.3f : (x > 88.3f ? 88.3f : x);
    const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to a whole number
    float shifted = x * 1.44269504088896341f + magic;
    float n = shifted - magic;
    float r = x - n * 0.693359375f - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t exponent = (float_bits(shifted) - float_bits(magic) + 127u) << 23;
    return p * float_from_bits(exponent);
}

static inline float sigmoid(float x) {
    return 1.0f / (1.0f + exp_simd(-x));
}

static inline float dot(const float *a, const float *b, int n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}

// y += a * x
static inline void axpy(float *__restrict__ y, float a, const float *__restrict__ x, int n) {
    for (int i = 0; i < n; i++) { y[i] += a * x[i]; }
}

// Returns the position of a row's token in its document.
static int position_of(const int *starts, int row, int T) {
    return row % T - (starts != NULL ? starts[row] : 0);
}

void embedding_forward(float *out, const int *tokens, const int *starts, const float *wte,
                       const float *wpe, int B, int T, int C) {
#pragma omp parallel for
    for (int row = 0; row < B * T; row++) {
        float *o = out + (size_t)row * C;
        const float *token = wte + (size_t)tokens[row] * C;
        const float *position = wpe != NULL ? wpe + (size_t)position_of(starts, row, T) * C : NULL;
        for (int i = 0; i < C; i++) { o[i] = token[i] + (position != NULL ? position[i] : 0.0f); }
    }
}

void embedding_backward(float *dwte, float *dwpe, const float *dout, const int *tokens,
                        const int *starts, int B, int T, int C) {
#pragma omp parallel for
    for (int begin = 0; begin < C; begin += COLUMN_CHUNK) {
        int n = min_int(COLUMN_CHUNK, C - begin);
        for (int row = 0; row < B * T; row++) {
            const float *d = dout + (size_t)row * C + begin;
            axpy(dwte + (size_t)tokens[row] * C + begin, 1.0f, d, n);
            if (dwpe == NULL) { continue; }
            axpy(dwpe + (size_t)position_of(starts, row, T) * C + begin, 1.0f, d, n);
        }
    }
}

void bias_backward(float *dbias, const float *dout, int M, int N) {
#pragma omp parallel for
    for (int begin = 0; begin < N; begin += COLUMN_CHUNK) {
        int n = min_int(COLUMN_CHUNK, N - begin);
        for (int row = 0; row < M; row++) {
            axpy(dbias + begin, 1.0f, dout + (size_t)row * N + begin, n);
        }
    }
}

void cpu_norm_forward(float *out, float *mean, float *rstd, const float *x, const float *weight,
                      const float *bias, int M, int C, float eps) {
#pragma omp parallel for
    for (int row = 0; row < M; row++) {
        const float *in = x + (size_t)row * C;
        float *o = out + (size_t)row * C, mu = 0.0f, squares = 0.0f;
        if (bias != NULL) {
#pragma omp simd reduction(+ : mu)
            for (int i = 0; i < C; i++) { mu += in[i]; }
            mu /= (float)C;
            mean[row] = mu;
        }
#pragma omp simd reduction(+ : squares)
        for (int i = 0; i < C; i++) { squares += (in[i] - mu) * (in[i] - mu); }
        float r = 1.0f / sqrtf(squares / (float)C + eps);
        for (int i = 0; i < C; i++) {
            o[i] = (in[i] - mu) * r * weight[i] + (bias != NULL ? bias[i] : 0.0f);
        }
        rstd[row] = r;
    }
}

void cpu_norm_backward(float *dx, float *dweight, float *dbias, const float *dout, const float *x,
                       const float *weight, const float *mean, const float *rstd, int M, int C) {
#pragma omp parallel for
    for (int row = 0; row < M; row++) {
        const float *in = x + (size_t)row * C, *d = dout + (size_t)row * C;
        float *o = dx + (size_t)row * C, r = rstd[row], mu = 0.0f, sum = 0.0f, projected = 0.0f;
        if (dbias != NULL) {
            mu = mean[row];
            sum = dot(d, weight, C) / (float)C;
        }
#pragma omp simd reduction(+ : projected)
        for (int i = 0; i < C; i++) { projected += d[i] * weight[i] * (in[i] - mu) * r; }
        projected /= (float)C;
        for (int i = 0; i < C; i++) {
            o[i] += r * (d[i] * weight[i] - sum - (in[i] - mu) * r * projected);
        }
    }
#pragma omp parallel for
    for (int begin = 0; begin < C; begin += COLUMN_CHUNK) {
        int end = min_int(begin + COLUMN_CHUNK, C);
        for (int row = 0; row < M; row++) {
            const float *in = x + (size_t)row * C, *d = dout + (size_t)row * C;
            float mu = dbias != NULL ? mean[row] : 0.0f, r = rstd[row];
            for (int i = begin; i < end; i++) { dweight[i] += d[i] * (in[i] - mu) * r; }
        }
    }
    if (dbias != NULL) { bias_backward(dbias, dout, M, C); }
}

void qk_norm_forward(float *out, float *rstd, const float *qkv, const float *query_weight,
                     const float *key_weight, int M, int H, int G, int D, float eps) {
    size_t N = (size_t)(H + 2 * G) * (size_t)D, keys = (size_t)H * D, values = keys + (size_t)G * D;
#pragma omp parallel for
    for (int row = 0; row < M; row++) {
        const float *x = qkv + row * N;
        float *o = out + row * N, *r = rstd + (size_t)row * (H + G);
        cpu_norm_forward(o, NULL, r, x, query_weight, NULL, H, D, eps);
        cpu_norm_forward(o + keys, NULL, r + H, x + keys, key_weight, NULL, G, D, eps);
        memcpy(o + values, x + values, (N - values) * sizeof(float));
    }
}

void qk_norm_backward(float *dqkv, float *dquery_weight, float *dkey_weight, const float *qkv,
                      const float *query_weight, const float *key_weight, const float *rstd, int M,
                      int H, int G, int D) {
    size_t N = (size_t)(H + 2 * G) * (size_t)D, keys = (size_t)H * D, values = keys + (size_t)G * D;
    FREED float *dout = malloc_or_die(values * sizeof(float));
    for (int row = 0; row < M; row++) {
        const float *x = qkv + row * N, *r = rstd + (size_t)row * (H + G);
        float *d = dqkv + row * N;
        memcpy(dout, d, values * sizeof(float));
        memset(d, 0, values * sizeof(float));
        cpu_norm_backward(d, dquery_weight, NULL, dout, x, query_weight, NULL, r, H, D);
        cpu_norm_backward(d + keys, dkey_weight, NULL, dout + keys, x + keys, key_weight, NULL,
                          r + H, G, D);
    }
}

void rope_apply(float *qkv, const float *table, int B, int T, int H, int G, int D, bool inverse) {
    int half = D / 2, N = (H + 2 * G) * D;
    assert(D % 2 == 0);
    float direction = inverse ? -1.0f : 1.0f;
#pragma omp parallel for
    for (int row = 0; row < B * T; row++) {
        const float *cosine = table + (size_t)(row % T) * D, *sine = cosine + half;
        for (int head = 0; head < H + G; head++) { // queries, then keys
            float *x = qkv + (size_t)row * N + (size_t)head * D;
            for (int i = 0; i < half; i++) {
                float a = x[i], b = x[i + half], s = direction * sine[i];
                x[i] = a * cosine[i] - b * s;
                x[i + half] = b * cosine[i] + a * s;
            }
        }
    }
}

void attention_forward(float *out, float *lse, const float *qkv, const int *starts, int B, int T,
                       int H, int G, int D) {
    int N = (H + 2 * G) * D;
    float scale = 1.0f / sqrtf((float)D);
    assert(H % G == 0);
#pragma omp parallel
    {
        FREED float *p = malloc_or_die((size_t)T * sizeof(float));
#pragma omp for collapse(2)
        for (int b = 0; b < B; b++) {
            for (int h = 0; h < H; h++) {
                const float *base = qkv + (size_t)b * T * N;
                const float *k = base + (size_t)(H + h / (H / G)) * D, *v = k + (size_t)G * D;
                for (int t = 0; t < T; t++) {
                    const float *q = base + (size_t)t * N + (size_t)h * D;
                    float *o = out + ((size_t)(b * T + t) * H + h) * D;
                    float max = -INFINITY, sum = 0.0f;
                    int first = starts != NULL ? starts[b * T + t] : 0;
                    for (int s = first; s <= t; s++) {
                        p[s] = scale * dot(q, k + (size_t)s * N, D);
                        max = p[s] > max ? p[s] : max;
                    }
#pragma omp simd reduction(+ : sum)
                    for (int s = first; s <= t; s++) {
                        p[s] = exp_simd(p[s] - max);
                        sum += p[s];
                    }
                    memset(o, 0, (size_t)D * sizeof(float));
                    for (int s = first; s <= t; s++) { axpy(o, p[s] / sum, v + (size_t)s * N, D); }
                    lse[(size_t)(b * H + h) * T + t] = max + logf(sum);
                }
            }
        }
    }
}

void attention_backward(float *dqkv, const float *dout, const float *out, const float *lse,
                        const float *qkv, const int *starts, int B, int T, int H, int G, int D) {
    int N = (H + 2 * G) * D, heads = H / G;
    float scale = 1.0f / sqrtf((float)D);
    assert(H % G == 0);
    memset(dqkv, 0, (size_t)B * T * N * sizeof(float));
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++) {
        for (int g = 0; g < G; g++) { // a thread takes a key/value head and all its query heads
            size_t base = (size_t)b * T * N, k = base + (size_t)(H + g) * D, v = k + (size_t)G * D;
            for (int i = 0; i < heads * T; i++) {
                int h = g * heads + i / T, t = i % T;
                size_t q = base + (size_t)t * N + (size_t)h * D;
                size_t o = ((size_t)(b * T + t) * H + h) * D;
                float log_sum = lse[(size_t)(b * H + h) * T + t], delta = dot(dout + o, out + o, D);
                size_t first = starts != NULL ? (size_t)starts[b * T + t] * N : 0;
                // keys from the document's first one to the query's own
                for (size_t at = first; at <= (size_t)t * N; at += N) {
                    float p = expf(scale * dot(qkv + q, qkv + k + at, D) - log_sum);
                    float dscore = p * (dot(dout + o, qkv + v + at, D) - delta) * scale;
                    axpy(dqkv + v + at, p, dout + o, D);
                    axpy(dqkv + q, dscore, qkv + k + at, D);
                    axpy(dqkv + k + at, dscore, qkv + q, D);
                }
            }
        }
    }
}

// gelu(x) = x/2 (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
#define GELU_2U(x) (1.5957691216057308f * ((x) + 0.044715f * (x) * (x) * (x)))
#define GELU_2U_SLOPE(x) (1.5957691216057308f * (1.0f + 3.0f * 0.044715f * (x) * (x)))

void gelu_forward(float *out, const float *x, int64_t n) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) { out[i] = x[i] * sigmoid(GELU_2U(x[i])); }
}

void gelu_backward(float *dx, const float *dout, const float *x, int64_t n) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) {
        float s = sigmoid(GELU_2U(x[i]));
        dx[i] = dout[i] * (s + x[i] * s * (1.0f - s) * GELU_2U_SLOPE(x[i]));
    }
}

void swiglu_forward(float *out, const float *x, int M, int F) {
#pragma omp parallel for
    for (int row = 0; row < M; row++) {
        const float *gate = x + (size_t)row * 2 * F, *up = gate + F;
        float *o = out + (size_t)row * F;
        for (int i = 0; i < F; i++) { o[i] = gate[i] * sigmoid(gate[i]) * up[i]; }
    }
}

void swiglu_backward(float *dx, const float *dout, const float *x, int M, int F) {
#pragma omp parallel for
    for (int row = 0; row < M; row++) {
        const float *gate = x + (size_t)row * 2 * F, *up = gate + F, *d = dout + (size_t)row * F;
        float *dgate = dx + (size_t)row * 2 * F, *dup = dgate + F;
        for (int i = 0; i < F; i++) {
            float s = sigmoid(gate[i]);
            dgate[i] = d[i] * up[i] * (s + gate[i] * s * (1.0f - s));
            dup[i] = d[i] * gate[i] * s;
        }
    }
}

void cross_entropy(float *losses, float *logits, const int *targets, int M, int V, int P,
                   LossTerms terms) {
    bool gradient = terms.gradient_scale > 0.0f, caps = terms.softcap > 0.0f;
#pragma omp parallel for
    for (int row = 0; row < M; row++) {
        float *x = logits + (size_t)row * P, *y = x;
        int target = targets[row];
        assert(target < V && V <= P);
        losses[row] = 0.0f;
        if (target < 0) {
            if (gradient) { memset(x, 0, (size_t)P * sizeof(float)); }
            continue;
        }
        if (caps) {
            y = malloc_or_die((size_t)V * sizeof(float));
            for (int i = 0; i < V; i++) { y[i] = terms.softcap * tanhf(x[i] / terms.softcap); }
        }
        float max = y[0];
        double sum = 0.0; // in FP32, a sum of a million values would have only five correct digits
        for (int i = 0; i < V; i++) { max = y[i] > max ? y[i] : max; }
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < V; i++) { sum += exp_simd(y[i] - max); }
        // cppcheck-suppress invalidFunctionArg // cppcheck assumes V = 0
        float lse = (float)(log(sum) + max);
        losses[row] = lse - y[target];
        if (gradient) {
            float scale = (float)(terms.gradient_scale / sum);
            if (terms.z_loss > 0.0f) { scale *= 1.0f + 2.0f * terms.z_loss * lse; }
#pragma omp simd
            for (int i = 0; i < V; i++) { x[i] = exp_simd(y[i] - max) * scale; }
            x[target] -= terms.gradient_scale;
            memset(x + V, 0, (size_t)(P - V) * sizeof(float));
            for (int i = 0; i < V && caps; i++) {
                float t = y[i] / terms.softcap;
                x[i] *= 1.0f - t * t;
            }
        }
        if (caps) { free(y); }
    }
}

void adamw_update(float *weights, float *m, float *v, const float *gradients, int64_t n, AdamW a) {
    assert(a.step >= 1);
    float correction1 = (float)(1.0 - pow(a.beta1, (double)a.step));
    float correction2 = (float)(1.0 - pow(a.beta2, (double)a.step));
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) {
        float g = gradients[i] * a.gradient_scale, least = a.floor * m[i] * m[i];
        v[i] = least > v[i] ? least : v[i];
        m[i] = a.beta1 * m[i] + (1.0f - a.beta1) * g;
        v[i] = a.beta2 * v[i] + (1.0f - a.beta2) * g * g;
        float step = (m[i] / correction1) / (sqrtf(v[i] / correction2) + a.eps);
        weights[i] -= a.lr * (step + a.weight_decay * weights[i]);
    }
}

uint32_t moment_key(uint64_t seed, int64_t step, Moment which) {
    return (uint32_t)rng_mix(seed + 2 * (uint64_t)step + (which == MOMENT_SECOND));
}

// Returns the code of x, rounded stochastically: random is in [0, 1). If random is uniform, the
// mean of the codes is the unrounded code (moments.h).
static int moment_code(float x, uint16_t scale, Moment which, double random) {
    double size = which == MOMENT_FIRST ? fabs(x) : sqrt(x), unit = moment_unit(scale, which);
    double unrounded = unit > 0.0 ? fmin(cbrt(size / unit), moment_max_code(which)) : 0.0;
    if (which == MOMENT_SECOND && scale > 0) { unrounded = fmax(unrounded, 1.0); }
    return (int)floor(copysign(unrounded, x) + random);
}

void moment_encode(uint8_t *codes, uint16_t *scales, Moment which, const float *x, int64_t n,
                   const MomentRounding *rounding) {
#pragma omp parallel for
    for (int64_t begin = 0; begin < n; begin += MOMENT_BLOCK) {
        int64_t end = min64(begin + MOMENT_BLOCK, n);
        float largest = 0.0f;
        for (int64_t i = begin; i < end; i++) { largest = fmaxf(largest, fabsf(x[i])); }
        float root = which == MOMENT_FIRST ? largest : sqrtf(largest);
        uint16_t scale = scales[begin / MOMENT_BLOCK] = moment_scale(largest, root, which);
        for (int64_t i = begin; i < end; i++) {
            uint32_t half = 0x8000u;
            if (rounding != NULL) {
                int64_t element = rounding->first + i;
                half = moment_bits(moment_hash(rounding->key, element), (int)(element % 4));
                half = which == MOMENT_FIRST ? half & 0xffffu : half >> 16;
            }
            codes[i] = (uint8_t)moment_code(x[i], scale, which, half * 0x1p-16);
        }
    }
}

void moment_decode(float *x, Moment which, const uint8_t *codes, const uint16_t *scales, int skip,
                   int64_t n) {
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        float unit = moment_unit(scales[(skip + i) / MOMENT_BLOCK], which);
        float code = which == MOMENT_FIRST ? (float)(int8_t)codes[i] : (float)codes[i];
        x[i] = moment_level(code, unit, which);
    }
}

void moment_round(float *x, Moment which, int64_t n, MomentRounding rounding) {
    FREED uint8_t *codes = malloc_or_die((size_t)n);
    FREED uint16_t *scales = malloc_or_die((size_t)(n / MOMENT_BLOCK + 1) * sizeof(uint16_t));
    moment_encode(codes, scales, which, x, n, &rounding);
    moment_decode(x, which, codes, scales, 0, n);
}

// Two neighbouring values take 16 bits each of one random number. A value whose result would not be
// finite is rounded to nearest.
void moment_round_bf16(float *x, int64_t n, MomentRounding rounding) {
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        int64_t element = rounding.first + i;
        uint32_t bits = rng_bits32(rounding.key, (uint64_t)(element & ~(int64_t)1));
        uint32_t random = element % 2 == 0 ? bits & 0xffffu : bits >> 16;
        float up = float_from_bits((float_bits(x[i]) + random) & 0xffff0000u);
        x[i] = isfinite(x[i]) && isfinite(up) ? up : bf16_decode(bf16_encode(x[i]));
    }
}

void muon_momentum(float *gradients, float *m, int64_t n, float momentum, float gradient_scale) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) {
        float g = gradients[i] * gradient_scale;
        m[i] = momentum * m[i] + g;
        gradients[i] = g + momentum * m[i];
    }
}

// A Newton-Schulz step replaces X by (a I + b G + c G^2) X, where G = X X'. If X has more rows than
// columns, G is X' X, which is smaller, and the step replaces X by X (a I + b G + c G^2).
void muon_orthogonalize(float *x, int rows, int columns, float scale, float *scratch) {
    bool tall = rows > columns;
    int side = tall ? columns : rows;
    int64_t n = (int64_t)rows * columns, squares = (int64_t)side * side;
    float *gram = scratch, *polynomial = gram + squares, *result = polynomial + squares;
    float inverse = 1.0f / ((float)sqrt(sum_of_squares(x, n)) + MUON_EPSILON);
    for (int64_t i = 0; i < n; i++) { x[i] *= inverse; }
    for (int step = 0; step < MUON_STEPS; step++) {
        cpu_gemm((CpuGemm){side, side, tall ? rows : columns, x, x, gram, .trans_a = tall,
                           .trans_b = !tall, .alpha = 1.0f});
        for (int64_t i = 0; i < squares; i++) {
            polynomial[i] = MUON_B * gram[i] + (i % (side + 1) == 0 ? MUON_A : 0.0f);
        }
        cpu_gemm((CpuGemm){side, side, side, gram, gram, polynomial, .addend = polynomial,
                           .alpha = MUON_C});
        const float *left = tall ? x : polynomial, *right = tall ? polynomial : x;
        float alpha = step + 1 < MUON_STEPS ? 1.0f : scale;
        cpu_gemm((CpuGemm){rows, columns, side, left, right, result, .alpha = alpha});
        memcpy(x, result, (size_t)n * sizeof(float));
    }
}

float muon_scale(float factor, int rows, int columns) {
    return factor * sqrtf((float)(rows > columns ? rows : columns));
}

void muon_update(float *weights, const float *update, int64_t n, float lr, float weight_decay) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) { weights[i] -= lr * (update[i] + weight_decay * weights[i]); }
}

double sum_of_squares(const float *x, int64_t n) {
    enum { BLOCK = 1 << 16 };
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    double *partial = malloc_or_die((size_t)blocks * sizeof(double)), total = 0.0;
#pragma omp parallel for
    for (int64_t b = 0; b < blocks; b++) {
        int64_t end = min64((b + 1) * BLOCK, n);
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = b * BLOCK; i < end; i++) { sum += (double)x[i] * x[i]; }
        partial[b] = sum;
    }
    for (int64_t b = 0; b < blocks; b++) { total += partial[b]; }
    free(partial);
    return total;
}

float tensor_amax(const float *x, int64_t n) {
    uint32_t max = 0; // non-negative floats are ordered as their bits are; NaN lies above infinity
#pragma omp parallel for simd reduction(max : max)
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
        max = bits > max ? bits : max;
    }
    return float_from_bits(max);
}

void count_fp8(Fp8Counts *counts, const float *x, int64_t n, float scale, Fp8Type type) {
    for (int64_t i = 0; i < n; i++) { fp8_count(counts, fp8_encode(x[i] * scale, type), type); }
}

void round_to_fp8(float *out, const float *x, int64_t n, float scale, Fp8Type type) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) { out[i] = fp8_round(x[i] * scale, type); }
}

void round_blocks_to_fp8(float *out, const float *x, Fp8Blocks b, Fp8Counts *counts) {
    unsigned long long largest_codes = 0, zero = 0, subnormal = 0;
    assert(b.codes == NULL || (b.height == FP8_BLOCK && b.width == FP8_BLOCK && !b.power_of_two));
#pragma omp parallel for collapse(2) reduction(+ : largest_codes, zero, subnormal)
    for (int top = 0; top < b.rows; top += b.height) {
        for (int left = 0; left < b.columns; left += FP8_BLOCK) {
            int bottom = min_int(top + b.height, b.rows);
            int width = min_int(FP8_BLOCK, b.columns - left);
            uint32_t amax[FP8_BLOCK] = {0}, largest = 0; // each column's amax, as bits
            float scale[FP8_BLOCK];
            Fp8Counts codes = {0};
            for (int row = top; row < bottom; row++) {
                const float *from = x + (int64_t)row * b.columns + left;
                for (int i = 0; i < width; i++) {
                    uint32_t bits = float_bits(from[i]) & 0x7fffffffu;
                    amax[i] = bits > amax[i] ? bits : amax[i];
                }
            }
            for (int i = 0; i < width; i++) { largest = amax[i] > largest ? amax[i] : largest; }
            for (int i = 0; i < width; i++) {
                float magnitude = float_from_bits(b.width == 1 ? amax[i] : largest);
                scale[i] = fp8_block_scale(magnitude, fp8_max(b.type), b.power_of_two);
            }
            // usually the factor is computed from the amax; but if the scale is at its limit, or is
            // 1 because the block is all zeros, the factor is the scale's inverse
            if (b.codes != NULL) {
                float factor = float_from_bits(largest) / fp8_max(b.type);
                bool usual = factor >= FLT_MIN && factor <= FLT_MAX;
                int across = (b.columns + FP8_BLOCK - 1) / FP8_BLOCK;
                b.factors[(int64_t)(top / FP8_BLOCK) * across + left / FP8_BLOCK] =
                    usual ? factor : 1.0f / scale[0];
            }
            for (int row = top; row < bottom; row++) {
                int64_t at = (int64_t)row * b.columns + left;
                for (int i = 0; i < width && counts != NULL; i++) {
                    count_fp8(&codes, x + at + i, 1, scale[i], b.type);
                }
                for (int i = 0; i < width && b.codes != NULL; i++) {
                    b.codes[at + i] = fp8_encode(x[at + i] * scale[i], b.type);
                }
                for (int i = 0; i < width; i++) {
                    out[at + i] = fp8_round(x[at + i] * scale[i], b.type) * (1.0f / scale[i]);
                }
            }
            largest_codes += codes.largest;
            zero += codes.zero;
            subnormal += codes.subnormal;
        }
    }
    if (counts == NULL) { return; }
    counts->elements += (unsigned long long)b.rows * (unsigned long long)b.columns;
    counts->largest += largest_codes;
    counts->zero += zero;
    counts->subnormal += subnormal;
}

void round_to_bf16(float *out, const float *x, int64_t n) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) { out[i] = bf16_decode(bf16_encode(x[i])); }
}
