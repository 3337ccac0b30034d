// Old shards of parameters on a CUDA device: one launch, in which a block that has nothing to do
// reads one flag. So rare that the copy itself need not be fast.

#include "keep.h"
#include "kernels_cuda.h"
#include "leaf_table.cuh"

namespace jdistadam {
namespace {

constexpr int kThreads = 1024;
constexpr size_t kOneBlock = size_t{1} << 62;  // bytes of a tile: a leaf is never cut

template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    KeepKernel(const __grid_constant__ LeafTable<KeepLeaf, kCapacity> table, const bool* is_kept,
               const int32_t* index, size_t parts) {
  if (!*is_kept) return;
  const size_t part = size_t(*index);
  if (part >= parts) return;
  const KeepLeaf& leaf = table.leaves[blockIdx.x];
  for (size_t i = threadIdx.x; i < leaf.size; i += kThreads) {
    const size_t r = i / leaf.row, column = i - r * leaf.row;
    leaf.shard[i] = leaf.whole[(r * parts + part) * leaf.row + column];
  }
}

}  // namespace

cudaError_t KeepCuda(const KeepCall& call, cudaStream_t stream) {
  return ForEachTable<KeepLeaf>(call.leaves, kOneBlock, [&](const auto& table, uint32_t blocks) {
    KeepKernel<<<blocks, kThreads, 0, stream>>>(table, call.is_kept, call.index, call.parts);
    return cudaGetLastError();
  });
}

}  // namespace jdistadam
