// Files and folders. file_replace() writes a file completely or not at all, even if the power
// fails. No file is mapped into memory, so a read that fails is an error and never a signal.
#pragma once

#include "common.h"

#include <glob.h>
#include <stdio.h>

BEGIN_C

// Writes a file, counts its bytes and computes its CRC-32 (zlib's). writer_close() reports the
// first error, so writer_write() returns nothing.
typedef struct {
    char path[PATH_LENGTH];
    FILE *file;
    int error;
    int64_t bytes;
    uint32_t crc;
} FileWriter;

bool writer_open(FileWriter *w, const char *path);
void writer_write(FileWriter *w, const void *data, size_t bytes);
// Flushes the file, syncs it to the disk and closes it.
bool writer_close(FileWriter *w);
// Opens, writes and closes a file.
bool file_write(FileWriter *w, const char *path, const void *data, size_t bytes);

// Opens a file for reading and sets *bytes to its length. Returns -1 if the file cannot be opened,
// is not a regular file, or is a pointer of Git LFS.
int file_open(const char *path, size_t *bytes);
// Reads `bytes` bytes from offset `at` on. Fails if the file has fewer, or if its disk fails.
bool file_read_at(int file, const char *path, void *out, size_t bytes, int64_t at);
// Computes one CRC-32 over parts of a file. A part of `part` bytes begins every `stride` bytes,
// from offset `begin` on; the last part is cut off at `end`.
bool file_sum(int file, const char *path, int64_t begin, int64_t end, int64_t part, int64_t stride,
              uint32_t *crc);
// Computes the CRC-32 of the first `bytes` bytes. Several threads read a large file.
bool file_checksum(int file, const char *path, int64_t bytes, uint32_t *crc);

typedef enum {
    LOCK_OURS, // this process has the lock, or could take it
    LOCK_HELD, // another process has the lock
    LOCK_NONE  // the file cannot be locked, and errno says why
} Lock;

// Locks an open file until the process closes any descriptor of the file. Without `take` the
// function only tests whether the lock is free.
Lock file_lock(int file, bool take);

// Returns the content of a file, which the caller frees; NULL: it cannot be read.
char *file_read(const char *path, size_t *bytes);

// Replaces a file in one step: the new file is written beside it, synced, and renamed.
bool file_replace(const char *path, const void *data, size_t bytes);

bool folder_make(const char *path); // makes missing parents too; the folder may exist already
bool folder_sync(const char *path); // makes renames in the folder survive a power cut
// Deletes a folder with everything in it, or a file. Links are deleted, not followed.
bool folder_remove(const char *path);
// Returns the names in a folder as one string: each name ends with a NUL, and an empty name ends
// the list. The caller frees the string. NULL: error_text() and errno say why.
char *folder_list(const char *path);
// Identifies a folder or a file independently of its path. All zero: the path leads nowhere.
typedef struct {
    uint64_t device, inode;
} PathId;
PathId path_id(const char *path);
bool path_is(const char *path, PathId id); // false for a path that leads nowhere
bool path_exists(const char *path);        // true for a dangling link
// Finds the file whose path is literally `pattern`. If there is none, finds the files that match
// `pattern` as a glob pattern with braces, sorted by name. Leading folders that exist are taken
// literally: in "run [1]/train_*.bin", if "run [1]" exists, only train_*.bin is a pattern. If
// nothing matches then, the whole text is a pattern. Returns glob()'s result; at GLOB_ABORTED, the
// error text names the folder that cannot be read.
int pattern_files(const char *pattern, glob_t *found);
// Whether pattern_files() would find the path if it existed.
bool pattern_matches(const char *pattern, const char *path);
// Appends n characters to a pattern that has `used` characters. exact: special characters are
// escaped, so that they match themselves. Returns the new length; PATH_LENGTH: there is no room.
size_t pattern_add(char pattern[PATH_LENGTH], size_t used, const char *text, size_t n, bool exact);

END_C
