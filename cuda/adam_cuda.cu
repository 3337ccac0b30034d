// Adam on a CUDA device: one launch for many leaves (leaf_table.cuh).
//
// threads   One vector per thread, no loop, small blocks: these reach the speed of a copy on an
//           H200. Two vectors per thread are 7 % slower, blocks of 256 up to 5 % on 16-bit dtypes.
// indices   size_t: leaves over 2^31 elements exist.
// traffic   each array once, e.g. 28 bytes per parameter for float32 grad, param, mu and nu.
// aliasing  only one thread reads and writes an element of param, mu and nu; grad and out overlap
//           nothing (in Mode::kStepSplit out is like param).
//
// Start reading at AdamKernel: a thread finds its leaf and its elements, then takes StepVector, or
// StepOne if a vector does not fit. Both do the same: load, widen to float32, AdamUpdate
// (adam_math.h), round, store.
//
// Its variants (variants.cuh) are listed at the end of this file. Common has those that training
// uses; there a thread takes 16 bytes of the widest array. Others has one Any per mode for all
// other calls.
//
// To add a variant, add a Fixed to Common (ForMoments: for mu and nu in their usual dtypes). It
// costs no time on the device for calls of other variants, but adds one kernel to the compiled
// module per architecture and per capacity of a leaf table. tests/kernels/test_adam.py compares
// both kinds with the reference.

#include "adam_math.h"
#include "coefficients.cuh"
#include "kernels_cuda.h"
#include "leaf_table.cuh"
#include "squares.cuh"
#include "variants.cuh"
#include "vector.cuh"

namespace jdistadam {
namespace {

constexpr int kThreads = 128;

// The arguments of a launch other than its leaves.
struct Step {
  Mode mode;
  bool nesterov, cautious;
  Dtypes dtypes;
  const float* coefficients;
  const float* inv_scale;
  const bool* found_inf;
};
static_assert(sizeof(LeafTable<Leaf, kSmallTable>) + sizeof(Step) <= 4096);
static_assert(sizeof(LeafTable<Leaf, kLargeTable>) + sizeof(Step) <= kMaxParameterBytes);

// One element: the tail of a leaf, every element of a misaligned leaf, a vector with a NaN, and all
// elements of a skipped step that writes `out` or is measured. Kernels with sums of squares pass
// `squares`, here and below; others pass nothing.
template <bool kMayBeCautious, typename... Sums>
__device__ __noinline__ void StepOne(const Step& step, const Leaf& leaf, size_t i,
                                     Sums*... squares) {
  const Dtypes& t = step.dtypes;
  const bool split = step.mode == Mode::kStepSplit;
  uint16_t* high = static_cast<uint16_t*>(leaf.param) + i;
  uint16_t* low = static_cast<uint16_t*>(leaf.out) + i;
  const float p = split ? Join(*high, *low) : LoadOne(leaf.param, t.param, i);
  if (*step.found_inf) {  // the unchanged parameter in out's dtype, or an update of zero
    if (step.mode == Mode::kStepAndCast) StoreOne(leaf.out, t.out, i, p);
    if (step.mode == Mode::kUpdate) StoreOne(leaf.out, t.out, i, 0.0f);
    ((*squares = SquaresOf(LoadOne(leaf.grad, t.grad, i) * *step.inv_scale, p, 0.0f)), ...);
    return;
  }
  const Coefficients c = reinterpret_cast<const Coefficients*>(step.coefficients)[leaf.group];
  const float g = LoadOne(leaf.grad, t.grad, i) * *step.inv_scale;
  float m = LoadOne(leaf.mu, t.mu, i), v = LoadOne(leaf.nu, t.nu, i);
  const Terms terms = TermsOf(c, step.nesterov, kMayBeCautious && step.cautious);
  const float u = AdamUpdate(c, terms, g, p, m, v);
  ((*squares = SquaresOf(g, p - u, u)), ...);
  const float result = step.mode == Mode::kUpdate ? -u : p - u;
  StoreOne(leaf.mu, t.mu, i, m);
  StoreOne(leaf.nu, t.nu, i, v);
  if (split) {
    const Halves halves = Split(result);
    *high = halves.high;
    *low = halves.low;
    return;
  }
  if (step.mode != Mode::kUpdate) StoreOne(leaf.param, t.param, i, result);
  if (step.mode != Mode::kStep) StoreOne(leaf.out, t.out, i, result);
}

// The first `count` elements of a thread, one by one, with their squares.
template <typename Types>
__device__ __forceinline__ void MeasureEach(const Step& step, const Leaf& leaf, size_t i, int count,
                                            ThreadSquares<Types::kVector>* squares) {
#pragma unroll  // no index of an array that is not known: it stays in registers
  for (int k = 0; k < Types::kVector; ++k) {
    if (k >= count) break;
    Squares one;
    StepOne<Types::kMayBeCautious>(step, leaf, i + k, &one);
    squares->Set(k, one);
  }
}

// A whole vector. A NaN in mu or nu is also in the result, so only the result is tested.
template <typename Types, typename... Sums>
__device__ __forceinline__ void StepVector(const Types& t, const Step& step, const Leaf& leaf,
                                           size_t i, Sums*... squares) {
  constexpr int n = Types::kVector;
  constexpr Mode mode = Types::kMode;
  const auto packed_p = LoadVector<n>(leaf.param, t.param, i);
  const auto packed_m = LoadVector<n>(leaf.mu, t.mu, i), packed_v = LoadVector<n>(leaf.nu, t.nu, i);
  Packed<n> packed_low;
  if (mode == Mode::kStepSplit) packed_low = LoadVector<n>(leaf.out, Dtype::kUint16, i);
  float g[n], p[n], m[n], v[n];
  Widen(LoadVector<n>(leaf.grad, t.grad, i), t.grad, g);
  const Coefficients c = reinterpret_cast<const Row*>(step.coefficients)[leaf.group].coefficients;
  const float inv_scale = *step.inv_scale;
  bool special = *step.found_inf;
  if (mode == Mode::kStepSplit) {
    JoinVectors(packed_p, packed_low, p);
  } else {
    Widen(packed_p, t.param, p);
  }
  Widen(packed_m, t.mu, m);
  Widen(packed_v, t.nu, v);
  const Terms terms = TermsOf(c, step.nesterov, Types::kMayBeCautious && step.cautious);
#pragma unroll
  for (int k = 0; k < n; ++k) {
    const float u = AdamUpdate(c, terms, g[k] * inv_scale, p[k], m[k], v[k]);
    (squares->Set(k, SquaresOf(g[k] * inv_scale, p[k] - u, u)), ...);
    p[k] = mode == Mode::kUpdate ? -u : p[k] - u;
    special |= p[k] != p[k];
  }
  if (special) {
    if constexpr (sizeof...(Sums) > 0) {
      MeasureEach<Types>(step, leaf, i, n, squares...);
    } else {
      for (int k = 0; k < n; ++k) StepOne<Types::kMayBeCautious>(step, leaf, i + k);
    }
    return;
  }
  StoreVector(leaf.mu, t.mu, i, m);
  StoreVector(leaf.nu, t.nu, i, v);
  if (mode == Mode::kStepSplit) {
    StoreHalves(leaf.param, leaf.out, i, p);
    return;
  }
  if (mode != Mode::kUpdate) StoreVector(leaf.param, t.param, i, p);
  if (mode != Mode::kStep) StoreVector(leaf.out, t.out, i, p);
}

// Whether all arrays of a leaf can be read and written as vectors.
template <typename Types>
__device__ __forceinline__ bool IsAligned(const Types& t, const Leaf& leaf) {
  constexpr int n = Types::kVector;
  return IsAligned<n>(leaf.grad, t.grad) && IsAligned<n>(leaf.param, t.param) &&
         IsAligned<n>(leaf.mu, t.mu) && IsAligned<n>(leaf.nu, t.nu) &&
         (Types::kMode == Mode::kStep || IsAligned<n>(leaf.out, t.out));
}

// Each block takes one tile of one leaf, each thread one vector of the tile.
template <typename Types, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    AdamKernel(const __grid_constant__ LeafTable<Leaf, kCapacity> table,
               const __grid_constant__ Step step) {
  constexpr int n = Types::kVector;
  const TileIndex index = FindTile(table, blockIdx.x);
  const Leaf& leaf = table.leaves[index.leaf];
  const size_t i = (size_t{index.tile} * kThreads + threadIdx.x) * n;
  if (i >= leaf.size) return;
  const size_t left = leaf.size - i;
  const Types t(step);
  // A skipped step in place reads nothing: most calls of MultiSteps are such.
  const bool is_skipped = *step.found_inf;
  if (is_skipped && (Types::kMode == Mode::kStep || Types::kMode == Mode::kStepSplit)) return;
  if (left >= n && !is_skipped && IsAligned(t, leaf)) {
    StepVector(t, step, leaf, i);
  } else {
    for (int k = 0; k < n && k < left; ++k) StepOne<Types::kMayBeCautious>(step, leaf, i + k);
  }
}

// A leaf and its runs (squares.h), and the arguments of a launch with sums of squares.
struct MeasuredLeaf : Leaf {
  Runs runs;
};
struct MeasuringStep : Step {
  float* partials;
  size_t num_runs;
};
constexpr int kSmallMeasured = 45, kLargeMeasured = 400;
static_assert(sizeof(LeafTable<MeasuredLeaf, kSmallMeasured>) + sizeof(MeasuringStep) <= 4096);
static_assert(sizeof(LeafTable<MeasuredLeaf, kLargeMeasured>) + sizeof(MeasuringStep) <=
              kMaxParameterBytes);

// The same with sums of squares. A warp has a run. Eight blocks at a time leave 64 registers.
template <typename Types, int kCapacity>
__global__ void __launch_bounds__(kThreads, 8)
    MeasuringKernel(const __grid_constant__ LeafTable<MeasuredLeaf, kCapacity> table,
                    const __grid_constant__ MeasuringStep step) {
  constexpr int n = Types::kVector;
  const TileIndex index = FindTile(table, blockIdx.x);
  const MeasuredLeaf& leaf = table.leaves[index.leaf];
  const size_t i = (size_t{index.tile} * kThreads + threadIdx.x) * n;
  const size_t left = i < leaf.size ? leaf.size - i : 0;
  const int mine = left < n ? static_cast<int>(left) : n;
  const Types t(step);
  ThreadSquares<n> squares;
  if (mine == n && IsAligned(t, leaf)) {
    StepVector(t, step, leaf, i, &squares);
  } else {
    MeasureEach<Types>(step, leaf, i, mine, &squares);
  }
  const Runs& runs = leaf.runs;
  StoreRuns({step.partials + runs.first, step.num_runs, runs.is_fine}, i, mine, squares);
}

Step StepOf(const AdamCall& call) {
  return {call.mode,
          (call.flags & kNesterov) != 0,
          (call.flags & kCautious) != 0,
          call.dtypes,
          call.coefficients,
          call.inv_scale,
          call.found_inf};
}

// Launches one variant for all leaves of a call, in as few launches as the tables allow.
template <typename Types>
cudaError_t Launch(List<Types>, const AdamCall& call, cudaStream_t stream) {
  const Step step = StepOf(call);
  return ForEachTable<Leaf>(call.leaves, size_t{kThreads} * Types::kVector,
                            [&](const auto& table, uint32_t tiles) {
                              AdamKernel<Types><<<tiles, kThreads, 0, stream>>>(table, step);
                            });
}

template <typename Types>
cudaError_t LaunchMeasuring(List<Types>, const AdamCall& call, cudaStream_t stream) {
  const SquaresCall& squares = call.squares;
  const MeasuringStep step{StepOf(call), squares.partials, squares.num_runs};
  std::vector<MeasuredLeaf> leaves;
  for (size_t i = 0; i < call.leaves.size(); ++i)
    leaves.push_back({call.leaves[i], squares.runs[i]});
  const cudaError_t error = ForEachTable<MeasuredLeaf, kSmallMeasured, kLargeMeasured>(
      leaves, size_t{kThreads} * Types::kVector, [&](const auto& table, uint32_t tiles) {
        MeasuringKernel<Types><<<tiles, kThreads, 0, stream>>>(table, step);
      });
  return error != cudaSuccess ? error : SumSegmentsCuda(squares, stream);
}

template <Mode kMode>
struct Any : AnyTypes<kMode> {
  using AnyTypes<kMode>::AnyTypes;
  static constexpr int kVector = 4;
};

template <Mode kMode, Dtype kGrad, Dtype kParam, Dtype kMu, Dtype kNu, Dtype kOut>
struct Fixed : FixedTypes<kMode, kGrad, kParam, kMu, kNu, kOut> {
  using FixedTypes<kMode, kGrad, kParam, kMu, kNu, kOut>::FixedTypes;
  // 16 bytes of the widest array
  static constexpr int kVector = kGrad == Dtype::kFloat32 || kParam == Dtype::kFloat32 ||
                                         kMu == Dtype::kFloat32 || kNu == Dtype::kFloat32
                                     ? 4
                                     : 8;
};

constexpr Dtype F = Dtype::kFloat32, B = Dtype::kBfloat16, H = Dtype::kFloat16, U = Dtype::kUint16;

// The three variants with any grad, param and out, and float32 mu and nu, bfloat16 mu, or both
// bfloat16.
template <Mode kMode, Dtype kGrad, Dtype kParam, Dtype kOut>
using ForMoments =
    List<Fixed<kMode, kGrad, kParam, F, F, kOut>, Fixed<kMode, kGrad, kParam, B, F, kOut>,
         Fixed<kMode, kGrad, kParam, B, B, kOut>>;

// Dtypes are in the order grad, param, (mu, nu,) out: F float32, B bfloat16, H float16, U uint16
// (remainders). Mode::kStep has no out; F takes its place.
using Common =
    Joined<ForMoments<Mode::kStep, F, F, F>, ForMoments<Mode::kStep, B, F, F>,
           ForMoments<Mode::kStep, B, B, F>, List<Fixed<Mode::kStep, H, H, F, F, F>>,
           ForMoments<Mode::kStepAndCast, B, F, B>, ForMoments<Mode::kStepAndCast, F, F, B>,
           List<Fixed<Mode::kStepAndCast, H, F, F, F, H>, Fixed<Mode::kStepAndCast, F, F, F, F, H>>,
           ForMoments<Mode::kUpdate, F, F, F>,
           List<Fixed<Mode::kUpdate, B, F, F, F, F>, Fixed<Mode::kUpdate, B, B, F, F, B>>,
           ForMoments<Mode::kStepSplit, B, B, U>, ForMoments<Mode::kStepSplit, F, B, U>>::Type;
// All other dtypes.
using Others =
    List<Any<Mode::kStep>, Any<Mode::kStepAndCast>, Any<Mode::kUpdate>, Any<Mode::kStepSplit>>;
// With sums of squares: the usual dtypes first, then all others.
using Measuring =
    List<Fixed<Mode::kStep, F, F, F, F, F>, Fixed<Mode::kStep, B, F, F, F, F>,
         Fixed<Mode::kStepAndCast, B, F, F, F, B>, Fixed<Mode::kStepAndCast, F, F, F, F, B>,
         Fixed<Mode::kStepSplit, B, B, F, F, U>, Fixed<Mode::kStepSplit, F, B, F, F, U>,
         Any<Mode::kStep>, Any<Mode::kStepAndCast>, Any<Mode::kStepSplit>>;

}  // namespace

cudaError_t AdamCuda(const AdamCall& call, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(call.coefficients) % alignof(Row) != 0)
    return cudaErrorMisalignedAddress;
  if (call.squares.partials != nullptr) {
    return LaunchFirst(Measuring{}, call,
                       [&](auto variant) { return LaunchMeasuring(variant, call, stream); });
  }
  return LaunchFirst(Joined<Common, Others>::Type{}, call,
                     [&](auto variant) { return Launch(variant, call, stream); });
}

}  // namespace jdistadam
