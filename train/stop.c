// The signals that ask a run to end.
#include "run.h"

#include <signal.h>

static volatile sig_atomic_t stop_signal; // what a handler can reach

static void request_stop(int number) {
    stop_signal = number;
}

int run_stop_signal(void) {
    return stop_signal;
}

// The first signal asks for an end after this step; a second one of its kind ends at once.
void run_catch_signals(void) {
    struct sigaction action = {.sa_handler = request_stop,
                               .sa_flags = SA_RESTART | (int)SA_RESETHAND};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
}
