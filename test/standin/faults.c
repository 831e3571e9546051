// Faults planted into one rank of a trainer over the stand-ins, where it takes its data, looks up
// its embeddings, and adds up its losses: the Makefile wraps these calls. SLOW_SAVE=SECONDS: each
// file of a checkpoint is written so much later. SLOW_RANK=R: by the clock of the stand-ins rank R
// computes 12 ms a micro-batch, others 10.
//
// FAULT=kind:N plants a fault when the trainer takes sequence N to train on: so N says which step,
// and which rank. The kinds: nan (in the loss of the micro-batch), flip (a bit of that loss, in one
// pass), flips (in every pass, each time another), weight (a bit of one, which stays), kill, stop,
// hang (while reading), die, disk (no file can grow), term (a signal to this rank alone).
// FAULT_AFTER=PATH: once PATH exists, so that what is saved by then is certain.
#include "../../checkpoints/safetensors.h"
#include "../../kernels/kernels.h"
#include "../../train/state.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

void __real_run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets);
void __real_gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate,
                           cudaStream_t stream);
bool __real_safetensors_write(FileWriter *w, const char *path, TensorEntry *tensors, int count,
                              const char *metadata);

void __real_gpu_embedding_forward(Bf16 *out, const int *tokens, const Bf16 *wte, const Bf16 *wpe,
                                  int B, int T, int C, cudaStream_t stream);

static bool nan_is_due, weight_is_due;
static int flips_are_due;
static double pass_seconds;

static void plant(const char *kind) {
    const char *after = getenv("FAULT_AFTER");
    while (after != NULL && access(after, F_OK) != 0) { usleep(1000); }
    nan_is_due = strcmp(kind, "nan") == 0;
    weight_is_due = strcmp(kind, "weight") == 0;
    flips_are_due = strcmp(kind, "flips") == 0 ? 30 : strcmp(kind, "flip") == 0;
    if (strcmp(kind, "kill") == 0) { raise(SIGKILL); }
    if (strcmp(kind, "stop") == 0) { raise(SIGSTOP); }
    if (strcmp(kind, "term") == 0) { raise(SIGTERM); }
    if (strcmp(kind, "die") == 0) { die("a planted fault"); }
    if (strcmp(kind, "disk") == 0) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){4096, RLIM_INFINITY});
    }
    while (strcmp(kind, "hang") == 0) { pause(); }
}

void __wrap_run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets) {
    const char *fault = getenv("FAULT");
    char kind[8];
    long long at;
    int B = run->options.micro_batch_size;
    int64_t sample = run->progress.samples + ahead * run->options.global_batch_size +
                     ((int64_t)micro * run->group.ranks + run->group.rank) * B;
    const char *slow = getenv("SLOW_RANK");
    if (slow != NULL) { pass_seconds = atoi(slow) == run->group.rank ? 0.012 : 0.010; }
    bool read = fault != NULL && sscanf(fault, "%7[a-z]:%lld", kind, &at) == 2;
    run_beat(run, DOING_WORK, "reading data");
    if (read && sample <= at && at < sample + B) { plant(kind); }
    __real_run_batch(run, ahead, micro, inputs, targets);
}

void __wrap_gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate,
                           cudaStream_t stream) {
    __real_gpu_sum_losses(sum, losses, M, accumulate, stream);
    if (nan_is_due) { *sum = NAN; }
    nan_is_due = false;
    standin_seconds += pass_seconds;
    if (flips_are_due > 0) { *(uint64_t *)sum ^= 1ull << flips_are_due--; }
}

void __wrap_gpu_embedding_forward(Bf16 *out, const int *tokens, const Bf16 *wte, const Bf16 *wpe,
                                  int B, int T, int C, cudaStream_t stream) {
    if (weight_is_due) { *(Bf16 *)(uintptr_t)&wte[C + 3] ^= 1 << 6; }
    weight_is_due = false;
    __real_gpu_embedding_forward(out, tokens, wte, wpe, B, T, C, stream);
}

bool __wrap_safetensors_write(FileWriter *w, const char *path, TensorEntry *tensors, int count,
                              const char *metadata) {
    const char *seconds = getenv("SLOW_SAVE");
    if (seconds != NULL) { usleep((useconds_t)(1e6 * atof(seconds))); }
    return __real_safetensors_write(w, path, tensors, count, metadata);
}
