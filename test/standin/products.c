// The products and attention, which cuBLASLt and cuDNN do on a device: stand-ins for
// kernels/gemm.c and kernels/attention.c.
#include "../../kernels/attention.h"
#include "../../kernels/cpu.h"
#include "../../kernels/cpu_gemm.h"
#include "../../kernels/gemm.h"
#include "values.h"

#include <stdlib.h>
#include <string.h>

// ---- products -----------------------------------------------------------------------------------

Gemm gemm_plain(int m, int n, int k, const Bf16 *a, const Bf16 *b, void *d) {
    return (Gemm){.m = m,
                  .n = n,
                  .k = k,
                  .a = a,
                  .b = b,
                  .d = d,
                  .type_a = TYPE_BF16,
                  .type_b = TYPE_BF16,
                  .type_d = TYPE_BF16,
                  .alpha = 1.0f};
}

static bool aligned(const void *pointer) {
    return (uintptr_t)pointer % 16 == 0;
}

// What cuBLASLt asks for.
bool gemm_supported(Gpu *gpu, Gemm g, Error *err) {
    bool fp8 = g.type_a != TYPE_BF16;
    bool well = aligned(g.a) && aligned(g.b) && aligned(g.c) && aligned(g.d) && aligned(g.aux);
    (void)gpu;
    if (fp8) {
        bool shape = g.m % 16 == 0 && g.n % 16 == 0 && g.k % 16 == 0;
        bool types = g.type_b != TYPE_BF16 && (g.type_a == TYPE_E4M3 || g.type_b == TYPE_E4M3);
        well = well && shape && types && !g.trans_a && g.trans_b && g.scale_a != NULL &&
               g.scale_b != NULL && aligned(g.scale_a) && aligned(g.scale_b);
    }
    return well ? true : fail(err, "stand-in: product of %d x %d x %d", g.m, g.n, g.k);
}

// D's values, before they are rounded: x is product + addend + bias.
static void apply_epilogue(const Gemm *g, float *x, int64_t n) {
    if (g->epilogue == EPILOGUE_GELU_AUX_BIAS) {
        values_round(g->aux, TYPE_BF16, x, n);
        gelu_forward(x, x, n);
    } else if (g->epilogue == EPILOGUE_DGELU) {
        float *input = values_read(g->aux, TYPE_BF16, n);
        gelu_backward(x, x, input, n);
        free(input);
    }
}

void gemm(Gpu *gpu, Gemm g) {
    int64_t n = (int64_t)g.m * g.n;
    Error err;
    if (!gemm_supported(gpu, g, &err)) { die("%s", err.text); }
    float *a = values_read(g.a, g.type_a, (int64_t)g.m * g.k);
    float *b = values_read(g.b, g.type_b, (int64_t)g.k * g.n);
    float *c = g.beta != 0.0f ? values_read(g.c, g.type_d, n) : NULL;
    float *bias = values_read(g.bias, TYPE_BF16, g.n);
    float *d = malloc_or_die((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n && c != NULL; i++) { c[i] *= g.beta; }
    float scale_a = g.scale_a != NULL ? *g.scale_a : 1.0f;
    float scale_b = g.scale_b != NULL ? *g.scale_b : 1.0f;
    cpu_gemm((CpuGemm){.m = g.m,
                       .n = g.n,
                       .k = g.k,
                       .a = a,
                       .b = b,
                       .c = d,
                       .bias = bias,
                       .addend = c,
                       .trans_a = g.trans_a,
                       .trans_b = g.trans_b,
                       .alpha = g.alpha * scale_a * scale_b});
    apply_epilogue(&g, d, n);
    values_write(g.d, g.type_d, d, n);
    free(a);
    free(b);
    free(c);
    free(bias);
    free(d);
}

GemmCache *gemm_cache_new(void) {
    return NULL;
}

void gemm_cache_free(GemmCache *cache) {
    (void)cache;
}

void gemm_autotune(Gpu *gpu, bool on) {
    (void)gpu, (void)on;
}

static const char choices[] = "choices of the stand-in\n";

char *gemm_choices(const Gpu *gpu) {
    (void)gpu;
    return strdup_or_die(choices);
}

void gemm_take_choices(Gpu *gpu, const char *text, size_t bytes) {
    (void)gpu;
    if (bytes != strlen(choices) || memcmp(text, choices, bytes) != 0) {
        die("stand-in: choices of products: '%.*s'", (int)bytes, text);
    }
}

// ---- attention ----------------------------------------------------------------------------------

static int64_t qkv_size(const AttentionShape *s) {
    return (int64_t)s->B * s->T * (s->H + 2 * s->G) * s->D;
}

static int64_t out_size(const AttentionShape *s) {
    return (int64_t)s->B * s->T * s->H * s->D;
}

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    (void)gpu;
    float *x = values_read(qkv, TYPE_BF16, qkv_size(&s));
    float *y = malloc_or_die((size_t)out_size(&s) * sizeof(float));
    attention_forward(y, lse, x, s.B, s.T, s.H, s.G, s.D);
    values_write(out, TYPE_BF16, y, out_size(&s));
    free(x);
    free(y);
}

void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv) {
    (void)gpu;
    float *x = values_read(qkv, TYPE_BF16, qkv_size(&s));
    float *y = values_read(out, TYPE_BF16, out_size(&s));
    float *dy = values_read(d_out, TYPE_BF16, out_size(&s));
    float *dx = malloc_or_die((size_t)qkv_size(&s) * sizeof(float));
    attention_backward(dx, dy, y, lse, x, s.B, s.T, s.H, s.G, s.D);
    values_write(d_qkv, TYPE_BF16, dx, qkv_size(&s));
    free(x);
    free(y);
    free(dy);
    free(dx);
}

size_t attention_workspace(AttentionShape s, size_t most) {
    (void)s, (void)most;
    return 1;
}

bool attention_by_cudnn(Gpu *gpu, AttentionShape s, Error *why) {
    (void)gpu, (void)s;
    return fail(why, "stand-in: no cuDNN");
}

AttentionCache *attention_cache_new(void) {
    return NULL;
}

void attention_cache_free(AttentionCache *cache) {
    (void)cache;
}
