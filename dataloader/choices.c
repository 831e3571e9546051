#include "choices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const TokenFileKind set_kind = {CHOICES_MAGIC,
                                       "multiple-choice set",
                                       "scripts/prepare_choices makes them",
                                       {"hellaswag*.bin", "quiz*.bin"}};

// Skips a length and that many tokens. Returns false if the length is 0, if the tokens reach past
// `end`, or if a token is outside the vocabulary.
static bool skip_tokens(const uint32_t *numbers, int64_t *at, int64_t end, int vocab) {
    if (*at >= end) { return false; }
    int64_t count = numbers[(*at)++];
    if (count < 1 || count > end - *at) { return false; }
    for (; count > 0; count--) {
        if (numbers[(*at)++] >= (uint32_t)vocab) { return false; }
    }
    return true;
}

// Reads the question at index *at, and moves *at past the question.
static bool read_question(const ChoiceSet *set, Question *q, int64_t *at, int vocab) {
    enum { NUMBERS = 5, ANSWERS_MAX = 1000 };
    const uint32_t *numbers = set->numbers, *head = numbers + *at;
    int64_t i = *at + NUMBERS;
    if (i >= set->file.count || head[0] != CHOICES_START) { return false; }
    int64_t end = *at + head[1] / set->file.token_bytes;
    uint32_t label = head[3], answers = head[4];
    if (end <= i || end > set->file.count || answers < 1 || answers > ANSWERS_MAX ||
        label >= answers) {
        return false;
    }
    int context = (int)numbers[i];
    bool ok = skip_tokens(numbers, &i, end, vocab);
    *q = (Question){.at = i, .label = (int)label, .answers = (int)answers, .context = context};
    for (uint32_t a = 0; ok && a < answers; a++) { ok = skip_tokens(numbers, &i, end, vocab); }
    *at = end;
    return ok && i == end;
}

static bool read_questions(ChoiceSet *set, int vocab) {
    enum { SHORTEST = 9 }; // how many numbers the shortest possible question has
    const TokenFile *f = &set->file;
    int32_t count = f->header[2];
    int64_t most = f->count / SHORTEST, at = 0;
    if (count < 1 || count > most) {
        return fail("%s: the header says %d questions, the file has room for %lld", f->path, count,
                    (long long)most);
    }
    set->numbers = malloc_or_die((size_t)f->count * sizeof(uint32_t));
    if (!token_file_read(f, 0, f->count, set->numbers)) { return false; }
    set->questions = calloc_or_die((size_t)count, sizeof(Question));
    for (; set->count < count; set->count++) {
        if (!read_question(set, &set->questions[set->count], &at, vocab)) {
            return fail("%s: question %d of %d is damaged or has a token outside the vocabulary of "
                        "%d (--vocab-size)",
                        f->path, set->count, count, vocab);
        }
    }
    return at == f->count || fail("%s: %lld numbers after the last question; it is damaged",
                                  f->path, (long long)(f->count - at));
}

bool choices_open(ChoiceSet *set, const char *path, int vocab) {
    *set = (ChoiceSet){0};
    if (!token_file_open(&set->file, path, set_kind)) { return false; }
    const char *name = path_name(path), *end = strstr(name, ".bin");
    snprintf(set->name, sizeof(set->name), "%.*s",
             (int)(end != NULL ? end - name : (ptrdiff_t)strlen(name)), name);
    int32_t text = set->file.header[CHOICES_TEXT];
    set->lm_eval = text == 1;
    bool known = text == 0 || text == 1 ||
                 fail("%s: text %d in its header; this program knows 0 and 1", path, text);
    if (known && read_questions(set, vocab)) { return true; }
    choices_close(set);
    return false;
}

void choices_close(ChoiceSet *set) {
    token_file_close(&set->file);
    free(set->numbers);
    free(set->questions);
    *set = (ChoiceSet){0};
}

bool choice_sets_open(ChoiceSets *sets, const char *pattern, int vocab) {
    CLOSED(globfree) glob_t found = {0};
    *sets = (ChoiceSets){0};
    if (!token_files_find(&found, pattern, set_kind)) { return false; }
    sets->sets = calloc_or_die(found.gl_pathc, sizeof(ChoiceSet));
    bool ok = true;
    for (size_t i = 0; ok && i < found.gl_pathc; i++) {
        ok = choices_open(&sets->sets[sets->count], found.gl_pathv[i], vocab);
        sets->count += ok;
    }
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
    const uint32_t *context_end = set->numbers + q->at, *at = context_end;
    for (int a = 0; a < answer_index; a++) { at += 1 + *at; }
    *answer = (int)*at++;
    if (*answer > most - 1) { return 0; }
    int context = (int)min64(q->context, most - *answer), n = 0;
    for (int i = context; i > 0; i--) { tokens[n++] = (int)context_end[-i]; }
    for (int i = 0; i < *answer; i++) { tokens[n++] = (int)at[i]; }
    return n;
}
