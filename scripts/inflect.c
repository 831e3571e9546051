#include "inflect.h"

#include <assert.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

void number_words(char out[WORDS_LENGTH], int n) {
    static const char *const small[] = {"no",      "one",     "two",       "three",    "four",
                                        "five",    "six",     "seven",     "eight",    "nine",
                                        "ten",     "eleven",  "twelve",    "thirteen", "fourteen",
                                        "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
    static const char *const tens[] = {"twenty", "thirty",  "forty",  "fifty",
                                       "sixty",  "seventy", "eighty", "ninety"};
    assert(n >= 0 && n < 100);
    if (n < 20) {
        snprintf(out, WORDS_LENGTH, "%s", small[n]);
    } else {
        bool whole = n % 10 == 0;
        snprintf(out, WORDS_LENGTH, "%s%s%s", tens[n / 10 - 2], whole ? "" : "-",
                 whole ? "" : small[n % 10]);
    }
}

static bool ends_with(const char *word, int n, const char *ending) {
    int length = (int)strlen(ending);
    return n >= length && memcmp(word + n - length, ending, (size_t)length) == 0;
}

// A y after a consonant, which turns into i.
static bool ends_with_y(const char *word, int n) {
    return n > 1 && word[n - 1] == 'y' && strchr("aeiou", word[n - 2]) == NULL;
}

// The s of the plural and of the third person: hens, boxes, berries.
static void with_s(char out[WORDS_LENGTH], const char *word, int n) {
    static const char *const hisses[] = {"s", "x", "ch", "sh", "o"};
    const char *ending = ends_with_y(word, n) ? "ies" : "s";
    for (int i = 0; i < 5; i++) {
        if (ends_with(word, n, hisses[i])) { ending = "es"; }
    }
    snprintf(out, WORDS_LENGTH, "%.*s%s", ends_with_y(word, n) ? n - 1 : n, word, ending);
}

// The first word of "basket of apples" takes the plural, the last of "brown hen".
void noun_plural(char out[WORDS_LENGTH], const char *noun) {
    const char *of = strstr(noun, " of ");
    int n = of != NULL ? (int)(of - noun) : (int)strlen(noun);
    with_s(out, noun, n);
    for (int i = 0; i < noun_count; i++) {
        const char *one = noun_table[i].one;
        if (ends_with(noun, n, one)) {
            snprintf(out, WORDS_LENGTH, "%.*s%s", n - (int)strlen(one), noun, noun_table[i].many);
        }
    }
    size_t used = strlen(out);
    snprintf(out + used, WORDS_LENGTH - used, "%s", noun + n);
}

static const char *form_of_be(Tense tense, Subject subject) {
    static const char *const past[] = {"was", "were", "was"}, *const present[] = {"is", "are",
                                                                                  "am"};
    switch (tense) {
    case PAST: return past[subject];
    case PRESENT: return present[subject];
    case FUTURE: return "will be";
    case PLAIN: break;
    }
    return "be";
}

void verb_form(char out[WORDS_LENGTH], const char *verb, Tense tense, Subject subject) {
    int n = (int)strlen(verb);
    Verb irregular = {0};
    for (int i = 0; i < verb_count; i++) {
        if (strcmp(verb_table[i].base, verb) == 0) { irregular = verb_table[i]; }
    }
    if (strcmp(verb, "be") == 0) {
        snprintf(out, WORDS_LENGTH, "%s", form_of_be(tense, subject));
    } else if (tense == PAST && irregular.past != NULL) {
        snprintf(out, WORDS_LENGTH, "%s", irregular.past);
    } else if (tense == PAST) {
        snprintf(out, WORDS_LENGTH, "%.*s%s", ends_with_y(verb, n) ? n - 1 : n, verb,
                 ends_with_y(verb, n) ? "ied" : (verb[n - 1] == 'e' ? "d" : "ed"));
    } else if (tense == PRESENT && subject == SINGULAR) {
        with_s(out, verb, n);
    } else {
        snprintf(out, WORDS_LENGTH, "%s%s", tense == FUTURE ? "will " : "", verb);
    }
}
