// Copies between GPUs by their copy engines: copies.h.
//
// A start records "ready" on the stream of the program: earlier work, which may use the memory of
// the targets, is done. A thread of each device pushes its parts, on a stream of its own, after
// "ready" of all devices, and records "sent". A wait lets the stream of the program wait for "sent"
// of all devices. No device waits on the host but for that threads have enqueued their copies.
//
// An event is recorded again only when its job has gone, so after all devices have enqueued their
// waits for it.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <atomic>
#include <thread>

#include "copies.h"

namespace jdistadam {

// An event of a device, from a pool to which it returns.
class PooledEvent {
 public:
  PooledEvent() = default;
  PooledEvent(PooledEvent&& other) noexcept { *this = std::move(other); }
  PooledEvent& operator=(PooledEvent&& other) noexcept {
    std::swap(ordinal_, other.ordinal_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~PooledEvent() {
    if (event_ == nullptr) return;
    const std::lock_guard<std::mutex> lock(Mutex());
    Free()[ordinal_].push_back(event_);
  }

  // Takes one of the current device.
  cudaError_t Take(int32_t ordinal) {
    ordinal_ = ordinal;
    const std::lock_guard<std::mutex> lock(Mutex());
    std::vector<cudaEvent_t>& free = Free()[ordinal];
    if (free.empty()) return cudaEventCreateWithFlags(&event_, cudaEventDisableTiming);
    event_ = free.back();
    free.pop_back();
    return cudaSuccess;
  }

  cudaEvent_t get() const { return event_; }

 private:
  static std::mutex& Mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<int32_t, std::vector<cudaEvent_t>>& Free() {
    static auto* free = new std::map<int32_t, std::vector<cudaEvent_t>>;
    return *free;
  }

  int32_t ordinal_ = 0;
  cudaEvent_t event_ = nullptr;
};

struct CopyEvents {
  PooledEvent ready, sent, kept;  // kept: the part for itself

  cudaError_t Take(int32_t ordinal) {
    cudaError_t error = cudaSuccess;
    for (PooledEvent* event : {&ready, &sent, &kept})
      if (error == cudaSuccess) error = event->Take(ordinal);
    return error;
  }
};

using CudaCopies = CopyBoard<CopyEvents>;
using CudaCopyJob = CudaCopies::JobPointer;

inline CudaCopies& CudaBoard() {
  static auto* board = new CudaCopies;  // outlives threads at exit
  return *board;
}

// cuMemcpyBatchAsync of CUDA 12.8, if the driver has it. Its types are not in older headers.
struct BatchAttributes {
  int source_order, source_kind, source_id, target_kind, target_id;
  unsigned flags;
};
using BatchFunction = int (*)(void**, void**, size_t*, size_t, BatchAttributes*, size_t*, size_t,
                              size_t*, cudaStream_t);

inline BatchFunction FindBatchFunction() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver == nullptr ? nullptr
                           : reinterpret_cast<BatchFunction>(dlsym(driver, "cuMemcpyBatchAsync"));
}

// The thread of one device that enqueues its copies, and its streams.
class CopySender {
 public:
  // That of a device, which is made at the first use.
  static cudaError_t Of(int32_t ordinal, CopySender** found) {
    static std::mutex mutex;
    static auto* all = new std::map<int32_t, CopySender*>;
    const std::lock_guard<std::mutex> lock(mutex);
    CopySender*& sender = (*all)[ordinal];
    if (sender == nullptr) {
      auto made = std::unique_ptr<CopySender>(new CopySender(ordinal));
      for (cudaStream_t* stream : {&made->others_, &made->own_}) {
        const cudaError_t error = cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
        if (error != cudaSuccess) return error;
      }
      sender = made.release();
      std::thread([sender] { sender->Run(); }).detach();
    }
    *found = sender;
    return cudaSuccess;
  }

  void Send(const CudaCopyJob& job, int me) {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back({job, me});
    changed_.notify_one();
  }

  // Waits until all copies that this device has enqueued are done.
  cudaError_t Drain() {
    const cudaError_t error = cudaStreamSynchronize(others_);
    return error != cudaSuccess ? error : cudaStreamSynchronize(own_);
  }

 private:
  explicit CopySender(int32_t ordinal) : ordinal_(ordinal) {}

  void Run() {
    cudaError_t error = cudaSetDevice(ordinal_);
    while (true) {
      std::pair<CudaCopyJob, int> next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !jobs_.empty(); });
        next = std::move(jobs_.front());
        jobs_.pop_front();
      }
      if (error == cudaSuccess) error = Enqueue(*next.first, next.second);
      if (error == cudaSuccess) {
        next.first->HasIssued();
      } else {
        next.first->Fail("the device at place " + std::to_string(next.second) +
                         " failed: " + cudaGetErrorString(error));
        error = cudaSetDevice(ordinal_);
      }
    }
  }

  cudaError_t Enqueue(const CudaCopies::Job& job, int me) {
    const CopyEvents& mine = job.posts[me].extra;
    cudaError_t error = cudaStreamWaitEvent(own_, mine.ready.get(), 0);
    for (int p = 0; p < job.count() && error == cudaSuccess; ++p)
      error = cudaStreamWaitEvent(others_, job.posts[p].extra.ready.get(), 0);
    if (error != cudaSuccess) return error;
    to_.clear(), from_.clear(), sizes_.clear();
    for (int distance = 0; distance < job.count(); ++distance) {
      const int p = (me + distance) % job.count();
      job.ForPieces(me, p, [&](const CopyPiece& piece) {
        if (error != cudaSuccess) return;
        if (piece.rows == 1 && p != me) {
          to_.push_back(piece.to), sizes_.push_back(piece.run);
          from_.push_back(const_cast<char*>(piece.from));
        } else if (piece.rows == 1) {
          error = cudaMemcpyAsync(piece.to, piece.from, piece.run, cudaMemcpyDefault, own_);
        } else {
          error = cudaMemcpy2DAsync(piece.to, piece.to_pitch, piece.from, piece.from_pitch,
                                    piece.run, piece.rows, cudaMemcpyDefault,
                                    p == me ? own_ : others_);
        }
      });
    }
    if (error == cudaSuccess) error = SendBatch();
    if (error == cudaSuccess) error = cudaEventRecord(mine.sent.get(), others_);
    return error == cudaSuccess ? cudaEventRecord(mine.kept.get(), own_) : error;
  }

  cudaError_t SendBatch() {
    static const BatchFunction batch = FindBatchFunction();
    static std::atomic<bool> works{batch != nullptr};
    if (sizes_.empty()) return cudaSuccess;
    if (works) {
      BatchAttributes attributes = {};
      attributes.source_order = 1;  // in the order of the stream
      attributes.flags = 1;         // prefer to overlap with compute
      size_t first = 0, failed = 0;
      if (batch(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes, &first, 1,
                &failed, others_) == 0)
        return cudaSuccess;
      works = false;
    }
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const cudaError_t error =
          cudaMemcpyAsync(to_[i], from_[i], sizes_[i], cudaMemcpyDefault, others_);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  const int32_t ordinal_;
  cudaStream_t others_ = nullptr, own_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<CudaCopyJob, int>> jobs_;
  std::vector<void*> to_, from_;
  std::vector<size_t> sizes_;
};

}  // namespace jdistadam
