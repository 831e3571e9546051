// Every option of both trainers, from one table: parsing, --help, --config, the echo, the checks
// and what is saved with a run all iterate over its rows. A new option is one field here and one
// row in option_table.c.
//
// Names are Megatron-LM's wherever it has one. Precedence, lowest first: the table's default, the
// preset named by --model, the file named by --config, the command line.
#ifndef LLM8_OPTIONS_H
#define LLM8_OPTIONS_H

#include "../base/common.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// The choices of each option, in the order of its row.
typedef enum { ARCH_GPT2, ARCH_LLAMA } Arch;
typedef enum { DECAY_COSINE, DECAY_LINEAR, DECAY_CONSTANT, DECAY_WSD } DecayStyle;
typedef enum { FP8_FORMAT_NONE, FP8_FORMAT_HYBRID, FP8_FORMAT_E4M3, FP8_FORMAT_E5M2 } Fp8Format;
typedef enum { FP8_RECIPE_DELAYED, FP8_RECIPE_TENSORWISE } Fp8Recipe;
typedef enum { AMAX_MAX, AMAX_MOST_RECENT } AmaxAlgo;
typedef enum { FAST_NONE, FAST_FORWARD, FAST_ALL } FastAccumulation;
typedef enum { EVAL_SAME, EVAL_BF16 } EvalPrecision;

typedef enum { RECOMPUTE_NONE, RECOMPUTE_ACTIVATIONS, RECOMPUTE_BLOCK } Recompute;
typedef enum { STATE_FP32, STATE_BF16 } StateType;
typedef enum { GRADIENT_AUTO, GRADIENT_FP32, GRADIENT_BF16 } GradientType;

struct Group;

// Where a value comes from, weakest first.
typedef enum { SOURCE_DEFAULT, SOURCE_PRESET, SOURCE_CONFIG, SOURCE_COMMAND } OptionSource;

enum { OPTIONS_MAX = 128, RANKS_MAX = 4096 };

typedef struct {
    // model
    char model[PATH_LENGTH];
    int arch;
    int num_layers, hidden_size, num_attention_heads, num_query_groups, ffn_hidden_size;
    int vocab_size, make_vocab_size_divisible_by, seq_length, max_position_embeddings;
    bool untie_embeddings_and_output_weights;
    double norm_epsilon, rope_theta, init_method_std;
    int rope_scaling, rope_original_length;
    double rope_scaling_factor, rope_low_freq_factor, rope_high_freq_factor;
    // data
    char data[PATH_LENGTH], valid_data[PATH_LENGTH], tokenizer[PATH_LENGTH];
    bool shuffle;
    // training
    int64_t train_iters;
    int micro_batch_size, global_batch_size;
    int64_t seed;
    int max_skipped;
    // optimizer and learning rate
    double lr, min_lr, weight_decay, adam_beta1, adam_beta2, adam_eps, clip_grad;
    int lr_decay_style;
    int64_t lr_warmup_iters, lr_decay_iters, lr_wsd_decay_iters;
    // precision
    bool bf16;
    int fp8_format, fp8_recipe;
    int fp8_margin, fp8_e5m2_margin, fp8_interval, fp8_amax_history_len, fp8_amax_compute_algo;
    bool first_last_layers_bf16;
    int num_layers_at_start_in_bf16, num_layers_at_end_in_bf16;
    bool fp8_lm_head, fp8_wgrad, fp8_required;
    int fp8_fast_accumulation;
    int64_t fp8_stats_interval;
    // evaluation and sampling
    int64_t eval_interval, eval_iters, sample_interval;
    int eval_precision;
    int sample_length, sample_top_k;
    double sample_temperature;
    int64_t sample_seed;
    bool sample_only, eval_only;
    char sample_prompt[PATH_LENGTH], eval_choices[PATH_LENGTH];
    int64_t eval_choices_limit;
    // checkpoints
    char save[PATH_LENGTH], resume[PATH_LENGTH], load[PATH_LENGTH];
    int64_t save_interval;
    int keep;
    bool list_checkpoints;
    // GPU
    int recompute, grad_accum_dtype, adam_dtype;
    bool cuda_graphs, deterministic, gemm_autotune;
    int workspace_mib, device;
    double device_memory_gib;
    bool verify, profile;
    // several GPUs
    int gpus, distributed_timeout;
    // run
    int64_t log_interval;
    char metrics[PATH_LENGTH];
    bool plan, list_tensors;
    char dump_gradients[PATH_LENGTH];
    char config[PATH_LENGTH];
    bool help, version;

    unsigned char source[OPTIONS_MAX]; // OptionSource of each row
    // Set by launch(): this process among those that train together. Until then, ranks is --gpus.
    int rank, ranks;
    struct Group *group;
} Options;

typedef enum {
    OPTION_INT,
    OPTION_INT64,
    OPTION_DOUBLE,
    OPTION_BOOL,
    OPTION_STRING,
    OPTION_CHOICE
} OptionType;

typedef struct {
    const char *name;
    OptionType type;
    size_t offset;        // of the field in Options
    const char *fallback; // the default, as text
    double min, max;      // bounds of a number, inclusive
    const char *choices;  // "a|b|c" of a choice; the placeholder shown by --help otherwise
    const char *group;    // heading in --help
    const char *help;
    bool action; // says what to do now, not what the run is: neither echoed nor saved
} OptionRow;

typedef struct {
    const char *name;
    const char *help;
    const char *settings; // "name value name value ..."
} Preset;

// option_table.c
extern const OptionRow option_table[];
extern const int option_table_count;
extern const Preset preset_table[];
extern const int preset_table_count;
extern const char *const retired_options[]; // names that older versions had; NULL at the end

// Defaults, preset, config file, command line; then derived values and checks. Answers --help
// and --version by printing, and exits. Dies with one line on the first fault.
void options_parse(Options *options, int argc, char **argv);

// The same, but returns faults in err. Prints nothing, but for a warning when the config file names
// options that no longer exist.
bool options_read(Options *options, int argc, char **argv, Error *err);

// Once the number of ranks is known: fills in --global-batch-size, or refuses it.
bool options_finish_batch(Options *options, int ranks, Error *err);

// Sets one option from text, unless a stronger source has set it already.
bool option_set(Options *options, const char *name, const char *value, OptionSource source,
                Error *err);

// The source of the value of an existing option.
OptionSource option_source(const Options *options, const char *name);

// Whether the run trains, or only evaluates or samples; whether it saves what it trains.
static inline bool options_train(const Options *o) {
    return !o->sample_only && !o->eval_only;
}
static inline bool options_save(const Options *o) {
    return options_train(o) && o->save[0] != '\0';
}

// ---- option_text.c ----

enum { OPTION_TEXT = PATH_LENGTH };

// A row's present value as option_set would read it.
const char *option_text(const Options *options, const OptionRow *row, char out[OPTION_TEXT]);

// Names the options on the command line or in the file that have no effect without a GPU.
void options_note_gpu_only(const Options *options);

void options_print(const Options *options, FILE *out);        // the echo, as options, by group
void options_write_config(const Options *options, FILE *out); // a file for --config
void options_help(FILE *out, const char *program);

#ifdef __cplusplus
}
#endif

#endif
