// A warp's step of two blocks of 128 elements, eight of them in each thread: most of all that there
// is to do. The kernel is bound by the instructions that it issues about as much as by memory, so
// that what is the same for a whole tile is computed once, divisions and roots have no special
// cases, and codes are rounded two in a word (compact_codes.cuh): numbers for which there would
// have to be special cases are left to compact_part.cuh. The results are the same bits.
#pragma once

#include "compact_stage.cuh"

namespace jdistadam {
namespace {

constexpr int kChunkBlocks = 2, kChunk = kChunkBlocks * kBlockSize;
constexpr size_t kMaxChunked = size_t{1} << 31;  // elements of a leaf, whose indices have 32 bits
constexpr uint32_t kWarps = kThreads / 32, kMaxRounds = 32;  // chunks are bits
constexpr float kLargestRate = 256.0f;  // with which no parameter becomes NaN, see AreModest
static_assert(kChunk == 32 * kWide);

// ---- A tile ----

// What is the same for all chunks of a tile.
struct Tile {
  Coefficients c;
  OrdinaryArithmetic by;
  float inv_scale;
  bool is_ordinary;  // else no chunk is
  bool is_run;       // the leaf's elements follow each other in the whole one, from a vector on
  uint32_t id, count, key0, key1, group_high;
  uint32_t group;  // of this thread's first element: its index / 4, of which group_high is more
};

template <typename Types>
__device__ __forceinline__ bool IsWideAligned(const CompactLeaf& leaf) {
  const auto is_aligned = [](const void* array, Dtype dtype) {
    return dtype == Dtype::kBlock8 ? reinterpret_cast<uintptr_t>(array) % kWide == 0
                                   : IsAligned<kWide>(array, dtype);
  };
  return is_aligned(leaf.grad, Types::grad) && is_aligned(leaf.param, Types::param) &&
         is_aligned(leaf.mu, Types::mu) && is_aligned(leaf.nu, Types::nu) &&
         (Types::kMode == Mode::kStep || is_aligned(leaf.out, Types::out));
}

template <typename Types>
__device__ __forceinline__ Tile TileOf(const Step& step, const CompactLeaf& leaf, size_t mine) {
  Tile tile;
  tile.c = LoadCoefficients(step, leaf);
  const Coefficients& c = tile.c;
  tile.inv_scale = *step.inv_scale;
  const auto is_between = [](float x, float low, float high) { return x >= low && x <= high; };
  // With a b1 that is finite, mu is NaN only where nu is, which Encode (compact_codes.cuh) needs.
  tile.is_ordinary =
      !step.nesterov && c.l2 == 0.0f && fabsf(c.b1) <= 1.0f && fabsf(c.one_minus_b1) <= 2.0f &&
      is_between(c.c1, kSmallestC, 1.0f) && is_between(c.c2, kSmallestC, 1.0f) &&
      is_between(c.eps, kSmallestEps, kLargestEps) && c.eps_root == 0.0f &&
      fabsf(c.learning_rate) <= kLargestRate && fabsf(c.weight_decay) <= kLargestRate &&
      IsWideAligned<Types>(leaf) && leaf.size < kMaxChunked;
  tile.by = {1.0f / c.c1, 1.0f / c.c2};
  if (!Types::IsRandom(step)) return tile;
  tile.count = static_cast<uint32_t>(*step.count);
  tile.key0 = step.key[0];
  tile.key1 = step.key[1];
  if (leaf.table != nullptr) {
    tile.is_run = false;
    return tile;
  }
  const Origin first = OriginOf(step.parts, leaf, 0);
  const Origin last = OriginOf(step.parts, leaf, leaf.size - 1);
  tile.id = first.id;
  tile.group = static_cast<uint32_t>((first.index + mine) / kVector);
  tile.group_high = static_cast<uint32_t>(first.index / kVector >> 32);
  tile.is_run = last.index - first.index == leaf.size - 1 && first.index % kVector == 0 &&
                last.index / kVector >> 32 == tile.group_high;
  return tile;
}

// ---- A chunk ----

// A thread's elements as numbers.
struct Widened {
  Floats g, p, m, v;
  float m_factor, v_factor;  // by which m and v are yet to be multiplied, powers of two
  bool is_ordinary;
};

// Returns the factor.
template <Moment kMoment>
__device__ __forceinline__ float WidenStored(Dtype dtype, const Packed<kWide>& packed, float scale,
                                             Floats& x) {
  if (dtype == Dtype::kBlock8) {
    using C = Code<kMoment, Dtype::kBlock8>;
    WidenCodes<C>(packed, x);
    return scale * CodeUp<C>();
  }
  if (dtype == Dtype::kBlock16) {
    using C = Code<kMoment, Dtype::kBlock16>;
    WidenCodes<C>(packed, x);
    return scale * CodeUp<C>();
  }
  Widen(packed, dtype, x);
  return 1.0f;
}

template <typename Types>
__device__ __forceinline__ Widened WidenAll(const Types& t, const Loaded& x) {
  Widened y;
  Widen(x.grad, t.grad, y.g);
  if (Types::kMode == Mode::kStepSplit) {
    JoinVectors(x.param, x.low, y.p);
  } else {
    Widen(x.param, t.param, y.p);
  }
  y.m_factor = WidenStored<Moment::kMu>(t.mu, x.mu, x.mu_scale, y.m);
  y.v_factor = WidenStored<Moment::kNu>(t.nu, x.nu, x.nu_scale, y.v);
  y.is_ordinary = !IsCoded(t.mu) || BitsOf(x.mu_scale) < kLargestMu;
  if (Types::kMode == Mode::kStep && t.param != Dtype::kFloat32)
    y.is_ordinary &= AreModest(x.param);
  return y;
}

// A thread's results as they are stored.
struct Stepped {
  Bits param, out;
  Stored moments;
};

template <typename Types>
__device__ __forceinline__ void PackParams(const Types& t, const Floats& p, const Bits& drawn,
                                           Stepped* y) {
  if (Types::kMode == Mode::kStepSplit) return SplitPairs(p, y->param, y->out);
  if (t.param != Dtype::kFloat32) return RoundParams(p, drawn, y->param);
  Floats canonical;
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    y->param[k] = CanonicalBits(p[k]);
    canonical[k] = FloatOf(y->param[k]);
  }
  if (Types::kMode == Mode::kStepAndCast) RoundToHalves<false>(canonical, drawn, y->out);
}

template <typename Types, bool kRandom>
__device__ __forceinline__ Stepped StepWidened(const Types& t, const Tile& tile, Widened& x,
                                               const Bits& drawn) {
  static_assert(kRandom || Types::kMode != Mode::kStep || Types::param == Dtype::kFloat32);
  static_assert(!Types::kMayBeCautious);
  Stepped y;
  Coefficients c = tile.c;
  c.b1 *= x.m_factor;  // a power of two may as well be here: the same bits
  c.b2 *= x.v_factor;
  const Terms terms{false, c.weight_decay != 0.0f, false, false};
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    const float u = AdamUpdate(c, terms, x.g[k] * tile.inv_scale, x.p[k], x.m[k], x.v[k], tile.by);
    x.p[k] = x.p[k] - u;
  }
  PackParams(t, x.p, drawn, &y);
  Bits mu_random, nu_random;
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    mu_random[k] = WordForMu(drawn[k]);
    nu_random[k] = WordForNu(drawn[k]);
  }
  Stored& moments = y.moments;
  moments.is_ordinary = x.is_ordinary;
  if (IsCoded(t.mu)) {
    constexpr Dtype coded = IsCoded(Types::mu) ? Types::mu : Dtype::kBlock8;
    Encode<coded, kRandom>(x.m, x.v, mu_random, nu_random, &moments);
  } else {
    PackMoment<Moment::kMu, kRandom>(t.mu, x.m, mu_random, moments.mu, &moments.is_ordinary);
    PackMoment<Moment::kNu, kRandom>(t.nu, x.v, nu_random, moments.nu, &moments.is_ordinary);
  }
  return y;
}

__device__ __forceinline__ void StoreWide(char* to, Dtype dtype, const Bits& words) {
  if (dtype == Dtype::kBlock8) {
    *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
    return;
  }
#pragma unroll
  for (int k = 0; k < (dtype == Dtype::kFloat32 ? kWide : kWide / 2); k += 4)
    reinterpret_cast<uint4*>(to)[k / 4] = uint4{words[k], words[k + 1], words[k + 2], words[k + 3]};
}

template <typename Types>
__device__ __forceinline__ void Store(const Types& t, const Arrays& to, uint32_t i,
                                      const Stepped& x) {
  StoreWide(ElementAt(to.mu, t.mu, i), t.mu, x.moments.mu);
  StoreWide(ElementAt(to.nu, t.nu, i), t.nu, x.moments.nu);
  if (IsCoded(t.mu) && i % kBlockSize == 0) {
    *reinterpret_cast<float*>(ScaleAt(to.mu_scales, i)) = x.moments.mu_scale;
    *reinterpret_cast<float*>(ScaleAt(to.nu_scales, i)) = x.moments.nu_scale;
  }
  StoreWide(ElementAt(to.param, t.param, i), t.param, x.param);
  if (Types::kMode != Mode::kStep) StoreWide(ElementAt(to.out, t.out, i), t.out, x.out);
}

// The random words of a thread's elements.
template <bool kIsRun>
__device__ __forceinline__ void DrawWide(const Step& step, const CompactLeaf& leaf,
                                         const Tile& tile, uint32_t i, uint32_t group, Bits& y) {
#pragma unroll
  for (int k = 0; k < kWide; k += kVector) {
    const uint64_t index = uint64_t{tile.group_high} << 32 | (group + k / kVector);
    const Random4 four =
        kIsRun ? Philox(tile.key0, tile.key1, index, tile.id, tile.count) : Draw(step, leaf, i + k);
#pragma unroll
    for (int j = 0; j < kVector; ++j) y[k + j] = four.words[j];
  }
}

// Steps the whole chunks of a tile that this warp takes, and returns which are left, as bits: those
// in which something is out of the ordinary, and one that is not whole. `mine` is this thread's
// first element, `stride` is from one chunk to the next, and `slot` is the thread's in its warp's
// first stage.
template <typename Types, bool kRandom, bool kIsRun>
__device__ __forceinline__ uint32_t StepChunks(const Types& t, const Step& step,
                                               const CompactLeaf& leaf, const Tile& tile,
                                               uint32_t mine, uint32_t stride, uint32_t slot) {
  static_assert(Types::kMode != Mode::kUpdate);
  constexpr uint32_t ahead = kStages - 1, size = Stage<Types>::kSize;
  const uint32_t whole = static_cast<uint32_t>(leaf.size) / kChunk * kChunk;
  const uint32_t last_slot = slot + ahead * size;
  const Arrays arrays = ArraysOf<Types>(leaf);
  uint32_t left = 0, chunk = 1, group = tile.group;
  uint32_t free_slot = last_slot;  // whose chunk has been stepped
  const auto begin_copy = [&](uint32_t i, uint32_t to) {
    if (i < whole) BeginCopy<Types>(arrays, i, to);
    EndCopies();
  };
#pragma unroll
  for (uint32_t k = 0; k < ahead; ++k) begin_copy(mine + k * stride, slot + k * size);
#pragma unroll 1
  for (uint32_t i = mine; i < whole; i += stride) {
    AwaitCopies<ahead - 1>();
    Widened widened = WidenAll(t, LoadStage<Types>(slot));
    begin_copy(i + ahead * stride, free_slot);
    free_slot = slot;
    slot = slot == last_slot ? last_slot - ahead * size : slot + size;
    Bits drawn = {};
    if (kRandom) DrawWide<kIsRun>(step, leaf, tile, i, group, drawn);
    const Stepped stepped = StepWidened<Types, kRandom>(t, tile, widened, drawn);
    if (__all_sync(kAllLanes, stepped.moments.is_ordinary)) {
      Store(t, arrays, i, stepped);
    } else {
      left |= chunk;
    }
    chunk <<= 1;
    group += stride / kVector;
  }
  return left | ~(chunk - 1);
}

}  // namespace
}  // namespace jdistadam
