// Faults planted into one rank of a trainer over the stand-ins: where it reads data, looks up
// embeddings, and adds up losses. The Makefile wraps these calls. SLOW_SAVE=SECONDS: each file of a
// checkpoint is written this much later. SLOW_RANK=R: by the clock of the stand-ins rank R computes
// 12 ms per micro-batch, the others 10. STILL_RANK=R: the clock of rank R stands still.
//
// FAULT=kind:N plants a fault when the trainer reads sequence N to train on: so N decides the step
// and the rank. The kinds: nan (in the loss of the micro-batch), flip (one bit of that loss, in one
// pass), flips (another bit in every pass), weight, master, moment, scales (one bit of a weight, of
// a master weight, of a first moment, of the history of FP8 scales, which stays flipped), kill,
// stop, hang (while reading), stall (in the update), die, disk (no file can grow), term (a signal
// to this rank alone). FAULT_AFTER=PATH: the fault waits until PATH exists, so that it is certain
// what has been saved.
#include "../../checkpoints/safetensors.h"
#include "../../kernels/kernels.h"
#include "../../train/run_data.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define WRAPPED(name) __typeof__(name) __real_##name, __wrap_##name
WRAPPED(run_batch);
WRAPPED(safetensors_write);
WRAPPED(gpu_sum_losses);
WRAPPED(gpu_embedding_forward);
WRAPPED(gpu_sum_of_squares);
WRAPPED(gpu_adamw);
WRAPPED(gpu_fp8_update);

static bool nan_is_due, stall_is_due, weight_is_due;
static char *master, *moment, *scales; // buffers of the last update
static int flips_are_due;
static double pass_seconds;

static void plant(const char *kind) {
    const char *after = getenv("FAULT_AFTER");
    while (after != NULL && access(after, F_OK) != 0) { usleep(1000); }
    nan_is_due = strcmp(kind, "nan") == 0;
    weight_is_due = strcmp(kind, "weight") == 0;
    stall_is_due = strcmp(kind, "stall") == 0;
    flips_are_due = strcmp(kind, "flips") == 0 ? 30 : strcmp(kind, "flip") == 0;
    if (strcmp(kind, "master") == 0) { master[1] ^= 4; }
    if (strcmp(kind, "moment") == 0) { moment[1] ^= 4; }
    if (strcmp(kind, "scales") == 0) { scales[1] ^= 4; }
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

void __wrap_run_batch(Run *run, int64_t ahead, int micro, int *inputs, int *targets, int *starts) {
    const char *fault = getenv("FAULT");
    char kind[8];
    long long at;
    int B = run->options.micro_batch_size;
    int64_t sample = run->progress.samples + ahead * run->options.global_batch_size +
                     ((int64_t)micro * run->group.ranks + run->group.rank) * B;
    const char *slow = getenv("SLOW_RANK");
    const char *still = getenv("STILL_RANK");
    if (still != NULL && atoi(still) == run->group.rank) { standin_seconds = 1; }
    if (slow != NULL) { pass_seconds = atoi(slow) == run->group.rank ? 0.012 : 0.010; }
    bool read = fault != NULL && sscanf(fault, "%7[a-z]:%lld", kind, &at) == 2;
    run_beat(run, ACTIVITY_WORK, "reading data");
    if (read && sample <= at && at < sample + B) { plant(kind); }
    __real_run_batch(run, ahead, micro, inputs, targets, starts);
}

void __wrap_gpu_sum_losses(Gpu *gpu, double *sum, const float *losses, int M, bool accumulate) {
    __real_gpu_sum_losses(gpu, sum, losses, M, accumulate);
    if (nan_is_due) { *sum = NAN; }
    nan_is_due = false;
    standin_seconds += pass_seconds;
    if (flips_are_due > 0) { *(uint64_t *)sum ^= 1ull << flips_are_due--; }
}

void __wrap_gpu_sum_of_squares(Gpu *gpu, StepState *state, const StepInput *input,
                               const double *loss_sum, double *scratch, const void *gradients,
                               GpuType type, const GradientPart *parts, int count) {
    while (stall_is_due) { pause(); }
    __real_gpu_sum_of_squares(gpu, state, input, loss_sum, scratch, gradients, type, parts, count);
}

void __wrap_gpu_adamw(Gpu *gpu, const AdamWUpdate *update, const StepState *state) {
    if (update->segment_count > 0) {
        master = (char *)update->segments[0].master;
        moment = (char *)update->segments[0].exp_avg;
    }
    __real_gpu_adamw(gpu, update, state);
}

void __wrap_gpu_fp8_update(Gpu *gpu, const Fp8Table *table, const StepState *state) {
    scales = (char *)table->history;
    __real_gpu_fp8_update(gpu, table, state);
}

void __wrap_gpu_embedding_forward(Gpu *gpu, Bf16 *out, const int *tokens, const int *starts,
                                  const Bf16 *wte, const Bf16 *wpe, int B, int T, int C) {
    if (weight_is_due) { *(Bf16 *)(uintptr_t)&wte[C + 3] ^= 1 << 6; }
    weight_is_due = false;
    __real_gpu_embedding_forward(gpu, out, tokens, starts, wte, wpe, B, T, C);
}

bool __wrap_safetensors_write(FileWriter *w, const char *path, TensorEntry *tensors, int count,
                              const char *metadata) {
    const char *seconds = getenv("SLOW_SAVE");
    if (seconds != NULL) { usleep((useconds_t)(1e6 * atof(seconds))); }
    return __real_safetensors_write(w, path, tensors, count, metadata);
}
