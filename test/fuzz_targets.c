// The fuzzer's targets: every kind of file that the trainers read. An input is the content of a
// file in memory, and a link in the current folder leads to that file.
#define _GNU_SOURCE // memfd_create

#define TEST_OWN_MAIN
#include "../checkpoints/hugging_face.h"
#include "choice_file.h"
#include "fuzz.h"
#include "shard_file.h"
#include "tokenizer_file.h"

#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

// The smallest model with every kind of tensor, and delayed scaling.
#define SMALLEST                                                                                \
    "--arch llama --num-layers 1 --hidden-size 4 --num-attention-heads 2 --num-query-groups 1 " \
    "--ffn-hidden-size 2 --vocab-size 4 --make-vocab-size-divisible-by 2 --seq-length 4 "       \
    "--fp8-format hybrid --fp8-amax-history-len 2 --save fuzz --micro-batch-size 1 "            \
    "--global-batch-size 1 "

static volatile unsigned char sink; // the compiler must not remove what is read

// Writes the input into the file in memory that `link` leads to.
static void put_input(const char *link, const void *data, size_t size) {
    static int file = -1;
    static char target[64];
    if (file < 0) {
        file = memfd_create("input", 0);
        snprintf(target, sizeof(target), "/proc/self/fd/%d", file);
    }
    if (file < 0 || ftruncate(file, 0) != 0 || pwrite(file, data, size, 0) != (ssize_t)size) {
        die("%s: no file in memory", link);
    }
    char now[64] = "";
    if (readlink(link, now, sizeof(now) - 1) < 0 || strcmp(now, target) != 0) {
        unlink(link);
        if (symlink(target, link) != 0) { die("%s: cannot be made", link); }
    }
}

static void seed_file(const char *path) {
    CLOSED(blob_free) Blob b = blob_read(path);
    fuzz_seed(b.bytes, b.size);
}

// ---- shards, tokenizers, configurations -------------------------------------------------------

static bool accepts_shard(const uint8_t *data, size_t size) {
    Dataset set;
    int inputs[3], targets[3];
    put_input("input.bin", data, size);
    if (!dataset_open(&set, "input.bin", 3, 1000, -1, false)) { return false; }
    for (int64_t w = 0; w < set.windows; w++) {
        sink = loader_batch(&(Loader){.data = &set}, w, 1, INT64_MAX, inputs, targets, NULL);
    }
    dataset_close(&set);
    return true;
}

static void seed_shards(void) {
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2) {
        write_shard("s.bin", token_bytes, 60, 40 / token_bytes);
        seed_file("s.bin");
    }
}

// The mask of a shard, or where its documents begin. Its checksums are repaired, because no mutated
// input would have the right ones.
static bool accepts_mask(const uint8_t *data, size_t size) {
    enum { TOKENS = 20, T = 3 };
    struct {
        int32_t header[SHARD_HEADER_BYTES / 4];
        uint16_t tokens[TOKENS];
    } shard = {0};
    Dataset set;
    int inputs[T], targets[T], starts[T];
    uint32_t sums[2] = {0};
    const int32_t listed = STARTS_MAGIC;
    bool lists = size >= sizeof(listed) && memcmp(data, &listed, sizeof(listed)) == 0;
    uint8_t *mask = malloc_or_die(size + 1);
    memcpy(mask, data, size);
    shard_header(shard.header, 2, TOKENS);
    if (size >= SHARD_HEADER_BYTES) {
        sums[0] = (uint32_t)crc32_z(0, (const Bytef *)&shard, sizeof(shard));
        sums[1] = (uint32_t)crc32_z(0, mask + SHARD_HEADER_BYTES, size - SHARD_HEADER_BYTES);
        memcpy(mask + MASK_SHARD * sizeof(int32_t), sums, sizeof(sums));
    }
    remove(lists ? "masked.bin.mask" : "masked.bin.starts");
    put_input(lists ? "masked.bin.starts" : "masked.bin.mask", mask, size);
    if (access("masked.bin", F_OK) != 0) { blob_write("masked.bin", &shard, sizeof(shard)); }
    free(mask);
    bool ok = dataset_open(&set, "masked.bin", T, 1000, -1, false);
    for (int64_t s = 0; ok && s < set.windows; s++) {
        Loader loader = {.data = &set};
        int64_t counted = 0;
        or_die(loader_batch(&loader, s, 1, INT64_MAX, inputs, targets, starts));
        bool fits = starts[0] == 0;
        for (int t = 0; t < T; t++) { counted += targets[t] >= 0; }
        for (int t = 1; t < T; t++) {
            fits = fits && (starts[t] == t || starts[t] == starts[t - 1]);
        }
        if (!fits || counted != loader_targets(&loader, s, 1)) { die("window %lld", (long long)s); }
    }
    if (ok) { dataset_close(&set); }
    return ok;
}

static void seed_masks(void) {
    struct {
        int32_t header[SHARD_HEADER_BYTES / 4];
        uint16_t numbers[2];
    } file = {.numbers = {0x0ff1, 0x0003}};
    shard_header(file.header, 2, 20);
    file.header[0] = MASK_MAGIC;
    file.header[MASK_WINDOW] = 3;
    fuzz_seed(&file, sizeof(file));
    file.header[0] = STARTS_MAGIC;
    fuzz_seed(&file, sizeof(file));
}

// Encodes a text. The bytes of its tokens must be the text. Returns the number of tokens.
static int64_t encode_and_decode(Encoder *e, const unsigned char *text, size_t size) {
    int *tokens = malloc_or_die(size * sizeof(int)), length;
    int64_t count = encoder_encode(e, text, size, tokens);
    size_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        const unsigned char *bytes = tokenizer_decode(e->tokenizer, tokens[i], &length);
        if (length == 0 || (size_t)length > size - at || memcmp(bytes, text + at, (size_t)length)) {
            die("token %lld is %d", (long long)i, tokens[i]);
        }
        at += (size_t)length;
    }
    if (count >= 0 && at != size) { die("%zu of %zu bytes", at, size); }
    free(tokens);
    return count;
}

static bool accepts_tokenizer(const uint8_t *data, size_t size) {
    Tokenizer t;
    put_input("input.bin", data, size);
    if (!tokenizer_open(&t, "input.bin")) { return false; }
    for (int id = -1; id <= t.vocab; id++) {
        int length;
        const unsigned char *bytes = tokenizer_decode(&t, id, &length);
        if (length > 0) { sink = (unsigned char)(bytes[0] + bytes[length - 1]); }
    }
    static const char text[] = "It's 1234 the\n\n \xc3\xa9\xff end ";
    Encoder e;
    if (encoder_open(&e, &t)) {
        encode_and_decode(&e, (const unsigned char *)text, sizeof(text));
        encoder_close(&e);
    }
    tokenizer_close(&t);
    return true;
}

static void seed_tokenizers(void) {
    static const CharacterRange space = {32, 32, CLASS_SPACE};
    tokenizer_write_bytes("t.bin");
    seed_file("t.bin");
    tokenizer_file_write((TokenizerFile){CUT_GPT2, NULL, 0, &space, 1, NULL, 0}, -1, "t.bin");
    seed_file("t.bin");
    static const char *const merges[] = {"34 t"};
    static const int32_t added = BYTE_TOKENS + 1;
    tokenizer_file_write((TokenizerFile){CUT_LLAMA3_DIGITS, merges, 1, &space, 1, &added, 1}, -1,
                         "t.bin");
    seed_file("t.bin");
}

// Encodes a text with each way of cutting, one of which is by bytes. It is accepted if it has a
// token of several bytes.
static bool accepts_text(const uint8_t *data, size_t size) {
    static Tokenizer t;
    static Encoder e;
    int64_t fewest = (int64_t)size;
    if (t.vocab == 0 && (!tokenizer_open(&t, "text.bin") || !encoder_open(&e, &t))) {
        die("text.bin: no tokenizer");
    }
    for (int cut = CUT_BYTES; cut < CUT_COUNT; cut++) {
        t.cut = (Cut)cut;
        int64_t count = encode_and_decode(&e, data, size);
        if (cut == CUT_BYTES && count != (int64_t)size) { die("%lld tokens", (long long)count); }
        fewest = min64(fewest, count);
    }
    return fewest < (int64_t)size;
}

static void seed_texts(void) {
    static const char *const merges[] = {"th", "the", " t", "\n\n", "  ", "\xc3\xa9"};
    static const CharacterRange ranges[] = {{9, 13, CLASS_SPACE},
                                            {32, 32, CLASS_SPACE},
                                            {'0', '9', CLASS_NUMBER},
                                            {'A', 'z', CLASS_LETTER},
                                            {0xe0, 0x2fff, CLASS_LETTER}};
    tokenizer_file_write(
        (TokenizerFile){CUT_BYTES, merges, COUNT(merges), ranges, COUNT(ranges), NULL, 0}, -1,
        "text.bin");
    static const char text[] = "the thing's 12345\n\n  \xc3\xa9\xff\xf0\x9f\x98\x80 the";
    fuzz_seed(text, sizeof(text));
}

static bool accepts_choices(const uint8_t *data, size_t size) {
    enum { MOST = 8, VOCAB = 50 };
    ChoiceSet set;
    int tokens[MOST], answer;
    put_input("input.bin", data, size);
    if (!choices_open(&set, "input.bin", VOCAB)) { return false; }
    for (int q = 0; q < set.count; q++) {
        for (int a = 0; a < set.questions[q].answers; a++) {
            int n = choices_row(&set, q, a, MOST, tokens, &answer);
            for (int i = 0; i < n; i++) {
                if (tokens[i] >= VOCAB) { die("token %d", tokens[i]); }
            }
        }
    }
    choices_close(&set);
    return true;
}

static void seed_choices(void) {
    static ChoiceFile f;
    for (int number_bytes = 2; number_bytes <= 4; number_bytes += 2) {
        choice_file_fill(&f, number_bytes);
        choice_file_write(&f, "t.bin");
        seed_file("t.bin");
    }
}

// Options that are accepted must also survive being written and read again, and make a model.
static bool accepts_options(int argc, char **argv) {
    Options o;
    char *texts[2], *again[] = {"fuzz", "--config", "input.bin"};
    size_t sizes[2];
    if (!options_read(&o, argc, argv)) { return false; }
    if (o.help || o.version) { return true; }
    if (!options_resolve(&o, NULL)) { return false; }
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1) {
            put_input("input.bin", texts[0], sizes[0]);
            if (!options_read(&o, 3, again) || !options_resolve(&o, NULL)) {
                die("what options_write_config wrote is refused:\n%s", texts[0]);
            }
        }
        FILE *file = open_memstream(&texts[pass], &sizes[pass]);
        options_write_config(&o, file);
        fclose(file);
    }
    if (strcmp(texts[0], texts[1]) != 0) { die("two configurations:\n%s%s", texts[0], texts[1]); }
    free(texts[0]);
    free(texts[1]);
    if (o.num_layers > 64) { return true; }
    ModelConfig c = model_config(&o);
    ParamLayout layout = param_layout(&c);
    if (layout.size < layout.num_parameters) { die("%lld elements", (long long)layout.size); }
    param_layout_free(&layout);
    return true;
}

static bool accepts_config(const uint8_t *data, size_t size) {
    put_input("input.bin", data, size);
    return accepts_options(3, (char *[]){"fuzz", "--config", "input.bin"});
}

// Each line of the input is an argument.
static bool accepts_command(const uint8_t *data, size_t size) {
    enum { WORDS = 64 };
    char *text = malloc_or_die(size + 1), *argv[WORDS] = {"fuzz"}, *state;
    int argc = 1;
    memcpy(text, data, size);
    text[size] = '\0';
    for (char *word = strtok_r(text, "\n", &state); word != NULL && argc < WORDS;
         word = strtok_r(NULL, "\n", &state)) {
        argv[argc++] = word;
    }
    text_write("c.txt", "lr 1e-3");
    bool ok = accepts_options(argc, argv);
    free(text);
    return ok;
}

static void seed_commands(void) {
    static const char *const texts[] = {"--model\nllama-tiny\n--lr=1e-3\n--no-shuffle\n--bf16",
                                        "--num-layers\n3\n--hidden-size\n96\n--config=c.txt",
                                        "--arch=llama\n--rope-scaling\nllama3\n--seed=7\n--plan"};
    for (int i = 0; i < 3; i++) { fuzz_seed(texts[i], strlen(texts[i])); }
}

static void seed_configs(void) {
    static const char *const texts[] = {"\xef\xbb\xbf",
                                        "# note\nlr = 1e-3  # x\n--bf16\n no-shuffle\nseed 5",
                                        "data \"a # \\\"b\\\" \\\\ \\n\"  # x\nsave=\" c \"\n"};
    for (int i = 0; i < 3; i++) { fuzz_seed(texts[i], strlen(texts[i])); }
    Options o = options_of(SMALLEST);
    write_config(&o);
    seed_file("config.txt");
}

// ---- checkpoints ------------------------------------------------------------------------------

static bool accepts_safetensors(const uint8_t *data, size_t size) {
    static Fixture f;
    SafeTensors st;
    if (f.state == NULL) { fixture_open(&f, SMALLEST); }
    put_input("input.bin", data, size);
    if (!safetensors_open(&st, "input.bin")) { return false; }
    for (int i = 0; i < st.count; i++) {
        const TensorEntry *e = &st.entries[i];
        float value = 0;
        int64_t elements = (e->end - e->begin) / dtype_bytes(e->dtype);
        if (elements == 0 || e->dtype > DTYPE_F16) { continue; }
        sink = safetensors_read_floats(&st, e, elements - 1, 1, &value) && value > 0 &&
               safetensors_find(&st, e->name) != NULL;
    }
    sink = hf_read(&st, &f.layout, 0, f.layout.size, f.state);
    safetensors_close(&st);
    return true;
}

static const char folder[] = "fuzz/step_00000100";

static Dataset shards; // the training data of the checkpoint's run

// Writes a checkpoint to the disk.
static Fixture *make_checkpoint(void) {
    static Fixture f;
    if (f.state != NULL) { return &f; }
    fixture_open(&f, SMALLEST);
    for (int i = 0; i < 2; i++) {
        int32_t header[SHARD_HEADER_BYTES / 4 + 2] = {0};
        shard_header(header, 4, 2);
        header[SHARD_HEADER_BYTES / 4] = i;
        blob_write(i == 0 ? "shard_0.bin" : "shard_1.bin", header, sizeof(header));
    }
    if (!dataset_open(&shards, "shard_?.bin", 2, 4, -1, false)) {
        die("shard_?.bin: cannot be read");
    }
    f.snapshot.data = shards.identity;
    if (!fixture_save(&f, 100)) { die("%s: cannot be made", folder); }
    return &f;
}

// Opens the checkpoint and reads it as a run does. A file of tensors may have any content, although
// its checksum in meta.json does not match.
static bool accepts_file(const uint8_t *data, size_t size) {
    const char *name = fuzz_target->file;
    char path[PATH_LENGTH];
    Fixture *f = make_checkpoint();
    Checkpoint c;
    bool meta = strcmp(name, "meta.json") == 0;
    path_format(path, "%s/%s", folder, name);
    put_input(path, data, size);
    bool opened = meta ? checkpoint_open(&c, folder, true) : checkpoint_open(&c, folder, false);
    if (meta) {
        static Options o, model;
        o = f->options;
        path_format(o.load, "%s", folder);
        sink = read_start(&o, &model) && resolve_run(&o, &model, 1);
    }
    if (!opened) { return false; }
    int64_t end = min64(c.layout_size, f->layout.size);
    sink = checkpoint_match(&c, &f->options, &f->layout);
    const char *identity = c.data;
    sink = dataset_match(&shards, &identity, "the checkpoint's run");
    sink = checkpoint_read(&c, STATE_MASTER, 0, end, f->state, NULL, NULL);
    sink = checkpoint_read(&c, STATE_EXP_AVG_SQ, end / 2, end, f->state, NULL, NULL);
    sink = checkpoint_read_scaling(&c, &f->precision, f->slots, f->history);
    checkpoint_close(&c);
    return true;
}

static bool accepts_repaired_meta(const uint8_t *data, size_t size) {
    unsigned char *copy = malloc_or_die(size);
    memcpy(copy, data, size);
    meta_seal((char *)copy, size);
    bool ok = accepts_file(copy, size);
    free(copy);
    return ok;
}

static void seed_checkpoint_file(void) {
    char path[PATH_LENGTH];
    Fixture *f = make_checkpoint();
    or_die(fixture_save(f, 100));
    path_format(path, "%s/%s", folder, fuzz_target->file);
    seed_file(path);
}

// Reads what --load reads besides the weights. What a run that starts from it writes is read, too.
static bool accepts_model_config(const uint8_t *data, size_t size) {
    Options o, model = {0}, again = {0};
    if (access("c.txt", F_OK) != 0) { text_write("c.txt", "lr 1e-3"); }
    warnings_mute(true); // for keys that contradict each other
    if (!options_read(&o, 3, (char *[]){"fuzz", "--config", "c.txt"}) ||
        !hf_options((const char *)data, size, &o, &model) || !resolve_run(&o, &model, 1)) {
        return false;
    }
    char *text = hf_config(&o, DTYPE_F32, -1, -1, -1, (const char *)data, size);
    if (!hf_options(text, strlen(text), &o, &again)) {
        die("%s is refused:\n%s", error_text(), text);
    }
    free(text);
    return true;
}

static void seed_model_configs(void) {
    static const char *const texts[] = {
        "\xef\xbb\xbf{\"model_type\":\"gpt2\",\"n_embd\":4,\"n_layer\":1,\"num_attention_heads\":2,"
        "\"n_inner\":null,\"vocab_size\":4,\"bos_token_id\":0,\"scale_attn_weights\":true}",
        "{\"model_type\":\"qwen3\",\"hidden_size\":4,\"num_hidden_layers\":1,"
        "\"num_attention_heads\":2,\"intermediate_size\":2,\"vocab_size\":4,\"head_dim\":null,"
        "\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
        "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":64,\"rope_theta\":5e5},"
        "\"rope_parameters\":{\"rope_type\":\"llama3\",\"factor\":8},\"layer_types\":"
        "[\"full_attention\"],\"use_sliding_window\":false,\"eos_token_id\":[1,2]}",
        "{\"model_type\":\"mistral\",\"hidden_size\":4,\"num_hidden_layers\":1,"
        "\"num_attention_heads\":2,\"intermediate_size\":2,\"vocab_size\":4,"
        "\"max_position_embeddings\":64,\"sliding_window\":16}"};
    for (int i = 0; i < COUNT(texts); i++) { fuzz_seed(texts[i], strlen(texts[i])); }
    seed_checkpoint_file();
}

// ---- the planted fault ------------------------------------------------------------------------

static bool accepts_planted(const uint8_t *data, size_t size) {
    if (size < 8 || memcmp(data, "LEN:", 4) != 0) { return false; }
    unsigned char *copy = malloc_or_die(size);
    memcpy(copy, data, size);
    sink = copy[data[4] % 64];
    free(copy);
    return true;
}

static void seed_planted(void) {
    fuzz_seed("LEN:\x03 1234567890", 16);
}

const FuzzTarget fuzz_targets[] = {
    {"shard", accepts_shard, seed_shards, NULL},
    {"mask, checksums repaired", accepts_mask, seed_masks, NULL},
    {"tokenizer.bin", accepts_tokenizer, seed_tokenizers, NULL},
    {"text to tokens", accepts_text, seed_texts, NULL},
    {"multiple-choice set", accepts_choices, seed_choices, NULL},
    {"config file", accepts_config, seed_configs, NULL},
    {"command line", accepts_command, seed_commands, NULL},
    {"safetensors", accepts_safetensors, seed_checkpoint_file, "model.safetensors"},
    {"config.json of --load", accepts_model_config, seed_model_configs, "config.json"},
    {"meta.json", accepts_file, seed_checkpoint_file, "meta.json"},
    {"meta.json, checksum repaired", accepts_repaired_meta, seed_checkpoint_file, "meta.json"},
    {"optimizer file", accepts_file, seed_checkpoint_file, "optimizer-0-of-1.safetensors"},
    {"scaling state", accepts_file, seed_checkpoint_file, "scaling.safetensors"},
    {"planted", accepts_planted, seed_planted, NULL},
};
const int fuzz_target_count = COUNT(fuzz_targets) - 1;
