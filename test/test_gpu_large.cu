// A step of the GPU trainer with more than 2^31 parameters, and with activations of more than 2^31
// elements, against the same step done in smaller pieces; gradients and weights are sampled. Over
// the stand-ins, which are slow, the sizes are small: they test this test.
#include "../kernels/cpu.h"
#include "gpu_trainer.h"

#include <vector>

typedef std::vector<float> Floats;

enum { CHUNK = 64, CHUNKS = 64 }; // elements of a chunk, which lie together; chunks of a tensor

// For every tensor, in the table's order: sampled elements, from its first used one to its last.
typedef struct {
    double loss;
    float gradient_scale;
    std::vector<Floats> gradients, before, after;
} Step;

// The gradients (TYPE_F32 or TYPE_BF16) or master weights of a tensor, sampled. One rank keeps all
// of them, in the same order.
static Floats sample(Trainer *t, int param, const void *from, GpuType type) {
    const Param *p = &t->run.layout.params[param];
    const ModelConfig *c = &t->run.config;
    bool padded = tensor_row(p->id)->rows == DIM_VOCAB;
    int64_t n = (int64_t)(padded ? c->vocab : p->rows) * p->cols,
            offset = t->params.zero.sharded_offset[param];
    int chunks = n < CHUNK * CHUNKS ? 1 : (int)CHUNKS, size = chunks == 1 ? (int)n : (int)CHUNK;
    int64_t bytes = gpu_type_bytes(type);
    std::vector<char> values((size_t)chunks * size * bytes);
    for (int i = 0; i < chunks; i++) {
        int64_t at = offset + (chunks == 1 ? 0 : (n - CHUNK) / (CHUNKS - 1) * i);
        gpu_fetch(&t->gpu, values.data() + i * size * bytes, (const char *)from + at * bytes,
                  (size_t)(size * bytes));
    }
    CUDA_CHECK(cudaStreamSynchronize(t->gpu.stream));
    Floats out((size_t)chunks * size);
    for (size_t i = 0; i < out.size(); i++) {
        out[i] = type == TYPE_F32 ? ((const float *)values.data())[i]
                                  : bf16_decode(((const Bf16 *)values.data())[i]);
    }
    return out;
}

static std::vector<Floats> samples(Trainer *t, const void *from, GpuType type) {
    std::vector<Floats> all;
    for (int i = 0; i < t->run.layout.count; i++) { all.push_back(sample(t, i, from, type)); }
    return all;
}

// Whether the device has memory for the run; where it has not, the test is skipped.
static bool has_room(const Options *options) {
    char need[32], have[32], why[160];
    size_t free_bytes, all_bytes;
    Group alone = {.rank = 0, .ranks = 1};
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
    PlannedRun p = {&alone, {NUMBER_BF16, NULL, 0}, (int64_t)free_bytes};
    int64_t bytes = planned_bytes(&p, options);
    if (bytes <= p.memory) { return true; }
    snprintf(why, sizeof(why), "it needs %s of device memory, and %s are free",
             format_bytes(need, (double)bytes), format_bytes(have, (double)p.memory));
    test_skip(why);
    return false;
}

// Runs `steps` steps and samples the last one. False: the test is skipped.
static bool make_step(Step *s, const char *model, const char *more, int steps) {
    static Trainer t;
    Options options = options_of(model, more);
    if (!has_room(&options)) { return false; }
    open_trainer(&t, &options);
    train(&t, steps - 1);
    s->before = samples(&t, t.params.optimizer.arrays[STATE_MASTER].device, TYPE_F32);
    train(&t, 1);
    s->gradients = samples(&t, t.params.optimizer.adamw.gradients,
                           t.params.optimizer.adamw.gradient_type);
    s->after = samples(&t, t.params.optimizer.arrays[STATE_MASTER].device, TYPE_F32);
    s->loss = t.run.progress.loss;
    s->gradient_scale = t.pending[(steps - 1) % RESULTS].state.gradient_scale;
    printf("  measured: %lld parameters, micro-batches of %d tokens: loss %.6f\n",
           (long long)t.params.zero.size, t.batches.tokens, s->loss);
    trainer_close(&t);
    return true;
}

// The worst relative error of a tensor's gradient.
static double worst_error(const std::vector<Floats> &a, const std::vector<Floats> &b) {
    double worst = a.size() == b.size() && !a.empty() ? 0 : NAN;
    for (size_t i = 0; i < a.size() && i < b.size(); i++) {
        double error = a[i].size() == b[i].size()
                           ? test_relative_error(a[i].data(), b[i].data(), (int64_t)b[i].size())
                           : NAN;
        if (!(error <= worst)) { worst = error; }
    }
    return worst;
}

// ---- parameters --------------------------------------------------------------------------------

// Padding rows of a vocabulary change no result: a model with so many that its blocks' parameters
// lie beyond 2^31 computes the same as one with few. Weights and gradients then lie at other
// offsets.
#ifdef LLM8_STANDIN_CUDA_H
#define DEEP_SIZE "--hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 16 "
static const int64_t beyond = 1 << 19;
#define WIDE_VOCABULARY "8192"
#else
#define DEEP_SIZE \
    "--hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 17408 --seq-length 128 "
static const int64_t beyond = (int64_t)1 << 31;
#define WIDE_VOCABULARY "65536"
#endif
static const char deep[] = "--data tokens.bin --arch llama --num-layers 3 " DEEP_SIZE
                           "--num-query-groups 1 --vocab-size 250 --micro-batch-size 2 --lr 1e-2 "
                           "--untie-embeddings-and-output-weights --log-interval 1000 "
                           "--embedding-lr-mult 3 --head-lr-mult 0.5 --vector-lr-mult 0.25 "
                           "--lr-warmup-iters 0 "
                           "--no-cuda-graphs --make-vocab-size-divisible-by";

// The definition's first update of the sampled weights by their gradients.
static double update_error(const Options *o, const ParamLayout *layout, const Step &s) {
    std::vector<Floats> expected = s.before;
    for (int i = 0; i < layout->count; i++) {
        size_t n = expected[i].size();
        Floats m(n, 0.0f), v(n, 0.0f);
        AdamW a = {};
        a.lr = (float)learning_rate(o, 0) * param_lr_mult(&layout->params[i], o);
        a.beta1 = (float)o->adam_beta1;
        a.beta2 = (float)o->adam_beta2;
        a.eps = (float)o->adam_eps;
        a.weight_decay = param_decay(&layout->params[i], o);
        a.gradient_scale = s.gradient_scale;
        a.step = 1;
        adamw_update(expected[i].data(), m.data(), v.data(), s.gradients[i].data(), (int64_t)n, a);
    }
    return worst_error(s.after, expected);
}

static void parameters(const char *precision, double allowed) {
    Step large, small;
    char wide[256], narrow[256];
    snprintf(wide, sizeof(wide), WIDE_VOCABULARY " %s", precision);
    snprintf(narrow, sizeof(narrow), "256 %s", precision);
    Options o = options_of(deep, wide);
    static Run run;
    run.options = o;
    run.group.ranks = 1;
    NumberSupport support = {NUMBER_BF16, NULL, 0};
    run_configure(&run, support);
    CHECK(run.layout.size > beyond);
    const Param *p = param_find(&run.layout, TENSOR_FC2_WEIGHT, 2);
    CHECK(p->offset + (int64_t)p->rows * p->cols > beyond); // the blocks, and the head after them
    if (!make_step(&large, deep, wide, 1) || !make_step(&small, deep, narrow, 1)) {
        run_free_configuration(&run);
        return;
    }
    double error = worst_error(large.gradients, small.gradients);
    double update = update_error(&o, &run.layout, large);
    printf("  measured: parameters %s: gradients %.3g of %.3g, updates %.3g of 1e-5\n", precision,
           error, allowed, update);
    CHECK(error <= allowed);
    CHECK(update <= 1e-5);
    CHECK(fabs(large.loss - small.loss) <= 1e-3 * small.loss);
    CHECK(worst_error(large.before, small.before) == 0); // the same start
    // planted: two layers' gradients, exchanged
    std::swap(large.gradients[2], large.gradients[2 + run.layout.block_params]);
    CHECK(worst_error(large.gradients, small.gradients) > 4 * allowed);
    CHECK(update_error(&o, &run.layout, large) > 1e-3);
    run_free_configuration(&run);
}

// BF16 matmuls of other shapes may add up in another order (0.0096 apart on an H200). FP8 rounds
// these differences again in every operand, to steps of 2^-3 or 2^-2 (0.195 apart). A gradient from
// another offset would be 1.4 away.
TEST(parameters_in_bf16) {
    parameters("", 0.05);
}

TEST(parameters_in_fp8) {
    parameters("--fp8-format hybrid --fp8-lm-head", 0.3);
}

// ---- activations -------------------------------------------------------------------------------

// One micro-batch of 68 sequences whose feed-forward activations, and logits, have more than 2^31
// elements, against 17 of 4 sequences. The learning rate is 0, so that the second step, which has
// given scales in FP8, is on the same weights.
#ifdef LLM8_STANDIN_CUDA_H
#define WIDE_SIZE "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 120 "
#define WIDE_F "64", "32"
#else
#define WIDE_SIZE "--hidden-size 512 --num-attention-heads 8 --seq-length 1024 --vocab-size 32700 "
#define WIDE_F "32768", "16384"
#endif
static const char wide[] = "--data tokens.bin --num-layers 2 " WIDE_SIZE "--global-batch-size 68 "
                           "--lr 0 --log-interval 1000 --no-cuda-graphs --no-shuffle "
                           "--grad-accum-dtype fp32 --init-method-std 0.05 ";

static void activations(bool llama, const char *precision, double allowed) {
    static const char *const ffn[] = {WIDE_F};
    char more[2][256];
    Step whole, pieces, fewer;
    for (int i = 0; i < 2; i++) {
        snprintf(more[i], sizeof(more[i]),
                 "--arch %s --ffn-hidden-size %s %s --micro-batch-size %d",
                 llama ? "llama" : "gpt2", ffn[llama], precision, i == 0 ? 68 : 4);
    }
    if (!make_step(&whole, wide, more[0], 2) || !make_step(&pieces, wide, more[1], 2)) { return; }
    double error = worst_error(whole.gradients, pieces.gradients);
    printf("  measured: activations, %s %s: gradients %.3g of %.3g, losses %.3g apart\n",
           llama ? "llama" : "gpt2", precision, error, allowed, fabs(whole.loss - pieces.loss));
    CHECK(error <= allowed);
    CHECK(fabs(whole.loss - pieces.loss) <= 1e-3 * pieces.loss);
    // planted: 8 of the 68 sequences are lost, and 4 others are added
    strcat(more[1], " --global-batch-size 64");
    if (!make_step(&fewer, wide, more[1], 2)) { return; }
    double planted = worst_error(fewer.gradients, pieces.gradients);
    printf("  measured: planted: %.3g\n", planted);
    CHECK(planted > allowed);
}

TEST(activations_of_gpt2) {
    activations(false, "", 0.03);
}

TEST(activations_of_llama) {
    activations(true, "", 0.03);
}

TEST(activations_in_fp8) {
    activations(true, "--fp8-format hybrid", 0.15);
}

SETUP() {
    need_fp8();
    write_tokens("tokens.bin", 400 << 10, 120, 1);
}
