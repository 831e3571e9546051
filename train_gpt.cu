// The GPU trainer: GPT-2 and Llama in BF16 or FP8 with FP32 master weights, with one process (rank)
// for each GPU. The file has the functions of train_gpt.c in the same order. The functions enqueue
// work on a CUDA stream: the host enqueues a whole step, and reads the step's loss and norm while
// the next step runs, so that the device never waits for the host. Collectives run on a second
// stream beside the first (train/gpu/comm.h).
//
// Shapes: B sequences of T tokens, M = B * T, C channels, L blocks, H heads, G key/value heads, D
// head size, N = (H + 2G) * D, F feed-forward, V vocabulary, P padded vocabulary. Activations and
// their gradients are BF16, statistics FP32. Every linear layer knows the formats of its operands
// (train/gpu/linear.h); the kernel that computes an operand writes these formats
// (kernels/kernels.h).
#include "base/host.h"
#include "kernels/gemm.h"
#include "ranks/launch.h"
#include "train/gpu/batches.h"
#include "train/gpu/check.h"
#include "train/gpu/support.h"
#include "train/metrics.h"
#include "train/run.h"
#include "train/run_data.h"
#include "train/start.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// A step's input from the host, and its results, which are copied back to the host.
typedef struct {
    StepInput input;
    StepState state;
    cudaEvent_t begin, end;
    // the event at which the step's time begins: the step's own begin, or the previous step's end
    cudaEvent_t from;
    StateHashes hashes;
} Pending;

// How a micro-step is launched: the first time kernel by kernel, which also makes the plans of
// cuBLASLt and cuDNN; later as a CUDA graph, which is captured once and replayed.
typedef struct {
    cudaGraphExec_t graph;
    bool warm; // the micro-step has been launched kernel by kernel
} Replay;

// Flags of a micro-batch: whether it is the first, and whether it is the last one of its step. The
// first micro-batch waits for each bucket's new weights before it reads them. The last one adds up
// each bucket's gradients over the ranks as soon as these gradients are complete.
enum { MICRO_FIRST = 1, MICRO_LAST = 2, MICRO_KINDS = 4 };

// The number of steps whose events are in use: the step in flight, and the two steps before it.
enum { RESULTS = 3 };

typedef struct {
    Run run;
    Gpu gpu;
    Comm comm;
    Plan plan, host_plan;
    void *memory, *host_memory;
    Params params;
    Network net;
    Check check;

    Batches batches;
    float *sample_logits; // [V] on the host: the logits of a sample's next token

    Replay micro[MICRO_KINDS];
    Pending *pending; // [RESULTS], pinned
    // Both count steps from 0. first: the first step of this process; enqueued: the step to enqueue
    // next. The steps from progress.step to enqueued - 1 are in flight.
    int64_t first, enqueued;
} Trainer;

// ---- memory -----------------------------------------------------------------------------------

// Returns the shape of attention over B sequences of T tokens of the batch on the device.
static AttentionShape attention_shape(const Trainer *t, int B, int T) {
    AttentionShape s = attention_shape_of(&t->run, B, T);
    if (t->run.options.reset_attention_mask) { s.documents = t->batches.device.documents; }
    return s;
}

static void plan_buffers(Trainer *t, int64_t offload) {
    params_plan(&t->params, &t->run, &t->plan, &t->host_plan, offload);
    network_plan(&t->net, &t->params, &t->gpu, &t->plan);
    check_plan(&t->check, &t->net, &t->plan);
    batches_plan(&t->batches, &t->run, &t->plan);
}

static void trainer_free_plan(Trainer *t) {
    params_free_plan(&t->params);
    check_close(&t->check);
    free(t->net.blocks);
    plan_free(&t->plan);
    plan_free(&t->host_plan);
}

// Estimate of the device memory that the CUDA context, the libraries and the graphs take besides
// the plan.
#define FIT_OVERHEAD_BYTES ((int64_t)1200 << 20)

// Makes the whole plan of a run from its options and the device's number formats. memory: the bytes
// that the run may take of the device. With --optimizer-cpu-offload, only the state that does not
// fit there is planned in host memory. Returns false, with error_text(), if no plan is possible.
static bool trainer_plan(Trainer *t, NumberSupport support, int64_t memory) {
    run_configure(&t->run, support);
    int tokens = options_batch(&t->run.options) * t->run.config.seq_length;
    if (!support_shapes(&t->run.config, tokens)) { return false; }
    plan_buffers(t, 0);
    int64_t excess = t->plan.bytes + FIT_OVERHEAD_BYTES - memory;
    if (t->run.options.optimizer_cpu_offload && excess > 0) {
        trainer_free_plan(t);
        plan_buffers(t, excess + STATE_ARRAYS * PLAN_ALIGN); // each array's size is rounded up
    }
    return true;
}

// The ranks of a run, and the device to plan it for. host: planned_bytes sets it to the bytes of
// host memory for all ranks of this machine.
typedef struct {
    const Group *group;
    NumberSupport support;
    int64_t memory;
    double host;
} PlannedRun;

// Returns the bytes of device memory that a run with these options takes, or INT64_MAX if no plan
// is possible.
static int64_t planned_bytes(void *context, const Options *options) {
    PlannedRun *p = (PlannedRun *)context;
    FREED Trainer *t = (Trainer *)calloc_or_die(1, sizeof(Trainer));
    t->run.options = *options;
    t->run.group = *p->group;
    bool possible = trainer_plan(t, p->support, p->memory);
    int64_t bytes = possible ? t->plan.bytes + FIT_OVERHEAD_BYTES : INT64_MAX;
    p->host = possible ? params_host_bytes(&t->params, &t->host_plan) : 0;
    run_free_configuration(&t->run);
    trainer_free_plan(t);
    return bytes;
}

// Dies if the plan does not fit in `memory` bytes. Call it before anything is allocated or read.
static void check_memory(const Trainer *t, NumberSupport support, int64_t memory) {
    char need[32], have[32], words[80];
    int64_t bytes = t->plan.bytes + FIT_OVERHEAD_BYTES / 2;
    if (bytes > memory) {
        Options fit;
        PlannedRun p = {&t->run.group, support, memory};
        const bool some = run_find_fit(&t->run, (double)memory, planned_bytes, &p, &fit);
        die("the run needs %s of device memory, %s are free: --plan lists what fits%s%s",
            format_bytes(need, (double)bytes), format_bytes(have, (double)memory),
            some ? ", such as " : "", run_say_fit(&t->run, &fit, words));
    }
}

// Dies if this machine lacks the host memory that all its ranks need together. No rank allocates
// memory before all ranks have checked.
static void check_host_memory(const Trainer *t) {
    char need[32], have[32];
    double bytes = params_host_bytes(&t->params, &t->host_plan), available = host_memory(NULL);
    bool least = t->run.options.adam_dtype == STATE_8BIT, saves = options_save(&t->run.options);
    bool fits = bytes <= available ||
                fail("the run needs %s of host memory%s, %s are available: try %s (--plan lists "
                     "it)",
                     format_bytes(need, bytes),
                     saves ? " with the copy that --save writes from" : "",
                     format_bytes(have, available),
                     least ? "a machine with more memory" : "--adam-dtype 8bit");
    or_die(group_agree(&t->run.group, CHANNEL_MAIN, fits));
}

// With LLM8_GUARD=1 (model/plan.h) the plan calls these two functions to fill and read its guard
// zones.
static void guard_fill(void *gpu, void *to, int byte, int64_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(to, byte, (size_t)bytes, ((const Gpu *)gpu)->stream));
}

static void guard_fetch(void *gpu, void *to, const void *from, int64_t bytes) {
    gpu_read((const Gpu *)gpu, to, from, (size_t)bytes);
}

static void guard_check(Trainer *t) {
    or_die(plan_guard_check(&t->plan));
    or_die(plan_guard_check(&t->host_plan));
}

static void allocate(Trainer *t) {
    CUDA_CHECK(cudaMalloc(&t->memory, (size_t)t->plan.bytes));
    CUDA_CHECK(cudaMemsetAsync(t->memory, 0, (size_t)t->plan.bytes, t->gpu.stream));
    t->plan.memory = {&t->gpu, guard_fill, guard_fetch};
    plan_assign(&t->plan, t->memory);
    t->host_memory = gpu_host_memory(t->host_plan.bytes, params_offloaded(&t->params));
    plan_assign(&t->host_plan, t->host_memory);
    batches_start(&t->batches, &t->gpu);
    CUDA_CHECK(cudaMallocHost((void **)&t->pending, RESULTS * sizeof(Pending)));
    for (int i = 0; i < RESULTS; i++) {
        CUDA_CHECK(cudaEventCreate(&t->pending[i].begin));
        CUDA_CHECK(cudaEventCreate(&t->pending[i].end));
    }
    t->sample_logits = (float *)malloc_or_die((size_t)t->run.config.vocab * sizeof(float));
}

// Plans the memory, starts the run (run_start), and allocates the memory. Before the call, all of
// *t must be zero, except run.options and run.group.
static void trainer_open(Trainer *t) {
    const Options *options = &t->run.options;
    char device[320], size[32];
    int visible = 0, number = 0;  // the GPUs that this process sees, and the one of this rank
    cudaGetDeviceCount(&visible); // if there is no GPU, gpu_open reports it
    if (visible > 0) { or_die(ranks_device(&t->run.group, visible, &number)); }
    or_die(gpu_open(&t->gpu, number));
    NumberSupport support = support_find(&t->gpu, options, &t->run.group);
    size_t free_bytes, all_bytes;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    const double most = options->device_memory_gib * 0x1p30; // 0: all that is free
    int64_t memory = (int64_t)(most > 0 ? fmin(most, (double)free_bytes) : (double)free_bytes);
    or_die(trainer_plan(t, support, memory));
    run_announce(&t->run);
    options_note_idle(options, true);
    check_memory(t, support, memory);
    check_host_memory(t);
    snprintf(device, sizeof(device), "%s, compute capability %d.%d, %s", t->gpu.name,
             t->gpu.capability / 10, t->gpu.capability % 10,
             format_bytes(size, (double)t->gpu.memory));
    t->run.peak_flops = gpu_peak_flops(&t->gpu);
    t->run.memory_bytes = (double)t->plan.bytes;
    run_start(&t->run, device);
    if (t->run.group.ranks == 1 && visible > 1 && options_train(options)) {
        printf("  GPUs        1 of the %d here (--gpus %d takes all)\n", visible, visible);
    }
    printf("  memory      %s planned (--plan lists it)\n",
           format_bytes(size, (double)t->plan.bytes));
    if (options->optimizer_cpu_offload) {
        printf("  host memory %s, %s\n", format_bytes(size, (double)t->host_plan.bytes),
               params_offloaded(&t->params)
                   ? "with state of the optimizer"
                   : "without state of the optimizer, which fits on the GPU");
    }
    allocate(t);
    attention_start(&t->gpu, attention_shape(t, options_batch(options), t->run.config.seq_length));
    run_beat(&t->run, ACTIVITY_WAIT, "opening NCCL");
    or_die(comm_open(&t->comm, &t->run.group, &t->gpu, SLOT_WEIGHTS + t->run.layout.num_buckets));
    params_start(&t->params, &t->gpu, &t->comm);
}

static int trainer_close(Trainer *t) {
    size_t free_bytes, all_bytes;
    comm_join(&t->comm);
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    // a run frees nothing before its end, so this is the largest use of memory
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    t->run.used_bytes = (double)(all_bytes - free_bytes);
    // closing NCCL would wait for graphs with collectives, so the graphs are destroyed first
    for (int i = 0; i < MICRO_KINDS; i++) {
        cudaGraphExec_t graph = t->micro[i].graph;
        if (graph != NULL) { CUDA_CHECK(cudaGraphExecDestroy(graph)); }
    }
    run_beat(&t->run, ACTIVITY_WAIT, "closing NCCL");
    comm_close(&t->comm);
    int status = run_close(&t->run);
    batches_close(&t->batches);
    for (int i = 0; i < RESULTS; i++) {
        CUDA_CHECK(cudaEventDestroy(t->pending[i].begin));
        CUDA_CHECK(cudaEventDestroy(t->pending[i].end));
    }
    CUDA_CHECK(cudaFreeHost(t->pending));
    gpu_host_free(t->host_memory);
    CUDA_CHECK(cudaFree(t->memory));
    gemm_close(&t->gpu);
    attention_close(&t->gpu);
    gpu_close(&t->gpu);
    free(t->sample_logits);
    trainer_free_plan(t);
    return status;
}

// ---- blocks -----------------------------------------------------------------------------------

static void norm_forward(Trainer *t, const NormLayer *norm, Operand out, int M) {
    NormForward n = norm->forward;
    n.M = M;
    gpu_norm_forward(&t->gpu, out, n);
}

// Adds the gradient of the norm's input to d_residual. After that, d_residual is the gradient of
// the output of the linear layer below the norm.
static void norm_backward(Trainer *t, const NormLayer *norm, int M, bool accumulate) {
    NormBackward n = norm->backward;
    n.dweight.accumulate = n.dbias.accumulate = n.column_sums.accumulate = accumulate;
    n.M = M;
    gpu_norm_backward(&t->gpu, norm->d_residual, n);
}

static Rotary rotary_of(const Block *b, int B, int T) {
    Rotary r = b->rope.rotary;
    r.B = B;
    r.T = T;
    return r;
}

// Computes from x the queries, keys and values that attention reads.
static void qkv_forward(Trainer *t, const Block *b, Operand x, int B, int T, Pass pass) {
    const Rotary rotary = rotary_of(b, B, T);
    const bool runs = linear_runs(&b->qkv, pass);
    if (b->matmul_rotates && pass_trains(pass)) {
        if (!runs) { return; }
        Gemm g = linear_matmul(&t->gpu, &b->qkv, b->rotated, &x, B * T, pass);
        gpu_matmul_rope(&t->gpu, g, rotary);
        return;
    }
    linear_forward(&t->gpu, &b->qkv, b->qkv_out, x, NULL, B * T, pass);
    if (rotary.table != NULL && (runs || b->rotated != b->qkv_out)) {
        gpu_rope_forward(&t->gpu, b->rotated, b->qkv_out, rotary);
    }
}

// Computes fc1's matmul of x, and the activation. Returns the result in the format that fc2 reads.
static Operand fc1_forward(Trainer *t, const Block *b, Operand x, int M, Pass pass) {
    Gpu *gpu = &t->gpu;
    const bool llama = t->run.config.arch == ARCH_LLAMA;
    const int F = b->fc2.C;
    Operand out = linear_input(&b->fc2, pass);
    if (b->matmul_activates && pass_trains(pass) && linear_runs(&b->fc1, pass)) {
        Gemm g = linear_matmul(gpu, &b->fc1, b->fc1_out, &x, M, pass);
        g.bias = b->gelu_bias;
        (llama ? gpu_matmul_swiglu : gpu_matmul_gelu)(gpu, g, out);
        return out;
    }
    linear_forward(gpu, &b->fc1, b->fc1_out, x, NULL, M, pass);
    if (llama) {
        gpu_swiglu_forward(gpu, out, b->fc1_out, M, F);
    } else {
        gpu_gelu_forward(gpu, out, b->fc1_out, b->gelu_bias, M, F);
    }
    return out;
}

// Computes `out`, the next block's residual, from b->residual. PASS_RECOMPUTE, before the backward
// pass, recomputes the tensors that were not kept; the same kernels give the same bits.
static void block_forward(Trainer *t, const Block *b, Bf16 *out, int B, int T, Pass pass) {
    Gpu *gpu = &t->gpu;
    const int M = B * T;
    Operand x = linear_input(&b->qkv, pass);
    norm_forward(t, &b->norm1, x, M);
    qkv_forward(t, b, x, B, T, pass);
    x = linear_input(&b->attention_out, pass);
    if (linear_runs(&b->attention_out, pass)) {
        attention_forward_gpu(gpu, attention_shape(t, B, T), x.bf16, b->lse, b->rotated);
    }
    gpu_quantize(gpu, x, no_sums, t->net.partial_sums, M, b->attention_out.C);
    linear_forward(gpu, &b->attention_out, b->residual_mid, x, b->residual, M, pass);
    x = linear_input(&b->fc1, pass);
    norm_forward(t, &b->norm2, x, M);
    x = fc1_forward(t, b, x, M, pass);
    linear_forward(gpu, &b->fc2, out, x, b->residual_mid, M, pass);
}

// Goes backward through fc2 and the activation, to the gradient of fc1's output.
static void fc2_backward(Trainer *t, const Block *b, int M, bool accumulate) {
    Gpu *gpu = &t->gpu;
    const bool llama = t->run.config.arch == ARCH_LLAMA;
    const bool in_fp8 = b->matmul_derives && b->gelu_bias != NULL;
    const Gradient sums = gradient_into(b->fc1.dbias, accumulate);
    const Scratch scratch = t->net.partial_sums;
    const Operand dy = b->fc1.dy;
    const int F = b->fc2.C;
    Bf16 *d_activated = t->net.d_activated;
    Gemm g = linear_input_gradient(&b->fc2, d_activated, M);
    if (b->matmul_derives) { g.aux = b->fc1_out; }
    if (in_fp8) {
        g.bias = b->gelu_bias;
        gpu_matmul_gelu_backward(gpu, g, dy, sums, scratch);
    } else {
        g.epilogue = b->matmul_derives ? EPILOGUE_DGELU : EPILOGUE_NONE;
        gemm(gpu, g);
    }
    linear_weight_gradient(gpu, &b->fc2, b->fc2.x, M, accumulate);
    if (llama) {
        gpu_swiglu_backward(gpu, dy, d_activated, b->fc1_out, M, F);
    } else if (!b->matmul_derives) {
        gpu_gelu_backward(gpu, dy, sums, d_activated, b->fc1_out, b->gelu_bias, scratch, M, F);
    } else if (!in_fp8) {
        gpu_quantize(gpu, dy, sums, scratch, M, F);
    }
}

// Goes backward from d_qkv, the gradient of what attention reads, to d_norm.
static void qkv_backward(Trainer *t, const Block *b, int B, int T, bool accumulate) {
    const LinearLayer *qkv = &b->qkv;
    RotaryBackward r = b->rope;
    r.dquery_weight.accumulate = r.dkey_weight.accumulate = accumulate;
    r.column_sums.accumulate = accumulate;
    r.rotary = rotary_of(b, B, T);
    if (r.rotary.table != NULL) {
        gpu_rope_backward(&t->gpu, qkv->dy, r);
    } else {
        gpu_quantize(&t->gpu, qkv->dy, r.column_sums, r.scratch, B * T, qkv->N);
    }
    linear_backward(&t->gpu, qkv, t->net.d_norm, qkv->x, B * T, accumulate);
}

// Turns d_residual from the gradient of the block's output into the gradient of its input.
static void block_backward(Trainer *t, const Block *b, int B, int T, bool accumulate) {
    Network *net = &t->net;
    Gpu *gpu = &t->gpu;
    const int M = B * T;
    if (b->qkv.recomputed) { block_forward(t, b, NULL, B, T, PASS_RECOMPUTE); }
    fc2_backward(t, b, M, accumulate);
    linear_backward(gpu, &b->fc1, net->d_norm, b->fc1.x, M, accumulate);
    norm_backward(t, &b->norm2, M, accumulate);
    linear_backward(gpu, &b->attention_out, net->d_attention, b->attention_out.x, M, accumulate);
    attention_backward_gpu(gpu, attention_shape(t, B, T), net->d_qkv.bf16, net->d_attention,
                           b->attention_out.x.bf16, b->lse, b->rotated);
    qkv_backward(t, b, B, T, accumulate);
    norm_backward(t, &b->norm1, M, accumulate);
}

// ---- forward, loss, backward --------------------------------------------------------------------

// Computes the output of the final norm from the batch's inputs [B,T].
static void model_forward(Trainer *t, int B, int T, Pass pass) {
    const ModelConfig *c = &t->run.config;
    Network *net = &t->net;
    plan_guard_poison(&t->plan);
    params_clear_measured(&t->params);
    network_receive(net, 0);
    const int *starts = t->run.options.reset_position_ids ? t->batches.device.documents : NULL;
    gpu_embedding_forward(&t->gpu, net->blocks[0].residual, t->batches.device.inputs, starts,
                          net->wte, net->wpe, B, T, c->channels);
    for (int l = 0; l < c->num_layers; l++) {
        Bf16 *out = l + 1 < c->num_layers ? net->blocks[l + 1].residual : net->residual_out;
        network_receive(net, l + 1);
        block_forward(t, &net->blocks[l], out, B, T, pass);
    }
    network_receive(net, c->num_layers + 1);
    Operand x = linear_input(&net->head, pass);
    x.rows.codes = x.columns.codes = NULL; // the head quantises a chunk at a time
    x.fused = false;
    norm_forward(t, &net->final_norm, x, B * T);
}

// Computes the logits of `rows` rows of the final norm's output, from row number `row` on. Unless
// max_sums.data is NULL, also computes max_sums (gpu_matmul_max_sums). Returns these rows of the
// norm's output in the format that the LM head reads.
static Operand head_forward(Trainer *t, int row, int rows, Scratch max_sums, Pass pass) {
    const LinearLayer *head = &t->net.head;
    Operand x = linear_input(head, pass);
    x.bf16 += (size_t)row * head->C;
    // the final norm has measured the amax of all rows
    if (x.scaling == SCALE_CURRENT) { x.writes_amax = false; }
    gpu_quantize(&t->gpu, x, no_sums, t->net.partial_sums, rows, head->C);
    if (max_sums.data != NULL) {
        Gemm g = linear_matmul(&t->gpu, head, head->dy.bf16, &x, rows, pass);
        gpu_matmul_max_sums(&t->gpu, g, max_sums, t->run.config.vocab);
    } else {
        linear_forward(&t->gpu, head, head->dy.bf16, x, NULL, rows, pass);
    }
    return x;
}

// Computes the LM head and the loss, one chunk of rows at a time, so that the logits of all rows
// are never in memory together. Sets net.loss_sum to the sum of the losses. If gradient_scale > 0,
// also computes d_norm and the gradient of the head's weight. With `accumulate`, the sum and the
// weight's gradient are added to the old values.
static void head_loss(Trainer *t, int M, float gradient_scale, bool accumulate, Pass pass) {
    const ModelConfig *c = &t->run.config;
    Network *net = &t->net;
    const LinearLayer *head = &net->head;
    const Scratch max_sums = gradient_scale > 0 ? net->max_sums : (Scratch){NULL, 0};
    LossTerms terms = c->loss;
    terms.gradient_scale = gradient_scale;
    for (int row = 0; row < M; row += net->chunk_rows) {
        int rows = (int)min64(net->chunk_rows, M - row);
        Operand x = head_forward(t, row, rows, max_sums, pass);
        gpu_cross_entropy(&t->gpu, net->losses + row, head->dy, net->loss_scratch, max_sums,
                          t->batches.device.targets + row, rows, c->vocab, c->padded_vocab, terms);
        if (gradient_scale > 0) {
            linear_backward(&t->gpu, head, net->d_norm + (size_t)row * c->channels, x, rows,
                            accumulate || row > 0);
        }
    }
    gpu_sum_losses(&t->gpu, net->loss_sum, net->losses, M, accumulate);
}

// Goes backward from d_norm, the gradient of the final norm's output, down to the embeddings.
static void model_backward(Trainer *t, int B, int T, int kind) {
    const ModelConfig *c = &t->run.config;
    Network *net = &t->net;
    Gpu *gpu = &t->gpu;
    bool accumulate = !(kind & MICRO_FIRST), last = kind & MICRO_LAST;
    size_t residual_bytes = (size_t)B * T * c->channels * sizeof(Bf16);
    gpu_clear(gpu, FAMILY_NORMS, net->d_residual.bf16, residual_bytes);
    norm_backward(t, &net->final_norm, B * T, accumulate);
    if (last) { params_reduce(&t->params, c->num_layers + 1); }
    for (int l = c->num_layers - 1; l >= 0; l--) {
        block_backward(t, &net->blocks[l], B, T, accumulate);
        if (last) { params_reduce(&t->params, l + 1); }
    }
    if (!accumulate && !c->tied_head) { // the weight gradient of a tied head is already there
        size_t bytes = (size_t)c->padded_vocab * c->channels * gpu_type_bytes(net->dwte.type);
        gpu_clear(gpu, FAMILY_EMBEDDINGS, net->dwte.data, bytes);
    }
    const Batch *batch = &t->batches.device;
    gpu_embedding_backward(gpu, net->dwte, net->d_residual.bf16, batch->inputs, batch->runs, B * T,
                           c->channels);
    if (batch->positions != NULL) {
        if (!accumulate) {
            size_t bytes = (size_t)c->seq_length * c->channels * gpu_type_bytes(net->dwpe.type);
            gpu_clear(gpu, FAMILY_EMBEDDINGS, net->dwpe.data, bytes);
        }
        gpu_embedding_backward(gpu, net->dwpe, net->d_residual.bf16, batch->positions,
                               batch->position_runs, B * T, c->channels);
    } else if (net->wpe != NULL) {
        gpu_position_backward(gpu, gradient_into(net->dwpe, accumulate), net->d_residual.bf16, B, T,
                              c->channels);
    }
    if (last) {
        params_reduce(&t->params, 0);
        gpu_stamp(gpu, &t->params.optimizer.state->computed);
        comm_join(&t->comm);
    }
}

// ---- update -----------------------------------------------------------------------------------

static void micro_step(Trainer *t, int kind) {
    const Options *o = &t->run.options;
    int B = o->micro_batch_size, T = o->seq_length;
    float gradient_scale = (float)(1.0 / t->run.precision.step_tokens);
    if (kind & MICRO_FIRST) {
        params_expect(&t->params, true);
        gpu_stamp(&t->gpu, &t->params.optimizer.state->began);
    }
    model_forward(t, B, T, PASS_TRAIN);
    head_loss(t, B * T, gradient_scale, !(kind & MICRO_FIRST), PASS_TRAIN);
    model_backward(t, B, T, kind);
}

static int micro_kind(const Trainer *t, int micro) {
    bool last = micro + 1 == run_micro_batches(&t->run);
    return (micro == 0 ? MICRO_FIRST : 0) | (last ? MICRO_LAST : 0);
}

// Runs a micro-step (Replay). A step that counts FP8 codes is launched kernel by kernel, because
// the graph of a micro-step does not count.
static void replay_micro_step(Trainer *t, int kind) {
    Replay *r = &t->micro[kind];
    if (!t->run.options.cuda_graphs || !r->warm || t->params.counting) {
        micro_step(t, kind);
        r->warm = true;
        return;
    }
    if (r->graph == NULL) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(t->gpu.stream, cudaStreamCaptureModeThreadLocal));
        micro_step(t, kind);
        CUDA_CHECK(cudaStreamEndCapture(t->gpu.stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&r->graph, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch(r->graph, t->gpu.stream));
    // the graph itself waits for the new weights
    if (kind & MICRO_FIRST) { params_expect(&t->params, false); }
}

// Runs the first micro-step of a checked step twice. If the results differ, a third pass shows
// which pass was wrong, and the run ends before the update changes the state.
static void checked_micro_step(Trainer *t, int kind, int64_t step) {
    Check *c = &t->check;
    c->summed = t->run.group.ranks > 1 && (kind & MICRO_LAST);
    replay_micro_step(t, kind);
    check_hash(c, 0);
    bool counting = t->params.counting;
    t->params.counting = false; // codes are counted in one pass only
    replay_micro_step(t, kind);
    check_hash(c, 1);
    if (!check_repeats(c)) {
        replay_micro_step(t, kind);
        check_hash(c, 2);
    }
    t->params.counting = counting;
    if (!check_agrees(c, step)) { run_end_wrong(&t->run); }
}

static void dump_gradients(Trainer *t) {
    Run *run = &t->run;
    Params *p = &t->params;
    float *gradients = (float *)calloc_or_die((size_t)run->layout.size, sizeof(float));
    double loss;
    params_sum(p, t->net.loss_sum, 1);
    gpu_fetch(&t->gpu, &loss, t->net.loss_sum, sizeof(loss));
    params_fetch_gradients(p, gradients);
    run_dump(run, gradients, loss / (double)run_step_targets(run, 0));
}

// Whether step n is checked: it runs its first micro-step twice, and step n + 1 checks before its
// update that the state still has the bits that step n left.
static bool is_checked(const Trainer *t, int64_t n) {
    return t->check.rows > 0 && n >= t->first && (n + 1) % t->run.options.check_interval == 0;
}

static Pending *pending_of(const Trainer *t, int64_t n) {
    return &t->pending[n % RESULTS];
}

// Waits for step n and reports it, unless it has been reported already.
static void collect(Trainer *t, int64_t n) {
    if (n < t->run.progress.step) { return; }
    const Pending *p = pending_of(t, n);
    float ms;
    CUDA_CHECK(cudaEventSynchronize(p->end));
    CUDA_CHECK(cudaEventElapsedTime(&ms, p->from, p->end));
    StepResult result = {};
    result.loss = p->state.loss_sum / p->input.targets;
    result.norm = sqrt(p->state.norm_squared);
    result.lr = p->input.lr;
    result.seconds = 1e-3 * ms;
    result.skipped = (SkipReason)p->state.skipped;
    result.stop = p->state.stop > 0;
    // a checked step's time includes waiting for the other ranks
    int64_t own = (int64_t)(p->state.computed - p->state.began);
    result.own_seconds = is_checked(t, n) ? NAN : 1e-9 * (double)own;
    result.own_loss = p->state.own_loss_sum * t->run.group.ranks / p->input.targets;
    t->run.progress.window = p->state.window;
    guard_check(t);
    if (is_checked(t, n - 1) && !check_state_kept(&t->check, &p->hashes, n + 1)) {
        run_end_wrong(&t->run);
    }
    run_report(&t->run, result);
}

// Waits for step n, which counts FP8 codes, and reports the step and the counts.
static void report_counts(Trainer *t, int64_t n) {
    size_t bytes = (size_t)fp8_slot_count(&t->run.config) * sizeof(Fp8Counts);
    FREED Fp8Counts *counts = (Fp8Counts *)malloc_or_die(bytes);
    params_fetch_counts(&t->params, counts);
    collect(t, n);
    run_report_fp8(&t->run, counts);
}

// If a save still reads the state in host memory, which the update will change, waits for that
// save. Call it before an update.
static void wait_for_save(Trainer *t) {
    double begin = wall_seconds();
    if (!params_offloaded(&t->params) || !t->run.saves.saver.pending) { return; }
    run_wait_for_save(&t->run);
    double waited = wall_seconds() - begin;
    if (waited < 0.1) { return; }
    printf("%sthe update waited %.1f s for the save, which reads state in host memory\n",
           line_start(STDOUT_FILENO), waited);
}

// Enqueues step n. The previous step may still be in flight.
static void enqueue(Trainer *t, int64_t n) {
    Run *run = &t->run;
    const Options *o = &run->options;
    const int64_t ahead = n - run->progress.step;
    cudaStream_t stream = t->gpu.stream;
    Pending *p = pending_of(t, n);
    p->from = ahead > 0 ? pending_of(t, n - 1)->end : p->begin;
    CUDA_CHECK(cudaEventRecord(p->begin, stream));
    for (int micro = 0; micro < run_micro_batches(run); micro++) {
        Batch *s = batches_next(&t->batches);
        run_batch(run, ahead, micro, s->inputs, s->targets, s->documents);
        batches_send(&t->batches, o->micro_batch_size, o->seq_length);
        int kind = micro_kind(t, micro);
        if (is_checked(t, n) && micro == 0) {
            checked_micro_step(t, kind, n + 1);
        } else {
            replay_micro_step(t, kind);
        }
    }
    if (o->dump_gradients[0] != '\0') { dump_gradients(t); }
    // the input is set after the batches are read: if data cannot be read, run_batch requests the
    // end of the run, and the input tells all ranks
    p->input = {learning_rate(o, n),
                n,
                run_stop_signal() != 0 ? 1.0 : 0.0,
                (double)run_step_targets(run, ahead),
                o->skip_spikes,
                options_next_skip(o, n + 1) == n + 1};
    CUDA_CHECK(cudaMemcpyAsync(t->params.optimizer.adamw.input, &p->input, sizeof(StepInput),
                               cudaMemcpyHostToDevice, stream));
    wait_for_save(t);
    if (is_checked(t, n - 1)) {
        check_hash_state(&t->check, true);
        gpu_fetch(&t->gpu, &p->hashes, t->check.states, sizeof(StateHashes));
    }
    // the update is not captured in a graph, because the micro-steps' graphs wait for its
    // collectives
    params_update(&t->params, t->net.loss_sum);
    if (is_checked(t, n)) { check_hash_state(&t->check, false); }
    gpu_fetch(&t->gpu, &p->state, t->params.optimizer.state, sizeof(StepState));
    CUDA_CHECK(cudaEventRecord(p->end, stream));
    t->enqueued = n + 1;
}

static void train_step(Trainer *t) {
    const int64_t n = t->enqueued;
    // reports the previous step before the checked one begins, because the check may end the run
    if (is_checked(t, n)) { collect(t, n - 1); }
    if (run_counts_fp8(&t->run, n + 1)) { params_start_counts(&t->params); }
    enqueue(t, n);
    collect(t, n - 1); // step n runs meanwhile
    if (t->params.counting) { report_counts(t, n); }
    if (run_needs_result(&t->run, n + 1)) { collect(t, n); }
}

// ---- evaluation, samples, checkpoints ---------------------------------------------------------

// Computes the losses [B,T] of given sequences, for multiple-choice sets. B * T is at most the
// number of tokens in a micro-batch.
static void choice_losses(void *trainer, const int *inputs, const int *targets, int B, int T,
                          float *losses) {
    Trainer *t = (Trainer *)trainer;
    size_t tokens = (size_t)B * (size_t)T;
    Pass pass = eval_pass(&t->run.options);
    Batch *s = batches_next(&t->batches);
    memcpy(s->inputs, inputs, tokens * sizeof(int));
    memcpy(s->targets, targets, tokens * sizeof(int));
    batches_send(&t->batches, B, T);
    model_forward(t, B, T, pass);
    head_loss(t, B * T, 0.0f, false, pass);
    gpu_read(&t->gpu, losses, t->net.losses, tokens * sizeof(float));
}

static void validate(Trainer *t) {
    Run *run = &t->run;
    int B = run->options.micro_batch_size, T = run->options.seq_length;
    Pass pass = eval_pass(&run->options);
    int sources = run->valid_data.count;
    double begin = wall_seconds(), *loss = t->net.loss_sum;
    FREED double *losses = (double *)calloc_or_die((size_t)sources, sizeof(double));
    for (int i = 0; i < sources; i++) {
        int64_t samples = run_eval_samples(run, i), stride = run_eval_stride(run);
        gpu_clear(&t->gpu, FAMILY_LOSS, loss, sizeof(double)); // a rank without samples adds 0
        // a rank that a signal stops early still joins the sum, because the other ranks wait for it
        for (int64_t sample = run_eval_first(run); sample < samples && run_stop_signal() == 0;
             sample += stride) {
            Batch *s = batches_next(&t->batches);
            run_eval_batch(run, i, sample, s->inputs, s->targets, s->documents);
            batches_send(&t->batches, B, T);
            model_forward(t, B, T, pass);
            head_loss(t, B * T, 0.0f, true, pass);
        }
        params_sum(&t->params, loss, 1);
        gpu_read(&t->gpu, &losses[i], loss, sizeof(double));
        losses[i] /= (double)run_eval_targets(run, i);
    }
    run_report_eval(run, losses, wall_seconds() - begin);
}

static void sum_counts(void *trainer, int64_t *counts, int n) {
    params_sum_counts(&((Trainer *)trainer)->params, counts, n);
}

static void evaluate(Trainer *t) {
    ChoiceModel model = {t, choice_losses, sum_counts};
    if (t->run.valid_data.count > 0) { validate(t); }
    run_score_choices(&t->run, model);
    guard_check(t);
}

// Returns the logits of the token after tokens[0..n). The sequence is padded to a power of two, so
// that few attention plans serve all lengths; attention is causal, so the padding does not change
// the earlier rows. The head computes 16 rows, one of which is the last token's, because FP8
// matmuls take multiples of 16 rows.
static float *next_logits(void *trainer, const int *tokens, int n) {
    Trainer *t = (Trainer *)trainer;
    const ModelConfig *c = &t->run.config;
    Pass pass = eval_pass(&t->run.options);
    int T = 64, row = (n - 1) / 16 * 16;
    while (T < n) { T *= 2; }
    T = (int)min64(T, c->seq_length);
    Batch *s = batches_next(&t->batches);
    memset(s->inputs, 0, (size_t)T * sizeof(int));
    memcpy(s->inputs, tokens, (size_t)n * sizeof(int));
    batches_send(&t->batches, 1, T);
    model_forward(t, 1, T, pass);
    head_forward(t, row, (int)min64(16, T - row), (Scratch){NULL, 0}, pass);
    // the BF16 logits go to the second half of sample_logits, so that no FP32 number overwrites one
    // that has not been read
    Bf16 *codes = (Bf16 *)t->sample_logits + c->vocab;
    gpu_read(&t->gpu, codes, t->net.head.dy.bf16 + (int64_t)(n - 1 - row) * c->padded_vocab,
             (size_t)c->vocab * sizeof(Bf16));
    for (int v = 0; v < c->vocab; v++) { t->sample_logits[v] = bf16_decode(codes[v]); }
    return t->sample_logits;
}

// If a save is due, waits for the previous save and copies the state. A thread writes the copy
// while training goes on.
static void maybe_save(Trainer *t) {
    Run *run = &t->run;
    if (!run_should_save(run)) { return; }
    run_wait_for_save(run);
    Snapshot s = {};
    params_snapshot(&t->params, &s);
    run_save(run, s);
}

// Sets the scales of FP8 tensors whose scales are not known (model/precision.h).
static void calibrate(Trainer *t) {
    run_beat(&t->run, ACTIVITY_WAIT, "calibrating FP8 scales");
    // receives all weights first: if a weight is sent in BF16, a rank measures its amax only when
    // it quantises the received weight
    for (int b = 0; b < t->run.layout.num_buckets; b++) { network_receive(&t->net, b); }
    params_calibrate(&t->params);
    for (int i = 0; i < FP8_CALIBRATIONS; i++) {
        Batch *s = batches_next(&t->batches);
        run_batch(&t->run, 0, 0, s->inputs, s->targets, s->documents);
        batches_send(&t->batches, t->run.options.micro_batch_size, t->run.options.seq_length);
        micro_step(t, MICRO_FIRST);
        params_calibrate(&t->params);
    }
}

// Sets the initial weights, or the state of the checkpoint that --resume names.
static void trainer_restore(Trainer *t) {
    run_restore(&t->run);
    bool uncalibrated = params_restore(&t->params);
    network_start(&t->net);
    checkpoint_close(&t->run.start);
    t->first = t->enqueued = t->run.progress.step;
    if (uncalibrated) { calibrate(t); }
}

// ---- --plan: what fits --------------------------------------------------------------------------

// Returns the largest micro-batch size that fits; 0: not even one sequence fits.
static int largest_micro_batch(PlannedRun *p, Options o) {
    int fits = 0;
    for (int step = 1 << 12; step > 0; step /= 2) {
        options_set_micro_batch(&o, fits + step, p->group->ranks);
        bool countable = (int64_t)o.micro_batch_size * o.seq_length <= INT32_MAX;
        if (countable && planned_bytes(p, &o) <= p->memory) { fits += step; }
    }
    if (fits == 0) { return 0; }
    options_set_micro_batch(&o, fits, p->group->ranks);
    return o.micro_batch_size;
}

// Prints the largest micro-batch for every combination of the options that save memory. A sample
// has one sequence, so for a sample that does not fit only a shorter length is printed.
static void print_fits(const Run *run, NumberSupport support, int64_t memory) {
    enum { MOMENTS = STATE_8BIT + 1, LEVELS = RECOMPUTE_BLOCK + 1, WAYS = 2 * MOMENTS * LEVELS };
    const OptionRow *recompute = option_row("recompute"), *moments = option_row("adam-dtype");
    char size[32], words[2][OPTION_TEXT], sizes[80];
    Options fit;
    PlannedRun p = {&run->group, support, memory};
    const bool some = run_find_fit(run, (double)memory, planned_bytes, &p, &fit);
    const bool sample = run->options.sample_only;
    const bool shorter = fit.seq_length != run->options.seq_length;
    if (sample && some && !shorter) { return; }
    printf("What fits %s\n", format_bytes(size, (double)memory));
    // the lines below only change the micro-batch size, not the sequence length
    if (shorter) {
        printf("  %s, and the other options as they are\n", run_say_fit(run, &fit, sizes));
    }
    if (sample) {
        if (!some) { printf("  no sequence length\n"); }
        return;
    }
    for (int way = 0; way < WAYS; way++) {
        Options o = run->options;
        o.recompute = way % LEVELS;
        o.adam_dtype = way / LEVELS % MOMENTS;
        o.optimizer_cpu_offload = way >= WAYS / 2;
        int micro = largest_micro_batch(&p, o);
        o.deterministic = false;
        int any_order = largest_micro_batch(&p, o);
        o.deterministic = micro > 0 && run->options.deterministic;
        options_set_micro_batch(&o, (int)max64(1, micro > 0 ? micro : any_order), run->group.ranks);
        planned_bytes(&p, &o);
        printf("  --recompute %-11s --adam-dtype %s %s  ", option_text(&o, recompute, words[0]),
               option_text(&o, moments, words[1]),
               o.optimizer_cpu_offload ? "--optimizer-cpu-offload" : "");
        printf(micro > 0 ? "--micro-batch-size %d" : "no micro-batch", micro);
        if (any_order > micro) { printf("; %d with --no-deterministic", any_order); }
        if (any_order > 0 && o.optimizer_cpu_offload) {
            printf("; %s of host memory", format_bytes(size, p.host));
        }
        printf("\n");
    }
}

// Answers --plan, also on a machine without a GPU, and exits.
static void print_plan(Trainer *t) {
    char size[32];
    size_t free_bytes, memory = (size_t)(t->run.options.device_memory_gib * 0x1p30);
    if (memory == 0 && cudaMemGetInfo(&free_bytes, &memory) != cudaSuccess) {
        memory = (size_t)80 << 30; // no GPU here: plans for a GPU of 80 GB
    }
    NumberSupport support = support_of(0);
    or_die(trainer_plan(t, support, (int64_t)memory));
    run_plan_data(&t->run);
    options_print(&t->run.options, true, stdout);
    precision_print(&t->run.precision);
    options_note_idle(&t->run.options, true);
    plan_print(&t->plan, "Memory plan", stdout);
    muon_print(&t->params.optimizer.muon, t->params.optimizer.adamw.gradient_type, stdout);
    if (t->host_plan.bytes > 0) {
        plan_print(&t->host_plan, "Host memory", stdout);
        double all = params_host_bytes(&t->params, &t->host_plan);
        printf("  %-34s %12s\n", "all ranks of a machine", format_bytes(size, all));
        printf("  %-34s %12s\n", "available here", format_bytes(size, host_memory(NULL)));
    }
    print_fits(&t->run, support, (int64_t)memory);
    exit_answered();
}

// ---- the loop ---------------------------------------------------------------------------------

// With --profile, times one more step by kernel family. Its micro-steps are launched kernel by
// kernel, and its learning rate is 0.
static void profile_step(Trainer *t) {
    Run *run = &t->run;
    double ms[FAMILY_COUNT], all = 0;
    if (!run->options.profile) { return; }
    // a profile that fails must not end the save, and a save must not slow down the kernels
    run_wait_for_save(run);
    gpu_profile_begin(&t->gpu);
    for (int micro = 0; micro < run_micro_batches(run); micro++) {
        run_beat(run, ACTIVITY_WAIT, "profiling a step");
        micro_step(t, micro_kind(t, micro));
    }
    StepInput input = {
        .lr = 0.0, .step = run->progress.step, .targets = run->precision.step_tokens};
    gpu_send(&t->gpu, t->params.optimizer.adamw.input, &input, sizeof(input));
    params_update(&t->params, t->net.loss_sum);
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
    static Trainer t;
    Options *options = &t.run.options;
    options_parse(options, argc, argv);
    run_resolve_options(&t.run);
    if (options->verify) {
        int status = verify(options);
        or_die(output_flush(stdout));
        return status;
    }
    launch(&t.run.group, options);
    if (options->plan) { print_plan(&t); }
    trainer_open(&t);
    trainer_restore(&t);
    if (!options_train(options)) {
        if (options->eval_only) { evaluate(&t); }
        if (options->sample_only) { run_sample(&t.run, next_logits, &t); }
        return trainer_close(&t);
    }
    if (t.run.progress.eval_left) { evaluate(&t); }
    while (run_goes_on(&t.run)) {
        train_step(&t);
        if (t.enqueued > t.run.progress.step) { continue; } // the step is in flight
        if (t.run.progress.eval_left) { evaluate(&t); }
        if (run_should_sample(&t.run)) { run_sample(&t.run, next_logits, &t); }
        maybe_save(&t);
    }
    collect(&t, t.enqueued - 1);
    maybe_save(&t);
    profile_step(&t);
    return trainer_close(&t);
}
