// The kernels around the products: embeddings, norms, activations, RoPE, loss, in BF16.
#include "values.h"

#include "../../kernels/cpu.h"

#include <stdlib.h>
#include <string.h>

size_t partial_sums_bytes(int64_t M, int64_t columns) {
    (void)M;
    return (size_t)columns * sizeof(float);
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
void gpu_embedding_backward(Gradient dwte, const Bf16 *dout, const int *tokens, const int *rows,
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

// Through the scratch, as the kernels do.
static void column_sums(Gradient sums, const Bf16 *x, Scratch scratch, int M, int N) {
    if (sums.data == NULL) { return; }
    if (scratch.bytes < partial_sums_bytes(M, N)) { die("stand-in: scratch of %d columns", N); }
    memset(scratch.data, 0x5a, partial_sums_bytes(M, N));
    float *values = values_read(x, TYPE_BF16, (int64_t)M * N), *out = gradient_begin(sums, N);
    if (getenv("STANDIN_OVERRUN") != NULL) { // a row more than was planned
        memset((char *)scratch.data + scratch.bytes, 0, (size_t)N * sizeof(float));
    }
    bias_backward(out, values, M, N);
    gradient_end(sums, out, N);
    free(values);
}

void gpu_position_backward(Gradient dwpe, const Bf16 *dout, int B, int T, int C,
                           cudaStream_t stream) {
    (void)stream;
    float *values = values_read(dout, TYPE_BF16, (int64_t)B * T * C);
    float *out = gradient_begin(dwpe, (int64_t)T * C);
    bias_backward(out, values, B, T * C);
    gradient_end(dwpe, out, (int64_t)T * C);
    free(values);
}

// ---- norms --------------------------------------------------------------------------------------

// The norm in floats, for the caller to free; its statistics to where they go.
static float *normalized(NormForward n) {
    int64_t size = (int64_t)n.M * n.C;
    float *x = values_read(n.x, TYPE_BF16, size), *weight = values_read(n.weight, TYPE_BF16, n.C);
    float *bias = values_read(n.bias, TYPE_BF16, n.C);
    float *out = malloc_or_die((size_t)size * sizeof(float));
    cpu_norm_forward(out, n.mean, n.rstd, x, weight, bias, n.M, n.C, n.eps);
    free(x);
    free(weight);
    free(bias);
    return out;
}

void gpu_norm_forward(Operand out, Fp8Tensor q, NormForward n, cudaStream_t stream) {
    (void)stream;
    values_produce(out, q, normalized(n), n.M, n.C);
}

// Its codes are those of the rounded gradient.
void gpu_norm_backward(Operand out, Fp8Tensor q, NormBackward n, cudaStream_t stream) {
    (void)stream;
    int64_t size = (int64_t)n.M * n.C;
    float *dx = values_read(out.bf16, TYPE_BF16, size), *x = values_read(n.x, TYPE_BF16, size);
    float *dout = values_read(n.dout, TYPE_BF16, size);
    float *weight = values_read(n.weight, TYPE_BF16, n.C);
    float *dweight = gradient_begin(n.dweight, n.C), *dbias = gradient_begin(n.dbias, n.C);
    cpu_norm_backward(dx, dweight, n.mean != NULL ? dbias : NULL, dout, x, weight, n.mean, n.rstd,
                      n.M, n.C);
    gradient_end(n.dweight, dweight, n.C);
    gradient_end(n.dbias, dbias, n.C);
    q.fused = false;
    values_produce(out, q, dx, n.M, n.C);
    column_sums(n.column_sums, out.bf16, n.scratch, n.M, n.C);
    free(x);
    free(dout);
    free(weight);
}

// ---- activations --------------------------------------------------------------------------------

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

void gpu_gelu_forward(Operand out, Fp8Tensor q, const Bf16 *x, int M, int F, cudaStream_t stream) {
    (void)stream;
    values_produce(out, q, gelu_of(x, (int64_t)M * F), M, F);
}

void gpu_gelu_backward(Operand dx, Fp8Tensor q, Gradient sums, const Bf16 *dout, const Bf16 *x,
                       Scratch scratch, int M, int F, cudaStream_t stream) {
    (void)stream;
    float *values = gelu_gradient(dout, x, (int64_t)M * F), *total = gradient_begin(sums, F);
    if (q.fused) { bias_backward(total, values, M, F); }
    values_produce(dx, q, values, M, F);
    if (q.fused) {
        gradient_end(sums, total, F);
    } else {
        free(total);
        column_sums(sums, dx.bf16, scratch, M, F);
    }
}

void gpu_swiglu_forward(Operand out, Fp8Tensor q, const Bf16 *x, int M, int F,
                        cudaStream_t stream) {
    (void)stream;
    values_produce(out, q, swiglu_of(x, M, F), M, F);
}

void gpu_swiglu_backward(Operand dx, Fp8Tensor q, const Bf16 *dout, const Bf16 *x, int M, int F,
                         cudaStream_t stream) {
    (void)stream;
    values_produce(dx, q, swiglu_gradient(dout, x, M, F), M, 2 * F);
}

static float *turned(const Bf16 *qkv, const float *table, int B, int T, int H, int G, int D,
                     bool inverse) {
    float *values = values_read(qkv, TYPE_BF16, (int64_t)B * T * (H + 2 * G) * D);
    rope_apply(values, table, B, T, H, G, D, inverse);
    return values;
}

void gpu_rope_forward(Bf16 *qkv, const float *table, int B, int T, int H, int G, int D,
                      cudaStream_t stream) {
    (void)stream;
    Operand out = {qkv, NULL, NULL};
    values_produce(out, (Fp8Tensor){0}, turned(qkv, table, B, T, H, G, D, false), B * T,
                   (H + 2 * G) * D);
}

void gpu_rope_backward(Operand d_qkv, Fp8Tensor q, const float *table, int B, int T, int H, int G,
                       int D, cudaStream_t stream) {
    (void)stream;
    values_produce(d_qkv, q, turned(d_qkv.bf16, table, B, T, H, G, D, true), B * T,
                   (H + 2 * G) * D);
}

// ---- loss ---------------------------------------------------------------------------------------

void gpu_cross_entropy(float *losses, Operand logits, Fp8Tensor q, float *lse, const int *targets,
                       int M, int V, int P, float gradient_scale, cudaStream_t stream) {
    (void)stream;
    float *x = values_read(logits.bf16, TYPE_BF16, (int64_t)M * P);
    for (int i = 0; i < M && q.fused; i++) { lse[i] = 0.0f; }
    cross_entropy(losses, x, targets, M, V, P, gradient_scale);
    if (gradient_scale > 0.0f) {
        values_produce(logits, q, x, M, P);
    } else {
        free(x);
    }
}

void gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate, cudaStream_t stream) {
    (void)stream;
    double all = accumulate ? *sum : 0.0;
    for (int i = 0; i < M; i++) { all += losses[i]; }
    *sum = all;
}
