// Options as text: their values, the configuration file, the echo at the start, --help.
#include "options.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

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

static bool is_default(const Options *options, const OptionRow *row) {
    char is[OPTION_TEXT], was[OPTION_TEXT];
    Options defaults = *options;
    or_die(option_set(&defaults, row->name, row->fallback, SOURCE_COMMAND));
    return strcmp(option_text(options, row, is), option_text(&defaults, row, was)) == 0;
}

cJSON *options_json(const Options *options) {
    char value[OPTION_TEXT];
    cJSON *json = cJSON_CreateObject();
    for (const OptionRow *row = option_table; row < option_table + option_table_count; row++) {
        cJSON_AddStringToObject(json, row->name, option_text(options, row, value));
    }
    return json;
}

// Whether an option is in config.txt: it was given, or a checkpoint gave it.
static bool is_given(const Options *options, const OptionRow *row) {
    return row->effect != EFFECT_ACTION && options->source[row - option_table] >= SOURCE_CHECKPOINT;
}

cJSON *options_given(const Options *options) {
    cJSON *names = cJSON_CreateArray();
    for (const OptionRow *row = option_table; row < option_table + option_table_count; row++) {
        if (is_given(options, row)) { cJSON_AddItemToArray(names, cJSON_CreateString(row->name)); }
    }
    return names;
}

// Prints a heading, once for each group; returns whether it did.
static bool print_group(FILE *out, const char **group, const OptionRow *row, const char *format) {
    bool next = *group == NULL || strcmp(*group, row->group) != 0;
    if (next) { fprintf(out, format, row->group); }
    *group = row->group;
    return next;
}

void options_write_config(const Options *options, FILE *out) {
    // a value with any other character is quoted
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
                                "_-+.,:;/*?[]{}()@%~";
    const char *group = NULL;
    char value[OPTION_TEXT];
    fputs("# The options that a run was given, and what it took from a checkpoint; start another\n"
          "# like it with --config on this file.\n"
          "# What follows from them, and the defaults, are in metrics.jsonl and meta.json.\n",
          out);
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        if (!is_given(options, row)) { continue; }
        print_group(out, &group, row, "\n# %s\n");
        fprintf(out, "%s ", row->name);
        option_text(options, row, value);
        bool quoted = *value == '\0' || value[strspn(value, plain)] != '\0';
        if (quoted) { fputc('"', out); }
        for (const char *p = value; *p != '\0'; p++) {
            if (quoted && (*p == '"' || *p == '\\')) { fputc('\\', out); }
            fputs(*p == '\n' ? "\\n" : (char[]){*p, '\0'}, out);
        }
        fputs(quoted ? "\"\n" : "\n", out);
    }
}

void options_note_idle(const Options *options, bool gpu) {
    const char *first = "  note: given more than once, so that the last value counts: ";
    for (int i = 0; i < option_table_count; i++) {
        if (!options->repeated[i]) { continue; }
        printf("%s--%s", first, option_table[i].name);
        first = ", ";
    }
    if (*first == ',') { printf("\n"); }
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i], *needed = row;
        bool given = options->source[i] >= SOURCE_CONFIG && !is_default(options, row);
        if (row->needs != NULL) { needed = option_row(row->needs); }
        if (given && !gpu && strstr(row->group, "GPU") != NULL) {
            printf("  note: --%s is for the GPU trainer; it has no effect here\n", row->name);
        } else if (given && needed != row && is_default(options, needed)) {
            printf("  note: --%s has no effect without --%s\n", row->name, needed->name);
        }
    }
}

void options_print(const Options *options, bool all, FILE *out) {
    enum { WIDTH = 100 };
    const char *group = NULL;
    char value[OPTION_TEXT], shown_value[OPTION_TEXT], item[OPTION_TEXT + 80];
    size_t column = 0;
    bool preset = option_source(options, "model") > SOURCE_DEFAULT ||
                  option_source(options, "arch") <= SOURCE_PRESET;
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        bool named = row->offset == offsetof(Options, model);
        bool shown = named ? preset // false: the model is not the preset's
                           : all || options->source[i] >= SOURCE_CHECKPOINT ||
                                 !is_default(options, row);
        if (row->effect == EFFECT_ACTION || !shown || *option_text(options, row, value) == '\0') {
            continue;
        }
        if (row->type == OPTION_BOOL) {
            bool on = strcmp(value, "true") == 0;
            snprintf(item, sizeof(item), " --%s%s", on ? "" : "no-", row->name);
        } else {
            snprintf(item, sizeof(item), " --%s %s", row->name,
                     printable(shown_value, sizeof(shown_value), value));
        }
        if (print_group(out, &group, row, group == NULL ? "%s\n " : "\n%s\n ")) {
            column = 1;
        } else if (column + strlen(item) > WIDTH) {
            fputs("\n ", out);
            column = 1;
        }
        fputs(item, out);
        column += strlen(item);
    }
    fputs(all ? "\n" : "\nThe other options have their defaults (--plan prints all)\n", out);
}

void options_help(const Options *options, FILE *out, const char *program) {
    enum { INDENT = 36, WIDTH = 100 };
    const char *group = NULL;
    char value[OPTION_TEXT], called[SHELL_WORD];
    fprintf(out, "%s\nUsage: %s --data 'train_*.bin' [options]\n", OPTIONS_TITLE,
            shell_word(called, program));
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        print_group(out, &group, row, "\n%s\n");
        // a default is printed as in the row: 6e-4, not 0.0006; actions, as --help itself, are off
        bool own = options->source[i] == SOURCE_DEFAULT || row->effect == EFFECT_ACTION;
        const char *text = own ? row->fallback : option_text(options, row, value);
        bool flag = row->type == OPTION_BOOL, on = flag && strcmp(text, "true") == 0;
        bool shown = !flag && *text != '\0';
        char left[160], help[512 + OPTION_TEXT];
        snprintf(left, sizeof(left), "  --%s%s %s", on ? "[no-]" : "", row->name, row->choices);
        snprintf(help, sizeof(help), "%s%s%s%s", row->help, shown ? " [" : "", shown ? text : "",
                 shown ? "]" : "");
        fprintf(out, "%-*s", INDENT, left);
        if (strlen(left) >= INDENT) { fprintf(out, "\n%*s", INDENT, ""); }
        int column = INDENT;
        for (text = help; *text != '\0'; text += strspn(text, " ")) {
            int word = (int)strcspn(text, " ");
            if (column > INDENT && column + 1 + word > WIDTH) {
                fprintf(out, "\n%*s", INDENT, "");
                column = INDENT;
            }
            column += fprintf(out, "%s%.*s", column > INDENT ? " " : "", word, text);
            text += word;
        }
        fputc('\n', out);
    }
    fputs("\nPresets for --model\n", out);
    for (int i = 0; i < preset_table_count; i++) {
        fprintf(out, "  %-*s%s\n", INDENT - 2, preset_table[i].name, preset_table[i].help);
    }
    fputs("\nExit status: 0 done; 1 error; 3 too many skipped steps; 4 rank lost; 5 a GPU computes "
          "wrongly;\n75 stopped by a signal, saved.\n",
          out);
}

// Prints what may follow an option, as arguments of compgen.
static void print_words(FILE *out, const OptionRow *row) {
    static const char *const kinds[][2] = {
        {"GLOB", " -f"}, {"FILE", " -f"}, {"DIR", " -d"}, {"latest|PATH", " -W latest -d"}};
    if (row->type == OPTION_CHOICE) {
        fprintf(out, " -W '%s'", row->choices);
        return;
    }
    if (row->offset == offsetof(Options, model)) {
        fputs(" -W '", out);
        for (int i = 0; i < preset_table_count; i++) { fprintf(out, "%s|", preset_table[i].name); }
        fputs("'", out);
    }
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(row->choices, kinds[i][0]) == 0) { fputs(kinds[i][1], out); }
    }
}

void options_complete(FILE *out) {
    fputs(
        "# completion of llm8.c's trainers, for bash and zsh: source <(./train_gpt --completion)\n"
        "[ -z \"${ZSH_VERSION:-}\" ] || { autoload -U compinit bashcompinit; compinit; "
        "bashcompinit; }\n"
        "_llm8() {\n"
        "    local word=${COMP_WORDS[COMP_CWORD]} IFS='|\n'\n"
        "    case ${COMP_WORDS[COMP_CWORD-1]} in\n",
        out);
    for (const OptionRow *row = option_table; row < option_table + option_table_count; row++) {
        if (row->type == OPTION_BOOL) { continue; }
        fprintf(out, "    --%s) COMPREPLY=($(compgen", row->name);
        print_words(out, row);
        fputs(" -- \"$word\")) ;;\n", out);
    }
    fputs("    *) COMPREPLY=($(compgen -W '", out);
    for (const OptionRow *row = option_table; row < option_table + option_table_count; row++) {
        bool on = row->type == OPTION_BOOL && strcmp(row->fallback, "true") == 0;
        fprintf(out, "--%s|", row->name);
        if (on) { fprintf(out, "--no-%s|", row->name); }
    }
    fputs("' -- \"$word\")) ;;\n"
          "    esac\n"
          "}\n"
          "complete -o filenames -F _llm8 train_gpt train_gptcu\n",
          out);
}
