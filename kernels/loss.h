// What the loss of a row of logits is made of, for both trainers.
//
//   y = softcap tanh(logit / softcap)          Gemma Team, "Gemma 2" (2024), section 2; or the logit
//   lse = log(sum of exp(y))                   log(Z), over the vocabulary
//   cross-entropy = lse - y[target]            what is reported
//   loss = cross-entropy + z_loss lse^2        what is minimised: Chowdhery et al., "PaLM" (2022),
//                                              section 5; Zoph et al., "ST-MoE" (2022), section 3
#ifndef LLM8_LOSS_H
#define LLM8_LOSS_H

typedef struct {
    float gradient_scale; // what the gradient is multiplied by; 0: none is requested
    float z_loss;         // 0: none
    float softcap;        // 0: the logits as they are
} LossTerms;

#endif
