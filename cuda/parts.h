// A step of Adam on gradients of which parts of several devices have arrived: the interface between
// the kernels and the FFI handlers.
//
// A device owns one shard of each leaf. It adds this shard of the gradients of all devices, and
// updates its part of the state:
//
//   sum    <- part of device 0 + ... + part of device n - 1       pairwise (pairwise.h), float32
//   main, mu, nu <- Adam of sum * inv_scale                       adam_math.h
//   out    <- main, rounded
//
// A leaf of shape (rows, n * d, inner) is cut along its middle dimension: shard `me` is `rows` runs
// of run = d * inner elements, each of them run `me` of n contiguous runs in the leaf. The device's
// own gradient is the whole leaf; the parts of the others, and flat arrays of the state, hold the
// runs of a shard without gaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "norm.h"
#include "parallel.h"

namespace jdistadam {

// What a call does.
enum class PartsWork {
  kSum,         // sum <- parts; and their norm
  kStep,        // the whole step; and the norm of the sums, for callers that want it
  kStepOnSums,  // the step on the result of kSum; the norm was taken in between
};

// One leaf. Null if a call does not use it.
struct PartsLeaf {
  const void* own;       // the gradient of this device, whole
  const void* received;  // the parts of the others: (n - 1, size), in the order of the devices
  float* sum;            // a shard, without gaps
  float* main;
  void* mu;
  void* nu;
  void* out;    // the new parameter
  size_t size;  // elements of a shard
  size_t run;
  size_t first_tile;  // of the norm: tiles of all leaves before
  int32_t group;      // row of the coefficients
};

struct PartsDtypes {
  Dtype grad, mu, nu, out;
};

// The pointers are device memory in the CUDA kernels. `norm_scale` and `tiles` are for the norm,
// which kStepOnSums does not take.
struct PartsCall {
  PartsWork work;
  int32_t flags;  // of adam_math.h
  PartsDtypes dtypes;
  int32_t count, me;  // of devices; the place of this one
  bool is_out_whole;  // whether `out` is the whole leaf, of which the shard is written
  const float* coefficients;
  const float* inv_scale;
  const bool* found_inf;
  const float* norm_scale;  // multiplies the sums before they are squared
  TileNorm* tiles;
  size_t num_tiles;
  std::vector<PartsLeaf> leaves;
};

// The position of element i of shard `me` in the whole leaf.
JDISTADAM_INLINE size_t WholeIndex(size_t size, size_t run, int count, int me, size_t i) {
  if (run == size) return size_t(me) * size + i;
  const size_t row = size < (size_t{1} << 32) ? uint32_t(i) / uint32_t(run) : i / run;
  return row * run * size_t(count) + size_t(me) * run + (i - row * run);
}

// Where the part of device k has element i of the shard, which is element `whole` of the leaf.
struct Term {
  const void* base;
  size_t i;
};
JDISTADAM_INLINE Term TermOf(const PartsLeaf& leaf, int me, int k, size_t i, size_t whole) {
  if (k == me) return {leaf.own, whole};
  return {leaf.received, size_t(k < me ? k : k - 1) * leaf.size + i};
}

void PartsCpu(const PartsCall& call, const Threads& threads);

}  // namespace jdistadam
