#include "hugging_face.h"
#include "../kernels/fp8_format.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- tensors ------------------------------------------------------------------------------------

// Returns the entry of the tensor with an FP8 weight's scales (hf_tensors).
static TensorEntry scales_of(const TensorEntry *weight) {
    TensorEntry scales = {.dtype = DTYPE_F32, .dims = 2, .begin = weight->begin};
    for (int d = 0; d < 2; d++) { scales.shape[d] = (weight->shape[d] - 1) / FP8_BLOCK + 1; }
    snprintf(scales.name, TENSOR_NAME, "%.*s_scale_inv", TENSOR_NAME - 16, weight->name);
    return scales;
}

int hf_tensors(const ParamLayout *layout, Dtype dtype, const void *weights, TensorEntry **tensors) {
    const ModelConfig *c = &layout->config;
    bool gpt2 = c->arch == ARCH_GPT2;
    const char *body = gpt2 ? "transformer" : "model", *blocks = gpt2 ? "h" : "layers";
    bool fp8 = dtype == DTYPE_F8_E4M3;
    int count = 0;
    assert(!fp8 || (!gpt2 && weights == NULL));
    *tensors = calloc_or_die((size_t)layout->count * HF_PARTS * 2, sizeof(TensorEntry));
    for (const Param *p = layout->params; p < layout->params + layout->count; p++) {
        const TensorRow *row = tensor_row(p->id);
        int64_t first = p->offset;
        int part_rows[HF_PARTS] = {p->rows};
        int parts = gpt2 ? 1 : dim_parts(c, row->rows, part_rows);
        for (int part = 0; part < parts; part++) {
            const char *name = gpt2 ? row->gpt2_name : row->llama_names[part];
            int64_t rows = row->rows == DIM_VOCAB ? c->vocab : part_rows[part]; // without padding
            TensorEntry *t = &(*tensors)[count++];
            bool linear = row->section == SECTION_BLOCK && row->cols != DIM_NONE;
            t->dtype = fp8 && !linear ? DTYPE_BF16 : dtype;
            t->dims = row->cols == DIM_NONE ? 1 : 2;
            t->transposed = gpt2 && linear;
            t->shape[0] = t->transposed ? p->cols : rows;
            t->shape[1] = t->transposed ? rows : p->cols;
            t->begin = first;
            if (weights != NULL) { t->data = (const char *)weights + first * dtype_bytes(dtype); }
            first += rows * p->cols;
            if (p->id == TENSOR_HEAD_WEIGHT) {
                snprintf(t->name, TENSOR_NAME, "%s", name);
            } else if (row->section == SECTION_BLOCK) {
                snprintf(t->name, TENSOR_NAME, "%s.%s.%d.%s", body, blocks, p->layer, name);
            } else {
                snprintf(t->name, TENSOR_NAME, "%s.%s", body, name);
            }
            if (fp8 && linear) { (*tensors)[count++] = scales_of(t); }
        }
    }
    return count;
}

void hf_list(const ParamLayout *layout, FILE *out) {
    FREED TensorEntry *tensors = NULL;
    int count = hf_tensors(layout, DTYPE_F32, NULL, &tensors);
    for (const TensorEntry *t = tensors; t < tensors + count; t++) {
        fprintf(out, "%s %lld", t->name, (long long)t->shape[0]);
        fprintf(out, t->dims > 1 ? " %lld\n" : "\n", (long long)t->shape[1]);
    }
}

static const char head_name[] = "lm_head.weight";

// Finds a tensor in a file, or returns NULL. Names in a file of GPT2Model or LlamaModel, which have
// no LM head, lack the prefix "transformer." or "model.". is_head: the tensor is a tied embedding,
// which the file may have under the head's name.
static const TensorEntry *entry_of(const SafeTensors *st, const TensorEntry *t, bool is_head) {
    const TensorEntry *e = safetensors_find(st, t->name);
    const char *dot = strchr(t->name, '.');
    if (e == NULL && dot != NULL) { e = safetensors_find(st, dot + 1); }
    return e == NULL && is_head ? safetensors_find(st, head_name) : e;
}

// Reads elements begin..end of an FP8 weight, and decodes them.
static bool read_fp8(const SafeTensors *st, const TensorEntry *e, int64_t begin, int64_t end,
                     float *out) {
    TensorEntry want = scales_of(e);
    const TensorEntry *s = safetensors_find(st, want.name);
    int64_t cols = e->shape[1], across = want.shape[1], count = want.shape[0] * across;
    if (s == NULL || s->dims != 2 || s->dtype > DTYPE_F16 || s->shape[0] != want.shape[0] ||
        s->shape[1] != across) {
        return fail("%s: tensor '%s' is in FP8, and '%s' is %s: it must be floating-point "
                    "[%lld, %lld], a scale for each 128 x 128 codes",
                    st->path, e->name, want.name, s == NULL ? "missing" : "another",
                    (long long)want.shape[0], (long long)across);
    }
    FREED float *scales = malloc_or_die((size_t)count * sizeof(float));
    FREED uint8_t *codes = malloc_or_die((size_t)(end - begin));
    if (!safetensors_read_floats(st, s, 0, count, scales) ||
        !safetensors_read(st, e, begin, end - begin, codes)) {
        return false;
    }
    for (int64_t i = begin; i < end; i++) {
        float scale = scales[i / cols / FP8_BLOCK * across + i % cols / FP8_BLOCK];
        out[i - begin] = fp8_decode(codes[i - begin], FP8_E4M3) * scale;
    }
    return true;
}

// Reads elements begin..end of the tensor t. e: t's entry in the file, or NULL if the file lacks t.
static bool read_tensor(const SafeTensors *st, const TensorEntry *e, const TensorEntry *t,
                        int64_t begin, int64_t end, float *out) {
    if (e == NULL) { return fail("%s: tensor '%s' is missing", st->path, t->name); }
    int64_t rows = t->shape[0], cols = t->shape[1];
    bool same = e->dims == t->dims && e->shape[0] == rows && (t->dims == 1 || e->shape[1] == cols);
    bool fp8 = e->dtype == DTYPE_F8_E4M3 && e->dims == 2 && !t->transposed;
    if (!same || (e->dtype > DTYPE_F16 && !fp8)) {
        return fail("%s: tensor '%s' is %s [%lld, %lld], not a floating-point [%lld, %lld]",
                    st->path, t->name, dtype_name(e->dtype), (long long)e->shape[0],
                    (long long)(e->dims > 1 ? e->shape[1] : 1), (long long)rows, (long long)cols);
    }
    if (fp8) { return read_fp8(st, e, begin, end, out); }
    if (!t->transposed) { return safetensors_read_floats(st, e, begin, end - begin, out); }
    FREED float *row = malloc_or_die((size_t)cols * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        if (!safetensors_read_floats(st, e, r * cols, cols, row)) { return false; }
        for (int64_t c = 0; c < cols; c++) {
            int64_t at = c * rows + r;
            if (at >= begin && at < end) { out[at - begin] = row[c]; }
        }
    }
    return true;
}

// For a model with tied embeddings: fails if the file has a head that differs from the embedding.
// embedding: elements begin..end of the embedding's `size` elements; only these are compared.
static bool head_is(const SafeTensors *st, const float *embedding, int64_t begin, int64_t end,
                    int64_t size) {
    enum { PIECE = 4096 };
    const TensorEntry *e = safetensors_find(st, head_name);
    float head[PIECE];
    if (e == NULL) { return true; }
    bool same = e->dims == 2 && e->shape[0] * e->shape[1] == size && e->dtype <= DTYPE_F16;
    for (int64_t i = begin; same && i < end; i += PIECE) {
        int64_t n = min64(PIECE, end - i);
        if (!safetensors_read_floats(st, e, i, n, head)) { return false; }
        same = memcmp(head, embedding + i - begin, (size_t)n * sizeof(float)) == 0;
    }
    return same || fail("%s: its lm_head.weight is not the embedding, which is the head by "
                        "config.json; to use it, set tie_word_embeddings to false there",
                        st->path);
}

// For a model without tied embeddings: refuses a file with an embedding but no head, or the
// reverse.
static bool has_both(const SafeTensors *st, const TensorEntry *embedding) {
    bool head = safetensors_find(st, head_name) != NULL;
    bool both = head == (entry_of(st, embedding, false) != NULL);
    return both ||
           fail("%s: tensor '%s' is missing, and config.json does not tie it to '%s'; if "
                "they are one tensor, set tie_word_embeddings to true there",
                st->path, head ? embedding->name : head_name, head ? head_name : embedding->name);
}

bool hf_read(const SafeTensors *st, const ParamLayout *layout, int64_t begin, int64_t end,
             float *out) {
    FREED TensorEntry *tensors = NULL;
    int num_tensors = hf_tensors(layout, DTYPE_F32, NULL, &tensors);
    // the first tensor is the embedding
    bool ok = layout->config.tied_head || has_both(st, &tensors[0]);
    memset(out, 0, (size_t)(end - begin) * sizeof(float));
    for (const TensorEntry *t = tensors; ok && t < tensors + num_tensors; t++) {
        int64_t size = t->shape[0] * (t->dims > 1 ? t->shape[1] : 1);
        int64_t from = max64(begin, t->begin), to = min64(end, t->begin + size);
        if (from >= to) { continue; }
        float *values = out + from - begin;
        bool is_head = layout->config.tied_head && t == tensors;
        from -= t->begin;
        to -= t->begin;
        ok = read_tensor(st, entry_of(st, t, is_head), t, from, to, values) &&
             (!is_head || head_is(st, values, from, to, size));
    }
    return ok;
}

bool hf_knows_all(const SafeTensors *st, const ParamLayout *layout) {
    static const char *const ignored[] = {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"};
    FREED TensorEntry *tensors = NULL;
    int count = hf_tensors(layout, DTYPE_F32, NULL, &tensors);
    FREED bool *known = calloc_or_die((size_t)st->count + 1, sizeof(bool));
    for (const TensorEntry *t = tensors; t < tensors + count; t++) {
        const TensorEntry *e = entry_of(st, t, false);
        if (e == NULL) { continue; }
        TensorEntry scales = scales_of(e);
        const TensorEntry *s = safetensors_find(st, scales.name);
        known[e - st->entries] = true;
        if (s != NULL && e->dtype == DTYPE_F8_E4M3) { known[s - st->entries] = true; }
    }
    for (int n = 0; n < st->count; n++) {
        const char *name = st->entries[n].name;
        known[n] |= strcmp(name, head_name) == 0;
        // ignores attention masks and rotary tables
        for (size_t i = 0; i < sizeof(ignored) / sizeof(*ignored); i++) {
            size_t length = strlen(name), end = strlen(ignored[i]);
            known[n] |= length >= end && strcmp(name + length - end, ignored[i]) == 0;
        }
        if (!known[n]) {
            return fail("%s: tensor '%s' is none of the model that config.json means", st->path,
                        name);
        }
    }
    return true;
}

// Sets *zero to whether a tensor has only zeros. Of most tensors the first bytes tell.
static bool find_zeros(const SafeTensors *st, const TensorEntry *e, bool *zero) {
    enum { PIECE = 4096 };
    char bytes[PIECE * sizeof(double)];
    int64_t width = dtype_bytes(e->dtype), count = (e->end - e->begin) / width;
    *zero = count > 0;
    for (int64_t i = 0; *zero && i < count; i += PIECE) {
        int64_t n = min64(PIECE, count - i);
        if (!safetensors_read(st, e, i, n, bytes)) { return false; }
        *zero = bytes[0] == 0 && memcmp(bytes, bytes + 1, (size_t)(n * width - 1)) == 0;
    }
    return true;
}

bool hf_warn_of_zeros(const SafeTensors *st, const ParamLayout *layout) {
    FREED TensorEntry *tensors = NULL;
    int zeros = 0, count = hf_tensors(layout, DTYPE_F32, NULL, &tensors);
    const char *first = NULL;
    char others[40] = " is";
    for (const TensorEntry *t = tensors; t < tensors + count; t++) {
        const TensorEntry *e = entry_of(st, t, layout->config.tied_head && t == tensors);
        bool zero = false;
        if (t->dims > 1 && e != NULL && !find_zeros(st, e, &zero)) { return false; }
        if (zero && zeros++ == 0) { first = e->name; }
    }
    if (zeros > 1) {
        snprintf(others, sizeof(others), " and %d other matri%s are", zeros - 1,
                 zeros > 2 ? "ces" : "x");
    }
    if (zeros > 0) {
        warn("%s: tensor '%s'%s all zeros: is the file damaged?", st->path, first, others);
    }
    return true;
}

// ---- config.json --------------------------------------------------------------------------------

// Families of models, by their names in transformers. A model is exported as the first family that
// it fits, or as the family that it came from if its attention has a window there.
enum { GPT2, LLAMA, QWEN2, QWEN3, MISTRAL, FAMILIES };
static const struct {
    const char *type, *class;
    Arch arch;
    bool qkv_bias, qk_norm; // the values of --add-qkv-bias and --qk-layernorm
} families[FAMILIES] = {
    [GPT2] = {"gpt2", "GPT2LMHeadModel", ARCH_GPT2, false, false},
    [LLAMA] = {"llama", "LlamaForCausalLM", ARCH_LLAMA, false, false},
    [QWEN2] = {"qwen2", "Qwen2ForCausalLM", ARCH_LLAMA, true, false},
    [QWEN3] = {"qwen3", "Qwen3ForCausalLM", ARCH_LLAMA, false, true},
    [MISTRAL] = {"mistral", "MistralForCausalLM", ARCH_LLAMA, false, false},
};

static int family_of(const Options *o) {
    bool bias = o->arch == ARCH_LLAMA && o->add_qkv_bias; // GPT-2 ignores this option
    int i = 0;
    while (families[i].arch != (Arch)o->arch || families[i].qkv_bias != bias ||
           families[i].qk_norm != o->qk_layernorm) {
        i++;
        assert(i < FAMILIES);
    }
    return i;
}

// Returns the family of a config.json, or FAMILIES if it is none of these.
static int family_named(const cJSON *json) {
    const char *name = json_text(json, "model_type", "");
    int family = 0;
    while (family < FAMILIES && strcmp(name, families[family].type) != 0) { family++; }
    return family;
}

const char *hf_model_type(const Options *o) {
    return families[family_of(o)].type;
}

// Families that are refused, and the features that the trainers lack for them.
#define EXPERTS "mixture of experts"
#define GEMMA "norms that multiply by 1 + weight, GeGLU, "
#define SIDE_BY_SIDE "blocks whose attention and feed-forward run side by side"
static const struct {
    const char *type, *lacks;
} other_families[] = {
    {"gemma", GEMMA "scaled embeddings"},
    {"gemma2", GEMMA "sliding windows, capped attention"},
    {"gemma3_text", GEMMA "sliding windows"},
    {"phi3", "packed projections under other names, LongRoPE"},
    {"olmo2", "norms after the layers instead of before"},
    {"smollm3", "layers without a rotary embedding"},
    {"granite", "multipliers of embeddings, attention, residuals and logits"},
    {"cohere", SIDE_BY_SIDE},
    {"gpt_neox", SIDE_BY_SIDE},
    {"falcon", SIDE_BY_SIDE},
    {"bloom", "ALiBi instead of a rotary embedding"},
    {"mpt", "ALiBi instead of a rotary embedding"},
    {"deepseek_v2", "multi-head latent attention, " EXPERTS},
    {"deepseek_v3", "multi-head latent attention, " EXPERTS},
    {"qwen3_next", "linear attention, " EXPERTS},
    {"gpt_oss", "attention sinks, " EXPERTS},
    {"mamba", "state-space layers"},
    {"mamba2", "state-space layers"},
};

// Flags for the table below. TOP: the number may be at the top level of config.json. ROPE: it may
// be in the rotary embedding's object. BOTH_NAMES: GPT-2's config.json may also use Llama's name
// for it.
enum { TOP = 1, ROPE = 2, BOTH_NAMES = 4 };

// The numbers of config.json, each with its option, its names, and its defaults in transformers.
// NAN: there is no default, so the number must be given. 0: the number is derived from others, or
// absent.
static const struct {
    int where;
    RopeScaling from;                  // read with this kind of RoPE scaling and later ones
    const char *option, *gpt2, *llama; // names; NULL: not in config.json, so the default is used
    double gpt2_default, llama_default;
} numbers[] = {
    {TOP | BOTH_NAMES, 0, "num-layers", "n_layer", "num_hidden_layers", NAN, NAN},
    {TOP | BOTH_NAMES, 0, "hidden-size", "n_embd", "hidden_size", NAN, NAN},
    {TOP | BOTH_NAMES, 0, "num-attention-heads", "n_head", "num_attention_heads", NAN, NAN},
    {TOP, 0, "num-query-groups", NULL, "num_key_value_heads", 0, 0},
    {TOP, 0, "kv-channels", NULL, "head_dim", 0, 0},
    {TOP, 0, "ffn-hidden-size", "n_inner", "intermediate_size", 0, NAN},
    {TOP | BOTH_NAMES, 0, "max-position-embeddings", "n_positions", "max_position_embeddings", 1024,
     2048},
    {TOP, 0, "vocab-size", "vocab_size", "vocab_size", NAN, NAN},
    {TOP, 0, "norm-epsilon", "layer_norm_epsilon", "rms_norm_eps", 1e-5, 1e-6},
    {TOP, 0, "init-method-std", "initializer_range", "initializer_range", 0.02, 0.02},
    // this key is Gemma 2's; in the families that we support, transformers ignores it
    {TOP, 0, "logit-softcap", "final_logit_softcapping", "final_logit_softcapping", 0, 0},
    {TOP | ROPE, 0, "rope-theta", NULL, "rope_theta", 1e4, 1e4},
    {ROPE, ROPE_LINEAR, "rope-scaling-factor", NULL, "factor", NAN, NAN},
    {ROPE, ROPE_LLAMA3, "rope-low-freq-factor", NULL, "low_freq_factor", NAN, NAN},
    {ROPE, ROPE_LLAMA3, "rope-high-freq-factor", NULL, "high_freq_factor", NAN, NAN},
    {TOP | ROPE, ROPE_LLAMA3, "rope-original-length", NULL, "original_max_position_embeddings", NAN,
     NAN},
};
enum { NUMBERS = sizeof(numbers) / sizeof(numbers[0]) };

// Other keys of config.json, for the families whose bits are set in `of`. Each row has, as JSON,
// the value that is written (NULL: none is written) and another value that is accepted (NULL: there
// is none). Any other value is refused, and the error says what the trainers lack.
#define ALL (~0u)
#define LLAMAS (ALL ^ 1 << GPT2)
#define SCALES "that scale"
#define QUANTIZED "reading a quantized model (but FP8 in blocks of 128 x 128): give the original"
#define FP8_CONFIG /* as transformers' FineGrainedFP8Config has it */               \
    "{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"activation_scheme\":\"dynamic\"," \
    "\"weight_block_size\":[128,128],\"modules_to_not_convert\":[\"lm_head\"]}"
static const struct {
    unsigned of;
    bool null; // the value null counts as a missing key
    const char *key, *written, *other, *lacks;
} features[] = {
    {1 << GPT2, false, "activation_function", "\"gelu_new\"", "\"gelu_pytorch_tanh\"",
     "that activation"},
    {1 << GPT2, false, "scale_attn_weights", NULL, "true", "unscaled attention"},
    {1 << GPT2, false, "scale_attn_by_inverse_layer_idx", NULL, "false",
     "scales of attention by layer"},
    {1 << GPT2, false, "add_cross_attention", NULL, "false", "cross-attention"},
    {LLAMAS, false, "hidden_act", "\"silu\"", "\"swish\"", "that activation"},
    {1 << LLAMA | 1 << QWEN3, false, "attention_bias", "false", NULL,
     "a bias of attention's output"},
    {1 << LLAMA, false, "mlp_bias", "false", NULL, "biases in the feed-forward layers"},
    {LLAMAS, true, "partial_rotary_factor", NULL, "1", "a rotary embedding of part of a head"},
    {LLAMAS, true, "no_rope_layers", NULL, "null", "layers without a rotary embedding"},
    {LLAMAS, true, "attn_logit_softcapping", NULL, "null", "capped attention"},
    {LLAMAS, true, "query_pre_attn_scalar", NULL, "null", SCALES},
    {LLAMAS, true, "attention_multiplier", NULL, "null", SCALES},
    {LLAMAS, true, "embedding_multiplier", NULL, "1", SCALES},
    {LLAMAS, true, "residual_multiplier", NULL, "1", SCALES},
    {LLAMAS, true, "logits_scaling", NULL, "1", SCALES},
    {LLAMAS, true, "logit_scale", NULL, "1", SCALES},
    {ALL, true, "use_parallel_residual", NULL, "false", SIDE_BY_SIDE},
    {ALL, true, "is_causal", NULL, "true", "attention in both directions"},
    {ALL, true, "per_layer_config", NULL, "{}", "layers that differ"},
    {ALL, true, "num_local_experts", NULL, "0", EXPERTS},
    {ALL, true, "num_experts", NULL, "0", EXPERTS},
    {ALL, true, "n_routed_experts", NULL, "0", EXPERTS},
    {ALL, true, "quantization_config", NULL, "null", QUANTIZED},
    {ALL, true, "compression_config", NULL, "null", QUANTIZED},
};
enum { FEATURES = sizeof(features) / sizeof(features[0]) };

// The types of JSON values, as bits.
enum {
    JSON_NONE = 1, // null
    JSON_BOOL = 2,
    JSON_WHOLE = 4, // 64.0 counts as whole
    JSON_REAL = 8,
    JSON_TEXT = 16,
    JSON_LIST = 32,
    JSON_OBJECT = 64,
    JSON_WHOLE_LIST = 128,
    JSON_ANY = 255,
};
static const char *const type_names[] = {
    "null",   "true or false", "a whole number", "a number",
    "a text", "a list",        "an object",      "a list of whole numbers"};

// The types that other keys of config.json must have.
enum { TIE, ROPE_SCALING, ROPE_PARAMETERS, LAYERS, WINDOW, USE_WINDOW, MAX_WINDOW, TOKEN_IDS };
enum { EOS_TOKEN_ID = TOKEN_IDS + 1 };
static const struct {
    const char *key;
    int types;
} keys[] = {
    [TIE] = {"tie_word_embeddings", JSON_BOOL},
    [ROPE_SCALING] = {"rope_scaling", JSON_NONE | JSON_OBJECT},
    [ROPE_PARAMETERS] = {"rope_parameters", JSON_NONE | JSON_OBJECT},
    [LAYERS] = {"layer_types", JSON_NONE | JSON_LIST},
    [WINDOW] = {"sliding_window", JSON_NONE | JSON_WHOLE},
    [USE_WINDOW] = {"use_sliding_window", JSON_BOOL},
    [MAX_WINDOW] = {"max_window_layers", JSON_WHOLE},
    [TOKEN_IDS] = {"bos_token_id", JSON_NONE | JSON_WHOLE},
    [EOS_TOKEN_ID] = {"eos_token_id", JSON_NONE | JSON_WHOLE | JSON_WHOLE_LIST},
    {"pad_token_id", JSON_NONE | JSON_WHOLE},
};
enum { KEYS = sizeof(keys) / sizeof(keys[0]) };

// Keys of dropout probabilities. The first three are GPT-2's.
static const char *const dropouts[] = {"resid_pdrop", "embd_pdrop", "attn_pdrop",
                                       "attention_dropout"};

#define POSITIONS "max_position_embeddings"

// Returns how many tokens attention sees in those layers of a model that have sliding-window
// attention; transformers' rules say which have it. If config.json lacks the number, it is 4096, as
// in transformers. INFINITY: no layer has such attention.
static double window_of(const cJSON *json, int family) {
    const cJSON *layers = cJSON_GetObjectItemCaseSensitive(json, keys[LAYERS].key), *layer;
    const cJSON *window = cJSON_GetObjectItemCaseSensitive(json, keys[WINDOW].key);
    bool qwen = family == QWEN2 || family == QWEN3, slides = false;
    bool listed = cJSON_GetArraySize(layers) > 0 && family != MISTRAL;
    bool used = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, keys[USE_WINDOW].key));
    double layers_before = json_number(json, keys[MAX_WINDOW].key, 28);
    cJSON_ArrayForEach(layer, layers) {
        const char *name = cJSON_GetStringValue(layer);
        slides = slides || name == NULL || strcmp(name, "full_attention") != 0;
    }
    bool given = window == NULL ? family != LLAMA : !cJSON_IsNull(window);
    bool by_rule = given &&
                   (!qwen || (used && layers_before < json_number(json, "num_hidden_layers", 0)));
    bool has = family != GPT2 && (listed ? slides : by_rule);
    return has ? json_number(json, keys[WINDOW].key, 4096) : INFINITY;
}

char *hf_config(const Options *o, Dtype dtype, int begin_of_text, int end_of_text, int document_end,
                const char *start, size_t start_bytes) {
    bool gpt2 = o->arch == ARCH_GPT2;
    CLOSED(json_close) cJSON *was = start != NULL ? json_parse(start, start_bytes) : NULL;
    // a window that the run's sequences did not reach stays
    int theirs = family_named(was);
    double window = theirs < FAMILIES ? window_of(was, theirs) : INFINITY;
    bool windowed = isfinite(window) && o->seq_length <= window;
    int family = windowed ? theirs : family_of(o);
    char value[OPTION_TEXT];
    CLOSED(json_close) cJSON *json = cJSON_CreateObject();
    cJSON *scaling = NULL;
    cJSON_AddItemToArray(cJSON_AddArrayToObject(json, "architectures"),
                         cJSON_CreateString(families[family].class));
    cJSON_AddStringToObject(json, "model_type", families[family].type);
    if (!gpt2 && o->rope_scaling != ROPE_UNSCALED) {
        scaling = cJSON_CreateObject();
        option_text(o, option_row("rope-scaling"), value);
        cJSON_AddStringToObject(scaling, "rope_type", value);
    }
    for (int i = 0; i < NUMBERS; i++) {
        const char *key = gpt2 ? numbers[i].gpt2 : numbers[i].llama;
        double otherwise = gpt2 ? numbers[i].gpt2_default : numbers[i].llama_default;
        const OptionRow *row = option_row(numbers[i].option);
        option_text(o, row, value);
        bool none = otherwise == 0 && strcmp(value, "0") == 0;
        if (key == NULL || none || (int)numbers[i].from > o->rope_scaling) { continue; }
        // transformers refuses a whole number where a float belongs
        bool whole = strpbrk(value, ".e") == NULL;
        if (row->type == OPTION_DOUBLE && whole) { strcat(value, ".0"); }
        cJSON_AddRawToObject(numbers[i].from > ROPE_UNSCALED ? scaling : json, key, value);
    }
    if (scaling != NULL) { cJSON_AddItemToObject(json, "rope_scaling", scaling); }
    for (int i = 0; i < FEATURES; i++) {
        if ((features[i].of >> family & 1) == 0 || features[i].written == NULL) { continue; }
        cJSON_AddRawToObject(json, features[i].key, features[i].written);
    }
    for (int i = 0; gpt2 && i < 3; i++) { cJSON_AddNumberToObject(json, dropouts[i], 0); }
    // llama.cpp reads n_ctx
    if (gpt2) { cJSON_AddNumberToObject(json, "n_ctx", o->max_position_embeddings); }
    const int ids[] = {begin_of_text, end_of_text}, ends[] = {end_of_text, document_end};
    for (int i = 0; start == NULL && i < 2; i++) {
        bool several = i == 1 && end_of_text != document_end;
        cJSON_AddItemToObject(json, keys[TOKEN_IDS + i].key,
                              several      ? cJSON_CreateIntArray(ends, 2)
                              : ids[i] < 0 ? cJSON_CreateNull()
                                           : cJSON_CreateNumber(ids[i]));
    }
    for (int i = windowed ? LAYERS : TOKEN_IDS; i < KEYS; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(was, keys[i].key);
        if (item != NULL) { cJSON_AddItemToObject(json, keys[i].key, cJSON_Duplicate(item, true)); }
    }
    const cJSON *positions = cJSON_GetObjectItemCaseSensitive(was, POSITIONS);
    if (windowed && o->max_position_embeddings == window && positions != NULL) { // see read_window
        cJSON_ReplaceItemInObjectCaseSensitive(json, POSITIONS, cJSON_Duplicate(positions, true));
    }
    cJSON_AddBoolToObject(json, "tie_word_embeddings", !o->untie_embeddings_and_output_weights);
    const char *type = dtype == DTYPE_F32 ? "float32" : "bfloat16";
    cJSON_AddStringToObject(json, "dtype", type);
    // programs of before transformers 4.56 know only this name; without it some serve in FP16
    cJSON_AddStringToObject(json, "torch_dtype", type);
    if (dtype == DTYPE_F8_E4M3) { cJSON_AddRawToObject(json, "quantization_config", FP8_CONFIG); }
    return cJSON_Print(json);
}

// Adds to the list `ids` those tokens of `more`, a number or a list, that it lacks.
static void add_ids(cJSON *ids, const cJSON *more) {
    const cJSON *id, *each = cJSON_IsArray(more) ? more->child : more; // a number is one token
    for (; each != NULL; each = cJSON_IsArray(more) ? each->next : NULL) {
        bool has = !cJSON_IsNumber(each);
        cJSON_ArrayForEach(id, ids) {
            has = has || id->valuedouble == each->valuedouble;
        }
        if (!has) { cJSON_AddItemToArray(ids, cJSON_Duplicate(each, false)); }
    }
}

char *hf_add_ends(const char *own, size_t own_bytes, const char *config, size_t config_bytes,
                  const char *more, size_t more_bytes) {
    const char *key = keys[EOS_TOKEN_ID].key;
    CLOSED(json_close)
    cJSON *json = own != NULL ? json_parse(own, own_bytes) : cJSON_CreateObject();
    CLOSED(json_close) cJSON *start = config != NULL ? json_parse(config, config_bytes) : NULL;
    CLOSED(json_close) cJSON *added = json_parse(more, more_bytes);
    CLOSED(json_close) cJSON *ids = cJSON_CreateArray();
    const cJSON *held = cJSON_GetObjectItemCaseSensitive(json, key);
    add_ids(ids, held != NULL ? held : cJSON_GetObjectItemCaseSensitive(start, key));
    // without generation_config.json, transformers took these tokens from config.json
    for (int i = TOKEN_IDS; i < KEYS && own == NULL; i++) {
        const cJSON *from = start != NULL ? start : added;
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(from, keys[i].key);
        if (id == NULL || i == EOS_TOKEN_ID) { continue; }
        cJSON_AddItemToObject(json, keys[i].key, cJSON_Duplicate(id, true));
    }
    // how many tokens transformers knows already; it reads config.json only where there is no
    // generation_config.json
    int known = held != NULL || own == NULL ? cJSON_GetArraySize(ids) : 0;
    const cJSON *ends = cJSON_GetObjectItemCaseSensitive(added, key);
    add_ids(ids, ends);
    bool changes = cJSON_IsObject(json) && ends != NULL && cJSON_GetArraySize(ids) > known;
    if (!changes) { return NULL; }
    cJSON_DeleteItemFromObjectCaseSensitive(json, key);
    cJSON_AddItemToObject(json, key, cJSON_Duplicate(ids, true));
    return cJSON_Print(json);
}

static int types_of(const cJSON *value) {
    double number = value->valuedouble;
    if (cJSON_IsNull(value)) { return JSON_NONE; }
    if (cJSON_IsBool(value)) { return JSON_BOOL; }
    if (cJSON_IsString(value)) { return JSON_TEXT; }
    if (cJSON_IsObject(value)) { return JSON_OBJECT; }
    if (cJSON_IsArray(value)) {
        const cJSON *item;
        cJSON_ArrayForEach(item, value) {
            if ((types_of(item) & JSON_WHOLE) == 0) { return JSON_LIST; }
        }
        return JSON_LIST | JSON_WHOLE_LIST;
    }
    bool whole = fabs(number) <= INT32_MAX && number == floor(number);
    return !isfinite(number) ? 0 : whole ? JSON_REAL | JSON_WHOLE : JSON_REAL;
}

// Fails with a text that begins with a key and its value, as JSON in one line.
PRINTF_LIKE(2, 3) static bool fail_value(const cJSON *item, const char *format, ...) {
    char why[256];
    FREED char *value = cJSON_PrintUnformatted(item);
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof(why), format, args);
    va_end(args);
    bool infinite = cJSON_IsNumber(item) && !isfinite(item->valuedouble);
    return fail("%.60s %.80s %s", item->string, infinite ? "1e999" : value, why);
}

// Reads a key of the object. *item becomes the key's value, unless the value is null or *item is
// set already. So callers first read the key that transformers prefers. Warns if a value is not
// used and differs from *item. Refuses a value whose type is not in `types`, and a key that the
// object has twice.
static bool take(const cJSON *object, const char *key, int types, const cJSON **item) {
    const cJSON *at, *found = NULL;
    cJSON_ArrayForEach(at, object) {
        if (strcmp(at->string, key) != 0) { continue; }
        if (found != NULL) { return fail("%s is there twice", key); }
        found = at;
    }
    if (found == NULL) { return true; }
    if ((types_of(found) & types) == 0) {
        char names[200] = "";
        for (int i = 0, n = 0; 1 << i < JSON_ANY; i++) {
            if ((types >> i & 1) == 0) { continue; }
            n += snprintf(names + n, sizeof(names) - (size_t)n, "%s%s", n > 0 ? " or " : "",
                          type_names[i]);
        }
        return fail_value(found, "must be %s", names);
    }
    if (cJSON_IsNull(found)) { return true; }
    if (*item == NULL) {
        *item = found;
    } else if (!cJSON_Compare(*item, found, true)) {
        FREED char *used = cJSON_PrintUnformatted(*item), *unused = cJSON_PrintUnformatted(found);
        warn("config.json: %s %s is not used; %s %s is, as in transformers", key, unused,
             (*item)->string, used);
    }
    return true;
}

static bool read_number(const cJSON *json, const cJSON *rope, int i, Options *o) {
    bool gpt2 = o->arch == ARCH_GPT2, whole = option_row(numbers[i].option)->type != OPTION_DOUBLE;
    const char *key = gpt2 ? numbers[i].gpt2 : numbers[i].llama;
    double otherwise = gpt2 ? numbers[i].gpt2_default : numbers[i].llama_default;
    int types = (whole ? JSON_WHOLE : JSON_REAL) | (otherwise == 0 ? JSON_NONE : 0);
    int where = key != NULL ? numbers[i].where : 0;
    const cJSON *top = (where & TOP) != 0 ? json : NULL, *in = (where & ROPE) != 0 ? rope : NULL;
    const cJSON *both = gpt2 && (where & BOTH_NAMES) != 0 ? json : NULL, *item = NULL;
    bool top_first = numbers[i].from > ROPE_UNSCALED;
    if (!take(both, numbers[i].llama, types, &item) ||
        !take(top_first ? top : in, key, types, &item) ||
        !take(top_first ? in : top, key, types, &item)) {
        return false;
    }
    if (item == NULL && isnan(otherwise)) { return fail("%s is missing", key); }
    double value = item != NULL ? item->valuedouble : otherwise;
    if (item != NULL && (whole || otherwise == 0) && !(value > 0)) {
        return fail_value(item, "is not above 0");
    }
    return options_set(o, SOURCE_CHECKPOINT, "%s %.17g", numbers[i].option, value) ||
           (item != NULL && fail_value(item, "is not supported: %s", error_text()));
}

static bool read_rope(const cJSON *rope, int family, Options *o) {
    const cJSON *type = NULL, *item;
    if (!take(rope, "rope_type", JSON_TEXT, &type) || !take(rope, "type", JSON_TEXT, &type)) {
        return false;
    }
    const char *name = type != NULL ? type->valuestring : "default";
    const char *none = option_row("rope-scaling")->fallback;
    bool unscaled = strcmp(name, "default") == 0;
    if (strcmp(name, none) == 0 ||
        !option_set(o, "rope-scaling", unscaled ? none : name, SOURCE_CHECKPOINT)) {
        return fail_value(type, "is not supported; must be one of default, linear, llama3");
    }
    cJSON_ArrayForEach(item, rope) { // refuses keys that are not known
        bool known = strcmp(item->string, "rope_type") == 0 || strcmp(item->string, "type") == 0;
        for (int n = 0; n < NUMBERS; n++) {
            known |= (numbers[n].where & ROPE) != 0 && (int)numbers[n].from <= o->rope_scaling &&
                     strcmp(item->string, numbers[n].llama) == 0;
        }
        for (int n = 0; n < FEATURES; n++) { known |= strcmp(item->string, features[n].key) == 0; }
        if (!cJSON_IsNull(item) && (!known || family == GPT2)) {
            return fail_value(item,
                              "is not supported: the rotary embedding of this model (type "
                              "'%.40s') does not have it",
                              name);
        }
    }
    return true;
}

// Whether a value equals the value of a JSON text.
static bool is_value(const cJSON *item, const char *text) {
    CLOSED(json_close) cJSON *value = cJSON_Parse(text);
    return cJSON_Compare(item, value, true);
}

// Whether a quantization_config describes weights that read_fp8 can read. Its other keys do not
// matter.
static bool is_fp8(const cJSON *how) {
    const cJSON *size = cJSON_GetObjectItemCaseSensitive(how, "weight_block_size");
    return strcmp(json_text(how, "quant_method", ""), "fp8") == 0 && is_value(size, "[128,128]");
}

static bool has_features(const cJSON *json, const cJSON *rope, int family) {
    for (int i = 0; i < 2 * FEATURES; i++) {
        int f = i / 2;
        const char *other = features[f].other;
        const char *value = features[f].written != NULL ? features[f].written : other;
        int types = features[f].null ? JSON_ANY : JSON_ANY ^ JSON_NONE;
        const cJSON *item = NULL;
        if ((features[f].of >> family & 1) == 0) { continue; }
        if (!take(i % 2 == 0 ? json : rope, features[f].key, types, &item)) { return false; }
        bool fp8 = strcmp(features[f].key, "quantization_config") == 0 && is_fp8(item);
        if (item != NULL && !fp8 && !is_value(item, value) &&
            (other == NULL || !is_value(item, other))) {
            return fail_value(item, "is not supported; must be %s: what is missing is %s", value,
                              features[f].lacks);
        }
    }
    return true;
}

// Refuses a model with sliding-window attention if the run's sequences may be longer than the
// window; otherwise the model's positions end there. layers: the list of the layers' kinds of
// attention; NULL: there is no list. given: the run's --seq-length; 1: not given.
static bool read_window(const cJSON *json, const cJSON *layers, int family, int given, Options *o) {
    static const char lacks[] = "is not supported: what is missing is attention within a window";
    const cJSON *layer;
    cJSON_ArrayForEach(layer, layers) {
        const char *name = cJSON_GetStringValue(layer);
        int kind = name != NULL ? option_word("full_attention|sliding_attention", '|', name) : -1;
        if (kind < 0) { return fail_value(layers, "%s", lacks); }
    }
    double window = window_of(json, family);
    if (window < given) {
        return window < 1 ? fail("sliding_window %g %s", window, lacks)
                          : fail("sliding_window %g %s; with --seq-length %g or less it changes "
                                 "nothing",
                                 window, lacks, window);
    }
    if (window < o->max_position_embeddings) { o->max_position_embeddings = (int)window; }
    return true;
}

static bool fail_family(const cJSON *json, const char *type) {
    const char *lacks = "";
    const cJSON *item;
    cJSON_ArrayForEach(item, json) {
        if (strstr(item->string, "experts") != NULL) { lacks = EXPERTS; }
    }
    for (size_t i = 0; i < sizeof(other_families) / sizeof(other_families[0]); i++) {
        if (strcmp(type, other_families[i].type) == 0) { lacks = other_families[i].lacks; }
    }
    bool named = type[0] != '\0';
    return fail("%s%.40s%s%s%s; supported are gpt2, llama (Llama 1 to 3.3, SmolLM), mistral, "
                "qwen2 (Qwen2, Qwen2.5) and qwen3",
                named ? "architecture "
                      : "model_type is missing or no name: it says which architecture",
                type, named ? " is not supported" : "",
                lacks[0] != '\0' ? ": what is missing is " : "", lacks);
}

static bool read_config(const cJSON *json, int given, Options *o) {
    enum { LONGEST_SEQUENCE = 8192 }; // the largest default of --seq-length
    enum { QWEN3_HEAD = 128 };        // Qwen3's head size if head_dim is missing
    const cJSON *items[KEYS] = {NULL}, *type = NULL;
    if (!take(json, "model_type", JSON_ANY, &type)) { return false; }
    int family = family_named(json);
    if (family == FAMILIES) { return fail_family(json, json_text(json, "model_type", "")); }
    for (int i = 0; i < KEYS; i++) {
        if (!take(json, keys[i].key, keys[i].types, &items[i])) { return false; }
    }
    const cJSON *tied = items[TIE], *scaling = items[ROPE_SCALING];
    bool hides = scaling != NULL && scaling->child != NULL;
    const cJSON *rope = hides ? scaling : items[ROPE_PARAMETERS];
    if (hides && cJSON_GetArraySize(items[ROPE_PARAMETERS]) > 0 &&
        !cJSON_Compare(scaling, items[ROPE_PARAMETERS], true)) {
        warn("config.json: rope_parameters is not used; rope_scaling is, as in transformers");
    }
    Arch arch = families[family].arch;
    bool unties = tied != NULL ? cJSON_IsFalse(tied) : arch == ARCH_LLAMA;
    if (!options_set(o, SOURCE_CHECKPOINT,
                     "arch %s add-qkv-bias %d qk-layernorm %d "
                     "untie-embeddings-and-output-weights %d",
                     arch == ARCH_GPT2 ? "gpt2" : "llama", families[family].qkv_bias,
                     families[family].qk_norm, unties) ||
        !read_rope(rope, family, o)) {
        return false;
    }
    for (int i = 0; i < NUMBERS; i++) {
        if ((int)numbers[i].from <= o->rope_scaling && !read_number(json, rope, i, o)) {
            return false;
        }
    }
    if (o->num_query_groups == 0) { o->num_query_groups = o->num_attention_heads; }
    if (o->kv_channels == 0) {
        o->kv_channels = family == QWEN3 ? QWEN3_HEAD : o->hidden_size / o->num_attention_heads;
    }
    if (o->ffn_hidden_size == 0) { o->ffn_hidden_size = 4 * o->hidden_size; }
    return has_features(json, rope, family) && read_window(json, items[LAYERS], family, given, o) &&
           options_set(o, SOURCE_CHECKPOINT, "seq-length %d",
                       (int)min64(o->max_position_embeddings, LONGEST_SEQUENCE));
}

// Warns if a model was trained with dropout.
static void warn_of_dropout(const cJSON *json) {
    char found[200] = "";
    for (size_t i = 0; i < sizeof(dropouts) / sizeof(*dropouts); i++) {
        double p = json_number(json, dropouts[i], 0);
        size_t used = strlen(found);
        if (!(p > 0)) { continue; }
        snprintf(found + used, sizeof(found) - used, "%s%s %g", used > 0 ? ", " : "", dropouts[i],
                 p);
    }
    if (found[0] == '\0') { return; }
    warn("config.json: %s: not used: training here is without dropout", found);
}

bool hf_options(const char *text, size_t bytes, const Options *given, Options *options) {
    CLOSED(json_close) cJSON *json = json_parse(text, bytes);
    int length = option_source(given, "seq-length") >= SOURCE_FILE ? given->seq_length : 1;
    bool ok = json == NULL ? fail("not JSON in UTF-8; download it again")
              : cJSON_IsObject(json)
                  ? read_config(json, length, options)
                  : fail("not a model's configuration, which is an object; download it again");
    if (!ok || !options_train(given)) { return ok; }
    warn_of_dropout(json);
    double window = window_of(json, family_named(json));
    if (window == options->max_position_embeddings) {
        warn("config.json: sliding_window %g: attention has no window here, so --seq-length is at "
             "most %g",
             window, window);
    }
    return true;
}
