// A step on parts of gradients on the CPU, written for clarity, not speed.

#include "adam.h"
#include "pairwise.h"
#include "parts.h"

namespace jdistadam {
namespace {

constexpr size_t kTile = 1 << 14;  // elements of a task

// Calls work(leaf index, i) for all elements of all leaves.
template <typename Work>
void ForElements(const PartsCall& call, const Threads& threads, const Work& work) {
  ForEachTile(call.leaves, kTile, threads, [&](size_t leaf, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) work(leaf, i);
  });
}

void Sum(const PartsCall& call, const Threads& threads, const std::vector<float*>& sums) {
  ForElements(call, threads, [&](size_t l, size_t i) {
    const PartsLeaf& leaf = call.leaves[l];
    const size_t at = WholeIndex(leaf.size, leaf.run, call.count, call.me, i);
    float total;
    PairwiseSum<kMaxContributions>(
        call.count,
        [&](int k, float* x) {
          const Term from = TermOf(leaf, call.me, k, i, at);
          *x = LoadOne(from.base, call.dtypes.grad, from.i);
        },
        &total);
    StoreOne(sums[l], Dtype::kFloat32, i, total);
  });
  NormTilesCall norm{Dtype::kFloat32, call.norm_scale, {}, call.num_tiles, call.tiles};
  for (size_t l = 0; l < call.leaves.size(); ++l)
    norm.leaves.push_back({sums[l], call.leaves[l].size, call.leaves[l].first_tile});
  NormTilesCpu(norm, threads);
}

void Step(const PartsCall& call, const Threads& threads, const std::vector<float*>& sums) {
  const PartsDtypes& t = call.dtypes;
  AdamCall adam{Mode::kStep,
                call.flags,
                {Dtype::kFloat32, Dtype::kFloat32, t.mu, t.nu, Dtype::kFloat32},
                call.coefficients,
                call.inv_scale,
                call.found_inf,
                {}};
  for (size_t l = 0; l < call.leaves.size(); ++l) {
    const PartsLeaf& leaf = call.leaves[l];
    adam.leaves.push_back({sums[l], leaf.main, leaf.mu, leaf.nu, nullptr, leaf.size, leaf.group});
  }
  AdamCpu(adam, threads);
  ForElements(call, threads, [&](size_t l, size_t i) {
    const PartsLeaf& leaf = call.leaves[l];
    const size_t at = WholeIndex(leaf.size, leaf.run, call.count, call.me, i);
    StoreOne(leaf.out, t.out, call.is_out_whole ? at : i, leaf.main[i]);
  });
}

}  // namespace

void PartsCpu(const PartsCall& call, const Threads& threads) {
  size_t total = 0;
  for (const PartsLeaf& leaf : call.leaves) total += leaf.size;
  std::vector<float> own(call.work == PartsWork::kStep ? total : 0);
  std::vector<float*> sums;
  size_t next = 0;
  for (const PartsLeaf& leaf : call.leaves) {
    sums.push_back(own.empty() ? leaf.sum : own.data() + next);
    next += leaf.size;
  }
  if (call.work != PartsWork::kStepOnSums) Sum(call, threads, sums);
  if (call.work != PartsWork::kSum) Step(call, threads, sums);
}

}  // namespace jdistadam
