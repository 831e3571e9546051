#include "linear.h"

void linear_plan(LinearLayer *l, const Params *p, const LinearPrecision *lp, Plan *plan) {
    *l = (LinearLayer){.precision = lp,
                       .N = lp->outputs,
                       .C = lp->inputs,
                       .wgrad_fp8 = lp->wgrad == NUMBER_FP8,
                       .fast_forward = p->run->precision.fast_forward,
                       .fast_backward = p->run->precision.fast_backward,
                       .family = lp->linear == LINEAR_HEAD ? FAMILY_HEAD_PRODUCTS
                                                           : FAMILY_PRODUCTS};
    if (lp->number != NUMBER_FP8) { return; }
    bool codes;
    params_weights(p, lp->weight, lp->layer, &codes);
    int64_t size = (int64_t)l->N * l->C;
    plan_section(plan, "weights", PHASE_ALWAYS);
    PLAN(plan, "weights, FP8", codes ? 0 : size, l->weight.fp8);
    PLAN(plan, "weights, FP8, transposed", size, l->weight.fp8_t);
}

void linear_start(LinearLayer *l, const Params *p) {
    const LinearPrecision *lp = l->precision;
    bool codes;
    void *weights = params_weights(p, lp->weight, lp->layer, &codes);
    if (codes) {
        l->weight.fp8 = weights;
    } else {
        l->weight.bf16 = weights;
    }
    const Fp8Squares *squares = &p->squares[lp - p->run->precision.linear];
    l->weight.scales = squares->scales;
    l->weight.scales_t = squares->scales_t;
    l->dweight = params_gradient(p, lp->weight, lp->layer);
    l->bias = params_weights(p, lp->bias, lp->layer, NULL);
    l->dbias = params_gradient(p, lp->bias, lp->layer);
    linear_set_scaling(l, p);
}

void linear_set_scaling(LinearLayer *l, const Params *p) {
    l->x = params_tensor(p, l->precision, OPERAND_X);
    l->w = params_tensor(p, l->precision, OPERAND_W);
    l->dy = params_tensor(p, l->precision, OPERAND_DY);
}

static bool is_fp8(const LinearLayer *l, Pass pass) {
    return l->weight.fp8 != NULL && pass != PASS_EVAL_BF16;
}

Fp8Tensor linear_x(const LinearLayer *l, Pass pass) {
    Fp8Tensor x = l->x;
    if (!is_fp8(l, pass)) { return (Fp8Tensor){0}; }
    if (pass != PASS_TRAIN) {
        x.record = false;
        x.counts = NULL;
    }
    return x;
}

Operand linear_input(const LinearLayer *l, Pass pass) {
    bool kept = pass == PASS_AGAIN || (pass == PASS_TRAIN && !l->recomputed);
    bool product_follows = pass != PASS_AGAIN || l->product_recomputed;
    return (Operand){.bf16 = l->input.bf16 != NULL ? l->input.bf16 : l->input_scratch.bf16,
                     .fp8 = is_fp8(l, pass) && product_follows ? l->input_scratch.fp8 : NULL,
                     .fp8_t = kept ? l->input.fp8_t : NULL,
                     .scales = l->input_scratch.scales,
                     .scales_t = l->input.scales_t};
}

void linear_receive(Gpu *gpu, const LinearLayer *l) {
    const Gradient no_sums = {NULL, TYPE_F32, false};
    if (l->weight.fp8 == NULL) { return; }
    gpu_family(gpu, FAMILY_QUANTIZE);
    if (l->weight.bf16 == NULL) {
        gpu_transpose_codes(l->weight.fp8_t, l->weight.fp8, l->N, l->C, gpu->stream);
        return;
    }
    gpu_measure(l->w, l->weight.bf16, (int64_t)l->N * l->C, gpu->stream);
    gpu_quantize(l->weight, l->w, no_sums, (Scratch){NULL, 0}, l->N, l->C, gpu->stream);
}

// FP8 operands with the summed dimension contiguous, and their block scales, if they have such.
static void set_fp8(Gemm *g, const uint8_t *a, const float *scales_a, const Fp8Tensor *qa,
                    const uint8_t *b, const float *scales_b, const Fp8Tensor *qb,
                    bool fast_accumulation) {
    g->a = a;
    g->b = b;
    g->type_a = gpu_fp8_type(qa->type);
    g->type_b = gpu_fp8_type(qb->type);
    g->trans_a = false;
    g->trans_b = true;
    g->scale_a = qa->mode == SCALE_BLOCKS ? scales_a : &qa->live->scale_inv;
    g->scale_b = qb->mode == SCALE_BLOCKS ? scales_b : &qb->live->scale_inv;
    g->scales_a = qa->scales;
    g->scales_b = qb->scales;
    g->fast_accumulation = fast_accumulation;
}

Gemm linear_product(const LinearLayer *l, Bf16 *y, Operand x, int M, Pass pass) {
    Gemm g = gemm_plain(M, l->N, l->C, x.bf16, l->weight.bf16, y);
    g.trans_b = true;
    if (is_fp8(l, pass)) {
        set_fp8(&g, x.fp8, x.scales, &l->x, l->weight.fp8, l->weight.scales, &l->w,
                l->fast_forward);
    }
    return g;
}

void linear_forward(Gpu *gpu, const LinearLayer *l, Bf16 *y, Operand x, const Bf16 *addend, int M,
                    Pass pass) {
    Gemm g = linear_product(l, y, x, M, pass);
    g.c = addend;
    g.beta = addend != NULL ? 1.0f : 0.0f;
    g.epilogue = l->bias != NULL ? EPILOGUE_BIAS : EPILOGUE_NONE;
    g.bias = l->bias;
    gpu_family(gpu, l->family);
    gemm(gpu, g);
}

Gemm linear_input_gradient(const LinearLayer *l, Bf16 *dx, int M) {
    const Operand *dy = &l->gradient;
    Gemm g = gemm_plain(M, l->C, l->N, dy->bf16, l->weight.bf16, dx);
    if (l->weight.fp8 != NULL) {
        set_fp8(&g, dy->fp8, dy->scales, &l->dy, l->weight.fp8_t, l->weight.scales_t, &l->w,
                l->fast_backward);
    }
    return g;
}

void linear_weight_gradient(Gpu *gpu, const LinearLayer *l, Operand x, int M, bool accumulate) {
    const Operand *dy = &l->gradient;
    Gemm g = gemm_plain(l->N, l->C, M, dy->bf16, x.bf16, l->dweight.data);
    g.trans_a = true;
    if (l->wgrad_fp8) {
        set_fp8(&g, dy->fp8_t, dy->scales_t, &l->dy, x.fp8_t, x.scales_t, &l->x, l->fast_backward);
    }
    g.type_d = l->dweight.type;
    g.c = accumulate ? l->dweight.data : NULL;
    g.beta = accumulate ? 1.0f : 0.0f;
    gpu_family(gpu, l->family);
    gemm(gpu, g);
}

void linear_backward(Gpu *gpu, const LinearLayer *l, Bf16 *dx, Operand x, Bf16 *gelu_input, int M,
                     bool accumulate) {
    Gemm g = linear_input_gradient(l, dx, M);
    g.epilogue = gelu_input != NULL ? EPILOGUE_DGELU : EPILOGUE_NONE;
    g.aux = gelu_input;
    gpu_family(gpu, l->family);
    gemm(gpu, g);
    linear_weight_gradient(gpu, l, x, M, accumulate);
}
