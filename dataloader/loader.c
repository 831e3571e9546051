#include "loader.h"
#include "../base/rng.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <zlib.h>

// ---- files of numbers ---------------------------------------------------------------------------

static bool read_header(TokenFile *f, int32_t magic, const char *kind, const char *remedy,
                        Error *err) {
    if (f->bytes < SHARD_HEADER_BYTES) {
        return fail(err, "%s: %zu bytes, too short for a %s (its header alone is %d); %s", f->path,
                    f->bytes, kind, SHARD_HEADER_BYTES, remedy);
    }
    if (!file_read_at(f->file, f->path, f->header, sizeof(f->header), 0, err)) { return false; }
    if (f->header[0] != magic) {
        return fail(err, "%s: magic number %d, not a %s's %d; %s", f->path, f->header[0], kind,
                    magic, remedy);
    }
    if (f->header[1] != 1 && f->header[1] != 2) {
        return fail(err, "%s: %s version %d; this program reads 1 (uint16) and 2 (uint32)", f->path,
                    kind, f->header[1]);
    }
    f->token_bytes = 2 * f->header[1];
    f->count = (int64_t)(f->bytes - SHARD_HEADER_BYTES) / f->token_bytes;
    f->tokenizer = (uint32_t)f->header[SHARD_TOKENIZER];
    return true;
}

bool token_file_open(TokenFile *f, const char *path, int32_t magic, const char *kind,
                     const char *remedy, Error *err) {
    *f = (TokenFile){.file = -1};
    if (strlen(path) >= PATH_LENGTH) { return fail(err, "path too long: %.80s...", path); }
    strcpy(f->path, path);
    f->file = file_open(path, &f->bytes, err);
    if (f->file >= 0 && read_header(f, magic, kind, remedy, err)) { return true; }
    token_file_close(f);
    return false;
}

void token_file_close(TokenFile *f) {
    if (f->file >= 0) { close(f->file); }
    *f = (TokenFile){.file = -1};
}

bool token_file_read(const TokenFile *f, int64_t begin, int64_t n, uint32_t *out, Error *err) {
    size_t size = (size_t)f->token_bytes;
    unsigned char *from = (unsigned char *)(out + n) - (size_t)n * size; // widened in place
    assert(begin >= 0 && n >= 0 && n <= f->count - begin);
    if (!file_read_at(f->file, f->path, from, (size_t)n * size,
                      SHARD_HEADER_BYTES + begin * (int64_t)size, err)) {
        return false;
    }
    for (int64_t i = 0; size == 2 && i < n; i++, from += 2) {
        out[i] = from[0] | (uint32_t)from[1] << 8;
    }
    return true;
}

bool files_find(glob_t *found, const char *pattern, const char *remedy, Error *err) {
    int status = glob(pattern, 0, NULL, found);
    return status == 0 ||
           fail(err, "%s: %s%s", pattern,
                status == GLOB_NOMATCH ? "no such file; " : "the files cannot be listed; ", remedy);
}

// ---- shards -------------------------------------------------------------------------------------

bool shard_open(TokenFile *f, const char *path, Error *err) {
    if (!token_file_open(f, path, SHARD_MAGIC, "token shard", "make shards with ./tokenize", err)) {
        return false;
    }
    uint64_t count = (uint64_t)(uint32_t)f->header[3] << 32 | (uint32_t)f->header[2];
    bool whole = (f->bytes - SHARD_HEADER_BYTES) % (size_t)f->token_bytes == 0;
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

// Appends a shard's line to data->identity.
static bool identify(Dataset *data, const TokenFile *shard, Error *err) {
    enum { PARTS = 64, PART_BYTES = 1 << 16 };
    const char *slash = strrchr(shard->path, '/'), *name = slash != NULL ? slash + 1 : shard->path;
    unsigned char *part = malloc_or_die(PART_BYTES);
    int64_t bytes = (int64_t)shard->bytes, stride = max64(PART_BYTES, bytes / PARTS);
    uint32_t crc = 0;
    bool ok = true;
    for (int64_t at = 0; ok && at < bytes; at += stride) {
        size_t n = (size_t)min64(PART_BYTES, bytes - at);
        ok = file_read_at(shard->file, shard->path, part, n, at, err);
        if (ok) { crc = (uint32_t)crc32_z(crc, part, n); }
    }
    free(part);
    size_t used = data->identity != NULL ? strlen(data->identity) : 0;
    size_t room = used + strlen(name) + sizeof("01234567 \n");
    data->identity = realloc_or_die(data->identity, room);
    snprintf(data->identity + used, room - used, "%08x %s\n", crc, name);
    return ok;
}

bool dataset_open(Dataset *data, const char *pattern, int seq_length, int vocab, Error *err) {
    *data = (Dataset){.seq_length = seq_length, .vocab = vocab};
    glob_t found;
    struct rlimit files;
    if (!files_find(&found, pattern, "make shards with ./tokenize", err)) { return false; }
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) { // each shard stays open
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    data->shards = calloc_or_die(found.gl_pathc, sizeof(TokenFile));
    bool ok = true;
    for (size_t i = 0; ok && i < found.gl_pathc; i++) {
        TokenFile *shard = &data->shards[i];
        ok = shard_open(shard, found.gl_pathv[i], err);
        if (!ok) { break; }
        data->num_shards++;
        data->tokens += shard->count;
        // a shard of an unknown tokenizer is accepted among any
        if (data->tokenizer == 0) { data->tokenizer = shard->tokenizer; }
        ok = shard->tokenizer == 0 || shard->tokenizer == data->tokenizer ||
             fail(err,
                  "%s: made with another tokenizer than the shards before it (%s first); give "
                  "those of one tokenizer",
                  shard->path, data->shards[0].path);
        ok = ok && identify(data, shard, err);
    }
    globfree(&found);
    data->windows = (data->tokens - 1) / seq_length;
    ok = ok &&
         (data->windows > 0 ||
          fail(err, "%s: %lld tokens, fewer than one sequence of %d (--seq-length) and its target",
               pattern, (long long)data->tokens, seq_length));
    if (!ok) { dataset_close(data); }
    return ok;
}

void dataset_close(Dataset *data) {
    for (int i = 0; i < data->num_shards; i++) { token_file_close(&data->shards[i]); }
    free(data->shards);
    free(data->identity);
    *data = (Dataset){0};
}

bool dataset_match(const Dataset *data, const char *identity, const char *whose, Error *err) {
    enum { CRC_DIGITS = 8 };
    const char *own = data->identity;
    for (int i = 0; i < data->num_shards; i++, own += strcspn(own, "\n") + 1) {
        int length = (int)strcspn(identity, "\n");
        const char *path = data->shards[i].path;
        if (length <= CRC_DIGITS) {
            return fail(err, "%s: not among the %d shards that %s read", path, i, whose);
        }
        if (strncmp(own, identity, CRC_DIGITS) != 0) {
            return fail(err, "%s: not the shard that %s read in its place (%.*s)", path, whose,
                        length - CRC_DIGITS - 1, identity + CRC_DIGITS + 1);
        }
        identity += length + (identity[length] == '\n');
    }
    return identity[0] == '\0' || fail(err, "%d shards, and %s read more", data->num_shards, whose);
}

// ---- windows and batches ------------------------------------------------------------------------

// The tokens [begin, begin + n) of the stream, across shards.
static bool read_stream(const Dataset *data, int64_t begin, int64_t n, int *out, Error *err) {
    const TokenFile *s = data->shards;
    for (; begin >= s->count; s++) { begin -= s->count; }
    for (; n > 0; s++, begin = 0) {
        int64_t part = min64(n, s->count - begin);
        if (!token_file_read(s, begin, part, (uint32_t *)out, err)) { return false; }
        for (int64_t i = 0; i < part; i++) {
            if ((uint32_t)out[i] < (uint32_t)data->vocab) { continue; }
            return fail(err, "%s: token %lld is %u, outside the vocabulary of %d (--vocab-size)",
                        s->path, (long long)(begin + i), (uint32_t)out[i], data->vocab);
        }
        out += part;
        n -= part;
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
