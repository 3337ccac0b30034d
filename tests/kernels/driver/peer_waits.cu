// The waits between GPUs of a step over peer memory: with one device late at every place they give
// the bits of the CPU, and without any one of them they do not.
//
//   peer_waits [ready | done]     which wait to leave out
//
// Includes the handlers' file and calls it as XLA does, from one host thread for each GPU. Around
// each step the gradients are written just before it and overwritten right after it, and the
// parameters are copied right after it, all on the same stream: who is not waited for reads the
// wrong ones. One step keeps the parameters, which are overwritten just before it: they stay.
// Prints SUCCESS and returns 0, or says what differs and returns 1.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#define JDISTADAM_WAIT_FOR_PEERS DelayedWait

namespace jdistadam {
namespace {

enum class Late { kNowhere, kHost, kBefore, kBehindReady, kBehindDone, kCount };
std::string left_out;
int late_device;
Late late_at;

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(2);
}

__global__ void Delay(long long nanoseconds) {
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

void DelayIf(cudaStream_t stream, int device, Late place) {
  if (device != late_device || place != late_at) return;
  if (place == Late::kHost) return std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Delay<<<1, 1, 0, stream>>>(5'000'000);
}

// In place of WaitForPeers, which it calls.
template <typename Entries, typename Events>
cudaError_t DelayedWait(cudaStream_t stream, const Entries& entries, int me,
                        cudaEvent_t Events::* event) {
  const bool is_ready = event == &Events::ready;
  cudaError_t error = cudaSuccess;
  if (left_out != (is_ready ? "ready" : "done")) error = WaitForPeers(stream, entries, me, event);
  DelayIf(stream, me, is_ready ? Late::kBehindReady : Late::kBehindDone);
  return error;
}

}  // namespace
}  // namespace jdistadam

#include "ffi_cuda.cc"

namespace jdistadam {

// Of other handlers, which are not called.
cudaError_t AdamCuda(const AdamCall&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t QuantizedCuda(const QuantizedCall&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t SumCuda(const SumCall&, cudaStream_t) { return cudaErrorNotSupported; }

namespace {

constexpr int kSteps = 7, kKeeps = 4;                 // the step that keeps what is there
constexpr size_t kShard = 3 * 10'007, kRun = 10'007;  // three rows, of no aligned length
const Coefficients kRow = {3e-3f,  0.87f, 0.13f, 0.9973f, 0.0027f, 1e-7f,
                           1e-10f, 0.13f, 0.34f, 0.43f,   0.008f,  0.021f};

__host__ __device__ float ValueOf(size_t i, int step, int device) {
  return float(i % 5) * 0.25f + float(step) - 3.0f * float(device);
}

__global__ void Fill(float* array, size_t size, int step, int device) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < size) array[i] = ValueOf(i, step, device);
}

// What one device has; pointers to its own memory, or to the host's.
struct Arrays {
  float *grad, *out, *main, *mu, *nu, *squares, *scale;
  Coefficients* row;
  TileNorm* tiles;
  bool *skip, *found_inf;
};

template <typename Allocate>
Arrays MakeArrays(int count, const Allocate& allocate) {
  const size_t whole = count * kShard * 4, shard = kShard * 4;
  const auto floats = [&](size_t bytes) { return static_cast<float*>(allocate(bytes)); };
  Arrays a{floats(whole), floats(whole), floats(shard), floats(shard),
           floats(shard), floats(4),     floats(4)};
  a.row = static_cast<Coefficients*>(allocate(sizeof(Coefficients)));
  a.tiles = static_cast<TileNorm*>(allocate(NumNormTiles(kShard) * sizeof(TileNorm)));
  a.skip = static_cast<bool*>(allocate(1)), a.found_inf = static_cast<bool*>(allocate(1));
  return a;
}

PeerCall CallOf(const Arrays& a) {
  PeerCall call{};
  call.work = PeerWork::kStep;
  call.dtypes = {Dtype::kFloat32, Dtype::kFloat32, Dtype::kFloat32};
  call.coefficients = reinterpret_cast<const float*>(a.row);
  call.inv_scale = call.norm_scale = a.scale;
  call.found_inf = a.skip;
  call.num_tiles = NumNormTiles(kShard), call.tiles = a.tiles;
  call.sum_of_squares = a.squares, call.norm_found_inf = a.found_inf;
  PeerLeaf leaf{};
  leaf.grad = a.grad, leaf.out = a.out, leaf.main = a.main, leaf.mu = a.mu, leaf.nu = a.nu;
  leaf.size = kShard, leaf.run = kRun, leaf.out_dtype = Dtype::kFloat32;
  call.leaves = {leaf};
  return call;
}

// The parameters after each step, by the kernel of the CPU.
std::vector<std::vector<float>> OnCpu(int count) {
  std::vector<Arrays> devices;
  for (int k = 0; k < count; ++k) {
    devices.push_back(MakeArrays(count, [](size_t bytes) { return std::calloc(bytes, 1); }));
    *devices[k].scale = 1, *devices[k].row = kRow;
  }
  std::vector<std::vector<float>> found;
  for (int step = 0; step < kSteps; ++step) {
    PeerArrays arrays{count, 0, {}, {}};
    for (int k = 0; k < count; ++k) {
      const bool keeps = *devices[k].skip = step == kKeeps;
      for (size_t i = 0; i < count * kShard; ++i) {
        devices[k].grad[i] = ValueOf(i, step, k);
        if (keeps) devices[k].out[i] = ValueOf(i, step, 0);
      }
      arrays.grads.push_back(devices[k].grad), arrays.outs.push_back(devices[k].out);
    }
    for (arrays.me = 0; arrays.me < count; ++arrays.me)
      PeerCpu(CallOf(devices[arrays.me]), arrays, {1, [](std::function<void()> task) { task(); }});
    found.emplace_back(devices[0].out, devices[0].out + count * kShard);
  }
  return found;
}

// The same by GPU `me`; all of them run this at once. What is allocated is returned: where a wait
// is left out, a late peer still reads and writes it when this stream is done.
std::vector<void*> OnGpu(int me, int count, int64_t first_run, float* found) {
  Check(cudaSetDevice(me));
  std::vector<void*> allocated;
  const auto allocate = [&](size_t bytes) {
    void* data;
    Check(cudaMalloc(&data, bytes));
    Check(cudaMemset(data, 0, bytes));
    allocated.push_back(data);
    return data;
  };
  const Arrays a = MakeArrays(count, allocate);
  const float one = 1;
  Check(cudaMemcpy(a.scale, &one, 4, cudaMemcpyHostToDevice));
  Check(cudaMemcpy(a.row, &kRow, sizeof kRow, cudaMemcpyHostToDevice));
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  std::vector<int64_t> devices;
  for (int k = 0; k < count; ++k) devices.push_back(k);
  const size_t whole = count * kShard;
  const size_t blocks = (whole + 255) / 256;
  float* copies = static_cast<float*>(allocate(kSteps * whole * 4));
  for (int step = 0; step < kSteps; ++step) {
    DelayIf(stream, me, Late::kHost);
    DelayIf(stream, me, Late::kBefore);
    Fill<<<blocks, 256, 0, stream>>>(a.grad, whole, step, me);
    if (step == kKeeps) Fill<<<blocks, 256, 0, stream>>>(a.out, whole, step, 0);
    Check(cudaMemsetAsync(a.skip, step == kKeeps, 1, stream));
    PeerAttributes attributes{};
    attributes.is_step = true, attributes.site = 1, attributes.limit_seconds = 60;
    attributes.devices = ffi::Span<const int64_t>(devices.data(), devices.size());
    const ffi::Error error =
        RunPeer(stream, attributes, ffi::Error::Success(), CallOf(a), first_run + step, me);
    if (error.failure()) {
      std::fprintf(stderr, "%s\n", error.message().c_str());
      std::exit(2);
    }
    Check(
        cudaMemcpyAsync(copies + step * whole, a.out, whole * 4, cudaMemcpyDeviceToDevice, stream));
    Fill<<<blocks, 256, 0, stream>>>(a.grad, whole, 1000, me);
  }
  Check(cudaStreamSynchronize(stream));
  Check(cudaMemcpy(found, copies, kSteps * whole * 4, cudaMemcpyDeviceToHost));
  Check(cudaStreamDestroy(stream));
  return allocated;
}

int Main(int argc, char** argv) {
  int gpus;
  Check(cudaGetDeviceCount(&gpus));
  const int count = gpus >= 8 ? 8 : gpus >= 4 ? 4 : 2;
  if (gpus < 2) return std::fprintf(stderr, "needs two GPUs\n"), 2;
  left_out = argc > 1 ? argv[1] : "";
  const auto want = OnCpu(count);
  const size_t whole = count * kShard;
  int wrong = 0;
  int64_t run = 0;
  for (late_device = 0; late_device < count; ++late_device) {
    for (int place = 0; place < int(Late::kCount); ++place, run += kSteps) {
      late_at = Late(place);
      std::vector<std::vector<float>> found(count, std::vector<float>(kSteps * whole));
      std::vector<std::vector<void*>> allocated(count);
      std::vector<std::thread> threads;
      for (int me = 0; me < count; ++me)
        threads.emplace_back([&, me] { allocated[me] = OnGpu(me, count, run, found[me].data()); });
      for (auto& thread : threads) thread.join();
      for (int me = 0; me < count; ++me) {
        Check(cudaSetDevice(me));
        for (void* data : allocated[me]) Check(cudaFree(data));
        for (int step = 0; step < kSteps; ++step) {
          if (std::memcmp(&found[me][step * whole], want[step].data(), whole * 4) == 0) continue;
          ++wrong;
          std::printf("device %d, step %d, with device %d late at place %d: other bits\n", me, step,
                      late_device, place);
        }
      }
    }
  }
  std::printf(wrong == 0 ? "SUCCESS\n" : "%d wrong\n", wrong);
  return wrong != 0;
}

}  // namespace
}  // namespace jdistadam

int main(int argc, char** argv) { return jdistadam::Main(argc, argv); }
