// Files and folders. A file is written whole or not at all, and survives a power cut. A read that
// fails is an error and never a signal, since no file is mapped into memory.
#pragma once

#include "common.h"

#include <glob.h>
#include <stdio.h>

BEGIN_C

// Writes a file, and counts its bytes and its CRC-32 (zlib's). writer_close() reports the first
// error, so writer_write() returns nothing.
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

// Opens a regular file for reading; -1: it cannot be opened. file_open_in opens the file with that
// name in an open folder, even if the folder's path now leads elsewhere.
int file_open(const char *path, size_t *bytes);
int file_open_in(int folder, const char *path, size_t *bytes);
// Fails if the file is shorter by now, or its disk fails.
bool file_read_at(int file, const char *path, void *out, size_t bytes, int64_t at);
// Computes the CRC-32 of parts of a file, one after another: a part of `part` bytes begins every
// `stride` bytes, from `begin` on, and none reaches past `end`.
bool file_sum(int file, const char *path, int64_t begin, int64_t end, int64_t part, int64_t stride,
              uint32_t *crc);
// Computes the CRC-32 of the first `bytes` bytes. Several threads read a large file.
bool file_checksum(int file, const char *path, int64_t bytes, uint32_t *crc);

// Takes the lock of an open file, which the process has until it closes the file anywhere; or only
// asks whether it could. LOCK_HELD: another process has it. LOCK_NONE: errno says why there is
// none.
typedef enum { LOCK_OURS, LOCK_HELD, LOCK_NONE } Lock;
Lock file_lock(int file, bool take);

// Returns the content of a file, which the caller frees; NULL: it cannot be read.
char *file_read(const char *path, size_t *bytes);

// Replaces a file in one step: the new one is written beside it, synced, and renamed.
bool file_replace(const char *path, const void *data, size_t bytes);

bool folder_make(const char *path); // makes its parents too; the folder may exist already
bool folder_sync(const char *path); // so that renames in it survive a power cut
// Deletes a folder with everything in it, or a file. Links are deleted, not followed.
bool folder_remove(const char *path);
// Returns the names in a folder, one after another, each with its NUL, and an empty name at the
// end. The caller frees them. NULL: error_text() and errno say why.
char *folder_list(const char *path);
// Identifies a folder independently of its path. All zero: there is no folder.
typedef struct {
    uint64_t device, inode;
} FolderId;
FolderId folder_id(const char *path);
bool is_folder(const char *path, FolderId id); // false for a path that leads nowhere
bool path_exists(const char *path);            // true for a dangling link
// Finds the file that a path names, or else those that it matches as a glob pattern (which may have
// braces), in the order of their names. Folders at its beginning that exist under these names are
// no patterns: in "run [1]/train_*.bin" only the last part is one. Returns glob()'s result.
int pattern_files(const char *pattern, glob_t *found);
// Appends n characters to a pattern that has `used` characters. exact: special characters are
// escaped, so that they match themselves. Returns the new length; PATH_LENGTH: there is no room.
size_t pattern_add(char pattern[PATH_LENGTH], size_t used, const char *text, size_t n, bool exact);

END_C
