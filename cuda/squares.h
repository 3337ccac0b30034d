// Sums of squares of values that a step has in registers anyway: gradients, parameters, updates.
//
//   gradient    the input of the formula: grad * inv_scale, before l2
//   parameter   p - u, before it is rounded to be stored; p if the step is skipped
//   update      u; zero if the step is skipped
//
// The order of the sums is fixed, whatever the number of threads and the width of vectors. A leaf
// is cut into runs of kRun elements, starting at its first element; the last run is padded with
// zeros. A run is summed as a tree: adjacent squares in pairs, then adjacent sums, and so on. If a
// leaf `is_fine`, each element is a run, and nothing is added.
//
// The sums of all runs are the `partials`, in the order of the leaves. A segment is a sequence of
// adjacent runs, such as those of a leaf, or of this device's part of it. It is summed over
// kNormLanes lanes as in norm.h: lane l starts at zero and adds the runs l, l + kNormLanes, ... of
// the segment in order, then the lanes are halved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "parallel.h"

namespace jdistadam {

constexpr size_t kRun = 128;
constexpr int kNumSquares = 3;  // gradient, parameter, update

// The squares of one element, or sums of them.
struct Squares {
  float x[kNumSquares];
};

JDISTADAM_INLINE Squares SquaresOf(float grad, float param, float update) {
  return {{grad * grad, param * param, update * update}};
}

// The squares of the elements of a run, or sums of them.
struct RunSquares {
  float x[kNumSquares][kRun];

  void Set(size_t i, const Squares& squares) {
    for (int q = 0; q < kNumSquares; ++q) x[q][i] = squares.x[q];
  }
};

// The position of a leaf's runs among all runs.
struct Runs {
  size_t first;
  bool is_fine;
};

JDISTADAM_INLINE size_t NumRuns(size_t size, bool is_fine) {
  return is_fine ? size : (size + kRun - 1) / kRun;
}

// The destination of the sums. In the CUDA kernels the pointers are device memory: the host does
// not know the segments, and their parts outside of the partials are ignored.
struct SquaresCall {
  float* partials = nullptr;  // (kNumSquares, num_runs), scratch; null: no sums are requested
  size_t num_runs = 0;
  const int32_t* segments = nullptr;  // (num_segments, 2): the first run, and one past the last
  size_t num_segments = 0;
  float* sums = nullptr;   // (num_segments, kNumSquares)
  std::vector<Runs> runs;  // one for each leaf
};

struct Segment {
  size_t begin, end;
};

JDISTADAM_INLINE Segment SegmentAt(const int32_t* segments, size_t i, size_t num_runs) {
  const int32_t first = segments[2 * i], last = segments[2 * i + 1];
  const size_t begin = first < 0 ? 0 : size_t(first), end = last < 0 ? 0 : size_t(last);
  return {begin, end < num_runs ? end : num_runs};
}

// Stores the squares of elements [begin, begin + n) of a leaf; n <= kRun, and kRun divides begin.
void StoreRun(const SquaresCall& call, const Runs& runs, size_t begin, size_t n,
              const RunSquares& squares);
// The second half: sums the partials.
void SumSegmentsCpu(const SquaresCall& call, const Threads& threads);

}  // namespace jdistadam
