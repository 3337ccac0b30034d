// Parts of arrays in host memory, and where they are copied on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jdistadam {

struct HostCopy {
  int32_t index;
  bool to_host;
  struct Part {
    char* host;
    char* device;
    size_t bytes;
  };
  std::vector<Part> parts;
};

}  // namespace jdistadam
