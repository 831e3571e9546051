#include "launch.h"
#include "../base/host.h"
#include "../base/io.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

// ---- who this process is ------------------------------------------------------------------------

enum {
    NUMBERS = 3,
    DEFAULT_PORT = 29500,
    // How far the ranks' port is above torchrun's. The distance is even, because Linux prefers
    // ports of the other parity for outgoing connections, so one of these may be in use.
    PAST_AGENT = 2,
};

// The names of the variables that a launcher sets. NULL: it sets no such variable.
typedef struct {
    const char *name, *rank, *ranks, *local_rank, *local_ranks;
    // the launcher is recognised by this variable; if NULL, by the variable `rank` or `ranks`
    const char *sign;
    const char *tasks, *hosts; // lists: the number of tasks on each node, and the nodes' names
    // variables that identify the run: the same on all its ranks, but not in another run
    const char *run[NUMBERS];
} Launcher;

// ranks_read takes the first of these launchers that has set its variables.
static const Launcher launchers[] = {
    {.name = "WORLD_SIZE", // torchrun sets these variables; a user may set them by hand
     .rank = "RANK",
     .ranks = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .local_ranks = "LOCAL_WORLD_SIZE",
     .run = {"TORCHELASTIC_RUN_ID"}},
    {.name = "Open MPI",
     .rank = "OMPI_COMM_WORLD_RANK",
     .ranks = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_ranks = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .run = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {.name = "MPICH",           // also Intel MPI
     .sign = "MPI_LOCALRANKID", // srun sets PMI_RANK, too
     .rank = "PMI_RANK",
     .ranks = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .local_ranks = "MPI_LOCALNRANKS"},
    {.name = "Slurm",
     .sign = "SLURM_STEP_NUM_TASKS", // outside srun, a batch script has SLURM_PROCID too
     .rank = "SLURM_PROCID",
     .ranks = "SLURM_STEP_NUM_TASKS",
     .local_rank = "SLURM_LOCALID",
     .tasks = "SLURM_STEP_TASKS_PER_NODE",
     .hosts = "SLURM_STEP_NODELIST",
     .run = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
    {.name = "PMI", // Cray's PALS
     .rank = "PMI_RANK",
     .ranks = "PMI_SIZE",
     .local_rank = "PMI_LOCAL_RANK",
     .local_ranks = "PMI_LOCAL_SIZE"},
};
enum { LAUNCHERS = sizeof(launchers) / sizeof(launchers[0]) };

// Returns a variable's value, or NULL if the variable is not set or is empty.
static const char *variable(const char *name) {
    const char *value = name != NULL ? getenv(name) : NULL;
    return value != NULL && *value != '\0' ? value : NULL;
}

// Reads a variable into *value, which does not change if the variable is not set.
static bool read_int(const char *name, int min, int max, int *value) {
    const char *text = variable(name);
    char *end;
    if (text == NULL) { return true; }
    errno = 0;
    long number = strtol(text, &end, 10);
    if (*end != '\0' || errno != 0 || number < min || number > max) {
        return fail("%s=%s: must be a whole number from %d to %d", name, text, min, max);
    }
    *value = (int)number;
    return true;
}

static bool read_rank(Ranks *r, const Launcher *l) {
    int rank = -1, local = -1;
    const char *tasks = variable(l->tasks); // as "8(x2),4"; the first number is used
    bool counted = variable(l->ranks) != NULL;
    if (!read_int(l->ranks, 1, RANKS_MAX, &r->group.ranks)) { return false; }
    int ranks = r->group.ranks, most = counted ? ranks : RANKS_MAX;
    if (variable(l->rank) == NULL && ranks == 1 && counted) { return true; }
    int local_ranks = tasks != NULL ? (int)min64(most, max64(0, atoi(tasks))) : 0;
    if (!read_int(l->rank, 0, most - 1, &rank) ||
        !read_int(l->local_ranks, 1, most, &local_ranks) ||
        !read_int(l->local_rank, 0, most - 1, &local)) {
        return false;
    }
    if (ranks == 1) { local = 0; }
    *r = (Ranks){{rank, ranks, local, local_ranks, NULL}, .source = l->name};
    return (counted && rank >= 0 && local >= 0) ||
           fail("%s, %s and %s say which of how many ranks this is, and which GPU of its "
                "machine it takes: set all three",
                l->rank, l->ranks, l->local_rank);
}

// Sets host to the first name in Slurm's list of hosts: for "node[03-05,9]-ib,other" to node03-ib.
static void take_first(char host[256], const char *list) {
    size_t prefix = strcspn(list, ",[");
    bool bracket = list[prefix] == '[';
    const char *number = list + prefix + bracket, *close = strchr(number, ']');
    const char *rest = bracket && close != NULL ? close + 1 : "";
    snprintf(host, 256, "%.*s%.*s%.*s", (int)prefix, list,
             bracket ? (int)strcspn(number, "-,]") : 0, number, (int)strcspn(rest, ","), rest);
}

// Reads where several ranks connect, and their token. The token has the variables l->run and then
// the secret, as "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SECRET". l is NULL if --gpus starts the ranks.
static bool read_rendezvous(Ranks *r, const Launcher *l) {
    const char *host = variable("MASTER_ADDR"), *secret = variable("LLM8_SECRET");
    const char *hosts = l != NULL ? variable(l->hosts) : NULL;
    Rendezvous *m = &r->rendezvous;
    size_t used = 0, room = sizeof(m->token);
    for (int i = 0; l != NULL && i < NUMBERS; i++) {
        const char *value = variable(l->run[i]);
        if (value == NULL || used >= room) { continue; }
        used += (size_t)snprintf(m->token + used, room - used, "%s=%s ", l->run[i], value);
    }
    m->port = DEFAULT_PORT;
    if (used > 0) { // so that two runs on one machine use different ports
        uint32_t sum = (uint32_t)crc32_z(0, (const Bytef *)m->token, strlen(m->token));
        m->port = 20000 + (int)(sum % 10000);
    }
    if (secret != NULL && used < room) { snprintf(m->token + used, room - used, "%s", secret); }
    if (!read_int("MASTER_PORT", 1, 65535, &m->port)) { return false; }
    const char *agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    if (agent != NULL && strcmp(agent, "True") == 0) {
        // torchrun itself listens on this port, on the machine of its rendezvous
        m->elsewhere = true;
        m->port += m->port + PAST_AGENT <= 65535 ? PAST_AGENT : -PAST_AGENT;
    }
    if (host != NULL && strlen(host) >= sizeof(m->host)) {
        return fail("MASTER_ADDR: longer than %zu characters", sizeof(m->host) - 1);
    }
    if (host == NULL && r->group.local_ranks == r->group.ranks) { host = "127.0.0.1"; }
    if (host != NULL) { // an IPv6 address may be in brackets
        int end = (int)strlen(host), bracket = *host == '[' && host[end - 1] == ']';
        snprintf(m->host, sizeof(m->host), "%.*s", end - 2 * bracket, host + bracket);
        return true;
    }
    if (hosts == NULL) {
        return fail("MASTER_ADDR is not set: %d ranks need to know the host of rank 0",
                    r->group.ranks);
    }
    take_first(m->host, hosts);
    return true;
}

// For --gpus: this process starts the ranks of its machine.
static bool read_nodes(Ranks *r, int gpus) {
    int nodes = 1, node = 0;
    if (!read_int("NNODES", 1, RANKS_MAX, &nodes)) { return false; }
    if (nodes > 1 && !read_int("NODE_RANK", 0, nodes - 1, &node)) { return false; }
    if (nodes > 1 && (variable("NODE_RANK") == NULL || variable("MASTER_ADDR") == NULL ||
                      variable("MASTER_PORT") == NULL)) {
        return fail("NNODES=%d also needs NODE_RANK, MASTER_ADDR and MASTER_PORT", nodes);
    }
    if ((int64_t)nodes * gpus > RANKS_MAX) {
        return fail("NNODES=%d and --gpus %d: more than %d ranks", nodes, gpus, RANKS_MAX);
    }
    *r = (Ranks){.group = {.rank = node * gpus, .ranks = nodes * gpus, .local_ranks = gpus},
                 .rendezvous = {.host = "127.0.0.1"},
                 .source = "--gpus",
                 .starts = nodes * gpus > 1};
    return nodes == 1 || read_rendezvous(r, NULL);
}

bool ranks_read(Ranks *r, const Options *options) {
    *r = (Ranks){.group = {.ranks = 1, .local_ranks = 1}, .source = "one process"};
    const Launcher *l = NULL;
    for (int i = 0; i < LAUNCHERS && l == NULL; i++) {
        const Launcher *one = &launchers[i];
        bool set = one->sign != NULL ? variable(one->sign) != NULL
                                     : variable(one->rank) != NULL || variable(one->ranks) != NULL;
        if (set) { l = one; }
    }
    if (l != NULL && !read_rank(r, l)) { return false; }
    // --gpus in a --config file may be from an earlier run
    bool typed = option_source(options, "gpus") == SOURCE_COMMAND;
    int gpus = l == NULL || typed ? options->gpus : 1;
    if (r->group.ranks == 1) { return read_nodes(r, gpus); }
    if (gpus > 1 && gpus != r->group.local_ranks) {
        return fail("--gpus %d, but %d ranks are started already (%s=%s): leave --gpus out, or "
                    "start one process",
                    gpus, r->group.ranks, l->ranks, variable(l->ranks));
    }
    return read_rendezvous(r, l);
}

bool ranks_device(const Group *g, int visible, int *device) {
    *device = visible == 1 ? 0 : g->local_rank;
    return *device < visible ||
           fail("rank %d is number %d on its machine, which has GPUs 0 to %d: start no more "
                "ranks than GPUs",
                g->rank, g->local_rank, visible - 1);
}

// ---- signals ------------------------------------------------------------------------------------

const int stop_signals[STOP_SIGNALS] = {SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP, SIGXCPU};

// A write to a pipe without a reader, or beyond the limit of file sizes, must only return an error.
static void ignore_write_signals(void) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

// ---- the launcher -------------------------------------------------------------------------------

// Waits for the ranks, and exits with the status of the first rank that failed. A rank that fails
// with EXIT_LOST_RANK counts only if no rank fails in another way. If none fails, exits with the
// status of the first rank, ids[0].
__attribute__((noreturn)) static void await_ranks(const Ranks *r, pid_t *ids,
                                                  const sigset_t *signals) {
    const double GRACE = 1.5; // seconds in which the other ranks may end by themselves
    pid_t group = ids[0];
    int running = r->group.local_ranks, result = 0;
    double failed = 0;
    while (running > 0) {
        int number = sigtimedwait(signals, NULL, &(struct timespec){.tv_nsec = 200000000}), status;
        if (number > 0 && number != SIGCHLD) { kill(-group, number); }
        for (int i = 0; i < r->group.local_ranks; i++) {
            if (ids[i] == 0 || waitpid(ids[i], &status, WNOHANG) <= 0) { continue; }
            ids[i] = 0;
            running--;
            bool killed = WIFSIGNALED(status);
            int code = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
            bool orderly = code == 0 || code == EXIT_TOO_MANY_SKIPPED ||
                           // with these, all ranks end by themselves, one after another
                           code == EXIT_WRONG_RESULTS || code == EXIT_STOPPED_BY_SIGNAL;
            bool effect = failed > 0 && (result != EXIT_LOST_RANK || code == EXIT_LOST_RANK);
            if (i == 0 && failed == 0) { result = code; }
            if (orderly || effect || failed < 0) { continue; }
            if (failed == 0) { failed = wall_seconds(); }
            result = code;
            const char *others = running > 0 ? "; the other ranks are stopped" : "";
            if (killed) {
                complain("rank %d was killed by signal %d (%s)%s", r->group.rank + i,
                         WTERMSIG(status), strsignal(WTERMSIG(status)), others);
            } else {
                complain("rank %d ended with exit status %d%s", r->group.rank + i, code, others);
            }
        }
        if (failed > 0 && wall_seconds() > failed + GRACE) {
            kill(-group, SIGKILL);
            failed = -1;
        }
    }
    exit(result);
}

// Forks the ranks of this machine. The function returns in each rank, but not in the launcher. If
// all ranks are on this machine, *listener becomes rank 0's socket, on a free port.
static void start_ranks(Ranks *r, int *listener) {
    static pid_t ids[RANKS_MAX];
    pid_t launcher = getpid();
    sigset_t signals, old;
    if (r->group.local_ranks == r->group.ranks) {
        *listener = group_listen(r->rendezvous.host, &r->rendezvous.port);
        or_die(*listener >= 0);
        uint64_t secret[2];
        if (getrandom(secret, sizeof(secret), 0) != sizeof(secret)) {
            die("no random numbers: %s", strerror(errno));
        }
        snprintf(r->rendezvous.token, TOKEN, "%016lx%016lx", secret[0], secret[1]);
    }
    sigemptyset(&signals);
    for (int i = 0; i < STOP_SIGNALS; i++) { sigaddset(&signals, stop_signals[i]); }
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, &old);
    fflush(stdout);
    for (int i = 0; i < r->group.local_ranks; i++) {
        ids[i] = fork();
        if (ids[i] < 0) {
            die("rank %d could not be started: %s", r->group.rank + i, strerror(errno));
        }
        // ranks are in a process group of their own: ^C reaches only the launcher, which passes it
        // on once
        setpgid(ids[i], ids[0]);
        if (ids[i] > 0) { continue; }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != launcher) { _exit(EXIT_LOST_RANK); }
        sigprocmask(SIG_SETMASK, &old, NULL);
        r->group.local_rank = i;
        r->group.rank += i;
        if (r->group.rank > 0 && *listener >= 0) {
            close(*listener);
            *listener = -1;
        }
        return;
    }
    if (*listener >= 0) { close(*listener); }
    await_ranks(r, ids, &signals);
}

// Lists what must be the same on every rank: the program's bytes, and the options. The caller frees
// the text.
static char *list_identity(const Options *o) {
    char *text = NULL, value[OPTION_TEXT];
    size_t bytes, size = 0;
    uint32_t crc = 0;
    FILE *file = open_memstream(&text, &bytes);
    if (file == NULL) { die("out of memory"); }
    int program = file_open("/proc/self/exe", &size);
    if (program >= 0) {
        file_checksum(program, "", (int64_t)size, &crc);
        close(program);
    }
    fprintf(file, "program llm8.c %s, %zu bytes, checksum %08x\n", LLM8_VERSION, size, crc);
    EACH_OPTION (row) {
        // a derived path is the tokenizer's. It may differ between ranks, because all ranks later
        // read the tokenizer of rank 0's checkpoint (checkpoint_share)
        bool shared = o->source[row - option_table] == SOURCE_DERIVED && row->type == OPTION_STRING;
        if (row->effect != EFFECT_ACTION && !shared) {
            fprintf(file, "%s %s\n", row->name, option_text(o, row, value));
        }
    }
    fclose(file);
    return text;
}

void launch(Group *group, const Options *o) {
    Ranks r;
    int listener = -1;
    ignore_write_signals();
    or_die(ranks_read(&r, o));
    bool alone = o->plan || o->list_checkpoints || o->sample_only;
    threads_divide(alone ? 1 : r.group.local_ranks > 0 ? r.group.local_ranks : r.group.ranks);
    if (alone) { r.group.rank = 0; }
    if (alone && !o->plan) { r.group.ranks = 1; }
    if (!alone && r.starts) { start_ranks(&r, &listener); }
    *group = r.group;
    if (alone || group->ranks == 1) { return; }
    errors_name_rank(group->rank);
    if (group->rank > 0 && freopen("/dev/null", "w", stdout) == NULL) {
        die("/dev/null: %s", strerror(errno));
    }
    FREED char *identity = list_identity(o);
    or_die(group_open(group, &r.rendezvous, listener, identity, o->distributed_timeout));
}

void launch_refuse(Group *group, const Options *options) {
    Ranks r;
    ignore_write_signals();
    bool ok = ranks_read(&r, options);
    threads_divide(1);
    if (r.group.ranks > 1) { // reported first, even if ranks_read failed
        die("%s is one process, and not one of %d ranks (%s): train_gptcu trains on several GPUs",
            options->program, r.group.ranks, r.source);
    }
    or_die(ok);
    *group = r.group;
}
