// The step with coded moments or stochastic rounding on a CUDA device: one launch for many leaves.
//
// threads   A warp takes blocks of 128 elements, so only its threads search for the largest one:
//           two blocks at a time with quantized_chunk.cuh, or one with quantized_part.cuh.
// tiles     Up to 32 chunks of two blocks per warp: with one chunk a step of a billion parameters
//           takes 1.4 times as long, because each tile must be found first. The chunks of a tile
//           are far apart, but chunks that are stepped at the same time are close: contiguous tiles
//           take 1.15 times as long.
// traffic   Each array once: 10.1 bytes per parameter for bfloat16 gradients and parameters (two
//           accesses) and 8-bit moments.
// variants  variants.cuh; in Fixed the rounding is a constant too, and Any has no chunks.

#include <algorithm>

#include "kernels_cuda.h"
#include "quantized_chunk.cuh"
#include "variants.cuh"

namespace jdistadam {
namespace {

constexpr int kSmallQuantized = 30, kLargeQuantized = 250;
static_assert(sizeof(LeafTable<QuantizedLeaf, kSmallQuantized>) + sizeof(Step) <= 4096);
static_assert(sizeof(LeafTable<QuantizedLeaf, kLargeQuantized>) + sizeof(Step) <=
              kMaxParameterBytes);

// Steps the chunks of a warp in a tile with set bits, block by block.
template <typename Types, typename... Sums>
__device__ __forceinline__ void StepBlocks(const Types& t, const Step& step,
                                           const QuantizedLeaf& leaf, size_t mine, size_t stride,
                                           uint32_t chunks, const Sums&... runs) {
  for (; chunks != 0; mine += stride, chunks >>= 1) {
#pragma unroll 1
    for (uint32_t block = 0; chunks % 2 != 0 && block < kChunk; block += kBlockSize) {
      const Part part = PartOf(t, leaf, mine + block);
      if (part.i - threadIdx.x % 32 * kVector >= leaf.size) return;
      if (*step.found_inf) {
        (MeasureSkipped(t, step, leaf, part, runs), ...);
        SkipPart(step, leaf, part);
      } else if (Types::IsStochastic(step)) {
        StepPart<Types, true>(t, step, leaf, part, runs...);
      } else {
        StepPart<Types, false>(t, step, leaf, part, runs...);
      }
    }
  }
}

// Each block of threads takes one tile of one leaf, each warp a chunk of it at a time. Tiles take
// turns, chunk by chunk, so memory accesses in flight are close together.
template <typename Types, int kCapacity>
__global__ void __launch_bounds__(kThreads, Types::kMinBlocks)
    QuantizedKernel(const __grid_constant__ LeafTable<QuantizedLeaf, kCapacity> table,
                    const __grid_constant__ Step step) {
  const TileIndex index = FindTile(table, blockIdx.x);
  const QuantizedLeaf& leaf = table.leaves[index.leaf];
  const uint32_t tiles = table.end[index.leaf] - (blockIdx.x - index.tile);
  const Types t(step);
  constexpr uint32_t together = kWarps * kChunk;  // elements
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t stride = size_t{tiles} * together;
  const size_t first = size_t{index.tile} * together + warp * kChunk;  // of this warp
  const size_t mine = first + lane * kVector;
  if constexpr (Types::kHasChunks) {
    using S = Stage<Types>;
    __shared__ __align__(16) char stages[kWarps * kStages * S::kSize];
    constexpr bool is_stochastic = Types::IsStochastic(step);
    const Tile tile = TileOf<Types>(step, leaf, first + lane * kWide);
    if (tile.is_ordinary && !*step.found_inf) {
      const uint32_t start = static_cast<uint32_t>(first) + lane * kWide;
      const uint32_t ahead = static_cast<uint32_t>(stride);
      const uint32_t slot = static_cast<uint32_t>(__cvta_generic_to_shared(stages)) +
                            warp * kStages * S::kSize + lane * kSlot;
      const uint32_t left =
          !is_stochastic || tile.is_run
              ? StepChunks<Types, is_stochastic, true>(t, step, leaf, tile, start, ahead, slot)
              : StepChunks<Types, is_stochastic, false>(t, step, leaf, tile, start, ahead, slot);
      return StepBlocks(t, step, leaf, mine, stride, left);
    }
  }
  StepBlocks(t, step, leaf, mine, stride, 0xffffffffu);
}

// A leaf and its runs (squares.h), and the arguments of a launch with sums of squares.
struct MeasuredLeaf : QuantizedLeaf {
  Runs runs;
};
struct MeasuringStep : Step {
  float* partials;
  size_t num_runs;
};
constexpr int kSmallMeasured = 24, kLargeMeasured = 200;
static_assert(sizeof(LeafTable<MeasuredLeaf, kSmallMeasured>) + sizeof(MeasuringStep) <= 4096);
static_assert(sizeof(LeafTable<MeasuredLeaf, kLargeMeasured>) + sizeof(MeasuringStep) <=
              kMaxParameterBytes);

// The same with sums of squares, without chunks. A block of elements is a run.
template <typename Types, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    MeasuringKernel(const __grid_constant__ LeafTable<MeasuredLeaf, kCapacity> table,
                    const __grid_constant__ MeasuringStep step) {
  static_assert(kBlockSize == kRun);
  const TileIndex index = FindTile(table, blockIdx.x);
  const MeasuredLeaf& leaf = table.leaves[index.leaf];
  const uint32_t tiles = table.end[index.leaf] - (blockIdx.x - index.tile);
  constexpr uint32_t together = kWarps * kChunk;  // elements
  const size_t mine =
      size_t{index.tile} * together + threadIdx.x / 32 * kChunk + threadIdx.x % 32 * kVector;
  const RunsOfLeaf runs{step.partials + leaf.runs.first, step.num_runs, leaf.runs.is_fine};
  StepBlocks(Types(step), step, leaf, mine, size_t{tiles} * together, 0xffffffffu, runs);
}

// Chunks per tile: as many as leave every multiprocessor some tiles.
uint32_t RoundsOf(const QuantizedCall& call) {
  size_t size = 0;
  for (const QuantizedLeaf& leaf : call.leaves) size += leaf.size;
  return static_cast<uint32_t>(std::clamp<size_t>(size >> 21, 1, kMaxRounds));
}

Step StepOf(const QuantizedCall& call) {
  const AdamCall& adam = call.adam;
  return {adam.mode,          (adam.flags & kNesterov) != 0,
          call.is_stochastic, (adam.flags & kCautious) != 0,
          adam.dtypes,        RoundsOf(call),
          adam.coefficients,  adam.inv_scale,
          adam.found_inf,     call.key,
          call.count,         call.parts};
}

template <typename Types>
cudaError_t Launch(List<Types>, const QuantizedCall& call, cudaStream_t stream) {
  const Step step = StepOf(call);
  return ForEachTable<QuantizedLeaf, kSmallQuantized, kLargeQuantized>(
      call.leaves, size_t{step.rounds} * kWarps * kChunk, [&](const auto& table, uint32_t tiles) {
        QuantizedKernel<Types><<<tiles, kThreads, 0, stream>>>(table, step);
      });
}

template <typename Types>
cudaError_t LaunchMeasuring(List<Types>, const QuantizedCall& call, cudaStream_t stream) {
  const SquaresCall& squares = call.adam.squares;
  const MeasuringStep step{StepOf(call), squares.partials, squares.num_runs};
  std::vector<MeasuredLeaf> leaves;
  for (size_t i = 0; i < call.leaves.size(); ++i)
    leaves.push_back({call.leaves[i], squares.runs[i]});
  const cudaError_t error = ForEachTable<MeasuredLeaf, kSmallMeasured, kLargeMeasured>(
      leaves, size_t{step.rounds} * kWarps * kChunk, [&](const auto& table, uint32_t tiles) {
        MeasuringKernel<Types><<<tiles, kThreads, 0, stream>>>(table, step);
      });
  return error != cudaSuccess ? error : SumSegmentsCuda(squares, stream);
}

template <Mode kMode>
struct Any : AnyTypes<kMode> {
  using AnyTypes<kMode>::AnyTypes;
  static constexpr bool kHasChunks = false;
  static constexpr int kMinBlocks = 1;
  __device__ static bool IsStochastic(const Step& step) { return step.is_stochastic; }
  static bool Fits(const QuantizedCall& call) { return AnyTypes<kMode>::Fits(call.adam); }
};

template <Mode kMode, bool kIsRandom, Dtype kGrad, Dtype kParam, Dtype kMu, Dtype kNu, Dtype kOut>
struct Fixed : FixedTypes<kMode, kGrad, kParam, kMu, kNu, kOut> {
  using Base = FixedTypes<kMode, kGrad, kParam, kMu, kNu, kOut>;
  using Base::Base;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // has no asynchronous copies
  static constexpr bool kHasChunks = false;
#else
  static constexpr bool kHasChunks = true;
#endif
  // Four blocks at once: 128 registers per thread. With five blocks some are spilled, which costs
  // more than a fifth block gains.
  static constexpr int kMinBlocks = 4;
  __device__ static constexpr bool IsStochastic(const Step&) { return kIsRandom; }
  static bool Fits(const QuantizedCall& call) {
    return Base::Fits(call.adam) && call.is_stochastic == kIsRandom;
  }
};

constexpr Dtype F = Dtype::kFloat32, B = Dtype::kBfloat16, U = Dtype::kUint16, E = Dtype::kBlock8,
                S = Dtype::kBlock16;

// Dtypes are in the order grad, param, mu, nu, out; Mode::kStep has no out.
using Variants = List<
    Fixed<Mode::kStep, true, B, B, E, E, F>, Fixed<Mode::kStep, true, F, B, E, E, F>,
    Fixed<Mode::kStep, true, B, B, S, S, F>, Fixed<Mode::kStep, true, F, B, S, S, F>,
    Fixed<Mode::kStep, true, B, B, B, B, F>, Fixed<Mode::kStep, true, F, B, B, B, F>,
    Fixed<Mode::kStep, true, F, F, E, E, F>, Fixed<Mode::kStep, false, F, F, E, E, F>,
    Fixed<Mode::kStep, true, B, F, E, E, F>, Fixed<Mode::kStep, false, B, F, E, E, F>,
    Fixed<Mode::kStepSplit, true, B, B, E, E, U>, Fixed<Mode::kStepSplit, true, F, B, E, E, U>,
    Fixed<Mode::kStepSplit, true, B, B, S, S, U>, Fixed<Mode::kStepSplit, true, F, B, S, S, U>,
    Fixed<Mode::kStepSplit, false, B, B, E, E, U>, Fixed<Mode::kStepSplit, false, F, B, E, E, U>,
    Fixed<Mode::kStepSplit, false, B, B, S, S, U>, Fixed<Mode::kStepSplit, false, F, B, S, S, U>,
    Fixed<Mode::kStepAndCast, true, B, F, E, E, B>, Fixed<Mode::kStepAndCast, true, F, F, E, E, B>,
    Fixed<Mode::kStepAndCast, false, B, F, E, E, B>,
    Fixed<Mode::kStepAndCast, false, F, F, E, E, B>, Any<Mode::kStep>, Any<Mode::kStepAndCast>,
    Any<Mode::kUpdate>, Any<Mode::kStepSplit>>;
// With sums of squares.
using Measuring = List<Any<Mode::kStep>, Any<Mode::kStepAndCast>, Any<Mode::kStepSplit>>;

}  // namespace

cudaError_t QuantizedCuda(const QuantizedCall& call, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(call.adam.coefficients) % alignof(Row) != 0)
    return cudaErrorMisalignedAddress;
  if (call.adam.squares.partials != nullptr) {
    return LaunchFirst(Measuring{}, call,
                       [&](auto variant) { return LaunchMeasuring(variant, call, stream); });
  }
  return LaunchFirst(Variants{}, call, [&](auto variant) { return Launch(variant, call, stream); });
}

}  // namespace jdistadam
