#include "console.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
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

// Returns the columns of the terminal, or 0 if the standard output is not a terminal.
static int terminal_columns(void) {
    struct winsize size;
    if (!isatty(STDOUT_FILENO)) { return 0; }
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : 80;
}

void console_step(Console *c, const StepLine *s) {
    enum { LOSS = 1, NORM, LR, SPEED, USE, ETA, SKIPPED, FIELDS, FIELD = 64, WIDTH = 100 };
    // the order in which fields are left out of a line that is too long
    static const int dropped[] = {USE, LR, NORM, ETA, SPEED};
    int columns = terminal_columns();
    if (!s->whole && (columns == 0 || wall_seconds() - c->last_line < 0.2)) { return; }
    if (!s->whole) { c->last_line = wall_seconds(); }

    char field[FIELDS][FIELD], line[FIELDS * (FIELD + 3)] = "", text[32];
    snprintf(field[0], FIELD, "step %5lld/%lld", (long long)s->step, (long long)s->steps);
    snprintf(field[LOSS], FIELD, "loss %s", format_number(text, s->loss));
    snprintf(field[NORM], FIELD, "norm %s", format_number(text, s->norm));
    snprintf(field[LR], FIELD, "lr %.2e", s->lr);
    snprintf(field[SPEED], FIELD, "%.0f tok/s", s->tokens_per_s);
    snprintf(field[USE], FIELD, s->use > 0 ? "MFU %.1f%%" : "%.2f ms",
             s->use > 0 ? 100 * s->use : 1e3 * s->seconds);
    format_duration(text, c->step_seconds * (double)(s->steps - s->step));
    snprintf(field[ETA], FIELD, "ETA %s", text);
    if (s->start_seconds > 0) { snprintf(field[ETA], FIELD, "start %.1f s", s->start_seconds); }
    snprintf(field[SKIPPED], FIELD, "%s", s->skipped);

    int room = s->whole || columns > WIDTH ? WIDTH : columns - 1, length = -3;
    for (int i = 0; i < FIELDS; i++) { length += field[i][0] ? (int)strlen(field[i]) + 3 : 0; }
    for (size_t i = 0; length > room && i < sizeof(dropped) / sizeof(dropped[0]); i++) {
        length -= (int)strlen(field[dropped[i]]) + 3;
        field[dropped[i]][0] = '\0';
    }
    for (int i = 0; i < FIELDS; i++) {
        if (i > 0 && field[i][0] != '\0') { strcat(line, " | "); }
        strcat(line, field[i]);
    }
    printf("%s%.*s%s", line_start(STDOUT_FILENO), room, line, s->whole ? "\n" : "");
}
