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
#define JDISTADAM_VECTORIZED \
  __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define JDISTADAM_VECTORIZED
#endif

namespace jdistadam {
namespace {

constexpr size_t kTile = 1 << 15;   // elements a thread takes at a time
constexpr size_t kBlock = 1 << 10;  // elements converted at a time; four float buffers fit in L1

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

const void* At(const void* base, Dtype dtype, size_t i) {
  return static_cast<const char*>(base) + i * ItemSize(dtype);
}
void* At(void* base, Dtype dtype, size_t i) {
  return static_cast<char*>(base) + i * ItemSize(dtype);
}

JDISTADAM_INLINE void LoadBlock(float* __restrict__ x, const void* base, Dtype dtype, size_t n) {
  const uint16_t* halves = static_cast<const uint16_t*>(base);
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(x, base, n * sizeof(float));
      break;
    case Dtype::kBfloat16:
      for (size_t i = 0; i < n; ++i) x[i] = FromBfloat16(halves[i]);
      break;
    case Dtype::kFloat16:
      for (size_t i = 0; i < n; ++i) x[i] = FromFloat16(halves[i]);
      break;
  }
}

JDISTADAM_INLINE void StoreBlock(void* base, Dtype dtype, const float* __restrict__ x, size_t n) {
  float* floats = static_cast<float*>(base);
  uint16_t* halves = static_cast<uint16_t*>(base);
  switch (dtype) {
    case Dtype::kFloat32:
      for (size_t i = 0; i < n; ++i) floats[i] = CanonicalNan(x[i]);
      break;
    case Dtype::kBfloat16:
      for (size_t i = 0; i < n; ++i) halves[i] = ToBfloat16(x[i]);
      break;
    case Dtype::kFloat16:
      for (size_t i = 0; i < n; ++i) halves[i] = ToFloat16(x[i]);
      break;
  }
}

JDISTADAM_INLINE void UpdateBlock(const Coefficients& c, bool nesterov, bool decay,
                                  const float* __restrict__ g, const float* __restrict__ p,
                                  float* __restrict__ m, float* __restrict__ v,
                                  float* __restrict__ u, size_t n) {
  for (size_t i = 0; i < n; ++i) u[i] = AdamUpdate(c, nesterov, decay, g[i], p[i], m[i], v[i]);
}

// Elements [begin, begin + n) of a leaf, n <= kBlock.
JDISTADAM_VECTORIZED void StepBlock(const AdamCall& call, const Leaf& leaf, size_t begin,
                                    size_t n) {
  alignas(64) float g[kBlock], p[kBlock], m[kBlock], v[kBlock], u[kBlock];
  const Dtypes& t = call.dtypes;
  Coefficients c;
  std::memcpy(&c, call.coefficients + size_t(leaf.group) * kNumCoefficients, sizeof c);
  const float inv_scale = *call.inv_scale;
  const bool decay = c.weight_decay != 0.0f;

  LoadBlock(g, At(leaf.grad, t.grad, begin), t.grad, n);
  LoadBlock(p, At(leaf.param, t.param, begin), t.param, n);
  LoadBlock(m, At(leaf.mu, t.mu, begin), t.mu, n);
  LoadBlock(v, At(leaf.nu, t.nu, begin), t.nu, n);
  for (size_t i = 0; i < n; ++i) g[i] = g[i] * inv_scale;
  // Constant flags, so that each of the four loops is free of branches.
  if (call.nesterov) {
    decay ? UpdateBlock(c, true, true, g, p, m, v, u, n)
          : UpdateBlock(c, true, false, g, p, m, v, u, n);
  } else {
    decay ? UpdateBlock(c, false, true, g, p, m, v, u, n)
          : UpdateBlock(c, false, false, g, p, m, v, u, n);
  }
  StoreBlock(At(leaf.mu, t.mu, begin), t.mu, m, n);
  StoreBlock(At(leaf.nu, t.nu, begin), t.nu, v, n);
  if (call.mode == Mode::kUpdate) {
    for (size_t i = 0; i < n; ++i) u[i] = -u[i];
    StoreBlock(At(leaf.out, t.out, begin), t.out, u, n);
    return;
  }
  for (size_t i = 0; i < n; ++i) p[i] = p[i] - u[i];
  StoreBlock(At(leaf.param, t.param, begin), t.param, p, n);
  if (call.mode == Mode::kStepAndCast) StoreBlock(At(leaf.out, t.out, begin), t.out, p, n);
}

// What a skipped step writes: the unchanged parameter in `out`'s dtype, or an update of zero.
void SkipBlock(const AdamCall& call, const Leaf& leaf, size_t begin, size_t n) {
  if (call.mode == Mode::kStep) return;
  float x[kBlock] = {};
  if (call.mode == Mode::kStepAndCast) {
    LoadBlock(x, At(leaf.param, call.dtypes.param, begin), call.dtypes.param, n);
  }
  StoreBlock(At(leaf.out, call.dtypes.out, begin), call.dtypes.out, x, n);
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
