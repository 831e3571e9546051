// Writing a checkpoint, in a thread beside the training.
#define _GNU_SOURCE // renameat2

#include "checkpoint.h"
#include "hugging_face.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

// A finished file, as meta.json lists it.
typedef struct {
    char name[64];
    int64_t bytes;
    uint32_t crc;
} FileEntry;

static void list_file(cJSON *files, const FileEntry *f) {
    char digits[16];
    snprintf(digits, sizeof(digits), "%08x", f->crc);
    cJSON *entry = cJSON_CreateObject();
    cJSON_AddStringToObject(entry, "name", f->name);
    cJSON_AddNumberToObject(entry, "bytes", (double)f->bytes);
    cJSON_AddStringToObject(entry, "crc32", digits);
    cJSON_AddItemToArray(files, entry);
}

static bool close_file(FileWriter *w, cJSON *files, const char *name, Error *err) {
    FileEntry entry = {.bytes = w->bytes, .crc = w->crc};
    snprintf(entry.name, sizeof(entry.name), "%s", name);
    if (!writer_close(w, err)) { return false; }
    list_file(files, &entry);
    return true;
}

static bool write_model(const Snapshot *s, const char *folder, cJSON *files, Error *err) {
    char path[PATH_LENGTH];
    SafeTensorsWriter w = {0};
    path_format(path, "%s/model.safetensors", folder);
    hf_declare(&w, s->layout, s->model_dtype);
    bool ok = safetensors_begin(&w, path, "{\"format\":\"pt\"}", err);
    if (ok) {
        hf_write(&w, s->layout, s->model_dtype, s->model);
        ok = close_file(&w.file, files, "model.safetensors", err);
    }
    safetensors_free(&w);
    if (!ok) { return false; }

    FileWriter file;
    path_format(path, "%s/config.json", folder);
    if (!writer_open(&file, path, err)) { return false; }
    char *config = hf_config(&s->layout->config, s->model_dtype, s->end_of_text);
    writer_write(&file, config, strlen(config));
    free(config);
    return close_file(&file, files, "config.json", err);
}

static bool write_tokenizer(const Snapshot *s, const char *folder, cJSON *files, Error *err) {
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
    bool ok = true;
    for (int i = 0; ok && s->tokenizer_folder != NULL && i < 2; i++) {
        char path[PATH_LENGTH];
        FileWriter w;
        MappedFile source;
        path_format(path, "%s/%s", s->tokenizer_folder, names[i]);
        if (!path_exists(path)) { continue; }
        if (!file_map(&source, path, err)) { return false; }
        path_format(path, "%s/%s", folder, names[i]);
        ok = writer_open(&w, path, err);
        if (ok) {
            writer_write(&w, source.data, source.bytes);
            ok = close_file(&w, files, names[i], err);
        }
        file_unmap(&source);
    }
    return ok;
}

// {"ranges": "begin:end,..."}; to be freed.
static char *ranges_metadata(const Snapshot *s) {
    size_t room = 64 + (size_t)s->num_ranges * 48, used;
    char *text = malloc_or_die(room);
    used = (size_t)snprintf(text, room, "{\"ranges\":\"");
    for (int i = 0; i < s->num_ranges; i++) {
        used += (size_t)snprintf(text + used, room - used, "%s%lld:%lld", i > 0 ? "," : "",
                                 (long long)s->ranges[i].begin, (long long)s->ranges[i].end);
    }
    snprintf(text + used, room - used, "\"}");
    return text;
}

static bool write_optimizer(const Snapshot *s, const char *folder, FileEntry *f, Error *err) {
    char path[PATH_LENGTH];
    int64_t elements = 0;
    for (int i = 0; i < s->num_ranges; i++) { elements += s->ranges[i].end - s->ranges[i].begin; }
    snprintf(f->name, sizeof(f->name), "optimizer-%d-of-%d.safetensors", s->rank, s->ranks);
    path_format(path, "%s/%s", folder, f->name);
    SafeTensorsWriter w = {0};
    safetensors_declare(&w, "master", DTYPE_F32, 1, &elements);
    safetensors_declare(&w, "exp_avg", s->moment_dtype, 1, &elements);
    safetensors_declare(&w, "exp_avg_sq", s->moment_dtype, 1, &elements);
    char *metadata = ranges_metadata(s);
    bool ok = safetensors_begin(&w, path, metadata, err);
    free(metadata);
    if (ok) {
        size_t moment_bytes = (size_t)elements * (size_t)dtype_bytes(s->moment_dtype);
        writer_write(&w.file, s->master, (size_t)elements * sizeof(float));
        writer_write(&w.file, s->exp_avg, moment_bytes);
        writer_write(&w.file, s->exp_avg_sq, moment_bytes);
        f->bytes = w.file.bytes;
        f->crc = w.file.crc;
        ok = writer_close(&w.file, err);
    }
    safetensors_free(&w);
    return ok;
}

static bool write_scaling(const Snapshot *s, const char *folder, cJSON *files, Error *err) {
    char path[PATH_LENGTH];
    int64_t slots = fp8_slot_count(s->precision->config);
    int64_t history[2] = {slots, s->precision->history_length};
    path_format(path, "%s/scaling.safetensors", folder);
    SafeTensorsWriter w = {0};
    safetensors_declare(&w, "scale", DTYPE_F32, 1, &slots);
    safetensors_declare(&w, "target", DTYPE_F32, 1, &slots);
    safetensors_declare(&w, "count", DTYPE_I32, 1, &slots);
    safetensors_declare(&w, "amax_history", DTYPE_F32, 2, history);
    bool ok = safetensors_begin(&w, path, NULL, err);
    if (ok) {
        for (int64_t i = 0; i < slots; i++) {
            writer_write(&w.file, &s->slots[i].scale, sizeof(float));
        }
        for (int i = 0; i < slots; i++) {
            float target = fp8_slot_target(s->precision, i);
            writer_write(&w.file, &target, sizeof(target));
        }
        for (int64_t i = 0; i < slots; i++) {
            int32_t count = s->slots[i].count;
            writer_write(&w.file, &count, sizeof(count));
        }
        writer_write(&w.file, s->amax_history, (size_t)(history[0] * history[1]) * sizeof(float));
        ok = close_file(&w.file, files, "scaling.safetensors", err);
    }
    safetensors_free(&w);
    return ok;
}

static cJSON *options_json(const Options *options) {
    cJSON *json = cJSON_CreateObject();
    char value[OPTION_TEXT];
    for (int i = 0; i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        cJSON_AddStringToObject(json, row->name, option_text(options, row, value));
    }
    return json;
}

// Exactly, which cJSON's own numbers are not; NaN, which JSON has not, as null.
static void add_number(cJSON *json, const char *name, double value) {
    char digits[40];
    snprintf(digits, sizeof(digits), isfinite(value) ? "%.17g" : "null", value);
    cJSON_AddRawToObject(json, name, digits);
}

// The text of meta.json, with its own checksum in it; to be freed.
static char *meta_text(const Snapshot *s, cJSON *files) {
    const Progress *p = &s->progress;
    char created[32];
    time_t now = time(NULL);
    struct tm utc;
    strftime(created, sizeof(created), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    cJSON *meta = cJSON_CreateObject();
    cJSON_AddStringToObject(meta, "format", "llm8.c checkpoint");
    add_number(meta, "version", 1);
    cJSON_AddStringToObject(meta, "program", LLM8_VERSION);
    cJSON_AddStringToObject(meta, "created", created);
    add_number(meta, "step", (double)p->step);
    add_number(meta, "samples", (double)p->samples);
    add_number(meta, "tokens", (double)p->tokens);
    add_number(meta, "skipped", (double)p->skipped);
    add_number(meta, "skipped_in_row", p->skipped_in_row);
    add_number(meta, "loss", p->loss);
    add_number(meta, "valid_loss", p->valid_loss);
    add_number(meta, "best_valid_loss", p->best_valid_loss);
    add_number(meta, "ranks", s->ranks);
    cJSON_AddStringToObject(meta, "precision", precision_name(s->precision));
    add_number(meta, "layout_size", (double)s->layout->size);
    add_number(meta, "data_windows", (double)s->data_windows);
    cJSON_AddItemToObject(meta, "options", options_json(s->options));
    cJSON_AddItemReferenceToObject(meta, "files", files);
    cJSON_AddStringToObject(meta, "crc32", "00000000");
    char *text = cJSON_Print(meta), digits[16];
    cJSON_Delete(meta);
    size_t length = strlen(text), at = length - strlen("00000000\"\n}");
    snprintf(digits, sizeof(digits), "%08x", (unsigned)crc32(0, (const Bytef *)text, (uInt)length));
    memcpy(text + at, digits, 8);
    return text;
}

static bool write_meta(const Snapshot *s, const char *folder, cJSON *files, Error *err) {
    char path[PATH_LENGTH], *text = meta_text(s, files);
    path_format(path, "%s/meta.json", folder);
    bool ok = file_replace(path, text, strlen(text), err) && folder_sync(folder, err);
    free(text);
    return ok;
}

// All files but meta.json, which lists them; the same answer on every rank.
static bool write_files(const Snapshot *s, const char *folder, cJSON *files, Error *err) {
    bool first = s->rank == 0;
    FileEntry own = {0}, *all = calloc_or_die((size_t)s->ranks, sizeof(FileEntry));
    bool ok = (!first ||
               (write_model(s, folder, files, err) && write_tokenizer(s, folder, files, err))) &&
              write_optimizer(s, folder, &own, err);
    if (ok) { list_file(files, &own); }
    ok = ok && (!first || s->slots == NULL || write_scaling(s, folder, files, err));
    ok = group_agree(s->group, CHANNEL_SAVE, ok, err);
    if (ok) { group_gather(s->group, CHANNEL_SAVE, &own, sizeof(own), all); }
    for (int r = 1; ok && first && r < s->ranks; r++) { list_file(files, &all[r]); }
    free(all);
    return ok;
}

void checkpoint_path(char path[PATH_LENGTH], const char *save, int64_t step) {
    path_format(path, "%s/step_%08lld", save, (long long)step);
}

// Gives the folder `fresh` the name `path`. One of that name (a run that went back and came here
// again) is swapped away first, so that a whole checkpoint bears the name at every moment.
static bool publish(const char *fresh, const char *path, Error *err) {
    bool swapped = renameat2(AT_FDCWD, fresh, AT_FDCWD, path, RENAME_EXCHANGE) == 0;
    if (swapped) { return folder_remove(fresh, err); }
    if (errno != ENOENT && path_exists(path) && !folder_remove(path, err)) { return false; }
    return rename(fresh, path) == 0 || fail(err, "%s: %s", path, strerror(errno));
}

static int compare_steps(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : (x > y ? -1 : 0);
}

int checkpoint_steps(const char *save, int64_t **steps) {
    int count = 0, room = 16;
    *steps = malloc_or_die((size_t)room * sizeof(int64_t));
    DIR *folder = opendir(save);
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        long long step;
        int length;
        if (sscanf(entry->d_name, "step_%lld%n", &step, &length) != 1 || step < 0 ||
            entry->d_name[length] != '\0') {
            continue;
        }
        if (count == room) {
            room *= 2;
            *steps = realloc_or_die(*steps, (size_t)room * sizeof(int64_t));
        }
        (*steps)[count++] = step;
    }
    if (folder != NULL) { closedir(folder); }
    qsort(*steps, (size_t)count, sizeof(int64_t), compare_steps);
    return count;
}

// Renamed first, so that a deletion cut short is not taken for a damaged checkpoint.
static bool delete_checkpoint(const char *save, int64_t step, Error *err) {
    char path[PATH_LENGTH], doomed[PATH_LENGTH];
    checkpoint_path(path, save, step);
    path_format(doomed, "%s/.old-step_%08lld", save, (long long)step);
    if (rename(path, doomed) != 0) { return fail(err, "%s: %s", path, strerror(errno)); }
    return folder_remove(doomed, err);
}

static bool prune(const Snapshot *s, Error *err) {
    const char *save = s->options->save;
    int64_t *steps;
    int count = checkpoint_steps(save, &steps), keep = s->options->keep;
    char link[PATH_LENGTH], best[PATH_LENGTH] = "";
    path_format(link, "%s/best", save);
    ssize_t length = readlink(link, best, sizeof(best) - 1);
    best[length > 0 ? length : 0] = '\0';
    bool ok = true;
    for (int i = 0, kept = 0; keep > 0 && ok && i < count; i++) {
        char name[PATH_LENGTH];
        path_format(name, "step_%08lld", (long long)steps[i]);
        if (steps[i] > s->progress.step || strcmp(name, best) == 0) { continue; }
        if (kept++ >= keep) { ok = delete_checkpoint(save, steps[i], err); }
    }
    free(steps);
    return ok;
}

static bool verify(const char *path, Error *err) {
    Checkpoint c;
    if (!checkpoint_open(&c, path, err)) { return false; }
    checkpoint_close(&c);
    return true;
}

// Rank 0: makes the folder valid, and gives it its name.
static bool publish_step(const Snapshot *s, const char *fresh, cJSON *files, Error *err) {
    const char *save = s->options->save;
    char path[PATH_LENGTH], link[PATH_LENGTH];
    checkpoint_path(path, save, s->progress.step);
    if (!write_meta(s, fresh, files, err) || !publish(fresh, path, err) ||
        !folder_sync(save, err) || !verify(path, err)) {
        return false;
    }
    const char *name = strrchr(path, '/') + 1;
    path_format(link, "%s/latest", save);
    if (!link_replace(link, name, err)) { return false; }
    path_format(link, "%s/best", save);
    return !s->best || link_replace(link, name, err);
}

static bool write_and_publish(const Snapshot *s, Error *err) {
    bool first = s->rank == 0;
    char fresh[PATH_LENGTH];
    path_format(fresh, "%s/.tmp-step_%08lld", s->options->save, (long long)s->progress.step);
    bool ok = !first ||
              ((!path_exists(fresh) || folder_remove(fresh, err)) && folder_make(fresh, err));
    if (!group_agree(s->group, CHANNEL_SAVE, ok, err)) { return false; }
    cJSON *files = cJSON_CreateArray();
    if (write_files(s, fresh, files, err)) {
        ok = group_agree(s->group, CHANNEL_SAVE, !first || publish_step(s, fresh, files, err), err);
    } else {
        ok = false;
    }
    if (!ok && first) { folder_remove(fresh, NULL); } // gives a full disk its room back
    cJSON_Delete(files);
    return ok;
}

bool checkpoint_save(const Snapshot *s, Error *err) {
    Error why;
    if (!write_and_publish(s, &why)) {
        return fail(err, "%s; earlier checkpoints are as they were", why.text);
    }
    bool ok = s->rank > 0 || prune(s, &why);
    return group_agree(s->group, CHANNEL_SAVE, ok, &why) ||
           fail(err, "it is saved, but an older one could not be deleted: %s", why.text);
}

bool checkpoint_sweep(const char *save, Error *err) {
    DIR *folder = opendir(save);
    bool ok = true;
    for (struct dirent *entry; ok && folder != NULL && (entry = readdir(folder)) != NULL;) {
        char path[PATH_LENGTH];
        path_format(path, "%s/%s", save, entry->d_name);
        if (strncmp(entry->d_name, ".tmp-step_", 10) == 0 ||
            strncmp(entry->d_name, ".old-step_", 10) == 0) {
            ok = folder_remove(path, err);
        }
    }
    if (folder != NULL) { closedir(folder); }
    return ok;
}

static void *save_in_thread(void *argument) {
    Saver *saver = argument;
    double begin = wall_seconds();
    saver->ok = checkpoint_save(&saver->snapshot, &saver->err);
    saver->seconds = wall_seconds() - begin;
    return NULL;
}

void saver_start(Saver *saver, const Snapshot *snapshot) {
    saver_wait(saver);
    saver->snapshot = *snapshot;
    saver->pending = true;
    saver->in_thread = pthread_create(&saver->thread, NULL, save_in_thread, saver) == 0;
    if (!saver->in_thread) { save_in_thread(saver); }
}

bool saver_wait(Saver *saver) {
    if (!saver->pending) { return true; }
    if (saver->in_thread) { pthread_join(saver->thread, NULL); }
    saver->pending = false;
    if (!saver->ok && saver->snapshot.rank == 0) {
        warn("saving the checkpoint of step %lld failed: %s",
             (long long)saver->snapshot.progress.step, saver->err.text);
    }
    return saver->ok;
}
