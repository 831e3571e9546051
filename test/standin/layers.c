// The kernels around the products: embeddings, norms, activations, RoPE, loss, in BF16.
#include "values.h"

#include "../../kernels/cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t planned_sums;

size_t partial_sums_bytes(int64_t columns) {
    planned_sums = (size_t)columns * sizeof(float);
    return planned_sums;
}

// ---- embeddings ---------------------------------------------------------------------------------

// Rows of the embedding that are looked at.
static int64_t rows_of(const int *tokens, int M) {
    int largest = 0;
    for (int i = 0; i < M; i++) { largest = tokens[i] > largest ? tokens[i] : largest; }
    return largest + 1;
}

void gpu_embedding_forward(Bf16 *out, const int *tokens, const Bf16 *wte, const Bf16 *wpe, int B,
                           int T, int C, cudaStream_t stream) {
    (void)stream;
    int64_t n = (int64_t)B * T * C;
    float *token = values_read(wte, TYPE_BF16, rows_of(tokens, B * T) * C);
    float *position = values_read(wpe, TYPE_BF16, (int64_t)T * C);
    float *values = malloc_or_die((size_t)n * sizeof(float));
    embedding_forward(values, tokens, token, position, B, T, C);
    values_write(out, TYPE_BF16, values, n);
    free(token);
    free(position);
    free(values);
}

// Run by run, as the lists say.
void gpu_embedding_backward(GradientOut dwte, const Bf16 *dout, const int *tokens, const int *rows,
                            const int *starts, const int *runs, int M, int C, cudaStream_t stream) {
    (void)stream;
    int64_t n = rows_of(tokens, M) * C;
    dwte.accumulate = true;
    float *sums = gradient_begin(dwte, n);
    for (int run = 0; run < runs[0]; run++) {
        int token = tokens[rows[starts[run]]];
        for (int i = starts[run]; i < starts[run + 1]; i++) {
            float *d = values_read(dout + (int64_t)rows[i] * C, TYPE_BF16, C);
            embedding_backward(sums, NULL, d, &token, 1, 1, C);
            free(d);
        }
    }
    gradient_end(dwte, sums, n);
}

void gpu_column_sums(GradientOut sums, const Bf16 *x, float *scratch, int M, int N,
                     cudaStream_t stream) {
    (void)stream;
    float *values = values_read(x, TYPE_BF16, (int64_t)M * N), *out = gradient_begin(sums, N);
    if (scratch != NULL && getenv("STANDIN_OVERRUN") != NULL) { // a row more than was planned
        memset((char *)scratch + planned_sums, 0, (size_t)N * sizeof(float));
    }
    bias_backward(out, values, M, N);
    gradient_end(sums, out, N);
    free(values);
}

void gpu_position_backward(GradientOut dwpe, const Bf16 *dout, int B, int T, int C,
                           cudaStream_t stream) {
    gpu_column_sums(dwpe, dout, NULL, B, T * C, stream);
}

// ---- norms --------------------------------------------------------------------------------------

// The norm in floats, for the caller to free; its statistics to where they go.
static float *normalized(NormForward n) {
    int64_t size = (int64_t)n.M * n.C;
    float *x = values_read(n.x, TYPE_BF16, size), *weight = values_read(n.weight, TYPE_BF16, n.C);
    float *bias = values_read(n.bias, TYPE_BF16, n.C);
    float *out = malloc_or_die((size_t)size * sizeof(float));
    if (bias != NULL) {
        layernorm_forward(out, n.mean, n.rstd, x, weight, bias, n.M, n.C, n.eps);
    } else {
        rmsnorm_forward(out, n.rstd, x, weight, n.M, n.C, n.eps);
    }
    free(x);
    free(weight);
    free(bias);
    return out;
}

void gpu_norm_forward(NormForward n, cudaStream_t stream) {
    (void)stream;
    float *out = normalized(n);
    int64_t size = (int64_t)n.M * n.C;
    if (n.out != NULL) { values_round(n.out, TYPE_BF16, out, size); }
    if (n.out != NULL) { values_amax(n.amax, out, size); }
    free(out);
}

void gpu_norm_forward_fp8(Fp8Out out, NormForward n, cudaStream_t stream) {
    (void)stream;
    float *values = normalized(n);
    values_to_fp8(out, false, values, n.M, n.C);
    free(values);
}

void gpu_norm_backward(NormBackward n, cudaStream_t stream) {
    int64_t size = (int64_t)n.M * n.C;
    float *dx = values_read(n.d_residual, TYPE_BF16, size), *x = values_read(n.x, TYPE_BF16, size);
    float *dout = values_read(n.dout, TYPE_BF16, size);
    float *weight = values_read(n.weight, TYPE_BF16, n.C);
    float *dweight = gradient_begin(n.dweight, n.C), *dbias = gradient_begin(n.dbias, n.C);
    if (n.mean != NULL) {
        layernorm_backward(dx, dweight, dbias, dout, x, weight, n.mean, n.rstd, n.M, n.C);
    } else {
        rmsnorm_backward(dx, dweight, dout, x, weight, n.rstd, n.M, n.C);
    }
    values_round(n.d_residual, TYPE_BF16, dx, size);
    values_amax(n.amax, dx, size);
    gradient_end(n.dweight, dweight, n.C);
    gradient_end(n.dbias, dbias, n.C);
    gpu_column_sums(n.column_sums, n.d_residual, n.scratch, n.M, n.C, stream);
    free(dx);
    free(x);
    free(dout);
    free(weight);
}

void gpu_norm_backward_fp8(Fp8Out out, NormBackward n, cudaStream_t stream) {
    const GradientOut none = {0};
    gpu_norm_backward(n, stream);
    gpu_quantize(out, false, none, n.d_residual, n.scratch, n.M, n.C, stream);
}

// ---- activations --------------------------------------------------------------------------------

// Rounds and writes n values, and frees them.
static void write_ranged(Bf16 *out, float *amax, float *values, int64_t n) {
    values_round(out, TYPE_BF16, values, n);
    values_amax(amax, values, n);
    free(values);
}

static void write_codes(Fp8Out out, float *values, int M, int N) {
    values_to_fp8(out, false, values, M, N);
    free(values);
}

// f(x), and dout f'(x): for the caller to free.
static float *gelu_of(const Bf16 *x, int64_t n) {
    float *values = values_read(x, TYPE_BF16, n);
    gelu_forward(values, values, n);
    return values;
}

static float *gelu_gradient(const Bf16 *dout, const Bf16 *x, int64_t n) {
    float *values = values_read(x, TYPE_BF16, n), *d = values_read(dout, TYPE_BF16, n);
    gelu_backward(d, d, values, n);
    free(values);
    return d;
}

static float *swiglu_of(const Bf16 *x, int M, int F) {
    float *values = values_read(x, TYPE_BF16, (int64_t)M * 2 * F);
    float *out = malloc_or_die((size_t)M * (size_t)F * sizeof(float));
    swiglu_forward(out, values, M, F);
    free(values);
    return out;
}

static float *swiglu_gradient(const Bf16 *dout, const Bf16 *x, int M, int F) {
    int64_t n = (int64_t)M * F;
    float *values = values_read(x, TYPE_BF16, 2 * n), *d = values_read(dout, TYPE_BF16, n);
    float *dx = malloc_or_die((size_t)(2 * n) * sizeof(float));
    swiglu_backward(dx, d, values, M, F);
    free(values);
    free(d);
    return dx;
}

void gpu_gelu_forward(Bf16 *out, float *amax, const Bf16 *x, int64_t n, cudaStream_t stream) {
    (void)stream;
    write_ranged(out, amax, gelu_of(x, n), n);
}

void gpu_gelu_forward_fp8(Fp8Out out, const Bf16 *x, int M, int F, cudaStream_t stream) {
    (void)stream;
    write_codes(out, gelu_of(x, (int64_t)M * F), M, F);
}

void gpu_gelu_backward(GeluBackward g, cudaStream_t stream) {
    int64_t n = (int64_t)g.M * g.F;
    write_ranged(g.dx, g.amax, gelu_gradient(g.dout, g.x, n), n);
    gpu_column_sums(g.column_sums, g.dx, g.scratch, g.M, g.F, stream);
}

void gpu_gelu_backward_fp8(Fp8Out out, GradientOut sums, const Bf16 *dout, const Bf16 *x,
                           float *scratch, int M, int F, cudaStream_t stream) {
    (void)scratch, (void)stream;
    float *values = gelu_gradient(dout, x, (int64_t)M * F), *total = gradient_begin(sums, F);
    bias_backward(total, values, M, F);
    gradient_end(sums, total, F);
    write_codes(out, values, M, F);
}

void gpu_swiglu_forward(Bf16 *out, float *amax, const Bf16 *x, int M, int F, cudaStream_t stream) {
    (void)stream;
    write_ranged(out, amax, swiglu_of(x, M, F), (int64_t)M * F);
}

void gpu_swiglu_forward_fp8(Fp8Out out, const Bf16 *x, int M, int F, cudaStream_t stream) {
    (void)stream;
    write_codes(out, swiglu_of(x, M, F), M, F);
}

void gpu_swiglu_backward(Bf16 *dx, float *amax, const Bf16 *dout, const Bf16 *x, int M, int F,
                         cudaStream_t stream) {
    (void)stream;
    write_ranged(dx, amax, swiglu_gradient(dout, x, M, F), (int64_t)M * 2 * F);
}

void gpu_swiglu_backward_fp8(Fp8Out out, const Bf16 *dout, const Bf16 *x, int M, int F,
                             cudaStream_t stream) {
    (void)stream;
    write_codes(out, swiglu_gradient(dout, x, M, F), M, 2 * F);
}

static float *turned(const Bf16 *qkv, const float *table, int B, int T, int H, int G, int D,
                     bool inverse) {
    float *values = values_read(qkv, TYPE_BF16, (int64_t)B * T * (H + 2 * G) * D);
    rope_apply(values, table, B, T, H, G, D, inverse);
    return values;
}

void gpu_rope_apply(Bf16 *qkv, const float *table, int B, int T, int H, int G, int D, bool inverse,
                    cudaStream_t stream) {
    (void)stream;
    write_ranged(qkv, NULL, turned(qkv, table, B, T, H, G, D, inverse),
                 (int64_t)B * T * (H + 2 * G) * D);
}

void gpu_rope_backward_fp8(Fp8Out out, const Bf16 *d_qkv, const float *table, int B, int T, int H,
                           int G, int D, cudaStream_t stream) {
    (void)stream;
    write_codes(out, turned(d_qkv, table, B, T, H, G, D, true), B * T, (H + 2 * G) * D);
}

// ---- loss ---------------------------------------------------------------------------------------

void gpu_cross_entropy_forward(float *losses, float *lse, const Bf16 *logits, const int *targets,
                               int M, int V, int P, cudaStream_t stream) {
    (void)stream;
    float *x = values_read(logits, TYPE_BF16, (int64_t)M * P);
    cross_entropy(losses, x, targets, M, V, P, 0.0f);
    for (int i = 0; i < M && lse != NULL; i++) {
        lse[i] = targets[i] < 0 ? INFINITY : losses[i] + x[(int64_t)i * P + targets[i]];
    }
    free(x);
}

void gpu_cross_entropy(float *losses, Bf16 *logits, const int *targets, int M, int V, int P,
                       float gradient_scale, cudaStream_t stream) {
    (void)stream;
    float *x = values_read(logits, TYPE_BF16, (int64_t)M * P);
    cross_entropy(losses, x, targets, M, V, P, gradient_scale);
    if (gradient_scale > 0.0f) { values_write(logits, TYPE_BF16, x, (int64_t)M * P); }
    free(x);
}

// The log-sum-exp must be that of these rows.
void gpu_cross_entropy_backward_fp8(Fp8Out out, const LossRows *rows, float gradient_scale, int M,
                                    int V, int P, cudaStream_t stream) {
    float *x = values_read(rows->logits, TYPE_BF16, (int64_t)M * P);
    float *losses = malloc_or_die(2 * (size_t)M * sizeof(float)), *lse = losses + M;
    gpu_cross_entropy_forward(losses, lse, rows->logits, rows->targets, M, V, P, stream);
    for (int i = 0; i < M; i++) {
        if (float_bits(lse[i]) != float_bits(rows->lse[i])) {
            die("stand-in: log-sum-exp %g of row %d, not %g", rows->lse[i], i, lse[i]);
        }
    }
    cross_entropy(losses, x, rows->targets, M, V, P, gradient_scale);
    free(losses);
    write_codes(out, x, M, P);
}

void gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate, cudaStream_t stream) {
    (void)stream;
    double all = accumulate ? *sum : 0.0;
    for (int i = 0; i < M; i++) { all += losses[i]; }
    *sum = all;
}
