#include "attention_graph.h"
#include "kernels.h"

#include <math.h>
#include <stdlib.h>

// ---- plans --------------------------------------------------------------------------------------

struct AttentionCache {
    int count, room;
    AttentionPlan *plans;
    bool said; // that the plain kernel serves
};

AttentionCache *attention_cache_new(void) {
    return calloc_or_die(1, sizeof(AttentionCache));
}

void attention_cache_free(AttentionCache *cache) {
    for (int i = 0; i < cache->count; i++) {
        if (cache->plans[i].usable) { cudnnBackendDestroyDescriptor(cache->plans[i].plan); }
    }
    free(cache->plans);
    free(cache);
}

static bool same_plan(const AttentionPlan *a, const AttentionPlan *b) {
    const AttentionShape *x = &a->shape, *y = &b->shape;
    return x->T == y->T && x->H == y->H && x->G == y->G && x->D == y->D &&
           x->deterministic == y->deterministic && a->backward == b->backward &&
           a->piece.sequences == b->piece.sequences && a->piece.groups == b->piece.groups;
}

static const AttentionPlan *plan_for(Gpu *gpu, AttentionShape s, AttentionPiece piece,
                                     bool backward) {
    AttentionCache *cache = gpu->attentions;
    AttentionPlan wanted = {.shape = s, .piece = piece, .backward = backward};
    for (int i = 0; i < cache->count; i++) {
        if (same_plan(&cache->plans[i], &wanted)) { return &cache->plans[i]; }
    }
    attention_make_plan(gpu, &wanted);
    if (cache->count == cache->room) {
        cache->room = cache->room > 0 ? 2 * cache->room : 8;
        cache->plans = realloc_or_die(cache->plans, (size_t)cache->room * sizeof(AttentionPlan));
    }
    cache->plans[cache->count] = wanted;
    return &cache->plans[cache->count++];
}

// ---- running ------------------------------------------------------------------------------------

enum { OWN_ALIGN = 256 };

static size_t sum_bytes(const AttentionShape *s, AttentionPiece p) {
    int64_t rows = (int64_t)p.sequences * p.groups * (s->H / s->G) * s->T;
    return (size_t)round_up64(rows * (int64_t)sizeof(float), OWN_ALIGN);
}

static size_t dq_sum_bytes(const AttentionShape *s, AttentionPiece p) {
    return s->deterministic ? 0 : sum_bytes(s, p) * (size_t)s->D;
}

// What a backward piece needs, cuDNN's share by its known growth and some room.
static size_t expected_bytes(const AttentionShape *s, AttentionPiece p) {
    int64_t heads = (int64_t)p.sequences * p.groups * (s->H / s->G);
    int64_t tiles = round_up64(s->T, 128);
    int64_t scores = s->deterministic ? 2 * heads * tiles * tiles : 0;
    int64_t per_head = s->H != s->G ? 2 * heads * tiles * s->D * 2 : 0; // dK, dV before their sum
    return sum_bytes(s, p) + dq_sum_bytes(s, p) + (size_t)(scores + per_head) + (8u << 20);
}

// The largest piece that fits: whole sequences, or else some groups of one.
static AttentionPiece piece_for(const AttentionShape *s, size_t bytes) {
    AttentionPiece p = {s->B, s->G};
    while (p.sequences > 1 && expected_bytes(s, p) > bytes) { p.sequences = (p.sequences + 1) / 2; }
    while (p.groups > 1 && expected_bytes(s, p) > bytes) { p.groups = (p.groups + 1) / 2; }
    return p;
}

size_t attention_workspace(AttentionShape s, size_t most) {
    return expected_bytes(&s, piece_for(&s, most));
}

static void execute(Gpu *gpu, const AttentionPlan *plan, int count, const int64_t *uids,
                    void **pointers, void *workspace) {
    cudnnBackendDescriptor_t pack;
    DNN_CHECK(cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack));
    DNN_CHECK(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64,
                                       count, uids));
    DNN_CHECK(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                                       CUDNN_TYPE_VOID_PTR, count, pointers));
    DNN_CHECK(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR,
                                       1, &workspace));
    DNN_CHECK(cudnnBackendFinalize(pack));
    DNN_CHECK(cudnnBackendExecute(gpu->dnn, plan->plan, pack));
    DNN_CHECK(cudnnBackendDestroyDescriptor(pack));
}

bool attention_by_cudnn(Gpu *gpu, AttentionShape s, Error *why) {
    const AttentionPlan *forward = plan_for(gpu, s, (AttentionPiece){s.B, s.G}, false);
    bool fits = forward->usable && forward->workspace <= gpu->attention_bytes;
    if (!fits) {
        if (why != NULL) { *why = forward->why_not; }
        return false;
    }
    AttentionPiece piece = piece_for(&s, gpu->attention_bytes);
    const AttentionPlan *backward = plan_for(gpu, s, piece, true);
    if (!backward->usable && why != NULL) { *why = backward->why_not; }
    return backward->usable;
}

static bool use_plain(Gpu *gpu, AttentionShape s) {
    Error why;
    if (attention_by_cudnn(gpu, s, &why)) { return false; }
    if (!gpu->attentions->said) { warn("%s; a plain kernel serves, slowly", why.text); }
    gpu->attentions->said = true;
    return true;
}

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    if (use_plain(gpu, s)) {
        attention_plain_forward(out, lse, qkv, s.B, s.T, s.H, s.G, s.D, gpu->stream);
        return;
    }
    float scale = 1.0f / sqrtf((float)s.D), masked = -1e9f;
    const Bf16 *k = qkv + s.H * s.D, *v = k + s.G * s.D;
    int64_t uids[] = {UID_Q, UID_K, UID_V, UID_OUT, UID_LSE, UID_SCALE, UID_MASKED};
    void *pointers[] = {(void *)qkv, (void *)k, (void *)v, out, lse, &scale, &masked};
    const AttentionPlan *plan = plan_for(gpu, s, (AttentionPiece){s.B, s.G}, false);
    execute(gpu, plan, 7, uids, pointers, gpu->attention_workspace);
}

// One piece of the backward pass, from sequence b and group g on.
static void backward_piece(Gpu *gpu, const AttentionShape *s, const AttentionPlan *plan, int b,
                           int g, Bf16 *d_qkv, const Bf16 *d_out, const Bf16 *out, const float *lse,
                           const Bf16 *qkv) {
    int D = s->D, heads = s->H / s->G, h = g * heads;
    int64_t row = (int64_t)(s->H + 2 * s->G) * D, first = (int64_t)b * s->T;
    int64_t q_at = first * row + (int64_t)h * D;
    int64_t k_at = first * row + (int64_t)(s->H + g) * D, v_at = k_at + (int64_t)s->G * D;
    int64_t out_at = first * s->H * D + (int64_t)h * D, lse_at = ((int64_t)b * s->H + h) * s->T;
    float scale = 1.0f / sqrtf((float)D), masked = -1e9f, one = 1.0f;
    char *sum = gpu->attention_workspace, *dq_sum = sum + sum_bytes(s, plan->piece);
    char *rest = dq_sum + dq_sum_bytes(s, plan->piece);
    if (rest + plan->workspace > (char *)gpu->attention_workspace + gpu->attention_bytes) {
        die("cuDNN's attention needs %zu bytes of workspace, more than the %zu planned",
            (size_t)(rest - sum) + plan->workspace, gpu->attention_bytes);
    }
    int64_t uids[] = {UID_Q,  UID_K,  UID_V,   UID_OUT,   UID_LSE,    UID_DOUT, UID_DQ,
                      UID_DK, UID_DV, UID_SUM, UID_SCALE, UID_MASKED, UID_ONE,  UID_DQ_SUM};
    void *pointers[] = {(void *)(qkv + q_at),
                        (void *)(qkv + k_at),
                        (void *)(qkv + v_at),
                        (void *)(out + out_at),
                        (void *)(lse + lse_at),
                        (void *)(d_out + out_at),
                        d_qkv + q_at,
                        d_qkv + k_at,
                        d_qkv + v_at,
                        sum,
                        &scale,
                        &masked,
                        &one,
                        dq_sum};
    execute(gpu, plan, s->deterministic ? 13 : 14, uids, pointers, rest);
}

void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv) {
    if (use_plain(gpu, s)) {
        attention_plain_backward(d_qkv, d_out, out, lse, qkv, s.B, s.T, s.H, s.G, s.D, gpu->stream);
        return;
    }
    AttentionPiece piece = piece_for(&s, gpu->attention_bytes);
    for (int b = 0; b < s.B; b += piece.sequences) {
        for (int g = 0; g < s.G; g += piece.groups) {
            AttentionPiece part = {s.B - b < piece.sequences ? s.B - b : piece.sequences,
                                   s.G - g < piece.groups ? s.G - g : piece.groups};
            const AttentionPlan *plan = plan_for(gpu, s, part, true);
            if (!plan->usable) { die("%s", plan->why_not.text); }
            backward_piece(gpu, &s, plan, b, g, d_qkv, d_out, out, lse, qkv);
        }
    }
}
