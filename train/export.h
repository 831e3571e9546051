// --export: the weights of --load as a folder for the programs that serve models.
#pragma once

#include "state.h"

BEGIN_C

// Writes the folder of --export and prints what it has.
void run_export(Run *run);

END_C
