// From token shards to batches; the files of numbers that shards and multiple-choice sets are.
//
// A token file, little-endian:
//   bytes 0..1023   256 int32: [0] the magic number of its kind, [1] version, 1: the numbers are
//                   uint16, 2: uint32, [2] and [3] counts, [4] the mark of the tokenizer
//                   (tokenizer.h; 0: not known), the rest 0
//   from byte 1024  the numbers, most of them tokens
// A token shard has magic 20240520; [2] and [3] are the lower and the upper half of the count of
// tokens, both unsigned; nothing follows the tokens. llm.c's shards are version 1 with [3] zero.
// A multiple-choice set is in choices.h.
//
// A data set is the tokens of its shards, in the order of their names, as one stream. Window w of
// the stream is the inputs [wT, wT+T) and the targets [wT+1, wT+T+1). Every token but the first,
// and the at most T-1 at the end that fill no window, is a target in exactly one window.
//
// A run is an endless sequence of samples, numbered from 0: sample s is in epoch s / windows, and
// an epoch visits every window once, in an order that is a function of (seed, epoch). So the
// position of a run is one number, the samples consumed. In micro-batch m of a step, rank r of R
// reads B samples from consumed + (m R + r) B on; a run can be resumed with another R or B.
#pragma once

#include "../base/io.h"

BEGIN_C

enum { SHARD_MAGIC = 20240520, SHARD_HEADER_BYTES = 1024, SHARD_TOKENIZER = 4 };

typedef struct {
    char path[PATH_LENGTH];
    int file;
    size_t bytes;
    int32_t header[SHARD_TOKENIZER + 1];
    int token_bytes;    // of a number: 2 or 4
    int64_t count;      // numbers in the file
    uint32_t tokenizer; // the mark; 0: not known
} TokenFile;

// What messages say of a kind: "... not a NAME ...; REMEDY".
typedef struct {
    int32_t magic;
    const char *name, *remedy;
} TokenFileKind;

// Refuses a file that is missing, too short for a header, or of another magic number or version.
bool token_file_open(TokenFile *f, const char *path, TokenFileKind kind);
void token_file_close(TokenFile *f);

// Numbers [begin, begin + n) of the file.
bool token_file_read(const TokenFile *f, int64_t begin, int64_t n, uint32_t *out);

// Also refuses a shard without tokens, or whose size is not what its header says.
bool shard_open(TokenFile *shard, const char *path);

// The mark of the first shard that a glob pattern matches; 0: it has none, or cannot be read.
uint32_t shards_mark(const char *pattern);

// The header of a shard whose tokenizer is not known.
void shard_header(int32_t header[SHARD_HEADER_BYTES / 4], int token_bytes, int64_t count);

// The files of a kind that a glob pattern matches, at least one.
bool token_files_find(glob_t *found, const char *pattern, TokenFileKind kind);

typedef struct {
    int num_shards;
    TokenFile *shards;
    int64_t tokens, windows;
    int seq_length, vocab;
    uint32_t tokenizer; // the mark that the shards carry; 0: not known
    char *identity;     // a line for each shard: "CRC-32 NAME", control characters as ?
} Dataset;

// Opens and checks every shard that the glob pattern matches. Refuses shards of two tokenizers.
bool dataset_open(Dataset *data, const char *pattern, int seq_length, int vocab);
void dataset_close(Dataset *data);

// Refuses shards whose checksums are not those of `identity`, in its order, and names the first.
// Folders and names may differ. The checksum of a shard above 4 MiB is that of 64 parts of it.
// whose: "... that WHOSE read".
bool dataset_match(const Dataset *data, const char *identity, const char *whose);
// The CRC-32 of an identity's checksums, as text: the same for the same shards in the same order.
const char *identity_sum(const char *identity, char out[9]);

typedef struct {
    const Dataset *data;
    uint64_t seed;
    bool shuffle;
} Loader;

// The window of a sample.
int64_t loader_window(const Loader *loader, int64_t sample);

// inputs, targets: [count,T], the samples from `sample` on. A sample from `end` on (INT64_MAX: no
// end) gets inputs 0 and targets -1, which the loss ignores. Refuses a token outside the
// vocabulary, and says where it is.
bool loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                  int *targets);

END_C
