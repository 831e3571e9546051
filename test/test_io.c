// Files are complete or not there.
#include "fixture.h"

#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

TEST(writers_keep_length_and_checksum) {
    enum { SIZE = 5 << 20 };
    static const size_t pieces[] = {1, 7, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20};
    FREED unsigned char *data = malloc_or_die(SIZE);
    for (size_t i = 0; i < SIZE; i++) { data[i] = (unsigned char)(i * i >> 7); }
    for (int p = 0; p < COUNT(pieces); p++) {
        size_t size = pieces[p] < 4096 ? 100000 : SIZE;
        FileWriter w;
        CHECK(writer_open(&w, "f"));
        for (size_t at = 0; at < size; at += pieces[p]) {
            writer_write(&w, data + at, at + pieces[p] < size ? pieces[p] : size - at);
        }
        CHECK_EQUAL(w.bytes, size);
        CHECK_EQUAL(w.crc, crc32_z(0, data, size));
        CHECK(writer_close(&w));
        CLOSED(blob_free) Blob b = blob_read("f");
        CHECK_EQUAL(b.size, size);
        CHECK_BITS(b.bytes, data, size);
    }
}

TEST(messages_are_one_printable_line) {
    static const struct {
        const char *text, *expected;
    } rows[] = {
        {"plain, \\n \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80",
         "plain, \\n \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"a\nb\r\tc", "a\\nb\\x0d\\x09c"},
        {"\x1b[2J\x7f", "\\x1b[2J\\x7f"},
        {"\xc2\x9b"
         "31m\xc2\xa0",
         "\\xc2\\x9b31m\xc2\xa0"}, // CSI as one character
        {"\xe2\x80\xa8\xe2\x80\xae",
         "\\xe2\\x80\\xa8\\xe2\\x80\\xae"}, // a line's end, right to left
        {"\xff\xc3", "\\xff\\xc3"},
        {"\xc0\x8a\xed\xa0\x80\x9b", "\\xc0\\x8a\\xed\\xa0\\x80\\x9b"}, // too long; a surrogate
        {"\xf5\x80\x80\x80", "\\xf5\\x80\\x80\\x80"},
        {"\xf9\x80\x80\x80", "\\xf9\\x80\\x80\\x80"},
        // the least and the last characters of their lengths, beside surrogates, and before them
        {"\xe0\xa0\x80\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf",
         "\xe0\xa0\x80\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf"},
        {"\xf0\x8f\xbf\xbf", "\\xf0\\x8f\\xbf\\xbf"},
        {"\xc2\x9f\xe2\x80\x8b", "\\xc2\\x9f\\xe2\\x80\\x8b"},
        {"\xe2\x81\xaf", "\\xe2\\x81\\xaf"},
    };
    char out[64];
    EACH (row, rows) {
        CHECK_TEXT(printable(out, sizeof(out), row->text), row->expected);
        CHECK(!fail("%s", row->text));
        CHECK_TEXT(error_text(), row->expected);
    }
    CHECK_TEXT(printable(out, 6, "abcd\n"), "abcd"); // an escape is whole
    CHECK_TEXT(printable(out, 5, "abc\xc3\xa9"), "abc");
}

TEST(utf8_ends_with_its_text) {
    const unsigned char text[] = "\xf0\x9f\x98\x80\xc1\xbf";
    uint32_t code = 0;
    for (int n = 1; n <= 4; n++) {
        CHECK_EQUAL(utf8_decode(text, text + n, &code), n == 4 ? 4 : 0);
    }
    CHECK_EQUAL(code, 0x1f600);
    CHECK_EQUAL(utf8_decode(text + 4, text + 6, &code), 0); // too long, for the last of one byte
}

TEST(what_is_no_file_is_refused) {
    size_t bytes;
    CHECK_REFUSED(file_read("missing", &bytes), "missing: No such file or directory");
    CHECK_REFUSED(file_read(".", &bytes), ".: Is a directory");
    CHECK_REFUSED(file_read("/dev/null", &bytes), "/dev/null: a pipe or a device, not a file");
    text_write("pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n");
    CHECK_REFUSED(file_read("pointer", &bytes), "pointer: a pointer of Git LFS, not the file");
}

// Each thread computes the checksum of a part of a large file.
TEST(large_files_are_summed_in_parts) {
    enum { SIZE = (40 << 20) + 7 };
    FREED unsigned char *data = malloc_or_die(SIZE);
    uint32_t crc;
    for (size_t i = 0; i < SIZE; i++) { data[i] = (unsigned char)(i * i >> 11); }
    blob_write("f", data, SIZE);
    size_t bytes;
    int file = file_open("f", &bytes);
    for (int64_t n = 0; n <= SIZE; n += SIZE / 3) {
        CHECK(file_checksum(file, "f", n, &crc) && crc == crc32_z(0, data, (size_t)n));
    }
    CHECK(truncate("f", SIZE / 2) == 0); // a thread other than the first must see it
    CHECK_REFUSED(file_checksum(file, "f", SIZE, &crc), "f: cut short while it was read");
    close(file);
}

TEST(what_is_cut_short_is_an_error) {
    char text[4] = "";
    size_t bytes;
    text_write("f", "abcdef");
    int file = file_open("f", &bytes);
    CHECK(file >= 0 && bytes == 6);
    CHECK(file_read_at(file, "f", text, 3, 3) && memcmp(text, "def", 3) == 0);
    CHECK(truncate("f", 5) == 0);
    CHECK_REFUSED(file_read_at(file, "f", text, 3, 3), "f: cut short while it was read");
    close(file);
    CHECK_REFUSED(file_read_at(file, "f", text, 3, 3), "f: Bad file descriptor");
    CHECK_TEXT(path_name("a/b/c.bin"), "c.bin");
    CHECK_TEXT(path_name("c.bin"), "c.bin");
}

TEST(files_are_replaced_at_once) {
    struct stat before, after;
    text_write("f", "old");
    int old = stat("f", &before);
    FILE *reader = fopen("f", "r");
    CHECK(file_replace("f", "newer", 5));
    char text[8] = "";
    CHECK(fread(text, 1, 8, reader) == 3 && memcmp(text, "old", 3) == 0); // it is still open
    fclose(reader);
    CHECK(old == 0 && stat("f", &after) == 0 && before.st_ino != after.st_ino);
    CLOSED(blob_free) Blob b = blob_read("f");
    CHECK(b.size == 5 && memcmp(b.bytes, "newer", 5) == 0);
    CHECK(!path_exists("f.new"));
    CHECK(!file_replace("no/such/folder", "x", 1));
    CHECK_CONTAINS(error_text(), "no/such/folder");
}

TEST(folders_are_made_and_removed) {
    CHECK(folder_make("a/b//c/") && folder_make("a/b/c"));
    text_write("a/b/c/f", "x");
    CHECK(!folder_make("a/b/c/f/d"));
    CHECK_CONTAINS(error_text(), "a/b/c/f: the folder could not be made: a file of that name");
    CHECK(!folder_make("/proc/none/such"));
    CHECK_CONTAINS(error_text(), "/proc/none: the folder could not be made: ");
    CHECK(symlink("/nowhere", "a/b/dangling") == 0);
    text_write("outside", "x");
    CHECK(symlink("../outside", "a/b/link") == 0);
    CHECK(folder_remove("a") && !path_exists("a")); // with the folders in it
    CHECK(path_exists("outside"));                  // but not the targets of its links
    CHECK(!folder_remove("a"));
    CHECK_CONTAINS(error_text(), "a: No such file");
}
