// The global norm on a CUDA device: each block sums one tile, then one block sums all tiles.
//
// traffic   one read of the gradients; and 16 bytes per tile of kNormTile elements.
// order     as in norm.h: no atomics; the result does not depend on when a block runs.

#include "kernels_cuda.h"
#include "leaf_table.cuh"
#include "norm.cuh"
#include "vector.cuh"

namespace jdistadam {
namespace {

constexpr int kVector = 4;
constexpr int kThreads = kNormLanes / kVector;  // of a tile: thread t owns lanes 4 t ... 4 t + 3
constexpr int kRows = kNormTile / kNormLanes;
constexpr int kFinalThreads = kNormLanes;

template <Dtype kDtype>
__device__ __forceinline__ void LoadRow(const NormLeaf& leaf, size_t i, bool aligned,
                                        float (&x)[kVector]) {
  if (aligned && i + kVector <= leaf.size) {
    Widen(LoadVector<kVector>(leaf.grad, kDtype, i), kDtype, x);
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    x[k] = i + k < leaf.size ? LoadOne(leaf.grad, kDtype, i + k) : 0;
}

template <Dtype kDtype, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    TileKernel(const __grid_constant__ LeafTable<NormLeaf, kCapacity> table,
               const float* inv_scale_pointer, TileNorm* tiles) {
  const TileIndex index = FindTile(table, blockIdx.x);
  const NormLeaf& leaf = table.leaves[index.leaf];
  const size_t begin = size_t{index.tile} * kNormTile + threadIdx.x * kVector;
  const bool aligned = IsAligned<kVector>(leaf.grad, kDtype);
  float x[kRows][kVector], lanes[kVector] = {};
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    LoadRow<kDtype>(leaf, begin + row * kNormLanes, aligned, x[row]);
  const float inv_scale = *inv_scale_pointer;
  bool finite = true;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      // skip elements beyond the leaf: 0 * inf is NaN
      const bool inside = begin + row * kNormLanes + k < leaf.size;
      const float g = inside ? x[row][k] * inv_scale : 0.0f;
      finite &= IsFinite(g);
      lanes[k] += g * g;
    }
  }
  const bool found_inf = __syncthreads_or(!finite);
  const float sum = SumLanes(lanes);
  if (threadIdx.x == 0) tiles[leaf.first_tile + index.tile] = {sum, found_inf};
}

__global__ void __launch_bounds__(kFinalThreads) FinalKernel(const NormCall call) {
  float lanes[1] = {};
  uint32_t found = 0;
  for (size_t t = threadIdx.x; t < call.num_tiles; t += kFinalThreads) {
    const TileNorm tile = call.tiles[t];
    lanes[0] += tile.sum_of_squares;
    found |= tile.found_inf;
  }
  const bool any = __syncthreads_or(found);
  const float sum = SumLanes(lanes);
  if (threadIdx.x == 0) {
    *call.sum_of_squares = CanonicalNan(sum);
    *call.found_inf = any;
  }
}

template <Dtype kDtype>
cudaError_t Launch(const NormTilesCall& call, cudaStream_t stream) {
  return ForEachTable<NormLeaf>(call.leaves, kNormTile, [&](const auto& table, uint32_t tiles) {
    TileKernel<kDtype><<<tiles, kThreads, 0, stream>>>(table, call.inv_scale, call.tiles);
  });
}

}  // namespace

cudaError_t NormCuda(const NormCall& call, cudaStream_t stream) {
  FinalKernel<<<1, kFinalThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t NormTilesCuda(const NormTilesCall& call, cudaStream_t stream) {
  switch (call.dtype) {
    case Dtype::kFloat32:
      return Launch<Dtype::kFloat32>(call, stream);
    case Dtype::kBfloat16:
      return Launch<Dtype::kBfloat16>(call, stream);
    case Dtype::kFloat16:
      return Launch<Dtype::kFloat16>(call, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jdistadam
