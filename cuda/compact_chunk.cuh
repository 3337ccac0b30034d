// A warp's step of two blocks of 128 elements, four of each in each thread: most of all that there
// is to do. The kernel is bound by the instructions that it issues, not by memory, so that what is
// the same for a whole tile is computed once, and divisions and roots have no special cases:
// numbers for which they would need them, and codes whose scale is out of the ordinary, are left to
// compact_part.cuh. The results are the same bits.
#pragma once

#include "compact_part.cuh"

namespace jdistadam {
namespace {

constexpr int kChunkBlocks = 2, kChunk = kChunkBlocks * kBlock8Size;

// ---- Arithmetic ----

// What follows holds for numbers in these ranges, as tests/kernels/driver/arithmetic.cu shows.
constexpr uint32_t kSmallestMu = (127u - 100u) << 23, kLargestMu = (127u + 13u) << 23;
constexpr uint32_t kSmallestNu = (127u - 92u) << 23, kLargestNu = (127u + 10u) << 23;
constexpr float kSmallestC = 0x1p-30f, kSmallestEps = 0x1p-60f, kLargestEps = 0x1p10f;

// IEEE division and square root. Quotients and roots get their last bit from a remainder, which is
// exact as nothing underflows. Divided is by numbers that are the same for all elements with their
// rounded reciprocal (Markstein, IA-64 and Elementary Functions, 2000), else as the compiler does
// it. Subtrahends are such that a zero keeps its sign.
struct OrdinaryArithmetic {
  float inverse_c1, inverse_c2;

  __device__ __forceinline__ static float Correct(float x, float y, float inverse, float q) {
    return fmaf(-inverse, fmaf(y, q, -x), q);
  }
  __device__ __forceinline__ float ByC1(const Coefficients& c, float x) const {
    return Correct(x, c.c1, inverse_c1, x * inverse_c1);
  }
  __device__ __forceinline__ float ByC2(const Coefficients& c, float x) const {
    return Correct(x, c.c2, inverse_c2, x * inverse_c2);
  }
  __device__ __forceinline__ float Divide(float x, float y) const {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
    inverse = fmaf(fmaf(-y, inverse, 1.0f), inverse, inverse);
    return Correct(x, y, inverse, Correct(x, y, inverse, x * inverse));
  }
  __device__ __forceinline__ float Root(float x) const {
    float inverse;  // of x, or of 2^-126 where x is zero
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x + 0x1p-126f));
    const float root = x * inverse;
    return fmaf(fmaf(-root, root, x), 0.5f * inverse, root);
  }
};

// The smallest number but zero, and the largest, of what a thread has, as bits without signs.
struct Extremes {
  uint32_t smallest = 0xffffffffu, largest = 0;  // less one, so that zero is none

  __device__ __forceinline__ void Add(const uint32_t (&bits)[kVector]) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) smallest = min(smallest, bits[k] - 1);
    largest = max(largest, max(bits[0], bits[1]));
    largest = max(largest, max(bits[2], bits[3]));
  }
};

// Whether the numbers of a thread are in the ranges above.
class Range {
 public:
  __device__ __forceinline__ void Add(const float (&m)[kVector], const float (&v)[kVector]) {
    uint32_t of_mu[kVector], of_nu[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      of_mu[k] = BitsOf(m[k]) + BitsOf(m[k]);
      of_nu[k] = BitsOf(v[k]);  // a sign is that of a NaN: large
    }
    mu_.Add(of_mu);
    nu_.Add(of_nu);
  }
  __device__ __forceinline__ bool IsOrdinary() const {
    return mu_.smallest >= 2 * kSmallestMu - 1 && mu_.largest < 2 * kLargestMu &&
           nu_.smallest >= kSmallestNu - 1 && nu_.largest < kLargestNu;
  }

 private:
  Extremes mu_, nu_;
};

// A float32 that was computed here: where NaN it is 0x7fffffff, which becomes the canonical one.
__device__ __forceinline__ float CanonicalResult(float x) {
  return FloatOf(static_cast<uint32_t>(min(static_cast<int32_t>(BitsOf(x)), 0x7fc00000)));
}

// ---- Codes, [Note: block8] in rounding.h ----

// Four codes as numbers, which are yet to be multiplied by CodeUp and the scale.
template <Moment kMoment>
__device__ __forceinline__ void WidenCodes(uint32_t codes, float (&x)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (kMoment == Moment::kMu) {  // the sign is shifted in
      const int32_t shifted = static_cast<int32_t>(codes << (24 - 8 * k)) >> 4;
      x[k] = FloatOf(static_cast<uint32_t>(shifted) & 0x87f00000u);
    } else {
      x[k] = FloatOf((k < 3 ? codes << (20 - 8 * k) : codes >> 4) & 0x0ff00000u);
    }
  }
}

// Returns the codes of four elements in ordinary ranges, and the scale of their block.
template <Moment kMoment, bool kRandom>
__device__ __forceinline__ uint32_t EncodeOrdinary(const float (&x)[kVector],
                                                   const uint32_t (&words)[kVector], float* scale) {
  constexpr bool is_mu = kMoment == Moment::kMu;
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const uint32_t magnitude = is_mu ? BitsOf(x[k]) & 0x7fffffffu : BitsOf(x[k]);
    largest = max(largest, magnitude + Increment<kRandom>(magnitude, 20, words[k]));
  }
  const uint32_t exponent = __reduce_max_sync(kAllLanes, largest) & 0x7f800000u;
  *scale = FloatOf(exponent);  // zero if all are
  const float factor = FloatOf((is_mu ? 0x7f000000u - 0x38000000u : 0x7f000000u - 0x30000000u) -
                               exponent);  // CodeDown over the scale
  const uint32_t sign = exponent == 0 ? 0 : 0x80000000u;
  uint32_t bytes[kVector];  // each the highest of its word
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const uint32_t low = BitsOf(x[k] * factor);
    if (is_mu) {
      const uint32_t sum = low + Increment<kRandom>(low & 0x7fffffffu, 20, words[k]);
      bytes[k] = sum << 4 | (sum & sign);
    } else {
      const uint32_t sum = low + Increment<kRandom>(low, 20, words[k]);
      bytes[k] = max(sum, min(BitsOf(x[k]), 1u << 20)) << 4;  // what is not zero does not become so
    }
  }
  const uint32_t lower = __byte_perm(bytes[0], bytes[1], 0x73);
  return __byte_perm(lower, __byte_perm(bytes[2], bytes[3], 0x73), 0x5410);
}

// ---- A tile ----

// What is the same for all chunks of a tile.
struct Tile {
  Coefficients c;
  OrdinaryArithmetic by;
  float inv_scale;
  bool is_ordinary;  // else no chunk is
  bool is_run;       // its elements follow each other in the whole leaf, and start at a vector
  uint32_t id, count, key0, key1, group_high;
  uint32_t group;  // of this thread's first element: its index / 4, of which group_high is more
};

template <typename Types>
__device__ __forceinline__ Tile TileOf(const Types& t, const Step& step, const CompactLeaf& leaf,
                                       size_t begin, size_t end, size_t mine) {
  Tile tile;
  tile.c = LoadCoefficients(step, leaf);
  const Coefficients& c = tile.c;
  tile.inv_scale = *step.inv_scale;
  const auto is_between = [](float x, float low, float high) { return x >= low && x <= high; };
  tile.is_ordinary = !step.nesterov && c.l2 == 0.0f && is_between(c.c1, kSmallestC, 1.0f) &&
                     is_between(c.c2, kSmallestC, 1.0f) &&
                     is_between(c.eps, kSmallestEps, kLargestEps) &&
                     is_between(c.eps_root, 0.0f, kLargestEps) && IsAligned(t, step, leaf);
  tile.by = {1.0f / c.c1, 1.0f / c.c2};
  if (!Types::IsRandom(step)) return tile;
  tile.count = static_cast<uint32_t>(*step.count);
  tile.key0 = step.key[0];
  tile.key1 = step.key[1];
  const Origin first = OriginOf(step.parts, leaf, begin);
  const Origin last = OriginOf(step.parts, leaf, end - 1);
  const uint64_t group = (first.index + (mine - begin)) / kVector;
  tile.id = first.id;
  tile.group = static_cast<uint32_t>(group);
  tile.group_high = static_cast<uint32_t>(first.index / kVector >> 32);
  tile.is_run = leaf.table == nullptr && last.index - first.index == end - 1 - begin &&
                first.index % kVector == 0 && last.index / kVector >> 32 == tile.group_high;
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
  return static_cast<char*>(const_cast<void*>(base)) + block * kBlock8Size * ItemSize(dtype);
}

__device__ __forceinline__ Packed<kVector> LoadFour(const void* base, Dtype dtype, size_t i,
                                                    int block) {
  const char* from = Ahead(base, dtype, block);
  if (dtype != Dtype::kBlock8) return LoadVector<kVector>(from, dtype, i);
  return {{*reinterpret_cast<const uint32_t*>(from + i)}};
}

template <typename Types>
__device__ __forceinline__ Loaded Load(const Types& t, const CompactLeaf& leaf, size_t i,
                                       int block) {
  Loaded x;
  x.grad = LoadFour(leaf.grad, t.grad, i, block);
  x.param = LoadFour(leaf.param, t.param, i, block);
  x.mu = LoadFour(leaf.mu, t.mu, i, block);
  x.nu = LoadFour(leaf.nu, t.nu, i, block);
  if (Types::kMode == Mode::kStepSplit) x.low = LoadFour(leaf.out, Dtype::kUint16, i, block);
  if (t.mu == Dtype::kBlock8) x.mu_scale = (leaf.mu_scales + block)[i / kBlock8Size];
  if (t.nu == Dtype::kBlock8) x.nu_scale = (leaf.nu_scales + block)[i / kBlock8Size];
  return x;
}

// Numbers that were computed here.
template <bool kRandom>
__device__ __forceinline__ void StoreOrdinary(void* base, Dtype dtype, size_t i, int block,
                                              const float (&x)[kVector],
                                              const uint32_t (&words)[kVector]) {
  float y[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) y[k] = CanonicalResult(x[k]);
  char* to = Ahead(base, dtype, block);
  if (dtype == Dtype::kFloat32) return StoreVector(to, dtype, i, y);
  uint32_t sums[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    sums[k] = BitsOf(y[k]) + Increment<kRandom>(BitsOf(y[k]), 16, words[k]);
  const uint32_t pairs[] = {__byte_perm(sums[0], sums[1], 0x7632),
                            __byte_perm(sums[2], sums[3], 0x7632)};
  StoreWords<kVector>(to, i, pairs);
}

template <Moment kMoment, bool kRandom>
__device__ __forceinline__ void StoreMomentOrdinary(void* base, Dtype dtype, float* scales,
                                                    size_t i, int block, const float (&x)[kVector],
                                                    const uint32_t (&words)[kVector]) {
  if (dtype != Dtype::kBlock8) return StoreOrdinary<kRandom>(base, dtype, i, block, x, words);
  float scale;
  const uint32_t codes = EncodeOrdinary<kMoment, kRandom>(x, words, &scale);
  *reinterpret_cast<uint32_t*>(Ahead(base, dtype, block) + i) = codes;
  if (threadIdx.x % 32 == 0) (scales + block)[i / kBlock8Size] = scale;
}

template <typename Types, bool kRandom>
__device__ __forceinline__ void Store(const Types& t, const CompactLeaf& leaf, size_t i, int block,
                                      const float (&p)[kVector], const float (&m)[kVector],
                                      const float (&v)[kVector], const Words& words) {
  constexpr Mode mode = Types::kMode;
  StoreMomentOrdinary<Moment::kMu, kRandom>(leaf.mu, t.mu, leaf.mu_scales, i, block, m, words.mu);
  StoreMomentOrdinary<Moment::kNu, kRandom>(leaf.nu, t.nu, leaf.nu_scales, i, block, v, words.nu);
  if (mode == Mode::kStepSplit) {
    const float y[] = {CanonicalResult(p[0]), CanonicalResult(p[1]), CanonicalResult(p[2]),
                       CanonicalResult(p[3])};
    StoreHalves(Ahead(leaf.param, t.param, block), Ahead(leaf.out, t.out, block), i, y);
    return;
  }
  StoreOrdinary<kRandom && mode == Mode::kStep>(leaf.param, t.param, i, block, p, words.param);
  if (mode == Mode::kStepAndCast) StoreOrdinary<false>(leaf.out, t.out, i, block, p, words.param);
}

// Steps a chunk, of which this thread's elements begin at i and, of the second block, 128 after it.
// False, and nothing done, where some of them are out of the ordinary. All threads of a warp call
// this together; `ahead` is by how much i is after the tile's first element of this thread.
template <typename Types, bool kRandom>
__device__ __forceinline__ bool StepChunk(const Types& t, const Step& step, const CompactLeaf& leaf,
                                          const Tile& tile, size_t i, uint32_t ahead) {
  static_assert(Types::kMode != Mode::kUpdate);
  constexpr int n = kChunkBlocks;
  Loaded loaded[n];
#pragma unroll
  for (int b = 0; b < n; ++b) loaded[b] = Load(t, leaf, i, b);
  uint32_t drawn[n][kVector] = {};
#pragma unroll
  for (int b = 0; kRandom && b < n; ++b) {
    if (tile.is_run) {
      const uint32_t group = tile.group + (ahead + b * kBlock8Size) / kVector;
      const Random4 random = Philox(tile.key0, tile.key1, uint64_t{tile.group_high} << 32 | group,
                                    tile.id, tile.count);
#pragma unroll
      for (int k = 0; k < kVector; ++k) drawn[b][k] = random.words[k];
    } else {
      Draw(step, leaf, i + b * kBlock8Size, drawn[b]);
    }
  }
  const Terms terms{false, tile.c.weight_decay != 0.0f, false};
  Range range;
  float p[n][kVector], m[n][kVector], v[n][kVector];
#pragma unroll
  for (int b = 0; b < n; ++b) {
    float g[kVector];
    Widen(loaded[b].grad, t.grad, g);
    if (Types::kMode == Mode::kStepSplit) {
      JoinVectors(loaded[b].param, loaded[b].low, p[b]);
    } else {
      Widen(loaded[b].param, t.param, p[b]);
    }
    // Codes are multiplied by powers of two, which may as well be in b1 and b2: the same bits.
    Coefficients c = tile.c;
    if (t.mu == Dtype::kBlock8) {
      WidenCodes<Moment::kMu>(loaded[b].mu.words[0], m[b]);
      c.b1 *= loaded[b].mu_scale * CodeUp<Moment::kMu>();
    } else {
      Widen(loaded[b].mu, t.mu, m[b]);
    }
    if (t.nu == Dtype::kBlock8) {
      WidenCodes<Moment::kNu>(loaded[b].nu.words[0], v[b]);
      c.b2 *= loaded[b].nu_scale * CodeUp<Moment::kNu>();
    } else {
      Widen(loaded[b].nu, t.nu, v[b]);
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      p[b][k] =
          p[b][k] - AdamUpdate(c, terms, g[k] * tile.inv_scale, p[b][k], m[b][k], v[b][k], tile.by);
    }
    range.Add(m[b], v[b]);
  }
  if (!__all_sync(kAllLanes, range.IsOrdinary())) return false;
#pragma unroll
  for (int b = 0; b < n; ++b)
    Store<Types, kRandom>(t, leaf, i, b, p[b], m[b], v[b], Words(drawn[b]));
  return true;
}

}  // namespace
}  // namespace jdistadam
