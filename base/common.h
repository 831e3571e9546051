// What every module needs: errors, checked memory, small text helpers.
//
// There are two kinds of failure. A fault of the user or the system (a bad option, a damaged file,
// a full disk) is reported in one line that says what is wrong, with which value, and what to do. A
// function that finds such a fault stores this line as its thread's error text with fail(), and
// returns false. or_die() ends the program with that text. A fault of the programmer is an assert.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// BEGIN_C and END_C enclose the declarations that C and CUDA C++ share.
#ifdef __cplusplus
#define BEGIN_C extern "C" {
#define END_C }
#else
#define BEGIN_C
#define END_C
#endif

BEGIN_C

#define LLM8_VERSION "1.0"

// Marks functions that both the host and kernels call.
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#define PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))

// Decodes the UTF-8 character at the beginning of text..end, which is not empty. Returns how many
// bytes it has, or 0 if it is not valid.
static inline int utf8_decode(const unsigned char *text, const unsigned char *end, uint32_t *code) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000}; // the least code of each length
    int bytes = *text < 0x80 ? 1 : *text < 0xe0 ? 2 : *text < 0xf0 ? 3 : 4;
    if ((*text >= 0x80 && *text < 0xc0) || *text > 0xf4 || end - text < bytes) { return 0; }
    *code = bytes == 1 ? *text : *text & (0xffu >> (bytes + 1));
    for (int i = 1; i < bytes; i++) {
        if ((text[i] & 0xc0) != 0x80) { return 0; }
        *code = *code << 6 | (text[i] & 0x3fu);
    }
    bool surrogate = *code >= 0xd800 && *code < 0xe000;
    return *code >= least[bytes] && *code <= 0x10ffff && !surrogate ? bytes : 0;
}

// Copies a text, which may come from a file, as one printable line. Control characters, newlines,
// invisible marks (such as bidirectional ones) and bytes that are not UTF-8 become escapes such as
// \n or \x1b. Text that does not fit into `room` bytes is cut off. Returns out.
const char *printable(char *out, size_t room, const char *text);

// Copies a word into out, in quotes if a shell would change it otherwise, and returns out.
enum { SHELL_WORD = 4096 + 8 }; // room for any path
const char *shell_word(char out[SHELL_WORD], const char *word);

// Returns the plural ending of a noun after a count: 1 step, 2 steps.
static inline const char *plural(int64_t count) {
    return count == 1 ? "" : "s";
}

// Sets this thread's error text and returns false, so that a function can `return fail(...)`. The
// previous error text may be one of the arguments. printable() is applied to every error and
// warning.
bool fail(const char *format, ...) PRINTF_LIKE(1, 2);
// Returns the text of the last fail() in this thread.
const char *error_text(void);

// An error that is stored for later, or comes from another thread or rank.
typedef struct {
    char text[768];
} Error;
Error error_kept(void);       // a copy of this thread's last error
bool fail_again(Error error); // makes `error` this thread's last error; returns false

// Prints "error: ..." on stderr, in one write, so that lines of several processes do not mix.
void complain(const char *format, ...) PRINTF_LIKE(1, 2);

// Calls complain() and exits with status 1.
void die(const char *format, ...) PRINTF_LIKE(1, 2) __attribute__((noreturn));
// Dies with error_text() unless ok.
void or_die(bool ok);

// Sets a function that die() calls with the error's text before it exits. The function is called at
// most once, in the thread that called die_with(), and never in a forked process. NULL: none.
void die_with(void (*words)(const char *error));

// Prints "warning: ..." on stderr, unless warnings are muted.
void warn(const char *format, ...) PRINTF_LIKE(1, 2);
void warnings_mute(bool mute);

// After this call, errors and warnings begin with "rank N: ".
void errors_name_rank(int rank);

// Exit statuses other than 0 and 1. ranks/launch.c and scripts/restart.sh depend on them.
enum {
    EXIT_TOO_MANY_SKIPPED = 3,
    EXIT_LOST_RANK = 4,
    EXIT_WRONG_RESULTS = 5,
    EXIT_IN_USE = 6,
    EXIT_STOPPED_BY_SIGNAL = 75
};

enum { PATH_LENGTH = 1024 };

// Formats a path as printf does, and returns it; dies when the path does not fit.
const char *path_format(char path[PATH_LENGTH], const char *format, ...) PRINTF_LIKE(2, 3);
const char *path_name(const char *path); // the part after the last slash

// These functions never return NULL: if memory runs out, they die, and the message has the size.
// calloc_or_die returns zeroed memory. cJSON allocates with malloc_or_die too, so items that cJSON
// creates need no check for NULL.
void *malloc_or_die(size_t bytes);
void *calloc_or_die(size_t count, size_t size);
void *realloc_or_die(void *old, size_t bytes);
char *strdup_or_die(const char *text);

// Attributes of a local variable, which act at the end of the variable's block. FREED frees the
// memory that the variable points to. CLOSED passes the variable's address to `close`.
#define FREED __attribute__((cleanup(free_local)))
#define CLOSED(close) __attribute__((cleanup(close)))
static inline void free_local(void *pointer) {
    void *memory;
    memcpy(&memory, pointer, sizeof(memory));
    free(memory);
}

// Flushes stdout and exits with status 0; dies if the program's output could not be written.
void exit_answered(void) __attribute__((noreturn));
// Flushes a stream; fails if this or an earlier write to it failed.
bool output_flush(FILE *out);

double wall_seconds(void);    // the time of a monotonic clock
double process_seconds(void); // time since this process, or the one that forked it, started

// The format functions write a text such as "1.50 GiB" or "1h02m" into out, and return out.
const char *format_bytes(char out[32], double bytes);
const char *format_duration(char out[32], double seconds);
// Writes an integer with commas, as "124,439,808".
const char *format_count(char out[32], int64_t n);
// Writes a loss or a norm, as "3.4568", "4.15e+14" or "nan".
const char *format_number(char out[32], double x);
// Returns the text with which each line of output must begin: on a terminal the control sequence
// that clears the progress line, else "".
const char *line_start(int file);

static inline int64_t round_up64(int64_t x, int64_t multiple) {
    return (x + multiple - 1) / multiple * multiple;
}

static inline int min_int(int a, int b) {
    return a < b ? a : b;
}

static inline int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

END_C
