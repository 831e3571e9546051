// Scores multiple-choice sets in two ways: the model chooses the answer with the highest sum of its
// tokens' log-probabilities, or the one with the highest mean (as llm.c does for HellaSwag). A row
// is a context with one of its answers. A batch has rows of similar length, all padded to one
// length (64, 128, 256, ..., at most --seq-length), so that batches have few shapes.
#include "metrics.h"
#include "run.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

enum { SHORTEST = 64 };

typedef struct {
    int question, answer_index;
    int length, answer; // tokens of the whole row, and of the answer alone
    double loss;        // sum over the answer's tokens
} Row;

// Returns a row for every answer of each question that this rank scores.
static Row *list_rows(const Run *run, const ChoiceSet *set, int *tokens, int *num_rows) {
    int count = 0;
    Row *rows = NULL;
    for (int q = run->group.rank; q < set->count; q += run->group.ranks) {
        for (int a = 0; a < set->questions[q].answers; a++) {
            Row row = {.question = q, .answer_index = a};
            row.length = choices_row(set, q, a, run->config.seq_length + 1, tokens, &row.answer);
            assert(row.length > 0); // run_open_data has checked it
            rows = realloc_or_die(rows, ((size_t)count + 1) * sizeof(Row));
            rows[count++] = row;
        }
    }
    *num_rows = count;
    return rows;
}

// Computes the losses of those rows that have, without the last token, more than `shorter` and at
// most T tokens, in batches [B,T].
static void score_rows(Run *run, const ChoiceSet *set, ChoiceModel model, Row *rows, int num_rows,
                       int shorter, int T, int *tokens) {
    int B = (int)((int64_t)run->options.micro_batch_size * run->config.seq_length / T), n = 0;
    size_t room = (size_t)B * (size_t)T;
    FREED int *inputs = malloc_or_die(room * sizeof(int));
    FREED int *targets = malloc_or_die(room * sizeof(int));
    FREED float *losses = malloc_or_die(room * sizeof(float));
    FREED Row **batch = malloc_or_die((size_t)B * sizeof(Row *));
    for (int i = 0; i <= num_rows && run_stop_signal() == 0; i++) {
        Row *row = i < num_rows ? &rows[i] : NULL;
        if (row != NULL && row->length - 1 > shorter && row->length - 1 <= T) {
            int answer, *in = inputs + (size_t)n * T, *target = targets + (size_t)n * T;
            choices_row(set, row->question, row->answer_index, run->config.seq_length + 1, tokens,
                        &answer);
            for (int t = 0; t < T; t++) {
                in[t] = t + 1 < row->length ? tokens[t] : 0;
                bool counts = t + 1 < row->length && t + 1 >= row->length - answer;
                target[t] = counts ? tokens[t + 1] : -1;
            }
            batch[n++] = row;
        }
        if (n == 0 || (n < B && i < num_rows)) { continue; }
        int filled = 1; // rows of the batch: B or a power of two, so there are few attention plans
        while (filled < n) { filled *= 2; }
        filled = filled < B ? filled : B;
        for (size_t t = (size_t)n * T; t < (size_t)filled * T; t++) {
            inputs[t] = 0;
            targets[t] = -1;
        }
        model.losses(model.trainer, inputs, targets, filled, T, losses);
        for (int j = 0; j < n; j++) {
            for (int t = 0; t < T; t++) { batch[j]->loss += losses[(size_t)j * T + t]; }
        }
        n = 0;
    }
}

void run_score_set(Run *run, const ChoiceSet *set, ChoiceModel model, int64_t counts[3]) {
    int longest = run->config.seq_length, num_rows;
    FREED int *tokens = malloc_or_die(((size_t)longest + 1) * sizeof(int));
    FREED Row *rows = list_rows(run, set, tokens, &num_rows);
    for (int shorter = -1, T = (int)min64(SHORTEST, longest); shorter < longest;) {
        score_rows(run, set, model, rows, num_rows, shorter, T, tokens);
        shorter = T;
        T = (int)min64(2 * (int64_t)T, longest);
    }
    // an answer whose loss is NaN or infinite is never chosen
    for (int first = 0, i; first < num_rows; first = i) {
        int question = rows[first].question, by_sum = -1, by_mean = -1;
        double least_sum = INFINITY, least_mean = INFINITY;
        for (i = first; i < num_rows && rows[i].question == question; i++) {
            double sum = rows[i].loss, mean = sum / rows[i].answer;
            if (sum < least_sum) { least_sum = sum, by_sum = i - first; }
            if (mean < least_mean) { least_mean = mean, by_mean = i - first; }
        }
        counts[0]++;
        counts[1] += by_sum == set->questions[question].label;
        counts[2] += by_mean == set->questions[question].label;
    }
    if (model.sum != NULL) { model.sum(model.trainer, counts, 3); }
}

void run_score_choices(Run *run, ChoiceModel model) {
    if (run->stopping) { return; } // a signal interrupted the evaluation of the validation loss
    for (int i = 0; i < run->choices.count; i++) {
        const ChoiceSet *set = &run->choices.sets[i];
        int64_t counts[3] = {0};
        double begin = wall_seconds();
        run_score_set(run, set, model, counts);
        if (!run_part_is_whole(run)) { return; }
        double seconds = wall_seconds() - begin, questions = (double)counts[0];
        double sum = (double)counts[1] / questions, mean = (double)counts[2] / questions;
        fprintf(run->console.answers,
                "%s%s after step %lld | %.2f%% right (by the mean of an answer's tokens %.2f%%) of "
                "%s%s | %.1f s\n",
                line_start(fileno(run->console.answers)), set->name, (long long)run->progress.step,
                100 * sum, 100 * mean, format_count((char[32]){0}, counts[0]),
                set->lm_eval ? ", lm-eval's text" : "", seconds);
        console_flush(run);
        MetricsRecord *r = metrics_begin("choices");
        metrics_number(r, "step", (double)run->progress.step);
        metrics_text(r, "name", set->name);
        metrics_text(r, "text", set->lm_eval ? "lm-eval" : "fields");
        metrics_number(r, "questions", questions);
        metrics_number(r, "accuracy", sum);
        metrics_number(r, "accuracy_norm", mean);
        metrics_number(r, "seconds", seconds);
        metrics_end(&run->metrics, r);
    }
    run->progress.eval_left = false;
}
