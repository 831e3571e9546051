// Writes the corpus of the quick start: plain English about one village. The text is made from a
// grammar, so that the repository contains no text of others. The same seed gives the same text on
// every machine.
//
//   ./make_corpus --bytes 1500000 --seed 1 > corpus.txt
//
// A model can learn something over every distance in the text: spelling; pronouns; tense; who lives
// where, who sells what at which price, and who is whose sister; the order of days and months;
// sums, which are all correct. So a small model's samples show how much it has learned.
//
// The words and the scenes are in village.txt, which begins with a description of its language.
#include "../base/common.h"
#include "../base/rng.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LISTS = 100, SCENES = 200, NAMES = 4, TEXT = 8192 };

typedef struct {
    char *names[NAMES];
    int columns, rows, cell_count; // `rows` does not count the head
    // one row after another. The first row is the head: the list's names, then the columns' names
    char **cells;
} List;

typedef struct {
    const char *text;
    int line;
} Scene;

static struct {
    const char *path;
    int line; // for messages: the line that is read, or that of the scene that is expanded
    int list_count, scene_count;
    List lists[LISTS];
    Scene scenes[SCENES];
} grammar;

// A scene whose marks ($name, [sum], (choice)) are being expanded.
typedef struct {
    uint64_t key;    // key of its random numbers
    int splices;     // how many replacements were made in `text` so far
    char text[TEXT]; // begins with a newline, which is not printed
} Story;

static void __attribute__((noreturn)) give_up(const char *what, const char *why) {
    int shown = (int)min64(40, (int64_t)strcspn(what, "\n"));
    die("%s:%d: '%.*s': %s", grammar.path, grammar.line, shown, what, why);
}

// ---- the file -----------------------------------------------------------------------------------

static void read_cells(List *list, char *line) {
    while (line != NULL) {
        char *cell = strsep(&line, "|"), *end = cell + strlen(cell);
        while (end > cell && end[-1] == ' ') { *--end = '\0'; }
        list->cells = realloc_or_die(list->cells, (size_t)(list->cell_count + 1) * sizeof(char *));
        list->cells[list->cell_count++] = cell + strspn(cell, " ");
    }
    if (list->columns == 0) { list->columns = list->cell_count; }
    list->rows = list->cell_count / list->columns - 1;
    if (list->cell_count % list->columns != 0) {
        give_up(list->cells[list->cell_count - 1], "the line ends within a row");
    }
}

static void read_grammar(const char *path) {
    char *text = NULL;
    size_t capacity = 0;
    FILE *file = fopen(path, "r");
    ssize_t n = file == NULL ? 0 : getdelim(&text, &capacity, '\0', file);
    if (n <= 0 || text[n - 1] == '\0') {
        die("--grammar %s: no text can be read; ours is in scripts/village.txt", path);
    }
    fclose(file);
    grammar.path = path;
    List *list = NULL;
    bool in_scene = false;
    for (char *line, *next = text; (line = strsep(&next, "\n")) != NULL;) {
        grammar.line++;
        if (strncmp(line, "list ", 5) == 0) {
            char *head = strsep(&line, ":") + 5;
            if (line == NULL || grammar.list_count == LISTS) {
                give_up(head, "is a list without a colon, or one too many");
            }
            list = &grammar.lists[grammar.list_count++];
            read_cells(list, head);
            head = list->cells[0];
            for (int i = 0; i < NAMES; i++) { list->names[i] = strsep(&head, " "); }
            if (*line != '\0') { read_cells(list, line); }
        } else if (*line == '\0' || *line == '#') {
            list = NULL;
            in_scene = false;
        } else if (list != NULL) {
            read_cells(list, line);
        } else if (in_scene) {
            line[-1] = '\n';
        } else {
            if (grammar.scene_count == SCENES) { give_up(line, "is one scene too many"); }
            grammar.scenes[grammar.scene_count++] = (Scene){line, grammar.line};
            in_scene = true;
        }
    }
    if (grammar.scene_count == 0) { give_up("", "the file ends without a scene"); }
}

// ---- words --------------------------------------------------------------------------------------

// Returns the first cell of the row that a story draws for a name: at random, but always the same
// in one story. Returns NULL if no list has the name.
static const char *drawn(const Story *s, const char *name) {
    for (int l = 0; l < grammar.list_count; l++) {
        const List *list = &grammar.lists[l];
        for (int i = 0; i < NAMES && list->names[i] != NULL; i++) {
            if (strcmp(list->names[i], name) != 0) { continue; }
            if (i >= list->rows) { give_up(name, "has no row in its list"); }
            uint64_t key = rng_bits(s->key, (uint64_t)l), rows = (uint64_t)list->rows;
            return list->cells[(int)(rng_permute(key, rows, (uint64_t)i) + 1) * list->columns];
        }
    }
    return NULL;
}

// Returns the cell in the column named `column` of the row whose first cell is `word`.
static const char *find(const char *column, const char *word) {
    for (const List *list = grammar.lists; list < grammar.lists + grammar.list_count; list++) {
        for (int i = list->columns; i < list->cell_count; i++) {
            int c = i % list->columns;
            if (c > 0 && strcmp(list->cells[c], column) == 0 &&
                strcmp(list->cells[i - c], word) == 0) {
                return list->cells[i];
            }
        }
    }
    char why[80];
    snprintf(why, sizeof(why), "has no cell in column %s", column);
    give_up(word, why);
}

// ---- texts --------------------------------------------------------------------------------------
// Marks are expanded in place, from left to right. A mark is replaced by its text; then the marks
// in this text are expanded. The text to the left of `at` is complete.

static void splice(Story *s, char *at, const char *end, const char *text) {
    size_t n = strlen(text), rest = strlen(end) + 1;
    if (++s->splices == TEXT || (size_t)(at - s->text) + n + rest > sizeof(s->text)) {
        give_up(at, "grows too long");
    }
    memmove(at + n, end, rest);
    memcpy(at, text, n);
}

// Replaces (one|two) by one of the alternatives, drawn at random.
static void tell_choice(Story *s, char *at) {
    char *from = at + 1, *end = from + strcspn(from, "()");
    uint64_t count = 1;
    if (*end != ')') { give_up(at, "is not closed"); }
    for (const char *c = at; c < end; c++) { count += *c == '|'; }
    for (uint64_t i = rng_bits(~s->key, (uint64_t)s->splices) % count; i > 0; i--) {
        from = strchr(from, '|') + 1;
    }
    splice(s, from + strcspn(from, "|)"), end + 1, "");
    splice(s, at, from, "");
}

// Replaces $day or $A.home by a cell. In $7.words, 7 is not the name of a list, so the row whose
// first cell is 7 is looked up.
static void tell_name(Story *s, char *at) {
    char word[32], *end = at;
    const char *value = NULL;
    do {
        char name[32] = "";
        int n = 0;
        sscanf(++end, "%31[A-Za-z0-9]%n", name, &n);
        end += n;
        value = value != NULL ? find(name, value) : drawn(s, name);
        if (value == NULL) { value = strcpy(word, name); }
    } while (*end == '.' && islower((unsigned char)end[1]));
    if (value == word) { give_up(at, "stands for nothing"); }
    splice(s, at, end, value);
}

// Replaces [5+4*2] by the result in words, or [5+4*2#] by the result in digits. Marks inside the
// brackets have been replaced already.
static void tell_sum(Story *s, char *open, const char *close) {
    const char *end = close[-1] == '#' ? close - 1 : close, *at = open;
    char text[64], sign = '+';
    int value = 0;
    for (; at < end; sign = *at) {
        int n = (int)strspn(++at, "0123456789"), next = n < 4 ? atoi(at) : 0;
        value = sign == '+' ? value + next : (sign == '-' ? value - next : value * next);
        at += n;
        if (n < 1 || n > 3 || value < 0 || value > 999 || (at < end && !strchr("+-*", *at))) {
            give_up(open, "is no sum from 0 to 999");
        }
    }
    if (end < close) {
        snprintf(text, sizeof(text), "%d", value);
    } else if (value > 20 && value % 10 > 0) {
        snprintf(text, sizeof(text), "[%d]-[%d]", value - value % 10, value % 10);
    } else {
        snprintf(text, sizeof(text), "$%d.words", value);
    }
    splice(s, open, close + 1, text);
}

// Changes "a" to "an" before a vowel, and makes the first letter of a sentence a capital. A ! or ?
// before a closing quotation mark does not end a sentence, because "asked Mila" may follow.
static void tell_letter(Story *s, char *at) {
    const char *before = at - 1;
    int quotes = 0;
    for (; *before == ' ' || *before == '"'; before--) { quotes += *before == '"'; }
    bool begins = strchr(".\n", *before) != NULL || (strchr("!?", *before) != NULL && quotes != 1);
    bool a = at[-1] == ' ' && strchr("aA", at[-2]) != NULL && !isalnum((unsigned char)at[-3]);
    if (begins) { *at = (char)toupper((unsigned char)*at); }
    if (a && strchr("aeiou", *at) != NULL) { splice(s, at - 1, at - 1, "n"); }
}

static void tell(Story *s, const char *text) {
    char *at = s->text + 1, *open = NULL;
    splice(s, at, at, text);
    while (*at != '\0') {
        switch (*at) {
        case '(': tell_choice(s, at); break;
        case '$': tell_name(s, at); break;
        case '[': open = at++; break;
        case ']':
            if (open == NULL) { give_up(at, "has no [ before it"); }
            tell_sum(s, open, at);
            at = open;
            open = NULL;
            break;
        default:
            if (strchr("|)", *at) != NULL) { give_up(at, "has no ( before it"); }
            if (strncmp(at, "\n ", 2) == 0) { splice(s, at, at + 1, ""); } // the line continues
            tell_letter(s, at++);
        }
    }
    if (open != NULL) { give_up(open, "is not closed"); }
}

static void write_corpus(FILE *out, int64_t bytes, uint64_t seed) {
    uint64_t count = (uint64_t)grammar.scene_count;
    int64_t written = 0;
    // a round tells each scene once, in an order of its own
    for (uint64_t i = 0; written < bytes && !ferror(out); i++) {
        Scene scene = grammar.scenes[rng_permute(rng_bits(seed, i / count), count, i % count)];
        Story s = {.key = rng_bits(~seed, i), .text = "\n"};
        grammar.line = scene.line;
        tell(&s, scene.text);
        written += fprintf(out, "%s\n\n", s.text + 1);
    }
}

// ---- options ------------------------------------------------------------------------------------

static int64_t parse_count(const char *name, const char *text, int64_t max) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (*text == '\0' || *end != '\0' || errno != 0 || value < 0 || value > max) {
        die("--%s %s: must be a whole number from 0 to %lld", name, text, (long long)max);
    }
    return value;
}

int main(int argc, char **argv) {
    static const struct option names[] = {{"bytes", required_argument, NULL, 'b'},
                                          {"seed", required_argument, NULL, 's'},
                                          {"grammar", required_argument, NULL, 'g'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    int64_t bytes = 1500000, seed = 1;
    char program[PATH_LENGTH] = "", path[PATH_LENGTH];
    if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0) { program[0] = '\0'; }
    path_format(path, "%s/scripts/village.txt", dirname(program));
    opterr = 0; // this program prints the error
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'b': bytes = parse_count("bytes", optarg, (int64_t)1 << 40); break;
        case 's': seed = parse_count("seed", optarg, INT64_MAX); break;
        case 'g': path_format(path, "%s", optarg); break;
        case 'h':
            printf("Usage: %s [--bytes 1500000] [--seed 1] [--grammar FILE] > corpus.txt\n"
                   "Writes whole paragraphs of simple English until there are that many bytes.\n"
                   "The words are in FILE, or else in scripts/village.txt beside this program.\n",
                   argv[0]);
            return EXIT_SUCCESS;
        default: die("%s: no such option, or its value is missing (--help)", argv[optind - 1]);
        }
    }
    if (optind < argc) { die("unexpected argument '%s' (--help)", argv[optind]); }
    read_grammar(path);
    write_corpus(stdout, bytes, (uint64_t)seed);
    if (fflush(stdout) != 0 || ferror(stdout)) { die("the corpus could not be written"); }
    return EXIT_SUCCESS;
}
