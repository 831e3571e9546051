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
    const char *name;        // name of the first call that failed
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

WRAP(int, rename, -1, false, (const char *from, const char *to), (from, to))
WRAP(ssize_t, readlink, -1, false, (const char *path, char *out, size_t n), (path, out, n))

static bool no_links; // as on FAT and some network disks

int __real_symlink(const char *to, const char *path);
int __wrap_symlink(const char *to, const char *path) {
    if (no_links) { errno = EPERM; }
    return no_links || fails("symlink", true) ? -1 : __real_symlink(to, path);
}

int __real_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, mode_t mode) {
    return fails("open", (flags & O_CREAT) != 0) ? -1 : __real_open(path, flags, mode);
}

// Half of the data is written before the disk is full. Small writes go to a buffer and do not fail.
size_t __real_fwrite(const void *bytes, size_t size, size_t count, FILE *file);
size_t __wrap_fwrite(const void *bytes, size_t size, size_t count, FILE *file) {
    bool first = fault.name == NULL;
    if (count < 4096 || !fails("fwrite", true)) { return __real_fwrite(bytes, size, count, file); }
    size_t written = fault.mode == DISK_FULL && first ? count / 2 : 0;
    return __real_fwrite(bytes, size, written, file);
}

// fsync does not wait for the disk here, because no test needs its files after a power cut. A file
// system may have no fsync of folders.
static int no_folder_sync; // 0, or what it says
int __wrap_fsync(int file) {
    struct stat info;
    if (fails("fsync", false) || fstat(file, &info) != 0) { return -1; }
    if (no_folder_sync == 0 || !S_ISDIR(info.st_mode)) { return 0; }
    errno = no_folder_sync;
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
    void *__wrap_##name parameters {                         \
        return no_memory() ? NULL : __real_##name arguments; \
    }

WRAP_MEMORY(malloc, (size_t bytes), (bytes))
WRAP_MEMORY(calloc, (size_t count, size_t size), (count, size))
WRAP_MEMORY(realloc, (void *old, size_t bytes), (old, bytes))
WRAP_MEMORY(aligned_alloc, (size_t alignment, size_t bytes), (alignment, bytes))

static Fixture fixture;

// ---- cycles -------------------------------------------------------------------------------------

// In each cycle one call of some work fails: call `first`, then the one `stride` after it, until
// the work has fewer calls. Each cycle begins with the same checkpoints in the folder s: links to
// the files in the folder `made`.
typedef struct {
    Mode mode;
    int n, stride;
    const char *fired; // the call that has failed in this cycle; NULL: the work has fewer calls
} Cycle;

#define CYCLES_FROM(c, how, from, by) \
    for (Cycle c = {how, from, by, ""}; c.fired != NULL && restore(); c.n += c.stride)
#define CYCLES(c, how) CYCLES_FROM(c, how, 1, 1)

// The result of a call in which the cycle's call fails.
#define FAULTY(c, call)                    \
    ({                                     \
        arm((c).mode, (c).n);              \
        __typeof__(call) result_ = (call); \
        (c).fired = disarm();              \
        result_;                           \
    })

static void link_files(const char *from, const char *to) {
    DIR *folder = opendir(from);
    or_die(folder_make(to));
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (entry->d_name[0] == '.') { continue; }
        const char *path = text_of("%s/%s", from, entry->d_name);
        const char *beside = text_of("%s/%s", to, entry->d_name);
        if (link(path, beside) != 0) { link_files(path, beside); }
    }
    closedir(folder);
}

static bool restore(void) {
    arm(FAIL_ONCE, 0);
    folder_remove("s");
    link_files("made", "s");
    return true;
}

// The first weight is the step of the checkpoint; later ones have lower losses.
static bool save_step(int64_t step) {
    fixture.state[0] = (float)step;
    fixture.snapshot.progress.valid_loss = 10.0 - (double)step;
    return fixture_save(&fixture, step);
}

static void saved_all(int first, int last, bool (*save)(int64_t)) {
    for (int step = first; step <= last; step++) { CHECK(save(step)); }
}

// Cycles begin with what is in the folder s now.
static void keep_as_made(void) {
    folder_remove("made");
    CHECK(rename("s", "made") == 0);
}

// Opens the fixture, in whose folder are steps 1 to `steps`.
static void begin(const char *options, int steps) {
    fixture_close(&fixture); // of the test before
    fixture_open(&fixture, text_of(TINY "--save s --resume latest %s", options));
    folder_remove("s");
    or_die(folder_make("s"));
    saved_all(1, steps, save_step);
    keep_as_made();
    restore();
}

static void judge(const Cycle *c, const char *wrong) {
    if (wrong != NULL) {
        test_fail(__FILE__, __LINE__, "mode %d, call %d (%s): %s", c->mode, c->n, c->fired, wrong);
    }
}

// ---- what must be there after a fault -----------------------------------------------------------

static bool holds(const char *path, int64_t step) {
    CLOSED(checkpoint_close) Checkpoint c;
    float first = 0;
    if (!checkpoint_open(&c, path, true)) { return false; }
    bool ok = checkpoint_read(&c, STATE_MASTER, 0, 1, &first, NULL, NULL) && first == (float)step &&
              c.progress.step == step;
    return ok;
}

static int64_t resumed_step(void) {
    int64_t step = resumed(fixture.options);
    char path[PATH_LENGTH];
    return step > 0 && holds(checkpoint_path(path, "s", step), step) ? step : -1;
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

// Whether both links lead to a step, on disks that have links.
static bool links_lead_to(int64_t step) {
    return no_links || (leads_to("s/latest", step) && leads_to("s/best", step));
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

// ---- saving, and going back ---------------------------------------------------------------------

#define FP8 "--fp8-format hybrid --fp8-amax-history-len 4 "

// A planted fault: it deletes the old checkpoint first.
static bool save_carelessly(int64_t step) {
    return folder_remove("s/step_00000002") && save_step(step);
}

// A planted fault: it sets the newest step aside first.
static bool go_back_carelessly(int64_t step) {
    return __real_rename("s/step_00000004", "s/step_00000004.aside-1") == 0 && go_back(step);
}

// Saves step 3 after steps 1 and 2, with a fault. again: there is a step 3 already. Returns what is
// wrong after that, or NULL.
static const char *trouble(Cycle *c, bool (*save)(int64_t), bool again) {
    fail("%s", "");
    bool saved = FAULTY(*c, save(3));
    if (!saved && error_text()[0] == '\0') { return "no reason is given"; }
    if (!holds("s/step_00000002", 2)) { return "step 2 is lost"; }
    if (again && !holds_3()) { return "neither the old nor the new step 3 is whole"; }
    int64_t step = resumed_step();
    if (step < 2 || (saved && step != 3)) { return "a wrong step is resumed"; }
    if (!claim(fixture.options) || leftovers() > 0) { return "leftovers stay"; }
    if (!go_back(step) || checkpoint_best("s") != step) { return "the best step is another"; }
    if (!links_lead_to(step)) { return "links"; }
    if (!save_step(3) || resumed_step() != 3) { return "the next save fails"; }
    if (leftovers() > 0) { return "the next save leaves something behind"; }
    return holds("s/step_00000001", 1) ? "step 1 is kept" : NULL;
}

// Goes back from step 4 to step 2 with a fault.
static const char *trouble_back(Cycle *c, bool (*back)(int64_t)) {
    bool gone = FAULTY(*c, back(2));
    int64_t step = resumed_step();
    if (step != 2 && (gone || step != 4)) { return "a wrong step is resumed"; }
    if (!go_back(2) || resumed_step() != 2) { return "it does not go back"; }
    if (checkpoint_best("s") != 2) { return "step 2 is not the best"; }
    if (!links_lead_to(2)) { return "links"; }
    if (path_exists("s/step_00000003") || !holds_3()) { return "step 3 is not set aside"; }
    if (!holds("s/step_00000004.aside-1", 4)) { return "step 4 is not set aside"; }
    return holds("s/step_00000001", 1) ? NULL : "step 1 is lost";
}

// If all later calls fail too, only every other call is the first to fail: for the other folder.
TEST(a_checkpoint_survives_every_failing_call) {
    for (int again = 0; again < 2; again++) {
        begin(FP8 "--keep 1", 2 + again);
        for (Mode mode = FAIL_ONCE; mode < MODES; mode++) {
            bool half = mode == FAIL_FROM_THERE;
            int calls = 0;
            CYCLES_FROM(c, mode, half ? 1 + again : 1, half ? 2 : 1) {
                judge(&c, trouble(&c, save_step, again));
                calls = c.n;
            }
            CHECK(calls >= (mode == DISK_FULL ? 30 : 100)); // the calls are really replaced
        }
    }
}

TEST(a_run_goes_back_or_stays) {
    begin("--keep 0", 4);
    fixture.options.keep = 1;
    for (Mode mode = FAIL_ONCE; mode < MODES; mode++) {
        int calls = 0;
        CYCLES(c, mode) {
            judge(&c, trouble_back(&c, go_back));
            calls = c.n;
        }
        CHECK(calls >= (mode == DISK_FULL ? 5 : 30));
    }
}

TEST(carelessness_is_caught) {
    bool caught = false;
    begin("--keep 1", 2);
    CYCLES(c, FAIL_ONCE) {
        if ((caught = trouble(&c, save_carelessly, false) != NULL)) { break; }
    }
    CHECK(caught);
    begin("--keep 0", 4);
    CYCLES(c, FAIL_ONCE) {
        if ((caught = trouble_back(&c, go_back_carelessly) != NULL)) { break; }
    }
    CHECK(caught);
}

// A disk without symbolic links.
TEST(disks_without_links_are_saved_to) {
    Cycle none = {0};
    no_links = true;
    begin("--keep 0", 4);
    judge(&none, trouble_back(&none, go_back));
    begin("--keep 1", 2);
    judge(&none, trouble(&none, save_step, false));
    CHECK(!path_exists("s/latest") && !path_exists("s/best"));
    no_links = false;
    CHECK(save_step(3) && links_lead_to(3));
}

TEST(folders_without_fsync_are_saved_to) {
    static const int said[] = {EINVAL, EBADF, ENOSYS, EOPNOTSUPP};
    for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++) {
        no_folder_sync = said[i];
        begin("", 1);
        CHECK_EQUAL(resumed_step(), 1);
    }
    no_folder_sync = EIO;
    CHECK(!save_step(2));
    no_folder_sync = 0;
}

static bool save_first_best(int64_t step) {
    fixture.snapshot.progress.valid_loss = step == 1 ? 1 : 2;
    return fixture_save(&fixture, step);
}

// The best checkpoint is not deleted when a call fails that finds out which one it is.
TEST(the_best_is_kept_through_failing_calls) {
    begin("--keep 1", 0);
    saved_all(1, 3, save_first_best);
    keep_as_made();
    CYCLES(c, FAIL_ONCE) {
        FAULTY(c, save_first_best(4));
        judge(&c, path_exists("s/step_00000001") ? NULL : "the best is gone");
        CHECK(save_first_best(5) && checkpoint_best("s") == 1 && leads_to("s/best", 1));
    }
}

// ---- reading ------------------------------------------------------------------------------------

// A folder that cannot be read does not count as empty. A leftover that cannot be deleted does not
// end the run.
TEST(unreadable_folders_are_no_empty_ones) {
    int refused = 0, left = 0;
    begin("", 1);
    CHECK(unlink("made/latest") == 0); // nor does the link say so
    CYCLES(c, FAIL_ONCE) {
        static Options o, was;
        CLOSED(checkpoint_close) Checkpoint found;
        o = fixture.options;
        bool ok = FAULTY(c, checkpoint_model(&found, &o, &was));
        CHECK(!ok || found.path[0] != '\0');
        refused += !ok;
    }
    CHECK(refused > 0);
    CYCLES(c, FAIL_ONCE) {
        CHECK(folder_make("s/.tmp-step_00000009/inner"));
        bool ok = FAULTY(c, claim(fixture.options));
        CHECK(ok || strcmp(c.fired, "unlink") + strcmp(c.fired, "rmdir") != 0);
        left += ok && path_exists("s/.tmp-step_00000009");
        CHECK(claim(fixture.options) && !path_exists("s/.tmp-step_00000009"));
    }
    CHECK(left > 1);
}

// A checkpoint that cannot be read is not passed over for an older one.
TEST(an_unreadable_checkpoint_is_not_passed_over) {
    int refused = 0;
    begin(FP8 "--keep 0", 2);
    CYCLES(c, FAIL_ONCE) {
        static Options o, model;
        CLOSED(checkpoint_close) Checkpoint start;
        o = fixture.options;
        bool ok = FAULTY(c,
                         checkpoint_model(&start, &o, &model) && checkpoint_complete(&start, true));
        CHECK(ok ? start.progress.step == 2 : c.fired != NULL);
        if (!ok) { CHECK_CONTAINS(error_text(), "Input/output error"); }
        refused += !ok;
    }
    CHECK(refused > 15);
}

// A read error is an error at every read, and never a signal.
TEST(unreadable_checkpoints_are_errors) {
    static float weights[1 << 15];
    int refused = 0;
    begin(FP8 "--resume= --load s/step_00000100 --global-batch-size 4", 0);
    CHECK(save_step(100)); // no scale has more steps
    keep_as_made();
    CYCLES(c, FAIL_ONCE) {
        static Options o, model;
        CLOSED(checkpoint_close) Checkpoint opened = {0};
        CLOSED(checkpoint_close) Checkpoint start;
        int64_t size = fixture.layout.size;
        o = fixture.options;
        bool ok = FAULTY(c,
                         checkpoint_model(&start, &o, &model) && checkpoint_verify(&start) &&
                             checkpoint_weights(&start, &fixture.layout, 0, size, weights) &&
                             checkpoint_open(&opened, "s/step_00000100", true) &&
                             checkpoint_read(&opened, STATE_MASTER, 0, size, weights, NULL, NULL) &&
                             checkpoint_read_scaling(&opened, &fixture.precision, fixture.slots,
                                                     fixture.history));
        bool reading = c.fired != NULL && strcmp(c.fired, "pread") == 0;
        CHECK(reading ? !ok && strstr(error_text(), "Input/output error") != NULL
                      : ok || c.fired != NULL);
        refused += reading;
    }
    CHECK(refused > 40);
}

// ---- kills --------------------------------------------------------------------------------------

static void end_process(void) {
    _exit(0);
}

// Runs `work` in another process, which is killed at the cycle's call.
static void kill_at(Cycle *c, bool (*work)(int64_t), int64_t step) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        arm(FAIL_ONCE, c->n);
        fault.meanwhile = end_process;
        work(step);
        _exit(1);
    }
    int status;
    waitpid(child, &status, 0);
    c->fired = WEXITSTATUS(status) == 1 ? NULL : "a kill";
}

// A planted fault: the checkpoint has its name before its files.
static bool save_unfinished(int64_t step) {
    char path[PATH_LENGTH];
    mkdir(checkpoint_path(path, "s", step), 0755);
    return folder_remove(path) && save_step(step);
}

// Kills a save of step 3 at each call. If the checkpoint had its name, it must be resumed, even if
// the links had not moved. The next start moves them. Returns how many such checkpoints were lost.
static int lost_by_kills(bool (*save)(int64_t)) {
    int lost = 0;
    begin("--keep 0", 2);
    CYCLES(c, FAIL_ONCE) {
        kill_at(&c, save, 3);
        bool named = path_exists("s/step_00000003");
        bool claimed = claim(fixture.options);
        int64_t step = resumed_step();
        lost += named && step != 3;
        if (lost > 0) { break; }
        CHECK(claimed && !path_exists("s/.tmp-link"));
        CHECK((step == 3 || step == 2) && links_lead_to(step));
    }
    return lost;
}

TEST(a_killed_save_counts_once_it_has_its_name) {
    CHECK_EQUAL(lost_by_kills(save_step), 0);
    CHECK(lost_by_kills(save_unfinished) > 0);
    no_links = true;
    CHECK_EQUAL(lost_by_kills(save_step), 0);
    no_links = false;
}

TEST(a_killed_run_has_gone_back_or_not) {
    int seen[5] = {0};
    begin("--keep 0", 4);
    CYCLES(c, FAIL_ONCE) {
        kill_at(&c, go_back, 2);
        CHECK(claim(fixture.options));
        int64_t step = resumed_step();
        CHECK(step == 2 || step == 4);
        seen[step]++;
        CHECK(go_back(step) && (step == 4 || !path_exists("s/step_00000003")));
        CHECK(holds_3() && (holds("s/step_00000004", 4) || holds("s/step_00000004.aside-1", 4)));
        CHECK(save_step(5) && resumed_step() == 5);
    }
    CHECK(seen[2] > 3 && seen[4] > 3);
}

// ---- other processes ----------------------------------------------------------------------------

static bool is_all(const float *values, int64_t n, double expected) {
    int64_t i = 0;
    while (i < n && (double)values[i] == expected) { i++; }
    return i == n;
}

static bool save_all_of(int64_t step) {
    for (int64_t i = 0; i < 3 * fixture.layout.size; i++) { fixture.state[i] = (float)step; }
    return fixture_save(&fixture, step);
}

static void save_second(void) {
    CHECK(save_all_of(2));
}

// Reads the state in several pieces, and returns the step that all are from; 0: reading failed,
// because the checkpoint was deleted.
static int64_t read_while_saving(bool load, float *out) {
    static Options o, model;
    CLOSED(checkpoint_close) Checkpoint c = {0};
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
        ok = checkpoint_model(&c, &o, &model) && checkpoint_complete(&c, true);
        step = c.progress.step;
        for (int part = 0; ok && part < 6; part++) {
            ok = checkpoint_read(&c, part / 2, part % 2 * half, (part % 2 + 1) * half, out, NULL,
                                 NULL) &&
                 is_all(out, half, (double)step);
        }
    }
    if (!ok) { CHECK_CONTAINS(error_text(), "o such f"); } // file, folder
    return ok ? step : 0;
}

// During each call of a reader in turn, a run saves its next checkpoint and deletes the one before.
// The reader must get exactly one of the two, or fail.
TEST(a_checkpoint_is_one_while_a_run_saves) {
    static const char *const ways[] = {"--resume= --load s/latest", "--resume s/latest", ""};
    static float out[1 << 15];
    for (int i = 0; i < 6; i++) { // with and without symbolic links
        int seen[3] = {0};
        no_links = i >= 3;
        begin(text_of("--keep 1 %s", ways[i % 3]), 0);
        CHECK(save_all_of(1));
        keep_as_made();
        CYCLES(c, FAIL_ONCE) {
            fault.meanwhile = save_second;
            seen[FAULTY(c, read_while_saving(i % 3 == 0, out))]++;
            fault.meanwhile = NULL;
        }
        CHECK(seen[0] > 1 && seen[1] > 1 && seen[2] > 1);
    }
    no_links = false;
}

// ---- other files --------------------------------------------------------------------------------

static void record(Metrics *m, int step) {
    MetricsRecord *r = metrics_begin("save");
    metrics_number(r, "step", step);
    metrics_end(m, r);
}

// While the metrics cannot be written or opened, records are lost; no others may be lost.
TEST(metrics_come_back) {
    int missing = 0;
    CYCLES(c, FAIL_FROM_THERE) {
        CLOSED(metrics_close) Metrics m = {0};
        unlink("m");
        CHECK(metrics_open(&m, "m", true));
        arm(FAIL_FROM_THERE, c.n);
        record(&m, 1);
        record(&m, 2);
        metrics_sync(&m);
        c.fired = disarm();
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
    for (Mode mode = FAIL_ONCE; mode < MODES; mode++) {
        CYCLES(c, mode) {
            unlink("f");
            CHECK(file_replace("f", "old", 3));
            bool replaced = FAULTY(c, file_replace("f", "new", 3));
            const char *now = content();
            CHECK(strcmp(now, "new") == 0 || (!replaced && strcmp(now, "old") == 0));
            CHECK(mode == FAIL_FROM_THERE || !path_exists("f.new"));
            CHECK(file_replace("f", "new", 3));
            CHECK_TEXT(content(), "new");
        }
    }
}

// ---- memory -------------------------------------------------------------------------------------

// The end of a child process that has reported an error: without AddressSanitizer's search for
// leaks, which takes far longer than the work.
static void leave(const char *error) {
    (void)error;
    fflush(stderr);
    _exit(EXIT_FAILURE);
}

// Runs `work` in a child process that gets no memory from its n-th allocation on. Returns true if
// it makes fewer allocations. Otherwise the child must report the lack of memory and exit with
// status 1.
static bool survives_without_memory(void (*work)(void), int n) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (freopen("said", "w", stderr) == NULL) { _exit(2); }
        die_with(leave);
        memory.calls = 0;
        memory.failing = n;
        work();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) { return true; }
    CLOSED(blob_free) Blob b = blob_read("said");
    bool told = b.size > 20 && memcmp(b.bytes, "error: out of memory", 20) == 0;
    if (!told || !WIFEXITED(status) || WEXITSTATUS(status) != 1) {
        test_fail(__FILE__, __LINE__, "allocation %d: status %x, \"%.*s\"", n, (unsigned)status,
                  (int)b.size, (char *)b.bytes);
    }
    return false;
}

static void save_third(void) {
    save_step(3);
}

TEST(a_save_without_memory_says_so) {
    int n = 1;
    begin(FP8 "--keep 1", 2);
    while (!survives_without_memory(save_third, n)) {
        CHECK(resumed_step() >= 2);
        n += n < 50 ? 1 : 37;
    }
    CHECK(n > 500); // cJSON's allocations are among them
    CHECK(holds("s/step_00000003", 3));
}

static void operate(void) {
    float x[3] = {1, 2, 3}, out[1], lse[1];
    sum_of_squares(x, 3);
    attention_forward(out, lse, x, NULL, 1, 1, 1, 1, 1);
    cpu_gemm((CpuGemm){.m = 1, .n = 1, .k = 1, .a = x, .b = x + 1, .c = out, .alpha = 1});
}

TEST(operations_without_memory_say_so) {
    int n = 1;
    omp_set_num_threads(1);
    while (!survives_without_memory(operate, n)) { n++; }
    CHECK(n > 3); // each of them needs memory
}
