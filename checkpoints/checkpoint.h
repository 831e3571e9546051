// Checkpoints: everything that a run needs to resume as if it had never stopped.
//
// Under --save DIR:
//   step_00000250/          one checkpoint; a folder with such a name is complete
//     meta.json             see below
//     model.safetensors     the weights under Hugging Face's names
//     config.json           for `transformers`; so are the next files, if the run has them:
//     tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json
//     tokenizer.bin         for the trainers, which encode and decode text with it
//     optimizer-R-of-N.safetensors   rank R's flat arrays "master", "exp_avg" and "exp_avg_sq". The
//                           metadata "ranges" lists which elements of the parameter space they
//                           hold, as "begin:end,begin:end"; "hashes" has the arrays' hash_words
//                           (base/rng.h), computed before the arrays were copied for the save.
//                           Muon's ranges (docs/muon.md) come last and are left out of
//                           "exp_avg_sq", because Muon has no second moment. With 8-bit moments
//                           (kernels/moments.h), "exp_avg" has I8 codes and "exp_avg_sq" U8 codes,
//                           with a BF16 scale for each block of codes in "exp_avg_scale" and
//                           "exp_avg_sq_scale". All four then leave out Muon's ranges; these are in
//                           "momentum" (BF16)
//     scaling.safetensors   only with delayed FP8 scaling. For each of S slots (model/precision.h):
//                           "scale" [S]; "target" [S], the value that amax * scale should have;
//                           "count" [S], how many amaxes were recorded; "amax_history" [S,length],
//                           a ring buffer: the next amax is written at index count % length
//   step_00000300.aside-1/  a checkpoint that a run set aside when it went back to an earlier step
//   latest, best            symbolic links for other programs, if the file system has links
//   metrics.jsonl, config.txt   what the run measured in each step, and its options
//   .lock                   locked by the run that saves here; its text says which run this is
//
// meta.json is one object. It has "format", "version" (CHECKPOINT_VERSION), "program", "created",
// the fields of Progress, "ranks", "precision", "layout_size", "valid_tokens", "data" and
// "valid_data" (the identities of the shards, dataloader/loader.h), "options" (every option's
// text), "given" (the names of the options in config.txt; version 1.0 of the program wrote no such
// list), "files" (each file's name, bytes and CRC-32), and last "crc32": the CRC-32 of meta.json,
// computed with zeros in place of its own eight digits.
//
// The newest and the best checkpoint are looked up among the step folders whenever they are needed.
// The newest checkpoint is the highest step. The best one has the lowest validation loss among the
// checkpoints with the same validation data as the newest evaluated checkpoint. A path that ends in
// `latest` or `best` means the newest or the best of the steps in the same folder, whatever file or
// link has that name (checkpoint_follow). In a folder without steps, the path is taken literally.
// If --resume PATH begins a run in an empty --save folder, that folder gets a link to PATH, named
// by the step of PATH.
//
// Crash safety rests on five rules:
// 1. A checkpoint is written as .tmp-step_..., synced, read back and verified, and then renamed. So
//    a folder with the name of a step is complete; checksums find damage that comes later.
// 2. Before this rename, checkpoints of the same or later steps are set aside. So the rename makes
//    the new checkpoint the newest one; after a kill the newest is the new one or the previous one.
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

// The name of a step's folder, and the names of files in it. Formats: STEP_FOLDER takes the step,
// OPTIMIZER_FILE the rank and the number of ranks.
#define STEP_FOLDER "step_%08lld"
#define OPTIMIZER_FILE "optimizer-%d-of-%d.safetensors"
#define MODEL_FILE "model.safetensors"
#define SCALING_FILE "scaling.safetensors"

// The fields of Progress that meta.json has, with their names there. WHOLE: an int64_t. REAL: a
// double; NaN is written as null.
#define PROGRESS_FIELDS(WHOLE, REAL)                                                              \
    WHOLE(step, "step")       /* optimizer steps done, skipped ones included */                   \
    WHOLE(samples, "samples") /* sequences consumed */                                            \
    WHOLE(tokens, "tokens")                                                                       \
    WHOLE(skipped, "skipped")                                                                     \
    WHOLE(skipped_in_row, "skipped_in_row")                                                       \
    REAL(loss, "loss")                                                                            \
    REAL(valid_loss, "valid_loss") /* with the weights after this step; NaN: not evaluated */     \
    REAL(best_valid_loss, "best_valid_loss") /* the lowest on the present data; NaN: none */      \
    REAL(level, "level")                     /* moving average of the training loss */            \
    REAL(best_level, "best_level")           /* the lowest level so far */                        \
    /* the step of the newest checkpoint that is known to be good, because its validation loss or \
       the training loss of a later step was usual (is_usual in train/save_folder.h); -1: none */ \
    WHOLE(last_good, "proven")                                                                    \
    /* 1: an evaluation after this step is due, but has not been made yet; 0: none is due. -1     \
       counts as 0: an older version of the program wrote meta.json, without an eval_left. */     \
    WHOLE(eval_left, "eval_left")

#define DECLARE_WHOLE(field, name) int64_t field;
#define DECLARE_REAL(field, name) double field;
typedef struct {
    PROGRESS_FIELDS(DECLARE_WHOLE, DECLARE_REAL)
    SpikeWindow window;
} Progress;

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

// The arrays of an optimizer file; state_names are their names in the file. STATE_MOMENTUM (Muon's
// momentum, in BF16) and the two arrays of scales exist only if AdamW's moments are in 8 bits.
// Otherwise STATE_EXP_AVG includes Muon's momentum.
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
// Returns how many scales the file has for an array of 8-bit moments: one for each MOMENT_BLOCK
// moments, rounded up to a multiple of 4, because only complete 8-byte words are hashed.
static inline int64_t state_scales(int64_t moments) {
    return round_up64((moments + MOMENT_BLOCK - 1) / MOMENT_BLOCK, 4);
}

// The tensors of scaling.safetensors, and their names.
enum { SCALING_SCALE, SCALING_TARGET, SCALING_COUNT, SCALING_HISTORY, SCALING_TENSORS };
extern const char *const scaling_names[SCALING_TENSORS];

// An array of an optimizer file. It has the elements of the rank's ranges, one range after another.
typedef struct {
    Dtype dtype;
    int64_t count; // elements; if 0, the file has an empty array, or none (after the first three)
    const void *data;
    uint64_t hash; // hash_words of the array, computed before it was copied for the save
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
// the newest ones (--keep says how many), the best one and that of step progress.last_good; with
// --keep 0 it deletes none. All ranks call this function together, and all get the same result.
bool checkpoint_save(const Snapshot *snapshot);

// Saves in a separate thread, one checkpoint at a time.
typedef struct {
    pthread_t thread;
    bool pending, in_thread, ended; // ended: the save is done, and its thread can be joined
    Snapshot snapshot;
    bool failed; // the last save that ended has failed
    Error why;
} Saver;

// Starts a save. Before that, the caller must call saver_wait for the previous save.
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

// A checkpoint that is open for reading. path: its folder, as checkpoint_follow() has found it.
typedef struct Checkpoint {
    char path[PATH_LENGTH];
    Progress progress;
    int64_t valid_tokens, layout_size;
    int ranks;                     // 0: a folder without meta.json
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
// (option_is_inherited). In `was`, the source of an option is SOURCE_FILE if the option was given
// to the checkpoint's run, else SOURCE_CHECKPOINT. If there is no checkpoint, start->path and
// options->origin are empty. --load reads a folder without meta.json as a Hugging Face model, and
// refuses it if its weights are in several files, unless the run needs no weights.
bool checkpoint_model(Checkpoint *start, Options *options, Options *was);
// Opens rank 0's checkpoint on every other rank, in place of that rank's own. Afterwards c->path is
// "" if rank 0 has no checkpoint.
bool checkpoint_share(Checkpoint *c, const Group *group);
// Reads elements begin..end of the weights in model.safetensors. Refuses a file in which a tensor
// is missing or has another shape. If begin is 0, also refuses a file with a tensor that the model
// lacks, and warns of matrices of zeros; of several ranks, only rank 0 reads element 0 (zero.h).
bool checkpoint_weights(Checkpoint *c, const ParamLayout *layout, int64_t begin, int64_t end,
                        float *out);
// Writes the checksum of a meta.json into its text. Returns whether this checksum was there before.
bool meta_seal(char *text, size_t bytes);

// Opens the safetensors files of a checkpoint whose meta.json is open. With `verify`, also compares
// the checksums of all files. Ranks other than 0 do without this, because rank 0 does it.
bool checkpoint_complete(Checkpoint *c, bool verify);
// Opens a checkpoint with all its files.
bool checkpoint_open(Checkpoint *c, const char *path, bool verify);
// Compares the files with their lengths and checksums in meta.json, if there is one. Optimizer
// files may be missing, because the weights can be used without them.
bool checkpoint_verify(const Checkpoint *c);
void checkpoint_close(Checkpoint *c);

// Waits up to --lock-timeout while another run holds the lock of the --save folder, but does not
// take the lock. A process that holds the lock must not call this function, which would release the
// lock.
bool checkpoint_await(const Options *options);
// Locks the --save folder until the process ends. If another run holds the lock, the function waits
// for up to --lock-timeout.
bool checkpoint_lock(const Options *options);
// Claims the --save folder for this run: makes the folder, locks it, and deletes what interrupted
// saves left in it. Refuses a folder with checkpoints, unless `start`, which the run resumes, is
// one of them.
bool checkpoint_claim(const Options *options, const Checkpoint *start);
// The error message for a --save that is not the same folder on every rank.
#define NOT_SHARED "the folder must be on a file system that all ranks share"

// c is the checkpoint that the run resumes. Makes c the newest one in the --save folder:
// checkpoints of later steps are set aside under other names. If c is in another folder, the --save
// folder, which then has no checkpoint (checkpoint_claim refuses others), gets a link to c, named
// by c's step.
bool checkpoint_go_back(const Options *options, const Checkpoint *c);

// Refuses a checkpoint of another model or, if the run trains, of another optimizer. Prints the
// other options whose values differ from those in the checkpoint.
bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout);

// Reads elements begin..end of the parameter space from the files of the ranks that have them.
// array: STATE_MASTER, STATE_EXP_AVG (for Muon's elements the momentum) or STATE_EXP_AVG_SQ. If
// floats is NULL, 8-bit moments are not decoded: their codes and the scale of each block are read,
// and begin and end must be multiples of MOMENT_BLOCK.
bool checkpoint_read(const Checkpoint *c, int array, int64_t begin, int64_t end, float *floats,
                     uint8_t *codes, uint16_t *scales);

// Reads the scaling state of the tensors that the run quantises, if the checkpoint has one and the
// run uses delayed scaling. The values of a slot in slots[] and history[] stay as they are if its
// format, its margin or the history's length differs from the checkpoint's. The values of a
// gradient dY also stay if the number of tokens in a step differs, because dY is inversely
// proportional to this number.
bool checkpoint_read_scaling(const Checkpoint *c, const Precision *precision, Fp8Scale *slots,
                             float *history);

// Prints the table of --list-checkpoints.
bool checkpoint_list(const char *save);

// Lists the steps of the checkpoints in a folder, newest first; the caller frees the list. Returns
// how many there are: 0 if there is no folder, -1 if it cannot be read.
int checkpoint_steps(const char *save, int64_t **steps);
// Sets `path` to the folder of the checkpoint that `from` means, a path that may end in `latest` or
// `best`. Returns false if the steps cannot be read.
bool checkpoint_follow(char path[PATH_LENGTH], const char *from);
// What the functions below return in place of a step. STEP_NONE: there is no such checkpoint.
// STEP_UNREADABLE: the checkpoint cannot be determined, because a file cannot be read.
enum { STEP_NONE = -1, STEP_UNREADABLE = -2 };
// Return the step of the newest and of the best checkpoint.
int64_t checkpoint_newest(const char *save);
int64_t checkpoint_best(const char *save);
const char *checkpoint_path(char path[PATH_LENGTH], const char *save, int64_t step);

END_C
