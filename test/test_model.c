// The table of tensors: sizes of known models, a parameter space without overlaps, initial weights.
#include "fixture.h"

// ---- sizes ------------------------------------------------------------------------------------

// The counts of their publishers. Llama 3.2 1B and Llama 2 7B by their published dimensions.
TEST(known_models_have_their_size) {
    static const struct {
        const char *options;
        int64_t parameters;
    } rows[] = {
        {"--model gpt2-124m", 124439808},
        {"--model gpt2-350m", 354823168},
        {"--model gpt2-774m", 774030080},
        {"--model gpt2-1558m", 1557611200},
        {"--model llama-3-8b", 8030261248},
        {"--model qwen3-0.6b", 596049920},
        {"--model qwen2.5-0.5b", 494032768},
        {"--model smollm2-135m", 134515008},
        {"--arch llama --num-layers 16 --hidden-size 2048 --num-attention-heads 32 "
         "--num-query-groups 8 --ffn-hidden-size 8192 --vocab-size 128256",
         1235814400},
        {"--arch llama --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
         "--ffn-hidden-size 11008 --vocab-size 32000 --untie-embeddings-and-output-weights",
         6738415616},
    };
    EACH (row, rows) {
        CLOSED(param_layout_free) ParamLayout layout = layout_of(row->options);
        CHECK_EQUAL(layout.num_parameters, row->parameters);
    }
}

// ---- the parameter space ----------------------------------------------------------------------

static const char *const models[] = {
    "--arch gpt2 --num-layers 3 --hidden-size 36 --num-attention-heads 3 --vocab-size 61 "
    "--make-vocab-size-divisible-by 8 --seq-length 13 --max-position-embeddings 17",
    "--arch gpt2 --num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 5 "
    "--make-vocab-size-divisible-by 1 --seq-length 3 --untie-embeddings-and-output-weights",
    "--arch llama --num-layers 2 --hidden-size 40 --num-attention-heads 10 --num-query-groups 2 "
    "--ffn-hidden-size 27 --vocab-size 61",
    "--arch llama --num-layers 5 --hidden-size 48 --num-attention-heads 6 --num-query-groups 1 "
    "--vocab-size 61 --make-vocab-size-divisible-by 16 --untie-embeddings-and-output-weights",
    "--model llama-3-8b",
    "--arch llama --num-layers 3 --hidden-size 40 --num-attention-heads 3 --num-query-groups 1 "
    "--kv-channels 18 --qk-layernorm --vocab-size 61",
    "--model qwen2.5-0.5b",
};
enum { MODELS = 7 };

static bool model_should_have(const ModelConfig *c, int id) {
    bool gpt2 = c->arch == ARCH_GPT2;
    switch (id) {
    case TENSOR_HEAD_WEIGHT: return !c->tied_head;
    case TENSOR_QKV_BIAS: return gpt2 || c->qkv_bias;
    case TENSOR_QUERY_NORM_WEIGHT:
    case TENSOR_KEY_NORM_WEIGHT: return c->qk_norm;
    default: break;
    }
    const char *name = tensor_row((TensorId)id)->name;
    return gpt2 || (strstr(name, "bias") == NULL && strstr(name, "position") == NULL);
}

// Counts tensors that overlap, are not aligned, or have more than a gap between them.
static int misplaced(const ParamLayout *layout) {
    int errors = layout->params[0].offset != 0;
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        int64_t end = p->offset + param_size(p);
        int64_t next = i + 1 < layout->count ? p[1].offset : layout->size;
        errors += p->offset % PARAM_ALIGN != 0 || next < end || next >= end + PARAM_ALIGN;
    }
    return errors;
}

// Counts buckets that do not follow each other from 0 to the end, or have the wrong tensors: they
// must have the embeddings, one block each, and the rest.
static int wrong_buckets(const ParamLayout *layout) {
    int last = layout->num_buckets - 1,
        errors = layout->num_buckets != layout->config.num_layers + 2;
    errors += layout->buckets[0].begin != 0 || layout->buckets[last].end != layout->size;
    for (int b = 0; b < last; b++) {
        errors += layout->buckets[b].end != layout->buckets[b + 1].begin;
    }
    for (int i = 0; i < layout->count; i++) {
        const Param *p = &layout->params[i];
        ModelSection section = tensor_row(p->id)->section;
        int b = section == SECTION_EMBEDDING ? 0 : (section == SECTION_FINAL ? last : p->layer + 1);
        const Bucket *bucket = &layout->buckets[b];
        errors += p->offset < bucket->begin || p->offset + param_size(p) > bucket->end;
    }
    return errors;
}

// Counts tensors that param_find does not find at their offset, or finds although there are none.
static int not_found(const ParamLayout *layout) {
    const ModelConfig *c = &layout->config;
    int errors = 0, found = 0;
    for (int id = 0; id < TENSOR_COUNT; id++) {
        const TensorRow *row = tensor_row((TensorId)id);
        bool block = row->section == SECTION_BLOCK, expected = model_should_have(c, id);
        for (int layer = 0; layer < (block ? c->num_layers : 1); layer++) {
            const Param *p = param_find(layout, (TensorId)id, layer);
            errors += (p != NULL) != expected;
            if (p == NULL) { continue; }
            found++;
            errors += p->id != (TensorId)id || p->layer != (block ? layer : -1);
            errors += p->rows != dim_size(c, row->rows) || p->cols != dim_size(c, row->cols);
        }
    }
    return errors + (found != layout->count);
}

TEST(the_space_is_cut_without_overlap) {
    for (int i = 0; i < MODELS; i++) {
        CLOSED(param_layout_free) ParamLayout layout = layout_of(models[i]);
        CHECK_EQUAL(misplaced(&layout), 0);
        CHECK_EQUAL(wrong_buckets(&layout), 0);
        CHECK_EQUAL(not_found(&layout), 0);
    }
}

TEST(faults_in_the_space_are_seen) {
    CLOSED(param_layout_free) ParamLayout layout = layout_of(models[0]);
    Param *p = &layout.params[7];
    p->offset++;
    CHECK(misplaced(&layout) > 0);
    p->offset += PARAM_ALIGN - 1; // aligned, but over the next one
    CHECK(misplaced(&layout) > 0);
    p->offset -= PARAM_ALIGN;
    p->layer = 1;
    CHECK(wrong_buckets(&layout) > 0 && not_found(&layout) > 0);
    p->layer = 0;
    p->rows++;
    CHECK(not_found(&layout) > 0);
    p->rows--;
    layout.buckets[2].end -= PARAM_ALIGN;
    CHECK(wrong_buckets(&layout) > 0);
    layout.buckets[2].end += PARAM_ALIGN;
    CHECK(misplaced(&layout) + wrong_buckets(&layout) + not_found(&layout) == 0);
}

// ---- initial weights --------------------------------------------------------------------------

#define INIT_MODEL                                                                            \
    "--arch gpt2 --num-layers 3 --hidden-size 66 --num-attention-heads 3 --vocab-size 301 "   \
    "--make-vocab-size-divisible-by 8 --seq-length 30 --untie-embeddings-and-output-weights " \
    "--init-method-std 0.02 "

// Whether n values can be from N(0, std): the mean, the standard deviation and the share within one
// deviation are within five standard errors, and no value is beyond six deviations.
static bool looks_normal(const float *w, int64_t n, double std) {
    double sum = 0, squares = 0, within = 0, largest = 0, count = (double)n;
    for (int64_t i = 0; i < n; i++) {
        sum += w[i];
        squares += (double)w[i] * w[i];
        within += fabs(w[i]) < std;
        largest = fmax(largest, fabs(w[i]));
    }
    double share = 0.682689;
    return fabs(sum / count) <= 5 * std / sqrt(count) && largest <= 6 * std &&
           fabs(sqrt(squares / count) - std) <= 5 * std / sqrt(2 * count) &&
           fabs(within / count - share) <= 5 * sqrt(share * (1 - share) / count);
}

static float *initial_weights(const ParamLayout *layout, uint64_t seed) {
    float *w = malloc_or_die((size_t)layout->size * sizeof(float));
    for (int64_t i = 0; i < layout->size; i++) { w[i] = NAN; }
    model_init(layout, 0, layout->size, w, seed);
    return w;
}

// Residual projections are smaller in a deeper model; --init-method-std scales all weights. Any
// part starts as in the whole.
TEST(weights_start_as_published) {
    static const struct {
        const char *options;
        int layers;
        double std;
    } rows[] = {{INIT_MODEL, 3, 0.02}, {INIT_MODEL "--num-layers 8 --init-method-std 0.1", 8, 0.1}};
    EACH (o, rows) {
        CLOSED(param_layout_free) ParamLayout layout = layout_of(o->options);
        const int64_t begin = layout.size / 3, end = 2 * begin;
        const size_t bytes = (size_t)(end - begin) * sizeof(float);
        FREED float *w = initial_weights(&layout, 1), *part = malloc_or_die(bytes);
        int matrices = 0, errors = 0;
        model_init(&layout, begin, end, part, 1);
        CHECK_BITS(part, w + begin, bytes);
        for (int i = 0; i < layout.count; i++) {
            const Param *p = &layout.params[i];
            const TensorRow *row = tensor_row(p->id);
            float *x = w + p->offset;
            int64_t n = (int64_t)(row->rows == DIM_VOCAB ? 301 : p->rows) * p->cols;
            int64_t next = i + 1 < layout.count ? p[1].offset : layout.size;
            for (int64_t j = n; j < next - p->offset; j++) { errors += x[j] != 0; }
            bool weight = strstr(row->name, "weight") != NULL,
                 norm = strstr(row->name, "norm") != NULL;
            if (weight && !norm) {
                bool residual = p->id == TENSOR_ATTENTION_OUT_WEIGHT || p->id == TENSOR_FC2_WEIGHT;
                double std = residual ? o->std / sqrt(2.0 * o->layers) : o->std;
                matrices++;
                CHECK(looks_normal(x, n, std));
                CHECK(!looks_normal(x, n, 1.2 * std) && !looks_normal(x, n, 0.8 * std));
            } else {
                for (int64_t j = 0; j < n; j++) { errors += x[j] != (weight ? 1.0f : 0.0f); }
            }
        }
        CHECK_EQUAL(errors, 0);
        CHECK_EQUAL(matrices, 3 + o->layers * 4);
    }
}

// The correlation of the first n values of two tensors.
static double correlation(const float *a, const float *b, int64_t n) {
    double ab = 0, aa = 0, bb = 0;
    for (int64_t i = 0; i < n; i++) {
        ab += (double)a[i] * b[i];
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
    }
    return fabs(ab / sqrt(aa * bb));
}

TEST(tensors_and_seeds_are_independent) {
    enum { N = 1980 }; // the smallest matrix, the position embedding; five standard errors: 0.112
    CLOSED(param_layout_free) ParamLayout layout = layout_of(INIT_MODEL);
    FREED float *w = initial_weights(&layout, 1), *other = initial_weights(&layout, 2);
    for (int i = 0; i < layout.count; i++) {
        const Param *p = &layout.params[i];
        if (tensor_row(p->id)->cols == DIM_NONE) { continue; }
        CHECK(correlation(w + p->offset, other + p->offset, N) < 0.112);
        for (int j = 0; j < i; j++) {
            const Param *q = &layout.params[j];
            if (tensor_row(q->id)->cols == DIM_NONE) { continue; }
            CHECK(correlation(w + p->offset, w + q->offset, N) < 0.112);
        }
    }
    CHECK(correlation(w, w, N) > 0.99);
}
