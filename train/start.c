#include "start.h"
#include "../checkpoints/hugging_face.h"
#include "../ranks/launch.h"
#include "metrics.h"
#include "run_data.h"
#include "save_folder.h"
#include "schedule.h"

#include <float.h>
#include <math.h>

// ---- options and model --------------------------------------------------------------------------

// Without a tokenizer, guesses the end-of-text token from the vocabulary's size: in GPT-2's
// vocabulary and in the byte tokenizer's it is the last token.
static void guess_end(Run *run) {
    const Options *o = &run->options;
    bool last = o->vocab_size == GPT2_VOCAB || o->vocab_size == BYTE_VOCAB;
    if (o->tokenizer[0] == '\0' && last) { run->document_end = o->vocab_size - 1; }
}

static int64_t count_windows(void *context) {
    Run *run = context;
    guess_end(run);
    run_open_train_data(run);
    return run->train_data.windows;
}

static Options was; // the options that the run inherits from the checkpoint (option_is_inherited)

// If torchrun, srun or mpirun has started the ranks, all of them call this function, and only rank
// 0 warns.
void run_resolve_options(Run *run) {
    Options *o = &run->options;
    Ranks r;
    OptionFacts facts = {.context = run, .data = run_set_by_data};
    if (!o->verify) {
        or_die(ranks_read(&r, o));
        warnings_mute(r.group.rank > 0);
        facts.ranks = r.group.ranks;
        facts.windows = count_windows;
    }
    bool claims = options_save(o) && !o->plan && !o->list_checkpoints && !o->list_tensors;
    // if another run still saves to the folder, waits for the end of that run, because this run
    // may inherit the options of that run's last checkpoint
    if (claims && o->resume[0] != '\0' && !checkpoint_await(o)) {
        complain("--save %s", error_text());
        exit(EXIT_IN_USE);
    }
    or_die(checkpoint_model(&run->start, o, &was));
    if (o->origin[0] != '\0') { facts.checkpoint = &was; }
    if (o->resumes) {
        facts.step = run->start.progress.step;
        facts.tokens = run->start.progress.tokens;
    }
    or_die(options_resolve(o, &facts));
    guess_end(run);
    warnings_mute(false);
}

void run_configure(Run *run, NumberSupport support) {
    run->progress = (Progress){.loss = NAN,
                               .valid_loss = NAN,
                               .best_valid_loss = NAN,
                               .level = NAN,
                               .best_level = NAN,
                               .last_good = -1};
    run->saves.step = -1;
    run->config = model_config(&run->options);
    run->layout = param_layout(&run->config);
    run->precision = precision_decide(&run->options, &run->config, support);
}

void run_free_configuration(Run *run) {
    precision_free(&run->precision);
    param_layout_free(&run->layout);
}

bool run_find_fit(const Run *run, double memory, PlannedBytes planned, void *context,
                  Options *fit) {
    enum { SHORTEST = 128, STEP = 16 }; // FP8 takes multiples of 16 (model/precision.c)
    *fit = run->options;
    while (!((double)planned(context, fit) <= memory)) {
        if (options_batch(fit) > 1) {
            options_set_micro_batch(fit, fit->micro_batch_size / 2, run->group.ranks);
        } else if (fit->seq_length > SHORTEST) {
            fit->seq_length = fit->seq_length / 2 / STEP * STEP;
        } else {
            *fit = run->options;
            return false;
        }
    }
    return true;
}

const char *run_say_fit(const Run *run, const Options *fit, char out[80]) {
    const Options *o = &run->options;
    bool batch = fit->micro_batch_size != o->micro_batch_size;
    int used = snprintf(out, 80, batch ? "--micro-batch-size %d" : "", fit->micro_batch_size);
    if (fit->seq_length != o->seq_length) {
        snprintf(out + used, 80 - (size_t)used, "%s--seq-length %d", batch ? " " : "",
                 fit->seq_length);
    }
    return out;
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
    if (o->export_to[0] != '\0') {
        run_export(run);
        exit_answered();
    }
    if (o->plan) {
        run_plan_data(run);
    } else {
        console_open(run);
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
        printf("Model\n  parameters    %s\n  FLOPs a token %.6g\n",
               format_count((char[32]){0}, run->layout.num_parameters),
               flops_per_token(&run->config));
    }
}

// ---- data and save folder -----------------------------------------------------------------------

void run_start(Run *run, const char *device) {
    const Options *o = &run->options;
    snprintf(run->device, sizeof(run->device), "%s", device);
    printf("Run\n  device      %s\n  model       %s parameters, %s, %.3g FLOPs a token\n", device,
           format_count((char[32]){0}, run->layout.num_parameters), precision_name(&run->precision),
           flops_per_token(&run->config));
    or_die(checkpoint_share(&run->start, &run->group));
    run_beat(run, ACTIVITY_WORK, "opening the data");
    run_open_data(run);
    run_open_tokenizer(run);
    run_check_data(run);
    or_die(run_encode_prompt(run));
    save_folder_open(run);
    if (options_train(o)) { run_catch_signals(); } // other runs have nothing to save
    if (run->train_data.windows == 0) { return; }
    int micro_batches = run_micro_batches(run) * run->group.ranks;
    int64_t step_tokens = (int64_t)o->global_batch_size * o->seq_length;
    // counts tokens, because the steps before a resume may have had another batch size or sequence
    // length
    Progress done = o->resumes ? run->start.progress : (Progress){0};
    int64_t tokens = done.tokens + max64(0, o->train_iters - done.step) * step_tokens;
    if (run->group.ranks > 1) { printf("  ranks       %d\n", run->group.ranks); }
    printf("  schedule    %s step%s of %s tokens (%d x %d micro-batch%s), %.2f epochs\n",
           format_count((char[32]){0}, o->train_iters), plural(o->train_iters),
           format_count((char[32]){0}, step_tokens), micro_batches,
           o->micro_batch_size * o->seq_length, micro_batches > 1 ? "es" : "",
           (double)tokens / o->seq_length / (double)run->train_data.windows);
    if (options_save(o)) {
        printf("  saves       every %lld step%s to %s\n", (long long)o->save_interval,
               plural(o->save_interval), o->save);
    } else if (options_train(o)) {
        printf("  saves       nothing: no --save\n");
    }
    fflush(stdout);
    if (run->group.rank > 0) { return; }
    if (options_train(o)) { warn_of_schedule(o); }
    bool dumps = o->dump_gradients[0] != '\0'; // then no step follows
    bool steps = o->resumes && done.step < o->train_iters;
    if (options_train(o) && steps && !options_save(o) && !dumps) {
        warn("--resume %s without --save: nothing is saved from here on", o->resume);
    }
}

// ---- the checkpoint -----------------------------------------------------------------------------

// Reads run->progress from the checkpoint that --resume names. Rank 0 verifies the checkpoint.
static void resume(Run *run) {
    const Options *o = &run->options;
    Checkpoint *checkpoint = &run->start;
    run_beat(run, ACTIVITY_PAUSE, "reading the checkpoint");
    bool whole = checkpoint_complete(checkpoint, run->group.rank == 0) ||
                 fail("--resume %s; --list-checkpoints shows which are whole", error_text());
    or_die(group_agree(&run->group, CHANNEL_MAIN, whole));
    run->progress = checkpoint->progress;
    run->saves.step = checkpoint->progress.step;
    printf("resuming from %s: step %lld, %s tokens\n", checkpoint->path,
           (long long)run->progress.step, format_count((char[32]){0}, run->progress.tokens));
    or_die(checkpoint_match(checkpoint, o, &run->layout));
    // progress.samples counts sequences of this run's --seq-length
    run->progress.samples = run->progress.tokens / o->seq_length;
    run_match_data(run);
    if (options_train(o) && run->progress.step >= o->train_iters) {
        char limit[60] = "--train-iters is";
        if (o->epochs > 0) { snprintf(limit, sizeof(limit), "--epochs %g ends at", o->epochs); }
        printf("nothing to train: step %lld is done, and %s %lld\n", (long long)run->progress.step,
               limit, (long long)o->train_iters);
    }
    if (run->group.rank == 0) { warn_of_jump(o, &was, run->progress.step); }
}

// Starts from random weights or from those of --load, whose checksums rank 0 verifies. A Hugging
// Face model has no checksums.
static void start_anew(Run *run) {
    const Options *o = &run->options;
    const Checkpoint *c = &run->start;
    if (o->resume[0] != '\0') {
        printf("no checkpoint under %s yet: starting from step 0\n", o->save);
    }
    // a run that only evaluates or samples the weights of --load shows the step of their
    // checkpoint; a run that trains them counts from 0
    if (!options_train(o)) { run->progress.step = c->progress.step; }
    if (o->load[0] != '\0') {
        bool ok = run->group.rank > 0 || checkpoint_verify(c) || fail("--load %s", error_text());
        or_die(group_agree(&run->group, CHANNEL_MAIN, ok));
        printf("starting from the weights of %s%s\n", c->path,
               c->options != NULL ? ""
                                  : " (it has no checksums: names, shapes and values are checked)");
    } else if (run->group.rank == 0 && (!options_train(o) || run_is_masked(run))) {
        warn("the weights are random: no checkpoint is loaded (--load, --resume)%s",
             options_train(o) ? "; --data with masks is for fine-tuning" : "");
    }
}

// config.txt and the record of the start are written when it is certain that the run can start, and
// has something to train or to evaluate. Until then, the files of an earlier run do not change.
void run_restore(Run *run) {
    const Options *o = &run->options;
    Progress *p = &run->progress;
    if (o->resumes) {
        resume(run);
    } else {
        start_anew(run);
    }
    bool has_steps = options_train(o) && p->step < o->train_iters;
    bool skips = o->iterations_to_skip[0] != '\0';
    if (has_steps && skips && options_next_skip(o, p->step + 1) > o->train_iters) {
        printf("  --iterations-to-skip %s: none of these steps is left to train\n",
               o->iterations_to_skip);
    }
    if (has_steps && o->sample_interval > o->train_iters) {
        printf("  --sample-interval %lld: the run ends at step %lld, without a sample\n",
               (long long)o->sample_interval, (long long)o->train_iters);
    }
    if (o->dump_gradients[0] != '\0' && !has_steps) {
        die("--dump-gradients %s: this run trains no step (--train-iters %lld)", o->dump_gradients,
            (long long)o->train_iters);
    }
    // a signal may have interrupted the evaluation at the checkpoint's step
    p->eval_left = run_can_eval(run) && (p->eval_left > 0 || !options_train(o));
    bool goes_on = !o->resumes || p->eval_left ||
                   (p->step < o->train_iters && !run_has_diverged(run));
    if (run->group.rank == 0 && options_save(o) && goes_on) { save_folder_begin(run); }
    // a record of this start would make the records of later steps void (metrics.c), so none is
    // written
    if (options_train(o) && !goes_on) {
        metrics_close(&run->metrics);
        run->metrics.path[0] = '\0';
    }
    run_record_start(run);
}

// ---- weights and state --------------------------------------------------------------------------

// Fails with the name of the first tensor that has NaN, or a magnitude above `most`, in elements
// begin..end of the parameter space.
static bool check_values(const Run *run, int64_t begin, int64_t end, const float *values,
                         float most) {
    for (const Param *p = run->layout.params; p < run->layout.params + run->layout.count; p++) {
        int64_t from = max64(begin, p->offset), to = min64(end, p->offset + param_size(p));
        int64_t wrong = 0;
        for (int64_t i = from; i < to; i++) { wrong += !(fabsf(values[i - begin]) <= most); }
        if (wrong == 0) { continue; }
        char block[32] = "";
        if (p->layer >= 0) { snprintf(block, sizeof(block), " of block %d", p->layer); }
        return fail("%s%s has %lld %s", tensor_row(p->id)->name, block, (long long)wrong,
                    most < FLT_MAX ? "enormous values" : "NaN or infinite values");
    }
    return true;
}

// Bad values cause only a warning here, because the checkpoint of a run that diverges may have
// them: that run resumes, and its steps are skipped.
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
    const float FP16_MAX = 65504; // weights of a trained model are far smaller
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
    // a value above FP16_MAX probably has a flipped bit in its exponent
    if (said || check_values(run, begin, end, out, FP16_MAX)) { return; }
    warn("--load %s: %s: is the file damaged?", run->start.path, error_text());
    said = true;
}
