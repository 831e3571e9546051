#define _GNU_SOURCE // FNM_EXTMATCH
#include "io.h"
#include "host.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

static bool fail_path(const char *path, int why) {
    return fail("%s: %s", path, strerror(why));
}

bool writer_open(FileWriter *w, const char *path) {
    *w = (FileWriter){.file = fopen(path, "we")};
    if (w->file == NULL) { return fail_path(path, errno); }
    path_format(w->path, "%s", path);
    return true;
}

void writer_write(FileWriter *w, const void *data, size_t bytes) {
    if (bytes == 0) { return; } // if data is NULL, crc32_z would restart the checksum
    w->crc = (uint32_t)crc32_z(w->crc, data, bytes);
    w->bytes += (int64_t)bytes;
    bool ok = w->error != 0 || fwrite(data, 1, bytes, w->file) == bytes;
    if (!ok) { w->error = errno; }
}

bool writer_close(FileWriter *w) {
    bool ok = w->error != 0 || (fflush(w->file) == 0 && fsync(fileno(w->file)) == 0);
    if (!ok) { w->error = errno; }
    if (fclose(w->file) != 0 && w->error == 0) { w->error = errno; }
    return w->error == 0 || fail("%s: could not be written: %s", w->path, strerror(w->error));
}

bool file_write(FileWriter *w, const char *path, const void *data, size_t bytes) {
    if (!writer_open(w, path)) { return false; }
    writer_write(w, data, bytes);
    return writer_close(w);
}

// Returns whether a file is the pointer that a clone without git-lfs has in place of a large file.
// If the file cannot be read, sets *why to errno.
static bool is_lfs_pointer(int file, int *why) {
    static const char begin[] = "version https://git-lfs.github.com/spec/";
    char text[sizeof(begin) - 1];
    ssize_t n = pread(file, text, sizeof(text), 0);
    if (n < 0) { *why = errno; }
    return n == sizeof(text) && memcmp(text, begin, sizeof(text)) == 0;
}

int file_open(const char *path, size_t *bytes) {
    struct stat info;
    // O_NONBLOCK: a pipe is refused at once, without waiting for its writer
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int why = file < 0 || fstat(file, &info) != 0 ? errno : 0;
    if (why == 0 && !S_ISREG(info.st_mode)) { why = S_ISDIR(info.st_mode) ? EISDIR : EINVAL; }
    bool pointer = why == 0 && is_lfs_pointer(file, &why);
    if (why == 0 && !pointer) {
        *bytes = (size_t)info.st_size;
        return file;
    }
    if (file >= 0) { close(file); }
    if (pointer) {
        fail("%s: a pointer of Git LFS, not the file; fetch it (git lfs pull)", path);
    } else if (why == EINVAL) {
        fail("%s: a pipe or a device, not a file", path);
    } else {
        fail_path(path, why);
    }
    return -1;
}

bool file_read_at(int file, const char *path, void *out, size_t bytes, int64_t at) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(file, (char *)out + done, bytes - done, (off_t)(at + (int64_t)done));
        if (n == 0) { return fail("%s: cut short while it was read", path); }
        if (n < 0 && errno != EINTR) { return fail_path(path, errno); }
        if (n > 0) { done += (size_t)n; }
    }
    return true;
}

char *file_read(const char *path, size_t *bytes) {
    int file = file_open(path, bytes);
    if (file < 0) { return NULL; }
    char *data = malloc_or_die(*bytes);
    bool ok = file_read_at(file, path, data, *bytes, 0);
    close(file);
    if (ok) { return data; }
    free(data);
    return NULL;
}

bool file_sum(int file, const char *path, int64_t begin, int64_t end, int64_t part, int64_t stride,
              uint32_t *crc) {
    FREED unsigned char *data = malloc_or_die((size_t)max64(1, min64(part, end - begin)));
    *crc = 0;
    for (int64_t at = begin; at < end; at += stride) {
        size_t n = (size_t)min64(part, end - at);
        if (!file_read_at(file, path, data, n, at)) { return false; }
        *crc = (uint32_t)crc32_z(*crc, data, n);
    }
    return true;
}

// The bytes begin..end of a file, and their checksum, which one thread computes.
typedef struct {
    int file;
    const char *path;
    int64_t begin, end;
    uint32_t crc;
} Part;

static bool sum_part(void *parts, int64_t i) {
    enum { PIECE = 1 << 20 };
    Part *p = (Part *)parts + i;
    return file_sum(p->file, p->path, p->begin, p->end, PIECE, PIECE, &p->crc);
}

bool file_checksum(int file, const char *path, int64_t bytes, uint32_t *crc) {
    enum { PARTS = 8, SMALLEST = 8 << 20 };
    Part parts[PARTS];
    int n = (int)max64(1, min64(PARTS, bytes / SMALLEST));
    for (int i = 0; i < n; i++) {
        parts[i] = (Part){file, path, .begin = bytes * i / n, .end = bytes * (i + 1) / n};
    }
    bool ok = threads_for(n, sum_part, parts);
    *crc = 0;
    for (const Part *p = parts; p < parts + n; p++) {
        *crc = (uint32_t)crc32_combine(*crc, p->crc, p->end - p->begin);
    }
    return ok;
}

Lock file_lock(int file, bool take) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int status;
    do {
        status = fcntl(file, take ? F_SETLK : F_GETLK, &lock);
    } while (status != 0 && errno == EINTR);
    if (status == 0) { return take || lock.l_type == F_UNLCK ? LOCK_OURS : LOCK_HELD; }
    return errno == EAGAIN || errno == EACCES ? LOCK_HELD : LOCK_NONE;
}

bool file_replace(const char *path, const void *data, size_t bytes) {
    char fresh[PATH_LENGTH], copy[PATH_LENGTH];
    FileWriter w;
    path_format(fresh, "%s.new", path);
    path_format(copy, "%s", path);
    // a file or link may have the name already; writing to a link would change its target
    if (unlink(fresh) != 0 && errno != ENOENT) { return fail_path(fresh, errno); }
    if (file_write(&w, fresh, data, bytes) &&
        (rename(fresh, path) == 0 || fail_path(path, errno))) {
        return folder_sync(dirname(copy));
    }
    unlink(fresh);
    return false;
}

bool folder_make(const char *path) {
    char part[PATH_LENGTH];
    path_format(part, "%s", path);
    for (char *p = part + 1;; p++) {
        if (*p != '/' && *p != '\0') { continue; }
        char end = *p;
        *p = '\0';
        struct stat info;
        int why = mkdir(part, 0777) != 0 ? errno : 0;
        bool leads = stat(part, &info) == 0;
        if (why != 0 && (why != EEXIST || !leads || !S_ISDIR(info.st_mode))) {
            return fail("%s: the folder could not be made: %s", part,
                        why != EEXIST ? strerror(why)
                        : leads       ? "a file of that name is in the way"
                                      : "a link that leads nowhere is in the way");
        }
        if (end == '\0') { return true; }
        *p = end;
    }
}

bool folder_sync(const char *path) {
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) { return fail_path(path, errno); }
    int why = fsync(folder) != 0 ? errno : 0;
    close(folder);
    // the others say that this file system cannot sync folders: CIFS, virtiofs (EBADF), gocryptfs
    // (EOPNOTSUPP)
    bool fails = why != 0 && why != EINVAL && why != EBADF && why != ENOSYS && why != EOPNOTSUPP;
    return !fails || fail_path(path, why);
}

char *folder_list(const char *path) {
    DIR *folder = opendir(path);
    char *names = malloc_or_die(1);
    size_t used = 0;
    errno = folder == NULL ? errno : 0;
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL; errno = 0) {
        size_t bytes = strlen(entry->d_name) + 1;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) { continue; }
        names = realloc_or_die(names, used + bytes + 1);
        memcpy(names + used, entry->d_name, bytes);
        used += bytes;
    }
    int why = errno;
    if (folder != NULL) { closedir(folder); }
    names[used] = '\0';
    if (why == 0) { return names; }
    free(names);
    fail_path(path, why);
    errno = why;
    return NULL;
}

bool folder_remove(const char *path) {
    if (unlink(path) == 0) { return true; }
    if (errno != EISDIR) { return fail_path(path, errno); }
    char *names = folder_list(path), file[PATH_LENGTH];
    bool ok = names != NULL;
    for (const char *name = names; ok && *name != '\0'; name += strlen(name) + 1) {
        ok = folder_remove(path_format(file, "%s/%s", path, name));
    }
    free(names);
    return ok && (rmdir(path) == 0 || fail_path(path, errno));
}

PathId path_id(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 ? (PathId){info.st_dev, info.st_ino} : (PathId){0, 0};
}

bool path_is(const char *path, PathId id) {
    PathId own = path_id(path);
    return own.inode != 0 && own.device == id.device && own.inode == id.inode;
}

bool path_exists(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0;
}

size_t pattern_add(char pattern[PATH_LENGTH], size_t used, const char *text, size_t n, bool exact) {
    for (; n > 0 && used + 2 < PATH_LENGTH; n--, text++) {
        if (exact && strchr("\\*?[]{},", *text) != NULL) { pattern[used++] = '\\'; }
        pattern[used++] = *text;
        pattern[used] = '\0';
    }
    return n > 0 ? PATH_LENGTH : used;
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// For glob(): a folder that cannot be read is not passed over, unless it is the file system's own.
static int unlisted(const char *folder, int error) {
    if (error == ENOENT || error == ENOTDIR || strcmp(path_name(folder), "lost+found") == 0) {
        return 0;
    }
    return !fail_path(folder, error);
}

// Writes the pattern with the special characters of leading folders that exist escaped. Returns
// false if no such folder exists, or if there is no room.
static bool escape_folders(char escaped[PATH_LENGTH], const char *pattern) {
    char text[PATH_LENGTH];
    size_t names = strlen(pattern); // length of the leading part of the path that exists literally
    path_format(text, "%s", pattern);
    while (names > 0 && !path_exists(text)) {
        char *slash = strrchr(text, '/');
        names = slash != NULL ? (size_t)(slash - text) : 0;
        text[names] = '\0';
    }
    size_t used = pattern_add(escaped, 0, text, names, true);
    used = pattern_add(escaped, used, pattern + names, strlen(pattern + names), false);
    return names > 0 && used < PATH_LENGTH;
}

int pattern_files(const char *pattern, glob_t *found) {
    char text[PATH_LENGTH];
    int status = escape_folders(text, pattern) ? glob(text, GLOB_BRACE, unlisted, found)
                                               : GLOB_NOMATCH;
    if (status == GLOB_NOMATCH) { status = glob(pattern, GLOB_BRACE, unlisted, found); }
    // glob sorts only within each alternative of a brace
    if (status == 0) { qsort(found->gl_pathv, found->gl_pathc, sizeof(char *), compare_names); }
    return status;
}

// Whether fnmatch() matches the path, with braces as glob() has them: {a,b} becomes @(a|b).
static bool matches(const char *pattern, const char *path) {
    char text[2 * PATH_LENGTH], *end = text;
    int depth = 0; // of braces
    for (const char *c = pattern; *c != '\0' && end + 2 < text + sizeof(text); c++) {
        bool closes = *c == '}' && depth > 0;
        if (*c == '{') { *end++ = '@'; }
        if (strchr("()|", *c) != NULL) { *end++ = '\\'; }
        *end++ = *c == '{' ? '(' : closes ? ')' : *c == ',' && depth > 0 ? '|' : *c;
        depth += (*c == '{') - closes;
        if (*c == '\\' && c[1] != '\0') { *end++ = *++c; }
    }
    *end = '\0';
    return fnmatch(text, path, FNM_PATHNAME | FNM_PERIOD | FNM_EXTMATCH) == 0;
}

bool pattern_matches(const char *pattern, const char *path) {
    char text[PATH_LENGTH];
    return (escape_folders(text, pattern) && matches(text, path)) || matches(pattern, path);
}
