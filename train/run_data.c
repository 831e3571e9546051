// What a run reads: shards, validation shards, multiple-choice sets, the tokenizer; and which
// sequences of them a rank reads in a step and in an evaluation.
#include "run.h"

#include <string.h>

// ---- opening ------------------------------------------------------------------------------------

// Evaluating and sampling alone need no training data, but may use the tokenizer beside it.
static void open_train_data(Run *run) {
    const Options *o = &run->options;
    Error err;
    if (o->data[0] == '\0' && !options_train(o)) { return; }
    if (o->data[0] == '\0') { die("--data is missing: which shards to train on (--help)"); }
    if (!dataset_open(&run->train_data, o->data, o->seq_length, o->vocab_size, &err)) {
        die("--data %s", err.text);
    }
    if (run->train_data.windows < o->global_batch_size) {
        die("--data %s: %lld sequences of %d tokens, fewer than one --global-batch-size %d; give "
            "more data or a smaller batch",
            o->data, (long long)run->train_data.windows, o->seq_length, o->global_batch_size);
    }
    run->train = (Loader){&run->train_data, (uint64_t)o->seed, o->shuffle};
    printf("  training    %lld tokens in %d shard%s, %lld sequences an epoch\n",
           (long long)run->train_data.tokens, run->train_data.num_shards,
           run->train_data.num_shards > 1 ? "s" : "", (long long)run->train_data.windows);
}

// --tokenizer, or the tokenizer.bin beside the shards, if there is one.
static void open_tokenizer(Run *run) {
    const Options *o = &run->options;
    const char *beside = o->data[0] != '\0' ? o->data : o->valid_data;
    const char *near = o->tokenizer[0] != '\0' ? o->tokenizer : beside;
    const char *slash = strrchr(near, '/');
    char path[PATH_LENGTH];
    Error err;
    path_format(run->tokenizer_folder, "%.*s", slash != NULL ? (int)(slash - near) : 1,
                slash != NULL ? near : ".");
    path_format(path, "%s", o->tokenizer);
    if (o->tokenizer[0] == '\0') {
        path_format(path, "%s/tokenizer.bin", run->tokenizer_folder);
        if (near[0] == '\0' || !path_exists(path)) { return; }
    }
    if (!tokenizer_open(&run->tokenizer, path, &err)) { die("--tokenizer %s", err.text); }
    if (run->tokenizer.vocab > run->config.vocab) {
        die("--tokenizer %s: vocabulary %d, larger than the model's %d (--vocab-size)", path,
            run->tokenizer.vocab, run->config.vocab);
    }
    run->has_tokenizer = true;
}

// A file carries a mark of the tokenizer that made it, or 0. All marks must be the same.
static void check_marks(const Run *run) {
    uint32_t mark = run->has_tokenizer ? run->tokenizer.mark : run->train_data.tokenizer;
    const char *other = NULL;
    if (mark == 0) { mark = run->valid_data.tokenizer; }
    for (int i = 0; i < run->choices.count; i++) {
        uint32_t set = run->choices.sets[i].file.tokenizer;
        if (mark == 0) { mark = set; }
        if (set != 0 && set != mark) { other = run->choices.sets[i].file.path; }
    }
    uint32_t valid = run->valid_data.tokenizer, train = run->train_data.tokenizer;
    if (valid != 0 && valid != mark) { other = run->options.valid_data; }
    if (train != 0 && train != mark) { other = run->options.data; }
    if (other != NULL) {
        die("%s: made with another tokenizer than %s; give data, validation data, choices and "
            "--tokenizer of one tokenizer",
            other, run->has_tokenizer ? "the tokenizer.bin" : "the other files of this run");
    }
}

void run_open_data(Run *run) {
    const Options *o = &run->options;
    Error err;
    open_train_data(run);
    if (o->valid_data[0] != '\0') {
        if (!dataset_open(&run->valid_data, o->valid_data, o->seq_length, o->vocab_size, &err)) {
            die("--valid-data %s", err.text);
        }
        run->valid = (Loader){&run->valid_data, 0, false};
        run->has_valid = true;
        printf("  validation  %lld tokens, %lld sequences an evaluation\n",
               (long long)run->valid_data.tokens, (long long)run_eval_samples(run));
    }
    if (o->eval_choices[0] != '\0') {
        if (!choice_sets_open(&run->choices, o->eval_choices, run->config.vocab, &err)) {
            die("--eval-choices %s", err.text);
        }
        for (int i = 0; i < run->choices.count; i++) {
            const ChoiceSet *set = &run->choices.sets[i];
            printf("  choices     %s, %d questions\n", set->name, set->count);
        }
    }
    open_tokenizer(run);
    check_marks(run);
    if (!run_encode_prompt(run, &err)) { die("%s", err.text); }
}

// ---- batches ------------------------------------------------------------------------------------

int run_micro_batches(const Run *run) {
    return run->options.global_batch_size / (run->options.micro_batch_size * run->ranks);
}

void run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets) {
    Error err;
    int B = run->options.micro_batch_size;
    int64_t first = run->progress.samples + ahead * run->options.global_batch_size;
    int64_t sample = first + ((int64_t)micro * run->ranks + run->rank) * B;
    run_beat(run, DOING_WORK, "reading data");
    if (!loader_batch(&run->train, sample, B, INT64_MAX, inputs, targets, &err)) {
        die("--data %s", err.text);
    }
    run_beat(run, DOING_WAIT, "in a step");
}

int64_t run_eval_samples(const Run *run) {
    int64_t all = run->valid_data.windows;
    int64_t requested = min64(run->options.eval_iters, all) * run->options.global_batch_size;
    return requested > 0 ? min64(requested, all) : all;
}

void run_eval_batch(Run *run, int64_t sample, int *inputs, int *targets) {
    Error err;
    run_beat(run, DOING_WORK, "reading data");
    if (!loader_batch(&run->valid, sample, run->options.micro_batch_size, run_eval_samples(run),
                      inputs, targets, &err)) {
        die("--valid-data %s", err.text);
    }
    run_beat(run, DOING_WAIT, "in an evaluation");
}
