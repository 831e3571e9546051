// The watchdog: a rank that dies, is stopped, hangs or waits in vain ends every rank within the
// time limit, with a line that names it and its step; what only takes long ends nobody. All cases
// run at once, three processes each.
#include "../ranks/meet.h"
#include "processes.h"

enum { RANKS = 3, BAD = 1 };
#define LIMIT 1.6 // seconds; a tenth of it between heartbeats

typedef struct {
    const char *name;
    Body *body;
    int status[RANKS];       // expected
    const char *says[RANKS]; // what each rank's line contains; NULL: no line
    int listener, port;
    Processes run;
    double seconds; // it took
} Case;

static Group join(int rank, const Case *c) {
    Group g;
    Error err;
    Ranks r = {.rank = rank, .ranks = RANKS, .port = c->port, .host = "127.0.0.1"};
    errors_name_rank(rank);
    if (!meet(&g, &r, rank == 0 ? c->listener : -1, "", 10, &err)) { die("%s", err.text); }
    Group *lasting = malloc_or_die(sizeof(g)); // the watch's thread reads it to the end
    *lasting = g;
    lasting->watch = watch_start(lasting, LIMIT);
    return *lasting;
}

static int leave(Group *g) {
    group_close(g);
    return 0;
}

static void work(const Group *g, int64_t step) {
    watch_beat(g->watch, step, DOING_WORK, "reading data");
}

static void wait_for_others(const Group *g, int64_t step) {
    watch_beat(g->watch, step, DOING_WAIT, "in a step");
}

static int wait_for_ever(Group *g) {
    for (;;) { pause(); }
    return leave(g);
}

// ---- what ends a run ----------------------------------------------------------------------------

static int one_dies(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, 57);
    usleep(400000);
    if (rank == BAD) { raise(SIGKILL); }
    return wait_for_ever(&g);
}

static int first_dies(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, 57);
    usleep(400000);
    if (rank == 0) { die("a reason"); }
    return wait_for_ever(&g);
}

// Goes on once the others have ended, and finds itself alone.
static void stop_for_long(void) {
    if (fork() == 0) {
        usleep((useconds_t)(1e6 * (LIMIT + 1)));
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    raise(SIGSTOP);
}

static int one_stops(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, 57);
    usleep(400000);
    if (rank == BAD) { stop_for_long(); }
    return wait_for_ever(&g);
}

static int first_stops(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, 57);
    usleep(400000);
    if (rank == 0) { stop_for_long(); }
    return wait_for_ever(&g);
}

// What it was last heard to work at is not what it hangs in.
static int one_stops_at_work(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, 57);
    if (rank == BAD) {
        work(&g, 57);
        usleep(400000);
        stop_for_long();
    }
    return wait_for_ever(&g);
}

static int one_hangs(int rank, void *argument) {
    Group g = join(rank, argument);
    if (rank == BAD) {
        work(&g, 56);
    } else {
        wait_for_others(&g, 57);
    }
    return wait_for_ever(&g);
}

static int all_wait(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, rank == BAD ? 56 : 57);
    return wait_for_ever(&g);
}

static bool broken_network(void *argument, Error *err) {
    return *(double *)argument > wall_seconds() || fail(err, "NCCL: a broken network");
}

static int probe_fails(int rank, void *argument) {
    Group g = join(rank, argument);
    double when = wall_seconds() + 0.4;
    wait_for_others(&g, 57);
    if (rank == BAD) { watch_probe(g.watch, broken_network, &when); }
    return wait_for_ever(&g);
}

// A call that waits for a rank that is gone ends as the watch says, not by itself.
static int one_dies_in_a_call(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, 57);
    usleep(400000);
    if (rank == BAD) { raise(SIGKILL); }
    group_agree(&g, CHANNEL_MAIN, true, NULL);
    return 99;
}

// ---- what does not ------------------------------------------------------------------------------

static int one_pauses(int rank, void *argument) {
    Group g = join(rank, argument);
    if (rank == BAD) {
        watch_beat(g.watch, 57, DOING_PAUSE, "waiting for a disk");
    } else {
        wait_for_others(&g, 57);
    }
    usleep((useconds_t)(1e6 * 2 * LIMIT));
    return leave(&g);
}

// Its steps take long, but it goes on; the others wait for it longer than the limit.
static int one_is_slow(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, 57);
    for (int i = 0; i < 8; i++) {
        if (rank == BAD) { work(&g, 57 + i); }
        usleep((useconds_t)(1e6 * 0.3 * LIMIT));
    }
    return leave(&g);
}

static int one_is_stopped_for_a_while(int rank, void *argument) {
    Group g = join(rank, argument);
    wait_for_others(&g, 57);
    if (rank == BAD && fork() == 0) {
        kill(getppid(), SIGSTOP);
        usleep((useconds_t)(1e6 * 0.5 * LIMIT));
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    usleep((useconds_t)(1e6 * 0.8 * LIMIT));
    return leave(&g);
}

// Ranks say goodbye one after another; who is done waits for the last, as long as that goes on.
static int all_leave_in_turn(int rank, void *argument) {
    Group g = join(rank, argument);
    for (int i = 0; i < 3 * (RANKS - 1 - rank); i++) {
        work(&g, 57 + i);
        usleep((useconds_t)(1e6 * 0.3 * LIMIT));
    }
    return leave(&g);
}

#define LOST EXIT_LOST_RANK
static Case cases[] = {
    {.name = "one dies",
     .body = one_dies,
     .status = {LOST, 128 + SIGKILL, LOST},
     .says = {"rank 1 on ", NULL,
              "has ended without a goodbye, last heard at step 57 (in a step)"}},
    {.name = "the first dies",
     .body = first_dies,
     .status = {1, LOST, LOST},
     .says = {"error: a reason", "rank 0 has ended without a goodbye, last heard at step 57",
              "this rank ends at step 57 (exit status 4)"}},
    {.name = "one stops",
     .body = one_stops,
     .status = {LOST, LOST, LOST},
     .says = {"rank 1 on ", "rank 1: error: ", " s, last heard at step 57 (in a step)"}},
    {.name = "the first stops",
     .body = first_stops,
     .status = {LOST, LOST, LOST},
     .says = {"rank 0: error: ", "rank 0 has been silent for ", "last heard at step 57"}},
    {.name = "one stops at work",
     .body = one_stops_at_work,
     .status = {LOST, LOST, LOST},
     .says = {"rank 1 on ", "rank 1: error: ", "silent for "}},
    {.name = "one hangs",
     .body = one_hangs,
     .status = {LOST, LOST, LOST},
     .says = {"has not gone on for 1.", "rank 1 on ", " s at step 56 (reading data)"}},
    {.name = "all wait",
     .body = all_wait,
     .status = {LOST, LOST, LOST},
     .says = {" s: rank 1 on ", "waits at step 56 (in a step), as all do",
              "a GPU or the network hangs"}},
    {.name = "the probe fails",
     .body = probe_fails,
     .status = {LOST, LOST, LOST},
     .says = {"rank 1 on ", "rank 1: NCCL: a broken network", "rank 1 on "}},
    {.name = "one dies in a call",
     .body = one_dies_in_a_call,
     .status = {LOST, 128 + SIGKILL, LOST},
     .says = {"has ended without a goodbye", NULL, "has ended without a goodbye"}},
    {.name = "one pauses", .body = one_pauses},
    {.name = "one is slow", .body = one_is_slow},
    {.name = "one is stopped for a while", .body = one_is_stopped_for_a_while},
    {.name = "all leave in turn", .body = all_leave_in_turn},
};
enum { CASES = sizeof(cases) / sizeof(cases[0]) };

// The line of a rank's error, or "".
static const char *line_of(char *log, int rank, char out[1024]) {
    char tag[32];
    snprintf(tag, sizeof(tag), "rank %d: error: ", rank);
    const char *line = strstr(log, tag);
    snprintf(out, 1024, "%.*s", line != NULL ? (int)strcspn(line, "\n") : 0,
             line != NULL ? line : "");
    return out;
}

static void check_case(Case *c) {
    char *log = processes_log(&c->run), line[1024];
    for (int r = 0; r < RANKS; r++) {
        if (c->run.status[r] != c->status[r]) {
            test_fail(__FILE__, __LINE__, "%s: rank %d: status %d, not %d: %s", c->name, r,
                      c->run.status[r], c->status[r], log);
        }
        line_of(log, r, line);
        if (c->says[r] != NULL) {
            CHECK_CONTAINS(line, c->says[r]);
        } else {
            CHECK_TEXT(line, "");
        }
    }
    free(log);
}

static void every_rank_is_judged_rightly(void) {
    Error err;
    double begin = wall_seconds();
    for (int i = 0; i < CASES; i++) {
        Case *c = &cases[i];
        char log[32];
        c->listener = net_listen("127.0.0.1", 0, &err);
        c->port = net_port(c->listener);
        snprintf(log, sizeof(log), "said.%d", i);
        processes_start(&c->run, RANKS, log, c->body, c);
        close(c->listener);
    }
    for (int i = 0; i < CASES; i++) { processes_wait(&cases[i].run); }
    CHECK(wall_seconds() - begin < 5 * LIMIT);
    for (int i = 0; i < CASES; i++) { check_case(&cases[i]); }
}

int main(void) {
    RUN(every_rank_is_judged_rightly);
    return test_summary();
}
