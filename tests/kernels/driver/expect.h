// Expectations of the drivers of copies, and their end.
#pragma once

#include <atomic>
#include <cstdio>
#include <string>

namespace jdistadam {

inline std::atomic<int> failures{0};
inline bool planted = false;  // --plant: a fault that must be seen

inline void Expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAIL %s\n", what.c_str());
  ++failures;
}

inline bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace jdistadam
