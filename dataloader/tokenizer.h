// From token ids to bytes, for printing samples: llm.c's tokenizer.bin, with what an encoder needs
// (encoder.h) in fields and bytes that llm.c does not look at.
//
// Layout, little-endian: 256 int32: [0] magic 20240328, [1] version 2, [2] vocabulary size, [3] the
// end-of-text token, [4] how text is cut into words (Cut), [5] how many ranges of characters follow
// the tokens, the rest 0; then for each id one byte of length and that many bytes; then the ranges,
// each 3 uint32: the first and the last code point, and the class (CharacterClass). Tokens that
// stand for no text of their own (all special ones but the end of text) have length 0.
//
// The mark of a tokenizer is the CRC-32 of its tokens, from the first length to the last byte.
// Token shards carry it (shard.h), so that those of two tokenizers are not mixed.
#ifndef LLM8_TOKENIZER_H
#define LLM8_TOKENIZER_H

#include "../base/io.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TOKENIZER_MAGIC = 20240328, BYTE_VOCAB = 257, BYTE_END_OF_TEXT = 256 };

typedef enum { CUT_UNKNOWN, CUT_BYTES, CUT_GPT2, CUT_LLAMA3, CUT_COUNT } Cut;

typedef enum { CLASS_OTHER, CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE, CLASS_COUNT } CharacterClass;

typedef struct {
    uint32_t first, last, class_id;
} CharacterRange;

typedef struct {
    int vocab, end_of_text;
    uint32_t mark;
    Cut cut;
    MappedFile file;
    size_t *at; // [vocab] where an id's length stands in the file
    int num_ranges;
    CharacterRange *ranges; // in ascending order; what is in none is CLASS_OTHER
} Tokenizer;

bool tokenizer_open(Tokenizer *tokenizer, const char *path, Error *err);
void tokenizer_close(Tokenizer *tokenizer);

// The bytes of an id; *length is 0 for the end of text and for ids outside the vocabulary.
const unsigned char *tokenizer_decode(const Tokenizer *tokenizer, int id, int *length);

// Writes the tokenizer of bytes: ids 0..255 are bytes, 256 is the end of text.
bool tokenizer_write_bytes(const char *path, Error *err);

#ifdef __cplusplus
}
#endif

#endif
