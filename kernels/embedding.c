// The host's part of the embedding's gradient: sorting the tokens.
#include "kernels.h"

void embedding_sort_tokens(const int *tokens, int M, int V, int *counts, int *rows, int *starts,
                           int *runs) {
    int run = 0, many = 0, place = 0;
    for (int v = 0; v <= V; v++) { counts[v] = 0; }
    for (int i = 0; i < M; i++) { counts[tokens[i]]++; }
    for (int v = 0; v < V; v++) { // from counts to places
        int count = counts[v];
        if (count >= EMBEDDING_LONG_RUN) { runs[2 + many++] = run; }
        if (count > 0) { starts[run++] = place; }
        counts[v] = place;
        place += count;
    }
    starts[run] = M;
    runs[0] = run;
    runs[1] = many;
    for (int i = 0; i < M; i++) { rows[counts[tokens[i]]++] = i; }
}
