// A new run from the weights of a folder as Hugging Face keeps them: --load.
#include "hugging_face.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool same_number(double a, double b) {
    return fabs(a - b) <= 1e-6 * fabs(b);
}

// What config.json may say otherwise: it does not change what the model computes here.
static bool is_free(const char *key, Arch arch) {
    static const char *const keys[] = {
        "architectures", "dtype",      "bos_token_id", "eos_token_id",
        "resid_pdrop",   "embd_pdrop", "attn_pdrop",   "initializer_range"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (strcmp(key, keys[i]) == 0) { return true; }
    }
    return strncmp(key, "rope_", 5) == 0 || // rope_of reads these
           (arch == ARCH_LLAMA && strcmp(key, "max_position_embeddings") == 0);
}

static bool same_item(const cJSON *a, const cJSON *b) {
    if (cJSON_IsNumber(a) && cJSON_IsNumber(b)) {
        return same_number(a->valuedouble, b->valuedouble);
    }
    return cJSON_Compare(a, b, true);
}

static double number_or(const cJSON *json, const char *key, double otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    return cJSON_IsNumber(item) ? item->valuedouble : otherwise;
}

// The rotary embedding of a config.json, in the form of any version of transformers. false: of a
// kind that is not ours.
static bool rope_of(const cJSON *config, Rope *rope) {
    const cJSON *scaling = cJSON_GetObjectItemCaseSensitive(config, "rope_parameters");
    if (!cJSON_IsObject(scaling)) {
        scaling = cJSON_GetObjectItemCaseSensitive(config, "rope_scaling");
    }
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(scaling, "rope_type");
    if (!cJSON_IsString(type)) { type = cJSON_GetObjectItemCaseSensitive(scaling, "type"); }
    const char *name = cJSON_IsString(type) ? type->valuestring : "default";
    double theta = number_or(scaling, "rope_theta", 10000);
    *rope = (Rope){
        .theta = number_or(config, "rope_theta", theta),
        .factor = number_or(scaling, "factor", NAN),
        .low_factor = number_or(scaling, "low_freq_factor", NAN),
        .high_factor = number_or(scaling, "high_freq_factor", NAN),
        .original_length = (int)number_or(scaling, "original_max_position_embeddings", 0)};
    bool linear = strcmp(name, "linear") == 0, llama3 = strcmp(name, "llama3") == 0;
    if (linear) { rope->scaling = ROPE_LINEAR; }
    if (llama3) { rope->scaling = ROPE_LLAMA3; }
    return linear || llama3 || strcmp(name, "default") == 0;
}

static bool same_rope(const Rope *a, const Rope *b) {
    if (a->scaling != b->scaling || !same_number(a->theta, b->theta)) { return false; }
    if (b->scaling == ROPE_UNSCALED) { return true; }
    if (!same_number(a->factor, b->factor)) { return false; }
    return b->scaling == ROPE_LINEAR || (same_number(a->low_factor, b->low_factor) &&
                                         same_number(a->high_factor, b->high_factor) &&
                                         a->original_length == b->original_length);
}

static bool fail_other(const char *folder, const cJSON *theirs, const cJSON *ours, Error *err) {
    char *was = cJSON_PrintUnformatted(theirs), *now = cJSON_PrintUnformatted(ours);
    fail(err,
         "%s: another model's: its config.json has \"%s\": %.80s, this run %.80s; "
         "scripts/convert_hf "
         "import writes the options that fit (options.txt)",
         folder, ours->string, was, now);
    cJSON_free(was);
    cJSON_free(now);
    return false;
}

static bool check_config(const char *folder, const cJSON *theirs, const ModelConfig *c,
                         Error *err) {
    char *text = hf_config(c, DTYPE_F32, -1);
    cJSON *ours = cJSON_Parse(text);
    const cJSON *item;
    bool ok = true;
    cJSON_ArrayForEach(item, ours) {
        const cJSON *other = cJSON_GetObjectItemCaseSensitive(theirs, item->string);
        bool said = other != NULL && !cJSON_IsNull(other);
        if (ok && said && !is_free(item->string, c->arch) && !same_item(other, item)) {
            ok = fail_other(folder, other, item, err);
        }
    }
    Rope rope;
    if (ok && c->arch == ARCH_LLAMA && (!rope_of(theirs, &rope) || !same_rope(&rope, &c->rope))) {
        ok = fail(err,
                  "%s: another model's: its config.json has another rotary embedding than the "
                  "--rope options say; scripts/convert_hf import writes those that fit "
                  "(options.txt)",
                  folder);
    }
    cJSON_Delete(ours);
    free(text);
    return ok;
}

static cJSON *read_json(const char *path, Error *err) {
    MappedFile file;
    if (!file_map(&file, path, err)) { return NULL; }
    cJSON *json = cJSON_ParseWithLength((const char *)file.data, file.bytes);
    file_unmap(&file);
    if (!cJSON_IsObject(json)) {
        cJSON_Delete(json);
        fail(err, "%s: not JSON; it is damaged", path);
        return NULL;
    }
    return json;
}

bool hf_load(const char *folder, const ParamLayout *layout, float *weights, Error *err) {
    char path[PATH_LENGTH], index[PATH_LENGTH];
    SafeTensors st;
    if (!path_exists(folder)) { return fail(err, "%s: no such folder", folder); }
    path_format(path, "%s/config.json", folder);
    cJSON *config = read_json(path, err);
    bool ok = config != NULL && check_config(folder, config, &layout->config, err);
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
    ok = hf_read(&st, layout, weights, err);
    safetensors_close(&st);
    return ok;
}
