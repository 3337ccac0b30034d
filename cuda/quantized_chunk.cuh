// A warp's step of two blocks of 128 elements, eight in each thread: most of the work. The kernel
// is bound by instruction issue about as much as by memory. Values that are the same for a whole
// tile are therefore computed once, divisions and roots have no special cases, and codes are
// rounded two per word (quantized_math.cuh). Numbers that need special cases are left to
// quantized_part.cuh. The results are the same bits.
//
// Chunks are loaded through shared memory. While a thread steps one chunk, it copies its own
// elements of the next ones there, so no thread waits for memory and the copies take no registers.
#pragma once

#include "quantized_math.cuh"

namespace jdistadam {
namespace {

// Chunks in flight or being stepped: with two, steps take 2 to 6 % longer.
constexpr int kStages = 3;

// ---- Where arrays are ----

// A leaf's arrays: as pointers in registers, so an address takes one instruction.
struct Arrays {
  char *grad, *param, *mu, *nu, *out, *mu_scales, *nu_scales;
};

// As an argument of the kernel the compiler would load it again for every use.
__device__ __forceinline__ char* InRegister(const void* x) {
  asm("" : "+l"(x));
  __builtin_assume(__isGlobal(x));
  return static_cast<char*>(const_cast<void*>(x));
}

template <typename Types>
__device__ __forceinline__ Arrays ArraysOf(const QuantizedLeaf& leaf) {
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

// A warp's stage has planes of 16 bytes per thread: one or two for each array, one for mu and nu
// together if both have 8 bits, and one for their scales.
constexpr uint32_t kSlot = 16, kPlane = 32 * kSlot;  // bytes
template <typename Types>
struct Stage {
  // Offsets of a thread, and of a warp.
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

// With 32 bytes per thread, two copies each read half of every sector: they go through the L1
// cache, so the second one finds its halves there.
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

// Starts to copy the elements from i on to a stage; `slot` is this thread's.
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
// arrived. Each thread waits for and reads only its own copies: there is no barrier.
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kOthers>
__device__ __forceinline__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOthers) : "memory");
}

// ---- From shared memory ----

// A thread's elements of each array as stored in memory.
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

constexpr int kChunkBlocks = 2, kChunk = kChunkBlocks * kBlockSize;
constexpr size_t kMaxChunked = size_t{1} << 31;  // elements of a leaf with 32-bit indices
constexpr uint32_t kWarps = kThreads / 32, kMaxRounds = 32;  // chunks are bits
constexpr float kLargestRate = 256.0f;  // largest with which no parameter becomes NaN: AreModest
static_assert(kChunk == 32 * kWide);

// ---- A tile ----

// Values that are the same for all chunks of a tile.
struct Tile {
  Coefficients c;
  OrdinaryArithmetic by;
  float inv_scale;
  bool is_ordinary;  // otherwise no chunk is
  bool is_run;       // the leaf's elements are contiguous in the whole leaf, from a vector on
  uint32_t id, count, key0, key1, group_high;
  uint32_t group;  // of this thread's first element: its index / 4; group_high has the upper bits
};

template <typename Types>
__device__ __forceinline__ bool IsWideAligned(const QuantizedLeaf& leaf) {
  const auto is_aligned = [](const void* array, Dtype dtype) {
    return ItemSize(dtype) == 1 ? reinterpret_cast<uintptr_t>(array) % kWide == 0
                                : IsAligned<kWide>(array, dtype);
  };
  return is_aligned(leaf.grad, Types::grad) && is_aligned(leaf.param, Types::param) &&
         is_aligned(leaf.mu, Types::mu) && is_aligned(leaf.nu, Types::nu) &&
         (Types::kMode == Mode::kStep || is_aligned(leaf.out, Types::out));
}

template <typename Types>
__device__ __forceinline__ Tile TileOf(const Step& step, const QuantizedLeaf& leaf, size_t mine) {
  Tile tile;
  tile.c = LoadCoefficients(step, leaf);
  const Coefficients& c = tile.c;
  tile.inv_scale = *step.inv_scale;
  const auto is_between = [](float x, float low, float high) { return x >= low && x <= high; };
  // If b1 is finite, mu is NaN only if nu is, which Encode (quantized_math.cuh) needs.
  tile.is_ordinary =
      !step.nesterov && c.l2 == 0.0f && fabsf(c.b1) <= 1.0f && fabsf(c.one_minus_b1) <= 2.0f &&
      is_between(c.c1, kSmallestC, 1.0f) && is_between(c.c2, kSmallestC, 1.0f) &&
      is_between(c.eps, kSmallestEps, kLargestEps) && c.eps_root == 0.0f &&
      fabsf(c.learning_rate) <= kLargestRate && fabsf(c.weight_decay) <= kLargestRate &&
      IsWideAligned<Types>(leaf) && leaf.size < kMaxChunked;
  tile.by = {1.0f / c.c1, 1.0f / c.c2};
  if (!Types::IsStochastic(step)) return tile;
  tile.count = static_cast<uint32_t>(*step.count);
  tile.key0 = step.key[0];
  tile.key1 = step.key[1];
  if (leaf.table != nullptr) {
    tile.is_run = false;
    return tile;
  }
  const Origin first = OriginOf(step.parts, leaf, 0);
  const Origin last = OriginOf(step.parts, leaf, leaf.size - 1);
  tile.id = first.id;
  tile.group = static_cast<uint32_t>((first.index + mine) / kVector);
  tile.group_high = static_cast<uint32_t>(first.index / kVector >> 32);
  tile.is_run = last.index - first.index == leaf.size - 1 && first.index % kVector == 0 &&
                last.index / kVector >> 32 == tile.group_high;
  return tile;
}

// ---- A chunk ----

// A thread's elements as numbers.
struct Widened {
  Floats g, p, m, v;
  float m_factor, v_factor;  // pending factors of m and v, powers of two
  bool is_ordinary;
};

template <typename Types>
__device__ __forceinline__ Widened WidenAll(const Types& t, const Loaded& x) {
  Widened y;
  Widen(x.grad, t.grad, y.g);
  if (Types::kMode == Mode::kStepSplit) {
    JoinVectors(x.param, x.low, y.p);
  } else {
    Widen(x.param, t.param, y.p);
  }
  y.m_factor = WidenStored<Moment::kMu>(t.mu, x.mu, x.mu_scale, y.m);
  y.v_factor = WidenStored<Moment::kNu>(t.nu, x.nu, x.nu_scale, y.v);
  y.is_ordinary = !IsCoded(t.mu) || BitsOf(x.mu_scale) < kLargestMu;
  if (Types::kMode == Mode::kStep && t.param != Dtype::kFloat32)
    y.is_ordinary &= AreModest(x.param);
  return y;
}

// A thread's results in their storage dtypes.
struct Stepped {
  Bits param, out;
  Stored moments;
};

template <typename Types>
__device__ __forceinline__ void PackParams(const Types& t, const Floats& p, const Bits& drawn,
                                           Stepped* y) {
  if (Types::kMode == Mode::kStepSplit) return SplitPairs(p, y->param, y->out);
  if (t.param != Dtype::kFloat32) return RoundParams(p, drawn, y->param);
  Floats canonical;
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    y->param[k] = CanonicalBits(p[k]);
    canonical[k] = FloatOf(y->param[k]);
  }
  if (Types::kMode == Mode::kStepAndCast) RoundToHalves<false>(canonical, drawn, y->out);
}

template <typename Types, bool kStochastic>
__device__ __forceinline__ Stepped StepWidened(const Types& t, const Tile& tile, Widened& x,
                                               const Bits& drawn) {
  static_assert(kStochastic || Types::kMode != Mode::kStep || Types::param == Dtype::kFloat32);
  static_assert(!Types::kMayBeCautious);
  Stepped y;
  Coefficients c = tile.c;
  c.b1 *= x.m_factor;  // a power of two gives the same bits here
  c.b2 *= x.v_factor;
  const Terms terms{false, c.weight_decay != 0.0f, false, false};
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    const float u = AdamUpdate(c, terms, x.g[k] * tile.inv_scale, x.p[k], x.m[k], x.v[k], tile.by);
    x.p[k] = x.p[k] - u;
  }
  PackParams(t, x.p, drawn, &y);
  Bits mu_random, nu_random;
#pragma unroll
  for (int k = 0; k < kWide; ++k) {
    mu_random[k] = WordForMu(drawn[k]);
    nu_random[k] = WordForNu(drawn[k]);
  }
  Stored& moments = y.moments;
  moments.is_ordinary = x.is_ordinary;
  if (IsCoded(t.mu)) {
    constexpr Dtype coded = IsCoded(Types::mu) ? Types::mu : Dtype::kBlock8;
    Encode<coded, kStochastic>(x.m, x.v, mu_random, nu_random, &moments);
  } else {
    PackMoment<Moment::kMu, kStochastic>(t.mu, x.m, mu_random, moments.mu, &moments.is_ordinary);
    PackMoment<Moment::kNu, kStochastic>(t.nu, x.v, nu_random, moments.nu, &moments.is_ordinary);
  }
  return y;
}

__device__ __forceinline__ void StoreWide(char* to, Dtype dtype, const Bits& words) {
  if (ItemSize(dtype) == 1) {
    *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
    return;
  }
#pragma unroll
  for (int k = 0; k < (dtype == Dtype::kFloat32 ? kWide : kWide / 2); k += 4)
    reinterpret_cast<uint4*>(to)[k / 4] = uint4{words[k], words[k + 1], words[k + 2], words[k + 3]};
}

template <typename Types>
__device__ __forceinline__ void Store(const Types& t, const Arrays& to, uint32_t i,
                                      const Stepped& x) {
  StoreWide(ElementAt(to.mu, t.mu, i), t.mu, x.moments.mu);
  StoreWide(ElementAt(to.nu, t.nu, i), t.nu, x.moments.nu);
  if (IsCoded(t.mu) && i % kBlockSize == 0) {
    *reinterpret_cast<float*>(ScaleAt(to.mu_scales, i)) = x.moments.mu_scale;
    *reinterpret_cast<float*>(ScaleAt(to.nu_scales, i)) = x.moments.nu_scale;
  }
  StoreWide(ElementAt(to.param, t.param, i), t.param, x.param);
  if (Types::kMode != Mode::kStep) StoreWide(ElementAt(to.out, t.out, i), t.out, x.out);
}

// The random words of a thread's elements.
template <bool kIsRun>
__device__ __forceinline__ void DrawWide(const Step& step, const QuantizedLeaf& leaf,
                                         const Tile& tile, uint32_t i, uint32_t group, Bits& y) {
#pragma unroll
  for (int k = 0; k < kWide; k += kVector) {
    const uint64_t index = uint64_t{tile.group_high} << 32 | (group + k / kVector);
    const Random4 four =
        kIsRun ? Philox(tile.key0, tile.key1, index, tile.id, tile.count) : Draw(step, leaf, i + k);
#pragma unroll
    for (int j = 0; j < kVector; ++j) y[k + j] = four.words[j];
  }
}

// Steps the whole chunks of a tile that this warp takes. Returns a bit for each chunk left over:
// those with a number out of the ordinary, and an incomplete one. `mine` is this thread's first
// element, `stride` is from one chunk to the next, and `slot` is the thread's in its warp's first
// stage.
template <typename Types, bool kStochastic, bool kIsRun>
__device__ __forceinline__ uint32_t StepChunks(const Types& t, const Step& step,
                                               const QuantizedLeaf& leaf, const Tile& tile,
                                               uint32_t mine, uint32_t stride, uint32_t slot) {
  static_assert(Types::kMode != Mode::kUpdate);
  constexpr uint32_t ahead = kStages - 1, size = Stage<Types>::kSize;
  const uint32_t whole = static_cast<uint32_t>(leaf.size) / kChunk * kChunk;
  const uint32_t last_slot = slot + ahead * size;
  const Arrays arrays = ArraysOf<Types>(leaf);
  uint32_t left = 0, chunk = 1, group = tile.group;
  uint32_t free_slot = last_slot;  // its chunk has been stepped
  const auto begin_copy = [&](uint32_t i, uint32_t to) {
    if (i < whole) BeginCopy<Types>(arrays, i, to);
    EndCopies();
  };
#pragma unroll
  for (uint32_t k = 0; k < ahead; ++k) begin_copy(mine + k * stride, slot + k * size);
#pragma unroll 1
  for (uint32_t i = mine; i < whole; i += stride) {
    AwaitCopies<ahead - 1>();
    Widened widened = WidenAll(t, LoadStage<Types>(slot));
    begin_copy(i + ahead * stride, free_slot);
    free_slot = slot;
    slot = slot == last_slot ? last_slot - ahead * size : slot + size;
    Bits drawn = {};
    if (kStochastic) DrawWide<kIsRun>(step, leaf, tile, i, group, drawn);
    const Stepped stepped = StepWidened<Types, kStochastic>(t, tile, widened, drawn);
    if (__all_sync(kAllLanes, stepped.moments.is_ordinary)) {
      Store(t, arrays, i, stepped);
    } else {
      left |= chunk;
    }
    chunk <<= 1;
    group += stride / kVector;
  }
  return left | ~(chunk - 1);
}

}  // namespace
}  // namespace jdistadam
