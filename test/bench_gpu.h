// What the benchmarks of kernels share: inputs made on the device alone, and the line that says how
// long a call took beside its floor, the bytes that must move over 4.3 TB/s or the operations over
// 800 TFLOP/s in BF16.
#ifndef LLM8_BENCH_GPU_H
#define LLM8_BENCH_GPU_H

#include "gpu_test.h"

static const double BYTES_PER_S = 4.3e12, FLOPS_PER_S = 800e12;
static const char *wanted = "";

// Random values on the device alone: a million of them, over and over.
struct Filled {
    Bf16Buffer device;

    Filled(size_t n, float scale) : device(n) {
        const size_t period = 1 << 20;
        static Floats values = random_bf16(period, 1.0f);
        std::vector<Bf16> codes(period);
        for (size_t i = 0; i < period; i++) { codes[i] = bf16_encode(scale * values[i]); }
        for (size_t at = 0; at < n; at += period) {
            size_t count = n - at < period ? n - at : period;
            gpu_send(&gpu, device.data + at, codes.data(), count * sizeof(Bf16));
        }
    }
};

static void report(const char *name, const char *shape, float ms, double floor_s) {
    printf("%-26s %-26s %8.3f ms %6.1f%% of the floor\n", name, shape, ms,
           100 * floor_s / (1e-3 * ms));
    fflush(stdout);
}

template <typename Call>
static void bench(const char *name, const char *shape, double floor_s, Call call) {
    if (strstr(name, wanted) != NULL) { report(name, shape, time_ms(call), floor_s); }
}

static double bytes(double elements) {
    return 2 * elements / BYTES_PER_S; // BF16
}

static const char *shape_text(const char *format, int a, int b) {
    static char text[64];
    snprintf(text, sizeof(text), format, a, b);
    return text;
}

#endif
