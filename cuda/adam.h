// One Adam step over a list of leaves: the interface between the kernels and the FFI handlers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "parallel.h"
#include "squares.h"

namespace jdistadam {

// What a step does with the update u. The numbers are those of kernels/adam.py.
enum class Mode : int32_t {
  kStep = 0,         // param <- param - u
  kStepAndCast = 1,  // param <- param - u; out <- the new param, in its own dtype
  kUpdate = 2,       // out <- -u; param is only read (optax's `update`)
  kStepSplit = 3,    // param and out are the two halves of the parameter (dtype.h), both updated
};

// The arrays of one leaf. They hold `size` elements, need no alignment beyond their dtype's, and
// are not shared with another leaf. param, mu and nu are updated in place.
struct Leaf {
  const void* grad;
  void* param;
  void* mu;
  void* nu;
  void* out;  // null in Mode::kStep; in Mode::kStepSplit the remainder, uint16
  size_t size;
  int32_t group;  // row of the coefficients
};

struct Dtypes {
  Dtype grad, param, mu, nu, out;
};

// A whole call. If *found_inf is set, param, mu and nu keep every bit and `out` is what a step of
// zero would write. The three pointers are device memory in the CUDA kernel: the host reads nothing
// here, so a step needs no synchronisation and can be captured in a CUDA graph.
struct AdamCall {
  Mode mode;
  int32_t flags;  // of adam_math.h
  Dtypes dtypes;
  const float* coefficients;  // (groups, kNumCoefficients)
  const float* inv_scale;     // multiplies every gradient
  const bool* found_inf;
  std::vector<Leaf> leaves;
  SquaresCall squares = {};  // never in Mode::kUpdate
};

void AdamCpu(const AdamCall& call, const Threads& threads);

}  // namespace jdistadam
