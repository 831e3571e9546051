// Multiple-choice sets: questions with several answers, one of them right, as HellaSwag's. The
// model scores each answer by the probability it gives to the answer's tokens after the question's.
//
// Layout, little-endian; version 1 is llm.c's evaluation format, version 2 the same in uint32:
//   bytes 0..1023   256 int32: [0] magic 20240522, [1] version, [2] how many questions, [3] bytes
//   of
//                   the longest, [4] the mark of the tokenizer (tokenizer.h; 0: not said), the
//                   rest 0
//   from byte 1024  the questions one after another, each a row of numbers (uint16 or uint32):
//                   65535; the bytes of the question, from that first number to its last; its place
//                   in the set; which answer is right, from 0; how many answers A; the length of
//                   the context, and its tokens; then A times the length of an answer, and its
//                   tokens
//
// choices_open refuses a file of another kind or version, numbers that do not add up to the file, a
// question without a context, answers or a right answer, an empty answer, and a token outside the
// vocabulary.
#ifndef LLM8_CHOICES_H
#define LLM8_CHOICES_H

#include "../base/io.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CHOICES_MAGIC = 20240522, CHOICES_HEADER_BYTES = 1024, CHOICES_START = 65535 };

typedef struct {
    int64_t at; // in numbers, of the question's first answer's length
    int label, answers, context;
} Question;

typedef struct {
    char path[PATH_LENGTH], name[64]; // the name is the file's, without .bin
    MappedFile file;
    int number_bytes; // 2 or 4
    uint32_t tokenizer;
    int count;
    Question *questions;
} ChoiceSet;

typedef struct {
    int count;
    ChoiceSet *sets;
} ChoiceSets;

bool choices_open(ChoiceSet *set, const char *path, int vocab, Error *err);
void choices_close(ChoiceSet *set);

// Every file that the glob pattern matches.
bool choice_sets_open(ChoiceSets *sets, const char *pattern, int vocab, Error *err);
void choice_sets_close(ChoiceSets *sets);

// The tokens of an answer after its context's into tokens[most]; of the context only its end, where
// both are too long. Returns how many they are, *answer of them the answer's. An answer longer than
// `most` - 1 does not fit: returns 0.
int choices_row(const ChoiceSet *set, int question, int answer_index, int most, int *tokens,
                int *answer);

#ifdef __cplusplus
}
#endif

#endif
