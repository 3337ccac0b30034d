// Storage dtypes and their conversion to and from float32 registers.
//
// Every load widens exactly; every store rounds once, to nearest even. A NaN is stored as the only
// positive quiet NaN of its dtype: hardware disagrees on NaN payloads (x86 makes 0xffc00000, CUDA
// 0x7fffffff), and without this rule results would differ after the first NaN.
//
// The conversions are integer arithmetic without branches, the same code on host and device. The
// host compiler can vectorise them, and no two backends can round differently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define JDISTADAM_INLINE __host__ __device__ __forceinline__
#else
#define JDISTADAM_INLINE inline __attribute__((always_inline))
#endif

namespace jdistadam {

// kUint16: only remainders. kBlock8 and later: only codes of moments (rounding.h).
enum class Dtype : int32_t { kFloat32, kBfloat16, kFloat16, kUint16, kBlock8, kBlock16 };

JDISTADAM_INLINE constexpr size_t ItemSize(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kBlock8 ? 1 : 2;
}

// Whether elements are codes, which share a scale per block.
JDISTADAM_INLINE constexpr bool IsCoded(Dtype dtype) { return dtype >= Dtype::kBlock8; }

JDISTADAM_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

JDISTADAM_INLINE float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

JDISTADAM_INLINE float CanonicalNan(float x) { return x == x ? x : FloatOf(0x7fc00000u); }

JDISTADAM_INLINE float FromBfloat16(uint16_t h) { return FloatOf(uint32_t{h} << 16); }

JDISTADAM_INLINE uint16_t ToBfloat16(float x) {
  const uint32_t bits = BitsOf(CanonicalNan(x));
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

JDISTADAM_INLINE float FromFloat16(uint16_t h) {
  const uint32_t sign = (uint32_t{h} & 0x8000u) << 16;
  const uint32_t magnitude = (uint32_t{h} & 0x7fffu) << 13;  // exponent and mantissa in place
  const float normal = FloatOf(magnitude + 0x38000000u);     // rebias 15 -> 127
  const float special = FloatOf(magnitude + 0x70000000u);    // exponent 31 -> 255: inf, NaN
  // A subnormal half is a multiple of 2^-24: add an implicit one of 2^-14, then subtract it.
  const float subnormal = FloatOf(magnitude + 0x38800000u) - FloatOf(0x38800000u);
  const float x = magnitude >= 0x0f800000u   ? special
                  : magnitude >= 0x00800000u ? normal
                                             : subnormal;
  return FloatOf(BitsOf(x) | sign);
}

JDISTADAM_INLINE uint16_t ToFloat16(float x) {
  const uint32_t bits = BitsOf(CanonicalNan(x));
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14: 0.5f has the spacing of subnormal halves, so this addition rounds to it.
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t h = magnitude >= 0x38800000u ? normal : subnormal;
  h = magnitude >= 0x477ff000u ? 0x7c00u : h;  // rounds to infinity from 65520 on
  h = magnitude > 0x7f800000u ? 0x7e00u : h;   // NaN
  return static_cast<uint16_t>(sign | h);
}

// A float32 in two halves: its nearest bfloat16, ties away from zero, and its low 16 bits.
// Nearest-even has no such inverse, because an even bfloat16 is the nearest of 65,537 floats. The
// two roundings differ only at ties. The carry of a NaN with a large payload would overflow into
// the sign: such a NaN becomes the canonical one.
struct Halves {
  uint16_t high, low;
};

JDISTADAM_INLINE Halves Split(float x) {
  const uint32_t bits = BitsOf(CanonicalNan(x));
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<uint16_t>(bits)};
}

// The exact inverse: a low half of 0x8000 or more was rounded up, and is negative as an int16.
JDISTADAM_INLINE float Join(uint16_t high, uint16_t low) {
  return FloatOf((uint32_t{high} << 16) +
                 static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(low))));
}

// One element of an array of `dtype`, for tails and misaligned leaves.
JDISTADAM_INLINE float LoadOne(const void* base, Dtype dtype, size_t i) {
  switch (dtype) {
    case Dtype::kFloat32:
      return static_cast<const float*>(base)[i];
    case Dtype::kBfloat16:
      return FromBfloat16(static_cast<const uint16_t*>(base)[i]);
    case Dtype::kFloat16:
      return FromFloat16(static_cast<const uint16_t*>(base)[i]);
    default:  // half of a number, or a code that needs its block's scale
      break;
  }
  return 0.0f;
}

JDISTADAM_INLINE void StoreOne(void* base, Dtype dtype, size_t i, float x) {
  switch (dtype) {
    case Dtype::kFloat32:
      static_cast<float*>(base)[i] = CanonicalNan(x);
      break;
    case Dtype::kBfloat16:
      static_cast<uint16_t*>(base)[i] = ToBfloat16(x);
      break;
    case Dtype::kFloat16:
      static_cast<uint16_t*>(base)[i] = ToFloat16(x);
      break;
    default:
      break;
  }
}

}  // namespace jdistadam
