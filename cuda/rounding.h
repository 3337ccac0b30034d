// Rounding to 16 or 8 bits, to nearest or stochastically. core/codecs.py and kernels/reference.py
// do the same.
//
// [Note: random bits]
// Stochastic rounding turns a number x between two neighbours a < b of a dtype into b with the
// probability (x - a) / (b - a), so its mean is x. The random bits of an element come from Philox
// 4x32 with 7 rounds: key is the seed; the counter is (index / 4 in 64 bits, leaf, count) with the
// element's row-major index in the whole leaf; word index % 4 of the result is its own. They
// therefore do not depend on how an array is cut or on which device computes it. Rounding uses as
// many bits as it drops: the upper bits of the word for nu, bits of its lower half for a parameter,
// and bits of a mix of both for mu.
//
// [Note: blocks]
// A moment in 8 or 16 bits: blocks of 128 elements in row-major order share a float32 scale, a
// power of two. A code has a mantissa of 3 bits, or of 10. Before it, a code of mu has a sign and 4
// or 5 bits of exponent; a code of nu has 5 or 6 and no sign, because nu is a mean of squares,
// whose exponents span twice as many as those of mu. All codes are finite. The scale is chosen such
// that the largest element, rounded to its 4 or 11 leading bits, has the highest exponent.
// Therefore encode(decode(x)) is x, and decoding is exact. A nonzero nu never becomes zero; its
// smallest number is 2^-33 of the scale, or 2^-72. mu becomes zero below 2^-17 of the scale, or
// 2^-40. A block with an infinite or NaN element, or one of 2^127 and more, has the scale NaN, and
// all of it is NaN from then on.
//
// [Note: subnormal codes]
// With rounding to nearest, k units of a subnormal code would stay k if a step changes it by less
// than half a unit. A mu without gradients would not decay, and a nu that began below its
// gradients' squares would not grow, as long as other elements keep the scale of the block up.
// Values with subnormal codes are therefore rounded toward zero for mu and up for nu, and both make
// steps smaller.
#pragma once

#include <type_traits>

#include "dtype.h"

namespace jdistadam {

constexpr int kBlockSize = 128;  // [Note: blocks]

struct Random4 {
  uint32_t words[4];
};

JDISTADAM_INLINE Random4 Philox(uint32_t key0, uint32_t key1, uint64_t index, uint32_t leaf,
                                uint32_t count) {
  uint32_t x0 = static_cast<uint32_t>(index), x1 = static_cast<uint32_t>(index >> 32);
  uint32_t x2 = leaf, x3 = count;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * x0, b = uint64_t{0xCD9E8D57u} * x2;
    x0 = static_cast<uint32_t>(b >> 32) ^ x1 ^ key0;
    x2 = static_cast<uint32_t>(a >> 32) ^ x3 ^ key1;
    x1 = static_cast<uint32_t>(b);
    x3 = static_cast<uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{x0, x1, x2, x3}};
}

// The words that round each, from the element's own word.
JDISTADAM_INLINE uint32_t WordForNu(uint32_t word) { return word; }
JDISTADAM_INLINE uint32_t WordForParam(uint32_t word) { return word << 16; }
JDISTADAM_INLINE uint32_t WordForMu(uint32_t word) { return word * 0x9E3779B9u; }

// The addend of a magnitude before its lowest `dropped` bits are dropped: with kStochastic as many
// random bits, otherwise the addend of rounding to nearest even.
template <bool kStochastic>
JDISTADAM_INLINE uint32_t Increment(uint32_t bits, int dropped, uint32_t word) {
  if (!kStochastic) return (1u << (dropped - 1)) - 1u + ((bits >> dropped) & 1u);
  return word >> (32 - dropped);
}

template <bool kStochastic>
JDISTADAM_INLINE uint16_t RoundToBfloat16(float x, uint32_t word) {
  const uint32_t bits = BitsOf(CanonicalNan(x));
  return static_cast<uint16_t>((bits + Increment<kStochastic>(bits, 16, word)) >> 16);
}

template <bool kStochastic>
JDISTADAM_INLINE uint16_t RoundToFloat16(float x, uint32_t word) {
  if (!kStochastic) return ToFloat16(x);
  const uint32_t bits = BitsOf(CanonicalNan(x)), magnitude = bits & 0x7fffffffu;
  // Times 2^-112 a float32 has the exponent of a float16, even a subnormal one.
  const uint32_t low = BitsOf(FloatOf(magnitude) * FloatOf(0x07800000u));
  uint32_t h = (low + Increment<kStochastic>(low, 13, word)) >> 13;
  h = h > 0x7c00u || magnitude == 0x7f800000u ? 0x7c00u : h;
  h = magnitude > 0x7f800000u ? 0x7e00u : h;
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | h);
}

// ---- Moments in codes, [Note: blocks] ----

enum class Moment { kMu, kNu };

// The bits of a code: from the highest one on a sign (only mu), an exponent and a mantissa.
template <Moment kMoment_, Dtype kDtype>
struct Code {
  static_assert(IsCoded(kDtype));
  using Word = std::conditional_t<ItemSize(kDtype) == 1, uint8_t, uint16_t>;
  static constexpr Moment kMoment = kMoment_;
  static constexpr int kBits = static_cast<int>(8 * ItemSize(kDtype));
  static constexpr int kMantissa = kDtype == Dtype::kBlock8 ? 3 : 10;
  static constexpr int kDropped = 23 - kMantissa;  // of the bits of a float32
  static constexpr uint32_t kSign = kMoment == Moment::kMu ? 1u << (kBits - 1) : 0;
  static constexpr uint32_t kMagnitude = (1u << (kBits - (kSign != 0))) - 1;
  static constexpr uint32_t kHighest = kMagnitude >> kMantissa;  // exponent
};

// Calls `f` with the Code of a dtype of codes.
template <Moment kMoment, typename F>
JDISTADAM_INLINE auto WithCode(Dtype dtype, F f) {
  if (dtype == Dtype::kBlock8) return f(Code<kMoment, Dtype::kBlock8>{});
  return f(Code<kMoment, Dtype::kBlock16>{});
}

// Magnitude of x, rounded to the bits of a mantissa. The largest in a block gives its scale.
template <typename C, bool kStochastic>
JDISTADAM_INLINE uint32_t RoundedMagnitude(float x, uint32_t word) {
  constexpr uint32_t kKept = ~((1u << C::kDropped) - 1u);
  const uint32_t magnitude = BitsOf(x) & 0x7fffffffu;
  if (magnitude >= 0x7f000000u) return 0x7f000000u;
  const uint32_t rounded =
      (magnitude + Increment<kStochastic>(magnitude, C::kDropped, word)) & kKept;
  return rounded == 0 && magnitude != 0 ? 1u : rounded;
}

// The bits of the smallest scale: with a smaller one, a code would mean a subnormal float32.
template <typename C>
JDISTADAM_INLINE constexpr uint32_t SmallestScale() {
  return (C::kHighest + C::kMantissa) << 23;
}

// The scale of a block: a code with the highest exponent means its mantissa times the scale.
template <typename C>
JDISTADAM_INLINE float ScaleOf(uint32_t largest) {
  constexpr uint32_t kZero = C::kSign != 0 ? 0x00800000u : 1u;  // no smaller code of mu
  if (largest < kZero) return 0.0f;
  if (largest >= 0x7f000000u) return FloatOf(0x7fc00000u);
  const uint32_t exponent = largest & 0x7f800000u;
  return FloatOf(exponent < SmallestScale<C>() ? SmallestScale<C>() : exponent);
}

// 2^(127 - the highest exponent of a code), and its inverse.
template <typename C>
JDISTADAM_INLINE float CodeUp() {
  return FloatOf((254u - C::kHighest) << 23);
}
template <typename C>
JDISTADAM_INLINE float CodeDown() {
  return FloatOf(C::kHighest << 23);
}

template <typename C>
JDISTADAM_INLINE float Decode(uint32_t code, float scale) {
  const float x = FloatOf((code & C::kMagnitude) << C::kDropped) * CodeUp<C>() * scale;
  return FloatOf(BitsOf(x) | (code & C::kSign) << (32 - C::kBits));
}

// The addend of a number before its code is cut off, as the bits of a float32 with the exponent of
// its code: [Note: subnormal codes].
template <typename C, bool kStochastic>
JDISTADAM_INLINE uint32_t CodeIncrement(uint32_t low, uint32_t word) {
  if (!kStochastic && low < 0x00800000u)
    return C::kMoment == Moment::kMu ? 0 : (1u << C::kDropped) - 1;
  return Increment<kStochastic>(low, C::kDropped, word);
}

template <typename C, bool kStochastic>
JDISTADAM_INLINE uint32_t Encode(float x, float scale, uint32_t word) {
  if (!(scale > 0.0f)) return 0;                               // all are zero, or one is NaN
  const float inverse = FloatOf(0x7f000000u - BitsOf(scale));  // exact: a power of two
  const uint32_t magnitude = BitsOf(x) & 0x7fffffffu;
  const uint32_t low = BitsOf(FloatOf(magnitude) * inverse * CodeDown<C>());
  const uint32_t code = (low + CodeIncrement<C, kStochastic>(low, word)) >> C::kDropped;
  if (C::kSign != 0) return code | (BitsOf(x) >> (32 - C::kBits) & C::kSign);
  return code == 0 && magnitude != 0 ? 1u : code;
}

}  // namespace jdistadam
