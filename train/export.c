// --export: writes the weights of --load to a folder for programs that serve models.
#include "../checkpoints/hugging_face.h"
#include "../kernels/cpu.h"
#include "run_data.h"
#include "start.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Refuses models that vLLM, llama.cpp or transformers cannot compute, or compute differently.
static void check_model(const Run *run) {
    const Options *o = &run->options;
    int head = run->config.head_size;
    if (o->load[0] == '\0' || o->resumes || run->group.ranks > 1) {
        die("--export: give the weights by --load, and one process");
    }
    if (o->logit_softcap > 0) {
        die("--export: --logit-softcap %g: vLLM, llama.cpp and transformers leave it out, which "
            "changes probabilities; --logit-softcap 0 exports without it",
            o->logit_softcap);
    }
    // vLLM's FlashAttention takes multiples of 8, its Triton kernel any head size from 32 on
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

// Reads the tensor t[0] into new memory. If it is an FP8 weight, its scales t[1] are computed, too.
// The caller frees the data of both.
static void read_tensor(Run *run, TensorEntry *t) {
    int64_t n = t->shape[0] * max64(1, t->shape[1]);
    FREED float *values = malloc_or_die((size_t)n * sizeof(float));
    uint16_t *codes = malloc_or_die((size_t)(n * dtype_bytes(t->dtype)));
    run_first_weights(run, t->begin, t->begin + n, values);
    t->data = codes;
    if (t->dtype == DTYPE_F8_E4M3) {
        float *factors = malloc_or_die((size_t)(t[1].shape[0] * t[1].shape[1]) * sizeof(float));
        t[1].data = factors;
        Fp8Blocks blocks = {(int)t->shape[0], (int)t->shape[1], FP8_BLOCK,
                            FP8_BLOCK,        FP8_E4M3,         false,
                            (uint8_t *)codes, factors};
        round_blocks_to_fp8(values, values, blocks, NULL);
    } else {
        for (int64_t i = 0; i < n; i++) { codes[i] = bf16_encode(values[i]); }
    }
}

// Copies the files beside the weights: the tokenizer's files and generation_config.json. Writes
// config.json last, because no program opens the folder without this file.
static bool write_others(const Run *run, const char *folder, Dtype dtype) {
    char path[PATH_LENGTH];
    size_t bytes;
    bool tokenizer = false;
    for (int i = 0; i < COMPANIONS; i++) {
        path_format(path, "%s/%s", run->start.path, companion_names[i]);
        Companion c = run_read_companion(path);
        FREED char *data = c.bytes;
        path_format(path, "%s/%s", folder, companion_names[i]);
        if (data != NULL && !file_replace(path, data, c.size)) { return false; }
        tokenizer |= data != NULL && strcmp(companion_names[i], "tokenizer.json") == 0;
    }
    if (!tokenizer) {
        warn("%s has no tokenizer.json, so %s has none; copy the tokenizer's files there",
             run->start.path, folder);
    }
    FREED char *text = file_read(path_format(path, "%s/config.json", run->start.path), &bytes);
    if (text == NULL) { return false; }
    FREED char *config = hf_config(&run->options, dtype, -1, -1, -1, text, bytes);
    path_format(path, "%s/config.json", folder);
    return file_replace(path, config, strlen(config));
}

void run_export(Run *run) {
    const Options *o = &run->options;
    const char *folder = o->export_to;
    char path[PATH_LENGTH], name[64], size[32];
    Dtype dtype = o->export_fp8 ? DTYPE_F8_E4M3 : DTYPE_BF16;
    FileWriter w;
    FREED TensorEntry *tensors = NULL;
    const TensorEntry *edges = NULL; // an FP8 weight whose last blocks are smaller than the others
    check_model(run);
    int files = 0, count = hf_tensors(&run->layout, dtype, NULL, &tensors);
    // the first tensor of each file
    FREED int *starts = calloc_or_die((size_t)count + 1, sizeof(int));
    double filled = 0, total = 0, limit = o->export_shard_gb * 1e9;
    for (int i = 0; i < count; i++) {
        const TensorEntry *t = &tensors[i];
        double bytes = (double)(t->shape[0] * max64(1, t->shape[1]) * dtype_bytes(t->dtype));
        bool next = i == 0 || filled + bytes > limit;
        bool whole = t->shape[0] % FP8_BLOCK == 0 && t->shape[1] % FP8_BLOCK == 0;
        if (next) { starts[files++] = i; }
        if (t->dtype == DTYPE_F8_E4M3 && !whole) { edges = t; }
        filled = next ? bytes : filled + bytes;
        total += bytes;
    }
    starts[files] = count;
    if (edges != NULL) { // vLLM and transformers expect blocks of one size
        warn("--export-fp8: weights such as '%s' [%lld, %lld] are no multiples of 128 x 128: vLLM "
             "and transformers may refuse them or read them wrongly; there, serve it in BF16",
             edges->name, (long long)edges->shape[0], (long long)edges->shape[1]);
    }
    if (!checkpoint_verify(&run->start)) { die("--load %s", error_text()); }
    if (path_exists(folder)) { die("--export %s exists already; give another one", folder); }
    bool ok = folder_make(folder);
    CLOSED(json_close) cJSON *index = cJSON_CreateObject();
    cJSON *map = cJSON_AddObjectToObject(index, "weight_map");
    cJSON_AddNumberToObject(cJSON_AddObjectToObject(index, "metadata"), "total_size", total);
    // only one file's tensors are in memory at a time
    for (int file = 0; ok && file < files; file++) {
        TensorEntry *begin = tensors + starts[file], *end = tensors + starts[file + 1];
        const char *form = files > 1 ? "model-%05d-of-%05d.safetensors" : MODEL_FILE;
        snprintf(name, sizeof(name), form, file + 1, files);
        for (TensorEntry *t = begin; t < end; t++) {
            if (t->data == NULL) { read_tensor(run, t); }
            cJSON_AddStringToObject(map, t->name, name);
        }
        path_format(path, "%s/%s", folder, name);
        ok = safetensors_write(&w, path, begin, (int)(end - begin), "{\"format\":\"pt\"}");
        for (TensorEntry *t = begin; t < end; t++) { free((void *)t->data); }
    }
    if (ok && files > 1) {
        FREED char *text = cJSON_Print(index);
        path_format(path, "%s/model.safetensors.index.json", folder);
        ok = file_replace(path, text, strlen(text));
    }
    if (!ok || !write_others(run, folder, dtype)) {
        Error why = error_kept();
        folder_remove(folder); // this run has made the folder; the next run makes it again
        die("--export %s", why.text);
    }
    printf("%s: %s, %s in %d file%s\n", folder,
           o->export_fp8 ? "linear layers in FP8, all else in BF16" : "BF16",
           format_bytes(size, total), files, plural(files));
}
