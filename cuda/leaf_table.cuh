// One launch for many leaves: a table by value in the kernel's parameters, one tile per block.
//
// A table in device memory would need a copy, which is fragile in CUDA graphs. Every block works on
// one tile of one leaf, found by binary search, so leaf sizes do not matter.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace jdistadam {

constexpr int kSmallTable = 60;   // fits the classic 4 KiB of kernel parameters
constexpr int kLargeTable = 500;  // fits the 32 KiB of CUDA 12.1 and later
constexpr size_t kMaxParameterBytes = 32764;
constexpr size_t kMaxTiles = (size_t{1} << 31) - 1;  // blocks in one launch

template <typename Leaf, int kCapacity>
struct LeafTable {
  Leaf leaves[kCapacity];
  uint32_t end[kCapacity];  // tiles of this leaf and all before it
  int count;
};

// The tile of block `tile`: index of its leaf, and of the tile in the leaf.
struct TileIndex {
  int leaf;
  uint32_t tile;
};

template <typename Leaf, int kCapacity>
__device__ __forceinline__ TileIndex FindTile(const LeafTable<Leaf, kCapacity>& table,
                                              uint32_t tile) {
  int low = 0, high = table.count - 1;
  while (low < high) {  // the first leaf whose end is beyond `tile`
    const int middle = (low + high) / 2;
    if (table.end[middle] > tile) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return {low, low == 0 ? tile : tile - table.end[low - 1]};
}

// Calls launch(table, number of tiles), which launches a kernel, for as few tables as hold all
// leaves that are not empty. `launch` takes a table of either capacity; they may be equal.
template <typename Leaf, int kSmall = kSmallTable, int kLarge = kLargeTable, typename Leaves,
          typename Launch>
cudaError_t ForEachTable(const Leaves& leaves, size_t tile_size, const Launch& launch) {
  LeafTable<Leaf, kLarge> table;
  size_t tiles = 0;
  table.count = 0;
  const auto flush = [&]() -> cudaError_t {
    if (table.count == 0) return cudaSuccess;
    const auto num_tiles = static_cast<uint32_t>(tiles);
    if (kSmall < kLarge && table.count <= kSmall) {
      LeafTable<Leaf, kSmall> small;
      for (int i = 0; i < table.count; ++i) {
        small.leaves[i] = table.leaves[i];
        small.end[i] = table.end[i];
      }
      small.count = table.count;
      launch(small, num_tiles);
    } else {
      launch(table, num_tiles);
    }
    table.count = 0;
    tiles = 0;
    return cudaGetLastError();
  };
  for (const Leaf& leaf : leaves) {
    if (leaf.size == 0) continue;  // it has no tile
    const size_t mine = (leaf.size + tile_size - 1) / tile_size;
    if (mine > kMaxTiles) return cudaErrorInvalidValue;  // beyond the memory of any device
    if (table.count == kLarge || tiles + mine > kMaxTiles) {
      if (const cudaError_t error = flush(); error != cudaSuccess) return error;
    }
    tiles += mine;
    table.leaves[table.count] = leaf;
    table.end[table.count++] = static_cast<uint32_t>(tiles);
  }
  return flush();
}

}  // namespace jdistadam
