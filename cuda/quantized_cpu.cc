// The step with coded moments or stochastic rounding on the CPU: threads take tiles, block by
// block. Simple loops of scalars; the formula is adam_math.h's.

#include <algorithm>

#include "adam_math.h"
#include "quantized.h"

namespace jdistadam {
namespace {

constexpr size_t kTile = 1 << 13;  // elements that a thread takes at a time: whole blocks
constexpr size_t kBlock = kBlockSize;

struct Block {
  float g[kBlock], p[kBlock], m[kBlock], v[kBlock];
  uint32_t words[kBlock] = {};  // random bits
};
static_assert(kBlock == kRun);

template <Moment kMoment>
void LoadMoment(const void* base, Dtype dtype, const float* scales, size_t begin, size_t n,
                float* x) {
  if (!IsCoded(dtype)) {
    for (size_t i = 0; i < n; ++i) x[i] = LoadOne(base, dtype, begin + i);
    return;
  }
  WithCode<kMoment>(dtype, [&](auto code) {
    using C = decltype(code);
    const auto* codes = static_cast<const typename C::Word*>(base) + begin;
    for (size_t i = 0; i < n; ++i) x[i] = Decode<C>(codes[i], scales[begin / kBlock]);
  });
}

template <bool kStochastic>
void StoreRounded(void* base, Dtype dtype, size_t i, float x, uint32_t word) {
  if (dtype == Dtype::kBfloat16) {
    static_cast<uint16_t*>(base)[i] = RoundToBfloat16<kStochastic>(x, word);
  } else if (dtype == Dtype::kFloat16) {
    static_cast<uint16_t*>(base)[i] = RoundToFloat16<kStochastic>(x, word);
  } else {
    StoreOne(base, dtype, i, x);
  }
}

template <Moment kMoment>
uint32_t WordFor(uint32_t word) {
  return kMoment == Moment::kMu ? WordForMu(word) : WordForNu(word);
}

// Returns the scale.
template <typename C, bool kStochastic>
float StoreCodes(typename C::Word* codes, size_t n, const float* x, const uint32_t* words) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t word = WordFor<C::kMoment>(words[i]);
    largest = std::max(largest, RoundedMagnitude<C, kStochastic>(x[i], word));
  }
  const float scale = ScaleOf<C>(largest);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t word = WordFor<C::kMoment>(words[i]);
    codes[i] = static_cast<typename C::Word>(Encode<C, kStochastic>(x[i], scale, word));
  }
  return scale;
}

template <Moment kMoment, bool kStochastic>
void StoreMoment(void* base, Dtype dtype, float* scales, size_t begin, size_t n, const float* x,
                 const uint32_t* words) {
  if (!IsCoded(dtype)) {
    for (size_t i = 0; i < n; ++i)
      StoreRounded<kStochastic>(base, dtype, begin + i, x[i], WordFor<kMoment>(words[i]));
    return;
  }
  WithCode<kMoment>(dtype, [&](auto code) {
    using C = decltype(code);
    auto* codes = static_cast<typename C::Word*>(base) + begin;
    scales[begin / kBlock] = StoreCodes<C, kStochastic>(codes, n, x, words);
  });
}

void LoadGrad(const AdamCall& call, const Leaf& leaf, size_t begin, size_t n, float* g) {
  for (size_t i = 0; i < n; ++i) g[i] = LoadOne(leaf.grad, call.dtypes.grad, begin + i);
}

float LoadParam(const AdamCall& call, const Leaf& leaf, size_t i) {
  if (call.mode != Mode::kStepSplit) return LoadOne(leaf.param, call.dtypes.param, i);
  return Join(static_cast<const uint16_t*>(leaf.param)[i],
              static_cast<const uint16_t*>(leaf.out)[i]);
}

void LoadRandom(const QuantizedCall& call, const QuantizedLeaf& leaf, size_t begin, size_t n,
                uint32_t* words) {
  const uint32_t count = static_cast<uint32_t>(*call.count);
  const Origin origin = OriginOf(call.parts, leaf, begin);
  Random4 drawn{};
  for (size_t i = 0; i < n; ++i) {
    const uint64_t index = origin.index + i;
    if (i == 0 || index % 4 == 0)
      drawn = Philox(call.key[0], call.key[1], index / 4, origin.id, count);
    words[i] = drawn.words[index % 4];
  }
}

// Stores the sums of squares of a block, if they are asked for.
void Measure(const QuantizedCall& call, const QuantizedLeaf& leaf, size_t begin, size_t n,
             const RunSquares& squares) {
  const SquaresCall& to = call.adam.squares;
  if (to.partials != nullptr)
    StoreRun(to, to.runs[size_t(&leaf - call.leaves.data())], begin, n, squares);
}

template <bool kStochastic>
void StepBlock(const QuantizedCall& call, const QuantizedLeaf& leaf, size_t begin, size_t n) {
  const AdamCall& adam = call.adam;
  const Dtypes& t = adam.dtypes;
  const bool split = adam.mode == Mode::kStepSplit;
  uint16_t* high = static_cast<uint16_t*>(leaf.param) + begin;
  uint16_t* low = static_cast<uint16_t*>(leaf.out) + begin;
  Block b;
  RunSquares squares;
  Coefficients c;
  std::memcpy(&c, adam.coefficients + size_t(leaf.group) * kNumCoefficients, sizeof c);
  const Terms terms = TermsOf(c, adam.flags & kNesterov, adam.flags & kCautious);
  LoadGrad(adam, leaf, begin, n, b.g);
  LoadMoment<Moment::kMu>(leaf.mu, t.mu, leaf.mu_scales, begin, n, b.m);
  LoadMoment<Moment::kNu>(leaf.nu, t.nu, leaf.nu_scales, begin, n, b.v);
  for (size_t i = 0; i < n; ++i) b.p[i] = LoadParam(adam, leaf, begin + i);
  if (kStochastic) LoadRandom(call, leaf, begin, n, b.words);
  for (size_t i = 0; i < n; ++i) {
    const float u = AdamUpdate(c, terms, b.g[i] * *adam.inv_scale, b.p[i], b.m[i], b.v[i]);
    squares.Set(i, SquaresOf(b.g[i] * *adam.inv_scale, b.p[i] - u, u));
    b.p[i] = adam.mode == Mode::kUpdate ? -u : b.p[i] - u;
  }
  Measure(call, leaf, begin, n, squares);
  StoreMoment<Moment::kMu, kStochastic>(leaf.mu, t.mu, leaf.mu_scales, begin, n, b.m, b.words);
  StoreMoment<Moment::kNu, kStochastic>(leaf.nu, t.nu, leaf.nu_scales, begin, n, b.v, b.words);
  for (size_t i = 0; i < n; ++i) {
    if (split) {
      const Halves halves = Split(b.p[i]);
      high[i] = halves.high;
      low[i] = halves.low;
    } else if (adam.mode == Mode::kStep) {
      StoreRounded<kStochastic>(leaf.param, t.param, begin + i, b.p[i], WordForParam(b.words[i]));
    } else {
      if (adam.mode == Mode::kStepAndCast) StoreOne(leaf.param, t.param, begin + i, b.p[i]);
      StoreOne(leaf.out, t.out, begin + i, b.p[i]);
    }
  }
}

void MeasureSkipped(const QuantizedCall& call, const QuantizedLeaf& leaf, size_t begin, size_t n) {
  const AdamCall& adam = call.adam;
  float g[kBlock];
  RunSquares squares;
  if (adam.squares.partials == nullptr) return;
  LoadGrad(adam, leaf, begin, n, g);
  for (size_t i = 0; i < n; ++i)
    squares.Set(i, SquaresOf(g[i] * *adam.inv_scale, LoadParam(adam, leaf, begin + i), 0.0f));
  Measure(call, leaf, begin, n, squares);
}

// The output of a skipped step: the unchanged parameter in `out`'s dtype, or an update of zero.
void SkipBlock(const AdamCall& call, const Leaf& leaf, size_t begin, size_t n) {
  if (call.mode == Mode::kStep || call.mode == Mode::kStepSplit) return;
  for (size_t i = begin; i < begin + n; ++i) {
    const bool casts = call.mode == Mode::kStepAndCast;
    StoreOne(leaf.out, call.dtypes.out, i,
             casts ? LoadOne(leaf.param, call.dtypes.param, i) : 0.0f);
  }
}

void RunTile(const QuantizedCall& call, const QuantizedLeaf& leaf, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i += kBlock) {
    const size_t n = std::min(kBlock, end - i);
    if (*call.adam.found_inf) {
      MeasureSkipped(call, leaf, i, n);
      SkipBlock(call.adam, leaf, i, n);
    } else if (call.is_stochastic) {
      StepBlock<true>(call, leaf, i, n);
    } else {
      StepBlock<false>(call, leaf, i, n);
    }
  }
}

}  // namespace

void QuantizedCpu(const QuantizedCall& call, const Threads& threads) {
  ForEachTile(call.leaves, kTile, threads, [&](size_t leaf, size_t begin, size_t end) {
    RunTile(call, call.leaves[leaf], begin, end);
  });
  if (call.adam.squares.partials != nullptr) SumSegmentsCpu(call.adam.squares, threads);
}

}  // namespace jdistadam
