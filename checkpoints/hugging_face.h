// Our tensors under Hugging Face's names and in its layout: model.safetensors and config.json,
// which `transformers` opens as GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM (QKV bias) or
// Qwen3ForCausalLM (QK norm). The table of tensors (model/model.h) holds the names.
#pragma once

#include "../model/model.h"
#include "safetensors.h"

BEGIN_C

// Lists a model's tensors as Hugging Face has them, in the order of model.safetensors, for
// safetensors_write(). Each entry's data points into `weights`, which have this dtype and layout;
// if weights is NULL, so is data. An entry's begin is the index of the tensor's first element in
// the parameter space, until safetensors_write() sets it to an offset. Returns the number of
// tensors; the caller frees *tensors. With DTYPE_F8_E4M3, the weights of the linear layers, except
// the LM head, are in FP8. Each of these weights is followed by the tensor of its scales, which is
// named WEIGHT_scale_inv as in DeepSeek-V3's files. It has one scale for each block of 128 x 128
// codes, by which the codes are multiplied. All other tensors are in BF16. This dtype needs
// ARCH_LLAMA and weights NULL.
int hf_tensors(const ParamLayout *layout, Dtype dtype, const void *weights, TensorEntry **tensors);

// Prints the name and the shape of each tensor.
void hf_list(const ParamLayout *layout, FILE *out);

// Reads elements begin..end of a model's weights as FP32; FP8 codes are multiplied by their scales.
// Elements that belong to no tensor of the file (gaps, the vocabulary's padding) become zero.
bool hf_read(const SafeTensors *st, const ParamLayout *layout, int64_t begin, int64_t end,
             float *out);

// Refuses a file with a tensor that the model lacks, such as a bias or a norm, because that tensor
// would be left out.
bool hf_knows_all(const SafeTensors *st, const ParamLayout *layout);
// Warns of matrices that have only zeros, as a download that was cut short may leave them. Biases
// may be zeros. Returns false if the file cannot be read.
bool hf_warn_of_zeros(const SafeTensors *st, const ParamLayout *layout);

// Returns the model_type that config.json has for a model with these options.
const char *hf_model_type(const Options *options);

// Returns the text of config.json for weights of this dtype (see hf_tensors); the caller frees it.
// start: the text of config.json of the model that the run started from, whose special tokens are
// kept, and whose sliding windows if the run's sequences are not longer. If start is NULL,
// begin_of_text is written, and end_of_text and document_end are written as the tokens at which a
// text ends (-1: not known).
char *hf_config(const Options *options, Dtype dtype, int begin_of_text, int end_of_text,
                int document_end, const char *start, size_t start_bytes);

// Returns the text of a model's generation_config.json with the eos_token_id of `more` added; the
// caller frees it. own: the text without them, or NULL if the model has no such file. If `own` is
// NULL or has no eos_token_id, those of `config`, the text of config.json, come first. If `own` is
// NULL, the bos_token_id and the pad_token_id of `config` are also written, or those of `more` if
// `config` is NULL. Returns NULL if `own` or `more` is no JSON object, or if `more` adds nothing.
char *hf_add_ends(const char *own, size_t own_bytes, const char *config, size_t config_bytes,
                  const char *more, size_t more_bytes);

// Sets the model's options from a config.json of any version of transformers. Their source becomes
// SOURCE_CHECKPOINT. given: the run's options. Refuses features that the trainers do not have; of
// sliding windows only those shorter than a given --seq-length. If the run trains, warns if the
// model was trained with dropout, because the trainers have none.
bool hf_options(const char *text, size_t bytes, const Options *given, Options *options);

END_C
