// Shared by the CUDA kernels that take sums of squares; the order is that of squares.h.
#pragma once

#include "squares.h"

namespace jdistadam {
namespace {

// The destination of a leaf's sums.
struct RunsOfLeaf {
  float* partials;  // first run of the leaf
  size_t num_runs;  // runs of all leaves: the stride between the three sums
  bool is_fine;
};

// The squares of a thread's elements; zero for missing elements.
template <int kVector>
struct ThreadSquares {
  float x[kNumSquares][kVector] = {};

  __device__ __forceinline__ void Set(int k, const Squares& squares) {
#pragma unroll
    for (int q = 0; q < kNumSquares; ++q) x[q][k] = squares.x[q];
  }
};

// Stores one run: the values of a warp's threads. Each thread has `n` <= 4 elements of a leaf, the
// first at i. All threads of the warp call it together.
__device__ __forceinline__ void StoreRuns(const RunsOfLeaf& to, size_t i, int n,
                                          const ThreadSquares<4>& squares) {
  static_assert(kRun == 32 * 4);
#pragma unroll
  for (int q = 0; q < kNumSquares; ++q) {
    float* partials = to.partials + q * to.num_runs;
    if (to.is_fine) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k < n) partials[i + k] = squares.x[q][k];
      }
      continue;
    }
    float sum = (squares.x[q][0] + squares.x[q][1]) + (squares.x[q][2] + squares.x[q][3]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0 && n > 0) partials[i / kRun] = sum;
  }
}

}  // namespace
}  // namespace jdistadam
