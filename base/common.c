#include "common.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Runs before main() in every program. Opens /dev/null for each closed descriptor of standard
// input, output and error. Otherwise a file that is opened later, such as a checkpoint's, would get
// the descriptor, and printed text would go into that file. Raises the limit of open files to its
// maximum, because shards and the files of a checkpoint stay open.
__attribute__((constructor)) static void open_standard_files(void) {
    struct rlimit files;
    int file = 0;
    while (file >= 0 && file <= STDERR_FILENO) { file = open("/dev/null", O_RDWR); }
    if (file >= 0) { close(file); }
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

// Returns how many bytes the first character of a text has, or 0 if the character is not printable
// or not valid UTF-8.
static int printable_bytes(const char *text) {
    const unsigned char *s = (const unsigned char *)text;
    uint32_t c = 0;
    int bytes = utf8_decode(s, s + strnlen(text, 4), &c);
    bool control = c < ' ' || (c >= 0x7f && c < 0xa0);
    bool mark = (c >= 0x200b && c <= 0x200f) || (c >= 0x2028 && c <= 0x202e) ||
                (c >= 0x2060 && c <= 0x206f) || c == 0xfeff;
    return control || mark ? 0 : bytes;
}

const char *printable(char *out, size_t room, const char *text) {
    size_t used = 0;
    while (*text != '\0') {
        char escape[8];
        int bytes = printable_bytes(text), length = bytes;
        if (bytes == 0) {
            length = snprintf(escape, sizeof(escape), *text == '\n' ? "\\n" : "\\x%02x",
                              (unsigned char)*text);
        }
        if (used + (size_t)length >= room) { break; }
        memcpy(out + used, bytes > 0 ? text : escape, (size_t)length);
        used += (size_t)length;
        text += bytes > 0 ? bytes : 1;
    }
    out[used] = '\0';
    return out;
}

const char *shell_word(char out[SHELL_WORD], const char *word) {
    const char *edge = *word == '\0' || strpbrk(word, " \t\n'\"\\$`*?[]{}()<>|&;#~!=^") ? "'" : "";
    strcpy(out, edge);
    for (size_t used = strlen(out); *word != '\0' && used + 6 < SHELL_WORD; word++) {
        strcpy(out + used, *word == '\'' ? "'\\''" : (char[]){*word, '\0'});
        used += strlen(out + used);
    }
    return strcat(out, edge);
}

static _Thread_local Error failure;

bool fail(const char *format, ...) {
    Error next = {0}; // a copy, because failure.text may be one of the arguments
    char text[sizeof(next.text)];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    printable(next.text, sizeof(next.text), text);
    return fail_again(next);
}

const char *error_text(void) {
    return failure.text;
}

Error error_kept(void) {
    return failure;
}

bool fail_again(Error error) {
    failure = error;
    return false;
}

void or_die(bool ok) {
    if (!ok) { die("%s", failure.text); }
}

static char rank_tag[24]; // global, because callers of die() do not know the rank

void errors_name_rank(int rank) {
    snprintf(rank_tag, sizeof(rank_tag), "rank %d: ", rank);
}

static void print_tagged(const char *tag, const char *format, va_list args) {
    char line[4096], text[4096];
    // clears the progress line if stdout and stderr are terminals
    const char *start = isatty(STDOUT_FILENO) ? line_start(STDERR_FILENO) : "";
    int used = snprintf(line, sizeof(line), "%s%s%s", start, rank_tag, tag);
    vsnprintf(text, sizeof(text), format, args);
    printable(line + used, sizeof(line) - (size_t)used - 1, text);
    strcat(line, "\n");
    fflush(stdout);
    fputs(line, stderr);
}

void complain(const char *format, ...) {
    va_list args;
    va_start(args, format);
    print_tagged("error: ", format, args);
    va_end(args);
}

static void (*last_words)(const char *error); // NULL: not set, or already called by die()
static long speaker;                          // the thread in which die() may call last_words

void die_with(void (*words)(const char *error)) {
    last_words = words;
    speaker = syscall(SYS_gettid);
}

void die(const char *format, ...) {
    char text[4096], error[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    printable(error, sizeof(error), text);
    complain("%s", error);
    void (*words)(const char *) = last_words;
    if (words != NULL && syscall(SYS_gettid) == speaker) {
        last_words = NULL; // because words() may call die()
        words(error);
    }
    exit(EXIT_FAILURE);
}

bool output_flush(FILE *out) {
    return (fflush(out) == 0 && !ferror(out)) ||
           fail("the standard output could not be written: %s", strerror(errno));
}

void exit_answered(void) {
    or_die(output_flush(stdout));
    exit(EXIT_SUCCESS);
}

static bool muted;

void warnings_mute(bool mute) {
    muted = mute;
}

void warn(const char *format, ...) {
    va_list args;
    if (muted) { return; }
    va_start(args, format);
    print_tagged("warning: ", format, args);
    va_end(args);
}

const char *path_format(char path[PATH_LENGTH], const char *format, ...) {
    va_list args;
    va_start(args, format);
    int length = vsnprintf(path, PATH_LENGTH, format, args);
    va_end(args);
    if (length < 0 || length >= PATH_LENGTH) {
        die("a path is longer than %d characters: %.80s...", PATH_LENGTH - 1, path);
    }
    return path;
}

const char *path_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

void *malloc_or_die(size_t bytes) {
    return realloc_or_die(NULL, bytes);
}

void *calloc_or_die(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size > 0 ? size : 1);
    if (p == NULL) { die("out of memory: %zu x %zu bytes could not be allocated", count, size); }
    return p;
}

void *realloc_or_die(void *old, size_t bytes) {
    void *p = realloc(old, bytes > 0 ? bytes : 1);
    if (p == NULL) { die("out of memory: %zu bytes could not be allocated", bytes); }
    return p;
}

char *strdup_or_die(const char *text) {
    size_t bytes = strlen(text) + 1;
    return memcpy(malloc_or_die(bytes), text, bytes);
}

// If an allocation returned NULL, cJSON would leave items out. malloc_or_die() never returns NULL.
__attribute__((constructor)) static void check_memory_of_cjson(void) {
    cJSON_InitHooks(&(cJSON_Hooks){malloc_or_die, free});
}

double wall_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double loaded_at;

__attribute__((constructor)) static void note_start(void) {
    loaded_at = wall_seconds();
}

double process_seconds(void) {
    return wall_seconds() - loaded_at;
}

const char *format_bytes(char out[32], double bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    while (bytes >= 1024.0 && unit < 4) {
        bytes /= 1024.0;
        unit++;
    }
    snprintf(out, 32, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
    return out;
}

const char *format_count(char out[32], int64_t n) {
    char digits[32];
    int length = snprintf(digits, sizeof(digits), "%lld", (long long)n), to = 0;
    for (int i = 0; i < length; i++) {
        bool comma = i > 0 && (length - i) % 3 == 0 && digits[i - 1] != '-';
        if (comma) { out[to++] = ','; }
        out[to++] = digits[i];
    }
    out[to] = '\0';
    return out;
}

const char *line_start(int file) {
    return isatty(file) ? "\r\033[K" : "";
}

const char *format_number(char out[32], double x) {
    snprintf(out, 32, fabs(x) < 1e5 ? "%.4f" : "%.3g", isnan(x) ? fabs(x) : x);
    return out;
}

const char *format_duration(char out[32], double seconds) {
    long s = (long)(seconds + 0.5);
    if (!(seconds >= 0 && seconds < 1e9)) {
        snprintf(out, 32, "?");
    } else if (s < 60) {
        snprintf(out, 32, "%lds", s);
    } else if (s < 3600) {
        snprintf(out, 32, "%ldm%02lds", s / 60, s % 60);
    } else if (s < 86400) {
        snprintf(out, 32, "%ldh%02ldm", s / 3600, s % 3600 / 60);
    } else {
        snprintf(out, 32, "%ldd%02ldh", s / 86400, s % 86400 / 3600);
    }
    return out;
}
