// Shards, and the masks and document starts beside them, as the tests of data write them.
#pragma once

#include "../dataloader/loader.h"
#include "fixture.h"

#include <zlib.h>

// Writes a shard of `count` tokens; token i is first + i.
static inline void write_shard(const char *path, int token_bytes, int64_t first, int64_t count) {
    int32_t header[SHARD_HEADER_BYTES / 4];
    FileWriter w;
    or_die(writer_open(&w, path));
    shard_header(header, token_bytes, count);
    writer_write(&w, header, sizeof(header));
    for (int64_t i = 0; i < count; i++) {
        uint32_t token = (uint32_t)(first + i);
        writer_write(&w, &token, (size_t)token_bytes); // little-endian
    }
    or_die(writer_close(&w));
}

// Writes the file of bits of a shard whose first token is token `first` of the stream: its mask or
// its document starts, by what `has` says of a token.
static inline void write_bits(const char *shard, int magic, bool (*has)(int64_t), int64_t first,
                              int window, int template) {
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};
    uint16_t numbers[100] = {0};
    CLOSED(token_file_close) TokenFile s;
    FileWriter w;
    or_die(shard_open(&s, shard));
    CLOSED(blob_free) Blob b = blob_read(shard);
    size_t bytes = (size_t)(s.count + MASK_BITS - 1) / MASK_BITS * sizeof(uint16_t);
    for (int64_t i = 0; i < s.count; i++) {
        numbers[i / MASK_BITS] |= (uint16_t)(has(first + i) << i % MASK_BITS);
    }
    shard_header(header, 2, s.count);
    header[0] = magic;
    header[MASK_SHARD] = (int32_t)crc32_z(0, b.bytes, b.size);
    header[MASK_SUM] = (int32_t)crc32_z(0, (const Bytef *)numbers, bytes);
    header[MASK_WINDOW] = window;
    header[MASK_TEMPLATE] = template;
    or_die(writer_open(&w, text_of("%s.%s", shard, magic == MASK_MAGIC ? "mask" : "starts")));
    writer_write(&w, header, sizeof(header));
    writer_write(&w, numbers, bytes);
    or_die(writer_close(&w));
}
