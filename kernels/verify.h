// --verify: is this machine fit to train on? Versions, memory, and a product and an attention that
// are checked against FP64 and timed; a table and an exit status.
#ifndef LLM8_VERIFY_H
#define LLM8_VERIFY_H

#include "../train/options.h"

#ifdef __cplusplus
extern "C" {
#endif

int verify(const Options *options);

#ifdef __cplusplus
}
#endif

#endif
