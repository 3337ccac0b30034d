// The global norm of a list of gradients, and whether all of them are finite.
//
//   sum_of_squares <- sum over all leaves of (g * inv_scale)^2
//   found_inf      <- whether any g * inv_scale is infinite or NaN
//
// The order of the sum is fixed, whatever the number of threads and the shape of a launch: a leaf
// is cut into tiles of kNormTile elements; the sums of all tiles, in the order of the leaves, are
// summed once more. Both are sums over lanes: lane l adds its terms l, l + kNormLanes, ... in
// sequence, starting with zero; then the lanes are summed in halves: lane l adds lane l + half.
// Several calls may sum the tiles: then a gradient need not exist until all are known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "parallel.h"

namespace jdistadam {

constexpr size_t kNormLanes = 1024;
constexpr size_t kNormTile = 8 * kNormLanes;

struct NormLeaf {
  const void* grad;
  size_t size;
  size_t first_tile;  // tiles of all leaves before this one
};

// The sum of a tile.
struct TileNorm {
  float sum_of_squares;
  uint32_t found_inf;
};

// Sums the tiles of some leaves. The pointers are device memory in the CUDA kernels.
struct NormTilesCall {
  Dtype dtype;
  const float* inv_scale;
  std::vector<NormLeaf> leaves;
  size_t num_tiles;
  TileNorm* tiles;  // (num_tiles,)
};

// Sums all tiles.
struct NormCall {
  const TileNorm* tiles;  // (num_tiles,)
  size_t num_tiles;
  float* sum_of_squares;
  bool* found_inf;
};

inline size_t NumNormTiles(size_t size) { return (size + kNormTile - 1) / kNormTile; }

// The sum of all lanes: they are halved until one is left.
inline float HalveLanes(float (&lanes)[kNormLanes]) {
  for (size_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

JDISTADAM_INLINE bool IsFinite(float x) { return (BitsOf(x) & 0x7f800000u) != 0x7f800000u; }

void NormTilesCpu(const NormTilesCall& call, const Threads& threads);
void NormCpu(const NormCall& call);

}  // namespace jdistadam
