// A step on parts of gradients on a CUDA device: one launch for many leaves (leaf_table.cuh).
//
// order     A block takes one tile of the norm (norm.h) and goes through it row by row, so the norm
//           of the sums is bitwise that of norm_cuda.cu; the sums are those of pairwise.h.
// traffic   kStep, per element of the shard: the part of every device, main, mu and nu read and
//           written, the new parameter written. The norm needs no further read.
// loads     In a thread the loads of all operands come before the first use.

#include <algorithm>

#include "adam_math.h"
#include "coefficients.cuh"
#include "kernels_cuda.h"
#include "leaf_table.cuh"
#include "norm.cuh"
#include "pairwise.h"
#include "vector.cuh"

namespace jdistadam {
namespace {

constexpr int kVector = 4;
constexpr int kThreads = kNormLanes / kVector;
constexpr int kRows = kNormTile / kNormLanes;

// How many leaves fit the parameters of a kernel. There is one capacity: a launch with a small
// table is a few microseconds faster, but would double the number of kernels.
constexpr int kCapacity = int((kMaxParameterBytes - 256) / (sizeof(PartsLeaf) + sizeof(uint32_t)));

// The arguments of a launch other than its leaves.
struct Step {
  int count, me;
  bool nesterov, cautious, is_out_whole;
  PartsDtypes dtypes;
  const float* coefficients;
  const float* inv_scale;
  const bool* found_inf;
  const float* norm_scale;
  TileNorm* tiles;
};

// Dtypes: arguments of the launch, or constants (`Types`, as in variants.cuh).
struct AnyTypes {
  static constexpr bool kMayBeCautious = true;
  Dtype grad, mu, nu, out;
  __device__ explicit AnyTypes(const Step& step)
      : grad(step.dtypes.grad), mu(step.dtypes.mu), nu(step.dtypes.nu), out(step.dtypes.out) {}
};

template <Dtype kGrad, Dtype kOut>
struct FixedTypes {
  static constexpr bool kMayBeCautious = false;
  static constexpr Dtype grad = kGrad, mu = Dtype::kFloat32, nu = Dtype::kFloat32, out = kOut;
  __device__ explicit FixedTypes(const Step&) {}
  static bool Fits(const PartsCall& call) {
    const PartsDtypes& t = call.dtypes;
    if (call.work != PartsWork::kStepOnSums && t.grad != grad) return false;
    if (call.work == PartsWork::kSum) return true;
    return (call.flags & kCautious) == 0 && t.mu == mu && t.nu == nu && t.out == out;
  }
};

struct Coordinates {
  size_t i;      // in the shard
  size_t whole;  // in the leaf
};

// The sum of one element over all devices, or the earlier sum.
template <int kCount, PartsWork kWork, typename Types>
__device__ float LoadSumOne(const Types& t, const Step& step, const PartsLeaf& leaf,
                            const Coordinates& at) {
  if constexpr (kWork == PartsWork::kStepOnSums) return leaf.sum[at.i];
  float total;
  PairwiseSum<kCount>(
      step.count,
      [&](int k, float* term) {
        const Term from = TermOf(leaf, step.me, k, at.i, at.whole);
        *term = LoadOne(from.base, t.grad, from.i);
      },
      &total);
  return CanonicalNan(total);
}

// One element: a tail, a misaligned leaf, a NaN, or a skipped step. `sum` is its gradient.
template <PartsWork kWork, typename Types>
__device__ __noinline__ void StepOne(const Types& t, const Step& step, const PartsLeaf& leaf,
                                     const Coordinates& at, float sum) {
  if constexpr (kWork == PartsWork::kSum) return StoreOne(leaf.sum, Dtype::kFloat32, at.i, sum);
  float p = leaf.main[at.i];
  if (!*step.found_inf) {
    const Coefficients c = reinterpret_cast<const Coefficients*>(step.coefficients)[leaf.group];
    const Terms terms = TermsOf(c, step.nesterov, Types::kMayBeCautious && step.cautious);
    float m = LoadOne(leaf.mu, t.mu, at.i), v = LoadOne(leaf.nu, t.nu, at.i);
    p = p - AdamUpdate(c, terms, sum * *step.inv_scale, p, m, v);
    StoreOne(leaf.mu, t.mu, at.i, m);
    StoreOne(leaf.nu, t.nu, at.i, v);
    StoreOne(leaf.main, Dtype::kFloat32, at.i, p);
  }
  StoreOne(leaf.out, t.out, step.is_out_whole ? at.whole : at.i, p);
}

// The sum of one vector over all devices, or the earlier sum. All loads of a fixed number are in
// flight together.
template <int kCount, PartsWork kWork, typename Types>
__device__ __forceinline__ void LoadSum(const Types& t, const Step& step, const PartsLeaf& leaf,
                                        const Coordinates& at, float (&sum)[kVector]) {
  if constexpr (kWork == PartsWork::kStepOnSums) {
    Widen(LoadVector<kVector>(leaf.sum, Dtype::kFloat32, at.i), Dtype::kFloat32, sum);
    return;
  }
  using Sum = VectorSum<kVector>;
  Sum total;
  PairwiseSum<kCount == 0 ? kMaxContributions : kCount>(
      kCount == 0 ? step.count : kCount,
      [&](int k, Sum* term) {
        const Term from = TermOf(leaf, step.me, k, at.i, at.whole);
        Widen(LoadVector<kVector>(from.base, t.grad, from.i), t.grad, term->x);
      },
      &total);
  total.CopyTo(sum);
}

// One vector. Returns its summed gradients in `sum`.
template <int kCount, PartsWork kWork, typename Types>
__device__ __forceinline__ void StepVector(const Types& t, const Step& step, const PartsLeaf& leaf,
                                           const Coordinates& at, float (&sum)[kVector]) {
  constexpr bool is_step = kWork != PartsWork::kSum;
  Packed<kVector> packed_p, packed_m, packed_v;
  if constexpr (is_step) {
    packed_p = LoadVector<kVector>(leaf.main, Dtype::kFloat32, at.i);
    packed_m = LoadVector<kVector>(leaf.mu, t.mu, at.i);
    packed_v = LoadVector<kVector>(leaf.nu, t.nu, at.i);
  }
  LoadSum<kCount, kWork>(t, step, leaf, at, sum);
  float p[kVector], m[kVector], v[kVector];
  bool special = false;
  if constexpr (is_step) {
    const Coefficients c = reinterpret_cast<const Row*>(step.coefficients)[leaf.group].coefficients;
    const float inv_scale = *step.inv_scale;
    special = *step.found_inf;
    Widen(packed_p, Dtype::kFloat32, p);
    Widen(packed_m, t.mu, m);
    Widen(packed_v, t.nu, v);
    const Terms terms = TermsOf(c, step.nesterov, Types::kMayBeCautious && step.cautious);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      p[k] = p[k] - AdamUpdate(c, terms, sum[k] * inv_scale, p[k], m[k], v[k]);
      special |= p[k] != p[k];
    }
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k) special |= sum[k] != sum[k];
  if (special) {
    for (int k = 0; k < kVector; ++k)
      StepOne<kWork>(t, step, leaf, {at.i + k, at.whole + k}, CanonicalNan(sum[k]));
    return;
  }
  if constexpr (is_step) {
    StoreVector(leaf.mu, t.mu, at.i, m);
    StoreVector(leaf.nu, t.nu, at.i, v);
    StoreVector(leaf.main, Dtype::kFloat32, at.i, p);
    StoreVector(leaf.out, t.out, step.is_out_whole ? at.whole : at.i, p);
  } else {
    StoreVector(leaf.sum, Dtype::kFloat32, at.i, sum);
  }
}

// Whether all arrays of a leaf can be read and written as vectors, and no vector crosses a run.
template <PartsWork kWork, typename Types>
__device__ __forceinline__ bool IsAligned(const Types& t, const PartsLeaf& leaf) {
  bool aligned = leaf.run % kVector == 0;
  if constexpr (kWork != PartsWork::kStepOnSums) {
    aligned &= IsAligned<kVector>(leaf.own, t.grad) && IsAligned<kVector>(leaf.received, t.grad);
  }
  if constexpr (kWork != PartsWork::kStep) aligned &= IsAligned<kVector>(leaf.sum, Dtype::kFloat32);
  if constexpr (kWork != PartsWork::kSum) {
    aligned &= IsAligned<kVector>(leaf.out, t.out) &&
               IsAligned<kVector>(leaf.main, Dtype::kFloat32) &&
               IsAligned<kVector>(leaf.mu, t.mu) && IsAligned<kVector>(leaf.nu, t.nu);
  }
  return aligned;
}

template <int kCount, PartsWork kWork, typename Types>
__global__ void __launch_bounds__(kThreads)
    PartsKernel(const __grid_constant__ LeafTable<PartsLeaf, kCapacity> table,
                const __grid_constant__ Step step) {
  const TileIndex index = FindTile(table, blockIdx.x);
  const PartsLeaf& leaf = table.leaves[index.leaf];
  const Types t(step);
  const bool aligned = IsAligned<kWork>(t, leaf);
  const float norm_scale = kWork == PartsWork::kStepOnSums ? 0.0f : *step.norm_scale;
  float lanes[kVector] = {};
  bool finite = true;
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    const size_t i = size_t{index.tile} * kNormTile + row * kNormLanes + threadIdx.x * kVector;
    if (i >= leaf.size) break;
    float sum[kVector] = {};
    if (aligned && i + kVector <= leaf.size) {
      StepVector<kCount, kWork>(t, step, leaf,
                                {i, WholeIndex(leaf.size, leaf.run, step.count, step.me, i)}, sum);
    } else {
      for (int k = 0; k < kVector && i + k < leaf.size; ++k) {
        const Coordinates at{i + k, WholeIndex(leaf.size, leaf.run, step.count, step.me, i + k)};
        sum[k] = LoadSumOne<kMaxContributions, kWork>(t, step, leaf, at);
        StepOne<kWork>(t, step, leaf, at, sum[k]);
      }
    }
    if constexpr (kWork != PartsWork::kStepOnSums) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float g = i + k < leaf.size ? sum[k] * norm_scale : 0.0f;  // 0 * inf is NaN
        finite &= IsFinite(g);
        lanes[k] += g * g;
      }
    }
  }
  if constexpr (kWork != PartsWork::kStepOnSums) {
    const bool found_inf = __syncthreads_or(!finite);
    const float total = SumLanes(lanes);
    if (threadIdx.x == 0) step.tiles[leaf.first_tile + index.tile] = {total, found_inf};
  }
}

template <int kCount, PartsWork kWork, typename Types>
cudaError_t Launch(const PartsCall& call, cudaStream_t stream) {
  const Step step{call.count,
                  call.me,
                  (call.flags & kNesterov) != 0,
                  (call.flags & kCautious) != 0,
                  call.is_out_whole,
                  call.dtypes,
                  call.coefficients,
                  call.inv_scale,
                  call.found_inf,
                  call.norm_scale,
                  call.tiles};
  return ForEachTable<PartsLeaf, kCapacity, kCapacity>(
      call.leaves, kNormTile, [&](const auto& table, uint32_t tiles) {
        PartsKernel<kCount, kWork, Types><<<tiles, kThreads, 0, stream>>>(table, step);
      });
}

// The first of `Types` that fits; otherwise arguments of the launch.
template <int kCount, PartsWork kWork, typename... Types>
cudaError_t LaunchTypes(const PartsCall& call, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  const bool is_fixed =
      ((Types::Fits(call) && ((error = Launch<kCount, kWork, Types>(call, stream)), true)) || ...);
  return is_fixed ? error : Launch<kCount, kWork, AnyTypes>(call, stream);
}

using BB = FixedTypes<Dtype::kBfloat16, Dtype::kBfloat16>;
using FB = FixedTypes<Dtype::kFloat32, Dtype::kBfloat16>;
using FF = FixedTypes<Dtype::kFloat32, Dtype::kFloat32>;

// A sum writes no parameters: one type each is enough.
template <int kCount>
cudaError_t LaunchOnParts(const PartsCall& call, cudaStream_t stream) {
  return call.work == PartsWork::kSum
             ? LaunchTypes<kCount, PartsWork::kSum, BB, FF>(call, stream)
             : LaunchTypes<kCount, PartsWork::kStep, BB, FB, FF>(call, stream);
}

}  // namespace

cudaError_t PartsCuda(const PartsCall& call, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(call.coefficients) % alignof(Row) != 0)
    return cudaErrorMisalignedAddress;
  if (call.work == PartsWork::kStepOnSums)
    return LaunchTypes<1, PartsWork::kStepOnSums, BB, FF>(call, stream);
  switch (call.count) {
    case 2:
      return LaunchOnParts<2>(call, stream);
    case 4:
      return LaunchOnParts<4>(call, stream);
    case 8:
      return LaunchOnParts<8>(call, stream);
    default:
      return LaunchOnParts<0>(call, stream);
  }
}

}  // namespace jdistadam
