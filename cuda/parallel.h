// Tasks shared between the calling thread and a pool, on the CPU.
//
// threads   No result depends on their number: tasks share no data.
// denormals XLA runs handlers with flush-to-zero on; CUDA and reference.py keep denormals. Each
//           task therefore runs with flushing off, and the caller's setting is restored.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jdistadam {

// The number of threads, and a way to run a task soon, perhaps on another thread.
struct Threads {
  int count;
  std::function<void(std::function<void()>)> schedule;
};

// Turns flush-to-zero and denormals-are-zero off for a scope.
class KeepDenormals {
 public:
#if defined(__x86_64__)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// The calling thread and helpers take tasks from a shared counter. The caller never waits for a
// helper that has not started (a full pool could then deadlock): it works until the counter runs
// out, and then waits only for tasks in progress. A helper that starts late finds the counter
// exhausted and touches only this shared object.
class SharedTasks {
 public:
  SharedTasks(size_t size, std::function<void(size_t)> task)
      : size_(size), task_(std::move(task)) {}

  void Run() {
    size_t mine = 0;
    for (size_t i; (i = next_.fetch_add(1)) < size_; ++mine) {
      const KeepDenormals keep_denormals;
      task_(i);
    }
    if (mine == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ += mine;
    if (done_ == size_) all_done_.notify_all();
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == size_; });
  }

 private:
  const size_t size_;
  const std::function<void(size_t)> task_;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
  size_t done_ = 0;  // guarded by mutex_
};

// Runs task(0) ... task(size - 1) and returns when all are done.
inline void ParallelFor(size_t size, const Threads& threads, std::function<void(size_t)> task) {
  auto tasks = std::make_shared<SharedTasks>(size, std::move(task));
  const size_t helpers = std::min<size_t>(std::max(threads.count - 1, 0), size / 2);
  for (size_t i = 0; i < helpers; ++i) threads.schedule([tasks] { tasks->Run(); });
  tasks->Run();
  tasks->Wait();
}

// Runs task(leaf, begin, end) for all tiles, elements [begin, end) of leaf number `leaf`.
template <typename Leaf, typename Task>
void ForEachTile(const std::vector<Leaf>& leaves, size_t tile_size, const Threads& threads,
                 const Task& task) {
  struct Tile {
    size_t leaf, begin;
  };
  std::vector<Tile> tiles;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    for (size_t begin = 0; begin < leaves[leaf].size; begin += tile_size)
      tiles.push_back({leaf, begin});
  }
  ParallelFor(tiles.size(), threads, [&](size_t t) {
    const auto [leaf, begin] = tiles[t];
    task(leaf, begin, std::min(begin + tile_size, leaves[leaf].size));
  });
}

}  // namespace jdistadam
