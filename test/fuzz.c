// The fuzzer: it mutates valid files, keeps inputs that reach new code, and stores each input that
// crashed, hung or ended the program. Each target is fuzzed for up to 20 seconds at a time, in its
// own process and folder, until the time is over or the given number of inputs were run.
//
//   fuzz [SECONDS [JOBS [RUNS [SEED]]]]   default: 60 seconds, a job a processor, no limit, seed 1
//   fuzz KIND FILE                        runs one input again
//
// The library is built with -fsanitize-coverage=trace-pc, so that the code calls
// __sanitizer_cov_trace_pc at every edge.
#include "fuzz.h"
#include "../base/rng.h"

#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    INPUT_MAX = 16384,
    EDGES = 1 << 16,
    HANG_SECONDS = 20,
    TURN_SECONDS = 20,
    TARGETS_MAX = 64,
    CRASHES_MAX = 50,
    EXIT_UNTESTED = 2
};

typedef struct {
    uint8_t *data;
    size_t size;
} Input;

const FuzzTarget *fuzz_target;

static struct {
    char folder[PATH_LENGTH]; // the present folder
    FILE *report;             // the terminal; what the library prints is discarded
    uint64_t seed, draws;
    Input *corpus;
    int count;
    uint8_t now[INPUT_MAX];
    size_t size; // size now
    int64_t runs, accepted;
    uint8_t edges[EDGES];
    uintptr_t last_location;
    bool new_edge;
} fuzz;

// Shared by all processes.
static struct {
    int64_t runs, turns;
    int crashes;
    struct {
        int64_t runs, accepted;
        int edges, crashes, untested; // edges: the most of one turn
    } of[TARGETS_MAX];
} * shared;

// ---- what happened ----------------------------------------------------------------------------

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
    uintptr_t location = (uintptr_t)__builtin_return_address(0) -
                         (uintptr_t)&__sanitizer_cov_trace_pc;
    location = (location >> 2) * 2654435761u;
    uint8_t *edge = &fuzz.edges[(location ^ fuzz.last_location) % EDGES];
    fuzz.new_edge = fuzz.new_edge || !*edge;
    *edge = 1;
    fuzz.last_location = location >> 1;
}

// Stores the input and ends the process. The input goes to build/ under LLM8_ROOT if that is set,
// because test/run.sh deletes the present folder; otherwise to the present folder.
static void crash(void) {
    const char *root = getenv("LLM8_ROOT");
    char path[PATH_LENGTH + 64];
    snprintf(path, sizeof(path), "%s%s/fuzz-crash-%d-%llu-%lld", root != NULL ? root : fuzz.folder,
             root != NULL ? "/build" : "", (int)(fuzz_target - fuzz_targets),
             (unsigned long long)fuzz.seed, (long long)fuzz.runs);
    FILE *file = fopen(path, "wb");
    if (file != NULL) {
        fwrite(fuzz.now, 1, fuzz.size, file);
        fclose(file);
    }
    fprintf(stderr, "\nagain with: fuzz '%s' %s\n", fuzz_target->name, path);
    _exit(EXIT_FAILURE);
}

static void crash_by_signal(int number) {
    fprintf(stderr, number == SIGALRM ? "an input takes longer than %d seconds\n" : "abort\n",
            HANG_SECONDS);
    crash();
}

// The linker replaces the library's die() by this. No content of a file may reach it.
void __wrap_die(const char *format, ...) PRINTF_LIKE(1, 2) __attribute__((noreturn));
void __wrap_die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputs("\ndie() was reached\n", stderr);
    crash();
    abort();
}

// ---- inputs -----------------------------------------------------------------------------------

static uint64_t draw(uint64_t below) {
    return rng_bits(fuzz.seed, fuzz.draws++) % below;
}

void fuzz_seed(const void *data, size_t size) {
    size = size < INPUT_MAX ? size : INPUT_MAX;
    fuzz.corpus = realloc_or_die(fuzz.corpus, (size_t)(fuzz.count + 1) * sizeof(Input));
    uint8_t *copy = malloc_or_die(size);
    memcpy(copy, data, size);
    fuzz.corpus[fuzz.count++] = (Input){copy, size};
}

// Writes bytes into the present input at an offset: over the bytes there, or inserted before them.
static void put(size_t at, const void *bytes, size_t n, bool between) {
    size_t room = INPUT_MAX - at;
    n = n < room ? n : room;
    if (between) {
        size_t moved = fuzz.size - at < room - n ? fuzz.size - at : room - n;
        memmove(fuzz.now + at + n, fuzz.now + at, moved);
        fuzz.size = at + n + moved;
    }
    memcpy(fuzz.now + at, bytes, n);
    fuzz.size = at + n > fuzz.size ? at + n : fuzz.size;
}

// Writes a number that often causes faults, as 1, 2, 4 or 8 bytes.
static void put_number(size_t at) {
    static const int64_t numbers[] = {
        0,     1,       -1,         16,         64,         100,       127,
        128,   255,     256,        1024,       32767,      32768,     65535,
        65536, 1 << 20, 2147483647, 2147483648, 4294967295, INT64_MAX, INT64_MIN};
    int64_t number = numbers[draw(sizeof(numbers) / sizeof(numbers[0]))];
    put(at, &number, (size_t)1 << draw(4), draw(4) == 0);
}

// Separated by bars; the last one is a zero byte.
static const char words[] =
    "0|-1|1e999|1e15|9007199254740993|18446744073709551616|9223372036854775807|0.5|null|true|{}|[]|"
    "[|"
    "{|}|]|\"|\\u0000|\\|,|:|/|..|../| #|\n|=|--|no-|--config=|0:0|00000000|0:9223372036854775807,|"
    "\"ranges\":\"|F32|BF16|I32|\"dtype\"|\"shape\":|\"data_offsets\":|\"__metadata__\":|nan|-0|"
    "\xff\xfe|\xef\xbb\xbf|";

static void put_word(size_t at) {
    const char *word = words;
    uint64_t count = 1;
    for (const char *c = words; *c != '\0'; c++) { count += *c == '|'; }
    for (uint64_t n = draw(count); n > 0; n--) { word = strchr(word, '|') + 1; }
    put(at, word, *word != '\0' ? strcspn(word, "|") : 1, draw(2) == 0);
}

// Replaces a run of digits by another number.
static void put_digits(size_t at) {
    size_t end = at;
    while (at > 0 && fuzz.now[at - 1] >= '0' && fuzz.now[at - 1] <= '9') { at--; }
    while (end < fuzz.size && fuzz.now[end] >= '0' && fuzz.now[end] <= '9') { end++; }
    memmove(fuzz.now + at, fuzz.now + end, fuzz.size - end);
    fuzz.size -= end - at;
    put_word(at);
}

static void mutate(void) {
    size_t at = fuzz.size > 0 ? draw(fuzz.size) : 0;
    if (draw(3) == 0) { at %= 64; } // headers are at the beginning
    size_t n = fuzz.size - at;
    const Input *other = &fuzz.corpus[draw((uint64_t)fuzz.count)];
    size_t from = other->size > 0 ? draw(other->size) : 0, length = draw(64) + 1;
    length = length < other->size - from ? length : other->size - from;
    uint8_t byte = (uint8_t)draw(256);
    switch (draw(9)) {
    case 0:
        if (n > 0) { fuzz.now[at] ^= (uint8_t)(1 << draw(8)); }
        break;
    case 1: put(at, &byte, 1, false); break;
    case 2: put_number(at); break;
    case 3: put_word(at); break;
    case 4: put_digits(at); break;
    case 5: fuzz.size = draw(4) == 0 ? at : fuzz.size; break;
    case 6: put(at, other->data + from, length, draw(2) == 0); break; // splice
    case 7:                                                           // delete
        length = draw(n + 1) % 64;
        memmove(fuzz.now + at, fuzz.now + at + length, n - length);
        fuzz.size -= length;
        break;
    default: put(at, &fuzz.now[at], n < 32 ? n : 32, true); break; // repeat
    }
}

// ---- running ----------------------------------------------------------------------------------

static void run_input(void) {
    // a copy of exactly its size, so that AddressSanitizer sees a read past its end
    uint8_t *copy = malloc_or_die(fuzz.size);
    memcpy(copy, fuzz.now, fuzz.size);
    fuzz.new_edge = false;
    fuzz.last_location = 0;
    fuzz.runs++;
    fuzz.accepted += fuzz_target->accepts(copy, fuzz.size);
    free(copy);
}

static void load_input(const Input *input) {
    memcpy(fuzz.now, input->data, input->size);
    fuzz.size = input->size;
}

static void begin_target(const FuzzTarget *target) {
    fuzz_target = target;
    fuzz.draws = fuzz.count = fuzz.size = 0;
    fuzz.runs = fuzz.accepted = 0;
    memset(fuzz.edges, 0, sizeof(fuzz.edges));
    target->seeds();
}

static void end_target(void) {
    for (int i = 0; i < fuzz.count; i++) { free(fuzz.corpus[i].data); }
    free(fuzz.corpus);
    fuzz.corpus = NULL;
}

// Fuzzes a target until the time is over or `most` inputs of all targets were run. False: the seeds
// were refused, or every input was accepted, so that nothing was tested.
static bool fuzz_turn(const FuzzTarget *target, double seconds, int64_t most) {
    double end = wall_seconds() + seconds;
    int edges = 0;
    int64_t index = target - fuzz_targets;
    begin_target(target);
    int seeds = fuzz.count;
    for (int i = 0; i < seeds; i++) {
        load_input(&fuzz.corpus[i]);
        run_input();
    }
    bool ok = fuzz.accepted == seeds;
    for (int64_t reported = 0; reported < most && wall_seconds() < end;) {
        alarm(HANG_SECONDS);
        for (int i = 0; i < 64; i++) {
            load_input(&fuzz.corpus[draw((uint64_t)fuzz.count)]);
            for (uint64_t n = 1 + draw(4); n > 0; n--) { mutate(); }
            run_input();
            if (fuzz.new_edge) { fuzz_seed(fuzz.now, fuzz.size); }
        }
        reported = __atomic_add_fetch(&shared->runs, 64, __ATOMIC_RELAXED);
    }
    alarm(0);
    for (int i = 0; i < EDGES; i++) { edges += fuzz.edges[i]; }
    __atomic_add_fetch(&shared->of[index].runs, fuzz.runs, __ATOMIC_RELAXED);
    __atomic_add_fetch(&shared->of[index].accepted, fuzz.accepted, __ATOMIC_RELAXED);
    if (edges > shared->of[index].edges) { shared->of[index].edges = edges; }
    ok = ok && fuzz.accepted < fuzz.runs && edges > 50;
    end_target();
    return ok;
}

// Fuzzes one target in its own process and the folder `slot`. Returns the process's exit status.
static int fuzz_apart(const FuzzTarget *target, int slot, uint64_t seed, double seconds,
                      int64_t most) {
    fflush(NULL);
    pid_t child = fork();
    if (child < 0) { die("no process could be started"); }
    if (child == 0) {
        char folder[32];
        snprintf(folder, sizeof(folder), "job-%d", slot);
        mkdir(folder, 0755);
        if (chdir(folder) != 0 || getcwd(fuzz.folder, sizeof(fuzz.folder)) == NULL) { _exit(1); }
        fuzz.seed = seed;
        if (target == fuzz_targets + fuzz_target_count) {
            unsetenv("LLM8_ROOT");
            if (freopen("planted.log", "w", stderr) == NULL) { _exit(EXIT_SUCCESS); }
        }
        _exit(fuzz_turn(target, seconds, most) ? EXIT_SUCCESS : EXIT_UNTESTED);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}

// Fuzzes the targets in turn until the time is over. Every target gets at least one turn.
static void take_turns(int slot, double end, double turn, int64_t most, uint64_t seed) {
    while (shared->crashes <= CRASHES_MAX) {
        int64_t next = __atomic_fetch_add(&shared->turns, 1, __ATOMIC_RELAXED);
        int64_t i = next % fuzz_target_count, round = next / fuzz_target_count;
        double left = round == 0 ? TURN_SECONDS : fmin(TURN_SECONDS, end - wall_seconds());
        if (round > 0 && (left <= 0.5 || shared->runs >= most)) { return; }
        int status = fuzz_apart(&fuzz_targets[i], slot, seed + (uint64_t)round, fmin(left, turn),
                                round == 0 ? INT64_MAX : most);
        if (status == EXIT_UNTESTED) { shared->of[i].untested = 1; }
        if (status == EXIT_FAILURE) {
            __atomic_add_fetch(&shared->of[i].crashes, 1, __ATOMIC_RELAXED);
            __atomic_add_fetch(&shared->crashes, 1, __ATOMIC_RELAXED);
        }
    }
}

static void fuzz_all(double seconds, int jobs, int64_t most, uint64_t seed) {
    double end = wall_seconds() + seconds;
    for (int slot = 0; slot < jobs; slot++) {
        pid_t child = fork();
        if (child < 0) { die("no process could be started"); }
        if (child > 0) { continue; }
        take_turns(slot, end, seconds * jobs / fuzz_target_count, most, seed);
        _exit(EXIT_SUCCESS);
    }
    while (wait(NULL) > 0) {}
}

static int run_again(const char *name, const char *path) {
    FILE *file = fopen(path, "rb");
    for (int i = 0; file != NULL && i < fuzz_target_count; i++) {
        if (strcmp(fuzz_targets[i].name, name) != 0) { continue; }
        begin_target(&fuzz_targets[i]);
        fuzz.size = fread(fuzz.now, 1, INPUT_MAX, file);
        fclose(file);
        run_input();
        end_target();
        fprintf(fuzz.report, "%s\n", fuzz.accepted > 0 ? "accepted" : "refused");
        return EXIT_SUCCESS;
    }
    fprintf(fuzz.report, "fuzz KIND FILE: no such kind or file\n");
    return EXIT_FAILURE;
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? strtod(argv[1], NULL) : 15;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int jobs = (int)max64(1, argc > 2 ? strtol(argv[2], NULL, 10) : processors);
    int64_t most = argc > 3 ? strtoll(argv[3], NULL, 10) : INT64_MAX;
    uint64_t seed = argc > 4 ? strtoull(argv[4], NULL, 10) : 1;
    int failed = 0;
    fuzz.report = fdopen(dup(STDOUT_FILENO), "w");
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fuzz.report == NULL || shared == MAP_FAILED || freopen("/dev/null", "w", stdout) == NULL) {
        return EXIT_FAILURE;
    }
    __sanitizer_set_death_callback(crash);
    signal(SIGALRM, crash_by_signal);
    signal(SIGABRT, crash_by_signal);
    if (argc == 3 && seconds <= 0) { return run_again(argv[1], argv[2]); }

    fprintf(fuzz.report, "  seed %llu, %.0f seconds, %d jobs\n", (unsigned long long)seed, seconds,
            jobs);
    const FuzzTarget *planted = &fuzz_targets[fuzz_target_count];
    if (fuzz_apart(planted, 0, 1, 20, INT64_MAX) != EXIT_FAILURE) {
        fprintf(fuzz.report, "  FAILED: the planted fault was not found\n");
        failed++;
    }
    fflush(fuzz.report);
    shared->runs = 0;
    fuzz_all(seconds, jobs, most, seed);
    int64_t all = 0;
    for (int i = 0; i < fuzz_target_count; i++) {
        bool ok = shared->of[i].crashes == 0 && shared->of[i].untested == 0;
        fprintf(fuzz.report, "  %-30s %10lld inputs, %9lld accepted, %5d edges, %d crashes%s\n",
                fuzz_targets[i].name, (long long)shared->of[i].runs,
                (long long)shared->of[i].accepted, shared->of[i].edges, shared->of[i].crashes,
                shared->of[i].untested > 0 ? ", FAILED: was not tested" : "");
        failed += !ok;
        all += shared->of[i].runs;
    }
    fprintf(fuzz.report, "  %-30s %10lld inputs, %d crashes\n", "all", (long long)all,
            shared->crashes);
    fprintf(fuzz.report, "%d passed, %d failed, 0 skipped\n", fuzz_target_count + 1 - failed,
            failed);
    fclose(fuzz.report);
    return failed > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
