// English words in the form a sentence needs.
#ifndef LLM8_INFLECT_H
#define LLM8_INFLECT_H

#include "village.h"

typedef enum { SINGULAR, PLURAL, FIRST_PERSON } Subject;

enum { WORDS_LENGTH = 160 };

// Each fills out. A verb may bring its auxiliary ("will sell").
void number_words(char out[WORDS_LENGTH], int n); // 0 to 99
void verb_form(char out[WORDS_LENGTH], const char *verb, Tense tense, Subject subject);
void noun_plural(char out[WORDS_LENGTH], const char *noun);

#endif
