// The watchdog: if a rank dies, is stopped, hangs or waits forever, every rank ends within the time
// limit, with a line that has that rank and its step. A rank that is only slow ends no run. All
// cases run at the same time, with three processes each.
#define _GNU_SOURCE // ppoll

#include "processes.h"

#include <poll.h>
#include <sys/syscall.h>

enum { RANKS = 3, BAD = 1, ALL = -1 };
#define LIMIT 1.6 // seconds; a sixteenth of it between heartbeats

typedef struct {
    const char *name;
    int who; // the rank that does it, while the others wait at step 57; ALL: each does it, and
             // leaves
    void (*does)(Group *g);
    int status[RANKS];       // expected
    const char *says[RANKS]; // what each rank's line contains; NULL: no line
    Endpoint endpoint;
    Processes run;
} Case;

static void work(const Group *g, int64_t step) {
    watch_beat(g->watch, step, ACTIVITY_WORK, "reading data");
}

static void wait_for_others(const Group *g, int64_t step) {
    watch_beat(g->watch, step, ACTIVITY_WAIT, "in a step");
}

// In units of the time limit.
static void pass_time(double limits) {
    usleep((useconds_t)(1e6 * LIMIT * limits));
}

static int take_part(int rank, void *argument) {
    const Case *c = argument;
    Group *g = join(&c->endpoint, rank, "");
    wait_for_others(g, 57);
    alarm(20); // should nothing end it
    if (rank == c->who || c->who == ALL) { c->does(g); }
    if (c->who == ALL) {
        group_close(g);
        return 0;
    }
    for (;;) { pause(); }
}

// ---- what ends a run ----------------------------------------------------------------------------

static void dies(Group *g) {
    (void)g;
    pass_time(0.25);
    raise(SIGKILL);
}

static void says_why(Group *g) {
    (void)g;
    pass_time(0.25);
    die("a reason");
}

// This rank continues after the others have ended, and notices that it is alone.
static void stops(Group *g) {
    (void)g;
    pass_time(0.25);
    if (fork() == 0) {
        pass_time(1.6);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    raise(SIGSTOP);
}

// This rank is stopped during work: the others must report its silence, not that the work hangs.
static void stops_at_work(Group *g) {
    work(g, 57);
    stops(g);
}

static void hangs_at_work(Group *g) {
    work(g, 56);
}

static void waits_behind(Group *g) {
    wait_for_others(g, 56);
}

static bool broken_network(void *argument) {
    return *(double *)argument > wall_seconds() || fail("NCCL: a broken network");
}

static void finds_a_broken_network(Group *g) {
    static double when;
    when = wall_seconds() + 0.25 * LIMIT;
    watch_probe(g->watch, broken_network, &when);
}

static bool blocks(void *argument) {
    pass_time(*(double *)argument);
    return true;
}

// If the GPU or the network hangs, NCCL's error query may hang too.
static void hangs_in_its_probe(Group *g) {
    static double limits = 100;
    watch_probe(g->watch, blocks, &limits);
    pass_time(0.2);
    wait_for_others(g, 56); // reports do not wait for the probe
}

// A call that waits for a dead rank does not return: the watchdog ends the process.
static void one_dies_in_a_call(Group *g) {
    if (g->rank == BAD) { dies(g); }
    group_agree(g, CHANNEL_MAIN, true);
    _exit(99);
}

// The others wait for it in a call, so they do not count as working.
static void one_hangs_in_a_call(Group *g) {
    watch_beat(g->watch, 57, ACTIVITY_PAUSE, "reading the checkpoint");
    if (g->rank == BAD) { wait_for_others(g, 56); }
    while (g->rank == BAD) { pause(); }
    group_agree(g, CHANNEL_MAIN, true);
}

// The others have finished, and wait for it to finish.
static void one_hangs_at_the_end(Group *g) {
    if (g->rank == BAD) { wait_for_others(g, 56); }
    while (g->rank == BAD) { pause(); }
}

// ---- what does not ------------------------------------------------------------------------------

static void one_pauses(Group *g) {
    if (g->rank == BAD) { watch_beat(g->watch, 57, ACTIVITY_PAUSE, "waiting for a disk"); }
    pass_time(2);
}

// Waiting for a disk has no time limit, while the others wait in a call.
static void one_pauses_in_a_call(Group *g) {
    if (g->rank == BAD) { one_pauses(g); }
    group_agree(g, CHANNEL_MAIN, true);
}

static void one_pauses_at_the_end(Group *g) {
    if (g->rank == BAD) { one_pauses(g); }
}

// Its steps are slow, but it makes progress; the others wait for it longer than the limit.
static void one_is_slow(Group *g) {
    for (int i = 0; i < 8; i++) {
        if (g->rank == BAD) { work(g, 57 + i); }
        pass_time(0.3);
    }
}

static void one_probe_is_slow(Group *g) {
    double limits = 1.5;
    if (g->rank == BAD) { watch_probe(g->watch, blocks, &limits); }
    one_is_slow(g);
    wait_for_others(g, 65);
    watch_probe(g->watch, NULL, NULL);
}

static void one_is_stopped_for_a_while(Group *g) {
    if (g->rank == BAD && fork() == 0) {
        kill(getppid(), SIGSTOP);
        pass_time(0.5);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    pass_time(0.8);
}

// The clock of this process, and its watchdog's polls: while `holds`, a poll does not return.
static _Atomic int64_t ahead; // seconds
static _Atomic bool holds, held;

int clock_gettime(clockid_t clock, struct timespec *time) {
    int status = (int)syscall(SYS_clock_gettime, clock, time);
    time->tv_sec += ahead;
    return status;
}

int poll(struct pollfd *files, nfds_t count, int ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    int status = ppoll(files, count, ms < 0 ? NULL : &time, NULL);
    for (; holds; held = true) { sched_yield(); }
    held = false;
    return status;
}

// Every rank is stopped for longer than the limit, as its clock says, and then its main thread
// reports something before its watchdog runs again.
static void all_are_stopped_and_work_first(Group *g) {
    for (int i = 0; i < 3; i++) {
        holds = true;
        while (!held) { sched_yield(); }
        ahead += 5;
        work(g, 57 + i);
        holds = false;
        pass_time(0.3);
    }
}

// Ranks say goodbye one after another. Those that have finished wait for the last, as long as there
// is progress.
static void all_leave_in_turn(Group *g) {
    for (int i = 0; i < 3 * (RANKS - 1 - g->rank); i++) {
        work(g, 57 + i);
        pass_time(0.3);
    }
}

#define LOST EXIT_LOST_RANK
// Checks the exit status and the line of each rank.
#define ENDS(name, who, does, status0, status1, status2, says0, says1, says2)       \
    {                                                                               \
        name, who, does, {status0, status1, status2}, {says0, says1, says2}, {0}, { \
            0                                                                       \
        }                                                                           \
    }
#define LASTS(name, does) ENDS(name, ALL, does, 0, 0, 0, NULL, NULL, NULL)
static Case cases[] = {
    ENDS("one dies", BAD, dies, LOST, 128 + SIGKILL, LOST, "rank 1 on ", NULL,
         "has exited unexpectedly (its connection closed), last heard at step 57 (in a step)"),
    ENDS("the first dies", 0, says_why, 1, LOST, LOST, "error: a reason",
         "has exited unexpectedly (its connection closed), last heard at step 57",
         "rank 2: error: rank 0 on "),
    ENDS("one stops", BAD, stops, LOST, LOST, LOST, "rank 1 on ",
         "rank 1: error: ", " s, last heard at step 57 (in a step)"),
    ENDS("the first stops", 0, stops, LOST, LOST, LOST, "rank 0: error: ", " has been silent for ",
         "last heard at step 57"),
    ENDS("one stops at work", BAD, stops_at_work, LOST, LOST, LOST, "rank 1 on ",
         "rank 1: error: ", "silent for "),
    ENDS("one hangs", BAD, hangs_at_work, LOST, LOST, LOST, "has made no progress for 1.",
         "rank 1 on ", " s, last heard at step 56 (reading data)"),
    ENDS("all wait", BAD, waits_behind, LOST, LOST, LOST, "rank 1 on ",
         "waits, as all ranks do, for 1.3 s: a GPU or the network hangs, last",
         " heard at step 56 (in a step); this rank ends at step 57 (exit status 4)"),
    ENDS("the probe fails", BAD, finds_a_broken_network, LOST, LOST, LOST, "rank 1 on ",
         "rank 1: NCCL: a broken network", "rank 1 on "),
    ENDS("the first's probe hangs", 0, hangs_in_its_probe, LOST, LOST, LOST, "rank 0 on ",
         " waits, as all ranks do, for ", "at step 56 (in a step)"),
    ENDS("one dies in a call", ALL, one_dies_in_a_call, LOST, 128 + SIGKILL, LOST,
         "has exited unexpectedly (its connection closed)", NULL, "has exited unexpectedly"),
    ENDS("one hangs in a call", ALL, one_hangs_in_a_call, LOST, LOST, LOST, "rank 1 on ",
         " waits, as all ranks do, for ", "at step 56 (in a step)"),
    ENDS("one hangs at the end", ALL, one_hangs_at_the_end, LOST, LOST, LOST, "rank 1 on ",
         " waits, as all ranks do, for ", "at step 56 (in a step)"),
    LASTS("one pauses", one_pauses),
    LASTS("one pauses in a call", one_pauses_in_a_call),
    LASTS("one pauses at the end", one_pauses_at_the_end),
    LASTS("one is slow", one_is_slow),
    LASTS("one's probe is slow", one_probe_is_slow),
    LASTS("one is stopped for a while", one_is_stopped_for_a_while),
    LASTS("all are stopped, and work first", all_are_stopped_and_work_first),
    LASTS("all leave in turn", all_leave_in_turn),
};

static void check_case(Case *c) {
    FREED char *log = processes_log(&c->run);
    char tag[32], line[1024];
    for (int r = 0; r < RANKS; r++) {
        if (c->run.status[r] != c->status[r]) {
            test_fail(__FILE__, __LINE__, "%s: rank %d: status %d, not %d: %s", c->name, r,
                      c->run.status[r], c->status[r], log);
        }
        snprintf(tag, sizeof(tag), "rank %d: error: ", r);
        const char *said = strstr(log, tag);
        snprintf(line, sizeof(line), "%.*s", said != NULL ? (int)strcspn(said, "\n") : 0,
                 said != NULL ? said : "");
        if (c->says[r] != NULL) {
            CHECK_CONTAINS(line, c->says[r]);
        } else {
            CHECK_TEXT(line, "");
        }
    }
}

TEST(every_rank_is_judged_rightly) {
    double begin = wall_seconds();
    EACH (c, cases) {
        c->endpoint = endpoint_at("127.0.0.1", RANKS, LIMIT);
        processes_start(&c->run, RANKS, text_of("said.%d", (int)(c - cases)), take_part, c);
        close(c->endpoint.listener);
    }
    EACH (c, cases) { processes_wait(&c->run); }
    CHECK(wall_seconds() - begin < 5 * LIMIT);
    EACH (c, cases) { check_case(c); }
}
