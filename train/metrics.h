// metrics.jsonl: one JSON object a line, flushed as it is written, appended to when a run resumes.
//
// "kind" says which: "run" (first, and again at every resume: time, options, versions, device, the
// precision of each linear layer, where it starts), "step" (every optimizer step), "eval",
// "choices" (a multiple-choice set scored), "save", "fp8" (--fp8-stats-interval: what each tensor
// lost), "end". After a resume at step N, earlier
// records of steps beyond N no longer hold. A line that a crash cut off is removed. A number that
// is NaN or infinite is null, and the record has "nonfinite": true.
#ifndef LLM8_METRICS_H
#define LLM8_METRICS_H

#include "../model/options.h"
#include "../model/precision.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    FILE *file;   // NULL: nothing is written
    bool failing; // the last record could not be written
    char path[PATH_LENGTH];
} Metrics;

bool metrics_open(Metrics *m, const char *path, Error *err);
void metrics_close(Metrics *m);

// A record under way. Begin, add fields, end; end writes the line.
typedef struct cJSON MetricsRecord;
MetricsRecord *metrics_begin(const char *kind);
void metrics_number(MetricsRecord *r, const char *name, double value);
void metrics_text(MetricsRecord *r, const char *name, const char *value);
void metrics_options(MetricsRecord *r, const Options *options);
// "linear_layers": the rows of the precision table.
void metrics_precision(MetricsRecord *r, const Precision *precision);
// "tensors": {"blocks.0.qkv.x": {"elements", "saturated", "vanished"}, ...}, those that are FP8.
void metrics_fp8_counts(MetricsRecord *r, const Precision *precision, const Fp8Counts *counts);
void metrics_end(Metrics *m, MetricsRecord *r);

#ifdef __cplusplus
}
#endif

#endif
