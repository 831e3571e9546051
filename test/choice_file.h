// Multiple-choice sets for tests: written number by number, as dataloader/choices.h specifies them.
#pragma once

#include "../base/rng.h"
#include "../dataloader/choices.h"
#include "fixture.h"

enum { CHOICE_NUMBERS = 1 << 16 };

typedef struct {
    int number_bytes, count, questions;
    uint32_t fingerprint, numbers[CHOICE_NUMBERS];
} ChoiceFile;

static inline int put_number(ChoiceFile *f, uint32_t value) {
    if (f->count == CHOICE_NUMBERS) { die("too many numbers for a test's set"); }
    f->numbers[f->count] = value;
    return f->count++;
}

// Appends a count and that many tokens, which depend only on the seed.
static inline void put_tokens_of(ChoiceFile *f, int count, int vocab, uint64_t seed) {
    put_number(f, (uint32_t)count);
    for (int i = 0; i < count; i++) {
        put_number(f, (uint32_t)(rng_bits(seed, (uint64_t)i) % (uint64_t)vocab));
    }
}

// Appends a question with answers of the given lengths.
static inline void put_question(ChoiceFile *f, int label, int context, int answers,
                                const int *lengths, int vocab) {
    int begin = put_number(f, CHOICES_START), bytes = put_number(f, 0);
    put_number(f, (uint32_t)f->questions);
    put_number(f, (uint32_t)label);
    put_number(f, (uint32_t)answers);
    put_tokens_of(f, context, vocab, (uint64_t)f->count);
    for (int a = 0; a < answers; a++) { put_tokens_of(f, lengths[a], vocab, (uint64_t)f->count); }
    f->numbers[bytes] = (uint32_t)((f->count - begin) * f->number_bytes);
    f->questions++;
}

static inline void choice_file_write(const ChoiceFile *f, const char *path) {
    int32_t header[SHARD_HEADER_BYTES / 4] = {CHOICES_MAGIC, f->number_bytes / 2, f->questions, 0,
                                              (int32_t)f->fingerprint};
    size_t bytes = (size_t)f->count * (size_t)f->number_bytes;
    unsigned char *file = malloc_or_die(sizeof(header) + bytes);
    memcpy(file, header, sizeof(header));
    for (int i = 0; i < f->count; i++) { // little-endian
        memcpy(file + sizeof(header) + i * f->number_bytes, &f->numbers[i],
               (size_t)f->number_bytes);
    }
    blob_write(path, file, sizeof(header) + bytes);
    free(file);
}

// Three questions with 2, 3 and 2 answers, in a vocabulary of 50.
static inline void choice_file_fill(ChoiceFile *f, int number_bytes) {
    static const int lengths[] = {1, 4, 2}, vocab = 50;
    *f = (ChoiceFile){.number_bytes = number_bytes, .fingerprint = 0xabcdef01};
    put_question(f, 1, 3, 2, lengths, vocab);
    put_question(f, 0, 1, 3, lengths, vocab);
    put_question(f, 1, 20, 2, lengths, vocab);
}
