#include "run.h"
#include "../checkpoints/hugging_face.h"
#include "../ranks/launch.h"
#include "metrics.h"
#include "run_data.h"
#include "start.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

// ---- start --------------------------------------------------------------------------------------

// If the run does not train, only its answers go to standard output; all else goes to standard
// error. With --quiet, all else goes nowhere.
static void part_output(Run *run) {
    const Options *o = &run->options;
    if (run->group.rank > 0 || o->plan || (options_train(o) && !o->quiet)) { return; }
    fflush(stdout);
    int rest = o->quiet ? open("/dev/null", O_WRONLY | O_CLOEXEC) : STDERR_FILENO;
    if (!options_train(o)) { run->answers = fdopen(dup(STDOUT_FILENO), "w"); }
    if (rest < 0 || run->answers == NULL || dup2(rest, STDOUT_FILENO) < 0) {
        die("the standard output: %s", strerror(errno));
    }
}

void run_announce(Run *run) {
    const Options *o = &run->options;
    const Precision *p = &run->precision;
    if (o->list_checkpoints) {
        or_die(checkpoint_list(o->save));
        exit_answered();
    }
    if (o->list_tensors) {
        hf_list(&run->layout, stdout);
        exit_answered();
    }
    part_output(run);
    options_print(o, o->plan, stdout);
    precision_print(p);
    bool no_fp8 = p->format != FP8_FORMAT_NONE && p->possible && precision_fp8_share(p) == 0;
    if (no_fp8 && run->group.rank == 0) {
        if (o->fp8_required) {
            die("--fp8-required: no linear layer is in FP8; the table above says why");
        }
        warn("no linear layer is in FP8: the table above says why; the run continues without FP8");
    }
    if (o->plan) { // scripts/estimate reads these
        printf("Model\n  parameters    %lld\n  FLOPs a token %.6g\n",
               (long long)run->layout.num_parameters, flops_per_token(&run->config));
    }
}

// Whether every rank could read its data. If not, the error text is that of the first that could
// not.
static bool agree_on_data(const Run *run) {
    const char *fault = run->data_fault.text;
    return group_agree(&run->group, CHANNEL_MAIN, fault[0] == '\0' || fail("%s", fault));
}

// Opens metrics.jsonl in --save, or the file of --metrics.
static bool open_metrics(Run *run) {
    const Options *o = &run->options;
    bool named = o->metrics[0] != '\0';
    char path[PATH_LENGTH];
    if (o->sample_only || (!named && !options_save(o))) { return true; }
    path_format(path, "%s%s", named ? o->metrics : o->save, named ? "" : "/metrics.jsonl");
    return metrics_open(&run->metrics, path) ||
           fail("--%s %s", named ? "metrics" : "save", error_text());
}

static void open_save_folder(Run *run) {
    const Options *o = &run->options;
    bool saves = options_save(o);
    char lock[PATH_LENGTH];
    run_beat(run, DOING_PAUSE, "waiting for the lock of --save");
    if (run->group.rank == 0 && saves && !checkpoint_claim(o)) { die("--save %s", error_text()); }
    group_agree(&run->group, CHANNEL_MAIN, true); // a barrier: now every rank must see the lock
    if (saves && !path_exists(path_format(lock, "%s/.lock", o->save))) {
        die("--save %s: this rank does not see what rank 0 writes there: " NOT_SHARED, o->save);
    }
    if (run->group.rank > 0) { return; }
    if (saves) { run->folder = folder_id(o->save); }
    or_die(open_metrics(run));
    if (saves && run->has_valid && o->save_interval % o->eval_interval != 0) {
        printf("  note: --save-interval %lld is not a multiple of --eval-interval %lld: a "
               "checkpoint without an evaluation cannot become `best`\n",
               (long long)o->save_interval, (long long)o->eval_interval);
    }
}

// Warns of a schedule that ends with a learning rate of 0, or never reaches --lr, and of a resumed
// run that does not go on in a folder.
static void warn_of_plan(const Options *o) {
    if (o->lr > 0 && o->train_iters > 0 && learning_rate(o, o->train_iters - 1) == 0) {
        warn("--lr-decay-iters %lld: the learning rate is 0 from step %lld to %lld; --min-lr sets "
             "it",
             (long long)o->lr_decay_iters, (long long)o->lr_decay_iters + 1,
             (long long)o->train_iters);
    }
    if (o->lr_warmup_iters > o->train_iters) {
        warn("--lr-warmup-iters %lld: training ends at step %lld, before the rate reaches --lr",
             (long long)o->lr_warmup_iters, (long long)o->train_iters);
    }
    if (o->resumes && !options_save(o)) {
        warn("--resume %s without --save: nothing is saved from here on", o->resume);
    }
}

void run_start(Run *run, const char *device) {
    const Options *o = &run->options;
    snprintf(run->device, sizeof(run->device), "%s", device);
    printf("Run\n  device      %s\n  model       %lld parameters, %s, %.3g FLOPs a token\n", device,
           (long long)run->layout.num_parameters, precision_name(&run->precision),
           flops_per_token(&run->config));
    or_die(checkpoint_share(&run->start, &run->group));
    run_beat(run, DOING_WORK, "opening the data");
    run_open_data(run);
    open_save_folder(run);
    if (options_train(o)) { run_catch_signals(); } // others have nothing to save
    if (run->train_data.windows == 0) { return; }
    int micro_batches = run_micro_batches(run) * run->group.ranks;
    if (run->group.ranks > 1) { printf("  ranks       %d\n", run->group.ranks); }
    printf("  schedule    %lld step%s of %lld tokens (%d x %d micro-batch%s), %.2f epochs\n",
           (long long)o->train_iters, o->train_iters != 1 ? "s" : "",
           (long long)o->global_batch_size * o->seq_length, micro_batches,
           o->micro_batch_size * o->seq_length, micro_batches > 1 ? "es" : "",
           (double)o->train_iters * o->global_batch_size / (double)run->train_data.windows);
    if (options_save(o)) {
        printf("  saves       every %lld step%s to %s\n", (long long)o->save_interval,
               o->save_interval != 1 ? "s" : "", o->save);
    } else if (options_train(o)) {
        printf("  saves       nothing: no --save\n");
    }
    fflush(stdout);
    if (options_train(o) && run->group.rank == 0) { warn_of_plan(o); }
}

// Whether a rate is more than a tenth above another one.
static bool is_above(double rate, double other) {
    return rate > 1.1 * other;
}

// Warns if the resumed run goes on with another learning rate than the checkpoint's run would have:
// a larger --train-iters moves the decay, a smaller one may have begun it already.
static void warn_of_jump(const Run *run, const Checkpoint *checkpoint) {
    const Options *o = &run->options;
    const int64_t step = run->progress.step;
    Options was;
    if (!options_train(o) || step == 0 || step >= o->train_iters) { return; }
    or_die(checkpoint_options(checkpoint, o, &was));
    double last = learning_rate(&was, step - 1), planned = learning_rate(&was, step);
    double next = learning_rate(o, step);
    bool rises = is_above(next, fmax(last, planned)), falls = is_above(fmin(last, planned), next);
    if (!rises && !falls) { return; }
    int64_t same = 0; // the first steps, in which both have about one rate
    char remedy[128] = "";
    while (!is_above(learning_rate(&was, same), learning_rate(o, same)) &&
           !is_above(learning_rate(o, same), learning_rate(&was, same))) {
        same++;
    }
    if (same > 1) {
        snprintf(remedy, sizeof(remedy), "; a checkpoint of step %lld or earlier goes on smoothly",
                 (long long)same - 1);
    }
    warn("the learning rate %s from %.3g to %.3g at step %lld, by options that differ from the "
         "checkpoint's%s",
         rises ? "rises" : "falls", last, next, (long long)step + 1, remedy);
}

// The lock was free when the options were resolved, and is taken only now: another run may have
// saved or deleted checkpoints meanwhile.
static bool is_as_resolved(const Options *o, const Checkpoint *c) {
    return strcmp(o->resume, "latest") != 0 || o->resumes == (c->path[0] != '\0') ||
           fail("--save %s: another run has changed its checkpoints while this one started; start "
                "again",
                o->save);
}

// Reads run->progress from the checkpoint that --resume names. Rank 0 finds and verifies it.
static bool restore(Run *run, Checkpoint *checkpoint) {
    const Options *o = &run->options;
    bool finds = run->group.rank == 0 && o->resume[0] != '\0';
    *checkpoint = (Checkpoint){0};
    run_beat(run, DOING_PAUSE, "reading the checkpoint");
    if ((finds && !(checkpoint_resume(checkpoint, o) && is_as_resolved(o, checkpoint))) ||
        !checkpoint_share(checkpoint, &run->group)) {
        die("%s", error_text());
    }
    if (checkpoint->path[0] == '\0') {
        if (finds) { printf("no checkpoint under %s yet: starting from step 0\n", o->save); }
        return false;
    }
    run->progress = checkpoint->progress;
    run->diverged = options_train(o) && run->progress.skipped_in_row >= o->max_skipped;
    run->saved_step = checkpoint->progress.step;
    printf("resuming from %s: step %lld, %lld tokens\n", checkpoint->path,
           (long long)run->progress.step, (long long)run->progress.tokens);
    or_die(checkpoint_match(checkpoint, o, &run->layout));
    run->progress.samples = run->progress.tokens / o->seq_length; // of this length
    if (run->train_data.windows > 0 && checkpoint->data_windows != run->train_data.windows &&
        o->shuffle) {
        printf("  --data has %lld sequences, had %lld in the checkpoint: they come in another "
               "order\n",
               (long long)run->train_data.windows, (long long)checkpoint->data_windows);
    }
    if (o->iterations_to_skip[0] != '\0' &&
        options_next_skip(o, run->progress.step + 1) > o->train_iters) {
        printf("  --iterations-to-skip %s: none of these steps is left to train\n",
               o->iterations_to_skip);
    }
    if (options_train(o) && run->progress.step >= o->train_iters) {
        printf("nothing to train: step %lld is done, and --train-iters is %lld\n",
               (long long)run->progress.step, (long long)o->train_iters);
    }
    run_match_data(run, checkpoint);
    if (run->group.rank == 0) { warn_of_jump(run, checkpoint); }
    return true;
}

static bool save_config(const Options *o) {
    char path[PATH_LENGTH], *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    if (file == NULL) { die("out of memory"); }
    options_write_config(o, file);
    fclose(file);
    path_format(path, "%s/config.txt", o->save);
    bool ok = file_replace(path, text, bytes);
    free(text);
    return ok;
}

// Verifies the checkpoint that --load names. A folder of Hugging Face's has no checksums.
static void verify_load(const Run *run) {
    const Checkpoint *c = &run->start;
    bool ok = run->group.rank > 0 || checkpoint_verify(c) || fail("--load %s", error_text());
    or_die(group_agree(&run->group, CHANNEL_MAIN, ok));
    printf("starting from the weights of %s%s\n", c->path,
           c->options != NULL ? ""
                              : " (it has no checksums: names, shapes and values are checked)");
}

static Run *recorded; // its metrics have a record of the start, and none of the end

static MetricsRecord *begin_end(const Run *run, int status) {
    MetricsRecord *r = metrics_begin("end");
    metrics_number(r, "step", (double)run->progress.step);
    metrics_number(r, "status", status);
    return r;
}

static void record_error(const char *error) {
    MetricsRecord *r = begin_end(recorded, EXIT_FAILURE);
    metrics_text(r, "error", error);
    metrics_end(&recorded->metrics, r);
}

// The parts of an evaluation: the validation loss, and the score of each set.
static int64_t eval_parts(const Run *run) {
    return run->has_valid + run->choices.count;
}

// The parts that a run has to make before its first step: of a checkpoint whose evaluation was
// broken off, those that are left of it. The sets may be others than when it was.
static int64_t parts_left(const Run *run) {
    int64_t all = eval_parts(run), left = max64(0, min64(run->progress.eval_left, all));
    bool first = left > 0 && run->has_valid && isnan(run->progress.valid_loss);
    return first || !options_train(&run->options) ? all : left;
}

// config.txt and the record of the start are written when it is certain that the run can start, and
// has something to train or to evaluate. Until then, the files of an earlier run do not change.
bool run_restore(Run *run, Checkpoint *checkpoint) {
    const Options *o = &run->options;
    bool restored = restore(run, checkpoint);
    run->progress.eval_left = parts_left(run);
    bool goes_on = !restored || run->progress.eval_left > 0 ||
                   (run->progress.step < o->train_iters && !run->diverged);
    if (!restored && o->load[0] != '\0') {
        verify_load(run);
    } else if (!restored && !options_train(o) && run->group.rank == 0) {
        warn("the weights are random: no checkpoint is loaded (--load, --resume)");
    }
    if (run->group.rank == 0 && options_save(o) && goes_on) {
        or_die(checkpoint_go_back(o, checkpoint));
        if (!save_config(o)) { die("--save %s", error_text()); }
    }
    // a record of this start would declare those of later steps void
    if (options_train(o) && !goes_on) {
        metrics_close(&run->metrics);
        run->metrics.path[0] = '\0';
    }
    run_record_start(run);
    recorded = run;
    die_with(record_error);
    return restored;
}

void run_restored(Run *run, Checkpoint *checkpoint) {
    checkpoint_close(checkpoint);
    checkpoint_close(&run->start);
}

// Names the first tensor that has NaN, or more than `most`, in elements begin..end of the space.
static bool check_values(const Run *run, int64_t begin, int64_t end, const float *values,
                         float most) {
    for (const Param *p = run->layout.params; p < run->layout.params + run->layout.count; p++) {
        int64_t from = max64(begin, p->offset), to = min64(end, p->offset + param_size(p));
        int64_t wrong = 0;
        for (int64_t i = from; i < to; i++) { wrong += !(fabsf(values[i - begin]) <= most); }
        if (wrong == 0) { continue; }
        char place[32] = "";
        if (p->layer >= 0) { snprintf(place, sizeof(place), " of block %d", p->layer); }
        return fail("%s%s has %lld %s", tensor_row(p->id)->name, place, (long long)wrong,
                    most < FLT_MAX ? "enormous values" : "NaN or infinite values");
    }
    return true;
}

// Bad values only cause a warning here, because the checkpoint of a run that diverges may have
// them. The run is resumed, and its steps are skipped.
void run_read_state(const Run *run, const Checkpoint *c, const char *kind, int64_t begin,
                    int64_t end, float *out) {
    static bool said;
    or_die(checkpoint_read(c, kind, begin, end, out));
    if (said || check_values(run, begin, end, out, FLT_MAX)) { return; }
    warn("%s: %s (%s); resume with an earlier checkpoint", c->path, error_text(), kind);
    said = true;
}

void run_first_weights(Run *run, int64_t begin, int64_t end, float *out) {
    const float FP16_MOST = 65504; // a trained model's weights are far smaller
    static bool said;
    const Options *o = &run->options;
    if (o->load[0] == '\0') {
        model_init(&run->layout, begin, end, out, (uint64_t)o->seed);
        return;
    }
    if (!checkpoint_weights(&run->start, &run->layout, begin, end, out)) {
        die("--load %s", error_text());
    }
    if (!check_values(run, begin, end, out, FLT_MAX)) {
        die("--load %s: %s", run->start.path, error_text());
    }
    // a wrong bit in an exponent gives such a value
    if (said || check_values(run, begin, end, out, FP16_MOST)) { return; }
    warn("--load %s: %s: is the file damaged?", run->start.path, error_text());
    said = true;
}

// ---- schedule -----------------------------------------------------------------------------------

double learning_rate(const Options *o, int64_t step) {
    if (step < o->lr_warmup_iters) {
        return o->lr * (double)(step + 1) / (double)o->lr_warmup_iters;
    }
    if (o->lr_decay_style == DECAY_CONSTANT) { return o->lr; }
    int64_t begin = o->lr_warmup_iters;
    if (o->lr_decay_style == DECAY_WSD) {
        begin = max64(begin, o->lr_decay_iters - o->lr_wsd_decay_iters);
    }
    if (step < begin) { return o->lr; }
    if (step >= o->lr_decay_iters) { return o->min_lr; }
    double done = (double)(step - begin) / (double)(o->lr_decay_iters - begin);
    double left = o->lr_decay_style == DECAY_COSINE ? 0.5 * (1.0 + cos(3.141592653589793 * done))
                                                    : 1.0 - done;
    return o->min_lr + left * (o->lr - o->min_lr);
}

// Several ranks stop when they have agreed to stop; a single one, when a signal has come.
static bool is_stopping(const Run *run) {
    return run->group.ranks > 1 ? run->stopping : run_stop_signal() != 0;
}

bool run_has_steps(const Run *run) {
    return options_train(&run->options) && run->progress.step < run->options.train_iters;
}

bool run_goes_on(const Run *run) {
    return run_has_steps(run) && !is_stopping(run) && !run->diverged;
}

static bool eval_is_due(const Run *run, int64_t step) {
    bool last = step == run->options.train_iters;
    return eval_parts(run) > 0 && (step % run->options.eval_interval == 0 || last);
}

static bool sample_is_due(const Run *run, int64_t step) {
    return run->options.sample_interval > 0 && step % run->options.sample_interval == 0;
}

static bool save_is_due(const Run *run, int64_t step) {
    return run->options.save[0] != '\0' && step % run->options.save_interval == 0;
}

bool run_needs_result(const Run *run, int64_t step) {
    return eval_is_due(run, step) || sample_is_due(run, step) || save_is_due(run, step) ||
           step >= run->options.train_iters || is_stopping(run) || run->progress.skipped_in_row > 0;
}

bool run_should_eval(const Run *run) {
    return !run->in_flight && run->progress.eval_left > 0;
}

bool run_should_validate(const Run *run) {
    return run->has_valid && run->progress.eval_left == eval_parts(run);
}

bool run_should_sample(const Run *run) {
    return !run->in_flight && run->group.rank == 0 && !run_stop_signal() && !is_stopping(run) &&
           sample_is_due(run, run->progress.step);
}

bool run_should_save(const Run *run) {
    int64_t step = run->progress.step;
    if (run->in_flight || run->options.save[0] == '\0' || step == run->saved_step) { return false; }
    return save_is_due(run, step) || !run_goes_on(run);
}

// ---- reports ------------------------------------------------------------------------------------

static const char *const skip_reasons[] = {"", "nonfinite", "spike", "requested"};
static const char *const skip_texts[] = {"", "SKIPPED", "SKIPPED: spike", "SKIPPED: requested"};

// Prints the line of a step that has been counted. Every --log-interval steps there is a whole
// line; on a terminal, the steps between are shown in a live line, which the next line overwrites.
// start_seconds: of the first step, the time from the program's start to it; 0 for later steps.
static void print_step(Run *run, StepResult s, double tokens_per_s, double start_seconds) {
    enum { LOSS = 1, NORM, LR, SPEED, USE, ETA, SKIPPED, FIELDS, FIELD = 64, WIDTH = 100 };
    static const int dropped[] = {USE, LR, NORM, ETA, SPEED}; // in this order, if too long
    const Progress *p = &run->progress;
    int64_t iters = run->options.train_iters;
    struct winsize size;
    int columns = 0; // of the terminal; 0: stdout is not a terminal
    if (isatty(STDOUT_FILENO)) {
        bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
        columns = known ? size.ws_col : 80;
    }
    bool whole = p->step % run->options.log_interval == 0 || p->step == iters || s.skipped ||
                 start_seconds > 0;
    if (!whole && (columns == 0 || wall_seconds() - run->last_line < 0.2)) { return; }
    if (!whole) { run->last_line = wall_seconds(); }

    char field[FIELDS][FIELD], line[FIELDS * (FIELD + 3)] = "", text[32];
    double peak = run->peak_flops * run->group.ranks;
    double flops = tokens_per_s * flops_per_token(&run->config);
    snprintf(field[0], FIELD, "step %5lld/%lld", (long long)p->step, (long long)iters);
    snprintf(field[LOSS], FIELD, "loss %s", format_number(text, s.loss));
    snprintf(field[NORM], FIELD, "norm %s", format_number(text, s.norm));
    snprintf(field[LR], FIELD, "lr %.2e", s.lr);
    snprintf(field[SPEED], FIELD, "%.0f tok/s", tokens_per_s);
    snprintf(field[USE], FIELD, peak > 0 ? "MFU %.1f%%" : "%.2f ms",
             peak > 0 ? 100 * flops / peak : 1e3 * s.seconds);
    format_duration(text, run->step_seconds * (double)(iters - p->step));
    snprintf(field[ETA], FIELD, "ETA %s", text);
    if (start_seconds > 0) { snprintf(field[ETA], FIELD, "start %.1f s", start_seconds); }
    snprintf(field[SKIPPED], FIELD, "%s", skip_texts[s.skipped]);

    int room = whole || columns > WIDTH ? WIDTH : columns - 1, length = -3;
    for (int i = 0; i < FIELDS; i++) { length += field[i][0] ? (int)strlen(field[i]) + 3 : 0; }
    for (size_t i = 0; length > room && i < sizeof(dropped) / sizeof(dropped[0]); i++) {
        length -= (int)strlen(field[dropped[i]]) + 3;
        field[dropped[i]][0] = '\0';
    }
    for (int i = 0; i < FIELDS; i++) {
        if (i > 0 && field[i][0] != '\0') { strcat(line, " | "); }
        strcat(line, field[i]);
    }
    printf("%s%.*s%s", line_start(STDOUT_FILENO), room, line, whole ? "\n" : "");
    run_flush(run);
}

// A loss is usual if it is at most half a nat above the lowest average over about 10 steps. Most
// batches of a good run have a usual loss, and one is enough; a run that has diverged has none.
static bool is_usual(double loss, double best) {
    return isfinite(loss) && !(loss > best + 0.5);
}

// Records that the last save has ended, for which this waits.
static void report_save(Run *run) {
    Saver *saver = &run->saver;
    if (!saver->pending) { return; }
    bool saved = saver_wait(saver);
    int64_t step = saver->snapshot.progress.step;
    MetricsRecord *r = metrics_begin("save");
    metrics_number(r, "step", (double)step);
    if (!saved) { metrics_text(r, "error", saver->why.text); }
    metrics_end(&run->metrics, r);
    if (saved) { return; }
    fail("saving the checkpoint of step %lld failed: %s", (long long)step, saver->why.text);
    saver->why = error_kept();
    if (run->group.rank == 0) { warn("%s", saver->why.text); }
}

void run_report(Run *run, StepResult s) {
    Progress *p = &run->progress;
    const Options *o = &run->options;
    if (saver_ended(&run->saver)) { report_save(run); }
    int64_t tokens = (int64_t)o->global_batch_size * o->seq_length;
    int64_t targets = run_step_targets(run, 0);
    p->step++;
    p->samples += o->global_batch_size;
    p->tokens += tokens;
    p->loss = s.loss;
    p->valid_loss = NAN;
    p->eval_left = eval_is_due(run, p->step) ? eval_parts(run) : 0;
    p->skipped += s.skipped != SKIP_NONE;
    // stays once the run has diverged, so that it ends again when it is resumed: the GPU trainer
    // has the next step in flight, which may be a good one
    bool counts = !run->diverged && s.skipped != SKIP_ASKED;
    if (counts) { p->skipped_in_row = s.skipped ? p->skipped_in_row + 1 : 0; }
    if (!s.skipped && is_usual(s.loss, p->best_level)) {
        p->level = isnan(p->level) ? s.loss : p->level + 0.1 * (s.loss - p->level);
        p->best_level = fmin(p->best_level, p->level);
        p->proven = run->saved_step;
    }
    run->diverged = p->skipped_in_row >= run->options.max_skipped;
    run->stopping = run->stopping || s.stop;
    if (s.skipped && run->group.ranks > 1 && !isfinite(s.own_loss)) {
        char loss[32];
        warn("step %lld is skipped: the loss of this rank's sequences is %s", (long long)p->step,
             format_number(loss, s.own_loss));
    }
    bool first = run->step_seconds == 0; // the first step of this process
    double start_seconds = first ? process_seconds() : 0;
    run->step_seconds += (first ? 1.0 : 0.05) * (s.seconds - run->step_seconds);
    print_step(run, s, (double)tokens / s.seconds, start_seconds);

    MetricsRecord *r = metrics_begin("step");
    metrics_number(r, "step", (double)p->step);
    metrics_number(r, "tokens", (double)p->tokens);
    if (run->train_data.with_targets != NULL) { metrics_number(r, "targets", (double)targets); }
    metrics_number(r, "loss", s.loss);
    metrics_number(r, "norm", s.norm);
    metrics_number(r, "lr", s.lr);
    metrics_number(r, "seconds", s.seconds);
    metrics_number(r, "tokens_per_s", (double)tokens / s.seconds);
    metrics_number(r, "skipped", s.skipped != SKIP_NONE);
    if (s.skipped) { metrics_text(r, "reason", skip_reasons[s.skipped]); }
    if (first) { metrics_number(r, "start_seconds", start_seconds); }
    metrics_end(&run->metrics, r);
    bool timed = !first && !isnan(s.own_seconds); // the first step also loads and plans
    run->own_seconds += timed ? s.own_seconds : 0;
    run->own_steps += timed;
    bool line = p->step % o->log_interval == 0 && run->own_steps > 0;
    if (run->group.ranks > 1 && line) { run_record_ranks(run); }
}

bool run_part_is_whole(Run *run) {
    bool whole = group_agree(&run->group, CHANNEL_MAIN, run_stop_signal() == 0);
    run->stopping = run->stopping || !whole;
    return whole;
}

// The fields of a snapshot that do not depend on the trainer.
static void describe(const Run *run, Snapshot *s) {
    s->options = &run->options;
    s->group = &run->group;
    s->layout = &run->layout;
    s->precision = &run->precision;
    s->progress = run->progress;
    s->data_windows = run->train_data.windows;
    s->data = run->train_data.identity;
    s->valid_tokens = run_eval_samples(run) * run->options.seq_length;
    s->valid_data = run->valid_data.identity;
    s->companions = run->companions;
    s->num_companions = run->num_companions;
    s->start_config = run->start_config;
    s->begin_of_text = run->has_tokenizer ? run->tokenizer.begin_of_text : -1;
    s->end_of_text = run->has_tokenizer ? run->tokenizer.end_of_text : -1;
}

void run_end_part(Run *run) {
    Progress *p = &run->progress;
    char path[PATH_LENGTH];
    p->eval_left--;
    bool saved = options_save(&run->options) && run->saved_step == p->step && run->group.rank == 0;
    if (!saved || !path_exists(checkpoint_path(path, run->options.save, p->step))) { return; }
    Snapshot s = {0};
    run_beat(run, DOING_PAUSE, "saving an evaluation");
    if (is_usual(p->valid_loss, p->best_valid_loss)) { p->proven = p->step; }
    describe(run, &s);
    if (!checkpoint_evaluated(&s)) {
        warn("the checkpoint of step %lld lacks its evaluation: %s", (long long)p->step,
             error_text());
    }
    run_beat(run, DOING_WAIT, "after a save");
}

void run_report_eval(Run *run, double loss, double seconds) {
    Progress *p = &run->progress;
    if (!run_part_is_whole(run)) { return; }
    p->valid_loss = loss;
    bool best = isfinite(loss) && !(loss >= p->best_valid_loss);
    if (best) { p->best_valid_loss = loss; }
    char text[32];
    fprintf(run->answers, "%seval after step %lld | valid loss %s%s | perplexity %.4g | %.1f s\n",
            line_start(fileno(run->answers)), (long long)p->step, format_number(text, loss),
            best && options_train(&run->options) ? " (best)" : "", isnan(loss) ? NAN : exp(loss),
            seconds);
    run_flush(run);
    MetricsRecord *r = metrics_begin("eval");
    metrics_number(r, "step", (double)p->step);
    metrics_number(r, "valid_loss", loss);
    metrics_number(r, "perplexity", exp(loss));
    metrics_number(r, "seconds", seconds);
    metrics_end(&run->metrics, r);
    run_end_part(run);
}

bool run_counts_fp8(const Run *run, int64_t step) {
    int64_t interval = run->options.fp8_stats_interval;
    return interval > 0 && step % interval == 0 && precision_fp8_share(&run->precision) > 0;
}

void run_maybe_dump(Run *run, float *gradients, double loss) {
    const char *path = run->options.dump_gradients;
    float value = (float)loss;
    TensorEntry *tensors;
    FileWriter w;
    if (path[0] == '\0') { return; }
    if (run->group.rank > 0) {
        group_close(&run->group);
        exit(EXIT_SUCCESS);
    }
    float factor = (float)(run->precision.step_tokens / (double)run_step_targets(run, 0));
    for (int64_t i = 0; i < run->layout.size; i++) { gradients[i] *= factor; }
    int count = hf_tensors(&run->layout, DTYPE_F32, gradients, &tensors);
    tensors = realloc_or_die(tensors, (size_t)(count + 1) * sizeof(TensorEntry));
    memmove(tensors + 1, tensors, (size_t)count * sizeof(TensorEntry));
    tensors[0] = tensor_entry("loss", DTYPE_F32, 1, 0, &value);
    if (!safetensors_write(&w, path, tensors, count + 1, NULL)) {
        die("--dump-gradients %s", error_text());
    }
    free(tensors);
    printf("loss %.6f; gradients in %s\n", loss, path);
    group_close(&run->group); // returns when all ranks have called it
    exit(EXIT_SUCCESS);
}

// If the folder of --save has been moved or deleted, makes it and the run's files in it again. If
// there is a copy of the folder, or a link to its new place, the run continues in that. The same
// for a file of metrics alone.
static void make_folder_anew(Run *run) {
    const Options *o = &run->options;
    if (is_folder(o->save, run->folder)) {
        if (metrics_moved(&run->metrics)) { run_record_start(run); }
        return;
    }
    warn("--save %s: the folder was moved or deleted; from step %lld on the run saves to a "
         "folder of that name again",
         o->save, (long long)run->progress.step);
    if (!folder_make(o->save)) {
        warn("--save %s", error_text());
        return;
    }
    if (!checkpoint_claim(o)) { die("--save %s", error_text()); } // it belongs to another run now
    if (!save_config(o)) { warn("--save %s", error_text()); }
    run->folder = folder_id(o->save);
    if (o->metrics[0] != '\0') { return; }
    metrics_close(&run->metrics);
    if (!open_metrics(run)) { warn("%s", error_text()); }
    run_record_start(run);
}

bool run_wait_for_save(Run *run) {
    run_beat(run, DOING_PAUSE, "waiting for the last save");
    report_save(run);
    run_beat(run, DOING_WAIT, "after a save"); // what follows has a time limit again
    return !run->saver.failed;
}

void run_save(Run *run, const Snapshot *snapshot) {
    Snapshot s = *snapshot;
    Progress *p = &run->progress;
    run_beat(run, DOING_PAUSE, "starting a save");
    report_save(run); // making the folder anew would delete the files of one that is under way
    if (run->group.rank == 0) { make_folder_anew(run); }
    if (is_usual(p->valid_loss, p->best_valid_loss)) { p->proven = p->step; }
    describe(run, &s);
    run->saved_step = p->step;
    metrics_sync(&run->metrics); // the records of a checkpoint's steps are on the disk before it is
    saver_start(&run->saver, &s);
    run_beat(run, DOING_WAIT, "after a save");
}

// Prints the command that resumes a saved run.
static void print_resume(const Run *run) {
    const Options *o = &run->options;
    char config[PATH_LENGTH], words[2][SHELL_WORD];
    bool started = run->group.ranks > 1 && o->gpus == 1; // by torchrun, srun or mpirun
    path_format(config, "%s/config.txt", o->save);
    printf("; saved; resume with %s%s --config %s --resume latest",
           started ? "the same starter and " : "", shell_word(words[0], o->program),
           shell_word(words[1], config));
}

int run_close(Run *run) {
    bool saved = run_wait_for_save(run);
    const Progress *p = &run->progress;
    bool stopped = is_stopping(run) && (p->step < run->options.train_iters || p->eval_left > 0);
    bool read = agree_on_data(run);
    Error why = error_kept();
    int status = !saved || !read ? EXIT_FAILURE // this goes before the other reasons
                 : run->diverged ? EXIT_TOO_MANY_SKIPPED
                 : stopped       ? EXIT_STOPPED_BY_SIGNAL
                                 : EXIT_SUCCESS;
    die_with(NULL);
    MetricsRecord *r = begin_end(run, status);
    if (!saved || !read) { metrics_text(r, "error", read ? run->saver.why.text : why.text); }
    if (run->used_bytes > 0) { metrics_number(r, "memory_used_bytes", run->used_bytes); }
    metrics_end(&run->metrics, r);
    if (!read || stopped) {
        char by[40] = "";
        if (read) { strcpy(by, " by a signal to another rank"); }
        if (read && run_stop_signal() != 0) {
            snprintf(by, sizeof(by), " by signal %d", run_stop_signal());
        }
        printf("%sstopped%s after step %lld%s%s", line_start(STDOUT_FILENO), by, (long long)p->step,
               read ? "" : ": ", read ? "" : why.text);
        if (options_save(&run->options) && saved) { print_resume(run); }
        printf("\n");
    } else if (run->diverged) {
        printf("%sstopped: %d steps in a row were skipped (--max-skipped)%s\n",
               line_start(STDOUT_FILENO), run->options.max_skipped,
               options_save(&run->options)
                   ? "; to go on, resume an earlier checkpoint, or with a larger --max-skipped"
                   : "");
    }
    metrics_close(&run->metrics);
    dataset_close(&run->train_data);
    dataset_close(&run->valid_data);
    choice_sets_close(&run->choices);
    if (run->has_tokenizer) { tokenizer_close(&run->tokenizer); }
    for (int i = 0; i < run->num_companions; i++) { free(run->companions[i].bytes); }
    free(run->start_config.bytes);
    free(run->prompt);
    free(run->held);
    run_free_configuration(run);
    group_close(&run->group);
    return status;
}

void run_end_wrong(Run *run) {
    Error why = error_kept();
    run_wait_for_save(run);
    if (run->group.rank == 0) { complain("%s", why.text); }
    MetricsRecord *r = begin_end(run, EXIT_WRONG_RESULTS);
    metrics_text(r, "error", why.text);
    metrics_end(&run->metrics, r);
    group_close(&run->group);
    exit(EXIT_WRONG_RESULTS);
}

// ---- what fits a memory -------------------------------------------------------------------------

static const char *const recompute_names[] = {"none", "activations", "block"};

// Sets a micro-batch size, and the least global batch size that has whole ones of it and is not
// below the requested one: whether a step has several decides the gradients' type.
static void set_micro_batch(Options *o, const Run *run, int size) {
    o->micro_batch_size = size;
    o->global_batch_size = (int)round_up64(run->options.global_batch_size,
                                           (int64_t)size * run->group.ranks);
}

// Returns 0 if not even one sequence fits.
static int largest_micro_batch(Options o, const Run *run, NumberSupport support, RunPlanner plan,
                               int64_t memory) {
    const Group *group = &run->group;
    int fits = 0;
    for (int step = 1 << 12; step > 0; step /= 2) {
        set_micro_batch(&o, run, fits + step);
        bool countable = (int64_t)o.micro_batch_size * o.seq_length <= INT32_MAX;
        if (countable && plan(&o, group, support, memory).device <= memory - FIT_OVERHEAD_BYTES) {
            fits += step;
        }
    }
    return fits;
}

void fit_print(const Run *run, NumberSupport support, RunPlanner plan, int64_t memory) {
    enum { WAYS = 2 * (STATE_BF16 + 1) * (RECOMPUTE_BLOCK + 1) };
    char size[32];
    printf("What fits %s\n", format_bytes(size, (double)memory));
    for (int way = 0; way < WAYS; way++) {
        Options o = run->options;
        o.recompute = way % (RECOMPUTE_BLOCK + 1);
        o.adam_dtype = way / (RECOMPUTE_BLOCK + 1) % (STATE_BF16 + 1);
        o.optimizer_cpu_offload = way >= WAYS / 2;
        int micro = largest_micro_batch(o, run, support, plan, memory);
        o.deterministic = false;
        int any_order = largest_micro_batch(o, run, support, plan, memory);
        o.deterministic = micro > 0 && run->options.deterministic;
        set_micro_batch(&o, run, (int)max64(1, micro > 0 ? micro : any_order));
        double host = plan(&o, &run->group, support, memory).host;
        printf("  --recompute %-11s --adam-dtype %s %s  ", recompute_names[o.recompute],
               o.adam_dtype == STATE_BF16 ? "bf16" : "fp32",
               o.optimizer_cpu_offload ? "--optimizer-cpu-offload" : "");
        printf(micro > 0 ? "--micro-batch-size %d" : "no micro-batch", micro);
        if (any_order > micro) { printf("; %d with --no-deterministic", any_order); }
        if (any_order > 0 && o.optimizer_cpu_offload) {
            printf("; %s of host memory", format_bytes(size, host));
        }
        printf("\n");
    }
}
