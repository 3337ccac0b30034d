// Vectors of kVector elements: how a thread loads, widens, rounds and stores them.
//
// Loading and widening are separate, so the loads of all operands are in flight before the first
// use. The conversions are the hardware's. They round like those of dtype.h except for NaN, whose
// payload they choose: use StoreOne to store a NaN.
#pragma once

#include "dtype.h"

namespace jdistadam {

// kVector elements as stored in memory: 16 bytes of float32 or 8 of 16 bits for kVector = 4.
template <int kVector>
struct Packed {
  uint32_t words[kVector];  // 16-bit dtypes use the first half
};

template <int kVector>
__device__ __forceinline__ bool IsAligned(const void* base, Dtype dtype) {
  const size_t alignment = dtype == Dtype::kFloat32 ? 16 : 2 * kVector;
  return reinterpret_cast<uintptr_t>(base) % alignment == 0;
}

template <int kVector>
__device__ __forceinline__ Packed<kVector> LoadVector(const void* base, Dtype dtype, size_t i) {
  static_assert(kVector == 4 || kVector == 8);
  Packed<kVector> packed;
  const char* at = static_cast<const char*>(base) + i * ItemSize(dtype);
  if (dtype != Dtype::kFloat32 && kVector == 4) {
    const uint2 w = *reinterpret_cast<const uint2*>(at);
    packed.words[0] = w.x, packed.words[1] = w.y;
    return packed;
  }
#pragma unroll
  for (int k = 0; k < (dtype == Dtype::kFloat32 ? kVector : kVector / 2); k += 4) {
    const uint4 w = reinterpret_cast<const uint4*>(at)[k / 4];
    packed.words[k] = w.x, packed.words[k + 1] = w.y;
    packed.words[k + 2] = w.z, packed.words[k + 3] = w.w;
  }
  return packed;
}

template <int kVector>
__device__ __forceinline__ void Widen(const Packed<kVector>& packed, Dtype dtype,
                                      float (&x)[kVector]) {
  if (dtype == Dtype::kFloat32) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) x[k] = FloatOf(packed.words[k]);
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; k += 2) {
    const uint32_t word = packed.words[k / 2];
    if (dtype == Dtype::kBfloat16) {
      x[k] = FloatOf(word << 16);
      x[k + 1] = FloatOf(word & 0xffff0000u);
    } else {
      asm("cvt.f32.f16 %0, %1;" : "=f"(x[k]) : "h"(static_cast<uint16_t>(word)));
      asm("cvt.f32.f16 %0, %1;" : "=f"(x[k + 1]) : "h"(static_cast<uint16_t>(word >> 16)));
    }
  }
}

// Writes kVector elements of 16 bits, two per word.
template <int kVector>
__device__ __forceinline__ void StoreWords(void* base, size_t i,
                                           const uint32_t (&words)[kVector / 2]) {
  uint16_t* at = static_cast<uint16_t*>(base) + i;
  if (kVector == 4) {
    *reinterpret_cast<uint64_t*>(at) = uint64_t{words[1]} << 32 | words[0];  // one store
  } else {
    *reinterpret_cast<uint4*>(at) = {words[0], words[1], words[kVector / 2 - 2],
                                     words[kVector / 2 - 1]};
  }
}

// Rounds to nearest even. x holds no NaN.
template <int kVector>
__device__ __forceinline__ void StoreVector(void* base, Dtype dtype, size_t i,
                                            const float (&x)[kVector]) {
  if (dtype == Dtype::kFloat32) {
    float4* at = reinterpret_cast<float4*>(static_cast<float*>(base) + i);
#pragma unroll
    for (int k = 0; k < kVector; k += 4) at[k / 4] = float4{x[k], x[k + 1], x[k + 2], x[k + 3]};
    return;
  }
  uint32_t words[kVector / 2];
#pragma unroll
  for (int k = 0; k < kVector; k += 2) {
#if __CUDA_ARCH__ < 800  // has no conversions of two, and none to bfloat16
    const auto round = [&](float y) {
      return uint32_t{dtype == Dtype::kBfloat16 ? ToBfloat16(y) : ToFloat16(y)};
    };
    words[k / 2] = round(x[k]) | round(x[k + 1]) << 16;
#else
    if (dtype == Dtype::kBfloat16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[k / 2]) : "f"(x[k + 1]), "f"(x[k]));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[k / 2]) : "f"(x[k + 1]), "f"(x[k]));
    }
#endif
  }
  StoreWords<kVector>(base, i, words);
}

// The float32s whose halves (dtype.h) are in two vectors of 16 bits, and back. x holds no NaN.
template <int kVector>
__device__ __forceinline__ void JoinVectors(const Packed<kVector>& high, const Packed<kVector>& low,
                                            float (&x)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const int shift = k % 2 ? 16 : 0;
    x[k] = Join(static_cast<uint16_t>(high.words[k / 2] >> shift),
                static_cast<uint16_t>(low.words[k / 2] >> shift));
  }
}

template <int kVector>
__device__ __forceinline__ void StoreHalves(void* high, void* low, size_t i,
                                            const float (&x)[kVector]) {
  uint32_t highs[kVector / 2], lows[kVector / 2];
#pragma unroll
  for (int k = 0; k < kVector; k += 2) {
    const uint32_t a = BitsOf(x[k]), b = BitsOf(x[k + 1]);
    highs[k / 2] = (a + 0x8000u) >> 16 | ((b + 0x8000u) & 0xffff0000u);
    lows[k / 2] = (a & 0xffffu) | b << 16;
  }
  StoreWords<kVector>(high, i, highs);
  StoreWords<kVector>(low, i, lows);
}

// A term or a sum of PairwiseSum (pairwise.h).
template <int kVector>
struct VectorSum {
  float x[kVector];

  __device__ __forceinline__ VectorSum operator+(const VectorSum& other) const {
    VectorSum sum;
#pragma unroll
    for (int k = 0; k < kVector; ++k) sum.x[k] = x[k] + other.x[k];
    return sum;
  }
  __device__ __forceinline__ void CopyTo(float (&to)[kVector]) const {
#pragma unroll
    for (int k = 0; k < kVector; ++k) to[k] = x[k];
  }
};

}  // namespace jdistadam
