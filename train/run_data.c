// Opens the data that a run reads (shards, validation shards, multiple-choice sets), and decides
// which sequences a rank reads in a step and in an evaluation.
#include "run_data.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

// ---- opening ------------------------------------------------------------------------------------

static const char *const data_options[] = {"data", "valid-data"};

// Returns a text with the number of targets that count in the loss, or "" if the data have no
// masks.
static const char *say_counted(char out[64], bool masked, int64_t targets) {
    snprintf(out, 64, "%s of them counted, ", format_count((char[32]){0}, targets));
    return masked ? out : "";
}

// Warns if this run's windows cut documents that were packed into sequences. This happens if the
// packed sequences have another length than the windows, or begin elsewhere.
static void warn_of_cuts(const Run *run, const char *option, const Dataset *data) {
    if (data->cuts == 0 || run->group.rank > 0) { return; }
    bool length = data->seq_length % data->cuts != 0;
    warn("--%s: documents were packed into sequences of %d tokens; --seq-length %d%s cuts some of "
         "them",
         option, data->cuts, data->seq_length,
         length ? "" : ", after a shard that ends within a sequence,");
}

// Warns if shards are missing that a source's pattern matches, by the manifest of prepare_data
// beside the others, as after a copy that did not end.
static void warn_of_missing(const Run *run, const char *option, const Source *source,
                            const Dataset *data) {
    char path[PATH_LENGTH], first[PATH_LENGTH] = "";
    int last = -1; // length of the folder's path
    for (int i = 0; i < data->num_shards && run->group.rank == 0; i++) {
        const char *shard = data->shards[i].path;
        int folder = (int)(path_name(shard) - shard), listed = 0, missing = 0;
        if (folder == last && strncmp(shard, data->shards[i - 1].path, (size_t)folder) == 0) {
            continue;
        }
        last = folder;
        size_t bytes = 0;
        path_format(path, "%.*smanifest.json", folder, shard);
        FREED char *text = file_read(path, &bytes);
        CLOSED(json_close) cJSON *manifest = text != NULL ? json_parse(text, bytes) : NULL;
        const cJSON *row;
        cJSON_ArrayForEach(row, cJSON_GetObjectItem(manifest, "shards")) {
            const char *name = json_text(row, "name", "");
            path_format(path, "%.*s%s", folder, shard, name);
            if (!pattern_matches(source->pattern, path)) { continue; }
            listed++;
            if (path_exists(path)) { continue; }
            if (missing++ == 0) { path_format(first, "%s", path); }
        }
        if (missing > 0) {
            warn("--%s %s: %d of %d shards are missing, such as %s; copy them again, or prepare "
                 "the data again",
                 option, source->pattern, missing, listed, first);
        }
    }
}

// Warns if the data were written with several chat templates, because samples and checkpoints use
// only one.
static void warn_of_templates(const Run *run, const char *option, const Mixture *m) {
    int32_t first = 0;
    for (const Dataset *data = m->data; data < m->data + m->count; data++) {
        for (int i = 0; i < data->num_shards; i++) {
            int32_t template = data->sidecars[i].chat_template;
            if (first == 0) { first = template; }
            if (template == 0 || template == first || run->group.rank > 0) { continue; }
            warn("--%s: %s: another chat template wrote its conversations than those before it; "
                 "prepare all with one",
                 option, data->shards[i].path);
            return;
        }
    }
}

// Warns of a source of texts whose documents end with another token than run->document_end, if the
// run looks for that token. Also warns if --eod-mask-loss leaves nothing of the source out of the
// loss, because the token does not occur. In conversations, masks already leave out the targets at
// the beginning of a document.
static void warn_of_ends(Run *run, const char *option, const Source *source, const Dataset *data) {
    bool texts = false, unlisted = false;
    for (const Sidecar *b = data->sidecars; b < data->sidecars + data->num_shards; b++) {
        texts = texts || b->chat_template == 0;
        unlisted = unlisted || (b->chat_template == 0 && b->starts.file < 0);
    }
    bool needed = (data->masks_ends && texts) || (run_resets(run) && unlisted);
    if (!needed || run->group.rank > 0) { return; }
    int end = run_document_end(run, source->pattern);
    if (end != data->document_end) {
        warn("--%s %s: its documents end with token %d, those of the first data with %d, which "
             "alone is looked for; prepare all data with the same --before and --after",
             option, source->pattern, end, data->document_end);
        return;
    }
    if (!data->masks_ends || data->ends > 0 || !texts) { return; }
    warn("--eod-mask-loss: --%s %s: no token is %d, which ends documents, so all targets count; "
         "prepare all data with the same --before and --after",
         option, source->pattern, data->document_end);
}

// Dies with error_text(), which is about the data of --`option`.
static void die_of_data(const Options *o, const char *option) {
    char from[PATH_LENGTH];
    die("--%s%s %s", option, option_from_checkpoint(o, option, from), error_text());
}

// Opens the data of --`option`, and warns of missing shards, of cut documents, of several chat
// templates, and of documents without an end.
static void open_mixture(Run *run, Mixture *m, const char *option, const char *text) {
    const Options *o = &run->options;
    if (o->eod_mask_loss && run->document_end < 0) {
        die("--eod-mask-loss: it is not known which token ends a text; give --tokenizer");
    }
    if (!mixture_open(m, text, o->seq_length, o->vocab_size, run->document_end, o->eod_mask_loss)) {
        die_of_data(o, option);
    }
    for (int i = 0; i < m->count; i++) {
        warn_of_missing(run, option, &m->sources[i], &m->data[i]);
        warn_of_cuts(run, option, &m->data[i]);
        warn_of_ends(run, option, &m->sources[i], &m->data[i]);
    }
    warn_of_templates(run, option, m);
}

// In a run that does not train, --data only serves to find the tokenizer beside the shards. The
// shards of a checkpoint's run or of its config.txt may be gone; those of the command line are
// opened, so that a mistyped path is refused.
static bool reads_train_data(const Options *o) {
    bool typed = o->data[0] != '\0' && option_source(o, "data") == SOURCE_COMMAND;
    return options_train(o) || typed;
}

void run_open_train_data(Run *run) {
    const Options *o = &run->options;
    Mixture *m = &run->train_data;
    if (m->count > 0 || !reads_train_data(o)) { return; }
    if (o->data[0] == '\0') {
        bool none = strcmp(o->resume, "latest") == 0 && !o->resumes;
        die("--data is missing: which shards to train on; %s%s%s",
            none ? "there is no checkpoint under " : "--sample-only and --eval-only need none",
            none ? o->save : "", none ? " that would give it" : "");
    }
    open_mixture(run, m, "data", o->data);
    run->train = (Loader){m->data, (uint64_t)o->seed, o->shuffle, &m->blend};
}

static void announce_train_data(const Run *run) {
    const Options *o = &run->options;
    const Mixture *m = &run->train_data;
    if (options_train(o) && m->windows < o->global_batch_size) {
        die("--data %s: %lld sequence%s of %d tokens, fewer than one --global-batch-size %d; give "
            "more data, a smaller batch or a shorter --seq-length",
            o->data, (long long)m->windows, plural(m->windows), o->seq_length,
            o->global_batch_size);
    }
    char counted[64];
    printf("  training    %s tokens in %d shard%s, %s%s sequence%s an epoch\n",
           format_count((char[32]){0}, m->tokens), m->num_shards, plural(m->num_shards),
           say_counted(counted, m->masked, m->targets), format_count((char[32]){0}, m->windows),
           plural(m->windows));
    for (int i = 0; i < m->count && m->count > 1; i++) {
        const Dataset *data = &m->data[i];
        printf("  source      %s: %.4g%% of the sequences, %s tokens in %d shard%s, "
               "%s%s sequence%s an epoch of it\n",
               m->sources[i].pattern, 100 * blend_share(&m->blend, i),
               format_count((char[32]){0}, data->tokens), data->num_shards,
               plural(data->num_shards),
               say_counted(counted, data->with_targets != NULL, data->targets),
               format_count((char[32]){0}, data->windows), plural(data->windows));
    }
}

// Returns how many shards without SHARD.starts hold conversations or, if `conversations` is false,
// texts.
static int count_unlisted(const Run *run, bool conversations) {
    const Mixture *sets[] = {&run->train_data, &run->valid_data};
    int count = 0;
    for (int i = 0; i < 2; i++) {
        for (const Dataset *data = sets[i]->data; data < sets[i]->data + sets[i]->count; data++) {
            for (const Sidecar *b = data->sidecars; b < data->sidecars + data->num_shards; b++) {
                count += b->starts.file < 0 && (b->chat_template != 0) == conversations;
            }
        }
    }
    return count;
}

bool run_is_masked(const Run *run) {
    const Mixture *m = &run->train_data;
    bool masked = m->count > 0;
    for (const Dataset *data = m->data; data < m->data + m->count; data++) {
        for (int i = 0; i < data->num_shards; i++) { masked &= data->sidecars[i].mask != NULL; }
    }
    return masked;
}

// Prints whether attention and positions restart at each document, and what marks the beginnings of
// documents.
static void announce_documents(const Run *run) {
    static const char *const resets[] = {"not kept apart in a sequence",
                                         "attention begins anew at each",
                                         "positions begin anew at each, attention does not",
                                         "attention and positions begin anew at each"};
    const Options *o = &run->options;
    int chats = count_unlisted(run, true), texts = count_unlisted(run, false);
    char how[80] = "";
    bool token = run->document_end >= 0;
    int undivided = chats + (token ? 0 : texts);
    if (run_resets(run) && token && texts > 0) {
        snprintf(how, sizeof(how), "; without SHARD.starts they begin at token %d",
                 run->document_end);
    } else if (!run_resets(run) && chats > 0) {
        snprintf(how, sizeof(how), "; conversations that are prepared again are");
    }
    printf("  documents   %s%s%s\n", resets[o->reset_attention_mask + 2 * o->reset_position_ids],
           how, o->eod_mask_loss ? "; the token after an end of text does not count" : "");
    if (run_resets(run) && undivided > 0 && run->group.rank == 0) {
        warn("--reset-%s: %d shard%s: it is not known where documents begin, so each is one: "
             "prepare the data again, or give --tokenizer",
             o->reset_attention_mask ? "attention-mask" : "position-ids", undivided,
             plural(undivided));
    }
}

// The fingerprint of a tokenizer (tokenizer.h), and a file with this fingerprint.
typedef struct {
    uint32_t fingerprint; // 0: not known
    const char *path;
} Fingerprinted;

// Dies if a file of --`option` has another fingerprint than *first. If the fingerprint of *first is
// not known, sets *first from the file.
static void check_fingerprint(Fingerprinted *first, const char *option, const TokenFile *file) {
    if (first->fingerprint == 0) { *first = (Fingerprinted){file->tokenizer, file->path}; }
    if (file->tokenizer != 0 && file->tokenizer != first->fingerprint) {
        die("--%s %s: made with another tokenizer than %s; give data, validation data, choices and "
            "--tokenizer of one tokenizer (if its tokenizer_config.json was changed, import the "
            "model again)",
            option, file->path, first->path);
    }
}

// Dies unless all files were made by one tokenizer.
static void check_fingerprints(const Run *run) {
    Fingerprinted first = {run->tokenizer.fingerprint, run->options.tokenizer};
    for (int i = 0; i < 2; i++) {
        const Mixture *m = i == 0 ? &run->train_data : &run->valid_data;
        for (const Dataset *data = m->data; data < m->data + m->count; data++) {
            for (const TokenFile *f = data->shards; f < data->shards + data->num_shards; f++) {
                check_fingerprint(&first, data_options[i], f);
            }
        }
    }
    for (int i = 0; i < run->choices.count; i++) {
        check_fingerprint(&first, "eval-choices", &run->choices.sets[i].file);
    }
}

// Refuses data that are not the same on every rank.
static void check_ranks(const Run *run) {
    const Mixture *sets[] = {&run->train_data, &run->valid_data};
    for (int i = 0; run->group.ranks > 1 && i < 2; i++) {
        const char *own = sets[i]->identity != NULL ? sets[i]->identity : "";
        FREED char *first = group_text(&run->group, own);
        if (!mixture_match(sets[i], first, "rank 0")) {
            die("--%s %s; every rank needs the same shards", data_options[i], error_text());
        }
    }
}

// Refuses ranks that differ in which token ends a document, if that matters: each rank looks for
// the tokenizer beside its own copy of the shards.
static void check_ends(const Run *run) {
    const Options *o = &run->options;
    char own[16];
    bool needed = o->eod_mask_loss || (run_resets(run) && count_unlisted(run, false) > 0);
    if (run->group.ranks == 1 || !needed) { return; }
    snprintf(own, sizeof(own), "%d", run->document_end);
    FREED char *first = group_text(&run->group, own);
    if (strcmp(first, own) != 0) {
        die("--data: documents end with token %s, on rank 0 with %s (-1: not known); every rank "
            "needs the same tokenizer.bin beside the shards, or give --tokenizer",
            own, first);
    }
}

// Refuses a set with an answer that is longer than a sequence: it would end the run at its first
// evaluation.
static void check_answers(const Run *run, const ChoiceSet *set) {
    int most = run->config.seq_length + 1, length;
    FREED int *tokens = malloc_or_die((size_t)most * sizeof(int));
    for (int q = 0; q < set->count; q++) {
        for (int a = 0; a < set->questions[q].answers; a++) {
            if (choices_row(set, q, a, most, tokens, &length) > 0) { continue; }
            die("--eval-choices %s: answer %d of question %d has %d tokens, too many for "
                "--seq-length %d",
                set->file.path, a, q, length, run->config.seq_length);
        }
    }
}

static void open_choices(Run *run) {
    const Options *o = &run->options;
    if (o->eval_choices[0] == '\0' || o->sample_only) { return; }
    if (!choice_sets_open(&run->choices, o->eval_choices, run->config.vocab)) {
        die_of_data(o, "eval-choices");
    }
    for (int i = 0; i < run->choices.count; i++) { check_answers(run, &run->choices.sets[i]); }
}

void run_open_data(Run *run) {
    const Options *o = &run->options;
    Mixture *valid = &run->valid_data;
    run_open_train_data(run);
    if (run->train_data.count > 0) { announce_train_data(run); }
    if (o->valid_data[0] != '\0' && !o->sample_only) {
        open_mixture(run, valid, "valid-data", o->valid_data);
        const char *both = mixture_shares(&run->train_data, valid);
        if (both != NULL && run->group.rank == 0) {
            warn("--valid-data: %s is also in --data: its loss says nothing of unseen text", both);
        }
        char counted[64];
        int64_t samples = run_eval_all_samples(run);
        printf("  validation  %s tokens, %s%s sequence%s an evaluation\n",
               format_count((char[32]){0}, valid->tokens),
               say_counted(counted, valid->masked, valid->targets),
               format_count((char[32]){0}, samples), plural(samples));
        for (int i = 0; i < valid->count && valid->count > 1; i++) {
            samples = run_eval_samples(run, i);
            printf("  source      %s: %.4g%% of the loss, %s sequence%s\n",
                   valid->sources[i].pattern, 100 * blend_share(&valid->blend, i),
                   format_count((char[32]){0}, samples), plural(samples));
        }
    }
    if (run->train_data.count + valid->count > 0) { announce_documents(run); }
    open_choices(run);
    for (const ChoiceSet *s = run->choices.sets; s < run->choices.sets + run->choices.count; s++) {
        printf("  choices     %s, %d question%s%s\n", s->name, s->count, plural(s->count),
               s->lm_eval ? ", lm-eval's text" : "");
    }
}

// The data are opened as short sequences, because a plan may be for longer sequences and larger
// batches than the data have.
void run_plan_data(Run *run) {
    enum { LENGTH = 64, WINDOWS = 64 };
    const Options *o = &run->options;
    const char *patterns[] = {reads_train_data(o) ? o->data : "",
                              o->sample_only ? "" : o->valid_data};
    Mixture *sets[] = {&run->train_data, &run->valid_data};
    int inputs[WINDOWS * LENGTH], targets[WINDOWS * LENGTH];
    for (int i = 0; i < 2; i++) {
        Mixture *m = sets[i];
        if (patterns[i][0] == '\0' || m->count > 0) { continue; }
        int length = (int)min64(LENGTH, o->seq_length);
        bool ok = mixture_open(m, patterns[i], length, o->vocab_size, -1, false);
        for (const Dataset *data = m->data; ok && data < m->data + m->count; data++) {
            Loader loader = {.data = data};
            ok = loader_batch(&loader, 0, WINDOWS, data->windows, inputs, targets, NULL);
        }
        if (!ok) { die_of_data(o, data_options[i]); }
        for (int s = 0; s < m->count; s++) {
            warn_of_missing(run, data_options[i], &m->sources[s], &m->data[s]);
        }
    }
    run_open_tokenizer(run);
    check_fingerprints(run);
    open_choices(run);
}

void run_check_data(Run *run) {
    check_fingerprints(run);
    check_ranks(run);
    check_ends(run);
}

static const char whose[] = "the checkpoint's run";

// Whether an evaluation reads the same data as in the checkpoint's run. Returns true, too, if the
// run has no validation data or the checkpoint records none.
static bool match_valid_data(const Run *run) {
    const Checkpoint *c = &run->start;
    int64_t tokens = run_eval_all_samples(run) * run->options.seq_length;
    if (run->valid_data.count == 0 || c->valid_data[0] == '\0') { return true; }
    if (!mixture_match(&run->valid_data, c->valid_data, whose)) {
        return fail("--valid-data changed: %s", error_text());
    }
    return tokens == c->valid_tokens ||
           fail("an evaluation has %lld tokens, had %lld (--eval-iters counts global batches)",
                (long long)tokens, (long long)c->valid_tokens);
}

void run_match_data(Run *run) {
    const char *train = run->start.data;
    if (!options_train(&run->options)) { return; }
    if (!match_valid_data(run)) {
        printf("  %s; the best loss so far is not of these\n", error_text());
        run->progress.best_valid_loss = NAN;
    }
    if (train[0] == '\0' || mixture_match(&run->train_data, train, whose)) { return; }
    if (!run->options.accept_data_change) {
        die("--data %s; --accept-data-change resumes with it", error_text());
    }
    printf("  --data changed: %s\n", error_text());
    // level and best_level are losses on the previous data, so they no longer count
    run->progress.level = run->progress.best_level = NAN;
}

// ---- batches ------------------------------------------------------------------------------------

int run_micro_batches(const Run *run) {
    return run->options.global_batch_size / (run->options.micro_batch_size * run->group.ranks);
}

int64_t run_step_targets(const Run *run, int64_t ahead) {
    int batch = run->options.global_batch_size;
    return loader_targets(&run->train, run->progress.samples + ahead * batch, batch);
}

// The micro-batches that a rank reads are `stride` samples apart, also from one step to the next.
void run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets, int *starts) {
    // If a rank cannot read its data, the other ranks learn of this one step later, and all ranks
    // need data for that step. So data are read two steps in advance.
    enum { STEPS_AHEAD = 2 };
    const Options *o = &run->options;
    int B = o->micro_batch_size;
    int64_t n = (int64_t)B * run->train.data->seq_length, stride = (int64_t)run->group.ranks * B;
    int64_t step = run->progress.samples + ahead * o->global_batch_size; // the step's first sample
    int64_t sample = step + ((int64_t)micro * run->group.ranks + run->group.rank) * B;
    int64_t slots = STEPS_AHEAD * run_micro_batches(run) + 1;
    int64_t left = max64(1, min64(STEPS_AHEAD + 1, o->train_iters - run->progress.step - ahead));
    int64_t end = min64(sample + slots * stride, step + left * o->global_batch_size);
    bool first = run->prefetched == NULL, resets = run_resets(run);
    int64_t arrays = resets ? 3 : 2; // arrays of a batch, each of n numbers
    assert(resets || starts == NULL);
    if (first) {
        run->prefetched = malloc_or_die((size_t)(slots * arrays * n) * sizeof(int));
        run->prefetched_end = sample;
    }
    run_beat(run, ACTIVITY_WORK, "reading data");
    for (; run->prefetched_end < end && run->data_fault.text[0] == '\0';
         run->prefetched_end += stride) {
        int *batch = run->prefetched + run->prefetched_end / stride % slots * arrays * n;
        if (loader_batch(&run->train, run->prefetched_end, B, INT64_MAX, batch, batch + n,
                         resets ? batch + 2 * n : NULL)) {
            continue;
        }
        if (first) { die("--data %s", error_text()); }
        run_end_by_data(run, "data");
        break;
    }
    const int *from = run->prefetched + sample / stride % slots * arrays * n;
    memcpy(inputs, from, (size_t)n * sizeof(int));
    memcpy(targets, from + n, (size_t)n * sizeof(int));
    if (starts != NULL) { memcpy(starts, from + 2 * n, (size_t)n * sizeof(int)); }
    run_beat(run, ACTIVITY_WAIT, "in a step");
}

// In a mixture, each source contributes its share of the samples, but at least one sample.
int64_t run_eval_samples(const Run *run, int source) {
    const Blend *blend = &run->valid_data.blend;
    int64_t all = run->valid_data.data[source].windows;
    int64_t requested = min64(run->options.eval_iters, run->valid_data.windows) *
                        run->options.global_batch_size;
    if (requested == 0) { return all; }
    return min64(all, max64(1, blend_count(blend, source, requested)));
}

int64_t run_eval_all_samples(const Run *run) {
    int64_t sum = 0;
    for (int i = 0; i < run->valid_data.count; i++) { sum += run_eval_samples(run, i); }
    return sum;
}

int64_t run_eval_targets(const Run *run, int source) {
    Loader loader = {.data = &run->valid_data.data[source]};
    return loader_targets(&loader, 0, run_eval_samples(run, source));
}

void run_eval_batch(Run *run, int source, int64_t sample, int *inputs, int *targets, int *starts) {
    Loader loader = {.data = &run->valid_data.data[source]};
    int B = run->options.micro_batch_size;
    run_beat(run, ACTIVITY_WORK, "reading data");
    if (!loader_batch(&loader, sample, B, run_eval_samples(run, source), inputs, targets, starts)) {
        run_end_by_data(run, "valid-data");
        loader_batch(&loader, 0, B, 0, inputs, targets, starts);
    }
    run_beat(run, ACTIVITY_WAIT, "in an evaluation");
}
