// Sums in an order that depends only on the number of terms.
#pragma once

#include "dtype.h"

namespace jdistadam {

constexpr int kMaxContributions = 1 << 16;

// Levels of the tree over `n` terms.
JDISTADAM_INLINE constexpr int PairwiseLevels(int n) {
  return n <= 1 ? 1 : 1 + PairwiseLevels((n + 1) / 2);
}

// total <- term 0 + ... + term n - 1, n >= 1, as a tree: adjacent terms in pairs, then adjacent
// sums, and so on; an odd one is carried to the next level. The terms are read in order:
// term(k, &x) sets x to the k-th.
template <int kMaxTerms, typename Value, typename Term>
JDISTADAM_INLINE void PairwiseSum(int n, const Term& term, Value* total) {
  Value sums[PairwiseLevels(kMaxTerms)];  // [l]: the last 2^l terms, for every bit l set in k
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int k = 0; k < n; ++k) {
    term(k, total);
    int level = 0;
    for (; (k >> level) & 1; ++level) *total = sums[level] + *total;
    if (k + 1 < n) {
      sums[level] = *total;
    } else {  // the rest, from the smallest up
      for (; k >> level; ++level) {
        if ((k >> level) & 1) *total = sums[level] + *total;
      }
    }
  }
}

}  // namespace jdistadam
