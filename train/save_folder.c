#include "save_folder.h"
#include "metrics.h"
#include "run_data.h"

#include <stdlib.h>

// Opens metrics.jsonl in --save, or the file of --metrics.
static bool open_metrics(Run *run) {
    const Options *o = &run->options;
    bool named = o->metrics[0] != '\0';
    char path[PATH_LENGTH];
    if (o->sample_only || (!named && !options_save(o))) { return true; }
    path_format(path, "%s%s", named ? o->metrics : o->save, named ? "" : "/metrics.jsonl");
    // as of checkpoints in --save: only a resume goes on with a file that has steps
    return metrics_open(&run->metrics, path, named && o->resume[0] == '\0') ||
           fail("--%s %s", named ? "metrics" : "save", error_text());
}

void save_folder_open(Run *run) {
    const Options *o = &run->options;
    bool saves = options_save(o);
    char lock[PATH_LENGTH];
    run_beat(run, ACTIVITY_PAUSE, "waiting for the lock of --save");
    if (run->group.rank == 0 && saves && !checkpoint_claim(o, &run->start)) {
        die("--save %s", error_text());
    }
    group_agree(&run->group, CHANNEL_MAIN, true); // a barrier: now every rank must see the lock
    if (saves && !path_exists(path_format(lock, "%s/.lock", o->save))) {
        die("--save %s: this rank does not see what rank 0 writes there: " NOT_SHARED, o->save);
    }
    if (run->group.rank > 0) { return; }
    if (saves) { run->saves.id = path_id(o->save); }
    or_die(open_metrics(run));
    bool given = o->save[0] != '\0' && option_source(o, "save") == SOURCE_COMMAND;
    if (given && !options_train(o) && strcmp(o->resume, "latest") != 0) {
        warn("--save %s has no effect: --%s saves nothing%s", o->save,
             o->eval_only ? "eval-only" : "sample-only",
             o->eval_only && o->metrics[0] == '\0' ? "; --metrics FILE records the evaluation"
                                                   : "");
    }
    if (saves && run->valid_data.count > 0 && o->save_interval % o->eval_interval != 0) {
        printf("  note: --save-interval %lld is not a multiple of --eval-interval %lld: a "
               "checkpoint without an evaluation cannot become `best`\n",
               (long long)o->save_interval, (long long)o->eval_interval);
    }
}

static bool save_config(const Options *o) {
    char path[PATH_LENGTH];
    FREED char *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    if (file == NULL) { die("out of memory"); }
    options_write_config(o, file);
    fclose(file);
    path_format(path, "%s/config.txt", o->save);
    return file_replace(path, text, bytes);
}

void save_folder_begin(const Run *run) {
    if (run->options.resumes) { or_die(checkpoint_go_back(&run->options, &run->start)); }
    if (!save_config(&run->options)) { die("--save %s", error_text()); }
}

// Called if the folder that the run has locked was moved or deleted. Locks the folder to which the
// path of --save leads now, and makes it if there is none. Returns false if it cannot be made, and
// dies if another run has locked it.
static bool take_folder_again(Run *run) {
    const Options *o = &run->options;
    warn("--save %s: the folder was moved or deleted; from step %lld on the run saves to a "
         "folder of that name again",
         o->save, (long long)run->progress.step);
    if (!folder_make(o->save)) { // the disk may be back at the next save
        warn("--save %s", error_text());
        return false;
    }
    if (!checkpoint_lock(o)) { die("--save %s", error_text()); }
    if (!save_config(o)) { warn("--save %s", error_text()); }
    run->saves.id = path_id(o->save);
    return true;
}

// Checks that the paths of --save and of the metrics still lead to the folder and the file that the
// run has open. If not, the run goes on with the folder and the file to which the paths lead now.
static void check_paths(Run *run) {
    Metrics *m = &run->metrics;
    bool stays = path_is(run->options.save, run->saves.id);
    if (!stays && !take_folder_again(run)) { return; }
    if (m->path[0] == '\0' || path_is(m->path, m->id)) { return; }
    if (stays && m->file != NULL) {
        warn("%s: the file was moved or deleted; from step %lld on the records go to a file of "
             "that name again",
             m->path, (long long)run->progress.step);
    }
    metrics_close(m);
    run_record_start(run); // opens the file
}

bool run_wait_for_save(Run *run) {
    Saver *saver = &run->saves.saver;
    bool pending = saver->pending;
    run_beat(run, ACTIVITY_PAUSE, "waiting for the last save");
    bool saved = saver_wait(saver);
    if (pending) {
        const long long step = saver->snapshot.progress.step;
        MetricsRecord *r = metrics_begin("save");
        metrics_number(r, "step", (double)step);
        if (!saved) { metrics_text(r, "error", saver->why.text); }
        metrics_end(&run->metrics, r);
        if (!saved) {
            fail("saving the checkpoint of step %lld failed: %s", step, saver->why.text);
            saver->why = error_kept();
            if (run->group.rank == 0) { warn("%s", saver->why.text); }
        }
    }
    run_beat(run, ACTIVITY_WAIT, "after a save"); // the watchdog's time limit applies again
    return saved;
}

void run_save(Run *run, Snapshot s) {
    Progress *p = &run->progress;
    run_beat(run, ACTIVITY_PAUSE, "starting a save");
    if (run->group.rank == 0) { check_paths(run); }
    if (is_usual(p->valid_loss, p->best_valid_loss)) { p->last_good = p->step; }
    bool tokenizer = run->tokenizer.vocab > 0;
    s.options = &run->options;
    s.group = &run->group;
    s.layout = &run->layout;
    s.precision = &run->precision;
    s.progress = run->progress;
    s.data = run->train_data.identity;
    s.valid_tokens = run_eval_all_samples(run) * run->options.seq_length;
    s.valid_data = run->valid_data.identity;
    s.companions = run->saves.companions;
    s.start_config = run->saves.start_config;
    s.begin_of_text = tokenizer ? run->tokenizer.begin_of_text : run->document_end;
    s.end_of_text = tokenizer ? run->tokenizer.end_of_text : run->document_end;
    s.document_end = tokenizer ? run->tokenizer.document_end : run->document_end;
    run->saves.step = p->step;
    metrics_sync(&run->metrics); // the metrics of a saved step are on the disk before the save
    saver_start(&run->saves.saver, &s);
    run_beat(run, ACTIVITY_WAIT, "after a save");
}

void save_folder_print_resume(const Run *run) {
    const Options *o = &run->options;
    char config[PATH_LENGTH], words[2][SHELL_WORD];
    // torchrun, srun or mpirun has started the ranks
    bool started = run->group.ranks > 1 && o->gpus == 1;
    path_format(config, "%s/config.txt", o->save);
    printf("; saved; resume with %s%s --config %s --resume latest",
           started ? "the same launcher and " : "", shell_word(words[0], o->program),
           shell_word(words[1], config));
}
