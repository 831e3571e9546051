#include "hugging_face.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STRIP = 64 }; // columns transposed at a time

static void name_part(HfPart *part, const ModelConfig *c, const TensorRow *row, int layer,
                      const char *name) {
    const char *body = c->arch == ARCH_GPT2 ? "transformer" : "model";
    const char *blocks = c->arch == ARCH_GPT2 ? "h" : "layers";
    if (row->id == TENSOR_HEAD_WEIGHT) {
        snprintf(part->name, TENSOR_NAME, "%s", name);
    } else if (row->place == PLACE_BLOCK) {
        snprintf(part->name, TENSOR_NAME, "%s.%s.%d.%s", body, blocks, layer, name);
    } else {
        snprintf(part->name, TENSOR_NAME, "%s.%s", body, name);
    }
}

int hf_parts(const ParamLayout *layout, const Param *p, HfPart parts[HF_PARTS]) {
    const ModelConfig *c = &layout->config;
    const TensorRow *row = tensor_row(p->id);
    int rows = row->rows == DIM_VOCAB ? c->vocab : p->rows; // without the padding
    if (c->arch == ARCH_GPT2) {
        parts[0] = (HfPart){.rows = rows, .cols = p->cols, .transposed = row->gpt2_transposed};
        name_part(&parts[0], c, row, p->layer, row->gpt2_name);
        return 1;
    }
    int count = 0, first = 0;
    for (; count < HF_PARTS && row->llama_parts[count].name != NULL; count++) {
        Dim dim = row->llama_parts[count].rows;
        int part_rows = dim == DIM_VOCAB ? c->vocab : dim_size(c, dim);
        parts[count] = (HfPart){.first_row = first, .rows = part_rows, .cols = p->cols};
        name_part(&parts[count], c, row, p->layer, row->llama_parts[count].name);
        first += part_rows;
    }
    return count;
}

static int part_shape(const HfPart *part, bool vector, int64_t shape[2]) {
    shape[0] = part->transposed ? part->cols : part->rows;
    shape[1] = part->transposed ? part->rows : part->cols;
    return vector ? 1 : 2;
}

static bool is_vector(const Param *p) {
    return tensor_row(p->id)->cols == DIM_NONE;
}

void hf_declare(SafeTensorsWriter *w, const ParamLayout *layout, Dtype dtype) {
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        HfPart parts[HF_PARTS];
        int count = hf_parts(layout, p, parts);
        for (int j = 0; j < count; j++) {
            int64_t shape[2];
            int dims = part_shape(&parts[j], is_vector(p), shape);
            safetensors_declare(w, parts[j].name, dtype, dims, shape);
        }
    }
}

void hf_list(const ParamLayout *layout, FILE *out) {
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        HfPart parts[HF_PARTS];
        int count = hf_parts(layout, p, parts);
        for (int j = 0; j < count; j++) {
            int64_t shape[2];
            int dims = part_shape(&parts[j], is_vector(p), shape);
            fprintf(out, "%s %lld", parts[j].name, (long long)shape[0]);
            fprintf(out, dims > 1 ? " %lld\n" : "\n", (long long)shape[1]);
        }
    }
}

// Writes [rows,cols] as [cols,rows], a strip of columns at a time.
static void write_transposed(FileWriter *file, const char *from, int rows, int cols, size_t size) {
    char *strip = malloc_or_die((size_t)STRIP * (size_t)rows * size);
    for (int begin = 0; begin < cols; begin += STRIP) {
        int n = cols - begin < STRIP ? cols - begin : STRIP;
        for (int r = 0; r < rows; r++) {
            const char *row = from + ((size_t)r * (size_t)cols + (size_t)begin) * size;
            for (int c = 0; c < n; c++) {
                memcpy(strip + ((size_t)c * (size_t)rows + (size_t)r) * size,
                       row + (size_t)c * size, size);
            }
        }
        writer_write(file, strip, (size_t)n * (size_t)rows * size);
    }
    free(strip);
}

void hf_write(SafeTensorsWriter *w, const ParamLayout *layout, Dtype dtype, const void *weights) {
    size_t size = (size_t)dtype_bytes(dtype);
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        HfPart parts[HF_PARTS];
        int count = hf_parts(layout, p, parts);
        for (int j = 0; j < count; j++) {
            const HfPart *part = &parts[j];
            size_t skip = (size_t)p->offset + (size_t)part->first_row * (size_t)part->cols;
            const char *from = (const char *)weights + skip * size;
            if (part->transposed) {
                write_transposed(&w->file, from, part->rows, part->cols, size);
            } else {
                writer_write(&w->file, from, (size_t)part->rows * (size_t)part->cols * size);
            }
        }
    }
}

static bool read_part(const SafeTensors *st, const HfPart *part, bool vector, float *out,
                      Error *err) {
    int64_t shape[2];
    int dims = part_shape(part, vector, shape);
    const TensorEntry *e = safetensors_find(st, part->name);
    // files of the bare model, without the head's class around it, leave out the first word
    const char *dot = strchr(part->name, '.');
    if (e == NULL && dot != NULL) { e = safetensors_find(st, dot + 1); }
    if (e == NULL) { return fail(err, "%s: tensor '%s' is missing", st->path, part->name); }
    bool same = e->dims == dims && e->shape[0] == shape[0] && (vector || e->shape[1] == shape[1]);
    if (!same || e->dtype > DTYPE_F16) {
        return fail(err, "%s: tensor '%s' is %s [%lld, %lld], not a floating-point [%lld, %lld]",
                    st->path, part->name, dtype_name(e->dtype), (long long)e->shape[0],
                    (long long)(e->dims > 1 ? e->shape[1] : 1), (long long)shape[0],
                    (long long)(vector ? 1 : shape[1]));
    }
    if (!part->transposed) {
        safetensors_read_floats(st, e, 0, (int64_t)part->rows * part->cols, out);
        return true;
    }
    float *column = malloc_or_die((size_t)part->rows * sizeof(float));
    for (int c = 0; c < part->cols; c++) {
        safetensors_read_floats(st, e, (int64_t)c * part->rows, part->rows, column);
        for (int r = 0; r < part->rows; r++) { out[(int64_t)r * part->cols + c] = column[r]; }
    }
    free(column);
    return true;
}

bool hf_read(const SafeTensors *st, const ParamLayout *layout, float *weights, Error *err) {
    memset(weights, 0, (size_t)layout->size * sizeof(float));
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        HfPart parts[HF_PARTS];
        int count = hf_parts(layout, p, parts);
        for (int j = 0; j < count; j++) {
            float *out = weights + p->offset + (int64_t)parts[j].first_row * p->cols;
            if (!read_part(st, &parts[j], is_vector(p), out, err)) { return false; }
        }
    }
    return true;
}

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

static void add_rope_config(cJSON *json, const Rope *rope) {
    cJSON_AddNumberToObject(json, "rope_theta", rope->theta);
    if (rope->scaling == ROPE_UNSCALED) { return; }
    cJSON *scaling = cJSON_AddObjectToObject(json, "rope_scaling");
    bool llama3 = rope->scaling == ROPE_LLAMA3;
    cJSON_AddStringToObject(scaling, "rope_type", llama3 ? "llama3" : "linear");
    cJSON_AddNumberToObject(scaling, "factor", rope->factor);
    if (!llama3) { return; }
    cJSON_AddNumberToObject(scaling, "low_freq_factor", rope->low_factor);
    cJSON_AddNumberToObject(scaling, "high_freq_factor", rope->high_factor);
    cJSON_AddNumberToObject(scaling, "original_max_position_embeddings", rope->original_length);
}

static void add_llama_config(cJSON *json, const ModelConfig *c) {
    cJSON_AddStringToObject(json, "model_type", "llama");
    cJSON_AddNumberToObject(json, "num_hidden_layers", c->num_layers);
    cJSON_AddNumberToObject(json, "num_attention_heads", c->num_heads);
    cJSON_AddNumberToObject(json, "num_key_value_heads", c->num_groups);
    cJSON_AddNumberToObject(json, "head_dim", c->head_size);
    cJSON_AddNumberToObject(json, "hidden_size", c->channels);
    cJSON_AddNumberToObject(json, "intermediate_size", c->ffn);
    cJSON_AddNumberToObject(json, "max_position_embeddings", c->max_position);
    cJSON_AddNumberToObject(json, "rms_norm_eps", c->norm_eps);
    add_rope_config(json, &c->rope);
    cJSON_AddStringToObject(json, "hidden_act", "silu");
    cJSON_AddBoolToObject(json, "attention_bias", false);
    cJSON_AddBoolToObject(json, "mlp_bias", false);
}

char *hf_config(const ModelConfig *c, Dtype dtype, int end_of_text) {
    cJSON *json = cJSON_CreateObject();
    const char *class_name = c->arch == ARCH_GPT2 ? "GPT2LMHeadModel" : "LlamaForCausalLM";
    cJSON_AddItemToArray(cJSON_AddArrayToObject(json, "architectures"),
                         cJSON_CreateString(class_name));
    if (c->arch == ARCH_GPT2) {
        add_gpt2_config(json, c);
    } else {
        add_llama_config(json, c);
    }
    cJSON_AddNumberToObject(json, "vocab_size", c->vocab);
    // without a tokenizer, where text ends in the two vocabularies that are ours to know
    int known = c->vocab == 50257 ? 50256 : (c->vocab == 257 ? 256 : -1);
    int end = end_of_text >= 0 ? end_of_text : known;
    cJSON_AddItemToObject(json, "bos_token_id",
                          end < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(end));
    cJSON_AddItemToObject(json, "eos_token_id",
                          end < 0 ? cJSON_CreateNull() : cJSON_CreateNumber(end));
    cJSON_AddBoolToObject(json, "tie_word_embeddings", c->tied_head);
    cJSON_AddNumberToObject(json, "initializer_range", c->init_std);
    cJSON_AddStringToObject(json, "dtype", dtype == DTYPE_F32 ? "float32" : "bfloat16");
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    return text;
}
