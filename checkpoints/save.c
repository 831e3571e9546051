// Writes a checkpoint, in a thread beside the training.
#include "checkpoint.h"
#include "hugging_face.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// ---- files --------------------------------------------------------------------------------------

enum { FILES_OF_RANK_0 = 3 + COMPANIONS }; // at most, besides meta.json and the optimizer file

const char *const scaling_names[] = {"scale", "target", "count", "amax_history"};

static bool write_scaling(const Snapshot *s, const char *folder, FileWriter *w) {
    char path[PATH_LENGTH];
    int n = fp8_slot_count(s->precision->config);
    FREED float *scales = malloc_or_die(2 * (size_t)n * sizeof(float));
    float *targets = scales + n;
    FREED int32_t *counts = malloc_or_die((size_t)n * sizeof(int32_t));
    for (int i = 0; i < n; i++) {
        scales[i] = s->slots[i].scale;
        targets[i] = fp8_slot_target(s->precision, i);
        counts[i] = s->slots[i].count;
    }
    const void *data[SCALING_TENSORS] = {scales, targets, counts, s->amax_history};
    TensorEntry tensors[SCALING_TENSORS];
    for (int i = 0; i < SCALING_TENSORS; i++) {
        Dtype dtype = i == SCALING_COUNT ? DTYPE_I32 : DTYPE_F32;
        int length = i == SCALING_HISTORY ? s->precision->history_length : 0;
        tensors[i] = tensor_entry(scaling_names[i], dtype, n, length, data[i]);
    }
    path_format(path, "%s/" SCALING_FILE, folder);
    return safetensors_write(w, path, tensors, SCALING_TENSORS, NULL);
}

// Writes the files that only rank 0 writes, except meta.json.
static bool write_shared(const Snapshot *s, const char *folder, FileWriter *files, int *count) {
    char path[PATH_LENGTH];
    FREED TensorEntry *tensors = NULL;
    FileWriter *w = files;
    int n = hf_tensors(s->layout, s->model_dtype, s->model, &tensors);
    FREED char *config = hf_config(s->options, s->model_dtype, s->begin_of_text, s->end_of_text,
                                   s->document_end, s->start_config.bytes, s->start_config.size);
    path_format(path, "%s/" MODEL_FILE, folder);
    bool ok = safetensors_write(w++, path, tensors, n, "{\"format\":\"pt\"}");
    path_format(path, "%s/config.json", folder);
    ok = ok && file_write(w++, path, config, strlen(config));
    for (int i = 0; ok && s->companions != NULL && i < COMPANIONS; i++) {
        const Companion *c = &s->companions[i];
        path_format(path, "%s/%s", folder, companion_names[i]);
        ok = c->bytes == NULL || file_write(w++, path, c->bytes, c->size);
    }
    if (ok && s->slots != NULL) { ok = write_scaling(s, folder, w++); }
    *count = (int)(w - files);
    return ok;
}

const char *const state_names[] = {"master",   "exp_avg",       "exp_avg_sq",
                                   "momentum", "exp_avg_scale", "exp_avg_sq_scale"};

static bool write_optimizer(const Snapshot *s, const char *folder, FileWriter *w) {
    char path[PATH_LENGTH];
    TensorEntry tensors[STATE_ARRAYS];
    int count = 0;
    size_t room = 256 + (size_t)s->num_ranges * 48;
    FREED char *metadata = malloc_or_die(room);
    size_t used = (size_t)snprintf(metadata, room, "{\"ranges\":\"");
    for (int i = 0; i < s->num_ranges; i++) {
        const Bucket *r = &s->ranges[i];
        used += (size_t)snprintf(metadata + used, room - used, "%s%lld:%lld", i > 0 ? "," : "",
                                 (long long)r->begin, (long long)r->end);
    }
    for (int i = 0; i < STATE_ARRAYS; i++) {
        const SavedArray *a = &s->state[i];
        if (a->count == 0 && i > STATE_EXP_AVG_SQ) { continue; }
        used += (size_t)snprintf(metadata + used, room - used, "%s%016" PRIx64,
                                 count > 0 ? "," : "\",\"hashes\":\"", a->hash);
        tensors[count++] = tensor_entry(state_names[i], a->dtype, a->count, 0, a->data);
    }
    snprintf(metadata + used, room - used, "\"}");
    path_format(path, "%s/" OPTIMIZER_FILE, folder, s->group->rank, s->group->ranks);
    return safetensors_write(w, path, tensors, count, metadata);
}

static const char *utc_now(char out[32]) {
    time_t now = time(NULL);
    struct tm utc;
    strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    return out;
}

// Returns a number with 17 digits, because cJSON itself prints fewer. NaN and infinity, which JSON
// lacks, become null.
static cJSON *number_of(double value) {
    char digits[40];
    snprintf(digits, sizeof(digits), isfinite(value) ? "%.17g" : "null", value);
    return cJSON_CreateRaw(digits);
}

static void add_number(cJSON *json, const char *name, double value) {
    cJSON_AddItemToObject(json, name, number_of(value));
}

static void add_numbers(cJSON *json, const char *name, const double *values, int n) {
    cJSON *list = cJSON_AddArrayToObject(json, name);
    for (int i = 0; i < n; i++) { cJSON_AddItemToArray(list, number_of(values[i])); }
}

// Writes meta.json, whose own checksum is last.
static bool write_meta(const Snapshot *s, const char *folder, const FileWriter *files, int count) {
    char created[32], digits[16], path[PATH_LENGTH];
    const SpikeWindow *window = &s->progress.window;
    int entries = (int)min64(window->count, SPIKE_WINDOW);
    CLOSED(json_close) cJSON *meta = cJSON_CreateObject();
    cJSON_AddStringToObject(meta, "format", "llm8.c checkpoint");
    cJSON_AddStringToObject(meta, "program", LLM8_VERSION);
    cJSON_AddStringToObject(meta, "created", utc_now(created));
    cJSON_AddStringToObject(meta, "precision", precision_name(s->precision));
    if (s->data != NULL) { cJSON_AddStringToObject(meta, "data", s->data); }
    add_number(meta, "version", CHECKPOINT_VERSION);
#define WRITE(field, name) add_number(meta, name, (double)s->progress.field);
    PROGRESS_FIELDS(WRITE, WRITE)
#undef WRITE
    add_number(meta, "window_count", (double)window->count);
    add_numbers(meta, "window_loss", window->loss, entries);
    add_numbers(meta, "window_norm", window->norm, entries);
    if (s->valid_data != NULL) { cJSON_AddStringToObject(meta, "valid_data", s->valid_data); }
    add_number(meta, "valid_tokens", (double)s->valid_tokens);
    add_number(meta, "ranks", s->group->ranks);
    add_number(meta, "layout_size", (double)s->layout->size);
    cJSON_AddItemToObject(meta, "options", options_json(s->options));
    cJSON_AddItemToObject(meta, "given", options_given(s->options));
    cJSON *list = cJSON_AddArrayToObject(meta, "files");
    for (const FileWriter *w = files; w < files + count; w++) {
        cJSON *file = cJSON_CreateObject();
        snprintf(digits, sizeof(digits), "%08x", w->crc);
        cJSON_AddStringToObject(file, "name", path_name(w->path));
        cJSON_AddNumberToObject(file, "bytes", (double)w->bytes);
        cJSON_AddStringToObject(file, "crc32", digits);
        cJSON_AddItemToArray(list, file);
    }
    cJSON_AddStringToObject(meta, "crc32", "00000000");
    FREED char *text = cJSON_Print(meta);
    meta_seal(text, strlen(text));
    return file_replace(path_format(path, "%s/meta.json", folder), text, strlen(text));
}

// ---- making a checkpoint of the files, and deleting older ones ----------------------------------

#define FRESH_LINK ".tmp-link" // the name of a new link, before it is renamed

// Deletes a checkpoint, complete or not, or a link, whose target stays. known_as: the path that a
// warning names.
static void discard(const char *path, const char *known_as) {
    if (!folder_remove(path)) { warn("%s could not be deleted: %s", known_as, error_text()); }
}

// Renames a checkpoint to the next free NAME.aside-N, so that no run resumes or deletes it.
static bool set_aside(const char *path) {
    char name[PATH_LENGTH];
    int n = 1;
    while (path_exists(path_format(name, "%s.aside-%d", path, n))) { n++; }
    if (rename(path, name) != 0) {
        return fail("%s: could not be set aside: %s; give another --save", path, strerror(errno));
    }
    printf("%s is set aside as %s\n", path, path_name(name));
    return true;
}

// Sets aside every checkpoint from a step on, the newest one last. If this is interrupted, the
// newest checkpoint is still in place.
static bool set_aside_from(const char *save, int64_t step) {
    char path[PATH_LENGTH];
    FREED int64_t *steps = NULL;
    int count = checkpoint_steps(save, &steps);
    bool ok = count >= 0;
    for (int i = count - 1; ok && i >= 0; i--) {
        ok = steps[i] < step || set_aside(checkpoint_path(path, save, steps[i]));
    }
    return ok;
}

// Makes or changes a link in `save`, so that it leads to a target. If the target is "", deletes the
// link. A file or folder with the link's name stays as it is.
static bool link_to(const char *save, const char *name, const char *target) {
    char link[PATH_LENGTH], now[PATH_LENGTH] = "", fresh[PATH_LENGTH];
    path_format(link, "%s/%s", save, name);
    bool there = readlink(link, now, PATH_LENGTH - 1) >= 0;
    if (strcmp(now, target) == 0) { return true; }
    path_format(fresh, "%s/" FRESH_LINK, save);
    unlink(fresh);
    bool ok = target[0] != '\0' ? symlink(target, fresh) == 0 && rename(fresh, link) == 0
                                : !there || unlink(link) == 0;
    return ok || fail("%s: the link could not be written: %s", link, strerror(errno));
}

// Makes the links `latest` and `best`, which are for other programs. Returns the best step.
static int64_t link_steps(const char *save, int64_t newest) {
    static bool warned;
    int64_t best = checkpoint_best(save);
    char path[PATH_LENGTH];
    const char *of_best = best >= 0 ? path_name(checkpoint_path(path, save, best)) : "";
    bool best_leads = best == STEP_UNREADABLE || link_to(save, "best", of_best);
    bool leads = link_to(save, "latest", path_name(checkpoint_path(path, save, newest)));
    if (!(leads && best_leads) && !warned) {
        warn("%s; it is only for other programs: llm8.c goes by the names of the steps",
             error_text());
        warned = true;
    }
    return best;
}

// Makes `path`, in the --save folder, a link to `start`, a checkpoint in another folder.
static bool link_start(const char *path, const char *start) {
    char word[SHELL_WORD];
    FREED char *real = realpath(start, NULL);
    if (real == NULL) { return fail("%s: %s", start, strerror(errno)); }
    if (symlink(real, path) != 0) {
        warn("%s: the link could not be made: %s; until the first save, resume with --resume %s",
             path, strerror(errno), shell_word(word, real));
    }
    return true;
}

bool checkpoint_go_back(const Options *o, const Checkpoint *c) {
    char path[PATH_LENGTH];
    int64_t step = c->progress.step;
    checkpoint_path(path, o->save, step);
    if (!path_is(path, path_id(c->path)) && !link_start(path, c->path)) { return false; }
    bool ok = set_aside_from(o->save, step + 1);
    if (ok && path_exists(path)) { link_steps(o->save, step); }
    return ok;
}

// Reads the folder `fresh` back, verifies it, and gives it its name under --save.
static bool publish(const Snapshot *s, const char *fresh) {
    const char *save = s->options->save;
    char path[PATH_LENGTH];
    Checkpoint c;
    if (!checkpoint_open(&c, fresh, true)) { return false; }
    checkpoint_close(&c);
    checkpoint_path(path, save, s->progress.step);
    if (!set_aside_from(save, s->progress.step) || (path_exists(path) && !set_aside(path))) {
        return false;
    }
    if (rename(fresh, path) != 0) { return fail("%s: %s", path, strerror(errno)); }
    return folder_sync(save);
}

// Deletes all checkpoints except the newest ones (--keep says how many), the best one, and that of
// step progress.last_good. If there is no checkpoint of this step, keeps the newest one before it.
static void prune(const Snapshot *s, int64_t best) {
    const char *save = s->options->save;
    FREED int64_t *steps = NULL;
    int count = best != STEP_UNREADABLE ? checkpoint_steps(save, &steps) : -1;
    int keep = s->options->keep, kept = 0;
    char path[PATH_LENGTH], doomed[PATH_LENGTH];
    bool kept_good = false; // progress.last_good, or the newest before it, is kept
    if (count < 0) { warn("older checkpoints could not be deleted: %s", error_text()); }
    for (int i = 0; keep > 0 && i < count; i++) {
        checkpoint_path(path, save, steps[i]);
        bool good = !kept_good && steps[i] <= s->progress.last_good;
        kept_good = kept_good || good;
        if (steps[i] == best || kept++ < keep || good) { continue; }
        // renamed first, so that an interrupted deletion does not leave a damaged checkpoint
        path_format(doomed, "%s/.old-" STEP_FOLDER, save, (long long)steps[i]);
        if (rename(path, doomed) == 0) {
            discard(doomed, path);
        } else {
            warn("%s could not be deleted: %s", path, strerror(errno));
        }
    }
}

bool checkpoint_save(const Snapshot *s) {
    const Group *group = s->group;
    bool first = group->rank == 0;
    char fresh[PATH_LENGTH];
    int count = 0, ranks = group->ranks;
    FileWriter own;
    FREED FileWriter *files = calloc_or_die((size_t)(FILES_OF_RANK_0 + ranks), sizeof(own));
    path_format(fresh, "%s/.tmp-" STEP_FOLDER, s->options->save, (long long)s->progress.step);
    // mkdir() does not make the --save folder: if this was moved or deleted, the save fails, and
    // the run makes the folder again before the next save
    bool ok = !first || ((!path_exists(fresh) || folder_remove(fresh)) &&
                         (mkdir(fresh, 0777) == 0 ||
                          fail("%s: the folder could not be made: %s", fresh, strerror(errno))));
    ok = group_agree(group, CHANNEL_SAVE, ok);
    if (ok) {
        ok = path_exists(fresh) || fail("%s is not here: " NOT_SHARED, fresh);
        ok = ok && (!first || write_shared(s, fresh, files, &count)) &&
             write_optimizer(s, fresh, &own);
        ok = group_agree(group, CHANNEL_SAVE, ok);
    }
    if (ok) {
        group_gather(group, CHANNEL_SAVE, &own, sizeof(own), files + count);
        ok = !first || (write_meta(s, fresh, files, count + ranks) && publish(s, fresh));
        ok = group_agree(group, CHANNEL_SAVE, ok);
    }
    if (!ok) {
        Error why = error_kept();
        if (first) { folder_remove(fresh); } // frees space on a full disk
        return fail("%s; earlier checkpoints are as they were", why.text);
    }
    if (first) { prune(s, link_steps(s->options->save, s->progress.step)); }
    return true;
}

// ---- one run per folder -------------------------------------------------------------------------

// Waits up to --lock-timeout until no other process holds the lock of `file`, an open .lock. With
// `take`, takes the lock then.
static bool await_lock(const Options *o, int file, bool take) {
    char holder[400];
    double until = wall_seconds() + o->lock_timeout;
    for (bool warned = false;; warned = true) {
        Lock lock = file_lock(file, take);
        if (lock == LOCK_NONE && take) {
            warn("%s/.lock: no lock (%s): a second run could save here, too", o->save,
                 strerror(errno));
        }
        if (lock != LOCK_HELD) { return true; }
        ssize_t length = pread(file, holder, sizeof(holder) - 1, 0);
        holder[max64(0, length)] = '\0';
        if (wall_seconds() >= until) {
            return fail("%s: in use by another run: %s; end that run, or give another --save; if "
                        "its machine is gone, or the folder a copy by links, delete %s/.lock",
                        o->save, holder, o->save);
        }
        if (!warned) {
            warn("--save %s: in use by another run: %s; waiting up to %d s (--lock-timeout)",
                 o->save, holder, o->lock_timeout);
        }
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
}

bool checkpoint_await(const Options *o) {
    char path[PATH_LENGTH];
    int file = open(path_format(path, "%s/.lock", o->save), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    bool ok = file < 0 || await_lock(o, file, false); // checkpoint_claim reports a failed open
    if (file >= 0) { close(file); }
    return ok;
}

// Locks the folder. The kernel or the NFS server keeps the lock until the process ends. The file
// .lock is not closed, because that would release the lock, and is never deleted. Its text says who
// holds the lock.
bool checkpoint_lock(const Options *o) {
    char path[PATH_LENGTH], host[256] = "", since[32];
    path_format(path, "%s/.lock", o->save);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (file < 0) {
        return fail("%s: %s", path,
                    errno == ELOOP ? "a link; delete it, and let metrics.jsonl be no link"
                                   : strerror(errno));
    }
    if (!await_lock(o, file, true)) {
        close(file);
        return false;
    }
    gethostname(host, sizeof(host) - 1);
    if (ftruncate(file, 0) != 0 ||
        dprintf(file, "host %s, pid %d, since %s", host, (int)getpid(), utc_now(since)) < 0 ||
        fsync(file) != 0) {
        warn("%s: %s", path, strerror(errno));
    }
    return true;
}

// Refuses a folder with checkpoints, unless the run resumes one of them.
static bool check_owner(const Options *o, const Checkpoint *start) {
    char path[PATH_LENGTH];
    int64_t newest = checkpoint_newest(o->save), step = start->progress.step;
    bool latest = strcmp(o->resume, "latest") == 0;
    if (newest == STEP_UNREADABLE) { return false; }
    checkpoint_path(path, o->save, step);
    if (latest && o->resumes && strcmp(path_name(start->path), path_name(path)) != 0) {
        return fail("%s: has the checkpoint of step %lld under another name; rename it to %s, or "
                    "remove it",
                    start->path, (long long)step, path_name(path));
    }
    if (latest && newest != (o->resumes ? step : STEP_NONE)) {
        return fail("%s: another run has changed its checkpoints while this one started; start "
                    "again",
                    o->save);
    }
    if (newest == STEP_NONE) { return true; }
    if (o->resume[0] == '\0') {
        return fail("%s: a run has saved there up to step %lld; resume it with --resume latest, or "
                    "give another --save",
                    o->save, (long long)newest);
    }
    bool taken = path_exists(path);
    const char *name = path_name(path);
    return path_is(path, path_id(start->path)) ||
           fail("%s: holds checkpoints of another run than --resume %s; give another --save, or "
                "--load to start a new run from its weights; if it is this run's, %s%s%srename it "
                "to %s",
                o->save, o->resume, taken ? "give " : "", taken ? name : "",
                taken ? " there another name first, and " : "", name);
}

// Refuses a folder inside a checkpoint, which is deleted as a whole when newer ones are saved.
static bool check_outside_checkpoints(const char *save) {
    char path[PATH_LENGTH];
    for (const char *slash = save; (slash = strchr(slash + 1, '/')) != NULL;) {
        path_format(path, "%.*s/meta.json", (int)(slash - save), save);
        if (path_exists(path)) {
            return fail("%s: lies in the checkpoint %.*s; give another", save, (int)(slash - save),
                        save);
        }
    }
    return true;
}

bool checkpoint_claim(const Options *o, const Checkpoint *start) {
    // room for /.tmp-step_9007199254740992/optimizer-4095-of-4096.safetensors
    enum { LONGEST = PATH_LENGTH - 64 };
    char path[PATH_LENGTH];
    FREED char *names = NULL;
    if (strlen(o->save) > LONGEST) {
        return fail("%.40s...: longer than %d characters", o->save, LONGEST);
    }
    path_format(path, "%s/config.json", o->save);
    if (path_exists(path) && checkpoint_newest(o->save) == STEP_NONE) {
        return fail("%s: a model's folder, which --load would refuse with checkpoints in it; give "
                    "another",
                    o->save);
    }
    if (!check_outside_checkpoints(o->save) || !folder_make(o->save) || !checkpoint_lock(o) ||
        !check_owner(o, start) || (names = folder_list(o->save)) == NULL) {
        return false;
    }
    for (const char *name = names; *name != '\0'; name += strlen(name) + 1) {
        path_format(path, "%s/%s", o->save, name);
        bool left = strncmp(name, ".tmp-step_", 10) == 0 || strncmp(name, ".old-step_", 10) == 0;
        if (left) { discard(path, path); }
        if (strcmp(name, FRESH_LINK) == 0) { folder_remove(path); }
    }
    int64_t newest = checkpoint_newest(o->save);
    // the previous run may have ended after a save, but before it made the links
    if (newest >= 0) { link_steps(o->save, newest); }
    return newest != STEP_UNREADABLE;
}

// ---- in the background --------------------------------------------------------------------------

static void *save_in_thread(void *argument) {
    Saver *saver = argument;
    saver->failed = !checkpoint_save(&saver->snapshot);
    saver->why = error_kept();
    __atomic_store_n(&saver->ended, true, __ATOMIC_RELEASE);
    return NULL;
}

void saver_start(Saver *saver, const Snapshot *snapshot) {
    assert(!saver->pending);
    saver->snapshot = *snapshot;
    saver->pending = true;
    saver->ended = false;
    saver->in_thread = pthread_create(&saver->thread, NULL, save_in_thread, saver) == 0;
    if (!saver->in_thread) { save_in_thread(saver); }
}

bool saver_ended(const Saver *saver) {
    return saver->pending && __atomic_load_n(&saver->ended, __ATOMIC_ACQUIRE);
}

bool saver_wait(Saver *saver) {
    if (saver->pending && saver->in_thread) { pthread_join(saver->thread, NULL); }
    saver->pending = false;
    return !saver->failed;
}
