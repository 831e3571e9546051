// What a run does because it is several ranks: makes sure that they read the same data, write to
// the same folder and resume from the same checkpoint.
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void run_beat(const Run *run, Doing doing, const char *what) {
    if (run->group != NULL) { watch_beat(run->group->watch, run->progress.step, doing, what); }
}

void ranks_check_data(const Run *run) {
    static const char *const names[] = {"data", "valid-data"};
    const Dataset *sets[] = {&run->train_data, &run->valid_data};
    for (int i = 0; run->ranks > 1 && i < 2; i++) {
        const char *own = sets[i]->identity != NULL ? sets[i]->identity : "";
        size_t bytes = strlen(own) + 1;
        Error err;
        group_broadcast(run->group, CHANNEL_MAIN, &bytes, sizeof(bytes));
        char *first = calloc_or_die(bytes, 1);
        if (run->rank == 0) { memcpy(first, own, bytes); }
        group_broadcast(run->group, CHANNEL_MAIN, first, bytes);
        if (!dataset_match(sets[i], first, "rank 0", &err)) {
            die("--%s %s; every rank needs the same shards", names[i], err.text);
        }
        free(first);
    }
}

// Rank 0 makes a folder there, which all must see; a file system over a network may show it late.
void ranks_check_folder(const Run *run) {
    const char *save = run->options.save;
    char path[PATH_LENGTH] = "";
    Error err;
    if (run->ranks == 1 || !options_save(&run->options)) { return; }
    path_format(path, "%s/.tmp-step_ranks-%lld-%d", save, (long long)time(NULL), (int)getpid());
    if (run->rank == 0 && !folder_make(path, &err)) { die("--save %s", err.text); }
    group_broadcast(run->group, CHANNEL_MAIN, path, sizeof(path)); // once it is there to be seen
    double until = wall_seconds() + 5;
    while (!path_exists(path)) {
        if (wall_seconds() > until) {
            die("--save %s: this rank does not see what rank 0 writes there: the folder must be on "
                "a file system that all ranks share",
                save);
        }
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    group_agree(run->group, CHANNEL_MAIN, true, &err); // all have seen it
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
        char loss[32];
        warn("step %lld is skipped: the loss of this rank's sequences is %s",
             (long long)run->progress.step, format_number(loss, s.own_loss));
    }
}

void ranks_leave(const Run *run) {
    group_close(run->group);
    exit(EXIT_SUCCESS);
}
