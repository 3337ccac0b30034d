// Adam on the CPU: tiles handed to threads, each tile converted and updated in cache-sized blocks.
//
// traffic   one read of grad, one read and write of param, mu and nu, one write of out.
// threads   the result does not depend on their number: every element is on its own.
// denormals XLA runs handlers with flush-to-zero on; CUDA and the oracle keep denormals. Each tile
//           therefore turns flushing off while it works and restores the caller's setting.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "adam.h"
#include "adam_math.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

// The compiler makes one copy of the block loop for each instruction set and picks at load time.
// Vector width changes no bits: lanes are independent and contraction is off.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(JDISTADAM_NO_CLONES)
#define JDISTADAM_VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define JDISTADAM_VECTORIZED
#endif

namespace jdistadam {
namespace {

constexpr size_t kTile = 1 << 15;  // elements a thread takes at a time
constexpr size_t kBlock =
    1 << 7;  // elements converted at a time. Small, so that the buffers do not
             // compete for the same lines of the L1 cache: 1.6x the speed of 1024

// Turns flush-to-zero and denormals-are-zero off for a scope.
class KeepDenormals {
 public:
#if defined(__x86_64__)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

void* At(void* base, Dtype dtype, size_t i) {
  return static_cast<char*>(base) + i * ItemSize(dtype);
}

// Elements [begin, begin + n) of an array as float32: where they lie, or widened into `buffer`.
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
  }
  return buffer;
}

// Rounds x into elements [begin, begin + n); nothing is left to do where x lies there already.
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
  }
}

// Advances m and v, and writes the new parameter (or, in Mode::kUpdate, the update) to `result`.
template <int kTerms, bool kUpdateOnly>
JDISTADAM_INLINE void UpdateBlock(const Coefficients c, float inv_scale,
                                  const float* __restrict__ g, const float* __restrict__ p,
                                  float* __restrict__ m, float* __restrict__ v,
                                  float* __restrict__ result, size_t n) {
  constexpr Terms terms{(kTerms & 4) != 0, (kTerms & 2) != 0, (kTerms & 1) != 0};
  for (size_t i = 0; i < n; ++i) {
    const float u = AdamUpdate(c, terms, g[i] * inv_scale, p[i], m[i], v[i]);
    m[i] = CanonicalNan(m[i]);
    v[i] = CanonicalNan(v[i]);
    result[i] = CanonicalNan(kUpdateOnly ? -u : p[i] - u);
  }
}

// The terms are constants in each case, so that the loops are free of branches.
template <bool kUpdateOnly>
JDISTADAM_INLINE void UpdateBlockByTerms(const Coefficients& c, bool nesterov, float inv_scale,
                                         const float* g, const float* p, float* m, float* v,
                                         float* result, size_t n) {
  const Terms terms = TermsOf(c, nesterov);
  // clang-format off
  switch (terms.nesterov << 2 | terms.weight_decay << 1 | int{terms.l2}) {
    case 0: UpdateBlock<0, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n); break;
    case 1: UpdateBlock<1, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n); break;
    case 2: UpdateBlock<2, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n); break;
    case 3: UpdateBlock<3, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n); break;
    case 4: UpdateBlock<4, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n); break;
    case 5: UpdateBlock<5, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n); break;
    case 6: UpdateBlock<6, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n); break;
    case 7: UpdateBlock<7, kUpdateOnly>(c, inv_scale, g, p, m, v, result, n); break;
  }
  // clang-format on
}

// Elements [begin, begin + n) of a leaf, n <= kBlock.
JDISTADAM_VECTORIZED void StepBlock(const AdamCall& call, const Leaf& leaf, size_t begin,
                                    size_t n) {
  alignas(64) float buffers[5][kBlock];
  const Dtypes& t = call.dtypes;
  Coefficients c;
  std::memcpy(&c, call.coefficients + size_t(leaf.group) * kNumCoefficients, sizeof c);
  const float inv_scale = *call.inv_scale;
  const float* g = LoadBlock(const_cast<void*>(leaf.grad), t.grad, begin, buffers[0], n);
  const float* p = LoadBlock(leaf.param, t.param, begin, buffers[1], n);
  float* m = LoadBlock(leaf.mu, t.mu, begin, buffers[2], n);
  float* v = LoadBlock(leaf.nu, t.nu, begin, buffers[3], n);
  float* result = buffers[4];
  if (call.mode == Mode::kUpdate) {
    UpdateBlockByTerms<true>(c, call.nesterov, inv_scale, g, p, m, v, result, n);
  } else {
    UpdateBlockByTerms<false>(c, call.nesterov, inv_scale, g, p, m, v, result, n);
  }
  StoreBlock(leaf.mu, t.mu, begin, m, n);
  StoreBlock(leaf.nu, t.nu, begin, v, n);
  if (call.mode != Mode::kUpdate) StoreBlock(leaf.param, t.param, begin, result, n);
  if (call.mode != Mode::kStep) StoreBlock(leaf.out, t.out, begin, result, n);
}

// What a skipped step writes: the unchanged parameter in `out`'s dtype, or an update of zero.
void SkipBlock(const AdamCall& call, const Leaf& leaf, size_t begin, size_t n) {
  if (call.mode == Mode::kStep) return;
  float buffer[kBlock] = {};
  const float* x = buffer;
  if (call.mode == Mode::kStepAndCast) {
    x = LoadBlock(leaf.param, call.dtypes.param, begin, buffer, n);
  }
  for (size_t i = 0; i < n; ++i) buffer[i] = CanonicalNan(x[i]);
  StoreBlock(leaf.out, call.dtypes.out, begin, buffer, n);
}

struct Tile {
  const Leaf* leaf;
  size_t begin, size;
};

void RunTile(const AdamCall& call, const Tile& tile) {
  const KeepDenormals keep_denormals;
  for (size_t i = 0; i < tile.size; i += kBlock) {
    const size_t n = std::min(kBlock, tile.size - i);
    *call.found_inf ? SkipBlock(call, *tile.leaf, tile.begin + i, n)
                    : StepBlock(call, *tile.leaf, tile.begin + i, n);
  }
}

// Tiles are taken from a shared counter by the calling thread and by helpers. The caller never
// waits for a helper that has not started (a full pool could then deadlock): it works until the
// counter runs out and waits only for tiles that are being worked on. A helper that starts late
// finds the counter exhausted and touches nothing but this shared object.
struct Work {
  const AdamCall* call;
  std::vector<Tile> tiles;
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  size_t done = 0;  // guarded by mutex

  void Run() {
    size_t mine = 0;
    for (size_t i; (i = next.fetch_add(1)) < tiles.size(); ++mine) RunTile(*call, tiles[i]);
    if (mine == 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    done += mine;
    if (done == tiles.size()) all_done.notify_all();
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done == tiles.size(); });
  }
};

}  // namespace

void AdamCpu(const AdamCall& call, int num_threads, const Schedule& schedule) {
  auto work = std::make_shared<Work>();
  work->call = &call;
  for (const Leaf& leaf : call.leaves) {
    for (size_t begin = 0; begin < leaf.size; begin += kTile) {
      work->tiles.push_back({&leaf, begin, std::min(kTile, leaf.size - begin)});
    }
  }
  const size_t helpers = std::min<size_t>(std::max(num_threads - 1, 0), work->tiles.size() / 2);
  for (size_t i = 0; i < helpers; ++i) schedule([work] { work->Run(); });
  work->Run();
  work->Wait();
}

}  // namespace jdistadam
