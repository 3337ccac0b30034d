// The global norm on the CPU: one task per tile.

#include <algorithm>

#include "norm.h"

namespace jdistadam {
namespace {

TileNorm SumTile(const NormTilesCall& call, const NormLeaf& leaf, size_t begin, size_t end) {
  float lanes[kNormLanes] = {}, row[kNormLanes];
  const float inv_scale = *call.inv_scale;
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
  ForEachTile(call.leaves, kNormTile, threads, [&](size_t l, size_t begin, size_t end) {
    const NormLeaf& leaf = call.leaves[l];
    call.tiles[leaf.first_tile + begin / kNormTile] = SumTile(call, leaf, begin, end);
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
