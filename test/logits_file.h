// The file that logits_tool and gpu_logits write: "tokens" [B,T] and "logits" [B,T,V].
#pragma once

#include "../checkpoints/safetensors.h"

#include <string.h>

static inline void write_logits(const char *path, int *tokens, float *logits, int B, int T, int V) {
    TensorEntry tensors[2];
    FileWriter w;
    memset(tensors, 0, sizeof(tensors));
    for (int i = 0; i < 2; i++) {
        TensorEntry *e = &tensors[i];
        strcpy(e->name, i == 0 ? "tokens" : "logits");
        e->dtype = i == 0 ? DTYPE_I32 : DTYPE_F32;
        e->data = i == 0 ? (void *)tokens : (void *)logits;
        e->dims = 2 + i;
        e->shape[0] = B;
        e->shape[1] = T;
        e->shape[2] = i == 0 ? 0 : V;
    }
    or_die(safetensors_write(&w, path, tensors, 2, NULL));
}
