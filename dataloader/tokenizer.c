#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { HEADER_INTS = 256 };

// The ranges, which reach to the file's end, must be in order.
static bool read_ranges(Tokenizer *t, const char *path, size_t begin, int32_t count, Error *err) {
    size_t held = (t->file.bytes - begin) / sizeof(CharacterRange);
    if (count < 0 || (size_t)count > held) {
        return fail(err, "%s: %d ranges of characters, room for %zu; it is damaged", path, count,
                    held);
    }
    t->num_ranges = count;
    t->ranges = calloc_or_die((size_t)count + 1, sizeof(CharacterRange));
    memcpy(t->ranges, t->file.data + begin, (size_t)count * sizeof(CharacterRange));
    int64_t end = -1;
    for (int i = 0; i < count; i++) {
        const CharacterRange *r = &t->ranges[i];
        if (r->first <= end || r->last < r->first || r->class_id >= CLASS_COUNT) {
            return fail(err, "%s: range of characters %d is wrong; it is damaged", path, i);
        }
        end = r->last;
    }
    return true;
}

static bool read_entries(Tokenizer *t, const char *path, Error *err) {
    int32_t header[HEADER_INTS];
    const MappedFile *f = &t->file;
    if (f->bytes < sizeof(header)) {
        return fail(err, "%s: not a tokenizer.bin; ./tokenize makes one", path);
    }
    memcpy(header, f->data, sizeof(header));
    if (header[0] != TOKENIZER_MAGIC) {
        return fail(err, "%s: not a tokenizer.bin; ./tokenize makes one", path);
    }
    if (header[1] != 2) {
        return fail(err, "%s: tokenizer version %d; this program reads 2", path, header[1]);
    }
    if (header[2] <= 0 || (size_t)header[2] > f->bytes || header[3] < 0 || header[3] >= header[2]) {
        return fail(err, "%s: vocabulary %d with end-of-text %d", path, header[2], header[3]);
    }
    if (header[4] < 0 || header[4] >= CUT_COUNT) {
        return fail(err, "%s: cuts text in way %d; this program knows 0 to %d", path, header[4],
                    CUT_COUNT - 1);
    }
    t->vocab = header[2];
    t->end_of_text = header[3];
    t->cut = (Cut)header[4];
    t->at = calloc_or_die((size_t)t->vocab, sizeof(size_t));
    size_t end = sizeof(header);
    for (int id = 0; id < t->vocab; id++) {
        t->at[id] = end;
        if (end >= f->bytes || end + f->data[end] >= f->bytes) {
            return fail(err, "%s: cut short at token %d of %d", path, id, t->vocab);
        }
        end += 1 + (size_t)f->data[end];
    }
    t->mark = (uint32_t)crc32(0, f->data + sizeof(header), (uInt)(end - sizeof(header)));
    return read_ranges(t, path, end, header[5], err);
}

bool tokenizer_open(Tokenizer *t, const char *path, Error *err) {
    *t = (Tokenizer){0};
    if (!file_map(&t->file, path, err)) { return false; }
    if (read_entries(t, path, err)) { return true; }
    tokenizer_close(t);
    return false;
}

void tokenizer_close(Tokenizer *t) {
    file_unmap(&t->file);
    free(t->at);
    free(t->ranges);
    *t = (Tokenizer){0};
}

const unsigned char *tokenizer_decode(const Tokenizer *t, int id, int *length) {
    bool known = id >= 0 && id < t->vocab && id != t->end_of_text;
    const unsigned char *entry = known ? t->file.data + t->at[id] : NULL;
    *length = known ? entry[0] : 0;
    return known ? entry + 1 : (const unsigned char *)"";
}

bool tokenizer_write_bytes(const char *path, Error *err) {
    static const char end_of_text[] = "\x0d<|endoftext|>";
    struct {
        int32_t header[HEADER_INTS];
        unsigned char entries[2 * 256];
        char end[sizeof(end_of_text) - 1];
    } file = {.header = {TOKENIZER_MAGIC, 2, BYTE_VOCAB, BYTE_END_OF_TEXT, CUT_BYTES}};
    for (int id = 0; id < 256; id++) {
        file.entries[2 * id] = 1;
        file.entries[2 * id + 1] = (unsigned char)id;
    }
    memcpy(file.end, end_of_text, sizeof(file.end));
    size_t bytes = offsetof(__typeof__(file), end) + sizeof(file.end);
    return file_replace(path, &file, bytes, err);
}
