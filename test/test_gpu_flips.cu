// Random bits are flipped in the GPU trainer's memory in the middle of a checked micro-batch: bits
// of weights, gradients, activations, FP8 codes and scales. Each flip that changes a bit of the
// loss or of a gradient must be found, by the two passes or by the hashes that ranks compare; and
// no check may find anything where nothing was flipped. LLM8_FLIPS (100) and LLM8_CHECKS (50): how
// many of each, for every model.
#include "gpu_trainer.h"

#include <algorithm>
#include <omp.h>
#include <vector>

#define COMMON                                                                                  \
    "--data flips.bin --num-layers 2 --hidden-size 48 --num-attention-heads 6 --vocab-size 61 " \
    "--make-vocab-size-divisible-by 16 --seq-length 16 --micro-batch-size 4 --lr 3e-3 "         \
    "--init-method-std 0.1 --log-interval 100000 --no-cuda-graphs "                             \
    "--embedding-lr-mult 1 --vector-lr-mult 1 --lr-decay-style cosine "
#define LLAMA COMMON "--arch llama --num-query-groups 2 --ffn-hidden-size 80 "
static const char *const models[] = {
    COMMON,
    LLAMA "--fp8-format hybrid --fp8-recipe delayed --fp8-lm-head",
    LLAMA "--fp8-format hybrid --fp8-recipe tensorwise --recompute block",
    LLAMA "--fp8-format e4m3 --fp8-recipe blockwise --eval-precision bf16",
};

// A bit that is flipped before a call of a norm's kernel: every pass has many of these calls.
static struct {
    Gpu *gpu;
    int calls, at; // at -1: no bit is flipped
    char *address;
    char mask, before;
} flip;

static void flip_here(void) {
    if (flip.calls++ != flip.at) { return; }
    gpu_read(flip.gpu, &flip.before, flip.address, 1);
    char wrong = (char)(flip.before ^ flip.mask);
    gpu_send(flip.gpu, flip.address, &wrong, 1);
}

extern "C" {
void __real_gpu_norm_forward(Gpu *gpu, Operand out, NormForward n);
void __real_gpu_norm_backward(Gpu *gpu, Operand out, NormBackward n);
void __wrap_gpu_norm_forward(Gpu *gpu, Operand out, NormForward n) {
    flip_here();
    __real_gpu_norm_forward(gpu, out, n);
}
void __wrap_gpu_norm_backward(Gpu *gpu, Operand out, NormBackward n) {
    flip_here();
    __real_gpu_norm_backward(gpu, out, n);
}
}

static int number_of(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text != NULL ? atoi(text) : otherwise;
}

// The results of a pass: the gradients in the sharded layout, then the loss.
typedef std::vector<char> Result;

static Result pass(Trainer *t, int number) {
    Params *p = &t->params;
    size_t bytes = (size_t)(p->zero.size * gpu_type_bytes(p->optimizer.adamw.gradient_type));
    Result r(bytes + sizeof(double));
    flip.calls = 0;
    replay_micro_step(t, MICRO_FIRST);
    check_hash(&t->check, number);
    gpu_fetch(&t->gpu, r.data(), p->optimizer.adamw.gradients, bytes);
    gpu_read(&t->gpu, r.data() + bytes, t->net.loss_sum, sizeof(double));
    flip.at = -1;
    return r;
}

// Without the padding between parameters.
static bool same_result(const Trainer *t, const Result &a, const Result &b) {
    const ParamLayout *layout = &t->run.layout;
    int width = gpu_type_bytes(t->params.optimizer.adamw.gradient_type);
    for (int i = 0; i < layout->count; i++) {
        size_t at = (size_t)(t->params.zero.sharded_offset[i] * width);
        size_t n = (size_t)(param_size(&layout->params[i]) * width);
        if (memcmp(&a[at], &b[at], n) != 0) { return false; }
    }
    return memcmp(&a[a.size() - 8], &b[a.size() - 8], 8) == 0;
}

// Whether bits of a buffer are flipped. Left out are the optimizer's state, which is not read here
// and has hashes of its own in checkpoints; the tokens, which both passes read; the hashes; and the
// libraries' workspaces.
static bool is_checked(const PlanRow *row) {
    static const char *const others[] = {"optimizer", "checked steps", "scratch of saving"};
    EACH (other, others) {
        if (strcmp(row->category, *other) == 0) { return false; }
    }
    return row->bytes > 0 && strncmp(row->name, "tokens", 6) != 0 &&
           strncmp(row->name, "workspace", 9) != 0;
}

static void arm(Trainer *t, uint64_t number, int calls, const PlanRow **row) {
    do {
        *row = &t->plan.rows[rng_bits(number, 0) % (uint64_t)t->plan.count];
        number += 1ull << 32;
    } while (!is_checked(*row));
    flip.at = (int)(rng_bits(number, 1) % (uint64_t)calls);
    flip.address = (*row)->address + rng_bits(number, 2) % (uint64_t)(*row)->bytes;
    flip.mask = (char)(1 << rng_bits(number, 3) % 8);
}

static void flips_are_found(Trainer *t, int wanted, int salt) {
    Check *c = &t->check;
    flip.gpu = &t->gpu;
    flip.at = -1;
    const Result right = pass(t, 0);
    int calls = flip.calls, changed = 0, twice = 0, weights = 0;
    CHECK(same_result(t, right, pass(t, 1)) && check_repeats(c) && calls > 4);
    // as other ranks have them
    const std::vector<uint64_t> hashes(c->host + c->first[ROWS_WEIGHTS],
                                       c->host + c->first[ROWS_KEPT]);
    for (int i = 0; changed < wanted && i < 40 * wanted; i++) {
        const PlanRow *row;
        arm(t, (uint64_t)(i + 1000000 * salt), calls, &row);
        const Result first = pass(t, 0), second = pass(t, 1);
        bool repeats = check_repeats(c),
             same = std::equal(hashes.begin(), hashes.end(), c->host + c->first[ROWS_WEIGHTS]);
        if (!same_result(t, right, first) || !same_result(t, right, second)) {
            changed++;
            twice += !repeats;
            weights += repeats && !same;
            if (repeats && same) {
                fprintf(stderr, "  not found: %s, %s, byte %lld\n", row->category, row->name,
                        (long long)(flip.address - row->address));
            }
            CHECK(!repeats || !same);
        }
        if (!repeats && row->phase != PHASE_ALWAYS) { // a third pass no longer has it
            pass(t, 2);
            CHECK(!check_agrees(c, 17));
            CHECK_CONTAINS(error_text(), "step 17: ");
            CHECK_CONTAINS(error_text(), "GPU-");
            CHECK_CONTAINS(error_text(), "the first was wrong, a third gave what the second did");
        }
        if (row->phase == PHASE_ALWAYS) { gpu_send(&t->gpu, flip.address, &flip.before, 1); }
    }
    printf("  measured: %d flips that change a result: %d found by passes that differ, %d by "
           "weights alone\n",
           changed, twice, weights);
    CHECK_EQUAL(changed, wanted);
}

static void open_model(Trainer *t, const char *model) {
    Options options = options_of(model, "");
    open_trainer(t, &options);
    train(t, 3);
}

TEST(every_flip_is_found) {
    static Trainer t;
    for (int m = 0; m < 4; m++) {
        open_model(&t, models[m]);
        flips_are_found(&t, number_of("LLM8_FLIPS", 100), m);
        trainer_close(&t);
    }
}

// Tests also the reports of a wrong second pass, and of results that differ every time.
TEST(passes_are_told_apart) {
    static Trainer t;
    open_model(&t, models[0]);
    flip.gpu = &t.gpu;
    flip.address = (char *)t.net.residual_out;
    for (int wrong = 0; wrong < 8; wrong++) { // one bit of `wrong` for each pass
        for (int n = 0; n < CHECK_PASSES; n++) {
            flip.at = wrong >> n & 1 ? 4 : -1; // before the last norm
            flip.mask = (char)(1 << n);
            pass(&t, n);
        }
        static const char *const texts[] = {
            "",
            "the first was wrong, a third gave what the second did",
            "the second was wrong, a third gave what the first did",
            "a third differs again",
        };
        int differs = (wrong & 3) == 0 ? 0 : wrong == 1 ? 1 : wrong == 2 ? 2 : 3;
        CHECK_EQUAL(check_repeats(&t.check), differs == 0);
        CHECK_EQUAL(check_agrees(&t.check, 9), differs == 0);
        if (differs > 0) { CHECK_CONTAINS(error_text(), texts[differs]); }
        if (differs > 0) { CHECK_CONTAINS(error_text(), "the loss differs"); }
    }
    trainer_close(&t);
}

TEST(no_check_finds_what_is_not) {
    static Trainer t;
    for (int m = 0; m < 4; m++) {
        open_model(&t, models[m]);
        int checks = number_of("LLM8_CHECKS", 50);
        for (int i = 0; i < checks; i++) {
            replay_micro_step(&t, MICRO_FIRST);
            check_hash(&t.check, 0);
            replay_micro_step(&t, MICRO_FIRST);
            check_hash(&t.check, 1);
            CHECK(check_repeats(&t.check) && check_agrees(&t.check, i));
        }
        trainer_close(&t);
    }
}

SETUP() {
    need_fp8();
    omp_set_num_threads(1); // the stand-ins have too little work for more threads
    flip.at = -1;
    write_tokens("flips.bin", 4096, 61, 1);
}
