#include "safetensors.h"
#include "../kernels/fp8_format.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_MAX = 100 << 20 };

static const struct {
    const char *name;
    int bytes;
} dtypes[] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"I32", 4}, {"I64", 8}, {"U8", 1}};

int dtype_bytes(Dtype dtype) {
    return dtypes[dtype].bytes;
}

const char *dtype_name(Dtype dtype) {
    return dtypes[dtype].name;
}

// A JSON number that is a whole number from 0 to 2^53.
static bool read_count(const cJSON *item, int64_t *out) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= 0x1p53)) {
        return false;
    }
    *out = (int64_t)item->valuedouble;
    return (double)*out == item->valuedouble;
}

static bool read_dtype(const cJSON *item, Dtype *out) {
    for (int i = 0; cJSON_IsString(item) && i < (int)(sizeof(dtypes) / sizeof(dtypes[0])); i++) {
        if (strcmp(item->valuestring, dtypes[i].name) == 0) {
            *out = (Dtype)i;
            return true;
        }
    }
    return false;
}

// Fills dims and shape, and checks that begin..end holds just that many elements.
static bool read_shape(TensorEntry *e, const cJSON *shape) {
    int64_t elements = 1;
    if (!cJSON_IsArray(shape)) { return false; }
    for (const cJSON *dim = shape->child; dim != NULL; dim = dim->next) {
        int64_t size;
        if (e->dims == TENSOR_DIMS || !read_count(dim, &size)) { return false; }
        if (size > 0 && elements > INT64_MAX / 8 / size) { return false; }
        elements *= size;
        e->shape[e->dims++] = size;
    }
    return e->end - e->begin == elements * dtype_bytes(e->dtype);
}

static bool read_entry(TensorEntry *e, const cJSON *item, int64_t data_bytes) {
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    *e = (TensorEntry){0};
    if (strlen(item->string) >= TENSOR_NAME) { return false; }
    strcpy(e->name, item->string);
    if (!read_dtype(cJSON_GetObjectItemCaseSensitive(item, "dtype"), &e->dtype)) { return false; }
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2) { return false; }
    if (!read_count(offsets->child, &e->begin) || !read_count(offsets->child->next, &e->end)) {
        return false;
    }
    return e->begin <= e->end && e->end <= data_bytes &&
           read_shape(e, cJSON_GetObjectItemCaseSensitive(item, "shape"));
}

static int compare_entries(const void *a, const void *b) {
    const TensorEntry *x = a, *y = b;
    if (x->begin != y->begin) { return x->begin < y->begin ? -1 : 1; }
    if (x->end != y->end) { return x->end < y->end ? -1 : 1; }
    return strcmp(x->name, y->name);
}

static bool read_entries(SafeTensors *st, const cJSON *header, int64_t data_bytes, Error *err) {
    int most = cJSON_GetArraySize(header);
    st->entries = calloc_or_die((size_t)most, sizeof(TensorEntry));
    for (const cJSON *item = header->child; item != NULL; item = item->next) {
        if (strcmp(item->string, "__metadata__") == 0) {
            free(st->metadata);
            st->metadata = cJSON_PrintUnformatted(item);
            continue;
        }
        if (!read_entry(&st->entries[st->count], item, data_bytes)) {
            return fail(err, "%s: the header's entry for '%.100s' is wrong", st->path,
                        item->string);
        }
        st->count++;
    }
    qsort(st->entries, (size_t)st->count, sizeof(TensorEntry), compare_entries);
    for (int i = 1; i < st->count; i++) {
        if (st->entries[i].begin < st->entries[i - 1].end) {
            return fail(err, "%s: tensors '%s' and '%s' overlap", st->path, st->entries[i - 1].name,
                        st->entries[i].name);
        }
    }
    return true;
}

static bool read_header(SafeTensors *st, Error *err) {
    uint64_t length;
    if (st->file.bytes < sizeof(length)) {
        return fail(err, "%s: %zu bytes, too short for safetensors", st->path, st->file.bytes);
    }
    memcpy(&length, st->file.data, sizeof(length));
    if (length > st->file.bytes - sizeof(length) || length > HEADER_MAX) {
        return fail(err,
                    "%s: the header says it is %llu bytes long; the file is %zu, and 100 MiB at "
                    "most are allowed",
                    st->path, (unsigned long long)length, st->file.bytes);
    }
    st->data = st->file.data + sizeof(length) + length;
    int64_t data_bytes = (int64_t)(st->file.bytes - sizeof(length) - length);
    cJSON *header = cJSON_ParseWithLength((const char *)st->file.data + sizeof(length), length);
    bool ok = cJSON_IsObject(header) ? read_entries(st, header, data_bytes, err)
                                     : fail(err, "%s: the header is not JSON", st->path);
    cJSON_Delete(header);
    return ok;
}

bool safetensors_open(SafeTensors *st, const char *path, Error *err) {
    *st = (SafeTensors){0};
    path_format(st->path, "%s", path);
    if (!file_map(&st->file, path, err)) { return false; }
    if (read_header(st, err)) { return true; }
    safetensors_close(st);
    return false;
}

void safetensors_close(SafeTensors *st) {
    file_unmap(&st->file);
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

void safetensors_read_floats(const SafeTensors *st, const TensorEntry *e, int64_t begin, int64_t n,
                             float *out) {
    int size = dtype_bytes(e->dtype);
    const unsigned char *from = st->data + e->begin + begin * size;
    assert(begin >= 0 && e->begin + (begin + n) * size <= e->end);
    assert(e->dtype == DTYPE_F32 || e->dtype == DTYPE_BF16 || e->dtype == DTYPE_F16);
    if (e->dtype == DTYPE_F32) {
        memcpy(out, from, (size_t)n * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t code;
        memcpy(&code, from + 2 * i, sizeof(code));
        out[i] = e->dtype == DTYPE_BF16 ? bf16_decode(code) : half_decode(code);
    }
}

void safetensors_declare(SafeTensorsWriter *w, const char *name, Dtype dtype, int dims,
                         const int64_t *shape) {
    if (w->count == w->room) {
        w->room = w->room > 0 ? 2 * w->room : 64;
        w->entries = realloc_or_die(w->entries, (size_t)w->room * sizeof(TensorEntry));
    }
    TensorEntry *e = &w->entries[w->count++];
    *e = (TensorEntry){.dtype = dtype, .dims = dims, .begin = w->bytes};
    assert(strlen(name) < TENSOR_NAME && dims <= TENSOR_DIMS);
    strcpy(e->name, name);
    int64_t bytes = dtype_bytes(dtype);
    for (int i = 0; i < dims; i++) {
        e->shape[i] = shape[i];
        bytes *= shape[i];
    }
    w->bytes += bytes;
    e->end = w->bytes;
}

static cJSON *count_array(const int64_t *counts, int n) {
    cJSON *array = cJSON_CreateArray();
    for (int i = 0; i < n; i++) {
        cJSON_AddItemToArray(array, cJSON_CreateNumber((double)counts[i]));
    }
    return array;
}

bool safetensors_begin(SafeTensorsWriter *w, const char *path, const char *metadata, Error *err) {
    cJSON *header = cJSON_CreateObject();
    if (metadata != NULL) { cJSON_AddRawToObject(header, "__metadata__", metadata); }
    for (int i = 0; i < w->count; i++) {
        const TensorEntry *e = &w->entries[i];
        int64_t offsets[2] = {e->begin, e->end};
        cJSON *item = cJSON_AddObjectToObject(header, e->name);
        cJSON_AddStringToObject(item, "dtype", dtype_name(e->dtype));
        cJSON_AddItemToObject(item, "shape", count_array(e->shape, e->dims));
        cJSON_AddItemToObject(item, "data_offsets", count_array(offsets, 2));
    }
    char *text = cJSON_PrintUnformatted(header);
    cJSON_Delete(header);
    static const char spaces[8] = "       ";
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    bool ok = writer_open(&w->file, path, err);
    if (ok) {
        writer_write(&w->file, &padded, sizeof(padded));
        writer_write(&w->file, text, length);
        writer_write(&w->file, spaces, padded - length);
    }
    cJSON_free(text);
    return ok;
}

void safetensors_free(SafeTensorsWriter *w) {
    free(w->entries);
    *w = (SafeTensorsWriter){0};
}
