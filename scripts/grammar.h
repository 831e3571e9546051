// A small language for text with grammar in it, expanded from left to right:
//
//   (one|two|three)   one of them, by chance
//   $A $A.he $A.good  the first of the cast (B, C, D: the others): name, pronoun, attribute
//   $both $all        "A and B"; "A, B and C"
//   $they $people $we $you $I    pronouns
//   [sell]            the verb, agreeing with its subject, in the scene's tense
//   $past $present $future $plain    set the tense from here on
//   {x hen}           a number and its noun: three hens. {x} in words, {x#} in digits, {an egg}
//   with
//                     its article, {s egg} only the plural. Sums from left to right: {x*P+y coin}.
//                     x y: 2 to 9, z: 1 to 3, u v: 11 to 49, A B C D: ages, P Q R S: prices
//   $count            one, two, three, up to x
//   $day $day2        a list's word for this scene, and the one after it in the list
//   $any_other_name   a phrase of the grammar
//   `                 a quotation mark
//
// The subject of a verb is the name, pronoun or number right before it; without one it is singular.
// The tables, and what may stand in them, are in village.h.
#ifndef LLM8_GRAMMAR_H
#define LLM8_GRAMMAR_H

#include "inflect.h"

#include <stddef.h>
#include <stdint.h>

typedef struct {
    char *text; // the scene so far
    size_t length, capacity;
    uint64_t key, counter; // of the scene's chances
    const Person *cast[4]; // A, B, C, D
    const Role *roles;     // of the cast
    int numbers[5];        // x, y, z, u, v
    int groups[GROUPS];    // where each group of lists stands
    Tense tense;
    Subject subject;
} Story;

// Expands a scene; its text is valid until the next one.
void story_tell(Story *s, const Scene *scene, uint64_t key);

#endif
