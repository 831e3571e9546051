// Undamaged checkpoints: what is saved is read back, with any number of ranks and in another
// precision; which ones are kept; which one --resume takes. test_damage.c has damaged ones.
#include "../kernels/cpu.h"
#include "fixture.h"

#include <cjson/cJSON.h>
#include <sys/stat.h>
#include <unistd.h>

#define SAVED TINY "--save s --global-batch-size 8 "
#define DELAYED SAVED "--fp8-format hybrid --fp8-amax-history-len 6 "

// best: the step that has a validation loss, which is lower than earlier ones.
static void save_steps(const char *options, int first, int last, int best) {
    FIXTURE(f, options);
    for (int step = first; step <= last; step++) {
        f.snapshot.progress.valid_loss = step == best ? 100 - step : NAN;
        CHECK(fixture_save(&f, step));
    }
}

// Reads the state in `parts` pieces and compares it with the fixture's.
static void check_state(const Checkpoint *c, const Fixture *f, int parts) {
    int64_t n = f->layout.size;
    FREED float *out = malloc_or_die((size_t)n * sizeof(float));
    for (int kind = 0; kind < 3; kind++) {
        memset(out, 0xff, (size_t)n * sizeof(float));
        for (int i = 0; i < parts; i++) {
            int64_t begin = n * i / parts, end = n * (i + 1) / parts;
            CHECK(checkpoint_read(c, kind, begin, end, out + begin, NULL, NULL));
        }
        CHECK_BITS(out, f->state + kind * n, (size_t)n * sizeof(float));
    }
}

TEST(state_comes_back) {
    FIXTURE(f, SAVED);
    Progress *p = &f.snapshot.progress;
    *p = (Progress){0, 1ll << 52, (1ll << 53) - 1, 3, 2, 0.1 + 0.2, NAN, 5e-324, NAN, 2.5, 7,
                    4, {0}};
    p->window.count = SPIKE_WINDOW + 3;
    for (int i = 0; i < SPIKE_WINDOW; i++) {
        p->window.loss[i] = 0.1 * i;
        p->window.norm[i] = 1e-300 / (i + 1);
    }
    CHECK(fixture_save(&f, 123456789012));
    CHECKPOINT(c, "s/step_123456789012");
    CHECK_BITS(&c.progress, p, sizeof(*p));
    CHECK_EQUAL(c.layout_size, f.layout.size);
    CHECK_EQUAL(c.ranks, 1);
    CHECK_TEXT(json_text(c.meta, "precision", ""), "FP32");
    CHECK_TEXT(cJSON_GetObjectItem(c.options, "num-layers")->valuestring, "2");
    for (int parts = 1; parts < 20; parts++) { check_state(&c, &f, parts); }
    float other;
    CHECK(!checkpoint_read(&c, STATE_MASTER, f.layout.size, f.layout.size + 1, &other, NULL, NULL));
}

// What a GPU run saves: BF16 weights in model.safetensors, FP32 master weights, BF16 moments.
TEST(bf16_moments_come_back) {
    FIXTURE(f, SAVED "--bf16");
    int64_t n = f.layout.size;
    FREED uint16_t *codes = malloc_or_die((size_t)(3 * n) * sizeof(uint16_t));
    for (int64_t i = 0; i < 3 * n; i++) { codes[i] = bf16_encode(f.state[i]); }
    for (int64_t i = n; i < 3 * n; i++) { f.state[i] = bf16_decode(codes[i]); }
    f.snapshot.model_dtype = DTYPE_BF16;
    f.snapshot.model = codes;
    f.snapshot.state[STATE_EXP_AVG] = (SavedArray){DTYPE_BF16, n, codes + n, 0};
    f.snapshot.state[STATE_EXP_AVG_SQ] = (SavedArray){DTYPE_BF16, n, codes + 2 * n, 0};
    CHECK(fixture_save(&f, 1));
    CHECKPOINT(c, "s/step_00000001");
    check_state(&c, &f, 3);
    CHECK_EQUAL(c.model.entries[0].dtype, DTYPE_BF16);
    CHECK_TEXT(json_text(c.meta, "precision", ""), "BF16");
}

// Muon's elements, the last ones of a rank, have no second moments: reading them is refused. Where
// a rank has no others, its arrays of AdamW are empty, and have no address.
TEST(second_moments_may_end_early) {
    FIXTURE(f, SAVED);
    int64_t n = f.layout.size, ends[] = {n - 64, 0, 0};
    FREED uint16_t *momentum = calloc_or_die((size_t)n, sizeof(uint16_t));
    FREED float *out = malloc_or_die((size_t)n * sizeof(float));
    SavedArray *state = f.snapshot.state;
    for (int i = 0; i < COUNT(ends); i++) {
        int64_t known = ends[i];
        bool codes = i == 2;
        state[STATE_EXP_AVG_SQ] = (SavedArray){codes ? DTYPE_U8 : DTYPE_F32, known,
                                               known > 0 ? f.state + 2 * n : NULL, 0};
        if (codes) {
            state[STATE_EXP_AVG] = (SavedArray){DTYPE_I8, 0, NULL, 0};
            state[STATE_MOMENTUM] = (SavedArray){DTYPE_BF16, n, momentum, 0};
        }
        CHECK(fixture_save(&f, 1 + i));
        CHECKPOINT(c, text_of("s/step_%08d", 1 + i));
        CHECK(checkpoint_read(&c, STATE_EXP_AVG, 0, n, out, NULL, NULL));
        CHECK(checkpoint_read(&c, STATE_EXP_AVG_SQ, 0, known, out, NULL, NULL));
        CHECK_BITS(out, f.state + 2 * n, (size_t)known * sizeof(float));
        CHECK_REFUSED(checkpoint_read(&c, STATE_EXP_AVG_SQ, known / 2, known + 1, out, NULL, NULL),
                      "have no 'exp_avg_sq'");
    }
}

// Moments in 8 bits come back as codes, and as the floats that they stand for; Muon's momentum from
// its own array. Arrays that do not fit each other are refused.
TEST(moments_in_8_bits_come_back) {
    CLOSED(checkpoint_close) Checkpoint c;
    FIXTURE(f, SAVED "--adam-dtype 8bit");
    int64_t n = f.layout.size, known = n - 128, scales = state_scales(known);
    FREED uint8_t *codes = malloc_or_die(2 * (size_t)known), *read = malloc_or_die((size_t)known);
    FREED uint16_t *numbers = calloc_or_die(3 * (size_t)scales + 128, sizeof(uint16_t));
    FREED float *expected = malloc_or_die((size_t)n * sizeof(float)),
                *out = malloc_or_die((size_t)n * sizeof(float));
    uint16_t *momentum = numbers + 2 * scales, *read_scales = momentum + 128;
    SavedArray *state = f.snapshot.state;
    for (Moment which = MOMENT_FIRST; which <= MOMENT_SECOND; which++) {
        uint8_t *to = codes + (which == MOMENT_SECOND ? known : 0);
        uint16_t *with = numbers + (which == MOMENT_SECOND ? scales : 0);
        moment_encode(to, with, which, f.state + n, known, NULL);
        int array = STATE_EXP_AVG + (which == MOMENT_SECOND);
        state[array] = (SavedArray){which == MOMENT_FIRST ? DTYPE_I8 : DTYPE_U8, known, to, 0};
        state[array + STATE_EXP_AVG_SCALE - STATE_EXP_AVG] = (SavedArray){DTYPE_BF16, scales, with,
                                                                          0};
    }
    for (int i = 0; i < 128; i++) { momentum[i] = bf16_encode((float)i - 60.0f); }
    state[STATE_MOMENTUM] = (SavedArray){DTYPE_BF16, 128, momentum, 0};
    CHECK(fixture_save(&f, 1));
    CHECK(checkpoint_open(&c, "s/step_00000001", true));
    CHECK(c.moments8);
    for (Moment which = MOMENT_FIRST; which <= MOMENT_SECOND; which++) {
        const uint8_t *from = codes + (which == MOMENT_SECOND ? known : 0);
        const uint16_t *with = numbers + (which == MOMENT_SECOND ? scales : 0);
        int array = STATE_EXP_AVG + (which == MOMENT_SECOND);
        moment_decode(expected, which, from, with, 0, known);
        CHECK(checkpoint_read(&c, array, 0, known, out, NULL, NULL));
        CHECK_BITS(out, expected, (size_t)known * sizeof(float));
        CHECK(checkpoint_read(&c, array, 100, 300, out, NULL, NULL));
        CHECK_BITS(out, expected + 100, 200 * sizeof(float));
        CHECK(checkpoint_read(&c, array, 64, 320, NULL, read, read_scales));
        CHECK_BITS(read, from + 64, 256);
        CHECK_BITS(read_scales, with + 1, 4 * sizeof(uint16_t));
    }
    CHECK(checkpoint_read(&c, STATE_EXP_AVG, known, n, out, NULL, NULL));
    CHECK(out[0] == -60.0f && out[127] == 67.0f);
    CHECK_REFUSED(checkpoint_read(&c, STATE_EXP_AVG_SQ, known, n, out, NULL, NULL),
                  "have no 'exp_avg_sq'");
    CHECK_REFUSED(checkpoint_read(&c, STATE_EXP_AVG, known, n, NULL, read, read_scales),
                  "have no 'exp_avg'");

    // what was not trained is not saved: the hash of each array
    for (int i = 0; i < STATE_ARRAYS; i++) {
        f.snapshot.progress.step = 2 + i;
        fixture_hash(&f);
        state[i].hash ^= 1;
        CHECK_REFUSED(checkpoint_save(&f.snapshot), "differs from what was trained");
        CHECK_CONTAINS(error_text(), text_of("'%s'", state_names[i]));
        CHECK(!path_exists(text_of("s/step_%08d", 2 + i)));
    }
    static const struct {
        int array;
        Dtype dtype;
        int64_t less;
    } wrong[] = {{STATE_EXP_AVG, DTYPE_I8, 64},        {STATE_EXP_AVG_SQ, DTYPE_U8, 64},
                 {STATE_EXP_AVG_SCALE, DTYPE_BF16, 4}, {STATE_EXP_AVG_SQ_SCALE, DTYPE_F16, 0},
                 {STATE_MOMENTUM, DTYPE_BF16, 64},     {STATE_EXP_AVG, DTYPE_U8, 0}};
    for (int i = 0; i < COUNT(wrong); i++) {
        SavedArray *a = &state[wrong[i].array], was = *a;
        a->dtype = wrong[i].dtype;
        a->count -= wrong[i].less;
        f.snapshot.progress.step = 20 + i;
        fixture_hash(&f);
        CHECK_REFUSED(checkpoint_save(&f.snapshot), " is missing or not ");
        *a = was;
    }
    numbers[1] = 0x7f80; // an infinite scale
    CHECK(fixture_save(&f, 40));
    checkpoint_close(&c);
    CHECK(checkpoint_open(&c, "s/step_00000040", true));
    CHECK_REFUSED(checkpoint_read(&c, STATE_EXP_AVG, 64, 128, out, NULL, NULL),
                  "'exp_avg_scale' has inf");
}

// Reads DELAYED's scaling state under other options. It starts anew, slot by slot, where they make
// other scales: `gradients` or the `others`. The head is not in FP8, and has no state.
static void check_scaling(const char *options, bool gradients, bool others) {
    FIXTURE(f, options);
    int slots = fp8_slot_count(&f.config), length = f.precision.history_length;
    memset(f.slots, 0, (size_t)slots * sizeof(Fp8Scale));
    memset(f.history, 0, (size_t)(slots * length) * sizeof(float));
    CHECKPOINT(c, "s/step_00000100");
    CHECK(checkpoint_read_scaling(&c, &f.precision, f.slots, f.history));
    for (int i = 0; i < slots; i++) {
        bool gradient = i % OPERAND_COUNT == OPERAND_DY, head = i / OPERAND_COUNT == 8;
        if (head || !(gradient ? gradients : others)) {
            CHECK(f.slots[i].scale == 0 && f.slots[i].count == 0);
            continue;
        }
        float scale = (float)(i + 2);
        CHECK(f.slots[i].scale == scale && f.slots[i].scale_inv == 1.0f / scale);
        CHECK_EQUAL(f.slots[i].count, i);
        CHECK(f.slots[i].amax == 0);
        int known = (int)min64(i, 6);
        for (int put = i - known; put < i; put++) {
            CHECK(f.history[i * length + put % length] == (float)(1000 * i + put));
        }
    }
}

TEST(scaling_state_is_kept_or_starts_anew) {
    CLOSED(checkpoint_close) Checkpoint c;
    FIXTURE(f, DELAYED);
    CHECK(fixture_save(&f, 100));
    check_scaling(DELAYED, true, true);
    check_scaling(DELAYED "--fp8-amax-history-len 4", false, false);
    check_scaling(DELAYED "--fp8-amax-history-len 50", false, false);
    check_scaling(DELAYED "--fp8-format e4m3", false, true);
    check_scaling(DELAYED "--fp8-e5m2-margin 0", false, true);
    check_scaling(DELAYED "--fp8-margin 1", false, false);
    check_scaling(DELAYED "--micro-batch-size 2 --global-batch-size 2", false, true);

    FIXTURE(plain, DELAYED "--fp8-recipe tensorwise");
    Fp8Scale before = plain.slots[3];
    CHECK(checkpoint_open(&c, "s/step_00000100", true));
    CHECK(checkpoint_read_scaling(&c, &plain.precision, plain.slots, plain.history));
    CHECK_BITS(&plain.slots[3], &before, sizeof(before));
    checkpoint_close(&c);
    CHECK(fixture_save(&plain, 200)); // it has none, so the delayed run keeps its own
    CHECK(!path_exists("s/step_00000200/scaling.safetensors"));
    CHECK(checkpoint_open(&c, "s/step_00000200", true));
    CHECK(checkpoint_read_scaling(&c, &f.precision, f.slots, f.history));
    CHECK(f.slots[3].scale == 5.0f && f.slots[3].count == 3);
}

TEST(scaling_of_another_run_is_refused) {
    static const int counts[] = {INT32_MAX, 101, -1, 5};
    for (int i = 0; i < COUNT(counts); i++) {
        FIXTURE(f, DELAYED);
        f.slots[5].count = counts[i];
        CHECK(fixture_save(&f, 100));
        FIXTURE(now, i < 3 ? DELAYED : DELAYED "--num-layers 3");
        CHECKPOINT(c, "s/step_00000100");
        CHECK_REFUSED(checkpoint_read_scaling(&c, &now.precision, now.slots, now.history),
                      i < 3
                          ? "s/step_00000100/scaling.safetensors: damaged: a scale has more steps "
                            "than the run"
                          : "s/step_00000100/scaling.safetensors: not the scaling state of 39 "
                            "tensors");
    }
}

// So is one of another optimizer, because its moments mean something else. A run that does not
// train needs no moments.
TEST(other_models_are_refused) {
#define ANOTHER "s/step_00000001: another model's checkpoint: it has --"
    static const struct {
        const char *saved, *now, *refused;
    } rows[] = {
        {"", "--num-layers 3", ANOTHER "num-layers 2, this run 3"},
        {"", "--hidden-size 64", ANOTHER "hidden-size 32, this run 64"},
        {"", "--num-attention-heads 4", ANOTHER "num-attention-heads 2, this run 4"},
        {"", "--num-query-groups 2", ANOTHER "num-query-groups 1, this run 2"},
        {"", "--ffn-hidden-size 48", ANOTHER "ffn-hidden-size 32, this run 48"},
        {"", "--vocab-size 21", ANOTHER "vocab-size 20, this run 21"},
        {"", "--untie-embeddings-and-output-weights",
         ANOTHER "untie-embeddings-and-output-weights false, this run true"},
        {"", "--arch gpt2 --num-query-groups 2", ANOTHER "arch llama, this run gpt2"},
        {"", "--seq-length 16 --lr 1e-5 --fp8-format e4m3 --rope-theta 5e5", NULL},
        {"", "--optimizer muon", "those of --optimizer adamw, this run's is muon"},
        {"--optimizer muon", "", "those of --optimizer muon, this run's is adamw"},
        {"--optimizer muon", "--optimizer muon --muon-momentum 0.9", NULL},
        {"--optimizer muon", "--eval-only --valid-data x", NULL},
    };
    EACH (row, rows) {
        FIXTURE(f, text_of(SAVED "%s", row->saved));
        CHECK(fixture_save(&f, 1));
        FIXTURE(now, text_of(SAVED "%s", row->now));
        CHECKPOINT(c, "s/step_00000001");
        if (row->refused != NULL) {
            CHECK_REFUSED(checkpoint_match(&c, &now.options, &now.layout), row->refused);
        } else {
            CHECK(checkpoint_match(&c, &now.options, &now.layout));
            now.layout.size++;
            CHECK(!checkpoint_match(&c, &now.options, &now.layout));
        }
    }
}

// The step in the target of a link in the folder s; -1: there is no such link.
static long long linked(const char *name) {
    char target[64] = "";
    long long step = -1;
    if (readlink(text_of("s/%s", name), target, sizeof(target) - 1) > 0) {
        sscanf(target, "step_%lld", &step);
    }
    return step;
}

// Lists the steps in the folder s, oldest first, as "1 2 3", the newest and the best. The links
// must lead there.
static const char *shown(void) {
    static char text[400];
    int64_t *steps;
    int count = checkpoint_steps("s", &steps);
    size_t used = 0;
    for (int i = count - 1; i >= 0; i--) {
        used += (size_t)snprintf(text + used, sizeof(text) - used, "%lld ", (long long)steps[i]);
    }
    long long latest = count > 0 ? steps[0] : -1, best = checkpoint_best("s");
    free(steps);
    snprintf(text + used, sizeof(text) - used, "latest %lld, best %lld", latest, best);
    CHECK(linked("latest") == latest && linked("best") == best);
    return text;
}

static bool is_step(const char *path, int64_t step) {
    CLOSED(checkpoint_close) Checkpoint c;
    return checkpoint_open(&c, path, true) && c.progress.step == step;
}

TEST(newest_and_best_are_kept) {
    folder_remove("s");
    save_steps(SAVED "--keep 3", 1, 3, 0);
    CHECK_TEXT(shown(), "1 2 3 latest 3, best -1");
    save_steps(SAVED "--keep 3", 4, 10, 4);
    CHECK_TEXT(shown(), "4 8 9 10 latest 10, best 4");
    save_steps(SAVED "--keep 3", 11, 11, 11);
    CHECK_TEXT(shown(), "8 9 10 11 latest 11, best 11");
    save_steps(SAVED "--keep 1", 12, 12, 0);
    CHECK_TEXT(shown(), "11 12 latest 12, best 11");
    save_steps(SAVED "--keep 0", 13, 20, 0);
    CHECK_TEXT(shown(), "11 12 13 14 15 16 17 18 19 20 latest 20, best 11");
    save_steps(SAVED "--keep 2", 15, 15, 0); // what is saved is the newest; no later one is lost
    CHECK_TEXT(shown(), "11 14 15 latest 15, best 11");
    for (int step = 15; step <= 20; step++) {
        CHECK(is_step(text_of("s/step_%08d.aside-1", step), step));
    }
}

// Evaluations between the saves (best_valid_loss) do not matter, and losses on other data do not
// count.
TEST(best_is_the_lowest_of_what_is_kept) {
    static const struct {
        double loss;
        const char *data;
        int64_t tokens;
        const char *shown;
    } rows[] = {
        {2.34, "0123abcd a\n", 64, "1 latest 1, best 1"},
        {2.23, "0123abcd b\n", 64, "1 2 latest 2, best 2"},
        {2.13, "0123abcd b\n", 64, "2 3 latest 3, best 3"},
        {2.13, "0123abcd b\n", 64, "3 4 latest 4, best 3"},
        {NAN, "0123abcd b\n", 64, "3 5 latest 5, best 3"},
        {NAN, NULL, 0, "3 6 latest 6, best 3"},
        {NAN, "0123abce b\n", 64, "3 7 latest 7, best 3"},
        {2.5, "0123abce b\n", 64, "7 8 latest 8, best 8"},
        {2.6, "0123abce b\n0123abce c\n", 64, "8 9 latest 9, best 9"},
        {2.7, "0123abce b\n0123abce c\n", 32, "9 10 latest 10, best 10"},
    };
    folder_remove("s");
    FIXTURE(f, SAVED "--keep 1");
    f.snapshot.progress.best_valid_loss = 2.0;
    EACH (row, rows) {
        int64_t step = row - rows + 1;
        f.snapshot.progress.valid_loss = row->loss;
        f.snapshot.valid_data = row->data;
        f.snapshot.valid_tokens = row->tokens;
        CHECK(fixture_save(&f, step));
        CHECK_TEXT(shown(), row->shown);
    }
}

static bool go_back(const char *to) {
    CLOSED(checkpoint_close) Checkpoint c;
    Options o = options_of(SAVED);
    return checkpoint_open(&c, to, true) && checkpoint_go_back(&o, &c);
}

// When a run goes back, later checkpoints are set aside: they are neither resumed nor `best`, and
// are not lost.
TEST(going_back_sets_newer_ones_aside) {
    folder_remove("s");
    save_steps(SAVED "--keep 0", 1, 2, 2);
    save_steps(SAVED "--keep 0", 3, 4, 4);
    CHECK_TEXT(shown(), "1 2 3 4 latest 4, best 4");
    CHECK(go_back("s/latest"));
    CHECK_TEXT(shown(), "1 2 3 4 latest 4, best 4");
    CHECK(go_back("s/step_00000003"));
    CHECK_TEXT(shown(), "1 2 3 latest 3, best 2");
    CHECK(is_step("s/step_00000004.aside-1", 4));
    save_steps(SAVED "--keep 0", 4, 4, 0);
    CHECK(go_back("s/step_00000001"));
    CHECK_TEXT(shown(), "1 latest 1, best -1");
    CHECK(is_step("s/step_00000004.aside-1", 4) && is_step("s/step_00000004.aside-2", 4));
    CHECK(is_step("s/step_00000003.aside-1", 3) && is_step("s/step_00000002.aside-1", 2));
    // there are two checkpoints of one step: it is not clear which one is the run's
    CHECK_REFUSED(
        claim(options_of(SAVED "--resume s/step_00000004.aside-1")),
        "s: holds checkpoints of another run than --resume s/step_00000004.aside-1; give ");
    CHECK_CONTAINS(error_text(), "; if it is this run's, rename it to step_00000004");
    CHECK_TEXT(shown(), "1 latest 1, best -1");
    CHECK(rename("s/step_00000003.aside-1", "s/step_00000004") == 0); // the name is taken
    CHECK_REFUSED(claim(options_of(SAVED "--resume s/step_00000004.aside-1")),
                  "give step_00000004 there another name first, and rename it to step_00000004");
    CHECK(rename("s/step_00000004", "s/step_00000003.aside-1") == 0);
    CHECK(rename("s/step_00000002.aside-1", "s/step_00000002") == 0);
    CHECK(go_back("s/step_00000002"));
    CHECK_TEXT(shown(), "1 2 latest 2, best 2");
}

// A path that ends in latest or best leads to the newest or the best step beside it, whatever has
// that name. Without steps beside it, it is what it says.
TEST(paths_are_resolved) {
    static const char *const there[] = {"a link", "another link", "a file", "a folder", "nothing"};
    char path[PATH_LENGTH];
    folder_remove("s");
    save_steps(SAVED "--keep 0", 1, 4, 2);
    CHECK(rename("s/step_00000003", "elsewhere") == 0);
    CHECK(symlink("../elsewhere", "s/step_00000003") == 0 && symlink("s", "way") == 0);
    for (size_t i = 0; i < COUNT(there); i++) {
        if (i > 0) { folder_remove("s/latest"); }
        if (i == 1) { CHECK(symlink("step_00000009", "s/latest") == 0); }
        if (i == 2) { text_write("s/latest", "step_00000001\n"); }
        if (i == 3) { folder_make("s/latest"); }
        if (i == 4) { CHECK(folder_remove("s/best") && folder_make("s/best")); }
        static const char *const rows[][2] = {
            {"s/latest", "s/step_00000004"},        {"s/latest//", "s/step_00000004"},
            {"s/best", "s/step_00000002"},          {"way/../s/best/", "way/../s/step_00000002"},
            {"way/latest", "way/step_00000004"},    {"./s/step_00000001", "./s/step_00000001"},
            {"s/step_00000003", "s/step_00000003"},
        };
        EACH (row, rows) {
            CHECK(checkpoint_follow(path, (*row)[0]));
            CHECK_TEXT(path, (*row)[1]);
        }
    }
    CHECK(chdir("s") == 0 && checkpoint_follow(path, "latest") && chdir("..") == 0);
    CHECK_TEXT(path, "step_00000004");
    CHECK(folder_make("alone/best") && rename("s/step_00000004", "alone/latest") == 0);
    CHECK(is_step("alone/latest", 4) && is_step("alone/latest/", 4));
    CHECK(checkpoint_follow(path, "alone/best") && strcmp(path, "alone/best") == 0);
    folder_remove("s");
    folder_remove("alone");
}

// A run that saves in a new folder starts again from the same checkpoint until its first save: a
// link of that step leads there.
TEST(a_run_begins_again_where_it_began) {
    CLOSED(checkpoint_close) Checkpoint c;
    Options o = options_of(TINY "--save t --resume latest");
    struct stat link, same;
    folder_remove("s");
    folder_remove("t");
    save_steps(SAVED "--keep 0", 1, 3, 0);
    CHECK(folder_make("t") && resumed(o) == 0);
    CHECK(checkpoint_open(&c, "s/step_00000002", true) && checkpoint_go_back(&o, &c));
    CHECK(resumed(o) == 2 && lstat("t/step_00000002", &link) == 0 && S_ISLNK(link.st_mode));
    CHECK(checkpoint_go_back(&o, &c)); // nothing changes: scripts/restart.sh relies on that
    CHECK(resumed(o) == 2 && lstat("t/step_00000002", &same) == 0 && same.st_ino == link.st_ino);
    // if it is lost or damaged, nothing else is taken
    CHECK(rename("s/step_00000002", "s/lost") == 0 && resumed(o) == -1);
    CHECK_CONTAINS(error_text(), "t/step_00000002/meta.json: No such file or directory");
    CHECK(rename("s/lost", "s/step_00000002") == 0 && resumed(o) == 2);
    CHECK(rename("s/step_00000002/config.json", "s/config.json") == 0 && resumed(o) == -1);
    CHECK_CONTAINS(error_text(), "t/step_00000002/config.json: No such file or directory");
    CHECK(rename("s/config.json", "s/step_00000002/config.json") == 0);
    // it is that run's, and no other's
    CHECK_REFUSED(claim(options_of(TINY "--save t")),
                  "t: a run has saved there up to step 2; resume it");
    CHECK_REFUSED(claim(options_of(TINY "--save t --resume s/step_00000001")),
                  "t: holds checkpoints of another run than --resume");
    CHECK(claim(options_of(TINY "--save t --resume s/step_00000002")));
    FIXTURE(f, TINY "--save t --keep 1");
    CHECK(fixture_save(&f, 5) && resumed(o) == 5);
    CHECK(!path_exists("t/step_00000002") && path_exists("s/step_00000002/meta.json"));
    folder_remove("t");
}

// A run that continues takes from the checkpoint what is not given, but for the number of GPUs and
// where files go; what followed from --train-iters follows from the new one.
TEST(a_resume_takes_what_is_not_given) {
#define BEGUN TINY "--save s "
#define RESUMED BEGUN "--resume latest "
    static const struct {
        const char *saved, *now, *expected;
    } rows[] = {
        {"--lr 0.003", RESUMED, "lr 0.003"},
        {"--lr 0.003", RESUMED "--lr 0.5", "lr 0.5"},
        {"--lr 0.003", RESUMED "--lr 6e-4", "lr 0.0006"}, // though it is the default
        {"--clip-grad 0 --min-lr 1e-5 --no-shuffle --data a --valid-data b --seed 5 --keep 0 "
         "--eval-interval 7 --save-interval 9 --iterations-to-skip 3,7-8 --metrics m --gpus 2 "
         "--optimizer-cpu-offload",
         RESUMED,
         "clip-grad 0, min-lr 1e-05, shuffle false, data a, valid-data b, seed 5, keep 0, "
         "eval-interval 7, save-interval 9, iterations-to-skip 3,7-8, metrics , gpus 1, "
         "optimizer-cpu-offload false"},
        {"--optimizer muon", RESUMED, "optimizer muon"},
        {"--fp8-format e4m3 --fp8-margin 2", RESUMED, "fp8-margin 2"},
        {"--fp8-format e4m3", RESUMED "--fp8-format none", "fp8-format none"},
        {"--bf16", RESUMED "--no-bf16", "bf16 false"},
        {"--fp8-format e4m3", RESUMED "--bf16", "fp8-format none, bf16 true"},
        {"--fp8-format e4m3", RESUMED "--bf16 --fp8-format hybrid", "fp8-format hybrid"},
        {"--fp8-format e4m3 --bf16", RESUMED, "fp8-format e4m3, bf16 true"},
        {"--fp8-format e4m3", RESUMED "--config bf16.txt", "fp8-format none, bf16 true"},
        {"--fp8-format e4m3", RESUMED "--no-bf16", "fp8-format e4m3"},
        {"--check-interval 5", RESUMED "--no-deterministic", "check-interval 0"},
        {"--sample-prompt a", RESUMED "--sample-tokens 1", "sample-prompt , sample-tokens 1"},
        {"--sample-tokens 1", RESUMED "--sample-prompt a", "sample-prompt a, sample-tokens "},
        {"--load x", RESUMED, "load x, embedding-lr-mult 1"},
        {"--load x", RESUMED "--load y", "load x"}, // the weights are neither's
        {"", RESUMED "--load y", "load "},
        {"", BEGUN "--resume s/latest --load y", "load "},
        {"--train-iters 50", RESUMED, "train-iters 50, lr-decay-iters 50"},
        {"--train-iters 50", RESUMED "--train-iters 90", "lr-decay-iters 90"},
        {"--train-iters 50 --lr-decay-iters 30", RESUMED "--train-iters 90", "lr-decay-iters 30"},
        {"--train-iters 50 --lr-decay-iters 50", RESUMED "--train-iters 90",
         "lr-decay-iters 50"}, // given, though it follows too
        {"--train-iters 50 --lr-decay-iters 0", RESUMED "--train-iters 90", "lr-decay-iters 90"},
        {"--lr-wsd-decay-iters 20 --train-iters 50", RESUMED "--train-iters 90",
         "lr-wsd-decay-iters 20"},
        {"--train-iters 50 --lr-decay-style wsd", RESUMED "--train-iters 90",
         "lr-wsd-decay-iters 36"},
        {"--train-iters 50 --lr-decay-style wsd --lr-decay-iters 30", RESUMED "--train-iters 90",
         "lr-wsd-decay-iters 12"},
        {"--train-iters 50 --lr-decay-style wsd --lr-wsd-decay-iters 10",
         RESUMED "--train-iters 90", "lr-wsd-decay-iters 10"}, // a fifth, once the rule
        {"--train-iters 50 --lr-decay-style cosine", RESUMED, "lr-decay-style cosine"},
        {"--train-iters 50 --lr-decay-style cosine", RESUMED "--lr-decay-style wsd",
         "lr-wsd-decay-iters 20"},
        {"", RESUMED, "embedding-lr-mult 4"},
        {"", RESUMED "--load x", "embedding-lr-mult 4"},
        {"--embedding-lr-mult 1", RESUMED, "embedding-lr-mult 1"},
        {"", RESUMED "--vector-lr-mult 2", "vector-lr-mult 2"},
        {"--micro-batch-size 2", RESUMED,
         "global-batch-size 4, micro-batch-size 2"}, // two ranks saved it
        {"--fp8-format e4m3", RESUMED "--fp8-recipe blockwise", "fp8-fast-accumulation forward"},
        {"--lr 0.003", BEGUN "--load s/latest", "lr 0.0006"},
        {"--lr 0.003 --bf16", RESUMED "--eval-only --valid-data v", "lr 0.0006, bf16 true"},
        {"--eval-iters 3", RESUMED "--eval-only --valid-data v", "eval-iters 3"},
        {"--data a", RESUMED "--eval-only --valid-data v", "data "},
        {"--data a", RESUMED "--sample-only", "data "},
    };
    text_write("bf16.txt", "bf16\n");
    EACH (row, rows) {
        Options o, model;
        folder_remove("s");
        FIXTURE(f, text_of(BEGUN "%s", row->saved));
        f.options.global_batch_size = 2 * f.options.micro_batch_size;
        CHECK(fixture_save(&f, 1));
        CHECK(read_given(&o, row->now) && read_start(&o, &model));
        CHECK(resolve_run(&o, &model, 1));
        check_values(&o, row->saved, row->expected);
    }
#undef RESUMED
#undef BEGUN
}

// Values that followed from others stay out of the config.txt of a resumed run, too; the rest of
// what it took is there. What contradicts a value that was taken says where that comes from.
TEST(what_a_resume_takes_is_told) {
    Options o, model;
    folder_remove("s");
    FIXTURE(f, SAVED "--lr 0.003 --min-lr 1e-4 --data a --global-batch-size 8");
    CHECK(fixture_save(&f, 1));
    for (int ranks = 1; ranks <= 2; ranks++) { // eight sequences are what two of them have anyway
        CHECK(read_given(&o, "--resume latest --save s") && read_start(&o, &model));
        CHECK(resolve_run(&o, &model, ranks));
        write_config(&o);
        const char *config = text_read("config.txt");
        CHECK_CONTAINS(config, "\nlr 0.003\n");
        CHECK_CONTAINS(config, "\ndata a\n");
        CHECK(strstr(config, "-iters") == NULL && strstr(config, "-lr-mult") == NULL);
        CHECK_EQUAL(strstr(config, "\nglobal-batch-size 8\n") != NULL, ranks == 1);
    }
    CHECK(read_given(&o, "--resume s/latest --valid-data="));
    write_config(&o);
    CHECK_CONTAINS(text_read("config.txt"), "\nvalid-data \"\"\n"); // the checkpoint may have some
    CHECK(read_given(&o, "--resume s/latest --lr 1e-5") && read_start(&o, &model));
    CHECK_REFUSED(resolve_run(&o, &model, 1),
                  "--min-lr 0.0001 (of the checkpoint s/step_00000001): ");
    CHECK(read_given(&o, "--resume s/latest") && read_start(&o, &model));
    CHECK_REFUSED(
        resolve_run(&o, &model, 3),
        "--global-batch-size 8 (of the checkpoint s/step_00000001): must be a multiple of");
}

// The last good checkpoint is kept; if saving that one has failed, the one before it is kept.
TEST(the_last_good_one_is_kept) {
    folder_remove("s");
    FIXTURE(f, SAVED "--keep 3");
    for (int step = 1; step <= 5; step++) {
        if (step == 4) {
            CHECK(folder_remove("s/step_00000003"));
            f.options.keep = 1;
            f.snapshot.progress.last_good = 3;
        }
        CHECK(fixture_save(&f, step));
    }
    CHECK_TEXT(shown(), "2 5 latest 5, best -1");
}

TEST(leftovers_are_swept) {
    static const char *const kept[] = {"s/step_00000003", "s/.mine", "s/step_x", "s/.tmp-other"};
    static const char *const swept[] = {"s/.tmp-step_00000004", "s/.old-step_00000001",
                                        "s/.tmp-step_00000005/a folder", "s/.tmp-link"};
    folder_remove("s");
    save_steps(SAVED, 3, 3, 3);
    for (int i = 0; i < 4; i++) { folder_make(kept[i]); }
    for (int i = 0; i < 4; i++) {
        folder_make(swept[i]);
        text_write(text_of("%s/model.safetensors", swept[i]), "half");
    }
    CHECK(claim(options_of(SAVED "--resume latest")));
    for (int i = 0; i < 4; i++) { CHECK(path_exists(kept[i])); }
    for (int i = 0; i < 4; i++) { CHECK(!path_exists(swept[i])); }
    CHECK_TEXT(shown(), "3 latest 3, best 3");
    folder_make("s/.tmp-step_00000004/of a save that failed");
    save_steps(SAVED, 4, 4, 0);
    CHECK(!path_exists("s/step_00000004/of a save that failed"));
}

TEST(saving_goes_on_in_a_thread) {
    Saver saver = {0};
    folder_remove("s");
    FIXTURE(f, SAVED "--keep 2");
    fixture_hash(&f);
    CHECK(saver_wait(&saver) && !saver_ended(&saver)); // nothing to wait for
    CHECK(folder_make("s"));
    for (int step = 1; step <= 5; step++) {
        f.snapshot.progress.step = step;
        CHECK(saver_wait(&saver));
        saver_start(&saver, &f.snapshot);
    }
    while (!saver_ended(&saver)) { nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); }
    CHECK(saver_wait(&saver) && saver_wait(&saver) && !saver_ended(&saver));
    CHECK_TEXT(shown(), "4 5 latest 5, best -1");
    strcpy(f.options.save, "s/latest/meta.json");
    saver_start(&saver, &f.snapshot);
    CHECK(!saver_wait(&saver));
    CHECK_CONTAINS(saver.why.text,
                   "s/latest/meta.json/.tmp-step_00000005: the folder could not be made");
    CHECK_CONTAINS(saver.why.text, "; earlier checkpoints are as they were");
    CHECK(!saver_wait(&saver));     // each time
    strcpy(f.options.save, "gone"); // a folder that was moved when a save began is not made again
    CHECK(!checkpoint_save(&f.snapshot) && !path_exists("gone"));
}
