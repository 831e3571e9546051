// Finding a checkpoint, verifying it, and reading it back into a run.
#include "checkpoint.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

// ---- opening ------------------------------------------------------------------------------------

// Checks meta.json's checksum of itself, and parses it.
static cJSON *parse_meta(const char *path, Error *err) {
    enum { META_MAX = 16 << 20 };
    static const char tail[] = "00000000\"\n}";
    size_t tail_bytes = sizeof(tail) - 1;
    MappedFile file;
    cJSON *meta = NULL;
    if (!file_map(&file, path, err)) { return NULL; }
    if (file.bytes > tail_bytes && file.bytes < META_MAX) {
        char *text = malloc_or_die(file.bytes), stored[9] = "", computed[16];
        memcpy(text, file.data, file.bytes);
        memcpy(stored, text + file.bytes - tail_bytes, 8);
        memcpy(text + file.bytes - tail_bytes, tail, 8);
        snprintf(computed, sizeof(computed), "%08x",
                 (unsigned)crc32(0, (const Bytef *)text, (uInt)file.bytes));
        if (strcmp(stored, computed) == 0) { meta = cJSON_ParseWithLength(text, file.bytes); }
        free(text);
    }
    file_unmap(&file);
    if (!cJSON_IsObject(meta)) {
        cJSON_Delete(meta);
        fail(err, "%s: damaged (its checksum does not match)", path);
        return NULL;
    }
    return meta;
}

static double number_of(const cJSON *json, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

// A number from 0 to 2^53, or -1.
static int64_t count_of(const cJSON *json, const char *name) {
    double value = number_of(json, name);
    return value >= 0 && value <= 0x1p53 ? (int64_t)value : -1;
}

static const char *text_of(const cJSON *json, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, name);
    return cJSON_IsString(item) ? item->valuestring : "";
}

static bool read_meta(Checkpoint *c, cJSON *meta, Error *err) {
    if (strcmp(text_of(meta, "format"), "llm8.c checkpoint") != 0) {
        return fail(err, "%s/meta.json: not an llm8.c checkpoint", c->path);
    }
    if (number_of(meta, "version") != 1) {
        return fail(err, "%s/meta.json: checkpoint version %g; this program reads 1", c->path,
                    number_of(meta, "version"));
    }
    int64_t skipped_in_row = count_of(meta, "skipped_in_row"), ranks = count_of(meta, "ranks");
    c->progress = (Progress){
        .step = count_of(meta, "step"),
        .samples = count_of(meta, "samples"),
        .tokens = count_of(meta, "tokens"),
        .skipped = count_of(meta, "skipped"),
        .skipped_in_row = (int)skipped_in_row,
        .loss = number_of(meta, "loss"),
        .valid_loss = number_of(meta, "valid_loss"),
        .best_valid_loss = number_of(meta, "best_valid_loss"),
        .level = number_of(meta, "level"),
        .best_level = number_of(meta, "best_level"),
        .proven = count_of(meta, "proven"),
    };
    c->data_windows = count_of(meta, "data_windows");
    c->layout_size = count_of(meta, "layout_size");
    const Progress *p = &c->progress;
    if (p->step < 0 || p->samples < 0 || p->tokens < 0 || p->skipped < 0 || skipped_in_row < 0 ||
        skipped_in_row > INT32_MAX || ranks < 1 || ranks > RANKS_MAX || c->layout_size < 0) {
        return fail(err, "%s/meta.json: a number is missing or out of range", c->path);
    }
    c->ranks = (int)ranks;
    snprintf(c->precision, sizeof(c->precision), "%s", text_of(meta, "precision"));
    snprintf(c->created, sizeof(c->created), "%s", text_of(meta, "created"));
    c->data = strdup_or_die(text_of(meta, "data"));
    c->options = cJSON_DetachItemFromObjectCaseSensitive(meta, "options");
    return cJSON_IsObject(c->options) || fail(err, "%s/meta.json: no options", c->path);
}

// Verifies the length and the checksum of every file that meta.json lists.
static bool check_files(Checkpoint *c, const cJSON *meta, Error *err) {
    enum { NAME_MAX_LENGTH = 100 };
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(meta, "files"), *file;
    if (!cJSON_IsArray(files)) { return fail(err, "%s/meta.json: no list of files", c->path); }
    cJSON_ArrayForEach(file, files) {
        const char *name = text_of(file, "name"), *crc = text_of(file, "crc32");
        char path[PATH_LENGTH], computed[16];
        int64_t bytes, listed = count_of(file, "bytes");
        uint32_t sum;
        if (name[0] == '\0' || strlen(name) > NAME_MAX_LENGTH || strchr(name, '/') != NULL) {
            return fail(err, "%s/meta.json: a file named '%.80s'", c->path, name);
        }
        path_format(path, "%s/%s", c->path, name);
        if (!file_checksum(path, &bytes, &sum, err)) { return false; }
        if (bytes != listed) {
            return fail(err, "%s: damaged: %lld bytes, not %lld", path, (long long)bytes,
                        (long long)listed);
        }
        snprintf(computed, sizeof(computed), "%08x", sum);
        if (strcmp(computed, crc) != 0) {
            return fail(err, "%s: damaged: its checksum is %s, not %s", path, computed, crc);
        }
        c->bytes += bytes;
    }
    return true;
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
static bool open_optimizer(Checkpoint *c, Error *err) {
    static const char *const kinds[] = {"master", "exp_avg", "exp_avg_sq"};
    c->optimizer = calloc_or_die((size_t)c->ranks, sizeof(SafeTensors));
    for (int r = 0; r < c->ranks; r++) {
        SafeTensors *st = &c->optimizer[r];
        char path[PATH_LENGTH];
        path_format(path, "%s/optimizer-%d-of-%d.safetensors", c->path, r, c->ranks);
        if (!safetensors_open(st, path, err)) { return false; }
        cJSON *metadata = cJSON_Parse(st->metadata);
        int64_t elements = add_ranges(c, r, text_of(metadata, "ranges"));
        cJSON_Delete(metadata);
        if (elements < 0) { return fail(err, "%s: its list of ranges is wrong", path); }
        for (int kind = 0; kind < 3; kind++) {
            const TensorEntry *e = safetensors_find(st, kinds[kind]);
            if (e == NULL || e->dims != 1 || e->shape[0] != elements || e->dtype > DTYPE_F16) {
                return fail(err, "%s: '%s' is missing or not %lld floating-point numbers", path,
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

static bool open_checkpoint(Checkpoint *c, const char *path, bool check, Error *err) {
    char file[PATH_LENGTH];
    *c = (Checkpoint){0};
    path_format(c->path, "%s", path);
    if (!path_exists(path)) { return fail(err, "%s: no such checkpoint", path); }
    path_format(file, "%s/meta.json", path);
    cJSON *meta = parse_meta(file, err);
    bool ok = meta != NULL && read_meta(c, meta, err) && (!check || check_files(c, meta, err)) &&
              open_optimizer(c, err);
    cJSON_Delete(meta);
    path_format(file, "%s/model.safetensors", path);
    ok = ok && safetensors_open(&c->model, file, err);
    path_format(file, "%s/scaling.safetensors", path);
    ok = ok && (!path_exists(file) || safetensors_open(&c->scaling, file, err));
    if (!ok) { checkpoint_close(c); }
    return ok;
}

bool checkpoint_open(Checkpoint *c, const char *path, Error *err) {
    return open_checkpoint(c, path, true, err);
}

bool checkpoint_open_checked(Checkpoint *c, const char *path, Error *err) {
    return open_checkpoint(c, path, false, err);
}

void checkpoint_close(Checkpoint *c) {
    for (int r = 0; c->optimizer != NULL && r < c->ranks; r++) {
        safetensors_close(&c->optimizer[r]);
    }
    free(c->optimizer);
    free(c->ranges);
    free(c->data);
    safetensors_close(&c->model);
    safetensors_close(&c->scaling);
    cJSON_Delete(c->options);
    *c = (Checkpoint){0};
}

// ---- finding ------------------------------------------------------------------------------------

void checkpoint_path(char path[PATH_LENGTH], const char *save, int64_t step) {
    path_format(path, "%s/step_%08lld", save, (long long)step);
}

static int newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : (x > y ? -1 : 0);
}

int checkpoint_steps(const char *save, int64_t **steps) {
    int count = 0;
    *steps = NULL;
    DIR *folder = opendir(save);
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        long long step;
        int length;
        if (sscanf(entry->d_name, "step_%lld%n", &step, &length) == 1 && step >= 0 &&
            entry->d_name[length] == '\0') {
            *steps = realloc_or_die(*steps, (size_t)(count + 1) * sizeof(int64_t));
            (*steps)[count++] = step;
        }
    }
    if (folder != NULL) { closedir(folder); }
    if (count > 0) { qsort(*steps, (size_t)count, sizeof(int64_t), newest_first); }
    return count;
}

// The step that `latest` points to, or -1.
static int64_t latest_step(const char *save) {
    char link[PATH_LENGTH], target[PATH_LENGTH];
    long long step;
    path_format(link, "%s/latest", save);
    ssize_t length = readlink(link, target, sizeof(target) - 1);
    target[length > 0 ? length : 0] = '\0';
    return sscanf(target, "step_%lld", &step) == 1 ? step : -1;
}

bool checkpoint_resume(Checkpoint *c, const Options *options, bool *found, Error *err) {
    Error why;
    if (strcmp(options->resume, "latest") != 0) {
        *found = checkpoint_open(c, options->resume, &why);
        return *found ||
               fail(err, "--resume %s; --list-checkpoints shows which are whole", why.text);
    }
    *found = false;
    int64_t *steps, latest = latest_step(options->save);
    int count = checkpoint_steps(options->save, &steps);
    for (int i = 0; i < count && !*found; i++) {
        char path[PATH_LENGTH];
        if (latest >= 0 && steps[i] > latest) { continue; }
        checkpoint_path(path, options->save, steps[i]);
        *found = checkpoint_open(c, path, &why);
        if (!*found) { warn("%s; trying an earlier checkpoint", why.text); }
    }
    free(steps);
    return *found || count == 0 ||
           fail(err,
                "--resume latest: no whole checkpoint under %s; to start afresh, use another "
                "--save or move the damaged ones away",
                options->save);
}

bool checkpoint_list(const char *save, Error *err) {
    int64_t *steps, latest = latest_step(save);
    int count = checkpoint_steps(save, &steps);
    if (count == 0) { return fail(err, "--list-checkpoints: none under %s", save); }
    printf("%10s  %10s  %10s  %-9s %5s  %10s  %-20s  %s\n", "step", "loss", "valid loss",
           "precision", "ranks", "size", "written", "state");
    for (int i = count - 1; i >= 0; i--) {
        char path[PATH_LENGTH], size[32], loss[32], valid_loss[32];
        Checkpoint c;
        Error why;
        checkpoint_path(path, save, steps[i]);
        const char *mark = steps[i] == latest ? ", latest" : "";
        if (checkpoint_open(&c, path, &why)) {
            printf("%10lld  %10s  %10s  %-9s %5d  %10s  %-20s  whole%s\n", (long long)steps[i],
                   format_number(loss, c.progress.loss),
                   format_number(valid_loss, c.progress.valid_loss), c.precision, c.ranks,
                   format_bytes(size, (double)c.bytes), c.created, mark);
            checkpoint_close(&c);
        } else {
            printf("%10lld  damaged%s: %s\n", (long long)steps[i], mark, why.text);
        }
    }
    free(steps);
    return true;
}

// ---- reading into a run -------------------------------------------------------------------------

// Whether models that differ in this option are different models.
static bool is_shape(const char *name, Arch arch) {
    static const char *const shapes[] = {"arch",
                                         "num-layers",
                                         "hidden-size",
                                         "num-attention-heads",
                                         "num-query-groups",
                                         "ffn-hidden-size",
                                         "vocab-size",
                                         "make-vocab-size-divisible-by",
                                         "untie-embeddings-and-output-weights"};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        if (strcmp(name, shapes[i]) == 0) { return true; }
    }
    return arch == ARCH_GPT2 && strcmp(name, "max-position-embeddings") == 0;
}

bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout,
                      Error *err) {
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        const char *name = row->name, *was = text_of(c->options, name);
        char now[OPTION_TEXT];
        option_text(options, row, now);
        bool moves = strcmp(name, "resume") == 0 || strcmp(name, "save") == 0;
        if (moves || row->action || strcmp(was, now) == 0 ||
            !cJSON_HasObjectItem(c->options, name)) {
            continue;
        }
        if (is_shape(name, layout->config.arch)) {
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
        if (from < to) {
            safetensors_read_floats(safetensors_find(&c->optimizer[r->rank], kind),
                                    r->at + from - r->begin, to - from, out + (from - begin));
        }
    }
    return true;
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
    int saved_length = (int)e[AMAX]->shape[1];
    float *saved = malloc_or_die((size_t)saved_length * sizeof(float));
    for (int i = 0; i < n; i++) {
        Fp8Slot *slot = &slots[i];
        float was, target = fp8_slot_target(precision, i);
        int32_t count;
        memcpy(&count, (const char *)e[COUNT]->data + (size_t)i * sizeof(count), sizeof(count));
        safetensors_read_floats(e[SCALE], i, 1, &slot->scale);
        safetensors_read_floats(e[TARGET], i, 1, &was);
        if (was != target) { slot->scale *= target / was; }
        slot->scale_inv = 1.0f / slot->scale;
        slot->count = count > 0 ? count : 0;
        // both histories are rings: entry k is at k % length
        safetensors_read_floats(e[AMAX], (int64_t)i * saved_length, saved_length, saved);
        int known = (int)min64(slot->count, min64(saved_length, length));
        for (int k = slot->count - known; k < slot->count; k++) {
            history[(int64_t)i * length + k % length] = saved[k % saved_length];
        }
    }
    free(saved);
    return true;
}
