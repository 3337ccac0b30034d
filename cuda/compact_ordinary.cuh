// What a chunk (compact_chunk.cuh) does with numbers that are ordinary: division, roots and codes
// without special cases, to the same bits as with them.
#pragma once

#include "compact_part.cuh"

namespace jdistadam {
namespace {

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

// The extremes of what a thread has, as bits without signs.
struct Extremes {
  uint32_t smallest = 0xffffffffu;  // less one, so that zero is none
  uint32_t largest = 0;

  __device__ __forceinline__ bool AreBetween(uint32_t low, uint32_t high) const {
    return smallest >= low - 1 && largest < high;
  }
};

// A float32 that was computed here: where NaN it is 0x7fffffff, which becomes the canonical one.
__device__ __forceinline__ float CanonicalResult(float x) {
  return FloatOf(static_cast<uint32_t>(min(static_cast<int32_t>(BitsOf(x)), 0x7fc00000)));
}

// ---- Codes, [Note: blocks] in rounding.h ----

// Four codes as numbers, which are yet to be multiplied by CodeUp and the scale.
template <typename C>
__device__ __forceinline__ void WidenCodes(const Packed<kVector>& codes, float (&x)[kVector]) {
  constexpr int kInWord = 32 / C::kBits;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const uint32_t word = codes.words[k / kInWord];
    const int first = C::kBits * (k % kInWord);  // bit of the code
    if (C::kSign != 0) {                         // the sign is shifted in
      const int32_t highest = static_cast<int32_t>(word << (32 - C::kBits - first));
      const int32_t shifted = highest >> (32 - C::kBits - C::kDropped);
      x[k] = FloatOf(static_cast<uint32_t>(shifted) & (0x80000000u | C::kMagnitude << C::kDropped));
    } else {
      const uint32_t shifted =
          first <= C::kDropped ? word << (C::kDropped - first) : word >> (first - C::kDropped);
      x[k] = FloatOf(shifted & C::kMagnitude << C::kDropped);
    }
  }
}

// Four numbers of a moment as they are stored: codes and their scale, or in 16 bits or 32.
struct Stored {
  uint32_t words[kVector];
  float scale;
  Extremes extremes;  // the largest is the warp's where there are codes
};

// Bits without a sign. A number of nu has none but where it is NaN, and then it is large.
template <Moment kMoment>
__device__ __forceinline__ uint32_t MagnitudeOf(float x) {
  return kMoment == Moment::kMu ? BitsOf(x) & 0x7fffffffu : BitsOf(x);
}

// The largest is out of the ordinary where the scale is not that of ScaleOf.
template <typename C, bool kRandom>
__device__ __forceinline__ void EncodeOrdinary(const float (&x)[kVector],
                                               const uint32_t (&words)[kVector], Stored* y) {
  constexpr bool is_mu = C::kMoment == Moment::kMu;
  constexpr uint32_t smallest = is_mu ? kSmallestMu : kSmallestNu;
  constexpr int kUnused = 32 - C::kBits - C::kDropped;  // bits beside a magnitude and a sign
  uint32_t rounded[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const uint32_t magnitude = MagnitudeOf<C::kMoment>(x[k]);
    rounded[k] = magnitude + Increment<kRandom>(magnitude, C::kDropped, words[k]);
    y->extremes.smallest = min(y->extremes.smallest, magnitude - 1);
  }
  const uint32_t mine = max(max(max(rounded[0], rounded[1]), rounded[2]), rounded[3]);
  y->extremes.largest = __reduce_max_sync(kAllLanes, mine);
  const uint32_t exponent = y->extremes.largest & 0x7f800000u;
  y->scale = FloatOf(exponent);  // zero if all are
  if (SmallestScale<C>() > smallest && exponent != 0 && exponent < SmallestScale<C>())
    y->extremes.largest = 0xffffffffu;
  const float factor = FloatOf(((127u + C::kHighest) << 23) - exponent);  // CodeDown over the scale
  const uint32_t sign = exponent == 0 ? 0 : 0x80000000u;
  uint32_t codes[kVector];  // each the highest bits of its word
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const uint32_t low = BitsOf(x[k] * factor);
    if (is_mu) {
      const uint32_t sum = low + Increment<kRandom>(low & 0x7fffffffu, C::kDropped, words[k]);
      codes[k] = sum << kUnused | (sum & sign);
    } else {
      const uint32_t sum = low + Increment<kRandom>(low, C::kDropped, words[k]);
      const uint32_t one = min(BitsOf(x[k]), 1u << C::kDropped);
      codes[k] = max(sum, one) << kUnused;  // what is not zero does not become so
    }
  }
  if (C::kBits == 8) {
    const uint32_t lower = __byte_perm(codes[0], codes[1], 0x73);
    y->words[0] = __byte_perm(lower, __byte_perm(codes[2], codes[3], 0x73), 0x5410);
  } else {
    y->words[0] = __byte_perm(codes[0], codes[1], 0x7632);
    y->words[1] = __byte_perm(codes[2], codes[3], 0x7632);
  }
}

// Numbers that were computed here, in 16 bits or in 32.
template <bool kRandom>
__device__ __forceinline__ void RoundOrdinary(Dtype dtype, const float (&x)[kVector],
                                              const uint32_t (&words)[kVector], uint32_t* y) {
  uint32_t bits[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    bits[k] = BitsOf(CanonicalResult(x[k]));
    y[k] = bits[k];
    bits[k] += Increment<kRandom>(bits[k], 16, words[k]);
  }
  if (dtype == Dtype::kFloat32) return;
  y[0] = __byte_perm(bits[0], bits[1], 0x7632);
  y[1] = __byte_perm(bits[2], bits[3], 0x7632);
}

template <Moment kMoment, bool kRandom>
__device__ __forceinline__ Stored StoredMoment(Dtype dtype, const float (&x)[kVector],
                                               const uint32_t (&words)[kVector]) {
  Stored y;
  if (dtype == Dtype::kBlock8) {
    EncodeOrdinary<Code<kMoment, Dtype::kBlock8>, kRandom>(x, words, &y);
    return y;
  }
  if (dtype == Dtype::kBlock16) {
    EncodeOrdinary<Code<kMoment, Dtype::kBlock16>, kRandom>(x, words, &y);
    return y;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    y.extremes.smallest = min(y.extremes.smallest, MagnitudeOf<kMoment>(x[k]) - 1);
    y.extremes.largest = max(y.extremes.largest, MagnitudeOf<kMoment>(x[k]));
  }
  RoundOrdinary<kRandom>(dtype, x, words, y.words);
  return y;
}

}  // namespace
}  // namespace jdistadam
