// Multiple-choice sets: questions with several answers, one of them right, as HellaSwag's. The
// model scores an answer by the probability that it gives to the answer's tokens after the context.
//
// Layout: a token file (loader.h) with magic 20240522; version 1 is llm.c's evaluation format,
// version 2 the same in uint32. Header [2] is the count of questions, [3] the bytes of the longest.
// The numbers are the questions one after another, each:
//   65535; the bytes of the question, from that 65535 to its last number; its index in the set; the
//   index of the right answer; how many answers A; the length of the context, and its tokens; then
//   A times the length of an answer, and its tokens
//
// choices_open refuses a file of another kind or version, numbers that do not add up to the file, a
// question without a context, answers or a right answer, an empty answer, and a token outside the
// vocabulary.
#pragma once

#include "loader.h"

BEGIN_C

enum { CHOICES_MAGIC = 20240522, CHOICES_START = 65535 };

typedef struct {
    int64_t at; // the number that is the first answer's length
    int label, answers, context;
} Question;

typedef struct {
    TokenFile file;
    char name[64];     // of the file, without its folder and .bin
    uint32_t *numbers; // the whole file's
    int count;
    Question *questions;
} ChoiceSet;

typedef struct {
    int count;
    ChoiceSet *sets;
} ChoiceSets;

bool choices_open(ChoiceSet *set, const char *path, int vocab);
void choices_close(ChoiceSet *set);

// Opens every file that the glob pattern matches.
bool choice_sets_open(ChoiceSets *sets, const char *pattern, int vocab);
void choice_sets_close(ChoiceSets *sets);

// Writes the context's tokens, then an answer's, into tokens[most]; if both are too long, only the
// end of the context. Returns how many there are; the last *answer of them are the answer's.
// Returns 0 for an answer longer than most - 1.
int choices_row(const ChoiceSet *set, int question, int answer_index, int most, int *tokens,
                int *answer);

END_C
