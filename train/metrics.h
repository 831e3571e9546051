// metrics.jsonl: the records of a run (metrics.c lists their kinds).
#pragma once

#include "state.h"

BEGIN_C

// Only one process has a file of metrics open to write. Fails if another one does. A file that
// another folder shares by a hard link is copied first.
bool metrics_open(Metrics *m, const char *path);
void metrics_close(Metrics *m);
void metrics_sync(const Metrics *m); // syncs the file to the disk

// To write a record: begin it, add fields, and end it, which writes the line.
typedef struct cJSON MetricsRecord;
MetricsRecord *metrics_begin(const char *kind);
void metrics_number(MetricsRecord *r, const char *name, double value);
void metrics_numbers(MetricsRecord *r, const char *name, const double *values, int count);
void metrics_text(MetricsRecord *r, const char *name, const char *value);
void metrics_end(Metrics *m, MetricsRecord *r);
void run_record_start(Run *run);
void run_record_sources(const Run *run, MetricsRecord *r);
void run_record_ranks(Run *run); // all ranks call it at a step's line
// Writes the counts of --fp8-stats-interval, by slot.
void run_report_fp8(Run *run, const Fp8Counts *counts);

END_C
