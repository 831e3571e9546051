#include "run_tokenizer.h"

#include <stdlib.h>
#include <string.h>

// ---- finding ------------------------------------------------------------------------------------

// Adds the files *tokenizer.bin in the folders of the shards that a pattern matches.
static void find_beside(glob_t *found, const char *shards) {
    static const char ending[] = "*" TOKENIZER_FILE;
    char beside[PATH_LENGTH], last[PATH_LENGTH] = "/";
    glob_t files = {0};
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
    globfree(&files);
}

// Returns the length of the longest common beginning of two paths.
static size_t common_length(const char *a, const char *b) {
    size_t n = 0;
    while (a[n] != '\0' && a[n] == b[n]) { n++; }
    return n;
}

// Opens the tokenizer that made some shards, among those beside the shards (tokenizer.bin,
// PREFIX_tokenizer.bin). fingerprint: that of the shards' tokenizer (tokenizer.h); 0: not known. If
// it is known, opens a tokenizer that has it; of several, the one whose path has the longest
// beginning in common with the shards' path. If it is not known, opens tokenizer.bin. Returns false
// if no tokenizer fits; *others is then true if there are any.
static bool find_made(Tokenizer *t, const char *shards, uint32_t fingerprint,
                      char path[PATH_LENGTH], bool *others) {
    glob_t found = {0};
    size_t closest = 0;
    uint32_t chosen = 0;
    static char warned[PATH_LENGTH]; // the last file that could not be opened
    find_beside(&found, shards);
    path[0] = '\0';
    for (size_t i = 0; i < found.gl_pathc; i++) {
        const char *beside = found.gl_pathv[i];
        size_t length = common_length(beside, shards);
        if (!tokenizer_open(t, beside)) {
            if (strcmp(beside, warned) != 0) { warn("%s", error_text()); }
            path_format(warned, "%s", beside);
            continue;
        }
        bool made = fingerprint != 0 ? t->fingerprint == fingerprint
                                     : strcmp(path_name(beside), TOKENIZER_FILE) == 0;
        if (made && path[0] != '\0' && t->fingerprint != chosen) {
            warn("%s: other tokens than %s, and the shards do not say which they have; give those "
                 "of one tokenizer",
                 beside, path);
        }
        if (made && (path[0] == '\0' || length > closest)) {
            path_format(path, "%s", beside);
            closest = length;
            chosen = t->fingerprint;
        }
        tokenizer_close(t);
    }
    *others = path[0] == '\0' && found.gl_pathc > 0;
    globfree(&found);
    return path[0] != '\0' && tokenizer_open(t, path);
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
static bool find_of_sources(Tokenizer *t, const Options *o, bool chats, char path[PATH_LENGTH],
                            bool *others) {
    bool opened = false;
    Source *sources;
    int count = read_sources(o, &sources);
    for (int i = 0; i < count && !opened; i++) {
        const char *pattern = sources[i].pattern;
        TokenFile shard;
        bool found = shards_find(pattern, chats ? SHARD_MASKED : 0, &shard);
        uint32_t fingerprint = found ? shard.tokenizer : 0;
        opened = (fingerprint != 0 || !chats) &&
                 find_made(t, chats ? shard.path : pattern, fingerprint, path, others);
    }
    free(sources);
    return opened;
}

// If the run trains on conversations and the same tokenizer lies beside their shards, takes that
// copy, with its tokenizer.json, because its chat template has written the conversations.
static void prefer_chat(Tokenizer *t, const Options *o, char path[PATH_LENGTH]) {
    char beside[PATH_LENGTH], json[PATH_LENGTH];
    Tokenizer same;
    bool others;
    if (!find_of_sources(&same, o, true, beside, &others)) { return; }
    path_format(json, "%.*sjson", (int)strlen(beside) - (int)strlen("bin"), beside);
    if (same.fingerprint == t->fingerprint && path_exists(json)) {
        tokenizer_close(t);
        *t = same;
        path_format(path, "%s", beside);
    } else {
        tokenizer_close(&same);
    }
}

// Whether the run's data have conversations with SHARD.starts (loader.h).
static bool has_chats(const Options *o) {
    bool chats = false;
    TokenFile shard;
    Source *sources;
    int count = read_sources(o, &sources);
    for (int i = 0; i < count && !chats; i++) {
        chats = shards_find(sources[i].pattern, SHARD_STARTED, &shard);
    }
    free(sources);
    return chats;
}

// Sets *end to the token that ends a document according to the tokenizer beside the shards, if that
// tokenizer has the same tokens as t. (The tokenizer of a checkpoint does not know which token the
// data have between documents.)
static void find_document_end(const Tokenizer *t, const Options *o, int *end) {
    char path[PATH_LENGTH];
    Tokenizer beside;
    bool others;
    if (!find_of_sources(&beside, o, false, path, &others)) { return; }
    if (beside.fingerprint == t->fingerprint) { *end = beside.document_end; }
    tokenizer_close(&beside);
}

// Opens the tokenizer that --tokenizer names, else the checkpoint's, else the one beside the
// shards. Returns false if there is none; path is then empty. Also returns false if the tokenizer
// cannot be opened, which run_open_tokenizer reports. If it returns true, *document_end is the
// token that ends a document of the shards.
static bool find_tokenizer(Tokenizer *t, const Options *o, char path[PATH_LENGTH],
                           int *document_end) {
    const char *shards = o->data[0] != '\0' ? o->data : o->valid_data;
    bool others = false, opened, given = option_source(o, "tokenizer") >= SOURCE_CHECKPOINT;
    bool starts = !given && o->origin[0] != '\0';
    path_format(path, "%s/" TOKENIZER_FILE, o->origin);
    bool theirs = starts && path_exists(path);
    if (given) { path_format(path, "%s", o->tokenizer); }
    if (given || theirs) {
        opened = tokenizer_open(t, path);
    } else {
        path_format(path, "%s/tokenizer.json", o->origin);
        bool json = starts && path_exists(path);
        path[0] = '\0';
        opened = shards[0] != '\0' && find_of_sources(t, o, false, path, &others);
        if (shards[0] != '\0' && json) {
            warn("%s/tokenizer.json is not compared with the tokens of %s: scripts/convert_hf "
                 "import makes a start with a tokenizer.bin",
                 o->origin, shards);
        }
    }
    if (others) {
        warn("no tokenizer.bin beside %s has its fingerprint: samples are numbers (--tokenizer "
             "names one)",
             shards);
    }
    if (opened) { *document_end = t->document_end; }
    if (opened && theirs && shards[0] != '\0') { find_document_end(t, o, document_end); }
    if (opened && !given && o->data[0] != '\0') { prefer_chat(t, o, path); }
    return opened;
}

bool run_set_by_data(void *context, Options *o) {
    Run *run = context;
    Tokenizer t;
    char path[PATH_LENGTH];
    int document_end;
    bool opened = find_tokenizer(&t, o, path, &document_end);
    bool ok = option_set(o, "tokenizer", path, SOURCE_DERIVED);
    run->document_end = -1;
    if (ok && opened) {
        ok = options_set(o, SOURCE_DERIVED, "vocab-size %d", t.vocab);
        run->document_end = document_end;
        tokenizer_close(&t);
    }
    // a run that resumes or evaluates a checkpoint treats documents as the checkpoint's run did
    bool continues = run->start.options != NULL && (o->resumes || o->eval_only);
    return ok &&
           (continues || !has_chats(o) ||
            options_set(o, SOURCE_DERIVED, "reset-attention-mask true reset-position-ids true"));
}

int run_document_end(const Run *run, const char *shards) {
    bool given = option_source(&run->options, "tokenizer") >= SOURCE_CHECKPOINT, others;
    char path[PATH_LENGTH];
    TokenFile shard;
    Tokenizer made;
    if (given || !shards_find(shards, 0, &shard) || shard.tokenizer == 0 ||
        !find_made(&made, shards, shard.tokenizer, path, &others)) {
        return run->document_end;
    }
    int end = made.document_end;
    tokenizer_close(&made);
    return end;
}

// ---- opening, and what is saved with the model --------------------------------------------------

// Reads a file, if it is there, and drops its byte-order mark, because Hugging Face's transformers
// refuses one.
static Companion read_companion(const char *path) {
    static const char mark[] = "\xef\xbb\xbf";
    enum { MARK = sizeof(mark) - 1 };
    Companion c = {0};
    if (!path_exists(path)) { return c; }
    c.bytes = file_read(path, &c.size);
    if (c.bytes == NULL) { die("%s", error_text()); }
    if (c.size >= MARK && memcmp(c.bytes, mark, MARK) == 0) {
        memmove(c.bytes, c.bytes + MARK, c.size -= MARK);
    }
    return c;
}

// Reads the files that go into every checkpoint, so that a checkpoint needs no other files:
// - the tokenizer;
// - Hugging Face's files for the tokenizer, such as PREFIX_tokenizer.json beside
//   PREFIX_tokenizer.bin; for the byte tokenizer, this program makes them;
// - the generation_config.json of the checkpoint that the run starts from.
// Also reads that checkpoint's config.json.
static void read_companions(Run *run) {
    const Options *o = &run->options;
    Companion *saved = run->saves.companions;
    char path[PATH_LENGTH];
    const char *name = path_name(o->tokenizer), *end = strstr(name, TOKENIZER_FILE);
    if (o->origin[0] != '\0') {
        path_format(path, "%s/%s", o->origin, companion_names[SAVED_GENERATION_CONFIG]);
        saved[SAVED_GENERATION_CONFIG] = read_companion(path);
        path_format(path, "%s/config.json", o->origin);
        run->saves.start_config = read_companion(path);
    }
    if (run->tokenizer.vocab == 0) { return; }
    saved[SAVED_TOKENIZER] = (Companion){malloc_or_die(run->tokenizer.bytes), run->tokenizer.bytes};
    memcpy(saved[SAVED_TOKENIZER].bytes, run->tokenizer.data, run->tokenizer.bytes);
    bool known = end != NULL;
    for (int i = SAVED_TOKENIZER_JSON; i <= SAVED_CHAT_TEMPLATE && known; i++) {
        path_format(path, "%.*s%s", (int)(end - o->tokenizer), o->tokenizer, companion_names[i]);
        saved[i] = read_companion(path);
        known = saved[SAVED_TOKENIZER_JSON].bytes != NULL; // the others need tokenizer.json
    }
    if (known || run->tokenizer.cut != CUT_BYTES) { return; }
    char *json = tokenizer_json(&run->tokenizer), *config = tokenizer_config_json();
    saved[SAVED_TOKENIZER_JSON] = (Companion){json, strlen(json)};
    saved[SAVED_TOKENIZER_CONFIG] = (Companion){config, strlen(config)};
}

void run_open_tokenizer(Run *run) {
    const Options *o = &run->options;
    if (o->tokenizer[0] != '\0' && !tokenizer_open(&run->tokenizer, o->tokenizer)) {
        die("--tokenizer %s", error_text());
    }
    // the tokenizer of a checkpoint may name another token than the data beside their shards
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
    if (options_save(o) && run->group.rank == 0) { read_companions(run); }
}
