#include "linear.h"

#include "../../kernels/gemm.h"

static const LinearPrecision *precision(const Params *p, LinearId id) {
    return precision_of(&p->run->precision, id.linear, id.layer);
}

bool linear_is_fp8(const Params *p, LinearId id) {
    return precision(p, id)->number == NUMBER_FP8 && id.pass != PASS_EVAL_BF16;
}

bool linear_is_fused(const Params *p, LinearId id) {
    return linear_is_fp8(p, id) && precision(p, id)->wgrad == NUMBER_FP8 && !p->measuring;
}

Fp8Out linear_out(const Params *p, LinearId id, Operand operand, Matrix forms) {
    return params_fp8_out(p, id.linear, id.layer, operand, forms.rows, forms.columns,
                          id.pass == PASS_TRAIN);
}

static bool measures(const Params *p, LinearId id, Operand operand) {
    bool fixed = id.linear == LINEAR_HEAD && operand == OPERAND_DY;
    return linear_is_fp8(p, id) && p->measuring && id.pass != PASS_AGAIN && !fixed;
}

float *linear_amax(const Params *p, LinearId id, Operand operand) {
    return measures(p, id, operand) ? &linear_out(p, id, operand, (Matrix){0}).live->amax : NULL;
}

void linear_measure(const Params *p, LinearId id, Operand operand, const Bf16 *plain, int64_t n) {
    float *amax = linear_amax(p, id, operand);
    if (amax == NULL) { return; }
    gpu_family(p->gpu, FAMILY_QUANTIZE);
    gpu_amax(amax, plain, TYPE_BF16, n, p->gpu->stream);
}

void linear_quantize(const Params *p, LinearId id, Operand operand, Matrix forms, GradientOut sums,
                     float *scratch, int M) {
    int outputs, inputs;
    linear_shape(&p->run->config, id.linear, &outputs, &inputs);
    int N = operand == OPERAND_DY ? outputs : inputs;
    if (linear_is_fp8(p, id) && (forms.rows != NULL || forms.columns != NULL)) {
        gpu_family(p->gpu, FAMILY_QUANTIZE);
        gpu_quantize(linear_out(p, id, operand, forms), measures(p, id, operand), sums, forms.plain,
                     scratch, M, N, p->gpu->stream);
    } else if (sums.data != NULL) {
        gpu_family(p->gpu, FAMILY_ACTIVATIONS);
        gpu_column_sums(sums, forms.plain, scratch, M, N, p->gpu->stream);
    }
}

// The operands' number formats and scales; both have the summed dimension contiguous.
static void set_fp8(const Params *p, LinearId id, Gemm *g, Operand a, Operand b) {
    const LinearPrecision *lp = precision(p, id);
    g->type_a = lp->type[a] == FP8_E4M3 ? TYPE_E4M3 : TYPE_E5M2;
    g->type_b = lp->type[b] == FP8_E4M3 ? TYPE_E4M3 : TYPE_E5M2;
    g->trans_a = false;
    g->trans_b = true;
    g->scale_a = params_scale_inv(p, id.linear, id.layer, a);
    g->scale_b = params_scale_inv(p, id.linear, id.layer, b);
}

static void begin(const Params *p, LinearId id) {
    gpu_family(p->gpu, id.linear == LINEAR_HEAD ? FAMILY_HEAD_PRODUCTS : FAMILY_PRODUCTS);
}

void linear_forward(const Params *p, LinearForward l) {
    const ModelConfig *c = &p->run->config;
    int outputs, inputs;
    linear_shape(c, l.id.linear, &outputs, &inputs);
    const Bf16 *w = params_copy(p, linear_weight(c, l.id.linear), l.id.layer);
    begin(p, l.id);
    if (w == NULL && l.id.pass == PASS_EVAL_BF16) {
        w = params_plain_weight(p, l.id.linear, l.id.layer);
    }
    Gemm g = gemm_plain(l.M, outputs, inputs, l.x.plain, w, l.y);
    g.trans_b = true;
    if (linear_is_fp8(p, l.id)) {
        g.a = l.x.rows;
        g.b = params_codes(p, l.id.linear, l.id.layer, false);
        set_fp8(p, l.id, &g, OPERAND_X, OPERAND_W);
        g.fast_accumulation = p->run->precision.fast_forward;
    }
    g.c = l.addend;
    g.beta = l.addend != NULL ? 1.0f : 0.0f;
    g.epilogue = l.bias != NULL ? EPILOGUE_BIAS : EPILOGUE_NONE;
    g.bias = l.bias;
    gemm(p->gpu, g);
}

static void input_gradient(const Params *p, const LinearBackward *l, int outputs, int inputs) {
    const Bf16 *w = params_copy(p, linear_weight(&p->run->config, l->id.linear), l->id.layer);
    Gemm g = gemm_plain(l->M, inputs, outputs, l->dy.plain, w, l->dx);
    if (linear_is_fp8(p, l->id)) {
        g.a = l->dy.rows;
        g.b = params_codes(p, l->id.linear, l->id.layer, true);
        set_fp8(p, l->id, &g, OPERAND_DY, OPERAND_W);
        g.fast_accumulation = p->run->precision.fast_backward;
    }
    g.epilogue = l->gelu_input != NULL ? EPILOGUE_DGELU : EPILOGUE_NONE;
    g.aux = l->gelu_input;
    gemm(p->gpu, g);
}

static void weight_gradient(const Params *p, const LinearBackward *l, int outputs, int inputs) {
    TensorId weight = linear_weight(&p->run->config, l->id.linear);
    GradientOut dw = params_gradient(p, weight, l->id.layer, l->accumulate);
    Gemm g = gemm_plain(outputs, inputs, l->M, l->dy.plain, l->x.plain, dw.data);
    g.trans_a = true;
    if (precision(p, l->id)->wgrad == NUMBER_FP8) {
        g.a = l->dy.columns;
        g.b = l->x.columns;
        set_fp8(p, l->id, &g, OPERAND_DY, OPERAND_X);
        g.fast_accumulation = p->run->precision.fast_backward;
    }
    g.type_d = dw.type;
    g.c = dw.accumulate ? dw.data : NULL;
    g.beta = dw.accumulate ? 1.0f : 0.0f;
    gemm(p->gpu, g);
}

void linear_backward(const Params *p, LinearBackward l) {
    int outputs, inputs;
    linear_shape(&p->run->config, l.id.linear, &outputs, &inputs);
    begin(p, l.id);
    input_gradient(p, &l, outputs, inputs);
    weight_gradient(p, &l, outputs, inputs);
}
