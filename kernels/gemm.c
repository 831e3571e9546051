#include "gemm.h"

#include "../base/io.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// cuBLASLt is column-major, where our row-major D[m,n] is its D'[n,m] = op(B)' op(A)': the operands
// change places, so what cuBLASLt calls A is our b.

enum { CANDIDATES = 16 };

// What a plan depends on; compared and hashed as bytes, so it has no gaps.
typedef struct {
    int32_t m, n, k;
    int16_t type_a, type_b, type_d, epilogue;
    int16_t trans_a, trans_b, has_c, in_place, fast_accumulation, unused;
} PlanKey;

typedef struct {
    PlanKey key;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    int choice; // the algorithm's place in the heuristic's list
} GemmPlan;

struct GemmCache {
    int count, room;
    GemmPlan *plans;
    bool autotune;
    int num_choices; // read from a file
    struct {
        PlanKey key;
        int choice;
    } * choices;
};

GemmCache *gemm_cache_new(void) {
    return calloc_or_die(1, sizeof(GemmCache));
}

static void plan_destroy(GemmPlan *p) {
    cublasLtMatrixLayoutDestroy(p->a);
    cublasLtMatrixLayoutDestroy(p->b);
    cublasLtMatrixLayoutDestroy(p->d);
    cublasLtMatmulDescDestroy(p->op);
}

void gemm_cache_free(GemmCache *cache) {
    for (int i = 0; i < cache->count; i++) { plan_destroy(&cache->plans[i]); }
    free(cache->plans);
    free(cache->choices);
    free(cache);
}

static cudaDataType_t cuda_type(GpuType type) {
    static const cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    return types[type];
}

static PlanKey key_of(const Gemm *g) {
    PlanKey key;
    memset(&key, 0, sizeof(key));
    key = (PlanKey){.m = g->m,
                    .n = g->n,
                    .k = g->k,
                    .type_a = (int16_t)g->type_a,
                    .type_b = (int16_t)g->type_b,
                    .type_d = (int16_t)g->type_d,
                    .epilogue = (int16_t)g->epilogue,
                    .trans_a = g->trans_a,
                    .trans_b = g->trans_b,
                    .has_c = g->beta != 0.0f,
                    .in_place = g->c == g->d,
                    .fast_accumulation = g->fast_accumulation};
    return key;
}

static cublasLtMatrixLayout_t layout_new(GpuType type, int rows, int cols) {
    cublasLtMatrixLayout_t layout;
    BLAS_CHECK(
        cublasLtMatrixLayoutCreate(&layout, cuda_type(type), (uint64_t)cols, (uint64_t)rows, cols));
    return layout;
}

#define SET(op, attribute, value) \
    BLAS_CHECK(cublasLtMatmulDescSetAttribute(op, attribute, &(value), sizeof(value)))

static void plan_describe(GemmPlan *p, const Gemm *g) {
    static const cublasLtEpilogue_t epilogues[EPILOGUE_COUNT] = {
        CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        CUBLASLT_EPILOGUE_DGELU};
    p->key = key_of(g);
    BLAS_CHECK(cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t transa = g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t transb = g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    SET(p->op, CUBLASLT_MATMUL_DESC_TRANSA, transa);
    SET(p->op, CUBLASLT_MATMUL_DESC_TRANSB, transb);
    if (g->epilogue != EPILOGUE_NONE) {
        cudaDataType_t bias_type = CUDA_R_16BF;
        int64_t aux_row = g->n;
        SET(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogues[g->epilogue]);
        SET(p->op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type);
        if (g->aux != NULL) { SET(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_row); }
    }
    if (g->fast_accumulation) {
        int8_t fast = 1;
        SET(p->op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast);
    }
    p->a = layout_new(g->type_b, g->trans_b ? g->n : g->k, g->trans_b ? g->k : g->n);
    p->b = layout_new(g->type_a, g->trans_a ? g->k : g->m, g->trans_a ? g->m : g->k);
    p->d = layout_new(g->type_d, g->m, g->n);
}

// The pointers that are part of the description rather than of the call.
static void plan_point(GemmPlan *p, const Gemm *g) {
    if (g->bias != NULL) { SET(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g->bias); }
    if (g->aux != NULL) { SET(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g->aux); }
    if (g->scale_a != NULL) { SET(p->op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, g->scale_a); }
    if (g->scale_b != NULL) { SET(p->op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, g->scale_b); }
}

// The heuristic's algorithms for a plan, the most promising first; returns how many.
static int plan_candidates(Gpu *gpu, const GemmPlan *p, cublasLtMatmulHeuristicResult_t *results) {
    cublasLtMatmulPreference_t preference;
    size_t workspace = gpu->workspace_bytes;
    int count = 0;
    BLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    BLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)));
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gpu->blas, p->op, p->a, p->b, p->d, p->d,
                                                           preference, CANDIDATES, results, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    return status == CUBLAS_STATUS_SUCCESS ? count : 0;
}

static cublasStatus_t plan_run(Gpu *gpu, const GemmPlan *p, const Gemm *g) {
    const void *c = g->c != NULL ? g->c : g->d;
    return cublasLtMatmul(gpu->blas, p->op, &g->alpha, g->b, p->a, g->a, p->b, &g->beta, c, p->d,
                          g->d, p->d, &p->algo, gpu->workspace, gpu->workspace_bytes, gpu->stream);
}

// Milliseconds of a run, of so many one after another; negative where the algorithm fails.
static float plan_time(Gpu *gpu, const GemmPlan *p, const Gemm *g, int runs) {
    cudaEvent_t begin, end;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    float ms = 0.0f;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    CUDA_CHECK(cudaEventRecord(begin, gpu->stream));
    for (int run = 0; run < runs && status == CUBLAS_STATUS_SUCCESS; run++) {
        status = plan_run(gpu, p, g);
    }
    CUDA_CHECK(cudaEventRecord(end, gpu->stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return status == CUBLAS_STATUS_SUCCESS ? ms / (float)runs : -1.0f;
}

// Times every candidate on the operands in hand, in turns of turn_ms: training holds a device at
// its power limit, where what counts is an algorithm's energy, and short runs do not show that. The
// first turns bring the device there. D is computed many times over, so where C is D its values are
// worthless afterwards: the caller tunes in a step whose results are thrown away.
static int plan_fastest(Gpu *gpu, GemmPlan *p, const Gemm *g,
                        const cublasLtMatmulHeuristicResult_t *results, int count) {
    enum { TURNS = 5, HEATING = 2, MOST_RUNS = 2000 };
    const float turn_ms = 20.0f, hopeless = 1.2f, worthwhile = 0.99f;
    float ms[CANDIDATES], least = INFINITY;
    int fastest = 0;
    for (int i = 0; i < count; i++) {
        p->algo = results[i].algo;
        bool works = results[i].state == CUBLAS_STATUS_SUCCESS && plan_time(gpu, p, g, 1) >= 0;
        ms[i] = works ? plan_time(gpu, p, g, 3) : -1.0f;
        if (works) { least = fminf(least, ms[i]); }
    }
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < count; i++) {
            if (ms[i] < 0 || ms[i] > hopeless * least) { continue; }
            p->algo = results[i].algo;
            int runs = (int)fminf(fmaxf(turn_ms / ms[i], 1.0f), MOST_RUNS);
            float now = plan_time(gpu, p, g, runs);
            ms[i] = turn <= HEATING ? now : fminf(ms[i], now);
        }
    }
    for (int i = 0; i < count; i++) {
        float beats = ms[fastest] * (fastest == 0 ? worthwhile : 1.0f);
        if (ms[i] >= 0 && (ms[fastest] < 0 || ms[i] < beats)) { fastest = i; }
    }
    return fastest;
}

static int stored_choice(const GemmCache *cache, const PlanKey *key) {
    for (int i = 0; i < cache->num_choices; i++) {
        if (memcmp(&cache->choices[i].key, key, sizeof(*key)) == 0) {
            return cache->choices[i].choice;
        }
    }
    return -1;
}

static bool plan_make(Gpu *gpu, GemmPlan *p, const Gemm *g, Error *err) {
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    plan_describe(p, g);
    plan_point(p, g);
    int count = plan_candidates(gpu, p, results);
    if (count == 0) {
        plan_destroy(p);
        return fail(err,
                    "cuBLASLt has no algorithm for a product of %d x %d x %d (types %d, %d -> %d)",
                    g->m, g->n, g->k, g->type_a, g->type_b, g->type_d);
    }
    p->choice = stored_choice(gpu->gemms, &p->key);
    if (p->choice < 0 || p->choice >= count) {
        p->choice = gpu->gemms->autotune ? plan_fastest(gpu, p, g, results, count) : 0;
    }
    p->algo = results[p->choice].algo;
    return true;
}

static GemmPlan *plan_for(Gpu *gpu, const Gemm *g, Error *err) {
    GemmCache *cache = gpu->gemms;
    PlanKey key = key_of(g);
    for (int i = 0; i < cache->count; i++) {
        if (memcmp(&cache->plans[i].key, &key, sizeof(key)) == 0) { return &cache->plans[i]; }
    }
    GemmPlan plan;
    if (!plan_make(gpu, &plan, g, err)) { return NULL; }
    if (cache->count == cache->room) {
        cache->room = cache->room > 0 ? 2 * cache->room : 32;
        cache->plans = realloc_or_die(cache->plans, (size_t)cache->room * sizeof(GemmPlan));
    }
    cache->plans[cache->count] = plan;
    return &cache->plans[cache->count++];
}

bool gemm_supported(Gpu *gpu, Gemm g, Error *err) {
    return plan_for(gpu, &g, err) != NULL;
}

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

void gemm(Gpu *gpu, Gemm g) {
    Error err;
    GemmPlan *plan = plan_for(gpu, &g, &err);
    if (plan == NULL) { die("%s", err.text); }
    plan_point(plan, &g);
    BLAS_CHECK(plan_run(gpu, plan, &g));
}

void gemm_autotune(Gpu *gpu, bool on) {
    gpu->gemms->autotune = on;
}

// "cuBLASLt 130100 NVIDIA H200": the choices hold for one library on one kind of device.
static void choices_title(const Gpu *gpu, char title[512]) {
    snprintf(title, 512, "cuBLASLt %zu %s", cublasLtGetVersion(), gpu->name);
}

static void take_choice(GemmCache *cache, const char *line) {
    int f[13], choice;
    if (sscanf(line, "%d %d %d %d %d %d %d %d %d %d %d %d : %d", &f[0], &f[1], &f[2], &f[3], &f[4],
               &f[5], &f[6], &f[7], &f[8], &f[9], &f[10], &f[11], &choice) != 13) {
        return;
    }
    PlanKey key;
    memset(&key, 0, sizeof(key));
    key = (PlanKey){.m = f[0],
                    .n = f[1],
                    .k = f[2],
                    .type_a = (int16_t)f[3],
                    .type_b = (int16_t)f[4],
                    .type_d = (int16_t)f[5],
                    .epilogue = (int16_t)f[6],
                    .trans_a = (int16_t)f[7],
                    .trans_b = (int16_t)f[8],
                    .has_c = (int16_t)f[9],
                    .in_place = (int16_t)f[10],
                    .fast_accumulation = (int16_t)f[11]};
    cache->choices = realloc_or_die(cache->choices,
                                    (size_t)(cache->num_choices + 1) * sizeof(*cache->choices));
    cache->choices[cache->num_choices].key = key;
    cache->choices[cache->num_choices++].choice = choice;
}

void gemm_take_choices(Gpu *gpu, const char *text, size_t bytes) {
    char line[512], title[512];
    bool ours = false;
    const char *end = text + bytes, *next;
    choices_title(gpu, title);
    for (bool first = true; text < end; text = next, first = false) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        int length = (int)min64((stop != NULL ? stop : end) - text, (int64_t)sizeof(line) - 1);
        next = stop != NULL ? stop + 1 : end;
        snprintf(line, sizeof(line), "%.*s", length, text);
        if (first) {
            ours = strcmp(line, title) == 0;
        } else if (ours) {
            take_choice(gpu->gemms, line);
        }
    }
}

char *gemm_choices(const Gpu *gpu) {
    const GemmCache *cache = gpu->gemms;
    size_t room = 512 + (size_t)cache->count * 160, used;
    char *text = malloc_or_die(room), title[512];
    choices_title(gpu, title);
    used = (size_t)snprintf(text, room, "%s\n", title);
    for (int i = 0; i < cache->count; i++) {
        const PlanKey *k = &cache->plans[i].key;
        used += (size_t)snprintf(
            text + used, room - used, "%d %d %d %d %d %d %d %d %d %d %d %d : %d\n", k->m, k->n,
            k->k, k->type_a, k->type_b, k->type_d, k->epilogue, k->trans_a, k->trans_b, k->has_c,
            k->in_place, k->fast_accumulation, cache->plans[i].choice);
    }
    return text;
}
