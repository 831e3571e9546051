// What this process may use of its host: cores, and the limits of its container.
#pragma once

#include "common.h"

BEGIN_C

// The number of cores, perhaps a fraction, that this process's control groups allow: the lowest
// limit of its own group and that group's ancestors (Linux's cgroup-v2.rst and cgroup-v1).
// Infinity: no group sets a limit. root: "", or in a test a folder that stands in for /.
double cgroup_cores(const char *root);

// Returns how many cores this process may use by its affinity and its container's quota, at least
// 1.
int host_cores(const char *root);

// The bytes of memory that this process can still take from the machine and its container, without
// swap. Infinity: not known. root: in a test a folder that stands in for /; NULL: LLM8_TEST_ROOT,
// or / if that is not set.
double host_memory(const char *root);

// Sets the number of threads of OpenMP and of threads_for: OMP_NUM_THREADS if it is set, else the
// host's cores divided by `processes`.
void threads_divide(int processes);

// Calls task(context, i) for each i below count, on several threads, in no fixed order, and waits
// for all calls. Returns whether all calls returned true. If not, error_text() is the error of one
// call that failed. While the caller waits, it sleeps.
typedef bool Task(void *context, int64_t i);
bool threads_for(int64_t count, Task *task, void *context);

// Lets OpenMP's waiting threads spin for some 50 microseconds before they sleep, unless
// OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, or threads are bound to cores. Longer spinning takes
// cores from other programs, and from this one where the cores are busy; without spinning, a step
// of a small model takes a fifth longer. libgomp reads GOMP_SPINCOUNT before main(), so this
// function sets it and executes the program again. argv: main's.
void threads_spin_briefly(char **argv);

END_C
