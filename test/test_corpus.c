// The quick start's corpus: it has the requested size, is the same everywhere, its sums are right,
// and it is readable.
#define main make_corpus_main
#include "../scripts/make_corpus.c"
#undef main

#include "processes.h"
#include "test.h"

#include <assert.h>
#include <ctype.h>
#include <zlib.h>

enum { DEFAULT_BYTES = 1500000, MAX_WORDS = 400000 };

static char village[PATH_LENGTH], *corpus, *words[MAX_WORDS];
static int word_count; // of the corpus, in words

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
        Blob b = blob_read(village);
        for (uint64_t k = 0; k < 5; k++) {
            uint64_t at = rng_bits(i, 2 * k) % b.size, mark = rng_bits(i, 2 * k + 1);
            b.bytes[at] = (unsigned char)marks[mark % (sizeof(marks) - 1)];
        }
        blob_write(path, b.bytes, b.size);
        free(b.bytes);
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

static int compare_words(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// ---- sums ---------------------------------------------------------------------------------------

// The sentences in which the corpus has sums: # is a number in words or digits, * is any word. The
// last number is the result of the first and the second.
static const struct {
    const char *pattern;
    char sign;
} sums[] = {{"# + # = #", '+'},
            {"# - # = #", '-'},
            {"# x # = #", '*'},
            {"# plus # is #", '+'},
            {"# minus # is #", '-'},
            {"# times # is #", '*'},
            {"# and # make #", '+'},
            {"minus one is # we say #", '='},
            {"what is # plus # asked simon #", '+'},
            {"what is # plus # asked simon the teacher #", '+'},
            {"what is # times # #", '*'},
            {"picked # and * picked # together they had #", '+'},
            {"# ducks on the water and # ducks on the bank that makes #", '+'},
            {"# coins said * if you buy # you pay #", '*'},
            {"costs # coins so # cost #", '*'},
            {"costs # coins so * cost * coins and # cost #", '*'}};
enum { SUMS = COUNT(sums) };

// Returns the number that a word is; -1: it is none.
static int number_of(const char *word) {
    static const char *const names[] = {
        "no",       "one",     "two",     "three",     "four",     "five",     "six",
        "seven",    "eight",   "nine",    "ten",       "eleven",   "twelve",   "thirteen",
        "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
        "thirty",   "forty",   "fifty",   "sixty",     "seventy",  "eighty",   "ninety"};
    if (isdigit((unsigned char)*word)) { return atoi(word); }
    for (int i = 0; i < 28; i++) {
        size_t n = strlen(names[i]);
        int value = i < 20 ? i : 10 * (i - 18);
        if (strncmp(word, names[i], n) != 0) { continue; }
        if (word[n] == '\0') { return value; }
        if (word[n] == '-') { return value + number_of(word + n + 1); }
    }
    return -1;
}

// Cuts text in place into words in lower case, without the punctuation around them.
static int split_words(char *text, char **into) {
    static const char marks[] = " \n.,:;!?\"";
    int count = 0;
    for (char *p = text; *p != '\0'; p++) { *p = (char)tolower((unsigned char)*p); }
    for (char *p = strtok(text, marks); p != NULL; p = strtok(NULL, marks)) {
        char *possessive = strstr(p, "'s");
        if (possessive != NULL) { *possessive = '\0'; }
        assert(count < MAX_WORDS - 1);
        into[count++] = p;
    }
    into[count] = NULL;
    return count;
}

// Reads the corpus for the tests below.
TEST(the_village_is_written) {
    size_t length;
    read_grammar(village);
    corpus = make_corpus(DEFAULT_BYTES, 1, &length);
    word_count = split_words(strdup_or_die(corpus), words);
    CHECK(word_count > 0);
}

// Whether words match a pattern; found: its numbers. numbers: the number that each word is, or -1.
static bool match(char **at, const int *numbers, const char *pattern, int found[3]) {
    for (size_t n; *pattern != '\0'; pattern += n + (pattern[n] == ' '), at++, numbers++) {
        n = strcspn(pattern, " ");
        if (*at == NULL) { return false; }
        if (*pattern == '#') {
            if (*numbers < 0) { return false; }
            *found++ = *numbers;
        } else if (*pattern != '*' && (strncmp(pattern, *at, n) != 0 || (*at)[n] != '\0')) {
            return false;
        }
    }
    return true;
}

static bool is_right(char sign, const int n[3]) {
    switch (sign) {
    case '+': return n[0] + n[1] == n[2];
    case '-': return n[0] - n[1] == n[2];
    case '*': return n[0] * n[1] == n[2];
    default: return n[0] == n[1];
    }
}

// Counts the sums of each kind; returns how many are wrong, the first of them in `wrong`.
static int check_sums(char **at, int count, int seen[SUMS], char wrong[200]) {
    int faults = 0, n[3], *numbers = malloc_or_die((size_t)count * sizeof(int));
    for (int i = 0; i < count; i++) { numbers[i] = number_of(at[i]); }
    memset(seen, 0, SUMS * sizeof(int));
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < SUMS; k++) {
            if (!match(at + i, numbers + i, sums[k].pattern, n)) { continue; }
            seen[k]++;
            if (is_right(sums[k].sign, n)) { continue; }
            if (faults++ == 0) { snprintf(wrong, 200, "%s: %d, %d", sums[k].pattern, n[0], n[1]); }
        }
    }
    free(numbers);
    return faults;
}

TEST(planted_wrong_sums_are_found) {
    static const char *const texts[] = {
        "2 + 3 = 6",
        "\"Nine minus two is eight,\" he said.",
        "8 x 7 = 54",
        "Three and four make eight.",
        "9 - 4 = 4",
        "\"What is two plus two?\" asked Simon.\n\"Five,\" said Leo.",
        "Four times twenty-one is eighty-five",
        "One costs six coins, so seven cost forty coins.",
        "One hen costs two coins, so three cost six coins and four cost nine."};
    for (int i = 0; i < COUNT(texts); i++) {
        char text[200], wrong[200], *few[50];
        int seen[SUMS];
        snprintf(text, sizeof(text), "%s", texts[i]);
        CHECK_EQUAL(check_sums(few, split_words(text, few), seen, wrong), 1);
    }
}

TEST(every_sum_is_right) {
    char wrong[200] = "";
    int seen[SUMS], equations = 0;
    check_sums(words, word_count, seen, wrong);
    CHECK_TEXT(wrong, "");
    for (int k = 0; k < SUMS; k++) {
        if (!(seen[k] >= 40)) { test_fail(__FILE__, __LINE__, "%s: %d", sums[k].pattern, seen[k]); }
    }
    for (int i = 0; i < word_count; i++) { equations += strcmp(words[i], "=") == 0; }
    CHECK_EQUAL(equations, seen[0] + seen[1] + seen[2]); // there is no other kind of sum
}

// ---- size, repetition, words --------------------------------------------------------------------

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

// The checksum below may change only when the grammar changes.
TEST(is_the_same_on_every_machine) {
    size_t length;
    FREED char *different = make_corpus(5000, 2, &length);
    CHECK(strncmp(different, corpus, 1000) != 0);
    CHECK_EQUAL(crc32(0, (const unsigned char *)corpus, 50000), 3015969939);
}

// A terabyte was requested: the program ends at the first bytes that cannot be written.
TEST(stops_when_the_disk_is_full) {
    FILE *full = fopen("/dev/full", "w");
    write_corpus(full, (int64_t)1 << 40, 1);
    CHECK(ferror(full));
    fclose(full);
}

TEST(is_plain_text_with_sentences) {
    for (const char *c = corpus; *c != '\0'; c++) { CHECK(*c == '\n' || (*c >= 32 && *c < 127)); }
    static const char *const slips[] = {
        "  ",    " .",   " ,",  "..",     "(",          ")",        "[",        "]",      "{",
        "}",     "$",    "|",   "`",      " one coins", " a apple", " an hen",  "\n\n\n", ". he",
        ". she", "\nhe", " i ", "sheeps", "gooses",     " a old",   "one years"};
    for (int i = 0; i < COUNT(slips); i++) {
        char *slip = strstr(corpus, slips[i]);
        if (slip != NULL) { test_fail(__FILE__, __LINE__, "\"%s\": %.60s", slips[i], slip); }
    }
}

// A small model cannot learn a word that occurs only a few times.
TEST(no_word_is_rare) {
    int different = 0;
    qsort(words, (size_t)word_count, sizeof(char *), compare_words);
    for (int i = 0, next; i < word_count; i = next) {
        for (next = i; next < word_count && strcmp(words[i], words[next]) == 0;) { next++; }
        bool number = number_of(words[i]) >= 0;
        different += !number;
        if (!number && next - i < 5) {
            test_fail(__FILE__, __LINE__, "%s: %d times", words[i], next - i);
        }
    }
    CHECK(different > 500);
}

TEST(paragraphs_rarely_repeat) {
    char **paragraphs = malloc_or_die(MAX_WORDS * sizeof(char *));
    int count = 0, repeated = 0;
    for (char *p = corpus, *end; (end = strstr(p, "\n\n")) != NULL; p = end + 2) {
        *end = '\0';
        paragraphs[count++] = p;
    }
    qsort(paragraphs, (size_t)count, sizeof(char *), compare_words);
    for (int i = 1; i < count; i++) { repeated += strcmp(paragraphs[i - 1], paragraphs[i]) == 0; }
    CHECK(count > 3000);
    CHECK(repeated * 100 <= 3 * count);
    free(paragraphs);
}
