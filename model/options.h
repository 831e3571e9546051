// The options of both trainers. One table has a row for each option. Everything that handles
// options reads these rows: parsing, --help, --config, the list printed at the start, the checks
// and the saved options. A new option is one row in option_rows.h.
//
// An option that Megatron-LM has, too, has Megatron-LM's name. options_read() reads the options
// that are given, and options_resolve() sets all others, once. After that, a process's options do
// not change. If a run starts from a checkpoint, a given option must not change the shape of the
// checkpoint's tensors.
#pragma once

#include "../kernels/rope.h"

#include <stdio.h>
#include <string.h>

BEGIN_C

#define OPTIONS_TITLE "llm8.c " LLM8_VERSION ": trains GPT-2, Llama and Qwen models\n"

// The enums of option_rows.h.
#define INT(...)
#define LONG(...)
#define REAL(...)
#define FLAG(...)
#define TEXT(...)
#define CHOICE(name, field, type, fallback, choices, ...) typedef enum { choices } type;
#define CHOICE_OF(...)
#define N(constant, name) constant,
#include "option_rows.h"

// The sources that a value may come from, weakest first.
typedef enum {
    SOURCE_DEFAULT,    // the default in option_rows.h
    SOURCE_DERIVED,    // the preset of --model, the data's tokenizer, or other options
    SOURCE_CHECKPOINT, // the checkpoint that the run starts from (option_is_inherited)
    SOURCE_FILE,       // the first file of --config; those after it have the next numbers
    SOURCE_COMMAND = SOURCE_FILE + 64 // the command line, which overrides all others
} OptionSource;

enum { OPTIONS_MAX = 128, RANKS_MAX = 4096 };

// One field for each row of option_rows.h.
#define INT(name, field, ...) int field;
#define LONG(name, field, ...) int64_t field;
#define REAL(name, field, ...) double field;
#define FLAG(name, field, ...) bool field;
#define TEXT(name, field, ...) char field[PATH_LENGTH];
#define CHOICE(name, field, ...) int field;
#define CHOICE_OF(name, field, ...) int field;
typedef struct {
#include "option_rows.h"
    unsigned char source[OPTIONS_MAX]; // OptionSource of each row
    char origin[PATH_LENGTH];          // path of the checkpoint that the run starts from; "": none
    bool resumes;                      // `origin` is the checkpoint of --resume
    const char *program;               // argv[0]
    const char *repeated;              // option of patterns that one place gives twice; NULL: none
} Options;

typedef enum {
    OPTION_INT,
    OPTION_INT64,
    OPTION_DOUBLE,
    OPTION_BOOL,
    OPTION_STRING,
    OPTION_CHOICE
} OptionType;

// What an option's value affects. The run record in metrics.jsonl has these effects, for the Python
// scripts. Options from EFFECT_ACTION on tell this process what to do; they are neither printed at
// the start nor saved with the run.
typedef enum {
    EFFECT_RESULTS,    // what the model learns
    EFFECT_SHAPE,      // the model's tensors
    EFFECT_START,      // the initial weights, or how many sequences the first step sees
    EFFECT_DATA,       // which tokens training sees, or in which order
    EFFECT_PRECISION,  // how results are rounded, on purpose
    EFFECT_EVALUATION, // which tokens an evaluation sees, or the context before them
    EFFECT_SPEED,      // time and memory; results change only by rounding
    EFFECT_NOTHING,    // only what is printed or saved, or how long the run waits
    EFFECT_ACTION,
    EFFECT_TASK // the process does this and exits; it does one task
} OptionEffect;

typedef struct {
    const char *name;
    OptionType type;
    size_t offset;        // where the field is in Options
    const char *fallback; // the default, as text
    double min, max;      // bounds of a number, inclusive
    const char *choices;  // "a|b|c" of a choice; of other types the placeholder in --help
    const char *group;    // heading in --help
    const char *help;
    OptionEffect effect;
    const char *needs;    // options without which this one has no effect (option_rows.h), or NULL
    const char *replaces; // the option that this one switches off (option_rows.h), or NULL
} OptionRow;

typedef struct {
    const char *name;
    const char *help;
    const char *settings; // "name value name value ..."
} Preset;

typedef struct {
    const char *ours;  // our option, perhaps followed by its value or a remark
    const char *names; // other trainers' options, without "--"; those with one hyphen keep it
} ForeignName;

// option_table.c
extern const OptionRow option_table[];
extern const char *const option_effects[]; // names of the effects
extern const int option_table_count;
extern const Preset preset_table[];
extern const int preset_table_count;
extern const ForeignName foreign_names[]; // other trainers' names; `ours` is NULL in the last row

#define EACH_OPTION(row) \
    for (const OptionRow *row = option_table; row < option_table + option_table_count; row++)

// ---- option_value.c ----

enum { OPTION_TEXT = PATH_LENGTH };

// Returns the index of a word in a list whose words are separated by `separator`, or -1 if the list
// does not have the word. An underscore in the word matches a hyphen.
int option_word(const char *list, char separator, const char *word);

const OptionRow *option_row(const char *name); // NULL: no option has the name

// Returns whether an option's value is the path of a file or folder.
bool option_is_path(const OptionRow *row);

// Writes the value of a row as text that option_set can read.
const char *option_text(const Options *options, const OptionRow *row, char out[OPTION_TEXT]);
// Returns whether an option has the same value in a and b.
bool option_same(const Options *a, const Options *b, const OptionRow *row);
// Returns whether an option has its default value.
bool option_is_default(const Options *options, const OptionRow *row);

// Returns the source of an option's value. The option must exist.
OptionSource option_source(const Options *options, const char *name);
void option_set_source(Options *options, const char *name, OptionSource source);

// Sets one option from text, unless a stronger source has set it.
bool option_set(Options *options, const char *name, const char *value, OptionSource source);
// Sets several options from "name value name value", formatted as by printf. A value cannot contain
// a blank.
bool options_set(Options *options, OptionSource source, const char *format, ...) PRINTF_LIKE(3, 4);

void options_default(Options *options);

// ---- options.c ----

// Sets all options to their defaults, and then those that the config files and the command line
// give. Options of the command line override those of the files.
bool options_read(Options *options, int argc, char **argv);

// Calls options_read, and dies with its message on an error. --help, --completion and --version
// print their text and exit; without any argument, a short help is printed, and the program exits.
void options_parse(Options *options, int argc, char **argv);

// ---- option_resolve.c ----

// Sets the options of the preset that --model names.
bool options_preset(Options *options);

// The facts, besides the given options, from which the other options are derived.
typedef struct {
    // options of the checkpoint options->origin, set by checkpoint_model(); NULL: no checkpoint
    const Options *checkpoint;
    int ranks;            // 0: one rank
    int64_t step, tokens; // steps and tokens that a resumed run has done
    // These functions are called when the options on which they depend are set. NULL: not needed.
    bool (*data)(void *context, Options *options); // sets the options that depend on the data
    int64_t (*windows)(void *context);             // number of sequences in an epoch
    void *context;
} OptionFacts;

// Sets all options that are not given, and checks all options. facts NULL: all facts are zero.
bool options_resolve(Options *options, const OptionFacts *facts);

// Returns whether the run takes all options from its checkpoint, and not only the model's.
static inline bool options_continue(const Options *o) {
    return !o->sample_only && (o->resumes || o->eval_only);
}

// Returns whether models that differ in this option have tensors of other shapes.
bool option_is_shape(const OptionRow *row, Arch arch);

// Returns whether an option that is not given is taken from the checkpoint that the run starts
// from. If `continues` is NULL, the run starts anew, and takes only the model's options and --load.
// Otherwise `continues` has the options of a run that continues the checkpoint's run. Such a run
// takes all options or, if it only evaluates, those on which an evaluation depends. But it takes no
// options of the machine (its GPUs and memory), and no paths to which files are written.
bool option_is_inherited(const OptionRow *row, const Options *continues);

// Returns " (of the checkpoint PATH)" if an option's value comes from a checkpoint, otherwise "".
const char *option_from_checkpoint(const Options *options, const char *name, char out[PATH_LENGTH]);

// options_train returns whether the run trains, and does not only evaluate, sample or export;
// options_save, whether the run trains and saves checkpoints.
static inline bool options_train(const Options *o) {
    return !o->sample_only && !o->eval_only && o->export_to[0] == '\0';
}
static inline bool options_save(const Options *o) {
    return options_train(o) && o->save[0] != '\0';
}
// Returns the number of sequences for which a trainer plans memory.
static inline int options_batch(const Options *o) {
    return o->sample_only ? 1 : o->micro_batch_size;
}

// Sets the largest micro-batch size up to `size` that a run with these resolved options may have on
// `ranks` ranks. Also sets the global batch size if it follows from the micro-batch size.
void options_set_micro_batch(Options *o, int size, int ranks);

// Returns the first step >= `step` that --iterations-to-skip names, or INT64_MAX if there is none.
// `step` is at least 1.
int64_t options_next_skip(const Options *o, int64_t step);

// ---- option_text.c ----

// Makes a JSON object with the text of every option.
struct cJSON *options_json(const Options *options);
// Makes a JSON array with the names of the options that options_write_config writes.
struct cJSON *options_given(const Options *options);

// Prints a note for each given option that has no effect without a GPU, or without another option,
// or because its text is empty.
void options_note_idle(const Options *options, bool gpu);

// Prints options by group, as on a command line: all options, or only those that are given or
// differ from their defaults.
void options_print(const Options *options, bool all, FILE *out);

// Writes a file for --config, with the options that the command line, a config file or a checkpoint
// gave. The file omits derived values (the decay from --train-iters, widths from --hidden-size), so
// that they are derived again if the file is used together with other options.
void options_write_config(const Options *options, FILE *out);
// Prints the text of --help: every option, with its value in `options` as the default. A value that
// will be derived is still the 0 or -1 that requests it.
void options_help(const Options *options, FILE *out, const char *program);
// Prints a script that completes the options in bash and zsh.
void options_complete(FILE *out);

END_C
