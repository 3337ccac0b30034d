// Old shards of parameters on the CPU.

#include <cstring>

#include "keep.h"

namespace jdistadam {

void KeepCpu(const KeepCall& call) {
  if (!*call.is_kept) return;
  const size_t index = size_t(*call.index);
  if (index >= call.parts) return;
  for (const KeepLeaf& leaf : call.leaves) {
    for (size_t r = 0; r * leaf.row < leaf.size; ++r) {
      const char* source = leaf.whole + (r * call.parts + index) * leaf.row;
      std::memcpy(leaf.shard + r * leaf.row, source, leaf.row);
    }
  }
}

}  // namespace jdistadam
