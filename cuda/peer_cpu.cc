// A step over the memory of several devices on the CPU, written for clarity, not speed.

#include <algorithm>

#include "adam.h"
#include "pairwise.h"
#include "peer.h"

namespace jdistadam {
namespace {

constexpr size_t kTile = 1 << 14;  // elements of a task

// Calls work(leaf index, begin, end) for tiles of all leaves.
template <typename Work>
void ForTiles(const PeerCall& call, const Threads& threads, const Work& work) {
  struct Tile {
    size_t leaf, begin;
  };
  std::vector<Tile> tiles;
  for (size_t leaf = 0; leaf < call.leaves.size(); ++leaf) {
    for (size_t begin = 0; begin < call.leaves[leaf].size; begin += kTile)
      tiles.push_back({leaf, begin});
  }
  ParallelFor(tiles.size(), threads, [&](size_t t) {
    const size_t size = call.leaves[tiles[t].leaf].size;
    work(tiles[t].leaf, tiles[t].begin, std::min(tiles[t].begin + kTile, size));
  });
}

void Sum(const PeerCall& call, const PeerArrays& arrays, const Threads& threads,
         const std::vector<float*>& sums) {
  ForTiles(call, threads, [&](size_t l, size_t begin, size_t end) {
    const PeerLeaf& leaf = call.leaves[l];
    const void* const* grads = &arrays.grads[l * arrays.count];
    for (size_t i = begin; i < end; ++i) {
      const size_t at = WholeIndex(leaf.size, leaf.run, arrays.count, arrays.me, i);
      float total;
      PairwiseSum<kMaxPeers>(
          arrays.count,
          [&](int k, float* x) {
            const bool is_shard = k == arrays.me ? leaf.is_shard : leaf.is_received;
            *x = LoadOne(grads[k], call.dtypes.grad, is_shard ? i : at);
          },
          [](float a, float* b) { *b = a + *b; }, &total);
      StoreOne(sums[l], Dtype::kFloat32, i, total);
    }
  });
}

void Norm(const PeerCall& call, const Threads& threads, const std::vector<float*>& sums) {
  NormTilesCall norm{Dtype::kFloat32, call.norm_scale, {}, call.num_tiles, call.tiles};
  for (size_t l = 0; l < call.leaves.size(); ++l)
    norm.leaves.push_back({sums[l], call.leaves[l].size, call.leaves[l].first_tile});
  NormTilesCpu(norm, threads);
  NormCpu({call.tiles, call.num_tiles, call.sum_of_squares, call.norm_found_inf});
}

void Step(const PeerCall& call, const PeerArrays& arrays, const Threads& threads,
          const std::vector<float*>& sums) {
  const PeerDtypes& t = call.dtypes;
  AdamCall adam{Mode::kStep,
                call.flags,
                {Dtype::kFloat32, Dtype::kFloat32, t.mu, t.nu, Dtype::kFloat32},
                1,
                0,
                call.coefficients,
                call.inv_scale,
                call.found_inf,
                {}};
  for (size_t l = 0; l < call.leaves.size(); ++l) {
    const PeerLeaf& leaf = call.leaves[l];
    adam.leaves.push_back({sums[l], leaf.main, leaf.mu, leaf.nu, nullptr, leaf.size, leaf.group});
  }
  AdamCpu(adam, threads);
  ForTiles(call, threads, [&](size_t l, size_t begin, size_t end) {
    const PeerLeaf& leaf = call.leaves[l];
    for (size_t i = begin; i < end; ++i) {
      const size_t at = WholeIndex(leaf.size, leaf.run, arrays.count, arrays.me, i);
      for (int q = 0; q < arrays.count; ++q)
        StoreOne(arrays.outs[l * arrays.count + q], leaf.out_dtype, at, leaf.main[i]);
    }
  });
}

}  // namespace

void PeerCpu(const PeerCall& call, const PeerArrays& arrays, const Threads& threads) {
  std::vector<float*> sums;
  std::vector<float> own;
  if (call.work == PeerWork::kStep) {
    size_t total = 0;
    for (const PeerLeaf& leaf : call.leaves) total += leaf.size;
    own.resize(total);
  }
  size_t next = 0;
  for (const PeerLeaf& leaf : call.leaves) {
    sums.push_back(own.empty() ? leaf.sum : own.data() + next);
    next += leaf.size;
  }
  if (call.work != PeerWork::kStepOnSums) {
    Sum(call, arrays, threads, sums);
    Norm(call, threads, sums);
  }
  if (call.work != PeerWork::kSum) Step(call, arrays, threads, sums);
}

}  // namespace jdistadam
