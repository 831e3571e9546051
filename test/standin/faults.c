// Faults planted into one rank of a trainer over the stand-ins, where it reads its data and where
// it adds up its losses: the Makefile wraps these two calls.
//
// FAULT=kind:N plants a fault when sequence N is read to train on: so N says which step, and which
// rank. The kinds: nan (in the loss of the micro-batch), kill, stop, hang (while reading), die,
// disk (no file can grow), term (a signal to this rank alone).
// FAULT_AFTER=PATH: once PATH exists, so that what is saved by then is certain.
#include "../../dataloader/loader.h"
#include "../../kernels/kernels.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

bool __real_loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                         int *targets, Error *err);
bool __wrap_loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                         int *targets, Error *err);
void __real_gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate,
                           cudaStream_t stream);
void __wrap_gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate,
                           cudaStream_t stream);

static bool nan_is_due;

static void plant(const char *kind) {
    const char *after = getenv("FAULT_AFTER");
    while (after != NULL && access(after, F_OK) != 0) { usleep(1000); }
    nan_is_due = strcmp(kind, "nan") == 0;
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

bool __wrap_loader_batch(const Loader *loader, int64_t sample, int count, int64_t end, int *inputs,
                         int *targets, Error *err) {
    const char *fault = getenv("FAULT");
    char kind[8];
    long long at;
    bool read = fault != NULL && sscanf(fault, "%7[a-z]:%lld", kind, &at) == 2;
    if (read && end == INT64_MAX && sample <= at && at < sample + count) { plant(kind); }
    return __real_loader_batch(loader, sample, count, end, inputs, targets, err);
}

void __wrap_gpu_sum_losses(double *sum, const float *losses, int M, bool accumulate,
                           cudaStream_t stream) {
    __real_gpu_sum_losses(sum, losses, M, accumulate, stream);
    if (nan_is_due) { *sum = NAN; }
    nan_is_due = false;
}
