// The tokenizer of a run: which one it is, and the files that are saved with the model.
#include "../checkpoints/hugging_face.h"
#include "run_data.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- finding ------------------------------------------------------------------------------------

// Adds to *found the files *tokenizer.bin in the folders of the shards that a pattern matches.
static void find_beside(glob_t *found, const char *shards) {
    static const char ending[] = "*" TOKENIZER_FILE;
    char beside[PATH_LENGTH], last[PATH_LENGTH] = "/";
    CLOSED(globfree) glob_t files = {0};
    pattern_files(shards, &files);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        const char *path = files.gl_pathv[i];
        size_t used = pattern_add(beside, 0, path, (size_t)(path_name(path) - path), true);
        used = pattern_add(beside, used, ending, sizeof(ending) - 1, false);
        if (used < PATH_LENGTH && strcmp(beside, last) != 0) {
            glob(beside, GLOB_APPEND, NULL, found);
        }
        path_format(last, "%s", beside);
    }
}

// Sets `out` to the path of another file of a tokenizer, such as PREFIX_tokenizer.json beside
// PREFIX_tokenizer.bin. Returns false if the tokenizer's file has another name.
static bool file_beside(char out[PATH_LENGTH], const char *tokenizer, const char *name) {
    const char *end = strstr(path_name(tokenizer), TOKENIZER_FILE);
    if (end != NULL) { path_format(out, "%.*s%s", (int)(end - tokenizer), tokenizer, name); }
    return end != NULL;
}

static FoundTokenizer read_tokenizer(const char *path) {
    FoundTokenizer found = {0};
    Tokenizer t;
    path_format(found.path, "%s", path);
    if (tokenizer_open(&t, path)) {
        found.vocab = t.vocab;
        found.document_end = t.document_end;
        found.fingerprint = t.fingerprint;
        tokenizer_close(&t);
    }
    return found;
}

// Returns what read_tokenizer returns for a file beside the shards. The first call for a file reads
// it, and warns if it cannot be read.
static FoundTokenizer read_beside(Run *run, const char *path) {
    for (int i = 0; i < run->num_beside; i++) {
        if (strcmp(run->beside[i].path, path) == 0) { return run->beside[i]; }
    }
    FoundTokenizer found = read_tokenizer(path);
    if (found.vocab == 0) { warn("%s", error_text()); }
    size_t count = (size_t)run->num_beside + 1;
    run->beside = realloc_or_die(run->beside, count * sizeof(FoundTokenizer));
    run->beside[run->num_beside++] = found;
    return found;
}

// Finds the tokenizer that made some shards, among the files tokenizer.bin and PREFIX_tokenizer.bin
// beside the shards. fingerprint: the fingerprint of the shards' tokenizer (tokenizer.h), or 0 if
// it is not known. If it is known, only tokenizers with this fingerprint fit; of several, the
// function finds the one whose path has the longest beginning in common with the shards' path. If
// it is not known, only tokenizer.bin fits. Returns false if no tokenizer fits.
static bool find_made(Run *run, const char *shards, uint32_t fingerprint, FoundTokenizer *made) {
    CLOSED(globfree) glob_t files = {0};
    size_t closest = 0;
    bool found = false;
    find_beside(&files, shards);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        FoundTokenizer beside = read_beside(run, files.gl_pathv[i]);
        size_t length = 0; // how many characters the two paths have in common at the beginning
        while (shards[length] != '\0' && shards[length] == beside.path[length]) { length++; }
        bool named = strcmp(path_name(beside.path), TOKENIZER_FILE) == 0;
        bool fits = fingerprint != 0 ? beside.fingerprint == fingerprint : named;
        if (beside.vocab == 0 || !fits) { continue; }
        if (found && beside.fingerprint != made->fingerprint) {
            warn("%s: other tokens than %s, and the shards do not say which they have; give those "
                 "of one tokenizer",
                 beside.path, made->path);
        }
        if (!found || length > closest) {
            *made = beside;
            closest = length;
        }
        found = true;
    }
    return found;
}

// Reads the sources of --data or, if --data is not given, of --valid-data. Dies on a fault.
static int read_sources(const Options *o, Source **sources) {
    bool trains = o->data[0] != '\0';
    int count = sources_read(trains ? o->data : o->valid_data, sources);
    if (count == 0) { die("--%s %s", trains ? "data" : "valid-data", error_text()); }
    return count;
}

// Calls find_made for one source after another, until one has a tokenizer. With `chats`, it skips
// sources whose shards have no conversations.
static bool find_of_sources(Run *run, const Options *o, bool chats, FoundTokenizer *made) {
    bool found = false;
    FREED Source *sources = NULL;
    int count = read_sources(o, &sources);
    for (int i = 0; i < count && !found; i++) {
        const char *pattern = sources[i].pattern;
        TokenFile shard;
        bool shards = shards_find(pattern, chats ? SHARD_MASKED : 0, &shard);
        uint32_t fingerprint = shards ? shard.tokenizer : 0;
        found = shards && (fingerprint != 0 || !chats) &&
                find_made(run, chats ? shard.path : pattern, fingerprint, made);
    }
    return found;
}

// Whether the run's data have conversations with SHARD.starts (loader.h).
static bool has_chats(const Options *o) {
    bool chats = false;
    TokenFile shard;
    FREED Source *sources = NULL;
    int count = read_sources(o, &sources);
    for (int i = 0; i < count && !chats; i++) {
        chats = shards_find(sources[i].pattern, SHARD_STARTED, &shard);
    }
    return chats;
}

// Finds the tokenizer that --tokenizer names, else the checkpoint's, else the one beside the
// shards. If there is none, the path is empty and vocab is 0. If the file cannot be read, which
// run_open_tokenizer reports, vocab is 0. document_end is the token that ends a document of the
// shards.
static FoundTokenizer find_tokenizer(Run *run, const Options *o) {
    const char *shards = o->data[0] != '\0' ? o->data : o->valid_data;
    bool given = option_source(o, "tokenizer") >= SOURCE_CHECKPOINT, has_shards = *shards != '\0';
    bool starts = !given && o->origin[0] != '\0';
    FoundTokenizer found = {0}, beside;
    char path[PATH_LENGTH];
    path_format(path, "%s/" TOKENIZER_FILE, o->origin);
    bool theirs = starts && path_exists(path);
    if (given || theirs) {
        found = read_tokenizer(given ? o->tokenizer : path);
        // the tokenizer of a checkpoint does not know which token the data have between documents
        if (theirs && found.vocab > 0 && has_shards && find_of_sources(run, o, false, &beside) &&
            beside.fingerprint == found.fingerprint) {
            found.document_end = beside.document_end;
        }
    } else if (has_shards) {
        bool made = find_of_sources(run, o, false, &found);
        if (starts && path_exists(path_format(path, "%s/tokenizer.json", o->origin))) {
            warn("%s is not compared with the tokens of %s: scripts/convert_hf import makes a "
                 "start with a tokenizer.bin",
                 path, shards);
        }
        if (!made && run->num_beside > 0) {
            warn("no tokenizer.bin beside %s has its fingerprint: samples are numbers "
                 "(--tokenizer names one)",
                 shards);
        }
    }
    // if the run trains on conversations, and the same tokenizer with a tokenizer.json lies beside
    // their shards, takes the files there, because their chat template wrote the conversations
    if (found.vocab > 0 && !given && o->data[0] != '\0' && find_of_sources(run, o, true, &beside) &&
        beside.fingerprint == found.fingerprint) {
        bool json = file_beside(path, beside.path, companion_names[SAVED_TOKENIZER_JSON]);
        if (json && path_exists(path)) { path_format(found.path, "%s", beside.path); }
    }
    return found;
}

bool run_set_by_data(void *context, Options *o) {
    Run *run = context;
    FoundTokenizer found = find_tokenizer(run, o);
    bool ok = option_set(o, "tokenizer", found.path, SOURCE_DERIVED) &&
              (found.vocab == 0 || options_set(o, SOURCE_DERIVED, "vocab-size %d", found.vocab));
    run->document_end = found.vocab > 0 ? found.document_end : -1;
    // a run that resumes or evaluates a checkpoint treats documents as the checkpoint's run did
    bool continues = run->start.options != NULL && (o->resumes || o->eval_only);
    return ok &&
           (continues || !has_chats(o) ||
            options_set(o, SOURCE_DERIVED, "reset-attention-mask true reset-position-ids true"));
}

int run_document_end(Run *run, const char *shards) {
    bool given = option_source(&run->options, "tokenizer") >= SOURCE_CHECKPOINT;
    TokenFile shard;
    FoundTokenizer made;
    bool known = !given && shards_find(shards, 0, &shard) && shard.tokenizer != 0 &&
                 find_made(run, shards, shard.tokenizer, &made);
    return known ? made.document_end : run->document_end;
}

// ---- opening, and what is saved with the model --------------------------------------------------

Companion run_read_companion(const char *path) {
    static const char mark[] = "\xef\xbb\xbf";
    enum { MARK = sizeof(mark) - 1 };
    Companion c = {0};
    if (!path_exists(path)) { return c; }
    c.bytes = file_read(path, &c.size);
    if (c.bytes == NULL) { die("%s", error_text()); }
    if (c.size >= MARK && memcmp(c.bytes, mark, MARK) == 0) {
        memmove(c.bytes, c.bytes + MARK, c.size -= MARK);
    }
    if (strstr(path_name(path), ".json") == NULL) { return c; }
    CLOSED(json_close) cJSON *json = json_parse(c.bytes, c.size);
    if (cJSON_IsObject(json)) { return c; }
    warn("%s: not JSON in UTF-8 with an object, so it is left out; download it, or prepare the "
         "data, again",
         path);
    free(c.bytes);
    return (Companion){0};
}

// Warns if a token that ends answers has an embedding of zeros in the weights that the run starts
// from (--load). Base models have such embeddings for tokens that only models tuned from them use.
// ends: the generation_config.json of the data. Returns whether it has warned.
static bool warn_of_unseen(Run *run, const Companion *ends) {
    const float ZERO = 1e-10f; // other embeddings are far larger
    int64_t width = run->config.channels, vocab = run->config.vocab;
    CLOSED(json_close) cJSON *json = json_parse(ends->bytes, ends->size);
    const cJSON *id, *ids = cJSON_GetObjectItemCaseSensitive(json, "eos_token_id");
    FREED float *row = malloc_or_die((size_t)width * sizeof(float));
    cJSON_ArrayForEach(id, ids) {
        int64_t token = json_count(id), begin = run->layout.params[0].offset + token * width;
        int64_t from = max64(1, begin); // where it is 0, the whole file would be checked
        if (token < 0 || token >= vocab) { continue; }
        // the run reads all weights later, and ends if they cannot be read
        if (!checkpoint_weights(&run->start, &run->layout, from, begin + width, row)) { break; }
        bool zero = true;
        for (int64_t i = 0; i < begin + width - from; i++) { zero &= fabsf(row[i]) < ZERO; }
        if (zero) {
            warn("--load %s: the embedding of token %lld, which ends answers, is zero: this model "
                 "was not trained with the chat template; start from one that was",
                 run->options.load, (long long)token);
            return true;
        }
    }
    return false;
}

// Adds the tokens that end answers, which the generation_config.json beside conversations names,
// to the one that is saved, and warns if one was never trained. A mixture's sources may name
// different tokens.
static void add_ends(Run *run) {
    Companion *saved = &run->saves.companions[SAVED_GENERATION_CONFIG];
    const Companion *config = &run->saves.start_config;
    char path[PATH_LENGTH];
    TokenFile shard;
    const Options *o = &run->options;
    bool warned = o->load[0] == '\0' || o->resumes;
    FREED Source *sources = NULL;
    CLOSED(globfree) glob_t files = {0};
    int count = read_sources(o, &sources);
    for (int i = 0; i < count; i++) {
        if (shards_find(sources[i].pattern, SHARD_MASKED, &shard)) {
            find_beside(&files, sources[i].pattern);
        }
    }
    for (size_t i = 0; i < files.gl_pathc; i++) {
        const char *tokenizer = files.gl_pathv[i];
        if (read_beside(run, tokenizer).fingerprint != run->tokenizer.fingerprint ||
            !file_beside(path, tokenizer, companion_names[SAVED_GENERATION_CONFIG])) {
            continue;
        }
        Companion ends = run_read_companion(path);
        if (ends.bytes == NULL) { continue; }
        warned = warned || warn_of_unseen(run, &ends);
        char *text = hf_add_ends(saved->bytes, saved->size, config->bytes, config->size, ends.bytes,
                                 ends.size);
        free(ends.bytes);
        if (text == NULL) { continue; }
        free(saved->bytes);
        *saved = (Companion){text, strlen(text)};
    }
}

// Reads the files that go into every checkpoint, so that a checkpoint needs no other files:
// - the tokenizer;
// - Hugging Face's files for the tokenizer, such as PREFIX_tokenizer.json beside
//   PREFIX_tokenizer.bin; for the byte tokenizer, this program makes them;
// - the generation_config.json of the checkpoint that the run starts from; add_ends adds to it.
// Also reads that checkpoint's config.json.
static void read_companions(Run *run) {
    const Options *o = &run->options;
    Companion *saved = run->saves.companions;
    char path[PATH_LENGTH];
    if (o->origin[0] != '\0') {
        path_format(path, "%s/%s", o->origin, companion_names[SAVED_GENERATION_CONFIG]);
        saved[SAVED_GENERATION_CONFIG] = run_read_companion(path);
        path_format(path, "%s/config.json", o->origin);
        run->saves.start_config = run_read_companion(path);
    }
    if (run->tokenizer.vocab == 0) { return; }
    saved[SAVED_TOKENIZER] = (Companion){malloc_or_die(run->tokenizer.bytes), run->tokenizer.bytes};
    memcpy(saved[SAVED_TOKENIZER].bytes, run->tokenizer.data, run->tokenizer.bytes);
    bool known = true;
    for (int i = SAVED_TOKENIZER_JSON; i <= SAVED_CHAT_TEMPLATE && known; i++) {
        if (file_beside(path, o->tokenizer, companion_names[i])) {
            saved[i] = run_read_companion(path);
        }
        known = saved[SAVED_TOKENIZER_JSON].bytes != NULL; // the others need tokenizer.json
    }
    Cut cut = run->tokenizer.cut;
    if (strcmp(hf_model_type(o), "qwen2") == 0 && cut != CUT_LLAMA3_DIGITS && cut != CUT_UNKNOWN) {
        warn("transformers 5 opens the tokenizer of a Qwen2 model as Qwen's, which cuts texts "
             "in another way than %s: there, open the tokenizer from a folder without config.json",
             o->tokenizer);
    }
    if (known || cut != CUT_BYTES) { return; }
    char *json = tokenizer_json(&run->tokenizer), *settings = tokenizer_config_json();
    saved[SAVED_TOKENIZER_JSON] = (Companion){json, strlen(json)};
    saved[SAVED_TOKENIZER_CONFIG] = (Companion){settings, strlen(settings)};
}

void run_open_tokenizer(Run *run) {
    const Options *o = &run->options;
    if (o->tokenizer[0] != '\0' && !tokenizer_open(&run->tokenizer, o->tokenizer)) {
        die("--tokenizer %s", error_text());
    }
    // documents may end with another token in the data than in a checkpoint's tokenizer
    if (run->tokenizer.vocab > 0 && run->document_end >= 0) {
        tokenizer_set_document_end(&run->tokenizer, run->document_end);
    }
    int vocab = run->config.vocab, tokens = run->tokenizer.vocab;
    if (tokens > vocab) {
        die("--tokenizer %s: vocabulary %d, larger than the model's %d (--vocab-size)",
            o->tokenizer, tokens, vocab);
    }
    if (tokens > 0 && vocab >= 2 * tokens && o->origin[0] == '\0') {
        printf("  note: --vocab-size %d is far above the %d tokens of %s: leave it out, or give "
               "--vocab-size %d\n",
               vocab, tokens, o->tokenizer, tokens);
    }
    if (run->group.rank > 0) { return; }
    if (options_save(o)) { read_companions(run); }
    if (options_train(o) && tokens > 0) { add_ends(run); }
}
