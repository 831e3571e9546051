// Durable files: written whole or not at all. Reads that end in an error and never in a signal (no
// file is mapped into memory). Folders.
#pragma once

#include "common.h"

#include <glob.h>
#include <stdio.h>

BEGIN_C

// Writes a file and keeps its length and its CRC-32 (zlib's). The first error is kept and
// writer_close() reports it, so writer_write() returns nothing.
typedef struct {
    char path[PATH_LENGTH];
    FILE *file;
    int error;
    int64_t bytes;
    uint32_t crc;
} FileWriter;

bool writer_open(FileWriter *w, const char *path);
void writer_write(FileWriter *w, const void *data, size_t bytes);
// Flushes, syncs to the disk and closes.
bool writer_close(FileWriter *w);
// All three.
bool file_write(FileWriter *w, const char *path, const void *data, size_t bytes);

// Opens a regular file to read; -1 when it cannot. file_open_in: the file of that name in an open
// folder, wherever the folder's path leads by now.
int file_open(const char *path, size_t *bytes);
int file_open_in(int folder, const char *path, size_t *bytes);
// An error where the file has become shorter or its disk fails.
bool file_read_at(int file, const char *path, void *out, size_t bytes, int64_t at);
// The CRC-32 of the parts that begin at every `stride` bytes, from `begin` to below `end`.
bool file_sum(int file, const char *path, int64_t begin, int64_t end, int64_t part, int64_t stride,
              uint32_t *crc);
// The CRC-32 of the first `bytes`; a large file is read by several threads.
bool file_checksum(int file, const char *path, int64_t bytes, uint32_t *crc);

// A whole file, to be freed; NULL when it cannot be read.
char *file_read(const char *path, size_t *bytes);

// Replaces a file, or a link, in one step: the new one is written beside it, synced, then renamed.
// A link's target is relative to the link's folder; a folder in its place is deleted. Where no
// symbolic link can be made, a file with the target as its only line is the link.
bool file_replace(const char *path, const void *data, size_t bytes);
bool link_replace(const char *link, const char *target);
// The first half of it: makes the new link, as LINK.new.
bool link_prepare(const char *link, const char *target);
// The target of a link of either kind; "" where there is none, NULL where that cannot be told.
const char *link_read(const char *link, char target[PATH_LENGTH]);

bool folder_make(const char *path); // with its parents; it may exist already
bool folder_sync(const char *path); // so that renames in it survive a power cut
// With everything in it; or a file. Links are deleted, not followed.
bool folder_remove(const char *path);
// The names in a folder, one after another and an empty one at the end, to be freed. NULL: err and
// errno say why.
char *folder_list(const char *path);
// Which folder a path leads to, whatever its name: all zero where there is none.
typedef struct {
    uint64_t device, inode;
} FolderId;
FolderId folder_id(const char *path);
bool is_folder(const char *path, FolderId id); // false for a path that leads nowhere
bool path_exists(const char *path);            // a dangling link exists
const char *path_name(const char *path);       // what follows the last slash
// The files that a glob pattern, which may have braces, matches, in the order of their names; or
// the one whose very name it is. glob()'s result.
int pattern_files(const char *pattern, glob_t *found);
// Appends n characters to a pattern of `used`; exact: so that they match themselves. Returns its
// new length; PATH_LENGTH: it has no room.
size_t pattern_add(char pattern[PATH_LENGTH], size_t used, const char *text, size_t n, bool exact);

END_C
