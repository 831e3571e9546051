// Finding, checking and opening a checkpoint.
#include "checkpoint.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

enum { META_MAX = 16 << 20 };

// Checks meta.json's checksum of itself, and parses it.
static cJSON *parse_meta(const char *path, Error *err) {
    MappedFile file;
    if (!file_map(&file, path, err)) { return NULL; }
    static const char tail[] = "00000000\"\n}";
    size_t tail_bytes = sizeof(tail) - 1;
    cJSON *meta = NULL;
    if (file.bytes > tail_bytes && file.bytes < META_MAX) {
        char *text = malloc_or_die(file.bytes), stored[9] = "";
        memcpy(text, file.data, file.bytes);
        char *digits = text + file.bytes - tail_bytes;
        memcpy(stored, digits, 8);
        memcpy(digits, tail, 8);
        char computed[16];
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

static double meta_number(const cJSON *meta, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(meta, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

static int64_t meta_count(const cJSON *meta, const char *name) {
    double value = meta_number(meta, name);
    return value >= 0 && value <= 0x1p53 ? (int64_t)value : -1;
}

static const char *meta_text(const cJSON *meta, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(meta, name);
    return cJSON_IsString(item) ? item->valuestring : "";
}

static bool read_meta(Checkpoint *c, const cJSON *meta, Error *err) {
    if (strcmp(meta_text(meta, "format"), "llm8.c checkpoint") != 0) {
        return fail(err, "%s/meta.json: not an llm8.c checkpoint", c->path);
    }
    if (meta_number(meta, "version") != 1) {
        return fail(err, "%s/meta.json: checkpoint version %g; this program reads 1", c->path,
                    meta_number(meta, "version"));
    }
    int64_t skipped_in_row = meta_count(meta, "skipped_in_row"), ranks = meta_count(meta, "ranks");
    c->progress = (Progress){
        .step = meta_count(meta, "step"),
        .samples = meta_count(meta, "samples"),
        .tokens = meta_count(meta, "tokens"),
        .skipped = meta_count(meta, "skipped"),
        .skipped_in_row = (int)skipped_in_row,
        .loss = meta_number(meta, "loss"),
        .valid_loss = meta_number(meta, "valid_loss"),
        .best_valid_loss = meta_number(meta, "best_valid_loss"),
    };
    c->data_windows = meta_count(meta, "data_windows");
    c->layout_size = meta_count(meta, "layout_size");
    c->ranks = (int)ranks;
    const Progress *p = &c->progress;
    if (p->step < 0 || p->samples < 0 || p->tokens < 0 || p->skipped < 0 || skipped_in_row < 0 ||
        skipped_in_row > INT32_MAX || ranks < 1 || ranks > RANKS_MAX || c->layout_size < 0) {
        return fail(err, "%s/meta.json: a number is missing or out of range", c->path);
    }
    snprintf(c->precision, sizeof(c->precision), "%s", meta_text(meta, "precision"));
    snprintf(c->created, sizeof(c->created), "%s", meta_text(meta, "created"));
    const cJSON *options = cJSON_GetObjectItemCaseSensitive(meta, "options");
    if (!cJSON_IsObject(options)) { return fail(err, "%s/meta.json: no options", c->path); }
    c->options = cJSON_PrintUnformatted(options);
    return true;
}

static bool check_files(Checkpoint *c, const cJSON *meta, Error *err) {
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(meta, "files"), *file;
    if (!cJSON_IsArray(files)) { return fail(err, "%s/meta.json: no list of files", c->path); }
    cJSON_ArrayForEach(file, files) {
        enum { NAME_MAX_LENGTH = 100 };
        const char *name = meta_text(file, "name");
        char path[PATH_LENGTH], crc[16];
        int64_t bytes;
        uint32_t sum;
        if (name[0] == '\0' || strlen(name) > NAME_MAX_LENGTH || strchr(name, '/') != NULL) {
            return fail(err, "%s/meta.json: a file named '%.80s'", c->path, name);
        }
        path_format(path, "%s/%s", c->path, name);
        if (!file_checksum(path, &bytes, &sum, err)) { return false; }
        snprintf(crc, sizeof(crc), "%08x", sum);
        if (bytes != meta_count(file, "bytes")) {
            return fail(err, "%s: damaged: %lld bytes, not %lld", path, (long long)bytes,
                        (long long)meta_count(file, "bytes"));
        }
        if (strcmp(crc, meta_text(file, "crc32")) != 0) {
            return fail(err, "%s: damaged: its checksum is %s, not %s", path, crc,
                        meta_text(file, "crc32"));
        }
        c->bytes += bytes;
    }
    return true;
}

static bool check_flat(const SafeTensors *st, const char *kind, int64_t elements, Error *err) {
    const TensorEntry *e = safetensors_find(st, kind);
    if (e == NULL || e->dims != 1 || e->shape[0] != elements || e->dtype > DTYPE_F16) {
        return fail(err, "%s: '%s' is missing or not %lld floating-point numbers", st->path, kind,
                    (long long)elements);
    }
    return true;
}

// Reads "begin:end,begin:end" into f->ranges; returns how many elements they are, -1 on nonsense.
static int64_t parse_ranges(OptimizerFile *f, const char *text, int64_t size) {
    int64_t elements = 0;
    size_t most = strlen(text) / 4 + 1;
    f->ranges = calloc_or_die(most, sizeof(Bucket));
    while (*text != '\0') {
        long long begin, end;
        int length;
        if (sscanf(text, "%lld:%lld%n", &begin, &end, &length) != 2) { return -1; }
        if (begin < 0 || end < begin || end > size || elements > size) { return -1; }
        f->ranges[f->num_ranges++] = (Bucket){begin, end};
        elements += end - begin;
        text += length;
        if (*text == ',') { text++; }
    }
    return elements;
}

static bool open_optimizer_file(OptimizerFile *f, const char *path, int64_t size, Error *err) {
    if (!safetensors_open(&f->file, path, err)) { return false; }
    cJSON *metadata = f->file.metadata != NULL ? cJSON_Parse(f->file.metadata) : NULL;
    int64_t elements = parse_ranges(f, meta_text(metadata, "ranges"), size);
    cJSON_Delete(metadata);
    if (elements < 0) { return fail(err, "%s: its list of ranges is wrong", path); }
    return check_flat(&f->file, "master", elements, err) &&
           check_flat(&f->file, "exp_avg", elements, err) &&
           check_flat(&f->file, "exp_avg_sq", elements, err);
}

static int compare_ranges(const void *a, const void *b) {
    const Bucket *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

// The ranges of all ranks together must be the parameter space, every element once.
static bool check_cover(const Checkpoint *c, Error *err) {
    size_t count = 0;
    Bucket *all = malloc_or_die(sizeof(Bucket));
    for (int r = 0; r < c->ranks; r++) {
        const OptimizerFile *f = &c->optimizer[r];
        all = realloc_or_die(all, (count + (size_t)f->num_ranges) * sizeof(Bucket));
        for (int i = 0; i < f->num_ranges; i++) {
            if (f->ranges[i].begin < f->ranges[i].end) { all[count++] = f->ranges[i]; }
        }
    }
    qsort(all, count, sizeof(Bucket), compare_ranges);
    int64_t covered = 0;
    size_t used = 0;
    while (used < count && all[used].begin == covered) { covered = all[used++].end; }
    free(all);
    return (used == count && covered == c->layout_size) ||
           fail(err, "%s: its optimizer files do not hold element %lld of %lld exactly once",
                c->path, (long long)covered, (long long)c->layout_size);
}

static bool open_optimizer(Checkpoint *c, Error *err) {
    c->optimizer = calloc_or_die((size_t)c->ranks, sizeof(OptimizerFile));
    for (int r = 0; r < c->ranks; r++) {
        char path[PATH_LENGTH];
        path_format(path, "%s/optimizer-%d-of-%d.safetensors", c->path, r, c->ranks);
        if (!open_optimizer_file(&c->optimizer[r], path, c->layout_size, err)) { return false; }
    }
    return check_cover(c, err);
}

static bool open_files(Checkpoint *c, bool check, Error *err) {
    char path[PATH_LENGTH];
    path_format(path, "%s/meta.json", c->path);
    if (!path_exists(c->path)) { return fail(err, "%s: no such checkpoint", c->path); }
    cJSON *meta = parse_meta(path, err);
    bool ok = meta != NULL && read_meta(c, meta, err) && (!check || check_files(c, meta, err));
    cJSON_Delete(meta);
    if (!ok || !open_optimizer(c, err)) { return false; }
    path_format(path, "%s/model.safetensors", c->path);
    if (!safetensors_open(&c->model, path, err)) { return false; }
    path_format(path, "%s/scaling.safetensors", c->path);
    return !path_exists(path) || safetensors_open(&c->scaling, path, err);
}

static bool open_checkpoint(Checkpoint *c, const char *path, bool check, Error *err) {
    *c = (Checkpoint){0};
    path_format(c->path, "%s", path);
    if (open_files(c, check, err)) { return true; }
    checkpoint_close(c);
    return false;
}

bool checkpoint_open(Checkpoint *c, const char *path, Error *err) {
    return open_checkpoint(c, path, true, err);
}

bool checkpoint_open_checked(Checkpoint *c, const char *path, Error *err) {
    return open_checkpoint(c, path, false, err);
}

void checkpoint_close(Checkpoint *c) {
    for (int r = 0; c->optimizer != NULL && r < c->ranks; r++) {
        safetensors_close(&c->optimizer[r].file);
        free(c->optimizer[r].ranges);
    }
    free(c->optimizer);
    safetensors_close(&c->model);
    safetensors_close(&c->scaling);
    cJSON_free(c->options);
    *c = (Checkpoint){0};
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
    *found = false;
    if (strcmp(options->resume, "latest") != 0) {
        Error why;
        *found = checkpoint_open(c, options->resume, &why);
        return *found ||
               fail(err, "--resume %s; --list-checkpoints shows which are whole", why.text);
    }
    int64_t *steps, latest = latest_step(options->save);
    int count = checkpoint_steps(options->save, &steps);
    for (int i = 0; i < count && !*found; i++) {
        char path[PATH_LENGTH];
        Error why;
        if (latest >= 0 && steps[i] > latest) { continue; }
        checkpoint_path(path, options->save, steps[i]);
        *found = checkpoint_open(c, path, &why);
        if (!*found) { warn("%s; trying an earlier checkpoint", why.text); }
    }
    free(steps);
    if (!*found && count > 0) {
        return fail(err,
                    "--resume latest: no whole checkpoint under %s; to start afresh, use another "
                    "--save or move the damaged ones away",
                    options->save);
    }
    return true;
}

bool checkpoint_list(const char *save, Error *err) {
    int64_t *steps, latest = latest_step(save);
    int count = checkpoint_steps(save, &steps);
    if (count == 0) {
        free(steps);
        return fail(err, "--list-checkpoints: none under %s", save);
    }
    printf("%10s  %10s  %10s  %-9s %5s  %10s  %-20s  %s\n", "step", "loss", "valid loss",
           "precision", "ranks", "size", "written", "state");
    for (int i = count - 1; i >= 0; i--) {
        char path[PATH_LENGTH], size[32];
        Checkpoint c;
        Error why;
        checkpoint_path(path, save, steps[i]);
        const char *mark = steps[i] == latest ? ", latest" : "";
        if (checkpoint_open(&c, path, &why)) {
            printf("%10lld  %10.4f  %10.4f  %-9s %5d  %10s  %-20s  whole%s\n", (long long)steps[i],
                   c.progress.loss, c.progress.valid_loss, c.precision, c.ranks,
                   format_bytes(size, (double)c.bytes), c.created, mark);
            checkpoint_close(&c);
        } else {
            printf("%10lld  damaged%s: %s\n", (long long)steps[i], mark, why.text);
        }
    }
    free(steps);
    return true;
}
