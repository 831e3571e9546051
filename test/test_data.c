// Shards, masks, windows, and the order of samples.
#include "../base/rng.h"
#include "../train/run_data.h"
#include "shard_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

TEST(shards_of_both_versions_read_back) {
    static const int64_t firsts[] = {65000, 70000, 0xfffffff0u};
    for (int i = 0; i < 3; i++) {
        int token_bytes = i == 0 ? 2 : 4;
        int64_t count = i < 2 ? 500 : 16;
        CLOSED(token_file_close) TokenFile s;
        write_shard("a.bin", token_bytes, firsts[i], count);
        CHECK(shard_open(&s, "a.bin"));
        CHECK_EQUAL(s.count, count);
        CHECK_EQUAL(s.token_bytes, token_bytes);
        uint32_t tokens[500];
        for (int from = 0; from < 3; from++) {
            CHECK(token_file_read(&s, from, count - from, tokens));
            for (int at = from; at < count; at++) {
                CHECK_EQUAL(tokens[at - from], firsts[i] + at);
            }
        }
    }
}

// llm.c writes shards of Llama 3's tokens with another magic number and version.
TEST(llm_c_shards_of_llama_3_are_read) {
    int32_t shard[SHARD_HEADER_BYTES / 4 + 3] = {20240801, 7, 3};
    int tokens[3] = {128000, 9906, 128255};
    TokenFile s;
    memcpy(shard + SHARD_HEADER_BYTES / 4, tokens, sizeof(tokens));
    for (int version = 7; version <= 8; version++) {
        shard[1] = version;
        blob_write("llama3.bin", shard, sizeof(shard));
        CHECK(shard_open(&s, "llama3.bin") == (version == 7));
        if (version == 8) { break; }
        uint32_t read[3];
        CHECK_EQUAL(s.count, 3);
        CHECK(token_file_read(&s, 0, 3, read) && memcmp(read, tokens, sizeof(read)) == 0);
        token_file_close(&s);
    }
}

// A shard of more than 2^32 tokens, as a sparse file.
TEST(shards_may_be_larger_than_32_bits) {
    int64_t count = (1ll << 32) + 5;
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2) {
        int32_t header[SHARD_HEADER_BYTES / 4];
        TokenFile s;
        shard_header(header, token_bytes, count);
        blob_write("huge.bin", header, sizeof(header));
        if (truncate("huge.bin", SHARD_HEADER_BYTES + count * token_bytes) != 0) {
            test_skip("no file may be that large here");
            return;
        }
        CHECK(shard_open(&s, "huge.bin"));
        CHECK_EQUAL(s.count, count);
        uint32_t last = 1;
        CHECK(token_file_read(&s, count - 1, 1, &last) && last == 0);
        token_file_close(&s);
        remove("huge.bin");
    }
}

// Reads inputs[T] and targets[T] of one window.
static bool read_window(const Dataset *data, int64_t window, int *inputs, int *targets) {
    return loader_batch(&(Loader){.data = data}, window, 1, INT64_MAX, inputs, targets, NULL);
}

// A stream whose token i is i, in shards that begin here, and where it ends.
enum { SHARDS = 8, TOKENS = 150 };
static const int begins_at[SHARDS + 1] = {0, 5, 6, 46, 48, 49, 79, 143, TOKENS};

static int shard_of(int64_t i) {
    int shard = 0;
    while (shard + 1 < SHARDS && i >= begins_at[shard + 1]) { shard++; }
    return shard;
}

static Dataset open_data(const char *pattern, int seq_length) {
    Dataset data;
    or_die(dataset_open(&data, pattern, seq_length, 1000, -1, false));
    return data;
}

// Opens the stream, in shards of both versions, with nothing beside them. Some are shorter than a
// window.
static Dataset open_stream(int seq_length) {
    for (int i = 0; i < SHARDS; i++) {
        write_shard(text_of("stream_%d.bin", i), i % 2 == 0 ? 2 : 4, begins_at[i],
                    begins_at[i + 1] - begins_at[i]);
        remove(text_of("stream_%d.bin.mask", i));
        remove(text_of("stream_%d.bin.starts", i));
    }
    return open_data("stream_*.bin", seq_length);
}

static bool matches(const Dataset *data, const char *identity) {
    return dataset_match(data, &identity, "this run") && *identity == '\0';
}

// A file's name may be a pattern that does not match the file, and may have line breaks.
TEST(any_name_is_a_shard_s) {
    static const char *const names[] = {"br[1]_x.bin", "{x,y}?.bin", "a\\*b.bin",
                                        "new\nline_1.bin"};
    EACH (name, names) {
        CLOSED(dataset_close) Dataset data = {0};
        fail("%s", "");
        write_shard(*name, 2, 0, 20);
        CHECK(dataset_open(&data, *name, 4, 1000, -1, false));
        CHECK_TEXT(error_text(), "");
        CHECK_EQUAL(data.tokens, 20);
        CHECK(data.identity != NULL && matches(&data, data.identity));
    }
}

// A name that exists is that file or folder; what follows is a pattern.
TEST(folders_that_exist_are_no_patterns) {
    static const char *const folders[] = {"a [1]", "a [1]/{b,c}*", "1", "-x", "[x]", "[x]/q?'\"\\"};
    static const struct {
        const char *pattern;
        int files;
    } rows[] = {
        {"a [1]/t_*.bin", 2},          {"a [1]/{b,c}*/t_*.bin", 2}, {"./a [1]/t_1.bin", 1},
        {"a \\[1\\]/t_*.bin", 2},      {"a [1]/{t_1,t_2}.bin", 2},  {"[1]/t_?.bin", 2},
        {"a [1]/\\{b,c\\}\\*/t_*", 2}, {"-x/t_*.bin", 2},           {"{1,-x}/t_*.bin", 4},
        {"[x]/q?'\"\\/t_*.bin", 2},    {"[x]/t_*.bin", 2},          {"a [1]/{b,c}*/no_*.bin", 0},
    };
    char path[PATH_LENGTH];
    EACH (folder, folders) {
        CHECK(folder_make(*folder));
        for (int i = 1; i <= 2; i++) {
            write_shard(path_format(path, "%s/t_%d.bin", *folder, i), 2, 0, 20);
        }
    }
    EACH (row, rows) {
        glob_t found = {0};
        CHECK_EQUAL(pattern_files(row->pattern, &found), row->files > 0 ? 0 : GLOB_NOMATCH);
        CHECK_EQUAL(found.gl_pathc, row->files);
        for (int i = 0; i < row->files; i++) {
            CHECK(pattern_matches(row->pattern, found.gl_pathv[i]));
        }
        CHECK(!pattern_matches(row->pattern, "a [1]/u_1.bin"));
        globfree(&found);
    }
    CHECK(folder_remove("[x]")); // no such folder: a pattern, too
    glob_t found = {0};
    write_shard("x.bin", 2, 0, 20);
    CHECK_EQUAL(pattern_files("[x].bin", &found), 0);
    CHECK_TEXT(found.gl_pathv[0], "x.bin");
    globfree(&found);
}

TEST(a_path_matches_as_if_it_existed) {
    static const struct {
        const char *pattern, *path;
        bool matches;
    } rows[] = {
        {"d/t_*.bin", "d/t_1.bin", true},
        {"d/t_*.bin", "e/t_1.bin", false},
        {"d/t_{0,1}.bin", "d/t_1.bin", true},
        {"d/t_{0,1}.bin", "d/t_2.bin", false},
        {"{a/t,b/t}_*.bin", "b/t_1.bin", true},
        {"{a/t,b/t}_*.bin", "c/t_1.bin", false},
        {"{a/t_*,b/t_0}.bin", "a/t_1.bin", true},
        {"{a/t_*,b/t_0}.bin", "b/t_1.bin", false},
        {"*/{t,{u,v}}_?.bin", "d/v_1.bin", true},
        {"*/{t,{u,v}}_?.bin", "d/e/v_1.bin", false},
        {"t*(1|2).bin", "t_0(1|2).bin", true},
        {"t*(1|2).bin", "t_01.bin", false},
        {"t\\{0,1\\}", "t{0,1}", true},
        {"t\\{0,1\\}", "t0", false},
        {"t,}_{,1}", "t,}_", true},
        {"t,}_{,1}", "t,}_2", false},
    };
    EACH (row, rows) { CHECK(pattern_matches(row->pattern, row->path) == row->matches); }
}

// Shards in a folder that cannot be read are not left out in silence. Root may read any folder, so
// here no file may be opened.
TEST(unreadable_folders_of_a_pattern_are_named) {
    CLOSED(dataset_close) Dataset data = {0};
    struct rlimit limit;
    CHECK(folder_make("many/a") && getrlimit(RLIMIT_NOFILE, &limit) == 0);
    write_shard("many/a/t_1.bin", 2, 0, 20);
    write_shard("many/t_2.bin", 2, 0, 20); // a file is no folder, nor is a link to nothing
    CHECK(symlink("nothing", "many/b") == 0);
    CHECK(dataset_open(&data, "{many,none}/*/t_*.bin", 4, 1000, -1, false) && data.tokens == 20);
    dataset_close(&data);
    CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){0, limit.rlim_max}) == 0);
    CHECK(!dataset_open(&data, "many/*/t_*.bin", 4, 1000, -1, false));
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK_TEXT(error_text(), "many/*/t_*.bin: many: Too many open files");
}

TEST(tokens_outside_the_vocabulary_are_named) {
    CLOSED(dataset_close) Dataset data = open_stream(10);
    int inputs[10], targets[10];
    data.vocab = 100;
    for (int64_t w = 0; w < data.windows; w++) {
        bool fine = w < 9; // window 9 has target 100
        CHECK(read_window(&data, w, inputs, targets) == fine);
    }
    CHECK_REFUSED(read_window(&data, 9, inputs, targets),
                  "stream_6.bin: token 21 is 100, outside the vocabulary of 100 (--vocab");
    dataset_close(&data);
    write_shard("max.bin", 4, 0xfffffffeu, 2); // it is not taken as negative
    CHECK(dataset_open(&data, "max.bin", 1, INT32_MAX, -1, false));
    CHECK_REFUSED(read_window(&data, 0, inputs, targets),
                  "max.bin: token 0 is 4294967294, outside the vocabulary");
}

static uint64_t folded(uint64_t key, uint64_t n, uint64_t index) {
    return (index * 2 + key) % n;
}

static bool is_permutation(uint64_t (*element)(uint64_t, uint64_t, uint64_t), uint64_t key,
                           uint64_t n) {
    FREED unsigned char *seen = calloc_or_die(n, 1);
    bool ok = true;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t at = element(key, n, i);
        ok = ok && at < n && !seen[at];
        if (at < n) { seen[at] = 1; }
    }
    return ok;
}

static int compare_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

TEST(shuffle_is_a_permutation) {
    enum { SAMPLED = 20000 };
    static uint64_t at[SAMPLED];
    for (uint64_t n = 1; n <= 300; n++) { CHECK(is_permutation(rng_permute, n * 77, n)); }
    CHECK(is_permutation(rng_permute, 5, 1000003) && is_permutation(rng_permute, 5, 65536));
    CHECK(!is_permutation(folded, 5, 300));
    static const uint64_t large[] = {(1ull << 32) - 1, (1ull << 32) + 1, (1ull << 53) + 7};
    for (int i = 0; i < 3; i++) {
        uint64_t above = 0;
        for (uint64_t j = 0; j < SAMPLED; j++) {
            at[j] = rng_permute(9, large[i], j * (large[i] / SAMPLED));
            CHECK(at[j] < large[i]);
            above += at[j] > large[i] / 2;
        }
        qsort(at, SAMPLED, sizeof(at[0]), compare_u64);
        for (int j = 1; j < SAMPLED; j++) { CHECK(at[j] != at[j - 1]); }
        CHECK_CLOSE((double)above / SAMPLED, 0.5, 0.02); // at least four standard deviations
    }
}

// ---- masks --------------------------------------------------------------------------------------

// Whether token i of a stream counts. Few tokens count, several in a row.
static bool counts(int64_t i) {
    return i / 12 % 3 == 1 && i % 5 != 0;
}

static void write_mask(const char *shard, int64_t first, int window) {
    write_bits(shard, MASK_MAGIC, counts, first, window, 0);
}

// Opens the stream, with masks beside some shards.
static Dataset open_masked(int seq_length) {
    Dataset data = open_stream(1);
    for (int i = 0; i < SHARDS; i++) {
        if (i % 4 != 3) { write_mask(data.shards[i].path, begins_at[i], 0); }
    }
    dataset_close(&data);
    return open_data("stream_*.bin", seq_length);
}

// What a stream's files say of its token i: whether it counts as a target, whether it begins a
// document.
typedef bool OfToken(int64_t i);

static bool always(int64_t i) {
    return i >= 0;
}

static bool counts_by_masks(int64_t i) {
    return shard_of(i) % 4 == 3 || counts(i);
}

static bool begins_shard(int64_t i) {
    return i == begins_at[shard_of(i)];
}

// Reads two epochs in batches of B. Counts inputs, targets and starts of documents that differ from
// the files, and targets that differ from the counts of loader_targets and of the data. planted:
// what is said of another token is expected.
static int64_t read_wrongly(const Dataset *data, int B, OfToken *target, OfToken *begins,
                            int planted) {
    int T = data->seq_length;
    int64_t wrong = 0, seen = 0, samples = 2 * data->windows;
    Loader loader = {data, 3, true, NULL};
    FREED int *inputs = malloc_or_die((size_t)(3 * B * T) * sizeof(int));
    int *targets = inputs + B * T, *starts = targets + B * T;
    for (int64_t sample = 0; sample < samples; sample += B) {
        int64_t n = 0;
        or_die(loader_batch(&loader, sample, B, samples, inputs, targets, starts));
        for (int i = 0; i < B * T; i++) {
            if (sample + i / T >= samples) { // padding
                wrong += targets[i] != -1 || starts[i] != 0;
                continue;
            }
            int64_t at = loader_window(&loader, sample + i / T) * T + i % T, next = at + 1;
            bool first = i % T == 0 || begins(at + planted),
                 counted = next < TOKENS && target(next + planted);
            wrong += inputs[i] != at || targets[i] != (counted ? next : -1);
            wrong += starts[i] != (first ? i % T : starts[i - 1]);
            n += counted;
        }
        wrong += n != loader_targets(&loader, sample, min64(B, samples - sample));
        seen += n;
    }
    return wrong + (seen != 2 * data->targets);
}

static void check_reading(const Dataset *data, OfToken *target, OfToken *begins) {
    for (int B = 1; B <= 4; B++) { CHECK_EQUAL(read_wrongly(data, B, target, begins, 0), 0); }
    CHECK(data->seq_length == 1 || read_wrongly(data, 2, target, begins, 1) > 0);
}

TEST(windows_cross_shards) {
    for (int T = 1; T < TOKENS; T++) {
        CLOSED(dataset_close) Dataset data = open_stream(T);
        CHECK(data.tokens == TOKENS && data.windows == (TOKENS - 1) / T);
        check_reading(&data, always, begins_shard);
    }
}

TEST(masks_say_which_targets_count) {
    for (int T = 1; T <= 75; T += 1 + T / 8) {
        CLOSED(dataset_close) Dataset data = open_masked(T);
        int64_t windows = 0;
        for (int64_t w = 0; w < TOKENS / T; w++) { // windows without a target are left out
            bool any = false;
            for (int64_t i = w * T + 1; i <= (w + 1) * T && i < TOKENS; i++) {
                any = any || counts_by_masks(i);
            }
            windows += any;
        }
        CHECK_EQUAL(data.windows, windows);
        check_reading(&data, counts_by_masks, begins_shard);
    }
}

// The number of a step's targets does not depend on how the step is split.
TEST(a_step_s_targets_do_not_depend_on_its_split) {
    CLOSED(dataset_close) Dataset data = open_masked(4);
    Run run = {.train = {&data, 42, true, NULL}, .group = {.ranks = 1}};
    run.options.global_batch_size = 12;
    for (run.progress.samples = 0; run.progress.samples < 100; run.progress.samples += 12) {
        int64_t parts = 0;
        for (int i = 0; i < 12; i += 3) {
            parts += loader_targets(&run.train, run.progress.samples + 12 + i, 3);
        }
        CHECK_EQUAL(run_step_targets(&run, 1), parts);
        CHECK(parts >= 12 && parts < 48); // at least one in a window
    }
}

// A mixture of a masked source and one that is not: each sample has the targets of its source.
TEST(masks_count_in_a_mixture) {
    enum { T = 4 };
    int inputs[T], targets[T], alone[T], alone_targets[T];
    CLOSED(dataset_close) Dataset data = open_masked(T);
    CLOSED(mixture_close) Mixture m;
    write_shard("whole.bin", 2, 300, 50);
    or_die(mixture_open(&m, "2 stream_*.bin 1 whole.bin", T, 1000, -1, false));
    CHECK(m.masked && m.targets == data.targets + 48 && m.windows == data.windows + 12);
    Loader loader = {m.data, 3, true, &m.blend}, masked = {&data, 3, true, NULL};
    for (int64_t sample = 0; sample < 300; sample++) {
        int64_t index, count = 0;
        int source = blend_draw(&m.blend, sample, &index);
        or_die(loader_batch(&loader, sample, 1, INT64_MAX, inputs, targets, NULL) &&
               loader_batch(&masked, index, 1, INT64_MAX, alone, alone_targets, NULL));
        for (int i = 0; i < T; i++) { count += targets[i] >= 0; }
        CHECK_EQUAL(loader_targets(&loader, sample, 1), count);
        CHECK(source == 0 || count == T);
        if (source == 0) { CHECK_BITS(targets, alone_targets, sizeof(targets)); }
        if (source == 0) { CHECK_BITS(inputs, alone, sizeof(inputs)); }
    }
}

TEST(a_mask_changes_what_a_run_has_read) {
    CLOSED(dataset_close) Dataset masked = open_masked(4);
    // the pattern matches the masks, too
    CLOSED(dataset_close) Dataset all = open_data("stream_*", 4);
    CHECK(matches(&all, masked.identity));
    CHECK(all.num_shards == masked.num_shards && all.targets == masked.targets);
    CLOSED(dataset_close) Dataset plain = open_stream(4);
    CHECK(matches(&masked, masked.identity));
    CHECK_REFUSED(matches(&plain, masked.identity), "stream_0.bin: not the");
    write_mask("stream_0.bin", 12, 0);
    CLOSED(dataset_close) Dataset other = open_data("stream_*.bin", 4);
    CHECK_REFUSED(matches(&other, masked.identity), "stream_0.bin: not the");
    CHECK_REFUSED(matches(&other, plain.identity), "stream_0.bin: not the");
}

// Documents that were packed into windows of 8 are cut by windows of another length, and by windows
// that are moved because of earlier tokens.
TEST(windows_that_cut_documents_are_known) {
    static const int lengths[] = {8, 16, 4, 12, 7}, cut[] = {0, 0, 8, 8, 8};
    write_shard("packed_0.bin", 2, 0, 32);
    write_mask("packed_0.bin", 0, 8);
    for (int i = 0; i < COUNT(lengths); i++) {
        CLOSED(dataset_close) Dataset data = open_data("packed_0.bin", lengths[i]);
        CHECK_EQUAL(data.cuts, cut[i]);
    }
    write_shard("packed_1.bin", 2, 0, 32);
    write_mask("packed_1.bin", 0, 8);
    for (int before = 31; before <= 32; before++) {
        write_shard("packed_0.bin", 2, 0, before);
        remove("packed_0.bin.mask");
        CLOSED(dataset_close) Dataset data = open_data("packed_?.bin", 8);
        CHECK_EQUAL(data.cuts, before == 31 ? 8 : 0);
    }
}

// ---- documents ----------------------------------------------------------------------------------

// Whether a document begins at token i of the stream, by SHARD.starts. Documents have 1 to 31
// tokens.
static bool begins(int64_t i) {
    return i % 31 == 7 || i % 31 == 8 || i % 31 == 20 || i % 31 == 30;
}

enum { END = 47, LISTED = 2, TEMPLATED = 5 }; // the end of text; kinds of the shards below

// Opens the stream. Every fourth shard from 2 on lists its documents, shard 5 has a mask of
// conversations, and in the others token END begins one.
static Dataset open_documents(int seq_length) {
    Dataset data = open_stream(1);
    for (int i = 0; i < SHARDS; i++) {
        const char *path = data.shards[i].path;
        if (i % 4 == LISTED) { write_bits(path, STARTS_MAGIC, begins, begins_at[i], 0, 0); }
        if (i == TEMPLATED) { write_bits(path, MASK_MAGIC, counts, begins_at[i], 0, 9); }
    }
    dataset_close(&data);
    or_die(dataset_open(&data, "stream_*", seq_length, 1000, END,
                        false)); // the pattern matches all files
    return data;
}

static bool counts_in_documents(int64_t i) {
    return shard_of(i) != TEMPLATED || counts(i);
}

static bool begins_document(int64_t i) {
    bool listed = shard_of(i) % 4 == LISTED;
    return begins_shard(i) || (listed ? begins(i) : shard_of(i) != TEMPLATED && i == END);
}

TEST(documents_begin_where_the_files_say) {
    for (int T = 1; T <= 75; T += 1 + T / 8) {
        CLOSED(dataset_close) Dataset data = open_documents(T);
        check_reading(&data, counts_in_documents, begins_document);
        CHECK(data.sidecars[TEMPLATED].chat_template == 9);
    }
}

// Overwrites four bytes of a file.
static void poke(const char *path, size_t at, uint32_t value) {
    CLOSED(blob_free) Blob b = blob_read(path);
    memcpy(b.bytes + at, &value, sizeof(value));
    blob_write(path, b.bytes, b.size);
}

// A run's batches have the starts of its samples, also batches that are read in advance, and so
// have an evaluation's.
TEST(runs_get_the_starts_of_their_samples) {
    enum { T = 16, B = 2, N = B * T };
    int inputs[N], targets[N], starts[N], expected[3][N];
    CLOSED(dataset_close) Dataset data = open_documents(T);
    Run run = {.train = {&data, 42, true, NULL},
               .group = {.ranks = 2, .rank = 1},
               .options = {.micro_batch_size = B,
                           .global_batch_size = 8,
                           .train_iters = 9,
                           .reset_position_ids = true}};
    for (int step = 0; step < 9; step++, run.progress.samples += 8) {
        for (int micro = 0; micro < 2; micro++) {
            run_batch(&run, 0, micro, inputs, targets, starts);
            or_die(loader_batch(&run.train, 8 * step + (2 * micro + 1) * B, B, INT64_MAX,
                                expected[0], expected[1], expected[2]));
            CHECK_BITS(inputs, expected[0], sizeof(inputs));
            CHECK_BITS(targets, expected[1], sizeof(targets));
            CHECK_BITS(starts, expected[2], sizeof(starts));
        }
    }
    free(run.prefetched);
    or_die(mixture_open(&run.valid_data, "stream_*.bin", T, 1000, END, false));
    Loader valid = {.data = run.valid_data.data};
    for (int64_t sample = 0; sample < valid.data->windows; sample += B) {
        run_eval_batch(&run, 0, sample, inputs, targets, starts);
        or_die(loader_batch(&valid, sample, B, valid.data->windows, expected[0], expected[1],
                            expected[2]));
        CHECK_BITS(starts, expected[2], sizeof(starts));
    }
    mixture_close(&run.valid_data);
}

TEST(document_starts_change_what_a_run_has_read) {
    CLOSED(dataset_close) Dataset listed = open_documents(4);
    remove("stream_6.bin.starts");
    CLOSED(dataset_close) Dataset other = open_data("stream_*.bin", 4);
    CHECK(matches(&listed, listed.identity));
    CHECK_REFUSED(matches(&other, listed.identity), "stream_6.bin: not the");
}

TEST(bad_data_sets_are_refused) {
    static const struct {
        const char *pattern;
        int T;
        const char *expected;
    } rows[] = {
        {"nothing_*.bin", 8, "nothing_*.bin: no such file; make shards of texts with"},
        {"stream_0.bin", 5,
         "5 tokens, fewer than one sequence of 5 (--seq-length) and its target; give more, or "
         "--seq-length 4 or less"},
        {"none.bin", 4, "none of 12 tokens counts"},
        {"stream_*.bin", 4, "stream_2.bin.starts: missing; it says where"},
    };
    CLOSED(dataset_close) Dataset data = open_documents(8);
    write_shard("none.bin", 2, 0, 12);
    write_mask("none.bin", 36, 0); // 36 to 47: none of them counts
    remove("stream_2.bin.starts");
    poke("stream_2.bin", 4 * SHARD_STARTED, 1);
    EACH (row, rows) {
        Dataset bad;
        CHECK_REFUSED(dataset_open(&bad, row->pattern, row->T, 1000, -1, false), row->expected);
    }
}

TEST(data_of_conversations_are_known) {
    Dataset data = open_documents(4);
    TokenFile shard;
    CHECK(!shards_find("stream_*.bin", SHARD_STARTED, &shard));
    CHECK(!shards_find("no_*.bin", SHARD_STARTED, &shard));
    poke("stream_2.bin", 4 * SHARD_STARTED, 1);
    CHECK(shards_find("stream_*.bin", SHARD_STARTED, &shard));
    CHECK_TEXT(shard.path, "stream_2.bin");
    CHECK(shards_find("stream_*", SHARD_STARTED, &shard)); // all files
    CHECK(!shards_find("stream_1.bin", SHARD_STARTED, &shard));
    dataset_close(&data);
}

static int end_of_text;

static bool counts_after_no_end(int64_t i) {
    return counts_by_masks(i) && i != end_of_text + 1;
}

static bool begins_after_end(int64_t i) {
    return begins_shard(i) || i == end_of_text;
}

// Only the target after the end of text is left out, besides the targets that the masks leave out.
TEST(targets_after_an_end_may_be_left_out) {
    CLOSED(dataset_close) Dataset as_ever = open_masked(4);
    for (end_of_text = 0; end_of_text < TOKENS; end_of_text++) {
        CLOSED(dataset_close) Dataset data;
        or_die(dataset_open(&data, "stream_*.bin", 4, 1000, end_of_text, true));
        check_reading(&data, counts_after_no_end, begins_after_end);
        int64_t left_out = as_ever.targets - data.targets;
        CHECK(left_out >= (end_of_text == 12 + 1) && left_out <= 1);
    }
    write_shard("ends.bin", 2, 5, 9);
    CLOSED(dataset_close) Dataset one;
    or_die(dataset_open(&one, "ends.bin", 1, 1000, 5, true));
    CHECK(one.windows == 7 && one.targets == 7);
}

// How many of n samples have the same window in two loaders.
static int64_t agreement(const Loader *a, int64_t from_a, const Loader *b, int64_t from_b, int n) {
    int64_t same = 0;
    for (int i = 0; i < n; i++) {
        same += loader_window(a, from_a + i) == loader_window(b, from_b + i);
    }
    return same;
}

TEST(order_depends_on_seed_and_epoch_alone) {
    Dataset data = {.windows = 1000, .seq_length = 4};
    Loader a = {&data, 1, true, NULL}, again = a, other = {&data, 2, true, NULL},
           plain = {&data, 1, false, NULL};
    CHECK_EQUAL(agreement(&a, 0, &again, 0, 3000), 3000);
    CHECK(agreement(&a, 0, &a, 1000, 1000) < 20);     // the next epoch
    CHECK(agreement(&a, 0, &other, 0, 1000) < 20);    // another seed
    CHECK(agreement(&a, 1000, &other, 0, 1000) < 20); // nor are its epochs shifted
    CHECK(agreement(&a, 0, &other, 1000, 1000) < 20);
    for (int64_t i = 0; i < 3000; i++) { CHECK_EQUAL(loader_window(&plain, i), i % 1000); }
}
