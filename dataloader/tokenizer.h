// Decodes token ids to bytes, and encodes text to ids, with a tokenizer.bin. Its tokens are single
// bytes, or those of a byte-pair encoding. This encoding first cuts text into words as GPT-2 or
// Llama 3 do (tiktoken's r50k_base and cl100k_base), or as these do except that each digit is a
// word (SmolLM, Qwen).
//
// The format is llm.c's tokenizer.bin. llm.c ignores the fields and bytes that only an encoder
// needs. All numbers are little-endian. A file has four sections:
// - A header of 256 int32; those that are not listed are 0:
//   [0] magic 20240328
//   [1] version 2
//   [2] vocabulary size
//   [3] the end-of-text token
//   [4] how text is cut into words (Cut)
//   [5] the number of character ranges
//   [6] 1 + the token that a text begins with, or 0 if that is the end-of-text token
//   [7] 1 + the token that ends a document in the data beside the file, or 0 if that is the
//       end-of-text token. In a chat model's tokenizer the end-of-text token ends a turn.
//   [8] the number of added tokens
// - The tokens in the order of their ids: a byte with the length, then the bytes. Of a token of 255
//   or more bytes, the first 255 are stored. Special tokens stand for no text and have length 0;
//   only the end-of-text token has its name here.
// - The character ranges, each 3 uint32: first code point, last code point, CharacterClass. If the
//   tokenizer normalizes text to Unicode's NFC, CLASS_UNSTABLE is added to the class of characters
//   that NFC may change.
// - The ids of the added tokens, each an int32. These are no special tokens. They are recognised
//   wherever a text has their bytes, before the text is cut into words.
//
// The fingerprint of a tokenizer is the CRC-32 of its tokens, from the first length to the last
// byte. Token shards and multiple-choice sets have the fingerprint in their headers (loader.h), so
// that files of different tokenizers are not mixed.
#pragma once

#include "../base/io.h"

BEGIN_C

#define TOKENIZER_FILE "tokenizer.bin" // the file's name; beside shards a prefix may precede it

enum {
    TOKENIZER_MAGIC = 20240328,
    GPT2_VOCAB = 50257,
    BYTE_VOCAB = 257,
    BYTE_END_OF_TEXT = 256,
    LONGEST_TOKEN = 254
};

typedef enum {
    CUT_UNKNOWN,
    CUT_BYTES,
    CUT_GPT2,
    CUT_LLAMA3,
    CUT_GPT2_DIGITS,
    CUT_LLAMA3_DIGITS,
    CUT_COUNT
} Cut;

typedef enum { CLASS_OTHER, CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE, CLASS_COUNT } CharacterClass;

enum { CLASS_UNSTABLE = CLASS_COUNT }; // added to a CharacterClass

typedef struct {
    uint32_t first, last, class_id;
} CharacterRange;

typedef struct {
    int vocab, begin_of_text, end_of_text, document_end;
    uint32_t fingerprint;
    Cut cut;
    unsigned char *data; // the content of the file
    size_t bytes;
    size_t *at; // [vocab] where in the file a token's entry (length, bytes) begins
    int num_ranges;
    // where the character ranges, which ascend, begin in the file. A character in no range is
    // CLASS_OTHER
    size_t ranges_at;
    int num_added;
    size_t added_at; // where the ids of the added tokens begin in the file
} Tokenizer;

bool tokenizer_open(Tokenizer *tokenizer, const char *path);
void tokenizer_close(Tokenizer *tokenizer);
// Sets document_end, also in the file's content (data).
void tokenizer_set_document_end(Tokenizer *tokenizer, int id);

// Returns the bytes of an id. *length is 0 for the end of text and for ids outside the vocabulary.
const unsigned char *tokenizer_decode(const Tokenizer *tokenizer, int id, int *length);

// Whether a text contains the name of the end-of-text token. The name is encoded like other text.
bool tokenizer_names_end(const Tokenizer *tokenizer, const unsigned char *text, size_t bytes);

// Writes the tokenizer of bytes: ids 0..255 are bytes, 256 is the end of text.
bool tokenizer_write_bytes(const char *path);

// Return the texts of a tokenizer.json and a tokenizer_config.json, which the caller frees. With
// them Hugging Face's libraries encode text as the byte tokenizer does.
char *tokenizer_json(const Tokenizer *tokenizer);
char *tokenizer_config_json(void);

typedef struct {
    uint64_t key; // (id << 32) + position: the lowest key is merged first
    int right;    // the merged token has the bytes [position, right)
} Merge;

typedef struct {
    const Tokenizer *tokenizer;
    int *table; // hash table from bytes to ids; -1: empty
    size_t mask;
    int byte_id[256];
    unsigned char *class_of; // [0x110000] the class of each character
    bool has_unstable;       // some characters are unstable
    bool begins_added[256];  // whether an added token begins with this byte
    size_t offset;           // where the next text begins in its file, for the error's position
    size_t room;             // bytes of the longest word that the buffers below can take
    int *end;                // [room] for each byte at which a token begins: where the token ends
    int *before;             // [room] for each such byte: where the previous token begins
    Merge *heap;
    size_t heap_count;
} Encoder;

// Refuses a tokenizer that does not say how text is cut, that has a token longer than
// LONGEST_TOKEN, or that lacks a token for some byte.
bool encoder_open(Encoder *e, const Tokenizer *tokenizer);
void encoder_close(Encoder *e);

// Writes the tokens of a text, without an end of text. Returns how many: at most one for each byte.
// Returns -1, with error_text(), if the text has an unstable character (CLASS_UNSTABLE).
int64_t encoder_encode(Encoder *e, const unsigned char *text, size_t bytes, int *tokens);

END_C
