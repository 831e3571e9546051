// What the tests of options, data and checkpoints share: whole files, options from one line of
// text, and a tiny model whose state is easy to recognise. Files go into the current folder, which
// test/run.sh has made empty.
#pragma once

#include "../base/rng.h"
#include "../checkpoints/checkpoint.h"
#include "test.h"

typedef struct {
    unsigned char *bytes;
    size_t size;
} Blob;

static inline Blob blob_read(const char *path) {
    Blob b = {malloc_or_die(1), 0};
    unsigned char buffer[65536];
    FILE *file = fopen(path, "rb");
    if (file == NULL) { die("%s: missing", path); }
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), file)) > 0; b.size += n) {
        b.bytes = realloc_or_die(b.bytes, b.size + n);
        memcpy(b.bytes + b.size, buffer, n);
    }
    fclose(file);
    return b;
}

static inline void blob_free(Blob *b) {
    free(b->bytes);
}

static inline void blob_write(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(bytes, 1, size, file) != size || fclose(file) != 0) {
        die("%s: could not be written", path);
    }
}

static inline void text_write(const char *path, const char *text) {
    blob_write(path, text, strlen(text));
}

// Checks that a call fails, with an error text that contains `expected`.
#define CHECK_REFUSED(call, expected)           \
    do {                                        \
        fail("%s", "");                         \
        CHECK(!(call));                         \
        CHECK_CONTAINS(error_text(), expected); \
    } while (0)

// Formats a text as printf does. It stays valid during the next 15 calls.
PRINTF_LIKE(1, 2) static inline const char *text_of(const char *format, ...) {
    static char texts[16][2048];
    static unsigned next;
    char *text = texts[next++ % 16];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(texts[0]), format, args);
    va_end(args);
    return text;
}

enum { TEXT_MAX = 4096 };

// The text of a file, valid until the next call.
static inline const char *text_read(const char *path) {
    static char text[TEXT_MAX];
    CLOSED(blob_free) Blob b = blob_read(path);
    snprintf(text, sizeof(text), "%.*s", (int)b.size, (char *)b.bytes);
    return text;
}

// Writes config.txt, as a run does.
static inline void write_config(const Options *o) {
    FILE *file = fopen("config.txt", "w");
    options_write_config(o, file);
    fclose(file);
}

// Reads the options of "--name value --name value", split at blanks, as far as they are given.
static inline bool read_given(Options *options, const char *text) {
    enum { WORDS = 1024 };
    FREED char *line = strdup_or_die(text);
    char *argv[WORDS] = {"test"}, *state;
    int argc = 1;
    for (char *word = strtok_r(line, " \n", &state); word != NULL && argc < WORDS;
         word = strtok_r(NULL, " \n", &state)) {
        argv[argc++] = word;
    }
    return options_read(options, argc, argv);
}

// Reads the options of the checkpoint that a run with these would start from.
static inline bool read_start(Options *options, Options *model) {
    CLOSED(checkpoint_close) Checkpoint start;
    return checkpoint_model(&start, options, model);
}

// The step that --resume latest finds; 0: there is none yet; -1: it is refused.
static inline int64_t resumed(Options options) {
    static Options was;
    CLOSED(checkpoint_close) Checkpoint c;
    if (!checkpoint_model(&c, &options, &was)) { return -1; }
    if (!options.resumes || c.progress.step == 0) { return 0; }
    return checkpoint_complete(&c, true) ? c.progress.step : -1;
}

// Claims the folder of --save, as a run with these options does.
static inline bool claim(Options options) {
    static Options was;
    CLOSED(checkpoint_close) Checkpoint start;
    return checkpoint_model(&start, &options, &was) && checkpoint_claim(&options, &start);
}

// Resolves the options of a run with this number of ranks. was: the options of the checkpoint that
// it starts from.
static inline bool resolve_run(Options *options, const Options *was, int ranks) {
    return options_resolve(options, &(OptionFacts){.checkpoint = was, .ranks = ranks});
}

static inline bool read_options(Options *options, const char *text) {
    return read_given(options, text) && (options->help || options_resolve(options, NULL));
}

static inline Options options_of(const char *text) {
    Options options;
    if (!read_options(&options, text)) { die("%s: %s", text, error_text()); }
    return options;
}

// Checks the values of some options of a command: "name value, name value".
static inline void check_values(const Options *o, const char *command, const char *expected) {
    char value[OPTION_TEXT];
    for (const char *at = expected, *end = at; *end != '\0'; at = end + strspn(end, ", ")) {
        end = strstr(at, ", ") != NULL ? strstr(at, ", ") : strchr(at, '\0');
        const char *name = text_of("%.*s", (int)strcspn(at, " "), at);
        option_text(o, option_row(name), value);
        CHECK_TEXT(text_of("%s: %s %s", command, name, value),
                   text_of("%s: %.*s", command, (int)(end - at), at));
    }
}

static inline ParamLayout layout_of(const char *options) {
    Options o = options_of(options);
    ModelConfig c = model_config(&o);
    return param_layout(&c);
}

// A model small enough that a checkpoint of it is a few kilobytes.
#define TINY                                                                                     \
    "--arch llama --num-layers 2 --hidden-size 32 --num-attention-heads 2 --num-query-groups 1 " \
    "--ffn-hidden-size 32 --vocab-size 20 --make-vocab-size-divisible-by 16 --seq-length 16 "

// A fixture may not be copied after fixture_open, because its parts point to each other.
typedef struct {
    Options options;
    Group group; // one rank, unless a test changes it
    ModelConfig config;
    ParamLayout layout;
    Precision precision;
    Bucket whole;
    float *state; // [3, layout.size]: weights, first and second moments
    Fp8Scale *slots;
    float *history;
    Snapshot snapshot; // a snapshot of all the above, as one rank saves it
} Fixture;

static inline void fixture_open(Fixture *f, const char *options) {
    *f = (Fixture){.options = options_of(options), .group = {.ranks = 1}};
    f->config = model_config(&f->options);
    f->layout = param_layout(&f->config);
    bool rounds = f->options.bf16 || f->options.fp8_format != FP8_FORMAT_NONE;
    f->precision = precision_decide(&f->options, &f->config,
                                    (NumberSupport){rounds ? NUMBER_BF16 : NUMBER_FP32, NULL, 0});
    f->whole = (Bucket){0, f->layout.size};
    int64_t n = f->layout.size;
    int slots = fp8_slot_count(&f->config), length = f->precision.history_length;
    f->state = malloc_or_die((size_t)(3 * n) * sizeof(float));
    f->slots = calloc_or_die((size_t)slots, sizeof(Fp8Scale));
    f->history = calloc_or_die((size_t)(slots * length), sizeof(float));
    for (int64_t i = 0; i < 3 * n; i++) { f->state[i] = (float)(i + 1) / 7.0f; }
    for (int i = 0; i < slots; i++) {
        f->slots[i] = (Fp8Scale){1.0f / (float)(i + 2), (float)(i + 2), 0.0f, i};
        for (int put = 0; put < i; put++) {
            f->history[i * length + put % length] = (float)(1000 * i + put);
        }
    }
    bool delayed = f->precision.format != FP8_FORMAT_NONE &&
                   f->precision.recipe == FP8_RECIPE_DELAYED;
    f->snapshot = (Snapshot){
        .options = &f->options,
        .group = &f->group,
        .layout = &f->layout,
        .precision = &f->precision,
        .progress = {.step = 5,
                     .samples = 40,
                     .tokens = 320,
                     .skipped = 1,
                     .loss = 4.1,
                     .valid_loss = NAN,
                     .best_valid_loss = NAN},
        .valid_tokens = 64,
        .valid_data = "0123abcd valid.bin\n",
        .end_of_text = -1,
        .document_end = -1,
        .model = f->state,
        .num_ranges = 1,
        .ranges = &f->whole,
        .state = {{.count = n, .data = f->state},
                  {.count = n, .data = f->state + n},
                  {.count = n, .data = f->state + 2 * n}},
        .slots = delayed ? f->slots : NULL,
        .amax_history = delayed ? f->history : NULL,
    };
}

static inline void fixture_close(Fixture *f) {
    free(f->state);
    free(f->slots);
    free(f->history);
    precision_free(&f->precision);
    param_layout_free(&f->layout);
}

static inline void fixture_hash(Fixture *f) {
    Snapshot *s = &f->snapshot;
    int64_t n = 0;
    for (int i = 0; i < s->num_ranges; i++) { n += s->ranges[i].end - s->ranges[i].begin; }
    for (SavedArray *a = s->state; a < s->state + STATE_ARRAYS; a++) {
        a->count = min64(a->count, n);
        a->hash = hash_words(a->data, a->count * dtype_bytes(a->dtype), 0);
    }
}

static inline bool fixture_save(Fixture *f, int64_t step) {
    f->snapshot.progress.step = step;
    fixture_hash(f);
    return folder_make(f->options.save) && checkpoint_save(&f->snapshot);
}

// Declares a fixture, or a checkpoint that can be opened; it is closed at the end of the block.
#define FIXTURE(name, options)          \
    CLOSED(fixture_close) Fixture name; \
    fixture_open(&name, options)
#define CHECKPOINT(name, path)                \
    CLOSED(checkpoint_close) Checkpoint name; \
    CHECK(checkpoint_open(&name, path, true))
