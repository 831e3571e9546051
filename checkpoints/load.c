// Finding a checkpoint, verifying it, and reading it back into a run.
#include "../dataloader/loader.h"
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

// Checks meta.json's checksum of itself and its version, and parses it.
static cJSON *parse_meta(const char *path, Error *err) {
    size_t bytes;
    char *text = file_read(path, &bytes, err);
    if (text == NULL) { return NULL; }
    cJSON *meta = meta_seal(text, bytes) ? cJSON_ParseWithLength(text, bytes) : NULL;
    free(text);
    double version = json_number(meta, "version", NAN);
    if (!cJSON_IsObject(meta)) {
        fail(err, "%s: damaged (its checksum does not match)", path);
    } else if (strcmp(text_of(meta, "format"), "llm8.c checkpoint") != 0) {
        fail(err, "%s: not an llm8.c checkpoint", path);
    } else if (version != CHECKPOINT_VERSION) {
        fail(err, "%s: checkpoint version %g; this program reads %d", path, version,
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
};

static int64_t count_of(const cJSON *json, const char *name) {
    return json_count(cJSON_GetObjectItemCaseSensitive(json, name));
}

static bool read_meta(Checkpoint *c, cJSON *meta, Error *err) {
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
        return fail(err, "%s/meta.json: a number is missing or out of range", c->path);
    }
    c->ranks = (int)ranks;
    snprintf(c->precision, sizeof(c->precision), "%s", text_of(meta, "precision"));
    snprintf(c->created, sizeof(c->created), "%s", text_of(meta, "created"));
    c->data = strdup_or_die(text_of(meta, "data"));
    c->valid_data = strdup_or_die(text_of(meta, "valid_data"));
    c->options = cJSON_DetachItemFromObjectCaseSensitive(meta, "options");
    return cJSON_IsObject(c->options) || fail(err, "%s/meta.json: no options", c->path);
}

// Verifies the length and the checksum of a file that meta.json lists.
static bool check_file(const char *folder, const cJSON *file, int64_t *bytes, Error *err) {
    enum { NAME_MAX_LENGTH = 100 };
    const char *name = text_of(file, "name"), *crc = text_of(file, "crc32");
    char path[PATH_LENGTH], computed[16];
    int64_t listed = count_of(file, "bytes");
    uint32_t sum;
    if (name[0] == '\0' || strlen(name) > NAME_MAX_LENGTH || strchr(name, '/') != NULL) {
        return fail(err, "%s/meta.json: a file named '%.80s'", folder, name);
    }
    if (!file_checksum(path_format(path, "%s/%s", folder, name), bytes, &sum, err)) {
        return false;
    }
    if (*bytes != listed) {
        return fail(err, "%s: damaged: %lld bytes, not %lld", path, (long long)*bytes,
                    (long long)listed);
    }
    snprintf(computed, sizeof(computed), "%08x", sum);
    return strcmp(computed, crc) == 0 ||
           fail(err, "%s: damaged: its checksum is %s, not %s", path, computed, crc);
}

static bool check_files(Checkpoint *c, const cJSON *files, Error *err) {
    const cJSON *file;
    int64_t bytes;
    if (!cJSON_IsArray(files)) { return fail(err, "%s/meta.json: no list of files", c->path); }
    cJSON_ArrayForEach(file, files) {
        if (!check_file(c->path, file, &bytes, err)) { return false; }
        c->bytes += bytes;
    }
    return true;
}

// The entry of meta.json's list; NULL: the file is not in it.
static const cJSON *find_file(const cJSON *files, const char *name) {
    const cJSON *file;
    cJSON_ArrayForEach(file, files) {
        if (strcmp(text_of(file, "name"), name) == 0) { return file; }
    }
    return NULL;
}

// Opens a file of tensors, which meta.json must list: check_files has then verified it.
static bool open_tensors(const Checkpoint *c, const cJSON *files, const char *name, SafeTensors *st,
                         Error *err) {
    char path[PATH_LENGTH];
    return find_file(files, name) != NULL
               ? safetensors_open(st, path_format(path, "%s/%s", c->path, name), err)
               : fail(err, "%s/meta.json: its list of files lacks %s", c->path, name);
}

// Adds the ranges "begin:end,begin:end" of a rank to c->ranges; returns how many elements they
// are, or -1 when the text is wrong.
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

// Opens every rank's file. Their ranges together must be the parameter space, every element once.
static bool open_optimizer(Checkpoint *c, const cJSON *files, Error *err) {
    enum { EXP_AVG_SQ = 2, KINDS };
    static const char *const kinds[KINDS] = {"master", "exp_avg", "exp_avg_sq"};
    c->optimizer = calloc_or_die((size_t)c->ranks, sizeof(SafeTensors));
    for (int r = 0; r < c->ranks; r++) {
        SafeTensors *st = &c->optimizer[r];
        char name[64];
        snprintf(name, sizeof(name), "optimizer-%d-of-%d.safetensors", r, c->ranks);
        if (!open_tensors(c, files, name, st, err)) { return false; }
        cJSON *metadata = cJSON_Parse(st->metadata);
        int64_t elements = add_ranges(c, r, text_of(metadata, "ranges"));
        cJSON_Delete(metadata);
        if (elements < 0) { return fail(err, "%s: its list of ranges is wrong", st->path); }
        for (int kind = 0; kind < KINDS; kind++) {
            const TensorEntry *e = safetensors_find(st, kinds[kind]);
            bool whole = e != NULL && (e->shape[0] == elements ||
                                       (kind == EXP_AVG_SQ && e->shape[0] < elements));
            if (!whole || e->dims != 1 || e->dtype > DTYPE_F16) {
                return fail(err, "%s: '%s' is missing or not %lld floating-point numbers", st->path,
                            kinds[kind], (long long)elements);
            }
        }
    }
    qsort(c->ranges, (size_t)c->num_ranges, sizeof(SavedRange), compare_ranges);
    int64_t covered = 0;
    int used = 0;
    while (used < c->num_ranges && c->ranges[used].begin == covered) {
        covered = c->ranges[used++].end;
    }
    return (used == c->num_ranges && covered == c->layout_size) ||
           fail(err, "%s: its optimizer files do not hold element %lld of %lld exactly once",
                c->path, (long long)covered, (long long)c->layout_size);
}

bool checkpoint_open(Checkpoint *c, const char *path, bool verify, Error *err) {
    char file[PATH_LENGTH];
    *c = (Checkpoint){0};
    path_format(c->path, "%s", path);
    if (!path_exists(path)) { return fail(err, "%s: no such folder", path); }
    cJSON *meta = parse_meta(path_format(file, "%s/meta.json", path), err);
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(meta, "files");
    bool ok = meta != NULL && read_meta(c, meta, err) && (!verify || check_files(c, files, err)) &&
              open_optimizer(c, files, err) &&
              open_tensors(c, files, "model.safetensors", &c->model, err) &&
              (find_file(files, "scaling.safetensors") == NULL ||
               open_tensors(c, files, "scaling.safetensors", &c->scaling, err));
    cJSON_Delete(meta);
    if (!ok) { checkpoint_close(c); }
    return ok;
}

void checkpoint_close(Checkpoint *c) {
    for (int r = 0; c->optimizer != NULL && r < c->ranks; r++) {
        safetensors_close(&c->optimizer[r]);
    }
    free(c->optimizer);
    free(c->ranges);
    free(c->data);
    free(c->valid_data);
    safetensors_close(&c->model);
    safetensors_close(&c->scaling);
    cJSON_Delete(c->options);
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

// The step of a checkpoint's name; -1: another name.
static int64_t step_of(const char *name) {
    char exact[40];
    long long step = strncmp(name, "step_", 5) == 0 ? strtoll(name + 5, NULL, 10) : -1;
    snprintf(exact, sizeof(exact), "step_%08lld", step);
    return strcmp(name, exact) == 0 ? step : -1;
}

int checkpoint_steps(const char *save, int64_t **steps, Error *err) {
    int count = 0;
    char path[PATH_LENGTH], *names = folder_list(save, err);
    struct stat info;
    *steps = NULL;
    if (names == NULL) { return errno == ENOENT ? 0 : -1; }
    for (const char *name = names; *name != '\0'; name += strlen(name) + 1) {
        path_format(path, "%s/%s", save, name);
        bool folder = stat(path, &info) != 0 || S_ISDIR(info.st_mode); // or it cannot be told
        if (!folder || step_of(name) < 0) { continue; }
        *steps = realloc_or_die(*steps, (size_t)(count + 1) * sizeof(int64_t));
        (*steps)[count++] = step_of(name);
    }
    free(names);
    if (count > 0) { qsort(*steps, (size_t)count, sizeof(int64_t), newest_first); }
    path_format(path, "%s/latest", save);
    if (count > 0 || access(path, F_OK) != 0) { return count; }
    fail(err, "%s is a folder without a step_... beside it: give it the name of its step", path);
    return -1;
}

int64_t checkpoint_linked(const char *save, const char *link) {
    char path[PATH_LENGTH], target[PATH_LENGTH];
    return step_of(link_read(path_format(path, "%s/%s", save, link), target));
}

int64_t checkpoint_best(const char *save, const char *valid_data, int64_t valid_tokens) {
    int64_t *steps, best = -1;
    int count = valid_data[0] != '\0' ? checkpoint_steps(save, &steps, NULL) : -1;
    double lowest = INFINITY;
    for (int i = count - 1; i >= 0; i--) { // of equal ones, the oldest
        char path[PATH_LENGTH], was[9], now[9];
        path_format(path, "%s/step_%08lld/meta.json", save, (long long)steps[i]);
        cJSON *meta = parse_meta(path, NULL);
        double loss = json_number(meta, "valid_loss", NAN);
        identity_sum(text_of(meta, "valid_data"), was);
        bool same = strcmp(was, identity_sum(valid_data, now)) == 0 &&
                    count_of(meta, "valid_tokens") == valid_tokens;
        if (same && loss < lowest) {
            lowest = loss;
            best = steps[i];
        }
        cJSON_Delete(meta);
    }
    if (count >= 0) { free(steps); }
    return best;
}

// Of steps, the newest first: where --resume latest begins, at `latest` where there is one.
static int first_to_try(const char *save, const int64_t *steps, int count) {
    int64_t latest = checkpoint_linked(save, "latest");
    int i = 0;
    while (latest >= 0 && i < count && steps[i] > latest) { i++; }
    return i;
}

bool checkpoint_resume(Checkpoint *c, const Options *options, bool *found, Error *err) {
    Error why;
    if (strcmp(options->resume, "latest") != 0) {
        *found = checkpoint_open(c, options->resume, true, &why);
        return *found || fail(err, RESUME_FAULT, why.text);
    }
    *found = false;
    int64_t *steps;
    int count = checkpoint_steps(options->save, &steps, &why);
    if (count < 0) { return fail(err, "--resume latest: %s", why.text); }
    for (int i = first_to_try(options->save, steps, count); i < count && !*found; i++) {
        char path[PATH_LENGTH];
        *found = checkpoint_open(c, checkpoint_path(path, options->save, steps[i]), true, &why);
        if (!*found) { warn("%s; trying an earlier checkpoint", why.text); }
    }
    free(steps);
    return *found || count == 0 ||
           fail(err,
                "--resume latest: no whole checkpoint under %s; to start afresh, use another "
                "--save or move the damaged ones away",
                options->save);
}

// What a folder says of its model's options, and whether its tokenizer is whole.
static bool read_model(const char *folder, Options *model, Error *err) {
    char path[PATH_LENGTH];
    int64_t bytes;
    *model = (Options){0};
    if (!path_exists(folder)) { return fail(err, "%s: no such folder", folder); }
    if (path_exists(path_format(path, "%s/latest", folder))) {
        return fail(err, "%s: a run's folder; give one of its checkpoints, such as %s", folder,
                    path);
    }
    path_format(path, "%s/meta.json", folder);
    if (!path_exists(path)) { return hf_options(folder, model, err); }
    cJSON *meta = parse_meta(path, err);
    const cJSON *options = cJSON_GetObjectItemCaseSensitive(meta, "options");
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(meta, "files");
    const cJSON *tokenizer = find_file(files, "tokenizer.bin");
    bool ok = meta != NULL && (tokenizer == NULL || check_file(folder, tokenizer, &bytes, err));
    for (const OptionRow *row = option_table; ok && row < option_table + option_table_count;
         row++) {
        Error why;
        if (strcmp(row->group, "Model") != 0) { continue; }
        ok = option_set(model, row->name, text_of(options, row->name), SOURCE_CHECKPOINT, &why) ||
             fail(err, "%s: %s", path, why.text);
    }
    cJSON_Delete(meta);
    return ok;
}

// A link that is a file (base/io.h) is no folder to open: the path becomes what it leads to.
static void follow_link(char path[PATH_LENGTH]) {
    char target[PATH_LENGTH], copy[PATH_LENGTH];
    struct stat info;
    bool file = lstat(path, &info) == 0 && S_ISREG(info.st_mode);
    if (file && step_of(link_read(path, target)) >= 0) {
        path_format(copy, "%s", path);
        path_format(path, "%s/%s", dirname(copy), target);
    }
}

bool checkpoint_model(Options *o, Options *model, Error *err) {
    Error why;
    bool latest = strcmp(o->resume, "latest") == 0, searches = latest && o->save[0] != '\0';
    if (!latest) { follow_link(o->resume); }
    follow_link(o->load);
    int64_t *steps = NULL;
    int count = searches ? checkpoint_steps(o->save, &steps, NULL) : 0;
    for (int i = first_to_try(o->save, steps, count); i < count && o->origin[0] == '\0'; i++) {
        char path[PATH_LENGTH];
        checkpoint_path(path, o->save, steps[i]);
        if (read_model(path, model, NULL)) { path_format(o->origin, "%s", path); }
    }
    free(steps);
    const char *named = latest ? "" : o->resume;
    if (named[0] == '\0') { named = o->load; }
    if (o->origin[0] != '\0' || named[0] == '\0') { return true; }
    path_format(o->origin, "%s", named);
    return read_model(named, model, &why) || (named == o->load ? fail(err, "--load %s", why.text)
                                                               : fail(err, RESUME_FAULT, why.text));
}

bool checkpoint_list(const char *save, Error *err) {
    int64_t *steps, latest = checkpoint_linked(save, "latest"),
                    best = checkpoint_linked(save, "best");
    int count = checkpoint_steps(save, &steps, err);
    if (count < 0) { return false; }
    if (count == 0) { return fail(err, "--list-checkpoints: none under %s", save); }
    printf("%10s  %10s  %10s  %-9s %5s  %10s  %-20s  %s\n", "step", "loss", "valid loss",
           "precision", "ranks", "size", "written", "state");
    for (int i = count - 1; i >= 0; i--) {
        char path[PATH_LENGTH], size[32], loss[32], valid_loss[32];
        Checkpoint c;
        Error why;
        char mark[32];
        snprintf(mark, sizeof(mark), "%s%s", steps[i] == latest ? ", latest" : "",
                 steps[i] == best ? ", best" : "");
        if (checkpoint_open(&c, checkpoint_path(path, save, steps[i]), true, &why)) {
            bool evaluated = !isnan(c.progress.valid_loss);
            format_number(valid_loss, c.progress.valid_loss);
            printf("%10lld  %10s  %10s  %-9s %5d  %10s  %-20s  whole%s\n", (long long)steps[i],
                   format_number(loss, c.progress.loss), evaluated ? valid_loss : "-", c.precision,
                   c.ranks, format_bytes(size, (double)c.bytes), c.created, mark);
            checkpoint_close(&c);
        } else {
            printf("%10lld  damaged%s: %s\n", (long long)steps[i], mark, why.text);
        }
    }
    free(steps);
    return true;
}

// ---- reading into a run -------------------------------------------------------------------------

bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout,
                      Error *err) {
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        const char *name = row->name, *was = text_of(c->options, name);
        char now[OPTION_TEXT];
        option_text(options, row, now);
        bool moves = strcmp(name, "resume") == 0 || strcmp(name, "save") == 0 ||
                     options->source[i] == SOURCE_DATA; // the tokenizer, wherever it is
        if (moves || row->effect == EFFECT_ACTION || strcmp(was, now) == 0) { continue; }
        if (strcmp(name, "optimizer") == 0 && options_train(options)) {
            return fail(err,
                        "%s: its moments are those of --optimizer %s, this run's is %s; resume "
                        "with its optimizer, or start a new run from its weights by --load",
                        c->path, was, now);
        }
        if (option_is_shape(row, layout->config.arch)) {
            return fail(err,
                        "%s: another model's checkpoint: it has --%s %s, this run %s; resume with "
                        "its options",
                        c->path, name, was, now);
        }
        printf("  --%s is %s, was %s in the checkpoint\n", name, *now ? now : "not set",
               *was ? was : "not set");
    }
    return c->layout_size == layout->size ||
           fail(err, "%s: %lld elements of parameter space, this run has %lld", c->path,
                (long long)c->layout_size, (long long)layout->size);
}

bool checkpoint_read(const Checkpoint *c, const char *kind, int64_t begin, int64_t end, float *out,
                     Error *err) {
    if (begin < 0 || end > c->layout_size) {
        return fail(err, "%s: elements %lld to %lld of '%s' are not all in its files", c->path,
                    (long long)begin, (long long)end, kind);
    }
    for (int i = 0; i < c->num_ranges; i++) {
        const SavedRange *r = &c->ranges[i];
        int64_t from = max64(begin, r->begin), to = min64(end, r->end);
        if (from >= to) { continue; }
        const TensorEntry *e = safetensors_find(&c->optimizer[r->rank], kind);
        if (r->at + to - r->begin > e->shape[0]) {
            return fail(err, "%s: elements %lld to %lld have no '%s'", c->path, (long long)from,
                        (long long)to, kind);
        }
        safetensors_read_floats(e, r->at + from - r->begin, to - from, out + (from - begin));
    }
    return true;
}

// Of an optimizer step of the checkpoint's run; 0 where its options do not say.
static double tokens_of_a_step(const Checkpoint *c) {
    return atof(text_of(c->options, "global-batch-size")) * atof(text_of(c->options, "seq-length"));
}

bool checkpoint_read_scaling(const Checkpoint *c, const Precision *precision, Fp8Slot *slots,
                             float *history, Error *err) {
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
        return fail(err, "%s: not the scaling state of %d tensors", c->scaling.path, n);
    }
    if (!(step_tokens > 0)) {
        return fail(err, "%s/meta.json: no --global-batch-size or --seq-length", c->path);
    }
    int saved_length = (int)e[AMAX]->shape[1];
    float *saved = malloc_or_die((size_t)saved_length * sizeof(float));
    for (int i = 0; i < n; i++) {
        Fp8Slot *slot = &slots[i];
        float was, target = fp8_slot_target(precision, i);
        float growth = 1.0f; // of the tensor's values, by the change of options
        int32_t count;
        if (!fp8_slot_in_use(precision, i)) { continue; } // or it would be stale once it is
        memcpy(&count, (const char *)e[COUNT]->data + (size_t)i * sizeof(count), sizeof(count));
        safetensors_read_floats(e[SCALE], i, 1, &slot->scale);
        safetensors_read_floats(e[TARGET], i, 1, &was);
        if (i % OPERAND_COUNT == OPERAND_DY) {
            growth = (float)(step_tokens / precision->step_tokens);
        }
        fp8_slot_rescale(slot, was / target * growth, slot->scale);
        slot->count = count;
        ok = ok && count >= 0 && count <= c->progress.step;
        // both histories are rings: entry k is at k % length
        safetensors_read_floats(e[AMAX], (int64_t)i * saved_length, saved_length, saved);
        int known = ok ? (int)min64(count, min64(saved_length, length)) : 0;
        for (int k = count - known; k < count; k++) {
            history[(int64_t)i * length + k % length] = saved[k % saved_length] * growth;
        }
    }
    free(saved);
    return ok || fail(err, "%s: it has counted more steps than the run", c->scaling.path);
}
