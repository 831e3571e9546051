#include "safetensors.h"
#include "../kernels/fp8_format.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HEADER_MAX = 100 << 20 };

// Indexed by Dtype. A file may have tensors of the types after F8_E4M3, but the trainers do not
// read them.
static const struct {
    const char *name;
    int bytes;
} dtypes[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2},     {"I32", 4},  {"I64", 8},
              {"U8", 1},  {"I8", 1},   {"F8_E4M3", 1}, {"BOOL", 1}, {"I16", 2},
              {"U16", 2}, {"U32", 4},  {"U64", 8},     {"F64", 8},  {"F8_E5M2", 1}};

enum { DTYPES = sizeof(dtypes) / sizeof(dtypes[0]) };

int dtype_bytes(Dtype dtype) {
    return dtypes[dtype].bytes;
}

const char *dtype_name(Dtype dtype) {
    return dtypes[dtype].name;
}

// ---- reading ------------------------------------------------------------------------------------

cJSON *json_parse(const char *text, size_t bytes) {
    const char *end = NULL;
    cJSON *json = cJSON_ParseWithLengthOpts(text, bytes, &end, false);
    for (; json != NULL && end < text + bytes; end++) {
        if (strchr(" \t\r\n", *end) == NULL || *end == '\0') {
            cJSON_Delete(json);
            return NULL;
        }
    }
    return json;
}

void json_close(cJSON **json) {
    cJSON_Delete(*json);
}

int64_t json_count(const cJSON *item) {
    double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
    return value >= 0 && value < 0x1p53 && value == floor(value) ? (int64_t)value : -1;
}

double json_number(const cJSON *object, const char *name, double otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNumber(item) ? item->valuedouble : otherwise;
}

const char *json_text(const cJSON *object, const char *name, const char *otherwise) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsString(item) ? item->valuestring : otherwise;
}

// Returns the dtype with this name, or DTYPES if there is none.
static int dtype_of(const char *name) {
    int type = 0;
    while (type < DTYPES && strcmp(name, dtypes[type].name) != 0) { type++; }
    return type;
}

// Reads an entry "name": {...}.
static bool read_entry(TensorEntry *e, const cJSON *item) {
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
    int type = dtype_of(json_text(item, "dtype", ""));
    *e = (TensorEntry){.dtype = (Dtype)type};
    if (strlen(item->string) >= TENSOR_NAME || type == DTYPES || !cJSON_IsArray(shape) ||
        !cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2) {
        return false;
    }
    e->begin = json_count(offsets->child);
    e->end = json_count(offsets->child->next);
    if (e->begin < 0 || e->begin > e->end) { return false; }
    strcpy(e->name, item->string);
    int64_t elements = 1;
    const cJSON *dim;
    cJSON_ArrayForEach(dim, shape) {
        int64_t size = json_count(dim);
        if (e->dims == TENSOR_DIMS || size < 0) { return false; }
        if (size > 0 && elements > INT64_MAX / 8 / size) { return false; }
        elements *= size;
        e->shape[e->dims++] = size;
    }
    return e->end - e->begin == elements * dtype_bytes(e->dtype);
}

static int compare_entries(const void *a, const void *b) {
    const TensorEntry *x = a, *y = b;
    if (x->begin != y->begin) { return x->begin < y->begin ? -1 : 1; }
    if (x->end != y->end) { return x->end < y->end ? -1 : 1; }
    return strcmp(x->name, y->name);
}

static bool fail_entry(const SafeTensors *st, const cJSON *item) {
    const char *dtype = json_text(item, "dtype", "");
    if (dtype[0] == '\0' || dtype_of(dtype) < DTYPES) {
        return fail("%s: the header's entry for '%.100s' is wrong", st->path, item->string);
    }
    return fail("%s: tensor '%.100s': dtype %.20s is not read", st->path, item->string, dtype);
}

// Sorts the entries by begin. Fails unless their data fill the file, without gaps or overlaps.
static bool check_offsets(SafeTensors *st, int64_t data_bytes) {
    int64_t end = 0;
    int i = 0;
    qsort(st->entries, (size_t)st->count, sizeof(TensorEntry), compare_entries);
    for (; i < st->count && st->entries[i].begin <= end; end = st->entries[i++].end) {
        if (st->entries[i].begin < end) {
            return fail("%s: tensors '%s' and '%s' overlap", st->path, st->entries[i - 1].name,
                        st->entries[i].name);
        }
    }
    int64_t next = i < st->count ? st->entries[i].begin : data_bytes;
    if (next > end) {
        return fail("%s: bytes %lld to %lld of its data are no tensor's; download or copy it again",
                    st->path, (long long)end, (long long)next);
    }
    return next == end || fail("%s: its data are %lld bytes, %lld by the header: it is cut short; "
                               "download or copy it again",
                               st->path, (long long)data_bytes, (long long)end);
}

static bool read_header(SafeTensors *st, size_t bytes) {
    uint64_t length;
    if (bytes < sizeof(length)) {
        return fail("%s: %zu bytes, too short for safetensors", st->path, bytes);
    }
    if (!file_read_at(st->file, st->path, &length, sizeof(length), 0)) { return false; }
    if (length > bytes - sizeof(length) || length > HEADER_MAX) {
        return fail("%s: the header says it is %llu bytes long; the file is %zu, and 100 MiB at "
                    "most are allowed",
                    st->path, (unsigned long long)length, bytes);
    }
    st->data = (int64_t)(sizeof(length) + length);
    FREED char *text = malloc_or_die(length);
    if (!file_read_at(st->file, st->path, text, length, sizeof(length))) { return false; }
    CLOSED(json_close) cJSON *header = json_parse(text, length);
    const cJSON *item;
    if (!cJSON_IsObject(header)) { return fail("%s: the header is not JSON", st->path); }
    st->entries = calloc_or_die((size_t)cJSON_GetArraySize(header), sizeof(TensorEntry));
    cJSON_ArrayForEach(item, header) {
        if (strcmp(item->string, "__metadata__") == 0) {
            free(st->metadata);
            st->metadata = cJSON_PrintUnformatted(item);
        } else if (!read_entry(&st->entries[st->count++], item)) {
            return fail_entry(st, item);
        }
    }
    return check_offsets(st, (int64_t)bytes - st->data);
}

bool safetensors_open(SafeTensors *st, const char *path) {
    size_t bytes;
    *st = (SafeTensors){.file = file_open(path, &bytes)};
    if (st->file < 0) { return false; }
    path_format(st->path, "%s", path);
    if (read_header(st, bytes)) { return true; }
    safetensors_close(st);
    return false;
}

void safetensors_close(SafeTensors *st) {
    if (st->path[0] != '\0') { close(st->file); }
    free(st->entries);
    free(st->metadata);
    *st = (SafeTensors){0};
}

const TensorEntry *safetensors_find(const SafeTensors *st, const char *name) {
    for (int i = 0; i < st->count; i++) {
        if (strcmp(st->entries[i].name, name) == 0) { return &st->entries[i]; }
    }
    return NULL;
}

static float half_decode(uint16_t code) {
    uint32_t sign = (uint32_t)(code & 0x8000u) << 16, exponent = code >> 10 & 31u;
    uint32_t mantissa = code & 0x3ffu;
    if (exponent == 31) { return float_from_bits(sign | 0x7f800000u | mantissa << 13); }
    if (exponent == 0) { return float_from_bits(sign | float_bits((float)mantissa * 0x1p-24f)); }
    return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

bool safetensors_read(const SafeTensors *st, const TensorEntry *e, int64_t begin, int64_t n,
                      void *out) {
    int size = dtype_bytes(e->dtype);
    assert(begin >= 0 && e->begin + (begin + n) * size <= e->end);
    return file_read_at(st->file, st->path, out, (size_t)(n * size),
                        st->data + e->begin + begin * size);
}

bool safetensors_read_floats(const SafeTensors *st, const TensorEntry *e, int64_t begin, int64_t n,
                             float *out) {
    enum { PIECE = 1 << 16 };
    assert(e->dtype == DTYPE_F32 || e->dtype == DTYPE_BF16 || e->dtype == DTYPE_F16);
    if (e->dtype == DTYPE_F32) { return safetensors_read(st, e, begin, n, out); }
    FREED uint16_t *codes = malloc_or_die((size_t)min64(PIECE, n) * sizeof(uint16_t));
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t piece = min64(PIECE, n - at);
        if (!safetensors_read(st, e, begin + at, piece, codes)) { return false; }
        for (int64_t i = 0; i < piece; i++) {
            out[at + i] = e->dtype == DTYPE_BF16 ? bf16_decode(codes[i]) : half_decode(codes[i]);
        }
    }
    return true;
}

// ---- writing ------------------------------------------------------------------------------------

TensorEntry tensor_entry(const char *name, Dtype dtype, int64_t rows, int64_t columns,
                         const void *data) {
    int dims = columns > 0 ? 2 : 1;
    TensorEntry t = {.dtype = dtype, .dims = dims, .shape = {rows, columns}, .data = data};
    snprintf(t.name, TENSOR_NAME, "%s", name);
    return t;
}

// Writes data [cols,rows] as [rows,cols], STRIP rows at a time.
static void write_transposed(FileWriter *w, const TensorEntry *t) {
    enum { STRIP = 64 };
    int64_t rows = t->shape[0], cols = t->shape[1];
    size_t size = (size_t)dtype_bytes(t->dtype);
    FREED char *strip = malloc_or_die((size_t)(STRIP * cols) * size);
    for (int64_t begin = 0; begin < rows; begin += STRIP) {
        int64_t n = min64(STRIP, rows - begin);
        for (int64_t c = 0; c < cols; c++) {
            const char *from = (const char *)t->data + (size_t)(c * rows + begin) * size;
            for (int64_t r = 0; r < n; r++) {
                memcpy(strip + (size_t)(r * cols + c) * size, from + (size_t)r * size, size);
            }
        }
        writer_write(w, strip, (size_t)(n * cols) * size);
    }
}

bool safetensors_write(FileWriter *w, const char *path, TensorEntry *tensors, int count,
                       const char *metadata) {
    static const char spaces[8] = "       ";
    int64_t end = 0;
    if (!writer_open(w, path)) { return false; }
    CLOSED(json_close) cJSON *header = cJSON_CreateObject();
    if (metadata != NULL) { cJSON_AddRawToObject(header, "__metadata__", metadata); }
    for (TensorEntry *t = tensors; t < tensors + count; t++) {
        double shape[TENSOR_DIMS];
        t->begin = end;
        int64_t bytes = dtype_bytes(t->dtype);
        for (int d = 0; d < t->dims; d++) { bytes *= t->shape[d], shape[d] = (double)t->shape[d]; }
        t->end = end += bytes;
        cJSON *item = cJSON_AddObjectToObject(header, t->name);
        cJSON_AddStringToObject(item, "dtype", dtype_name(t->dtype));
        cJSON_AddItemToObject(item, "shape", cJSON_CreateDoubleArray(shape, t->dims));
        cJSON_AddItemToObject(
            item, "data_offsets",
            cJSON_CreateDoubleArray((double[]){(double)t->begin, (double)t->end}, 2));
    }
    FREED char *text = cJSON_PrintUnformatted(header);
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    writer_write(w, &padded, sizeof(padded));
    writer_write(w, text, length);
    writer_write(w, spaces, padded - length);
    for (const TensorEntry *t = tensors; t < tensors + count; t++) {
        if (t->transposed) {
            write_transposed(w, t);
        } else {
            writer_write(w, t->data, (size_t)(t->end - t->begin));
        }
    }
    return writer_close(w);
}
