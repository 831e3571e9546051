// Stand-ins for the kernels around the matmuls: embeddings, norms, activations, RoPE and loss in
// BF16; operands in FP8.
#include "values.h"

// Where test/emulated/ runs the kernels themselves, these are theirs.
#pragma weak gpu_has_fused_matmuls
#pragma weak gpu_matmul_gelu
#pragma weak gpu_matmul_gelu_backward
#pragma weak gpu_matmul_swiglu
#pragma weak gpu_matmul_max_sums
#pragma weak gpu_matmul_rope
#pragma weak partial_sums_bytes

size_t partial_sums_bytes(int64_t M, int64_t columns) {
    return (size_t)columns * sizeof(float);
}

// The column sums of x [M,N]. The scratch is written, as by the kernels.
static void column_sums(Gradient sums, const float *x, Scratch scratch, int M, int N) {
    if (sums.data == NULL) { return; }
    if (scratch.bytes < partial_sums_bytes(M, N)) { die("stand-in: scratch of %d columns", N); }
    memset(scratch.data, 0x5a, partial_sums_bytes(M, N));
    if (getenv("STANDIN_OVERRUN") != NULL) { // a row more than was planned
        memset((char *)scratch.data + scratch.bytes, 0, (size_t)N * sizeof(float));
    }
    FREED float *out = gradient_begin(sums, N);
    bias_backward(out, x, M, N);
    gradient_end(sums, out, N);
}

void gpu_quantize(Gpu *gpu, Operand out, Gradient sums, Scratch scratch, int M, int N) {
    bool measures = out.scaling == SCALE_CURRENT && out.writes_amax;
    bool codes = out.rows.codes != NULL || out.columns.codes != NULL || measures;
    if (codes || sums.data != NULL) {
        gpu_family(gpu, codes ? FAMILY_QUANTIZE : FAMILY_ACTIVATIONS);
    }
    FREED float *values = bf16_read(out.bf16, M * N);
    values_amax(measures ? &out.scale->amax : NULL, values, M * N);
    column_sums(sums, values, scratch, M, N);
    values_to_fp8(out, values, M, N);
}

void gpu_count_codes(Gpu *gpu, Fp8Counts *counts, const uint8_t *codes, int64_t n, Fp8Type type) {
    gpu_family(gpu, FAMILY_QUANTIZE);
    for (int64_t i = 0; i < n; i++) { fp8_count(counts, codes[i], type); }
}

// ---- embeddings ---------------------------------------------------------------------------------

// Rows of the embedding up to the last one that is used.
static int rows_of(const int *tokens, int M) {
    int largest = 0;
    for (int i = 0; i < M; i++) { largest = tokens[i] > largest ? tokens[i] : largest; }
    return largest + 1;
}

void gpu_embedding_forward(Gpu *gpu, Bf16 *out, const int *tokens, const int *starts,
                           const Bf16 *wte, const Bf16 *wpe, int B, int T, int C) {
    gpu_family(gpu, FAMILY_EMBEDDINGS);
    FREED float *token = bf16_read(wte, rows_of(tokens, B * T) * C);
    FREED float *position = bf16_read(wpe, T * C), *values = values_new(B * T * C);
    embedding_forward(values, tokens, starts, token, position, B, T, C);
    values_write(out, TYPE_BF16, values, B * T * C);
}

// Run by run, as the lists say.
void gpu_embedding_backward(Gpu *gpu, Gradient dwte, const Bf16 *dout, const int *tokens,
                            TokenRuns runs, int M, int C) {
    gpu_family(gpu, FAMILY_EMBEDDINGS);
    int n = rows_of(tokens, M) * C;
    dwte.accumulate = true;
    FREED float *d = bf16_read(dout, M * C), *sums = gradient_begin(dwte, n);
    for (int run = 0; run < runs.runs[0]; run++) {
        int token = tokens[runs.rows[runs.starts[run]]];
        for (int i = runs.starts[run]; i < runs.starts[run + 1]; i++) {
            embedding_backward(sums, NULL, d + runs.rows[i] * C, &token, NULL, 1, 1, C);
        }
    }
    gradient_end(dwte, sums, n);
}

void gpu_position_backward(Gpu *gpu, Gradient dwpe, const Bf16 *dout, int B, int T, int C) {
    gpu_family(gpu, FAMILY_EMBEDDINGS);
    FREED float *values = bf16_read(dout, B * T * C), *out = gradient_begin(dwpe, T * C);
    bias_backward(out, values, B, T * C);
    gradient_end(dwpe, out, T * C);
}

// ---- norms --------------------------------------------------------------------------------------

void gpu_norm_forward(Gpu *gpu, Operand out, NormForward n) {
    gpu_family(gpu, FAMILY_NORMS);
    FREED float *x = bf16_read(n.x, n.M * n.C), *values = values_new(n.M * n.C);
    FREED float *weight = bf16_read(n.weight, n.C), *bias = bf16_read(n.bias, n.C);
    cpu_norm_forward(values, n.mean, n.rstd, x, weight, bias, n.M, n.C, n.eps);
    values_produce(out, values, n.M, n.C);
}

// Its codes are made from the rounded gradient.
void gpu_norm_backward(Gpu *gpu, Operand out, NormBackward n) {
    gpu_family(gpu, FAMILY_NORMS);
    int size = n.M * n.C;
    FREED float *dx = bf16_read(out.bf16, size), *x = bf16_read(n.x, size);
    FREED float *dout = bf16_read(n.dout, size), *weight = bf16_read(n.weight, n.C);
    FREED float *dweight = gradient_begin(n.dweight, n.C), *dbias = gradient_begin(n.dbias, n.C);
    cpu_norm_backward(dx, dweight, n.mean != NULL ? dbias : NULL, dout, x, weight, n.mean, n.rstd,
                      n.M, n.C);
    gradient_end(n.dweight, dweight, n.C);
    gradient_end(n.dbias, dbias, n.C);
    out.fused = false;
    values_produce(out, dx, n.M, n.C);
    column_sums(n.column_sums, dx, n.scratch, n.M, n.C);
}

// ---- activations --------------------------------------------------------------------------------

// x [M,F], to be freed, with the bias [F] added to each row
static float *biased(const Bf16 *x, const Bf16 *bias, int M, int F) {
    float *values = bf16_read(x, M * F);
    for (int i = 0; bias != NULL && i < M * F; i++) { values[i] += bf16_decode(bias[i % F]); }
    return values;
}

static void produce_gelu(Operand out, const Bf16 *x, const Bf16 *bias, int M, int F) {
    FREED float *values = biased(x, bias, M, F);
    gelu_forward(values, values, M * F);
    values_produce(out, values, M, F);
}

void gpu_gelu_forward(Gpu *gpu, Operand out, const Bf16 *x, const Bf16 *bias, int M, int F) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    produce_gelu(out, x, bias, M, F);
}

static void produce_gelu_backward(Operand dx, Gradient sums, const Bf16 *dout, const Bf16 *x,
                                  const Bf16 *bias, Scratch scratch, int M, int F) {
    FREED float *values = biased(x, bias, M, F), *d = bf16_read(dout, M * F);
    gelu_backward(d, d, values, M * F);
    values_produce(dx, d, M, F);
    column_sums(sums, d, scratch, M, F);
}

void gpu_gelu_backward(Gpu *gpu, Operand dx, Gradient sums, const Bf16 *dout, const Bf16 *x,
                       const Bf16 *bias, Scratch scratch, int M, int F) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    produce_gelu_backward(dx, sums, dout, x, bias, scratch, M, F);
}

static void produce_swiglu(Operand out, const Bf16 *x, int M, int F) {
    FREED float *values = bf16_read(x, M * 2 * F), *y = values_new(M * F);
    swiglu_forward(y, values, M, F);
    values_produce(out, y, M, F);
}

void gpu_swiglu_forward(Gpu *gpu, Operand out, const Bf16 *x, int M, int F) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    produce_swiglu(out, x, M, F);
}

// The FP8 matmuls with an activation, by the two calls that they replace.
bool gpu_has_fused_matmuls(const Gpu *gpu) {
    return gpu->capability == 90 && !own_matmuls("none");
}

static void check_fused_operands(const Gpu *gpu, const Gemm *g, bool fits) {
    bool fp8 = gpu_type_bytes(g->type_a) == 1 && !fp8_by_blocks(g->scaling_a);
    if (!gpu_has_fused_matmuls(gpu) || !fp8 || !fits) { die("stand-in: no fused matmul"); }
}

// N: columns of out
static void check_fused_matmul(const Gpu *gpu, const Gemm *g, Operand out, int N, bool fits) {
    check_fused_operands(gpu, g, fits && out.fused && out.scaling == SCALE_DELAYED);
    gemm_check_apart(g, "codes", out.rows.codes, (int64_t)g->m * N);
    gemm_check_apart(g, "transposed codes", out.columns.codes, (int64_t)g->m * N);
}

static void spoil(Operand out) {
    if (own_matmuls("wrong")) {
        *(out.rows.codes != NULL ? out.rows.codes : out.columns.codes) ^= 0x80;
    }
}

void gpu_matmul_gelu(Gpu *gpu, Gemm g, Operand out) {
    check_fused_matmul(gpu, &g, out, g.n, g.bias != NULL && g.k <= GELU_MATMUL_MAX_K);
    const Bf16 *bias = g.bias;
    g.bias = NULL;
    gemm(gpu, g);
    produce_gelu(out, g.d, bias, g.m, g.n);
    spoil(out);
}

void gpu_matmul_gelu_backward(Gpu *gpu, Gemm g, Operand dx, Gradient column_sums, Scratch scratch) {
    // as BF16, aligned as the buffer of the pass's result is: one plan for both
    FREED float *result = aligned_alloc(256, (size_t)round_up64(2 * (int64_t)g.m * g.n, 256));
    const Bf16 *input = g.aux, *bias = g.bias;
    check_fused_matmul(gpu, &g, dx, g.n, g.bias != NULL && g.k <= GELU_MATMUL_MAX_K);
    g.d = result;
    g.aux = g.bias = NULL;
    gemm(gpu, g);
    produce_gelu_backward(dx, column_sums, g.d, input, bias, scratch, g.m, g.n);
    spoil(dx);
}

void gpu_matmul_swiglu(Gpu *gpu, Gemm g, Operand out) {
    check_fused_matmul(gpu, &g, out, g.n / 2, g.fast_accumulation && g.n % 32 == 0);
    gemm(gpu, g);
    produce_swiglu(out, g.d, g.m, g.n / 2);
    spoil(out);
}

// The lse of a row of max_sums, of which the next tile's are `next` floats further.
static double lse_of(const float *max_sums, int64_t next, int tiles) {
    double max = -INFINITY, sum = 0.0;
    for (int i = 0; i < tiles; i++) { max = fmax(max, max_sums[i * next]); }
    for (int i = 0; i < tiles; i++) {
        sum += max_sums[i * next + 1] * exp(max_sums[i * next] - max);
    }
    // cppcheck-suppress invalidFunctionArg // cppcheck assumes tiles = 0
    return log(sum) + max;
}

void gpu_matmul_max_sums(Gpu *gpu, Gemm g, Scratch max_sums, int V) {
    int64_t bytes = max_sums_floats(g.m, g.n) * (int64_t)sizeof(float);
    check_fused_operands(gpu, &g, g.fast_accumulation && (int64_t)max_sums.bytes >= bytes);
    gemm_check_apart(&g, "maxima and sums", max_sums.data, bytes);
    gemm(gpu, g);
    if (own_matmuls("wrong")) { *(Bf16 *)g.d ^= 0x8000; }
    FREED float *x = bf16_read(g.d, (int64_t)g.m * g.n);
    for (int64_t i = 0; i < (int64_t)max_sums_tiles(g.n) * g.m; i++) {
        const float *row = x + i % g.m * g.n;
        int begin = (int)(i / g.m) * WIDE_MATMUL_COLUMNS, end = begin + WIDE_MATMUL_COLUMNS;
        end = end < V ? end : V;
        float max = -INFINITY, sum = 0.0f;
        for (int j = begin; j < end; j++) { max = row[j] > max || row[j] != row[j] ? row[j] : max; }
        for (int j = begin; j < end; j++) { sum += expf(row[j] - max); }
        max_sums.data[i * 2] = max;
        max_sums.data[i * 2 + 1] = sum;
    }
}

void gpu_swiglu_backward(Gpu *gpu, Operand dx, const Bf16 *dout, const Bf16 *x, int M, int F) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    FREED float *values = bf16_read(x, M * 2 * F), *d = bf16_read(dout, M * F);
    FREED float *out = values_new(M * 2 * F);
    swiglu_backward(out, d, values, M, F);
    values_produce(dx, out, M, 2 * F);
}

static void rotate(Bf16 *out, const Bf16 *qkv, Rotary r) {
    int M = r.B * r.T, N = (r.H + 2 * r.G) * r.D;
    FREED float *values = bf16_read(qkv, M * N), *rstd = values_new(M * (r.H + r.G));
    FREED float *query = bf16_read(r.query_weight, r.D), *key = bf16_read(r.key_weight, r.D);
    if (query != NULL) {
        qk_norm_forward(values, rstd, values, query, key, M, r.H, r.G, r.D, r.eps);
    }
    rope_apply(values, r.table, r.B, r.T, r.H, r.G, r.D, false);
    values_write(out, TYPE_BF16, values, M * N);
}

void gpu_rope_forward(Gpu *gpu, Bf16 *out, const Bf16 *qkv, Rotary r) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    rotate(out, qkv, r);
}

void gpu_matmul_rope(Gpu *gpu, Gemm g, Rotary r) {
    bool norm = r.query_weight != NULL || r.key_weight != NULL;
    bool fits = r.B * r.T == g.m && (r.H + 2 * r.G) * r.D == g.n && gpu_matmul_rotates(r.D);
    check_fused_operands(gpu, &g, g.fast_accumulation && fits && !norm);
    gemm(gpu, g);
    rotate(g.d, g.d, r);
    // the last query's row: the first query has one key, and so no choice
    if (own_matmuls("wrong")) { ((Bf16 *)g.d)[(int64_t)(g.m - 1) * g.n] ^= 0x8000; }
}

// For normalised heads, and for heads of other sizes, codes are made from the rounded gradient.
void gpu_rope_backward(Gpu *gpu, Operand d_qkv, RotaryBackward b) {
    gpu_family(gpu, FAMILY_ACTIVATIONS);
    Rotary r = b.rotary;
    int M = r.B * r.T, N = (r.H + 2 * r.G) * r.D;
    FREED float *values = bf16_read(d_qkv.bf16, M * N);
    rope_apply(values, r.table, r.B, r.T, r.H, r.G, r.D, true);
    if (r.query_weight != NULL) {
        FREED float *x = bf16_read(b.qkv, M * N), *out = values_new(M * N);
        FREED float *query = bf16_read(r.query_weight, r.D), *key = bf16_read(r.key_weight, r.D);
        FREED float *rstd = values_new(M * (r.H + r.G));
        FREED float *dquery = gradient_begin(b.dquery_weight, r.D);
        FREED float *dkey = gradient_begin(b.dkey_weight, r.D);
        qk_norm_forward(out, rstd, x, query, key, M, r.H, r.G, r.D, r.eps);
        qk_norm_backward(values, dquery, dkey, x, query, key, rstd, M, r.H, r.G, r.D);
        gradient_end(b.dquery_weight, dquery, r.D);
        gradient_end(b.dkey_weight, dkey, r.D);
    }
    if (r.query_weight != NULL || r.D % 16 != 0) { d_qkv.fused = false; }
    values_produce(d_qkv, values, M, N);
    column_sums(b.column_sums, values, b.scratch, M, N);
}

// ---- loss ---------------------------------------------------------------------------------------

// The loss is always computed from the logits. Their lse must equal that of max_sums.
void gpu_cross_entropy(Gpu *gpu, float *losses, Operand logits, Scratch scratch, Scratch max_sums,
                       const int *targets, int M, int V, int P, LossTerms terms) {
    gpu_family(gpu, FAMILY_LOSS);
    FREED float *x = bf16_read(logits.bf16, M * P);
    for (int64_t i = 0; i < loss_scratch_floats(M) && logits.fused; i++) { scratch.data[i] = 0.0f; }
    cross_entropy(losses, x, targets, M, V, P, terms);
    for (int i = 0; i < M && max_sums.data != NULL; i++) {
        double found = lse_of(max_sums.data + 2 * i, 2 * (int64_t)M, max_sums_tiles(P));
        if (targets[i] < 0 || losses[i] != losses[i]) { continue; }
        double lse = losses[i] + bf16_decode(logits.bf16[(int64_t)i * P + targets[i]]);
        double size = fmax(1.0, fmax(fabs(lse), losses[i])); // lse has the loss's rounding
        if (!(fabs(found - lse) <= 1e-5 * size)) {
            die("stand-in: row %d: log-sum-exp %g, not %g", i, found, lse);
        }
    }
    if (terms.gradient_scale > 0.0f) { values_produce(logits, x, M, P); }
}

void gpu_sum_losses(Gpu *gpu, double *sum, const float *losses, int M, bool accumulate) {
    gpu_family(gpu, FAMILY_LOSS);
    double all = accumulate ? *sum : 0.0;
    for (int i = 0; i < M; i++) { all += losses[i]; }
    *sum = all;
}
