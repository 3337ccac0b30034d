// What a chunk (compact_chunk.cuh) does with numbers that are ordinary: division, roots and
// rounding without special cases, to the same bits as with them. A thread has eight of them.
#pragma once

#include "compact_part.cuh"

namespace jdistadam {
namespace {

constexpr int kWide = 8;
using Floats = float[kWide];
using Bits = uint32_t[kWide];  // where a thread's numbers have 16 or 8 bits, the first ones

// ---- Arithmetic ----

// What follows holds for numbers in these ranges, as tests/kernels/driver/arithmetic.cu shows.
constexpr uint32_t kSmallestMu = (127u - 100u) << 23, kLargestMu = (127u + 13u) << 23;
constexpr uint32_t kSmallestNu = (127u - 92u) << 23, kLargestNu = (127u + 10u) << 23;
constexpr float kSmallestC = 0x1p-30f, kSmallestEps = 0x1p-60f, kLargestEps = 0x1p10f;

// IEEE division and square root. Quotients and roots get their last bit from a remainder, which is
// exact as nothing underflows. Divided is by numbers that are the same for all elements with their
// rounded reciprocal (Markstein, IA-64 and Elementary Functions, 2000), else as the compiler does
// it. Subtrahends are such that a zero keeps its sign. eps_root is zero.
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
  __device__ __forceinline__ float RootOf(const Coefficients& c, float v) const {
    return Root(ByC2(c, v));
  }
};

// ---- Rounding ----

// The upper halves of two words, the first one's below.
__device__ __forceinline__ uint32_t UpperHalves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x7632);
}

// Of pairs of words.
template <int n>
__device__ __forceinline__ void PackUpperHalves(const Bits& x, uint32_t (&y)[n]) {
#pragma unroll
  for (int k = 0; k < kWide; k += 2) y[k / 2] = UpperHalves(x[k], x[k + 1]);
}

// Rounds to bfloat16, two in a word. None is NaN.
template <bool kRandom>
__device__ __forceinline__ void RoundToHalves(const Floats& x, const Bits& random, Bits& y) {
  uint32_t sums[kWide];
#pragma unroll
  for (int k = 0; k < kWide; ++k)
    sums[k] = BitsOf(x[k]) + Increment<kRandom>(BitsOf(x[k]), 16, random[k]);
  PackUpperHalves(sums, y);
}

// The same of parameters, whose random bits are the lower halves of the words that were drawn: a
// product with (1, 0) adds such a half with one instruction.
__device__ __forceinline__ void RoundParams(const Floats& x, const Bits& drawn, Bits& y) {
  uint32_t sums[kWide];
#pragma unroll
  for (int k = 0; k < kWide; ++k) sums[k] = __dp2a_lo(drawn[k], 1u, BitsOf(x[k]));
  PackUpperHalves(sums, y);
}

// Whether bfloat16 parameters are below 2^109, so that no new one is NaN. Those below 2^105 are.
__device__ __forceinline__ bool AreModest(const Packed<kWide>& params) {
  constexpr uint32_t k2ToThe20 = 0x49804980u;
  uint32_t sum = 0;
#pragma unroll
  for (int k = 0; k < kWide / 2; ++k)
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(params.words[k]), "r"(k2ToThe20));
  asm("fma.rn.bf16x2 %0, %0, %1, %1;" : "+r"(sum) : "r"(0u));  // NaN where it is infinite or NaN
  return (sum & 0x7fff7fffu) == 0;
}

// A float32 that was computed here: where NaN it is 0x7fffffff, which becomes the canonical one.
__device__ __forceinline__ uint32_t CanonicalBits(float x) {
  return static_cast<uint32_t>(min(static_cast<int32_t>(BitsOf(x)), 0x7fc00000));
}

// The halves (dtype.h) of float32s.
__device__ __forceinline__ void SplitPairs(const Floats& x, Bits& high, Bits& low) {
#pragma unroll
  for (int k = 0; k < kWide; k += 2) {
    const uint32_t a = CanonicalBits(x[k]), b = CanonicalBits(x[k + 1]);
    high[k / 2] = UpperHalves(a + 0x8000u, b + 0x8000u);
    low[k / 2] = __byte_perm(a, b, 0x5410);
  }
}

}  // namespace
}  // namespace jdistadam
