#include "hugging_face.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- tensors ------------------------------------------------------------------------------------

int hf_tensors(const ParamLayout *layout, Dtype dtype, const void *weights, TensorEntry **tensors) {
    const ModelConfig *c = &layout->config;
    bool gpt2 = c->arch == ARCH_GPT2;
    const char *body = gpt2 ? "transformer" : "model", *blocks = gpt2 ? "h" : "layers";
    int count = 0;
    *tensors = calloc_or_die((size_t)layout->count * HF_PARTS, sizeof(TensorEntry));
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        const TensorRow *row = tensor_row(p->id);
        int64_t first = p->offset;
        int part_rows[HF_PARTS] = {p->rows};
        int parts = gpt2 ? 1 : dim_parts(c, row->rows, part_rows);
        for (int part = 0; part < parts; part++) {
            const char *name = gpt2 ? row->gpt2_name : row->llama_names[part];
            int64_t rows = row->rows == DIM_VOCAB ? c->vocab : part_rows[part]; // without padding
            TensorEntry *t = &(*tensors)[count++];
            t->dtype = dtype;
            t->dims = row->cols == DIM_NONE ? 1 : 2;
            t->transposed = gpt2 && row->place == PLACE_BLOCK && t->dims == 2;
            t->shape[0] = t->transposed ? p->cols : rows;
            t->shape[1] = t->transposed ? rows : p->cols;
            t->begin = first;
            if (weights != NULL) { t->data = (const char *)weights + first * dtype_bytes(dtype); }
            first += rows * p->cols;
            if (p->id == TENSOR_HEAD_WEIGHT) {
                snprintf(t->name, TENSOR_NAME, "%s", name);
            } else if (row->place == PLACE_BLOCK) {
                snprintf(t->name, TENSOR_NAME, "%s.%s.%d.%s", body, blocks, p->layer, name);
            } else {
                snprintf(t->name, TENSOR_NAME, "%s.%s", body, name);
            }
        }
    }
    return count;
}

void hf_list(const ParamLayout *layout, FILE *out) {
    TensorEntry *tensors;
    int count = hf_tensors(layout, DTYPE_F32, NULL, &tensors);
    for (const TensorEntry *t = tensors; t < tensors + count; t++) {
        fprintf(out, "%s %lld", t->name, (long long)t->shape[0]);
        fprintf(out, t->dims > 1 ? " %lld\n" : "\n", (long long)t->shape[1]);
    }
    free(tensors);
}

// Finds a tensor in a file. One of the bare model, saved without the class that has the head, lacks
// the first word of the name.
static const TensorEntry *entry_of(const SafeTensors *st, const TensorEntry *t) {
    const TensorEntry *e = safetensors_find(st, t->name);
    const char *dot = strchr(t->name, '.');
    return e != NULL || dot == NULL ? e : safetensors_find(st, dot + 1);
}

// Reads elements begin..end of a tensor.
static bool read_tensor(const SafeTensors *st, const TensorEntry *t, int64_t begin, int64_t end,
                        float *out) {
    const TensorEntry *e = entry_of(st, t);
    if (e == NULL) { return fail("%s: tensor '%s' is missing", st->path, t->name); }
    int64_t rows = t->shape[0], cols = t->shape[1];
    bool same = e->dims == t->dims && e->shape[0] == rows && (t->dims == 1 || e->shape[1] == cols);
    if (!same || e->dtype > DTYPE_F16) {
        return fail("%s: tensor '%s' is %s [%lld, %lld], not a floating-point [%lld, %lld]",
                    st->path, t->name, dtype_name(e->dtype), (long long)e->shape[0],
                    (long long)(e->dims > 1 ? e->shape[1] : 1), (long long)rows, (long long)cols);
    }
    if (!t->transposed) { return safetensors_read_floats(st, e, begin, end - begin, out); }
    float *row = malloc_or_die((size_t)cols * sizeof(float));
    bool ok = true;
    for (int64_t r = 0; ok && r < rows; r++) {
        ok = safetensors_read_floats(st, e, r * cols, cols, row);
        for (int64_t c = 0; ok && c < cols; c++) {
            int64_t at = c * rows + r;
            if (at >= begin && at < end) { out[at - begin] = row[c]; }
        }
    }
    free(row);
    return ok;
}

// Of a model with tied embeddings: whether the file has no head, or one that equals the embedding,
// which has so many elements, in its elements begin..end.
static bool head_is(const SafeTensors *st, const float *embedding, int64_t begin, int64_t end,
                    int64_t size) {
    enum { PIECE = 4096 };
    const TensorEntry *e = safetensors_find(st, "lm_head.weight");
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

bool hf_read(const SafeTensors *st, const ParamLayout *layout, int64_t begin, int64_t end,
             float *out) {
    TensorEntry *tensors;
    int num_tensors = hf_tensors(layout, DTYPE_F32, NULL, &tensors);
    bool ok = true;
    memset(out, 0, (size_t)(end - begin) * sizeof(float));
    for (const TensorEntry *t = tensors; ok && t < tensors + num_tensors; t++) {
        int64_t size = t->shape[0] * (t->dims > 1 ? t->shape[1] : 1);
        int64_t from = max64(begin, t->begin), to = min64(end, t->begin + size);
        if (from >= to) { continue; }
        float *values = out + from - begin;
        bool is_head = layout->config.tied_head && t == tensors; // the embedding is the first
        from -= t->begin;
        to -= t->begin;
        ok = read_tensor(st, t, from, to, values) &&
             (!is_head || head_is(st, values, from, to, size));
    }
    free(tensors);
    return ok;
}

bool hf_knows_all(const SafeTensors *st, const ParamLayout *layout) {
    static const char *const ignored[] = {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"};
    TensorEntry *tensors;
    int count = hf_tensors(layout, DTYPE_F32, NULL, &tensors);
    bool *known = calloc_or_die((size_t)st->count + 1, sizeof(bool)), ok = true;
    for (const TensorEntry *t = tensors; t < tensors + count; t++) {
        const TensorEntry *e = entry_of(st, t);
        if (e != NULL) { known[e - st->entries] = true; }
    }
    for (int n = 0; ok && n < st->count; n++) {
        const char *name = st->entries[n].name;
        known[n] |= strcmp(name, "lm_head.weight") == 0;
        for (size_t i = 0; i < sizeof(ignored) / sizeof(*ignored); i++) { // masks and tables
            size_t length = strlen(name), end = strlen(ignored[i]);
            known[n] |= length >= end && strcmp(name + length - end, ignored[i]) == 0;
        }
        ok = known[n] ||
             fail("%s: tensor '%s' is none of the model that config.json means", st->path, name);
    }
    free(known);
    free(tensors);
    return ok;
}

// ---- config.json --------------------------------------------------------------------------------

// Families of models by their names in transformers, and how they differ here. A model is written
// as the first family that it fits; a family without a class is only read.
enum { GPT2, LLAMA, QWEN2, QWEN3, MISTRAL, FAMILIES };
static const struct {
    const char *type, *class;
    Arch arch;
    bool qkv_bias, qk_norm;
} families[FAMILIES] = {
    [GPT2] = {"gpt2", "GPT2LMHeadModel", ARCH_GPT2, true, false},
    [LLAMA] = {"llama", "LlamaForCausalLM", ARCH_LLAMA, false, false},
    [QWEN2] = {"qwen2", "Qwen2ForCausalLM", ARCH_LLAMA, true, false},
    [QWEN3] = {"qwen3", "Qwen3ForCausalLM", ARCH_LLAMA, false, true},
    [MISTRAL] = {"mistral", NULL, ARCH_LLAMA, false, false},
};

static int family_of(const Options *o) {
    bool bias = o->arch == ARCH_GPT2 || o->add_qkv_bias;
    int i = 0;
    while (families[i].arch != (Arch)o->arch || families[i].qkv_bias != bias ||
           families[i].qk_norm != o->qk_layernorm) {
        i++;
        assert(i < FAMILIES);
    }
    return i;
}

// What the trainers lack for other families.
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

// The numbers of config.json: the option of each, its names, and the value that transformers uses
// if the name is missing (NAN: it must be there; 0: it is derived from others, or there is none).
// Those of a scaled rotary embedding are in an object inside it, where rope_theta may be too.
static const struct {
    RopeScaling from;                  // the first kind of scaling that has it
    const char *option, *gpt2, *llama; // NULL: not written, and the default is read
    double gpt2_default, llama_default;
} numbers[] = {
    {0, "num-layers", "n_layer", "num_hidden_layers", NAN, NAN},
    {0, "hidden-size", "n_embd", "hidden_size", NAN, NAN},
    {0, "num-attention-heads", "n_head", "num_attention_heads", NAN, NAN},
    {0, "num-query-groups", NULL, "num_key_value_heads", 0, 0},
    {0, "kv-channels", NULL, "head_dim", 0, 0},
    {0, "ffn-hidden-size", "n_inner", "intermediate_size", 0, NAN},
    {0, "max-position-embeddings", "n_positions", "max_position_embeddings", 1024, 2048},
    {0, "vocab-size", "vocab_size", "vocab_size", NAN, NAN},
    {0, "norm-epsilon", "layer_norm_epsilon", "rms_norm_eps", 1e-5, 1e-6},
    {0, "init-method-std", "initializer_range", "initializer_range", 0.02, 0.02},
    // Gemma 2's name for it: transformers' other classes leave the cap out
    {0, "logit-softcap", "final_logit_softcapping", "final_logit_softcapping", 0, 0},
    {0, "rope-theta", NULL, "rope_theta", 1e4, 1e4},
    {ROPE_LINEAR, "rope-scaling-factor", NULL, "factor", NAN, NAN},
    {ROPE_LLAMA3, "rope-low-freq-factor", NULL, "low_freq_factor", NAN, NAN},
    {ROPE_LLAMA3, "rope-high-freq-factor", NULL, "high_freq_factor", NAN, NAN},
    {ROPE_LLAMA3, "rope-original-length", NULL, "original_max_position_embeddings", NAN, NAN},
};
enum { NUMBERS = sizeof(numbers) / sizeof(numbers[0]) };

// Other keys of config.json for the families in `of`. As JSON: the value that is written (NULL:
// none), and another value that means the same. Any other value is refused, with what is missing.
static const struct {
    unsigned of;
    const char *key, *written, *other, *lacks;
} features[] = {
    {1 << GPT2, "activation_function", "\"gelu_new\"", "\"gelu_pytorch_tanh\"", "that activation"},
    {1 << GPT2, "scale_attn_weights", NULL, "true", "unscaled attention"},
    {1 << GPT2, "scale_attn_by_inverse_layer_idx", NULL, "false", "scales of attention by layer"},
    {1 << GPT2, "add_cross_attention", NULL, "false", "cross-attention"},
    {~(1u << GPT2), "hidden_act", "\"silu\"", "\"swish\"", "that activation"},
    {1 << LLAMA | 1 << QWEN3, "attention_bias", "false", NULL, "a bias of attention's output"},
    {1 << LLAMA, "mlp_bias", "false", NULL, "biases in the feed-forward layers"},
    {~(1u << GPT2), "partial_rotary_factor", NULL, "1", "a rotary embedding of part of a head"},
};
enum { FEATURES = sizeof(features) / sizeof(features[0]) };

char *hf_config(const Options *o, Dtype dtype, int begin_of_text, int end_of_text) {
    bool gpt2 = o->arch == ARCH_GPT2;
    int family = family_of(o);
    char value[OPTION_TEXT];
    cJSON *json = cJSON_CreateObject(), *scaling = NULL;
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
        bool whole = strpbrk(value, ".e") == NULL; // transformers refuses it for a float
        if (row->type == OPTION_DOUBLE && whole) { strcat(value, ".0"); }
        cJSON_AddRawToObject(numbers[i].from > ROPE_UNSCALED ? scaling : json, key, value);
    }
    if (scaling != NULL) { cJSON_AddItemToObject(json, "rope_scaling", scaling); }
    for (int i = 0; i < FEATURES; i++) {
        if ((features[i].of >> family & 1) == 0 || features[i].written == NULL) { continue; }
        cJSON_AddRawToObject(json, features[i].key, features[i].written);
    }
    static const char *const dropouts[] = {"resid_pdrop", "embd_pdrop", "attn_pdrop"};
    for (int i = 0; gpt2 && i < 3; i++) { cJSON_AddNumberToObject(json, dropouts[i], 0); }
    // without a tokenizer, the end of text is known for GPT-2's vocabulary and for bytes
    int known = o->vocab_size == 50257 ? 50256 : (o->vocab_size == 257 ? 256 : -1);
    const int ids[] = {begin_of_text, end_of_text};
    static const char *const ends[] = {"bos_token_id", "eos_token_id"};
    for (int i = 0; i < 2; i++) {
        int id = ids[i] >= 0 ? ids[i] : known;
        cJSON_AddItemToObject(json, ends[i], id < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(id));
    }
    cJSON_AddBoolToObject(json, "tie_word_embeddings", !o->untie_embeddings_and_output_weights);
    cJSON_AddStringToObject(json, "dtype", dtype == DTYPE_F32 ? "float32" : "bfloat16");
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    return text;
}

// Whether config.json lacks the key, or has the value of this JSON text.
static bool has_feature(const cJSON *json, const char *key, const char *text) {
    const cJSON *said = cJSON_GetObjectItemCaseSensitive(json, key);
    cJSON *value = cJSON_Parse(text);
    bool same = said == NULL || cJSON_IsNull(said) || cJSON_Compare(said, value, true);
    cJSON_Delete(value);
    return same;
}

static bool read_numbers(const cJSON *json, const cJSON *scaling, Options *o) {
    bool gpt2 = o->arch == ARCH_GPT2;
    for (int i = 0; i < NUMBERS; i++) {
        const char *key = gpt2 ? numbers[i].gpt2 : numbers[i].llama;
        double otherwise = gpt2 ? numbers[i].gpt2_default : numbers[i].llama_default;
        double value = otherwise;
        if ((int)numbers[i].from > o->rope_scaling) { continue; }
        if (key != NULL) { value = json_number(scaling, key, json_number(json, key, otherwise)); }
        if (isnan(otherwise) && !(value > 0)) {
            return fail("%s is missing or no number above 0", key);
        }
        if (!options_set(o, SOURCE_CHECKPOINT, "%s %.17g", numbers[i].option, value)) {
            return false;
        }
    }
    return true;
}

// Whether the attention of any layer has a sliding window, by the rules of transformers.
static bool has_windows(const cJSON *json, int family) {
    const cJSON *kinds = cJSON_GetObjectItemCaseSensitive(json, "layer_types"), *kind;
    const cJSON *window = cJSON_GetObjectItemCaseSensitive(json, "sliding_window");
    bool qwen = family == QWEN2 || family == QWEN3;
    if (family == GPT2) { return false; }
    if (cJSON_GetArraySize(kinds) > 0) {
        cJSON_ArrayForEach(kind, kinds) {
            const char *name = cJSON_GetStringValue(kind);
            if (name == NULL || strcmp(name, "full_attention") != 0) { return true; }
        }
        return false;
    }
    if (window == NULL ? family == LLAMA : cJSON_IsNull(window)) { return false; }
    return !qwen ||
           (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "use_sliding_window")) &&
            json_number(json, "max_window_layers", 28) < json_number(json, "num_hidden_layers", 0));
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
    return fail("%s%.40s%s%s%s; supported are gpt2, llama (Llama 1 to 3.3, SmolLM), mistral "
                "(without a sliding window), qwen2 (Qwen2, Qwen2.5) and qwen3",
                named ? "architecture "
                      : "model_type is missing or no name: it says which architecture",
                type, named ? " is not supported" : "",
                lacks[0] != '\0' ? ": what is missing is " : "", lacks);
}

static bool read_config(const cJSON *json, Options *o) {
    enum { LONGEST_SEQUENCE = 8192 }; // unless --seq-length says more
    enum { QWEN3_HEAD = 128 };        // where head_dim is missing
    const char *type = json_text(json, "model_type", "");
    int family = 0;
    while (family < FAMILIES && strcmp(type, families[family].type) != 0) { family++; }
    if (family == FAMILIES) { return fail_family(json, type); }
    Arch arch = families[family].arch;
    bool bias = arch == ARCH_LLAMA && families[family].qkv_bias;
    const cJSON *scaling = cJSON_GetObjectItemCaseSensitive(json, "rope_scaling");
    if (!cJSON_IsObject(scaling)) {
        scaling = cJSON_GetObjectItemCaseSensitive(json, "rope_parameters");
    }
    const char *rope = json_text(scaling, "rope_type", json_text(scaling, "type", "default"));
    bool none = strcmp(rope, "default") == 0;
    if (!option_set(o, "rope-scaling", none ? "none" : rope, SOURCE_CHECKPOINT)) {
        return fail("rotary scaling '%.40s' is not supported; must be one of default, linear, "
                    "llama3",
                    rope);
    }
    const cJSON *tied = cJSON_GetObjectItemCaseSensitive(json, "tie_word_embeddings");
    bool unties = cJSON_IsBool(tied) ? cJSON_IsFalse(tied) : arch == ARCH_LLAMA;
    if (!options_set(o, SOURCE_CHECKPOINT,
                     "arch %s add-qkv-bias %d qk-layernorm %d "
                     "untie-embeddings-and-output-weights %d",
                     arch == ARCH_GPT2 ? "gpt2" : "llama", bias, families[family].qk_norm,
                     unties) ||
        !read_numbers(json, scaling, o)) {
        return false;
    }
    if (o->num_query_groups == 0) { o->num_query_groups = o->num_attention_heads; }
    if (o->kv_channels == 0) {
        o->kv_channels = family == QWEN3 ? QWEN3_HEAD : o->hidden_size / o->num_attention_heads;
    }
    if (o->ffn_hidden_size == 0) { o->ffn_hidden_size = 4 * o->hidden_size; }
    for (int i = 0; i < FEATURES; i++) {
        const char *key = features[i].key, *other = features[i].other;
        const char *value = features[i].written != NULL ? features[i].written : other;
        if ((features[i].of >> family & 1) == 0 || has_feature(json, key, value) ||
            (other != NULL && has_feature(json, key, other))) {
            continue;
        }
        char *said = cJSON_PrintUnformatted(cJSON_GetObjectItemCaseSensitive(json, key));
        fail("%s %.80s is not supported; must be %s: what is missing is %s", key, said, value,
             features[i].lacks);
        cJSON_free(said);
        return false;
    }
    if (has_windows(json, family)) {
        return fail(
            "sliding_window %g is not supported: what is missing is attention within a window",
            json_number(json, "sliding_window", 4096));
    }
    return options_set(o, SOURCE_CHECKPOINT, "seq-length %d",
                       (int)min64(o->max_position_embeddings, LONGEST_SEQUENCE));
}

bool hf_options(const char *text, size_t bytes, Options *options) {
    cJSON *json = cJSON_ParseWithLength(text, bytes);
    bool ok = cJSON_IsObject(json) ? read_config(json, options) : fail("not JSON; it is damaged");
    cJSON_Delete(json);
    return ok;
}
