#include "state.h"
#include "../ranks/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

void run_beat(const Run *run, Activity activity, const char *what) {
    watch_beat(run->group.watch, run->progress.step, activity, what);
}

static volatile sig_atomic_t stop_signal; // global, so that a signal handler can set it

static void request_stop(int number) {
    stop_signal = number;
}

int run_stop_signal(void) {
    return stop_signal;
}

void run_end_by_data(Run *run, const char *option) {
    if (run->data_fault.text[0] != '\0') { return; }
    fail("--%s %.700s", option, error_text());
    run->data_fault = error_kept();
    complain("%s", run->data_fault.text);
    request_stop(-1);
}

// The first signal of a kind requests the end after the present step; the second one of the same
// kind ends the process at once. But SIGHUP may come from both the shell and the terminal, and
// SIGXCPU comes every second, so these two never end the process at once. If nohup has made the
// process ignore SIGHUP, SIGHUP stays ignored.
void run_catch_signals(void) {
    for (int i = 0; i < STOP_SIGNALS; i++) {
        int number = stop_signals[i];
        bool repeats = number == SIGHUP || number == SIGXCPU;
        struct sigaction action = {.sa_handler = request_stop,
                                   .sa_flags = SA_RESTART | (repeats ? 0 : (int)SA_RESETHAND)},
                         old;
        sigaction(number, NULL, &old);
        if (number != SIGHUP || old.sa_handler != SIG_IGN) { sigaction(number, &action, NULL); }
    }
}

void console_open(Run *run) {
    Console *c = &run->console;
    bool trains = options_train(&run->options), quiet = run->options.quiet || run->group.rank > 0;
    c->answers = stdout;
    if (trains && !quiet) { return; }
    fflush(stdout);
    int rest = quiet ? open("/dev/null", O_WRONLY | O_CLOEXEC) : STDERR_FILENO;
    if (!trains) { c->answers = fdopen(dup(STDOUT_FILENO), "w"); }
    if (rest < 0 || c->answers == NULL || dup2(rest, STDOUT_FILENO) < 0) {
        die("the standard output: %s", strerror(errno));
    }
}

void console_flush(Run *run) {
    Console *c = &run->console;
    if (output_flush(c->answers)) { return; }
    // in a run that does not train, the answers are all that was requested
    or_die(options_train(&run->options));
    if (!c->mute) { warn("%s; the run continues", error_text()); }
    c->mute = true;
}
