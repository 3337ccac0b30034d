// Chunks on their way through shared memory: each thread has its own elements of the next chunks
// copied there while it steps one, so that none waits for memory and none takes registers.
#pragma once

#include "compact_codes.cuh"

namespace jdistadam {
namespace {

// At once on their way or being stepped: with two, steps take 2 to 6 % longer.
constexpr int kStages = 3;

// ---- Where arrays are ----

// A leaf's arrays: as pointers in registers, with which an address is one instruction.
struct Arrays {
  char *grad, *param, *mu, *nu, *out, *mu_scales, *nu_scales;
};

// The compiler would load it again for every use, as it is an argument of the kernel.
__device__ __forceinline__ char* InRegister(const void* x) {
  asm("" : "+l"(x));
  __builtin_assume(__isGlobal(x));
  return static_cast<char*>(const_cast<void*>(x));
}

template <typename Types>
__device__ __forceinline__ Arrays ArraysOf(const CompactLeaf& leaf) {
  Arrays y{};
  y.grad = InRegister(leaf.grad);
  y.param = InRegister(leaf.param);
  y.mu = InRegister(leaf.mu);
  y.nu = InRegister(leaf.nu);
  if (Types::kMode != Mode::kStep) y.out = InRegister(leaf.out);
  if (IsCoded(Types::mu)) y.mu_scales = InRegister(leaf.mu_scales);
  if (IsCoded(Types::nu)) y.nu_scales = InRegister(leaf.nu_scales);
  return y;
}

__device__ __forceinline__ char* ElementAt(char* array, Dtype dtype, uint32_t i) {
  return array + uint64_t{i} * ItemSize(dtype);
}
__device__ __forceinline__ char* ScaleAt(char* scales, uint32_t i) {
  return scales + uint64_t{i / kBlockSize} * sizeof(float);
}

// A warp's stage has planes of 16 bytes for each thread: one or two for each array, one for mu and
// nu together where both have 8 bits, and one for their scales.
constexpr uint32_t kSlot = 16, kPlane = 32 * kSlot;  // bytes
template <typename Types>
struct Stage {
  // Of a thread, and of a warp.
  JDISTADAM_INLINE static constexpr uint32_t BytesOf(Dtype dtype) {
    return kWide * ItemSize(dtype);
  }
  JDISTADAM_INLINE static constexpr uint32_t PlanesOf(Dtype dtype) {
    return BytesOf(dtype) / kSlot * kPlane;
  }
  static constexpr bool kIsOnePlane = BytesOf(Types::mu) == 8;
  static_assert(kIsOnePlane == (BytesOf(Types::nu) == 8) &&
                IsCoded(Types::mu) == IsCoded(Types::nu));
  static constexpr uint32_t kGrad = 0, kParam = PlanesOf(Types::grad),
                            kMu = kParam + PlanesOf(Types::param),
                            kNu = kMu + (kIsOnePlane ? 8 : PlanesOf(Types::mu)),
                            kLow = kIsOnePlane ? kMu + kPlane : kNu + PlanesOf(Types::nu),
                            kScales = kLow + (Types::kMode == Mode::kStepSplit ? kPlane : 0),
                            kSize = kScales + (IsCoded(Types::mu) ? kPlane : 0);
};

// ---- To shared memory ----

// With 32 bytes of a thread, two copies each read half of every sector: they go through the L1
// cache, so that the second one finds its halves there.
template <uint32_t kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t to, const char* from) {
  if constexpr (kBytes == 32) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to + kPlane), "l"(from + 16)
                 : "memory");
  } else if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
                 : "memory");
  }
}

// Begins to copy the elements from i on to a stage, where `slot` is this thread's.
template <typename Types>
__device__ __forceinline__ void BeginCopy(const Arrays& from, uint32_t i, uint32_t slot) {
  using S = Stage<Types>;
  CopyAsync<S::BytesOf(Types::grad)>(slot + S::kGrad, ElementAt(from.grad, Types::grad, i));
  CopyAsync<S::BytesOf(Types::param)>(slot + S::kParam, ElementAt(from.param, Types::param, i));
  CopyAsync<S::BytesOf(Types::mu)>(slot + S::kMu, ElementAt(from.mu, Types::mu, i));
  CopyAsync<S::BytesOf(Types::nu)>(slot + S::kNu, ElementAt(from.nu, Types::nu, i));
  if constexpr (Types::kMode == Mode::kStepSplit)
    CopyAsync<16>(slot + S::kLow, ElementAt(from.out, Dtype::kUint16, i));
  if constexpr (IsCoded(Types::mu)) {
    CopyAsync<4>(slot + S::kScales, ScaleAt(from.mu_scales, i));
    CopyAsync<4>(slot + S::kScales + 4, ScaleAt(from.nu_scales, i));
  }
}

// Ends a group of copies, which may be empty; waits until all but the last kOthers groups have
// arrived. Each thread waits for its own copies, and reads no others: there is no barrier.
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kOthers>
__device__ __forceinline__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOthers) : "memory");
}

// ---- From shared memory ----

// A thread's elements of each array, as they are in memory.
struct Loaded {
  Packed<kWide> grad, param, mu, nu, low;
  float mu_scale, nu_scale;
};

__device__ __forceinline__ uint4 LoadShared16(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

template <uint32_t kBytes>
__device__ __forceinline__ Packed<kWide> LoadShared(uint32_t from) {
  static_assert(kBytes == 16 || kBytes == 32);
  const uint4 a = LoadShared16(from);
  if constexpr (kBytes == 16) return {{a.x, a.y, a.z, a.w}};
  const uint4 b = LoadShared16(from + kPlane);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

template <typename Types>
__device__ __forceinline__ Loaded LoadStage(uint32_t slot) {
  using S = Stage<Types>;
  Loaded x;
  x.grad = LoadShared<S::BytesOf(Types::grad)>(slot + S::kGrad);
  x.param = LoadShared<S::BytesOf(Types::param)>(slot + S::kParam);
  if constexpr (S::kIsOnePlane) {
    const uint4 both = LoadShared16(slot + S::kMu);
    x.mu = {{both.x, both.y}};
    x.nu = {{both.z, both.w}};
  } else {
    x.mu = LoadShared<S::BytesOf(Types::mu)>(slot + S::kMu);
    x.nu = LoadShared<S::BytesOf(Types::nu)>(slot + S::kNu);
  }
  if constexpr (Types::kMode == Mode::kStepSplit) x.low = LoadShared<16>(slot + S::kLow);
  if constexpr (IsCoded(Types::mu)) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.mu_scale), "=f"(x.nu_scale)
                 : "r"(slot + S::kScales)
                 : "memory");
  }
  return x;
}

}  // namespace
}  // namespace jdistadam
