// Sums and copies on the CPU.

#include <algorithm>

#include "pairwise.h"
#include "sum.h"

namespace jdistadam {
namespace {

constexpr size_t kTile = 1 << 14;  // elements of a task

void SumTile(const SumCall& call, const SumLeaf& leaf, size_t begin) {
  const size_t end = std::min(begin + kTile, leaf.size);
  const size_t stride = call.stride != 0 ? call.stride : leaf.size;
  for (size_t i = begin; i < end; ++i) {
    float total = 0.0f;
    if (leaf.in != nullptr) {
      PairwiseSum<kMaxContributions>(
          call.contributions,
          [&](int k, float* term) { *term = LoadOne(leaf.in, call.in, k * stride + i); }, &total);
    }
    StoreOne(leaf.out, call.out, i, total);
  }
}

}  // namespace

void SumCpu(const SumCall& call, const Threads& threads) {
  struct Tile {
    const SumLeaf* leaf;
    size_t begin;
  };
  std::vector<Tile> tiles;
  for (const SumLeaf& leaf : call.leaves) {
    for (size_t begin = 0; begin < leaf.size; begin += kTile) tiles.push_back({&leaf, begin});
  }
  ParallelFor(tiles.size(), threads,
              [&](size_t t) { SumTile(call, *tiles[t].leaf, tiles[t].begin); });
}

}  // namespace jdistadam
