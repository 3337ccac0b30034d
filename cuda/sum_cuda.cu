// Sums and copies on a CUDA device: one vector per thread, one launch for many leaves.
//
// traffic   each contribution once, the result once.

#include "kernels_cuda.h"
#include "leaf_table.cuh"
#include "pairwise.h"
#include "sum.h"
#include "vector.cuh"

namespace jdistadam {
namespace {

constexpr int kThreads = 128, kVector = 4;

// The arguments of a launch other than its leaves.
struct Sum {
  Dtype in, out;
  int contributions;
  size_t stride;
};

using Vector = VectorSum<kVector>;

// kContributions = 0: an argument of the launch.
template <int kContributions>
__device__ __forceinline__ Vector SumVector(const Sum& sum, const SumLeaf& leaf, size_t stride,
                                            size_t i) {
  Vector total = {};
  if (leaf.in == nullptr) return total;
  PairwiseSum<kContributions == 0 ? kMaxContributions : kContributions>(
      kContributions == 0 ? sum.contributions : kContributions,
      [&](int k, Vector* term) {
        Widen(LoadVector<kVector>(leaf.in, sum.in, k * stride + i), sum.in, term->x);
      },
      &total);
  return total;
}

__device__ __noinline__ void SumOne(const Sum& sum, const SumLeaf& leaf, size_t stride, size_t i) {
  float total = 0.0f;
  if (leaf.in != nullptr) {
    PairwiseSum<kMaxContributions>(
        sum.contributions,
        [&](int k, float* term) { *term = LoadOne(leaf.in, sum.in, k * stride + i); }, &total);
  }
  StoreOne(leaf.out, sum.out, i, total);
}

template <int kContributions, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    SumKernel(const __grid_constant__ LeafTable<SumLeaf, kCapacity> table,
              const __grid_constant__ Sum sum) {
  const TileIndex index = FindTile(table, blockIdx.x);
  const SumLeaf& leaf = table.leaves[index.leaf];
  const size_t i = (size_t{index.tile} * kThreads + threadIdx.x) * kVector;
  if (i >= leaf.size) return;
  const size_t left = leaf.size - i, stride = sum.stride != 0 ? sum.stride : leaf.size;
  bool whole = left >= kVector && IsAligned<kVector>(leaf.in, sum.in) &&
               IsAligned<kVector>(leaf.out, sum.out) &&
               (sum.contributions == 1 || stride % kVector == 0);
  if (whole) {
    const Vector total = SumVector<kContributions>(sum, leaf, stride, i);
#pragma unroll
    for (int k = 0; k < kVector; ++k) whole &= total.x[k] == total.x[k];
    if (whole) StoreVector(leaf.out, sum.out, i, total.x);
  }
  if (!whole) {  // a tail, a misaligned leaf, or a NaN
    for (int k = 0; k < kVector && k < left; ++k) SumOne(sum, leaf, stride, i + k);
  }
}

template <int kContributions>
cudaError_t Launch(const SumCall& call, cudaStream_t stream) {
  const Sum sum{call.in, call.out, call.contributions, call.stride};
  return ForEachTable<SumLeaf>(
      call.leaves, size_t{kThreads} * kVector, [&](const auto& table, uint32_t tiles) {
        SumKernel<kContributions><<<tiles, kThreads, 0, stream>>>(table, sum);
      });
}

}  // namespace

cudaError_t SumCuda(const SumCall& call, cudaStream_t stream) {
  switch (call.contributions) {
    case 1:
      return Launch<1>(call, stream);
    case 2:
      return Launch<2>(call, stream);
    case 4:
      return Launch<4>(call, stream);
    case 8:
      return Launch<8>(call, stream);
    default:
      return Launch<0>(call, stream);
  }
}

}  // namespace jdistadam
