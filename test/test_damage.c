// Damaged files. One table has what is done to which bytes of which file, and what the error says.
// Then checkpoints whose meta.json is sealed and lies, and what `latest` means.
#define _GNU_SOURCE // memmem

#include "choice_file.h"
#include "shard_file.h"
#include "tokenizer_file.h"

#include <sys/stat.h>
#include <unistd.h>

#define SAVED TINY "--save s --resume latest --fp8-format hybrid --fp8-amax-history-len 6 --keep 0 "
#define NEWEST "s/step_00000002/"

static void save_steps(int last) {
    folder_remove("s");
    FIXTURE(f, SAVED);
    f.snapshot.companions = (Companion[COMPANIONS]){[SAVED_TOKENIZER] = {"some bytes", 10}};
    for (int step = 1; step <= last; step++) { CHECK(fixture_save(&f, step)); }
}

// ---- a file of each kind, and what opens it -----------------------------------------------------

static bool has(int64_t token) {
    return token % 3 == 0;
}

// Tokens 36 to 45 with a mask and a list of documents, tokenizers with and without ranges of
// characters, three questions, two checkpoints, a safetensors file without tensors.
static void write_files(void) {
    static const CharacterRange ranges[] = {{1, 2, 1}, {3, UINT32_MAX, 2}};
    static ChoiceFile f;
    write_shard("a.bin", 2, 36, 10);
    write_bits("a.bin", MASK_MAGIC, has, 36, 0, 0);
    write_bits("a.bin", STARTS_MAGIC, has, 36, 0, 0);
    tokenizer_write_bytes("t.bin");
    static const int32_t added = 'a';
    tokenizer_file_write(
        (TokenizerFile){
            .ranges = ranges, .num_ranges = COUNT(ranges), .added = &added, .num_added = 1},
        -1, "ranges.bin");
    for (int bytes = 2; bytes <= 4; bytes += 2) {
        choice_file_fill(&f, bytes);
        choice_file_write(&f, bytes == 2 ? "c16.bin" : "c.bin");
    }
    blob_write("e.st", "\2\0\0\0\0\0\0\0{}", 10);
    save_steps(2);
}

// Defines a function that opens a file and closes it again.
#define OPENS(name, type, close, call)   \
    static bool name(const char *path) { \
        type it;                         \
        bool ok = path != NULL && call;  \
        if (ok) { close(&it); }          \
        return ok;                       \
    }
OPENS(opens_shard, TokenFile, token_file_close, shard_open(&it, path))
OPENS(opens_data, Dataset, dataset_close, dataset_open(&it, "a.bin", 4, 1000, -1, false))
OPENS(opens_tokenizer, Tokenizer, tokenizer_close, tokenizer_open(&it, path))
OPENS(opens_choices, ChoiceSet, choices_close, choices_open(&it, path, 50))
OPENS(opens_safetensors, SafeTensors, safetensors_close, safetensors_open(&it, path))
OPENS(opens_checkpoint, Checkpoint, checkpoint_close, checkpoint_open(&it, path, true))

// The newest of two checkpoints, which --resume latest means. It takes no other.
static bool opens_newest(const char *path) {
    (void)path;
    return resumed(options_of(SAVED)) == 2;
}

enum { CHECKPOINT, SHARD, MASK, STARTS, TOKENIZER, RANGES, CHOICES, CHOICES16, SAFETENSORS };
static const struct {
    bool (*opens)(const char *path);
    const char *paths[6];
} kinds[] = {
    [CHECKPOINT] = {opens_newest,
                    {NEWEST "meta.json", NEWEST "model.safetensors", NEWEST "config.json",
                     NEWEST "optimizer-0-of-1.safetensors", NEWEST "scaling.safetensors",
                     NEWEST "tokenizer.bin"}},
    [SHARD] = {opens_shard, {"a.bin"}},
    [MASK] = {opens_data, {"a.bin.mask"}},
    [STARTS] = {opens_data, {"a.bin.starts"}},
    [TOKENIZER] = {opens_tokenizer, {"t.bin"}},
    [RANGES] = {opens_tokenizer, {"ranges.bin"}},
    [CHOICES] = {opens_choices, {"c.bin"}},
    [CHOICES16] = {opens_choices, {"c16.bin"}},
    [SAFETENSORS] = {opens_safetensors, {"e.st"}},
};

// ---- the table ----------------------------------------------------------------------------------

typedef enum {
    PUT,   // the four bytes from `at` on are `value`
    PUT8,  // the eight bytes
    SIZE,  // the size is `at`; what is added is 0
    SIZES, // one after another, each size from `at` to below `value`, `by` apart
    BITS,  // the same of bytes, of which one bit is flipped
    GONE,
    FOLDER
} Change;

enum {
    HEADER = SHARD_HEADER_BYTES,
    LAST = -1,
    NUMBERS = HEADER,
    ALL = INT32_MAX,
    BYTES = 2 * 256 + 14
};
#define NUMBER(n) (HEADER + 4 * (n)) // number n of a set of choices
#define RANGE(n, field) (HEADER + 2 * 256 + 1 + 4 * (3 * (n) + (field)))
#define IS_CUT "the file holds 10; it is damaged or cut short"
#define LIES "the header says it is "
#define QUESTION "question 0 of 3 is damaged or has a token outside the vocabulary of 50 (--vocab"

static const struct {
    int kind;
    Change change;
    int64_t at; // below 0: from the end of the file
    uint64_t value;
    int by; // 0: a thirtieth of the file
    const char *expected;
} rows[] = {
    {CHECKPOINT, BITS, 0, ALL, 0, "damaged"},
    {CHECKPOINT, BITS, LAST, ALL, 1, "damaged"},
    {CHECKPOINT, SIZES, 0, 20, 1, "damaged"},
    {CHECKPOINT, SIZES, 20, ALL, 0, "damaged"},
    {CHECKPOINT, SIZE, LAST, 0, 0, "damaged"},
    {CHECKPOINT, SIZE, 1 << 16, 0, 0, "damaged"},
    {CHECKPOINT, GONE, 0, 0, 0, "No such file"},
    {CHECKPOINT, FOLDER, 0, 0, 0, "Is a directory"},

    {SHARD, PUT, 0, 20240521, 0,
     "magic number 20240521, not a token shard's 20240520; make shards"},
    {SHARD, PUT, 4, -1u, 0, "this program reads 1 (uint16) and 2 (uint32)"},
    {SHARD, PUT, 4, 0, 0, "this program reads 1 (uint16) and 2 (uint32)"},
    {SHARD, PUT, 4, 3, 0, "this program reads 1 (uint16) and 2 (uint32)"},
    {SHARD, PUT, 4, 2, 0, "the header says 10 tokens, the file holds 5;"},
    {SHARD, PUT, 8, 9, 0, IS_CUT},
    {SHARD, PUT, 8, 11, 0, IS_CUT},
    {SHARD, PUT, 8, 1u << 31, 0, IS_CUT},
    {SHARD, PUT, 12, 1, 0, IS_CUT},
    {SHARD, PUT, 12, -1u, 0, IS_CUT},
    {SHARD, PUT, 12, 1u << 31, 0, IS_CUT},
    {SHARD, SIZES, 0, HEADER, 93, "too short for a token shard"},
    {SHARD, SIZE, HEADER, 0, 0, "the header says 10 tokens, the file holds 0"},
    {SHARD, SIZE, HEADER + 19, 0, 0, "the file holds 9 and a part"},
    {SHARD, SIZE, HEADER + 21, 0, 0, "the file holds 10 and a part"},
    {SHARD, GONE, 0, 0, 0, "No such file"},
    {SHARD, FOLDER, 0, 0, 0, "Is a directory"},

    {MASK, PUT, 0, 20261125, 0, "magic number 20261125, not a mask of a token shard"},
    {MASK, PUT, 4, 0, 0, "version 0"},
    {MASK, PUT, 4, 257, 0, "version 257"},
    {MASK, PUT, 8, 11, 0, "the mask of another shard"},
    {MASK, PUT, 12, 1, 0, "the mask of another shard"},
    {MASK, PUT, 4 * MASK_SHARD, 1, 0, "the mask of another shard"},
    {MASK, PUT, 4 * MASK_SUM, 1, 0, "not what its checksum says"},
    {MASK, BITS, HEADER, HEADER + 2, 1, "not what its checksum says"},
    {MASK, SIZE, HEADER + 1, 0, 0, "1025 bytes, not the 1026 of a mask of 10 tokens"},
    {MASK, SIZE, HEADER + 4, 0, 0, "1028 bytes, not the 1026"},
    {MASK, SIZE, 100, 0, 0, "too short for a mask of a token shard"},
    {MASK, FOLDER, 0, 0, 0, "Is a directory"},

    {STARTS, PUT, 0, MASK_MAGIC, 0, "magic number 20261124, not a document list's 20261128"},
    {STARTS, PUT, 8, 9, 0, "the document list of another shard"},
    {STARTS, PUT, 4 * MASK_SHARD, 1, 0, "the document list of another shard"},
    {STARTS, PUT, 4 * MASK_SUM, 1, 0, "not what its checksum says"},
    {STARTS, BITS, HEADER, HEADER + 2, 1, "not what its checksum says"},
    {STARTS, SIZE, HEADER + 1, 0, 0, "1025 bytes, not the 1026"},

    {TOKENIZER, PUT, 0, 20240520, 0, "not a tokenizer.bin; ./tokenize makes one"},
    {TOKENIZER, PUT, 4, 1, 0, "tokenizer version 1; this program reads 2"},
    {TOKENIZER, PUT, 4, -2u, 0, "tokenizer version -2"},
    {TOKENIZER, PUT, 8, 0, 0, "vocabulary 0 with end-of-text 256"},
    {TOKENIZER, PUT, 8, -257u, 0, "vocabulary -257"},
    {TOKENIZER, PUT, 8, INT32_MAX, 0, "vocabulary 2147483647"},
    {TOKENIZER, PUT, 8, 256, 0, "vocabulary 256 with end-of-text 256"},
    {TOKENIZER, PUT, 8, 258, 0, "cut short at token 257 of 258"},
    {TOKENIZER, PUT, 12, -1u, 0, "vocabulary 257 with end-of-text -1"},
    {TOKENIZER, PUT, 12, 257, 0, "vocabulary 257 with end-of-text 257"},
    {TOKENIZER, PUT, 16, CUT_COUNT, 0, "cuts text in way 6; this program knows 0 to 5"},
    {TOKENIZER, PUT, 16, -1u, 0, "cuts text in way -1"},
    {TOKENIZER, PUT, 20, 1, 0, "1 ranges of characters, room for 0; it is damaged"},
    {TOKENIZER, PUT, 20, -1u, 0, "-1 ranges of characters"},
    {TOKENIZER, PUT, 20, INT32_MAX, 0, "2147483647 ranges of characters"},
    {TOKENIZER, PUT, 24, -1u, 0, "vocabulary 257 with -1 - 1 as begin-of-text"},
    {TOKENIZER, PUT, 24, 1u << 31, 0, "vocabulary 257 with -2147483648 - 1 as begin-of-text"},
    {TOKENIZER, PUT, 24, 258, 0, "vocabulary 257 with 258 - 1 as begin-of-text"},
    {TOKENIZER, PUT, 28, 258, 0, "vocabulary 257 with 258 - 1 as end of documents"},
    {TOKENIZER, SIZES, 0, HEADER, 1, "not a tokenizer.bin; ./tokenize makes one"},
    {TOKENIZER, SIZES, HEADER, HEADER + BYTES, 1, "cut short at token "},
    {TOKENIZER, GONE, 0, 0, 0, "No such file"},

    {RANGES, PUT, 20, 3, 0, "3 ranges of characters, room for 2; it is damaged"},
    {RANGES, PUT, RANGE(0, 0), 3, 0, "range of characters "}, // 3 to 2
    {RANGES, PUT, RANGE(0, 1), 3, 0, "range of characters "}, // the next one begins at 3
    {RANGES, PUT, RANGE(1, 0), 0, 0, "range of characters "}, // before the first one
    {RANGES, PUT, RANGE(1, 2), CLASS_UNSTABLE + CLASS_COUNT, 0, "range of characters "},
    {RANGES, PUT, 32, 3, 0, "3 added tokens, room for 1; it is damaged"},
    {RANGES, PUT, 32, -1u, 0, "-1 added tokens"},
    {RANGES, PUT, RANGE(2, 0), BYTE_TOKENS, 0, "added token 0 is wrong; it is damaged"},
    {RANGES, PUT, RANGE(2, 0), -1u, 0, "added token 0 is wrong; it is damaged"},

    {CHOICES, PUT, 0, 20240520, 0,
     "not a multiple-choice set's 20240522; scripts/prepare_choices makes them"},
    {CHOICES, PUT, 4, 3, 0, "version 3; this program reads 1 (uint16) and 2 (uint32)"},
    {CHOICES, PUT, 8, 0, 0, "the header says 0 questions"},
    {CHOICES, PUT, 8, -1u, 0, "the header says -1 questions"},
    {CHOICES, PUT, 8, 1 << 30, 0, "the header says 1073741824 questions, the file has room for "},
    {CHOICES, PUT, 8, 2, 0, "numbers after the last question"},
    {CHOICES, PUT, 8, 4, 0, "question 3 of 4 is damaged"},
    {CHOICES, PUT, 20, 2, 0, "text 2 in its header"},
    {CHOICES, PUT, NUMBER(0), 7, 0, QUESTION}, // no start
    {CHOICES, PUT, NUMBER(1), 0, 0, QUESTION}, // its bytes
    {CHOICES, PUT, NUMBER(1), 65534, 0, QUESTION},
    {CHOICES, PUT, NUMBER(3), 2, 0, QUESTION}, // the right answer
    {CHOICES, PUT, NUMBER(4), 0, 0, QUESTION}, // how many answers
    {CHOICES, PUT, NUMBER(4), 60000, 0, QUESTION},
    {CHOICES, PUT, NUMBER(5), 0, 0, QUESTION}, // the context's length
    {CHOICES, PUT, NUMBER(5), 60000, 0, QUESTION},
    {CHOICES, PUT, NUMBER(6), 50, 0, QUESTION}, // outside the vocabulary
    {CHOICES, PUT, NUMBER(9), 0, 0, QUESTION},  // an empty answer
    {CHOICES, GONE, 0, 0, 0, "No such file"},
    {CHOICES16, SIZES, 0, HEADER, 3, "too short for a multiple-choice set"},
    {CHOICES16, SIZES, HEADER, ALL, 3, ""},
    {CHOICES16, PUT, HEADER, 7, 0, QUESTION},

    {SAFETENSORS, SIZES, 0, 8, 1, "too short"},
    {SAFETENSORS, PUT, 0, 3, 0, LIES},
    {SAFETENSORS, PUT, 0, 1u << 31, 0, LIES},
    {SAFETENSORS, PUT8, 0, 1ull << 32, 0, LIES},
    {SAFETENSORS, PUT8, 0, 1ull << 63, 0, LIES},
    {SAFETENSORS, PUT8, 0, UINT64_MAX, 0, LIES},
    {SAFETENSORS, PUT8, 0, UINT64_MAX - 7, 0, LIES},
    {SAFETENSORS, PUT8, 0, 0, 0, "not JSON"},
    {SAFETENSORS, GONE, 0, 0, 0, "No such file"},
};

// Checks that a file of these bytes (NULL: none, or a folder) is refused by its name.
static void check_refused(int row, const char *path, const void *bytes, int64_t size) {
    if (bytes != NULL) { blob_write(path, bytes, (size_t)size); }
    CHECK_REFUSED(kinds[rows[row].kind].opens(path), path);
    CHECK_CONTAINS(error_text(), rows[row].expected);
}

static void check_row(int row, const char *path) {
    CLOSED(blob_free) Blob b = blob_read(path);
    int64_t size = (int64_t)b.size, at = rows[row].at < 0 ? size + rows[row].at : rows[row].at;
    int64_t end = min64(size, (int64_t)rows[row].value), by = rows[row].by;
    if (by == 0) { by = size / 30 + 1; }
    FREED unsigned char *bytes = calloc_or_die((size_t)max64(size, at) + 8, 1);
    memcpy(bytes, b.bytes, b.size);
    switch (rows[row].change) {
    case PUT:
    case PUT8:
        memcpy(bytes + at, &rows[row].value, rows[row].change == PUT ? 4 : 8);
        check_refused(row, path, bytes, size);
        break;
    case SIZE: check_refused(row, path, bytes, at); break;
    case SIZES:
        for (; at < end; at += by) { check_refused(row, path, bytes, at); }
        break;
    case BITS:
        for (; at < end; at += by) {
            bytes[at] ^= (unsigned char)(1 << at % 8);
            check_refused(row, path, bytes, size);
            bytes[at] = b.bytes[at];
        }
        break;
    case GONE:
        remove(path);
        check_refused(row, path, NULL, 0);
        break;
    case FOLDER:
        remove(path);
        mkdir(path, 0755);
        check_refused(row, path, NULL, 0);
        rmdir(path);
        break;
    }
    blob_write(path, b.bytes, b.size);
    CHECK(kinds[rows[row].kind].opens(path));
}

TEST(damaged_files_are_refused) {
    write_files();
    for (int row = 0; row < COUNT(rows); row++) {
        for (int i = 0; i < 6 && kinds[rows[row].kind].paths[i] != NULL; i++) {
            bool was_failing = test_state.failing;
            check_row(row, kinds[rows[row].kind].paths[i]);
            if (test_state.failing && !was_failing) { fprintf(stderr, "  in row %d\n", row); }
        }
    }
    mkfifo("pipe.bin", 0644);
    CHECK_REFUSED(opens_shard("pipe.bin"), "pipe.bin");
    write_shard("empty.bin", 2, 0, 0);
    CHECK_REFUSED(opens_shard("empty.bin"), "empty.bin: a shard without tokens");
}

// ---- checkpoints that lie -----------------------------------------------------------------------

// Replaces text in meta.json, and corrects its checksum.
static void edit_meta(Blob b, const char *from, const char *to) {
    size_t size = b.size - strlen(from) + strlen(to);
    FREED char *text = malloc_or_die(b.size + strlen(to) + 1);
    char *at = memmem(b.bytes, b.size, from, strlen(from));
    if (at == NULL) { die("meta.json has no %s", from); }
    int before = (int)(at - (char *)b.bytes);
    snprintf(text, size + 1, "%.*s%s%.*s", before, b.bytes, to,
             (int)b.size - before - (int)strlen(from), at + strlen(from));
    meta_seal(text, size);
    blob_write("s/step_00000001/meta.json", text, size);
}

TEST(meta_files_that_lie_are_refused) {
    static const struct {
        const char *from, *to, *expected;
    } edits[] = {
        {"\"version\":\t2", "\"version\":\t1",
         "meta.json: checkpoint version 1; this program reads 2"},
        {"\"version\":\t2", "\"version\":\t\"2\"", "checkpoint version nan"},
        {"llm8.c checkpoint", "llm9.c checkpoint", "meta.json: not an llm8.c checkpoint"},
        {"\"step\":\t1", "\"stop\":\t1", "meta.json: a number is missing or out of range"},
        {"\"step\":\t1", "\"step\":\t-1", "a number is missing or out of range"},
        {"\"step\":\t1", "\"step\":\t1e300", "a number is missing or out of range"},
        {"\"step\":\t1", "\"step\":\tnull", "a number is missing or out of range"},
        {"\"samples\":\t40", "\"samples\":\t\"40\"", "a number is missing or out of range"},
        {"\"skipped_in_row\":\t0", "\"skipped_in_row\":\t-1", "a number is missing or out"},
        {"\"skipped_in_row\":\t0", "\"skipped_in_row\":\t1e12", "a number is missing or out"},
        {"\"ranks\":\t1", "\"ranks\":\t0", "a number is missing or out of range"},
        {"\"ranks\":\t1", "\"ranks\":\t4097", "a number is missing or out of range"},
        {"\"skipped\":\t1", "\"skipped\":\t2", "a number is missing or out of range"},
        {"\"skipped_in_row\":\t0", "\"skipped_in_row\":\t2", "a number is missing or out"},
        {"\"step\":\t1", "\"step\":\t1.5", "a number is missing or out of range"},
        {"\"window_count\":\t0", "\"window_count\":\t1", "the window of losses and norms is wrong"},
        {"\"window_count\":\t0", "\"window_count\":\t-1",
         "the window of losses and norms is wrong"},
        {"\"window_loss\":\t[]", "\"window_loss\":\t[1]", "the window of losses and norms"},
        {"\"window_norm\":\t[]", "\"window_norm\":\t[1]", "the window of losses and norms"},
        {"\"ranks\":\t1", "\"ranks\":\t2", "its list of files lacks optimizer-0-of-2.safetensors"},
        {"\"layout_size\":\t", "\"layout_size\":\t1", "do not hold element "},
        {"\"options\":\t{", "\"opinions\":\t{", "meta.json: no options"},
        {"\"files\":\t[", "\"fills\":\t[", "meta.json: no list of files"},
        {"\"files\":\t[", "\"files\":\t[], \"more\":\t[",
         "meta.json: its list of files lacks optimizer-0-of-1.safetensors"},
        {"model.safetensors", "../latest/model.safetensors", "meta.json: a file named '../latest"},
        {"model.safetensors", "..", "s/step_00000001/..: Is a directory"},
        {"\"model.safetensors\"", "\"\"", "meta.json: a file named ''"},
        {"\"model.safetensors\"", "17", "meta.json: a file named ''"},
        {"\"crc32\":\t\"", "\"crc32\":\t\"0", "model.safetensors: damaged: its checksum is "},
        {"\"bytes\":\t", "\"bytes\":\t1", "model.safetensors: damaged: "},
        {"{\n", "[\n", "meta.json: damaged (its checksum does not match)"},
    };
    save_steps(1);
    CLOSED(blob_free) Blob meta = blob_read("s/step_00000001/meta.json");
    EACH (row, edits) {
        Checkpoint c;
        edit_meta(meta, row->from, row->to);
        CHECK_REFUSED(checkpoint_open(&c, "s/step_00000001", true), row->expected);
    }
    char name[2 * PATH_LENGTH];
    memset(name, 'n', sizeof(name));
    name[sizeof(name) - 1] = '\0';
    edit_meta(meta, "model.safetensors", name);
    CHECK(!opens_checkpoint("s/step_00000001"));
    edit_meta(meta, "\"step\":\t1", "\"step\":\t3"); // a valid edit can be opened
    CHECK(opens_checkpoint("s/step_00000001"));
    CHECK(rename("s/step_00000001/model.safetensors", "s/step_00000001/other.safetensors") == 0);
    CHECK(link("s/step_00000001/other.safetensors", "s/step_00000001/model.safetensors") == 0);
    edit_meta(meta, "\"model.safetensors\"", "\"other.safetensors\"");
    CHECK_REFUSED(checkpoint_open(&(Checkpoint){0}, "s/step_00000001", true),
                  "meta.json: its list of files lacks model.safetensors");
}

static void damage(int step) {
    text_write(text_of("s/step_%08d/config.json", step), "{}");
}

TEST(resume_finds_what_latest_means) {
    save_steps(4);
    CHECK_EQUAL(resumed(options_of(SAVED)), 4);
    CHECK(unlink("s/latest") == 0 && symlink("step_00000002", "s/latest") == 0);
    CHECK_EQUAL(resumed(options_of(SAVED)), 4); // wherever the link leads
    CHECK(rename("s/step_00000004", "s/step_00000004.aside-1") == 0);
    CHECK_EQUAL(resumed(options_of(SAVED)), 3);
    CHECK(rename("s/step_00000004.aside-1", "s/step_00000004") == 0);
    damage(4);
    CHECK_EQUAL(resumed(options_of(SAVED)), -1);
    CHECK_CONTAINS(error_text(), "s/step_00000004/config.json: damaged: 2 bytes, not ");
    CHECK_EQUAL(resumed(options_of(SAVED "--resume s/step_00000001")), 1);
    CHECK_EQUAL(resumed(options_of(SAVED "--save nowhere")), 0);
    CHECK_EQUAL(resumed(options_of(SAVED "--resume s/step_9")), -1);
    CHECK_CONTAINS(error_text(), "--resume s/step_9: no such folder; --list-checkpoints shows");
    // a folder that may not be read is not a missing one; root may read it
    uid_t user = geteuid();
    CHECK(chmod("s/step_00000003", 0) == 0 && chmod(".", 0755) == 0);
    CHECK(user != 0 || seteuid(65534) == 0);
    CHECK_EQUAL(resumed(options_of(SAVED "--resume s/step_00000003")), -1);
    CHECK_CONTAINS(error_text(), "--resume s/step_00000003/meta.json: Permission denied");
    CHECK_EQUAL(resumed(options_of(SAVED "--resume s/step_00000003/in")), -1);
    CHECK_CONTAINS(error_text(), "--resume s/step_00000003/in: Permission denied");
    CHECK(seteuid(user) == 0 && chmod("s/step_00000003", 0755) == 0);
}
