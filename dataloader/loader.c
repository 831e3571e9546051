#include "loader.h"
#include "../base/rng.h"

#include <assert.h>
#include <glob.h>
#include <stdlib.h>

// Shards that do not say which tokenizer made them go with any.
static bool check_tokenizer(Dataset *data, const Shard *shard, Error *err) {
    if (shard->tokenizer == 0) { return true; }
    if (data->tokenizer == 0) { data->tokenizer = shard->tokenizer; }
    return shard->tokenizer == data->tokenizer ||
           fail(err,
                "%s: made with another tokenizer than the shards before it (%s first); give those "
                "of one tokenizer",
                shard->path, data->shards[0].path);
}

static bool open_shards(Dataset *data, const glob_t *found, Error *err) {
    data->shards = calloc_or_die(found->gl_pathc, sizeof(Shard));
    data->first = calloc_or_die(found->gl_pathc + 1, sizeof(int64_t));
    for (size_t i = 0; i < found->gl_pathc; i++) {
        if (!shard_open(&data->shards[i], found->gl_pathv[i], err)) { return false; }
        data->num_shards++;
        if (!check_tokenizer(data, &data->shards[i], err)) { return false; }
        data->tokens += data->shards[i].count;
        data->first[i + 1] = data->tokens;
    }
    return true;
}

bool dataset_open(Dataset *data, const char *pattern, int seq_length, int vocab, Error *err) {
    *data = (Dataset){.seq_length = seq_length, .vocab = vocab};
    glob_t found;
    int status = glob(pattern, 0, NULL, &found);
    if (status == GLOB_NOMATCH) {
        return fail(err, "%s: no such file; make shards with ./tokenize", pattern);
    }
    if (status != 0) { return fail(err, "%s: the files cannot be listed", pattern); }
    bool ok = open_shards(data, &found, err);
    globfree(&found);
    data->windows = ok ? (data->tokens - 1) / seq_length : 0;
    if (ok && data->windows == 0) {
        ok = fail(err,
                  "%s: %lld tokens, fewer than one sequence of %d (--seq-length) and its target",
                  pattern, (long long)data->tokens, seq_length);
    }
    if (!ok) { dataset_close(data); }
    return ok;
}

void dataset_close(Dataset *data) {
    for (int i = 0; i < data->num_shards; i++) { shard_close(&data->shards[i]); }
    free(data->shards);
    free(data->first);
    *data = (Dataset){0};
}

// The shard that holds a position of the stream.
static int find_shard(const Dataset *data, int64_t position) {
    int low = 0, high = data->num_shards - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (data->first[middle] <= position) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// out[i] = token begin + i of the stream, whichever shards it lies in.
static bool read_stream(const Dataset *data, int64_t begin, int64_t n, int *out, Error *err) {
    for (int shard = find_shard(data, begin); n > 0; shard++) {
        const Shard *s = &data->shards[shard];
        int64_t at = begin - data->first[shard], part = min64(n, s->count - at);
        shard_read(s, at, part, out);
        for (int64_t i = 0; i < part; i++) {
            if (out[i] >= data->vocab) {
                return fail(err,
                            "%s: token %lld is %d, outside the vocabulary of %d (--vocab-size)",
                            s->path, (long long)(at + i), out[i], data->vocab);
            }
        }
        begin += part;
        out += part;
        n -= part;
    }
    return true;
}

bool dataset_window(const Dataset *data, int64_t window, int *inputs, int *targets, Error *err) {
    assert(window >= 0 && window < data->windows);
    int64_t begin = window * data->seq_length;
    return read_stream(data, begin, data->seq_length, inputs, err) &&
           read_stream(data, begin + 1, data->seq_length, targets, err);
}

int64_t loader_window(const Loader *loader, int64_t sample) {
    int64_t windows = loader->data->windows, epoch = sample / windows, place = sample % windows;
    if (!loader->shuffle) { return place; }
    uint64_t key = rng_bits(loader->seed, (uint64_t)epoch);
    return (int64_t)rng_permute(key, (uint64_t)windows, (uint64_t)place);
}

bool loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                  int *targets, Error *err) {
    int T = loader->data->seq_length;
    for (int i = 0; i < count; i++, sample++, inputs += T, targets += T) {
        if (sample >= end) {
            for (int t = 0; t < T; t++) {
                inputs[t] = 0;
                targets[t] = -1;
            }
        } else if (!dataset_window(loader->data, loader_window(loader, sample), inputs, targets,
                                   err)) {
            return false;
        }
    }
    return true;
}
