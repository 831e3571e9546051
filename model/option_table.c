// The tables of the options: a row for each option and each preset, and the names of other
// trainers.
#include "options.h"

// After `choices` come the help text, the effect (omitted if it is EFFECT_RESULTS), and NEEDS and
// REPLACES (omitted if the option needs or replaces no other).
#define ROW(name, type, field, fallback, min, max, choices, ...) \
    {name, type, offsetof(Options, field), fallback, min, max, choices, GROUP, .help = __VA_ARGS__},
#define INT(name, field, fallback, min, max, ...) \
    ROW(name, OPTION_INT, field, fallback, min, max, "N", __VA_ARGS__)
#define LONG(name, field, fallback, min, max, ...) \
    ROW(name, OPTION_INT64, field, fallback, min, max, "N", __VA_ARGS__)
#define REAL(name, field, fallback, min, max, ...) \
    ROW(name, OPTION_DOUBLE, field, fallback, min, max, "X", __VA_ARGS__)
#define FLAG(name, field, fallback, ...) \
    ROW(name, OPTION_BOOL, field, fallback, 0, 1, "", __VA_ARGS__)
#define TEXT(name, field, fallback, placeholder, ...) \
    ROW(name, OPTION_STRING, field, fallback, 0, 0, placeholder, __VA_ARGS__)
#define CHOICE_OF(name, field, fallback, choices, ...) \
    ROW(name, OPTION_CHOICE, field, fallback, 0, 0, &(choices)[1], __VA_ARGS__)
#define CHOICE(name, field, type, ...) CHOICE_OF(name, field, __VA_ARGS__)
#define N(constant, name) "|" name
#define NEEDS(option) .needs = option
#define REPLACES(option) .replaces = option
#define SHAPE EFFECT_SHAPE
#define START EFFECT_START
#define DATA EFFECT_DATA
#define PRECISION EFFECT_PRECISION
#define EVALUATION EFFECT_EVALUATION
#define SPEED EFFECT_SPEED
#define NOTHING EFFECT_NOTHING
#define ACTION EFFECT_ACTION
#define TASK EFFECT_TASK

// 2^53. A bound is a double, which represents every whole number up to 2^53. That is far above any
// option's useful values.
#define COUNT_MAX 9007199254740992.0

const OptionRow option_table[] = {
#include "option_rows.h"
};
const char *const option_effects[] = {
    [EFFECT_RESULTS] = "results",     [EFFECT_SHAPE] = "shape",
    [EFFECT_START] = "start",         [EFFECT_DATA] = "data",
    [EFFECT_PRECISION] = "precision", [EFFECT_EVALUATION] = "evaluation",
    [EFFECT_SPEED] = "speed",         [EFFECT_NOTHING] = "nothing",
    [EFFECT_ACTION] = "action",       [EFFECT_TASK] = "task"};
const int option_table_count = sizeof(option_table) / sizeof(option_table[0]);
_Static_assert(sizeof(option_table) / sizeof(option_table[0]) <= OPTIONS_MAX, "raise OPTIONS_MAX");

// The names of our options in llm.c, nanoGPT, nanochat and Hugging Face. Megatron-LM's name is
// listed if it differs from ours.
const ForeignName foreign_names[] = {
    {"arch llama", "swiglu normalization position-embedding-type"},
    {"num-layers", "n-layer depth num-hidden-layers"},
    {"hidden-size", "n-embd"},
    {"num-attention-heads", "n-head"},
    {"num-query-groups", "n-kv-head num-key-value-heads"},
    {"kv-channels", "head-dim"},
    {"ffn-hidden-size", "intermediate-size"},
    {"seq-length", "-t block-size max-seq-len max-seq-length"},
    {"max-position-embeddings", "n-positions"},
    {"untie-embeddings-and-output-weights", "tie-word-embeddings"},
    {"norm-epsilon", "rms-norm-eps layernorm-epsilon"},
    {"rope-theta", "rotary-base"},
    {"init-method-std", "initializer-range"},
    {"data", "-i train-file data-path train-data-path dataset"},
    {"valid-data", "-j validation-file valid-data-path"},
    {"valid-data (scripts/prepare_data --valid-fraction)", "split"},
    {"tokenizer", "tokenizer-name tokenizer-model"},
    {"train-iters", "-x max-iters num-iterations max-steps steps"},
    {"epochs", "num-train-epochs num-epochs"},
    {"micro-batch-size", "-b batch-size micro-batch device-batch-size per-device-train-batch-size"},
    {"global-batch-size (sequences, not tokens)", "-d total-batch-size"},
    {"global-batch-size (all sequences of a step)", "gradient-accumulation-steps"},
    {"lr", "-l learning-rate"},
    {"lr (and factors of it, as --embedding-lr-mult)", "matrix-lr"},
    {"embedding-lr-mult (a factor of --lr)", "embedding-lr"},
    {"embedding-lr-mult and --head-lr-mult (factors of --lr)", "decoupled-lr"},
    {"head-lr-mult (a factor of --lr)", "unembedding-lr"},
    {"vector-lr-mult (a factor of --lr)", "scalar-lr"},
    {"min-lr (a rate, not a fraction)", "-q"},
    {"lr-decay-style", "-k lr-scheduler-type lr-decay"},
    {"lr-warmup-iters", "-u warmup-iters warmup-steps"},
    {"weight-decay", "-c"},
    {"weight-decay (there is no dropout)", "dropout hidden-dropout attention-dropout"},
    {"adam-beta1", "beta1"},
    {"adam-beta2", "beta2"},
    {"adam-eps", "adam-epsilon"},
    {"optimizer muon", "muon"},
    {"clip-grad", "grad-clip max-grad-norm"},
    {"bf16", "dtype fp16"},
    {"fp8-format hybrid", "fp8"},
    {"eval-interval", "-v eval-every eval-steps"},
    {"eval-iters", "-m"},
    {"sample-interval", "-s sample-every"},
    {"sample-length", "-g max-new-tokens"},
    {"sample-temperature", "temperature"},
    {"sample-top-k", "top-k"},
    {"sample-prompt", "start prompt"},
    {"save", "-o out-dir output-dir"},
    {"save-interval", "-n save-every save-steps"},
    {"keep", "-nk save-total-limit"},
    {"load", "init-from model-name-or-path finetune"},
    {"model gpt2-124m (llm.c's d12), or --load", "-e"},
    {"resume latest", "-y"},
    {"resume", "resume-from-checkpoint"},
    {"recompute", "-r recompute-granularity"},
    {"recompute block", "gradient-checkpointing"},
    {"recompute activations", "recompute-activations"},
    {"gpus", "-pn nproc-per-node"},
    {"gpus (data parallel)", "tensor-model-parallel-size pipeline-model-parallel-size"},
    {"gpus (ZeRO-1, overlap and gathers in FP8 are always on)",
     "-z use-distributed-optimizer overlap-grad-reduce overlap-param-gather fp8-param-gather"},
    {"log-interval", "logging-steps"},
    {"metrics (scripts/monitor writes them for TensorBoard)",
     "wandb wandb-log wandb-project report-to tensorboard-dir"},
    {NULL, NULL},
};

// A preset leaves out a value that follows from its other values, so that the value is derived
// again when one of the other values is given on the command line.
#define GPT2 "arch gpt2 vocab-size 50257 seq-length 1024 "
#define LLAMA3 \
    "arch llama vocab-size 128256 rope-theta 500000 untie-embeddings-and-output-weights true "
#define QWEN "arch llama vocab-size 151936 rope-theta 1000000 norm-epsilon 1e-6 seq-length 2048 "

const Preset preset_table[] = {
    {"gpt2-124m", "GPT-2 small", GPT2 "num-layers 12 hidden-size 768"},
    {"gpt2-350m", "GPT-2 medium", GPT2 "num-layers 24 hidden-size 1024"},
    {"gpt2-774m", "GPT-2 large", GPT2 "num-layers 36 hidden-size 1280"},
    {"gpt2-1558m", "GPT-2 XL", GPT2 "num-layers 48 hidden-size 1600"},
    {"llama-1b", "1.06B parameters, Llama 3's vocabulary",
     LLAMA3 "num-layers 12 hidden-size 2048 num-attention-heads 16 num-query-groups 4 "
            "seq-length 2048"},
    {"llama-3-8b", "Llama 3 8B",
     LLAMA3 "num-layers 32 hidden-size 4096 num-attention-heads 32 num-query-groups 8 "
            "ffn-hidden-size 14336 seq-length 8192"},
    {"qwen3-0.6b", "Qwen3 0.6B",
     QWEN "num-layers 28 hidden-size 1024 num-attention-heads 16 num-query-groups 8 "
          "kv-channels 128 ffn-hidden-size 3072 qk-layernorm true"},
    {"qwen2.5-0.5b", "Qwen2.5 0.5B",
     QWEN "num-layers 24 hidden-size 896 num-query-groups 2 ffn-hidden-size 4864 "
          "add-qkv-bias true"},
    {"smollm2-135m", "SmolLM2 135M",
     "arch llama vocab-size 49152 rope-theta 100000 num-layers 30 hidden-size 576 "
     "num-query-groups 3 seq-length 2048"},
    {"llama-quickstart", "1.6M parameters, bytes: what `make quickstart` trains",
     "arch llama vocab-size 257 num-layers 4 hidden-size 192 num-attention-heads 6 "
     "num-query-groups 2 seq-length 128"},
    {"llama-tiny", "for tests, bytes",
     "arch llama vocab-size 257 num-layers 2 hidden-size 64 num-attention-heads 4 num-query-groups "
     "2 ffn-hidden-size 192 seq-length 64"},
    {"gpt2-tiny", "for tests, bytes",
     "arch gpt2 vocab-size 257 num-layers 2 hidden-size 64 num-attention-heads 4 seq-length 64"},
};
const int preset_table_count = sizeof(preset_table) / sizeof(preset_table[0]);
