// The Adam formula: the only copy in C++ and CUDA.
//
//   g <- grad * inv_scale + l2 * p
//   m <- (1 - b1) * g + b1 * m
//   v <- (1 - b2) * (g * g) + b2 * v
//   m_hat <- m / c1                                    c1 = 1 - b1^t
//            b1 * (m / c1_next) + (1 - b1) * (g / c1)   with Nesterov, c1_next = 1 - b1^(t+1)
//   u <- m_hat / (sqrt(v / c2 + eps_root) + eps)       c2 = 1 - b2^t
//   u <- lr * (u + weight_decay * p)                   if cautious, only u where u * p < 0
//   p <- p - u
//
// Everything is float32. The order of the operations and the single rounding of each are part of
// the contract: reference.py repeats them one numpy operation at a time and tests compare bits.
// This file must therefore be compiled without contraction into fused multiply-adds and without
// fast-math; CMakeLists.txt has the flags.
//
// The coefficients arrive as float32 from XLA. Computed here they would have other bits: see
// core/hyperparameters.py, [Note: coefficients in optax's own expressions].
#pragma once

#include <cmath>

#include "dtype.h"

namespace jdistadam {

// One row of the `coefficients` operand, in the order of hyperparameters.py.
struct Coefficients {
  float learning_rate;
  float b1, one_minus_b1;
  float b2, one_minus_b2;
  float eps, eps_root;
  float weight_decay;
  float c1, c1_next, c2;
  float l2;
};
constexpr int kNumCoefficients = sizeof(Coefficients) / sizeof(float);

// Bits of the attribute `flags`, in the order of FLAGS in hyperparameters.py.
constexpr int32_t kNesterov = 1, kCautious = 2, kAllFlags = 3;

// Which of the optional terms exist. Without decay there is no term: p is not read, so an infinite
// parameter does not turn 0 * p into a NaN.
struct Terms {
  bool nesterov, weight_decay, l2, cautious;
};
constexpr int kNumTerms = 4;

JDISTADAM_INLINE Terms TermsOf(const Coefficients& c, bool nesterov, bool cautious) {
  return {nesterov, c.weight_decay != 0.0f, c.l2 != 0.0f, cautious};
}

// The same as a number below 1 << kNumTerms, and back.
JDISTADAM_INLINE constexpr int BitsOf(const Terms& t) {
  return t.nesterov | t.weight_decay << 1 | t.l2 << 2 | t.cautious << 3;
}

JDISTADAM_INLINE constexpr Terms TermsOfBits(int bits) {
  return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
}

// How AdamUpdate divides and takes roots. Other policies give the same bits where they are allowed.
struct IeeeArithmetic {
  JDISTADAM_INLINE float ByC1(const Coefficients& c, float x) const { return x / c.c1; }
  JDISTADAM_INLINE float Divide(float x, float y) const { return x / y; }
  JDISTADAM_INLINE float RootOf(const Coefficients& c, float v) const {
    return sqrtf(v / c.c2 + c.eps_root);
  }
};

// The update u of one element from its unscaled gradient g; updates m and v in place. p - u is the
// new parameter.
template <typename Arithmetic = IeeeArithmetic>
JDISTADAM_INLINE float AdamUpdate(const Coefficients& c, const Terms& terms, float g, float p,
                                  float& m, float& v, const Arithmetic& by = {}) {
  if (terms.l2) g = g + c.l2 * p;
  m = c.one_minus_b1 * g + c.b1 * m;
  v = c.one_minus_b2 * (g * g) + c.b2 * v;
  const float m_hat =
      terms.nesterov ? c.b1 * (m / c.c1_next) + c.one_minus_b1 * by.ByC1(c, g) : by.ByC1(c, m);
  float u = by.Divide(m_hat, by.RootOf(c, v) + c.eps);
  if (terms.weight_decay && !(terms.cautious && u * p < 0.0f)) u = u + c.weight_decay * p;
  return c.learning_rate * u;
}

}  // namespace jdistadam
