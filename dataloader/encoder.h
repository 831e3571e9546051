// From text to token ids, with what tokenizer.bin holds: bytes, and the byte-pair encodings of
// GPT-2 and Llama 3 (tiktoken's r50k_base and cl100k_base cut text as these two do).
//
// Text is cut into words by the tokenizer's pattern; in each word, of all neighbouring tokens whose
// bytes together are a token, the pair that makes the token with the lowest id merges first, the
// leftmost of equals. That is the order of the merges for every vocabulary whose ids were given in
// the order of training (Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with
// Subword Units", 2016). Bytes that are no UTF-8 count as characters that are neither letter,
// number nor space.
#ifndef LLM8_ENCODER_H
#define LLM8_ENCODER_H

#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint64_t key; // (id << 32) + position: the lowest comes first
    int right;    // the id of the token that the pair makes is at [position, right)
} Merge;

typedef struct {
    const Tokenizer *tokenizer;
    int *table; // ids by the hash of their bytes; -1: empty
    size_t mask;
    int byte_id[256];
    unsigned char ascii[128]; // the class of each ASCII character
    size_t room;              // of the buffers below, in bytes of a word
    int *end, *before; // of the token that begins at a byte: where it ends; the one before it
    Merge *heap;
    size_t heap_count;
} Encoder;

// Refuses a tokenizer that does not say how text is cut, or lacks a byte.
bool encoder_open(Encoder *e, const Tokenizer *tokenizer, Error *err);
void encoder_close(Encoder *e);

// Writes the tokens of a text, at most one a byte; returns how many. The end of text is not among
// them.
int64_t encoder_encode(Encoder *e, const unsigned char *text, size_t bytes, int *tokens);

#ifdef __cplusplus
}
#endif

#endif
