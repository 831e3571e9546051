#include "tuning.h"

#include "../../base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// The base, the drift, and the effects of all algorithms but the first of each product.
enum { BASE, DRIFT, EFFECTS };

static int unknowns(const int *counts, int products) {
    int n = EFFECTS;
    for (int i = 0; i < products; i++) { n += counts[i] - 1; }
    return n;
}

int tuning_trials(const int *counts, int products) {
    int n = unknowns(counts, products);
    return n > EFFECTS ? 2 * n + 16 : 0;
}

int tuning_algorithm(const int *counts, int product, int trials, int trial) {
    uint64_t place = rng_permute((uint64_t)product, (uint64_t)trials, (uint64_t)trial);
    return (int)(place % (uint64_t)counts[product]);
}

// What trial t multiplies the unknowns by.
static void row_of(const int *counts, int products, int trials, int t, double *row) {
    int n = EFFECTS;
    memset(row, 0, (size_t)unknowns(counts, products) * sizeof(double));
    row[BASE] = 1;
    row[DRIFT] = (double)t / trials;
    for (int i = 0; i < products; n += counts[i++] - 1) {
        int algorithm = tuning_algorithm(counts, i, trials, t);
        if (algorithm > 0) { row[n + algorithm - 1] = 1; }
    }
}

// a [n,n], symmetric and positive definite, becomes its inverse (Gauss-Jordan).
static void invert(double *a, int n) {
    for (int k = 0; k < n; k++) {
        double pivot = 1 / a[k * n + k];
        a[k * n + k] = 1;
        for (int j = 0; j < n; j++) { a[k * n + j] *= pivot; }
        for (int i = 0; i < n; i++) {
            double factor = a[i * n + k];
            if (i == k) { continue; }
            a[i * n + k] = 0;
            for (int j = 0; j < n; j++) { a[i * n + j] -= factor * a[k * n + j]; }
        }
    }
}

static double dot(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }
    return sum;
}

// The unknowns by least squares over the trials that are kept; inverse times the variance, which is
// returned, is their covariance.
static double fit(const double *rows, const float *ms, const bool *kept, int trials, int n,
                  double *inverse, double *x) {
    const double ridge = 1e-9; // two algorithms may always have been taken together
    double *sums = calloc_or_die((size_t)n, sizeof(double)), squares = 0;
    int left = 0;
    memset(inverse, 0, (size_t)n * (size_t)n * sizeof(double));
    for (int i = 0; i < n; i++) { inverse[i * n + i] = ridge; }
    for (int t = 0; t < trials; t++) {
        const double *row = rows + t * n;
        for (int i = 0; i < n && kept[t]; i++) {
            for (int j = 0; j < n; j++) { inverse[i * n + j] += row[i] * row[j]; }
            sums[i] += row[i] * ms[t];
        }
    }
    invert(inverse, n);
    for (int i = 0; i < n; i++) { x[i] = dot(inverse + i * n, sums, n); }
    for (int t = 0; t < trials; t++) {
        double error = ms[t] - dot(rows + t * n, x, n);
        squares += kept[t] ? error * error : 0;
        left += kept[t];
    }
    free(sums);
    return squares / (left > n ? left - n : 1);
}

void tuning_judge(const int *counts, int products, const float *ms, int trials, int *best) {
    const double least = 0.0005, outlier = 4;
    const int n = unknowns(counts, products);
    double *rows = malloc_or_die((size_t)trials * (size_t)n * sizeof(double));
    double *inverse = malloc_or_die((size_t)n * (size_t)n * sizeof(double));
    double *x = calloc_or_die((size_t)n, sizeof(double)), variance = INFINITY;
    bool *kept = malloc_or_die((size_t)trials * sizeof(bool));
    for (int t = 0; t < trials; t++) { row_of(counts, products, trials, t, rows + t * n); }
    for (int pass = 0; pass < 2; pass++) { // the second without what the first cannot explain
        for (int t = 0; t < trials; t++) {
            double error = ms[t] - dot(rows + t * n, x, n);
            kept[t] = error * error <= outlier * outlier * variance;
        }
        variance = fit(rows, ms, kept, trials, n, inverse, x);
    }
    for (int i = 0, at = EFFECTS; i < products; at += counts[i++] - 1) {
        double most = least * x[BASE];
        best[i] = 0;
        for (int k = at; k < at + counts[i] - 1; k++) {
            if (-x[k] <= most || -x[k] <= 2 * sqrt(variance * inverse[k * n + k])) { continue; }
            most = -x[k];
            best[i] = k - at + 1;
        }
    }
    free(rows);
    free(inverse);
    free(x);
    free(kept);
}
