// A warp's step of a block of 128 elements, four in each thread: for all dtypes, also at the end of
// a leaf and without alignment. quantized_chunk.cuh is faster where it applies.
#pragma once

#include "adam_math.h"
#include "coefficients.cuh"
#include "leaf_table.cuh"
#include "quantized.h"
#include "squares.cuh"
#include "vector.cuh"

namespace jdistadam {
namespace {

constexpr int kThreads = 128, kVector = 4;
static_assert(kBlockSize == 32 * kVector);  // a warp
constexpr unsigned kAllLanes = 0xffffffffu;

// The arguments of a launch other than its leaves.
struct Step {
  Mode mode;
  bool nesterov, is_stochastic, cautious;
  Dtypes dtypes;
  uint32_t rounds;  // chunks of a tile per warp
  const float* coefficients;
  const float* inv_scale;
  const bool* found_inf;
  const uint32_t* key;
  const int32_t* count;
  const int32_t* parts;
};
// The random words of four elements.
struct Words {
  uint32_t mu[kVector], nu[kVector], param[kVector];

  __device__ __forceinline__ explicit Words(const Random4& drawn) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      mu[k] = WordForMu(drawn.words[k]);
      nu[k] = WordForNu(drawn.words[k]);
      param[k] = WordForParam(drawn.words[k]);
    }
  }
};

// The elements [i, i + n) of a leaf that a thread takes; n may be 0 in the last warp of a leaf.
struct Part {
  size_t i;
  int n;
  bool is_vector;  // n is 4, and every array can be read and written as vectors
};

__device__ __forceinline__ bool IsAlignedFor(const void* base, Dtype dtype) {
  if (ItemSize(dtype) != 1) return IsAligned<kVector>(base, dtype);
  return reinterpret_cast<uintptr_t>(base) % 4 == 0;
}

// Whether every array of a leaf can be accessed as vectors, from multiples of four on.
template <typename Types>
__device__ __forceinline__ bool IsAligned(const Types& t, const QuantizedLeaf& leaf) {
  return IsAlignedFor(leaf.grad, t.grad) && IsAlignedFor(leaf.param, t.param) &&
         IsAlignedFor(leaf.mu, t.mu) && IsAlignedFor(leaf.nu, t.nu) &&
         (Types::kMode == Mode::kStep || IsAlignedFor(leaf.out, t.out));
}

template <typename Types>
__device__ __forceinline__ Part PartOf(const Types& t, const QuantizedLeaf& leaf, size_t i) {
  const size_t left = i < leaf.size ? leaf.size - i : 0;
  const int n = left < kVector ? static_cast<int>(left) : kVector;
  const bool is_vector = n == kVector && IsAligned(t, leaf);
  return {i, n, is_vector};
}

// Elements as stored in memory. Loads are separate from their use, so that the loads of all arrays
// are in flight together.
__device__ __forceinline__ Packed<kVector> LoadPart(const void* base, Dtype dtype,
                                                    const Part& part) {
  if (part.is_vector && ItemSize(dtype) != 1) return LoadVector<kVector>(base, dtype, part.i);
  Packed<kVector> packed{};
  if (part.is_vector) {
    packed.words[0] = *reinterpret_cast<const uint32_t*>(static_cast<const char*>(base) + part.i);
    return packed;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (k >= part.n) break;
    const size_t i = part.i + k;
    if (dtype == Dtype::kFloat32) {
      packed.words[k] = static_cast<const uint32_t*>(base)[i];
    } else if (ItemSize(dtype) == 1) {
      packed.words[0] |= uint32_t{static_cast<const uint8_t*>(base)[i]} << 8 * k;
    } else {
      packed.words[k / 2] |= uint32_t{static_cast<const uint16_t*>(base)[i]} << 16 * (k % 2);
    }
  }
  return packed;
}

__device__ __forceinline__ void StoreWord16(void* base, const Part& part,
                                            const uint16_t (&x)[kVector]) {
  if (part.is_vector) {
    const uint32_t words[] = {x[0] | uint32_t{x[1]} << 16, x[2] | uint32_t{x[3]} << 16};
    StoreWords<kVector>(base, part.i, words);
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (k < part.n) static_cast<uint16_t*>(base)[part.i + k] = x[k];
  }
}

// Rounds x, which may hold NaN, and stores it.
template <bool kStochastic>
__device__ __forceinline__ void StorePart(void* base, Dtype dtype, const Part& part,
                                          const float (&x)[kVector],
                                          const uint32_t (&words)[kVector]) {
  if (dtype == Dtype::kFloat32) {
    if (part.is_vector) {
      const float y[] = {CanonicalNan(x[0]), CanonicalNan(x[1]), CanonicalNan(x[2]),
                         CanonicalNan(x[3])};
      StoreVector(base, dtype, part.i, y);
      return;
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if (k < part.n) StoreOne(base, dtype, part.i + k, x[k]);
    }
    return;
  }
  uint16_t y[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    y[k] = dtype == Dtype::kBfloat16 ? RoundToBfloat16<kStochastic>(x[k], words[k])
                                     : RoundToFloat16<kStochastic>(x[k], words[k]);
  }
  StoreWord16(base, part, y);
}

template <Moment kMoment>
__device__ __forceinline__ void WidenMoment(const Packed<kVector>& packed, Dtype dtype, float scale,
                                            float (&x)[kVector]) {
  if (!IsCoded(dtype)) return Widen(packed, dtype, x);
  WithCode<kMoment>(dtype, [&](auto code) {
    using C = decltype(code);
    constexpr int kPerWord = 32 / C::kBits;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const uint32_t word = packed.words[k / kPerWord] >> C::kBits * (k % kPerWord);
      x[k] = Decode<C>(word & ((1u << C::kBits) - 1), scale);
    }
  });
}

// The largest number of the threads of a warp.
__device__ __forceinline__ uint32_t LargestOfWarp(uint32_t x) {
#if __CUDA_ARCH__ < 800
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
#else
  return __reduce_max_sync(kAllLanes, x);
#endif
}

// The codes of a block, some in each thread, and their scale, which it stores. All threads of a
// warp call this together.
template <typename C, bool kStochastic>
__device__ __forceinline__ void EncodePart(float* scales, const Part& part,
                                           const float (&x)[kVector],
                                           const uint32_t (&words)[kVector],
                                           uint16_t (&codes)[kVector]) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (k < part.n) largest = max(largest, RoundedMagnitude<C, kStochastic>(x[k], words[k]));
  }
  largest = LargestOfWarp(largest);
  const float scale = ScaleOf<C>(largest);
  if (threadIdx.x % 32 == 0 && part.n > 0) scales[part.i / kBlockSize] = scale;
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    codes[k] = static_cast<uint16_t>(Encode<C, kStochastic>(x[k], scale, words[k]));
}

__device__ __forceinline__ void StoreBytes(void* base, const Part& part,
                                           const uint16_t (&x)[kVector]) {
  uint8_t* at = static_cast<uint8_t*>(base) + part.i;
  if (part.is_vector) {
    const uint32_t low = x[0] | uint32_t{x[1]} << 8, high = x[2] | uint32_t{x[3]} << 8;
    *reinterpret_cast<uint32_t*>(at) = low | high << 16;
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (k < part.n) at[k] = static_cast<uint8_t>(x[k]);
  }
}

// All threads of a warp call this together.
template <Moment kMoment, bool kStochastic>
__device__ __forceinline__ void StoreMoment(void* base, Dtype dtype, float* scales,
                                            const Part& part, const float (&x)[kVector],
                                            const uint32_t (&words)[kVector]) {
  if (!IsCoded(dtype)) return StorePart<kStochastic>(base, dtype, part, x, words);
  WithCode<kMoment>(dtype, [&](auto code) {
    using C = decltype(code);
    uint16_t codes[kVector];
    EncodePart<C, kStochastic>(scales, part, x, words, codes);
    C::kBits == 8 ? StoreBytes(base, part, codes) : StoreWord16(base, part, codes);
  });
}

// Not inlined: 64-bit divisions would take registers, and none are left.
__device__ __noinline__ Random4 Draw(const Step& step, const QuantizedLeaf& leaf, size_t i) {
  const Origin origin = OriginOf(step.parts, leaf, i);
  const uint64_t index = origin.index;
  const uint32_t count = static_cast<uint32_t>(*step.count);
  const auto draw = [&](uint64_t at) {
    return Philox(step.key[0], step.key[1], at / 4, origin.id, count);
  };
  if (index % 4 == 0) return draw(index);
  Random4 words;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const Random4 drawn = draw(index + k);
    const int of = (index + k) % 4;  // no dynamic array index: it stays in registers
    words.words[k] = of == 0   ? drawn.words[0]
                     : of == 1 ? drawn.words[1]
                     : of == 2 ? drawn.words[2]
                               : drawn.words[3];
  }
  return words;
}

// The output of a skipped step: the unchanged parameter in `out`'s dtype, or an update of zero.
__device__ __noinline__ void SkipPart(const Step& step, const QuantizedLeaf& leaf,
                                      const Part& part) {
  if (step.mode == Mode::kStep || step.mode == Mode::kStepSplit) return;
  for (int k = 0; k < part.n; ++k) {
    const size_t i = part.i + k;
    const bool casts = step.mode == Mode::kStepAndCast;
    StoreOne(leaf.out, step.dtypes.out, i,
             casts ? LoadOne(leaf.param, step.dtypes.param, i) : 0.0f);
  }
}

// The sums of squares of a step that is skipped. All threads of a warp call this together.
template <typename Types>
__device__ __noinline__ void MeasureSkipped(const Types& t, const Step& step,
                                            const QuantizedLeaf& leaf, const Part& part,
                                            const RunsOfLeaf& runs) {
  float g[kVector], p[kVector];
  Widen(LoadPart(leaf.grad, t.grad, part), t.grad, g);
  const auto packed_p = LoadPart(leaf.param, t.param, part);
  if (Types::kMode == Mode::kStepSplit) {
    JoinVectors(packed_p, LoadPart(leaf.out, Dtype::kUint16, part), p);
  } else {
    Widen(packed_p, t.param, p);
  }
  ThreadSquares<kVector> squares;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (k < part.n) squares.Set(k, SquaresOf(g[k] * *step.inv_scale, p[k], 0.0f));
  }
  StoreRuns(runs, part.i, part.n, squares);
}

__device__ __forceinline__ Coefficients LoadCoefficients(const Step& step,
                                                         const QuantizedLeaf& leaf) {
  return reinterpret_cast<const Row*>(step.coefficients)[leaf.group].coefficients;
}

// All threads of a warp call this together. Not inlined: a chunk must not hold its
// registers. Kernels with sums of squares pass their place; others pass nothing.
template <typename Types, bool kStochastic, typename... Sums>
__device__ __noinline__ void StepPart(const Types& t, const Step& step, const QuantizedLeaf& leaf,
                                      const Part& part, const Sums&... runs) {
  constexpr Mode mode = Types::kMode;
  constexpr bool split = mode == Mode::kStepSplit;
  const size_t block = part.i / kBlockSize;
  const bool is_mine = part.n > 0;  // otherwise there may be no block
  const auto packed_p = LoadPart(leaf.param, t.param, part);
  const auto packed_m = LoadPart(leaf.mu, t.mu, part), packed_v = LoadPart(leaf.nu, t.nu, part);
  Packed<kVector> packed_low;
  if (split) packed_low = LoadPart(leaf.out, Dtype::kUint16, part);
  const float mu_scale = IsCoded(t.mu) && is_mine ? leaf.mu_scales[block] : 0.0f;
  const float nu_scale = IsCoded(t.nu) && is_mine ? leaf.nu_scales[block] : 0.0f;
  float g[kVector], p[kVector], m[kVector], v[kVector];
  Widen(LoadPart(leaf.grad, t.grad, part), t.grad, g);
  const Coefficients c = LoadCoefficients(step, leaf);
  const float inv_scale = *step.inv_scale;
  Random4 drawn{};
  if (kStochastic && is_mine)
    drawn = Draw(step, leaf, part.i);  // otherwise a table may have no entry
  const Words by_kind(drawn);
  if (split) {
    JoinVectors(packed_p, packed_low, p);
  } else {
    Widen(packed_p, t.param, p);
  }
  WidenMoment<Moment::kMu>(packed_m, t.mu, mu_scale, m);
  WidenMoment<Moment::kNu>(packed_v, t.nu, nu_scale, v);
  const Terms terms = TermsOf(c, step.nesterov, Types::kMayBeCautious && step.cautious);
  ThreadSquares<kVector> squares;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const float u = AdamUpdate(c, terms, g[k] * inv_scale, p[k], m[k], v[k]);
    if (sizeof...(Sums) > 0 && k < part.n) squares.Set(k, SquaresOf(g[k] * inv_scale, p[k] - u, u));
    p[k] = mode == Mode::kUpdate ? -u : p[k] - u;
  }
  (StoreRuns(runs, part.i, part.n, squares), ...);
  StoreMoment<Moment::kMu, kStochastic>(leaf.mu, t.mu, leaf.mu_scales, part, m, by_kind.mu);
  StoreMoment<Moment::kNu, kStochastic>(leaf.nu, t.nu, leaf.nu_scales, part, v, by_kind.nu);
  if (split) {
    uint16_t high[kVector], low[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const Halves halves = Split(p[k]);
      high[k] = halves.high;
      low[k] = halves.low;
    }
    StoreWord16(leaf.param, part, high);
    StoreWord16(leaf.out, part, low);
    return;
  }
  if (mode == Mode::kStep) StorePart<kStochastic>(leaf.param, t.param, part, p, by_kind.param);
  if (mode == Mode::kStepAndCast) StorePart<false>(leaf.param, t.param, part, p, by_kind.param);
  if (mode != Mode::kStep) StorePart<false>(leaf.out, t.out, part, p, by_kind.param);
}

}  // namespace
}  // namespace jdistadam
