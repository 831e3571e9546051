// From token ids to bytes, for printing samples: llm.c's tokenizer.bin.
//
// Layout, little-endian: 256 int32: [0] magic 20240328, [1] version 2, [2] vocabulary size, [3] the
// end-of-text token, the rest 0; then for each id one byte of length and that many bytes.
#ifndef LLM8_TOKENIZER_H
#define LLM8_TOKENIZER_H

#include "../checkpoints/io.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TOKENIZER_MAGIC = 20240328, BYTE_VOCAB = 257, BYTE_END_OF_TEXT = 256 };

typedef struct {
    int vocab, end_of_text;
    MappedFile file;
    size_t *at; // [vocab] where an id's length stands in the file
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
