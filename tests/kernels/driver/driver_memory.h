// Arrays between guard words, in host or device memory, for driver.cc.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#ifdef JDISTADAM_DRIVER_CUDA
#include <cuda_runtime_api.h>
#endif

namespace jdistadam {

constexpr size_t kGuard = 64;  // bytes before and after every array
constexpr char kGuardByte = 0x5a;
inline bool exact = false;
inline int failures = 0;

inline void Fail(const std::string& what) {
  std::printf("FAIL %s\n", what.c_str());
  ++failures;
}

#ifdef JDISTADAM_DRIVER_CUDA
inline void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("FAIL %s\n", cudaGetErrorString(status));
  std::exit(1);
}
#endif

// An array in host memory or, with `on_device`, in device memory; `shift` bytes off 16-byte
// alignment.
class Array {
 public:
  Array(const std::vector<char>& content, size_t shift, bool on_device)
      : size_(content.size()), on_device_(on_device), lead_(exact ? shift : kGuard + shift) {
    std::vector<char> all(lead_ + size_ + (exact ? 0 : kGuard), kGuardByte);
    if (size_ != 0) std::memcpy(all.data() + lead_, content.data(), size_);
    total_ = all.size();
    if (on_device_) {
#ifdef JDISTADAM_DRIVER_CUDA
      Check(cudaMalloc(&base_, total_ == 0 ? 1 : total_));
      Check(cudaMemcpy(base_, all.data(), total_, cudaMemcpyHostToDevice));
#endif
    } else {
      base_ = static_cast<char*>(std::aligned_alloc(16, (total_ + 15) / 16 * 16 + 16));
      if (exact) {  // the end of the array is the end of a block of its own
        std::free(base_);
        base_ = static_cast<char*>(std::malloc(total_ == 0 ? 1 : total_));
      }
      if (total_ != 0) std::memcpy(base_, all.data(), total_);
    }
  }
  ~Array() {
    if (!on_device_) std::free(base_);
#ifdef JDISTADAM_DRIVER_CUDA
    if (on_device_) cudaFree(base_);
#endif
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  char* data() const { return base_ + lead_; }

  // What it holds now. Reports broken guards.
  std::vector<char> Read(const std::string& name) const {
    std::vector<char> all(total_);
    if (on_device_) {
#ifdef JDISTADAM_DRIVER_CUDA
      Check(cudaMemcpy(all.data(), base_, total_, cudaMemcpyDeviceToHost));
#endif
    } else if (total_ != 0) {
      std::memcpy(all.data(), base_, total_);
    }
    for (size_t i = 0; i < total_; ++i) {
      const bool inside = i >= lead_ && i < lead_ + size_;
      if (!inside && all[i] != kGuardByte) {
        Fail(name + ": guard overwritten at byte " + std::to_string(long(i) - long(lead_)));
        break;
      }
    }
    return {all.begin() + long(lead_), all.begin() + long(lead_ + size_)};
  }

 private:
  size_t size_, total_ = 0;
  bool on_device_;
  size_t lead_;
  char* base_ = nullptr;
};

}  // namespace jdistadam
