#include "loader.h"
#include "../base/rng.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

// ---- files of numbers ---------------------------------------------------------------------------

bool token_file_open(TokenFile *f, const char *path, TokenFileKind kind) {
    *f = (TokenFile){0};
    path_format(f->path, "%s", path);
    f->file = file_open(path, &f->bytes);
    bool ok = f->file >= 0 &&
              (f->bytes >= SHARD_HEADER_BYTES ||
               fail("%s: %zu bytes, too short for a %s (its header alone is %d); %s", path,
                    f->bytes, kind.name, SHARD_HEADER_BYTES, kind.remedy)) &&
              file_read_at(f->file, path, f->header, sizeof(f->header), 0) &&
              (f->header[0] == kind.magic ||
               fail("%s: magic number %d, not a %s's %d; %s", path, f->header[0], kind.name,
                    kind.magic, kind.remedy)) &&
              (f->header[1] == 1 || f->header[1] == 2 ||
               fail("%s: %s version %d; this program reads 1 (uint16) and 2 (uint32)", path,
                    kind.name, f->header[1]));
    if (!ok) {
        token_file_close(f);
        return false;
    }
    f->token_bytes = 2 * f->header[1];
    f->count = (int64_t)(f->bytes - SHARD_HEADER_BYTES) / f->token_bytes;
    f->tokenizer = (uint32_t)f->header[SHARD_TOKENIZER];
    return true;
}

void token_file_close(TokenFile *f) {
    if (f->file >= 0) { close(f->file); }
    *f = (TokenFile){.file = -1};
}

bool token_file_read(const TokenFile *f, int64_t begin, int64_t n, uint32_t *out) {
    size_t size = (size_t)f->token_bytes;
    unsigned char *from = (unsigned char *)(out + n) - (size_t)n * size; // widened in place
    assert(begin >= 0 && n >= 0 && n <= f->count - begin);
    if (!file_read_at(f->file, f->path, from, (size_t)n * size,
                      SHARD_HEADER_BYTES + begin * (int64_t)size)) {
        return false;
    }
    for (int64_t i = 0; size == 2 && i < n; i++, from += 2) {
        out[i] = from[0] | (uint32_t)from[1] << 8;
    }
    return true;
}

bool token_files_find(glob_t *found, const char *pattern, TokenFileKind kind) {
    int status = pattern_files(pattern, found);
    const char *why = status == GLOB_NOMATCH ? "no such file" : "the files cannot be listed";
    if (status != 0) { return fail("%s: %s; %s", pattern, why, kind.remedy); }
    char inside[PATH_LENGTH];
    if (path_exists(path_format(inside, "%s/.", found->gl_pathv[0]))) {
        globfree(found);
        return fail("%s: a folder; give its files, such as '%s/*.bin'", pattern, pattern);
    }
    return true;
}

// ---- shards -------------------------------------------------------------------------------------

static const TokenFileKind shard_kind = {SHARD_MAGIC, "token shard", "make shards with ./tokenize"};

bool shard_open(TokenFile *f, const char *path) {
    if (!token_file_open(f, path, shard_kind)) { return false; }
    uint64_t count = (uint64_t)(uint32_t)f->header[3] << 32 | (uint32_t)f->header[2];
    bool whole = (f->bytes - SHARD_HEADER_BYTES) % (size_t)f->token_bytes == 0;
    bool ok = (whole && count == (uint64_t)f->count) ||
              fail("%s: the header says %llu tokens, the file holds %llu%s; it is damaged or cut "
                   "short",
                   path, (unsigned long long)count, (unsigned long long)f->count,
                   whole ? "" : " and a part");
    ok = ok && (count > 0 || fail("%s: a shard without tokens", path));
    if (!ok) { token_file_close(f); }
    return ok;
}

uint32_t shards_mark(const char *pattern) {
    glob_t found;
    TokenFile shard = {.file = -1};
    uint32_t mark = 0;
    if (token_files_find(&found, pattern, shard_kind)) {
        if (shard_open(&shard, found.gl_pathv[0])) { mark = shard.tokenizer; }
        token_file_close(&shard);
    }
    globfree(&found);
    return mark;
}

void shard_header(int32_t header[SHARD_HEADER_BYTES / 4], int token_bytes, int64_t count) {
    memset(header, 0, SHARD_HEADER_BYTES);
    header[0] = SHARD_MAGIC;
    header[1] = token_bytes / 2;
    header[2] = (int32_t)(uint32_t)count;
    header[3] = (int32_t)(uint32_t)(count >> 32);
}

// Appends a shard's line to data->identity.
static bool identify(Dataset *data, const TokenFile *shard) {
    enum { PARTS = 64, PART_BYTES = 1 << 16 };
    const char *name = path_name(shard->path);
    int64_t bytes = (int64_t)shard->bytes;
    uint32_t crc;
    bool ok = file_sum(shard->file, shard->path, 0, bytes, PART_BYTES,
                       max64(PART_BYTES, bytes / PARTS), &crc);
    size_t used = data->identity != NULL ? strlen(data->identity) : 0;
    size_t room = used + strlen(name) + sizeof("01234567 \n");
    data->identity = realloc_or_die(data->identity, room);
    char *line = data->identity + used;
    snprintf(line, room - used, "%08x %s", crc, name);
    for (; *line != '\0'; line++) { *line = iscntrl((unsigned char)*line) ? '?' : *line; }
    strcpy(line, "\n");
    return ok;
}

bool dataset_open(Dataset *data, const char *pattern, int seq_length, int vocab) {
    *data = (Dataset){.seq_length = seq_length, .vocab = vocab};
    glob_t found;
    if (!token_files_find(&found, pattern, shard_kind)) { return false; }
    data->shards = calloc_or_die(found.gl_pathc, sizeof(TokenFile));
    bool ok = true;
    for (size_t i = 0; ok && i < found.gl_pathc; i++) {
        TokenFile *shard = &data->shards[i];
        ok = shard_open(shard, found.gl_pathv[i]);
        if (!ok) { break; }
        data->num_shards++;
        data->tokens += shard->count;
        // a shard of an unknown tokenizer is accepted among any
        if (data->tokenizer == 0) { data->tokenizer = shard->tokenizer; }
        ok = shard->tokenizer == 0 || shard->tokenizer == data->tokenizer ||
             fail("%s: made with another tokenizer than the shards before it (%s first); give "
                  "those of one tokenizer",
                  shard->path, data->shards[0].path);
        ok = ok && identify(data, shard);
    }
    globfree(&found);
    data->windows = (data->tokens - 1) / seq_length;
    ok = ok && (data->windows > 0 ||
                fail("%s: %lld tokens, fewer than one sequence of %d (--seq-length) and its target",
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

enum { CRC_DIGITS = 8 };

const char *identity_sum(const char *identity, char out[9]) {
    uLong sum = crc32(0, NULL, 0);
    for (const char *line = identity; strlen(line) > CRC_DIGITS; line += *line == '\n') {
        sum = crc32(sum, (const Bytef *)line, CRC_DIGITS);
        line += strcspn(line, "\n");
    }
    snprintf(out, 9, "%08lx", sum);
    return out;
}

bool dataset_match(const Dataset *data, const char *identity, const char *whose) {
    const char *own = data->identity, *theirs = identity;
    int i = 0;
    for (; i < data->num_shards && strncmp(own, theirs, CRC_DIGITS) == 0; i++) {
        own += strcspn(own, "\n") + 1;
        theirs += strcspn(theirs, "\n");
        theirs += *theirs == '\n';
    }
    if (i < data->num_shards) {
        return fail("%s: not the shard that %s read in its place (%.*s)", data->shards[i].path,
                    whose, *theirs != '\0' ? (int)strcspn(theirs, "\n") : 4,
                    *theirs != '\0' ? theirs : "none");
    }
    return *theirs == '\0' || fail("%d shard%s, and %s read more", i, i > 1 ? "s" : "", whose);
}

// ---- windows and batches ------------------------------------------------------------------------

// The tokens [begin, begin + n) of the stream, across shards.
static bool read_stream(const Dataset *data, int64_t begin, int64_t n, int *out) {
    const TokenFile *s = data->shards;
    for (; begin >= s->count; s++) { begin -= s->count; }
    for (; n > 0; s++, begin = 0) {
        int64_t part = min64(n, s->count - begin);
        if (!token_file_read(s, begin, part, (uint32_t *)out)) { return false; }
        for (int64_t i = 0; i < part; i++) {
            if ((uint32_t)out[i] < (uint32_t)data->vocab) { continue; }
            return fail("%s: token %lld is %u, outside the vocabulary of %d (--vocab-size)",
                        s->path, (long long)(begin + i), (uint32_t)out[i], data->vocab);
        }
        out += part;
        n -= part;
    }
    return true;
}

int64_t loader_window(const Loader *loader, int64_t sample) {
    int64_t windows = loader->data->windows, epoch = sample / windows, place = sample % windows;
    if (!loader->shuffle) { return place; }
    uint64_t key = rng_bits(loader->seed, (uint64_t)epoch);
    return (int64_t)rng_permute(key, (uint64_t)windows, (uint64_t)place);
}

bool loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                  int *targets) {
    int T = loader->data->seq_length;
    for (int i = 0; i < count; i++, sample++, inputs += T, targets += T) {
        memset(inputs, 0, (size_t)T * sizeof(int));
        memset(targets, -1, (size_t)T * sizeof(int)); // every int is -1
        if (sample >= end) { continue; }
        int64_t begin = loader_window(loader, sample) * T;
        if (!read_stream(loader->data, begin, 1, inputs) ||
            !read_stream(loader->data, begin + 1, T, targets)) {
            return false;
        }
        memcpy(inputs + 1, targets, (size_t)(T - 1) * sizeof(int));
    }
    return true;
}
