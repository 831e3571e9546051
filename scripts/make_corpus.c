// Writes the corpus of the quick start: plain English about one village, made from a grammar, so
// that the repository ships no third-party text. The same bytes on every machine.
//
//   ./make_corpus --bytes 1500000 --seed 1 > corpus.txt
//
// There is something to learn at every range: spelling; agreement of verbs and pronouns with their
// subjects; tense; who lives where, sells what at which price and is whose sister; the order of
// days and months; sums, which are all right. A small model's samples show how far it has come.
//
// grammar.c expands templates, village.c holds them and everything they speak of.
#include "../base/common.h"
#include "../base/rng.h"
#include "grammar.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The scene numbers in a random order, each as often as its weight says.
static int *deal(uint64_t seed, int round, int *count) {
    int *deck = NULL;
    *count = 0;
    for (int i = 0; i < scene_count; i++) {
        deck = realloc_or_die(deck, (size_t)(*count + scene_table[i].weight) * sizeof(int));
        for (int k = 0; k < scene_table[i].weight; k++) { deck[(*count)++] = i; }
    }
    uint64_t key = rng_bits(seed, (uint64_t)round);
    for (int i = *count - 1; i > 0; i--) {
        int other = (int)(rng_bits(key, (uint64_t)i) % (uint64_t)(i + 1)), card = deck[i];
        deck[i] = deck[other];
        deck[other] = card;
    }
    return deck;
}

static void write_corpus(FILE *out, int64_t bytes, uint64_t seed) {
    Story s = {0};
    int64_t written = 0;
    uint64_t scene = 0;
    for (int round = 0, count; written < bytes && !ferror(out); round++) {
        int *deck = deal(seed, round, &count);
        for (int i = 0; i < count && written < bytes; i++, scene++) {
            const Scene *chosen = &scene_table[deck[i]];
            story_tell(&s, chosen, rng_bits(~seed, scene));
            fprintf(out, "%s\n\n", s.text);
            written += (int64_t)s.length + 2;
        }
        free(deck);
    }
    free(s.text);
}

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
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    int64_t bytes = 1500000, seed = 1;
    opterr = 0; // the error is ours to print
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'b': bytes = parse_count("bytes", optarg, (int64_t)1 << 40); break;
        case 's': seed = parse_count("seed", optarg, INT64_MAX); break;
        case 'h':
            printf("Usage: %s [--bytes 1500000] [--seed 1] > corpus.txt\n"
                   "Writes whole paragraphs of simple English until there are that many bytes.\n",
                   argv[0]);
            return EXIT_SUCCESS;
        default: die("%s: no such option, or its value is missing (--help)", argv[optind - 1]);
        }
    }
    if (optind < argc) { die("unexpected argument '%s' (--help)", argv[optind]); }
    write_corpus(stdout, bytes, (uint64_t)seed);
    if (fflush(stdout) != 0 || ferror(stdout)) { die("the corpus could not be written"); }
    return EXIT_SUCCESS;
}
