#include "plan.h"

#include <stdlib.h>
#include <string.h>

enum { ZONE_BYTE = 0x5a, POISON_BYTE = 0xff }; // bytes of 0xff are NaN in FP32, BF16, E4M3 and E5M2

// Sums of sizes are limited to this number, which is above any machine's memory, because they would
// overflow for the largest model that options can describe.
static const int64_t most_bytes = 1ll << 60;

static bool guarded(void) {
    const char *text = getenv("LLM8_GUARD");
    return text != NULL && strcmp(text, "1") == 0;
}

// Returns the size of a buffer with its guard zone, which begins directly after the requested
// bytes.
static int64_t room_of(int64_t bytes) {
    return round_up64(bytes, PLAN_ALIGN) + (guarded() ? PLAN_GUARD_BYTES : 0);
}

static int64_t phase_begin(const Plan *plan, int phase) {
    int64_t begin = 0;
    for (int i = 0; i < phase; i++) {
        if (i <= PHASE_STEP || guarded()) { begin += plan->phase_bytes[i]; }
    }
    return begin;
}

void plan_buffer(Plan *plan, const char *name, int64_t bytes, void **pointer) {
    *pointer = NULL;
    if (bytes == 0) { return; }
    bytes = min64(bytes, most_bytes);
    if (plan->count == plan->room) {
        plan->room = plan->room > 0 ? 2 * plan->room : 64;
        plan->rows = realloc_or_die(plan->rows, (size_t)plan->room * sizeof(PlanRow));
    }
    plan->rows[plan->count++] = (PlanRow){name, plan->category, bytes, plan->phase, pointer, NULL};
    int64_t *phase = &plan->phase_bytes[plan->phase];
    *phase = min64(*phase + room_of(bytes), most_bytes);
    plan->bytes = 0;
    for (int i = 0; i < PHASE_COUNT; i++) {
        plan->bytes = max64(plan->bytes, phase_begin(plan, i) + plan->phase_bytes[i]);
    }
}

// A line of the printed plan: all buffers with one name and category.
typedef struct {
    const char *name, *category;
    int count;
    int64_t bytes, sum; // sum: the bytes of the line's category
} Line;

static int compare_lines(const void *a, const void *b) {
    const Line *x = a, *y = b;
    if (x->sum != y->sum) { return x->sum < y->sum ? 1 : -1; }
    int order = strcmp(x->category, y->category);
    if (order == 0 && x->bytes != y->bytes) { return x->bytes < y->bytes ? 1 : -1; }
    return order != 0 ? order : strcmp(x->name, y->name);
}

static void print_size(FILE *out, const char *name, int64_t bytes) {
    char size[32];
    fprintf(out, "  %-34s %12s\n", name, format_bytes(size, (double)bytes));
}

void plan_print(const Plan *plan, const char *title, FILE *out) {
    char times[16], name[64];
    int64_t shared = -plan->bytes;
    int count = 0;
    FREED Line *lines = malloc_or_die((size_t)plan->count * sizeof(Line));
    for (const PlanRow *row = plan->rows; row < plan->rows + plan->count; row++) {
        Line *line = lines;
        while (line < lines + count &&
               (strcmp(line->name, row->name) != 0 || strcmp(line->category, row->category) != 0)) {
            line++;
        }
        if (line == lines + count) { lines[count++] = (Line){row->name, row->category, 0, 0, 0}; }
        line->count++;
        line->bytes = min64(line->bytes + round_up64(row->bytes, PLAN_ALIGN), most_bytes);
    }
    for (int i = 0; i < count * count; i++) {
        Line *line = &lines[i / count], *other = &lines[i % count];
        bool same = strcmp(line->category, other->category) == 0;
        line->sum = min64(line->sum + (same ? other->bytes : 0), most_bytes);
    }
    qsort(lines, (size_t)count, sizeof(Line), compare_lines);
    fprintf(out, "%s\n", title);
    for (const Line *line = lines; line < lines + count; line++) {
        bool first = line == lines || strcmp(line->category, line[-1].category) != 0;
        if (first) { print_size(out, line->category, line->sum); }
        snprintf(times, sizeof(times), line->count > 1 ? "x %d" : "", line->count);
        snprintf(name, sizeof(name), "  %-26s %s", line->name, times);
        print_size(out, name, line->bytes);
    }
    for (int i = 0; i < PHASE_COUNT; i++) { shared += plan->phase_bytes[i]; }
    if (guarded()) {
        print_size(out, "guard zones (LLM8_GUARD)", (int64_t)plan->count * PLAN_GUARD_BYTES);
    }
    if (shared > 0) { print_size(out, "less what phases of a step share", shared); }
    print_size(out, "all", plan->bytes);
}

static void fill(const Plan *plan, void *to, int byte, int64_t bytes) {
    if (plan->memory.fill == NULL) {
        memset(to, byte, (size_t)bytes);
    } else {
        plan->memory.fill(plan->memory.context, to, byte, bytes);
    }
}

void plan_assign(Plan *plan, void *base) {
    char *next[PHASE_COUNT];
    for (int i = 0; i < PHASE_COUNT; i++) { next[i] = (char *)base + phase_begin(plan, i); }
    for (PlanRow *row = plan->rows; row < plan->rows + plan->count; row++) {
        *row->pointer = row->address = next[row->phase];
        next[row->phase] += room_of(row->bytes);
        if (guarded()) {
            fill(plan, row->address + row->bytes, ZONE_BYTE, room_of(row->bytes) - row->bytes);
        }
    }
}

void plan_free(Plan *plan) {
    free(plan->rows);
    *plan = (Plan){0};
}

// ---- the guard ----------------------------------------------------------------------------------

void plan_guard_poison(const Plan *plan) {
    for (int i = 0; i < plan->count && guarded(); i++) {
        const PlanRow *row = &plan->rows[i];
        if (row->phase != PHASE_ALWAYS) { fill(plan, row->address, POISON_BYTE, row->bytes); }
    }
}

bool plan_guard_check(const Plan *plan) {
    unsigned char copy[PLAN_ALIGN + PLAN_GUARD_BYTES], *zone = copy;
    for (int i = 0; i < plan->count && guarded(); i++) {
        const PlanRow *row = &plan->rows[i];
        int64_t bytes = room_of(row->bytes) - row->bytes, at = 0;
        if (plan->memory.fetch == NULL) {
            zone = (unsigned char *)row->address + row->bytes;
        } else {
            plan->memory.fetch(plan->memory.context, copy, row->address + row->bytes, bytes);
        }
        while (at < bytes && zone[at] == ZONE_BYTE) { at++; }
        if (at < bytes) {
            return fail("LLM8_GUARD: buffer '%s' (%s, row %d of the plan) was written past its "
                        "%lld bytes, at byte %lld",
                        row->name, row->category, i, (long long)row->bytes,
                        (long long)(row->bytes + at));
        }
    }
    return true;
}
