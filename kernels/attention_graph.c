#include "attention_graph.h"

#include <assert.h>

// cuDNN finds its flash-attention engine by the shape of an operation graph; the graphs below are
// the ones it knows (B.H.T.T score matrices are "virtual": they exist inside the engine only).

enum { TENSORS = 48, OPS = 32 };

typedef cudnnBackendDescriptor_t Desc;

typedef struct {
    Gpu *gpu;
    int num_tensors, num_ops;
    Desc tensors[TENSORS], ops[OPS];
    int64_t next_uid;
    cudnnStatus_t status; // the first that was not a success
} Graph;

typedef struct {
    int64_t d[4];
} Dims;

// ---- building graphs ----------------------------------------------------------------------------

static void note(Graph *g, cudnnStatus_t status) {
    if (g->status == CUDNN_STATUS_SUCCESS) { g->status = status; }
}

static void set(Graph *g, Desc d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *value) {
    note(g, cudnnBackendSetAttribute(d, name, type, count, value));
}

static Desc make(Graph *g, cudnnBackendDescriptorType_t type) {
    Desc d = NULL;
    note(g, cudnnBackendCreateDescriptor(type, &d));
    return d;
}

static void set_desc(Graph *g, Desc d, cudnnBackendAttributeName_t name, Desc value) {
    set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

typedef enum { BOUND, VIRTUAL, BY_VALUE } Kind;

static Desc tensor(Graph *g, int64_t uid, Kind kind, cudnnDataType_t type, Dims dims,
                   Dims strides) {
    Desc d = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t alignment = 16;
    bool yes = true;
    if (kind == VIRTUAL) { uid = g->next_uid++; }
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims.d);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides.d);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    if (kind == VIRTUAL) { set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes); }
    if (kind == BY_VALUE) { set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes); }
    note(g, cudnnBackendFinalize(d));
    assert(g->num_tensors < TENSORS);
    g->tensors[g->num_tensors++] = d;
    return d;
}

static Dims packed(Dims dims) {
    return (Dims){{dims.d[1] * dims.d[2] * dims.d[3], dims.d[2] * dims.d[3], dims.d[3], 1}};
}

static Desc inner(Graph *g, cudnnDataType_t type, Dims dims) {
    return tensor(g, 0, VIRTUAL, type, dims, packed(dims));
}

static Desc value(Graph *g, int64_t uid) {
    return tensor(g, uid, BY_VALUE, CUDNN_DATA_FLOAT, (Dims){{1, 1, 1, 1}}, (Dims){{1, 1, 1, 1}});
}

static void add_op(Graph *g, Desc op) {
    note(g, cudnnBackendFinalize(op));
    assert(g->num_ops < OPS);
    g->ops[g->num_ops++] = op;
}

// y = mode(x, b) or, with t, where(t, x, b); axis is for GEN_INDEX.
static Desc pointwise(Graph *g, cudnnPointwiseMode_t mode, Desc x, Desc b, Desc t, Desc y,
                      int64_t axis) {
    bool compares = mode == CUDNN_POINTWISE_CMP_GE;
    cudnnDataType_t type = compares ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT;
    Desc kind = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(g, kind, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
    if (mode == CUDNN_POINTWISE_GEN_INDEX) {
        set(g, kind, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    }
    note(g, cudnnBackendFinalize(kind));
    Desc op = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b != NULL) { set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b); }
    if (t != NULL) { set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t); }
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_op(g, op);
    cudnnBackendDestroyDescriptor(kind);
    return y;
}

static Desc matmul(Graph *g, Desc a, Desc b, Desc c) {
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    Desc kind = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(g, kind, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    note(g, cudnnBackendFinalize(kind));
    Desc op = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, kind);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    add_op(g, op);
    cudnnBackendDestroyDescriptor(kind);
    return c;
}

static Desc reduction(Graph *g, cudnnReduceTensorOp_t how, Desc x, Desc y) {
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    Desc kind = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, kind, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
    set(g, kind, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    note(g, cudnnBackendFinalize(kind));
    Desc op = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_op(g, op);
    cudnnBackendDestroyDescriptor(kind);
    return y;
}

static Desc reshape(Graph *g, Desc x, Desc y) {
    Desc op = make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_op(g, op);
    return y;
}

// ---- the two graphs -----------------------------------------------------------------------------

// The dimensions and strides that both graphs share, for one piece of a shape.
typedef struct {
    Dims head, group, head_t, group_t; // [b,h,T,D], [b,g,T,D] and their transposes
    Dims scores, row;                  // [b,h,T,T], [b,h,T,1]
    Dims qkv, qkv_t;                   // strides in the packed buffer, and transposed
    Dims out, lse;                     // strides of the output and of the rows' statistics
} Geometry;

static Geometry geometry_of(const AttentionShape *s, AttentionPiece p) {
    int64_t b = p.sequences, g = p.groups, h = g * (s->H / s->G), T = s->T, D = s->D;
    int64_t N = (int64_t)(s->H + 2 * s->G) * D, HD = (int64_t)s->H * D;
    return (Geometry){
        .head = {{b, h, T, D}},
        .group = {{b, g, T, D}},
        .head_t = {{b, h, D, T}},
        .group_t = {{b, g, D, T}},
        .scores = {{b, h, T, T}},
        .row = {{b, h, T, 1}},
        .qkv = {{T * N, D, N, 1}},
        .qkv_t = {{T * N, D, 1, N}},
        .out = {{T * HD, D, HD, 1}},
        .lse = {{(int64_t)s->H * T, T, 1, 1}},
    };
}

static const cudnnDataType_t F32 = CUDNN_DATA_FLOAT, BF16 = CUDNN_DATA_BFLOAT16;

// where(row >= col, x, very negative)
static Desc causal_mask(Graph *g, Desc x, const Geometry *geo) {
    Desc row = pointwise(g, CUDNN_POINTWISE_GEN_INDEX, x, NULL, NULL,
                         inner(g, CUDNN_DATA_INT32, geo->scores), 2);
    Desc col = pointwise(g, CUDNN_POINTWISE_GEN_INDEX, x, NULL, NULL,
                         inner(g, CUDNN_DATA_INT32, geo->scores), 3);
    Desc seen = pointwise(g, CUDNN_POINTWISE_CMP_GE, row, col, NULL,
                          inner(g, CUDNN_DATA_BOOLEAN, geo->scores), 0);
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, x, value(g, UID_MASKED), seen,
                     inner(g, F32, geo->scores), 0);
}

static Desc binary(Graph *g, cudnnPointwiseMode_t mode, Desc x, Desc b, Dims dims) {
    return pointwise(g, mode, x, b, NULL, inner(g, F32, dims), 0);
}

static Desc unary(Graph *g, cudnnPointwiseMode_t mode, Desc x, Dims dims) {
    return pointwise(g, mode, x, NULL, NULL, inner(g, F32, dims), 0);
}

static void build_forward(Graph *g, const Geometry *geo) {
    Desc q = tensor(g, UID_Q, BOUND, BF16, geo->head, geo->qkv);
    Desc k_t = tensor(g, UID_K, BOUND, BF16, geo->group_t, geo->qkv_t);
    Desc v = tensor(g, UID_V, BOUND, BF16, geo->group, geo->qkv);
    Desc out = tensor(g, UID_OUT, BOUND, BF16, geo->head, geo->out);
    Desc lse = tensor(g, UID_LSE, BOUND, F32, geo->row, geo->lse);

    Desc s = matmul(g, q, k_t, inner(g, F32, geo->scores));
    s = binary(g, CUDNN_POINTWISE_MUL, s, value(g, UID_SCALE), geo->scores);
    s = causal_mask(g, s, geo);
    Desc max = reduction(g, CUDNN_REDUCE_TENSOR_MAX, s, inner(g, F32, geo->row));
    Desc e = unary(g, CUDNN_POINTWISE_EXP, binary(g, CUDNN_POINTWISE_SUB, s, max, geo->scores),
                   geo->scores);
    Desc sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, e, inner(g, F32, geo->row));
    Desc log = unary(g, CUDNN_POINTWISE_LOG, sum, geo->row);
    pointwise(g, CUDNN_POINTWISE_ADD, max, log, NULL, lse, 0);
    Desc p = pointwise(g, CUDNN_POINTWISE_DIV, e, sum, NULL, inner(g, BF16, geo->scores), 0);
    matmul(g, p, v, out);
}

// The gradient of K or V: a product per query head, summed over the heads that share the group.
static void group_gradient(Graph *g, const Geometry *geo, Desc scores_t, Desc rows, int64_t uid) {
    bool shared = geo->head.d[1] != geo->group.d[1];
    Desc result = tensor(g, uid, BOUND, BF16, geo->group, geo->qkv);
    if (!shared) {
        matmul(g, scores_t, rows, result);
        return;
    }
    Desc per_head = matmul(g, scores_t, rows, inner(g, BF16, geo->head));
    reduction(g, CUDNN_REDUCE_TENSOR_ADD, per_head, result);
}

// The transpose of a score matrix, as a BF16 view of it.
static Desc transposed_scores(Graph *g, const Geometry *geo, Desc x) {
    Dims strides = packed(geo->scores);
    strides.d[2] = 1;
    strides.d[3] = geo->scores.d[3];
    return reshape(g, x, tensor(g, 0, VIRTUAL, BF16, geo->scores, strides));
}

static void build_backward(Graph *g, const Geometry *geo, bool deterministic) {
    Desc q = tensor(g, UID_Q, BOUND, BF16, geo->head, geo->qkv);
    Desc k_t = tensor(g, UID_K, BOUND, BF16, geo->group_t, geo->qkv_t);
    Desc v_t = tensor(g, UID_V, BOUND, BF16, geo->group_t, geo->qkv_t);
    Desc out = tensor(g, UID_OUT, BOUND, BF16, geo->head, geo->out);
    Desc dout = tensor(g, UID_DOUT, BOUND, BF16, geo->head, geo->out);
    Desc lse = tensor(g, UID_LSE, BOUND, F32, geo->row, geo->lse);
    Desc sum = tensor(g, UID_SUM, BOUND, F32, geo->row, packed(geo->row));
    Desc dq = tensor(g, UID_DQ, BOUND, BF16, geo->head, geo->qkv);

    Desc products = binary(g, CUDNN_POINTWISE_MUL, dout, out, geo->head);
    Desc row_sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, products, inner(g, F32, geo->row));
    pointwise(g, CUDNN_POINTWISE_MUL, row_sum, value(g, UID_ONE), NULL, sum, 0);

    Desc s = matmul(g, q, k_t, inner(g, F32, geo->scores));
    s = binary(g, CUDNN_POINTWISE_MUL, s, value(g, UID_SCALE), geo->scores);
    s = binary(g, CUDNN_POINTWISE_SUB, s, lse, geo->scores);
    Desc p = unary(g, CUDNN_POINTWISE_EXP, causal_mask(g, s, geo), geo->scores);
    group_gradient(g, geo, transposed_scores(g, geo, p), dout, UID_DV);

    Desc dp = matmul(g, dout, v_t, inner(g, F32, geo->scores));
    dp = binary(g, CUDNN_POINTWISE_SUB, dp, sum, geo->scores);
    Desc ds = binary(g, CUDNN_POINTWISE_MUL, dp, p, geo->scores);
    ds = binary(g, CUDNN_POINTWISE_MUL, ds, value(g, UID_SCALE), geo->scores);
    group_gradient(g, geo, transposed_scores(g, geo, ds), q, UID_DK);

    Desc k = reshape(g, k_t, tensor(g, 0, VIRTUAL, BF16, geo->group, geo->qkv));
    if (deterministic) {
        matmul(g, ds, k, dq);
    } else {
        Desc dq_sum = tensor(g, UID_DQ_SUM, BOUND, F32, geo->head, packed(geo->head));
        matmul(g, ds, k, dq_sum);
        pointwise(g, CUDNN_POINTWISE_IDENTITY, dq_sum, NULL, NULL, dq, 0);
    }
}

// ---- plans --------------------------------------------------------------------------------------

// Finalizes the first engine configuration that can be, of those the heuristics propose.
static bool finalize_plan(Gpu *gpu, Desc op_graph, AttentionPlan *plan) {
    enum { CONFIGS = 8 };
    Desc heuristics, configs[CONFIGS];
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    int64_t found = 0;
    DNN_CHECK(cudnnBackendCreateDescriptor(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &heuristics));
    cudnnBackendSetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
                             CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &op_graph);
    cudnnBackendSetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1,
                             &mode);
    for (int i = 0; i < CONFIGS; i++) {
        DNN_CHECK(cudnnBackendCreateDescriptor(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &configs[i]));
    }
    if (cudnnBackendFinalize(heuristics) == CUDNN_STATUS_SUCCESS) {
        cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGS, &found, configs);
    }
    for (int i = 0; i < found && i < CONFIGS && !plan->usable; i++) {
        int64_t bytes = 0;
        DNN_CHECK(
            cudnnBackendCreateDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan->plan));
        cudnnBackendSetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1,
                                 &gpu->dnn);
        cudnnBackendSetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &configs[i]);
        plan->usable = cudnnBackendFinalize(plan->plan) == CUDNN_STATUS_SUCCESS;
        if (!plan->usable) {
            cudnnBackendDestroyDescriptor(plan->plan);
            continue;
        }
        DNN_CHECK(cudnnBackendGetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                           CUDNN_TYPE_INT64, 1, NULL, &bytes));
        plan->workspace = (size_t)bytes;
    }
    for (int i = 0; i < CONFIGS; i++) { cudnnBackendDestroyDescriptor(configs[i]); }
    cudnnBackendDestroyDescriptor(heuristics);
    return plan->usable;
}

void attention_make_plan(Gpu *gpu, AttentionPlan *plan) {
    Graph g = {.gpu = gpu, .next_uid = UID_VIRTUAL};
    Geometry geo = geometry_of(&plan->shape, plan->piece);
    Desc op_graph = NULL;
    if (plan->backward) {
        build_backward(&g, &geo, plan->shape.deterministic);
    } else {
        build_forward(&g, &geo);
    }
    note(&g, cudnnBackendCreateDescriptor(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, &op_graph));
    set(&g, op_graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &gpu->dnn);
    set(&g, op_graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g.num_ops,
        g.ops);
    if (g.status == CUDNN_STATUS_SUCCESS) { note(&g, cudnnBackendFinalize(op_graph)); }
    bool ok = g.status == CUDNN_STATUS_SUCCESS && finalize_plan(gpu, op_graph, plan);
    if (!ok) {
        char reason[256] = "";
        cudnnGetLastErrorString(reason, sizeof(reason));
        fail(&plan->why_not, "cuDNN has no attention engine for T %d, %d/%d heads of %d: %.200s",
             plan->shape.T, plan->shape.H, plan->shape.G, plan->shape.D, reason);
    }
    if (op_graph != NULL) { cudnnBackendDestroyDescriptor(op_graph); }
    for (int i = 0; i < g.num_ops; i++) { cudnnBackendDestroyDescriptor(g.ops[i]); }
    for (int i = 0; i < g.num_tensors; i++) { cudnnBackendDestroyDescriptor(g.tensors[i]); }
}
