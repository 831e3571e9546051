// tokenizer.bin: ours read back, and what is no tokenizer refused.
#include "../dataloader/tokenizer.h"
#include "fixture.h"

static void bytes_read_back(void) {
    Tokenizer t;
    int length;
    CHECK(tokenizer_write_bytes("t.bin", NULL));
    CHECK(tokenizer_open(&t, "t.bin", NULL));
    CHECK_EQUAL(t.vocab, BYTE_VOCAB);
    CHECK_EQUAL(t.end_of_text, BYTE_END_OF_TEXT);
    for (int id = 0; id < 256; id++) {
        const unsigned char *bytes = tokenizer_decode(&t, id, &length);
        CHECK(length == 1 && bytes[0] == id);
    }
    static const int silent[] = {BYTE_END_OF_TEXT, BYTE_VOCAB, -1, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; i++) {
        CHECK(tokenizer_decode(&t, silent[i], &length) != NULL && length == 0);
    }
    tokenizer_close(&t);
}

static void entries_have_any_length(void) {
    int32_t header[256] = {TOKENIZER_MAGIC, 2, 3, 2};
    unsigned char file[sizeof(header) + 1 + 1 + 255 + 1];
    memset(file, 'x', sizeof(file));
    memcpy(file, header, sizeof(header));
    file[sizeof(header)] = 0;
    file[sizeof(header) + 1] = 255;
    file[sizeof(file) - 1] = 0;
    blob_write("t.bin", file, sizeof(file));
    Tokenizer t;
    int length;
    CHECK(tokenizer_open(&t, "t.bin", NULL));
    tokenizer_decode(&t, 0, &length);
    CHECK_EQUAL(length, 0);
    tokenizer_decode(&t, 1, &length);
    CHECK_EQUAL(length, 255);
    tokenizer_close(&t);
}

static void refuse(const char *expected) {
    Tokenizer t;
    Error err = {""};
    CHECK(!tokenizer_open(&t, "bad.bin", &err));
    CHECK_CONTAINS(err.text, "bad.bin: ");
    CHECK_CONTAINS(err.text, expected);
}

static void every_truncation_is_refused(void) {
    tokenizer_write_bytes("t.bin", NULL);
    Blob b = blob_read("t.bin");
    for (size_t bytes = 0; bytes < b.size; bytes++) {
        blob_write("bad.bin", b.bytes, bytes);
        refuse(bytes < 1024 ? "not a tokenizer.bin; ./tokenize makes one" : "cut short at token ");
    }
    free(b.bytes);
}

static void hostile_headers_are_refused(void) {
    static const struct {
        int index;
        int32_t value;
        const char *expected;
    } rows[] = {
        {0, 20240520, "not a tokenizer.bin; ./tokenize makes one"},
        {1, 1, "tokenizer version 1; this program reads 2"},
        {1, -2, "tokenizer version -2"},
        {2, 0, "vocabulary 0 with end-of-text 256"},
        {2, -257, "vocabulary -257"},
        {2, INT32_MAX, "vocabulary 2147483647"},
        {2, 256, "vocabulary 256 with end-of-text 256"},
        {2, 258, "cut short at token 257 of 258"},
        {3, -1, "vocabulary 257 with end-of-text -1"},
        {3, 257, "vocabulary 257 with end-of-text 257"},
        {4, CUT_COUNT, "cuts text in way 4; this program knows 0 to 3"},
        {4, -1, "cuts text in way -1"},
        {5, 1, "1 ranges of characters, room for 0; it is damaged"},
        {5, -1, "-1 ranges of characters"},
        {5, INT32_MAX, "2147483647 ranges of characters"},
    };
    remove("bad.bin");
    refuse("No such file");
    tokenizer_write_bytes("t.bin", NULL);
    Blob b = blob_read("t.bin");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        blob_write("bad.bin", b.bytes, b.size);
        FILE *file = fopen("bad.bin", "r+b");
        fseek(file, 4 * rows[i].index, SEEK_SET);
        fwrite(&rows[i].value, 4, 1, file);
        fclose(file);
        refuse(rows[i].expected);
    }
    free(b.bytes);
}

static void wrong_ranges_are_refused(void) {
    static const CharacterRange rows[][2] = {
        {{5, 4, 1}, {6, 7, 1}},
        {{1, 9, 1}, {9, 12, 2}},
        {{8, 9, 1}, {1, 2, 2}},
        {{1, 2, 1}, {3, 4, CLASS_COUNT}},
    };
    tokenizer_write_bytes("t.bin", NULL);
    Blob b = blob_read("t.bin");
    int32_t two = 2;
    memcpy(b.bytes + 4 * 5, &two, sizeof(two));
    b.bytes = realloc_or_die(b.bytes, b.size + sizeof(rows[0]));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        memcpy(b.bytes + b.size, rows[i], sizeof(rows[0]));
        blob_write("bad.bin", b.bytes, b.size + sizeof(rows[0]));
        refuse("range of characters ");
    }
    CharacterRange right[2] = {{1, 2, 1}, {3, UINT32_MAX, 2}};
    memcpy(b.bytes + b.size, right, sizeof(right));
    blob_write("t.bin", b.bytes, b.size + sizeof(right));
    Tokenizer t;
    CHECK(tokenizer_open(&t, "t.bin", NULL));
    CHECK_EQUAL(t.num_ranges, 2);
    tokenizer_close(&t);
    free(b.bytes);
}

// The mark is the tokens' alone.
static void marks_tell_tokenizers_apart(void) {
    Tokenizer a, c;
    tokenizer_write_bytes("t.bin", NULL);
    Blob b = blob_read("t.bin");
    CHECK(tokenizer_open(&a, "t.bin", NULL));
    b.bytes[4 * 4] = CUT_UNKNOWN;
    blob_write("u.bin", b.bytes, b.size);
    CHECK(tokenizer_open(&c, "u.bin", NULL));
    CHECK(a.mark != 0 && a.mark == c.mark);
    tokenizer_close(&c);
    b.bytes[1024 + 1] ^= 1;
    blob_write("u.bin", b.bytes, b.size);
    CHECK(tokenizer_open(&c, "u.bin", NULL));
    CHECK(a.mark != c.mark);
    tokenizer_close(&c);
    tokenizer_close(&a);
    free(b.bytes);
}

int main(void) {
    RUN(bytes_read_back);
    RUN(entries_have_any_length);
    RUN(every_truncation_is_refused);
    RUN(hostile_headers_are_refused);
    RUN(wrong_ranges_are_refused);
    RUN(marks_tell_tokenizers_apart);
    return test_summary();
}
