// What bounds the Adam kernel: an in-place copy, the kernel's own loads and stores without its
// arithmetic ("streams"), and the kernel, in sequence on one leaf. Prints one line of JSON for
// each.
//
//   nvcc -std=c++17 -O3 -arch=native -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -Icuda
//       experiments/kernel_bound.cu cuda/{adam,squares}_cuda.cu -o /tmp/kernel_bound
//   /tmp/kernel_bound 30     # parameters: 2^30
//   ncu --clock-control none --metrics dram__cycles_active.avg.pct_of_peak_sustained_elapsed,
//       dram__bytes_read.sum,dram__bytes_write.sum /tmp/kernel_bound 27 1
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "adam_math.h"
#include "kernels_cuda.h"
#include "vector.cuh"

using namespace jdistadam;

namespace {

constexpr int kThreads = 128, kVector = 4;
constexpr Dtype F = Dtype::kFloat32, B = Dtype::kBfloat16;

enum Kind {
  kCopy,
  kFloat32,
  kMain,
  kSplit
};  // what is stepped; kCopy: one array, read and written
constexpr const char* kNames[] = {"copy", "float32", "bf16, float32 main", "bf16, remainder16"};
constexpr double kBytes[] = {8, 28, 28, 26};

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Numbers without a pattern, uniform between low and high.
template <typename T>
__global__ void Fill(T* x, size_t size, float low, float high) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
    h = (h ^ h >> 15) * 2246822519u;
    const float value = low + (high - low) * ((h ^ h >> 13) >> 8) * 0x1p-24f;
    StoreOne(x, sizeof(T) == 4 ? F : B, i, value);
  }
}

__global__ void __launch_bounds__(256) Copy(float4* x, const float* factor) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  float4 v = x[i];
  const float f = *factor;
  x[i] = float4{v.x * f, v.y * f, v.z * f, v.w * f};
}

template <Kind kKind>
__global__ void __launch_bounds__(kThreads) Streams(Leaf a, const float* factor) {
  constexpr Dtype grad = kKind == kFloat32 ? F : B, param = kKind == kSplit ? B : F;
  const size_t i = (size_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  const auto packed_g = LoadVector<kVector>(a.grad, grad, i);
  const auto packed_p = LoadVector<kVector>(a.param, param, i);
  Packed<kVector> low;
  if (kKind == kSplit) low = LoadVector<kVector>(a.out, Dtype::kUint16, i);
  const auto packed_m = LoadVector<kVector>(a.mu, F, i);
  const auto packed_v = LoadVector<kVector>(a.nu, F, i);
  const float f = *factor;
  float g[kVector], p[kVector], m[kVector], v[kVector];
  Widen(packed_g, grad, g);
  Widen(packed_m, F, m);
  Widen(packed_v, F, v);
  if (kKind == kSplit) {
    JoinVectors(packed_p, low, p);
  } else {
    Widen(packed_p, F, p);
  }
  for (int k = 0; k < kVector; ++k) p[k] = p[k] * f + g[k], m[k] *= f, v[k] *= f;
  StoreVector(a.mu, F, i, m);
  StoreVector(a.nu, F, i, v);
  if (kKind == kSplit) {
    StoreHalves(a.param, a.out, i, p);
    return;
  }
  StoreVector(a.param, F, i, p);
  if (kKind == kMain) StoreVector(a.out, B, i, p);
}

// The arrays of a leaf, contiguous in `memory`.
Leaf Allocate(char* memory, size_t size, Kind kind) {
  const auto take = [&](size_t itemsize) {
    char* begin = memory;
    memory += (itemsize * size + 4095) / 4096 * 4096;
    return begin;
  };
  Leaf leaf{};
  leaf.size = size;
  leaf.mu = take(4);
  leaf.nu = take(4);
  leaf.param = take(kind == kSplit ? 2 : 4);
  leaf.grad = take(kind == kFloat32 ? 4 : 2);
  leaf.out = kind == kFloat32 ? nullptr : take(2);
  const auto fill = [&](const void* array, bool wide, float low, float high) {
    if (wide) {
      Fill<<<1024, 256>>>(static_cast<float*>(const_cast<void*>(array)), size, low, high);
    } else {
      Fill<<<1024, 256>>>(static_cast<uint16_t*>(const_cast<void*>(array)), size, low, high);
    }
  };
  fill(leaf.mu, true, -0.01f, 0.01f);
  fill(leaf.nu, true, 0.0f, 1e-4f);
  fill(leaf.param, kind != kSplit, -0.1f, 0.1f);
  fill(leaf.grad, kind == kFloat32, -0.01f, 0.01f);
  if (leaf.out != nullptr) fill(leaf.out, false, -0.1f, 0.1f);
  return leaf;
}

void Measure(const char* name, Kind kind, size_t size, int repeats,
             const std::function<void()>& run) {
  const int loops = repeats == 1 ? 1 : std::max<int>(10, (size_t{1} << 33) / size);
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  for (int i = 0; i < loops; ++i) run();
  Check(cudaGetLastError());
  std::vector<double> speeds;
  for (int r = 0; r < repeats; ++r) {
    Check(cudaEventRecord(begin));
    for (int i = 0; i < loops; ++i) run();
    Check(cudaEventRecord(end));
    Check(cudaEventSynchronize(end));
    float ms;
    Check(cudaEventElapsedTime(&ms, begin, end));
    speeds.push_back(kBytes[kind] * size * loops / ms / 1e6);
  }
  std::sort(speeds.begin(), speeds.end());
  std::printf(
      "{\"kernel\": \"%s\", \"arrays\": \"%s\", \"elements\": %zu, \"gb_per_second\": %.1f, "
      "\"lowest\": %.1f, \"highest\": %.1f}\n",
      name, kNames[kind], size, speeds[repeats / 2], speeds.front(), speeds.back());
}

template <Kind kKind>
void MeasureStep(char* memory, const float* numbers, size_t size, int repeats) {
  const Leaf leaf = Allocate(memory, size, kKind);
  AdamCall call{};
  call.coefficients = numbers;
  call.inv_scale = numbers + kNumCoefficients;
  call.found_inf = reinterpret_cast<const bool*>(numbers + kNumCoefficients + 1);
  call.leaves = {leaf};
  call.mode = kKind == kFloat32 ? Mode::kStep
              : kKind == kMain  ? Mode::kStepAndCast
                                : Mode::kStepSplit;
  call.dtypes = kKind == kFloat32 ? Dtypes{F, F, F, F, F}
                : kKind == kMain  ? Dtypes{B, F, F, F, B}
                                  : Dtypes{B, B, F, F, Dtype::kUint16};
  Measure("streams", kKind, size, repeats,
          [&] { Streams<kKind><<<size / (kThreads * kVector), kThreads>>>(leaf, call.inv_scale); });
  Measure("adam", kKind, size, repeats, [&] { Check(AdamCuda(call, nullptr)); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: kernel_bound LOG2_ELEMENTS [REPEATS]\n"), 2;
  const size_t size = size_t{1} << std::atoi(argv[1]);
  const int repeats = argc > 2 ? std::max(1, std::atoi(argv[2])) : 5;
  // hyperparameters.py's order, then inv_scale = 1 and found_inf = false
  const float numbers[16] = {1e-3f, 0.87f, 0.13f, 0.9973f, 0.0027f, 1e-7f, 0.0f,
                             0.1f,  0.13f, 0.24f, 0.0027f, 0.0f,    1.0f,  0.0f};
  char* memory;
  float* on_device;
  Check(cudaMalloc(&memory, 16 * size + (1 << 20)));
  Check(cudaMalloc(&on_device, sizeof numbers));
  Check(cudaMemcpy(on_device, numbers, sizeof numbers, cudaMemcpyHostToDevice));
  Allocate(memory, size, kFloat32);
  Measure("copy", kCopy, size, repeats, [&] {
    Copy<<<size / 1024, 256>>>(reinterpret_cast<float4*>(memory), on_device + kNumCoefficients);
  });
  MeasureStep<kFloat32>(memory, on_device, size, repeats);
  MeasureStep<kMain>(memory, on_device, size, repeats);
  MeasureStep<kSplit>(memory, on_device, size, repeats);
  Check(cudaDeviceSynchronize());
}
