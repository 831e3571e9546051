// Our tensors under Hugging Face's names: model.safetensors and config.json, which `transformers`
// opens as GPT2LMHeadModel and LlamaForCausalLM. The names stand in the table of tensors.
#ifndef LLM8_HUGGING_FACE_H
#define LLM8_HUGGING_FACE_H

#include "../model/model.h"
#include "safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

// One Hugging Face tensor: some rows of one of ours.
typedef struct {
    char name[TENSOR_NAME];
    int first_row, rows, cols; // of our tensor; cols 1 for a vector
    bool transposed;           // stored as [cols,rows]
} HfPart;

// The parts of a tensor; returns how many.
int hf_parts(const ParamLayout *layout, const Param *param, HfPart parts[HF_PARTS]);

// Declares all tensors, F32 or BF16, then writes them from weights (of that dtype, laid out as
// layout says).
void hf_declare(SafeTensorsWriter *w, const ParamLayout *layout, Dtype dtype);
void hf_write(SafeTensorsWriter *w, const ParamLayout *layout, Dtype dtype, const void *weights);

// A line for each tensor: its name and shape.
void hf_list(const ParamLayout *layout, FILE *out);

// Reads a model into FP32 weights; what the file does not hold (gaps, vocabulary padding) is zero.
bool hf_read(const SafeTensors *st, const ParamLayout *layout, float *weights, Error *err);

// The text of config.json; to be freed. end_of_text: -1 where it is not known.
char *hf_config(const ModelConfig *config, Dtype dtype, int end_of_text);

// Reads a start: the weights of a folder with model.safetensors and config.json, as checkpoints and
// scripts/convert_hf import leave it. Refuses another model's.
bool hf_load(const char *folder, const ParamLayout *layout, float *weights, Error *err);

#ifdef __cplusplus
}
#endif

#endif
