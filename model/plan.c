#include "plan.h"

#include <stdlib.h>
#include <string.h>

enum { ZONE_BYTE = 0x5a, POISON_BYTE = 0xff }; // 0xff...: NaN in FP32, BF16, E4M3 and E5M2

// No machine has this much. Sums stop there: those of the largest model that options can describe
// would overflow.
static const int64_t most_bytes = 1ll << 60;

static bool guarded(void) {
    const char *text = getenv("LLM8_GUARD");
    return text != NULL && strcmp(text, "1") == 0;
}

// A buffer and its guard zone, which begins at the first byte that was not requested.
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
        lines[at].bytes = min64(lines[at].bytes + round_up64(row->bytes, PLAN_ALIGN), most_bytes);
    }
    qsort(lines, (size_t)count, sizeof(Line), compare_lines);
    return count;
}

void plan_print(const Plan *plan, FILE *out) {
    char size[32], times[16];
    int64_t shared = -plan->bytes;
    Line *lines = malloc_or_die((size_t)plan->count * sizeof(Line));
    int count = gather_lines(plan, lines);
    fprintf(out, "Memory plan\n");
    for (int i = 0; i < count; i++) {
        const char *category = lines[i].category;
        int64_t sum = 0;
        if (category == NULL) { continue; } // printed
        for (int j = i; j < count; j++) {
            bool same = lines[j].category != NULL && strcmp(lines[j].category, category) == 0;
            sum = min64(sum + (same ? lines[j].bytes : 0), most_bytes);
        }
        fprintf(out, "  %-34s %12s\n", category, format_bytes(size, (double)sum));
        for (int j = i; j < count; j++) {
            if (lines[j].category == NULL || strcmp(lines[j].category, category) != 0) { continue; }
            snprintf(times, sizeof(times), lines[j].count > 1 ? "x %d" : "", lines[j].count);
            fprintf(out, "    %-26s %-5s %12s\n", lines[j].name, times,
                    format_bytes(size, (double)lines[j].bytes));
            lines[j].category = NULL;
        }
    }
    for (int i = 0; i < PHASE_COUNT; i++) { shared += plan->phase_bytes[i]; }
    if (guarded()) {
        fprintf(out, "  %-34s %12s\n", "guard zones (LLM8_GUARD)",
                format_bytes(size, (double)plan->count * PLAN_GUARD_BYTES));
    }
    if (shared > 0) {
        fprintf(out, "  %-34s %12s\n", "less what phases of a step share",
                format_bytes(size, (double)shared));
    }
    fprintf(out, "  %-34s %12s\n", "all", format_bytes(size, (double)plan->bytes));
    free(lines);
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
    for (int i = 0; i < plan->count; i++) {
        PlanRow *row = &plan->rows[i];
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

bool plan_guard_check(const Plan *plan, Error *err) {
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
            return fail(err,
                        "LLM8_GUARD: buffer '%s' (%s, row %d of the plan) was written past its "
                        "%lld bytes, at byte %lld",
                        row->name, row->category, i, (long long)row->bytes,
                        (long long)(row->bytes + at));
        }
    }
    return true;
}
