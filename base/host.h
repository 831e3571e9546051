// What this process may use of its host: cores, and the limits of its container.
#pragma once

#include "common.h"

BEGIN_C

// Returns the number of cores, possibly fractional, that this process's cgroup allows: the lowest
// limit of the cgroup and its ancestors (Linux's cgroup-v2.rst and cgroup-v1). Returns infinity if
// there is no limit. root: "", or in a test a folder that is read in place of /.
double cgroup_cores(const char *root);

// Returns how many cores this process's affinity and its container's quota allow, at least 1.
int host_cores(const char *root);

// Returns how many bytes of memory this process can still allocate within the limits of the machine
// and its container, without swap. Returns infinity if that is not known. root: a folder that is
// read in place of /, or NULL for the folder that LLM8_TEST_ROOT names (/ if it is not set).
double host_memory(const char *root);

// Sets the number of threads of OpenMP and of threads_for: OMP_NUM_THREADS if it is set and not too
// large, else host_cores() divided by `processes`.
void threads_divide(int processes);

// Calls task(context, i) for each i below count, on several threads, in no fixed order, and waits
// for all calls. The calling thread makes calls too, and then sleeps until the other threads have
// ended. Returns whether all calls returned true. If not, error_text() is the error of one call
// that failed.
typedef bool Task(void *context, int64_t i);
bool threads_for(int64_t count, Task *task, void *context);

// Lets OpenMP's waiting threads spin for some 50 microseconds before they sleep, unless
// OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, or threads are bound to cores. Longer spinning would
// take cores from other threads and programs; without spinning, a step of a small model takes a
// fifth longer. libgomp reads GOMP_SPINCOUNT before main(), so this function sets it and executes
// the program again. argv: main's.
void threads_spin_briefly(char **argv);

END_C
