// Checkpoints: everything that a run needs to resume as if it had never stopped.
//
// Under --save DIR:
//   step_00000250/          one checkpoint; a folder of this name is complete
//     meta.json             see below
//     model.safetensors     the weights under Hugging Face's names
//     config.json           lets `transformers` open the folder; so do the next files, if the run
//                           has them:
//     tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json
//     tokenizer.bin         so that the trainers can print and read text
//     optimizer-R-of-N.safetensors   rank R's flat arrays "master", "exp_avg" and "exp_avg_sq". Its
//                           metadata "ranges" lists their elements of the parameter space, as
//                           "begin:end,begin:end"; "hashes" has the arrays' hash_words
//                           (base/rng.h), computed before the arrays were copied. "exp_avg_sq" is
//                           shorter if the last ranges are Muon's (docs/muon.md), which has no
//                           second moment. Moments in 8 bits (kernels/moments.h) are codes, I8 and
//                           U8. Each block of the file's elements then has a scale in
//                           "exp_avg_scale" and in "exp_avg_sq_scale", BF16. Both moments then end
//                           before Muon's ranges, whose first moment is "momentum", BF16
//     scaling.safetensors   of runs with delayed FP8 scaling, by slot (model/precision.h):
//                           "scale" [S], "target" [S] (of amax * scale), "count" [S] and
//                           "amax_history" [S,length], a ring buffer: the next amax is written at
//                           index count % length
//   step_00000300.aside-1/  set aside by a run that went back to an earlier checkpoint
//   latest, best            symbolic links for other programs, where they can be made
//   metrics.jsonl, config.txt
//   .lock                   locked by the run that saves here; its text says which run this is
//
// meta.json is one object: "format", "version" (CHECKPOINT_VERSION), the fields of Progress,
// "ranks", "precision", "layout_size", "valid_tokens", "data" and "valid_data" (the
// shards, dataloader/loader.h), "options" (every option's text), "given" (the names of the options
// in config.txt; version 1.0 has no such list), "files" (name, bytes, CRC-32), and last "crc32",
// the CRC-32 of meta.json itself with the eight digits of "crc32" as zeros.
//
// The newest and the best checkpoint are looked up among the step folders whenever they are needed.
// The newest checkpoint is the highest step. The best one has the lowest validation loss among the
// checkpoints with the same validation data as the newest evaluated checkpoint. A path that ends in
// `latest` or `best` means the newest or the best of the steps in the same folder, whatever file or
// link has that name (checkpoint_follow). In a folder without steps, the path is taken literally.
// If --resume PATH begins a run in an empty --save folder, that folder gets a link to PATH, named
// by its step.
//
// Crash safety rests on five rules:
// 1. A checkpoint is written as .tmp-step_..., synced, read back and verified, and then renamed. So
//    a folder with the name of a step is complete; checksums find damage that comes later.
// 2. The rename makes it the newest checkpoint, because those of the same or later steps were set
//    aside before. So after a kill the newest is either the previous checkpoint or the new one.
// 3. Older checkpoints are deleted after that rename. Each is renamed to .old-step_... first, so
//    that a half-deleted one does not count.
// 4. A run that goes back to an earlier checkpoint sets later steps aside, the newest of them last.
//    So after a kill the newest checkpoint is still the same, or the one that the run went back to.
// 5. The links are written last. A kill may leave older links, which the next start corrects.
// Anything else that a kill leaves has a name that starts with a dot; the next start deletes it.
//
// With several ranks, each writes its optimizer file and rank 0 writes everything else. Rank 0
// renames the folder once every rank has its file on the disk. If a rank fails, the folder is
// removed, and all ranks get the reason.
#pragma once

#include "../kernels/moments.h"
#include "../kernels/spikes.h"
#include "../model/model.h"
#include "../model/precision.h"
#include "../ranks/group.h"
#include "safetensors.h"

#include <pthread.h>

BEGIN_C

enum { CHECKPOINT_VERSION = 2 }; // the only version of meta.json that is written or read

// Formats of names: of a step's folder, and of files in it (rank, ranks).
#define STEP_FOLDER "step_%08lld"
#define OPTIMIZER_FILE "optimizer-%d-of-%d.safetensors"
#define MODEL_FILE "model.safetensors"
#define SCALING_FILE "scaling.safetensors"

typedef struct {
    int64_t step;    // optimizer steps done, skipped ones included
    int64_t samples; // sequences consumed
    int64_t tokens;
    int64_t skipped, skipped_in_row;
    double loss, valid_loss;  // valid_loss: with the weights after this step; NaN: not evaluated
    double best_valid_loss;   // the lowest of all evaluations; NaN: none yet
    double level, best_level; // level: the loss averaged over steps; best_level: the lowest level
    // the newest checkpoint that is known to be good: with its weights, or in a step after it, the
    // loss was usual (is_usual in train/save_folder.h); -1: none
    int64_t last_good; // "proven" in meta.json
    int64_t eval_left; // not 0: the evaluation after this step has not been made yet
    SpikeWindow window;
} Progress;

// The fields of Progress that meta.json has. Whole numbers are int64_t, others double, whose NaN
// becomes null.
typedef struct {
    const char *name;
    size_t offset;
    bool whole;
} ProgressField;
enum { PROGRESS_FIELDS = 12 };
extern const ProgressField progress_fields[PROGRESS_FIELDS];

// Files that are saved with the model, unchanged, in this order.
enum {
    SAVED_GENERATION_CONFIG,
    SAVED_TOKENIZER,
    SAVED_TOKENIZER_JSON,
    SAVED_TOKENIZER_CONFIG,
    SAVED_CHAT_TEMPLATE,
    COMPANIONS
};
typedef struct {
    char *bytes; // NULL: there is no such file
    size_t size;
} Companion;
extern const char *const companion_names[COMPANIONS];

// The arrays of an optimizer file; state_names are their names in the file. The momentum, which is
// Muon's in BF16, and the two scales exist only if AdamW's moments are in 8 bits.
enum {
    STATE_MASTER,
    STATE_EXP_AVG,
    STATE_EXP_AVG_SQ,
    STATE_MOMENTUM,
    STATE_EXP_AVG_SCALE,
    STATE_EXP_AVG_SQ_SCALE,
    STATE_ARRAYS
};
extern const char *const state_names[STATE_ARRAYS];
// Returns how many scales the file has for a number of 8-bit moments: one for each MOMENT_BLOCK
// moments, rounded up to complete 8-byte words, which the hash needs.
static inline int64_t state_scales(int64_t moments) {
    return round_up64((moments + MOMENT_BLOCK - 1) / MOMENT_BLOCK, 4);
}

// The tensors of scaling.safetensors, and their names.
enum { SCALING_SCALE, SCALING_TARGET, SCALING_COUNT, SCALING_HISTORY, SCALING_TENSORS };
extern const char *const scaling_names[SCALING_TENSORS];

// An array of an optimizer file: the elements of the rank's ranges, one range after another.
typedef struct {
    Dtype dtype;
    int64_t count; // 0: the file lacks this array; the first three arrays are in every file
    const void *data;
    uint64_t hash; // hash_words of the array before it was copied
} SavedArray;

// What to save. The caller owns the buffers and must not change them until the save has ended.
typedef struct {
    const Options *options;
    const Group *group; // this rank, and the connections to the others
    const ParamLayout *layout;
    const Precision *precision;
    Progress progress;
    int64_t valid_tokens;          // tokens that an evaluation reads
    const char *data, *valid_data; // the shards' identities; NULL: none
    Dtype model_dtype;
    const void *model;           // all weights, for model.safetensors; read on rank 0 only
    const Companion *companions; // [COMPANIONS]; NULL: none
    int begin_of_text, end_of_text, document_end; // -1: not known
    Companion start_config; // config.json of the model that the run started from
    int num_ranges;         // ranges of the parameter space that this rank holds
    const Bucket *ranges;
    SavedArray state[STATE_ARRAYS];
    const Fp8Scale *slots;     // NULL without delayed scaling
    const float *amax_history; // [slots,history_length]
} Snapshot;

// Writes a checkpoint, verifies it and gives it its name. Then it deletes all checkpoints except
// the newest --keep, the best and progress.last_good. All ranks call this function together, and
// all get the same result.
bool checkpoint_save(const Snapshot *snapshot);

// Saves in a separate thread, one checkpoint at a time.
typedef struct {
    pthread_t thread;
    bool pending, in_thread, ended; // ended: the save is done, and its thread can be joined
    Snapshot snapshot;
    bool failed; // the last save that ended has failed
    Error why;
} Saver;

// Starts a save. The caller has waited for the previous one.
void saver_start(Saver *saver, const Snapshot *snapshot);
// Whether a save was started and has ended, so that saver_wait returns at once.
bool saver_ended(const Saver *saver);
// Waits for a save that is under way. Returns false if the last save failed; saver->why says why.
bool saver_wait(Saver *saver);

// Elements begin..end of the parameter space are in the optimizer file of `rank`: in each of its
// arrays, from element `at` on.
typedef struct {
    int64_t begin, end, at;
    int rank;
} SavedRange;

// A checkpoint that is read. path: its folder, as checkpoint_follow() has found it.
typedef struct Checkpoint {
    char path[PATH_LENGTH];
    Progress progress;
    int64_t valid_tokens, layout_size;
    int ranks;                     // 0: a folder of Hugging Face's
    struct cJSON *meta, *options;  // meta.json, and the object of option texts in it
    const char *data, *valid_data; // the shards' identities; "": not known
    SafeTensors model, scaling;
    SafeTensors *optimizer; // [ranks]
    int num_ranges;
    SavedRange *ranges; // in ascending order, without gaps
    bool moments8;      // the moments are in 8 bits
} Checkpoint;

// Opens the meta.json of --resume's or --load's checkpoint as *start. Sets options->origin and
// options->resumes. Sets `was` to the options that the run takes from the checkpoint
// (option_is_inherited): those that were given to the checkpoint's run have SOURCE_FILE, the others
// SOURCE_CHECKPOINT. If there is no checkpoint, start->path and options->origin are empty. A folder
// without meta.json is one of Hugging Face's; if its weights are in several files, it is refused.
bool checkpoint_model(Checkpoint *start, Options *options, Options *was);
// Opens rank 0's checkpoint on every other rank, in place of that rank's own. Afterwards c->path is
// "" if rank 0 has no checkpoint.
bool checkpoint_share(Checkpoint *c, const Group *group);
// Reads elements begin..end of the weights in model.safetensors. Refuses tensors of other shapes.
bool checkpoint_weights(Checkpoint *c, const ParamLayout *layout, int64_t begin, int64_t end,
                        float *out);
// Writes the checksum of a meta.json into its text. Returns whether the text already had it.
bool meta_seal(char *text, size_t bytes);

// Opens the files with tensors of a checkpoint whose meta.json is open. With `verify`, the
// checksums of all files are compared. Otherwise only the headers are read, because rank 0 has
// verified the checkpoint.
bool checkpoint_complete(Checkpoint *c, bool verify);
// Opens a checkpoint with all its files.
bool checkpoint_open(Checkpoint *c, const char *path, bool verify);
// Compares the files with their lengths and checksums in meta.json, if there is one. Optimizer
// files may be missing: the weights alone can be used without them.
bool checkpoint_verify(const Checkpoint *c);
void checkpoint_close(Checkpoint *c);

// Waits up to --lock-timeout while another run holds the lock of the --save folder, but does not
// take the lock. A process that calls this function must not hold the lock.
bool checkpoint_await(const Options *options);
// Locks the --save folder until the process ends. If another run holds the lock, it waits up to
// --lock-timeout.
bool checkpoint_lock(const Options *options);
// Claims the --save folder for this run: makes and locks it, refuses a folder with checkpoints if
// `start`, which the run resumes, is not one of them, and deletes what interrupted saves left.
bool checkpoint_claim(const Options *options, const Checkpoint *start);
// The error message for a --save that is not the same folder on every rank.
#define NOT_SHARED "the folder must be on a file system that all ranks share"

// Makes the checkpoint that a run resumes the newest one under --save: checkpoints of later steps
// are set aside under other names. If c is in another folder, --save has no checkpoint, and gets a
// link to c, named by its step. c->path "": the run begins anew.
bool checkpoint_go_back(const Options *options, const Checkpoint *c);

// Refuses the checkpoint of another model. Prints other options that differ from the saved ones.
bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout);

// Reads elements begin..end of the parameter space from the files of the ranks that have them.
// array: STATE_MASTER, STATE_EXP_AVG (for Muon's elements the momentum) or STATE_EXP_AVG_SQ. floats
// NULL: reads moments in 8 bits without decoding them, as codes and a scale for each block; begin
// and end are then multiples of MOMENT_BLOCK.
bool checkpoint_read(const Checkpoint *c, int array, int64_t begin, int64_t end, float *floats,
                     uint8_t *codes, uint16_t *scales);

// Reads the scaling state of the tensors that the run quantises, if the checkpoint has one and the
// run uses delayed scaling. A slot keeps the values in slots[] and history[] if its format, its
// margin or the history's length differs from the checkpoint's. The slot of a gradient dY also
// keeps them if the tokens of a step differ, because dY is proportional to 1 / (these tokens).
bool checkpoint_read_scaling(const Checkpoint *c, const Precision *precision, Fp8Scale *slots,
                             float *history);

// Prints the table of --list-checkpoints.
bool checkpoint_list(const char *save);

// Lists the steps of the checkpoints in a folder, newest first; the caller frees the list. Returns
// how many there are: 0 if there is no folder, -1 if it cannot be read.
int checkpoint_steps(const char *save, int64_t **steps);
// Puts into `path` the folder that a path to a checkpoint leads to. If `from` ends in `latest` or
// `best`, and steps are beside it, the folder is the newest or the best step, whatever file or link
// has that name. Returns false if the steps cannot be read.
bool checkpoint_follow(char path[PATH_LENGTH], const char *from);
// What the functions below return in place of a step. STEP_NONE: there is no such checkpoint.
// STEP_UNREADABLE: the checkpoint cannot be determined, because a file cannot be read.
enum { STEP_NONE = -1, STEP_UNREADABLE = -2 };
// Returns the highest step.
int64_t checkpoint_newest(const char *save);
// Returns the step with the lowest validation loss. Only steps with the same validation data as the
// newest evaluated step are compared.
int64_t checkpoint_best(const char *save);
const char *checkpoint_path(char path[PATH_LENGTH], const char *save, int64_t step);

END_C
