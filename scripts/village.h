// The village that make_corpus writes about, and the grammar it writes with: all of it in tables.
// The language of the templates is described in grammar.h.
#ifndef LLM8_VILLAGE_H
#define LLM8_VILLAGE_H

typedef enum { HE, SHE } Gender;

// Twelve grown-ups with a trade, twelve children with a pet; two of each live in a house.
typedef struct {
    const char *name;
    Gender gender;
    int house; // index into house_table
    // grown-ups
    const char *trade, *works, *good;
    int price; // of one good, in coins
    // children
    int age; // 0: a grown-up
    const char *coat, *pet, *pet_name, *likes, *born;
} Person;

// Whom a scene needs; B, C and D are cast with regard to A.
typedef enum {
    NOBODY,
    CHILD,
    ELDER,   // a child whose sister or brother is younger
    ADULT,   // a grown-up
    SIBLING, // the other child of A's house
    PARENT,  // a grown-up of A's house
    FRIEND,  // a child of another house
    SELLER,  // a grown-up of another house
} Role;

typedef enum {
    PAST,
    PRESENT,
    FUTURE,
    PLAIN
} Tense; // PLAIN: the verb as it stands, for `how to $x`

typedef struct {
    Role cast[4]; // A, B, C, D
    Tense tense;
    int weight; // how often, in relation to the other scenes
    const char *text;
} Scene;

// A word chosen once for a scene: $name says it, $name2 the one after it in its list, and so on.
// The lists of a group are in step; the first of them says how long they are.
enum { LIST_MAX = 15 };

typedef enum { DAYS, MONTHS, SEASONS, SIZES, DEEDS, ANIMALS, THINGS, PLACES, SPOTS, GROUPS } Group;

typedef struct {
    const char *name;
    Group group;
    int shift, share; // item (index + shift) / share; share 0: item index
    int reach;        // how many places before its end a scene must begin; 0: it goes round
    const char *items[LIST_MAX];
} List;

// A phrase chosen anew each time it is named.
typedef struct {
    const char *name, *text;
} Phrase;

typedef struct {
    const char *base, *past;
} Verb; // irregular

typedef struct {
    const char *one, *many;
} Noun; // irregular

extern const char *const house_table[];
extern const Person person_table[];
extern const int person_count;
extern const List list_table[];
extern const int list_count;
extern const Phrase phrase_table[];
extern const int phrase_count;
extern const Verb verb_table[];
extern const int verb_count;
extern const Noun noun_table[];
extern const int noun_count;
extern const Scene scene_table[];
extern const int scene_count;

#endif
