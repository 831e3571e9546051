// The tokenizer of a run: which one it is, and the files that are saved with the model.
#pragma once

#include "state.h"

BEGIN_C

// Sets the options that follow from the data and from their tokenizer (OptionFacts.data), and
// run->document_end. Finds the tokenizer that --tokenizer names, else the checkpoint's, else the
// one beside the shards.
bool run_set_by_data(void *run, Options *options);

// Returns the token that ends a document of some shards, according to the tokenizer that made them;
// run->document_end if that tokenizer is not known, or if --tokenizer names one.
int run_document_end(Run *run, const char *shards);

// Opens the tokenizer of --tokenizer, whose document_end becomes run->document_end. In a run that
// saves, rank 0 also reads the files that are copied into every checkpoint (run->saves.companions).
void run_open_tokenizer(Run *run);

END_C
