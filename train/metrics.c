// metrics.jsonl: one JSON object per line, flushed after each line. A resumed run appends to it.
//
// The "kind" of a record is one of these:
//   run      first, and again at every resume: time, options, versions, device, the precision of
//            each linear layer, the step that the run starts from
//   step     an optimizer step
//   eval     an evaluation
//   choices  the score of a multiple-choice set
//   save     a checkpoint that was saved, or why it was not
//   ranks    with several ranks, every --log-interval steps: how long each rank computes
//   fp8      each tensor's saturation and underflow (--fp8-stats-interval)
//   profile  the time of each kernel family (--profile)
//   end      the end of the run
// After a resume at step N, earlier records of steps after N are void. A line that a crash has cut
// off is removed, and so are the zeros that a power cut leaves. A number that is NaN or infinite is
// null, and the record then has "nonfinite": true.
#include "metrics.h"
#include "run_data.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

void metrics_close(Metrics *m) {
    if (m->file != NULL) { fclose(m->file); }
    m->file = NULL;
}

// Whether the file has records of a trainer, which means that it begins with a "kind" and a comma.
// torn: the first line is incomplete; it must then be the beginning of our record "run".
static bool has_records(FILE *file, bool torn) {
    static const char start[] = "{\"kind\":\"run\",\"program\":\"llm8.c";
    char line[sizeof(start)] = "", kind[16], next;
    if (fseeko(file, 0, SEEK_SET) != 0) { return false; }
    size_t n = fread(line, 1, sizeof(line) - 1, file);
    bool record = sscanf(line, "{\"kind\":\"%15[a-z0-9]\",\"%c", kind, &next) == 2;
    return torn ? strncmp(line, start, n) == 0 : record;
}

// Sets *whole to where the last complete line ends, and *end to the end of the file. Between them
// may lie an incomplete line, which a killed run or a full disk leaves, or zeros, which a power cut
// leaves. *ours: whether a trainer wrote the file. If not, returns false, and the caller must not
// change the file.
static bool find_whole(FILE *file, off_t *whole, off_t *end, bool *ours) {
    *ours = true;
    if (fseeko(file, 0, SEEK_END) != 0) { return false; }
    *end = *whole = ftello(file);
    for (; *whole > 0; --*whole) {
        if (fseeko(file, *whole - 1, SEEK_SET) != 0) { return false; }
        if (fgetc(file) == '\n') { break; }
    }
    *ours = *end == 0 || has_records(file, *whole == 0);
    return *ours && fseeko(file, 0, SEEK_END) == 0;
}

// Replaces the file by a copy of its first `whole` bytes, so that no other folder shares it.
static bool make_own(const char *path, off_t whole) {
    size_t bytes;
    FREED char *text = file_read(path, &bytes);
    if (text == NULL) { return false; }
    bool ok = file_replace(path, text, (size_t)min64((int64_t)bytes, whole));
    if (ok) {
        warn("%s: links share it with another folder; from here on this run writes to a copy",
             path);
    }
    return ok;
}

// Whether the file has the record of a step.
static bool has_steps(FILE *file) {
    static const char start[] = "{\"kind\":\"step\",";
    FREED char *line = NULL;
    size_t size = 0;
    bool found = false;
    rewind(file);
    while (!found && getline(&line, &size, file) >= 0) {
        found = strncmp(line, start, sizeof(start) - 1) == 0;
    }
    return found;
}

bool metrics_open(Metrics *m, const char *path, bool begins) {
    bool ours = true, others = false;
    off_t whole, end;
    struct stat info;
    path_format(m->path, "%s", path);
    m->file = fopen(path, "a+e");
    bool regular = m->file != NULL && fstat(fileno(m->file), &info) == 0 && S_ISREG(info.st_mode);
    // locks the file until it is closed; a file system without locks is no error
    bool taken = regular && file_lock(fileno(m->file), true) == LOCK_HELD;
    if (m->file != NULL && !taken && find_whole(m->file, &whole, &end, &ours) &&
        !(others = begins && regular && has_steps(m->file))) {
        if (regular && info.st_nlink > 1) { // as after cp -al
            metrics_close(m);
            return make_own(path, whole) && metrics_open(m, path, begins);
        }
        m->id = path_id(path);
        if (whole == end || ftruncate(fileno(m->file), whole) == 0) { return true; }
    }
    fail("%s: %s", path,
         taken             ? "another run writes to it; give each run its own"
         : !ours           ? "not metrics: its first line is no record"
         : others          ? "has the steps of another run; continue that run (--resume), give "
                             "another file, or remove this one"
         : errno == ESPIPE ? "a pipe or a terminal; metrics need a file"
                           : strerror(errno));
    metrics_close(m);
    return false;
}

void metrics_sync(const Metrics *m) {
    // EINVAL: a device such as /dev/null
    if (m->file != NULL && fsync(fileno(m->file)) != 0 && errno != EINVAL) {
        warn("%s: %s", m->path, strerror(errno));
    }
}

MetricsRecord *metrics_begin(const char *kind) {
    cJSON *r = cJSON_CreateObject();
    cJSON_AddStringToObject(r, "kind", kind);
    return r;
}

void metrics_number(MetricsRecord *r, const char *name, double value) {
    cJSON_AddNumberToObject(r, name, value); // NaN and infinity are printed as null
    if (!isfinite(value) && !cJSON_HasObjectItem(r, "nonfinite")) {
        cJSON_AddBoolToObject(r, "nonfinite", true);
    }
}

void metrics_numbers(MetricsRecord *r, const char *name, const double *values, int count) {
    cJSON_AddItemToObject(r, name, cJSON_CreateDoubleArray(values, count));
}

void metrics_text(MetricsRecord *r, const char *name, const char *value) {
    cJSON_AddStringToObject(r, name, value);
}

// Records are left out while the file cannot be written or opened again, as on a full disk.
void metrics_end(Metrics *m, MetricsRecord *r) {
    char path[PATH_LENGTH], *line = m->path[0] != '\0' ? cJSON_PrintUnformatted(r) : NULL;
    cJSON_Delete(r);
    if (line == NULL) { return; }
    path_format(path, "%s", m->path);
    bool ok = (m->file != NULL || metrics_open(m, path, false)) &&
              ((fprintf(m->file, "%s\n", line) >= 0 && fflush(m->file) == 0) ||
               fail("%s: could not be written: %s", path, strerror(errno)));
    cJSON_free(line);
    if (!ok && !m->failing) {
        warn("%s; records are missing from here on until it can", error_text());
    }
    if (!ok) { metrics_close(m); } // opening it again removes the incomplete line
    m->failing = !ok;
}

// ---- records with tables ------------------------------------------------------------------------

// Adds "linear_layers": the rows of the precision table.
static void add_precision(MetricsRecord *r, const Precision *precision) {
    FREED PrecisionRow *rows = calloc_or_die((size_t)precision->count, sizeof(PrecisionRow));
    int count = precision_rows(precision, rows);
    cJSON *layers = cJSON_AddArrayToObject(r, "linear_layers");
    for (const PrecisionRow *row = rows; row < rows + count; row++) {
        cJSON *layer = cJSON_CreateObject();
        cJSON_AddStringToObject(layer, "linear", row->linear);
        cJSON_AddNumberToObject(layer, "first_block", row->first);
        cJSON_AddNumberToObject(layer, "blocks", row->blocks);
        cJSON_AddNumberToObject(layer, "outputs", row->outputs);
        cJSON_AddNumberToObject(layer, "inputs", row->inputs);
        cJSON_AddStringToObject(layer, "x", row->type[OPERAND_X]);
        cJSON_AddStringToObject(layer, "w", row->type[OPERAND_W]);
        cJSON_AddStringToObject(layer, "dy", row->type[OPERAND_DY]);
        cJSON_AddStringToObject(layer, "wgrad", row->wgrad);
        cJSON_AddNumberToObject(layer, "flops_share", row->flops_share);
        cJSON_AddStringToObject(layer, "reason", row->reason);
        cJSON_AddItemToArray(layers, layer);
    }
}

// Adds a list of a mixture's sources (name: "sources" or "valid_sources"). Adds nothing if there is
// only one source.
static void add_sources(MetricsRecord *r, const char *name, const Mixture *m) {
    cJSON *list = m->count > 1 ? cJSON_AddArrayToObject(r, name) : NULL;
    for (int i = 0; i < m->count && list != NULL; i++) {
        cJSON *source = cJSON_CreateObject();
        cJSON_AddStringToObject(source, "data", m->sources[i].pattern);
        cJSON_AddNumberToObject(source, "share", blend_share(&m->blend, i));
        cJSON_AddNumberToObject(source, "tokens", (double)m->data[i].tokens);
        cJSON_AddNumberToObject(source, "sequences", (double)m->data[i].windows);
        cJSON_AddItemToArray(list, source);
    }
}

// Adds the tokens and epochs that the run has read of each source, in all its steps so far.
void run_record_sources(const Run *run, MetricsRecord *r) {
    const Mixture *m = &run->train_data;
    if (m->count < 2 || !options_train(&run->options)) { return; }
    cJSON *tokens = cJSON_AddArrayToObject(r, "source_tokens");
    cJSON *epochs = cJSON_AddArrayToObject(r, "source_epochs");
    for (int i = 0; i < m->count; i++) {
        double samples = (double)blend_count(&m->blend, i, run->progress.samples);
        cJSON_AddItemToArray(tokens, cJSON_CreateNumber(samples * run->options.seq_length));
        cJSON_AddItemToArray(epochs, cJSON_CreateNumber(samples / (double)m->data[i].windows));
    }
}

static Run *recorded; // the run whose metrics have a record of its start, and none of its end

static void record_error(const char *error) {
    run_record_end(recorded, EXIT_FAILURE, error);
}

void run_record_start(Run *run) {
    MetricsRecord *r = metrics_begin("run");
    metrics_text(r, "program", "llm8.c " LLM8_VERSION);
    metrics_text(r, "device", run->device);
    metrics_number(r, "time", (double)time(NULL));
    metrics_text(r, "precision", precision_name(&run->precision));
    metrics_number(r, "parameters", (double)run->layout.num_parameters);
    metrics_number(r, "flops_per_token", flops_per_token(&run->config));
    metrics_number(r, "fp8_flops_share", precision_fp8_share(&run->precision));
    if (run->peak_flops > 0) { metrics_number(r, "peak_flops", run->peak_flops); }
    if (run->memory_bytes > 0) { metrics_number(r, "memory_bytes", run->memory_bytes); }
    metrics_number(r, "ranks", run->group.ranks);
    metrics_number(r, "step", (double)run->progress.step);
    metrics_number(r, "data_sequences", (double)run->train_data.windows);
    if (run->train_data.masked) {
        metrics_number(r, "data_targets", (double)run->train_data.targets);
    }
    char sum[9];
    if (run->train_data.windows > 0) {
        metrics_text(r, "data_crc32", identity_sum(run->train_data.identity, sum));
    }
    if (run->valid_data.count > 0) {
        metrics_text(r, "valid_data_crc32", identity_sum(run->valid_data.identity, sum));
        metrics_number(r, "valid_sequences", (double)run_eval_all_samples(run));
    }
    add_sources(r, "sources", &run->train_data);
    add_sources(r, "valid_sources", &run->valid_data);
    if (run->tokenizer.vocab > 0) {
        metrics_number(r, "tokenizer_vocabulary", run->tokenizer.vocab);
    }
    add_precision(r, &run->precision);
    cJSON_AddItemToObject(r, "options", options_json(&run->options));
    cJSON *effects = cJSON_AddObjectToObject(r, "effects");
    EACH_OPTION (row) { metrics_text(effects, row->name, option_effects[row->effect]); }
    metrics_end(&run->metrics, r);
    recorded = run;
    die_with(record_error);
}

void run_record_end(Run *run, int status, const char *error) {
    die_with(NULL);
    MetricsRecord *r = metrics_begin("end");
    metrics_number(r, "step", (double)run->progress.step);
    metrics_number(r, "status", status);
    if (error != NULL) { metrics_text(r, "error", error); }
    if (run->used_bytes > 0) { metrics_number(r, "memory_used_bytes", run->used_bytes); }
    run_record_sources(run, r);
    metrics_end(&run->metrics, r);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Writes a record with every rank's "compute_seconds" and, if the slowest rank is behind, its
// number ("slowest") and "host".
void run_record_ranks(Run *run) {
    typedef struct {
        double seconds;
        char host[64];
    } RankTime;
    const double BEHIND = 1.05; // a rank is behind if it takes more than this times the median
    size_t n = (size_t)run->group.ranks;
    RankTime mine = {.seconds = run->own_seconds};
    FREED RankTime *all = calloc_or_die(n, sizeof(RankTime));
    FREED double *seconds = calloc_or_die(n, sizeof(double));
    FREED double *sorted = calloc_or_die(n, sizeof(double));
    gethostname(mine.host, sizeof(mine.host) - 1);
    group_gather(&run->group, CHANNEL_MAIN, &mine, sizeof(mine), all);
    int slowest = 0;
    for (int r = 0; r < run->group.ranks; r++) {
        seconds[r] = sorted[r] = all[r].seconds / run->own_steps;
        if (seconds[r] > seconds[slowest]) { slowest = r; }
    }
    qsort(sorted, n, sizeof(double), ascending);
    MetricsRecord *r = metrics_begin("ranks");
    metrics_number(r, "step", (double)run->progress.step);
    metrics_numbers(r, "compute_seconds", seconds, run->group.ranks);
    // the slowest rank is compared with the median rank or, of two ranks, with the faster one
    if (seconds[slowest] > BEHIND * sorted[(n - 1) / 2]) {
        metrics_number(r, "slowest", slowest);
        metrics_text(r, "host", all[slowest].host);
    }
    metrics_end(&run->metrics, r);
    run->own_seconds = run->own_steps = 0;
}

// The record has "tensors": {"blocks.0.qkv.x": {"elements", "largest", "zero", "subnormal"}, ...},
// with an entry for each tensor in FP8.
void run_report_fp8(Run *run, const Fp8Counts *counts) {
    MetricsRecord *r = metrics_begin("fp8");
    metrics_number(r, "step", (double)run->progress.step);
    MetricsRecord *tensors = cJSON_AddObjectToObject(r, "tensors");
    for (int i = 0; i < fp8_slot_count(&run->config); i++) {
        char name[64];
        if (counts[i].elements == 0) { continue; }
        MetricsRecord *tensor = cJSON_AddObjectToObject(tensors,
                                                        fp8_slot_name(&run->config, i, name));
        metrics_number(tensor, "elements", (double)counts[i].elements);
        metrics_number(tensor, "largest", (double)counts[i].largest);
        metrics_number(tensor, "zero", (double)counts[i].zero);
        metrics_number(tensor, "subnormal", (double)counts[i].subnormal);
    }
    metrics_end(&run->metrics, r);
}
