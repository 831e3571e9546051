#include "model.h"
#include "../base/host.h"
#include "../base/rng.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// clang-format off
static const TensorRow table[TENSOR_COUNT] = {
    [TENSOR_TOKEN_EMBEDDING] = {"token_embedding.weight", SECTION_EMBEDDING, IN_ALL, DIM_VOCAB,
     DIM_CHANNELS, INIT_NORMAL, "wte.weight", {"embed_tokens.weight"}},
    [TENSOR_POSITION_EMBEDDING] = {"position_embedding.weight", SECTION_EMBEDDING, IN_GPT2,
     DIM_POSITIONS, DIM_CHANNELS, INIT_NORMAL, "wpe.weight", {0}},
    [TENSOR_NORM1_WEIGHT] = {"norm1.weight", SECTION_BLOCK, IN_ALL, DIM_CHANNELS, DIM_NONE,
     INIT_ONE, "ln_1.weight", {"input_layernorm.weight"}},
    [TENSOR_NORM1_BIAS] = {"norm1.bias", SECTION_BLOCK, IN_GPT2, DIM_CHANNELS, DIM_NONE, INIT_ZERO,
     "ln_1.bias", {0}},
    [TENSOR_QKV_WEIGHT] = {"qkv.weight", SECTION_BLOCK, IN_ALL, DIM_QKV, DIM_CHANNELS, INIT_NORMAL,
     "attn.c_attn.weight",
     {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}},
    [TENSOR_QKV_BIAS] = {"qkv.bias", SECTION_BLOCK, IN_QKV_BIAS, DIM_QKV, DIM_NONE, INIT_ZERO,
     "attn.c_attn.bias",
     {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}},
    [TENSOR_ATTENTION_OUT_WEIGHT] = {"attention_out.weight", SECTION_BLOCK, IN_ALL, DIM_CHANNELS,
     DIM_HEADS, INIT_RESIDUAL, "attn.c_proj.weight", {"self_attn.o_proj.weight"}},
    [TENSOR_ATTENTION_OUT_BIAS] = {"attention_out.bias", SECTION_BLOCK, IN_GPT2, DIM_CHANNELS,
     DIM_NONE, INIT_ZERO, "attn.c_proj.bias", {0}},
    [TENSOR_NORM2_WEIGHT] = {"norm2.weight", SECTION_BLOCK, IN_ALL, DIM_CHANNELS, DIM_NONE,
     INIT_ONE, "ln_2.weight", {"post_attention_layernorm.weight"}},
    [TENSOR_NORM2_BIAS] = {"norm2.bias", SECTION_BLOCK, IN_GPT2, DIM_CHANNELS, DIM_NONE, INIT_ZERO,
     "ln_2.bias", {0}},
    [TENSOR_FC1_WEIGHT] = {"fc1.weight", SECTION_BLOCK, IN_ALL, DIM_FC1, DIM_CHANNELS, INIT_NORMAL,
     "mlp.c_fc.weight", {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
    [TENSOR_FC1_BIAS] = {"fc1.bias", SECTION_BLOCK, IN_GPT2, DIM_FC1, DIM_NONE, INIT_ZERO,
     "mlp.c_fc.bias", {0}},
    [TENSOR_FC2_WEIGHT] = {"fc2.weight", SECTION_BLOCK, IN_ALL, DIM_CHANNELS, DIM_FFN,
     INIT_RESIDUAL, "mlp.c_proj.weight", {"mlp.down_proj.weight"}},
    [TENSOR_FC2_BIAS] = {"fc2.bias", SECTION_BLOCK, IN_GPT2, DIM_CHANNELS, DIM_NONE, INIT_ZERO,
     "mlp.c_proj.bias", {0}},
    [TENSOR_FINAL_NORM_WEIGHT] = {"final_norm.weight", SECTION_FINAL, IN_ALL, DIM_CHANNELS,
     DIM_NONE, INIT_ONE, "ln_f.weight", {"norm.weight"}},
    [TENSOR_FINAL_NORM_BIAS] = {"final_norm.bias", SECTION_FINAL, IN_GPT2, DIM_CHANNELS, DIM_NONE,
     INIT_ZERO, "ln_f.bias", {0}},
    [TENSOR_HEAD_WEIGHT] = {"head.weight", SECTION_FINAL, IN_UNTIED, DIM_VOCAB, DIM_CHANNELS,
     INIT_NORMAL, "lm_head.weight", {"lm_head.weight"}},
    [TENSOR_QUERY_NORM_WEIGHT] = {"query_norm.weight", SECTION_BLOCK, IN_QK_NORM, DIM_HEAD,
     DIM_NONE, INIT_ONE, NULL, {"self_attn.q_norm.weight"}},
    [TENSOR_KEY_NORM_WEIGHT] = {"key_norm.weight", SECTION_BLOCK, IN_QK_NORM, DIM_HEAD, DIM_NONE,
     INIT_ONE, NULL, {"self_attn.k_norm.weight"}},
};
// clang-format on

// Number of random keys of a layer: one for each tensor up to TENSOR_HEAD_WEIGHT. With another
// number, runs would start with other weights. The tensors after TENSOR_HEAD_WEIGHT are norms,
// which are not random.
enum { RANDOM_TENSORS = TENSOR_HEAD_WEIGHT + 1 };

const TensorRow *tensor_row(TensorId id) {
    return &table[id];
}

ModelConfig model_config(const Options *o) {
    assert(o->kv_channels > 0 && o->ffn_hidden_size > 0); // options_resolve() has run
    return (ModelConfig){
        .arch = (Arch)o->arch,
        .num_layers = o->num_layers,
        .channels = o->hidden_size,
        .num_heads = o->num_attention_heads,
        .num_groups = o->num_query_groups,
        .head_size = o->kv_channels,
        .ffn = o->ffn_hidden_size,
        .seq_length = o->seq_length,
        .max_position = o->max_position_embeddings,
        .vocab = o->vocab_size,
        .padded_vocab = (int)round_up64(o->vocab_size, o->make_vocab_size_divisible_by),
        .tied_head = !o->untie_embeddings_and_output_weights,
        .qkv_bias = o->arch == ARCH_GPT2 || o->add_qkv_bias,
        .qk_norm = o->qk_layernorm,
        .norm_eps = o->norm_epsilon,
        .rope = {.theta = o->rope_theta,
                 .scaling = (RopeScaling)o->rope_scaling,
                 .factor = o->rope_scaling_factor,
                 .low_factor = o->rope_low_freq_factor,
                 .high_factor = o->rope_high_freq_factor,
                 .original_length = o->rope_original_length},
        .init_std = o->init_method_std,
        .loss = {.z_loss = (float)o->z_loss_coeff, .softcap = (float)o->logit_softcap},
    };
}

int dim_size(const ModelConfig *c, Dim dim) {
    switch (dim) {
    case DIM_NONE: return 1;
    case DIM_VOCAB: return c->padded_vocab;
    case DIM_POSITIONS: return c->max_position;
    case DIM_CHANNELS: return c->channels;
    case DIM_QKV: return qkv_rows(c);
    case DIM_HEADS: return c->num_heads * c->head_size;
    case DIM_GROUPS: return c->num_groups * c->head_size;
    case DIM_HEAD: return c->head_size;
    case DIM_FC1: return fc1_rows(c);
    case DIM_FFN: return c->ffn;
    }
    return 0;
}

static bool model_has(const ModelConfig *c, const TensorRow *row) {
    switch (row->in) {
    case IN_ALL: return true;
    case IN_GPT2: return c->arch == ARCH_GPT2;
    case IN_QKV_BIAS: return c->qkv_bias;
    case IN_QK_NORM: return c->qk_norm;
    case IN_UNTIED: return !c->tied_head;
    }
    return false;
}

static void append_params(ParamLayout *layout, ModelSection section, int layer) {
    const ModelConfig *c = &layout->config;
    Bucket *bucket = &layout->buckets[layout->num_buckets++];
    bucket->begin = layout->size;
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const TensorRow *row = &table[id];
        if (row->section != section || !model_has(c, row)) { continue; }
        if (layout->first[id] < 0) { layout->first[id] = layout->count; }
        Param *p = &layout->params[layout->count++];
        *p = (Param){(TensorId)id, layer, layout->size, dim_size(c, row->rows),
                     dim_size(c, row->cols)};
        layout->size += round_up64(param_size(p), PARAM_ALIGN);
        int rows = row->rows == DIM_VOCAB ? c->vocab : p->rows;
        layout->num_parameters += (int64_t)rows * p->cols;
    }
    bucket->end = layout->size;
}

ParamLayout param_layout(const ModelConfig *config) {
    ParamLayout layout = {.config = *config};
    size_t most = (size_t)TENSOR_COUNT * (size_t)(config->num_layers + 2);
    layout.params = calloc_or_die(most, sizeof(Param));
    layout.buckets = calloc_or_die((size_t)config->num_layers + 2, sizeof(Bucket));
    for (int id = 0; id < TENSOR_COUNT; id++) { layout.first[id] = -1; }
    append_params(&layout, SECTION_EMBEDDING, -1);
    int embeddings = layout.count;
    for (int l = 0; l < config->num_layers; l++) { append_params(&layout, SECTION_BLOCK, l); }
    layout.block_params = (layout.count - embeddings) / config->num_layers;
    append_params(&layout, SECTION_FINAL, -1);
    return layout;
}

void param_layout_free(ParamLayout *layout) {
    free(layout->params);
    free(layout->buckets);
    *layout = (ParamLayout){0};
}

const Param *param_find(const ParamLayout *layout, TensorId id, int layer) {
    if (id == TENSOR_COUNT || layout->first[id] < 0) { return NULL; }
    int skip = table[id].section == SECTION_BLOCK ? layer * layout->block_params : 0;
    return &layout->params[layout->first[id] + skip];
}

int dim_parts(const ModelConfig *c, Dim dim, int rows[HF_PARTS]) {
    int heads = dim_size(c, DIM_HEADS), groups = dim_size(c, DIM_GROUPS);
    bool qkv = dim == DIM_QKV, gated = dim == DIM_FC1 && c->arch == ARCH_LLAMA;
    rows[0] = qkv ? heads : gated ? c->ffn : dim_size(c, dim);
    rows[1] = qkv ? groups : c->ffn;
    rows[2] = groups;
    return qkv ? 3 : gated ? 2 : 1;
}

float param_decay(const Param *p, const Options *options) {
    return table[p->id].cols != DIM_NONE ? (float)options->weight_decay : 0.0f;
}

float param_lr_mult(const Param *p, const Options *options) {
    const TensorRow *row = &table[p->id];
    if (row->cols == DIM_NONE) { return (float)options->vector_lr_mult; }
    if (row->section == SECTION_EMBEDDING) { return (float)options->embedding_lr_mult; }
    return row->section == SECTION_FINAL ? (float)options->head_lr_mult : 1.0f;
}

int param_matrices(const ModelConfig *c, const Param *p, int rows[HF_PARTS]) {
    const TensorRow *row = &table[p->id];
    bool matrix = row->section == SECTION_BLOCK && row->cols != DIM_NONE;
    return matrix ? dim_parts(c, row->rows, rows) : 0;
}

// The arguments of model_init, for the threads that compute the weights.
typedef struct {
    const ParamLayout *layout;
    int64_t begin, end; // elements of the parameter space
    float *out;
    uint64_t seed;
} InitialWeights;

enum { INIT_CHUNK = 1 << 16 }; // elements

static void init_param(const InitialWeights *w, const Param *p, int64_t begin, int64_t end) {
    const ModelConfig *c = &w->layout->config;
    const TensorRow *row = &table[p->id];
    int64_t rows = row->rows == DIM_VOCAB ? c->vocab : p->rows; // without the padding
    int64_t from = max64(0, begin - p->offset), to = min64(end - p->offset, rows * p->cols);
    bool normal = row->init == INIT_NORMAL || row->init == INIT_RESIDUAL;
    float mean = row->init == INIT_ONE ? 1.0f : 0.0f;
    float std = (float)(row->init == INIT_RESIDUAL ? c->init_std / sqrt(2.0 * c->num_layers)
                                                   : c->init_std);
    uint64_t key = rng_bits(w->seed, (uint64_t)(p->layer + 1) * RANDOM_TENSORS + p->id);
    float *values = w->out + (p->offset - w->begin);
    for (int64_t i = from; i < to; i++) {
        values[i] = normal ? std * rng_normal(key, (uint64_t)i) : mean;
    }
}

static bool init_chunk(void *weights, int64_t i) {
    const InitialWeights *w = weights;
    const ParamLayout *layout = w->layout;
    int64_t begin = w->begin + i * INIT_CHUNK, end = min64(begin + INIT_CHUNK, w->end);
    memset(w->out + (begin - w->begin), 0, (size_t)(end - begin) * sizeof(float));
    for (const Param *p = layout->params; p < layout->params + layout->count; p++) {
        init_param(w, p, begin, end);
    }
    return true;
}

void model_init(const ParamLayout *layout, int64_t begin, int64_t end, float *out, uint64_t seed) {
    InitialWeights w = {layout, begin, end, out, seed};
    threads_for((end - begin + INIT_CHUNK - 1) / INIT_CHUNK, init_chunk, &w);
}

int64_t matmul_weights(const ModelConfig *c) {
    int64_t block = 0;
    for (const TensorRow *row = table; row < table + TENSOR_COUNT; row++) {
        if (row->section == SECTION_BLOCK && row->cols != DIM_NONE && model_has(c, row)) {
            block += (int64_t)dim_size(c, row->rows) * dim_size(c, row->cols);
        }
    }
    return block * c->num_layers + (int64_t)c->padded_vocab * c->channels;
}

double flops_per_token(const ModelConfig *c) {
    double attention = 6.0 * c->num_layers * dim_size(c, DIM_HEADS) * c->seq_length;
    return 6.0 * (double)matmul_weights(c) + attention;
}
