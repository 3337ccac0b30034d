// Adam on a CUDA device: one launch for many leaves.
//
// table     The leaves travel by value in the kernel's parameters, up to kLargeTable of them in one
//           launch. A table in device memory would need a copy, which is fragile in CUDA graphs.
// balance   Every block updates one tile of kTile elements of one leaf, found by binary search, so
//           leaf sizes do not matter. One vector a thread, no loop.
// indices   size_t: leaves over 2^31 elements exist.
// traffic   each array once, e.g. 28 bytes a parameter for float32 grad, param, mu and nu.
// aliasing  a thread alone reads and writes its elements of param, mu and nu; grad and out overlap
//           nothing.

#include <algorithm>

#include "adam_cuda.h"
#include "adam_math.h"

namespace jdistadam {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;  // elements a thread: 16 bytes of float32, 8 of a 16-bit dtype
constexpr size_t kTile = size_t{kThreads} * kVector;
constexpr int kSmallTable = 60;   // fits the classic 4 KiB of kernel parameters
constexpr int kLargeTable = 500;  // fits the 32 KiB of CUDA 12.1 and later
constexpr size_t kMaxTiles = size_t{1} << 31;

struct Step {
  Mode mode;
  bool nesterov;
  Dtypes dtypes;
  const float* coefficients;
  const float* inv_scale;
  const bool* found_inf;
};

template <int kCapacity>
struct LeafTable {
  Leaf leaves[kCapacity];
  uint32_t end[kCapacity];  // tiles of this leaf and all before it
  int count;
};
static_assert(sizeof(LeafTable<kSmallTable>) + sizeof(Step) <= 4096);
static_assert(sizeof(LeafTable<kLargeTable>) + sizeof(Step) <= 32764);

// The first leaf whose end lies beyond `tile`.
template <int kCapacity>
__device__ int FindLeaf(const LeafTable<kCapacity>& table, uint32_t tile) {
  int low = 0, high = table.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (table.end[middle] > tile) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Four elements as they lie in memory. Loading and widening are apart so that the loads of all
// operands are in flight before the first one is waited for.
struct Packed {
  uint4 words;
};

__device__ __forceinline__ Packed LoadPacked(const void* base, Dtype dtype, size_t i) {
  Packed packed;
  if (dtype == Dtype::kFloat32) {
    packed.words = *reinterpret_cast<const uint4*>(static_cast<const float*>(base) + i);
  } else {
    const uint2 halves = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(base) + i);
    packed.words.x = halves.x;
    packed.words.y = halves.y;
  }
  return packed;
}

__device__ __forceinline__ void Widen(const Packed& packed, Dtype dtype, float (&x)[kVector]) {
  const uint4& w = packed.words;
  const uint16_t halves[4] = {uint16_t(w.x), uint16_t(w.x >> 16), uint16_t(w.y),
                              uint16_t(w.y >> 16)};
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (dtype == Dtype::kFloat32) {
      x[k] = FloatOf(words[k]);
    } else {
      x[k] = dtype == Dtype::kBfloat16 ? FromBfloat16(halves[k]) : FromFloat16(halves[k]);
    }
  }
}

__device__ __forceinline__ void StoreVector(void* base, Dtype dtype, size_t i,
                                            const float (&x)[kVector]) {
  if (dtype == Dtype::kFloat32) {
    float4 out{CanonicalNan(x[0]), CanonicalNan(x[1]), CanonicalNan(x[2]), CanonicalNan(x[3])};
    *reinterpret_cast<float4*>(static_cast<float*>(base) + i) = out;
    return;
  }
  uint32_t h[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k)
    h[k] = dtype == Dtype::kBfloat16 ? ToBfloat16(x[k]) : ToFloat16(x[k]);
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(base) + i) = {h[0] | h[1] << 16,
                                                                 h[2] | h[3] << 16};
}

// Applies the formula to four elements in registers: p becomes the new parameter, or the update in
// Mode::kUpdate.
__device__ __forceinline__ void StepVector(const Step& step, const Coefficients& c, float inv_scale,
                                           const float (&g)[kVector], float (&p)[kVector],
                                           float (&m)[kVector], float (&v)[kVector]) {
  const Terms terms = TermsOf(c, step.nesterov);
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const float u = AdamUpdate(c, terms, g[k] * inv_scale, p[k], m[k], v[k]);
    p[k] = step.mode == Mode::kUpdate ? -u : p[k] - u;
  }
}

__device__ __forceinline__ bool IsAligned(const void* base, Dtype dtype) {
  return reinterpret_cast<uintptr_t>(base) % (kVector * ItemSize(dtype)) == 0;
}

__device__ __forceinline__ bool IsAligned(const Leaf& leaf, const Dtypes& t) {
  return IsAligned(leaf.grad, t.grad) && IsAligned(leaf.param, t.param) &&
         IsAligned(leaf.mu, t.mu) && IsAligned(leaf.nu, t.nu) && IsAligned(leaf.out, t.out);
}

// Four elements at once, 16 bytes of each float32 array.
__device__ __forceinline__ void StepAligned(const Step& step, const Leaf& leaf, size_t i) {
  const Dtypes& t = step.dtypes;
  const Packed packed_g = LoadPacked(leaf.grad, t.grad, i),
               packed_p = LoadPacked(leaf.param, t.param, i),
               packed_m = LoadPacked(leaf.mu, t.mu, i), packed_v = LoadPacked(leaf.nu, t.nu, i);
  const Coefficients c = reinterpret_cast<const Coefficients*>(step.coefficients)[leaf.group];
  const float inv_scale = *step.inv_scale;
  float g[kVector], p[kVector], m[kVector], v[kVector];
  Widen(packed_g, t.grad, g);
  Widen(packed_p, t.param, p);
  Widen(packed_m, t.mu, m);
  Widen(packed_v, t.nu, v);
  StepVector(step, c, inv_scale, g, p, m, v);
  StoreVector(leaf.mu, t.mu, i, m);
  StoreVector(leaf.nu, t.nu, i, v);
  if (step.mode != Mode::kUpdate) StoreVector(leaf.param, t.param, i, p);
  if (step.mode != Mode::kStep) StoreVector(leaf.out, t.out, i, p);
}

// One element: the tail of a leaf, and every element of a misaligned one.
__device__ void StepOne(const Step& step, const Leaf& leaf, size_t i) {
  const Dtypes& t = step.dtypes;
  const Coefficients c = reinterpret_cast<const Coefficients*>(step.coefficients)[leaf.group];
  const float g = LoadOne(leaf.grad, t.grad, i) * *step.inv_scale;
  const float p = LoadOne(leaf.param, t.param, i);
  float m = LoadOne(leaf.mu, t.mu, i), v = LoadOne(leaf.nu, t.nu, i);
  const float u = AdamUpdate(c, TermsOf(c, step.nesterov), g, p, m, v);
  const float result = step.mode == Mode::kUpdate ? -u : p - u;
  StoreOne(leaf.mu, t.mu, i, m);
  StoreOne(leaf.nu, t.nu, i, v);
  if (step.mode != Mode::kUpdate) StoreOne(leaf.param, t.param, i, result);
  if (step.mode != Mode::kStep) StoreOne(leaf.out, t.out, i, result);
}

// What a skipped step writes: the unchanged parameter in `out`'s dtype, or an update of zero.
__device__ void SkipOne(const Step& step, const Leaf& leaf, size_t i) {
  const float x =
      step.mode == Mode::kStepAndCast ? LoadOne(leaf.param, step.dtypes.param, i) : 0.0f;
  if (step.mode != Mode::kStep) StoreOne(leaf.out, step.dtypes.out, i, x);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    AdamKernel(const __grid_constant__ LeafTable<kCapacity> table,
               const __grid_constant__ Step step) {
  const int index = FindLeaf(table, blockIdx.x);
  const Leaf& leaf = table.leaves[index];
  const uint32_t first_tile = index == 0 ? 0 : table.end[index - 1];
  const size_t i = (blockIdx.x - first_tile) * kTile + threadIdx.x * kVector;
  if (i >= leaf.size) return;
  const size_t left = leaf.size - i;
  const int n = left < kVector ? int(left) : kVector;

  if (*step.found_inf) {  // the same for the whole grid: no divergence
    for (int k = 0; k < n; ++k) SkipOne(step, leaf, i + k);
  } else if (n == kVector && IsAligned(leaf, step.dtypes)) {
    StepAligned(step, leaf, i);
  } else {
    for (int k = 0; k < n; ++k) StepOne(step, leaf, i + k);
  }
}

size_t NumTiles(const Leaf& leaf) { return (leaf.size + kTile - 1) / kTile; }

// Launches leaves [begin, end), at most kCapacity and at most kMaxTiles tiles together.
template <int kCapacity>
cudaError_t Launch(const AdamCall& call, const Leaf* begin, const Leaf* end, cudaStream_t stream) {
  LeafTable<kCapacity> table;
  table.count = int(end - begin);
  uint32_t tiles = 0;
  for (int i = 0; i < table.count; ++i) {
    table.leaves[i] = begin[i];
    table.end[i] = tiles += uint32_t(NumTiles(begin[i]));
  }
  const Step step{call.mode,         call.nesterov,  call.dtypes,
                  call.coefficients, call.inv_scale, call.found_inf};
  AdamKernel<kCapacity><<<tiles, kThreads, 0, stream>>>(table, step);
  return cudaGetLastError();
}

}  // namespace

cudaError_t AdamCuda(const AdamCall& call, cudaStream_t stream) {
  std::vector<Leaf> leaves;  // without the empty ones, which would own no tile
  for (const Leaf& leaf : call.leaves) {
    if (leaf.size > 0) leaves.push_back(leaf);
  }
  for (size_t begin = 0, end; begin < leaves.size(); begin = end) {
    size_t tiles = NumTiles(leaves[begin]);
    for (end = begin + 1; end < leaves.size() && end - begin < kLargeTable; ++end) {
      tiles += NumTiles(leaves[end]);
      if (tiles >= kMaxTiles) break;
    }
    const Leaf *first = leaves.data() + begin, *last = leaves.data() + end;
    const cudaError_t error = end - begin <= kSmallTable
                                  ? Launch<kSmallTable>(call, first, last, stream)
                                  : Launch<kLargeTable>(call, first, last, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jdistadam
