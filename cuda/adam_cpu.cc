// Adam on the CPU: threads take tiles and convert and update each in cache-sized blocks.
//
// traffic   one read of grad, one read and write of param, mu and nu, one write of out.
// threads, denormals   see parallel.h

#include <algorithm>
#include <utility>

#include "adam.h"
#include "adam_math.h"

// The compiler makes one copy of the block loop per instruction set and selects one at load time.
// Vector width changes no bits: lanes are independent and contraction is off.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(JDISTADAM_NO_CLONES)
#define JDISTADAM_VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define JDISTADAM_VECTORIZED
#endif

namespace jdistadam {
namespace {

constexpr size_t kTile = 1 << 15;  // elements that a thread takes at a time
constexpr size_t kBlock =
    1 << 7;  // elements converted at a time. Small, so that the buffers do not
             // compete for the same lines of the L1 cache: 1.6x the speed of 1024
static_assert(kBlock == kRun);

void* At(void* base, Dtype dtype, size_t i) {
  return static_cast<char*>(base) + i * ItemSize(dtype);
}

// Elements [begin, begin + n) of an array as float32: in place, or widened into `buffer`.
JDISTADAM_INLINE float* LoadBlock(void* base, Dtype dtype, size_t begin, float* __restrict__ buffer,
                                  size_t n) {
  void* block = At(base, dtype, begin);
  const uint16_t* __restrict__ halves = static_cast<const uint16_t*>(block);
  switch (dtype) {
    case Dtype::kFloat32:
      return static_cast<float*>(block);
    case Dtype::kBfloat16:
      for (size_t i = 0; i < n; ++i) buffer[i] = FromBfloat16(halves[i]);
      break;
    case Dtype::kFloat16:
      for (size_t i = 0; i < n; ++i) buffer[i] = FromFloat16(halves[i]);
      break;
    default:  // half of a number, or a code
      break;
  }
  return buffer;
}

// Rounds x into elements [begin, begin + n); a no-op if x is there already.
JDISTADAM_INLINE void StoreBlock(void* base, Dtype dtype, size_t begin, const float* x, size_t n) {
  void* block = At(base, dtype, begin);
  uint16_t* __restrict__ halves = static_cast<uint16_t*>(block);
  switch (dtype) {
    case Dtype::kFloat32:
      if (block != x) std::memcpy(block, x, n * sizeof(float));
      break;
    case Dtype::kBfloat16:
      for (size_t i = 0; i < n; ++i) halves[i] = ToBfloat16(x[i]);
      break;
    case Dtype::kFloat16:
      for (size_t i = 0; i < n; ++i) halves[i] = ToFloat16(x[i]);
      break;
    default:
      break;
  }
}

// Nobody writes to the gradients.
JDISTADAM_INLINE const float* LoadGrad(const AdamCall& call, const Leaf& leaf, size_t begin,
                                       float* __restrict__ buffer, size_t n) {
  return LoadBlock(const_cast<void*>(leaf.grad), call.dtypes.grad, begin, buffer, n);
}

// The parameters of elements [begin, begin + n), joined if they are stored as two halves.
JDISTADAM_INLINE const float* LoadParam(const AdamCall& call, const Leaf& leaf, size_t begin,
                                        float* __restrict__ buffer, size_t n) {
  if (call.mode != Mode::kStepSplit)
    return LoadBlock(leaf.param, call.dtypes.param, begin, buffer, n);
  const uint16_t* __restrict__ high = static_cast<const uint16_t*>(leaf.param) + begin;
  const uint16_t* __restrict__ low = static_cast<const uint16_t*>(leaf.out) + begin;
  for (size_t i = 0; i < n; ++i) buffer[i] = Join(high[i], low[i]);
  return buffer;
}

JDISTADAM_INLINE void StoreHalves(const Leaf& leaf, size_t begin, const float* __restrict__ x,
                                  size_t n) {
  uint16_t* __restrict__ high = static_cast<uint16_t*>(leaf.param) + begin;
  uint16_t* __restrict__ low = static_cast<uint16_t*>(leaf.out) + begin;
  for (size_t i = 0; i < n; ++i) {
    const Halves halves = Split(x[i]);
    high[i] = halves.high;
    low[i] = halves.low;
  }
}

// Advances m and v, and writes the new parameter (or, in Mode::kUpdate, the update) to `result`.
template <int kTerms, bool kUpdateOnly>
JDISTADAM_INLINE void UpdateBlock(const Coefficients c, float inv_scale,
                                  const float* __restrict__ g, const float* __restrict__ p,
                                  float* __restrict__ m, float* __restrict__ v,
                                  float* __restrict__ result, size_t n) {
  constexpr Terms terms = TermsOfBits(kTerms);
  for (size_t i = 0; i < n; ++i) {
    const float u = AdamUpdate(c, terms, g[i] * inv_scale, p[i], m[i], v[i]);
    m[i] = CanonicalNan(m[i]);
    v[i] = CanonicalNan(v[i]);
    result[i] = CanonicalNan(kUpdateOnly ? -u : p[i] - u);
  }
}

// The terms are constants in each case, so the loops have no branches.
template <bool kUpdateOnly, int... kCases>
JDISTADAM_INLINE void UpdateBlockByTerms(std::integer_sequence<int, kCases...>,
                                         const Coefficients& c, int32_t flags, float inv_scale,
                                         const float* g, const float* p, float* m, float* v,
                                         float* result, size_t n) {
  const int terms = BitsOf(TermsOf(c, flags & kNesterov, flags & kCautious));
  (void)((terms == kCases &&
          (UpdateBlock<kCases, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n), true)) ||
         ...);
}

// Elements [begin, begin + n) of a leaf, n <= kBlock.
JDISTADAM_VECTORIZED void StepBlock(const AdamCall& call, const Leaf& leaf, size_t begin,
                                    size_t n) {
  alignas(64) float buffers[5][kBlock];
  const Dtypes& t = call.dtypes;
  Coefficients c;
  std::memcpy(&c, call.coefficients + size_t(leaf.group) * kNumCoefficients, sizeof c);
  const float inv_scale = *call.inv_scale;
  const float* g = LoadGrad(call, leaf, begin, buffers[0], n);
  const float* p = LoadParam(call, leaf, begin, buffers[1], n);
  float* m = LoadBlock(leaf.mu, t.mu, begin, buffers[2], n);
  float* v = LoadBlock(leaf.nu, t.nu, begin, buffers[3], n);
  float* result = buffers[4];
  constexpr std::make_integer_sequence<int, 1 << kNumTerms> kCases;
  if (call.mode == Mode::kUpdate) {
    UpdateBlockByTerms<true>(kCases, c, call.flags, inv_scale, g, p, m, v, result, n);
  } else {
    UpdateBlockByTerms<false>(kCases, c, call.flags, inv_scale, g, p, m, v, result, n);
  }
  StoreBlock(leaf.mu, t.mu, begin, m, n);
  StoreBlock(leaf.nu, t.nu, begin, v, n);
  if (call.mode == Mode::kStepSplit) return StoreHalves(leaf, begin, result, n);
  if (call.mode != Mode::kUpdate) StoreBlock(leaf.param, t.param, begin, result, n);
  if (call.mode != Mode::kStep) StoreBlock(leaf.out, t.out, begin, result, n);
}

// Stores the squares of elements [begin, begin + n). Computes the formula a second time, so that
// StepBlock needs no variants.
JDISTADAM_VECTORIZED void MeasureBlock(const AdamCall& call, const Leaf& leaf, size_t begin,
                                       size_t n) {
  alignas(64) float buffers[4][kBlock], mu[kBlock], nu[kBlock], update[kBlock] = {};
  const Dtypes& t = call.dtypes;
  Coefficients c;
  std::memcpy(&c, call.coefficients + size_t(leaf.group) * kNumCoefficients, sizeof c);
  const float inv_scale = *call.inv_scale;
  const float* g = LoadGrad(call, leaf, begin, buffers[0], n);
  const float* p = LoadParam(call, leaf, begin, buffers[1], n);
  if (!*call.found_inf) {
    std::copy_n(LoadBlock(leaf.mu, t.mu, begin, buffers[2], n), n, mu);
    std::copy_n(LoadBlock(leaf.nu, t.nu, begin, buffers[3], n), n, nu);
    constexpr std::make_integer_sequence<int, 1 << kNumTerms> kCases;
    UpdateBlockByTerms<true>(kCases, c, call.flags, inv_scale, g, p, mu, nu, update, n);
  }
  RunSquares squares;
  for (size_t i = 0; i < n; ++i)  // update holds -u
    squares.Set(i, SquaresOf(g[i] * inv_scale, p[i] + update[i], update[i]));
  StoreRun(call.squares, call.squares.runs[size_t(&leaf - call.leaves.data())], begin, n, squares);
}

// The output of a skipped step: the unchanged parameter in `out`'s dtype, or an update of zero.
void SkipBlock(const AdamCall& call, const Leaf& leaf, size_t begin, size_t n) {
  if (call.mode == Mode::kStep || call.mode == Mode::kStepSplit) return;
  float buffer[kBlock] = {};
  const float* x = buffer;
  if (call.mode == Mode::kStepAndCast) {
    x = LoadBlock(leaf.param, call.dtypes.param, begin, buffer, n);
  }
  for (size_t i = 0; i < n; ++i) buffer[i] = CanonicalNan(x[i]);
  StoreBlock(leaf.out, call.dtypes.out, begin, buffer, n);
}

void RunTile(const AdamCall& call, const Leaf& leaf, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i += kBlock) {
    const size_t n = std::min(kBlock, end - i);
    if (call.squares.partials != nullptr) MeasureBlock(call, leaf, i, n);
    *call.found_inf ? SkipBlock(call, leaf, i, n) : StepBlock(call, leaf, i, n);
  }
}

}  // namespace

void AdamCpu(const AdamCall& call, const Threads& threads) {
  ForEachTile(call.leaves, kTile, threads, [&](size_t leaf, size_t begin, size_t end) {
    RunTile(call, call.leaves[leaf], begin, end);
  });
  if (call.squares.partials != nullptr) SumSegmentsCpu(call.squares, threads);
}

}  // namespace jdistadam
