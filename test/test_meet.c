// Ranks as processes that find each other over TCP, and what they agree on then: every address
// family, every way in which the meeting can fail, and who is told what.
#include "processes.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static int join_as_told(int number, void *argument) {
    group_close(join(argument, number, "program x\nlr 0.5\n"));
    return 0;
}

// A connection of what is no rank.
static int connect_to(const char *address, int port) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    inet_pton(AF_INET6, text_of("%s%s", strchr(address, ':') ? "" : "::ffff:", address),
              &six.sin6_addr);
    int file = socket(AF_INET6, SOCK_STREAM, 0);
    if (connect(file, (struct sockaddr *)&six, sizeof(six)) == 0) { return file; }
    close(file);
    return -1;
}

// ---- the calls on a channel ---------------------------------------------------------------------

static int agree_in_turn(int rank, void *argument) {
    const Place *p = argument;
    Group *g = join(p, rank, "");
    Error err = {""};
    int wrong = 0;
    for (int c = CHANNEL_MAIN; c < CHANNELS; c++) {
        Channel channel = (Channel)c;
        int number = rank == 0 ? 42 : -1, all[PROCESSES] = {0}, mine = rank * rank;
        err.text[0] = '\0';
        wrong += !group_agree(g, channel, true, &err) || err.text[0] != '\0';
        group_broadcast(g, channel, &number, sizeof(number));
        wrong += number != 42;
        group_gather(g, channel, &mine, sizeof(mine), all);
        for (int r = 0; rank == 0 && r < p->ranks; r++) { wrong += all[r] != r * r; }
        fail(&err, "reason %d", rank); // ranks 1 and above refuse: the first of them is told of
        wrong += group_agree(g, channel, rank == 0, &err) != (p->ranks == 1);
        wrong += p->ranks > 1 && strcmp(err.text, "rank 1: reason 1") != 0;
        wrong += group_agree(g, channel, rank != 0, &err);
    }
    // rank 0 sends on both channels before the others read: each finds its own
    enum { LARGE = 1 << 20 };
    FREED char *large = malloc_or_die(LARGE);
    for (int i = 0; i < 2; i++) {
        Channel channel = (i == 0) == (rank == 0) ? CHANNEL_MAIN : CHANNEL_SAVE;
        char expected = channel == CHANNEL_MAIN ? 'x' : 'z';
        memset(large, rank == 0 ? expected : 'y', LARGE);
        group_broadcast(g, channel, large, LARGE);
        wrong += large[0] != expected || large[LARGE - 1] != expected;
    }
    group_close(g);
    return wrong;
}

TEST(ranks_meet_and_agree) {
    static const char *const hosts[] = {"127.0.0.1", "::1", "localhost", "127.0.0.7",
                                        "::ffff:127.0.0.1"};
    static const int counts[] = {1, 2, 3, 8};
    for (int h = 0; h < 5; h++) {
        for (int i = 0; i < 4; i++) {
            Place p = place_at(hosts[h], counts[i], 10);
            Processes run;
            free(processes_meet(&run, counts[i], agree_in_turn, &p));
            for (int r = 0; r < counts[i]; r++) { CHECK_EQUAL(run.status[r], 0); }
        }
    }
}

// A name that is no address is listened for on all of them, so that others may know it by another.
TEST(names_are_heard_everywhere) {
    char name[64];
    gethostname(name, sizeof(name));
    Error err;
    int port = 0, listener = group_listen(name, &port, &err);
    CHECK(listener >= 0);
    static const char *const ways[] = {"127.0.0.1", "127.0.0.9", "::1"};
    for (int i = 0; i < 3; i++) {
        int file = connect_to(ways[i], port);
        CHECK(file >= 0);
        close(file);
    }
    close(listener);
    port = 0;
    listener = group_listen("127.0.0.9", &port, &err);
    CHECK(connect_to("127.0.0.1", port) < 0);
    close(listener);
}

// ---- meetings
// ------------------------------------------------------------------------------------

static int at_another_place(int rank, void *argument) {
    Group *g = join(argument, rank, "");
    int value = 0, all[2];
    if (rank == 1) { group_gather(g, CHANNEL_MAIN, &value, sizeof(value), all); }
    group_agree(g, CHANNEL_MAIN, true, NULL);
    return 0;
}

static int differing(int rank, void *argument) {
    join(argument, rank, rank == 1 ? "program x\nlr 0.25\n" : "program x\nlr 0.5\n");
    return 0;
}

static int of_another_size(int rank, void *argument) {
    Place p = *(const Place *)argument;
    if (rank == 1) { p.ranks = 5; }
    return join_as_told(rank, &p);
}

// What a port scanner or a browser sends, or nothing.
static int strangers(int number, void *argument) {
    const Place *p = argument;
    if (number < 2) { return join_as_told(number, argument); }
    int file = connect_to(p->host, p->port);
    char noise[2000];
    memset(noise, 'G', sizeof(noise));
    if (number == 2) { send(file, noise, sizeof(noise), MSG_NOSIGNAL); }
    close(file);
    return 0;
}

// Rank 1 comes, and dies while rank 2 is awaited; another process comes in its place.
static int dies_and_comes_again(int number, void *argument) {
    if (number == 1) { ualarm(200000, 0); }
    if (number >= 2) { usleep(300000 * (unsigned)(number - 1)); }
    return join_as_told(number, argument);
}

enum { ANY = -1, TOLD = 3 };

// numbers, status: of each process, its rank and how it ends, in parentheses; then what is said.
#define LIST(...) \
    { __VA_ARGS__ }
#define MEETING(body, ranks, seconds, numbers, status, ...)                              \
    {                                                                                    \
        body, ranks, seconds, COUNT(((int[])LIST numbers)), LIST numbers, LIST status, { \
            __VA_ARGS__                                                                  \
        }                                                                                \
    }
static const struct {
    Body *body;
    int ranks;
    double seconds;
    int processes, numbers[4], status[4];
    const char *says[TOLD];
} meetings[] = {
    MEETING(join_as_told, 8, 0.4, (0, 1, 4), (1, 1, 1),
            "rank 0: error: ranks 2, 3, 5, 6, 7 of 8 did not come to 127.0.0.1 port ",
            "rank 1: error: ranks 2, 3, 5, 6, 7 of 8 did not come to 127.0.0.1 port ",
            "rank 4: error: ranks 2, 3, 5, 6, 7 of 8 did not come to 127.0.0.1 port "),
    MEETING(join_as_told, 4096, 0.1, (0), (1),
            "rank 0: error: ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ", ", ... of 4096 did not come"),
    MEETING(at_another_place, 2, 10, (0, 1), (1, EXIT_LOST_RANK),
            "rank 1 is at another place in the program: it sent 4 bytes where "),
    MEETING(differing, 3, 3, (0, 1, 2), (1, 1, ANY), "rank 0: error: ", "rank 1: error: ",
            "runs something else: 'lr 0.25', where rank 0 has 'lr 0.5'; all ranks"),
    MEETING(of_another_size, 3, 3, (0, 1, 2), (1, 1, ANY), "rank 0: error: ", "rank 1: error: ",
            "was started as one of 5 ranks, rank 0 as one of 3"),
    MEETING(join_as_told, 3, 3, (0, 1, 1), (1, 1, ANY), "rank 0: error: ", "rank 1: error: ",
            "two processes say that they are rank 1: one on "),
    MEETING(strangers, 2, 10, (0, 1, 2, 3), (0, 0, 0, 0), NULL),
    MEETING(dies_and_comes_again, 3, 10, (0, 1, 1, 2), (0, 128 + SIGALRM, 0, 0), NULL),
};

TEST(meetings_end_as_they_should) {
    EACH (m, meetings) {
        Place p = place_at("127.0.0.1", m->ranks, m->seconds);
        Processes run;
        double begin = wall_seconds();
        p.numbers = m->numbers;
        FREED char *log = processes_meet(&run, m->processes, m->body, &p);
        for (int i = 0; i < m->processes; i++) {
            CHECK(m->status[i] == ANY || m->status[i] == run.status[i]);
        }
        for (int i = 0; i < TOLD && m->says[i] != NULL; i++) { CHECK_CONTAINS(log, m->says[i]); }
        bool late = m->seconds < 1; // the others end at once, and not by the time limit
        CHECK_EQUAL(strstr(log, text_of("port %d within 0 s", p.port)) != NULL, late);
        CHECK_EQUAL(strstr(log, "did not come") != NULL, late);
        CHECK(wall_seconds() - begin < 5);
    }
}

// Connections that say nothing, as many as there are, hold up no rank and hide none that is
// missing.
TEST(silent_strangers_hold_up_nobody) {
    enum { SILENT = 100 };
    for (int present = 2; present <= 3; present++) {
        Place p = place_at("127.0.0.1", 3, 2);
        Processes run;
        int files[SILENT];
        double begin = wall_seconds();
        for (int i = 0; i < SILENT; i++) { files[i] = connect_to(p.host, p.port); }
        FREED char *log = processes_meet(&run, present, join_as_told, &p);
        CHECK(wall_seconds() - begin < 4);
        for (int r = 0; r < present; r++) { CHECK_EQUAL(run.status[r], present == 3 ? 0 : 1); }
        if (present == 2) {
            CHECK_CONTAINS(log, "rank 0: error: rank 2 of 3 did not come to 127.0.0.1 port ");
            CHECK_CONTAINS(log, "rank 1: error: rank 2 of 3 did not come to 127.0.0.1 port ");
        }
        for (int i = 0; i < SILENT; i++) { close(files[i]); }
    }
}

TEST(a_wrong_place_is_named) {
    static const int only_one[] = {1};
    Processes run;
    Place p = place_at("127.0.0.1", 2, 0.3);
    close(p.listener); // nobody listens any more
    p.listener = -1;
    p.numbers = only_one;
    FREED char *log = processes_meet(&run, 1, join_as_told, &p);
    CHECK_EQUAL(run.status[0], 1);
    CHECK_CONTAINS(
        log,
        text_of("rank 1: error: rank 0 was not reached at 127.0.0.1 port %d within 0 s", p.port));
    CHECK_CONTAINS(log, "Connection refused");
    free(log);
    p.host = "a host with spaces";
    log = processes_meet(&run, 1, join_as_told, &p);
    CHECK_CONTAINS(log, "not reached at a host with spaces port ");
}

// Something else has the port: it answers nothing that a rank would, or listens where rank 0
// should.
TEST(a_taken_port_is_named) {
    static const int only_one[] = {1};
    Error err;
    int port = 0, none = 0, other = group_listen("127.0.0.1", &port, &err);
    CHECK(group_listen("127.0.0.1", &port, &err) < 0);
    CHECK_CONTAINS(err.text, "rank 0 cannot listen on 127.0.0.1 port ");
    CHECK_CONTAINS(err.text, "another process has the port; set MASTER_PORT");
    CHECK(group_listen("192.0.2.77", &none, &err) < 0);
    CHECK_CONTAINS(err.text, "not an address of this machine");
    Place p = {.listener = -1, .port = port, .ranks = 2, .host = "127.0.0.1", .seconds = 2};
    p.numbers = only_one;
    Processes run;
    unlink("said");
    processes_start(&run, 1, "said", join_as_told, &p);
    int file = accept(other, NULL, NULL);
    char noise[2000];
    memset(noise, 'H', sizeof(noise));
    send(file, noise, sizeof(noise), MSG_NOSIGNAL);
    processes_wait(&run);
    char *log = processes_log(&run);
    CHECK_CONTAINS(log, "is not rank 0 of an llm8.c run");
    free(log);
    close(file);
    close(other);
}
