// metrics.jsonl: one JSON object a line, flushed as it is written, appended to when a run resumes.
//
// Their "kind": "run" (first, and again at every resume: time, options, versions, device, the
// precision of each linear layer, the step it starts from), "step" (every optimizer step), "eval",
// "choices" (a multiple-choice set scored), "save", "fp8" (--fp8-stats-interval: what each tensor
// lost), "end". After a resume at step N, earlier records of steps beyond N are void. A line that a
// crash cut off is removed. A number that is NaN or infinite is null, and the record has
// "nonfinite": true.
#pragma once

#include "../model/options.h"
#include "../model/precision.h"

#include <stdio.h>

BEGIN_C

typedef struct {
    FILE *file;   // NULL: nothing is written
    bool failing; // the last record could not be written
    char path[PATH_LENGTH];
} Metrics;

bool metrics_open(Metrics *m, const char *path, Error *err);
void metrics_close(Metrics *m);

// A record: begin, add fields, end, which writes the line.
typedef struct cJSON MetricsRecord;
MetricsRecord *metrics_begin(const char *kind);
void metrics_number(MetricsRecord *r, const char *name, double value);
void metrics_text(MetricsRecord *r, const char *name, const char *value);
void metrics_options(MetricsRecord *r, const Options *options);
// "linear_layers": the rows of the precision table.
void metrics_precision(MetricsRecord *r, const Precision *precision);
// "tensors": {"blocks.0.qkv.x": {"elements", "saturated", "vanished"}, ...}, of the FP8 tensors.
void metrics_fp8_counts(MetricsRecord *r, const Precision *precision, const Fp8Counts *counts);
void metrics_end(Metrics *m, MetricsRecord *r);

END_C
