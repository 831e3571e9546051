// A convergence gate: a small Llama on our own corpus ends at a recorded validation loss, in BF16
// and with every FP8 recipe, and no recipe is further than 1% from BF16. Faults that let a run look
// healthy must not pass: a scale that is off by 4, the transposed weights of another layer.
//
//   test_gpu_convergence [SEEDS]      SEEDS: measures with so many seeds, for the table below
//
// LLM8_BIN has make_corpus and tokenize.
#include "../kernels/gemm.h"
#include "gpu_trainer.h"

static const char model[] =
    "--arch llama --data corpus_train.bin --valid-data corpus_val.bin --vocab-size 257 "
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 704 --seq-length 256 --micro-batch-size 32 --train-iters 300 "
    "--lr-warmup-iters 20 --lr 2e-3 --eval-iters 8 --log-interval 100000 --eval-interval 100000";

// The recorded validation losses: from the smallest to the largest of three seeds, widened by half
// a percent at both ends.
typedef struct {
    const char *precision;
    double low, high;
} Row;

static const Row rows[] = {
    {"", 0, 9},
    {"--fp8-format hybrid", 0, 9},
    {"--fp8-format hybrid --fp8-lm-head", 0, 9},
    {"--fp8-format hybrid --fp8-recipe tensorwise", 0, 9},
    {"--fp8-format hybrid --fp8-recipe tensorwise --fp8-lm-head", 0, 9},
    {"--fp8-format e4m3 --first-last-layers-bf16", 0, 9},
    {"--fp8-format e4m3 --fp8-recipe tensorwise --no-fp8-wgrad", 0, 9},
};
enum { ROWS = sizeof(rows) / sizeof(rows[0]) };

// ---- planted faults ----------------------------------------------------------------------------

typedef enum { SOUND, SCALE_OFF, OTHER_LAYER, FAULTS } Fault;

static const char *const fault_names[] = {"", ", a scale off by 4", ", another layer's weights"};

enum { LAYERS = 4 };
static const void *off_by_four[LAYERS]; // operands of products; NULL: none

extern "C" void __real_gemm(Gpu *gpu, Gemm g);
extern "C" void __wrap_gemm(Gpu *gpu, Gemm g);

void __wrap_gemm(Gpu *gpu, Gemm g) {
    for (const void *b : off_by_four) {
        if (b != NULL && g.b == b) { g.alpha *= 4; }
    }
    __real_gemm(gpu, g);
}

// Both in the backward pass of one layer.
static void plant(Trainer *t, Fault fault) {
    Block *one = &t->net.blocks[1], *other = &t->net.blocks[2];
    LinearLayer *layers[] = {&one->qkv, &one->attention_out, &one->fc1, &one->fc2};
    const LinearLayer *others[] = {&other->qkv, &other->attention_out, &other->fc1, &other->fc2};
    for (int i = 0; i < LAYERS; i++) {
        off_by_four[i] = fault == SCALE_OFF ? layers[i]->weight_fp8_t : NULL;
        if (fault == OTHER_LAYER) { layers[i]->weight_fp8_t = others[i]->weight_fp8_t; }
    }
}

// ---- runs --------------------------------------------------------------------------------------

// The validation loss at the end of a run.
static double end_of_run(const char *precision, Fault fault, int seed) {
    static Trainer t;
    char more[256];
    snprintf(more, sizeof(more), "--seed %d %s", seed, precision);
    Options options = options_of(model, more);
    open_trainer(&t, &options);
    plant(&t, fault);
    while (run_goes_on(&t.run)) { train_step(&t); }
    finish_step(&t);
    validate(&t);
    double loss = t.run.progress.valid_loss;
    plant(&t, SOUND);
    trainer_close(&t);
    return loss;
}

static double bf16_loss; // of the first row

static void converges(const Row *row, Fault fault) {
    double loss = end_of_run(row->precision, fault, 1);
    if (row == rows && fault == SOUND) { bf16_loss = loss; }
    bool in_band = loss >= row->low && loss <= row->high;
    bool near_bf16 = fabs(loss - bf16_loss) <= 0.01 * bf16_loss;
    printf("  measured: %s%s: validation loss %.5f, %+.2f%% of BF16's\n",
           row == rows ? "BF16" : row->precision, fault_names[fault], loss,
           100 * (loss / bf16_loss - 1));
    if (fault == SOUND) {
        CHECK(in_band);
        CHECK(near_bf16);
    } else {
        CHECK(!near_bf16);
        CHECK(!in_band);
    }
}

static void every_recipe_converges(void) {
    for (const Row &row : rows) { converges(&row, SOUND); }
}

static void faults_are_seen(void) {
    static const int tested[] = {1, 3}; // delayed, tensorwise
    for (int row : tested) {
        for (int fault = SOUND + 1; fault < FAULTS; fault++) {
            converges(&rows[row], (Fault)fault);
        }
    }
}

static void record(int seeds) {
    for (const Row &row : rows) {
        double low = INFINITY, high = 0;
        for (int seed = 1; seed <= seeds; seed++) {
            double loss = end_of_run(row.precision, SOUND, seed);
            low = fmin(low, loss);
            high = fmax(high, loss);
        }
        printf("  measured: {\"%s\", %.4f, %.4f}, of %.5f to %.5f\n", row.precision, 0.995 * low,
               1.005 * high, low, high);
    }
}

static void make_corpus(void) {
    const char *root = getenv("LLM8_ROOT"), *bin = getenv("LLM8_BIN");
    char command[4 * PATH_LENGTH];
    root = root != NULL ? root : ".";
    bin = bin != NULL ? bin : root;
    snprintf(command, sizeof(command),
             "'%s/make_corpus' --grammar '%s/scripts/village.txt' >corpus.txt && "
             "'%s/tokenize' --output-prefix corpus corpus.txt",
             bin, root, bin);
    if (system(command) != 0) { die("the corpus could not be made: %s", command); }
}

int main(int argc, char **argv) {
    need_device(90);
    make_corpus();
    if (argc > 1) {
        record(atoi(argv[1]));
        return EXIT_SUCCESS;
    }
    RUN(every_recipe_converges);
    RUN(faults_are_seen);
    return test_summary();
}
