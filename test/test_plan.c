// The memory plan: which buffers share memory; and the guard of LLM8_GUARD=1, with a planted write
// behind every buffer.
#include "../model/plan.h"
#include "test.h"

typedef struct {
    PlanPhase phase;
    int64_t bytes;
    char *at;
} Buffer;

static Buffer buffers[] = {
    {PHASE_ALWAYS, 100, NULL},    {PHASE_STEP, 256, NULL},       {PHASE_FORWARD, 700, NULL},
    {PHASE_ATTENTION, 257, NULL}, {PHASE_HEAD, 1, NULL},         {PHASE_FORWARD, 300, NULL},
    {PHASE_ALWAYS, 512, NULL},    {PHASE_ATTENTION, 9000, NULL}, {PHASE_STEP, 5, NULL},
};
enum { BUFFERS = COUNT(buffers) };
static const char *const names[BUFFERS] = {"b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8"};

static void fill(void *context, void *to, int byte, int64_t bytes) {
    ++*(int *)context;
    memset(to, byte, (size_t)bytes);
}

static void fetch(void *context, void *to, const void *from, int64_t bytes) {
    ++*(int *)context;
    memcpy(to, from, (size_t)bytes);
}

static int calls;
static const PlanMemory memory = {&calls, fill, fetch};

// Makes the plan of all buffers, in zeroed memory.
static Plan planned(bool guard) {
    Plan plan = {0};
    void *none;
    setenv("LLM8_GUARD", guard ? "1" : "0", 1);
    for (int i = 0; i < BUFFERS; i++) {
        plan_section(&plan, "test", buffers[i].phase);
        plan_buffer(&plan, names[i], buffers[i].bytes, (void **)&buffers[i].at);
    }
    plan_buffer(&plan, "nothing", 0, &none);
    CHECK(none == NULL);
    void *base = aligned_alloc(PLAN_ALIGN, (size_t)plan.bytes);
    if (base == NULL) { die("out of memory"); }
    memset(base, 0, (size_t)plan.bytes);
    plan.memory = memory;
    plan_assign(&plan, base);
    calls = 0;
    return plan;
}

static void release(Plan *plan) {
    free(buffers[0].at); // the first of the plan
    plan_free(plan);
}

// Whether two buffers are ever in use together.
static bool exclusive(const Buffer *a, const Buffer *b) {
    return a->phase > PHASE_STEP && b->phase > PHASE_STEP && a->phase != b->phase;
}

TEST(buffers_in_use_together_are_apart) {
    for (int guard = 0; guard < 2; guard++) {
        CLOSED(release) Plan plan = planned(guard);
        int shared = 0;
        for (int i = 0; i < BUFFERS; i++) {
            const Buffer *a = &buffers[i];
            CHECK_EQUAL((uintptr_t)a->at % PLAN_ALIGN, 0);
            CHECK(a->at >= buffers[0].at && a->at + a->bytes <= buffers[0].at + plan.bytes);
            for (int j = 0; j < i; j++) {
                const Buffer *b = &buffers[j];
                bool apart = a->at + a->bytes <= b->at || b->at + b->bytes <= a->at;
                CHECK(apart || exclusive(a, b));
                shared += !apart;
            }
        }
        CHECK(guard ? shared == 0 : shared > 0);
        if (!guard) { // rounded up: always 256 + 512, step 256 + 256, the largest phase 512 + 9216
            CHECK_EQUAL(plan.bytes, 768 + 512 + 9728);
        }
    }
}

// The guard notices every byte behind every buffer, and no byte inside one.
TEST(overruns_are_named) {
    CLOSED(release) Plan plan = planned(true);
    CHECK(plan_guard_check(&plan));
    for (int i = 0; i < BUFFERS; i++) {
        const Buffer *b = &buffers[i];
        memset(b->at, 1, (size_t)b->bytes);
        CHECK(plan_guard_check(&plan));
        int64_t end = round_up64(b->bytes, PLAN_ALIGN) + PLAN_GUARD_BYTES;
        for (int64_t at = b->bytes; at < end; at += at + 3 < end ? 3 : 1) {
            char kept = b->at[at];
            b->at[at] ^= 1;
            CHECK(!plan_guard_check(&plan));
            CHECK_CONTAINS(error_text(), names[i]);
            b->at[at] = kept;
        }
        CHECK(plan_guard_check(&plan));
    }
}

TEST(poison_covers_what_a_step_makes) {
    CLOSED(release) Plan plan = planned(true);
    plan_guard_poison(&plan);
    CHECK(plan_guard_check(&plan));
    for (int i = 0; i < BUFFERS; i++) {
        unsigned char expected = buffers[i].phase == PHASE_ALWAYS ? 0 : 0xff;
        for (int64_t at = 0; at < buffers[i].bytes; at++) {
            CHECK_EQUAL((unsigned char)buffers[i].at[at], expected);
        }
    }
}

TEST(without_the_variable_nothing_is_touched) {
    CLOSED(release) Plan plan = planned(false);
    plan_guard_poison(&plan);
    buffers[BUFFERS - 1].at[buffers[BUFFERS - 1].bytes] = 1;
    CHECK(plan_guard_check(&plan));
    CHECK_EQUAL(calls, 0);
}

// A model that options allow may need more than 2^63 bytes.
TEST(sums_do_not_overflow) {
    enum { ROWS = 40 };
    Plan plan = {0};
    void *pointers[ROWS];
    char text[4096] = "";
    for (int i = 0; i < ROWS; i++) {
        plan_section(&plan, "test", i % PHASE_COUNT);
        plan_buffer(&plan, i % 2 ? "odd" : "even", INT64_MAX / (i % 3 + 1), &pointers[i]);
        CHECK(plan.bytes >= 1ll << 60);
    }
    FILE *out = fmemopen(text, sizeof(text), "w");
    if (out == NULL) { die("no memory to print into"); }
    plan_print(&plan, "Memory plan", out);
    fclose(out);
    CHECK(strchr(text, '-') == NULL); // no negative number
    plan_free(&plan);
}
