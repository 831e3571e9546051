// The configuration file of --config: options, one a line, in any order.
//
//   name value      as on the command line, with or without the -- and with or without a =
//   name            a flag; no-name switches it off
//   name "value"    where a value has blanks at an end, or a # after a blank; \" \\ and \n stand
//   for
//                   a quote, a backslash and a new line
//   # note          on a line of its own or after a value
#include "option_table.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BLANK " \t\r\n"

// ---- reading ------------------------------------------------------------------------------------

// Takes the quotes off a value in place. Only a note may follow them.
static bool unquote(char *value, Error *err) {
    char *out = value, *in = value + 1;
    for (; *in != '"'; in++) {
        bool escape = *in == '\\' && (in[1] == '"' || in[1] == '\\' || in[1] == 'n');
        if (escape) { in++; }
        if (*in == '\0') { return fail(err, "a value without its closing quotation mark"); }
        *out++ = escape && *in == 'n' ? '\n' : *in;
    }
    in += 1 + strspn(in + 1, BLANK);
    *out = '\0';
    return *in == '\0' || *in == '#' || fail(err, "after the closing quotation mark: %.40s", in);
}

// Cuts off a note, which is a # after a blank, and the blanks before it. text is not what its line
// begins with.
static void cut_note(char *text) {
    char *end = text;
    for (char *p = text; *p != '\0' && !(*p == '#' && isspace((unsigned char)p[-1])); p++) {
        if (!isspace((unsigned char)*p)) { end = p + 1; }
    }
    *end = '\0';
}

// Splits "  --name = value  # note" in place; both are empty where the line says nothing.
static bool split_line(char *line, char **name, char **value, Error *err) {
    bool ok = true;
    line += strspn(line, BLANK);
    if (*line == '#') { *line = '\0'; }
    if (strncmp(line, "--", 2) == 0) { line += 2; }
    char *end = line + strcspn(line, BLANK "=");
    *name = line;
    *value = end + strspn(end, BLANK "=");
    if (**value == '"') {
        ok = unquote(*value, err);
    } else {
        cut_note(*value);
    }
    *end = '\0';
    return ok;
}

static bool read_line(Options *options, char *line, Error *err) {
    char *name, *value;
    bool negated;
    if (!split_line(line, &name, &value, err)) { return false; }
    if (*name == '\0' && *value == '\0') { return true; }
    const OptionRow *row = option_find(name, &negated);
    if (row != NULL && row->type == OPTION_BOOL && *value == '\0') {
        return option_set(options, row->name, negated ? "false" : "true", SOURCE_CONFIG, err);
    }
    if (strcmp(name, "config") == 0) { return fail(err, "--config: a file cannot name another"); }
    return option_set(options, name, value, SOURCE_CONFIG, err);
}

bool options_read_config(Options *options, const char *path, Error *err) {
    FILE *file = fopen(path, "r");
    if (file == NULL) { return fail(err, "--config %s: %s", path, strerror(errno)); }
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    bool ok = true;
    for (int number = 1; ok && (length = getline(&line, &room, file)) >= 0; number++) {
        Error why;
        ok = strlen(line) == (size_t)length ? read_line(options, line, &why)
                                            : fail(&why, "a NUL byte; options are text");
        if (!ok) { fail(err, "%s, line %d: %s", path, number, why.text); }
    }
    if (ok && ferror(file)) { ok = fail(err, "--config %s: %s", path, strerror(errno)); }
    free(line);
    fclose(file);
    return ok;
}

// ---- writing ------------------------------------------------------------------------------------

static void write_quoted(const char *value, FILE *out) {
    fputc('"', out);
    for (; *value != '\0'; value++) {
        if (*value == '"' || *value == '\\') { fputc('\\', out); }
        fputs(*value == '\n' ? "\\n" : (char[]){*value, '\0'}, out);
    }
    fputc('"', out);
}

// Whether a value, written as it is, would be read as it was.
static bool is_plain(const char *value) {
    if (*value == '"' || *value == '=' || *value == '#') { return false; }
    char before = ' ';
    for (const char *p = value; *p != '\0'; before = *p++) {
        bool note = *p == '#' && isspace((unsigned char)before);
        bool edge = isspace((unsigned char)*p) && (p == value || p[1] == '\0');
        if (note || edge || *p == '\n') { return false; }
    }
    return true;
}

void options_write_config(const Options *options, FILE *out) {
    const char *group = "";
    char value[OPTION_TEXT];
    fputs("# The effective options of a run; start another like it with --config on this file.\n",
          out);
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        if (option_is_action(row) || *option_text(options, row, value) == '\0') { continue; }
        if (strcmp(group, row->group) != 0) { fprintf(out, "\n# %s\n", row->group); }
        group = row->group;
        fprintf(out, "%s ", row->name);
        if (is_plain(value)) {
            fputs(value, out);
        } else {
            write_quoted(value, out);
        }
        fputc('\n', out);
    }
}
