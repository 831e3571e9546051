// Scoring multiple-choice sets: compares the trainer's answers with each row computed alone,
// without padding or batches; tests several ranks, and that scoring changes no state.
#include "trainer.h"

#include "choice_file.h"

enum { QUESTIONS = 30, ANSWERS = 4, VOCAB = 61, LENGTH = 100 };

// Questions of every length, some longer than a sequence. There are more rows of one shape than fit
// in a batch.
static void write_set(const char *path) {
    static ChoiceFile f;
    f = (ChoiceFile){.number_bytes = 4};
    for (int q = 0; q < QUESTIONS; q++) {
        int lengths[ANSWERS], context = 1 + (int)(rng_bits(7, (uint64_t)q) % (LENGTH + 40));
        for (int a = 0; a < ANSWERS; a++) {
            lengths[a] = 1 + (int)(rng_bits(8, (uint64_t)(q * ANSWERS + a)) % 30);
        }
        put_question(&f, q % ANSWERS, q % 3 == 0 ? context % 40 + 1 : context, ANSWERS, lengths,
                     VOCAB);
    }
    choice_file_write(&f, path);
}

static void open_scorer(Trainer *t, const char *options) {
    write_tokens("train.bin", 4000, VOCAB, 1);
    write_set("set.bin");
    open_trainer(t,
                 SMALL_LLAMA "--seq-length 100 --micro-batch-size 2 --num-layers 1 --eval-choices "
                             "set.bin %s",
                 options);
    disturb_weights(t, 0.3f);
}

// The sum of an answer's losses, computed from its row alone.
static double row_loss(Trainer *t, const ChoiceSet *set, int question, int a, int *answer) {
    int tokens[LENGTH + 1], n = choices_row(set, question, a, LENGTH + 1, tokens, answer);
    for (int i = 0; i + 1 < n; i++) {
        t->inputs[i] = tokens[i];
        t->targets[i] = i + 1 >= n - *answer ? tokens[i + 1] : -1;
    }
    model_forward(t, 1, n - 1, PASS_EVAL);
    return head_loss(t, n - 1, 0.0f, PASS_EVAL);
}

static void count_by_rows(Trainer *t, int64_t counts[3]) {
    const ChoiceSet *set = &t->run.choices.sets[0];
    memset(counts, 0, 3 * sizeof(int64_t));
    for (int q = 0; q < QUESTIONS; q++) {
        double sums[ANSWERS], means[ANSWERS];
        int by_sum = 0, by_mean = 0, answer;
        for (int a = 0; a < ANSWERS; a++) {
            sums[a] = row_loss(t, set, q, a, &answer);
            means[a] = sums[a] / answer;
            if (sums[a] < sums[by_sum]) { by_sum = a; }
            if (means[a] < means[by_mean]) { by_mean = a; }
        }
        counts[0]++;
        counts[1] += by_sum == set->questions[q].label;
        counts[2] += by_mean == set->questions[q].label;
    }
}

static void check_counts(const int64_t *counts, const int64_t *expected) {
    for (int i = 0; i < 3; i++) { CHECK_EQUAL(counts[i], expected[i]); }
}

static ChoiceModel model_of(Trainer *t) {
    return (ChoiceModel){.trainer = t, .losses = choice_losses};
}

TEST(scores_are_each_rows) {
    int64_t counts[3] = {0}, expected[3];
    TRAINER(t, open_scorer, "");
    count_by_rows(&t, expected);
    CHECK(expected[1] > 2 && expected[1] < 20 && expected[1] != expected[2]);
    run_score_set(&t.run, &t.run.choices.sets[0], model_of(&t), counts);
    check_counts(counts, expected);
    disturb_weights(&t, 0.3f);
    int64_t other[3] = {0};
    run_score_set(&t.run, &t.run.choices.sets[0], model_of(&t), other);
    CHECK(CAUGHT(check_counts(other, expected)));
}

TEST(ranks_share_the_questions) {
    int64_t counts[3] = {0}, sum[3] = {0};
    TRAINER(t, open_scorer, "");
    run_score_set(&t.run, &t.run.choices.sets[0], model_of(&t), counts);
    t.run.group.ranks = 3;
    for (t.run.group.rank = 0; t.run.group.rank < 3; t.run.group.rank++) {
        int64_t part[3] = {0};
        run_score_set(&t.run, &t.run.choices.sets[0], model_of(&t), part);
        CHECK_EQUAL(part[0], QUESTIONS / 3);
        for (int i = 0; i < 3; i++) { sum[i] += part[i]; }
    }
    check_counts(sum, counts);
    t.run.group.ranks = 1;
    t.run.group.rank = 0;
}

static int64_t computed_tokens;

static void count_tokens(void *trainer, const int *inputs, const int *targets, int B, int T,
                         float *losses) {
    (void)trainer, (void)inputs, (void)targets;
    computed_tokens += (int64_t)B * T;
    memset(losses, 0, (size_t)B * (size_t)T * sizeof(float));
}

// A small set in a large batch: an imported model's default is 4 x 8192 tokens and more.
TEST(a_batch_is_padded_to_twice_its_rows_at_most) {
    int64_t counts[3] = {0};
    TRAINER(t, open_scorer, "");
    t.run.options.micro_batch_size = 512;
    run_score_set(&t.run, &t.run.choices.sets[0], (ChoiceModel){.losses = count_tokens}, counts);
    CHECK_EQUAL(counts[0], QUESTIONS);
    CHECK(computed_tokens > 0 && computed_tokens <= 2 * QUESTIONS * ANSWERS * LENGTH);
}

static void add_ten(void *trainer, int64_t *values, int n) {
    (void)trainer;
    for (int i = 0; i < n; i++) { values[i] += 10; }
}

TEST(sums_go_over_the_ranks) {
    int64_t counts[3] = {0}, summed[3] = {0};
    TRAINER(t, open_scorer, "");
    ChoiceModel model = model_of(&t);
    run_score_set(&t.run, &t.run.choices.sets[0], model, counts);
    model.sum = add_ten;
    run_score_set(&t.run, &t.run.choices.sets[0], model, summed);
    for (int i = 0; i < 3; i++) { CHECK_EQUAL(summed[i], counts[i] + 10); }
}

// Scoring changes neither the learned state nor the scaling state of a run with delayed scaling.
TEST(scoring_changes_nothing) {
    TRAINER(a, open_scorer, "--fp8-format hybrid --train-iters 9");
    TRAINER(b, open_scorer, "--fp8-format hybrid --train-iters 9");
    train(&a, 2);
    train(&b, 2);
    int64_t counts[3] = {0};
    run_score_set(&a.run, &a.run.choices.sets[0], model_of(&a), counts);
    train(&a, 2);
    train(&b, 2);
    CHECK_BITS(a.weights, b.weights, (size_t)a.run.layout.size * sizeof(float));
    CHECK_BITS(a.slots, b.slots, (size_t)fp8_slot_count(&a.run.config) * sizeof(Fp8Scale));
}

TEST(losses_that_are_not_finite_answer_nothing) {
    int64_t counts[3] = {0};
    TRAINER(t, open_scorer, "");
    t.weights[param_find(&t.run.layout, TENSOR_FINAL_NORM_WEIGHT, 0)->offset] = NAN;
    run_score_set(&t.run, &t.run.choices.sets[0], model_of(&t), counts);
    CHECK(counts[0] == QUESTIONS && counts[1] == 0 && counts[2] == 0);
}

SETUP() {
    prepare_trainer();
}
