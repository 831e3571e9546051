// The line of a step, as a log has it and as a terminal shows it while the run goes on.
#include "run.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { STEP_LINE = 400 };

// Of the terminal that stdout is; 0 where it is none.
static int terminal_columns(void) {
    struct winsize size;
    if (!isatty(STDOUT_FILENO)) { return 0; }
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// A short form of the line, cut if need be, where it would have `room` characters or more: a live
// line is drawn over, so it must fit into one row.
static void step_line(char line[STEP_LINE], const Run *run, StepResult s, double tokens_per_s,
                      int room) {
    const Progress *p = &run->progress;
    char start[128], eta[32], mfu[32] = "", memory[48] = "", size[32];
    double flops = tokens_per_s * flops_per_token(&run->config);
    format_duration(eta, run->step_seconds * (double)(run->options.train_iters - p->step));
    if (run->peak_flops > 0) {
        double peak = run->peak_flops * run->ranks;
        snprintf(mfu, sizeof(mfu), " | MFU %.1f%%", 100 * flops / peak);
    }
    if (run->memory_bytes > 0) {
        snprintf(memory, sizeof(memory), " | %s", format_bytes(size, run->memory_bytes));
    }
    snprintf(start, sizeof(start), "step %5lld/%lld | loss %.4f", (long long)p->step,
             (long long)run->options.train_iters, s.loss);
    int length = snprintf(
        line, STEP_LINE,
        "%s | lr %.2e | norm %.4f | dt %.2f ms | %.0f tok/s | %.3g TFLOP/s%s%s | ETA %s | %s%s",
        start, s.lr, s.norm, 1e3 * s.seconds, tokens_per_s, flops / 1e12, mfu, memory, eta,
        precision_name(&run->precision), s.skipped ? " | SKIPPED" : "");
    if (length < room) { return; }
    length = snprintf(line, STEP_LINE, "%s | %.0f tok/s | ETA %s", start, tokens_per_s, eta);
    if (length >= room) { line[room - 1] = '\0'; }
}

// On a terminal a live line stands for the steps between two of --log-interval.
void step_print(Run *run, StepResult s, double tokens_per_s) {
    int64_t step = run->progress.step;
    int columns = terminal_columns();
    bool whole = step % run->options.log_interval == 0 || step == run->options.train_iters ||
                 s.skipped;
    if (!whole && (columns == 0 || wall_seconds() - run->last_line < 0.2)) { return; }
    run->last_line = wall_seconds();
    char line[STEP_LINE];
    step_line(line, run, s, tokens_per_s, whole ? STEP_LINE : columns);
    printf("%s%s%s", columns > 0 ? "\r\033[K" : "", line, whole ? "\n" : "");
    fflush(stdout);
}
