#include "options.h"
#include "../kernels/rope.h"
#include "option_table.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const OptionRow *option_rows(int *count) {
    *count = option_table_count;
    return option_table;
}

static void *field_of(const Options *options, const OptionRow *row) {
    return (char *)options + row->offset;
}

// Edits (insert, delete, replace, swap neighbours) between two names: Damerau-Levenshtein,
// restricted.
static int edit_distance(const char *a, const char *b) {
    enum { LONGEST = 64 };
    int rows[3][LONGEST + 1], n = (int)strlen(b), m = (int)strlen(a);
    if (n > LONGEST || m > LONGEST) { return LONGEST; }
    for (int j = 0; j <= n; j++) { rows[0][j] = j; }
    for (int i = 1; i <= m; i++) {
        int *now = rows[i % 3], *above = rows[(i + 2) % 3], *two_above = rows[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best) { best = above[j] + 1; }
            if (now[j - 1] + 1 < best) { best = now[j - 1] + 1; }
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                two_above[j - 2] + 1 < best) {
                best = two_above[j - 2] + 1;
            }
            now[j] = best;
        }
    }
    return rows[m % 3][n];
}

static int find_row(const char *name) {
    for (int i = 0; i < option_table_count; i++) {
        if (strcmp(option_table[i].name, name) == 0) { return i; }
    }
    return -1;
}

const OptionRow *option_find(const char *name, bool *negated) {
    int row = find_row(name);
    *negated = row < 0 && strncmp(name, "no-", 3) == 0;
    if (*negated) { row = find_row(name + 3); }
    return row < 0 ? NULL : &option_table[row];
}

static bool fail_unknown_option(Error *err, const char *name) {
    bool negated;
    option_find(name, &negated);
    const char *nearest = NULL, *stem = negated ? name + 3 : name;
    int nearest_distance = 1 + (int)strlen(stem) / 3;
    for (int i = 0; i < option_table_count; i++) {
        int distance = edit_distance(stem, option_table[i].name);
        if (distance < nearest_distance && (!negated || option_table[i].type == OPTION_BOOL)) {
            nearest_distance = distance;
            nearest = option_table[i].name;
        }
    }
    if (nearest != NULL) {
        return fail(err, "unknown option --%s; did you mean --%s%s? (--help lists all)", name,
                    negated ? "no-" : "", nearest);
    }
    return fail(err, "unknown option --%s (--help lists all)", name);
}

static bool fail_value(Error *err, const OptionRow *row, const char *value, const char *allowed) {
    return fail(err, "--%s %s: must be %s", row->name, *value ? value : "(nothing)", allowed);
}

static bool parse_number(const OptionRow *row, const char *value, double *number, Error *err) {
    bool whole = row->type != OPTION_DOUBLE;
    char allowed[160], *end;
    snprintf(allowed, sizeof(allowed), "%s from %.16g to %.16g",
             whole ? "a whole number" : "a number", row->min, row->max);
    errno = 0;
    *number = whole ? (double)strtoll(value, &end, 10) : strtod(value, &end);
    bool plain = isdigit((unsigned char)*value) || strchr("+-.", *value) != NULL;
    if (*value == '\0' || !plain || *end != '\0' || errno != 0 ||
        !(*number >= row->min && *number <= row->max)) {
        return fail_value(err, row, value, allowed);
    }
    return true;
}

static bool parse_bool(const OptionRow *row, const char *value, bool *out, Error *err) {
    static const char *const words[] = {"false", "true", "0", "1", "no", "yes", "off", "on"};
    for (int i = 0; i < 8; i++) {
        if (strcmp(value, words[i]) == 0) {
            *out = i % 2 == 1;
            return true;
        }
    }
    return fail_value(err, row, value, "true or false");
}

static bool parse_choice(const OptionRow *row, const char *value, int *out, Error *err) {
    const char *p = row->choices;
    for (int i = 0;; i++) {
        size_t length = strcspn(p, "|");
        if (strlen(value) == length && strncmp(p, value, length) == 0) {
            *out = i;
            return true;
        }
        if (p[length] == '\0') { break; }
        p += length + 1;
    }
    char allowed[160];
    snprintf(allowed, sizeof(allowed), "one of %s", row->choices);
    return fail_value(err, row, value, allowed);
}

static bool parse_value(void *field, const OptionRow *row, const char *value, Error *err) {
    double number;
    switch (row->type) {
    case OPTION_INT:
        if (!parse_number(row, value, &number, err)) { return false; }
        *(int *)field = (int)number;
        return true;
    case OPTION_INT64:
        if (!parse_number(row, value, &number, err)) { return false; }
        *(int64_t *)field = (int64_t)number;
        return true;
    case OPTION_DOUBLE: return parse_number(row, value, field, err);
    case OPTION_BOOL: return parse_bool(row, value, field, err);
    case OPTION_CHOICE: return parse_choice(row, value, field, err);
    case OPTION_STRING:
        if (strlen(value) >= PATH_LENGTH) {
            return fail(err, "--%s: longer than %d characters", row->name, PATH_LENGTH - 1);
        }
        strcpy(field, value);
        return true;
    }
    return false;
}

OptionSource option_source(const Options *options, const char *name) {
    return (OptionSource)options->source[find_row(name)];
}

bool option_set(Options *options, const char *name, const char *value, OptionSource source,
                Error *err) {
    int i = find_row(name);
    if (i < 0) { return fail_unknown_option(err, name); }
    Options parsed = *options; // so that a weaker source is still checked
    if (!parse_value(field_of(&parsed, &option_table[i]), &option_table[i], value, err)) {
        return false;
    }
    if (source < options->source[i]) { return true; }
    *options = parsed;
    options->source[i] = (unsigned char)source;
    return true;
}

// Reads argv[*i] (and the next one where it is the value), moving *i to the last one read.
static bool read_argument(Options *options, int argc, char **argv, int *i, Error *err) {
    const char *arg = argv[*i];
    if (strncmp(arg, "--", 2) != 0 || arg[2] == '\0') {
        return fail(err, "unexpected argument '%s': options start with -- (--help lists all)", arg);
    }
    char name[PATH_LENGTH];
    const char *equals = strchr(arg, '=');
    size_t length = equals != NULL ? (size_t)(equals - arg) - 2 : strlen(arg) - 2;
    if (length >= sizeof(name)) { return fail(err, "option too long: %.60s...", arg); }
    memcpy(name, arg + 2, length);
    name[length] = '\0';

    bool negated;
    const OptionRow *row = option_find(name, &negated);
    if (row == NULL) { return fail_unknown_option(err, name); }
    if (row->type == OPTION_BOOL && equals == NULL) {
        return option_set(options, row->name, negated ? "false" : "true", SOURCE_COMMAND, err);
    }
    if (negated) { return fail(err, "%s: only a flag can be negated, and without a value", arg); }
    if (equals == NULL && ++*i >= argc) {
        return fail(err, "--%s needs a value (%s)", name, row->choices);
    }
    return option_set(options, name, equals != NULL ? equals + 1 : argv[*i], SOURCE_COMMAND, err);
}

static bool apply_preset(Options *options, Error *err) {
    const Preset *preset = NULL;
    for (int i = 0; i < preset_table_count; i++) {
        if (strcmp(preset_table[i].name, options->model) == 0) { preset = &preset_table[i]; }
    }
    if (preset == NULL) {
        char names[400] = "";
        for (int i = 0; i < preset_table_count; i++) {
            size_t used = strlen(names);
            snprintf(names + used, sizeof(names) - used, "%s%s", i > 0 ? ", " : "",
                     preset_table[i].name);
        }
        return fail(err, "--model %s: must be one of %s", options->model, names);
    }
    char settings[1024], *state, *name;
    snprintf(settings, sizeof(settings), "%s", preset->settings);
    for (name = strtok_r(settings, " ", &state); name != NULL; name = strtok_r(NULL, " ", &state)) {
        if (!option_set(options, name, strtok_r(NULL, " ", &state), SOURCE_PRESET, err)) {
            return false;
        }
    }
    return true;
}

static void derive_values(Options *o) {
    int third = (8 * o->hidden_size + 2) / 3;
    if (o->num_query_groups == 0) { o->num_query_groups = o->num_attention_heads; }
    if (o->ffn_hidden_size == 0) {
        o->ffn_hidden_size = o->arch == ARCH_GPT2 ? 4 * o->hidden_size
                                                  : (int)round_up64(third, 128);
    }
    if (o->max_position_embeddings == 0) { o->max_position_embeddings = o->seq_length; }
    if (o->lr_decay_iters == 0) { o->lr_decay_iters = o->train_iters; }
    if (o->lr_wsd_decay_iters == 0) { o->lr_wsd_decay_iters = o->lr_decay_iters / 5; }
}

static bool check_values(const Options *o, Error *err) {
    int heads = o->num_attention_heads, head_size = o->hidden_size / heads;
    if (o->hidden_size % heads != 0) {
        return fail(err, "--num-attention-heads %d: must divide --hidden-size %d", heads,
                    o->hidden_size);
    }
    if (heads % o->num_query_groups != 0) {
        return fail(err, "--num-query-groups %d: must divide --num-attention-heads %d",
                    o->num_query_groups, heads);
    }
    if (o->arch == ARCH_GPT2 && o->num_query_groups != heads) {
        return fail(err, "--num-query-groups %d: gpt2 has as many as --num-attention-heads (%d)",
                    o->num_query_groups, heads);
    }
    if (o->arch == ARCH_LLAMA && head_size % 2 != 0) {
        return fail(err,
                    "--num-attention-heads %d: llama's rotary embedding needs an even head size, "
                    "and --hidden-size %d makes it %d",
                    heads, o->hidden_size, head_size);
    }
    if (o->rope_scaling == ROPE_LLAMA3 && o->rope_high_freq_factor <= o->rope_low_freq_factor) {
        return fail(err, "--rope-high-freq-factor %g: must be above --rope-low-freq-factor %g",
                    o->rope_high_freq_factor, o->rope_low_freq_factor);
    }
    if (o->eval_only && o->valid_data[0] == '\0' && o->eval_choices[0] == '\0') {
        return fail(err, "--eval-only: needs --valid-data or --eval-choices");
    }
    if (o->seq_length > o->max_position_embeddings) {
        return fail(err, "--seq-length %d: must be at most --max-position-embeddings %d",
                    o->seq_length, o->max_position_embeddings);
    }
    if ((int64_t)o->micro_batch_size * o->seq_length > INT32_MAX) {
        return fail(err, "--micro-batch-size %d x --seq-length %d: must be fewer than 2^31 tokens",
                    o->micro_batch_size, o->seq_length);
    }
    if (o->min_lr > o->lr) {
        return fail(err, "--min-lr %g: must be at most --lr %g", o->min_lr, o->lr);
    }
    int bf16_layers = o->num_layers_at_start_in_bf16 + o->num_layers_at_end_in_bf16;
    if (o->first_last_layers_bf16 && bf16_layers > o->num_layers) {
        return fail(err,
                    "--num-layers-at-start-in-bf16 %d and --num-layers-at-end-in-bf16 %d: must be "
                    "at most --num-layers %d together",
                    o->num_layers_at_start_in_bf16, o->num_layers_at_end_in_bf16, o->num_layers);
    }
    if (strcmp(o->resume, "latest") == 0 && o->save[0] == '\0') {
        return fail(err, "--resume latest: needs --save DIR, where to look");
    }
    if (o->list_checkpoints && o->save[0] == '\0') {
        return fail(err, "--list-checkpoints: needs --save DIR, where to look");
    }
    return true;
}

bool options_finish_batch(Options *o, int ranks, Error *err) {
    int64_t whole = (int64_t)o->micro_batch_size * ranks;
    if (o->global_batch_size == 0) { o->global_batch_size = (int)whole; }
    if (o->global_batch_size % whole != 0) {
        return fail(err,
                    "--global-batch-size %d: must be a multiple of --micro-batch-size %d x %d "
                    "rank%s",
                    o->global_batch_size, o->micro_batch_size, ranks, ranks > 1 ? "s" : "");
    }
    return true;
}

bool options_read(Options *options, int argc, char **argv, Error *err) {
    memset(options, 0, sizeof(*options));
    options->ranks = 1;
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        if (!option_set(options, row->name, row->fallback, SOURCE_DEFAULT, err)) { return false; }
    }
    for (int i = 1; i < argc; i++) {
        if (!read_argument(options, argc, argv, &i, err)) { return false; }
    }
    if (options->help || options->version) { return true; }
    if (options->config[0] != '\0' && !options_read_config(options, options->config, err)) {
        return false;
    }
    if (!apply_preset(options, err)) { return false; }
    derive_values(options);
    options->ranks = options->gpus;
    return check_values(options, err);
}

void options_parse(Options *options, int argc, char **argv) {
    Error err;
    if (!options_read(options, argc, argv, &err)) { die("%s", err.text); }
    if (options->help) {
        options_help(stdout, argv[0]);
        exit(EXIT_SUCCESS);
    }
    if (options->version) {
        printf("llm8.c %s\n", LLM8_VERSION);
        exit(EXIT_SUCCESS);
    }
}

const char *option_text(const Options *options, const OptionRow *row, char out[OPTION_TEXT]) {
    const void *field = field_of(options, row);
    switch (row->type) {
    case OPTION_INT: snprintf(out, OPTION_TEXT, "%d", *(const int *)field); break;
    case OPTION_INT64:
        snprintf(out, OPTION_TEXT, "%lld", (long long)*(const int64_t *)field);
        break;
    case OPTION_DOUBLE: {
        double value = *(const double *)field;
        snprintf(out, OPTION_TEXT, "%.6g", value);
        if (strtod(out, NULL) != value) { snprintf(out, OPTION_TEXT, "%.17g", value); }
        break;
    }
    case OPTION_BOOL:
        snprintf(out, OPTION_TEXT, "%s", *(const bool *)field ? "true" : "false");
        break;
    case OPTION_STRING: snprintf(out, OPTION_TEXT, "%s", (const char *)field); break;
    case OPTION_CHOICE: {
        const char *p = row->choices;
        for (int i = 0; i < *(const int *)field; i++) { p += strcspn(p, "|") + 1; }
        snprintf(out, OPTION_TEXT, "%.*s", (int)strcspn(p, "|"), p);
        break;
    }
    }
    return out;
}
