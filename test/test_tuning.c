// The choice of products' algorithms (train/gpu/tuning.h) from made-up times of trials.
#include "../base/rng.h"
#include "../train/gpu/tuning.h"
#include "test.h"

#include <math.h>

enum { PRODUCTS = 15, MOST = 4 };
static const int counts[PRODUCTS] = {4, 1, 3, 4, 2, 4, 4, 1, 4, 3, 4, 4, 2, 4, 4};

// Of a step of 190 ms: from 1% faster to 1% slower than a product's first algorithm.
static double effect_of(int product, int algorithm, uint64_t seed) {
    uint64_t bits = rng_bits(seed, (uint64_t)(product * MOST + algorithm));
    return algorithm == 0 ? 0 : ((double)(bits % 2001) - 1000) * 1.9e-3;
}

// Times with a drift of 1% and noise, and one of twice the length; how much the choice costs beside
// the best, in ms. *gain: what it saves beside all first algorithms.
static double regret(uint64_t seed, double noise, bool mixed_up, double *gain) {
    const int trials = tuning_trials(counts, PRODUCTS);
    FREED float *ms = malloc_or_die((size_t)trials * sizeof(float));
    int best[PRODUCTS];
    double lost = 0;
    for (int t = 0; t < trials; t++) {
        int drawn = mixed_up ? (t * 7 + 3) % trials : t;
        double time = 190 + 1.9 * t / trials + noise * rng_normal(seed, 1000 + (uint64_t)t);
        for (int i = 0; i < PRODUCTS; i++) {
            time += effect_of(i, tuning_algorithm(counts, i, trials, drawn), seed);
        }
        ms[t] = (float)(t == trials / 3 ? 2 * time : time);
    }
    tuning_judge(counts, PRODUCTS, ms, trials, best);
    *gain = 0;
    for (int i = 0; i < PRODUCTS; i++) {
        double least = 0;
        CHECK(best[i] >= 0 && best[i] < counts[i]);
        for (int k = 0; k < counts[i]; k++) { least = fmin(least, effect_of(i, k, seed)); }
        *gain -= effect_of(i, best[i], seed);
        lost += effect_of(i, best[i], seed) - least;
    }
    return lost;
}

TEST(every_algorithm_is_tried_equally_often) {
    const int trials = tuning_trials(counts, PRODUCTS);
    CHECK(trials > 60 && trials < 150);
    for (int i = 0; i < PRODUCTS; i++) {
        int times[MOST] = {0};
        for (int t = 0; t < trials; t++) { times[tuning_algorithm(counts, i, trials, t)]++; }
        for (int k = 0; k < counts[i]; k++) {
            CHECK(times[k] == trials / counts[i] || times[k] == trials / counts[i] + 1);
        }
    }
    const int ones[] = {1, 1, 1};
    CHECK_EQUAL(tuning_trials(ones, 3), 0);
}

// What GPUs do: 0.15% of noise.
TEST(the_fastest_are_found) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        double gain, lost = regret(seed, 0.3, false, &gain);
        CHECK(lost < 0.2 * 1.9); // a fifth of a percent, over 15 products
        CHECK(gain > 3 * 1.9);
        CHECK(regret(seed, 0.3, true, &gain) > 1.9); // times of other trials
    }
}

// Effects that drown in noise are left alone, but for a chance of 1 in 40 each.
TEST(noise_is_not_followed) {
    double all = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        double gain;
        regret(seed, 100, false, &gain);
        all += gain;
    }
    CHECK(all / 20 > -0.5 * 1.9);
}
