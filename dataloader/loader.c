#include "loader.h"
#include "../base/rng.h"

#include <assert.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>

static bool read_header(TokenFile *f, int32_t magic, const char *kind, const char *remedy,
                        Error *err) {
    if (f->file.bytes < SHARD_HEADER_BYTES) {
        return fail(err, "%s: %zu bytes, too short for a %s (its header alone is %d); %s", f->path,
                    f->file.bytes, kind, SHARD_HEADER_BYTES, remedy);
    }
    memcpy(f->header, f->file.data, sizeof(f->header));
    if (f->header[0] != magic) {
        return fail(err, "%s: magic number %d, not a %s's %d; %s", f->path, f->header[0], kind,
                    magic, remedy);
    }
    if (f->header[1] != 1 && f->header[1] != 2) {
        return fail(err, "%s: %s version %d; this program reads 1 (uint16) and 2 (uint32)", f->path,
                    kind, f->header[1]);
    }
    f->token_bytes = 2 * f->header[1];
    f->count = (int64_t)(f->file.bytes - SHARD_HEADER_BYTES) / f->token_bytes;
    f->tokenizer = (uint32_t)f->header[SHARD_TOKENIZER];
    return true;
}

bool token_file_open(TokenFile *f, const char *path, int32_t magic, const char *kind,
                     const char *remedy, Error *err) {
    *f = (TokenFile){0};
    if (strlen(path) >= PATH_LENGTH) { return fail(err, "path too long: %.80s...", path); }
    strcpy(f->path, path);
    if (!file_map(&f->file, path, err)) { return false; }
    if (read_header(f, magic, kind, remedy, err)) { return true; }
    token_file_close(f);
    return false;
}

void token_file_close(TokenFile *f) {
    file_unmap(&f->file);
    *f = (TokenFile){0};
}

uint32_t token_file_number(const TokenFile *f, int64_t i) {
    const unsigned char *from = f->file.data + SHARD_HEADER_BYTES + i * f->token_bytes;
    uint32_t number = 0;
    assert(i >= 0 && i < f->count);
    memcpy(&number, from, (size_t)f->token_bytes); // little-endian
    return number;
}

bool shard_open(TokenFile *f, const char *path, Error *err) {
    if (!token_file_open(f, path, SHARD_MAGIC, "token shard", "make shards with ./tokenize", err)) {
        return false;
    }
    uint64_t count = (uint64_t)(uint32_t)f->header[3] << 32 | (uint32_t)f->header[2];
    bool whole = (f->file.bytes - SHARD_HEADER_BYTES) % (size_t)f->token_bytes == 0;
    bool ok = (count == (uint64_t)f->count && whole) ||
              fail(err,
                   "%s: the header says %llu tokens, the file holds %llu%s; it is damaged or cut "
                   "short",
                   path, (unsigned long long)count, (unsigned long long)f->count,
                   whole ? "" : " and a part");
    ok = ok && (count > 0 || fail(err, "%s: a shard without tokens", path));
    if (!ok) { token_file_close(f); }
    return ok;
}

void shard_header(int32_t header[SHARD_HEADER_BYTES / 4], int token_bytes, int64_t count) {
    memset(header, 0, SHARD_HEADER_BYTES);
    header[0] = SHARD_MAGIC;
    header[1] = token_bytes / 2;
    header[2] = (int32_t)(uint32_t)count;
    header[3] = (int32_t)(uint32_t)(count >> 32);
}

bool dataset_open(Dataset *data, const char *pattern, int seq_length, int vocab, Error *err) {
    *data = (Dataset){.seq_length = seq_length, .vocab = vocab};
    glob_t found;
    int status = glob(pattern, 0, NULL, &found);
    if (status != 0) {
        return fail(err, "%s: %s", pattern,
                    status == GLOB_NOMATCH ? "no such file; make shards with ./tokenize"
                                           : "the files cannot be listed");
    }
    data->shards = calloc_or_die(found.gl_pathc, sizeof(TokenFile));
    data->first = calloc_or_die(found.gl_pathc + 1, sizeof(int64_t));
    bool ok = true;
    for (size_t i = 0; ok && i < found.gl_pathc; i++) {
        TokenFile *shard = &data->shards[i];
        ok = shard_open(shard, found.gl_pathv[i], err);
        if (!ok) { break; }
        data->num_shards++;
        data->tokens += shard->count;
        data->first[i + 1] = data->tokens;
        // a shard of an unknown tokenizer is accepted among any
        if (data->tokenizer == 0) { data->tokenizer = shard->tokenizer; }
        if (shard->tokenizer != 0 && shard->tokenizer != data->tokenizer) {
            ok = fail(err,
                      "%s: made with another tokenizer than the shards before it (%s first); give "
                      "those of one tokenizer",
                      shard->path, data->shards[0].path);
        }
    }
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
    for (int i = 0; i < data->num_shards; i++) { token_file_close(&data->shards[i]); }
    free(data->shards);
    free(data->first);
    *data = (Dataset){0};
}

// out[i] = token begin + i of the stream, across shards.
static bool read_stream(const Dataset *data, int64_t begin, int64_t n, int *out, Error *err) {
    int shard = 0;
    for (int64_t i = 0; i < n; i++) {
        while (begin + i >= data->first[shard + 1]) { shard++; }
        const TokenFile *s = &data->shards[shard];
        int64_t at = begin + i - data->first[shard];
        uint32_t token = token_file_number(s, at);
        if (token >= (uint32_t)data->vocab) {
            return fail(err, "%s: token %lld is %u, outside the vocabulary of %d (--vocab-size)",
                        s->path, (long long)at, token, data->vocab);
        }
        out[i] = (int)token;
    }
    return true;
}

bool dataset_window(const Dataset *data, int64_t window, int *inputs, int *targets, Error *err) {
    assert(window >= 0 && window < data->windows);
    int T = data->seq_length;
    int64_t begin = window * T;
    if (!read_stream(data, begin, 1, inputs, err) ||
        !read_stream(data, begin + 1, T, targets, err)) {
        return false;
    }
    memcpy(inputs + 1, targets, (size_t)(T - 1) * sizeof(int));
    return true;
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
        if (sample < end) {
            int64_t window = loader_window(loader, sample);
            if (!dataset_window(loader->data, window, inputs, targets, err)) { return false; }
        } else {
            memset(inputs, 0, (size_t)T * sizeof(int));
            memset(targets, -1, (size_t)T * sizeof(int)); // every int is -1
        }
    }
    return true;
}
