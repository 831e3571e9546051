// Reads options from the command line and the --config files.
//
// The file of --config has one option a line, in any order:
//   name value      as on the command line, with or without the -- and with or without a =
//   name            a flag; no-name switches it off
//   name "value"    for a value that begins or ends with a blank, or has a # after a blank;
//                   \" \\ and \n stand for a quote, a backslash and a new line
//   # comment       on a line of its own or after a value
//   config FILE     reads another file at this place
// If the files set an option several times, the last value counts. Of several files a later one is
// a stronger source (OptionSource), and so are the lines after `config FILE`.
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BLANK " \t\r\n"
#define BYTE_ORDER_MARK "\xef\xbb\xbf" // some editors write it at the beginning of a file

// Returns whether a name begins with "no-" or "no_".
static bool is_negated(const char *name) {
    return strncmp(name, "no", 2) == 0 && (name[2] == '-' || name[2] == '_');
}

// Returns the option with this name. If there is none and the name begins with "no-", sets *negated
// and returns the option with the rest of the name, which the caller must refuse if it is not a
// flag. Returns NULL if no option has the name.
static const OptionRow *find_option(const char *name, bool *negated) {
    const OptionRow *row = option_row(name);
    *negated = row == NULL && is_negated(name);
    return *negated ? option_row(name + 3) : row;
}

// Returns the Levenshtein distance of two names, or LONGEST if one of them has more than LONGEST
// characters.
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

// Writes "; did you mean --lr?" with the option that an unknown name resembles, or "" if there is
// none.
static const char *suggestion(const char *name, char out[160]) {
    bool negated = is_negated(name);
    const char *nearest = NULL, *stem = negated ? name + 3 : name;
    int nearest_distance = 1 + (int)strlen(stem) / 3;
    EACH_OPTION (row) {
        int distance = edit_distance(stem, row->name);
        if (distance < nearest_distance && (!negated || row->type == OPTION_BOOL)) {
            nearest_distance = distance;
            nearest = row->name;
        }
    }
    for (const ForeignName *f = foreign_names; f->ours != NULL; f++) {
        if (option_word(f->names, ' ', name) >= 0) { nearest = f->ours; }
    }
    *out = '\0';
    if (nearest != NULL) {
        snprintf(out, 160, "; did you mean --%s%s?", negated ? "no-" : "", nearest);
    }
    return out;
}

// The command line, or a file of --config, while it is read.
typedef struct {
    OptionSource source;
    OptionSource last;       // the source of the last file of --config
    int depth;               // how many files of --config are nested; 0 on the command line
    bool located;            // error_text() already names a file and a line
    bool given[OPTIONS_MAX]; // of each row: whether it has been read
    const char **files;      // on the command line: the files that --config names, in order
    int num_files;
} Reading;

static bool read_config(Options *options, const char *path, Reading *from);

// Sets the option that `name` names; before a flag's name, "no-" is allowed. value NULL: no value
// is given. A later call replaces the value of an earlier one.
static bool set_named(Options *options, Reading *reading, const char *name, const char *value) {
    bool negated;
    char near[160];
    const OptionRow *row = find_option(name, &negated);
    if (row == NULL) {
        return fail("unknown option --%s%s (--help lists all)", name, suggestion(name, near));
    }
    if (row->type == OPTION_BOOL && value == NULL) {
        value = negated ? "false" : "true";
    } else if (negated) {
        return fail("--%s: only a flag can be negated, and without a value", name);
    } else if (value == NULL) {
        return fail("--%s needs a value (%s)", name, row->choices);
    }
    if (!option_set(options, row->name, value, reading->source)) { return false; }
    bool *given = &reading->given[row - option_table];
    bool counts = option_source(options, row->name) == reading->source;
    if (*given && counts && strcmp(row->choices, "GLOB") == 0) { options->repeated = row->name; }
    *given = true;
    if (row->offset != offsetof(Options, config)) { return true; }
    if (reading->depth > 0) { return read_config(options, value, reading); }
    reading->files[reading->num_files++] = value;
    return true;
}

// Returns the option that an argument, --name or --name=value, names, and copies the name to
// `name`. Returns NULL if the argument names no option.
static const OptionRow *named_option(const char *arg, char name[PATH_LENGTH], bool *negated) {
    size_t length = strcspn(arg, "=");
    if (strncmp(arg, "--", 2) != 0) { return NULL; }
    snprintf(name, PATH_LENGTH, "%.*s", (int)length - 2, arg + 2);
    return find_option(name, negated);
}

// Reads the option argv[*i], and its value if the next argument is the value. Moves *i to the last
// argument read.
static bool read_argument(Options *options, Reading *reading, int argc, char **argv, int *i) {
    const char *arg = strcmp(argv[*i], "-h") == 0 ? "--help" : argv[*i];
    char name[PATH_LENGTH] = "", near[160], other[PATH_LENGTH];
    if (strncmp(arg, "--", 2) != 0 || arg[2] == '\0') {
        return fail("unexpected argument '%s': options start with --%s (--help lists all)", arg,
                    *arg == '-' ? suggestion(arg, near) : "");
    }
    bool negated = false, ignored;
    const OptionRow *row = named_option(arg, name, &negated);
    const char *equals = strchr(arg, '='), *value = equals != NULL ? equals + 1 : NULL;
    bool separate = row != NULL && row->type != OPTION_BOOL && !negated && value == NULL;
    // an option's name is not taken as a value: in `--save --quiet` the value is missing
    if (separate && *i + 1 < argc && named_option(argv[*i + 1], other, &ignored) == NULL) {
        value = argv[++*i];
        const char *next = *i + 1 < argc ? argv[*i + 1] : "-";
        if (strcmp(row->choices, "GLOB") == 0 && next[0] != '-') {
            return fail("--%s %s %s: must be one word; quote the pattern, so that the shell does "
                        "not expand it, and a mixture as a whole",
                        row->name, value, next);
        }
    }
    return set_named(options, reading, name, value);
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
static bool read_line(Options *options, Reading *reading, char *line) {
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
        if (*value == '\'' && value_end - value > 1 && value_end[-1] == '\'') {
            return fail("%s: single quotes are part of a value; write double ones", value);
        }
    }
    *end = '\0';
    if (*name == '\0' && *value == '\0') { return true; }
    bool negated;
    const OptionRow *row = find_option(name, &negated);
    bool flag = row != NULL && row->type == OPTION_BOOL && *value == '\0';
    return set_named(options, reading, name, flag ? NULL : value);
}

// Returns the source of the options that follow another file's.
static OptionSource source_after(OptionSource last) {
    return (OptionSource)min64(last + 1, SOURCE_COMMAND - 1);
}

// Reads a file of --config that `from` names. from->located becomes true if error_text() already
// names the file and the line of the error.
static bool read_config(Options *options, const char *path, Reading *from) {
    enum { DEEPEST = 16 };
    int depth = from->depth;
    OptionSource source = source_after(from->last);
    Reading reading = {.source = source, .last = source, .depth = depth + 1};
    FILE *file = depth < DEEPEST ? fopen(path, "r") : NULL;
    if (depth == DEEPEST) { return fail("--config %s: %d files lead to it", path, depth); }
    if (file == NULL) { return fail("--config %s: %s", path, strerror(errno)); }
    FREED char *line = NULL;
    size_t room = 0;
    ssize_t length;
    bool ok = true;
    for (int number = 1; ok && (length = getline(&line, &room, file)) >= 0; number++) {
        if (number == 1 && strncmp(line, BYTE_ORDER_MARK, 3) == 0) { memset(line, ' ', 3); }
        ok = strlen(line) == (size_t)length ? read_line(options, &reading, line)
                                            : fail("a NUL byte; options are text");
        if (!ok && !reading.located) { fail("%s, line %d: %s", path, number, error_text()); }
        from->located = !ok;
    }
    from->last = reading.last;
    if (depth > 0) { from->source = from->last = source_after(from->last); }
    if (ok && ferror(file)) { ok = fail("--config %s: %s", path, strerror(errno)); }
    fclose(file);
    return ok;
}

bool options_read(Options *options, int argc, char **argv) {
    Reading reading = {.source = SOURCE_COMMAND,
                       .last = SOURCE_CHECKPOINT,
                       .files = calloc_or_die((size_t)argc, sizeof(char *))};
    bool ok = true;
    options_default(options);
    options->program = argv[0];
    for (int i = 1; ok && i < argc; i++) { ok = read_argument(options, &reading, argc, argv, &i); }
    bool answers = options->help || options->version || options->completion;
    for (int i = 0; ok && !answers && i < reading.num_files; i++) {
        ok = read_config(options, reading.files[i], &reading);
    }
    free(reading.files);
    return ok;
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
    } else if (options->completion) {
        options_complete(stdout);
    } else if (options->version) {
        printf("llm8.c %s\n", LLM8_VERSION);
    } else {
        return;
    }
    exit_answered();
}
