// Sums of squares on the CPU: one task a sum.

#include <algorithm>

#include "norm.h"
#include "squares.h"

namespace jdistadam {

void StoreRun(const SquaresCall& call, const Runs& runs, size_t begin, size_t n,
              const Squares* squares) {
  for (int q = 0; q < kNumSquares; ++q) {
    float* partials = call.partials + q * call.num_runs + runs.first;
    if (runs.is_fine) {
      for (size_t i = 0; i < n; ++i) partials[begin + i] = squares[i].x[q];
      continue;
    }
    float tree[kRun] = {};
    for (size_t i = 0; i < n; ++i) tree[i] = squares[i].x[q];
    for (size_t size = kRun / 2; size > 0; size /= 2) {
      for (size_t i = 0; i < size; ++i) tree[i] = tree[2 * i] + tree[2 * i + 1];
    }
    partials[begin / kRun] = tree[0];
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
