#include "run.h"
#include "../checkpoints/hugging_face.h"
#include "metrics.h"
#include "run_data.h"
#include "save_folder.h"
#include "start.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

// ---- schedule -----------------------------------------------------------------------------------

// Whether the run stops early. A single rank stops when it has received a signal; several ranks
// stop when they have agreed to stop.
static bool is_stopping(const Run *run) {
    return run->group.ranks > 1 ? run->stopping : run_stop_signal() != 0;
}

bool run_has_steps(const Run *run) {
    return options_train(&run->options) && run->progress.step < run->options.train_iters;
}

bool run_goes_on(const Run *run) {
    return run_has_steps(run) && !is_stopping(run) && !run_has_diverged(run);
}

bool run_needs_result(const Run *run, int64_t step) {
    const Options *o = &run->options;
    return (eval_is_due(o, step) && run_can_eval(run)) || sample_is_due(o, step) ||
           save_is_due(o, step) || step >= o->train_iters || is_stopping(run) ||
           run->progress.skipped_in_row > 0;
}

bool run_should_sample(const Run *run) {
    return run->group.rank == 0 && !run_stop_signal() && !is_stopping(run) &&
           sample_is_due(&run->options, run->progress.step);
}

bool run_should_save(const Run *run) {
    int64_t step = run->progress.step;
    if (run->options.save[0] == '\0' || step == run->saves.step) { return false; }
    return save_is_due(&run->options, step) || !run_goes_on(run);
}

// ---- reports ------------------------------------------------------------------------------------

// For each SkipReason: the word in metrics.jsonl, and the text on the step's line.
static const char *const skip_texts[][2] = {
    [SKIP_NONE] = {"", ""},
    {"nonfinite", "SKIPPED"},
    {"spike", "SKIPPED: spike"},
    {"requested", "SKIPPED: requested"},
};

// Adds a step to the run's progress.
static void count_step(Run *run, const StepResult *s) {
    Progress *p = &run->progress;
    const Options *o = &run->options;
    p->step++;
    p->samples += o->global_batch_size;
    p->tokens += (int64_t)run->precision.step_tokens;
    p->loss = s->loss;
    p->valid_loss = NAN;
    p->eval_left = eval_is_due(o, p->step) && run_can_eval(run);
    p->skipped += s->skipped != SKIP_NONE;
    // After divergence skipped_in_row does not change, so that a resumed run ends again. Otherwise
    // a good step that the GPU trainer still has in flight would reset it.
    bool counts = !run_has_diverged(run) && s->skipped != SKIP_REQUESTED;
    if (counts) { p->skipped_in_row = s->skipped ? p->skipped_in_row + 1 : 0; }
    if (!s->skipped && is_usual(s->loss, p->best_level)) {
        p->level = isnan(p->level) ? s->loss : p->level + 0.1 * (s->loss - p->level);
        p->best_level = fmin(p->best_level, p->level);
        p->last_good = run->saves.step;
    }
    run->stopping = run->stopping || s->stop;
}

// Returns the columns of the terminal, or 0 if the standard output is not a terminal.
static int terminal_columns(void) {
    struct winsize size;
    if (!isatty(STDOUT_FILENO)) { return 0; }
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : 80;
}

// Prints the line of a step: a line that stays or, on a terminal, a live line, which the next line
// overwrites. Fields are left out if the line is longer than 100 columns, or if a live line is
// wider than the terminal. start_seconds: for the first step of this process, the seconds since the
// process started; for later steps, 0.
static void print_step(Run *run, const StepResult *s, double start_seconds) {
    enum { LOSS = 1, NORM, LR, SPEED, USE, ETA, SKIPPED, FIELDS, FIELD = 64, WIDTH = 100 };
    // the order in which fields are left out of a line that is too long
    static const int dropped[] = {USE, LR, NORM, ETA, SPEED};
    Console *c = &run->console;
    int64_t step = run->progress.step, steps = run->options.train_iters;
    bool first = start_seconds > 0;
    bool whole = first || s->skipped || step % run->options.log_interval == 0 || step == steps;
    double speed = run->precision.step_tokens / s->seconds;
    double peak = run->peak_flops * run->group.ranks;
    int columns = terminal_columns();
    c->step_seconds += (first ? 1.0 : 0.05) * (s->seconds - c->step_seconds);
    if (!whole && (columns == 0 || wall_seconds() - c->last_line < 0.2)) { return; }
    if (!whole) { c->last_line = wall_seconds(); }

    char field[FIELDS][FIELD], line[FIELDS * (FIELD + 3)] = "", text[32];
    snprintf(field[0], FIELD, "step %5lld/%lld", (long long)step, (long long)steps);
    snprintf(field[LOSS], FIELD, "loss %s", format_number(text, s->loss));
    snprintf(field[NORM], FIELD, "norm %s", format_number(text, s->norm));
    snprintf(field[LR], FIELD, "lr %.2e", s->lr);
    snprintf(field[SPEED], FIELD, "%.0f tok/s", speed);
    snprintf(field[USE], FIELD, peak > 0 ? "MFU %.1f%%" : "%.2f ms",
             peak > 0 ? 100 * speed * flops_per_token(&run->config) / peak : 1e3 * s->seconds);
    format_duration(text, c->step_seconds * (double)(steps - step));
    snprintf(field[ETA], FIELD, "ETA %s", text);
    if (first) { snprintf(field[ETA], FIELD, "start %.1f s", start_seconds); }
    snprintf(field[SKIPPED], FIELD, "%s", skip_texts[s->skipped][1]);

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
    console_flush(run);
}

static void record_step(Run *run, const StepResult *s, double start_seconds) {
    MetricsRecord *r = metrics_begin("step");
    metrics_number(r, "step", (double)run->progress.step);
    metrics_number(r, "tokens", (double)run->progress.tokens);
    if (run->train_data.masked) {
        // -1, because progress already counts the reported step
        metrics_number(r, "targets", (double)run_step_targets(run, -1));
    }
    run_record_sources(run, r);
    metrics_number(r, "loss", s->loss);
    metrics_number(r, "norm", s->norm);
    metrics_number(r, "lr", s->lr);
    metrics_number(r, "seconds", s->seconds);
    metrics_number(r, "tokens_per_s", run->precision.step_tokens / s->seconds);
    metrics_number(r, "skipped", s->skipped != SKIP_NONE);
    if (s->skipped) { metrics_text(r, "reason", skip_texts[s->skipped][0]); }
    if (start_seconds > 0) { metrics_number(r, "start_seconds", start_seconds); }
    metrics_end(&run->metrics, r);
}

void run_report(Run *run, StepResult s) {
    bool first = run->console.step_seconds == 0; // the first step of this process
    double start_seconds = first ? process_seconds() : 0;
    if (saver_ended(&run->saves.saver)) { run_wait_for_save(run); }
    count_step(run, &s);
    int64_t step = run->progress.step;
    if (s.skipped && run->group.ranks > 1 && !isfinite(s.own_loss)) {
        char loss[32];
        warn("step %lld is skipped: the loss of this rank's sequences is %s", (long long)step,
             format_number(loss, s.own_loss));
    }
    print_step(run, &s, start_seconds);
    record_step(run, &s, start_seconds);
    // the time of the first step does not count, because that step also loads kernels and makes
    // plans
    bool timed = !first && !isnan(s.own_seconds);
    run->own_seconds += timed ? s.own_seconds : 0;
    run->own_steps += timed;
    bool due = step % run->options.log_interval == 0 && run->own_steps > 0;
    if (run->group.ranks > 1 && due) { run_record_ranks(run); }
}

bool run_part_is_whole(Run *run) {
    bool whole = group_agree(&run->group, CHANNEL_MAIN, run_stop_signal() == 0);
    run->stopping = run->stopping || !whole;
    return whole;
}

void run_report_eval(Run *run, const double *losses, double seconds) {
    Progress *p = &run->progress;
    const Mixture *valid = &run->valid_data;
    double loss = 0;
    int64_t targets = 0;
    for (int i = 0; i < valid->count; i++) {
        loss += blend_share(&valid->blend, i) * losses[i];
        targets += run_eval_targets(run, i);
    }
    if (!run_part_is_whole(run)) { return; }
    p->valid_loss = loss;
    bool best = isfinite(loss) && !(loss >= p->best_valid_loss);
    if (best) { p->best_valid_loss = loss; }
    char text[32];
    int64_t samples = run_eval_all_samples(run);
    fprintf(run->console.answers,
            "%seval after step %lld | valid loss %s%s | perplexity %.4g | %s sequence%s, "
            "%s tokens | %.1f s\n",
            line_start(fileno(run->console.answers)), (long long)p->step, format_number(text, loss),
            best && options_train(&run->options) ? " (best)" : "", isnan(loss) ? NAN : exp(loss),
            format_count((char[32]){0}, samples), plural(samples),
            format_count((char[32]){0}, targets), seconds);
    for (int i = 0; i < valid->count && valid->count > 1; i++) {
        fprintf(run->console.answers, "  valid loss %s of %s\n", format_number(text, losses[i]),
                valid->sources[i].pattern);
    }
    console_flush(run);
    MetricsRecord *r = metrics_begin("eval");
    metrics_number(r, "step", (double)p->step);
    metrics_number(r, "valid_loss", loss);
    metrics_number(r, "perplexity", exp(loss));
    if (valid->count > 1) { metrics_numbers(r, "source_losses", losses, valid->count); }
    metrics_number(r, "seconds", seconds);
    metrics_end(&run->metrics, r);
}

bool run_counts_fp8(const Run *run, int64_t step) {
    int64_t interval = run->options.fp8_stats_interval;
    return interval > 0 && step % interval == 0 && precision_fp8_share(&run->precision) > 0;
}

void run_dump(Run *run, float *gradients, double loss) {
    const char *path = run->options.dump_gradients;
    float value = (float)loss;
    FREED TensorEntry *tensors = NULL;
    FileWriter w;
    if (run->group.rank == 0) {
        float factor = (float)(run->precision.step_tokens / (double)run_step_targets(run, 0));
        for (int64_t i = 0; i < run->layout.size; i++) { gradients[i] *= factor; }
        int count = hf_tensors(&run->layout, DTYPE_F32, gradients, &tensors);
        tensors = realloc_or_die(tensors, (size_t)(count + 1) * sizeof(TensorEntry));
        tensors[count++] = tensor_entry("loss", DTYPE_F32, 1, 0, &value);
        if (!safetensors_write(&w, path, tensors, count, NULL)) {
            die("--dump-gradients %s", error_text());
        }
        printf("loss %.6f; gradients in %s\n", loss, path);
    }
    group_close(&run->group); // returns when all ranks have called it
    exit(EXIT_SUCCESS);
}

// ---- end ----------------------------------------------------------------------------------------

// Prints the tokens and epochs that the run has read of each source of a mixture, in all its steps.
static void print_sources(const Run *run) {
    const Mixture *m = &run->train_data;
    if (!options_train(&run->options)) { return; }
    for (int i = 0; i < m->count && m->count > 1; i++) {
        int64_t samples = blend_count(&m->blend, i, run->progress.samples);
        printf("source %s: %s tokens, %.2f epochs\n", m->sources[i].pattern,
               format_count((char[32]){0}, samples * run->options.seq_length),
               (double)samples / (double)m->data[i].windows);
    }
}

int run_close(Run *run) {
    bool saved = run_wait_for_save(run);
    const Progress *p = &run->progress;
    bool stopped = is_stopping(run) && (p->step < run->options.train_iters || p->eval_left);
    const char *fault = run->data_fault.text;
    // if some rank could not read its data, error_text() is then the first such rank's error
    bool read = group_agree(&run->group, CHANNEL_MAIN, fault[0] == '\0' || fail("%s", fault));
    Error why = error_kept();
    int status = !saved || !read ? EXIT_FAILURE // this status has precedence over the others
                 : run_has_diverged(run) ? EXIT_TOO_MANY_SKIPPED
                 : stopped               ? EXIT_STOPPED_BY_SIGNAL
                                         : EXIT_SUCCESS;
    run_record_end(run, status, !read ? why.text : !saved ? run->saves.saver.why.text : NULL);
    if (!read || stopped) {
        const long long step = p->step;
        printf("%s", line_start(STDOUT_FILENO));
        if (!read) {
            printf("stopped after step %lld: %s", step, why.text);
        } else if (run_stop_signal() != 0) {
            printf("stopped by signal %d after step %lld", run_stop_signal(), step);
        } else {
            printf("stopped by a signal to another rank after step %lld", step);
        }
        if (options_save(&run->options) && saved) { save_folder_print_resume(run); }
        printf("\n");
    } else if (run_has_diverged(run)) {
        printf("%sstopped: %d steps in a row were skipped (--max-skipped)%s\n",
               line_start(STDOUT_FILENO), run->options.max_skipped,
               options_save(&run->options)
                   ? "; to go on, resume an earlier checkpoint, or with a larger --max-skipped"
                   : "");
    }
    print_sources(run);
    metrics_close(&run->metrics);
    mixture_close(&run->train_data);
    mixture_close(&run->valid_data);
    choice_sets_close(&run->choices);
    tokenizer_close(&run->tokenizer);
    for (int i = 0; i < COMPANIONS; i++) { free(run->saves.companions[i].bytes); }
    free(run->saves.start_config.bytes);
    free(run->beside);
    free(run->prompt);
    free(run->prefetched);
    run_free_configuration(run);
    group_close(&run->group);
    return status;
}

void run_end_wrong(Run *run) {
    Error why = error_kept();
    run_wait_for_save(run);
    if (run->group.rank == 0) { complain("%s", why.text); }
    run_record_end(run, EXIT_WRONG_RESULTS, why.text);
    group_close(&run->group);
    exit(EXIT_WRONG_RESULTS);
}
