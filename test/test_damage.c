// Damaged checkpoints: every kind of damage is refused with the name of the file, and --resume
// latest takes the newest undamaged one.
#define _GNU_SOURCE // memmem

#include "fixture.h"

#include <unistd.h>

static const char *const files[] = {"meta.json", "model.safetensors", "config.json",
                                    "optimizer-0-of-1.safetensors", "scaling.safetensors"};
enum { FILES = COUNT(files) };

#define SAVED TINY "--save s --resume latest --fp8-format hybrid --fp8-amax-history-len 6 --keep 0 "

static void save_steps(int last) {
    CLOSED(fixture_close) Fixture f;
    folder_remove("s");
    fixture_open(&f, SAVED);
    for (int step = 1; step <= last; step++) { CHECK(fixture_save(&f, step)); }
}

// The step that --resume latest finds; 0: there is none yet; -1: it is refused. Warnings go to the
// file "warnings".
static int64_t resumed(const char *options) {
    Options o = options_of(options);
    CLOSED(checkpoint_close) Checkpoint c;
    fflush(stderr);
    int terminal = dup(STDERR_FILENO);
    if (freopen("warnings", "w", stderr) == NULL) { die("stderr"); }
    bool ok = checkpoint_resume(&c, &o);
    fflush(stderr);
    dup2(terminal, STDERR_FILENO);
    close(terminal);
    int64_t step = c.path[0] != '\0' ? c.progress.step : 0; // c is closed before it is returned
    return ok ? step : -1;
}

static bool opens(const char *path) {
    Checkpoint c;
    bool ok = checkpoint_open(&c, path, true);
    if (ok) { checkpoint_close(&c); }
    return ok;
}

// The newest of two checkpoints must be refused with this path,
static void check_refused(const char *path) {
    Checkpoint c;
    CHECK_REFUSED(checkpoint_open(&c, "s/step_00000002", true), path);
}

// and --resume latest must find the other one.
static void check_falls_back(const char *path) {
    check_refused(path);
    CHECK_EQUAL(resumed(SAVED), 1);
    CHECK_CONTAINS(text_read("warnings"), text_of("warning: %s", path));
    CHECK_CONTAINS(text_read("warnings"), "; trying an earlier checkpoint\n");
}

// Each file has one wrong bit at any place, is shorter or longer, is missing, or is a folder.
TEST(damaged_files_are_refused) {
    save_steps(2);
    for (int i = 0; i < FILES; i++) {
        const char *path = text_of("s/step_00000002/%s", files[i]);
        Blob b = blob_read(path);
        size_t last = b.size - 1;
        b.bytes = realloc_or_die(b.bytes, b.size + 1);
        b.bytes[b.size] = ' ';
        for (size_t at = 0; at <= last; at += b.size / 150 + 1) {
            b.bytes[at] ^= (unsigned char)(1 << at % 8);
            blob_write(path, b.bytes, b.size);
            check_refused(path);
            b.bytes[at] ^= (unsigned char)(1 << at % 8);
        }
        b.bytes[last] ^= 0x80;
        blob_write(path, b.bytes, b.size);
        check_falls_back(path);
        b.bytes[last] ^= 0x80;
        for (size_t bytes = 0; bytes < last; bytes += bytes < 20 ? 1 : b.size / 20 + 1) {
            blob_write(path, b.bytes, bytes);
            check_refused(path);
        }
        for (int longer = 0; longer < 2; longer++) {
            blob_write(path, b.bytes, last + 2 * longer);
            check_falls_back(path);
        }
        remove(path);
        check_falls_back(path);
        folder_make(path);
        check_falls_back(path);
        rmdir(path);
        blob_write(path, b.bytes, b.size);
        CHECK(opens("s/step_00000002"));
        free(b.bytes);
    }
}

// Replaces text in meta.json, and corrects its checksum.
static void edit_meta(Blob b, const char *from, const char *to) {
    size_t size = b.size - strlen(from) + strlen(to);
    FREED char *text = malloc_or_die(b.size + strlen(to) + 1);
    char *at = memmem(b.bytes, b.size, from, strlen(from));
    if (at == NULL) { die("meta.json has no %s", from); }
    int before = (int)(at - (char *)b.bytes);
    snprintf(text, size + 1, "%.*s%s%.*s", before, b.bytes, to,
             (int)b.size - before - (int)strlen(from), at + strlen(from));
    meta_seal(text, size);
    blob_write("s/step_00000001/meta.json", text, size);
}

TEST(meta_files_that_lie_are_refused) {
    static const struct {
        const char *from, *to, *expected;
    } rows[] = {
        {"\"version\":\t2", "\"version\":\t1",
         "meta.json: checkpoint version 1; this program reads 2"},
        {"\"version\":\t2", "\"version\":\t\"2\"", "checkpoint version nan"},
        {"llm8.c checkpoint", "llm9.c checkpoint", "meta.json: not an llm8.c checkpoint"},
        {"\"step\":\t1", "\"stop\":\t1", "meta.json: a number is missing or out of range"},
        {"\"step\":\t1", "\"step\":\t-1", "a number is missing or out of range"},
        {"\"step\":\t1", "\"step\":\t1e300", "a number is missing or out of range"},
        {"\"step\":\t1", "\"step\":\tnull", "a number is missing or out of range"},
        {"\"samples\":\t40", "\"samples\":\t\"40\"", "a number is missing or out of range"},
        {"\"skipped_in_row\":\t0", "\"skipped_in_row\":\t-1", "a number is missing or out"},
        {"\"skipped_in_row\":\t0", "\"skipped_in_row\":\t1e12", "a number is missing or out"},
        {"\"ranks\":\t1", "\"ranks\":\t0", "a number is missing or out of range"},
        {"\"ranks\":\t1", "\"ranks\":\t4097", "a number is missing or out of range"},
        {"\"skipped\":\t1", "\"skipped\":\t2", "a number is missing or out of range"},
        {"\"skipped_in_row\":\t0", "\"skipped_in_row\":\t2", "a number is missing or out"},
        {"\"step\":\t1", "\"step\":\t1.5", "a number is missing or out of range"},
        {"\"window_count\":\t0", "\"window_count\":\t1", "the window of losses and norms is wrong"},
        {"\"window_count\":\t0", "\"window_count\":\t-1",
         "the window of losses and norms is wrong"},
        {"\"window_loss\":\t[]", "\"window_loss\":\t[1]", "the window of losses and norms"},
        {"\"window_norm\":\t[]", "\"window_norm\":\t[1]", "the window of losses and norms"},
        {"\"ranks\":\t1", "\"ranks\":\t2", "its list of files lacks optimizer-0-of-2.safetensors"},
        {"\"layout_size\":\t", "\"layout_size\":\t1", "do not hold element "},
        {"\"options\":\t{", "\"opinions\":\t{", "meta.json: no options"},
        {"\"files\":\t[", "\"fills\":\t[", "meta.json: no list of files"},
        {"\"files\":\t[", "\"files\":\t[], \"more\":\t[",
         "meta.json: its list of files lacks optimizer-0-of-1.safetensors"},
        {"model.safetensors", "../latest/model.safetensors", "meta.json: a file named '../latest"},
        {"model.safetensors", "..", "s/step_00000001/..: Is a directory"},
        {"\"model.safetensors\"", "\"\"", "meta.json: a file named ''"},
        {"\"model.safetensors\"", "17", "meta.json: a file named ''"},
        {"\"crc32\":\t\"", "\"crc32\":\t\"0", "model.safetensors: damaged: its checksum is "},
        {"\"bytes\":\t", "\"bytes\":\t1", "model.safetensors: damaged: "},
        {"{\n", "[\n", "meta.json: damaged (its checksum does not match)"},
    };
    save_steps(1);
    Blob meta = blob_read("s/step_00000001/meta.json");
    EACH (row, rows) {
        Checkpoint c;
        edit_meta(meta, row->from, row->to);
        CHECK_REFUSED(checkpoint_open(&c, "s/step_00000001", true), row->expected);
    }
    char name[2 * PATH_LENGTH];
    memset(name, 'n', sizeof(name));
    name[sizeof(name) - 1] = '\0';
    edit_meta(meta, "model.safetensors", name);
    CHECK(!opens("s/step_00000001"));
    edit_meta(meta, "\"step\":\t1", "\"step\":\t3"); // a valid edit can be opened
    CHECK(opens("s/step_00000001"));
    CHECK(rename("s/step_00000001/model.safetensors", "s/step_00000001/other.safetensors") == 0);
    CHECK(link("s/step_00000001/other.safetensors", "s/step_00000001/model.safetensors") == 0);
    edit_meta(meta, "\"model.safetensors\"", "\"other.safetensors\"");
    CHECK_REFUSED(checkpoint_open(&(Checkpoint){0}, "s/step_00000001", true),
                  "meta.json: its list of files lacks model.safetensors");
    free(meta.bytes);
}

// A checkpoint of another version is not damaged: no older one is taken instead.
TEST(another_version_is_no_damage) {
    save_steps(2);
    Blob meta = blob_read("s/step_00000002/meta.json");
    edit_meta(meta, "\"version\":\t2", "\"version\":\t3"); // as that of step 1
    CHECK(rename("s/step_00000001/meta.json", "s/step_00000002/meta.json") == 0);
    CHECK_EQUAL(resumed(SAVED), -1);
    CHECK_CONTAINS(error_text(), "--resume latest: s/step_00000002/meta.json: checkpoint version "
                                 "3; this program reads 2; this is no damage");
    CHECK_TEXT(text_read("warnings"), "");
    Options o = options_of(TINY), model;
    strcpy(o.save, "s");
    strcpy(o.resume, "latest");
    CHECK_REFUSED(read_start(&o, &model), "checkpoint version 3; this program reads 2");
    free(meta.bytes);
}

static void damage(int step) {
    text_write(text_of("s/step_%08d/config.json", step), "{}");
}

TEST(resume_finds_what_latest_means) {
    save_steps(4);
    CHECK_EQUAL(resumed(SAVED), 4);
    CHECK(unlink("s/latest") == 0 && symlink("step_00000002", "s/latest") == 0);
    CHECK_EQUAL(resumed(SAVED), 4); // wherever the link leads
    CHECK(rename("s/step_00000004", "s/step_00000004.aside-1") == 0);
    CHECK_EQUAL(resumed(SAVED), 3);
    CHECK(rename("s/step_00000004.aside-1", "s/step_00000004") == 0);
    damage(4);
    damage(3);
    CHECK_EQUAL(resumed(SAVED), 2);
    CHECK_EQUAL(resumed(SAVED "--resume s/step_00000001"), 1);
    CHECK_EQUAL(resumed(SAVED "--save nowhere"), 0);
    damage(2);
    damage(1);
    CHECK_EQUAL(resumed(SAVED), -1);
    CHECK_CONTAINS(error_text(),
                   "--resume latest: no whole checkpoint under s; to start afresh, use");
    CHECK_EQUAL(resumed(SAVED "--resume s/step_00000001"), -1);
    CHECK_CONTAINS(error_text(), "--resume s/step_00000001/config.json: damaged: 2 bytes, not ");
    CHECK_CONTAINS(error_text(), "; --list-checkpoints shows which are whole");
    CHECK_EQUAL(resumed(SAVED "--resume s/step_9"), -1);
    CHECK_CONTAINS(error_text(), "--resume s/step_9: no such folder; --list-checkpoints shows");
}
