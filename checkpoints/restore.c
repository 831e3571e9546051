// From an open checkpoint back into a run.
#include "checkpoint.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The options that make two models the same model.
static bool is_shape(const char *name, Arch arch) {
    static const char *const shapes[] = {
        "arch",
        "num-layers",
        "hidden-size",
        "num-attention-heads",
        "num-query-groups",
        "ffn-hidden-size",
        "vocab-size",
        "make-vocab-size-divisible-by",
        "untie-embeddings-and-output-weights",
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        if (strcmp(name, shapes[i]) == 0) { return true; }
    }
    return arch == ARCH_GPT2 && strcmp(name, "max-position-embeddings") == 0;
}

static const char *saved_text(const cJSON *options, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(options, name);
    return cJSON_IsString(item) ? item->valuestring : "";
}

bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout,
                      Error *err) {
    cJSON *saved = cJSON_Parse(c->options);
    bool ok = true;
    for (int i = 0; ok && i < option_table_count; i++) {
        const OptionRow *row = &option_table[i];
        const char *name = row->name, *was = saved_text(saved, name);
        char now[OPTION_TEXT];
        option_text(options, row, now);
        bool moves = strcmp(name, "resume") == 0 || strcmp(name, "save") == 0;
        if (moves || row->action || strcmp(was, now) == 0 || !cJSON_HasObjectItem(saved, name)) {
            continue;
        }
        if (is_shape(name, layout->config.arch)) {
            ok = fail(err,
                      "%s: another model's checkpoint: it has --%s %s, this run %s; resume with "
                      "its options",
                      c->path, name, was, now);
        } else {
            printf("  --%s is %s, was %s in the checkpoint\n", name, *now ? now : "not set",
                   *was ? was : "not set");
        }
    }
    cJSON_Delete(saved);
    if (ok && c->layout_size != layout->size) {
        return fail(err, "%s: %lld elements of parameter space, this run has %lld", c->path,
                    (long long)c->layout_size, (long long)layout->size);
    }
    return ok;
}

// Copies what one rank's file holds of begin..end; returns how many elements that was.
static int64_t read_part(const OptimizerFile *f, const char *kind, int64_t begin, int64_t end,
                         float *out) {
    const TensorEntry *e = safetensors_find(&f->file, kind);
    int64_t at = 0, copied = 0;
    for (int i = 0; i < f->num_ranges; i++) {
        Bucket range = f->ranges[i];
        int64_t from = max64(begin, range.begin), to = min64(end, range.end);
        if (from < to) {
            safetensors_read_floats(&f->file, e, at + from - range.begin, to - from,
                                    out + (from - begin));
            copied += to - from;
        }
        at += range.end - range.begin;
    }
    return copied;
}

bool checkpoint_read(const Checkpoint *c, const char *kind, int64_t begin, int64_t end, float *out,
                     Error *err) {
    int64_t copied = 0;
    for (int r = 0; r < c->ranks && copied < end - begin; r++) {
        copied += read_part(&c->optimizer[r], kind, begin, end, out);
    }
    if (copied != end - begin) {
        return fail(err, "%s: elements %lld to %lld of '%s' are not all in its files", c->path,
                    (long long)begin, (long long)end, kind);
    }
    return true;
}

// The newest `length` entries of a ring that has had `count` put into it, into another ring.
static void copy_ring(float *to, int to_length, const float *from, int from_length, int count) {
    int known = (int)min64(count, min64(from_length, to_length));
    for (int i = count - known; i < count; i++) { to[i % to_length] = from[i % from_length]; }
}

static bool has_shape(const TensorEntry *e, Dtype dtype, int dims, int64_t rows) {
    return e != NULL && e->dtype == dtype && e->dims == dims && e->shape[0] == rows;
}

bool checkpoint_read_scaling(const Checkpoint *c, const Precision *precision, Fp8Slot *slots,
                             float *history, Error *err) {
    int n = fp8_slot_count(precision->config);
    const SafeTensors *st = &c->scaling;
    if (st->count == 0 || precision->recipe != FP8_RECIPE_DELAYED) { return true; }
    const TensorEntry *scale = safetensors_find(st, "scale"),
                      *target = safetensors_find(st, "target");
    const TensorEntry *count = safetensors_find(st, "count");
    const TensorEntry *amax = safetensors_find(st, "amax_history");
    if (!has_shape(scale, DTYPE_F32, 1, n) || !has_shape(target, DTYPE_F32, 1, n) ||
        !has_shape(count, DTYPE_I32, 1, n) || !has_shape(amax, DTYPE_F32, 2, n) ||
        amax->shape[1] < 1 || amax->shape[1] > INT32_MAX) {
        return fail(err, "%s: not the scaling state of %d tensors", st->path, n);
    }
    int length = (int)amax->shape[1];
    float *ring = malloc_or_die((size_t)length * sizeof(float));
    for (int i = 0; i < n; i++) {
        Fp8Slot *slot = &slots[i];
        float aimed_at, aims_at = fp8_slot_target(precision, i);
        int32_t updates;
        memcpy(&updates, st->data + count->begin + (int64_t)i * 4, sizeof(updates));
        safetensors_read_floats(st, scale, i, 1, &slot->scale);
        safetensors_read_floats(st, target, i, 1, &aimed_at);
        safetensors_read_floats(st, amax, (int64_t)i * length, length, ring);
        if (aimed_at != aims_at) { slot->scale *= aims_at / aimed_at; }
        slot->scale_inv = 1.0f / slot->scale;
        slot->count = updates > 0 ? updates : 0;
        copy_ring(history + (int64_t)i * precision->history_length, precision->history_length, ring,
                  length, slot->count);
    }
    free(ring);
    return true;
}
