// One Adam step with coded moments or stochastic rounding (rounding.h): the interface between the
// kernels and the FFI handlers.
#pragma once

#include <vector>

#include "adam.h"
#include "rounding.h"

namespace jdistadam {

// How an array is cut along one dimension: a part of it has pieces of `piece` elements, one every
// `whole_piece` elements of the uncut array.
struct Cut {
  uint64_t piece, whole_piece;
};

// A leaf or a part of it, with the data that Leaf lacks. If a moment is coded, a part consists of
// whole blocks with one scale each; only the last block of a whole leaf may be incomplete. Pieces
// are whole blocks, too, unless there is only one.
struct QuantizedLeaf : Leaf {
  float* mu_scales;
  float* nu_scales;
  // Several leaves in one, each padded to whole blocks: the leaf id of each block and its number
  // in that leaf, in device memory in the CUDA kernel. Null: one leaf, given by the fields below.
  const uint32_t* table;
  Cut cuts[2];    // of the whole leaf by the second, then by the first; `parts` has the parts
  uint32_t id;    // of the whole leaf
  uint32_t slot;  // of the call: the index of its parts in `parts`
};

// AdamCall's Dtypes may be codes for mu and nu. With `is_stochastic`, mu and nu of 8 or 16 bits are
// rounded stochastically, and so are parameters of 16 bits in Mode::kStep; `out` always to nearest.
// A skipped step uses no random bits: they depend on the count, which then does not change.
struct QuantizedCall {
  AdamCall adam;  // without leaves
  bool is_stochastic;
  const uint32_t* key;   // [2], device memory in the CUDA kernel
  const int32_t* count;  // steps taken before this one
  const int32_t* parts;  // [leaves][2]: each leaf's parts of the cuts; likewise
  std::vector<QuantizedLeaf> leaves;
};

// The position of an element: the number of the whole leaf, and its row-major index there.
struct Origin {
  uint32_t id;
  uint64_t index;
};

// Divides in 32 bits if that is enough, because a GPU has no 64-bit division.
JDISTADAM_INLINE uint64_t BeforeCut(const Cut& cut, uint64_t part, uint64_t i) {
  const uint64_t start = part * cut.piece;
  if (i < cut.piece) return start + i;
  uint64_t row = 0;
  if ((i | cut.piece) >> 32 == 0) {
    row = static_cast<uint32_t>(i) / static_cast<uint32_t>(cut.piece);
  } else {
    row = i / cut.piece;
  }
  return row * cut.whole_piece + start + (i - row * cut.piece);
}

// Elements up to the end of a block of 128 are contiguous in the whole leaf as well.
JDISTADAM_INLINE Origin OriginOf(const int32_t* parts, const QuantizedLeaf& leaf, uint64_t i) {
  if (leaf.table != nullptr) {
    const uint32_t* entry = leaf.table + i / kBlockSize * 2;
    return {entry[0], uint64_t{entry[1]} * kBlockSize + i % kBlockSize};
  }
  const int32_t* part = parts + 2 * size_t{leaf.slot};
  const uint64_t local = BeforeCut(leaf.cuts[0], static_cast<uint64_t>(part[0]), i);
  return {leaf.id, BeforeCut(leaf.cuts[1], static_cast<uint64_t>(part[1]), local)};
}

void QuantizedCpu(const QuantizedCall& call, const Threads& threads);

}  // namespace jdistadam
