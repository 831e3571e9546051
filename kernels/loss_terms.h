// The terms of the loss of a row of logits x, for both trainers.
//
// The logits may be capped: y = softcap tanh(x / softcap) (Gemma Team, "Gemma 2", 2024, section 2).
// With lse = log(Z) = log(sum of exp(y)), the reported loss is the cross-entropy, lse - y[target].
// Training minimises the cross-entropy + z_loss lse^2, which keeps the logits from drifting
// (Chowdhery et al., "PaLM", 2022, section 5; for routers: Zoph et al., "ST-MoE", 2022, section 3).
#pragma once

typedef struct {
    float gradient_scale; // factor of the gradient; 0: no gradient is requested
    float z_loss;         // factor of lse^2; 0: the loss lacks this term
    float softcap;        // 0: the logits are not capped
} LossTerms;
