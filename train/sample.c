// Samples: reads the prompt, chooses tokens, prints them.
#include "../base/rng.h"
#include "run.h"
#include "start.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Returns the text of --sample-tokens, or of the file that the option names. The caller frees it.
static char *tokens_text(const char *given) {
    size_t bytes;
    if (given[0] != '@') { return strdup_or_die(given); }
    char *text = file_read(given + 1, &bytes);
    if (text == NULL) { return NULL; }
    text = realloc_or_die(text, bytes + 1);
    text[bytes] = '\0';
    return text;
}

// Sets run->prompt to the tokens of --sample-tokens.
static bool read_prompt(Run *run) {
    const char *given = run->options.sample_tokens;
    if (given[0] == '@' && options_train(&run->options)) { // a resumed run may not find the file
        return fail("--sample-tokens %s: a file only with --sample-only; give the numbers", given);
    }
    FREED char *held = tokens_text(given);
    char *text = held, *end;
    if (held == NULL) { return fail("--sample-tokens %s", error_text()); }
    run->prompt = malloc_or_die((strlen(text) + 1) * sizeof(int));
    for (run->prompt_length = 0; *(text += strspn(text, " ,\t\r\n")) != '\0'; text = end) {
        errno = 0;
        long id = strtol(text, &end, 10);
        if (end == text || errno != 0 || id < 0 || id >= run->config.vocab) {
            return fail("--sample-tokens: '%.20s' is no token of the vocabulary of %d", text,
                        run->config.vocab);
        }
        run->prompt[run->prompt_length++] = (int)id;
    }
    return run->prompt_length > 0 || fail("--sample-tokens: no numbers");
}

// Sets run->prompt to the token with which every document begins, followed by the tokens of
// --sample-prompt.
static bool encode_prompt(Run *run) {
    const char *text = run->options.sample_prompt;
    size_t bytes = strlen(text);
    run->prompt = malloc_or_die((bytes + 1) * sizeof(int));
    bool tokenizer = run->tokenizer.vocab > 0;
    run->prompt[0] = tokenizer ? run->tokenizer.begin_of_text : run->config.vocab - 1;
    run->prompt_length = 1;
    if (bytes == 0) { return true; }
    if (!tokenizer) {
        const Options *o = &run->options;
        bool starts = o->origin[0] != '\0', theirs = starts && run->start.options == NULL;
        if (!starts && o->data[0] == '\0') {
            return fail("--sample-prompt: no weights and no tokenizer: give --load or --resume");
        }
        return fail("--sample-prompt: there is no tokenizer.bin %s%s to encode it with (%s)",
                    starts ? "in " : "beside the shards", o->origin,
                    theirs ? "scripts/convert_hf import makes one of a tokenizer.json"
                           : "--tokenizer");
    }
    if (run->group.rank == 0 &&
        tokenizer_names_end(&run->tokenizer, (const unsigned char *)text, bytes)) {
        warn("--sample-prompt: it contains the end-of-text token's name, which is cut as any text; "
             "--sample-tokens takes tokens, and scripts/chat writes those of a conversation");
    }
    Encoder e;
    int count = -1;
    if (encoder_open(&e, &run->tokenizer)) {
        count = (int)encoder_encode(&e, (const unsigned char *)text, bytes, run->prompt + 1);
        encoder_close(&e);
    }
    run->prompt_length += count;
    return count >= 0 || fail("--sample-prompt: the tokenizer %s: %s; scripts/chat encodes a "
                              "message with any tokenizer.json",
                              run->options.tokenizer, error_text());
}

bool run_encode_prompt(Run *run) {
    const Options *o = &run->options;
    bool numbers = o->sample_tokens[0] != '\0';
    if (!(numbers ? read_prompt(run) : encode_prompt(run))) { return false; }
    int over = run->prompt_length - o->seq_length;
    if (over > 0 && run->group.rank == 0) {
        warn("--sample-%s: %d tokens, more than a sequence of %d (--seq-length, at most %d): the "
             "model does not see the first %d",
             numbers ? "tokens" : "prompt", run->prompt_length, o->seq_length,
             o->max_position_embeddings, over);
    }
    return true;
}

static int compare_descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? 1 : (x > y ? -1 : 0);
}

// Chooses the next token by temperature and top-k. scratch: [V]. position: the token's number in
// the sample.
static int sample_token(const Options *o, const float *logits, float *scratch, int V,
                        int64_t position) {
    int top = 0;
    for (int i = 1; i < V; i++) {
        if (logits[i] > logits[top]) { top = i; }
    }
    if (!(o->sample_temperature > 0)) { return top; }
    float threshold = -INFINITY;
    if (o->sample_top_k > 0 && o->sample_top_k < V) {
        memcpy(scratch, logits, (size_t)V * sizeof(float));
        qsort(scratch, (size_t)V, sizeof(float), compare_descending);
        threshold = scratch[o->sample_top_k - 1];
    }
    double sum = 0;
    for (int i = 0; i < V; i++) {
        double above = (double)(logits[i] - logits[top]) / o->sample_temperature;
        scratch[i] = logits[i] >= threshold ? (float)exp(above) : 0.0f;
        sum += scratch[i];
    }
    double chosen = sum * rng_uniform((uint64_t)o->seed, (uint64_t)position);
    for (int i = 0; i < V; i++) {
        chosen -= scratch[i];
        if (chosen < 0) { return i; }
    }
    return top;
}

// Prints bytes of a sample. On a terminal, and in the output of a run that trains, each control
// character is printed as its code, such as \x1b for ESC, so that no terminal executes it. A file
// or pipe that receives the sample of --sample-only gets every byte unchanged. *before: the
// previous byte of the sample. (In UTF-8, 0x80 to 0x9f are control characters, too, if they follow
// 0xc2.)
static void print_bytes(const Run *run, const void *from, size_t n, unsigned char *before) {
    const unsigned char *bytes = from;
    FILE *out = run->console.answers;
    bool terminal = options_train(&run->options) || isatty(fileno(out));
    for (size_t i = 0; i < n; *before = bytes[i++]) {
        bool command = (bytes[i] < ' ' && bytes[i] != '\n' && bytes[i] != '\t') ||
                       bytes[i] == 0x7f || (*before == 0xc2 && bytes[i] >= 0x80 && bytes[i] < 0xa0);
        fprintf(out, terminal && command ? "\\x%02x" : "%c", bytes[i]);
    }
}

// Warns that, from token number `position` of the sample on, the model no longer sees the first
// token of the prompt.
static void warn_of_window(const Run *run, int position) {
    const Options *o = &run->options;
    if (isatty(fileno(run->console.answers))) { fputs("\n", run->console.answers); }
    fflush(run->console.answers);
    warn("--sample-length %d: from token %d of the sample on, the model does not see the beginning "
         "of the prompt: a sequence is %d (--seq-length, at most %d)",
         o->sample_length, position, o->seq_length, o->max_position_embeddings);
}

void run_sample(Run *run, NextLogits next_logits, void *trainer) {
    const Options *o = &run->options;
    int V = run->config.vocab, count = run->prompt_length;
    float cap = run->config.loss.softcap;
    FREED int *tokens = malloc_or_die((size_t)(count + o->sample_length) * sizeof(int));
    FREED float *scratch = malloc_or_die((size_t)V * sizeof(float));
    memcpy(tokens, run->prompt, (size_t)count * sizeof(int));
    FILE *out = run->console.answers;
    unsigned char before = 0;
    bool asked = o->sample_only && count > 1 && run->group.rank == 0 && // there is a prompt
                 option_source(o, "sample-length") >= SOURCE_CHECKPOINT;
    printf("%ssample after step %lld:\n", line_start(STDOUT_FILENO), (long long)run->progress.step);
    fflush(stdout);
    print_bytes(run, o->sample_prompt, strlen(o->sample_prompt), &before);
    for (int i = 0; i < o->sample_length && run_stop_signal() == 0; i++, count++) {
        int n = (int)min64(count, run->config.seq_length), length;
        run_beat(run, ACTIVITY_WAIT, "writing a sample");
        if (asked && i > 0 && count == o->seq_length + 1) { warn_of_window(run, i + 1); }
        float *logits = next_logits(trainer, tokens + count - n, n);
        for (int v = 0; v < V && cap > 0; v++) { logits[v] = cap * tanhf(logits[v] / cap); }
        int token = tokens[count] = sample_token(o, logits, scratch, V, i);
        if (run->tokenizer.vocab > 0 && o->sample_tokens[0] == '\0') {
            const Tokenizer *t = &run->tokenizer;
            if (token == t->end_of_text || token == t->document_end) { break; }
            const unsigned char *bytes = tokenizer_decode(t, token, &length);
            print_bytes(run, bytes, (size_t)length, &before);
        } else {
            fprintf(out, "%d ", token);
        }
        console_flush(run);
    }
    fputs("\n", out);
    console_flush(run);
}
