// Every option of both trainers, one row each. GROUP is the heading above the rows in --help.
// options.h makes the enums and the fields of Options from these rows, and option_table.c the
// table.
// A row:
//   TYPE("name", field, "default", bounds or choices or placeholder, "help")
// A CHOICE also has the name of its enum before the default; N(CONSTANT, "text") is one choice.
// After the help text a row names its OptionEffect, unless that is EFFECT_RESULTS. The last
// arguments may be NEEDS("another") if the option has no effect while that other option is at its
// default, or NEEDS("another value") if it needs that value; "|" separates options of which one is
// enough. Or it is REPLACES("another") if the option, where it is given, switches off that other
// option of a weaker source (OptionSource). Two options that replace each other are refused from
// one source.
// clang-format off
#define GROUP "Model"
TEXT("model", model, "gpt2-124m", "PRESET",
    "start from a preset; each option below overrides it, and so does the model of --load or "
    "--resume", NOTHING)
CHOICE("arch", arch, Arch, "gpt2",
    N(ARCH_GPT2, "gpt2") N(ARCH_LLAMA, "llama"), "architecture", SHAPE)
INT("num-layers", num_layers, "12", 1, 4096, "transformer blocks (L)", SHAPE)
INT("hidden-size", hidden_size, "768", 2, 1 << 20, "channels (C)", SHAPE)
INT("num-attention-heads", num_attention_heads, "0", 0, 4096,
    "query heads (H); 0: heads of 64 channels (or --kv-channels); if 64 does not divide C, of its "
    "largest even divisor below 64", SHAPE)
INT("num-query-groups", num_query_groups, "0", 0, 4096,
    "key/value heads (G); 0: as many as query heads", SHAPE)
INT("kv-channels", kv_channels, "0", 0, 1024,
    "size of an attention head (D); 0: --hidden-size / --num-attention-heads", SHAPE)
FLAG("qk-layernorm", qk_layernorm, "false",
    "RMSNorm over each head of queries and keys, before the rotary embedding, as Qwen3 has it "
    "(llama)", SHAPE)
FLAG("add-qkv-bias", add_qkv_bias, "false",
    "a bias of queries, keys and values, as Qwen2 has it (gpt2 always has)", SHAPE)
INT("ffn-hidden-size", ffn_hidden_size, "0", 0, 1 << 22,
    "feed-forward width (F); 0: 4C for gpt2, 8C/3 rounded up to 128 for llama", SHAPE)
INT("vocab-size", vocab_size, "50257", 2, 1 << 24,
    "vocabulary size (V); if not given, the tokenizer's, where there is one", SHAPE)
INT("make-vocab-size-divisible-by", make_vocab_size_divisible_by, "128", 1, 65536,
    "the embedding's rows are padded to a multiple of this", SHAPE)
INT("seq-length", seq_length, "1024", 1, 1 << 20, "tokens a sequence (T)", DATA)
INT("max-position-embeddings", max_position_embeddings, "0", 0, 1 << 20,
    "longest sequence the model can see; 0: --seq-length", START)
FLAG("untie-embeddings-and-output-weights", untie_embeddings_and_output_weights, "false",
    "give the LM head weights of its own", SHAPE)
REAL("norm-epsilon", norm_epsilon, "1e-5", 0, 1, "added to the variance in LayerNorm and RMSNorm")
REAL("rope-theta", rope_theta, "10000", 1, 1e12, "base of the rotary frequencies (llama)",
    NEEDS("arch llama"))
CHOICE_OF("rope-scaling", rope_scaling, "none", ROPE_SCALINGS,
    "stretches the rotary embedding to longer sequences; llama3: as Llama 3.1 does",
    NEEDS("arch llama"))
REAL("rope-scaling-factor", rope_scaling_factor, "8", 1, 1e6,
    "by how many times --rope-scaling stretches", NEEDS("rope-scaling"))
REAL("rope-low-freq-factor", rope_low_freq_factor, "1", 1e-6, 1e6,
    "llama3: frequencies with fewer turns over the original length are scaled fully",
    NEEDS("rope-scaling llama3"))
REAL("rope-high-freq-factor", rope_high_freq_factor, "4", 1e-6, 1e6,
    "llama3: frequencies with more turns over the original length stay as they are",
    NEEDS("rope-scaling llama3"))
INT("rope-original-length", rope_original_length, "8192", 1, 1 << 30,
    "llama3: the sequence length before scaling", NEEDS("rope-scaling llama3"))
REAL("init-method-std", init_method_std, "0", 0, 10,
    "standard deviation of the initial weights; 0: 15.36/C up to 768 channels (at most 0.06), then "
    "0.02, from 2048 channels 40.96/C",
    START)
REAL("logit-softcap", logit_softcap, "0", 0, 1e6,
    "logits become cap * tanh(logit / cap), as Gemma 2 caps them; 0: no cap")

#undef GROUP
#define GROUP "Data"
TEXT("data", data, "", "GLOB",
    "training shards, or a mixture of shards by weights: '0.7 web/*.bin 0.3 code/*.bin'", DATA)
TEXT("valid-data", valid_data, "", "GLOB",
    "validation shards; each source of a mixture is evaluated, and the loss is the weighted mean "
    "of their losses", EVALUATION)
TEXT("tokenizer", tokenizer, "", "FILE",
    "tokenizer.bin, to print samples as text; default: that of --load or --resume, or else the "
    "one beside the shards", NOTHING)
FLAG("shuffle", shuffle, "true",
    "visit the training windows in a seeded random order, a new one each epoch", DATA)
FLAG("reset-attention-mask", reset_attention_mask, "false",
    "a token attends only to its own document; on by default if --data has conversations with "
    "lists of documents (SHARD.starts)", EVALUATION)
FLAG("reset-position-ids", reset_position_ids, "false",
    "positions count from the first token of a document (gpt2; a rotary embedding is relative); "
    "on by default where --reset-attention-mask is", EVALUATION, NEEDS("arch gpt2"))
FLAG("eod-mask-loss", eod_mask_loss, "false",
    "the token after one that ends or separates documents does not count as a target", EVALUATION)
FLAG("accept-data-change", accept_data_change, "false",
    "resume although --data differs from the data of the checkpoint's run", ACTION, NEEDS("resume"))

#undef GROUP
#define GROUP "Training"
LONG("train-iters", train_iters, "1000", 0, COUNT_MAX, "optimizer steps of the whole run",
    REPLACES("epochs"))
REAL("epochs", epochs, "0", 0, 1e6,
    "how many times the run sees each sequence of --data, which sets --train-iters; 0: "
    "--train-iters itself sets the length", REPLACES("train-iters"))
INT("micro-batch-size", micro_batch_size, "4", 1, 1 << 20,
    "sequences per forward pass of a rank (B)", SPEED)
INT("global-batch-size", global_batch_size, "0", 0, 1 << 24,
    "sequences per optimizer step, of all ranks, reached by accumulation; 0: one micro-batch per "
    "rank", START)
REAL("z-loss-coeff", z_loss_coeff, "0", 0, 1,
    "adds X log(Z)^2 to the loss, Z being the softmax's denominator (PaLM: 1e-4); the printed "
    "loss stays the cross-entropy")
LONG("seed", seed, "1234", 0, COUNT_MAX,
    "seed of the initial weights, the data order and the samples", DATA)
INT("max-skipped", max_skipped, "20", 1, 1 << 30,
    "end the run after this many skipped steps in a row: with a NaN or infinite loss or norm, or "
    "a spike")
REAL("skip-spikes", skip_spikes, "0", 0, 1e6,
    "skip a step whose loss or gradient norm is more than X standard deviations above the mean of "
    "the last 128 (OLMo: 6); 0: skip none")
TEXT("iterations-to-skip", iterations_to_skip, "", "STEPS",
    "steps whose data are left out, as 4200-4300,5000: they change no weight")

#undef GROUP
#define GROUP "Optimizer and learning rate"
CHOICE("optimizer", optimizer, Optimizer, "adamw",
    N(OPTIMIZER_ADAMW, "adamw") N(OPTIMIZER_MUON, "muon"),
    "of the blocks' matrices; AdamW always updates embeddings, head, norms and biases "
    "(docs/muon.md)")
REAL("lr", lr, "-1", -1, 100,
    "peak learning rate; -1: 6e-4, with AdamW from 768 channels on 0.4608/C")
REAL("embedding-lr-mult", embedding_lr_mult, "-1", -1, 1e6,
    "factor of --lr for the embeddings, also where the LM head shares their weights; 0: frozen; "
    "-1: 4 with AdamW, 2 with Muon, 1 with --load")
REAL("head-lr-mult", head_lr_mult, "1", 0, 1e6,
    "factor of --lr for the weights of an LM head that has its own; 0: frozen",
    NEEDS("untie-embeddings-and-output-weights"))
REAL("vector-lr-mult", vector_lr_mult, "-1", -1, 1e6,
    "factor of --lr for the weights of norms, and for biases; 0: frozen; -1: 4 with AdamW, 1 with "
    "Muon or --load")
REAL("min-lr", min_lr, "0", 0, 100, "learning rate at the end of the decay",
    NEEDS("lr-decay-style cosine|lr-decay-style linear|lr-decay-style wsd"))
CHOICE("lr-decay-style", lr_decay_style, DecayStyle, "wsd",
    N(DECAY_COSINE, "cosine") N(DECAY_LINEAR, "linear") N(DECAY_CONSTANT, "constant")
    N(DECAY_WSD, "wsd"),
    "shape after the warm-up; wsd: constant, then linear over --lr-wsd-decay-iters")
LONG("lr-warmup-iters", lr_warmup_iters, "-1", -1, COUNT_MAX,
    "steps of linear warm-up; -1: a tenth of --lr-decay-iters, but at most 1000")
LONG("lr-decay-iters", lr_decay_iters, "0", 0, COUNT_MAX,
    "step at which the decay ends; 0: --train-iters")
LONG("lr-wsd-decay-iters", lr_wsd_decay_iters, "0", 0, COUNT_MAX,
    "length of the decay of wsd, which begins after the warm-up at the earliest; 0: two fifths of "
    "--lr-decay-iters", NEEDS("lr-decay-style wsd"))
REAL("weight-decay", weight_decay, "0.1", 0, 100, "decoupled, on matrices only")
CHOICE("adam-dtype", adam_dtype, StateType, "fp32",
    N(STATE_FP32, "fp32") N(STATE_BF16, "bf16") N(STATE_8BIT, "8bit"),
    "type of the optimizer's moments, rounded stochastically; 8bit: blocks of 64 with a scale each "
    "(Muon's momentum: BF16)")
REAL("adam-beta1", adam_beta1, "0.9", 0, 0.999999, "AdamW's first-moment decay")
REAL("adam-beta2", adam_beta2, "0.95", 0, 0.999999, "AdamW's second-moment decay")
REAL("adam-eps", adam_eps, "1e-8", 1e-30, 1, "added to the root of the second moment")
REAL("muon-momentum", muon_momentum, "0.95", 0, 0.999999, "Muon's, with Nesterov's look-ahead",
    NEEDS("optimizer"))
REAL("muon-extra-scale-factor", muon_extra_scale_factor, "0.2", 0, 1000,
    "root mean square of Muon's update at a learning rate of 1; 0.2 is about AdamW's, so that one "
    "--lr, if given, serves both", NEEDS("optimizer"))
REAL("clip-grad", clip_grad, "1.0", 0, 1e9, "largest global gradient norm; 0: no clipping")

#undef GROUP
#define GROUP "Precision"
FLAG("bf16", bf16, "false",
    "operands of the linear layers in BF16 (emulated on the CPU); turns off the --fp8-format of a "
    "checkpoint or file", PRECISION, REPLACES("fp8-format"))
CHOICE("fp8-format", fp8_format, Fp8Format, "none",
    N(FP8_FORMAT_NONE, "none") N(FP8_FORMAT_HYBRID, "hybrid") N(FP8_FORMAT_E4M3, "e4m3")
    N(FP8_FORMAT_E5M2, "e5m2"),
    "operands of the blocks' linear layers in FP8, of other linear layers in BF16 (docs/fp8.md)",
    PRECISION)
CHOICE("fp8-recipe", fp8_recipe, Fp8Recipe, "delayed",
    N(FP8_RECIPE_DELAYED, "delayed") N(FP8_RECIPE_TENSORWISE, "tensorwise")
    N(FP8_RECIPE_BLOCKWISE, "blockwise"),
    "scales from the amax history of earlier steps, from each tensor itself, or from each block of "
    "128 values of it (of a weight, 128 x 128)", PRECISION, NEEDS("fp8-format"))
INT("fp8-margin", fp8_margin, "0", -32, 32,
    "delayed: leave 2^N of headroom in the scale", PRECISION, NEEDS("fp8-recipe delayed"))
INT("fp8-e5m2-margin", fp8_e5m2_margin, "5", 0, 16,
    "delayed: further headroom for E5M2: gradients may grow 2^N-fold from one step to the next",
    PRECISION, NEEDS("fp8-recipe delayed"))
INT("fp8-amax-history-len", fp8_amax_history_len, "1024", 1, 65536,
    "delayed: optimizer steps whose largest amax sets the scale; 1: the most recent", PRECISION,
    NEEDS("fp8-recipe delayed"))
FLAG("fp8-blockwise-fp32-scales", fp8_blockwise_fp32_scales, "false",
    "blockwise: scales need not be powers of two", PRECISION, NEEDS("fp8-recipe blockwise"))
FLAG("first-last-layers-bf16", first_last_layers_bf16, "false",
    "keep the first and last blocks in BF16", PRECISION, NEEDS("fp8-format"))
INT("num-layers-at-start-in-bf16", num_layers_at_start_in_bf16, "1", 0, 4096,
    "how many first blocks, with --first-last-layers-bf16",
    PRECISION, NEEDS("first-last-layers-bf16"))
INT("num-layers-at-end-in-bf16", num_layers_at_end_in_bf16, "1", 0, 4096,
    "how many last blocks, with --first-last-layers-bf16",
    PRECISION, NEEDS("first-last-layers-bf16"))
FLAG("fp8-lm-head", fp8_lm_head, "false", "the LM head in FP8 too", PRECISION, NEEDS("fp8-format"))
FLAG("fp8-wgrad", fp8_wgrad, "true",
    "the weight gradients' matmuls in FP8 too", PRECISION, NEEDS("fp8-format"))
CHOICE("fp8-fast-accumulation", fp8_fast_accumulation, FastAccumulation, "forward",
    N(FAST_NONE, "none") N(FAST_FORWARD, "forward") N(FAST_ALL, "all"),
    "FP8 matmuls that keep partial sums in the tensor cores' narrower registers (GPU)",
    PRECISION, NEEDS("fp8-recipe delayed|fp8-recipe tensorwise"))
FLAG("fp8-required", fp8_required, "false",
    "refuse to run where FP8 is requested and the device has none, instead of using BF16",
    PRECISION, NEEDS("fp8-format"))
LONG("fp8-stats-interval", fp8_stats_interval, "0", 0, COUNT_MAX,
    "steps between counts, in metrics.jsonl, of each tensor's FP8 codes that are the largest "
    "(saturation), zero (underflow) or subnormal; 0: none", NOTHING, NEEDS("fp8-format"))

#undef GROUP
#define GROUP "Evaluation and sampling"
LONG("eval-interval", eval_interval, "250", 1, COUNT_MAX,
    "steps between evaluations (with --valid-data)", NOTHING, NEEDS("valid-data|eval-choices"))
LONG("eval-iters", eval_iters, "20", 0, COUNT_MAX,
    "global batches per evaluation; 0: all validation data", EVALUATION, NEEDS("valid-data"))
CHOICE("eval-precision", eval_precision, EvalPrecision, "same",
    N(EVAL_SAME, "same") N(EVAL_BF16, "bf16"),
    "precision of the linear layers in evaluations and samples: as in training, or BF16", PRECISION,
    NEEDS("fp8-format"))
LONG("sample-interval", sample_interval, "0", 0, COUNT_MAX,
    "steps between samples; 0: none", NOTHING)
INT("sample-length", sample_length, "256", 1, 1 << 20,
    "most tokens of a sample; an end-of-text token ends it earlier", NOTHING,
    NEEDS("sample-interval|sample-only"))
REAL("sample-temperature", sample_temperature, "0.8", 0, 100,
    "softmax temperature; 0: always the most likely token", NOTHING,
    NEEDS("sample-interval|sample-only"))
INT("sample-top-k", sample_top_k, "50", 0, 1 << 24,
    "sample among the N most likely tokens; 0: among all", NOTHING,
    NEEDS("sample-interval|sample-only"))
TEXT("sample-prompt", sample_prompt, "", "TEXT",
    "text that samples continue; needs a tokenizer.bin with the rules for splitting text", NOTHING,
    NEEDS("sample-interval|sample-only"), REPLACES("sample-tokens"))
TEXT("sample-tokens", sample_tokens, "", "IDS|@FILE",
    "tokens that samples continue, by their numbers, or a file of them; samples are then numbers "
    "too, and no end-of-text token ends them (scripts/chat looks for it)", NOTHING,
    NEEDS("sample-interval|sample-only"), REPLACES("sample-prompt"))
FLAG("sample-only", sample_only, "false", "print one sample and exit", TASK)
TEXT("eval-choices", eval_choices, "", "GLOB",
    "multiple-choice sets (scripts/prepare_choices) to score at every evaluation", SPEED)
FLAG("eval-only", eval_only, "false",
    "evaluate once (--valid-data, --eval-choices) and exit", TASK)

#undef GROUP
#define GROUP "Checkpoints"
TEXT("save", save, "", "DIR", "where checkpoints, metrics.jsonl and config.txt go", NOTHING)
LONG("save-interval", save_interval, "1000", 1, COUNT_MAX,
    "steps between checkpoints (and one at the end)", NOTHING, NEEDS("save"))
INT("keep", keep, "3", 0, 1 << 30,
    "newest checkpoints kept, besides the best and the last good one; 0: all", NOTHING,
    NEEDS("save"))
INT("lock-timeout", lock_timeout, "120", 0, 1 << 20,
    "seconds to wait while another run uses --save, such as the earlier run of a requeued job",
    ACTION, NEEDS("save"))
TEXT("load", load, "", "DIR",
    "start from the weights of a checkpoint or of scripts/convert_hf import, as a new run, with "
    "their model's shape", START)
TEXT("resume", resume, "", "latest|PATH",
    "continue from a checkpoint, which gives the options that are not given here; latest: the "
    "newest one under --save, if any", ACTION)
FLAG("list-checkpoints", list_checkpoints, "false",
    "list the checkpoints under --save, whole or damaged, and exit, with status 1 if one is "
    "damaged", TASK)

#undef GROUP
#define GROUP "GPU"
CHOICE("recompute", recompute, Recompute, "none",
    N(RECOMPUTE_NONE, "none") N(RECOMPUTE_ACTIVATIONS, "activations") N(RECOMPUTE_BLOCK, "block"),
    "recomputed in the backward pass, to save memory: the norms' and activations' outputs, or "
    "whole blocks", SPEED)
CHOICE("grad-accum-dtype", grad_accum_dtype, GradientType, "auto",
    N(GRADIENT_AUTO, "auto") N(GRADIENT_FP32, "fp32") N(GRADIENT_BF16, "bf16"),
    "type of the weights' gradients; auto: FP32 where a step sums over micro-batches, else BF16",
    SPEED)
FLAG("optimizer-cpu-offload", optimizer_cpu_offload, "false",
    "master weights and moments that the GPU has no room for lie in pinned host memory, where the "
    "GPU updates them", SPEED)
FLAG("cuda-graphs", cuda_graphs, "true",
    "capture the micro-step once and replay it, without launch gaps", SPEED)
FLAG("deterministic", deterministic, "true",
    "attention's backward in a fixed order too, at the cost of workspace and time", SPEED)
LONG("check-interval", check_interval, "200", 0, COUNT_MAX,
    "steps between checks that a GPU computes the same twice and that all ranks have the same "
    "weights; a check that fails ends the run; 0: no checks", SPEED)
REAL("device-memory-gib", device_memory_gib, "0", 0, 1e6,
    "device memory that the run is planned for; 0: that of the GPU", NOTHING)
FLAG("profile", profile, "false",
    "after the last step, time one more by kernel family (its update counts for nothing)", NOTHING)
FLAG("verify", verify, "false",
    "check driver, libraries, matmuls, an attention kernel and NCCL on this machine, and exit",
    TASK)

#undef GROUP
#define GROUP "Several GPUs"
INT("gpus", gpus, "1", 1, RANKS_MAX,
    "GPUs of this machine to train on, a process (rank) each; omit it where torchrun, srun or "
    "mpirun starts the ranks", SPEED)
INT("distributed-timeout", distributed_timeout, "600", 1, 1 << 20,
    "seconds to wait for ranks to start, and after which a rank that hangs ends the run", NOTHING)

#undef GROUP
#define GROUP "Run"
LONG("log-interval", log_interval, "10", 1, COUNT_MAX,
    "steps between lines (metrics.jsonl has every step)", NOTHING)
FLAG("quiet", quiet, "false",
    "print nothing but warnings, errors and what is asked for instead of training; on with "
    "--sample-only and --eval-only, unless --no-quiet is given", ACTION)
FLAG("completion", completion, "false",
    "print what completes these options in bash and zsh, and exit: source <(./train_gpt "
    "--completion)", ACTION)
TEXT("metrics", metrics, "", "FILE",
    "where the metrics go instead of --save's metrics.jsonl; needs no --save", NOTHING)
FLAG("plan", plan, "false", "open the data, if given, print the memory plan, and exit", TASK)
FLAG("list-tensors", list_tensors, "false",
    "print the model's tensors, as model.safetensors has them, and exit", TASK)
TEXT("export", export_to, "", "DIR",
    "write the weights of --load as a new Hugging Face folder to serve, in BF16, and exit", TASK)
FLAG("export-fp8", export_fp8, "false",
    "export the blocks' linear layers in FP8 with a scale for each 128 x 128 weights (llama)",
    ACTION, NEEDS("export"))
REAL("export-shard-gb", export_shard_gb, "5", 0, 1e6,
    "export files of at most X times 10^9 bytes, or of one tensor", ACTION, NEEDS("export"))
TEXT("dump-gradients", dump_gradients, "", "FILE",
    "write the next step's loss and gradients, before clipping, as safetensors, and exit", TASK)
TEXT("config", config, "", "FILE",
    "read options from a file, one a line; of several files a later one overrides, and the command "
    "line overrides all", ACTION)
FLAG("help", help, "false", "this text", ACTION)
FLAG("version", version, "false", "the version", ACTION)

#undef GROUP
#undef INT
#undef LONG
#undef REAL
#undef FLAG
#undef TEXT
#undef CHOICE
#undef CHOICE_OF
#undef N
