// Reads options from the command line and the --config file; then applies presets, derived values
// and the model of a checkpoint, and checks all.
//
// The file of --config has one option a line, in any order:
//   name value      as on the command line, with or without the -- and with or without a =
//   name            a flag; no-name switches it off
//   name "value"    for a value that begins or ends with a blank, or has a # after a blank;
//                   \" \\ and \n stand for a quote, a backslash and a new line
//   # comment       on a line of its own or after a value
//   config FILE     reads another file at this place; a later line wins
#include "options.h"
#include "../base/io.h"
#include "../kernels/rope.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLANK " \t\r\n"
#define BYTE_ORDER_MARK "\xef\xbb\xbf" // some editors begin UTF-8 with it

// ---- names --------------------------------------------------------------------------------------

// The index of a word in a list, -1: it is not there. An underscore in the word matches a hyphen.
static int find_word(const char *list, char separator, const char *word) {
    for (int i = 0;; i++) {
        const char *w = word;
        for (; *w != '\0' && (*w == *list || (*w == '_' && *list == '-')); w++) { list++; }
        if (*w == '\0' && (*list == '\0' || *list == separator)) { return i; }
        while (*list != '\0' && *list != separator) { list++; }
        if (*list++ == '\0') { return -1; }
    }
}

const OptionRow *option_row(const char *name) {
    for (int i = 0; i < option_table_count; i++) {
        if (find_word(option_table[i].name, '\0', name) == 0) { return &option_table[i]; }
    }
    return NULL;
}

// Whether a name begins with "no-".
static bool is_negated(const char *name) {
    return strncmp(name, "no", 2) == 0 && (name[2] == '-' || name[2] == '_');
}

// The row of a name, which may begin with "no-" if it is a flag's; NULL: no option has it.
static const OptionRow *find_option(const char *name, bool *negated) {
    const OptionRow *row = option_row(name);
    *negated = row == NULL && is_negated(name);
    return *negated ? option_row(name + 3) : row;
}

// The number of characters to insert, delete or replace between two names (Levenshtein).
static int edit_distance(const char *a, const char *b) {
    enum { LONGEST = 64 };
    int d[LONGEST + 1][LONGEST + 1], m = (int)strlen(a), n = (int)strlen(b);
    if (m > LONGEST || n > LONGEST) { return LONGEST; }
    for (int i = 0; i <= m; i++) {
        for (int j = 0; j <= n; j++) {
            d[i][j] = i + j;
            if (i == 0 || j == 0) { continue; }
            int indel = 1 + (d[i - 1][j] < d[i][j - 1] ? d[i - 1][j] : d[i][j - 1]);
            int replace = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            d[i][j] = replace < indel ? replace : indel;
        }
    }
    return d[m][n];
}

// Suggests an option for an unknown name, as "; did you mean --lr?"; or "".
static const char *suggestion(const char *name, char out[160]) {
    bool negated = is_negated(name);
    const char *nearest = NULL, *stem = negated ? name + 3 : name;
    int nearest_distance = 1 + (int)strlen(stem) / 3;
    for (int i = 0; i < option_table_count; i++) {
        int distance = edit_distance(stem, option_table[i].name);
        if (distance < nearest_distance && (!negated || option_table[i].type == OPTION_BOOL)) {
            nearest_distance = distance;
            nearest = option_table[i].name;
        }
    }
    for (const ForeignName *f = foreign_names; f->ours != NULL; f++) {
        if (find_word(f->names, ' ', name) >= 0) { nearest = f->ours; }
    }
    *out = '\0';
    if (nearest != NULL) {
        snprintf(out, 160, "; did you mean --%s%s?", negated ? "no-" : "", nearest);
    }
    return out;
}

static bool fail_unknown(const char *name) {
    char near[160];
    return fail("unknown option --%s%s (--help lists all)", name, suggestion(name, near));
}

// ---- values -------------------------------------------------------------------------------------

static bool parse_value(void *field, const OptionRow *row, const char *value) {
    static const char *const words[] = {"false", "true", "0", "1", "no", "yes", "off", "on"};
    char allowed[160];
    if (row->type == OPTION_STRING) {
        if (strlen(value) >= PATH_LENGTH) {
            return fail("--%s: longer than %d characters", row->name, PATH_LENGTH - 1);
        }
        strcpy(field, value);
        return true;
    }
    if (row->type == OPTION_BOOL) {
        for (int i = 0; i < 8; i++) {
            if (strcmp(value, words[i]) != 0) { continue; }
            *(bool *)field = i % 2 == 1;
            return true;
        }
        strcpy(allowed, "true or false");
    } else if (row->type == OPTION_CHOICE) {
        int choice = find_word(row->choices, '|', value);
        if (choice >= 0) {
            *(int *)field = choice;
            return true;
        }
        snprintf(allowed, sizeof(allowed), "one of %s", row->choices);
    } else {
        bool whole = row->type != OPTION_DOUBLE;
        char *end;
        errno = 0;
        // whole numbers do not go through double, which cannot hold 2^53 + 1
        int64_t count = whole ? strtoll(value, &end, 10) : 0;
        double number = whole ? 0 : strtod(value, &end);
        bool plain = isdigit((unsigned char)*value) || (*value != '\0' && strchr("+-.", *value));
        bool within = whole ? count >= (int64_t)row->min && count <= (int64_t)row->max
                            : number >= row->min && number <= row->max;
        if (plain && *end == '\0' && errno == 0 && within) {
            switch (row->type) {
            case OPTION_INT: *(int *)field = (int)count; break;
            case OPTION_INT64: *(int64_t *)field = count; break;
            default: *(double *)field = number;
            }
            return true;
        }
        snprintf(allowed, sizeof(allowed), "%s from %.16g to %.16g",
                 whole ? "a whole number" : "a number", row->min, row->max);
    }
    return fail("--%s %s: must be %s", row->name, *value ? value : "(nothing)", allowed);
}

OptionSource option_source(const Options *options, const char *name) {
    return (OptionSource)options->source[option_row(name) - option_table];
}

void option_set_source(Options *options, const char *name, OptionSource source) {
    options->source[option_row(name) - option_table] = (unsigned char)source;
}

bool option_set(Options *options, const char *name, const char *value, OptionSource source) {
    const OptionRow *row = option_row(name);
    if (row == NULL) { return fail_unknown(name); }
    Options parsed = *options; // a copy, so that the value of a weaker source is checked too
    if (!parse_value((char *)&parsed + row->offset, row, value)) { return false; }
    if (source < options->source[row - option_table]) { return true; }
    *options = parsed;
    options->source[row - option_table] = (unsigned char)source;
    return true;
}

bool options_set(Options *options, OptionSource source, const char *format, ...) {
    char settings[1024], *state, *name;
    va_list args;
    va_start(args, format);
    vsnprintf(settings, sizeof(settings), format, args);
    va_end(args);
    for (name = strtok_r(settings, " ", &state); name != NULL; name = strtok_r(NULL, " ", &state)) {
        if (!option_set(options, name, strtok_r(NULL, " ", &state), source)) { return false; }
    }
    return true;
}

// The command line, or a file of --config.
typedef struct {
    OptionSource source;
    int depth;              // how many files lead to what this file names
    bool told;              // the error text names a file and a line already
    bool sets[OPTIONS_MAX]; // the rows that it has set so far
    const char **files;     // the command line: what --config names, in order
    int num_files;
} Place;

static bool read_config(Options *options, const char *path, int depth, bool *told);

// Sets an option that a place gives. The last value wins.
static bool set_row(Options *options, Place *place, const OptionRow *row, const char *value) {
    char before[OPTION_TEXT], now[OPTION_TEXT];
    int i = (int)(row - option_table);
    option_text(options, row, before);
    if (!option_set(options, row->name, value, place->source)) { return false; }
    if (row->offset == offsetof(Options, config)) {
        if (place->source == SOURCE_CONFIG) {
            return read_config(options, value, place->depth, &place->told);
        }
        place->files[place->num_files++] = value;
    } else if (place->sets[i] && strcmp(before, option_text(options, row, now)) != 0) {
        options->repeated[i] = row->effect != EFFECT_ACTION;
    }
    place->sets[i] = true;
    return true;
}

// Sets the option of a name, which may be a flag's with "no-" before it. value NULL: none is given.
static bool set_named(Options *options, Place *place, const char *name, const char *value) {
    bool negated;
    const OptionRow *row = find_option(name, &negated);
    if (row == NULL) { return fail_unknown(name); }
    if (row->type == OPTION_BOOL && value == NULL) {
        value = negated ? "false" : "true";
    } else if (negated) {
        return fail("--%s: only a flag can be negated, and without a value", name);
    } else if (value == NULL) {
        return fail("--%s needs a value (%s)", name, row->choices);
    }
    return set_row(options, place, row, value);
}

// Finds a pattern that matches exactly these files, as the one that the shell has expanded did.
static bool fold_files(char pattern[PATH_LENGTH], const char *option, char **files, int count) {
    int64_t shortest = INT64_MAX, begin = INT64_MAX, end = INT64_MAX; // begin, end: in common
    for (int i = 0; i < count; i++) {
        const char *file = files[i], *first = files[0];
        int64_t length = (int64_t)strlen(file), first_length = (int64_t)strlen(first), same = 0;
        if (access(file, F_OK) != 0) { return fail("--%s %s: %s", option, file, strerror(errno)); }
        while (same < length && file[same] == first[same]) { same++; }
        begin = min64(begin, same);
        shortest = min64(shortest, length);
        same = 0;
        while (same < shortest && file[length - 1 - same] == first[first_length - 1 - same]) {
            same++;
        }
        end = min64(end, same);
    }
    end = min64(end, shortest - begin);
    for (int listed = 0; listed < 2; listed++) { // first a*z, then a{b,c}z
        size_t used = pattern_add(pattern, 0, files[0], (size_t)begin, true);
        for (int i = 0; i < (listed ? count : 1); i++) {
            size_t own = listed ? strlen(files[i]) - (size_t)(begin + end) : 0;
            used = pattern_add(pattern, used, !listed ? "*" : i == 0 ? "{" : ",", 1, false);
            used = pattern_add(pattern, used, files[i] + begin, own, true);
        }
        used = pattern_add(pattern, used, "}", listed, false);
        used = pattern_add(pattern, used, files[0] + strlen(files[0]) - end, (size_t)end, true);
        if (used == PATH_LENGTH) { continue; }
        glob_t found;
        bool same = glob(pattern, GLOB_BRACE, NULL, &found) == 0 && found.gl_pathc == (size_t)count;
        for (int i = 0; same && i < count; i++) {
            size_t j = 0;
            while (j < found.gl_pathc && strcmp(found.gl_pathv[j], files[i]) != 0) { j++; }
            same = j < found.gl_pathc;
        }
        globfree(&found);
        if (same) { return true; }
    }
    return fail("--%s: %d files, from %s to %s: quote the pattern, so that the shell does not "
                "expand it",
                option, count, files[0], files[count - 1]);
}

// The option that an argument names, as --name or --name=value, and that name; NULL: none.
static const OptionRow *named_option(const char *arg, char name[PATH_LENGTH], bool *negated) {
    size_t length = strcspn(arg, "=");
    if (strncmp(arg, "--", 2) != 0) { return NULL; }
    snprintf(name, PATH_LENGTH, "%.*s", (int)length - 2, arg + 2);
    return find_option(name, negated);
}

// Reads argv[*i], and its value if that is a separate argument. Moves *i to the last argument read.
static bool read_argument(Options *options, Place *place, int argc, char **argv, int *i) {
    const char *arg = strcmp(argv[*i], "-h") == 0 ? "--help" : argv[*i];
    char name[PATH_LENGTH] = "", near[160], pattern[PATH_LENGTH];
    if (strncmp(arg, "--", 2) != 0 || arg[2] == '\0') {
        return fail("unexpected argument '%s': options start with --%s (--help lists all)", arg,
                    *arg == '-' ? suggestion(arg, near) : "");
    }
    bool negated = false, ignored;
    const OptionRow *row = named_option(arg, name, &negated);
    const char *equals = strchr(arg, '='), *value = equals != NULL ? equals + 1 : NULL;
    bool separate = row != NULL && row->type != OPTION_BOOL && !negated && value == NULL;
    // an option is no value: in `--save --quiet` the value is missing
    if (separate && *i + 1 < argc && named_option(argv[*i + 1], pattern, &ignored) == NULL) {
        char **values = argv + ++*i;
        value = *values;
        bool many = strcmp(row->choices, "GLOB") == 0 && strncmp(value, "--", 2) != 0;
        while (many && *i + 1 < argc && argv[*i + 1][0] != '-') { ++*i; }
        int count = (int)(argv + *i - values) + 1;
        if (count > 1) {
            if (!fold_files(pattern, row->name, values, count)) { return false; }
            value = pattern;
        }
    }
    return set_named(options, place, name, value);
}

// ---- the configuration file ---------------------------------------------------------------------

// Removes the quotes around a value in place. Only a comment may follow them.
static bool unquote(char *value) {
    char *out = value, *in = value + 1;
    for (; *in != '"'; in++) {
        bool escape = *in == '\\' && (in[1] == '"' || in[1] == '\\' || in[1] == 'n');
        if (escape) { in++; }
        if (*in == '\0') { return fail("a value without its closing quotation mark"); }
        *out++ = escape && *in == 'n' ? '\n' : *in;
    }
    in += 1 + strspn(in + 1, BLANK);
    *out = '\0';
    return *in == '\0' || *in == '#' || fail("after the closing quotation mark: %.40s", in);
}

// Reads "  --name = value  # comment".
static bool read_line(Options *options, Place *place, char *line) {
    char *name = line + strspn(line, BLANK);
    if (*name == '#') { return true; }
    if (strncmp(name, "--", 2) == 0) { name += 2; }
    char *end = name + strcspn(name, BLANK "="), *value = end + strspn(end, BLANK "=");
    if (*value == '"') {
        if (!unquote(value)) { return false; }
    } else { // the value ends before a comment, which is a # after a blank
        char *value_end = value;
        for (char *p = value; *p != '\0' && !(*p == '#' && isspace((unsigned char)p[-1])); p++) {
            if (!isspace((unsigned char)*p)) { value_end = p + 1; }
        }
        *value_end = '\0';
    }
    *end = '\0';
    if (*name == '\0' && *value == '\0') { return true; }
    bool negated;
    const OptionRow *row = find_option(name, &negated);
    bool flag = row != NULL && row->type == OPTION_BOOL && *value == '\0';
    return set_named(options, place, name, flag ? NULL : value);
}

// depth: how many files lead to this one. *told: the error is in a line of it, which the text
// names.
static bool read_config(Options *options, const char *path, int depth, bool *told) {
    enum { DEEPEST = 16 };
    Place place = {.source = SOURCE_CONFIG, .depth = depth + 1};
    FILE *file = depth < DEEPEST ? fopen(path, "r") : NULL;
    if (depth == DEEPEST) { return fail("--config %s: %d files lead to it", path, depth); }
    if (file == NULL) { return fail("--config %s: %s", path, strerror(errno)); }
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    bool ok = true;
    for (int number = 1; ok && (length = getline(&line, &room, file)) >= 0; number++) {
        if (number == 1 && strncmp(line, BYTE_ORDER_MARK, 3) == 0) { memset(line, ' ', 3); }
        ok = strlen(line) == (size_t)length ? read_line(options, &place, line)
                                            : fail("a NUL byte; options are text");
        if (!ok && !place.told) { fail("%s, line %d: %s", path, number, error_text()); }
        *told = !ok;
    }
    if (ok && ferror(file)) { ok = fail("--config %s: %s", path, strerror(errno)); }
    free(line);
    fclose(file);
    return ok;
}

// ---- presets, derived values, checks ------------------------------------------------------------

static const Preset *find_preset(const char *name) {
    for (int i = 0; i < preset_table_count; i++) {
        if (strcmp(preset_table[i].name, name) == 0) { return &preset_table[i]; }
    }
    return NULL;
}

static bool apply_preset(Options *options) {
    const Preset *preset = find_preset(options->model);
    char names[400] = "";
    if (preset == NULL) {
        for (int i = 0; i < preset_table_count; i++) {
            size_t used = strlen(names);
            snprintf(names + used, sizeof(names) - used, "%s%s", i > 0 ? ", " : "",
                     preset_table[i].name);
        }
        return fail("--model %s: must be one of %s", options->model, names);
    }
    return options_set(options, SOURCE_PRESET, "%s", preset->settings);
}

// Resets a value of a preset that does not fit the given options, so that it is derived again.
static void yield(const Options *o, const char *name, int *value, bool fits) {
    if (*value != 0 && !fits && option_source(o, name) < SOURCE_CHECKPOINT) { *value = 0; }
}

// A 0 that is given asks for the derived value, too, which then stays out of config.txt.
static void derive_iters(Options *o, const char *name, int64_t *value, int64_t derived) {
    if (*value != 0) { return; }
    *value = derived;
    option_set_source(o, name, SOURCE_DEFAULT);
}

static void derive_schedule(Options *o) {
    derive_iters(o, "lr-decay-iters", &o->lr_decay_iters, o->train_iters);
    if (o->lr_decay_style == DECAY_WSD) {
        derive_iters(o, "lr-wsd-decay-iters", &o->lr_wsd_decay_iters, 2 * o->lr_decay_iters / 5);
    }
}

// docs/muon.md has the measurements.
static void derive_rates(Options *o) {
    bool muon = o->optimizer == OPTIMIZER_MUON, loads = o->load[0] != '\0';
    if (o->embedding_lr_mult == -1) { o->embedding_lr_mult = loads ? 1 : muon ? 2 : 4; }
    if (o->vector_lr_mult == -1) { o->vector_lr_mult = loads || muon ? 1 : 4; }
}

// Derives every value that does not belong to the model, and was not given.
static void derive_run(Options *o) {
    derive_schedule(o);
    derive_rates(o);
    bool asked = option_source(o, "check-interval") > SOURCE_DEFAULT;
    if (!o->deterministic && !asked) { o->check_interval = 0; }
}

static void derive_values(Options *o) {
    int C = o->hidden_size, *heads = &o->num_attention_heads, *groups = &o->num_query_groups;
    int *size = &o->kv_channels;
    bool gpt2 = o->arch == ARCH_GPT2;
    yield(o, "kv-channels", size, !gpt2);
    yield(o, "num-attention-heads", heads, *size > 0 || C % max64(1, *heads) == 0);
    if (*heads == 0) {
        int divisor = (int)min64(*size > 0 ? *size : 64, C);
        while (C % divisor != 0 || (divisor % 2 != 0 && divisor > 1)) { divisor--; }
        *heads = C / divisor;
    }
    if (*size == 0 && C % *heads == 0) { *size = C / *heads; }
    yield(o, "num-query-groups", groups,
          gpt2 ? *groups == *heads : *heads % max64(1, *groups) == 0);
    if (*groups == 0) { *groups = *heads; }
    bool preset = option_source(o, "qk-layernorm") < SOURCE_CHECKPOINT;
    if (gpt2 && preset) { o->qk_layernorm = false; }
    if (o->ffn_hidden_size == 0) {
        o->ffn_hidden_size = gpt2 ? 4 * C : (int)round_up64((8 * C + 2) / 3, 128);
    }
    if (o->max_position_embeddings == 0) { o->max_position_embeddings = o->seq_length; }
    // if only a sample or an evaluation is requested, nothing else is printed
    if (!options_train(o) && option_source(o, "quiet") == SOURCE_DEFAULT) { o->quiet = true; }
}

static bool of_model(const OptionRow *row) {
    return strcmp(row->group, "Model") == 0;
}

// In GPT-2 the number of positions is the shape of a learned embedding.
bool option_is_shape(const OptionRow *row, Arch arch) {
    return row->effect == EFFECT_SHAPE ||
           (arch == ARCH_GPT2 && strcmp(row->name, "max-position-embeddings") == 0);
}

bool option_is_taken(const OptionRow *row, const Options *continues) {
    if (continues == NULL || of_model(row)) { return of_model(row); }
    bool place = row->type == OPTION_STRING && row->effect == EFFECT_NOTHING &&
                 (strcmp(row->choices, "DIR") == 0 || strcmp(row->choices, "FILE") == 0);
    bool evaluates = row->effect == EFFECT_PRECISION || row->effect == EFFECT_EVALUATION ||
                     row->offset == offsetof(Options, global_batch_size) ||
                     row->offset == offsetof(Options, micro_batch_size);
    bool machine = strcmp(row->group, "Several GPUs") == 0 ||
                   row->offset == offsetof(Options, device_memory_gib) ||
                   row->offset == offsetof(Options, optimizer_cpu_offload);
    return !place && !machine && row->effect != EFFECT_ACTION &&
           (options_train(continues) || evaluates);
}

// Whether a value is the default of this version, or what this version derives from the other
// values. Such a value, if it was not given, is derived again from those of the resumed run.
static bool follows(const Options *was, const OptionRow *row) {
    char then[OPTION_TEXT], now[OPTION_TEXT];
    Options again = *was;
    or_die(option_set(&again, row->name, row->fallback, SOURCE_COMMAND));
    option_set_source(&again, row->name, SOURCE_DEFAULT);
    derive_run(&again);
    return strcmp(option_text(was, row, then), option_text(&again, row, now)) == 0;
}

bool options_continue(Options *o, const Options *was) {
    char value[OPTION_TEXT];
    for (const OptionRow *row = option_table; row < option_table + option_table_count; row++) {
        int source = was->source[row - option_table];
        bool set = !of_model(row) && source != SOURCE_DEFAULT;
        if (set && (source == SOURCE_CONFIG || !follows(was, row)) &&
            !option_set(o, row->name, option_text(was, row, value), SOURCE_CHECKPOINT)) {
            return false;
        }
    }
    return true;
}

// Sets the options that are not given to those of a checkpoint's model, in two passes. The first
// leaves out values that are 0, which are derived from others; the second (derived) sets those
// whose derived value differs. shape: collects what replaces the values of a preset of another
// shape.
static bool take_options(Options *o, const Options *model, bool derived, char shape[256]) {
    bool named = option_source(o, "model") >= SOURCE_CONFIG,
         loads = strcmp(o->origin, o->load) == 0;
    char now[OPTION_TEXT], was[OPTION_TEXT];
    for (const OptionRow *row = option_table; row < option_table + option_table_count; row++) {
        OptionSource source = (OptionSource)o->source[row - option_table];
        bool is_shape = option_is_shape(row, (Arch)model->arch);
        bool derives = strcmp(derived ? option_text(model, row, was) : option_text(o, row, now),
                              "0") == 0 &&
                       (source < SOURCE_CONFIG || is_shape);
        if (derives || !of_model(row) || model->source[row - option_table] == SOURCE_DEFAULT ||
            row->offset == offsetof(Options, model) ||
            strcmp(option_text(o, row, now), option_text(model, row, was)) == 0) {
            continue;
        }
        if (source >= SOURCE_CONFIG && is_shape) {
            return fail("--%s %s: it is %s in the checkpoint %s; leave the option out", row->name,
                        now, was, o->origin);
        }
        if (source >= SOURCE_CONFIG) {
            if (!derived && loads && row->effect == EFFECT_RESULTS) {
                warn("--%s %s: the weights of the checkpoint %s were trained with %s", row->name,
                     now, o->origin, was);
            }
            continue;
        }
        if (named && is_shape && source == SOURCE_PRESET) {
            size_t used = strlen(shape);
            snprintf(shape + used, 256 - used, " --%s %.40s", row->name, was);
        }
        if (!option_set(o, row->name, was, SOURCE_CHECKPOINT)) { return false; }
    }
    return true;
}

// Sets the options that are not given to those of the checkpoint's model. It warns if a given
// preset has another shape, and if an option differs from what the weights of --load were trained
// with, or sequences are longer.
// (--resume prints every option that differs, when it opens the checkpoint.)
static bool take_model(Options *o, const Options *model) {
    char shape[256] = "";
    if (!take_options(o, model, false, shape)) { return false; }
    derive_values(o);
    if (!take_options(o, model, true, shape)) { return false; }
    if (shape[0] != '\0') {
        warn("--model %s: the checkpoint %s has another shape, which is used instead:%s", o->model,
             o->origin, shape);
    }
    // Llama's number of positions is no tensor's shape, so it may grow
    int trained = model->max_position_embeddings;
    bool llama = o->arch == ARCH_LLAMA;
    if (llama && o->seq_length > o->max_position_embeddings &&
        option_source(o, "max-position-embeddings") < SOURCE_CONFIG) {
        o->max_position_embeddings = o->seq_length;
        option_set_source(o, "max-position-embeddings", SOURCE_DEFAULT); // derived, not taken
    }
    if (llama && strcmp(o->origin, o->load) == 0 && trained > 0 && o->seq_length > trained) {
        warn("--seq-length %d: the weights of the checkpoint %s were trained with at most %d",
             o->seq_length, o->origin, trained);
    }
    return true;
}

// Takes one entry from the front of a list of steps: "4200-4300," or "5000,"; the last has no
// comma.
static bool next_steps(const char **list, int64_t *first, int64_t *last) {
    char *end;
    if (!isdigit((unsigned char)**list)) { return false; }
    *first = *last = strtoll(*list, &end, 10);
    if (*end == '-' && isdigit((unsigned char)end[1])) { *last = strtoll(end + 1, &end, 10); }
    bool more = *end == ',' && end[1] != '\0';
    *list = end + more;
    return *first >= 1 && *last >= *first && (more || *end == '\0');
}

int64_t options_next_skip(const Options *o, int64_t step) {
    const char *list = o->iterations_to_skip;
    int64_t first, last, next = INT64_MAX;
    while (*list != '\0' && next_steps(&list, &first, &last)) {
        if (last >= step) { next = min64(next, max64(first, step)); }
    }
    return next;
}

const char *option_taken(const Options *o, const char *name, char out[PATH_LENGTH]) {
    bool taken = option_source(o, name) == SOURCE_CHECKPOINT;
    return path_format(out, "%s%s%s", taken ? " (of the checkpoint " : "", taken ? o->origin : "",
                       taken ? ")" : "");
}

static bool check_values(const Options *o) {
    const char *steps = o->iterations_to_skip;
    for (int64_t first, last; *steps != '\0';) {
        if (!next_steps(&steps, &first, &last)) {
            return fail("--iterations-to-skip %s: must be steps or ranges of steps, as "
                        "4200-4300,5000",
                        o->iterations_to_skip);
        }
    }
    char from[PATH_LENGTH];
    int heads = o->num_attention_heads;
    bool gpt2 = o->arch == ARCH_GPT2;
    if (o->kv_channels == 0) {
        return fail("--num-attention-heads %d: must divide --hidden-size %d%s", heads,
                    o->hidden_size, gpt2 ? "" : ", or give --kv-channels");
    }
    if (heads % o->num_query_groups != 0) {
        return fail("--num-query-groups %d: must divide --num-attention-heads %d",
                    o->num_query_groups, heads);
    }
    if (gpt2 && o->kv_channels * heads != o->hidden_size) {
        return fail("--kv-channels %d: gpt2 has --hidden-size %d / --num-attention-heads %d",
                    o->kv_channels, o->hidden_size, heads);
    }
    if (gpt2 && o->qk_layernorm) {
        return fail("--qk-layernorm: gpt2 has none; --arch llama can have it");
    }
    if (o->qk_layernorm && o->add_qkv_bias) {
        return fail("--qk-layernorm: no model of transformers has it together with --add-qkv-bias");
    }
    if (gpt2 && o->num_query_groups != heads) {
        return fail("--num-query-groups %d: gpt2 has as many as --num-attention-heads (%d)",
                    o->num_query_groups, heads);
    }
    if (o->arch == ARCH_LLAMA && o->kv_channels % 2 != 0) {
        return fail("--kv-channels %d: llama's rotary embedding needs an even head size (0: "
                    "--hidden-size %d / --num-attention-heads %d)",
                    o->kv_channels, o->hidden_size, heads);
    }
    if (o->rope_scaling == ROPE_LLAMA3 && o->rope_high_freq_factor <= o->rope_low_freq_factor) {
        return fail("--rope-high-freq-factor %g: must be above --rope-low-freq-factor %g",
                    o->rope_high_freq_factor, o->rope_low_freq_factor);
    }
    if (o->sample_prompt[0] != '\0' && o->sample_tokens[0] != '\0') {
        return fail("--sample-tokens: --sample-prompt is given too; leave one of them out");
    }
    if (o->eval_only && o->valid_data[0] == '\0' && o->eval_choices[0] == '\0') {
        return fail("--eval-only: needs --valid-data or --eval-choices");
    }
    if (o->seq_length > o->max_position_embeddings) {
        return fail("--seq-length %d: must be at most --max-position-embeddings %d", o->seq_length,
                    o->max_position_embeddings);
    }
    if ((int64_t)o->micro_batch_size * o->seq_length > INT32_MAX) {
        return fail("--micro-batch-size %d x --seq-length %d: must be fewer than 2^31 tokens",
                    o->micro_batch_size, o->seq_length);
    }
    if (o->embedding_lr_mult < 0 || o->vector_lr_mult < 0) {
        bool embedding = o->embedding_lr_mult < 0;
        return fail("--%s-lr-mult %g: must be -1, 0 or more", embedding ? "embedding" : "vector",
                    embedding ? o->embedding_lr_mult : o->vector_lr_mult);
    }
    if (o->min_lr > o->lr) {
        return fail("--min-lr %g%s: must be at most --lr %g", o->min_lr,
                    option_taken(o, "min-lr", from), o->lr);
    }
    int bf16_layers = o->num_layers_at_start_in_bf16 + o->num_layers_at_end_in_bf16;
    if (o->first_last_layers_bf16 && bf16_layers > o->num_layers) {
        return fail("--num-layers-at-start-in-bf16 %d and --num-layers-at-end-in-bf16 %d: must be "
                    "at most --num-layers %d together",
                    o->num_layers_at_start_in_bf16, o->num_layers_at_end_in_bf16, o->num_layers);
    }
    if (o->fp8_recipe == FP8_RECIPE_BLOCKWISE && o->fp8_fast_accumulation != FAST_NONE &&
        option_source(o, "fp8-fast-accumulation") >= SOURCE_CONFIG) {
        return fail("--fp8-fast-accumulation %s: must be none with --fp8-recipe blockwise, whose "
                    "products have no fast accumulation",
                    o->fp8_fast_accumulation == FAST_ALL ? "all" : "forward");
    }
    if (!o->deterministic && o->check_interval > 0) {
        return fail(
            "--check-interval %lld: must be 0 with --no-deterministic, whose results differ "
            "from one time to the next",
            (long long)o->check_interval);
    }
    bool latest = strcmp(o->resume, "latest") == 0;
    if ((latest || o->list_checkpoints) && o->save[0] == '\0') {
        return fail("--%s: needs --save DIR, where to look",
                    latest ? "resume latest" : "list-checkpoints");
    }
    return true;
}

bool options_finish_batch(Options *o, int ranks) {
    char from[PATH_LENGTH];
    int64_t whole = (int64_t)o->micro_batch_size * ranks;
    if (o->global_batch_size == 0) { o->global_batch_size = (int)min64(whole, INT32_MAX); }
    if (o->global_batch_size % whole != 0) {
        return fail("--global-batch-size %d%s: must be a multiple of --micro-batch-size %d x %d "
                    "rank%s",
                    o->global_batch_size, option_taken(o, "global-batch-size", from),
                    o->micro_batch_size, ranks, ranks > 1 ? "s" : "");
    }
    // a resumed run keeps the batch on other ranks; if they derive the same, config.txt lacks it
    if (o->global_batch_size == whole &&
        option_source(o, "global-batch-size") == SOURCE_CHECKPOINT) {
        option_set_source(o, "global-batch-size", SOURCE_DEFAULT);
    }
    return true;
}

bool options_read(Options *options, int argc, char **argv) {
    memset(options, 0, sizeof(*options));
    options->program = argv[0];
    for (int i = 0; i < option_table_count; i++) {
        if (!option_set(options, option_table[i].name, option_table[i].fallback, SOURCE_DEFAULT)) {
            return false;
        }
    }
    Place place = {.source = SOURCE_COMMAND, .files = calloc_or_die((size_t)argc, sizeof(char *))};
    bool ok = true;
    for (int i = 1; ok && i < argc; i++) { ok = read_argument(options, &place, argc, argv, &i); }
    bool answers = ok && (options->help || options->version || options->completion);
    if (answers) { apply_preset(options); } // --help shows its values
    for (int i = 0; ok && !answers && i < place.num_files; i++) {
        ok = read_config(options, place.files[i], 0, &place.told);
    }
    free(place.files);
    return ok;
}

bool options_resolve(Options *o, const Options *model) {
    for (const OptionRow *row = option_table; row < option_table + option_table_count; row++) {
        if (o->repeated[row - option_table] && strcmp(row->choices, "GLOB") == 0) {
            warn("--%s is given more than once; the last one counts: %s (it takes several files)",
                 row->name, (const char *)o + row->offset);
        }
    }
    const char *preset = model != NULL && find_preset(model->model) != NULL ? model->model : "";
    bool named = model == NULL || option_source(o, "model") >= SOURCE_CONFIG;
    if (!named && !option_set(o, "model", preset, SOURCE_CHECKPOINT)) { return false; }
    if ((named || preset[0] != '\0') && !apply_preset(o)) { return false; }
    if (model == NULL) {
        derive_values(o);
    } else if (!take_model(o, model)) {
        return false;
    }
    derive_run(o);
    return check_values(o);
}

void options_parse(Options *options, int argc, char **argv) {
    char word[SHELL_WORD];
    if (argc == 1) {
        fprintf(stderr,
                OPTIONS_TITLE
                "  train      %1$s --data 'x_train*.bin' --valid-data 'x_val*.bin' --save run/x\n"
                "  continue   %1$s --config run/x/config.txt --resume latest\n"
                "  sample     %1$s --load run/x/latest --sample-only\n"
                "--help lists every option; `make quickstart` goes from a text to a sample\n",
                shell_word(word, argv[0]));
        exit(EXIT_FAILURE);
    }
    or_die(options_read(options, argc, argv));
    if (options->help) {
        options_help(options, stdout, argv[0]);
        exit_answered();
    }
    if (options->completion) {
        options_complete(stdout);
        exit_answered();
    }
    if (options->version) {
        printf("llm8.c %s\n", LLM8_VERSION);
        exit_answered();
    }
}
