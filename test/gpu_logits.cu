// What the GPU trainer computes of the first batch, as logits_tool.c does on the CPU:
//   gpu_logits OUT OPTION...
// writes "tokens" [B,T] and "logits" [B,T,V].
#include "gpu_trainer.h"

#include "../checkpoints/safetensors.h"

int main(int argc, char **argv) {
    static Options options;
    static Trainer t;
    FileWriter w;
    Error err;
    if (argc < 2) { die("usage: %s OUT OPTION...", argv[0]); }
    options_parse(&options, argc - 1, argv + 1);
    options.ranks = 1;
    open_trainer(&t, &options);
    const ModelConfig *c = &t.run.config;
    int B = options.micro_batch_size, T = c->seq_length, M = B * T;
    Pass pass = eval_pass(&options);
    Batch *batch = batches_next(&t.batches);
    run_batch(&t.run, 0, 0, batch->inputs, batch->targets);
    batches_send(&t.batches);
    model_forward(&t, B, T, pass);
    if (t.net.chunk_rows < M) { die("the logits are not whole"); }
    head_forward(&t, 0, M, pass);
    size_t columns = (size_t)c->padded_vocab, vocab = (size_t)c->vocab;
    Bf16 *codes = (Bf16 *)malloc_or_die((size_t)M * columns * sizeof(Bf16));
    float *logits = (float *)malloc_or_die((size_t)M * vocab * sizeof(float));
    gpu_fetch(&t.gpu, codes, t.net.head.gradient.bf16, (size_t)M * columns * sizeof(Bf16));
    CUDA_CHECK(cudaStreamSynchronize(t.gpu.stream));
    for (size_t i = 0; i < (size_t)M * vocab; i++) {
        logits[i] = bf16_decode(codes[i / vocab * columns + i % vocab]);
    }
    TensorEntry tensors[2] = {};
    strcpy(tensors[0].name, "tokens");
    tensors[0].dtype = DTYPE_I32;
    tensors[0].dims = 2;
    tensors[0].data = batch->inputs;
    strcpy(tensors[1].name, "logits");
    tensors[1].dtype = DTYPE_F32;
    tensors[1].dims = 3;
    tensors[1].data = logits;
    for (TensorEntry &e : tensors) {
        e.shape[0] = B;
        e.shape[1] = T;
    }
    tensors[1].shape[2] = c->vocab;
    if (!safetensors_write(&w, argv[1], tensors, 2, NULL, &err)) { die("%s", err.text); }
    return trainer_close(&t);
}
