#include "ranks.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *starter, *rank, *ranks, *local_rank, *local_ranks;
    bool rank_alone; // whether the rank without the number of ranks is a mistake
} Family;

static const Family families[] = {
    {"WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", true},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", true},
    // of the step: a batch script has SLURM_PROCID, and SLURM_NTASKS, before srun starts any
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL, false},
};
enum {
    FAMILIES = sizeof(families) / sizeof(families[0]),
    DEFAULT_PORT = 29500,
    AGENT_STEP = 2, // not 1: of the ports that the kernel gives out, every second is to listen on
};

// A variable that is set to nothing is not set.
static const char *variable(const char *name) {
    const char *value = name != NULL ? getenv(name) : NULL;
    return value != NULL && *value != '\0' ? value : NULL;
}

// *value keeps what it holds where the variable is not set.
static bool read_int(const char *name, int min, int max, int *value, Error *err) {
    const char *text = variable(name);
    char *end;
    if (text == NULL) { return true; }
    errno = 0;
    long number = strtol(text, &end, 10);
    if (*end != '\0' || errno != 0 || number < min || number > max) {
        return fail(err, "%s=%s: must be a whole number from %d to %d", name, text, min, max);
    }
    *value = (int)number;
    return true;
}

static bool need(const char *name, const char *because, Error *err) {
    return variable(name) != NULL || fail(err, "%s is set, but %s is not: set both", because, name);
}

static bool read_family(Ranks *r, const Family *f, Error *err) {
    if (!read_int(f->ranks, 1, RANKS_MAX, &r->ranks, err)) { return false; }
    if (variable(f->rank) == NULL && r->ranks == 1) { return true; }
    r->local_ranks = 0;
    r->local_rank = -1;
    r->source = f->starter;
    if (!need(f->ranks, f->rank, err) || !need(f->rank, f->ranks, err) ||
        !read_int(f->rank, 0, r->ranks - 1, &r->rank, err) ||
        !read_int(f->local_ranks, 1, r->ranks, &r->local_ranks, err)) {
        return false;
    }
    int most = (r->local_ranks > 0 ? r->local_ranks : r->ranks) - 1;
    if (!read_int(f->local_rank, 0, most, &r->local_rank, err)) { return false; }
    if (r->ranks == 1) { r->local_rank = 0; }
    return r->local_rank >= 0 ||
           fail(err,
                "%s and %s are set, but %s, which says which GPU of its machine the rank "
                "takes, is not",
                f->rank, f->ranks, f->local_rank);
}

// The first host of "node[03-05,9],other": node03.
static void first_host(char host[NET_HOST], const char *list) {
    size_t used = 0, prefix = strcspn(list, ",[");
    bool bracket = list[prefix] == '[';
    snprintf(host, NET_HOST, "%.*s", (int)prefix, list);
    if (!bracket) { return; }
    used = strlen(host);
    const char *number = list + prefix + 1, *close = strchr(number, ']');
    snprintf(host + used, NET_HOST - used, "%.*s", (int)strcspn(number, "-,]"), number);
    used = strlen(host);
    if (close != NULL) {
        snprintf(host + used, NET_HOST - used, "%.*s", (int)strcspn(close + 1, ","), close + 1);
    }
}

// Where rank 0 is met, when several ranks are.
static bool read_meeting(Ranks *r, Error *err) {
    const char *host = variable("MASTER_ADDR"), *job = variable("SLURM_JOB_ID");
    const char *list = variable("SLURM_STEP_NODELIST");
    bool slurm = strcmp(r->source, "Slurm") == 0;
    r->port = DEFAULT_PORT;
    if (slurm && job != NULL) { r->port = 20000 + (int)(strtoul(job, NULL, 10) % 10000); }
    if (!read_int("MASTER_PORT", 1, 65535, &r->port, err)) { return false; }
    const char *agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    if (agent != NULL && strcmp(agent, "True") == 0) { // torchrun listens on MASTER_PORT itself
        r->port += r->port + AGENT_STEP <= 65535 ? AGENT_STEP : -AGENT_STEP;
    }
    if (host != NULL && strlen(host) >= NET_HOST) {
        return fail(err, "MASTER_ADDR: longer than %d characters", NET_HOST - 1);
    }
    if (host != NULL) {
        snprintf(r->host, NET_HOST, "%s", host);
    } else if (r->local_ranks == r->ranks) {
        snprintf(r->host, NET_HOST, "127.0.0.1");
    } else if (slurm && list != NULL) {
        first_host(r->host, list);
    } else {
        return fail(err, "MASTER_ADDR is not set: %d ranks need to know the host of rank 0",
                    r->ranks);
    }
    return true;
}

// --gpus: this process starts the ranks of its machine.
static bool read_nodes(Ranks *r, int gpus, Error *err) {
    int nodes = 1, node = -1;
    if (!read_int("NNODES", 1, RANKS_MAX, &nodes, err)) { return false; }
    if (nodes == 1) { node = 0; }
    if (nodes > 1 && !read_int("NODE_RANK", 0, nodes - 1, &node, err)) { return false; }
    if (node < 0) { return fail(err, "NNODES=%d is set, but NODE_RANK is not: set both", nodes); }
    if ((int64_t)nodes * gpus > RANKS_MAX) {
        return fail(err, "NNODES=%d and --gpus %d: more than %d ranks", nodes, gpus, RANKS_MAX);
    }
    *r = (Ranks){.rank = node * gpus,
                 .ranks = nodes * gpus,
                 .local_ranks = gpus,
                 .source = "--gpus",
                 .starts = nodes * gpus > 1};
    if (nodes == 1) {
        snprintf(r->host, NET_HOST, "127.0.0.1");
        return true;
    }
    return need("MASTER_ADDR", "NNODES", err) && need("MASTER_PORT", "NNODES", err) &&
           read_meeting(r, err);
}

bool ranks_read(Ranks *r, const Options *options, Error *err) {
    *r = (Ranks){.ranks = 1, .local_ranks = 1, .source = "one process"};
    const Family *family = NULL;
    for (int i = 0; i < FAMILIES && family == NULL; i++) {
        const Family *f = &families[i];
        bool set = variable(f->ranks) != NULL || (f->rank_alone && variable(f->rank) != NULL);
        if (set) { family = f; }
    }
    if (family != NULL && !read_family(r, family, err)) { return false; }
    // a --config may have kept what an earlier run was started with
    bool typed = option_source(options, "gpus") == SOURCE_COMMAND;
    int gpus = family == NULL || typed ? options->gpus : 1;
    bool alone = r->ranks == 1;
    if (alone && !read_nodes(r, gpus, err)) { return false; }
    if (options->device != 0 && r->ranks > 1) {
        return fail(err,
                    "--device %d: of several ranks, each takes the GPU of its number on its "
                    "machine; choose among GPUs with CUDA_VISIBLE_DEVICES",
                    options->device);
    }
    if (alone) { return true; }
    if (gpus > 1 && gpus != r->local_ranks) {
        return fail(err,
                    "--gpus %d, but %d ranks are started already (%s=%s): leave --gpus out, or "
                    "start one process",
                    gpus, r->ranks, family->ranks, variable(family->ranks));
    }
    return read_meeting(r, err);
}

bool ranks_device(const Ranks *r, int visible, int *device, Error *err) {
    *device = visible == 1 ? 0 : r->local_rank;
    return *device < visible ||
           fail(err,
                "rank %d is number %d on its machine, whose GPUs are 0 to %d: start no more "
                "ranks than GPUs",
                r->rank, r->local_rank, visible - 1);
}
