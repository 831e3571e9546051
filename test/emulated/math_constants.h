// What kernels take from it.
#pragma once

#include <math.h>

#define CUDART_INF_F INFINITY
