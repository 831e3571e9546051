// A token shard: one file of tokens, memory-mapped.
//
// Layout, little-endian:
//   bytes 0..1023   256 int32: [0] magic 20240520, [1] version, [2] the token count's low half,
//                   [3] its high half (both unsigned), [4] the mark of the tokenizer that made
//                   them (tokenizer.h; 0: not said), the rest 0
//   from byte 1024  the tokens, nothing after them
// Version 1 has uint16 tokens, version 2 uint32. llm.c's shards are version 1 with [3] zero.
//
// shard_open refuses a file that is missing, empty, too short for a header, of another magic or
// version, or whose size is not what its count says.
#ifndef LLM8_SHARD_H
#define LLM8_SHARD_H

#include "../base/io.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SHARD_MAGIC = 20240520, SHARD_HEADER_BYTES = 1024, SHARD_TOKENIZER = 4 };

typedef struct {
    char path[PATH_LENGTH];
    MappedFile file;
    int64_t count;
    int token_bytes;    // 2 or 4
    uint32_t tokenizer; // the mark; 0: not said
} Shard;

bool shard_open(Shard *shard, const char *path, Error *err);
void shard_close(Shard *shard);

// out[i] = token begin + i, for i < n; the range must lie in the shard. Tokens from 2^31 on, which
// no vocabulary has, come out as 2^31 - 1.
void shard_read(const Shard *shard, int64_t begin, int64_t n, int *out);

// The 1024 bytes before the tokens, without the tokenizer's mark.
void shard_header(int32_t header[SHARD_HEADER_BYTES / 4], int token_bytes, int64_t count);

#ifdef __cplusplus
}
#endif

#endif
