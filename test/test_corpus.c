// The quick start's corpus: it has the requested size, is the same everywhere, and faults in its
// grammar are named.
#define main make_corpus_main
#include "../scripts/make_corpus.c"
#undef main

#include "processes.h"
#include "test.h"

#include <zlib.h>

enum { DEFAULT_BYTES = 1500000 };

static char village[PATH_LENGTH], *corpus;

SETUP() {
    const char *root = getenv("LLM8_ROOT"); // set by test/run.sh
    path_format(village, "%s/scripts/village.txt", root != NULL ? root : ".");
}

// ---- faults in the file -------------------------------------------------------------------------

// Runs in another process, because a process can read only one grammar.
static int read_and_write(int number, void *path) {
    (void)number;
    read_grammar(path);
    write_corpus(fopen("/dev/null", "w"), 20000, 1);
    return 0;
}

// Each fault is refused in one line, which says on which line of the file it is, and why.
TEST(faults_are_refused) {
    static const Says faults[] = {
        {"", "--grammar bad: no text can be read"},
        {"list x:\n1\n", "bad:3: '': the file ends without a scene"},
        {"# words\n\nlist x\n1\n", "bad:3: 'x': is a list without a colon"},
        {"list a | b:\n1 | 2\n3 | 4 | 5\n", "bad:3: '5': the line ends within a row"},
        {"Text.\n\nOne (or|two.\n", "bad:3: '(or|two.': is not closed"},
        {"Text.\nOne (or|two.\n", "bad:1: '(or|two.': is not closed"},
        {"(one (or|two) three).\n", "bad:1: '(one (or|two) three).': is not closed"},
        {"lits x | y:\n", "bad:1: '| y:': has no ( before it"},
        {"One) two.\n", "bad:1: ') two.': has no ( before it"},
        {"One [two.\n", "bad:1: '[two.': is not closed"},
        {"One] two.\n", "bad:1: '] two.': has no [ before it"},
        {"$one two.\n", "bad:1: '$one two.': stands for nothing"},
        {"$\n", "bad:1: '$': stands for nothing"},
        {"list x y: 1\n\n$x $y.\n", "bad:3: 'y': has no row in its list"},
        {"list x y: 1\n\n$x.one.\n", "bad:3: '1': has no cell in column one"},
        {"$Ida.home.\n", "bad:1: 'Ida': has no cell in column home"},
        {"[5+4].\n", "bad:1: '9': has no cell in column words"},
        {"[5 hens].\n", "bad:1: '[5 hens].': is no sum from 0 to 999"},
        {"[5+].\n", "bad:1: '[5+].': is no sum from 0 to 999"},
        {"[].\n", "bad:1: '[].': is no sum from 0 to 999"},
        {"[5#+1].\n", "bad:1: '[5#+1].': is no sum from 0 to 999"},
        {"[5-6#].\n", "bad:1: '[5-6#].': is no sum from 0 to 999"},
        {"[500*2#].\n", "bad:1: '[500*2#].': is no sum from 0 to 999"},
        {"[99999999999#].\n", "bad:1: '[99999999999#].': is no sum from 0 to 999"},
        {"list x: $x\n\n$x\n", "bad:3: '$x': grows too long"},
        {"list x: $x$x\n\n$x\n", "': grows too long"}};
    EACH (fault, faults) {
        Processes p;
        char path[] = "bad";
        text_write(path, fault->given);
        processes_run(&p, 1, read_and_write, path);
        FREED char *log = processes_log(&p);
        CHECK_EQUAL(p.status[0], EXIT_FAILURE);
        CHECK_CONTAINS(log, fault->expected);
        CHECK(strncmp(log, "error: ", 7) == 0 && strchr(log, '\n') == strrchr(log, '\n'));
    }
}

// The grammar with a few changed bytes is read or refused.
TEST(damage_is_no_crash) {
    static const char marks[] = "()[]|$:+=.\n 1A";
    for (uint64_t i = 0; i < 60; i++) {
        Processes p;
        char path[] = "bad";
        CLOSED(blob_free) Blob b = blob_read(village);
        for (uint64_t k = 0; k < 5; k++) {
            uint64_t at = rng_bits(i, 2 * k) % b.size, mark = rng_bits(i, 2 * k + 1);
            b.bytes[at] = (unsigned char)marks[mark % (sizeof(marks) - 1)];
        }
        blob_write(path, b.bytes, b.size);
        processes_run(&p, 1, read_and_write, path);
        CHECK(p.status[0] == EXIT_SUCCESS || p.status[0] == EXIT_FAILURE);
    }
}

// ---- the corpus ---------------------------------------------------------------------------------

static char *make_corpus(int64_t bytes, uint64_t seed, size_t *length) {
    char *written = NULL;
    FILE *out = open_memstream(&written, length);
    write_corpus(out, bytes, seed);
    fclose(out);
    return written;
}

// Reads the corpus for the tests below.
TEST(the_village_is_written) {
    size_t length;
    read_grammar(village);
    corpus = make_corpus(DEFAULT_BYTES, 1, &length);
    CHECK(length >= DEFAULT_BYTES);
}

TEST(has_the_size_asked_for) {
    static const int64_t sizes[] = {0, 1, 1000, 100000, DEFAULT_BYTES};
    for (int i = 0; i < 5; i++) {
        size_t length;
        FREED char *text = make_corpus(sizes[i], 1, &length);
        CHECK((int64_t)length >= sizes[i] && (int64_t)length < sizes[i] + 2000);
        CHECK(length == 0 || strcmp(text + length - 2, "\n\n") == 0);
        CHECK_BITS(text, corpus, length);
    }
}

// The checksum may change only when the grammar changes. Then read the new text: its sums are
// right, its sentences begin with a capital, and no word is so rare that a small model cannot learn
// it.
TEST(is_the_same_on_every_machine) {
    size_t length;
    FREED char *different = make_corpus(5000, 2, &length);
    CHECK(strncmp(different, corpus, 1000) != 0);
    CHECK_EQUAL(crc32(0, (const unsigned char *)corpus, (unsigned)strlen(corpus)), 2275809460);
}

// A terabyte was requested: the program ends at the first bytes that cannot be written.
TEST(stops_when_the_disk_is_full) {
    FILE *full = fopen("/dev/full", "w");
    write_corpus(full, (int64_t)1 << 40, 1);
    CHECK(ferror(full));
    fclose(full);
}
