#include "shard.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

static bool check_header(Shard *s, Error *err) {
    int32_t header[SHARD_TOKENIZER + 1];
    if (s->file.bytes < SHARD_HEADER_BYTES) {
        return fail(err,
                    "%s: %zu bytes, too short for a token shard (its header alone is %d); make "
                    "shards with ./tokenize",
                    s->path, s->file.bytes, SHARD_HEADER_BYTES);
    }
    memcpy(header, s->file.data, sizeof(header));
    if (header[0] != SHARD_MAGIC) {
        return fail(err, "%s: magic number %d, not a token shard's %d; make shards with ./tokenize",
                    s->path, header[0], SHARD_MAGIC);
    }
    if (header[1] != 1 && header[1] != 2) {
        return fail(err, "%s: shard version %d; this program reads 1 (uint16) and 2 (uint32)",
                    s->path, header[1]);
    }
    s->token_bytes = header[1] == 1 ? 2 : 4;
    s->tokenizer = (uint32_t)header[SHARD_TOKENIZER];
    uint64_t count = (uint64_t)(uint32_t)header[3] << 32 | (uint32_t)header[2];
    uint64_t held = (s->file.bytes - SHARD_HEADER_BYTES) / (uint64_t)s->token_bytes;
    uint64_t rest = (s->file.bytes - SHARD_HEADER_BYTES) % (uint64_t)s->token_bytes;
    if (count != held || rest != 0) {
        return fail(err,
                    "%s: the header says %llu tokens, the file holds %llu%s; it is damaged or cut "
                    "short",
                    s->path, (unsigned long long)count, (unsigned long long)held,
                    rest != 0 ? " and a part" : "");
    }
    if (count == 0) { return fail(err, "%s: a shard without tokens", s->path); }
    s->count = (int64_t)count;
    return true;
}

bool shard_open(Shard *s, const char *path, Error *err) {
    *s = (Shard){0};
    if (strlen(path) >= PATH_LENGTH) { return fail(err, "path too long: %.80s...", path); }
    strcpy(s->path, path);
    if (!file_map(&s->file, path, err)) { return false; }
    if (check_header(s, err)) { return true; }
    shard_close(s);
    return false;
}

void shard_close(Shard *s) {
    file_unmap(&s->file);
    *s = (Shard){0};
}

void shard_read(const Shard *s, int64_t begin, int64_t n, int *out) {
    assert(begin >= 0 && n >= 0 && begin + n <= s->count);
    const unsigned char *from = s->file.data + SHARD_HEADER_BYTES + begin * s->token_bytes;
    for (int64_t i = 0; i < n; i++) {
        uint16_t narrow;
        uint32_t token;
        if (s->token_bytes == 2) {
            memcpy(&narrow, from + 2 * i, 2);
            token = narrow;
        } else {
            memcpy(&token, from + 4 * i, 4);
        }
        out[i] = token > INT_MAX ? INT_MAX : (int)token;
    }
}

void shard_header(int32_t header[SHARD_HEADER_BYTES / 4], int token_bytes, int64_t count) {
    memset(header, 0, SHARD_HEADER_BYTES);
    header[0] = SHARD_MAGIC;
    header[1] = token_bytes == 2 ? 1 : 2;
    header[2] = (int32_t)(uint32_t)((uint64_t)count & 0xffffffffu);
    header[3] = (int32_t)(uint32_t)((uint64_t)count >> 32);
}
