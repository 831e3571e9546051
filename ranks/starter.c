#define _GNU_SOURCE // pipe2

#include "starter.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

// What a rank writes to stderr comes through a pipe, so that the first failure's message can be
// shown before those of the ranks that it drags along.
enum { TEXT_MAX = 1 << 16, READ_MAX = 4096 };
static const double HOLD = 0.2, SETTLE = 0.5, GRACE = 1.5; // seconds

typedef struct {
    int rank, errors; // errors: the pipe; -1 once it has ended
    pid_t process;    // 0: has ended
    int status;       // of waitpid
    char *text;       // not yet shown
    size_t used;
    double since; // when it began to wait
} Child;

typedef struct {
    int count, running, signals;
    Child *children;
    pid_t group;
    Child *failed;     // the first, or one that is likelier the cause
    double failed_at;  // 0: none yet
    bool told, killed; // the failure has been shown; the others have been ended
} Starter;

// ---- starting -----------------------------------------------------------------------------------

static void set_number(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof(text), "%d", value);
    setenv(name, text, 1);
}

static void set_environment(const Ranks *r, int local_rank, int listener) {
    set_number("RANK", r->rank + local_rank);
    set_number("WORLD_SIZE", r->ranks);
    set_number("LOCAL_RANK", local_rank);
    set_number("LOCAL_WORLD_SIZE", r->local_ranks);
    setenv("MASTER_ADDR", r->host, 1);
    set_number("MASTER_PORT", r->port);
    unsetenv("TORCHELASTIC_USE_AGENT_STORE"); // the port is ours
    unsetenv(STARTER_LISTENER);
    if (local_rank > 0 || listener < 0) { return; }
    set_number(STARTER_LISTENER, listener);
    fcntl(listener, F_SETFD, 0); // this one goes along
}

// In the new process: becomes the rank, or dies.
static void become_rank(const Ranks *r, int local_rank, int listener, pid_t starter, char **argv) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != starter) { _exit(EXIT_LOST_RANK); }
    int null = open("/dev/null", O_RDWR);
    if (null >= 0) { dup2(null, STDIN_FILENO); }
    if (null >= 0 && r->rank + local_rank > 0) { dup2(null, STDOUT_FILENO); }
    if (null > STDERR_FILENO) { close(null); }
    set_environment(r, local_rank, listener);
    execv("/proc/self/exe", argv);
    complain("%s could not be started again as a rank: %s", argv[0], strerror(errno));
    _exit(127);
}

static void start(Starter *s, const Ranks *r, int i, int listener, char **argv) {
    int ends[2];
    pid_t starter = getpid();
    if (pipe2(ends, O_CLOEXEC) != 0) { die("a pipe for rank %d: %s", i, strerror(errno)); }
    fflush(stdout);
    pid_t process = fork();
    if (process < 0) { die("rank %d could not be started: %s", i, strerror(errno)); }
    if (process == 0) {
        // a group of their own: a terminal's ^C reaches the starter alone, which passes it on once
        setpgid(0, s->group);
        dup2(ends[1], STDERR_FILENO);
        become_rank(r, i, listener, starter, argv);
    }
    close(ends[1]);
    if (s->group == 0) { s->group = process; }
    setpgid(process, s->group); // whichever of the two is first
    s->children[i] = (Child){.rank = r->rank + i,
                             .errors = ends[0],
                             .process = process,
                             .text = malloc_or_die(TEXT_MAX)};
    s->running++;
}

// ---- what the ranks say -------------------------------------------------------------------------

static void show_line(const Child *c, const char *line, size_t length) {
    char tag[24];
    size_t tag_length = (size_t)snprintf(tag, sizeof(tag), "rank %d: ", c->rank);
    bool tagged = length >= tag_length && memcmp(line, tag, tag_length) == 0;
    fprintf(stderr, "%s%.*s\n", tagged ? "" : tag, (int)length, line);
}

// Whole lines; at the end of the pipe, what is left as well.
static void show(Child *c) {
    size_t done = 0;
    for (char *end; (end = memchr(c->text + done, '\n', c->used - done)) != NULL;) {
        show_line(c, c->text + done, (size_t)(end - c->text) - done);
        done = (size_t)(end - c->text) + 1;
    }
    bool rest = done < c->used && (c->errors < 0 || c->used - done == TEXT_MAX);
    if (rest) {
        show_line(c, c->text + done, c->used - done);
        done = c->used;
    }
    memmove(c->text, c->text + done, c->used - done);
    c->used -= done;
}

static void read_errors(Child *c) {
    if (c->used + READ_MAX > TEXT_MAX) { show(c); }
    size_t room = TEXT_MAX - c->used;
    ssize_t got = read(c->errors, c->text + c->used, room < READ_MAX ? room : READ_MAX);
    if (got < 0 && errno == EINTR) { return; }
    if (got <= 0) {
        close(c->errors);
        c->errors = -1;
        return;
    }
    if (c->used == 0) { c->since = wall_seconds(); }
    c->used += (size_t)got;
}

// ---- how they end -------------------------------------------------------------------------------

static int exit_status(const Child *c) {
    return WIFSIGNALED(c->status) ? 128 + WTERMSIG(c->status) : WEXITSTATUS(c->status);
}

// As a run may end: all ranks alike, one after another.
static bool is_orderly(int status) {
    return status == 0 || status == EXIT_TOO_MANY_SKIPPED || status == EXIT_STOPPED_BY_SIGNAL;
}

static void reap(Starter *s) {
    for (int i = 0; i < s->count; i++) {
        Child *c = &s->children[i];
        if (c->process == 0 || waitpid(c->process, &c->status, WNOHANG) <= 0) { continue; }
        c->process = 0;
        s->running--;
        int status = exit_status(c);
        if (is_orderly(status) || s->killed) { continue; }
        // a rank that has lost another is not the cause, if the other is one of these
        bool effect = s->failed != NULL && exit_status(s->failed) == EXIT_LOST_RANK;
        if (s->failed == NULL || (effect && status != EXIT_LOST_RANK)) { s->failed = c; }
        if (s->failed_at == 0) { s->failed_at = wall_seconds(); }
    }
}

static void tell_failure(Starter *s) {
    const Child *c = s->failed;
    show(s->failed);
    if (WIFSIGNALED(c->status)) {
        int number = WTERMSIG(c->status);
        complain("rank %d was killed by signal %d (%s)%s", c->rank, number, strsignal(number),
                 s->running > 0 ? "; the other ranks are ended" : "");
    } else if (s->running > 0) {
        complain("rank %d ended with exit status %d; the other ranks are ended", c->rank,
                 exit_status(c));
    }
    s->told = true;
}

// What is due now; returns in how many seconds to look again.
static double attend(Starter *s) {
    double now = wall_seconds(), next = 1;
    if (s->failed_at > 0 && !s->told) {
        // others may still be ending that are the cause of this
        bool settled = s->running == 0 || now >= s->failed_at + SETTLE;
        if (!settled) { return s->failed_at + SETTLE - now; }
        tell_failure(s);
    }
    if (s->told && !s->killed && (s->running == 0 || now >= s->failed_at + GRACE)) {
        if (s->running > 0) { kill(-s->group, SIGKILL); }
        s->killed = true;
    }
    for (int i = 0; i < s->count; i++) {
        Child *c = &s->children[i];
        if (c->used == 0) { continue; }
        bool due = s->told || c->process == 0 || now >= c->since + HOLD;
        if (due) {
            show(c);
        } else if (c->since + HOLD - now < next) {
            next = c->since + HOLD - now;
        }
    }
    return s->told && !s->killed ? s->failed_at + GRACE - now : next;
}

static void pass_signals_on(Starter *s) {
    struct signalfd_siginfo info;
    if (read(s->signals, &info, sizeof(info)) != sizeof(info)) { return; }
    if (info.ssi_signo != SIGCHLD) { kill(-s->group, (int)info.ssi_signo); }
}

static void wait_for_events(Starter *s, double seconds) {
    struct pollfd *p = malloc_or_die(((size_t)s->count + 1) * sizeof(*p));
    for (int i = 0; i < s->count; i++) {
        p[i] = (struct pollfd){.fd = s->children[i].errors, .events = POLLIN};
    }
    p[s->count] = (struct pollfd){.fd = s->signals, .events = POLLIN};
    if (poll(p, (nfds_t)s->count + 1, seconds > 0 ? 1 + (int)(1e3 * seconds) : 0) > 0) {
        for (int i = 0; i < s->count; i++) {
            if (p[i].fd >= 0 && p[i].revents != 0) { read_errors(&s->children[i]); }
        }
        if (p[s->count].revents != 0) { pass_signals_on(s); }
    }
    free(p);
}

static bool is_over(const Starter *s) {
    bool over = s->running == 0 && (s->failed == NULL || s->told);
    for (int i = 0; i < s->count; i++) {
        over = over && s->children[i].errors < 0 && s->children[i].used == 0;
    }
    return over;
}

// A rank's own children can hold its pipe open; they are ended with their group.
static void follow(Starter *s) {
    double ended = 0;
    for (;;) {
        double next = attend(s);
        if (is_over(s)) { return; }
        wait_for_events(s, next);
        reap(s);
        if (s->running > 0) { continue; }
        if (ended == 0) { ended = wall_seconds(); }
        if (wall_seconds() > ended + HOLD) { kill(-s->group, SIGKILL); }
        if (wall_seconds() > ended + GRACE) { return; }
    }
}

int starter_run(const Ranks *r, int listener, char **argv) {
    Starter s = {.count = r->local_ranks};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM), sigaddset(&set, SIGINT), sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    s.signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (s.signals < 0) { die("signalfd: %s", strerror(errno)); }
    s.children = calloc_or_die((size_t)s.count, sizeof(Child));
    for (int i = 0; i < s.count; i++) { start(&s, r, i, listener, argv); }
    if (listener >= 0) { close(listener); }
    follow(&s);
    int status = s.failed != NULL ? exit_status(s.failed) : exit_status(&s.children[0]);
    for (int i = 0; i < s.count; i++) { free(s.children[i].text); }
    free(s.children);
    close(s.signals);
    return status;
}
