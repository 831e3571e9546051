// Several data sets in one run, by weights: "0.7 web/*.bin 0.3 code/*.bin" (Megatron-LM's blend).
//
// The text of a mixture consists of words that blanks separate. A word that is a number is the
// weight of the pattern after it; a pattern may be several words. A backslash keeps a blank, as in
// code\ 2/x.bin, from ending a word. A text that does not begin with a weight and a blank is a
// single pattern, and so is a text that matches files as it stands. The mixture then has one
// source.
//
// blend.h says which source each sample is from. Each source is shuffled and repeated by itself. An
// epoch of the mixture has as many samples as all sources together have windows.
#pragma once

#include "loader.h"

BEGIN_C

typedef struct {
    double weight;
    char pattern[PATH_LENGTH];
} Source;

// Reads the text of a mixture into *sources, which the caller frees. Returns the number of sources,
// or 0 if the text is wrong.
int sources_read(const char *text, Source **sources);

typedef struct {
    int count;       // 0: there are no data
    Source *sources; // [count]
    Dataset *data;   // [count]
    Blend blend;     // which source each sample is from
    // sums over all sources
    int num_shards;
    int64_t tokens, windows, targets;
    bool masked;    // a source has masks, or was opened with masks_ends
    char *identity; // those of all sources; if there are several, each after a line with its share
} Mixture;

// Opens the data sets of a mixture's text, as dataset_open opens one.
bool mixture_open(Mixture *m, const char *text, int seq_length, int vocab, int document_end,
                  bool masks_ends);
void mixture_close(Mixture *m);
// Calls dataset_match for every source. Also refuses an identity with other shares of the sources.
bool mixture_match(const Mixture *m, const char *identity, const char *whose);
// Returns the path of the first shard of `other` whose checksum a shard of m has, or NULL.
const char *mixture_shares(const Mixture *m, const Mixture *other);

END_C
