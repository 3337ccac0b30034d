// A step over the memory of several GPUs: one launch for many leaves (leaf_table.cuh).
//
// order     A block takes one tile of the norm (norm.h) and goes through it row by row, so the norm
//           of the sums is bitwise that of norm_cuda.cu; the sums are those of pairwise.h.
// traffic   kStep, per element of this device's shard: the gradient of every device (all but one
//           through the links between GPUs, unless it was received before), main, mu and nu read
//           and written, the new parameter written to every device. The norm needs no further read.
// links     Loads from peers take a microsecond or two. Many small blocks keep enough of them in
//           flight; in a thread the loads of all operands come before the first use.
//
// Nothing here waits for another device: the handler enqueues this launch after their events.

#include <algorithm>

#include "adam_math.h"
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

// A leaf as the kernel sees it, with the arrays of all kPeers devices.
template <int kPeers>
struct DeviceLeaf {
  const void* grad[kPeers];
  void* out[kPeers];
  float* sum;
  float* main;
  void* mu;
  void* nu;
  size_t size, run, first_tile;
  int32_t group;
  Dtype out_dtype;
  bool is_received, is_shard;
};

// How many such leaves fit the parameters of a kernel. There is one capacity: a launch with a small
// table is a few microseconds faster, but would double the number of kernels.
template <int kPeers>
constexpr int kPeerTable =
    int((kMaxParameterBytes - 256) / (sizeof(DeviceLeaf<kPeers>) + sizeof(uint32_t)));

// The arguments of a launch other than its leaves.
struct Step {
  int me;
  bool nesterov, cautious;
  PeerDtypes dtypes;
  const float* coefficients;
  const float* inv_scale;
  const bool* found_inf;
  const float* norm_scale;
  TileNorm* tiles;
};

// Dtypes: arguments of the launch, or constants (`Types`, as in variants.cuh).
struct AnyTypes {
  static constexpr bool kMayBeCautious = true;
  Dtype grad, mu, nu;
  __device__ explicit AnyTypes(const Step& step)
      : grad(step.dtypes.grad), mu(step.dtypes.mu), nu(step.dtypes.nu) {}
  template <typename Leaf>
  __device__ static Dtype Out(const Leaf& leaf) {
    return leaf.out_dtype;
  }
};

template <Dtype kGrad, Dtype kOut>
struct FixedTypes {
  static constexpr bool kMayBeCautious = false;
  static constexpr Dtype grad = kGrad, mu = Dtype::kFloat32, nu = Dtype::kFloat32;
  __device__ explicit FixedTypes(const Step&) {}
  template <typename Leaf>
  __device__ static constexpr Dtype Out(const Leaf&) {
    return kOut;
  }
  static bool Fits(const PeerCall& call) {
    const PeerDtypes& t = call.dtypes;
    if (call.work != PeerWork::kStepOnSums && t.grad != grad) return false;
    if (call.work == PeerWork::kSum) return true;
    if (call.flags & kCautious) return false;
    const auto is_out = [](const PeerLeaf& leaf) { return leaf.out_dtype == kOut; };
    return t.mu == mu && t.nu == nu && std::all_of(call.leaves.begin(), call.leaves.end(), is_out);
  }
};

struct Coordinates {
  size_t i;      // in the shard
  size_t whole;  // in the leaf
};

// The position of device k's gradient in its array.
template <int kPeers>
__device__ __forceinline__ size_t GradIndex(const DeviceLeaf<kPeers>& leaf, int me, int k,
                                            const Coordinates& at) {
  return (k == me ? leaf.is_shard : leaf.is_received) ? at.i : at.whole;
}

// The sum of one element over all devices, or the earlier sum.
template <int kPeers, PeerWork kWork, typename Types>
__device__ float LoadSumOne(const Types& t, int me, const DeviceLeaf<kPeers>& leaf,
                            const Coordinates& at) {
  if constexpr (kWork == PeerWork::kStepOnSums) return leaf.sum[at.i];
  float total;
  PairwiseSum<kPeers>(
      kPeers,
      [&](int k, float* term) {
        *term = LoadOne(leaf.grad[k], t.grad, GradIndex(leaf, me, k, at));
      },
      [](float a, float* b) { *b = a + *b; }, &total);
  return CanonicalNan(total);
}

// One element: a tail, a misaligned leaf, a NaN, or a skipped step. `sum` is its gradient.
template <int kPeers, PeerWork kWork, typename Types>
__device__ __noinline__ void StepOne(const Types& t, const Step& step,
                                     const DeviceLeaf<kPeers>& leaf, const Coordinates& at,
                                     float sum) {
  if constexpr (kWork == PeerWork::kSum) return StoreOne(leaf.sum, Dtype::kFloat32, at.i, sum);
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
#pragma unroll
  for (int k = 0; k < kPeers; ++k) StoreOne(leaf.out[k], Types::Out(leaf), at.whole, p);
}

struct alignas(16) Row {
  Coefficients coefficients;
};
static_assert(sizeof(Row) == sizeof(Coefficients),
              "pad Coefficients, and NAMES of hyperparameters.py");

// One vector. Returns its summed gradients in `sum`.
template <int kPeers, PeerWork kWork, typename Types>
__device__ __forceinline__ void StepVector(const Types& t, const Step& step,
                                           const DeviceLeaf<kPeers>& leaf, const Coordinates& at,
                                           float (&sum)[kVector]) {
  constexpr bool is_step = kWork != PeerWork::kSum;
  Packed<kVector> grads[kPeers], packed_p, packed_m, packed_v;
  if constexpr (kWork == PeerWork::kStepOnSums) {
    grads[0] = LoadVector<kVector>(leaf.sum, Dtype::kFloat32, at.i);
  } else {
#pragma unroll
    for (int k = 0; k < kPeers; ++k)
      grads[k] = LoadVector<kVector>(leaf.grad[k], t.grad, GradIndex(leaf, step.me, k, at));
  }
  if constexpr (is_step) {
    packed_p = LoadVector<kVector>(leaf.main, Dtype::kFloat32, at.i);
    packed_m = LoadVector<kVector>(leaf.mu, t.mu, at.i);
    packed_v = LoadVector<kVector>(leaf.nu, t.nu, at.i);
  }
  if constexpr (kWork == PeerWork::kStepOnSums) {
    Widen(grads[0], Dtype::kFloat32, sum);
  } else {
    using Sum = VectorSum<kVector>;
    Sum total;
    PairwiseSum<kPeers>(
        kPeers, [&](int k, Sum* term) { Widen(grads[k], t.grad, term->x); }, Sum::Add{}, &total);
    total.CopyTo(sum);
  }
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
      StepOne<kPeers, kWork>(t, step, leaf, {at.i + k, at.whole + k}, CanonicalNan(sum[k]));
    return;
  }
  if constexpr (is_step) {
    StoreVector(leaf.mu, t.mu, at.i, m);
    StoreVector(leaf.nu, t.nu, at.i, v);
    StoreVector(leaf.main, Dtype::kFloat32, at.i, p);
#pragma unroll
    for (int k = 0; k < kPeers; ++k) StoreVector(leaf.out[k], Types::Out(leaf), at.whole, p);
  } else {
    StoreVector(leaf.sum, Dtype::kFloat32, at.i, sum);
  }
}

// Whether all arrays of a leaf can be read and written as vectors, and no vector crosses a run.
template <int kPeers, PeerWork kWork, typename Types>
__device__ __forceinline__ bool IsAligned(const Types& t, const DeviceLeaf<kPeers>& leaf) {
  bool aligned = leaf.run % kVector == 0;
  if constexpr (kWork != PeerWork::kStepOnSums) {
#pragma unroll
    for (int k = 0; k < kPeers; ++k) aligned &= IsAligned<kVector>(leaf.grad[k], t.grad);
  }
  if constexpr (kWork != PeerWork::kStep) aligned &= IsAligned<kVector>(leaf.sum, Dtype::kFloat32);
  if constexpr (kWork != PeerWork::kSum) {
#pragma unroll
    for (int k = 0; k < kPeers; ++k) aligned &= IsAligned<kVector>(leaf.out[k], Types::Out(leaf));
    aligned &= IsAligned<kVector>(leaf.main, Dtype::kFloat32) &&
               IsAligned<kVector>(leaf.mu, t.mu) && IsAligned<kVector>(leaf.nu, t.nu);
  }
  return aligned;
}

template <int kPeers, PeerWork kWork, typename Types, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    PeerKernel(const __grid_constant__ LeafTable<DeviceLeaf<kPeers>, kCapacity> table,
               const __grid_constant__ Step step) {
  const TileIndex index = FindTile(table, blockIdx.x);
  const DeviceLeaf<kPeers>& leaf = table.leaves[index.leaf];
  const Types t(step);
  const bool aligned = IsAligned<kPeers, kWork>(t, leaf);
  const float norm_scale = kWork == PeerWork::kStepOnSums ? 0.0f : *step.norm_scale;
  float lanes[kVector] = {};
  bool finite = true;
#pragma unroll 1
  for (int row = 0; row < kRows; ++row) {
    const size_t i = size_t{index.tile} * kNormTile + row * kNormLanes + threadIdx.x * kVector;
    if (i >= leaf.size) break;
    float sum[kVector] = {};
    if (aligned && i + kVector <= leaf.size) {
      StepVector<kPeers, kWork>(t, step, leaf,
                                {i, WholeIndex(leaf.size, leaf.run, kPeers, step.me, i)}, sum);
    } else {
      for (int k = 0; k < kVector && i + k < leaf.size; ++k) {
        const Coordinates at{i + k, WholeIndex(leaf.size, leaf.run, kPeers, step.me, i + k)};
        sum[k] = LoadSumOne<kPeers, kWork>(t, step.me, leaf, at);
        StepOne<kPeers, kWork>(t, step, leaf, at, sum[k]);
      }
    }
    if constexpr (kWork != PeerWork::kStepOnSums) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float g = i + k < leaf.size ? sum[k] * norm_scale : 0.0f;  // 0 * inf is NaN
        finite &= IsFinite(g);
        lanes[k] += g * g;
      }
    }
  }
  if constexpr (kWork != PeerWork::kStepOnSums) {
    const bool found_inf = __syncthreads_or(!finite);
    const float total = SumLanes(lanes);
    if (threadIdx.x == 0) step.tiles[leaf.first_tile + index.tile] = {total, found_inf};
  }
}

template <int kPeers, PeerWork kWork, typename Types>
cudaError_t Launch(const PeerCall& call, const PeerArrays& arrays, cudaStream_t stream) {
  const Step step{arrays.me,
                  (call.flags & kNesterov) != 0,
                  (call.flags & kCautious) != 0,
                  call.dtypes,
                  call.coefficients,
                  call.inv_scale,
                  call.found_inf,
                  call.norm_scale,
                  call.tiles};
  std::vector<DeviceLeaf<kPeers>> leaves;
  for (size_t l = 0; l < call.leaves.size(); ++l) {
    const PeerLeaf& from = call.leaves[l];
    DeviceLeaf<kPeers> leaf{
        {},           {},       from.sum,        from.main,  from.mu,        from.nu,
        from.size,    from.run, from.first_tile, from.group, from.out_dtype, from.is_received,
        from.is_shard};
    for (int k = 0; k < kPeers; ++k) {
      if constexpr (kWork != PeerWork::kStepOnSums) leaf.grad[k] = arrays.grads[l * kPeers + k];
      if constexpr (kWork != PeerWork::kSum) leaf.out[k] = arrays.outs[l * kPeers + k];
    }
    leaves.push_back(leaf);
  }
  constexpr int capacity = kPeerTable<kPeers>;
  return ForEachTable<DeviceLeaf<kPeers>, capacity, capacity>(
      leaves, kNormTile, [&](const auto& table, uint32_t tiles) {
        PeerKernel<kPeers, kWork, Types><<<tiles, kThreads, 0, stream>>>(table, step);
        return cudaGetLastError();
      });
}

// The first of `Types` that fits; otherwise arguments of the launch.
template <int kPeers, PeerWork kWork, typename... Types>
cudaError_t LaunchTypes(const PeerCall& call, const PeerArrays& arrays, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  const bool is_fixed = ((Types::Fits(call) &&
                          ((error = Launch<kPeers, kWork, Types>(call, arrays, stream)), true)) ||
                         ...);
  return is_fixed ? error : Launch<kPeers, kWork, AnyTypes>(call, arrays, stream);
}

// A sum writes no parameters, and a step on sums reads no gradients: one type each is enough.
template <int kPeers>
cudaError_t LaunchWork(const PeerCall& call, const PeerArrays& arrays, cudaStream_t stream) {
  using BB = FixedTypes<Dtype::kBfloat16, Dtype::kBfloat16>;
  using FB = FixedTypes<Dtype::kFloat32, Dtype::kBfloat16>;
  using FF = FixedTypes<Dtype::kFloat32, Dtype::kFloat32>;
  switch (call.work) {
    case PeerWork::kSum:
      return LaunchTypes<kPeers, PeerWork::kSum, BB, FF>(call, arrays, stream);
    case PeerWork::kStep:
      return LaunchTypes<kPeers, PeerWork::kStep, BB, FB, FF>(call, arrays, stream);
    case PeerWork::kStepOnSums:
      return LaunchTypes<kPeers, PeerWork::kStepOnSums, BB, FF>(call, arrays, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t PeerCuda(const PeerCall& call, const PeerArrays& arrays, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(call.coefficients) % alignof(Row) != 0)
    return cudaErrorMisalignedAddress;
  cudaError_t error = cudaErrorInvalidValue;
  if (arrays.count == 2) error = LaunchWork<2>(call, arrays, stream);
  if (arrays.count == 4) error = LaunchWork<4>(call, arrays, stream);
  if (arrays.count == 8) error = LaunchWork<8>(call, arrays, stream);
  if (error != cudaSuccess || call.work == PeerWork::kStepOnSums) return error;
  return NormCuda({call.tiles, call.num_tiles, call.sum_of_squares, call.norm_found_inf}, stream);
}

}  // namespace jdistadam
