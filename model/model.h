// The dimensions of a model, and the table of its tensors.
//
// All parameters of a model lie in one flat space of elements. Weights, gradients and both moments
// are arrays over this space, so that an optimizer, a checkpoint or a collective works on ranges.
// Each tensor starts at a multiple of PARAM_ALIGN, so that kernels can use vector loads; the gaps
// between tensors stay zero. The space is cut into buckets in the order of the forward pass: the
// embeddings, each block, and the final norm with the head.
#pragma once

#include "../kernels/loss_terms.h"
#include "../kernels/rope.h"
#include "options.h"

BEGIN_C

enum { PARAM_ALIGN = 64 }; // elements

typedef struct {
    Arch arch;
    int num_layers;   // L
    int channels;     // C
    int num_heads;    // H, query heads
    int num_groups;   // G, key/value heads
    int head_size;    // D
    int ffn;          // F
    int seq_length;   // T
    int max_position; // longest T; the rows of GPT-2's position embedding
    int vocab;        // V
    int padded_vocab; // P, rows of the embedding and the head; those from V on stay zero
    bool tied_head;
    bool qkv_bias; // queries, keys and values have a bias; in GPT-2 always
    bool qk_norm;  // each head of queries and keys is normalised
    double norm_eps, init_std;
    Rope rope;
    LossTerms loss; // gradient_scale is not set
} ModelConfig;

ModelConfig model_config(const Options *options);

// Returns how many rows the packed query, key and value have: (H + 2G) * D.
static inline int qkv_rows(const ModelConfig *c) {
    return (c->num_heads + 2 * c->num_groups) * c->head_size;
}

// Returns how many outputs the first feed-forward layer has. Llama packs the gate's rows above the
// up-projection's.
static inline int fc1_rows(const ModelConfig *c) {
    return c->arch == ARCH_LLAMA ? 2 * c->ffn : c->ffn;
}

typedef enum {
    TENSOR_TOKEN_EMBEDDING,
    TENSOR_POSITION_EMBEDDING,
    TENSOR_NORM1_WEIGHT,
    TENSOR_NORM1_BIAS,
    TENSOR_QKV_WEIGHT,
    TENSOR_QKV_BIAS,
    TENSOR_ATTENTION_OUT_WEIGHT,
    TENSOR_ATTENTION_OUT_BIAS,
    TENSOR_NORM2_WEIGHT,
    TENSOR_NORM2_BIAS,
    TENSOR_FC1_WEIGHT,
    TENSOR_FC1_BIAS,
    TENSOR_FC2_WEIGHT,
    TENSOR_FC2_BIAS,
    TENSOR_FINAL_NORM_WEIGHT,
    TENSOR_FINAL_NORM_BIAS,
    TENSOR_HEAD_WEIGHT,
    TENSOR_QUERY_NORM_WEIGHT,
    TENSOR_KEY_NORM_WEIGHT,
    TENSOR_COUNT
} TensorId;

// The section of the model in which a tensor is.
typedef enum { SECTION_EMBEDDING, SECTION_BLOCK, SECTION_FINAL } ModelSection;
// The models that have a tensor.
typedef enum { IN_ALL, IN_GPT2, IN_QKV_BIAS, IN_QK_NORM, IN_UNTIED } TensorIn;
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_RESIDUAL } TensorInit; // see model_init

// A dimension of a tensor, as a function of the configuration.
typedef enum {
    DIM_NONE, // a vector has no columns
    DIM_VOCAB,
    DIM_POSITIONS,
    DIM_CHANNELS,
    DIM_QKV,
    DIM_HEADS,  // H * D
    DIM_GROUPS, // G * D
    DIM_HEAD,   // D
    DIM_FC1,
    DIM_FFN
} Dim;

enum { HF_PARTS = 3 };

typedef struct {
    const char *name;
    ModelSection section;
    TensorIn in;
    Dim rows, cols;
    TensorInit init;
    // Hugging Face's names, without the layer's prefix. Where we pack several matrices in one
    // tensor, Hugging Face's Llama has one tensor for each (dim_parts). Hugging Face's GPT-2 stores
    // the blocks' matrices as [in, out] (Conv1D); we store [out, in].
    const char *gpt2_name, *llama_names[HF_PARTS];
} TensorRow;

const TensorRow *tensor_row(TensorId id);
int dim_size(const ModelConfig *config, Dim dim);
// Writes how many rows each part of a dimension has, and returns the number of parts. DIM_QKV
// consists of query, key and value, Llama's DIM_FC1 of gate and up-projection. Any other dimension
// is one part.
int dim_parts(const ModelConfig *config, Dim dim, int rows[HF_PARTS]);

typedef struct {
    TensorId id;
    int layer; // -1 outside the blocks
    int64_t offset;
    int rows, cols; // cols is 1 for a vector
} Param;

typedef struct {
    int64_t begin, end;
} Bucket;

typedef struct {
    ModelConfig config;
    int count;
    Param *params;           // [count], in order of offset
    int first[TENSOR_COUNT]; // each tensor's first index in params; -1: the model lacks the tensor
    int block_params;        // how many entries of params each block has
    int num_buckets;         // L + 2
    Bucket *buckets;
    int64_t size;           // elements, gaps included
    int64_t num_parameters; // gaps and the vocabulary's padding excluded
} ParamLayout;

ParamLayout param_layout(const ModelConfig *config);
void param_layout_free(ParamLayout *layout);

// Returns the param of a tensor in block `layer`, which is ignored if the tensor is outside the
// blocks. Returns NULL if the model has no such tensor, or if id is TENSOR_COUNT.
const Param *param_find(const ParamLayout *layout, TensorId id, int layer);

static inline int64_t param_size(const Param *p) {
    return (int64_t)p->rows * p->cols;
}

// Returns the weight decay of a parameter: --weight-decay for a matrix, 0 for a vector.
float param_decay(const Param *p, const Options *options);

// Returns the factor of a parameter's learning rate: --embedding-lr-mult, --head-lr-mult or
// --vector-lr-mult; 1 for a matrix of a block.
float param_lr_mult(const Param *p, const Options *options);

// Writes how many rows each matrix that is packed in a block's tensor has (dim_parts), and returns
// the number of matrices. Returns 0 for vectors and for tensors outside the blocks.
int param_matrices(const ModelConfig *config, const Param *p, int rows[HF_PARTS]);

// Computes elements begin..end of the initial weights, which depend only on configuration and seed.
// Norms' weights are 1, biases and gaps 0. Other weights are drawn from a normal distribution with
// standard deviation init_std; in residual projections init_std is divided by sqrt(2L).
void model_init(const ParamLayout *layout, int64_t begin, int64_t end, float *out, uint64_t seed);

// Returns the number of weights that multiply activations: those of the head (even if it is tied)
// and of the blocks' matrices, but not the embeddings.
int64_t matmul_weights(const ModelConfig *config);

// Returns the FLOPs to train on one token: 6 for each weight that multiplies activations, and 6LHDT
// for causal attention (two matmuls forward and four backward; half of each matmul is masked).
double flops_per_token(const ModelConfig *config);

END_C
