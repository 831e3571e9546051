#include "option_table.h"

#include <float.h>
#include <limits.h>

#define FIELD(f) offsetof(Options, f)
#define INT(name, field, fallback, min, max, group, help) \
    { name, OPTION_INT, FIELD(field), fallback, min, max, "N", group, help }
#define LONG(name, field, fallback, min, max, group, help) \
    { name, OPTION_INT64, FIELD(field), fallback, min, max, "N", group, help }
#define REAL(name, field, fallback, min, max, group, help) \
    { name, OPTION_DOUBLE, FIELD(field), fallback, min, max, "X", group, help }
#define FLAG(name, field, fallback, group, help) \
    { name, OPTION_BOOL, FIELD(field), fallback, 0, 1, "", group, help }
#define TEXT(name, field, fallback, placeholder, group, help) \
    { name, OPTION_STRING, FIELD(field), fallback, 0, 0, placeholder, group, help }
#define CHOICE(name, field, fallback, choices, group, help) \
    { name, OPTION_CHOICE, FIELD(field), fallback, 0, 0, choices, group, help }

// The largest integer that double bounds can state exactly; far beyond any count here.
#define COUNT_MAX 9007199254740992.0

static const char MODEL[] = "Model";
static const char DATA[] = "Data";
static const char TRAINING[] = "Training";
static const char OPTIMIZER[] = "Optimizer and learning rate";
static const char PRECISION[] = "Precision";
static const char EVALUATION[] = "Evaluation and sampling";
static const char CHECKPOINTS[] = "Checkpoints";
const char option_group_gpu[] = "GPU";
const char option_group_ranks[] = "Several GPUs";
static const char RUN[] = "Run";

const OptionRow option_table[] = {
    TEXT("model", model, "gpt2-124m", "PRESET", MODEL,
         "start from a preset; each option below overrides it"),
    CHOICE("arch", arch, "gpt2", "gpt2|llama", MODEL, "architecture"),
    INT("num-layers", num_layers, "12", 1, 4096, MODEL, "transformer blocks (L)"),
    INT("hidden-size", hidden_size, "768", 2, 1 << 20, MODEL, "channels (C)"),
    INT("num-attention-heads", num_attention_heads, "12", 1, 4096, MODEL, "query heads (H)"),
    INT("num-query-groups", num_query_groups, "0", 0, 4096, MODEL,
        "key/value heads (G); 0: as many as query heads"),
    INT("ffn-hidden-size", ffn_hidden_size, "0", 0, 1 << 22, MODEL,
        "feed-forward width (F); 0: 4C for gpt2, 8C/3 rounded up to 128 for llama"),
    INT("vocab-size", vocab_size, "50257", 2, 1 << 24, MODEL, "vocabulary (V)"),
    INT("make-vocab-size-divisible-by", make_vocab_size_divisible_by, "128", 1, 65536, MODEL,
        "the embedding's rows are padded to a multiple of this"),
    INT("seq-length", seq_length, "1024", 1, 1 << 20, MODEL, "tokens a sequence (T)"),
    INT("max-position-embeddings", max_position_embeddings, "0", 0, 1 << 20, MODEL,
        "longest sequence the model can see; 0: --seq-length"),
    FLAG("untie-embeddings-and-output-weights", untie_embeddings_and_output_weights, "false", MODEL,
         "give the LM head weights of its own"),
    REAL("norm-epsilon", norm_epsilon, "1e-5", 0, 1, MODEL,
         "added to the variance in LayerNorm and RMSNorm"),
    REAL("rope-theta", rope_theta, "10000", 1, 1e12, MODEL,
         "base of the rotary frequencies (llama)"),
    CHOICE("rope-scaling", rope_scaling, "none", "none|linear|llama3", MODEL,
           "stretches the rotary embedding to longer sequences; llama3: as Llama 3.1 does"),
    REAL("rope-scaling-factor", rope_scaling_factor, "8", 1, 1e6, MODEL, "how many times longer"),
    REAL("rope-low-freq-factor", rope_low_freq_factor, "1", 0, 1e6, MODEL,
         "llama3: what turns less often over the original length is scaled whole"),
    REAL("rope-high-freq-factor", rope_high_freq_factor, "4", 0, 1e6, MODEL,
         "llama3: what turns more often over the original length is left as it is"),
    INT("rope-original-length", rope_original_length, "8192", 1, 1 << 30, MODEL,
        "llama3: the sequence length before scaling"),
    REAL("init-method-std", init_method_std, "0.02", 0, 10, MODEL,
         "standard deviation of the initial weights"),

    TEXT("data", data, "", "GLOB", DATA, "training shards"),
    TEXT("valid-data", valid_data, "", "GLOB", DATA, "validation shards"),
    TEXT("tokenizer", tokenizer, "", "FILE", DATA,
         "tokenizer.bin, to print samples as text; default: the one beside the shards"),
    FLAG("shuffle", shuffle, "true", DATA,
         "visit the training windows in a seeded random order, a new one each epoch"),

    LONG("train-iters", train_iters, "1000", 0, COUNT_MAX, TRAINING,
         "optimizer steps of the whole run"),
    INT("micro-batch-size", micro_batch_size, "4", 1, 1 << 20, TRAINING,
        "sequences a forward pass (B)"),
    INT("global-batch-size", global_batch_size, "0", 0, 1 << 24, TRAINING,
        "sequences an optimizer step, reached by accumulation; 0: one micro-batch a rank"),
    LONG("seed", seed, "1234", 0, COUNT_MAX, TRAINING, "of the initial weights and the data order"),
    INT("max-skipped", max_skipped, "20", 1, 1 << 30, TRAINING,
        "stop after this many steps in a row with a NaN or infinite loss or norm"),

    REAL("lr", lr, "6e-4", 0, 100, OPTIMIZER, "peak learning rate"),
    REAL("min-lr", min_lr, "0", 0, 100, OPTIMIZER, "learning rate at the end of the decay"),
    CHOICE("lr-decay-style", lr_decay_style, "cosine", "cosine|linear|constant|wsd", OPTIMIZER,
           "shape after the warm-up; wsd: constant, then linear over --lr-wsd-decay-iters"),
    LONG("lr-warmup-iters", lr_warmup_iters, "0", 0, COUNT_MAX, OPTIMIZER,
         "steps of linear warm-up"),
    LONG("lr-decay-iters", lr_decay_iters, "0", 0, COUNT_MAX, OPTIMIZER,
         "step at which the decay ends; 0: --train-iters"),
    LONG("lr-wsd-decay-iters", lr_wsd_decay_iters, "0", 0, COUNT_MAX, OPTIMIZER,
         "length of the decay of wsd; 0: a fifth of --lr-decay-iters"),
    REAL("weight-decay", weight_decay, "0.1", 0, 100, OPTIMIZER, "AdamW's, on matrices only"),
    REAL("adam-beta1", adam_beta1, "0.9", 0, 0.999999, OPTIMIZER, "AdamW's first-moment decay"),
    REAL("adam-beta2", adam_beta2, "0.95", 0, 0.999999, OPTIMIZER, "AdamW's second-moment decay"),
    REAL("adam-eps", adam_eps, "1e-8", 1e-30, 1, OPTIMIZER,
         "added to the root of the second moment"),
    REAL("clip-grad", clip_grad, "1.0", 0, 1e9, OPTIMIZER,
         "largest global gradient norm; 0: no clipping"),

    FLAG("bf16", bf16, "false", PRECISION,
         "operands of the linear layers in BF16 (emulated on the CPU)"),
    CHOICE("fp8-format", fp8_format, "none", "none|hybrid|e4m3|e5m2", PRECISION,
           "operands of the blocks' linear layers in FP8 (docs/fp8.md)"),
    CHOICE("fp8-recipe", fp8_recipe, "delayed", "delayed|tensorwise", PRECISION,
           "scales from the history of earlier steps, or from the tensor in hand"),
    INT("fp8-margin", fp8_margin, "0", -32, 32, PRECISION,
        "delayed: leave 2^N of headroom in the scale"),
    INT("fp8-e5m2-margin", fp8_e5m2_margin, "5", 0, 16, PRECISION,
        "delayed: as much more for E5M2, whose range has room: gradients may grow 2^N-fold at "
        "once"),
    INT("fp8-interval", fp8_interval, "1", 1, 1 << 30, PRECISION,
        "delayed: optimizer steps between scale updates"),
    INT("fp8-amax-history-len", fp8_amax_history_len, "1024", 1, 65536, PRECISION,
        "delayed: optimizer steps remembered"),
    CHOICE("fp8-amax-compute-algo", fp8_amax_compute_algo, "max", "max|most_recent", PRECISION,
           "delayed: which of the history the scale comes from"),
    FLAG("first-last-layers-bf16", first_last_layers_bf16, "false", PRECISION,
         "keep the first and last blocks in BF16"),
    INT("num-layers-at-start-in-bf16", num_layers_at_start_in_bf16, "1", 0, 4096, PRECISION,
        "how many first, with --first-last-layers-bf16"),
    INT("num-layers-at-end-in-bf16", num_layers_at_end_in_bf16, "1", 0, 4096, PRECISION,
        "how many last, with --first-last-layers-bf16"),
    FLAG("fp8-lm-head", fp8_lm_head, "false", PRECISION, "the LM head in FP8 too"),
    FLAG("fp8-wgrad", fp8_wgrad, "true", PRECISION, "the weight gradients' products in FP8 too"),
    CHOICE("fp8-fast-accumulation", fp8_fast_accumulation, "forward", "none|forward|all", PRECISION,
           "FP8 products that keep partial sums in the tensor cores' narrower registers (GPU)"),
    FLAG("fp8-required", fp8_required, "false", PRECISION,
         "refuse to run where FP8 is asked for and the device has none, instead of using BF16"),
    LONG("fp8-stats-interval", fp8_stats_interval, "0", 0, COUNT_MAX, PRECISION,
         "steps between counts of saturated and vanished values per tensor in metrics.jsonl; 0: "
         "none"),

    LONG("eval-interval", eval_interval, "250", 1, COUNT_MAX, EVALUATION,
         "steps between evaluations (with --valid-data)"),
    LONG("eval-iters", eval_iters, "20", 0, COUNT_MAX, EVALUATION,
         "global batches an evaluation; 0: all validation data"),
    CHOICE("eval-precision", eval_precision, "same", "same|bf16", EVALUATION,
           "of the linear layers in evaluations and samples: as in training, or BF16"),
    LONG("sample-interval", sample_interval, "0", 0, COUNT_MAX, EVALUATION,
         "steps between samples; 0: none"),
    INT("sample-length", sample_length, "256", 1, 1 << 20, EVALUATION, "tokens of a sample"),
    REAL("sample-temperature", sample_temperature, "0.8", 0, 100, EVALUATION,
         "softmax temperature; 0: always the likeliest token"),
    INT("sample-top-k", sample_top_k, "50", 0, 1 << 24, EVALUATION,
        "sample among the K likeliest tokens; 0: among all"),
    LONG("sample-seed", sample_seed, "1", 0, COUNT_MAX, EVALUATION, "of the samples"),
    TEXT("sample-prompt", sample_prompt, "", "TEXT", EVALUATION,
         "text that samples go on from; needs a tokenizer.bin that says how text is cut"),
    FLAG("sample-only", sample_only, "false", EVALUATION, "print one sample and leave"),
    TEXT("eval-choices", eval_choices, "", "GLOB", EVALUATION,
         "multiple-choice sets (scripts/prepare_choices) to score at every evaluation"),
    LONG("eval-choices-limit", eval_choices_limit, "0", 0, COUNT_MAX, EVALUATION,
         "questions of each set; 0: all"),
    FLAG("eval-only", eval_only, "false", EVALUATION,
         "evaluate once (--valid-data, --eval-choices) and leave"),

    TEXT("save", save, "", "DIR", CHECKPOINTS,
         "where checkpoints, metrics.jsonl and config.txt go"),
    LONG("save-interval", save_interval, "1000", 1, COUNT_MAX, CHECKPOINTS,
         "steps between checkpoints (and one at the end)"),
    INT("keep", keep, "3", 0, 1 << 30, CHECKPOINTS,
        "newest checkpoints kept, besides the best; 0: all"),
    TEXT("load", load, "", "DIR", CHECKPOINTS,
         "start from the weights of a checkpoint or of scripts/convert_hf import, as a new run"),
    TEXT("resume", resume, "", "latest|PATH", CHECKPOINTS,
         "continue from a checkpoint; latest: the newest whole one under --save, if any"),
    FLAG("list-checkpoints", list_checkpoints, "false", CHECKPOINTS,
         "list those under --save, whole or damaged, and leave"),

    CHOICE(
        "recompute", recompute, "none", "none|activations|block", option_group_gpu,
        "computed again in the backward pass, to save memory: the norms' and activations' outputs, "
        "or whole blocks"),
    CHOICE("grad-accum-dtype", grad_accum_dtype, "auto", "auto|fp32|bf16", option_group_gpu,
           "type of the weights' gradients; auto: FP32 where a step sums over micro-batches, else "
           "BF16"),
    CHOICE("adam-dtype", adam_dtype, "fp32", "fp32|bf16", option_group_gpu,
           "type of AdamW's moments; BF16 ones are rounded stochastically"),
    FLAG("cuda-graphs", cuda_graphs, "true", option_group_gpu,
         "capture the micro-step once and replay it, without launch gaps"),
    FLAG("deterministic", deterministic, "true", option_group_gpu,
         "attention's backward in a fixed order too, for some workspace and time"),
    FLAG("gemm-autotune", gemm_autotune, "false", option_group_gpu,
         "time cuBLASLt's algorithms once (half a minute); the choice is kept under --save and "
         "used again"),
    INT("workspace-mib", workspace_mib, "4608", 64, 1 << 20, option_group_gpu,
        "most workspace for attention"),
    INT("device", device, "0", 0, 1023, option_group_gpu, "which GPU"),
    REAL("device-memory-gib", device_memory_gib, "0", 0, 1e6, option_group_gpu,
         "memory that --plan fits the run into; 0: the GPU's own"),
    FLAG("profile", profile, "false", option_group_gpu,
         "after the last step, time one more by kernel family (its update counts for nothing)"),
    FLAG("verify", verify, "false", option_group_gpu,
         "check driver, libraries, products, an attention and NCCL on this machine, and leave"),

    INT("gpus", gpus, "1", 1, RANKS_MAX, option_group_ranks,
        "GPUs of this machine to train on, a process (rank) each; leave it out where torchrun, "
        "srun "
        "or mpirun starts the ranks"),
    INT("distributed-timeout", distributed_timeout, "600", 1, 1 << 20, option_group_ranks,
        "seconds to wait for ranks to come, and after which one that hangs ends the run"),

    LONG("log-interval", log_interval, "10", 1, COUNT_MAX, RUN,
         "steps between lines (metrics.jsonl has every step)"),
    TEXT("metrics", metrics, "", "FILE", RUN,
         "where the metrics go instead of --save's metrics.jsonl; needs no --save"),
    FLAG("plan", plan, "false", RUN, "print the memory plan and leave"),
    FLAG("list-tensors", list_tensors, "false", RUN,
         "print the model's tensors, as model.safetensors has them, and leave"),
    TEXT("dump-gradients", dump_gradients, "", "FILE", RUN,
         "write the next step's loss and gradients, before clipping, as safetensors, and leave"),
    TEXT("config", config, "", "FILE", RUN,
         "read options from a file, one a line; the command line overrides it"),
    FLAG("help", help, "false", RUN, "this text"),
    FLAG("version", version, "false", RUN, "the version"),
};
const int option_table_count = sizeof(option_table) / sizeof(option_table[0]);
_Static_assert(sizeof(option_table) / sizeof(option_table[0]) <= OPTIONS_MAX, "raise OPTIONS_MAX");

#define GPT2 "arch gpt2 vocab-size 50257 seq-length 1024 max-position-embeddings 1024 "
#define LLAMA3 \
    "arch llama vocab-size 128256 rope-theta 500000 untie-embeddings-and-output-weights true "

const Preset preset_table[] = {
    {"gpt2-124m", "GPT-2 small", GPT2 "num-layers 12 hidden-size 768 num-attention-heads 12"},
    {"gpt2-350m", "GPT-2 medium", GPT2 "num-layers 24 hidden-size 1024 num-attention-heads 16"},
    {"gpt2-774m", "GPT-2 large", GPT2 "num-layers 36 hidden-size 1280 num-attention-heads 20"},
    {"gpt2-1558m", "GPT-2 XL", GPT2 "num-layers 48 hidden-size 1600 num-attention-heads 25"},
    {"llama-1b", "1.06B parameters, Llama 3's vocabulary",
     LLAMA3 "num-layers 12 hidden-size 2048 num-attention-heads 16 num-query-groups 4 "
            "ffn-hidden-size 5504 "
            "seq-length 2048 max-position-embeddings 8192"},
    {"llama-3-8b", "Llama 3 8B",
     LLAMA3 "num-layers 32 hidden-size 4096 num-attention-heads 32 num-query-groups 8 "
            "ffn-hidden-size 14336 "
            "seq-length 8192 max-position-embeddings 8192"},
    {"llama-quickstart", "1.6M parameters, bytes: what `make quickstart` trains",
     "arch llama vocab-size 257 num-layers 4 hidden-size 192 num-attention-heads 6 "
     "num-query-groups 2 "
     "ffn-hidden-size 512 seq-length 128"},
    {"llama-tiny", "for tests, bytes",
     "arch llama vocab-size 257 num-layers 2 hidden-size 64 num-attention-heads 4 num-query-groups "
     "2 "
     "ffn-hidden-size 192 seq-length 64"},
    {"gpt2-tiny", "for tests, bytes",
     "arch gpt2 vocab-size 257 num-layers 2 hidden-size 64 num-attention-heads 4 seq-length 64"},
};
const int preset_table_count = sizeof(preset_table) / sizeof(preset_table[0]);
