// Several processes in a test program. Each runs a function, and the function's result is its exit
// status. Their stderr goes to one file, as whole lines in order of time. They may be ranks that
// connect to each other.
#pragma once

#include "../ranks/group.h"
#include "fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROCESSES = 16 };

typedef struct {
    int count;
    pid_t ids[PROCESSES];
    int status[PROCESSES]; // exit status, or 128 plus a signal
    char log[64];
} Processes;

typedef int Body(int number, void *argument);

static inline void processes_start(Processes *p, int count, const char *log, Body *body,
                                   void *argument) {
    *p = (Processes){.count = count};
    snprintf(p->log, sizeof(p->log), "%s", log);
    fflush(stdout);
    unlink(log);
    for (int i = 0; i < count; i++) {
        p->ids[i] = fork();
        if (p->ids[i] < 0) { die("fork"); }
        if (p->ids[i] > 0) { continue; }
        int file = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        dup2(file, STDERR_FILENO);
        close(file);
        _exit(body(i, argument)); // _exit: the memory of the test program is not freed here
    }
}

static inline void processes_wait(Processes *p) {
    for (int i = 0; i < p->count; i++) {
        int status;
        if (waitpid(p->ids[i], &status, 0) < 0) { die("waitpid"); }
        p->status[i] = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
}

static inline void processes_run(Processes *p, int count, Body *body, void *argument) {
    processes_start(p, count, "said", body, argument);
    processes_wait(p);
}

// Returns the text that they have written; the caller frees it.
static inline char *processes_log(const Processes *p) {
    Blob b = blob_read(p->log);
    char *text = realloc_or_die(b.bytes, b.size + 1);
    text[b.size] = '\0';
    return text;
}

// ---- ranks --------------------------------------------------------------------------------------

// A listening socket, or -1, and the ranks that connect there. numbers: the rank of each process;
// NULL: its own number.
typedef struct {
    int listener, port, ranks;
    const char *host;
    double seconds;
    const int *numbers;
    const char *token; // NULL: none
    bool elsewhere;
} Endpoint;

static inline Endpoint endpoint_at(const char *host, int ranks, double seconds) {
    Endpoint p = {.ranks = ranks, .host = host, .seconds = seconds};
    p.listener = group_listen(host, &p.port);
    if (p.listener < 0) { die("%s", error_text()); }
    return p;
}

// Called in a process, which becomes one of those ranks. Only rank 0 keeps the listening socket, so
// that connections to it end when rank 0 ends.
static inline Group *join(const Endpoint *p, int number, const char *identity) {
    static Group g;
    int rank = p->numbers != NULL ? p->numbers[number] : number;
    errors_name_rank(rank);
    if (rank != 0 && p->listener >= 0) { close(p->listener); }
    g = (Group){.rank = rank, .ranks = p->ranks};
    Rendezvous m = {.port = p->port, .elsewhere = p->elsewhere};
    snprintf(m.host, sizeof(m.host), "%s", p->host);
    snprintf(m.token, sizeof(m.token), "%s", p->token != NULL ? p->token : "");
    or_die(group_open(&g, &m, rank == 0 ? p->listener : -1, identity, p->seconds));
    return &g;
}

// Runs the ranks, and returns what they have written; the caller frees it.
static inline char *processes_connect(Processes *run, int count, Body *body, Endpoint *p) {
    processes_start(run, count, "said", body, p);
    if (p->listener >= 0) { close(p->listener); }
    processes_wait(run);
    return processes_log(run);
}
