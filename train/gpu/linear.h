// The linear layers on the GPU: their three products, in the precision that the policy gives each
// layer, and the way of their operands into FP8.
#ifndef LLM8_LINEAR_H
#define LLM8_LINEAR_H

#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

// An operand [M,N] in the forms that products read; NULL: not there.
typedef struct {
    Bf16 *plain;
    uint8_t *rows;    // FP8
    uint8_t *columns; // FP8, transposed
} Matrix;

typedef struct {
    Linear linear;
    int layer;
    Pass pass;
} LinearId;

// Whether the forward and input-gradient products are in FP8.
bool linear_is_fp8(const Params *p, LinearId id);
// Whether nothing reads the operand's plain form: all products are in FP8, and the scale is known
// before the operand, so that its producer can write FP8 at once.
bool linear_is_fused(const Params *p, LinearId id);

// Where the producer of an operand writes its FP8 forms.
Fp8Out linear_out(const Params *p, LinearId id, Operand operand, Matrix forms);

// Where the producer of a plain operand leaves its range, from which the scale follows; NULL where
// the scale is known.
float *linear_amax(const Params *p, LinearId id, Operand operand);
// The same for an operand of n values whose producer does not.
void linear_measure(const Params *p, LinearId id, Operand operand, const Bf16 *plain, int64_t n);
// From the measured plain form [M,N] to the FP8 forms that are wanted. sums: column sums, in any
// precision. scratch: as kernels.h says.
void linear_quantize(const Params *p, LinearId id, Operand operand, Matrix forms, GradientOut sums,
                     float *scratch, int M);

typedef struct {
    LinearId id;
    Bf16 *y;            // [M,N]
    Matrix x;           // [M,C]
    Bf16 *bias;         // [N] or NULL
    const Bf16 *addend; // [M,N] or NULL
    int M;
} LinearForward;

// y = x W' (+ bias) (+ addend)
void linear_forward(const Params *p, LinearForward l);

typedef struct {
    LinearId id;
    Bf16 *dx;         // [M,C]
    Matrix dy;        // [M,N]
    Matrix x;         // [M,C]
    Bf16 *gelu_input; // [M,C]: x came out of a GELU, and dx is to be the gradient of what went in
    int M;
    bool accumulate;
} LinearBackward;

// dx = dy W, dW (+)= dy' x
void linear_backward(const Params *p, LinearBackward l);

#ifdef __cplusplus
}
#endif

#endif
