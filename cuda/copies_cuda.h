// Copies between GPUs by their copy engines: copies.h.
//
// A start records "ready" on the stream of the program: earlier work, which may use the memory of
// the targets, is done. A thread of each device enqueues the copies into its targets, on a stream
// of its own, after "ready" of all devices, and records "read". A wait lets the stream of the
// program wait for "read" of all devices. No device waits on the host but for that threads have
// enqueued their copies.
//
// Every device reads from the one before it first, then from the one before that, and so on. If all
// begin together, each is read by one at a time, at the speed of its link. In one process, copies
// therefore begin when those before them are done on all devices.
//
// An event is recorded again only when its job has gone, so after all devices have enqueued their
// waits for it, or after its copies are done.
#pragma once

#include <cuda_runtime.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <system_error>
#include <thread>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define JDISTADAM_HAS_NVTX
#endif

#include "copies.h"

namespace jdistadam {

// An event of a device, from a pool to which it returns.
class PooledEvent {
 public:
  PooledEvent() = default;
  PooledEvent(PooledEvent&& other) noexcept { *this = std::move(other); }
  PooledEvent& operator=(PooledEvent&& other) noexcept {
    std::swap(kind_, other.kind_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~PooledEvent() {
    if (event_ == nullptr) return;
    const std::lock_guard<std::mutex> lock(Mutex());
    Free()[kind_].push_back(event_);
  }

  // Takes one of the current device; `is_shared`: that other processes can open.
  cudaError_t Take(int32_t ordinal, bool is_shared) {
    kind_ = {ordinal, is_shared};
    const std::lock_guard<std::mutex> lock(Mutex());
    std::vector<cudaEvent_t>& free = Free()[kind_];
    const unsigned flags = cudaEventDisableTiming | (is_shared ? cudaEventInterprocess : 0u);
    if (free.empty()) return cudaEventCreateWithFlags(&event_, flags);
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
  using Kind = std::pair<int32_t, bool>;  // its device, and whether it is shared
  static std::map<Kind, std::vector<cudaEvent_t>>& Free() {
    static auto* free = new std::map<Kind, std::vector<cudaEvent_t>>;
    return *free;
  }

  Kind kind_{-1, false};
  cudaEvent_t event_ = nullptr;
};

// What a start and its copies record. An event that other processes can open is for one device of a
// process: the driver crashes if another one waits for it. Devices of this process wait for plain
// events of each other, and each opens the events of other processes itself.
struct CopyEvents {
  PooledEvent ready, read, kept;          // kept: the part of itself
  PooledEvent ready_shared, read_shared;  // the same moments, for other processes if there are any
  std::map<int32_t, std::pair<cudaEvent_t, cudaEvent_t>> opened;  // of another process, by device

  cudaError_t Take(int32_t ordinal, bool is_shared) {
    cudaError_t error = cudaSuccess;
    for (PooledEvent* event : {&ready, &read, &kept})
      if (error == cudaSuccess) error = event->Take(ordinal, false);
    for (PooledEvent* event : {&ready_shared, &read_shared})
      if (error == cudaSuccess && is_shared) error = event->Take(ordinal, true);
    return error;
  }

  cudaError_t RecordReady(cudaStream_t stream) const { return Record(ready, ready_shared, stream); }
  cudaError_t RecordRead(cudaStream_t stream) const { return Record(read, read_shared, stream); }

  // For which a device of this process waits.
  cudaEvent_t ReadyFor(int32_t ordinal) const {
    return opened.empty() ? ready.get() : opened.at(ordinal).first;
  }
  cudaEvent_t ReadFor(int32_t ordinal) const {
    return opened.empty() ? read.get() : opened.at(ordinal).second;
  }

 private:
  static cudaError_t Record(const PooledEvent& event, const PooledEvent& shared,
                            cudaStream_t stream) {
    const cudaError_t error = cudaEventRecord(event.get(), stream);
    if (error != cudaSuccess || shared.get() == nullptr) return error;
    return cudaEventRecord(shared.get(), stream);
  }
};

using CudaCopies = CopyBoard<CopyEvents>;
using CudaCopyJob = CudaCopies::JobPointer;

inline CudaCopies& CudaBoard() {
  static auto* board = new CudaCopies(/*is_in_order=*/true);  // outlives threads at exit
  return *board;
}

// Copies into memory that would be released, and saved in a checkpoint, cannot be ended: the
// process ends. After errors CUDA asks for that in any case.
[[noreturn]] inline void EndProcess(int place, const std::string& why) {
  std::fprintf(stderr,
               "jdistadam: the GPU at place %d along the axis of the mesh cannot finish its "
               "copies, which may still write memory: %s. The process ends. Start it again and "
               "restore a checkpoint.\n",
               place, why.c_str());
  std::fflush(stderr);
  std::abort();
}

// Asks again and again, until the limit, whether work of a GPU is done.
template <typename Query>
cudaError_t Poll(const Query& query, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  auto pause = std::chrono::microseconds(10);
  cudaError_t error = query();
  while (error == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(1000));
    error = query();
  }
  return error;
}

// Waits until the copies of a job that all devices have started into the arrays of one are done,
// and those of others from them. Ends the process if the first are not in time: they may go on. If
// a process of the clique has died, copies that wait for its arrays never begin.
inline void DrainCopies(CudaCopies::Job& job, int me) {
  const auto grace = std::chrono::milliseconds(5000);
  const auto has_died = [&] { return job.clique != nullptr && job.clique->has_died.load(); };
  if (!job.WaitUntilSettled(me, WaitLimit()))
    EndProcess(me, "the thread that enqueues them did not come to them " + WithinLimit());
  const auto begin = std::chrono::steady_clock::now();
  const auto is_over = [&](cudaEvent_t event) {
    const cudaError_t error = cudaEventQuery(event);
    const bool is_vain = has_died() && std::chrono::steady_clock::now() - begin > grace;
    return error == cudaErrorNotReady && is_vain ? cudaSuccess : error;
  };
  for (const PooledEvent* event : {&job.posts[me].extra.read, &job.posts[me].extra.kept}) {
    if (event->get() == nullptr) continue;
    const cudaError_t error = Poll([&] { return is_over(event->get()); }, WaitLimit());
    if (error == cudaErrorNotReady) {
      std::string others;
      for (int p = 0; p < job.count(); ++p)
        if (p != me) others += (others.empty() ? "" : ", ") + job.NameOf(p);
      EndProcess(me, "they were not done " + WithinLimit() + ", and wait for " + others);
    }
    if (error != cudaSuccess && error != cudaErrorCudartUnloading)
      EndProcess(me, cudaGetErrorString(error));
  }
  const auto end = std::chrono::steady_clock::now() + grace;
  const auto left = [&] {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration_cast<std::chrono::milliseconds>(end - std::min(now, end));
  };
  for (int p = 0; p < job.count(); ++p) {
    if (p == me || !job.WaitUntilSettled(p, left())) continue;
    const CopyEvents& events = job.posts[p].extra;
    const auto any = events.opened.begin();
    const auto read = any == events.opened.end() ? events.read.get() : any->second.second;
    if (read != nullptr) (void)Poll([&] { return is_over(read); }, left());
  }
  (void)cudaGetLastError();
}

// Names for profilers: of a thread, and of what it does during the life of the object.
inline void NameThread(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
#ifdef JDISTADAM_HAS_NVTX
  nvtxNameOsThreadA(uint32_t(syscall(SYS_gettid)), name.c_str());
#endif
}

class TraceRange {
 public:
#ifdef JDISTADAM_HAS_NVTX
  explicit TraceRange(const CudaCopies::Job& job) {
    const char* kind = job.is_gather ? "jdistadam gather " : "jdistadam exchange ";
    nvtxRangePushA((kind + std::to_string(job.name.visit)).c_str());
  }
  ~TraceRange() { nvtxRangePop(); }
#else
  explicit TraceRange(const CudaCopies::Job&) {}
#endif
  TraceRange(const TraceRange&) = delete;
};

// cuMemcpyBatchAsync of CUDA 12.8, if the driver has it. Its types are not in older headers, and
// newer ones have another function of this name.
struct BatchAttributes {
  int source_order, source_kind, source_id, target_kind, target_id;
  unsigned flags;
};
using BatchFunction = int (*)(void**, void**, size_t*, size_t, BatchAttributes*, size_t*, size_t,
                              size_t*, cudaStream_t);

// A function of the driver, as of a version of CUDA; null if it has none.
inline void* FindDriverFunction(const char* name, int version) {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, unsigned(version), cudaEnableDefault, &result);
  const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
#else  // it finds functions of its own version alone, such as the one that finds all
  void* get = nullptr;
  bool is_found =
      cudaGetDriverEntryPoint("cuGetProcAddress", &get, cudaEnableDefault) == cudaSuccess &&
      get != nullptr;
  int result = 0;
  if (is_found) {
    const auto find = reinterpret_cast<int (*)(const char*, void**, int, uint64_t, int*)>(get);
    is_found = find(name, &found, version, 0, &result) == 0 && result == 0;
  }
#endif
  (void)cudaGetLastError();
  return is_found ? found : nullptr;
}

// The thread of one device that enqueues the copies into its arrays, and its streams.
class CopyReader {
 public:
  // That of a device, which is made at the first use.
  static cudaError_t Of(int32_t ordinal, CopyReader** found) {
    All& all = TheReaders();
    const std::lock_guard<std::mutex> lock(all.mutex);
    CopyReader*& reader = all.by_ordinal[ordinal];
    if (reader == nullptr) {
      if (all.are_stopped) return cudaErrorCudartUnloading;
      auto made = std::unique_ptr<CopyReader>(new CopyReader(ordinal));
      for (cudaStream_t* stream : {&made->others_, &made->own_}) {
        const cudaError_t error = cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
        if (error != cudaSuccess) return error;
      }
      try {
        made->thread_ = std::thread([reader = made.get()] { reader->Run(); });
      } catch (const std::system_error&) {
        return cudaErrorOperatingSystem;
      }
      reader = made.release();
    }
    *found = reader;
    return cudaSuccess;
  }

  // Ends all threads, after what they have to enqueue.
  static void StopAll() {
    All& all = TheReaders();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.are_stopped = true;
    for (auto& [ordinal, reader] : all.by_ordinal)
      if (reader != nullptr) reader->Stop();
  }

  cudaStream_t stream() const { return others_; }

  // After Stop, the device gives up.
  void Enqueue(const CudaCopyJob& job, int me) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped_) return job->HasGivenUp(me, FailureOf(me, "Python has ended, or is about to"));
    jobs_.push_back({job, me});
    changed_.notify_all();
  }

 private:
  struct All {
    std::mutex mutex;
    std::map<int32_t, CopyReader*> by_ordinal;
    bool are_stopped = false;
  };

  static All& TheReaders() {
    static auto* all = new All;
    return *all;
  }

  explicit CopyReader(int32_t ordinal) : ordinal_(ordinal) {}

  // A thread that hangs in the driver is left: Python ends nonetheless.
  void Stop() {
    std::unique_lock<std::mutex> lock(mutex_);
    is_stopped_ = true;
    changed_.notify_all();
    const bool has_ended = changed_.wait_for(lock, WaitLimit(), [&] { return has_ended_; });
    lock.unlock();
    if (thread_.joinable()) has_ended ? thread_.join() : thread_.detach();
  }

  void Run() {
    NameThread("jda copies " + std::to_string(ordinal_));
    while (true) {
      std::pair<CudaCopyJob, int> next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return is_stopped_ || !jobs_.empty(); });
        if (jobs_.empty()) {
          has_ended_ = true;
          changed_.notify_all();
          return;
        }
        next = std::move(jobs_.front());
        jobs_.pop_front();
      }
      Handle(*next.first, next.second);
      last_ = std::move(next.first);
    }
  }

  // If it fails, what it has enqueued is done before others know.
  void Handle(CudaCopies::Job& job, int me) {
    const TraceRange range(job);
    if (job.clique != nullptr && job.clique->has_died)  // its copies would wait for ever
      return job.HasGivenUp(me, FailureOf(me, "another process has died"));
    cudaError_t error = cudaSetDevice(ordinal_);
    if (error == cudaSuccess) error = EnqueueAll(job, me);
    if (error == cudaSuccess) return job.HasIssued(me);
    (void)cudaGetLastError();
    const std::string why = FailureOf(me, cudaGetErrorString(error));
    for (const cudaStream_t stream : {others_, own_}) {
      const cudaError_t done = Poll([&] { return cudaStreamQuery(stream); }, WaitLimit());
      if (done != cudaSuccess && done != cudaErrorCudartUnloading)
        EndProcess(me, cudaGetErrorString(done));
    }
    CudaBoard().Fail(job.scope, why);
    job.HasGivenUp(me, why);
  }

  cudaError_t EnqueueAll(const CudaCopies::Job& job, int me) {
    const CopyEvents& mine = job.posts[me].extra;
    cudaError_t error = cudaStreamWaitEvent(own_, mine.ready.get(), 0);
    for (int p = 0; p < job.count() && error == cudaSuccess; ++p)
      error = cudaStreamWaitEvent(others_, job.posts[p].extra.ReadyFor(ordinal_), 0);
    if (error == cudaSuccess) error = WaitForLast();
    if (error != cudaSuccess) return error;
    to_.clear(), from_.clear(), sizes_.clear();
    for (int distance = 0; distance < job.count(); ++distance) {
      const int p = (me + job.count() - distance) % job.count();
      job.ForPieces(p, me, [&](const CopyPiece& piece) {
        if (error != cudaSuccess) return;
        if (piece.rows == 1 && p != me) {
          to_.push_back(piece.to), sizes_.push_back(piece.run);
          from_.push_back(const_cast<char*>(piece.from));
        } else if (piece.rows == 1) {
          error = cudaMemcpyAsync(piece.to, piece.from, piece.run, cudaMemcpyDefault, own_);
        } else {
          error =
              cudaMemcpy2DAsync(piece.to, piece.to_pitch, piece.from, piece.from_pitch, piece.run,
                                piece.rows, cudaMemcpyDefault, p == me ? own_ : others_);
        }
      });
    }
    if (error == cudaSuccess) error = EnqueueBatch();
    if (error == cudaSuccess) error = mine.RecordRead(others_);
    return error == cudaSuccess ? cudaEventRecord(mine.kept.get(), own_) : error;
  }

  // Lets copies begin after the last ones of all devices. Only speed depends on it: readers may get
  // jobs of two executions in different orders, so none waits long for another one. Other processes
  // may have recorded their events again.
  cudaError_t WaitForLast() {
    if (last_ == nullptr || last_->clique != nullptr) return cudaSuccess;
    if (!last_->IsIssued(std::chrono::milliseconds(1))) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    for (int p = 0; p < last_->count() && error == cudaSuccess; ++p)
      error = cudaStreamWaitEvent(others_, last_->posts[p].extra.read.get(), 0);
    return error;
  }

  cudaError_t EnqueueBatch() {
    static const auto batch =
        reinterpret_cast<BatchFunction>(FindDriverFunction("cuMemcpyBatchAsync", 12080));
    static std::atomic<bool> works{batch != nullptr};
    if (sizes_.empty()) return cudaSuccess;
    if (works) {
      BatchAttributes attributes = {};
      attributes.source_order = 1;  // in the order of the stream
      attributes.flags = 1;         // prefer to overlap with compute
      size_t first = 0, failed = 0;
      const auto error =  // drivers and runtimes number errors alike
          cudaError_t(batch(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes,
                            &first, 1, &failed, others_));
      if (error != cudaErrorNotSupported) return error;
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
  bool is_stopped_ = false, has_ended_ = false;
  CudaCopyJob last_;  // keeps its events
  std::thread thread_;
  std::vector<void*> to_, from_;
  std::vector<size_t> sizes_;
};

// Times copies from one GPU to another.
class LinkProbe {
 public:
  LinkProbe(int from, int to) : from_(from), to_(to) { (void)cudaGetDevice(&before_); }

  ~LinkProbe() {
    for (void* memory : {source_, target_})
      if (memory != nullptr) (void)cudaFree(memory);
    for (const cudaEvent_t event : {begin_, end_})
      if (event != nullptr) (void)cudaEventDestroy(event);
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
    (void)cudaSetDevice(before_);
    (void)cudaGetLastError();
  }

  // Returns GB/s, the most of a few copies; 0 if it fails, as where memory is lacking; -1 if copies
  // bring other values.
  double Measure() {
    if (Prepare() != cudaSuccess) return 0;
    float least = 0;
    for (int i = 0; i < 4; ++i) {
      float ms = 0;
      if (Time(&ms) != cudaSuccess) return 0;
      if (i == 1 || (i > 1 && ms < least)) least = ms;  // the first one warms up
    }
    bool is_right = true;
    if (Check(&is_right) != cudaSuccess) return 0;
    if (!is_right) return -1;
    return least > 0 ? double(kBytes) / 1e6 / double(least) : 0;
  }

 private:
  static constexpr size_t kBytes = size_t{64} << 20;
  static constexpr int kValue = 0x5a;

  cudaError_t Prepare() {
    cudaError_t error = cudaSetDevice(to_);
    if (error == cudaSuccess) error = cudaMalloc(&target_, kBytes);
    if (error == cudaSuccess) error = cudaMemset(target_, 0, kBytes);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaSetDevice(from_);
    if (error == cudaSuccess) error = cudaDeviceEnablePeerAccess(to_, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
    if (error == cudaSuccess) error = cudaMalloc(&source_, kBytes);
    if (error == cudaSuccess) error = cudaMemset(source_, kValue, kBytes);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaEventCreate(&begin_);
    return error == cudaSuccess ? cudaEventCreate(&end_) : error;
  }

  cudaError_t Check(bool* is_right) {
    std::vector<char> found(kBytes);
    const cudaError_t error = cudaMemcpy(found.data(), target_, kBytes, cudaMemcpyDefault);
    *is_right = std::all_of(found.begin(), found.end(), [](char x) { return x == kValue; });
    return error;
  }

  cudaError_t Time(float* ms) {
    cudaError_t error = cudaEventRecord(begin_, stream_);
    if (error == cudaSuccess)
      error = cudaMemcpyPeerAsync(target_, to_, source_, from_, kBytes, stream_);
    if (error == cudaSuccess) error = cudaEventRecord(end_, stream_);
    if (error == cudaSuccess) error = cudaEventSynchronize(end_);
    return error == cudaSuccess ? cudaEventElapsedTime(ms, begin_, end_) : error;
  }

  const int from_, to_;
  int before_ = 0;
  void *source_ = nullptr, *target_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace jdistadam
