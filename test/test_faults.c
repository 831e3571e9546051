// A disk that fails: each system call of a save fails in turn, once, from then on, or as on a full
// disk. In every case an older undamaged checkpoint must remain to resume from, and the next save
// must work. The linker replaces these calls (TEST_LDFLAGS in the Makefile).
#include "../kernels/cpu.h"
#include "../train/metrics.h"
#include "fixture.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <omp.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

typedef enum { FAIL_ONCE, FAIL_FROM_THERE, DISK_FULL, MODES } Mode;

static struct {
    int calls, failing; // failing: number of the call that fails, 0: none
    Mode mode;
    const char *name;        // of the first call that failed
    void (*meanwhile)(void); // called instead of the failure, as if by another process
} fault;

static void arm(Mode mode, int failing) {
    fault.calls = 0;
    fault.failing = failing;
    fault.mode = mode;
    fault.name = NULL;
}

// From here on no call fails. Returns the name of the call that has failed; NULL: none has.
static const char *disarm(void) {
    const char *name = fault.name;
    arm(FAIL_ONCE, 0);
    return name;
}

// Counts a call, and returns whether it must fail. needs_room: it fails on a full disk.
static bool fails(const char *name, bool needs_room) {
    fault.calls++;
    if (fault.failing == 0 || fault.calls < fault.failing) { return false; }
    if (fault.meanwhile != NULL) {
        void (*work)(void) = fault.meanwhile;
        fault.meanwhile = NULL;
        work();
        fault.name = name;
        return false;
    }
    if (fault.mode == FAIL_ONCE && fault.calls > fault.failing) { return false; }
    if (fault.mode == DISK_FULL && !needs_room) { return false; }
    if (fault.name == NULL) { fault.name = name; }
    errno = fault.mode == DISK_FULL ? ENOSPC : EIO;
    return true;
}

// Defines the replacement of NAME, which fails or calls the real one.
#define WRAP(type, name, failure, room, parameters, arguments)         \
    type __real_##name parameters;                                     \
    type __wrap_##name parameters;                                     \
    type __wrap_##name parameters {                                    \
        return fails(#name, room) ? failure : __real_##name arguments; \
    }

WRAP(int, mkdir, -1, true, (const char *path, mode_t mode), (path, mode))
WRAP(int, unlink, -1, false, (const char *path), (path))
WRAP(int, rmdir, -1, false, (const char *path), (path))
WRAP(int, close, -1, false, (int file), (file))
WRAP(ssize_t, pread, -1, false, (int file, void *out, size_t n, off_t at), (file, out, n, at))
WRAP(DIR *, opendir, NULL, false, (const char *path), (path))
WRAP(struct dirent *, readdir, NULL, false, (DIR * folder), (folder))

WRAP(FILE *, fopen, NULL, true, (const char *path, const char *mode), (path, mode))
WRAP(int, fflush, EOF, true, (FILE * file), (file))
WRAP(int, fclose, EOF, false, (FILE * file), (file))

WRAP(ssize_t, readlink, -1, false, (const char *path, char *out, size_t n), (path, out, n))

static bool no_links;     // as on FAT and some network disks
static const char *image; // a folder of a container's image, which overlayfs cannot rename

int __real_symlink(const char *to, const char *path);
int __wrap_symlink(const char *to, const char *path);
int __wrap_symlink(const char *to, const char *path) {
    if (no_links) { errno = EPERM; }
    return no_links || fails("symlink", true) ? -1 : __real_symlink(to, path);
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) {
    bool across = image != NULL && strcmp(from, image) == 0;
    if (across) { errno = EXDEV; }
    return across || fails("rename", false) ? -1 : __real_rename(from, to);
}

int __real_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, mode_t mode) {
    return fails("open", (flags & O_CREAT) != 0) ? -1 : __real_open(path, flags, mode);
}

int __real_openat(int folder, const char *path, int flags, mode_t mode);
int __wrap_openat(int folder, const char *path, int flags, mode_t mode);
int __wrap_openat(int folder, const char *path, int flags, mode_t mode) {
    return fails("openat", false) ? -1 : __real_openat(folder, path, flags, mode);
}

// Half of the data is written before the disk is full. Small writes go to a buffer and do not fail.
size_t __real_fwrite(const void *bytes, size_t size, size_t count, FILE *file);
size_t __wrap_fwrite(const void *bytes, size_t size, size_t count, FILE *file);
size_t __wrap_fwrite(const void *bytes, size_t size, size_t count, FILE *file) {
    bool first = fault.name == NULL;
    if (count < 4096 || !fails("fwrite", true)) { return __real_fwrite(bytes, size, count, file); }
    size_t written = fault.mode == DISK_FULL && first ? count / 2 : 0;
    return __real_fwrite(bytes, size, written, file);
}

// It does not wait for the disk, because no test needs its files after a power cut. A file system
// may have no fsync of folders.
static bool no_folder_sync;
int __wrap_fsync(int file);
int __wrap_fsync(int file) {
    struct stat info;
    if (fails("fsync", false) || fstat(file, &info) != 0) { return -1; }
    if (!no_folder_sync || !S_ISDIR(info.st_mode)) { return 0; }
    errno = EINVAL;
    return -1;
}

// From allocation number memory.failing on, there is no memory.
static struct { int calls, failing; } memory;

static bool no_memory(void) {
    int call = __atomic_add_fetch(&memory.calls, 1, __ATOMIC_SEQ_CST);
    return memory.failing > 0 && call >= memory.failing;
}

#define WRAP_MEMORY(name, parameters, arguments)             \
    void *__real_##name parameters;                          \
    void *__wrap_##name parameters;                          \
    void *__wrap_##name parameters {                         \
        return no_memory() ? NULL : __real_##name arguments; \
    }

WRAP_MEMORY(malloc, (size_t bytes), (bytes))
WRAP_MEMORY(calloc, (size_t count, size_t size), (count, size))
WRAP_MEMORY(realloc, (void *old, size_t bytes), (old, bytes))
WRAP_MEMORY(aligned_alloc, (size_t alignment, size_t bytes), (alignment, bytes))

typedef bool Save(Fixture *f, int64_t step);

static Fixture fixture;

// The first weight is the step of the checkpoint.
static bool save_step(Fixture *f, int64_t step) {
    f->state[0] = (float)step;
    f->snapshot.progress.valid_loss = 10.0 - (double)step;
    return fixture_save(f, step);
}

// A planted fault: it deletes the old checkpoint first.
static bool save_carelessly(Fixture *f, int64_t step) {
    return folder_remove("s/step_00000002") && save_step(f, step);
}

static bool holds(const char *path, int64_t step) {
    CLOSED(checkpoint_close) Checkpoint c;
    float first = 0;
    if (!checkpoint_open(&c, path, true)) { return false; }
    bool ok = checkpoint_read(&c, "master", 0, 1, &first) && first == (float)step &&
              c.progress.step == step;
    return ok;
}

static int64_t resumed_step(void) {
    CLOSED(checkpoint_close) Checkpoint c;
    if (!checkpoint_resume(&c, &fixture.options) || c.path[0] == '\0') { return -1; }
    int64_t step = c.progress.step;
    char path[PATH_LENGTH];
    checkpoint_path(path, "s", step);
    return holds(path, step) ? step : -1;
}

static int leftovers(void) {
    int count = 0;
    DIR *folder = opendir("s");
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        count += strncmp(entry->d_name, ".tmp", 4) == 0 || strncmp(entry->d_name, ".old", 4) == 0;
    }
    closedir(folder);
    return count;
}

// Whether a symbolic link leads to a step beside it.
static bool leads_to(const char *link, int64_t step) {
    char target[PATH_LENGTH] = "", name[PATH_LENGTH];
    ssize_t length = readlink(link, target, PATH_LENGTH - 1);
    return length > 0 && strcmp(target, path_name(checkpoint_path(name, "s", step))) == 0;
}

// Whether step 3 is undamaged, under its name or set aside.
static bool holds_3(void) {
    return holds("s/step_00000003", 3) || holds("s/step_00000003.aside-1", 3);
}

static bool go_back(int64_t step) {
    CLOSED(checkpoint_close) Checkpoint c;
    char path[PATH_LENGTH];
    return checkpoint_open(&c, checkpoint_path(path, "s", step), true) &&
           checkpoint_go_back(&fixture.options, &c);
}

// A planted fault: it sets the newest step aside first.
static bool go_back_carelessly(int64_t step) {
    return __real_rename("s/step_00000004", "s/step_00000004.aside-1") == 0 && go_back(step);
}

// Goes back from step 4 to step 2 with a fault at the n-th call.
static const char *trouble_back(bool (*back)(int64_t), Mode mode, int n, const char **fired) {
    arm(mode, 0);
    folder_remove("s");
    fixture.options.keep = 0;
    for (int step = 1; step <= 4; step++) { save_step(&fixture, step); }
    fixture.options.keep = 1;
    arm(mode, n);
    bool gone = back(2);
    *fired = disarm();
    int64_t step = resumed_step();
    if (step != 2 && (gone || step != 4)) { return "a wrong step is resumed"; }
    if (!go_back(2) || resumed_step() != 2) { return "it does not go back"; }
    if (checkpoint_best("s") != 2) { return "step 2 is not the best"; }
    if (!no_links && !(leads_to("s/best", 2) && leads_to("s/latest", 2))) { return "links"; }
    if (path_exists("s/step_00000003") || !holds_3()) { return "step 3 is not set aside"; }
    if (!holds("s/step_00000004.aside-1", 4)) { return "step 4 is not set aside"; }
    return holds("s/step_00000001", 1) ? NULL : "step 1 is lost";
}

// Saves steps 1 and 2, and then step 3 with a fault at the n-th call. again: there is a step 3
// already. Returns what is wrong after that, or NULL. *fired: which call failed; NULL: there are
// fewer calls.
static const char *trouble(Save *save, Mode mode, int n, bool again, const char **fired) {
    arm(mode, 0);
    folder_remove("s");
    for (int step = 1; step <= 2 + again; step++) { save_step(&fixture, step); }
    fail("%s", "");
    arm(mode, n);
    bool saved = save(&fixture, 3);
    *fired = disarm();
    if (!saved && error_text()[0] == '\0') { return "no reason is given"; }
    if (!holds("s/step_00000002", 2)) { return "step 2 is lost"; }
    if (again && !holds_3()) { return "neither the old nor the new step 3 is whole"; }
    int64_t step = resumed_step();
    if (step < 2 || (saved && step != 3)) { return "a wrong step is resumed"; }
    if (!checkpoint_claim(&fixture.options) || leftovers() > 0) { return "leftovers stay"; }
    if (!go_back(step) || checkpoint_best("s") != step) { return "the best step is another"; }
    if (!no_links && !(leads_to("s/best", step) && leads_to("s/latest", step))) { return "links"; }
    if (!save_step(&fixture, 3) || resumed_step() != 3) { return "the next save fails"; }
    if (leftovers() > 0) { return "the next save leaves something behind"; }
    return holds("s/step_00000001", 1) ? "step 1 is kept" : NULL;
}

TEST(a_checkpoint_survives_every_failing_call) {
    fixture_open(&fixture, TINY "--save s --resume latest --keep 1 --fp8-format hybrid "
                                "--fp8-amax-history-len 4");
    for (int variant = 0; variant < 2 * MODES; variant++) {
        Mode mode = (Mode)(variant / 2);
        const char *fired = "";
        int n = 1;
        for (; fired != NULL; n++) {
            const char *wrong = trouble(save_step, mode, n, variant % 2 == 1, &fired);
            if (wrong != NULL) {
                test_fail(__FILE__, __LINE__, "mode %d, call %d (%s): %s", mode, n, fired, wrong);
            }
        }
        CHECK(n > (mode == DISK_FULL ? 30 : 100)); // the calls are really replaced
    }
    fixture_close(&fixture);
}

TEST(a_run_goes_back_or_stays) {
    fixture_open(&fixture, TINY "--save s --resume latest");
    for (int mode = 0; mode < MODES; mode++) {
        const char *fired = "";
        int n = 1;
        for (; fired != NULL; n++) {
            const char *wrong = trouble_back(go_back, (Mode)mode, n, &fired);
            if (wrong != NULL) {
                test_fail(__FILE__, __LINE__, "mode %d, call %d (%s): %s", mode, n, fired, wrong);
            }
        }
        CHECK(n > (mode == DISK_FULL ? 5 : 30));
    }
    fixture_close(&fixture);
}

// A disk without symbolic links; and a folder of a container's image, which cannot be renamed: it
// is deleted under its own name, and cannot be set aside.
TEST(disks_without_links_are_saved_to) {
    const char *fired;
    fixture_open(&fixture, TINY "--save s --resume latest --keep 1");
    no_links = true;
    const char *wrong = trouble(save_step, FAIL_ONCE, 0, false, &fired);
    CHECK_TEXT(wrong != NULL ? wrong : "", "");
    wrong = trouble_back(go_back, FAIL_ONCE, 0, &fired);
    CHECK_TEXT(wrong != NULL ? wrong : "", "");
    CHECK(!path_exists("s/latest") && !path_exists("s/best"));
    no_links = false;
    CHECK(save_step(&fixture, 3) && leads_to("s/latest", 3) && leads_to("s/best", 3));
    image = "s/step_00000003";
    CHECK(!go_back(2) && resumed_step() == 3);
    CHECK(save_step(&fixture, 4) && save_step(&fixture, 5));
    CHECK(!path_exists("s/step_00000003"));
    image = NULL;
    fixture_close(&fixture);
}

TEST(a_careless_save_is_caught) {
    const char *fired = "";
    int caught = 0;
    fixture_open(&fixture, TINY "--save s --resume latest --keep 1");
    for (int n = 1; fired != NULL; n++) {
        caught += trouble(save_carelessly, FAIL_ONCE, n, false, &fired) != NULL;
    }
    CHECK(caught > 0);
    caught = 0;
    fired = "";
    for (int n = 1; fired != NULL; n++) {
        caught += trouble_back(go_back_carelessly, FAIL_ONCE, n, &fired) != NULL;
    }
    CHECK(caught > 0);
    fixture_close(&fixture);
}

// A folder that cannot be read does not count as empty. A leftover that cannot be deleted does not
// end the run.
TEST(unreadable_folders_are_no_empty_ones) {
    bool fired = true;
    int refused = 0, left = 0;
    fixture_open(&fixture, TINY "--save s --resume latest");
    folder_remove("s");
    CHECK(save_step(&fixture, 1) && unlink("s/latest") == 0); // nor does the link say so
    for (int n = 1; fired; n++) {
        CLOSED(checkpoint_close) Checkpoint c;
        arm(FAIL_ONCE, n);
        bool ok = checkpoint_resume(&c, &fixture.options);
        fired = disarm() != NULL;
        CHECK(!ok || c.path[0] != '\0');
        refused += !ok;
    }
    CHECK(refused > 0);
    for (int n = fired = true; fired; n++) {
        CHECK(folder_make("s/.tmp-step_00000009/inner"));
        arm(FAIL_ONCE, n);
        bool ok = checkpoint_claim(&fixture.options);
        const char *call = disarm();
        fired = call != NULL;
        CHECK(ok || strcmp(call, "unlink") + strcmp(call, "rmdir") != 0);
        left += ok && path_exists("s/.tmp-step_00000009");
        CHECK(checkpoint_claim(&fixture.options) && !path_exists("s/.tmp-step_00000009"));
    }
    CHECK(left > 1);
    fixture_close(&fixture);
}

// A checkpoint that the system refuses to read is not damaged: no older one is taken instead.
TEST(an_unreadable_checkpoint_is_not_passed_over) {
    bool fired = true;
    int refused = 0;
    fixture_open(&fixture, TINY "--save s --resume latest --keep 0 --fp8-format hybrid "
                                "--fp8-amax-history-len 4");
    folder_remove("s");
    CHECK(save_step(&fixture, 1) && save_step(&fixture, 2));
    for (int n = 1; fired; n++) {
        static Options o, model;
        CLOSED(checkpoint_close) Checkpoint c = {0};
        o = fixture.options;
        arm(FAIL_ONCE, n);
        CLOSED(checkpoint_close) Checkpoint start;
        bool models = checkpoint_model(&start, &o, &model);
        bool ok = models && checkpoint_resume(&c, &o);
        fired = disarm() != NULL;
        CHECK(ok ? c.progress.step == 2 : fired);
        CHECK(!models || start.progress.step == 2);
        if (!ok) { CHECK_CONTAINS(error_text(), "Input/output error"); }
        refused += !ok;
    }
    CHECK(refused > 30);
    fixture_close(&fixture);
}

// The best checkpoint is not deleted when a call fails that finds out which one it is.
TEST(the_best_is_kept_through_failing_calls) {
    bool fired = true;
    fixture_open(&fixture, TINY "--save s --resume latest --keep 1");
    for (int n = 1; fired; n++) {
        folder_remove("s");
        for (int step = 1; step <= 3; step++) {
            fixture.snapshot.progress.valid_loss = step == 1 ? 1 : 2;
            CHECK(fixture_save(&fixture, step));
        }
        arm(FAIL_ONCE, n);
        fixture_save(&fixture, 4);
        fired = disarm() != NULL;
        if (!path_exists("s/step_00000001")) {
            test_fail(__FILE__, __LINE__, "call %d: the best is gone", n);
        }
        CHECK(fixture_save(&fixture, 5) && checkpoint_best("s") == 1 && leads_to("s/best", 1));
    }
    fixture_close(&fixture);
}

static void end_process(void) {
    _exit(0);
}

// Runs `work` in another process, which is killed at call n. Returns whether there are fewer calls.
static bool killed_at(int n, bool (*work)(int64_t), int64_t step) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        arm(FAIL_ONCE, n);
        fault.meanwhile = end_process;
        work(step);
        _exit(1);
    }
    int status;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status) == 1;
}

static bool save_to(int64_t step) {
    return save_step(&fixture, step);
}

// A planted fault: the checkpoint has its name before its files.
static bool save_unfinished(int64_t step) {
    char path[PATH_LENGTH];
    mkdir(checkpoint_path(path, "s", step), 0755);
    return folder_remove(path) && save_step(&fixture, step);
}

// Kills a save at each call. If the checkpoint had its name, it must be resumed, even if the links
// had not moved. The next start moves them. Returns how many such checkpoints were lost.
static int lost_by_kills(bool (*save)(int64_t)) {
    int lost = 0;
    bool ended = false;
    for (int n = 1; !ended && lost == 0; n++) {
        folder_remove("s");
        for (int step = 1; step <= 2; step++) { CHECK(save_step(&fixture, step)); }
        ended = killed_at(n, save, 3);
        bool named = path_exists("s/step_00000003");
        CHECK(checkpoint_claim(&fixture.options) && !path_exists("s/.tmp-link"));
        int64_t step = resumed_step();
        CHECK(step == 3 || step == 2);
        lost += named && step != 3;
        CHECK(lost > 0 || no_links || (leads_to("s/latest", step) && leads_to("s/best", step)));
    }
    return lost;
}

TEST(a_killed_save_counts_once_it_has_its_name) {
    fixture_open(&fixture, TINY "--save s --resume latest --keep 0");
    CHECK_EQUAL(lost_by_kills(save_to), 0);
    CHECK(lost_by_kills(save_unfinished) > 0);
    no_links = true;
    CHECK_EQUAL(lost_by_kills(save_to), 0);
    no_links = false;
    fixture_close(&fixture);
}

static bool evaluate_step(int64_t step) {
    Progress *p = &fixture.snapshot.progress;
    p->valid_loss = 10.0 - (double)step;
    p->eval_left = 0;
    return checkpoint_evaluated(&fixture.snapshot);
}

// An evaluation that follows its checkpoint is in it, or still left, whichever call fails or is the
// last before a kill; and `best` is right after the next start.
TEST(an_evaluation_is_made_or_left) {
    int seen[2] = {0};
    fixture_open(&fixture, TINY "--save s --resume latest --keep 0");
    for (int way = 0; way <= MODES; way++) {
        bool ended = false;
        for (int n = 1; !ended; n++) {
            CLOSED(checkpoint_close) Checkpoint c;
            bool ok = false;
            folder_remove("s");
            CHECK(save_step(&fixture, 1));
            fixture.snapshot.progress.valid_loss = NAN;
            fixture.snapshot.progress.eval_left = 1;
            CHECK(fixture_save(&fixture, 2));
            if (way < MODES) {
                arm((Mode)way, n);
                ok = evaluate_step(2);
                ended = disarm() == NULL;
            } else {
                ended = killed_at(n, evaluate_step, 2);
            }
            CHECK(checkpoint_claim(&fixture.options) && go_back(2));
            CHECK(checkpoint_open(&c, "s/step_00000002", true));
            bool made = c.progress.eval_left == 0;
            CHECK(made == (c.progress.valid_loss == 8) && (made || !(ok || ended)));
            CHECK(leads_to("s/best", made ? 2 : 1));
            seen[made]++;
        }
    }
    CHECK(seen[0] > 10 && seen[1] > 10);
    fixture_close(&fixture);
}

TEST(a_killed_run_has_gone_back_or_not) {
    bool ended = false;
    int seen[5] = {0};
    fixture_open(&fixture, TINY "--save s --resume latest --keep 0");
    for (int n = 1; !ended; n++) {
        folder_remove("s");
        for (int step = 1; step <= 4; step++) { CHECK(save_step(&fixture, step)); }
        ended = killed_at(n, go_back, 2);
        CHECK(checkpoint_claim(&fixture.options));
        int64_t step = resumed_step();
        CHECK(step == 2 || step == 4);
        seen[step]++;
        CHECK(go_back(step) && (step == 4 || !path_exists("s/step_00000003")));
        CHECK(holds_3() && (holds("s/step_00000004", 4) || holds("s/step_00000004.aside-1", 4)));
        CHECK(save_step(&fixture, 5) && resumed_step() == 5);
    }
    CHECK(seen[2] > 3 && seen[4] > 3);
    fixture_close(&fixture);
}

// A read error is an error at every read, and never a signal.
TEST(unreadable_checkpoints_are_errors) {
    static float weights[1 << 15];
    bool fired = true;
    int refused = 0;
    fixture_open(&fixture, TINY "--save s --load s/step_00000100 --fp8-format hybrid "
                                "--fp8-amax-history-len 4 --global-batch-size 4");
    folder_remove("s");
    CHECK(save_step(&fixture, 100));
    for (int n = 1; fired; n++) {
        static Options o, model;
        CLOSED(checkpoint_close) Checkpoint c = {0};
        int64_t size = fixture.layout.size;
        o = fixture.options;
        arm(FAIL_ONCE, n);
        CLOSED(checkpoint_close) Checkpoint start;
        bool ok = checkpoint_model(&start, &o, &model) && checkpoint_verify(&start) &&
                  checkpoint_weights(&start, &fixture.layout, 0, size, weights) &&
                  checkpoint_open(&c, "s/step_00000100", true) &&
                  checkpoint_read(&c, "master", 0, size, weights) &&
                  checkpoint_read_scaling(&c, &fixture.precision, fixture.slots, fixture.history);
        const char *call = disarm();
        fired = call != NULL;
        bool reading = fired && strcmp(call, "pread") == 0;
        CHECK(reading ? !ok && strstr(error_text(), "Input/output error") != NULL : ok || fired);
        refused += reading;
    }
    CHECK(refused > 40);
    fixture_close(&fixture);
}

static bool is_all(const float *values, int64_t n, double expected) {
    int64_t i = 0;
    while (i < n && (double)values[i] == expected) { i++; }
    return i == n;
}

static void save_all_of(int64_t step) {
    for (int64_t i = 0; i < 3 * fixture.layout.size; i++) { fixture.state[i] = (float)step; }
    CHECK(fixture_save(&fixture, step));
}

static void save_second(void) {
    save_all_of(2);
}

// Reads the state in several pieces, and returns the step that all are from; 0: reading failed, or
// they are from several steps.
static int64_t read_while_saving(bool load, float *out) {
    static Options o, model;
    CLOSED(checkpoint_close) Checkpoint c = {0};
    static const char *const kinds[] = {"master", "exp_avg", "exp_avg_sq"};
    const int64_t size = fixture.layout.size / 128 * 128, half = size / 2;
    bool ok = true;
    o = fixture.options;
    int64_t step;
    if (load) {
        ok = checkpoint_model(&c, &o, &model) && checkpoint_verify(&c);
        for (int part = 0; ok && part < 2; part++) {
            ok = checkpoint_weights(&c, &fixture.layout, part * half, (part + 1) * half,
                                    out + part * half);
        }
        for (int64_t i = 0; i < size; i++) { out[i] = out[i] == 0 ? out[size - 1] : out[i]; }
        step = (int64_t)out[size - 1]; // zeros are the vocabulary's padding
        ok = ok && is_all(out, size, (double)step);
    } else {
        ok = checkpoint_resume(&c, &o) && c.path[0] != '\0';
        step = c.progress.step;
        for (int part = 0; ok && part < 6; part++) {
            ok = checkpoint_read(&c, kinds[part / 2], part % 2 * half, (part % 2 + 1) * half,
                                 out) &&
                 is_all(out, half, (double)step);
        }
    }
    if (!ok) { test_fail(__FILE__, __LINE__, "step %lld: %s", (long long)step, error_text()); }
    return ok ? step : 0;
}

// During each call of a reader in turn, a run saves its next checkpoint and deletes the one before.
// The reader must get exactly one of the two.
TEST(a_checkpoint_is_one_while_a_run_saves) {
    static const char *const ways[] = {"--load s/latest", "--resume s/latest", "--resume latest"};
    static float out[1 << 15];
    for (int i = 0; i < 6; i++) { // with and without symbolic links
        int seen[3] = {0}, n = 1;
        no_links = i >= 3;
        fixture_open(&fixture, text_of(TINY "--save s --keep 1 %s", ways[i % 3]));
        for (bool fired = true; fired; n++) {
            folder_remove("s");
            save_all_of(1);
            arm(FAIL_ONCE, n);
            fault.meanwhile = save_second;
            seen[read_while_saving(i % 3 == 0, out)]++;
            fault.meanwhile = NULL;
            fired = disarm() != NULL;
        }
        CHECK(seen[0] == 0 && seen[1] > 5 && seen[2] > 5);
        fixture_close(&fixture);
    }
    no_links = false;
}

TEST(folders_without_fsync_are_saved_to) {
    fixture_open(&fixture, TINY "--save s --resume latest");
    no_folder_sync = true;
    folder_remove("s");
    CHECK(save_step(&fixture, 1) && resumed_step() == 1);
    no_folder_sync = false;
    fixture_close(&fixture);
}

static void record(Metrics *m, int step) {
    MetricsRecord *r = metrics_begin("save");
    metrics_number(r, "step", step);
    metrics_end(m, r);
}

// While the metrics cannot be written or opened, records are lost; no others may be lost.
TEST(metrics_come_back) {
    int missing = 0;
    bool fired = true;
    for (int n = 1; fired; n++) {
        CLOSED(metrics_close) Metrics m = {0};
        unlink("m");
        CHECK(metrics_open(&m, "m"));
        arm(FAIL_FROM_THERE, n);
        record(&m, 1);
        record(&m, 2);
        metrics_sync(&m);
        fired = disarm() != NULL;
        record(&m, 3);
        const char *text = text_read("m");
        missing += strstr(text, ":2}") == NULL;
        CHECK_CONTAINS(text, "{\"kind\":\"save\",\"step\":3}\n");
        CHECK(strlen(text) % 25 == 0); // whole lines
    }
    CHECK(missing > 1);
}

// The content of `f`, if it has three letters.
static const char *content(void) {
    static char text[4];
    memset(text, 0, sizeof(text));
    FILE *file = fopen("f", "r");
    bool whole = file != NULL && fread(text, 1, 3, file) == 3 && fgetc(file) == EOF;
    if (file != NULL) { fclose(file); }
    return whole ? text : "none";
}

TEST(files_are_replaced_or_kept) {
    for (int mode = 0; mode < MODES; mode++) {
        bool fired = true;
        for (int n = 1; fired; n++) {
            arm(FAIL_ONCE, 0);
            unlink("f");
            CHECK(file_replace("f", "old", 3));
            arm((Mode)mode, n);
            bool replaced = file_replace("f", "new", 3);
            fired = disarm() != NULL;
            const char *now = content();
            CHECK(strcmp(now, "new") == 0 || (!replaced && strcmp(now, "old") == 0));
            CHECK(mode == FAIL_FROM_THERE || !path_exists("f.new"));
            CHECK(file_replace("f", "new", 3));
            CHECK_TEXT(content(), "new");
        }
    }
}

// Runs `work` in a child process that gets no memory from its n-th allocation on. Returns true if
// it makes fewer allocations. Otherwise the child must report the lack of memory and exit with
// status 1.
static bool survives_without_memory(void (*work)(void), int n) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (freopen("said", "w", stderr) == NULL) { _exit(2); }
        memory.calls = 0;
        memory.failing = n;
        work();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) { return true; }
    Blob b = blob_read("said");
    bool told = b.size > 20 && memcmp(b.bytes, "error: out of memory", 20) == 0;
    if (!told || !WIFEXITED(status) || WEXITSTATUS(status) != 1) {
        test_fail(__FILE__, __LINE__, "allocation %d: status %x, \"%.*s\"", n, (unsigned)status,
                  (int)b.size, (char *)b.bytes);
    }
    free(b.bytes);
    return false;
}

static void save_third(void) {
    save_step(&fixture, 3);
}

TEST(a_save_without_memory_says_so) {
    fixture_open(&fixture, TINY "--save s --resume latest --keep 1 --fp8-format hybrid "
                                "--fp8-amax-history-len 4");
    folder_remove("s");
    save_step(&fixture, 2);
    int n = 1;
    while (!survives_without_memory(save_third, n)) {
        CHECK(resumed_step() >= 2);
        n += n < 50 ? 1 : 23;
    }
    CHECK(n > 500); // cJSON's allocations are among them
    CHECK(holds("s/step_00000003", 3));
    fixture_close(&fixture);
}

static void sum_squares(void) {
    float x[2] = {1, 2};
    sum_of_squares(x, 2);
}

static void attend(void) {
    float qkv[3] = {1, 2, 3}, out[1], lse[1];
    attention_forward(out, lse, qkv, 1, 1, 1, 1, 1);
}

static void multiply(void) {
    float a[1] = {1}, b[1] = {2}, c[1];
    cpu_gemm((CpuGemm){.m = 1, .n = 1, .k = 1, .a = a, .b = b, .c = c, .alpha = 1});
}

TEST(operations_without_memory_say_so) {
    omp_set_num_threads(1);
    CHECK(!survives_without_memory(sum_squares, 1));
    CHECK(!survives_without_memory(attend, 1));
    CHECK(!survives_without_memory(multiply, 1));
}
