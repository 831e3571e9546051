// Ranks as processes that find each other over TCP, and what they agree on then: every address
// family, every way in which the meeting can fail, and who is told what.
#include "../ranks/meet.h"
#include "processes.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static const char identity[] = "program x\nlr 0.5\n";

// A listening socket, and the ranks that are to meet there.
typedef struct {
    int listener, port, ranks;
    const char *host;
    double seconds;
} Place;

static Place place_at(const char *host, int ranks) {
    Error err;
    int listener = net_listen(host, 0, &err);
    if (listener < 0) { die("%s", err.text); }
    return (Place){listener, net_port(listener), ranks, host, 10};
}

static bool join(const Place *p, int rank, const char *what, Group *g, Error *err) {
    Ranks r = {.rank = rank, .ranks = p->ranks, .port = p->port};
    snprintf(r.host, sizeof(r.host), "%s", p->host);
    errors_name_rank(rank);
    int listener = rank == 0 ? p->listener : -1;
    if (rank != 0) { close(p->listener); }
    return meet(g, &r, listener, what, p->seconds, err);
}

// Only rank 0 may be left with the listening socket: a connection to it must end with that process.
static void run_there(Processes *run, int count, Body *body, Place *p) {
    unlink("said");
    processes_start(run, count, "said", body, p);
    close(p->listener);
    processes_wait(run);
}

// ---- the calls on a channel ---------------------------------------------------------------------

static int agree_in_turn(int rank, void *argument) {
    const Place *p = argument;
    Group g;
    Error err = {""};
    if (!join(p, rank, identity, &g, &err)) { die("%s", err.text); }
    int wrong = 0;
    for (int c = CHANNEL_MAIN; c <= CHANNEL_SAVE; c++) {
        Channel channel = (Channel)c;
        int number = rank == 0 ? 42 : -1, all[PROCESSES] = {0}, mine = rank * rank;
        err.text[0] = '\0';
        wrong += !group_agree(&g, channel, true, &err) || err.text[0] != '\0';
        group_broadcast(&g, channel, &number, sizeof(number));
        wrong += number != 42;
        group_gather(&g, channel, &mine, sizeof(mine), all);
        for (int r = 0; rank == 0 && r < p->ranks; r++) { wrong += all[r] != r * r; }
        fail(&err, "reason %d", rank); // ranks 1 and above refuse: the first of them is told of
        wrong += group_agree(&g, channel, rank == 0, &err) != (p->ranks == 1);
        wrong += p->ranks > 1 && strcmp(err.text, "rank 1: reason 1") != 0;
        wrong += group_agree(&g, channel, rank != 0, &err);
    }
    char *large = malloc_or_die(1 << 20);
    memset(large, rank == 0 ? 'x' : 'y', 1 << 20);
    group_broadcast(&g, CHANNEL_MAIN, large, 1 << 20);
    wrong += large[0] != 'x' || large[(1 << 20) - 1] != 'x';
    free(large);
    group_close(&g);
    return wrong;
}

static void ranks_meet_and_agree(void) {
    static const char *const hosts[] = {"127.0.0.1", "::1", "localhost", "127.0.0.7",
                                        "::ffff:127.0.0.1"};
    static const int counts[] = {1, 2, 3, 8};
    for (int h = 0; h < 5; h++) {
        for (int i = 0; i < 4; i++) {
            Place p = place_at(hosts[h], counts[i]);
            Processes run;
            run_there(&run, counts[i], agree_in_turn, &p);
            for (int r = 0; r < counts[i]; r++) { CHECK_EQUAL(run.status[r], 0); }
        }
    }
}

// A name that is no address is listened for on all of them, so that others may know it by another.
static void names_are_heard_everywhere(void) {
    char name[64];
    gethostname(name, sizeof(name));
    Error err;
    int listener = net_listen(name, 0, &err);
    CHECK(listener >= 0);
    static const char *const ways[] = {"127.0.0.1", "127.0.0.9", "::1"};
    for (int i = 0; i < 3; i++) {
        int file = net_connect(ways[i], net_port(listener), wall_seconds() + 5, &err);
        CHECK(file >= 0);
        close(file);
    }
    close(listener);
    listener = net_listen("127.0.0.9", 0, &err);
    CHECK(net_connect("127.0.0.1", net_port(listener), wall_seconds() + 0.1, &err) < 0);
    close(listener);
}

static int join_as_told(int rank, void *argument) {
    Group g;
    Error err;
    if (!join(argument, rank, identity, &g, &err)) { die("%s", err.text); }
    group_close(&g);
    return 0;
}

// ---- meetings that fail -------------------------------------------------------------------------

static int missing_ranks(int number, void *argument) {
    const Place *p = argument;
    static const int present[] = {0, 1, 4};
    return join_as_told(present[number], (void *)p);
}

static void missing_ranks_are_named(void) {
    Place p = place_at("127.0.0.1", 8);
    Processes run;
    p.seconds = 0.4;
    double begin = wall_seconds();
    run_there(&run, 3, missing_ranks, &p);
    CHECK(wall_seconds() - begin < 5);
    char *log = processes_log(&run), expected[100];
    for (int i = 0; i < 3; i++) { CHECK_EQUAL(run.status[i], 1); }
    snprintf(expected, sizeof(expected),
             "rank 4: error: ranks 2-3, 5-7 of 8 did not come to 127.0.0.1:%d within 0 s", p.port);
    CHECK_CONTAINS(log, expected);
    CHECK_CONTAINS(log, "rank 0: error: ranks 2-3, 5-7 of 8");
    CHECK_CONTAINS(log, "rank 1: error: ranks 2-3, 5-7 of 8");
    free(log);
}

static int differing(int rank, void *argument) {
    Group g;
    Error err;
    const char *what = rank == 1 ? "program x\nlr 0.25\n" : identity;
    if (!join(argument, rank, what, &g, &err)) { die("%s", err.text); }
    return 0;
}

static int of_another_size(int rank, void *argument) {
    Place p = *(const Place *)argument;
    if (rank == 1) { p.ranks = 5; }
    return join_as_told(rank, &p);
}

static int both_rank_one(int number, void *argument) {
    return join_as_told(number == 0 ? 0 : 1, argument);
}

static void ranks_that_differ_are_refused(void) {
    static const struct {
        Body *body;
        const char *expected;
    } rows[] = {
        {differing, "runs something else: 'lr 0.25', where rank 0 has 'lr 0.5'"},
        {of_another_size, "was started as one of 5 ranks, rank 0 as one of 3"},
        {both_rank_one, "two processes say that they are rank 1: one on "},
    };
    for (int i = 0; i < 3; i++) {
        Place p = place_at("127.0.0.1", 3);
        Processes run;
        p.seconds = 1.5;
        run_there(&run, 3, rows[i].body, &p);
        char *log = processes_log(&run);
        CHECK_EQUAL(run.status[0], 1);
        CHECK_EQUAL(run.status[1], 1);
        CHECK_CONTAINS(log, rows[i].expected);
        CHECK_CONTAINS(log, "rank 0: error: ");
        CHECK_CONTAINS(log, "rank 1: error: ");
        CHECK(strstr(log, "did not come") == NULL); // at once, and not by the time limit
        free(log);
    }
}

// Rank 1 comes, and dies while rank 2 is awaited; another process comes in its place.
static int dies_and_comes_again(int number, void *argument) {
    static const int ranks[] = {0, 1, 1, 2};
    if (number == 1) { ualarm(200000, 0); }
    if (number >= 2) { usleep(300000 * (unsigned)(number - 1)); }
    return join_as_told(ranks[number], argument);
}

// What a port scanner or a browser sends, or nothing.
static int strangers(int number, void *argument) {
    const Place *p = argument;
    Error err;
    if (number < 2) { return join_as_told(number, argument); }
    int file = net_connect(p->host, p->port, wall_seconds() + 5, &err);
    char noise[200];
    memset(noise, 'G', sizeof(noise));
    if (number == 2) { net_send(file, noise, sizeof(noise)); }
    close(file);
    return 0;
}

static void strangers_are_ignored(void) {
    Place p = place_at("127.0.0.1", 2);
    Processes run;
    run_there(&run, 4, strangers, &p);
    CHECK_EQUAL(run.status[0], 0);
    CHECK_EQUAL(run.status[1], 0);
}

static int only_others(int number, void *argument) {
    return join_as_told(number + 1, argument);
}

static void a_wrong_place_is_named(void) {
    Processes run;
    Place p = place_at("127.0.0.1", 2);
    char expected[100];
    close(p.listener); // nobody listens any more
    p.listener = -1;
    p.seconds = 0.3;
    run_there(&run, 1, only_others, &p);
    char *log = processes_log(&run);
    snprintf(expected, sizeof(expected),
             "rank 1: error: rank 0 was not reached at 127.0.0.1:%d within 0 s", p.port);
    CHECK_EQUAL(run.status[0], 1);
    CHECK_CONTAINS(log, expected);
    CHECK_CONTAINS(log, "Connection refused");
    free(log);
    p.host = "a host with spaces";
    run_there(&run, 1, only_others, &p);
    log = processes_log(&run);
    CHECK_CONTAINS(log, "not reached at a host with spaces:");
    free(log);
}

// Something else has the port: it answers nothing that a rank would, or listens where rank 0
// should.
static void a_taken_port_is_named(void) {
    Error err;
    int other = net_listen("127.0.0.1", 0, &err);
    CHECK(net_listen("127.0.0.1", net_port(other), &err) < 0);
    CHECK_CONTAINS(err.text, "rank 0 cannot listen on 127.0.0.1:");
    CHECK_CONTAINS(err.text, "another process has the port; set MASTER_PORT");
    CHECK(net_listen("192.0.2.77", 0, &err) < 0);
    CHECK_CONTAINS(err.text, "not an address of this machine");
    Place p = {.listener = -1, .port = net_port(other), .ranks = 2, .host = "127.0.0.1"};
    p.seconds = 2;
    Processes run;
    unlink("said");
    processes_start(&run, 1, "said", only_others, &p);
    int file = net_accept(other, wall_seconds() + 5);
    char noise[2000];
    memset(noise, 'H', sizeof(noise));
    net_send(file, noise, sizeof(noise));
    processes_wait(&run);
    char *log = processes_log(&run);
    CHECK_CONTAINS(log, "is not rank 0 of an llm8.c run");
    free(log);
    close(file);
    close(other);
}

static void ranks_may_come_again(void) {
    Place p = place_at("127.0.0.1", 3);
    Processes run;
    run_there(&run, 4, dies_and_comes_again, &p);
    CHECK_EQUAL(run.status[0], 0);
    CHECK_EQUAL(run.status[1], 128 + SIGALRM);
    CHECK_EQUAL(run.status[2], 0);
    CHECK_EQUAL(run.status[3], 0);
}

int main(void) {
    RUN(ranks_meet_and_agree);
    RUN(names_are_heard_everywhere);
    RUN(missing_ranks_are_named);
    RUN(ranks_that_differ_are_refused);
    RUN(strangers_are_ignored);
    RUN(a_wrong_place_is_named);
    RUN(a_taken_port_is_named);
    RUN(ranks_may_come_again);
    return test_summary();
}
