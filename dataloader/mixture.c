#include "mixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#define BLANKS " \t\n"

// Whether a word of n characters is a number, and therefore a weight.
static bool is_weight(const char *word, size_t n) {
    char text[64], *end;
    if (n == 0 || n >= sizeof(text) || strspn(word, "0123456789.eE+-") < n) { return false; }
    snprintf(text, sizeof(text), "%.*s", (int)n, word);
    strtod(text, &end);
    return *end == '\0';
}

// Returns the length of a word. A blank after a backslash belongs to the word.
static size_t word_length(const char *word) {
    size_t n = strcspn(word, BLANKS);
    while (n > 0 && word[n] != '\0' && word[n - 1] == '\\') {
        n += 1 + strcspn(word + n + 1, BLANKS);
    }
    return n;
}

static bool is_mixture(const char *text) {
    CLOSED(globfree) glob_t found = {0};
    const char *word = text + strspn(text, BLANKS);
    size_t n = word_length(word);
    if (!is_weight(word, n) || word[n] == '\0') { return false; }
    return pattern_files(text, &found) != 0;
}

// Reads one weight and its pattern, and moves *text past them.
static bool read_source(Source *source, const char **text) {
    const char *word = *text;
    int n = (int)word_length(word);
    source->weight = strtod(word, NULL);
    const char *begin = word + n + strspn(word + n, BLANKS), *end = begin, *next = begin;
    while (*next != '\0' && !is_weight(next, word_length(next))) {
        end = next + word_length(next);
        next = end + strspn(end, BLANKS);
    }
    *text = next;
    if (end == begin) { return fail("%.*s: a weight without a path after it", n, word); }
    path_format(source->pattern, "%.*s", (int)(end - begin), begin);
    return (source->weight > 0 && source->weight < 1e100) ||
           fail("%.*s %s: a weight must be above 0 and below 1e100; leave out a source that has "
                "none",
                n, word, source->pattern);
}

int sources_read(const char *text, Source **sources) {
    int count = 1;
    *sources = calloc_or_die(1, sizeof(Source));
    if (!is_mixture(text)) {
        path_format((*sources)->pattern, "%s", text);
        (*sources)->weight = 1;
        return count;
    }
    for (text += strspn(text, BLANKS); read_source(&(*sources)[count - 1], &text); count++) {
        if (*text == '\0') { return count; }
        *sources = realloc_or_die(*sources, (size_t)(count + 1) * sizeof(Source));
    }
    return 0;
}

// Writes a source's share as a line of the identity; like all lines, it begins with a checksum.
static const char *share_line(const Mixture *m, int source, char line[64]) {
    char share[40];
    int n = snprintf(share, sizeof(share), "%d/%d of the samples", m->blend.parts[source],
                     m->blend.period);
    snprintf(line, 64, "%08lx %s\n", crc32(0, (const Bytef *)share, (uInt)n), share);
    return line;
}

static void identify(Mixture *m) {
    size_t bytes;
    char line[64];
    FILE *file = open_memstream(&m->identity, &bytes);
    if (file == NULL) { die("out of memory"); }
    for (int i = 0; i < m->count; i++) {
        fprintf(file, "%s%s", m->count > 1 ? share_line(m, i, line) : "", m->data[i].identity);
    }
    fclose(file);
}

static void add_up(Mixture *m) {
    for (const Dataset *data = m->data; data < m->data + m->count; data++) {
        m->num_shards += data->num_shards;
        m->tokens += data->tokens;
        m->windows += data->windows;
        m->targets += data->targets;
        m->masked = m->masked || data->with_targets != NULL;
    }
}

bool mixture_open(Mixture *m, const char *text, int seq_length, int vocab, int document_end,
                  bool masks_ends) {
    *m = (Mixture){0};
    int count = sources_read(text, &m->sources);
    FREED double *weights = calloc_or_die((size_t)count + 1, sizeof(double));
    int least = 0;
    for (int i = 0; i < count; i++) {
        weights[i] = m->sources[i].weight;
        if (weights[i] < weights[least]) { least = i; }
    }
    bool ok = count > 0 && (blend_make(&m->blend, weights, count) ||
                            fail("%g %s: a weight below a millionth of the sum of all; leave this "
                                 "source out",
                                 weights[least], m->sources[least].pattern));
    m->data = calloc_or_die((size_t)count + 1, sizeof(Dataset));
    for (int i = 0; ok && i < count; i++) {
        ok = dataset_open(&m->data[i], m->sources[i].pattern, seq_length, vocab, document_end,
                          masks_ends);
        m->count += ok;
    }
    if (ok) {
        add_up(m);
        identify(m);
    } else {
        mixture_close(m);
    }
    return ok;
}

void mixture_close(Mixture *m) {
    for (int i = 0; i < m->count; i++) { dataset_close(&m->data[i]); }
    blend_free(&m->blend);
    free(m->data);
    free(m->sources);
    free(m->identity);
    *m = (Mixture){0};
}

bool mixture_match(const Mixture *m, const char *identity, const char *whose) {
    char line[64];
    for (int i = 0; i < m->count; i++) {
        if (m->count > 1 && !identity_next(share_line(m, i, line), &identity)) {
            return fail("%s: %d/%d of the samples, and not what %s read in its place (%.*s)",
                        m->sources[i].pattern, m->blend.parts[i], m->blend.period, whose,
                        *identity != '\0' ? (int)strcspn(identity, "\n") : 4,
                        *identity != '\0' ? identity : "none");
        }
        if (!dataset_match(&m->data[i], &identity, whose)) { return false; }
    }
    return *identity == '\0' ||
           fail("%d shard%s, and %s read more", m->num_shards, plural(m->num_shards), whose);
}

const char *mixture_shares(const Mixture *m, const Mixture *other) {
    for (const Dataset *data = other->data; data < other->data + other->count; data++) {
        const char *line = data->identity;
        for (int i = 0; i < data->num_shards; i++, line += strcspn(line, "\n") + 1) {
            for (const char *own = m->identity; own != NULL && *own != '\0';) {
                if (identity_next(line, &own)) { return data->shards[i].path; }
                own += strcspn(own, "\n") + 1;
            }
        }
    }
    return NULL;
}
