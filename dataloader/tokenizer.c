#define _GNU_SOURCE // memmem

#include "tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { HEADER_INTS = 256, CODE_POINTS = 0x110000 };
#define END_OF_TEXT "<|endoftext|>" // the name of the byte tokenizer's end-of-text token

// ---- ids to bytes -------------------------------------------------------------------------------

static CharacterRange range_at(const Tokenizer *t, int i) {
    CharacterRange range;
    return *(CharacterRange *)memcpy(&range, t->data + t->ranges_at + (size_t)i * sizeof(range),
                                     sizeof(range));
}

// Returns the bytes of an added token, and its id.
static const unsigned char *added_token(const Tokenizer *t, int i, int *id, int *length) {
    int32_t number;
    memcpy(&number, t->data + t->added_at + (size_t)i * sizeof(number), sizeof(number));
    *id = number;
    return tokenizer_decode(t, *id, length);
}

static bool read_header(Tokenizer *t, const char *path) {
    int32_t header[HEADER_INTS] = {0};
    if (t->bytes >= sizeof(header)) { memcpy(header, t->data, sizeof(header)); }
    if (header[0] != TOKENIZER_MAGIC) {
        return fail("%s: not a tokenizer.bin; ./tokenize makes one", path);
    }
    if (header[1] != 2) {
        return fail("%s: tokenizer version %d; this program reads 2", path, header[1]);
    }
    t->vocab = header[2];
    t->end_of_text = header[3];
    t->cut = (Cut)header[4];
    t->num_ranges = header[5];
    t->num_added = header[8];
    if (t->vocab <= 0 || (size_t)t->vocab > t->bytes || t->end_of_text < 0 ||
        t->end_of_text >= t->vocab) {
        return fail("%s: vocabulary %d with end-of-text %d", path, t->vocab, t->end_of_text);
    }
    for (int i = 6; i <= 7; i++) {
        if (header[i] < 0 || header[i] > t->vocab) {
            return fail("%s: vocabulary %d with %d - 1 as %s", path, t->vocab, header[i],
                        i == 6 ? "begin-of-text" : "end of documents");
        }
    }
    t->begin_of_text = header[6] > 0 ? header[6] - 1 : t->end_of_text;
    t->document_end = header[7] > 0 ? header[7] - 1 : t->end_of_text;
    return (header[4] >= 0 && header[4] < CUT_COUNT) ||
           fail("%s: cuts text in way %d; this program knows 0 to %d", path, header[4],
                CUT_COUNT - 1);
}

// Whether the file has room for `count` entries of `size` bytes from byte `at` on.
static bool has_room(const Tokenizer *t, const char *path, size_t at, int count, size_t size,
                     const char *what) {
    size_t room = (t->bytes - at) / size;
    return (count >= 0 && (size_t)count <= room) ||
           fail("%s: %d %s, room for %zu; it is damaged", path, count, what, room);
}

// Finds the tokens, the character ranges and the added tokens in the file, and checks them.
static bool find_tables(Tokenizer *t, const char *path) {
    const size_t begin = HEADER_INTS * sizeof(int32_t);
    size_t end = begin;
    t->at = calloc_or_die((size_t)t->vocab, sizeof(size_t));
    for (int id = 0; id < t->vocab; id++) {
        t->at[id] = end;
        if (end >= t->bytes || end + t->data[end] >= t->bytes) {
            return fail("%s: cut short at token %d of %d", path, id, t->vocab);
        }
        end += 1 + (size_t)t->data[end];
    }
    t->fingerprint = (uint32_t)crc32_z(0, t->data + begin, end - begin);
    t->ranges_at = end;
    int64_t last = -1;
    if (!has_room(t, path, end, t->num_ranges, sizeof(CharacterRange), "ranges of characters")) {
        return false;
    }
    for (int i = 0; i < t->num_ranges; i++) {
        CharacterRange r = range_at(t, i);
        if (r.first <= last || r.last < r.first || r.class_id >= CLASS_UNSTABLE + CLASS_COUNT) {
            return fail("%s: range of characters %d is wrong; it is damaged", path, i);
        }
        last = r.last;
    }
    t->added_at = end + (size_t)t->num_ranges * sizeof(CharacterRange);
    if (!has_room(t, path, t->added_at, t->num_added, sizeof(int32_t), "added tokens")) {
        return false;
    }
    for (int i = 0, id, length = 1; i < t->num_added; i++) {
        added_token(t, i, &id, &length);
        if (length == 0) { return fail("%s: added token %d is wrong; it is damaged", path, i); }
    }
    return true;
}

bool tokenizer_open(Tokenizer *t, const char *path) {
    size_t size = 0;
    char *bytes = file_read(path, &size);
    *t = (Tokenizer){.data = (unsigned char *)bytes, .bytes = size};
    if (bytes != NULL && read_header(t, path) && find_tables(t, path)) { return true; }
    tokenizer_close(t);
    return false;
}

void tokenizer_close(Tokenizer *t) {
    free(t->data);
    free(t->at);
    *t = (Tokenizer){0};
}

void tokenizer_set_document_end(Tokenizer *t, int id) {
    int32_t number = id == t->end_of_text ? 0 : id + 1;
    t->document_end = id;
    memcpy(t->data + 7 * sizeof(number), &number, sizeof(number));
}

const unsigned char *tokenizer_decode(const Tokenizer *t, int id, int *length) {
    bool known = id >= 0 && id < t->vocab && id != t->end_of_text;
    const unsigned char *entry = known ? t->data + t->at[id] : (const unsigned char *)"";
    *length = entry[0];
    return entry + known;
}

bool tokenizer_names_end(const Tokenizer *t, const unsigned char *text, size_t bytes) {
    const unsigned char *name = t->data + t->at[t->end_of_text];
    size_t length = *name++;
    return length > 0 && memmem(text, bytes, name, length) != NULL;
}

bool tokenizer_write_bytes(const char *path) {
    static const char end_of_text[] = "\x0d" END_OF_TEXT;
    const int32_t header[HEADER_INTS] = {TOKENIZER_MAGIC, 2, BYTE_VOCAB, BYTE_END_OF_TEXT,
                                         CUT_BYTES};
    unsigned char file[sizeof(header) + 2 * 256 + sizeof(end_of_text) - 1], *at = file;
    at = (unsigned char *)memcpy(at, header, sizeof(header)) + sizeof(header);
    for (int id = 0; id < 256; id++) {
        *at++ = 1;
        *at++ = (unsigned char)id;
    }
    memcpy(at, end_of_text, sizeof(end_of_text) - 1);
    return file_replace(path, file, sizeof(file));
}

// GPT-2's byte-level tokenizers write each byte as a character: the byte's own character if that is
// visible in Latin-1, else a code point from 256 on.
char *tokenizer_json(const Tokenizer *t) {
    static const char level[] = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                                "\"trim_offsets\":true,\"use_regex\":false}";
    int character[256], others = 256, length;
    for (int byte = 0; byte < 256; byte++) {
        bool visible = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        character[byte] = visible ? byte : others++;
    }
    char *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    if (file == NULL) { die("out of memory"); }
    fprintf(
        file,
        "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"added_tokens\":[{\"id\":%d,"
        "\"content\":\"" END_OF_TEXT "\",\"single_word\":false,\"lstrip\":false,"
        "\"rstrip\":false,\"normalized\":false,\"special\":true}],\"normalizer\":null,"
        "\"pre_tokenizer\":%s,\"post_processor\":null,\"decoder\":%s,\"model\":{\"type\":"
        "\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":null,"
        "\"end_of_word_suffix\":null,\"fuse_unk\":false,\"byte_fallback\":false,"
        "\"vocab\":{",
        t->end_of_text, level, level);
    for (int id = 0; id < t->vocab; id++) {
        const unsigned char *token = tokenizer_decode(t, id, &length);
        if (length == 1) { fprintf(file, "\"\\u%04x\":%d,", (unsigned)character[*token], id); }
    }
    fprintf(file, "\"" END_OF_TEXT "\":%d},\"merges\":[]}}\n", t->end_of_text);
    fclose(file);
    return text;
}

char *tokenizer_config_json(void) {
    return strdup_or_die(
        "{\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"bos_token\":\"" END_OF_TEXT
        "\",\"eos_token\":\"" END_OF_TEXT "\",\"add_bos_token\":false,"
        "\"model_max_length\":1073741824,\"model_input_names\":[\"input_ids\",\"attention_mask\"],"
        "\"clean_up_tokenization_spaces\":false}\n");
}

// ---- tokens by their bytes ----------------------------------------------------------------------

// Returns the index of these bytes in the hash table, or of the empty entry where they belong.
static size_t find_entry(const Encoder *e, const unsigned char *bytes, size_t n) {
    uint64_t hash = 14695981039346656037ull; // FNV-1a
    for (size_t i = 0; i < n; i++) { hash = (hash ^ bytes[i]) * 1099511628211ull; }
    size_t entry = (hash ^ hash >> 29) & e->mask;
    for (; e->table[entry] >= 0; entry = (entry + 1) & e->mask) {
        int length;
        const unsigned char *other = tokenizer_decode(e->tokenizer, e->table[entry], &length);
        if ((size_t)length == n && memcmp(other, bytes, n) == 0) { break; }
    }
    return entry;
}

static int find_token(const Encoder *e, const unsigned char *bytes, size_t n) {
    return n > 0 && n <= LONGEST_TOKEN ? e->table[find_entry(e, bytes, n)] : -1;
}

bool encoder_open(Encoder *e, const Tokenizer *t) {
    *e = (Encoder){.tokenizer = t};
    if (t->cut == CUT_UNKNOWN) {
        return fail("it can turn tokens into text, but does not say how text is cut into "
                    "tokens; scripts/prepare_data writes one that does, for byte, GPT-2, "
                    "Llama 3, SmolLM and Qwen vocabularies");
    }
    size_t room = 16;
    while (room < 2 * (size_t)t->vocab) { room *= 2; }
    e->mask = room - 1;
    e->table = malloc_or_die(room * sizeof(int));
    memset(e->table, -1, room * sizeof(int)); // every int is -1
    for (int id = 0; id < t->vocab; id++) {
        int length;
        const unsigned char *bytes = tokenizer_decode(t, id, &length);
        if (length > LONGEST_TOKEN) {
            encoder_close(e);
            return fail("token %d has %d bytes or more, so text cannot be encoded; "
                        "scripts/prepare_data --tokenizer does it with a tokenizer.json",
                        id, length);
        }
        size_t entry = find_entry(e, bytes, (size_t)length);
        // if two tokens have the same bytes, the first is used
        if (length > 0 && e->table[entry] < 0) { e->table[entry] = id; }
    }
    for (int byte = 0; byte < 256; byte++) {
        unsigned char text = (unsigned char)byte;
        e->byte_id[byte] = find_token(e, &text, 1);
        if (e->byte_id[byte] < 0) {
            encoder_close(e);
            return fail("no token is byte %d alone, so not every text can be encoded", byte);
        }
    }
    e->class_of = calloc_or_die(CODE_POINTS, 1);
    for (int i = 0; i < t->num_ranges; i++) {
        CharacterRange r = range_at(t, i);
        for (uint32_t c = r.first; c <= r.last && c < CODE_POINTS; c++) {
            e->class_of[c] = (unsigned char)r.class_id;
        }
        e->has_unstable |= r.class_id >= CLASS_UNSTABLE;
    }
    for (int i = 0, id, length; i < t->num_added; i++) {
        e->begins_added[*added_token(t, i, &id, &length)] = true;
    }
    e->class_of[' '] = CLASS_SPACE; // the functions below assume that a blank is white space
    return true;
}

void encoder_close(Encoder *e) {
    free(e->table);
    free(e->class_of);
    free(e->end);
    free(e->before);
    free(e->heap);
    *e = (Encoder){0};
}

typedef struct {
    int bytes;
    CharacterClass class_id;
    bool unstable;
} Character;

// Returns the character at p. A byte that does not begin valid UTF-8 is a character by itself. At
// the end of the text, the character has no bytes.
static Character character_at(const Encoder *e, const unsigned char *p, const unsigned char *end) {
    uint32_t code;
    if (p >= end) { return (Character){0, CLASS_OTHER, false}; }
    int bytes = utf8_decode(p, end, &code);
    if (bytes == 0) { return (Character){1, CLASS_OTHER, false}; }
    const unsigned char held = e->class_of[code];
    return (Character){bytes, (CharacterClass)(held % CLASS_COUNT), held >= CLASS_UNSTABLE};
}

// ---- words --------------------------------------------------------------------------------------

// Skips characters of a class, at most `most` of them, and returns where they end.
static const unsigned char *skip_class(const Encoder *e, const unsigned char *p,
                                       const unsigned char *end, CharacterClass class_id,
                                       int64_t most) {
    for (Character c; most > 0 && p < end; p += c.bytes, most--) {
        c = character_at(e, p, end);
        if (c.class_id != class_id) { break; }
    }
    return p;
}

static size_t contraction_length(const unsigned char *p, const unsigned char *end, bool any_case) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    unsigned char fold = any_case ? 0x20 : 0;
    if (*p != '\'') { return 0; }
    for (size_t i = 0; i < sizeof(endings) / sizeof(endings[0]); i++) {
        const char *ending = endings[i];
        size_t n = strlen(ending), same = 0;
        while (same < n && p + 1 + same < end && (p[1 + same] | fold) == ending[same]) { same++; }
        if (same == n) { return 1 + n; }
    }
    return 0;
}

// Returns the end of white space, by \s+(?!\S)|\s+ : its last character is left to the next word,
// unless there is no next word or no other white space.
static const unsigned char *end_of_space(const Encoder *e, const unsigned char *p,
                                         const unsigned char *end) {
    const unsigned char *at = skip_class(e, p, end, CLASS_SPACE, INT64_MAX), *last = at - 1;
    while (last > p && (*last & 0xc0) == 0x80) { last--; }
    return at == end || last == p ? at : last;
}

// Returns the end of the word at p, which is no contraction, by GPT-2's expression:
// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static const unsigned char *gpt2_word(const Encoder *e, const unsigned char *p,
                                      const unsigned char *end) {
    const unsigned char *from = *p == ' ' && p + 1 < end ? p + 1 : p;
    Character first = character_at(e, from, end);
    if (first.class_id == CLASS_SPACE) { return end_of_space(e, p, end); }
    return skip_class(e, from, end, first.class_id, INT64_MAX);
}

static bool is_newline(unsigned char c) {
    return c == '\r' || c == '\n';
}

// Returns the end of the word at p, which is no contraction, by Llama 3's expression:
// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*
// |\s*[\r\n]+|\s+(?!\S)|\s+
// CUT_LLAMA3_DIGITS has \p{N} instead of \p{N}{1,3}.
static const unsigned char *llama3_word(const Encoder *e, const unsigned char *p,
                                        const unsigned char *end) {
    Character first = character_at(e, p, end), next = character_at(e, p + first.bytes, end);
    bool leads = next.bytes > 0 && next.class_id == CLASS_LETTER && !is_newline(*p);
    if (first.class_id == CLASS_LETTER || (leads && first.class_id != CLASS_NUMBER)) {
        return skip_class(e, p + first.bytes, end, CLASS_LETTER, INT64_MAX);
    }
    if (first.class_id == CLASS_NUMBER) {
        return skip_class(e, p, end, CLASS_NUMBER, e->tokenizer->cut == CUT_LLAMA3 ? 3 : 1);
    }
    bool after_space = *p == ' ' && next.bytes > 0 && next.class_id == CLASS_OTHER;
    if (first.class_id == CLASS_OTHER || after_space) {
        p = skip_class(e, p + first.bytes, end, CLASS_OTHER, INT64_MAX);
        while (p < end && is_newline(*p)) { p++; }
        return p;
    }
    const unsigned char *space = skip_class(e, p, end, CLASS_SPACE, INT64_MAX), *line = space;
    while (line > p && !is_newline(line[-1])) { line--; }
    return line > p ? line : end_of_space(e, p, end);
}

// Returns the end of the piece at p. With CUT_GPT2_DIGITS each number character is a piece, and so
// is the text up to the next number character. Each piece is cut into words as if it were the whole
// text.
static const unsigned char *end_of_piece(const Encoder *e, const unsigned char *p,
                                         const unsigned char *end) {
    const unsigned char *begin = p;
    for (Character c; p < end; p += c.bytes) {
        c = character_at(e, p, end);
        if (c.class_id == CLASS_NUMBER) { return p > begin ? p : p + c.bytes; }
    }
    return p;
}

// ---- merging ------------------------------------------------------------------------------------

static void heap_push(Encoder *e, Merge merge) {
    size_t at = e->heap_count++;
    for (; at > 0 && e->heap[(at - 1) / 2].key > merge.key; at = (at - 1) / 2) {
        e->heap[at] = e->heap[(at - 1) / 2];
    }
    e->heap[at] = merge;
}

static Merge heap_pop(Encoder *e) {
    Merge top = e->heap[0], last = e->heap[--e->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < e->heap_count; at = child) {
        if (child + 1 < e->heap_count && e->heap[child + 1].key < e->heap[child].key) { child++; }
        if (e->heap[child].key >= last.key) { break; }
        e->heap[at] = e->heap[child];
    }
    e->heap[at] = last;
    return top;
}

// Puts the merge of the token at `left` and the next token on the heap, if their bytes are a token.
static void offer(Encoder *e, const unsigned char *word, int n, int left) {
    int middle = left >= 0 ? e->end[left] : n;
    if (middle >= n) { return; }
    int id = find_token(e, word + left, (size_t)(e->end[middle] - left));
    if (id < 0) { return; }
    heap_push(e, (Merge){(uint64_t)(uint32_t)id << 32 | (uint32_t)left, e->end[middle]});
}

static int64_t encode_word(Encoder *e, const unsigned char *word, int n, int *tokens) {
    int whole = find_token(e, word, (size_t)n);
    if (whole >= 0) {
        tokens[0] = whole;
        return 1;
    }
    if ((size_t)n > e->room) {
        e->room = 2 * (size_t)n;
        e->end = realloc_or_die(e->end, e->room * sizeof(int));
        e->before = realloc_or_die(e->before, e->room * sizeof(int));
        // at first there are at most n - 1 candidates; n - 1 merges at most add two more each
        e->heap = realloc_or_die(e->heap, 3 * e->room * sizeof(Merge));
    }
    e->heap_count = 0;
    for (int i = 0; i < n; i++) {
        e->end[i] = i + 1;
        e->before[i] = i - 1;
    }
    for (int i = 0; i + 1 < n; i++) { offer(e, word, n, i); }
    while (e->heap_count > 0) {
        Merge merge = heap_pop(e);
        int left = (int)(uint32_t)merge.key, middle = e->end[left];
        // skips a pair of which one token has merged with another token meanwhile
        if (middle <= left || middle >= n || e->end[middle] != merge.right) { continue; }
        e->end[left] = merge.right;
        e->end[middle] = -1;
        if (merge.right < n) { e->before[merge.right] = left; }
        offer(e, word, n, e->before[left]);
        offer(e, word, n, left);
    }
    int64_t count = 0;
    for (int i = 0; i < n; i = e->end[i]) {
        tokens[count++] = find_token(e, word + i, (size_t)(e->end[i] - i));
    }
    return count;
}

// Refuses a text with an unstable character. Any other text is in NFC.
static bool check_stable(const Encoder *e, const unsigned char *text, const unsigned char *end) {
    const unsigned char *p = text;
    for (Character c; e->has_unstable && p < end; p += c.bytes) {
        c = character_at(e, p, end);
        if (!c.unstable) { continue; }
        return fail("Unicode's NFC, to which the tokenizer normalizes text, may change '%.*s' at "
                    "byte %zu; scripts/prepare_data can encode it",
                    c.bytes, (const char *)p, e->offset + (size_t)(p - text));
    }
    return true;
}

// Returns where the first added token in the text begins, and its id and length: of several that
// begin there, the longest. Returns `end` if there is none.
static const unsigned char *find_added(const Encoder *e, const unsigned char *p,
                                       const unsigned char *end, int *id, int *length) {
    for (*length = 0; p < end && e->tokenizer->num_added > 0; p++) {
        for (int i = 0; e->begins_added[*p] && i < e->tokenizer->num_added; i++) {
            int other, n;
            const unsigned char *bytes = added_token(e->tokenizer, i, &other, &n);
            if (n <= *length || n > end - p || memcmp(p, bytes, (size_t)n) != 0) { continue; }
            *id = other;
            *length = n;
        }
        if (*length > 0) { return p; }
    }
    return end;
}

// Encodes a text without added tokens.
static int64_t encode_plain(Encoder *e, const unsigned char *text, const unsigned char *end,
                            int *tokens) {
    enum { LONGEST = 1 << 30 };
    int64_t count = 0;
    bool llama3 = e->tokenizer->cut == CUT_LLAMA3 || e->tokenizer->cut == CUT_LLAMA3_DIGITS;
    const unsigned char *piece = e->tokenizer->cut == CUT_GPT2_DIGITS ? text : end;
    while (text < end) {
        if (text == piece) { piece = end_of_piece(e, text, end); }
        const unsigned char *stop = text + contraction_length(text, piece, llama3);
        if (stop == text) { stop = (llama3 ? llama3_word : gpt2_word)(e, text, piece); }
        if (stop - text > LONGEST) { stop = text + LONGEST; }
        count += encode_word(e, text, (int)(stop - text), tokens + count);
        text = stop;
    }
    return count;
}

int64_t encoder_encode(Encoder *e, const unsigned char *text, size_t bytes, int *tokens) {
    const unsigned char *end = text + bytes;
    int64_t count = 0;
    if (e->tokenizer->cut == CUT_BYTES) {
        for (size_t i = 0; i < bytes; i++) { tokens[i] = e->byte_id[text[i]]; }
        return (int64_t)bytes;
    }
    if (!check_stable(e, text, end)) { return -1; }
    for (int id, length; text < end; text += length) {
        const unsigned char *added = find_added(e, text, end, &id, &length);
        count += encode_plain(e, text, added, tokens + count);
        text = added;
        if (length > 0) { tokens[count++] = id; }
    }
    return count;
}
