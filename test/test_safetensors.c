// safetensors: round trips, and wrong headers; config.json.
#include "../checkpoints/hugging_face.h"
#include "fixture.h"

#include <cjson/cJSON.h>
#include <unistd.h>

static SafeTensors opened(const char *path) {
    SafeTensors st;
    or_die(safetensors_open(&st, path));
    return st;
}

TEST(every_dtype_round_trips) {
    static const char *const names[] = {"F32", "BF16", "F16",     "I32",  "I64",
                                        "U8",  "I8",   "F8_E4M3", "BOOL", "I16",
                                        "U16", "U32",  "U64",     "F64",  "F8_E5M2"};
    unsigned char bytes[12 * 8];
    for (int dtype = DTYPE_F32; dtype < (int)(COUNT(names)); dtype++) {
        FileWriter w;
        CHECK_TEXT(dtype_name((Dtype)dtype), names[dtype]);
        size_t size = 12 * (size_t)dtype_bytes((Dtype)dtype);
        for (size_t i = 0; i < size; i++) { bytes[i] = (unsigned char)(37 * i + 1); }
        TensorEntry tensors[3] = {
            {.name = "first \"one\"", .dims = 4, .shape = {2, 1, 3, 2}},
            {.name = "scalar"},
            {.name = "none", .dims = 1},
        };
        for (int i = 0; i < 3; i++) {
            tensors[i].dtype = (Dtype)dtype;
            tensors[i].data = bytes;
        }
        CHECK(safetensors_write(&w, "t.st", tensors, 3, "{\"key\":\"a \\\"value\\\"\"}"));

        CLOSED(safetensors_close) SafeTensors st = opened("t.st");
        CHECK_EQUAL(st.count, 3);
        CHECK_EQUAL((st.data + st.entries[0].begin) % 8, 0);
        CHECK_TEXT(st.metadata, "{\"key\":\"a \\\"value\\\"\"}");
        const TensorEntry *e = safetensors_find(&st, "first \"one\"");
        if (e == NULL) { die("t.st: the first tensor is missing"); }
        CHECK(e->dtype == (Dtype)dtype && e->dims == 4);
        CHECK_BITS(e->shape, tensors[0].shape, sizeof(e->shape));
        unsigned char back[sizeof(bytes)];
        CHECK(safetensors_read(&st, e, 0, 12, back));
        CHECK_BITS(back, bytes, size);
        CHECK_EQUAL(safetensors_find(&st, "scalar")->dims, 0);
        CHECK(safetensors_find(&st, "first") == NULL);
    }
}

// Compares all codes of the two 16-bit formats with their definition.
TEST(sixteen_bit_floats_decode) {
    enum { CODES = 65536 };
    static uint16_t codes[CODES];
    static float out[CODES];
    for (int i = 0; i < CODES; i++) { codes[i] = (uint16_t)i; }
    for (int dtype = DTYPE_BF16; dtype <= DTYPE_F16; dtype++) {
        int fraction = dtype == DTYPE_BF16 ? 7 : 10, exponents = 15 - fraction;
        int bias = (1 << (exponents - 1)) - 1;
        TensorEntry t = {"codes", (Dtype)dtype, 1, {CODES}, codes, false, 0, 0};
        FileWriter w;
        CHECK(safetensors_write(&w, "t.st", &t, 1, NULL));
        CLOSED(safetensors_close) SafeTensors st = opened("t.st");
        CHECK(safetensors_read_floats(&st, &st.entries[0], 5, CODES - 5, out + 5));
        for (int i = 5; i < CODES; i++) {
            int exponent = i >> fraction & ((1 << exponents) - 1),
                mantissa = i & ((1 << fraction) - 1);
            double sign = i & 0x8000 ? -1 : 1, value = ldexp(mantissa, 1 - bias - fraction);
            if (exponent > 0) {
                value = ldexp(mantissa + (1 << fraction), exponent - bias - fraction);
            }
            if (exponent == (1 << exponents) - 1) { value = mantissa > 0 ? NAN : INFINITY; }
            CHECK(isnan(value) ? isnan(out[i]) : out[i] == sign * value);
        }
    }
}

// Writes a file with the header length `length`, then `text` and `data_bytes` zeros.
static void write_raw(uint64_t length, const char *text, size_t data_bytes) {
    size_t size = strlen(text);
    FREED unsigned char *bytes = calloc_or_die(sizeof(length) + size + data_bytes, 1);
    memcpy(bytes, &length, sizeof(length));
    memcpy(bytes + sizeof(length), text, size);
    blob_write("bad.st", bytes, sizeof(length) + size + data_bytes);
}

static void refuses(const char *expected) {
    SafeTensors st;
    CHECK_REFUSED(safetensors_open(&st, "bad.st"), "bad.st: ");
    CHECK_REFUSED(safetensors_open(&st, "bad.st"), expected);
}

#define F32_AT(name, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

TEST(hostile_headers_are_refused) {
    enum { DATA = 64 };
    static const char *const wrong[] = {
        "{\"a\":1}",
        "{\"a\":[]}",
        "{\"a\":{}}",
        "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}",
        "{\"a\":{\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}",
        "{" F32_AT("a", "1", 0, 4) "}",
        "{" F32_AT("a", "[2]", 0, 4) "}",
        "{" F32_AT("a", "[1]", 0, 8) "}",
        "{" F32_AT("a", "[1]", 4, 0) "}",
        "{" F32_AT("a", "[-1]", 4, 0) "}",
        "{" F32_AT("a", "[1]", -4, 0) "}",
        "{" F32_AT("a", "[1.5]", 0, 6) "}",
        "{" F32_AT("a", "[\"1\"]", 0, 4) "}",
        "{" F32_AT("a", "[1,1,1,1,1]", 0, 4) "}",
        "{" F32_AT("a", "[1]", 9223372036854775807, 3) "}",
        "{" F32_AT("a", "[1e300]", 0, 4) "}",
        "{" F32_AT("a", "[1e999]", 0, 4) "}",
        "{" F32_AT("a", "[4611686018427387904,4]", 0, 0) "}",
        "{" F32_AT("a", "[9007199254740992,9007199254740992]", 0, 0) "}",
        "{" F32_AT("a", "[4294967296,4294967296]", 0, 0) "}",
    };
    write_raw(101 << 20, "{}", 0);
    CHECK(truncate("bad.st", 200 << 20) == 0);
    refuses("100 MiB at most");
    for (int i = 0; i < COUNT(wrong); i++) {
        write_raw(strlen(wrong[i]), wrong[i], DATA);
        refuses("the header's entry for 'a' is wrong");
    }
    static const Says rows[] = {
        {"", "not JSON"},
        {"[]", "not JSON"},
        {"nonsense", "not JSON"},
        {"{\"a\":", "not JSON"},
        {"{}x", "not JSON"},
        {"{" F32_AT("a", "[4]", 0, 16) "," F32_AT("b", "[4]", 8, 24) "}", "'a' and 'b' overlap"},
        {"{" F32_AT("a", "[4]", 8, 24) "," F32_AT("b", "[8]", 0, 32) "}", "'b' and 'a' overlap"},
        {"{" F32_AT("a", "[4]", 0, 16) "," F32_AT("a", "[4]", 0, 16) "}", "'a' and 'a' overlap"},
        {"{\"a\":{\"dtype\":\"F63\",\"shape\":[1],\"data_offsets\":[0,8]}}",
         "tensor 'a': dtype F63 is not read"},
        {"{" F32_AT("a", "[1]", 64, 68) "}", "bytes 0 to 64 of its data are no tensor's"},
        {"{" F32_AT("a", "[4]", 0, 16) "," F32_AT("b", "[11]", 20, 64) "}", "bytes 16 to 20 of"},
        {"{" F32_AT("a", "[15]", 0, 60) "}", "bytes 60 to 64 of its data are no tensor's"},
        {"{}", "bytes 0 to 64 of its data are no tensor's"},
        {"{" F32_AT("a", "[17]", 0, 68) "}",
         "its data are 64 bytes, 68 by the header: it is cut short; download or copy it again"},
    };
    EACH (row, rows) {
        write_raw(strlen(row->given), row->given, DATA);
        refuses(row->expected);
    }
    char name[200];
    memset(name, 'n', sizeof(name));
    const char *header = text_of(
        "{\"%.*s\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", TENSOR_NAME, name);
    write_raw(strlen(header), header, DATA);
    refuses("is wrong");
    // right entries of the same kind are accepted
    static const char right[] = "{" F32_AT("b", "[4]", 16, 32) "," F32_AT("a", "[2,2]", 0,
                                                                          16) "}  ";
    write_raw(strlen(right), right, 32);
    CLOSED(safetensors_close) SafeTensors st = opened("bad.st");
    CHECK_TEXT(st.entries[0].name, "a");
}

static void save_model(const char *path, Fixture *f) {
    FREED TensorEntry *tensors = NULL;
    FileWriter w;
    int count = hf_tensors(&f->layout, DTYPE_F32, f->state, &tensors);
    CHECK(safetensors_write(&w, path, tensors, count, NULL));
}

TEST(models_round_trip_under_hugging_face_names) {
    static const char *const models[] = {TINY, TINY "--untie-embeddings-and-output-weights",
                                         TINY "--arch gpt2 --num-query-groups 2"};
    for (int i = 0; i < 3; i++) {
        FIXTURE(f, models[i]);
        const int64_t size = f.layout.size, parts[][2] = {{2 * (size / 3), size}, {64, size / 3}};
        model_init(&f.layout, 0, size, f.state, 1);
        save_model("model.st", &f);
        FREED float *back = malloc_or_die((size_t)f.layout.size * sizeof(float));
        CLOSED(safetensors_close) SafeTensors st = opened("model.st");
        CHECK(hf_read(&st, &f.layout, 0, size, back));
        CHECK_BITS(back, f.state, (size_t)f.layout.size * sizeof(float));
        for (int part = 0; part < 2; part++) { // across tensors
            const int64_t begin = parts[part][0], end = parts[part][1];
            const size_t bytes = (size_t)(end - begin) * sizeof(float);
            CHECK(hf_read(&st, &f.layout, begin, end, back));
            CHECK_BITS(back, f.state + begin, bytes);
        }
    }
}

TEST(other_models_are_refused) {
    static const struct {
        const char *saved, *read, *expected;
    } rows[] = {
        {TINY "--add-qkv-bias", TINY,
         "tensor 'model.layers.0.self_attn.q_proj.bias' is none of the model"},
        {TINY "--qk-layernorm", TINY, "tensor 'model.layers.0.self_attn.q_norm.weight' is none"},
        {TINY "--num-layers 3", TINY, "tensor 'model.layers.2.input_layernorm.weight' is none"},
        {TINY, TINY "--hidden-size 64",
         "model.st: tensor 'model.embed_tokens.weight' is F32 [20, 32], not"},
        {TINY, TINY "--num-layers 3",
         "model.st: tensor 'model.layers.2.input_layernorm.weight' is missing"},
        {TINY, TINY "--untie-embeddings-and-output-weights",
         "model.st: tensor 'lm_head.weight' is missing"},
        {TINY, TINY "--arch gpt2 --num-query-groups 2",
         "tensor 'transformer.wte.weight' is missing"},
    };
    EACH (row, rows) {
        FIXTURE(saved, row->saved);
        FIXTURE(f, row->read);
        save_model("model.st", &saved);
        CLOSED(safetensors_close) SafeTensors st = opened("model.st");
        CHECK_REFUSED(hf_read(&st, &f.layout, 0, f.layout.size, f.state) &&
                          hf_knows_all(&st, &f.layout),
                      row->expected);
    }
}

// What older versions of transformers save besides.
TEST(computed_tables_are_passed_over) {
    FREED TensorEntry *tensors = NULL;
    FileWriter w;
    FIXTURE(f, TINY);
    int count = hf_tensors(&f.layout, DTYPE_F32, f.state, &tensors);
    tensors = realloc_or_die(tensors, (size_t)(count + 1) * sizeof(*tensors));
    tensors[count] = tensor_entry("model.layers.0.self_attn.rotary_emb.inv_freq", DTYPE_F32, 4, 0,
                                  f.state);
    CHECK(safetensors_write(&w, "model.st", tensors, count + 1, NULL));
    CLOSED(safetensors_close) SafeTensors st = opened("model.st");
    CHECK(hf_knows_all(&st, &f.layout));
}

// ---- config.json --------------------------------------------------------------------------------

// Reads the config.json of a small model with other values: "key": value, ... ("drop": no such
// key), for a run with --seq-length; 0: it is not given.
static bool reads_for(int seq_length, const char *family, const char *changes, Options *o) {
    bool gpt2 = strcmp(family, "gpt2") == 0;
    cJSON *config = cJSON_Parse(
        gpt2 ? "{\"n_embd\":64,\"n_layer\":2,\"n_head\":4,\"vocab_size\":257,\"n_positions\":64}"
             : "{\"hidden_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
               "\"num_key_value_heads\":2,\"intermediate_size\":128,\"vocab_size\":257,"
               "\"max_position_embeddings\":256,\"rms_norm_eps\":1e-5,\"sliding_window\":null,"
               "\"rope_theta\":50000.0,\"tie_word_embeddings\":false}");
    cJSON *others = cJSON_Parse(text_of("{%s}", changes));
    CHECK(others != NULL);
    cJSON_AddStringToObject(config, "model_type", family);
    while (others != NULL && others->child != NULL) {
        cJSON *item = cJSON_DetachItemViaPointer(others, others->child);
        cJSON_DeleteItemFromObjectCaseSensitive(config, item->string);
        if (cJSON_IsString(item) && strcmp(item->valuestring, "drop") == 0) {
            cJSON_Delete(item);
        } else {
            cJSON_AddItemToObject(config, item->string, item);
        }
    }
    FREED char *text = cJSON_Print(config);
    cJSON_Delete(config);
    cJSON_Delete(others);
    *o = (Options){0};
    Options given;
    options_default(&given);
    if (seq_length > 0) {
        or_die(options_set(&given, SOURCE_COMMAND, "seq-length %d", seq_length));
    }
    return hf_options(text, strlen(text), &given, o);
}

static bool reads(const char *family, const char *changes, Options *o) {
    return reads_for(0, family, changes, o);
}

// A value of another type than a key has, by transformers 5.23, is refused: the default would be
// another model.
TEST(values_of_another_type_are_refused) {
    static const struct {
        const char *family, *keys, *right; // right: among `values`
    } rows[] = {
        {"llama",
         "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size "
         "max_position_embeddings max_window_layers",
         "64"},
        {"llama", "num_key_value_heads head_dim sliding_window", "64 null"},
        {"llama", "rms_norm_eps rope_theta initializer_range", "64 0.5"},
        {"llama", "final_logit_softcapping", "64 0.5 null"},
        {"llama", "rope_scaling rope_parameters", "{} {\"a\":64} null"},
        {"llama", "tie_word_embeddings use_sliding_window", "true"},
        {"llama", "attention_bias mlp_bias", ""},
        {"llama", "layer_types", "[] [64] null"}, // only texts of these are full attention
        {"llama", "bos_token_id pad_token_id", "64 null"},
        {"llama", "eos_token_id", "64 null [] [64]"},
        {"llama", "hidden_act", ""},
        {"llama", "model_type", "\"64\""},
        {"gpt2", "n_layer n_embd n_head n_positions vocab_size hidden_size", "64"},
        {"gpt2", "n_inner", "64 null"},
        {"gpt2", "layer_norm_epsilon", "64 0.5"},
        {"gpt2", "scale_attn_weights", "true"},
        {"gpt2", "scale_attn_by_inverse_layer_idx add_cross_attention activation_function", ""},
    };
    static const char *const values[] = {"\"64\"", "true", "null", "[]",   "[64]",       "[\"64\"]",
                                         "{}",     "64",   "0.5",  "1e99", "{\"a\":64}", "\"\""};
    EACH (row, rows) {
        char keys[200], *state;
        snprintf(keys, sizeof(keys), "%s", row->keys);
        for (char *key = strtok_r(keys, " ", &state); key; key = strtok_r(NULL, " ", &state)) {
            EACH (value, values) {
                Options o;
                bool right = strstr(text_of(" %s ", row->right), text_of(" %s ", *value)) != NULL;
                if (right) { continue; }
                if (reads(row->family, text_of("\"%s\":%s", key, *value), &o)) {
                    test_fail(__FILE__, __LINE__, "%s is read as %s", key, *value);
                } else {
                    CHECK_CONTAINS(error_text(), key);
                }
            }
        }
    }
}

#define LINEAR "\"rope_type\":\"linear\",\"factor\":2.0"
#define NO_THETA "\"rope_theta\":\"drop\","

TEST(what_has_no_effect_or_is_not_supported_is_refused) {
    static const Says llama[] = {
        {NO_THETA "\"rope_parameters\":{\"rope_theta\":null}", "rope_theta"},
        {NO_THETA "\"rope_scaling\":{\"rope_theta\":\"5\"}", "rope_theta"},
        {"\"rope_scaling\":{" LINEAR ",\"rope_type\":\"linear\"}", "rope_type is there twice"},
        {"\"rope_scaling\":{\"rope_type\":5}", "rope_type 5"},
        {"\"rope_scaling\":{\"rope_type\":null}", "rope_type null"},
        {"\"rope_scaling\":{\"type\":[\"linear\"]}", "type [\"linear\"]"},
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":\"2\"}", "factor \"2\""},
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":null}", "factor null"},
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.5}", "factor 0.5"},
        {"\"rope_scaling\":{\"factor\":2.0}", "factor 2"},
        {"\"rope_scaling\":{" LINEAR ",\"low_freq_factor\":2.0}", "low_freq_factor 2"},
        {"\"rope_scaling\":{" LINEAR ",\"attention_factor\":2.0}", "attention_factor 2"},
        {"\"rope_scaling\":{" LINEAR ",\"partial_rotary_factor\":0.5}",
         "partial_rotary_factor 0.5"},
        {"\"rope_parameters\":{\"full_attention\":{" LINEAR "}}", "full_attention"},
        {"\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
         "\"high_freq_factor\":4.0}",
         "original_max_position_embeddings is missing"},
        {"\"num_key_value_heads\":0", "num_key_value_heads 0"},
        {"\"head_dim\":0", "head_dim 0"},
        {"\"head_dim\":-16", "head_dim -16"},
        {"\"max_position_embeddings\":0", "max_position_embeddings 0"},
        {"\"rms_norm_eps\":-1e-5", "rms_norm_eps -1e-05"},
        {"\"rope_theta\":0", "rope_theta 0"},
        {"\"hidden_size\":3000000000", "hidden_size 3000000000"},
        {"\"hidden_act\":\"gelu\"", "hidden_act \"gelu\""},
        {"\"num_local_experts\":8", "num_local_experts 8"},
        {"\"quantization_config\":{\"bits\":4}", "quantization_config {\"bits\":4}"},
        {"\"quantization_config\":{\"quant_method\":\"fp8\"}", "blocks of 128 x 128"},
        {"\"quantization_config\":{\"weight_block_size\":[128,128]}", "blocks of 128 x 128"},
        {"\"logit_scale\":0.0625", "logit_scale 0.0625"},
        {"\"per_layer_config\":{\"0\":{}}", "per_layer_config"},
        {"\"partial_rotary_factor\":0.5", "partial_rotary_factor 0.5"},
    };
    static const char *const types[] = {"yarn", "dynamic", "longrope", "proportional", "none"};
    Options o;
    EACH (row, llama) { CHECK_REFUSED(reads("llama", row->given, &o), row->expected); }
    EACH (type, types) {
        const char *changes = text_of("\"rope_scaling\":{\"rope_type\":\"%s\",\"factor\":2.0}",
                                      *type);
        CHECK_REFUSED(reads("llama", changes, &o), text_of("rope_type \"%s\"", *type));
    }
    CHECK_REFUSED(reads("gpt2", "\"n_inner\":0", &o), "n_inner 0");
    CHECK_REFUSED(reads("gpt2", "\"rope_scaling\":{" LINEAR "}", &o), "rope_type");
}

// A sliding window that no sequence exceeds changes nothing: it bounds the positions. What is saved
// keeps it.
TEST(sequences_fit_into_sliding_windows) {
#define USED "\"use_sliding_window\":true,\"max_window_layers\":1"
    static const struct {
        const char *family, *changes;
        int window; // 0: none
    } rows[] = {
        {"mistral", "\"sliding_window\":64", 64},
        // transformers' Mistral does not read layer_types
        {"mistral", "\"sliding_window\":64,\"layer_types\":[\"full_attention\"]", 64},
        {"mistral", "\"sliding_window\":\"drop\",\"max_position_embeddings\":8192", 4096},
        {"qwen2", "\"sliding_window\":64," USED, 64},
        {"qwen3",
         "\"sliding_window\":64,\"use_sliding_window\":true,\"layer_types\":"
         "[\"full_attention\",\"sliding_attention\"]",
         64},
        {"mistral", "\"sliding_window\":null", 0},
        {"qwen2", "\"sliding_window\":64,\"use_sliding_window\":false", 0},
        {"qwen2", "\"sliding_window\":64,\"use_sliding_window\":true,\"max_window_layers\":2", 0},
        {"qwen2",
         "\"sliding_window\":64,\"use_sliding_window\":true,\"max_window_layers\":\"drop\","
         "\"num_hidden_layers\":28",
         0},
    };
    EACH (row, rows) {
        Options o;
        bool long_one = reads_for(row->window + 1, row->family, row->changes, &o);
        CHECK_EQUAL(long_one, row->window == 0);
        if (row->window > 0) {
            CHECK_CONTAINS(error_text(), text_of("sliding_window %d is not supported: what is "
                                                 "missing is attention within a window; with "
                                                 "--seq-length %d",
                                                 row->window, row->window));
        }
        warnings_mute(true);
        CHECK(reads_for(row->window, row->family, row->changes, &o));
        warnings_mute(false);
        CHECK_EQUAL(o.max_position_embeddings, row->window > 0 ? row->window : 256);
        CHECK_EQUAL(o.seq_length, o.max_position_embeddings);
    }
    Options o; // the window that a Mistral lacks is 4096, a Llama has none
    const char *lacks = "\"sliding_window\":\"drop\",\"max_position_embeddings\":8192";
    CHECK(reads_for(8192, "llama", lacks, &o));
}

// Where two keys contradict each other, the one that transformers takes.
TEST(other_names_and_places_are_read) {
    static const struct {
        const char *family, *changes, *option, *value;
    } rows[] = {
        {"llama", "\"rope_scaling\":null,\"head_dim\":null", "rope-theta", "50000"},
        {"llama", "\"rope_theta\":\"drop\"", "rope-theta", "10000"},
        {"llama", "\"rope_theta\":50000", "rope-theta", "50000"},
        {"llama", NO_THETA "\"rope_scaling\":{},\"rope_parameters\":{\"rope_theta\":5e3}",
         "rope-theta", "5000"},
        {"llama", NO_THETA "\"rope_scaling\":null,\"rope_parameters\":{\"rope_theta\":5e3}",
         "rope-theta", "5000"},
        {"llama", NO_THETA "\"rope_scaling\":{\"rope_theta\":5e3},\"rope_parameters\":{}",
         "rope-theta", "5000"},
        {"llama", "\"rope_parameters\":{\"rope_theta\":5e4,\"rope_type\":\"default\"}",
         "rope-theta", "50000"},
        {"llama",
         "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2},"
         "\"rope_parameters\":{" LINEAR ",\"rope_theta\":5e4}",
         "rope-scaling-factor", "2"},
        {"llama", "\"rope_scaling\":{" LINEAR ",\"type\":\"linear\",\"low_freq_factor\":null}",
         "rope-scaling", "linear"},
        {"llama",
         "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,"
         "\"high_freq_factor\":4},\"original_max_position_embeddings\":64",
         "rope-original-length", "64"},
        {"llama", "\"rope_parameters\":{\"rope_theta\":5e3}", "rope-theta", "5000"},
        {"llama",
         NO_THETA "\"rope_scaling\":{\"type\":\"default\"},"
                  "\"rope_parameters\":{\"rope_theta\":5e3,\"rope_type\":\"linear\"}",
         "rope-theta", "10000"},
        {"llama", "\"rope_scaling\":{" LINEAR ",\"type\":\"llama3\"}", "rope-scaling", "linear"},
        {"llama",
         "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,"
         "\"high_freq_factor\":4,\"original_max_position_embeddings\":32},"
         "\"original_max_position_embeddings\":64",
         "rope-original-length", "64"},
        {"gpt2", "\"num_attention_heads\":2", "num-attention-heads", "2"},
        {"llama", "\"partial_rotary_factor\":1,\"rope_scaling\":{\"partial_rotary_factor\":1.0}",
         "rope-scaling", "none"},
        {"llama", "\"num_key_value_heads\":null", "num-query-groups", "4"},
        {"llama", "\"hidden_size\":64.0", "hidden-size", "64"},
        {"llama", "\"quantization_config\":null,\"num_experts\":0,\"hidden_act\":\"swish\"",
         "kv-channels", "16"},
        {"llama",
         "\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","
         "\"weight_block_size\":[128,128]}",
         "kv-channels", "16"},
        {"llama", "\"eos_token_id\":[1,2],\"bos_token_id\":null,\"pad_token_id\":-1",
         "untie-embeddings-and-output-weights", "true"},
        {"llama", "\"pretraining_tp\":2,\"attention_dropout\":0.1,\"use_cache\":false",
         "num-layers", "2"},
        {"qwen2", "\"use_sliding_window\":false,\"sliding_window\":4096,\"layer_types\":null",
         "add-qkv-bias", "true"},
        {"qwen3", "\"layer_types\":[\"full_attention\",\"full_attention\"]", "kv-channels", "128"},
        {"gpt2", "\"n_inner\":null,\"n_ctx\":64,\"reorder_and_upcast_attn\":true",
         "ffn-hidden-size", "256"},
        {"gpt2", "\"n_embd\":\"drop\",\"hidden_size\":64,\"num_hidden_layers\":2", "hidden-size",
         "64"},
        {"gpt2", "\"tie_word_embeddings\":true", "untie-embeddings-and-output-weights", "false"},
    };
    EACH (row, rows) {
        char value[OPTION_TEXT];
        Options o;
        warnings_mute(true);
        bool read = reads(row->family, row->changes, &o);
        warnings_mute(false);
        if (!read) { test_fail(__FILE__, __LINE__, "%s: %s", row->changes, error_text()); }
        CHECK_TEXT(option_text(&o, option_row(row->option), value), row->value);
    }
}
