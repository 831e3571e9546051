#include "tune.h"
#include "../../base/io.h"
#include "../../kernels/gemm.h"

#include <stdlib.h>
#include <string.h>

// False where nothing is kept.
static bool choices_path(const Run *run, char path[PATH_LENGTH]) {
    path_format(path, "%s/gemm_choices.txt", run->options.save);
    return run->rank == 0 && run->options.save[0] != '\0';
}

void tune_begin(Gpu *gpu, const Run *run) {
    char path[PATH_LENGTH];
    MappedFile file;
    Error err;
    run_beat(run, DOING_PAUSE, "tuning products");
    if (choices_path(run, path) && path_exists(path)) {
        if (!file_map(&file, path, &err)) { die("%s", err.text); }
        gemm_take_choices(gpu, (const char *)file.data, file.bytes);
        file_unmap(&file);
    }
    gemm_autotune(gpu, run->rank == 0);
}

void tune_end(Gpu *gpu, const Run *run) {
    char path[PATH_LENGTH], *text = run->rank == 0 ? gemm_choices(gpu) : NULL;
    size_t bytes = text != NULL ? strlen(text) : 0;
    Error err;
    gemm_autotune(gpu, false);
    if (run->ranks > 1) {
        group_broadcast(run->group, CHANNEL_MAIN, &bytes, sizeof(bytes));
        if (text == NULL) { text = malloc_or_die(bytes + 1); }
        group_broadcast(run->group, CHANNEL_MAIN, text, bytes);
    }
    if (run->rank > 0) { gemm_take_choices(gpu, text, bytes); }
    if (choices_path(run, path) && !file_replace(path, text, bytes, &err)) { warn("%s", err.text); }
    free(text);
}
