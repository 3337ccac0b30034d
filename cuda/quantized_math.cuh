// A chunk's (quantized_chunk.cuh) arithmetic for ordinary numbers: division, roots, rounding and
// codes without special cases, with the same bits. A thread has eight numbers, and half a warp has
// a block of 128: [Note: blocks] in rounding.h.
#pragma once

#include "quantized_part.cuh"

namespace jdistadam {
namespace {

constexpr int kWide = 8;
using Floats = float[kWide];
using Bits = uint32_t[kWide];  // a thread's numbers; the first words for 16 or 8 bits

// ---- Arithmetic ----

// Valid for numbers in these ranges, as tests/kernels/driver/arithmetic.cu shows.
constexpr uint32_t kSmallestMu = (127u - 100u) << 23, kLargestMu = (127u + 13u) << 23;
constexpr uint32_t kSmallestNu = (127u - 92u) << 23, kLargestNu = (127u + 10u) << 23;
constexpr float kSmallestC = 0x1p-30f, kSmallestEps = 0x1p-60f, kLargestEps = 0x1p10f;

// IEEE division and square root. Quotients and roots get their last bit from a remainder, which is
// exact because nothing underflows. Divisors that are the same for all elements use their rounded
// reciprocal (Markstein, IA-64 and Elementary Functions, 2000); for others it is the compiler's
// method. The order of subtrahends keeps the sign of zero. eps_root is zero.
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
    float inverse;  // of x, or of 2^-126 if x is zero
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

// For pairs of words.
template <int n>
__device__ __forceinline__ void PackUpperHalves(const Bits& x, uint32_t (&y)[n]) {
#pragma unroll
  for (int k = 0; k < kWide; k += 2) y[k / 2] = UpperHalves(x[k], x[k + 1]);
}

// Rounds to bfloat16, two per word. None is NaN.
template <bool kStochastic>
__device__ __forceinline__ void RoundToHalves(const Floats& x, const Bits& random, Bits& y) {
  uint32_t sums[kWide];
#pragma unroll
  for (int k = 0; k < kWide; ++k)
    sums[k] = BitsOf(x[k]) + Increment<kStochastic>(BitsOf(x[k]), 16, random[k]);
  PackUpperHalves(sums, y);
}

// The same for parameters, whose random bits are the lower halves of the drawn words: a product
// with (1, 0) adds such a half in one instruction.
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
  asm("fma.rn.bf16x2 %0, %0, %1, %1;" : "+r"(sum) : "r"(0u));  // NaN if it is infinite or NaN
  return (sum & 0x7fff7fffu) == 0;
}

// A float32 computed here: if it is NaN it is 0x7fffffff, which becomes the canonical one.
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

// ---- From codes ----

// Codes as numbers, still to be multiplied by CodeUp and the scale.
template <typename C>
__device__ __forceinline__ void WidenCodes(const Packed<kWide>& codes, Floats& x) {
  constexpr int kInWord = 32 / C::kBits;
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
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

// For a moment in its storage dtype; returns the factor.
template <Moment kMoment>
__device__ __forceinline__ float WidenStored(Dtype dtype, const Packed<kWide>& packed, float scale,
                                             Floats& x) {
  if (!IsCoded(dtype)) {
    Widen(packed, dtype, x);
    return 1.0f;
  }
  return WithCode<kMoment>(dtype, [&](auto code) {
    using C = decltype(code);
    WidenCodes<C>(packed, x);
    return scale * CodeUp<C>();
  });
}

// ---- Two 16-bit numbers per word ----

using Pair = uint32_t;
constexpr int kPairs = kWide / 2;

__host__ __device__ constexpr Pair Both(uint32_t x) { return (x & 0xffffu) * 0x00010001u; }
__device__ __forceinline__ Pair LargestPair(const Pair (&x)[kPairs]) {
  return __vmaxu2(__vimax3_u16x2(x[0], x[1], x[2]), x[3]);
}
__device__ __forceinline__ Pair SmallestPair(const Pair (&x)[kPairs]) {
  return __vminu2(__vimin3_u16x2(x[0], x[1], x[2]), x[3]);
}

// The largest of a block, in each half of a word.
__device__ __forceinline__ Pair LargestOfBlock(Pair x) {
#pragma unroll
  for (int lane = 1; lane < kBlockSize / kWide; lane *= 2)
    x = __vmaxu2(x, __shfl_xor_sync(kAllLanes, x, lane));
  return x;
}

// ---- To codes ----

// Numbers plus their rounding addends, as bits; also their upper halves, which contain an 8-bit
// code, and the exponent.
template <typename C>
struct Rounded {
  uint32_t bits[kWide];
  Pair signed_halves[kPairs], halves[kPairs];

  template <bool kStochastic>
  __device__ __forceinline__ static Rounded Of(const Floats& x, const Bits& random) {
    Rounded y;
#pragma unroll
    for (int k = 0; k < kWide; ++k)
      y.bits[k] = BitsOf(x[k]) + Increment<kStochastic>(BitsOf(x[k]), C::kDropped, random[k]);
    PackUpperHalves(y.bits, y.signed_halves);
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      y.halves[k] = C::kSign != 0 ? y.signed_halves[k] & 0x7fff7fffu : y.signed_halves[k];
    }
    return y;
  }
};

// Codes, none of them subnormal. A code is then the bits of a rounded number minus those of the
// block's exponent, so half an instruction is enough for each.
template <typename C>
__device__ __forceinline__ void PackNormalCodes(const Rounded<C>& x, uint32_t exponent, Bits& y) {
  if (C::kBits == 8) {
    constexpr int kUp = 4;  // to the upper byte of a half: a sign falls where no code is
    const uint32_t shift = (Both(C::kHighest << 7) - __byte_perm(exponent, 0, 0x3232)) << kUp;
    uint32_t codes[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      codes[k] = (x.signed_halves[k] << kUp) + shift;
      if (C::kSign != 0) codes[k] |= x.signed_halves[k] & 0x80008000u;
    }
#pragma unroll
    for (int k = 0; k < kPairs; k += 2) y[k / 2] = __byte_perm(codes[k], codes[k + 1], 0x7531);
    return;
  }
  constexpr int kUnused = 32 - C::kBits - C::kDropped;  // bits other than magnitude and sign
  const uint32_t shift = ((C::kHighest << 23) - exponent) << kUnused;
  uint32_t codes[kWide];
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    codes[k] = (x.bits[k] << kUnused) + shift;
    if (C::kSign != 0) codes[k] |= x.bits[k] & 0x80000000u;
  }
  PackUpperHalves(codes, y);
}

// Codes of all numbers, and whether these are zero or ordinary. The exponent is zero if all are.
template <typename C, bool kStochastic>
__device__ __forceinline__ bool PackCodes(const Floats& x, const Bits& random, uint32_t exponent,
                                          Bits& y) {
  constexpr bool is_mu = C::kMoment == Moment::kMu;
  const float factor = FloatOf(((127u + C::kHighest) << 23) - exponent);  // CodeDown / scale
  bool is_ordinary = true;
#pragma unroll
  for (int k = 0; k < kWide * C::kBits / 32; ++k) y[k] = 0;
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    const uint32_t magnitude = BitsOf(x[k]) & 0x7fffffffu;
    is_ordinary &= magnitude == 0 || magnitude >= (is_mu ? kSmallestMu : kSmallestNu);
    const uint32_t low = BitsOf(FloatOf(magnitude) * factor);
    uint32_t code = (low + CodeIncrement<C, kStochastic>(low, random[k])) >> C::kDropped;
    if (is_mu && exponent != 0) code |= BitsOf(x[k]) >> (32 - C::kBits) & C::kSign;
    if (!is_mu && code == 0 && magnitude != 0) code = 1;  // nonzero stays nonzero
    y[k * C::kBits / 32] |= code << k * C::kBits % 32;
  }
  return is_ordinary;
}

// Codes, and whether their scale and all numbers are ordinary.
template <typename C, bool kStochastic>
__device__ __forceinline__ bool Pack(const Rounded<C>& rounded, const Floats& x, const Bits& random,
                                     uint32_t exponent, Bits& y) {
  constexpr uint32_t kSmallest = C::kMoment == Moment::kMu ? kSmallestMu : kSmallestNu;
  constexpr uint32_t kLeast = SmallestScale<C>();  // the scale is not the exponent below
  const bool is_scale = kLeast <= kSmallest || exponent == 0 || exponent >= kLeast;
  // Rounded numbers of at least this were ordinary and have normal codes: it is the lowest of these
  // plus an eighth, the most that rounding adds.
  constexpr uint32_t kAbove = 0x90u;
  const Pair low =
      __viaddmax_u16x2(__byte_perm(exponent, 0, 0x3232), Both(kAbove - (C::kHighest << 7)),
                       Both((kSmallest >> 16) + 0x10u));
  PackNormalCodes(rounded, exponent, y);
  if (__vminu2(SmallestPair(rounded.halves), low) == low) return is_scale;
  return PackCodes<C, kStochastic>(x, random, exponent, y) && is_scale;
}

// A thread's moments in their storage dtypes.
struct Stored {
  Bits mu, nu;
  float mu_scale, nu_scale;
  bool is_ordinary;
};

// mu must not be NaN unless nu is: the rounding addend would hide it.
template <Dtype kDtype, bool kStochastic>
__device__ __forceinline__ void Encode(const Floats& m, const Floats& v, const Bits& mu_random,
                                       const Bits& nu_random, Stored* y) {
  using Mu = Code<Moment::kMu, kDtype>;
  using Nu = Code<Moment::kNu, kDtype>;
  const auto mu = Rounded<Mu>::template Of<kStochastic>(m, mu_random);
  const auto nu = Rounded<Nu>::template Of<kStochastic>(v, nu_random);
  const Pair of_mu = LargestPair(mu.halves), of_nu = LargestPair(nu.halves);
  const Pair mine = __vmaxu2(UpperHalves(of_nu, of_mu), __byte_perm(of_nu, of_mu, 0x5410));
  const Pair largest = LargestOfBlock(mine);  // the upper half is mu's
  const uint32_t mu_exponent = largest & 0x7f800000u, nu_exponent = largest << 16 & 0x7f800000u;
  y->mu_scale = FloatOf(mu_exponent);
  y->nu_scale = FloatOf(nu_exponent);
  y->is_ordinary &= largest < kLargestMu;
  y->is_ordinary &= (largest & 0xffffu) < kLargestNu >> 16;
  y->is_ordinary &= Pack<Mu, kStochastic>(mu, m, mu_random, mu_exponent, y->mu);
  y->is_ordinary &= Pack<Nu, kStochastic>(nu, v, nu_random, nu_exponent, y->nu);
}

// A moment in 16 or 32 bits without codes.
template <Moment kMoment, bool kStochastic>
__device__ __forceinline__ void PackMoment(Dtype dtype, const Floats& x, const Bits& random,
                                           Bits& y, bool* is_ordinary) {
  constexpr bool is_mu = kMoment == Moment::kMu;
  uint32_t largest = 0, smallest = 0xffffffffu;  // minus one, so zero does not count
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    y[k] = BitsOf(x[k]);
    const uint32_t magnitude = is_mu ? y[k] & 0x7fffffffu : y[k];  // in nu only NaN has a sign
    largest = max(largest, magnitude);
    smallest = min(smallest, magnitude - 1);
  }
  *is_ordinary &= largest < (is_mu ? kLargestMu : kLargestNu);
  *is_ordinary &= smallest >= (is_mu ? kSmallestMu : kSmallestNu) - 1;
  if (dtype != Dtype::kFloat32) RoundToHalves<kStochastic>(x, random, y);
}

}  // namespace
}  // namespace jdistadam
