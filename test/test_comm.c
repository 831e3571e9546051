// train/gpu/comm.c, nccl.c and verify_nccl.c, unchanged, over the stand-ins for NCCL and CUDA:
// every collective with several numbers of ranks, what is refused before NCCL joins the ranks, and
// the row of --verify.
#define TEST_OWN_MAIN
#include "../train/gpu/support.h"
#include "comm_checks.h"
#include "processes.h"

static Group *join_as_device(int rank, const Endpoint *p) {
    setenv("STANDIN_DEVICE", text_of("%d", rank), 1);
    return join(p, rank, "");
}

static void open_or_die(Comm *c, Group *g) {
    static Gpu gpu; // the stand-in does at once what is enqueued on its stream, NULL
    or_die(comm_open(c, g, &gpu, COMM_CHECK_SLOTS));
}

static int all_collectives(int rank, void *argument) {
    Group *g = join_as_device(rank, argument);
    Comm c;
    open_or_die(&c, g);
    int wrong = check_collectives(&c);
    comm_close(&c);
    group_close(g);
    return wrong;
}

static char *run_ranks(Processes *run, int ranks, Body *body) {
    Endpoint p = endpoint_at("127.0.0.1", ranks, 20);
    return processes_connect(run, ranks, body, &p);
}

TEST(collectives_are_right) {
    for (int ranks = 1; ranks <= 5; ranks++) {
        Processes run;
        free(run_ranks(&run, ranks, all_collectives));
        for (int r = 0; r < ranks; r++) { CHECK_EQUAL(run.status[r], 0); }
    }
}

// One rank contributes other values: every rank that gets the sum must notice.
static int a_wrong_value(int rank, void *argument) {
    Group *g = join_as_device(rank, argument);
    Comm c;
    open_or_die(&c, g);
    if (rank == 1) { c.rank = 0; } // as if it held rank 0's values
    int wrong = check_all_reduce(&c, COMM_F32, COMM_SUM, 100);
    wrong += check_amax(&c) == 0; // the maximum comes from rank 2 alone
    c.rank = rank;
    comm_close(&c);
    group_close(g);
    return wrong;
}

static int other_calls(int rank, void *argument) {
    Group *g = join_as_device(rank, argument);
    Comm c;
    open_or_die(&c, g);
    return check_all_reduce(&c, COMM_F32, COMM_SUM, rank == 2 ? 100 : 101);
}

TEST(faults_are_seen) {
    Processes run;
    free(run_ranks(&run, 3, a_wrong_value));
    for (int r = 0; r < 3; r++) { CHECK_EQUAL(run.status[r], 2); }
    FREED char *log = run_ranks(&run, 3, other_calls);
    CHECK_CONTAINS(log, "stand-in: AllReduce of 100 here, AllReduce of 101 on rank ");
}

// A variable of the stand-ins, for rank 1 or for all.
static struct {
    const char *name, *value;
    bool all;
} given;

static int opens_with_it(int rank, void *argument) {
    Comm c;
    if (rank == 1 || given.all) { setenv(given.name, given.value, 1); }
    open_or_die(&c, join_as_device(rank, argument));
    return 0;
}

// Asynchronous errors, which no call returns, end the run through the watchdog.
static int with_a_broken_network(int rank, void *argument) {
    Comm c;
    open_or_die(&c, join_as_device(rank, argument));
    if (rank == 0) { text_write("standin-error", ""); }
    pause(); // the watchdog ends the process
    return 0;
}

TEST(what_cannot_work_is_refused) {
    static const struct {
        __typeof__(given) given; // without a name: the network breaks
        const char *expected;
    } rows[] = {
        {{"STANDIN_VERSION", "22700", false},
         "has NCCL 22700, rank 0 has 22809: all ranks need the same"},
        {{"STANDIN_VERSION", "2804", true}, "libnccl.so.2 is version 2.8; 2.10 or newer is needed"},
        {{"STANDIN_BUS", "0000:1b:00.", true}, "ranks 0 and 1 both have GPU 0000:1b:00.0 of "},
        {{0}, "NCCL: remote process exited or there was a network error (NCCL_DEBUG=INFO tells "},
    };
    EACH (row, rows) {
        Processes run;
        given = row->given;
        FREED char *log = run_ranks(&run, 2, given.name ? opens_with_it : with_a_broken_network);
        CHECK_CONTAINS(log, row->expected);
        CHECK_EQUAL(run.status[0], given.name ? EXIT_FAILURE : EXIT_LOST_RANK);
    }
    remove("standin-error");
}

// ---- the row of --verify, where one process has all GPUs ----------------------------------------

static NcclVerdict verdict(int gpus, char text[sizeof(((Error *)NULL)->text)]) {
    return nccl_self_check(gpus, 100001, 100, text, sizeof(((Error *)NULL)->text));
}

TEST(gpus_are_verified) {
    char text[768], expected[64];
    for (int gpus = 2; gpus <= 5; gpus++) {
        CHECK_EQUAL(verdict(gpus, text), NCCL_WELL);
        snprintf(expected, sizeof(expected), "version 2.28.9, %d GPUs: sums exact", gpus);
        CHECK_CONTAINS(text, expected);
        CHECK_CONTAINS(text, "bus bandwidth");
    }
    CHECK_EQUAL(verdict(1, text), NCCL_NOT_TESTED);
    CHECK_CONTAINS(text, "there is one GPU to see");
}

TEST(faults_between_gpus_are_seen) {
    char text[768];
    text_write("standin-wrong", "");
    CHECK_EQUAL(verdict(3, text), NCCL_BAD);
    CHECK_CONTAINS(text, "GPU 1 has ");
    CHECK_CONTAINS(text, " where the sum over 3 GPUs is 3");
    remove("standin-wrong");
    CHECK_EQUAL(verdict(65, text), NCCL_BAD); // more than the stand-in can hold
    CHECK_CONTAINS(text, "ncclCommInitRank: the stand-in failed");
    setenv("STANDIN_VERSION", "2804", 1);
    CHECK_EQUAL(verdict(2, text), NCCL_NOT_TESTED);
    CHECK_CONTAINS(text, "not tested: libnccl.so.2 is version 2.8; 2.10 or newer is needed");
    unsetenv("STANDIN_VERSION");
}

static int verifies_what_hangs(int number, void *argument) {
    (void)number, (void)argument;
    char text[768];
    dup2(STDERR_FILENO, STDOUT_FILENO);
    text_write("standin-hang", "");
    return (int)nccl_self_check(2, 1, 1, text, sizeof(text));
}

TEST(a_hang_is_named) {
    Processes run;
    processes_run(&run, 1, verifies_what_hangs, NULL);
    FREED char *log = processes_log(&run);
    CHECK_EQUAL(run.status[0], EXIT_FAILURE);
    CHECK_CONTAINS(log, "  NCCL between GPUs        BAD  no answer: NCCL hangs here; ");
    remove("standin-hang");
}

// Loads the library from the current folder, in a new process, which has loaded none yet.
static int loads_here(int number, void *argument) {
    (void)number, (void)argument;
    setenv("LD_LIBRARY_PATH", ".", 1);
    execl("/proc/self/exe", "test_comm", "--load", (char *)NULL);
    return 99;
}

TEST(a_missing_library_is_named) {
    Processes run;
    text_write("libnccl.so.2", "not a library");
    processes_run(&run, 1, loads_here, NULL);
    FREED char *log = processes_log(&run);
    CHECK_EQUAL(run.status[0], 1);
    CHECK_CONTAINS(log, "error: several GPUs need NCCL: ");
    CHECK_CONTAINS(log, "LD_LIBRARY_PATH");
    remove("libnccl.so.2");
}

static int load(void) {
    Nccl nccl;
    char text[768];
    CHECK_EQUAL(verdict(2, text), NCCL_NOT_TESTED);
    CHECK_CONTAINS(text, "not tested: several GPUs need NCCL: ");
    if (test_state.failing) { return 98; }
    or_die(nccl_load(&nccl));
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) { return load(); }
    const char *root = getenv("LLM8_ROOT"), *path = getenv("LD_LIBRARY_PATH");
    const char *standin = text_of("%s/build/standin", root != NULL ? root : ".");
    if (path == NULL || strcmp(path, standin) != 0) { // the loader reads it when a program starts
        setenv("LD_LIBRARY_PATH", standin, 1);
        execv("/proc/self/exe", argv);
    }
    return run_tests();
}
