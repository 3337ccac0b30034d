// The global norm on the CPU: one task per tile.

#include <algorithm>

#include "norm.h"

namespace jdistadam {
namespace {

TileNorm SumTile(const NormTilesCall& call, const NormLeaf& leaf, size_t begin) {
  float lanes[kNormLanes] = {}, row[kNormLanes];
  const float inv_scale = *call.inv_scale;
  const size_t end = std::min(begin + kNormTile, leaf.size);
  bool finite = true;
  for (; begin < end; begin += kNormLanes) {
    const size_t n = std::min(kNormLanes, end - begin);
    for (size_t l = 0; l < n; ++l) row[l] = LoadOne(leaf.grad, call.dtype, begin + l) * inv_scale;
    for (size_t l = 0; l < n; ++l) {
      finite &= IsFinite(row[l]);
      lanes[l] += row[l] * row[l];
    }
  }
  return {HalveLanes(lanes), !finite};
}

}  // namespace

void NormTilesCpu(const NormTilesCall& call, const Threads& threads) {
  std::vector<const NormLeaf*> leaf_of_tile(call.num_tiles);
  for (const NormLeaf& leaf : call.leaves) {
    for (size_t t = 0; t < NumNormTiles(leaf.size); ++t) leaf_of_tile[leaf.first_tile + t] = &leaf;
  }
  ParallelFor(call.num_tiles, threads, [&](size_t t) {
    const NormLeaf& leaf = *leaf_of_tile[t];
    call.tiles[t] = SumTile(call, leaf, (t - leaf.first_tile) * kNormTile);
  });
}

void NormCpu(const NormCall& call) {
  const KeepDenormals keep_denormals;
  float lanes[kNormLanes] = {};
  bool found_inf = false;
  for (size_t t = 0; t < call.num_tiles; ++t) {
    lanes[t % kNormLanes] += call.tiles[t].sum_of_squares;
    found_inf |= call.tiles[t].found_inf != 0;
  }
  *call.sum_of_squares = CanonicalNan(HalveLanes(lanes));
  *call.found_inf = found_inf;
}

}  // namespace jdistadam
