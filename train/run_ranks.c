// What a run does because it is several ranks: makes sure that they read the same data, write to
// the same folder and go on from the same checkpoint.
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void run_beat(const Run *run, Doing doing, const char *what) {
    if (run->group != NULL) { watch_beat(run->group->watch, run->progress.step, doing, what); }
}

// Whether `mine` is what rank 0 has.
static bool same_as_first(const Run *run, const void *mine, void *first, size_t bytes) {
    memcpy(first, mine, bytes);
    group_broadcast(run->group, CHANNEL_MAIN, first, bytes);
    return memcmp(mine, first, bytes) == 0;
}

void ranks_check_data(const Run *run) {
    int64_t mine[4] = {run->train_data.tokens, run->train_data.windows, run->valid_data.tokens,
                       run->valid_data.windows},
            first[4];
    if (same_as_first(run, mine, first, sizeof(mine))) { return; }
    bool train = mine[0] != first[0];
    die("--%s %s: %lld tokens here, %lld where rank 0 reads: every rank needs the same shards",
        train ? "data" : "valid-data", train ? run->options.data : run->options.valid_data,
        (long long)mine[train ? 0 : 2], (long long)first[train ? 0 : 2]);
}

// A file system over a network may show a new file late.
static bool appears(const char *path, double seconds) {
    double until = wall_seconds() + seconds;
    while (!path_exists(path)) {
        if (wall_seconds() > until) { return false; }
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    return true;
}

void ranks_check_folder(const Run *run) {
    enum { NAME = 64 };
    const Options *o = &run->options;
    char name[NAME] = "", path[PATH_LENGTH];
    Error err;
    if (run->ranks == 1 || !options_save(o)) { return; }
    snprintf(name, NAME, ".tmp-step_ranks-%lld-%d", (long long)time(NULL), (int)getpid());
    path_format(path, "%s/%s", o->save, name);
    if (run->rank == 0 && !folder_make(path, &err)) { die("--save %s", err.text); }
    group_broadcast(run->group, CHANNEL_MAIN, name, NAME); // once it is there to be seen
    path_format(path, "%s/%s", o->save, name);
    if (run->rank > 0 && !appears(path, 5)) {
        die("--save %s: this rank does not see what rank 0 writes there: the folder must be on a "
            "file system that all ranks share",
            o->save);
    }
    group_agree(run->group, CHANNEL_MAIN, true, &err); // they have seen it
    if (run->rank == 0 && !folder_remove(path, &err)) { die("--save %s", err.text); }
}

bool ranks_find_checkpoint(const Run *run, Checkpoint *c, bool *found, Error *err) {
    char path[PATH_LENGTH] = "";
    if (run->rank == 0) {
        if (!checkpoint_resume(c, &run->options, found, err)) { return false; }
        if (*found) { path_format(path, "%s", c->path); }
    }
    group_broadcast(run->group, CHANNEL_MAIN, path, sizeof(path));
    if (run->rank > 0) { *found = path[0] != '\0'; }
    return run->rank == 0 || !*found || checkpoint_open_checked(c, path, err);
}

void ranks_report(Run *run, StepResult s) {
    run->stopping = run->stopping || s.stop;
    if (s.skipped && run->ranks > 1 && !isfinite(s.own_loss)) {
        warn("step %lld is skipped: the loss of this rank's sequences is %f",
             (long long)run->progress.step, s.own_loss);
    }
}

void ranks_leave(const Run *run) {
    group_close(run->group);
    exit(EXIT_SUCCESS);
}
