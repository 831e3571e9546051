// Finds a checkpoint, verifies it, and reads it back into a run.
#include "../base/host.h"
#include "../base/rng.h"
#include "../dataloader/loader.h"
#include "../dataloader/tokenizer.h"
#include "../kernels/cpu.h"
#include "checkpoint.h"
#include "hugging_face.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

const char *const companion_names[] = {"generation_config.json", TOKENIZER_FILE, "tokenizer.json",
                                       "tokenizer_config.json", "chat_template.jinja"};

// ---- opening ------------------------------------------------------------------------------------

bool meta_seal(char *text, size_t bytes) {
    static const char tail[] = "00000000\"\n}";
    char stored[8], computed[16];
    if (bytes < sizeof(tail)) { return false; }
    char *digits = text + bytes - (sizeof(tail) - 1);
    memcpy(stored, digits, 8);
    memcpy(digits, tail, 8);
    snprintf(computed, sizeof(computed), "%08x", (unsigned)crc32_z(0, (const Bytef *)text, bytes));
    memcpy(digits, computed, 8);
    return memcmp(stored, computed, 8) == 0;
}

static const char *text_of(const cJSON *json, const char *name) {
    return json_text(json, name, "");
}

// Checks the checksum and the version of a meta.json, and parses it.
static cJSON *parse_meta(char *text, size_t bytes, const char *path) {
    cJSON *meta = meta_seal(text, bytes) ? cJSON_ParseWithLength(text, bytes) : NULL;
    double version = json_number(meta, "version", NAN);
    if (!cJSON_IsObject(meta)) {
        fail("%s: damaged (its checksum does not match)", path);
    } else if (strcmp(text_of(meta, "format"), "llm8.c checkpoint") != 0) {
        fail("%s: not an llm8.c checkpoint", path);
    } else if (version != CHECKPOINT_VERSION) {
        fail("%s: checkpoint version %g; this program reads %d", path, version, CHECKPOINT_VERSION);
    } else {
        return meta;
    }
    cJSON_Delete(meta);
    return NULL;
}

static int64_t count_of(const cJSON *json, const char *name) {
    return json_count(cJSON_GetObjectItemCaseSensitive(json, name));
}

// Reads the losses or the norms of a spike window to which `count` steps were added. Returns false
// if their number is wrong, or if one of them is not finite.
static bool read_window(const cJSON *meta, const char *name, int64_t count, double *values) {
    const cJSON *value, *list = cJSON_GetObjectItemCaseSensitive(meta, name);
    int n = 0;
    if (cJSON_GetArraySize(list) != min64(count, SPIKE_WINDOW)) { return false; }
    cJSON_ArrayForEach(value, list) {
        if (!cJSON_IsNumber(value) || !isfinite(value->valuedouble)) { return false; }
        values[n++] = value->valuedouble;
    }
    return true;
}

static bool read_meta(Checkpoint *c) {
    const cJSON *meta = c->meta;
    Progress *p = &c->progress;
#define READ_WHOLE(field, name) p->field = count_of(meta, name);
#define READ_REAL(field, name) p->field = json_number(meta, name, NAN);
    PROGRESS_FIELDS(READ_WHOLE, READ_REAL)
#undef READ_WHOLE
#undef READ_REAL
    int64_t ranks = count_of(meta, "ranks");
    c->valid_tokens = count_of(meta, "valid_tokens");
    c->layout_size = count_of(meta, "layout_size");
    if (p->samples < 0 || p->tokens < 0 || p->skipped_in_row < 0 ||
        p->skipped < p->skipped_in_row || p->step < p->skipped || ranks < 1 || ranks > RANKS_MAX ||
        c->layout_size < 0) {
        return fail("%s/meta.json: a number is missing or out of range", c->path);
    }
    SpikeWindow *w = &p->window;
    if (cJSON_HasObjectItem(meta, "window_count")) { w->count = count_of(meta, "window_count"); }
    if (w->count < 0 || w->count > p->step - p->skipped ||
        !read_window(meta, "window_loss", w->count, w->loss) ||
        !read_window(meta, "window_norm", w->count, w->norm)) {
        return fail("%s/meta.json: the window of losses and norms is wrong", c->path);
    }
    c->ranks = (int)ranks;
    c->data = text_of(meta, "data");
    c->valid_data = text_of(meta, "valid_data");
    c->options = cJSON_GetObjectItemCaseSensitive(meta, "options");
    return cJSON_IsObject(c->options) || fail("%s/meta.json: no options", c->path);
}

// Returns a file's entry in the list of meta.json; NULL: there is none.
static const cJSON *find_listed(const Checkpoint *c, const char *name) {
    const cJSON *file;
    cJSON_ArrayForEach(file, cJSON_GetObjectItemCaseSensitive(c->meta, "files")) {
        if (strcmp(text_of(file, "name"), name) == 0) { return file; }
    }
    return NULL;
}

// Compares a file with its length and checksum in meta.json.
static bool verify_file(const Checkpoint *c, const cJSON *listed) {
    char path[PATH_LENGTH], computed[16];
    const char *name = text_of(listed, "name"), *crc = text_of(listed, "crc32");
    int64_t due = count_of(listed, "bytes");
    uint32_t sum;
    size_t bytes;
    if (name[0] == '\0' || strlen(name) >= TENSOR_NAME || strchr(name, '/') != NULL) {
        return fail("%s/meta.json: a file named '%.80s'", c->path, name);
    }
    int file = file_open(path_format(path, "%s/%s", c->path, name), &bytes);
    if (file < 0) { return false; }
    bool whole = (int64_t)bytes == due, ok = whole && file_checksum(file, path, due, &sum);
    close(file);
    if (!whole) { return fail("%s: damaged: %zu bytes, not %lld", path, bytes, (long long)due); }
    snprintf(computed, sizeof(computed), "%08x", ok ? sum : 0);
    return ok && (strcmp(computed, crc) == 0 ||
                  fail("%s: damaged: its checksum is %s, not %s", path, computed, crc));
}

bool checkpoint_verify(const Checkpoint *c) {
    const cJSON *file, *files = cJSON_GetObjectItemCaseSensitive(c->meta, "files");
    char path[PATH_LENGTH];
    cJSON_ArrayForEach(file, files) {
        const char *name = text_of(file, "name");
        int rank, ranks;
        bool optimizer = sscanf(name, OPTIMIZER_FILE, &rank, &ranks) == 2;
        if (optimizer && !path_exists(path_format(path, "%s/%s", c->path, name))) { continue; }
        if (!verify_file(c, file)) { return false; }
    }
    return c->meta == NULL || cJSON_IsArray(files) ||
           fail("%s/meta.json: no list of files", c->path);
}

bool checkpoint_follow(char path[PATH_LENGTH], const char *from) {
    char folder[PATH_LENGTH];
    path_format(path, "%s", from);
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) { path[n - 1] = '\0'; }
    const char *name = path_name(path);
    bool best = strcmp(name, "best") == 0;
    if (!best && strcmp(name, "latest") != 0) { return true; }
    path_format(folder, "%.*s.", (int)(name - path), path);
    int64_t step = best ? checkpoint_best(folder) : checkpoint_newest(folder);
    if (step < 0) { return step == STEP_NONE; }
    path_format(folder, "%.*s" STEP_FOLDER, (int)(name - path), path, (long long)step);
    strcpy(path, folder);
    return true;
}

// Opens the checkpoint or the model in a folder, and reads meta.json, if the folder has one.
static bool open_meta(Checkpoint *c, const char *path) {
    char meta[PATH_LENGTH];
    size_t bytes;
    *c = (Checkpoint){0};
    if (!checkpoint_follow(c->path, path)) { return false; }
    if (!path_exists(c->path)) {
        return fail("%s: %s", c->path, errno == ENOENT ? "no such folder" : strerror(errno));
    }
    if (!path_exists(path_format(meta, "%s/.", c->path)) && errno == ENOTDIR) {
        return fail("%s: a file; give the folder that it is in", c->path);
    }
    path_format(meta, "%s/meta.json", c->path);
    if (!path_exists(meta) && errno == ENOENT && path_id(c->path).inode != 0) { return true; }
    FREED char *text = file_read(meta, &bytes);
    c->meta = text != NULL ? parse_meta(text, bytes, meta) : NULL;
    if (c->meta != NULL && read_meta(c)) { return true; }
    checkpoint_close(c);
    return false;
}

// Opens a safetensors file. If there is a meta.json, it must list the file.
static bool open_tensors(const Checkpoint *c, const char *name, SafeTensors *st) {
    char path[PATH_LENGTH];
    if (c->meta != NULL && find_listed(c, name) == NULL) {
        return fail("%s/meta.json: its list of files lacks %s", c->path, name);
    }
    return safetensors_open(st, path_format(path, "%s/%s", c->path, name));
}

// Opens model.safetensors, unless it is open.
static bool open_weights(Checkpoint *c) {
    return c->model.path[0] != '\0' || open_tensors(c, MODEL_FILE, &c->model);
}

// Adds a rank's ranges, "begin:end,begin:end", to c->ranges. Returns how many elements they have,
// or -1 if the text is wrong.
static int64_t add_ranges(Checkpoint *c, int rank, const char *text) {
    int64_t elements = 0;
    size_t most = (size_t)c->num_ranges + strlen(text) / 4 + 1;
    c->ranges = realloc_or_die(c->ranges, most * sizeof(SavedRange));
    while (*text != '\0') {
        long long begin, end;
        int length;
        if (sscanf(text, "%lld:%lld%n", &begin, &end, &length) != 2 || begin < 0 || end < begin ||
            end > c->layout_size || elements > c->layout_size) {
            return -1;
        }
        if (begin < end) { c->ranges[c->num_ranges++] = (SavedRange){begin, end, elements, rank}; }
        elements += end - begin;
        text += length;
        if (*text == ',') { text++; }
    }
    return elements;
}

static int compare_ranges(const void *a, const void *b) {
    const SavedRange *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

enum { HASHED = 1 << 20 }; // elements that a thread hashes at a time

typedef struct {
    const SafeTensors *st;
    const TensorEntry *entry;
    uint64_t sum;
} Hashing;

static bool hash_part(void *context, int64_t i) {
    Hashing *h = context;
    int64_t at = i * HASHED, n = min64(HASHED, h->entry->shape[0] - at);
    int64_t bytes = dtype_bytes(h->entry->dtype);
    FREED uint64_t *part = malloc_or_die((size_t)(n * bytes));
    if (!safetensors_read(h->st, h->entry, at, n, part)) { return false; }
    uint64_t sum = hash_words(part, n * bytes, at * bytes / 8);
    __atomic_fetch_add(&h->sum, sum, __ATOMIC_RELAXED);
    return true;
}

// Compares the arrays of an optimizer file with the hashes that were computed before the arrays
// were copied. This finds changes that happened before the file's checksum was computed.
static bool verify_hashes(const SafeTensors *st, const char *hashes) {
    bool ok = true;
    // older files have no hashes
    for (int kind = 0; ok && kind < STATE_ARRAYS && *hashes != '\0'; kind++) {
        Hashing h = {.st = st, .entry = safetensors_find(st, state_names[kind])};
        if (h.entry == NULL) { continue; }
        char *end;
        uint64_t saved = strtoull(hashes, &end, 16);
        ok = threads_for((h.entry->shape[0] + HASHED - 1) / HASHED, hash_part, &h) &&
             (h.sum == saved ||
              fail("%s: '%s' differs from what was trained: memory or a copy is faulty", st->path,
                   state_names[kind]));
        hashes = *end == ',' ? end + 1 : end;
    }
    return ok;
}

// Checks the types and sizes of an optimizer file's arrays. elements: the number of elements in the
// file's ranges. Sets *moments8 to whether the moments are in 8 bits.
static bool check_arrays(const SafeTensors *st, int64_t elements, bool *moments8) {
    const TensorEntry *first = safetensors_find(st, state_names[STATE_EXP_AVG]);
    const TensorEntry *second = safetensors_find(st, state_names[STATE_EXP_AVG_SQ]);
    bool codes = first != NULL && first->dtype == DTYPE_I8;
    // Muon's elements have no second moment
    int64_t n = second != NULL ? min64(second->shape[0], elements) : 0;
    int64_t scales = codes ? state_scales(n) : 0;
    const struct {
        Dtype dtype; // F32 also allows BF16 and F16
        int64_t count;
    } due[STATE_ARRAYS] = {
        [STATE_MASTER] = {DTYPE_F32, elements},
        [STATE_EXP_AVG] = {codes ? DTYPE_I8 : DTYPE_F32, codes ? n : elements},
        [STATE_EXP_AVG_SQ] = {codes ? DTYPE_U8 : DTYPE_F32, n},
        [STATE_MOMENTUM] = {DTYPE_BF16, codes ? elements - n : 0},
        [STATE_EXP_AVG_SCALE] = {DTYPE_BF16, scales},
        [STATE_EXP_AVG_SQ_SCALE] = {DTYPE_BF16, scales},
    };
    *moments8 = codes;
    for (int kind = 0; kind < STATE_ARRAYS; kind++) {
        const TensorEntry *e = safetensors_find(st, state_names[kind]);
        bool absent = e == NULL && due[kind].count == 0 && kind > STATE_EXP_AVG_SQ;
        bool right = e != NULL && e->dims == 1 && e->shape[0] == due[kind].count &&
                     (e->dtype == due[kind].dtype ||
                      (due[kind].dtype == DTYPE_F32 && e->dtype <= DTYPE_F16));
        if (!absent && !right) {
            return fail("%s: '%s' is missing or not %lld numbers of its type", st->path,
                        state_names[kind], (long long)due[kind].count);
        }
    }
    return true;
}

// Opens every rank's optimizer file. Each element of the parameter space must be in exactly one
// range.
static bool open_optimizer(Checkpoint *c, bool verify) {
    c->optimizer = calloc_or_die((size_t)c->ranks, sizeof(SafeTensors));
    for (int r = 0; r < c->ranks; r++) {
        SafeTensors *st = &c->optimizer[r];
        char name[64];
        snprintf(name, sizeof(name), OPTIMIZER_FILE, r, c->ranks);
        if (!open_tensors(c, name, st)) { return false; }
        CLOSED(json_close) cJSON *metadata = cJSON_Parse(st->metadata);
        int64_t elements = add_ranges(c, r, text_of(metadata, "ranges"));
        bool moments8 = false;
        if (elements < 0) { return fail("%s: its list of ranges is wrong", st->path); }
        if (!check_arrays(st, elements, &moments8)) { return false; }
        if (r > 0 && moments8 != c->moments8) {
            return fail("%s: its moments are of another type than rank 0's", st->path);
        }
        c->moments8 = moments8;
        if (verify && !verify_hashes(st, text_of(metadata, "hashes"))) { return false; }
    }
    qsort(c->ranges, (size_t)c->num_ranges, sizeof(SavedRange), compare_ranges);
    int64_t covered = 0;
    int used = 0;
    while (used < c->num_ranges && c->ranges[used].begin == covered) {
        covered = c->ranges[used++].end;
    }
    return (used == c->num_ranges && covered == c->layout_size) ||
           fail("%s: its optimizer files do not hold element %lld of %lld exactly once", c->path,
                (long long)covered, (long long)c->layout_size);
}

#define NO_META "%s/meta.json: No such file or directory"

bool checkpoint_complete(Checkpoint *c, bool verify) {
    return (c->meta != NULL || fail(NO_META, c->path)) && (!verify || checkpoint_verify(c)) &&
           open_optimizer(c, verify) && open_weights(c) &&
           (find_listed(c, SCALING_FILE) == NULL || open_tensors(c, SCALING_FILE, &c->scaling));
}

bool checkpoint_open(Checkpoint *c, const char *path, bool verify) {
    if (!open_meta(c, path)) { return false; }
    bool ok = checkpoint_complete(c, verify);
    if (!ok) { checkpoint_close(c); }
    return ok;
}

void checkpoint_close(Checkpoint *c) {
    for (int r = 0; c->optimizer != NULL && r < c->ranks; r++) {
        safetensors_close(&c->optimizer[r]);
    }
    free(c->optimizer);
    free(c->ranges);
    safetensors_close(&c->model);
    safetensors_close(&c->scaling);
    cJSON_Delete(c->meta);
    *c = (Checkpoint){0};
}

// ---- finding ------------------------------------------------------------------------------------

const char *checkpoint_path(char path[PATH_LENGTH], const char *save, int64_t step) {
    return path_format(path, "%s/" STEP_FOLDER, save, (long long)step);
}

static int newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : (x > y ? -1 : 0);
}

// Returns the step in the name of a checkpoint's folder, or -1 if the name is not of this form.
static int64_t step_of(const char *name) {
    char exact[40];
    long long step = strncmp(name, "step_", 5) == 0 ? strtoll(name + 5, NULL, 10) : -1;
    snprintf(exact, sizeof(exact), STEP_FOLDER, step);
    return strcmp(name, exact) == 0 ? step : -1;
}

int checkpoint_steps(const char *save, int64_t **steps) {
    int count = 0;
    char path[PATH_LENGTH];
    FREED char *names = folder_list(save);
    struct stat info;
    *steps = NULL;
    if (names == NULL) { return errno == ENOENT ? 0 : -1; }
    for (const char *name = names; *name != '\0'; name += strlen(name) + 1) {
        path_format(path, "%s/%s", save, name);
        // a path whose type cannot be read counts as a folder
        bool folder = stat(path, &info) != 0 || S_ISDIR(info.st_mode);
        if (!folder || step_of(name) < 0) { continue; }
        *steps = realloc_or_die(*steps, (size_t)(count + 1) * sizeof(int64_t));
        (*steps)[count++] = step_of(name);
    }
    if (count > 0) { qsort(*steps, (size_t)count, sizeof(int64_t), newest_first); }
    return count;
}

int64_t checkpoint_newest(const char *save) {
    FREED int64_t *steps = NULL;
    int count = checkpoint_steps(save, &steps);
    return count > 0 ? steps[0] : count == 0 ? STEP_NONE : STEP_UNREADABLE;
}

int64_t checkpoint_best(const char *save) {
    FREED int64_t *steps = NULL;
    int64_t best = STEP_NONE, tokens = 0;
    int count = checkpoint_steps(save, &steps);
    double lowest = INFINITY;
    char data[9] = "", path[PATH_LENGTH], of[9];
    bool readable = count >= 0;
    for (int i = 0; i < count && readable; i++) {
        path_format(path, "%s/" STEP_FOLDER "/meta.json", save, (long long)steps[i]);
        size_t bytes;
        FREED char *text = file_read(path, &bytes);
        CLOSED(json_close) cJSON *meta = text != NULL ? parse_meta(text, bytes, path) : NULL;
        // ends the loop if meta.json exists but cannot be read: this step may be the best
        readable = text != NULL || !path_exists(path);
        double loss = json_number(meta, "valid_loss", NAN);
        identity_sum(text_of(meta, "valid_data"), of);
        if (best < 0) { // no newer step was evaluated: this step's data count
            memcpy(data, of, sizeof(data));
            tokens = count_of(meta, "valid_tokens");
        }
        bool same = strcmp(data, of) == 0 && count_of(meta, "valid_tokens") == tokens;
        if (same && loss <= lowest) { // <=: of equal losses the oldest step is the best
            lowest = loss;
            best = steps[i];
        }
    }
    return readable ? best : STEP_UNREADABLE;
}

// Sets `was` to the checkpoint's options that a run inherits (option_is_inherited). continues: the
// run's options if it continues the checkpoint's run, else NULL.
static bool take_options(const Checkpoint *c, const Options *continues, Options *was) {
    char path[PATH_LENGTH];
    bool given[OPTIONS_MAX] = {false};
    const cJSON *name; // version 1.0 of the program wrote no list "given"
    cJSON_ArrayForEach(name, cJSON_GetObjectItemCaseSensitive(c->meta, "given")) {
        const OptionRow *row = cJSON_IsString(name) ? option_row(name->valuestring) : NULL;
        if (row != NULL) { given[row - option_table] = true; }
    }
    path_format(path, "%s/meta.json", c->path);
    options_default(was);
    EACH_OPTION (row) {
        OptionSource source = given[row - option_table] ? SOURCE_FILE : SOURCE_CHECKPOINT;
        const char *value = json_text(c->options, row->name, NULL);
        if (!option_is_inherited(row, continues)) { continue; }
        if (value != NULL && !option_set(was, row->name, value, source)) {
            return fail("%s: %s", path, error_text());
        }
        if (value == NULL && continues == NULL) { // else checkpoint_match() reports this
            warn("%s does not set --%s: the default is used", path, row->name);
        }
    }
    return true;
}

// Opens a checkpoint's meta.json, but no tensors, reads the options that a run takes from the
// checkpoint (without meta.json: from config.json), and verifies its tokenizer.
static bool open_model(Checkpoint *c, const char *folder, const Options *o, Options *was) {
    char path[PATH_LENGTH], index[PATH_LENGTH], word[SHELL_WORD];
    options_default(was);
    if (checkpoint_newest(folder) >= 0) {
        return fail("%s: a run's folder; give one of its checkpoints, such as %s/latest", folder,
                    folder);
    }
    if (!open_meta(c, folder)) { return false; }
    const cJSON *tokenizer = find_listed(c, TOKENIZER_FILE);
    bool ok = (c->meta != NULL || !o->resumes || fail(NO_META, c->path)) &&
              (tokenizer == NULL || verify_file(c, tokenizer));
    if (ok && c->meta != NULL) {
        ok = take_options(c, options_continue(o) ? o : NULL, was);
    } else if (ok) {
        size_t bytes;
        FREED char *text = file_read(path_format(path, "%s/config.json", c->path), &bytes);
        ok = text != NULL &&
             (hf_options(text, bytes, o, was) || fail("%s: %s", path, error_text()));
    }
    path_format(path, "%s/" MODEL_FILE, c->path);
    path_format(index, "%s.index.json", path);
    if (ok && !o->plan && !o->list_tensors && !path_exists(path) && path_exists(index)) {
        ok = fail("%s: its weights are in several files; scripts/convert_hf import %s --output DIR "
                  "makes them one",
                  c->path, shell_word(word, c->path));
    }
    if (!ok) { checkpoint_close(c); }
    return ok;
}

// Refuses --resume latest if the run's folder was moved or copied and its config.txt still names
// the old path.
static bool check_folder(const Options *o) {
    char path[PATH_LENGTH], words[2][SHELL_WORD];
    path_format(path, "%s", o->config);
    const char *folder = dirname(path);
    bool elsewhere = option_source(o, "save") < SOURCE_COMMAND && checkpoint_newest(folder) >= 0 &&
                     !path_is(folder, path_id(o->save));
    return !elsewhere ||
           fail("--resume latest: %s names --save %s, but its own folder has "
                "checkpoints, too: give --save %s or --save %s",
                o->config, o->save, shell_word(words[0], folder), shell_word(words[1], o->save));
}

bool checkpoint_model(Checkpoint *start, Options *o, Options *was) {
    bool latest = strcmp(o->resume, "latest") == 0 && o->save[0] != '\0';
    int64_t newest = latest ? checkpoint_newest(o->save) : STEP_NONE;
    char path[PATH_LENGTH];
    *start = (Checkpoint){0};
    if (newest == STEP_UNREADABLE) { return fail("--resume latest: %s", error_text()); }
    if (latest && !check_folder(o)) { return false; }
    o->resumes = newest >= 0 || (o->resume[0] != '\0' && strcmp(o->resume, "latest") != 0);
    path_format(path, "%s", o->resumes ? o->resume : o->load);
    if (newest >= 0) { checkpoint_path(path, o->save, newest); }
    if (path[0] == '\0') { return true; }
    if (!open_model(start, path, o, was)) {
        const char *from_hub = "; scripts/convert_hf import makes one from a model of the Hub";
        return o->resumes
                   ? fail("--resume %s; --list-checkpoints shows which are whole; from a model's "
                          "weights, --load starts a run",
                          error_text())
                   : fail("--load %s%s", error_text(),
                          path_exists(path) || errno != ENOENT ? "" : from_hub);
    }
    path_format(o->origin, "%s", start->path);
    return true;
}

bool checkpoint_share(Checkpoint *c, const Group *group) {
    FREED char *first = group_text(group, c->path);
    bool ok = strcmp(first, c->path) == 0;
    if (!ok) {
        checkpoint_close(c);
        ok = first[0] == '\0' || open_meta(c, first);
    }
    return group_agree(group, CHANNEL_MAIN, ok);
}

bool checkpoint_weights(Checkpoint *c, const ParamLayout *layout, int64_t begin, int64_t end,
                        float *out) {
    // the file is checked once: where begin is 0
    return open_weights(c) && hf_read(&c->model, layout, begin, end, out) &&
           (begin > 0 || (hf_knows_all(&c->model, layout) && hf_warn_of_zeros(&c->model, layout)));
}

bool checkpoint_list(const char *save) {
    FREED int64_t *steps = NULL;
    int64_t best = checkpoint_best(save);
    int count = checkpoint_steps(save, &steps);
    if (count < 0) { return false; }
    if (count == 0) { return fail("--list-checkpoints: none under %s", save); }
    printf("%10s  %10s  %10s  %-9s %5s  %10s  %-20s  %s\n", "step", "loss", "valid loss",
           "precision", "ranks", "size", "written", "state");
    int damaged = 0;
    for (int i = count - 1; i >= 0; i--) {
        char path[PATH_LENGTH], size[32], loss[32], valid_loss[32], precision[32], created[64];
        Checkpoint c;
        char mark[32];
        snprintf(mark, sizeof(mark), "%s%s", i == 0 ? ", latest" : "",
                 steps[i] == best ? ", best" : "");
        if (checkpoint_open(&c, checkpoint_path(path, save, steps[i]), true)) {
            bool evaluated = !isnan(c.progress.valid_loss);
            double bytes = 0;
            const cJSON *file;
            cJSON_ArrayForEach(file, cJSON_GetObjectItemCaseSensitive(c.meta, "files")) {
                bytes += json_number(file, "bytes", 0);
            }
            format_number(valid_loss, c.progress.valid_loss);
            printf("%10lld  %10s  %10s  %-9s %5d  %10s  %-20s  whole%s\n", (long long)steps[i],
                   format_number(loss, c.progress.loss), evaluated ? valid_loss : "-",
                   printable(precision, sizeof(precision), text_of(c.meta, "precision")), c.ranks,
                   format_bytes(size, bytes),
                   printable(created, sizeof(created), text_of(c.meta, "created")), mark);
            checkpoint_close(&c);
        } else {
            printf("%10lld  damaged%s: %s\n", (long long)steps[i], mark, error_text());
            damaged++;
        }
    }
    return damaged == 0 || fail("--list-checkpoints: %d of %d under %s %s damaged; --resume PATH "
                                "and --load PATH take a whole one",
                                damaged, count, save, damaged > 1 ? "are" : "is");
}

// ---- reading into a run -------------------------------------------------------------------------

bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout) {
    EACH_OPTION (row) {
        OptionSource source = options->source[row - option_table];
        const char *name = row->name, *was = text_of(c->options, name);
        char now[OPTION_TEXT];
        option_text(options, row, now);
        bool moves = strcmp(name, "save") == 0 || (source == SOURCE_DERIVED &&
                                                   // the tokenizer's path, the only derived text
                                                   row->type == OPTION_STRING);
        if (moves || row->effect >= EFFECT_ACTION || strcmp(was, now) == 0) { continue; }
        if (strcmp(name, "optimizer") == 0 && options_train(options)) {
            return fail("%s: its moments are those of --optimizer %s, this run's is %s; resume "
                        "with its optimizer, or start a new run from its weights by --load",
                        c->path, was, now);
        }
        if (option_is_shape(row, layout->config.arch)) {
            return fail("%s: another model's checkpoint: it has --%s %s, this run %s; resume with "
                        "its options",
                        c->path, name, was, now);
        }
        char shown[2][OPTION_TEXT];
        printf("  --%s is %s, was %s in the checkpoint\n", name,
               *now ? printable(shown[0], OPTION_TEXT, now) : "not set",
               *was ? printable(shown[1], OPTION_TEXT, was) : "not set");
    }
    return c->layout_size == layout->size ||
           fail("%s: %lld elements of parameter space, this run has %lld", c->path,
                (long long)c->layout_size, (long long)layout->size);
}

// Reads the scales of `count` blocks of 8-bit moments, from block `first` on. Refuses a scale that
// is negative or not finite.
static bool read_scales(const SafeTensors *st, int kind, int64_t first, int64_t count,
                        uint16_t *scales) {
    const TensorEntry *e = safetensors_find(
        st, state_names[kind - STATE_EXP_AVG + STATE_EXP_AVG_SCALE]);
    if (!safetensors_read(st, e, first, count, scales)) { return false; }
    for (int64_t i = 0; i < count; i++) {
        float scale = bf16_decode(scales[i]);
        if (!(scale >= 0.0f && isfinite(scale))) {
            return fail("%s: '%s' has %g", st->path, e->name, (double)scale);
        }
    }
    return true;
}

// Reads n elements of an array in a rank's file, from element `at` on, into `floats`. If `floats`
// is NULL, 8-bit moments are read into `codes` and `scales` without decoding.
static bool read_array(const SafeTensors *st, int kind, int64_t at, int64_t n, float *floats,
                       uint8_t *codes, uint16_t *scales) {
    const TensorEntry *e = safetensors_find(st, state_names[kind]);
    bool coded = e->dtype == DTYPE_I8 || e->dtype == DTYPE_U8;
    if (coded && kind == STATE_EXP_AVG && at >= e->shape[0]) { // Muon's momentum has no codes
        at -= e->shape[0];
        e = safetensors_find(st, state_names[STATE_MOMENTUM]);
        coded = false;
    }
    if (e == NULL || at + n > e->shape[0] || (floats == NULL && !coded)) {
        return fail("%s: elements %lld to %lld have no '%s'", st->path, (long long)at,
                    (long long)(at + n), state_names[kind]);
    }
    if (!coded) { return safetensors_read_floats(st, e, at, n, floats); }
    int64_t first = at / MOMENT_BLOCK, blocks = (at + n - 1) / MOMENT_BLOCK - first + 1;
    FREED uint8_t *own_codes = floats != NULL ? malloc_or_die((size_t)n) : NULL;
    FREED uint16_t *own_scales = floats != NULL ? malloc_or_die((size_t)blocks * sizeof(*scales))
                                                : NULL;
    if (floats != NULL) { codes = own_codes, scales = own_scales; }
    if (!safetensors_read(st, e, at, n, codes) || !read_scales(st, kind, first, blocks, scales)) {
        return false;
    }
    Moment which = kind == STATE_EXP_AVG ? MOMENT_FIRST : MOMENT_SECOND;
    if (floats != NULL) {
        moment_decode(floats, which, codes, scales, (int)(at % MOMENT_BLOCK), n);
    }
    return true;
}

bool checkpoint_read(const Checkpoint *c, int array, int64_t begin, int64_t end, float *floats,
                     uint8_t *codes, uint16_t *scales) {
    if (begin < 0 || end > c->layout_size) {
        return fail("%s: elements %lld to %lld of '%s' are not all in its files", c->path,
                    (long long)begin, (long long)end, state_names[array]);
    }
    for (const SavedRange *r = c->ranges; r < c->ranges + c->num_ranges; r++) {
        int64_t from = max64(begin, r->begin), until = min64(end, r->end), at = from - begin;
        if (from < until &&
            !read_array(&c->optimizer[r->rank], array, r->at + from - r->begin, until - from,
                        floats != NULL ? floats + at : NULL, codes != NULL ? codes + at : NULL,
                        scales != NULL ? scales + at / MOMENT_BLOCK : NULL)) {
            return false;
        }
    }
    return true;
}

bool checkpoint_read_scaling(const Checkpoint *c, const Precision *precision, Fp8Scale *slots,
                             float *history) {
    const SafeTensors *st = &c->scaling;
    int n = fp8_slot_count(precision->config), length = precision->history_length;
    double batch = atof(text_of(c->options, "global-batch-size")); // 0: not known
    double step_tokens = batch * atof(text_of(c->options, "seq-length"));
    bool other_step = step_tokens != precision->step_tokens, other_length = false;
    if (st->count == 0 || precision->recipe != FP8_RECIPE_DELAYED) { return true; }
    // `values` has the scales, the targets and the counts, each [n], and the amaxes [n,length]
    const int64_t numbers = (int64_t)n * (SCALING_HISTORY + length);
    FREED float *values = malloc_or_die((size_t)numbers * sizeof(float));
    const float *targets = values + SCALING_TARGET * n, *amaxes = values + SCALING_HISTORY * n;
    const int32_t *counts = (const int32_t *)values + SCALING_COUNT * n;
    for (int i = 0; i < SCALING_TENSORS; i++) {
        const TensorEntry *e = safetensors_find(st, scaling_names[i]);
        bool last = i == SCALING_HISTORY;
        if (e == NULL || e->dtype != (i == SCALING_COUNT ? DTYPE_I32 : DTYPE_F32) ||
            e->dims != 1 + last || e->shape[0] != n) {
            return fail("%s: not the scaling state of %d tensors", st->path, n);
        }
        other_length = last && e->shape[1] != length;
        int64_t elements = last ? (int64_t)n * length : n;
        if (!other_length && !safetensors_read(st, e, 0, elements, values + i * n)) {
            return false;
        }
    }
    for (int i = 0; i < n; i++) {
        Fp8Scale *slot = &slots[i];
        bool other = other_length || (other_step && i % OPERAND_COUNT == OPERAND_DY) ||
                     targets[i] != fp8_slot_target(precision, i);
        // if a slot is not in use now, its scale would be out of date when the slot is used again
        if (!fp8_slot_in_use(precision, i) || other) { continue; }
        slot->count = counts[i];
        slot->scale = values[i];
        if (slot->count < 0 || slot->count > c->progress.step) {
            return fail("%s: damaged: a scale has more steps than the run", st->path);
        }
        if (!fp8_scale_known(slot)) { continue; }
        fp8_rescale(slot, 1.0f, slot->scale);
        memcpy(history + (int64_t)i * length, amaxes + (int64_t)i * length,
               (size_t)length * sizeof(float));
    }
    return true;
}
