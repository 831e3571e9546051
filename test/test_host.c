// What this process may use of its host, from control groups that the test writes; and threads that
// share work.
#define _GNU_SOURCE // sched_setaffinity
#include "../base/host.h"
#include "fixture.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

// Writes a file under the folder `root`, and makes its folders.
static void put(const char *path, const char *text) {
    char at[PATH_LENGTH];
    path_format(at, "root/%s", path);
    for (char *slash = strchr(at, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(at, 0777);
        *slash = '/';
    }
    text_write(at, text);
}

// One file after another; of all groups the lowest limit counts.
TEST(limits_of_either_version_of_control_groups_count) {
    static const struct {
        const char *path, *text;
        double cores, memory;
    } rows[] = {
        {"proc/self/cgroup", "0::/a/b\n", INFINITY, INFINITY},
        {"sys/fs/cgroup/a/b/cpu.max", "max 100000\n", INFINITY, INFINITY},
        {"sys/fs/cgroup/a/cpu.max", "250000 100000\n", 2.5, INFINITY},
        {"sys/fs/cgroup/cpu.max", "50000 100000\n", 0.5, INFINITY},
        {"sys/fs/cgroup/a/b/memory.max", "1073741824\n", 0.5, 0x1p30},
        {"sys/fs/cgroup/a/memory.max", "5000000\n", 0.5, 5000000},
        {"sys/fs/cgroup/a/memory.current", "4000000\n", 0.5, 1000000},
        // file pages can be freed
        {"sys/fs/cgroup/a/memory.stat", "anon 7\ninactive_file 10\nactive_file 200\n", 0.5,
         1000210},
        {"sys/fs/cgroup/a/memory.current", "5000300\n", 0.5, 0}, // more than the limit
        {"sys/fs/cgroup/a/memory.max", "max\n", 0.5, 0x1p30},
        {"proc/meminfo", "MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:   3 kB\n", 0.5, 3072},
        {"proc/meminfo", "", 0.5, 0x1p30},
        {"proc/self/cgroup", "5:cpuset:/c\n3:cpuacct,cpu:/c\n2:memory:/m/n\n", INFINITY, INFINITY},
        {"sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n", INFINITY, INFINITY},
        {"sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "50000\n", INFINITY, INFINITY},
        {"sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "150000\n", 3, INFINITY},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes", "4096\n", 3, 4096}, // in a container
        {"sys/fs/cgroup/memory/memory.usage_in_bytes", "4000\n", 3, 96},
        {"sys/fs/cgroup/memory/memory.stat", "active_file 50\ntotal_active_file 100\n", 3, 196},
        {"proc/self/cgroup", "no group\n:\n", INFINITY, INFINITY},
    };
    CHECK(isinf(cgroup_cores("root")) && isinf(host_memory("root"))); // no such file
    EACH (row, rows) {
        put(row->path, row->text);
        CHECK_TEXT(text_of("%s %.17g %.17g", row->path, cgroup_cores("root"), host_memory("root")),
                   text_of("%s %.17g %.17g", row->path, row->cores, row->memory));
        if (row->cores < 1) { CHECK_EQUAL(host_cores("root"), 1); }
    }
    double machine = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    CHECK(host_memory(NULL) > 0 && host_memory(NULL) < machine);
}

TEST(cores_are_those_of_the_affinity) {
    cpu_set_t all, one;
    CPU_ZERO(&one);
    CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++) {
        if (CPU_ISSET(i, &all)) { CPU_SET(i, &one); }
    }
    CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
    CHECK_EQUAL(host_cores("missing"), 1);
    CHECK(sched_setaffinity(0, sizeof(all), &all) == 0);
    CHECK_EQUAL(host_cores("missing"), CPU_COUNT(&all));
}

TEST(processes_of_a_host_divide_its_cores) {
    unsetenv("OMP_NUM_THREADS");
    threads_divide(1);
    int cores = omp_get_max_threads();
    CHECK_EQUAL(cores, host_cores(""));
    threads_divide(2);
    CHECK_EQUAL(omp_get_max_threads(), max64(1, cores / 2));
    threads_divide(1000000);
    CHECK_EQUAL(omp_get_max_threads(), 1);
    setenv("OMP_NUM_THREADS", "7", 1); // kept, as OpenMP's library has read it already
    omp_set_num_threads(7);
    threads_divide(2);
    CHECK_EQUAL(omp_get_max_threads(), 7);
    // no number of threads: OpenMP's library has taken all cores
    static const char *const none[] = {"", "0", "-1", "auto"};
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        setenv("OMP_NUM_THREADS", none[i], 1);
        omp_set_num_threads(7);
        threads_divide(1000000);
        CHECK_EQUAL(omp_get_max_threads(), 1);
    }
}

static bool note_thread(void *ids, int64_t i) {
    ((pthread_t *)ids)[i] = pthread_self();
    usleep(1000);
    return true;
}

enum { NOTED = 16 };

static void *note_threads(void *ids) {
    threads_for(NOTED, note_thread, ids);
    return NULL;
}

// As the thread that saves is one.
TEST(other_threads_take_no_more_cores) {
    pthread_t other, ids[NOTED];
    unsetenv("OMP_NUM_THREADS");
    threads_divide(1000000);
    CHECK(pthread_create(&other, NULL, note_threads, ids) == 0);
    pthread_join(other, NULL);
    for (int i = 1; i < NOTED; i++) { CHECK(pthread_equal(ids[i], ids[0])); }
}

enum { TASKS = 10000 };

static void set_threads(int threads) {
    setenv("OMP_NUM_THREADS", "7", 1); // its value when it was read, whatever it is now
    omp_set_num_threads(threads);
    threads_divide(1);
}

static bool count_task(void *counts, int64_t i) {
    ((int *)counts)[i]++;
    if (i == 0) { usleep(20000); } // the others are done in this time
    return i != TASKS / 2 || fail("task %d has failed", (int)i);
}

TEST(every_task_is_done_once) {
    static int counts[TASKS];
    for (int threads = 1; threads <= 5; threads += 2) {
        memset(counts, 0, sizeof(counts));
        set_threads(threads);
        CHECK_REFUSED(threads_for(TASKS, count_task, counts), "task 5000 has failed");
        int once = 0;
        for (int i = 0; i < TASKS; i++) { once += counts[i] == 1; }
        CHECK_EQUAL(once, TASKS);
    }
    CHECK(threads_for(0, count_task, NULL));
}

// Two tasks that wait for each other can end only if two threads run them.
static bool meet_task(void *arrived, int64_t i) {
    volatile int *at = arrived;
    at[i] = 1;
    for (int wait = 0; !at[1 - i] && wait < 20000; wait++) { usleep(1000); }
    if (at[1 - i]) { at[2 + i] = 1; }
    return true;
}

TEST(tasks_run_beside_each_other) {
    int arrived[4] = {0};
    set_threads(2);
    CHECK(threads_for(2, meet_task, arrived));
    CHECK(arrived[2] && arrived[3]);
}
