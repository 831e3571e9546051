// Makes token shards from text files, without Python:
// ./tokenize --output-prefix data/mine notes.txt book.txt
// writes data/mine_train.bin, data/mine_val.bin and data/mine_tokenizer.bin. The first part of each
// text file becomes a document of the training shard, the last part one of the validation shard. A
// document is a begin-of-text token (by default the end-of-text token) and then the text. The
// tokens are bytes, or those of the file that --tokenizer names. This file must have the rule by
// which text is split into words.
#include "choices.h"
#include "loader.h"
#include "tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static double valid_fraction = 0.1;
static Tokenizer tokenizer;
static Encoder encoder;
static int token_bytes;

typedef struct {
    char path[PATH_LENGTH];
    FileWriter writer;
    int64_t *counts; // [vocab] occurrences of each token
    int64_t tokens;
} Output;

static Output outputs[2]; // training, validation

static void put_token(Output *out, int token) {
    uint32_t number = (uint32_t)token;
    writer_write(&out->writer, &number, (size_t)token_bytes); // little-endian
    out->counts[token]++;
    out->tokens++;
}

enum { PART = 1 << 20 }; // a text is encoded in parts of at least this many bytes

// Returns where a part of a text ends: after a line break between two visible ASCII characters,
// because no tokenizer has a word across such a line break. Returns n if there is none.
static size_t part_end(const unsigned char *text, size_t n) {
    for (size_t at = PART; at < n; at++) {
        if (text[at - 1] == '\n' && text[at] > ' ' && text[at] < 127 && text[at - 2] > ' ' &&
            text[at - 2] < 127) {
            return at;
        }
    }
    return n;
}

typedef struct {
    const char *path;
    int file;
    size_t begin, bytes;     // begin: after a byte-order mark, which is no part of the text
    bool has_rows;           // it begins as rows of JSON do
    bool names_end, has_nul; // put_text has found the end-of-text token's name, or a NUL
} Text;

static void read_text(const Text *text, void *out, size_t bytes, size_t at) {
    or_die(file_read_at(text->file, text->path, out, bytes, (int64_t)at));
}

// Writes bytes begin..end of a text as a document.
static void put_text(Output *out, Text *text, size_t begin, size_t end) {
    size_t room = 2 * PART;
    FREED unsigned char *bytes = malloc_or_die(room);
    put_token(out, tokenizer.begin_of_text);
    while (begin < end) {
        size_t n = end - begin < room ? end - begin : room;
        read_text(text, bytes, n, begin);
        size_t part = part_end(bytes, n);
        if (part == n && n < end - begin) { // no line break that ends a part has been read yet
            room *= 2;
            bytes = realloc_or_die(bytes, room);
            continue;
        }
        text->names_end |= tokenizer_names_end(&tokenizer, bytes, part);
        text->has_nul |= memchr(bytes, '\0', part) != NULL;
        FREED int *tokens = malloc_or_die(part * sizeof(int));
        encoder.offset = begin;
        int64_t count = encoder_encode(&encoder, bytes, part, tokens);
        if (count < 0) { die("%s: %s", text->path, error_text()); }
        for (int64_t i = 0; i < count; i++) { put_token(out, tokens[i]); }
        begin += part;
    }
}

// Deletes incomplete files when the program ends for any reason.
static void remove_unfinished(void) {
    for (int i = 0; i < 2; i++) {
        if (outputs[i].writer.path[0] != '\0') { remove(outputs[i].writer.path); }
    }
}

// Opens the file that is renamed to the shard when it is complete. The lock of this file keeps out
// other processes with the same prefix. The lock lasts until this process ends, because a second
// descriptor stays open. The header is written at the end, because it has the count of tokens.
static void open_output(Output *out) {
    char fresh[PATH_LENGTH];
    struct stat own, named;
    int file = -1;
    path_format(fresh, "%s.new", out->path);
    do { // tries again if another process has renamed the file meanwhile
        if (file >= 0) { close(file); }
        file = open(fresh, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (file < 0) { die("%s: %s", fresh, strerror(errno)); }
        if (flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            die("%s: another ./tokenize is writing it; wait for its end, or give another "
                "--output-prefix",
                fresh);
        }
    } while (fstat(file, &own) != 0 || stat(fresh, &named) != 0 || named.st_ino != own.st_ino);
    path_format(out->writer.path, "%s", fresh);
    out->writer.file = fdopen(file, "w");
    if (out->writer.file == NULL || dup(file) < 0 || ftruncate(file, 0) != 0 ||
        fseek(out->writer.file, SHARD_HEADER_BYTES, SEEK_SET) != 0) {
        die("%s: %s", fresh, strerror(errno));
    }
}

// Writes the header and closes the file, which keeps its temporary name. Prints the entropy of the
// token frequencies: the loss of the best model that ignores context.
static void close_output(Output *out) {
    int32_t header[SHARD_HEADER_BYTES / 4];
    double entropy = 0;
    for (int i = 0; i < tokenizer.vocab; i++) {
        double share = (double)out->counts[i] / (double)out->tokens;
        if (out->counts[i] > 0) { entropy -= share * log(share); }
    }
    free(out->counts);
    shard_header(header, token_bytes, out->tokens);
    header[SHARD_TOKENIZER] = (int32_t)tokenizer.fingerprint;
    bool headed = fseek(out->writer.file, 0, SEEK_SET) == 0 &&
                  fwrite(header, sizeof(header), 1, out->writer.file) == 1;
    or_die(writer_close(&out->writer));
    if (!headed) { die("%s: could not be written", out->path); }
    if (out->tokens > 0) {
        printf("%s: %s tokens, unigram entropy %.4f\n", out->path,
               format_count((char[32]){0}, out->tokens), entropy);
    }
}

// Gives a shard its name, unless it has no tokens.
static void publish_output(Output *out) {
    if (out->tokens == 0) { return; }
    if (rename(out->writer.path, out->path) != 0) { die("%s: %s", out->path, strerror(errno)); }
    out->writer.path[0] = '\0';
}

static Text open_text(const char *path) {
    static const char mark[] = "\xef\xbb\xbf", blank[] = " \t\r\n";
    Text text = {.path = path};
    text.file = file_open(path, &text.bytes);
    or_die(text.file >= 0);
    char first[64] = "";
    int32_t magic;
    size_t n = text.bytes < sizeof(first) ? text.bytes : sizeof(first) - 1;
    read_text(&text, first, n, 0);
    memcpy(&magic, first, sizeof(magic));
    // a glob such as data/* also matches what an earlier run or scripts/prepare_data has written
    if (magic == SHARD_MAGIC || magic == LLAMA3_MAGIC || magic == MASK_MAGIC ||
        magic == STARTS_MAGIC || magic == CHOICES_MAGIC || magic == TOKENIZER_MAGIC) {
        die("%s: a shard or a tokenizer, or a file beside them, no text; name the texts alone",
            path);
    }
    text.begin = strncmp(first, mark, strlen(mark)) == 0 ? strlen(mark) : 0;
    if (text.begin == text.bytes) { die("%s: an empty file", path); }
    const char *row = first + text.begin;
    row += strspn(row, " \t\r\n[");
    text.has_rows = *row == '{' && row[1 + strspn(row + 1, blank)] == '"';
    return text;
}

// Returns where the next line after `at` begins. If no line begins before `end`, returns where the
// first whole character of UTF-8 from `at` on begins.
static size_t next_line(const Text *text, size_t at, size_t end) {
    char piece[4096];
    for (size_t from = at, n; from < end; from += n) {
        n = end - from < sizeof(piece) ? end - from : sizeof(piece);
        read_text(text, piece, n, from);
        const char *line = memchr(piece, '\n', n);
        if (line != NULL) { return from + (size_t)(line + 1 - piece); }
    }
    size_t n = text->bytes - at < 3 ? text->bytes - at : 3, rest = 0; // rest of a cut character
    read_text(text, piece, n, at);
    while (rest < n && (piece[rest] & 0xc0) == 0x80) { rest++; }
    return at + rest;
}

static void tokenize_file(const char *path, Output *train, Output *valid) {
    Text text = open_text(path);
    // the validation text starts where a line does, unless this would leave less than half of it
    size_t split = text.bytes - (size_t)((double)(text.bytes - text.begin) * valid_fraction);
    split = next_line(&text, split, split + (text.bytes - split) / 2);
    put_text(train, &text, text.begin, split);
    if (split < text.bytes) { put_text(valid, &text, split, text.bytes); }
    if (text.has_nul) {
        warn("%s: it has NUL bytes, as packed files and UTF-16 have; unpack, convert or clean "
             "it",
             path);
    }
    if (text.has_rows) {
        warn("%s: rows of JSON, which are trained on with their names and quotes; "
             "scripts/prepare_data reads rows",
             path);
    }
    if (text.names_end) {
        warn("%s: it contains the end-of-text token's name, which is cut as any text: it is one "
             "document; give its parts as files",
             path);
    }
    close(text.file);
}

// Opens the tokenizer, and writes it to `path`, beside the shards. given: the file of --tokenizer;
// NULL: the tokenizer of bytes.
static void open_tokenizer(const char *path, const char *given) {
    const char *from = given != NULL ? given : path;
    if (given == NULL) { or_die(tokenizer_write_bytes(path)); }
    if (!tokenizer_open(&tokenizer, from)) { die("--tokenizer %s", error_text()); }
    if (!encoder_open(&encoder, &tokenizer)) { die("--tokenizer %s: %s", from, error_text()); }
    // in the shards, the first token of a document is also the end of the one before it
    tokenizer_set_document_end(&tokenizer, tokenizer.begin_of_text);
    if (given != NULL) { or_die(file_replace(path, tokenizer.data, tokenizer.bytes)); }
    token_bytes = tokenizer.vocab <= 1 << 16 ? 2 : 4;
    for (int i = 0; i < 2; i++) {
        outputs[i].counts = calloc_or_die((size_t)tokenizer.vocab, sizeof(int64_t));
    }
    printf("%s: vocabulary %d\n", path, tokenizer.vocab);
}

int main(int argc, char **argv) {
    static const struct option names[] = {{"output-prefix", required_argument, NULL, 'o'},
                                          {"valid-fraction", required_argument, NULL, 'f'},
                                          {"tokenizer", required_argument, NULL, 't'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    const char *prefix = NULL, *given = NULL;
    char *end;
    opterr = 0; // this program prints the error
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'o': prefix = optarg; break;
        case 't': given = optarg; break;
        case 'f':
            valid_fraction = strtod(optarg, &end);
            if (*optarg == '\0' || *end != '\0' || strpbrk(optarg, "xX") != NULL ||
                !(valid_fraction >= 0 && valid_fraction < 1)) {
                die("--valid-fraction %s: must be a number from 0 to below 1", optarg);
            }
            break;
        case 'h':
            printf("Usage: %s --output-prefix PREFIX [--valid-fraction 0.1] [--tokenizer FILE] "
                   "FILE...\n"
                   "Writes PREFIX_train.bin, PREFIX_val.bin (token shards) and "
                   "PREFIX_tokenizer.bin:\nthat of bytes, or --tokenizer's (GPT-2's, Llama 3's, "
                   "made by scripts/prepare_data).\n",
                   argv[0]);
            return 0;
        default: die("%s: no such option, or its value is missing (--help)", argv[optind - 1]);
        }
    }
    if (prefix == NULL) { die("--output-prefix is missing (--help)"); }
    if (optind >= argc) { die("no text files given (--help)"); }
    Output *train = &outputs[0], *valid = &outputs[1];
    char path[PATH_LENGTH], copy[PATH_LENGTH];
    path_format(train->path, "%s_train.bin", prefix);
    path_format(valid->path, "%s_val.bin", prefix);
    path_format(path, "%s_" TOKENIZER_FILE, prefix);
    const char *written[] = {train->path, valid->path, path};
    for (int i = optind; i < argc; i++) { // checks all files before anything is written
        close(open_text(argv[i]).file);
        for (int w = 0; w < 3; w++) {
            if (path_is(argv[i], path_id(written[w]))) {
                die("%s: a text, which --output-prefix %s would overwrite; give another prefix",
                    argv[i], prefix);
            }
        }
    }
    path_format(copy, "%s", path);
    or_die(folder_make(dirname(copy)));
    atexit(remove_unfinished);
    open_output(train);
    open_output(valid);
    open_tokenizer(path, given);
    for (int i = optind; i < argc; i++) { tokenize_file(argv[i], train, valid); }
    close_output(train);
    close_output(valid);
    // an older validation shard must not stay beside the new training shard
    bool older = remove(valid->path) == 0;
    if (older && valid->tokens == 0) { printf("%s: of earlier texts, deleted\n", valid->path); }
    publish_output(train);
    publish_output(valid);
    encoder_close(&encoder);
    tokenizer_close(&tokenizer);
    return 0;
}
