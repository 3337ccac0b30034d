// Sums of stacked contributions, and copies between arrays with a cast: packing and unpacking.
//
//   out <- round(contribution 0 + ... + contribution n - 1)
//
// in float32 and in pairwise order (pairwise.h). With one contribution it is a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "parallel.h"

namespace jdistadam {

struct SumLeaf {
  const void* in;  // null: zeros
  void* out;
  size_t size;
};

struct SumCall {
  Dtype in, out;
  int32_t contributions;
  size_t stride;  // elements from one contribution to the next; 0: the leaf's size
  std::vector<SumLeaf> leaves;
};

void SumCpu(const SumCall& call, const Threads& threads);

}  // namespace jdistadam
