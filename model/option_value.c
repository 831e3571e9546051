// Functions on one option: they find its row by name, read its value from text and write it as
// text, and store the source of the value.
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>

int option_word(const char *list, char separator, const char *word) {
    for (int i = 0;; i++) {
        const char *w = word;
        while (*list != separator && *w != '\0' && (*w == *list || (*w == '_' && *list == '-'))) {
            w++, list++;
        }
        if (*w == '\0' && (*list == '\0' || *list == separator)) { return i; }
        while (*list != '\0' && *list != separator) { list++; }
        if (*list++ == '\0') { return -1; }
    }
}

const OptionRow *option_row(const char *name) {
    EACH_OPTION (row) {
        if (option_word(row->name, '\0', name) == 0) { return row; }
    }
    return NULL;
}

bool option_is_path(const OptionRow *row) {
    return row->type == OPTION_STRING &&
           (strcmp(row->choices, "DIR") == 0 || strcmp(row->choices, "FILE") == 0);
}

// Returns false if a value is not a number within the row's bounds. A whole number is not read as a
// double, because a double cannot hold 2^53 + 1.
static bool parse_number(void *field, const OptionRow *row, const char *value) {
    bool whole = row->type != OPTION_DOUBLE;
    char *end;
    errno = 0;
    int64_t count = whole ? strtoll(value, &end, 10) : 0;
    double number = whole ? 0 : strtod(value, &end);
    bool plain = (isdigit((unsigned char)*value) || (*value != '\0' && strchr("+-.", *value))) &&
                 strpbrk(value, "xX") == NULL; // strtod also reads hexadecimal numbers
    bool within = whole ? count >= (int64_t)row->min && count <= (int64_t)row->max
                        : number >= row->min && number <= row->max;
    switch (row->type) {
    case OPTION_INT: *(int *)field = (int)count; break;
    case OPTION_INT64: *(int64_t *)field = count; break;
    default: *(double *)field = number;
    }
    return plain && *end == '\0' && errno == 0 && within;
}

static bool parse_value(void *field, const OptionRow *row, const char *value) {
    char allowed[160];
    if (row->type == OPTION_STRING) {
        if (strlen(value) >= PATH_LENGTH) {
            return fail("--%s: longer than %d characters%s", row->name, PATH_LENGTH - 1,
                        strcmp(row->choices, "TEXT") == 0 ? "; --sample-tokens @FILE takes more"
                                                          : "");
        }
        if (option_is_path(row) && strncmp(value, "~/", 2) == 0) { // would mean a folder "~"
            return fail("--%s=%s: no shell has replaced ~ here; give the whole path, or --%s %s "
                        "in a shell",
                        row->name, value, row->name, value);
        }
        strcpy(field, value);
        return true;
    }
    if (row->type == OPTION_BOOL) {
        int word = option_word("false|true|0|1|no|yes|off|on", '|', value);
        *(bool *)field = word % 2 == 1;
        if (word >= 0) { return true; }
        strcpy(allowed, "true or false");
    } else if (row->type == OPTION_CHOICE) {
        int choice = option_word(row->choices, '|', value);
        *(int *)field = choice;
        if (choice >= 0) { return true; }
        snprintf(allowed, sizeof(allowed), "one of %s", row->choices);
    } else {
        if (parse_number(field, row, value)) { return true; }
        snprintf(allowed, sizeof(allowed), "%s from %.16g to %.16g",
                 row->type != OPTION_DOUBLE ? "a whole number" : "a number", row->min, row->max);
    }
    return fail("--%s %s: must be %s", row->name, *value ? value : "(nothing)", allowed);
}

const char *option_text(const Options *options, const OptionRow *row, char out[OPTION_TEXT]) {
    const void *field = (const char *)options + row->offset;
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
    case OPTION_BOOL: strcpy(out, *(const bool *)field ? "true" : "false"); break;
    case OPTION_STRING: snprintf(out, OPTION_TEXT, "%s", (const char *)field); break;
    case OPTION_CHOICE: {
        const char *choice = row->choices;
        for (int i = 0; i < *(const int *)field; i++) { choice += strcspn(choice, "|") + 1; }
        snprintf(out, OPTION_TEXT, "%.*s", (int)strcspn(choice, "|"), choice);
        break;
    }
    }
    return out;
}

bool option_same(const Options *a, const Options *b, const OptionRow *row) {
    char x[OPTION_TEXT], y[OPTION_TEXT];
    return strcmp(option_text(a, row, x), option_text(b, row, y)) == 0;
}

bool option_is_default(const Options *options, const OptionRow *row) {
    Options defaults = *options;
    or_die(option_set(&defaults, row->name, row->fallback, SOURCE_COMMAND));
    return option_same(options, &defaults, row);
}

OptionSource option_source(const Options *options, const char *name) {
    return (OptionSource)options->source[option_row(name) - option_table];
}

void option_set_source(Options *options, const char *name, OptionSource source) {
    options->source[option_row(name) - option_table] = (unsigned char)source;
}

bool option_set(Options *options, const char *name, const char *value, OptionSource source) {
    const OptionRow *row = option_row(name);
    if (row == NULL) { return fail("unknown option --%s", name); }
    // sets a copy first, because the value of a weaker source is only checked, and not stored
    Options parsed = *options;
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

void options_default(Options *options) {
    memset(options, 0, sizeof(*options));
    EACH_OPTION (row) { or_die(option_set(options, row->name, row->fallback, SOURCE_DEFAULT)); }
}
