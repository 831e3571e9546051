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
// A mask, which lies beside its shard as SHARD.mask, says which of the shard's tokens count as
// targets; without one all do. It is a token file of magic 20261124, always uint16: [2] and [3] are
// the shard's count of tokens, [4] is the CRC-32 of the shard (as in Dataset.identity), [5] that of
// the numbers, [6] the length of the windows that documents were packed into, 0 for none. Number i
// says it of the tokens from 16 i on, the lowest bit first, 1: it counts; bits past the last token
// are 0.
//
// A data set is the tokens of its shards, in the order of their names, as one stream. Window w of
// the stream is the inputs [wT, wT+T) and the targets [wT+1, wT+T+1). Every token but the first,
// and the at most T-1 at the end that fill no window, is a target in exactly one window. Where a
// shard has a mask, targets that do not count are -1, windows with no other target are left out,
// and the last window may lack the target past the stream's end, so that windows of T tokens with
// nothing after them are all read.
//
// A run is an endless sequence of samples, numbered from 0: sample s is in epoch s / windows, and
// an epoch visits every window once, in an order that is a function of (seed, epoch). So the
// position of a run is one number, the samples consumed. In micro-batch m of a step, rank r of R
// reads B samples from consumed + (m R + r) B on; a run can be resumed with another R or B.
#pragma once

#include "../base/io.h"

BEGIN_C

enum {
    SHARD_MAGIC = 20240520,
    SHARD_HEADER_BYTES = 1024,
    SHARD_TOKENIZER = 4,
    SHARD_MASKED, // 1: there is a mask
    MASK_MAGIC = 20261124,
    MASK_SHARD = 4, // places in a mask's header
    MASK_SUM,
    MASK_WINDOW,
    MASK_BITS = 16 // of a number
};

typedef struct {
    char path[PATH_LENGTH];
    int file;
    size_t bytes;
    int32_t header[MASK_WINDOW + 1];
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

// A window with targets that count.
typedef struct {
    int64_t window;
    int targets;
} MaskedWindow;

typedef struct {
    int num_shards;
    TokenFile *shards;
    uint32_t **masks;        // [num_shards] the numbers of a shard's mask; NULL: all tokens count
    int64_t tokens, windows; // windows: of an epoch
    int64_t targets;         // of an epoch
    MaskedWindow *with_targets; // [windows]; NULL: no shard has a mask, all windows are read whole
    int cuts;                   // windows of this length were packed, and are cut; 0: none are
    int seq_length, vocab;
    uint32_t tokenizer; // the mark that the shards carry; 0: not known
    char *identity;     // a line for each shard: "CRC-32 NAME", control characters as ?; the CRC-32
                        // goes on with the mask's
} Dataset;

// Opens and checks every shard that the glob pattern matches, and its mask. Refuses shards of two
// tokenizers, and a mask of another shard.
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

// How many targets of `count` samples from `sample` on count.
int64_t loader_targets(const Loader *loader, int64_t sample, int64_t count);

// inputs, targets: [count,T], the samples from `sample` on. A sample from `end` on (INT64_MAX: no
// end) gets inputs 0 and targets -1, which the loss ignores. Refuses a token outside the
// vocabulary, and says where it is.
bool loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                  int *targets);

END_C
