#include "run.h"
#include "../checkpoints/hugging_face.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

bool run_configure(Run *run, const Options *options, NumberSupport support, Error *err) {
    *run = (Run){.options = *options, .saved_step = -1};
    run->rank = options->rank;
    run->ranks = options->ranks;
    run->group = options->group;
    run->progress = (Progress){.loss = NAN, .valid_loss = NAN, .best_valid_loss = NAN};
    if (!options_finish_batch(&run->options, run->ranks, err)) { return false; }
    run->config = model_config(options);
    run->layout = param_layout(&run->config);
    run->precision = precision_decide(options, &run->config, support);
    return true;
}

void run_free_configuration(Run *run) {
    precision_free(&run->precision);
    param_layout_free(&run->layout);
}

void run_print_size(const Run *run) {
    printf("Model\n  parameters    %lld\n  FLOPs a token %.6g\n",
           (long long)run->layout.num_parameters, flops_per_token(&run->config));
}

static void check_for_fp8(const Run *run) {
    const Precision *p = &run->precision;
    bool none = p->format != FP8_FORMAT_NONE && p->possible && precision_fp8_share(p) == 0;
    if (!none || run->rank > 0) { return; }
    if (run->options.fp8_required) {
        die("--fp8-required: no linear layer is in FP8; the table above says why");
    }
    warn("no linear layer is in FP8: the table above says why; the run goes on without");
}

void run_announce(const Run *run) {
    Error err;
    if (run->options.list_checkpoints) {
        if (!checkpoint_list(run->options.save, &err)) { die("%s", err.text); }
        exit(EXIT_SUCCESS);
    }
    if (run->options.list_tensors) {
        hf_list(&run->layout, stdout);
        exit(EXIT_SUCCESS);
    }
    options_print(&run->options, stdout);
    precision_print(&run->precision);
    check_for_fp8(run);
    if (run->options.plan) { run_print_size(run); }
}

// A run that starts from nothing would write over another's checkpoints, and prune them.
static void refuse_a_taken_folder(const Options *o) {
    int64_t *steps;
    int count = checkpoint_steps(o->save, &steps);
    if (o->resume[0] == '\0' && count > 0) {
        die("--save %s: a run has saved there up to step %lld; go on with it by --resume latest, "
            "or give another --save",
            o->save, (long long)steps[0]);
    }
    free(steps);
}

static void open_metrics(Run *run) {
    const Options *o = &run->options;
    Error err;
    char path[PATH_LENGTH];
    bool named = o->metrics[0] != '\0';
    if (o->sample_only || (!named && !options_save(o))) { return; }
    path_format(path, "%s%s", named ? o->metrics : o->save, named ? "" : "/metrics.jsonl");
    if (!metrics_open(&run->metrics, path, &err)) {
        die("--%s %s", named ? "metrics" : "save", err.text);
    }
}

static void open_save_folder(Run *run) {
    const Options *o = &run->options;
    Error err;
    if (run->rank > 0) { return; }
    if (options_save(o)) { refuse_a_taken_folder(o); }
    if (options_save(o) && (!folder_make(o->save, &err) || !checkpoint_sweep(o->save, &err))) {
        die("--save %s", err.text);
    }
    open_metrics(run);
    if (options_save(o) && run->has_valid && o->save_interval % o->eval_interval != 0) {
        printf(
            "  note: --save-interval %lld is not a multiple of --eval-interval %lld: a checkpoint "
            "without an evaluation cannot become `best`\n",
            (long long)o->save_interval, (long long)o->eval_interval);
    }
}

void run_start(Run *run, const char *device) {
    const Options *o = &run->options;
    snprintf(run->device, sizeof(run->device), "%s", device);
    printf("Run\n  device      %s\n  model       %lld parameters\n", device,
           (long long)run->layout.num_parameters);
    run_beat(run, DOING_WORK, "opening the data");
    run_open_data(run);
    ranks_check_data(run);
    open_save_folder(run);
    ranks_check_folder(run);
    run_catch_signals();
    if (run->train_data.windows == 0) { return; }
    int64_t step_tokens = (int64_t)o->global_batch_size * o->seq_length;
    if (run->ranks > 1) {
        printf("  ranks       %d, --zero-stage %d\n", run->ranks, o->zero_stage);
    }
    printf("  schedule    %lld steps of %lld tokens (%d x %d micro-batch%s), %.2f epochs\n",
           (long long)o->train_iters, (long long)step_tokens, run_micro_batches(run) * run->ranks,
           o->micro_batch_size * o->seq_length, run_micro_batches(run) * run->ranks > 1 ? "es" : "",
           (double)o->train_iters * o->global_batch_size / (double)run->train_data.windows);
    fflush(stdout);
}

int run_close(Run *run) {
    run_beat(run, DOING_PAUSE, "waiting for the last save");
    bool saved = saver_wait(&run->saver);
    const Progress *p = &run->progress;
    bool stopped = run_is_stopping(run) && p->step < run->options.train_iters;
    bool diverged = p->skipped_in_row >= run->options.max_skipped;
    int status = EXIT_SUCCESS;
    if (stopped) { status = EXIT_STOPPED_BY_SIGNAL; }
    if (diverged) { status = EXIT_TOO_MANY_SKIPPED; }
    if (!saved) { status = EXIT_FAILURE; }
    MetricsRecord *r = metrics_begin("end");
    metrics_number(r, "step", (double)p->step);
    metrics_number(r, "status", status);
    metrics_end(&run->metrics, r);
    if (stopped) {
        char by[40] = "a signal to another rank";
        if (run_stop_signal() != 0) { snprintf(by, sizeof(by), "signal %d", run_stop_signal()); }
        printf("stopped by %s after step %lld%s\n", by, (long long)p->step,
               run->options.save[0] != '\0' && saved ? "; saved; go on with --resume latest" : "");
    } else if (diverged) {
        printf("stopped: %d steps in a row had a NaN or infinite loss or norm (--max-skipped)\n",
               p->skipped_in_row);
    }
    metrics_close(&run->metrics);
    dataset_close(&run->train_data);
    dataset_close(&run->valid_data);
    choice_sets_close(&run->choices);
    if (run->has_tokenizer) { tokenizer_close(&run->tokenizer); }
    free(run->prompt);
    run_free_configuration(run);
    group_close(run->group);
    return status;
}

static void save_config(const Options *o) {
    Error err;
    char path[PATH_LENGTH], *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    if (file == NULL) { die("out of memory"); }
    options_write_config(o, file);
    fclose(file);
    path_format(path, "%s/config.txt", o->save);
    if (!file_replace(path, text, bytes, &err)) { die("--save %s", err.text); }
    free(text);
}

// Once it is clear that the run can start: before that, what an earlier run wrote stays as it is.
static void record_start(Run *run) {
    if (run->rank == 0 && options_save(&run->options)) { save_config(&run->options); }
    MetricsRecord *r = metrics_begin("run");
    metrics_text(r, "program", "llm8.c " LLM8_VERSION);
    metrics_text(r, "device", run->device);
    metrics_number(r, "time", (double)time(NULL));
    metrics_text(r, "precision", precision_name(&run->precision));
    metrics_number(r, "parameters", (double)run->layout.num_parameters);
    metrics_number(r, "flops_per_token", flops_per_token(&run->config));
    metrics_number(r, "fp8_flops_share", precision_fp8_share(&run->precision));
    if (run->peak_flops > 0) { metrics_number(r, "peak_flops", run->peak_flops); }
    if (run->memory_bytes > 0) { metrics_number(r, "memory_bytes", run->memory_bytes); }
    metrics_number(r, "ranks", run->ranks);
    metrics_number(r, "step", (double)run->progress.step);
    metrics_number(r, "data_sequences", (double)run->train_data.windows);
    metrics_precision(r, &run->precision);
    metrics_options(r, &run->options);
    metrics_end(&run->metrics, r);
}

static bool restore(Run *run, Checkpoint *checkpoint) {
    const Options *o = &run->options;
    Error err;
    bool found;
    if (o->resume[0] == '\0') { return false; }
    run_beat(run, DOING_PAUSE, "reading the checkpoint");
    if (!ranks_find_checkpoint(run, checkpoint, &found, &err)) { die("%s", err.text); }
    if (!found) {
        printf("no checkpoint under %s yet: starting from step 0\n", o->save);
        return false;
    }
    run->progress = checkpoint->progress;
    run->saved_step = checkpoint->progress.step;
    printf("resuming from %s: step %lld, %lld tokens\n", checkpoint->path,
           (long long)run->progress.step, (long long)run->progress.tokens);
    if (!checkpoint_match(checkpoint, o, &run->layout, &err)) { die("%s", err.text); }
    if (run->train_data.windows > 0 && checkpoint->data_windows != run->train_data.windows) {
        printf(
            "  --data has %lld sequences, had %lld in the checkpoint: they come in another order\n",
            (long long)run->train_data.windows, (long long)checkpoint->data_windows);
    }
    return true;
}

bool run_restore(Run *run, Checkpoint *checkpoint) {
    bool restored = restore(run, checkpoint);
    record_start(run);
    return restored;
}

void run_first_weights(const Run *run, float *weights) {
    const Options *o = &run->options;
    Error err;
    if (o->load[0] == '\0') {
        model_init(&run->layout, weights, (uint64_t)o->seed);
        return;
    }
    if (!hf_load(o->load, &run->layout, weights, &err)) { die("--load %s", err.text); }
    printf("starting from the weights of %s\n", o->load);
}

bool run_finite(double loss, double norm) {
    return isfinite(loss) && isfinite(norm);
}

void run_maybe_dump(const Run *run, const float *gradients, double loss) {
    const char *path = run->options.dump_gradients;
    float value = (float)loss;
    TensorEntry *tensors;
    FileWriter w;
    Error err;
    if (path[0] == '\0') { return; }
    if (run->rank > 0) { ranks_leave(run); }
    int count = hf_tensors(&run->layout, DTYPE_F32, gradients, &tensors);
    tensors = realloc_or_die(tensors, (size_t)(count + 1) * sizeof(TensorEntry));
    memmove(tensors + 1, tensors, (size_t)count * sizeof(TensorEntry));
    tensors[0] = (TensorEntry){
        .name = "loss", .dtype = DTYPE_F32, .dims = 1, .shape = {1}, .data = &value};
    if (!safetensors_write(&w, path, tensors, count + 1, NULL, &err)) {
        die("--dump-gradients %s", err.text);
    }
    free(tensors);
    printf("loss %.6f; gradients in %s\n", loss, path);
    ranks_leave(run);
}

void run_report(Run *run, StepResult s) {
    Progress *p = &run->progress;
    const Options *o = &run->options;
    int64_t tokens = (int64_t)o->global_batch_size * o->seq_length;
    p->step++;
    p->samples += o->global_batch_size;
    p->tokens += tokens;
    p->loss = s.loss;
    p->skipped += s.skipped;
    p->skipped_in_row = s.skipped ? p->skipped_in_row + 1 : 0;
    ranks_report(run, s);
    double smooth = run->step_seconds > 0 ? 0.05 : 1.0;
    run->step_seconds += smooth * (s.seconds - run->step_seconds);
    step_print(run, s, (double)tokens / s.seconds);

    MetricsRecord *r = metrics_begin("step");
    metrics_number(r, "step", (double)p->step);
    metrics_number(r, "tokens", (double)p->tokens);
    metrics_number(r, "loss", s.loss);
    metrics_number(r, "norm", s.norm);
    metrics_number(r, "lr", s.lr);
    metrics_number(r, "seconds", s.seconds);
    metrics_number(r, "tokens_per_s", (double)tokens / s.seconds);
    metrics_number(r, "skipped", s.skipped);
    metrics_end(&run->metrics, r);
}

void run_report_eval(Run *run, double loss, double seconds) {
    Progress *p = &run->progress;
    p->valid_loss = loss;
    bool best = isfinite(loss) && !(loss >= p->best_valid_loss);
    if (best) { p->best_valid_loss = loss; }
    printf("%seval after step %lld | valid loss %.4f%s | perplexity %.4g | %.1f s\n",
           isatty(STDOUT_FILENO) ? "\r\033[K" : "", (long long)p->step, loss, best ? " (best)" : "",
           exp(loss), seconds);
    fflush(stdout);
    MetricsRecord *r = metrics_begin("eval");
    metrics_number(r, "step", (double)p->step);
    metrics_number(r, "valid_loss", loss);
    metrics_number(r, "perplexity", exp(loss));
    metrics_number(r, "seconds", seconds);
    metrics_end(&run->metrics, r);
}

bool run_counts_fp8(const Run *run, int64_t step) {
    int64_t interval = run->options.fp8_stats_interval;
    return interval > 0 && step % interval == 0 && precision_fp8_share(&run->precision) > 0;
}

void run_report_fp8(Run *run, const Fp8Counts *counts) {
    MetricsRecord *r = metrics_begin("fp8");
    metrics_number(r, "step", (double)run->progress.step);
    metrics_fp8_counts(r, &run->precision, counts);
    metrics_end(&run->metrics, r);
}

void run_save(Run *run, const Snapshot *snapshot) {
    Snapshot s = *snapshot;
    const Progress *p = &run->progress;
    s.options = &run->options;
    s.layout = &run->layout;
    s.precision = &run->precision;
    s.progress = *p;
    s.data_windows = run->train_data.windows;
    s.tokenizer_folder = run->has_tokenizer ? run->tokenizer_folder : NULL;
    s.end_of_text = run->has_tokenizer ? run->tokenizer.end_of_text : -1;
    s.best = run_should_eval(run) && p->valid_loss == p->best_valid_loss;
    s.rank = run->rank;
    s.ranks = run->ranks;
    s.group = run->group;
    run->saved_step = p->step;
    run_beat(run, DOING_PAUSE, "waiting for the last save");
    saver_start(&run->saver, &s);
    MetricsRecord *r = metrics_begin("save");
    metrics_number(r, "step", (double)p->step);
    metrics_end(&run->metrics, r);
}
