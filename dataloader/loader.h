// Reads token files (token shards, masks, multiple-choice sets), and makes batches of shards'
// tokens.
//
// A token file, little-endian:
//   bytes 0..1023   256 int32: [0] the magic number of its kind; [1] the version, 1 if the numbers
//                   are uint16, 2 if they are uint32; [2] and [3] counts; [4] the fingerprint of
//                   the tokenizer (tokenizer.h; 0: not known); the rest depends on the kind
//   from byte 1024  the numbers: tokens, in a mask bits; a multiple-choice set also has lengths
// A token shard has magic 20240520; [2] and [3] are the lower and the upper half of the count of
// tokens, both unsigned; [5] is 1 if the shard has a mask, [6] is 1 if it has conversations and
// SHARD.starts. Nothing follows the tokens. llm.c's shards are version 1 with zeros from [3] on;
// those of Llama 3's tokens have magic 20240801 and version 7, and are read as version 2.
// choices.h describes multiple-choice sets.
//
// A mask says which of a shard's tokens count as targets. It lies beside the shard as SHARD.mask;
// without a mask, all tokens count. It is a token file with magic 20261124, always uint16: [2] and
// [3] are the shard's count of tokens, [4] is the CRC-32 of the shard (as shard_sum computes it),
// [5] the CRC-32 of the mask's numbers, [6] the length of the windows that documents were packed
// into, or 0, [7] the CRC-32 of the chat template that wrote the documents, or 0 if it is not
// known. Number i has a bit for each of the tokens 16 i to 16 i + 15, the lowest bit first; 1: the
// token counts. Bits past the last token are 0.
//
// SHARD.starts has the format of a mask, with magic 20261128; a bit is 1 where a document begins.
// In a shard without SHARD.starts a document begins at each end-of-text token. The first token of a
// shard always begins a document, and so does the first of a window.
//
// A data set is the tokens of its shards, in the order of the shards' names, as one stream. With
// sequences of T tokens, the inputs of window w are the tokens [wT, wT+T) of this stream, and its
// targets are [wT+1, wT+T+1). So every token is a target in exactly one window, except the first
// token, and at most T-1 tokens at the end that fill no window. If a shard has a mask, targets that
// do not count are -1, and windows in which no target counts are skipped. The last window may then
// lack its last target, so that a stream of whole windows of T tokens is read completely.
//
// A run is an endless sequence of samples, numbered from 0: sample s is in epoch s / windows, and
// an epoch visits every window once, in an order that depends only on (seed, epoch). So the
// position of a run is one number: `consumed`, the samples that it has consumed. If there are R
// ranks and a micro-batch has B samples, then in micro-batch m of a step rank r reads the B samples
// from number consumed + (m R + r) B on. So a run can be resumed with another R or B. In a mixture
// of data sets (mixture.h) the number of a sample also determines its data set (blend.h) and its
// number in that data set. Each data set has epochs of its own.
#pragma once

#include "../base/io.h"
#include "blend.h"

BEGIN_C

enum {
    SHARD_MAGIC = 20240520,
    LLAMA3_MAGIC = 20240801, // of llm.c's shards of Llama 3's tokens
    SHARD_HEADER_BYTES = 1024,
    MASK_MAGIC = 20261124,
    STARTS_MAGIC = 20261128,
    MASK_BITS = 16, // bits of a number of a mask
    // indices in the header of a shard
    SHARD_TOKENIZER = 4, // the tokenizer's fingerprint
    SHARD_MASKED,        // 1: the shard has a mask
    SHARD_STARTED,       // 1: the shard has conversations, and SHARD.starts
    // indices in the header of a mask or of SHARD.starts
    MASK_SHARD = 4,
    MASK_SUM,
    MASK_WINDOW,
    MASK_TEMPLATE
};

typedef struct {
    char path[PATH_LENGTH];
    int file;
    size_t bytes;
    int32_t header[MASK_TEMPLATE + 1];
    int token_bytes;    // bytes of a number: 2 or 4
    int64_t count;      // numbers in the file
    uint32_t tokenizer; // the tokenizer's fingerprint; 0: not known
    int64_t changed;    // set only in a Dataset's shards: modification time in ns, and CRC-32
    uint32_t crc;
} TokenFile;

// A kind of token file, and the words for it in messages: "... not a NAME ...; REMEDY". examples:
// two patterns of file names that messages suggest; examples[0] NULL: no option takes such files.
typedef struct {
    int32_t magic;
    const char *name, *remedy, *examples[2];
} TokenFileKind;

// Opens a file. Refuses one that is missing, too short, or has another magic number or version.
bool token_file_open(TokenFile *f, const char *path, TokenFileKind kind);
void token_file_close(TokenFile *f);

// Reads numbers [begin, begin + n) of the file.
bool token_file_read(const TokenFile *f, int64_t begin, int64_t n, uint32_t *out);

// Opens a shard as token_file_open does. Also refuses a shard without tokens, and one whose size
// differs from its header.
bool shard_open(TokenFile *shard, const char *path);

// Finds the first shard with header[index] != 0 among those that match a glob pattern. index:
// SHARD_MASKED or SHARD_STARTED for a shard with a mask or with SHARD.starts; 0, the index of the
// magic number, for any shard. *shard is closed again. Returns false if there is no such shard, or
// if a shard cannot be read before one is found.
bool shards_find(const char *pattern, int index, TokenFile *shard);

// Makes the header of a shard, in which the fingerprint of the tokenizer is 0.
void shard_header(int32_t header[SHARD_HEADER_BYTES / 4], int token_bytes, int64_t count);

// Lists the files that a glob pattern matches; refuses a pattern that matches nothing or a folder.
bool token_files_find(glob_t *found, const char *pattern, TokenFileKind kind);

// The files beside a shard (sidecars). If a shard with conversations has no SHARD.starts, it is not
// known where the conversations begin, because a turn may end with an end-of-text token, too.
typedef struct {
    uint32_t *mask; // the numbers of SHARD.mask; NULL: all tokens count
    // CRC-32 of the chat template, from the mask; not 0: the shard has conversations
    int32_t chat_template;
    TokenFile starts; // SHARD.starts, open; file -1: there is none
} Sidecar;

// A window in which some targets count.
typedef struct {
    int64_t window;
    int targets;
} MaskedWindow;

typedef struct {
    int num_shards;
    TokenFile *shards;
    Sidecar *sidecars;          // [num_shards]
    int64_t tokens, windows;    // windows: how many an epoch has
    int64_t targets;            // targets that count in an epoch
    int64_t ends;               // with masks_ends: how many tokens of all windows end a document
    MaskedWindow *with_targets; // [windows] the windows in which targets count; NULL: all windows
    // the length of the windows that documents were packed into (from a mask), if windows of
    // seq_length cut such documents; else 0
    int cuts;
    int seq_length, vocab;
    int document_end; // the token that ends a document in the data; -1: not known
    bool masks_ends;  // a target right after an end of a document does not count
    char *identity;   // a line for each shard: "CRC-32 NAME", with ? for control characters; the
                      // CRC-32 also covers the shard's mask and SHARD.starts
} Dataset;

// Opens and checks every shard that a glob pattern matches, and its mask; the pattern may match the
// masks too. Refuses a mask that belongs to another shard. With masks_ends, reads all tokens.
bool dataset_open(Dataset *data, const char *pattern, int seq_length, int vocab, int document_end,
                  bool masks_ends);
void dataset_close(Dataset *data);

// Compares the shards' checksums with those in the first lines of *identity, in their order, and
// moves *identity past these lines. The error names the first shard that differs. Folders and names
// may differ. The checksum of a shard above 4 MiB covers only 64 parts of it. whose: the error's
// name for what has read the shards in *identity, such as "the checkpoint".
bool dataset_match(const Dataset *data, const char **identity, const char *whose);
// Whether the next line of *identity has the checksum of `line`; if so, moves *identity past it.
bool identity_next(const char *line, const char **identity);
// Writes the CRC-32 of an identity's checksums. It is equal for equal shards in the same order.
const char *identity_sum(const char *identity, char out[9]);

typedef struct {
    const Dataset *data; // an array: one for each source of a mixture
    uint64_t seed;
    bool shuffle;
    const Blend *blend; // NULL: there is one source
} Loader;

// Returns the number of the window that a sample reads, in the sample's source.
int64_t loader_window(const Loader *loader, int64_t sample);

// Returns the number of targets that count in `count` samples from `sample` on.
int64_t loader_targets(const Loader *loader, int64_t sample, int64_t count);

// Reads `count` samples from `sample` on into inputs and targets [count,T]. Samples from `end` on
// (INT64_MAX: there is no end) get inputs 0 and targets -1, which the loss ignores, and are one
// document. starts [count,T]: for each token, the index in the window at which its document begins;
// NULL: not wanted. Refuses a token outside the vocabulary (the error says where it is) and a shard
// that was overwritten after it was opened.
bool loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                  int *targets, int *starts);

END_C
