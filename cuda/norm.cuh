// Shared code of kernels that take a norm on a CUDA device; norm.h gives the order of the sums.
#pragma once

#include "norm.h"

namespace jdistadam {

// Sums 32 * kPerThread lanes in halves, `kPerThread` neighbours per thread of a warp; valid only in
// its first thread.
template <int kPerThread>
__device__ __forceinline__ float SumLanesOfWarp(float (&lanes)[kPerThread]) {
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) lanes[k] += __shfl_down_sync(0xffffffffu, lanes[k], half);
  }
#pragma unroll
  for (int half = kPerThread / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

// Sums all lanes in halves, `kPerThread` neighbours per thread of a block; valid only in thread 0.
template <int kPerThread>
__device__ float SumLanes(float (&lanes)[kPerThread]) {
  __shared__ float shared[kNormLanes];
  constexpr int threads = kNormLanes / kPerThread;
#pragma unroll
  for (int half = threads / 2; half >= 32; half /= 2) {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) shared[k * threads + threadIdx.x] = lanes[k];
    __syncthreads();
    if (threadIdx.x < half) {
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) lanes[k] += shared[k * threads + threadIdx.x + half];
    }
    __syncthreads();
  }
  return SumLanesOfWarp(lanes);
}

}  // namespace jdistadam
