// Multiple-choice sets: questions with several answers, one of which is right, as in HellaSwag. An
// answer's score is the probability that the model gives to its tokens after the context.
//
// Layout: a token file (loader.h) with magic 20240522; version 1 is llm.c's evaluation format, in
// uint16; version 2 has uint32 instead. Header [2] is the count of questions, [3] the size of the
// longest question in bytes. [5] is 0 if the wording is that of the data set's fields, 1 if it is
// that of lm-eval's HellaSwag task. After the header, the questions follow one after another. A
// question is:
//   65535; the size of the question in bytes, with that 65535; its index in the set; the index of
//   the right answer; the number of answers A; the length of the context, and its tokens; then for
//   each of the A answers its length and its tokens
//
// choices_open refuses a file of another kind or version; lengths that do not add up to the file's
// length; a question without context, answers or right answer; an empty answer; a token not in the
// vocabulary.
#pragma once

#include "loader.h"

BEGIN_C

enum { CHOICES_MAGIC = 20240522, CHOICES_START = 65535, CHOICES_TEXT = 5 };

typedef struct {
    int64_t at;                  // index in ChoiceSet.numbers of the first answer's length
    int label, answers, context; // index of the right answer; number of answers; context's tokens
} Question;

typedef struct {
    TokenFile file;
    char name[64];     // the file's name without its folder and .bin
    bool lm_eval;      // the wording is lm-eval's
    uint32_t *numbers; // all numbers of the file
    int count;
    Question *questions;
} ChoiceSet;

typedef struct {
    int count;
    ChoiceSet *sets;
} ChoiceSets;

bool choices_open(ChoiceSet *set, const char *path, int vocab);
void choices_close(ChoiceSet *set);

// Opens every file that a glob pattern matches.
bool choice_sets_open(ChoiceSets *sets, const char *pattern, int vocab);
void choice_sets_close(ChoiceSets *sets);

// Writes the context's tokens and then an answer's into tokens[most]. If there are more than
// `most`, leaves out the beginning of the context. Returns how many tokens were written; the last
// *answer of them are the answer's. Returns 0 if the answer is longer than most - 1.
int choices_row(const ChoiceSet *set, int question, int answer_index, int most, int *tokens,
                int *answer);

END_C
