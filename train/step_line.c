// The line of a step, and the room there is for it.
#include "run.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

int terminal_columns(void) {
    struct winsize size;
    if (!isatty(STDOUT_FILENO)) { return 0; }
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void step_line(char line[STEP_LINE], const Run *run, StepResult s, double tokens_per_s, int room) {
    const Progress *p = &run->progress;
    char start[64], eta[32], mfu[32] = "", memory[48] = "", size[32];
    double flops = tokens_per_s * flops_per_token(&run->config);
    format_duration(eta, run->step_seconds * (double)(run->options.train_iters - p->step));
    if (run->peak_flops > 0) {
        snprintf(mfu, sizeof(mfu), " | MFU %.1f%%", 100 * flops / run->peak_flops);
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
