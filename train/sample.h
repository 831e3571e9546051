// Samples: text that the model continues.
#pragma once

#include "state.h"

BEGIN_C

// run->prompt: the tokens of --sample-tokens; or those of --sample-prompt, after the end of text
// that every document starts with.
bool run_encode_prompt(Run *run);

// The logits [V] of the token after tokens[0..n), n <= seq_length, which the caller may change;
// valid until the next call.
typedef float *(*NextLogits)(void *trainer, const int *tokens, int n);

// Prints the prompt and the model's continuation, as text, or as ids without a tokenizer.
void run_sample(Run *run, NextLogits next_logits, void *trainer);

END_C
