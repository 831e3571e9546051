#include "plan.h"

#include <stdlib.h>
#include <string.h>

void plan_buffer(Plan *plan, const char *category, const char *name, int64_t bytes,
                 void **pointer) {
    *pointer = NULL;
    if (bytes == 0) { return; }
    if (plan->count == plan->room) {
        plan->room = plan->room > 0 ? 2 * plan->room : 64;
        plan->rows = realloc_or_die(plan->rows, (size_t)plan->room * sizeof(PlanRow));
    }
    bytes = round_up64(bytes, PLAN_ALIGN);
    plan->rows[plan->count++] = (PlanRow){name, category, bytes, plan->phase, pointer};
    plan->phase_bytes[plan->phase] += bytes;
    int64_t largest = 0;
    for (int i = PHASE_ALWAYS + 1; i < PHASE_COUNT; i++) {
        largest = max64(largest, plan->phase_bytes[i]);
    }
    plan->bytes = plan->phase_bytes[PHASE_ALWAYS] + largest;
}

// The buffers of one name, as one line.
typedef struct {
    const char *name, *category;
    int count;
    int64_t bytes;
} Line;

static int compare_lines(const void *a, const void *b) {
    const Line *x = a, *y = b;
    if (x->bytes != y->bytes) { return x->bytes < y->bytes ? 1 : -1; }
    return strcmp(x->name, y->name);
}

static int gather_lines(const Plan *plan, Line *lines) {
    int count = 0;
    for (int i = 0; i < plan->count; i++) {
        const PlanRow *row = &plan->rows[i];
        int at = 0;
        while (at < count && (strcmp(lines[at].name, row->name) != 0 ||
                              strcmp(lines[at].category, row->category) != 0)) {
            at++;
        }
        if (at == count) { lines[count++] = (Line){row->name, row->category, 0, 0}; }
        lines[at].count++;
        lines[at].bytes += row->bytes;
    }
    qsort(lines, (size_t)count, sizeof(Line), compare_lines);
    return count;
}

// Prints the lines of one category and takes them out of the list.
static int print_category(Line *lines, int count, const char *category, FILE *out) {
    int64_t sum = 0;
    int kept = 0;
    char size[32], times[16];
    for (int i = 0; i < count; i++) {
        if (strcmp(lines[i].category, category) == 0) { sum += lines[i].bytes; }
    }
    fprintf(out, "  %-34s %12s\n", category, format_bytes(size, (double)sum));
    for (int i = 0; i < count; i++) {
        if (strcmp(lines[i].category, category) != 0) {
            lines[kept++] = lines[i];
            continue;
        }
        snprintf(times, sizeof(times), lines[i].count > 1 ? "x %d" : "", lines[i].count);
        fprintf(out, "    %-26s %-5s %12s\n", lines[i].name, times,
                format_bytes(size, (double)lines[i].bytes));
    }
    return kept;
}

void plan_print(const Plan *plan, FILE *out) {
    char size[32];
    Line *lines = malloc_or_die((size_t)plan->count * sizeof(Line));
    int left = gather_lines(plan, lines);
    fprintf(out, "Memory plan\n");
    while (left > 0) {
        const char *category = lines[0].category;
        left = print_category(lines, left, category, out);
    }
    int64_t shared = -plan->bytes;
    for (int i = 0; i < PHASE_COUNT; i++) { shared += plan->phase_bytes[i]; }
    if (shared > 0) {
        fprintf(out, "  %-34s %12s\n", "less what phases of a step share",
                format_bytes(size, (double)shared));
    }
    fprintf(out, "  %-34s %12s\n", "all", format_bytes(size, (double)plan->bytes));
    free(lines);
}

void plan_assign(Plan *plan, void *base) {
    int64_t next[PHASE_COUNT];
    for (int i = 0; i < PHASE_COUNT; i++) { next[i] = plan->phase_bytes[PHASE_ALWAYS]; }
    next[PHASE_ALWAYS] = 0;
    for (int i = 0; i < plan->count; i++) {
        PlanRow *row = &plan->rows[i];
        *row->pointer = (char *)base + next[row->phase];
        next[row->phase] += row->bytes;
    }
}

void plan_free(Plan *plan) {
    free(plan->rows);
    *plan = (Plan){0};
}
