// Checkpoints: everything a run needs to go on as if it had never stopped.
//
// Under --save DIR:
//   step_00000250/          one checkpoint, complete by the time it bears this name
//     meta.json             see below
//     model.safetensors     the weights under Hugging Face's names, and
//     config.json           with it, so that `transformers` opens the folder, together with
//     tokenizer.json, tokenizer_config.json   where the data's folder has them
//     optimizer-R-of-N.safetensors   rank R's part: "master", "exp_avg", "exp_avg_sq", flat; its
//                           metadata "ranges" says which elements of the parameter space they are,
//                           as "begin:end,begin:end"
//     scaling.safetensors   delayed FP8 runs, by slot (model/precision.h): "scale" [S], "target"
//     [S]
//                           (what amax * scale aims at), "count" [S], "amax_history" [S,length];
//                           count % length is where the next amax goes
//   latest -> step_...      symbolic links
//   best -> step_...        the lowest validation loss
//   metrics.jsonl, config.txt
//
// meta.json is one object: "format", "version" (1), what is in Progress, "ranks", "precision",
// "layout_size", "data", "options" (every option's text), "files" (name, bytes, CRC-32), and last
// "crc32", the CRC-32 of the file itself with that field's eight digits as zeros.
//
// A checkpoint is written as .tmp-step_..., every file synced, then renamed; `latest` moves after
// that, and only then are older checkpoints deleted. What an interrupted run leaves behind starts
// with a dot and is swept at the next start.
//
// Several ranks: each writes its optimizer file, rank 0 everything else. Rank 0 renames the folder
// once every rank has said that its file is on the disk; when one could not, the folder is removed,
// and all ranks know why.
#ifndef LLM8_CHECKPOINT_H
#define LLM8_CHECKPOINT_H

#include "../model/model.h"
#include "../model/precision.h"
#include "../ranks/group.h"
#include "safetensors.h"

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

// Where a run stands.
typedef struct {
    int64_t step;    // optimizer steps done, skipped ones included
    int64_t samples; // sequences consumed
    int64_t tokens;
    int64_t skipped;
    int skipped_in_row;
    double loss, valid_loss, best_valid_loss; // NaN: none yet
} Progress;

// What is saved. The buffers belong to the caller and must not change until the save has ended.
typedef struct {
    const Options *options;
    const ParamLayout *layout;
    const Precision *precision;
    Progress progress;
    int64_t data_windows;
    bool best; // the best validation loss so far was measured at this step
    int rank, ranks;
    Group *group; // the other ranks; NULL: there are none
    Dtype model_dtype;
    const void *model;            // all weights, for model.safetensors; rank 0's alone counts
    const char *tokenizer_folder; // Hugging Face's files there go with the model; NULL: none
    int end_of_text;              // -1: not known
    int num_ranges;               // of the parameter space this rank holds
    const Bucket *ranges;
    Dtype moment_dtype;
    const void *master, *exp_avg, *exp_avg_sq; // the ranges' elements, one after another
    const Fp8Slot *slots;                      // NULL where there is no delayed scaling
    const float *amax_history;
} Snapshot;

// Writes, publishes, verifies, then prunes to --keep. Every rank calls it, and gets the same
// answer.
bool checkpoint_save(const Snapshot *snapshot, Error *err);

// Saves in a thread of its own, one at a time.
typedef struct {
    pthread_t thread;
    bool pending, in_thread;
    Snapshot snapshot;
    bool ok;
    Error err;
    double seconds;
} Saver;

// Waits for the save before this one, if it is still going on.
void saver_start(Saver *saver, const Snapshot *snapshot);
// Waits; false when the last save failed, whose reason it has printed (on rank 0).
bool saver_wait(Saver *saver);

// Removes what interrupted saves left under a --save folder.
bool checkpoint_sweep(const char *save, Error *err);

// One rank's optimizer file.
typedef struct {
    SafeTensors file;
    int num_ranges;
    Bucket *ranges;
} OptimizerFile;

typedef struct {
    char path[PATH_LENGTH];
    Progress progress;
    int64_t data_windows, layout_size;
    int ranks;
    char precision[16];
    char created[32];
    char *options; // JSON object of texts
    int64_t bytes; // of all files
    SafeTensors model, scaling;
    OptimizerFile *optimizer; // [ranks]
} Checkpoint;

// Opens a checkpoint and checks every byte of it.
bool checkpoint_open(Checkpoint *c, const char *path, Error *err);
// One that rank 0 has just checked: reads no more of it than it must.
bool checkpoint_open_checked(Checkpoint *c, const char *path, Error *err);
void checkpoint_close(Checkpoint *c);

// What --resume means: the checkpoint at a path, or under --save the one that `latest` points to,
// else the newest whole one before it. found is false, without an error, when there is no
// checkpoint at all. Says which damaged ones it passed over.
bool checkpoint_resume(Checkpoint *c, const Options *options, bool *found, Error *err);

// Refuses another model's checkpoint; prints which other options differ from the saved ones.
bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout,
                      Error *err);

// kind: "master", "exp_avg" or "exp_avg_sq"; elements begin..end of the parameter space, from
// whichever ranks' files hold them.
bool checkpoint_read(const Checkpoint *c, const char *kind, int64_t begin, int64_t end, float *out,
                     Error *err);

// The scaling state of the slots, where the checkpoint has any and the run is delayed; slots[] and
// history[] keep what they hold otherwise. The history may have another length here than there: the
// newest entries are kept. Another format or margin adapts the scale.
bool checkpoint_read_scaling(const Checkpoint *c, const Precision *precision, Fp8Slot *slots,
                             float *history, Error *err);

// --list-checkpoints
bool checkpoint_list(const char *save, Error *err);

// The steps of the checkpoints under a folder, newest first; returns how many, to be freed.
int checkpoint_steps(const char *save, int64_t **steps);
void checkpoint_path(char path[PATH_LENGTH], const char *save, int64_t step);

#ifdef __cplusplus
}
#endif

#endif
