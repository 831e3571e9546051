// Scoring multiple-choice sets: which answer the model finds likeliest, by the sum of its tokens'
// log-probabilities and by their mean (as llm.c does for HellaSwag). A row is a context with one
// answer. Rows of like length go together, padded to a power of two, so that few shapes occur.
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SHORTEST = 64 };

typedef struct {
    int question, answer_index, length, answer;
} Row;

// Rows under way, and what they came to.
typedef struct {
    Run *run;
    const ChoiceSet *set;
    ChoiceModel model;
    int questions; // of the set that count
    int num_rows;
    Row *rows;
    double *sums; // of each row's losses
    int *inputs, *targets, *tokens;
    float *losses;
    int *batch; // the rows that are in the batch under way
    int batched;
} Scoring;

// The length that a row is padded to.
static int padded_length(const Run *run, int length) {
    int64_t padded = SHORTEST;
    while (padded < length - 1) { padded *= 2; }
    return (int)min64(padded, run->config.seq_length);
}

static int batch_rows(const Run *run, int padded) {
    return (int)((int64_t)run->options.micro_batch_size * run->config.seq_length / padded);
}

// This rank's rows.
static void list_rows(Scoring *s) {
    int most = s->run->config.seq_length + 1;
    for (int q = s->run->rank; q < s->questions; q += s->run->ranks) {
        for (int a = 0; a < s->set->questions[q].answers; a++) {
            Row row = {.question = q, .answer_index = a};
            row.length = choices_row(s->set, q, a, most, s->tokens, &row.answer);
            if (row.length == 0) {
                die("--eval-choices %s: answer %d of question %d has %d tokens, too many for "
                    "--seq-length %d",
                    s->set->file.path, a, q, row.answer, s->run->config.seq_length);
            }
            s->rows = realloc_or_die(s->rows, ((size_t)s->num_rows + 1) * sizeof(Row));
            s->rows[s->num_rows++] = row;
        }
    }
}

static void flush_batch(Scoring *s, int T) {
    if (s->batched == 0) { return; }
    int B = batch_rows(s->run, T);
    for (int i = s->batched * T; i < B * T; i++) {
        s->inputs[i] = 0;
        s->targets[i] = -1;
    }
    s->model.losses(s->model.trainer, s->inputs, s->targets, B, T, s->losses);
    for (int i = 0; i < s->batched; i++) {
        for (int t = 0; t < T; t++) { s->sums[s->batch[i]] += s->losses[(size_t)i * T + t]; }
    }
    s->batched = 0;
}

static void put_row(Scoring *s, int index, int T) {
    const Row *row = &s->rows[index];
    int *inputs = s->inputs + (size_t)s->batched * T,
        *targets = s->targets + (size_t)s->batched * T;
    int answer, most = s->run->config.seq_length + 1;
    choices_row(s->set, row->question, row->answer_index, most, s->tokens, &answer);
    for (int t = 0; t < T; t++) {
        inputs[t] = t + 1 < row->length ? s->tokens[t] : 0;
        targets[t] = t + 1 < row->length && t + 1 >= row->length - answer ? s->tokens[t + 1] : -1;
    }
    s->batch[s->batched++] = index;
    if (s->batched == batch_rows(s->run, T)) { flush_batch(s, T); }
}

static void score_rows(Scoring *s) {
    int longest = s->run->config.seq_length, T = 0;
    for (int length = SHORTEST; T < longest; length *= 2) {
        T = padded_length(s->run, length + 1);
        for (int i = 0; i < s->num_rows; i++) {
            if (padded_length(s->run, s->rows[i].length) == T) { put_row(s, i, T); }
        }
        flush_batch(s, T);
    }
}

// counts: questions, those right by the sum, those right by the mean. A loss that is not finite is
// never the lowest.
static void count_right(const Scoring *s, int64_t counts[3]) {
    for (int first = 0; first < s->num_rows;) {
        int question = s->rows[first].question, by_sum = -1, by_mean = -1, i = first;
        double least_sum = INFINITY, least_mean = INFINITY;
        for (; i < s->num_rows && s->rows[i].question == question; i++) {
            double sum = s->sums[i], mean = sum / s->rows[i].answer;
            if (sum < least_sum) { least_sum = sum, by_sum = i - first; }
            if (mean < least_mean) { least_mean = mean, by_mean = i - first; }
        }
        counts[0]++;
        counts[1] += by_sum == s->set->questions[question].label;
        counts[2] += by_mean == s->set->questions[question].label;
        first = i;
    }
}

static void report(Run *run, const ChoiceSet *set, const int64_t counts[3], double seconds) {
    double sum = (double)counts[1] / (double)counts[0],
           mean = (double)counts[2] / (double)counts[0];
    printf("%s after step %lld | %.2f%% right (by the mean of an answer's tokens %.2f%%) of %lld | "
           "%.1f s\n",
           set->name, (long long)run->progress.step, 100 * sum, 100 * mean, (long long)counts[0],
           seconds);
    fflush(stdout);
    MetricsRecord *r = metrics_begin("choices");
    metrics_number(r, "step", (double)run->progress.step);
    metrics_text(r, "name", set->name);
    metrics_number(r, "questions", (double)counts[0]);
    metrics_number(r, "accuracy", sum);
    metrics_number(r, "accuracy_norm", mean);
    metrics_number(r, "seconds", seconds);
    metrics_end(&run->metrics, r);
}

void run_score_set(Run *run, const ChoiceSet *set, ChoiceModel model, int64_t counts[3]) {
    int64_t limit = run->options.eval_choices_limit;
    size_t room = (size_t)run->options.micro_batch_size * (size_t)run->config.seq_length;
    Scoring s = {.run = run,
                 .set = set,
                 .model = model,
                 .questions = (int)(limit > 0 ? min64(limit, set->count) : set->count),
                 .tokens = malloc_or_die(((size_t)run->config.seq_length + 1) * sizeof(int)),
                 .inputs = malloc_or_die(2 * room * sizeof(int)),
                 .losses = malloc_or_die(room * sizeof(float)),
                 .batch = malloc_or_die(room * sizeof(int))};
    s.targets = s.inputs + room;
    list_rows(&s);
    s.sums = calloc_or_die((size_t)s.num_rows + 1, sizeof(double));
    score_rows(&s);
    count_right(&s, counts);
    if (model.sum != NULL) { model.sum(model.trainer, counts, 3); }
    free(s.tokens);
    free(s.inputs);
    free(s.losses);
    free(s.batch);
    free(s.rows);
    free(s.sums);
}

void run_score_choices(Run *run, ChoiceModel model) {
    for (int i = 0; i < run->choices.count; i++) {
        int64_t counts[3] = {0};
        double begin = wall_seconds();
        run_score_set(run, &run->choices.sets[i], model, counts);
        report(run, &run->choices.sets[i], counts, wall_seconds() - begin);
    }
}
