// The global norm on a CUDA device: each warp sums one tile, then one block sums all tiles.
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
constexpr int kWarps = 4;           // of a block; each sums a tile
constexpr int kRow = 32 * kVector;  // elements of a load; thread t owns 4 t ... 4 t + 3 of them
constexpr int kRows = kNormLanes / kRow;
constexpr int kFinalThreads = kNormLanes;

// One vector of gradients times inv_scale; zeros beyond the leaf, where 0 * inf would be NaN.
template <Dtype kDtype, bool kIsWhole>
__device__ __forceinline__ void LoadScaled(const NormLeaf& leaf, size_t i, float inv_scale,
                                           float (&g)[kVector]) {
  if (kIsWhole) Widen(LoadVector<kVector>(leaf.grad, kDtype, i), kDtype, g);
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const bool inside = kIsWhole || i + k < leaf.size;
    if (!kIsWhole) g[k] = inside ? LoadOne(leaf.grad, kDtype, i + k) : 0.0f;
    g[k] = inside ? g[k] * inv_scale : 0.0f;
  }
}

// Sums the tile that begins at element `begin`; valid only in the first thread of a warp.
template <Dtype kDtype, bool kIsWhole>
__device__ __forceinline__ TileNorm SumTile(const NormLeaf& leaf, size_t begin, float inv_scale) {
  float lanes[kRows][kVector] = {};
  float nan_if_not_finite = 0.0f;
#pragma unroll(kIsWhole ? kNormTile / kNormLanes : 1)
  for (int first = 0; first < kNormTile; first += kNormLanes) {
    float g[kRows][kVector];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const size_t i = begin + first + row * kRow + threadIdx.x % 32 * kVector;
      LoadScaled<kDtype, kIsWhole>(leaf, i, inv_scale, g[row]);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        nan_if_not_finite = fmaf(g[row][k], 0.0f, nan_if_not_finite);
        lanes[row][k] += g[row][k] * g[row][k];
      }
    }
  }
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
#pragma unroll
    for (int row = 0; row < half; ++row) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) lanes[row][k] += lanes[row + half][k];
    }
  }
  const bool found_inf = __any_sync(0xffffffffu, nan_if_not_finite != nan_if_not_finite);
  return {SumLanesOfWarp(lanes[0]), found_inf};
}

template <Dtype kDtype, int kCapacity>
__global__ void __launch_bounds__(32 * kWarps, 8)
    TileKernel(const __grid_constant__ LeafTable<NormLeaf, kCapacity> table,
               const float* inv_scale_pointer, TileNorm* tiles) {
  const uint32_t tile = blockIdx.x * kWarps + threadIdx.x / 32;
  if (tile >= table.end[table.count - 1]) return;
  const TileIndex index = FindTile(table, tile);
  const NormLeaf& leaf = table.leaves[index.leaf];
  const size_t begin = size_t{index.tile} * kNormTile;
  const float inv_scale = *inv_scale_pointer;
  const bool is_whole = begin + kNormTile <= leaf.size && IsAligned<kVector>(leaf.grad, kDtype);
  const TileNorm sum = is_whole ? SumTile<kDtype, true>(leaf, begin, inv_scale)
                                : SumTile<kDtype, false>(leaf, begin, inv_scale);
  if (threadIdx.x % 32 == 0) tiles[leaf.first_tile + index.tile] = sum;
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
    const uint32_t blocks = (tiles + kWarps - 1) / kWarps;
    TileKernel<kDtype><<<blocks, 32 * kWarps, 0, stream>>>(table, call.inv_scale, call.tiles);
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
