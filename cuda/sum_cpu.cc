// Sums and copies on the CPU.

#include "pairwise.h"
#include "sum.h"

namespace jdistadam {
namespace {

constexpr size_t kTile = 1 << 14;  // elements of a task

void SumTile(const SumCall& call, const SumLeaf& leaf, size_t begin, size_t end) {
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
  ForEachTile(call.leaves, kTile, threads, [&](size_t leaf, size_t begin, size_t end) {
    SumTile(call, call.leaves[leaf], begin, end);
  });
}

}  // namespace jdistadam
