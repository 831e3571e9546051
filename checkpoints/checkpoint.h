// Checkpoints: everything that a run needs to resume as if it had never stopped.
//
// Under --save DIR:
//   step_00000250/          one checkpoint; a folder of this name is complete
//     meta.json             see below
//     model.safetensors     the weights under Hugging Face's names, and
//     config.json           with it, so that `transformers` opens the folder, together with
//     tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json
//                           as far as they are known
//     tokenizer.bin         with which the trainers print and read text
//     optimizer-R-of-N.safetensors   rank R's part: "master", "exp_avg", "exp_avg_sq", flat; its
//                           metadata "ranges" says which elements of the parameter space they are,
//                           as "begin:end,begin:end", and "hashes" the hash_words (base/rng.h)
//                           of the three, taken where they were trained. "exp_avg_sq" ends early
//                           where the last ranges are Muon's (docs/muon.md), which has no second
//                           moment
//     scaling.safetensors   of runs with delayed FP8 scaling, by slot (model/precision.h):
//                           "scale" [S], "target" [S] (of amax * scale), "count" [S] and
//                           "amax_history" [S,length], a ring: the next amax goes to place
//                           count % length
//   step_00000300.aside-1/  one that a run has left behind which went back to an earlier one
//   latest -> step_...      symbolic links (base/io.h: or files of one line): the newest; before
//                           the first save, the checkpoint elsewhere that --resume began with
//   best -> step_...        the lowest validation loss of those that are there
//   metrics.jsonl, config.txt
//   .lock                   held by the run that saves here; its text says which
//
// meta.json is one object: "format", "version" (CHECKPOINT_VERSION), the fields of Progress,
// "ranks", "precision", "layout_size", "data_windows", "valid_tokens", "data" and "valid_data" (the
// shards, dataloader/loader.h), "options" (every option's text), "files" (name, bytes, CRC-32), and
// last "crc32", the CRC-32 of the file itself with that field's eight digits as zeros.
//
// A checkpoint is written as .tmp-step_..., every file synced and read back, then renamed; after
// that `best` and `latest` move, and only then are older checkpoints deleted. The link latest.new
// leads to it before it has its name, so that the next start tells a save that was interrupted
// before `latest` had moved, which it ends, from a step that a run has left behind. What else an
// interrupted run leaves starts with a dot; the next start removes it.
//
// With several ranks, each writes its optimizer file and rank 0 writes everything else. Rank 0
// renames the folder once every rank has its file on the disk. If one fails, the folder is removed,
// and all ranks get the reason.
#pragma once

#include "../kernels/spikes.h"
#include "../model/model.h"
#include "../model/precision.h"
#include "../ranks/group.h"
#include "safetensors.h"

#include <pthread.h>

BEGIN_C

enum { CHECKPOINT_VERSION = 2 }; // the one that is written, and the first that is read

typedef struct {
    int64_t step;    // optimizer steps done, skipped ones included
    int64_t samples; // sequences consumed
    int64_t tokens;
    int64_t skipped, skipped_in_row;
    double loss, valid_loss;  // valid_loss is of the weights at this step; NaN: not evaluated
    double best_valid_loss;   // of all evaluations, saved or not; NaN: none yet
    double level, best_level; // the loss, averaged over steps; and the lowest such
    int64_t proven; // the newest checkpoint whose weights then gave a loss as usual; -1: none
    SpikeWindow window;
} Progress;

// As meta.json has them: whole numbers are int64_t, others double, which NaN makes null.
typedef struct {
    const char *name;
    size_t offset;
    bool whole;
} ProgressField;
enum { PROGRESS_FIELDS = 11 };
extern const ProgressField progress_fields[PROGRESS_FIELDS];

// A file that is saved with the model as it is.
typedef struct {
    const char *name; // in the checkpoint; a literal
    char *bytes;
    size_t size;
} Companion;

enum { COMPANIONS_MAX = 5 };

// What to save. The buffers belong to the caller and must not change until the save has ended.
typedef struct {
    const Options *options;
    const Group *group; // which rank this is, and the others
    const ParamLayout *layout;
    const Precision *precision;
    Progress progress;
    int64_t data_windows, valid_tokens; // of an evaluation
    const char *data, *valid_data;      // the shards' identities; NULL: none
    Dtype model_dtype;
    const void *model; // all weights, for model.safetensors; read on rank 0 only
    int num_companions;
    const Companion *companions;
    int end_of_text; // -1: not known
    int num_ranges;  // of the parameter space that this rank holds
    const Bucket *ranges;
    Dtype moment_dtype;
    const void *master, *exp_avg, *exp_avg_sq; // the ranges' elements, one range after another
    int64_t second_moments;                    // elements of exp_avg_sq
    uint64_t hashes[3];        // of master, exp_avg, exp_avg_sq as they were trained
    const Fp8Slot *slots;      // NULL without delayed scaling
    const float *amax_history; // [slots,history_length]
} Snapshot;

// Writes, verifies, publishes, then deletes all but --keep, `best` and progress.proven. Every rank
// calls it and gets the same answer.
bool checkpoint_save(const Snapshot *snapshot);

// Saves in a thread of its own, one save at a time.
typedef struct {
    pthread_t thread;
    bool pending, in_thread;
    Snapshot snapshot;
    bool failed; // the last save that has ended
    Error why;
} Saver;

// Waits for the previous save, then starts this one.
void saver_start(Saver *saver, const Snapshot *snapshot);
// Waits for the save under way, if any. Returns false when the last one failed; rank 0 has then
// printed why, once.
bool saver_wait(Saver *saver);

// Makes the --save folder this run's: creates and locks it, until the process ends; refuses one
// that holds another run's checkpoints (a copy of a folder that this process holds is its own);
// removes what interrupted saves left in it. Waits --lock-timeout for another run that has it.
bool checkpoint_claim(const Options *options);
// What is said of a --save that is not the same folder on every rank.
#define NOT_SHARED "the folder must be on a file system that all ranks share"

// Elements begin..end of the parameter space are in rank's optimizer file, from its element `at`
// on.
typedef struct {
    int64_t begin, end, at;
    int rank;
} SavedRange;

typedef struct {
    char name[TENSOR_NAME];
    int file;
    size_t bytes;
    int64_t listed; // its length by meta.json; -1: none
    char crc[16];   // its checksum by meta.json
} CheckpointFile;

// Opened once: `latest` may move on, and the folder be deleted, while it is read. Its path is the
// folder that the name led to, and its files stay open.
typedef struct Checkpoint {
    char path[PATH_LENGTH];
    uint32_t seal; // the checksum of its meta.json, or else of its config.json
    int num_files;
    CheckpointFile *files;
    Progress progress;
    int64_t data_windows, valid_tokens, layout_size;
    int ranks; // 0: a folder of Hugging Face's
    char precision[16];
    char created[32];
    char *data, *valid_data; // the shards' identities; "": not known
    struct cJSON *options;   // an object of texts
    SafeTensors model, scaling;
    SafeTensors *optimizer; // [ranks]
    int num_ranges;
    SavedRange *ranges; // in ascending order, without gaps
} Checkpoint;

// The model that a run starts from: what the checkpoint of --resume or --load says of the options
// that make it. Opens it, without the optimizer's files, as options->start, and puts its path into
// options->origin, which stays empty where there is none. A folder without meta.json is one of
// Hugging Face's. Of `latest`, the newest that can be read; opening it says which are damaged.
bool checkpoint_model(Options *options, Options *model);
// Gives every rank rank 0's checkpoint, opened there too, in place of its own; a path "": none.
bool checkpoint_share(Checkpoint *c, const Group *group);
// Elements begin..end of the weights for others, model.safetensors. Refuses tensors of other
// shapes.
bool checkpoint_weights(Checkpoint *c, const ParamLayout *layout, int64_t begin, int64_t end,
                        float *out);
// A file of a checkpoint, to be freed; NULL: it has none of that name, or it cannot be read.
bool checkpoint_has(const Checkpoint *c, const char *name);
char *checkpoint_file(const Checkpoint *c, const char *name, size_t *bytes);

// Gives the text of a meta.json the checksum of itself; whether it had it.
bool meta_seal(char *text, size_t bytes);

// Opens a checkpoint with all its files. verify: every byte of it is; without, of one that rank 0
// has verified, only the headers are read.
bool checkpoint_open(Checkpoint *c, const char *path, bool verify);
// Compares every open file with its length and checksum in meta.json.
bool checkpoint_verify(const Checkpoint *c);
void checkpoint_close(Checkpoint *c);

// What --resume means: the checkpoint at a path, or `latest`: the one that the link leads to, or
// else the newest whole one under --save before it. Warns of each damaged one it passes over; one
// that cannot be read for another reason is an error. Its path is "", and the result true, when
// there is no checkpoint at all.
bool checkpoint_resume(Checkpoint *c, const Options *options);

// Makes the checkpoint that a run resumes the newest under --save: `latest` leads to it, those of
// later steps are set aside under other names, `best` is the best of those that stay. One from
// elsewhere begins a folder without others: `latest` leads to it until the first save. A path "":
// `latest` leads nowhere.
bool checkpoint_go_back(const Options *options, const Checkpoint *c);

// Refuses another model's checkpoint; prints which other options differ from the saved ones.
bool checkpoint_match(const Checkpoint *c, const Options *options, const ParamLayout *layout);

// Elements begin..end of the parameter space, whichever ranks' files hold them. kind: "master",
// "exp_avg" or "exp_avg_sq".
bool checkpoint_read(const Checkpoint *c, const char *kind, int64_t begin, int64_t end, float *out);

// The scaling state, if the checkpoint has one and the run uses delayed scaling, of the tensors
// that it quantises; otherwise slots[] and history[] stay as they are. Of a history of another
// length, the newest entries are kept. A slot whose target differs (another format or margin) has
// its scale adapted. The gradients dY go with 1 / (tokens of a step): where that differs, their
// scales and history follow it.
bool checkpoint_read_scaling(const Checkpoint *c, const Precision *precision, Fp8Slot *slots,
                             float *history);

// --list-checkpoints
bool checkpoint_list(const char *save);

// The steps of the checkpoints under a folder, newest first, which must be freed; returns how many.
// None where there is no folder; -1 where it cannot be read.
int checkpoint_steps(const char *save, int64_t **steps);
// Follows links of either kind (base/io.h) from a path to a folder, and says which that is.
FolderId checkpoint_follow(char path[PATH_LENGTH], const char *from);
// The step under the folder that a link in it, "latest" or "best", points to; or why there is none.
enum { LINK_NONE = -1, LINK_OUTSIDE = -2, LINK_UNREADABLE = -3 };
int64_t checkpoint_linked(const char *save, const char *link);
// The step with the lowest loss on these validation data; -1: none.
int64_t checkpoint_best(const char *save, const char *valid_data, int64_t valid_tokens);
const char *checkpoint_path(char path[PATH_LENGTH], const char *save, int64_t step);

END_C
