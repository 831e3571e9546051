// Reads a metrics.jsonl as train/metrics.h specifies it, and prints the steps and evaluations that
// hold, without their timing: two runs that did the same print the same. Exits with 1 at the first
// line that is not as specified.
#include "../base/common.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *kind, *fields, *timing;
} kinds[] = {
    {"run", "parameters flops_per_token fp8_flops_share memory_bytes ranks step", "time"},
    {"step", "step tokens loss norm lr skipped", "seconds tokens_per_s"},
    {"eval", "step valid_loss perplexity", "seconds"},
    {"choices", "step questions accuracy accuracy_norm", "seconds"},
    {"save", "step", ""},
    {"fp8", "step", ""},
    {"profile", "", ""},
    {"end", "step status", ""},
};
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };

typedef struct {
    int kind;
    double step;
    char *text;
} Record;

static int line_number;

static double number_of(const cJSON *record, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(record, name);
    bool flagged = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(record, "nonfinite"));
    if (cJSON_IsNull(item) && flagged) { return NAN; }
    if (!cJSON_IsNumber(item)) { die("line %d: no number \"%s\"", line_number, name); }
    return item->valuedouble;
}

// Checks the fields named in a list; appends them to `out` unless it is NULL.
static int read_fields(const cJSON *record, const char *names, FILE *out) {
    char list[128], *state;
    int nonfinite = 0;
    snprintf(list, sizeof(list), "%s", names);
    for (char *name = strtok_r(list, " ", &state); name != NULL;
         name = strtok_r(NULL, " ", &state)) {
        double value = number_of(record, name);
        nonfinite += isnan(value);
        if (out != NULL) { fprintf(out, " %s %.17g", name, value); }
    }
    return nonfinite;
}

static int kind_of(const cJSON *record) {
    const char *kind = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(record, "kind"));
    for (int i = 0; kind != NULL && i < KINDS; i++) {
        if (strcmp(kind, kinds[i].kind) == 0) { return i; }
    }
    die("line %d: no known \"kind\"", line_number);
}

static void check_run(const cJSON *record) {
    static const char *const texts[] = {"program", "device", "precision"};
    for (int i = 0; i < 3; i++) {
        if (!cJSON_IsString(cJSON_GetObjectItemCaseSensitive(record, texts[i]))) {
            die("line %d: no \"%s\"", line_number, texts[i]);
        }
    }
    const cJSON *options = cJSON_GetObjectItemCaseSensitive(record, "options"), *option;
    const cJSON *effects = cJSON_GetObjectItemCaseSensitive(record, "effects");
    if (!cJSON_IsObject(options)) { die("line %d: no \"options\"", line_number); }
    cJSON_ArrayForEach(option, options) {
        if (!cJSON_IsString(cJSON_GetObjectItemCaseSensitive(effects, option->string))) {
            die("line %d: no effect of \"%s\"", line_number, option->string);
        }
    }
    double share = 0;
    const cJSON *row;
    cJSON_ArrayForEach(row, cJSON_GetObjectItemCaseSensitive(record, "linear_layers")) {
        share += number_of(row, "flops_share");
    }
    if (!(fabs(share - 1) < 1e-9)) {
        die("line %d: \"linear_layers\" have %g of the operations", line_number, share);
    }
}

// The line of a step, an evaluation or a scored set; NULL for other records. To be freed.
static char *read_record(const cJSON *record, double *step) {
    int kind = kind_of(record);
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    fprintf(out, "%s", kinds[kind].kind);
    int nonfinite = read_fields(record, kinds[kind].fields, out);
    fclose(out);
    read_fields(record, kinds[kind].timing, NULL);
    bool flagged = cJSON_HasObjectItem(record, "nonfinite");
    if (flagged != (nonfinite > 0)) { die("line %d: \"nonfinite\" is wrong", line_number); }
    *step = number_of(record, "step");
    if (kind == 0) { check_run(record); }
    if (kind >= 1 && kind <= 3) { return text; }
    free(text);
    return NULL;
}

// Records that hold, in order.
static struct {
    Record *records;
    int count;
} held;

static void take_line(const char *line, size_t length) {
    cJSON *json = cJSON_ParseWithLengthOpts(line, length + 1, NULL, true);
    if (!cJSON_IsObject(json) || line[length - 1] != '\n') {
        die("line %d: not a JSON object", line_number);
    }
    Record r = {.kind = kind_of(json)};
    r.text = read_record(json, &r.step);
    cJSON_Delete(json);
    while (r.kind == 0 && held.count > 0 && held.records[held.count - 1].step > r.step) {
        free(held.records[--held.count].text); // what came after where this run starts
    }
    if (r.text == NULL) { return; }
    held.records = realloc_or_die(held.records, (size_t)(held.count + 1) * sizeof(Record));
    held.records[held.count++] = r;
}

// A run that resumes another one's checkpoint begins in the middle; no step may be missing after.
static void print_held(void) {
    double last = -1;
    for (int i = 0; i < held.count; i++) {
        const Record *r = &held.records[i];
        bool step = strcmp(kinds[r->kind].kind, "step") == 0;
        if (step && last >= 0 && r->step != last + 1) {
            die("step %g follows step %g", r->step, last);
        }
        if (step) { last = r->step; }
        puts(r->text);
        free(r->text);
    }
    free(held.records);
}

int main(int argc, char **argv) {
    FILE *file = argc == 2 ? fopen(argv[1], "r") : NULL;
    if (file == NULL) { die("usage: metrics_tool FILE"); }
    char *line = NULL;
    size_t room = 0;
    for (ssize_t length; (length = getline(&line, &room, file)) > 0;) {
        line_number++;
        take_line(line, (size_t)length);
    }
    print_held();
    free(line);
    fclose(file);
    return line_number > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
