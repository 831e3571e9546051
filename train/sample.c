// Choosing and printing the tokens of a sample.
#include "rng.h"
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void run_print_token(const Run *run, int token) {
    if (!run->has_tokenizer) {
        printf("%d ", token);
        return;
    }
    int length;
    const unsigned char *bytes = tokenizer_decode(&run->tokenizer, token, &length);
    fwrite(bytes, 1, (size_t)length, stdout);
    if (token == run->tokenizer.end_of_text) { printf("\n---\n"); }
}

int run_first_token(const Run *run) {
    return run->has_tokenizer ? run->tokenizer.end_of_text : run->config.vocab - 1;
}

static int compare_descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? 1 : (x > y ? -1 : 0);
}

int sample_token(const Options *o, const float *logits, float *scratch, int V, int64_t place) {
    int likeliest = 0;
    for (int i = 1; i < V; i++) {
        if (logits[i] > logits[likeliest]) { likeliest = i; }
    }
    if (!(o->sample_temperature > 0)) { return likeliest; }
    float threshold = -INFINITY;
    if (o->sample_top_k > 0 && o->sample_top_k < V) {
        memcpy(scratch, logits, (size_t)V * sizeof(float));
        qsort(scratch, (size_t)V, sizeof(float), compare_descending);
        threshold = scratch[o->sample_top_k - 1];
    }
    double sum = 0, chosen;
    for (int i = 0; i < V; i++) {
        double above = (double)(logits[i] - logits[likeliest]) / o->sample_temperature;
        scratch[i] = logits[i] >= threshold ? (float)exp(above) : 0.0f;
        sum += scratch[i];
    }
    chosen = sum * rng_uniform((uint64_t)o->sample_seed, (uint64_t)place);
    for (int i = 0; i < V; i++) {
        chosen -= scratch[i];
        if (chosen < 0) { return i; }
    }
    return likeliest;
}
