#include "hugging_face.h"

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
        for (int part = 0; part < (gpt2 ? 1 : HF_PARTS); part++) {
            const char *name = gpt2 ? row->gpt2_name : row->llama_parts[part].name;
            Dim dim = gpt2 ? row->rows : row->llama_parts[part].rows;
            if (name == NULL) { break; }
            int64_t rows = dim == DIM_VOCAB ? c->vocab : dim_size(c, dim); // without the padding
            TensorEntry *t = &(*tensors)[count++];
            t->dtype = dtype;
            t->dims = row->cols == DIM_NONE ? 1 : 2;
            t->transposed = gpt2 && row->gpt2_transposed;
            t->shape[0] = t->transposed ? p->cols : rows;
            t->shape[1] = t->transposed ? rows : p->cols;
            t->begin = first;
            if (weights != NULL) { t->data = (const char *)weights + first * dtype_bytes(dtype); }
            first += rows * p->cols;
            if (row->id == TENSOR_HEAD_WEIGHT) {
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

static bool read_tensor(const SafeTensors *st, const TensorEntry *t, float *out, Error *err) {
    const TensorEntry *e = safetensors_find(st, t->name);
    // files of the bare model, without the head's class around it, leave out the first word
    const char *dot = strchr(t->name, '.');
    if (e == NULL && dot != NULL) { e = safetensors_find(st, dot + 1); }
    if (e == NULL) { return fail(err, "%s: tensor '%s' is missing", st->path, t->name); }
    int64_t rows = t->shape[0], cols = t->shape[1];
    bool same = e->dims == t->dims && e->shape[0] == rows && (t->dims == 1 || e->shape[1] == cols);
    if (!same || e->dtype > DTYPE_F16) {
        return fail(err, "%s: tensor '%s' is %s [%lld, %lld], not a floating-point [%lld, %lld]",
                    st->path, t->name, dtype_name(e->dtype), (long long)e->shape[0],
                    (long long)(e->dims > 1 ? e->shape[1] : 1), (long long)rows, (long long)cols);
    }
    if (!t->transposed) {
        safetensors_read_floats(e, 0, rows * cols, out);
        return true;
    }
    float *row = malloc_or_die((size_t)cols * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        safetensors_read_floats(e, r * cols, cols, row);
        for (int64_t c = 0; c < cols; c++) { out[c * rows + r] = row[c]; }
    }
    free(row);
    return true;
}

// A tensor at a time, of which the ranges take what is theirs.
bool hf_read(const SafeTensors *st, const ParamLayout *layout, const Bucket *ranges, int count,
             float *out, Error *err) {
    TensorEntry *tensors;
    int num_tensors = hf_tensors(layout, DTYPE_F32, NULL, &tensors);
    int64_t elements = 0;
    bool ok = true;
    for (int i = 0; i < count; i++) { elements += ranges[i].end - ranges[i].begin; }
    memset(out, 0, (size_t)elements * sizeof(float));
    for (const TensorEntry *t = tensors; ok && t < tensors + num_tensors; t++) {
        int64_t size = t->shape[0] * (t->dims > 1 ? t->shape[1] : 1);
        float *values = malloc_or_die((size_t)size * sizeof(float)), *to = out;
        ok = read_tensor(st, t, values, err);
        for (const Bucket *r = ranges; ok && r < ranges + count; to += r->end - r->begin, r++) {
            int64_t begin = max64(r->begin, t->begin), end = min64(r->end, t->begin + size);
            if (begin >= end) { continue; }
            memcpy(to + begin - r->begin, values + begin - t->begin,
                   (size_t)(end - begin) * sizeof(float));
        }
        free(values);
    }
    free(tensors);
    return ok;
}

// ---- config.json --------------------------------------------------------------------------------

static void add_gpt2_config(cJSON *json, const ModelConfig *c) {
    cJSON_AddStringToObject(json, "model_type", "gpt2");
    cJSON_AddNumberToObject(json, "n_layer", c->num_layers);
    cJSON_AddNumberToObject(json, "n_head", c->num_heads);
    cJSON_AddNumberToObject(json, "n_embd", c->channels);
    cJSON_AddNumberToObject(json, "n_inner", c->ffn);
    cJSON_AddNumberToObject(json, "n_positions", c->max_position);
    cJSON_AddNumberToObject(json, "layer_norm_epsilon", c->norm_eps);
    cJSON_AddStringToObject(json, "activation_function", "gelu_new");
    cJSON_AddNumberToObject(json, "resid_pdrop", 0);
    cJSON_AddNumberToObject(json, "embd_pdrop", 0);
    cJSON_AddNumberToObject(json, "attn_pdrop", 0);
}

static const char *const rope_types[] = {
    [ROPE_UNSCALED] = "default", [ROPE_LINEAR] = "linear", [ROPE_LLAMA3] = "llama3"};

static void add_llama_config(cJSON *json, const ModelConfig *c) {
    const Rope *rope = &c->rope;
    cJSON_AddStringToObject(json, "model_type", "llama");
    cJSON_AddNumberToObject(json, "num_hidden_layers", c->num_layers);
    cJSON_AddNumberToObject(json, "num_attention_heads", c->num_heads);
    cJSON_AddNumberToObject(json, "num_key_value_heads", c->num_groups);
    cJSON_AddNumberToObject(json, "head_dim", c->head_size);
    cJSON_AddNumberToObject(json, "hidden_size", c->channels);
    cJSON_AddNumberToObject(json, "intermediate_size", c->ffn);
    cJSON_AddNumberToObject(json, "max_position_embeddings", c->max_position);
    cJSON_AddNumberToObject(json, "rms_norm_eps", c->norm_eps);
    cJSON_AddNumberToObject(json, "rope_theta", rope->theta);
    if (rope->scaling != ROPE_UNSCALED) {
        cJSON *scaling = cJSON_AddObjectToObject(json, "rope_scaling");
        cJSON_AddStringToObject(scaling, "rope_type", rope_types[rope->scaling]);
        cJSON_AddNumberToObject(scaling, "factor", rope->factor);
        if (rope->scaling == ROPE_LLAMA3) {
            cJSON_AddNumberToObject(scaling, "low_freq_factor", rope->low_factor);
            cJSON_AddNumberToObject(scaling, "high_freq_factor", rope->high_factor);
            cJSON_AddNumberToObject(scaling, "original_max_position_embeddings",
                                    rope->original_length);
        }
    }
    cJSON_AddStringToObject(json, "hidden_act", "silu");
    cJSON_AddBoolToObject(json, "attention_bias", false);
    cJSON_AddBoolToObject(json, "mlp_bias", false);
}

static cJSON *config_json(const ModelConfig *c, Dtype dtype, int end_of_text) {
    bool gpt2 = c->arch == ARCH_GPT2;
    cJSON *json = cJSON_CreateObject();
    cJSON_AddItemToArray(cJSON_AddArrayToObject(json, "architectures"),
                         cJSON_CreateString(gpt2 ? "GPT2LMHeadModel" : "LlamaForCausalLM"));
    (gpt2 ? add_gpt2_config : add_llama_config)(json, c);
    cJSON_AddNumberToObject(json, "vocab_size", c->vocab);
    // without a tokenizer, the end of text is known for GPT-2's vocabulary and for bytes
    int known = c->vocab == 50257 ? 50256 : (c->vocab == 257 ? 256 : -1);
    int end = end_of_text >= 0 ? end_of_text : known;
    static const char *const ends[] = {"bos_token_id", "eos_token_id"};
    for (int i = 0; i < 2; i++) {
        cJSON_AddItemToObject(json, ends[i],
                              end < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(end));
    }
    cJSON_AddBoolToObject(json, "tie_word_embeddings", c->tied_head);
    cJSON_AddNumberToObject(json, "initializer_range", c->init_std);
    cJSON_AddStringToObject(json, "dtype", dtype == DTYPE_F32 ? "float32" : "bfloat16");
    return json;
}

char *hf_config(const ModelConfig *c, Dtype dtype, int end_of_text) {
    cJSON *json = config_json(c, dtype, end_of_text);
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    return text;
}

// ---- --load -------------------------------------------------------------------------------------

static bool same_number(double a, double b) {
    return fabs(a - b) <= 1e-6 * fabs(b);
}

static double number_or(const cJSON *json, const char *key, double otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    return cJSON_IsNumber(item) ? item->valuedouble : otherwise;
}

// Whether a config.json, as any version of transformers writes it, has this rotary embedding.
static bool same_rope(const cJSON *config, const Rope *rope) {
    const cJSON *scaling = cJSON_GetObjectItemCaseSensitive(config, "rope_parameters");
    if (!cJSON_IsObject(scaling)) {
        scaling = cJSON_GetObjectItemCaseSensitive(config, "rope_scaling");
    }
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(scaling, "rope_type");
    if (!cJSON_IsString(type)) { type = cJSON_GetObjectItemCaseSensitive(scaling, "type"); }
    const char *name = cJSON_IsString(type) ? type->valuestring : "default";
    double theta = number_or(config, "rope_theta", number_or(scaling, "rope_theta", 10000));
    const struct {
        const char *key;
        double ours;
        RopeScaling from; // the first kind that has it
    } numbers[] = {
        {"factor", rope->factor, ROPE_LINEAR},
        {"low_freq_factor", rope->low_factor, ROPE_LLAMA3},
        {"high_freq_factor", rope->high_factor, ROPE_LLAMA3},
        {"original_max_position_embeddings", rope->original_length, ROPE_LLAMA3},
    };
    bool same = strcmp(name, rope_types[rope->scaling]) == 0 && same_number(theta, rope->theta);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        same = same && (rope->scaling < numbers[i].from ||
                        same_number(number_or(scaling, numbers[i].key, NAN), numbers[i].ours));
    }
    return same;
}

// Whether a key of config.json may differ: it does not change what the model computes here.
static bool may_differ(const char *key, Arch arch) {
    static const char *const keys[] = {
        "architectures", "dtype",      "bos_token_id", "eos_token_id",
        "resid_pdrop",   "embd_pdrop", "attn_pdrop",   "initializer_range"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (strcmp(key, keys[i]) == 0) { return true; }
    }
    return strncmp(key, "rope_", 5) == 0 || // same_rope compares these
           (arch == ARCH_LLAMA && strcmp(key, "max_position_embeddings") == 0);
}

static bool check_config(const char *folder, const cJSON *theirs, const ModelConfig *c,
                         Error *err) {
    static const char hint[] =
        "scripts/convert_hf import writes the options that fit (options.txt)";
    cJSON *ours = config_json(c, DTYPE_F32, -1);
    const cJSON *item;
    bool ok = true;
    cJSON_ArrayForEach(item, ours) {
        const cJSON *other = cJSON_GetObjectItemCaseSensitive(theirs, item->string);
        bool said = other != NULL && !cJSON_IsNull(other);
        if (!ok || !said || may_differ(item->string, c->arch)) { continue; }
        ok = cJSON_IsNumber(other) && cJSON_IsNumber(item)
                 ? same_number(other->valuedouble, item->valuedouble)
                 : cJSON_Compare(other, item, true);
        if (!ok) {
            char *was = cJSON_PrintUnformatted(other), *now = cJSON_PrintUnformatted(item);
            fail(err, "%s: another model's: its config.json has \"%s\": %.80s, this run %.80s; %s",
                 folder, item->string, was, now, hint);
            cJSON_free(was);
            cJSON_free(now);
        }
    }
    cJSON_Delete(ours);
    if (ok && c->arch == ARCH_LLAMA && !same_rope(theirs, &c->rope)) {
        return fail(err,
                    "%s: another model's: its config.json has another rotary embedding than the "
                    "--rope options say; %s",
                    folder, hint);
    }
    return ok;
}

bool hf_load(const char *folder, const ParamLayout *layout, const Bucket *ranges, int count,
             float *out, Error *err) {
    char path[PATH_LENGTH], index[PATH_LENGTH];
    MappedFile file;
    SafeTensors st;
    if (!path_exists(folder)) { return fail(err, "%s: no such folder", folder); }
    path_format(path, "%s/config.json", folder);
    if (!file_map(&file, path, err)) { return false; }
    cJSON *config = cJSON_ParseWithLength((const char *)file.data, file.bytes);
    file_unmap(&file);
    bool ok = cJSON_IsObject(config) ? check_config(folder, config, &layout->config, err)
                                     : fail(err, "%s: not JSON; it is damaged", path);
    cJSON_Delete(config);
    if (!ok) { return false; }
    path_format(path, "%s/model.safetensors", folder);
    path_format(index, "%s/model.safetensors.index.json", folder);
    if (!path_exists(path) && path_exists(index)) {
        return fail(err,
                    "%s: its weights are in several files; scripts/convert_hf import makes "
                    "them one",
                    folder);
    }
    if (!safetensors_open(&st, path, err)) { return false; }
    ok = hf_read(&st, layout, ranges, count, out, err);
    safetensors_close(&st);
    return ok;
}
