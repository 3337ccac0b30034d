// Copies between a GPU and its host, concurrently with the stream of a program.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <tuple>

#include "host_copy.h"

namespace jdistadam {

// The streams of one device, one per direction, and an event per direction and copy of a program.
//
// Programs that run concurrently on a device share them. That is safe: a stream executes copies in
// order and an event is recorded after its copy, so an event that another program has recorded in
// the meantime comes later, never earlier.
class HostCopyStreams {
 public:
  // After earlier work of `stream`, copies the parts; then records the event.
  static cudaError_t Start(cudaStream_t stream, const HostCopy& copy, int32_t ordinal) {
    const std::lock_guard<std::mutex> lock(Mutex());
    cudaStream_t side = nullptr;
    cudaEvent_t before = nullptr, after = nullptr;
    cudaError_t error = Find(ordinal, copy.to_host, &side);
    if (error == cudaSuccess) error = Find(ordinal, copy.to_host, -1, &before);
    if (error == cudaSuccess) error = Find(ordinal, copy.to_host, copy.index, &after);
    if (error == cudaSuccess) error = cudaEventRecord(before, stream);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(side, before, 0);
    for (const HostCopy::Part& part : copy.parts) {
      if (error != cudaSuccess) break;
      void* to = copy.to_host ? part.host : part.device;
      const void* from = copy.to_host ? part.device : part.host;
      error = cudaMemcpyAsync(to, from, part.bytes, cudaMemcpyDefault, side);
    }
    return error == cudaSuccess ? cudaEventRecord(after, side) : error;
  }

  // Lets later work of `stream` wait for the copy.
  static cudaError_t Wait(cudaStream_t stream, bool to_host, int32_t index, int32_t ordinal) {
    const std::lock_guard<std::mutex> lock(Mutex());
    cudaEvent_t after = nullptr;
    const cudaError_t error = Find(ordinal, to_host, index, &after);
    return error == cudaSuccess ? cudaStreamWaitEvent(stream, after, 0) : error;
  }

 private:
  static std::mutex& Mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  static cudaError_t Find(int32_t ordinal, bool to_host, cudaStream_t* stream) {
    static auto* all = new std::map<std::tuple<int32_t, bool>, cudaStream_t>;
    cudaStream_t& found = (*all)[{ordinal, to_host}];
    cudaError_t error = cudaSetDevice(ordinal);
    if (error == cudaSuccess && found == nullptr)
      error = cudaStreamCreateWithFlags(&found, cudaStreamNonBlocking);
    *stream = found;
    return error;
  }

  static cudaError_t Find(int32_t ordinal, bool to_host, int32_t index, cudaEvent_t* event) {
    static auto* all = new std::map<std::tuple<int32_t, bool, int32_t>, cudaEvent_t>;
    cudaEvent_t& found = (*all)[{ordinal, to_host, index}];
    cudaError_t error = cudaSetDevice(ordinal);
    if (error == cudaSuccess && found == nullptr)
      error = cudaEventCreateWithFlags(&found, cudaEventDisableTiming);
    *event = found;
    return error;
  }
};

}  // namespace jdistadam
