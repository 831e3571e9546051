// Writes the corpus of the quick start: plain English about one village, made from a grammar, so
// that the repository ships no third-party text. The same bytes on every machine.
//
//   ./make_corpus --bytes 1500000 --seed 1 > corpus.txt
//
// There is something to learn at every range: spelling; agreement of verbs and pronouns with their
// subjects; tense; who lives where, sells what at which price and is whose sister; the order of
// days and months; sums, which are all right. A small model's samples show how far it has come.
//
// The words and the rules are in village.txt, which begins with a description of its language.
#include "../base/common.h"
#include "../base/rng.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PARAGRAPHS = 200, CARDS = 1000, TEXT = 8192 };

typedef struct {
    char kind; // of list, choice, table and scene, the first letter
    int line;  // where it begins
    int columns, rows, cell_count;
    int row;      // of a list: the one drawn for the scene being told, from 0
    char **cells; // row by row, after the first line: column names, or a scene's weight and roles
    const char *text;
} Paragraph;

static struct {
    const char *path;
    char *text;
    int line; // the one being read, or that of the scene being told
    int paragraph_count, card_count;
    Paragraph paragraphs[PARAGRAPHS + 1]; // behind the last one, kind is 0
    const Paragraph *cards[CARDS];        // each scene as often as its weight says
} grammar;

// A scene being told.
typedef struct {
    uint64_t key, counter; // of its chances
    const char *cast[4];   // the names of A, B, C, D
    bool plural;           // the subject
    int splices;           // so far
    char tense[TEXT];
    char stem[TEXT]; // what ~ stands for
    char text[TEXT]; // behind a newline
} Story;

static void __attribute__((noreturn)) refuse(const char *what, const char *why) {
    int shown = (int)min64(40, (int64_t)strcspn(what, "\n"));
    die("%s:%d: '%.*s': %s", grammar.path, grammar.line, shown, what, why);
}

// ---- the file -----------------------------------------------------------------------------------

static void read_row(Paragraph *p, char *line) {
    while (line != NULL) {
        char *cell = line + strspn(line, " "), *end = cell + strcspn(cell, "|");
        line = *end == '|' ? end + 1 : NULL;
        while (end > cell && end[-1] == ' ') { end--; }
        *end = '\0';
        p->cells = realloc_or_die(p->cells, (size_t)(p->cell_count + 1) * sizeof(char *));
        p->cells[p->cell_count++] = cell;
    }
    if (p->columns == 0) { p->columns = p->cell_count; }
    p->rows = p->cell_count / p->columns - 1;
    if (p->cell_count % p->columns != 0) {
        refuse(p->cells[p->cell_count - 1], "the line ends within a row");
    }
}

// The first line of a paragraph, and the text below it.
static Paragraph *read_head(char *head, const char *below) {
    const char *kind = strsep(&head, " ");
    bool scene = strcmp(kind, "scene") == 0, list = strcmp(kind, "list") == 0;
    bool table = strcmp(kind, "table") == 0, choice = strcmp(kind, "choice") == 0;
    if (!(scene || list || table || choice) || head == NULL || below == NULL || *below == '\n' ||
        *below == '\0' || grammar.paragraph_count == PARAGRAPHS) {
        refuse(kind, "is no list, choice, table or scene with lines below, or one too many");
    }
    Paragraph *p = &grammar.paragraphs[grammar.paragraph_count++];
    *p = (Paragraph){.kind = *kind, .line = grammar.line, .text = below};
    read_row(p, head);
    int weight = scene ? atoi(p->cells[0]) : 0;
    if (weight < scene || weight > CARDS - grammar.card_count) {
        refuse(p->cells[0], "must have a weight, of 1000 in all");
    }
    while (weight-- > 0) { grammar.cards[grammar.card_count++] = p; }
    return p;
}

static void read_grammar(const char *path) {
    size_t capacity = 0;
    FILE *file = fopen(path, "r");
    ssize_t n = file == NULL ? 0 : getdelim(&grammar.text, &capacity, '\0', file);
    if (n <= 0 || grammar.text[n - 1] == '\0') {
        die("--grammar %s: no text can be read; ours is in scripts/village.txt", path);
    }
    fclose(file);
    grammar.path = path;
    Paragraph *p = NULL;
    for (char *line, *next = grammar.text; (line = strsep(&next, "\n")) != NULL;) {
        grammar.line++;
        if (*line == '\0' || (p == NULL && *line == '#')) {
            p = NULL;
        } else if (p == NULL) {
            p = read_head(line, next);
        } else if (p->kind != 's') {
            read_row(p, line);
        } else if (line != p->text) {
            line[-1] = '\n';
        }
    }
    if (grammar.card_count == 0) { refuse("", "the file ends without a scene"); }
}

static const Paragraph *find_paragraph(const char *name) {
    for (const Paragraph *p = grammar.paragraphs; p->kind != '\0'; p++) {
        if (strcmp(p->cells[0], name) == 0) { return p; }
    }
    return NULL;
}

// The first cell of a row, counted from 0, round about.
static const char *key_of(const Paragraph *p, int row) {
    return p->cells[(row % p->rows + 1) * p->columns];
}

// The cell of a column in the first row whose key is the word, or ~ and the word's end.
static const char *find(Story *s, const char *column, const char *word) {
    for (const Paragraph *p = grammar.paragraphs; p->kind != '\0'; p++) {
        int c = 1;
        while (c < p->columns && strcmp(p->cells[c], column) != 0) { c++; }
        for (int row = 0; c < p->columns && row < p->rows; row++) {
            const char *key = key_of(p, row), *end = key + (*key == '~');
            int stem = (int)strlen(word) - (int)strlen(end);
            if (stem >= 0 && (stem == 0 || end > key) && strcmp(word + stem, end) == 0) {
                snprintf(s->stem, sizeof(s->stem), "%.*s", stem, word);
                return p->cells[(row + 1) * p->columns + c];
            }
        }
    }
    char why[80];
    snprintf(why, sizeof(why), "has no cell in column %.*s", (int)strcspn(column, "\n"), column);
    refuse(word, why);
}

// ---- texts --------------------------------------------------------------------------------------
// A text is told in place, from left to right: what a mark stands for takes the place of the mark,
// and is told next. What is to the left of `at` is done.

static void splice(Story *s, char *at, const char *end, const char *text) {
    size_t n = strlen(text), rest = strlen(end) + 1;
    if (++s->splices == TEXT || (size_t)(at - s->text) + n + rest > sizeof(s->text)) {
        refuse(at, "grows too long");
    }
    memmove(at + n, end, rest);
    memcpy(at, text, n);
}

static int chance(Story *s, int n) {
    return (int)(rng_bits(s->key, s->counter++) % (uint64_t)n);
}

// (one|two): one alternative stays.
static void tell_choice(Story *s, char *at) {
    char *from = at + 1, *end = from + strcspn(from, "()");
    int count = 1;
    if (*end != ')') { refuse(at, "is not closed"); }
    for (const char *c = at; c < end; c++) { count += *c == '|'; }
    for (int i = chance(s, count); i > 0; i--) { from = strchr(from, '|') + 1; }
    splice(s, from + strcspn(from, "|)"), end + 1, "");
    splice(s, at, from, "");
}

// $day2, $A.home: a cell takes its place.
static void tell_name(Story *s, char *at) {
    const char *value = NULL;
    char *end = at;
    do {
        char name[32] = "";
        int n = 0;
        sscanf(++end, "%31[A-Za-z]%n", name, &n);
        end += n;
        if (value != NULL) {
            value = find(s, name, value);
        } else if (n == 1 && *name >= 'A' && *name <= 'D') {
            value = s->cast[*name - 'A'];
            s->plural = false;
        } else {
            const Paragraph *p = find_paragraph(name);
            int later = *end >= '1' && *end <= '9' ? *end++ - '1' : 0;
            if (p != NULL) {
                value = key_of(p, p->kind == 'c' ? chance(s, p->rows) : p->row + later);
            }
        }
        if (value == NULL) { refuse(at, "stands for nothing"); }
    } while (*end == '.' && islower((unsigned char)end[1]));
    splice(s, at, end, value);
}

// "5+4*2 hen", "5#": a sum in words or digits, and its noun.
static void tell_count(Story *s, char *at, const char *sum) {
    char digits[16];
    int value = 0;
    for (char sign = '+'; sign != '\0'; sign = strspn(sum, "+-*") > 0 ? *sum++ : '\0') {
        int n = (int)strspn(sum, "0123456789"), next = n < 4 ? atoi(sum) : 0;
        value = sign == '+' ? value + next : (sign == '-' ? value - next : value * next);
        if (n < 1 || n > 3 || value < 0 || value > 999) { refuse(sum, "is no sum from 0 to 999"); }
        sum += n;
    }
    snprintf(digits, sizeof(digits), "%d", value);
    const char *number = *sum == '#' ? digits : find(s, "words", digits);
    sum += *sum == '#';
    if (*sum != '\0') { splice(s, at, at, value == 1 ? sum : find(s, "plural", sum)); }
    splice(s, at, at, number);
    s->plural = value != 1;
}

// [sell], [5+4*2 hen], [=past], when all that is inside has been told.
static void tell_form(Story *s, char *open, const char *close) {
    char inside[TEXT];
    snprintf(inside, sizeof(inside), "%.*s", (int)(close - open - 1), open + 1);
    splice(s, open, close + 1, "");
    if (isdigit((unsigned char)*inside)) {
        tell_count(s, open, inside);
    } else if (strcmp(inside, "=many") == 0) {
        s->plural = true;
    } else if (*inside == '=') {
        strcpy(s->tense, inside + 1);
    } else {
        bool they = s->plural && strcmp(s->tense, "present") == 0;
        splice(s, open, open, find(s, they ? "plain" : s->tense, inside));
    }
}

// Puts "an" for "a" before a vowel, and capital letters where sentences begin. ?" and !" end none,
// for "asked Mila" may follow.
static void tell_letter(Story *s, char *at) {
    const char *before = at - 1;
    int quotes = 0;
    for (; *before == ' ' || *before == '"'; before--) { quotes += *before == '"'; }
    bool begins = strchr(".\n", *before) != NULL || (strchr("!?", *before) != NULL && quotes != 1);
    bool a = at[-1] == ' ' && strchr("aA", at[-2]) != NULL && !isalnum((unsigned char)at[-3]);
    if (begins) { *at = (char)toupper((unsigned char)*at); }
    if (strchr(".!?", *at) != NULL) { s->plural = false; }
    if (a && strchr("aeiou", *at) != NULL) { splice(s, at - 1, at - 1, "n"); }
}

static void tell(Story *s, const char *text) {
    char *at = s->text + 1, *open = NULL;
    splice(s, at, at, text);
    while (*at != '\0') {
        switch (*at) {
        case '(': tell_choice(s, at); break;
        case '$': tell_name(s, at); break;
        case '~': splice(s, at, at + 1, s->stem); break;
        case '[': open = at++; break;
        case ']':
            if (open == NULL) { refuse(at, "has no [ before it"); }
            tell_form(s, open, at);
            at = open;
            open = NULL;
            break;
        default:
            if (strchr("|)", *at) != NULL) { refuse(at, "has no ( before it"); }
            if (strncmp(at, "\n ", 2) == 0) { splice(s, at, at + 1, ""); } // the line goes on
            tell_letter(s, at++);
        }
    }
    if (open != NULL) { refuse(open, "is not closed"); }
}

// ---- scenes -------------------------------------------------------------------------------------

// A role is in a person's kind; + is for somebody of A's house, - for one of another house.
static bool fits(Story *s, const char *person, const char *role) {
    for (int i = 0; i < 4; i++) {
        if (s->cast[i] == person) { return false; }
    }
    const char *a = s->cast[0], *home = find(s, "home", person);
    bool with_a = a != NULL && strcmp(find(s, "home", a), home) == 0;
    return *role != (with_a ? '-' : '+') &&
           strstr(find(s, "kind", person), role + strspn(role, "+-")) != NULL;
}

// Draws the people and, in the order of the file, from each list.
static void draw(Story *s, const Paragraph *scene) {
    const Paragraph *people = find_paragraph("person");
    for (int i = 0, tries = 0; i < scene->cell_count - 1; tries++) {
        const char *role = scene->cells[i + 1];
        if (people == NULL || i == 4 || tries == 10000) { refuse(role, "nobody fits"); }
        const char *person = key_of(people, chance(s, people->rows));
        if (fits(s, person, role)) { s->cast[i++] = person; }
    }
    for (Paragraph *p = grammar.paragraphs; p->kind != '\0'; p++) {
        if (p->kind != 'l') { continue; }
        s->counter += (uint64_t)p->columns - 1; // a chance for each column: the last one counts
        p->row = chance(s, p->rows);
    }
}

static void shuffle(const Paragraph **cards, uint64_t key) {
    memcpy(cards, grammar.cards, sizeof(grammar.cards));
    for (int i = grammar.card_count - 1; i > 0; i--) {
        int other = (int)(rng_bits(key, (uint64_t)i) % (uint64_t)(i + 1));
        const Paragraph *card = cards[i];
        cards[i] = cards[other];
        cards[other] = card;
    }
}

static void write_corpus(FILE *out, int64_t bytes, uint64_t seed) {
    const Paragraph *cards[CARDS];
    uint64_t count = (uint64_t)grammar.card_count;
    int64_t written = 0;
    for (uint64_t i = 0; written < bytes && !ferror(out); i++) {
        if (i % count == 0) { shuffle(cards, rng_bits(seed, i / count)); }
        const Paragraph *scene = cards[i % count];
        Story s = {.key = rng_bits(~seed, i), .tense = "past", .text = "\n"};
        grammar.line = scene->line;
        draw(&s, scene);
        tell(&s, scene->text);
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
    char path[PATH_LENGTH] = "", program[PATH_LENGTH] = "";
    ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 1);
    while (n > 0 && program[n - 1] != '/') { program[--n] = '\0'; }
    path_format(path, "%sscripts/village.txt", program);
    opterr = 0; // the error is ours to print
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
