// The second half of sums of squares on a CUDA device: one block sums the runs of one segment.

#include "kernels_cuda.h"
#include "norm.cuh"

namespace jdistadam {
namespace {

constexpr int kThreads = kNormLanes;

__global__ void __launch_bounds__(kThreads)
    SegmentKernel(const float* partials, size_t num_runs, const int32_t* segments, float* sums) {
  const unsigned q = blockIdx.x % kNumSquares;
  const Segment segment = SegmentAt(segments, blockIdx.x / kNumSquares, num_runs);
  const float* mine = partials + q * num_runs;
  float lanes[1] = {};
#pragma unroll 8
  for (size_t run = segment.begin + threadIdx.x; run < segment.end; run += kThreads)
    lanes[0] += mine[run];
  const float sum = SumLanes(lanes);
  if (threadIdx.x == 0) sums[blockIdx.x] = CanonicalNan(sum);
}

}  // namespace

cudaError_t SumSegmentsCuda(const SquaresCall& call, cudaStream_t stream) {
  if (call.num_segments == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(call.num_segments * kNumSquares);
  SegmentKernel<<<blocks, kThreads, 0, stream>>>(call.partials, call.num_runs, call.segments,
                                                 call.sums);
  return cudaGetLastError();
}

}  // namespace jdistadam
