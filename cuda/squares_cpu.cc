// Sums of squares on the CPU: one task for each sum.

#include <algorithm>

#include "norm.h"
#include "squares.h"

namespace jdistadam {
namespace {

// Adds adjacent terms, then adjacent sums; the number of terms is a power of two.
template <size_t kSize>
float SumTree(const float* __restrict__ terms) {
  if constexpr (kSize == 1) {
    return terms[0];
  } else {
    float sums[kSize / 2];
    for (size_t i = 0; i < kSize / 2; ++i) sums[i] = terms[2 * i] + terms[2 * i + 1];
    return SumTree<kSize / 2>(sums);
  }
}

}  // namespace

void StoreRun(const SquaresCall& call, const Runs& runs, size_t begin, size_t n,
              const RunSquares& squares) {
  for (int q = 0; q < kNumSquares; ++q) {
    float* partials = call.partials + q * call.num_runs + runs.first;
    if (runs.is_fine) {
      std::copy_n(squares.x[q], n, partials + begin);
      continue;
    }
    float terms[kRun] = {};
    std::copy_n(squares.x[q], n, terms);
    partials[begin / kRun] = SumTree<kRun>(n == kRun ? squares.x[q] : terms);
  }
}

void SumSegmentsCpu(const SquaresCall& call, const Threads& threads) {
  ParallelFor(call.num_segments * kNumSquares, threads, [&call](size_t i) {
    const float* partials = call.partials + i % kNumSquares * call.num_runs;
    const Segment segment = SegmentAt(call.segments, i / kNumSquares, call.num_runs);
    float lanes[kNormLanes] = {};
    for (size_t run = segment.begin; run < segment.end; ++run)
      lanes[(run - segment.begin) % kNormLanes] += partials[run];
    call.sums[i] = CanonicalNan(HalveLanes(lanes));
  });
}

}  // namespace jdistadam
