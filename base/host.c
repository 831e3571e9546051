#include "host.h"

#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---- limits of the container --------------------------------------------------------------------

static bool lists(const char *names, const char *name) {
    size_t n = strlen(name);
    for (const char *at = names; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, name, n) == 0 && (at[n] == ',' || at[n] == '\0')) { return true; }
    }
    return false;
}

// Finds the line of a file that begins with `key`. Returns the number after the key, divided by a
// second number if one follows. Returns `otherwise` if there is no number, or a negative number,
// which means that there is no limit.
static double read_number(const char *folder, const char *name, const char *key, double otherwise) {
    char path[3 * PATH_LENGTH], line[256];
    size_t n = strlen(key);
    double number = 0, unit = 1;
    bool found = false;
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "re");
    while (!found && file != NULL && fgets(line, sizeof(line), file) != NULL) {
        found = strncmp(line, key, n) == 0 && sscanf(line + n, "%lf %lf", &number, &unit) >= 1;
    }
    if (file != NULL) { fclose(file); }
    return found && number >= 0 && unit > 0 ? number / unit : otherwise;
}

// Returns how many cores, or bytes of memory, a cgroup lets its processes use. group: the cgroup's
// folder. second: whether the folder has the files of cgroup version 2, not 1.
typedef double Limit(const char *group, bool second);

// Returns the lowest limit of this process's cgroup and of that cgroup's ancestors.
static double lowest(const char *root, const char *controller, Limit *limit_of) {
    char path[2 * PATH_LENGTH + 64], line[PATH_LENGTH];
    double limit = INFINITY;
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    if (file == NULL) { return limit; }
    while (fgets(line, sizeof(line), file) != NULL) { // "ID:controllers:/group"
        line[strcspn(line, "\n")] = '\0';
        char *names = strchr(line, ':'), *group = names != NULL ? strchr(names + 1, ':') : NULL;
        if (group == NULL) { continue; }
        *group++ = '\0';
        bool second = names[1] == '\0'; // a line of version 2 names no controllers
        if (!second && !lists(names + 1, controller)) { continue; }
        for (char *slash = group; slash != NULL;) { // the group and then its ancestors
            snprintf(path, sizeof(path), "%s/sys/fs/cgroup%s%s%s", root, second ? "" : "/",
                     second ? "" : controller, group);
            limit = fmin(limit, limit_of(path, second));
            slash = strrchr(group, '/');
            if (slash != NULL) { *slash = '\0'; }
        }
    }
    fclose(file);
    return limit;
}

static double cores_of(const char *group, bool second) {
    if (second) { return read_number(group, "cpu.max", "", INFINITY); }
    return read_number(group, "cpu.cfs_quota_us", "", INFINITY) /
           read_number(group, "cpu.cfs_period_us", "", INFINITY);
}

double cgroup_cores(const char *root) {
    return lowest(root, "cpu", cores_of);
}

int host_cores(const char *root) {
    double quota = cgroup_cores(root);
    int cores = omp_get_num_procs(); // the cores in this process's affinity
    return quota < cores ? (int)fmax(1, ceil(quota)) : cores;
}

// Returns how many bytes a cgroup's processes can still allocate. The page cache does not count as
// used, because the kernel frees it when memory is short.
static double memory_of(const char *group, bool second) {
    double limit = read_number(group, second ? "memory.max" : "memory.limit_in_bytes", "",
                               INFINITY);
    const char *used = second ? "memory.current" : "memory.usage_in_bytes";
    double pages =
        read_number(group, "memory.stat", second ? "active_file" : "total_active_file", 0) +
        read_number(group, "memory.stat", second ? "inactive_file" : "total_inactive_file", 0);
    return fmax(0, limit - fmax(0, read_number(group, used, "", 0) - pages));
}

double host_memory(const char *root) {
    if (root == NULL) { root = getenv("LLM8_TEST_ROOT"); }
    if (root == NULL) { root = ""; }
    double machine = 1024 * read_number(root, "proc/meminfo", "MemAvailable:", INFINITY);
    return fmin(machine, lowest(root, "memory", memory_of));
}

// ---- threads ------------------------------------------------------------------------------------

// omp_set_num_threads() affects only the calling thread. The number is kept here too, because
// threads_for is also called in other threads, such as the one that saves.
static int threads; // 0: threads_divide has not been called

void threads_divide(int processes) {
    enum { THREADS_MAX = 4096 }; // with 100,000 threads OpenMP's library overruns the stack
    const char *wanted = getenv("OMP_NUM_THREADS");
    bool given = wanted != NULL && atoi(wanted) > 0; // else OpenMP's library ignores it
    threads = omp_get_max_threads();
    if (given && threads <= THREADS_MAX) { return; }
    if (given) {
        warn("OMP_NUM_THREADS: %d threads, more than %d: one per core is used", threads,
             THREADS_MAX);
    }
    threads = (int)max64(1, host_cores("") / processes);
    omp_set_num_threads(threads);
}

typedef struct {
    Task *task;
    void *context;
    int64_t count;
    _Atomic int64_t next;
    _Atomic bool failed;
    Error why; // the error of the first task that failed
} Work;

static void *take_tasks(void *work) {
    Work *w = work;
    for (int64_t i; (i = w->next++) < w->count;) {
        if (!w->task(w->context, i) && !atomic_exchange(&w->failed, true)) {
            w->why = error_kept();
        }
    }
    return NULL;
}

bool threads_for(int64_t count, Task *task, void *context) {
    Work w = {.task = task, .context = context, .count = count};
    int most = threads > 0 ? threads : omp_get_max_threads(), started = 0;
    int others = (int)min64(most, count) - 1;
    FREED pthread_t *helpers = calloc_or_die((size_t)max64(0, others), sizeof(pthread_t));
    // if no more threads can be started, those that run do all tasks
    while (started < others && pthread_create(&helpers[started], NULL, take_tasks, &w) == 0) {
        started++;
    }
    take_tasks(&w);
    for (int i = 0; i < started; i++) { pthread_join(helpers[i], NULL); }
    return !w.failed || fail_again(w.why);
}

void threads_spin_briefly(char **argv) {
    // if one of the first two variables is set, the user has chosen how threads wait. If one of the
    // others is set, libgomp has bound this thread to a core, and execv() would not undo the
    // binding
    static const char *const set[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND",
                                      "OMP_PLACES", "GOMP_CPU_AFFINITY"};
    char self[PATH_LENGTH];
    for (size_t i = 0; i < sizeof(set) / sizeof(set[0]); i++) {
        if (getenv(set[i]) != NULL) { return; }
    }
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (length <= 0 || length == sizeof(self) - 1) { return; }
    self[length] = '\0';
    // if a loader or valgrind runs this program, `self` is the path of the loader or of valgrind
    bool ours = argv[0] != NULL && strcmp(path_name(argv[0]), path_name(self)) == 0;
    if (!ours || setenv("GOMP_SPINCOUNT", "1000", 1) != 0) { return; }
    execv(self, argv); // on failure the program goes on, and threads spin longer
}
