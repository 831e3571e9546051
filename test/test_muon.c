// Muon on the CPU: compares its definition in kernels/cpu.h with numpy, which computes the same
// from singular values (golden.py); and the CPU trainer's step with the definition, for every
// matrix.
#include "trainer.h"

static const int shapes[][2] = {{24, 40}, {40, 24}, {16, 16}, {1, 7}, {33, 5}};
enum { SHAPES = COUNT(shapes), MOST = 24 * 40 };

static void copy(float *to, const float *from, int64_t n) {
    memcpy(to, from, (size_t)n * sizeof(float));
}

// ---- the definition -----------------------------------------------------------------------------

// The magnitude of a gradient does not matter, except that a matrix of nearly 0 has no update.
TEST(updates_do_not_depend_on_the_size) {
    float x[MOST], one[MOST], scratch[2 * MOST + 2 * 24 * 24];
    EACH (shape, shapes) {
        int rows = (*shape)[0], columns = (*shape)[1], n = rows * columns;
        for (int size = 0; size <= 18; size += 6) {
            fill_random(x, n, powf(10, (float)size), 1);
            muon_orthogonalize(x, rows, columns, 3.0f, scratch);
            if (size == 0) { copy(one, x, n); }
            CHECK_ERROR(x, one, n, 2e-5);
        }
        fill_random(x, n, 1e-4f, 1);
        muon_orthogonalize(x, rows, columns, 3.0f, scratch);
        CHECK_ERROR(x, one, n, 0.02);
    }
    float small[4] = {1.0f, 0.0f, 0.0f, 0.0016f}; // and its singular values
    muon_orthogonalize(small, 2, 2, 1.0f, scratch);
    CHECK_CLOSE(small[0], 0.945, 0.265);
    CHECK_CLOSE(small[3], 0.945, 0.265);
    CHECK(small[1] == 0.0f && small[2] == 0.0f);
    memset(x, 0, sizeof(x)); // a matrix without a gradient has no update
    muon_orthogonalize(x, 24, 40, 1.0f, scratch);
    CHECK(tensor_amax(x, MOST) == 0.0f);
    x[3] = NAN;
    muon_orthogonalize(x, 24, 40, 1.0f, scratch);
    CHECK(isnan(x[0]) && isnan(x[MOST - 1]));
}

typedef struct {
    float lr, momentum, decay, factor, clip;
} Settings;

// Two steps from the golden weights. scale: the gradients are multiplied by it, and the step
// divides them again.
static void take_steps(const SafeTensors *st, int shape, Settings s, float w[MOST],
                       float updates[2][MOST]) {
    int rows = shapes[shape][0], columns = shapes[shape][1], n = rows * columns;
    float m[MOST] = {0}, scratch[MOST + 2 * 24 * 24];
    char name[32];
    snprintf(name, sizeof(name), "%dx%d.start", rows, columns);
    copy(w, golden_data(st, name, DTYPE_F32, n), n);
    for (int step = 0; step < 2; step++) {
        float *u = updates[step];
        snprintf(name, sizeof(name), "%dx%d.gradient%d", rows, columns, step);
        copy(u, golden_data(st, name, DTYPE_F32, n), n);
        muon_momentum(u, m, n, s.momentum, s.clip);
        muon_orthogonalize(u, rows, columns, muon_scale(s.factor, rows, columns), scratch);
        muon_update(w, u, n, s.lr, s.decay);
    }
}

static double golden_error(const SafeTensors *st, int shape, const char *what, const float *x) {
    int rows = shapes[shape][0], columns = shapes[shape][1];
    return test_relative_error(
        x, golden_data(st, text_of("%dx%d.%s", rows, columns, what), DTYPE_F32, rows * columns),
        rows * columns);
}

// FP32's rounding errors: small singular values are multiplied by up to 3.4445^5 = 485, the
// steepest part of the polynomial.
TEST(steps_are_numpys) {
    static const Settings right = {0.02f, 0.95f, 0.1f, 0.2f, 1.0f};
    Settings wrong[] = {right, right, right, right, right};
    CLOSED(safetensors_close) SafeTensors st = golden_open("muon.safetensors");
    float w[MOST], updates[2][MOST];
    wrong[0].lr *= 1.001f;
    wrong[1].momentum = 0.94f;
    wrong[2].decay = 0.0f;
    wrong[3].factor *= 1.001f;
    for (int i = 0; i < SHAPES; i++) {
        take_steps(&st, i, right, w, updates);
        CHECK_CLOSE(golden_error(&st, i, "update0", updates[0]), 0, 2e-5);
        CHECK_CLOSE(golden_error(&st, i, "update1", updates[1]), 0, 2e-5);
        CHECK_CLOSE(golden_error(&st, i, "end", w), 0, 2e-6);
        Settings clipped = right; // a matrix's update does not depend on its gradients' scale
        clipped.clip = 0.25f;
        take_steps(&st, i, clipped, w, updates);
        CHECK_CLOSE(golden_error(&st, i, "update1", updates[1]), 0, 2e-5);
        for (int k = 0; k < 4; k++) {
            take_steps(&st, i, wrong[k], w, updates);
            bool is_row = shapes[i][0] == 1; // its update is its direction
            CHECK(!(golden_error(&st, i, "end", w) <= (is_row ? 1e-6 : 2e-6)));
        }
    }
}

// ---- the trainer --------------------------------------------------------------------------------

// Rows of a parameter that are a separate matrix.
typedef struct {
    TensorId id;
    int first, rows;
} Part;

// Heads of 8: 6 for queries, 2 for keys and 2 for values; 80 rows of gate, 80 of up.
static const Part llama_parts[] = {
    {TENSOR_QKV_WEIGHT, 0, 48},           {TENSOR_QKV_WEIGHT, 48, 16}, {TENSOR_QKV_WEIGHT, 64, 16},
    {TENSOR_ATTENTION_OUT_WEIGHT, 0, 48}, {TENSOR_FC1_WEIGHT, 0, 80},  {TENSOR_FC1_WEIGHT, 80, 80},
    {TENSOR_FC2_WEIGHT, 0, 48},
};
static const Part gpt2_parts[] = {
    {TENSOR_QKV_WEIGHT, 0, 48},           {TENSOR_QKV_WEIGHT, 48, 48}, {TENSOR_QKV_WEIGHT, 96, 48},
    {TENSOR_ATTENTION_OUT_WEIGHT, 0, 48}, {TENSOR_FC1_WEIGHT, 0, 192}, {TENSOR_FC2_WEIGHT, 0, 48},
};

// Computes the weights after two steps by the definition, from the trainer's gradients, which
// depend on the weights.
static void follow(Trainer *t, const Part *parts, int count, float *w, float *m) {
    const Options *o = &t->run.options;
    int64_t size = t->run.layout.size;
    FREED float *g = malloc_or_die((size_t)size * sizeof(float));
    FREED float *scratch = malloc_or_die((size_t)(3 * 192 * 192) * sizeof(float));
    read_batch(t);
    forward_backward(t, o->micro_batch_size * o->seq_length);
    copy(g, t->gradients, size);
    float clip = fminf(1.0f, (float)(o->clip_grad / sqrt(sum_of_squares(g, size))));
    CHECK(clip < 0.9f);
    double lr = learning_rate(o, t->run.progress.step);
    for (int l = 0; l < t->run.config.num_layers; l++) {
        for (const Part *part = parts; part < parts + count; part++) {
            const Param *p = param_find(&t->run.layout, part->id, l);
            int64_t at = p->offset + part->first * p->cols, n = part->rows * p->cols;
            float scale = 0.2f * sqrtf((float)(part->rows > p->cols ? part->rows : p->cols));
            muon_momentum(g + at, m + at, n, 0.95f, clip);
            muon_orthogonalize(g + at, part->rows, p->cols, scale, scratch);
            muon_update(w + at, g + at, n, (float)lr, (float)o->weight_decay);
        }
    }
}

// The matrices equal the definition bit for bit; AdamW updates all else.
static void check_steps(const char *model, const Part *parts, int count) {
    static const char options[] = "--num-layers 2 --clip-grad 0.5 --lr-warmup-iters 3 "
                                  "--train-iters 6 --lr 0.01 --embedding-lr-mult 3 "
                                  "--head-lr-mult 0.5 --vector-lr-mult 0.25"; // AdamW's alone
    TRAINER(t, open_trainer, "%s %s --optimizer muon", model, options);
    TRAINER(adamw, open_trainer, "%s %s", model, options);
    int64_t size = t.run.layout.size, wrong = 0, same = 0;
    FREED float *w = malloc_or_die((size_t)size * sizeof(float));
    FREED float *m = calloc_or_die((size_t)size, sizeof(float));
    copy(w, t.weights, size);
    for (int step = 0; step < 2; step++) {
        follow(&t, parts, count, w, m);
        train(&t, 1);
        train(&adamw, step == 0); // after that its gradients differ
        for (int i = 0; i < t.run.layout.count; i++) {
            const Param *p = &t.run.layout.params[i];
            bool matrix = p->layer >= 0 && p->cols > 1;
            CHECK_EQUAL(run_by_muon(&t.run, p), matrix);
            for (int64_t j = p->offset; j < p->offset + param_size(p); j++) {
                float expected = matrix ? w[j] : adamw.weights[j];
                wrong += !(t.weights[j] == expected) && (matrix || step == 0);
                wrong += matrix && (t.exp_avg[j] != m[j] || t.exp_avg_sq[j] != 0.0f);
                same += matrix && step == 0 && t.weights[j] == adamw.weights[j];
            }
        }
        CHECK_EQUAL(wrong, 0);
        CHECK(same < 20); // of the elements of all matrices
    }
}

TEST(every_matrix_is_updated_by_itself) {
    check_steps(SMALL_LLAMA, llama_parts, 7);
    check_steps(SMALL_GPT2, gpt2_parts, 6);
}

SETUP() {
    prepare_trainer();
    write_tokens("train.bin", 2000, 61, 1);
}
