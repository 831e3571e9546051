// The GPU trainer: GPT-2 and Llama in BF16 or FP8 with FP32 master weights, on one GPU or on many,
// a process (rank) each. The functions of train_gpt.c in the same order, over a stream: a step is
// enqueued whole, and its loss and norm are read while the next one runs, so that the device never
// waits for the host. What ranks exchange goes over a second stream beside it (train/gpu/comm.h).
//
// Shapes: B sequences of T tokens, M = B * T, C channels, L blocks, H heads, G key/value heads, D
// head size, N = (H + 2G) * D, F feed-forward, V vocabulary, P padded vocabulary. Activations and
// their gradients are BF16, statistics FP32. Operands of linear layers are FP8 where the policy
// says so (model/precision.h): quantised by what computes them, or, where the scale is not known
// before, from BF16 (train/gpu/linear.h).
#include "model/fit.h"
#include "model/schedule.h"
#include "ranks/launch.h"
#include "train/gpu/activations.h"
#include "train/gpu/batches.h"
#include "train/gpu/support.h"
#include "train/gpu/tune.h"
#include "train/gpu/verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// What a step gets from the host, and its results on their way back.
typedef struct {
    StepInput *input; // pinned, as is state
    StepState *state;
    cudaEvent_t begin, end;
    bool follows; // directly on the step before
} Pending;

// Launches that are the same each time: run one by one once, which makes their plans, then captured
// and replayed.
typedef struct {
    cudaGraphExec_t graph;
    bool warm;
} Replay;

// Where in its step a micro-batch is. Several ranks: the first receives each bucket's new weights
// before it reads them, the last has its gradients added up once they are complete.
enum { MICRO_FIRST = 1, MICRO_LAST = 2, MICRO_PLACES = 4 };

// steps whose events are still of use: the one on its way, and the two before
enum { RESULTS = 3 };

typedef struct {
    Run run;
    Gpu gpu;
    Comm comm;
    Plan plan;
    void *memory;
    char lacks_fp8[SUPPORT_REASON]; // why the device has no FP8
    Params params;
    Activations act;

    Batches batches;
    Bf16 *sample_codes;   // [V], host: of the next token of a sample, as they come
    float *sample_logits; // [V], host: and as numbers

    Replay micro[MICRO_PLACES][2], update[2]; // [place][measuring], [measuring]
    StepInput *input;                         // on the device
    Pending pending[RESULTS];
    int64_t enqueued; // steps enqueued by this process
    bool waiting;     // the last one has not been reported yet
} Trainer;

// ---- memory -----------------------------------------------------------------------------------

static int64_t micro_batch_tokens(const Trainer *t) {
    return (int64_t)t->run.options.micro_batch_size * t->run.config.seq_length;
}

// The whole plan of a run, from its options and what the device offers.
static bool trainer_plan(Trainer *t, const Options *options, NumberSupport support, Error *err) {
    if (!run_configure(&t->run, options, support, err)) { return false; }
    params_plan(&t->params, &t->run, &t->plan);
    activations_plan(&t->act, &t->params, &t->gpu, &t->plan);
    batches_plan(&t->batches, (int)micro_batch_tokens(t), t->run.config.vocab, &t->plan);
    plan_buffer(&t->plan, "data", "step input", sizeof(StepInput), (void **)&t->input);
    return true;
}

static void trainer_free_plan(Trainer *t) {
    params_free_plan(&t->params);
    activations_free(&t->act);
    plan_free(&t->plan);
}

static int64_t planned_bytes(const Options *options, NumberSupport support) {
    Trainer *t = (Trainer *)calloc_or_die(1, sizeof(Trainer));
    int64_t bytes = trainer_plan(t, options, support, NULL) ? t->plan.bytes : INT64_MAX;
    run_free_configuration(&t->run);
    trainer_free_plan(t);
    free(t);
    return bytes;
}

// --plan: needs no GPU.
static void print_plan(const Options *options) {
    Trainer *t = (Trainer *)calloc_or_die(1, sizeof(Trainer));
    Error err;
    size_t free_bytes, memory = (size_t)(options->device_memory_gib * 0x1p30);
    if (memory == 0 && cudaMemGetInfo(&free_bytes, &memory) != cudaSuccess) {
        memory = (size_t)80 << 30; // no GPU here: an 80 GB one
    }
    NumberSupport support = support_of(options, 0, t->lacks_fp8);
    if (!trainer_plan(t, options, support, &err)) { die("%s", err.text); }
    options_print(&t->run.options, stdout);
    precision_print(&t->run.precision);
    plan_print(&t->plan, stdout);
    fit_print(options, support, planned_bytes, (int64_t)memory);
    exit(EXIT_SUCCESS);
}

// Before anything is allocated or read.
static void check_memory(const Trainer *t, NumberSupport support) {
    size_t free_bytes, all_bytes;
    char need[32], have[32], advice[128];
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (t->plan.bytes + FIT_OVERHEAD_BYTES / 2 > (int64_t)free_bytes) {
        fit_advice(&t->run.options, support, planned_bytes, (int64_t)free_bytes, advice);
        die("the run needs %s of device memory, %s are free: try %s (--plan lists it)",
            format_bytes(need, (double)t->plan.bytes), format_bytes(have, (double)free_bytes),
            advice);
    }
}

static void allocate(Trainer *t) {
    CUDA_CHECK(cudaMalloc(&t->memory, (size_t)t->plan.bytes));
    CUDA_CHECK(cudaMemsetAsync(t->memory, 0, (size_t)t->plan.bytes, t->gpu.stream));
    plan_assign(&t->plan, t->memory);
    activations_start(&t->act, &t->run, &t->gpu);
    batches_start(&t->batches, &t->gpu);
    for (int i = 0; i < RESULTS; i++) {
        CUDA_CHECK(cudaMallocHost((void **)&t->pending[i].input, sizeof(StepInput)));
        CUDA_CHECK(cudaMallocHost((void **)&t->pending[i].state, sizeof(StepState)));
        CUDA_CHECK(cudaEventCreate(&t->pending[i].begin));
        CUDA_CHECK(cudaEventCreate(&t->pending[i].end));
    }
    t->sample_codes = (Bf16 *)malloc_or_die((size_t)t->run.config.vocab * sizeof(Bf16));
    t->sample_logits = (float *)malloc_or_die((size_t)t->run.config.vocab * sizeof(float));
}

static void replay_close(Replay *replays, int count) {
    for (int i = 0; i < count; i++) {
        if (replays[i].graph != NULL) { CUDA_CHECK(cudaGraphExecDestroy(replays[i].graph)); }
    }
}

// The GPU of this rank.
static void open_device(Trainer *t, const Options *options, const Ranks *ranks) {
    Error err;
    int visible = 0, device = options->device;
    cudaGetDeviceCount(&visible); // none: gpu_open says so
    if (ranks->ranks > 1 && visible > 0 && !ranks_device(ranks, visible, &device, &err)) {
        die("%s", err.text);
    }
    if (!gpu_open(&t->gpu, device, &err)) { die("%s", err.text); }
}

// The ranks' GPUs come together.
static void open_comm(Trainer *t) {
    Error err;
    t->comm = {};
    t->comm.ranks = 1;
    if (t->run.ranks == 1) { return; }
    run_beat(&t->run, DOING_WAIT, "opening NCCL");
    if (!comm_open(&t->comm, t->run.group, t->gpu.stream, params_slots(&t->run.layout), &err)) {
        die("%s", err.text);
    }
}

static void trainer_open(Trainer *t, const Options *options, const Ranks *ranks) {
    Error err;
    char device[320], size[32];
    if (options->plan) { print_plan(options); }
    open_device(t, options, ranks);
    NumberSupport support = support_find(&t->gpu, options, t->lacks_fp8);
    if (!trainer_plan(t, options, support, &err)) { die("%s", err.text); }
    run_announce(&t->run);
    check_memory(t, support);
    support_check_shapes(&t->run.config);
    snprintf(device, sizeof(device), "%s, compute capability %d.%d, %s", t->gpu.name,
             t->gpu.capability / 10, t->gpu.capability % 10,
             format_bytes(size, (double)t->gpu.memory));
    t->run.peak_flops = gpu_peak_flops(&t->gpu);
    t->run.memory_bytes = (double)t->plan.bytes;
    run_start(&t->run, device);
    printf("  memory      %s planned (--plan lists it)\n",
           format_bytes(size, (double)t->plan.bytes));
    allocate(t);
    open_comm(t);
    params_start(&t->params, &t->gpu, &t->comm);
    params_allocate_snapshot(&t->params);
}

static int trainer_close(Trainer *t) {
    params_join(&t->params);
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    replay_close(&t->micro[0][0], 2 * MICRO_PLACES);
    replay_close(&t->update[0], 2);
    run_beat(&t->run, DOING_WAIT, "closing NCCL"); // which waits for graphs that it is in
    comm_close(&t->comm);
    int status = run_close(&t->run);
    batches_close(&t->batches);
    for (int i = 0; i < RESULTS; i++) {
        CUDA_CHECK(cudaFreeHost(t->pending[i].input));
        CUDA_CHECK(cudaFreeHost(t->pending[i].state));
        CUDA_CHECK(cudaEventDestroy(t->pending[i].begin));
        CUDA_CHECK(cudaEventDestroy(t->pending[i].end));
    }
    params_close(&t->params);
    CUDA_CHECK(cudaFree(t->memory));
    gpu_close(&t->gpu);
    free(t->sample_codes);
    free(t->sample_logits);
    trainer_free_plan(t);
    return status;
}

// ---- blocks -----------------------------------------------------------------------------------

static Bf16 *weight_of(const Trainer *t, TensorId id, int layer) {
    return params_copy(&t->params, id, layer);
}

static GradientOut gradient_of(const Trainer *t, TensorId id, int layer, bool accumulate) {
    return params_gradient(&t->params, id, layer, accumulate);
}

static const GradientOut no_sums = {NULL, TYPE_F32, false};

// From a plain input of a linear layer to its FP8 forms, where there are some.
static void quantize_input(Trainer *t, LinearId id, Matrix x, int M) {
    linear_quantize(&t->params, id, OPERAND_X, x, no_sums, t->act.partial_sums, M);
}

// The normalised x, as the linear layer `id` reads it.
static Matrix norm_forward(Trainer *t, TensorId weight, LinearId id, const Norm *n, const Bf16 *x,
                           int M) {
    const ModelConfig *c = &t->run.config;
    const Bf16 *w = weight_of(t, weight, id.layer), *bias = NULL;
    if (c->arch == ARCH_GPT2) { bias = weight_of(t, (TensorId)(weight + 1), id.layer); }
    bool head = id.linear == LINEAR_HEAD; // quantised a chunk at a time
    bool fused = !head && linear_is_fused(&t->params, id);
    Matrix out = head ? n->out : activations_input(&t->act, &t->params, id, &n->out);
    gpu_family(&t->gpu, FAMILY_NORMS);
    NormForward f = {};
    f.out = out.plain;
    f.mean = n->mean;
    f.rstd = n->rstd;
    f.amax = linear_amax(&t->params, id, OPERAND_X);
    f.x = x;
    f.weight = w;
    f.bias = bias;
    f.eps = (float)c->norm_eps;
    f.M = M;
    f.C = c->channels;
    if (fused) {
        gpu_norm_forward_fp8(linear_out(&t->params, id, OPERAND_X, out), f, t->gpu.stream);
        return out;
    }
    gpu_norm_forward(f, t->gpu.stream);
    if (!head) { quantize_input(t, id, out, M); }
    return out;
}

// The bias of a block's linear layer that adds to the residual.
static TensorId residual_bias(Linear linear) {
    return linear == LINEAR_FC2 ? TENSOR_FC2_BIAS : TENSOR_ATTENTION_OUT_BIAS;
}

// An output gradient that lies in plain, as the products of its linear layer read it; its column
// sums, where wanted, are the bias gradient.
static Matrix quantize_gradient(Trainer *t, LinearId id, Bf16 *plain, GradientOut sums, int M) {
    bool residual = plain == t->act.d_residual;
    const Matrix *scratch = residual ? &t->act.residual_fp8 : &t->act.wide_fp8;
    Matrix dy = activations_gradient(&t->params, id, plain, scratch);
    linear_quantize(&t->params, id, OPERAND_DY, dy, sums, t->act.partial_sums, M);
    return dy;
}

// below: the linear layer whose output gradient the new d_residual is; returns it as that layer
// reads it. Layer -1: there is none.
static Matrix norm_backward(Trainer *t, TensorId weight, int layer, const Norm *norm, const Bf16 *x,
                            LinearId below, int M, bool accumulate) {
    const ModelConfig *c = &t->run.config;
    bool layernorm = c->arch == ARCH_GPT2, any = below.layer >= 0;
    NormBackward n = {};
    n.d_residual = t->act.d_residual;
    n.dweight = gradient_of(t, weight, layer, accumulate);
    if (layernorm) { n.dbias = gradient_of(t, (TensorId)(weight + 1), layer, accumulate); }
    if (any) {
        n.column_sums = gradient_of(t, residual_bias(below.linear), below.layer, accumulate);
        n.amax = linear_amax(&t->params, below, OPERAND_DY);
    }
    n.dout = t->act.d_norm;
    n.x = x;
    n.weight = weight_of(t, weight, layer);
    n.mean = layernorm ? norm->mean : NULL;
    n.rstd = norm->rstd;
    n.scratch = t->act.partial_sums;
    n.M = M;
    n.C = c->channels;
    gpu_family(&t->gpu, FAMILY_NORMS);
    if (any && linear_is_fused(&t->params, below)) {
        Matrix dy = activations_gradient(&t->params, below, t->act.d_residual,
                                         &t->act.residual_fp8);
        gpu_norm_backward_fp8(linear_out(&t->params, below, OPERAND_DY, dy), n, t->gpu.stream);
        return dy;
    }
    gpu_norm_backward(n, t->gpu.stream);
    return any ? quantize_gradient(t, below, t->act.d_residual, no_sums, M) : Matrix{};
}

static Matrix activation_forward(Trainer *t, LinearId id, int M) {
    const ModelConfig *c = &t->run.config;
    const Block *b = &t->act.blocks[id.layer];
    cudaStream_t stream = t->gpu.stream;
    Matrix out = activations_input(&t->act, &t->params, id, &b->activated);
    gpu_family(&t->gpu, FAMILY_ACTIVATIONS);
    if (linear_is_fused(&t->params, id)) {
        Fp8Out codes = linear_out(&t->params, id, OPERAND_X, out);
        if (c->arch == ARCH_LLAMA) {
            gpu_swiglu_forward_fp8(codes, b->fc1, M, c->ffn, stream);
        } else {
            gpu_gelu_forward_fp8(codes, b->fc1, M, c->ffn, stream);
        }
        return out;
    }
    float *amax = linear_amax(&t->params, id, OPERAND_X);
    if (c->arch == ARCH_LLAMA) {
        gpu_swiglu_forward(out.plain, amax, b->fc1, M, c->ffn, stream);
    } else {
        gpu_gelu_forward(out.plain, amax, b->fc1, (int64_t)M * c->ffn, stream);
    }
    quantize_input(t, id, out, M);
    return out;
}

static void forward(Trainer *t, LinearId id, Bf16 *y, Matrix x, TensorId bias, const Bf16 *addend,
                    int M) {
    LinearForward l = {};
    l.id = id;
    l.y = y;
    l.x = x;
    l.bias = bias != TENSOR_COUNT ? weight_of(t, bias, id.layer) : NULL;
    l.addend = addend;
    l.M = M;
    linear_forward(&t->params, l);
}

// From blocks[l].residual to `out`, the next block's residual.
static void block_forward(Trainer *t, int l, Bf16 *out, int B, int T, Pass pass) {
    const ModelConfig *c = &t->run.config;
    int M = B * T, H = c->num_heads, G = c->num_groups, D = c->head_size;
    const LinearId qkv = {LINEAR_QKV, l, pass}, attention_out = {LINEAR_ATTENTION_OUT, l, pass},
                   fc1 = {LINEAR_FC1, l, pass}, fc2 = {LINEAR_FC2, l, pass};
    Block *b = &t->act.blocks[l];
    Matrix x = norm_forward(t, TENSOR_NORM1_WEIGHT, qkv, &b->norm1, b->residual, M);
    forward(t, qkv, b->qkv, x, TENSOR_QKV_BIAS, NULL, M);
    gpu_family(&t->gpu, FAMILY_ACTIVATIONS);
    if (c->arch == ARCH_LLAMA) {
        gpu_rope_apply(b->qkv, t->act.rope, B, T, H, G, D, false, t->gpu.stream);
    }
    gpu_family(&t->gpu, FAMILY_ATTENTION);
    attention_forward_gpu(&t->gpu, attention_shape_of(&t->run, B, T), b->attention.plain, b->lse,
                          b->qkv);
    x = activations_input(&t->act, &t->params, attention_out, &b->attention);
    linear_measure(&t->params, attention_out, OPERAND_X, x.plain, (int64_t)M * H * D);
    quantize_input(t, attention_out, x, M);
    forward(t, attention_out, b->residual_mid, x, TENSOR_ATTENTION_OUT_BIAS, b->residual, M);
    x = norm_forward(t, TENSOR_NORM2_WEIGHT, fc1, &b->norm2, b->residual_mid, M);
    forward(t, fc1, b->fc1, x, TENSOR_FC1_BIAS, NULL, M);
    x = activation_forward(t, fc2, M);
    forward(t, fc2, out, x, TENSOR_FC2_BIAS, b->residual_mid, M);
}

// What was not kept of block l is computed again, by the same kernels: the same bits. The last
// block's is still there.
static void recompute_block(Trainer *t, int l, int B, int T) {
    Block *b = &t->act.blocks[l];
    int recompute = t->run.options.recompute, M = B * T;
    if (l + 1 == t->run.config.num_layers) { return; }
    if (recompute == RECOMPUTE_BLOCK) {
        block_forward(t, l, t->act.d_norm, B, T, PASS_AGAIN); // its output is there already
    } else if (recompute == RECOMPUTE_ACTIVATIONS) {
        const LinearId attention_out = {LINEAR_ATTENTION_OUT, l, PASS_AGAIN};
        norm_forward(t, TENSOR_NORM1_WEIGHT, {LINEAR_QKV, l, PASS_AGAIN}, &b->norm1, b->residual,
                     M);
        quantize_input(t, attention_out,
                       activations_input(&t->act, &t->params, attention_out, &b->attention), M);
        norm_forward(t, TENSOR_NORM2_WEIGHT, {LINEAR_FC1, l, PASS_AGAIN}, &b->norm2,
                     b->residual_mid, M);
        activation_forward(t, {LINEAR_FC2, l, PASS_AGAIN}, M);
    }
}

// Whether GELU's slope rides in the product that makes d_activated.
static bool gelu_in_product(const Trainer *t, int l) {
    return t->run.config.arch == ARCH_GPT2 &&
           !linear_is_fp8(&t->params, {LINEAR_FC1, l, PASS_TRAIN}) &&
           !linear_is_fp8(&t->params, {LINEAR_FC2, l, PASS_TRAIN});
}

// From d_activated, in act.wide, to d_fc1 as its linear layer reads it.
static Matrix activation_backward(Trainer *t, LinearId id, int M, bool accumulate) {
    const ModelConfig *c = &t->run.config;
    Activations *a = &t->act;
    Bf16 *input = a->blocks[id.layer].fc1;
    GradientOut sums = gradient_of(t, TENSOR_FC1_BIAS, id.layer, accumulate);
    cudaStream_t stream = t->gpu.stream;
    gpu_family(&t->gpu, FAMILY_ACTIVATIONS);
    if (linear_is_fused(&t->params, id)) {
        Matrix dy = activations_gradient(&t->params, id, NULL, &a->wide_fp8);
        Fp8Out out = linear_out(&t->params, id, OPERAND_DY, dy);
        if (c->arch == ARCH_LLAMA) {
            gpu_swiglu_backward_fp8(out, a->wide, input, M, c->ffn, stream);
        } else {
            gpu_gelu_backward_fp8(out, sums, a->wide, input, a->partial_sums, M, c->ffn, stream);
        }
        return dy;
    }
    float *amax = linear_amax(&t->params, id, OPERAND_DY);
    if (c->arch == ARCH_LLAMA) { // in place: nobody reads the input after this
        gpu_swiglu_backward(input, amax, a->wide, input, M, c->ffn, stream);
        return quantize_gradient(t, id, input, sums, M);
    }
    if (gelu_in_product(t, id.layer)) { return quantize_gradient(t, id, a->wide, sums, M); }
    gpu_gelu_backward({a->wide, amax, sums, a->wide, input, a->partial_sums, M, c->ffn}, stream);
    return quantize_gradient(t, id, a->wide, no_sums, M);
}

// From d_qkv of the rotated queries and keys, in act.wide, to d_qkv as its linear layer reads it.
static Matrix rope_backward(Trainer *t, LinearId id, int B, int T, bool accumulate) {
    const ModelConfig *c = &t->run.config;
    Activations *a = &t->act;
    int M = B * T, H = c->num_heads, G = c->num_groups, D = c->head_size;
    GradientOut sums = gradient_of(t, TENSOR_QKV_BIAS, id.layer, accumulate);
    gpu_family(&t->gpu, FAMILY_ACTIVATIONS);
    if (c->arch == ARCH_LLAMA && linear_is_fused(&t->params, id)) {
        Matrix dy = activations_gradient(&t->params, id, NULL, &a->wide_fp8);
        gpu_rope_backward_fp8(linear_out(&t->params, id, OPERAND_DY, dy), a->wide, a->rope, B, T, H,
                              G, D, t->gpu.stream);
        return dy;
    }
    if (c->arch == ARCH_LLAMA) {
        gpu_rope_apply(a->wide, a->rope, B, T, H, G, D, true, t->gpu.stream);
    }
    linear_measure(&t->params, id, OPERAND_DY, a->wide, (int64_t)M * qkv_rows(c));
    return quantize_gradient(t, id, a->wide, sums, M);
}

static void backward(Trainer *t, LinearId id, Bf16 *dx, Matrix dy, Matrix x, int M,
                     bool accumulate) {
    LinearBackward l = {};
    l.id = id;
    l.dx = dx;
    l.dy = dy;
    l.x = x;
    if (id.linear == LINEAR_FC2 && gelu_in_product(t, id.layer)) {
        l.gelu_input = t->act.blocks[id.layer].fc1;
    }
    l.M = M;
    l.accumulate = accumulate;
    linear_backward(&t->params, l);
}

// dy: the gradient of the block's output, d_residual. Returns that of its input, as the block below
// reads it.
static Matrix block_backward(Trainer *t, int l, Matrix dy, int B, int T, bool accumulate) {
    const LinearId qkv = {LINEAR_QKV, l, PASS_TRAIN}, fc1 = {LINEAR_FC1, l, PASS_TRAIN},
                   attention_out = {LINEAR_ATTENTION_OUT, l, PASS_TRAIN},
                   fc2 = {LINEAR_FC2, l, PASS_TRAIN}, below = {LINEAR_FC2, l - 1, PASS_TRAIN};
    Activations *a = &t->act;
    Block *b = &a->blocks[l];
    int M = B * T;
    recompute_block(t, l, B, T);
    backward(t, fc2, a->wide, dy, b->activated, M, accumulate);
    dy = activation_backward(t, fc1, M, accumulate);
    backward(t, fc1, a->d_norm, dy, b->norm2.out, M, accumulate);
    dy = norm_backward(t, TENSOR_NORM2_WEIGHT, l, &b->norm2, b->residual_mid, attention_out, M,
                       accumulate);
    backward(t, attention_out, a->d_norm, dy, b->attention, M, accumulate);
    gpu_family(&t->gpu, FAMILY_ATTENTION);
    attention_backward_gpu(&t->gpu, attention_shape_of(&t->run, B, T), a->wide, a->d_norm,
                           b->attention.plain, b->lse, b->qkv);
    dy = rope_backward(t, qkv, B, T, accumulate);
    backward(t, qkv, a->d_norm, dy, b->norm1.out, M, accumulate);
    return norm_backward(t, TENSOR_NORM1_WEIGHT, l, &b->norm1, b->residual, below, M, accumulate);
}

// ---- forward, loss, backward --------------------------------------------------------------------

// From the batch's inputs [B,T] to norm_out. place: 0 where the weights are there.
static void model_forward(Trainer *t, int B, int T, Pass pass, int place) {
    const ModelConfig *c = &t->run.config;
    Activations *a = &t->act;
    bool receives = place & MICRO_FIRST;
    if (t->params.measuring) { params_clear_measured(&t->params); }
    if (receives) { params_receive(&t->params, 0); }
    gpu_family(&t->gpu, FAMILY_EMBEDDINGS);
    gpu_embedding_forward(
        a->blocks[0].residual, t->batches.device.inputs, weight_of(t, TENSOR_TOKEN_EMBEDDING, 0),
        weight_of(t, TENSOR_POSITION_EMBEDDING, 0), B, T, c->channels, t->gpu.stream);
    for (int l = 0; l < c->num_layers; l++) {
        Bf16 *out = l + 1 < c->num_layers ? a->blocks[l + 1].residual : a->residual_out;
        if (receives) { params_receive(&t->params, l + 1); }
        block_forward(t, l, out, B, T, pass);
    }
    if (receives) { params_receive(&t->params, c->num_layers + 1); }
    const LinearId head = {LINEAR_HEAD, 0, pass};
    norm_forward(t, TENSOR_FINAL_NORM_WEIGHT, head, &a->norm_out, a->residual_out, B * T);
}

// The rows of norm_out from `row` on, as the LM head reads them, to their logits.
static Matrix head_forward(Trainer *t, int row, int rows, Pass pass) {
    const LinearId head = {LINEAR_HEAD, 0, pass};
    Activations *a = &t->act;
    Matrix x = a->head_x;
    x.plain = a->norm_out.out.plain + (size_t)row * t->run.config.channels;
    if (pass != PASS_TRAIN) { x.columns = NULL; }
    linear_quantize(&t->params, head, OPERAND_X, x, no_sums, a->partial_sums, rows);
    forward(t, head, a->logits, x, TENSOR_COUNT, NULL, rows);
    return x;
}

// The losses of the rows whose logits lie there, and with gradient_scale > 0 the logits' gradient,
// as the head's products read it.
static Matrix loss_gradient(Trainer *t, int row, int rows, float gradient_scale) {
    const ModelConfig *c = &t->run.config;
    const LinearId head = {LINEAR_HEAD, 0, PASS_TRAIN};
    Activations *a = &t->act;
    Matrix dy = activations_gradient(&t->params, head, a->logits, &a->head_dy);
    float *losses = a->losses + row;
    const int *targets = t->batches.device.targets + row;
    gpu_family(&t->gpu, FAMILY_LOSS);
    if (dy.columns == NULL ||
        !(gradient_scale > 0)) { // a product reads the plain gradient, or none
        gpu_cross_entropy(losses, a->logits, targets, rows, c->vocab, c->padded_vocab,
                          gradient_scale, t->gpu.stream);
        if (gradient_scale > 0) {
            linear_quantize(&t->params, head, OPERAND_DY, dy, no_sums, a->partial_sums, rows);
        }
        return dy;
    }
    const LossRows chunk = {a->logits, a->head_lse, targets};
    gpu_cross_entropy_forward(losses, a->head_lse, a->logits, targets, rows, c->vocab,
                              c->padded_vocab, t->gpu.stream);
    gpu_cross_entropy_backward_fp8(linear_out(&t->params, head, OPERAND_DY, dy), &chunk,
                                   gradient_scale, rows, c->vocab, c->padded_vocab, t->gpu.stream);
    return dy;
}

// The LM head and the loss, some rows at a time, so that the logits never exist whole. The sum of
// the losses goes (or is added) to state->loss. With gradient_scale > 0 also goes backward, into
// d_norm and the head's weights.
static void head_loss(Trainer *t, int M, float gradient_scale, bool accumulate, Pass pass) {
    const ModelConfig *c = &t->run.config;
    const LinearId head = {LINEAR_HEAD, 0, pass};
    Activations *a = &t->act;
    for (int row = 0; row < M; row += a->chunk_rows) {
        int rows = (int)min64(a->chunk_rows, M - row);
        Matrix x = head_forward(t, row, rows, pass);
        Matrix dy = loss_gradient(t, row, rows, gradient_scale);
        if (gradient_scale > 0) {
            backward(t, head, a->d_norm + (size_t)row * c->channels, dy, x, rows,
                     accumulate || row > 0);
        }
    }
    gpu_family(&t->gpu, FAMILY_LOSS);
    gpu_sum_losses(&t->params.state->loss, a->losses, M, accumulate, t->gpu.stream);
}

// From d_norm, the gradient of norm_out, down to the embeddings.
static void model_backward(Trainer *t, int B, int T, int place) {
    const ModelConfig *c = &t->run.config;
    Activations *a = &t->act;
    bool accumulate = !(place & MICRO_FIRST), last = place & MICRO_LAST;
    cudaStream_t stream = t->gpu.stream;
    gpu_family(&t->gpu, FAMILY_NORMS);
    size_t residual_bytes = (size_t)B * T * c->channels * sizeof(Bf16);
    CUDA_CHECK(cudaMemsetAsync(a->d_residual, 0, residual_bytes, stream));
    Matrix dy = norm_backward(t, TENSOR_FINAL_NORM_WEIGHT, 0, &a->norm_out, a->residual_out,
                              {LINEAR_FC2, c->num_layers - 1, PASS_TRAIN}, B * T, accumulate);
    if (last) { params_reduce(&t->params, c->num_layers + 1); }
    for (int l = c->num_layers - 1; l >= 0; l--) {
        dy = block_backward(t, l, dy, B, T, accumulate);
        if (last) { params_reduce(&t->params, l + 1); }
    }
    gpu_family(&t->gpu, FAMILY_EMBEDDINGS);
    GradientOut dwte = gradient_of(t, TENSOR_TOKEN_EMBEDDING, 0, true);
    if (!accumulate && !c->tied_head) { // with a tied head, the head's product has written it
        size_t bytes = (size_t)c->padded_vocab * c->channels * gpu_type_bytes(dwte.type);
        CUDA_CHECK(cudaMemsetAsync(dwte.data, 0, bytes, stream));
    }
    gpu_embedding_backward(dwte, a->d_residual, t->batches.device.inputs, t->batches.device.rows,
                           t->batches.device.starts, t->batches.device.runs, B * T, c->channels,
                           stream);
    if (c->arch == ARCH_GPT2) {
        GradientOut dwpe = gradient_of(t, TENSOR_POSITION_EMBEDDING, 0, accumulate);
        gpu_position_backward(dwpe, a->d_residual, B, T, c->channels, stream);
    }
    if (last) {
        params_reduce(&t->params, 0);
        params_join(&t->params);
    }
}

// ---- update -----------------------------------------------------------------------------------

static void micro_step(Trainer *t, int place) {
    const Options *o = &t->run.options;
    int B = o->micro_batch_size, T = o->seq_length;
    float gradient_scale = (float)(1.0 / ((double)o->global_batch_size * T));
    model_forward(t, B, T, PASS_TRAIN, place);
    head_loss(t, B * T, gradient_scale, !(place & MICRO_FIRST), PASS_TRAIN);
    model_backward(t, B, T, place);
}

static int micro_place(const Trainer *t, int micro) {
    bool last = t->run.ranks > 1 && micro + 1 == run_micro_batches(&t->run);
    return (micro == 0 ? MICRO_FIRST : 0) | (last ? MICRO_LAST : 0);
}

static void model_update(Trainer *t, int) {
    params_update(&t->params, t->input);
}

static void replay(Trainer *t, Replay *r, void (*work)(Trainer *t, int place), int place) {
    if (!t->run.options.cuda_graphs || !r->warm || t->params.counting) {
        work(t, place);
        r->warm = true;
        return;
    }
    if (r->graph == NULL) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(t->gpu.stream, cudaStreamCaptureModeThreadLocal));
        work(t, place);
        CUDA_CHECK(cudaStreamEndCapture(t->gpu.stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&r->graph, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch(r->graph, t->gpu.stream));
}

static void dump_gradients(Trainer *t) {
    const Run *run = &t->run;
    Params *p = &t->params;
    if (run->options.dump_gradients[0] == '\0') { return; }
    float *gradients = (float *)calloc_or_die((size_t)run->layout.size, sizeof(float));
    double loss;
    params_sum(p, &p->state->loss, 1);
    gpu_fetch(&t->gpu, &loss, &p->state->loss, sizeof(loss));
    params_fetch_gradients(p, gradients);
    double tokens = (double)run->options.global_batch_size * run->options.seq_length;
    run_maybe_dump(run, gradients, loss / tokens);
}

// Waits for the step that is on its way, and reports it.
static void finish_step(Trainer *t) {
    if (!t->waiting) { return; }
    int64_t last = t->enqueued - 1;
    Pending *p = &t->pending[last % RESULTS];
    cudaEvent_t from = p->follows ? t->pending[(last - 1) % RESULTS].end : p->begin;
    float ms;
    CUDA_CHECK(cudaEventSynchronize(p->end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, from, p->end));
    StepResult result = {};
    result.loss = p->state->loss;
    result.norm = sqrt(p->state->norm_squared);
    result.lr = p->input->lr;
    result.seconds = 1e-3 * ms;
    result.skipped = p->state->skipped != 0;
    result.stop = p->state->stop > 0;
    result.own_loss = p->state->own_loss * t->run.ranks /
                      ((double)t->run.options.global_batch_size * t->run.options.seq_length);
    t->waiting = false;
    params_note_step(&t->params, p->state);
    run_report(&t->run, result);
}

// Once the step that counted is on its way.
static void report_counts(Trainer *t) {
    size_t n = (size_t)fp8_slot_count(&t->run.config);
    Fp8Counts *counts = (Fp8Counts *)malloc_or_die(n * sizeof(Fp8Counts));
    params_end_counting(&t->params, counts);
    finish_step(t);
    run_report_fp8(&t->run, counts);
    free(counts);
}

static void train_step(Trainer *t) {
    Run *run = &t->run;
    const Options *o = &run->options;
    int64_t ahead = t->waiting ? 1 : 0, step = run->progress.step + ahead;
    if (run_counts_fp8(run, step + 1)) { params_begin_counting(&t->params); }
    int measuring = t->params.measuring;
    cudaStream_t stream = t->gpu.stream;
    Pending *p = &t->pending[t->enqueued % RESULTS];
    *p->input = {learning_rate(o, step), step, (step + 1) % o->fp8_interval == 0,
                 run_stop_signal() != 0 ? 1.0 : 0.0};
    p->follows = t->waiting;
    CUDA_CHECK(cudaEventRecord(p->begin, stream));
    for (int micro = 0; micro < run_micro_batches(run); micro++) {
        Batch *s = batches_next(&t->batches);
        run_batch(run, ahead, micro, s->inputs, s->targets);
        batches_send(&t->batches);
        int place = micro_place(t, micro);
        replay(t, &t->micro[place][measuring], micro_step, place);
    }
    dump_gradients(t);
    CUDA_CHECK(
        cudaMemcpyAsync(t->input, p->input, sizeof(StepInput), cudaMemcpyHostToDevice, stream));
    if (run->ranks > 1) { // its collectives are waited for in graphs, so it is in none
        model_update(t, 0);
    } else {
        replay(t, &t->update[measuring], model_update, 0);
    }
    gpu_fetch(&t->gpu, p->state, t->params.state, sizeof(StepState));
    CUDA_CHECK(cudaEventRecord(p->end, stream));
    finish_step(t); // the one before, while this one runs
    t->enqueued++;
    t->waiting = true;
    if (t->params.counting) { report_counts(t); }
    bool decides = t->params.delayed && measuring; // whether the next step still measures
    if (decides || run_needs_result(run, step + 1)) { finish_step(t); }
}

// ---- evaluation, samples, checkpoints ---------------------------------------------------------

// The losses [B,T] of given rows, for multiple-choice sets. B x T is at most a micro-batch's
// tokens.
static void choice_losses(void *trainer, const int *inputs, const int *targets, int B, int T,
                          float *losses) {
    Trainer *t = (Trainer *)trainer;
    size_t tokens = (size_t)B * (size_t)T;
    Pass pass = eval_pass(&t->run.options);
    Batch *s = batches_next(&t->batches);
    memcpy(s->inputs, inputs, tokens * sizeof(int));
    memcpy(s->targets, targets, tokens * sizeof(int));
    batches_send(&t->batches);
    model_forward(t, B, T, pass, 0);
    head_loss(t, B * T, 0.0f, false, pass);
    gpu_fetch(&t->gpu, losses, t->act.losses, tokens * sizeof(float));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
}

static void validate(Trainer *t) {
    Run *run = &t->run;
    int B = run->options.micro_batch_size, T = run->options.seq_length;
    Pass pass = eval_pass(&run->options);
    int64_t samples = run_eval_samples(run);
    double begin = wall_seconds(), sum = 0, *loss = &t->params.state->loss;
    CUDA_CHECK(cudaMemsetAsync(loss, 0, sizeof(sum), t->gpu.stream)); // a rank may have no sample
    for (int64_t sample = run_eval_first(run); sample < samples; sample += run_eval_stride(run)) {
        Batch *s = batches_next(&t->batches);
        run_eval_batch(run, sample, s->inputs, s->targets);
        batches_send(&t->batches);
        model_forward(t, B, T, pass, 0);
        head_loss(t, B * T, 0.0f, true, pass);
    }
    params_sum(&t->params, loss, 1);
    gpu_fetch(&t->gpu, &sum, loss, sizeof(sum));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    run_report_eval(run, sum / (double)(samples * T), wall_seconds() - begin);
}

static void sum_counts(void *trainer, int64_t *counts, int n) {
    params_sum_counts(&((Trainer *)trainer)->params, counts, n);
}

static void evaluate(Trainer *t) {
    ChoiceModel model = {t, choice_losses, t->run.ranks > 1 ? sum_counts : NULL};
    params_join(&t->params);
    if (t->run.has_valid) { validate(t); }
    run_score_choices(&t->run, model);
}

static void maybe_evaluate(Trainer *t) {
    if (!t->waiting && run_should_eval(&t->run)) { evaluate(t); }
}

// The logits after tokens[0..n). The sequence is padded to a power of two, so that few attention
// plans serve all lengths; what follows a position does not change it. FP8 takes 16 rows at a time.
static const float *next_logits(void *trainer, const int *tokens, int n) {
    Trainer *t = (Trainer *)trainer;
    const ModelConfig *c = &t->run.config;
    Pass pass = eval_pass(&t->run.options);
    int T = 64, row = (n - 1) / 16 * 16;
    while (T < n) { T *= 2; }
    T = (int)min64(T, c->seq_length);
    Batch *s = batches_next(&t->batches);
    memset(s->inputs, 0, (size_t)T * sizeof(int));
    memcpy(s->inputs, tokens, (size_t)n * sizeof(int));
    batches_send(&t->batches);
    model_forward(t, 1, T, pass, 0);
    head_forward(t, row, (int)min64(16, T - row), pass);
    gpu_fetch(&t->gpu, t->sample_codes, t->act.logits + (int64_t)(n - 1 - row) * c->padded_vocab,
              (size_t)c->vocab * sizeof(Bf16));
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    for (int v = 0; v < c->vocab; v++) { t->sample_logits[v] = bf16_decode(t->sample_codes[v]); }
    return t->sample_logits;
}

static void maybe_sample(Trainer *t) {
    if (t->waiting || !run_should_sample(&t->run)) { return; }
    params_join(&t->params);
    run_sample(&t->run, next_logits, t);
}

// Copies the state, which is the only pause; the writing goes on in a thread.
static void maybe_save(Trainer *t) {
    Run *run = &t->run;
    if (t->waiting || !run_should_save(run)) { return; }
    saver_wait(&run->saver);
    Snapshot s = {};
    params_snapshot(&t->params, t->act.d_norm, micro_batch_tokens(t) * run->config.channels, &s);
    run_save(run, &s);
}

// The initial weights, or those of the checkpoint that --resume names.
static void trainer_restore(Trainer *t) {
    Checkpoint c;
    bool resumed = run_restore(&t->run, &c);
    params_restore(&t->params, resumed, &c);
    if (resumed) { checkpoint_close(&c); }
}

// ---- the loop ---------------------------------------------------------------------------------

// Times cuBLASLt's algorithms in micro-steps whose results are thrown away.
static void tune_products(Trainer *t) {
    if (!t->run.options.gemm_autotune) { return; }
    tune_begin(&t->gpu, &t->run);
    if (t->run.rank == 0) {
        Batch *s = batches_next(&t->batches);
        run_batch(&t->run, 0, 0, s->inputs, s->targets);
        batches_send(&t->batches);
        double begin = wall_seconds();
        micro_step(t, MICRO_FIRST);
        if (run_micro_batches(&t->run) > 1) { micro_step(t, 0); }
        CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
        params_forget_ranges(&t->params);
        printf("  products    tuned in %.1f s\n", wall_seconds() - begin);
    }
    tune_end(&t->gpu, &t->run);
}

// One more step, launch by launch, by kernel family. Its learning rate is 0.
static void profile_step(Trainer *t) {
    Run *run = &t->run;
    double ms[FAMILY_COUNT], all = 0;
    if (!run->options.profile) { return; }
    gpu_profile_begin(&t->gpu);
    for (int micro = 0; micro < run_micro_batches(run); micro++) {
        micro_step(t, micro_place(t, micro));
    }
    StepInput input = {0.0, run->progress.step, 1, 0.0};
    gpu_send(&t->gpu, t->input, &input, sizeof(input));
    model_update(t, 0);
    gpu_profile_end(&t->gpu, ms);
    for (int i = 0; i < FAMILY_COUNT; i++) { all += ms[i]; }
    MetricsRecord *r = metrics_begin("profile");
    printf("profile of a step, launch by launch: %.2f ms\n", all);
    for (int i = 0; i < FAMILY_COUNT; i++) {
        const char *name = gpu_family_name((GpuFamily)i);
        if (ms[i] > 0) { printf("  %-14s %8.2f ms %5.1f%%\n", name, ms[i], 100 * ms[i] / all); }
        metrics_number(r, name, ms[i]);
    }
    metrics_end(&run->metrics, r);
}

int main(int argc, char **argv) {
    static Options options;
    static Group group;
    static Trainer t;
    Ranks ranks;
    options_parse(&options, argc, argv);
    if (options.verify) { return verify(&options); }
    launch(&ranks, &group, &options);
    trainer_open(&t, &options, &ranks);
    trainer_restore(&t);
    if (!options_train(&options)) {
        if (options.eval_only) { evaluate(&t); }
        if (options.sample_only) { run_sample(&t.run, next_logits, &t); }
        return trainer_close(&t);
    }
    tune_products(&t);
    while (run_goes_on(&t.run)) {
        train_step(&t);
        maybe_evaluate(&t);
        maybe_sample(&t);
        maybe_save(&t);
    }
    finish_step(&t);
    maybe_save(&t);
    profile_step(&t);
    return trainer_close(&t);
}
