// Sums of squares of what a step has in registers anyway: gradients, parameters and updates.
//
//   gradient    what enters the formula: grad * inv_scale, before l2
//   parameter   p - u, before it is rounded to be stored; p where the step is skipped
//   update      u; zero where the step is skipped
//
// The order of the sums is fixed, whatever the number of threads and the width of vectors. A leaf
// is cut into runs of kRun elements, from its beginning on, of which the last one is filled up with
// zeros. A run is a tree: adjacent squares in pairs, then adjacent sums, and so on. A leaf may be
// `is_fine` instead: then each element is a run, and nothing is added.
//
// The sums of all runs are the `partials`, in the order of the leaves. A segment is runs that
// follow each other, such as those of a leaf, or of the part of it that this device has. It is
// summed over kNormLanes lanes as in norm.h: lane l adds the runs l, l + kNormLanes, ... of the
// segment one after the other, beginning with zero, then the lanes are halved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "parallel.h"

namespace jdistadam {

constexpr size_t kRun = 128;
constexpr int kNumSquares = 3;  // gradient, parameter, update

// The squares of one element, or sums of those.
struct Squares {
  float x[kNumSquares];
};

JDISTADAM_INLINE Squares SquaresOf(float grad, float param, float update) {
  return {{grad * grad, param * param, update * update}};
}

// The squares of the elements of a run, or sums of those.
struct RunSquares {
  float x[kNumSquares][kRun];

  void Set(size_t i, const Squares& squares) {
    for (int q = 0; q < kNumSquares; ++q) x[q][i] = squares.x[q];
  }
};

// The runs of a leaf among those of all.
struct Runs {
  size_t first;
  bool is_fine;
};

JDISTADAM_INLINE size_t NumRuns(size_t size, bool is_fine) {
  return is_fine ? size : (size + kRun - 1) / kRun;
}

// Where the sums go. The pointers are device memory in the CUDA kernels: segments are not known on
// the host, and what of them is outside of the partials is left out.
struct SquaresCall {
  float* partials = nullptr;  // (kNumSquares, num_runs), scratch; null: no sums are asked for
  size_t num_runs = 0;
  const int32_t* segments =
      nullptr;  // (num_segments, 2): the first run, and the one behind the last
  size_t num_segments = 0;
  float* sums = nullptr;   // (num_segments, kNumSquares)
  std::vector<Runs> runs;  // of each leaf
};

struct Segment {
  size_t begin, end;
};

JDISTADAM_INLINE Segment SegmentAt(const int32_t* segments, size_t i, size_t num_runs) {
  const int32_t first = segments[2 * i], last = segments[2 * i + 1];
  const size_t begin = first < 0 ? 0 : size_t(first), end = last < 0 ? 0 : size_t(last);
  return {begin, end < num_runs ? end : num_runs};
}

// Stores the squares of elements [begin, begin + n) of a leaf, n <= kRun and begin a multiple of
// it.
void StoreRun(const SquaresCall& call, const Runs& runs, size_t begin, size_t n,
              const RunSquares& squares);
// The second half: from the partials to the sums.
void SumSegmentsCpu(const SquaresCall& call, const Threads& threads);

}  // namespace jdistadam
