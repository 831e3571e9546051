// Every option of both trainers, from one table: parsing, --help, --config, the echo, the checks
// and what is saved with a run all iterate over its rows. A new option is one row in
// option_rows.h.
//
// Names are Megatron-LM's wherever it has one. Precedence, lowest first: the table's default, the
// preset named by --model, the data's tokenizer (its vocabulary), the checkpoint that the run
// starts from (its model), the file named by --config, the command line. Of a checkpoint's model,
// the options that are given may not contradict what makes its tensors.
#pragma once

#include "../base/common.h"

#include <stdio.h>

BEGIN_C

#define OPTIONS_TITLE "llm8.c " LLM8_VERSION ": trains GPT-2, Llama and Qwen models\n"

// The choices of each option, in the order of its row.
typedef enum { ARCH_GPT2, ARCH_LLAMA } Arch;
typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON } Optimizer;
typedef enum { DECAY_COSINE, DECAY_LINEAR, DECAY_CONSTANT, DECAY_WSD } DecayStyle;
typedef enum { FP8_FORMAT_NONE, FP8_FORMAT_HYBRID, FP8_FORMAT_E4M3, FP8_FORMAT_E5M2 } Fp8Format;
typedef enum { FP8_RECIPE_DELAYED, FP8_RECIPE_TENSORWISE, FP8_RECIPE_BLOCKWISE } Fp8Recipe;
typedef enum { FAST_NONE, FAST_FORWARD, FAST_ALL } FastAccumulation;
typedef enum { EVAL_SAME, EVAL_BF16 } EvalPrecision;

typedef enum { RECOMPUTE_NONE, RECOMPUTE_ACTIVATIONS, RECOMPUTE_BLOCK } Recompute;
typedef enum { STATE_FP32, STATE_BF16 } StateType;
typedef enum { GRADIENT_AUTO, GRADIENT_FP32, GRADIENT_BF16 } GradientType;

struct Checkpoint;

// Where a value comes from, weakest first.
typedef enum {
    SOURCE_DEFAULT,
    SOURCE_PRESET,
    SOURCE_DATA,
    SOURCE_CHECKPOINT,
    SOURCE_CONFIG,
    SOURCE_COMMAND
} OptionSource;

enum { OPTIONS_MAX = 128, RANKS_MAX = 4096 };

// One field for each row of option_rows.h.
#define INT(name, field, ...) int field;
#define LONG(name, field, ...) int64_t field;
#define REAL(name, field, ...) double field;
#define FLAG(name, field, ...) bool field;
#define TEXT(name, field, ...) char field[PATH_LENGTH];
#define CHOICE(name, field, ...) int field;
typedef struct {
#include "option_rows.h"
    unsigned char source[OPTIONS_MAX]; // OptionSource of each row
    char origin[PATH_LENGTH];          // the checkpoint that the model comes from; "": none
    struct Checkpoint *start;          // the same, opened by checkpoint_model(); NULL: none
    const char *program;               // as it was called
} Options;

typedef enum {
    OPTION_INT,
    OPTION_INT64,
    OPTION_DOUBLE,
    OPTION_BOOL,
    OPTION_STRING,
    OPTION_CHOICE
} OptionType;

// What another value of an option changes. metrics.jsonl's run record says it to Python. An action
// commands this process and is no property of the run: it is neither echoed nor saved.
typedef enum {
    EFFECT_RESULTS,    // what is learned
    EFFECT_SHAPE,      // the model's tensors
    EFFECT_START,      // the weights of the first step, or how many sequences it sees
    EFFECT_DATA,       // which tokens come, or in which order
    EFFECT_PRECISION,  // results by rounding, which is what it is for
    EFFECT_EVALUATION, // which tokens an evaluation sees
    EFFECT_SPEED,      // time and memory; results by rounding at most
    EFFECT_NOTHING,    // none of these: what is printed, kept, or waited for
    EFFECT_ACTION
} OptionEffect;

typedef struct {
    const char *name;
    OptionType type;
    size_t offset;        // of the field in Options
    const char *fallback; // the default, as text
    double min, max;      // bounds of a number, inclusive
    const char *choices;  // "a|b|c" of a choice; the placeholder shown by --help otherwise
    const char *group;    // heading in --help
    const char *help;
    OptionEffect effect;
    const char *needs; // the option without which it has no effect; NULL: none
} OptionRow;

typedef struct {
    const char *name;
    const char *help;
    const char *settings; // "name value name value ..."
} Preset;

typedef struct {
    const char *ours;  // an option; its value or a remark may follow
    const char *names; // words; without two hyphens before them, with one where there is one
} ForeignName;

// option_table.c
extern const OptionRow option_table[];
extern const char *const option_effects[]; // their names
extern const int option_table_count;
extern const Preset preset_table[];
extern const int preset_table_count;
extern const ForeignName foreign_names[]; // that other trainers have; a NULL ends them

// What is given: the command line and the config file, over the defaults. Prints nothing, but for a
// warning when the config file names options that no longer exist, with values that are not
// followed.
bool options_read(Options *options, int argc, char **argv);

// The same; dies with one line on the first fault. Answers --help and --version by printing, as a
// call without arguments, and exits.
void options_parse(Options *options, int argc, char **argv);

// Then the rest: the preset, derived values, the model of the checkpoint options->origin, checks.
// model: the options that the checkpoint records of it, set by option_set with SOURCE_CHECKPOINT;
// NULL: a new model.
bool options_resolve(Options *options, const Options *model);

// Whether models that differ in this option have other tensors.
bool option_is_shape(const OptionRow *row, Arch arch);

// Once the number of ranks is known: fills in --global-batch-size, or refuses it.
bool options_finish_batch(Options *options, int ranks);

// Sets one option from text, unless a stronger source has set it already.
bool option_set(Options *options, const char *name, const char *value, OptionSource source);

// The same of several: "name value name value", of values without blanks, after printf's format.
bool options_set(Options *options, OptionSource source, const char *format, ...) PRINTF_LIKE(3, 4);

const OptionRow *option_row(const char *name); // NULL: no option has the name
// The source of the value of an existing option.
OptionSource option_source(const Options *options, const char *name);

// Whether the run trains, or only evaluates or samples; whether it saves what it trains.
static inline bool options_train(const Options *o) {
    return !o->sample_only && !o->eval_only;
}
static inline bool options_save(const Options *o) {
    return options_train(o) && o->save[0] != '\0';
}

// The first step from this one on, counted from 1, that --iterations-to-skip names; INT64_MAX:
// none.
int64_t options_next_skip(const Options *o, int64_t step);

// ---- option_text.c ----

enum { OPTION_TEXT = PATH_LENGTH };

// A row's present value as option_set would read it.
const char *option_text(const Options *options, const OptionRow *row, char out[OPTION_TEXT]);

// An object of all their texts.
struct cJSON *options_json(const Options *options);

// Names the options on the command line or in the file that have no effect, without a GPU or
// without another option.
void options_note_idle(const Options *options, bool gpu);

// The echo, as options, by group: all of them, or those that are given or unlike the defaults.
void options_print(const Options *options, bool all, FILE *out);

// Writes a file for --config: the options that the command line and an earlier such file gave, so
// that derived values (the decay from --train-iters, widths from --hidden-size) are derived again
// when more options follow.
void options_write_config(const Options *options, FILE *out);
// Prints every option, with its value in `options` as the default, or 0 where it is derived.
void options_help(const Options *options, FILE *out, const char *program);
// For bash and zsh to read.
void options_complete(FILE *out);

END_C
