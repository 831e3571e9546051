#include "grammar.h"
#include "../base/common.h"
#include "../base/rng.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>

static void expand(Story *s, const char *from, const char *end);

static void expand_text(Story *s, const char *text) {
    expand(s, text, text + strlen(text));
}

static int chance(Story *s, int n) {
    return (int)(rng_bits(s->key, s->counter++) % (uint64_t)n);
}

static bool is_word(const char *word, const char *from, const char *end) {
    return strlen(word) == (size_t)(end - from) && memcmp(word, from, (size_t)(end - from)) == 0;
}

// ---- output -----------------------------------------------------------------------------------

static void put(Story *s, const char *text, size_t length) {
    if (s->length + length + 1 > s->capacity) {
        s->capacity = 2 * (s->length + length + 1);
        s->text = realloc_or_die(s->text, s->capacity);
    }
    memcpy(s->text + s->length, text, length);
    s->length += length;
    s->text[s->length] = '\0';
}

static void put_text(Story *s, const char *text) {
    put(s, text, strlen(text));
}

static void put_number(Story *s, int n) {
    char words[WORDS_LENGTH];
    number_words(words, n);
    put_text(s, words);
}

static void put_verb(Story *s, const char *from, const char *end) {
    char verb[WORDS_LENGTH], form[WORDS_LENGTH];
    assert(end - from < WORDS_LENGTH);
    snprintf(verb, sizeof(verb), "%.*s", (int)(end - from), from);
    verb_form(form, verb, s->tense, s->subject);
    put_text(s, form);
}

// ---- symbols ----------------------------------------------------------------------------------

static bool put_pronoun(Story *s, Gender gender, const char *from, const char *end) {
    static const char *const pronouns[][2] = {{"he", "she"}, {"him", "her"}, {"his", "her"}};
    for (int i = 0; i < 3; i++) {
        if (is_word(pronouns[i][HE], from, end)) {
            put_text(s, pronouns[i][gender]);
            return true;
        }
    }
    return false;
}

// What the person is to A.
static const char *kin(Role role, Gender gender) {
    switch (role) {
    case SIBLING: return gender == HE ? "brother" : "sister";
    case PARENT: return gender == HE ? "father" : "mother";
    case FRIEND: return "friend";
    default: return "neighbour";
    }
}

// A and B, who are brothers, sisters, or brother and sister.
static const char *pair(Gender a, Gender b) {
    return a != b ? "brother and sister" : (a == HE ? "brothers" : "sisters");
}

static void put_attribute(Story *s, int who, const char *from, const char *end) {
    const Person *p = s->cast[who];
    const struct {
        const char *name, *value;
    } attributes[] = {{"home", house_table[p->house]},
                      {"trade", p->trade},
                      {"works", p->works},
                      {"good", p->good},
                      {"coat", p->coat},
                      {"pet", p->pet},
                      {"called", p->pet_name},
                      {"likes", p->likes},
                      {"born", p->born},
                      {"kin", kin(s->roles[who], p->gender)},
                      {"pair", pair(s->cast[0]->gender, p->gender)}};
    if (put_pronoun(s, p->gender, from, end)) { return; }
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++) {
        if (is_word(attributes[i].name, from, end)) {
            assert(attributes[i].value != NULL);
            expand_text(s, attributes[i].value);
            return;
        }
    }
    die("grammar: no attribute '%.*s'", (int)(end - from), from);
}

static int list_length(const List *list) {
    int length = 0;
    while (length < LIST_MAX && list->items[length] != NULL) { length++; }
    return length;
}

static bool put_list_item(Story *s, const char *from, const char *end) {
    int later = 0;
    if (isdigit((unsigned char)end[-1])) { later = *--end - '1'; }
    for (int i = 0; i < list_count; i++) {
        const List *list = &list_table[i];
        if (!is_word(list->name, from, end)) { continue; }
        int index = s->groups[list->group] + later;
        if (list->share > 0) { index = (index + list->shift) / list->share; }
        expand_text(s, list->items[index % list_length(list)]);
        return true;
    }
    return false;
}

static bool put_subject(Story *s, const char *from, const char *end) {
    static const struct {
        const char *name, *text;
        Subject subject;
    } subjects[] = {{"both", "$A and $B", PLURAL}, {"all", "$A, $B and $C", PLURAL},
                    {"they", "they", PLURAL},      {"people", "people", PLURAL},
                    {"we", "we", PLURAL},          {"you", "you", PLURAL},
                    {"I", "I", FIRST_PERSON}};
    for (size_t i = 0; i < sizeof(subjects) / sizeof(subjects[0]); i++) {
        if (is_word(subjects[i].name, from, end)) {
            expand_text(s, subjects[i].text);
            s->subject = subjects[i].subject;
            return true;
        }
    }
    return false;
}

static void put_count(Story *s) {
    for (int i = 1; i <= s->numbers[0]; i++) {
        put_text(s, i == 1 ? "" : ", ");
        put_number(s, i);
    }
}

static bool set_tense(Story *s, const char *from, const char *end) {
    static const char *const names[] = {
        [PAST] = "past", [PRESENT] = "present", [FUTURE] = "future", [PLAIN] = "plain"};
    for (int i = 0; i < 4; i++) {
        if (is_word(names[i], from, end)) {
            s->tense = (Tense)i;
            return true;
        }
    }
    return false;
}

static void put_named(Story *s, const char *from, const char *end) {
    if (put_subject(s, from, end) || put_list_item(s, from, end)) { return; }
    if (is_word("count", from, end)) {
        put_count(s);
        return;
    }
    for (int i = 0; i < phrase_count; i++) {
        if (is_word(phrase_table[i].name, from, end)) {
            expand_text(s, phrase_table[i].text);
            return;
        }
    }
    die("grammar: nothing is called $%.*s", (int)(end - from), from);
}

static bool verb_follows(const char *at, const char *end) {
    return end - at > 1 && at[0] == ' ' && (at[1] == '[' || at[1] == '$');
}

// at: after the $. Returns where the symbol ends.
static const char *expand_symbol(Story *s, const char *at, const char *end) {
    const char *stop = at;
    while (stop < end && isalnum((unsigned char)*stop)) { stop++; }
    bool person = stop - at == 1 && *at >= 'A' && *at <= 'D';
    if (!person) {
        if (set_tense(s, at, stop)) { return stop < end && *stop == ' ' ? stop + 1 : stop; }
        put_named(s, at, stop);
        return stop;
    }
    int who = *at - 'A';
    assert(s->cast[who] != NULL);
    bool attribute = end - stop > 1 && stop[0] == '.' && islower((unsigned char)stop[1]);
    const char *name = stop + 1;
    if (attribute) {
        for (stop = name; stop < end && islower((unsigned char)*stop);) { stop++; }
        put_attribute(s, who, name, stop);
    } else {
        put_text(s, s->cast[who]->name);
    }
    if (verb_follows(stop, end) && (!attribute || is_word("he", name, stop))) {
        s->subject = SINGULAR;
    }
    return stop;
}

// ---- numbers ----------------------------------------------------------------------------------

static int operand(const Story *s, const char **at) {
    const char *letters = "xyzuv", *ages = "ABCD", *prices = "PQRS", *found;
    char c = *(*at)++;
    if (isdigit((unsigned char)c)) { return c - '0'; }
    if ((found = strchr(letters, c)) != NULL) { return s->numbers[found - letters]; }
    if ((found = strchr(ages, c)) != NULL) { return s->cast[found - ages]->age; }
    found = strchr(prices, c);
    assert(found != NULL);
    return s->cast[found - prices]->price;
}

static int sum(const Story *s, const char **at) {
    int value = operand(s, at);
    while (strchr("+-*", **at) != NULL) {
        char sign = *(*at)++;
        int next = operand(s, at);
        value = sign == '+' ? value + next : (sign == '-' ? value - next : value * next);
    }
    return value;
}

// The noun at from, in the singular or the plural.
static void put_noun(Story *s, const char *from, const char *end, bool plural) {
    char noun[WORDS_LENGTH], form[WORDS_LENGTH];
    size_t begin = s->length;
    expand(s, from, end);
    if (!plural) { return; }
    assert(s->length - begin < sizeof(noun));
    memcpy(noun, s->text + begin, s->length - begin + 1);
    s->length = begin;
    noun_plural(form, noun);
    put_text(s, form);
}

// "a hen", "an egg"
static void put_with_article(Story *s, const char *from, const char *end) {
    size_t begin = s->length;
    put_text(s, "an ");
    put_noun(s, from, end, false);
    if (strchr("aeiou", s->text[begin + 3]) == NULL) {
        s->length--;
        memmove(s->text + begin + 1, s->text + begin + 2, s->length - begin);
    }
}

static void put_count_of(Story *s, const char *at, const char *end, bool subject) {
    int value = sum(s, &at);
    if (*at == '#') {
        char digits[16];
        snprintf(digits, sizeof(digits), "%d", value);
        put_text(s, digits);
        at++;
    } else {
        put_number(s, value);
    }
    if (at < end) {
        put_text(s, " ");
        put_noun(s, at + 1, end, value != 1);
    }
    if (subject) { s->subject = value == 1 ? SINGULAR : PLURAL; }
}

// at: after the {. Returns where the number ends.
static const char *expand_number(Story *s, const char *at, const char *end) {
    const char *stop = memchr(at, '}', (size_t)(end - at));
    assert(stop != NULL);
    if (strncmp(at, "s ", 2) == 0) {
        put_noun(s, at + 2, stop, true);
    } else if (strncmp(at, "an ", 3) == 0) {
        put_with_article(s, at + 3, stop);
    } else {
        put_count_of(s, at, stop, verb_follows(stop + 1, end));
    }
    return stop + 1;
}

// ---- scenes -----------------------------------------------------------------------------------

// at: after the (. Returns where the choice ends.
static const char *expand_choice(Story *s, const char *at, const char *end) {
    const char *bars[16]; // where the alternatives begin, and the end of the last one
    int count = 0, depth = 0;
    for (bars[count++] = at; depth > 0 || *at != ')'; at++) {
        assert(at < end && count < 15);
        depth += (*at == '(') - (*at == ')');
        if (*at == '|' && depth == 0) { bars[count++] = at + 1; }
    }
    bars[count] = at + 1;
    int chosen = chance(s, count);
    expand(s, bars[chosen], bars[chosen + 1] - 1);
    return at + 1;
}

static void expand(Story *s, const char *from, const char *end) {
    while (from < end) {
        char c = *from++;
        const char *close;
        switch (c) {
        case '(': from = expand_choice(s, from, end); break;
        case '$': from = expand_symbol(s, from, end); break;
        case '{': from = expand_number(s, from, end); break;
        case '[':
            close = memchr(from, ']', (size_t)(end - from));
            assert(close != NULL);
            put_verb(s, from, close);
            from = close + 1;
            break;
        case '`': put_text(s, "\""); break;
        default:
            if (strchr(".!?", c) != NULL) { s->subject = SINGULAR; }
            put(s, &c, 1);
        }
    }
}

static bool fits(const Story *s, const Person *p, int place) {
    const Person *a = s->cast[0];
    for (int i = 0; i < place; i++) {
        if (p == s->cast[i]) { return false; }
    }
    switch (s->roles[place]) {
    case CHILD: return p->age > 0;
    case ELDER:
        for (int i = 0; i < person_count; i++) {
            if (person_table[i].house == p->house && person_table[i].age > p->age) { return false; }
        }
        return p->age > 0;
    case ADULT: return p->age == 0;
    case SIBLING: return p->age > 0 && p->house == a->house;
    case PARENT: return p->age == 0 && p->house == a->house;
    case FRIEND: return p->age > 0 && p->house != a->house;
    case SELLER: return p->age == 0 && p->house != a->house;
    case NOBODY: break;
    }
    return false;
}

static void set_scene(Story *s, const Scene *scene, uint64_t key) {
    s->length = 0;
    s->key = key;
    s->counter = 0;
    s->roles = scene->cast;
    s->tense = scene->tense;
    s->subject = SINGULAR;
    memset(s->cast, 0, sizeof(s->cast));
    for (int i = 0; i < 4 && scene->cast[i] != NOBODY; i++) {
        const Person *p;
        do { p = &person_table[chance(s, person_count)]; } while (!fits(s, p, i));
        s->cast[i] = p;
    }
    for (int i = 0; i < 5; i++) {
        s->numbers[i] = i < 2 ? 2 + chance(s, 8) : (i == 2 ? 1 + chance(s, 3) : 11 + chance(s, 39));
    }
    for (int i = list_count - 1; i >= 0; i--) { // backwards: a group's first list decides
        const List *list = &list_table[i];
        s->groups[list->group] = chance(s, list_length(list) - list->reach);
    }
}

// Capital letters where sentences begin. ?" and !" do not end one, for `asked Mila` may follow; a
// quotation after another one begins one.
static void put_capitals(Story *s) {
    bool begins = true;
    for (size_t i = 0; i < s->length; i++) {
        char c = s->text[i], before = i > 0 ? s->text[i - 1] : ' ';
        char earlier = i > 1 ? s->text[i - 2] : ' ';
        if (isalnum((unsigned char)c)) {
            if (begins) { s->text[i] = (char)toupper((unsigned char)c); }
            begins = false;
        } else if (c == '"' && before == ' ' && earlier == '"') {
            begins = true;
        } else if (isspace((unsigned char)c)) {
            bool quoted = before == '"' && earlier == '.';
            begins = begins || c == '\n' || quoted || strchr(".!?", before) != NULL;
        }
    }
}

void story_tell(Story *s, const Scene *scene, uint64_t key) {
    set_scene(s, scene, key);
    expand_text(s, scene->text);
    put_capitals(s);
}
