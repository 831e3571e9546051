// Turns text files into token shards of bytes, so that no Python is needed to make data:
// ./tokenize --output-prefix data/mine notes.txt book.txt
// writes data/mine_train.bin, data/mine_val.bin and data/tokenizer.bin. Each file is a document: an
// end-of-text token, then its bytes; the end of each goes to the validation shard.
#include "shard.h"
#include "tokenizer.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t *counts; // [BYTE_VOCAB] how often each token was written
    FileWriter writer;
    int64_t tokens;
} Output;

static void put_tokens(Output *out, const unsigned char *text, int64_t n) {
    uint16_t token = BYTE_END_OF_TEXT;
    writer_write(&out->writer, &token, sizeof(token));
    out->counts[BYTE_END_OF_TEXT]++;
    for (int64_t i = 0; i < n; i++) {
        token = text[i];
        writer_write(&out->writer, &token, sizeof(token));
        out->counts[token]++;
    }
    out->tokens += n + 1;
}

// How many bytes of a text are for training: the rest starts a line, unless that would cost more
// than half of it.
static int64_t split_point(const MappedFile *text, double valid_fraction) {
    int64_t n = (int64_t)text->bytes, at = n - (int64_t)((double)n * valid_fraction);
    const unsigned char *line = at < n ? memchr(text->data + at, '\n', (size_t)(n - at) / 2) : NULL;
    return line != NULL ? line + 1 - text->data : at;
}

// The entropy of the token frequencies: the loss of the best model that ignores context.
static double unigram_entropy(const int64_t counts[BYTE_VOCAB]) {
    double total = 0, sum = 0;
    for (int i = 0; i < BYTE_VOCAB; i++) { total += (double)counts[i]; }
    for (int i = 0; i < BYTE_VOCAB; i++) {
        if (counts[i] > 0) { sum -= (double)counts[i] / total * log((double)counts[i] / total); }
    }
    return sum;
}

static void open_output(Output *out, const char *prefix, const char *part) {
    Error err;
    char path[PATH_LENGTH];
    int32_t header[SHARD_HEADER_BYTES / 4] = {0};
    *out = (Output){.counts = calloc_or_die(BYTE_VOCAB, sizeof(int64_t))};
    path_format(path, "%s_%s.bin.new", prefix, part);
    if (!writer_open(&out->writer, path, &err)) { die("%s", err.text); }
    writer_write(&out->writer, header, sizeof(header)); // the count is not known yet
}

// Writes the header over its place and gives the file its name.
static void close_output(Output *out, const char *prefix, const char *part) {
    Error err;
    char path[PATH_LENGTH], fresh[PATH_LENGTH];
    int32_t header[SHARD_HEADER_BYTES / 4];
    path_format(fresh, "%s_%s.bin.new", prefix, part);
    path_format(path, "%s_%s.bin", prefix, part);
    if (!writer_close(&out->writer, &err)) { die("%s", err.text); }
    double entropy = unigram_entropy(out->counts);
    free(out->counts);
    if (out->tokens == 0) {
        remove(fresh);
        return;
    }
    shard_header(header, 2, out->tokens);
    FILE *file = fopen(fresh, "r+b");
    bool ok = file != NULL && fwrite(header, sizeof(header), 1, file) == 1;
    ok = file != NULL && fclose(file) == 0 && ok;
    if (!ok || rename(fresh, path) != 0) { die("%s: could not be written", path); }
    printf("%s: %lld tokens, unigram entropy %.4f\n", path, (long long)out->tokens, entropy);
}

static void tokenize_files(const char *prefix, double valid_fraction, char **files, int count) {
    Error err;
    Output train, valid;
    open_output(&train, prefix, "train");
    open_output(&valid, prefix, "val");
    for (int i = 0; i < count; i++) {
        MappedFile text;
        if (!file_map(&text, files[i], &err)) { die("%s", err.text); }
        if (text.bytes == 0) { die("%s: an empty file", files[i]); }
        int64_t split = split_point(&text, valid_fraction);
        put_tokens(&train, text.data, split);
        if (split < (int64_t)text.bytes) {
            put_tokens(&valid, text.data + split, (int64_t)text.bytes - split);
        }
        file_unmap(&text);
    }
    close_output(&train, prefix, "train");
    close_output(&valid, prefix, "val");
}

static double parse_fraction(const char *text) {
    char *end;
    double fraction = strtod(text, &end);
    if (*text == '\0' || *end != '\0' || !(fraction >= 0 && fraction < 1)) {
        die("--valid-fraction %s: must be a number from 0 to below 1", text);
    }
    return fraction;
}

int main(int argc, char **argv) {
    static const struct option names[] = {{"output-prefix", required_argument, NULL, 'o'},
                                          {"valid-fraction", required_argument, NULL, 'f'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    const char *prefix = NULL;
    double valid_fraction = 0.1;
    opterr = 0; // the error is ours to print
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (c) {
        case 'o': prefix = optarg; break;
        case 'f': valid_fraction = parse_fraction(optarg); break;
        case 'h':
            printf("Usage: %s --output-prefix PREFIX [--valid-fraction 0.1] FILE...\n"
                   "Writes PREFIX_train.bin, PREFIX_val.bin (token shards of bytes) and, beside "
                   "them, tokenizer.bin.\n",
                   argv[0]);
            return 0;
        default: die("%s: no such option, or its value is missing (--help)", argv[optind - 1]);
        }
    }
    if (prefix == NULL) { die("--output-prefix is missing (--help)"); }
    if (optind >= argc) { die("no text files given (--help)"); }

    Error err;
    char folder[PATH_LENGTH], tokenizer[PATH_LENGTH];
    path_format(folder, "%s", prefix);
    char *slash = strrchr(folder, '/');
    strcpy(slash != NULL ? slash : folder, slash != NULL ? "" : ".");
    if (folder[0] != '\0' && !folder_make(folder, &err)) { die("%s", err.text); }
    tokenize_files(prefix, valid_fraction, argv + optind, argc - optind);
    path_format(tokenizer, "%s/tokenizer.bin", folder);
    if (!tokenizer_write_bytes(tokenizer, &err)) { die("%s", err.text); }
    printf("%s: vocabulary %d\n", tokenizer, BYTE_VOCAB);
    return 0;
}
