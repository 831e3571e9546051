#include "attention.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

// cuDNN selects its flash-attention engine by the structure of an operation graph. It recognises
// the graphs below. Their score matrices [B,H,T,T] are "virtual": they exist only in the engine.

typedef cudnnBackendDescriptor_t Desc;

// Tensors that a call binds to memory.
enum {
    UID_Q = 1,
    UID_K,
    UID_V,
    UID_OUT,
    UID_LSE,
    UID_DOUT,
    UID_DQ,
    UID_DK,
    UID_DV,
    UID_SUM,     // dot(dout, out) of each row, in our workspace
    UID_DQ_SUM,  // FP32 accumulator of dQ, in our workspace; if deterministic, not in the graph
    UID_STARTS,  // each query's first visible key; without documents it is not in the graph
    UID_SCALE,   // passed by value
    UID_MASKED,  // passed by value
    UID_ONE,     // passed by value
    UID_VIRTUAL, // the first number of virtual tensors, which no call binds
};

// The part of the batch that one call of cuDNN computes: how many sequences, and how many key/value
// heads with their query heads.
typedef struct {
    int sequences, groups;
} Piece;

// A graph for a piece of a shape, and the engine that runs it. The graph has a mask of documents if
// the shape has documents.
struct AttentionPlan {
    AttentionShape shape;
    Piece piece;
    bool backward;
    bool usable;
    Error why_not;
    Desc plan;
    size_t workspace; // bytes that cuDNN needs
};

void attention_close(Gpu *gpu) {
    while (gpu->num_attentions > 0) {
        const AttentionPlan *p = &gpu->attentions[--gpu->num_attentions];
        if (p->usable) { cudnnBackendDestroyDescriptor(p->plan); }
    }
    free(gpu->attentions);
    gpu->attentions = NULL;
    gpu->warned_of_attention = false;
}

// ---- building graphs ----------------------------------------------------------------------------

enum { DESCRIPTORS = 128, OPS = 32 };

typedef struct {
    int64_t d[4];
} Dims;

typedef struct {
    int num_made, num_ops;
    Desc made[DESCRIPTORS], ops[OPS]; // made: all descriptors, to be destroyed; ops: the operations
    int64_t next_uid;
    cudnnStatus_t status; // the first status that was not success
    // dimensions: [b,h,T,D], [b,g,T,D], its transpose, [b,h,T,T], [b,h,T,1]
    Dims head, group, group_t, scores, row;
    // strides: of the packed buffer, of its transpose, of the output, of the rows' statistics
    Dims qkv, qkv_t, out, lse;
    bool documents;
} Graph;

static const cudnnDataType_t F32 = CUDNN_DATA_FLOAT, BF16 = CUDNN_DATA_BFLOAT16;

typedef struct {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t count; // 0: the attribute is not set
    const void *values;
} Attribute;

#define ATTRIBUTE(name, type, count, values) \
    { CUDNN_ATTR_##name, CUDNN_TYPE_##type, count, values }
// An attribute whose value is a descriptor. If the descriptor is NULL, the attribute is not set.
#define PART(name, part) ATTRIBUTE(name, BACKEND_DESCRIPTOR, (part) != NULL, &(part))
// Makes a descriptor with these attributes, and finalizes it.
#define DESCRIBE(g, name, ...) \
    describe(g, CUDNN_BACKEND_##name##_DESCRIPTOR, (const Attribute[]){__VA_ARGS__, {0}})
// Makes and finalizes an operation with these attributes, and adds it to the graph.
#define OPERATION(g, name, ...) \
    ((g)->ops[(g)->num_ops++] = DESCRIBE(g, OPERATION_##name, __VA_ARGS__))

static Desc make(Graph *g, cudnnBackendDescriptorType_t type) {
    Desc d = NULL;
    assert(g->num_made < DESCRIPTORS && g->num_ops < OPS);
    if (g->status == CUDNN_STATUS_SUCCESS) { g->status = cudnnBackendCreateDescriptor(type, &d); }
    if (d != NULL) { g->made[g->num_made++] = d; }
    return d;
}

// After the first failure cuDNN is not called any more, so that cuDNN's last error is that failure.
static Desc describe(Graph *g, cudnnBackendDescriptorType_t type, const Attribute *a) {
    Desc d = make(g, type);
    for (; a->values != NULL; a++) {
        if (a->count == 0 || g->status != CUDNN_STATUS_SUCCESS) { continue; }
        g->status = cudnnBackendSetAttribute(d, a->name, a->type, a->count, a->values);
    }
    if (g->status == CUDNN_STATUS_SUCCESS) { g->status = cudnnBackendFinalize(d); }
    return d;
}

// A tensor with uid 0 is virtual: it is not in memory.
static Desc tensor(Graph *g, int64_t uid, cudnnDataType_t type, Dims dims, Dims strides) {
    int64_t alignment = uid == UID_STARTS ? sizeof(int) : 16, own = uid != 0 ? uid : g->next_uid++;
    bool yes = true, by_value = uid == UID_SCALE || uid == UID_MASKED || uid == UID_ONE;
    return DESCRIBE(g, TENSOR, ATTRIBUTE(TENSOR_UNIQUE_ID, INT64, 1, &own),
                    ATTRIBUTE(TENSOR_DATA_TYPE, DATA_TYPE, 1, &type),
                    ATTRIBUTE(TENSOR_DIMENSIONS, INT64, 4, dims.d),
                    ATTRIBUTE(TENSOR_STRIDES, INT64, 4, strides.d),
                    ATTRIBUTE(TENSOR_BYTE_ALIGNMENT, INT64, 1, &alignment),
                    ATTRIBUTE(TENSOR_IS_VIRTUAL, BOOLEAN, uid == 0, &yes),
                    ATTRIBUTE(TENSOR_IS_BY_VALUE, BOOLEAN, by_value, &yes));
}

static Dims packed(Dims dims) {
    return (Dims){{dims.d[1] * dims.d[2] * dims.d[3], dims.d[2] * dims.d[3], dims.d[3], 1}};
}

static Desc inner(Graph *g, cudnnDataType_t type, Dims dims) {
    return tensor(g, 0, type, dims, packed(dims));
}

static Desc value(Graph *g, int64_t uid) {
    return tensor(g, uid, F32, (Dims){{1, 1, 1, 1}}, (Dims){{1, 1, 1, 1}});
}

// Each of the next functions adds an operation to the graph and returns the operation's result.

// y = mode(x, b) or, if t is not NULL, where(t, x, b). Only GEN_INDEX has an axis.
static Desc pointwise(Graph *g, cudnnPointwiseMode_t mode, Desc x, Desc b, Desc t, Desc y,
                      int64_t axis) {
    cudnnDataType_t type = mode == CUDNN_POINTWISE_CMP_GE ? CUDNN_DATA_BOOLEAN : F32;
    Desc kind = DESCRIBE(
        g, POINTWISE, ATTRIBUTE(POINTWISE_MODE, POINTWISE_MODE, 1, &mode),
        ATTRIBUTE(POINTWISE_MATH_PREC, DATA_TYPE, 1, &type),
        ATTRIBUTE(POINTWISE_AXIS, INT64, mode == CUDNN_POINTWISE_GEN_INDEX, &axis));
    OPERATION(g, POINTWISE, PART(OPERATION_POINTWISE_PW_DESCRIPTOR, kind),
              PART(OPERATION_POINTWISE_XDESC, x), PART(OPERATION_POINTWISE_BDESC, b),
              PART(OPERATION_POINTWISE_TDESC, t), PART(OPERATION_POINTWISE_YDESC, y));
    return y;
}

static Desc matmul(Graph *g, Desc a, Desc b, Desc c) {
    Desc kind = DESCRIBE(g, MATMUL, ATTRIBUTE(MATMUL_COMP_TYPE, DATA_TYPE, 1, &F32));
    OPERATION(g, MATMUL, PART(OPERATION_MATMUL_DESC, kind), PART(OPERATION_MATMUL_ADESC, a),
              PART(OPERATION_MATMUL_BDESC, b), PART(OPERATION_MATMUL_CDESC, c));
    return c;
}

static Desc reduction(Graph *g, cudnnReduceTensorOp_t how, Desc x, Desc y) {
    Desc kind = DESCRIBE(g, REDUCTION,
                         ATTRIBUTE(REDUCTION_OPERATOR, REDUCTION_OPERATOR_TYPE, 1, &how),
                         ATTRIBUTE(REDUCTION_COMP_TYPE, DATA_TYPE, 1, &F32));
    OPERATION(g, REDUCTION, PART(OPERATION_REDUCTION_DESC, kind),
              PART(OPERATION_REDUCTION_XDESC, x), PART(OPERATION_REDUCTION_YDESC, y));
    return y;
}

static Desc reshape(Graph *g, Desc x, Desc y) {
    OPERATION(g, RESHAPE, PART(OPERATION_RESHAPE_XDESC, x), PART(OPERATION_RESHAPE_YDESC, y));
    return y;
}

// ---- the forward and the backward graph ---------------------------------------------------------

// Returns mode(x, b) or, if b is NULL, mode(x), in FP32.
static Desc apply(Graph *g, cudnnPointwiseMode_t mode, Desc x, Desc b, Dims dims) {
    return pointwise(g, mode, x, b, NULL, inner(g, F32, dims), 0);
}

// Returns the index of each score along an axis: axis 2 is the queries', axis 3 the keys'.
static Desc index_along(Graph *g, Desc x, int64_t axis) {
    return pointwise(g, CUDNN_POINTWISE_GEN_INDEX, x, NULL, NULL,
                     inner(g, CUDNN_DATA_INT32, g->scores), axis);
}

// Returns where(a >= b, x, a very negative number).
static Desc mask_unless(Graph *g, Desc a, Desc b, Desc x) {
    Desc seen = pointwise(g, CUDNN_POINTWISE_CMP_GE, a, b, NULL,
                          inner(g, CUDNN_DATA_BOOLEAN, g->scores), 0);
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, x, value(g, UID_MASKED), seen,
                     inner(g, F32, g->scores), 0);
}

// Hides the keys before the query's document and those after the query. If the masks come in this
// order, and each takes the indices of the tensor that it masks, cuDNN's engine recognises the
// second one as the causal mask and skips tiles above the diagonal.
static Desc mask(Graph *g, Desc x) {
    if (g->documents) {
        Dims starts = {{g->row.d[0], 1, g->row.d[2], 1}};
        x = mask_unless(g, index_along(g, x, 3),
                        tensor(g, UID_STARTS, CUDNN_DATA_INT32, starts, packed(starts)), x);
    }
    return mask_unless(g, index_along(g, x, 2), index_along(g, x, 3), x);
}

static void build_forward(Graph *g) {
    Desc q = tensor(g, UID_Q, BF16, g->head, g->qkv);
    Desc k_t = tensor(g, UID_K, BF16, g->group_t, g->qkv_t);
    Desc v = tensor(g, UID_V, BF16, g->group, g->qkv);
    Desc out = tensor(g, UID_OUT, BF16, g->head, g->out);
    Desc lse = tensor(g, UID_LSE, F32, g->row, g->lse);

    Desc s = matmul(g, q, k_t, inner(g, F32, g->scores));
    s = apply(g, CUDNN_POINTWISE_MUL, s, value(g, UID_SCALE), g->scores);
    s = mask(g, s);
    Desc max = reduction(g, CUDNN_REDUCE_TENSOR_MAX, s, inner(g, F32, g->row));
    Desc e = apply(g, CUDNN_POINTWISE_SUB, s, max, g->scores);
    e = apply(g, CUDNN_POINTWISE_EXP, e, NULL, g->scores);
    Desc sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, e, inner(g, F32, g->row));
    Desc log = apply(g, CUDNN_POINTWISE_LOG, sum, NULL, g->row);
    pointwise(g, CUDNN_POINTWISE_ADD, max, log, NULL, lse, 0);
    Desc p = pointwise(g, CUDNN_POINTWISE_DIV, e, sum, NULL, inner(g, BF16, g->scores), 0);
    matmul(g, p, v, out);
}

// Computes the gradient of K (from scores dS and rows Q) or of V (from scores P and rows dO). The
// transpose of the scores is multiplied by the rows for each query head; then the query heads of a
// group are summed.
static void group_gradient(Graph *g, Desc scores, Desc rows, int64_t uid) {
    Dims t = packed(g->scores);
    t.d[2] = 1;
    t.d[3] = g->scores.d[3];
    Desc scores_t = reshape(g, scores, tensor(g, 0, BF16, g->scores, t));
    Desc result = tensor(g, uid, BF16, g->group, g->qkv);
    if (g->head.d[1] == g->group.d[1]) {
        matmul(g, scores_t, rows, result);
    } else {
        Desc per_head = matmul(g, scores_t, rows, inner(g, BF16, g->head));
        reduction(g, CUDNN_REDUCE_TENSOR_ADD, per_head, result);
    }
}

static void build_backward(Graph *g, bool deterministic) {
    Desc q = tensor(g, UID_Q, BF16, g->head, g->qkv);
    Desc k_t = tensor(g, UID_K, BF16, g->group_t, g->qkv_t);
    Desc v_t = tensor(g, UID_V, BF16, g->group_t, g->qkv_t);
    Desc out = tensor(g, UID_OUT, BF16, g->head, g->out);
    Desc dout = tensor(g, UID_DOUT, BF16, g->head, g->out);
    Desc lse = tensor(g, UID_LSE, F32, g->row, g->lse);
    Desc sum = tensor(g, UID_SUM, F32, g->row, packed(g->row));
    Desc dq = tensor(g, UID_DQ, BF16, g->head, g->qkv);

    Desc products = apply(g, CUDNN_POINTWISE_MUL, dout, out, g->head);
    Desc row_sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, products, inner(g, F32, g->row));
    pointwise(g, CUDNN_POINTWISE_MUL, row_sum, value(g, UID_ONE), NULL, sum, 0);

    Desc s = matmul(g, q, k_t, inner(g, F32, g->scores));
    s = apply(g, CUDNN_POINTWISE_MUL, s, value(g, UID_SCALE), g->scores);
    s = apply(g, CUDNN_POINTWISE_SUB, s, lse, g->scores);
    Desc p = apply(g, CUDNN_POINTWISE_EXP, mask(g, s), NULL, g->scores);
    group_gradient(g, p, dout, UID_DV);

    Desc dp = matmul(g, dout, v_t, inner(g, F32, g->scores));
    dp = apply(g, CUDNN_POINTWISE_SUB, dp, sum, g->scores);
    Desc ds = apply(g, CUDNN_POINTWISE_MUL, dp, p, g->scores);
    ds = apply(g, CUDNN_POINTWISE_MUL, ds, value(g, UID_SCALE), g->scores);
    group_gradient(g, ds, q, UID_DK);

    Desc k = reshape(g, k_t, tensor(g, 0, BF16, g->group, g->qkv));
    if (deterministic) {
        matmul(g, ds, k, dq);
    } else {
        Desc dq_sum = tensor(g, UID_DQ_SUM, F32, g->head, packed(g->head));
        matmul(g, ds, k, dq_sum);
        pointwise(g, CUDNN_POINTWISE_IDENTITY, dq_sum, NULL, NULL, dq, 0);
    }
}

// ---- plans --------------------------------------------------------------------------------------

// Returns whether cuDNN calls the engine of a configuration deterministic.
static bool is_deterministic(Desc config) {
    Graph g = {.status = CUDNN_STATUS_SUCCESS};
    Desc engine = make(&g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT] = {0};
    int64_t count = 0;
    if (g.status == CUDNN_STATUS_SUCCESS) {
        g.status = cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE,
                                            CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine);
    }
    if (g.status == CUDNN_STATUS_SUCCESS) {
        g.status = cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                            CUDNN_TYPE_NUMERICAL_NOTE,
                                            CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes);
    }
    bool well = g.status == CUDNN_STATUS_SUCCESS;
    for (int64_t i = 0; well && i < min64(count, CUDNN_NUMERICAL_NOTE_TYPE_COUNT); i++) {
        well = notes[i] != CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    }
    while (g.num_made > 0) { cudnnBackendDestroyDescriptor(g.made[--g.num_made]); }
    return well;
}

// Builds the plan's graph, and takes the first of the heuristics' engine configurations that can be
// finalized. In a deterministic run the engine must also be deterministic. If no configuration
// serves, plan->usable stays false, and plan->why_not is the reason.
static void make_plan(Gpu *gpu, AttentionPlan *plan) {
    enum { CONFIGS = 8 };
    const AttentionShape *s = &plan->shape;
    int64_t b = plan->piece.sequences, group = plan->piece.groups, h = group * (s->H / s->G);
    int64_t T = s->T, D = s->D, N = (int64_t)(s->H + 2 * s->G) * D, HD = (int64_t)s->H * D;
    Graph g = {
        .next_uid = UID_VIRTUAL,
        .head = {{b, h, T, D}},
        .group = {{b, group, T, D}},
        .group_t = {{b, group, D, T}},
        .scores = {{b, h, T, T}},
        .row = {{b, h, T, 1}},
        .qkv = {{T * N, D, N, 1}},
        .qkv_t = {{T * N, D, 1, N}},
        .out = {{T * HD, D, HD, 1}},
        .lse = {{s->H * T, T, 1, 1}},
        .documents = s->documents != NULL,
    };
    if (plan->backward) {
        build_backward(&g, s->deterministic);
    } else {
        build_forward(&g);
    }
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    Desc configs[CONFIGS];
    Desc op_graph = DESCRIBE(&g, OPERATIONGRAPH,
                             ATTRIBUTE(OPERATIONGRAPH_HANDLE, HANDLE, 1, &gpu->dnn),
                             ATTRIBUTE(OPERATIONGRAPH_OPS, BACKEND_DESCRIPTOR, g.num_ops, g.ops));
    Desc heuristics = DESCRIBE(&g, ENGINEHEUR, PART(ENGINEHEUR_OPERATION_GRAPH, op_graph),
                               ATTRIBUTE(ENGINEHEUR_MODE, HEUR_MODE, 1, &mode));
    for (int i = 0; i < CONFIGS; i++) { configs[i] = make(&g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR); }
    int64_t found = 0, bytes = 0, others = 0;
    if (g.status == CUDNN_STATUS_SUCCESS) {
        cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGS, &found, configs);
    }
    for (int i = 0; i < found && i < CONFIGS && !plan->usable; i++) {
        if (s->deterministic && !is_deterministic(configs[i])) {
            others++;
            continue;
        }
        Graph attempt = {.status = CUDNN_STATUS_SUCCESS};
        plan->plan = DESCRIBE(&attempt, EXECUTION_PLAN,
                              ATTRIBUTE(EXECUTION_PLAN_HANDLE, HANDLE, 1, &gpu->dnn),
                              PART(EXECUTION_PLAN_ENGINE_CONFIG, configs[i]));
        plan->usable = attempt.status == CUDNN_STATUS_SUCCESS;
        if (!plan->usable && attempt.num_made > 0) { cudnnBackendDestroyDescriptor(plan->plan); }
    }
    if (plan->usable) {
        DNN_CHECK(cudnnBackendGetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                           CUDNN_TYPE_INT64, 1, NULL, &bytes));
        plan->workspace = (size_t)bytes;
    } else {
        char reason[256] = "";
        cudnnGetLastErrorString(reason, sizeof(reason));
        fail("cuDNN has no %sattention engine for T %d, %d/%d heads of %d%s%.200s",
             others > 0 ? "deterministic " : "", s->T, s->H, s->G, s->D,
             others > 0 ? " (--no-deterministic takes another)" : ": ", others > 0 ? "" : reason);
        plan->why_not = error_kept();
    }
    while (g.num_made > 0) { cudnnBackendDestroyDescriptor(g.made[--g.num_made]); }
}

static const AttentionPlan *plan_for(Gpu *gpu, AttentionShape s, Piece piece, bool backward) {
    const AttentionPlan *end = gpu->attentions + gpu->num_attentions;
    for (const AttentionPlan *p = gpu->attentions; p < end; p++) {
        if (p->shape.T == s.T && p->shape.H == s.H && p->shape.G == s.G && p->shape.D == s.D &&
            p->shape.deterministic == s.deterministic && p->backward == backward &&
            (p->shape.documents != NULL) == (s.documents != NULL) &&
            p->piece.sequences == piece.sequences && p->piece.groups == piece.groups) {
            return p;
        }
    }
    size_t count = (size_t)++gpu->num_attentions;
    gpu->attentions = realloc_or_die(gpu->attentions, count * sizeof(AttentionPlan));
    AttentionPlan *plan = &gpu->attentions[count - 1];
    *plan = (AttentionPlan){.shape = s, .piece = piece, .backward = backward};
    make_plan(gpu, plan);
    return plan;
}

// ---- running ------------------------------------------------------------------------------------

// Before version 9.6, cuDNN's engine does not zero the FP32 accumulator of dQ.
enum { OWN_ALIGN = 256, ZEROES_DQ_SUM = 90600 };

static size_t sum_bytes(const AttentionShape *s, Piece p) {
    int64_t rows = (int64_t)p.sequences * p.groups * (s->H / s->G) * s->T;
    return (size_t)round_up64(rows * (int64_t)sizeof(float), OWN_ALIGN);
}

static size_t dq_sum_bytes(const AttentionShape *s, Piece p) {
    return s->deterministic ? 0 : sum_bytes(s, p) * (size_t)s->D;
}

// Returns the bytes that a piece of the backward pass is expected to need: our own sums, an
// estimate of cuDNN's workspace, and a margin. test/cudnn_plans.c compares them with cuDNN's plans
// for several kinds of device.
static size_t expected_bytes(const AttentionShape *s, Piece p) {
    int64_t heads = (int64_t)p.sequences * p.groups * (s->H / s->G);
    int64_t tiles = round_up64(s->T, 128);
    int64_t scores = s->deterministic ? 2 * heads * tiles * tiles : 0;
    // each query head's dK and dV, which are summed over a group
    int64_t per_head = s->H != s->G ? 2 * heads * tiles * s->D * 2 : 0;
    // cuDNN sums dQ here below compute capability 9.0 and from 12.0 on; other devices do not need
    // these bytes
    int64_t dq = s->deterministic ? 0 : 4 * heads * tiles * s->D;
    return sum_bytes(s, p) + dq_sum_bytes(s, p) + (size_t)(scores + per_head + dq) + (8u << 20);
}

// Halves the number of sequences or, if that is 1, of groups. Returns false if there is no smaller
// piece.
static bool shrink(Piece *p) {
    int *n = p->sequences > 1 ? &p->sequences : &p->groups;
    bool can = *n > 1;
    *n = (*n + 1) / 2;
    return can;
}

// Returns the largest piece that is expected to need at most `bytes`, or else the smallest piece.
static Piece piece_for(const AttentionShape *s, size_t bytes) {
    Piece p = {s->B, s->G};
    while (expected_bytes(s, p) > bytes && shrink(&p)) {}
    return p;
}

size_t attention_workspace(AttentionShape s, size_t most) {
    size_t cudnn = expected_bytes(&s, piece_for(&s, most)), own = attention_own_workspace(s);
    return own > cudnn ? own : cudnn;
}

// Runs a plan. bound[uid] is the tensor's address on the device or, if cuDNN takes the tensor by
// value, on the host. It is NULL if the tensor is not in the graph.
static void execute(Gpu *gpu, const AttentionPlan *plan, const void *const bound[UID_VIRTUAL],
                    void *workspace) {
    Graph call = {.status = CUDNN_STATUS_SUCCESS};
    int64_t uids[UID_VIRTUAL];
    const void *pointers[UID_VIRTUAL];
    int count = 0;
    for (int uid = 1; uid < UID_VIRTUAL; uid++) {
        if (bound[uid] == NULL) { continue; }
        uids[count] = uid;
        pointers[count++] = bound[uid];
    }
    Desc pack = DESCRIBE(&call, VARIANT_PACK,
                         ATTRIBUTE(VARIANT_PACK_UNIQUE_IDS, INT64, count, uids),
                         ATTRIBUTE(VARIANT_PACK_DATA_POINTERS, VOID_PTR, count, pointers),
                         ATTRIBUTE(VARIANT_PACK_WORKSPACE, VOID_PTR, 1, &workspace));
    DNN_CHECK(call.status);
    DNN_CHECK(cudnnBackendExecute(gpu->dnn, plan->plan, pack));
    DNN_CHECK(cudnnBackendDestroyDescriptor(pack));
}

// Returns whether a pass can run in pieces of this size: cuDNN must have plans for them and for the
// smaller pieces at the ends, and the workspace must be large enough. *has_plans is false if a plan
// is missing.
static bool serves(Gpu *gpu, const AttentionShape *s, Piece p, bool backward, bool *has_plans) {
    const int sequences[] = {p.sequences, s->B % p.sequences},
              groups[] = {p.groups, s->G % p.groups};
    for (int i = 0; i < 4; i++) {
        Piece part = {sequences[i / 2], groups[i % 2]};
        if (part.sequences == 0 || part.groups == 0) { continue; }
        const AttentionPlan *plan = plan_for(gpu, *s, part, backward);
        size_t own = backward ? sum_bytes(s, part) + dq_sum_bytes(s, part) : 0;
        *has_plans = plan->usable;
        if (!plan->usable) { return fail("%s", plan->why_not.text); }
        if (own + plan->workspace > gpu->attention_bytes) {
            return fail("cuDNN's attention needs %zu bytes of workspace, more than the %zu planned",
                        own + plan->workspace, gpu->attention_bytes);
        }
    }
    return true;
}

// Returns the largest pieces of a backward pass whose plans fit into the workspace, or {0, 0} if
// there are none.
static Piece backward_piece(Gpu *gpu, const AttentionShape *s) {
    Piece p = piece_for(s, gpu->attention_bytes);
    bool has_plans;
    while (!serves(gpu, s, p, true, &has_plans)) {
        if (!has_plans || !shrink(&p)) { return (Piece){0, 0}; }
    }
    return p;
}

bool attention_is_fast(Gpu *gpu, AttentionShape s) {
    bool has_plans;
    Piece p = {s.B, s.G};
    return (attention_own_serves(gpu, s, false) || serves(gpu, &s, p, false, &has_plans)) &&
           (attention_own_serves(gpu, s, true) || backward_piece(gpu, &s).sequences > 0);
}

bool attention_start(Gpu *gpu, AttentionShape s) {
    if (attention_is_fast(gpu, s)) { return true; }
    if (!gpu->warned_of_attention) {
        warn("%s; a plain kernel is used, which is slow%s", error_text(),
             s.documents != NULL ? " (--no-reset-attention-mask may have a fast one)" : "");
    }
    gpu->warned_of_attention = true;
    return false;
}

static void check_operands(const AttentionShape *s, const void *const operands[], int count) {
    if (s->G < 1 || s->H % s->G != 0) { die("attention: %d heads over %d groups", s->H, s->G); }
    for (int i = 0; i < count; i++) {
        if (operands[i] == NULL || (uintptr_t)operands[i] % 16 != 0) {
            die("attention: operand %d is at %p; the address must be a multiple of 16", i,
                operands[i]);
        }
    }
}

// Runs the forward pass in one piece or, if d_out is not NULL, the backward pass in as many pieces
// as the workspace requires.
static void run(Gpu *gpu, AttentionShape s, const Bf16 *qkv, const Bf16 *out, const float *lse,
                const Bf16 *d_out, const Bf16 *d_qkv) {
    float scale = 1.0f / sqrtf((float)s.D), masked = -1e9f, one = 1.0f;
    bool backward = d_out != NULL;
    int64_t D = s.D, heads = s.H / s.G, row = (s.H + 2 * s.G) * D;
    Piece piece = backward ? backward_piece(gpu, &s) : (Piece){s.B, s.G};
    for (int b = 0; b < s.B; b += piece.sequences) {
        for (int g = 0; g < s.G; g += piece.groups) {
            Piece part = {s.B - b < piece.sequences ? s.B - b : piece.sequences,
                          s.G - g < piece.groups ? s.G - g : piece.groups};
            const AttentionPlan *plan = plan_for(gpu, s, part, backward);
            char *sum = gpu->attention_workspace;
            char *dq_sum = sum + (backward ? sum_bytes(&s, part) : 0);
            char *rest = dq_sum + (backward ? dq_sum_bytes(&s, part) : 0);
            // attention_start has checked both conditions
            assert(plan->usable);
            assert((size_t)(rest - sum) + plan->workspace <= gpu->attention_bytes);
            if (cudnnGetVersion() < ZEROES_DQ_SUM) {
                CUDA_CHECK(cudaMemsetAsync(dq_sum, 0, (size_t)(rest - dq_sum), gpu->stream));
            }
            int64_t first = (int64_t)b * s.T, h = g * heads, q = first * row + h * D;
            int64_t k = first * row + (s.H + g) * D, v = k + s.G * D;
            int64_t result = (first * s.H + h) * D, statistic = ((int64_t)b * s.H + h) * s.T;
            const void *bound[UID_VIRTUAL] = {
                [UID_Q] = qkv + q,
                [UID_K] = qkv + k,
                [UID_V] = qkv + v,
                [UID_OUT] = out + result,
                [UID_LSE] = lse + statistic,
                [UID_SCALE] = &scale,
                [UID_MASKED] = &masked,
                [UID_STARTS] = s.documents != NULL ? s.documents + first : NULL};
            if (d_out != NULL) {
                bound[UID_DOUT] = d_out + result;
                bound[UID_DQ] = d_qkv + q;
                bound[UID_DK] = d_qkv + k;
                bound[UID_DV] = d_qkv + v;
                bound[UID_SUM] = sum;
                bound[UID_DQ_SUM] = s.deterministic ? NULL : dq_sum;
                bound[UID_ONE] = &one;
            }
            execute(gpu, plan, bound, rest);
        }
    }
}

void attention_forward_gpu(Gpu *gpu, AttentionShape s, Bf16 *out, float *lse, const Bf16 *qkv) {
    gpu_family(gpu, FAMILY_ATTENTION);
    check_operands(&s, (const void *[]){out, lse, qkv}, 3);
    if (!attention_start(gpu, s)) {
        attention_plain_forward(gpu, s, out, lse, qkv);
    } else if (attention_own_serves(gpu, s, false)) {
        attention_own_forward(gpu, s, out, lse, qkv);
    } else {
        run(gpu, s, qkv, out, lse, NULL, NULL);
    }
}

void attention_backward_gpu(Gpu *gpu, AttentionShape s, Bf16 *d_qkv, const Bf16 *d_out,
                            const Bf16 *out, const float *lse, const Bf16 *qkv) {
    gpu_family(gpu, FAMILY_ATTENTION);
    check_operands(&s, (const void *[]){d_qkv, d_out, out, lse, qkv}, 5);
    if (!attention_start(gpu, s)) {
        attention_plain_backward(gpu, s, d_qkv, d_out, out, lse, qkv);
    } else if (attention_own_serves(gpu, s, true)) {
        attention_own_backward(gpu, s, d_qkv, d_out, out, lse, qkv);
    } else {
        run(gpu, s, qkv, out, lse, d_out, d_qkv);
    }
}
