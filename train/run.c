#include "run.h"
#include "../checkpoints/hugging_face.h"
#include "../ranks/launch.h"
#include "metrics.h"
#include "run_data.h"
#include "save_folder.h"
#include "start.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---- start --------------------------------------------------------------------------------------

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
    if (o->export_to[0] != '\0') {
        run_export(run);
        exit_answered();
    }
    if (run->group.rank == 0 && !o->plan) {
        console_open(&run->console, options_train(o), o->quiet);
    }
    options_print(o, o->plan, stdout);
    precision_print(p);
    bool no_fp8 = p->format != FP8_FORMAT_NONE && p->possible && precision_fp8_share(p) == 0;
    if (no_fp8 && run->group.rank == 0) {
        if (o->fp8_required) {
            die("--fp8-required: no linear layer is in FP8; the table above says why");
        }
        warn("no linear layer is in FP8: the table above says why; the run continues without FP8");
    }
    if (o->plan) { // scripts/estimate reads these lines
        printf("Model\n  parameters    %lld\n  FLOPs a token %.6g\n",
               (long long)run->layout.num_parameters, flops_per_token(&run->config));
    }
}

// Whether every rank could read its data. If not, error_text() is the error of the first rank that
// could not.
static bool agree_on_data(const Run *run) {
    const char *fault = run->data_fault.text;
    return group_agree(&run->group, CHANNEL_MAIN, fault[0] == '\0' || fail("%s", fault));
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
    run_open_tokenizer(run);
    run_check_data(run);
    save_folder_open(run);
    if (options_train(o)) { run_catch_signals(); } // other runs have nothing to save
    if (run->train_data.windows == 0) { return; }
    int micro_batches = run_micro_batches(run) * run->group.ranks;
    if (run->group.ranks > 1) { printf("  ranks       %d\n", run->group.ranks); }
    printf("  schedule    %lld step%s of %lld tokens (%d x %d micro-batch%s), %.2f epochs\n",
           (long long)o->train_iters, plural(o->train_iters),
           (long long)o->global_batch_size * o->seq_length, micro_batches,
           o->micro_batch_size * o->seq_length, micro_batches > 1 ? "es" : "",
           (double)o->train_iters * o->global_batch_size / (double)run->train_data.windows);
    if (options_save(o)) {
        printf("  saves       every %lld step%s to %s\n", (long long)o->save_interval,
               plural(o->save_interval), o->save);
    } else if (options_train(o)) {
        printf("  saves       nothing: no --save\n");
    }
    fflush(stdout);
    if (run->group.rank > 0) { return; }
    if (options_train(o)) { warn_of_schedule(o); }
    if (options_train(o) && o->resumes && !options_save(o)) {
        warn("--resume %s without --save: nothing is saved from here on", o->resume);
    }
}

// Reads run->progress from the checkpoint that --resume names. Rank 0 verifies it.
static void restore(Run *run) {
    const Options *o = &run->options;
    Checkpoint *checkpoint = &run->start;
    run_beat(run, DOING_PAUSE, "reading the checkpoint");
    bool whole = checkpoint_complete(checkpoint, run->group.rank == 0) ||
                 fail("--resume %s; --list-checkpoints shows which are whole", error_text());
    or_die(group_agree(&run->group, CHANNEL_MAIN, whole));
    run->progress = checkpoint->progress;
    run->saves.step = checkpoint->progress.step;
    printf("resuming from %s: step %lld, %lld tokens\n", checkpoint->path,
           (long long)run->progress.step, (long long)run->progress.tokens);
    or_die(checkpoint_match(checkpoint, o, &run->layout));
    run->progress.samples = run->progress.tokens / o->seq_length; // by this run's --seq-length
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
    if (run->group.rank == 0) {
        Options was;
        or_die(checkpoint_options(checkpoint, o, &was));
        warn_of_jump(o, &was, run->progress.step);
    }
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

static Run *recorded; // the run whose metrics have a record of its start, and none of its end

// error: why the run has failed; NULL: it has not.
static void record_end(Run *run, int status, const char *error) {
    MetricsRecord *r = metrics_begin("end");
    metrics_number(r, "step", (double)run->progress.step);
    metrics_number(r, "status", status);
    if (error != NULL) { metrics_text(r, "error", error); }
    if (run->used_bytes > 0) { metrics_number(r, "memory_used_bytes", run->used_bytes); }
    run_record_sources(run, r);
    metrics_end(&run->metrics, r);
}

static void record_error(const char *error) {
    record_end(recorded, EXIT_FAILURE, error);
}

// Whether --max-skipped steps in a row were skipped.
static bool has_diverged(const Run *run) {
    const Options *o = &run->options;
    return options_train(o) && run->progress.skipped_in_row >= o->max_skipped;
}

static bool can_eval(const Run *run) {
    return run->valid_data.count > 0 || run->choices.count > 0;
}

// config.txt and the record of the start are written when it is certain that the run can start, and
// has something to train or to evaluate. Until then, the files of an earlier run do not change.
void run_restore(Run *run) {
    const Options *o = &run->options;
    Progress *p = &run->progress;
    if (o->resumes) {
        restore(run);
    } else if (o->resume[0] != '\0') {
        printf("no checkpoint under %s yet: starting from step 0\n", o->save);
    }
    // an evaluation or a sample of --load's weights has their checkpoint's step; a run that trains
    // them counts from 0
    if (!o->resumes && !options_train(o)) { p->step = run->start.progress.step; }
    // a signal may have cut the checkpoint's evaluation
    p->eval_left = can_eval(run) && (p->eval_left > 0 || !options_train(o));
    bool goes_on = !o->resumes || p->eval_left || (p->step < o->train_iters && !has_diverged(run));
    if (!o->resumes && o->load[0] != '\0') {
        verify_load(run);
    } else if (!o->resumes && !options_train(o) && run->group.rank == 0) {
        warn("the weights are random: no checkpoint is loaded (--load, --resume)");
    }
    if (run->group.rank == 0 && options_save(o) && goes_on) { save_folder_begin(run); }
    // a record of this start would make the records of later steps void (metrics.c)
    if (options_train(o) && !goes_on) {
        metrics_close(&run->metrics);
        run->metrics.path[0] = '\0';
    }
    run_record_start(run);
    recorded = run;
    die_with(record_error);
}

// Fails with the name of the first tensor that has NaN, or a value above `most`, in elements
// begin..end of the parameter space.
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
void run_read_state(const Run *run, int array, int64_t begin, int64_t end, float *out) {
    static bool said;
    const Checkpoint *c = &run->start;
    or_die(checkpoint_read(c, array, begin, end, out, NULL, NULL));
    if (said || check_values(run, begin, end, out, FLT_MAX)) { return; }
    warn("%s: %s (%s); resume with an earlier checkpoint", c->path, error_text(),
         state_names[array]);
    said = true;
}

void run_read_scaling(const Run *run, Fp8Scale *scales, float *history) {
    const Precision *p = &run->precision;
    for (int i = 0; i < fp8_slot_count(&run->config); i++) {
        scales[i] = (Fp8Scale){.scale_inv = 1.0f, .scale = 1.0f};
    }
    if (run->options.resumes && history != NULL) {
        or_die(checkpoint_read_scaling(&run->start, p, scales, history));
    }
    fp8_fix_slot(p, &run->options, scales);
}

void run_first_weights(Run *run, int64_t begin, int64_t end, float *out) {
    const float FP16_MOST = 65504; // weights of a trained model are far smaller
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
    // a wrong bit in an exponent gives a value above FP16_MOST
    if (said || check_values(run, begin, end, out, FP16_MOST)) { return; }
    warn("--load %s: %s: is the file damaged?", run->start.path, error_text());
    said = true;
}

// ---- schedule -----------------------------------------------------------------------------------

// Several ranks stop when they have agreed to stop; a single one, when a signal has come.
static bool is_stopping(const Run *run) {
    return run->group.ranks > 1 ? run->stopping : run_stop_signal() != 0;
}

bool run_has_steps(const Run *run) {
    return options_train(&run->options) && run->progress.step < run->options.train_iters;
}

bool run_goes_on(const Run *run) {
    return run_has_steps(run) && !is_stopping(run) && !has_diverged(run);
}

bool run_needs_result(const Run *run, int64_t step) {
    const Options *o = &run->options;
    return (eval_is_due(o, step) && can_eval(run)) || sample_is_due(o, step) ||
           save_is_due(o, step) || step >= o->train_iters || is_stopping(run) ||
           run->progress.skipped_in_row > 0;
}

bool run_should_eval(const Run *run) {
    return run->progress.eval_left;
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

// Why a step was skipped, in metrics.jsonl and on its line.
static const char *const skip_texts[][2] = {
    [SKIP_NONE] = {"", ""},
    {"nonfinite", "SKIPPED"},
    {"spike", "SKIPPED: spike"},
    {"requested", "SKIPPED: requested"},
};

void run_report(Run *run, StepResult s) {
    Progress *p = &run->progress;
    const Options *o = &run->options;
    if (saver_ended(&run->saves.saver)) { run_wait_for_save(run); }
    int64_t tokens = (int64_t)o->global_batch_size * o->seq_length;
    int64_t targets = run_step_targets(run, 0);
    p->step++;
    p->samples += o->global_batch_size;
    p->tokens += tokens;
    p->loss = s.loss;
    p->valid_loss = NAN;
    p->eval_left = eval_is_due(o, p->step) && can_eval(run);
    p->skipped += s.skipped != SKIP_NONE;
    // once the run has diverged, skipped_in_row does not change, so that a resumed run ends again:
    // the GPU trainer still has a step in flight, which may be a good one and would reset it
    bool counts = !has_diverged(run) && s.skipped != SKIP_ASKED;
    if (counts) { p->skipped_in_row = s.skipped ? p->skipped_in_row + 1 : 0; }
    if (!s.skipped && is_usual(s.loss, p->best_level)) {
        p->level = isnan(p->level) ? s.loss : p->level + 0.1 * (s.loss - p->level);
        p->best_level = fmin(p->best_level, p->level);
        p->proven = run->saves.step;
    }
    run->stopping = run->stopping || s.stop;
    if (s.skipped && run->group.ranks > 1 && !isfinite(s.own_loss)) {
        char loss[32];
        warn("step %lld is skipped: the loss of this rank's sequences is %s", (long long)p->step,
             format_number(loss, s.own_loss));
    }
    Console *c = &run->console;
    bool first = c->step_seconds == 0; // the first step of this process
    double start_seconds = first ? process_seconds() : 0, speed = (double)tokens / s.seconds;
    c->step_seconds += (first ? 1.0 : 0.05) * (s.seconds - c->step_seconds);
    double peak = run->peak_flops * run->group.ranks;
    StepLine line = {
        .step = p->step,
        .steps = o->train_iters,
        .loss = s.loss,
        .norm = s.norm,
        .lr = s.lr,
        .seconds = s.seconds,
        .tokens_per_s = speed,
        .use = peak > 0 ? speed * flops_per_token(&run->config) / peak : 0,
        .start_seconds = start_seconds,
        .skipped = skip_texts[s.skipped][1],
        .whole = first || s.skipped || p->step % o->log_interval == 0 || p->step == o->train_iters,
    };
    console_step(c, &line);
    run_flush(run);

    MetricsRecord *r = metrics_begin("step");
    metrics_number(r, "step", (double)p->step);
    metrics_number(r, "tokens", (double)p->tokens);
    if (run->train_data.masked) { metrics_number(r, "targets", (double)targets); }
    run_record_sources(run, r);
    metrics_number(r, "loss", s.loss);
    metrics_number(r, "norm", s.norm);
    metrics_number(r, "lr", s.lr);
    metrics_number(r, "seconds", s.seconds);
    metrics_number(r, "tokens_per_s", speed);
    metrics_number(r, "skipped", s.skipped != SKIP_NONE);
    if (s.skipped) { metrics_text(r, "reason", skip_texts[s.skipped][0]); }
    if (first) { metrics_number(r, "start_seconds", start_seconds); }
    metrics_end(&run->metrics, r);
    // the first step also loads and plans, so its time does not count
    bool timed = !first && !isnan(s.own_seconds);
    run->own_seconds += timed ? s.own_seconds : 0;
    run->own_steps += timed;
    bool due = p->step % o->log_interval == 0 && run->own_steps > 0;
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
            "%seval after step %lld | valid loss %s%s | perplexity %.4g | %lld sequence%s, "
            "%lld tokens | %.1f s\n",
            line_start(fileno(run->console.answers)), (long long)p->step, format_number(text, loss),
            best && options_train(&run->options) ? " (best)" : "", isnan(loss) ? NAN : exp(loss),
            (long long)samples, plural(samples), (long long)targets, seconds);
    for (int i = 0; i < valid->count && valid->count > 1; i++) {
        fprintf(run->console.answers, "  valid loss %s of %s\n", format_number(text, losses[i]),
                valid->sources[i].pattern);
    }
    run_flush(run);
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

void run_maybe_dump(Run *run, float *gradients, double loss) {
    const char *path = run->options.dump_gradients;
    float value = (float)loss;
    TensorEntry *tensors;
    FileWriter w;
    if (path[0] == '\0') { return; }
    if (run->group.rank == 0) {
        float factor = (float)(run->precision.step_tokens / (double)run_step_targets(run, 0));
        for (int64_t i = 0; i < run->layout.size; i++) { gradients[i] *= factor; }
        int count = hf_tensors(&run->layout, DTYPE_F32, gradients, &tensors);
        tensors = realloc_or_die(tensors, (size_t)(count + 1) * sizeof(TensorEntry));
        tensors[count++] = tensor_entry("loss", DTYPE_F32, 1, 0, &value);
        if (!safetensors_write(&w, path, tensors, count, NULL)) {
            die("--dump-gradients %s", error_text());
        }
        free(tensors);
        printf("loss %.6f; gradients in %s\n", loss, path);
    }
    group_close(&run->group); // returns when all ranks have called it
    exit(EXIT_SUCCESS);
}

// Prints what the run has read of each source of a mixture, in all its steps so far.
static void print_sources(const Run *run) {
    const Mixture *m = &run->train_data;
    if (!options_train(&run->options)) { return; }
    for (int i = 0; i < m->count && m->count > 1; i++) {
        int64_t samples = blend_count(&m->blend, i, run->progress.samples);
        printf("source %s: %lld tokens, %.2f epochs\n", m->sources[i].pattern,
               (long long)samples * run->options.seq_length,
               (double)samples / (double)m->data[i].windows);
    }
}

int run_close(Run *run) {
    bool saved = run_wait_for_save(run);
    const Progress *p = &run->progress;
    bool stopped = is_stopping(run) && (p->step < run->options.train_iters || p->eval_left);
    bool read = agree_on_data(run);
    Error why = error_kept();
    int status = !saved || !read     ? EXIT_FAILURE // this status has precedence over the others
                 : has_diverged(run) ? EXIT_TOO_MANY_SKIPPED
                 : stopped           ? EXIT_STOPPED_BY_SIGNAL
                                     : EXIT_SUCCESS;
    die_with(NULL);
    record_end(run, status, !read ? why.text : !saved ? run->saves.saver.why.text : NULL);
    if (!read || stopped) {
        char by[40] = "";
        if (read) { strcpy(by, " by a signal to another rank"); }
        if (read && run_stop_signal() != 0) {
            snprintf(by, sizeof(by), " by signal %d", run_stop_signal());
        }
        printf("%sstopped%s after step %lld%s%s", line_start(STDOUT_FILENO), by, (long long)p->step,
               read ? "" : ": ", read ? "" : why.text);
        if (options_save(&run->options) && saved) { save_folder_print_resume(run); }
        printf("\n");
    } else if (has_diverged(run)) {
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
    for (int i = 0; i < run->saves.num_companions; i++) { free(run->saves.companions[i].bytes); }
    free(run->saves.start_config.bytes);
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
    record_end(run, EXIT_WRONG_RESULTS, why.text);
    group_close(&run->group);
    exit(EXIT_WRONG_RESULTS);
}
