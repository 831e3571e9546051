// Ranks are processes that find each other over TCP and then agree on things. Tests every address
// family, every way in which this rendezvous can fail, and which rank gets which message.
#include "../base/rng.h"
#include "processes.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static int join_as_told(int number, void *argument) {
    group_close(join(argument, number, "program x\nlr 0.5\n"));
    return 0;
}

// Opens a connection that is not a rank's.
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

// Returns how many results are wrong.
static int make_calls(const Group *g) {
    int wrong = 0, rank = g->rank;
    for (int c = CHANNEL_MAIN; c < CHANNELS; c++) {
        Channel channel = (Channel)c;
        int number = rank == 0 ? 42 : -1, all[PROCESSES] = {0}, mine = rank * rank;
        fail("%s", "");
        wrong += !group_agree(g, channel, true) || error_text()[0] != '\0';
        group_broadcast(g, channel, &number, sizeof(number));
        wrong += number != 42;
        group_gather(g, channel, &mine, sizeof(mine), all);
        for (int r = 0; rank == 0 && r < g->ranks; r++) { wrong += all[r] != r * r; }
        fail("reason %d", rank); // all ranks except 0 refuse: the reason of the first is reported
        wrong += group_agree(g, channel, rank == 0) != (g->ranks == 1);
        wrong += g->ranks > 1 && strcmp(error_text(), "rank 1: reason 1") != 0;
        wrong += group_agree(g, channel, rank != 0);
    }
    // rank 0 sends on both channels before the others read: all must reach its channel
    enum { LARGE = 1 << 12 };
    FREED char *large = malloc_or_die(LARGE);
    for (int i = 0; i < 2; i++) {
        Channel channel = (i == 0) == (rank == 0) ? CHANNEL_MAIN : CHANNEL_SAVE;
        char expected = channel == CHANNEL_MAIN ? 'x' : 'z';
        memset(large, rank == 0 ? expected : 'y', LARGE);
        group_broadcast(g, channel, large, LARGE);
        wrong += large[0] != expected || large[LARGE - 1] != expected;
    }
    return wrong;
}

static int agree_in_turn(int rank, void *argument) {
    Group *g = join(argument, rank, "");
    int wrong = make_calls(g);
    group_close(g);
    return wrong;
}

TEST(ranks_connect_and_agree) {
    static const char *const hosts[] = {"127.0.0.1", "::1", "localhost", "127.0.0.7",
                                        "::ffff:127.0.0.1"};
    static const int counts[] = {1, 2, 3, 8};
    for (int h = 0; h < 5; h++) {
        for (int i = 0; i < 4; i++) {
            Endpoint p = endpoint_at(hosts[h], counts[i], 10);
            Processes run;
            free(processes_connect(&run, counts[i], agree_in_turn, &p));
            for (int r = 0; r < counts[i]; r++) { CHECK_EQUAL(run.status[r], 0); }
        }
    }
}

// Rank 0 listens on a loopback address alone, and else on all addresses.
TEST(loopback_addresses_are_listened_on_alone) {
    static const struct {
        const char *name;
        int heard;
    } rows[] = {{"127.0.0.9", 1}, {"::1", 1}, {"127.0.0.1", 1}, {"a name that nobody knows", 3}};
    static const char *const ways[] = {"127.0.0.1", "127.0.0.9", "::1"};
    EACH (row, rows) {
        fail("%s", "");
        int port = 0, heard = 0, listener = group_listen(row->name, &port);
        CHECK_TEXT(error_text(), "");
        for (int i = 0; i < 3; i++) {
            int file = connect_to(ways[i], port);
            heard += file >= 0;
            if (file >= 0) { close(file); }
        }
        CHECK_EQUAL(heard, row->heard);
        close(listener);
    }
}

// ---- each rendezvous, and how it ends -----------------------------------------------------------

static int at_another_call(int rank, void *argument) {
    Group *g = join(argument, rank, "");
    int value = 0, all[2];
    if (rank == 1) { group_gather(g, CHANNEL_MAIN, &value, sizeof(value), all); }
    group_agree(g, CHANNEL_MAIN, true);
    return 0;
}

static int differing(int rank, void *argument) {
    join(argument, rank, rank == 1 ? "program x\nlr 0.25\n" : "program x\nlr 0.5\n");
    return 0;
}

static int of_another_size(int rank, void *argument) {
    Endpoint p = *(const Endpoint *)argument;
    if (rank == 1) { p.ranks = 5; }
    return join_as_told(rank, &p);
}

static int with_another_token(int rank, void *argument) {
    Endpoint p = *(const Endpoint *)argument;
    p.token = rank == 0 ? "JOB=7 secret" : "JOB=7 other";
    return join_as_told(rank, &p);
}

// Sends what a port scanner or a browser sends, in one piece or with a pause in a header; or
// nothing.
static int strangers(int number, void *argument) {
    const Endpoint *p = argument;
    if (number == 1) { usleep(200000); }
    if (number < 2) { return join_as_told(number, argument); }
    int file = connect_to(p->host, p->port);
    char noise[2000];
    memset(noise, 'G', sizeof(noise));
    if (number == 4) {
        send(file, noise, 6, MSG_NOSIGNAL);
        usleep(50000);
    }
    if (number != 3) { send(file, noise, sizeof(noise), MSG_NOSIGNAL); }
    close(file);
    return 0;
}

// Rank 1 connects, and dies while rank 0 waits for rank 2; another process connects as rank 1.
static int dies_and_comes_again(int number, void *argument) {
    if (number == 1) { ualarm(200000, 0); }
    if (number >= 2) { usleep(300000 * (unsigned)(number - 1)); }
    return join_as_told(number, argument);
}

// Another program listens in rank 0's place, and answers what no rank would answer.
static int noise_answers(int number, void *argument) {
    const Endpoint *p = argument;
    char noise[2000];
    memset(noise, 'H', sizeof(noise));
    for (int i = 0; number == 0 && i < 3; i++) {
        send(accept(p->listener, NULL, NULL), noise, sizeof(noise), MSG_NOSIGNAL);
    }
    return number == 0 ? 0 : join_as_told(number, argument);
}

enum { ANY = -1, TOLD = 3 };
typedef enum { LISTENS, TAKEN, NOBODY, DOOR } Port; // who has it: rank 0, another program

// numbers, status: the rank and the exit status of each process, in parentheses; then the messages.
#define LIST(...) \
    { __VA_ARGS__ }
#define CASE(body, ranks, seconds, numbers, status, ...)                               \
    {                                                                                  \
        body, ranks, seconds, COUNT(((int[])LIST numbers)), LIST numbers, LIST status, \
            {__VA_ARGS__}, LISTENS, NULL                                               \
    }
// One of two ranks, which comes alone. DOOR: rank 0 may be elsewhere.
#define ALONE(rank, port, host, seconds, ...) \
    { join_as_told, 2, seconds, 1, {rank}, {EXIT_FAILURE}, {__VA_ARGS__}, port, host, }
static const struct {
    Body *body;
    int ranks;
    double seconds;
    int processes, numbers[5], status[5];
    const char *says[TOLD]; // %d: the port
    Port port;
    const char *host; // NULL: 127.0.0.1
} cases[] = {
    CASE(join_as_told, 8, 0.4, (0, 1, 4), (1, 1, 1),
         "rank 0: error: ranks 2, 3, 5, 6, 7 of 8 did not connect to 127.0.0.1 port %d within 0",
         "rank 1: error: ranks 2, 3, 5, 6, 7 of 8 did not connect to 127.0.0.1 port %d within 0",
         "rank 4: error: ranks 2, 3, 5, 6, 7 of 8 did not connect to 127.0.0.1 port %d within "),
    CASE(join_as_told, 4096, 0.1, (0), (1), "rank 0: error: ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ",
         ", ... of 4096 did not connect"),
    CASE(at_another_call, 2, 10, (0, 1), (1, EXIT_LOST_RANK),
         "rank 1 is at another point of the program: it sent 4 bytes instead of "),
    CASE(differing, 3, 3, (0, 1, 2), (1, 1, ANY), "rank 0: error: ", "rank 1: error: ",
         "runs something else: 'lr 0.25', where rank 0 has 'lr 0.5'; all ranks"),
    CASE(of_another_size, 3, 3, (0, 1, 2), (1, 1, ANY),
         "rank 0: error: ", "rank 1: error: ", "was started as one of 5 ranks, rank 0 as one of 3"),
    CASE(join_as_told, 3, 3, (0, 1, 1), (1, 1, ANY),
         "rank 0: error: ", "rank 1: error: ", "two processes say that they are rank 1: one on "),
    CASE(with_another_token, 2, 0.4, (0, 1), (1, 1),
         "rank 0: error: rank 1 of 2 did not connect to 127.0.0.1 port %d within 0 s",
         "rank 1: error: rank 0 was not reached at ", "rank 0: warning: rank 1 on "),
    CASE(noise_answers, 2, 2, (0, 1), (0, 1), "is not rank 0 of an llm8.c run"),
    CASE(strangers, 2, 10, (0, 1, 2, 3, 4), (0, 0, 0, 0, 0), NULL),
    CASE(dies_and_comes_again, 3, 10, (0, 1, 1, 2), (0, 128 + SIGALRM, 0, 0), NULL),
    ALONE(1, NOBODY, NULL, 0.3,
          "rank 1: error: rank 0 was not reached at 127.0.0.1 port %d within 0 s",
          "Connection refused"),
    ALONE(1, NOBODY, "a host with spaces", 0.3, "not reached at a host with spaces port %d",
          "MASTER_ADDR"),
    ALONE(1, DOOR, NULL, 0.3,
          "rank 1: error: rank 0 was not reached at 127.0.0.1 port %d within 0 s "
          "(--distributed-timeout): it has not yet come there to say where it listens"),
    ALONE(0, DOOR, "a host with spaces", 0.3,
          "rank 0: error: rank 1 of 2 did not connect to a host with spaces port %d (rank 0 "
          "reaches no other rank there: ",
          " within 0 s (--distributed-timeout)"),
    // a kept port is not waited for to the end
    ALONE(0, TAKEN, NULL, 30, "rank 0 cannot listen on port %d",
          "another process has the port; set MASTER_PORT"),
};

// All at the same time. A port that another program has is waited for 10 seconds, by the last.
TEST(each_rendezvous_ends_as_expected) {
    static struct {
        Endpoint endpoint;
        Processes run;
        int listener;
    } all[COUNT(cases)];
    double begin = wall_seconds();
    EACH (m, cases) {
        int i = (int)(m - cases);
        Endpoint p = endpoint_at("127.0.0.1", m->ranks, m->seconds);
        all[i].listener = p.listener;
        if (m->port != LISTENS) { p.listener = -1; }
        if (m->port > TAKEN) { close(all[i].listener); }
        if (m->host != NULL) { p.host = m->host; }
        p.elsewhere = m->port == DOOR;
        p.numbers = m->numbers;
        all[i].endpoint = p;
        processes_start(&all[i].run, m->processes, text_of("said.%d", i), m->body,
                        &all[i].endpoint);
        if (m->port == LISTENS) { close(all[i].listener); }
    }
    EACH (m, cases) {
        int i = (int)(m - cases);
        Processes *run = &all[i].run;
        processes_wait(run);
        FREED char *log = processes_log(run);
        CHECK(wall_seconds() - begin < (m->port == TAKEN ? 20 : 5));
        for (int n = 0; n < m->processes; n++) {
            CHECK(m->status[n] == ANY || m->status[n] == run->status[n]);
        }
        for (int n = 0; n < TOLD && m->says[n] != NULL; n++) {
            CHECK_CONTAINS(log, text_of(m->says[n], all[i].endpoint.port));
        }
        bool late = m->seconds < 1; // the other cases end at once, before the time limit
        CHECK_EQUAL(strstr(log, " within 0 s") != NULL, late);
        CHECK(late || strstr(log, "did not connect") == NULL);
        if (m->port == TAKEN) { close(all[i].listener); }
    }
}

// A silent connection delays the others for a short time only, and does not take the place of a
// missing rank.
TEST(silent_strangers_hold_up_nobody) {
    enum { SILENT = 3 };
    static Endpoint endpoints[2];
    static Processes runs[2];
    int files[2][SILENT];
    double begin = wall_seconds();
    for (int i = 0; i < 2; i++) {
        endpoints[i] = endpoint_at("127.0.0.1", 3, 3);
        for (int n = 0; n < SILENT; n++) {
            files[i][n] = connect_to(endpoints[i].host, endpoints[i].port);
        }
        processes_start(&runs[i], 2 + i, text_of("said.%d", i), join_as_told, &endpoints[i]);
        close(endpoints[i].listener);
    }
    for (int i = 0; i < 2; i++) {
        bool all_came = i == 1;
        processes_wait(&runs[i]);
        FREED char *log = processes_log(&runs[i]);
        for (int r = 0; r < runs[i].count; r++) { CHECK_EQUAL(runs[i].status[r], !all_came); }
        for (int r = 0; r < 2 && !all_came; r++) {
            CHECK_CONTAINS(log, text_of("rank %d: error: rank 2 of 3 did not connect to 127.0.0.1 "
                                        "port ",
                                        r));
        }
        for (int n = 0; n < SILENT; n++) { close(files[i][n]); }
    }
    CHECK(wall_seconds() - begin < 6);
}

// Where several processes come to one port, one after another: with a letter for the run and a
// digit for the rank, "a0 b1".
static const char *comers;

static int come(int number, void *argument) {
    Endpoint p = *(const Endpoint *)argument;
    char run[] = {comers[3 * number], '\0'}, heard = run[0];
    int rank = comers[3 * number + 1] - '0', numbers[PROCESSES];
    numbers[number] = rank;
    p.numbers = numbers;
    p.token = run;
    usleep(200000 * (unsigned)number);
    Group *g = join(&p, number, "");
    group_broadcast(g, CHANNEL_MAIN, &heard, sizeof(heard));
    int wrong = make_calls(g);
    group_close(g);
    return wrong + (heard != run[0]);
}

enum { ORDERS = 4 };

static void all_connect(const char *const orders[ORDERS], int ranks, bool elsewhere) {
    static Endpoint endpoints[ORDERS];
    static Processes runs[ORDERS];
    for (int i = 0; i < ORDERS; i++) {
        int count = (int)(strlen(orders[i]) + 1) / 3;
        endpoints[i] = endpoint_at("127.0.0.1", ranks, 8);
        close(endpoints[i].listener);
        endpoints[i].listener = -1;
        endpoints[i].elsewhere = elsewhere;
        comers = orders[i]; // each run has what it was at its start
        processes_start(&runs[i], count, text_of("said.%d", i), come, &endpoints[i]);
    }
    for (int i = 0; i < ORDERS; i++) {
        processes_wait(&runs[i]);
        FREED char *log = processes_log(&runs[i]);
        for (int n = 0; n < runs[i].count; n++) {
            if (runs[i].status[n] != 0) { test_fail(__FILE__, __LINE__, "%s: %s", orders[i], log); }
        }
    }
}

// Two runs of equal options at one port: no rank takes part in the other run, and all ranks of both
// connect.
TEST(two_runs_share_one_port) {
    static const char *const orders[ORDERS] = {"a0 b1 b0 a1", "a0 b0 b1 a1", "b1 a1 a0 b0",
                                               "a0 b0 a1 b1"};
    all_connect(orders, 2, false);
}

// A rank that comes before rank 0 has the port, so rank 0 listens on another one.
TEST(a_redirector_sends_ranks_to_rank_0) {
    static const char *const orders[ORDERS] = {"a1 a0 a2", "a1 a2 a0", "a2 a0 a1", "a0 a1 a2"};
    all_connect(orders, 3, true);
}

// ---- messages -----------------------------------------------------------------------------------

// A rank sends random bytes on one of its connections.
typedef struct {
    int number, sender;
    Endpoint endpoint;
    Processes run;
} Junk;

// Finds a connection of a group of two ranks: those of this process that use the port, in order.
static int connection_at(int port, int number) {
    struct sockaddr_in ends[2];
    for (int file = 3; file < 256; file++) {
        socklen_t length = sizeof(ends[0]);
        bool ours = getsockname(file, (struct sockaddr *)&ends[0], &length) == 0 &&
                    getpeername(file, (struct sockaddr *)&ends[1], &length) == 0 &&
                    (ntohs(ends[0].sin_port) == port || ntohs(ends[1].sin_port) == port);
        if (ours && number-- == 0) { return file; }
    }
    die("no connection");
}

static int take_junk(int rank, void *argument) {
    const Junk *j = argument;
    Group *g = join(&j->endpoint, rank, "");
    alarm(20); // should nothing end it
    if (rank == j->sender) {
        unsigned char junk[8192];
        int file = connection_at(j->endpoint.port, j->number % 3);
        for (uint64_t i = 0; i < sizeof(junk); i++) {
            junk[i] = (unsigned char)rng_bits((uint64_t)j->number, i);
        }
        send(file, junk, sizeof(junk) - (size_t)(37 * j->number), MSG_NOSIGNAL);
        usleep(400000);
        _exit(0);
    }
    group_agree(g, CHANNEL_MAIN, true);
    usleep(200000);
    group_close(g);
    return 0;
}

TEST(junk_of_a_rank_harms_nobody) {
    static Junk all[24];
    EACH (j, all) {
        j->number = (int)(j - all);
        j->sender = j->number / 3 % 2;
        j->endpoint = endpoint_at("127.0.0.1", 2, 4);
        processes_start(&j->run, 2, text_of("said.%d", j->number), take_junk, j);
        close(j->endpoint.listener);
    }
    EACH (j, all) {
        processes_wait(&j->run);
        FREED char *log = processes_log(&j->run);
        int status = j->run.status[1 - j->sender];
        bool crashed = status >= 128 || strstr(log, "Sanitizer") || strstr(log, "runtime error");
        bool told = status == 0 || strstr(log, "error: ") != NULL;
        if (crashed || !told) {
            test_fail(__FILE__, __LINE__, "junk %d: status %d: %.2000s", j->number, status, log);
        }
    }
}
