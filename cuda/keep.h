// Undoes a step of which only the new shards of parameters are known: where a flag is set, each
// shard gets back what the old parameter holds in its place. Where it is not, nothing is read.
//
// A parameter of shape (outer, parts * d, inner) is cut along its middle dimension. Its shard
// `index` is outer rows of d * inner elements, each of them row `index` of `parts` that are behind
// one another in the parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jdistadam {

// Sizes in bytes: the dtype does not matter.
struct KeepLeaf {
  char* shard;
  const char* whole;
  size_t size, row;  // of the shard
};

// The pointers are device memory in the CUDA kernel.
struct KeepCall {
  const bool* is_kept;
  const int32_t* index;
  size_t parts;
  std::vector<KeepLeaf> leaves;
};

void KeepCpu(const KeepCall& call);

}  // namespace jdistadam
