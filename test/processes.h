// Several processes inside a test program: each runs a function and ends with what that returns.
// What they print to stderr goes to one file, whole lines in the order in which they came.
#pragma once

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
    for (int i = 0; i < count; i++) {
        p->ids[i] = fork();
        if (p->ids[i] < 0) { die("fork"); }
        if (p->ids[i] > 0) { continue; }
        int file = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        dup2(file, STDERR_FILENO);
        close(file);
        _exit(body(i, argument)); // what the test program owns is not this process's to free
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
    unlink("said");
    processes_start(p, count, "said", body, argument);
    processes_wait(p);
}

// The file they have written, to be freed.
static inline char *processes_log(const Processes *p) {
    Blob b = blob_read(p->log);
    char *text = realloc_or_die(b.bytes, b.size + 1);
    text[b.size] = '\0';
    return text;
}
