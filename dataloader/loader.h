// From token shards to batches.
//
// A data set is the tokens of its shards, in the order of their names, as one stream. The stream is
// cut into windows: window w is inputs [wT, wT+T) and targets one token on. Every token but the
// first, and the at most T-1 that do not fill a last window, is a target in exactly one window.
//
// A run is an endless row of samples, numbered from 0: sample s is in epoch s / windows, which
// visits every window once, in an order that is a function of (seed, epoch). So where a run stands
// is one number, the samples consumed; rank r of R reads, in micro-batch m of a step, the samples
// from consumed + (m R + r) B on, and a run can go on with another R or B.
#ifndef LLM8_LOADER_H
#define LLM8_LOADER_H

#include "shard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int num_shards;
    Shard *shards;
    int64_t *first; // [num_shards + 1] the stream position of each shard's first token; the end
    int64_t tokens, windows;
    int seq_length, vocab;
    uint32_t tokenizer; // the mark that the shards carry; 0: none says
} Dataset;

// Opens and checks every shard that the glob pattern matches. Refuses shards of two tokenizers.
bool dataset_open(Dataset *data, const char *pattern, int seq_length, int vocab, Error *err);
void dataset_close(Dataset *data);

// inputs[T], targets[T] of a window. Refuses a token outside the vocabulary, naming where it
// stands.
bool dataset_window(const Dataset *data, int64_t window, int *inputs, int *targets, Error *err);

typedef struct {
    const Dataset *data;
    uint64_t seed;
    bool shuffle;
} Loader;

// The window of a sample.
int64_t loader_window(const Loader *loader, int64_t sample);

// inputs, targets: [count,T], the samples from `sample` on. Samples from `end` on are left out:
// token 0 with target -1, which the loss ignores. INT64_MAX: no end.
bool loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                  int *targets, Error *err);

#ifdef __cplusplus
}
#endif

#endif
