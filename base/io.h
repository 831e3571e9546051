// Files that are whole or not there: durable writes, mapped reads, folders.
#ifndef LLM8_IO_H
#define LLM8_IO_H

#include "common.h"

#ifdef __cplusplus
extern "C" {
#endif

// Writes a file through a buffer and keeps its length and CRC-32 (zlib's). The first error sticks
// and is reported by writer_close, so that a row of writer_write calls needs no checks between.
typedef struct {
    char path[PATH_LENGTH];
    int file, error;
    unsigned char *buffer;
    size_t used;
    int64_t bytes;
    uint32_t crc;
} FileWriter;

bool writer_open(FileWriter *w, const char *path, Error *err);
void writer_write(FileWriter *w, const void *data, size_t bytes);
// Flushes, syncs to the disk, closes. Frees the writer in every case.
bool writer_close(FileWriter *w, Error *err);

// A whole file, read-only. An empty one is mapped as NULL with 0 bytes.
typedef struct {
    const unsigned char *data;
    size_t bytes;
} MappedFile;

bool file_map(MappedFile *m, const char *path, Error *err);
void file_unmap(MappedFile *m);

// Replaces path at once: written beside it, synced, renamed.
bool file_replace(const char *path, const void *data, size_t bytes, Error *err);

// Makes link point to target, at once; target is relative to link's folder.
bool link_replace(const char *link, const char *target, Error *err);

bool file_checksum(const char *path, int64_t *bytes, uint32_t *crc, Error *err);

bool folder_make(const char *path, Error *err); // with its parents; fine if it is there
bool folder_sync(const char *path, Error *err);
bool folder_remove(const char *path, Error *err); // with everything in it
bool path_exists(const char *path);

#ifdef __cplusplus
}
#endif

#endif
