// What this process may use of its host: cores, and the limits of its container.
#pragma once

#include "common.h"

BEGIN_C

// Cores that the control groups of this process leave it, from its own group up to the root
// (Linux's cgroup-v2.rst and cgroup-v1); infinity where none sets a limit. root: "" but in tests.
double cgroup_cores(const char *root);

// Cores that this process may use, at least 1: by its affinity and by its container's quota.
int host_cores(const char *root);

// Bytes of memory that this process may still take: of the machine's and of its container's,
// without swap. Infinity: not known. root: NULL, but in tests; those of whole trainers set
// LLM8_TEST_ROOT.
double host_memory(const char *root);

// OpenMP's threads, and those of threads_for: as many as OMP_NUM_THREADS says, else this process'
// part of the cores, which so many processes of the host divide among them.
void threads_divide(int processes);

// task(context, i) for each i below count, on several threads, in no order; returns once all are
// done. Threads that wait sleep.
void threads_for(int64_t count, void (*task)(void *context, int64_t i), void *context);

// OpenMP's threads spin for some 50 microseconds where they wait, and then sleep, unless
// OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise, or threads are bound to cores: longer starves
// other programs, and this one where the cores are busy; sleeping at once costs a step of a small
// model a fifth. libgomp reads this before main(), so the program starts anew, once. argv: main's.
void threads_spin_briefly(char **argv);

END_C
