// Decides which steps are skipped, in both trainers. A step is skipped if its loss or its gradient
// norm is not finite, or is far above the mean of the last steps (--skip-spikes; Groeneveld et al.,
// "OLMo", 2024). A step is also skipped on request (--iterations-to-skip), for instance because its
// data lie around a spike (Chowdhery et al., "PaLM", 2022, section 5.1).
#pragma once

#include "../base/common.h"

#include <math.h>

enum { SPIKE_WINDOW = 128 };

// Losses and norms of the last steps that were not skipped. The next step's loss and norm are
// written at index count % SPIKE_WINDOW.
typedef struct {
    int64_t count;
    double loss[SPIKE_WINDOW], norm[SPIKE_WINDOW];
} SpikeWindow;

typedef enum { SKIP_NONE, SKIP_NONFINITE, SKIP_SPIKE, SKIP_REQUESTED } SkipReason;

// Returns whether x lies more than `sigma` standard deviations above the window's mean.
HOST_DEVICE static inline bool spike_above(const double *window, double sigma, double x) {
    double mean = 0.0, squares = 0.0;
    for (int i = 0; i < SPIKE_WINDOW; i++) { mean += window[i] / SPIKE_WINDOW; }
    for (int i = 0; i < SPIKE_WINDOW; i++) {
        squares += (window[i] - mean) * (window[i] - mean) / (SPIKE_WINDOW - 1);
    }
    return x > mean + sigma * sqrt(squares);
}

// Returns why the step is skipped, or SKIP_NONE. Adds the loss and the norm of a step that is not
// skipped to the window. No step counts as a spike if sigma is 0, or before the window is full.
HOST_DEVICE static inline SkipReason step_skip(SpikeWindow *w, double sigma, bool requested,
                                               double loss, double norm) {
    if (requested) { return SKIP_REQUESTED; }
    if (!isfinite(loss) || !isfinite(norm)) { return SKIP_NONFINITE; }
    if (sigma > 0.0 && w->count >= SPIKE_WINDOW &&
        (spike_above(w->loss, sigma, loss) || spike_above(w->norm, sigma, norm))) {
        return SKIP_SPIKE;
    }
    w->loss[w->count % SPIKE_WINDOW] = loss;
    w->norm[w->count % SPIKE_WINDOW] = norm;
    w->count++;
    return SKIP_NONE;
}
