// Hugging Face's safetensors files, read and written.
//
// A file begins with 8 bytes, the length of the header. Next is the header, a JSON text
//   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//    "__metadata__": {"key": "text", ...}}
// padded with spaces to a multiple of 8 bytes. Then the tensors follow, row-major. All binary
// numbers are little-endian. Offsets are in bytes and count from the end of the header.
//
// The reader refuses a header that is not JSON, or is longer than the file or than 100 MiB. It also
// refuses a tensor with an unknown dtype, with more than 4 dimensions, or with a byte count that
// does not fit its shape, and tensors that overlap or do not fill the file without gaps.
#pragma once

#include "../base/io.h"

BEGIN_C

typedef enum {
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_I32,
    DTYPE_I64,
    DTYPE_U8,
    DTYPE_I8,
    DTYPE_F8_E4M3
} Dtype;

int dtype_bytes(Dtype dtype);
const char *dtype_name(Dtype dtype);

enum { TENSOR_DIMS = 4, TENSOR_NAME = 128 };

typedef struct {
    char name[TENSOR_NAME];
    Dtype dtype;
    int dims;
    int64_t shape[TENSOR_DIMS];
    const void *data;   // for writing: the elements
    bool transposed;    // for writing a matrix: data is [shape[1],shape[0]]
    int64_t begin, end; // offsets in bytes from the end of the header
} TensorEntry;

typedef struct {
    char path[PATH_LENGTH];
    int file;
    int64_t data; // where in the file the tensors' bytes begin
    int count;
    TensorEntry *entries; // sorted by begin
    char *metadata;       // the JSON of __metadata__, or NULL
} SafeTensors;

struct cJSON;

// Parses a text that must be JSON and nothing else; returns NULL if it is not. The caller deletes
// the result.
struct cJSON *json_parse(const char *text, size_t bytes);
void json_close(struct cJSON **json); // for CLOSED
// Returns the value of a whole JSON number that is at least 0 and below 2^53, so that a double
// holds it exactly. Returns -1 for anything else.
int64_t json_count(const struct cJSON *item);
// Return the number or the text that an object has under a name, or `otherwise` if it has none.
double json_number(const struct cJSON *object, const char *name, double otherwise);
const char *json_text(const struct cJSON *object, const char *name, const char *otherwise);

bool safetensors_open(SafeTensors *st, const char *path);
void safetensors_close(SafeTensors *st);
const TensorEntry *safetensors_find(const SafeTensors *st, const char *name);

// Reads elements [begin, begin + n) of a tensor. safetensors_read_floats converts F32, BF16 or F16
// to FP32.
bool safetensors_read(const SafeTensors *st, const TensorEntry *entry, int64_t begin, int64_t n,
                      void *out);
bool safetensors_read_floats(const SafeTensors *st, const TensorEntry *entry, int64_t begin,
                             int64_t n, float *out);

// Makes an entry for writing: [rows,columns], or [rows] if columns is 0.
TensorEntry tensor_entry(const char *name, Dtype dtype, int64_t rows, int64_t columns,
                         const void *data);

// Writes tensors into a new file and syncs it; sets their begin and end. metadata: the JSON of an
// object of strings, or NULL. Afterwards the writer has the file's length and checksum.
bool safetensors_write(FileWriter *w, const char *path, TensorEntry *tensors, int count,
                       const char *metadata);

END_C
