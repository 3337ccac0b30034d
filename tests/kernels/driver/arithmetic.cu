// Compares OrdinaryArithmetic (quantized_math.cuh) with IEEE division and square root, bit by bit.
//
//   nvcc -std=c++17 -arch=sm_90 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
//   -I../../../cuda \
//       arithmetic.cu -o /tmp/arithmetic && /tmp/arithmetic
//
// Numbers are drawn over all exponents that a chunk takes, zeros and the ends of mantissas among
// them: 2^34 of each operation.

#include <cstdio>

#include "quantized_math.cuh"

namespace jdistadam {
namespace {

constexpr int kBlocks = 1 << 12, kPerThread = 1 << 13;
static_assert(size_t{kBlocks} * 512 * kPerThread == size_t{1} << 34);

class Numbers {
 public:
  __device__ explicit Numbers(uint32_t thread) : thread_(thread) {}

  // Magnitudes from 2^low to below 2^high; some mantissas are all zeros or ones but for a few bits.
  __device__ float Draw(int low, int high) {
    const Random4 drawn = Philox(1, 2, ++count_, thread_, 3);
    uint32_t mantissa = drawn.words[0] & 0x7fffffu;
    const uint32_t kind = drawn.words[1] % 16;
    if (kind == 0) mantissa &= 7u;
    if (kind == 1) mantissa |= 0x7ffff8u;
    const uint32_t exponent = drawn.words[2] % uint32_t(high - low);
    return FloatOf(uint32_t(127 + low + int(exponent)) << 23 | mantissa);
  }

  // The same with either sign, or a zero.
  __device__ float DrawSigned(int low, int high) {
    const float x = Draw(low, high);
    const Random4 drawn = Philox(1, 2, count_, thread_, 4);
    const float y = drawn.words[0] % 64 == 0 ? 0.0f : x;
    return FloatOf(BitsOf(y) | (drawn.words[1] & 0x80000000u));
  }

 private:
  uint32_t thread_;
  uint64_t count_ = 0;
};

__device__ unsigned long long differences[4];

__device__ void Count(int operation, float got, float want) {
  if (BitsOf(got) != BitsOf(want)) atomicAdd(&differences[operation], 1ull);
}

__global__ void Compare() {
  Numbers numbers(blockIdx.x * blockDim.x + threadIdx.x);
  for (int i = 0; i < kPerThread; ++i) {
    Coefficients c;
    c.c1 = numbers.Draw(-30, 0);
    c.c2 = i % 64 == 0 ? 1.0f : numbers.Draw(-30, 0);
    const OrdinaryArithmetic by{1.0f / c.c1, 1.0f / c.c2};
    const float m = numbers.DrawSigned(-100, 13), v = numbers.DrawSigned(-92, 10);
    Count(0, by.ByC1(c, m), m / c.c1);
    Count(1, by.ByC2(c, fabsf(v)), fabsf(v) / c.c2);
    const float root = i % 64 == 0 ? 0.0f : numbers.Draw(-92, 41);
    Count(2, by.Root(root), sqrtf(root));
    const float x = numbers.DrawSigned(-100, 43), y = numbers.Draw(-60, 22);
    Count(3, by.Divide(x, y), x / y);
  }
}

}  // namespace
}  // namespace jdistadam

int main() {
  using namespace jdistadam;
  Compare<<<kBlocks, 512>>>();
  unsigned long long found[4];
  const cudaError_t error = cudaMemcpyFromSymbol(found, differences, sizeof found);
  if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
  std::printf("differences: m / c1 %llu, v / c2 %llu, root %llu, quotient %llu\n", found[0],
              found[1], found[2], found[3]);
  const bool is_equal = found[0] + found[1] + found[2] + found[3] == 0;
  return is_equal ? std::printf("SUCCESS\n"), 0 : 1;
}
