// The host's part of the embedding's gradient: sorting the tokens.
#include "kernels.h"

void embedding_sort_tokens(TokenRuns out, const int *tokens, int M, int V, int *counts) {
    int run = 0, many = 0, position = 0;
    for (int v = 0; v <= V; v++) { counts[v] = 0; }
    for (int i = 0; i < M; i++) { counts[tokens[i]]++; }
    for (int v = 0; v < V; v++) { // replaces each token's count by the position of its first row
        int count = counts[v];
        if (count >= EMBEDDING_LONG_RUN) { out.runs[2 + many++] = run; }
        if (count > 0) { out.starts[run++] = position; }
        counts[v] = position;
        position += count;
    }
    out.starts[run] = M;
    out.runs[0] = run;
    out.runs[1] = many;
    for (int i = 0; i < M; i++) { out.rows[counts[tokens[i]]++] = i; }
}
