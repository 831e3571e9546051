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
    plan->rows[plan->count++] = (PlanRow){name, category, round_up64(bytes, PLAN_ALIGN), pointer};
    plan->bytes += round_up64(bytes, PLAN_ALIGN);
}

static int compare_sizes(const void *a, const void *b) {
    const PlanRow *x = *(const PlanRow *const *)a, *y = *(const PlanRow *const *)b;
    if (x->bytes != y->bytes) { return x->bytes < y->bytes ? 1 : -1; }
    return strcmp(x->name, y->name);
}

// Prints the rows of one category and takes them out of the list.
static int print_category(const PlanRow **rows, int count, const char *category, FILE *out) {
    int64_t sum = 0;
    int kept = 0;
    char size[32];
    for (int i = 0; i < count; i++) {
        if (strcmp(rows[i]->category, category) == 0) { sum += rows[i]->bytes; }
    }
    fprintf(out, "  %-26s %14s\n", category, format_bytes(size, (double)sum));
    for (int i = 0; i < count; i++) {
        if (strcmp(rows[i]->category, category) != 0) {
            rows[kept++] = rows[i];
            continue;
        }
        fprintf(out, "    %-24s %14s\n", rows[i]->name, format_bytes(size, (double)rows[i]->bytes));
    }
    return kept;
}

void plan_print(const Plan *plan, FILE *out) {
    char size[32];
    const PlanRow **rows = malloc_or_die((size_t)plan->count * sizeof(*rows));
    for (int i = 0; i < plan->count; i++) { rows[i] = &plan->rows[i]; }
    qsort(rows, (size_t)plan->count, sizeof(*rows), compare_sizes);
    fprintf(out, "Memory plan\n");
    for (int left = plan->count; left > 0;) {
        left = print_category(rows, left, rows[0]->category, out);
    }
    fprintf(out, "  %-26s %14s\n", "all", format_bytes(size, (double)plan->bytes));
    free(rows);
}

void plan_assign(Plan *plan, void *base) {
    char *next = base;
    for (int i = 0; i < plan->count; i++) {
        *plan->rows[i].pointer = next;
        next += plan->rows[i].bytes;
    }
}

void plan_free(Plan *plan) {
    free(plan->rows);
    *plan = (Plan){0};
}
