// How GPUs read the coefficients.
#pragma once

#include "adam_math.h"

namespace jdistadam {

// Coefficients as three loads of 16 bytes. Kernels without free registers index an array of these
// where they need them: a function that does it, even if inlined, costs some of them registers.
struct alignas(16) Row {
  Coefficients coefficients;
};
static_assert(sizeof(Row) == sizeof(Coefficients),
              "pad Coefficients, and NAMES of hyperparameters.py");

}  // namespace jdistadam
