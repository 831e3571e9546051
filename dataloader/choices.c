#include "choices.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t number_at(const ChoiceSet *set, int64_t at) {
    const unsigned char *from = set->file.data + CHOICES_HEADER_BYTES + at * set->number_bytes;
    uint16_t narrow;
    uint32_t wide;
    if (set->number_bytes == 4) {
        memcpy(&wide, from, 4);
        return wide;
    }
    memcpy(&narrow, from, 2);
    return narrow;
}

// Steps over a row of tokens and the number of them before; false where they end after `end` or are
// outside the vocabulary.
static bool skip_tokens(const ChoiceSet *set, int64_t *at, int64_t end, int vocab) {
    if (*at >= end) { return false; }
    int64_t count = number_at(set, (*at)++);
    if (count < 1 || count > end - *at) { return false; }
    for (int64_t i = 0; i < count; i++) {
        if (number_at(set, *at + i) >= (uint32_t)vocab) { return false; }
    }
    *at += count;
    return true;
}

// Reads the question at *at, which moves behind it.
static bool read_question(ChoiceSet *set, Question *q, int64_t *at, int64_t end, int vocab) {
    enum { NUMBERS = 5, ANSWERS_MAX = 1000 };
    int64_t begin = *at, i = begin + NUMBERS;
    if (end - begin <= NUMBERS || number_at(set, begin) != CHOICES_START) { return false; }
    int64_t stop = begin + number_at(set, begin + 1) / set->number_bytes;
    uint32_t label = number_at(set, begin + 3), answers = number_at(set, begin + 4);
    if (stop <= i || stop > end || answers < 1 || answers > ANSWERS_MAX || label >= answers) {
        return false;
    }
    *q = (Question){.label = (int)label, .answers = (int)answers};
    q->context = (int)number_at(set, i);
    bool ok = skip_tokens(set, &i, stop, vocab);
    q->at = i;
    for (uint32_t a = 0; ok && a < answers; a++) { ok = skip_tokens(set, &i, stop, vocab); }
    *at = stop;
    return ok && i == stop;
}

static bool read_set(ChoiceSet *set, int vocab, Error *err) {
    int32_t header[5];
    if (set->file.bytes < CHOICES_HEADER_BYTES) {
        return fail(err, "%s: not a multiple-choice set; scripts/prepare_choices makes them",
                    set->path);
    }
    memcpy(header, set->file.data, sizeof(header));
    if (header[0] != CHOICES_MAGIC) {
        return fail(err, "%s: not a multiple-choice set; scripts/prepare_choices makes them",
                    set->path);
    }
    if (header[1] != 1 && header[1] != 2) {
        return fail(err, "%s: version %d; this program reads 1 (uint16) and 2 (uint32)", set->path,
                    header[1]);
    }
    set->number_bytes = header[1] == 1 ? 2 : 4;
    set->tokenizer = (uint32_t)header[4];
    int64_t end = (int64_t)(set->file.bytes - CHOICES_HEADER_BYTES) / set->number_bytes, at = 0;
    int64_t most = end / 9; // the numbers of the shortest question
    if (header[2] < 1 || header[2] > most) {
        return fail(err, "%s: the header says %d questions, the file has room for %lld", set->path,
                    header[2], (long long)most);
    }
    set->questions = calloc_or_die((size_t)header[2], sizeof(Question));
    for (; set->count < header[2]; set->count++) {
        if (!read_question(set, &set->questions[set->count], &at, end, vocab)) {
            return fail(err,
                        "%s: question %d of %d is damaged or has a token outside the vocabulary of "
                        "%d (--vocab-size)",
                        set->path, set->count, header[2], vocab);
        }
    }
    return at == end || fail(err, "%s: %lld numbers after the last question; it is damaged",
                             set->path, (long long)(end - at));
}

static void name_set(ChoiceSet *set) {
    const char *slash = strrchr(set->path, '/'), *name = slash != NULL ? slash + 1 : set->path;
    const char *end = strstr(name, ".bin");
    size_t length = end != NULL ? (size_t)(end - name) : strlen(name);
    snprintf(set->name, sizeof(set->name), "%.*s", (int)length, name);
}

bool choices_open(ChoiceSet *set, const char *path, int vocab, Error *err) {
    *set = (ChoiceSet){0};
    path_format(set->path, "%s", path);
    name_set(set);
    if (!file_map(&set->file, path, err)) { return false; }
    if (read_set(set, vocab, err)) { return true; }
    choices_close(set);
    return false;
}

void choices_close(ChoiceSet *set) {
    file_unmap(&set->file);
    free(set->questions);
    *set = (ChoiceSet){0};
}

bool choice_sets_open(ChoiceSets *sets, const char *pattern, int vocab, Error *err) {
    glob_t found;
    *sets = (ChoiceSets){0};
    if (glob(pattern, 0, NULL, &found) != 0) {
        return fail(err, "%s: no such file; scripts/prepare_choices makes multiple-choice sets",
                    pattern);
    }
    sets->sets = calloc_or_die(found.gl_pathc, sizeof(ChoiceSet));
    bool ok = true;
    for (size_t i = 0; ok && i < found.gl_pathc; i++) {
        ok = choices_open(&sets->sets[sets->count], found.gl_pathv[i], vocab, err);
        sets->count += ok;
    }
    globfree(&found);
    if (!ok) { choice_sets_close(sets); }
    return ok;
}

void choice_sets_close(ChoiceSets *sets) {
    for (int i = 0; i < sets->count; i++) { choices_close(&sets->sets[i]); }
    free(sets->sets);
    *sets = (ChoiceSets){0};
}

int choices_row(const ChoiceSet *set, int question, int answer_index, int most, int *tokens,
                int *answer) {
    const Question *q = &set->questions[question];
    int64_t at = q->at;
    for (int a = 0; a < answer_index; a++) { at += 1 + number_at(set, at); }
    *answer = (int)number_at(set, at++);
    if (*answer > most - 1) { return 0; }
    int context = (int)min64(q->context, most - *answer), n = 0;
    for (int i = context; i > 0; i--) { tokens[n++] = (int)number_at(set, q->at - i); }
    for (int i = 0; i < *answer; i++) { tokens[n++] = (int)number_at(set, at + i); }
    return n;
}
