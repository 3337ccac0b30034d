// CUDA's streams and events as threads, for cuda/copies_cuda.h on a machine without GPUs: what
// waits for nothing is a data race, which ThreadSanitizer sees.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#define CUDART_VERSION 12000

enum cudaError_t {
  cudaSuccess,
  cudaErrorNotReady,
  cudaErrorNotSupported,
  cudaErrorCudartUnloading,
  cudaErrorOperatingSystem,
  cudaErrorPeerAccessAlreadyEnabled,
  cudaErrorUnknown
};
enum cudaMemcpyKind { cudaMemcpyDefault };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaEventInterprocess = 4 };
enum { cudaEnableDefault = 0 };

// How often it was recorded, and how many of these a stream has come to.
struct FakeEvent {
  std::mutex mutex;
  std::condition_variable changed;
  long recorded = 0, done = 0;
};
using cudaEvent_t = FakeEvent*;

// A thread that does what it is given, in order. Never freed, as those of a process at its end.
class FakeStream {
 public:
  FakeStream() : thread_([this] { Run(); }) { thread_.detach(); }

  void Do(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool IsDone() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return work_.empty();
  }

 private:
  void Run() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      const std::function<void()> next = work_.front();
      lock.unlock();
      next();
      lock.lock();
      work_.pop_front();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;
};
using cudaStream_t = FakeStream*;

inline std::function<cudaError_t()>& FakeFailure() {  // of the next copy; for tests
  static auto* failure = new std::function<cudaError_t()>([] { return cudaSuccess; });
  return *failure;
}

inline const char* cudaGetErrorString(cudaError_t) { return "a planted error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
inline cudaError_t cudaGetDriverEntryPoint(const char*, void**, unsigned) {
  return cudaErrorNotSupported;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new FakeStream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream->IsDone() ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new FakeEvent;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  const long number = ++event->recorded;
  stream->Do([event, number] {
    const std::lock_guard<std::mutex> lock(event->mutex);
    event->done = number;
    event->changed.notify_all();
  });
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  return event->done == event->recorded ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock<std::mutex> lock(event->mutex);
  event->changed.wait(lock, [&] { return event->done == event->recorded; });
  return cudaSuccess;
}
// For its last record, as of now.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  stream->Do([event, number = event->recorded] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->done >= number; });
  });
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t rows, cudaMemcpyKind,
                                     cudaStream_t stream) {
  if (const cudaError_t error = FakeFailure()(); error != cudaSuccess) return error;
  stream->Do([=] {
    for (size_t r = 0; r < rows; ++r)
      std::memcpy((char*)to + r * to_pitch, (const char*)from + r * from_pitch, width);
  });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, size, from, size, size, 1, kind, stream);
}
inline cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                       cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, size_t size) {
  *memory = std::malloc(size);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* memory, int value, size_t size) {
  std::memset(memory, value, size);
  return cudaSuccess;
}
