// What every module needs: errors, checked memory, small text helpers.
//
// Two kinds of failure. A fault of the user or the system (a bad option, a damaged file, a full
// disk) is reported in one line that names what, which value and the remedy: functions that can
// meet one return false and leave its text in the thread, by fail(); or_die() ends the program with
// it. A fault of the programmer is an assert.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

// Around what C and CUDA C++ both call.
#ifdef __cplusplus
#define BEGIN_C extern "C" {
#define END_C }
#else
#define BEGIN_C
#define END_C
#endif

BEGIN_C

#define LLM8_VERSION "0.1.0"

// What both the host and kernels call.
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#define PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))

// Makes this the thread's error text and returns false, so that `return fail(...)` reads as what it
// is. The arguments may be the text before.
bool fail(const char *format, ...) PRINTF_LIKE(1, 2);
// The text of the last fail() in this thread.
const char *error_text(void);

// fail(), where a file may be whole: the system does not let it be read (no rights, too many open
// files, a disk's fault), or another version of this program has written it.
bool refuse(const char *format, ...) PRINTF_LIKE(1, 2);

// An error that is kept, or comes from another thread or rank.
typedef struct {
    char text[768];
    bool refused; // by refuse()
} Error;
Error error_kept(void);       // a copy of the last one
bool fail_again(Error error); // makes it the last one

// "error: ..." on stderr, in one write, so that lines of several processes stay whole.
void complain(const char *format, ...) PRINTF_LIKE(1, 2);

// complain, and exit status 1.
void die(const char *format, ...) PRINTF_LIKE(1, 2) __attribute__((noreturn));
// Dies with error_text() unless ok.
void or_die(bool ok);

// Before it ends, die calls this once with its text, in the thread (and process) that names it here
// alone; NULL: nothing.
void die_with(void (*words)(const char *error));

// "warning: ..." on stderr, unless they are muted.
void warn(const char *format, ...) PRINTF_LIKE(1, 2);
void warnings_mute(bool mute);

// From here on, errors and warnings begin with "rank N: ".
void errors_name_rank(int rank);

// Exit statuses besides 0 and 1, which ranks/launch.c and scripts/restart.sh tell apart.
enum {
    EXIT_TOO_MANY_SKIPPED = 3,
    EXIT_LOST_RANK = 4,
    EXIT_WRONG_RESULTS = 5,
    EXIT_STOPPED_BY_SIGNAL = 75
};

enum { PATH_LENGTH = 1024 };

// Builds a path like printf, and returns it; dies when it does not fit.
const char *path_format(char path[PATH_LENGTH], const char *format, ...) PRINTF_LIKE(2, 3);

// Never return NULL: they die, naming the size. calloc_or_die's memory is zero. cJSON allocates by
// malloc_or_die too, so its results need no checks.
void *malloc_or_die(size_t bytes);
void *calloc_or_die(size_t count, size_t size);
void *realloc_or_die(void *old, size_t bytes);
char *strdup_or_die(const char *text);

// Ends a program that has printed its answer; an output that could not be written is an error.
void exit_answered(void) __attribute__((noreturn));
// Flushes; fails where something could not be written.
bool output_flush(FILE *out);

double wall_seconds(void);    // monotonic
double process_seconds(void); // since this program, or the starter that forked it, was loaded

// "1.5 GiB", "512 B" / "1h02m", "3.1 s": into out, which is returned.
const char *format_bytes(char out[32], double bytes);
const char *format_duration(char out[32], double seconds);
// "3.4568", "4.15e+14", "nan": a loss or a norm.
const char *format_number(char out[32], double x);
// What a line of output begins with: on a terminal, what clears a line that is drawn over.
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
