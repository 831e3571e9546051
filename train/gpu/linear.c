#include "linear.h"

void linear_plan(LinearLayer *l, const Params *p, const LinearPrecision *lp, Plan *plan) {
    *l = (LinearLayer){.precision = lp,
                       .N = lp->outputs,
                       .C = lp->inputs,
                       .wgrad_fp8 = lp->wgrad == NUMBER_FP8,
                       .fast_forward = p->run->precision.fast_forward,
                       .fast_backward = p->run->precision.fast_backward,
                       .counting = &p->counting,
                       .adds_bias = true,
                       .family = lp->linear == LINEAR_HEAD ? FAMILY_HEAD_MATMULS : FAMILY_MATMULS};
    if (lp->number != NUMBER_FP8) { return; }
    bool codes;
    params_weights(p, lp->weight, lp->layer, &codes);
    int64_t size = (int64_t)l->N * l->C;
    plan_section(plan, "weights", PHASE_ALWAYS);
    PLAN(plan, "weights, FP8", codes ? 0 : size, l->w.rows.codes);
    PLAN(plan, "weights, FP8, transposed", size, l->w.columns.codes);
}

// Fills in how a training pass quantises an operand of an FP8 layer. If the operand has one scale,
// and not one for each block, also fills in the address of the scale's inverse.
static void scale_operand(const LinearLayer *l, const Params *p, OperandId operand, Operand *o) {
    const LinearPrecision *lp = l->precision;
    const Precision *precision = &p->run->precision;
    int slot = fp8_slot_index(&p->run->config, lp->linear, lp->layer, operand);
    if (lp->number != NUMBER_FP8) { return; }
    o->type = lp->type[operand];
    o->target = lp->target[operand];
    o->scaling = p->scaling[slot];
    o->fused = l->wgrad_fp8 && o->scaling != SCALE_CURRENT && o->scaling != SCALE_BLOCK_128X128;
    o->power_of_two = precision->power_of_two;
    if (fp8_by_blocks(o->scaling)) { return; }
    o->writes_amax = fp8_slot_uses_amax(precision, slot);
    o->scale = &p->fp8.scales[slot];
    o->rows.inverse = o->columns.inverse = &o->scale->scale_inv;
}

void linear_start(LinearLayer *l, const Params *p) {
    const LinearPrecision *lp = l->precision;
    bool codes;
    void *weights = params_weights(p, lp->weight, lp->layer, &codes);
    if (codes) {
        l->w.rows.codes = weights;
    } else {
        l->w.bf16 = weights;
    }
    const Fp8Weight *w = &p->weights.fp8[lp - p->run->precision.linear];
    l->w.rows.inverse = w->inverse;
    l->w.columns.inverse = w->inverse_t;
    scale_operand(l, p, OPERAND_X, &l->x);
    scale_operand(l, p, OPERAND_W, &l->w);
    scale_operand(l, p, OPERAND_DY, &l->dy);
    int slot = fp8_slot_index(&p->run->config, lp->linear, lp->layer, OPERAND_X);
    l->counts = lp->number == NUMBER_FP8 && p->counts != NULL ? &p->counts[slot] : NULL;
    l->dweight = params_gradient(p, lp->weight, lp->layer);
    l->bias = params_weights(p, lp->bias, lp->layer, NULL);
    l->dbias = params_gradient(p, lp->bias, lp->layer);
}

static bool is_fp8(const LinearLayer *l, Pass pass) {
    return l->w.rows.codes != NULL && pass != PASS_EVAL_BF16;
}

Operand linear_input(const LinearLayer *l, Pass pass) {
    Operand x = l->x;
    if (!is_fp8(l, pass)) { return operand_bf16(x.bf16); }
    bool kept = pass == PASS_RECOMPUTE || (pass == PASS_TRAIN && !l->recomputed);
    if (pass == PASS_RECOMPUTE && !l->matmul_recomputed) { x.rows.codes = NULL; }
    if (!kept) { x.columns.codes = NULL; }
    // a recomputation uses the scale of the forward pass, and an evaluation records no amax of an
    // operand with SCALE_DELAYED
    if (pass == PASS_RECOMPUTE || (pass != PASS_TRAIN && x.scaling == SCALE_DELAYED)) {
        x.writes_amax = false;
    }
    return x;
}

// Counts n codes, in the steps of --fp8-stats-interval.
static void count(Gpu *gpu, const LinearLayer *l, OperandId operand, const uint8_t *codes,
                  int64_t n) {
    if (l->counts == NULL || !*l->counting) { return; }
    gpu_count_codes(gpu, &l->counts[operand], codes, n, l->precision->type[operand]);
}

void linear_receive(Gpu *gpu, const LinearLayer *l) {
    int64_t size = (int64_t)l->N * l->C;
    if (l->w.rows.codes == NULL) { return; }
    if (l->w.bf16 == NULL) {
        gpu_transpose_codes(gpu, l->w.columns.codes, l->w.rows.codes, l->N, l->C);
    } else {
        gpu_quantize(gpu, l->w, no_sums, (Scratch){NULL, 0}, l->N, l->C);
    }
    count(gpu, l, OPERAND_W, l->w.rows.codes, size);
}

// Sets a matmul's operands to FP8 codes, in the forms in which the summed dimension is contiguous.
static void set_fp8(Gemm *g, const Operand *a, Fp8Form a_form, const Operand *b, Fp8Form b_form,
                    bool fast_accumulation) {
    g->a = a_form.codes;
    g->b = b_form.codes;
    g->type_a = gpu_fp8_type(a->type);
    g->type_b = gpu_fp8_type(b->type);
    g->trans_a = false;
    g->trans_b = true;
    g->scale_a = a_form.inverse;
    g->scale_b = b_form.inverse;
    g->scaling_a = a->scaling;
    g->scaling_b = b->scaling;
    g->fast_accumulation = fast_accumulation;
}

Gemm linear_matmul(Gpu *gpu, const LinearLayer *l, Bf16 *y, const Operand *x, int M, Pass pass) {
    Gemm g = gemm_plain(M, l->N, l->C, x->bf16, l->w.bf16, y);
    g.trans_b = true;
    g.family = l->family;
    if (is_fp8(l, pass)) { set_fp8(&g, x, x->rows, &l->w, l->w.rows, l->fast_forward); }
    if (pass == PASS_TRAIN) { count(gpu, l, OPERAND_X, x->rows.codes, (int64_t)M * l->C); }
    return g;
}

Gemm linear_input_gradient(const LinearLayer *l, Bf16 *dx, int M) {
    const Operand *dy = &l->dy;
    Gemm g = gemm_plain(M, l->C, l->N, dy->bf16, l->w.bf16, dx);
    g.family = l->family;
    if (l->w.rows.codes != NULL) {
        set_fp8(&g, dy, dy->rows, &l->w, l->w.columns, l->fast_backward);
    }
    return g;
}

void linear_forward(Gpu *gpu, const LinearLayer *l, Bf16 *y, Operand x, const Bf16 *addend, int M,
                    Pass pass) {
    if (!linear_runs(l, pass)) { return; }
    Gemm g = linear_matmul(gpu, l, y, &x, M, pass);
    g.c = addend;
    g.beta = addend != NULL ? 1.0f : 0.0f;
    if (l->bias != NULL && l->adds_bias) {
        g.epilogue = EPILOGUE_BIAS;
        g.bias = l->bias;
    }
    gemm(gpu, g);
}

void linear_weight_gradient(Gpu *gpu, const LinearLayer *l, Operand x, int M, bool accumulate) {
    const Operand *dy = &l->dy;
    Gemm g = gemm_plain(l->N, l->C, M, dy->bf16, x.bf16, l->dweight.data);
    g.trans_a = true;
    g.family = l->family;
    if (l->wgrad_fp8) { set_fp8(&g, dy, dy->columns, &x, x.columns, l->fast_backward); }
    g.type_d = l->dweight.type;
    g.c = accumulate ? l->dweight.data : NULL;
    g.beta = accumulate ? 1.0f : 0.0f;
    count(gpu, l, OPERAND_DY, dy->rows.codes, (int64_t)M * l->N);
    gemm(gpu, g);
}

void linear_backward(Gpu *gpu, const LinearLayer *l, Bf16 *dx, Operand x, int M, bool accumulate) {
    gemm(gpu, linear_input_gradient(l, dx, M));
    linear_weight_gradient(gpu, l, x, M, accumulate);
}
