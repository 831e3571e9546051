// What a person sees of the options: the echo and --help.
#include "option_table.h"

#include <string.h>

bool option_is_action(const OptionRow *row) {
    static const char *const actions[] = {
        "help",           "version", "eval-only",        "list-tensors",
        "plan",           "config",  "list-checkpoints", "sample-only",
        "dump-gradients", "verify",  "device-memory-gib"};
    for (size_t i = 0; i < sizeof(actions) / sizeof(actions[0]); i++) {
        if (strcmp(row->name, actions[i]) == 0) { return true; }
    }
    return false;
}

void options_note_gpu_only(const Options *options) {
    char value[OPTION_TEXT];
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        if ((row->group == option_group_gpu || row->group == option_group_ranks) &&
            strcmp(option_text(options, row, value), row->fallback) != 0) {
            printf("  note: --%s is for the GPU trainer; it has no effect here\n", row->name);
        }
    }
}

void options_print(const Options *options, FILE *out) {
    enum { WIDTH = 100 };
    const char *group = "";
    char value[OPTION_TEXT], item[OPTION_TEXT + 80];
    size_t column = 0;
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        if (option_is_action(row)) { continue; }
        option_text(options, row, value);
        bool on = strcmp(value, "true") == 0;
        if (row->type == OPTION_BOOL) {
            snprintf(item, sizeof(item), " --%s%s", on ? "" : "no-", row->name);
        } else if (value[0] == '\0') {
            continue;
        } else {
            snprintf(item, sizeof(item), " --%s %s", row->name, value);
        }
        if (strcmp(group, row->group) != 0) {
            fprintf(out, "%s%s\n ", *group ? "\n" : "", row->group);
            group = row->group;
            column = 1;
        } else if (column + strlen(item) > WIDTH) {
            fputs("\n ", out);
            column = 1;
        }
        fputs(item, out);
        column += strlen(item);
    }
    fputs("\n", out);
}

// Prints text wrapped to the column from `indent` on, the first line being there already.
static void print_wrapped(FILE *out, const char *text, int indent, int width) {
    int column = indent;
    while (*text != '\0') {
        int word = (int)strcspn(text, " ");
        if (column > indent && column + 1 + word > width) {
            fprintf(out, "\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            fputc(' ', out);
            column++;
        }
        fprintf(out, "%.*s", word, text);
        column += word;
        text += word;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

void options_help(FILE *out, const char *program) {
    enum { INDENT = 36, WIDTH = 100 };
    const char *group = "";
    fprintf(
        out,
        "llm8.c %s: trains GPT-2 and Llama models\n\nUsage: %s --data 'train_*.bin' [options]\n",
        LLM8_VERSION, program);
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        if (strcmp(group, row->group) != 0) { fprintf(out, "\n%s\n", row->group); }
        group = row->group;
        bool on = row->type == OPTION_BOOL && strcmp(row->fallback, "true") == 0;
        char left[160], help[512];
        snprintf(left, sizeof(left), "  --%s%s %s", on ? "[no-]" : "", row->name, row->choices);
        bool shown = row->type != OPTION_BOOL && row->fallback[0] != '\0';
        snprintf(help, sizeof(help), "%s%s%s%s", row->help, shown ? " [" : "",
                 shown ? row->fallback : "", shown ? "]" : "");
        fprintf(out, "%-*s", INDENT, left);
        if (strlen(left) >= INDENT) { fprintf(out, "\n%*s", INDENT, ""); }
        print_wrapped(out, help, INDENT, WIDTH);
    }
    fputs("\nPresets for --model\n", out);
    for (int i = 0; i < preset_table_count; i++) {
        fprintf(out, "  %-*s%s\n", INDENT - 2, preset_table[i].name, preset_table[i].help);
    }
    fputs("\nExit status: 0 done; 1 error; 3 too many skipped steps; 4 rank lost; 75 stopped by a "
          "signal, saved.\n",
          out);
}
