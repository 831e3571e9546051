// Finds a checkpoint, verifies it, and reads it back into a run.
#include "../base/host.h"
#include "../base/rng.h"
#include "../dataloader/loader.h"
#include "../kernels/cpu.h"
#include "checkpoint.h"
#include "hugging_face.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

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
        refuse("%s: not an llm8.c checkpoint", path);
    } else if (version != CHECKPOINT_VERSION) {
        refuse("%s: checkpoint version %g; this program reads %d", path, version,
               CHECKPOINT_VERSION);
    } else {
        return meta;
    }
    cJSON_Delete(meta);
    return NULL;
}

const ProgressField progress_fields[PROGRESS_FIELDS] = {
    {"step", offsetof(Progress, step), true},
    {"samples", offsetof(Progress, samples), true},
    {"tokens", offsetof(Progress, tokens), true},
    {"skipped", offsetof(Progress, skipped), true},
    {"skipped_in_row", offsetof(Progress, skipped_in_row), true},
    {"loss", offsetof(Progress, loss), false},
    {"valid_loss", offsetof(Progress, valid_loss), false},
    {"best_valid_loss", offsetof(Progress, best_valid_loss), false},
    {"level", offsetof(Progress, level), false},
    {"best_level", offsetof(Progress, best_level), false},
    {"proven", offsetof(Progress, proven), true},
    // meta.json of an older version lacks it; then it is -1, which counts as 0
    {"eval_left", offsetof(Progress, eval_left), true},
};

static int64_t count_of(const cJSON *json, const char *name) {
    return json_count(cJSON_GetObjectItemCaseSensitive(json, name));
}

// Reads the values of a spike window after `count` steps entered it. False: the number of values is
// wrong, or one is not finite.
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
    for (const ProgressField *f = progress_fields; f < progress_fields + PROGRESS_FIELDS; f++) {
        void *field = (char *)p + f->offset;
        if (f->whole) {
            *(int64_t *)field = count_of(meta, f->name);
        } else {
            *(double *)field = json_number(meta, f->name, NAN);
        }
    }
    int64_t ranks = count_of(meta, "ranks");
    c->data_windows = count_of(meta, "data_windows");
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
    c->precision = text_of(meta, "precision");
    c->created = text_of(meta, "created");
    c->data = text_of(meta, "data");
    c->valid_data = text_of(meta, "valid_data");
    c->options = cJSON_GetObjectItemCaseSensitive(meta, "options");
    return cJSON_IsObject(c->options) || fail("%s/meta.json: no options", c->path);
}

// Returns the checkpoint's open file with a name; NULL: no file has it.
static const CheckpointFile *find_file(const Checkpoint *c, const char *name) {
    for (int i = 0; i < c->num_files; i++) {
        if (strcmp(c->files[i].name, name) == 0) { return &c->files[i]; }
    }
    return NULL;
}

bool checkpoint_has(const Checkpoint *c, const char *name) {
    return find_file(c, name) != NULL;
}

char *checkpoint_file(const Checkpoint *c, const char *name, size_t *bytes) {
    char path[PATH_LENGTH];
    const CheckpointFile *f = find_file(c, name);
    path_format(path, "%s/%s", c->path, name);
    if (f == NULL) {
        fail("%s: No such file or directory", path);
        return NULL;
    }
    *bytes = f->bytes;
    char *data = malloc_or_die(f->bytes);
    if (file_read_at(f->file, path, data, f->bytes, 0)) { return data; }
    free(data);
    return NULL;
}

static bool verify_file(const Checkpoint *c, const CheckpointFile *f) {
    char path[PATH_LENGTH], computed[16];
    uint32_t sum;
    if (f->listed < 0) { return true; }
    path_format(path, "%s/%s", c->path, f->name);
    if ((int64_t)f->bytes != f->listed) {
        return fail("%s: damaged: %zu bytes, not %lld", path, f->bytes, (long long)f->listed);
    }
    if (!file_checksum(f->file, path, f->listed, &sum)) { return false; }
    snprintf(computed, sizeof(computed), "%08x", sum);
    return strcmp(computed, f->crc) == 0 ||
           fail("%s: damaged: its checksum is %s, not %s", path, computed, f->crc);
}

bool checkpoint_verify(const Checkpoint *c) {
    for (int i = 0; i < c->num_files; i++) {
        if (!verify_file(c, &c->files[i])) { return false; }
    }
    return true;
}

// Opens a file in a checkpoint's folder. listed: the file's entry in meta.json; NULL: no entry.
static bool add_file(Checkpoint *c, int folder, const char *name, const cJSON *listed) {
    char path[PATH_LENGTH];
    if (name[0] == '\0' || strlen(name) >= TENSOR_NAME || strchr(name, '/') != NULL) {
        return fail("%s/meta.json: a file named '%.80s'", c->path, name);
    }
    c->files = realloc_or_die(c->files, (size_t)(c->num_files + 1) * sizeof(CheckpointFile));
    CheckpointFile *f = &c->files[c->num_files];
    *f = (CheckpointFile){.listed = listed != NULL ? max64(0, count_of(listed, "bytes")) : -1};
    strcpy(f->name, name);
    snprintf(f->crc, sizeof(f->crc), "%s", text_of(listed, "crc32"));
    f->file = file_open_in(folder, path_format(path, "%s/%s", c->path, name), &f->bytes);
    c->num_files += f->file >= 0;
    return f->file >= 0;
}

// Opens the files that meta.json lists. state: also those that only a resuming run reads.
static bool add_listed(Checkpoint *c, int folder, const cJSON *files, bool state) {
    const cJSON *file;
    if (!cJSON_IsArray(files)) { return fail("%s/meta.json: no list of files", c->path); }
    cJSON_ArrayForEach(file, files) {
        const char *name = text_of(file, "name");
        bool skipped = !state && (strncmp(name, "optimizer-", 10) == 0 ||
                                  strcmp(name, "scaling.safetensors") == 0);
        if (!skipped && !add_file(c, folder, name, file)) { return false; }
    }
    return true;
}

// Opens other files that a run may read: those of a Hugging Face folder, or files that somebody
// added to a checkpoint.
static bool add_others(Checkpoint *c, int folder) {
    static const char *const names[] = {"model.safetensors",      "tokenizer.bin",
                                        "generation_config.json", "tokenizer.json",
                                        "tokenizer_config.json",  "chat_template.jinja"};
    for (int i = c->options != NULL; i < (int)(sizeof(names) / sizeof(names[0])); i++) {
        bool there = faccessat(folder, names[i], F_OK, 0) == 0 && !checkpoint_has(c, names[i]);
        if (there && !add_file(c, folder, names[i], NULL)) { return false; }
    }
    return true;
}

// If a path ends in `latest` or `best`, and steps are beside it, replaces that name by that of the
// newest or the best step.
static bool resolve_name(char path[PATH_LENGTH]) {
    char folder[PATH_LENGTH];
    const char *name = path_name(path);
    bool best = strcmp(name, "best") == 0;
    if (!best && strcmp(name, "latest") != 0) { return true; }
    path_format(folder, "%.*s.", (int)(name - path), path);
    int64_t step = best ? checkpoint_best(folder) : checkpoint_newest(folder, INT64_MAX);
    if (step < 0) { return step == STEP_NONE; }
    path_format(folder, "%.*sstep_%08lld", (int)(name - path), path, (long long)step);
    strcpy(path, folder);
    return true;
}

bool checkpoint_follow(char path[PATH_LENGTH], const char *from) {
    enum { LINKS = 40 };
    char target[PATH_LENGTH], beside[PATH_LENGTH];
    path_format(path, "%s", from);
    for (int i = 0; i < LINKS; i++) {
        for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) { path[n - 1] = '\0'; }
        if (!resolve_name(path)) { return false; }
        ssize_t length = readlink(path, target, PATH_LENGTH - 1);
        if (length < 0) { break; }
        target[length] = '\0';
        *(target[0] == '/' ? path : (char *)path_name(path)) = '\0';
        strcpy(path, path_format(beside, "%s%s", path, target));
    }
    return true;
}

// Reads meta.json and opens the files. A folder without meta.json is taken for one of Hugging
// Face's, unless `state` is set.
static bool open_files(Checkpoint *c, int folder, bool state) {
    char path[PATH_LENGTH];
    bool ok = true, ours = state || faccessat(folder, "meta.json", F_OK, 0) == 0;
    const char *name = ours ? "meta.json" : "config.json";
    size_t bytes;
    if (!add_file(c, folder, name, NULL)) { return false; }
    char *text = checkpoint_file(c, name, &bytes);
    if (text == NULL) { return false; }
    c->seal = (uint32_t)crc32_z(0, (const Bytef *)text, bytes);
    if (ours) {
        c->meta = parse_meta(text, bytes, path_format(path, "%s/%s", c->path, name));
        ok = c->meta != NULL && read_meta(c) &&
             add_listed(c, folder, cJSON_GetObjectItemCaseSensitive(c->meta, "files"), state);
    }
    free(text);
    return ok && (state || add_others(c, folder));
}

// Opens the files of the folder that a path leads to. If that fails, and the path leads to another
// folder by now (a run has saved the next checkpoint and deleted this one), opens that folder
// instead.
static bool open_folder(Checkpoint *c, const char *path, bool state) {
    char leads_to[PATH_LENGTH];
    bool moved;
    do {
        *c = (Checkpoint){0};
        if (!checkpoint_follow(c->path, path)) { return false; }
        int folder = open(c->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (folder < 0) {
            refuse("%s: %s", c->path, errno == ENOENT ? "no such folder" : strerror(errno));
        }
        bool ok = folder >= 0 && open_files(c, folder, state);
        if (folder >= 0) { close(folder); }
        if (ok) { return true; }
        Error why = error_kept();
        moved = checkpoint_follow(leads_to, path) && strcmp(leads_to, c->path) != 0;
        checkpoint_close(c);
        fail_again(why);
    } while (moved);
    return false;
}

// Opens a file of tensors, which must be among the checkpoint's files.
static bool open_tensors(const Checkpoint *c, const char *name, SafeTensors *st) {
    char path[PATH_LENGTH];
    const CheckpointFile *f = find_file(c, name);
    if (f == NULL) {
        return c->options != NULL ? fail("%s/meta.json: its list of files lacks %s", c->path, name)
                                  : fail("%s/%s: No such file or directory", c->path, name);
    }
    int file = fcntl(f->file, F_DUPFD_CLOEXEC, 0);
    path_format(path, "%s/%s", c->path, name);
    return file >= 0 ? safetensors_open_file(st, file, f->bytes, path)
                     : refuse("%s: %s", path, strerror(errno));
}

// Adds a rank's ranges, "begin:end,begin:end", to c->ranges. Returns their number of elements; -1:
// the text is wrong.
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
    bool failed;
    Error why;
} Hashing;

static void hash_part(void *context, int64_t i) {
    Hashing *h = context;
    int64_t at = i * HASHED, n = min64(HASHED, h->entry->shape[0] - at);
    int64_t bytes = dtype_bytes(h->entry->dtype);
    uint64_t *part = malloc_or_die((size_t)(n * bytes));
    if (safetensors_read(h->st, h->entry, at, n, part)) {
        uint64_t sum = hash_words(part, n * bytes, at * bytes / 8);
        __atomic_fetch_add(&h->sum, sum, __ATOMIC_RELAXED);
    } else if (!__atomic_exchange_n(&h->failed, true, __ATOMIC_RELAXED)) {
        h->why = error_kept();
    }
    free(part);
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
        threads_for((h.entry->shape[0] + HASHED - 1) / HASHED, hash_part, &h);
        ok = h.failed
                 ? fail_again(h.why)
                 : h.sum == saved ||
                       fail("%s: '%s' differs from what was trained: memory or a copy is faulty",
                            st->path, state_names[kind]);
        hashes = *end == ',' ? end + 1 : end;
    }
    return ok;
}

// Whether an array has one dimension, and this number of elements of this type.
static bool has_array(const SafeTensors *st, int kind, int64_t elements, Dtype dtype) {
    const TensorEntry *e = safetensors_find(st, state_names[kind]);
    return e != NULL && e->dims == 1 && e->shape[0] == elements && e->dtype == dtype;
}

// Checks the types and sizes of an optimizer file's arrays. elements: how many its ranges have.
// *moments8: whether its moments are in 8 bits.
static bool check_arrays(const SafeTensors *st, int64_t elements, bool *moments8) {
    const TensorEntry *arrays[STATE_EXP_AVG_SQ + 1];
    for (int kind = 0; kind <= STATE_EXP_AVG_SQ; kind++) {
        const TensorEntry *e = arrays[kind] = safetensors_find(st, state_names[kind]);
        bool codes = e != NULL && ((kind == STATE_EXP_AVG && e->dtype == DTYPE_I8) ||
                                   (kind == STATE_EXP_AVG_SQ && e->dtype == DTYPE_U8));
        bool ends = codes || kind == STATE_EXP_AVG_SQ; // the array ends before Muon's elements
        if (e == NULL || e->dims != 1 || !(codes || e->dtype <= DTYPE_F16) ||
            !(e->shape[0] == elements || (ends && e->shape[0] < elements))) {
            return fail("%s: '%s' is missing or not %lld floating-point numbers", st->path,
                        state_names[kind], (long long)elements);
        }
        *moments8 = codes;
    }
    int64_t n = arrays[STATE_EXP_AVG_SQ]->shape[0], scales = state_scales(n);
    bool whole = !*moments8 ||
                 (has_array(st, STATE_EXP_AVG, n, DTYPE_I8) &&
                  (n == 0 || (has_array(st, STATE_EXP_AVG_SCALE, scales, DTYPE_BF16) &&
                              has_array(st, STATE_EXP_AVG_SQ_SCALE, scales, DTYPE_BF16))) &&
                  (n == elements || has_array(st, STATE_MOMENTUM, elements - n, DTYPE_BF16)));
    return (whole && *moments8 == (arrays[STATE_EXP_AVG]->dtype == DTYPE_I8)) ||
           fail("%s: its moments in 8 bits are not whole", st->path);
}

// Opens every rank's optimizer file. All ranges together must have each element of the parameter
// space once.
static bool open_optimizer(Checkpoint *c, bool verify) {
    c->optimizer = calloc_or_die((size_t)c->ranks, sizeof(SafeTensors));
    for (int r = 0; r < c->ranks; r++) {
        SafeTensors *st = &c->optimizer[r];
        char name[64];
        snprintf(name, sizeof(name), "optimizer-%d-of-%d.safetensors", r, c->ranks);
        if (!open_tensors(c, name, st)) { return false; }
        cJSON *metadata = cJSON_Parse(st->metadata);
        int64_t elements = add_ranges(c, r, text_of(metadata, "ranges"));
        char hashes[STATE_ARRAYS * 17 + 1];
        snprintf(hashes, sizeof(hashes), "%s", text_of(metadata, "hashes"));
        cJSON_Delete(metadata);
        bool moments8 = false;
        if (elements < 0) { return fail("%s: its list of ranges is wrong", st->path); }
        if (!check_arrays(st, elements, &moments8)) { return false; }
        if (r > 0 && moments8 != c->moments8) {
            return fail("%s: its moments are of another type than rank 0's", st->path);
        }
        c->moments8 = moments8;
        if (verify && !verify_hashes(st, hashes)) { return false; }
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

bool checkpoint_open(Checkpoint *c, const char *path, bool verify) {
    if (!open_folder(c, path, true)) { return false; }
    bool ok = (!verify || checkpoint_verify(c)) && open_optimizer(c, verify) &&
              open_tensors(c, "model.safetensors", &c->model) &&
              (!checkpoint_has(c, "scaling.safetensors") ||
               open_tensors(c, "scaling.safetensors", &c->scaling));
    if (!ok) { checkpoint_close(c); }
    return ok;
}

void checkpoint_close(Checkpoint *c) {
    for (int r = 0; c->optimizer != NULL && r < c->ranks; r++) {
        safetensors_close(&c->optimizer[r]);
    }
    for (int i = 0; i < c->num_files; i++) { close(c->files[i].file); }
    free(c->files);
    free(c->optimizer);
    free(c->ranges);
    safetensors_close(&c->model);
    safetensors_close(&c->scaling);
    cJSON_Delete(c->meta);
    *c = (Checkpoint){0};
}

// ---- finding ------------------------------------------------------------------------------------

#define RESUME_FAULT "--resume %s; --list-checkpoints shows which are whole"

const char *checkpoint_path(char path[PATH_LENGTH], const char *save, int64_t step) {
    return path_format(path, "%s/step_%08lld", save, (long long)step);
}

static int newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : (x > y ? -1 : 0);
}

// The step in the name of a checkpoint's folder; -1: the name is not of this form.
static int64_t step_of(const char *name) {
    char exact[40];
    long long step = strncmp(name, "step_", 5) == 0 ? strtoll(name + 5, NULL, 10) : -1;
    snprintf(exact, sizeof(exact), "step_%08lld", step);
    return strcmp(name, exact) == 0 ? step : -1;
}

int checkpoint_steps(const char *save, int64_t **steps) {
    int count = 0;
    char path[PATH_LENGTH], *names = folder_list(save);
    struct stat info;
    *steps = NULL;
    if (names == NULL) { return errno == ENOENT ? 0 : -1; }
    for (const char *name = names; *name != '\0'; name += strlen(name) + 1) {
        path_format(path, "%s/%s", save, name);
        // also true if its type cannot be read
        bool folder = stat(path, &info) != 0 || S_ISDIR(info.st_mode);
        if (!folder || step_of(name) < 0) { continue; }
        *steps = realloc_or_die(*steps, (size_t)(count + 1) * sizeof(int64_t));
        (*steps)[count++] = step_of(name);
    }
    free(names);
    if (count > 0) { qsort(*steps, (size_t)count, sizeof(int64_t), newest_first); }
    return count;
}

int64_t checkpoint_newest(const char *save, int64_t before) {
    int64_t *steps, newest = STEP_NONE;
    int count = checkpoint_steps(save, &steps);
    for (int i = count - 1; i >= 0; i--) { newest = steps[i] < before ? steps[i] : newest; }
    free(steps);
    return count < 0 ? STEP_UNREADABLE : newest;
}

int64_t checkpoint_best(const char *save) {
    int64_t *steps, best = STEP_NONE, tokens = 0;
    int count = checkpoint_steps(save, &steps);
    double lowest = INFINITY;
    char data[9] = "", path[PATH_LENGTH], of[9];
    bool readable = count >= 0;
    for (int i = 0; i < count && readable; i++) {
        path_format(path, "%s/step_%08lld/meta.json", save, (long long)steps[i]);
        size_t bytes;
        char *text = file_read(path, &bytes);
        cJSON *meta = text != NULL ? parse_meta(text, bytes, path) : NULL;
        readable = text != NULL || !error_kept().refused; // false ends the loop: it may be the best
        double loss = json_number(meta, "valid_loss", NAN);
        identity_sum(text_of(meta, "valid_data"), of);
        if (best < 0) { // the newest one that was evaluated
            memcpy(data, of, sizeof(data));
            tokens = count_of(meta, "valid_tokens");
        }
        bool same = strcmp(data, of) == 0 && count_of(meta, "valid_tokens") == tokens;
        if (same && loss <= lowest) { // <=: of equal losses the oldest step is the best
            lowest = loss;
            best = steps[i];
        }
        cJSON_Delete(meta);
        free(text);
    }
    free(steps);
    return readable ? best : STEP_UNREADABLE;
}

bool checkpoint_options(const Checkpoint *c, const Options *continues, Options *was) {
    char path[PATH_LENGTH];
    bool ok = true, given[OPTIONS_MAX] = {false};
    const cJSON *name; // checkpoints of 1.0 do not have the list
    cJSON_ArrayForEach(name, cJSON_GetObjectItemCaseSensitive(c->meta, "given")) {
        const OptionRow *row = cJSON_IsString(name) ? option_row(name->valuestring) : NULL;
        if (row != NULL) { given[row - option_table] = true; }
    }
    path_format(path, "%s/meta.json", c->path);
    options_default(was);
    for (const OptionRow *row = option_table; ok && row < option_table + option_table_count;
         row++) {
        if (!option_is_inherited(row, continues)) { continue; }
        const char *value = json_text(c->options, row->name, NULL);
        if (value != NULL) {
            ok = option_set(was, row->name, value,
                            given[row - option_table] ? SOURCE_FILE : SOURCE_CHECKPOINT) ||
                 refuse("%s: %s", path, error_text());
        } else if (continues == NULL) { // for a continuing run, checkpoint_match() reports this
            warn("%s does not set --%s: the default is used", path, row->name);
        }
    }
    return ok;
}

// Opens a checkpoint without its optimizer files, reads the options that a run takes from it, and
// verifies its tokenizer.
static bool open_model(Checkpoint *c, const char *folder, const Options *o, Options *was) {
    options_default(was);
    if (checkpoint_newest(folder, INT64_MAX) >= 0) {
        return fail("%s: a run's folder; give one of its checkpoints, such as %s/latest", folder,
                    folder);
    }
    if (!open_folder(c, folder, false)) { return false; }
    const CheckpointFile *tokenizer = find_file(c, "tokenizer.bin");
    bool ok = tokenizer == NULL || verify_file(c, tokenizer);
    if (ok && c->options != NULL) {
        ok = checkpoint_options(c, options_continue(o) ? o : NULL, was);
    } else if (ok) {
        size_t bytes;
        char *text = checkpoint_file(c, "config.json", &bytes);
        ok = text != NULL &&
             (hf_options(text, bytes, was) || fail("%s/config.json: %s", c->path, error_text()));
        free(text);
    }
    if (!ok) { checkpoint_close(c); }
    return ok;
}

// Opens the newest undamaged checkpoint under --save. was: receives its options, and only its model
// is opened; NULL: the whole checkpoint is opened. If there is no checkpoint, c->path is "".
static bool open_newest(Checkpoint *c, const Options *o, Options *was, bool warns) {
    const char *save = o->save;
    char path[PATH_LENGTH];
    int64_t step, damaged = INT64_MAX; // this step and newer ones are damaged
    *c = (Checkpoint){0};
    // lists the steps anew each time: a run that saves there may have deleted the step just tried
    while ((step = checkpoint_newest(save, damaged)) >= 0) {
        checkpoint_path(path, save, step);
        if (was != NULL ? open_model(c, path, o, was) : checkpoint_open(c, path, true)) {
            return true;
        }
        if (!path_exists(path)) { continue; }
        if (error_kept().refused) {
            return fail("--resume latest: %s; this is no damage, so that no earlier checkpoint is "
                        "taken: mend it, or name one by --resume PATH",
                        error_text());
        }
        if (warns) { warn("%s; trying an earlier checkpoint", error_text()); }
        damaged = step;
    }
    if (step == STEP_UNREADABLE) { return fail("--resume latest: %s", error_text()); }
    if (damaged < INT64_MAX && !warns) { // if all are damaged, again, with a warning for each
        return open_newest(c, o, was, true);
    }
    if (damaged < INT64_MAX) {
        return fail("--resume latest: no whole checkpoint under %s; to start afresh, use another "
                    "--save or move the damaged ones away",
                    save);
    }
    return !path_exists(path_format(path, "%s/latest", save)) ||
           fail("--resume latest: no step_... is beside %s: resume what that is by --resume PATH; "
                "to start afresh, delete it",
                path);
}

bool checkpoint_resume(Checkpoint *c, const Options *o) {
    char path[PATH_LENGTH];
    if (strcmp(o->resume, "latest") != 0) {
        return checkpoint_open(c, o->resume, true) || fail(RESUME_FAULT, error_text());
    }
    if (!open_newest(c, o, NULL, true)) { return false; }
    // perhaps the run's folder was moved, and its config.txt still names the old place
    path_format(path, "%s", o->config);
    const char *place = dirname(path);
    bool moved = c->path[0] == '\0' && option_source(o, "save") == SOURCE_FILE &&
                 checkpoint_newest(place, INT64_MAX) >= 0;
    char word[SHELL_WORD];
    return !moved || fail("--resume latest: %s, which %s names, has no checkpoint, and %s has: "
                          "give --save %s",
                          o->save, o->config, place, shell_word(word, place));
}

static bool in_one_file(const Checkpoint *c) {
    char index[PATH_LENGTH];
    path_format(index, "%s/model.safetensors.index.json", c->path);
    return checkpoint_has(c, "model.safetensors") || !path_exists(index) ||
           fail("%s: its weights are in several files; scripts/convert_hf import makes them one",
                c->path);
}

bool checkpoint_model(Checkpoint *start, Options *o, Options *was) {
    bool latest = strcmp(o->resume, "latest") == 0;
    *start = (Checkpoint){0};
    o->resumes = o->resume[0] != '\0';
    if (latest && o->save[0] != '\0' && !open_newest(start, o, was, false)) { return false; }
    bool found = start->path[0] != '\0';
    o->resumes = found || (o->resumes && !latest);
    const char *from = o->resumes ? o->resume : o->load;
    if (!found && *from == '\0') { return true; }
    bool starts = !o->resumes && !o->plan && !o->list_tensors;
    if (!found && (!open_model(start, from, o, was) || (starts && !in_one_file(start)))) {
        return o->resumes ? fail(RESUME_FAULT, error_text()) : fail("--load %s", error_text());
    }
    path_format(o->origin, "%s", o->resumes ? start->path : o->load);
    return true;
}

bool checkpoint_share(Checkpoint *c, const Group *group) {
    struct {
        char path[PATH_LENGTH];
        uint32_t seal;
        bool whole;
    } first = {.seal = c->seal, .whole = c->optimizer != NULL};
    bool ok = true;
    path_format(first.path, "%s", c->path);
    group_broadcast(group, CHANNEL_MAIN, &first, sizeof(first));
    if (strcmp(first.path, c->path) != 0 || first.seal != c->seal) {
        checkpoint_close(c);
        if (first.path[0] != '\0') {
            ok = first.whole ? checkpoint_open(c, first.path, false)
                             : open_folder(c, first.path, false);
            ok = ok && (c->seal == first.seal ||
                        fail("%s: not the one that rank 0 has opened; start again", first.path));
        }
    }
    return group_agree(group, CHANNEL_MAIN, ok) || fail("%s", error_text());
}

bool checkpoint_weights(Checkpoint *c, const ParamLayout *layout, int64_t begin, int64_t end,
                        float *out) {
    return (c->model.path[0] != '\0' || open_tensors(c, "model.safetensors", &c->model)) &&
           hf_read(&c->model, layout, begin, end, out) &&
           (begin > 0 || hf_knows_all(&c->model, layout)); // checked once, in the first call
}

static double bytes_of(const Checkpoint *c) {
    double sum = 0;
    for (int i = 0; i < c->num_files; i++) { sum += fmax(0, (double)c->files[i].listed); }
    return sum;
}

bool checkpoint_list(const char *save) {
    int64_t *steps, best = checkpoint_best(save);
    int count = checkpoint_steps(save, &steps);
    if (count < 0) { return false; }
    if (count == 0) { return fail("--list-checkpoints: none under %s", save); }
    printf("%10s  %10s  %10s  %-9s %5s  %10s  %-20s  %s\n", "step", "loss", "valid loss",
           "precision", "ranks", "size", "written", "state");
    for (int i = count - 1; i >= 0; i--) {
        char path[PATH_LENGTH], size[32], loss[32], valid_loss[32], precision[32], created[64];
        Checkpoint c;
        char mark[32];
        snprintf(mark, sizeof(mark), "%s%s", i == 0 ? ", latest" : "",
                 steps[i] == best ? ", best" : "");
        if (checkpoint_open(&c, checkpoint_path(path, save, steps[i]), true)) {
            bool evaluated = !isnan(c.progress.valid_loss);
            format_number(valid_loss, c.progress.valid_loss);
            printf("%10lld  %10s  %10s  %-9s %5d  %10s  %-20s  whole%s\n", (long long)steps[i],
                   format_number(loss, c.progress.loss), evaluated ? valid_loss : "-",
                   printable(precision, sizeof(precision), c.precision), c.ranks,
                   format_bytes(size, bytes_of(&c)), printable(created, sizeof(created), c.created),
                   mark);
            checkpoint_close(&c);
        } else {
            printf("%10lld  %s%s: %s\n", (long long)steps[i],
                   error_kept().refused ? "unreadable" : "damaged", mark, error_text());
        }
    }
    free(steps);
    return true;
}

// ---- reading into a run -------------------------------------------------------------------------

bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout) {
    // the options came from another checkpoint: its optimizer state is damaged, or a newer one was
    // saved since
    bool elsewhere = options->resumes && strcmp(c->path, options->origin) != 0;
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        const char *name = row->name, *was = text_of(c->options, name);
        char now[OPTION_TEXT];
        option_text(options, row, now);
        bool moves = strcmp(name, "save") == 0 || (options->source[i] == SOURCE_DERIVED &&
                                                   row->type == OPTION_STRING); // the tokenizer
        if (moves || row->effect == EFFECT_ACTION || strcmp(was, now) == 0) { continue; }
        if (elsewhere && options->source[i] == SOURCE_CHECKPOINT) {
            return fail("--resume latest: the options are those of %s, the state that can be read "
                        "is that of %s, where --%s is %s; name one by --resume PATH",
                        options->origin, c->path, name, *was ? was : "not set");
        }
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

// Reads the scales of `count` blocks of a moment in 8 bits. Refuses a scale that is not finite.
static bool read_scales(const SafeTensors *st, int kind, int64_t first, int64_t count,
                        uint16_t *scales) {
    const TensorEntry *e = safetensors_find(
        st, state_names[kind - STATE_EXP_AVG + STATE_EXP_AVG_SCALE]);
    bool ok = safetensors_read(st, e, first, count, scales);
    for (int64_t i = 0; ok && i < count; i++) {
        float scale = bf16_decode(scales[i]);
        ok = (scale >= 0.0f && isfinite(scale)) ||
             fail("%s: '%s' has %g", st->path, e->name, (double)scale);
    }
    return ok;
}

// Reads n elements of a moment in 8 bits, decoded to floats.
static bool decode_moment(const SafeTensors *st, int kind, int64_t at, int64_t n, float *out) {
    int64_t first = at / MOMENT_BLOCK, count = (at + n - 1) / MOMENT_BLOCK - first + 1;
    uint8_t *codes = malloc_or_die((size_t)n);
    uint16_t *scales = malloc_or_die((size_t)count * sizeof(uint16_t));
    Moment which = kind == STATE_EXP_AVG ? MOMENT_FIRST : MOMENT_SECOND;
    bool ok = safetensors_read(st, safetensors_find(st, state_names[kind]), at, n, codes) &&
              read_scales(st, kind, first, count, scales);
    if (ok) { moment_decode(out, which, codes, scales, (int)(at % MOMENT_BLOCK), n); }
    free(codes);
    free(scales);
    return ok;
}

// Where elements are read to: `floats`; or, if that is NULL, `codes` and `scales`.
typedef struct {
    float *floats;
    uint8_t *codes;
    uint16_t *scales;
} Elements;

// Reads n elements of an array from element `at` of a rank's file on.
static bool read_array(const SafeTensors *st, int kind, int64_t at, int64_t n, Elements to) {
    const TensorEntry *e = safetensors_find(st, state_names[kind]);
    bool codes = e->dtype == DTYPE_I8 || e->dtype == DTYPE_U8;
    if (codes && kind == STATE_EXP_AVG && at >= e->shape[0]) { // Muon's elements have no codes
        at -= e->shape[0];
        e = safetensors_find(st, state_names[STATE_MOMENTUM]);
        codes = false;
    }
    if (e == NULL || at + n > e->shape[0] || (to.floats == NULL && !codes)) {
        return fail("%s: elements %lld to %lld have no '%s'", st->path, (long long)at,
                    (long long)(at + n), state_names[kind]);
    }
    if (to.floats == NULL) {
        return safetensors_read(st, e, at, n, to.codes) &&
               read_scales(st, kind, at / MOMENT_BLOCK, n / MOMENT_BLOCK, to.scales);
    }
    return codes ? decode_moment(st, kind, at, n, to.floats)
                 : safetensors_read_floats(st, e, at, n, to.floats);
}

// Reads elements begin..end from the ranks' files.
static bool read_ranges(const Checkpoint *c, int kind, int64_t begin, int64_t end, Elements to) {
    if (begin < 0 || end > c->layout_size) {
        return fail("%s: elements %lld to %lld of '%s' are not all in its files", c->path,
                    (long long)begin, (long long)end, state_names[kind]);
    }
    for (int i = 0; i < c->num_ranges; i++) {
        const SavedRange *r = &c->ranges[i];
        int64_t from = max64(begin, r->begin), until = min64(end, r->end), at = from - begin;
        if (from >= until) { continue; }
        Elements part = {0};
        if (to.floats != NULL) {
            part.floats = to.floats + at;
        } else {
            part.codes = to.codes + at;
            part.scales = to.scales + at / MOMENT_BLOCK;
        }
        if (!read_array(&c->optimizer[r->rank], kind, r->at + from - r->begin, until - from,
                        part)) {
            return false;
        }
    }
    return true;
}

bool checkpoint_read(const Checkpoint *c, const char *kind, int64_t begin, int64_t end,
                     float *out) {
    int i = STATE_MASTER;
    while (i < STATE_EXP_AVG_SQ && strcmp(kind, state_names[i]) != 0) { i++; }
    assert(strcmp(kind, state_names[i]) == 0);
    return read_ranges(c, i, begin, end, (Elements){.floats = out});
}

bool checkpoint_read_codes(const Checkpoint *c, Moment which, int64_t begin, int64_t end,
                           uint8_t *codes, uint16_t *scales) {
    int kind = which == MOMENT_FIRST ? STATE_EXP_AVG : STATE_EXP_AVG_SQ;
    return read_ranges(c, kind, begin, end, (Elements){.codes = codes, .scales = scales});
}

// The number of tokens in a step of the checkpoint's run; 0: its options do not say.
static double tokens_of_a_step(const Checkpoint *c) {
    return atof(text_of(c->options, "global-batch-size")) * atof(text_of(c->options, "seq-length"));
}

bool checkpoint_read_scaling(const Checkpoint *c, const Precision *precision, Fp8Scale *slots,
                             float *history) {
    enum { SCALE, TARGET, COUNT, AMAX, TENSORS };
    static const struct {
        const char *name;
        Dtype dtype;
        int dims;
    } rows[TENSORS] = {{"scale", DTYPE_F32, 1},
                       {"target", DTYPE_F32, 1},
                       {"count", DTYPE_I32, 1},
                       {"amax_history", DTYPE_F32, 2}};
    const TensorEntry *e[TENSORS];
    int n = fp8_slot_count(precision->config), length = precision->history_length;
    double step_tokens = tokens_of_a_step(c);
    if (c->scaling.count == 0 || precision->recipe != FP8_RECIPE_DELAYED) { return true; }
    bool ok = true;
    for (int i = 0; i < TENSORS; i++) {
        e[i] = safetensors_find(&c->scaling, rows[i].name);
        ok = ok && e[i] != NULL && e[i]->dtype == rows[i].dtype && e[i]->dims == rows[i].dims &&
             e[i]->shape[0] == n;
    }
    if (!ok || e[AMAX]->shape[1] < 1 || e[AMAX]->shape[1] > INT32_MAX) {
        return fail("%s: not the scaling state of %d tensors", c->scaling.path, n);
    }
    if (!(step_tokens > 0)) {
        return fail("%s/meta.json: no --global-batch-size or --seq-length", c->path);
    }
    int saved_length = (int)e[AMAX]->shape[1];
    float *saved = malloc_or_die((size_t)saved_length * sizeof(float));
    for (int i = 0; i < n; i++) {
        Fp8Scale *slot = &slots[i];
        float was, target = fp8_slot_target(precision, i);
        float growth = 1.0f; // how the changed options scale the tensor's values
        int32_t count;
        // skips a slot that is not in use, because its state would be out of date later
        if (!fp8_slot_in_use(precision, i)) { continue; }
        if (!safetensors_read(&c->scaling, e[COUNT], i, 1, &count) ||
            !safetensors_read(&c->scaling, e[SCALE], i, 1, &slot->scale) ||
            !safetensors_read(&c->scaling, e[TARGET], i, 1, &was) ||
            !safetensors_read(&c->scaling, e[AMAX], (int64_t)i * saved_length, saved_length,
                              saved)) {
            free(saved);
            return false;
        }
        if (i % OPERAND_COUNT == OPERAND_DY) {
            growth = (float)(step_tokens / precision->step_tokens);
        }
        slot->count = count;
        ok = ok && count >= 0 && count <= c->progress.step;
        if (!fp8_scale_known(slot)) { continue; }
        fp8_rescale(slot, was / target * growth, slot->scale);
        // both histories are rings: entry k is at k % length
        int known = ok ? (int)min64(count, min64(saved_length, length)) : 0;
        for (int k = count - known; k < count; k++) {
            history[(int64_t)i * length + k % length] = saved[k % saved_length] * growth;
        }
    }
    free(saved);
    return ok || fail("%s: damaged: a scale has more steps than the run", c->scaling.path);
}
