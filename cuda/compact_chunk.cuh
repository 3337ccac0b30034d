// A warp's step of two blocks of 128 elements, four of each in each thread: most of all that there
// is to do. The kernel is bound by the instructions that it issues, not by memory, so that what is
// the same for a whole tile is computed once, and divisions and roots have no special cases:
// numbers for which they would need them, and codes whose scale is out of the ordinary, are left to
// compact_part.cuh. The results are the same bits.
#pragma once

#include "compact_ordinary.cuh"

namespace jdistadam {
namespace {

constexpr int kChunkBlocks = 2, kChunk = kChunkBlocks * kBlockSize;
constexpr size_t kMaxChunked = size_t{1} << 31;  // elements of a leaf, whose indices have 32 bits
constexpr uint32_t kWarps = kThreads / 32, kMaxRounds = 32;  // chunks are bits

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
__device__ __forceinline__ Tile TileOf(const Types& t, const Step& step, const CompactLeaf& leaf,
                                       size_t mine) {
  Tile tile;
  tile.c = LoadCoefficients(step, leaf);
  const Coefficients& c = tile.c;
  tile.inv_scale = *step.inv_scale;
  const auto is_between = [](float x, float low, float high) { return x >= low && x <= high; };
  tile.is_ordinary = !step.nesterov && c.l2 == 0.0f && is_between(c.c1, kSmallestC, 1.0f) &&
                     is_between(c.c2, kSmallestC, 1.0f) &&
                     is_between(c.eps, kSmallestEps, kLargestEps) &&
                     is_between(c.eps_root, 0.0f, kLargestEps) && IsAligned(t, step, leaf) &&
                     leaf.size < kMaxChunked;
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

// Four elements of each array, as they are in memory.
struct Loaded {
  Packed<kVector> grad, param, mu, nu, low;
  float mu_scale, nu_scale;
};

// The array from a block of the chunk on: a constant that an instruction adds to an address.
__device__ __forceinline__ char* Ahead(const void* base, Dtype dtype, int block) {
  return static_cast<char*>(const_cast<void*>(base)) + block * kBlockSize * ItemSize(dtype);
}

__device__ __forceinline__ Packed<kVector> LoadFour(const void* base, Dtype dtype, uint32_t i,
                                                    int block) {
  const char* from = Ahead(base, dtype, block);
  if (dtype != Dtype::kBlock8) return LoadVector<kVector>(from, dtype, i);
  return {{*reinterpret_cast<const uint32_t*>(from + i)}};
}

template <typename Types>
__device__ __forceinline__ Loaded Load(const Types& t, const CompactLeaf& leaf, uint32_t i,
                                       int block) {
  Loaded x;
  x.grad = LoadFour(leaf.grad, t.grad, i, block);
  x.param = LoadFour(leaf.param, t.param, i, block);
  x.mu = LoadFour(leaf.mu, t.mu, i, block);
  x.nu = LoadFour(leaf.nu, t.nu, i, block);
  if (Types::kMode == Mode::kStepSplit) x.low = LoadFour(leaf.out, Dtype::kUint16, i, block);
  if (IsCoded(t.mu)) x.mu_scale = (leaf.mu_scales + block)[i / kBlockSize];
  if (IsCoded(t.nu)) x.nu_scale = (leaf.nu_scales + block)[i / kBlockSize];
  return x;
}

__device__ __forceinline__ void StoreFour(void* base, Dtype dtype, uint32_t i, int block,
                                          const uint32_t (&words)[kVector]) {
  char* to = Ahead(base, dtype, block) + i * ItemSize(dtype);
  if (dtype == Dtype::kBlock8) {
    *reinterpret_cast<uint32_t*>(to) = words[0];
  } else if (dtype == Dtype::kFloat32) {
    *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
  } else {
    *reinterpret_cast<uint64_t*>(to) = uint64_t{words[1]} << 32 | words[0];  // not split in two
  }
}

// A block's results, four in each thread.
struct Stepped {
  float p[kVector];
  Stored mu, nu;
};

// Returns by which number the others are yet to be multiplied, a power of two.
template <Moment kMoment>
__device__ __forceinline__ float WidenStored(Dtype dtype, const Packed<kVector>& packed,
                                             float scale, float (&x)[kVector]) {
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

template <typename Types, bool kRandom>
__device__ __forceinline__ Stepped StepLoaded(const Types& t, const Tile& tile, const Loaded& x,
                                              const Words& words) {
  float g[kVector], m[kVector], v[kVector];
  Stepped y;
  Widen(x.grad, t.grad, g);
  if (Types::kMode == Mode::kStepSplit) {
    JoinVectors(x.param, x.low, y.p);
  } else {
    Widen(x.param, t.param, y.p);
  }
  // Codes are multiplied by powers of two, which may as well be in b1 and b2: the same bits.
  Coefficients c = tile.c;
  c.b1 *= WidenStored<Moment::kMu>(t.mu, x.mu, x.mu_scale, m);
  c.b2 *= WidenStored<Moment::kNu>(t.nu, x.nu, x.nu_scale, v);
  const Terms terms{false, c.weight_decay != 0.0f, false};
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const float u = AdamUpdate(c, terms, g[k] * tile.inv_scale, y.p[k], m[k], v[k], tile.by);
    y.p[k] = y.p[k] - u;
  }
  y.mu = StoredMoment<Moment::kMu, kRandom>(t.mu, m, words.mu);
  y.nu = StoredMoment<Moment::kNu, kRandom>(t.nu, v, words.nu);
  return y;
}

template <typename Types, bool kRandom>
__device__ __forceinline__ void Store(const Types& t, const CompactLeaf& leaf, uint32_t i,
                                      int block, const Stepped& x, const Words& words) {
  constexpr Mode mode = Types::kMode;
  StoreFour(leaf.mu, t.mu, i, block, x.mu.words);
  StoreFour(leaf.nu, t.nu, i, block, x.nu.words);
  if (threadIdx.x % 32 == 0) {
    if (IsCoded(t.mu)) (leaf.mu_scales + block)[i / kBlockSize] = x.mu.scale;
    if (IsCoded(t.nu)) (leaf.nu_scales + block)[i / kBlockSize] = x.nu.scale;
  }
  if (mode == Mode::kStepSplit) {
    const float p[] = {CanonicalResult(x.p[0]), CanonicalResult(x.p[1]), CanonicalResult(x.p[2]),
                       CanonicalResult(x.p[3])};
    StoreHalves(Ahead(leaf.param, t.param, block), Ahead(leaf.out, t.out, block), i, p);
    return;
  }
  uint32_t rounded[kVector];
  RoundOrdinary<kRandom && mode == Mode::kStep>(t.param, x.p, words.param, rounded);
  StoreFour(leaf.param, t.param, i, block, rounded);
  if (mode == Mode::kStepAndCast) {
    RoundOrdinary<false>(t.out, x.p, words.param, rounded);
    StoreFour(leaf.out, t.out, i, block, rounded);
  }
}

// Steps the whole chunks of a tile that this warp takes, and returns which are left, as bits: those
// in which something is out of the ordinary, and one that is not whole. `mine` is this thread's
// first element, and `stride` is from one chunk to the next.
template <typename Types, bool kRandom, bool kIsRun>
__device__ __forceinline__ uint32_t StepChunks(const Types& t, const Step& step,
                                               const CompactLeaf& leaf, const Tile& tile,
                                               uint32_t mine, uint32_t stride) {
  static_assert(Types::kMode != Mode::kUpdate);
  constexpr int n = kChunkBlocks;
  uint32_t left = 0, chunk = 1, group = tile.group;
  const uint32_t whole = static_cast<uint32_t>(leaf.size) / kChunk * kChunk;
  Loaded next[n];
  const auto fetch = [&](uint32_t i) {
#pragma unroll
    for (int b = 0; i < whole && b < n; ++b) next[b] = Load(t, leaf, i, b);
  };
  fetch(mine);
#pragma unroll 1
  for (uint32_t i = mine; i < whole; i += stride) {
    Loaded loaded[n];
    Random4 drawn[n] = {};
    Stepped stepped[n];
    bool is_ordinary = true;
#pragma unroll
    for (int b = 0; b < n; ++b) loaded[b] = next[b];
    fetch(i + stride);  // is on its way while this chunk is stepped
#pragma unroll
    for (int b = 0; kRandom && b < n; ++b) {
      drawn[b] =
          kIsRun ? Philox(tile.key0, tile.key1, uint64_t{tile.group_high} << 32 | (group + b * 32),
                          tile.id, tile.count)
                 : Draw(step, leaf, i + b * kBlockSize);
    }
#pragma unroll
    for (int b = 0; b < n; ++b) {
      stepped[b] = StepLoaded<Types, kRandom>(t, tile, loaded[b], Words(drawn[b]));
      is_ordinary &= stepped[b].mu.extremes.AreBetween(kSmallestMu, kLargestMu) &&
                     stepped[b].nu.extremes.AreBetween(kSmallestNu, kLargestNu);
    }
    if (__all_sync(kAllLanes, is_ordinary)) {
#pragma unroll
      for (int b = 0; b < n; ++b) Store<Types, kRandom>(t, leaf, i, b, stepped[b], Words(drawn[b]));
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
