// Checkpoints of many ranks: they are written here as each rank would write its part, and read back
// as a whole or in any split.
#include "fixture.h"

#include <cjson/cJSON.h>

enum { RANKS = 4, ELEMENTS_MAX = 100000 };
#define N "%lld" // in a list of ranges: the size of the parameter space

// Writes a rank's optimizer file, with the metadata `text` and the data of the ranges in it.
static void write_part(const Fixture *f, int rank, int ranks, const char *text) {
    static const char *const kinds[] = {"master", "exp_avg", "exp_avg_sq"};
    TensorEntry tensors[3] = {0};
    FileWriter w;
    int64_t n = f->layout.size;
    const char *path = text_of("s/step_00000001/optimizer-%d-of-%d.safetensors", rank, ranks);
    const char *metadata = text_of("{\"ranges\":\"%s\"}", text);
    for (int kind = 0; kind < 3; kind++) {
        float *to = calloc_or_die(ELEMENTS_MAX, sizeof(float));
        int64_t count = 0;
        long long begin, end;
        int length;
        for (const char *at = text; sscanf(at, "%lld:%lld%n", &begin, &end, &length) == 2;) {
            for (int64_t i = begin; i < end && count < ELEMENTS_MAX; i++, count++) {
                to[count] = i >= 0 && i < n ? f->state[kind * n + i] : 0.0f;
            }
            at += length + (at[length] == ',');
        }
        tensors[kind] = (TensorEntry){.dims = 1, .shape = {count}, .data = to};
        strcpy(tensors[kind].name, kinds[kind]);
    }
    CHECK(safetensors_write(&w, path, tensors, 3, metadata));
    for (int kind = 0; kind < 3; kind++) { free((void *)tensors[kind].data); }
}

// Saves the fixture, then replaces its optimizer file by files of several ranks, without checksums.
static void save_split(Fixture *f, int ranks, const char *const *texts) {
    static const char meta_path[] = "s/step_00000001/meta.json";
    CHECK(fixture_save(f, 1));
    CLOSED(blob_free) Blob b = blob_read(meta_path);
    cJSON *meta = cJSON_ParseWithLength((char *)b.bytes, b.size);
    cJSON_SetNumberValue(cJSON_GetObjectItem(meta, "ranks"), ranks);
    cJSON *files = cJSON_GetObjectItem(meta, "files");
    for (int r = 0; r < ranks; r++) {
        cJSON *file = cJSON_CreateObject();
        const char *name = text_of("optimizer-%d-of-%d.safetensors", r, ranks);
        cJSON_AddStringToObject(file, "name", name);
        cJSON_AddItemToArray(files, file);
    }
    char *text = cJSON_Print(meta);
    meta_seal(text, strlen(text));
    text_write(meta_path, text);
    cJSON_free(text);
    cJSON_Delete(meta);
    for (int r = 0; r < ranks; r++) {
        write_part(f, r, ranks, text_of(texts[r], (long long)f->layout.size));
    }
}

// Whether elements begin..end are read back as the fixture has them, and nothing after them is
// written.
static bool reads(const Checkpoint *c, const Fixture *f, int kind, int64_t begin, int64_t end) {
    size_t bytes = (size_t)(end - begin) * sizeof(float);
    FREED float *out = malloc_or_die(bytes + sizeof(float));
    memset(out, 0xff, bytes + sizeof(float));
    bool ok = checkpoint_read(c, kind, begin, end, out, NULL, NULL) &&
              memcmp(out, f->state + kind * f->layout.size + begin, bytes) == 0 &&
              isnan(out[end - begin]);
    return ok;
}

TEST(ranks_are_read_as_one) {
    static const struct {
        int ranks;
        const char *texts[RANKS];
    } splits[] = {
        {1, {"0:1000,1000:" N}},
        {2, {"0:64,128:1000,2000:" N, "64:128,1000:2000"}},
        {2, {"2000:" N, "0:2000"}},
        {3, {"", "0:" N, "5:5"}},
        {4, {"0:1,4:5", "1:2,5:" N, "2:3", "3:4"}},
    };
    FIXTURE(f, TINY "--save s");
    int64_t n = f.layout.size;
    EACH (split, splits) {
        CLOSED(checkpoint_close) Checkpoint c;
        save_split(&f, split->ranks, split->texts);
        CHECK(checkpoint_open(&c, "s/step_00000001", false));
        CHECK_EQUAL(c.ranks, split->ranks);
        CHECK(reads(&c, &f, 0, 0, n) && reads(&c, &f, 1, 0, n));
        for (int64_t begin = 0; begin < n; begin += 331) {
            for (int64_t end = begin; end <= n; end += 997) { CHECK(reads(&c, &f, 2, begin, end)); }
        }
        for (int64_t at = 0; at < 8; at++) { CHECK(reads(&c, &f, 0, at, at + 1)); }
        f.state[n - 1] += 1;
        CHECK(!reads(&c, &f, 0, 0, n)); // a difference would be seen
        f.state[n - 1] -= 1;
    }
}

TEST(ranges_that_lie_are_refused) {
    static const struct {
        const char *texts[2], *expected;
    } rows[] = {
        {{"0:64", "64:128"}, "element 128 of"},
        {{"0:64,128:" N, ""}, "element 64 of"},
        {{"1:" N, ""}, "element 0 of"},
        {{"", ""}, "element 0 of"},
        {{"0:" N, "0:" N}, "exactly once"},
        {{"0:" N, "7:8"}, "exactly once"},
        {{"0:65", "64:" N}, "element 65 of"},
        {{"0:64,0:64", "64:" N}, "exactly once"},
        {{"0:99999", ""}, "optimizer-0-of-2.safetensors: its list of ranges is wrong"},
        {{"0:" N, "-1:0"}, "optimizer-1-of-2.safetensors: its list of ranges is wrong"},
        {{"9223372036854775807:9223372036854775807", "0:" N}, "list of ranges is wrong"},
        {{"64:0", "0:" N}, "list of ranges is wrong"},
        {{"0:" N, "all"}, "list of ranges is wrong"},
        {{"0:" N ",x", ""}, "list of ranges is wrong"},
        {{"0-" N, ""}, "list of ranges is wrong"},
    };
    FIXTURE(f, TINY "--save s");
    EACH (row, rows) {
        Checkpoint c;
        save_split(&f, 2, row->texts);
        CHECK_REFUSED(checkpoint_open(&c, "s/step_00000001", false), row->expected);
    }
}

// A file whose length differs from its ranges, or which lacks a tensor.
TEST(wrong_tensors_are_refused) {
    static const char path[] = "s/step_00000001/optimizer-1-of-2.safetensors";
    static const char *const texts[] = {"0:64", "64:" N};
    FIXTURE(f, TINY "--save s");
    int64_t n = f.layout.size;
    for (int fault = 0; fault < 5; fault++) {
        Checkpoint c;
        FileWriter w;
        int64_t rows = n - 64 - (fault == 1);
        TensorEntry tensors[] = {
            {.name = "master", .dims = 1, .shape = {rows}, .data = f.state},
            {.name = "exp_avg", .dims = 1, .shape = {rows}, .data = f.state},
            {.name = "exp_avg_sq", .dims = 1, .shape = {rows}, .data = f.state},
        };
        save_split(&f, 2, texts);
        const char *metadata = text_of("{\"ranges\":\"64:%lld\"}", (long long)n);
        if (fault == 2) { strcpy(tensors[0].name, "slave"); }
        if (fault == 3) { tensors[1].dtype = DTYPE_I32; }
        if (fault == 4) { tensors[2].dims = 2, tensors[2].shape[1] = 1; }
        CHECK(safetensors_write(&w, path, tensors, 3, metadata));
        if (fault == 0) {
            CHECK(checkpoint_open(&c, "s/step_00000001", false));
            checkpoint_close(&c);
        } else {
            CHECK_REFUSED(checkpoint_open(&c, "s/step_00000001", false), path);
            CHECK_REFUSED(checkpoint_open(&c, "s/step_00000001", false), "is missing or not ");
        }
    }
}
