// Our tensors under Hugging Face's names and in its layout: model.safetensors and config.json,
// which `transformers` opens as GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM (QKV bias) or
// Qwen3ForCausalLM (QK norm). The table of tensors (model/model.h) holds the names.
#pragma once

#include "../model/model.h"
#include "safetensors.h"

BEGIN_C

// Hugging Face's tensors of a model, in the order of model.safetensors, as safetensors_write()
// takes them: data points into `weights` (of that dtype, laid out as layout says; NULL: data is
// NULL); begin is, until they are written, a tensor's first element of the parameter space. Returns
// how many there are; *tensors must be freed.
int hf_tensors(const ParamLayout *layout, Dtype dtype, const void *weights, TensorEntry **tensors);

// Prints the name and the shape of each.
void hf_list(const ParamLayout *layout, FILE *out);

// Reads elements begin..end of a model into FP32 weights; those that the file does not hold (gaps,
// vocabulary padding) become zero.
bool hf_read(const SafeTensors *st, const ParamLayout *layout, int64_t begin, int64_t end,
             float *out);

// The text of config.json, which must be freed. end_of_text: -1 when not known.
char *hf_config(const Options *options, Dtype dtype, int end_of_text);

// The options that make the model of a config.json's text, as any version of transformers writes
// it, with SOURCE_CHECKPOINT. Refuses what the trainers do not compute.
bool hf_options(const char *text, size_t bytes, Options *options);

END_C
