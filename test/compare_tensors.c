// compare_tensors A B C K: for every tensor of safetensors file A, the relative error of A against
// B may be at most K times that of C against B, or K * 1e-6 (1e-3 for a single number, whose errors
// can cancel). It prints the worst tensor, and exits with status 1 if a tensor is above the limit
// or missing. So the error of a GPU's gradients (A) against FP32 (B) is compared with the error of
// plain low-precision arithmetic (C).
#define TEST_OWN_MAIN
#include "../checkpoints/safetensors.h"
#include "test.h"

static float *read_all(const SafeTensors *st, const char *name, int64_t *n) {
    const TensorEntry *e = safetensors_find(st, name);
    if (e == NULL) { die("%s: no tensor '%s'", st->path, name); }
    *n = (e->end - e->begin) / dtype_bytes(e->dtype);
    float *values = malloc_or_die((size_t)*n * sizeof(float));
    or_die(safetensors_read_floats(st, e, 0, *n, values));
    return values;
}

int main(int argc, char **argv) {
    SafeTensors files[3];
    if (argc != 5) { die("usage: %s A B C K", argv[0]); }
    for (int i = 0; i < 3; i++) { or_die(safetensors_open(&files[i], argv[1 + i])); }
    double k = atof(argv[4]), worst = 0, worst_error = 0;
    const char *worst_name = "nothing";
    int over = 0;
    for (int i = 0; i < files[0].count; i++) {
        const char *name = files[0].entries[i].name;
        int64_t n[3];
        float *v[3];
        for (int f = 0; f < 3; f++) { v[f] = read_all(&files[f], name, &n[f]); }
        if (n[0] != n[1] || n[1] != n[2]) { die("%s: other sizes", name); }
        double error = test_relative_error(v[0], v[1], n[0]);
        double yardstick = test_relative_error(v[2], v[1], n[0]) + 1e-6;
        double allowed = n[0] == 1 ? fmax(1e-3, k * yardstick) : k * yardstick;
        if (!(error <= allowed)) {
            printf("%s: error %.3g, allowed %.3g\n", name, error, allowed);
            over++;
        }
        if (!(error / yardstick <= worst)) {
            worst = error / yardstick;
            worst_error = error;
            worst_name = name;
        }
        for (int f = 0; f < 3; f++) { free(v[f]); }
    }
    printf("%d tensors; worst %s: error %.3g, %.2f times the yardstick\n", files[0].count,
           worst_name, worst_error, worst);
    for (int i = 0; i < 3; i++) { safetensors_close(&files[i]); }
    return over > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
