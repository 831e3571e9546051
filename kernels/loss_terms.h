// What the loss of a row of logits x is made of, for both trainers.
//
// The logits may be capped: y = softcap tanh(x / softcap) (Gemma Team, "Gemma 2", 2024, section 2).
// With lse = log(Z) = log(sum of exp(y)), what is reported is the cross-entropy, lse - y[target],
// and what is minimised is that + z_loss lse^2, which keeps the logits from drifting (Chowdhery et
// al., "PaLM", 2022, section 5; of routers: Zoph et al., "ST-MoE", 2022, section 3).
#pragma once

typedef struct {
    float gradient_scale; // what the gradient is multiplied by; 0: none is requested
    float z_loss;         // 0: none
    float softcap;        // 0: the logits as they are
} LossTerms;
