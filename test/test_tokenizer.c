// tokenizer.bin, read and refused; and encoding. The fuzzer sees that any bytes are decoded to the
// same bytes again; test/tokenizer_tests.py compares cutting and merging with the libraries of
// GPT-2's and Llama 3's tokenizers.
#include "tokenizer_file.h"

#include <unistd.h>

// ---- tokenizer.bin ------------------------------------------------------------------------------

TEST(bytes_read_back) {
    CLOSED(tokenizer_close) Tokenizer t;
    int length;
    CHECK(tokenizer_write_bytes("t.bin"));
    CHECK(tokenizer_open(&t, "t.bin"));
    CHECK_EQUAL(t.vocab, BYTE_VOCAB);
    CHECK_EQUAL(t.end_of_text, BYTE_END_OF_TEXT);
    CHECK_EQUAL(t.begin_of_text, BYTE_END_OF_TEXT);
    CHECK_EQUAL(t.document_end, BYTE_END_OF_TEXT);
    for (int id = 0; id < 256; id++) {
        const unsigned char *bytes = tokenizer_decode(&t, id, &length);
        CHECK(length == 1 && bytes[0] == id);
    }
    static const int silent[] = {BYTE_END_OF_TEXT, BYTE_VOCAB, -1, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; i++) {
        CHECK(tokenizer_decode(&t, silent[i], &length) != NULL && length == 0);
    }
}

TEST(entries_have_any_length) {
    int32_t header[256] = {TOKENIZER_MAGIC, 2, 3, 2, CUT_UNKNOWN, 0, 2, 1};
    unsigned char file[sizeof(header) + 1 + 1 + 255 + 1];
    memset(file, 'x', sizeof(file));
    memcpy(file, header, sizeof(header));
    file[sizeof(header)] = 0;
    file[sizeof(header) + 1] = 255;
    file[sizeof(file) - 1] = 0;
    blob_write("t.bin", file, sizeof(file));
    CLOSED(tokenizer_close) Tokenizer t;
    int length;
    CHECK(tokenizer_open(&t, "t.bin"));
    CHECK(t.begin_of_text == 1 && t.end_of_text == 2 && t.document_end == 0);
    tokenizer_decode(&t, 0, &length);
    CHECK_EQUAL(length, 0);
    tokenizer_decode(&t, 1, &length);
    CHECK_EQUAL(length, 255);
}

// The fingerprint depends only on the tokens.
TEST(fingerprints_tell_tokenizers_apart) {
    Tokenizer a, c;
    tokenizer_write_bytes("t.bin");
    CLOSED(blob_free) Blob b = blob_read("t.bin");
    CHECK(tokenizer_open(&a, "t.bin"));
    b.bytes[4 * 4] = CUT_UNKNOWN;
    blob_write("u.bin", b.bytes, b.size);
    CHECK(tokenizer_open(&c, "u.bin"));
    CHECK(a.fingerprint != 0 && a.fingerprint == c.fingerprint);
    tokenizer_close(&c);
    b.bytes[1024 + 1] ^= 1;
    blob_write("u.bin", b.bytes, b.size);
    CHECK(tokenizer_open(&c, "u.bin"));
    CHECK(a.fingerprint != c.fingerprint);
    tokenizer_close(&c);
    tokenizer_close(&a);
}

// ---- text to tokens -----------------------------------------------------------------------------

enum { MOST = 4096 };

// The first merges of a vocabulary; ids from 257 on.
static const char *const merges[] = {"th", "the", " t",   " the", "in", "ing", "aa",
                                     "12", "123", "\n\n", "  ",   "'s", "é",   " a"};

static const CharacterRange ranges[] = {
    {9, 13, CLASS_SPACE},       {32, 32, CLASS_SPACE},      {'0', '9', CLASS_NUMBER},
    {'A', 'Z', CLASS_LETTER},   {'a', 'z', CLASS_LETTER},   {0xa0, 0xa0, CLASS_SPACE},
    {0xb2, 0xb3, CLASS_NUMBER}, {0xe0, 0xf6, CLASS_LETTER}, {0x4e00, 0x9fff, CLASS_LETTER},
};

static void write_tokenizer(const char *path, Cut cut, int dropped) {
    tokenizer_file_write(
        (TokenizerFile){cut, merges, COUNT(merges), ranges, COUNT(ranges), NULL, 0}, dropped, path);
}

typedef struct {
    Tokenizer tokenizer;
    Encoder encoder;
    int tokens[MOST];
} Fix;

// Opens t.bin.
static void fix_open(Fix *f) {
    CHECK(tokenizer_open(&f->tokenizer, "t.bin"));
    CHECK(encoder_open(&f->encoder, &f->tokenizer));
}

static void fix_close(Fix *f) {
    encoder_close(&f->encoder);
    tokenizer_close(&f->tokenizer);
}

// The tokens of a text, separated by bars.
static const char *shown(Fix *f, const char *text, char out[MOST]) {
    int64_t count = encoder_encode(&f->encoder, (const unsigned char *)text, strlen(text),
                                   f->tokens);
    size_t used = 0;
    for (int64_t i = 0; i < count; i++) {
        int length;
        const unsigned char *bytes = tokenizer_decode(&f->tokenizer, f->tokens[i], &length);
        used += (size_t)snprintf(out + used, MOST - used, "%s%.*s", i > 0 ? "|" : "", length,
                                 (const char *)bytes);
    }
    out[used] = '\0';
    return out;
}

// If a file says that a space is a letter, the patterns still treat it as a space.
TEST(spaces_are_spaces) {
    CLOSED(fix_close) Fix f;
    char out[MOST];
    write_tokenizer("t.bin", CUT_GPT2, -1);
    CLOSED(blob_free) Blob b = blob_read("t.bin");
    CharacterRange *space = (CharacterRange *)(b.bytes + b.size - sizeof(ranges)) + 1;
    CHECK_EQUAL(space->first, 32);
    space->class_id = CLASS_LETTER;
    blob_write("t.bin", b.bytes, b.size);
    fix_open(&f);
    alarm(20);
    CHECK_TEXT(shown(&f, " \ta", out), " |\t|a");
    alarm(0);
}

// Of several added tokens at the earliest place the longest is taken, across words, too.
TEST(added_tokens_are_found_first) {
    static const char *const words[] = {"a b", "a b c", " c", "th"};
    static const int32_t added[] = {BYTE_TOKENS + 1, BYTE_TOKENS + 2};
    CLOSED(fix_close) Fix f;
    char out[MOST];
    tokenizer_file_write(
        (TokenizerFile){CUT_GPT2, words, COUNT(words), ranges, COUNT(ranges), added, COUNT(added)},
        -1, "t.bin");
    fix_open(&f);
    CHECK_TEXT(shown(&f, "xa b cth a b", out), "x|a b c|th| |a b");
    CHECK_TEXT(shown(&f, "a a b b c", out), "a| |a b| |b| c");
}

TEST(unstable_characters_are_refused) {
    static const CharacterRange some[] = {{'a', 'z', CLASS_LETTER},
                                          {0x301, 0x301, CLASS_UNSTABLE},
                                          {0x958, 0x958, CLASS_LETTER + CLASS_UNSTABLE}};
    CLOSED(fix_close) Fix f;
    char out[MOST];
    tokenizer_file_write((TokenizerFile){CUT_LLAMA3_DIGITS, NULL, 0, some, COUNT(some), NULL, 0},
                         -1, "t.bin");
    fix_open(&f);
    CHECK_TEXT(shown(&f, "\xc3\xa9", out), "\xc3|\xa9");
    CHECK_REFUSED(encoder_encode(&f.encoder, (const unsigned char *)"e\xcc\x81", 3, f.tokens) >= 0,
                  "may change '\xcc\x81' at byte 1");
    CHECK_REFUSED(encoder_encode(&f.encoder, (const unsigned char *)"\xe0\xa5\x98", 3, f.tokens) >=
                      0,
                  "at byte 0");
}

TEST(long_words_are_quick) {
    enum { LONG = 1 << 20 };
    CLOSED(fix_close) Fix f;
    write_tokenizer("t.bin", CUT_GPT2, -1);
    fix_open(&f);
    FREED unsigned char *text = malloc_or_die(LONG);
    FREED int *tokens = malloc_or_die(LONG * sizeof(int));
    memset(text, 'a', LONG);
    CHECK_EQUAL(encoder_encode(&f.encoder, text, LONG, tokens), LONG / 2);
}

static void refuse_encoder(Cut cut, int dropped, const char *expected) {
    CLOSED(tokenizer_close) Tokenizer t;
    Encoder e;
    write_tokenizer("bad.bin", cut, dropped);
    CHECK(tokenizer_open(&t, "bad.bin"));
    CHECK_REFUSED(encoder_open(&e, &t), expected);
}

TEST(what_cannot_encode_is_refused) {
    refuse_encoder(CUT_UNKNOWN, -1,
                   "does not say how text is cut into tokens; scripts/prepare_data");
    refuse_encoder(CUT_GPT2, 200, "no token is byte 200 alone");
    refuse_encoder(CUT_BYTES, 0, "no token is byte 0 alone");
}
