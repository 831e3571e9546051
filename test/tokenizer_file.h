// Tokenizers for tests: a token for each byte, the end of text, some merges, ranges of characters.
#pragma once

#include "../dataloader/tokenizer.h"
#include "fixture.h"

enum { BYTE_TOKENS = 256 };

typedef struct {
    Cut cut;
    const char *const *merges;
    int num_merges;
    const CharacterRange *ranges;
    int num_ranges;
    const int32_t *added; // ids
    int num_added;
} TokenizerFile;

// dropped: a byte without a token; -1: none.
static inline void tokenizer_file_write(TokenizerFile t, int dropped, const char *path) {
    int32_t header[256] = {TOKENIZER_MAGIC,
                           2,
                           BYTE_TOKENS + 1 + t.num_merges,
                           BYTE_TOKENS,
                           (int32_t)t.cut,
                           t.num_ranges,
                           0,
                           0,
                           t.num_added};
    FileWriter w;
    or_die(writer_open(&w, path));
    writer_write(&w, header, sizeof(header));
    for (int byte = 0; byte < BYTE_TOKENS; byte++) {
        const unsigned char entry[] = {byte != dropped, (unsigned char)byte};
        writer_write(&w, entry, 1 + entry[0]);
    }
    writer_write(&w, "", 1); // the end of text
    for (int i = 0; i < t.num_merges; i++) {
        const unsigned char length = (unsigned char)strlen(t.merges[i]);
        writer_write(&w, &length, 1);
        writer_write(&w, t.merges[i], length);
    }
    writer_write(&w, t.ranges, (size_t)t.num_ranges * sizeof(CharacterRange));
    writer_write(&w, t.added, (size_t)t.num_added * sizeof(int32_t));
    or_die(writer_close(&w));
}
