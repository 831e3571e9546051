#include "console.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

void console_open(Console *c, bool trains, bool quiet) {
    c->answers = stdout;
    c->trains = trains;
    if (trains && !quiet) { return; }
    fflush(stdout);
    int rest = quiet ? open("/dev/null", O_WRONLY | O_CLOEXEC) : STDERR_FILENO;
    if (!trains) { c->answers = fdopen(dup(STDOUT_FILENO), "w"); }
    if (rest < 0 || c->answers == NULL || dup2(rest, STDOUT_FILENO) < 0) {
        die("the standard output: %s", strerror(errno));
    }
}

void console_flush(Console *c) {
    if (output_flush(c->answers)) { return; }
    or_die(c->trains); // in a run that does not train, the answers are all that was requested
    if (!c->mute) { warn("%s; the run continues", error_text()); }
    c->mute = true;
}
