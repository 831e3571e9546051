// Options as text: in JSON, in config.txt, as printed at the start of a run, and in --help.
#include "options.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

cJSON *options_json(const Options *options) {
    char value[OPTION_TEXT];
    cJSON *json = cJSON_CreateObject();
    EACH_OPTION (row) {
        cJSON_AddStringToObject(json, row->name, option_text(options, row, value));
    }
    return json;
}

// Returns whether config.txt has an option: one that was given or comes from a checkpoint, and is
// not an action.
static bool is_given(const Options *options, const OptionRow *row) {
    return row->effect < EFFECT_ACTION && options->source[row - option_table] >= SOURCE_CHECKPOINT;
}

cJSON *options_given(const Options *options) {
    cJSON *names = cJSON_CreateArray();
    EACH_OPTION (row) {
        if (is_given(options, row)) { cJSON_AddItemToArray(names, cJSON_CreateString(row->name)); }
    }
    return names;
}

// Prints the heading of a row's group if this row is the group's first. Returns whether it printed
// a heading.
static bool print_group(FILE *out, const char **group, const OptionRow *row, const char *format) {
    bool next = *group == NULL || strcmp(*group, row->group) != 0;
    if (next) { fprintf(out, format, row->group); }
    *group = row->group;
    return next;
}

// Prints a word after the previous one, or on a new line if it would end beyond column 100.
// *column: where the previous word ended; at the beginning of a line, `indent`.
static void print_word(FILE *out, int *column, int indent, const char *word, int length) {
    enum { WIDTH = 100 };
    if (*column > indent && *column + 1 + length > WIDTH) {
        fprintf(out, "\n%*s", indent, "");
        *column = indent;
    }
    *column += fprintf(out, "%s%.*s", *column > indent ? " " : "", length, word);
}

void options_write_config(const Options *options, FILE *out) {
    // a value with any character that is not in this list is quoted
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
                                "_-+.,:;/*?[]{}()@%~";
    const char *group = NULL;
    char value[OPTION_TEXT];
    fputs("# The options that a run was given, and what it took from a checkpoint; start another\n"
          "# like it with --config on this file.\n"
          "# What follows from them, and the defaults, are in metrics.jsonl and meta.json.\n",
          out);
    EACH_OPTION (row) {
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

// Returns what an option needs (option_rows.h) and lacks, or what a needed option lacks; NULL: it
// has an effect.
static const char *lacking(const Options *options, const OptionRow *row) {
    char needs[OPTION_TEXT], value[OPTION_TEXT], *rest;
    const char *lacks = row->needs;
    if (lacks == NULL) { return NULL; }
    snprintf(needs, sizeof(needs), "%s", lacks);
    for (char *name = strtok_r(needs, "|", &rest); name != NULL;
         name = strtok_r(NULL, "|", &rest)) {
        char *needed_value = strchr(name, ' ');
        if (needed_value != NULL) { *needed_value++ = '\0'; }
        const OptionRow *needed = option_row(name);
        bool met = needed_value == NULL
                       ? !option_is_default(options, needed)
                       : strcmp(option_text(options, needed, value), needed_value) == 0;
        if (met && (lacks = lacking(options, needed)) == NULL) { return NULL; }
    }
    return lacks;
}

void options_note_idle(const Options *options, bool gpu) {
    EACH_OPTION (row) {
        OptionSource source = (OptionSource)options->source[row - option_table];
        char value[OPTION_TEXT];
        if (source == SOURCE_COMMAND && *option_text(options, row, value) == '\0') {
            // such as --load "$START" if the shell variable START is not set
            printf("  note: --%s is empty, in place of any value of a config file or checkpoint\n",
                   row->name);
        }
        if (source < SOURCE_FILE || option_is_default(options, row)) { continue; }
        if (!gpu && strstr(row->group, "GPU") != NULL) {
            printf("  note: --%s is for the GPU trainer; it has no effect here\n", row->name);
            continue;
        }
        const char *needs = lacking(options, row);
        if (needs == NULL) { continue; }
        printf("  note: --%s has no effect without", row->name);
        for (int length; *needs != '\0'; needs += length + (needs[length] == '|')) {
            length = (int)strcspn(needs, "|");
            printf(" --%.*s%s", length, needs, needs[length] == '|' ? " or" : "\n");
        }
    }
}

void options_print(const Options *options, bool all, FILE *out) {
    enum { INDENT = 2 };
    const char *group = NULL;
    char value[OPTION_TEXT], shown[OPTION_TEXT], item[OPTION_TEXT + 80];
    int column = INDENT;
    bool preset = option_source(options, "model") > SOURCE_DEFAULT ||
                  option_source(options, "arch") <= SOURCE_DERIVED;
    EACH_OPTION (row) {
        bool named = row->offset == offsetof(Options, model);
        bool prints = named ? preset // a model that no preset describes has no name
                            : all || is_given(options, row) || !option_is_default(options, row);
        if (row->effect >= EFFECT_ACTION || !prints || *option_text(options, row, value) == '\0') {
            continue;
        }
        if (row->type == OPTION_BOOL) {
            snprintf(item, sizeof(item), "--%s%s", *value == 't' ? "" : "no-", row->name);
        } else {
            snprintf(item, sizeof(item), "--%s %s", row->name,
                     printable(shown, sizeof(shown), value));
        }
        if (print_group(out, &group, row, group == NULL ? "%s\n  " : "\n%s\n  ")) {
            column = INDENT;
        }
        print_word(out, &column, INDENT, item, (int)strlen(item));
    }
    fputs(all ? "\n" : "\nThe other options have their defaults (--plan prints all)\n", out);
}

void options_help(const Options *options, FILE *out, const char *program) {
    enum { INDENT = 36 };
    const char *group = NULL;
    char value[OPTION_TEXT], called[SHELL_WORD];
    Options shown = *options;
    options_preset(&shown); // has no effect if no preset has this name
    fprintf(out, "%s\nUsage: %s --data 'train_*.bin' [options]\n", OPTIONS_TITLE,
            shell_word(called, program));
    EACH_OPTION (row) {
        print_group(out, &group, row, "\n%s\n");
        // a default is printed as it is written in its row: 1.0, not 1; an action, such as
        // --help itself, always shows its default
        bool own = shown.source[row - option_table] == SOURCE_DEFAULT ||
                   row->effect >= EFFECT_ACTION;
        const char *text = own ? row->fallback : option_text(&shown, row, value);
        bool flag = row->type == OPTION_BOOL, on = flag && strcmp(text, "true") == 0;
        bool has_default = !flag && *text != '\0';
        char left[160], help[512 + OPTION_TEXT];
        snprintf(left, sizeof(left), "  --%s%s %s", on ? "[no-]" : "", row->name, row->choices);
        snprintf(help, sizeof(help), "%s%s%s%s", row->help, has_default ? " [" : "",
                 has_default ? text : "", has_default ? "]" : "");
        fprintf(out, "%-*s", INDENT, left);
        if (strlen(left) >= INDENT) { fprintf(out, "\n%*s", INDENT, ""); }
        int column = INDENT, length;
        for (text = help; *text != '\0'; text += length, text += strspn(text, " ")) {
            length = (int)strcspn(text, " ");
            print_word(out, &column, INDENT, text, length);
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
    EACH_OPTION (row) {
        if (row->type == OPTION_BOOL) { continue; }
        fprintf(out, "    --%s) COMPREPLY=($(compgen", row->name);
        print_words(out, row);
        fputs(" -- \"$word\")) ;;\n", out);
    }
    fputs("    *) COMPREPLY=($(compgen -W '", out);
    EACH_OPTION (row) {
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
