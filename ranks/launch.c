#include "launch.h"
#include "../base/io.h"
#include "meet.h"
#include "starter.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// What every rank must have alike: the program, to the byte, and the options.
static char *identity_of(const Options *options) {
    char *text = NULL;
    size_t bytes;
    int64_t size = 0;
    uint32_t crc = 0;
    file_checksum("/proc/self/exe", &size, &crc, NULL);
    FILE *file = open_memstream(&text, &bytes);
    if (file == NULL) { die("out of memory"); }
    fprintf(file, "program llm8.c %s, %lld bytes, checksum %08x\n", LLM8_VERSION, (long long)size,
            crc);
    options_write_config(options, file);
    fclose(file);
    return text;
}

// Ranks other than 0 have nothing to say that rank 0 does not say.
static void be_quiet(void) {
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null < 0 || dup2(null, STDOUT_FILENO) < 0) { die("/dev/null: %s", strerror(errno)); }
    close(null);
}

static bool is_alone(const Options *o) {
    return o->plan || o->list_checkpoints || o->verify || o->sample_only;
}

// Rank 0's socket, made before the ranks start, so that no other process can take the port.
static int listen_early(Ranks *r) {
    Error err;
    if (r->rank != 0 || r->port != 0) { return -1; }
    int listener = net_listen(r->host, r->port, &err);
    if (listener < 0) { die("%s", err.text); }
    r->port = net_port(listener);
    return listener;
}

static int inherited_listener(void) {
    const char *text = getenv(STARTER_LISTENER);
    int file = text != NULL ? atoi(text) : -1;
    unsetenv(STARTER_LISTENER);
    if (file < 0 || fcntl(file, F_SETFD, FD_CLOEXEC) != 0) { return -1; }
    return file;
}

void launch(Ranks *r, Group *group, Options *options, char **argv) {
    Error err;
    *group = (Group){.ranks = 1};
    if (!ranks_read(r, options, &err)) { die("%s", err.text); }
    options->ranks = is_alone(options) && !options->plan ? 1 : r->ranks;
    if (is_alone(options)) { return; }
    if (r->starts) { exit(starter_run(r, listen_early(r), argv)); }
    options->rank = r->rank;
    if (r->ranks == 1) { return; }
    errors_name_rank(r->rank);
    if (r->rank > 0) { be_quiet(); }
    char *identity = identity_of(options);
    int listener = inherited_listener();
    double seconds = options->distributed_timeout;
    if (!meet(group, r, listener, identity, seconds, &err)) { die("%s", err.text); }
    free(identity);
    options->group = group;
    group->watch = watch_start(group, seconds);
}

void launch_refuse(const Options *options, const char *program) {
    Ranks r;
    Error err;
    bool ok = ranks_read(&r, options, &err);
    if (r.ranks > 1) { // whatever else is wrong with them
        die("%s is one process, and not one of %d ranks (%s): train_gptcu trains on several GPUs",
            program, r.ranks, r.source);
    }
    if (!ok) { die("%s", err.text); }
}
