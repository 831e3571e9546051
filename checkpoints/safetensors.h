// Hugging Face's safetensors, read and written.
//
// Layout: 8 bytes, little-endian: the length n of the header; n bytes of JSON,
//   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//    "__metadata__": {"key": "text", ...}}
// padded with spaces to a multiple of 8; then the tensors' bytes, row-major, little-endian, the
// offsets counted from there.
//
// The reader refuses a header that is longer than the file or than 100 MB, not JSON, or that has a
// tensor with an unknown dtype, more than 4 dimensions, bytes that do not fit its shape, or bytes
// outside the file or inside another tensor.
#ifndef LLM8_SAFETENSORS_H
#define LLM8_SAFETENSORS_H

#include "../base/io.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I32, DTYPE_I64, DTYPE_U8 } Dtype;

int dtype_bytes(Dtype dtype);
const char *dtype_name(Dtype dtype);

enum { TENSOR_DIMS = 4, TENSOR_NAME = 128 };

typedef struct {
    char name[TENSOR_NAME];
    Dtype dtype;
    int dims;
    int64_t shape[TENSOR_DIMS];
    int64_t begin, end; // bytes after the header
} TensorEntry;

typedef struct {
    char path[PATH_LENGTH];
    MappedFile file;
    const unsigned char *data; // after the header
    int count;
    TensorEntry *entries; // in order of begin
    char *metadata;       // the JSON of __metadata__, or NULL
} SafeTensors;

bool safetensors_open(SafeTensors *st, const char *path, Error *err);
void safetensors_close(SafeTensors *st);
const TensorEntry *safetensors_find(const SafeTensors *st, const char *name);

// Elements begin.. of a tensor, as FP32, from F32, BF16 or F16.
void safetensors_read_floats(const SafeTensors *st, const TensorEntry *entry, int64_t begin,
                             int64_t n, float *out);

// Writing: declare every tensor in order, begin, write the bytes in that order, end.
typedef struct {
    int count, room;
    TensorEntry *entries;
    int64_t bytes;
    FileWriter file;
} SafeTensorsWriter;

void safetensors_declare(SafeTensorsWriter *w, const char *name, Dtype dtype, int dims,
                         const int64_t *shape);
// metadata: the JSON of an object of strings, or NULL.
bool safetensors_begin(SafeTensorsWriter *w, const char *path, const char *metadata, Error *err);
// The writer's `file` then takes the bytes; ends with writer_close of it. In every case:
void safetensors_free(SafeTensorsWriter *w);

#ifdef __cplusplus
}
#endif

#endif
