// The data behind options.c: a row per option, a row per preset. And what the files that read and
// print options share.
#ifndef LLM8_OPTION_TABLE_H
#define LLM8_OPTION_TABLE_H

#include "options.h"

typedef struct {
    const char *name;
    const char *help;
    const char *settings; // "name value name value ..."
} Preset;

extern const OptionRow option_table[];
extern const int option_table_count;
extern const char option_group_gpu[], option_group_ranks[]; // which only the GPU trainer heeds
extern const Preset preset_table[];
extern const int preset_table_count;

// The row of a name, which may be a flag's with "no-" before it; NULL: unknown.
const OptionRow *option_find(const char *name, bool *negated);
// --config
bool options_read_config(Options *options, const char *path, Error *err);

#endif
