// Samples: the model continues a prompt.
#pragma once

#include "state.h"

BEGIN_C

// Sets run->prompt to the tokens of --sample-tokens, or to the token with which every document
// begins, followed by the tokens of --sample-prompt. Warns if the prompt is longer than a sequence.
bool run_encode_prompt(Run *run);

// Returns the logits [V] of the token after tokens[0..n), n <= seq_length. The logits are valid
// until the next call, and the caller may change them.
typedef float *(*NextLogits)(void *trainer, const int *tokens, int n);

// Prints the prompt and the model's continuation: as text, or without a tokenizer as ids. A signal
// ends the sample early. The model sees the last seq_length tokens. With --sample-only, a warning
// tells from which token on it no longer sees the beginning of the prompt.
void run_sample(Run *run, NextLogits next_logits, void *trainer);

END_C
