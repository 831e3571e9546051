#include "export.h"
#include "../checkpoints/hugging_face.h"
#include "../kernels/cpu.h"
#include "run.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

// Refuses what the programs that serve models cannot compute, or compute otherwise.
static void check_model(const Run *run) {
    const Options *o = &run->options;
    int head = run->config.head_size;
    if (o->load[0] == '\0' || o->resumes) { die("--export: give the weights by --load"); }
    if (run->group.ranks > 1) { die("--export: leave out --gpus: one process writes it"); }
    if (o->logit_softcap > 0) {
        die("--export: --logit-softcap %g: vLLM, llama.cpp and transformers leave the cap of this "
            "model out, which changes its probabilities; --logit-softcap 0 exports it without one",
            o->logit_softcap);
    }
    // multiples of 8: its FlashAttention; from 32 on: its attention in Triton
    if (head % 8 != 0 && head < 32) {
        die("--export: heads of %d channels: vLLM takes multiples of 8, or 32 and more; "
            "transformers opens %s as it is",
            head, o->load);
    }
    if (o->export_fp8 && o->arch == ARCH_GPT2) {
        die("--export-fp8: not for GPT-2: transformers and vLLM read FP8 of other layers than its "
            "own (Conv1D); leave it out, and give vLLM --quantization fp8");
    }
}

static int64_t elements_of(const TensorEntry *t) {
    return t->shape[0] * (t->dims > 1 ? t->shape[1] : 1);
}

// How many entries belong together: a weight in FP8 has its scales after it.
static int parts_of(const TensorEntry *t) {
    return t->dtype == DTYPE_F8_E4M3 ? 2 : 1;
}

static int64_t bytes_of(const TensorEntry *t) {
    int64_t bytes = 0;
    for (int i = 0; i < parts_of(t); i++) { bytes += elements_of(t + i) * dtype_bytes(t[i].dtype); }
    return bytes;
}

// Reads a tensor, and sets its data, and that of its scales, as they are written.
static void read_tensor(Run *run, TensorEntry *t) {
    int64_t n = elements_of(t);
    float *values = malloc_or_die((size_t)n * sizeof(float));
    run_first_weights(run, t->begin, t->begin + n, values);
    if (t->dtype == DTYPE_F8_E4M3) {
        uint8_t *codes = malloc_or_die((size_t)n);
        float *factors = malloc_or_die((size_t)elements_of(t + 1) * sizeof(float));
        encode_squares(codes, factors, values, (int)t->shape[0], (int)t->shape[1]);
        t[0].data = codes;
        t[1].data = factors;
    } else {
        uint16_t *codes = malloc_or_die((size_t)n * sizeof(uint16_t));
        for (int64_t i = 0; i < n; i++) { codes[i] = bf16_encode(values[i]); }
        t->data = codes;
    }
    free(values);
}

// Says which weights other programs read wrongly: vLLM, where it joins layers, and transformers,
// where it turns codes back on a CPU, take all blocks of a weight for equally large.
static void warn_of_edges(const TensorEntry *tensors, int count) {
    const TensorEntry *first = NULL;
    int edges = 0;
    for (const TensorEntry *t = tensors; t < tensors + count; t += parts_of(t)) {
        bool whole = t->shape[0] % FP8_BLOCK == 0 && t->shape[1] % FP8_BLOCK == 0;
        if (t->dtype != DTYPE_F8_E4M3 || whole) { continue; }
        if (edges++ == 0) { first = t; }
    }
    if (edges == 0) { return; }
    warn("--export-fp8: %d weights, the first '%s' [%lld, %lld], are no multiples of 128 x 128: "
         "vLLM and transformers may refuse them or read them wrongly; leave it out for these",
         edges, first->name, (long long)first->shape[0], (long long)first->shape[1]);
}

// The name of a file of so many; the first is 1.
static const char *name_of(char name[64], int file, int files) {
    snprintf(name, 64, files > 1 ? "model-%05d-of-%05d.safetensors" : "model.safetensors", file,
             files);
    return name;
}

// Returns in which file, from 1 on, each of the tensors is; *files: how many there are.
static int *split(const TensorEntry *tensors, int count, double limit, int *files) {
    int *file = calloc_or_die((size_t)count, sizeof(int));
    double filled = 0;
    *files = 1;
    for (int i = 0; i < count; i += parts_of(&tensors[i])) {
        double bytes = (double)bytes_of(&tensors[i]);
        if (filled > 0 && filled + bytes > limit) {
            ++*files;
            filled = 0;
        }
        filled += bytes;
        for (int k = 0; k < parts_of(&tensors[i]); k++) { file[i + k] = *files; }
    }
    return file;
}

// Writes the tensors of one file, which are all in memory meanwhile.
static bool write_part(Run *run, const char *path, TensorEntry *tensors, int count) {
    FileWriter w;
    for (int i = 0; i < count; i += parts_of(&tensors[i])) { read_tensor(run, &tensors[i]); }
    bool ok = safetensors_write(&w, path, tensors, count, "{\"format\":\"pt\"}");
    for (int i = 0; i < count; i++) { free((void *)tensors[i].data); }
    return ok;
}

static bool write_index(const char *folder, const TensorEntry *tensors, const int *file, int count,
                        int files, int64_t bytes) {
    FileWriter w;
    char path[PATH_LENGTH], name[64];
    cJSON *index = cJSON_CreateObject();
    cJSON_AddNumberToObject(cJSON_AddObjectToObject(index, "metadata"), "total_size",
                            (double)bytes);
    cJSON *map = cJSON_AddObjectToObject(index, "weight_map");
    for (int i = 0; i < count; i++) {
        cJSON_AddStringToObject(map, tensors[i].name, name_of(name, file[i], files));
    }
    char *text = cJSON_Print(index);
    path_format(path, "%s/model.safetensors.index.json", folder);
    bool ok = file_write(&w, path, text, strlen(text));
    cJSON_free(text);
    cJSON_Delete(index);
    return ok;
}

// Copies what a run keeps beside the weights: the tokenizer's files, generation_config.json. Writes
// config.json last, without which no program opens the folder.
static bool write_others(const Run *run, const char *folder, Dtype dtype) {
    FileWriter w;
    char path[PATH_LENGTH];
    size_t bytes;
    bool ok = true;
    for (int i = 0; ok && i < run->start.num_files; i++) {
        const char *name = run->start.files[i].name;
        bool written = strncmp(name, "model.", 6) == 0 || strcmp(name, "config.json") == 0;
        if (written || strcmp(name, "meta.json") == 0) { continue; }
        char *data = checkpoint_file(&run->start, name, &bytes);
        ok = data != NULL && file_write(&w, path_format(path, "%s/%s", folder, name), data, bytes);
        free(data);
    }
    char *start = ok ? checkpoint_file(&run->start, "config.json", &bytes) : NULL;
    if (start == NULL) { return false; }
    char *config = hf_config(&run->options, dtype, -1, -1, start, bytes);
    path_format(path, "%s/config.json", folder);
    ok = file_write(&w, path, config, strlen(config)) && folder_sync(folder);
    free(start);
    free(config);
    return ok;
}

void run_export(Run *run) {
    const Options *o = &run->options;
    const char *folder = o->export_to;
    char path[PATH_LENGTH], name[64], size[32];
    Dtype dtype = o->export_fp8 ? DTYPE_F8_E4M3 : DTYPE_BF16;
    TensorEntry *tensors;
    int64_t bytes = 0;
    check_model(run);
    int files, count = hf_tensors(&run->layout, dtype, NULL, &tensors);
    warn_of_edges(tensors, count);
    for (int i = 0; i < count; i += parts_of(&tensors[i])) { bytes += bytes_of(&tensors[i]); }
    int *file = split(tensors, count, o->export_shard_gb * 1e9, &files);
    if (!checkpoint_verify(&run->start)) { die("--load %s", error_text()); }
    if (path_exists(folder)) {
        die("--export %s exists already; give another, or remove it", folder);
    }
    bool ok = folder_make(folder);
    for (int begin = 0, end; ok && begin < count; begin = end) {
        for (end = begin; end < count && file[end] == file[begin]; end++) {}
        path_format(path, "%s/%s", folder, name_of(name, file[begin], files));
        ok = write_part(run, path, tensors + begin, end - begin);
    }
    ok = ok && (files == 1 || write_index(folder, tensors, file, count, files, bytes)) &&
         write_others(run, folder, dtype);
    if (!ok) { die("--export %s", error_text()); }
    printf("%s: %lld parameters, %s, %s in %d file%s\n", folder,
           (long long)run->layout.num_parameters,
           o->export_fp8 ? "linear layers in FP8, all else in BF16" : "BF16",
           format_bytes(size, (double)bytes), files, files > 1 ? "s" : "");
    free(file);
    free(tensors);
}
