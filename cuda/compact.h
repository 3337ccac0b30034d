// One Adam step whose moments or parameters are rounded to 8 bits or at random (rounding.h): the
// interface between the kernels and the FFI handlers.
#pragma once

#include <vector>

#include "adam.h"
#include "rounding.h"

namespace jdistadam {

// A leaf, or a part of it along its first dimension, and what it needs beside Leaf. Where a moment
// is kBlock8 a part begins with a block, and there is a scale for each block, of which the last of
// a whole leaf may be incomplete.
struct CompactLeaf : Leaf {
  float* mu_scales;
  float* nu_scales;
  uint32_t id;    // of the whole leaf
  uint32_t slot;  // of the call: where its part is in `parts`
};

// AdamCall's Dtypes may be kBlock8 for mu and nu. With `is_random`, mu and nu of 8 or 16 bits are
// rounded at random, and so are parameters of 16 bits in Mode::kStep; `out` always to nearest.
// A skipped step uses no random bits: they depend on the count, which then stays.
struct CompactCall {
  AdamCall adam;  // without leaves
  bool is_random;
  const uint32_t* key;   // [2], device memory in the CUDA kernel
  const int32_t* count;  // steps taken before this one
  const int32_t* parts;  // which part of the whole leaf each leaf is; likewise in device memory
  std::vector<CompactLeaf> leaves;
};

// Row-major index of a leaf's first element in the whole leaf: parts are of one size.
JDISTADAM_INLINE uint64_t StartOf(const int32_t* parts, const CompactLeaf& leaf) {
  return static_cast<uint64_t>(parts[leaf.slot]) * leaf.size;
}

void CompactCpu(const CompactCall& call, const Threads& threads);

}  // namespace jdistadam
