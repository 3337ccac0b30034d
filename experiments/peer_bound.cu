// What bounds a step over peer memory: the links between two GPUs, both directions at once. Loads
// of a kernel from the other's memory, its stores there, both together, and copies by the copy
// engines. Prints one line of JSON for each; bytes are those of one direction.
//
//   nvcc -std=c++17 -O3 -arch=native experiments/peer_bound.cu -o /tmp/peer_bound
//   /tmp/peer_bound 1558000000    # bytes of a shard: bfloat16 gradients of GPT-2 XL, halved
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr int kThreads = 256, kUnroll = 4, kGpus = 2, kCalls = 3, kRepeats = 8;

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <bool kLoads, bool kStores>
__global__ void __launch_bounds__(kThreads)
    Access(const uint4* from, uint4* to, uint4* sink, size_t count) {
  const size_t stride = size_t{gridDim.x} * kThreads;
  uint4 sum{};
  const auto load = [&](size_t i) { return kLoads ? from[i] : uint4{1, 2, 3, 4}; };
  const auto use = [&](const uint4& x, size_t i) {
    sum.x ^= x.x, sum.y ^= x.y, sum.z ^= x.z, sum.w ^= x.w;
    if (kStores) to[i] = uint4{unsigned(i), 2, 3, 4};
  };
  size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    uint4 x[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) x[k] = load(i + k * stride);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) use(x[k], i + k * stride);
  }
  for (; i < count; i += stride) use(load(i), i);
  if (kLoads && sum.x == 0x12345678u && sum.y == sum.z) *sink = sum;  // or the loads are removed
}

struct Gpu {
  char *source, *target;
  uint4* sink;
  cudaStream_t stream;
  cudaEvent_t begin, end;
};

using Work = std::function<void(int, Gpu&, Gpu&)>;  // on which GPU, it, the other

float Milliseconds(Gpu (&gpus)[kGpus], const Work& work) {
  const auto on_each = [&](const auto& f) {
    for (int i = 0; i < kGpus; ++i) {
      Check(cudaSetDevice(i));
      f(i);
    }
  };
  on_each([](int) { Check(cudaDeviceSynchronize()); });
  on_each([&](int i) { Check(cudaEventRecord(gpus[i].begin, gpus[i].stream)); });
  for (int k = 0; k < kCalls; ++k) on_each([&](int i) { work(i, gpus[i], gpus[1 - i]); });
  on_each([&](int i) { Check(cudaEventRecord(gpus[i].end, gpus[i].stream)); });
  float longest = 0;
  on_each([&](int i) {
    float ms;
    Check(cudaEventSynchronize(gpus[i].end));
    Check(cudaEventElapsedTime(&ms, gpus[i].begin, gpus[i].end));
    longest = std::max(longest, ms / kCalls);
  });
  return longest;
}

void Measure(Gpu (&gpus)[kGpus], const std::string& name, size_t bytes, const Work& work) {
  Milliseconds(gpus, work);
  std::vector<float> ms;
  for (int k = 0; k < kRepeats; ++k) ms.push_back(Milliseconds(gpus, work));
  std::sort(ms.begin(), ms.end());
  const double median = ms[kRepeats / 2];
  std::printf("{\"work\": \"%s\", \"bytes\": %zu, \"ms\": %.3f, \"gb_per_second\": %.1f}\n",
              name.c_str(), bytes, median, bytes / median / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: peer_bound BYTES\n"), 2;
  const size_t bytes = std::strtoull(argv[1], nullptr, 10) / 16 * 16, count = bytes / 16;
  Gpu gpus[kGpus];
  for (int i = 0; i < kGpus; ++i) {
    Check(cudaSetDevice(i));
    Check(cudaDeviceEnablePeerAccess(1 - i, 0));
    Check(cudaMalloc(&gpus[i].source, bytes));
    Check(cudaMalloc(&gpus[i].target, bytes));
    Check(cudaMalloc(&gpus[i].sink, sizeof(uint4)));
    Check(cudaMemset(gpus[i].source, 1, bytes));
    Check(cudaStreamCreate(&gpus[i].stream));
    Check(cudaEventCreate(&gpus[i].begin));
    Check(cudaEventCreate(&gpus[i].end));
  }
  for (const int blocks : {132, 1056}) {
    const std::string by = ", kernel of " + std::to_string(blocks) + " blocks";
    Measure(gpus, "loads" + by, bytes, [&](int, Gpu& me, Gpu& peer) {
      Access<true, false><<<blocks, kThreads, 0, me.stream>>>(reinterpret_cast<uint4*>(peer.source),
                                                              nullptr, me.sink, count);
    });
    Measure(gpus, "stores" + by, bytes, [&](int, Gpu& me, Gpu& peer) {
      Access<false, true><<<blocks, kThreads, 0, me.stream>>>(
          nullptr, reinterpret_cast<uint4*>(peer.target), me.sink, count);
    });
    Measure(gpus, "loads and stores" + by, 2 * bytes, [&](int, Gpu& me, Gpu& peer) {
      Access<true, true><<<blocks, kThreads, 0, me.stream>>>(reinterpret_cast<uint4*>(peer.source),
                                                             reinterpret_cast<uint4*>(peer.target),
                                                             me.sink, count);
    });
  }
  Measure(gpus, "fetched, copy engines", bytes, [&](int i, Gpu& me, Gpu& peer) {
    Check(cudaMemcpyPeerAsync(me.target, i, peer.source, 1 - i, bytes, me.stream));
  });
  Measure(gpus, "sent, copy engines", bytes, [&](int i, Gpu& me, Gpu& peer) {
    Check(cudaMemcpyPeerAsync(peer.target, 1 - i, me.source, i, bytes, me.stream));
  });
}
