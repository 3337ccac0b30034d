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

// One contribution may be apart: part `me` of an array (rows, n, run), of which the result has the
// size of a part, (rows, run).
struct SumLeaf {
  const void* in;  // null: zeros
  void* out;
  size_t size;
  const void* own = nullptr;  // the array of which a part is contribution `me`; null: none
  size_t run = 0;
};

struct SumCall {
  Dtype in, out;
  int32_t contributions;
  size_t stride;  // elements from one contribution to the next; 0: the leaf's size
  std::vector<SumLeaf> leaves;
  int32_t me = 0;
};

// The position of element i of part `me` in the whole array.
JDISTADAM_INLINE size_t WholeIndex(size_t size, size_t run, int count, int me, size_t i) {
  if (run == size) return size_t(me) * size + i;
  const size_t row = size < (size_t{1} << 32) ? uint32_t(i) / uint32_t(run) : i / run;
  return row * run * size_t(count) + size_t(me) * run + (i - row * run);
}

// Where contribution k of element i is.
struct SumTerm {
  const void* base;
  size_t i;
};
JDISTADAM_INLINE SumTerm TermOf(const SumLeaf& leaf, int count, int me, size_t stride, int k,
                                size_t i) {
  if (leaf.own == nullptr) return {leaf.in, k * stride + i};
  if (k == me) return {leaf.own, WholeIndex(leaf.size, leaf.run, count, me, i)};
  return {leaf.in, (k < me ? k : k - 1) * stride + i};
}

void SumCpu(const SumCall& call, const Threads& threads);

}  // namespace jdistadam
