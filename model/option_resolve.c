// Sets the options that are not given, from a preset, a checkpoint, or other options, and then
// checks all options.
#include "options.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>

// ---- presets and derived values -----------------------------------------------------------------

static const Preset *find_preset(const char *name) {
    for (int i = 0; i < preset_table_count; i++) {
        if (strcmp(preset_table[i].name, name) == 0) { return &preset_table[i]; }
    }
    return NULL;
}

bool options_preset(Options *options) {
    const Preset *preset = find_preset(options->model);
    char names[400] = "";
    for (int i = 0; i < preset_table_count; i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof(names) - used, "%s%s", i > 0 ? ", " : "",
                 preset_table[i].name);
    }
    return preset != NULL ? options_set(options, SOURCE_DERIVED, "%s", preset->settings)
                          : fail("--model %s: must be one of %s", options->model, names);
}

// Sets a value to 0, so that it is derived again, if it does not fit the given options. Values that
// are given or come from a checkpoint are kept.
static void yield(const Options *o, const char *name, int *value, bool fits) {
    if (*value != 0 && !fits && option_source(o, name) < SOURCE_CHECKPOINT) { *value = 0; }
}

// Returns the default --init-method-std of a model with C channels, to four decimals. Narrow models
// diverge with GPT-2's 0.02, and the loss of Llama 3 8B (4096 channels) rises before it falls
// (docs/benchmarks.md has measurements).
static double std_of_width(int C) {
    return round(1e4 * fmin(0.06, fmax(15.36 / C, fmin(0.02, 40.96 / C)))) / 1e4;
}

// Returns the default --lr of AdamW in a model with C channels. About as in GPT-3 (Brown et al.,
// 2020, table 2.1) it falls with the width: above 768 channels it is inversely proportional to C
// (docs/benchmarks.md has measurements).
static double lr_of_width(int C) {
    return fmin(6e-4, 0.4608 / C);
}

static void derive_model(Options *o) {
    int C = o->hidden_size, *heads = &o->num_attention_heads, *groups = &o->num_query_groups;
    int *size = &o->kv_channels;
    bool gpt2 = o->arch == ARCH_GPT2;
    yield(o, "kv-channels", size, !gpt2);
    yield(o, "num-attention-heads", heads, *size > 0 || C % max64(1, *heads) == 0);
    if (*heads == 0) {
        int divisor = (int)min64(*size > 0 ? *size : 64, C);
        while (C % divisor != 0 || (divisor % 2 != 0 && divisor > 1)) { divisor--; }
        *heads = C / divisor;
    }
    if (*size == 0 && C % *heads == 0) { *size = C / *heads; }
    yield(o, "num-query-groups", groups,
          gpt2 ? *groups == *heads : *heads % max64(1, *groups) == 0);
    if (*groups == 0) { *groups = *heads; }
    bool preset = option_source(o, "qk-layernorm") < SOURCE_CHECKPOINT;
    if (gpt2 && preset) { o->qk_layernorm = false; }
    if (o->ffn_hidden_size == 0) {
        o->ffn_hidden_size = gpt2 ? 4 * C : (int)round_up64((8 * C + 2) / 3, 128);
    }
    if (o->max_position_embeddings == 0) { o->max_position_embeddings = o->seq_length; }
    if (o->init_method_std == 0) { o->init_method_std = std_of_width(C); }
}

// Replaces *value by `derived` if *value is `request`, the number that requests a derived value.
// config.txt then omits the option.
static void derive_iters(Options *o, const char *name, int64_t *value, int64_t request,
                         int64_t derived) {
    if (*value != request) { return; }
    *value = derived;
    option_set_source(o, name, SOURCE_DERIVED);
}

// Returns whether --epochs sets the number of steps, and this number is not known yet.
static bool needs_steps(const Options *o) {
    return o->epochs > 0 && o->train_iters == 0;
}

// Derives the options of the run that are not given.
static void derive_run(Options *o) {
    bool muon = o->optimizer == OPTIMIZER_MUON, loads = o->load[0] != '\0';
    if (!needs_steps(o)) {
        int64_t *decay = &o->lr_decay_iters;
        derive_iters(o, "lr-decay-iters", decay, 0, o->train_iters);
        if (o->lr_decay_style == DECAY_WSD) {
            derive_iters(o, "lr-wsd-decay-iters", &o->lr_wsd_decay_iters, 0, 2 * *decay / 5);
        }
        derive_iters(o, "lr-warmup-iters", &o->lr_warmup_iters, -1, min64(*decay / 10, 1000));
    }
    if (o->lr == -1) { o->lr = muon ? 6e-4 : lr_of_width(o->hidden_size); }
    // docs/muon.md has the measurements behind these factors
    if (o->embedding_lr_mult == -1) { o->embedding_lr_mult = loads ? 1 : muon ? 2 : 4; }
    if (o->vector_lr_mult == -1) { o->vector_lr_mult = loads || muon ? 1 : 4; }
    bool asked = option_source(o, "check-interval") >= option_source(o, "deterministic");
    if (!o->deterministic && !asked) {
        o->check_interval = 0;
        option_set_source(o, "check-interval", SOURCE_DERIVED);
    }
    // if only a sample or an evaluation is requested, nothing else is printed
    if (!options_train(o) && option_source(o, "quiet") < SOURCE_FILE) { o->quiet = true; }
}

// ---- a checkpoint's options ---------------------------------------------------------------------

static bool of_model(const OptionRow *row) {
    return strcmp(row->group, "Model") == 0;
}

// In GPT-2 the number of positions is a dimension of a learned embedding.
bool option_is_shape(const OptionRow *row, Arch arch) {
    return row->effect == EFFECT_SHAPE ||
           (arch == ARCH_GPT2 && row->offset == offsetof(Options, max_position_embeddings));
}

bool option_is_inherited(const OptionRow *row, const Options *continues) {
    bool load = row->offset == offsetof(Options, load);
    if (continues == NULL || of_model(row) || load) { return of_model(row) || load; }
    bool path = row->effect == EFFECT_NOTHING && option_is_path(row);
    bool evaluates = row->effect == EFFECT_PRECISION || row->effect == EFFECT_EVALUATION ||
                     row->offset == offsetof(Options, eval_choices) ||
                     row->offset == offsetof(Options, global_batch_size) ||
                     row->offset == offsetof(Options, micro_batch_size);
    bool machine = strcmp(row->group, "Several GPUs") == 0 ||
                   row->offset == offsetof(Options, device_memory_gib) ||
                   row->offset == offsetof(Options, optimizer_cpu_offload);
    return !path && !machine && row->effect < EFFECT_ACTION &&
           (options_train(continues) || evaluates);
}

static bool copy(Options *to, const Options *from, const OptionRow *row, OptionSource source) {
    char value[OPTION_TEXT];
    return option_set(to, row->name, option_text(from, row, value), source);
}

// Returns whether the checkpoint's value of an option is what this run would derive from its own
// preset, data and defaults and from the checkpoint's other values. Such a value is derived again,
// and not taken from the checkpoint.
static bool is_derived(const Options *o, const Options *was, const OptionRow *row) {
    int i = (int)(row - option_table);
    Options again = *was;
    again.source[i] = SOURCE_DEFAULT;
    or_die(copy(&again, o, row, (OptionSource)o->source[i]));
    (of_model(row) ? derive_model : derive_run)(&again);
    return option_same(&again, was, row);
}

// Takes from the checkpoint the options that this run was not given: the model's options if
// `model`, else all others.
static bool inherit(Options *o, const Options *was, bool model) {
    EACH_OPTION (row) {
        int source = was->source[row - option_table];
        bool given = !model && source == SOURCE_FILE;
        if (of_model(row) == model && source != SOURCE_DEFAULT &&
            (given || !is_derived(o, was, row)) && !copy(o, was, row, SOURCE_CHECKPOINT)) {
            return false;
        }
    }
    return true;
}

// A run that resumes has the weights of its checkpoint, so it keeps the checkpoint's --load.
static bool keep_load(Options *o, const Options *was) {
    if (option_source(o, "load") >= SOURCE_FILE && strcmp(o->load, was->load) != 0) {
        warn("--load %s has no effect: the weights are those of the checkpoint %s", o->load,
             o->origin);
    }
    option_set_source(o, "load", SOURCE_DEFAULT);
    return copy(o, was, option_row("load"), *was->load ? SOURCE_CHECKPOINT : SOURCE_DEFAULT);
}

// Takes the warm-up of the checkpoint's run, unless this run derives the same. A run with more
// steps would derive a longer warm-up.
static bool keep_warmup(Options *o, const Options *was) {
    const OptionRow *warmup = option_row("lr-warmup-iters");
    Options derived = *o;
    derive_run(&derived);
    return option_source(was, warmup->name) == SOURCE_DEFAULT ||
           option_same(&derived, was, warmup) || copy(o, was, warmup, SOURCE_CHECKPOINT);
}

// Takes the options of the checkpoint's model. Refuses given options that change the shape. Warns
// if a given preset has another shape. With --load, also warns of given options that differ from
// those with which the weights were trained. (With --resume, all differences are printed when the
// run opens the checkpoint.)
static bool inherit_model(Options *o, Options was) {
    const OptionRow *positions = option_row("max-position-embeddings");
    bool named = option_source(o, "model") >= SOURCE_FILE, llama = was.arch == ARCH_LLAMA;
    bool reshaped = false; // the preset has another shape
    char now[OPTION_TEXT], then[OPTION_TEXT];
    const Options preset = *o;
    option_set_source(&was, "model", SOURCE_DEFAULT); // `was` already has the preset's values
    derive_model(&was);
    if (!inherit(o, &was, true)) { return false; }
    derive_model(o);
    EACH_OPTION (row) {
        int i = (int)(row - option_table);
        bool is_shape = option_is_shape(row, (Arch)was.arch), given = o->source[i] >= SOURCE_FILE;
        if (!of_model(row)) { continue; }
        option_text(o, row, now);
        option_text(&was, row, then);
        if (given && row->offset == offsetof(Options, init_method_std) && strcmp(now, then) != 0) {
            warn("--%s %s has no effect: the weights are those of the checkpoint %s", row->name,
                 now, o->origin);
        }
        if (was.source[i] == SOURCE_DEFAULT) { continue; }
        reshaped |= named && is_shape && preset.source[i] == SOURCE_DERIVED &&
                    !option_same(&preset, &was, row);
        if (strcmp(now, then) == 0) { continue; }
        if (is_shape && given) {
            return fail("--%s %s: it is %s in the checkpoint %s; leave the option out", row->name,
                        now, then, o->origin);
        }
        if (is_shape && !copy(o, &was, row, SOURCE_CHECKPOINT)) { return false; }
        if (given && !o->resumes && row->effect == EFFECT_RESULTS) {
            warn("--%s %s: the weights of the checkpoint %s were trained with %s", row->name, now,
                 o->origin, then);
        }
    }
    if (reshaped) {
        warn("--model %s: the checkpoint %s has another shape, which is used instead", o->model,
             o->origin);
    }
    // in Llama the number of positions is no dimension of a tensor, so the number may grow
    int trained = was.max_position_embeddings;
    if (llama && o->source[positions - option_table] < SOURCE_FILE) {
        o->max_position_embeddings = (int)max64(trained, o->seq_length);
        option_set_source(o, positions->name,
                          o->seq_length >= trained ? SOURCE_DEFAULT : SOURCE_CHECKPOINT);
    }
    if (llama && !o->resumes && o->seq_length > trained) {
        warn("--seq-length %d: the weights of the checkpoint %s were trained with at most %d",
             o->seq_length, o->origin, trained);
    }
    return true;
}

// ---- options that replace others ----------------------------------------------------------------

// Returns whether an option is given, and not switched off.
static bool is_on(const Options *o, const OptionRow *row) {
    bool off = option_word("|0|none|false", '|', row->fallback) >= 0 && option_is_default(o, row);
    return option_source(o, row->name) >= SOURCE_CHECKPOINT && !off;
}

// Resets the options that others replace (REPLACES in option_rows.h). Refuses two options of one
// source that replace each other. If --epochs counts in a run that trains, sets train_iters to 0,
// because the number of steps is not known yet.
static bool settle_replaced(Options *o) {
    EACH_OPTION (row) {
        const OptionRow *other = row->replaces != NULL ? option_row(row->replaces) : NULL;
        if (other == NULL || !is_on(o, row) || !is_on(o, other)) { continue; }
        OptionSource own = option_source(o, row->name), theirs = option_source(o, other->name);
        if (own == theirs && own >= SOURCE_FILE && other->replaces != NULL) {
            return fail("--%s: --%s is given too; leave one of them out", row->name, other->name);
        }
        if (own <= theirs) { continue; }
        option_set_source(o, other->name, SOURCE_DEFAULT);
        or_die(option_set(o, other->name, other->fallback, SOURCE_DERIVED));
    }
    if (o->epochs > 0 && options_train(o) && !o->list_tensors && !o->list_checkpoints) {
        o->train_iters = 0;
        option_set_source(o, "train-iters", SOURCE_DERIVED);
    }
    return true;
}

// ---- checks -------------------------------------------------------------------------------------

// Reads the first entry of a list of steps such as "4200-4300,5000", and moves *list to the next
// entry. Returns false if the entry is not a step or a range of steps.
static bool next_steps(const char **list, int64_t *first, int64_t *last) {
    char *end;
    if (!isdigit((unsigned char)**list)) { return false; }
    *first = *last = strtoll(*list, &end, 10);
    if (*end == '-' && isdigit((unsigned char)end[1])) { *last = strtoll(end + 1, &end, 10); }
    bool more = *end == ',' && end[1] != '\0';
    *list = end + more;
    return *first >= 1 && *last >= *first && (more || *end == '\0');
}

int64_t options_next_skip(const Options *o, int64_t step) {
    const char *list = o->iterations_to_skip;
    int64_t first, last, next = INT64_MAX;
    while (*list != '\0' && next_steps(&list, &first, &last)) {
        if (last >= step) { next = min64(next, max64(first, step)); }
    }
    return next;
}

const char *option_from_checkpoint(const Options *o, const char *name, char out[PATH_LENGTH]) {
    bool taken = option_source(o, name) == SOURCE_CHECKPOINT;
    return path_format(out, "%s%s%s", taken ? " (of the checkpoint " : "", taken ? o->origin : "",
                       taken ? ")" : "");
}

// Refuses two tasks. Only --plan may stand beside another one: an evaluation, a sample, or a step
// whose gradients are dumped.
static bool check_tasks(const Options *o) {
    bool planned = o->plan && (o->eval_only || o->sample_only || o->dump_gradients[0] != '\0');
    const OptionRow *other = NULL;
    EACH_OPTION (row) {
        bool plans = planned && row->offset == offsetof(Options, plan);
        if (row->effect != EFFECT_TASK || plans || option_is_default(o, row)) { continue; }
        if (other != NULL) {
            return fail("--%s: --%s is given too; leave one of them out", row->name, other->name);
        }
        other = row;
    }
    return true;
}

static bool check_values(const Options *o) {
    const char *steps = o->iterations_to_skip;
    for (int64_t first, last; *steps != '\0';) {
        if (!next_steps(&steps, &first, &last)) {
            return fail("--iterations-to-skip %s: must be steps or ranges of steps, as "
                        "4200-4300,5000",
                        o->iterations_to_skip);
        }
    }
    char from[OPTION_TEXT];
    int heads = o->num_attention_heads;
    bool gpt2 = o->arch == ARCH_GPT2;
    if (o->kv_channels == 0) {
        return fail("--num-attention-heads %d: must divide --hidden-size %d%s", heads,
                    o->hidden_size, gpt2 ? "" : ", or give --kv-channels");
    }
    if (heads % o->num_query_groups != 0) {
        return fail("--num-query-groups %d: must divide --num-attention-heads %d",
                    o->num_query_groups, heads);
    }
    if (gpt2 && o->kv_channels * heads != o->hidden_size) {
        return fail("--kv-channels %d: gpt2 has --hidden-size %d / --num-attention-heads %d",
                    o->kv_channels, o->hidden_size, heads);
    }
    if (gpt2 && o->qk_layernorm) {
        return fail("--qk-layernorm: gpt2 has none; --arch llama can have it");
    }
    if (o->qk_layernorm && o->add_qkv_bias) {
        return fail("--qk-layernorm: no model of transformers has it together with --add-qkv-bias");
    }
    if (gpt2 && o->num_query_groups != heads) {
        return fail("--num-query-groups %d: gpt2 has as many as --num-attention-heads (%d)",
                    o->num_query_groups, heads);
    }
    if (o->arch == ARCH_LLAMA && o->kv_channels % 2 != 0) {
        return fail("--kv-channels %d: llama's rotary embedding needs an even head size (0: "
                    "--hidden-size %d / --num-attention-heads %d)",
                    o->kv_channels, o->hidden_size, heads);
    }
    if (o->rope_scaling == ROPE_LLAMA3 && o->rope_high_freq_factor <= o->rope_low_freq_factor) {
        return fail("--rope-high-freq-factor %g: must be above --rope-low-freq-factor %g",
                    o->rope_high_freq_factor, o->rope_low_freq_factor);
    }
    if (o->eval_only && o->valid_data[0] == '\0' && o->eval_choices[0] == '\0') {
        return fail("--eval-only: needs --valid-data or --eval-choices");
    }
    if (o->seq_length > o->max_position_embeddings) {
        return fail("--seq-length %d: must be at most --max-position-embeddings %d", o->seq_length,
                    o->max_position_embeddings);
    }
    if ((int64_t)o->micro_batch_size * o->seq_length > INT32_MAX) {
        return fail("--micro-batch-size %d x --seq-length %d: must be fewer than 2^31 tokens",
                    o->micro_batch_size, o->seq_length);
    }
    const struct {
        const char *name;
        double value;
    } rates[] = {{"lr", o->lr},
                 {"embedding-lr-mult", o->embedding_lr_mult},
                 {"vector-lr-mult", o->vector_lr_mult}};
    for (int i = 0; i < (int)(sizeof(rates) / sizeof(rates[0])); i++) {
        if (rates[i].value < 0) {
            return fail("--%s %g: must be -1, 0 or more", rates[i].name, rates[i].value);
        }
    }
    if (o->min_lr > o->lr) {
        return fail("--min-lr %g%s: must be at most --lr %g%s", o->min_lr,
                    option_from_checkpoint(o, "min-lr", from), o->lr,
                    option_source(o, "lr") == SOURCE_DEFAULT ? ", the default of this width" : "");
    }
    int bf16_layers = o->num_layers_at_start_in_bf16 + o->num_layers_at_end_in_bf16;
    if (o->first_last_layers_bf16 && bf16_layers > o->num_layers) {
        return fail("--num-layers-at-start-in-bf16 %d and --num-layers-at-end-in-bf16 %d: must be "
                    "at most --num-layers %d together",
                    o->num_layers_at_start_in_bf16, o->num_layers_at_end_in_bf16, o->num_layers);
    }
    if (!o->deterministic && o->check_interval > 0) {
        return fail("--check-interval %lld: must be 0 with --no-deterministic%s, whose results "
                    "differ from one time to the next",
                    (long long)o->check_interval, option_from_checkpoint(o, "deterministic", from));
    }
    bool latest = strcmp(o->resume, "latest") == 0;
    if ((latest || o->list_checkpoints) && o->save[0] == '\0') {
        return fail("--%s: needs --save DIR, where to look",
                    latest ? "resume latest" : "list-checkpoints");
    }
    return true;
}

// Sets --global-batch-size to one micro-batch per rank if it is 0.
static void derive_batch(Options *o, int ranks) {
    int64_t whole = (int64_t)o->micro_batch_size * ranks;
    if (o->global_batch_size == 0) { o->global_batch_size = (int)min64(whole, INT32_MAX); }
}

// Returns whether the run may have this --global-batch-size. The last batch of an evaluation may be
// incomplete, so a run that does not train may have any size.
static bool batch_is_whole(const Options *o, int ranks) {
    int64_t whole = (int64_t)o->micro_batch_size * ranks;
    return !options_train(o) || o->global_batch_size % whole == 0;
}

void options_set_micro_batch(Options *o, int size, int ranks) {
    // a run that resumes may keep its checkpoint's size
    bool follows = option_source(o, "global-batch-size") < SOURCE_CHECKPOINT && !o->resumes;
    if (follows) { o->global_batch_size = 0; }
    o->micro_batch_size = size;
    derive_batch(o, ranks);
    while (!batch_is_whole(o, ranks) && o->micro_batch_size > 1) { o->micro_batch_size--; }
}

// Sets or checks --global-batch-size.
static bool settle_batch(Options *o, int ranks) {
    char from[PATH_LENGTH];
    int64_t whole = (int64_t)o->micro_batch_size * ranks;
    derive_batch(o, ranks);
    if (!batch_is_whole(o, ranks)) {
        return fail("--global-batch-size %d%s: must be a multiple of --micro-batch-size %d x %d "
                    "rank%s",
                    o->global_batch_size, option_from_checkpoint(o, "global-batch-size", from),
                    o->micro_batch_size, ranks, plural(ranks));
    }
    // config.txt omits a size of one micro-batch per rank, and has any other size of the
    // checkpoint, so that a resumed run keeps that size even with another number of ranks
    if (o->global_batch_size == whole &&
        option_source(o, "global-batch-size") == SOURCE_CHECKPOINT) {
        option_set_source(o, "global-batch-size", SOURCE_DERIVED);
    }
    return true;
}

// Sets --train-iters so that the run sees each window --epochs times. The last step may begin
// another epoch. In a resumed run --train-iters is the number of steps done, plus the number of
// steps for the windows not seen yet.
static void count_steps(Options *o, const OptionFacts *facts) {
    double windows = (double)facts->windows(facts->context), seen = facts->tokens / o->seq_length;
    double all = o->epochs * windows * (1 - 1e-12); // the product may have been rounded up
    o->train_iters = facts->step + (int64_t)ceil(fmax(0, all - seen) / o->global_batch_size);
}

// If --model is not given, sets it to the checkpoint's preset, or to "" if the checkpoint has none
// or this program does not know it. Then sets the preset's options.
static bool settle_preset(Options *o, const Options *was) {
    if (was != NULL && option_source(o, "model") < SOURCE_FILE) {
        bool known = option_source(was, "model") > SOURCE_DEFAULT &&
                     find_preset(was->model) != NULL;
        if (!option_set(o, "model", known ? was->model : "", SOURCE_CHECKPOINT)) { return false; }
    }
    return o->model[0] == '\0' || options_preset(o);
}

bool options_resolve(Options *o, const OptionFacts *facts) {
    static const OptionFacts none;
    char text[OPTION_TEXT];
    if (facts == NULL) { facts = &none; }
    if (o->repeated != NULL) { // warns here, where the warnings of ranks other than 0 are muted
        warn("--%s is given twice: only %s counts; several are one word: a pattern, or, of shards, "
             "a mixture",
             o->repeated, option_text(o, option_row(o->repeated), text));
    }
    const Options *was = facts->checkpoint;
    if (was != NULL &&
        ((o->resumes && !keep_load(o, was)) || (options_continue(o) && !inherit(o, was, false)))) {
        return false;
    }
    if (!settle_preset(o, was)) { return false; }
    if (facts->data != NULL && !facts->data(facts->context, o)) { return false; }
    if (was != NULL && !inherit_model(o, *was)) { return false; }
    derive_model(o);
    if (!settle_replaced(o) || !settle_batch(o, (int)max64(1, facts->ranks))) { return false; }
    if (needs_steps(o) && facts->windows != NULL) { count_steps(o, facts); }
    if (was != NULL && options_continue(o) && !keep_warmup(o, was)) { return false; }
    derive_run(o);
    Options defaults;
    options_default(&defaults);
    EACH_OPTION (row) {
        bool derived = option_source(o, row->name) == SOURCE_DEFAULT &&
                       !option_same(o, &defaults, row);
        if (derived) { option_set_source(o, row->name, SOURCE_DERIVED); }
    }
    return check_tasks(o) && check_values(o);
}
