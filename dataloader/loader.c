#include "loader.h"
#include "../base/rng.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

// ---- files of numbers ---------------------------------------------------------------------------

// Reads a file's header. If the file is one of llm.c's shards of Llama 3's tokens, the header is
// changed to that of our shards.
static bool read_header(TokenFile *f, TokenFileKind kind) {
    if (!file_read_at(f->file, f->path, f->header, sizeof(f->header), 0)) { return false; }
    if (kind.magic == SHARD_MAGIC && f->header[0] == LLAMA3_MAGIC && f->header[1] == 7) {
        f->header[0] = SHARD_MAGIC;
        f->header[1] = 2;
    }
    return true;
}

bool token_file_open(TokenFile *f, const char *path, TokenFileKind kind) {
    *f = (TokenFile){0};
    path_format(f->path, "%s", path);
    f->file = file_open(path, &f->bytes);
    const char *only = kind.examples[0] != NULL ? "; a pattern must match nothing else" : "";
    bool ok = f->file >= 0 &&
              (f->bytes >= SHARD_HEADER_BYTES ||
               fail("%s: %zu bytes, too short for a %s (its header alone is %d); %s%s", path,
                    f->bytes, kind.name, SHARD_HEADER_BYTES, kind.remedy, only)) &&
              read_header(f, kind) &&
              (f->header[0] == kind.magic ||
               fail("%s: magic number %d, not a %s's %d; %s%s%s", path, f->header[0], kind.name,
                    kind.magic, kind.remedy, only,
                    kind.magic == SHARD_MAGIC
                        ? ", and tokens of another program need a header (docs/data.md)"
                        : "")) &&
              (f->header[1] == 1 || f->header[1] == 2 ||
               fail("%s: %s version %d; this program reads 1 (uint16) and 2 (uint32)", path,
                    kind.name, f->header[1]));
    if (!ok) {
        token_file_close(f);
        return false;
    }
    f->token_bytes = 2 * f->header[1];
    f->count = (int64_t)(f->bytes - SHARD_HEADER_BYTES) / f->token_bytes;
    f->tokenizer = (uint32_t)f->header[SHARD_TOKENIZER];
    return true;
}

void token_file_close(TokenFile *f) {
    if (f->file >= 0) { close(f->file); }
    *f = (TokenFile){.file = -1};
}

bool token_file_read(const TokenFile *f, int64_t begin, int64_t n, uint32_t *out) {
    size_t size = (size_t)f->token_bytes;
    // reads the numbers into the end of `out`; those of 16 bits are then widened in place
    unsigned char *from = (unsigned char *)(out + n) - (size_t)n * size;
    assert(begin >= 0 && n >= 0 && n <= f->count - begin);
    if (!file_read_at(f->file, f->path, from, (size_t)n * size,
                      SHARD_HEADER_BYTES + begin * (int64_t)size)) {
        return false;
    }
    for (int64_t i = 0; size == 2 && i < n; i++, from += 2) {
        out[i] = from[0] | (uint32_t)from[1] << 8;
    }
    return true;
}

bool token_files_find(glob_t *found, const char *pattern, TokenFileKind kind) {
    int status = pattern_files(pattern, found);
    if (status == GLOB_ABORTED) { return fail("%s: %s", pattern, error_text()); }
    const char *why = status == GLOB_NOMATCH ? "no such file" : "the files cannot be listed";
    if (status != 0) {
        bool several = kind.magic == SHARD_MAGIC && strpbrk(pattern, " ,") != NULL;
        return fail("%s: %s; %s%s", pattern, why, kind.remedy,
                    several ? "; of several sources each has its weight before it: '0.7 A 0.3 B'"
                            : "");
    }
    char path[PATH_LENGTH], words[2][SHELL_WORD];
    if (path_exists(path_format(path, "%s/.", found->gl_pathv[0]))) {
        globfree(found);
        for (int i = 0; i < 2; i++) {
            shell_word(words[i], path_format(path, "%s/%s", pattern, kind.examples[i]));
        }
        return fail("%s: a folder; give a pattern that only its %ss match, such as %s or %s",
                    pattern, kind.name, words[0], words[1]);
    }
    return true;
}

// ---- shards -------------------------------------------------------------------------------------

static const TokenFileKind shard_kind = {
    SHARD_MAGIC,
    "token shard",
    "make shards of texts with ./tokenize, of other files with scripts/prepare_data",
    {"*train*.bin", "*val*.bin"}};

// Returns the number of tokens that the header of a shard, a mask or SHARD.starts gives.
static uint64_t header_count(const TokenFile *f) {
    return (uint64_t)(uint32_t)f->header[3] << 32 | (uint32_t)f->header[2];
}

bool shard_open(TokenFile *f, const char *path) {
    if (!token_file_open(f, path, shard_kind)) { return false; }
    uint64_t count = header_count(f);
    bool whole = (f->bytes - SHARD_HEADER_BYTES) % (size_t)f->token_bytes == 0;
    bool ok = (whole && count == (uint64_t)f->count) ||
              fail("%s: the header says %llu tokens, the file holds %llu%s; it is damaged or cut "
                   "short",
                   path, (unsigned long long)count, (unsigned long long)f->count,
                   whole ? "" : " and a part");
    ok = ok && (count > 0 || fail("%s: a shard without tokens", path));
    if (!ok) { token_file_close(f); }
    return ok;
}

// A kind of file beside a shard, with a bit for each of the shard's tokens.
typedef struct {
    TokenFileKind file;
    const char *ending, *word;
    int flag_index; // index of the header's number that is 1 if the shard has such a file
    const char *why;
} BitFile;

static const BitFile mask_file = {
    {MASK_MAGIC, "mask of a token shard", "scripts/prepare_data makes them", {NULL}},
    ".mask",
    "mask",
    SHARD_MASKED,
    "not all tokens of its shard count"};
static const BitFile starts_file = {
    {STARTS_MAGIC, "document list", "scripts/prepare_data makes them", {NULL}},
    ".starts",
    "document list",
    SHARD_STARTED,
    "it says where the conversations of its shard begin"};

static bool ends_in(const char *path, const char *ending) {
    size_t length = strlen(path), n = strlen(ending);
    return length >= n && strcmp(path + length - n, ending) == 0;
}

// Whether a file belongs to a shard and is read with it: a mask or SHARD.starts.
static bool is_sidecar(const char *path) {
    return ends_in(path, mask_file.ending) || ends_in(path, starts_file.ending);
}

bool shards_find(const char *pattern, int index, TokenFile *shard) {
    CLOSED(globfree) glob_t files = {0};
    bool found = false, ok = token_files_find(&files, pattern, shard_kind);
    for (size_t i = 0; ok && !found && i < files.gl_pathc; i++) {
        if (is_sidecar(files.gl_pathv[i])) { continue; }
        if (!shard_open(shard, files.gl_pathv[i])) { return false; }
        found = shard->header[index] != 0;
        close(shard->file);
        shard->file = -1;
    }
    return found;
}

void shard_header(int32_t header[SHARD_HEADER_BYTES / 4], int token_bytes, int64_t count) {
    memset(header, 0, SHARD_HEADER_BYTES);
    header[0] = SHARD_MAGIC;
    header[1] = token_bytes / 2;
    header[2] = (int32_t)(uint32_t)count;
    header[3] = (int32_t)(uint32_t)(count >> 32);
}

static int64_t modification_time(const TokenFile *f) {
    struct stat info;
    return fstat(f->file, &info) == 0 ? info.st_mtim.tv_sec * 1000000000LL + info.st_mtim.tv_nsec
                                      : 0;
}

// Computes the CRC-32 of a shard, or of 64 parts of it if the shard is larger than 4 MiB. Records
// the shard's modification time.
static bool shard_sum(TokenFile *shard, uint32_t *crc) {
    enum { PARTS = 64, PART_BYTES = 1 << 16 };
    int64_t bytes = (int64_t)shard->bytes;
    shard->changed = modification_time(shard);
    return file_sum(shard->file, shard->path, 0, bytes, PART_BYTES,
                    max64(PART_BYTES, bytes / PARTS), crc);
}

// Whether a shard has the bytes that it had when it was opened. Computes the checksum again only if
// the modification time differs.
static bool shard_unchanged(TokenFile *shard) {
    uint32_t crc = shard->crc;
    if (modification_time(shard) == shard->changed) { return true; }
    return shard_sum(shard, &crc) &&
           (crc == shard->crc || fail("%s: overwritten while it was read", shard->path));
}

// Whether a file of bits is undamaged and belongs to this shard.
static bool bits_fit(const TokenFile *f, const char *word, const TokenFile *shard) {
    enum { PIECE = 1 << 20 };
    const int32_t *header = f->header;
    int64_t count = (int64_t)header_count(f);
    int64_t bytes = (shard->count + MASK_BITS - 1) / MASK_BITS * (MASK_BITS / 8);
    uint32_t sum;
    if (count != shard->count || (uint32_t)header[MASK_SHARD] != shard->crc) {
        return fail("%s: the %s of another shard, not of the one beside it; prepare the data again",
                    f->path, word);
    }
    if (header[1] != 1 || header[MASK_WINDOW] < 0 ||
        (int64_t)f->bytes != SHARD_HEADER_BYTES + bytes) {
        return fail("%s: %zu bytes, not the %lld of a %s of %lld tokens; it is damaged or cut "
                    "short",
                    f->path, f->bytes, (long long)(SHARD_HEADER_BYTES + bytes), word,
                    (long long)count);
    }
    return file_sum(f->file, f->path, SHARD_HEADER_BYTES, (int64_t)f->bytes, PIECE, PIECE, &sum) &&
           (sum == (uint32_t)header[MASK_SUM] ||
            fail("%s: not what its checksum says; it is damaged", f->path));
}

// Opens a file of bits beside a shard, and extends *crc by the CRC-32 of the file's numbers.
// bits->file is -1 if there is no such file.
static bool open_bits(TokenFile *bits, const BitFile *kind, const TokenFile *shard, uint32_t *crc) {
    char path[PATH_LENGTH];
    path_format(path, "%s%s", shard->path, kind->ending);
    *bits = (TokenFile){.file = -1};
    if (!path_exists(path)) {
        return shard->header[kind->flag_index] == 0 ||
               fail("%s: missing; %s, so it must be copied along", path, kind->why);
    }
    if (!token_file_open(bits, path, kind->file)) { return false; }
    if (!bits_fit(bits, kind->word, shard)) {
        token_file_close(bits);
        return false;
    }
    *crc = (uint32_t)crc32_z(*crc, (const Bytef *)&bits->header[MASK_SUM], sizeof(int32_t));
    return true;
}

static bool bit_of(const uint32_t *numbers, int64_t i) {
    return (numbers[i / MASK_BITS] >> i % MASK_BITS & 1) != 0;
}

// Reads the mask of the shard that was added last, if it has one, and extends *crc (open_bits).
static bool read_mask(Dataset *data, uint32_t *crc) {
    const TokenFile *shard = &data->shards[data->num_shards - 1];
    Sidecar *sidecar = &data->sidecars[data->num_shards - 1];
    CLOSED(token_file_close) TokenFile mask = {.file = -1};
    if (!open_bits(&mask, &mask_file, shard, crc)) { return false; }
    if (mask.file < 0) { return true; }
    int packed = mask.header[MASK_WINDOW];
    int64_t begin = data->tokens - shard->count;
    if (packed > 0 && (data->seq_length % packed != 0 || begin % packed != 0)) {
        data->cuts = packed;
    }
    sidecar->chat_template = mask.header[MASK_TEMPLATE];
    sidecar->mask = malloc_or_die((size_t)mask.count * sizeof(uint32_t));
    return token_file_read(&mask, 0, mask.count, sidecar->mask);
}

// Appends a shard's line to data->identity.
static bool identify(Dataset *data, TokenFile *shard) {
    const char *name = path_name(shard->path);
    if (!shard_sum(shard, &shard->crc)) { return false; }
    uint32_t crc = shard->crc;
    // SHARD.starts stays open: loader_batch reads bits of it
    TokenFile *starts = &data->sidecars[data->num_shards - 1].starts;
    if (!read_mask(data, &crc) || !open_bits(starts, &starts_file, shard, &crc)) { return false; }
    size_t used = data->identity != NULL ? strlen(data->identity) : 0;
    size_t room = used + strlen(name) + sizeof("01234567 \n");
    data->identity = realloc_or_die(data->identity, room);
    char *line = data->identity + used;
    snprintf(line, room - used, "%08x %s", crc, name);
    for (; *line != '\0'; line++) { *line = iscntrl((unsigned char)*line) ? '?' : *line; }
    strcpy(line, "\n");
    return true;
}

// Returns how many of the tokens [begin, begin + n) of the stream count as targets. Sets the others
// to -1 in targets[n]; targets may be NULL. inputs[n]: the token before each of these tokens; used
// only with data->masks_ends.
static int leave_out(const Dataset *data, int64_t begin, int64_t n, const int *inputs,
                     int *targets) {
    int s = 0, counted = 0;
    for (int64_t i = 0; i < n; i++, begin++) {
        for (; begin >= data->shards[s].count; s++) { begin -= data->shards[s].count; }
        const uint32_t *mask = data->sidecars[s].mask;
        bool ends = data->masks_ends && inputs[i] == data->document_end;
        bool counts = !ends && (mask == NULL || bit_of(mask, begin));
        counted += counts;
        if (!counts && targets != NULL) { targets[i] = -1; }
    }
    return counted;
}

// Returns the number of targets of the window at `begin`. The last window of the stream may have
// one less.
static int64_t targets_after(const Dataset *data, int64_t begin) {
    return min64(data->seq_length, data->tokens - begin - 1);
}

static bool read_stream(const Dataset *data, int64_t begin, int64_t n, int *out);

// Lists the windows in which some target counts.
static bool list_windows(Dataset *data) {
    int T = data->seq_length;
    int64_t all = data->tokens / T;
    FREED int *inputs = malloc_or_die((size_t)T * sizeof(int));
    data->windows = data->targets = 0;
    data->with_targets = malloc_or_die((size_t)max64(1, all) * sizeof(MaskedWindow));
    for (int64_t w = 0; w < all; w++) {
        int64_t begin = w * T;
        if (data->masks_ends && !read_stream(data, begin, T, inputs)) { return false; }
        for (int t = 0; data->masks_ends && t < T; t++) {
            data->ends += inputs[t] == data->document_end;
        }
        int targets = leave_out(data, begin + 1, targets_after(data, begin), inputs, NULL);
        if (targets == 0) { continue; }
        data->with_targets[data->windows++] = (MaskedWindow){w, targets};
        data->targets += targets;
    }
    return true;
}

bool dataset_open(Dataset *data, const char *pattern, int seq_length, int vocab, int document_end,
                  bool masks_ends) {
    *data = (Dataset){.seq_length = seq_length,
                      .vocab = vocab,
                      .document_end = document_end,
                      .masks_ends = masks_ends};
    CLOSED(globfree) glob_t found = {0};
    if (!token_files_find(&found, pattern, shard_kind)) { return false; }
    data->shards = calloc_or_die(found.gl_pathc, sizeof(TokenFile));
    data->sidecars = calloc_or_die(found.gl_pathc, sizeof(Sidecar));
    bool ok = true, masked = false;
    for (size_t i = 0; ok && i < found.gl_pathc; i++) {
        TokenFile *shard = &data->shards[data->num_shards];
        if (is_sidecar(found.gl_pathv[i])) { continue; }
        ok = shard_open(shard, found.gl_pathv[i]);
        if (!ok) { break; }
        Sidecar *sidecar = &data->sidecars[data->num_shards++];
        sidecar->starts.file = -1;
        data->tokens += shard->count;
        ok = identify(data, shard);
        masked = masked || sidecar->mask != NULL;
    }
    data->windows = (data->tokens - !masked) / seq_length;
    data->targets = data->windows * seq_length;
    ok = ok && (data->windows > 0 ||
                fail("%s: %lld tokens, fewer than one sequence of %d (--seq-length) and its "
                     "target; give more, or --seq-length %lld or less",
                     pattern, (long long)data->tokens, seq_length,
                     (long long)max64(1, data->tokens - !masked)));
    ok = ok && (!(masked || masks_ends) || list_windows(data));
    ok = ok && (data->windows > 0 ||
                fail("%s: none of %lld tokens counts, by the masks beside them%s", pattern,
                     (long long)data->tokens, masks_ends ? " and --eod-mask-loss" : ""));
    if (!ok) { dataset_close(data); }
    return ok;
}

void dataset_close(Dataset *data) {
    for (int i = 0; i < data->num_shards; i++) {
        token_file_close(&data->shards[i]);
        token_file_close(&data->sidecars[i].starts);
        free(data->sidecars[i].mask);
    }
    free(data->shards);
    free(data->sidecars);
    free(data->with_targets);
    free(data->identity);
    *data = (Dataset){0};
}

enum { CRC_DIGITS = 8 };

const char *identity_sum(const char *identity, char out[9]) {
    uLong sum = crc32(0, NULL, 0);
    for (const char *line = identity; strlen(line) > CRC_DIGITS; line += *line == '\n') {
        sum = crc32(sum, (const Bytef *)line, CRC_DIGITS);
        line += strcspn(line, "\n");
    }
    snprintf(out, 9, "%08lx", sum);
    return out;
}

bool identity_next(const char *line, const char **identity) {
    if (strncmp(line, *identity, CRC_DIGITS) != 0) { return false; }
    *identity += strcspn(*identity, "\n");
    *identity += **identity == '\n';
    return true;
}

bool dataset_match(const Dataset *data, const char **identity, const char *whose) {
    const char *own = data->identity;
    for (int i = 0; i < data->num_shards; i++, own += strcspn(own, "\n") + 1) {
        const char *theirs = *identity;
        if (identity_next(own, identity)) { continue; }
        return fail("%s: not the shard that %s read in its place (%.*s)", data->shards[i].path,
                    whose, *theirs != '\0' ? (int)strcspn(theirs, "\n") : 4,
                    *theirs != '\0' ? theirs : "none");
    }
    return true;
}

// ---- windows and batches ------------------------------------------------------------------------

// Reads tokens [begin, begin + n) of the stream, across shards.
static bool read_stream(const Dataset *data, int64_t begin, int64_t n, int *out) {
    TokenFile *s = data->shards;
    for (; begin >= s->count; s++) { begin -= s->count; }
    for (; n > 0; s++, begin = 0) {
        int64_t part = min64(n, s->count - begin);
        if (!token_file_read(s, begin, part, (uint32_t *)out) || !shard_unchanged(s)) {
            return false;
        }
        for (int64_t i = 0; i < part; i++) {
            if ((uint32_t)out[i] < (uint32_t)data->vocab) { continue; }
            return fail("%s: token %lld is %u, outside the vocabulary of %d (--vocab-size)",
                        s->path, (long long)(begin + i), (uint32_t)out[i], data->vocab);
        }
        out += part;
        n -= part;
    }
    return true;
}

// Sets starts[T] for the window at `begin`, as loader_batch returns them.
static bool find_starts(const Dataset *data, int64_t begin, const int *inputs, int *starts) {
    int T = data->seq_length, s = 0;
    FREED uint32_t *bits = malloc_or_die(((size_t)T / MASK_BITS + 2) * sizeof(uint32_t));
    for (; begin >= data->shards[s].count; s++) { begin -= data->shards[s].count; }
    for (int t = 0; t < T; s++, begin = 0) {
        const Sidecar *sidecar = &data->sidecars[s];
        bool listed = sidecar->starts.file >= 0;
        bool by_token = !listed && sidecar->chat_template == 0;
        int64_t end = begin + min64(T - t, data->shards[s].count - begin);
        int64_t first = begin / MASK_BITS, numbers = (end - 1) / MASK_BITS + 1 - first;
        if (listed && !token_file_read(&sidecar->starts, first, numbers, bits)) { return false; }
        for (int64_t i = begin; i < end; i++, t++) {
            bool starts_one = t == 0 || i == 0 || (by_token && inputs[t] == data->document_end) ||
                              (listed && bit_of(bits, i - first * MASK_BITS));
            starts[t] = starts_one ? t : starts[t - 1];
        }
    }
    return true;
}

// Finds the source of a sample, and the sample's window in it.
static const Dataset *find_window(const Loader *loader, int64_t sample, MaskedWindow *window) {
    int source = loader->blend != NULL ? blend_draw(loader->blend, sample, &sample) : 0;
    const Dataset *data = &loader->data[source];
    int64_t epoch = sample / data->windows, index = sample % data->windows;
    if (loader->shuffle) { // each source has a seed of its own; the first source has the run's
        uint64_t other = rng_bits(loader->seed, UINT64_MAX - (uint64_t)source);
        uint64_t key = rng_bits(source == 0 ? loader->seed : other, (uint64_t)epoch);
        index = (int64_t)rng_permute(key, (uint64_t)data->windows, (uint64_t)index);
    }
    *window = data->with_targets != NULL ? data->with_targets[index]
                                         : (MaskedWindow){index, data->seq_length};
    return data;
}

int64_t loader_window(const Loader *loader, int64_t sample) {
    MaskedWindow found;
    find_window(loader, sample, &found);
    return found.window;
}

int64_t loader_targets(const Loader *loader, int64_t sample, int64_t count) {
    int64_t sum = 0;
    for (MaskedWindow found; count > 0; count--, sample++) {
        find_window(loader, sample, &found);
        sum += found.targets;
    }
    return sum;
}

bool loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                  int *targets, int *starts) {
    int T = loader->data->seq_length;
    for (int i = 0; i < count; i++, sample++, inputs += T, targets += T) {
        int *own_starts = starts != NULL ? starts + (int64_t)i * T : NULL;
        memset(inputs, 0, (size_t)T * sizeof(int));
        memset(targets, -1, (size_t)T * sizeof(int)); // every int is -1
        if (starts != NULL) { memset(own_starts, 0, (size_t)T * sizeof(int)); }
        if (sample >= end) { continue; }
        MaskedWindow found;
        const Dataset *data = find_window(loader, sample, &found);
        int64_t begin = found.window * T, n = targets_after(data, begin);
        if (!read_stream(data, begin, 1, inputs) || !read_stream(data, begin + 1, n, targets)) {
            return false;
        }
        memcpy(inputs + 1, targets, (size_t)(T - 1) * sizeof(int));
        if (data->with_targets != NULL) { leave_out(data, begin + 1, n, inputs, targets); }
        if (starts != NULL && !find_starts(data, begin, inputs, own_starts)) { return false; }
    }
    return true;
}
