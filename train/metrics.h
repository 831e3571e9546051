// metrics.jsonl: the records of a run (metrics.c lists their kinds).
#pragma once

#include "state.h"

BEGIN_C

// Opens a file of metrics for appending, and locks it. Fails if another process has locked it, if
// it has other content or, when a run begins, if it has steps, which the new records would make
// void. If the file has several hard links, a copy first replaces it.
bool metrics_open(Metrics *m, const char *path, bool begins);
void metrics_close(Metrics *m);
void metrics_sync(const Metrics *m); // syncs the file to the disk

// To write a record: begin it, add fields, and end it, which writes the line.
typedef struct cJSON MetricsRecord;
MetricsRecord *metrics_begin(const char *kind);
void metrics_number(MetricsRecord *r, const char *name, double value);
void metrics_numbers(MetricsRecord *r, const char *name, const double *values, int count);
void metrics_text(MetricsRecord *r, const char *name, const char *value);
void metrics_end(Metrics *m, MetricsRecord *r);
// Write the records of the start and the end. error: why the run has failed; NULL: it has not. If
// the run dies between the two calls, die() writes the record of the end.
void run_record_start(Run *run);
void run_record_end(Run *run, int status, const char *error);
void run_record_sources(const Run *run, MetricsRecord *r);
void run_record_ranks(Run *run); // all ranks call it every --log-interval steps
// Records the counts of --fp8-stats-interval. counts: indexed by fp8_slot_index.
void run_report_fp8(Run *run, const Fp8Counts *counts);

END_C
